r"""Coordinates y in which independent directions of a target, or its radius, have normal quantiles.

Where :math:`p(u) = p_\perp(u_\perp) \prod_j p_j(v_j^\top u)` with orthonormal v_j, each v_j is an eigenvector of the
Jacobian of the score everywhere. So eigenvectors that several points share are independent directions. The score
along each is that of :math:`p_j`; its integral gives the distribution function :math:`F_j`, and the coordinate

.. math:: z_j = F_j^{-1}(\Phi(y_j)), \qquad u = V z.

Where :math:`p(u) = g(\|u\|)`, as of a multivariate t, the score is parallel to u, and the radius of u is that
quantile of its own distribution which the radius of y is of a chi distribution. Either map is exact in the tails.

References
----------
Yang, J., Latuszynski, K. and Roberts, G. (2024). Stereographic Markov chain Monte Carlo. Annals of Statistics 52(6):
chains that make light what is heavy are uniformly ergodic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from scipy import stats
from scipy.interpolate import CubicHermiteSpline, CubicSpline
from torch import Tensor

from skksivi._arrays import as_array, as_tensor
from skksivi.pilot._affine import Affine, standard_normal
from skksivi.pilot._curved import Curved
from skksivi.score._score import DifferentiableScore, Score

#: How far a direction may be from an eigenvector, and the least change of its curvature that matters.
OFF_AXIS, CURVED = 1e-3, 0.05

#: Distances of the points at which Jacobians are compared, in units of the mode's standard deviations, and the rounds
#: without a new direction after which there are no more, times one and the ratio of directions found to those left.
NEAR, FAR, N_EMPTY = 1.0, 3.0, 2

#: Points at which it is seen whether a target depends on the radius alone.
N_RADIAL = 8

#: The fall of log p, in nats, at which a tail ends, the distances that are looked at at once until then, the first of
#: them, and how often at most; the nodes between the ends, and which of them are looked at twice.
FALL, N_DOUBLINGS, SHORTEST, N_LOOKS, N_NODES, EVERY = 140.0, 16, 2.0**-3, 16, 320, 4

#: The probability of what lies beyond the first and the last node of the quantiles, and their number: the weights of
#: draws that lie beyond would be large.
BEYOND, N_QUANTILES = 1e-55, 801

#: Bisections of a cell of the nodes.
N_BISECTIONS = 60


class Quantiles(NamedTuple):
    """Increasing functions, by cubics between nodes and linear beyond.

    Attributes
    ----------
    low, high : float
        The first and the last node.
    values, slopes : Tensor of shape (k, n)
        Values and slopes at the nodes.
    """

    low: float
    high: float
    values: Tensor
    slopes: Tensor

    @property
    def step(self) -> float:
        """The distance of nodes."""
        return (self.high - self.low) / (self.values.shape[1] - 1)

    def at(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and slopes (n, k) at y (n, k)."""
        inside = y.clamp(self.low, self.high)
        place = (inside - self.low) / self.step
        i = place.nan_to_num().long().clamp_max(self.values.shape[1] - 2)
        t = place - i
        (a, b), (da, db) = ([curve.mT.gather(0, j) for j in (i, i + 1)] for curve in (self.values, self.slopes))
        da, db = self.step * da, self.step * db
        cubic = a + t * (da + t * (3 * (b - a) - 2 * da - db + t * (2 * (a - b) + da + db)))
        slope = (da + t * (6 * (b - a) - 4 * da - 2 * db + 3 * t * (2 * (a - b) + da + db))) / self.step
        return cubic + (y - inside) * slope, slope

    def solve(self, z: Tensor) -> Tensor:
        """Return the y (n, k) at which the values are z (n, k)."""
        i = torch.searchsorted(self.values.contiguous(), z.mT.contiguous()).mT - 1
        low = self.low + self.step * i.clamp(0, self.values.shape[1] - 2).to(z)
        high = low + self.step
        for _ in range(N_BISECTIONS):
            middle = (low + high) / 2
            is_below = self.at(middle)[0] < z
            low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
        value, slope = self.at(high)
        return high + (z - value) / slope  # beyond the nodes, where these are linear

    def to(self, device: torch.device) -> Quantiles:
        """Return the same on a device."""
        return self._replace(values=self.values.to(device), slopes=self.slopes.to(device))

    def check(self, k: int) -> None:
        """Raise ValueError unless these are k increasing functions."""
        if self.values.shape != self.slopes.shape or len(self.values) > k or not self.step > 0:
            raise ValueError("its quantiles do not fit its map")
        if not ((self.values.diff() > 0).all() and (self.slopes > 0).all()):
            raise ValueError("its quantiles do not increase")


@dataclass(frozen=True, repr=False)
class Marginals(Curved):
    """The map from y to x = m + L V z, in which the first coordinates of z are functions of those of y.

    Attributes
    ----------
    map : Affine
    V : Tensor of shape (d, d)
        Orthonormal directions in its columns.
    quantiles : Quantiles
    """

    map: Affine
    V: Tensor
    quantiles: Quantiles

    def __post_init__(self) -> None:
        self.quantiles.check(len(self.V))

    @property
    def is_whole(self) -> bool:
        """Whether it maps all directions."""
        return len(self.quantiles.values) == len(self.V)

    def __repr__(self) -> str:
        return f"Marginals along {len(self.quantiles.values)} directions of {len(self.map.m)} features"

    def to(self, device: torch.device) -> Marginals:
        """Return the same on a device."""
        map_ = Affine(*(a.to(device) for a in self.map))
        return Marginals(map_, self.V.to(device), self.quantiles.to(device))

    def unwarp(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return x (n, d) and the log-determinants (n,) of dx / dy at y (n, d)."""
        own, rest = y.tensor_split([len(self.quantiles.values)], dim=1)
        z, slope = self.quantiles.at(own)
        x = self.map.unwhiten(torch.cat([z, rest], 1) @ self.V.mT)
        return x, slope.log().sum(1) + self.map.log_determinant()

    def warp(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return y (n, d) and the log-determinants (n,) of dx / dy at x (n, d)."""
        z, rest = (self.map.whiten(x) @ self.V).tensor_split([len(self.quantiles.values)], dim=1)
        own = self.quantiles.solve(z)
        return torch.cat([own, rest], 1), self.quantiles.at(own)[1].log().sum(1) + self.map.log_determinant()


@dataclass(frozen=True, repr=False)
class Radial(Curved):
    """The map from y to x = m + L z, in which z has the direction of y, and its radius is a function of that of y.

    Attributes
    ----------
    map : Affine
    quantiles : Quantiles
        One function.
    """

    map: Affine
    quantiles: Quantiles
    is_whole: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.quantiles.check(1)

    def __repr__(self) -> str:
        return f"A radial map of {len(self.map.m)} features"

    def to(self, device: torch.device) -> Radial:
        """Return the same on a device."""
        return Radial(Affine(*(a.to(device) for a in self.map)), self.quantiles.to(device))

    def unwarp(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return x (n, d) and the log-determinants (n,) of dx / dy at y (n, d)."""
        r = _radius(y)
        radius, slope = self.quantiles.at(r)
        return self.map.unwhiten(radius / r * y), self._log_scale(r, radius, slope)

    def warp(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return y (n, d) and the log-determinants (n,) of dx / dy at x (n, d)."""
        z = self.map.whiten(x)
        radius = _radius(z)
        r = self.quantiles.solve(radius)
        return r / radius * z, self._log_scale(r, radius, self.quantiles.at(r)[1])

    def _log_scale(self, r: Tensor, radius: Tensor, slope: Tensor) -> Tensor:
        ratio = (len(self.map.m) - 1) * (radius / r).log() + slope.log()
        return ratio[:, 0] + self.map.log_determinant()


def _radius(z: Tensor) -> Tensor:
    return z.norm(dim=1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny ** 0.25)


# The fit


def fitted_marginals(score_fn: Score, mode: Affine, generator: torch.Generator) -> Marginals | Radial | None:
    """Return the map along the independent directions of a target, or of its radius; None if all these are normal."""
    s = mode.whiten_score(score_fn(mode.m[None])).detach()
    mode = mode._replace(m=mode.unwhiten(s)[0])  # another step of Newton's method: a radius is about the very mode
    score_u = mode.pull_back(score_fn)
    radial = _radial(score_u, mode, generator)
    if radial is not None:
        return radial
    axes = independent_directions(score_u, mode.m, generator)
    curves = [_of_direction(score_u, v, generator) for v in axes.mT]
    kept = [j for j, curve in enumerate(curves) if curve is not None]
    if not kept:
        return None
    own = axes[:, kept]
    V = torch.cat([own, torch.linalg.qr(torch.cat([own, torch.eye(len(own)).to(own)], 1)).Q[:, len(kept) :]], 1)
    values, slopes = as_tensor(np.stack([c for c in curves if c is not None], 1), device=own.device)
    return Marginals(mode, V, Quantiles(*_nodes(stats.norm), values, slopes))


def independent_directions(score_u: DifferentiableScore, like: Tensor, generator: torch.Generator) -> Tensor:
    """Return directions (d, k) that are eigenvectors of the Jacobians, each of those at two points, and not normal.

    Each round compares two points, and looks among the directions that are left by the last one, or are normal near
    the mode.
    """
    found, W = like.new_empty(len(like), 0), torch.eye(len(like)).to(like)
    scale, n_empty = NEAR, 0
    while W.shape[1] and n_empty < N_EMPTY * (1 + found.shape[1] / W.shape[1]):
        u = (scale * standard_normal(2, like, generator)).repeat_interleave(W.shape[1], 0)
        JW = score_u.product(u, W.mT.repeat(2, 1)).view(2, W.shape[1], -1).mT
        if not JW.isfinite().all():
            break
        within = (W.mT @ (JW[0] + JW[1] / 3)).tril()  # of which the lower half decides, as it is symmetric
        turn = torch.linalg.eigh(within).eigenvectors
        V, JV = W @ turn, JW @ turn
        curvatures = (JV * V).sum(1, keepdim=True)
        is_axis = ((JV - V * curvatures).norm(dim=1) <= OFF_AXIS * (1 + curvatures[:, 0].abs())).all(0)
        is_normal = ((curvatures[:, 0] + 1).abs() <= CURVED).all(0)
        if not (is_axis | is_normal).any():
            break
        is_new = is_axis & ~is_normal
        found, W = torch.cat([found, V[:, is_new]], 1), V[:, ~is_new]
        scale, n_empty = FAR, 0 if is_new.any() else n_empty + 1
    return found


def _of_direction(score_u: DifferentiableScore, v: Tensor, generator: torch.Generator) -> np.ndarray | None:
    """Return the quantiles along a direction v (d,), None if the score along it depends on others."""

    def slopes(t: Tensor, sign: int = 1) -> Tensor:
        others = standard_normal(len(t), v, generator)
        return sign * (score_u(sign * t[:, None] * v + others - (others @ v)[:, None] * v).detach() @ v)

    ends = [_end(partial(slopes, sign=sign), v) for sign in (-1, 1)]
    if not all(ends):
        return None
    w, t = _spaced(-ends[0], ends[1], v)
    g, again = slopes(t), slopes(t[::EVERY])
    if not (g.isfinite().all() and ((g[::EVERY] - again).abs() <= OFF_AXIS * (1 + again.abs())).all()):
        return None
    return _quantiles(as_array(w), as_array(g), stats.norm)


def _radial(score_u: DifferentiableScore, mode: Affine, generator: torch.Generator) -> Radial | None:
    """Return the map of the radius, None unless the score depends on that alone, or if it is normal."""

    def slopes(t: Tensor) -> Tensor:
        """Return the slopes along rays at distances t (n,), NaN where the score is not along the ray."""
        e = standard_normal(len(t), mode.m, generator)
        e = e / e.norm(dim=1, keepdim=True)
        s = score_u(t[:, None] * e).detach()
        g = (s * e).sum(1)
        return g.where((s - g[:, None] * e).norm(dim=1) <= OFF_AXIS * (1 + g.abs()), torch.nan)

    d = len(mode.m)
    t = torch.linspace(0.5, 2, N_RADIAL).to(mode.m) * d**0.5
    g = slopes(t)
    if d == 1 or g.isnan().any() or ((g + t).abs() <= CURVED * t).all():
        return None
    end = _end(lambda t: slopes(t) + (d - 1) / t, mode.m)
    if not end:
        return None
    w, t = _spaced(0.0, end, mode.m)
    g = slopes(t)
    if not g.isfinite().all():
        return None
    values, slope = as_tensor(_quantiles(as_array(w), as_array(g), stats.chi(d)), device=mode.m.device)
    return Radial(mode, Quantiles(*_nodes(stats.chi(d)), values[None], slope[None]))


def _end(slopes: Callable[[Tensor], Tensor], like: Tensor) -> float:
    """Return the distance at which a density has fallen from its peak, given its slopes; 0 if it has not."""
    last, value, peak = like.new_zeros(1), like.new_zeros(1), like.new_zeros(1)
    t = SHORTEST * 2.0 ** torch.arange(N_DOUBLINGS).to(like)
    for _ in range(N_LOOKS):
        steps = (slopes(t) * torch.cat([last, t]).diff()).nan_to_num(nan=-torch.inf)
        values = torch.cat([value, steps]).cumsum(0)
        peaks = torch.cat([peak, values]).cummax(0).values[1:]
        if len(ended := (peaks - values > FALL).nonzero()):
            return t[ended[0, 0] - 1].item()
        last, value, peak, t = t[-1:], values[-1:], peaks[-1:], t * 2.0**N_DOUBLINGS
    return 0.0


def _spaced(first: float, last: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return nodes w, and the points t = sinh(sinh(w)) at them, from the first to the last."""
    low, high = (np.arcsinh(np.arcsinh(end)) for end in (first, last))
    w = torch.linspace(low, high, N_NODES).to(like)
    return w, w.sinh().sinh()


def _nodes(base: Any) -> tuple[float, float]:  # noqa: ANN401  # a distribution of scipy
    """Return the first and the last node of the quantiles of a distribution."""
    return float(max(base.support()[0], base.ppf(BEYOND))), float(base.isf(BEYOND))


def _quantiles(w: np.ndarray, g: np.ndarray, base: Any) -> np.ndarray:  # noqa: ANN401
    r"""Return values and slopes (2, n) of the increasing map of a variable y of a base distribution to sinh(sinh(w)).

    The density of that has slopes g at the nodes w, times :math:`t^{d-1}` for a radius of d dimensions. Both tails
    are accumulated from their ends, for their quantiles' sake.
    """
    fine = np.linspace(w[0], w[-1], 20 * len(w))
    t = np.sinh(np.sinh(fine))
    scale = np.cosh(np.sinh(fine)) * np.cosh(fine)  # dt / dw
    log_p = CubicSpline(w, g * np.cosh(np.sinh(w)) * np.cosh(w)).antiderivative()(fine)
    if base.support()[0] == 0:
        with np.errstate(divide="ignore"):
            log_p += (base.args[0] - 1) * np.log(t)
    log_p -= (log_p + np.log(scale)).max()
    m = np.exp(log_p + np.log(scale)) * (fine[1] - fine[0])
    parts = (m[1:] + m[:-1]) / 2
    by_cubics = (13 * (m[1:-2] + m[2:-1]) - m[:-3] - m[3:]) / 24  # through four nodes
    parts[1:-1] = np.where(by_cubics > 0, by_cubics, parts[1:-1])
    log_p -= np.log(parts.sum())
    below, above = np.cumsum(parts)[:-1] / parts.sum(), np.cumsum(parts[::-1])[::-1][1:] / parts.sum()
    y_of = np.where(below < above, base.ppf(below), base.isf(above))
    slope_of = np.exp(base.logpdf(y_of) - log_p[1:-1])
    kept = np.isfinite(y_of) & np.isfinite(slope_of) & (y_of > np.maximum.accumulate(np.r_[-np.inf, y_of[:-1]]))
    curve = CubicHermiteSpline(y_of[kept], t[1:-1][kept], slope_of[kept])
    y = np.linspace(*_nodes(base), N_QUANTILES)
    inside = y.clip(y_of[kept][0], y_of[kept][-1])
    slope = curve.derivative()(inside)
    return np.stack([curve(inside) + (y - inside) * slope, slope])
