"""Contexts: what a family is conditioned on, rows of one length or sets of several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from skksivi._arrays import as_array, as_numbers, as_tensor

#: Contexts: rows (m, c), or m sets of shape (n_i, c).
Rows = Tensor | list[Tensor]

#: Contexts that are read from a loader, at most.
MOST_READ = 100_000


def take(y: Rows, index: Tensor) -> Rows:
    """Return some of the contexts."""
    return y[index] if isinstance(y, Tensor) else [y[i] for i in index.tolist()]


def joined(y: Rows, other: Rows) -> Rows:
    """Return contexts and others after them."""
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


def all_equal(y: Rows) -> bool:
    """Tell whether all contexts are the same."""
    if isinstance(y, Tensor):
        return bool((y == y[:1]).all())
    return all(row.equal(y[0]) for row in y)


def simulated(
    contexts: Any,  # noqa: ANN401
    parameters: ArrayLike | None,
    n: int,
    rng: np.random.RandomState,
) -> tuple[Any, Any]:
    """Return contexts and parameters: as they are given, of a function by n simulations, of a loader as they come.

    Raises
    ------
    ValueError
        Parameters come both from the function and by themselves, or the loader is empty.
    """
    if callable(contexts):
        made = contexts(n, rng)
        if not isinstance(made, tuple):
            return made, parameters
        if len(made) != 2 or parameters is not None:
            raise ValueError(
                "`contexts` returned a tuple, expected a pair (parameters, contexts), and no `parameters` beside it."
            )
        return made[1], made[0]
    if _is_loader(contexts):
        return _read(contexts), parameters
    return contexts, parameters


def _is_loader(contexts: object) -> bool:
    """Tell whether these come a batch at a time: no array, nor a sequence of rows or sets."""
    return isinstance(contexts, Iterable) and not (hasattr(contexts, "__array__") or isinstance(contexts, Sequence))


def _read(loader: Iterable[Any]) -> np.ndarray:
    batches, n = [], 0
    for batch in loader:
        rows = batch[0] if isinstance(batch, tuple | list) and hasattr(batch[0], "__array__") else batch
        batches.append(as_numbers(rows, "contexts"))
        n += len(batches[-1])
        if n >= MOST_READ:
            break
    if not batches:
        raise ValueError("`contexts` is a loader without batches, expected some of shape (n, c).")
    return np.concatenate(batches)


def as_contexts(contexts: Any, device: torch.device, *, sets: bool, name: str = "contexts") -> Rows:  # noqa: ANN401
    """Return contexts as float64.

    Parameters
    ----------
    contexts : array-like of shape (m, c) or, with `sets`, also a list of m arrays of shape (n_i, c)
    device : torch.device
    sets : bool
    name : str
        Of the parameter, for errors.

    Raises
    ------
    TypeError
        They do not hold real numbers.
    ValueError
        They are of another shape, none, or not finite.
    """
    if sets and isinstance(contexts, list | tuple):
        found: Rows = [_checked(as_numbers(row, name), device, f"{name}[{i}]") for i, row in enumerate(contexts)]
        if len({row.shape[1] for row in found}) > 1:
            raise ValueError(f"`{name}` holds sets of rows of several lengths, expected arrays of shape (n_i, c).")
    else:
        found = _checked(as_numbers(contexts, name), device, name)
    if not len(found):
        raise ValueError(f"`{name}` is empty, expected at least one row.")
    return found


def _checked(Y: np.ndarray, device: torch.device, name: str) -> Tensor:
    """Return rows (m, c) as a tensor, if they are finite."""
    if Y.ndim != 2 or Y.shape[1] == 0:
        raise ValueError(
            f"`{name}` has shape {Y.shape}, expected (m, c), a row for each data set; of one number each, "
            "reshape(-1, 1)."
        )
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


def given(y: Rows, points: object) -> Any:  # noqa: ANN401
    """Return contexts as a function takes them that is given such points, arrays or tensors."""
    if isinstance(points, Tensor):
        return y.to(points) if isinstance(y, Tensor) else [row.to(points) for row in y]
    return as_array(y) if isinstance(y, Tensor) else [as_array(row) for row in y]


ScoreOfPairs = Callable[[Any, Any], Any]
