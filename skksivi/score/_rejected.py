"""Points at which a function raises instead of returning NaN: they count as not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from skksivi._utils.checks import warn_caller
from skksivi.score._tally import Tally

Result = TypeVar("Result")

#: What a matrix that is not positive definite, a division by zero or a parameter out of its range raises. Numpy's
#: LinAlgError is a ValueError.
REJECTIONS = (ArithmeticError, ValueError, torch.linalg.LinAlgError)

#: What may be the points', as a solver raises RuntimeError, and what never is.
POSSIBLE = (*REJECTIONS, RuntimeError)
NEVER_OF_POINTS = (
    NotImplementedError,
    RecursionError,
    torch.OutOfMemoryError,
    getattr(torch, "AcceleratorError", torch.OutOfMemoryError),  # older ones have a bare RuntimeError for it
)


def first_points(n: int, like: Tensor) -> Tensor:
    """Return the n points at which every function is called first, of the features, type and device of x (k, d)."""
    d = like.shape[1]
    return torch.linspace(-1, 1, n * d, dtype=like.dtype, device=like.device).reshape(n, d)


def in_parts(
    f: Callable[[Tensor], Result],
    x: Tensor,
    nothing: Callable[[Tensor], Result],
    tally: Tally,
    again: Callable[[int], object] | None = None,
) -> list[Result]:
    """Return f at x (n, d), or f at parts of x and `nothing` at each row where f raises, in the order of the rows.

    Rows are found by halving, each call of which counts. `again` calls f with so many rows where it was called first,
    by default at `first_points`. A RuntimeError, as solvers raise it, is the points' where f works there with as many
    rows; else it is a fault of f, as are shapes, types and devices that do not match.

    Raises
    ------
    ArithmeticError, ValueError, torch.linalg.LinAlgError
        f raises at every row, and also where it is called first: it no longer works at all.
    RuntimeError
        f also raises where it is called first.
    """
    try:
        return [f(x)]
    except POSSIBLE as error:
        return _halved(error, f, x, nothing, tally, again)


def _halved(
    error: Exception,
    f: Callable[[Tensor], Result],
    x: Tensor,
    nothing: Callable[[Tensor], Result],
    tally: Tally,
    again: Callable[[int], object] | None,
) -> list[Result]:
    """Return what `in_parts` does where f has raised an error at x (n, d)."""
    n_rejected, sizes = 0, set[int]()
    call_first = again or (lambda n: f(first_points(2, x).repeat(-(-n // 2), 1)[:n]))

    def check(error: Exception, n: int) -> None:
        if isinstance(error, NEVER_OF_POINTS):
            raise error
        if not isinstance(error, REJECTIONS) and n not in sizes:
            tally.add(values=n)
            call_first(n)
            sizes.add(n)

    def halved(part: Tensor) -> list[Result]:
        nonlocal n_rejected
        if len(part) > 1:
            return [s for half in part.tensor_split(2) for s in tried(half)]
        n_rejected += 1
        return [nothing(part)]

    def tried(part: Tensor) -> list[Result]:
        tally.add(values=len(part))
        try:
            return [f(part)]
        except POSSIBLE as error:
            check(error, len(part))
            return halved(part)

    check(error, len(x))
    parts = halved(x)
    if n_rejected == len(x):
        call_first(2)
    if not tally.n_rejected:
        warn_caller(
            f"The score or log p raised at {n_rejected} of {len(x)} points ({type(error).__name__}: {error}). Points "
            "where it raises count as outside the target, as NaN would. Finding them costs further calls: return NaN "
            "there if that is slow."
        )
    tally.n_rejected += n_rejected
    return parts
