r"""Coordinates y in which independent directions of a target, or its radius, have normal quantiles.

Where :math:`p(u) = p_\perp(u_\perp) \prod_j p_j(v_j^\top u)` with orthonormal v_j, each v_j is an eigenvector of the
Jacobian of the score everywhere. So eigenvectors that several points share are independent directions. The score
along each is that of :math:`p_j`; its integral gives the distribution function :math:`F_j`, and the coordinate

.. math:: z_j = F_j^{-1}(\Phi(y_j)), \qquad u = V z.

Where :math:`p(u) = g(\|u\|)` in some directions, as of a multivariate t, their score is parallel to u, and its radius
is that quantile of its own distribution which the radius of y is of a chi distribution. Both are exact in the tails.

References
----------
Yang, J., Latuszynski, K. and Roberts, G. (2024). Stereographic Markov chain Monte Carlo. Annals of Statistics 52(6):
chains that make light what is heavy are uniformly ergodic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from scipy.interpolate import PchipInterpolator
from torch import Tensor

from skksivi._utils.arrays import as_array, as_tensor
from skksivi.coordinates._affine import Affine, standard_normal
from skksivi.coordinates._whitening import Curved
from skksivi.score._score import DifferentiableScore, Score

#: How far a direction may be from an eigenvector, and the least change of its curvature that matters.
OFF_AXIS, CURVED = 1e-3, 0.05

#: The first of the distances at which it is seen where a tail ends.
SHORTEST = 2.0**-3


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
        t, (a, b, c, d) = place - i, self._cubics(i)
        slope = (b + t * (2 * c + 3 * t * d)) / self.step
        return a + t * (b + t * (c + t * d)) + (y - inside) * slope, slope

    def solve(self, z: Tensor) -> Tensor:
        """Return the y (n, k) at which the values are z (n, k)."""
        z_by_row, last = z.mT.contiguous(), self.values.shape[1] - 2
        i = (torch.searchsorted(self.values.contiguous(), z_by_row).mT - 1).clamp(0, last)
        (a, b, c, d), low = self._cubics(i), self.low + self.step * i.to(z)
        high = low + self.step
        for _ in range(60):
            middle = (low + high) / 2
            t = (middle - self.low) / self.step - i
            is_below = a + t * (b + t * (c + t * d)) < z
            low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
        value, slope = self.at(high)
        return high + (z - value) / slope  # beyond the nodes, where these are linear

    def _cubics(self, i: Tensor) -> tuple[Tensor, ...]:
        """Return the coefficients (n, k) from the nodes i (n, k) to the next."""
        curves = self.values.mT, self.step * self.slopes.mT
        (a, b), (da, db) = ([curve.gather(0, j) for j in (i, i + 1)] for curve in curves)
        return a, da, 3 * (b - a) - 2 * da - db, 2 * (a - b) + da + db

    def to(self, device: torch.device) -> Quantiles:
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
    n_mapped : int
        The number of these coordinates.
    quantiles : Quantiles
        A function of each, or one of the radius of all.
    """

    map: Affine
    V: Tensor
    n_mapped: int
    quantiles: Quantiles

    def __post_init__(self) -> None:
        if self.V.shape != (len(self.map.m), len(self.map.m)) or not 0 < self.n_mapped <= len(self.V):
            raise ValueError("its directions do not fit its map")
        self.quantiles.check(self.n_mapped)

    @property
    def is_radial(self) -> bool:
        return len(self.quantiles.values) < self.n_mapped

    @property
    def is_whole(self) -> bool:
        """Whether it maps all coordinates."""
        return self.n_mapped == len(self.V)

    def __repr__(self) -> str:
        return f"Marginals of {'a radius of ' * self.is_radial}{self.n_mapped} of {len(self.V)} directions"

    def to(self, device: torch.device) -> Marginals:
        map_ = Affine(*(a.to(device) for a in self.map))
        return Marginals(map_, self.V.to(device), self.n_mapped, self.quantiles.to(device))

    def unwarp(self, y: Tensor) -> tuple[Tensor, Tensor]:
        own, rest = y.tensor_split([self.n_mapped], dim=1)
        r = _radius(own).clamp_min(self.quantiles.low) if self.is_radial else own
        z, slope = self.quantiles.at(r)
        x = self.map.unwhiten(torch.cat([z / r * own if self.is_radial else z, rest], 1) @ self.V.mT)
        return x, self._log_scale(r, z, slope)

    def warp(self, x: Tensor) -> tuple[Tensor, Tensor]:
        own, rest = (self.map.whiten(x) @ self.V).tensor_split([self.n_mapped], dim=1)
        z = _radius(own).clamp_min(self.quantiles.values[0, 0]) if self.is_radial else own
        r = self.quantiles.solve(z)
        y = torch.cat([r / z * own if self.is_radial else r, rest], 1)
        return y, self._log_scale(r, z, self.quantiles.at(r)[1])

    def _log_scale(self, r: Tensor, z: Tensor, slope: Tensor) -> Tensor:
        log_scale = slope.log().sum(1) + self.map.log_determinant()
        return log_scale + (self.n_mapped - 1) * (z / r).log()[:, 0] if self.is_radial else log_scale


def _radius(z: Tensor) -> Tensor:
    return z.norm(dim=1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny ** 0.25)


# The fit


def fitted_marginals(score_fn: Score, mode: Affine, generator: torch.Generator) -> Marginals | None:
    """Return the map along the independent directions of a target, or of a radius; None if all these are normal."""
    s = mode.whiten_score(score_fn(mode.m[None])).detach()
    mode = mode._replace(m=mode.unwhiten(s)[0])  # another step of Newton's method: a radius is about the very mode
    score_u = mode.pull_back(score_fn)
    J = products(score_u, standard_normal(2, mode.m, generator), torch.eye(len(mode.m)).to(mode.m))
    if not J.isfinite().all():
        return None
    block = not_normal(J)
    radial = _of_radius(score_u, block, generator) if block.shape[1] > 1 else None
    if radial is not None:
        k, axes = block.shape[1], completed(block)
        return Marginals(mode, axes, k, _functions([radial], stats.chi(k), block))
    axes = independent_directions(score_u, J, generator)
    known = [(j, p) for j, v in enumerate(axes.mT) if (p := _profile_along(score_u, v, generator)) is not None]
    found = {j: curve for j, p in known if (curve := p.quantiles()) is not None}
    if any(map(_jumps, found.values())):  # over a valley between two modes
        found = {j: curve for j, p in known if (curve := p.quantiles(finer=8)) is not None}
    if not found:
        return None
    V = completed(axes[:, list(found)])
    return Marginals(mode, V, len(found), _functions([*found.values()], stats.norm, axes))


def products(score_u: DifferentiableScore, u: Tensor, W: Tensor) -> Tensor:
    """Return the products (n, d, k) of the Jacobians at points u (n, d), symmetric ones, with directions (d, k)."""
    k = W.shape[1]
    return score_u.product(u.repeat_interleave(k, 0), W.mT.repeat(len(u), 1)).view(len(u), k, -1).mT


def not_normal(J: Tensor) -> Tensor:
    """Return an orthonormal basis (d, k) of what two Jacobians (2, d, d) differ by from those of a normal target."""
    U, sizes, _ = torch.linalg.svd(torch.cat([*(J + torch.eye(J.shape[1]).to(J))], 1), full_matrices=False)
    return U[:, sizes > CURVED]


def completed(V: Tensor) -> Tensor:
    """Return orthonormal directions (d, d) of which the first are given."""
    k = V.shape[1]
    return torch.cat([V, torch.linalg.qr(torch.cat([V, torch.eye(len(V)).to(V)], 1)).Q[:, k:]], 1)


def independent_directions(score_u: DifferentiableScore, J: Tensor, generator: torch.Generator) -> Tensor:
    """Return directions (d, k) that are eigenvectors of the Jacobians, each of those at two points, and not normal.

    The first round compares two Jacobians (2, d, d) near the mode, each other one two farther out, among the
    directions that are left by the last one, or are normal near the mode.
    """
    W, JW, n_empty = torch.eye(J.shape[1]).to(J), J, 0
    found = W[:, :0]
    # rounds without a new direction
    while W.shape[1] and n_empty < 2 * (1 + found.shape[1] / W.shape[1]) and JW.isfinite().all():
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
        n_empty = 0 if is_new.any() else n_empty + 1
        if W.numel():
            # farther out, in standard deviations of the mode
            JW = products(score_u, 3.0 * standard_normal(2, W[:, 0], generator), W)
    return found


def _profile_along(score_u: DifferentiableScore, v: Tensor, generator: torch.Generator) -> Profile | None:
    """Return the profile along a direction v (d,), None if the score along it depends on others."""
    unit = 1.0

    def slopes(t: Tensor, sign: int = 1) -> Tensor:
        others, t = standard_normal(len(t), v, generator), sign * unit * t
        return sign * unit * (score_u(t[:, None] * v + others - (others @ v)[:, None] * v).detach() @ v)

    distances = SHORTEST * 2.0 ** (-4 * torch.arange(10).to(v))
    steep = torch.maximum(slopes(distances).abs(), slopes(distances, -1).abs()) * distances > 0.5
    unit = 2.0 ** (-4 * int(steep.sum()))  # the curvature at a kink is no unit
    ends = [_end(partial(slopes, sign=sign), v) for sign in (-1, 1)]
    return _profile(slopes, -ends[0], ends[1], stats.norm, v, unit) if all(ends) else None


def _of_radius(score_u: DifferentiableScore, V: Tensor, generator: torch.Generator) -> np.ndarray | None:
    """Return the quantiles of the radius in orthonormal directions (d, k), None if it is normal.

    And None unless their score depends on the radius alone.
    """
    k = V.shape[1]

    def slopes(t: Tensor) -> Tensor:
        """Return the slopes along rays at distances t (n,), NaN where the score is not along the ray."""
        others, e = standard_normal(len(t), V[:, 0], generator), standard_normal(len(t), V[0], generator)
        e = e / e.norm(dim=1, keepdim=True)
        s = score_u(t[:, None] * (e @ V.mT) + others - others @ V @ V.mT).detach() @ V
        g = (s * e).sum(1)
        return g.where((s - g[:, None] * e).norm(dim=1) <= OFF_AXIS * (1 + g.abs()), torch.nan)

    t = torch.linspace(0.5, 2, 8).to(V) * k**0.5
    g = slopes(t)
    if g.isnan().any() or ((g + t).abs() <= CURVED * t).all():
        return None
    end = _end(lambda t: slopes(t) + (k - 1) / t, V[:, 0])
    found = _profile(slopes, 0.0, end, stats.chi(k), V[:, 0]) if end else None
    return None if found is None else found.quantiles()


def _end(slopes: Callable[[Tensor], Tensor], like: Tensor) -> float:
    """Return the distance at which a density has fallen from its peak, given its slopes; 0 if it has not."""
    last, value, peak = like.new_zeros(1), like.new_zeros(1), like.new_zeros(1)
    n_doublings = 16  # looked at at once
    t = SHORTEST * 2.0 ** torch.arange(n_doublings).to(like)
    for _ in range(13):
        steps = (slopes(t) * torch.cat([last, t]).diff()).nan_to_num(nan=-torch.inf)
        values = torch.cat([value, steps]).cumsum(0)
        peaks = torch.cat([peak, values]).cummax(0).values[1:]
        if len(ended := (peaks - values > 140.0).nonzero()):  # nats
            return t[ended[0, 0] - 1].item()
        last, value, peak, t = t[-1:], values[-1:], peaks[-1:], t * 2.0**n_doublings
    return 0.0


def _nodes(base: Any) -> tuple[float, float]:  # noqa: ANN401  # a distribution of scipy
    """Return the first and the last node of the quantiles of a distribution."""
    beyond = 1e-55  # the probability beyond the first and the last node: the weights of draws there would be large
    return float(max(base.support()[0], base.ppf(beyond))), float(base.isf(beyond))


def _functions(curves: list[np.ndarray], base: Any, like: Tensor) -> Quantiles:  # noqa: ANN401
    """Return functions of a variable of a base distribution, given their values and slopes (2, n)."""
    return Quantiles(*_nodes(base), *as_tensor(np.stack(curves, 1), device=like.device))


def _jumps(curve: np.ndarray) -> bool:
    """Tell whether values and slopes (2, n) of a normal variable jump, far from its tails."""
    value = curve[0, 3 * curve.shape[1] // 8 : -3 * curve.shape[1] // 8]
    return bool((np.diff(value) > 0.3 * (1 + abs(value[1:]))).any())


class Profile(NamedTuple):
    """The slopes of a log-density along a line, at nodes t = sinh(sinh(w)), in a unit, and a base distribution."""

    w: np.ndarray
    slopes: np.ndarray
    base: Any
    unit: float

    def quantiles(self, finer: int = 1) -> np.ndarray | None:
        r"""Return values and slopes (2, n) of the increasing map from the base distribution, None where it is none.

        The density has the slopes, times :math:`t^{k-1}` for a radius of k dimensions. Both tails are summed from
        their ends, for their quantiles' sake.
        """
        w, base = self.w, self.base
        fine = np.linspace(w[0], w[-1], 20 * finer * len(w))
        t, scale = np.sinh(np.sinh(fine)), np.cosh(np.sinh(fine)) * np.cosh(fine)  # dt / dw
        log_p = PchipInterpolator(w, self.slopes * np.cosh(np.sinh(w)) * np.cosh(w)).antiderivative()(fine)
        if base.support()[0] == 0:
            with np.errstate(divide="ignore"):
                log_p += (base.args[0] - 1) * np.log(t)
        log_p += np.log(scale)
        m = np.exp(log_p - log_p.max())
        parts = (m[1:] + m[:-1]) / 2
        by_cubics = (13 * (m[1:-2] + m[2:-1]) - m[:-3] - m[3:]) / 24  # through four nodes
        parts[1:-1] = np.where(by_cubics > 0, by_cubics, parts[1:-1])
        below, above = np.cumsum(parts)[:-1] / parts.sum(), np.cumsum(parts[::-1])[::-1][1:] / parts.sum()
        with np.errstate(invalid="ignore"):  # where rounding leaves no probability
            y_of = np.where(below < above, base.ppf(below), base.isf(above))
        kept = np.isfinite(y_of) & (y_of > np.fmax.accumulate(np.r_[-np.inf, y_of[:-1]]))
        kept[:4] = kept[-4:] = False  # of few intervals, a power of t is not summed well
        n_quantiles = 800 * finer + 1
        if kept.sum() < n_quantiles:
            return None
        y_of, t = y_of[kept], t[1:-1][kept]
        if base.support()[0] == 0:  # both radii are zero at once; sums are rough up to the next node
            y_of, t = np.r_[0.0, y_of[20 * finer :]], np.r_[0.0, t[20 * finer :]]
        curve = PchipInterpolator(y_of, t)  # which increases, whatever the kinks
        y = np.linspace(*_nodes(base), n_quantiles)
        inside = y.clip(y_of[0], y_of[-1])
        slope = curve.derivative()(inside)
        value = curve(inside) + (y - inside) * slope
        return self.unit * np.stack([value, slope]) if (np.diff(value) > 0).all() and (slope > 0).all() else None


def _profile(
    slopes: Callable[[Tensor], Tensor],
    first: float,
    last: float,
    base: Any,  # noqa: ANN401
    like: Tensor,
    unit: float = 1.0,
) -> Profile | None:
    """Return the profile of given slopes between two ends.

    None if the slopes are not finite, not the same another time, or too rough for the nodes.
    """
    low, high = np.arcsinh(np.arcsinh([first, last])).tolist()
    n_nodes = 320
    w = np.linspace(low, high, n_nodes)
    t = as_tensor(np.sinh(np.sinh(w)), device=like.device)
    every = 4  # of the nodes are looked at twice
    found, again = as_array(slopes(t)), as_array(slopes(t[::every]))
    is_same = abs(found[::every] - again) <= OFF_AXIS * (1 + abs(again))
    if not (np.isfinite(found).all() and is_same.mean() >= 0.95):  # rounding may move some over a kink
        return None
    at_ends = found * np.gradient(as_array(t))  # rises of log p, if the slopes were constant
    # p may be zero in a valley between two nodes, as that of |t|^k, where this is 4 k or more
    if ((at_ends[:-1] < 0) & (at_ends[1:] > 0) & (np.diff(at_ends) > 2.0)).any():
        return None
    return Profile(w, found, base, unit)
