"""The path of a diffusion, observed with noise."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from skksivi._utils.checks import check_integer
from skksivi.targets._base import Target


class ConditionedDiffusion(Target):
    r"""The path of :math:`dx = b(x)\,dt + dw` from 0, given noisy observations of every fifth point.

    The drift is :math:`b(x) = 10 x (1 - x^2)`. With the Euler-Maruyama step :math:`\Delta = 1/d` and innovations
    :math:`r_k = x_k - x_{k-1} - \Delta\, b(x_{k-1})`,

    .. math::
        \log p(x | y) = -\sum_{k=1}^d \frac{r_k^2}{2 \Delta} - \sum_{k \in 5\mathbb{N}} \frac{(y_k - x_k)^2}{2 \tau^2}
        + \mathrm{const}, \qquad \tau = 0.1.

    Parameters
    ----------
    n_features : int, default=100
        Number d of points of the path, a multiple of 5.

    Attributes
    ----------
    path : Tensor of shape (d,)
        The path that was observed, simulated from a fixed seed.
    observations : Tensor of shape (d / 5,)
        The y_k, with noise of standard deviation 0.1.

    Raises
    ------
    TypeError, ValueError
        `n_features` is not a positive multiple of 5.

    See Also
    --------
    BrownianBridge : A random walk with unknown scales.

    References
    ----------
    Detommaso, G. et al. (2018). A Stein variational Newton method. https://arxiv.org/abs/1806.03085

    Examples
    --------
    >>> import torch
    >>> from skksivi.targets import ConditionedDiffusion
    >>> ConditionedDiffusion(n_features=50).score_fn(torch.zeros(1, 50)).shape
    torch.Size([1, 50])
    """

    up_to_constant = True

    def __init__(self, n_features: int = 100) -> None:
        if check_integer(n_features, "n_features", min_val=5) % 5:
            raise ValueError(f"`n_features` must be a multiple of 5, got {n_features!r}.")
        self.n_features = int(n_features)
        self.step = 1 / self.n_features
        self.path, self.observations = _simulate(self.n_features, self.step)
        self._precision = torch.zeros_like(self.path)
        self._precision[4::5] = 0.1**-2
        self._y = torch.zeros_like(self.path)
        self._y[4::5] = self.observations

    def log_prob(self, x: Tensor) -> Tensor:
        """Evaluate log p at each row of x (n, d), up to a constant."""
        misfit = self._precision.to(x) * (self._y.to(x) - x).square()
        return -(self._innovations(x).square() / self.step + misfit).sum(-1) / 2

    def score_fn(self, x: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of x (n, d)."""
        r = self._innovations(x) / self.step
        onward = r[..., 1:] * (1 + self.step * self._slope(x[..., :-1]))
        pulled = torch.nn.functional.pad(onward, (0, 1)) - r
        return pulled + self._precision.to(x) * (self._y.to(x) - x)

    def score_vjp(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the score at x and the product with its tridiagonal Jacobian."""
        precision, head = self._precision.to(x), x[..., :-1]
        gain = 1 + self.step * self._slope(head)
        r = self._innovations(x) / self.step
        s = torch.addcmul(precision * self._y.to(x), precision, x, value=-1).sub_(r)
        s[..., :-1].addcmul_(r[..., 1:], gain)

        def vjp(v: Tensor) -> Tensor:
            diagonal = (r[..., 1:] * self._bend(head)).mul_(self.step).addcmul_(gain, gain, value=-1 / self.step)
            product = v * -(precision + 1 / self.step)
            product[..., :-1] += diagonal * v[..., :-1]
            off = gain / self.step
            product[..., :-1].addcmul_(off, v[..., 1:])
            product[..., 1:].addcmul_(off, v[..., :-1])
            return product

        return s, vjp

    def _innovations(self, x: Tensor) -> Tensor:
        before = torch.nn.functional.pad(x[..., :-1], (1, 0))
        return x - before - self.step * self._drift(before)

    # b and its first two derivatives

    @staticmethod
    def _drift(x: Tensor) -> Tensor:
        return drift(x)

    @staticmethod
    def _slope(x: Tensor) -> Tensor:
        return 10 - 30 * x.square()

    @staticmethod
    def _bend(x: Tensor) -> Tensor:
        return -60 * x


def drift(x: Tensor) -> Tensor:
    return 10 * x * (1 - x.square())


def _simulate(n_features: int, step: float) -> tuple[Tensor, Tensor]:
    """Return a path and every fifth point of it observed with sd 0.1.

    In float32 and in this order, as the public code of the method: the numbers are the same to the last bit.
    """
    generator = torch.Generator().manual_seed(2022)

    def normal(n: int) -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float32, device="cpu")

    increments = math.sqrt(step) * normal(n_features)
    x, points = torch.zeros((), dtype=torch.float32, device="cpu"), []
    for dw in increments:
        x = x + step * drift(x) + dw
        points.append(x)
    path = torch.stack(points)
    return path.double(), (path[4::5] + 0.1 * normal(n_features // 5)).double()
