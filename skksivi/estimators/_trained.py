"""The common base of the approximators that train a family, and which state of a training is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar, Generic, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, clone
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor, nn

from skksivi._utils.checks import shown, warn_caller
from skksivi._utils.monte_carlo import controlled, stein_features
from skksivi.annealing import Linear
from skksivi.base import BaseApproximator, Constraints, Integral, Interval, Real, StrOptions
from skksivi.coordinates._affine import AffineMap, Identity
from skksivi.coordinates._whitening import LAPLACE, Whitening, check_start, given_pair
from skksivi.estimators._judge import contradiction, remedy_of, surely_good
from skksivi.estimators._start import FRUGAL_CALLS, F, Start, answers_at
from skksivi.families._samplers import Layer, Sampler, WhitenedSampler
from skksivi.judge import Grade, Verdict
from skksivi.parameters import WIDTHS, Adam, Annealing, Init, Network, Pilot, Scale, Whiten, chains_of, checked_object
from skksivi.pilot._mixture import MOST_FEATURES
from skksivi.pilot._points import PilotPoints
from skksivi.score._score import Score
from skksivi.start._find import MAX_POINTS, RULES, check_stages
from skksivi.stein._discrepancy import FixedKernelKSD, agree, stein_error
from skksivi.training._guard import Acceptable, Departure, Watch, Worsening, departure
from skksivi.training._loop import Hook, Minimised, Objective, Progress, Scheduled, State, minimise
from skksivi.training._run import Fit, Run

#: Draws whose moments are compared with the start's, and how many of them enter the discrepancy.
N_MONITOR_DRAWS, N_JUDGED_DRAWS = 4000, 1000

#: Iterations between two comparisons.
LOOK_EVERY = 500

#: Gives the sampler of a family.
SamplerOf = Callable[[F], WhitenedSampler]


class Whitened(BaseApproximator):
    """Base of the approximators that start near the target, in its coordinates."""

    _parameter_constraints: ClassVar[Constraints] = {
        "whiten": [StrOptions(set(RULES)), Pilot, "array-like", None],
        "init": ["array-like", None],
    }

    whiten: Whiten
    init: Init
    whitening_: Whitening

    def _points_near_target(self) -> ArrayLike | None:
        pair = given_pair(self.whiten)
        return self.init if pair is None or self.init is not None else pair[0] if len(pair) else None

    @property
    def _expands(self) -> bool:
        return self.whiten is not None

    def _max_score_calls(self) -> int | None:
        chains = chains_of(self.whiten)
        return None if chains is None else chains.max_score_calls or (FRUGAL_CALLS if self._is_frugal() else None)

    def _is_frugal(self) -> bool:
        chains = chains_of(self.whiten)
        return chains is not None and chains.rule == "auto" and chains.effort == "frugal"

    def _check_parameters(self, n_features: int) -> None:
        super()._check_parameters(n_features)
        check_start(self.whiten, self.init, n_features)
        if (chains := chains_of(self.whiten)) is not None:
            check_stages(chains.skip)


class Trained(Whitened):
    """Base of the approximators that train a family."""

    _parameter_constraints: ClassVar[Constraints] = {
        "hidden_layer_sizes": [*WIDTHS],
        "initial_scale": [Interval(Real, 0, None, closed="neither")],
        "scale": [StrOptions({"constant"}), Scale],
        "batch_size": [Interval(Integral, 2, None, closed="left")],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "learning_rate": [Interval(Real, 0, None, closed="neither")],
        "optimizer": [StrOptions({"adam"}), Adam],
        "verbose": [Interval(Integral, -1, None, closed="left")],
    }

    latent_dim: int | None
    hidden_layer_sizes: int | Sequence[int]
    initial_scale: float
    scale: str | Scale
    batch_size: int
    max_iter: int
    learning_rate: float
    optimizer: str | Adam
    verbose: int
    loss_curve_: np.ndarray
    n_iter_: int

    #: The forms of sigma that the method can train.
    _forms_of_scale: ClassVar[set[str]] = {"constant"}

    #: What `optimizer="adam"` means.
    _adam: ClassVar[Adam] = Adam()

    def _expanded(self, name: str, value: object) -> BaseEstimator | None:
        if not isinstance(value, str):
            return super()._expanded(name, value)
        known = {("optimizer", "adam"): self._adam, ("annealing", "linear"): Linear()}
        found = known.get((name, value))
        return super()._expanded(name, value) if found is None else clone(found)

    @property
    def _steps(self) -> Adam:
        return self._adam if isinstance(self.optimizer, str) else self.optimizer

    # no property: `dir` and notebooks evaluate properties, before parameters are checked
    def _network(self) -> Network:
        return checked_object(Network, self.hidden_layer_sizes)

    def _widths(self) -> tuple[int, ...]:
        return self._network().widths()

    def _n_latent(self, n_features: int) -> int:
        """Return the dimension of z."""
        return self.latent_dim or min(n_features, 100)  # more would rarely help

    def _floor(self) -> float:
        """Return the floor of sigma."""
        return checked_object(Scale, self.scale).floor

    def _check_parameters(self, n_features: int) -> None:
        super()._check_parameters(n_features)
        self._network()
        scale, start = checked_object(Scale, self.scale), self.initial_scale
        if isinstance(start, Real) and float(start) <= scale.floor:
            got = shown((start, scale.floor))
            raise ValueError(f"`initial_scale` must exceed the floor of `scale`, got {got}.")
        if scale.form not in self._forms_of_scale:
            raise ValueError(f"`scale` of {type(self).__name__} cannot be a network; use 'constant'.")

    def _minimise(
        self,
        objective: Objective,
        family: F,
        run: Run,
        *,
        before: Sequence[Hook] = (),
        after: Sequence[Hook] = (),
        resume: State | None = None,
    ) -> Minimised:
        """Train a family, with hooks before and after the report; raise an error that leaves nothing to keep."""
        run.tally.begin("training", self.max_iter, "iterations")
        found = minimise(
            objective,
            family,
            self._steps,
            run.generator,
            learning_rate=self.learning_rate,
            max_iter=self.max_iter,
            hooks=[*before, *run.reports, *after],
            resume=resume,
        )
        if not (found.ended_by is None or isinstance(found.ended_by, run.keeping)):
            raise found.ended_by
        family.requires_grad_(False)
        return found

    def _trained(self, objective: Objective, family: F, sampler_of: Callable[[F], Sampler], run: Run) -> Fit:
        found = self._minimise(objective, family, run)
        report = {"loss_curve_": found.losses.astype(np.float64), "n_iter_": len(found.losses)}
        return Fit(sampler_of(family), report, found.ended_by)

    def _conclude(self, fit: Fit, score_fn: Score, generator: torch.Generator) -> None:
        """Explain the numbers that have ended a training, or warn of what is wrong with a fit that is complete.

        Raises
        ------
        FloatingPointError
        """
        if isinstance(fit.ended_by, FloatingPointError):
            raise _explained(fit.ended_by, score_fn, fit.sampler.sample(4000, generator)) from fit.ended_by
        if fit.ended_by is None and score_fn.tally.fault is not None:
            if not score_fn.tally.is_random:  # which was told before the fit
                warn_caller(score_fn.tally.fault, ConvergenceWarning)
        elif fit.ended_by is None and score_fn.tally.is_spent:
            words = _of_verdict(fit)
            warn_caller(f"{words}. {fit.remark}" if words else str(fit.remark), ConvergenceWarning)
        elif fit.ended_by is None:
            _warn(fit, score_fn, generator)


def _explained(error: BaseException, score_fn: Score, x: Tensor) -> FloatingPointError:
    """Return the error with the cause that draws x (n, d) of the last finite state suggest."""
    bad = (~score_fn(x).isfinite().all(1)).nonzero().flatten().tolist()
    cause = f"the score is finite at {len(x)} fresh draws, so the failure is rare"
    if bad:
        row = ", ".join(f"{value:.4g}" for value in x[bad[0]][:5].tolist())
        cause = (
            f"the score is not finite at {len(bad)} of {len(x)} fresh draws, rows {bad[:3]} and so on, "
            f"the first at x = [{row}{', ...' if x.shape[1] > 5 else ''}]"
        )
    elif not score_fn.by_differences and not score_fn.differentiated(x)[1](x).isfinite().all():
        cause = "the score is finite, its derivative by torch is not; set products='finite-difference' of the target"
    return FloatingPointError(
        f"{error}: {cause}. The state after the last finite step is kept. `score_fn`, or a term of `terms`, may be "
        "undefined or huge there, or have the wrong sign. Use dtype='float64', a smaller `learning_rate` or "
        "`initial_scale`, rescale the parameters or, where this is rare, set optimizer=Adam(nonfinite='skip')."
    )


def _warn(fit: Fit, score_fn: Score, generator: torch.Generator) -> None:
    """Warn of what is wrong with a completed fit, given its verdict or, without one, draws from it."""
    n_skipped = int((~np.isfinite(np.asarray(fit.report["loss_curve_"]))).sum())
    verdict, message = fit.report.get("verdict_"), fit.remark
    if n_skipped:
        message = (
            f"{n_skipped} of {fit.report['n_iter_']} iterations were skipped, their loss or gradient not being "
            "finite: `score_fn` may be undefined or huge somewhere. Use dtype='float64' or rescale the parameters."
        )
    elif isinstance(verdict, Verdict) and (words := _of_verdict(fit)):
        remark = "" if fit.remark is None else f" {fit.remark}"
        message = f"{words}: {verdict.remedy}.{remark}"
    elif verdict is None:
        x = fit.sampler.sample(1000, generator).double()
        if (words := contradiction(x, score_fn.double(x), score_fn)) is not None:
            message = f"The fit is wrong: {words}: {remedy_of(fit.sampler, score_fn)}."
    if message is not None:
        warn_caller(message, ConvergenceWarning)


def _of_verdict(fit: Fit) -> str:
    """Return the verdict on a fit as a sentence; nothing of one that is good, or that has none."""
    whitening, verdict = fit.sampler.attributes()["whitening_"], fit.report.get("verdict_")
    if not isinstance(verdict, Verdict) or verdict.good:
        return ""
    if verdict.grade == Grade.WRONG:
        return f"The fit is wrong: {verdict.reason}"
    chains = (
        isinstance(whitening, Whitening) and whitening.is_rough and whitening.found_by not in (LAPLACE, "surrogate")
    )
    why = "the chains that explore the target have not converged, and " if chains else ""
    how_far = ", and how far cannot be told" if verdict.errors is None else ""
    return f"The fit may be wrong{how_far}: {why}{verdict.reason}"


def temperature(annealing: Annealing, like: Tensor) -> Scheduled:
    """Return the inverse temperature that multiplies the score, one without `annealing`."""
    schedule = 1.0 if annealing is None else Linear() if isinstance(annealing, str) else annealing
    return Scheduled("annealing", schedule, like, positive=True)


def langevin_scale(
    initial_scale: float, min_scale: float, score_fn: Score, whitening: Whitening, pilot: PilotPoints | None
) -> Tensor:
    r"""Return the sigma_ini of a hierarchy, shape (d,).

    Its unit is one in u or, with a pilot, the width of the narrowest mode or, if smaller, the conditional width of a
    coordinate given the others, :math:`1 / \sqrt{E s_i^2}`: longer Langevin steps would not be stable.
    """
    d = score_fn.n_features
    sigma = torch.full((d,), float(initial_scale), dtype=score_fn.dtype, device=score_fn.device)
    if pilot is None:
        return sigma
    width = pilot.whitened(whitening.map, score_fn.dtype).thinned(MAX_POINTS // d).width_within()
    stiff = pilot.conditional_sd(score_fn.double, whitening.map).to(sigma)
    return (sigma * torch.minimum(width, stiff)).clamp_min(2 * min_scale)


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
    comparison: Comparison, sampler: WhitenedSampler, tol: float | None, *, guards: bool, noisy: bool
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
    tol : float or None
        See `Watch`.
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

    return Watch(look, tol, every=LOOK_EVERY, keeps_best=guards or noisy, noise=noise)


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
        "weighted_draws_": None,
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
    report = {**fit.report, "score_checksum_": answers_at(target, whitening)}
    return fit._replace(sampler=replace(sampler, whitening=whitening), report=report)
