"""The log-density of a target, its own or by integrals of the score along lines, and the masses of its parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.coordinates._affine import Affine
from skksivi.coordinates._lines import by_few_points, checked_density, kronrod, log_ratio, simpson
from skksivi.mixing import GaussianMixtureDraws
from skksivi.pilot._importance import HeavyTailed
from skksivi.pilot._mixture import gaussian_of
from skksivi.pilot._modes import MAX_STARTS, ModeMaps, find_modes, scattered
from skksivi.pilot._newton import laplace
from skksivi.score._score import Score, ScoreFunction

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


def origin_of(score_fn: Score) -> Affine | None:
    """Return the map to the mode where p is set to one, if only its score is known."""
    return None if score_fn.log_prob is not None else judging_map(score_fn)


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


def by_lines(
    score_fn: ScoreFunction, cells: Cells, heights: Tensor, unweighed: Sequence[Affine] = ()
) -> DensityFunction:
    """Return log p, up to a constant, by integrals of the score from the centre of the cell of a point, where log p
    has these heights (k,).

    Along such lines there is no valley, in which a rule of a few nodes would miss a kink. Where there is one because
    the share of a mode is not known, the integral is from any centre from which there is none.
    """

    def log_prob(x: Tensor) -> Tensor:
        cell = cells.assign(x)
        value = heights[cell]
        for k in cell.unique().tolist():
            rows, centre = (cell == k).nonzero()[:, 0], cells.maps[k].m
            value[rows] += by_few_points(score_fn, centre, x[rows], ((simpson, 0.5), (kronrod, 0.05)))
        for k, a in enumerate(cells.maps if unweighed else ()):
            rows = value.isnan().nonzero()[:, 0]
            value[rows] = heights[k] + log_ratio(score_fn, a.m, x[rows])
        return value

    return log_prob


def log_prob_around(score_fn: Score, modes: ModeMaps) -> DensityFunction:
    """Return log p up to a constant: the target's own, or by lines from the modes."""
    if score_fn.log_prob is not None:
        return score_fn.log_prob
    log_weights = modes.weights.log()
    heights = log_weights - torch.stack([a.log_determinant() for a in modes.maps])
    return by_lines(score_fn, Cells(modes.maps, log_weights), heights, modes.unweighed)


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
