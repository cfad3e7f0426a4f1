"""Where a target has no density, or its density no gradient, found from its score at a few points."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.score._probe import scattered_points
from skksivi.score._score import Score
from skksivi.score._tally import Doubt


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


def doubt_of(score: Score, near: Tensor | None) -> Doubt | None:
    """Say where the density has no gradient or ends, None if it does neither at the points that are tried."""
    double = score.double
    tried = Tried.of(double.sketch(), scattered_points(double.sketch(), near))
    words = _of_gradient(tried)
    return _of_bounds(score, near, tried) if words is None else Doubt(words)


class Tried(NamedTuple):
    """Points (n, d) at which a target has been evaluated, whether the score is finite there, and log p (n,).

    `inside` tells for each coordinate whether both are finite and its score is not zero.
    """

    x: Tensor
    has_score: Tensor
    log_p: Tensor
    inside: Tensor

    @classmethod
    def of(cls, score: Score, x: Tensor) -> Tried:
        s = score(x)
        has_score = s.isfinite().all(1)
        log_p = torch.zeros_like(x[:, 0]).where(has_score, torch.nan)
        if score.log_prob is not None:
            with torch.no_grad():
                density = score.log_prob(x.to(score.dtype))
            log_p = density.to(x) if density.shape == x.shape[:1] else log_p
        return cls(x, has_score, log_p, (has_score & log_p.isfinite())[:, None] & (s != 0))


def _of_gradient(tried: Tried) -> str | None:
    """Say that the density is finite at a point where its gradient is not."""
    x, log_p = tried.x, tried.log_p
    top = log_p.where(tried.has_score, -math.inf).nan_to_num(-math.inf, -math.inf, -math.inf).max()
    # far below it, where exp(-745) is zero, so is a rate, and what divides by it is lost
    # farther out numbers may overflow, so that a gradient tells nothing
    broken = log_p.isfinite() & ~tried.has_score & (x.abs().amax(1) <= 5.0) & (log_p > top - 745)
    if not top.isfinite() or broken.sum() < 3:  # fewer may be an accident of rounding
        return None
    point = x[broken][0].tolist()
    return (
        f"`log_prob` is finite and its gradient is not at {int(broken.sum())} of {len(x)} trial points, the first at "
        f"x = [{', '.join(f'{v:.4g}' for v in point[:5])}{', ...' if len(point) > 5 else ''}]: a branch of "
        "torch.where that is not taken, with a square root, a quotient or a logarithm, has a derivative that is NaN "
        "there. Make that branch safe, as in torch.where(ok, torch.where(ok, x, 1.0).sqrt(), other)."
    )


def _of_bounds(score: Score, near: Tensor | None, tried: Tried) -> Doubt | None:
    """Say that a target has no density beyond some value of a coordinate."""
    bounds = find_bounds(score.sketch(), near, tried)
    if bounds and score.parts is not None:  # a part of the data may leave a coordinate unbounded
        bounds = find_bounds(score, near)
    if not bounds:
        return None
    names = score.names or [f"x[{i}]" for i in range(score.n_features)]
    supports = ", ".join(f"{names[bound.coordinate]}: {bound.support}" for bound in bounds[:5])
    words = (
        "The target seems bounded, since beyond some value of a coordinate its score is zero or not finite "
        f"({supports}{', ...' if len(bounds) > 5 else ''}), and draws may leave it. Give the density of the bounded "
        f"parameters to skksivi.targets.constrained, as in constrained(log_prob, {call_of(score, bounds)}), or "
        "transform them to the whole line and add the logarithm of the Jacobian to log p."
    )
    ends = torch.tensor([-math.inf, math.inf], dtype=torch.float64).repeat(score.n_features, 1)
    ends[[bound.coordinate for bound in bounds]] = torch.tensor([bound[1:] for bound in bounds], dtype=torch.float64)
    return Doubt(words, ends)


def call_of(score: Score, bounds: list[Bound]) -> str:
    """Return `supports`, an argument of `skksivi.targets.constrained`, for a target of these bounds."""
    supports = {bound.coordinate: bound.support for bound in bounds}
    names = score.names if all(map(str.isidentifier, score.names)) else ()
    names = names or tuple(f"x{i}" for i in range(score.n_features))
    parts = [f'"{name}": ' + supports.get(i, '"real"') for i, name in enumerate(names)]
    return "{" + ", ".join(parts[:5]) + (", ..." if len(parts) > 5 else "") + "}"


def find_bounds(score: Score, near: Tensor | None, tried: Tried | None = None) -> list[Bound]:
    """Return the coordinates along which the density ends, found along lines through an interior point.

    Trial points around the origin and `near` points may have been `tried` before. Where the ends differ by the type,
    numbers overflow.
    """
    double = score.double
    x, _, _, inside = Tried.of(double, scattered_points(double, near)) if tried is None else tried
    start, is_inside = x[inside.sum(1).argmax()], inside[inside.sum(1).argmax()]
    suspects = (_ends(x, inside) & is_inside).nonzero()[:64, 0].tolist()
    found = [(j, _end(score, start, j, -1.0), _end(score, start, j, 1.0)) for j in suspects]
    return [Bound(j, low[0], high[0]) for j, low, high in found if low[1] or high[1]]


def _ends(x: Tensor, inside: Tensor) -> Tensor:
    """Tell for each coordinate (d,) whether its lowest or its highest points (n, d) are all outside."""
    outside = (~inside).gather(0, x.argsort(0))
    n_extreme = 5  # all of these are outside if the coordinate has a bound there
    return outside[:n_extreme].all(0) | outside[-n_extreme:].all(0)


def _end(score: Score, start: Tensor, j: int, side: float) -> tuple[float, bool]:
    """Return where the density ends along coordinate j from a point (d,) to one side, infinite if it does not, and
    whether it has not vanished before.
    """
    double = score.double

    def moved(to: Tensor) -> Tensor:
        return start.expand(len(to), -1).index_copy(1, torch.tensor([j], device=start.device), to[:, None])

    def is_inside(score: Score, to: Tensor) -> Tensor:
        return Tried.of(score, moved(to)).inside[:, j]

    reach = start[j] + side * start.new_tensor((1.0, 10.0, 100.0)) * (1 + start[j].abs())
    reached = is_inside(double, reach)
    if reached[-1]:
        return side * math.inf, False
    within, beyond = start[j], reach[int(reached.sum())]
    for _ in range(40):
        middle = (within + beyond) / 2
        if is_inside(double, middle[None])[0]:
            within = middle
        else:
            beyond = middle
    if score.in_double is not None and not is_inside(score, torch.lerp(start[j], within, 0.98)[None]):
        return side * math.inf, False
    return within.item(), _matters(lambda at: double(moved(at))[:, j], start[j], within)


def _matters(slope: Callable[[Tensor], Tensor], start: Tensor, end: Tensor) -> bool:
    """Tell whether a density whose logarithm has a slope ends there, rather than underflows.

    Towards a bound it falls at most as a power of the distance, elsewhere exponentially.
    """
    n_between = 64
    between = start + (end - start) * torch.arange(n_between).to(start) / n_between
    log_p = torch.cumulative_trapezoid(slope(between), between)
    rest = 1e-6 * (end - start)
    last = (slope((end - rest)[None])[0] * rest).abs()
    return bool(log_p.max() - log_p[-1] + last < 25.0)  # a larger fall is floating-point underflow
