r"""Distributions of the latent z of a semi-implicit family, and of the base of a hierarchy.

A ReLU network of Gaussian z has Gaussian tails: heavy tails of x come from those of z, through the linear skip.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from torch import Tensor, nn

from skksivi._utils.arrays import as_numbers, check_function
from skksivi._utils.checks import lies_between, shown

__all__ = ["GaussianMixture", "Normal", "StudentT"]
__dir__ = __all__.copy

#: Numbers drawn at a time, so that memory does not grow with the number of rows.
CHUNK = 2**22

#: Numbers that are computed with at a time, so that they stay in the cache of a processor.
IN_CACHE = 2**18


class Mixing(nn.Module, ABC):
    """A distribution q(z) that can be sampled; nothing else is required."""

    latent_dim: int

    @abstractmethod
    def forward(self, n: int, like: Tensor, generator: torch.Generator) -> Tensor:
        """Draw z of shape (n, latent_dim), of the type and on the device of `like`."""

    def score(self, z: Tensor) -> Tensor:
        """Return the gradient of a log-density near the density of z, by default the standard normal."""
        return -z

    def score_slope(self, z: Tensor) -> Tensor:
        """Return the diagonal of the Jacobian of `score`, which has no other entries, shape (n, latent_dim)."""
        return -torch.ones_like(z)


class DensityMixing(Mixing):
    """A mixing distribution with a known density, so that the family has one too."""

    @property
    def width(self) -> int:
        """How many numbers the density at one row takes."""
        return self.latent_dim

    @abstractmethod
    def log_density(self, z: Tensor) -> Tensor:
        """Evaluate log q (n,) at z (n, latent_dim)."""

    @abstractmethod
    def precision(self, z: Tensor) -> Tensor:
        """Return positive definite matrices (n, latent_dim, latent_dim), near minus the Hessian of log q at z."""


class Described(Protocol):
    """What `mixing` may be beside a name and a function."""

    def build(self, latent_dim: int) -> Mixing:
        """Return the sampler of z in `latent_dim` dimensions."""


#: Returns n rows of `latent_dim` entries, drawn by a generator.
DrawFunction = Callable[[int, torch.Generator], Tensor | np.ndarray]

#: The type of the parameter `mixing`.
MixingLike = str | Described | DrawFunction


class Normal(BaseEstimator):
    """The standard normal.

    See Also
    --------
    StudentT : Heavy tails.
    GaussianMixture : Known modes.

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


class NormalDraws(DensityMixing):
    """The standard normal."""

    def __init__(self, latent_dim: int) -> None:
        super().__init__()
        self.latent_dim = latent_dim

    def forward(self, n: int, like: Tensor, generator: torch.Generator) -> Tensor:
        z = torch.empty(n, self.latent_dim, dtype=like.dtype, device=like.device)
        return z.normal_(generator=generator)

    def log_density(self, z: Tensor) -> Tensor:
        return -z.square().sum(-1) / 2 - self.latent_dim / 2 * math.log(2 * math.pi)

    def precision(self, z: Tensor) -> Tensor:
        return torch.eye(self.latent_dim).to(z).expand(len(z), -1, -1)


@dataclass(eq=False, repr=False)
class StudentT(BaseEstimator):
    """Independent Student t entries.

    Parameters
    ----------
    df : float, default=3.0
        Degrees of freedom > 0; ideally as many as the heaviest tail of the target has.

    See Also
    --------
    Normal : The standard normal.
    skksivi.kernels.Riesz : Unbounded, for heavy tails.

    Examples
    --------
    >>> from skksivi import KSIVIApproximator
    >>> from skksivi.mixing import StudentT
    >>> KSIVIApproximator(mixing=StudentT(df=2.0))
    KSIVIApproximator(mixing=StudentT(df=2.0))
    """

    df: float = 3.0

    def build(self, latent_dim: int) -> Mixing:
        """Return the sampler of z in `latent_dim` dimensions."""
        if not lies_between(self.df, 0, math.inf):
            raise ValueError(f"`df` of StudentT must be a positive number, got {shown(self.df)}.")
        return StudentTDraws(latent_dim, float(self.df))


def log_student(top: Tensor | float, squares: Tensor, d: int, df: float) -> Tensor:
    r"""Return the log-density of Student's t in d dimensions at squared distances, in units of its scale.

    Parameters
    ----------
    top : Tensor or float
        The log-density of the Gaussian of that scale at its mean.
    """
    factor = math.lgamma((df + d) / 2) - math.lgamma(df / 2) + d / 2 * math.log(2 / df)
    return top + factor - (df + d) / 2 * (squares / df).log1p()


class StudentTDraws(DensityMixing):
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

    def log_density(self, z: Tensor) -> Tensor:
        return log_student(-math.log(2 * math.pi) / 2, z.square(), 1, self.df).sum(-1)

    def precision(self, z: Tensor) -> Tensor:
        return ((self.df + 1) / (self.df + z.square())).diag_embed()

    def score(self, z: Tensor) -> Tensor:
        """Return the gradient of log q at z (n, latent_dim)."""
        return -(self.df + 1) * z / (self.df + z.square())

    def score_slope(self, z: Tensor) -> Tensor:
        """Return the diagonal of the Jacobian of `score`, all of it, shape (n, latent_dim)."""
        squares = z.square()
        return (self.df + 1) * (squares - self.df) / (self.df + squares).square()


@dataclass(eq=False, repr=False)
class GaussianMixture(BaseEstimator):
    """A mixture of spherical Gaussians.

    Parameters
    ----------
    means : array-like of shape (k, latent_dim)
    scales : float or array-like of shape (k,), default=1.0
        Standard deviations.
    weights : array-like of shape (k,), default=None
        They need not sum to one; None means equal ones.

    See Also
    --------
    Normal : The standard normal.
    skksivi.modes : The modes of a fit and their weights.

    Examples
    --------
    >>> from skksivi.mixing import GaussianMixture
    >>> GaussianMixture([[-3.0, 0.0], [3.0, 0.0]]).build(2).latent_dim
    2
    """

    means: ArrayLike
    scales: ArrayLike = 1.0
    weights: ArrayLike | None = None

    def build(self, latent_dim: int) -> Mixing:
        """Return the sampler of z in `latent_dim` dimensions."""
        means = as_numbers(self.means, "means")
        if means.ndim != 2 or means.shape[1] != latent_dim or not len(means) or not np.isfinite(means).all():
            raise ValueError(f"`means` must be finite, of shape (k, {latent_dim}), got shape {means.shape}.")
        scales = as_numbers(self.scales, "scales")
        scales = np.full(len(means), scales) if scales.ndim == 0 else scales
        weights = np.ones(len(means)) if self.weights is None else as_numbers(self.weights, "weights")
        for name, values in (("scales", scales), ("weights", weights)):
            if values.shape != (len(means),) or not (np.isfinite(values) & (values > 0)).all():
                raise ValueError(f"`{name}` must be {len(means)} positive numbers, got {shown(getattr(self, name))}.")
        factors = scales[:, None, None] * np.eye(latent_dim)
        return GaussianMixtureDraws(*(torch.from_numpy(a.copy()) for a in (means, factors, weights / weights.sum())))


class GaussianMixtureDraws(DensityMixing):
    r"""A mixture of Gaussians :math:`\sum_k w_k N(m_k, L_k L_k^\top)`.

    Parameters
    ----------
    means : Tensor of shape (k, latent_dim)
    factors : Tensor of shape (k, latent_dim, latent_dim)
        The L_k, lower triangular.
    weights : Tensor of shape (k,)
        They sum to one.
    """

    means: Tensor
    factors: Tensor
    levels: Tensor

    def __init__(self, means: Tensor, factors: Tensor, weights: Tensor) -> None:
        super().__init__()
        self.latent_dim = means.shape[1]
        self.register_buffer("means", means)
        self.register_buffer("factors", factors.contiguous())
        self.register_buffer("levels", weights.double().cumsum(0)[:-1])

    @property
    def width(self) -> int:
        return self.means.numel()

    @property
    def weights(self) -> Tensor:
        """The w of the formula, shape (k,)."""
        ends = self.levels.new_tensor([0.0, 1.0])
        return torch.cat([ends[:1], self.levels, ends[1:]]).diff()

    def forward(self, n: int, like: Tensor, generator: torch.Generator) -> Tensor:
        k = self.components(n, generator)
        xi = torch.empty(n, self.latent_dim, dtype=self.means.dtype, device=like.device).normal_(generator=generator)
        return self.placed(k, xi).to(like.dtype)

    def components(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw components k (n,)."""
        uniform = torch.rand(n, generator=generator, dtype=torch.float64, device=self.levels.device)
        return torch.searchsorted(self.levels, uniform)

    def placed(self, k: Tensor, xi: Tensor) -> Tensor:
        """Return m_k + L_k xi for rows of components k (n,) and noise xi (n, latent_dim)."""
        step = max(1, CHUNK // self.means.numel())
        return torch.cat([self._placed(*part) for part in zip(k.split(step), xi.split(step), strict=True)])

    def scaled(self, factor: float) -> GaussianMixtureDraws:
        """Return the mixture of components that are wider by a factor."""
        return type(self)(self.means, factor * self.factors, self.weights)

    def _placed(self, k: Tensor, xi: Tensor) -> Tensor:
        return self.means[k] + (xi @ self.factors.mT)[k, torch.arange(len(k), device=k.device)]

    def log_parts(self, z: Tensor) -> Tensor:
        """Return log w_k N(z; m_k, L_k L_k^T), shape (k, n), at z (n, latent_dim)."""
        means, L = self.means.to(z), self.factors.to(z)
        whitens = torch.linalg.solve_triangular(L, torch.eye(self.latent_dim).to(L).expand_as(L), upper=False)
        squares = [
            (whitens @ (rows - means[:, None]).mT).square().sum(1)
            for rows in z.split(max(1, IN_CACHE // self.means.numel()))
        ]
        log_scale = self.weights.to(z).log() - L.diagonal(dim1=1, dim2=2).log().sum(1)
        return log_scale[:, None] - torch.cat(squares, 1) / 2 - self.latent_dim / 2 * math.log(2 * math.pi)

    def log_density(self, z: Tensor) -> Tensor:
        return self.log_parts(z).logsumexp(0)

    def score(self, z: Tensor) -> Tensor:
        """Return the gradient of log q at z (n, latent_dim)."""
        r, P = self.log_parts(z).softmax(0), torch.cholesky_inverse(self.factors.to(z))
        return torch.einsum("kn,kij,knj->ni", r, P, self.means.to(z)[:, None] - z)

    def precision(self, z: Tensor) -> Tensor:
        r, P = self.log_parts(z).softmax(0), torch.cholesky_inverse(self.factors.to(z))
        return torch.einsum("kn,kij->nij", r, P)


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
                f"`mixing` returned shape {tuple(z.shape)}, expected {(n, self.latent_dim)}: as many rows as "
                "requested, each of `latent_dim` entries."
            )
        return z.to(like)


class Bootstrap(Mixing):
    """The points (n, d) that chains have left near a target, drawn with replacement."""

    points: Tensor

    def __init__(self, points: Tensor) -> None:
        super().__init__()
        self.latent_dim = points.shape[1]
        self.register_buffer("points", points)

    def forward(self, n: int, like: Tensor, generator: torch.Generator) -> Tensor:
        uniform = torch.rand(n, generator=generator, device=like.device, dtype=torch.float64)
        return self.points.index_select(0, (uniform * len(self.points)).long()).to(like.dtype)


class AtomDraws(Bootstrap):
    """Points (n, latent_dim) that are trained, drawn with replacement: a discrete distribution with equal weights."""

    def __init__(self, points: Tensor) -> None:
        Mixing.__init__(self)
        self.latent_dim = points.shape[1]
        self.points = nn.Parameter(points)


def check_mixing(mixing: MixingLike, latent_dim: int) -> None:
    """Raise TypeError or ValueError unless this can be built for `latent_dim` dimensions."""
    build_mixing(mixing, latent_dim)
    if callable(mixing) and not hasattr(mixing, "build"):
        check_function(mixing, "mixing", "n, generator")


def build_mixing(mixing: MixingLike, latent_dim: int) -> Mixing:
    """Return the sampler of a name, which means the normal, of an object of this module or of a function."""
    if isinstance(mixing, str):
        return NormalDraws(latent_dim)
    if isinstance(mixing, type):
        raise TypeError(f"`mixing` is the class {mixing.__name__}; give an object of it, {mixing.__name__}(...).")
    return mixing.build(latent_dim) if hasattr(mixing, "build") else FunctionDraws(mixing, latent_dim)
