"""The common base of the approximators that train a family."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, clone
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor, nn

from skksivi._utils.warnings import warn_caller
from skksivi.annealing import Linear
from skksivi.base import BaseApproximator, Constraints, Integral, Interval, Real, StrOptions
from skksivi.coordinates._affine import Identity
from skksivi.coordinates._whitening import LONG_CHAINS, Whitening, check_start, points_near_target
from skksivi.families._samplers import Layer, Layers, Sampler
from skksivi.families._weights import Certificate
from skksivi.parameters import Adam, Annealing, Init, Network, Pilot, Scale, Whiten, chains_of, checked_object
from skksivi.pilot._pilot import MAX_FEATURES, MAX_POINTS, N_EXPECTED, RULES, check_stages
from skksivi.pilot._points import MANY_FEATURES, PilotPoints
from skksivi.pilot._stages import LEAST_CALLS
from skksivi.score._score import Score
from skksivi.stein._directions import MOST_CALLS, N_DRAWS, N_SCORES, first_difference
from skksivi.stein._discrepancy import stein_shift, stein_variances
from skksivi.training._hooks import CERTIFICATE, TRAINING, Report
from skksivi.training._loop import CHECK_EVERY, Hook, Minimised, Objective, Scheduled, State, minimise
from skksivi.training._run import Fit, Run

#: Number of draws at which the score of a finished fit is checked.
N_EXPLAINED, N_JUDGED = 4000, 1000

#: Bounds of the variances of the draws by Stein's identity, one if they are right, beyond which a fit has failed.
FAILED_VARIANCES = (0.25, 4.0)

#: Square of the distance of the draws from the target, in their standard deviations, beyond which a fit has failed.
FAILED_SHIFT = 4.0

#: The divergence per feature, in nats, beyond which a fit has failed if it exceeds it by so many standard errors; by
#: fewer if it is not trusted, for then it is more often too small.
FAILED_DIVERGENCE, N_SE, N_SE_UNTRUSTED = 0.05, 4, 2

#: Largest Pareto shape of the importance ratios that is light-tailed for a few hundred draws.
LIGHT = 0.6

#: Largest latent dimension chosen by default.
MAX_LATENT_DIM = 100

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
        return None if chains is None else chains.max_score_calls

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
        "verbose": [Interval(Integral, 0, None, closed="left")],
    }

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
        report = [Report(self.max_iter, self.verbose, shown)] if shown or self.verbose else []
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
            raise _explained(fit.ended_by, score_fn, fit.sampler.sample(N_EXPLAINED, generator)) from fit.ended_by
        if fit.ended_by is None and score_fn.tally.fault is not None:
            warn_caller(score_fn.tally.fault, ConvergenceWarning)
        elif fit.ended_by is None and score_fn.tally.is_spent:
            warn_caller(str(fit.remark), ConvergenceWarning)
        elif fit.ended_by is None:
            _warn(fit, score_fn, fit.sampler.sample(N_JUDGED, generator).double(), self._max_score_calls())


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


def _warn(fit: Fit, score_fn: Score, x: Tensor, most: int | None) -> None:
    """Warn of what is wrong with a completed fit, given draws x (n, d) from it, and the most calls of its score."""
    n_skipped = int((~np.isfinite(np.asarray(fit.report["loss_curve_"]))).sum())
    whitening, message = fit.sampler.attributes()["whitening_"], None
    if n_skipped:
        message = (
            f"{n_skipped} of {fit.report['n_iter_']} iterations were skipped, their loss or gradient not being "
            "finite: `score_fn` may be undefined or huge somewhere. Use dtype='float64' or rescale the parameters."
        )
    elif isinstance(whitening, Whitening) and not whitening.converged:
        message = (
            "The chains that explore the target have not converged, so the fit may be inaccurate: "
            f"{_first_remedy(whitening, score_fn)}{_more(whitening)}start near a mode by `init`, or reparametrise "
            "the model to avoid funnels and spikes."
        )
    elif fit.remark is not None:
        message = fit.remark
    elif not is_certified(fit) or _is_unknown(fit.report.get("certificate_"), x.shape[1]):
        s, todo, d = score_fn.double(x), _todo(whitening), x.shape[1]
        sd = whitening.sd if isinstance(whitening, Whitening) and whitening.converged else None
        message = (
            of_variances(x, s, score_fn, todo, sd if d >= MANY_FEATURES else None)
            or _of_shift(x, s, todo)
            or of_certificate(fit.report, d, explored=sd is not None, more=_more(whitening))
        )
    if message == fit.remark and isinstance(fit.sampler, Layer | Layers):
        message = _of_difference(fit.sampler, score_fn, most) or message
    if message is not None:
        warn_caller(message, ConvergenceWarning)


def _first_remedy(whitening: Whitening, score_fn: Score) -> str:
    """Return what comes before the usual advice: other units, or a finer type."""
    if (sd := whitening.sd) is not None and sd.max() > 1e7 * sd.min():
        small, large = int(sd.argmin()), int(sd.argmax())
        return (
            f"its units differ too much, with standard deviations of about {sd[small]:.1g} in "
            f"{score_fn.label(small)} and {sd[large]:.1g} in {score_fn.label(large)}. Set `init` to a point near the "
            "mode, or rescale the parameters to deviations near one. If neither helps, "
        )
    if score_fn.type_computed == torch.float32:
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


def _todo(whitening: object) -> str:
    """Return the advice for a poor fit, depending on how the coordinates of the training were found."""
    if isinstance(whitening, Whitening) and whitening.sd is not None:
        return "Lower `learning_rate`, or raise the `budget` of whiten=Pilot(...)"
    if isinstance(whitening, Whitening) and not isinstance(whitening.map, Identity):
        return "Set whiten='auto', or raise `max_iter`"
    return "Set whiten='auto', raise `max_iter`, or rescale the parameters"


def of_variances(x: Tensor, s: Tensor, score_fn: Score, todo: str, sd: np.ndarray | None) -> str | None:
    """Say in which coordinate draws x (n, d) with scores s are far too wide or narrow.

    If the standard deviations sd (d,) of the target are known, the draws' must differ from them as well: the score of
    a scale in a hierarchy also depends on how the draws of its many effects vary with it.
    """
    variances, se = stein_variances(x, s)
    low, high = FAILED_VARIANCES
    wrong = (variances + 5 * se < low) | (variances - 5 * se > high)
    if sd is not None:
        ratio = (x.std(0) / torch.as_tensor(sd).to(x)).square()
        wrong &= (ratio < low) | (ratio > high)
    if not wrong.any():
        return None
    worst = int((variances.clamp_min(1e-12).log().abs() * wrong).argmax())
    way = "narrow" if variances[worst] < 1 else "wide"
    return (
        f"The draws are too {way} in {score_fn.label(worst)}: -E[s_i (x_i - E x_i)] is {variances[worst]:.2g} "
        f"there, but should be 1; {int(wrong.sum())} of {len(wrong)} coordinates are off by more than "
        f"a factor of 4. {todo}."
    )


def _of_shift(x: Tensor, s: Tensor, todo: str) -> str | None:
    """Say how far draws x (n, d) with scores s are from the target."""
    square, se = stein_shift(x, s)
    if not square - 5 * se > FAILED_SHIFT:
        return None
    return (
        "The draws are too far from the target: E[s]^T Cov(x) E[s], about the square of the distance in standard "
        f"deviations, is {square:.2g}, but should be 0. {todo}, or set `init` near the target."
    )


def of_certificate(report: Mapping[str, object], d: int, *, explored: bool, more: str = "") -> str | None:
    """Say how far a fit of d features is from its target, if its certificate says so and can be trusted.

    Of a few features that chains have explored it need not be trusted: such a fit is meant to be good as it is.
    """
    found = report.get("certificate_")
    if not isinstance(found, Certificate):
        return None
    least = math.exp(-FAILED_DIVERGENCE * d)
    if found.share < least and d >= MANY_FEATURES:
        return (
            f"The fit may be far from the target: draws weighted by p / q have an effective share of "
            f"{found.share:.2g}, below {least:.2g}: {more}reparametrise the model to avoid funnels and spikes, or "
            "see `skksivi.diagnose`."
        )
    n_se = N_SE if found.trusted else N_SE_UNTRUSTED
    is_far = found.divergence - n_se * found.se_below > FAILED_DIVERGENCE * d or (explored and _is_unknown(found, d))
    if not (is_far and (found.trusted or (explored and d < MANY_FEATURES))):
        return None
    return (
        f"The draws are too far from the target: KL(q||p) + KL(p||q) is {found.divergence:.2g} nats, with a standard "
        f"error of {found.se:.1g}; the limit is {FAILED_DIVERGENCE} per feature. Use whiten='auto', "
        "mixing='auto' or more `max_iter`, or correct the fit by `skksivi.refine`; see `skksivi.diagnose`."
    )


def _of_difference(sampler: Layer | Layers, score_fn: Score, most: int | None) -> str | None:
    """Say along which direction the draws of a sampler are wrong, if that takes no more than the most calls, and of a
    hierarchy, whose draws take calls, a fifth of those of the fit.
    """
    tally, whitening, n_draws, n_calls = score_fn.tally, sampler.whitening, N_DRAWS, MOST_CALLS
    left = math.inf if most is None else most - tally.total
    if isinstance(sampler, Layers):
        n_draws //= 10
        n_calls += (N_SCORES + n_draws) * sampler.family.n_layers
        left = min(left, tally.total / 5)
    if n_calls > left or sampler.n_features > MAX_FEATURES:
        return None
    tally.begin(CERTIFICATE)
    generator = torch.Generator(score_fn.device).manual_seed(sampler.seed ^ 3)

    def draw() -> tuple[Tensor, Tensor]:
        u = sampler.sample_in_u(n_draws, generator)
        return u, whitening.push_forward(u)

    few = sampler.sample_in_u(N_SCORES, generator)
    found = first_difference(whitening.pull_back(score_fn.double), few, draw)
    if found is None:
        return None
    todo = f"{_more(whitening)}or reparametrise the model so that these parameters depend less on each other"
    todo = todo.removeprefix("or ") if whitening.sd is not None else _todo(whitening)
    return f"The draws are wrong along {found.words(score_fn.label)}. {todo[0].upper()}{todo[1:]}."


def _is_unknown(found: object, d: int) -> bool:
    """Tell whether a divergence is above what is allowed, and so is its error, as where a fit lacks a tail."""
    passes = FAILED_DIVERGENCE * d
    return isinstance(found, Certificate) and min(found.divergence, found.se_below) > passes


def is_certified(fit: Fit) -> bool:
    """Tell whether a fit has a good certificate, given the divergence that is allowed.

    With many features, a fit within that divergence has a smaller effective share than a trusted certificate needs.
    """
    found, passes = fit.report.get("certificate_"), FAILED_DIVERGENCE * fit.sampler.n_features
    if not isinstance(found, Certificate):
        return False
    is_near = found.divergence - 2 * found.se_below <= passes
    return is_near and (found.trusted or (found.k <= LIGHT and found.share >= math.exp(-passes)))


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
