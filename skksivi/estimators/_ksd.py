"""What KSIVI and HKSIVI share: where they start, the discrepancy they minimise, and the guard on their states."""

from __future__ import annotations

import copy
import math
import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Generic, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from skksivi._saved import COUNT, CURVE, Parts, is_instance
from skksivi.base import LOSSES, Constraints, Interval, Real, StrOptions
from skksivi.estimators._trained import KEEPING, F, Job, Trained
from skksivi.families._layer import Family
from skksivi.families._samplers import Fit, InU, Tell
from skksivi.kernels import Kernel, resolve_kernel
from skksivi.mixing import MixingLike
from skksivi.parameters import (
    Checkpoint,
    Plateau,
    checked_object,
    pilot_of,
    plateau_of,
)
from skksivi.pilot._chains import PilotPoints
from skksivi.pilot._rules import Whitening, pulled_back
from skksivi.score._score import DifferentiableScore, Halves, Score
from skksivi.stein._discrepancy import FixedKernelKSD, agree
from skksivi.stein._estimators import GRADIENT_ESTIMATORS, GradientEstimator
from skksivi.stein._fused import value_and_gradients
from skksivi.training._checkpoint import CheckpointFile, settings_of
from skksivi.training._guard import Departure, MomentPenalty, Steering, Watch, departure
from skksivi.training._hooks import Saving
from skksivi.training._loop import Objective, Scheduled, State

#: Draws whose moments are compared with the start's, and those of them whose discrepancy is computed.
N_MONITOR_DRAWS, N_JUDGED_DRAWS = 4000, 1000

#: Iterations between two comparisons.
LOOK_EVERY = 500

#: Width of a kernel in whitened coordinates, in units of the square root of the dimension.
WHITENED_BANDWIDTH = 0.5


#: What KSIVI and HKSIVI have learned beside what they draw from.
STEIN_TRAINED: Parts = {
    **LOSSES,
    "ksd_curve_": (CURVE, "mp"),
    "best_iter_": (COUNT, ""),
    "engine_": (is_instance(str), ""),
}


class Start(NamedTuple, Generic[F]):
    """Where a training starts: coordinates, a family in them, what ties it to a pilot, and the seed of its noise."""

    whitening: Whitening
    family: F
    penalty: MomentPenalty | None
    seed: int

    def state(self) -> dict[str, object]:
        """Return the fields by name, as a checkpoint keeps them."""
        return self._asdict()


class SteinTrained(Trained, Generic[F]):
    """Base of KSIVI and HKSIVI, which minimise the kernel Stein discrepancy."""

    _parameter_constraints: ClassVar[Constraints] = {
        "kernel": [str, Kernel],
        "bandwidth": [Interval(Real, 0, None, closed="neither"), StrOptions({"auto", "median"}), None],
        "gradient_estimator": [StrOptions(set(GRADIENT_ESTIMATORS))],
        "early_stopping": ["boolean", Interval(Real, 0, None, closed="left"), Plateau, None],
        "checkpoint": [str, os.PathLike, Checkpoint, None],
        "warm_start": ["boolean"],
    }

    kernel: str | Kernel
    bandwidth: float | str | None
    gradient_estimator: str
    mixing: MixingLike
    early_stopping: bool | float | Plateau | None
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

    def _pilot_weight(self, pilot: PilotPoints) -> float:
        """Return the weight of the penalty that ties a fit to its pilot, zero for none."""
        chains = pilot_of(self.whiten)
        return chains.weight if chains is not None and pilot.converged else 0.0

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
        map_, sampler = start.whitening.map, sampler_of(family)  # which follows the family through its training
        stopping, guards = plateau_of(self.early_stopping), self._guards(start)

        def noise() -> torch.Generator:
            return torch.Generator(score.device).manual_seed(start.seed)

        if guards and self._continues():  # a target that has moved is to be followed
            with torch.no_grad():
                x = sampler.sample(N_MONITOR_DRAWS, noise()).double()
            guards = agree(x, score.double(x))
        if stopping is None and not guards:
            return None
        judge = FixedKernelKSD(score.double, score.n_features, score.device, map_)
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

    def _conclude(self, fit: Fit, score_fn: Score, generator: torch.Generator) -> None:
        if self.checkpoint is not None and fit.ended_by is None:
            Path(checked_object(Checkpoint, self.checkpoint).path).unlink(missing_ok=True)
        super()._conclude(fit, score_fn, generator)


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
