"""The score of a target or a bare function, in the dtype and on the device of the training, or by several workers."""

from __future__ import annotations

import math
import multiprocessing
import pickle
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, TypeGuard

import joblib
import numpy as np
import torch
from joblib import Parallel, delayed, parallel_config
from numpy.typing import ArrayLike
from torch import Tensor

from skksivi._utils.arrays import DTYPES, as_array, as_tensor, resolve_device
from skksivi._utils.checks import bridge_of, check_integer, check_number, warn_caller
from skksivi.score._domain import doubt_of
from skksivi.score._probe import resolve
from skksivi.score._score import (
    N_SKETCHED,
    BlackBox,
    CarriesScore,
    Parts,
    Score,
    ScoreFunction,
    ScoreWithProduct,
    Tally,
    UntriedScore,
    in_parts,
    is_target,
    of_its_kind,
    refuse_class,
)

#: What users pass to a fit.
TargetOrScore = CarriesScore | UntriedScore


class CarriesProduct(CarriesScore, Protocol):
    """A target that may have its own product with the Jacobian."""

    score_vjp: ScoreWithProduct | None


class Divided(CarriesProduct, Protocol):
    """A target that estimates its score from a part of its data."""

    n_rows: int
    batch_size: int

    def part(self, n: int, /) -> CarriesProduct: ...


def unwrapped(score_fn: TargetOrScore, n_features: int | None) -> tuple[ScoreFunction, int]:
    """Return the callable and the number of features of a target or a bare score function."""
    refuse_class(score_fn)
    if is_target(score_fn):
        own = getattr(score_fn, "n_features", None)
        if own is None:
            raise ValueError(f"`n_features` is missing from the target {type(score_fn).__name__}; set the attribute.")
        if n_features not in (None, own):
            raise ValueError(f"`n_features` is {n_features}, but the target has {own}; leave it out.")
        return score_fn.score_fn, check_integer(own, "n_features", min_val=1)
    if not callable(score_fn):
        is_data = hasattr(score_fn, "__array__") or (hasattr(score_fn, "__len__") and not isinstance(score_fn, str))
        of_data = bridge_of(score_fn) or " To fit a model to data use KSIVIRegressor or KSIVIClassifier." * is_data
        raise TypeError(
            f"`score_fn` must be a function (n, d) -> (n, d) giving the gradient of log p, or a Target; got a "
            f"{type(score_fn).__name__}.{of_data}"
        )
    if bridge := bridge_of(score_fn):
        raise TypeError(f"`score_fn` is a model, not the gradient of log p.{bridge}")
    if n_features is None:
        raise ValueError(
            "`n_features` is missing: a bare score function does not tell its dimension; call "
            "fit(score_fn, n_features=d)."
        )
    return score_fn, check_integer(n_features, "n_features", min_val=1)


def on_device(score_fn: TargetOrScore, *, device: torch.device, dtype: torch.dtype | None = None) -> TargetOrScore:
    """Return a target on another device or of another dtype; a function, even a module, is returned unchanged."""
    refuse_class(score_fn)
    to = getattr(score_fn, "to", None)
    return score_fn if to is None or not is_target(score_fn) else to(device=device, dtype=dtype)


def compared_score(
    score_fn: TargetOrScore, n_features: int, dtype: str, device: str | torch.device, draws: Tensor | None = None
) -> Score:
    """Return the probed score, for float64 points, of the target that a fit of so many features is compared with.

    Bounds are told only near to draws (n, d) that are given: a fit has told its own.
    """
    if not (is_target(score_fn) or callable(score_fn)):
        got = f"{type(score_fn).__name__}.{bridge_of(score_fn)}"
        raise TypeError(f"`target` must be a Target or its score function, got a {got}")
    d = unwrapped(score_fn, getattr(score_fn, "n_features", n_features))[1]
    if d != n_features:
        raise ValueError(f"the target has {d} features, expected {n_features} as in `fit`.")
    is_known, where = draws is None, resolve_device(device)  # the fit has asked more
    score = resolve_score(score_fn, d, dtype=DTYPES[dtype], device=where, warns=False, frugal=is_known)
    score.double.tally.is_frugal = False
    if (doubt := score.doubt) is not None and (doubt.ends is None or (draws is not None and doubt.concerns(draws))):
        warn_caller(doubt.words)
    return score.double


def resolve_score(
    score_fn: TargetOrScore,
    n_features: int | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    near: ArrayLike | None = None,
    warns: bool = True,
    frugal: bool = False,
) -> Score:
    """Return a probed score; the data of a target are moved to the device and dtype of the training.

    With `warns` a doubt about the target is a warning; otherwise the caller gives it.
    """
    in_types = {t: on_device(score_fn, device=device, dtype=t) for t in dict.fromkeys((dtype, torch.float64))}

    def in_type(dtype: torch.dtype) -> tuple[ScoreFunction, int, ScoreWithProduct | None]:
        target = _sketched(in_types[dtype])
        return *unwrapped(target, n_features), getattr(target, "score_vjp", None)

    d = unwrapped(score_fn, n_features)[1]
    points = _points(near, d)
    products = getattr(score_fn, "products", "auto")
    score = resolve(in_type, dtype=dtype, device=device, products=products, near=points, frugal=frugal)
    names = tuple(getattr(score_fn, "names", None) or ())

    def of_target(score: Score) -> Score:
        found = _of_target(score, in_types[score.dtype])
        found = replace(found, names=names if len(names) == d else (), advice=getattr(score_fn, "advice", ""))
        constrain, rank, prior_draws = (getattr(score_fn, at, None) for at in ("constrain", "rank", "prior_draws"))
        is_open = bool(getattr(getattr(score_fn, "target", score_fn), "up_to_constant", False))
        found = replace(found, up_to_constant=is_open, data=checksums_of_data(score_fn))
        return replace(found, constrain=constrain, rank=rank, prior_draws=prior_draws)

    double = None if score.in_double is None else of_target(score.in_double)
    score = replace(of_target(score), in_double=double, replicate=getattr(score_fn, "replicate", ()))
    doubt = doubt_of(score, points)
    if warns and doubt is not None:
        warn_caller(doubt.words)
    return replace(score, doubt=doubt)


def checksums_of_data(target: object) -> tuple[str, ...]:
    """Return a checksum of the number of rows and of the observed data of a target, whatever their names, shapes and
    order; of those that it shows.
    """
    observed = (getattr(target, "observed_data", None) or {}).values()
    y = np.sort(np.concatenate([[], *(np.ravel(a) for a in observed if np.asarray(a).dtype.kind in "biuf")]))
    n_rows = getattr(target, "n_rows", None)
    return (f"rows {n_rows}",) * (n_rows is not None) + (f"data {joblib.hash(y + 0.0)}",) * bool(len(y))


def _sketched(target: TargetOrScore) -> TargetOrScore:
    """Return the target given a few of many observations, with the same interface."""
    return target.part(N_SKETCHED) if is_divided(target) and target.n_rows > N_SKETCHED else target


def is_divided(target: object) -> TypeGuard[Divided]:
    """Tell whether a target can evaluate its score from a part of its data."""
    return hasattr(target, "part") and hasattr(target, "n_rows")


def _of_target(score: Score, target: TargetOrScore) -> Score:
    """Return a score of all of the data, with the density and the minibatches of its target, if it has them."""
    minibatch, log_prob = getattr(target, "minibatch", None), getattr(target, "log_prob", None)
    if is_divided(target):
        score = _like(score, target)
        parts = Parts(target.n_rows, target.batch_size, lambda n: _like(score, target.part(n)))
        score = replace(score, parts=parts)
    if minibatch is not None:
        rewind = getattr(target, "rewind", None)
        score = replace(score, minibatch=lambda generator: _like(score, minibatch(generator)), rewind=rewind)
    if log_prob is not None and isinstance(score.score_fn, BlackBox) and not isinstance(log_prob, BlackBox):
        log_prob = of_its_kind(log_prob, score.n_features)
    if log_prob is not None:
        score = replace(score, log_prob=partial(_counted, log_prob, score.dtype, score.tally))
    if (labels := getattr(target, "label_exchanges", None)) is not None:
        score = replace(score, labels=labels)
    return score


def _counted(log_prob: Callable[[Tensor], Tensor], dtype: torch.dtype, tally: Tally, x: Tensor) -> Tensor:
    """Return log p at points of the type that it takes, NaN where it raises; count the evaluation.

    It is a copy, because the next call may use the buffer of the last one.
    """
    tally.add(values=len(x))
    nothing = partial(torch.full_like, fill_value=torch.nan)
    parts = in_parts(lambda x: log_prob(x.to(dtype)).to(x, copy=True), x, lambda x: nothing(x[:, 0]), tally)
    return torch.cat(parts)


def _like(score: Score, part: CarriesProduct) -> Score:
    """Return the score of a part of the data, with the settings of the score of all of the data."""
    return score.like(part.score_fn, getattr(part, "score_vjp", None))


def _points(near: ArrayLike | None, d: int) -> Tensor | None:
    """Return points (k, d), or None if they are not points; the user of it refuses them."""
    if near is None:
        return None
    X = as_array(near).astype(np.float64)
    return as_tensor(X.reshape(-1, d)) if X.ndim in (1, 2) and X.shape[-1] == d else None


# An expensive score, by workers


class RefusedError(Exception):
    """Holds an error of the score itself, to distinguish it from a failure of a worker."""


class Chunk(NamedTuple):
    """Points X (k, d), from row `first` of n rows on."""

    X: np.ndarray
    first: int
    n: int

    def __str__(self) -> str:
        return f"the chunk of rows {self.first} to {self.first + len(self.X) - 1} of {self.n}"


@dataclass(eq=False)
class ByWorkers:
    """A score function that hands its points to workers, a chunk at a time.

    Chunks depend on the points alone, so the number of workers does not change any result. See
    `skksivi.targets.from_score_fn` for the parameters; the `name` is the user's, "log_prob" of a density.
    """

    score_fn: UntriedScore
    _: KW_ONLY
    n_jobs: int
    backend: str | None
    chunk_size: int
    timeout: float | None
    name: str = "score_fn"

    def __post_init__(self) -> None:
        if check_integer(self.n_jobs, "n_jobs", min_val=-(2**15)) == 0:
            raise ValueError("`n_jobs` is 0, expected a number of workers, or -1 for one per core.")
        if self.timeout is not None:
            check_number(self.timeout, "timeout", min_val=1e-3, max_val=math.inf)
        self.chunk_size = check_integer(self.chunk_size, "chunk_size", min_val=1)

    def __call__(self, x: Tensor | np.ndarray) -> Tensor | np.ndarray:
        """Evaluate the score at x (n, d): an array, or a tensor without a graph, as the function returns.

        Raises
        ------
        TimeoutError
            A chunk takes too long.
        ConnectionError
            A worker is lost.
        TypeError
            The function cannot be sent to another process, or returns neither a tensor nor an array.
        ValueError
            The scores of a chunk have another shape than its points, or there is no such backend.
        """
        with nullcontext() if self.backend is None else parallel_config(self.backend):
            run = Parallel(self.n_jobs, timeout=self.timeout, batch_size=1)  # raises if there is no such backend
        X, needs_graph = as_array(x), isinstance(x, Tensor) and x.requires_grad
        chunks = [Chunk(X[k : k + self.chunk_size], k, len(X)) for k in range(0, max(len(X), 1), self.chunk_size)]
        answer = delayed(partial(_answer, self.score_fn, self.name, isinstance(x, Tensor), needs_graph))
        try:
            found = run(answer(chunk) for chunk in chunks)
        except RefusedError as refused:
            raise refused.args[0] from None
        except pickle.PicklingError as error:
            raise TypeError(
                f"`{self.name}` cannot be sent to another process ({error}); define it in a module, let it load what "
                "cannot be pickled when it is first called, or set backend='threading'."
            ) from error
        except (TimeoutError, multiprocessing.TimeoutError) as error:
            raise TimeoutError(
                f"`{self.name}` did not return within `timeout` = {self.timeout} s for a chunk of "
                f"{self.chunk_size} rows; raise it, or see what the function does at these points."
            ) from error
        except Exception as error:  # of any backend
            raise ConnectionError(
                f"A worker that evaluated `{self.name}` was lost; it may have run out of memory. It said: "
                f"{textwrap.shorten(str(error), 200)}"
            ) from error
        if not isinstance(found[0], Tensor):
            return np.concatenate(found)
        return torch.cat([as_tensor(s) for s in found]).to(x.device if isinstance(x, Tensor) else "cpu")


def _answer(f: UntriedScore, name: str, of_tensors: bool, needs_graph: bool, chunk: Chunk) -> Tensor | np.ndarray:
    """Return the score at points, or raise RefusedError with the reason."""
    X = chunk.X.copy()  # joblib may have made it read-only
    try:
        with np.errstate(all="ignore"), torch.set_grad_enabled(needs_graph):
            s = f(torch.from_numpy(X).requires_grad_(needs_graph) if of_tensors else X)
        if not isinstance(s, Tensor | np.ndarray):
            raise TypeError(f"`{name}` returned a {type(s).__name__}, expected a torch tensor or an array.")
        if tuple(s.shape) != (expected := X.shape if name == "score_fn" else X.shape[:1]):
            raise ValueError(f"`{name}` returned shape {tuple(s.shape)} for {chunk}, expected {expected} as input.")
    except Exception as error:
        error.add_note(f"Raised for {chunk}.")
        raise RefusedError(error) from None
    return s.detach().cpu() if isinstance(s, Tensor) else s
