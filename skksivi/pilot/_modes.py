r"""The modes of a target and their weights, from scores alone, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from skksivi.pilot._affine import Affine, LowRank, standard_normal
from skksivi.score._score import DifferentiableScore, ScoreFunction


class ModeSettings(NamedTuple):
    """The settings of mode searches, and of the line integrals by which modes are weighed."""

    #: A search has converged where the Newton decrement s^T p per feature is below this number.
    tolerance: float = 1e-4
    #: The most steps of a search from one of many starts, and of one in many dimensions.
    max_steps: int = 60
    #: The most numbers in the starts around one point, and in the points at which the score is asked at a time: what
    #: a score computes on its way is to stay in memory that is used again.
    max_in_starts: int = 1600
    max_in_block: int = 2**16
    #: Random signs by which a diagonal is estimated.
    n_probes: int = 128
    #: The squared distance, in standard deviations, within which two modes count as one, in fewer dimensions these.
    reach: float = 9.0
    #: Share of the target below which a mode is left out.
    min_weight: float = 1e-3
    #: Where a panel is split, how often at most, and the most panels that a line may have open at once.
    split: float = 0.4
    max_splits: int = 40
    max_panels: int = 200


MODES = ModeSettings()

#: Draws by which Gaussians are compared by their scores.
N_COMPARED = 256

#: Points around the origin, and around the best mode, from which modes are searched.
MAX_STARTS = 96

#: Beyond this a number is taken for infinite.
FAR = 1e75


class LostError(ValueError):
    """The search for a target has left the finite numbers."""

    def __init__(self) -> None:
        super().__init__(
            "The search for the target reached values that are not finite: `score_fn` may have the wrong sign (it "
            "is the "
            "gradient of log p, not of -log p) or belong to no proper density. Else set `init` to a point near a "
            "mode or, where there is such a parameter, `whiten` to a pair (mean, Cholesky factor) or to None."
        )


def jacobians(score_fn: DifferentiableScore, x: Tensor) -> Tensor:
    """Return the Jacobians (k, d, d) of the score at points x (k, d), one vector-Jacobian product of k d rows."""
    k, d = x.shape
    directions = torch.eye(d, dtype=x.dtype, device=x.device).repeat(k, 1)
    blocks = (_blocks(a) for a in (x.repeat_interleave(d, 0), directions))
    J = torch.cat([score_fn.product(*pair) for pair in zip(*blocks, strict=True)]).view(k, d, d)
    return (J + J.mT) / 2


def _blocks(x: Tensor) -> tuple[Tensor, ...]:
    """Cut rows (n, d)."""
    return x.split(max(1, MODES.max_in_block // x.shape[1]))


def saddle_free_newton(score_fn: DifferentiableScore, x: Tensor, max_iter: int = 200) -> tuple[Affine, bool]:
    """Search for a mode from x (d,); return it with a root of the inverse curvature, and whether it converged.

    Raises
    ------
    ValueError
        The search left the region where the score is finite.
    """
    maps, converged = search_modes(score_fn, x[None], max_iter)
    if not maps or maps[0].m.abs().max() > FAR:
        raise LostError
    return maps[0], bool(converged[0])


def search_modes(score_fn: DifferentiableScore, x: Tensor, max_iter: int = 200) -> tuple[list[Affine], Tensor]:
    r"""Search for modes from several points at once, from scores alone.

    With :math:`-\nabla s = V \mathrm{diag}(\lambda) V^\top`, a step is :math:`p = V |\lambda|^{-1} V^\top s`
    (Dauphin et al. 2014), scaled by a line search on the slope :math:`s(x + t p)^\top p`.

    Parameters
    ----------
    score_fn : callable
        The score, for float64 points.
    x : Tensor of shape (k, d), float64
        Where to start.
    max_iter : int, default=200

    Returns
    -------
    maps : list of Affine
        For each search that stayed where the score is finite, the mode m, or where it ended, and L with
        :math:`L L^\top = V |\lambda|^{-1} V^\top` there.
    converged : Tensor of shape (k',), bool
        Which of them have converged.

    References
    ----------
    Dauphin, Y. et al. (2014). Identifying and attacking the saddle point problem in high-dimensional non-convex
    optimization. https://arxiv.org/abs/1406.2572
    """
    d = x.shape[1]
    x = x.clone()
    searching = torch.arange(len(x), device=x.device)
    converged = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for _ in range(max_iter):
        here = x[searching]
        s = score_fn(here).detach()
        lam, V = _curvatures(score_fn, here)
        p = ((s[:, None] @ V) / lam.abs()[:, None] @ V.mT)[:, 0]
        decrement = (s * p).sum(1)
        level = decrement < MODES.tolerance * d
        convex = lam[:, 0] < 0
        step = _steps(score_fn, here, p, decrement)
        out = V[:, :, 0] * lam[:, :1].abs().rsqrt()  # from a saddle, along its steepest direction
        x[searching] = here + torch.where(level[:, None], out * convex[:, None], step[:, None] * p)
        converged[searching] = level & ~convex
        goes_on = torch.where(level, convex, step != 0) & x[searching].isfinite().all(1)
        searching = searching[goes_on]
        if not len(searching):
            break
    lam, V = _curvatures(score_fn, x)
    finite = x.isfinite().all(1) & lam.isfinite().all(1)
    R = torch.linalg.qr((V[finite] * lam[finite].abs().rsqrt()[:, None]).mT).R
    L = (R * R.diagonal(dim1=1, dim2=2).sign()[:, :, None]).mT
    return [Affine(*pair) for pair in zip(x[finite], L, strict=True)], converged[finite]


def _curvatures(score_fn: DifferentiableScore, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues (k, d), smallest first, and eigenvectors of minus the Jacobians; tiny ones are floored.

    They are NaN where the score is not finite.
    """
    J = jacobians(score_fn, x)
    finite = x.isfinite().all(1) & J.isfinite().all((1, 2))
    J = J.where(finite[:, None, None], 0.0)
    try:
        lam, V = torch.linalg.eigh(-J)
    except torch.linalg.LinAlgError:  # squares of its largest numbers are infinite
        size = J.abs().amax((1, 2)).clamp_min(torch.finfo(J.dtype).tiny)
        lam, V = torch.linalg.eigh(-J / size[:, None, None])
        lam = lam * size[:, None]
    top = lam.abs().amax(1, keepdim=True)
    floor = torch.where(top > 0, 1e-14 * top, 1.0)  # no curvature at all says nothing of the scale
    return torch.where(lam.abs() < floor, floor, lam).where(finite[:, None], torch.nan), V


def _steps(score_fn: ScoreFunction, x: Tensor, p: Tensor, decrement: Tensor) -> Tensor:
    """Return steps t (k,): one where the slope there is small, else the last before the slope changes sign."""

    def slopes(t: Tensor, rows: Tensor) -> Tensor:  # t (k', n)
        points = x[rows, None] + t[:, :, None] * p[rows, None]
        s = torch.cat([score_fn(block).detach() for block in _blocks(points.flatten(0, 1))])
        return (s.view(points.shape) * p[rows, None]).sum(-1)

    everyone = torch.arange(len(x), device=x.device)
    middle, end = slopes(x.new_tensor([0.5, 1.0]).expand(len(x), 2), everyone).unbind(1)
    step = x.new_ones(len(x))
    rows = everyone[~((middle > 0) & (end.abs() < decrement / 2))]
    t = torch.cat([x.new_zeros(1), 2.0 ** torch.arange(-40, 11, dtype=x.dtype, device=x.device)])
    t = t.expand(len(rows), -1)
    for _ in range(3):
        if not len(rows):
            break
        last = (slopes(t[:, 1:], rows) > 0).long().cumprod(1).sum(1)  # not > 0 where the score is not finite
        step[rows] = t.gather(1, last[:, None])[:, 0]
        turns = last < t.shape[1] - 1
        rows, t, last = rows[turns], t[turns], last[turns]
        low, high = t.gather(1, last[:, None]), t.gather(1, last[:, None] + 1)
        t = low + (high - low) * torch.linspace(0, 1, 9, dtype=x.dtype, device=x.device)
    return step


# Many dimensions


def newton_cg(score_fn: DifferentiableScore, x: Tensor, generator: torch.Generator, max_iter: int = 100) -> LowRank:
    r"""Search for a mode of many dimensions by products with the Jacobian; return it with the curvature there.

    The Newton step comes from conjugate gradients that stop at negative curvature (Steihaug 1983). The map scales
    each coordinate by the diagonal of :math:`-\nabla s`, estimated by random signs (Hutchinson 1989), then the
    directions that Lanczos's iteration finds to stand out.

    Parameters
    ----------
    score_fn : callable
        The score, for float64 points.
    x : Tensor of shape (d,), float64
        Where to start.
    generator : torch.Generator
        Draws the signs.
    max_iter : int, default=100

    Raises
    ------
    ValueError
        The search has not converged.
    """
    for _ in range(max_iter):
        s = score_fn(x[None])[0].detach()
        D = _diagonal_scale(score_fn, x, generator)
        p = D * _conjugate_gradients(_scaled_curvature(score_fn, x, D), D * s)
        decrement = s @ p
        if not (decrement.isfinite() and x.abs().max() < FAR):
            break
        step = _steps(score_fn, x[None], p[None], decrement[None])[0] if decrement > MODES.tolerance * len(x) else 0
        if step != 0:
            x = x + step * p
            continue
        start = torch.randn(len(x), generator=generator, dtype=x.dtype, device=x.device)
        lam, V = _lanczos(_scaled_curvature(score_fn, x, D), start)
        if len(lam) and lam[0] < -1e-6 * lam.abs().max():  # a saddle: leave along its steepest direction
            x = x + D * V[:, 0] * lam[0].abs().rsqrt()
            continue
        stands_out = lam.log().abs() > 0.5
        return LowRank(x, D, V[:, stands_out].contiguous(), lam[stands_out].rsqrt())
    raise LostError


def dense_mode(score_fn: DifferentiableScore, x: Tensor, generator: torch.Generator) -> Affine:
    """Search for a mode from x (d,) of many dimensions; return it with a root of the inverse curvature there.

    This takes a product with the Jacobian in each dimension, once.

    Raises
    ------
    ValueError
        The search has not converged.
    """
    m = newton_cg(score_fn, x, generator, MODES.max_steps).m
    rows = max(1, MODES.max_in_block // len(m))
    H = torch.cat([_curvature_times(score_fn, m, part) for part in torch.eye(len(m)).to(m).split(rows)])
    precision_root = torch.linalg.cholesky((H + H.mT) / 2)
    return Affine(m, torch.linalg.cholesky(torch.cholesky_inverse(precision_root)))


def _curvature_times(score_fn: DifferentiableScore, x: Tensor, v: Tensor) -> Tensor:
    """Return minus the Jacobian at x (d,) times each row of v (k, d), or times v (d,)."""
    rows = v.reshape(-1, len(x))
    return -score_fn.product(x.expand(rows.shape).clone(), rows).view(v.shape)


def _scaled_curvature(score_fn: DifferentiableScore, x: Tensor, D: Tensor) -> ScoreFunction:
    """Return the map v -> -D J D v."""
    return lambda v: D * _curvature_times(score_fn, x, D * v)


def _diagonal_scale(score_fn: DifferentiableScore, x: Tensor, generator: torch.Generator) -> Tensor:
    """Return about |diag(-J)|^(-1/2), shape (d,).

    The diagonal of a matrix is estimated to within the sizes of its rows; so it is refined in its own units.
    """
    D = torch.ones_like(x)
    for _ in range(3):
        signs = torch.randint(2, (MODES.n_probes, len(x)), generator=generator, device=x.device).to(x) * 2 - 1
        product = D * _curvature_times(score_fn, x, D * signs)
        diagonal, row = (signs * product).mean(0).abs(), product.square().mean(0).sqrt()
        D = D * torch.maximum(diagonal, 0.1 * row).clamp_min(torch.finfo(x.dtype).tiny ** 0.5).rsqrt()
    return D


def _conjugate_gradients(times: ScoreFunction, b: Tensor, max_iter: int = 50, tol: float = 0.1) -> Tensor:
    """Return about the solution of A p = b, or where negative curvature was met, the step so far."""
    p, r = torch.zeros_like(b), b
    direction, rr = r, r @ r
    for _ in range(max_iter):
        product = times(direction)
        curvature = direction @ product
        if not curvature > 0:
            return p if p.any() else direction
        step = rr / curvature
        p, r = p + step * direction, r - step * product
        rr, before = r @ r, rr
        if rr < tol**2 * (b @ b):
            break
        direction = r + rr / before * direction
    return p


def _lanczos(times: ScoreFunction, start: Tensor, n_iter: int = 300) -> tuple[Tensor, Tensor]:
    """Return Ritz values (k,) and vectors (d, k) that have converged, of a symmetric operator."""
    basis, alphas, betas = [start / start.norm()], [], []
    for _ in range(min(n_iter, len(start))):
        w = times(basis[-1])
        if not w.isfinite().all():
            raise LostError
        alphas.append(w @ basis[-1])
        for _ in range(2):  # orthogonal to all before, to rounding
            Q = torch.stack(basis, 1)
            w = w - Q @ (Q.mT @ w)
        betas.append(w.norm())
        if betas[-1] < 1e-10:
            break
        basis.append(w / betas[-1])
    n = len(alphas)
    off = torch.stack(betas[: n - 1]) if n > 1 else start.new_empty(0)
    lam, W = torch.linalg.eigh(torch.diag(torch.stack(alphas)) + torch.diag(off, 1) + torch.diag(off, -1))
    converged = (betas[n - 1] * W[-1]).square() < 0.01 * lam.abs()  # a value is off by the square of its residual
    return lam[converged], torch.stack(basis[:n], 1) @ W[:, converged]


class ModeMaps(NamedTuple):
    """The modes of a target.

    Attributes
    ----------
    maps : list of Affine
        Maps x = m + L u to them, best first.
    weights : Tensor of shape (k,)
        Their shares of the target.
    symmetries : tuple of Tensor of shape (d,)
        Permutations of the coordinates that leave the target as it is.
    ascents : (int, int) or None
        How many ascents of the last round ended at a mode, and at one not known before; None without ascents.
    """

    maps: list[Affine]
    weights: Tensor
    symmetries: tuple[Tensor, ...] = ()
    ascents: tuple[int, int] | None = None


# Modes


def scattered(x: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Return n points around x at distances of several orders, for a target whose units are not known.

    Every other point has one scale for all coordinates, the rest one for each.
    """
    scales = torch.tensor([1.0, 3.0, 10.0, 30.0, 100.0]).to(x)
    of_each = scales[torch.randint(5, (n, len(x)), generator=generator, device=x.device)]
    of_all = scales.repeat(-(-n // 5))[:n, None].expand_as(of_each)
    alike = torch.arange(n, device=x.device)[:, None] % 2 == 0
    return x + torch.where(alike, of_all, of_each) * standard_normal(n, x, generator)


def around(mode: Affine, n: int, generator: torch.Generator) -> Tensor:
    """Return n points three or ten standard deviations from a mode."""
    scales = torch.tensor([3.0, 10.0]).repeat(-(-n // 2))[:n, None].to(mode.m)
    return mode.unwhiten(scales * standard_normal(n, mode.m, generator))


def find_modes(
    score_fn: DifferentiableScore,
    starts: Tensor,
    generator: torch.Generator,
    known: Sequence[Affine] = (),
    *,
    n_steps: int | None = None,
) -> ModeMaps:
    r"""Search for a mode from each start, and weigh those found by Laplace's approximation.

    A mode's share is proportional to :math:`p(m) \det L`, the heights compared by integrals of the score. Two
    modes within a few standard deviations of each other count as one. Where an integral cannot be trusted, the
    mode that resembles its Gaussian less is given up: it is a spike, or a flat region far out. Where no search has
    converged, their ends stand for modes, but not if they were to take so many steps alone.

    Raises
    ------
    ValueError
        All searches left the region where the score is finite, or none has converged in `n_steps`.
    """
    found, converged = search_modes(score_fn, starts, n_steps or MODES.max_steps)
    maps = [*known, *(a for a, at_a_mode in zip(found, converged.tolist(), strict=True) if at_a_mode)]
    if not maps and n_steps is not None:
        raise ValueError(f"none of {len(starts)} searches for a mode has converged in {n_steps} steps")
    maps = maps or [a for a in found if a.m.abs().max() < FAR]
    if not maps:
        raise LostError
    distinct: list[Affine] = []
    for a in maps:
        if not any(same_mode(a, b) for b in distinct):
            distinct.append(a)
    return ranked(score_fn, distinct, generator)


def ranked(score_fn: DifferentiableScore, distinct: list[Affine], generator: torch.Generator) -> ModeMaps:
    """Return modes with their weights, best first, and without those that hardly have any."""
    if len(distinct) > 1:
        distinct = sorted(distinct, key=lambda a: score_divergence(score_fn, a, generator))
    best, *others = distinct
    evidence = [best.log_determinant()]
    kept = [best]
    for a in others:
        height = log_ratio(score_fn, best.m, a.m)
        if height.isfinite():
            kept.append(a)
            evidence.append(height + a.log_determinant())
    weights = torch.stack(evidence).softmax(0)
    order = [k for k in weights.argsort(descending=True).tolist() if weights[k] >= MODES.min_weight]
    return ModeMaps([kept[k] for k in order], weights[order] / weights[order].sum())


def search_around(
    score_fn: DifferentiableScore, starts: Tensor, generator: torch.Generator, *, alone: bool
) -> ModeMaps:
    """Search for modes from the starts and, unless they are to be alone, from points around them and the best one."""
    if alone:
        return find_modes(score_fn, starts, generator)
    n = min(MAX_STARTS, MODES.max_in_starts // starts.shape[1])
    found = find_modes(score_fn, torch.cat([starts, scattered(starts[0], n, generator)]), generator)
    return find_modes(score_fn, around(found.maps[0], n, generator), generator, found.maps)


def same_mode(a: Affine, b: Affine) -> bool:
    """Tell whether one mode is within the reach of the other."""
    reach = min(len(a.m), MODES.reach)
    return bool(a.whiten(b.m[None]).square().sum() < reach or b.whiten(a.m[None]).square().sum() < reach)


def score_divergence(
    score_fn: ScoreFunction, q: Affine, generator: torch.Generator, n_draws: int = N_COMPARED
) -> float:
    """Return the median over draws x of q = N(m, L L^T) of |L^T (s_p(x) - s_q(x))|^2 / d."""
    u = standard_normal(n_draws, q.m, generator)
    gap = q.whiten_score(score_fn(q.unwhiten(u)).detach()) + u
    return gap.square().mean(1).nan_to_num(math.inf, math.inf).median().item()


def _lobatto(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the nodes and weights (n,) of the rule on [-1, 1] whose nodes include the ends."""
    P = np.polynomial.legendre.Legendre.basis(n - 1)
    nodes = np.concatenate([[-1.0], P.deriv().roots(), [1.0]])
    return nodes, 2 / (n * (n - 1) * P(nodes) ** 2)


def log_ratio(score_fn: ScoreFunction, a: Tensor, b: Tensor) -> Tensor:
    r"""Integrate the score along lines: :math:`\log p(b) - \log p(a) = \int_0^1 s(a + t (b - a))^\top (b - a)\,dt`.

    A panel by Lobatto's rule is split until its value agrees with that of its parts. They are of unequal widths: the
    kink half-way between two equal peaks would hide from halves. The ends are nodes: a kink beyond the last node
    would hide from a panel and from its part there.

    Parameters
    ----------
    score_fn : callable
    a : Tensor of shape (d,)
    b : Tensor of shape (..., d)

    Returns
    -------
    ratio : Tensor of shape (...)
        NaN where the score is not finite on the way, the panels do not converge, or a deep valley leaves nothing but
        rounding errors.
    """
    gaps = (b - a).reshape(-1, b.shape[-1])
    nodes, weights = (torch.as_tensor(v).to(a) for v in _lobatto(8))

    def integrals(row: Tensor, low: Tensor, width: Tensor) -> Tensor:
        t = low[:, None] + width[:, None] * (1 + nodes) / 2
        points = a + t[:, :, None] * gaps[row, None]
        slopes = (score_fn(points.flatten(0, 1)).detach().view(points.shape) * gaps[row, None]).sum(-1)
        return slopes @ weights * width / 2

    split = MODES.split
    total, size = a.new_zeros(2, len(gaps)).unbind()
    row = torch.arange(len(gaps), device=a.device).repeat(2)
    low = a.new_tensor([0.0, split]).repeat_interleave(len(gaps))
    width = a.new_tensor([split, 1 - split]).repeat_interleave(len(gaps))
    value = integrals(row, low, width)
    for _ in range(MODES.max_splits):
        row, low = row.repeat(2), torch.cat([low, low + split * width])
        width = torch.cat([split * width, (1 - split) * width])
        parts = integrals(row, low, width)
        first, second = parts.chunk(2)
        open_ = ~((value - first - second).abs() < 1e-4 + 1e-8 * (first.abs() + second.abs()))
        closed = row[: len(value)][~open_]
        total.index_add_(0, closed, (first + second)[~open_])
        size.index_add_(0, closed, (first.abs() + second.abs())[~open_])
        row, low, width, value = (v[open_.repeat(2)] for v in (row, low, width, parts))
        if not len(row) or len(row) > MODES.max_panels * len(gaps):
            break
    total[row] = torch.nan
    total[(size > 1e8) & (total.abs() < size / 2)] = torch.nan  # what is left of a valley that deep is rounding
    return total.view(b.shape[:-1])
