r"""Distributions of the latent z of a semi-implicit family, and of the base of a hierarchy.

A ReLU network of Gaussian z has Gaussian tails: heavy tails of x come from those of z, through the linear skip.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from torch import Tensor, nn

from skksivi._saved import DOUBLES, INDICES, SIZE, is_weights, is_width, saved, saved_by_parameters

__all__ = ["GaussianMixture", "Normal", "StudentT"]

#: How much of the spread of a smoothed bootstrap is noise, at the root.
JITTER = 0.2


class Mixing(nn.Module, ABC):
    """A distribution q(z) that can be sampled; nothing else is asked of it."""

    latent_dim: int

    @abstractmethod
    def forward(self, n: int, like: Tensor, generator: torch.Generator) -> Tensor:
        """Draw z of shape (n, latent_dim), of the type and on the device of `like`."""

    def score(self, z: Tensor) -> Tensor:
        """Return the gradient of a log-density near that of z, by default that of the standard normal."""
        return -z

    def score_slope(self, z: Tensor) -> Tensor:
        """Return the diagonal of the Jacobian of `score`, which has no other entries, shape (n, latent_dim)."""
        return -torch.ones_like(z)


class Described(Protocol):
    """What `mixing` may be beside a name and a function."""

    def build(self, latent_dim: int) -> Mixing:
        """Return the sampler of z in `latent_dim` dimensions."""


#: Returns n rows of `latent_dim` entries, drawn by a generator.
DrawFunction = Callable[[int, torch.Generator], Tensor | np.ndarray]

#: The type of the parameter `mixing`.
MixingLike = str | Described | DrawFunction


@saved_by_parameters("mixing.Normal", lambda described: described.build(1))
class Normal(BaseEstimator):
    """The standard normal.

    Examples
    --------
    >>> from skksivi import KSIVIApproximator
    >>> from skksivi.mixing import Normal
    >>> KSIVIApproximator(mixing=Normal())
    KSIVIApproximator(mixing=Normal())
    """

    def build(self, latent_dim: int) -> Mixing:
        """Return the sampler of z in `latent_dim` dimensions."""
        return NormalDraws(latent_dim)


@saved("Normal", {"latent_dim": (SIZE, "z")}, "z")
class NormalDraws(Mixing):
    """The standard normal."""

    def __init__(self, latent_dim: int) -> None:
        super().__init__()
        self.latent_dim = latent_dim

    def forward(self, n: int, like: Tensor, generator: torch.Generator) -> Tensor:
        z = torch.empty(n, self.latent_dim, dtype=like.dtype, device=like.device)
        return z.normal_(generator=generator)


@saved_by_parameters("mixing.StudentT", lambda described: described.build(1))
class StudentT(BaseEstimator):
    """Independent Student t entries.

    Parameters
    ----------
    df : float, default=3.0
        Degrees of freedom > 0; the tails of x fall as those of the smallest that the target has at best.

    Examples
    --------
    >>> from skksivi import KSIVIApproximator
    >>> from skksivi.mixing import StudentT
    >>> KSIVIApproximator(mixing=StudentT(df=2.0))
    KSIVIApproximator(mixing=StudentT(df=2.0))
    """

    def __init__(self, df: float = 3.0) -> None:
        self.df = df

    def build(self, latent_dim: int) -> Mixing:
        """Return the sampler of z in `latent_dim` dimensions."""
        if not 0 < self.df < math.inf:
            raise ValueError(f"`df` of StudentT must be a positive number, got {self.df!r}.")
        return StudentTDraws(latent_dim, float(self.df))


@saved("StudentT", {"latent_dim": (SIZE, "z"), "df": (is_width, "")}, "z")
class StudentTDraws(Mixing):
    r"""Independent Student t entries, by Bailey's polar method.

    .. math:: z = \sqrt{\nu (U^{-2 / \nu} - 1)} \cos(2 \pi V), \quad U, V \sim U(0, 1).

    References
    ----------
    Bailey, R. (1994). Polar generation of random variates with the t-distribution. Mathematics of Computation 62.
    """

    def __init__(self, latent_dim: int, df: float) -> None:
        super().__init__()
        self.latent_dim = latent_dim
        self.df = df

    def forward(self, n: int, like: Tensor, generator: torch.Generator) -> Tensor:
        shape = (2, n, self.latent_dim)
        u, v = torch.rand(shape, generator=generator, dtype=torch.float64, device=like.device).unbind()
        u = 1 - u  # in (0, 1]
        return (self.df * torch.expm1(u.log() * (-2 / self.df))).sqrt().mul_((2 * math.pi * v).cos()).to(like.dtype)

    def score(self, z: Tensor) -> Tensor:
        """Return the gradient of log q at z (n, latent_dim)."""
        return -(self.df + 1) * z / (self.df + z.square())

    def score_slope(self, z: Tensor) -> Tensor:
        """Return the diagonal of the Jacobian of `score`, all of it, shape (n, latent_dim)."""
        squares = z.square()
        return (self.df + 1) * (squares - self.df) / (self.df + squares).square()


@saved_by_parameters("mixing.GaussianMixture", lambda described: described.build(np.shape(described.means)[-1]))
class GaussianMixture(BaseEstimator):
    """A mixture of spherical Gaussians.

    Parameters
    ----------
    means : array-like of shape (k, latent_dim)
    scales : float or array-like of shape (k,), default=1.0
        Standard deviations.
    weights : array-like of shape (k,), default=None
        They need not sum to one; None means equal ones.

    Examples
    --------
    >>> from skksivi.mixing import GaussianMixture
    >>> GaussianMixture([[-3.0, 0.0], [3.0, 0.0]]).build(2).latent_dim
    2
    """

    def __init__(self, means: ArrayLike, scales: ArrayLike = 1.0, weights: ArrayLike | None = None) -> None:
        self.means = means
        self.scales = scales
        self.weights = weights

    def build(self, latent_dim: int) -> Mixing:
        """Return the sampler of z in `latent_dim` dimensions."""
        means = np.asarray(self.means, dtype=np.float64)
        if means.ndim != 2 or means.shape[1] != latent_dim or not len(means) or not np.isfinite(means).all():
            raise ValueError(f"`means` must be finite, of shape (k, {latent_dim}), got shape {means.shape}.")
        scales = np.asarray(self.scales, dtype=np.float64)
        scales = np.full(len(means), scales) if scales.ndim == 0 else scales
        weights = np.ones(len(means)) if self.weights is None else np.asarray(self.weights, dtype=np.float64)
        for name, values in (("scales", scales), ("weights", weights)):
            if values.shape != (len(means),) or not (np.isfinite(values) & (values > 0)).all():
                raise ValueError(f"`{name}` must be {len(means)} positive numbers, got {getattr(self, name)!r}.")
        parts = (torch.from_numpy(a.copy()) for a in (means, scales, weights / weights.sum()))
        return GaussianMixtureDraws(*parts)


@saved("GaussianMixture", {"means": (is_weights, "kz"), "scales": (is_weights, "k"), "levels": (DOUBLES, "l")}, "z")
class GaussianMixtureDraws(Mixing):
    """A mixture of spherical Gaussians.

    Parameters
    ----------
    means : Tensor of shape (k, latent_dim)
    scales : Tensor of shape (k,)
    weights : Tensor of shape (k,)
        They sum to one.
    """

    means: Tensor
    scales: Tensor
    levels: Tensor

    def __init__(self, means: Tensor, scales: Tensor, weights: Tensor) -> None:
        super().__init__()
        self.latent_dim = means.shape[1]
        self.register_buffer("means", means)
        self.register_buffer("scales", scales)
        self.register_buffer("levels", weights.double().cumsum(0)[:-1])

    @classmethod
    def restored(cls, means: Tensor, scales: Tensor, levels: Tensor) -> GaussianMixtureDraws:
        """Return the mixture of sums of weights."""
        mixture = cls(means, scales, torch.ones(len(scales)) / len(scales))
        mixture.levels = levels
        return mixture

    def forward(self, n: int, like: Tensor, generator: torch.Generator) -> Tensor:
        uniform = torch.rand(n, generator=generator, dtype=torch.float64, device=like.device)
        k = torch.searchsorted(self.levels, uniform)
        xi = torch.empty(n, self.latent_dim, dtype=self.means.dtype, device=like.device).normal_(generator=generator)
        return torch.addcmul(self.means[k], self.scales[k, None], xi).to(like.dtype)


class FunctionDraws(Mixing):
    """Whatever a function of the number of draws and a generator returns."""

    def __init__(self, sample: DrawFunction, latent_dim: int) -> None:
        super().__init__()
        self.sample = sample
        self.latent_dim = latent_dim

    def forward(self, n: int, like: Tensor, generator: torch.Generator) -> Tensor:
        z = torch.as_tensor(self.sample(n, generator))
        if z.shape != (n, self.latent_dim):
            raise ValueError(
                f"`mixing` returned shape {tuple(z.shape)}, expected {(n, self.latent_dim)}: as many rows as asked "
                "for, each of `latent_dim` entries."
            )
        return z.to(like)


@saved(
    "Bootstrap",
    {"points": (is_weights, "nz"), "first": (INDICES, "n"), "size": (INDICES, "n"), "reach": (is_width, "")},
    "z",
)
class Bootstrap(Mixing):
    r"""A smoothed bootstrap of points near the target.

    .. math:: z = \bar c + \sqrt{1 - j^2}\, (c_i - \bar c) + \frac{j}{\sqrt 2} (c_a - c_b)

    with points c_i, c_a, c_b drawn from those of one mode, of mean :math:`\bar c`. It has the mean and the covariance
    of the points, mode by mode, whatever the scale of each.

    Parameters
    ----------
    points : Tensor of shape (n, d)
        Those of one mode after those of another.
    n_of_mode : list of int
        How many belong to each; they sum to n.
    jitter : float, default=JITTER
        The j of the formula.
    """

    points: Tensor
    first: Tensor
    size: Tensor

    def __init__(self, points: Tensor, n_of_mode: Sequence[int], jitter: float = JITTER) -> None:
        super().__init__()
        self.latent_dim = points.shape[1]
        shrink = math.sqrt(1 - jitter**2)
        self.reach = reach_of(jitter)
        parts = [c.mean(0).lerp(c, shrink) for c in points.split(list(n_of_mode))]
        size = torch.tensor(n_of_mode, device=points.device)
        self.register_buffer("points", torch.cat(parts))
        self.register_buffer("first", (size.cumsum(0) - size).repeat_interleave(size))
        self.register_buffer("size", size.repeat_interleave(size))

    @classmethod
    def restored(cls, points: Tensor, first: Tensor, size: Tensor, reach: float) -> Bootstrap:
        """Return the bootstrap of points that are shrunk already, by modes within them."""
        n, d = points.shape
        if not (first.is_meta or bool(((first >= 0) & (size >= 1) & (size <= n) & (first <= n - size)).all())):
            raise ValueError("the modes of `points` reach beyond them")
        bootstrap = cls(torch.zeros(1, d), [1])
        bootstrap.points, bootstrap.first, bootstrap.size, bootstrap.reach = points, first, size, reach
        return bootstrap

    def forward(self, n: int, like: Tensor, generator: torch.Generator) -> Tensor:
        uniform = torch.rand(3, n, generator=generator, device=like.device, dtype=torch.float64)
        i = (uniform[0] * len(self.points)).long()
        others = (self.first[i] + (uniform[1:] * self.size[i]).long()).flatten()
        c_a, c_b = self.points.index_select(0, others).chunk(2)
        return torch.add(self.points.index_select(0, i), c_a - c_b, alpha=self.reach).to(like.dtype)


def reach_of(jitter: float) -> float:
    """Return what the difference of two points is multiplied by that are shrunk already."""
    return jitter / (math.sqrt(2) * math.sqrt(1 - jitter**2))


def build_mixing(mixing: MixingLike, latent_dim: int) -> Mixing:
    """Return the sampler of a name, which means the normal, of an object of this module or of a function."""
    if isinstance(mixing, str):
        return NormalDraws(latent_dim)
    if isinstance(mixing, type):
        raise TypeError(f"`mixing` is the class {mixing.__name__}; give an object of it, {mixing.__name__}(...).")
    return mixing.build(latent_dim) if hasattr(mixing, "build") else FunctionDraws(mixing, latent_dim)
