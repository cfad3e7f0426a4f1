"""What is done every so often in a training: looks at its state, lines of the log, callbacks, files."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor, nn

from skksivi.parameters import Plateau
from skksivi.training._checkpoint import CheckpointFile
from skksivi.training._loop import CHECK_EVERY, Progress, State


class Verdict(Protocol):
    """What is seen of a state beside its value."""

    @property
    def accepted(self) -> bool: ...


class Watch:
    """Look at a module now and then: remember its best state, and tell when it has stopped improving.

    Parameters
    ----------
    judge : callable
        Gives the value of the module as it stands, smaller is better, and a report whose `accepted` tells whether
        the state may be kept.
    stopping : Plateau or None
        When to stop; None never stops.
    every : int, default=CHECK_EVERY
        Iterations between two looks.
    keeps_best : bool, default=False
        Whether `restore` brings the best state back.
    """

    def __init__(
        self,
        judge: Callable[[nn.Module], tuple[float, Verdict]],
        stopping: Plateau | None,
        every: int = CHECK_EVERY,
        keeps_best: bool = False,
    ) -> None:
        self.judge = judge
        self.every = every
        self.keeps_best = keeps_best
        self.stopping = stopping
        self.at_end = True
        self.values: list[tuple[int, float]] = []
        self.last: Verdict | None = None
        self._best, self._best_iteration, self._last_iteration = math.inf, 0, 0
        self._best_state: dict[str, Tensor] = {}
        self._mark, self._marked_at = math.inf, 0

    def __call__(self, progress: Progress) -> bool:
        """Judge the averaged module; tell whether to stop."""
        with progress.iterate.averaged():
            return self.look(progress.module, progress.n_done)

    def look(self, module: nn.Module, iteration: int) -> bool:
        """Judge the module after `iteration` iterations; tell whether to stop."""
        value, self.last = self.judge(module)
        self.values.append((iteration, value))
        self._last_iteration = iteration
        if self.keeps_best and self.last.accepted and value < self._best:
            self._best, self._best_iteration = value, iteration
            self._best_state = {name: p.detach().clone() for name, p in module.named_parameters()}
        if self.stopping is None:
            return False
        if value < self._mark - self.stopping.tol * abs(self._mark) or math.isinf(self._mark):
            self._mark, self._marked_at = value, iteration
        return iteration - self._marked_at >= self.stopping.patience

    def state(self) -> State:
        """Return what `resume` needs to go on from here."""
        return {name: value for name, value in vars(self).items() if name not in ("judge", "last", "stopping")}

    def resume(self, state: State) -> None:
        """Go on from another's state."""
        vars(self).update(state)

    def restore(self, module: nn.Module) -> int:
        """Bring the best state back; return the iteration it is from."""
        if not self._best_state:
            return self._last_iteration
        module.load_state_dict(self._best_state, strict=False)
        return self._best_iteration


LOGGER = logging.getLogger("skksivi")


#: Iterations from one line of the log to the next.
LOG_EVERY = 500


class Report:
    """A line of the log, and what callbacks see of a fit under way.

    Parameters
    ----------
    max_iter, verbose : int
    tell : callable or None
        Shows callbacks a copy of the module, averaged; tells whether to stop.
    """

    every, at_end = CHECK_EVERY, True

    def __init__(self, max_iter: int, verbose: int, tell: Callable[[nn.Module], bool] | None) -> None:
        self.max_iter = max_iter
        self.verbose = verbose
        self.tell = tell
        self.began = time.monotonic()

    def __call__(self, progress: Progress) -> bool:
        """Log, and ask the callbacks whether to stop."""
        n_done, loss = progress.n_done, progress.loss.item()
        if self.verbose and (n_done % LOG_EVERY == 0 or n_done == self.max_iter or self.verbose > 1):
            seconds = time.monotonic() - self.began
            LOGGER.info("iteration %d of %d, loss %.3g, %.1f s", n_done, self.max_iter, loss, seconds)
        if self.tell is None:
            return False
        with progress.iterate.averaged():
            return self.tell(copy.deepcopy(progress.module).requires_grad_(False))


class Saving:
    """Saves a training in a checkpoint, with where it started and its watch."""

    at_end = False

    def __init__(
        self, checkpoint: CheckpointFile, start: Mapping[str, object], watch: Watch | None, every: int
    ) -> None:
        self.checkpoint = checkpoint
        self.start = start
        self.watch = watch
        self.every = every

    def __call__(self, progress: Progress) -> bool:
        """Write the file."""
        looks = None if self.watch is None else self.watch.state()
        self.checkpoint.save({**self.start, "state": {**progress.state(), "watch": looks}})
        return False
