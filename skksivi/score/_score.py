"""A score function that has been checked: its values, and products with its Jacobian."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeGuard, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from skksivi._utils.arrays import as_numbers, native
from skksivi.score._refusals import tell
from skksivi.score._tally import Doubt, Tally

#: Maps (n, d) points to (n, d) gradients of log p.
ScoreFunction = Callable[[Tensor], Tensor]

#: A score function as users give it, of tensors or of arrays; trial calls find out which.
UntriedScore = Callable[[Any], Any]

#: Maps points to their scores and a function v -> J^T v.
ScoreWithProduct = Callable[[Tensor], tuple[Tensor, ScoreFunction]]

#: Step of a central difference by the type in which a score is computed, in units of 1 + |x|.
STEPS = {torch.float32: 3e-3, torch.float64: 1e-5}

#: What a matrix that is not positive definite, a division by zero or a parameter out of its range raises. Numpy's
#: LinAlgError is a ValueError.
REJECTIONS = (ArithmeticError, ValueError, torch.linalg.LinAlgError)

#: What may be the points', as a solver raises RuntimeError, and what never is.
POSSIBLE = (*REJECTIONS, RuntimeError)
OF_DEVICE = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)  # older ones have a bare RuntimeError for it
NEVER_OF_POINTS = (NotImplementedError, RecursionError, torch.OutOfMemoryError, OF_DEVICE)

#: What an error says of a tensor instead of an array, or the reverse.
OF_KIND = re.compile(r"numpy|ndarray|Tensor\b")

Result = TypeVar("Result")

#: Number of observations in a cheap version of a score of many.
N_SKETCHED = 1000


class CarriesScore(Protocol):
    """A target, of this package or of a user's own."""

    @property
    def score_fn(self) -> ScoreFunction: ...


class HasLogProb(Protocol):
    """A target with a log-density."""

    n_features: int

    def log_prob(self, x: Tensor, /) -> Tensor: ...


def is_target(score_fn: object) -> TypeGuard[CarriesScore]:
    """Tell whether this is a target, which carries its score, rather than a bare function."""
    return hasattr(score_fn, "score_fn")


def refuse_class(score_fn: object) -> None:
    """Raise TypeError for a class instead of a target."""
    if isinstance(score_fn, type):
        raise TypeError(f"`score_fn` is the class {score_fn.__name__}; pass an instance, {score_fn.__name__}(...).")


def function_of(score_fn: UntriedScore | CarriesScore) -> ScoreFunction:
    """Return the score of a target, or the function itself."""
    refuse_class(score_fn)
    return score_fn.score_fn if hasattr(score_fn, "score_fn") else score_fn


class Labels(Protocol):
    """Labels of parameters, such as those of the components of a mixture, in coordinates of the whole space."""

    def log_jacobian(self, x: Tensor, /) -> Tensor:
        """Return the logarithms (n,) of the Jacobian of the parameters at points x (n, d)."""

    def exchanges(self) -> Iterator[Iterator[list[Callable[[Tensor], Tensor]]]]:
        """Yield, for each number of labels, the ways in which parameters may have them: the exchanges of two."""


class DifferentiableScore(Protocol):
    """A score and products with its Jacobian; every wrapper forwards all of it.

    Attributes
    ----------
    log_prob : callable or None
        Maps points (n, d) to log p (n,), up to a constant.
    minibatch : callable or None
        Draws, by a generator, the score estimated from a minibatch of the data.
    rewind : callable or None
        Sets the next minibatch to the one after so many from the first, if they come in an order.
    tally : Tally
        Counts its evaluations, wrapped or not.
    """

    @property
    def log_prob(self) -> Callable[[Tensor], Tensor] | None: ...

    @property
    def minibatch(self) -> Callable[[torch.Generator], DifferentiableScore] | None: ...

    @property
    def rewind(self) -> Callable[[int], None] | None: ...

    @property
    def tally(self) -> Tally: ...

    def __call__(self, x: Tensor, /) -> Tensor:
        """Evaluate the score at x (n, d)."""

    def with_pullback(self, x: Tensor, /) -> tuple[Tensor, ScoreFunction]:
        """Return the score at x (n, d) without a graph, and the map of v (n, d) to J^T v (n, d)."""

    def product(self, x: Tensor, v: Tensor, /) -> Tensor:
        """Return J^T v for points x (n, d) and directions v (n, d), without the score."""


class Parts(NamedTuple):
    """Scores estimated from parts of the data.

    Attributes
    ----------
    n_rows : int
        Number of observations.
    batch_size : int
        Number of observations in a minibatch.
    of : callable
        Maps a number to the score estimated from so many observations, always the same ones.
    """

    n_rows: int
    batch_size: int
    of: Callable[[int], Score]


@dataclass(frozen=True)
class Score:
    """A probed score function, whose result has the dtype and device of its input.

    Attributes
    ----------
    score_fn : callable
        The gradient of log p at each row, (n, d) -> (n, d).
    n_features : int
        The number of features d.
    dtype : torch.dtype
        The dtype of the points it is given.
    device : torch.device
        Where it is computed.
    step : float
        Step of its central differences.
    score_vjp : callable or None
        Maps (n, d) points to their scores and the vector-Jacobian product there.
    by_differences : bool
        Whether products with the Jacobian are central differences of the score.
    is_rough : bool
        Whether differences of two steps disagree at trial points, by noise or a kink.
    units : Tensor of shape (d,) or None
        The scales of the coordinates in these, where differences in units of one are not finite.
    minibatch : callable or None
        Draws, by a generator, the score estimated from a minibatch of the data.
    rewind : callable or None
        Sets the next minibatch to the one after so many from the first, if they come in an order.
    log_prob : callable or None
        Maps points (n, d) of type `dtype` to log p (n,), up to a constant, if the target has one of tensors.
    in_double : Score or None
        The same score computed in float64, from data that were never rounded; None if this is it.
    replicate : tuple of int
        The target's, see `skksivi.targets.Target`.
    parts : Parts or None
        Parts of the data, if the target draws minibatches.
    exact : Score or None
        The score of all of the data, where this one is expanded at `mode`.
    mode : Tensor of shape (d,) or None
        The only mode given all of the data, in float64, if it is known.
    names : tuple of str
        Names of the coordinates, if the target has them.
    constrain : callable or None
        Maps points (n, d), an array, to the parameters of the target's model by their names, if it has such a map.
    rank : int or None
        The target's, see `skksivi.targets.Target`.
    prior_draws : callable or None
        The target's, see `skksivi.targets.Target`.
    labels : Labels or None
        How labels of the target's parameters may be exchanged, if its coordinates are not these parameters.
    doubt : Doubt or None
        What seems wrong with the domain of the target; it explains a fit that fails.
    advice : str
        How to compute the target more accurately, if it is computed in single precision.
    up_to_constant : bool
        The target's, see `skksivi.targets.Target`.
    data : tuple of str
        Checksums of its data, of those that it shows.
    tally : Tally
        Counts its evaluations in either dtype.
    """

    score_fn: ScoreFunction
    n_features: int
    dtype: torch.dtype
    device: torch.device
    step: float
    score_vjp: ScoreWithProduct | None = None
    by_differences: bool = False
    is_rough: bool = False
    units: Tensor | None = None
    minibatch: Callable[[torch.Generator], Score] | None = None
    rewind: Callable[[int], None] | None = None
    log_prob: Callable[[Tensor], Tensor] | None = None
    in_double: Score | None = None
    replicate: tuple[int, ...] = ()
    parts: Parts | None = None
    exact: Score | None = None
    mode: Tensor | None = None
    names: tuple[str, ...] = ()
    constrain: Callable[[np.ndarray], dict[str, np.ndarray]] | None = None
    rank: int | None = None
    prior_draws: Callable[[int, int], np.ndarray] | None = None
    labels: Labels | None = None
    doubt: Doubt | None = None
    advice: str = ""
    up_to_constant: bool = False
    data: tuple[str, ...] = ()
    tally: Tally = field(default_factory=Tally, compare=False)

    @property
    def double(self) -> Score:
        """The same score computed in float64."""
        return self.in_double or self

    @property
    def type_computed(self) -> torch.dtype:
        """The type in which it is computed at float64 points, which `score_fn` need not take."""
        return torch.float64 if self.double.step == STEPS[torch.float64] else torch.float32

    def label(self, i: int) -> str:
        """Return the name of a coordinate for messages."""
        return f"`{self.names[i]}`" if self.names else f"`x[{i}]`"

    def parameters_at(self, X: np.ndarray) -> tuple[list[str], np.ndarray]:
        """Return the names and the values (n, k) of what the user calls parameters, at points (n, d).

        Raises
        ------
        TypeError, ValueError
            `constrain` does not return an array with a row for each point by the name of each parameter.
        """
        found: Mapping[str, ArrayLike] = {}
        if self.constrain is not None:
            with np.errstate(all="ignore"):  # numbers may overflow far out
                found = self.tally.marking(self.constrain, X)
            if not isinstance(found, Mapping):
                raise TypeError(
                    f"`constrain` of `target` returned a {type(found).__name__}, expected a dict of arrays."
                )
        if not found:
            return [self.label(i).strip("`") for i in range(self.n_features)], X
        names, columns = list[str](), list[np.ndarray]()
        for name, values in found.items():
            a = as_numbers(values, f"constrain(X)[{name!r}]")
            if a.shape[:1] != (len(X),):
                raise ValueError(
                    f"`constrain` of `target` returned shape {a.shape} for {name!r}, expected {len(X)} rows as `X` "
                    "has."
                )
            names += [f"{name}{list(at) or ''}" for at in np.ndindex(a.shape[1:])]
            columns.append(a.reshape(len(X), -1))
        return names, np.concatenate(columns, 1)

    def from_prior(self, n: int, generator: torch.Generator) -> Tensor:
        """Return at most n points (k, d) from the target's prior, none where it knows none."""
        if self.prior_draws is None:
            return torch.empty(0, self.n_features, dtype=torch.float64, device=self.device)
        seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))
        return torch.as_tensor(self.prior_draws(n, seed), dtype=torch.float64, device=self.device)

    def on_all_data(self) -> Score:
        """Return the same score without minibatches, computed from all of the data."""
        if self.exact is not None:
            return self.exact.on_all_data()
        double = None if self.in_double is None else self.in_double.on_all_data()
        return replace(self, minibatch=None, parts=None, in_double=double)

    def by_score_alone(self) -> Score:
        """Return the same score without its density."""
        double = None if self.in_double is None else self.double.by_score_alone()
        return replace(self, log_prob=None, in_double=double)

    def sketch(self) -> Score:
        """Return a cheap score of the same form: the score given a few of many observations."""
        return self if self.parts is None or self.parts.n_rows <= N_SKETCHED else self.parts.of(N_SKETCHED)

    def like(self, score_fn: ScoreFunction, score_vjp: ScoreWithProduct | None) -> Score:
        """Return another function with the settings of this score."""
        if isinstance(self.score_fn, BlackBox):
            score_fn = BlackBox(score_fn, self.score_fn.kind)
        own = None if self.score_vjp is None else score_vjp
        bare = replace(self, in_double=None, minibatch=None, parts=None, log_prob=None, labels=None, prior_draws=None)
        return replace(bare, score_fn=score_fn, score_vjp=own)

    def __call__(self, x: Tensor) -> Tensor:
        """Evaluate the score at x (n, d)."""
        self.tally.add(values=len(x))
        return self.uncounted(x)

    def uncounted(self, x: Tensor) -> Tensor:
        """Evaluate the score at x (n, d), NaN in rows where the function raises, for a caller that counts."""
        parts = in_parts(self._asked, x, partial(torch.full_like, fill_value=torch.nan), self.tally)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _asked(self, x: Tensor) -> Tensor:
        """Return a copy of the score, which may be written into a buffer that the next call uses again."""
        if x.requires_grad:
            return self.score_fn(x.to(self.dtype)).to(x, copy=True)
        at = x.detach().to(self.dtype)
        with torch.enable_grad():  # a score that differentiates log p by itself needs points with a graph
            s = self.score_fn(at.requires_grad_() if self.score_vjp is None else at)
        return s.detach().to(x, copy=True)

    def with_pullback(self, x: Tensor) -> tuple[Tensor, ScoreFunction]:
        """Return the score at x (n, d) without a graph, and the map of v (n, d) to J^T v (n, d)."""
        if self.by_differences:
            return self(x), lambda v: self.product(x, v)
        self.tally.add(values=len(x))
        s, pull = self.differentiated(x)
        return s, self._mended(pull, x)

    def _mended(self, pull: ScoreFunction, x: Tensor) -> ScoreFunction:
        """Return the pullback at x (n, d), with finite differences in rows where it is not finite."""
        double = self.double

        def differences(v: Tensor, rows: Tensor) -> Tensor:
            ends = x[rows].to(double.dtype), v[rows].to(double.dtype)
            return central_difference(double, *ends, double.step, double.units)

        return lambda v: self.tally.mended(pull(v), partial(differences, v))

    def differentiated(self, x: Tensor) -> tuple[Tensor, ScoreFunction]:
        """Return the score at x (n, d) without a graph, and J^T v by its graph or its own product, finite or not."""
        s, pull = autograd_pullback(self.uncounted, x) if self.score_vjp is None else self._by_own(self.score_vjp, x)

        def pullback(v: Tensor) -> Tensor:
            self.tally.add(products=len(v))
            return pull(v)

        return s, pullback

    def _by_own(self, score_vjp: ScoreWithProduct, x: Tensor) -> tuple[Tensor, ScoreFunction]:
        """Return what the user's product returns at x (n, d), and NaN in rows where it raises."""
        parts = in_parts(partial(own_pullback, score_vjp), x, _nothing, self.tally)
        if len(parts) == 1:
            return parts[0]
        scores, pulls = zip(*parts, strict=True)
        sizes = [len(s) for s in scores]

        def pull(v: Tensor) -> Tensor:
            return torch.cat([part(w) for part, w in zip(pulls, v.split(sizes), strict=True)])

        return torch.cat(scores), pull

    def product(self, x: Tensor, v: Tensor) -> Tensor:
        """Return J^T v for points x (n, d) and directions v (n, d), without the score."""
        if self.by_differences:
            return central_difference(self, x.to(self.dtype), v.to(self.dtype), self.step, self.units).to(v)
        pull = self.differentiated(x)[1]
        return self._mended(pull, x)(v)


# Points at which a function raises instead of returning NaN


def first_points(n: int, like: Tensor) -> Tensor:
    """Return the n points at which every function is called first, of the features, type and device of x (k, d)."""
    d = like.shape[1]
    return torch.linspace(-1, 1, n * d, dtype=like.dtype, device=like.device).reshape(n, d)


def in_parts(
    f: Callable[[Tensor], Result],
    x: Tensor,
    nothing: Callable[[Tensor], Result],
    tally: Tally,
    again: Callable[[int], object] | None = None,
) -> list[Result]:
    """Return f at x (n, d), or f at parts of x and `nothing` at each row where f raises, in the order of the rows.

    Rows are found by halving, each call of which counts. `again` calls f with so many rows where it was called first,
    by default at `first_points`. A RuntimeError, as solvers raise it, is the points' where f works there with as many
    rows; else it is a fault of f, as are shapes, types and devices that do not match.

    Raises
    ------
    ArithmeticError, ValueError, torch.linalg.LinAlgError
        f raises at every row, and also where it is called first: it no longer works at all.
    RuntimeError
        f also raises where it is called first.
    """
    call_first = partial(tally.marking, again or (lambda n: f(first_points(2, x).repeat(-(-n // 2), 1)[:n])))
    errors, n_rejected, sizes = list[Exception](), 0, set[int]()

    def asked(part: Tensor) -> list[Result]:
        nonlocal n_rejected
        try:
            return [tally.marking(f, part)]
        except NEVER_OF_POINTS:
            raise
        except POSSIBLE as error:
            errors.append(error)
            n = len(part)
            if not isinstance(error, REJECTIONS) and n not in sizes:
                tally.add(values=n)
                call_first(n)
                sizes.add(n)
        if n <= 1:
            n_rejected += 1
            return [nothing(part)]
        found: list[Result] = []
        for half in part.tensor_split(2):
            tally.add(values=len(half))
            found += asked(half)
        return found

    parts = asked(x)
    if n_rejected == len(x):
        call_first(2)
    if n_rejected:
        is_first = "rejected" not in tally.told
        tell("points where it raises", errors[0], n=len(x), n_rejected=n_rejected, is_first=is_first)
        tally.told.add("rejected")
        tally.n_rejected += n_rejected
    return parts


# Products with the Jacobian


def autograd_pullback(score_fn: ScoreFunction, x: Tensor) -> tuple[Tensor, ScoreFunction]:
    """Return the score at x (n, d), and the map of v to J^T v by its graph; no graph means J = 0."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        s = score_fn(x)

    def pullback(v: Tensor) -> Tensor:
        if not s.requires_grad:
            return torch.zeros_like(v)
        return torch.autograd.grad(s, x, v, allow_unused=True, materialize_grads=True)[0]

    return s.detach(), pullback


def own_pullback(score_vjp: ScoreWithProduct, x: Tensor) -> tuple[Tensor, ScoreFunction]:
    """Return what a product of the user's own returns, as copies."""
    s, pull = score_vjp(x)
    return s.clone(), lambda v: pull(v).clone()


def _nothing(x: Tensor) -> tuple[Tensor, ScoreFunction]:
    """Return NaN for a score at x (n, d), and for its product."""
    s = torch.full_like(x, torch.nan)
    return s, lambda v: s.to(v)


def central_difference(
    score_fn: ScoreFunction, x: Tensor, v: Tensor, step: float, units: Tensor | None = None
) -> Tensor:
    r"""Return J v, which is J^T v for a gradient, from one batch of both ends.

    .. math:: J v \approx \|v\|_\infty \frac{s(x + h w) - s(x - h w)}{2 h}, \quad w = v / \|v\|_\infty, \quad
        h = \text{step} \, (1 + \max_i |w_i x_i|).

    The divisor is the largest entry because the squares in other norms of small float32 numbers underflow to zero.
    Given units (d,), v and x are in these; a step is then no larger than the rounding of x asks for.
    """
    scale, slack = (1.0, 1.0) if units is None else (units.to(x), 1e-4)
    size = (v / scale).abs().amax(-1, keepdim=True)
    w = v / size.where(size > 0, 1)
    h = step * (1 + slack * (w * x / scale**2).abs().amax(-1, keepdim=True))
    ahead, behind = score_fn(torch.cat([x + h * w, x - h * w])).detach().chunk(2)
    return (ahead - behind) / (2 * h) * size


@dataclass(frozen=True)
class Wrapped(ABC):
    """Another score in other coordinates, units or batches; by default everything is forwarded to it."""

    score: DifferentiableScore

    @property
    def log_prob(self) -> Callable[[Tensor], Tensor] | None:
        """The density of the score, where it is known."""
        return self.score.log_prob

    @property
    def minibatch(self) -> Callable[[torch.Generator], DifferentiableScore] | None:
        """The function that draws the score of a minibatch, wrapped in the same way."""
        draw = self.score.minibatch
        return None if draw is None else lambda generator: replace(self, score=draw(generator))

    @property
    def rewind(self) -> Callable[[int], None] | None:
        """The function that sets the next minibatch."""
        return self.score.rewind

    @property
    def tally(self) -> Tally:
        return self.score.tally

    def __call__(self, x: Tensor) -> Tensor:
        return self.score(x)

    @abstractmethod
    def with_pullback(self, x: Tensor) -> tuple[Tensor, ScoreFunction]: ...

    def product(self, x: Tensor, v: Tensor) -> Tensor:
        return self.score.product(x, v)


@dataclass(frozen=True)
class Halves(Wrapped):
    """A score that evaluates each half of the points with its own, independent minibatch of the data.

    A product of two estimates from one minibatch would be biased by the covariance of their errors. Within a finite
    difference a minibatch stays the same.
    """

    generator: torch.Generator

    def _draw(self) -> DifferentiableScore:
        draw = self.score.minibatch
        return self.score if draw is None else draw(self.generator)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([self._draw()(half) for half in x.chunk(2)])

    def with_pullback(self, x: Tensor) -> tuple[Tensor, ScoreFunction]:
        scores, pulls = zip(*(self._draw().with_pullback(half) for half in x.chunk(2)), strict=True)

        def pullback(v: Tensor) -> Tensor:
            return torch.cat([pull(half) for pull, half in zip(pulls, v.chunk(2), strict=True)])

        return torch.cat(scores), pullback

    def product(self, x: Tensor, v: Tensor) -> Tensor:
        return torch.cat([self._draw().product(*part) for part in zip(x.chunk(2), v.chunk(2), strict=True)])


@dataclass(frozen=True)
class Tempered(Wrapped):
    """The score of p^c, with the inverse temperature c as a tensor."""

    c: Tensor

    @property
    def log_prob(self) -> Callable[[Tensor], Tensor] | None:
        log_prob = self.score.log_prob
        return None if log_prob is None else lambda x: self.c * log_prob(x)

    def __call__(self, x: Tensor) -> Tensor:
        return self.c * self.score(x)

    def with_pullback(self, x: Tensor) -> tuple[Tensor, ScoreFunction]:
        s, pull = self.score.with_pullback(x)
        return self.c * s, lambda v: pull(self.c * v)

    def product(self, x: Tensor, v: Tensor) -> Tensor:
        return self.score.product(x, self.c * v)


@dataclass(frozen=True)
class WithoutProducts(Wrapped):
    """A score for objectives that are not differentiated through it."""

    def with_pullback(self, x: Tensor) -> tuple[Tensor, ScoreFunction]:
        """Return the score at x (n, d) without a graph, and zero as its product."""
        return self(x).detach(), torch.zeros_like


# Functions of arrays


def with_graph(x: Tensor) -> Tensor:
    """Return a copy that begins a graph."""
    return x.detach().clone().requires_grad_()


def _in_float64(x: Tensor) -> Tensor:
    return x.detach().to(device="cpu", dtype=torch.float64, copy=True)


#: Inputs that a function may accept, tried in this order: tensors with a graph, arrays, tensors without a graph, and
#: tensors with a graph that the function uses itself. All but the first are given float64 on the CPU.
POINTS: dict[str, Callable[[Tensor], Tensor | np.ndarray]] = {
    "graph": with_graph,
    "array": lambda x: _in_float64(x).numpy(),
    "tensor": _in_float64,
    "leaf": lambda x: _in_float64(x).requires_grad_(),
}


class BlackBox:
    """A score function of arrays, or of tensors without a graph, adapted to tensors."""

    def __init__(self, score_fn: UntriedScore, kind: str) -> None:
        self.score_fn = score_fn
        self.kind = kind

    def __call__(self, x: Tensor) -> Tensor:
        """Evaluate the score at x (n, d)."""
        # modes are searched far out
        with torch.set_grad_enabled(self.kind == "leaf"), np.errstate(all="ignore"):
            return tensor_copy(self.score_fn(POINTS[self.kind](x))).to(x)


def tensor_copy(s: Tensor | np.ndarray) -> Tensor:
    """Return a copy of a result that may be a buffer the function reuses."""
    return s.detach().clone() if isinstance(s, Tensor) else torch.from_numpy(np.array(native(s)))


def of_its_kind(log_prob: UntriedScore, n_features: int) -> Callable[[Tensor], Tensor]:
    """Return a log-density of tensors as it is, one of arrays adapted to tensors, by how it takes two points.

    Raises
    ------
    TypeError
        It returns something else than one number for each point.
    """
    x, errors = first_points(2, torch.empty(0, n_features, dtype=torch.float64)), list[Exception]()
    for kind, at in (("graph", x), ("graph", x.float()), ("array", x), ("tensor", x)):
        try:
            value = log_prob(POINTS[kind](at))
        except Exception as error:
            errors.append(error)
            continue
        if (shape := tuple(np.shape(value))) != (2,):
            raise TypeError(f"`log_prob` returned shape {shape} for two points, expected (2,), one number per row.")
        if kind != "graph" or isinstance(value, Tensor):
            return log_prob if kind == "graph" else BlackBox(log_prob, kind)
    error = told_by(errors)
    error.add_note(f"Raised by `log_prob`, which must take rows, for two points of shape {tuple(x.shape)}.")
    raise error


def told_by(errors: list[Exception]) -> Exception:
    """Return the error of a function that is no complaint about a tensor instead of an array, or the reverse."""
    return next((error for error in errors if not OF_KIND.search(str(error))), errors[0])
