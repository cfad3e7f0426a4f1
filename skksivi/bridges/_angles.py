"""Angles in models of other libraries, each on one period."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from skksivi.bridges._foreign import HasData, ModelTarget
from skksivi.targets import NamedTarget


class AngularTarget(HasData, NamedTarget):
    r"""A target some of whose coordinates are angles t, by coordinates u of one period of each.

    .. math:: t = m + 2 \arctan(c \tan(\pi (\Phi(u) - 1/2)))

    If t is uniform and c = 1, u is standard normal; if t is concentrated at m, so is u at zero. For any m and c the
    density of u is proper and the angle has the right one; near a normal density is what the choices here are for: of
    a von Mises density of concentration k they are m, its mode, and c = max(1 / (1 + k), 1/2).

    Attributes
    ----------
    is_angle : Tensor of shape (d,), bool
    middle, spread : Tensor of shape (d,)
        These m and c.
    """

    def __init__(self, one: ModelTarget, columns: list[int]) -> None:
        super().__init__(f"unconstrained({name})" if j in columns else name for j, name in enumerate(one.names))
        self.coords, self.dims, self.advice = one.coords, one.dims, getattr(one, "advice", "")
        self.observed_data, self.constant_data = one.observed_data, one.constant_data
        self._one = one
        self.is_angle = torch.zeros(one.n_features, dtype=torch.bool).index_fill(0, torch.tensor(columns), value=True)
        self.middle, self.spread = torch.ones(2, one.n_features, dtype=torch.float64).unbind()
        n = 64
        x = torch.zeros(n, one.n_features, dtype=torch.float64)  # the angles before it at their middles
        for j in columns:
            x[:, j] = torch.arange(n) * 2 * math.pi / n - math.pi
            log_p = one.log_prob(x).nan_to_num(nan=-math.inf)
            x[:, j] = self.middle[j] = x[log_p.argmax(), j]
            self.spread[j] = (1 / (1 + (log_p.max() - log_p.min()) / 2)).clamp_min(0.5)

    def log_prob(self, x: Tensor) -> Tensor:
        """Evaluate log p at each row of x (n, d), with a graph for one derivative."""
        points, log_jacobian = self._points(x)
        value = self._one.log_prob(points)
        return value + log_jacobian.to(value)

    def score_fn(self, x: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of x (n, d), without a graph, as accurately as its target."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            points, log_jacobian = self._points(x)
            s = self._one.score_fn(points.detach())
            (pulled_back,) = torch.autograd.grad([points, log_jacobian], x, [s.to(x), torch.ones_like(x[:, 0])])
        return pulled_back.to(s)

    def prior_draws(self, n: int, seed: int) -> np.ndarray:
        """Draw at most n points (k, d) from the prior, with angles as their own densities suggest."""
        X, is_angle = self._one.prior_draws(n, seed), self.is_angle.numpy()
        return np.where(is_angle, np.random.RandomState(seed).normal(size=X.shape), X)

    def densities(self, x: Tensor, *, observed: bool) -> dict[str, np.ndarray]:
        """Evaluate log-densities of what the model observes, or of its parameters, element by element."""
        return self._one.densities(self._points(x)[0], observed=observed)

    def predictive_draws(self, x: Tensor, seed: int) -> dict[str, np.ndarray]:
        """Draw what the model observes once for each row of x (n, d)."""
        return self._one.predictive_draws(self._points(x)[0], seed)

    def _points(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the points (n, d) of the target, and the logarithm (n,) of the Jacobian, up to a constant."""
        is_angle, middle, c = self.is_angle.to(x.device), self.middle.to(x), self.spread.to(x)
        half = math.pi * (torch.special.ndtr(x) - 0.5)
        sin, cos = c * half.sin(), half.cos()
        log_jacobian = -x.square() / 2 - torch.log(sin.square() + cos.square())
        return (middle + 2 * torch.atan2(sin, cos)).where(is_angle, x), log_jacobian.where(is_angle, 0).sum(1)

    def _constrain(self, X: np.ndarray) -> dict[str, np.ndarray]:
        return self._one.constrain(self._points(torch.from_numpy(X))[0])


def on_one_period(target: ModelTarget, angles: Collection[str]) -> NamedTarget:
    """Return a target with one period of the parameters that are angles, whose density has a period of 2 pi."""
    columns = [j for j, name in enumerate(target.names) if name.partition("[")[0] in angles]
    return AngularTarget(target, columns) if columns else target
