"""Draws in the containers of other libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sklearn.utils.validation import check_is_fitted

from skksivi._arrays import RandomState
from skksivi._version import __version__
from skksivi.base import BaseApproximator
from skksivi.targets._base import Target

if TYPE_CHECKING:
    from xarray import DataTree

__all__ = ["to_arviz"]


def to_arviz(
    est: BaseApproximator,
    n_samples: int = 1000,
    target: Target | None = None,
    *,
    coords: Mapping[str, Sequence[object]] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    random_state: RandomState = None,
) -> DataTree:
    """Draw from a fitted approximator and name the draws, for ArviZ.

    Parameters
    ----------
    est : approximator
        Fitted.
    n_samples : int, default=1000
        Number of draws. They are independent and all in one chain.
    target : Target, default=None
        What `est` was fitted to. One that has `constrain`, as those of `skksivi.targets.from_pymc` and its like have,
        gives the variables in the space of the model, and its own `coords` and `dims`. Without it the draws are one
        variable "x".
    coords : dict of str to sequence, default=None
        Labels along named dimensions; they come before those of `target`.
    dims : dict of str to sequence of str, default=None
        The names of the dimensions of variables, beside chain and draw; they come before those of `target`.
    random_state : int, RandomState or None, default=None
        As in `est.sample`.

    Returns
    -------
    data : xarray.DataTree
        With a group "posterior" of variables (1, n_samples, ...).

    Raises
    ------
    ImportError
        arviz-base is not installed.
    TypeError
        `est` is not an approximator.
    NotFittedError
        `est` is not fitted.
    ValueError
        `target` has another number of features than `est`.

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
    >>> data = to_arviz(Laplace(random_state=0).fit(target), 500, target)
    >>> data.posterior["b"].shape
    (1, 500)
    """
    try:
        import arviz_base
    except ImportError as error:
        raise ImportError("`to_arviz` needs arviz-base; install it: pip install 'skksivi[arviz]'.") from error
    if not isinstance(est, BaseApproximator):
        raise TypeError(f"`est` must be a fitted approximator, got a {type(est).__name__}.")
    check_is_fitted(est)
    d = getattr(target, "n_features", est.n_features_in_)
    if d != est.n_features_in_:
        raise ValueError(f"`target` has {d} features, expected {est.n_features_in_} as in `fit`.")
    X = est.sample(n_samples, random_state)
    variables = target.constrain(X) if target is not None and hasattr(target, "constrain") else {"x": X}
    return arviz_base.from_dict(
        {"posterior": {name: values[None] for name, values in variables.items()}},
        coords=_lists(getattr(target, "coords", {}), coords),
        dims=_lists(getattr(target, "dims", {}), dims),
        attrs={"posterior": {"inference_library": "skksivi", "inference_library_version": __version__}},
    )


def _lists(own: Mapping[str, Sequence[Any]], given: Mapping[str, Sequence[Any]] | None) -> dict[str, list[Any]]:
    """Return what is given and, by other names, what a target has."""
    return {name: list(values) for name, values in {**own, **(given or {})}.items()}
