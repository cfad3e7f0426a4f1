"""What ends a fit early, apart from errors of the score itself."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class BudgetError(Exception):
    """A score would be evaluated more often than the limit allows."""


class DivergedError(ValueError):
    """The search for a target has produced points x (n, d) that are not finite, or too far in some feature."""

    def __init__(self, x: Tensor | None = None) -> None:
        self.feature = None if x is None or not x.numel() else int(x.abs().nan_to_num(math.inf).mean(0).argmax())
        super().__init__(
            "The search for the target reached values that are not finite: `score_fn` may have the wrong sign (it "
            "is the gradient of log p, not of -log p) or belong to no proper density. Else set `init` to a point "
            "near a mode or, where there is such a parameter, `whiten` to a pair (mean, Cholesky factor) or to None."
        )


#: What ends a search, or chains, that have left the finite numbers.
DIVERGED = (DivergedError, torch.linalg.LinAlgError)


class Doubt(NamedTuple):
    """What seems wrong with the domain of a target.

    Attributes
    ----------
    words : str
        For the user.
    ends : Tensor of shape (d, 2) or None
        Where the density seems to end along each coordinate, infinite where it does not; None if that is not it.
    """

    words: str
    ends: Tensor | None = None

    def concerns(self, x: Tensor) -> bool:
        """Tell whether an end is so near to draws x (n, d) that it is no number that overflows far out."""
        if self.ends is None:
            return True
        near = (self.ends.to(x) - x.mean(0)[:, None]).abs() < 20 * x.std(0)[:, None]
        return not bool(x.isfinite().all()) or bool(near.any())
