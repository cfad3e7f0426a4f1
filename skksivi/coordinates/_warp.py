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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.coordinates._whitening import Curved

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


# Fitted to points

#: The gain of a pair of coordinates, in nats, from which on it counts.
LEAST_OF_PAIR = 0.02

#: How much likelier than a simpler model of a coordinate one has to be, in nats, times the root of the points.
SIMPLER = 1.5


def fitted_warp(x: Tensor) -> Warp | None:
    """Return the warp for points x (n, d), None where an affine map does as well."""
    x = x[x.isfinite().all(1)]
    if len(x) <= 2 * x.shape[1]:
        return None
    n_used = 4000 if x.shape[1] < 30 else max(1000, 3 * x.shape[1])  # of many features each pair takes long
    x = x[:: max(1, len(x) // n_used)]
    centre = x.median(0).values
    unit = (x - centre).abs().quantile(0.683, 0)
    if not (unit > 0).all():
        return None
    t = (x - centre) / unit
    graphs = (parents for parents in _graphs(t) if any(own.drivers for own in parents))
    warps = (Warp(centre, unit, _levels(t, parents, unit, centre)) for parents in graphs)
    gain, best = max(((_gain(warp, x), warp) for warp in warps), key=itemgetter(0), default=(0.0, None))
    return None if gain <= max(0.1, 0.005 * x.shape[1]) else best  # nats, in all and for each feature


def _gain(warp: Warp, x: Tensor) -> float:
    """Return by how many nats a Gaussian in warped coordinates is nearer to points x (n, d)."""
    y, log_scale = warp.warp(x)
    return _gaussian_entropy(x) - _gaussian_entropy(y) - log_scale.mean().item()


def _gaussian_entropy(x: Tensor) -> float:
    """Return the entropy of the Gaussian with the moments of points x (n, d), up to a constant."""
    return torch.logdet(torch.atleast_2d(torch.cov(x.mT))).item() / 2


class Parents(NamedTuple):
    """The coordinates that one depends on: those that bend or scale it, and all that move it."""

    drivers: list[int]
    lines: list[int]


def _graphs(t: Tensor) -> Iterator[list[Parents]]:
    """Yield the parents of each coordinate of points t (n, d), by two ways to tell what drives it.

    One looks at the coordinate itself, the other at its residual given all others: the scale of a group is seen in
    the residuals of its members from their centre. Partial correlations are of what no tail has a say in.
    """
    z = (t - t.mean(0)) / t.std(0)
    inner = t.clamp(-3, 3)
    P = torch.linalg.inv(torch.cov(inner.mT) + 1e-9 * torch.eye(t.shape[1]).to(t))
    partial = (P / (P.diagonal()[:, None] * P.diagonal()).sqrt()).abs().fill_diagonal_(0)
    Q = torch.linalg.inv(torch.cov(z.mT) + 1e-9 * torch.eye(t.shape[1]).to(t))
    for r in (z, z @ Q / Q.diagonal().sqrt()):
        yield _parents(t, _pair_gains(z, r), partial)


def _parents(t: Tensor, gain: Tensor, partial: Tensor) -> list[Parents]:
    """Return the parents by the gains [j, i] of pairs and the partial correlations.

    A pair has a direction: that in which the likelihood gains more. Coordinates that drive more than they are driven
    come first, then those with many neighbours in the graph of partial correlations: what is left when they are given
    is simple. None depends on one that comes later.
    """
    net = (gain - gain.mT).clamp_min(0)
    neighbour = 0.1  # partial correlation
    lead, degree = net.sum(1) - net.sum(0), (partial > neighbour).sum(1)
    order = sorted(range(len(lead)), key=lambda i: (-max(0.0, lead[i].item()), -degree[i].item(), i))
    place = {i: k for k, i in enumerate(order)}
    parents = list[Parents]()
    for i in range(len(order)):
        drive = [j for j in gain[:, i].argsort(descending=True).tolist() if net[j, i] > 0 and place[j] < place[i]]
        near = [j for j in partial[i].argsort(descending=True).tolist() if partial[i, j] > neighbour]
        lines = [j for j in near if place[j] < place[i]][:5]
        drivers = _chosen(t, i, lines, drive)
        parents.append(Parents(drivers, [*drivers, *(j for j in lines if j not in drivers)] if drivers else []))
    return parents


def _pair_gains(z: Tensor, r: Tensor) -> Tensor:
    """Return the gains [j, i], in nats a point, of the model of r_i given z_j over the Gaussian one.

    Here z (n, d) are points, and r (n, d) these or residuals of them, all of unit variances.
    """
    n, d = z.shape
    squares, C = z.square() - 1, z.mT @ r / n  # [j, i], as all that follows
    skew = (z * squares).mean(0)[:, None]
    variance = (1 - C.square()).clamp_min(1e-6)
    bent = squares.mT @ r / n  # E r_i (z_j^2 - 1)
    location = (bent - C * skew).abs() / (variance * squares.square().mean(0)[:, None]).sqrt()
    scale = (z.mT @ (r.square() - 1) / n - 2 * C * bent + C.square() * skew).abs() / variance / math.sqrt(2)
    signal = torch.maximum(location, scale)
    signal = torch.maximum(signal, signal.mT)
    seen = signal > 4.0 / math.sqrt(n)  # standard errors of a correlation
    pairs = seen.fill_diagonal_(False).nonzero()
    most = max(900, 10 * d)  # of which a scale that all others depend on has two for each feature
    if len(pairs) > most:
        pairs = pairs[signal[seen].topk(most).indices]
    gain = z.new_zeros(d, d)
    for part in pairs.split(256):
        j, i = part.unbind(1)
        gain[j, i] = _pair_gain(z[:, j].mT[..., None], r[:, i].mT)
    return gain.where(gain > LEAST_OF_PAIR, 0)


def _pair_gain(x: Tensor, y: Tensor) -> Tensor:
    """Return the gains (p,) of the model of y (p, n) given x (p, n, j)."""
    line = with_one(x)
    linear = (y[..., None] - line @ torch.linalg.lstsq(line, y[..., None]).solution)[..., 0]
    *_, loss = _regression(line, *_bent(x, x), y)
    return linear.square().mean(-1).log() / 2 + 0.5 - loss


def _bent(x: Tensor, driving: Tensor) -> tuple[Tensor, Tensor]:
    """Return the features of m, which are x (..., j) and the nonlinear ones of `driving`, and the features of g."""
    F, G = features(driving)
    return torch.cat([x, F[..., driving.shape[-1] :]], -1), G


def _regression(line: Tensor, F: Tensor, G: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Fit :math:`y \sim N(l + e^g m, e^{2 g})` (p, n) with l, m and g linear in their features (p, n, any).

    Steps are least squares for l and m, in units of the scale, and Fisher scoring for g, whose lines are fitted
    before its bends. Return the coefficients of l and m, the coefficients of g and the losses (p,), :math:`E[r^2 / 2
    + g]` with the residuals r in units of the scale.
    """
    y, n_bends = y[..., None], G.shape[-1] // 2
    ridge_l, ridge_m, ridge_g = (_ridge(A, bends) for A, bends in ((line, 0), (F, n_bends), (G, n_bends)))
    ridge, information = torch.block_diag(ridge_l, ridge_m), 2 * G.mT @ G + ridge_g

    def residuals(w: Tensor) -> tuple[Tensor, Tensor]:
        A = torch.cat([w * line, F], -1)
        a = torch.linalg.solve(A.mT @ A + ridge, A.mT @ (w * y))
        return a, w * y - A @ a

    b = G.new_zeros(*G.shape[:-2], G.shape[-1], 1)
    b[..., -1, :] = residuals(torch.ones_like(y))[1].square().mean(-2).clamp_min(1e-12).log() / 2
    best = b.new_zeros(*b.shape[:-2], len(ridge), 1), b, b.new_full(b.shape[:-2], math.inf)
    for _ in range(12):
        g = (G @ b).clamp(-MAX_LOG_SCALE, MAX_LOG_SCALE)
        a, r = residuals((-g).exp())
        loss = (r.square() / 2 + g).mean((-2, -1))
        better = (loss < best[2])[..., None, None]
        best = a.where(better, best[0]), b.where(better, best[1]), loss.where(better[..., 0, 0], best[2])
        gradient = G.mT @ (r.square().clamp_max(20.0) - 1) - ridge_g @ b
        b = b + torch.linalg.solve(information, gradient)
    return best[0][..., 0], best[1][..., 0], best[2]


def _ridge(A: Tensor, n_bends: int) -> Tensor:
    """Return the ridge of features A (..., n, k), the last the intercept: one is bent only if it has to be."""
    of_bends, of_others = 0.1, 1e-5
    n, k = A.shape[-2:]
    ridge = A.new_full((k,), n * of_others)
    ridge[max(0, k - 1 - n_bends) : -1] = n * of_bends
    return ridge.diag()


def _chosen(t: Tensor, i: int, lines: Sequence[int], others: Sequence[int]) -> list[int]:
    """Return those of some coordinates that drive coordinate i, which lines move, one added after the other while
    they gain.
    """
    chosen: list[int] = []
    loss = math.inf
    for j in others:
        tries = [*chosen, j]
        x = t[None][..., [*tries, *(k for k in lines if k not in tries)]]
        *_, tried = _regression(with_one(x), *_bent(x, t[None][..., tries]), t[None, :, i])
        if tried.item() < loss - SIMPLER / math.sqrt(len(t)):
            chosen, loss = [*chosen, j], tried.item()
        if len(chosen) == 3:
            break
    return chosen


class Model(NamedTuple):
    """The coefficients of l, m and g of a coordinate, and their loss."""

    line: Tensor
    location: Tensor
    scale: Tensor
    loss: float


def _model(t: Tensor, i: int, parents: Parents, unit: Tensor, centre: Tensor) -> Model:
    """Return the simplest model of coordinate i of points t (n, d) that is about as likely as the most general one.

    A line that is off by little is off by many scales in a neck. So it is zero in the units of the target, or one of
    the other coordinates, as in the centred form of a hierarchy, if that suffices, with m constant.
    """
    drivers, lines = parents
    free, y = with_one(t[:, lines]), t[:, i]
    F, G = _bent(free[:, :-1], t[:, drivers])
    steps = torch.eye(len(lines) + 1).to(t)
    known = [0 * steps[-1], *(unit[j] * step + centre[j] * steps[-1] for j, step in zip(lines, steps, strict=False))]

    def models() -> Iterator[Model]:
        for own in (F[:, -1:], F):
            for line in ((line - centre[i] * steps[-1]) / unit[i] for line in known):
                yield _fit(free[:, :0], own, G, y - free @ line)._replace(line=line)
        yield _fit(free[:, -1:], F[:, -1:], G, y)

    general = _fit(free, F, G, y)
    most = general.loss + SIMPLER / math.sqrt(len(t))
    found = next((model for model in models() if model.loss <= most), general)
    return found._replace(line=_filled_up(found.line, free), location=_filled_up(found.location, F))


def _filled_up(a: Tensor, features: Tensor) -> Tensor:
    """Return coefficients of the last of some features as those of all (n, k)."""
    return torch.cat([a.new_zeros(features.shape[1] - len(a)), a])


def _fit(line: Tensor, F: Tensor, G: Tensor, y: Tensor) -> Model:
    """Return the model of y (n,) of these features (n, any)."""
    a, b, loss = _regression(line[None], F[None], G[None], y[None])
    return Model(a[0, : line.shape[1]], a[0, line.shape[1] :], b[0], loss.item())


def reshaped(warp: Warp, x: Tensor) -> Warp:
    """Return a warp whose first level has the shapes of points x (n, d) that have converged.

    Chains move more easily without shapes that are slight; the fit has the tails of a driver, and what it scales.
    """
    first, *others = warp.levels
    t, shape, drivers = (x - warp.centre) / warp.unit, first.shape.clone(), warp.drivers
    for column, i in enumerate(first.members.tolist()):
        if i in drivers:
            shape[:, column] = _shape(t[:, i], 0.005)  # nats, from which on it is skewed
    return replace(warp, levels=[replace(first, shape=shape), *others])


def _shape(t: Tensor, least: float = LEAST_OF_PAIR) -> Tensor:
    """Return the skewness and the weight of the tails (2,) of points t (n,), a Gaussian's if they suffice."""
    grid = torch.cartesian_prod(torch.linspace(-1, 1, 21), torch.linspace(0.4, 1.3, 10)).to(t)
    skewness, tails = grid.mT[..., None]
    v, log_slope = unskewed(t, skewness, tails)
    loss = v.var(1).log() / 2 - log_slope.mean(1)
    best = loss.argmin()
    if loss[best] > t.var().log() / 2 - least:
        return t.new_tensor([0.0, 1.0])
    return grid[best]


def _levels(t: Tensor, parents: Sequence[Parents], unit: Tensor, centre: Tensor) -> list[Level]:
    """Return the levels, fitted to points t (n, d)."""
    depth = [0] * len(parents)
    for _ in parents:
        depth = [max((depth[j] + 1 for j in own.lines), default=0) for own in parents]
    driving, levels = {j for own in parents for j in own.drivers}, list[Level]()
    for k in range(max(depth) + 1):
        members = [i for i, own in enumerate(depth) if own == k]
        below = sorted({j for i in members for j in parents[i].lines})
        n_below = len(below)
        line, location, scale = (t.new_zeros(i * n_below + 1, len(members)) for i in (1, 3, 2))
        shape = t.new_tensor([0.0, 1.0])[:, None].repeat(1, len(members))
        for column, i in enumerate(members):
            if k:
                model = _model(t, i, parents[i], unit, centre)
                own, lines = (torch.tensor([below.index(j) for j in js]) for js in parents[i])
                last = torch.tensor([n_below])
                line[torch.cat([lines, last]), column] = model.line
                location[torch.cat([lines, n_below + own, 2 * n_below + own, 3 * last]), column] = model.location
                scale[torch.cat([own, n_below + own, 2 * last]), column] = model.scale
            elif i in driving:
                shape[:, column] = _shape(t[:, i])
        indices = [torch.tensor(a, dtype=torch.int64, device=t.device) for a in (members, below)]
        levels.append(Level(indices[0], indices[1], line, location, scale, shape))
    return levels
