"""Bounds of a target that should have been transformed to the whole real space, found from its score."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi._warnings import warn_caller
from skksivi.score._probe import scattered_points
from skksivi.score._score import Score

#: Distances from an interior point at which a bound is sought, in units of 1 + |x_j|.
REACHES = (1.0, 10.0, 100.0)

#: The lowest and the highest points of a coordinate that must all be outside if it may have a bound there.
N_EXTREME = 5

#: Largest number of coordinates that are checked.
MAX_SUSPECTS = 64

#: Bisection steps to locate a bound, and points on the way there.
N_HALVINGS, N_BETWEEN = 40, 64

#: Largest fall of the log-density on the way to a real bound; a larger one is floating-point underflow.
MAX_DROP = 25.0


class Bound(NamedTuple):
    """Where the density ends along a coordinate, infinite where it does not."""

    coordinate: int
    low: float
    high: float

    @property
    def support(self) -> str:
        """The support as an argument of `skksivi.targets.constrained`."""
        low, high = (round(end, 6) + 0.0 for end in (self.low, self.high))
        if (low, high) == (0, 1):
            return '"unit interval"'
        if high == math.inf:
            return '"positive"' if low == 0 else f'("above", {low:g})'
        return f'("below", {high:g})' if low == -math.inf else f'("interval", {low:g}, {high:g})'


def warn_of_bounds(score: Score, near: Tensor | None = None) -> None:
    """Warn of a target that has no density beyond some value of a coordinate."""
    bounds = find_bounds(score.sketch(), near)
    if bounds and score.parts is not None:  # a part of the data may leave a coordinate unbounded
        bounds = find_bounds(score, near)
    if not bounds:
        return
    names = score.names or [f"x[{i}]" for i in range(score.n_features)]
    supports = ", ".join(f"{names[bound.coordinate]}: {bound.support}" for bound in bounds[:5])
    warn_caller(
        "The target seems bounded, since beyond some value of a coordinate its score is zero or not finite "
        f"({supports}{', ...' if len(bounds) > 5 else ''}), and draws may leave it. Give the density of the bounded "
        "parameters to skksivi.targets.constrained, or transform them to the whole line and add the logarithm of the "
        "Jacobian to log p."
    )


def find_bounds(score: Score, near: Tensor | None = None) -> list[Bound]:
    """Return the coordinates along which the density ends, found along lines through an interior point."""
    x = scattered_points(score, near)
    inside = _inside(score, x)
    start, is_inside = x[inside.sum(1).argmax()], inside[inside.sum(1).argmax()]
    suspects = (_ends(x, inside) & is_inside).nonzero()[:MAX_SUSPECTS, 0].tolist()
    bounds = [Bound(j, *(_end(score, start, j, side) for side in (-1.0, 1.0))) for j in suspects]
    return [bound for bound in bounds if not math.isinf(bound.low) or not math.isinf(bound.high)]


def _inside(score: Score, x: Tensor) -> Tensor:
    """Tell for each coordinate of points x (n, d) whether its score is finite and not zero, and log p finite."""
    s = score(x)
    inside = s.isfinite().all(1, keepdim=True) & (s != 0)
    if score.log_prob is None:
        return inside
    with torch.no_grad():
        has_density = score.log_prob(x.to(score.dtype)).isfinite()
    return inside & has_density[:, None] if has_density.shape == x.shape[:1] else inside


def _ends(x: Tensor, inside: Tensor) -> Tensor:
    """Tell for each coordinate (d,) whether its lowest or its highest points (n, d) are all outside."""
    outside = (~inside).gather(0, x.argsort(0))
    return outside[:N_EXTREME].all(0) | outside[-N_EXTREME:].all(0)


def _end(score: Score, start: Tensor, j: int, side: float) -> float:
    """Return where the density ends along coordinate j from a point (d,) to one side, infinite if it does not."""

    def moved(to: Tensor) -> Tensor:
        return start.expand(len(to), -1).index_copy(1, torch.tensor([j], device=start.device), to[:, None])

    reach = start.new_tensor(REACHES) * (1 + start[j].abs())
    is_inside = _inside(score, moved(start[j] + side * reach))[:, j]
    if is_inside[-1]:
        return side * math.inf
    within, beyond = start[j], start[j] + side * reach[int(is_inside.sum())]
    for _ in range(N_HALVINGS):
        middle = (within + beyond) / 2
        if _inside(score, moved(middle[None]))[0, j]:
            within = middle
        else:
            beyond = middle
    return within.item() if _matters(lambda at: score(moved(at))[:, j], start[j], within) else side * math.inf


def _matters(slope: Callable[[Tensor], Tensor], start: Tensor, end: Tensor) -> bool:
    """Tell whether a density whose logarithm has a slope ends there, rather than underflows.

    Towards a bound it falls at most as a power of the distance, elsewhere exponentially.
    """
    between = start + (end - start) * torch.arange(N_BETWEEN).to(start) / N_BETWEEN
    log_p = torch.cumulative_trapezoid(slope(between), between)
    rest = 1e-6 * (end - start)
    last = (slope((end - rest)[None])[0] * rest).abs()
    return bool(log_p.max() - log_p[-1] + last < MAX_DROP)
