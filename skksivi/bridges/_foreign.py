"""Targets that other libraries evaluate, whose draws come back as the user's own parameters, and those of Stan."""

from __future__ import annotations

import math
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx, once_differentiable

from skksivi._utils.arrays import as_tensor
from skksivi.targets import NamedTarget, Shares, coordinate_name, coordinate_names

#: Held while a model evaluates that may use one buffer for all of its callers.
ONE_AT_A_TIME = threading.RLock()


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

    def prior_draws(self, n: int, seed: int) -> np.ndarray:
        """Draw at most n points (k, d) from the prior of the model, none from one that is improper, or unknown."""
        try:
            X = np.asarray(self._from_prior(n, seed), dtype=np.float64)
        except Exception:  # whatever a library says of a flat prior, which has no draws
            return np.empty((0, self.n_features))
        return X[np.isfinite(X).all(1)]

    def _from_prior(self, _n: int, _seed: int) -> np.ndarray:
        return np.empty((0, self.n_features))

    @abstractmethod
    def _evaluate(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return log p (n,) and its gradient (n, d) at X (n, d)."""


class HasData(ABC):
    """A target of a model that knows its data; it has the optional methods of `skksivi.targets.Target`.

    Attributes
    ----------
    observed_data, constant_data : dict of str to array
        What the model observes, and what else it is given.
    """

    observed_data: Mapping[str, ArrayLike]
    constant_data: Mapping[str, ArrayLike]

    def log_likelihood(self, x: Tensor) -> dict[str, np.ndarray]:
        """Evaluate the log-density of each observation at rows of x (n, d): arrays (n, ...) by name."""
        return self.densities(x, observed=True)

    def log_prior(self, x: Tensor) -> dict[str, np.ndarray]:
        """Evaluate the log-densities of the parameters of the model, given those above them, as arrays (n, ...)."""
        return self.densities(x, observed=False)

    @abstractmethod
    def densities(self, x: Tensor, *, observed: bool) -> dict[str, np.ndarray]:
        """Evaluate log-densities of what the model observes, or of its parameters, element by element."""

    @abstractmethod
    def predictive_draws(self, x: Tensor, seed: int) -> dict[str, np.ndarray]:
        """Draw what the model observes once for each row of x (n, d): arrays (n, ...) by name."""


class ModelTarget(HasData, ForeignTarget):
    """A target of a whole model of another library."""


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
        except (ArithmeticError, RuntimeError, np.linalg.LinAlgError):  # where the model cannot be evaluated
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


def by_row(function: Callable[[np.ndarray], Sequence[ArrayLike]], X: np.ndarray) -> list[np.ndarray]:
    """Call a function on each row of X (n, d); return its outputs, each with an axis of length n in front."""
    outputs = [[np.array(one) for one in function(row)] for row in X]  # copies: it may use a buffer again
    return [np.stack(column) for column in zip(*outputs, strict=True)]


def as_tensor_like(a: ArrayLike, like: Tensor) -> Tensor:
    """Return a copy of an array, on the device of a tensor and in its type, if that is not finer than its own."""
    copied = as_tensor(np.array(a))
    return copied.to(device=like.device, dtype=min(like.dtype, copied.dtype, key=lambda dtype: dtype.itemsize))


def import_library(module: str, extra: str) -> ModuleType:
    """Import a module that is installed with one of the extras of this package."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"`{module}` could not be imported; install it: pip install 'skksivi[{extra}]'.") from error


# Angles in models, each on one period, and shares of one


class RecastTarget(HasData, NamedTarget):
    r"""A target some of whose coordinates are angles t, by coordinates u of one period of each.

    .. math:: t = m + 2 \arctan(c \tan(\pi (\Phi(u) - 1/2)))

    If t is uniform and c = 1, u is standard normal; if t is concentrated at m, so is u at zero. For any m and c the
    density of u is proper and the angle has the right one; near a normal density is what the choices here are for: of
    a von Mises density of concentration k they are m, its mode, and c = max(1 / (1 + k), 1/2).

    Attributes
    ----------
    is_angle : Tensor of shape (d,), bool
    middle, spread : Tensor of shape (d,)
        These m and c.
    shares : list of Tensor of shape (n_rows, k - 1)
        The columns of those of k shares each.
    """

    def __init__(self, one: ModelTarget, columns: list[int], shares: Sequence[Tensor] = ()) -> None:
        recast = [*columns, *(j for some in shares for j in some.flatten().tolist())]
        super().__init__(f"unconstrained({name})" if j in recast else name for j, name in enumerate(one.names))
        self.coords, self.dims, self.advice = one.coords, one.dims, getattr(one, "advice", "")
        self.observed_data, self.constant_data = one.observed_data, one.constant_data
        self._one, self.shares = one, shares
        self.is_angle = torch.isin(torch.arange(one.n_features), torch.tensor(columns))
        self.middle, self.spread = torch.ones(2, one.n_features, dtype=torch.float64).unbind()
        n = 64
        x = torch.zeros(n, one.n_features, dtype=torch.float64)  # the angles before it at their middles
        for j in columns:
            x[:, j] = torch.arange(n) * 2 * math.pi / n - math.pi
            log_p = one.log_prob(x).nan_to_num(nan=-math.inf)
            x[:, j] = self.middle[j] = x[log_p.argmax(), j]
            self.spread[j] = (1 / (1 + (log_p.max() - log_p.min()) / 2)).clamp_min(0.5)

    def log_prob(self, x: Tensor) -> Tensor:
        """Evaluate log p at each row of x (n, d), with a graph for one derivative."""
        points, log_jacobian = self._points(x)
        value = self._one.log_prob(points)
        return value + log_jacobian.to(value)

    def score_fn(self, x: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of x (n, d), without a graph, as accurately as its target."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            points, log_jacobian = self._points(x)
            s = self._one.score_fn(points.detach())
            (pulled_back,) = torch.autograd.grad([points, log_jacobian], x, [s.to(x), torch.ones_like(x[:, 0])])
        return pulled_back.to(s)

    def prior_draws(self, n: int, seed: int) -> np.ndarray:
        """Draw at most n points (k, d) from the prior, with angles as their own densities suggest."""
        X, is_angle = self._one.prior_draws(n, seed), self.is_angle.numpy()
        for columns in self.shares:
            logarithms = torch.from_numpy(X[:, columns])
            shares = torch.cat([logarithms, -logarithms.sum(-1, keepdim=True)], -1).softmax(-1)
            X[:, columns] = Shares().inv(shares.clamp_min(1e-300))
        return np.where(is_angle, np.random.RandomState(seed).normal(size=X.shape), X)

    def densities(self, x: Tensor, *, observed: bool) -> dict[str, np.ndarray]:
        """Evaluate log-densities of what the model observes, or of its parameters, element by element."""
        return self._one.densities(self._points(x)[0], observed=observed)

    def predictive_draws(self, x: Tensor, seed: int) -> dict[str, np.ndarray]:
        """Draw what the model observes once for each row of x (n, d)."""
        return self._one.predictive_draws(self._points(x)[0], seed)

    def _points(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the points (n, d) of the target, and the logarithm (n,) of the Jacobian, up to a constant."""
        is_angle, middle, c = self.is_angle.to(x.device), self.middle.to(x), self.spread.to(x)
        half = math.pi * (torch.special.ndtr(x) - 0.5)
        sin, cos = c * half.sin(), half.cos()
        log_jacobian = -x.square() / 2 - torch.log(sin.square() + cos.square())
        log_jacobian = log_jacobian.where(is_angle, 0).sum(1)
        points = (middle + 2 * torch.atan2(sin, cos)).where(is_angle, x)
        for columns in self.shares:
            shares, volume = Shares().logarithms(x[:, columns])
            rows = (shares - shares.mean(-1, keepdim=True))[..., :-1]
            points = points.index_copy(1, columns.flatten().to(x.device), rows.flatten(1))
            log_jacobian = log_jacobian + (volume - shares.sum(-1) - math.log(shares.shape[-1])).sum(1)
        return points, log_jacobian

    def _constrain(self, X: np.ndarray) -> dict[str, np.ndarray]:
        return self._one.constrain(self._points(torch.from_numpy(X))[0])


def recast(target: ModelTarget, angles: Collection[str], shares: Mapping[str, int] | None = None) -> NamedTarget:
    """Return a target with one period of the parameters that are angles, whose density has a period of 2 pi, and with
    shares, which are the last of so many coordinates, by breaking a stick.
    """
    columns: dict[str, list[int]] = {}
    for j, name in enumerate(target.names):
        columns.setdefault(name.partition("[")[0], []).append(j)
    some = [torch.tensor(columns[name]).reshape(-1, k) for name, k in (shares or {}).items()]
    of_angles = [j for name in angles for j in columns[name]]
    return RecastTarget(target, of_angles, some) if of_angles or some else target


# Stan


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
        return [f"{stem}{at or ''}" for stem, at in map(_parsed, names)]
    X = np.linspace([0.3] * len(names), [0.7] * len(names), 2) - 0.1 * np.arange(len(names)) / len(names)
    (numbers,) = by_row(lambda row: [constrain(row)], X)
    values = dict(zip(of_parameters(), numbers.T, strict=True))
    spaces = {"": X.T, "log": np.exp(X.T), "logit": 1 / (1 + np.exp(-X.T))}

    def space_of(i: int) -> str:
        value = values.get(names[i])
        fitting = (space for space, Y in spaces.items() if value is not None and np.allclose(value, Y[i], rtol=1e-10))
        return next(fitting, "unconstrained")

    return [coordinate_name(stem, space_of(i), str(at or "")) for i, (stem, at) in enumerate(map(_parsed, names))]


def _parsed(name: str) -> tuple[str, list[int]]:
    """Split a name such as "Sigma.2.1" into its stem and the index, which begins at zero."""
    stem = re.sub(r"(\.\d+)+$", "", name)
    return stem, [int(at) - 1 for at in name.removeprefix(stem).split(".")[1:]]


def _arrays(names: list[str], numbers: np.ndarray) -> dict[str, np.ndarray]:
    """Gather columns (n, p) with names such as "Sigma.2.1" to arrays (n, ...); the first index runs fastest."""
    columns: dict[str, list[int]] = {}
    shapes = {}
    for j, name in enumerate(names):
        stem, last = _parsed(name)
        columns.setdefault(stem, []).append(j)
        shapes[stem] = tuple(at + 1 for at in last)
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
            raise TypeError(
                f"`model` must have a method `{name}`, as BridgeStan's; a {type(model).__name__} has none."
            )
    return StanTarget(model, include_tp=include_tp)
