"""The judge of a fit: how far may a number that is read off it be from the posterior's?

It asks in the order of cost, each question only if the one before it has no answer: weighted draws, whose number
grows while an error may be beyond its limit; of many features, for which weights fail, chains that agree and lines
along directions given all else; Stein's identities.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from skksivi._utils.arrays import as_array
from skksivi.coordinates._affine import Identity
from skksivi.coordinates._whitening import Whitening, n_looks
from skksivi.families._derived import knows_density
from skksivi.families._samplers import Layer, Layers, Sampler
from skksivi.families._weights import MAX_FREE, N_CHEAP, N_FREE, cost_of_weights, weighted_draws
from skksivi.judge import THRESHOLDS, Errors, Grade, Numbers, Verdict, WeightedDraws
from skksivi.pilot._points import MANY_FEATURES, MAX_FEATURES, has_small_errors
from skksivi.score._score import Score
from skksivi.start._errors import LEVELS, is_beyond, of_weights, seems_off, suspects, unknown
from skksivi.stein._discrepancy import MOST_CALLS, N_SCORES, first_difference, stein_shift, stein_variances
from skksivi.training._run import Fit

#: Calls that a verdict may take to know numbers within their limit, however few the fit has taken.
MOST_CHECKED = 8192

#: Calls of a training for each weighted draw: the density of a network takes as long as some hundred of its steps.
OF_NETWORK = 256

#: Draws by whose scores Stein's identities tell a fit that is far off after a long training.
N_STEIN = 4000


class Judged(NamedTuple):
    """A verdict, and the weighted draws behind it, None where they are not known."""

    verdict: Verdict
    draws: WeightedDraws | None = None

    def of(self, fit: Fit) -> Fit:
        """Return a fit with this verdict, the draws behind it and its certificate, None if that is not finite."""
        certificate = None if self.draws is None else self.draws.finite_certificate()
        own = {"weighted_draws_": self.draws, "certificate_": certificate, "verdict_": self.verdict}
        return fit._replace(report={**fit.report, **own})

    def with_remedy(self, sampler: Layer | Layers, score: Score) -> Judged:
        """Return this with what to do where it is not good, and what its search may have left out."""
        if self.verdict.good:
            return self
        refines = self.draws is not None and self.draws.trusted and self.verdict.errors is not None
        verdict = replace(self.verdict, remedy=remedy_of(sampler, score, refines=refines))
        if (
            sampler.whitening.unseen > THRESHOLDS.unseen
            and (words := _of_search(sampler.whitening) or "") not in verdict.reason
        ):
            verdict = replace(verdict, reason=f"{words}, and {verdict.reason}")
        return self._replace(verdict=verdict)


def judged(
    fit: Fit, score: Score, seed: int, n_values: int, most: int | None = None, before: Judged | None = None
) -> Fit:
    """Return a fit with its verdict, the draws behind it and its certificate.

    Parameters
    ----------
    fit : Fit
    score : Score
    seed : int
    n_values : int
        Score calls of the training.
    most : int, default=None
        The most calls of the whole fit.
    before : Judged, default=None
        The verdict of draws that the fit was not fitted to; more follow where it is not good.
    """
    score.tally.begin("certificate")
    return judge(fit.sampler, score, seed, n_values, most, before).of(fit)


@torch.no_grad()
def judge(
    sampler: Sampler,
    score: Score,
    seed: int,
    n_values: int = 0,
    most: int | None = None,
    before: Judged | None = None,
) -> Judged:
    """Judge a fit by its sampler, see `judged`. What fails in the judge itself is no verdict, and it is said."""
    if not isinstance(sampler, Layer | Layers):
        return Judged(Verdict(Grade.ROUGH, "the fit has no density"))
    try:
        return _judge(sampler, score, seed, n_values, most, before).with_remedy(sampler, score)
    except Exception as error:
        return Judged(unknown(error, score))


def _judge(
    sampler: Layer | Layers,
    score: Score,
    seed: int,
    n_values: int,
    most_calls: int | None,
    before: Judged | None,
) -> Judged:
    """Ask in the order of cost: Stein's identities, if the scores for these are few beside those of a training;
    weights; what needs none.
    """
    is_long = isinstance(sampler, Layer) and n_values > 2 * N_STEIN and sampler.n_features <= MAX_FEATURES
    x, s = _scored(sampler, score, seed, N_STEIN) if is_long else (torch.empty(0), torch.empty(0))
    if is_long and (words := _contradiction_of(x, s, score, _of_chains(sampler, seed))) is not None:
        return Judged(Verdict(Grade.WRONG, words, by="identities"))
    is_network = isinstance(sampler, Layer) and not sampler.family.mean.is_affine
    most = max(N_CHEAP, n_values // OF_NETWORK) if is_network else 0
    found = _by_weights(sampler, score, seed, n_values, most, before)
    verdict = found.verdict
    if is_long and most and verdict.grade == Grade.ROUGH and verdict.by == "weights":  # by the few draws
        by_identities = Verdict.of(_of_identities(x, s), score.label, "identities")
        verdict = by_identities if by_identities.good else verdict
        found = found._replace(verdict=verdict)
    if verdict.good and (reason := _of_search(sampler.whitening)) is not None:
        return found._replace(verdict=replace(verdict, grade=Grade.ROUGH, reason=reason))
    # of the many numbers of many features some seem wrong by chance, which chains that know them tell
    is_wrong = verdict.grade == Grade.WRONG and not _knows_many(sampler)
    if score.tally.is_scarce or verdict.good or is_wrong:
        return found
    return found._replace(verdict=_without_weights(sampler, score, seed, verdict, most_calls))


def _knows_many(sampler: Layer | Layers) -> bool:
    return sampler.n_features >= MANY_FEATURES and sampler.whitening.mean_se is not None


def _by_weights(
    sampler: Layer | Layers, score: Score, seed: int, n_values: int, most: int, before: Judged | None
) -> Judged:
    """Judge a fit by weighted draws, more where fewer leave a doubt, up to 32 times, or the most unless zero."""
    tally, found = score.tally, Judged(Verdict(Grade.ROUGH, "the weights of its draws are not known"))
    given = None if before is None else before.draws
    if before is not None and (before.verdict.good or (given is not None and _is_last(given, score))):
        return before
    # else the density costs little beside the training
    if isinstance(sampler, Layers) and sampler.family.n_layers * n_values < 1_000_000:
        return found
    is_scarce, n_before = tally.is_scarce, tally.total
    spent = n_before - sum(each.n_calls for name, each in tally.stages.items() if name == "certificate")
    if is_scarce and cost_of_weights(sampler, score) / 2 > (tally.left or 0):
        reason = "the calls of the score that are left do not suffice for weighted draws"
        return Judged(Verdict(Grade.ROUGH, reason))
    V = None if is_scarce else _suspects(sampler, score, seed)
    # a fault, such as noise, no draws lower
    has_many = sampler.n_features >= MANY_FEATURES  # which more draws hardly help
    times = (1,) if tally.fault is not None else (0.5, 0.75, 1, 1.5, 2) if is_scarce else (1, 2, 4, 8, 16, 32)
    seed, times = (seed ^ 1, times) if given is None else (given.seed, times[1:])
    for n, draws in zip(times, weighted_draws(sampler, score.double, seed, times, given), strict=False):
        verdict = of_weights(draws, score, sampler.whitening, V)
        found = Judged(verdict, draws)
        most_spent = max(spent, MOST_CHECKED) if _is_doubtful(verdict, draws) else spent / 10
        is_spent = n >= 4 and 2 * (tally.total - n_before) > most_spent  # as many again
        is_vain = _knows_many(sampler) and sampler.whitening.converged and n >= 2 and not draws.trusted
        is_last = is_spent or is_vain or 0 < most < 2 * len(draws.X) or (n == 16 and (verdict.good or has_many))
        if is_last or not is_open(verdict, draws):
            break
    return found


def _is_last(draws: WeightedDraws, score: Score) -> bool:
    """Tell whether no more draws are to follow."""
    return score.tally.is_scarce or len(draws.X) >= MOST_CHECKED or not draws.trusted


def _of_search(whitening: Whitening) -> str | None:
    """Say what a search for modes may have left out, None if no more than any search may."""
    if whitening.unseen > THRESHOLDS.unseen:
        return f"the search for modes ended while {whitening.unseen:.0%} of its ascents found new ones"
    if whitening.ascents is None:
        return None
    n, least = whitening.ascents[0], n_looks(d := whitening.modes.shape[1])
    if n == 0:
        return "the calls of the score did not suffice for a search for other modes"
    if whitening.n_looks >= least:
        return None
    return (
        f"other modes were looked for by {n} ascents alone, and narrow ones in {d} dimensions show at some {least:,} "
        "further points. If there is one mode, set skip=['other modes'] of Pilot or a point near it as `init`"
    )


def is_open(verdict: Verdict, sample: WeightedDraws) -> bool:
    """Tell whether more draws may change a verdict: an error is near its limit, or not known within it, or some draws
    have mass where the fit hardly has any.
    """
    if verdict.errors is None or verdict.grade == Grade.ROUGH:
        return True
    lost = sample.lost > THRESHOLDS.near * THRESHOLDS.beyond
    return seems_off(verdict.errors) or verdict.errors.se_of_moments > 1 or lost


def _is_doubtful(verdict: Verdict, draws: WeightedDraws) -> bool:
    """Tell whether a verdict is good although an error seems to be beyond its limit, wrong by a little, or rough only
    since the numbers are not known well enough.
    """
    if verdict.good:
        return verdict.errors is not None and is_beyond(verdict.errors)
    if verdict.grade == Grade.WRONG and verdict.errors is not None:  # a training takes more than draws that tell
        return draws.X.shape[1] < MANY_FEATURES and verdict.errors.worst(THRESHOLDS.n_se).excess < 2
    return verdict.grade == Grade.ROUGH and draws.trusted


@torch.no_grad()
def surely_good(sampler: Sampler, score: Score, seed: int) -> bool:
    """Tell whether some weighted draws find no error near its limit, and know all within theirs."""
    if not isinstance(sampler, Layer):
        return False
    for draws in weighted_draws(sampler, score.double, seed ^ 1):
        verdict = of_weights(draws, score, sampler.whitening, _suspects(sampler, score, seed))
        return verdict.good and not is_open(verdict, draws)
    return False


def _suspects(sampler: Layer | Layers, score: Score, seed: int) -> Tensor | None:
    """Return the directions (d, k) of whitened coordinates along which a fit is suspect by some scores."""
    if isinstance(sampler, Layers) or sampler.n_features > MAX_FEATURES:
        return None
    u = sampler.sample_in_u(N_SCORES // 2, torch.Generator(score.device).manual_seed(seed ^ 6))
    return suspects(score, sampler.whitening, u)


# Where weights are not reliable


def _without_weights(
    sampler: Layer | Layers, score: Score, seed: int, by_weights: Verdict, most: int | None
) -> Verdict:
    """Judge a fit by chains that agree and by lines along directions; by Stein's identities where there are none."""
    d = sampler.n_features
    x, s = _scored(sampler, score, seed, 1000)
    chains = _of_chains(sampler, seed)
    if (words := _contradiction_of(x, s, score, chains)) is not None:
        errors = by_weights.errors or (_of_identities(x, s) if s.isfinite().all() else None)
        return Verdict(Grade.WRONG, words, errors=errors, by="identities")
    if d < MANY_FEATURES and by_weights.errors is not None:
        return by_weights
    found = _difference(sampler, score, most)
    if found is not None:
        return Verdict(Grade.WRONG, f"the draws are wrong along {found}", by="identities")
    if chains is not None and d >= MANY_FEATURES:
        verdict = Verdict.of(chains, score.label, "chains")
        if not verdict.good and by_weights.grade != Grade.WRONG:
            verdict = replace(verdict, reason=f"{by_weights.reason}; by chains, {verdict.reason}")
        is_known = sampler.whitening.converged or has_small_errors(d, sampler.whitening.error)
        return verdict if is_known or not verdict.good else replace(verdict, grade=Grade.ROUGH)
    if by_weights.errors is not None:
        return by_weights
    verdict = Verdict.of(_of_identities(x, s), score.label, "identities")
    n = min(4 * N_STEIN, MAX_FREE // d)
    if verdict.good or isinstance(sampler, Layers) or n < len(x):
        return verdict
    more = (torch.cat(pair) for pair in zip((x, s), _scored(sampler, score, seed ^ 8, n), strict=True))
    return Verdict.of(_of_identities(*more), score.label, "identities")


def _scored(sampler: Layer | Layers, score: Score, seed: int, n: int) -> tuple[Tensor, Tensor]:
    """Return n draws of a fit with their scores, (n, d)."""
    x = sampler.sample(n, torch.Generator(score.device).manual_seed(seed ^ 5)).double()
    return x, score.double(x)


def _of_identities(x: Tensor, s: Tensor) -> Errors:
    """Return the errors of draws x (n, d) with scores s by Stein's identities, which know no quantiles.

    A mean is off by the covariance times the mean score, and the square of a scale is the Stein variance.
    """
    n, centred, sd = len(x), x - x.mean(0), x.std(0)
    terms = (s @ centred.mT / n) @ centred if n < x.shape[1] else s @ (centred.mT @ centred / n)
    terms /= sd
    v, v_se = stein_variances(x, s)
    unknown = np.full((2, x.shape[1]), math.nan)
    root = v.clamp_min(torch.finfo(v.dtype).tiny).sqrt()
    mean, mean_se = as_array(-terms.mean(0)), as_array(terms.std(0) / math.sqrt(n))
    return Errors(mean, mean_se, as_array(root.log()), as_array(v_se / (2 * root.square())), unknown, unknown)


def _of_chains(sampler: Layer | Layers, seed: int) -> Errors | None:
    """Return the errors of a fit, given the moments that chains have found, which know no quantiles; None without
    chains.
    """
    whitening = sampler.whitening
    if whitening.mean is None or whitening.sd is None or whitening.mean_se is None:
        return None
    n = 1000 if isinstance(sampler, Layers) else min(N_FREE, MAX_FREE // sampler.n_features)
    g = as_array(sampler.sample(n, torch.Generator(whitening.map.m.device).manual_seed(seed ^ 4)).double())
    fit, unit = Numbers.of_draws(g, LEVELS), np.maximum(whitening.sd, np.finfo(np.float64).tiny)
    se, unknown = whitening.mean_se / unit, np.full_like(fit.quantiles, math.nan)
    posterior = Numbers(whitening.mean, unit, unknown, whitening.mean_se, unit * se, unknown)
    return Errors.between(fit, posterior)


def _contradiction_of(x: Tensor, s: Tensor, score: Score, chains: Errors | None) -> str | None:
    if not s.isfinite().all():
        return f"the score is not finite at {int((~s.isfinite().all(1)).sum())} of {len(x)} draws"
    return contradiction(x, s, score, chains)


def contradiction(x: Tensor, s: Tensor, score: Score, chains: Errors | None = None) -> str | None:
    """Say where draws x (n, d) with scores s contradict Stein's identities by far.

    Where chains know the standard deviations, the draws' must differ from them as well: the score of a scale in a
    hierarchy also depends on how the draws of its many effects vary with it.
    """
    variances, se = stein_variances(x, s)
    wrong = (variances + 5 * se < 0.25) | (variances - 5 * se > 4)
    if chains is not None:
        wrong &= torch.as_tensor(np.abs(chains.sd) > math.log(2)).to(wrong.device)
    if wrong.any():
        i = int((variances.clamp_min(1e-12).log().abs() * wrong).argmax())
        way = "narrow" if variances[i] < 1 else "wide"
        return (
            f"the draws are too {way} in {score.label(i)}: -E[s_i (x_i - E x_i)] is {variances[i]:.2g} there, but "
            f"should be 1; {int(wrong.sum())} of {len(wrong)} coordinates are off by more than a factor of 4"
        )
    square, se_of_square = stein_shift(x, s)
    if square - 5 * se_of_square > 4:
        return (
            "the draws are too far from the target: E[s]^T Cov(x) E[s], about the square of the distance in standard "
            f"deviations, is {square:.2g}, but should be 0"
        )
    return None


def _difference(sampler: Layer | Layers, score: Score, most: int | None) -> str | None:
    """Describe the direction along which the draws of a sampler are wrong, if that takes no more than the most calls
    and a fifth of those of the fit; the draws of a hierarchy take calls, too.
    """
    tally, whitening, n_draws, n_calls = score.tally, sampler.whitening, 20_000, MOST_CALLS
    left = min(math.inf if most is None else most - tally.total, tally.total / 5)
    if isinstance(sampler, Layers):
        n_draws //= 10
        n_calls += (N_SCORES + n_draws) * sampler.family.n_layers
    if n_calls > left or sampler.n_features > MAX_FEATURES:
        return None
    generator = torch.Generator(score.device).manual_seed(sampler.seed ^ 3)

    def draw() -> tuple[Tensor, Tensor]:
        u = sampler.sample_in_u(n_draws, generator)
        return u, whitening.push_forward(u)

    few = sampler.sample_in_u(N_SCORES, generator)
    found = first_difference(whitening.pull_back(score.double), few, draw)
    return None if found is None else found.words(score.label)


# What to do


def _first_remedy(sampler: Sampler, sd: np.ndarray, score_fn: Score, *, is_rough: bool) -> str:
    """Return what comes before the usual advice: other units, or a finer type."""
    is_apart = score_fn.double.units is not None or sd.max() > 1e7 * sd.min()
    if is_apart and not score_fn.tally.is_scarce:
        x = sampler.sample(50, torch.Generator(score_fn.device).manual_seed(0)).double()
        sizes = score_fn.double(x).abs().nanmedian(0).values  # of one order where points have collapsed
        small, large = int(sizes.argmax()), int(sizes.argmin())
        if sizes[small] > 1e7 * sizes[large] > 0:
            return (
                f"the units of the target may differ too much, as scores of {sizes[small]:.1g} in "
                f"{score_fn.label(small)} and {sizes[large]:.1g} in {score_fn.label(large)} do. Set `init` to a "
                "point near the mode, or rescale the parameters to deviations near one. If neither helps, "
            )
    if is_rough and score_fn.type_computed == torch.float32:
        return f"{score_fn.advice or 'the target is computed in float32; compute it in float64'}. Otherwise "
    return ""


def _more(whitening: object) -> str:
    """Return the advice to raise what makes a start do more, if anything does."""
    has_more = isinstance(whitening, Whitening) and whitening.sd is not None and len(whitening.attempts) > 0
    return "raise the `budget` of whiten=Pilot(...), " if has_more else ""


def remedy_of(sampler: Sampler, score_fn: Score, *, refines: bool = False) -> str:
    """Return the advice for a poor fit, depending on what is known of it and how its coordinates were found."""
    whitening = sampler.attributes()["whitening_"]
    if score_fn.tally.is_frugal and score_fn.log_prob is None:
        return "give the target a `log_prob` beside its score, or raise the `effort` of whiten=Pilot(...)"
    if isinstance(whitening, Whitening) and whitening.sd is not None:
        first = _first_remedy(sampler, whitening.sd, score_fn, is_rough=whitening.is_rough)
        refines = refines and knows_density(sampler)
        more = "correct the fit by `skksivi.refine`, " if refines else _more(whitening)
        return f"{first}{more}start near a mode by `init`, or reparametrise the model to avoid funnels and spikes"
    if isinstance(whitening, Whitening) and not isinstance(whitening.map, Identity):
        return "set whiten='auto', or raise `max_iter`"
    return "set whiten='auto', raise `max_iter`, or rescale the parameters"


# Between two fits


def better(trained: Fit, before: Fit) -> Fit:
    """Return the better of a fit at the end of a training and the one before it, by their verdicts.

    Where both are good it is the trained one; where neither is known to be, too, unless its worst error exceeds that
    of the other beyond the noise.
    """
    old, new = (cast("Verdict", fit.report["verdict_"]) for fit in (before, trained))
    if old is None or new.good or not is_better(old, new):
        return trained
    if (
        not old.good
        and old.errors is not None
        and new.errors is not None
        and new.errors.worst(THRESHOLDS.n_se).excess <= old.errors.worst(0).excess
    ):
        return trained
    # what a fit that is returned keeps, whatever was tried after it
    own = ("weighted_draws_", "certificate_", "verdict_", "fitted_by_", "best_iter_", "score_checksum_")
    report = {**trained.report, **{name: before.report[name] for name in own}}
    remark = (
        f"The training did not improve on its start, which is returned. At its end {new.reason}; at its start "
        f"{old.reason}. Lower `learning_rate`, or raise `batch_size` or `max_iter`; early_stopping=False returns the "
        "last state all the same."
    )
    return trained._replace(sampler=before.sampler, report=report, remark=remark)


def is_better(a: Verdict, b: Verdict) -> bool:
    """Tell whether a verdict is better than another: by whether it is good, then by the worst error, then by whether
    that is known.
    """
    if a.good != b.good or (a.errors is None and b.errors is None):
        return a.grade > b.grade
    worst, other = (math.inf if each.errors is None else each.errors.worst(0).excess for each in (a, b))
    return worst < other
