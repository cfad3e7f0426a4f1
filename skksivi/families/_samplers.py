"""What a fit is: something that draws and, where it can, knows its density."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from skksivi._arrays import as_tensor
from skksivi._saved import ARRAY, SEED, SMALLEST, is_float, is_instance, is_tensor, or_none, saved
from skksivi.families._density import MOST_DRAWS, LogDensity, hierarchy_log_density, layer_log_density, with_density
from skksivi.families._hierarchy import Hierarchy
from skksivi.families._layer import SemiImplicit
from skksivi.mixing import DensityMixing
from skksivi.pilot._affine import Affine, WhitenedScore
from skksivi.pilot._chains import covariance_root
from skksivi.pilot._masses import Cells
from skksivi.pilot._modes import FAR
from skksivi.pilot._rules import Whitening, log_density
from skksivi.score._score import Score, ScoreFunction

#: Numbers drawn at a time, so that memory does not grow with the number of rows.
CHUNK = 2**22

#: Times that rows are drawn again which the score of a hierarchy has spoilt.
MAX_REDRAWN = 50

#: Rows drawn at a time where some are left out, so that memory has a bound whatever the ratios; and in all, in units
#: of those that are likely.
MAX_DRAWN, PATIENCE = 2**15, 50

#: The share of a Student t distribution among the draws of a sampler with defended tails, and its degrees of freedom.
TAILS, DF = 0.1, 3

#: Draws whose moments these tails have: others than those that are weighed, whose density would know of them.
N_MOMENTS = 4000

#: Draws by which a file is tried.
N_TRIED = 100

#: The draws by which the shares of cells are found, so that no ratio is larger.
N_ASSIGNED = 20_000
MAX_RATIO = N_ASSIGNED * (1 + 1e-9)


@runtime_checkable
class Sampler(Protocol):
    """A distribution that can be drawn from.

    Attributes
    ----------
    n_features : int
    in_parts : bool
        Whether a large sample may be drawn a part at a time; not where draws are picked from points that are kept.
    """

    @property
    def n_features(self) -> int: ...

    @property
    def in_parts(self) -> bool: ...

    def attributes(self) -> dict[str, object]:
        """Return what it is made of that an estimator shows, by the public names of its learned attributes."""

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n rows, shape (n, n_features)."""


@runtime_checkable
class HasDensity(Sampler, Protocol):
    """A sampler that knows its density."""

    def log_density(self, x: Tensor) -> LogDensity:
        """Evaluate log q (n,) at float64 points x (n, d), with standard errors."""


class InU(Sampler, Protocol):
    """A sampler that draws in whitened coordinates, too."""

    def sample_in_u(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n rows (n, n_features)."""

    def reference_in_u(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n rows (n, n_features) of what a training must stay near."""


class Fit(NamedTuple):
    """What `_fit` returns.

    Attributes
    ----------
    sampler : Sampler
    report : mapping of str to object
        The other learned attributes, by their public names.
    ended_by : BaseException or None
        What ended the fit before its time, if the state that was reached is to be kept.
    remark : str or None
        What is to be told of it when it is over.
    finish : callable or None
        What is to be done when it cannot be lost any more.
    """

    sampler: Sampler
    report: Mapping[str, object]
    ended_by: BaseException | None = None
    remark: str | None = None
    finish: Callable[[], None] | None = None


#: Shows callbacks what a fit would be if it ended now; tells whether one of them wants it to end.
Tell = Callable[[Fit], bool]


@saved("Gaussian", {"map": (is_instance(Affine), "d")}, "d")
@dataclass(frozen=True)
class Gaussian:
    """The normal distribution N(m, L L^T)."""

    map: Affine

    in_parts: ClassVar[bool] = True

    @property
    def n_features(self) -> int:
        """The dimension d."""
        return len(self.map.m)

    def attributes(self) -> dict[str, object]:
        """Return mean (d,) and covariance (d, d)."""
        m, L = self.map
        return {"mean_": m.cpu().numpy(), "covariance_": (L @ L.mT).cpu().numpy()}

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n rows (n, d)."""
        m = self.map.m
        return self.map.unwhiten(torch.randn(n, len(m), generator=generator, dtype=m.dtype, device=m.device))

    def log_density(self, x: Tensor) -> LogDensity:
        """Evaluate log N(x; m, L L^T) (n,) at points x (n, d)."""
        square = self.map.whiten(x).square().sum(-1)
        square = square.where(~square.isnan(), math.inf)  # of differences of infinite numbers
        value = -square / 2 - self.map.log_determinant() - x.shape[-1] / 2 * math.log(2 * math.pi)
        return LogDensity(value, torch.zeros_like(value))


def pick(n_rows: int, n: int, generator: torch.Generator) -> Tensor:
    """Return n random rows, without replacement if there are as many."""
    if n <= n_rows:
        return torch.randperm(n_rows, generator=generator, device=generator.device)[:n]
    return torch.randint(n_rows, (n,), generator=generator, device=generator.device)


@saved("Particles", {"x": (ARRAY, "nd"), "whitening": (is_instance(Whitening), "d")}, "d")
@dataclass(frozen=True)
class Particles:
    r"""Points x (N, d), and Gaussians around them where more draws are asked for than there are points.

    In whitened coordinates these are

    .. math:: u_i + \frac{r_i}{2 \sqrt d}\, \xi, \quad r_i = \min_{j \ne i} \|u_j - u_i\|, \quad \xi \sim N(0, I),

    with i uniform: they reach half-way to the nearest other point.
    """

    x: np.ndarray
    whitening: Whitening

    in_parts: ClassVar[bool] = False

    @property
    def n_features(self) -> int:
        """The dimension d."""
        return self.x.shape[1]

    def attributes(self) -> dict[str, object]:
        """Return the points and the coordinates in which they moved."""
        return {"particles_": self.x, "whitening_": self.whitening}

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n points in random order or, if there are fewer, points smeared into the gaps."""
        x, d = as_tensor(self.x, device=generator.device), self.n_features
        i = pick(len(x), n, generator)
        if n <= len(x):
            return x[i]
        u = self.whitening.map.whiten(x)
        r = torch.cdist(u, u).fill_diagonal_(math.inf).amin(1)
        xi = torch.randn(n, d, generator=generator, dtype=u.dtype, device=u.device)
        return self.whitening.map.unwhiten(u[i] + r[i, None] / (2 * math.sqrt(d)) * xi)


@saved("Chains", {"x": (ARRAY, "cnd"), "whitening": (is_instance(Whitening), "d")}, "d")
@dataclass(frozen=True)
class Chains:
    """States x (n_chains, n_draws, d) of Markov chains."""

    x: np.ndarray
    whitening: Whitening

    in_parts: ClassVar[bool] = False

    @property
    def n_features(self) -> int:
        """The dimension d."""
        return self.x.shape[2]

    def attributes(self) -> dict[str, object]:
        """Return the states and the coordinates in which the chains ran."""
        return {"chains_": self.x, "whitening_": self.whitening}

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n states in random order, with replacement if there are fewer."""
        x = as_tensor(self.x.reshape(-1, self.n_features), device=generator.device)
        return x[pick(len(x), n, generator)]


@saved(
    "Layer",
    {"family": (is_instance(SemiImplicit), "d"), "whitening": (is_instance(Whitening), "d"), "seed": (SEED, "")},
    "d",
)
@dataclass(frozen=True)
class Layer:
    """A semi-implicit layer in whitened coordinates."""

    family: SemiImplicit
    whitening: Whitening
    seed: int

    in_parts: ClassVar[bool] = True

    @property
    def n_features(self) -> int:
        """The dimension d."""
        return self.family.n_features

    def attributes(self) -> dict[str, object]:
        """Return the family and its coordinates."""
        return {"family_": self.family, "whitening_": self.whitening}

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n rows (n, d)."""
        return self.whitening.map.unwhiten(self.sample_in_u(n, generator))

    def sample_in_u(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n rows (n, d) in whitened coordinates."""
        return self.family.draw(n, generator).x.double()

    def reference_in_u(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n rows (n, d) of what a training must stay near, if they are those of its start."""
        return self.sample_in_u(n, generator)

    def log_density(self, x: Tensor, most: int = MOST_DRAWS) -> LogDensity:
        """Estimate log q (n,) at points x (n, d), by no more than `most` draws of z for each."""
        with_density(self.family.mixing)
        family = copy.deepcopy(self.family).double()
        return _in_x(lambda u: layer_log_density(family, u, self.seed, most), x, self.whitening)


@saved(
    "Layers",
    {"family": (is_instance(Hierarchy), "d"), "whitening": (is_instance(Whitening), "d"), "seed": (SEED, "")},
    "d",
)
@dataclass(frozen=True)
class Layers:
    """A hierarchy of layers in whitened coordinates, which draws by the score of its target in x."""

    family: Hierarchy
    whitening: Whitening
    score: Score | None
    seed: int

    in_parts: ClassVar[bool] = True

    @classmethod
    def restored(cls, family: Hierarchy, whitening: Whitening, seed: int) -> Layers:
        """Return layers without a score."""
        return cls(family, whitening, None, seed)

    @property
    def n_features(self) -> int:
        """The dimension d."""
        return self.family.n_features

    def attributes(self) -> dict[str, object]:
        """Return the family and its coordinates."""
        return {"family_": self.family, "whitening_": self.whitening}

    @property
    def score_in_u(self) -> ScoreFunction:
        """The score by which it draws.

        Raises
        ------
        ValueError
            It was loaded without one.
        """
        if self.score is None:
            raise ValueError("A loaded hierarchy draws with the score it was fitted to: load(path, score_fn=...).")
        return WhitenedScore(self.score, self.whitening.map)

    def sample(self, n: int, generator: torch.Generator, layer: int = 0) -> Tensor:
        """Draw n rows (n, d) of a layer, 0 being the last."""
        return self.whitening.map.unwhiten(self.sample_in_u(n, generator, layer))

    def sample_in_u(self, n: int, generator: torch.Generator, layer: int = 0) -> Tensor:
        """Draw n rows (n, d) of a layer in whitened coordinates; rows that the score has spoilt are drawn again.

        Raises
        ------
        FloatingPointError
            The score is not finite where most of the draws are.
        """
        u, score_u = self.family.draw(n, generator, self.score_in_u, layer).double(), self.score_in_u
        for _ in range(MAX_REDRAWN):
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
        return _in_x(lambda u: hierarchy_log_density(family, u, score_u, self.seed, most), x, self.whitening)


def _in_x(log_density: Callable[[Tensor], LogDensity], x: Tensor, whitening: Whitening) -> LogDensity:
    """Return log-densities of points x (n, d), from those of u; they are -inf where no draw can come from."""
    u = whitening.map.whiten(x)
    finite = (u.abs() < FAR).all(1)  # beyond, squares are infinite
    value, se = x.new_full((len(x),), -math.inf), x.new_zeros(len(x))
    if finite.any():
        value[finite], se[finite] = log_density(u[finite])
    impossible = value.isnan()
    value = value.where(~impossible, -math.inf) - whitening.map.log_determinant()
    return LogDensity(value, se.where(~impossible, 0.0))


@dataclass(frozen=True)
class Derived:
    """What draws by another sampler, and shows what that is made of."""

    sampler: Sampler

    @property
    def n_features(self) -> int:
        """The dimension d."""
        return self.sampler.n_features

    @property
    def in_parts(self) -> bool:
        """Whether the sampler may be drawn from in parts."""
        return self.sampler.in_parts

    def attributes(self) -> dict[str, object]:
        """Return those of the sampler."""
        return self.sampler.attributes()


#: Tells which of the float64 points (n, d) are kept, by uniform numbers (n,).
Keeps = Callable[[Tensor, Tensor], Tensor]


def accepted(sampler: Sampler, n: int, n_each: float, keeps: Keeps, generator: torch.Generator, why: str) -> Tensor:
    """Draw n rows (n, d) by rejection, one in `n_each`; raise RuntimeError with `why` where hardly any is."""
    kept, missing, left = [], n, PATIENCE * (n * n_each + 100)
    while missing > 0:
        n_drawn = math.ceil(min(1.1 * missing * n_each + 10, MAX_DRAWN))
        left -= n_drawn
        if left < 0:
            raise RuntimeError(f"Hardly a draw of the fit {why}.")
        x = sampler.sample(n_drawn, generator)
        uniform = torch.rand(len(x), generator=generator, dtype=torch.float64, device=x.device)
        kept.append(x[keeps(x.double(), uniform)][:missing])
        missing -= len(kept[-1])
    return torch.cat(kept) if kept else sampler.sample(0, generator)


@saved(
    "Reweighted",
    {
        "sampler": (lambda value: isinstance(value, Sampler) and not isinstance(value, Derived), "d"),
        "cells": (is_instance(Cells), "kd"),
        "ratios": (is_tensor(torch.float64, low=0, high=MAX_RATIO), "k"),
    },
    "d",
)
@dataclass(frozen=True)
class Reweighted(Derived):
    """The draws of a sampler, with other weights of the cells of a partition.

    Attributes
    ----------
    sampler : Sampler
    cells : Cells
    ratios : Tensor of shape (k,)
        The weights that the cells are to have over those of the draws.
    """

    cells: Cells
    ratios: Tensor

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n rows (n, d), leaving out some of the cells that are too frequent.

        Raises
        ------
        RuntimeError
            Hardly a draw of the sampler falls into the cells that are to have the weight.
        """
        most = self.ratios.max().item()

        def keeps(x: Tensor, uniform: Tensor) -> Tensor:
            return uniform < (self.ratios / most)[self.cells.assign(x)]

        why = "falls into the cells that are to have the weight; fit again, or call `modes(..., reweight=True)` anew"
        return accepted(self.sampler, n, most, keeps, generator, why)

    def log_density(self, x: Tensor) -> LogDensity:
        """Evaluate log q (n,) at points x (n, d), where the sampler has a density."""
        value, se = sampler_density(self.sampler).log_density(x)
        return LogDensity(value + self.ratios.log()[self.cells.assign(x)], se)


@saved(
    "Defended",
    {
        "sampler": (lambda value: isinstance(value, HasDensity) and not isinstance(value, Defended | Refined), "d"),
        "map": (is_instance(Affine), "d"),
    },
    "d",
)
@dataclass(frozen=True)
class Defended(Derived):
    r"""The draws of a sampler, and one in ten of a Student t distribution with three degrees of freedom.

    Ratios to its density have a bound where those to the density of the sampler may have none.

    Attributes
    ----------
    sampler : Sampler
        One with a density.
    map : Affine
        Centre and scale of the Student t.

    References
    ----------
    Hesterberg, T. (1995). Weighted average importance sampling and defensive mixture distributions. Technometrics
    37(2).
    """

    map: Affine

    @classmethod
    def of(cls, sampler: Sampler, generator: torch.Generator) -> Defended:
        """Return it with a Student t of the mean and, as its scale, the covariance of some draws."""
        x = sampler.sample(N_MOMENTS, generator).double()
        return cls(sampler, Affine(x.mean(0), covariance_root(x)))

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n rows (n, d)."""
        x = self.sampler.sample(n, generator).double()
        of_tails = torch.rand(n, generator=generator, dtype=torch.float64, device=x.device) < TAILS
        return torch.where(of_tails[:, None], self.tails(n, generator), x)

    def tails(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n rows (n, d) of the Student t."""
        m = self.map.m
        xi = torch.randn(n, DF + len(m), generator=generator, dtype=m.dtype, device=m.device)
        return self.map.unwhiten(xi[:, DF:] / xi[:, :DF].square().mean(1, keepdim=True).sqrt())

    def log_density(self, x: Tensor) -> LogDensity:
        """Evaluate its log-density (n,) at points x (n, d)."""
        return self.mixed(sampler_density(self.sampler).log_density(x), x)

    def mixed(self, of_sampler: LogDensity, x: Tensor) -> LogDensity:
        """Return its log-density (n,) at points x (n, d), from that of the sampler."""
        d, square = self.n_features, self.map.whiten(x).square().sum(1)
        log_t = math.lgamma((DF + d) / 2) - math.lgamma(DF / 2) - d / 2 * math.log(DF * math.pi)
        log_t = log_t - self.map.log_determinant() - (DF + d) / 2 * (square / DF).log1p() + math.log(TAILS)
        log_q = of_sampler.value + math.log(1 - TAILS)
        value = torch.logaddexp(log_q, log_t.where(~log_t.isnan(), -math.inf))  # of draws too far for moments
        return LogDensity(value, of_sampler.se * (log_q - value).exp())


@saved(
    "Refined",
    {
        "sampler": (lambda value: isinstance(value, HasDensity) and not isinstance(value, Refined), "d"),
        "origin": (or_none(is_instance(Affine)), "d"),
        "log_bound": (is_float(-1e300, 1e300), ""),
        "acceptance": (is_float(SMALLEST, 1), ""),
    },
    "d",
)
@dataclass(frozen=True)
class Refined(Derived):
    r"""The draws x of a sampler q, each kept with probability min(1, p(x) / (c q(x))).

    Attributes
    ----------
    sampler : Sampler
        One with a density.
    score : Score or None
        That of p, for float64 points.
    origin : Affine or None
        The map to the mode where p is one, if it is known by its score alone.
    log_bound : float
        The logarithm of c.
    acceptance : float
        The share of the draws that are kept.
    """

    score: Score | None
    origin: Affine | None
    log_bound: float
    acceptance: float

    @classmethod
    def restored(cls, sampler: Sampler, origin: Affine | None, log_bound: float, acceptance: float) -> Refined:
        """Return a sampler without a score."""
        return cls(sampler, None, origin, log_bound, acceptance)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n rows (n, d).

        Raises
        ------
        RuntimeError
            Hardly a draw of the sampler is kept.
        """

        def keeps(x: Tensor, uniform: Tensor) -> Tensor:
            log_p, log_q = self._log_p(x), sampler_density(self.sampler).log_density(x).value
            return uniform.log() < log_p - log_q - self.log_bound

        why = "is kept; call `refine` anew with the target of the fit"
        return accepted(self.sampler, n, 1 / self.acceptance, keeps, generator, why)

    def log_density(self, x: Tensor) -> LogDensity:
        """Evaluate the log-density (n,) of the draws that are kept at points x (n, d)."""
        log_q, se = sampler_density(self.sampler).log_density(x)
        return LogDensity(torch.minimum(log_q, self._log_p(x) - self.log_bound) - math.log(self.acceptance), se)

    def _log_p(self, x: Tensor) -> Tensor:
        if self.score is None:
            raise ValueError("A loaded refined fit draws with its target: load(path, score_fn=...).")
        return log_density(self.score, self.origin, x)


def sampler_density(sampler: Sampler) -> HasDensity:
    """Return a sampler that has a density; raise TypeError for others."""
    if not isinstance(sampler, HasDensity):
        raise TypeError(f"{type(sampler).__name__} has no density.")
    return sampler


def knows_density(sampler: Sampler) -> TypeGuard[HasDensity]:
    """Tell whether a sampler has a density: a semi-implicit one has that of its mixing distribution."""
    sampler = unweighted(sampler)
    of_mixing = not isinstance(sampler, Layer | Layers) or isinstance(sampler.family.mixing, DensityMixing)
    return isinstance(sampler, HasDensity) and of_mixing


def unweighted(sampler: Sampler) -> Sampler:
    """Return what draws with the weights of the fit itself."""
    while isinstance(sampler, Derived):
        sampler = sampler.sampler
    return sampler


def tried(sampler: Sampler, generator: torch.Generator) -> list[Tensor]:
    """Return a few draws, and what is finite if the conditionals that they come from have a density."""
    fit = unweighted(sampler)
    sampler = sampler.sampler if isinstance(sampler, Refined) else sampler  # which needs the target
    if isinstance(fit, Layers):
        u = fit.family.draw(N_TRIED, generator, torch.zeros_like)[1]
        return [
            fit.whitening.map.unwhiten(u.double()),
            *(1 / fit.family.sigma(t) for t in range(fit.family.n_layers)),
        ]
    numbers = [fit.sample(N_TRIED if fit.in_parts else 1, generator), sampler.sample(1, generator)]
    return [*numbers, fit.family.draw(N_TRIED, generator).score] if isinstance(fit, Layer) else numbers


def asks_for_score(sampler: Sampler) -> bool:
    """Tell whether a sampler draws by the score of its target."""
    return isinstance(sampler, Refined) or isinstance(unweighted(sampler), Layers)


def with_score(sampler: Sampler, score: Score) -> Sampler:
    """Return a sampler that draws by a score with this score, any other as it is."""
    if isinstance(sampler, Derived):
        sampler = replace(sampler, sampler=with_score(sampler.sampler, score))
    return replace(sampler, score=score) if isinstance(sampler, Layers | Refined) else sampler
