"""The result of a training: which of its states is kept, and how good it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from skksivi._utils.monte_carlo import controlled, stein_features
from skksivi.coordinates._affine import AffineMap, Identity
from skksivi.estimators._fingerprint import answers_at
from skksivi.estimators._judge import surely_good
from skksivi.estimators._start import Start
from skksivi.estimators._trained import F
from skksivi.families._samplers import Layer, WhitenedSampler
from skksivi.parameters import Plateau
from skksivi.pilot._mixture import MOST_FEATURES
from skksivi.score._score import Score
from skksivi.stein._discrepancy import FixedKernelKSD, agree, stein_error
from skksivi.training._guard import Acceptable, Departure, Watch, Worsening, departure
from skksivi.training._loop import Minimised, Progress
from skksivi.training._run import Fit

#: Draws whose moments are compared with the start's, and how many of them enter the discrepancy.
N_MONITOR_DRAWS, N_JUDGED_DRAWS = 4000, 1000

#: Iterations between two comparisons.
LOOK_EVERY = 500


#: Gives the sampler of a family.
SamplerOf = Callable[[F], WhitenedSampler]


# During a training


class WhenGood(Generic[F]):
    """Ends a training when the judge finds no error of its averaged state that is beyond a part of its limit.

    Parameters
    ----------
    sampler_of : callable
        Returns the sampler of a family.
    score : Score
    seed : int
    """

    every, at_end = LOOK_EVERY, False

    def __init__(self, sampler_of: SamplerOf[F], score: Score, seed: int) -> None:
        self.sampler_of = sampler_of
        self.score = score
        self.seed = seed

    def __call__(self, progress: Progress) -> bool:
        with progress.iterate.averaged():
            return surely_good(self.sampler_of(cast("F", progress.module)), self.score, self.seed)


class Comparison(NamedTuple):
    """Compares states of a training by draws from the same noise.

    Attributes
    ----------
    score : Score
        Of the target, straightened.
    map : AffineMap
        To its coordinates from u of the training.
    seed : int
    """

    score: Score
    map: AffineMap
    seed: int

    @classmethod
    def of(cls, target: Score, start: Start[F]) -> Comparison:
        return cls(start.whitening.straighten(target), start.whitening.map, start.seed)

    @torch.no_grad()
    def accepts(self, sampler: WhitenedSampler) -> bool:
        """Tell whether the draws of a sampler may be from the target, by Stein's identities."""
        y = self.map.unwhiten(self.draws(sampler))
        s = self.score.double(y)
        return bool(s.isfinite().all()) and agree(y, s)

    def draws(self, sampler: WhitenedSampler) -> Tensor:
        """Return draws u (n, d) of a sampler."""
        return sampler.sample_in_u(N_MONITOR_DRAWS, self._noise())

    def reference(self, sampler: WhitenedSampler) -> Tensor:
        """Return draws u (n, d) of the distribution that the states of a sampler must stay near."""
        return sampler.reference_in_u(N_MONITOR_DRAWS, self._noise())

    def error(self, u: Tensor) -> float:
        """Return how far draws u (n, d) are from the target, in standard deviations, by Stein's identities."""
        return stein_error(u, self.map.whiten_score(self.score.double(self.map.unwhiten(u))))

    def _noise(self) -> torch.Generator:
        return torch.Generator(self.score.device).manual_seed(self.seed)


@torch.no_grad()
def watch_of(
    comparison: Comparison, sampler: WhitenedSampler, stopping: Plateau | None, *, guards: bool, noisy: bool
) -> Watch:
    """Return the rule for comparing states.

    A guarded state is kept if it has the smallest discrepancy among the states whose moments stay near the start's,
    or near its base's if that is at the target; the start itself only if it is better beyond the noise. With
    minibatches, Stein's identities must also hold no worse than at the start.

    Parameters
    ----------
    comparison : Comparison
    sampler : WhitenedSampler
        It uses the family as it is trained.
    stopping : Plateau or None
    guards : bool
        Whether the moments must stay near the start's.
    noisy : bool
        Whether the training uses minibatches.
    """
    score = comparison.score
    discrepancy = FixedKernelKSD(score.double, score.n_features, score.device, comparison.map)
    reference, noise = comparison.reference(sampler), 0.0
    if guards or noisy:
        parts = comparison.draws(sampler).split(N_JUDGED_DRAWS)
        values = [_value(discrepancy, comparison.map.unwhiten(u)) for u in parts]
        # a squared discrepancy per feature that does not matter
        noise = 0.0025 * score.n_features + 2 * float(np.std([v for v in values if math.isfinite(v)] or 0.0))
    at_start = comparison.error(comparison.draws(sampler)[:N_JUDGED_DRAWS]) if noisy else 0.0

    @torch.no_grad()
    def look(_: nn.Module) -> tuple[float, Acceptable]:
        u = comparison.draws(sampler)
        some, verdict = u[:N_JUDGED_DRAWS], departure(u, reference)
        value = _value(discrepancy, comparison.map.unwhiten(some))
        if noisy and (verdict.accepted or not guards):
            return value, Worsening(comparison.error(some), at_start)
        return value, verdict

    return Watch(look, stopping, every=LOOK_EVERY, keeps_best=guards or noisy, noise=noise)


def _value(discrepancy: FixedKernelKSD, x: Tensor) -> float:
    """Return the discrepancy of draws x (n, d), inf if the score is not finite at one of them."""
    try:
        return discrepancy(x)
    except ValueError:
        return math.inf


def remark_of(watch: Watch, best_iter: int, n_before: int) -> str | None:
    """Say that a guarded training ended too far from its start, or worse than it, None if it did not.

    `n_before` iterations were before it, those of the fit that it continues.
    """
    last, at_start = watch.last, best_iter == n_before
    if not watch.keeps_best or last is None or len(watch.values) < 2:
        return None
    if isinstance(last, Worsening) and not last.accepted:
        kept = "its start, which is returned" if at_start else f"its state of iteration {best_iter}, which is kept"
        return (
            f"The training did not improve on {kept}: by Stein's identities the draws at its end are off by "
            f"{last.error:.2g} standard deviations, at its start by {last.at_start:.2g}. Take larger "
            "minibatches, raise `batch_size` or lower `learning_rate`."
        )
    if isinstance(last, Departure) and not last.accepted:
        worst = int(last.excess.argmax())
        return (
            f"The training ended with coordinate {worst} of the whitened draws at {last.sd_ratio[worst]:.2f} times "
            f"its standard deviation and its third moment changed by {last.third[worst]:+.2f}; the state of "
            f"iteration {best_iter} is kept. Lower `learning_rate`, or raise `batch_size` or the `weight` of the "
            "Pilot."
        )
    if not at_start:
        return None
    (_, before), *after = watch.values
    return (
        "The training did not improve on its start, which is returned: the squared discrepancy in `ksd_curve_` is "
        f"{before:.2g} there and at least {min(v for _, v in after):.2g} after it. If `diagnose` finds no fault in "
        "it, nothing is left to train; else lower `learning_rate` or raise `batch_size`. early_stopping=False "
        "returns the last state all the same."
    )


# After a training


def trained_fit(
    done: Minimised, watches: list[Watch], sampler_of: SamplerOf[F], family: F, start: Start[F], made_by: str
) -> Fit:
    """Return the fit at the end of a training, in the best state that was seen."""
    past, n_before = start.past, len(start.past.losses)
    looks = np.array([value for watch in watches for value in watch.values]).reshape(-1, 2)
    best_iter = n_iter = n_before + len(done.losses)
    for watch in watches:
        best_iter = n_before + watch.restore(family)
    report = {
        "score_checksum_": start.answers,
        "loss_curve_": np.concatenate([past.losses, done.losses]),
        "ksd_curve_": np.concatenate([past.looks, looks + np.array([n_before, 0])]),
        "engine_": done.engine,
        "n_iter_": n_iter,
        "best_iter_": best_iter,
        "certificate_": None,
        "verdict_": None,
        "fitted_by_": start.made_by if best_iter == n_before != n_iter else made_by,
    }
    remarks = [remark_of(watch, best_iter, n_before) for watch in watches]
    return Fit(sampler_of(family), report, remark=next(iter(remarks), None))


def allows_moves(target: Score) -> bool:
    """Tell whether coordinates may be moved to a target, which needs scores of all of the data.

    With too many features there are too few draws for it.
    """
    return target.n_features <= MOST_FEATURES and target.minibatch is None


@torch.no_grad()
def recentred(fit: Fit, target: Score, seed: int) -> Fit:
    """Return a fit in its last state whose map is moved to the mean estimated by Stein control variates, if its draws
    are clearly off and the move reduces the error.
    """
    sampler, was_kept = fit.sampler, fit.report["best_iter_"] == fit.report["n_iter_"]
    if not (was_kept and allows_moves(target)) or not isinstance(sampler, Layer):
        return fit
    if isinstance(sampler.whitening.map, Identity):
        return fit
    map_, score = sampler.whitening.map, sampler.whitening.straighten(target).double
    u = sampler.sample_in_u(2000, torch.Generator(map_.m.device).manual_seed(seed)).double()
    s = map_.whiten_score(score(map_.unwhiten(u)))
    error = stein_error(u, s)
    if not 0.06 < error < math.inf:  # standard deviations
        return fit
    shift = controlled(u, stein_features(u, s)).mean(0) - u.mean(0)
    moved = map_._replace(m=map_.unwhiten(shift))
    s_moved = moved.whiten_score(score(moved.unwhiten(u)))
    if not stein_error(u, s_moved) < error:
        return fit
    whitening = replace(sampler.whitening, map=moved)
    answers = answers_at(target, whitening)
    return fit._replace(
        sampler=replace(sampler, whitening=whitening), report={**fit.report, "score_checksum_": answers}
    )
