"""Files that are whole or not there, and read without trust."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import textwrap
from pathlib import Path
from typing import BinaryIO

import safetensors.torch
import torch
from torch import Tensor

from skksivi import baselines
from skksivi._arrays import resolve_device
from skksivi._codec import MAX_HEADER, decoded, encode, read_header
from skksivi.amortized._estimator import AmortizedKSIVI
from skksivi.amortized._files import check_conditional_draws, with_score_of_pairs
from skksivi.base import BaseApproximator, check_draws
from skksivi.estimators._hksivi import HKSIVIApproximator
from skksivi.estimators._ksivi import KSIVIApproximator
from skksivi.families._derived import asks_for_score, with_score
from skksivi.predictors import KSIVIClassifier, KSIVIRegressor
from skksivi.score._score import ScoreFunction
from skksivi.score._target import compared_score
from skksivi.targets._base import Target

#: Of the files that this version writes and reads.
FORMAT = "2"

#: Bytes of a file, at most, unless `load` is told otherwise.
MAX_BYTES = 2**32

#: What is saved; all other classes that a file may name come with these.
ESTIMATORS = (
    *(KSIVIApproximator, HKSIVIApproximator, *(getattr(baselines, name) for name in baselines.__all__)),
    *(KSIVIRegressor, KSIVIClassifier, AmortizedKSIVI),
)

Estimator = BaseApproximator | KSIVIRegressor | KSIVIClassifier | AmortizedKSIVI

#: Stands instead of a checksum while that is computed.
_NO_DIGEST = "0" * 64


def save(estimator: Estimator, path: str | os.PathLike[str]) -> None:
    """Save an estimator, fitted or not, without pickle.

    A new file is written and then renamed, so that an existing one stays intact if something fails.

    Parameters
    ----------
    estimator : KSIVIApproximator, HKSIVIApproximator, AmortizedKSIVI, one of `skksivi.baselines`, or a predictor
        A parameter that is a function, or an object of a class of your own, cannot be saved. `checkpoint` is left
        out, as are your own attributes and, for a predictor, `approximator_` and `target_`, which predictions do not
        need.
    path : path-like
        The file, replaced if it exists.

    Raises
    ------
    TypeError
        `estimator` is not of a class of this package, or a parameter cannot be saved.
    ValueError
        A parameter or what was learned is out of its range: not finite, or beyond 1e30 (9e18 in float32).
    OSError
        The file cannot be written.

    See Also
    --------
    load : Reads a file of `save`.
    skksivi.parameters.Checkpoint : The file from which an interrupted fit resumes.

    Examples
    --------
    >>> import skksivi, tempfile
    >>> q = skksivi.baselines.Laplace(random_state=0).fit(lambda x: 3 - x, n_features=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     skksivi.save(q, folder + "/q.safetensors")
    ...     skksivi.load(folder + "/q.safetensors").mean_
    array([3., 3.])
    """
    if type(estimator) not in ESTIMATORS:
        names = ", ".join(cls.__name__ for cls in ESTIMATORS)
        raise TypeError(f"`estimator` must be one of {names}, got {type(estimator).__name__}.")
    _replace(Path(os.path.realpath(path)), _to_bytes(estimator))


def load(
    path: str | os.PathLike[str], *, score_fn: Target | ScoreFunction | None = None, max_bytes: int = MAX_BYTES
) -> Estimator:
    """Load an estimator from a file written by `save`, without executing anything in it.

    Samples, log-densities, parameters and attributes are the same as in the saved estimator, bit for bit on the same
    device, and `sample` without a `random_state` continues where the saved one stopped.

    Parameters
    ----------
    path : path-like
    score_fn : callable or Target, default=None
        The target of the estimator; needed by estimators that sample with it, such as `HKSIVIApproximator` and those
        returned by `skksivi.refine`, and by `AmortizedKSIVI` for `target`, `diagnose` and `refine`.
    max_bytes : int, default=2**32
        Reject a larger file; reading takes up to three times its size in memory.

    Returns
    -------
    estimator : object
        With `device` set to "auto" if the saved device is not present.

    Raises
    ------
    ValueError
        The file was not written by `save`, is damaged or of another version, or its contents cannot be sampled.
    OSError
        The file cannot be opened or read.

    See Also
    --------
    save : Writes a fit to a file.
    """
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):  # opening a pipe would block
        raise ValueError(f"{str(path)!r} is not a regular file.")
    with open(path, "rb") as file:
        try:
            estimator = _read(file, max_bytes)
        except OSError:
            raise
        except Exception as error:
            known = isinstance(error, ValueError)
            reason = textwrap.shorten(str(error).rstrip(".") if known else f"it holds something else, {error!r}", 300)
            raise ValueError(f"{str(path)!r} is not a complete file of `skksivi.save`: {reason}.") from error
    if isinstance(estimator, AmortizedKSIVI):
        return with_score_of_pairs(estimator, score_fn)
    if score_fn is not None and hasattr(estimator, "sampler_") and asks_for_score(estimator.sampler_):
        estimator.sampler_ = with_score(
            estimator.sampler_,
            compared_score(
                score_fn,
                estimator.n_features_in_,
                estimator.dtype,
                estimator.device,
            ),
        )
    return estimator


def _replace(path: Path, data: bytes) -> None:
    """Replace an earlier file, or leave it as it is."""
    aside = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(aside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _to_bytes(estimator: Estimator) -> bytes:
    """Return the file of an estimator, one that can be read."""
    tensors: dict[str, Tensor] = {}
    state = json.dumps(encode(estimator, "", tensors))
    _checked(decoded(state, tensors, torch.device("cpu"), _estimator), "cpu")
    data = safetensors.torch.save(tensors, {"format": FORMAT, "state": state, "sha256": _NO_DIGEST})
    if (length := int.from_bytes(data[:8], "little")) > MAX_HEADER:
        raise ValueError(
            f"The parameters take {length} bytes, more than the {MAX_HEADER} that a file may have for them; make "
            "long lists numpy arrays."
        )
    return data.replace(_digest_field(_NO_DIGEST), _digest_field(_digest(data, _NO_DIGEST)), 1)


def _read(file: BinaryIO, max_bytes: int) -> Estimator:
    """Return the estimator of a file, whose claims are checked one after the other, the cheapest first."""
    size = os.fstat(file.fileno()).st_size
    if size > max_bytes:
        raise ValueError(f"it has {size} bytes, more than the {max_bytes} of `max_bytes`")
    start, about, plan = read_header(file, size)
    if about["format"] != FORMAT:
        raise ValueError(f"it has format {about['format']}, but this version of skksivi reads format {FORMAT}")
    device = _usable(getattr(decoded(about["state"], plan, torch.device("meta"), _estimator), "device", "cpu"))

    data = start + file.read(size - len(start))
    if _digest(data, about["sha256"]) != about["sha256"]:
        raise ValueError("its checksum is wrong, so that it is damaged")
    tensors = {name: x.clone() for name, x in safetensors.torch.load(data).items()}  # aligned, for the same rounding
    return _checked(decoded(about["state"], tensors, resolve_device(device), _estimator), device)


def _checked(estimator: Estimator, device: str | torch.device) -> Estimator:
    """Return an estimator that is whole, on a device; raise ValueError if a fit cannot be drawn from."""
    if isinstance(estimator, BaseApproximator):
        estimator.set_params(device=device)
        if hasattr(estimator, "sampler_"):
            check_draws(estimator)
            estimator.__dict__.update(estimator.sampler_.attributes())
    elif isinstance(estimator, AmortizedKSIVI):
        estimator.set_params(device=device)
        if hasattr(estimator, "family_"):
            check_conditional_draws(estimator)
    return estimator


def _estimator(value: object) -> Estimator:
    """Return an estimator; raise ValueError for anything else."""
    if not isinstance(value, Estimator):
        raise ValueError("it holds no estimator")
    return value


def _digest_field(digest: str) -> bytes:
    return f'"sha256":"{digest}"'.encode()


def _digest(data: bytes, digest: str) -> str:
    """Return the checksum of a file that holds `digest` as its own."""
    return hashlib.sha256(data.replace(_digest_field(digest), _digest_field(_NO_DIGEST), 1)).hexdigest()


def _usable(device: str | torch.device) -> str | torch.device:
    """Return the device, or "auto" where it is not present."""
    try:
        holds_numbers = resolve_device(device).type != "meta"
    except Exception:  # torch imports some kinds of devices, which fails in many ways
        holds_numbers = False
    return device if holds_numbers else "auto"
