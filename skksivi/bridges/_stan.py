"""Targets of Stan models, by the interface of BridgeStan."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Protocol

import numpy as np

from skksivi.bridges._foreign import BlackBoxTarget, by_row
from skksivi.targets import coordinate_names


class StanModel(Protocol):
    """What a model must have; `from_bridgestan` says what it may have."""

    def log_density_gradient(self, theta: np.ndarray, /) -> tuple[float, np.ndarray]: ...
    def param_unc_num(self) -> int: ...


class StanTarget(BlackBoxTarget):
    """A target of a model with BridgeStan's methods, in Stan's unconstrained space."""

    def __init__(self, model: StanModel, *, include_tp: bool) -> None:
        names = getattr(model, "param_unc_names", None)
        super().__init__(_named(model, names()) if names else coordinate_names({"x": (model.param_unc_num(),)}))
        self._model = model
        self._options = {"include_tp": True} if include_tp else {}
        density: Callable[..., tuple[float, np.ndarray]] = model.log_density_gradient
        # BridgeStan drops constants by default, which `evidence` needs
        self._density = partial(density, propto=False) if "propto" in signature(density).parameters else density

    def _value_and_gradient(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        value, gradient = by_row(self._density, X)
        if gradient.shape != X.shape or value.shape != X.shape[:1]:
            raise ValueError(
                f"`model.log_density_gradient` returned shapes {value.shape[1:]} and {gradient.shape[1:]} for a "
                f"point of shape {X.shape[1:]}; expected a number and a gradient of that shape."
            )
        return value, gradient

    def _parameters(self, X: np.ndarray) -> dict[str, np.ndarray]:
        constrain, names = (getattr(self._model, name, None) for name in ("param_constrain", "param_names"))
        if constrain is None:
            return {"x": X}
        (numbers,) = by_row(lambda row: [constrain(row, **self._options)], X)
        return {"x": numbers} if names is None else _arrays(names(**self._options), numbers)


def _named(model: StanModel, names: list[str]) -> list[str]:
    """Return names of the coordinates that say what they are of the parameters, as two points tell."""
    constrain, of_parameters = (getattr(model, name, None) for name in ("param_constrain", "param_names"))
    if constrain is None or of_parameters is None:
        return names
    X = np.linspace([0.3] * len(names), [0.7] * len(names), 2) - 0.1 * np.arange(len(names)) / len(names)
    (numbers,) = by_row(lambda row: [constrain(row)], X)
    values = dict(zip(of_parameters(), numbers.T, strict=True))
    spaces = {"": X.T, "log": np.exp(X.T), "logit": 1 / (1 + np.exp(-X.T))}

    def space_of(i: int) -> str:
        value = values.get(names[i])
        fitting = (space for space, Y in spaces.items() if value is not None and np.allclose(value, Y[i], rtol=1e-10))
        return next(fitting, "unconstrained")

    return list(coordinate_names(dict.fromkeys(names, ()), {name: space_of(i) for i, name in enumerate(names)}))


def _arrays(names: list[str], numbers: np.ndarray) -> dict[str, np.ndarray]:
    """Gather columns (n, p) with names such as "Sigma.2.1" to arrays (n, ...); the first index runs fastest."""
    columns: dict[str, list[int]] = {}
    shapes = {}
    for j, name in enumerate(names):
        stem = re.sub(r"(\.\d+)+$", "", name)  # as of "Sigma.2.1"
        columns.setdefault(stem, []).append(j)
        shapes[stem] = tuple(map(int, name.removeprefix(stem).split(".")[1:]))
    return {
        stem: np.moveaxis(numbers[:, own].T.reshape((*shapes[stem], -1), order="F"), -1, 0)
        for stem, own in columns.items()
    }


def from_bridgestan(model: StanModel, *, include_tp: bool = False) -> StanTarget:
    """Make a target from a Stan model loaded by BridgeStan, or from an object with the same methods.

    Parameters
    ----------
    model : bridgestan.StanModel or object
        With ``log_density_gradient(theta)``, which returns log p and its gradient at one unconstrained point, an
        array (n_features,), and ``param_unc_num()``, the number of features. If the first takes ``propto``, as
        BridgeStan's does, it is False, so that log p has all of its constants. If it has them, ``param_names()`` and
        ``param_constrain(theta)``, and ``param_unc_names()``, are used too. A point at which it raises RuntimeError
        counts as outside the support.
    include_tp : bool, default=False
        Whether `constrain` also returns the transformed parameters.

    Returns
    -------
    target : Target
        Its `constrain` returns the parameters of the model as arrays by name.

    Raises
    ------
    TypeError
        `model` does not have the methods.
    ValueError
        It has no parameters.

    See Also
    --------
    from_pymc : A target of a PyMC model.
    skksivi.to_arviz : Named draws for ArviZ.

    References
    ----------
    Roualdes, E. et al. (2023). BridgeStan: efficient in-memory access to the methods of a Stan model.
    https://doi.org/10.21105/joss.05236

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from skksivi.targets import from_bridgestan
    >>> class LogNormal:  # instead of bridgestan.StanModel("model.stan", "data.json")
    ...     def param_unc_num(self):
    ...         return 1
    ...     def log_density_gradient(self, theta):
    ...         return -theta @ theta / 2, -theta
    ...     def param_constrain(self, theta):
    ...         return np.exp(theta)
    ...     def param_names(self):
    ...         return ["scale"]
    >>> target = from_bridgestan(LogNormal())
    >>> target.score_fn(torch.ones(1, 1))
    tensor([[-1.]])
    >>> target.constrain([[0.0]])
    {'scale': array([1.])}
    """
    for name in ("log_density_gradient", "param_unc_num"):
        if not callable(getattr(model, name, None)):
            raise TypeError(f"`model` must have a method `{name}`, as BridgeStan's models do; {model!r} has none.")
    return StanTarget(model, include_tp=include_tp)
