"""Targets whose draws come back as parameters by their names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils import check_array
from torch import Tensor

from skksivi._utils.arrays import without_graph
from skksivi._utils.checks import check_integer
from skksivi.targets._base import Target


class NamedTarget(Target):
    """A target whose coordinates have names, and whose draws can be turned into the parameters of the user.

    Attributes
    ----------
    names : tuple of str
        Of the n_features coordinates, in the unconstrained space of the draws: "log(sd)", not "sd".
    coords, dims : dict
        Labels along named dimensions, and the dimensions of each parameter, where the model names them.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self.n_features = len(self.names)
        if not self.n_features:
            raise ValueError("The model has no continuous parameters, so there is nothing to approximate.")
        self.coords: Mapping[str, Sequence[object]] = {}
        self.dims: Mapping[str, Sequence[str]] = {}

    def constrain(self, X: ArrayLike) -> dict[str, np.ndarray]:
        """Turn draws into the parameters of the model, in the space where it defines them.

        Parameters
        ----------
        X : array-like of shape (n, n_features)
            Draws of an approximation to this target.

        Returns
        -------
        parameters : dict of str to ndarray of shape (n, ...)
            By name; what the model derives from its parameters included.

        Raises
        ------
        ValueError
            X has another number of columns, or holds non-finite values.
        """
        X = check_array(without_graph(X), dtype=np.float64, ensure_min_samples=0, input_name="X")
        if X.shape[1] != self.n_features:
            raise ValueError(f"`X` has {X.shape[1]} columns, expected {self.n_features} as the target has features.")
        if not len(X):  # what few libraries evaluate
            return {name: values[:0] for name, values in self._constrain(np.zeros((1, self.n_features))).items()}
        return self._constrain(X)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return itself: a score comes back on the device and in the dtype of its points."""
        return self

    @abstractmethod
    def _constrain(self, X: np.ndarray) -> dict[str, np.ndarray]:
        """Return the parameters of draws X (n, d), float64."""


class NamedPairs(ABC):
    """The posteriors of named parameters for all contexts, as `skksivi.AmortizedKSIVI` takes them.

    Attributes
    ----------
    n_features : int
    names : tuple of str
        Of the coordinates, in the unconstrained space of the draws.
    """

    def __init__(self, one: NamedTarget) -> None:
        self._one = one
        self.names, self.n_features = one.names, one.n_features

    @abstractmethod
    def score_fn(self, x: Tensor, y: Tensor) -> Tensor:
        """Evaluate the gradient of log p(x | y) in x at rows x (n, d) of contexts y (n, c)."""

    def constrain(self, X: ArrayLike) -> dict[str, np.ndarray]:
        """Turn draws (n, n_features) into parameters by name, as the target of one data set does."""
        return self._one.constrain(X)


class LogProbTarget(NamedTarget):
    """A target of a log-density in torch."""

    def __init__(self, log_prob: Callable[[Tensor], Tensor], n_features: int, names: Sequence[str] | None) -> None:
        super().__init__(coordinate_names({"x": (n_features,)}) if names is None else names)
        self._log_prob = log_prob
        self._is_named = names is not None

    def log_prob(self, x: Tensor) -> Tensor:
        """Evaluate log p at each row of x (n, d)."""
        return self._log_prob(x)

    def _constrain(self, X: np.ndarray) -> dict[str, np.ndarray]:
        return dict(zip(self.names, X.T, strict=True)) if self._is_named else {"x": X}


def from_log_prob(
    log_prob: Callable[[Tensor], Tensor], n_features: int, names: Sequence[str] | None = None
) -> LogProbTarget:
    """Make a target from a log-density in torch; its score is the gradient by automatic differentiation.

    Parameters
    ----------
    log_prob : callable
        The log-density at each row, up to a constant, (n, n_features) tensor -> (n,) tensor. Parameters with bounds
        must be transformed to the whole line first, with the log-Jacobian added, as `constrained` does.
    n_features : int
    names : sequence of str, default=None
        Names of the n_features coordinates, used by `constrain` and `skksivi.to_arviz`; by default one array "x".

    Returns
    -------
    target : Target

    Raises
    ------
    TypeError
        `log_prob` is not callable, or `n_features` not an integer.
    ValueError
        `names` are not n_features different strings.

    See Also
    --------
    constrained : A target of named parameters with bounds.
    from_jax : A target of a log-density in JAX.
    from_score_fn : A target of a bare score function.

    Examples
    --------
    >>> import torch
    >>> from skksivi.targets import from_log_prob
    >>> target = from_log_prob(lambda x: -x.pow(4).sum(1), n_features=2, names=["a", "b"])
    >>> target.score_fn(torch.tensor([[1.0, -0.5]]))
    tensor([[-4.0000,  0.5000]])
    >>> target.constrain([[1.0, 3.0], [2.0, 4.0]])
    {'a': array([1., 2.]), 'b': array([3., 4.])}
    """
    if not callable(log_prob):
        raise TypeError(f"`log_prob` must be callable, got a {type(log_prob).__name__}.")
    check_integer(n_features, "n_features", min_val=1)
    if names is not None and (isinstance(names, str) or not len(names) == len(set(names)) == n_features):
        raise ValueError(f"`names` must be {n_features} different strings, one for each coordinate; got {names!r}.")
    return LogProbTarget(log_prob, int(n_features), names)


def coordinate_names(
    shapes: Mapping[str, tuple[int, ...]], spaces: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return a name for each number of arrays of these shapes, such as "beta[2]" or "Sigma[0, 1]".

    `spaces` names what a coordinate is of a parameter with bounds: "log" or "logit" of each of its numbers, as in
    "log(sd[2])", or "unconstrained", as in "unconstrained(share)[0]".

    Raises
    ------
    TypeError
        `shapes` is no mapping, such as a target, which has its `names` or none.
    """
    if not isinstance(shapes, Mapping):
        got = type(shapes).__name__
        raise TypeError(f"`shapes` must be a dict of shapes by name, got a {got}; a target may have `names`.")
    spaces = spaces or {}
    return tuple(
        coordinate_name(name, spaces.get(name, ""), str(list(index)) if index else "")
        for name, shape in shapes.items()
        for index in np.ndindex(shape)
    )


def coordinate_name(name: str, space: str, index: str = "") -> str:
    """Return the name of one coordinate of a parameter in a space of `coordinate_names`."""
    if not space:
        return name + index
    return f"{space}({name}){index}" if space == "unconstrained" else f"{space}({name}{index})"
