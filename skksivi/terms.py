r"""Terms of the objective that steer the kernel Stein discrepancy away from its blind spots, by Bénard et al. (2023).

The regularised objective is

.. math:: \mathrm{KSD}^2 - \frac{w_H}{N} \sum_i \log p(x_i),

whose entropic term is against draws where p is small.

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

from torch import Tensor

from skksivi.parameters import Constraints, Interval, ParameterObject, Schedule
from skksivi.training._loop import Scheduled

__all__ = ["Draws", "Entropic", "Term"]
__dir__ = __all__.copy


class Draws(NamedTuple):
    """The arguments of a term at an iteration.

    Attributes
    ----------
    x : Tensor of shape (n, d)
        Draws, in the coordinates of the training.
    s : Tensor of shape (n, d)
        The score of the target there, not tempered.

    See Also
    --------
    Term : The base of all terms.
    """

    x: Tensor
    s: Tensor


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
    Draws : What a term is given.
    """

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
    Term : The base of all terms.
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


class WeightedTerm(NamedTuple):
    """A term in a training: with its weight, and the inverse temperature c in the score if there is one."""

    term: Term
    weight: Scheduled
    c: Tensor | None = None

    def gradient(self, x: Tensor, s: Tensor) -> Tensor:
        """Return the gradient in draws x (n, d) with scores s, tempered if there is a c."""
        s_p = s if self.c is None else s / self.c
        gradient = self.term.gradient(Draws(x, s_p), self.weight.value)
        if gradient.shape != x.shape:
            raise ValueError(
                f"`gradient` of {type(self.term).__name__} returned shape {tuple(gradient.shape)}, expected "
                f"{tuple(x.shape)}, the shape of the draws."
            )
        return gradient
