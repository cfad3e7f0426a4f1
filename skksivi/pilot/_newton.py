"""Searches for one mode by Newton steps, from scores alone, in float64, and faults of a score that show at small
distances near a mode: noise, and jumps.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from skksivi.coordinates._affine import FAR, Affine, LowRank, standard_normal
from skksivi.coordinates._lines import lobatto, lobatto_nodes
from skksivi.score._domain import check_ends
from skksivi.score._products import falls
from skksivi.score._score import DifferentiableScore, Score, ScoreFunction
from skksivi.score._tally import DivergedError, ImproperError

#: A search has converged where the Newton decrement s^T p per feature is below this number.
TOLERANCE = 1e-4

#: The least curvature, as a share of the largest, that is told from zero.
FLOOR = 1e-14

#: The most steps of a search from one of many starts, and of one in many dimensions.
MAX_STEPS = 60

#: The longest step before a line search, which is up to a thousand times as long, as a multiple of 1 + |x|.
LONGEST = 2.0**13

#: A score at which a search for a mode ends.
STEEPEST = 1e50

#: The most numbers in the points at which the score is asked at a time: what a score computes on its way is to stay
#: in memory that is used again.
MAX_IN_BLOCK = 2**16


def saddle_free_newton(score_fn: DifferentiableScore, x: Tensor, max_iter: int = 200) -> tuple[Affine, bool]:
    """Search for a mode from x (d,); return it with a root of the inverse curvature, and whether it converged.

    Raises
    ------
    ValueError
        The search left the region where the score is finite.
    """
    maps, converged = search_modes(score_fn, x[None], max_iter)
    if not maps or maps[0].m.abs().max() > FAR:
        raise DivergedError(maps[0].m[None] if maps else None)
    return maps[0], bool(converged[0])


def check_mode(score_fn: Score, start: Tensor, mode: Affine) -> None:
    """Refuse a density that does not fall from a mode along the way from the start (d,) of its search, or where it is
    widest.

    Raises
    ------
    ValueError
    """
    u = standard_normal(8, mode.m, torch.Generator(mode.m.device).manual_seed(0))
    widest, way = u[0], mode.m - start
    for _ in range(30):
        widest = mode.L @ (mode.L.mT @ widest)
        widest = widest / widest.norm()
    widest = widest.where(widest.abs() > 0.01 * widest.abs().max(), 0.0)  # a coordinate alone may run off
    directions = torch.stack([widest * (way @ widest).sign().where(way @ widest != 0, 1), way])
    lengths = mode.whiten(mode.m + directions).norm(dim=1, keepdim=True)
    check_ends(score_fn, mode.unwhiten(u), (directions / lengths)[lengths[:, 0] > 0])


def over_kinks(score_fn: ScoreFunction, mode: Affine) -> Affine:
    """Return the map where a search has ended; where the score jumps, with the distances at which log p has fallen by
    about one for its scales, which are far below those by the curvature.
    """
    check_pole(score_fn, mode.m)
    at_one, of_curvature = falls(score_fn, mode.m), torch.cholesky_inverse(mode.L).diagonal().rsqrt()
    return Affine(mode.m, at_one.diag()) if (at_one < of_curvature / 10).any() else mode


def endless(limit: str) -> ImproperError:
    """Return the error that names the limit in which log p rises."""
    return ImproperError(
        f"log p rises without end as {limit}, so that the density has infinite mass there, as where data leave no "
        "noise or nothing keeps a scale from zero. Give that parameter a prior which falls faster, or check the data."
    )


def check_pole(score_fn: ScoreFunction, m: Tensor) -> None:
    """Refuse a density that rises as a power of the distance from m (d,) along one of the first coordinates.

    Raises
    ------
    ImproperError
    """
    axes = torch.eye(len(m)).to(m)[:64] * m.abs().clamp_min(1)
    gaps = torch.tensor([1e-1, 1e-3, 1e-5]).to(m)[:, None, None] * axes
    rates = -(score_fn((m + gaps).flatten(0, 1)).detach().view(gaps.shape) * gaps).sum(-1)
    if (is_pole := ((rates - rates[-1]).abs() < 0.02 * rates[-1]).all(0) & (rates[-1] >= 1)).any():
        j = int(is_pole.byte().argmax())
        label = score_fn.label(j) if isinstance(score_fn, Score) else f"x[{j}]"
        raise endless(f"{label} -> {round(m[j].item(), 6) + 0.0:g}")


def is_spike(mode: Affine) -> bool:
    """Tell whether the curvature at a mode is so large that no other is told from zero, or nearly."""
    return bool(torch.linalg.cond(mode.L).square() > 0.1 / FLOOR)


def jacobians(score_fn: DifferentiableScore, x: Tensor) -> Tensor:
    """Return the Jacobians (k, d, d) of the score at points x (k, d), one vector-Jacobian product of k d rows."""
    k, d = x.shape
    directions = torch.eye(d, dtype=x.dtype, device=x.device).repeat(k, 1)
    blocks = (_blocks(a) for a in (x.repeat_interleave(d, 0), directions))
    J = torch.cat([score_fn.product(*pair) for pair in zip(*blocks, strict=True)]).view(k, d, d)
    return (J + J.mT) / 2


def _blocks(x: Tensor) -> tuple[Tensor, ...]:
    """Cut rows (n, d)."""
    return x.split(max(1, MAX_IN_BLOCK // x.shape[1]))


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
    if isinstance(score_fn, Score) and score_fn.units is not None:
        of_units = Affine(torch.zeros_like(x[0]), score_fn.units.to(x).diag())
        maps, converged = search_modes(of_units.pull_back(score_fn), of_units.whiten(x), max_iter)
        return [Affine(of_units.unwhiten(a.m[None])[0], of_units.L @ a.L) for a in maps], converged
    d = x.shape[1]
    x = x.clone()
    searching = torch.arange(len(x), device=x.device)
    converged = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for _ in range(max_iter):
        here = x[searching]
        s = score_fn(here).detach()
        lam, V = _curvatures(score_fn, here)
        p = ((s[:, None] @ V) / lam.abs()[:, None] @ V.mT)[:, 0]
        level = (s * p).sum(1) < TOLERANCE * d
        p = p * (LONGEST * (1 + here.norm(dim=1)) / p.norm(dim=1)).clamp_max(1)[:, None]
        decrement = (s * p).sum(1)
        convex = lam[:, 0] < 0
        step = torch.ones_like(decrement)
        if not level.all():
            step[~level] = _steps(score_fn, here[~level], p[~level], decrement[~level], every=2)
        out = V[:, :, 0] * lam[:, :1].abs().rsqrt()  # from a saddle, along its steepest direction
        x[searching] = here + torch.where(level[:, None], out * convex[:, None], step[:, None] * p)
        converged[searching] = level & ~convex
        goes_on = torch.where(level, convex, (x[searching] != here).any(1)) & x[searching].isfinite().all(1)
        goes_on &= s.abs().amax(1) < STEEPEST
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
    except torch.linalg.LinAlgError:  # squares of the largest numbers overflow
        size = J.abs().amax((1, 2)).clamp_min(torch.finfo(J.dtype).tiny)
        lam, V = torch.linalg.eigh(-J / size[:, None, None])
        lam = lam * size[:, None]
    top = lam.abs().amax(1, keepdim=True)
    floor = torch.where(top > 0, FLOOR * top, 1.0)  # without any curvature the scale is unknown
    return torch.where(lam.abs() < floor, floor, lam).where(finite[:, None], torch.nan), V


def _steps(score_fn: ScoreFunction, x: Tensor, p: Tensor, decrement: Tensor, every: int) -> Tensor:
    """Return steps t (k,): one if the slope there is small, otherwise the last before the slope changes sign.

    That is first looked for among every so many powers of two.
    """

    def slopes(t: Tensor, rows: Tensor) -> Tensor:  # t (k', n)
        points = x[rows, None] + t[:, :, None] * p[rows, None]
        s = torch.cat([score_fn(block).detach() for block in _blocks(points.flatten(0, 1))])
        slope = (s.view(points.shape) * p[rows, None]).sum(-1)
        return slope.where(slope.isfinite(), -math.inf)

    everyone = torch.arange(len(x), device=x.device)
    middle, end = slopes(x.new_tensor([0.5, 1.0]).expand(len(x), 2), everyone).unbind(1)
    step = x.new_ones(len(x))
    rows = everyone[~((middle > 0) & (end.abs() < decrement / 2))]
    t = torch.cat([x.new_zeros(1), 2.0 ** torch.arange(-26, 11, every, dtype=x.dtype, device=x.device)])
    t = t.expand(len(rows), -1)
    for _ in range(3):
        if not len(rows):
            break
        last = (slopes(t[:, 1:], rows) > 0).long().cumprod(1).sum(1)
        step[rows] = t.gather(1, last[:, None])[:, 0]
        turns = last < t.shape[1] - 1
        rows, t, last = rows[turns], t[turns], last[turns]
        low, high = t.gather(1, last[:, None]), t.gather(1, last[:, None] + 1)
        t = low + (high - low) * torch.linspace(0, 1, 9, dtype=x.dtype, device=x.device)
    return step


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
        step = 0
        if decrement > TOLERANCE * len(x):  # beside the products, more points of a line cost nothing
            step = _steps(score_fn, x[None], p[None], decrement[None], every=1)[0]
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
    raise DivergedError(x[None])


def dense_mode(score_fn: DifferentiableScore, x: Tensor, generator: torch.Generator) -> Affine:
    """Search for a mode from x (d,) of many dimensions; return it with a root of the inverse curvature there.

    This takes a product with the Jacobian in each dimension, once.

    Raises
    ------
    ValueError
        The search has not converged.
    """
    m = newton_cg(score_fn, x, generator, MAX_STEPS).m
    rows = max(1, MAX_IN_BLOCK // len(m))
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
    """Return an estimate of |diag(-J)|^(-1/2), shape (d,).

    The error of a diagonal is proportional to the size of its rows, so the estimate is refined in its own units.
    """
    D = torch.ones_like(x)
    for _ in range(3):
        signs = torch.randint(2, (128, len(x)), generator=generator, device=x.device).to(x) * 2 - 1
        product = D * _curvature_times(score_fn, x, D * signs)
        diagonal, row = (signs * product).mean(0).abs(), product.square().mean(0).sqrt()
        D = D * torch.maximum(diagonal, 0.1 * row).clamp_min(torch.finfo(x.dtype).tiny ** 0.5).rsqrt()
    return D


def _conjugate_gradients(times: ScoreFunction, b: Tensor) -> Tensor:
    """Return an approximate solution of A p = b or, on negative curvature, the step so far."""
    p, r = torch.zeros_like(b), b
    direction, rr = r, r @ r
    for _ in range(50):
        product = times(direction)
        curvature = direction @ product
        if not curvature > 0:
            return p if p.any() else direction
        step = rr / curvature
        p, r = p + step * direction, r - step * product
        rr, before = r @ r, rr
        if rr < 0.1**2 * (b @ b):
            break
        direction = r + rr / before * direction
    return p


def _lanczos(times: ScoreFunction, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return Ritz values (k,) and vectors (d, k) that have converged, of a symmetric operator."""
    basis, alphas, betas = [start / start.norm()], [], []
    for _ in range(min(300, len(start))):
        w = times(basis[-1])
        if not w.isfinite().all():
            raise DivergedError
        alphas.append(w @ basis[-1])
        for _ in range(2):  # orthogonal to all previous ones, to rounding
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


def laplace(score_fn: DifferentiableScore, start: Tensor, max_iter: int = 200) -> tuple[Affine, bool]:
    """Return the map to the mode found from `start` (d,) by the curvature there, and whether the search converged.

    Raises
    ------
    ValueError
        The score is not finite at `start`, or the search produces numbers that are not finite.
    """
    if not score_fn(start[None]).isfinite().all():
        raise ValueError(
            "`score_fn` is not finite where the search for a mode starts, by default the origin; set `init` to a "
            "point where it is or, where there is such a parameter, `whiten` to a pair (mean, Cholesky factor) that "
            "is roughly right, or to None."
        )
    return saddle_free_newton(score_fn, start, max_iter)


# Faults of a score that show near a mode


def noise_of(score: Score, mode: Affine) -> float:
    r"""Return the noise of a score around a mode, as a share of its size there, about one standard deviation.

    It is what cubic polynomials leave of it along short lines in the coordinates of the mode, the largest of the
    directions of the curvature, which may itself be noise. Points on a line are at random distances, since of equal
    ones a noise that oscillates may make a slow wave.

    References
    ----------
    Moré, J. and Wild, S. (2011). Estimating computational noise. SIAM Journal on Scientific Computing 33(3).
    """
    generator = torch.Generator(mode.m.device).manual_seed(0)
    u, way = standard_normal(16, mode.m, generator).chunk(2)
    t = torch.rand(12, 1, generator=generator, dtype=u.dtype, device=u.device)
    steps = 0.1 * t * (way / way.norm(dim=1, keepdim=True))[:, None]
    s = score(mode.unwhiten((u[:, None] + steps).flatten(0, 1))).detach().view(len(u), len(t), -1)
    s = s @ torch.linalg.eigh(mode.L @ mode.L.mT).eigenvectors
    Q = torch.linalg.qr(t ** torch.arange(4).to(t)).Q
    noise = (s - Q @ (Q.mT @ s)).square().sum(1) / (len(t) - 4)
    return (noise.nanmedian(0).values / s.square().mean(1).nanmedian(0).values).nan_to_num(0.0).max().sqrt().item()


def over_noise(score: Score, mode: Affine) -> Affine:
    """Return a mode with the distances at which log p has fallen by about one for its scales, where its curvature is
    that of the noise.
    """
    at_one = falls(score, mode.m)
    return Affine(mode.m, at_one.diag()) if (at_one > 3 * mode.L.norm(dim=1)).any() else mode


def fault_of_noise(score: Score, mode: Affine) -> str | None:
    """Say that a score has too much noise around a mode, None if it has not."""
    noise = noise_of(score, mode)
    most = 0.2  # standard deviations: more shifts moments by more than a few percent
    if not noise > most:
        return None
    return (
        f"The noise of the score is {noise:.2g} of its standard deviation: neighbouring points differ more than "
        "those of a smooth function, so that no fit is accurate. Solvers, simulators and finite differences "
        "leave such noise: set a smaller tolerance of the solver, a larger step of the differences, the same random "
        f"numbers at each call, or compute in float64, until it is below {most}."
    )


def look_for_jump(score: Score, x: Tensor) -> bool:
    """Note on the tally of a score where log p jumps between the first of some points (n, d) and another, if it does;
    tell whether a fault is noted.
    """
    if score.tally.fault is None:
        score.tally.found(fault_of_jump(score, x))
    return score.tally.fault is not None


def fault_of_jump(score: Score, x: Tensor) -> str | None:
    r"""Say where log p jumps on one of the lines from the first of some points (n, d) to the others, None if it does
    on none of them, or is not known.

    There :math:`\log p(b) - \log p(a) - \int_a^b s` is not zero. The lines where it is largest are halved, each
    time to the half that has more of it: a jump stays as it is, while the errors of integrals vanish.
    """
    log_prob = score.log_prob
    if log_prob is None:
        return None

    def excess(a: Tensor, b: Tensor) -> Tensor:
        """Return what the integrals of the score leave of the differences of log p from a to b (n, d)."""
        s_a, s_1, s_2, s_b = score(torch.cat([a, *lobatto_nodes(a, b), b])).detach().chunk(4)
        log_a, log_b = log_prob(torch.cat([a, b])).detach().chunk(2)
        return (log_b - log_a - lobatto(s_a, s_1, s_2, s_b, b - a)).nan_to_num(0.0, 0.0, 0.0)

    a, b = x[:1].expand_as(x[1:]), x[1:]
    left, way = excess(a, b), torch.nn.functional.normalize(b - a)
    worst = left.abs().argsort(descending=True)[:3]
    a, b, left, way = a[worst], b[worst], left[worst], way[worst]
    for _ in range(36):  # to the rounding of single points
        if not (left.abs() > 0.1).any():  # nats
            return None
        middle = (a + b) / 2
        first, second = excess(a, middle), excess(middle, b)
        is_second = second.abs() > first.abs()
        a, b = a.where(~is_second[:, None], middle), b.where(is_second[:, None], middle)
        left = second.where(is_second, first)
    # beside a pole of the score, where p is zero, integrals over ever shorter lines do not vanish
    steepest = torch.stack([score(end).detach().norm(dim=1) for end in (a, b)]).amax(0)
    left = left * (steepest * (b - a).norm(dim=1) < left.abs() / 4)
    k = left.abs().argmax()
    if not left[k].abs() > 0.1 or _is_rounding(score, excess, a[k], way[k], left[k].abs()):
        return None
    return _words_of_jump(score, a[k], b[k], left[k].item())


def _is_rounding(
    score: Score, excess: Callable[[Tensor, Tensor], Tensor], a: Tensor, way: Tensor, jump: Tensor
) -> bool:
    """Tell whether in single precision log p, or its terms at points next to each other, are rounded by as much as a
    jump at a point (d,), on the one side of it.
    """
    if score.type_computed == torch.float64 or score.log_prob is None:
        return False
    eps = torch.finfo(score.type_computed).eps
    before = a - 4 * eps * (1 + a.norm()) * torch.arange(1, 33).to(a)[:, None] * way
    own = 4 * eps * score.log_prob(a[None]).detach().abs()
    return bool(jump < own) or bool(excess(before[1:], before[:-1]).std() > jump / 4)


def _words_of_jump(score: Score, a: Tensor, b: Tensor, jump: float) -> str:
    """Say in which coordinates log p jumps between two points (d,) next to each other."""
    across = a + 1000 * (b - a).diag()  # in one coordinate each, far enough to cross an oblique border
    changes = score.log_prob(torch.cat([a[None], across])).detach()  # type: ignore[misc]
    found = ((changes[1:] - changes[0]).abs() > abs(jump) / 2).nonzero()[:, 0].tolist()
    where = " and ".join(f"{score.label(i)} = {a[i]:.4g}" for i in found[:3]) or "a border"
    return (
        f"log p jumps by {abs(jump):.2g} near {where}, which its gradient does not show: the score says nothing of "
        "the mass on either side, so that means and scales of the fit are off. Take a smooth function in the place "
        "of the condition, the rounding or the table that jumps, or fit the parts, each with its bounds as "
        "skksivi.targets.constrained takes them."
    )
