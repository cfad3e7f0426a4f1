"""How products with the Jacobian of a score are formed: by autograd where that is right, else by differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from skksivi.score._refusals import ASYMMETRY, tell
from skksivi.score._score import (
    STEPS,
    BlackBox,
    Score,
    ScoreFunction,
    ScoreWithProduct,
    autograd_pullback,
    central_difference,
    own_pullback,
)


def choose_product(score: Score, products: str, x: Tensor) -> tuple[Score, float]:
    """Return the score with a way to products with its Jacobian, and how asymmetric that is, zero where unknown.

    The Jacobian is restricted to the span of a few directions, V J V^T, which together touch all coordinates, and
    computed there by autograd and by central differences. Where the two disagree, differences of a second step tell
    the error of the first.

    Raises
    ------
    ValueError
        Autograd was requested but is wrong, or the score's own product is wrong.
    """
    V, points = _directions(score), x[: 1 if score.tally.is_frugal else 3]

    def differences(step: float) -> Tensor:
        return _restricted(lambda x, v: central_difference(score, x, v, step, score.units), points, V).mT

    # larger differences are no rounding
    M, tolerance = differences(score.step), {torch.float32: 2e-2, torch.float64: 1e-3}[_precision(score)]
    if not M.isfinite().any(0).any(0).all():  # along one direction a step is too far at all points
        score = replace(score, units=falls(score, points[0]))
        M = differences(score.step)
    doubtful = _is_doubtful(score, points, V, M, tolerance)
    own = score.score_vjp if products == "auto" else None
    score = replace(score, score_vjp=own, by_differences=products == "finite-difference")
    if own is not None:
        tell("an own product", fault=_fault_of_own(score, own, x))
    automatic = M if score.by_differences else _restricted(lambda x, v: _by_graph_or_own(score, x, v), points, V)
    lost, noise = M.isfinite() & ~automatic.isfinite(), torch.zeros_like(M)
    differs = _disagreement(automatic, M, noise) > tolerance or _disagreement(M, M.mT, noise) > ASYMMETRY
    if doubtful or differs or lost.any():
        rounding, finer = _rounding(score, points, V), differences(score.step / 4)
        noise = torch.maximum(rounding, (M - finer).abs())
        if doubtful or (differs and _disagreement(finer, M, rounding) > tolerance):
            step, M, noise = _steadier(differences, score.step, M, finer, noise)
            score = replace(score, step=step, is_rough=True)
    error = _disagreement(automatic, M, noise)
    if own is None and (lost & (10 * noise < M.abs())).any():
        error = math.inf
    is_wrong, has_no_graph = error > tolerance, bool(M.any()) and not automatic.any()
    if own is not None:
        tell("an own product", fault="a product that differs from `score_fn`'s" if is_wrong else "")
    elif is_wrong or has_no_graph or isinstance(score.score_fn, BlackBox):
        tell("products by autograd", are_wrong=products == "autograd" and is_wrong, error=error)
        score = replace(score, by_differences=True)
    return score, _disagreement(M, M.mT, noise + noise.mT)


def _is_doubtful(score: Score, x: Tensor, V: Tensor, M: Tensor, tolerance: float) -> bool:
    """Tell whether differences M (n, k, k) of a score without a graph may be those of noise.

    Noise need not make them asymmetric, since it may be each coordinate's own: a difference along the sum of all
    directions contradicts them. Those of rounded numbers are zero.
    """
    if not isinstance(score.score_fn, BlackBox):
        return False
    if (M.diagonal(dim1=1, dim2=2) == 0).any():
        return True
    together = (central_difference(score, x[:1], V.sum(0, keepdim=True), score.step / 4, score.units) @ V.mT)[0]
    gap = (together - M[0].sum(0)).abs() - tolerance * M[0].abs().sum(0)
    return bool((gap > 0).any() and (gap > 10 * _rounding(score, x[:1], V)[0].sum(0)).any())


def steadied(score: Score, x: Tensor) -> Score:
    """Return a score with the step of differences that suits its noise at points x (n, d)."""
    V, step = _directions(score).to(x), STEPS[_precision(score)]

    def differences(step: float) -> Tensor:
        return _restricted(lambda x, v: central_difference(score, x, v, step, score.units), x, V).mT

    M, finer = differences(step), differences(step / 4)
    return replace(score, step=_steadier(differences, step, M, finer, torch.zeros_like(M))[0])


def _steadier(
    differences: Callable[[float], Tensor], step: float, M: Tensor, finer: Tensor, noise: Tensor
) -> tuple[float, Tensor, Tensor]:
    """Return the step whose differences (n, k, k) agree best with those of a tenth of it, with them and their error.

    It is the given one, unless others agree much better than its own differences M with finer ones.

    The noise of a score, as a solver or differences of its own leave it, falls with the step; what a kink does to
    them, or a wrong score, does not. Differences of zero are those of rounded numbers.

    References
    ----------
    Moré, J. and Wild, S. (2012). Estimating derivatives of noisy simulations. ACM Transactions on Mathematical
    Software 38(3).
    """

    def gap(A: Tensor, B: Tensor) -> float:
        is_whole = bool(B.isfinite().all() and (B.diagonal(dim1=1, dim2=2) != 0).all())
        return _disagreement(A, B, torch.zeros_like(B)) if is_whole else 1.0

    found, least, before = (step, M, noise), gap(finer, M) / 10, M
    for wider in (10.0**k * step for k in range(1, 6)):
        after = differences(wider)
        if (now := gap(before, after)) < least:
            found, least = (wider, after, (after - before).abs()), now
        before = after
    return found


def falls(score: ScoreFunction, x: Tensor) -> Tensor:
    """Return the distances (d,) from x (d,) along each coordinate over which log p changes by about one more than the
    score there tells, one where there are none.
    """
    h = 10 ** torch.arange(-18, 19, dtype=x.dtype, device=x.device)
    ends = x + h[:, None, None] * torch.eye(len(x)).to(x)
    changes = (score(ends.flatten(0, 1)).view(ends.shape) - score(x[None])).diagonal(dim1=1, dim2=2).abs()
    away = (h[:, None] * changes).log().abs().nan_to_num(math.inf, math.inf)
    return h[away.argmin(0)].where(away.amin(0) < 5, 1.0)  # within a step of h


def _rounding(score: Score, x: Tensor, V: Tensor) -> Tensor:
    """Return the rounding errors of differences of the score at x (n, d), along V and projected on V: (n, k, k).

    They exceed the entries of a Jacobian where coordinates are in very different units.
    """
    size = score(x).abs() @ V.abs().mT
    h = score.step * (1 + (x[:, None] * V).abs().amax(-1))
    return torch.finfo(_precision(score)).eps * size[:, :, None] / h[:, None]


def _precision(score: Score) -> torch.dtype:
    return torch.float64 if score.step == STEPS[torch.float64] or score.is_rough else torch.float32


def _by_graph_or_own(score: Score, x: Tensor, v: Tensor) -> Tensor:
    """Return J^T v by the own product of the score, else by its graph; NaN if torch lacks a derivative in that."""
    score.tally.add(values=len(x))
    if score.score_vjp is not None:
        return own_pullback(score.score_vjp, x)[1](v)
    _, pull = autograd_pullback(score.uncounted, x)
    try:
        return pull(v)
    except RuntimeError:
        return torch.full_like(v, torch.nan)


def _disagreement(A: Tensor, B: Tensor, error: Tensor) -> float:
    """Return the largest difference of matrices (n, k, k) beyond the error of B, as a share of their size.

    It is taken from the median matrix, because one point may lie on a kink.
    """
    size = B.diagonal(dim1=1, dim2=2).abs().sqrt()
    scale = A.abs() + B.abs() + size[:, :, None] * size[:, None, :]
    share = ((A - B).abs() - 10 * error).clamp_min(0) / scale
    return share.nan_to_num(0, 0, 0).flatten(1).amax(1).median().item()


def _directions(score: Score) -> Tensor:
    """Return directions (k, d) with entries of 0 and +-1, every coordinate in one of them."""
    d = score.n_features
    signs = torch.randint(2, (d,), generator=torch.Generator().manual_seed(0), device="cpu") * 2.0 - 1
    k, column = min(d, 4 if score.tally.is_frugal else 16), torch.arange(d, device="cpu")
    V = torch.zeros(k, d, device="cpu").index_put((column % k, column), signs)
    return V.to(device=score.device, dtype=score.dtype)


def _restricted(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, V: Tensor) -> Tensor:
    """Return matrices (n, k, k) whose row a holds the product with V_a (k, d), projected on V."""
    return torch.stack([product(point.expand_as(V), V) @ V.mT for point in x])  # the graph of one point at a time


def _fault_of_own(score: Score, score_vjp: ScoreWithProduct, x: Tensor) -> str:
    """Compare what a target with its own product returns at x (n, d) with its score, and with the next call."""
    v = torch.linspace(-1, 2, x.numel(), dtype=x.dtype, device=x.device).reshape(x.shape)
    with torch.no_grad():
        own, vjp = own_pullback(score_vjp, x.detach().clone())
        own_pullback(score_vjp, x.roll(1, 0))[1](v)
        after_another, product = vjp(v), own_pullback(score_vjp, x.detach().clone())[1](v)
    if own.shape != x.shape or product.shape != x.shape:
        return f"a score and a product of shapes {tuple(own.shape)} and {tuple(product.shape)} at {tuple(x.shape)}"
    if _differ(own, score(x)):
        return "a score that differs from `score_fn`'s"
    if _differ(after_another, product):
        return "a function whose product changes with another call, as of points that it does not keep for itself"
    return ""


def _differ(a: Tensor, b: Tensor) -> bool:
    """Tell whether tensors of one shape differ by more than rounding where both are finite."""
    both = a.isfinite() & b.isfinite()
    a, b = a.where(both, 0), b.where(both, 0)
    return bool((a - b).abs().max() > 1e-2 * b.abs().max() + 1e-6)
