"""Files of what is fitted: whole or not there, and read without trust."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from skksivi import annealing, baselines, kernels, mixing, parameters, terms
from skksivi._utils import codec
from skksivi._utils.arrays import resolve_device
from skksivi._utils.codec import MAX_BYTES, Kind, Kinds
from skksivi.amortized._estimator import AmortizedKSIVI
from skksivi.amortized._family import Conditional, DeepSets, SkipNetwork
from skksivi.base import BaseApproximator, check_draws
from skksivi.estimators import HKSIVIApproximator, KSIVIApproximator
from skksivi.estimators._checkpoint import PARTS
from skksivi.families import Certificate, Chains, Gaussian, Layer, Layers, Particles
from skksivi.families._derived import DefensiveMixture, Pooled, Refined, Reweighted, asks_for_score, with_score
from skksivi.pilot._log_density import Cells
from skksivi.predictors import KSIVIClassifier, KSIVIRegressor
from skksivi.predictors._process import Process
from skksivi.score._score import Score, ScoreFunction, is_target
from skksivi.score._tally import Stage
from skksivi.score._target import compared_score
from skksivi.targets._base import Target

__all__ = ["load", "save"]
__dir__ = __all__.copy

Estimator = BaseApproximator | KSIVIRegressor | KSIVIClassifier | AmortizedKSIVI

#: Learned attributes that the rest does not need, and a parameter of the machine: an untrusted file must not decide
#: where a later fit writes.
LEFT_OUT = {"approximator_", "target_", "checkpoint", "device_"}

#: Learned attributes whose names do not end in an underscore.
PRIVATE = {
    *("_seed", "_random_state", "_dtype_of_draws"),
    *("_X_mean", "_X_scale", "_y_mean", "_y_scale", "_n_units", "_process"),
    *("_of_sets", "_context_shape", "_reach", "_whitens"),
}


def _is_learned(name: str) -> bool:
    return name in PRIVATE or (name.endswith("_") and not name.startswith("_"))


def _parts(est: Estimator) -> dict[str, object]:
    """Return the parameters and what has been learned, without what the sampler shows."""
    shown = est.sampler_.attributes() if hasattr(est, "sampler_") else {}
    learned = {name: value for name, value in vars(est).items() if _is_learned(name)}
    parts = {**est.get_params(deep=False), **learned}
    own = {name for name in ("kernel_", "mixing_") if name in parts and not _is_known(parts[name])}
    return {name: value for name, value in parts.items() if name not in {*LEFT_OUT, *shown, *own}}


def _is_known(value: object) -> bool:
    return isinstance(value, str) or type(value) in {kind.cls for kind in KINDS.values()}


def _restored(cls: type[Any], **parts: object) -> Estimator:
    """Return an estimator of these parts, whose draws are finite."""
    learned = {name: parts.pop(name) for name in list(parts) if _is_learned(name) and not hasattr(cls, name)}
    est = cls(**parts)
    est._validate_params()
    vars(est).update(learned)
    if hasattr(est, "device"):
        est.set_params(device=_usable(est.device))
    if hasattr(est, "sampler_"):
        own = {"n_features_in_": est.sampler_.n_features, "device_": str(resolve_device(est.device))}
        vars(est).update({**est.sampler_.attributes(), **own})
        check_draws(est)
    return est


def kind_of(cls: type) -> Kind:
    """Return how objects of a class are saved: estimators with what they have learned, others by their parameters."""
    return Kind(cls, _parts, partial(_restored, cls)) if hasattr(cls, "fit") else codec.kind_of(cls)


def _named(*modules: Any) -> dict[str, Kind]:  # noqa: ANN401
    """Return the public classes of modules by their names, as kernels.Gaussian."""
    public = [
        (module.__name__.split(".")[-1], getattr(module, name)) for module in modules for name in module.__all__
    ]
    return {f"{module}.{cls.__name__}": kind_of(cls) for module, cls in public if isinstance(cls, type)}


#: The classes that a file may name, and those of them that are saved by themselves.
KINDS: Kinds = {
    **PARTS,
    "Score": Kind(Score, lambda _: {}, lambda: None),  # which `load` is given
    **_named(annealing, baselines, kernels, mixing, parameters, terms),
    **{
        cls.__name__: kind_of(cls)
        for cls in (
            *(KSIVIApproximator, HKSIVIApproximator, KSIVIRegressor, KSIVIClassifier, AmortizedKSIVI),
            *(Gaussian, Particles, Chains, Layer, Layers, Reweighted, DefensiveMixture, Refined, Pooled, Cells),
            *(Certificate, Stage, Process, SkipNetwork, Conditional, DeepSets),
        )
    },
}

ESTIMATORS = tuple(kind.cls for kind in KINDS.values() if hasattr(kind.cls, "fit"))


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
    if type(estimator) not in ESTIMATORS:
        raise _refusal(estimator)
    content = codec.pack(estimator, KINDS)
    _estimator(content)  # it can be read
    codec.write(codec.path_of(path), content)


def _refusal(value: object) -> TypeError:
    """Return the error that an object is none of those that can be saved, with what to save instead."""
    got = f"a {type(value).__name__}"
    if isinstance(value, type):
        got = f"the class {value.__name__}; pass an instance"
    elif is_target(value):
        got += ", a target, which is made anew from its code and data: save what was fitted to it"
    elif type(getattr(value, "best_estimator_", None)) in ESTIMATORS:
        got += "; save its `best_estimator_`"
    elif hasattr(value, "named_steps"):
        got += "; save its steps one by one"
    elif hasattr(value, "members"):
        got += "; save its `pooled`, or its `members`"
    return TypeError(
        "`estimator` must be KSIVIApproximator, HKSIVIApproximator, AmortizedKSIVI, KSIVIRegressor, KSIVIClassifier "
        f"or one of skksivi.baselines, fitted or not; got {got}."
    )


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
    est = codec.read(codec.path_of(path), _estimator, repr(str(path)), max_bytes)
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
    found = codec.unpack(content, KINDS, _device_of)
    if not isinstance(found, Estimator):
        raise ValueError("it holds no estimator")
    return found


def _device_of(state: Mapping[str, Any]) -> torch.device:
    """Return the device on which the tensors of an estimator belong."""
    device = state.get("device", "cpu")
    return resolve_device(_usable(device["name"] if isinstance(device, dict) else device))


def _usable(device: str | torch.device) -> str | torch.device:
    """Return the device, or "auto" where it is not present."""
    try:
        holds_numbers = resolve_device(device).type != "meta"
    except Exception:  # torch imports some kinds of devices, which fails in many ways
        holds_numbers = False
    return device if holds_numbers else "auto"
