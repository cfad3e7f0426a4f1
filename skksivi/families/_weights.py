"""Draws of a fit and of wider Gaussians, with the log-density of a target, and their weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from skksivi._utils.arrays import as_array
from skksivi._utils.monte_carlo import pareto_smoothed, standard_error
from skksivi.coordinates._affine import Affine
from skksivi.coordinates._lines import Rule, in_panels, kronrod, log_ratio, simpson
from skksivi.coordinates._whitening import Whitening
from skksivi.families._density import MOST_DRAWS, N_DRAWS, LogDensity
from skksivi.families._derived import (
    SHARE,
    DefensiveMixture,
    asks_for_score,
    gaussians_of,
    knows_density,
    sampler_density,
)
from skksivi.families._samplers import Gaussians, Layer, Layers, Sampler
from skksivi.judge import Certificate, WeightedDraws
from skksivi.mixing import GaussianMixtureDraws
from skksivi.pilot._log_density import judging_map, log_density
from skksivi.pilot._mixture import Components
from skksivi.pilot._moments import standard_normal_mixture
from skksivi.pilot._points import MAX_FEATURES
from skksivi.score._score import Score, ScoreFunction
from skksivi.score._tally import DIVERGED, BudgetError

#: The fewest draws whose ratio must be finite.
LEAST_DRAWS = 100

#: Further draws of a fit, which cost no call of the score, and the most numbers in them, and in those that are kept.
N_FREE, MAX_FREE, MAX_KEPT = 20_000, 2**22, 2**20

#: Draws of a cheap certificate, and those where log p is an integral of the score.
N_CHEAP, N_INTEGRATED = 256, 128

#: The difference of two rules that will do, in nats; the error is a tenth of it or less.
MOST_GAP = 0.5


#: Maps points x (n, d) and the log-density that has drawn them to log p (n,), None where it is not known.
LogProb = Callable[[Tensor, Tensor], Tensor | None]


# The draws


class UnknownWeightsError(ValueError):
    """The target, or the fit itself, has no density at nearly all draws of the fit."""


#: What is known of each row, in the words of `WeightedDraws`.
FIELDS: tuple[Any, ...] = ("X", "of_fit", "log_p", "log_q", "log_q_se", "log_m")


class Rows(NamedTuple):
    """Draws x (n, d) of a defensive mixture, some of its sampler: what is known of each, (n,)."""

    x: Tensor
    of_fit: Tensor
    log_p: Tensor
    log_q: Tensor
    log_q_se: Tensor
    log_m: Tensor

    @classmethod
    def of(cls, draws: WeightedDraws, device: torch.device) -> Rows:
        """Return the rows of weighted draws."""
        return cls(*(torch.as_tensor(getattr(draws, name), device=device) for name in FIELDS))

    @classmethod
    def none(cls, d: int, device: torch.device) -> Rows:
        """Return no rows."""
        empty = torch.empty(0, dtype=torch.float64, device=device)
        return cls(empty.view(0, d), empty.bool(), *[empty] * 4)

    def followed_by(self, more: Rows) -> Rows:
        return Rows(*map(torch.cat, zip(self, more, strict=True)))


class Source:
    """What draws rows by a seed, half by a sampler and half by Gaussians wider than it, with log p at each.

    Parameters
    ----------
    sampler : Sampler
        One with a density.
    score : Score
        Of float64 points.
    seed : int
    whitening : Whitening, optional
        For a sampler that has none.
    before : WeightedDraws, optional
        Those that its rows follow, of the same sampler and target.
    is_exact : bool, default=False
        Whether log p and log q are to be found at any cost.
    reference : Tensor of shape (d,), default=None
        Where p is to be one, if only the score is known; None means a mode.
    cells : Components, default=None
        Gaussians at the modes of the whitening: a line to a point begins where that is the likeliest there, at the
        nearest mode by default.
    """

    def __init__(
        self,
        sampler: Sampler,
        score: Score,
        seed: int,
        whitening: Whitening | None = None,
        before: WeightedDraws | None = None,
        *,
        is_exact: bool = False,
        reference: Tensor | None = None,
        cells: Components | None = None,
    ) -> None:
        self.sampler, self.score, self.seed = sampler, score, seed
        self.generator, self.of_wide = (torch.Generator(score.device).manual_seed(each) for each in (seed, seed ^ 2))
        self.mixture = DefensiveMixture.of(sampler, self.of_wide)
        self.rows = Rows.none(sampler.n_features, score.device)
        self.free: np.ndarray | None = None
        self.n_free = N_FREE
        self.n_before, self.n_left_out = 0, 0
        if before is not None:  # the same Gaussians, other draws
            self.rows, self.free, n = Rows.of(before, score.device), before.draws, len(before.X) << 32
            self.n_before, self.n_left_out = before.n_calls, before.n_left_out
            self.generator.manual_seed(seed ^ n)
            self.of_wide.manual_seed(seed ^ 2 ^ n)
            reference = None if before.reference is None else torch.as_tensor(before.reference, device=score.device)
        self.most = MOST_DRAWS if is_exact else N_DRAWS
        self.began = score.tally.total
        self.log_prob, origin = log_prob_of(score, sampler, whitening, reference, cells, is_exact=is_exact)
        self.reference = None if origin is None else as_array(origin)

    def draw(self, n: int) -> WeightedDraws | None:
        """Draw until there are n rows, and return all of them with their weights, None where log p is not known.

        Raises
        ------
        ValueError
            The target has no density at nearly all draws of the sampler.
        """
        n -= len(self.rows.x)
        own = self.sampler.sample(n, self.generator)[: round(SHARE * n)].double()
        x = torch.cat([own, self.mixture.wide(n - len(own), self.of_wide)])
        of_fit, log_density = torch.arange(n, device=x.device) < len(own), sampler_density(self.sampler).log_density
        if isinstance(self.sampler, Layer | Layers):
            log_density = partial(self.sampler.log_density, most=self.most)
        log_q, se = log_density(x)
        log_m = self.mixture.mixed(LogDensity(log_q, se), x).value
        log_p = self.log_prob(x, log_m)
        if log_p is None:
            return None
        # the numbers of p may overflow far out
        log_p = log_p.where(of_fit | ~(log_p.isnan() | log_p.isposinf()), -math.inf)
        self.rows = self.rows.followed_by(Rows(x, of_fit, log_p, log_q, se, log_m))
        if self.free is None or asks_for_score(self.sampler):
            own = self.rows.x[self.rows.of_fit]
            self.free = as_array(free_draws(self.sampler, own, self.seed, self.n_free))
        n_calls = self.n_before + self.score.tally.total - self.began
        return weighted(self.rows, self.free, self.seed, n_calls, self.n_left_out, self.reference)


def free_draws(sampler: Sampler, x: Tensor, seed: int, n: int = N_FREE) -> Tensor:
    """Return n draws (n, d) of a sampler, or as many as memory allows, or, if it draws by the score of its target,
    the draws x there are.
    """
    if asks_for_score(sampler):
        return x
    n = min(n, MAX_FREE // sampler.n_features)
    return sampler.sample(n, torch.Generator(x.device).manual_seed(seed ^ 4)).double()


def weighted(
    rows: Rows, draws: np.ndarray, seed: int, n_calls: int, n_left_out: int = 0, reference: np.ndarray | None = None
) -> WeightedDraws:
    """Return rows with their weights, but draws of the fit where log p is NaN.

    Raises
    ------
    ValueError
        The target has no density at nearly all draws of the sampler.
    """
    kept, n_own = ~(rows.log_p.isnan() | rows.log_p.isposinf()), int(rows.of_fit.sum()) + n_left_out
    least = LEAST_DRAWS * n_own / (len(kept) + n_left_out)
    if (n_inside := int((rows.log_p.isfinite() & rows.of_fit).sum())) < min(least, n_own):
        raise UnknownWeightsError(
            f"`target` has a finite log-density at {n_inside} of {n_own} draws; {least:.0f} are needed."
        )
    n_left_out += int((~kept).sum())
    rows = Rows(*(a[kept] for a in rows))
    log_ratios = as_array(rows.log_p - rows.log_m)
    inside = np.isfinite(log_ratios)
    log_weights, k = pareto_smoothed(log_ratios[inside])
    top, weights = log_ratios[inside].max(), np.zeros(len(log_ratios))
    weights[inside] = np.exp(log_weights - log_weights.max())
    v = as_array((rows.log_q - rows.log_m).exp())
    if not v.sum() > 0:
        raise UnknownWeightsError("The fit has no density at its own draws: its numbers have overflowed.")
    log_z, log_z_se = _log_mean(np.where(inside, np.exp(log_ratios - top), 0.0), v)
    return WeightedDraws(
        **dict(zip(FIELDS, map(as_array, rows), strict=True)),
        weights=weights / weights.sum(),
        weights_of_fit=v / v.sum(),
        k=k,
        log_z=float(log_z + top),
        log_z_se=log_z_se,
        draws=draws,
        seed=seed,
        n_calls=n_calls,
        n_left_out=n_left_out,
        reference=reference,
    )


def _log_mean(r: np.ndarray, v: np.ndarray) -> tuple[float, float]:
    """Return the logarithm of the mean of ratios r (n,), with its standard error, given those of a density, v (n,),
    whose mean is one.
    """
    beta = max(float(np.cov(r, v)[0, 1] / max(v.var(), 1e-30)), 0.0)
    controlled = r - beta * (v - 1)
    mean = controlled.mean() if controlled.mean() > 0 else r.mean()
    return float(np.log(mean)), standard_error(controlled) / float(mean)


@torch.no_grad()
def weighted_draws(
    sampler: Sampler, score: Score, seed: int, times: Sequence[float] = (1,), before: WeightedDraws | None = None
) -> Iterator[WeightedDraws]:
    """Yield some weighted draws, for a few hundred values of the score, or `times` as many, all before among them.

    Nothing if the sampler has no density or more than 1,000 features, if log p cannot be found that cheaply, or if
    the fit has mass where the target has none. The density of a hierarchy also evaluates the score, at 20,000 points
    per layer.
    """
    if not knows_density(sampler) or sampler.n_features > MAX_FEATURES:
        return
    spent = score.tally.spent
    try:
        source = Source(sampler, score, seed, before=before)
        n_first = N_INTEGRATED if score.log_prob is None else N_CHEAP
        for n in times:
            found = source.draw(round(n * n_first) if before is None else round(n * len(before.X)))
            if found is None:
                return
            yield found
    except (UnknownWeightsError, *DIVERGED):
        return
    except BudgetError:
        if score.tally.is_frugal:  # its budget is its own, and these its last calls
            score.tally.spent = spent
    except Exception as error:  # a fit is not to fail by this, whatever its score may raise
        if error is not score.tally.raised or isinstance(error, ConnectionError):
            raise


def kept_draws(draws: WeightedDraws, score: Score) -> WeightedDraws:
    """Return weighted draws as a fit keeps them: with the parameters of the model, and no more than needed of the
    fit's own. Names are left out where the parameters cannot be had, or are too many.
    """
    draws = replace(draws, up_to_constant=score.up_to_constant, data=score.data)
    try:
        m = MAX_KEPT // (draws.X.shape[1] + len(score.parameters_at(draws.draws[:2])[0]))
        return draws if m < LEAST_DRAWS else with_parameters(replace(draws, draws=draws.draws[:m]), score)
    except Exception:  # a fit is not to fail by this, whatever a model may raise
        return draws


def with_parameters(draws: WeightedDraws, score: Score) -> WeightedDraws:
    """Return weighted draws with the names and values of the parameters of a model.

    What weighs nothing counts as the first draw: it may lie where a model cannot be evaluated.

    Raises
    ------
    TypeError, ValueError
        `constrain` of the target does not return an array with a row for each point by the name of each parameter.
    """
    names, g = score.parameters_at(draws.draws)
    if score.constrain is None:
        return replace(draws, names=tuple(names))
    matters = (draws.weights > 1e-12) | (draws.weights_of_fit > 1e-12)
    f = np.tile(g[0], (len(matters), 1))
    f[matters] = score.parameters_at(draws.X[matters])[1]
    return replace(draws, names=tuple(names), parameters=f, parameters_of_draws=g)


# log p


def log_prob_of(
    score: Score,
    sampler: Sampler,
    whitening: Whitening | None,
    reference: Tensor | None,
    cells: Components | None,
    *,
    is_exact: bool,
) -> tuple[LogProb, Tensor | None]:
    """Return log p at points that were drawn with a log-density, and where p is one: the target's own, or integrals
    of its score from the modes that a sampler knows, or from one that is searched.
    """
    if score.log_prob is not None:
        log_prob = score.log_prob
        return lambda x, _: log_prob(x), None
    whitening = whitening or sampler.attributes().get("whitening_")
    if not isinstance(whitening, Whitening):
        if not is_exact:
            return lambda _x, _log_m: None, None
        origin = judging_map(score)
        return lambda x, _: log_density(score, origin, x), origin.m
    lines = ByLines(score, whitening, reference, None if is_exact else gaussians_of(sampler), cells)

    def log_prob_at(x: Tensor, log_m: Tensor) -> Tensor | None:
        log_p = lines(x, log_m)
        return log_density(score, Affine.shift(lines.reference), x) if log_p is None and is_exact else log_p

    return log_prob_at, lines.reference


def cost_of_weights(sampler: Sampler, score: Score) -> float:
    """Return about how many values of the score the first of `weighted_draws` take."""
    if asks_for_score(sampler):
        return math.inf
    return N_CHEAP if score.log_prob is not None else 3 * N_INTEGRATED


class ByLines:
    """Log p at points by integrals of the score, less that of Gaussians near the target or of a standard normal
    distribution, from the modes that coordinates know; straight in these, but for lines that need many points.

    Attributes
    ----------
    reference : Tensor of shape (d,)
        Where p is one, the first mode unless it is given.
    """

    def __init__(
        self,
        score: Score,
        whitening: Whitening,
        reference: Tensor | None,
        near: Gaussians | None,
        cells: Components | None,
    ) -> None:
        self.score, self.map, self.warp = score, whitening.map, whitening.warp
        self.score_u = whitening.pull_back(score)
        centres = torch.as_tensor(whitening.modes).to(self.map.m)
        if self.warp is not None or len(centres) < 2:
            centres = self.map.m[None]
        self.cells = cells if cells is not None and len(cells.weights) == len(centres) else None
        none = centres.new_zeros(1)
        self.origins, self.at_origins = (centres, none) if self.warp is None else self.warp.unwarp(centres)
        self.heights, self.centres = centres.new_zeros(len(centres)), self.map.whiten(centres)
        if len(centres) > 1:
            self.heights[1:] = log_ratio(score, self.origins[0], self.origins[1:])
        if self.cells is not None:  # as much mass at modes beyond a valley where p is zero as at the first
            log_scales = self.cells.factors().diagonal(dim1=1, dim2=2).log().sum(1)
            self.heights = self.heights.where(self.heights.isfinite(), log_scales[0] - log_scales)
        if reference is not None and not torch.equal(reference, self.origins[0]):
            self.heights += log_ratio(score, reference, self.origins[:1])
        self.reference = self.origins[0] if reference is None else reference
        self.q = standard_normal_mixture(self.map.m).draws()
        if near is not None and near.warp is self.warp and isinstance(self.map, Affine):
            self.q = near.mixture.whitened(self.map).draws()

    def __call__(self, x: Tensor, log_m: Tensor) -> Tensor | None:
        """Return log p (n,) at points x (n, d) that were drawn with a log-density (n,), None where too many that
        matter cannot be integrated by Kronrod's rule.
        """
        y, log_scale = (x, x.new_zeros(len(x))) if self.warp is None else self.warp.warp(x)
        u, log_scale = self.map.whiten(y), log_scale - self.at_origins
        if self.cells is not None:
            nearest = self.cells.draws().log_parts(x).argmax(0)
        else:
            nearest = torch.cdist(u, self.centres).nan_to_num(math.inf).argmin(1)
        known = self.heights[nearest] - log_scale
        integral, gap = _from_nearest(self.score_u, self.q, self.centres, u, nearest, known - log_m)
        log_p, rough = known + integral, _matters(integral, known - log_m, gap)
        tally = self.score.tally
        most_calls = tally.total + 50 * len(x)  # the points of all lines that need many
        if not (gap < MOST_GAP).any():
            return None
        for some in rough.nonzero()[:, 0].split(8):
            if tally.total > most_calls or tally.fault is not None:  # integrals of noise have no end
                return None
            for k, rows in _groups(nearest, some):
                log_p[rows] = self.heights[k] + log_ratio(self.score, self.origins[k], x[rows])
        return log_p


def _from_nearest(
    score_u: ScoreFunction,
    q: GaussianMixtureDraws,
    a: Tensor,
    u: Tensor,
    nearest: Tensor,
    others: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return integrals (n,) of a score to points u (n, d) from the nearest of others, a (k, d), and their gaps: of
    the difference from Gaussians q by panels, with a better rule and more of them where their gap exceeds the most,
    given the others that are in the log-weights.

    Simpson's rule, with a gap up to twice the most, will do where it agrees with Kronrod's along some lines.
    """
    lengths = (u - a[nearest]).norm(dim=1) / (math.sqrt(u.shape[1]) + 3)
    lengths = lengths.nan_to_num(1.0, posinf=1.0).clamp_max(1e6)
    of_gaussians = q.log_density(u) - q.log_density(a)[nearest]
    integral, gap = torch.zeros_like(lengths), torch.full_like(lengths, math.inf)

    def integrate(rows: Tensor, rule: Rule, n: float) -> Tensor:  # parts of the first panel, one panel for all of 0
        before = integral[rows]
        for k, some in _groups(nearest, rows):
            ratio, gap[some] = in_panels(lambda u: score_u(u) - q.score(u), a[k], u[some], n * lengths[some], rule)
            integral[some] = of_gaussians[some] + ratio
        return (integral[rows] - before).abs()

    integrate(torch.arange(len(u), device=u.device), simpson, 0)
    is_far = lengths > 1  # over which one panel may pass
    gap = (gap / 2).where(~is_far | gap.isnan(), math.inf)
    far = _matters(integral, others, gap) & is_far
    integrate(far.nonzero()[:, 0], simpson, 1)
    gap = (gap / 2).where(far, gap)
    sure = (gap < MOST_GAP).nonzero()[:, 0]
    if (integrate(sure[:16], kronrod, 1) > 0.1).any():  # nats
        integrate(sure[16:], kronrod, 1)
    for n in (1, 4):
        integrate(_matters(integral, others, gap).nonzero()[:, 0], kronrod, n)
    return integral, gap


def _groups(of: Tensor, rows: Tensor) -> list[tuple[int, Tensor]]:
    """Return rows in groups by a number of each."""
    return [(k, rows[of[rows] == k]) for k in of[rows].unique().tolist()]


def _matters(integral: Tensor, others: Tensor, gap: Tensor) -> Tensor:
    """Tell of which integrals the gap exceeds the most, unless what else is in the log-weights says that they are
    negligible, be it that half of a large one is error. One is NaN where the score on the way is, whatever the rule.
    """
    log_weights, surely = integral + others, gap < MOST_GAP
    best = log_weights[surely].max() if surely.any() else -math.inf
    return ~surely & ~gap.isnan() & ~(log_weights + torch.minimum(gap, integral.abs() / 2) < best - 15)


def cheap_certificate(sampler: Layer | Layers, score: Score, seed: int) -> Certificate | None:
    """Return the certificate of some weighted draws, None where there is none."""
    found = next(weighted_draws(sampler, score, seed), None)
    return None if found is None else found.finite_certificate()
