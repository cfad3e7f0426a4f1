"""The samplers that a fit consists of, some with a density."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from skksivi._utils.arrays import as_tensor
from skksivi.coordinates import Affine, Whitening
from skksivi.coordinates._whitening import Curved
from skksivi.families._density import MOST_DRAWS, LogDensity, hierarchy_log_density, layer_log_density, with_density
from skksivi.families._layer import Hierarchy, SemiImplicit
from skksivi.mixing import GaussianMixtureDraws
from skksivi.pilot._mixture import Components
from skksivi.score._score import Score, ScoreFunction

#: Numbers drawn at a time, so that memory does not grow with the number of rows.
CHUNK = 2**22


@runtime_checkable
class Sampler(Protocol):
    """A distribution that can be drawn from.

    Attributes
    ----------
    n_features : int
    in_parts : bool
        Whether a large sample may be drawn in parts; false if draws are picked from stored points.
    """

    @property
    def n_features(self) -> int: ...

    @property
    def in_parts(self) -> bool: ...

    def attributes(self) -> dict[str, object]:
        """Return the parts that an estimator shows, by the public names of its learned attributes."""

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n rows, shape (n, n_features)."""


@runtime_checkable
class HasDensity(Sampler, Protocol):
    """A sampler with a density."""

    def log_density(self, x: Tensor) -> LogDensity:
        """Evaluate log q (n,) at float64 points x (n, d), with standard errors."""


class WhitenedSampler(Sampler, Protocol):
    """A sampler that can also draw in whitened coordinates."""

    def sample_in_u(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n rows (n, n_features)."""

    def reference_in_u(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n rows (n, n_features) of the distribution that a training must stay near."""


@dataclass(frozen=True)
class Gaussian:
    """The normal distribution N(m, L L^T)."""

    map: Affine

    in_parts: ClassVar[bool] = True

    @property
    def n_features(self) -> int:
        return len(self.map.m)

    def attributes(self) -> dict[str, object]:
        """Return mean (d,) and covariance (d, d)."""
        m, L = self.map
        return {"mean_": m.cpu().numpy(), "covariance_": (L @ L.mT).cpu().numpy()}

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        m = self.map.m
        return self.map.unwhiten(torch.randn(n, len(m), generator=generator, dtype=m.dtype, device=m.device))

    def log_density(self, x: Tensor) -> LogDensity:
        """Evaluate log N(x; m, L L^T) (n,) at points x (n, d)."""
        square = self.map.whiten(x).square().sum(-1)
        square = square.where(~square.isnan(), math.inf)  # NaN for differences of infinite numbers
        value = -square / 2 - self.map.log_determinant() - x.shape[-1] / 2 * math.log(2 * math.pi)
        return LogDensity(value, torch.zeros_like(value))


@dataclass(frozen=True)
class Gaussians:
    r"""The mixture :math:`\sum_k w_k N(m_k, C_k)` in x, or in coordinates y that are warped."""

    mixture: Components
    warp: Curved | None = None

    in_parts: ClassVar[bool] = True

    @property
    def n_features(self) -> int:
        return self.mixture.means.shape[1]

    def attributes(self) -> dict[str, object]:
        return {}

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n rows (n, d)."""
        y = self._draws(n, self.mixture.means, generator)
        return y if self.warp is None else self.warp.unwarp(y)[0]

    def log_density(self, x: Tensor) -> LogDensity:
        """Evaluate log q (n,) at points x (n, d)."""
        y, log_scale = (x, 0.0) if self.warp is None else self.warp.warp(x)
        value = self._draws.log_density(y) - log_scale
        return LogDensity(value, torch.zeros_like(value))

    @cached_property
    def _draws(self) -> GaussianMixtureDraws:
        return self.mixture.draws()


def pick(n_rows: int, n: int, generator: torch.Generator) -> Tensor:
    """Return n random rows, without replacement if there are that many."""
    if n <= n_rows:
        return torch.randperm(n_rows, generator=generator, device=generator.device)[:n]
    return torch.randint(n_rows, (n,), generator=generator, device=generator.device)


@dataclass(frozen=True)
class Particles:
    r"""Points x (N, d), and Gaussians around them if more draws are requested than there are points.

    In whitened coordinates these are

    .. math:: u_i + \frac{r_i}{2 \sqrt d}\, \xi, \quad r_i = \min_{j \ne i} \|u_j - u_i\|, \quad \xi \sim N(0, I),

    with i uniform, so that they extend half-way to the nearest other point.
    """

    x: np.ndarray
    whitening: Whitening

    in_parts: ClassVar[bool] = False

    @property
    def n_features(self) -> int:
        return self.x.shape[1]

    def attributes(self) -> dict[str, object]:
        """Return the points and the coordinates in which they moved."""
        return {"particles_": self.x, "whitening_": self.whitening}

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n points in random order or, if there are fewer, from the Gaussians around them."""
        x, d = as_tensor(self.x, device=generator.device), self.n_features
        i = pick(len(x), n, generator)
        if n <= len(x):
            return x[i]
        u = self.whitening.whiten(x)
        r = torch.cdist(u, u).fill_diagonal_(math.inf).amin(1)
        xi = torch.randn(n, d, generator=generator, dtype=u.dtype, device=u.device)
        return self.whitening.push_forward(u[i] + r[i, None] / (2 * math.sqrt(d)) * xi)


@dataclass(frozen=True)
class Chains:
    """States x (n_chains, n_draws, d) of Markov chains."""

    x: np.ndarray
    whitening: Whitening

    in_parts: ClassVar[bool] = False

    @property
    def n_features(self) -> int:
        return self.x.shape[2]

    def attributes(self) -> dict[str, object]:
        """Return the states and the coordinates in which the chains ran."""
        return {"chains_": self.x, "whitening_": self.whitening}

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n states in random order, with replacement if there are fewer."""
        x = as_tensor(self.x.reshape(-1, self.n_features), device=generator.device)
        return x[pick(len(x), n, generator)]


class OfFamily:
    """What draws by a family, in whitened coordinates."""

    family: SemiImplicit | Hierarchy
    whitening: Whitening

    in_parts: ClassVar[bool] = True

    @property
    def n_features(self) -> int:
        return self.family.n_features

    def attributes(self) -> dict[str, object]:
        return {"family_": self.family, "whitening_": self.whitening}


@dataclass(frozen=True)
class Layer(OfFamily):
    """A semi-implicit layer in whitened coordinates, which may be warped."""

    family: SemiImplicit
    whitening: Whitening
    seed: int

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        return self.whitening.push_forward(self.sample_in_u(n, generator))

    def sample_in_u(self, n: int, generator: torch.Generator) -> Tensor:
        return self.family.draw(n, generator).x.double()

    def reference_in_u(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n rows (n, d) of the distribution that a training must stay near, its start."""
        return self.sample_in_u(n, generator)

    def log_density(self, x: Tensor, most: int = MOST_DRAWS) -> LogDensity:
        """Estimate log q (n,) at points x (n, d), by no more than `most` draws of z for each."""
        family = copy.deepcopy(self.family).double()
        return LogDensity(*self.whitening.log_density(lambda u: layer_log_density(family, u, self.seed, most), x))


@dataclass(frozen=True)
class Layers(OfFamily):
    """A hierarchy of layers in whitened coordinates, which draws by the score of its target in x."""

    family: Hierarchy
    whitening: Whitening
    score: Score | None
    seed: int

    @property
    def score_in_u(self) -> ScoreFunction:
        """The score by which it draws.

        Raises
        ------
        ValueError
            It was loaded without one.
        """
        if self.score is None:
            raise ValueError("A loaded hierarchy needs the score of its target to draw: load(path, score_fn=...).")
        return self.whitening.pull_back(self.score)

    def sample(self, n: int, generator: torch.Generator, layer: int = 0) -> Tensor:
        """Draw n rows (n, d) of a layer, 0 being the last."""
        return self.whitening.push_forward(self.sample_in_u(n, generator, layer))

    def sample_in_u(self, n: int, generator: torch.Generator, layer: int = 0) -> Tensor:
        """Draw n rows (n, d) of a layer in whitened coordinates; rows where a score is not finite are drawn again.

        Raises
        ------
        FloatingPointError
            The score is not finite where most of the draws are.
        """
        u, score_u = self.family.draw(n, generator, self.score_in_u, layer).double(), self.score_in_u
        for _ in range(50):
            bad = ~u.isfinite().all(1)
            if not bad.any():
                return u
            u[bad] = self.family.draw(int(bad.sum()), generator, score_u, layer).double()
        raise FloatingPointError("`score_fn` is not finite at most of the draws of the hierarchy, which need it.")

    def reference_in_u(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n rows (n, d) of the base, which is at the target where a training must stay near it."""
        return self.sample_in_u(n, generator, self.family.n_layers)

    def log_density(self, x: Tensor, most: int = MOST_DRAWS) -> LogDensity:
        """Estimate log q (n,) at points x (n, d), by no more than `most` draws of z for each."""
        with_density(self.family.mixing)
        family, score_u = copy.deepcopy(self.family).double(), self.score_in_u
        return LogDensity(
            *self.whitening.log_density(lambda u: hierarchy_log_density(family, u, score_u, self.seed, most), x)
        )
