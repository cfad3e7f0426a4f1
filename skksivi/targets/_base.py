"""What a target is: a distribution known by the gradient of its log-density."""

from __future__ import annotations

import copy
import math
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from skksivi._utils.arrays import as_array
from skksivi._utils.checks import check_integer, shown
from skksivi.score import HasLogProb, ScoreFunction, ScoreWithProduct, autograd_pullback

#: Maps points and rows of the data, both tensors or both arrays, to scores.
RowsScore = Callable[[Any, Any], Any]

#: Rows of a block of data, and pairs of points and rows that are worked on at a time.
N_BLOCK, MAX_PAIRS = 2**12, 2**20

#: Bytes of a matrix of all pairs: glibc gives larger memory back each time, and to get it again takes longer than to
#: compute a score.
MAX_MATRIX = 2**25


#: Maps classes of a batch, and the most that there may be, to those of all rows, while a target is made of the batch.
ALL_CLASSES: ContextVar[Callable[[np.ndarray, float], np.ndarray] | None] = ContextVar("ALL_CLASSES", default=None)


class NoRows(int):
    """A count of one, which says in the messages of what would split rows what to do instead."""

    def __format__(self, spec: str) -> str:
        remedy = (
            "1, since a target has no rows to split: set cv=skksivi.model_selection.Replicates(), which any search "
            "needs, and resource='max_iter', max_resources=2000, which a halving search needs"
        )
        return remedy if not spec else format(int(self), spec)


class Target:
    """A distribution to approximate, known by its score.

    A subclass defines `n_features` and either `score_fn(x)` or `log_prob(x)`, whose gradient is then the score; it
    need not call `__init__`. Optional: `sample(n, generator)` where an exact sampler exists; `prior_draws(n, seed)`,
    an array of at most n points of the prior, from which modes are searched, too; and `score_vjp(x)`, which returns
    the score and its vector-Jacobian product, the map of v to J^T v (n, d), to avoid the automatic one. For
    `skksivi.to_arviz`: `log_likelihood(x)`, the log-density (n, rows) of each observation; `log_prior(x)` (n,), by
    default what is left of `log_prob`; `predictive_draws(x, seed)`, a data set for each row of x, (n,
    rows); and `observed_data` and `constant_data`, dicts of arrays. Several kinds of observations are dicts of arrays
    (n, ...).
    A target can be passed to scikit-learn's search tools instead of X, with `skksivi.model_selection.Replicates` as
    `cv`, because it has no rows to split: row zero is the target itself, and any other row k is the same target as
    another replicate.

    Attributes
    ----------
    n_features : int
        Dimension d.
    products : {"auto", "autograd", "finite-difference"}
        How a fit forms products of the score's Jacobian with vectors. "autograd" differentiates the score, and a fit
        rejects a score for which that is wrong; "finite-difference" takes central differences of the score along the
        vector, with two more evaluations, which assumes that it is a gradient; "auto", the default, uses `score_vjp`,
        otherwise automatic differentiation if it agrees with finite differences at a few points.
    up_to_constant : bool
        Whether `log_prob` lacks a constant, so that the evidence is unknown and `skksivi.compare` refuses it.
    replicate : tuple of int
        The selected rows, which a fit to this target adds to its seed.
    rank : int or None
        The number of this process if several sum their scores, in which case rounding depends on their number;
        otherwise None.

    See Also
    --------
    from_log_prob : A target of a log-density in torch.
    from_score_fn : A target of a bare score function.
    constrained : A target of named parameters with bounds.

    Examples
    --------
    >>> import torch
    >>> from skksivi.targets import Target
    >>> class Cauchy(Target):
    ...     n_features = 1
    ...     def log_prob(self, x):
    ...         return -torch.log1p(x**2).sum(-1)
    >>> Cauchy().score_fn(torch.tensor([[1.0]]))
    tensor([[-1.]])
    """

    n_features: int
    products: str = "auto"
    up_to_constant: bool = False
    replicate: tuple[int, ...] = ()
    rank: int | None = None
    score_vjp: Any = None

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Let a new density not inherit the score of the old one, nor a new score the product of the old one."""
        super().__init_subclass__(**kwargs)
        if "log_prob" in vars(cls) and "score_fn" not in vars(cls):
            cls.score_fn = Target.score_fn  # type: ignore[method-assign]
        if "score_fn" in vars(cls) and "score_vjp" not in vars(cls):
            cls.score_vjp = None

    def score_fn(self, x: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of x (n, d), by automatic differentiation of `log_prob`."""
        differentiable = x.requires_grad
        with torch.enable_grad():
            x = x if differentiable else x.detach().requires_grad_()
            (s,) = torch.autograd.grad(self._log_prob_with_graph(x).sum(), x, create_graph=differentiable)
        return s

    def _log_prob_with_graph(self, x: Tensor) -> Tensor:
        """Return log p (n,) at x (n, d), or say why it has no gradient."""
        if not hasattr(self, "log_prob"):
            raise TypeError(f"{type(self).__name__} must define `score_fn(x)` or `log_prob(x)`.")
        try:
            log_prob = self.log_prob(x)
        except (RuntimeError, TypeError, AttributeError) as error:
            if "numpy" not in str(error) and not self._takes_arrays(x):
                raise
            raised = f"raised {type(error).__name__}: {textwrap.shorten(str(error), 160)}"
            raise TypeError(self._left_torch(raised)) from error
        if not isinstance(log_prob, Tensor):
            raise TypeError(self._left_torch(f"returned a {type(log_prob).__name__}"))
        if log_prob.shape != x.shape[:-1]:
            raise ValueError(
                f"`log_prob` of {type(self).__name__} returned shape {tuple(log_prob.shape)}, expected "
                f"{tuple(x.shape[:-1])}, one value per row."
            )
        if not log_prob.requires_grad:
            raise TypeError(self._left_torch("returned a tensor without a graph"))
        return log_prob

    def _takes_arrays(self, x: Tensor) -> bool:
        """Tell whether `log_prob` works on points x (n, d) as an array."""
        try:
            return np.shape(self.log_prob(x.detach().cpu().numpy())) == x.shape[:-1]  # type: ignore[attr-defined]
        except Exception:
            return False

    def _left_torch(self, fact: str) -> str:
        return (
            f"`log_prob` of {type(self).__name__} {fact}; it must be a function of torch tensors, without numpy or "
            "`detach`. Write it with functions of torch, or give it beside its gradient, both functions of arrays: "
            "skksivi.targets.from_score_fn(score_fn, n_features, log_prob=log_prob)."
        )

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return a copy whose floating-point tensors are on `device` and of type `dtype`."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        numbers = {name: x.to(device=device, dtype=dtype) for name, x in tensors.items() if x.is_floating_point()}
        return self._replaced(**numbers)

    def _replaced(self, **attributes: object) -> Self:
        other = copy.copy(self)
        vars(other).update(attributes)
        return other

    @property
    def shape(self) -> tuple[int, int]:
        """One "row" of n_features, so that scikit-learn can count and split it."""
        return (NoRows(1), self.n_features)

    def __getitem__(self, index: object) -> Self:
        rows = np.asarray(index[0] if isinstance(index, tuple) else index)
        if not (np.issubdtype(rows.dtype, np.integer) and rows.any()):
            return self
        return self._replaced(replicate=(*self.replicate, *rows.ravel().tolist()))

    def __array__(self, *args: object, **kwargs: object) -> np.ndarray:
        raise TypeError(f"A target is not an array; {type(self).__name__} is known by its score only.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n_features={self.n_features})"


class OfRows(Protocol):
    """A target of data."""

    n_features: int
    n_rows: int

    @property
    def score_vjp(self) -> ScoreWithProduct | None: ...
    def score_fn(self, x: Tensor, /) -> Tensor: ...
    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self: ...


class Divisible(OfRows, Protocol):
    """A target of data, and of some of its observations."""

    def subset(self, rows: Tensor, /) -> Target: ...


class _SumOverRows(torch.autograd.Function):
    """The score of parts of data, whose graphs are made one at a time, and again for a product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Summed) -> Tensor:  # noqa: ANN401
        ctx.parts = parts
        ctx.save_for_backward(x)
        return parts.total(value_with_graph, x.detach())

    @staticmethod
    def backward(ctx: Any, *v: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return ctx.parts.total(product_by_graph, ctx.saved_tensors[0].detach(), v[0]), None


# What a part of the data is asked for, at points (n, d)


def value(part: Target, x: Tensor) -> Tensor:
    """Return the score (n, d)."""
    return part.score_fn(x)


def value_with_graph(part: OfRows, x: Tensor) -> Tensor:
    """Return the score (n, d), which may differentiate, without a graph."""
    return autograd_pullback(part.score_fn, x)[0]


def product_by_graph(part: OfRows, x: Tensor, v: Tensor) -> Tensor:
    """Return J^T v (n, d) by the graph of the score."""
    return autograd_pullback(part.score_fn, x)[1](v)


def pulled(part: Target | OfRows, x: Tensor) -> tuple[Tensor, ScoreFunction]:
    """Return the score at x (n, d) and its vector-Jacobian product, by the part's own or the graph."""
    return autograd_pullback(part.score_fn, x) if part.score_vjp is None else part.score_vjp(x)


def own_product(part: OfRows, x: Tensor, v: Tensor) -> Tensor:
    """Return J^T v (n, d) by the product of the part, if it has one, else by the graph."""
    return pulled(part, x)[1](v)


def log_prob_of(part: HasLogProb, x: Tensor) -> Tensor:
    """Return log p (n,)."""
    return part.log_prob(x)


def prior_of(target: Any, prior: Target | None) -> Target:  # noqa: ANN401
    """Return the prior that is in a target of rows, by default that of no rows.

    Raises
    ------
    TypeError
        It is not known.
    """
    try:
        if prior is None:
            prior = target.prior if hasattr(target, "prior") else target.subset(torch.zeros(0, dtype=torch.long))
        numbers_of(prior)
    except Exception as error:
        raise TypeError(
            f"`prior` of {type(target).__name__} is not known ({type(error).__name__}: {error}); pass the prior that "
            "each target contains, which must be counted only once."
        ) from error
    return prior


def numbers_of(target: Target) -> list[float]:
    """Return the score of a target of tensors or arrays at some points."""
    x = torch.linspace(-1, 2, 3 * target.n_features, dtype=torch.float64).reshape(3, target.n_features)
    return as_array(target.score_fn(x)).ravel().tolist()


def n_points(target: object, n_rows: int) -> int:
    """Return how many points can be worked on at a time, given so many rows."""
    return max(1, MAX_PAIRS // (n_rows * getattr(target, "n_outputs", 1)))


def in_chunks(evaluate: Callable[..., Tensor], target: object, points: list[Tensor], n_rows: int) -> Tensor:
    """Return what a function of a target of rows gives at points (n, d), so many at a time that memory suffices."""
    n, step = len(points[0]), n_points(target, n_rows)
    parts = [evaluate(target, *(p[k : k + step] for p in points)) for k in range(0, max(1, n), step)]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if isinstance(parts[0], Tensor) else np.concatenate(parts)


class Forms(NamedTuple):
    """What a target that is not to be asked for all can be asked for: products, unless None; never log p."""

    score_vjp: bool | None


class Summed(Target, ABC):
    """A target whose score is a sum over parts of its data, one of which sets the shapes; a leaf gives `total`."""

    target: Any

    @abstractmethod
    def total(self, evaluate: Callable[..., Tensor], *points: Tensor) -> Tensor:
        """Return the sum over parts of what a function of a part of the data and of points (..., d) gives."""

    def score_fn(self, x: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of x (n, d)."""
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            return _SumOverRows.apply(x, self)
        return self.total(value, x)

    @property
    def score_vjp(self) -> ScoreWithProduct | None:
        """The product of the parts, if they have one."""
        return None if self.target.score_vjp is None else self.product

    @property
    def log_prob(self) -> Callable[[Tensor], Tensor] | None:
        """What evaluates log p (n,) at points (n, d), up to a constant, if the parts do."""
        return None if getattr(self.target, "log_prob", None) is None else partial(self.total, log_prob_of)

    def product(self, x: Tensor) -> tuple[Tensor, ScoreFunction]:
        """Return the score at x (n, d) and its vector-Jacobian product, by the products of the parts."""
        return self.score_fn(x), partial(self.total, own_product, x)


class Blocks(Summed):
    r"""A target of data, or of some of its rows, evaluated a block of rows at a time.

    The score of a subset is the prior's plus n_rows times the mean over its rows; so the mean over blocks,
    weighted by their sizes, is the score of all of them. Memory is needed for one block at a time, for products as
    well.

    Parameters
    ----------
    target : Divisible
    rows : Tensor of shape (n,), default=None
        The rows, None for all.
    """

    def __init__(self, target: Divisible, rows: Tensor | None = None) -> None:
        self.target = target
        self.rows = rows
        self.n_features = target.n_features

    def product(self, x: Tensor) -> tuple[Tensor, ScoreFunction]:
        """Return the score at x (n, d) and its vector-Jacobian product, by the target's product."""
        if len(blocks := list(self._rows(x))) == 1 and len(x) <= n_points(self.target, len(blocks[0])):
            return self._part(blocks[0]).score_vjp(x)
        return super().product(x)

    def total(self, evaluate: Callable[..., Tensor], *points: Tensor) -> Tensor:
        """Return the sum over blocks of what a function of a part of the data and of points (..., d) gives."""
        x = points[0]
        flat = [p.reshape(-1, self.n_features) for p in points]
        n = self.target.n_rows if self.rows is None else len(self.rows)
        total: Any = 0.0
        for rows in self._rows(x):
            total = total + len(rows) / n * in_chunks(evaluate, self._part(rows), flat, len(rows))
        return total.reshape(x.shape[: x.ndim - 2 + total.ndim])

    def _rows(self, x: Tensor) -> Iterator[Tensor]:
        device = x.device if isinstance(x, Tensor) else "cpu"
        rows = torch.arange(self.target.n_rows, device=device) if self.rows is None else self.rows.to(device)
        return iter(rows.split(N_BLOCK))

    def _part(self, rows: Tensor) -> Any:  # noqa: ANN401
        return self.target if self.rows is None and len(rows) == self.target.n_rows else self.target.subset(rows)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return a copy whose target is on `device` and of type `dtype`."""
        return self._replaced(target=self.target.to(device=device, dtype=dtype))


def in_blocks(target: Divisible, x: Tensor, n_rows: int, n_outputs: int = 1) -> Blocks | None:
    """Return a target of so many rows in blocks if its points by its rows are too many for one matrix, else None."""
    too_many = x[..., 0].numel() * n_rows * n_outputs * x.element_size() >= MAX_MATRIX
    return Blocks(target) if too_many and N_BLOCK < n_rows == target.n_rows else None


class _RowsTarget(Target):
    def __init__(self, score_fn: RowsScore, n_rows: int, n_features: int) -> None:
        self._score_fn = score_fn
        self._rows: Tensor | None = None
        self.n_rows = n_rows
        self.n_features = n_features

    def subset(self, rows: Tensor) -> Target:
        return self._replaced(_rows=rows)

    def score_fn(self, x: Tensor | np.ndarray) -> Tensor:
        rows = self._rows
        if isinstance(x, Tensor):
            return self._score_fn(x, torch.arange(self.n_rows, device=x.device) if rows is None else rows)
        return self._score_fn(x, np.arange(self.n_rows) if rows is None else rows.cpu().numpy())


def from_rows(score_fn: RowsScore, *, n_rows: int, n_features: int) -> _RowsTarget:
    """Make a target from a score function that can be restricted to some of the observations.

    Parameters
    ----------
    score_fn : callable
        Maps points (n, n_features) and integers (b,), the rows of the data to use, to scores (n, n_features): the
        gradient of the log-prior plus n_rows / b times the gradient of the log-likelihood of these rows. Both are
        tensors, or arrays if it does not take tensors.
    n_rows : int
        Number of observations.
    n_features : int

    Returns
    -------
    target : Target
        Of all of the data; wrap it in `Minibatches` to train on minibatches.

    See Also
    --------
    Minibatches : A target that sees part of its data at a time.
    from_score_fn : A target of a bare score function.

    Examples
    --------
    >>> import torch
    >>> from skksivi.targets import Minibatches, from_rows
    >>> data = torch.tensor([0.3, 1.2, 0.9, 1.6])  # of N(x, 1), with prior N(0, 1)
    >>> def score_fn(x, rows):
    ...     return -x + len(data) / len(rows) * (data[rows] - x).sum(1, keepdim=True)
    >>> target = from_rows(score_fn, n_rows=4, n_features=1)
    >>> target.score_fn(torch.zeros(1, 1))
    tensor([[4.]])
    >>> Minibatches(target, batch_size=2)
    Minibatches(_RowsTarget(n_features=1), batch_size=2)
    """
    if not callable(score_fn):
        raise TypeError(f"`score_fn` must be callable, got a {type(score_fn).__name__}.")
    check_integer(n_rows, "n_rows", min_val=1)
    check_integer(n_features, "n_features", min_val=1)
    return _RowsTarget(score_fn, int(n_rows), int(n_features))


def check_hyperprior(hyperprior: tuple[float, float]) -> None:
    """Raise ValueError if the parameters of a Gamma distribution are not two positive numbers."""
    if len(hyperprior) != 2 or not all(isinstance(value, Real) and 0 < value < math.inf for value in hyperprior):
        raise ValueError(f"`hyperprior` must be a pair of positive numbers, shape and rate, got {shown(hyperprior)}.")


def classes_of(y: np.ndarray, most: float = math.inf) -> tuple[np.ndarray, np.ndarray]:
    """Return the classes of labels y (n,), of all rows if they are a batch of a loader, and numbers (n,) of y."""
    classes, of_all = np.unique(y), ALL_CLASSES.get()
    classes = classes if of_all is None else of_all(classes, most)
    return classes, np.searchsorted(classes, y)


def check_positive(value: float, name: str) -> None:
    """Raise ValueError unless `value` is a positive finite number."""
    if not (isinstance(value, Real) and 0 < value < math.inf):
        raise ValueError(f"`{name}` must be positive and finite, got {shown(value)}.")
