"""How a score is asked before a fit: called for the first time, at trial points, and for its Jacobian there."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from skksivi.score._domain import N_TRIALS, scattered_points
from skksivi.score._products import choose_product, falls
from skksivi.score._refusals import tell
from skksivi.score._score import (
    POINTS,
    POSSIBLE,
    REJECTIONS,
    STEPS,
    BlackBox,
    CarriesScore,
    Score,
    ScoreFunction,
    ScoreWithProduct,
    Tally,
    UntriedScore,
    first_points,
    function_of,
    tensor_copy,
    told_by,
)
from skksivi.score._tally import told_of

#: Step of a central difference of a score in half precision.
HALF_STEP = 10 * STEPS[torch.float32]


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
    tally = Tally(n_values=sum(sizes), told=told_of(getattr(score_fn, "__self__", score_fn)))
    return Score(adapted, n_features, dtype, device, step, score_vjp, tally=tally)


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
                _tell_of_type(score_fn, x, error)
            continue
        if kind != "graph" or isinstance(s, Tensor) or not hasattr(s, "__array__"):
            _tell_of_call(s, points, before)
            return (score_fn if kind == "graph" else BlackBox(score_fn, kind)), tensor_copy(s).dtype
    error = told_by(errors)
    if isinstance(error, (*POSSIBLE, IndexError, TypeError)) and not _answers(score_fn, x):
        _tell_of_errors(score_fn, x, error)
    if not type(getattr(score_fn, "__self__", None)).__module__.startswith("skksivi.bridges"):  # it is the library's
        error.add_note(f"Raised by `{_name(score_fn)}` on a trial input of shape {tuple(x.shape)}, {x.dtype}.")
    raise error


def _asked(score_fn: UntriedScore, points: Tensor | np.ndarray, kind: str) -> Tensor | np.ndarray:
    """Call the function as one that takes points of this kind."""
    with torch.set_grad_enabled(kind in ("graph", "leaf")), np.errstate(all="ignore"):
        return score_fn(points)


def _answers(score_fn: UntriedScore, x: Tensor, *kinds: str) -> bool:
    """Tell whether the function returns numbers of the shape of points x, of some kind."""
    for kind in kinds or POINTS:
        with suppress(Exception):
            if _asked(score_fn, POINTS[kind](x), kind).shape == x.shape:
                return True
    return False


def _name(score_fn: UntriedScore) -> str:
    """Return the user's name for the function: a density may be differentiated on their behalf."""
    return "log_prob" if getattr(score_fn, "__qualname__", "") == "Target.score_fn" else "score_fn"


def _tell_of_type(score_fn: UntriedScore, x: Tensor, error: Exception) -> None:
    """Tell of a function that works on tensors of another type, so that nothing but the type is wrong."""
    other = "float32" if x.dtype == torch.float64 else "float64"
    works = _answers(score_fn, x.to(getattr(torch, other)), "graph")
    tell("a type", error, works=works, name=_name(score_fn), dtype=x.dtype, other=other)


def _tell_of_errors(score_fn: UntriedScore, x: Tensor, error: Exception) -> None:
    """Tell what the function takes instead of points x (n, d)."""
    n, d = x.shape
    takes_one, takes_shares = _answers(score_fn, x[0]), _answers(score_fn, x.sigmoid())
    end = time.monotonic() + (not takes_one and not takes_shares)
    others = (k for k in (*range(2, 129), 1) if time.monotonic() < end)
    takes = next((k for k in others if _answers(score_fn, x.new_zeros(n, k))), 0)
    seen = {"takes_one": takes_one, "takes_shares": takes_shares, "takes": takes, "n": n, "d": d}
    tell("errors", error, name=_name(score_fn), shape=(n, d), **seen)


def _tell_of_call(s: Tensor | np.ndarray, points: Tensor | np.ndarray, before: Tensor | np.ndarray) -> None:
    """Tell what is wrong with the scores s of points, tensors or arrays, which were the same `before`."""
    is_changed, is_array = not tensor_copy(points).equal(tensor_copy(before)), hasattr(s, "__array__")
    is_real = s.is_floating_point() if isinstance(s, Tensor) else is_array and np.asarray(s).dtype.kind == "f"
    what = f"numbers of type {s.dtype}" if is_array else f"a {type(s).__name__}"
    shape, expected = tuple(getattr(s, "shape", ())), tuple(points.shape)
    tell("a call", is_changed=is_changed, is_real=is_real, what=what, shape=shape, expected=expected)


def in_double(score_fn: ScoreFunction | CarriesScore, n_features: int, device: torch.device | str = "cpu") -> Score:
    """Return the probed score of a function or target for float64 points, in float32 if it takes no others."""
    if isinstance(score_fn, Score):
        return score_fn.double
    score = _in_double(function_of(score_fn), n_features, None, torch.device(device))
    x = trial_points(score)
    _is_stable(score, x)
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
    first, second = (double(x[: N_TRIALS if frugal else 2 * N_TRIALS]) for _ in range(2))
    x, is_half = x[:N_TRIALS], double.step == HALF_STEP or _in_half(s)
    if is_half:
        score, double = replace(score, step=HALF_STEP), replace(double, step=HALF_STEP)
    tell("precision", is_half=is_half)
    differ = bool((first - second).abs().max() > 1e-3 * first.abs().max()) or not _is_stable(double, x)
    if double.score_vjp is not None:
        tell("two calls", differ=differ, is_lost=True)
    double, asymmetry = choose_product(double, products, x)
    tell("two calls", differ=differ, is_lost=double.by_differences)
    tell("a Jacobian", asymmetry=0.0 if differ else asymmetry)
    double.tally.is_random = differ
    size = first.abs().median(0).values
    if size.amax() > 1e12 * size.amin() > 0:  # scales that no search in units of one tells from zero
        double = replace(double, units=falls(double, x[0]))
    if dtype == torch.float64:
        return double
    double.tally.add(values=score.tally.n_values)
    own = None if double.score_vjp is None else score.score_vjp
    score = replace(score, score_vjp=own, by_differences=double.by_differences, units=double.units)
    return replace(score, in_double=double, tally=double.tally)


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
    if not s.isfinite().all(1).any():
        tell("rows", are_coupled=any(score(pair).isfinite().all() for pair in x.split(2)))
        x = 1e-6 * x  # as of exp(x[0] + x[1] * population)
        s = score(x)
    finite = s.isfinite().all(1)
    of_nan = ", but NaN (are there NaN in the data?)" * bool(s.isnan().any(1).all())
    tell("trial points", are_finite=finite.any(), n=2 * len(x), of_nan=of_nan)
    return x[finite], s[finite]


def _is_stable(score: Score, x: Tensor) -> bool:
    """Tell whether the rows of a score are the same each time; refuse them if they depend on each other.

    Points are evaluated in pairs and in large batches.
    """
    crowd = x.repeat(4, 1)
    in_pairs = torch.cat([score(pair) for pair in x.roll(1, 0).split(2)]).roll(-1, 0)
    # larger differences of rows are no rounding
    tolerance = {STEPS[torch.float64]: 1e-3, STEPS[torch.float32]: 1e-2}.get(score.step, 0.1) * in_pairs.abs().amax(0)
    s = score(crowd)
    if ((s - in_pairs.repeat(4, 1)).abs() <= tolerance).all():
        return True
    tell("rows", are_coupled=bool(((s - score(crowd)).abs() <= tolerance).all()))
    return False


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
