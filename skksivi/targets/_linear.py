"""Bayesian linear, binary and multinomial logistic regression."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils import check_X_y
from torch import Tensor

from skksivi._utils.arrays import as_tensor, check_sample_weight
from skksivi.targets._base import Target, check_hyperprior, check_positive, classes_of, in_blocks, log_prob_of


class BayesianLinearRegression(Target):
    r"""The posterior of a linear regression whose prior and noise precisions are unknown.

    .. math::
        y_i \sim N(x_i^\top \beta, 1 / \gamma), \qquad \beta \sim N(0, I / \lambda), \qquad
        \lambda, \gamma \sim \mathrm{Gamma}(a, b)

    .. math::
        \log p(\beta, \log\lambda, \log\gamma | X, y) = -\frac{\gamma}{2} \sum_i (y_i - x_i^\top \beta)^2
        - \frac{\lambda}{2} \|\beta\|^2 + \frac{n}{2} \log\gamma + \frac{p}{2} \log\lambda
        + a (\log\lambda + \log\gamma) - b (\lambda + \gamma) + \mathrm{const}

    The parameters are the p coefficients, then :math:`\log\lambda` and :math:`\log\gamma`. An evaluation takes O(p^2)
    operations per draw, however many observations there are.

    Parameters
    ----------
    X : array-like of shape (n, p)
    y : array-like of shape (n,)
    hyperprior : pair of float, default=(1.0, 0.1)
        Shape a > 0 and rate b > 0 of both Gamma priors.
    sample_weight : array-like of shape (n,), default=None
        How often each observation counts.

    Raises
    ------
    ValueError
        X and y do not fit together, or `hyperprior` is not a pair of positive numbers.

    See Also
    --------
    skksivi.KSIVIRegressor : Regression with a posterior inside.
    BayesianNeuralNetwork : A regression network.

    References
    ----------
    Bishop, C. (2006). Pattern Recognition and Machine Learning, section 3.5.

    Examples
    --------
    >>> from skksivi.targets import BayesianLinearRegression
    >>> BayesianLinearRegression([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]], [0.1, 0.9, 2.1]).n_features
    4
    """

    up_to_constant = True

    def __init__(
        self,
        X: ArrayLike,
        y: ArrayLike,
        *,
        hyperprior: tuple[float, float] = (1.0, 0.1),
        sample_weight: ArrayLike | None = None,
    ) -> None:
        X, y = check_X_y(X, y, dtype=np.float64, y_numeric=True)
        check_hyperprior(hyperprior)
        w = check_sample_weight(sample_weight, len(X))
        p = X.shape[1]
        self.n_features = p + 2
        self.hyperprior = hyperprior
        self._XX, self._Xy, self._yy = as_tensor((X.T * w) @ X), as_tensor((X.T * w) @ y), as_tensor((w * y) @ y)
        self._shapes = torch.tensor(
            [p / 2 + hyperprior[0], w.sum() / 2 + hyperprior[0]], dtype=torch.float64, device="cpu"
        )

    def log_prob(self, theta: Tensor) -> Tensor:
        """Evaluate log p at each row of theta (n, p + 2), up to a constant."""
        _, precisions, of_beta, of_error, _ = self._parts(theta)
        lam, gam = precisions.unbind(-1)
        return theta[..., -2:] @ self._shapes.to(theta) - lam * of_beta - gam * of_error

    def score_fn(self, theta: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of theta (n, p + 2)."""
        beta, precisions, of_beta, of_error, G = self._parts(theta)
        lam, gam = precisions.split(1, -1)
        sizes = torch.stack([of_beta, of_error], -1)
        return torch.cat([gam * G - lam * beta, self._shapes.to(theta) - precisions * sizes], -1)

    def score_vjp(self, theta: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the score at theta and the product with its symmetric Jacobian."""
        beta, precisions, of_beta, of_error, G = self._parts(theta)
        lam, gam = precisions.split(1, -1)

        def vjp(v: Tensor) -> Tensor:
            v, v_lam, v_gam = v.split([v.shape[-1] - 2, 1, 1], -1)
            along = gam * (v_gam * G - v @ self._XX.to(theta)) - lam * (v + v_lam * beta)
            of_lam = -lam * ((beta * v).sum(-1, keepdim=True) + of_beta.unsqueeze(-1) * v_lam)
            of_gam = gam * ((G * v).sum(-1, keepdim=True) - of_error.unsqueeze(-1) * v_gam)
            return torch.cat([along, of_lam, of_gam], -1)

        return self.score_fn(theta), vjp

    def _parts(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return beta, the precisions, what these multiply, and X^T (y - X beta)."""
        XX, Xy, b = self._XX.to(theta), self._Xy.to(theta), self.hyperprior[1]
        beta = theta[..., :-2]
        G = Xy - beta @ XX
        error = self._yy.to(theta) - (beta * (Xy + G)).sum(-1)
        return beta, theta[..., -2:].exp(), beta.square().sum(-1) / 2 + b, error / 2 + b, G


class BayesianMultinomialRegression(Target):
    r"""The posterior of the coefficients of a multinomial logistic regression.

    .. math::
        \log p(B | X, y) = \sum_i \log \mathrm{softmax}(B^\top x_i)_{y_i} - \frac{\alpha}{2} \|B\|_F^2
        + \mathrm{const}

    Rows of draws hold B row by row, shape (p, k) for k classes.

    Parameters
    ----------
    X : array-like of shape (n, p)
    y : array-like of shape (n,)
        Labels of two or more classes.
    prior_precision : float, default=1.0
        The alpha > 0 of the prior N(0, I / alpha), which determines what the likelihood does not, the sum of a row of
        B.
    sample_weight : array-like of shape (n,), default=None
        How often each observation counts.

    Raises
    ------
    ValueError
        X and y do not fit together, y has one class, or `prior_precision` is not positive.

    See Also
    --------
    skksivi.KSIVIClassifier : Classification with a posterior inside.
    BayesianLogisticRegression : The posterior of a logistic regression.

    References
    ----------
    Bishop, C. (2006). Pattern Recognition and Machine Learning, section 4.3.4.

    Examples
    --------
    >>> from skksivi.targets import BayesianMultinomialRegression
    >>> BayesianMultinomialRegression([[0.0], [1.0], [2.0]], ["a", "b", "c"]).n_features
    3
    """

    up_to_constant = True

    def __init__(
        self, X: ArrayLike, y: ArrayLike, prior_precision: float = 1.0, *, sample_weight: ArrayLike | None = None
    ) -> None:
        X, y = check_X_y(X, y, dtype=np.float64)
        self.classes, index = classes_of(y)
        if len(self.classes) < 2:
            raise ValueError(f"`y` must have two classes at least, got one class: {self.classes.tolist()[0]!r}.")
        check_positive(prior_precision, "prior_precision")
        self.n_features = X.shape[1] * len(self.classes)
        self.prior_precision = prior_precision
        self._X = as_tensor(X)
        self._Y = as_tensor(np.eye(len(self.classes))[index])
        self._w = as_tensor(check_sample_weight(sample_weight, len(X)))
        self.n_rows, self.n_outputs = self._Y.shape

    def subset(self, rows: Tensor) -> Self:
        """Return the posterior of some observations, each counted n_rows / len(rows) times; of none, the prior."""
        weight = self.n_rows / max(1, len(rows))
        return self._replaced(_X=self._X[rows], _Y=self._Y[rows], _w=weight * self._w[rows])

    def log_prob(self, theta: Tensor) -> Tensor:
        """Evaluate log p at each row of theta (n, p k), up to a constant."""
        if not theta.requires_grad and (blocks := in_blocks(self, theta, *self._Y.shape)):
            return blocks.total(log_prob_of, theta)
        return self._log_p(theta) @ self._w.to(theta) - self.prior_precision / 2 * theta.square().sum(-1)

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """Evaluate the log-likelihood of each observation, times its weight, at each row of theta (n, p k)."""
        return self._log_p(theta) * self._w.to(theta)

    def _log_p(self, theta: Tensor) -> Tensor:
        return (self._logits(theta).log_softmax(-1) * self._Y.to(theta)).sum(-1)

    def score_fn(self, theta: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of theta (n, p k)."""
        if blocks := in_blocks(self, theta, *self._Y.shape):
            return blocks.score_fn(theta)
        residuals = self._Y.to(theta) - self._logits(theta).softmax(-1)
        return self._gather(residuals) - self.prior_precision * theta

    def score_vjp(self, theta: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the score at theta and the product with its symmetric Jacobian."""
        if blocks := in_blocks(self, theta, *self._Y.shape):
            return blocks.product(theta)
        P = self._logits(theta).softmax(-1)

        def vjp(v: Tensor) -> Tensor:
            PV = P * self._logits(v)
            return self._gather(P * PV.sum(-1, keepdim=True) - PV) - self.prior_precision * v

        return self._gather(self._Y.to(theta) - P) - self.prior_precision * theta, vjp

    def _logits(self, theta: Tensor) -> Tensor:
        """Return B^T x, shape (..., n, k)."""
        return self._X.to(theta) @ theta.unflatten(-1, (self._X.shape[1], -1))

    def _gather(self, residuals: Tensor) -> Tensor:
        """Return X^T diag(w) R as rows (..., p k)."""
        return (self._X.to(residuals).mT @ (self._w.to(residuals)[:, None] * residuals)).flatten(-2)


# Binary responses


class BayesianLogisticRegression(Target):
    r"""The posterior of the coefficients of a binary logistic regression.

    .. math::
        \log p(\beta | X, y) = \sum_i y_i \beta^\top x_i - \log(1 + e^{\beta^\top x_i})
        - \frac{\alpha}{2} \|\beta\|^2 + \mathrm{const}

    Parameters
    ----------
    X : array-like of shape (n_observations, n_columns)
    y : array-like of shape (n_observations,)
        Two classes; the larger label is the 1 of the formula.
    prior_precision : float, default=0.01
        The alpha > 0 of the prior N(0, I / alpha).
    fit_intercept : bool, default=False
        Whether to put a column of ones before X; its coefficient is then the first.
    sample_weight : array-like of shape (n_observations,), default=None
        How often each observation counts.

    Raises
    ------
    ValueError
        X and y do not fit together, y does not have two classes, or `prior_precision` is not positive.

    See Also
    --------
    skksivi.KSIVIClassifier : Classification with a posterior inside.

    References
    ----------
    Yin, M. and Zhou, M. (2018). Semi-implicit variational inference. https://arxiv.org/abs/1805.11183

    Examples
    --------
    >>> import torch
    >>> from skksivi.targets import BayesianLogisticRegression
    >>> target = BayesianLogisticRegression([[-1.0], [2.0]], [0, 1], prior_precision=1.0)
    >>> target.score_fn(torch.zeros(1, 1))
    tensor([[1.5000]])
    """

    up_to_constant = True

    def __init__(
        self,
        X: ArrayLike,
        y: ArrayLike,
        prior_precision: float = 0.01,
        *,
        fit_intercept: bool = False,
        sample_weight: ArrayLike | None = None,
    ) -> None:
        X, y = check_X_y(X, y, dtype=np.float64)
        classes, y = classes_of(y, most=2)
        if len(classes) != 2:
            raise ValueError(f"`y` must have two classes, got {len(classes)}: {classes[:5].tolist()}.")
        check_positive(prior_precision, "prior_precision")
        if fit_intercept:
            X = np.column_stack([np.ones(len(X)), X])
        self.n_features = X.shape[1]
        self.prior_precision = prior_precision
        self.classes = classes
        self.n_rows = len(X)
        self._X = as_tensor(X)
        self._y = as_tensor(y, dtype=torch.float64)
        self._weight = 1.0  # of all observations
        self._w = None if sample_weight is None else as_tensor(check_sample_weight(sample_weight, len(X)))

    def subset(self, rows: Tensor) -> Self:
        """Return the posterior of some observations, each counted n_rows / len(rows) times; of none, the prior."""
        w = None if self._w is None else self._w[rows]
        return self._replaced(_X=self._X[rows], _y=self._y[rows], _w=w, _weight=self.n_rows / max(1, len(rows)))

    def log_prob(self, beta: Tensor) -> Tensor:
        """Evaluate log p at each row of beta (n, d), up to a constant."""
        if not beta.requires_grad and (blocks := in_blocks(self, beta, len(self._X))):
            return blocks.total(log_prob_of, beta)
        return self._weight * self._log_p(beta).sum(-1) - self.prior_precision / 2 * beta.square().sum(-1)

    def log_likelihood(self, beta: Tensor) -> Tensor:
        """Evaluate the log-likelihood of each observation, times its weight, at each row of beta (n, d)."""
        return self._weight * self._log_p(beta)

    def _log_p(self, beta: Tensor) -> Tensor:
        X, sign = self._X.to(beta), 2 * self._y.to(beta) - 1
        return self._weighted(torch.nn.functional.logsigmoid(sign * (beta @ X.mT)))

    def score_fn(self, beta: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of beta (n, d)."""
        if blocks := in_blocks(self, beta, len(self._X)):
            return blocks.score_fn(beta)
        X, y = self._X.to(beta), self._y.to(beta)
        return self._weight * self._weighted(y - torch.sigmoid(beta @ X.mT)) @ X - self.prior_precision * beta

    def score_vjp(self, beta: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the score at beta and its vector-Jacobian product, the map of v (n, d) to J^T v (n, d)."""
        if blocks := in_blocks(self, beta, len(self._X)):
            return blocks.product(beta)
        X, y = self._X.to(beta), self._y.to(beta)
        p = torch.sigmoid(beta @ X.mT)

        def combine(weights: Tensor, prior: Tensor) -> Tensor:
            # X^T W^T is much faster than W X for a tall thin X.
            B = prior.reshape(-1, self.n_features)
            W = self._weighted(weights).reshape(len(B), len(X))
            return torch.addmm(B.mT, X.mT, W.mT, beta=-self.prior_precision, alpha=self._weight).mT.view(prior.shape)

        def vjp(v: Tensor) -> Tensor:
            return combine((v @ X.mT).mul_(torch.addcmul(p, p, p, value=-1)).neg_(), v)

        return combine(y - p, beta), vjp

    def _weighted(self, terms: Tensor) -> Tensor:
        """Return the terms (..., n_observations) times the weights of the observations."""
        return terms if self._w is None else terms * self._w.to(terms)
