r"""Integrals of the score along lines, which are differences of log p."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from skksivi._utils.checks import warn_caller
from skksivi.score._score import STEPS, Score, ScoreFunction


def lobatto_nodes(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the inner nodes (n, d) of Lobatto's rule of four points, :math:`x + t (y - x)` with
    :math:`t = \tfrac12 \mp \tfrac{1}{2 \sqrt 5}`.
    """
    return torch.lerp(x, y, 0.5 - 0.5 / math.sqrt(5)), torch.lerp(x, y, 0.5 + 0.5 / math.sqrt(5))


def lobatto(s_x: Tensor, s_1: Tensor, s_2: Tensor, s_y: Tensor, gap: Tensor) -> Tensor:
    r"""Integrate the score along lines by Lobatto's rule of four points, from its values there.

    .. math:: \log p(y) - \log p(x) \approx \tfrac{1}{12} \left( s_x + 5 s_1 + 5 s_2 + s_y \right)^\top (y - x).

    It is exact where log p is a polynomial of degree six along the line; else the error is
    :math:`-g^{(6)}(t) / 1{,}512{,}000` for some t in [0, 1], of :math:`g(t) = s(x + t (y - x))^\top (y - x)`.

    Parameters
    ----------
    s_x, s_1, s_2, s_y : Tensor of shape (n, d)
        The scores at x, at the `lobatto_nodes` and at y.
    gap : Tensor of shape (n, d)
        The y - x.

    Returns
    -------
    log_ratio : Tensor of shape (n,)

    References
    ----------
    Abramowitz, M. and Stegun, I. (1964). Handbook of mathematical functions, 25.4.32.
    """
    return ((s_x + 5 * (s_1 + s_2) + s_y) * gap).sum(1) / 12


def along_chord(score_fn: ScoreFunction, x: Tensor, s_x: Tensor, y: Tensor, s_y: Tensor) -> Tensor:
    """Return log p(y) - log p(x), (n,), by Lobatto's rule, from the points x, y and their scores, all (n, d)."""
    s_1, s_2 = score_fn(torch.cat(lobatto_nodes(x, y))).detach().chunk(2)
    return lobatto(s_x, s_1, s_2, s_y, y - x)


def kronrod(score_fn: ScoreFunction, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    r"""Integrate the score along lines by Kronrod's extension of Lobatto's rule of four points, to seven.

    Parameters
    ----------
    score_fn : callable
    a : Tensor of shape (d,) or (n, d)
    b : Tensor of shape (n, d)

    Returns
    -------
    log_ratio : Tensor of shape (n,)
        :math:`\log p(b) - \log p(a)`.
    gap : Tensor of shape (n,)
        The difference from Lobatto's rule; the error is much smaller.

    References
    ----------
    Gander, W. and Gautschi, W. (2000). Adaptive quadrature: revisited. BIT 40(1).
    """
    outer, inner = math.sqrt(1 / 6), math.sqrt(1 / 20)
    ends, (f1, f2, f3, f4, f5) = _slopes(score_fn, a, b, [0.5 - outer, 0.5 - inner, 0.5, 0.5 + inner, 0.5 + outer])
    ratio = (77 * ends + 432 * (f1 + f5) + 625 * (f2 + f4) + 672 * f3) / 2940
    return ratio, ratio - (ends + 5 * (f2 + f4)) / 12


def _slopes(score_fn: ScoreFunction, a: Tensor, b: Tensor, nodes: Sequence[float]) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the sums of the slopes at both ends of lines, and the slopes at inner nodes on [0, 1], each (n,)."""
    points = torch.lerp(a.expand_as(b), b, b.new_tensor([*nodes, 1.0])[:, None, None])
    s_a, s = score_fn(a.reshape(-1, a.shape[-1])).detach(), score_fn(points.flatten(0, 1)).detach().view(points.shape)
    *inner, f_b = (s * (b - a)).sum(-1)
    return (s_a * (b - a)).sum(-1) + f_b, inner


def simpson(score_fn: ScoreFunction, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    r"""Integrate the score along lines by Simpson's rule, see `kronrod`.

    The gap is the difference from the rule of the two ends, exact where log p is quadratic. Of a single power of the
    distance, up to the sixth, it is 15 times the error or more.
    """
    ends, (f,) = _slopes(score_fn, a, b, [0.5])
    ratio = (ends + 4 * f) / 6
    return ratio, ratio - ends / 2


#: Integrates a score from a (d,) or (n, d) to b (n, d), and tells how far another rule is off.
Rule = Callable[[ScoreFunction, Tensor, Tensor], tuple[Tensor, Tensor]]


def by_few_points(score_fn: ScoreFunction, a: Tensor, b: Tensor, rules: Sequence[tuple[Rule, float]]) -> Tensor:
    """Integrate the score along lines from a (d,) to b (n, d) by the first of some rules whose gap is within a limit,
    in nats, else as `log_ratio`.
    """
    ratio, rough = torch.empty_like(b[:, 0]), torch.arange(len(b), device=b.device)
    for rule, most in rules:
        ratio[rough], gap = rule(score_fn, a, b[rough])
        rough = rough[~(gap.abs() < most)]
        if not len(rough):
            return ratio
    ratio[rough] = log_ratio(score_fn, a, b[rough])
    return ratio


def in_panels(
    score_fn: ScoreFunction, a: Tensor, b: Tensor, lengths: Tensor, rule: Rule = kronrod
) -> tuple[Tensor, Tensor]:
    """Integrate the score along lines by a rule in panels, the first as long as the inner part of a target, each
    other four times: one panel would pass over that where a line leads far out.

    Parameters
    ----------
    score_fn : callable
    a : Tensor of shape (d,)
    b : Tensor of shape (n, d)
    lengths : Tensor of shape (n,)
        Of the lines, in units of the inner part.
    rule : callable, default=kronrod

    Returns
    -------
    log_ratio, gap : Tensor of shape (n,)
        As by the rule, the gaps added up.
    """
    ends = torch.lerp(a, b, (1 / lengths.clamp_min(1))[:, None])
    ratio, gap = rule(score_fn, a, ends)
    gap, reached = gap.abs(), torch.ones_like(lengths)
    while (rows := (lengths > reached).nonzero()[:, 0]).numel():
        reached[rows] *= 4
        further = torch.lerp(a, b[rows], (reached[rows] / lengths[rows]).clamp_max(1)[:, None])
        more, its_gap = rule(score_fn, ends[rows], further)
        ratio[rows] += more
        gap[rows] += its_gap.abs()
        ends[rows] = further
    return ratio, gap


def _lobatto(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the nodes and weights (n,) of the rule on [-1, 1] whose nodes include the ends."""
    P = np.polynomial.legendre.Legendre.basis(n - 1)
    nodes = np.concatenate([[-1.0], P.deriv().roots(), [1.0]])
    return nodes, 2 / (n * (n - 1) * P(nodes) ** 2)


def log_ratio(score_fn: ScoreFunction, a: Tensor, b: Tensor) -> Tensor:
    r"""Integrate the score along lines: :math:`\log p(b) - \log p(a) = \int_0^1 s(a + t (b - a))^\top (b - a)\,dt`.

    A panel of Lobatto's rule is split until its value agrees with the sum over its parts. The parts have unequal
    widths, because equal halves would miss a kink half-way between two equal peaks. The ends are nodes, because
    otherwise a kink beyond the last node would be missed by a panel and by its part there.

    Parameters
    ----------
    score_fn : callable
    a : Tensor of shape (d,)
    b : Tensor of shape (..., d)

    Returns
    -------
    ratio : Tensor of shape (...)
        NaN if the score is not finite on the way, the panels do not converge, or a deep valley leaves only rounding
        errors.
    """
    gaps = (b - a).reshape(-1, b.shape[-1])
    nodes, weights = (torch.as_tensor(v).to(a) for v in _lobatto(8))

    def integrals(row: Tensor, low: Tensor, width: Tensor) -> Tensor:
        t = low[:, None] + width[:, None] * (1 + nodes) / 2
        points = a + t[:, :, None] * gaps[row, None]
        slopes = (score_fn(points.flatten(0, 1)).detach().view(points.shape) * gaps[row, None]).sum(-1)
        return slopes @ weights * width / 2

    total, size = a.new_zeros(2, len(gaps)).unbind()
    row = torch.arange(len(gaps), device=a.device).repeat(2)
    split = 0.4  # where a panel is split
    low = a.new_tensor([0.0, split]).repeat_interleave(len(gaps))
    width = a.new_tensor([split, 1 - split]).repeat_interleave(len(gaps))
    value = integrals(row, low, width)
    for _ in range(40):
        row, low = row.repeat(2), torch.cat([low, low + split * width])
        width = torch.cat([split * width, (1 - split) * width])
        parts = integrals(row, low, width)
        first, second = parts.chunk(2)
        open_ = ~((value - first - second).abs() < 1e-4 + 1e-8 * (first.abs() + second.abs()))
        closed = row[: len(value)][~open_]
        total.index_add_(0, closed, (first + second)[~open_])
        size.index_add_(0, closed, (first.abs() + second.abs())[~open_])
        row, low, width, value = (v[open_.repeat(2)] for v in (row, low, width, parts))
        if not len(row) or len(row) > 200 * len(gaps):  # panels open at once
            break
    total[row] = torch.nan
    total[(size > 1e8) & (total.abs() < size / 2)] = torch.nan  # after so deep a valley only rounding is left
    return total.view(b.shape[:-1])


# Whether a density rises and falls as its score says


def checked_density(score_fn: Score, a: Tensor, b: Tensor, jumps: Callable[[Tensor], bool] | None = None) -> Score:
    """Return a score without its density if that is unknown at points b (n, d) or, with a warning, if its differences
    from points a (n, d) or (1, d) are not the integrals of the score, unless `jumps` tells that it jumps between
    points.
    """
    if score_fn.log_prob is None:
        return score_fn
    log_p, n = score_fn.log_prob(torch.cat([a, b])).detach(), len(a) + len(b)
    if log_p.shape == (n,):
        differences = log_p[len(a) :] - log_p[: len(a)]
        if not differences.isfinite().any():  # nothing contradicts it, but it is of no use
            return score_fn.by_score_alone()
        fault = _contradiction(score_fn, a.expand_as(b), b, log_p, jumps)
    else:
        fault = f"it returned shape {tuple(log_p.shape)} at {n} points, expected {(n,)}"
    if fault is None:
        return score_fn
    warn_caller(
        f"`log_prob` of the target contradicts its `score_fn`, which is not its gradient: {fault}. The fit goes by "
        "the score alone. Correct one of them, or set log_prob = None in a target with another score."
    )
    return score_fn.by_score_alone()


def _epsilon(score_fn: Score, log_p: Tensor) -> float:
    """Return the relative rounding of log p (n,) in the type in which its values show that it is computed."""
    is_single = score_fn.step == STEPS[torch.float32] or log_p.equal(log_p.float().to(log_p))
    return torch.finfo(torch.float32 if is_single else torch.float64).eps


def _contradiction(
    score_fn: Score, a: Tensor, b: Tensor, log_p: Tensor, jumps: Callable[[Tensor], bool] | None
) -> str | None:
    """Say where log p, given at a and then at points b (n, d), does not differ by the integrals of the score."""
    s_a, s_1, s_2, s_b = score_fn(torch.cat([a, *lobatto_nodes(a, b), b])).detach().chunk(4)
    differences = log_p[-len(b) :] - log_p[: -len(b)]
    size = log_p.abs() + torch.cat([(a * s_a).abs().sum(1)[: len(log_p) - len(b)], (b * s_b).abs().sum(1)])
    rounding = 8 * _epsilon(score_fn, log_p) * size.nan_to_num(0, 0, 0).amax()  # of log p, and of the points

    integrals = lobatto(s_a, s_1, s_2, s_b, b - a)
    most = (0.2 * integrals.abs().nanmedian().nan_to_num(0)).clamp(1e-3, 0.1) + rounding
    gaps = (differences - integrals).abs().nan_to_num(0, 0)
    if jumps is not None and (gaps > 0.1 + rounding).any() and jumps(torch.cat([a[:1], b])):
        return None
    worst = gaps.argsort(descending=True)[:3]

    def is_off(i: Tensor) -> bool:
        return bool(gaps[i] > most and (differences[i] - log_ratio(score_fn, a[i], b[i])).abs() > most)

    if not is_off(worst[0]):
        return None
    steps = s_b.square().nanmean(0).rsqrt().minimum((b - a).abs().amax(0))
    if (fault := fault_in_coordinates(score_fn, b[:4], steps)) is not None:
        return fault
    # one line may be hard for any rule
    return "differences of log p are not its integrals" if all(map(is_off, worst[1:])) else None


def fault_in_coordinates(score_fn: Score, x: Tensor, steps: Tensor) -> str | None:
    """Say in which coordinates log p, over steps (d,) from points x (n, d), does not differ by the integrals of the
    score, and by what factor, if that is the same everywhere; None if it does in all, or there are more than 1,000.
    """
    (n, d), log_prob = x.shape, score_fn.log_prob
    if d > 1000 or log_prob is None:
        return None
    start = x.repeat_interleave(d, 0)
    end = start + steps.diag().repeat(n, 1)
    integrals, errors = (a.view(n, d) for a in kronrod(score_fn, start, end))
    log_p = log_prob(torch.cat([start, end])).detach()
    differences = (log_p[n * d :] - log_p[: n * d]).view(n, d)
    size = log_p.abs().amax() + (x * score_fn(x).detach()).abs().sum(1).amax()
    rounding = 8 * _epsilon(score_fn, log_p) * size.nan_to_num(math.inf)
    gaps = (integrals - differences).abs() - 0.1 * differences.abs() - errors.abs()
    is_off = (gaps > rounding).double().mean(0) > 0.5  # at most points
    if not is_off.any():
        return None
    ratios = integrals / differences
    factors = ratios.nanmedian(0).values + 0.0  # not minus zero
    is_clean = ((ratios - factors).abs() <= 0.02 * factors.abs()).all(0)
    if is_clean.all() and (factors - factors[0]).abs().amax() <= 0.02 * factors[0].abs():
        return f"the score is {factors[0]:.3g} times the slope of log p"
    words = [
        (f"{factors[j]:.3g} times" if is_clean[j] else "not") + f" the slope of log p in {score_fn.label(j)}"
        for j in is_off.nonzero()[:, 0].tolist()
    ]
    return f"the score is {', '.join(words[:3])}{', ...' if len(words) > 3 else ''}"
