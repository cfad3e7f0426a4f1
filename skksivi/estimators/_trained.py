"""What the approximators share that train a family, from where they start to what they tell at the end."""

from __future__ import annotations

import copy
import math
import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import clone
from torch import Tensor, nn

from skksivi._saved import COUNT, CURVE, Parts, is_instance
from skksivi.annealing import Linear
from skksivi.base import LOSSES, BaseApproximator, Constraints, Integral, Interval, Real, StrOptions
from skksivi.estimators._verdict import concluded
from skksivi.families._layer import Family
from skksivi.families._samplers import Fit, InU, Sampler, Tell
from skksivi.kernels import Kernel, resolve_kernel
from skksivi.mixing import MixingLike
from skksivi.parameters import (
    SHORTHANDS,
    Adam,
    Annealing,
    Checkpoint,
    EarlyStopping,
    Init,
    Pilot,
    Scale,
    Whiten,
    checked_object,
)
from skksivi.pilot._chains import PilotPoints
from skksivi.pilot._rules import MAX_POINTS, RULES, Whitening, find_whitening, points_near_target, pulled_back
from skksivi.score._score import DifferentiableScore, Halves, Score
from skksivi.stein._discrepancy import FixedKernelKSD
from skksivi.stein._estimators import GRADIENT_ESTIMATORS, GradientEstimator
from skksivi.stein._fused import value_and_gradients
from skksivi.stein._moments import Departure, MomentPenalty, Steering, departure
from skksivi.training._checkpoint import CheckpointFile, settings_of
from skksivi.training._hooks import Report, Saving, Watch
from skksivi.training._loop import CHECK_EVERY, Hook, Objective, Run, Scheduled, State, minimise

#: Draws whose moments are compared with the start's, and those of them whose discrepancy is computed.
N_MONITOR_DRAWS, N_JUDGED_DRAWS = 4000, 1000

#: Iterations between two comparisons.
LOOK_EVERY = 500

#: What may end a training that leaves the estimator fitted, in the state that was reached.
KEEPING = (KeyboardInterrupt, FloatingPointError)

#: Largest latent dimension chosen by default.
MAX_LATENT_DIM = 100

#: Width of a kernel in whitened coordinates, in units of the square root of the dimension.
WHITENED_BANDWIDTH = 0.5


#: What KSIVI and HKSIVI have learned beside what they draw from.
STEIN_TRAINED: Parts = {
    **LOSSES,
    "ksd_curve_": (CURVE, "mp"),
    "best_iter_": (COUNT, ""),
    "engine_": (is_instance(str), ""),
}


F = TypeVar("F", bound=nn.Module)


class Start(NamedTuple, Generic[F]):
    """Where a training starts: coordinates, a family in them, what ties it to a pilot, and the seed of its noise."""

    whitening: Whitening
    family: F
    penalty: MomentPenalty | None
    seed: int

    def state(self) -> dict[str, object]:
        """Return the fields by name, as a checkpoint keeps them."""
        return self._asdict()


class Job(NamedTuple, Generic[F]):
    """A training: what is minimised over a family, and what a state of it draws from, which callbacks are told."""

    objective: Objective
    family: F
    generator: torch.Generator
    sampler_of: Callable[[F], Sampler]
    tell: Tell | None


class Trained(BaseApproximator):
    """Base of the approximators that train a family."""

    _parameter_constraints: ClassVar[Constraints] = {
        "hidden_layer_sizes": ["array-like"],
        "initial_scale": [Interval(Real, 0, None, closed="neither")],
        "scale": [StrOptions({"constant"}), Scale],
        "whiten": [StrOptions(set(RULES)), Pilot, "array-like", None],
        "init": ["array-like", None],
        "batch_size": [Interval(Integral, 2, None, closed="left")],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "learning_rate": [Interval(Real, 0, None, closed="neither")],
        "optimizer": [StrOptions({"adam"}), Adam],
        "verbose": [Interval(Integral, 0, None, closed="left")],
    }

    hidden_layer_sizes: Sequence[int]
    scale: str | Scale
    whiten: Whiten
    init: Init
    batch_size: int
    max_iter: int
    learning_rate: float
    optimizer: str | Adam
    verbose: int
    whitening_: Whitening
    loss_curve_: np.ndarray
    n_iter_: int

    #: What `optimizer="adam"` means.
    _adam: ClassVar[Adam] = Adam()

    def set_params(self, **params: object) -> Self:
        """Set parameters, also those of a parameter object that is given by its shorthand.

        Parameters
        ----------
        **params : dict
            As those of scikit-learn's estimators, such as ``whiten__budget=100_000`` where `whiten` is "auto".

        Returns
        -------
        self : object
        """
        nested = {name: value for name, value in params.items() if "__" in name}
        super().set_params(**{name: value for name, value in params.items() if name not in nested})
        for name in {name.partition("__")[0] for name in nested}:
            setattr(self, name, self._expanded(name))
        return super().set_params(**nested)

    def _expanded(self, name: str) -> object:
        """Return the object that a parameter abbreviates, itself if it does not."""
        value = getattr(self, name, None)
        if name == "optimizer" and isinstance(value, str):
            return clone(self._adam)
        if name == "kernel" and isinstance(value, str):
            return resolve_kernel(value)
        return (
            SHORTHANDS[name](value) if name in SHORTHANDS and isinstance(value, str | Real | os.PathLike) else value
        )

    @property
    def _steps(self) -> Adam:
        """How steps are taken."""
        return self._adam if isinstance(self.optimizer, str) else self.optimizer

    @property
    def _floor(self) -> float:
        """The floor of sigma."""
        return checked_object(Scale, self.scale).floor

    def _points_near_target(self) -> ArrayLike | None:
        return points_near_target(self.whiten, self.init)

    def _n_reports(self) -> int:
        return -(-self.max_iter // CHECK_EVERY)

    def _check_parameters(self) -> None:
        """Check what scikit-learn's parameter constraints cannot express."""
        widths: Sequence[object] = self.hidden_layer_sizes
        if not all(isinstance(n, Integral) and int(n) >= 1 for n in widths):
            raise ValueError(f"`hidden_layer_sizes` must hold positive integers, got {self.hidden_layer_sizes!r}.")
        self._steps.check()
        scale = checked_object(Scale, self.scale)
        start = getattr(self, "initial_scale", None)
        if isinstance(start, Real) and float(start) <= scale.floor:
            raise ValueError(f"`initial_scale` must exceed the floor of `scale`, got {start!r} and {scale.floor!r}.")
        if scale.form == "network" and not any(
            isinstance(allowed, StrOptions) and "network" in allowed.options
            for allowed in self._parameter_constraints["scale"]
        ):
            raise ValueError(f"`scale` of {type(self).__name__} cannot be a network; use 'constant'.")
        if isinstance(self.whiten, Pilot):
            self.whiten.check()

    def _find_whitening(self, score_fn: Score, generator: torch.Generator) -> tuple[Whitening, PilotPoints | None]:
        """Return the coordinates of the training, and the pilot where the rule makes one."""
        return find_whitening(self.whiten, score_fn, generator, init=self.init)

    def _minimise(
        self,
        job: Job[F],
        *,
        before: Sequence[Hook] = (),
        after: Sequence[Hook] = (),
        keeping: type[BaseException] | tuple[type[BaseException], ...] = KEEPING,
        resume: State | None = None,
    ) -> Run:
        """Train the family, with hooks before and after the report; raise what ends it and leaves nothing to keep."""
        tell = job.tell
        show = None if tell is None else lambda family: tell(Fit(job.sampler_of(family), {}))
        report = [Report(self.max_iter, self.verbose, show)] if show or self.verbose else []
        run = minimise(
            job.objective,
            job.family,
            self._steps,
            job.generator,
            learning_rate=self.learning_rate,
            max_iter=self.max_iter,
            hooks=[*before, *report, *after],
            resume=resume,
        )
        if not (run.ended_by is None or isinstance(run.ended_by, keeping)):
            raise run.ended_by
        job.family.requires_grad_(False)
        return run

    def _train(self, job: Job[F]) -> Fit:
        """Minimise from here to the end; return what was learned."""
        run = self._minimise(job)
        report = {"loss_curve_": run.losses.astype(np.float64), "n_iter_": len(run.losses)}
        return Fit(job.sampler_of(job.family), report, run.ended_by)

    def _conclude(self, fit: Fit, score_fn: Score, generator: torch.Generator) -> BaseException | None:
        return concluded(fit, score_fn.on_all_data(), generator)


class SteinTrained(Trained, Generic[F]):
    """Base of KSIVI and HKSIVI, which minimise the kernel Stein discrepancy."""

    _parameter_constraints: ClassVar[Constraints] = {
        "kernel": [str, Kernel],
        "bandwidth": [Interval(Real, 0, None, closed="neither"), StrOptions({"auto", "median"}), None],
        "gradient_estimator": [StrOptions(set(GRADIENT_ESTIMATORS))],
        "annealing": [StrOptions({"linear"}), callable, None],
        "early_stopping": [Interval(Real, 0, None, closed="left"), EarlyStopping, None],
        "checkpoint": [str, os.PathLike, Checkpoint, None],
        "warm_start": ["boolean"],
    }

    kernel: str | Kernel
    bandwidth: float | str | None
    gradient_estimator: str
    mixing: MixingLike
    early_stopping: float | EarlyStopping | None
    checkpoint: str | os.PathLike[str] | Checkpoint | None
    warm_start: bool
    ksd_curve_: np.ndarray
    family_: F

    def _fit(self, score_fn: Score, generator: torch.Generator, tell: Tell | None) -> Fit:
        self._check_parameters()
        score = self._checked_score(score_fn)
        file = self._open_checkpoint(score_fn)
        start, resume = self._start(score_fn, generator, file)
        family = copy.deepcopy(start.family)
        sampler_of = self._sampler_of(score, start)
        watch = self._watch(score, start, sampler_of, family)
        objective = self._objective(
            pulled_back(score, start.whitening.map, generator), family, start.penalty, generator
        )
        return self._train_from(start, Job(objective, family, generator, sampler_of, tell), watch, file, resume)

    @abstractmethod
    def _checked_score(self, score_fn: Score) -> Score:
        """Return the score of the training, if it fits the parameters."""

    @abstractmethod
    def _build(
        self, score_fn: Score, whitening: Whitening, pilot: PilotPoints | None, generator: torch.Generator
    ) -> tuple[F, MomentPenalty | None]:
        """Return a new family and what ties it to the pilot."""

    @abstractmethod
    def _sampler_of(self, score: Score, start: Start[F]) -> Callable[[F], InU]:
        """Return the map of a family to what draws by it."""

    @abstractmethod
    def _guards(self, start: Start[F]) -> bool:
        """Tell whether the states of the training are to stay near the start."""

    @abstractmethod
    def _objective(
        self, score_u: DifferentiableScore, family: F, penalty: MomentPenalty | None, generator: torch.Generator
    ) -> Objective:
        """Return what is minimised."""

    # Where a fit starts

    def _start(
        self, score_fn: Score, generator: torch.Generator, file: CheckpointFile | None
    ) -> tuple[Start[F], State | None]:
        """Return where the training starts and, from a checkpoint, the state in which it goes on."""
        if file is not None and file.found is not None:
            start = Start(*(file.found[name] for name in Start.__annotations__))
            generator.manual_seed(start.seed)
            return start, file.found["state"]
        seed = generator.initial_seed()
        if not self._continues():
            whitening, pilot = self._find_whitening(score_fn, generator)
            return Start(whitening, *self._build(score_fn, whitening, pilot, generator), seed), None
        if self.n_features_in_ != score_fn.n_features:
            raise ValueError(
                f"`warm_start` continues a fit of {self.n_features_in_} features, but the target has "
                f"{score_fn.n_features}; set warm_start=False."
            )
        family = copy.deepcopy(self.family_).to(score_fn.device, score_fn.dtype).requires_grad_()
        family.mixing = copy.deepcopy(self.family_.mixing).to(score_fn.device)  # which keeps its precision
        return Start(self.whitening_.to(score_fn.device), family, None, seed), None

    def _continues(self) -> bool:
        """Tell whether a fit goes on from the last one."""
        return self.warm_start and hasattr(self, "family_")

    def _open_checkpoint(self, score_fn: Score) -> CheckpointFile | None:
        """Return where a fit is saved, its parameters and the score at two points being the mark of it."""
        if self.checkpoint is None:
            return None
        checkpoint = checked_object(Checkpoint, self.checkpoint)
        if self.warm_start:
            raise ValueError("`checkpoint` continues a fit by itself; set warm_start=False.")
        if callable(self.mixing):
            raise ValueError(
                "`checkpoint` cannot keep a function given as `mixing`; use an object of skksivi.mixing."
            )
        return CheckpointFile(checkpoint.path, settings_of(self.get_params(), score_fn), score_fn.device)

    # What is minimised

    def _kernel_in_u(self, d: int) -> Kernel:
        """Return the kernel; "auto" is a fixed width in whitened coordinates, else the kernel's own rule."""
        if self.bandwidth != "auto":
            return resolve_kernel(self.kernel, self.bandwidth)
        fixed = isinstance(self.kernel, str) and self.whiten is not None
        return resolve_kernel(self.kernel, WHITENED_BANDWIDTH * math.sqrt(d) if fixed else None)

    def _ksd(
        self,
        score_u: DifferentiableScore,
        family: Family,
        generator: torch.Generator,
        *,
        terms: Sequence[Steering] = (),
        schedules: Sequence[Scheduled] = (),
        weights: Sequence[float] | None = None,
    ) -> Objective:
        """Return the sum over layers, with weights, of the estimates of KSD^2 and of the terms beside them."""
        kernel = self._kernel_in_u(family.n_features)
        estimator, n_draws = self._estimator(score_u)
        beta = None if weights is None else next(family.parameters()).new_tensor(weights)

        def gradient_fn() -> Tensor:
            (x, s_p, s_q), pull = family.draw_with_pullback(n_draws, generator, score_u)
            ksd, dx, df = value_and_gradients(x, s_p - s_q, kernel, estimator)
            for term in terms:
                dx.add_(term.gradient(x, s_p))
            if beta is not None:
                ksd = beta @ ksd
                dx, df = (gradient.mul_(beta[:, None, None]) for gradient in (dx, df))
            pull(dx, df, -df)
            return ksd

        return Objective(gradient_fn, schedules)

    def _estimator(self, score_u: DifferentiableScore) -> tuple[GradientEstimator, int]:
        """Return the estimator of the discrepancy and the number of draws that it takes."""
        estimator = GRADIENT_ESTIMATORS[self.gradient_estimator]
        n = estimator.n_batches * self.batch_size
        if isinstance(score_u, Halves):  # whose pairs within a half are biased
            return GRADIENT_ESTIMATORS["vanilla"], n + n % 2
        return estimator, n

    # What becomes of it

    def _watch(self, score: Score, start: Start[F], sampler_of: Callable[[F], InU], family: F) -> Watch | None:
        """Return the rule by which states are compared, every one by draws from the same noise.

        A guarded state is kept if it has the smallest discrepancy of those whose moments stay near those that the
        start has, or its base where that is at the target.
        """
        tol, guards = self.early_stopping, self._guards(start)
        stopping = None if tol is None else checked_object(EarlyStopping, tol)
        if stopping is None and not guards:
            return None
        map_ = start.whitening.map
        judge = FixedKernelKSD(score.double, score.n_features, score.device, map_)

        def noise() -> torch.Generator:
            return torch.Generator(score.device).manual_seed(start.seed)

        sampler = sampler_of(family)  # which follows the family through its training
        with torch.no_grad():
            reference = sampler.reference_in_u(N_MONITOR_DRAWS, noise())

        @torch.no_grad()
        def look(_: nn.Module) -> tuple[float, Departure]:
            u = sampler.sample_in_u(N_MONITOR_DRAWS, noise())
            try:
                value = judge(map_.unwhiten(u[:N_JUDGED_DRAWS]))
            except ValueError:  # the score is not finite there
                value = math.inf
            return value, departure(u, reference)

        watch = Watch(look, stopping, every=LOOK_EVERY, keeps_best=guards)
        if guards:
            watch.look(family, 0)
        return watch

    def _train_from(
        self,
        start: Start[F],
        job: Job[F],
        watch: Watch | None,
        file: CheckpointFile | None,
        resume: State | None,
    ) -> Fit:
        """Minimise; return what was learned, unless what ended it leaves nothing to keep."""
        if watch is not None and resume is not None:
            watch.resume(resume["watch"])
        saving = [] if file is None else [Saving(file, start.state(), watch, self._save_every())]
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
        }
        remark = None if watch is None else _remark(watch, best_iter)
        return Fit(job.sampler_of(job.family), report, run.ended_by, remark)

    def _save_every(self) -> int:
        """Return the iterations from one checkpoint to the next."""
        return checked_object(Checkpoint, self.checkpoint).every

    def _conclude(self, fit: Fit, score_fn: Score, generator: torch.Generator) -> BaseException | None:
        if self.checkpoint is not None and fit.ended_by is None:
            Path(checked_object(Checkpoint, self.checkpoint).path).unlink(missing_ok=True)
        return super()._conclude(fit, score_fn, generator)


def temperature(annealing: Annealing, like: Tensor) -> Scheduled:
    """Return the inverse temperature that multiplies the score, one without `annealing`."""
    schedule = 1.0 if annealing is None else Linear() if isinstance(annealing, str) else annealing
    return Scheduled("annealing", schedule, like, positive=True)


def _remark(watch: Watch, best_iter: int) -> str | None:
    """Say that a guarded training ended too far from its start, None if it did not."""
    last = watch.last
    if not watch.keeps_best or not isinstance(last, Departure) or last.accepted:
        return None
    worst = int(last.excess.argmax())
    return (
        f"The training ended with coordinate {worst} of the whitened draws at {last.sd_ratio[worst]:.2f} times its "
        f"standard deviation and its third moment changed by {last.third[worst]:+.2f}; the state of iteration "
        f"{best_iter} is kept. Raise the `weight` of the Pilot or `batch_size`, or lower `learning_rate`."
    )


def langevin_scale(
    initial_scale: float, min_scale: float, score_fn: Score, whitening: Whitening, pilot: PilotPoints | None
) -> Tensor:
    r"""Return the sigma_ini of a hierarchy, shape (d,).

    Its unit is that of u or, with a pilot, the width of the narrowest mode or, if less, that of a coordinate while
    the others stand still, :math:`1 / \sqrt{E s_i^2}`: longer Langevin steps would not be stable.
    """
    d = score_fn.n_features
    sigma = torch.full((d,), float(initial_scale), dtype=score_fn.dtype, device=score_fn.device)
    if pilot is None:
        return sigma
    width = pilot.whitened(whitening.map, score_fn.dtype).thinned(MAX_POINTS // d).width_within()
    stiff = pilot.conditional_sd(score_fn.double, whitening.map).to(sigma)
    return (sigma * torch.minimum(width, stiff)).clamp_min(2 * min_scale)
