"""A training in a file, whole or not there: a fit with the same settings and the same score goes on with it.

What must be the same has one hash: of numbers bit by bit, of functions by their values where a fit evaluates them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import joblib
import torch
from sklearn.base import BaseEstimator

from skksivi._utils import __version__
from skksivi._utils.arrays import as_array
from skksivi._utils.checks import warn_caller
from skksivi._utils.codec import is_known, pack, read, unpack, write
from skksivi.estimators._start import Start, answers_at, known, normal_points
from skksivi.kernels import Kernel, resolve_kernel
from skksivi.parameters import Checkpoint, checked_object
from skksivi.score._memory import Memory
from skksivi.score._score import DifferentiableScore, Score
from skksivi.terms import Draws
from skksivi.training._guard import Watch
from skksivi.training._loop import Hook, Progress, State

#: Parameters in which a fit may differ from the one that it continues; seed and device are treated separately.
FREE = {"checkpoint", "device", "random_state", "verbose", "warm_start"}

#: Scales of the points at which a score is evaluated, and where functions of progress are.
SCALES, GRID = (0.01, 0.1, 1.0, 10.0, 100.0), [i / 100 for i in range(100)]


class Saved:
    """The file of a training, written at intervals and removed after it; at an interval of zero nothing is saved.

    Attributes
    ----------
    start : Start or None
        Where the interrupted fit that this one continues has started.
    state : dict or None
        The state of its training.
    scores : Path
        The file of the scores before the training.
    memory : Memory or None
        What is in it.
    """

    at_end = False

    def __init__(self, path: Path = Path(), every: int = 0, fit: str = "") -> None:
        self.path, self.every, self.fit, self.scores = path, every, fit, Path(f"{path}.scores")
        self.start: Start[Any] | None = None
        self.state: State | None = None
        self.memory: Memory | None = None
        self.has_failed = False

    def remembering(self, score: Score) -> Score:
        """Return the score as it is asked before the training, of which no kill loses a value."""
        return score if self.memory is None else self.memory.of(score)

    def read(self, score: Score) -> None:
        """Read the file of an interrupted fit.

        Raises
        ------
        ValueError
            It is damaged, or its hash is another one.
        """

        def take(content: bytes) -> tuple[str, Start[Any], State]:
            found = unpack(content, lambda _: score.device)
            if not (isinstance(found, dict) and isinstance(found.get("start"), Start)):
                raise ValueError("it holds no interrupted fit")
            found["start"].family.requires_grad_()
            return found["hash"], found["start"], found["state"]

        named = f"`checkpoint` {str(self.path)!r}"
        found, self.start, self.state = read(self.path, take, named, remedy=" Remove it, or name another.")
        if found != joblib.hash([self.fit, answers_at(score, self.start.whitening)]):
            raise ValueError(
                f"{named} is of another fit: settings or score differ. Set them back, remove the file or name "
                "another; in an existing folder each fit has its own file."
            )

    def resume(self, score_u: DifferentiableScore, watches: list[Watch]) -> None:
        """Set minibatches and comparisons of states to those of the interrupted training."""
        n_done = 0 if self.state is None else len(self.state["losses"])
        if score_u.rewind is not None:
            score_u.rewind(2 * n_done)  # one for each half of the draws
        if self.state is not None:
            for watch in watches:
                watch.resume(self.state)

    def hooks(self, start: Start[Any], watches: list[Watch]) -> list[Hook]:
        """Return the hooks that save a training."""
        self.parts = {"hash": joblib.hash([self.fit, start.answers]), "start": start}
        self.watches = watches
        return [self] if self.every else []

    def __call__(self, progress: Progress) -> bool:
        """Write the file or, where the disk does not let it, say so once."""
        watched: State = self.watches[0].state() if self.watches else {}
        try:
            write(self.path, pack({**self.parts, "state": {**progress.state(), **watched}}))
            self.scores.unlink(missing_ok=True)  # what is there now has the start
        except (OSError, MemoryError, ValueError) as error:
            if not self.has_failed:
                warn_caller(
                    f"`checkpoint` {str(self.path)!r} could not be written ({error!r}), so that a kill would cost "
                    "what was learned since; make room, or name a file elsewhere."
                )
            self.has_failed = True
        return False

    def finish(self, remove: bool) -> None:
        """Remove the file of a completed fit."""
        if remove and self.every:
            with suppress(OSError):  # in a folder that is not there any more
                for path in (self.path, self.scores):
                    path.unlink(missing_ok=True)


def check_checkpoint(est: BaseEstimator) -> None:
    """Raise for a checkpoint of an estimator with parameters that do not allow one."""
    if est.checkpoint is None:
        return
    checked_object(Checkpoint, est.checkpoint)
    if est.warm_start or not is_known(est.mixing):
        raise ValueError(
            "`checkpoint` continues a fit by itself, and cannot store a function or your own object as `mixing`; set "
            "warm_start=False, and use one of skksivi.mixing."
        )


def saved_fit(est: BaseEstimator, score: Score, generator: torch.Generator) -> Saved:
    """Return where the training of an estimator is saved, and what an interrupted one has left there.

    Parameters
    ----------
    est : KSIVIApproximator or HKSIVIApproximator
    score : Score
    generator : torch.Generator
        Starts at the seed of the interrupted fit, if there is one.

    Raises
    ------
    ValueError
        The file cannot be written, is damaged or of another fit, or the fit cannot be identified.
    OSError, MemoryError
        The file cannot be read, although it may be intact.
    """
    if est.checkpoint is None:
        return Saved()
    given = checked_object(Checkpoint, est.checkpoint)
    draws_seed = est.random_state is None and not score.replicate  # which a resumed fit takes from the file
    fit = fingerprint(est, score, -1 if draws_seed else generator.initial_seed())
    try:
        path = Path(os.path.realpath(given.path))
        path = path / f"{fit[:16]}.ckpt" if path.is_dir() else path
        found = path.exists()
        if not score.rank:  # of several ranks only one writes
            TemporaryFile(dir=path.parent).close()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`checkpoint` {str(given.path)!r} cannot be written ({getattr(error, 'strerror', error)}); name a file "
            "in a folder that exists and is writable."
        ) from error
    saved = Saved(path, 0 if score.rank else given.every, fit)
    if found:
        saved.read(score)
    if saved.start is not None:
        generator.manual_seed(saved.start.seed)
    elif saved.every and not draws_seed and score.minibatch is None and score.rank is None:
        saved.memory = Memory(saved.scores, fit, "checkpoint")
    return saved


# What identifies a fit


def fingerprint(est: BaseEstimator, score: Score, seed: int) -> str:
    """Return a hash of what a fit must share with the one that it continues.

    Raises
    ------
    ValueError
        The hash is another one when it is computed again.
    """
    first, again = (joblib.hash(list(_facts(est, score, seed))) for _ in range(2))
    if first != again:
        raise ValueError(
            "`checkpoint` cannot identify this fit: `score_fn`, or a function among the parameters, does not return "
            "the same for the same input. Make it do so, or leave `checkpoint` out."
        )
    return first


def _facts(est: BaseEstimator, score: Score, seed: int) -> Iterator[object]:
    """Yield settings, then values at random points of several scales: of the score, the kernel and the terms."""
    settings = {name: value for name, value in est.get_params(deep=False).items() if name not in FREE}
    yield __version__, score.device.type, score.n_features, seed, score.by_differences, described(settings)
    z, double = normal_points(score), score.double
    x = z * z.new_tensor(SCALES).repeat(len(z) // len(SCALES))[:, None]
    asked = double
    if double.rewind is not None:  # a whole stream is compared near the fit
        asked = double.sketch()
        double.rewind(0)
    yield known(asked(x), score), known(asked.product(x, x.flip(0)), score)
    if double.minibatch is not None:
        yield known(double.minibatch(torch.Generator(score.device).manual_seed(0))(x), score)
    with torch.no_grad():
        if double.log_prob is not None:
            with suppress(Exception):  # fits that need the value report the error
                yield known(double.log_prob(x), score)
        yield as_array(resolve_kernel(est.kernel)(x, z.flip(0)))
        z = z.to(score.dtype)
        draws = Draws(z, score(z))
        yield [as_array(term.gradient(draws, z.new_ones(()))) for term in settings.get("terms", ())]


def described(value: object) -> object:
    """Return what is hashed of a setting: of an object class and parameters, of a function of progress its values."""
    if isinstance(value, dict):
        return {name: described(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [described(item) for item in value]
    values = [described(value(t)) for t in GRID] if callable(value) and not isinstance(value, Kernel) else []
    if isinstance(value, BaseEstimator):
        return [type(value).__module__, type(value).__qualname__, described(value.get_params(deep=False)), values]
    return values or (as_array(value) if isinstance(value, torch.Tensor) else value)
