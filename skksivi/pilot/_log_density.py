r"""The log-density of a target, its own, by integrals of the score along lines or by a surrogate, and the masses of
its parts.

The surrogate is a Gaussian process whose gradients are observed. In coordinates where a target is roughly N(0, I),
log p is a simple log-density plus a process with covariance

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
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from skksivi.coordinates._affine import Affine
from skksivi.coordinates._lines import by_few_points, checked_density, kronrod, log_ratio, simpson
from skksivi.mixing import GaussianMixtureDraws
from skksivi.pilot._mixture import Components, gaussian_of
from skksivi.pilot._modes import MAX_STARTS, find_modes, scattered
from skksivi.pilot._moments import HeavyTailed
from skksivi.pilot._newton import laplace
from skksivi.score._score import STEPS, Score, ScoreFunction

#: Evaluates log p (n,) at points (n, d).
DensityFunction = Callable[[Tensor], Tensor]

#: The least effective share of the points and the largest difference of two estimates of a mass that are trusted.
MIN_SHARE, MAX_GAP = 0.2, 0.1


# From one place


def judging_map(score_fn: Score) -> Affine:
    """Return the map to a mode that depends on the target alone."""
    origin = torch.zeros(score_fn.n_features, dtype=torch.float64, device=score_fn.device)
    try:
        return laplace(score_fn, origin)[0]
    except ValueError:
        generator = torch.Generator(score_fn.device).manual_seed(0)
        return find_modes(score_fn, scattered(origin, MAX_STARTS, generator), generator).maps[0]


def log_density(score_fn: Score, origin: Affine | None, x: Tensor) -> Tensor:
    """Return log p (n,) at points x (n, d): the target's own, or integrals of the score from an origin.

    Raises
    ------
    ValueError
        Neither is available.
    """
    if origin is None:
        if score_fn.log_prob is None:
            raise ValueError("The target has no `log_prob`, which is needed here.")
        return score_fn.log_prob(x)
    score_u, u = origin.pull_back(score_fn), origin.whiten(x)
    return torch.cat([log_ratio(score_u, torch.zeros_like(origin.m), part) for part in u.split(500)])


# From the nearest of several modes


class Cells(NamedTuple):
    """A partition of space by the likeliest of k Gaussians.

    Attributes
    ----------
    maps : list of Affine
    log_weights : Tensor of shape (k,)
    """

    maps: list[Affine]
    log_weights: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """The number of cells and the dimension."""
        return len(self.maps), len(self.maps[0].m)

    def assign(self, x: Tensor) -> Tensor:
        """Return the indices (n,) of the cells of points x (n, d)."""
        return self.log_shares(x).argmax(1)

    def log_shares(self, x: Tensor) -> Tensor:
        """Return the logarithms (n, k), up to a constant of each row, of the shares that the Gaussians have at x."""
        halves = [a.whiten(x).square().sum(1) / 2 + a.log_determinant() for a in self.maps]
        return self.log_weights - torch.stack(halves, 1)

    def counts(self, x: Tensor) -> Tensor:
        """Return the number of points of x (n, d) in each cell, shape (k,)."""
        return self.assign(x).bincount(minlength=len(self.maps))

    def sorted_by(self, order: Tensor) -> Cells:
        """Return the cells in another order (k,)."""
        return Cells([self.maps[k] for k in order.tolist()], self.log_weights[order])

    def refined(self, x: Tensor, fit: Callable[[Tensor], Affine] = gaussian_of) -> Cells:
        """Return the cells of the Gaussians fitted to the points in each; a cell with hardly any points is kept."""
        cell, d = self.assign(x), x.shape[1]
        parts = [x[cell == k] for k in range(len(self.maps))]
        maps = [fit(part) if len(part) > 5 * d else a for part, a in zip(parts, self.maps, strict=True)]
        shares = x.new_tensor([len(part) + 0.5 for part in parts]) / len(x)
        return Cells(maps, shares.log())


def by_lines(score_fn: ScoreFunction, cells: Cells, heights: Tensor) -> DensityFunction:
    """Return log p, up to a constant, by integrals of the score from the centre of the cell of a point, where log p
    has these heights (k,).

    Along such lines there is no valley, in which a rule of a few nodes would miss a kink.
    """

    def log_prob(x: Tensor) -> Tensor:
        cell = cells.assign(x)
        value = heights[cell]
        for k in cell.unique().tolist():
            rows, centre = (cell == k).nonzero()[:, 0], cells.maps[k].m
            value[rows] += by_few_points(score_fn, centre, x[rows], ((simpson, 0.5), (kronrod, 0.05)))
        return value

    return log_prob


def log_prob_in(score_fn: Score, cells: Cells) -> DensityFunction:
    """Return log p up to a constant: the target's own, unless it contradicts the score, or by lines from the centres
    of cells.
    """
    for a in cells.maps:
        score_fn = checked_density(score_fn, a.m[None], a.unwhiten(torch.eye(len(a.m)).to(a.m)[:8]))
    if score_fn.log_prob is not None:
        return score_fn.log_prob
    centres = torch.stack([a.m for a in cells.maps])
    return by_lines(score_fn, cells, log_ratio(score_fn, centres[0], centres))


# The mass of a part


class Mass(NamedTuple):
    """The logarithm of an integral of p, up to the constant of log p, and whether it can be trusted.

    Attributes
    ----------
    log_mass : float
        By bridge sampling, or without draws of p by importance sampling.
    se : float
        Its standard error.
    share : float
        Effective share of the draws of the proposal.
    gap : float
        The difference of the two, NaN without draws of p.
    """

    log_mass: float
    se: float
    share: float
    gap: float

    @property
    def trusted(self) -> bool:
        """Whether two estimates agree and rest on enough points."""
        return self.share >= MIN_SHARE and abs(self.gap) <= MAX_GAP


def mass(
    log_p: DensityFunction, gaussians: GaussianMixtureDraws, x: Tensor, generator: torch.Generator, n: int = 512
) -> Mass:
    r"""Estimate the integral of p by n draws of a proposal q, half Gaussians and half with heavier tails, and some of
    the draws x (m, d) of p.

    With :math:`w = p / q`, :math:`Z = E_q w`, and with m draws of p and :math:`s = m / n` it is the solution of

    .. math:: Z = E_q\!\left[\frac{w}{s w + Z}\right] \Big/ E_p\!\left[\frac{1}{s w + Z}\right].

    References
    ----------
    Meng, X.-L. and Wong, W. (1996). Simulating ratios of normalizing constants via a simple identity. Statistica
    Sinica 6(4).

    Frühwirth-Schnatter, S. (2004). Estimating marginal likelihoods for mixture and Markov switching models using
    bridge sampling techniques. Econometrics Journal 7(1).
    """
    tails, y = HeavyTailed(gaussians), x[:: max(1, len(x) // 512)][:512]
    x = torch.cat([gaussians(n // 2, x, generator), tails.sample(n - n // 2, generator), y])
    log_q = torch.logaddexp(gaussians.log_density(x), tails.log_density(x)) - math.log(2)
    log_w, log_v = (log_p(x).detach() - log_q).nan_to_num(-math.inf).tensor_split([n])
    by_importance, se = _log_mean(log_w)
    share = 1 / (1 + n * se**2)
    if not len(y) or math.isnan(se):
        return Mass(by_importance, se, share, math.nan)
    log_z, log_s = by_importance, math.log(len(y) / n)
    for _ in range(50):
        above, se_above = _log_mean(log_w - torch.logaddexp(log_w + log_s, torch.full_like(log_w, log_z)))
        below, se_below = _log_mean(-torch.logaddexp(log_v + log_s, torch.full_like(log_v, log_z)))
        log_z = above - below
    return Mass(log_z, math.hypot(se_above, se_below), share, by_importance - log_z)


def _log_mean(log_w: Tensor) -> tuple[float, float]:
    """Return the logarithm of a mean of weights, and its standard error."""
    w, n = (log_w - log_w.max()).exp().nan_to_num(0), len(log_w)
    return (log_w.logsumexp(0) - math.log(n)).item(), (w.std() / w.mean() / math.sqrt(n)).item()


def masses(score_fn: Score, cells: Cells, x: Tensor, generator: torch.Generator, n: int = 512) -> list[Mass]:
    """Return the masses of cells, given draws x (m, d) of p that did not help to fit their Gaussians."""
    log_p, cell = log_prob_in(score_fn, cells), cells.assign(x)

    def inside(k: int, x: Tensor) -> Tensor:
        rows, value = cells.assign(x) == k, x.new_full((len(x),), -math.inf)
        value[rows] = log_p(x[rows]).detach()
        return value

    gaussians = [GaussianMixtureDraws(a.m[None], a.L[None], a.m.new_ones(1)) for a in cells.maps]
    return [mass(partial(inside, k), q, x[cell == k], generator, n) for k, q in enumerate(gaussians)]


def normalised(masses: Sequence[Mass]) -> tuple[Tensor, Tensor]:
    """Return the weights (k,) of parts by their masses, and their standard errors."""
    weights = torch.tensor([mass.log_mass for mass in masses], dtype=torch.float64).softmax(0)
    variances = torch.tensor([mass.se**2 for mass in masses], dtype=torch.float64)
    # of w_k = m_k / sum m: relative errors (e_k - sum_j w_j e_j)
    spread = (weights.square() * variances).sum() + (1 - 2 * weights) * variances
    return weights, weights * spread.clamp_min(0).sqrt()


# A surrogate from the scores at a few points

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
