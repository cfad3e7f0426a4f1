"""Points at which a function raises instead of returning NaN: they count as not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from skksivi._utils.warnings import warn_caller
from skksivi.score._tally import Tally

Result = TypeVar("Result")

#: What a matrix that is not positive definite, a division by zero or a parameter out of its range raises. Numpy's
#: LinAlgError is a ValueError.
REJECTIONS = (ArithmeticError, ValueError, torch.linalg.LinAlgError)


def first_points(n: int, like: Tensor) -> Tensor:
    """Return the n points at which every function is called first, of the features, type and device of x (k, d)."""
    d = like.shape[1]
    return torch.linspace(-1, 1, n * d, dtype=like.dtype, device=like.device).reshape(n, d)


def in_parts(
    f: Callable[[Tensor], Result],
    x: Tensor,
    nothing: Callable[[Tensor], Result],
    tally: Tally,
    again: Callable[[], object] | None = None,
) -> list[Result]:
    """Return f at x (n, d), or f at parts of x and `nothing` at each row where f raises, in the order of the rows.

    Rows are found by halving, each call of which counts. `again` calls f where it was called first, by default at
    `first_points`.

    Raises
    ------
    ArithmeticError, ValueError, torch.linalg.LinAlgError
        f raises at every row, and also where it is called first: it no longer works at all.
    """
    try:
        return [f(x)]
    except REJECTIONS as error:
        reason = f"{type(error).__name__}: {error}"
    n_rejected = 0

    def rejected(row: Tensor) -> list[Result]:
        nonlocal n_rejected
        n_rejected += 1
        return [nothing(row)]

    def halved(part: Tensor) -> list[Result]:
        return rejected(part) if len(part) == 1 else [s for half in part.tensor_split(2) for s in tried(half)]

    def tried(part: Tensor) -> list[Result]:
        tally.add(values=len(part))
        try:
            return [f(part)]
        except REJECTIONS:
            return halved(part)

    parts = halved(x)
    if n_rejected == len(x):
        f(first_points(2, x)) if again is None else again()
    if not tally.n_rejected:
        warn_caller(
            f"The score or log p raised at {n_rejected} of {len(x)} points ({reason}). Points where it raises count "
            "as outside the target, as NaN would. Finding them costs further calls: return NaN there if that is slow."
        )
    tally.n_rejected += n_rejected
    return parts
