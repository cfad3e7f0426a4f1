"""Importance weights, and what they tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from skksivi._utils.arrays import as_array, html_table
from skksivi._utils.monte_carlo import most_trusted, pareto_smoothed, standard_error
from skksivi.coordinates._lines import Rule, in_panels, kronrod, log_ratio, simpson
from skksivi.coordinates._whitening import Whitening
from skksivi.families._density import N_DRAWS, LogDensity
from skksivi.families._derived import DefensiveMixture, asks_for_score, knows_density, sampler_density
from skksivi.families._samplers import Layer, Layers, Sampler
from skksivi.judge import WeightedRows
from skksivi.pilot._log_density import log_density, origin_of
from skksivi.pilot._pilot import MAX_FEATURES
from skksivi.score._score import Score, ScoreFunction

#: The fewest draws whose ratio must be finite, and the smallest effective sample size of reliable weights.
LEAST_DRAWS, LEAST_EFFECTIVE = 100, 30

#: The largest share of the draws of a fit where log p may be unknown.
MOST_LEFT_OUT = 0.01

#: The share of the fit among the weighted draws; the other half looks where it does not draw.
SHARE = 0.5

#: Further draws of a fit, which cost no call of the score, and the most numbers in them.
N_FREE, MAX_FREE = 20_000, 2**22

#: Draws of a cheap certificate, and those where log p is an integral of the score by seven points.
N_CHEAP, N_INTEGRATED = 256, 128

#: The difference of rules of four and seven points that will do for a verdict, in nats; of the latter the error is a
#: tenth of it or less.
MOST_GAP = 0.5


class Estimate(NamedTuple):
    """A number, or an array of numbers, and its standard error."""

    value: float | np.ndarray
    se: float | np.ndarray


class Certificate(NamedTuple):
    """How far a fit is from its target, as far as weighted draws reach.

    Attributes
    ----------
    divergence : float
        KL(q || p) + KL(p || q), in nats. It adds over features: a small one does not say that each number read off
        the fit is right, see `skksivi.diagnose`.
    se : float
        Its standard error, with what a heavy tail may add that the draws have not shown.
    se_below : float
        Without that: how far the divergence may be below. It is more often underestimated than overestimated.
    k : float
        The shape of the tail of the importance ratios, k-hat.
    share : float
        The effective sample size as a share of the draws, between 0 and 1. Half of the draws are wider than the fit,
        so that it may be a half where the fit is right.
    trusted : bool
        Whether the weights are reliable: an effective sample size of 30 or more, a k-hat of 0.7 or less (somewhat
        less of few draws), and log p known at 99% of the draws of the fit. It says nothing of modes that no draw has
        reached, nor that the divergence is small.
    """

    divergence: float
    se: float
    se_below: float
    k: float
    share: float
    trusted: bool

    def _repr_html_(self) -> str:
        """Return it as a table of HTML."""
        rows = [
            ("divergence, in nats", f"{self.divergence:.2g} ± {self.se:.2g}"),
            ("k-hat", f"{self.k:.2f}"),
            ("effective sample size", f"{self.share:.0%} of the draws"),
            ("weights", "reliable" if self.trusted else "not reliable"),
        ]
        return html_table(rows)


class Evidence(NamedTuple):
    """Bounds on the log evidence, and an estimate; of a target known by its score relative to log p at `reference`.

    Where the weights are not reliable the standard errors of `log_z` and `eubo` are infinite.

    Attributes
    ----------
    elbo : Estimate
        E_q[log p - log q], from below.
    log_z : Estimate
        The logarithm of the integral of p.
    eubo : Estimate
        E_p[log p - log q], from above.
    k : float
        The shape of the tail of the importance ratios.
    trusted : bool
        Whether the weights are reliable, as `log_z` and `eubo` need, see `Certificate`.
    reference : ndarray of shape (n_features,) or None
        Where p is one; None where the target has a `log_prob`.
    """

    elbo: Estimate
    log_z: Estimate
    eubo: Estimate
    k: float
    trusted: bool
    reference: np.ndarray | None


@dataclass(frozen=True)
class ImportanceSample:
    r"""Draws of a fit, and their weights for the target.

    Attributes
    ----------
    X : ndarray of shape (n, n_features)
        Half are draws of the fit; the others are of Gaussians wider than it, in all directions or along a
        coordinate, which look where it does not draw.
    log_ratios : ndarray of shape (n,)
        log p - log q, in nats.
    std : ndarray of shape (n,)
        Standard errors of the log q.
    weights : ndarray of shape (n,)
        Pareto-smoothed ratios of p to the density of both kinds of draws together; they sum to one.
    k : float
        The shape of the tail of these ratios, which have 1/k finite moments.
    log_z, log_z_se : float
        The logarithm of their mean, and its standard error.
    of_fit : ndarray of shape (n,), bool
        Which are draws of the fit.
    weights_of_fit : ndarray of shape (n,)
        Ratios of q to that density; they sum to one.
    reference : ndarray of shape (n_features,) or None
        Where p is one, of a target known by its score alone.
    left_out : float
        The share of the draws of the fit that are not among them, since log p is unknown there: the target's is NaN,
        or the integral of its score leads through too deep a valley.
    draws : ndarray of shape (m, n_features)
        Further draws of the fit, by which its own means are known.
    """

    X: np.ndarray
    log_ratios: np.ndarray
    std: np.ndarray
    weights: np.ndarray
    k: float
    log_z: float
    log_z_se: float
    of_fit: np.ndarray
    weights_of_fit: np.ndarray
    reference: np.ndarray | None
    left_out: float
    draws: np.ndarray

    @property
    def rows(self) -> WeightedRows:
        """The weights for the target and for the fit."""
        return WeightedRows(self.weights, self.weights_of_fit)

    @property
    def share(self) -> float:
        r"""The effective sample size as a share of the draws, :math:`1 / (n \sum_i w_i^2)`."""
        return float(1 / (len(self.weights) * np.square(self.weights).sum()))

    @property
    def lost(self) -> float:
        """The share of the target's mass where its density is more than ten times the fit's."""
        return float(self._lost.sum())

    @property
    def lost_se(self) -> float:
        """Its standard error."""
        return float(np.linalg.norm(self._lost))

    @property
    def _lost(self) -> np.ndarray:
        return self.weights[self.weights > 10 * self.weights_of_fit]

    @property
    def trusted(self) -> bool:
        """Whether the weights are reliable: k is at most min(1 - 1 / log10(n), 0.7), or below one with an effective
        sample size of 200; this is at least 30; and at most 1% is left out.

        A part of the target that no draw has reached shows in none of these.
        """
        n = len(self.weights)
        effective = self.share * n
        light = self.k <= most_trusted(n) or (self.k < 1 and effective >= 200)  # enough even with a heavy tail
        return light and effective >= LEAST_EFFECTIVE and self.left_out <= MOST_LEFT_OUT

    def certificate(self) -> Certificate:
        r"""Return how far the fit is from the target.

        .. math:: J = \mathrm{KL}(q \| p) + \mathrm{KL}(p \| q) = E_q \ell - E_p \ell, \qquad
            \ell = \log q - \log p,

        in which the normaliser of p cancels; what the errors of log q add is taken off. The mean under q is that of
        the draws of the fit alone.
        """
        w, own, ell = self.weights, self.of_fit, -self.log_ratios
        if np.isinf(ell[own]).any():  # the fit has mass where the target has none
            return Certificate(math.inf, 0.0, 0.0, self.k, self.share, self.trusted)
        n, v = len(w), own / own.sum()
        ell = np.where(((v > 0) | (w > 0)) & np.isfinite(ell), ell, 0.0)
        under_q, under_p = v @ ell, w @ ell
        influence = n * v * (ell - under_q) - n * w * (ell - under_p)
        divergence = float(under_q - under_p - np.square(self.std[own]).mean())
        se_below = float(influence.std() / math.sqrt(n))
        return Certificate(divergence, standard_error(influence), se_below, self.k, self.share, self.trusted)

    def finite_certificate(self) -> Certificate | None:
        """Return the certificate, None if a number of it is not finite."""
        found = self.certificate()
        return found if all(map(math.isfinite, found)) else None

    def evidence(self) -> Evidence:
        """Return bounds on the log evidence, and its estimate by importance sampling.

        The integral of the fit's density, which is one, is a control variate. The errors of log q, which the draws
        may share, and what heavy tails of the ratios may add that the draws have not shown are in the standard
        errors. These are infinite where the weights are not reliable. Where the target has no density at some draws
        the lower bound is -inf.
        """
        n, w, own = len(self.weights), self.weights, self.log_ratios[self.of_fit]
        r = self.log_ratios[w > 0]
        eubo, shared = float(w[w > 0] @ r), float(w @ self.std) if self.trusted else math.inf
        elbo = Estimate(-math.inf, 0.0)
        if np.isfinite(own).all():
            elbo = Estimate(float(own.mean()), math.hypot(standard_error(own), self.std[self.of_fit].mean()))
        return Evidence(
            elbo,
            Estimate(self.log_z, math.hypot(self.log_z_se, shared)),
            Estimate(eubo, math.hypot(standard_error(n * w[w > 0] * (r - eubo)), shared)),
            self.k,
            self.trusted,
            self.reference,
        )

    def expectation(self, f: Callable[[np.ndarray], ArrayLike]) -> Estimate:
        """Return the mean of a function under the target, with the fit as a control variate.

        Parameters
        ----------
        f : callable
            Maps X (n, n_features) to an array whose first axis has length n.

        Returns
        -------
        estimate : Estimate
            A pair ``(value, se)``, each of the shape of f of one draw.

        Raises
        ------
        ValueError
            f returns another number of rows, or the weights are not reliable.
        """
        check_trusted(self, "an expectation")
        values, of_draws = (np.asarray(f(X), dtype=np.float64) for X in (self.X, self.draws))
        for found, X in ((values, self.X), (of_draws, self.draws)):
            if found.shape[:1] != X.shape[:1]:
                raise ValueError(f"`f` returned shape {found.shape}, expected a row for each of {len(X)} draws.")
        columns = values.reshape(len(values), -1), of_draws.reshape(len(of_draws), -1)
        mean, se = (a.reshape(values.shape[1:])[()] for a in self.rows.means(*columns))
        return Estimate(mean, se)


def check_trusted(sample: ImportanceSample, what: str) -> None:
    """Raise ValueError unless the weights are reliable."""
    if sample.left_out > MOST_LEFT_OUT:
        raise ValueError(
            f"The log-density of the target is unknown at {sample.left_out:.0%} of the draws, beyond a deep valley "
            f"where the target is known by its score alone: {what} would lack that part. Give it a `log_prob`."
        )
    if not sample.trusted:
        n = len(sample.X)
        raise ValueError(
            f"The importance weights are not reliable: their tail has the shape k = {sample.k:.2f} "
            f"({most_trusted(n):.2f} is allowed), and the effective sample size is {sample.share * n:.0f} "
            f"({LEAST_EFFECTIVE} are needed), so that {what} would rest on a few draws. Improve the fit first, see "
            "`diagnose`."
        )


def importance_weights(
    sampler: Sampler, score: Score, x: Tensor, seed: int, share: float = SHARE
) -> ImportanceSample:
    """Return draws x (n, d) of a sampler, the last of them replaced by wider ones, with their weights.

    Raises
    ------
    ValueError
        The target has no density at nearly all of them.
    """
    origin, n_own, log_p = origin_of(score), round(share * len(x)), None
    generator = torch.Generator(x.device).manual_seed(seed ^ 2)  # others than those of x
    mixture = DefensiveMixture.of(sampler, generator, n_own / len(x))
    x = torch.cat([x[:n_own], mixture.wide(len(x) - n_own, generator)])
    of_sampler, of_fit = sampler_density(sampler).log_density(x), torch.arange(len(x), device=x.device) < n_own
    if origin is not None and isinstance(whitening := sampler.attributes().get("whitening_"), Whitening):
        lines = by_lines_from_modes(score, whitening, kronrod, MOST_GAP / 10, origin.m)
        log_p = lines(x, mixture.mixed(of_sampler, x).value)
    if log_p is None:
        log_p = log_density(score, origin, x)
    reference = None if origin is None else as_array(origin.m)
    return weigh(mixture, x, of_fit, log_p, of_sampler, free_draws(sampler, x[:n_own], seed), reference)


def free_draws(sampler: Sampler, x: Tensor, seed: int) -> Tensor:
    """Return many draws (m, d) of a sampler or, if it draws by the score of its target, the draws x there are."""
    if asks_for_score(sampler):
        return x
    n = min(N_FREE, MAX_FREE // sampler.n_features)
    return sampler.sample(n, torch.Generator(x.device).manual_seed(seed ^ 4)).double()


def weigh(
    mixture: DefensiveMixture,
    x: Tensor,
    of_fit: Tensor,
    log_p: Tensor,
    of_sampler: LogDensity,
    draws: Tensor,
    reference: np.ndarray | None = None,
) -> ImportanceSample:
    """Return draws x (n, d) of a mixture, some of its sampler, with their weights, but those where log p (n,) is NaN.

    Raises
    ------
    ValueError
        The target has no density at nearly all draws of the sampler.
    """
    kept, n_own = ~(log_p.isnan() | log_p.isposinf()), int(of_fit.sum())
    least = LEAST_DRAWS * n_own / len(x)
    if (n_inside := int((log_p.isfinite() & of_fit).sum())) < min(least, n_own):
        raise ValueError(f"`target` has a finite log-density at {n_inside} of {n_own} draws; {least:.0f} are needed.")
    left_out = float((of_fit & ~kept).sum() / of_fit.sum())
    n, x, log_p, of_fit = len(x) - int((of_fit & ~kept).sum()), x[kept], log_p[kept], of_fit[kept]
    of_sampler = LogDensity(*(a[kept] for a in of_sampler))
    log_m = mixture.mixed(of_sampler, x).value
    log_ratios, log_q, std = as_array(log_p - log_m), *map(as_array, of_sampler)
    inside = np.isfinite(log_ratios)
    log_weights, k = pareto_smoothed(log_ratios[inside])
    top, weights = log_ratios[inside].max(), np.zeros(len(log_ratios))
    weights[inside] = np.exp(log_weights - log_weights.max())
    v = as_array((of_sampler.value - log_m).exp())
    if not v.sum() > 0:
        raise ValueError("The fit has no density at its own draws: its numbers have overflowed.")
    log_z, log_z_se = _log_mean(np.where(inside, np.exp(log_ratios - top), 0.0), v, n)
    return ImportanceSample(
        as_array(x),
        as_array(log_p) - log_q,
        std,
        weights / weights.sum(),
        k,
        float(log_z + top),
        log_z_se,
        as_array(of_fit),
        v / v.sum(),
        reference,
        left_out,
        as_array(draws),
    )


def _log_mean(r: np.ndarray, v: np.ndarray, n: int) -> tuple[float, float]:
    """Return the logarithm of the mean of n ratios, of which r (k,) are not zero, with its standard error, given
    those of a density, v (k,), whose mean is one.
    """
    r, v = (np.concatenate([a, np.zeros(n - len(a))]) for a in (r, v))
    beta = max(float(np.cov(r, v)[0, 1] / max(v.var(), 1e-30)), 0.0)
    controlled = r - beta * (v - 1)
    mean = controlled.mean() if controlled.mean() > 0 else r.mean()
    return float(np.log(mean)), standard_error(controlled) / float(mean)


@torch.no_grad()
def weighted_draws(
    sampler: Sampler, score: Score, seed: int, times: Sequence[int] = (1,), whitening: Whitening | None = None
) -> Iterator[ImportanceSample]:
    """Yield some weighted draws, for a few hundred values of the score, or `times` as many, all before among them.

    Of a sampler that has no coordinates these are given.

    Nothing if the sampler has no density or more than 1,000 features, if log p cannot be found that cheaply, or if
    the fit has mass where the target has none. The density of a hierarchy also evaluates the score, at 20,000 points
    per layer.
    """
    if not knows_density(sampler) or sampler.n_features > MAX_FEATURES:
        return
    log_q = sampler.log_density
    if isinstance(sampler, Layer | Layers):
        log_q, whitening = partial(sampler.log_density, most=N_DRAWS), sampler.whitening
    generator, of_wide = (torch.Generator(score.device).manual_seed(each) for each in (seed, seed ^ 2))
    parts, n_before = list[tuple[Tensor, ...]](), 0
    try:
        mixture, lines = DefensiveMixture.of(sampler, of_wide, SHARE), None
        if score.log_prob is None and whitening is not None:
            lines = by_lines_from_modes(score, whitening, simpson, MOST_GAP)
        for n in (each * (N_INTEGRATED if score.log_prob is None else N_CHEAP) for each in times):
            own = sampler.sample(n - n_before, generator)[: round(SHARE * (n - n_before))]
            x, n_before = torch.cat([own, mixture.wide(n - n_before - len(own), of_wide)]), n
            of_fit = torch.arange(len(x), device=x.device) < len(own)
            of_sampler, log_p = log_q(x), None if score.log_prob is None else score.log_prob(x)
            if lines is not None:
                log_p = lines(x, mixture.mixed(of_sampler, x).value)
            if log_p is None:
                return
            log_p = log_p.where(of_fit | ~log_p.isnan(), -math.inf)  # the numbers of p may overflow far out
            parts.append((x, of_fit, log_p, *of_sampler))
            x, of_fit, log_p, *of_both = (torch.cat(each) for each in zip(*parts, strict=True))
            yield weigh(mixture, x, of_fit, log_p, LogDensity(*of_both), free_draws(sampler, x[of_fit], seed))
    except ConnectionError:  # without its worker or its data no call of the score succeeds
        raise
    except Exception:  # a fit is not to fail by this, whatever its score may raise
        return


def cost_of_weights(sampler: Sampler, score: Score) -> float:
    """Return about how many values of the score the first of `weighted_draws` take."""
    if asks_for_score(sampler):
        return math.inf
    return N_CHEAP if score.log_prob is not None else 3 * N_INTEGRATED


def by_lines_from_modes(
    score: Score, whitening: Whitening, rule: Rule, most_gap: float, reference: Tensor | None = None
) -> Callable[[Tensor, Tensor], Tensor | None]:
    """Return a function that integrates the score from the nearest mode to points, given the log-density that has
    drawn them, and returns log p (n,); None where too many that matter cannot be integrated by Kronrod's rule.

    Lines are straight in coordinates where the target nearly is a standard normal distribution, whose score is taken
    off, but for those that need many points: where two rules differ by more than the most gap, in nats. p is one at
    the reference (d,), or at the first mode.
    """
    map_, warp, score_u = whitening.map, whitening.warp, whitening.pull_back(score)
    centres = torch.as_tensor(whitening.modes).to(map_.m)
    if warp is not None or len(centres) < 2:
        centres = map_.m[None]
    origins, at_origins = (centres, 0.0) if warp is None else warp.unwarp(centres)
    heights, at_centres = centres.new_zeros(len(centres)), map_.whiten(centres)
    if reference is not None:
        heights = log_ratio(score, reference, origins)  # NaN beyond a deep valley
    elif len(centres) > 1:
        heights[1:] = log_ratio(score, origins[0], origins[1:])

    def log_prob(x: Tensor, log_m: Tensor) -> Tensor | None:
        y, log_scale = (x, 0.0) if warp is None else warp.warp(x)
        u = map_.whiten(y)
        nearest = torch.cdist(u, at_centres).nan_to_num(math.inf).argmin(1)
        known = heights[nearest] - (log_scale - at_origins)
        integral, gap = _from_nearest(score_u, at_centres, u, nearest, known - log_m, rule, most_gap)
        log_p, rough = known + integral, _matters(integral, known - log_m, gap, most_gap)
        if not (gap < most_gap).any():
            return None
        most_calls = score.tally.total + 50 * len(x)  # the points of all lines that need many
        for some in rough.nonzero()[:, 0].split(8):
            if score.tally.total > most_calls or score.tally.fault is not None:  # integrals of noise have no end
                return None
            for k, rows in _groups(nearest, some):
                log_p[rows] = heights[k] + log_ratio(score, origins[k], x[rows])
        return log_p

    return log_prob


def _from_nearest(
    score_u: ScoreFunction, a: Tensor, u: Tensor, nearest: Tensor, others: Tensor, rule: Rule, most_gap: float
) -> tuple[Tensor, Tensor]:
    """Return integrals (n,) of a score to points u (n, d) from the nearest of others, a (k, d), and their gaps: by
    panels, with a better rule and more of them where their gap exceeds the most, given the others that are in the
    log-weights.

    Simpson's rule, with a gap up to twice the most, will do where it agrees with Kronrod's along some lines.
    """
    lengths = (u - a[nearest]).norm(dim=1) / (math.sqrt(u.shape[1]) + 3)
    lengths = lengths.nan_to_num(1.0, posinf=1.0).clamp_max(1e6)
    of_normal = (a.square().sum(1)[nearest] - u.square().sum(1)) / 2
    integral, gap = torch.zeros_like(lengths), torch.full_like(lengths, math.inf)

    def integrate(rows: Tensor, rule: Rule, n: int) -> Tensor:  # parts of the first panel
        before = integral[rows]
        for k, some in _groups(nearest, rows):
            ratio, gap[some] = in_panels(lambda u: score_u(u) + u, a[k], u[some], n * lengths[some], rule)
            integral[some] = of_normal[some] + ratio
        return (integral[rows] - before).abs()

    if rule is simpson:
        integrate(torch.arange(len(u), device=u.device), simpson, 1)
        gap /= 2
        sure = (gap < most_gap).nonzero()[:, 0]
        if (integrate(sure[:16], kronrod, 1) > 0.1).any():  # nats
            integrate(sure[16:], kronrod, 1)
    for n in (1, 4):
        integrate(_matters(integral, others, gap, most_gap).nonzero()[:, 0], kronrod, n)
    return integral, gap


def _groups(of: Tensor, rows: Tensor) -> list[tuple[int, Tensor]]:
    """Return rows in groups by a number of each."""
    return [(k, rows[of[rows] == k]) for k in of[rows].unique().tolist()]


def _matters(integral: Tensor, others: Tensor, gap: Tensor, most: float) -> Tensor:
    """Tell of which integrals the gap exceeds the most, unless what else is in the log-weights says that they are
    negligible, be it that half of a large one is error. One is NaN where the score on the way is, whatever the rule.
    """
    log_weights, surely = integral + others, gap < most
    best = log_weights[surely].max() if surely.any() else -math.inf
    return ~surely & ~gap.isnan() & ~(log_weights + torch.minimum(gap, integral.abs() / 2) < best - 15)


def cheap_certificate(sampler: Layer | Layers, score: Score, seed: int) -> Certificate | None:
    """Return the certificate of some weighted draws, None where there is none."""
    found = next(weighted_draws(sampler, score, seed), None)
    return None if found is None else found.finite_certificate()
