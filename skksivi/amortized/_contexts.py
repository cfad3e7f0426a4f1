"""Contexts: what a family is conditioned on, rows of one length or sets of several, and pairs of
parameters and data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from skksivi._utils.arrays import as_array, as_numbers, as_tensor
from skksivi.score import (
    REJECTIONS,
    BudgetError,
    Score,
    ScoreFunction,
    Tally,
    choose_product,
    first_points,
    in_parts,
    probe,
)

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


# Pairs of parameters and data


class PairedScore:
    """A score of pairs that was probed.

    Parameters
    ----------
    score_fn : callable
        Maps x (n, d) and n contexts to (n, d).
    n_features : int
    y : Rows
        The contexts of the training, by which it is probed.
    device : torch.device
    """

    def __init__(self, score_fn: ScoreOfPairs, n_features: int, y: Rows, device: torch.device) -> None:
        self.score_fn = score_fn
        points = torch.randn(2, n_features, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        compared = take(y, torch.linspace(0, len(y) - 1, min(4, len(y))).long())
        self.template, _ = choose_product(self._probed(compared, n_features, device), "auto", points.to(device))
        self._check_context(compared, points.to(device))

    @property
    def tally(self) -> Tally:
        return self.template.tally

    @property
    def n_features(self) -> int:
        return self.template.n_features

    def _probed(self, y: Rows, n_features: int, device: torch.device) -> Score:
        """Return the score of the first of some contexts at which it does not raise, probed."""
        errors = []
        for part in parts(y, 1):
            try:
                return probe(at_contexts(self.score_fn, part), n_features, dtype=torch.float64, device=device)
            except REJECTIONS as error:
                errors.append(error)
        raise errors[0]

    def _of_each(self, y: Rows) -> ScoreFunction:
        """Return the function of points that `at_contexts` makes, NaN at pairs where it raises."""
        whole = at_contexts(self.score_fn, y)

        def function(x: Tensor) -> Tensor:
            def points(rows: Tensor) -> Tensor:
                return x[rows if isinstance(x, Tensor) else rows.numpy()]

            def at(rows: Tensor) -> Tensor:
                own = take(tiled(y, len(x) // len(y)), rows)
                return torch.as_tensor(self.score_fn(points(rows), given(own, x)))

            def nothing(row: Tensor) -> Tensor:
                return torch.as_tensor(points(row) * math.nan)

            try:
                return whole(x)
            except (*REJECTIONS, RuntimeError):
                return torch.cat(in_parts(at, torch.arange(len(x)), nothing, self.tally, self._again))

        return function

    def _again(self, n: int) -> None:
        """Raise RuntimeError if the function no longer works where it was called first, with n rows."""
        like = torch.empty(0, self.n_features, dtype=torch.float64, device=self.template.device)
        try:
            self.template.score_fn(first_points(2, like).repeat(-(-n // 2), 1)[:n])
        except REJECTIONS as error:
            raise RuntimeError(f"`score_fn` raises at every pair: {type(error).__name__}: {error}") from error

    def rows(self, y: Rows) -> Score:
        """Return the score of points x (n, d), the rows of which belong to n contexts."""
        return self.template.like(self._of_each(y), None)

    def __call__(self, x: Tensor, y: Rows) -> Tensor:
        """Evaluate the score at x (n, d) of n contexts."""
        return self.rows(y)(x)

    def jacobians(self, x: Tensor, y: Rows) -> Tensor:
        """Return the Jacobians (n, d, d) at x (n, d) of n contexts, by d products each."""
        n, d = x.shape
        directions = torch.eye(d).to(x).repeat(n, 1)
        return self.rows(repeated(y, d)).product(x.repeat_interleave(d, 0), directions).view(n, d, d)

    def _check_context(self, y: Rows, x: Tensor) -> None:
        """Raise ValueError if the score is the same for all of some contexts."""
        s = self(x.repeat(len(y), 1), repeated(y, len(x))).view(len(y), *x.shape)
        if (s == s[:1]).all():
            raise ValueError(
                f"`score_fn` returned the same at {len(x)} points for each of {len(y)} contexts, expected it to "
                "depend on its second argument, rows of `contexts` that belong to the rows of the first."
            )


def at_contexts(score_fn: ScoreOfPairs, y: Rows) -> ScoreFunction:
    """Return the function of points, to which the contexts belong in turn, as often as there are points."""

    def function(x: Tensor) -> Tensor:
        return score_fn(x, given(tiled(y, len(x) // len(y)), x))

    return function


# Modes of many posteriors at once


class Laplaces(NamedTuple):
    """Gaussians at modes: means m (n, d) and precisions P (n, d, d) of the contexts of these numbers (n,)."""

    m: Tensor
    P: Tensor
    numbers: Tensor

    def joined(self, other: Laplaces) -> Laplaces:
        return Laplaces(*(torch.cat(pair) for pair in zip(self, other, strict=True)))

    def rows(self, rows: Tensor) -> Laplaces:
        return Laplaces(*(part[rows] for part in self))


@torch.no_grad()
def laplaces(score: PairedScore, y: Rows, index: Tensor, start: Tensor) -> Laplaces:
    r"""Return the Gaussians at the modes of contexts y from starts (n, d), of those that were found.

    `index` (n,) are their numbers elsewhere.

    Damped Newton steps :math:`|H|^{-1} s`, with the absolute curvatures of :math:`H = -(J + J^\top) / 2` as in
    saddle-free Newton, shortened where the score along them has turned. A search that does not arrive, or comes to
    points where the score is not finite, ends alone.
    """
    d, x = start.shape[1], start.clone()
    found = Laplaces(x.new_empty(0, d), x.new_empty(0, d, d), index[:0])
    try:
        for new in _searched(score, y, index, x):
            found = found.joined(new)
    except BudgetError:
        pass
    return found


def _searched(score: PairedScore, y: Rows, index: Tensor, x: Tensor) -> Iterator[Laplaces]:
    """Return the modes that are found, step by step, from starts x (n, d), which move."""
    n, d = x.shape
    s = score(x, y)
    active = torch.arange(n, device=x.device)[s.isfinite().all(1)]
    arrival = 1e-2  # of the decrement per feature, below which a point is the mode after one more step
    flattest = 1e-6  # in units of the largest curvature
    for _ in range(30):
        if not len(active):
            break
        J = score.jacobians(x[active], take(y, active))
        finite = J.isfinite().all((1, 2))
        active, H = active[finite], -(J + J.mT)[finite] / 2
        e, V = torch.linalg.eigh(H)
        size = e.abs().clamp_min(flattest * e.abs().amax(1, keepdim=True)).clamp_min(1e-300)
        step = (V @ ((V.mT @ s[active][:, :, None]) / size[:, :, None]))[:, :, 0]
        decrement = (step * s[active]).sum(1)
        arrived = (decrement < arrival * d) & (e[:, 0] > flattest * e[:, -1])
        yield Laplaces(x[active] + step, H, index[active]).rows(arrived)
        active, H, e, step, decrement = (a[~arrived] for a in (active, H, e, step, decrement))
        full = x[active] + step
        x[active], s[active] = _moved(score, take(y, active), x[active], step, decrement)
        ok = s[active].isfinite().all(1)
        active, H, e, decrement, full = (a[ok] for a in (active, H, e, decrement, full))
        left = torch.linalg.solve_ex(H, s[active])[0]
        after = (left * s[active]).sum(1)
        # else the curvature of this step is not the next one's
        steady = (after >= 0) & (after < 0.1 * decrement) & (e[:, 0] > 0) & (x[active] == full).all(1)
        predicted = steady & (after.square() < arrival**2 * d * decrement)
        yield Laplaces(x[active] + left, H, index[active]).rows(predicted)
        active = active[~predicted]


def _moved(score: PairedScore, y: Rows, x: Tensor, step: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Return points (n, d) along the steps with their scores, NaN where these are not finite at any of them."""
    length, at, s = torch.ones_like(slope), x + step, torch.full_like(x, torch.nan)
    waiting = torch.arange(len(x), device=x.device)
    for k in range(12):
        if not len(waiting):
            break
        at[waiting] = x[waiting] + length[waiting, None] * step[waiting]
        s[waiting] = score(at[waiting], take(y, waiting))
        ahead = (s * step).sum(1)
        lost = ~s.isfinite().all(1)
        secant = (slope / (slope - ahead)).clamp(0.1, 0.7).nan_to_num(0.1).clamp_max(1.0 if k < 3 else 0.3)
        length = length * torch.where(lost, 0.1, secant)
        waiting = ((ahead < -0.5 * slope) | lost).nonzero()[:, 0]  # the slope has turned: too far
    return at, s
