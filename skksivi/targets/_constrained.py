"""Targets known by a density of named parameters, with bounds by the bijections of torch.distributions."""

from __future__ import annotations

import inspect
import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils import check_array
from torch import Tensor
from torch.distributions import StickBreakingTransform, Transform, biject_to, constraints
from torch.nn.functional import logsigmoid, pad

from skksivi._utils.arrays import as_array, as_tensor, without_graph
from skksivi._utils.checks import bridge_of, check_integer, shown
from skksivi.score import ByWorkers, UntriedScore, of_its_kind
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


class LogProbTarget(NamedTarget):
    """A target of a log-density in torch."""

    def __init__(self, function: Callable[[Any], Any], n_features: int, names: Sequence[str] | None) -> None:
        super().__init__(coordinate_names({"x": (n_features,)}) if names is None else names)
        self._function = function
        self._is_named = names is not None

    def log_prob(self, x: Tensor) -> Tensor:
        """Evaluate log p at each row of x (n, d)."""
        return self._function(x)

    def _constrain(self, X: np.ndarray) -> dict[str, np.ndarray]:
        return dict(zip(self.names, X.T, strict=True)) if self._is_named else {"x": X}


class ScoreTarget(LogProbTarget):
    """A target of a score function and, if it is known, a log-density, of tensors or arrays."""

    log_prob: Any = None

    def score_fn(self, x: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of x (n, d)."""
        return self._function(x)


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
    _check_arguments({"log_prob": log_prob}, n_features, names)
    return LogProbTarget(log_prob, int(n_features), names)


def from_score_fn(  # noqa: PLR0913
    score_fn: UntriedScore,
    n_features: int,
    *,
    log_prob: UntriedScore | None = None,
    names: Sequence[str] | None = None,
    products: str = "auto",
    n_jobs: int | None = None,
    backend: str | None = None,
    chunk_size: int = 1,
    timeout: float | None = None,
) -> ScoreTarget:
    """Make a target from a bare score function, which several workers may evaluate.

    Parameters
    ----------
    score_fn : callable
        The gradient of log p at each row, (n, n_features) tensor -> (n, n_features) tensor; or one of arrays.
    n_features : int
    log_prob : callable, default=None
        The log-density at each row, up to a constant, (n, n_features) -> (n,), of tensors or of arrays. A fit by it
        is cheaper and its certificate sharper; a fit warns if `score_fn` is not its gradient.
    names : sequence of str, default=None
        Names of the n_features coordinates, as of `from_log_prob`.
    products : {"auto", "autograd", "finite-difference"}, default="auto"
        How a fit forms products with the Jacobian of the score, see `Target`. With workers these are differences,
        since a worker returns no graph.
    n_jobs : int, default=None
        Number of joblib workers that evaluate rows at the same time, -1 for one per core. None evaluates all rows in
        one call, in this process. The result does not depend on the number, up to differences in the arithmetic of
        machines. `log_prob` is evaluated by them, too.
    backend : str, default=None
        A backend of joblib: "loky" (processes), "threading", "dask" with an open client, "ray" after
        ``ray.util.joblib.register_ray()``, or another that is registered there; None for the one set by
        `joblib.parallel_config`, otherwise "loky".
    chunk_size : int, default=1
        Rows per call of the function. One row per call is efficient only if the function takes more than a few
        milliseconds.
    timeout : float, default=None
        Seconds that a chunk may take, as in joblib, at the first call with the start of the workers; not used with
        one worker, which is this process. A process that takes longer is stopped; a thread, or a worker of a cluster,
        is abandoned.

    Returns
    -------
    target : Target

    Raises
    ------
    TypeError, ValueError
        A parameter is of a wrong type or out of its range. In a fit: the function cannot be sent to a process, or
        its result for a chunk does not have the shape of the points.
    TimeoutError, ConnectionError
        In a fit: a chunk takes too long, or its worker is lost. Training that has begun keeps its state.

    See Also
    --------
    from_log_prob : A target of a log-density in torch.
    from_rows : A target of a score function that takes some of the rows.
    Target : The base of all targets.

    Examples
    --------
    >>> from skksivi.targets import from_score_fn
    >>> from_score_fn(lambda x: -x, n_features=3).shape
    (1, 3)
    >>> import torch
    >>> target = from_score_fn(lambda x: -x, n_features=1, n_jobs=2, backend="threading")
    >>> target.score_fn(torch.tensor([[1.0], [2.0]]))
    tensor([[-1.],
            [-2.]])
    """
    functions = {"score_fn": score_fn} | ({} if log_prob is None else {"log_prob": log_prob})
    _check_arguments(functions, n_features, names)
    if n_jobs is not None:
        options: dict[str, Any] = {"n_jobs": n_jobs, "backend": backend, "chunk_size": chunk_size, "timeout": timeout}
        functions = {name: ByWorkers(function, name=name, **options) for name, function in functions.items()}
    target = ScoreTarget(functions["score_fn"], int(n_features), names)
    target.products, target.names = products, () if names is None else tuple(names)
    if log_prob is not None:
        target.log_prob = of_its_kind(functions["log_prob"], n_features)
    return target


def _check_arguments(functions: Mapping[str, object], n_features: int, names: Sequence[str] | None) -> None:
    """Raise unless these are functions by their names, a number of features and as many names, or none."""
    for name, function in functions.items():
        if (bridge := bridge_of(function)) or not callable(function):
            fact = "is a model" if callable(function) else f"must be callable, got a {type(function).__name__}"
            raise TypeError(f"`{name}` {fact}.{bridge}")
    check_integer(n_features, "n_features", min_val=1)
    if names is not None and (isinstance(names, str) or not len(names) == len(set(names)) == n_features):
        raise ValueError(
            f"`names` must be {n_features} different strings, one for each coordinate; got {shown(names)}."
        )


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


# Densities of named parameters, by the bijections of torch.distributions

#: Where a parameter lives: the name of a support, or a tuple of the name, its bounds and the shape of the parameter.
Support = str | tuple[str | float, ...]


class Ordered(Transform):
    """Increasing numbers, by the logarithms of their steps and the first, or its logarithm where all are positive."""

    domain = codomain = constraints.real_vector
    bijective = True

    def __init__(self, is_positive: bool) -> None:
        super().__init__()
        self.n_plain = 0 if is_positive else 1

    def _call(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., : self.n_plain], x[..., self.n_plain :].exp()], -1).cumsum(-1)

    def _inverse(self, y: Tensor) -> Tensor:
        steps = torch.cat([y[..., :1], y.diff(dim=-1)], -1)
        return torch.cat([steps[..., : self.n_plain], steps[..., self.n_plain :].log()], -1)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the sum of the logarithms of the steps."""
        return x[..., self.n_plain :].sum(-1)


class Shares(StickBreakingTransform):
    r"""Shares of one by breaking a stick, whose coordinates u have tails like a normal density's.

    With concentrations below one the logits l of what is broken off have tails :math:`e^{-a |l|}`. Coordinates by
    :math:`l = u \sqrt{1 + u^2 / 4}` are linear near zero, and their tails :math:`e^{-a u^2 / 2}`. They are formed in
    logarithms, so that shares far below the precision of one are told apart.
    """

    def _call(self, x: Tensor) -> Tensor:
        return self.logarithms(x)[0].exp().clamp_min(torch.finfo(x.dtype).tiny)

    def _inverse(self, y: Tensor) -> Tensor:
        rest = y.flip(-1).cumsum(-1).flip(-1)[..., 1:]
        logits = y[..., :-1].log() - rest.log() + self._even(rest)
        return logits * (2 / (1 + (1 + logits.square()).sqrt())).sqrt()

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the sum of the logarithms of the slopes of what is broken off, times what was there."""
        return self.logarithms(x)[1]

    def logarithms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithms of the shares (..., k) and of the Jacobian (...) at coordinates x (..., k - 1)."""
        square = x.square() / 4
        logits = x * (1 + square).sqrt() - self._even(x)
        broken, rest = logsigmoid(logits), logsigmoid(-logits)
        shares = pad(broken, (0, 1)) + pad(rest.cumsum(-1), (1, 0))
        slope = (1 + 2 * square).log() - torch.log1p(square) / 2
        return shares, (shares[..., :-1] + rest + slope).sum(-1)

    def _even(self, x: Tensor) -> Tensor:
        """Return the logits of even shares, with the other sign, which are zero in the coordinates."""
        return torch.arange(x.shape[-1], 0, -1, device=x.device).to(x).log()


class Cholesky(Transform):
    """Lower triangular matrices with a positive diagonal, from their rows with the logarithm of the diagonal."""

    domain = constraints.real_vector
    codomain = constraints.lower_cholesky
    bijective = True

    def forward_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the matrices of vectors of a shape."""
        k = math.isqrt(2 * shape[-1])
        return (*shape[:-1], k, k)

    def inverse_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the vectors of matrices of a shape."""
        return (*shape[:-2], shape[-1] * (shape[-1] + 1) // 2)

    def _call(self, x: Tensor) -> Tensor:
        below = x.new_zeros(self.forward_shape(x.shape))
        below[..., *_lower(below)] = x
        return below.tril(-1) + below.diagonal(dim1=-2, dim2=-1).exp().diag_embed()

    def _inverse(self, y: Tensor) -> Tensor:
        logarithms = y.diagonal(dim1=-2, dim2=-1).log().diag_embed()
        return (y.tril(-1) + logarithms)[..., *_lower(y)]

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the sum of the logarithms of the diagonal."""
        return y.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def _lower(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the lower triangle of matrices (..., k, k)."""
    rows, columns = torch.tril_indices(y.shape[-1], y.shape[-1], device=y.device)
    return rows, columns


#: The number of bounds of each support, that of the axes of one element of it, and the map to it.
SUPPORTS: dict[str, tuple[int, int, Callable[..., Transform]]] = {
    "real": (0, 0, lambda: biject_to(constraints.real)),
    "positive": (0, 0, lambda: biject_to(constraints.positive)),
    "unit interval": (0, 0, lambda: biject_to(constraints.unit_interval)),
    "above": (1, 0, lambda low: biject_to(constraints.greater_than(low))),
    "below": (1, 0, lambda high: biject_to(constraints.less_than(high))),
    "interval": (2, 0, lambda low, high: biject_to(constraints.interval(low, high))),
    "simplex": (0, 1, Shares),
    "ordered": (0, 1, lambda: Ordered(is_positive=False)),
    "positive ordered": (0, 1, lambda: Ordered(is_positive=True)),
    "cholesky": (0, 2, Cholesky),
    "correlation cholesky": (0, 2, lambda: biject_to(constraints.corr_cholesky)),
}


class Part(NamedTuple):
    """A parameter, and the map to it from the whole space."""

    transform: Transform
    shape: tuple[int, ...]
    space: str

    @property
    def labelled(self) -> tuple[int, ...]:
        """The sizes of those axes along which elements may be exchanged, the leading ones."""
        axes = self.shape[: len(self.shape) - self.transform.codomain.event_dim]
        return (*axes, self.shape[-1]) if isinstance(self.transform, StickBreakingTransform) else axes

    @property
    def free_shape(self) -> tuple[int, ...]:
        """The shape of its coordinates."""
        return tuple(self.transform.inverse_shape(self.shape))

    def value(self, x: Tensor) -> Tensor:
        """Return the parameter (n, *shape) at its coordinates x (n, k)."""
        return self.transform(x.reshape(len(x), *self.free_shape))

    def log_jacobian(self, x: Tensor, value: Tensor) -> Tensor:
        """Return the logarithm (n,) of the Jacobian at x (n, k)."""
        each = self.transform.log_abs_det_jacobian(x.reshape(len(x), *self.free_shape), value)
        return each.reshape(len(x), math.prod(each.shape[1:])).sum(1)


class PartLabels:
    """The axes of the parts of a constrained target that may have the same labels.

    Parameters
    ----------
    parts : dict of str to Part
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self.parts = list(parts.values())

    def _columns(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.split([math.prod(part.free_shape) for part in self.parts], -1)

    def log_jacobian(self, x: Tensor) -> Tensor:
        """Return the logarithms (n,) of the Jacobian of the parameters at points x (n, d)."""
        each = [part.log_jacobian(c, part.value(c)) for part, c in zip(self.parts, self._columns(x), strict=True)]
        return torch.stack(each).sum(0)

    def exchanges(self) -> Iterator[Iterator[list[Callable[[Tensor], Tensor]]]]:
        """Yield, for each number of labels, the ways in which parameters may have them: the exchanges of two."""
        for k in sorted({size for part in self.parts for size in part.labelled if size > 1}):
            yield self._ways(k)

    def _ways(self, k: int) -> Iterator[list[Callable[[Tensor], Tensor]]]:
        """Yield exchanges of k labels, those first that as many axes have."""
        own = [[axis for axis, size in enumerate(part.labelled) if size == k] for part in self.parts]
        some = ([axes[:n] for n in range(len(axes), -1, -1)] + [axes[1:]] * (len(axes) > 1) for axes in own)
        ways = sorted(itertools.islice(itertools.product(*some), 1000), key=lambda way: -sum(map(len, way)))
        for way in ways[:16]:  # each is tried at two points
            if any(way):
                yield [self._exchange(way, k, i) for i in range(k - 1)]

    def _exchange(self, way: tuple[list[int], ...], k: int, i: int) -> Callable[[Tensor], Tensor]:
        """Return the map that exchanges labels i and i + 1 of k."""
        order = torch.arange(k)
        order[i], order[i + 1] = i + 1, i

        def exchanged(x: Tensor) -> Tensor:
            columns = list(self._columns(x))
            for j, (part, axes) in enumerate(zip(self.parts, way, strict=True)):
                if axes:
                    value = part.value(columns[j])
                    for axis in axes:
                        value = value.index_select(axis + 1, order.to(x.device))
                    columns[j] = part.transform.inv(value).reshape(len(x), -1)
            return torch.cat(columns, -1)

        return exchanged


class ConstrainedTarget(NamedTarget):
    """A target of a log-density of named parameters."""

    supports: Mapping[str, Support] | None = None

    def __init__(self, log_prob: Callable[..., Tensor], parts: Mapping[str, Part]) -> None:
        spaces = {name: part.space for name, part in parts.items()}
        super().__init__(coordinate_names({name: part.free_shape for name, part in parts.items()}, spaces))
        self._log_prob = log_prob
        self._parts = dict(parts)
        self.label_exchanges = PartLabels(parts)

    def log_prob(self, x: Tensor) -> Tensor:
        """Evaluate log p at each row of x (n, d), the logarithm of the Jacobian included."""
        columns = self._columns(x)
        values = {name: part.value(columns[name]) for name, part in self._parts.items()}
        density = self._log_prob(**values)
        if isinstance(density, Tensor) and density.shape != x.shape[:-1]:
            raise ValueError(
                f"`log_prob` returned shape {tuple(density.shape)}, expected {tuple(x.shape[:-1])}, one value per "
                "row: the first axis of each parameter is that of the rows."
            )
        return density + sum(part.log_jacobian(columns[name], values[name]) for name, part in self._parts.items())

    def unconstrain(self, values: Mapping[str, ArrayLike]) -> np.ndarray:
        """Turn parameters into points of the space of the draws, as for `init`.

        Parameters
        ----------
        values : dict of str to array-like of shape (...) or (n, ...)
            Every parameter by its name, in its support, once or n times.

        Returns
        -------
        X : ndarray of shape (n_features,) or (n, n_features)

        Raises
        ------
        ValueError
            A parameter is missing, unknown, of another shape or outside of its support.
        """
        if set(values) != set(self._parts):
            raise ValueError(f"`values` must have the names {', '.join(self._parts)}; got {', '.join(values)}.")
        return np.concatenate([_coordinates(name, part, values[name]) for name, part in self._parts.items()], -1)

    def _columns(self, x: Tensor) -> dict[str, Tensor]:
        sizes = [math.prod(part.free_shape) for part in self._parts.values()]
        return dict(zip(self._parts, x.split(sizes, -1), strict=True))

    def _constrain(self, X: np.ndarray) -> dict[str, np.ndarray]:
        columns = self._columns(as_tensor(X))
        return {name: as_array(part.value(columns[name])) for name, part in self._parts.items()}


def _coordinates(name: str, part: Part, value: ArrayLike) -> np.ndarray:
    """Return the coordinates (..., k) of a parameter (..., *shape) with at most one axis in front."""
    y = as_tensor(as_array(value).astype(np.float64))
    leading = y.shape[: y.dim() - len(part.shape)]
    if len(leading) > 1 or y.shape != (*leading, *part.shape):
        raise ValueError(
            f"`values` has shape {tuple(y.shape)} for {name!r}, expected {part.shape} or (n, *{part.shape})."
        )
    x = part.transform.inv(y)
    if not torch.allclose(part.transform(x), y, rtol=1e-4, atol=1e-12):
        raise ValueError(f"`values` has numbers for {name!r} that are outside of its support; got {value!r}.")
    return as_array(x.reshape(*leading, math.prod(part.free_shape)))


def constrained(log_prob: Callable[..., Tensor], supports: Mapping[str, Support]) -> ConstrainedTarget:
    r"""Make a target from a log-density of named parameters with bounds.

    Each parameter :math:`\theta` is a smooth one-to-one function of real numbers x. The target is their density,

    .. math:: \log p(x) = \log p(\theta(x)) + \log |\det \partial \theta / \partial x|,

    and `constrain` transforms draws back.

    Parameters
    ----------
    log_prob : callable
        The log-density of n points, up to a constant: it takes each parameter by its name, a tensor (n, ...), and
        returns a tensor (n,).
    supports : dict of str to str or tuple
        The support of each parameter, in the order of the coordinates: its name, or a tuple of this name, its bounds,
        if it has any, and the shape of the parameter, by default a single number:

        - "real", "positive", "unit interval";
        - ("above", low), ("below", high), ("interval", low, high);
        - ("simplex", k), k positive numbers of sum one; ("ordered", k), increasing; ("positive ordered", k);
        - ("cholesky", k, k), lower triangular with a positive diagonal; ("correlation cholesky", k, k), the same
          with rows of length one.

        ("positive", 5) means five positive numbers, and ("simplex", 4, 3) four rows of sum one.

    Returns
    -------
    target : Target
        With `constrain(X)`, which returns the parameters of draws, and `unconstrain(values)`, the points of
        parameters.

    Raises
    ------
    TypeError
        `log_prob` does not take these names, or a shape is not of integers.
    ValueError
        A support is not one of these.

    See Also
    --------
    from_log_prob : A target of a log-density in torch.

    Examples
    --------
    >>> import numpy as np
    >>> from skksivi.baselines import Laplace
    >>> from skksivi.targets import constrained
    >>> def log_prob(rate, share):  # Gamma(3, 2) and Dirichlet(2, 1, 1)
    ...     return 2 * rate.log() - 2 * rate + share[:, 0].log()
    >>> target = constrained(log_prob, {"rate": "positive", "share": ("simplex", 3)})
    >>> target.names
    ('log(rate)', 'unconstrained(share)[0]', 'unconstrained(share)[1]')
    >>> draws = target.constrain(Laplace(random_state=0).fit(target).sample(1000))
    >>> draws["share"].shape, bool(np.allclose(draws["share"].sum(1), 1)), bool(draws["rate"].min() > 0)
    ((1000, 3), True, True)
    >>> target.unconstrain({"rate": 1.0, "share": [0.2, 0.3, 0.5]}).shape
    (3,)
    """
    if not callable(log_prob):
        raise TypeError(f"`log_prob` must be callable, got a {type(log_prob).__name__}.")
    if not isinstance(supports, Mapping) or not supports:
        raise TypeError(f"`supports` must be a dict of names to supports, got {shown(supports)}.")
    _check_names(log_prob, list(supports))
    target = ConstrainedTarget(log_prob, {name: _part(name, support) for name, support in supports.items()})
    target.supports = dict(supports)
    return target


def _check_names(log_prob: Callable[..., Tensor], names: list[str]) -> None:
    try:
        inspect.signature(log_prob).bind(**dict.fromkeys(names))
    except TypeError as error:
        raise TypeError(
            f"`log_prob` must take the names in `supports`, {', '.join(map(str, names))}, as arguments: {error}."
        ) from error
    except ValueError:  # one written in C has no signature
        return


def _part(name: str, support: Support) -> Part:
    kind, *numbers = support if isinstance(support, tuple | list) and support else (support,)
    if str(kind) not in SUPPORTS:
        raise ValueError(f"`supports` has {kind!r} for {name!r}, expected one of {', '.join(map(repr, SUPPORTS))}.")
    n_bounds, n_axes, make = SUPPORTS[str(kind)]
    bounds = [float(bound) for bound in numbers[:n_bounds] if isinstance(bound, Real)]
    shape = tuple(check_integer(size, f"supports[{name!r}]", min_val=1) for size in numbers[n_bounds:])
    if len(bounds) < n_bounds or sorted(set(bounds)) != bounds or not np.isfinite(bounds).all():
        raise ValueError(f"`supports` must give {n_bounds} finite, increasing bounds of {name!r}; got {support!r}.")
    if len(shape) < n_axes or (n_axes == 2 and shape[-1] != shape[-2]):
        form = "a square shape (..., k, k)" if n_axes == 2 else "a shape (..., k)"
        raise ValueError(f"`supports` must give {form} for {name!r}; got {support!r}.")
    space = {"real": "", "positive": "log", "unit interval": "logit"}.get(str(kind), "unconstrained")
    return Part(make(*bounds), shape, space)
