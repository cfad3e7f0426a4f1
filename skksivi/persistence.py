"""Files of what is fitted: whole or not there, and read without trust."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from skksivi import baselines  # noqa: F401  # a file imports nothing: its classes must be there
from skksivi._utils import codec
from skksivi._utils.arrays import resolve_device
from skksivi._utils.codec import MAX_BYTES
from skksivi.amortized._estimator import AmortizedKSIVI
from skksivi.base import BaseApproximator, check_draws
from skksivi.families._derived import asks_for_score, with_score
from skksivi.predictors import KSIVIClassifier, KSIVIRegressor
from skksivi.score._score import Score, ScoreFunction
from skksivi.score._target import compared_score
from skksivi.targets._base import Target

__all__ = ["load", "save"]
__dir__ = __all__.copy

Estimator = BaseApproximator | KSIVIRegressor | KSIVIClassifier | AmortizedKSIVI

#: What predictions do not need, and what belongs to a machine: an untrusted file must not decide where a later fit
#: writes.
LEFT_OUT = {"approximator_", "target_", "checkpoint", "device_", "_score_fn"}


def _shown(value: Any) -> Any:  # noqa: ANN401
    """Return what is written of an object: of an estimator parameters and what was learned, of a score nothing."""
    if isinstance(value, Score):
        return None
    if not isinstance(value, Estimator):
        return value
    parameters, left_out, written = value.get_params(deep=False), set(LEFT_OUT), object.__new__(type(value))
    if hasattr(value, "sampler_"):
        left_out |= value.sampler_.attributes().keys()
    left_out |= {name for name in ("kernel_", "mixing_") if not codec.is_known(getattr(value, name, ""))}
    learned = {name: part for name, part in vars(value).items() if name[0] == "_" or name[-1] == "_"}
    written.__dict__.update({name: part for name, part in {**parameters, **learned}.items() if name not in left_out})
    return written


def _checked(value: Any) -> Any:  # noqa: ANN401
    """Return an estimator with all parameters, on a device that is present; its draws are finite."""
    if not isinstance(value, Estimator):
        return value
    own: dict[str, Any] = value.__dict__
    if not own.keys().isdisjoint(LEFT_OUT):
        raise ValueError(f"it holds {', '.join(own.keys() & LEFT_OUT)}, which is never saved")
    own.update({**type(value)().get_params(deep=False), **own})
    value._validate_params()  # noqa: SLF001
    if "device" in own:
        own["device"] = _usable(str(value.device))
    if "sampler_" in own:
        device = str(resolve_device(value.device))
        own.update(value.sampler_.attributes(), n_features_in_=value.sampler_.n_features, device_=device)
        check_draws(value)
    return value


def save(estimator: Estimator, path: str | os.PathLike[str]) -> None:
    """Save an estimator, fitted or not, without pickle.

    A new file is written and then renamed, so that an existing one stays intact if something fails.

    Parameters
    ----------
    estimator : KSIVIApproximator, HKSIVIApproximator, AmortizedKSIVI, one of `skksivi.baselines`, or a predictor
        A parameter that is a function, or an object of a class of your own, cannot be saved. `checkpoint` is left
        out, as are your own attributes, a `kernel_` or `mixing_` of a class of yours and, for a predictor,
        `approximator_` and `target_`, which predictions do not need.
    path : path-like
        The file, replaced if it exists. A device or a pipe is not.

    Raises
    ------
    TypeError
        `estimator` is not of a class of this package, a parameter cannot be saved, or `path` is no path.
    ValueError
        A parameter is out of its range, or draws of the fit are not finite.
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
    if not (isinstance(estimator, Estimator) and codec.is_known(estimator)):
        raise TypeError(
            "`estimator` must be KSIVIApproximator, HKSIVIApproximator, AmortizedKSIVI, KSIVIRegressor, "
            f"KSIVIClassifier or one of skksivi.baselines, fitted or not; got {estimator!r:.80}. Save the "
            "`best_estimator_` of a search, the steps of a pipeline, and what was fitted to a target."
        )
    content = codec.pack(estimator, _shown)
    _estimator(content)  # it can be read
    codec.write(Path(path), content)


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
    TypeError
        `path` is no path.
    ValueError
        The file was not written by `save`, is damaged or of another version, or its contents cannot be sampled.
    OSError
        The file cannot be opened or read.

    See Also
    --------
    save : Writes a fit to a file.
    """
    est = codec.read(Path(path), _estimator, repr(str(path)), max_bytes)
    if isinstance(est, AmortizedKSIVI):
        score_fn = getattr(score_fn, "score_fn", score_fn)
        if not (score_fn is None or callable(score_fn)):
            raise TypeError(f"`score_fn` must be a function of pairs (x, y), got a {type(score_fn).__name__}.")
        est.__dict__["_score_fn"] = score_fn
    elif score_fn is not None and hasattr(est, "sampler_") and asks_for_score(est.sampler_):
        score = compared_score(score_fn, est.n_features_in_, est.dtype, est.device_)
        est.sampler_ = with_score(est.sampler_, score)
    return est


def _estimator(content: bytes) -> Estimator:
    found = codec.unpack(
        content, lambda state: resolve_device(_usable(state["state"].get("device", "cpu"))), _checked
    )
    if not isinstance(found, Estimator):
        raise ValueError("it holds no estimator")
    return found


def _usable(device: str) -> str:
    """Return the device, or "auto" where it is not present."""
    try:
        holds_numbers = resolve_device(device).type != "meta"
    except Exception:  # torch imports some kinds of devices, which fails in many ways
        holds_numbers = False
    return device if holds_numbers else "auto"
