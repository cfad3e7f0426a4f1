"""Whether a density can be normalised, from its score alone: directions along which it is flat, and tails."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from skksivi._utils.checks import warn_caller
from skksivi.score._score import Score, ScoreFunction

#: Features up to which directions other than the coordinates are searched; a decomposition costs O(d^3).
MAX_FEATURES = 500


#: Share of a score along a direction below which it is zero up to rounding.
FLAT = 1e-14

#: Distances at which a density must fall along a direction.
FAR_OUT = (1e4, 1e12)


class ImproperError(ValueError):
    """The target has no finite mass."""


def check_proper(score: Score) -> None:
    """Refuse a score that is constant along a direction wherever it is evaluated; warn of tails that are too heavy.

    Raises
    ------
    ImproperError
        The density is constant along a direction, or grows exponentially, so that it has no finite mass.
    """
    d = score.n_features
    if score.tally.is_frugal:  # the check of the mode tries the way in which it is widest
        return
    try:
        direction, exponent = _looked_at(score.sketch())
        if score.parts is not None and _is_suspect(direction, exponent, d):  # given a part of the data it may be
            direction, exponent = _looked_at(score)
    except (ArithmeticError, RuntimeError, ValueError):  # it need not be defined so far out
        return
    if direction is not None:
        raise ImproperError(_improper_along(score, direction))
    if exponent is not None and exponent <= d:
        warn_caller(
            f"The tails of the target fall as |x|^-{exponent:.3g} in {d} dimension(s) along some ray, so it may "
            "have infinite mass. Add a prior, or check `score_fn` far from the origin."
        )


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
            raise ImproperError(_improper_along(score, v / v.abs().max()))


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


def _improper_along(score: Score, direction: Tensor) -> str:
    """Return the error that names a direction (d,), all zero for all of them."""
    if not direction.any():
        return (
            "`score_fn` is zero, or another constant, at all trial points: log p is constant or linear, and the "
            "density has infinite mass. Check that the function depends on its input, or add a prior."
        )
    terms = ", ".join(f"{value:+.2g} in {score.label(i)}" for i, value in _largest(direction))
    return (
        f"The target is improper in a direction ({terms}): the density does not fall along it, however far, so that "
        "it has infinite mass. Add a prior, as for a parameter without one or the coefficients of classes that a "
        "predictor separates, or leave the direction out of the parameters."
    )


def _looked_at(score: Score) -> tuple[Tensor | None, float | None]:
    """Return the direction along which the density is flat, and the exponent of its tails; None if there is none."""
    return flat_direction(score), tail_exponent(score, score.n_features)


def _is_suspect(direction: Tensor | None, exponent: float | None, d: int) -> bool:
    return direction is not None or (exponent is not None and exponent <= d)


def _largest(direction: Tensor) -> list[tuple[int, float]]:
    """Return the coordinates in which a direction (d,) is largest, with its values there."""
    order = direction.abs().argsort(descending=True)[:3].tolist()
    return [(i, direction[i].item()) for i in order if direction[i].abs() > 1e-3 * direction.abs().max()]


def flat_direction(score: Score) -> Tensor | None:
    """Return a direction (d,) along which all scores are the same and the density does not fall, zero if all scores
    are equal, None if there is none.

    Scores at random points, and ones, span all directions unless the density is flat or exponential along one. They
    are compared in units in which every coordinate has scores of the same size. With many features only the
    coordinates are checked.
    """
    d = score.n_features
    generator = torch.Generator().manual_seed(0)
    n_points = 40
    n = max(n_points, 2 * d) if d <= MAX_FEATURES else max(12, min(n_points, 2**22 // d))
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    sizes = (1e-2, 1.0, 1e2)  # distances from the origin
    x = (x * torch.tensor(sizes, dtype=torch.float64).repeat(-(-n // len(sizes)))[:n, None]).to(score.device)
    S = score(x)
    x, S = x[S.isfinite().all(1)], S[S.isfinite().all(1)]
    if len(S) < min(2 * d, n // 2):
        return None
    found = _constant_along(S)
    if found is None:
        return None
    v = found if found.any() else S[0] if S.any() else x[0]  # where all scores are equal, any way that does not fall
    upwards = v / v.abs().max() * (1 if S[0] @ v >= 0 else -1)
    return found if _is_endless(score, x[:1], upwards[None]) else None


def _constant_along(S: Tensor) -> Tensor | None:
    """Return a direction (d,) in which scores S (n, d) are all the same up to rounding, the largest entry one, zero
    if this is so in all directions, None if there is none.
    """
    d = S.shape[1]
    is_constant = (S[0] == S).all(0)
    if is_constant.all():
        return torch.zeros_like(S[0])
    if is_constant.any():
        return torch.zeros_like(S[0]).index_put(tuple(is_constant.nonzero()[:1].mT), S.new_ones(1))
    if d > MAX_FEATURES:
        return None
    S = torch.cat([S, torch.ones_like(S[:, :1])], 1)
    S = S / S.abs().amax(1, keepdim=True)  # points far out count no more
    size = S.square().mean(0).sqrt()
    S = S / size
    v = torch.linalg.svd(S, full_matrices=False)[2][-1]
    share = (S @ v).abs() / S.norm(dim=1)  # where terms nearly cancel, rounding shows: one score in ten may
    v = (v / size)[:d]
    return v / v.abs().max() if share.quantile(0.9) < FLAT else None


def has_power_tails(score: Score) -> bool:
    """Tell whether the tails fall as a power, if the score can be evaluated so far out."""
    try:
        return tail_exponent(score.double, score.n_features) is not None
    except (ArithmeticError, RuntimeError, ValueError):
        return False


def tail_exponent(score_fn: ScoreFunction, d: int) -> float | None:
    r"""Return the a of tails :math:`p \propto \|x\|^{-a}`, where :math:`-s(x)^\top x \to a`; None for other tails.

    The slowest of some directions counts, since p^c is improper for c a <= d there.
    """
    rays = torch.randn(8, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rays = rays / rays.norm(dim=1, keepdim=True)
    slowest = exponents(score_fn, torch.zeros(d, dtype=torch.float64), rays, (1e4, 1e5, 1e6)).min().item()
    return slowest if math.isfinite(slowest) else None


def exponents(score_fn: ScoreFunction, x: Tensor, rays: Tensor, radii: Sequence[float]) -> Tensor:
    r"""Return the a (k,) of tails :math:`p \propto r^{-a}` on rays (k, d) from x (d,), infinite for other tails."""
    away = torch.tensor(radii).to(rays)[:, None, None] * rays
    s = score_fn(x + away.flatten(0, 1)).detach().view(away.shape)
    a = -(s * away).sum(-1)
    is_power = ((a - a[-1]).abs() < 0.02 * a[-1]).all(0)
    return a[-1].where(is_power & a[-1].isfinite(), math.inf)
