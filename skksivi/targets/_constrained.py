"""Targets known by a density of named parameters with bounds, by the bijections of torch.distributions."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from numbers import Real
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.distributions import StickBreakingTransform, Transform, biject_to, constraints

from skksivi._utils.arrays import as_array, as_tensor
from skksivi._utils.checks import check_integer
from skksivi.targets._named import NamedPairs, NamedTarget, coordinate_names

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
    "simplex": (0, 1, lambda: biject_to(constraints.simplex)),
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
    _check_supports(supports)
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


class ConstrainedPairs(NamedPairs):
    """The posteriors of named parameters with bounds for all contexts, see `paired_constrained`."""

    _one: ConstrainedTarget

    def __init__(self, log_prob: Callable[..., Tensor], parts: Mapping[str, Part]) -> None:
        super().__init__(ConstrainedTarget(log_prob, parts))
        self._log_prob, self._parts = log_prob, dict(parts)

    def score_fn(self, x: Tensor, y: Tensor) -> Tensor:
        """Evaluate the gradient of log p(x | y) in x at rows x (n, d) of contexts y (n, c), with a graph."""
        one = ConstrainedTarget(partial(self._log_prob, y), self._parts)
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad(one.log_prob(x).sum(), x, create_graph=True)[0]

    def unconstrain(self, values: Mapping[str, ArrayLike]) -> np.ndarray:
        """Turn parameters into points (n, n_features), such as those that made the contexts."""
        return self._one.unconstrain(values)


def paired_constrained(log_prob: Callable[..., Tensor], supports: Mapping[str, Support]) -> ConstrainedPairs:
    """Make the posteriors of named parameters with bounds for many data sets, for `skksivi.AmortizedKSIVI`.

    Parameters
    ----------
    log_prob : callable
        The log-density of n pairs, up to a constant: it takes the contexts (n, c) first, and each parameter by its
        name, a tensor (n, ...), and returns a tensor (n,).
    supports : dict of str to str or tuple
        See `constrained`.

    Returns
    -------
    target : ConstrainedPairs
        For ``AmortizedKSIVI().fit(target, contexts, parameters)``, whose parameters ``unconstrain`` gives.

    Raises
    ------
    TypeError
        `log_prob` is not callable or does not take these names, or a shape is not of integers.
    ValueError
        A support is not one that `constrained` takes.

    See Also
    --------
    constrained : The posterior of one data set.
    skksivi.AmortizedKSIVI : One fit for many data sets.

    Examples
    --------
    >>> import torch
    >>> from skksivi.targets import paired_constrained
    >>> def log_prob(y, rate):  # Gamma(3, 1), and a Poisson count
    ...     return (2 + y[:, 0]) * rate.log() - 2 * rate
    >>> target = paired_constrained(log_prob, {"rate": "positive"})
    >>> target.score_fn(torch.zeros(1, 1), torch.tensor([[3.0]])).detach()  # log rate: 3 + y - 2 rate
    tensor([[4.]])
    >>> target.unconstrain({"rate": [1.0, 2.0]}).shape
    (2, 1)
    """
    if not callable(log_prob):
        raise TypeError(f"`log_prob` must be callable, got a {type(log_prob).__name__}.")
    _check_supports(supports)
    _check_names(partial(log_prob, None), list(supports))
    return ConstrainedPairs(log_prob, {name: _part(name, support) for name, support in supports.items()})


def _check_supports(supports: object) -> None:
    if not isinstance(supports, Mapping) or not supports:
        raise TypeError(f"`supports` must be a dict of names to supports, got {supports!r}.")
