"""What is done every so often in a training: lines of the log, callbacks, files."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import nn

from skksivi.training._checkpoint import CheckpointFile
from skksivi.training._guard import Watch
from skksivi.training._loop import CHECK_EVERY, Progress, State

T = TypeVar("T")


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


#: What is saved of a watch where there is none.
UNWATCHED: State = {"looks": None, "best_iteration": None, "best": None}


class Saving(Generic[T]):
    """Saves a training in a checkpoint.

    Parameters
    ----------
    checkpoint : CheckpointFile
    describe : callable
        Returns what the file is to hold of a state of the training and its watch.
    watch : Watch or None
    every : int
        Iterations from one save to the next.
    """

    at_end = False

    def __init__(
        self, checkpoint: CheckpointFile[T], describe: Callable[[State], T], watch: Watch | None, every: int
    ) -> None:
        self.checkpoint = checkpoint
        self.describe = describe
        self.watch = watch
        self.every = every

    def __call__(self, progress: Progress) -> bool:
        """Write the file."""
        watched = UNWATCHED if self.watch is None else self.watch.state()
        self.checkpoint.save(self.describe({**progress.state(), **watched}))
        return False
