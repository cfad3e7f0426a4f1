"""What the approximators share that train a family, from where they start to what they tell at the end."""

from __future__ import annotations

import copy
import hashlib
import math
import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, clone
from torch import Tensor, nn

from skksivi._arrays import as_array
from skksivi._saved import COUNT, CURVE, Parts, is_instance
from skksivi.annealing import Linear
from skksivi.base import LOSSES, BaseApproximator, Constraints, Integral, Interval, Real, StrOptions
from skksivi.estimators._verdict import concluded
from skksivi.families._layer import Family
from skksivi.families._samplers import Fit, Sampler, Tell
from skksivi.kernels import Kernel, resolve_kernel
from skksivi.parameters import SHORTHANDS, Adam, Checkpoint, EarlyStopping, Pilot, Scale, checked_object
from skksivi.pilot._chains import PilotPoints
from skksivi.pilot._rules import MAX_POINTS, WHITENINGS, Whitening, find_whitening, points_near_target
from skksivi.score._score import DifferentiableScore, Halves, Score
from skksivi.stein._discrepancy import FixedKernelKSD
from skksivi.stein._estimators import GRADIENT_ESTIMATORS, GradientEstimator
from skksivi.stein._fused import value_and_gradients
from skksivi.stein._moments import MomentPenalty, Steering, departure
from skksivi.training._checkpoint import CheckpointFile
from skksivi.training._hooks import Report, Saving, Watch
from skksivi.training._loop import CHECK_EVERY, Hook, Objective, Run, Scheduled, minimise

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


class Start(NamedTuple):
    """Where a training starts: coordinates, a family in them, what ties it to a pilot, and the seed of its noise."""

    whitening: Whitening
    family: Any
    penalty: MomentPenalty | None
    seed: int


class Trained(BaseApproximator):
    """Base of the approximators that train a family."""

    _parameter_constraints: ClassVar[Constraints] = {
        "hidden_layer_sizes": ["array-like"],
        "initial_scale": [Interval(Real, 0, None, closed="neither")],
        "scale": [StrOptions({"constant"}), Scale],
        "whiten": [StrOptions(set(WHITENINGS)), Pilot, "array-like", None],
        "init": ["array-like", None],
        "batch_size": [Interval(Integral, 2, None, closed="left")],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "learning_rate": [Interval(Real, 0, None, closed="neither")],
        "optimizer": [StrOptions({"adam"}), Adam],
        "verbose": [Interval(Integral, 0, None, closed="left")],
    }

    hidden_layer_sizes: Sequence[int]
    initial_scale: Any
    scale: str | Scale
    whiten: Any
    init: Any
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

    def set_params(self, **params: Any) -> Self:
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

    def _expanded(self, name: str) -> Any:
        """Return the object that a parameter abbreviates, itself if it does not."""
        value = getattr(self, name, None)
        if name == "optimizer" and isinstance(value, str):
            return clone(self._adam)
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
        return checked_object("scale", self.scale).floor

    def _points_near_target(self) -> Any:
        return points_near_target(self.whiten, self.init)

    def _n_reports(self) -> int:
        return -(-self.max_iter // CHECK_EVERY)

    def _check_parameters(self) -> None:
        """Check what scikit-learn's parameter constraints cannot express."""
        if not all(_is(Integral, n) and n >= 1 for n in self.hidden_layer_sizes):
            raise ValueError(f"`hidden_layer_sizes` must hold positive integers, got {self.hidden_layer_sizes!r}.")
        self._steps.check()
        scale = checked_object("scale", self.scale)
        if not isinstance(self.initial_scale, str) and self.initial_scale <= scale.floor:
            raise ValueError(
                f"`initial_scale` must exceed the floor of `scale`, got {self.initial_scale!r} and {scale.floor!r}."
            )
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
        objective: Objective,
        family: nn.Module,
        generator: torch.Generator,
        sampler_of: Callable[[Any], Sampler],
        tell: Tell | None,
        *,
        before: Sequence[Hook] = (),
        after: Sequence[Hook] = (),
        keeping: type[BaseException] | tuple[type[BaseException], ...] = KEEPING,
        resume: dict[str, Any] | None = None,
    ) -> Run:
        """Train the family, with hooks before and after the report; raise what ends it and leaves nothing to keep."""
        show = None if tell is None else lambda family: tell(Fit(sampler_of(family), {}))
        report = [Report(self.max_iter, self.verbose, show)] if show or self.verbose else []
        run = minimise(
            objective,
            family,
            self._steps,
            generator,
            learning_rate=self.learning_rate,
            max_iter=self.max_iter,
            hooks=[*before, *report, *after],
            resume=resume,
        )
        if not (run.ended_by is None or isinstance(run.ended_by, keeping)):
            raise run.ended_by
        family.requires_grad_(False)
        return run

    def _train(
        self,
        objective: Objective,
        family: nn.Module,
        generator: torch.Generator,
        sampler_of: Callable[[Any], Sampler],
        tell: Tell | None,
    ) -> Fit:
        """Minimise from here to the end; return what was learned."""
        run = self._minimise(objective, family, generator, sampler_of, tell)
        report = {"loss_curve_": run.losses.astype(np.float64), "n_iter_": len(run.losses)}
        return Fit(sampler_of(family), report, run.ended_by)

    def _conclude(self, fit: Fit, score_fn: Score, generator: torch.Generator) -> BaseException | None:
        return concluded(fit, score_fn.on_all_data(), generator)


def _is(kind: Any, value: Any) -> bool:  # isinstance, of which mypy does not know that numbers compare
    return isinstance(value, kind)


class SteinTrained(Trained):
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
    mixing: Any
    early_stopping: float | EarlyStopping | None
    checkpoint: str | os.PathLike[str] | Checkpoint | None
    warm_start: bool
    ksd_curve_: np.ndarray
    family_: Any

    # Where a fit starts

    def _start(
        self, score_fn: Score, generator: torch.Generator, checkpoint: CheckpointFile | None
    ) -> tuple[Start, dict[str, Any] | None]:
        """Return where the training starts and, from a checkpoint, the state in which it goes on."""
        if checkpoint is not None and checkpoint.found is not None:
            start = Start(*(checkpoint.found[name] for name in Start._fields))
            generator.manual_seed(start.seed)
            return start, checkpoint.found["state"]
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

    @abstractmethod
    def _build(
        self, score_fn: Score, whitening: Whitening, pilot: PilotPoints | None, generator: torch.Generator
    ) -> tuple[nn.Module, MomentPenalty | None]:
        """Return a new family and what ties it to the pilot."""

    def _open_checkpoint(self, score_fn: Score) -> CheckpointFile | None:
        """Return where a fit is saved, its settings and the score at two points being the mark of it."""
        checkpoint = checked_object("checkpoint", self.checkpoint)
        if checkpoint is None:
            return None
        if self.warm_start:
            raise ValueError("`checkpoint` continues a fit by itself; set warm_start=False.")
        if callable(self.mixing):
            raise ValueError(
                "`checkpoint` cannot keep a function given as `mixing`; use an object of skksivi.mixing."
            )
        ends = torch.tensor([[-0.5], [0.5]], dtype=torch.float64).expand(2, score_fn.n_features)
        score = score_fn.double(ends.to(score_fn.device)).sum(1).tolist()
        elsewhere = {"checkpoint", "device", "random_state", "verbose"}
        settings = {k: _named(v) for k, v in self.get_params().items() if k.partition("__")[0] not in elsewhere}
        return CheckpointFile(
            checkpoint.path,
            {**settings, "n_features": score_fn.n_features, "score_fn at -1/2 and 1/2": [f"{s:.6g}" for s in score]},
            score_fn.device,
        )

    def _saving(self, start: Start, watch: Watch | None, file: CheckpointFile | None) -> list[Saving]:
        """Return the hook that saves the training, if it is to be saved."""
        if file is None:
            return []
        return [Saving(file, start._asdict(), watch, checked_object("checkpoint", self.checkpoint).every)]

    # What is minimised

    def _kernel_in_u(self, d: int) -> Kernel:
        """Return the kernel; "auto" is a fixed width in whitened coordinates, else the kernel's own rule."""
        if self.bandwidth != "auto":
            return resolve_kernel(self.kernel, self.bandwidth)
        fixed = isinstance(self.kernel, str) and self.whiten is not None
        return resolve_kernel(self.kernel, WHITENED_BANDWIDTH * math.sqrt(d) if fixed else None)

    def _objective(
        self,
        score_u: DifferentiableScore,
        family: Family,
        generator: torch.Generator,
        *,
        terms: Sequence[Steering] = (),
        schedules: Sequence[Scheduled] = (),
        weights: Sequence[float] = (1.0,),
    ) -> Objective:
        """Return the sum over layers, with weights, of the estimates of KSD^2 and of the terms beside them."""
        kernel = self._kernel_in_u(family.n_features)
        estimator, n_draws = self._estimator(score_u)
        beta = next(family.parameters()).new_tensor(weights)
        w = beta[:, None, None] if len(weights) > 1 else beta

        def gradient_fn() -> Tensor:
            (x, s_p, s_q), pull = family.draw_with_pullback(n_draws, generator, score_u)
            ksd, dx, df = value_and_gradients(x, s_p - s_q, kernel, estimator)
            for term in terms:
                dx.add_(term.gradient(x, s_p))
            df.mul_(w)
            pull(dx.mul_(w), df, -df)
            return beta @ ksd.view(-1)

        return Objective(gradient_fn, schedules)

    def _estimator(self, score_u: DifferentiableScore) -> tuple[GradientEstimator, int]:
        """Return the estimator of the discrepancy and the number of draws that it takes."""
        estimator = GRADIENT_ESTIMATORS[self.gradient_estimator]
        n = estimator.n_batches * self.batch_size
        if isinstance(score_u, Halves):  # whose pairs within a half are biased
            return GRADIENT_ESTIMATORS["vanilla"], n + n % 2
        return estimator, n

    def _watch(
        self,
        score_fn: Score,
        whitening: Whitening,
        family: nn.Module,
        draw: Callable[[Any, int, torch.Generator], Tensor],
        generator: torch.Generator,
        *,
        guards: bool,
        draw_at_target: Callable[[Any, int, torch.Generator], Tensor] | None = None,
    ) -> Watch | None:
        """Return the rule by which states are compared, every one by draws from the same noise.

        A guarded state is kept if it has the smallest discrepancy of those whose moments stay near those of
        `draw_at_target`, by default the start's.
        """
        stopping = checked_object("early_stopping", self.early_stopping)
        if stopping is None and not guards:
            return None
        judge = FixedKernelKSD(score_fn.double, score_fn.n_features, score_fn.device, whitening.map)
        seed = generator.initial_seed()

        @torch.no_grad()
        def draw_again(family: nn.Module, draw: Callable[..., Tensor] = draw) -> Tensor:
            return draw(family, N_MONITOR_DRAWS, torch.Generator(score_fn.device).manual_seed(seed)).double()

        start = draw_again(family, draw_at_target or draw)

        def look(family: nn.Module) -> tuple[float, Any]:
            u = draw_again(family)
            try:
                value = judge(whitening.map.unwhiten(u[:N_JUDGED_DRAWS]))
            except ValueError:  # the score is not finite there
                value = math.inf
            return value, departure(u, start)

        watch = Watch(look, stopping, every=LOOK_EVERY, keeps_best=guards)
        if guards:
            watch.look(family, 0)
        return watch

    def _train_from(
        self,
        start: Start,
        family: nn.Module,
        objective: Objective,
        generator: torch.Generator,
        *,
        watch: Watch | None,
        checkpoint: CheckpointFile | None,
        resume: dict[str, Any] | None,
        sampler_of: Callable[[Any], Sampler],
        tell: Tell | None,
    ) -> Fit:
        """Minimise; return what was learned, unless what ended it leaves nothing to keep."""
        if watch is not None and resume is not None:
            watch.resume(resume["watch"])
        run = self._minimise(
            objective,
            family,
            generator,
            sampler_of,
            tell,
            before=[] if watch is None else [watch],
            after=self._saving(start, watch, checkpoint),
            keeping=BaseException if self.warm_start else KEEPING,
            resume=resume,
        )
        losses, monitored = np.empty(0), np.empty((0, 2))
        if self._continues():
            losses, monitored = self.loss_curve_, self.ksd_curve_
        looks = np.array([] if watch is None else watch.values).reshape(-1, 2)
        n_iter = len(losses) + len(run.losses)
        report: dict[str, Any] = {
            "loss_curve_": np.concatenate([losses, run.losses]),
            "ksd_curve_": np.concatenate([monitored, looks + np.array([len(losses), 0])]),
            "engine_": run.engine,
            "n_iter_": n_iter,
            "best_iter_": n_iter if watch is None else len(losses) + watch.restore(family),
        }
        remark = None if watch is None else _remark(watch, report["best_iter_"])
        return Fit(sampler_of(family), report, run.ended_by, remark)

    def _conclude(self, fit: Fit, score_fn: Score, generator: torch.Generator) -> BaseException | None:
        checkpoint = checked_object("checkpoint", self.checkpoint)
        if checkpoint is not None and fit.ended_by is None:
            Path(checkpoint.path).unlink(missing_ok=True)
        return super()._conclude(fit, score_fn, generator)


def temperature(annealing: Any, like: Tensor) -> Scheduled:
    """Return the inverse temperature that multiplies the score, one without `annealing`."""
    schedule = 1.0 if annealing is None else Linear() if isinstance(annealing, str) else annealing
    return Scheduled("annealing", schedule, like, positive=True)


def _remark(watch: Watch, best_iter: int) -> str | None:
    """Say that a guarded training ended too far from its start, None if it did not."""
    last = watch.last
    if not watch.keeps_best or last is None or last.accepted:
        return None
    worst = int(last.excess.argmax())
    return (
        f"The training ended with coordinate {worst} of the whitened draws at {last.sd_ratio[worst]:.2f} times its "
        f"standard deviation and its third moment changed by {last.third[worst]:+.2f}; the state of iteration "
        f"{best_iter} is kept. Raise the `weight` of the Pilot or `batch_size`, or lower `learning_rate`."
    )


def _named(value: Any) -> Any:
    """Return a setting, of an object or a function its name; parameters of objects are settings of their own.

    Of an array its shape and a checksum, for its text leaves out the most of it.
    """
    if callable(value) or isinstance(value, BaseEstimator):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, list | tuple):
        return [_named(item) for item in value]
    if hasattr(value, "__array__"):
        array = np.ascontiguousarray(as_array(value))
        return f"an array {array.shape} with checksum {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
    return value


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
