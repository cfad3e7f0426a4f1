"""What the fits of single layers and of hierarchies share, from where they start to what they tell at the end."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor, nn

from skksivi._arrays import as_array
from skksivi._checkpoint import Checkpoint
from skksivi._moments import MomentPenalty, departure, stein_shift, stein_variances
from skksivi._pilot import Pilot
from skksivi._regularization import tail_exponent
from skksivi._samplers import Fit, Sampler
from skksivi._score import PRODUCTS, Halves, Score
from skksivi._stein import GRADIENT_ESTIMATORS, GradientEstimator
from skksivi._training import CHECK_EVERY, Adam, Hook, Objective, Progress, Scheduled, Watch, minimise
from skksivi._warnings import warn_caller
from skksivi._whitening import MAX_POINTS, WHITENINGS, Whitening, find_whitening
from skksivi.annealing import Linear
from skksivi.base import Integral, Interval, Real, StrOptions, Tell
from skksivi.kernels import Kernel, resolve_kernel
from skksivi.metrics import Judge

LOGGER = logging.getLogger("skksivi")

#: Draws whose moments are compared with the start's, and those of them whose discrepancy is computed.
N_MONITOR_DRAWS, N_JUDGED_DRAWS = 4000, 1000

#: Iterations between two comparisons.
LOOK_EVERY = 500

#: What may end a training that leaves the estimator fitted, in the state that was reached.
KEEPING = (KeyboardInterrupt, FloatingPointError)

#: Bounds of the variances of the draws by Stein's identity, one if they are right, beyond which a fit has failed.
FAILED_VARIANCES = (0.25, 4.0)

#: Square of the distance of the draws from the target, in their standard deviations, beyond which a fit has failed.
FAILED_SHIFT = 4.0

#: Width of a kernel in whitened coordinates, in units of the square root of the dimension.
WHITENED_BANDWIDTH = 0.5

#: Constraints of the parameters that both have.
CONSTRAINTS: dict[str, list[Any]] = {
    "kernel": [str, Kernel],
    "bandwidth": [Interval(Real, 0, None, closed="neither"), StrOptions({"auto", "median"}), None],
    "gradient_estimator": [StrOptions(set(GRADIENT_ESTIMATORS))],
    "hidden_layer_sizes": ["array-like"],
    "initial_scale": [Interval(Real, 0, None, closed="neither")],
    "min_scale": [Interval(Real, 0, None, closed="left")],
    "whiten": [StrOptions(set(WHITENINGS)), "array-like", None],
    "init": ["array-like", None],
    "whiten_budget": [Interval(Integral, 0, None, closed="left")],
    "batch_size": [Interval(Integral, 2, None, closed="left")],
    "max_iter": [Interval(Integral, 1, None, closed="left")],
    "learning_rate": [Interval(Real, 0, None, closed="neither")],
    "learning_rate_decay": [StrOptions({"cosine"}), "array-like", None],
    "betas": ["array-like"],
    "annealing": [StrOptions({"linear"}), callable, None],
    "ema_decay": [Interval(Real, 0, 1, closed="left"), None],
    "max_grad_norm": [Interval(Real, 0, None, closed="neither"), None],
    "tol": [Interval(Real, 0, None, closed="left"), None],
    "n_iter_no_change": [Interval(Integral, 1, None, closed="left")],
    "hvp": [StrOptions(set(PRODUCTS))],
    "nonfinite": [StrOptions({"raise", "skip"})],
    "checkpoint": [str, os.PathLike, None],
    "checkpoint_every": [Interval(Integral, 1, None, closed="left")],
    "warm_start": ["boolean"],
    "verbose": [Interval(Integral, 0, None, closed="left")],
}


def check_parameters(est: Any) -> None:
    """Check what scikit-learn's parameter constraints cannot express."""
    if not all(_is(Integral, n) and n >= 1 for n in est.hidden_layer_sizes):
        raise ValueError(f"`hidden_layer_sizes` must hold positive integers, got {est.hidden_layer_sizes!r}.")
    if len(est.betas) != 2 or not all(_is(Real, b) and 0 <= b < 1 for b in est.betas):
        raise ValueError(f"`betas` must be two numbers in [0, 1), got {est.betas!r}.")
    if not isinstance(est.initial_scale, str) and est.initial_scale <= est.min_scale:
        raise ValueError(f"`initial_scale` must exceed `min_scale`, got {est.initial_scale!r} and {est.min_scale!r}.")
    decay: Any = est.learning_rate_decay
    is_pair = decay is not None and not isinstance(decay, str)
    if is_pair and (
        len(decay) != 2 or not all(isinstance(a, Real) for a in decay) or not 0 < decay[0] <= 1 <= decay[1]
    ):
        raise ValueError(
            "`learning_rate_decay` must be 'cosine', None or a pair (factor in (0, 1], iterations >= 1), got "
            f"{decay!r}."
        )


def _is(kind: Any, value: Any) -> bool:  # isinstance, of which mypy does not know that numbers compare
    return isinstance(value, kind)


# Where a fit starts


class Start(NamedTuple):
    """Where a training starts: coordinates, a family in them, what ties it to a pilot, and the seed of its noise."""

    whitening: Whitening
    family: Any
    penalty: MomentPenalty | None
    seed: int


def find_start(
    est: Any,
    score_fn: Score,
    generator: torch.Generator,
    checkpoint: Checkpoint | None,
    build: Callable[[Score, Whitening, Pilot | None, torch.Generator], tuple[nn.Module, MomentPenalty | None]],
) -> tuple[Start, dict[str, Any] | None]:
    """Return where the training starts and, from a checkpoint, the state in which it goes on."""
    if checkpoint is not None and checkpoint.found is not None:
        start = Start(*(checkpoint.found[name] for name in Start._fields))
        generator.manual_seed(start.seed)
        return start, checkpoint.found["state"]
    seed = generator.initial_seed()
    if not continues(est):
        whitening, pilot = find_whitening(est.whiten, score_fn, generator, init=est.init, budget=est.whiten_budget)
        return Start(whitening, *build(score_fn, whitening, pilot, generator), seed), None
    if est.n_features_in_ != score_fn.n_features:
        raise ValueError(
            f"`warm_start` continues a fit of {est.n_features_in_} features, but the target has "
            f"{score_fn.n_features}; set warm_start=False."
        )
    family = copy.deepcopy(est.family_).to(score_fn.device, score_fn.dtype).requires_grad_()
    family.mixing = copy.deepcopy(est.family_.mixing).to(score_fn.device)  # which keeps its precision
    return Start(est.whitening_.to(score_fn.device), family, None, seed), None


def continues(est: Any) -> bool:
    """Tell whether a fit goes on from the last one."""
    return est.warm_start and hasattr(est, "family_")


def points_near_target(est: Any) -> Any:
    """Return what the parameters say of where the target is."""
    if est.init is None and est.whiten is not None and not isinstance(est.whiten, str):
        return est.whiten[0] if len(est.whiten) else None
    return est.init


def find_checkpoint(est: Any, score_fn: Score) -> Checkpoint | None:
    """Return where a fit is saved, its settings and the score at two points being the mark of it."""
    if est.checkpoint is None:
        return None
    if est.warm_start:
        raise ValueError("`checkpoint` continues a fit by itself; set warm_start=False.")
    if callable(est.mixing):
        raise ValueError("`checkpoint` cannot keep a function given as `mixing`; use an object of skksivi.mixing.")
    ends = torch.tensor([[-0.5], [0.5]], dtype=torch.float64).expand(2, score_fn.n_features)
    score = score_fn.double(ends.to(score_fn.device)).sum(1).tolist()
    elsewhere = {"checkpoint", "checkpoint_every", "device", "random_state", "verbose"}
    settings = {k: _named(v) for k, v in est.get_params().items() if k not in elsewhere}
    return Checkpoint(
        est.checkpoint,
        {**settings, "n_features": score_fn.n_features, "score_fn at -1/2 and 1/2": [f"{s:.6g}" for s in score]},
        score_fn.device,
    )


def _named(value: Any) -> Any:
    """Return a setting, of an object or a function its name; parameters of objects are settings of their own.

    Of an array its shape and a checksum, for its text leaves out the most of it.
    """
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, list | tuple):
        return [_named(item) for item in value]
    if hasattr(value, "__array__"):
        array = np.ascontiguousarray(as_array(value))
        return f"an array {array.shape} with checksum {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
    return value


# What is minimised


def kernel_in_u(est: Any, d: int) -> Kernel:
    """Return the kernel; "auto" is a fixed width in whitened coordinates, else the kernel's own rule."""
    if est.bandwidth != "auto":
        return resolve_kernel(est.kernel, est.bandwidth)
    fixed = isinstance(est.kernel, str) and est.whiten is not None
    return resolve_kernel(est.kernel, WHITENED_BANDWIDTH * math.sqrt(d) if fixed else None)


def estimator_of(est: Any, score_u: Any) -> tuple[GradientEstimator, int]:
    """Return the estimator of the discrepancy and the number of draws that it takes."""
    estimator = GRADIENT_ESTIMATORS[est.gradient_estimator]
    n = estimator.n_batches * est.batch_size
    if isinstance(score_u, Halves):  # whose pairs within a half are biased
        return GRADIENT_ESTIMATORS["vanilla"], n + n % 2
    return estimator, n


def temperature_of(est: Any, like: Tensor) -> Scheduled | None:
    """Return the inverse temperature as a function of progress, None for one throughout."""
    if est.annealing is None:
        return None
    schedule = Linear() if est.annealing == "linear" else est.annealing
    return Scheduled("annealing", schedule, like, positive=True)


def warn_of_improper(est: Any, score_fn: Score) -> None:
    """Warn where the tails of the target are powers so slow that tempering makes them improper."""
    temperature, d = temperature_of(est, torch.zeros(())), score_fn.n_features
    if temperature is None:
        return
    exponent, coldest = tail_exponent(score_fn.double, d), math.inf
    for i in range(51):
        temperature.advance(i / 50)
        coldest = min(coldest, temperature.value.item())
    if exponent is not None and coldest * exponent <= d:
        warn_caller(
            f"`annealing` starts at the inverse temperature {coldest:.3g}, but the tails of the target fall as "
            f"|x|^-{exponent:.3g} in {d} dimensions, so that the tempered target has no finite mass below "
            f"{d / exponent:.3g}: draws run away. Start above that, or do without.",
        )


def watch_of(
    est: Any,
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
    if est.tol is None and not guards:
        return None
    judge = Judge(score_fn.double, score_fn.n_features, score_fn.device, whitening.map)
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

    watch = Watch(look, est.tol, est.n_iter_no_change, every=LOOK_EVERY, keeps_best=guards)
    if guards:
        watch.look(family, 0)
    return watch


def train(
    est: Any,
    start: Start,
    family: nn.Module,
    objective: Objective,
    generator: torch.Generator,
    *,
    watch: Watch | None,
    checkpoint: Checkpoint | None,
    resume: dict[str, Any] | None,
    sampler_of: Callable[[Any], Sampler],
    tell: Tell | None,
) -> Fit:
    """Minimise; return what was learned, unless what ended it leaves nothing to keep."""
    hooks: list[Hook] = []
    if watch is not None:
        hooks.append(watch)
        if resume is not None:
            watch.resume(resume["watch"])
    hooks += reporter(est, sampler_of, tell)
    if checkpoint is not None:
        hooks.append(Saving(checkpoint, start, watch, est.checkpoint_every))
    run = minimise(
        objective,
        family,
        optimiser_of(est),
        generator,
        max_iter=est.max_iter,
        nonfinite=est.nonfinite,
        hooks=hooks,
        resume=resume,
    )
    if not (run.ended_by is None or est.warm_start or isinstance(run.ended_by, KEEPING)):
        raise run.ended_by
    losses, monitored = (est.loss_curve_, est.ksd_curve_) if continues(est) else ([], np.empty((0, 2)))
    looks = np.array([] if watch is None else watch.values).reshape(-1, 2)
    n_iter = len(losses) + len(run.losses)
    report: dict[str, Any] = {
        "loss_curve_": np.concatenate([losses, run.losses]),
        "ksd_curve_": np.concatenate([monitored, looks + np.array([len(losses), 0])]),
        "engine_": run.engine,
        "n_iter_": n_iter,
        "best_iter_": n_iter if watch is None else len(losses) + watch.restore(family),
    }
    sampler = sampler_of(family.requires_grad_(False))
    return Fit(sampler, report, run.ended_by, None if watch is None else _remark(watch, report["best_iter_"]))


def _remark(watch: Watch, best_iter: int) -> str | None:
    """Say that a guarded training ended too far from its start, None if it did not."""
    last = watch.last
    if not watch.keeps_best or last is None or last.accepted:
        return None
    worst = int(last.excess.argmax())
    return (
        f"The training ended with coordinate {worst} of the whitened draws at {last.sd_ratio[worst]:.2f} times its "
        f"standard deviation and its third moment changed by {last.third[worst]:+.2f}; the state of iteration "
        f"{best_iter} is kept. Raise `pilot_weight` or `batch_size`, or lower `learning_rate`."
    )


# What is told on the way


def n_reports(est: Any) -> int:
    """Return the number of reports of a training that runs to its end."""
    return -(-est.max_iter // CHECK_EVERY)


class Report:
    """A line of the log, and what callbacks see of a fit under way.

    Parameters
    ----------
    est : estimator
    sampler_of : callable
        Maps a family to what draws by it.
    tell : callable or None
        Shows callbacks a fit.
    """

    every, at_end = CHECK_EVERY, True

    def __init__(self, est: Any, sampler_of: Callable[[Any], Sampler], tell: Tell | None) -> None:
        self.max_iter, self.verbose = est.max_iter, est.verbose
        self.sampler_of = sampler_of
        self.tell = tell
        self.began = time.monotonic()

    def __call__(self, progress: Progress) -> bool:
        """Log, and ask the callbacks whether to stop."""
        n_done, loss = progress.n_done, progress.loss.item()
        if self.verbose and (n_done % LOOK_EVERY == 0 or n_done == self.max_iter or self.verbose > 1):
            seconds = time.monotonic() - self.began
            LOGGER.info("iteration %d of %d, loss %.3g, %.1f s", n_done, self.max_iter, loss, seconds)
        if self.tell is None:
            return False
        with progress.iterate.averaged():
            family = copy.deepcopy(progress.module).requires_grad_(False)
            return self.tell(Fit(self.sampler_of(family), {}))


def reporter(est: Any, sampler_of: Callable[[Any], Sampler], tell: Tell | None) -> list[Hook]:
    """Return the report of a training, none if nobody wants to hear."""
    return [] if tell is None and not est.verbose else [Report(est, sampler_of, tell)]


class Saving:
    """Saves a training in a checkpoint, with where it started and its watch."""

    at_end = False

    def __init__(self, checkpoint: Checkpoint, start: Start, watch: Watch | None, every: int) -> None:
        self.checkpoint = checkpoint
        self.start = start
        self.watch = watch
        self.every = every

    def __call__(self, progress: Progress) -> bool:
        """Write the file."""
        looks = None if self.watch is None else self.watch.state()
        self.checkpoint.save({**self.start._asdict(), "state": {**progress.state(), "watch": looks}})
        return False


def optimiser_of(est: Any) -> Adam:
    """Return how steps are taken."""
    return Adam(est.learning_rate, est.learning_rate_decay, est.betas, est.max_grad_norm, est.ema_decay)


# What is told at the end


def remove_checkpoint(path: str | os.PathLike[str] | None, fit: Fit) -> None:
    """Remove the file of a fit that has come to its end."""
    if path is not None and fit.ended_by is None:
        Path(path).unlink(missing_ok=True)


def concluded(fit: Fit, score_fn: Score, generator: torch.Generator) -> BaseException | None:
    """Return what has ended a training, explained, or warn of what is wrong with a fit that came to its end."""
    if isinstance(fit.ended_by, FloatingPointError):
        return _explained(fit.ended_by, score_fn, fit.sampler.sample(N_MONITOR_DRAWS, generator))
    if fit.ended_by is None:
        _warn(fit, score_fn, fit.sampler.sample(N_JUDGED_DRAWS, generator).double())
    return fit.ended_by


def _explained(error: BaseException, score_fn: Score, x: Tensor) -> FloatingPointError:
    """Return the error with what draws x (n, d) of the last finite state tell of its cause."""
    bad = (~score_fn(x).isfinite().all(1)).nonzero().flatten().tolist()
    cause = f"the score is finite at {len(x)} fresh draws, so that it is a rare one"
    if bad:
        row = ", ".join(f"{value:.4g}" for value in x[bad[0]][:5].tolist())
        cause = (
            f"the score is not finite at {len(bad)} of {len(x)} fresh draws, rows {bad[:3]} and so on, "
            f"the first at x = [{row}{', ...' if x.shape[1] > 5 else ''}]"
        )
    return FloatingPointError(
        f"{error}: {cause}. The state after the last finite step is kept. `score_fn` may be undefined or huge "
        "there, or have the wrong sign. Use dtype='float64', a smaller `learning_rate` or `initial_scale`, "
        "rescale the parameters or, where this is rare, set nonfinite='skip'."
    )


def _warn(fit: Fit, score_fn: Score, x: Tensor) -> None:
    """Warn of what is wrong with a fit that has come to its end, of which x (n, d) are draws."""
    n_skipped = int((~np.isfinite(fit.report["loss_curve_"])).sum())
    message = None
    if n_skipped:
        message = (
            f"{n_skipped} of {fit.report['n_iter_']} iterations were skipped, their loss or gradient not being "
            "finite: `score_fn` may be undefined or huge somewhere. Use dtype='float64' or rescale the parameters."
        )
    elif not fit.sampler.attributes()["whitening_"].settled:
        message = (
            "The chains that explore the target have not settled, so that the fit may be off: raise "
            "`whiten_budget`, start near a mode by `init`, or give the parameters a form without funnels and "
            "spikes."
        )
    elif fit.remark is not None:
        message = fit.remark
    else:
        s = score_fn.double(x)
        message = _of_variances(x, s) or _of_shift(x, s)
    if message is not None:
        warn_caller(message, ConvergenceWarning)


def _of_variances(x: Tensor, s: Tensor) -> str | None:
    """Say in which coordinate draws x (n, d) with scores s are far too wide or narrow."""
    variances, se = stein_variances(x, s)
    low, high = FAILED_VARIANCES
    wrong = (variances + 5 * se < low) | (variances - 5 * se > high)
    if not wrong.any():
        return None
    worst = int((variances.clamp_min(1e-12).log().abs() * wrong).argmax())
    way = "narrow" if variances[worst] < 1 else "wide"
    return (
        f"The draws are too {way} in coordinate {worst}: -E[s_i (x_i - E x_i)] is {variances[worst]:.2g} "
        f"there, where it should be 1; {int(wrong.sum())} of {len(wrong)} coordinates are off by more than "
        "a factor of 4. Use whiten='auto', more `max_iter`, a smaller `initial_scale` or rescale the "
        "parameters."
    )


def _of_shift(x: Tensor, s: Tensor) -> str | None:
    """Say how far draws x (n, d) with scores s are from the target."""
    square, se = stein_shift(x, s)
    if not square - 5 * se > FAILED_SHIFT:
        return None
    return (
        "The draws are too far from the target: E[s]^T Cov(x) E[s], about the square of the distance in standard "
        f"deviations, is {square:.2g}, where it should be 0. Use whiten='auto', more `max_iter`, or set `init` near "
        "the target."
    )


# Hierarchies


def langevin_scale(
    initial_scale: float, min_scale: float, score_fn: Score, whitening: Whitening, pilot: Pilot | None
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
