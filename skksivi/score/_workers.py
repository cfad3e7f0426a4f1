"""An expensive score, whose points are evaluated by several workers."""

from __future__ import annotations

import math
import multiprocessing
import pickle
import textwrap
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from joblib import Parallel, delayed, parallel_config
from torch import Tensor

from skksivi._utils.arrays import as_array, as_tensor
from skksivi._utils.checks import check_integer, check_number
from skksivi.score._score import UntriedScore


class RefusedError(Exception):
    """Holds an error of the score itself, to distinguish it from a failure of a worker."""


class Chunk(NamedTuple):
    """Points X (k, d), from row `first` of n rows on."""

    X: np.ndarray
    first: int
    n: int

    def __str__(self) -> str:
        return f"the chunk of rows {self.first} to {self.first + len(self.X) - 1} of {self.n}"


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

    def __post_init__(self) -> None:
        if check_integer(self.n_jobs, "n_jobs", min_val=-(2**15)) == 0:
            raise ValueError("`n_jobs` is 0, expected a number of workers, or -1 for one per core.")
        if self.timeout is not None:
            check_number(self.timeout, "timeout", min_val=1e-3, max_val=math.inf)
        self.chunk_size = check_integer(self.chunk_size, "chunk_size", min_val=1)

    def __call__(self, x: Tensor | np.ndarray) -> Tensor | np.ndarray:
        """Evaluate the score at x (n, d): an array, or a tensor without a graph, as the function returns.

        Raises
        ------
        TimeoutError
            A chunk takes too long.
        ConnectionError
            A worker is lost.
        TypeError
            The function cannot be sent to another process, or returns neither a tensor nor an array.
        ValueError
            The scores of a chunk have another shape than its points, or there is no such backend.
        """
        with nullcontext() if self.backend is None else parallel_config(self.backend):
            run = Parallel(self.n_jobs, timeout=self.timeout, batch_size=1)  # raises if there is no such backend
        X, needs_graph = as_array(x), isinstance(x, Tensor) and x.requires_grad
        chunks = [Chunk(X[k : k + self.chunk_size], k, len(X)) for k in range(0, max(len(X), 1), self.chunk_size)]
        answer = delayed(partial(_answer, self.score_fn, isinstance(x, Tensor), needs_graph))
        try:
            found = run(answer(chunk) for chunk in chunks)
        except RefusedError as refused:
            raise refused.args[0] from None
        except pickle.PicklingError as error:
            raise TypeError(
                f"`score_fn` cannot be sent to another process ({error}); define it in a module, let it load what "
                "cannot be pickled when it is first called, or set backend='threading'."
            ) from error
        except (TimeoutError, multiprocessing.TimeoutError) as error:
            raise TimeoutError(
                f"`score_fn` did not return within `timeout` = {self.timeout} s for a chunk of "
                f"{self.chunk_size} rows; raise it, or see what the function does at these points."
            ) from error
        except Exception as error:  # of any backend
            raise ConnectionError(
                "A worker that evaluated `score_fn` was lost; it may have run out of memory. It said: "
                f"{textwrap.shorten(str(error), 200)}"
            ) from error
        if not isinstance(found[0], Tensor):
            return np.concatenate(found)
        return torch.cat([as_tensor(s) for s in found]).to(x.device if isinstance(x, Tensor) else "cpu")


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
