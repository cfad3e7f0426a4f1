"""Regression by a Bayesian neural network."""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils import check_array, check_X_y
from torch import Tensor

from skksivi._utils.arrays import as_tensor, check_sample_weight, location_and_scale
from skksivi._utils.checks import check_integer
from skksivi.targets._base import Target, check_hyperprior, check_positive

#: Hidden units, of all rows and draws, that are worked on at a time: few enough for a cache.
PART = 2**19


class BayesianNeuralNetwork(Target):
    r"""The posterior of the weights of a regression network with one hidden layer of ReLU units.

    .. math::
        f(x) &= w^\top \max(0, W^\top x + b_1) + b_2, \\
        y_i &\sim N(f(x_i), 1/\gamma), \qquad \theta = (W, b_1, w, b_2) \sim N(0, I/\lambda)

    .. math::
        \log p(\theta | X, y) = -\frac{\gamma}{2} \sum_{i=1}^n (y_i - f(x_i))^2 - \frac{\lambda}{2} \|\theta\|^2
        + \mathrm{const}

    Every column of X, and y, are first standardised; predictions are made in the units of y. With p columns and k
    hidden units there are (p + 1) k + k + 1 weights. Each row of draws holds W row by row, shape (p, k), then
    :math:`b_1`, w and :math:`b_2`.

    With `hyperprior` = (a, b) precisions that are not given are unknown, with independent priors Gamma(a, b), and the
    last of the parameters, of both :math:`\log \lambda` and :math:`\log \gamma`:

    .. math::
        \log p(\theta, \log\lambda, \log\gamma | X, y) = &\log p(\theta | X, y) + \frac{n}{2} \log\gamma
        + \frac{D}{2} \log\lambda \\
        &+ a (\log\lambda + \log\gamma) - b (\lambda + \gamma) + \mathrm{const}

    with D the number of weights. The power of the Gamma densities is a, not a - 1, by the Jacobian of the logarithm.
    Beware of an unknown :math:`\lambda`: with weights near zero and :math:`\lambda` as large as its prior lets it be
    the density is higher than at any network.

    Parameters
    ----------
    X : array-like of shape (n, p)
        Inputs, in any units.
    y : array-like of shape (n,)
        Outputs, in any units.
    n_hidden : int, default=50
        Number k of hidden units.
    prior_precision : float, default=None
        The :math:`\lambda > 0` of the formula; 1 by default, where there is no `hyperprior`.
    noise_precision : float, default=None
        Precision of the noise of y, in the units of :math:`1/y^2`; :math:`\gamma` is this times the variance of y.
        By default a tenth of the variance of y is noise, where there is no `hyperprior`.
    hyperprior : pair of float, default=None
        Shape a > 0 and rate b > 0 of the Gamma priors of precisions that are not given; :math:`\gamma` refers to the
        standardised y. The literature has (1.0, 0.1).
    sample_weight : array-like of shape (n,), default=None
        How often each observation counts.

    Attributes
    ----------
    noise_precision : float or None
        It may be changed at any time.
    X_mean, X_scale : Tensor of shape (p,)
        By which X was standardised; a constant column has scale one.
    y_mean, y_scale : Tensor of shape ()
        By which y was standardised.

    Raises
    ------
    TypeError, ValueError
        X and y do not fit together or are not finite; `n_hidden` is not a positive integer; a precision, a shape or a
        rate is not positive; or both precisions are given beside `hyperprior`.

    See Also
    --------
    skksivi.KSIVIRegressor : Regression with a posterior inside.
    BayesianLinearRegression : Linear regression.

    References
    ----------
    Liu, Q. and Wang, D. (2016). Stein variational gradient descent. https://arxiv.org/abs/1608.04471

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from skksivi.targets import BayesianNeuralNetwork
    >>> X = np.random.RandomState(0).normal(size=(30, 2))
    >>> target = BayesianNeuralNetwork(X, X[:, 0] ** 2, n_hidden=5)
    >>> target.n_features
    21
    >>> draws = np.random.RandomState(1).normal(size=(100, 21))
    >>> target.predict(draws, X).shape
    (30,)
    """

    up_to_constant = True

    def __init__(
        self,
        X: ArrayLike,
        y: ArrayLike,
        *,
        n_hidden: int = 50,
        prior_precision: float | None = None,
        noise_precision: float | None = None,
        hyperprior: tuple[float, float] | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> None:
        X, y = check_X_y(X, y, dtype=np.float64, y_numeric=True)
        w = check_sample_weight(sample_weight, len(y))
        _check(n_hidden, {"prior_precision": prior_precision, "noise_precision": noise_precision}, hyperprior)
        self.n_hidden = int(n_hidden)
        self.hyperprior = hyperprior
        self.X_mean, self.X_scale = map(as_tensor, location_and_scale(X, w))
        self.y_mean, self.y_scale = map(as_tensor, location_and_scale(y, w))
        self._X = self._standardise(as_tensor(X))
        self._y = (as_tensor(y, dtype=torch.float64) - self.y_mean) / self.y_scale
        self.n_rows = len(y)
        self._n_weights = self._X.shape[1] * self.n_hidden + self.n_hidden + 1
        self._is_learned = [hyperprior is not None and given is None for given in (prior_precision, noise_precision)]
        self.n_features = self._n_weights + sum(self._is_learned)
        self._weight = 1.0  # of all observations
        self._w = None if sample_weight is None else as_tensor(w)
        self._variance = float(self.y_scale) ** 2
        self.prior_precision = prior_precision
        self.noise_precision = noise_precision
        if hyperprior is not None:  # the shapes of the Gamma distributions of the precisions, given all else
            self._shapes = [float(hyperprior[0]) + n / 2 for n in (self._n_weights, w.sum())]
            return
        if prior_precision is None:
            self.prior_precision = 1.0
        if noise_precision is None:
            self.noise_precision = 10.0 / self._variance  # a tenth of the variance is noise

    def subset(self, rows: Tensor) -> Self:
        """Return the posterior of some of the observations, each counted n_rows / len(rows) times."""
        w = None if self._w is None else self._w[rows]
        return self._replaced(_X=self._X[rows], _y=self._y[rows], _w=w, _weight=self.n_rows / len(rows))

    # The posterior

    def log_prob(self, theta: Tensor) -> Tensor:
        """Evaluate log p at each row of theta (n, d), up to a constant."""
        parts = [self._part_log_prob(part) for part in self._parts(theta, len(self._y))]
        return torch.cat(parts).view(theta.shape[:-1])

    def score_fn(self, theta: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of theta (n, d)."""
        return torch.cat([self._part_vjp(part)[0] for part in self._parts(theta, len(self._y))]).view(theta.shape)

    def score_vjp(self, theta: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the score at theta and the product with its symmetric Jacobian."""
        scores, products = zip(*map(self._part_vjp, self._parts(theta, len(self._y))), strict=True)

        def vjp(v: Tensor) -> Tensor:
            parts = zip(products, self._parts(v, len(self._y)), strict=True)
            return torch.cat([product(part) for product, part in parts]).view(v.shape)

        return torch.cat(scores).view(theta.shape), vjp

    def _parts(self, theta: Tensor, n_rows: int) -> tuple[Tensor, ...]:
        """Flatten the batch axes of theta (..., d), and split it into parts whose hidden units fit a cache."""
        return theta.reshape(-1, self.n_features).split(max(1, PART // (n_rows * self.n_hidden)))

    def _precisions(self, theta: Tensor) -> list[float | Tensor]:
        """Return lambda and gamma, of shape (n, 1) where they are learned."""
        lam, gam = (0.0 if given is None else given for given in (self.prior_precision, self.noise_precision))
        return self._filled((lam, gam * self._variance), theta[:, self._n_weights :].exp())

    def _filled(self, known: tuple[float, float], learned: Tensor) -> list[float | Tensor]:
        """Return what belongs to lambda and to gamma: a column of `learned` if that is learned, or else as known."""
        columns = iter(learned.split(1, -1))
        return [next(columns) if is_learned else k for is_learned, k in zip(self._is_learned, known, strict=True)]

    def _part_log_prob(self, theta: Tensor) -> Tensor:
        X, y = self._X.to(theta), self._y.to(theta)
        weights, (lam, gam) = theta[:, : self._n_weights], self._precisions(theta)
        squares = (y.unsqueeze(-1) - _outputs(X, weights, self.n_hidden)).square()
        error = (squares if self._w is None else self._w.to(theta)[:, None] * squares).sum(0).unsqueeze(-1)
        log_prob = -(gam * self._weight * error + lam * weights.square().sum(-1, keepdim=True)) / 2
        if self.hyperprior is not None:
            logs = self._filled((0.0, 0.0), theta[:, self._n_weights :])
            terms = zip(self._shapes, logs, (lam, gam), strict=True)
            for a, log_precision, precision in compress(terms, self._is_learned):
                log_prob = log_prob + a * log_precision - self.hyperprior[1] * precision
        return log_prob.squeeze(-1)

    def _part_vjp(self, theta: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Add prior and precisions to the gradient G of minus half the squared error, and to its Hessian."""
        X, y = self._X.to(theta), self._y.to(theta)
        weights, (lam, gam) = theta[:, : self._n_weights], self._precisions(theta)
        half_error, G, hessian = half_squared_error(X, y, weights, self.n_hidden, self._w)
        strength = gam * self._weight
        s = strength * G - lam * weights
        if self.hyperprior is None:
            return s, lambda v: strength * hessian(v) - lam * v
        (a_lam, a_gam), (_, b) = self._shapes, self.hyperprior
        size, error = weights.square().sum(-1, keepdim=True) / 2 + b, half_error * self._weight + b
        s_precisions = compress((a_lam - lam * size, a_gam - gam * error), self._is_learned)

        def vjp(v: Tensor) -> Tensor:
            v, v_lam, v_gam = v[:, : self._n_weights], *self._filled((0.0, 0.0), v[:, self._n_weights :])
            of_weights = strength * (hessian(v) + v_gam * G) - lam * (v + v_lam * weights)
            of_lam = -lam * ((weights * v).sum(-1, keepdim=True) + size * v_lam)
            of_gam = strength * (G * v).sum(-1, keepdim=True) - gam * error * v_gam
            return torch.cat([of_weights, *compress((of_lam, of_gam), self._is_learned)], -1)

        return torch.cat([s, *s_precisions], -1), vjp

    # What it predicts

    def outputs(self, draws: ArrayLike | Tensor, X: ArrayLike) -> np.ndarray:
        """Evaluate the network of each draw at each row of X.

        Parameters
        ----------
        draws : array-like or Tensor of shape (n_draws, n_features)
        X : array-like of shape (n, p)
            In the units of the X of the data.

        Returns
        -------
        outputs : ndarray of shape (n_draws, n)
            In the units of y, without noise.
        """
        theta, x = self._check_draws(draws), self._check_inputs(X)
        f = outputs_of_networks(x, theta[:, : self._n_weights], self.n_hidden)
        return (self.y_mean + self.y_scale * f.mT).cpu().numpy()

    def predict(self, draws: ArrayLike | Tensor, X: ArrayLike) -> np.ndarray:
        """Return the mean over draws at each row of X.

        Parameters
        ----------
        draws : array-like or Tensor of shape (n_draws, n_features)
        X : array-like of shape (n, p)

        Returns
        -------
        mean : ndarray of shape (n,)
            In the units of y.
        """
        return self.outputs(draws, X).mean(0)

    def predictive_sd(self, draws: ArrayLike | Tensor, X: ArrayLike) -> np.ndarray:
        """Return the standard deviation of a new y at each row of X: the spread of the draws, and the noise.

        Parameters
        ----------
        draws : array-like or Tensor of shape (n_draws, n_features)
        X : array-like of shape (n, p)

        Returns
        -------
        sd : ndarray of shape (n,)
            In the units of y.
        """
        return np.sqrt(self.outputs(draws, X).var(0) + (1 / self._predictive_precision(draws)).mean())

    def log_predictive(self, draws: ArrayLike | Tensor, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        r"""Return the log-density of each y under the mixture over the S draws.

        .. math:: \log \frac{1}{S} \sum_{s=1}^S N(y; f_s(x), 1/\gamma_s)

        Parameters
        ----------
        draws : array-like or Tensor of shape (n_draws, n_features)
        X : array-like of shape (n, p)
        y : array-like of shape (n,)

        Returns
        -------
        log_density : ndarray of shape (n,)
            For y in its own units.
        """
        f, y = self.outputs(draws, X), _check_outputs(X, y)
        return log_normal_mixture(y, f, 1 / self._predictive_precision(draws))

    def rmse(self, draws: ArrayLike | Tensor, X: ArrayLike, y: ArrayLike) -> float:
        """Return the root mean squared error of the mean over draws, in the units of y.

        Parameters
        ----------
        draws : array-like or Tensor of shape (n_draws, n_features)
        X : array-like of shape (n, p)
        y : array-like of shape (n,)

        Returns
        -------
        error : float
        """
        return float(np.sqrt(np.mean((self.predict(draws, X) - _check_outputs(X, y)) ** 2)))

    def nll(self, draws: ArrayLike | Tensor, X: ArrayLike, y: ArrayLike) -> float:
        """Return minus the mean of `log_predictive`, in nats, for y in its own units.

        Parameters
        ----------
        draws : array-like or Tensor of shape (n_draws, n_features)
        X : array-like of shape (n, p)
        y : array-like of shape (n,)

        Returns
        -------
        nll : float
        """
        return float(-self.log_predictive(draws, X, y).mean())

    def _predictive_precision(self, draws: ArrayLike | Tensor) -> np.ndarray:
        """Return the noise precision of y in its own units, shape (n_draws, 1), or (1, 1) where it was given."""
        if not self._is_learned[1]:
            return np.full((1, 1), self.noise_precision)
        return self._check_draws(draws)[:, -1:].exp().cpu().numpy() / self._variance

    def _standardise(self, X: Tensor) -> Tensor:
        """Standardise X (n, p) and add a column of ones."""
        return torch.cat([(X - self.X_mean) / self.X_scale, torch.ones_like(X[:, :1])], 1)

    def _check_draws(self, draws: ArrayLike | Tensor) -> Tensor:
        theta = as_tensor(draws, dtype=self._X.dtype, device=self._X.device)
        if theta.ndim != 2 or theta.shape[1] != self.n_features or not len(theta):
            raise ValueError(
                f"`draws` has shape {tuple(theta.shape)}, expected (n_draws, {self.n_features}) with n_draws >= 1."
            )
        return theta

    def _check_inputs(self, X: ArrayLike) -> Tensor:
        x = as_tensor(check_array(X, dtype=np.float64), dtype=self._X.dtype, device=self._X.device)
        if x.shape[1] != len(self.X_mean):
            raise ValueError(f"`X` has {x.shape[1]} columns, expected {len(self.X_mean)} as the data.")
        return self._standardise(x)


# Networks: theta (n, d) holds n of them, X (m, p + 1) ends in a column of ones, hidden units are (m, n, k), so that
# one product with X serves all networks.


def half_squared_error(
    X: Tensor, y: Tensor, theta: Tensor, k: int, weight: Tensor | None
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Return half the squared error (n, 1) of n networks, minus its gradient, and minus the product with its Hessian.

    Rows may have weights (m,).

    The last is a function of v (n, d); gradient and product are of shape (n, d).
    """
    W, w, b = _split(theta, k)
    h = _hidden(X, W).relu_()
    error = y.unsqueeze(-1) - b - (h * w).sum(-1)
    of_rows = None if weight is None else weight.to(X).unsqueeze(-1)
    e = error if of_rows is None else of_rows * error
    # of (a, h, 0): a where h > 0, else 0, in one pass
    where_on = torch.ops.aten.threshold_backward

    def joined(dh: Tensor, dw: Tensor, db: Tensor) -> Tensor:
        dW = (X.mT @ dh.flatten(1)).view(X.shape[1], *dw.shape).transpose(0, 1)
        return torch.cat([dW.flatten(1), dw, db.unsqueeze(-1)], -1)

    gradient = joined(where_on(e.unsqueeze(-1) * w, h, 0), (e.unsqueeze(-1) * h).sum(0), e.sum(0))

    def hessian(v: Tensor) -> Tensor:
        V, v_w, v_b = _split(v, k)
        h_v = where_on(_hidden(X, V), h, 0)
        e_v = ((h * v_w).addcmul_(h_v, w).sum(-1)).add_(v_b).neg_()
        if of_rows is not None:
            e_v.mul_(of_rows)
        dh_v = where_on((e_v.unsqueeze(-1) * w).addcmul_(e.unsqueeze(-1), v_w), h, 0)
        dw_v = h_v.mul_(e.unsqueeze(-1)).addcmul_(h, e_v.unsqueeze(-1)).sum(0)
        return joined(dh_v, dw_v, e_v.sum(0))

    return (e * error).sum(0).unsqueeze(-1) / 2, gradient, hessian


def outputs_of_networks(X: Tensor, theta: Tensor, k: int) -> Tensor:
    """Return the outputs (m, n) of n networks, some of them at a time."""
    parts = theta.split(max(1, PART // (len(X) * k)))
    return torch.cat([_outputs(X, part, k) for part in parts], -1)


def _outputs(X: Tensor, theta: Tensor, k: int) -> Tensor:
    """Return the outputs (m, n) of n networks."""
    W, w, b = _split(theta, k)
    return (_hidden(X, W).relu_() * w).sum(-1) + b


def _split(theta: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return W with b_1 (n, p + 1, k), w (n, k) and b_2 (n,) of theta (n, d)."""
    W, w, b = theta.split([theta.shape[1] - k - 1, k, 1], -1)
    return W.unflatten(-1, (-1, k)), w, b.squeeze(-1)


def _hidden(X: Tensor, W: Tensor) -> Tensor:
    """Return the products of rows X (m, p + 1) with W (n, p + 1, k), shape (m, n, k)."""
    n, p, k = W.shape
    return (X @ W.transpose(0, 1).reshape(p, n * k)).view(len(X), n, k)


def log_normal_mixture(y: np.ndarray, f: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Return the log-density of y (n,) under the mixture of normals of means f (S, n) and variances (S, 1)."""
    log_densities = -((y - f) ** 2) / (2 * variance) - np.log(2 * np.pi * variance) / 2
    return np.logaddexp.reduce(log_densities, axis=0) - np.log(len(f))


def _check_outputs(X: ArrayLike, y: ArrayLike) -> np.ndarray:
    return check_X_y(X, y, dtype=np.float64, y_numeric=True)[1]


def _check(n_hidden: int, precisions: dict[str, float | None], hyperprior: tuple[float, float] | None) -> None:
    check_integer(n_hidden, "n_hidden", min_val=1)
    for name, value in precisions.items():
        if value is not None:
            check_positive(value, name)
    if hyperprior is not None and None not in precisions.values():
        raise ValueError("`hyperprior` is for precisions that are not given, but both are; leave one of them out.")
    if hyperprior is not None:
        check_hyperprior(hyperprior)
