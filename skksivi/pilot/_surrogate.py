r"""A surrogate of log p from scores at a few points: a Gaussian process whose gradients are observed.

In coordinates where a target is roughly N(0, I), log p is a simple log-density plus a process with covariance

.. math:: k(u, v) = e^{-\|u - v\|^2 / 2 \ell^2}, \qquad
    \mathrm{Cov}(\nabla f(u), \nabla f(v)) = k(u, v) \left(\frac{I}{\ell^2} - \frac{w w^\top}{\ell^4}\right),
    \quad w = u - v.

Each score is d observations, so that a few hundred points tell log p, up to a constant, where they are.

References
----------
Solak, E. et al. (2003). Derivative observations in Gaussian process models of dynamic systems. NeurIPS 15.

Rasmussen, C. and Williams, C. (2006). Gaussian processes for machine learning, section 9.4.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor

from skksivi.coordinates._affine import Affine
from skksivi.pilot._importance import HeavyTailed
from skksivi.pilot._mixture import Components
from skksivi.score._score import STEPS, Score

#: Numbers in the scores of a surrogate, and in those that choose its width, at most: a factorisation is O(n^3).
MOST_NUMBERS, FEW_NUMBERS = 4000, 800

#: Widths that are tried.
WIDTHS = (0.7, 1.0, 1.5, 2.2, 3.3, 5.0, 8.0, 12.0)


class Mean(NamedTuple):
    r"""The log-density where no point is near: :math:`-\|u\|^2 / 2`, or that of Student's t."""

    df: float

    def log_density(self, u: Tensor) -> Tensor:
        """Evaluate it at u (n, d), up to a constant."""
        squares = u.square().sum(1)
        if self.df == math.inf:
            return -squares / 2
        return -(self.df + u.shape[1]) / 2 * torch.log1p(squares / self.df)

    def score(self, u: Tensor) -> Tensor:
        """Return its gradient (n, d)."""
        if self.df == math.inf:
            return -u
        return -(self.df + u.shape[1]) / (self.df + u.square().sum(1, keepdim=True)) * u


class Surrogate(NamedTuple):
    """A mean plus a Gaussian process, whose posterior mean is a sum over the gradients that were observed.

    Attributes
    ----------
    mean : Mean
    u : Tensor of shape (n, d)
        The points.
    a : Tensor of shape (n, d)
        Their weights.
    width : float
        The length scale of the process.
    reach : float
        How far from all points it is taken at its word; farther out it falls.
    """

    mean: Mean
    u: Tensor
    a: Tensor
    width: float
    reach: float

    def log_prob(self, v: Tensor) -> Tensor:
        """Return log p at v (m, d), up to a constant."""
        k, slope = self._terms(v)
        beyond = self._beyond(v)[0]
        return self.mean.log_density(v) + (k * slope).sum(1) / self.width**2 - beyond.square() / 4

    def score(self, v: Tensor) -> Tensor:
        """Return its gradient (m, d)."""
        k, slope = self._terms(v)
        w = k * slope / self.width**4
        beyond, way = self._beyond(v)
        of_process = k @ self.a / self.width**2 - w.sum(1, keepdim=True) * v + w @ self.u
        return self.mean.score(v) + of_process - beyond[:, None] / 2 * way

    def _terms(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the covariances k(v, u), and the products of v - u and the weights, both (m, n)."""
        k = (-torch.cdist(v, self.u).square() / (2 * self.width**2)).exp()
        return k, v @ self.a.mT - (self.u * self.a).sum(1)

    def _beyond(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return how far v (m, d) is beyond the reach of the nearest point, and the direction from that (m, d)."""
        distance, nearest = torch.cdist(v, self.u).min(1)
        way = (v - self.u[nearest]) / distance.clamp_min(torch.finfo(v.dtype).tiny)[:, None]
        return (distance - self.reach).clamp_min(0), way

    def as_score(self) -> Score:
        """Return it as a target with its score."""
        d, type_, device = self.u.shape[1], self.u.dtype, self.u.device
        return Score(self.score, d, type_, device, STEPS[type_], by_differences=True, log_prob=self.log_prob)


def gradient_covariance(u: Tensor, width: float) -> Tensor:
    """Return the covariance (n d, n d) of the gradients of the process at points u (n, d)."""
    n, d = u.shape
    w = u[:, None] - u
    k = (-w.square().sum(2) / (2 * width**2)).exp()[:, :, None, None]
    blocks = k * (torch.eye(d).to(u) / width**2 - w[..., :, None] * w[..., None, :] / width**4)
    return blocks.transpose(1, 2).reshape(n * d, n * d)


def conditioned(
    mean: Mean, u: Tensor, s: Tensor, width: float, noise: Tensor
) -> tuple[Surrogate | None, float, float]:
    """Return the surrogate by scores s (n, d) at u (n, d) with variances of noise (n,), the scale of the process, and
    the logarithm of the likelihood at that scale; None where the covariance is not positive.
    """
    K = gradient_covariance(u, width)
    K.diagonal().add_((noise + 1e-7 / width**2).repeat_interleave(u.shape[1]))
    L, failed = torch.linalg.cholesky_ex(K)
    if failed:
        return None, 1.0, -math.inf
    z = torch.linalg.solve_triangular(L, (s - mean.score(u)).reshape(-1, 1), upper=False)
    a = torch.linalg.solve_triangular(L.mT, z, upper=True).view(u.shape)
    scale = max(float(z.square().mean()), 1e-12)
    log_likelihood = -len(z) / 2 * math.log(scale) - float(L.diagonal().log().sum())
    apart = torch.cdist(u, u).fill_diagonal_(math.inf).amin(1)
    return Surrogate(mean, u, a, width, float(apart.quantile(0.9))), scale, log_likelihood


def fitted_surrogate(u: Tensor, s: Tensor, depth: Tensor) -> Surrogate:
    """Return the surrogate by scores s (n, d) at points u (n, d), the likeliest of some widths and means.

    It goes by points of most density, given how far log p is below its maximum (n,), in nats, or by a line to the
    origin. Where that is low a score need not be met: it says that a wall is there.
    """
    d = u.shape[1]
    depth = torch.maximum(depth - depth.min(), -(s * u).sum(1) / 2)
    order = depth.argsort()
    inner = order[: max(10, int((depth < 8 + d).sum()))]
    some = inner[torch.linspace(0, len(inner) - 1, min(len(inner), max(10, FEW_NUMBERS // d))).long()]
    exact = depth.new_zeros(len(some))
    tried = [(mean, width) for mean in (Mean(math.inf), Mean(8.0)) for width in WIDTHS]
    found = [conditioned(mean, u[some], s[some], width, exact) for mean, width in tried]
    best = max(range(len(tried)), key=lambda i: found[i][2])
    (mean, width), scale = tried[best], found[best][1]
    rows = order[: max(20, min(MOST_NUMBERS // d, int((depth < 30 + d).sum())))]
    rest = (s - mean.score(u))[rows].square().mean(1)
    noise = ((depth[rows] - 6) / 10).clamp(0, 1) * 0.04 * rest / scale
    while (whole := conditioned(mean, u[rows], s[rows], width, noise)[0]) is None:
        width *= 0.7
    return whole


class Seen:
    """Points x (n, d) at which scores s (n, d) are known, and the surrogate by these in the coordinates of a map."""

    def __init__(self, metric: Affine) -> None:
        self.metric = metric
        self.x = metric.m.new_empty(0, len(metric.m))
        self.s = self.x
        self.fitted: tuple[Affine, Surrogate] | None = None

    @property
    def model(self) -> Surrogate:
        if self.fitted is None:
            self.refit()
        return cast("tuple[Affine, Surrogate]", self.fitted)[1]

    def add(self, x: Tensor, s: Tensor) -> None:
        """Add points (n, d), but for those whose scores (n, d) are not finite."""
        inside = s.isfinite().all(1) & x.isfinite().all(1)
        self.x, self.s = torch.cat([self.x, x[inside]]), torch.cat([self.s, s[inside]])

    def refit(self) -> None:
        """Fit the surrogate again, by the last one's log p at first, then by its own."""
        u, s = self.metric.whiten(self.x), self.metric.whiten_score(self.s)
        log_p = -u.square().sum(1) / 2
        if self.fitted is not None:
            log_p = self.fitted[1].log_prob(self.fitted[0].whiten(self.x))
        for _ in range(2):
            model = fitted_surrogate(u, s, -log_p)
            log_p = model.log_prob(u)
        self.fitted = self.metric, model

    def error(self, x: Tensor, s: Tensor) -> float:
        """Return the mean square of the differences from scores s (m, d) at x (m, d), of each at most ten."""
        model, s_u = self.model, self.metric.whiten_score(s)
        squares = (s_u - model.score(self.metric.whiten(x))).square().mean(1)
        return float(squares.nan_to_num(10.0, 10.0).clamp_max(10.0).mean())


def spread_points(seen: Seen, mixture: Components, n: int, others: Tensor, generator: torch.Generator) -> Tensor:
    """Return n points u (n, d) that are far from each other, from others (m, d) and from those that were seen, of the
    root of a surrogate's density, which reaches beyond its mass; a mixture is near that.
    """
    wide = HeavyTailed.wider(mixture.draws().scaled(1.3))
    u = wide.sample(3000, generator)
    weights = (seen.model.log_prob(u) / 2 - wide.log_density(u)).softmax(0)
    n_few = min(8 * n, int((weights > 0).sum()))
    u = u[torch.multinomial(weights, n_few, generator=generator)]
    distance = torch.cdist(u, torch.cat([others, seen.metric.whiten(seen.x)])).amin(1)
    rows = list[int]()
    for _ in range(min(n, n_few)):
        rows.append(int(distance.argmax()))
        distance = torch.minimum(distance, (u - u[rows[-1]]).norm(dim=1))
    return u[rows]
