"""One replication: parameters, data, a fit, and ranks among its draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import clone

from skksivi._utils.arrays import make_seed, without_graph
from skksivi.base import BaseApproximator
from skksivi.targets import coordinate_names, from_score_fn

#: Numbers, or arrays by name.
Parameters = ArrayLike | Mapping[str, ArrayLike]


class Fits(Protocol):
    """An approximator, or any object that learns a posterior and draws from it."""

    def fit(self, target: Any, /) -> object: ...  # noqa: ANN401

    def sample(self, n_samples: int, /, *, random_state: int) -> ArrayLike: ...

    def get_params(self, deep: bool = True) -> dict[str, object]: ...


class CallError(Exception):
    """A user's function, or a fit, raised an error."""


class Simulated(NamedTuple):
    """Parameters, their names, the data, and the target of their posterior."""

    theta: Any
    names: tuple[str, ...]
    data: tuple[object, ...]
    target: Any


@dataclass(frozen=True)
class Problem:
    """The parts of each replication.

    Attributes
    ----------
    source : str
        The name of the source of parameters, for messages.
    draw, simulate_data, make_target, quantities : callable
        See `skksivi.calibration.sbc`; `quantities` may be None.
    estimator : approximator
    n_draws : int
    names : sequence of str or None
        Names of the parameters.
    observed : tuple
        Fixed data that precede the simulated ones.
    """

    source: str
    draw: Callable[[np.random.RandomState], object]
    simulate_data: Callable[[Any, np.random.RandomState], object]
    make_target: Callable[..., object]
    estimator: Fits
    n_draws: int
    quantities: Callable[..., object] | None
    names: Sequence[str] | None
    observed: tuple[object, ...] = ()

    def simulate(self, rng: np.random.RandomState) -> Simulated:
        """Return parameters, data and target.

        Raises
        ------
        CallError
            A function raised something.
        TypeError, ValueError
            It returned an invalid value.
        """
        theta = _asked(self.source, self.draw, rng)
        values = theta if isinstance(theta, Mapping) else np.atleast_1d(without_graph(theta))
        data = *self.observed, _asked("simulate_data", self.simulate_data, theta, rng)
        target = self._as_target(_asked("make_target", self.make_target, *data), values)
        names = _names_by_key(values, target) if isinstance(values, Mapping) else self._names(values, target)
        if self.names is not None and len(self.names) != len(names):
            raise ValueError(f"`names` are {len(self.names)}, expected {len(names)}, one for each parameter.")
        return Simulated(theta, names if self.names is None else tuple(map(str, self.names)), data, target)

    def _as_target(self, target: Any, theta: np.ndarray | Mapping[str, ArrayLike]) -> Any:  # noqa: ANN401
        """Return a target of such parameters for an approximator; other estimators may be fitted to anything."""
        if isinstance(target, type):
            raise TypeError(f"`make_target` returned the class {target.__name__}, expected an instance.")
        if isinstance(self.estimator, BaseApproximator) and not (hasattr(target, "score_fn") or callable(target)):
            raise TypeError(
                f"`make_target` returned a {type(target).__name__}, expected a Target or a score function "
                "(n, d) -> (n, d)."
            )
        if isinstance(theta, Mapping):
            return target
        if callable(target) and not hasattr(target, "score_fn"):
            return from_score_fn(target, theta.size)
        n_features = getattr(target, "n_features", theta.size)
        if theta.size != n_features:
            raise ValueError(
                f"`make_target` returned a target of {n_features} features, expected {theta.size}, as many as "
                "parameters were simulated."
            )
        return target

    def _names(self, theta: np.ndarray, target: object) -> tuple[str, ...]:
        if theta.ndim != 1 or theta.dtype.kind not in "iuf" or not np.isfinite(theta).all():
            raise ValueError(
                f"`{self.source}` gave parameters of {theta.dtype}, shape {theta.shape}, expected finite numbers of "
                "shape (d,)."
            )
        own = getattr(target, "names", None)
        return tuple(f"x{j}" for j in range(len(theta))) if own is None else tuple(own)

    def ranks(self, simulated: Simulated, rng: np.random.RandomState) -> dict[str, int]:
        """Return the ranks of the parameters and quantities among draws of a fit, by name."""
        theta, names, data, target = simulated
        estimator = clone(self.estimator)
        if "random_state" in estimator.get_params(deep=False):
            estimator.set_params(random_state=make_seed(rng))
        _asked("fit", estimator.fit, target)
        found = _asked("sample", estimator.sample, self.n_draws, random_state=make_seed(rng))
        X = np.asarray(without_graph(found), dtype=np.float64)
        named = isinstance(theta, Mapping)
        if X.ndim != 2 or X.shape != (self.n_draws, X.shape[1] if named else len(names)) or not np.isfinite(X).all():
            raise ValueError(
                f"`estimator` gave draws of shape {X.shape}, {np.isfinite(X).mean():.0%} of them finite, expected "
                f"finite ones of {self.n_draws} rows and a column for each parameter."
            )
        rows = _rows_by_key(target.constrain(X), theta) if named else list(X)
        columns = dict(zip(names, np.stack([flat(row) for row in [theta, *rows]]).T, strict=True))
        if self.quantities is not None:
            values = [self.quantity(row, data) for row in [theta, *rows]]
            columns |= {name: np.array([value[name] for value in values]) for name in values[0]}
        return {name: _rank(column, rng) for name, column in columns.items()}

    def quantity(self, theta: object, data: tuple[object, ...]) -> dict[str, float]:
        """Return the quantities of parameters and data by name."""
        found = _asked("quantities", self.quantities, theta, *data)
        if not isinstance(found, Mapping):
            values = np.asarray(without_graph(found))
            found = dict(zip(coordinate_names({"quantity": values.shape}), values.ravel(), strict=True))
        named = {str(name): np.asarray(without_graph(value), dtype=np.float64) for name, value in found.items()}
        for name, value in named.items():
            if value.size != 1 or np.isnan(value).any():
                raise ValueError(
                    f"`quantities` returned {value} of shape {value.shape} as {name!r}, expected a number, several, "
                    "or a dict of numbers by name."
                )
        return {name: value.item() for name, value in named.items()}


def streams(seed: int, i: int) -> list[np.random.RandomState]:
    """Return the random numbers of the simulation and of the fit of a replication, independent of the others."""
    spawned = np.random.SeedSequence(seed, spawn_key=(i,)).spawn(2)
    return [np.random.RandomState(np.random.MT19937(sequence)) for sequence in spawned]


def replicate(problem: Problem, seed: int, i: int, names: tuple[str, ...]) -> tuple[int, list[int] | str]:
    """Return the number of a replication and its ranks, or why there are none."""
    of_simulation, of_fit = streams(seed, i)
    try:
        ranks = problem.ranks(problem.simulate(of_simulation), of_fit)
        if tuple(ranks) != names:
            raise ValueError(f"it has the quantities {', '.join(ranks)}, expected {', '.join(names)} as others have")
    except CallError as error:
        return i, str(error)
    except Exception as error:
        return i, f"{type(error).__name__}: {error}"
    return i, list(ranks.values())


def flat(theta: Parameters) -> np.ndarray:
    parts = theta.values() if isinstance(theta, Mapping) else [theta]
    return np.concatenate([np.ravel(np.asarray(without_graph(part), dtype=np.float64)) for part in parts])


def _asked(name: str, function: Callable[..., object] | None, *args: object, **options: object) -> Any:  # noqa: ANN401
    """Call a function; an error is raised again with its name."""
    try:
        return function(*args, **options)  # type: ignore[misc]
    except Exception as error:
        raise CallError(f"`{name}` raised {type(error).__name__}: {error}") from error


def _names_by_key(theta: Mapping[str, ArrayLike], target: Any) -> tuple[str, ...]:  # noqa: ANN401
    """Return names for the numbers of parameters by name, which the draws of a target must have too."""
    if not hasattr(target, "constrain"):
        raise TypeError(
            "The parameters are a dict, but the target has no `constrain` that gives draws by name; return an array, "
            "or make the target by `skksivi.targets.constrained` or a similar function."
        )
    shapes = {name: np.shape(without_graph(value)) for name, value in theta.items()}
    there = {name: a.shape[1:] for name, a in target.constrain(np.zeros((1, target.n_features))).items()}
    if not shapes.items() <= there.items():
        raise ValueError(f"The parameters are {shapes}, expected some of the target's, {there}.")
    if not np.isfinite(flat(theta)).all():
        raise ValueError("The parameters are not finite.")
    return coordinate_names(shapes)


def _rows_by_key(draws: Mapping[str, np.ndarray], like: Mapping[str, ArrayLike]) -> list[dict[str, np.ndarray]]:
    """Return the parameters of each draw, those that were simulated."""
    n = len(next(iter(draws.values())))
    return [{name: draws[name][i] for name in like} for i in range(n)]


def _rank(values: np.ndarray, rng: np.random.RandomState) -> int:
    """Return how many of the values after the first are below it; ties are so at random."""
    first, draws = values[0], values[1:]
    return int((draws < first).sum() + rng.randint((draws == first).sum() + 1))
