r"""Terms of the objective that steer the kernel Stein discrepancy away from its blind spots, by Bénard et al. (2023).

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

from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from skksivi.parameters import Constraints, Interval, ParameterObject, Schedule
from skksivi.score._score import DifferentiableScore, ScoreFunction
from skksivi.training._loop import Scheduled

__all__ = ["Draws", "Entropic", "Laplacian", "Term"]
__dir__ = __all__.copy


class Draws(NamedTuple):
    """The arguments of a term at an iteration.

    Attributes
    ----------
    x : Tensor of shape (n, d)
        Draws, in the coordinates of the training.
    s : Tensor of shape (n, d)
        The score of the target there, not tempered.
    score : callable
        The score.
    generator : torch.Generator

    See Also
    --------
    Term : The base of all terms.
    """

    x: Tensor
    s: Tensor
    score: DifferentiableScore
    generator: torch.Generator


@dataclass(eq=False, repr=False)
class Term(ParameterObject, ABC):
    """A term of an objective beside the discrepancy; a subclass defines `gradient`.

    Parameters
    ----------
    weight : float or callable, default=1.0
        The weight, zero or more, or a function of progress in [0, 1] that returns it.

    See Also
    --------
    Entropic : Holds draws where p is large.
    Laplacian : Keeps draws out of saddles.
    Draws : What a term is given.
    """

    needs_second_derivative: ClassVar[bool] = False
    _parameter_constraints: ClassVar[Constraints] = {"weight": [Interval(Real, 0, None, closed="left"), callable]}

    weight: Schedule = 1.0

    @abstractmethod
    def gradient(self, draws: Draws, w: Tensor) -> Tensor:
        """Return the gradient (n, d) in the draws of the term times its weight w at this progress."""


class Entropic(Term):
    r"""The term :math:`-\frac{w_H}{N} \sum_i \log p(x_i)`, against draws where p is small; it needs the score only.

    Parameters
    ----------
    weight : float or callable, default=1.0
        The :math:`w_H`, zero or more, or a function of progress in [0, 1] that returns it.

    See Also
    --------
    Laplacian : Keeps draws out of saddles.
    skksivi.annealing.Linear : A linear schedule, as in the paper.

    Examples
    --------
    >>> from skksivi import KSIVIApproximator
    >>> from skksivi.terms import Entropic
    >>> KSIVIApproximator(terms=(Entropic(weight=0.1),))
    KSIVIApproximator(terms=(Entropic(weight=0.1),))
    """

    def gradient(self, draws: Draws, w: Tensor) -> Tensor:
        """Return the gradient (n, d) in the draws."""
        return -(w * draws.s / len(draws.x))


class Laplacian(Term):
    r"""The term :math:`\frac{w_\Delta}{N^2} \sum_i \Delta^+ \log p(x_i)`, against draws in saddles between modes.

    It needs a score that torch can differentiate twice, of all of the data.

    Parameters
    ----------
    weight : float or callable, default=1.0
        The :math:`w_\Delta`, zero or more, or a function of progress in [0, 1] that returns it.

    See Also
    --------
    Entropic : Holds draws where p is large.

    Examples
    --------
    >>> from skksivi import KSIVIApproximator
    >>> from skksivi.terms import Laplacian
    >>> KSIVIApproximator(terms=(Laplacian(weight=0.1),))
    KSIVIApproximator(terms=(Laplacian(weight=0.1),))
    """

    needs_second_derivative = True

    def gradient(self, draws: Draws, w: Tensor) -> Tensor:
        """Return the gradient (n, d) in the draws."""
        return w * laplacian_gradient(draws.score, draws.x, draws.generator) / len(draws.x) ** 2


class WeightedTerm(NamedTuple):
    """A term in a training: with its weight, the score, the inverse temperature c in it if there is one."""

    term: Term
    weight: Scheduled
    score: DifferentiableScore
    generator: torch.Generator
    c: Tensor | None = None

    def gradient(self, x: Tensor, s: Tensor) -> Tensor:
        """Return the gradient in draws x (n, d) with scores s, tempered if there is a c."""
        s_p = s if self.c is None else s / self.c
        gradient = self.term.gradient(Draws(x, s_p, self.score, self.generator), self.weight.value)
        if gradient.shape != x.shape:
            raise ValueError(
                f"`gradient` of {type(self.term).__name__} returned shape {tuple(gradient.shape)}, expected "
                f"{tuple(x.shape)}, the shape of the draws."
            )
        return gradient


def laplacian_gradient(score_fn: ScoreFunction, x: Tensor, generator: torch.Generator) -> Tensor:
    r"""Return the gradient (n, d) of :math:`\sum_i \Delta^+ \log p(x_i)` by differentiating the score twice.

    Beyond 32 dimensions the second derivatives are estimated by :math:`v \odot J v` with random signs v
    (Hutchinson), and their positive parts with them.
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        s = score_fn(x)
        d = x.shape[1]
        if d <= 32:  # the diagonal is computed, and not estimated by one random direction
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
