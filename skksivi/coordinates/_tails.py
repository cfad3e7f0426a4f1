r"""Coordinates y in which a target with the tails of Student's t is nearly Gaussian.

With x = m + L z, the z are of a t distribution where the y are normal: the radius of z, of the distribution
:math:`r_z^2 / k \sim F(k, \nu)`, is that quantile of it which the radius of y is of its own, :math:`r_y^2 \sim
\chi^2_k`. So each coordinate may have degrees of freedom of its own, k = 1, or all of them common ones, k = d, as a
multivariate t has. They are read off the score far out, where :math:`-s(x)^\top x \to \nu + k`.

References
----------
Yang, J., Latuszynski, K. and Roberts, G. (2024). Stereographic Markov chain Monte Carlo. Annals of Statistics 52(6):
chains that make light what is heavy are uniformly ergodic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from scipy import special
from torch import Tensor

from skksivi._arrays import as_tensor
from skksivi.coordinates._affine import Affine
from skksivi.coordinates._curved import Curved
from skksivi.score._improper import AGREEMENT, exponents
from skksivi.score._score import Score

#: Distances at which tails are examined, on both sides, in standard deviations of the curvature at the mode.
DISTANCES = (1e4, -1e6)

#: Random directions in which tails are examined, in addition to the coordinates.
N_DIRECTIONS = 8

#: The fewest degrees of freedom that are supported, and the number from which a tail counts as light.
HEAVIEST, LIGHT = 0.5, 30.0

#: Nodes of the radii, the last of them, less the root of the dimension, and steps of Newton's method between them.
N_NODES, FARTHEST, N_NEWTON = 2001, 15.0, 4


@dataclass(frozen=True, repr=False)
class Tails(Curved):
    """The map from y to x.

    Attributes
    ----------
    map : Affine
        Centre m and scale L of the t.
    index : Tensor of shape (d,) or (1,)
        The inverse of the degrees of freedom of each coordinate, zero where its tail is light, or of all together.
    """

    map: Affine
    index: Tensor
    stretches: Stretches = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.index) not in (1, len(self.map.m)):
            raise ValueError("the indices of its tails do not fit its map")
        if (self.index > 1 / HEAVIEST).any():
            raise ValueError("its tails are heavier than of any supported density")
        found = _stretches(self._k, tuple(self.index.tolist()), self.index.device)
        object.__setattr__(self, "stretches", found)

    def __repr__(self) -> str:
        return f"Tails of {len(self.map.m)} features, {1 / self.index.max():.3g} degrees of freedom"

    def to(self, device: torch.device) -> Tails:
        """Return the same on a device."""
        return Tails(Affine(*(a.to(device) for a in self.map)), self.index.to(device))

    @property
    def _k(self) -> int:
        return len(self.map.m) if len(self.index) < len(self.map.m) else 1

    def unwarp(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return x (n, d) and the log-determinants (n,) of dx / dy at y (n, d)."""
        z = y * self.stretches.at(self._radius(y)).exp()
        return self.map.unwhiten(z), self._log_scale(y, z)

    def warp(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return y (n, d) and the log-determinants (n,) of dx / dy at x (n, d)."""
        z = self.map.whiten(x)
        y = z * (-self.stretches.at(self.stretches.solve(self._radius(z)))).exp()
        return y, self._log_scale(y, z)

    def _radius(self, a: Tensor) -> Tensor:
        """Return the radii (n, k) of blocks of a (n, d)."""
        r = a.abs() if self._k == 1 else a.norm(dim=1, keepdim=True)
        return r.clamp_min(torch.finfo(a.dtype).tiny ** 0.5)

    def _log_scale(self, y: Tensor, z: Tensor) -> Tensor:
        """Return log det dx / dy (n,), the ratio of the densities of y and z."""
        k, heavy = self._k, self.index > 0
        nu, r_y, r_z = 1 / self.index.where(heavy, 1.0), self._radius(y), self._radius(z)
        constant = torch.lgamma((nu + k) / 2) - torch.lgamma(nu / 2) - k / 2 * (nu / 2).log()
        ratio = (nu + k) / 2 * (r_z.square() / nu).log1p() - r_y.square() / 2 - constant
        return ratio.where(heavy, 0).sum(1) + self.map.log_determinant()


class Stretches(NamedTuple):
    r"""The functions :math:`\log r_z / r_y` of the radius of y, by cubics between nodes.

    Attributes
    ----------
    step : float
        The distance of nodes.
    values, slopes : Tensor of shape (k, n)
        Values and slopes at the nodes, the first of them zero.
    tail : Tensor of shape (k,)
        The :math:`1 / \nu` of what they grow by beyond the last node, :math:`r_y^2 / 2 \nu - \log r_y`.
    """

    step: float
    values: Tensor
    slopes: Tensor
    tail: Tensor

    def at(self, r: Tensor) -> Tensor:
        """Return their values (n, k) at radii r (n, k)."""
        last = (self.values.shape[1] - 1) * self.step
        inside = r.clamp_max(last)
        i = (inside / self.step).nan_to_num().long().clamp_max(self.values.shape[1] - 2)
        t = inside / self.step - i
        (a, b), (da, db) = (
            [curve.mT.gather(0, j.expand(-1, len(curve))) for j in (i, i + 1)] for curve in (self.values, self.slopes)
        )
        da, db = self.step * da, self.step * db
        cubic = a + t * (da + t * (3 * (b - a) - 2 * da - db + t * (2 * (a - b) + da + db)))
        beyond = (r.square() - inside.square()) / 2 * self.tail - (r / inside).log()
        return cubic + beyond.where(self.tail > 0, 0)

    def solve(self, r_z: Tensor) -> Tensor:
        """Return the radii (n, k) of y given the radii of z."""
        aim = r_z.log()
        nodes = self.step * torch.arange(1, self.values.shape[1]).to(r_z)
        at_nodes = self.values[:, 1:] + nodes.log()
        place = torch.searchsorted(at_nodes, aim.mT.contiguous()).mT
        low = torch.cat([nodes.new_zeros(1), nodes])[place]
        last = at_nodes[:, -1]
        far = (nodes[-1] ** 2 + 2 / self.tail * (aim - last)).clamp_min(0).sqrt()
        r = torch.where(aim > last, far.where(self.tail > 0, r_z), low + self.step / 2)
        for _ in range(N_NEWTON):
            with torch.enable_grad():
                r = r.detach().requires_grad_()
                gap = r.log() + self.at(r) - aim
                (slope,) = torch.autograd.grad(gap.sum(), r)
            r = torch.where(aim > last, r, (r - gap / slope).clamp(0.5 * r, 2 * r)).detach()
        return r


@lru_cache(maxsize=16)
def _stretches(k: int, index: tuple[float, ...], device: torch.device) -> Stretches:
    """Return those of k dimensions for each index, zero where that is."""
    r = np.linspace(0, math.sqrt(k) + FARTHEST, N_NODES)
    of = {i: _stretch(r, k, 1 / i) if i > 0 else np.zeros((2, N_NODES)) for i in set(index)}
    values, slopes = as_tensor(np.stack([of[i] for i in index], 1), device=device)
    return Stretches(r[1], values, slopes, torch.tensor(index, dtype=torch.float64, device=device))


def _stretch(r: np.ndarray, k: int, nu: float) -> tuple[np.ndarray, np.ndarray]:
    r"""Return :math:`\log r_z / r` and its slopes at radii r of a normal vector of k dimensions.

    With :math:`B = \nu / (\nu + r_z^2)` of a beta distribution, the tail of that at B is that of chi squared at r^2.
    """
    h = r[1:] ** 2 / 2
    B = special.betaincinv(nu / 2, k / 2, special.gammaincc(k / 2, h))
    rest = np.where(B < 0.5, 1 - B, special.betaincinv(k / 2, nu / 2, special.gammainc(k / 2, h)))
    r_z = np.sqrt(nu * rest / B)
    value = np.log(r_z / r[1:])
    # the densities of the radii are in proportion r^{k-1} e^{-r^2 / 2} and r_z^{k-1} (1 + r_z^2 / nu)^{-(nu + k) / 2}
    constant = special.gammaln((nu + k) / 2) - special.gammaln(nu / 2) - k / 2 * np.log(nu / 2)
    log_slope = (nu + k) / 2 * np.log1p(r_z**2 / nu) - h - (k - 1) * value - constant
    slope = np.exp(log_slope) / r_z - 1 / r[1:]
    at_zero = -constant / k
    return np.concatenate([[at_zero], value]), np.concatenate([[0.0], slope])


# The fit


def fitted_tails(score_fn: Score, mode: Affine) -> Tails | None:
    r"""Return the tails of a target by its score far out, None where they are light or of another form.

    Along a coordinate, or any direction v, :math:`-s(x)^\top x` tends to the exponent of the density. It is
    :math:`\nu + d` of a multivariate t in all of them, of independent ones :math:`\nu_i + 1` in a coordinate and the
    sum of these in others.
    """
    d, sd = len(mode.m), mode.L.norm(dim=1)
    axes = exponents(score_fn, mode.m, sd.diag(), DISTANCES)
    heavy = axes.isfinite()
    if not heavy.any():
        return None
    generator = torch.Generator().manual_seed(0)
    rays = torch.randn(N_DIRECTIONS, d, generator=generator, dtype=torch.float64).to(sd) * heavy
    others = exponents(score_fn, mode.m, sd * rays / rays.norm(dim=1, keepdim=True), DISTANCES)
    if heavy.all() and _alike(torch.cat([axes, others]), axes[0]):
        df = axes.mean(0, keepdim=True) - d
        L = mode.L
    elif _alike(others, axes[heavy].sum()):
        df, L = axes - 1, sd.diag()
    else:
        return None
    if (df < HEAVIEST).any() or not (df < LIGHT).any():
        return None
    index = (1 / df).where(df < LIGHT, 0)
    return Tails(Affine(mode.m, (1 + index * (axes - df).nan_to_num(0)).sqrt()[:, None] * L), index)


def _alike(a: Tensor, b: Tensor) -> bool:
    return bool(((a - b).abs() < AGREEMENT * b).all())
