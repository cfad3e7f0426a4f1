"""What is done every so often in a training: lines of the log, callbacks, files."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping

from torch import nn

from skksivi.training._checkpoint import CheckpointFile
from skksivi.training._guard import Watch
from skksivi.training._loop import CHECK_EVERY, Progress

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
