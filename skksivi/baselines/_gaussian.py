"""Gaussian approximations."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from skksivi._score import Score
from skksivi._whitening import saddle_free_newton
from skksivi.base import BaseApproximator, Integral, Interval


class Laplace(BaseApproximator):
    r"""Gaussian at a mode, with the inverse curvature there as covariance.

    The mode is found from the score alone, by saddle-free Newton steps from the origin in float64.

    Parameters
    ----------
    max_iter : int, default=200
        Newton steps.
    device : str or torch.device, default="auto"
        Where to compute; "auto" takes a GPU where there is one.
    dtype : {"float32", "float64"}, default="float64"
        Type of the draws.
    random_state : int, RandomState or None, default=None
        Seeds the samples.

    Attributes
    ----------
    mean_ : ndarray of shape (n_features,)
        The mode.
    covariance_ : ndarray of shape (n_features, n_features)
        The inverse of minus the Jacobian of the score there.
    n_features_in_ : int
        Dimension of the target.

    References
    ----------
    Dauphin, Y. et al. (2014). Identifying and attacking the saddle point problem in high-dimensional non-convex
    optimization. https://arxiv.org/abs/1406.2572

    Examples
    --------
    >>> from skksivi.baselines import Laplace
    >>> Laplace().fit(lambda x: (3 - x) / 4, n_features=1).covariance_
    array([[4.]])
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **BaseApproximator._parameter_constraints,
        "max_iter": [Interval(Integral, 1, None, closed="left")],
    }

    def __init__(
        self,
        *,
        max_iter: int = 200,
        device: str | torch.device = "auto",
        dtype: str = "float64",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.max_iter = max_iter
        self.device = device
        self.dtype = dtype
        self.random_state = random_state

    def _fit(self, score_fn: Score, generator: torch.Generator) -> None:
        origin = torch.zeros(score_fn.n_features, dtype=torch.float64, device=score_fn.device)
        self._map = saddle_free_newton(score_fn.double, origin, self.max_iter)
        self.mean_ = self._map.m.cpu().numpy()
        self.covariance_ = (self._map.L @ self._map.L.mT).cpu().numpy()

    def _sample(self, n: int, generator: torch.Generator) -> Tensor:
        m = self._map.m
        u = torch.randn(n, len(m), generator=generator, dtype=m.dtype, device=m.device)
        return self._map.unwhiten(u)

    def _log_density(self, x: Tensor) -> Tensor:
        u = self._map.whiten(x)
        return -u.square().sum(-1) / 2 - self._map.log_determinant() - x.shape[-1] / 2 * math.log(2 * math.pi)
