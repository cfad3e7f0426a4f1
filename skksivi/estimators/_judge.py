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
from skksivi._utils.monte_carlo import pareto_smoothed, systematic_rows
from skksivi.coordinates._affine import Affine, Identity
from skksivi.coordinates._whitening import LONG_CHAINS, Whitening, n_looks
from skksivi.families._derived import knows_density
from skksivi.families._samplers import Layer, Layers, Sampler
from skksivi.families._weights import ImportanceSample, cost_of_weights, weighted_draws
from skksivi.judge import THRESHOLDS, Errors, Grade, Numbers, Verdict, WeightedRows, words_of
from skksivi.pilot._pilot import MAX_FEATURES
from skksivi.pilot._points import MANY_FEATURES, has_small_errors
from skksivi.score._score import Score
from skksivi.stein._discrepancy import (
    MOST_CALLS,
    N_SCORES,
    agree,
    first_difference,
    stein_shift,
    stein_variances,
    suspect_directions,
)
from skksivi.training._run import Fit

#: Levels of the quantiles that are judged.
LEVELS = np.array([0.05, 0.95])


class Judged(NamedTuple):
    """A verdict, and the weighted draws behind it, None where they are not known."""

    verdict: Verdict
    sample: ImportanceSample | None


def judged(fit: Fit, score: Score, seed: int, n_values: int, most: int | None = None) -> tuple[Fit, Judged]:
    """Return a fit with its verdict and its certificate, which is None if that would be expensive.

    Parameters
    ----------
    fit : Fit
    score : Score
    seed : int
    n_values : int
        Score calls of the training.
    most : int, default=None
        The most calls of the whole fit.
    """
    score.tally.begin("certificate")
    found = judge(fit.sampler, score, seed, n_values, most)
    if not found.verdict.good:
        refines = found.sample is not None and found.sample.trusted and found.verdict.errors is not None
        remedy = remedy_of(fit.sampler, score, refines=refines)
        found = found._replace(verdict=replace(found.verdict, remedy=remedy))
    certificate = None if found.sample is None else found.sample.finite_certificate()
    return fit._replace(report={**fit.report, "certificate_": certificate, "verdict_": found.verdict}), found


@torch.no_grad()
def judge(sampler: Sampler, score: Score, seed: int, n_values: int = 0, most: int | None = None) -> Judged:
    """Judge a fit by its sampler, see `judged`."""
    sample, verdict = None, Verdict(Grade.ROUGH, "the fit has no density")
    if not isinstance(sampler, Layer | Layers):
        return Judged(verdict, None)
    # else the density costs little beside the training
    costly = isinstance(sampler, Layers) and sampler.family.n_layers * n_values < 1_000_000
    spent, is_scarce = score.tally.total, score.tally.is_scarce
    V = None if costly or is_scarce else _suspects(sampler, score, seed)
    before, has_fault = score.tally.total, score.tally.fault is not None  # such as noise, which no draws lower
    # of the many numbers of many features some seem wrong by chance, which chains that know them tell
    by_chains = sampler.n_features >= MANY_FEATURES and sampler.whitening.mean_se is not None
    # more draws where fewer leave a doubt, up to 4,096
    times = (1,) if has_fault else (1, 2) if is_scarce else (1, 2, 4, 8, 16, 32)[: 5 + (score.log_prob is None)]

    def is_too_dear() -> bool:
        return is_scarce and cost_of_weights(sampler, score) > (score.tally.left or 0)

    times = () if costly or is_too_dear() else times
    for n, sample in zip(times, weighted_draws(sampler, score.double, seed ^ 1, times), strict=False):
        verdict = of_weights(sample, score, sampler.whitening, V)
        most_spent = spent if _is_doubtful(verdict, sample) else spent / 10
        is_spent = n >= 4 and score.tally.total - before > most_spent
        has_many = sampler.n_features >= MANY_FEATURES  # which more draws hardly help
        is_vain = by_chains and sampler.whitening.converged and n >= 2 and not sample.trusted
        is_last = is_spent or is_vain or is_too_dear() or (n == 16 and (verdict.good or has_many))
        if is_last or not _is_open(verdict, sample):
            break
    if is_scarce and sample is None:
        reason = "the calls of the score that are left do not suffice for weighted draws"
        return Judged(Verdict(Grade.ROUGH, reason), None)
    if verdict.good and (reason := _of_search(sampler.whitening)) is not None:
        return Judged(replace(verdict, grade=Grade.ROUGH, reason=reason), sample)
    if is_scarce or verdict.good or (verdict.grade == Grade.WRONG and not by_chains):
        return Judged(verdict, sample)
    return Judged(_without_weights(sampler, score, seed, verdict, most), sample)


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


def _is_open(verdict: Verdict, sample: ImportanceSample) -> bool:
    """Tell whether more draws may change a verdict: an error is near its limit, or not known within it, or some draws
    have mass where the fit hardly has any.
    """
    if verdict.errors is None or verdict.grade == Grade.ROUGH:
        return True
    lost = sample.lost > THRESHOLDS.near * THRESHOLDS.beyond
    return seems_off(verdict.errors) or verdict.errors.se_of_moments > 1 or lost


def seems_off(errors: Errors) -> bool:
    """Tell whether an error is probably beyond its limit, or surely near it."""
    return _is_beyond(errors) or errors.worst(THRESHOLDS.n_se).excess > THRESHOLDS.near


def _is_beyond(errors: Errors) -> bool:
    return errors.worst(THRESHOLDS.n_se / 2).excess > 1


def _is_doubtful(verdict: Verdict, sample: ImportanceSample) -> bool:
    """Tell whether a verdict is good although an error seems to be beyond its limit, wrong by a little, or rough only
    since the numbers are not known well enough.
    """
    if verdict.good:
        return verdict.errors is not None and _is_beyond(verdict.errors)
    if verdict.grade == Grade.WRONG and verdict.errors is not None:  # a training takes more than draws that tell
        return sample.X.shape[1] < MANY_FEATURES and verdict.errors.worst(THRESHOLDS.n_se).excess < 2
    return verdict.grade == Grade.ROUGH and sample.trusted


@torch.no_grad()
def surely_good(sampler: Sampler, score: Score, seed: int) -> bool:
    """Tell whether some weighted draws find no error near its limit, and know all within theirs."""
    if not isinstance(sampler, Layer):
        return False
    for sample in weighted_draws(sampler, score.double, seed ^ 1):
        verdict = of_weights(sample, score, sampler.whitening, _suspects(sampler, score, seed))
        return verdict.good and not _is_open(verdict, sample)
    return False


def _suspects(sampler: Layer | Layers, score: Score, seed: int) -> Tensor | None:
    """Return the directions (d, k) of whitened coordinates along which a fit is suspect by some scores."""
    if isinstance(sampler, Layers) or not 1 < sampler.n_features <= MAX_FEATURES or score.tally.fault is not None:
        return None
    u = sampler.sample_in_u(N_SCORES // 2, torch.Generator(score.device).manual_seed(seed ^ 6))
    return suspect_directions(sampler.whitening.pull_back(score.double), u)


def of_weights(
    sample: ImportanceSample, score: Score, whitening: Whitening | Affine | None = None, V: Tensor | None = None
) -> Verdict:
    """Judge a fit by its weighted draws, in the coordinates of the target, along directions V (d, k) of whitened
    ones, and in the parameters of its model.
    """
    n, reliable = len(sample.weights), sample.trusted
    reason = (
        f"the effective sample size of {n} weighted draws is {sample.share * n:.0f}, k-hat {sample.k:.2f}, and "
        f"{sample.lost:.0%} of the mass is where the fit has less than a tenth of the density"
    )
    if not reliable and sample.X.shape[1] >= MANY_FEATURES:
        return Verdict(Grade.ROUGH, reason)
    columns, names = [(sample.X, sample.draws)], [score.label(i) for i in range(score.n_features)]
    if whitening is not None and V is not None and V.shape[1]:
        along = [whitening.whiten(torch.as_tensor(X).to(V)) @ V for X in columns[0]]
        columns.append((as_array(along[0]), as_array(along[1])))
        names += [_direction(torch.as_tensor(sample.draws).to(V), a, score) for a in along[1].mT]
    if (own := _own_parameters(score, sample)) is not None:
        columns.append(own[:2])
        names += own[2]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # of constants
        found = [_errors(sample.rows, f, g) for f, g in columns]
    errors = Errors(*(np.concatenate(parts, -1) for parts in zip(*found, strict=True)))
    words = words_of(errors.worst(0), names.__getitem__)
    if reliable and (worst := errors.worst(THRESHOLDS.n_se)).excess > 1:
        return Verdict(Grade.WRONG, words_of(worst, names.__getitem__), errors=errors)
    if reliable and errors.se <= THRESHOLDS.most_se:
        return Verdict(Grade.RELIABLE_WEIGHTS, words, errors=errors)
    if reliable:
        reason = f"by weighted draws, standard errors are up to {errors.se:.1f} times what a number may be off"
    return Verdict(Grade.ROUGH, f"{reason}; as far as these tell, {words}", errors=errors)


def _errors(rows: WeightedRows, f: np.ndarray, g: np.ndarray) -> Errors:
    """Return the errors of the numbers of draws g (m, k), given values f (n, k) of weighted draws.

    Tails may be so heavy that there is no standard deviation to be known; then quantiles and tails decide.
    """
    found = Errors.less_fit(Numbers.of_draws(g, LEVELS), rows._replace(less=1.0).numbers(f, g, LEVELS))
    low, high = np.quantile(g, [THRESHOLDS.tail, 1 - THRESHOLDS.tail], axis=0)
    sides = [rows.means(x.astype(float), y.astype(float)) for x, y in ((f < low, g < low), (f > high, g > high))]
    beyond, beyond_se = (np.array(parts) for parts in zip(*sides, strict=True))
    k = _tails(g)
    # the standard error of a mean is infinite for k from a half on, and that of an sd from a quarter on; but where
    # the draws alone have such a tail, which the posterior has not, their sd is too large
    has_mean, has_sd = k < 0.45, (k < 0.3) | (_tails(f[systematic_rows(rows.w, len(f))]) < 0.2)
    return found._replace(
        mean=has_mean * found.mean,
        mean_se=has_mean * found.mean_se,
        sd=has_sd * found.sd,
        sd_se=has_sd * found.sd_se,
        beyond=beyond,
        beyond_se=beyond_se,
    )


def _tails(g: np.ndarray) -> np.ndarray:
    """Return the shapes k (d,) of the tails of draws g (n, d)."""
    away = np.log(np.maximum(np.abs(g - np.median(g, 0)), np.finfo(np.float64).tiny))
    return np.array([pareto_smoothed(column)[1] for column in away.T])


def _own_parameters(score: Score, sample: ImportanceSample) -> tuple[np.ndarray, np.ndarray, list[str]] | None:
    """Return the parameters of a model at weighted draws and at other draws, as columns, and their names."""
    if score.constrain is None:
        return None
    try:
        found = [score.constrain(X) for X in (sample.X, sample.draws)]
    except Exception:  # a fit is not to fail by this, whatever a model may raise
        return None
    names = [
        f"`{name}{list(map(int, i)) if i else ''}`" for name, a in found[0].items() for i in np.ndindex(a.shape[1:])
    ]
    if not 0 < len(names) <= 2 * score.n_features + 100:  # else predictions of rows are among them
        return None
    f, g = (
        np.concatenate([np.asarray(a, np.float64).reshape(len(a), -1) for a in each.values()], 1) for each in found
    )
    moves = np.isfinite(f).all(0) & np.isfinite(g).all(0) & (g.std(0) > 0)
    if not moves.any():
        return None
    return f[:, moves], g[:, moves], [name for name, kept in zip(names, moves, strict=True) if kept]


def _direction(x: Tensor, a: Tensor, score: Score) -> str:
    """Describe a linear function a (n,) of draws x (n, d) by its largest correlations."""
    r = torch.corrcoef(torch.cat([a[None], x.mT]))[0, 1:].nan_to_num(0)
    if r.abs().max() > 0.995:  # a coordinate
        return score.label(int(r.abs().argmax()))
    largest = r.abs().argsort(descending=True)[:3].tolist()
    return f"the direction with correlations {', '.join(f'{r[i]:+.2f} with {score.label(i)}' for i in largest)}"


# Where weights are not reliable


def _without_weights(
    sampler: Layer | Layers, score: Score, seed: int, by_weights: Verdict, most: int | None
) -> Verdict:
    """Judge a fit by chains that agree and by lines along directions; by Stein's identities where there are none."""
    whitening, d = sampler.whitening, sampler.n_features
    generator = torch.Generator(score.device).manual_seed(seed ^ 5)
    x = sampler.sample(1000, generator).double()
    s = score.double(x)
    if not s.isfinite().all():
        return Verdict(
            Grade.WRONG, f"the score is not finite at {int((~s.isfinite().all(1)).sum())} of {len(x)} draws"
        )
    chains = _of_chains(x, whitening)
    if (words := contradiction(x, s, score, chains)) is not None:
        return Verdict(Grade.WRONG, words, errors=by_weights.errors)
    if d < MANY_FEATURES and by_weights.errors is not None:
        return by_weights
    found = _difference(sampler, score, most)
    if found is not None:
        return Verdict(Grade.WRONG, f"the draws are wrong along {found}")
    if chains is not None and d >= MANY_FEATURES:
        worst = chains.worst(THRESHOLDS.n_se)
        is_known = whitening.converged or has_small_errors(d, whitening.error)
        grade = Grade.WRONG if worst.excess > 1 else Grade.CHAINS_AGREE if is_known else Grade.ROUGH
        reason = words_of(worst, score.label) if Grade.WRONG in (grade, by_weights.grade) else by_weights.reason
        if grade == Grade.ROUGH:
            reason += f"; by chains, {words_of(chains.worst(0), score.label)}"
        return Verdict(grade, reason, errors=chains)
    if isinstance(sampler, Layers) and agree(x, s):
        return Verdict(Grade.CHAINS_AGREE, "Stein's identities hold")
    if whitening.converged:
        return Verdict(Grade.CHAINS_AGREE, "the points of the fit are good enough")
    return by_weights


def _of_chains(x: Tensor, whitening: Whitening) -> Errors | None:
    """Return the errors of draws x (n, d), given the moments that chains have found; None without chains."""
    if whitening.mean is None or whitening.sd is None or whitening.mean_se is None:
        return None
    fit = Numbers.of_draws(as_array(x), LEVELS)
    tiny = np.finfo(np.float64).tiny
    unit, se = np.maximum(whitening.sd, tiny), whitening.mean_se / np.maximum(whitening.sd, tiny)
    nothing, large = np.zeros_like(fit.quantiles), np.broadcast_to(se, fit.quantiles.shape)
    has_sd = _tails(as_array(x)) < 0.3  # else it is known neither by the draws nor by chains, see `_errors`
    return Errors(
        (fit.mean - whitening.mean) / unit,
        np.hypot(se, fit.mean_se / unit),
        has_sd * np.log(np.maximum(fit.sd, tiny) / unit),
        has_sd * np.hypot(se, fit.sd_se / unit),
        nothing,
        large,
    )


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
    """Return the advice to raise what makes a pilot do more, if anything does."""
    if not isinstance(whitening, Whitening) or whitening.sd is None:
        return ""
    stages = {attempt.stage for attempt in whitening.attempts}
    if not stages or LONG_CHAINS in stages:
        return "raise the `budget` of whiten=Pilot(...), "
    has_more = whitening.warp is None and len(whitening.sd) <= MAX_FEATURES  # else there are no long chains
    return "raise the `effort` of whiten=Pilot(...), " if has_more else ""


def remedy_of(sampler: Sampler, score_fn: Score, *, refines: bool = False) -> str:
    """Return the advice for a poor fit, depending on what is known of it and how its coordinates were found."""
    whitening = sampler.attributes()["whitening_"]
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
    own = ("certificate_", "verdict_", "fitted_by_", "best_iter_", "score_checksum_")
    report = {**trained.report, **{name: before.report[name] for name in own}}
    remark = (
        f"The training did not improve on its start, which is returned. At its end {new.reason}; at its start "
        f"{old.reason}. Lower `learning_rate`, or raise `batch_size` or `max_iter`; early_stopping=False returns the "
        "last state all the same."
    )
    return trained._replace(sampler=before.sampler, report=report, remark=remark)


def is_better(a: Verdict, b: Verdict) -> bool:
    """Tell whether a verdict is better than another: by whether it is good, then by the worst error, if known."""
    if a.good != b.good or a.errors is None or b.errors is None:
        return a.grade > b.grade
    return a.errors.worst(0).excess < b.errors.worst(0).excess
