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

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from skksivi._score import ScoreFunction
from skksivi._training import Scheduled

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
    settled = (exponents - exponents[-1]).abs().amax(0) < AGREEMENT * exponents[-1].abs()
    slow = exponents[-1][settled & exponents[-1].isfinite() & (exponents[-1] > 0)]
    return slow.min().item() if len(slow) else None


class Term(Protocol):
    """A term of an objective beside the discrepancy."""

    def gradient(self, x: Tensor, s: Tensor) -> Tensor:
        """Return the gradient in draws x (n, d) with scores s."""


class Entropic:
    r"""The term :math:`-\frac{w_H}{N} \sum_i \log p(x_i)`, by the scores of the draws."""

    def __init__(self, weight: Scheduled) -> None:
        self.weight = weight

    def gradient(self, x: Tensor, s: Tensor) -> Tensor:
        """Return the gradient in draws x (n, d) with scores s."""
        return -(self.weight.value * s / len(x))


class Laplacian:
    r"""The term :math:`\frac{w_\Delta}{N^2} \sum_i \Delta^+ \log p(x_i)`."""

    def __init__(self, weight: Scheduled, score_fn: ScoreFunction, generator: torch.Generator) -> None:
        self.weight = weight
        self.score_fn = score_fn
        self.generator = generator

    def gradient(self, x: Tensor, s: Tensor) -> Tensor:
        """Return the gradient in draws x (n, d) with scores s."""
        return self.weight.value * laplacian_gradient(self.score_fn, x, self.generator) / len(x) ** 2
