"""Where a density ends, has no gradient, or does not fall: what its score tells far from the points of a fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.score._refusals import tell
from skksivi.score._score import Score, ScoreFunction
from skksivi.score._tally import Doubt

#: Trial points in each shell around the origin.
N_TRIALS = 4

#: Features up to which directions other than the coordinates are searched; a decomposition costs O(d^3).
MAX_FEATURES = 500

#: Share of a score along a direction below which it is zero up to rounding.
FLAT = 1e-14

#: Distances at which a density must fall along a direction.
FAR_OUT = (1e4, 1e12)

#: What a score may raise so far out, where it need not be defined.
UNDEFINED = (ArithmeticError, RuntimeError, ValueError)


def scattered_points(score: Score, near: Tensor | None) -> Tensor:
    """Return points near the target, where known, followed by points all around the origin."""
    directions = _random(N_TRIALS, score.n_features)
    signs = torch.tensor([[1.0], [-1.0]], dtype=torch.float64, device="cpu")
    orthants = signs * directions[:1].abs()  # some domains are one of them, some a half-space
    scattered = torch.cat([directions, orthants, -directions])
    scales = (1.0,) if score.tally.is_frugal else (1.0, 0.1, 10.0, 0.01, 100.0)
    x = torch.cat([scale * scattered for scale in scales]).to(score.device)
    if near is not None:
        x = torch.cat([near.to(x)[:N_TRIALS], x])
    return x.to(score.dtype)


def _random(n: int, d: int) -> Tensor:
    """Return n normal directions (n, d), always the same."""
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")


# Bounds


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


def call_of(score: Score, bounds: list[Bound]) -> str:
    """Return `supports`, an argument of `skksivi.targets.constrained`, for a target of these bounds."""
    supports = {bound.coordinate: bound.support for bound in bounds}
    names = score.names if all(map(str.isidentifier, score.names)) else ()
    names = names or tuple(f"x{i}" for i in range(score.n_features))
    return "{" + _listed([f'"{name}": ' + supports.get(i, '"real"') for i, name in enumerate(names)]) + "}"


def _listed(parts: list[str]) -> str:
    """Return the first five."""
    return ", ".join(parts[:5]) + (", ..." if len(parts) > 5 else "")


def doubt_of(score: Score, near: Tensor | None) -> Doubt | None:
    """Say where the density has no gradient or ends, or that it grows; None if it does neither where it is tried."""
    x = scattered_points(score.double, near)
    s, log_p = _evaluated(score.double.sketch(), x)
    broken = _broken(x, s, log_p)
    bounds = [] if len(broken) else find_bounds(score.sketch(), x, _inside(s, log_p))
    if bounds and score.parts is not None:  # a part of the data may leave a coordinate unbounded
        bounds = find_bounds(score, x, _inside(*_evaluated(score.double, x)))
    names = score.names or [f"x[{i}]" for i in range(score.n_features)]
    supports = _listed([f"{names[bound.coordinate]}: {bound.support}" for bound in bounds])
    first = _listed([f"{v:.4g}" for v in broken[:1].flatten().tolist()])
    words = tell("a gradient", n_broken=len(broken), n=len(x), first=first)
    words = words or tell("a domain", bounds=bounds, supports=supports, call=call_of(score, bounds))
    words = words or doubt_of_sign(score.double)
    ends = torch.tensor([-math.inf, math.inf], dtype=torch.float64).repeat(score.n_features, 1)
    for bound in bounds:
        ends[bound.coordinate] = ends.new_tensor([bound.low, bound.high])
    return None if words is None else Doubt(words, ends if bounds else None)


def doubt_of_sign(score: Score) -> str | None:
    """Say that the score points away from the origin far out, None if it does not."""
    return tell("a sign", grows=grows_outward(score))


def _broken(x: Tensor, s: Tensor, log_p: Tensor) -> Tensor:
    """Return the points (k, d) of those tried at which the density is finite and its gradient is not."""
    has_score = s.isfinite().all(1)
    top = log_p.where(has_score, -math.inf).nan_to_num(-math.inf, -math.inf, -math.inf).max()
    # far below it, where exp(-745) is zero, so is a rate, and what divides by it is lost
    # farther out numbers may overflow, so that a gradient tells nothing
    is_broken = log_p.isfinite() & ~has_score & (x.abs().amax(1) <= 5.0) & (log_p > top - 745)
    return x[is_broken & top.isfinite() & (is_broken.sum() >= 3)]  # fewer may be an accident of rounding


def _evaluated(score: Score, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the score (n, d) and log p (n,) at x (n, d), the latter zero at finite scores if it is not known."""
    s = score(x)
    log_p = torch.zeros_like(x[:, 0]).where(s.isfinite().all(1), torch.nan)
    if score.log_prob is not None:
        with torch.no_grad():
            density = score.log_prob(x.to(score.dtype))
        log_p = density.to(x) if density.shape == x.shape[:1] else log_p
    return s, log_p


def _inside(s: Tensor, log_p: Tensor) -> Tensor:
    """Tell for each coordinate (n, d) whether the score and log p are finite and its score is not zero."""
    return (s.isfinite().all(1) & log_p.isfinite())[:, None] & (s != 0)


def find_bounds(score: Score, x: Tensor, inside: Tensor) -> list[Bound]:
    """Return the coordinates along which the density ends, found along lines through an interior point.

    Of points x (n, d) it is known whether they are `inside` along each coordinate.
    """
    best, outside = inside.sum(1).argmax(), (~inside).gather(0, x.argsort(0))
    n_extreme = 5  # all of these are outside if the coordinate has a bound there
    has_end = outside[:n_extreme].all(0) | outside[-n_extreme:].all(0)
    suspects = (has_end & inside[best]).nonzero()[:64, 0].tolist()
    found = [(j, _end(score, x[best], j, -1.0), _end(score, x[best], j, 1.0)) for j in suspects]
    return [Bound(j, low, high) for j, (low, is_end), (high, is_other) in found if is_end or is_other]


def _end(score: Score, start: Tensor, j: int, side: float) -> tuple[float, bool]:
    """Return where the density ends along coordinate j from a point (d,) to one side, infinite if it does not, and
    whether it has not vanished before.
    """
    double = score.double

    def moved(to: Tensor) -> Tensor:
        return start.expand(len(to), -1).index_copy(1, torch.tensor([j], device=start.device), to[:, None])

    def inside(score: Score, to: Tensor) -> Tensor:
        return _inside(*_evaluated(score, moved(to)))[:, j]

    reach = start[j] + side * start.new_tensor((1.0, 10.0, 100.0)) * (1 + start[j].abs())
    reached = inside(double, reach)
    if reached[-1]:
        return side * math.inf, False
    within, beyond = start[j], reach[int(reached.sum())]
    for _ in range(40):
        middle = (within + beyond) / 2
        if inside(double, middle[None])[0]:
            within = middle
        else:
            beyond = middle
    if score.in_double is not None and not inside(score, torch.lerp(start[j], within, 0.98)[None]):
        return side * math.inf, False  # where the ends differ by the type, numbers overflow
    # towards a bound log p falls at most as a power of the distance, elsewhere exponentially, until it underflows
    between = start[j] + (within - start[j]) * torch.arange(64).to(start) / 64
    log_p = torch.cumulative_trapezoid(double(moved(between))[:, j], between)
    rest = 1e-6 * (within - start[j])
    last = (double(moved((within - rest)[None]))[0, j] * rest).abs()
    return within.item(), bool(log_p.max() - log_p[-1] + last < 25.0)


def grows_outward(score: Score) -> bool:
    r"""Tell whether :math:`s(x)^\top x > 0` in most directions, on the three widest shells where s is finite.

    A density that can be normalised falls eventually along almost every ray, wherever its mass is.
    """
    generator = torch.Generator().manual_seed(0)
    n = 3 if score.tally.is_frugal else 8
    rays = torch.randn(n, score.n_features, generator=generator, dtype=torch.float64, device="cpu")
    rays = torch.cat([rays, -rays])
    lengths = 1 + torch.rand(len(rays), 1, generator=generator, dtype=torch.float64, device="cpu")  # of any phase
    rays = (lengths * rays / rays.norm(dim=1, keepdim=True)).to(score.device)
    shares: list[float] = []
    for radius in (10.0**k for k in range(8, -1, -1)):  # where it must have begun to fall
        with suppress(*UNDEFINED):
            slope = (score(radius * rays) * rays).sum(1)
            finite = slope.isfinite()
            if finite.double().mean() > 0.2:
                shares.append((slope[finite] > 0).double().mean().item())
        if len(shares) == 3:
            return sum(shares) > 3 * 0.7
    return False


# Tails


def check_proper(score: Score) -> None:
    """Refuse a score that is constant along a direction wherever it is evaluated; warn of tails that are too heavy.

    Raises
    ------
    ImproperError
        The density is constant along a direction, or grows exponentially, so that it has no finite mass.
    """
    if score.tally.is_frugal:  # the check of the mode tries the way in which it is widest
        return
    direction, exponent, d = None, None, score.n_features
    with suppress(*UNDEFINED):
        seen = flat_direction(score.sketch()), tail_exponent(score.sketch(), d)
        if score.parts is not None and (seen[0] is not None or (seen[1] or math.inf) <= d):
            seen = flat_direction(score), tail_exponent(score, d)  # given a part of the data it may be improper
        direction, exponent = seen
    _tell_of_tails(score, direction, exponent)


def _tell_of_tails(score: Score, direction: Tensor | None, exponent: float | None = None) -> None:
    v = torch.zeros(1) if direction is None else direction
    largest = [i for i in v.abs().argsort(descending=True)[:3].tolist() if v[i].abs() > 1e-3 * v.abs().max()]
    terms = ", ".join(f"{v[i].item():+.2g} in {score.label(i)}" for i in largest)
    tell("a mass", direction=direction, terms=terms, exponent=exponent or math.inf, d=score.n_features)


def check_ends(score: Score, x: Tensor, directions: Tensor) -> None:
    """Refuse a density that does not fall along one of some directions (k, d) from points x (n, d).

    The first point decides which ones are tried from the others.

    Raises
    ------
    ImproperError
        There is one, so that a tube around it has infinite mass.
    """
    for v in directions[_is_endless(score, x[:1], directions)]:
        # outside of its support a score may be that of another density
        if _is_endless(score, x, v[None], (0.5, 1.0, 2.0, 4.0, *FAR_OUT)):
            _tell_of_tails(score, v / v.abs().max())


def _is_endless(score: Score, x: Tensor, directions: Tensor, at: Sequence[float] = FAR_OUT) -> Tensor:
    """Tell along which directions (k, d) a density falls from points x (n, d) more slowly than one over the distance,
    at all distances that are looked at.
    """
    radii = torch.tensor(at).to(x)[:, None, None, None]
    points = x + radii * directions[:, None]
    s = score(points.flatten(0, 2)).detach().view(points.shape)
    terms = -s * radii * directions[:, None]
    # it falls as 1 / r to this power at least; where a step is below the rounding of a point nothing is known
    is_slow = terms.sum(-1) - FLAT * terms.abs().sum(-1) <= 0.5
    return (is_slow & (points != x).any(-1)).all(2).all(0)


def flat_direction(score: Score) -> Tensor | None:
    """Return a direction (d,) along which all scores are the same and the density does not fall, zero if all scores
    are equal, None if there is none.

    Scores at random points, and ones, span all directions unless the density is flat or exponential along one. They
    are compared in units in which every coordinate has scores of the same size. With many features only the
    coordinates are checked.
    """
    d = score.n_features
    n_points = 40
    n = max(n_points, 2 * d) if d <= MAX_FEATURES else max(12, min(n_points, 2**22 // d))
    sizes = torch.tensor((1e-2, 1.0, 1e2), dtype=torch.float64)  # distances from the origin
    x = (_random(n, d) * sizes.repeat(-(-n // len(sizes)))[:n, None]).to(score.device)
    S = score(x)
    x, S = x[S.isfinite().all(1)], S[S.isfinite().all(1)]
    found = None if len(S) < min(2 * d, n // 2) else _constant_along(S)
    if found is None:
        return None
    v = found if found.any() else S[0] if S.any() else x[0]  # where all scores are equal, any way that does not fall
    upwards = v / v.abs().max() * (1 if S[0] @ v >= 0 else -1)
    return found if _is_endless(score, x[:1], upwards[None]) else None


def _constant_along(S: Tensor) -> Tensor | None:
    """Return a direction (d,) in which scores S (n, d) are all the same up to rounding, the largest entry one, zero
    if this is so in all directions, None if there is none.
    """
    is_constant = (S[0] == S).all(0)
    if is_constant.any():
        first = torch.eye(1, S.shape[1]).to(S)[0].roll(int(is_constant.byte().argmax()))
        return first.where(~is_constant.all(), 0.0)
    if S.shape[1] > MAX_FEATURES:
        return None
    S = torch.cat([S, torch.ones_like(S[:, :1])], 1)
    S = S / S.abs().amax(1, keepdim=True)  # points far out count no more
    size = S.square().mean(0).sqrt()
    S = S / size
    v = torch.linalg.svd(S, full_matrices=False)[2][-1]
    share = (S @ v).abs() / S.norm(dim=1)  # where terms nearly cancel, rounding shows: one score in ten may
    v = (v / size)[:-1]
    return v / v.abs().max() if share.quantile(0.9) < FLAT else None


def has_power_tails(score: Score) -> bool:
    """Tell whether the tails fall as a power, if the score can be evaluated so far out."""
    with suppress(*UNDEFINED):
        return tail_exponent(score.double, score.n_features) is not None
    return False


def tail_exponent(score_fn: ScoreFunction, d: int) -> float | None:
    r"""Return the a of tails :math:`p \propto \|x\|^{-a}`, where :math:`-s(x)^\top x \to a`; None for other tails.

    The slowest of some directions counts, since p^c is improper for c a <= d there.
    """
    rays = _random(8, d)
    away = torch.tensor([1e4, 1e5, 1e6]).to(rays)[:, None, None] * (rays / rays.norm(dim=1, keepdim=True))
    a = -(score_fn(away.flatten(0, 1)).detach().view(away.shape) * away).sum(-1)
    is_power = ((a - a[-1]).abs() < 0.02 * a[-1]).all(0)
    slowest = a[-1].where(is_power & a[-1].isfinite(), math.inf).min().item()
    return slowest if math.isfinite(slowest) else None
