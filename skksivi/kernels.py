r"""Positive definite kernels between draws.

Every kernel here is a profile :math:`\varphi` of one scaled distance,

.. math:: k(x, y) = \varphi\left(\|x - y\|^2 / h^2\right),

the Riesz kernel less its values at (x, 0) and (0, y). The bandwidth :math:`h` is a positive number or set by the
median heuristic: the width at which the median pair lies at a scaled distance fixed by the kernel. Gradients flow
through the median, which makes the kernel scale-free and keeps training from lowering the loss by spreading out.

A kernel is a `profile`, with a `slope` and a `median_level` of its own if these are known. The median is
taken over the pairs of the first 128 draws, which are as random as any others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from sklearn.base import BaseEstimator, clone
from torch import Tensor

from skksivi._utils.arrays import argmedian
from skksivi._utils.checks import lies_between, shown

__all__ = ["IMQ", "KERNELS", "Gaussian", "Kernel", "Laplace", "Riesz"]
__dir__ = __all__.copy

#: The median heuristic looks at the pairs of this many draws, so that it costs little beside the kernel itself.
MAX_MEDIAN_DRAWS = 128

#: Maps the gradients of a function in two arguments, both (..., n, d), to those in two others.
Gradients = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def centre(x: Tensor) -> Tensor:
    """Return the medians (..., 1, d) of three of the rows of x (..., n, d).

    Products of rows cancel if the rows are far from the origin: they are taken from here, where no single row that is
    far out leads.
    """
    a, b, c = x[..., :1, :], x[..., x.shape[-2] // 2, None, :], x[..., -1:, :]
    return torch.maximum(torch.minimum(a, b), torch.minimum(torch.maximum(a, b), c))


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Return the squared Euclidean distances (..., n, m) between rows (..., n, d) and (..., m, d)."""
    c = centre(x.detach())
    x, y = x - c, y - c
    squares = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1).unsqueeze(-2)
    return (squares - 2 * x @ y.mT).clamp_min(0)


def median_pair(squared: Tensor, *, within: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Find the lower median of the pairs of the first 128 rows and columns.

    Parameters
    ----------
    squared : Tensor of shape (..., n, m)
        Squared distances.
    within : bool
        Whether rows and columns are the same draws; a draw is then no pair with itself.

    Returns
    -------
    median, i, j : Tensors of shape (...)
        The median, with its graph, and the row and column of its pair.
    """
    block = squared[..., :MAX_MEDIAN_DRAWS, :MAX_MEDIAN_DRAWS]
    m = block.shape[-1]
    if m <= within:
        raise ValueError("The median heuristic needs at least two draws; give `bandwidth` a number.")
    if within:  # drop the diagonal: after the first entry it ends every row of m + 1
        pairs = block.flatten(-2)[..., 1:].unflatten(-1, (m - 1, m + 1))[..., :-1].flatten(-2)
        index = argmedian(pairs)
        index = index + 1 + index.div(m, rounding_mode="floor")
    else:
        index = argmedian(block.flatten(-2))
    i, j = index.div(m, rounding_mode="floor"), index % m
    return block.flatten(-2).gather(-1, index.unsqueeze(-1)).squeeze(-1), i, j


@dataclass(kw_only=True, eq=False, repr=False)
class Kernel(BaseEstimator, ABC):
    """Base of the kernels; a subclass gives `profile` and, if it likes, `slope` and `median_level`.

    Parameters
    ----------
    bandwidth : float or "median", default="median"
        The width h > 0 in the units of the draws, or the median heuristic.

    See Also
    --------
    Gaussian : The default, sensitive to shape in a few dimensions.
    IMQ : Decays slowly, for many dimensions.
    Riesz : Unbounded, for heavy tails.

    Examples
    --------
    >>> import torch
    >>> from skksivi.kernels import Gaussian
    >>> x = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    >>> Gaussian(bandwidth=5.0)(x)
    tensor([[1.0000, 0.6065],
            [0.6065, 1.0000]])
    """

    #: Whether k(x, y) = phi(x - y) - phi(x) - phi(y), for a phi that is only conditionally positive definite.
    centred = False
    #: Whether the profile has two derivatives at zero, as the diagonal of a Stein kernel needs.
    smooth = True

    bandwidth: float | str = "median"

    @property
    def euclidean(self) -> bool:
        """Whether the distance is the Euclidean one."""
        return True

    def __call__(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Evaluate k on all pairs of rows.

        Parameters
        ----------
        x : Tensor of shape (..., n, d)
        y : Tensor of shape (..., m, d), default=None
            None means `x` itself; the median is then taken over pairs of different rows.

        Returns
        -------
        k : Tensor of shape (..., n, m)
            In float32 at least.
        """
        if x.dtype in (torch.float16, torch.bfloat16):
            x, y = x.float(), None if y is None else y.float()
        squared = self.squared_distances(x, x if y is None else y)
        if y is None:
            squared.diagonal(dim1=-2, dim2=-1).zero_()  # not the rounding error of a cancellation
        h2 = self.squared_bandwidth(squared, within=y is None)
        k = self.profile(squared / h2)
        if self.centred:
            norms_x, norms_y = self._squared_norms(x), self._squared_norms(x if y is None else y)
            k = k - self.profile(norms_x.unsqueeze(-1) / h2) - self.profile(norms_y.unsqueeze(-2) / h2)
        return k

    @abstractmethod
    def profile(self, t: Tensor) -> Tensor:
        """Return phi(t) at scaled squared distances t."""

    def slope(self, t: Tensor, k: Tensor) -> Tensor:
        """Return the derivative phi'(t), given t and k = phi(t); by automatic differentiation unless overridden."""
        with torch.enable_grad():
            at = t.detach().requires_grad_()
            return torch.autograd.grad(self.profile(at).sum(), at)[0]

    def median_level(self, n: int) -> float:
        """Return the scaled squared distance t of the median pair of n draws, one unless overridden."""
        return 1.0

    def derivatives(self, squared: Tensor, order: int) -> list[Tensor]:
        """Return phi and its derivatives in the squared distance, up to an order, at a fixed bandwidth."""
        h2 = self.fixed_squared_bandwidth(squared)
        with torch.enable_grad():
            squared = squared.detach().requires_grad_()
            values = [self.profile(squared / h2)]
            for k in range(1, order + 1):
                values += torch.autograd.grad(values[-1].sum(), squared, create_graph=k < order)
        return [value.detach() for value in values]

    def weighted(self, x: Tensor, f: Tensor) -> tuple[Kernel, Tensor, Gradients]:
        r"""Move the root of a metric of the kernel into f, where a sum over pairs is to be taken; here there is none.

        Returns
        -------
        kernel : Kernel
            The k.
        g : Tensor of shape (..., n, d)
            The f in the metric, so that :math:`\sum_{ij} k(x_i, x_j) \langle g_i, g_j \rangle` is the sum.
        pullback : callable
            Maps the gradients of that sum in x, while g stands still, and in g to those in x and f.
        """
        return self, f, lambda dx, df: (dx, df)

    def frozen(self, x: Tensor) -> Self:
        """Return a copy whose bandwidth is a number, set by the median heuristic on (part of) `x`.

        Parameters
        ----------
        x : Tensor of shape (n, d)
            Up to 128 rows, evenly spaced, are used.
        """
        x = x[:: -(-len(x) // MAX_MEDIAN_DRAWS)]
        x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        squared = self.squared_distances(x, x)
        h2 = self.squared_bandwidth(squared, within=True)
        if isinstance(self.bandwidth, str) and h2 <= _smallest(h2):
            raise ValueError("The median distance of the draws is zero, which sets no `bandwidth`; give a number.")
        return self.with_bandwidth(h2.sqrt().item())

    def with_bandwidth(self, bandwidth: float | str) -> Self:
        """Return a copy with another bandwidth."""
        return clone(self).set_params(bandwidth=bandwidth)

    def squared_bandwidth(self, squared: Tensor, *, within: bool) -> Tensor:
        """Return h^2, (..., 1, 1): given, or such that the median of distances (..., n, m) lies at `median_level`."""
        self.check()
        if not isinstance(self.bandwidth, str):
            return squared.new_full((1, 1), self.fixed_squared_bandwidth(squared))
        median, _, _ = median_pair(squared, within=within)
        return self.median_squared_bandwidth(median, squared.shape[-2])[..., None, None]

    def fixed_squared_bandwidth(self, like: Tensor) -> float:
        """Return h^2 of a bandwidth that is a number, in the range of the type of `like`."""
        return max(float(self.bandwidth) ** 2, _smallest(like))

    def median_squared_bandwidth(self, median: Tensor, n: int) -> Tensor:
        """Return h^2 for the median squared distance of n draws; the floor is for identical draws, 0 / 0."""
        return (median / self.median_level(n)).clamp_min(_smallest(median))

    def squared_distances(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the squared distances (..., n, m) between rows (..., n, d) and (..., m, d)."""
        return squared_distances(x, y)

    def check(self) -> None:
        """Raise ValueError or TypeError unless each parameter is in its range."""
        h = self.bandwidth
        if not (lies_between(h, 0, math.inf) or (isinstance(h, str) and h == "median")):
            raise ValueError(f"`bandwidth` must be a positive number or 'median', got {shown(h)}.")

    def _squared_norms(self, x: Tensor) -> Tensor:
        return x.square().sum(-1)


class Gaussian(Kernel):
    r"""Gaussian (RBF) kernel :math:`\exp(-\|x-y\|^2 / (2 h^2))`.

    The median heuristic is the rule of SVGD, :math:`2 h^2 = \mathrm{med} / \log(n + 1)`.

    Parameters
    ----------
    bandwidth : float or "median", default="median"
        The width h > 0 in the units of the draws, or the median heuristic.

    See Also
    --------
    IMQ : Decays slowly, for many dimensions.
    Laplace : Has a kink at zero distance.

    References
    ----------
    Liu, Q. and Wang, D. (2016). Stein variational gradient descent. https://arxiv.org/abs/1608.04471
    """

    def profile(self, t: Tensor) -> Tensor:
        """Return exp(-t / 2)."""
        return (t * (-0.5 / math.log(2))).exp2_()  # twice as fast as exp on a CPU

    def slope(self, t: Tensor, k: Tensor) -> Tensor:
        """Return -k / 2."""
        return k * -0.5

    def median_level(self, n: int) -> float:
        """Return 2 log(n + 1)."""
        return 2 * math.log(n + 1)


@dataclass(kw_only=True, eq=False, repr=False)
class IMQ(Kernel):
    r"""Inverse multiquadric kernel :math:`(1 + \|x-y\|^2 / h^2)^{-\beta}`.

    Its slow decay keeps the power of the Stein discrepancy in three and more dimensions, where a Gaussian loses it.
    The median heuristic is :math:`h^2 = \mathrm{med} / \log(n + 1)`.

    Parameters
    ----------
    bandwidth : float or "median", default="median"
        The width h > 0 in the units of the draws, or the median heuristic.
    exponent : float, default=0.5
        The exponent beta > 0; the theory of Gorham and Mackey asks for beta < 1.

    See Also
    --------
    Gaussian : The default, sensitive to shape in a few dimensions.
    skksivi.metrics.ksd : The kernel Stein discrepancy, from the score alone.

    References
    ----------
    Gorham, J. and Mackey, L. (2017). Measuring sample quality with kernels. https://arxiv.org/abs/1703.01717
    """

    exponent: float = 0.5

    def check(self) -> None:
        """Raise ValueError or TypeError unless each parameter is in its range."""
        super().check()
        if not lies_between(self.exponent, 0, math.inf):
            raise ValueError(f"`exponent` of IMQ must be positive, got {shown(self.exponent)}.")

    def profile(self, t: Tensor) -> Tensor:
        """Return (1 + t)^-beta."""
        return (1 + t).rsqrt() if self.exponent == 0.5 else (1 + t).pow(-self.exponent)

    def slope(self, t: Tensor, k: Tensor) -> Tensor:
        """Return -beta (1 + t)^(-beta - 1)."""
        return k.pow(3) * -0.5 if self.exponent == 0.5 else k / (1 + t) * -self.exponent

    def median_level(self, n: int) -> float:
        """Return log(n + 1)."""
        return math.log(n + 1)


class Laplace(Kernel):
    r"""Laplace kernel :math:`\exp(-\|x-y\| / h)` of the Euclidean distance.

    The median heuristic is :math:`h = \sqrt{\mathrm{med}} / \log(n + 1)`.

    Parameters
    ----------
    bandwidth : float or "median", default="median"
        The width h > 0 in the units of the draws, or the median heuristic.

    See Also
    --------
    Gaussian : The default, sensitive to shape in a few dimensions.
    IMQ : Decays slowly, for many dimensions.
    """

    smooth = False

    def profile(self, t: Tensor) -> Tensor:
        """Return exp(-sqrt(t))."""
        return torch.exp(-_root(t))

    def slope(self, t: Tensor, k: Tensor) -> Tensor:
        """Return -k / (2 sqrt(t)), zero at t = 0."""
        return (-k / (2 * t.sqrt())).masked_fill(t < torch.finfo(t.dtype).eps, 0.0)

    def median_level(self, n: int) -> float:
        """Return log(n + 1)^2."""
        return math.log(n + 1) ** 2


@dataclass(kw_only=True, eq=False, repr=False)
class Riesz(Kernel):
    r"""Riesz kernel :math:`(\|x\|^r + \|y\|^r - \|x-y\|^r) / h^r`, unbounded, for heavy tails.

    The width only scales the kernel, so the median heuristic, :math:`h^2 = \mathrm{med}`, makes the objective
    independent of the units of x.

    Parameters
    ----------
    bandwidth : float or "median", default="median"
        The width h > 0 in the units of the draws, or the median heuristic.
    exponent : float, default=1.0
        The exponent r, in (0, 2) for the Euclidean norm and in (0, 1] for "l1".
    norm : {"l2", "l1"}, default="l2"
        The l1 form with r = 1 is a sum of one-dimensional kernels: it compares only the marginals and cannot detect
        dependence between coordinates.

    See Also
    --------
    IMQ : Decays slowly, for many dimensions.
    Gaussian : The default, sensitive to shape in a few dimensions.

    References
    ----------
    Altekrüger, F., Hertrich, J. and Steidl, G. (2023). Neural Wasserstein gradient flows for discrepancies with
    Riesz kernels. https://arxiv.org/abs/2301.11624
    """

    centred = True
    smooth = False

    exponent: float = 1.0
    norm: str = "l2"

    def check(self) -> None:
        """Raise ValueError or TypeError unless each parameter is in its range."""
        super().check()
        if not (isinstance(self.norm, str) and self.norm in ("l1", "l2")):
            raise ValueError(f"`norm` of Riesz must be 'l2' or 'l1', got {self.norm!r}.")
        if not (lies_between(self.exponent, 0, 2) and (self.norm == "l2" or self.exponent <= 1)):
            interval = "(0, 2)" if self.norm == "l2" else "(0, 1]"
            raise ValueError(
                f"`exponent` of Riesz must be in {interval} for norm={self.norm!r}, got {shown(self.exponent)}."
            )

    @property
    def euclidean(self) -> bool:
        """Whether the norm is the Euclidean one."""
        return self.norm == "l2"

    def squared_distances(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the squared distances in the norm."""
        return squared_distances(x, y) if self.norm == "l2" else torch.cdist(x, y, p=1).square()

    def _squared_norms(self, x: Tensor) -> Tensor:
        return x.square().sum(-1) if self.norm == "l2" else x.abs().sum(-1).square()

    def profile(self, t: Tensor) -> Tensor:
        """Return -t^(r / 2)."""
        root = _root(t)
        return -(root if self.exponent == 1 else root.pow(self.exponent))

    def slope(self, t: Tensor, k: Tensor) -> Tensor:
        """Return (r / 2) k / t, zero at t = 0."""
        return (k / t.clamp_min(torch.finfo(t.dtype).eps)).mul_(self.exponent / 2)

    def median_level(self, n: int) -> float:
        """Return one."""
        return 1.0


def _root(t: Tensor) -> Tensor:
    """Return sqrt(t), with slope zero instead of infinity at t = 0."""
    return torch.nn.functional.threshold(t, torch.finfo(t.dtype).eps, 0.0).sqrt()


def _smallest(like: Tensor) -> float:
    """Return the smallest h^2 by which distances can be divided, and slopes after them."""
    return torch.finfo(like.dtype).tiny ** 0.5


KERNELS: dict[str, type[Kernel]] = {"gaussian": Gaussian, "imq": IMQ, "laplace": Laplace, "riesz": Riesz}


def resolve_kernel(kernel: str | Kernel, bandwidth: float | str | None = None) -> Kernel:
    """Return a kernel from its name or itself, with another bandwidth unless that is None."""
    if isinstance(kernel, str):
        if kernel not in KERNELS:
            raise ValueError(f"`kernel` must be a Kernel or one of {sorted(KERNELS)}, got {kernel!r}.")
        kernel = KERNELS[kernel]()
    elif not isinstance(kernel, Kernel):
        raise TypeError(
            f"`kernel` must be a Kernel or one of {sorted(KERNELS)}, got {shown(kernel)}. A Stein discrepancy needs "
            "derivatives, which a function or a kernel of another library lacks: take skksivi.kernels.Gaussian for "
            "scikit-learn's RBF, IMQ for RationalQuadratic, Laplace for Matern(nu=0.5), or subclass Kernel."
        )
    resolved = clone(kernel) if bandwidth is None else kernel.with_bandwidth(bandwidth)
    resolved.check()
    return resolved
