"""Coordinates that are not an affine map of the target's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from skksivi.score._score import Score


class Curved(ABC):
    """A smooth map from coordinates y, in which a target is nearly Gaussian, to its own, x."""

    @abstractmethod
    def to(self, device: torch.device) -> Self:
        """Return the same on a device."""

    @abstractmethod
    def unwarp(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return x (n, d) and the log-determinants (n,) of dx / dy at y (n, d)."""

    @abstractmethod
    def warp(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return y (n, d) and the log-determinants (n,) of dx / dy at x (n, d)."""

    def pull_back(self, score: Score) -> Score:
        r"""Return the score of y, :math:`J^\top s(x(y)) + \nabla_y \log \det J`, counted as a score of x.

        Its products are differences.
        """
        double = score.double

        def score_fn(y: Tensor) -> Tensor:
            with torch.enable_grad():
                y = y.detach().double().requires_grad_()
                x, log_scale = self.unwarp(y)
                s = double.uncounted(x.detach())
                (s_y,) = torch.autograd.grad((x * s).sum() + log_scale.sum(), y)
            return s_y.detach()

        def log_density(log_prob: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
            x, log_scale = self.unwarp(y.double())
            return log_prob(x).detach() + log_scale.detach()

        return replace(
            double,
            score_fn=score_fn,
            score_vjp=None,
            by_differences=True,
            units=None,
            log_prob=None if double.log_prob is None else partial(log_density, double.log_prob),
            in_double=None,
            minibatch=None,
            parts=None,
            exact=None,
            mode=None,
            names=(),
        )
