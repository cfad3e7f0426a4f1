"""What a user's score function may be and return, checked before it is trusted."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from skksivi._utils.checks import warn_caller
from skksivi.score._rejected import REJECTIONS, first_points
from skksivi.score._score import (
    POINTS,
    STEPS,
    BlackBox,
    CarriesScore,
    Score,
    ScoreFunction,
    ScoreWithProduct,
    Tally,
    UntriedScore,
    autograd_pullback,
    central_difference,
    function_of,
    own_pullback,
    tensor_copy,
    with_graph,
)

#: Step of a central difference of a score in half precision.
HALF_STEP = 10 * STEPS[torch.float32]


#: Relative asymmetry above which a Jacobian does not belong to a gradient.
ASYMMETRY = 2e-2

#: Trial points.
N_TRIALS = 4


#: How messages refer to them.
COUPLED = (
    "`score_fn` returns different values for a point when other points are in the same call; its rows must be "
    "independent, each the gradient of log p at one point. Differentiate `log_prob(x).sum()`, not its mean, and use "
    "neither len(x) nor a statistic of the batch; a network with batch normalisation needs `.eval()`."
)

RANDOM = (
    "`score_fn` returns different values when it is called again with the same points, so that the fit will be "
    "biased. If it draws a minibatch of the data, let `skksivi.targets.Minibatches` draw it; if it is a network with "
    "dropout, call its `.eval()`; else fix its seed."
)


def probe(
    score_fn: UntriedScore,
    n_features: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    score_vjp: ScoreWithProduct | None = None,
) -> Score:
    """Call `score_fn` on two and on three points; return it adapted, or say what is wrong with it.

    Raises
    ------
    TypeError
        It returns neither a tensor nor an array.
    ValueError
        It returns another shape than its input's, or changes its input.
    """
    sizes = (2, 3)  # two, so that (d, n) and (n,) cannot pass for (n, d)
    for n in sizes:
        x = first_points(n, torch.empty(0, n_features, dtype=dtype, device=device))
        adapted, returned = _adapted(score_fn, x)
    step = STEPS.get(min(dtype, returned, key=lambda t: t.itemsize), HALF_STEP)
    return Score(adapted, n_features, dtype, device, step, score_vjp, tally=Tally(n_values=sum(sizes)))


def _adapted(score_fn: UntriedScore, x: Tensor) -> tuple[ScoreFunction, torch.dtype]:
    """Return the score as a function of tensors, and the dtype that it returned itself."""
    errors: list[Exception] = []
    for kind, make in POINTS.items():
        points, before = make(x), make(x)
        try:
            s = _asked(score_fn, points, kind)
        except (ConnectionError, TimeoutError):  # these do not come from the function
            raise
        except Exception as error:
            errors.append(error)
            if kind == "graph" and not isinstance(error, REJECTIONS):  # which numbers of single precision may cause
                _refuse_other_type(score_fn, x, error)
            continue
        if kind == "graph" and hasattr(s, "__array__") and not isinstance(s, Tensor):
            continue
        _check(s, points, before)
        return (score_fn if kind == "graph" else BlackBox(score_fn, kind)), tensor_copy(s).dtype
    first, *others = errors
    _explain(score_fn, x, first)
    first.add_note(
        f"Raised by `score_fn` on a trial input of shape {tuple(x.shape)}, {x.dtype}. If its data are of another "
        "type, give them this one or set the parameter `dtype`."
    )
    for other in others[:1]:
        first.add_note(f"Called with an array it raised {type(other).__name__}: {other}")
    raise first


def _asked(score_fn: UntriedScore, points: Tensor | np.ndarray, kind: str) -> Tensor | np.ndarray:
    """Call the function as one that takes points of this kind."""
    with torch.set_grad_enabled(kind in ("graph", "leaf")), np.errstate(all="ignore"):
        return score_fn(points)


def _refuse_other_type(score_fn: UntriedScore, x: Tensor, error: Exception) -> None:
    """Raise TypeError if the function works on tensors of another type, so that nothing but the type is wrong."""
    other = torch.float32 if x.dtype == torch.float64 else torch.float64
    try:
        works = isinstance(_asked(score_fn, with_graph(x.to(other)), "graph"), Tensor)
    except Exception:
        return
    if works:
        raise TypeError(
            f"`{_name(score_fn)}` takes points of type {other}, but no {x.dtype}: with these it raises "
            f"{type(error).__name__}: {error}. Let it bring its data or module to the type of its input, or set "
            f"dtype='{str(other).removeprefix('torch.')}'."
        ) from error


def _explain(score_fn: UntriedScore, x: Tensor, error: Exception) -> None:
    """Explain an error of the function at points x if it accepts points of another shape or range.

    Raises
    ------
    ValueError
        It accepts one point, another number of features, or only points between zero and one; or its data are
        inference tensors.
    """
    if "inference tensor" in str(error).lower():
        raise ValueError(
            f"`{_name(score_fn)}` uses tensors that were made under torch.inference_mode(), through which nothing "
            f"can be differentiated: make its data outside, or give it clones of them. It said: {error}"
        ) from error
    if not isinstance(error, RuntimeError | ValueError | IndexError | TypeError) or _answers(score_fn, x):
        return
    if _answers(score_fn, x[0]):
        name = _name(score_fn)
        of_arrays = f", of arrays as lambda X: np.stack([{name}(x) for x in X])," if name == "score_fn" else ""
        raise ValueError(
            f"`{name}` takes one point, of shape {tuple(x[0].shape)}, but a fit calls it with many, the rows of a "
            f"tensor of shape (n, {x.shape[1]}). Give it as torch.func.vmap({name}){of_arrays} or write it for rows. "
            f"With rows it raises {type(error).__name__}: {error}"
        ) from error
    if _answers(score_fn, x.sigmoid()):
        raise ValueError(
            f"`{_name(score_fn)}` raises {type(error).__name__} at numbers below zero or above one, so that the "
            "target seems bounded. Give the density of the bounded parameters to skksivi.targets.constrained, or "
            f"transform them to the whole line and add the logarithm of the Jacobian to log p. It said: {error}"
        ) from error
    started = time.monotonic()
    for d in (*range(2, 129), 1):
        if time.monotonic() > started + 1:
            return
        if _answers(score_fn, x.new_zeros(len(x), d)):
            raise ValueError(
                f"`n_features` is {x.shape[1]}, but `{_name(score_fn)}` takes points of shape {(len(x), d)} and for "
                f"those of shape {tuple(x.shape)} raises {type(error).__name__}: {error}. Set n_features={d}."
            ) from error


def _answers(score_fn: UntriedScore, x: Tensor) -> bool:
    """Tell whether the function returns numbers of the shape of points x, of some kind."""
    for kind, make in POINTS.items():
        try:
            if _asked(score_fn, make(x), kind).shape == x.shape:
                return True
        except Exception:  # noqa: S112
            continue
    return False


def _name(score_fn: UntriedScore) -> str:
    """Return the user's name for the function: a density may be differentiated on their behalf."""
    return "log_prob" if getattr(score_fn, "__qualname__", "") == "Target.score_fn" else "score_fn"


def _check(s: Tensor | np.ndarray, points: Tensor | np.ndarray, before: Tensor | np.ndarray) -> None:
    """Check the scores s of points, tensors or arrays, which were the same `before`."""
    if not tensor_copy(points).equal(tensor_copy(before)):
        raise ValueError("`score_fn` changed its input in place; it must not modify the points it receives.")
    if not hasattr(s, "__array__"):
        raise TypeError(
            f"`score_fn` returned a {type(s).__name__}, expected a torch tensor or an array of the shape of its "
            f"input, {tuple(points.shape)}."
        )
    if tuple(s.shape) != tuple(points.shape):
        raise ValueError(
            f"`score_fn` returned shape {tuple(s.shape)}, expected {tuple(points.shape)} as its input: the gradient "
            f"of log p at each row, where `n_features` is {points.shape[1]}."
        )
    if not (s.is_floating_point() if isinstance(s, Tensor) else np.asarray(s).dtype.kind == "f"):
        raise TypeError(f"`score_fn` returned numbers of type {s.dtype}, expected floating-point numbers.")


def in_double(score_fn: ScoreFunction | CarriesScore, n_features: int, device: torch.device | str = "cpu") -> Score:
    """Return the probed score of a function or target for float64 points, in float32 if it takes no others."""
    if isinstance(score_fn, Score):
        return score_fn.double
    score = _in_double(function_of(score_fn), n_features, None, torch.device(device))
    x = trial_points(score)
    _check_rows(score, x)
    return choose_product(score, "auto", x)[0]


def _in_double(
    score_fn: ScoreFunction, n_features: int, score_vjp: ScoreWithProduct | None, device: torch.device
) -> Score:
    try:
        return probe(score_fn, n_features, dtype=torch.float64, device=device, score_vjp=score_vjp)
    except (RuntimeError, TypeError) as error:
        try:
            return probe(score_fn, n_features, dtype=torch.float32, device=device, score_vjp=score_vjp)
        except (RuntimeError, TypeError):
            raise error from None


# Whether it is the gradient of a log-density, and whether its graph is right


def resolve(
    in_type: Callable[[torch.dtype], tuple[ScoreFunction, int, ScoreWithProduct | None]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    products: str,
    near: Tensor | None,
    frugal: bool = False,
) -> Score:
    """Return the probed score in `dtype` and in float64; warn if it is probably not the gradient of a density.

    Parameters
    ----------
    in_type : callable
        Gives the function, the number of features and the own product or None, with data of a type.
    dtype, device
        Of the training.
    products : {"auto", "autograd", "finite-difference"}
        How products with the Jacobian are formed.
    near : Tensor of shape (k, d) or None
        Points near the target.
    frugal : bool, default=False
        Whether to make do with fewer points.
    """
    rules = ("auto", "autograd", "finite-difference")
    if products not in rules:
        raise ValueError(f"`products` of the target must be one of {', '.join(map(repr, rules))}, got {products!r}.")
    function, d, score_vjp = in_type(dtype)
    score = probe(function, d, dtype=dtype, device=device, score_vjp=score_vjp)
    double = score if dtype == torch.float64 else _in_double(*in_type(torch.float64), device)
    double.tally.is_frugal = frugal
    x, s = _finite_points(double, near)
    n_twice = N_TRIALS if frugal else 2 * N_TRIALS
    first, second = double(x[:n_twice]), double(x[:n_twice])
    is_random = bool((first - second).abs().max() > 1e-3 * first.abs().max())
    x = x[:N_TRIALS]
    if double.step == HALF_STEP or _in_half(s):
        score, double = replace(score, step=HALF_STEP), replace(double, step=HALF_STEP)
        warn_caller(
            "`score_fn` computes in half precision, float16 or bfloat16, with two to three digits, so that the fit "
            "and its checks are inexact. Let it compute in float32 or float64: convert its data and modules by "
            "`.float()`, and leave out autocast."
        )
    is_random = is_random or not _check_rows(double, x)
    if is_random and double.score_vjp is not None:
        raise ValueError(RANDOM)
    double, asymmetry = choose_product(double, products, x)
    if is_random:
        if double.by_differences:
            raise ValueError(RANDOM)
        warn_caller(RANDOM)
        double.tally.is_random = True
    size = first.abs().median(0).values
    if size.amax() > 1e12 * size.amin() > 0:  # scales that no search in units of one tells from zero
        double = replace(double, units=falls(double, x[0]))
    if dtype == torch.float64:
        score = double
    else:
        own = None if double.score_vjp is None else score.score_vjp
        double.tally.add(values=score.tally.n_values)
        score = replace(
            score,
            score_vjp=own,
            by_differences=double.by_differences,
            units=double.units,
            in_double=double,
            tally=double.tally,
        )
    if asymmetry > ASYMMETRY and not is_random:
        warn_caller(
            f"The Jacobian of `score_fn` is not symmetric, by {asymmetry:.0%}, so that it is not the gradient of any "
            "log-density; compare each coordinate of it with finite differences of log p."
        )
    return score


def _in_half(s: Tensor) -> bool:
    """Tell whether a column of scores (n, d), at points of many sizes, seems to be computed in half precision.

    Its numbers then have few digits, but many different ones. The values of a step function are multiples of the last
    place of the largest, and those of a lattice have few different digits.
    """
    digits = torch.frexp(s).mantissa.sort(dim=0).values
    n_different = 1 + (digits.diff(dim=0) != 0).sum(0)
    for kind in (torch.bfloat16, torch.float16):
        place = torch.finfo(kind).eps * torch.exp2(s.abs().amax(0).log2().floor())
        is_fine = (torch.fmod(s, place) != 0).any(0) & (n_different >= 20)
        if ((s.to(kind).to(s) == s).all(0) & is_fine).any():
            return True
    return False


def doubt_of_sign(score: Score) -> str | None:
    """Say that the score points away from the origin far out, None if it does not."""
    if not grows_outward(score):
        return None
    return (
        "`score_fn` points away from the origin far out in all directions, so the density would grow without bound: "
        "it may have the wrong sign. It must be the gradient of log p, not of the potential -log p."
    )


def _check_rows(score: Score, x: Tensor) -> bool:
    """Refuse a score whose rows depend on each other: points are evaluated in pairs and in large batches.

    Tell whether the rows are the same each time; a score that is random is not refused here.

    Raises
    ------
    ValueError
    """
    crowd = x.repeat(4, 1)
    in_pairs = torch.cat([score(pair) for pair in x.roll(1, 0).split(2)]).roll(-1, 0)
    # larger differences of rows are no rounding
    tolerance = {STEPS[torch.float64]: 1e-3, STEPS[torch.float32]: 1e-2}.get(score.step, 0.1) * in_pairs.abs().amax(0)
    s = score(crowd)
    if ((s - in_pairs.repeat(4, 1)).abs() <= tolerance).all():
        return True
    if ((s - score(crowd)).abs() > tolerance).any():
        return False
    raise ValueError(COUPLED)


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
    automatic = M
    if own is not None:
        _check_own(score, own, x)
    if not score.by_differences:
        automatic = _restricted(lambda x, v: _by_graph_or_own(score, x, v), points, V)
    lost, noise = M.isfinite() & ~automatic.isfinite(), torch.zeros_like(M)
    differs = _disagreement(automatic, M, noise) > tolerance or _disagreement(M, M.mT, noise) > ASYMMETRY
    if doubtful or differs or lost.any():
        rounding, finer = _rounding(score, points, V), differences(score.step / 4)
        noise = torch.maximum(rounding, (M - finer).abs())
        if doubtful or (differs and _disagreement(finer, M, rounding) > tolerance):
            step, M, noise = _steadier(differences, score.step, M, finer, noise)
            score = replace(score, step=step, is_rough=True)
    error = _disagreement(automatic, M, noise)
    if own is not None and error > tolerance:
        raise ValueError(
            "`score_vjp` returns a product that differs from `score_fn`'s; correct it, or leave it out and let the "
            "product be automatic."
        )
    if not score.by_differences and own is None:
        has_nan = bool((lost & (10 * noise < M.abs())).any())
        is_wrong = has_nan or error > tolerance
        if is_wrong and products == "autograd":
            raise ValueError(
                "`products` is 'autograd', but its products with the Jacobian of `score_fn` differ from finite "
                f"differences by {math.inf if has_nan else error:.0%}: it detaches its input, runs under no_grad, "
                "leaves torch, uses a function without a second derivative, or takes the derivative of a branch that "
                "is not taken, where that is NaN. Remove that, or set products='auto' or 'finite-difference'."
            )
        has_no_graph = bool(M.any()) and not automatic.any()
        by_differences = is_wrong or has_no_graph or isinstance(score.score_fn, BlackBox)
        score = replace(score, by_differences=by_differences)
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


def scattered_points(score: Score, near: Tensor | None) -> Tensor:
    """Return points near the target, where known, followed by points all around the origin."""
    d = score.n_features
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(N_TRIALS, d, generator=generator, dtype=torch.float64, device="cpu")
    signs = torch.tensor([[1.0], [-1.0]], dtype=torch.float64, device="cpu")
    orthants = signs * directions[:1].abs()  # some domains are one of them, some a half-space
    scattered = torch.cat([directions, orthants, -directions])
    scales = (1.0, 0.1) if score.tally.is_frugal else (1.0, 0.1, 10.0, 0.01, 100.0)
    x = torch.cat([scale * scattered for scale in scales]).to(score.device)
    if near is not None:
        x = torch.cat([near.to(x)[:N_TRIALS], x])
    return x.to(score.dtype)


def trial_points(score: Score) -> Tensor:
    """Return a few points where the score is finite.

    Raises
    ------
    ValueError
        There is none.
    """
    return _finite_points(score, None)[0][:N_TRIALS]


def _finite_points(score: Score, near: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return all trial points where the score is finite, and the score there."""
    x = scattered_points(score, near)
    s = score(x)
    finite = s.isfinite().all(1)
    if not finite.any() and any(score(pair).isfinite().all() for pair in x.split(2)):
        raise ValueError(COUPLED)
    if not finite.any():  # as of exp(x[0] + x[1] * population)
        x = 1e-6 * x
        s = score(x)
        finite = s.isfinite().all(1)
    if not finite.any():
        raise ValueError(
            f"`score_fn` is not finite at any of {2 * len(x)} trial points at distances of 1e-8 to 100 from the "
            f"origin{', but NaN (are there NaN in the data?)' * bool(s.isnan().any(1).all())}; set `init` to a point "
            "where it is finite, check it, shift and rescale the parameters so that they are of order one, or "
            "transform them as skksivi.targets.constrained does."
        )
    return x[finite], s[finite]


def _directions(score: Score) -> Tensor:
    """Return directions (k, d) with entries of 0 and +-1, every coordinate in one of them."""
    d = score.n_features
    signs = torch.randint(2, (d,), generator=torch.Generator().manual_seed(0), device="cpu") * 2.0 - 1
    k, column = min(d, 16), torch.arange(d, device="cpu")
    V = torch.zeros(k, d, device="cpu").index_put((column % k, column), signs)
    return V.to(device=score.device, dtype=score.dtype)


def _restricted(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, V: Tensor) -> Tensor:
    """Return matrices (n, k, k) whose row a holds the product with V_a (k, d), projected on V."""
    return torch.stack([product(point.expand_as(V), V) @ V.mT for point in x])  # the graph of one point at a time


def _check_own(score: Score, score_vjp: ScoreWithProduct, x: Tensor) -> None:
    """Compare what a target with its own product returns at x (n, d) with its score, and with the next call."""
    v = torch.linspace(-1, 2, x.numel(), dtype=x.dtype, device=x.device).reshape(x.shape)
    with torch.no_grad():
        own, vjp = own_pullback(score_vjp, x.detach().clone())
        own_pullback(score_vjp, x.roll(1, 0))[1](v)
        after_another, product = vjp(v), own_pullback(score_vjp, x.detach().clone())[1](v)
    for name, a in (("a score", own), ("a product", product)):
        if a.shape != x.shape:
            raise ValueError(
                f"`score_vjp` returns {name} of shape {tuple(a.shape)}, expected {tuple(x.shape)} as its points."
            )
    if _differ(own, score(x)):
        raise ValueError("`score_vjp` returns a score that differs from `score_fn`'s; correct one of them.")
    if _differ(after_another, product):
        raise ValueError(
            "`score_vjp` returns a function whose product changes with another call of `score_vjp`; let it keep what "
            "it needs of its own points in local variables."
        )


def _differ(a: Tensor, b: Tensor) -> bool:
    """Tell whether tensors of one shape differ by more than rounding where both are finite."""
    both = a.isfinite() & b.isfinite()
    a, b = a.where(both, 0), b.where(both, 0)
    return bool((a - b).abs().max() > 1e-2 * b.abs().max() + 1e-6)


def grows_outward(score: Score) -> bool:
    r"""Tell whether :math:`s(x)^\top x > 0` in most directions, on the three widest shells where s is finite.

    A density that can be normalised falls eventually along almost every ray, wherever its mass is.
    """
    generator = torch.Generator().manual_seed(0)
    n = 3 if score.tally.is_frugal else 8
    rays = torch.randn(n, score.n_features, generator=generator, dtype=torch.float64, device="cpu")
    rays = torch.cat([rays, -rays])
    lengths = 1 + torch.rand(len(rays), 1, generator=generator, dtype=torch.float64, device="cpu")  # of any phase
    rays = (lengths * rays / rays.norm(dim=1, keepdim=True)).to(score.device)
    shares = list(itertools.islice(_outward_shares(score, rays), 3))
    return len(shares) == 3 and sum(shares) > 3 * 0.7


def _outward_shares(score: Score, rays: Tensor) -> Iterator[float]:
    """Yield the share of rays along which p grows, from the widest shell inwards, where enough are finite."""
    for radius in (10.0**k for k in range(8, -1, -1)):  # where it must have begun to fall
        try:
            slope = (score(radius * rays) * rays).sum(1)
        except (ArithmeticError, RuntimeError, ValueError):  # it need not be defined so far out
            continue
        finite = slope.isfinite()
        if finite.double().mean() > 0.2:
            yield (slope[finite] > 0).double().mean().item()
