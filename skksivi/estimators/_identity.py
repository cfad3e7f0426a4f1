"""The identity of a fit: its settings, its seed, and the values of its functions and its score.

Numbers are compared bit by bit. A function is identified by its values where a fit evaluates it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from torch import Tensor

from skksivi._arrays import as_array
from skksivi.kernels import Kernel
from skksivi.pilot._whitening import Whitening
from skksivi.score._score import Score
from skksivi.stein._estimators import GradientEstimator
from skksivi.stein._fused import value_and_gradients
from skksivi.terms import Draws, Term

#: Parameters in which a fit may differ from the one that it continues; seed and device are treated separately.
FREE = {"checkpoint", "device", "random_state", "verbose", "warm_start"}

#: Scales of the points at which a score is evaluated, and the number of points of each.
SCALES, N_OF_SCALE = (0.01, 0.1, 1.0, 10.0, 100.0), 3

#: Largest number of points, besides the origin, near which a score is evaluated.
N_NEAR = 4

#: Number of letters of a setting that are shown.
N_SHOWN = 100


def checksum(*arrays: ArrayLike | Tensor) -> str:
    """Return a text that identifies numbers by their bits, dtypes and shapes; all NaN are equal."""
    digest = hashlib.sha256()
    for array in map(as_array, arrays):
        if array.dtype.kind == "f":
            array = np.where(np.isnan(array), np.nan, array).astype(array.dtype)
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def described(name: str, value: object, progress: Sequence[float] | None) -> str:
    """Return a text that identifies a setting.

    Parameters
    ----------
    name : str
    value : object
    progress : sequence of float or None
        Where functions in it are evaluated; None leaves this to the object that they belong to.

    Raises
    ------
    ValueError
        It cannot be identified.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return _shortened(repr(value))
    if hasattr(value, "__array__"):
        return _of_array(name, as_array(value))
    if isinstance(value, Sequence):
        return _shortened(f"[{', '.join(described(name, item, progress) for item in value)}]")
    if isinstance(value, BaseEstimator):
        parts = [f"{key}={described(name, part, progress)}" for key, part in value.get_params(deep=False).items()]
        parts += [_of_function(value, progress)] if callable(value) and progress is not None else []
        return _shortened(f"{type(value).__module__}.{type(value).__qualname__}({', '.join(parts)})")
    if callable(value):
        return "a function" if progress is None else _of_function(value, progress)
    raise ValueError(
        f"`checkpoint` cannot identify `{name}`, a {type(value).__name__}; give a number, a string, an "
        "array, a function or an object with scikit-learn's parameters, or leave `checkpoint` out."
    )


def _of_array(name: str, array: np.ndarray) -> str:
    if array.dtype.hasobject:
        raise ValueError(f"`checkpoint` cannot identify `{name}`, an array of objects; give an array of numbers.")
    return f"an array {array.shape} with checksum {checksum(array)}"


def _of_function(function: Callable[[float], object], progress: Sequence[float]) -> str:
    values = [_number(function(t)) for t in progress]
    return f"a function from {values[0]:.3g} to {values[-1]:.3g} with checksum {checksum(values)}"


def _number(value: object) -> float:
    """Return the value of a function as a float, or NaN if it is not a number, which a fit refuses later."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return float("nan")


def _shortened(text: str) -> str:
    if len(text) <= N_SHOWN:
        return text
    return f"{text[:N_SHOWN]}... with checksum {hashlib.sha256(text.encode()).hexdigest()[:16]}"


# The values of a score, a kernel and the terms


def points(score: Score, near: ArrayLike | None) -> Tensor:
    """Return random points around the origin and others, of several scales, always the same."""
    d = score.n_features
    centres = torch.zeros(1, d, dtype=torch.float64)
    X = np.empty(0) if near is None else np.asarray(near, dtype=np.float64)
    if X.shape[-1] == d:  # other arrays are refused where they are used
        centres = torch.cat([centres, torch.from_numpy(X.reshape(-1, d)[:N_NEAR].copy())])
    z = _standard_normal(len(SCALES) * N_OF_SCALE, d)
    scales = torch.tensor(SCALES, dtype=torch.float64).repeat_interleave(N_OF_SCALE)
    return (centres[:, None] + scales[:, None] * z).flatten(0, 1).to(score.device)


def _standard_normal(n: int, d: int) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def of_score(score: Score, near: ArrayLike | None) -> dict[str, str]:
    """Return the values of a score, its products, its density and its minibatches, as texts by name."""
    score, x = score.double, points(score, near)
    asked = score
    if score.rewind is not None:  # a whole stream is compared near the fit
        asked = score.sketch()
        score.rewind(0)
    noise = torch.Generator(score.device).manual_seed(0)
    return {
        "score_fn at random points": checksum(_known(asked(x), score)),
        "products of score_fn at random points": f"{checksum(_known(asked.product(x, x.flip(0)), score))}, by "
        f"differences: {score.by_differences}",
        "log_prob at random points": _differences(score, x),
        "minibatches": "none" if score.minibatch is None else checksum(score.minibatch(noise)(x)),
    }


def _known(s: Tensor, score: Score) -> Tensor:
    """Return numbers s (n, ...) rounded to six digits of the largest, which do not depend on the number of ranks."""
    if score.rank is None:
        return s
    size = s.abs().nan_to_num(0, 0, 0).reshape(len(s), -1).amax(1)
    unit = torch.exp2(size.log2().floor() - 20).view(-1, *[1] * (s.dim() - 1))  # a power of two, without rounding
    return (s / unit).round() * unit


def _differences(score: Score, x: Tensor) -> str:
    if score.log_prob is None:
        return "none"
    try:
        return checksum(_known(score.log_prob(x).detach(), score))
    except Exception as error:  # fits that need the value report the error
        return type(error).__name__


def of_score_near(score: Score, whitening: Whitening) -> str:
    """Return a checksum of the score's values at the fit."""
    u = _standard_normal(len(SCALES) * N_OF_SCALE, score.n_features).to(whitening.map.m)
    x = whitening.map.unwhiten(u)
    modes = torch.from_numpy(np.array(whitening.modes[:N_NEAR])).to(x)
    return checksum(_known(score.double(torch.cat([x, modes.reshape(-1, x.shape[1])])), score))


@torch.no_grad()
def of_kernel(kernel: Kernel, estimator: GradientEstimator, d: int) -> str:
    """Return a checksum of the discrepancy of random points, and its gradients."""
    z = _standard_normal(4 * len(SCALES), d)
    x = z * torch.tensor(SCALES, dtype=torch.float64).repeat(4)[:, None]
    return checksum(*value_and_gradients(x, z.flip(0), kernel, estimator))


@torch.no_grad()
def of_terms(terms: Sequence[Term], score: Score) -> str:
    """Return a checksum of the gradients of terms at random points."""
    x = _standard_normal(len(SCALES) * N_OF_SCALE, score.n_features).to(score.device, score.dtype)
    draws = Draws(x, score(x), score, torch.Generator(score.device).manual_seed(0))
    return checksum(*(term.gradient(draws, x.new_ones(())) for term in terms))


def settled(ask: Callable[[], Mapping[str, str]]) -> dict[str, str]:
    """Return settings that stay the same when computed again.

    Raises
    ------
    ValueError
        A setting differs the second time.
    """
    first, again = ask(), ask()
    for name in first:
        if first[name] != again[name]:
            raise ValueError(
                f"`checkpoint` cannot identify this fit: {name} changes when it is computed again. "
                "Make the function behind it return the same for the same input, or leave `checkpoint` out."
            )
    return dict(first)
