"""The identity of a fit: its settings, its seed, and the values of its functions and its score.

Numbers are compared bit by bit. A function is identified by its values where a fit evaluates it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from torch import Tensor

from skksivi._utils.arrays import as_array
from skksivi._version import __version__
from skksivi.coordinates._whitening import Whitening
from skksivi.kernels import Kernel, resolve_kernel
from skksivi.score._score import Score
from skksivi.terms import Draws, Term

#: Parameters in which a fit may differ from the one that it continues; seed and device are treated separately.
FREE = {"checkpoint", "device", "random_state", "verbose", "warm_start"}

#: Scales of the points at which a score is evaluated, and the number of points of each.
SCALES, N_OF_SCALE = (0.01, 0.1, 1.0, 10.0, 100.0), 3

#: Largest number of points, besides the origin, near which a score is evaluated.
N_NEAR = 4


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
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if hasattr(value, "__array__") and not (array := as_array(value)).dtype.hasobject:
        return f"an array {array.shape} with checksum {checksum(array)}"
    if isinstance(value, Sequence):
        return f"[{', '.join(described(name, item, progress) for item in value)}]"
    if isinstance(value, BaseEstimator):
        parts = [f"{key}={described(name, part, progress)}" for key, part in value.get_params(deep=False).items()]
        parts += [_of_function(value, progress)] if callable(value) and progress is not None else []
        return f"{type(value).__module__}.{type(value).__qualname__}({', '.join(parts)})"
    if callable(value):
        return "a function" if progress is None else _of_function(value, progress)
    raise ValueError(
        f"`checkpoint` cannot identify `{name}`, a {type(value).__name__}; give a number, a string, an "
        "array, a function or an object with scikit-learn's parameters, or leave `checkpoint` out."
    )


def _of_function(function: Callable[[float], object], progress: Sequence[float]) -> str:
    values = [_number(function(t)) for t in progress]
    return f"a function from {values[0]:.3g} to {values[-1]:.3g} with checksum {checksum(values)}"


def _number(value: object) -> float:
    """Return the value of a function as a float, or NaN if it is not a number, which a fit refuses later."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return float("nan")


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


def of_score(score: Score, near: ArrayLike | None) -> str:
    """Return a text that identifies the values of a score, its products, its density and its minibatches."""
    score, x = score.double, points(score, near)
    asked, noise = score, torch.Generator(score.device).manual_seed(0)
    if score.rewind is not None:  # a whole stream is compared near the fit
        asked = score.sketch()
        score.rewind(0)
    answers, failure = [asked(x), asked.product(x, x.flip(0))], ""
    if score.minibatch is not None:
        answers.append(score.minibatch(noise)(x))
    try:
        answers += [] if score.log_prob is None else [score.log_prob(x).detach()]
    except Exception as error:  # fits that need the value report the error
        failure = type(error).__name__
    return f"{checksum(*(_known(a, score) for a in answers))} {score.by_differences} {failure}"


def _known(s: Tensor, score: Score) -> Tensor:
    """Return numbers s (n, ...) rounded to six digits of the largest, which do not depend on the number of ranks."""
    if score.rank is None:
        return s
    size = s.abs().nan_to_num(0, 0, 0).reshape(len(s), -1).amax(1)
    unit = torch.exp2(size.log2().floor() - 20).view(-1, *[1] * (s.dim() - 1))  # a power of two, without rounding
    return (s / unit).round() * unit


def of_score_near(score: Score, whitening: Whitening) -> str:
    """Return a checksum of the score's values at the fit."""
    score, u = whitening.straighten(score), _standard_normal(len(SCALES) * N_OF_SCALE, score.n_features)
    x = whitening.map.unwhiten(u.to(whitening.map.m))
    modes = torch.from_numpy(np.array(whitening.modes[:N_NEAR])).to(x)
    return checksum(_known(score.double(torch.cat([x, modes.reshape(-1, x.shape[1])])), score))


@torch.no_grad()
def of_kernel(kernel: Kernel, d: int) -> str:
    """Return a checksum of the values of a kernel at random points."""
    z = _standard_normal(4 * len(SCALES), d)
    x = z * torch.tensor(SCALES, dtype=torch.float64).repeat(4)[:, None]
    return checksum(kernel(x, z.flip(0)))


@torch.no_grad()
def of_terms(terms: Sequence[Term], score: Score) -> str:
    """Return a checksum of the gradients of terms at random points."""
    x = _standard_normal(len(SCALES) * N_OF_SCALE, score.n_features).to(score.device, score.dtype)
    draws = Draws(x, score(x), score, torch.Generator(score.device).manual_seed(0))
    return checksum(*(term.gradient(draws, x.new_ones(())) for term in terms))


def identity(est: BaseEstimator, score: Score, seed: int, near: ArrayLike | None) -> str:
    """Return a checksum of what a fit must share with the one that it continues.

    Raises
    ------
    ValueError
        It cannot be identified, or is not the same when it is computed again.
    """
    first, again = (_parts_of_identity(est, score, seed, near) for _ in range(2))
    changed = [name for name in first if first[name] != again[name]]
    if changed:
        raise ValueError(
            f"`checkpoint` cannot identify this fit: {changed[0]} changes when it is computed again. Make the "
            "function behind it return the same for the same input, or leave `checkpoint` out."
        )
    return hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()


def _parts_of_identity(est: BaseEstimator, score: Score, seed: int, near: ArrayLike | None) -> dict[str, str]:
    parameters = est.get_params(deep=False)

    def progress(name: str) -> list[float] | None:
        """Return where the functions in a parameter are evaluated during a fit; None if not by progress."""
        n = est.n_layers if name == "bridge" else est.max_iter
        return None if name == "kernel" else [i / n for i in range(n)]

    return {
        **{name: described(name, value, progress(name)) for name, value in parameters.items() if name not in FREE},
        "score_fn at random points": of_score(score, near),
        "kernel at random points": of_kernel(resolve_kernel(est.kernel), score.n_features),
        "terms at random points": of_terms(parameters.get("terms", ()), score),
        "seed": str(seed),
        "n_features": str(score.n_features),
        "device": score.device.type,
        "version": __version__,
    }
