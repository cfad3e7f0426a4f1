"""Posteriors of the public suites, on parameters without bounds."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils import check_array, check_X_y
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from skksivi._utils.arrays import as_tensor
from skksivi.targets._base import Target, check_positive

#: The walk that the public suites observe: thirty points, of which ten in the middle are missing.
WALK = (
    0.21592641, 0.118771404, -0.07945447, 0.037677474, -0.27885845, -0.1484156, -0.3250906, -0.22957903, -0.44110894,
    -0.09830782, *10 * (math.nan,), -0.8786016, -0.83736074, -0.7384849, -0.8939254, -0.7774566, -0.70238715,
    -0.87771565, -0.51853573, -0.6948214, -0.6202789,
)  # fmt: skip

#: Of 21 plates: seeds that germinated, seeds, the kind of seed and the extract.
GERMINATED = (10, 23, 23, 26, 17, 5, 53, 55, 32, 46, 10, 8, 10, 8, 23, 0, 3, 22, 15, 32, 3)
SOWN = (39, 62, 81, 51, 39, 6, 74, 72, 51, 79, 13, 16, 30, 28, 45, 4, 12, 41, 30, 51, 7)
KIND = (*11 * (0,), *10 * (1,))
EXTRACT = (*5 * (0,), *6 * (1,), *5 * (0,), *5 * (1,))


class BrownianBridge(Target):
    r"""A random walk observed with noise at both ends, with its two scales unknown.

    .. math::
        w_t \sim N(w_{t-1}, \sigma^2), \quad w_0 = 0, \qquad y_t \sim N(w_t, \tau^2), \qquad
        \log \sigma, \log \tau \sim N(0, 2^2)

    The features are :math:`(\log \sigma, \log \tau, w_1, \dots, w_T)`.

    Parameters
    ----------
    observations : array-like of shape (T,), default=None
        The y, NaN where nothing is observed; None takes the data of the public suites, T = 30 without the ten in the
        middle.

    Raises
    ------
    ValueError
        `observations` is not one row of numbers and NaN, or all of them are NaN.

    See Also
    --------
    ConditionedDiffusion : The path of a diffusion given observations.
    StochasticVolatility : A volatility model of returns.

    References
    ----------
    Sountsov, P., Radul, A. and contributors (2020). Inference gym.
    https://pypi.org/project/inference_gym

    Examples
    --------
    >>> from skksivi.targets import BrownianBridge
    >>> BrownianBridge().n_features
    32
    """

    up_to_constant = True

    def __init__(self, observations: ArrayLike | None = None) -> None:
        y = np.asarray(WALK if observations is None else observations, dtype=np.float64)
        if y.ndim != 1 or np.isinf(y).any() or np.isnan(y).all():
            raise ValueError(
                f"`observations` must be one row of finite numbers, with NaN where nothing is observed; got shape "
                f"{y.shape}, {int(np.isfinite(y).sum())} of them finite."
            )
        self.n_features = 2 + len(y)
        self._there = torch.as_tensor(np.flatnonzero(np.isfinite(y)))
        self._y = as_tensor(y[np.isfinite(y)])

    def log_prob(self, x: Tensor) -> Tensor:
        """Evaluate log p at each row of x (n, d), up to a constant."""
        log_scales, w = x[..., :2], x[..., 2:]
        log_sigma, log_tau = log_scales.unbind(-1)
        steps = (w - pad(w[..., :-1], (1, 0))).square().sum(-1)
        misfit = (self._y.to(x) - w[..., self._there]).square().sum(-1)
        walk = -steps * (-2 * log_sigma).exp() / 2 - w.shape[-1] * log_sigma
        noise = -misfit * (-2 * log_tau).exp() / 2 - len(self._y) * log_tau
        return walk + noise - log_scales.square().sum(-1) / 8


class ItemResponse(Target):
    r"""The Rasch model of students' answers to questions.

    .. math::
        P(y_{ij} = 1) = \mathrm{sigmoid}(m + a_i - b_j), \qquad m \sim N(\tfrac34, 1), \quad a_i, b_j \sim N(0, 1)

    The features are :math:`(m, a, b)`.

    Parameters
    ----------
    answers : array-like of shape (n_students, n_questions)
        Zeros and ones, NaN where a student was not asked.

    Raises
    ------
    ValueError
        `answers` is not such a table.

    See Also
    --------
    SeedGermination : A logistic regression with effects of plates.

    References
    ----------
    Gelman, A. and Hill, J. (2007). Data analysis using regression and multilevel/hierarchical models, section 14.3.

    Examples
    --------
    >>> import torch
    >>> from skksivi.targets import ItemResponse
    >>> ItemResponse([[1, 0], [1, float("nan")]]).score_fn(torch.zeros(1, 5))
    tensor([[ 1.2500,  0.0000,  0.5000, -1.0000,  0.5000]])
    """

    up_to_constant = True

    def __init__(self, answers: ArrayLike) -> None:
        Y = check_array(answers, dtype=np.float64, ensure_all_finite="allow-nan", input_name="answers")
        if not (np.isnan(Y) | (Y == 0) | (Y == 1)).all():
            raise ValueError("`answers` must be zeros and ones, with NaN where a student was not asked.")
        self.n_features = 1 + sum(Y.shape)
        self._y, self._asked = as_tensor(np.nan_to_num(Y)), as_tensor(np.isfinite(Y).astype(np.float64))

    def log_prob(self, x: Tensor) -> Tensor:
        """Evaluate log p at each row of x (n, d), up to a constant."""
        sign, asked = 2 * self._y.to(x) - 1, self._asked.to(x)
        likelihood = (asked * logsigmoid(sign * self._logits(x))).sum((-2, -1))
        return likelihood - self._centred(x).square().sum(-1) / 2

    def score_fn(self, x: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of x (n, d)."""
        r = self._asked.to(x) * (self._y.to(x) - torch.sigmoid(self._logits(x)))
        of_students, of_questions = r.sum(-1), -r.sum(-2)
        of_mean = of_students.sum(-1, keepdim=True)
        return torch.cat([of_mean, of_students, of_questions], -1) - self._centred(x)

    def _logits(self, x: Tensor) -> Tensor:
        """Return the logits (..., n_students, n_questions)."""
        m, a, b = x.split([1, *self._y.shape], -1)
        return (m + a)[..., :, None] - b[..., None, :]

    @staticmethod
    def _centred(x: Tensor) -> Tensor:
        """Return x less the mean of its prior."""
        return x - pad(x.new_tensor([0.75]), (0, x.shape[-1] - 1))


class LogGaussianCox(Target):
    r"""Counts in the cells of a square, whose log-intensity is a Gaussian field.

    .. math::
        y_i \sim \mathrm{Poisson}(e^{x_i} / M^2), \qquad x \sim N(\mu 1, K), \quad
        K_{ij} = s^2 \exp\left(-\frac{|r_i - r_j|}{M \ell}\right)

    with the cells at r = (1, 1), ..., (M, M), so the length is :math:`\ell` in units of the side of the square.

    Parameters
    ----------
    counts : array-like of shape (M, M)
        The y.
    variance : float, default=1.91
        The :math:`s^2 > 0`.
    length : float, default=1/33
        The :math:`\ell > 0`.

    Attributes
    ----------
    mean : float
        :math:`\mu = \log \sum_i y_i - s^2 / 2`, at which the expected count is the one observed.

    Raises
    ------
    ValueError
        `counts` is not a square array of nonnegative numbers with a positive sum, or a parameter is not positive.

    See Also
    --------
    StochasticVolatility : A volatility model of returns.

    References
    ----------
    Møller, J., Syversveen, A. R. and Waagepetersen, R. P. (1998). Log Gaussian Cox processes. Scandinavian Journal of
    Statistics 25(3).

    Examples
    --------
    >>> from skksivi.targets import LogGaussianCox
    >>> LogGaussianCox([[1, 0], [2, 1]]).n_features
    4
    """

    up_to_constant = True

    def __init__(self, counts: ArrayLike, variance: float = 1.91, length: float = 1 / 33) -> None:
        Y = check_array(counts, dtype=np.float64, input_name="counts")
        if Y.shape[0] != Y.shape[1] or (Y < 0).any() or not Y.sum():
            raise ValueError(
                f"`counts` must be a square of numbers of zero or more that are not all zero, got shape {Y.shape}."
            )
        check_positive(variance, "variance")
        check_positive(length, "length")
        M = len(Y)
        self.n_features = M**2
        self.mean = math.log(Y.sum()) - variance / 2
        self._y = as_tensor(Y.ravel())
        r = torch.cartesian_prod(*2 * [torch.arange(M, dtype=torch.float64, device="cpu")])
        self._precision = torch.linalg.inv(variance * torch.exp(-torch.cdist(r, r) / (M * length)))

    def log_prob(self, x: Tensor) -> Tensor:
        """Evaluate log p at each row of x (n, d), up to a constant."""
        r = x - self.mean
        likelihood = self._y.to(x) * x - x.exp() / self.n_features
        return (likelihood - (r @ self._precision.to(x)) * r / 2).sum(-1)

    def score_fn(self, x: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of x (n, d)."""
        return self._y.to(x) - x.exp() / self.n_features - (x - self.mean) @ self._precision.to(x)


class StochasticVolatility(Target):
    r"""Returns whose log-variance is an autoregression.

    .. math::
        r_t \sim N(0, e^{h_t}), \qquad h_t = \mu + \phi (h_{t-1} - \mu) + s z_t, \qquad
        h_1 = \mu + \frac{s z_1}{\sqrt{1 - \phi^2}}, \qquad z_t \sim N(0, 1)

    with :math:`\mu \sim \mathrm{Cauchy}(0, 5)`, :math:`s \sim \mathrm{Cauchy}^+(0, 2)` and
    :math:`\frac{1 + \phi}{2} \sim \mathrm{Beta}(20, 1.5)`. The features are
    :math:`(\mathrm{logit} \frac{1 + \phi}{2}, \mu, \log s, z_1, \dots, z_T)`.

    Parameters
    ----------
    returns : array-like of shape (T,)
        The r, centred; at least two.

    Raises
    ------
    ValueError
        `returns` is not a row of finite numbers.

    See Also
    --------
    BrownianBridge : A random walk with unknown scales.
    ConditionedDiffusion : The path of a diffusion given observations.

    References
    ----------
    Kim, S., Shephard, N. and Chib, S. (1998). Stochastic volatility: likelihood inference and comparison with ARCH
    models. Review of Economic Studies 65(3).

    Examples
    --------
    >>> from skksivi.targets import StochasticVolatility
    >>> StochasticVolatility([0.1, -0.3, 0.2]).n_features
    6
    """

    up_to_constant = True

    def __init__(self, returns: ArrayLike) -> None:
        r = np.asarray(returns, dtype=np.float64)
        if r.ndim != 1 or len(r) < 2 or not np.isfinite(r).all():
            raise ValueError(f"`returns` must be one row of two finite numbers or more, got shape {r.shape}.")
        self.n_features = 3 + len(r)
        self._r = as_tensor(r)

    def log_prob(self, x: Tensor) -> Tensor:
        """Evaluate log p at each row of x (n, d), up to a constant."""
        logit, mu, log_s, z = x.split([1, 1, 1, x.shape[-1] - 3], -1)
        phi = torch.tanh(logit / 2)
        log_first = -(math.log(4) + logsigmoid(logit) + logsigmoid(-logit)) / 2  # of 1 / sqrt(1 - phi^2)
        shocks = torch.cat([z[..., :1] * log_first.exp(), z[..., 1:]], -1)
        h = mu + log_s.exp() * discounted_sum(shocks, phi)
        precision = (-h).clamp_max(60.0).exp()  # log p is below -1e20 or so, and exponentials would overflow
        likelihood = -(h + self._r.to(x).square() * precision).sum(-1, keepdim=True) / 2
        of_phi = 20 * logsigmoid(logit) + 1.5 * logsigmoid(-logit)
        of_scales = log_s - torch.log1p((mu / 5).square()) - torch.log1p((2 * log_s).exp() / 4)
        return (likelihood + of_phi + of_scales)[..., 0] - z.square().sum(-1) / 2


def discounted_sum(x: Tensor, rate: Tensor) -> Tensor:
    """Return y_t = x_t + rate y_{t-1} along the last axis of x (..., T), for rates (..., 1), in log T steps."""
    step = 1
    while step < x.shape[-1]:
        x = x + rate * pad(x[..., :-step], (step, 0))
        step, rate = 2 * step, rate.square()
    return x


class SparseLogisticRegression(Target):
    r"""Logistic regression whose coefficients have individual scales.

    .. math::
        P(y_i = 1) = \mathrm{sigmoid}(x_i^\top \beta), \quad \beta_j = z_j \lambda_j \tau, \quad z_j \sim N(0, 1),
        \quad \lambda_j, \tau \sim \mathrm{Gamma}(\tfrac12, \tfrac12)

    The features are :math:`(\log \tau, \log \lambda, z)`, d = 2 k + 1.

    Parameters
    ----------
    X : array-like of shape (n_observations, k)
        Include a column of ones for an intercept.
    y : array-like of shape (n_observations,)
        Two classes; the larger label is the 1 of the formula.

    Raises
    ------
    ValueError
        X and y do not fit together, or y does not have two classes.

    See Also
    --------
    BayesianLogisticRegression : The posterior of a logistic regression.

    References
    ----------
    Sountsov, P., Radul, A. and contributors (2020). Inference gym.
    https://pypi.org/project/inference_gym

    Examples
    --------
    >>> from skksivi.targets import SparseLogisticRegression
    >>> SparseLogisticRegression([[1.0, -1.0], [1.0, 2.0]], [0, 1]).n_features
    5
    """

    up_to_constant = True

    def __init__(self, X: ArrayLike, y: ArrayLike) -> None:
        X, y = check_X_y(X, y, dtype=np.float64)
        classes, y = np.unique(y, return_inverse=True)
        if len(classes) != 2:
            raise ValueError(f"`y` must have two classes, got {len(classes)}: {classes[:5]}.")
        self.n_features = 2 * X.shape[1] + 1
        self._signed = as_tensor((2.0 * y - 1)[:, None] * X)

    def log_prob(self, x: Tensor) -> Tensor:
        """Evaluate log p at each row of x (n, d), up to a constant."""
        k = self._signed.shape[1]
        log_scales, z = x[..., : k + 1], x[..., k + 1 :]
        beta = z * (log_scales[..., 1:] + log_scales[..., :1]).exp()
        likelihood = logsigmoid(beta @ self._signed.to(x).mT).sum(-1)
        return likelihood + (log_scales - log_scales.exp()).sum(-1) / 2 - z.square().sum(-1) / 2


class SeedGermination(Target):
    r"""Crowder's seeds: a logistic regression of 21 plates with an effect per plate.

    .. math::
        r_i \sim \mathrm{Binomial}\left(n_i, \mathrm{sigmoid}(\alpha_0 + \alpha_1 u_i + \alpha_2 v_i
        + \alpha_{12} u_i v_i + b_i)\right), \quad b_i \sim N(0, 1 / \tau)

    with u the kind of seed and v the extract, :math:`\alpha \sim N(0, 10^2 I)` and
    :math:`\tau \sim \mathrm{Gamma}(.01, .01)`. The 26 features are :math:`(\alpha, \log \tau, b)`.

    See Also
    --------
    BayesianLogisticRegression : The posterior of a logistic regression.
    ItemResponse : The Rasch model.

    References
    ----------
    Crowder, M. J. (1978). Beta-binomial anova for proportions. Applied Statistics 27(1).

    Examples
    --------
    >>> from skksivi.targets import SeedGermination
    >>> SeedGermination().n_features
    26
    """

    up_to_constant = True

    n_features = 26

    def __init__(self) -> None:
        u, v = np.array(KIND), np.array(EXTRACT)
        self._X = as_tensor(np.column_stack([np.ones(21), u, v, u * v]))
        self._r, self._n = as_tensor(np.array(GERMINATED, dtype=float)), as_tensor(np.array(SOWN, dtype=float))

    def log_prob(self, x: Tensor) -> Tensor:
        """Evaluate log p at each row of x (n, 26), up to a constant."""
        alpha, log_tau, b = x.split([4, 1, 21], -1)
        logits, r, n = alpha @ self._X.to(x).mT + b, self._r.to(x), self._n.to(x)
        likelihood = (r * logsigmoid(logits) + (n - r) * logsigmoid(-logits)).sum(-1)
        of_tau = (21 / 2 + 0.01) * log_tau - log_tau.exp() * (0.01 + b.square().sum(-1, keepdim=True) / 2)
        return likelihood + of_tau[..., 0] - alpha.square().sum(-1) / 200
