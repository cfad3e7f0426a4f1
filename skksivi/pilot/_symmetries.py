r"""Maps that leave a target as it is: coordinates exchanged, or of the other sign, and labels of parameters.

All are checked alike, at points around a mode: by the score, :math:`s(g(x)) = A s(x)` for a map with an orthogonal
matrix A, or by log p of the parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from skksivi.coordinates._affine import Affine, standard_normal
from skksivi.pilot._newton import jacobians
from skksivi.score._score import Score

#: The squared distance, in standard deviations, within which two modes count as one; in fewer dimensions these.
REACH = 9.0

#: The most modes.
MAX_MODES = 120

#: Points at which a symmetry or a period is tried.
N_TRIED = 4

#: The most features of which the Jacobian at a point is asked for.
MOST_COUPLED = 1000


def around(mode: Affine, n: int, generator: torch.Generator) -> Tensor:
    """Return n points three or ten standard deviations from a mode."""
    scales = torch.tensor([3.0, 10.0]).repeat(-(-n // 2))[:n, None].to(mode.m)
    return mode.unwhiten(scales * standard_normal(n, mode.m, generator))


def same_mode(a: Affine, b: Affine) -> bool:
    """Tell whether one mode is within the range of the other."""
    reach = min(len(a.m), REACH)
    return bool(a.whiten(b.m[None]).square().sum() < reach or b.whiten(a.m[None]).square().sum() < reach)


class Symmetry(Protocol):
    """A map that leaves a target as it is."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """Return the images of points (n, d)."""

    def tangent(self, x: Tensor, V: Tensor, /) -> Tensor:
        """Return the images of directions, the columns of V (d, k), at a point (d,)."""


class Exchange(NamedTuple):
    """Coordinates in another order (d,), some with the other sign: x -> signs x[order]."""

    order: Tensor
    signs: Tensor

    @classmethod
    def of_order(cls, order: Tensor) -> Exchange:
        return cls(order, torch.ones(len(order), dtype=torch.float64, device=order.device))

    @classmethod
    def of_signs(cls, flips: Tensor) -> Exchange:
        return cls(torch.arange(len(flips), device=flips.device), 1 - 2 * flips.double())

    def __call__(self, x: Tensor) -> Tensor:
        return x[:, self.order] * self.signs

    def tangent(self, _x: Tensor, V: Tensor) -> Tensor:
        return V[self.order] * self.signs[:, None]

    def coded(self) -> Tensor:
        """Return the order, ~j for minus coordinate j."""
        return self.order.where(self.signs > 0, ~self.order)


class Relabelling(NamedTuple):
    """Labels of parameters in another order, in coordinates in which this is not linear."""

    map: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.map(x)

    def tangent(self, x: Tensor, V: Tensor) -> Tensor:
        J = torch.autograd.functional.jacobian(lambda x: self.map(x[None])[0], x)
        return torch.as_tensor(J) @ V


def image(mode: Affine, symmetry: Symmetry) -> Affine:
    """Return the mode to which a symmetry takes another."""
    L = symmetry.tangent(mode.m, mode.L)
    return Affine(symmetry(mode.m[None])[0], torch.linalg.cholesky(L @ L.mT))


def told(symmetry: Symmetry, label: Callable[[int], str]) -> str:
    """Say what a symmetry does, given the names of coordinates."""
    if not isinstance(symmetry, Exchange):
        return "another order of the labels of its parameters"
    order, signs = symmetry.order.tolist(), symmetry.signs.tolist()
    flips = [label(i) for i, sign in enumerate(signs) if sign < 0]
    moves = [label(i) for i, j in enumerate(order) if i != j]
    some = ", ".join((flips or moves)[:4]) + (", ..." if len(flips or moves) > 4 else "")
    return f"another {'sign' if flips else 'order'} of {some}"


def images(modes: Sequence[Affine], symmetries: Sequence[Symmetry]) -> list[Affine]:
    """Return all new images of modes under repeated symmetries."""
    found = list(modes)
    for mode in found:  # which grows
        for a in (image(mode, symmetry) for symmetry in symmetries):
            if len(found) < MAX_MODES and not any(same_mode(a, b) for b in found):
                found.append(a)
    return found[len(modes) :]


def symmetries_of(score_fn: Score, mode: Affine) -> tuple[Symmetry, ...]:
    """Return symmetries of a target that take a mode elsewhere, and from which others follow."""
    if len(mode.m) > MOST_COUPLED:
        return tuple(reflections(score_fn, mode))
    return (*exchanges(score_fn, mode), *reflections(score_fn, mode), *relabellings(score_fn, mode))


def _rounding(score_fn: Score) -> float:
    """Return the share of a score by which equal ones may differ."""
    return 1e-6 if score_fn.step < 1e-4 else 1e-4  # which is the step in double precision


def _moves(mode: Affine, symmetry: Symmetry) -> bool:
    return not same_mode(image(mode, symmetry), mode)


def _preserves(score_fn: Score, mode: Affine, symmetry: Exchange) -> bool:
    """Tell whether the score around a mode goes with a symmetry."""
    x = around(mode, N_TRIED, torch.Generator(mode.m.device).manual_seed(0))
    s, s_there = score_fn(torch.cat([x, symmetry(x)])).detach().chunk(2)
    off = (symmetry(s) - s_there).abs()
    return bool((off <= _rounding(score_fn) * s.abs().amax(1, keepdim=True)).all())


# Coordinates that may be exchanged


def exchanges(score_fn: Score, mode: Affine) -> Iterator[Exchange]:
    r"""Yield permutations of coordinates that leave a target invariant, :math:`s(x_\pi) = s(x)_\pi`.

    The labels of the components of a mixture are an example. At a point with equal coordinates, those that may be
    exchanged have equal scores; the Jacobian J of the score there shows which others must be exchanged with them,
    :math:`J_{\pi_i \pi_j} = J_{ij}`.
    """
    d = len(mode.m)
    centre = mode.m.median().expand(1, d).contiguous()
    s, tolerance = score_fn(centre).detach()[0], _tolerance(score_fn)
    order = s.argsort(stable=True)
    alike = _alike(s[order[:-1]], s[order[1:]], tolerance)
    pairs = torch.stack([order[:-1], order[1:]], 1)[alike].tolist()
    gaps = [(mode.m[i] - mode.m[j]).abs() / mode.L[i].norm() for i, j in pairs]
    if not s.isfinite().all() or not any(gap > 1e-3 for gap in gaps):  # else nothing moves
        return
    J, found = jacobians(score_fn, centre)[0], list[Tensor]()
    for order in (_exchanging(s, J, i, j, tolerance) for i, j in pairs):
        symmetry = Exchange.of_order(order)
        is_new = order.unique().numel() == d and not any(map(order.equal, found))
        if is_new and _moves(mode, symmetry) and _preserves(score_fn, mode, symmetry):
            found.append(order)
            yield symmetry


def _tolerance(score_fn: Score) -> float:
    """Return the share by which equal entries of a Jacobian may differ."""
    return 100 * _rounding(score_fn) if score_fn.by_differences else _rounding(score_fn)


def _alike(a: Tensor, b: Tensor, tolerance: float) -> Tensor:
    return (a - b).abs() <= tolerance * (a.abs() + b.abs())


def _exchanging(s: Tensor, J: Tensor, i: int, j: int, tolerance: float) -> Tensor:
    """Return the permutation (d,) that exchanges i and j, and the coordinates that correspond under it."""
    order = torch.arange(len(s), device=s.device)
    order[i], order[j] = j, i
    others = order == torch.arange(len(s), device=s.device)
    differ = (others & ~_alike(J[i], J[j], tolerance)).nonzero()[:, 0]
    twins = _alike(s[differ, None], s, tolerance) & others
    twins &= _alike(J[i][differ, None], J[j], tolerance) & _alike(J[j][differ, None], J[i], tolerance)
    one = twins.sum(1) == 1
    order[differ[one]] = twins[one].long().argmax(1)
    return order


# Coordinates whose signs may be changed


def reflections(score_fn: Score, mode: Affine) -> Iterator[Exchange]:
    r"""Yield changes of signs that leave a target invariant, :math:`s(R x) = R s(x)`.

    The loadings and scores of a factor are an example. Where such coordinates are zero so are their scores, and they
    go with all that the Jacobian couples them to.
    """
    m, sd, rounding = mode.m, mode.L.norm(dim=1), _rounding(score_fn)
    odd = torch.ones_like(m, dtype=torch.bool)
    while _moves(mode, Exchange.of_signs(odd)):
        x = m.where(~odd, 0.0)[None]
        s = score_fn(x).detach()[0] * sd
        still = odd & (s.abs() <= rounding * s.nan_to_num(0, 0, 0).abs().amax().clamp_min(1))
        if still.equal(odd):
            break
        odd = still
    else:
        return
    parts = [odd]
    if len(m) <= MOST_COUPLED:
        J = jacobians(score_fn, x)[0] * sd[:, None] * sd
        coupled = (J.abs() > 10 * _tolerance(score_fn) * J.diagonal().abs().amax().clamp_min(1)) & odd & odd[:, None]
        parts = _connected(coupled, odd)
    # products of three or more, as x_1 x_2 x_3, leave pairs
    tried = [*parts, *(a | b for a, b in itertools.combinations(parts, 2)), odd]
    done = torch.zeros_like(odd)
    for flips in tried[:64]:
        symmetry = Exchange.of_signs(flips)
        if (flips & ~done).any() and _moves(mode, symmetry) and _preserves(score_fn, mode, symmetry):
            done = done | flips if any(flips is part for part in parts) else done
            yield symmetry


def _connected(coupled: Tensor, members: Tensor) -> list[Tensor]:
    """Return the connected sets (d,) of members of a graph with this adjacency (d, d)."""
    parts, left = list[Tensor](), members.clone()
    while left.any():
        part = torch.zeros_like(left)
        part[left.nonzero()[0, 0]] = True
        while not (grown := part | coupled[part].any(0)).equal(part):
            part = grown
        parts.append(part)
        left &= ~part
    return parts


# Labels of parameters that are not free


def relabellings(score_fn: Score, mode: Affine) -> Iterator[Relabelling]:
    """Yield exchanges of labels of the parameters of a target that leave its density as it is."""
    labels, log_prob = score_fn.labels, score_fn.log_prob
    if labels is None or log_prob is None:
        return
    x = mode.unwhiten(standard_normal(2, mode.m, torch.Generator(mode.m.device).manual_seed(0)))

    def density(x: Tensor) -> Tensor:
        return log_prob(x).detach() - labels.log_jacobian(x).detach()

    before = density(x)
    rounding = (1e-9 if score_fn.step < 1e-4 else 1e-5) * (1 + before.abs())
    for ways in labels.exchanges():
        best = list[Relabelling]()
        for maps in ways:
            off = (density(torch.cat([g(x) for g in maps])).view(len(maps), -1) - before).abs()
            holds = (off <= rounding).all(1).tolist()
            best = max(best, list(itertools.compress(map(Relabelling, maps), holds)), key=len)
            if all(holds):
                break
        yield from (g for g in best if _moves(mode, g))
