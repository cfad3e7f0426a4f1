r"""Terms that steer the kernel Stein discrepancy away from its blind spots, by Bénard et al. (2023).

The regularised objective is

.. math:: \mathrm{KSD}^2 + \frac{w_\Delta}{N^2} \sum_i \Delta^+ \log p(x_i) - \frac{w_H}{N} \sum_i \log p(x_i), \qquad
    \Delta^+ \log p = \sum_j \max(0, \partial_j^2 \log p),

the Laplacian term against draws that sit in saddles between modes, the entropic one against draws where p is small.

References
----------
Bénard, C., Staber, B. and Da Veiga, S. (2023). Kernel Stein discrepancy thinning: a theoretical perspective of
pathologies and a practical fix with regularization. https://arxiv.org/abs/2301.13528
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from skksivi._saved import checkpointed
from skksivi.score._score import ScoreFunction
from skksivi.training._loop import Scheduled

#: Dimensions up to which the diagonal of the Jacobian is computed, and not estimated by one random direction.
MAX_EXACT = 32


#: Distances at which the tails of a density are looked at, and how well they must agree.
RADII, AGREEMENT = (1e4, 1e5, 1e6), 0.02


def laplacian_gradient(score_fn: ScoreFunction, x: Tensor, generator: torch.Generator) -> Tensor:
    r"""Return the gradient (n, d) of :math:`\sum_i \Delta^+ \log p(x_i)` by differentiating the score twice.

    Beyond 32 dimensions the second derivatives are estimated by :math:`v \odot J v` with random signs v
    (Hutchinson), and their positive parts with them.
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        s = score_fn(x)
        d = x.shape[1]
        if d <= MAX_EXACT:
            columns = [torch.autograd.grad(s[:, j].sum(), x, create_graph=True)[0][:, j] for j in range(d)]
            curvatures = torch.stack(columns, 1)
        else:
            v = torch.empty_like(x).bernoulli_(generator=generator) * 2 - 1
            curvatures = v * torch.autograd.grad(s, x, v, create_graph=True)[0]
        total = curvatures.clamp_min(0).sum()
        if not total.requires_grad:
            return torch.zeros_like(s)
        (gradient,) = torch.autograd.grad(total, x, allow_unused=True, materialize_grads=True)
    return gradient


def tail_exponent(score_fn: Callable[[Tensor], Tensor], d: int) -> float | None:
    r"""Return the a of tails :math:`p \propto \|x\|^{-a}`, where :math:`-s(x)^\top x \to a`; None for other tails.

    The slowest of some directions counts, since p^c is improper for c a <= d there.
    """
    rays = torch.randn(16, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rays = rays / rays.norm(dim=1, keepdim=True)
    exponents = torch.stack([-(score_fn(r * rays) * r * rays).sum(1) for r in RADII])
    converged = (exponents - exponents[-1]).abs().amax(0) < AGREEMENT * exponents[-1].abs()
    slow = exponents[-1][converged & exponents[-1].isfinite() & (exponents[-1] > 0)]
    return slow.min().item() if len(slow) else None


class Term(Protocol):
    """A term of an objective beside the discrepancy."""

    def gradient(self, x: Tensor, s: Tensor) -> Tensor:
        """Return the gradient in draws x (n, d) with scores s."""


class Entropic:
    r"""The term :math:`-\frac{w_H}{N} \sum_i \log p(x_i)`, by the scores of the draws, whether tempered or not."""

    def __init__(self, weight: Scheduled, tempers: Scheduled | None = None) -> None:
        self.weight = weight
        self.tempers = tempers

    def gradient(self, x: Tensor, s: Tensor) -> Tensor:
        """Return the gradient in draws x (n, d) with scores s."""
        s_p = s if self.tempers is None else s / self.tempers.value
        return -(self.weight.value * s_p / len(x))


class Laplacian:
    r"""The term :math:`\frac{w_\Delta}{N^2} \sum_i \Delta^+ \log p(x_i)`."""

    def __init__(self, weight: Scheduled, score_fn: ScoreFunction, generator: torch.Generator) -> None:
        self.weight = weight
        self.score_fn = score_fn
        self.generator = generator

    def gradient(self, x: Tensor, s: Tensor) -> Tensor:
        """Return the gradient in draws x (n, d) with scores s."""
        return self.weight.value * laplacian_gradient(self.score_fn, x, self.generator) / len(x) ** 2


@checkpointed
class Moments(NamedTuple):
    r"""The moments :math:`E u` (..., d), :math:`E u u^\top` (..., d, d) and :math:`E u_i^3` (..., d)."""

    first: Tensor
    second: Tensor
    third: Tensor


def moments(u: Tensor) -> Moments:
    """Estimate the moments from draws (..., n, d)."""
    return Moments(u.mean(-2), u.mT @ u / u.shape[-2], u.pow(3).mean(-2))


@checkpointed
class MomentPenalty:
    r"""A penalty on the departure of the draws' moments from given ones,

    .. math::
        w \left( \|\Delta E u\|^2 + \tfrac12 \|\Delta E u u^\top\|_F^2 + \tfrac1{15} \|\Delta E u^3\|^2 \right),

    each term divided by the variance of what it estimates under N(0, I). The departures are running averages over
    batches; the gradient goes through the batch at hand.

    Parameters
    ----------
    target : Moments
        With the leading axes of the draws.
    weight : float
        The w of the formula.
    memory : float, default=0.95
        Decay of the running averages.
    """

    def __init__(self, target: Moments, weight: float, memory: float = 0.95) -> None:
        self.target = target
        self.weight = weight
        self.memory = memory
        self._running = Moments(*(a.clone() for a in target))

    def gradient(self, u: Tensor, s: Tensor | None = None) -> Tensor:
        """Return the gradient in the draws u (..., n, d), those of several layers each for themselves."""
        for running, now in zip(self._running, moments(u), strict=True):
            running.lerp_(now, 1 - self.memory)
        first, second, third = (a - b for a, b in zip(self._running, self.target, strict=True))
        gradient = 2 * u @ second + 2 * first.unsqueeze(-2) + 0.4 * third.unsqueeze(-2) * u.square()
        return gradient.mul_(self.weight / u.shape[-2])


class Departure(NamedTuple):
    """How far the draws of a fit are from those it started with, coordinate by coordinate.

    Attributes
    ----------
    sd_ratio : Tensor of shape (d,)
    third : Tensor of shape (d,)
        The change of the third moment of standardised draws.
    """

    sd_ratio: Tensor
    third: Tensor

    @property
    def excess(self) -> Tensor:
        """The departure (d,) in units of what is allowed: 10% of the standard deviation, 0.8 of the third moment."""
        return torch.maximum(self.sd_ratio.log().abs() / math.log(1.1), self.third.abs() / 0.8)

    @property
    def accepted(self) -> bool:
        """Whether no coordinate has departed farther than is allowed."""
        return bool((self.excess <= 1).all())


def departure(u: Tensor, start: Tensor) -> Departure:
    """Compare draws with those of the start, both (n, d), best made from the same noise."""
    mean, sd = start.mean(0), start.std(0)
    third = ((u - mean) / sd).pow(3).mean(0) - ((start - mean) / sd).pow(3).mean(0)
    return Departure(u.std(0) / sd, third)
