"""What ends a fit early, apart from errors of the score itself."""

from __future__ import annotations

import math

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
