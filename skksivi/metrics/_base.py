"""What metrics share: two samples that fit together, and means over pairs of rows, a block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import reduce

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils import check_array
from torch import Tensor

#: Rows and columns of a block of pairs: its temporaries stay in a processor's cache.
TILE = 256

#: Maps slices of rows and of columns to this block of a matrix.
Matrix = Callable[[slice, slice], Tensor]


def check_pair(X: ArrayLike, Y: ArrayLike, *, min_samples: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return two samples as finite float64 arrays with the same number of columns."""
    X = check_array(X, dtype=np.float64, ensure_min_samples=min_samples, input_name="X")
    Y = check_array(Y, dtype=np.float64, ensure_min_samples=min_samples, input_name="Y")
    if X.shape[1] != Y.shape[1]:
        raise ValueError(f"`X` has {X.shape[1]} columns and `Y` has {Y.shape[1]}; they must agree.")
    return X, Y


def check_statistic(statistic: str) -> None:
    """Raise unless `statistic` names a mean over pairs."""
    if statistic not in ("u", "v"):
        raise ValueError(f"`statistic` must be 'u' or 'v', got {statistic!r}.")


def tiles(n: int) -> list[slice]:
    """Cut n rows."""
    return [slice(start, start + TILE) for start in range(0, n, TILE)]


def upper_blocks(matrix: Matrix, n: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield rows, columns and the block there of a matrix (n, n), less its diagonal and what is below."""
    rows = tiles(n)
    for k, i in enumerate(rows):
        yield i, i, matrix(i, i).triu(1)
        for j in rows[k + 1 :]:
            yield i, j, matrix(i, j)


def mean_within(matrix: Matrix, n: int, trace: Tensor | None = None) -> Tensor:
    """Return the mean of a symmetric matrix (n, n) of this trace, or that of its entries off the diagonal."""
    off_diagonal = 2 * total(block.sum() for _, _, block in upper_blocks(matrix, n))
    return off_diagonal / (n * (n - 1)) if trace is None else (off_diagonal + trace) / n**2


def mean_between(matrix: Matrix, n: int, m: int) -> Tensor:
    """Return the mean of a matrix (n, m)."""
    return total(matrix(i, j).sum() for i in tiles(n) for j in tiles(m)) / (n * m)


def total(terms: Iterable[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape, one in memory at a time."""
    return reduce(torch.add, terms)
