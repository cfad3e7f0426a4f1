"""Contexts: what a family is conditioned on, rows of one length or sets of several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from skksivi._utils.arrays import as_array, as_numbers, as_tensor

#: What gives contexts: an array, or sets; a function of a number; a loader of batches.
Source = ArrayLike | Callable[[int, np.random.RandomState], ArrayLike] | Iterable[ArrayLike]

#: Contexts: rows (m, c), or m sets of shape (n_i, c).
Rows = Tensor | list[Tensor]


def take(y: Rows, index: Tensor) -> Rows:
    return y[index] if isinstance(y, Tensor) else [y[i] for i in index.tolist()]


def joined(y: Rows, other: Rows) -> Rows:
    return torch.cat([y, other]) if isinstance(y, Tensor) and isinstance(other, Tensor) else [*y, *other]


def repeated(y: Rows, n: int) -> Rows:
    """Return each context n times, one after the other."""
    return y.repeat_interleave(n, 0) if isinstance(y, Tensor) else [row for row in y for _ in range(n)]


def tiled(y: Rows, n: int) -> Rows:
    """Return all contexts n times."""
    return y.repeat(n, 1) if isinstance(y, Tensor) else y * n


def parts(y: Rows, n: int = 4096) -> Iterator[Rows]:
    """Return n contexts at a time."""
    return (y[start : start + n] for start in range(0, len(y), n))


def n_repeated(y: Rows) -> int:
    """Return how often the data set occurs that occurs most often."""
    return max(Counter((as_array(row) + 0.0).tobytes() for row in y).values())  # 0.0 as -0.0


def simulated(
    contexts: Any,  # noqa: ANN401
    parameters: ArrayLike | None,
    n: int,
    rng: np.random.RandomState,
    *,
    sets: bool,
) -> tuple[ArrayLike, ArrayLike | None]:
    """Return contexts and parameters: as they are given, of a function by n simulations, of a loader as they come.

    Raises
    ------
    ValueError
        Parameters come both from the function or loader and by themselves, or the loader is empty.
    """
    if callable(contexts):
        made, own = _pair(contexts(n, rng))
    elif _is_loader(contexts):
        made, own = _read(contexts, sets)
    else:
        return contexts, parameters
    if own is not None and parameters is not None:
        raise ValueError("`contexts` returned a pair (parameters, contexts), expected no `parameters` beside it.")
    return made, parameters if own is None else own


def _pair(made: ArrayLike) -> tuple[ArrayLike, ArrayLike | None]:
    """Return contexts and parameters of a pair (parameters, contexts), or contexts alone."""
    if not isinstance(made, tuple):
        return made, None
    if len(made) not in (1, 2):
        raise ValueError(
            f"`contexts` returned a tuple of {len(made)}, expected contexts or a pair (parameters, contexts)."
        )
    return made[-1], made[0] if len(made) == 2 else None


def _is_loader(contexts: Source) -> bool:
    """Tell whether these come a batch at a time: no array, nor a sequence of rows or sets."""
    return isinstance(contexts, Iterable) and not (hasattr(contexts, "__array__") or isinstance(contexts, Sequence))


def _read(loader: Iterable[Any], sets: bool) -> tuple[ArrayLike, ArrayLike | None]:
    """Return the contexts of a loader, and their parameters or None."""
    contexts: list[np.ndarray] = []
    parameters: list[np.ndarray] = []
    for batch in loader:
        # a list of arrays for many data sets, as of a `TensorDataset`, and not one of rows
        has_fields = not sets and isinstance(batch, list) and all(getattr(field, "ndim", 0) > 1 for field in batch)
        made, own = _pair(tuple(batch) if has_fields else batch)
        contexts.extend(made if isinstance(made, list) else as_array(made))
        parameters.extend([] if own is None else as_array(own))
        if len(contexts) >= 100_000:  # enough, also of a loader without an end
            break
    if not contexts:
        raise ValueError("`contexts` is a loader without batches, expected some of shape (n, c).")
    return contexts, parameters or None


def as_contexts(contexts: Any, device: torch.device, *, sets: bool) -> Rows:  # noqa: ANN401
    """Return contexts as float64.

    Parameters
    ----------
    contexts : array-like of shape (m, c) or, with `sets`, m arrays of shape (n_i, c)
    device : torch.device
    sets : bool

    Raises
    ------
    TypeError
        They do not hold real numbers.
    ValueError
        They are of another shape, none, or not finite.
    """
    if sets:
        found: Rows = [
            _checked(as_numbers(row, "contexts"), device, f"contexts[{i}]") for i, row in enumerate(contexts)
        ]
        if len({row.shape[1] for row in found}) > 1:
            raise ValueError("`contexts` holds sets of rows of several lengths, expected arrays of shape (n_i, c).")
        return found
    if isinstance(contexts, list | tuple) and len({np.shape(row) for row in contexts}) > 1:
        raise ValueError(
            "`contexts` holds data sets of different sizes, which need a `summary`, such as "
            "skksivi.amortized.DeepSets."
        )
    return _checked(as_numbers(contexts, "contexts"), device, "contexts")


def is_of_sets(contexts: ArrayLike) -> bool:
    """Tell whether these are sets of rows: an array of three dimensions, or a list of some of two."""
    if isinstance(contexts, list | tuple):
        return len(contexts) > 0 and np.ndim(contexts[0]) == 2
    return np.ndim(contexts) == 3


def _checked(Y: np.ndarray, device: torch.device, name: str) -> Tensor:
    """Return rows (m, c) as a tensor, if they are finite."""
    if Y.ndim != 2 or Y.shape[1] == 0:
        raise ValueError(
            f"`{name}` has shape {Y.shape}, expected (m, c), a row for each data set; of one number each, "
            "reshape(-1, 1)."
        )
    if not len(Y):
        raise ValueError(f"`{name}` is empty, expected at least one row.")
    if n_bad := int((~np.isfinite(Y).all(1)).sum()):
        raise ValueError(f"`{name}` has {n_bad} rows that are not finite; leave them out.")
    return as_tensor(Y, dtype=torch.float64, device=device)


def as_rows(value: ArrayLike, n: int, d: int, device: torch.device, name: str) -> Tensor:
    """Return finite float64 rows of shape (n, d); raise ValueError for others."""
    X = as_numbers(value, name)
    if X.shape != (n, d) or not np.isfinite(X).all():
        fact = f"has shape {X.shape}" if X.shape != (n, d) else "holds numbers that are not finite"
        raise ValueError(f"`{name}` {fact}, expected finite numbers of shape {(n, d)}, a row for each context.")
    return as_tensor(X, dtype=torch.float64, device=device)


def given(y: Rows, points: object) -> Rows | np.ndarray | list[np.ndarray]:
    """Return contexts as a function takes them that is given such points, arrays or tensors."""
    if isinstance(points, Tensor):
        return y.to(points) if isinstance(y, Tensor) else [row.to(points) for row in y]
    return as_array(y) if isinstance(y, Tensor) else [as_array(row) for row in y]


ScoreOfPairs = Callable[[Any, Any], Any]
