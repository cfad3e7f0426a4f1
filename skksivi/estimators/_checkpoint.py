"""Interrupted fits that resume as if nothing had happened."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator

from skksivi._utils.checks import warn_caller
from skksivi._utils.codec import Kind, Kinds, kind_of, pack, read, unpack, write
from skksivi.coordinates._affine import Affine, Identity, LowRank
from skksivi.coordinates._marginals import Marginals, Quantiles
from skksivi.coordinates._warp import Level, Warp
from skksivi.coordinates._whitening import Attempt, Whitening
from skksivi.estimators._fingerprint import answers_at, fingerprint
from skksivi.estimators._start import Past, Start
from skksivi.estimators._trained import F
from skksivi.families._hierarchy import Hierarchy
from skksivi.families._layer import Constant, LinearSkip, MultilayerPerceptron, Residual, SemiImplicit
from skksivi.judge import Errors, Grade, Verdict
from skksivi.mixing import AtomDraws, Bootstrap, GaussianMixtureDraws, NormalDraws, StudentTDraws
from skksivi.parameters import Checkpoint, checked_object
from skksivi.score._score import DifferentiableScore, Score
from skksivi.stein._path import Memory
from skksivi.training._guard import MomentPenalty, Moments, Watch
from skksivi.training._loop import Hook, Progress, State

#: The classes of what a fit consists of, by their names in files.
PARTS: Kinds = {
    "Grade": Kind(Grade, lambda grade: {"value": int(grade)}, Grade),
    **{
        cls.__name__: kind_of(cls)
        for cls in (
            *(Affine, Identity, LowRank, Quantiles, Marginals, Level, Warp, Attempt, Whitening),
            *(NormalDraws, StudentTDraws, GaussianMixtureDraws, Bootstrap, AtomDraws),
            *(Constant, MultilayerPerceptron, LinearSkip, Residual, SemiImplicit, Hierarchy),
            *(Moments, MomentPenalty, Memory, Past, Start),
            *(Errors, Verdict),
        )
    },
}


class NoCheckpoint:
    """A fit that is not saved.

    Attributes
    ----------
    start : Start or None
        Where the interrupted fit that this one continues has started.
    state : dict or None
        The state of its training.
    """

    start: Start[Any] | None = None
    state: State | None = None

    def resume(self, score_u: DifferentiableScore, watches: list[Watch]) -> None:
        """Set minibatches and comparisons of states to those of the interrupted training."""
        n_done = 0 if self.state is None else len(self.state["losses"])
        if score_u.rewind is not None:
            score_u.rewind(2 * n_done)  # one for each half of the draws
        if self.state is not None:
            for watch in watches:
                watch.resume(self.state)

    def hooks(self, start: Start[F], watches: list[Watch]) -> list[Hook]:
        """Return the hooks that save a training."""
        return []

    def finish(self, remove: bool) -> None:
        """Remove the file of a completed fit, and warn if it could not be written."""


class SavedFit(NoCheckpoint):
    """A fit that is saved periodically.

    Parameters
    ----------
    given : Checkpoint
    fit : str
        Identifies the fit.
    score : Score
    writes : bool
        With several ranks only one writes.
    """

    def __init__(self, given: Checkpoint, fit: str, score: Score, *, writes: bool) -> None:
        self.every, self.fit, self.writes = given.every, fit, writes
        self.named, self.failure, self.is_ours = f"`checkpoint` {str(given.path)!r}", "", False
        try:
            self.path = Path(os.path.realpath(given.path))
            if self.path.is_dir():
                self.path /= f"{fit[:16]}.ckpt"
            if writes:  # a trial beside the file
                write(self.path.with_name(self.path.name + ".tmp"), b"")
                self.path.with_name(self.path.name + ".tmp").unlink()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", error)
            raise ValueError(
                f"{self.named} cannot be written ({why}); name a file in a folder that exists and is writable."
            ) from error
        if self.path.exists():
            self._resume(score)

    def _resume(self, score: Score) -> None:
        def content(of_file: bytes) -> tuple[str, Start[Any], State]:
            found: Any = unpack(of_file, PARTS, lambda _: score.device)
            if not isinstance(found["start"], Start):
                raise ValueError("it holds no interrupted fit")
            return found["fit"], found["start"], found["state"]

        fit, start, self.state = read(
            self.path,
            content,
            self.named,
            writer="a fit; name another file",
            remedy=" Remove it, or name another.",
        )
        near = answers_at(score, start.whitening)
        if fit != self.fit or near != start.answers:
            raise ValueError(
                f"{self.named} is of another fit: settings or score differ. Set them back, remove the file or name "
                "another; in an existing folder each fit has its own file."
            )
        self.start, self.is_ours = start, self.writes

    def hooks(self, start: Start[F], watches: list[Watch]) -> list[Hook]:
        return [Saving(self, start, watches)] if self.writes else []

    def save(self, start: Start[F], state: State) -> None:
        """Write the file or, where the disk does not let it, say so when the fit ends."""
        try:
            write(self.path, pack({"fit": self.fit, "start": start, "state": dict(state)}, PARTS))
            self.is_ours = True
        except (OSError, MemoryError, ValueError) as error:
            self.failure = (
                f"{self.named} could not be written every time ({error!r}), so that a kill would have cost what was "
                "learned since; make room, or name a file elsewhere."
            )

    def finish(self, remove: bool) -> None:
        if remove and self.is_ours:
            with suppress(OSError):  # in a folder that is not there any more
                self.path.unlink()
        if self.failure:
            warn_caller(self.failure)


class Saving:
    at_end = False

    def __init__(self, saved: SavedFit, start: Start[Any], watches: list[Watch]) -> None:
        self.saved, self.start, self.watches, self.every = saved, start, watches, saved.every

    def __call__(self, progress: Progress) -> bool:
        unwatched: State = {"looks": None, "best_iteration": None, "best": None}
        watched = next((watch.state() for watch in self.watches), unwatched)
        self.saved.save(self.start, {**progress.state(), **watched})
        return False


def check_checkpoint(est: BaseEstimator) -> None:
    """Raise for a checkpoint of an estimator with parameters that do not allow one."""
    if est.checkpoint is None:
        return
    checked_object(Checkpoint, est.checkpoint)
    if est.warm_start:
        raise ValueError("`checkpoint` continues a fit by itself; set warm_start=False.")
    if not (isinstance(est.mixing, str) or type(est.mixing).__module__ == NormalDraws.__module__):
        raise ValueError(
            "`checkpoint` cannot store a function or your own object as `mixing`; use one of skksivi.mixing."
        )


@contextmanager
def saved_fit(
    est: BaseEstimator, score: Score, generator: torch.Generator, near: ArrayLike | None
) -> Iterator[NoCheckpoint]:
    """Yield where a fit of an estimator is saved, and what an interrupted one has left there.

    Parameters
    ----------
    est : KSIVIApproximator or HKSIVIApproximator
    score : Score
    generator : torch.Generator
        Starts at the seed of the interrupted fit, if there is one.
    near : array-like or None
        Points near the target.

    Raises
    ------
    ValueError
        The file cannot be written, is damaged or of another fit, or the fit cannot be identified.
    OSError, MemoryError
        The file cannot be read, although it may be intact.
    """
    if est.checkpoint is None:
        yield NoCheckpoint()
        return
    draws_seed = est.random_state is None and not score.replicate  # which a resumed fit takes from the file
    fit = fingerprint(est, score, -1 if draws_seed else generator.initial_seed(), near)
    saved = SavedFit(checked_object(Checkpoint, est.checkpoint), fit, score, writes=not score.rank)
    if saved.start is not None:
        generator.manual_seed(saved.start.seed)
    try:
        yield saved
    except BaseException as error:
        if saved.failure:
            error.add_note(saved.failure)
        raise
