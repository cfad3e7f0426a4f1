r"""Simulation-based calibration: are fits to data with known parameters as certain as they should be?

Draw :math:`\theta` from the prior and y given it, fit the posterior of y, and draw L times from the fit. If the fit
is the posterior, the rank of :math:`\theta` among the draws is uniform on 0, ..., L. This is repeated, and the ranks
are compared with uniform ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from joblib import Parallel, delayed
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, clone

from skksivi._utils.arrays import RandomState, html_table, make_seed, without_graph
from skksivi._utils.checks import check_integer, warn_caller
from skksivi._utils.monte_carlo import counts_below, uniform_band, uniformity
from skksivi.targets import coordinate_names, from_score_fn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Calibration", "sbc"]
__dir__ = __all__.copy

#: Lines with a colour and a name of their own, in a picture of many.
N_NAMED = 7


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """The ranks of a simulation-based calibration; printed, it is a table of p-values.

    Attributes
    ----------
    ranks : ndarray of shape (n, k)
        How many of the draws are below the true value of each quantity, from 0 to `n_draws`.
    n_draws : int
        Draws of each fit.
    names : tuple of str of length k
        Names of the quantities: the parameters, then your own.
    n_failures : int
        Replications that failed, which have no ranks.
    failure : str
        What the first of them raised, empty without any.

    See Also
    --------
    sbc : Makes it.

    Examples
    --------
    >>> import numpy as np
    >>> from skksivi.calibration import Calibration
    >>> ranks = np.random.RandomState(0).randint(100, size=(200, 2))
    >>> result = Calibration(ranks, 99, ("a", "b"))
    >>> result.p_value > 0.05
    True
    """

    ranks: np.ndarray
    n_draws: int
    names: tuple[str, ...]
    n_failures: int = 0
    failure: str = ""

    @cached_property
    def p_values(self) -> np.ndarray:
        """P-value of each quantity (k,), exact for any number of replications: small if its ranks are not uniform."""
        return np.array([uniformity(ranks, self.n_draws) for ranks in self.ranks.T])

    @property
    def p_value(self) -> float:
        """Joint p-value: k times the smallest, which is valid however the quantities depend on one another."""
        return min(1.0, float(self.p_values.min()) * len(self.names))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the distribution functions of the ranks minus the uniform one, with a band.

        All lines of uniform ranks stay in the band with a probability of 95% at least. Draws that are too narrow give
        a line that is first above and then below zero, draws that are too wide the reverse; draws that are too high
        stay above zero, draws that are too low below. Lines beyond the seventh that stay in the band are grey.

        Parameters
        ----------
        ax : Axes, default=None
            Where to draw; None makes a figure.

        Returns
        -------
        ax : Axes
        """
        if ax is None:
            import matplotlib.pyplot as plt  # not above: it takes long

            ax = plt.subplots(figsize=(6.4, 4), layout="constrained")[1]
        n, k = self.ranks.shape
        z = np.arange(1, self.n_draws + 1) / (self.n_draws + 1)
        low, high = uniform_band(n, self.n_draws, 1 - 0.05 / k)
        label = "95% band" + " of all lines" * (k > 1)
        ax.fill_between(z, low / n - z, high / n - z, color="0.6", alpha=0.3, linewidth=0, label=label)
        ax.axhline(0, color="0.6", linewidth=0.8)
        for j, (name, ranks) in enumerate(zip(self.names, self.ranks.T, strict=True)):
            counts = counts_below(ranks, self.n_draws)
            is_named = j < N_NAMED or ((counts < low) | (counts > high)).any()
            style: dict[str, Any] = {"label": name} if is_named else {"color": "0.6", "linewidth": 0.8}
            ax.plot(z, counts / n - z, **style)
        ax.set(xlabel="rank of the true value, as a share of the draws", ylabel="ECDF difference", xlim=(0, 1))
        ax.legend(frameon=False, fontsize="small")
        return ax

    def _head(self) -> str:
        failed = f", {self.n_failures} more failed" if self.n_failures else ""
        return f"{len(self.ranks)} replications, {self.n_draws} draws of each fit{failed}: p = {self.p_value:.2g}"

    def _rows(self) -> list[tuple[str, str, str]]:
        """Return the name, p-value and, where it is below 5% over their number, the fault of each quantity."""
        return [
            (name, f"{p:.2g}", _fault(ranks, self.n_draws) if p * len(self.names) < 0.05 else "")
            for name, p, ranks in zip(self.names, self.p_values, self.ranks.T, strict=True)
        ]

    def __repr__(self) -> str:
        width = max(map(len, self.names))
        lines = [f"  {name:<{width}}  p = {p:<8}{fault}" for name, p, fault in self._rows()]
        return "\n".join(line.rstrip() for line in [self._head(), *lines])

    def _repr_html_(self) -> str:
        """Return the same as a table of HTML."""
        return html_table(self._rows(), head=("", "p", ""), above=self._head())


def _fault(ranks: np.ndarray, n_draws: int) -> str:
    """Return what most stands out of ranks (n,) that are not uniform, by moments in their standard errors."""
    u = (ranks + 0.5) / (n_draws + 1) - 0.5
    shift = np.sqrt(12 * len(u)) * u.mean()
    spread = np.sqrt(len(u) / 0.8) * (12 * np.square(u).mean() - 1)
    if abs(spread) > abs(shift):
        return "draws too narrow" if spread > 0 else "draws too wide"
    return "draws too low" if shift > 0 else "draws too high"


def sbc(  # noqa: PLR0913
    simulate_prior: Callable[[np.random.RandomState], Any],
    simulate_data: Callable[[Any, np.random.RandomState], Any],
    make_target: Callable[[Any], object],
    estimator: BaseEstimator,
    n: int = 200,
    *,
    n_draws: int = 99,
    quantities: Callable[[Any, Any], ArrayLike | Mapping[str, ArrayLike]] | None = None,
    names: Sequence[str] | None = None,
    n_jobs: int | None = None,
    random_state: RandomState = None,
) -> Calibration:
    r"""Check fits on data whose parameters are known, drawn from the prior.

    .. math::
        \theta \sim p(\theta), \quad y \sim p(y | \theta), \quad x_1, \ldots, x_L \sim q(x | y) \approx p(\theta | y),
        \qquad r_j = \#\{l : x_{lj} < \theta_j\}

    If q is the posterior, each rank is uniform on 0, ..., L. Otherwise their distribution shows draws that are too
    narrow, too wide or shifted on average over the prior, due to an error in the model, its score or the fit. A fit
    that ignores the data and returns the prior has uniform ranks too; a quantity of both parameters and data, best
    the log-likelihood, detects it.

    Parameters
    ----------
    simulate_prior : callable
        Takes a RandomState and returns parameters of shape (d,), unconstrained, as the target's score takes them;
        or a dict of arrays by name, as the target's `constrain` returns them.
    simulate_data : callable
        Takes the result of `simulate_prior` and a RandomState, and returns data of any kind.
    make_target : callable
        Takes data and returns the target of their posterior, or its score function (n, d) -> (n, d), which becomes a
        target.
    estimator : approximator
        Unfitted; a copy is fitted to each target. Any object with scikit-learn's parameters, ``fit(target)`` and
        ``sample(n_samples, random_state=...)`` works. Its draws should be independent, as they are for all
        approximators except chains and particles.
    n : int, default=200
        Number of replications. With a p-value below 0.05 as criterion, 200 nearly always detect draws that are 30%
        too narrow, and draws that are 10% too narrow one time in four.
    n_draws : int, default=99
        Draws of each fit, the L of the formula.
    quantities : callable, default=None
        Takes parameters and data and returns a number, several, or a dict of them by name, which are ranked beside
        the parameters. It is called with the true parameters and with each draw. Ties are broken at random.
    names : sequence of str of length d, default=None
        Of the parameters; None means the target's, or x0, x1 and so on.
    n_jobs : int, default=None
        Number of parallel replications, as in joblib; ``joblib.parallel_config("dask")`` sends them to a cluster.
        Ranks do not depend on it.
    random_state : int, RandomState or None, default=None
        Seeds the replications, each by its number.

    Returns
    -------
    calibration : Calibration
        Ranks, p-values and `plot()`.

    Raises
    ------
    TypeError, ValueError
        A parameter, or what one of the functions has returned in the first replication, is not as described. What
        they raise there comes through as it is. All this is before the first fit.
    RuntimeError
        No replication succeeded.

    Warns
    -----
    UserWarning
        Some replications failed: something raised an exception, or draws were not finite. They have no ranks.

    See Also
    --------
    skksivi.diagnose : Checks one fit, without simulations.

    References
    ----------
    Talts, S. et al. (2018). Validating Bayesian inference algorithms with simulation-based calibration.
    https://arxiv.org/abs/1804.06788

    Modrák, M. et al. (2025). Simulation-based calibration checking for Bayesian computation: the choice of test
    quantities shapes sensitivity. Bayesian Analysis 20(2). https://arxiv.org/abs/2211.02383

    Säilynoja, T., Bürkner, P.-C. and Vehtari, A. (2022). Graphical test for discrete uniformity and its applications
    in goodness-of-fit evaluation and multiple sample comparison. https://arxiv.org/abs/2103.10522

    Examples
    --------
    The mean of five normal observations, whose posterior is normal too:

    >>> from skksivi.baselines import Laplace
    >>> from skksivi.calibration import sbc
    >>> result = sbc(
    ...     simulate_prior=lambda rng: rng.normal(size=1),
    ...     simulate_data=lambda theta, rng: theta + rng.normal(size=5),
    ...     make_target=lambda y: lambda x: y.sum() - 6 * x,
    ...     estimator=Laplace(),
    ...     n=50,
    ...     random_state=0,
    ... )
    >>> result.p_value > 0.05
    True
    """
    check_integer(n, "n", min_val=1)
    check_integer(n_draws, "n_draws", min_val=1)
    if isinstance(estimator, type) or not all(hasattr(estimator, name) for name in ("fit", "sample", "get_params")):
        raise TypeError(f"`estimator` must be an unfitted approximator, such as Laplace(); got {estimator!r}.")
    problem = Problem(simulate_prior, simulate_data, make_target, estimator, n_draws, quantities)
    seed = make_seed(random_state)
    all_names = problem.names(names, _streams(seed, 0)[0])
    found = Parallel(n_jobs)(delayed(problem.ranks)(len(all_names), *_streams(seed, i)) for i in range(n))
    failures = [ranks for ranks in found if isinstance(ranks, str)]
    reason = f" The first: {failures[0].rstrip('.')}." if failures else ""
    if len(failures) == n:
        raise RuntimeError(f"None of the {n} replications succeeded.{reason}")
    if failures:
        warn_caller(
            f"{len(failures)} of {n} replications failed and have no ranks.{reason} If failing depends on the "
            "parameters, the ranks of the others are not uniform even where the fits are right: remove the cause."
        )
    ranks = np.array([ranks for ranks in found if not isinstance(ranks, str)])
    return Calibration(ranks, n_draws, all_names, len(failures), failures[0] if failures else "")


@dataclass(frozen=True)
class Problem:
    """The parts of each replication, see `sbc`."""

    simulate_prior: Callable[..., Any]
    simulate_data: Callable[..., Any]
    make_target: Callable[..., Any]
    estimator: Any
    n_draws: int
    quantities: Callable[..., Any] | None

    def names(self, given: Sequence[str] | None, rng: np.random.RandomState) -> tuple[str, ...]:
        """Return the names of parameters and quantities by a simulation, and raise where its parts do not fit."""
        theta, data, target = self._simulated(rng)
        d, own = len(self._numbers(theta)), self.quantities and self.quantities(theta, data)
        if isinstance(theta, Mapping):
            known = target.constrain(np.zeros((1, target.n_features))) if hasattr(target, "constrain") else {}
            shapes, expected = _shapes(theta), {name: values.shape[1:] for name, values in known.items()}
            names = coordinate_names(shapes)
        else:
            shapes, expected = {"x": (d,)}, {"x": (getattr(target, "n_features", d),)}
            names = getattr(target, "names", None) or tuple(f"x{j}" for j in range(d))
        if not shapes.items() <= expected.items():
            raise ValueError(
                f"`simulate_prior` gave parameters {shapes}, but the target of `make_target` has {expected}; a dict "
                "needs one with `constrain`, as of `skksivi.targets.constrained`."
            )
        names = tuple(names) if given is None else tuple(map(str, given))
        if len(names) != d:
            raise ValueError(f"`names` are {len(names)}, expected {d}, one for each parameter.")
        names += () if own is None else coordinate_names(_shapes(own, "quantity"))
        if len(set(names)) < len(names):
            raise ValueError(f"`names` and `quantities` give one name twice, in {', '.join(names)}; rename one.")
        self._numbers(theta, data)  # which may be NaN
        return names

    def ranks(
        self, n_names: int, of_simulation: np.random.RandomState, rng: np.random.RandomState
    ) -> list[int] | str:
        """Return the ranks of parameters and quantities among draws of a fit, or why there are none."""
        try:
            theta, data, target = self._simulated(of_simulation)
            q = clone(self.estimator)
            if "random_state" in q.get_params(deep=False):
                q.set_params(random_state=make_seed(rng))
            q.fit(target)
            X = np.asarray(without_graph(q.sample(self.n_draws, random_state=make_seed(rng))))
            rows = [*X]
            if isinstance(theta, Mapping):
                draws = target.constrain(X)
                rows = [{name: draws[name][j] for name in theta} for j in range(len(X))]
            values = np.stack([self._numbers(row, data) for row in [theta, *rows]])
            n, k = values[1:].shape
            if (n, k) != (self.n_draws, n_names):
                raise ValueError(f"there are {n} draws of {k} quantities, expected {self.n_draws} of {n_names}")
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return [_rank(column, rng) for column in values.T]

    def _simulated(self, rng: np.random.RandomState) -> tuple[Any, Any, Any]:
        """Return parameters, data and the target of their posterior."""
        theta = self.simulate_prior(rng)
        data = self.simulate_data(theta, rng)
        target = self.make_target(data)
        if callable(target) and not hasattr(target, "score_fn"):
            target = from_score_fn(target, len(self._numbers(theta)))
        return theta, data, target

    def _numbers(self, theta: object, *data: object) -> np.ndarray:
        """Return the parameters (d,) and, given data, the quantities after them."""
        own = self.quantities(theta, *data) if data and self.quantities is not None else {}
        row = np.concatenate([part.ravel() for part in [*_arrays(theta).values(), *_arrays(own).values()]])
        if np.isnan(row).any():
            raise ValueError(f"parameters, draws or `quantities` are NaN, in {row}; expected numbers.")
        return row


def _arrays(values: Any, name: str = "") -> dict[str, np.ndarray]:  # noqa: ANN401
    """Return numbers as arrays by name; what has none gets this one."""
    parts = values if isinstance(values, Mapping) else {name: values}
    return {str(key): np.asarray(without_graph(part), dtype=np.float64) for key, part in parts.items()}


def _shapes(values: object, name: str = "") -> dict[str, tuple[int, ...]]:
    return {key: part.shape for key, part in _arrays(values, name).items()}


def _streams(seed: int, i: int) -> list[np.random.RandomState]:
    """Return the random numbers of the simulation and of the fit of a replication, independent of the others."""
    spawned = np.random.SeedSequence(seed, spawn_key=(i,)).spawn(2)
    return [np.random.RandomState(np.random.MT19937(sequence)) for sequence in spawned]


def _rank(values: np.ndarray, rng: np.random.RandomState) -> int:
    """Return how many of the values after the first are below it; ties are so at random."""
    first, draws = values[0], values[1:]
    return int((draws < first).sum() + rng.randint((draws == first).sum() + 1))
