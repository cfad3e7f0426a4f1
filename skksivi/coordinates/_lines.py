r"""Integrals of the score along lines, which are differences of log p."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from skksivi.score._score import ScoreFunction

#: Where a panel is split, how often at most, and the most panels that a line may have open at once.
SPLIT, MAX_SPLITS, MAX_PANELS = 0.4, 40, 200


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


def kronrod(score_fn: ScoreFunction, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    r"""Integrate the score along lines by Kronrod's extension of Lobatto's rule of four points, to seven.

    Parameters
    ----------
    score_fn : callable
    a : Tensor of shape (d,)
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
    outer, inner = math.sqrt(2 / 3), 1 / math.sqrt(5)
    nodes = a.new_tensor([1 - outer, 1 - inner, 1, 1 + inner, 1 + outer, 2])
    points = torch.lerp(a, b, nodes[:, None, None] / 2)
    s_a, s = score_fn(a[None]).detach(), score_fn(points.flatten(0, 1)).detach().view(points.shape)
    f1, f2, f3, f4, f5, f_b = (s * (b - a)).sum(-1)
    ends = (s_a * (b - a)).sum(-1) + f_b
    ratio = (77 * ends + 432 * (f1 + f5) + 625 * (f2 + f4) + 672 * f3) / 2940
    return ratio, ratio - (ends + 5 * (f2 + f4)) / 12


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
    low = a.new_tensor([0.0, SPLIT]).repeat_interleave(len(gaps))
    width = a.new_tensor([SPLIT, 1 - SPLIT]).repeat_interleave(len(gaps))
    value = integrals(row, low, width)
    for _ in range(MAX_SPLITS):
        row, low = row.repeat(2), torch.cat([low, low + SPLIT * width])
        width = torch.cat([SPLIT * width, (1 - SPLIT) * width])
        parts = integrals(row, low, width)
        first, second = parts.chunk(2)
        open_ = ~((value - first - second).abs() < 1e-4 + 1e-8 * (first.abs() + second.abs()))
        closed = row[: len(value)][~open_]
        total.index_add_(0, closed, (first + second)[~open_])
        size.index_add_(0, closed, (first.abs() + second.abs())[~open_])
        row, low, width, value = (v[open_.repeat(2)] for v in (row, low, width, parts))
        if not len(row) or len(row) > MAX_PANELS * len(gaps):
            break
    total[row] = torch.nan
    total[(size > 1e8) & (total.abs() < size / 2)] = torch.nan  # after so deep a valley only rounding is left
    return total.view(b.shape[:-1])
