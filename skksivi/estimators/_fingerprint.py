"""The fingerprint of a fit: one hash of its settings, its seed and the answers of its score.

Numbers are compared bit by bit, and a function by its values where a fit evaluates it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import joblib
import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from torch import Tensor

from skksivi._utils.arrays import as_array
from skksivi._version import __version__
from skksivi.coordinates._whitening import Whitening
from skksivi.kernels import resolve_kernel
from skksivi.score._score import Score
from skksivi.terms import Draws

#: Parameters in which a fit may differ from the one that it continues; seed and device are treated separately.
FREE = {"checkpoint", "device", "random_state", "verbose", "warm_start"}

#: Scales of the points at which a score is evaluated, and the number of points of each.
SCALES, N_OF_SCALE = (0.01, 0.1, 1.0, 10.0, 100.0), 3

#: Largest number of points, besides the origin, near which a score is evaluated.
N_NEAR = 4


def fingerprint(est: BaseEstimator, score: Score, seed: int, near: ArrayLike | None) -> str:
    """Return a hash of what a fit must share with the one that it continues.

    Raises
    ------
    ValueError
        A setting has no fingerprint, or the hash is another one when it is computed again.
    """
    first, again = (joblib.hash(list(_facts(est, score, seed, near))) for _ in range(2))
    if first != again:
        raise ValueError(
            "`checkpoint` cannot identify this fit: `score_fn`, or a function among the parameters, does not return "
            "the same for the same input. Make it do so, or leave `checkpoint` out."
        )
    return first


def _facts(est: BaseEstimator, score: Score, seed: int, near: ArrayLike | None) -> Iterator[object]:
    """Yield what identifies a fit: settings, then values of the score, the kernel and the terms."""
    yield from (__version__, score.device.type, score.n_features, seed, score.by_differences)
    settings = {name: value for name, value in est.get_params(deep=False).items() if name not in FREE}
    for name, value in settings.items():
        n = est.n_layers if name == "bridge" else est.max_iter
        yield name, described(name, value, () if name == "kernel" else [i / n for i in range(n)])
    yield from _answers(score, near)
    with torch.no_grad():
        z = _standard_normal(4 * len(SCALES), score.n_features)
        x = z * torch.tensor(SCALES, dtype=torch.float64).repeat(4)[:, None]
        yield as_array(resolve_kernel(est.kernel)(x, z.flip(0)))
        x = _normal_points(score).to(score.dtype)
        draws = Draws(x, score(x), score, torch.Generator(score.device).manual_seed(0))
        yield [as_array(term.gradient(draws, x.new_ones(()))) for term in settings.get("terms", ())]


def described(name: str, value: object, progress: Sequence[float] = ()) -> object:
    """Return numbers, names and lists of them that identify a setting, with functions by their values.

    Parameters
    ----------
    name : str
    value : object
    progress : sequence of float
        Where functions in it are evaluated; none leaves this to the object that they belong to.

    Raises
    ------
    ValueError
        It cannot be identified.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "__array__") and not (array := as_array(value)).dtype.hasobject:
        return array
    if isinstance(value, Sequence):
        return [described(name, item, progress) for item in value]
    if not (isinstance(value, BaseEstimator) or callable(value)):
        raise ValueError(
            f"`checkpoint` cannot identify `{name}`, a {type(value).__name__}; give a number, a string, an "
            "array, a function or an object with scikit-learn's parameters, or leave `checkpoint` out."
        )
    found: list[object] = [_number(value, t) for t in progress] if callable(value) else []
    if isinstance(value, BaseEstimator):
        found += [type(value).__module__, type(value).__qualname__]
        found += [(key, described(name, part, progress)) for key, part in value.get_params(deep=False).items()]
    return found


def _number(function: Callable[[float], object], t: float) -> float:
    """Return the value of a function as a float, or NaN if it is not a number, which a fit refuses later."""
    with suppress(TypeError, ValueError, RuntimeError):
        return float(function(t))  # type: ignore[arg-type]
    return float("nan")


# The answers of a score


def _answers(score: Score, near: ArrayLike | None) -> Iterator[np.ndarray]:
    """Yield values of a score, its products, its minibatches and its density, at points of several scales."""
    score, x = score.double, _points(score, near)
    asked = score
    if score.rewind is not None:  # a whole stream is compared near the fit
        asked = score.sketch()
        score.rewind(0)
    yield _known(asked(x), score)
    yield _known(asked.product(x, x.flip(0)), score)
    if score.minibatch is not None:
        yield _known(score.minibatch(torch.Generator(score.device).manual_seed(0))(x), score)
    if score.log_prob is not None:
        with suppress(Exception):  # fits that need the value report the error
            yield _known(score.log_prob(x).detach(), score)


def answers_at(score: Score, whitening: Whitening) -> str:
    """Return a checksum of the score's values at a fit."""
    score = whitening.straighten(score)
    x = whitening.map.unwhiten(_normal_points(score).to(whitening.map.m))
    modes = torch.from_numpy(np.array(whitening.modes[:N_NEAR])).to(x)
    return joblib.hash(_known(score.double(torch.cat([x, modes.reshape(-1, x.shape[1])])), score))


def _points(score: Score, near: ArrayLike | None) -> Tensor:
    """Return random points around the origin and others, of several scales, always the same."""
    d = score.n_features
    centres = torch.zeros(1, d, dtype=torch.float64)
    X = np.empty(0) if near is None else np.asarray(near, dtype=np.float64)
    if X.shape[-1] == d:  # other arrays are refused where they are used
        centres = torch.cat([centres, torch.from_numpy(X.reshape(-1, d)[:N_NEAR].copy())])
    scales = torch.tensor(SCALES, dtype=torch.float64).repeat_interleave(N_OF_SCALE)
    z = _standard_normal(len(scales), d)
    return (centres[:, None] + scales[:, None] * z).flatten(0, 1).to(score.device)


def _normal_points(score: Score) -> Tensor:
    return _standard_normal(len(SCALES) * N_OF_SCALE, score.n_features).to(score.device)


def _standard_normal(n: int, d: int) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _known(s: Tensor, score: Score) -> np.ndarray:
    """Return numbers s (n, ...), of ranks rounded to six digits of the largest, which do not depend on how many."""
    if score.rank is not None:
        size = s.abs().nan_to_num(0, 0, 0).reshape(len(s), -1).amax(1)
        unit = torch.exp2(size.log2().floor() - 20).view(-1, *[1] * (s.dim() - 1))  # a power of two, without rounding
        s = (s / unit).round() * unit
    return np.where(s.isnan().cpu(), np.nan, as_array(s))  # NaN of one sign
