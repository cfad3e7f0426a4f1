"""Coordinates of a target: an affine map, and a curved one where the target has curves or heavy tails."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import numpy as np
import torch
from torch import Tensor

from skksivi.coordinates._affine import FAR, AffineMap, Identity, WhitenedScore
from skksivi.score._score import DifferentiableScore, Halves, Score


@dataclass
class Coordinates:
    r"""Coordinates u, in which x = y or, with a warp, x = x(y), and :math:`y = m + L u`.

    Attributes
    ----------
    map : Affine, LowRank or Identity
        The map from u to y.
    warp : Curved or None
        The map from y to x.
    """

    map: AffineMap
    warp: Curved | None = None

    def straighten(self, score: Score) -> Score:
        """Return the score of y, given the score of x."""
        return score if self.warp is None else self.warp.pull_back(score)

    def pull_back(self, score: Score) -> Score | WhitenedScore:
        """Return the score of u, given the score of x."""
        return self.map.pull_back(self.straighten(score))

    def push_forward(self, u: Tensor) -> Tensor:
        """Return the points x (n, d) at u (n, d)."""
        y = self.map.unwhiten(u)
        return y if self.warp is None else self.warp.unwarp(y)[0]

    def whiten(self, x: Tensor) -> Tensor:
        """Return the u (n, d) of points x (n, d)."""
        return self.map.whiten(x if self.warp is None else self.warp.warp(x)[0])

    def log_density(self, of_u: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-densities of points x (n, d) and their standard errors, given a function that returns those
        of points u; they are -inf where no draw can be.
        """
        y, log_scale = (x, None) if self.warp is None else self.warp.warp(x)
        u = self.map.whiten(y)
        finite = (u.abs() < FAR).all(1)  # beyond, squares are infinite
        value, se = x.new_full((len(x),), -math.inf), x.new_zeros(len(x))
        if finite.any():
            value[finite], se[finite] = of_u(u[finite])
        impossible = value.isnan()
        value = value.where(~impossible, -math.inf) - self.map.log_determinant()
        return value if log_scale is None else value - log_scale, se.where(~impossible, 0.0)

    def to(self, device: torch.device) -> Self:
        if self.map.m.device == device:
            return self
        warp = None if self.warp is None else self.warp.to(device)
        return replace(self, map=type(self.map)(*(a.to(device) for a in self.map)), warp=warp)

    @property
    def m(self) -> np.ndarray:
        """The shift, shape (d,)."""
        return self.map.m.cpu().numpy()

    @property
    def L(self) -> np.ndarray:  # noqa: N802
        """The factor of the covariance, shape (d, d); lower triangular up to 1,000 features."""
        m = self.map.m
        return self.map.unwhiten_direction(torch.eye(len(m), dtype=m.dtype, device=m.device)).mT.cpu().numpy()

    @property
    def condition(self) -> float:
        """The condition number of the covariance L L^T."""
        return float(np.linalg.cond(self.L)) ** 2


def score_for_training(score: Score, coordinates: Coordinates, generator: torch.Generator) -> DifferentiableScore:
    """Return the score of u for a training, with minibatches drawn by the generator.

    It is in float64 if rounding costs more than 1%, and for finite differences.
    """
    score = coordinates.straighten(score)
    score_u = coordinates.map.pull_back(score.double if _needs_double(score, coordinates.map) else score)
    return score_u if score_u.minibatch is None else Halves(score_u, generator)


def _needs_double(score: Score, map_: AffineMap) -> bool:
    """Tell whether rounding costs more than 1% of the score of u, or products are finite differences."""
    if score.by_differences or isinstance(map_, Identity):
        return score.by_differences
    exact, rounded = map_.pull_back(score.double), map_.pull_back(score)
    u = torch.randn(64, score.n_features, generator=torch.Generator().manual_seed(0))
    u = u.to(dtype=score.dtype, device=score.device)
    s = exact.with_pullback(u)[0]
    error = torch.linalg.vector_norm(rounded.with_pullback(u)[0] - s, dim=1) / torch.linalg.vector_norm(s, dim=1)
    return bool(error.nan_to_num(math.inf).median() >= 0.01)


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
