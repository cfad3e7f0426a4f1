"""The result of a training: which of its states is kept, and how good it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from skksivi._control_variates import controlled, stein_features
from skksivi._weights import Certificate, cheap_certificate
from skksivi.coordinates._affine import AffineMap, Identity
from skksivi.estimators._trained import F, is_certified
from skksivi.families._samplers import Fit, InU, Layer, Layers, Sampler
from skksivi.parameters import Plateau
from skksivi.score._improper import has_power_tails
from skksivi.score._score import DifferentiableScore, Score
from skksivi.score._tally import SpentError
from skksivi.stein._discrepancy import FixedKernelKSD, stein_error
from skksivi.training._guard import Departure, Verdict, Watch, Worsening, departure
from skksivi.training._hooks import CERTIFICATE
from skksivi.training._loop import Progress

#: Draws whose moments are compared with the start's, and how many of them enter the discrepancy.
N_MONITOR_DRAWS, N_JUDGED_DRAWS = 4000, 1000

#: Iterations between two comparisons.
LOOK_EVERY = 500

#: The increase of the error that a training is allowed, in standard deviations; farther away, as a share.
WORSE = 0.25

#: Standard errors of the difference between two certificates that are noise.
N_SE = 2

#: The divergence per feature, in nats, at which a training ends, and below which a difference does not matter.
ENOUGH, NEGLIGIBLE = 0.01, 0.0025

#: Draws used to correct the mean of a fit, and the smallest error, in standard deviations, that is corrected.
N_RECENTRED, VISIBLE = 2000, 0.06

#: Score evaluations of a hierarchy's training above which the cost of its density is minor.
MANY_CALLS = 1_000_000

#: Draws of a certificate, and of the second one for a fit that fails the first, in units of the first.
N_CERTIFIED = (1, 4)


# During a training


class WhenGood(Generic[F]):
    """Ends a training when further iterations would hardly improve its averaged state.

    Parameters
    ----------
    sampler_of : callable
        Returns the sampler of a family.
    score : Score
    seed : int
    """

    every, at_end = LOOK_EVERY, False

    def __init__(self, sampler_of: Callable[[F], InU], score: Score, seed: int) -> None:
        self.sampler_of = sampler_of
        self.score = score
        self.seed = seed

    def __call__(self, progress: Progress) -> bool:
        """Tell whether to stop."""
        with progress.iterate.averaged():
            sampler = self.sampler_of(cast("F", progress.module))
            if not isinstance(sampler, Layer):
                return False
            found = cheap_certificate(sampler, self.score.double, self.seed ^ 1)
            return found is not None and found.trusted and found.divergence <= ENOUGH * sampler.n_features


class Judge(NamedTuple):
    """Compares states of a training by draws from the same noise.

    Attributes
    ----------
    score : Score
    map : AffineMap
        The coordinates u of the training.
    seed : int
    """

    score: Score
    map: AffineMap
    seed: int

    def draws(self, sampler: InU) -> Tensor:
        """Return draws u (n, d) of a sampler."""
        return sampler.sample_in_u(N_MONITOR_DRAWS, self._noise())

    def reference(self, sampler: InU) -> Tensor:
        """Return draws u (n, d) of the distribution that the states of a sampler must stay near."""
        return sampler.reference_in_u(N_MONITOR_DRAWS, self._noise())

    def error(self, u: Tensor) -> float:
        """Return how far draws u (n, d) are from the target, in standard deviations, by Stein's identities."""
        return stein_error(u, self.map.whiten_score(self.score.double(self.map.unwhiten(u))))

    def _noise(self) -> torch.Generator:
        return torch.Generator(self.score.device).manual_seed(self.seed)


@torch.no_grad()
def watch_of(judge: Judge, sampler: InU, stopping: Plateau | None, *, guards: bool, noisy: bool) -> Watch:
    """Return the rule for comparing states.

    A guarded state is kept if it has the smallest discrepancy among the states whose moments stay near the start's,
    or near its base's if that is at the target; the start itself only if it is better beyond the noise. With
    minibatches, Stein's identities must also hold no worse than at the start.

    Parameters
    ----------
    judge : Judge
    sampler : InU
        It uses the family as it is trained.
    stopping : Plateau or None
    guards : bool
        Whether the moments must stay near the start's.
    noisy : bool
        Whether the training uses minibatches.
    """
    score = judge.score
    discrepancy = FixedKernelKSD(score.double, score.n_features, score.device, judge.map)
    reference, noise = judge.reference(sampler), 0.0
    if guards or noisy:
        values = [_value(discrepancy, judge.map.unwhiten(u)) for u in judge.draws(sampler).split(N_JUDGED_DRAWS)]
        noise = NEGLIGIBLE * score.n_features + N_SE * float(np.std([v for v in values if math.isfinite(v)] or 0.0))
    at_start = judge.error(judge.draws(sampler)[:N_JUDGED_DRAWS]) if noisy else 0.0

    @torch.no_grad()
    def look(_: nn.Module) -> tuple[float, Verdict]:
        u = judge.draws(sampler)
        some, verdict = u[:N_JUDGED_DRAWS], departure(u, reference)
        value = _value(discrepancy, judge.map.unwhiten(some))
        if noisy and (verdict.accepted or not guards):
            return value, Worsening(judge.error(some), at_start)
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
    return _not_better(
        f"the squared discrepancy in `ksd_curve_` is {before:.2g} there and at least {min(v for _, v in after):.2g} "
        "after it"
    )


def _not_better(why: str) -> str:
    """Return the remark that a fit draws from its start."""
    return (
        f"The training did not improve on its start, which is returned: {why}. Lower `learning_rate`, raise "
        "`batch_size` or the `effort` of whiten=Pilot(...); early_stopping=False returns the last state all the same."
    )


# After a training


def until_interrupted(fit: Fit, *steps: Callable[[Fit], Fit]) -> Fit:
    """Return a fit after some steps; an error in one of them loses nothing learned before it."""
    try:
        for step in steps:
            fit = step(fit)
    except SpentError:
        pass
    except (KeyboardInterrupt, ConnectionError, TimeoutError) as error:
        fit = fit._replace(ended_by=error)
    return fit


def better(trained: Fit, untrained: Fit | None) -> Fit:
    """Return the fit at the end of a training, or the one at its start if that is clearly better.

    Their certificates decide, where both have one.
    """
    if untrained is None or trained.ended_by is not None:
        return trained
    before, after = (fit.report["certificate_"] for fit in (untrained, trained))
    if not (isinstance(before, Certificate) and isinstance(after, Certificate)):
        return trained
    noise = N_SE * math.hypot(before.se, after.se_below)
    if after.divergence <= max(before.divergence + noise, NEGLIGIBLE * trained.sampler.n_features):
        return trained
    kept = {name: untrained.report[name] for name in ("certificate_", "fitted_by_", "best_iter_")}
    remark = _not_better(
        f"KL(q||p) + KL(p||q) is {after.divergence:.2g} nats at its end and was {before.divergence:.2g}"
    )
    return trained._replace(sampler=untrained.sampler, report={**trained.report, **kept}, remark=remark)


@torch.no_grad()
def not_worse(fit: Fit, judge: Judge, at_start: InU, at_end: InU, n_before: int) -> Fit:
    """Return the start if the training has led away from the target.

    Stein's identities decide, which are almost insensitive to power-law tails.

    Parameters
    ----------
    fit : Fit
    judge : Judge
    at_start, at_end : InU
    n_before : int
        Iterations of the fits that this one continues.
    """
    if fit.ended_by is not None or fit.report["best_iter_"] == n_before or fit.remark is not None:
        return fit
    before, after = (judge.error(judge.draws(state)) for state in (at_start, at_end))
    if after <= before + WORSE * max(1.0, before) or has_power_tails(judge.score):
        return fit
    remark = _not_better(
        f"by Stein's identities the draws at its end are off by {after:.2g} standard deviations, at its start by "
        f"{before:.2g}"
    )
    return fit._replace(sampler=at_start, report={**fit.report, "best_iter_": n_before}, remark=remark)


@torch.no_grad()
def recentred(sampler: Sampler, score: DifferentiableScore, seed: int) -> Layer | None:
    """Return a sampler whose map is moved to the mean estimated by Stein control variates, None unless its draws are
    clearly off and the move reduces the error.
    """
    if not isinstance(sampler, Layer) or isinstance(sampler.whitening.map, Identity):
        return None
    map_ = sampler.whitening.map
    u = sampler.sample_in_u(N_RECENTRED, torch.Generator(map_.m.device).manual_seed(seed)).double()
    s = map_.whiten_score(score(map_.unwhiten(u)))
    error = stein_error(u, s)
    if not VISIBLE < error < math.inf:
        return None
    shift = controlled(u, stein_features(u, s)).mean(0) - u.mean(0)
    moved = map_._replace(m=map_.unwhiten(shift))
    s_moved = moved.whiten_score(score(moved.unwhiten(u)))
    if not stein_error(u, s_moved) < error:
        return None
    return replace(sampler, whitening=replace(sampler.whitening, map=moved))


def certified(fit: Fit, score: Score, seed: int, batch_size: int) -> Fit:
    """Return a fit with its certificate, which is None if the fit is incomplete or a certificate expensive."""
    score.tally.begin(CERTIFICATE)
    sampler, n_values = fit.sampler, batch_size * len(np.asarray(fit.report["loss_curve_"]))
    costly = isinstance(sampler, Layers) and sampler.family.n_layers * n_values < MANY_CALLS
    if fit.ended_by is not None or costly or not isinstance(sampler, Layer | Layers):
        return fit
    for times in N_CERTIFIED:
        found = cheap_certificate(sampler, score.double, seed ^ 1, times)
        if found is None:
            break
        fit = fit._replace(report={**fit.report, "certificate_": found})
        if is_certified(fit):
            break
    return fit
