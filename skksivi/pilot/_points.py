"""Points near a target, and how they are judged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.coordinates._affine import Affine, AffineMap
from skksivi.coordinates._whitening import LAPLACE, Curved
from skksivi.judge import THRESHOLDS, Grade, Verdict, WeightedDraws
from skksivi.pilot._mixture import N_DRAWS, Components, fitted_mixture, gaussian_of
from skksivi.score._score import ScoreFunction
from skksivi.score._tally import BudgetError

#: Features from which on points are judged by the errors of their means and by chains that agree, because no mixture
#: has weights that count.
MANY_FEATURES = 30

#: Features beyond which the map is diagonal plus low rank, by the curvature at a mode: a Newton step costs O(d^3).
MAX_FEATURES = 1000


class Limit(NamedTuple):
    """Something measured, in words that take its value, and the most that is good enough."""

    words: str
    value: float
    most: float

    @property
    def holds(self) -> bool:
        return self.value <= self.most

    def __str__(self) -> str:
        return self.words.format(self.value) + ("" if self.holds else f" > {self.most:.3g}")


def within(by: str, *limits: Limit) -> Verdict:
    """Return that points are good by something if all limits hold, else the limits that are exceeded."""
    beyond = [limit for limit in limits if not limit.holds]
    return Verdict(Grade.ROUGH if beyond else Grade.GOOD, ", ".join(map(str, beyond or limits)), by=by)


def judge_chains(rhat: float, error: float, n_features: int, n_trajectories: int) -> Verdict:
    """Judge a few chains whose moments have this largest standard error."""
    if n_features < MANY_FEATURES:
        return Verdict(Grade.ROUGH, f"below {MANY_FEATURES} features, chains are checked by importance weights")
    most = THRESHOLDS.chain_errors[n_trajectories >= THRESHOLDS.long_chains]
    limits = Limit("R-hat {:.3g}", rhat, THRESHOLDS.rhat), Limit("errors {:.2g}", error, most)
    return within("chains", *limits)


def has_small_errors(n_features: int, error: float) -> bool:
    """Tell whether the largest standard error of a mean, in sd, is small for so many features."""
    return n_features >= MANY_FEATURES and error < THRESHOLDS.small_errors


def judge_halves(kept: Tensor) -> Verdict:
    """Judge states (n_kept, n, d) of many chains, or of many dimensions: whether the earlier and the later half agree
    in mean and scale, within the noise of so many chains.
    """
    _, n, d = kept.shape
    early, late = kept.chunk(2)
    shift = (early.mean((0, 1)) - late.mean((0, 1))).abs() / late.std((0, 1))
    ratio = (early.std((0, 1)) / late.std((0, 1))).log().abs()
    apart, most = torch.maximum(shift, ratio).max().item(), (0.5 + math.sqrt(2 * math.log(2 * d))) / math.sqrt(n)
    return within("chains", Limit(f"halves of {n} chains are {{:.2g}} sd apart", apart, most))


class PilotPoints(NamedTuple):
    """Points near the target, with their properties.

    Attributes
    ----------
    x : Tensor of shape (n, d)
        Points, sorted by the mode they are near.
    n_of_mode : list of int
        Number of points near each mode.
    mean_se : Tensor of shape (d,)
        Standard errors of their mean, from the spread over independent chains.
    verdict : Verdict
        By the stage that has found them.
    dense : bool
        Whether there is mass between the points of a mode.
    mixture : Components or None
        A mixture fitted to the points.
    warp : Curved or None
        The map to the coordinates of the target, if the points are in its coordinates y.
    found_by : str
        What has found them.
    draws : WeightedDraws or None
        Of the mixture, if its weights have judged it.
    """

    x: Tensor
    n_of_mode: list[int]
    mean_se: Tensor
    verdict: Verdict = Verdict(Grade.ROUGH)
    dense: bool = True
    mixture: Components | None = None
    warp: Curved | None = None
    found_by: str = LAPLACE
    draws: WeightedDraws | None = None

    @property
    def converged(self) -> bool:
        return self.verdict.good

    def map(self) -> Affine:
        """Return the map by mean and covariance; if points are too few, by the covariance of their only Gaussian."""
        n, d = self.x.shape
        if self.mixture is not None and len(self.mixture.weights) == 1 and n < 20 * d:  # too few for a covariance
            return self.mixture.map()
        return gaussian_of(self.x)

    @property
    def error(self) -> float:
        """The largest standard error of a mean, in standard deviations."""
        return (self.mean_se / self.x.std(0)).max().item() if len(self.x) else math.inf

    def judged(self) -> Verdict:
        """Return the verdict, raised where the errors of many features are small."""
        if self.verdict.grade > Grade.ROUGH or not has_small_errors(self.x.shape[1], self.error):
            return self.verdict
        return Verdict(Grade.SMALL_ERRORS, f"errors {self.error:.2g}")

    def of_modes(self) -> Sequence[Tensor]:
        return self.x.split(self.n_of_mode)

    def thinned(self, n: int) -> PilotPoints:
        """Return at most about n of the points, the same share of each mode."""
        every = -(-len(self.x) // n)
        parts = [part[::every] for part in self.of_modes()]
        return self._replace(x=torch.cat(parts), n_of_mode=[len(part) for part in parts])

    def whitened(self, map: AffineMap, dtype: torch.dtype) -> PilotPoints:  # noqa: A002
        return self._replace(x=map.whiten(self.x).to(dtype))

    def mixture_in(self, map: AffineMap, generator: torch.Generator) -> Components:  # noqa: A002
        if self.mixture is not None and isinstance(map, Affine):
            return self.mixture.whitened(map)
        return fitted_mixture(self._replace(x=map.whiten(self.x)).of_modes(), generator)

    def unwhitened(self, map: Affine) -> PilotPoints:  # noqa: A002
        """Return the points in x, given points in u, with errors that hold for any correlation."""
        scale = map.L.norm(dim=1)
        mixture = None if self.mixture is None else self.mixture.unwhitened(map)
        return self._replace(x=map.unwhiten(self.x), mean_se=self.mean_se.max() * scale, mixture=mixture)

    def conditional_sd(self, score_fn: ScoreFunction, map: AffineMap) -> Tensor:  # noqa: A002
        r"""Return the standard deviations (d,) of the coordinates u of a map given the others.

        By Stein's identity the mean of their inverse squares is :math:`E s_i^2 = E[-\partial_i s_i]`. A few rows do.
        They are capped at one, the marginal standard deviation of u, which points not yet at the target would exceed;
        where the budget is spent they are one.
        """
        x, sd = self.x[:: max(1, len(self.x) // N_DRAWS)], torch.ones_like(self.mean_se)
        with suppress(BudgetError):
            sd = map.whiten_score(score_fn(x).detach()).square().mean(0).rsqrt().clamp_max(1.0)
        return sd

    def width_within(self) -> Tensor:
        """Return the interquartile ranges (d,) within the narrowest mode, in units of a normal's deviation.

        Heavy tails do not affect them.
        """
        quartiles = self.x.new_tensor([0.25, 0.75])
        ranges = [part.quantile(quartiles, dim=0).diff(dim=0)[0] for part in self.of_modes()]
        return torch.stack(ranges).amin(0) / 1.349
