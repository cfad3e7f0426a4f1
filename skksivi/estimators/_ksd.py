"""The common base of KSIVI and HKSIVI: their start, the discrepancy they minimise, and the guard on their states."""

from __future__ import annotations

import copy
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import ClassVar, Generic, NamedTuple, Self, cast

import numpy as np
import torch
from sklearn.base import BaseEstimator
from torch import Tensor

from skksivi._utils.arrays import RandomState, as_array
from skksivi._utils.checks import warn_caller
from skksivi.base import LOGGER, Constraints, Integral, Interval, Real, StrOptions
from skksivi.coordinates import Whitening, score_for_training
from skksivi.estimators._checkpoint import Saved, check_checkpoint, saved_fit
from skksivi.estimators._judge import Judged, better, judged
from skksivi.estimators._start import (
    N_RESERVED,
    Start,
    answers_at,
    find_coordinates,
    turn_frugal,
)
from skksivi.estimators._trained import (
    Comparison,
    F,
    SamplerOf,
    Trained,
    WhenGood,
    allows_moves,
    recentred,
    trained_fit,
    watch_of,
)
from skksivi.families._derived import gaussians_of
from skksivi.families._layer import Drawn, Family
from skksivi.families._samplers import Layer, OfFamily, Sampler, WhitenedSampler
from skksivi.families._weights import kept_draws
from skksivi.judge import Grade, Verdict, WeightedDraws
from skksivi.kernels import MAX_MEDIAN_DRAWS, Kernel, resolve_kernel
from skksivi.mixing import Bootstrap, GaussianMixtureDraws, MixingLike
from skksivi.parameters import WIDTHS, Adam, Checkpoint, Init, Pilot, Scale, Whiten, chains_of, checked_object
from skksivi.pilot._chains import clipped_drift
from skksivi.pilot._points import MAX_FEATURES, PilotPoints
from skksivi.score._score import DifferentiableScore, Score
from skksivi.score._tally import DIVERGED, BudgetError
from skksivi.stein import value_and_gradients, velocity
from skksivi.stein._estimators import GRADIENT_ESTIMATORS, GradientEstimator, Memory, averages
from skksivi.training import Fit, Run
from skksivi.training._guard import MomentPenalty, Steering, Watch, keeps_last, tolerance_of
from skksivi.training._loop import Objective, Scheduled

#: What makes the seed of another verdict.
AFRESH = 2**30

#: How a fit is made; those that train, and what their draws are made by.
METHODS, TRAINED = {"auto", "ksivi", "path", "start"}, {"ksivi", "path"}

#: Training parameters that also shape the start.
OF_START = {"mixing", "latent_dim", "scale", "initial_scale", "n_layers", "bridge"}


@dataclass(kw_only=True, eq=False, repr=False)
class SteinTrained(Trained, Generic[F]):
    """Base of KSIVI and HKSIVI, which minimise the kernel Stein discrepancy."""

    _parameter_constraints: ClassVar[Constraints] = {
        "method": [StrOptions(METHODS)],
        "kernel": "no_validation",  # resolve_kernel says more
        "bandwidth": [Interval(Real, 0, None, closed="neither"), StrOptions({"auto", "median"}), None],
        "hidden_layer_sizes": [StrOptions({"auto"}), *WIDTHS],
        "initial_scale": [StrOptions({"auto"}), Interval(Real, 0, None, closed="neither")],
        "batch_size": [StrOptions({"auto"}), Interval(Integral, 2, None, closed="left")],
        "learning_rate": [StrOptions({"auto"}), Interval(Real, 0, None, closed="neither")],
        "optimizer": [StrOptions({"auto", "adam"}), Adam],
        "gradient_estimator": [StrOptions({*GRADIENT_ESTIMATORS, "auto"})],
        "early_stopping": [StrOptions({"auto"}), "boolean", Interval(Real, 0, None, closed="left"), None],
        "certify": ["boolean"],
        "checkpoint": [str, os.PathLike, Checkpoint, None],
        "warm_start": ["boolean"],
    }

    #: Whether the training can use minibatches of the data.
    _takes_minibatches: ClassVar[bool] = True

    #: The training parameters: their values where they are left alone.
    _training: ClassVar[dict[str, object]]

    #: Those that have one value along the path and for a start, and another one for the discrepancy.
    _by_method: ClassVar[dict[str, tuple[float, float]]] = {}

    #: What `method` "auto" trains by, if it does.
    _trains_by: ClassVar[str] = "ksivi"

    method: str = "auto"
    kernel: str | Kernel = "auto"  # those whose types are ignored have the base's once they are resolved
    bandwidth: float | str | None = "auto"
    gradient_estimator: str = "auto"
    hidden_layer_sizes: str | int | Sequence[int] = "auto"  # type: ignore[assignment]
    mixing: MixingLike = "auto"
    scale: str | Scale = "auto"
    initial_scale: str | float = "auto"  # type: ignore[assignment]
    whiten: Whiten = "auto"
    init: Init = None
    batch_size: str | int = "auto"  # type: ignore[assignment]
    max_iter: int = 2000
    learning_rate: str | float = "auto"  # type: ignore[assignment]
    optimizer: str | Adam = "auto"
    early_stopping: str | bool | float | None = "auto"
    certify: bool = True
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None
    warm_start: bool = False
    device: str | torch.device = "auto"
    dtype: str = "float32"
    random_state: RandomState = None
    verbose: int = 0

    ksd_curve_: np.ndarray = field(init=False)
    fitted_by_: str = field(init=False)
    family_: F = field(init=False)
    _is_set: Sequence[str] = field(init=False, default=())

    # Whether a fit is trained

    def _resolved(self) -> Self:
        """Return this estimator with values for the training parameters that are left alone.

        Its `method` is "ksivi" if one of them is set: a fit whose training parameters are all left alone is trained
        only if its start is not good enough.
        """
        is_set, est = set_parameters(self, self._training), copy.copy(self)
        left = {name: value for name, value in self._training.items() if name not in is_set}
        est.__dict__.update(left, _is_set=is_set)
        if est.method == "auto" and is_set:
            est.method = "ksivi"
        of_method = {name: both[est.method == "ksivi"] for name, both in self._by_method.items()}
        est.__dict__.update({name: value for name, value in of_method.items() if name not in is_set})
        return est

    def _is_by_path(self) -> bool:
        """Tell whether a training follows the path gradient, and not the discrepancy."""
        return (self._trains_by if self.method == "auto" else self.method) == "path"

    def _expanded(self, name: str, value: object) -> BaseEstimator | None:
        is_open = isinstance(value, str) and value == "auto"
        return super()._expanded(name, self._training.get(name, value) if is_open else value)

    def __repr__(self, N_CHAR_MAX: int = 700) -> str:
        made = f"  # fitted by {self.fitted_by_}" if hasattr(self, "fitted_by_") else ""
        return super().__repr__(N_CHAR_MAX) + made

    def _fit(self, score_fn: Score, run: Run) -> Fit:
        if self.warm_start:
            run.keeping = BaseException
        self._check_target(score_fn)
        target = score_fn if self._takes_minibatches else score_fn.on_all_data()
        saved = saved_fit(self, score_fn, run.generator)
        run.finish = saved.finish
        asked = saved.remembering(target)
        start = saved.start or self._start(saved.remembering(score_fn), asked, run.generator)
        if start.whitening.by_score:
            target, asked = target.by_score_alone(), asked.by_score_alone()
        found = run.keep(start.fit(self._sampler_of(target, start)))
        compares = self._compares(start, run)
        before = None if start.judged is None or gaussians_of(found.sampler) is None else start.judged
        if compares and self._certifies(target):
            n_values = len(start.past.losses) * int(self.batch_size)
            found = run.keep(judged(found, asked, start.seed, n_values, before=before))
        elif compares and before is not None:  # it has been paid for
            found = run.keep(before.with_remedy(cast("Layer", found.sampler), asked).of(found))
        if saved.start or not compares or self._needs_training(found, start, run):
            found = self._train(target, start, saved, found, run)
        if (draws := cast("WeightedDraws | None", found.report["weighted_draws_"])) is None:
            return found
        kept = kept_draws(draws, score_fn.double)
        return run.keep(found._replace(report={**found.report, "weighted_draws_": kept}))

    def _certifies(self, score: Score) -> bool:
        """Tell whether to spend calls on a verdict, which the candidates of a search do without."""
        return self.certify and not score.replicate

    def _judged_anew(self, found: Fit, target: Score, start: Start[F]) -> Fit:
        """Return a fit that was the best of several with the verdict of other draws than it was chosen by."""
        if target.tally.is_spent or target.tally.is_scarce or found.report["verdict_"] is None:
            return found
        try:
            return self._judged(found, target, start._replace(seed=start.seed ^ AFRESH))
        except (*DIVERGED, BudgetError):
            return found

    def _compares(self, start: Start[F], run: Run) -> bool:
        """Tell whether a start is compared with what the training makes of it, or returned."""
        if self.method == "start" or run.tally.is_spent:
            return True
        keeps_end = self.method in TRAINED and keeps_last(self.early_stopping)
        is_cheap = self._is_at_pilot(start) or run.tally.limit is None
        return is_cheap and not (keeps_end or start.past.same_target)

    def _needs_training(self, found: Fit, start: Start[F], run: Run) -> bool:
        """Tell whether to train, given the fit that draws from the start: by default unless that is good enough, or
        there is no pilot.
        """
        if self.method == "start" or run.tally.is_spent:
            return False
        if self.method in TRAINED or not self._is_at_pilot(start):
            return True
        is_layer, chains = isinstance(found.sampler, Layer), chains_of(self.whiten)
        verdict = cast("Verdict | None", found.report["verdict_"]) or start.whitening.verdict
        # what weights do not know well enough more draws tell, not a training; several layers move points
        by = None if verdict is None else verdict.by
        by_start = by == "weights" or (is_layer and by == "identities" and start.whitening.converged)
        is_good = verdict is not None and ((verdict.grade > Grade.WRONG and by_start) or (verdict.good and is_layer))
        is_quick = run.tally.is_frugal or (chains is not None and chains.effort == "low")
        has_fault = is_layer and run.tally.fault is not None
        return not (is_good or is_quick or has_fault or found.sampler.n_features > MAX_FEATURES)

    def _train(self, target: Score, start: Start[F], saved: Saved, before: Fit, run: Run) -> Fit:
        """Return the fit of a training, or the one before it if that is clearly better."""
        n_calls, comparison = target.tally.total, Comparison.of(target, start)
        sampler_of = self._sampler_of(target, start)
        family = copy.deepcopy(start.family)
        watches = self._watches(target, comparison, start, sampler_of(family), family)
        by_path = self._is_by_path()
        if by_path and start.memory is None:
            start = start._replace(memory=Memory.empty(next(family.parameters()).detach()))
        score_u = score_for_training(target, start.whitening, run.generator)
        objective = self._objective(score_u, family, start, run.generator)
        saved.resume(score_u, watches)
        hooks = saved.hooks(start, watches)
        if self.early_stopping == "auto" and self._is_plain() and target.minibatch is None:
            hooks = [WhenGood(sampler_of, target, start.seed), *hooks]
        with run.tally.reserving(N_RESERVED):
            done = self._minimise(objective, family, run, before=watches, after=hooks, resume=saved.state)
            made_by = "path gradient" if by_path else "kernel Stein discrepancy"
            by_itself = self.method == "auto" and self._is_at_pilot(start)
            if isinstance(done.ended_by, FloatingPointError) and by_itself:
                return before._replace(remark=f"A training of it failed: {done.ended_by}.")
            found = trained_fit(done, watches, sampler_of, family, start, made_by)
            width = {"bandwidth_": self._width(start.memory, found.sampler)}
            found = run.keep(found._replace(report={**found.report, **width}))
        if done.ended_by is not None and not isinstance(done.ended_by, BudgetError):
            raise done.ended_by
        if keeps_last(self.early_stopping):
            return self._judged(found, target, start)
        found = run.keep(recentred(found, target, start.seed))
        found = run.keep(self._judged(found, target, start))
        verdict = cast("Verdict | None", found.report["verdict_"])
        if before.report["verdict_"] is None and verdict is not None and not verdict.good:
            before = self._judged(before, target, start)
        if before.report["verdict_"] is None or verdict is None:
            return found
        words = "training: before it, after %s calls, %s; after it, by %s, %s"
        LOGGER.info(words, f"{n_calls:,}", before.report["verdict_"], f"{target.tally.total:,}", verdict)
        return self._judged_anew(better(found, before), target, start)

    @torch.no_grad()
    def _width(self, memory: Memory | None, sampler: Sampler) -> float | np.ndarray | None:
        """Return the bandwidth at the end of a training, of each layer that the memory has, None if unknown."""
        kernel = self._kernel_in_u(sampler.n_features)
        if not isinstance(kernel.bandwidth, str):
            return float(kernel.bandwidth)
        own = None
        if memory is not None and len(memory.x):
            x, own = memory.x[..., -MAX_MEDIAN_DRAWS:, :], memory.squared_width() if self._adapts() else None
        elif memory is None and isinstance(sampler, Layer):
            x = sampler.sample_in_u(MAX_MEDIAN_DRAWS, torch.Generator(sampler.whitening.map.m.device).manual_seed(0))
        else:  # draws would take scores, or there are none
            return None
        h2 = kernel.squared_bandwidth(kernel.squared_distances(x, x), within=True) if own is None else own
        h = as_array(h2.sqrt().flatten())
        return float(h[0]) if len(h) == 1 else h

    def _made_with(self, fit: Fit) -> dict[str, object]:
        left_out = {"annealing", "bandwidth", "terms"}
        found = {name: getattr(self, name) for name in self._training if name not in left_out}
        kernel, width = self._kernel_in_u(fit.sampler.n_features), fit.report["bandwidth_"]
        mixing = cast("OfFamily", fit.sampler).family.mixing
        found |= {
            "kernel": kernel.with_bandwidth(width) if isinstance(width, float) else kernel,
            "hidden_layer_sizes": self._widths(),
            "scale": checked_object(Scale, self.scale),
            "optimizer": self._steps,
            "gradient_estimator": None if self._is_by_path() else self.gradient_estimator,
        }
        if isinstance(self.mixing, str):
            found["mixing"] = "pilot" if isinstance(mixing, Bootstrap | GaussianMixtureDraws) else "normal"
        if "latent_dim" in found:
            found["latent_dim"] = mixing.latent_dim
        return {f"{name}_": value for name, value in found.items()}

    def _judged(self, found: Fit, target: Score, start: Start[F]) -> Fit:
        if not self._certifies(target):
            return found
        n_values = int(self.batch_size) * len(np.asarray(found.report["loss_curve_"]))
        return judged(found, target, start.seed, n_values, self._max_score_calls())

    def _watches(
        self, target: Score, comparison: Comparison, start: Start[F], sampler: WhitenedSampler, family: F
    ) -> list[Watch]:
        """Return the rule for comparing states, none if they are not compared."""
        tol, guards, noisy = tolerance_of(self.early_stopping), self._guards(start), target.minibatch is not None
        if guards and start.continues:  # a target that has moved must be followed
            guards = comparison.accepts(sampler)
        if keeps_last(self.early_stopping) or (tol is None and not guards and not noisy):
            return []
        found = watch_of(comparison, sampler, tol, guards=guards, noisy=noisy)
        if guards or noisy:
            found.look(family, 0)
        return [found]

    def _check_parameters(self, n_features: int) -> None:
        super()._check_parameters(n_features)
        kernel = self._kernel_in_u(n_features)
        _warn_of_method(self, self._is_set)
        if self.method == "path" and "gradient_estimator" in self._is_set:
            raise ValueError(
                f"`gradient_estimator` is {self.gradient_estimator!r}, which is of the discrepancy, but `method` is "
                "'path'; leave one of them out."
            )
        if self._is_by_path() and not averages(kernel):
            raise ValueError(
                "`method` is 'path', which needs a positive kernel of Euclidean distances, but `kernel` "
                f"is {kernel!r}; change it, or set method='ksivi'."
            )
        check_checkpoint(self)
        if self._continues() and self.n_features_in_ != n_features:
            raise ValueError(
                f"`warm_start` continues a fit of {self.n_features_in_} features, but the target has {n_features}; "
                "set warm_start=False."
            )

    def _conclude(self, fit: Fit, score_fn: Score, generator: torch.Generator) -> None:
        super()._conclude(fit, score_fn, generator)
        if score_fn.replicate and fit.report["best_iter_"] == 0:
            _warn_of_search(self, fit, self._is_set)

    def _check_target(self, score_fn: Score) -> None:
        """Raise or warn if a target does not suit the parameters."""

    @abstractmethod
    def _family(
        self, score_y: Score, whitening: Whitening, pilot: PilotPoints | None, generator: torch.Generator
    ) -> tuple[F, MomentPenalty | None]:
        """Return a new family and the penalty that ties it to the pilot."""

    @abstractmethod
    def _sampler_of(self, score: Score, start: Start[F]) -> SamplerOf[F]:
        """Return the map of a family to its sampler."""

    @abstractmethod
    def _guards(self, start: Start[F]) -> bool:
        """Tell whether the states of the training must stay near the start."""

    @abstractmethod
    def _objective(
        self, score_u: DifferentiableScore, family: F, start: Start[F], generator: torch.Generator
    ) -> Objective:
        """Return the objective."""

    # Where a fit starts

    def _start(self, score_fn: Score, target: Score, generator: torch.Generator) -> Start[F]:
        """Return the start of the training: new, at the last fit or, if its target has moved, near that."""
        if not self._continues():
            return self._new_start(score_fn, target, generator, self.init)
        start: Start[F] = Start.from_fit(self, score_fn, generator.initial_seed())
        comparison = Comparison.of(score_fn, start)
        sampler = self._sampler_of(score_fn, start)(start.family)
        if start.past.same_target or comparison.accepts(sampler) or not isinstance(self.whiten, str | Pilot):
            return start
        x = start.whitening.push_forward(comparison.draws(sampler))[:16]
        near = x[score_fn.double(x).isfinite().all(1)]
        moved = self._new_start(score_fn, target, generator, as_array(near) if len(near) else self.init, start)
        return moved._replace(past=start.past)

    def _new_start(
        self, score_fn: Score, target: Score, generator: torch.Generator, init: Init, last: Start[F] | None = None
    ) -> Start[F]:
        """Return a start in coordinates that are searched; the last one keeps its family if it can.

        It cannot if it started at points of a pilot, because a mixture has no parameters that could follow, or if
        either has warped coordinates.
        """
        if self.method not in TRAINED:
            turn_frugal(self.whiten, init, score_fn)
        warps, moves = self._warps(score_fn), self.method != "start" and allows_moves(target)

        whitening, pilot = find_coordinates(self.whiten, init, score_fn, generator, warps=warps, moves=moves)
        is_warped = whitening.warp is not None or (last is not None and last.whitening.warp is not None)
        if last is not None and not (is_warped or self._is_at_pilot(last)):
            return last._replace(whitening=whitening, answers=answers_at(score_fn, whitening))
        return self._start_in(whitening, pilot, score_fn, generator)

    def _start_in(
        self, whitening: Whitening, pilot: PilotPoints | None, score_fn: Score, generator: torch.Generator
    ) -> Start[F]:
        """Return the start of a new family in some coordinates, at the points of a pilot if there are any."""
        answers = answers_at(score_fn, whitening)
        family, penalty = self._family(whitening.straighten(score_fn), whitening, pilot, generator)
        is_its_own = pilot is not None and pilot.verdict.by == "weights" and self._takes_points()
        judged_by = Judged(pilot.verdict, pilot.draws) if pilot is not None and is_its_own else None
        return Start(whitening, family, penalty, generator.initial_seed(), answers, judged_by)

    def _warps(self, score_fn: Score) -> bool:
        """Tell whether the coordinates of the training may be warped."""
        return False

    def _continues(self) -> bool:
        return self.warm_start and hasattr(self, "family_")

    def _takes_points(self) -> bool:
        """Tell whether a family would start at the points of a pilot, if there are any."""
        return isinstance(self.mixing, str) and self.mixing in ("auto", "pilot")

    def _is_at_pilot(self, start: Start[F]) -> bool:
        of_points = isinstance(start.family.mixing, Bootstrap | GaussianMixtureDraws)
        return of_points and start.whitening.mean is not None and self._takes_points()

    # The objective

    @property
    def _loss_label(self) -> str:
        return (
            "loss, rate at which KL(q || p) falls"
            if self._is_by_path()
            else r"loss, KSD$^2$ under the training kernel"
        )

    def _is_plain(self) -> bool:
        """Tell whether the objective is the distance from the target alone."""
        return True

    def _kernel_in_u(self, d: int) -> Kernel:
        """Return the kernel, with its own rule for the width unless one is given."""
        return resolve_kernel(self.kernel, None if self.bandwidth == "auto" else self.bandwidth)

    def _adapts(self) -> bool:
        """Tell whether the path gradient has its own rule for the bandwidth."""
        return self.bandwidth == "auto" and isinstance(self.kernel, str)

    def _estimate(self, score_u: DifferentiableScore, d: int, memory: Memory | None) -> ObjectiveEstimate:
        kernel = self._kernel_in_u(d)
        if memory is not None:
            return rate_of_kl(kernel, int(self.batch_size), memory, adapts=self._adapts())
        estimator = GRADIENT_ESTIMATORS[self.gradient_estimator]
        return squared_ksd(kernel, estimator, int(self.batch_size), in_halves=score_u.minibatch is not None)


def set_parameters(est: BaseEstimator, names: Iterable[str]) -> list[str]:
    """Return those of some parameters that are set, to whatever value."""
    defaults = {name: parameter.default for name, parameter in signature(type(est)).parameters.items()}
    return [name for name in names if not is_default(getattr(est, name), defaults[name])]


def is_default(value: object, default: object) -> bool:
    """Tell whether a parameter has its default value, "auto" or None."""
    return value is default or (isinstance(value, str) and value == default)


def _warn_of_method(est: SteinTrained, is_set: Sequence[str]) -> None:
    """Warn of parameters that contradict `method`."""
    chains = chains_of(est.whiten)
    ignored = [name for name in is_set if name not in OF_START]
    if est.method == "start" and ignored:
        warn_caller(
            f"`method` is 'start', so {', '.join(f'`{name}`' for name in ignored)} will be ignored; leave "
            f"{'it' if len(ignored) == 1 else 'them'} out, or set method='ksivi'."
        )
    elif est.method in TRAINED and chains is not None and chains.effort in ("low", "frugal"):
        why = f"{', '.join(f'`{name}`' for name in is_set)} {'is' if len(is_set) == 1 else 'are'} set"
        warn_caller(
            f"The fit is trained, since {why if is_set else f'`method` is {est.method!r}'}, although the `effort` of "
            f"Pilot is {chains.effort!r}, meant for fits without training; set method='start', or another `effort`."
        )


def _warn_of_search(est: SteinTrained, fit: Fit, is_set: Sequence[str]) -> None:
    """Warn of parameters of the training, if it has made nothing of a candidate of a search."""
    unused = [f"`{name}`" for name in (*set_parameters(est, ["max_iter"]), *is_set) if name not in OF_START]
    if unused and est.method != "start":
        why = "without training; set method='ksivi' to search over trainings"
        why = why if fit.report["n_iter_"] == 0 else "on which training has not improved"
        warn_caller(
            f"A candidate of this search is its start, by {fit.report['fitted_by_']}, {why}: {', '.join(unused)} did "
            "not change what is returned."
        )


# What a training minimises: the discrepancy of one or of many layers, or KL(q || p), with further terms


class ObjectiveEstimate(NamedTuple):
    """An estimate of an objective from draws.

    Attributes
    ----------
    n_draws : int
    gradients : callable
        Maps draws to the value, and its gradients in the fields of `Drawn`.
    """

    n_draws: int
    gradients: Callable[[Drawn], tuple[Tensor, ...]]


def squared_ksd(
    kernel: Kernel, estimator: GradientEstimator, batch_size: int, *, in_halves: bool
) -> ObjectiveEstimate:
    """Return the estimate of KSD^2; with a minibatch for each half of the draws, by the pairs between these."""
    n_draws = estimator.n_batches * batch_size
    if in_halves:  # pairs within a half are biased
        estimator, n_draws = GRADIENT_ESTIMATORS["vanilla"], n_draws + n_draws % 2

    def gradients(drawn: Drawn) -> tuple[Tensor, ...]:
        ksd, dx, df = value_and_gradients(drawn.x, drawn.target_score - drawn.conditional_score, kernel, estimator)
        return ksd, dx, df, -df

    return ObjectiveEstimate(n_draws, gradients)


def rate_of_kl(kernel: Kernel, batch_size: int, memory: Memory, *, adapts: bool) -> ObjectiveEstimate:
    """Return the rate at which KL(q || p) falls along the kernelised path gradient, with that gradient."""

    def gradients(drawn: Drawn) -> tuple[Tensor, ...]:
        x, s, zero = drawn.x, clipped_drift(drawn.target_score), torch.zeros_like(drawn.x)
        if not len(memory.x):
            memory.begin(x, s)
        v = velocity(x, memory, kernel, memory.squared_width() if adapts else None)
        memory.add(x, s)
        rate = (v * (s - drawn.conditional_score)).sum(-1).mean(-1)
        return rate, -v / x.shape[-2], zero, zero

    return ObjectiveEstimate(batch_size, gradients)


def objective_of(
    estimate: ObjectiveEstimate,
    score_u: DifferentiableScore,
    family: Family,
    generator: torch.Generator,
    *,
    terms: Sequence[Steering] = (),
    schedules: Sequence[Scheduled] = (),
    weights: Sequence[float] | None = None,
) -> Objective:
    """Return the sum of estimates over layers, with weights, and of the further terms."""
    beta = None if weights is None else next(family.parameters()).new_tensor(weights)

    def gradient_fn() -> Tensor:
        drawn, pull = family.draw_with_pullback(estimate.n_draws, generator, score_u)
        value, dx, ds, dc = estimate.gradients(drawn)
        for term in terms:
            dx.add_(term.gradient(drawn.x, drawn.target_score))
        if beta is not None:
            value = beta @ value
            dx, ds, dc = (gradient * beta[:, None, None] for gradient in (dx, ds, dc))
        pull(dx, ds, dc)
        return value

    return Objective(gradient_fn, schedules)
