"""Draws in the containers of other libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from skksivi._utils.arrays import RandomState
from skksivi._version import __version__
from skksivi.base import BaseApproximator, check_fit
from skksivi.targets import Target

if TYPE_CHECKING:
    from arviz import InferenceData
    from xarray import DataTree

__all__ = ["to_arviz"]
__dir__ = __all__.copy

#: Chains that independent draws are cut into, at most, and draws that each must have for the statistics of ArviZ.
N_CHAINS, N_DRAWS = 4, 4


def to_arviz(
    est: BaseApproximator,
    target: Target | None = None,
    n_samples: int = 1000,
    *,
    coords: Mapping[str, Sequence[object]] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    random_state: RandomState = None,
) -> DataTree | InferenceData:
    """Draw from a fitted approximator and name the draws, for ArviZ.

    Parameters
    ----------
    est : approximator
        Fitted.
    target : Target, default=None
        The target of `est`. If it has `constrain`, as targets of `skksivi.targets.from_pymc` do, the variables are in
        the space of the model, with its `coords` and `dims`. Without a target the draws are one variable "x".
    n_samples : int, default=1000
        Number of draws. They are independent, and are divided into chains of equal length, which ArviZ compares: up
        to four, as many as divide their number.
    coords : dict of str to sequence, default=None
        Labels along named dimensions; they take precedence over the labels of `target`.
    dims : dict of str to sequence of str, default=None
        The names of the dimensions of variables, beside chain and draw; they take precedence over the names of
        `target`.
    random_state : int, RandomState or None, default=None
        As in `est.sample`.

    Returns
    -------
    data : xarray.DataTree or arviz.InferenceData
        The format of the installed ArviZ: an InferenceData if the package ``arviz`` is installed and older than 1.
        Both have a group "posterior" of variables (chain, draw, ...).

    Raises
    ------
    ImportError
        arviz-base is not installed.
    TypeError
        `est` is not an approximator, or `target` not its target, such as a number, which is `n_samples`.
    NotFittedError
        `est` is not fitted.
    ValueError
        `target` has another number of features than `est`.

    See Also
    --------
    skksivi.targets.from_pymc : A target of a PyMC model.
    skksivi.targets.from_numpyro : A target of a NumPyro model.
    skksivi.targets.from_bridgestan : A target of a Stan model.

    References
    ----------
    Kumar, R. et al. (2019). ArviZ a unified library for exploratory analysis of Bayesian models in Python.
    https://doi.org/10.21105/joss.01143

    Examples
    --------
    >>> from skksivi import to_arviz
    >>> from skksivi.baselines import Laplace
    >>> from skksivi.targets import from_log_prob
    >>> target = from_log_prob(lambda x: -x.square().sum(1) / 2, n_features=2, names=["a", "b"])
    >>> data = to_arviz(Laplace(random_state=0).fit(target), target)
    >>> data.posterior["b"].shape
    (4, 250)
    """
    try:
        import arviz_base
    except ImportError as error:
        raise ImportError("`to_arviz` needs arviz-base; install it: pip install 'skksivi[arviz]'.") from error
    check_fit(est, target)
    if isinstance(target, Integral):
        raise TypeError(f"`target` is a number, expected a target; write n_samples={target}.")
    if not (target is None or hasattr(target, "score_fn") or callable(target)) or isinstance(target, type):
        raise TypeError(f"`target` must be a Target, the one of `est`, got a {type(target).__name__}.")
    d = getattr(target, "n_features", est.n_features_in_)
    if d != est.n_features_in_:
        raise ValueError(f"`target` has {d} features, expected {est.n_features_in_} as in `fit`.")
    X = est.sample(n_samples, random_state)
    variables = target.constrain(X) if target is not None and hasattr(target, "constrain") else {"x": X}
    tree = arviz_base.from_dict(
        {"posterior": {name: _in_chains(values) for name, values in variables.items()}},
        coords=_lists(getattr(target, "coords", {}), coords),
        dims=_lists(getattr(target, "dims", {}), dims),
        attrs={"posterior": {"inference_library": "skksivi", "inference_library_version": __version__}},
    )
    return _as_installed(tree)


def _in_chains(values: np.ndarray) -> np.ndarray:
    """Cut independent draws (n, ...) into chains of equal length (n_chains, n / n_chains, ...)."""
    n = len(values)
    n_chains = next((k for k in range(N_CHAINS, 1, -1) if n % k == 0 and n >= k * N_DRAWS), 1)
    return values.reshape(n_chains, n // n_chains, *values.shape[1:])


def _as_installed(tree: DataTree) -> DataTree | InferenceData:
    """Return an InferenceData for ArviZ 0, whose functions take no tree; those of ArviZ 1 take both."""
    if find_spec("arviz") is None:
        return tree
    import arviz

    if int(arviz.__version__.partition(".")[0]) >= 1:
        return tree
    return arviz.InferenceData(posterior=tree["posterior"].to_dataset())


def _lists(own: Mapping[str, Sequence[Any]], given: Mapping[str, Sequence[Any]] | None) -> dict[str, list[Any]]:
    """Return what is given and, by other names, what a target has."""
    return {name: list(values) for name, values in {**own, **(given or {})}.items()}
