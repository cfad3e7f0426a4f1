"""What is done every so often in a training: lines of the log, callbacks, files."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from skksivi._checkpoint import Checkpoint
from skksivi._moments import MomentPenalty
from skksivi._samplers import Fit, Sampler, Tell
from skksivi._training import CHECK_EVERY, Progress, Watch
from skksivi._whitening import Whitening

LOGGER = logging.getLogger("skksivi")

#: Iterations from one line of the log to the next.
LOG_EVERY = 500


class Start(NamedTuple):
    """Where a training starts: coordinates, a family in them, what ties it to a pilot, and the seed of its noise."""

    whitening: Whitening
    family: Any
    penalty: MomentPenalty | None
    seed: int


class Report:
    """A line of the log, and what callbacks see of a fit under way.

    Parameters
    ----------
    max_iter, verbose : int
    sampler_of : callable
        Maps a family to what draws by it.
    tell : callable or None
        Shows callbacks a fit.
    """

    every, at_end = CHECK_EVERY, True

    def __init__(self, max_iter: int, verbose: int, sampler_of: Callable[[Any], Sampler], tell: Tell | None) -> None:
        self.max_iter = max_iter
        self.verbose = verbose
        self.sampler_of = sampler_of
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
            family = copy.deepcopy(progress.module).requires_grad_(False)
            return self.tell(Fit(self.sampler_of(family), {}))


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
