r"""Coordinates y in which a target with curves and funnels is nearly Gaussian.

The coordinates x are in levels. With :math:`t = (x - c) / r`, in the first level :math:`t_i = S_i(y_i)`, and in
others

.. math:: t_i = l_i(t_{<}) + e^{g_i(t_{<})} \left( m_i(t_{<}) + y_i \right), \qquad
    l_i(t) = \sum_j a_{ij} t_j, \qquad
    m_i(t) = \sum_j a'_{ij} t_j + b_{ij} (t_j^2 - 1) + c_{ij} \log\cosh t_j, \qquad
    g_i(t) = \sum_j a''_{ij} t_j + c''_{ij} \log\cosh t_j,

with intercepts. Thus m straightens a banana, and g opens a funnel or a centred hierarchy. Where the scale is
small, only the line l matters, towards which all members of a group shrink. In the first level, coordinates that
drive others may be skewed by S, because the logarithm of a scale often is; every other S is the identity. The drivers
of a coordinate are found from points near the target, and the functions are fitted to these by maximum likelihood.

References
----------
Parno, M. and Marzouk, Y. (2018). Transport map accelerated Markov chain Monte Carlo. SIAM/ASA Journal on Uncertainty
Quantification 6(2).

Hoffman, M. et al. (2019). NeuTra-lizing bad geometry in Hamiltonian Monte Carlo using neural transport.
https://arxiv.org/abs/1903.03704
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from skksivi.coordinates._curved import Curved

#: Logarithms of scales at most.
MAX_LOG_SCALE = 12.0


@dataclass(frozen=True)
class Level:
    """Coordinates that depend only on lower levels.

    Attributes
    ----------
    members : Tensor of shape (k,)
        Their indices.
    drivers : Tensor of shape (j,)
        Indices of the coordinates that they may depend on.
    line : Tensor of shape (j + 1, k)
        The coefficients of l.
    location : Tensor of shape (3 j + 1, k)
        Coefficients of m.
    scale : Tensor of shape (2 j + 1, k)
        Coefficients of g.
    shape : Tensor of shape (2, k)
        The skewness and the weight of the tails of S, 0 and 1 for the identity, where there are no drivers.
    """

    members: Tensor
    drivers: Tensor
    line: Tensor
    location: Tensor
    scale: Tensor
    shape: Tensor

    def __post_init__(self) -> None:
        j = len(self.drivers)
        sizes = j + 1, 3 * j + 1, 2 * j + 1, 2
        if tuple(map(len, (self.line, self.location, self.scale, self.shape))) != sizes:
            raise ValueError("the coefficients of a level do not fit its drivers")
        if not (self.shape[1] > 0).all():
            raise ValueError("the tails of a level have no positive weight")

    def to(self, device: torch.device) -> Level:
        return Level(
            *(a.to(device) for a in (self.members, self.drivers, self.line, self.location, self.scale, self.shape))
        )

    def forward(self, t: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return its t and the logarithms of dt / dy (n, k) at its y (n, k), given the t (n, d) below."""
        if not len(self.drivers):
            return skewed(y, *self.shape)
        line, m, g = self._at(t)
        return line + g.exp() * (m + y), g

    def backward(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return its y and the logarithms of dt / dy (n, k) at t (n, d)."""
        own = t.index_select(1, self.members)
        if not len(self.drivers):
            y, log_slope = unskewed(own, *self.shape)
            return y, -log_slope
        line, m, g = self._at(t)
        return (own - line) * (-g).exp() - m, g

    def that_bend(self) -> list[int]:
        """Return the drivers that bend a member by much."""
        return self._by_much(self.location[len(self.drivers) : -1])

    def that_scale(self) -> list[int]:
        """Return the drivers that scale a member by much."""
        return self._by_much(self.scale[:-1])

    def _by_much(self, curved: Tensor) -> list[int]:
        """Return the drivers of which a coefficient, of lines or bends (2 j, k), is large."""
        much = curved.unflatten(0, (2, len(self.drivers))).abs() > 0.2
        return self.drivers[much.any(0).any(1)].tolist()

    def _at(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return l, m and g (n, k) at t (n, d)."""
        t = t.index_select(1, self.drivers)
        F, G = features(t)
        return with_one(t) @ self.line, F @ self.location, (G @ self.scale).clamp(-MAX_LOG_SCALE, MAX_LOG_SCALE)


def with_one(t: Tensor) -> Tensor:
    """Return t (..., j) and a column of ones."""
    return torch.cat([t, t.new_ones(*t.shape[:-1], 1)], -1)


def features(t: Tensor) -> tuple[Tensor, Tensor]:
    """Return those of location (..., 3 j + 1) and of scale (..., 2 j + 1) at t (..., j)."""
    bend = t.abs() + torch.log1p((-2 * t.abs()).exp()) - math.log(2)
    return with_one(torch.cat([t, t.square() - 1, bend], -1)), with_one(torch.cat([t, bend], -1))


def skewed(v: Tensor, skewness: Tensor, tails: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return :math:`t = \sinh((\mathrm{arsinh}\, v + \varepsilon) / \delta)` and the logarithm of its slope.

    References
    ----------
    Jones, M. C. and Pewsey, A. (2009). Sinh-arcsinh distributions. Biometrika 96(4).
    """
    a = (v.asinh() + skewness) / tails
    return a.sinh(), a.cosh().log() - tails.log() - v.square().log1p() / 2


def unskewed(t: Tensor, skewness: Tensor, tails: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverse v, and the logarithm of its slope."""
    a = tails * t.asinh() - skewness
    return a.sinh(), a.cosh().log() + tails.log() - t.square().log1p() / 2


@dataclass(frozen=True, repr=False)
class Warp(Curved):
    """The map from y to x.

    Attributes
    ----------
    centre, unit : Tensor of shape (d,)
        The c and r of the formula.
    levels : list of Level
    """

    centre: Tensor
    unit: Tensor
    levels: list[Level]

    def __post_init__(self) -> None:
        members = torch.cat([level.members for level in self.levels])
        below = [level.drivers for level in self.levels]
        d, done = len(self.centre), 0
        if sorted(members.tolist()) != list(range(d)):
            raise ValueError("the levels of its warp do not hold each coordinate once")
        for level, drivers in zip(self.levels, below, strict=True):
            if not set(drivers.tolist()) <= set(members[:done].tolist()):
                raise ValueError("a level of its warp depends on one that is not below it")
            done += len(level.members)

    def __repr__(self) -> str:
        sizes = " + ".join(str(len(level.members)) for level in self.levels)
        return f"Warp of {len(self.centre)} = {sizes} features"

    def to(self, device: torch.device) -> Warp:
        return Warp(self.centre.to(device), self.unit.to(device), [level.to(device) for level in self.levels])

    @property
    def drivers(self) -> list[int]:
        """The coordinates that bend or scale others by much."""
        return sorted({j for level in self.levels for j in [*level.that_bend(), *level.that_scale()]})

    @property
    def scalers(self) -> list[int]:
        """The coordinates that scale others by much."""
        return sorted({j for level in self.levels for j in level.that_scale()})

    def unwarp(self, y: Tensor) -> tuple[Tensor, Tensor]:
        t, log_scale = torch.zeros_like(y), self.unit.log().sum().expand(len(y))
        for level in self.levels:
            own, log_slope = level.forward(t, y.index_select(1, level.members))
            t = t.index_copy(1, level.members, own)
            log_scale = log_scale + log_slope.sum(1)
        return self.centre + self.unit * t, log_scale

    def warp(self, x: Tensor) -> tuple[Tensor, Tensor]:
        t, y, log_scale = (x - self.centre) / self.unit, torch.zeros_like(x), self.unit.log().sum().expand(len(x))
        for level in self.levels:
            own, log_slope = level.backward(t)
            y = y.index_copy(1, level.members, own)
            log_scale = log_scale + log_slope.sum(1)
        return y, log_scale
