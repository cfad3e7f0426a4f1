"""Samplers derived from another: its draws with other tails or rejection."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
from torch import Tensor

from skksivi.coordinates._affine import Affine, standard_normal
from skksivi.coordinates._whitening import Curved
from skksivi.families._density import LogDensity
from skksivi.families._samplers import Gaussian, Gaussians, HasDensity, Layer, Layers, Sampler
from skksivi.mixing import AtomDraws, DensityMixing, GaussianMixtureDraws, NormalDraws
from skksivi.pilot._log_density import log_density
from skksivi.pilot._mixture import Components, gaussian_of
from skksivi.score._score import Score

#: The share of the sampler among the draws of a defensive mixture.
SHARE = 0.5

#: How many times as wide as a sampler a defensive mixture is in all directions, at most in coordinates that take care
#: of tails, and along a coordinate.
SCALES, MOST_IN_Y, STRETCHES = (1.5, 2.0, 4.0, 8.0, 16.0, 32.0), 4.0, (2.0, 4.0, 8.0)


@dataclass(frozen=True)
class Derived:
    """A sampler that draws by another one, and shows its attributes."""

    sampler: Sampler

    @property
    def n_features(self) -> int:
        return self.sampler.n_features

    @property
    def in_parts(self) -> bool:
        """Whether the sampler may be drawn from in parts."""
        return self.sampler.in_parts

    def attributes(self) -> dict[str, object]:
        return self.sampler.attributes()


@dataclass(frozen=True)
class DefensiveMixture(Derived):
    r"""The draws x of a sampler, some replaced by draws of Gaussians wider than it in all directions or in one.

    With m and :math:`C = L L^\top` the mean and the covariance of the sampler, in coordinates y if it has these, half
    of the others are draws of :math:`N(m, s^2 C)`, with s from 1.5 to 32, those beyond 4 in x, and half of
    :math:`N(m, C + (t^2 - 1) v_j v_j^\top)`, with :math:`v_j = C e_j / \sqrt{C_{jj}}` and t from 2 to 8: a coordinate
    is stretched, and the others follow as in the Gaussian. They look where the sampler does not draw, as in a halo or
    a lost tail, and importance ratios to the density of all draws are bounded where those to the sampler's are not.

    Attributes
    ----------
    sampler : Sampler
        One with a density.
    map : Affine
        The m and L.
    warp : Curved or None
        The map to x of y.
    far : Affine or None
        The median and the widths of the coordinates of the sampler, for what is beyond y.
    share : float
        Of the sampler among the draws.

    References
    ----------
    Hesterberg, T. (1995). Weighted average importance sampling and defensive mixture distributions. Technometrics
    37(2).
    """

    map: Affine
    warp: Curved | None = None
    far: Affine | None = None
    share: float = SHARE

    @classmethod
    def of(cls, sampler: Sampler, generator: torch.Generator) -> DefensiveMixture:
        """Return it with the mean and the covariance of a mixture, or of draws that no weights depend on."""
        if (found := gaussians_of(sampler)) is not None and found.warp is None:
            return cls(sampler, found.mixture.map())
        x, fit = sampler.sample(4000, generator).double(), unweighted(sampler)
        warp = found.warp if found is not None else fit.whitening.warp if isinstance(fit, Layer | Layers) else None
        if warp is None:
            return cls(sampler, gaussian_of(x))
        low, middle, high = x.quantile(x.new_tensor([0.159, 0.5, 0.841]), dim=0)
        map_ = gaussian_of(warp.warp(x)[0]) if found is None else found.mixture.map()
        return cls(sampler, map_, warp, Affine(middle, ((high - low) / 2).diag()))

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n rows (n, d)."""
        x = self.sampler.sample(n, generator).double()
        is_wide = torch.rand(n, generator=generator, dtype=torch.float64, device=x.device) >= self.share
        return torch.where(is_wide[:, None], self.wide(n, generator), x)

    def wide(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n rows (n, d) of the wider Gaussians, as evenly from all of them as can be, in random order."""
        m, L = self.map
        u, n_scaled = standard_normal(n, m, generator), n - n // 2
        s, t = map(m.new_tensor, (SCALES, STRETCHES))
        y, scale = u @ L.mT, s.repeat(-(-n_scaled // len(s)))[:n_scaled, None]
        j = torch.randperm(len(m), generator=generator, device=m.device).repeat(-(-n // len(m)))[: n - n_scaled]
        t = t[torch.randint(len(t), (len(j),), generator=generator, device=m.device)]
        own, sd = y[n_scaled:], L.norm(dim=1)[j]
        z = own.gather(1, j[:, None])[:, 0] / sd
        x = m + torch.cat([scale * y[:n_scaled], own + ((t - 1) * z / sd)[:, None] * (L[j] @ L.mT)])
        if self.warp is not None and self.far is not None:
            scaled, is_far = x[:n_scaled], scale > MOST_IN_Y
            x = self.warp.unwarp(torch.cat([scaled.where(~is_far, m), x[n_scaled:]]))[0]
            x[:n_scaled] = self.far.unwhiten(scale * u[:n_scaled]).where(is_far, x[:n_scaled])
        return x[torch.randperm(n, generator=generator, device=m.device)]

    def log_density(self, x: Tensor) -> LogDensity:
        """Evaluate its log-density (n,) at points x (n, d)."""
        return self.mixed(sampler_density(self.sampler).log_density(x), x)

    def mixed(self, of_sampler: LogDensity, x: Tensor) -> LogDensity:
        """Return its log-density (n,) at points x (n, d), given the sampler's."""
        (m, L), d = self.map, self.n_features
        y, log_scale = (x, 0.0) if self.warp is None else self.warp.warp(x)
        square, z = self.map.whiten(y).square().sum(1), (y - m) / L.norm(dim=1)
        s, t = map(m.new_tensor, (SCALES, STRETCHES))
        gains = (1 - t.square().reciprocal()) * z.square()[:, :, None] / 2 - t.log()  # (n, d, 3)
        stretched = gains.flatten(1).logsumexp(1) - square / 2 - math.log(d * len(t))
        in_y = s if self.far is None else s[s <= MOST_IN_Y]
        wide = torch.logaddexp(_scaled(square, in_y, d) - math.log(len(s)), stretched) - log_scale
        wide = (wide - self.map.log_determinant()).nan_to_num(-math.inf)  # far beyond moments
        if self.far is not None:
            far = _scaled(self.far.whiten(x).square().sum(1), s[s > MOST_IN_Y], d) - math.log(len(s))
            wide = torch.logaddexp(wide, far - self.far.log_determinant())
        wide = wide - d / 2 * math.log(2 * math.pi) + math.log((1 - self.share) / 2)
        log_q = of_sampler.value.nan_to_num(-math.inf, math.inf, -math.inf) + math.log(self.share)
        value = torch.logaddexp(log_q, wide)
        return LogDensity(value, of_sampler.se * (log_q - value).exp())


def _scaled(squares: Tensor, s: Tensor, d: int) -> Tensor:
    """Return the logarithm (n,) of the sum of the densities of N(0, s^2 I), without constants, at squared norms."""
    return (-squares[:, None] / (2 * s.square()) - d * s.log()).logsumexp(1)


@dataclass(frozen=True)
class Refined(Derived):
    r"""The draws x of a sampler q, each kept with probability min(1, p(x) / (c q(x))).

    Attributes
    ----------
    sampler : Sampler
        One with a density.
    score : Score or None
        The score of p, for float64 points.
    origin : Affine or None
        The map to the mode where p is set to one, if only its score is known.
    log_bound : float
        The logarithm of c.
    acceptance : float
        The share of draws that are kept.
    """

    score: Score | None
    origin: Affine | None
    log_bound: float
    acceptance: float

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n rows (n, d).

        Raises
        ------
        RuntimeError
            Hardly a draw of the sampler is kept.
        """
        n_each = 1 / self.acceptance
        kept, missing, left = [], n, 50 * (n * n_each + 100)  # fifty times the expected number
        while missing > 0:
            n_drawn = math.ceil(min(1.1 * missing * n_each + 10, 2**15))  # bounds memory for all ratios
            left -= n_drawn
            if left < 0:
                raise RuntimeError(
                    "Hardly any draw of the fit is kept; call `refine` again with the target of the fit."
                )
            x = self.sampler.sample(n_drawn, generator)
            uniform = torch.rand(len(x), generator=generator, dtype=torch.float64, device=x.device)
            log_p, log_q = self._log_p(x.double()), sampler_density(self.sampler).log_density(x.double()).value
            kept.append(x[uniform.log() < log_p - log_q - self.log_bound][:missing])
            missing -= len(kept[-1])
        return torch.cat(kept) if kept else self.sampler.sample(0, generator)

    def log_density(self, x: Tensor) -> LogDensity:
        """Evaluate the log-density (n,) of the draws that are kept at points x (n, d)."""
        log_q, se = sampler_density(self.sampler).log_density(x)
        return LogDensity(torch.minimum(log_q, self._log_p(x) - self.log_bound) - math.log(self.acceptance), se)

    def _log_p(self, x: Tensor) -> Tensor:
        if self.score is None:
            raise ValueError("A loaded refined fit needs its target to draw: load(path, score_fn=...).")
        return log_density(self.score, self.origin, x)


def sampler_density(sampler: Sampler) -> HasDensity:
    """Raise TypeError for a sampler without a density."""
    if not isinstance(sampler, HasDensity):
        raise TypeError(f"{type(sampler).__name__} has no density.")
    return sampler


def knows_density(sampler: Sampler) -> TypeGuard[HasDensity]:
    """Tell whether a sampler has a density: a semi-implicit one does if its mixing distribution does."""
    sampler = unweighted(sampler)
    known = DensityMixing | AtomDraws
    of_mixing = not isinstance(sampler, Layer | Layers) or isinstance(sampler.family.mixing, known)
    return isinstance(sampler, HasDensity) and of_mixing


def unweighted(sampler: Sampler) -> Sampler:
    """Return the sampler that a derived one draws by."""
    while isinstance(sampler, Derived):
        sampler = sampler.sampler
    return sampler


def gaussians_of(sampler: Sampler) -> Gaussians | None:
    """Return the mixture of Gaussians, in coordinates y if it has these, that a sampler is; None if it is none."""
    if isinstance(sampler, Gaussians):
        return sampler
    if isinstance(sampler, Gaussian):
        m, L = sampler.map
        return Gaussians(Components(torch.ones_like(m[:1]), m[None], (L @ L.mT)[None]))
    if not isinstance(sampler, Layer):
        return None
    family, map_ = sampler.family, sampler.whitening.map
    mean, a = (copy.deepcopy(part).double() for part in (family.mean, family.log_variance))
    mixing, z = family.mixing, map_.m.new_zeros(1, family.mixing.latent_dim)
    if isinstance(mixing, NormalDraws):
        mixing = GaussianMixtureDraws(z, torch.eye(z.shape[1]).to(z)[None], z.new_ones(1))
    is_constant = a.is_affine and not a.jacobian(z).any()
    if not (isinstance(mixing, GaussianMixtureDraws) and mean.is_affine and is_constant):
        return None
    L = mean.jacobian(z)[0] @ mixing.factors.double()
    C = L @ L.mT + (a(z).exp() + family.min_scale**2).expand(1, -1).diag_embed()
    covariances = map_.unwhiten_direction(map_.unwhiten_direction(C).mT)
    means, weights = map_.unwhiten(mean(mixing.means.double())), mixing.weights.double()
    return Gaussians(Components(weights, means, (covariances + covariances.mT) / 2), sampler.whitening.warp)


def mixture_of(sampler: Sampler) -> Components | None:
    """Return the Gaussians that a sampler is a mixture of, in x; None if it is none."""
    found = gaussians_of(sampler)
    return None if found is None or found.warp is not None else found.mixture


def trial_draws(sampler: Sampler, generator: torch.Generator) -> list[Tensor]:
    """Return a few draws, and numbers that are finite if their conditional distributions have a density.

    Raises
    ------
    ValueError
        The draws have another dimension than the sampler says.
    """
    numbers = _tried(sampler, generator)
    if numbers[0].shape[1:] != (sampler.n_features,):
        raise ValueError("its parts are of several dimensions")
    return numbers


def _tried(sampler: Sampler, generator: torch.Generator) -> list[Tensor]:
    fit = unweighted(sampler)
    sampler = sampler.sampler if isinstance(sampler, Refined) else sampler  # a refined one needs the target
    n_tried = 100
    if isinstance(fit, Layers):
        u = fit.family.draw(n_tried, generator, torch.zeros_like)
        return [
            fit.whitening.push_forward(u.double()),
            *(1 / fit.family.sigma(t) for t in range(fit.family.n_layers)),
        ]
    numbers = [fit.sample(n_tried if fit.in_parts else 1, generator), sampler.sample(1, generator)]
    return [*numbers, fit.family.draw(n_tried, generator).score] if isinstance(fit, Layer) else numbers


def asks_for_score(sampler: Sampler) -> bool:
    """Tell whether a sampler draws by the score of its target."""
    return isinstance(sampler, Refined) or isinstance(unweighted(sampler), Layers)


def with_score(sampler: Sampler, score: Score) -> Sampler:
    """Return a sampler that draws by a score with this score, any other as it is."""
    if isinstance(sampler, Derived):
        sampler = replace(sampler, sampler=with_score(sampler.sampler, score))
    return replace(sampler, score=score) if isinstance(sampler, Layers | Refined) else sampler
