"""The common base of KSIVI and HKSIVI: their start, the discrepancy they minimise, and the guard on their states."""

from __future__ import annotations

import copy
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any, ClassVar, Generic, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from torch import Tensor

from skksivi._arrays import as_array
from skksivi._warnings import warn_caller
from skksivi._weights import Certificate
from skksivi.base import Constraints, Integral, Interval, Real, StrOptions
from skksivi.coordinates._affine import Affine
from skksivi.estimators._checkpoint import NoCheckpoint, check_checkpoint, saved_fit
from skksivi.estimators._identity import of_score_near
from skksivi.estimators._start import Start, is_close, untrained
from skksivi.estimators._trained import KEEPING, F, Job, Trained, is_certified
from skksivi.estimators._verdict import (
    N_MONITOR_DRAWS,
    Judge,
    WhenGood,
    better,
    certified,
    not_worse,
    recentred,
    remark_of,
    until_interrupted,
    watch_of,
)
from skksivi.families._derived import Warped
from skksivi.families._layer import Drawn, Family
from skksivi.families._samplers import Fit, InU, Layer, Tell
from skksivi.kernels import Kernel, resolve_kernel
from skksivi.mixing import Bootstrap, GaussianMixtureDraws, MixingLike, check_mixing
from skksivi.parameters import (
    Adam,
    Checkpoint,
    Init,
    Pilot,
    Plateau,
    keeps_last,
    pilot_of,
    plateau_of,
)
from skksivi.pilot._gaussian import matched
from skksivi.pilot._mixture import MOST_FEATURES
from skksivi.pilot._modes import find_modes
from skksivi.pilot._newton import LOST
from skksivi.pilot._others import all_modes
from skksivi.pilot._points import MANY_FEATURES, PilotPoints, are_known
from skksivi.pilot._rules import MAX_FEATURES, pulled_back
from skksivi.pilot._whitening import MATCHED, Whitening
from skksivi.score._score import DifferentiableScore, Halves, Score, WithoutProducts
from skksivi.score._tally import SpentError
from skksivi.stein._discrepancy import agree
from skksivi.stein._estimators import GRADIENT_ESTIMATORS, GradientEstimator
from skksivi.stein._fused import value_and_gradients
from skksivi.stein._path import Memory, averages, shortened, velocity
from skksivi.training._guard import MomentPenalty, Steering, Watch
from skksivi.training._loop import Hook, Objective, Scheduled, State

#: How often a Gaussian is fitted again, starting from the last one, unless that is good enough.
N_MATCHED = 3

#: Number of draws of the last fit, after its target has moved, from which modes are searched.
N_FOLLOWED = 16

#: Names of the objectives, as `fitted_by_` gives them.
PATH, KSD = "path gradient", "kernel Stein discrepancy"

#: Score evaluations reserved from the budget for the last steps: the scale of the family and a certificate.
N_RESERVED = 350

#: An estimate of the objective from draws, with its gradients in the fields of `Drawn`.
Gradients = Callable[[Drawn], tuple[Tensor, ...]]


#: Training parameters that also shape the start.
OF_START = {"mixing", "latent_dim", "scale", "initial_scale", "n_layers", "bridge", "shared_network"}


class SteinTrained(Trained, Generic[F]):
    """Base of KSIVI and HKSIVI, which minimise the kernel Stein discrepancy."""

    _parameter_constraints: ClassVar[Constraints] = {
        "train": [StrOptions({"auto"}), "boolean"],
        "kernel": [str, Kernel],
        "bandwidth": [Interval(Real, 0, None, closed="neither"), StrOptions({"auto", "median"}), None],
        "hidden_layer_sizes": [StrOptions({"auto"}), "array-like"],
        "initial_scale": [StrOptions({"auto"}), Interval(Real, 0, None, closed="neither")],
        "batch_size": [StrOptions({"auto"}), Interval(Integral, 2, None, closed="left")],
        "learning_rate": [StrOptions({"auto"}), Interval(Real, 0, None, closed="neither")],
        "optimizer": [StrOptions({"auto", "adam"}), Adam],
        "gradient_estimator": [StrOptions({*GRADIENT_ESTIMATORS, "auto", "path"})],
        "early_stopping": [StrOptions({"auto"}), "boolean", Interval(Real, 0, None, closed="left"), Plateau, None],
        "checkpoint": [str, os.PathLike, Checkpoint, None],
        "warm_start": ["boolean"],
    }

    #: Whether its training uses minibatches of the data.
    _sees_minibatches: ClassVar[bool] = True

    #: The training parameters: their values where they are left alone.
    _training: ClassVar[dict[str, Any]]

    train: str | bool
    kernel: str | Kernel
    bandwidth: float | str | None
    gradient_estimator: str
    mixing: MixingLike
    early_stopping: str | bool | float | Plateau | None
    checkpoint: str | os.PathLike[str] | Checkpoint | None
    warm_start: bool
    ksd_curve_: np.ndarray
    fitted_by_: str
    family_: F

    # Whether a fit is trained

    def _resolved(self) -> Self:
        """Return this estimator with values for the training parameters that are left alone.

        Its `train` is True if one of them is set: a fit whose training parameters are all left alone is trained only
        if its start is not good enough.
        """
        is_set, est = set_parameters(self, self._training), copy.copy(self)
        est.__dict__.update({name: value for name, value in self._training.items() if name not in is_set})
        if est.gradient_estimator == "auto":
            est.gradient_estimator = "path" if averages(resolve_kernel(est.kernel)) else "u-statistic"
        if est.train == "auto" and is_set:
            est.train = True
        est.__dict__["_is_set"] = is_set
        return est

    def _is_to_train(self, untrained: Fit, score: Score, start: Start[F]) -> bool:
        """Tell whether to train, given the fit that draws from the start."""
        if self.train is False or score.tally.is_spent or untrained.ended_by is not None:
            return False
        return self.train is True or not self._is_good(untrained, score, start)

    def _expanded(self, name: str, value: object) -> BaseEstimator | None:
        is_open = isinstance(value, str) and value == "auto"
        return super()._expanded(name, self._training.get(name, value) if is_open else value)

    def __repr__(self, N_CHAR_MAX: int = 700) -> str:
        made = f"  # fitted by {self.fitted_by_}" if hasattr(self, "fitted_by_") else ""
        return super().__repr__(N_CHAR_MAX) + made

    def _fit(self, score_fn: Score, generator: torch.Generator, tell: Tell | None) -> Fit:
        score = self._checked_score(score_fn)
        with saved_fit(self, score_fn, generator, self._points_near_target()) as saved:
            start = saved.start or self._start(score_fn, generator)
            score, warp = start.whitening.seen(score), start.whitening.warp

            def in_x(fit: Fit) -> Fit:
                return fit if warp is None else fit._replace(sampler=Warped(fit.sampler, warp))

            show = None if tell is None else lambda fit: tell(in_x(fit))
            untrained = self._untrained(score, start)
            if untrained is None or saved.start or self._is_to_train(untrained, score, start):
                try:
                    fit = self._trained(saved, score, start, generator, show)
                    fit = fit if keeps_last(self.early_stopping) else better(fit, untrained)
                except SpentError:  # before the first iteration
                    fit = self._as_started(score, start)
            else:
                fit = untrained
            fit = in_x(fit._replace(report={"score_checksum_": start.answers, **fit.report}))
            remove = fit.ended_by is None and not score.tally.is_spent
            return fit._replace(finish=lambda: saved.finish(remove=remove))

    def _trained(
        self,
        saved: NoCheckpoint,
        score: Score,
        start: Start[F],
        generator: torch.Generator,
        tell: Tell | None,
    ) -> Fit:
        """Return the fit of a training."""
        family = copy.deepcopy(start.family)
        sampler_of = self._sampler_of(score, start)
        judge = Judge(score, start.whitening.map, start.seed)
        watch = self._watch(judge, start, sampler_of(family), family)
        if self._follows_path and start.memory is None:
            start = start._replace(memory=Memory.empty(next(family.parameters()).detach()))
        score_u = pulled_back(score, start.whitening.map, generator)
        objective = self._objective(score_u, family, start, generator)
        if score_u.rewind is not None:
            n_done = 0 if saved.state is None else len(saved.state["losses"])
            score_u.rewind(2 * n_done)  # one for each half of the draws
        job = Job(objective, family, generator, sampler_of, tell, score.tally)
        with score.tally.reserving(N_RESERVED):
            hooks = [*self._ends(score, start, sampler_of), *saved.hooks(start, watch)]
            fit = self._train_from(job, watch, hooks, saved.state)
        at_start, at_end = sampler_of(start.family.requires_grad_(False)), sampler_of(family)
        several = len(start.whitening.modes) > 1  # far apart, where Stein's identities are noisy
        n_before, last = len(self.loss_curve_) if self._continues() else 0, keeps_last(self.early_stopping)
        fit = until_interrupted(
            fit,
            lambda fit: fit if several or last else not_worse(fit, judge, at_start, at_end, n_before),
            lambda fit: fit if last else self._recentred(fit, score, start.seed),
            lambda fit: certified(fit, score, start.seed, self.batch_size),
        )
        is_start = fit.report["best_iter_"] == n_before != fit.report["n_iter_"]
        made = self._maker(start) if is_start else PATH if self._follows_path else KSD
        return fit._replace(report={**fit.report, "fitted_by_": made})

    def _maker(self, start: Start[F]) -> str:
        """Return what has made a start."""
        return self.fitted_by_ if self._continues() else start.whitening.found_by

    def _ends(self, score: Score, start: Start[F], sampler_of: Callable[[F], InU]) -> list[Hook]:
        """Return the hook that stops a training early, if there is one."""
        ends = self.early_stopping == "auto" and self._is_plain and self._follows_path
        return [WhenGood(sampler_of, score, start.seed)] if ends and not self._is_noisy(score) else []

    @property
    def _is_plain(self) -> bool:
        """Whether the objective is the distance from the target alone."""
        return getattr(self, "annealing", None) is None and not getattr(self, "terms", ())

    def _untrained(self, score: Score, start: Start[F]) -> Fit | None:
        """Return a fit that draws from its start, with its certificate; None if nothing is known of the start."""
        if self.train is not False and not score.tally.is_spent:
            goes_on = self._continues() and start.answers == self.score_checksum_
            unasked = self.train is True and keeps_last(self.early_stopping)
            if goes_on or unasked or not self._is_at_pilot(start):
                return None
        fit = self._as_started(score, start)
        return until_interrupted(fit, lambda fit: certified(fit, score, start.seed, self.batch_size))

    def _is_good(self, fit: Fit, score: Score, start: Start[F]) -> bool:
        """Tell whether a fit that draws from its start is good enough, or cannot be told from one that is.

        The certificate decides. If there is none, as between modes of a target known by its score, or if it cannot be
        trusted, as in many dimensions, the chains must have converged or, with many features, have small errors. With
        more features than a certificate allows, no training follows, because its success could not be checked. The
        chains tell nothing of a hierarchy, whose layers move their points.
        """
        found, chains = fit.report["certificate_"], pilot_of(self.whiten)
        if is_certified(fit) or not isinstance(fit.sampler, Layer):
            return is_certified(fit)
        if chains is not None and chains.effort == "low":
            return True
        d, whitening = score.n_features, start.whitening
        undecided = not isinstance(found, Certificate) or (not found.trusted and d >= MANY_FEATURES)
        is_known = are_known(d, converged=whitening.converged, error=whitening.error)
        return undecided and (is_known or d > MAX_FEATURES)

    def _as_started(self, score: Score, start: Start[F]) -> Fit:
        """Return a fit that draws from its start."""
        sampler = self._sampler_of(score, start)(copy.deepcopy(start.family).requires_grad_(False))
        report = untrained() | {"fitted_by_": self._maker(start)}
        if self._continues():
            n = len(self.loss_curve_)
            report |= {"loss_curve_": self.loss_curve_, "ksd_curve_": self.ksd_curve_, "n_iter_": n, "best_iter_": n}
        return Fit(sampler, report)

    def _check_parameters(self, n_features: int) -> None:
        super()._check_parameters(n_features)
        kernel = self._kernel_in_u(n_features)
        _warn_of_train(self, vars(self)["_is_set"])
        if self.gradient_estimator == "path" and not averages(kernel):
            raise ValueError(
                "`gradient_estimator` is 'path', which needs a positive kernel of Euclidean distances, but `kernel` "
                f"is {kernel!r}; change it, or set gradient_estimator='u-statistic'."
            )
        plateau_of(self.early_stopping)
        check_checkpoint(self)
        if self._continues() and self.n_features_in_ != n_features:
            raise ValueError(
                f"`warm_start` continues a fit of {self.n_features_in_} features, but the target has {n_features}; "
                "set warm_start=False."
            )

    def _check_mixing(self, latent_dim: int, n_features: int, needed: str = "") -> None:
        """Raise unless z can be drawn; a pilot, if there is one, provides points, and nothing else is `needed`."""
        check_mixing(self.mixing, latent_dim)
        chains = pilot_of(self.whiten)
        has_pilot = chains is not None and (chains.rule == "diagonal" or n_features <= MAX_FEATURES)
        if isinstance(self.mixing, str) and self.mixing == "pilot" and (needed or not has_pilot):
            raise ValueError(
                f"`mixing` is 'pilot', which needs {needed}whiten='diagonal' or, up to {MAX_FEATURES} features, "
                "'auto'; change it, or set mixing='normal'."
            )

    @abstractmethod
    def _checked_score(self, score_fn: Score) -> Score:
        """Return the score of the training; raise if it does not suit the parameters."""

    @abstractmethod
    def _build(
        self, score_fn: Score, whitening: Whitening, pilot: PilotPoints | None, generator: torch.Generator
    ) -> tuple[F, MomentPenalty | None]:
        """Return a new family and the penalty that ties it to the pilot."""

    @abstractmethod
    def _sampler_of(self, score: Score, start: Start[F]) -> Callable[[F], InU]:
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

    def _start(self, score_fn: Score, generator: torch.Generator) -> Start[F]:
        """Return the start of the training."""
        if not self._continues():
            return self._built(score_fn, *self._find_whitening(score_fn, generator), generator)
        family = copy.deepcopy(self.family_).to(score_fn.device, score_fn.dtype).requires_grad_()
        family.mixing = copy.deepcopy(self.family_.mixing).to(score_fn.device)  # a deep copy keeps its precision
        whitening = self.whitening_.to(score_fn.device)
        seen = whitening.seen(score_fn)
        start = Start(whitening, family, None, generator.initial_seed(), of_score_near(seen, whitening))
        if start.answers == self.score_checksum_ or self._is_near(start, seen):
            return start
        return self._moved(start, score_fn, generator)

    def _find_whitening(
        self, score_fn: Score, generator: torch.Generator, init: Init = None
    ) -> tuple[Whitening, PilotPoints | None]:
        """Return coordinates; without a pilot they are first moved to the target.

        A network learns best in units of the target. With several modes a Gaussian would lose some.
        """
        with score_fn.tally.reserving(N_RESERVED):
            whitening, pilot = super()._find_whitening(score_fn, generator, init)
            if pilot is not None or not (isinstance(whitening.map, Affine) and self._adjusts(score_fn)):
                return whitening, pilot
            before = score_fn.tally.total
            try:
                map_ = _brought_to_target(whitening.map, score_fn.double, generator)
            except (*LOST, SpentError):
                return whitening, pilot
            n_calls = whitening.n_score_calls + score_fn.tally.total - before
            found_by = whitening.found_by if map_ is whitening.map else MATCHED
            return replace(whitening, map=map_, n_score_calls=n_calls, found_by=found_by), pilot

    def _adjusts(self, score_fn: Score) -> bool:
        """Tell whether the coordinates may be moved to the target, which needs scores of all of the data.

        With too many features there are too few draws for it.
        """
        few = score_fn.n_features <= MOST_FEATURES
        return few and self.train is not False and not self._is_noisy(score_fn)

    def _built(
        self, score_fn: Score, whitening: Whitening, pilot: PilotPoints | None, generator: torch.Generator
    ) -> Start[F]:
        """Return a start with a new family."""
        score = whitening.seen(score_fn)
        family, penalty = self._build(score, whitening, pilot, generator)
        return Start(whitening, family, penalty, generator.initial_seed(), of_score_near(score, whitening))

    def _moved(self, start: Start[F], score_fn: Score, generator: torch.Generator) -> Start[F]:
        """Return the start of a training whose target has moved: coordinates found from draws of the last fit.

        A fit that started at points of a pilot does so again, because a mixture has no parameters that could follow;
        and a family of warped coordinates is of no use in others.
        """
        if not isinstance(self.whiten, str | Pilot):
            return start
        x = self._draws(start, score_fn)[:N_FOLLOWED].double()
        x = x if start.whitening.warp is None else start.whitening.warp.unwarp(x)[0]
        near = as_array(x[score_fn.double(x).isfinite().all(1)])
        whitening, pilot = self._find_whitening(score_fn, generator, near if len(near) else None)
        if self._is_at_pilot(start) or whitening.warp is not None or start.whitening.warp is not None:
            return self._built(score_fn, whitening, pilot, generator)
        return start._replace(whitening=whitening, answers=of_score_near(score_fn, whitening))

    @torch.no_grad()
    def _is_near(self, start: Start[F], score_fn: Score) -> bool:
        """Tell whether the draws of a start may be from a target, by Stein's identities."""
        x = self._draws(start, score_fn).double()
        s = score_fn.double(x)
        return bool(s.isfinite().all()) and agree(x, s)

    @torch.no_grad()
    def _draws(self, start: Start[F], score_fn: Score) -> Tensor:
        """Return the draws with which a start is checked."""
        noise = torch.Generator(score_fn.device).manual_seed(start.seed)
        return self._sampler_of(score_fn, start)(start.family).sample(N_MONITOR_DRAWS, noise)

    def _continues(self) -> bool:
        """Tell whether a fit continues the last one."""
        return self.warm_start and hasattr(self, "family_")

    def _takes_points(self) -> bool:
        """Tell whether a family would start at the points of a pilot, if there are any."""
        return isinstance(self.mixing, str) and self.mixing in ("auto", "pilot")

    def _is_at_pilot(self, start: Start[F]) -> bool:
        """Tell whether a family has started at the points of a pilot."""
        of_points = isinstance(start.family.mixing, Bootstrap | GaussianMixtureDraws)
        return of_points and start.whitening.mean is not None and self._takes_points()

    def _pilot_weight(self, pilot: PilotPoints) -> float:
        """Return the weight of the penalty that ties a fit to its pilot, zero for none."""
        chains = pilot_of(self.whiten)
        return chains.weight if chains is not None and pilot.converged else 0.0

    # The objective

    @property
    def _follows_path(self) -> bool:
        """Whether the training descends KL(q || p) along the kernelised path gradient."""
        return self.gradient_estimator == "path"

    @property
    def _pairs(self) -> GradientEstimator:
        """The estimator of the discrepancy, which also identifies a kernel."""
        return GRADIENT_ESTIMATORS.get(self.gradient_estimator, GRADIENT_ESTIMATORS["u-statistic"])

    def _kernel_in_u(self, d: int) -> Kernel:
        """Return the kernel, with its own rule for the width unless one is given."""
        return resolve_kernel(self.kernel, None if self.bandwidth == "auto" else self.bandwidth)

    def _discrepancy(
        self,
        score_u: DifferentiableScore,
        family: Family,
        memory: Memory | None,
        generator: torch.Generator,
        *,
        terms: Sequence[Steering] = (),
        schedules: Sequence[Scheduled] = (),
        weights: Sequence[float] | None = None,
    ) -> Objective:
        """Return the sum over layers, with weights, of the discrepancies and of the further terms."""
        beta = None if weights is None else next(family.parameters()).new_tensor(weights)
        if memory is not None and not getattr(family, "through", False):
            score_u = WithoutProducts(score_u)
        if memory is None:
            n_draws, gradients = self._ksd(score_u, family.n_features)
        else:
            n_draws, gradients = self.batch_size, self._kl(memory, family.n_features)

        def gradient_fn() -> Tensor:
            drawn, pull = family.draw_with_pullback(n_draws, generator, score_u)
            value, dx, ds, dc = gradients(drawn)
            for term in terms:
                dx.add_(term.gradient(drawn.x, drawn.target_score))
            if beta is not None:
                value = beta @ value
                dx, ds, dc = (gradient * beta[:, None, None] for gradient in (dx, ds, dc))
            pull(dx, ds, dc)
            return value

        return Objective(gradient_fn, schedules)

    def _ksd(self, score_u: DifferentiableScore, d: int) -> tuple[int, Gradients]:
        """Return the number of draws, and the estimate of KSD^2 with its gradients in draws and scores."""
        kernel, estimator = self._kernel_in_u(d), self._pairs
        n_draws = estimator.n_batches * self.batch_size
        if isinstance(score_u, Halves):  # pairs within a half are biased
            estimator, n_draws = GRADIENT_ESTIMATORS["vanilla"], n_draws + n_draws % 2

        def gradients(drawn: Drawn) -> tuple[Tensor, ...]:
            ksd, dx, df = value_and_gradients(
                drawn.x, drawn.target_score - drawn.conditional_score, kernel, estimator
            )
            return ksd, dx, df, -df

        return n_draws, gradients

    def _kl(self, memory: Memory, d: int) -> Gradients:
        """Return the rate at which KL(q || p) falls along the kernelised path gradient, and that gradient."""
        kernel = self._kernel_in_u(d)
        adapts = self.bandwidth == "auto" and isinstance(self.kernel, str)

        def gradients(drawn: Drawn) -> tuple[Tensor, ...]:
            x, s, zero = drawn.x, shortened(drawn.target_score), torch.zeros_like(drawn.x)
            if not len(memory.x):
                memory.begin(x, s)
            v = velocity(x, memory, kernel, memory.squared_width() if adapts else None)
            memory.add(x, s)
            rate = (v * (s - drawn.conditional_score)).sum(-1).mean(-1)
            return rate, -v / x.shape[-2], zero, zero

        return gradients

    # The result

    def _watch(self, judge: Judge, start: Start[F], sampler: InU, family: F) -> Watch | None:
        """Return the rule for comparing states, None if they are not compared."""
        score, stopping, guards = judge.score, plateau_of(self.early_stopping), self._guards(start)
        if guards and self._continues():  # a target that has moved must be followed
            guards = self._is_near(start, score)
        noisy = self._is_noisy(score)
        if keeps_last(self.early_stopping) or (stopping is None and not guards and not noisy):
            return None
        found = watch_of(judge, sampler, stopping, guards=guards, noisy=noisy)
        if guards or noisy:
            found.look(family, 0)
        return found

    def _is_noisy(self, score: Score) -> bool:
        """Tell whether the training uses minibatches."""
        return self._sees_minibatches and score.minibatch is not None

    def _train_from(self, job: Job[F], watch: Watch | None, saving: Sequence[Hook], resume: State | None) -> Fit:
        """Minimise; return the result, or raise the error that ended it if there is nothing to keep."""
        if watch is not None and resume is not None:
            watch.resume(resume)
        run = self._minimise(
            job,
            before=[] if watch is None else [watch],
            after=saving,
            keeping=BaseException if self.warm_start else KEEPING,
            resume=resume,
        )
        losses, monitored = np.empty(0), np.empty((0, 2))
        if self._continues():
            losses, monitored = self.loss_curve_, self.ksd_curve_
        looks = np.array([] if watch is None else watch.values).reshape(-1, 2)
        n_iter = len(losses) + len(run.losses)
        best_iter = n_iter if watch is None else len(losses) + watch.restore(job.family)
        report = {
            "loss_curve_": np.concatenate([losses, run.losses]),
            "ksd_curve_": np.concatenate([monitored, looks + np.array([len(losses), 0])]),
            "engine_": run.engine,
            "n_iter_": n_iter,
            "best_iter_": best_iter,
            "certificate_": None,
        }
        remark = None if watch is None else remark_of(watch, best_iter, len(losses))
        ended_by = None if isinstance(run.ended_by, SpentError) else run.ended_by
        return Fit(job.sampler_of(job.family), report, ended_by, remark)

    def _recentred(self, fit: Fit, score: Score, seed: int) -> Fit:
        """Return a fit that kept its last state with its mean corrected, if that is possible and better."""
        was_kept = fit.ended_by is None and fit.report["best_iter_"] == fit.report["n_iter_"]
        if not (was_kept and self._adjusts(score)):
            return fit
        moved = recentred(fit.sampler, score.double, seed)
        if moved is None:
            return fit
        answers = of_score_near(score, moved.whitening)
        return fit._replace(sampler=moved, report={**fit.report, "score_checksum_": answers})

    def _conclude(self, fit: Fit, score_fn: Score, generator: torch.Generator) -> None:
        if fit.finish is not None:
            fit.finish()
        super()._conclude(fit, score_fn, generator)


def descends_kl(est: SteinTrained) -> bool:
    """Tell whether the training of an estimator descends KL(q || p), and not the discrepancy."""
    return est._resolved()._follows_path  # noqa: SLF001


def set_parameters(est: BaseEstimator, names: Iterable[str]) -> list[str]:
    """Return those of some parameters that are set, to whatever value."""
    defaults = {name: parameter.default for name, parameter in signature(type(est)).parameters.items()}
    return [name for name in names if not is_default(getattr(est, name), defaults[name])]


def is_default(value: object, default: object) -> bool:
    """Tell whether a parameter has its default value, "auto" or None."""
    return value is default or (isinstance(value, str) and value == default)


def _warn_of_train(est: SteinTrained, is_set: list[str]) -> None:
    """Warn of parameters that contradict `train`."""
    chains = pilot_of(est.whiten)
    ignored = [name for name in is_set if name not in OF_START]
    if est.train is False and ignored:
        warn_caller(
            f"`train` is False, so {', '.join(f'`{name}`' for name in ignored)} will be ignored; leave "
            f"{'it' if len(ignored) == 1 else 'them'} out, or set train=True."
        )
    elif est.train is True and chains is not None and chains.effort == "low":
        why = f"{', '.join(f'`{name}`' for name in is_set)} {'is' if len(is_set) == 1 else 'are'} set"
        warn_caller(
            f"The fit is trained, since {why if is_set else '`train` is True'}, although the `effort` of Pilot is "
            "'low', which is meant for fits without training; set train=False, or another `effort`."
        )


def _brought_to_target(map_: Affine, score: Score, generator: torch.Generator) -> Affine:
    """Return the Gaussian that is fitted from a map to a target of one mode; the map itself where that fails."""
    modes = find_modes(score, map_.m[None], generator).maps
    if len(modes) > 1 or len(all_modes(score, map_.m, modes[0], generator).maps) > 1:
        return map_
    last, found = None, map_
    for _ in range(N_MATCHED):
        if found is last:  # it is good enough, or improves no more
            break
        last, found = found, matched(score, found, generator)
    return found if is_close(found, map_) else map_
