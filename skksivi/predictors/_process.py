r"""Gaussian processes of the highest evidence, as the posterior of two precisions.

.. math:: \mathrm{Cov}(f(x), f(x')) = 1 + a^2 x^\top x' + c^2 \kappa(\|(x - x') / \ell\|^2), \qquad
    y_i \sim N(f(x_i), \sigma^2 / w_i)

for standardised X and y. The hyper-parameters :math:`\theta = (\log\sigma, \log a, \log c, \log\ell)` maximise
the evidence. Given them f is linear in features, and only the two precisions of prior and noise have a posterior.

Weights are relative. Rows that are equal in X and y are merged and their weights added, unless this X also has other
y: a function could pass through all copies, so that they would be evidence against noise.

scikit-learn's GaussianProcessRegressor could do the search, but takes neither weights of rows nor priors of
hyper-parameters, and its gradient needs an n by n matrix for each length scale.

Rasmussen, C. E. and Williams, C. K. I. (2006). Gaussian Processes for Machine Learning, sections 5.4 and 8.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import OptimizeResult, minimize
from torch import Tensor

from skksivi._utils.arrays import as_array, as_tensor
from skksivi.targets import Target

#: Largest number of rows for the evidence, and of centres of the features: the cost is cubic in both.
N_ROWS = 500

#: Smallest variance of the noise, in units of the variance of y.
LEAST_NOISE = 1e-6

#: Relative size of rounding errors in a covariance.
ROUNDING = 1e-10


def gaussian(t: Tensor) -> Tensor:
    """Return exp(-t / 2), of functions that have all derivatives."""
    return torch.exp(-t / 2)


def matern(t: Tensor) -> Tensor:
    r"""Return :math:`(1 + r) e^{-r}` at :math:`r = \sqrt{3t}`, of functions that have one derivative."""
    r = (3 * t + 1e-12).sqrt()
    return (1 + r) * torch.exp(-r)


#: The kappa of the kernel.
PROFILES: dict[str, Callable[[Tensor], Tensor]] = {"gaussian": gaussian, "matern": matern}


class Scales(NamedTuple):
    """The hyper-parameters in the units of standardised data: sigma, a, c and l (p,)."""

    noise: Tensor
    slope: Tensor
    amplitude: Tensor
    lengths: Tensor


def scales_of(theta: Tensor, p: int) -> Scales:
    """Return the scales of theta: of two entries, of a linear function alone, or of one length for all p columns."""
    if len(theta) == 2:
        theta = torch.cat([theta, theta.new_tensor([-math.inf, 0.0])])
    scales = torch.exp(theta)
    return Scales(scales[0], scales[1], scales[2], scales[3:].expand(p))


def similarity(profile: str, lengths: Tensor, X: Tensor, Z: Tensor) -> Tensor:
    r"""Return :math:`\kappa` of rows X (n, p) and Z (m, p), shape (n, m)."""
    A, B = X / lengths, Z / lengths
    t = A.square().sum(1, keepdim=True) + B.square().sum(1) - 2 * A @ B.mT
    return PROFILES[profile](t.clamp_min(0))


class Hyper(NamedTuple):
    """Hyper-parameters of the highest density, and the log evidence with these integrated out (Laplace's)."""

    theta: Tensor
    profile: str
    log_evidence: float


def log_evidence(theta: Tensor, profile: str, X: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Return log p(y | theta) + log p(theta), up to a constant."""
    scales = scales_of(theta, X.shape[1])
    K = 1 + scales.slope.square() * X @ X.mT
    K = K + scales.amplitude.square() * similarity(profile, scales.lengths, X, X)
    variance = scales.noise.square() + LEAST_NOISE
    L = root(K, variance / w)
    z = torch.linalg.solve_triangular(L, y[:, None], upper=False)
    means, spreads = before(len(theta), X.shape[1])
    log_likelihood = -z.square().sum() / 2 - L.diagonal().log().sum()
    return log_likelihood - ((theta - means) / spreads).square().sum() / 2


def root(K: Tensor, noise: Tensor) -> Tensor:
    """Return the Cholesky factor of K (n, n) plus noise (n,), with as much jitter as rounding requires."""
    share, failed = ROUNDING, True
    while failed and share < 1:
        L, failed = torch.linalg.cholesky_ex(K + (noise + share * K.diagonal().mean()).diag())
        share *= 10
    return L


def before(k: int, p: int) -> tuple[Tensor, Tensor]:
    """Return prior means and standard deviations of theta (k,); of many columns each has less effect."""
    index = torch.arange(k).clamp_max(3)
    # means and standard deviations of log sigma, a, c and l for one column, and what log p adds to a mean
    means, spreads, share = torch.tensor(
        [(-0.7, -1.2, -0.4, 0.4), (1.0, 2.0, 2.0, 1.0), (0.0, -0.5, 0.0, 0.5)], dtype=torch.float64
    )
    return (means + share * math.log(p))[index], spreads[index]


def highest_evidence(k: int, profile: str, X: Tensor, y: Tensor, w: Tensor) -> Hyper:
    """Search for k hyper-parameters by L-BFGS, and integrate over them by Laplace's approximation."""

    def slope(at: np.ndarray, n: int) -> tuple[float, np.ndarray]:
        with torch.enable_grad():
            theta = torch.tensor(at, requires_grad=True)
            loss = -log_evidence(theta, profile, X[:n], y[:n], w[:n])
            return loss.item(), torch.autograd.grad(loss, theta)[0].numpy()

    means, spreads = (part.numpy() for part in before(k, X.shape[1]))
    far = 6.0  # prior standard deviations, to which the search is limited
    bounds = np.column_stack([means - far * spreads, means + far * spreads])

    def searched(start: np.ndarray, n: int) -> OptimizeResult:
        options = {"maxiter": 60, "ftol": 1e-5}
        return minimize(slope, start, n, "L-BFGS-B", jac=True, bounds=bounds, options=options)

    shorter = means - spreads * (np.arange(k) >= 3)  # a search from long scales misses short ones
    start = min((means, shorter), key=lambda at: searched(at, 300).fun)
    best = searched(start, len(X))
    step = 1e-4  # of the logarithms
    curvature = np.stack([(slope(best.x + e, len(X))[1] - best.jac) / step for e in step * np.eye(k)])
    scaled = spreads[:, None] * (curvature + curvature.T) / 2 * spreads  # one where the data are uninformative
    log_volume = np.log(np.linalg.eigvalsh(scaled).clip(1)).sum() / 2
    return Hyper(as_tensor(best.x), profile, -float(best.fun + log_volume))


def choose(X: Tensor, y: Tensor, w: Tensor) -> Hyper:
    """Return the best of a linear function, and smooth ones with one length scale or with one for each column."""
    n, p = X.shape
    smooth = _best([highest_evidence(4, profile, X, y, w) for profile in PROFILES])
    sizes = [2, 3 + p] if 1 < p <= n / 5 else [2]  # fewer rows do not tell several length scales
    return _best([smooth, *(highest_evidence(k, smooth.profile, X, y, w) for k in sizes)])


def _best(candidates: list[Hyper]) -> Hyper:
    return max(candidates, key=lambda hyper: hyper.log_evidence)


@dataclass(frozen=True, eq=False)
class Process:
    r"""A process as a linear regression on d features that are orthogonal in the data.

    .. math:: \phi(x) = b + A^\top x + V^\top \kappa(C, x)

    Parameters
    ----------
    profile : str
        The name of kappa.
    noise_variance, amplitude : float
        Values of sigma squared and c that maximise the evidence.
    lengths : Tensor of shape (p,)
    centres : Tensor of shape (m, p)
        The C.
    intercept, slopes, weights : Tensor of shape (d,), (p, d) and (m, d)
        The b, A and V.
    e, h : Tensor of shape (d,)
        As in `Precisions`.
    """

    profile: str
    noise_variance: float
    amplitude: float
    lengths: Tensor
    centres: Tensor
    intercept: Tensor
    slopes: Tensor
    weights: Tensor
    e: Tensor
    h: Tensor

    @classmethod
    def of(cls, hyper: Hyper, centres: Tensor) -> Process:
        """Return the features by the eigenvectors of the covariance of the centres (Nystroem's), without e and h."""
        p = centres.shape[1]
        sigma, a, c, lengths = scales_of(hyper.theta, p)
        values, vectors = torch.linalg.eigh(c.square() * similarity(hyper.profile, lengths, centres, centres))
        kept = values > ROUNDING * values[-1]
        smooth = c.square() * vectors[:, kept] * values[kept].rsqrt()
        maps = torch.block_diag(smooth.new_ones(1, 1), a * torch.eye(p).to(smooth), smooth)
        b, A, V = maps.split([1, p, len(centres)])
        variance, none = float(sigma.square() + LEAST_NOISE), torch.zeros_like(b[0])
        return cls(hyper.profile, variance, float(c), lengths, centres, b[0], A, V, none, none)

    def rotated(self, R: Tensor, e: Tensor, h: Tensor) -> Process:
        """Return the process with its features rotated by an orthogonal R (d, d)."""
        return replace(self, intercept=self.intercept @ R, slopes=self.slopes @ R, weights=self.weights @ R, e=e, h=h)

    def __str__(self) -> str:
        """Return the choice by the evidence, in words."""
        if self.amplitude == 0:
            return "a linear function"
        shortest, longest = self.lengths.min(), self.lengths.max()
        return f"a linear function and a {self.profile} process of length scales {shortest:.2g} to {longest:.2g}"

    def features(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return features (n, d) of rows X (n, p), and the variance (n,) of f that they do not explain."""
        phi, left_out = self.features_of(as_tensor(X))
        return phi.numpy(), left_out.numpy()

    def features_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same of tensors."""
        smooth = self._smooth(x)
        left_out = self.amplitude**2 - smooth.square().sum(1)
        return self.intercept + x @ self.slopes + smooth, left_out.clamp_min(0)

    def left_out(self, X: np.ndarray) -> np.ndarray:
        """Return the covariance (n, n) of the part of f at rows X (n, p) that the features do not explain."""
        x = as_tensor(X)
        smooth = self._smooth(x)
        return (self.amplitude**2 * similarity(self.profile, self.lengths, x, x) - smooth @ smooth.mT).numpy()

    def _smooth(self, x: Tensor) -> Tensor:
        return similarity(self.profile, self.lengths, x, self.centres) @ self.weights

    def coefficients(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return means and variances (n, d) of the coefficients for each row of X (n, 2)."""
        lam, gam = np.split(np.exp(np.ascontiguousarray(X)), 2, axis=1)
        variance = 1 / (lam + gam * as_array(self.e))
        return gam * as_array(self.h) * variance, variance


class Precisions(Target):
    r"""The posterior of the precisions of coefficients and noise, the coefficients integrated out.

    .. math::
        y_i \sim N(\phi_i^\top \beta, 1 / (\gamma \hat\gamma)), \qquad \beta \sim N(0, I / \lambda), \qquad
        \lambda, \gamma \sim \mathrm{Gamma}(a, a)

    with features of :math:`\hat\gamma \Phi^\top W \Phi = \mathrm{diag}(e)` and :math:`h = \hat\gamma \Phi^\top W y`,
    so that :math:`\beta_i | \lambda, \gamma, y \sim N(\gamma h_i / (\lambda + \gamma e_i), 1 / (\lambda + \gamma
    e_i))`. The parameters are :math:`\log\lambda` and :math:`\log\gamma`, zero at the maximum of the
    evidence.

    Parameters
    ----------
    e, h : Tensor of shape (d,)
    yy : float
        :math:`\hat\gamma y^\top W y`.
    n : int
        Number of observations.
    a : float
        Shape and rate of the priors.
    """

    n_features = 2

    def __init__(self, e: Tensor, h: Tensor, yy: float, n: int, a: float) -> None:
        self.e, self.h, self.yy, self.n, self.a = e, h, yy, n, a

    def log_prob(self, x: Tensor) -> Tensor:
        """Evaluate log p at each row of x (n, 2), up to a constant."""
        e, h = self.e.to(x), self.h.to(x)
        lam, gam = x.exp().split(1, -1)
        precision = lam + gam * e
        error = self.yy - (gam * h.square() / precision).sum(-1)
        log_evidence = (len(e) * x[..., 0] + self.n * x[..., 1] - precision.log().sum(-1)) / 2
        return log_evidence - gam.squeeze(-1) * error / 2 + self.a * (x.sum(-1) - (lam + gam).squeeze(-1))


def merged(X: np.ndarray, y: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows without copies, unless their X has other y, and weights with mean one over the original rows."""
    table, w = np.column_stack([X, y]), w / w.mean()
    distinct, index = np.unique(table, axis=0, return_inverse=True)
    _, at, n_values = np.unique(distinct[:, :-1], axis=0, return_inverse=True, return_counts=True)
    has_one = n_values[at.ravel()] == 1
    sums, rest = np.bincount(index.ravel(), weights=w)[has_one], ~has_one[index.ravel()]
    if len(sums):
        sums /= sums.mean()
    table = np.concatenate([distinct[has_one], table[rest]])
    return table[:, :-1], table[:, -1], np.concatenate([sums, w[rest]])


def fit_process(
    X: np.ndarray, y: np.ndarray, w: np.ndarray, a: float, rng: np.random.RandomState
) -> tuple[Process, Precisions]:
    """Return a process for standardised X (n, p) and y (n,), and the posterior of its precisions."""
    seen = as_tensor(rng.permutation(len(X))[:N_ROWS])
    x, y, w = as_tensor(X), as_tensor(y), as_tensor(w)
    hyper = choose(x[seen], y[seen], w[seen])
    process = Process.of(hyper, torch.unique(x[seen], dim=0))
    phi, left_out = process.features_of(x)
    precision = 1 / (process.noise_variance / w + left_out)  # the unexplained part is independent noise in each row
    e, R = torch.linalg.eigh((phi.mT * precision) @ phi)
    e, h, yy = e.clamp_min(0), R.mT @ (phi.mT @ (precision * y)), float((precision * y.square()).sum())
    return process.rotated(R, e, h), Precisions(e, h, yy, len(x), a)
