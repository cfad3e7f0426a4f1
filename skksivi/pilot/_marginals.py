r"""Coordinates y in which the directions that a target is independent along are normal.

A density :math:`p(u) = p_\perp(u_\perp) \prod_j p_j(v_j^\top u)` with orthonormal v_j has scores with a Jacobian of
which each v_j is an eigenvector, everywhere. So eigenvectors at one point that are some at another are such directions;
along each the score is that of :math:`p_j`, whose integral gives the monotone map of a normal variable to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy import special
from scipy.interpolate import CubicHermiteSpline, CubicSpline
from torch import Tensor

from skksivi._arrays import as_array, as_tensor
from skksivi.pilot._affine import Affine, standard_normal
from skksivi.pilot._curved import Curved
from skksivi.pilot._newton import jacobians
from skksivi.score._score import DifferentiableScore, Score

#: How far a direction may be from an eigenvector, in units of one, and the least change of its curvature that matters.
OFF_AXIS, CURVED = 1e-3, 0.05

#: Distances of the points at which Jacobians are compared, in units of the mode's standard deviations, and the most
#: rounds, and those without a new direction after which it is the last.
NEAR, FAR, N_ROUNDS, N_EMPTY = 1.0, 3.0, 20, 2

#: The fall of log p, in nats, at which a tail ends, the farthest that it is followed, and the nodes along it.
FALL, FARTHEST, N_NODES = 40.0, 2.0**40, 160

#: The normal quantiles between which a map is not linear, and their number.
Y_MOST, N_QUANTILES = 8.0, 401


@dataclass(frozen=True, repr=False)
class Marginals(Curved):
    """The map from y to x = m + L V z, in which z_j is a monotone function of y_j for the first coordinates.

    Attributes
    ----------
    map : Affine
    V : Tensor of shape (d, d)
        Orthonormal directions in the columns.
    values, slopes : Tensor of shape (k, n)
        Of the functions at nodes between -8 and 8, beyond which they are linear.
    """

    map: Affine
    V: Tensor
    values: Tensor
    slopes: Tensor

    def __repr__(self) -> str:
        return f"Marginals along {len(self.values)} directions of {len(self.map.m)} features"

    def to(self, device: torch.device) -> Marginals:
        """Return the same on a device."""
        map_ = Affine(*(a.to(device) for a in self.map))
        return Marginals(map_, *(a.to(device) for a in (self.V, self.values, self.slopes)))

    @property
    def _step(self) -> float:
        return 2 * Y_MOST / (self.values.shape[1] - 1)

    def unwarp(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return x (n, d) and the log-determinants (n,) of dx / dy at y (n, d)."""
        own, rest = y.tensor_split([len(self.values)], dim=1)
        z, slope = self._at(own)
        return self._placed(torch.cat([z, rest], 1)), slope.log().sum(1) + self.map.log_determinant()

    def warp(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return y (n, d) and the log-determinants (n,) of dx / dy at x (n, d)."""
        own, rest = (self.map.whiten(x) @ self.V).tensor_split([len(self.values)], dim=1)
        y = self._solved(own)
        return torch.cat([y, rest], 1), self._at(y)[1].log().sum(1) + self.map.log_determinant()

    def _placed(self, z: Tensor) -> Tensor:
        return self.map.unwhiten(z @ self.V.mT)

    def _at(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the functions (n, k) at y (n, k), and their slopes."""
        inside = y.clamp(-Y_MOST, Y_MOST)
        i = ((inside + Y_MOST) / self._step).nan_to_num().long().clamp_max(self.values.shape[1] - 2)
        a, b, da, db = self._cells(i)
        t = (inside + Y_MOST) / self._step - i
        z = a + t * (da + t * (3 * (b - a) - 2 * da - db + t * (2 * (a - b) + da + db)))
        slope = (da + t * (6 * (b - a) - 4 * da - 2 * db + 3 * t * (2 * (a - b) + da + db))) / self._step
        return z + (y - inside) * slope, slope

    def _cells(self, i: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return values and slopes, in units of a step, at both ends of cells (n, k)."""
        a, b = (self.values.mT.gather(0, j) for j in (i, i + 1))
        da, db = (self._step * self.slopes.mT.gather(0, j) for j in (i, i + 1))
        return a, b, da, db

    def _solved(self, z: Tensor) -> Tensor:
        """Return the y (n, k) at which the functions are z (n, k), by bisection within a cell."""
        i = torch.searchsorted(self.values.contiguous(), z.mT.contiguous()).mT - 1
        low = (i.clamp_min(0) * self._step - Y_MOST).clamp_max(Y_MOST - self._step)
        high = low + self._step
        for _ in range(60):
            middle = (low + high) / 2
            below = self._at(middle)[0] < z
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        y = (low + high) / 2
        for end in (-Y_MOST, Y_MOST):
            at_end, slope = self._at(torch.full_like(z, end))
            y = torch.where((z - at_end) * end > 0, end + (z - at_end) / slope, y)
        return y


def fitted_marginals(score_fn: Score, mode: Affine, generator: torch.Generator) -> Marginals | None:
    """Return the map along the directions that the target is independent along; None if it is normal along all."""
    score_u = mode.pull_back(score_fn)
    axes = separable_axes(score_u, mode.m, generator)
    curves = [_curve(score_u, v, generator) for v in axes.mT]
    kept = [j for j, curve in enumerate(curves) if curve is not None]
    if not kept:
        return None
    own = axes[:, kept]
    rest = torch.linalg.qr(torch.cat([own, torch.eye(len(own)).to(own)], 1)).Q[:, len(kept) :]
    values, slopes = as_tensor(np.stack([c for c in curves if c is not None], 1), device=own.device)
    return Marginals(mode, torch.cat([own, rest], 1), values, slopes)


def separable_axes(score_u: DifferentiableScore, like: Tensor, generator: torch.Generator) -> Tensor:
    """Return the directions (d, k) that are eigenvectors of the Jacobians at all of some points, and not normal.

    Each round compares two points, and looks among the directions that are left by the last one, or are normal near
    the mode.
    """
    found, W, n_empty = [like.new_empty(len(like), 0)], torch.eye(len(like)).to(like), 0
    for i in range(N_ROUNDS):
        A, B = jacobians(score_u, (FAR if i else NEAR) * standard_normal(2, like, generator))
        if not (A.isfinite().all() and B.isfinite().all()):
            break
        V = W @ torch.linalg.eigh(W.mT @ (A + B / 3) @ W).eigenvectors
        curvatures = torch.stack([((J @ V) * V).sum(0) for J in (A, B)])
        off = torch.stack([(J @ V - V * c).norm(dim=0) for J, c in zip((A, B), curvatures, strict=True)])
        is_axis = (off <= OFF_AXIS * (1 + curvatures.abs())).all(0)
        is_normal = ((curvatures + 1).abs() <= CURVED).all(0)
        found.append(V[:, is_axis & ~is_normal])
        W = V[:, ~is_axis | is_normal]
        n_empty = 0 if found[-1].numel() else n_empty + 1
        if not W.numel() or n_empty == N_EMPTY or not (is_axis | is_normal).any():
            break
    return torch.cat(found, 1)


def _curve(score_u: DifferentiableScore, v: Tensor, generator: torch.Generator) -> np.ndarray | None:
    """Return values and slopes (2, n) of the map along a direction v (d,), None if the score depends on others."""

    def slopes(t: Tensor) -> Tensor:
        others = standard_normal(len(t), v, generator)
        return score_u(t[:, None] * v + others - (others @ v)[:, None] * v).detach() @ v

    doublings = 2.0 ** torch.arange(-3, np.log2(FARTHEST) + 1).to(v)
    ends = [_end(doublings, sign * slopes(sign * doublings)) for sign in (-1, 1)]
    if not all(ends):
        return None
    a = torch.linspace(-np.arcsinh(ends[0]), np.arcsinh(ends[1]), N_NODES).to(v)
    t = a.sinh()
    g, again = slopes(t), slopes(t)
    if not ((g - again).abs() <= OFF_AXIS * (1 + g.abs())).all():  # also where it is not finite
        return None
    return _quantiles(as_array(a), as_array(g))


def _end(t: Tensor, outward: Tensor) -> float:
    """Return the distance at which the density has ended, given its outward slopes at distances t, 0 if it has not."""
    steps = torch.cat([t[:1], t.diff()])
    fall = -(outward * steps).nan_to_num(nan=-torch.inf).cumsum(0)
    ended = (fall > FALL).nonzero()
    return t[ended[0, 0]].item() if len(ended) else 0.0


def _quantiles(a: np.ndarray, g: np.ndarray) -> np.ndarray:
    r"""Return values and slopes (2, n) of the monotone map of a normal y to t = sinh(a), given its score g.

    Both tails of the distribution function are accumulated from their ends, for their quantiles' sake.
    """
    fine = np.linspace(a[0], a[-1], 40 * len(a))
    log_p = CubicSpline(a, g * np.cosh(a)).antiderivative()(fine) + np.log(np.cosh(fine))
    p = np.exp(log_p - log_p.max())
    parts = (p[1:] + p[:-1]) / 2
    below, above = np.cumsum(parts), np.cumsum(parts[::-1])[::-1]
    middle = (fine[1:-1], np.log(below[:-1] / below[-1]), np.log(above[1:] / below[-1]))
    inner, log_below, log_above = middle
    y_of = np.where(log_below < log_above, special.ndtri_exp(log_below), -special.ndtri_exp(log_above))
    rising = np.concatenate([[True], np.diff(y_of) > 0])
    y = np.linspace(-Y_MOST, Y_MOST, N_QUANTILES)
    at = np.interp(y, y_of[rising], inner[rising])
    log_density = np.interp(at, fine, log_p - log_p.max()) - np.log(parts.sum() * (fine[1] - fine[0]))
    slope = np.exp(-(y**2) / 2 - np.log(2 * np.pi) / 2 - log_density) * np.cosh(at)
    return np.stack([np.sinh(at), slope])
