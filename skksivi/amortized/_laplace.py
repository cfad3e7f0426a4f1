"""Modes of many posteriors at once, from their scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.amortized._contexts import Rows, take
from skksivi.amortized._paired import PairedScore
from skksivi.score import BudgetError


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
