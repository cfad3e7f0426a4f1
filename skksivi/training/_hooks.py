"""What a training does at intervals: lines of the log, and callbacks."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from skksivi._utils.lazy import keeping_random
from skksivi.score._target import is_divided
from skksivi.training._loop import CHECK_EVERY, Progress

if TYPE_CHECKING:
    from sklearn.callback import CallbackContext

try:
    with keeping_random():
        from sklearn.callback import CallbackSupportMixin, with_callbacks  # imports rich
except ImportError:  # before scikit-learn 1.9 there were none

    class CallbackSupportMixin:  # type: ignore[no-redef]
        """Refuses callbacks."""

        def set_callbacks(self, *callbacks: object) -> None:
            raise ImportError("`set_callbacks` needs scikit-learn 1.9: `pip install 'scikit-learn>=1.9'`.")

        def _init_callback_context(self, **_: object) -> None:
            return None

    def with_callbacks(method: Callable[..., object]) -> Callable[..., object]:
        return method


LOGGER = logging.getLogger("skksivi")

#: The stages after a pilot; the first makes its own reports.
AFTER_PILOT = TRAINING, CERTIFICATE = "training", "certificate"

#: Number of reports of a pilot to callbacks, seconds between two lines of one stage, and until a long wait is told.
PILOT_PARTS, SECONDS_BETWEEN, LONG_WAIT = 10, 10.0, 5.0


class Report:
    """A line of the log, and the view that callbacks get of a fit under way.

    Parameters
    ----------
    max_iter, verbose : int
    show : callable or None
        Shows callbacks a copy of the averaged module; returns whether to stop.
    """

    every, at_end = CHECK_EVERY, True

    def __init__(self, max_iter: int, verbose: int, show: Callable[[nn.Module], bool] | None) -> None:
        self.max_iter = max_iter
        self.verbose = verbose
        self.show = show
        self.began = self.last = time.monotonic()

    def __call__(self, progress: Progress) -> bool:
        """Log, and ask the callbacks whether to stop."""
        n_done, loss = progress.n_done, progress.loss.item()
        now, n_new = time.monotonic(), n_done % CHECK_EVERY or CHECK_EVERY
        to_come = (now - self.last) / n_new * (self.max_iter - n_done)
        self.last = now
        if self.verbose > 0 and (n_done % 500 == 0 or n_done == self.max_iter or self.verbose > 1):
            line = "iteration %d of %d, loss %.3g, %.1f s, about %.1f s to come"
            LOGGER.info(line, n_done, self.max_iter, loss, now - self.began, to_come)
        if self.show is None:
            return False
        with progress.iterate.averaged():
            return self.show(copy.deepcopy(progress.module).requires_grad_(False))


class Callbacks:
    """The callbacks of scikit-learn that follow a fit.

    Parameters
    ----------
    context : CallbackContext or None
    are_set : bool, default=True
        Whether there are any.
    n_pilot : int, default=0
        Approximate number of calls of the pilot that they see, zero without one.
    **shown
        What each of them sees at every task.
    """

    def __init__(
        self, context: CallbackContext | None, *, are_set: bool = True, n_pilot: int = 0, **shown: object
    ) -> None:
        self.context = context
        self.are_set = are_set
        self.n_pilot = n_pilot
        self.shown = shown
        if context is not None:
            context.call_on_fit_task_begin(**shown)

    def report(self, task_name: str, **fitted: object) -> bool:
        """Report a task within the fit; return whether one of them asks to stop."""
        if self.context is None:
            return False
        part = self.context.subcontext(task_name=task_name)
        part.call_on_fit_task_begin(**self.shown)
        return part.call_on_fit_task_end(**self.shown, **fitted)

    def end(self) -> None:
        if self.context is not None:
            self.context.call_on_fit_task_end(**self.shown)


@dataclass(eq=False)
class LongWait:
    """Says after five seconds of a fit what it does and how long it may take, and again where it takes longer.

    It warns by the logger, which prints that where nobody has configured logging; else the line is information.

    Parameters
    ----------
    target : Target or callable
        As it is given to `fit`.
    clock : callable, default=time.monotonic
        Returns seconds.
    """

    target: object
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.began, self.stage, self.due = self.clock(), "checks", LONG_WAIT

    def begin(self, stage: str, n_calls: int, so_far: int) -> None:
        """Keep the name of the stage."""
        self.stage = stage

    def hear(self, so_far: int, limit: int | None) -> None:
        """Say the line if it is time."""
        seconds = self.clock() - self.began
        if seconds > self.due and so_far:
            usual = 10 ** max(4, len(str(so_far)))  # most fits take less than 10,000 calls, or else less than 100,000
            most = min(usual, limit or usual)
            in_all, words = seconds * most / so_far, "Most fits take up to" if most == usual else "The budget ends at"
            self.due = max(60.0, in_all)  # seconds
            level = logging.INFO if LOGGER.hasHandlers() else logging.WARNING
            line = (
                f"The fit has taken {seconds:.0f} s so far and is at: {self.stage or 'fit'}. The score was evaluated "
                f"at {so_far:,} points, {seconds / so_far:.2g} s each. {words} {most:,}, which would "
                f"be {in_all:,.0f} s in all."
            )
            LOGGER.log(level, "%s%s", line, self._advice())

    def _advice(self) -> str:
        n_rows = getattr(self.target, "n_rows", None)
        if n_rows is None or n_rows < 10_000 or is_divided(self.target):
            return ""
        return f" Of the {n_rows:,} rows of the target skksivi.targets.Minibatches takes some at a time."


@dataclass(kw_only=True, eq=False)
class StageReport:
    """Logs the stages of a fit other than its iterations, and reports parts of the pilot to callbacks.

    Parameters
    ----------
    log : bool
        Whether to log: one line per stage with its cost, predicted by the calls so far, and one every ten seconds.
    n_pilot : int
        Approximate number of calls of the pilot; zero without one.
    report : callable
        Called `PILOT_PARTS` times until the training begins, if there is a pilot.
    """

    log: bool
    n_pilot: int
    report: Callable[[], object]

    def __post_init__(self) -> None:
        self.n_reported = 0
        self.stage, self.n_calls = "", 0
        self.n_before, self.began = 0, time.monotonic()
        self.logged = self.began

    def begin(self, stage: str, n_calls: int, so_far: int) -> None:
        """Log the stage, with its cost predicted by the calls of the one before."""
        now, n = time.monotonic(), so_far - self.n_before
        if self.log:
            cost = f": about {n_calls:,} score calls to come" if n_calls else ""
            if n_calls and n:
                each = (now - self.began) / n
                cost += f", at {each:.2g} s each, about {n_calls * each:.2g} s"
            LOGGER.info("%s%s", stage, cost)
        self.stage, self.n_calls, self.n_before, self.began, self.logged = stage, n_calls, so_far, now, now
        if stage in AFTER_PILOT:
            self._report(self.n_pilot)

    def hear(self, so_far: int, limit: int | None) -> None:
        """Log the progress of a stage that takes long."""
        self._report(so_far)
        now = time.monotonic()
        if self.log and self.stage not in AFTER_PILOT and now - self.logged > SECONDS_BETWEEN:
            n = so_far - self.n_before
            done = f"{n:,}" + (f" of about {self.n_calls:,}" if n <= self.n_calls else "")
            LOGGER.info("%s: %s score calls, %.0f s", self.stage, done, now - self.began)
            self.logged = now

    def _report(self, n_calls: int) -> None:
        while self.n_pilot and self.n_reported < min(PILOT_PARTS * n_calls // self.n_pilot, PILOT_PARTS):
            self.n_reported += 1
            self.report()
