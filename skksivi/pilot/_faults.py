"""Faults of a score or a log-density that show at small distances near a mode: noise, and jumps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from skksivi.coordinates._affine import Affine, standard_normal
from skksivi.coordinates._lines import lobatto, lobatto_nodes
from skksivi.score._probe import falls
from skksivi.score._score import Score


def noise_of(score: Score, mode: Affine) -> float:
    r"""Return the noise of a score around a mode, as a share of its size there, about one standard deviation.

    It is what cubic polynomials leave of it along short lines in the coordinates of the mode, the largest of the
    directions of the curvature, which may itself be noise. Points on a line are at random distances, since of equal
    ones a noise that oscillates may make a slow wave.

    References
    ----------
    Moré, J. and Wild, S. (2011). Estimating computational noise. SIAM Journal on Scientific Computing 33(3).
    """
    generator = torch.Generator(mode.m.device).manual_seed(0)
    u, way = standard_normal(16, mode.m, generator).chunk(2)
    t = torch.rand(12, 1, generator=generator, dtype=u.dtype, device=u.device)
    steps = 0.1 * t * (way / way.norm(dim=1, keepdim=True))[:, None]
    s = score(mode.unwhiten((u[:, None] + steps).flatten(0, 1))).detach().view(len(u), len(t), -1)
    s = s @ torch.linalg.eigh(mode.L @ mode.L.mT).eigenvectors
    Q = torch.linalg.qr(t ** torch.arange(4).to(t)).Q
    noise = (s - Q @ (Q.mT @ s)).square().sum(1) / (len(t) - 4)
    return (noise.nanmedian(0).values / s.square().mean(1).nanmedian(0).values).nan_to_num(0.0).max().sqrt().item()


def over_noise(score: Score, mode: Affine) -> Affine:
    """Return a mode with the distances at which log p has fallen by about one for its scales, where its curvature is
    that of the noise.
    """
    at_one = falls(score, mode.m)
    return Affine(mode.m, at_one.diag()) if (at_one > 3 * mode.L.norm(dim=1)).any() else mode


def fault_of_noise(score: Score, mode: Affine) -> str | None:
    """Say that a score has too much noise around a mode, None if it has not."""
    noise = noise_of(score, mode)
    most = 0.2  # standard deviations: more shifts moments by more than a few percent
    if not noise > most:
        return None
    return (
        f"The noise of the score is {noise:.2g} of its standard deviation: neighbouring points differ more than "
        "those of a smooth function, so that no fit is accurate. Solvers, simulators and finite differences "
        "leave such noise: set a smaller tolerance of the solver, a larger step of the differences, the same random "
        f"numbers at each call, or compute in float64, until it is below {most}."
    )


def look_for_jump(score: Score, x: Tensor) -> bool:
    """Note on the tally of a score where log p jumps between the first of some points (n, d) and another, if it does;
    tell whether a fault is noted.
    """
    if score.tally.fault is None:
        score.tally.found(fault_of_jump(score, x))
    return score.tally.fault is not None


def fault_of_jump(score: Score, x: Tensor) -> str | None:
    r"""Say where log p jumps on one of the lines from the first of some points (n, d) to the others, None if it does
    on none of them, or is not known.

    There :math:`\log p(b) - \log p(a) - \int_a^b s` is not zero. The lines where it is largest are halved, each
    time to the half that has more of it: a jump stays as it is, while the errors of integrals vanish.
    """
    log_prob = score.log_prob
    if log_prob is None:
        return None

    def excess(a: Tensor, b: Tensor) -> Tensor:
        """Return what the integrals of the score leave of the differences of log p from a to b (n, d)."""
        s_a, s_1, s_2, s_b = score(torch.cat([a, *lobatto_nodes(a, b), b])).detach().chunk(4)
        log_a, log_b = log_prob(torch.cat([a, b])).detach().chunk(2)
        return (log_b - log_a - lobatto(s_a, s_1, s_2, s_b, b - a)).nan_to_num(0.0, 0.0, 0.0)

    a, b = x[:1].expand_as(x[1:]), x[1:]
    left, way = excess(a, b), torch.nn.functional.normalize(b - a)
    worst = left.abs().argsort(descending=True)[:3]
    a, b, left, way = a[worst], b[worst], left[worst], way[worst]
    for _ in range(36):  # to the rounding of single points
        if not (left.abs() > 0.1).any():  # nats
            return None
        middle = (a + b) / 2
        first, second = excess(a, middle), excess(middle, b)
        is_second = second.abs() > first.abs()
        a, b = a.where(~is_second[:, None], middle), b.where(is_second[:, None], middle)
        left = second.where(is_second, first)
    # beside a pole of the score, where p is zero, integrals over ever shorter lines do not vanish
    steepest = torch.stack([score(end).detach().norm(dim=1) for end in (a, b)]).amax(0)
    left = left * (steepest * (b - a).norm(dim=1) < left.abs() / 4)
    k = left.abs().argmax()
    if not left[k].abs() > 0.1 or _is_rounding(score, excess, a[k], way[k], left[k].abs()):
        return None
    return _words_of_jump(score, a[k], b[k], left[k].item())


def _is_rounding(
    score: Score, excess: Callable[[Tensor, Tensor], Tensor], a: Tensor, way: Tensor, jump: Tensor
) -> bool:
    """Tell whether in single precision log p, or its terms at points next to each other, are rounded by as much as a
    jump at a point (d,), on the one side of it.
    """
    if score.type_computed == torch.float64 or score.log_prob is None:
        return False
    eps = torch.finfo(score.type_computed).eps
    before = a - 4 * eps * (1 + a.norm()) * torch.arange(1, 33).to(a)[:, None] * way
    own = 4 * eps * score.log_prob(a[None]).detach().abs()
    return bool(jump < own) or bool(excess(before[1:], before[:-1]).std() > jump / 4)


def _words_of_jump(score: Score, a: Tensor, b: Tensor, jump: float) -> str:
    """Say in which coordinates log p jumps between two points (d,) next to each other."""
    across = a + 1000 * (b - a).diag()  # in one coordinate each, far enough to cross an oblique border
    changes = score.log_prob(torch.cat([a[None], across])).detach()  # type: ignore[misc]
    found = ((changes[1:] - changes[0]).abs() > abs(jump) / 2).nonzero()[:, 0].tolist()
    where = " and ".join(f"{score.label(i)} = {a[i]:.4g}" for i in found[:3]) or "a border"
    return (
        f"log p jumps by {abs(jump):.2g} near {where}, which its gradient does not show: the score says nothing of "
        "the mass on either side, so that means and scales of the fit are off. Take a smooth function in the place "
        "of the condition, the rounding or the table that jumps, or fit the parts, each with its bounds as "
        "skksivi.targets.constrained takes them."
    )
