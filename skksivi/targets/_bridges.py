"""Targets that other libraries evaluate, whose draws come back as the user's own parameters."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils import check_array
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx, once_differentiable

from skksivi._arrays import as_tensor, without_graph
from skksivi._numbers import check_integer
from skksivi.targets._base import Target

#: Held while a model evaluates that may use one buffer for all of its callers.
ONE_AT_A_TIME = threading.RLock()

#: What a model raises at points where it cannot be evaluated.
REJECTIONS = (ArithmeticError, RuntimeError, np.linalg.LinAlgError)


class NamedTarget(Target):
    """A target whose coordinates have names, and whose draws can be turned into the parameters of the user.

    Attributes
    ----------
    names : tuple of str
        Of the n_features coordinates, in the unconstrained space of the draws.
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


class ForeignTarget(NamedTarget):
    """A target without a graph; a leaf gives `_evaluate(X)`, which returns log p (n,) and its gradient (n, d).

    Its scores have the type of the points, or that in which the library computed them, whichever is coarser.

    What its `_compile()` returns is kept in `_compiled`; copies share it, and another process makes it again.
    """

    _compiled: object = None

    def _compile(self) -> object:
        return None

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_compiled"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._compiled = self._compile()

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def log_prob(self, x: Tensor) -> Tensor:
        """Evaluate log p at each row of x (n, d), up to a constant, with a graph for one derivative."""
        return _LogProb.apply(x, self._value_and_score)

    def score_fn(self, x: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of x (n, d), without a graph."""
        return self._value_and_score(x)[1]

    def _value_and_score(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not len(x):
            return x.new_zeros(0), x.detach().clone()
        with np.errstate(all="ignore"):  # modes are searched far out
            value, score = (as_tensor_like(a, x) for a in self._evaluate(x.detach().cpu().numpy()))
        # Outside its support a density often has a gradient of zero, as a mode has.
        return value, score.where(value.isfinite().unsqueeze(-1), torch.nan)

    @abstractmethod
    def _evaluate(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return log p (n,) and its gradient (n, d) at X (n, d)."""


class _LogProb(torch.autograd.Function):
    """A log-density whose gradient is known from elsewhere."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, value_and_score: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        value, score = value_and_score(x)
        ctx.save_for_backward(score)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: BackwardCFunction, gradient: Tensor) -> tuple[Tensor, None]:
        (score,) = ctx.saved_tensors
        return gradient.unsqueeze(-1) * score, None


class BlackBoxTarget(ForeignTarget):
    """A target of float64 functions that need not be safe to call from two threads, and may reject points.

    A leaf gives `_value_and_gradient(X)` and `_parameters(X)`.
    """

    def _evaluate(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with ONE_AT_A_TIME:
            return self._evaluate_or_nan(np.ascontiguousarray(X, dtype=np.float64))

    def _evaluate_or_nan(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return NaN for rejected rows, found by halving the batch."""
        try:
            return self._value_and_gradient(X)
        except REJECTIONS:
            if len(X) == 1:
                return np.full(1, np.nan), np.full((1, self.n_features), np.nan)
        (value, gradient), (more_values, more_gradients) = map(self._evaluate_or_nan, np.array_split(X, 2))
        return np.concatenate([value, more_values]), np.concatenate([gradient, more_gradients])

    def _constrain(self, X: np.ndarray) -> dict[str, np.ndarray]:
        with ONE_AT_A_TIME:
            return self._parameters(np.ascontiguousarray(X))

    @abstractmethod
    def _value_and_gradient(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return log p (n,) and its gradient (n, d) at X (n, d)."""

    @abstractmethod
    def _parameters(self, X: np.ndarray) -> dict[str, np.ndarray]:
        """Return the parameters of draws X (n, d)."""


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


class ModelPairs(NamedPairs):
    """The posteriors of a model of another library for all values of some of its data, the contexts.

    A leaf gives `_simulate(n, rng)`, which returns parameters (n, n_features) and the data of each.

    Attributes
    ----------
    example : dict of str to ndarray
        A value of each of these data, whose shapes and types hold for all.
    """

    def __init__(
        self, one: NamedTarget, example: Mapping[str, np.ndarray], observed: Mapping[str, str | None]
    ) -> None:
        super().__init__(one)
        self.example = dict(example)
        self._observed = dict(observed)  # the variable that each of them observes

    def contexts(self, **data: ArrayLike) -> np.ndarray:
        """Turn data into rows of contexts.

        Parameters
        ----------
        **data : array-like of shape (...) or (m, ...)
            Each by its name, once or m times.

        Returns
        -------
        Y : ndarray of shape (c,) or (m, c)

        Raises
        ------
        ValueError
            One is missing, unknown or of another shape than its example.
        """
        if data.keys() != self.example.keys():
            raise ValueError(f"`contexts` takes {', '.join(self.example)}; got {', '.join(data) or 'nothing'}.")
        rows = []
        for name, own in self.example.items():
            value = np.asarray(data[name], dtype=np.float64)
            lead = value.shape[: value.ndim - own.ndim]
            if len(lead) > 1 or value.shape != (*lead, *own.shape):
                raise ValueError(f"`{name}` has shape {value.shape}, expected {own.shape} or (m, *{own.shape}).")
            rows.append(value.reshape(*lead, own.size))
        return np.concatenate(rows, -1)

    def simulate(self, n: int, rng: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
        """Draw n parameters from the prior, and the contexts that they make.

        Parameters
        ----------
        n : int
        rng : RandomState

        Returns
        -------
        X : ndarray of shape (n, n_features)
        Y : ndarray of shape (n, c)

        Raises
        ------
        ValueError
            Some of the data are no observation, so that the model cannot make them.
        """
        if lost := [name for name, variable in self._observed.items() if variable is None]:
            raise ValueError(
                f"`data` has {', '.join(lost)}, which no single variable of the model observes, so that it cannot be "
                "simulated; give `contexts` to `fit`."
            )
        X, data = self._simulate(n, rng)
        return X, self.contexts(**data)

    @abstractmethod
    def _simulate(self, n: int, rng: np.random.RandomState) -> tuple[np.ndarray, Mapping[str, ArrayLike]]:
        """Return n parameters (n, n_features) and the data that each makes."""


def by_row(function: Callable[[np.ndarray], Sequence[ArrayLike]], X: np.ndarray) -> list[np.ndarray]:
    """Call a function on each row of X (n, d); return its outputs, each with an axis of length n in front."""
    outputs = [[np.array(one) for one in function(row)] for row in X]  # copies: it may use a buffer again
    return [np.stack(column) for column in zip(*outputs, strict=True)]


def as_tensor_like(a: ArrayLike, like: Tensor) -> Tensor:
    """Return a copy of an array, on the device of a tensor and in its type, if that is not finer than its own."""
    copied = as_tensor(np.array(a))
    return copied.to(device=like.device, dtype=min(like.dtype, copied.dtype, key=lambda dtype: dtype.itemsize))


def coordinate_names(shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Return a name for each number of arrays of these shapes, such as "beta[2]" or "Sigma[0, 1]"."""
    return tuple(
        name + (str(list(index)) if index else "") for name, shape in shapes.items() for index in np.ndindex(shape)
    )


def import_library(module: str, extra: str) -> ModuleType:
    """Import a module that is installed with one of the extras of this package."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"`{module}` could not be imported; install it: pip install 'skksivi[{extra}]'.") from error


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
