"""Descent by Adam of particles or the parameters of a Gaussian."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from skksivi.parameters import Adam
from skksivi.training._loop import Objective, minimise


class MovingPoints(nn.Module):
    """Points u (n, d) that move."""

    def __init__(self, u: Tensor) -> None:
        super().__init__()
        self.u = nn.Parameter(u, requires_grad=False)


def set_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Set the gradient of a parameter, in the memory that it may share with an optimiser."""
    if parameter.grad is None:
        parameter.grad = gradient.clone()
    else:
        parameter.grad.copy_(gradient)


class Descending:
    """Base of the estimators that descend by Adam."""

    max_iter: int
    learning_rate: float
    learning_rate_decay: str | None

    def _descend(
        self,
        gradient_fn: Callable[[], Tensor],
        module: nn.Module,
        generator: torch.Generator,
        ema: float | None = None,
    ) -> tuple[np.ndarray, BaseException | None]:
        """Move the parameters of a module against the gradient that `gradient_fn` sets.

        Returns
        -------
        curve : ndarray of shape (n_iter,)
            The values that `gradient_fn` returned.
        ended_by : FloatingPointError, KeyboardInterrupt or None
            The error that ended it early; the module holds the last finite state.
        """
        steps, rate = Adam(decay=self.learning_rate_decay, ema=ema), self.learning_rate
        run = minimise(Objective(gradient_fn), module, steps, generator, learning_rate=rate, max_iter=self.max_iter)
        curve = run.losses.astype(np.float64)
        if isinstance(run.ended_by, FloatingPointError):
            return curve, not_finite(str(run.ended_by))
        if not (run.ended_by is None or isinstance(run.ended_by, KeyboardInterrupt)):
            raise run.ended_by
        return curve, run.ended_by


def not_finite(what: str) -> FloatingPointError:
    return FloatingPointError(
        f"{what}: `score_fn` may be undefined or huge where the draws are. Lower `learning_rate`, or choose another "
        "`whiten` or `init`, so that the fit starts near the target."
    )
