"""The common base of the approximators that train a family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, clone
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor, nn

from skksivi._utils.checks import warn_caller
from skksivi.annealing import Linear
from skksivi.base import BaseApproximator, Constraints, Integral, Interval, Real, StrOptions
from skksivi.coordinates._whitening import LAPLACE, Whitening, check_start, points_near_target
from skksivi.estimators._judge import contradiction, remedy_of
from skksivi.families._samplers import Sampler
from skksivi.judge import Grade, Verdict
from skksivi.parameters import Adam, Annealing, Init, Network, Pilot, Scale, Whiten, chains_of, checked_object
from skksivi.pilot._pilot import MAX_POINTS, N_EXPECTED, RULES, check_stages
from skksivi.pilot._points import PilotPoints
from skksivi.pilot._stages import LEAST_CALLS
from skksivi.score._score import Score
from skksivi.training._hooks import TRAINING, Report
from skksivi.training._loop import CHECK_EVERY, Hook, Minimised, Objective, Scheduled, State, minimise
from skksivi.training._run import Fit, Run

#: The most calls of a fit that is frugal.
FRUGAL_CALLS = 1000

F = TypeVar("F", bound=nn.Module)


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
        return points_near_target(self.whiten, self.init)

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
        "hidden_layer_sizes": ["array-like"],
        "initial_scale": [Interval(Real, 0, None, closed="neither")],
        "scale": [StrOptions({"constant"}), Scale],
        "batch_size": [Interval(Integral, 2, None, closed="left")],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "learning_rate": [Interval(Real, 0, None, closed="neither")],
        "optimizer": [StrOptions({"adam"}), Adam],
        "verbose": [Interval(Integral, -1, None, closed="left")],
    }

    latent_dim: int | None
    hidden_layer_sizes: Sequence[int]
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

    def _n_latent(self, n_features: int) -> int:
        """Return the dimension of z."""
        return self.latent_dim or min(n_features, 100)  # more would rarely help

    def _floor(self) -> float:
        """Return the floor of sigma."""
        return checked_object(Scale, self.scale).floor

    def _n_reports(self) -> int:
        return -(-self.max_iter // CHECK_EVERY)

    def _n_pilot_calls(self) -> int:
        chains = chains_of(self.whiten)
        if chains is None:
            return 0
        if chains.rule == "auto" and chains.effort != "high":
            return N_EXPECTED
        return max(chains.budget, LEAST_CALLS if chains.rule == "auto" else 1)

    def _check_parameters(self, n_features: int) -> None:
        super()._check_parameters(n_features)
        self._network()
        scale, start = checked_object(Scale, self.scale), self.initial_scale
        if isinstance(start, Real) and float(start) <= scale.floor:
            raise ValueError(f"`initial_scale` must exceed the floor of `scale`, got {start!r} and {scale.floor!r}.")
        if scale.form not in self._forms_of_scale:
            raise ValueError(f"`scale` of {type(self).__name__} cannot be a network; use 'constant'.")

    def _minimise(
        self,
        objective: Objective,
        family: F,
        sampler_of: Callable[[F], Sampler],
        run: Run,
        *,
        before: Sequence[Hook] = (),
        after: Sequence[Hook] = (),
        resume: State | None = None,
    ) -> Minimised:
        """Train a family, with hooks before and after the report; raise an error that leaves nothing to keep."""
        run.tally.begin(TRAINING)
        show = run.show
        shown = None if show is None else lambda module: show(Fit(sampler_of(module), {}))
        report = [Report(self.max_iter, self.verbose, shown)] if shown or self.verbose > 0 else []
        found = minimise(
            objective,
            family,
            self._steps,
            run.generator,
            learning_rate=self.learning_rate,
            max_iter=self.max_iter,
            hooks=[*before, *report, *after],
            resume=resume,
        )
        if not (found.ended_by is None or isinstance(found.ended_by, run.keeping)):
            raise found.ended_by
        family.requires_grad_(False)
        return found

    def _trained(self, objective: Objective, family: F, sampler_of: Callable[[F], Sampler], run: Run) -> Fit:
        found = self._minimise(objective, family, sampler_of, run)
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
