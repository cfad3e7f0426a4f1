"""An expensive score, whose points are evaluated by several workers."""

from __future__ import annotations

import math
import multiprocessing
import pickle
import textwrap
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from joblib import Parallel, delayed, parallel_config
from joblib.parallel import get_active_backend
from torch import Tensor

from skksivi._utils.arrays import as_array, as_tensor
from skksivi._utils.numbers import check_integer, check_number
from skksivi.score._score import UntriedScore

#: Seconds that workers may take to start, in addition to the time of a chunk.
START = 60.0


class RefusedError(Exception):
    """Holds an error of the score itself, to distinguish it from a failure of a worker."""


class Chunk(NamedTuple):
    """Points X (k, d), from row `first` of n rows on."""

    X: np.ndarray
    first: int
    n: int

    def __str__(self) -> str:
        return f"the chunk of rows {self.first} to {self.first + len(self.X) - 1} of {self.n}"


#: Evaluates the score at the points of a chunk.
Answer = Callable[[Chunk], Tensor | np.ndarray]


@dataclass(eq=False)
class ByWorkers:
    """A score function that hands its points to workers, a chunk at a time.

    Chunks depend on the points alone, so the number of workers does not change any result. See
    `skksivi.targets.from_score_fn` for the parameters.
    """

    score_fn: UntriedScore
    _: KW_ONLY
    n_jobs: int
    backend: str | None
    chunk_size: int
    timeout: float | None
    retries: int
    progress: Callable[[int], object] | None

    def __post_init__(self) -> None:
        if check_integer(self.n_jobs, "n_jobs", min_val=-(2**15)) == 0:
            raise ValueError("`n_jobs` is 0, expected a number of workers, or -1 for one per core.")
        if self.timeout is not None:
            check_number(self.timeout, "timeout", min_val=1e-3, max_val=math.inf)
        if self.progress is not None and not callable(self.progress):
            raise TypeError(f"`progress` must be callable, got a {type(self.progress).__name__}.")
        self.chunk_size = check_integer(self.chunk_size, "chunk_size", min_val=1)
        self.retries = check_integer(self.retries, "retries", min_val=0)
        self._is_warm = False

    def __call__(self, x: Tensor | np.ndarray) -> Tensor | np.ndarray:
        """Evaluate the score at x (n, d): an array, or a tensor without a graph, as the function returns.

        Raises
        ------
        TimeoutError
            A chunk takes too long, each time.
        ConnectionError
            A worker is lost, each time.
        TypeError
            The function cannot be sent to another process, or returns neither a tensor nor an array.
        ValueError
            The scores of a chunk have another shape than its points, or there is no such backend.
        """
        self._parallel()  # raises if there is no such backend
        X = as_array(x)
        chunks = [Chunk(X[k : k + self.chunk_size], k, len(X)) for k in range(0, max(len(X), 1), self.chunk_size)]
        of_tensors = isinstance(x, Tensor)
        answer = partial(_answer, self.score_fn, of_tensors, isinstance(x, Tensor) and x.requires_grad)
        found: list[Tensor | np.ndarray] = []
        try:
            while len(found) < len(chunks):
                try:
                    for s in self._run(answer, chunks[len(found) :]):
                        found.append(s)
                except (RefusedError, pickle.PicklingError):
                    raise
                except Exception as error:  # an error of a worker, perhaps the one of this chunk
                    found.append(self._again(answer, chunks[len(found)], error))
        except RefusedError as refused:
            raise refused.args[0] from None
        except pickle.PicklingError as error:
            raise TypeError(
                f"`score_fn` cannot be sent to another process ({error}); define it in a module, let it load what "
                "cannot be pickled when it is first called, or set backend='threading'."
            ) from error
        if not isinstance(found[0], Tensor):
            return np.concatenate(found)
        return torch.cat([as_tensor(s) for s in found]).to(x.device if isinstance(x, Tensor) else "cpu")

    def _parallel(self, timeout: float | None = None) -> Parallel:
        """Return the object that sends tasks to the workers."""
        with nullcontext() if self.backend is None else parallel_config(self.backend):
            streams = get_active_backend()[0].supports_return_generator  # ray's does not
            return Parallel(self.n_jobs, timeout=timeout, batch_size=1, return_as="generator" if streams else "list")

    def _run(self, answer: Answer, chunks: list[Chunk]) -> Iterator[Tensor | np.ndarray]:
        """Yield the scores of chunks, in their order."""
        seconds = None if self.timeout is None else self.timeout + (0.0 if self._is_warm else START)
        run = self._parallel(seconds)
        self._is_warm = False
        for s in run(delayed(answer)(chunk) for chunk in chunks):
            if self.progress is not None:
                self.progress(len(s))
            yield s
        self._is_warm = True

    def _again(self, answer: Answer, chunk: Chunk, error: Exception) -> Tensor | np.ndarray:
        """Evaluate a chunk alone, after an error of its worker or of another's."""
        for _ in range(self.retries):
            try:
                (s,) = self._run(answer, [chunk])
                return s
            except (RefusedError, pickle.PicklingError):
                raise
            except Exception as last:
                error = last
        times = f"tried {self.retries + 1} times"
        if isinstance(error, TimeoutError | multiprocessing.TimeoutError):
            raise TimeoutError(
                f"`score_fn` did not return within `timeout` = {self.timeout} s for {chunk}, {times}. Raise "
                "`timeout`, or see what the function does at these points."
            ) from error
        raise ConnectionError(
            f"The worker was lost that evaluated `score_fn` for {chunk}{'' if self.retries else ', or another'}, "
            f"{times}; it may have run out of memory. It said: "
            f"{textwrap.shorten(str(error), 200)}"
        ) from error

    def __getstate__(self) -> dict[str, object]:
        """Leave out the workers, which belong to this process."""
        return {**vars(self), "_is_warm": False}


def _answer(score_fn: UntriedScore, of_tensors: bool, needs_graph: bool, chunk: Chunk) -> Tensor | np.ndarray:
    """Return the score at points, or raise RefusedError with the reason."""
    X = chunk.X.copy()  # joblib may have made it read-only
    try:
        with np.errstate(all="ignore"), torch.set_grad_enabled(needs_graph):
            s = score_fn(torch.from_numpy(X).requires_grad_(needs_graph) if of_tensors else X)
        if not isinstance(s, Tensor | np.ndarray):
            raise TypeError(f"`score_fn` returned a {type(s).__name__}, expected a torch tensor or an array.")
        if tuple(s.shape) != X.shape:
            raise ValueError(
                f"`score_fn` returned shape {tuple(s.shape)} for {chunk}, expected {X.shape} as its input."
            )
    except Exception as error:
        error.add_note(f"Raised for {chunk}.")
        raise RefusedError(error) from None
    return s.detach().cpu() if isinstance(s, Tensor) else s
