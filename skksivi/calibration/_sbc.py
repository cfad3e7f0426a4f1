"""Calibration by data from the prior, or from the posterior of observed data."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import joblib
import numpy as np
import torch
from joblib import Parallel, delayed
from numpy.typing import ArrayLike
from sklearn.base import clone

from skksivi._utils.arrays import RandomState, make_seed, without_graph
from skksivi._utils.checks import check_integer, warn_caller
from skksivi.base import BaseApproximator, check_fit
from skksivi.calibration._replication import CallError, Fits, Parameters, Problem, Simulated, flat, replicate, streams
from skksivi.calibration._result import Calibration, Failure, Record
from skksivi.estimators import FREE, described
from skksivi.score import in_double

#: Parameters and data, of any type.
Theta = TypeVar("Theta")
Data = TypeVar("Data")


def sbc(  # noqa: PLR0913
    simulate_prior: Callable[[np.random.RandomState], Parameters],
    simulate_data: Callable[[Theta, np.random.RandomState], Data],
    make_target: Callable[[Data], object],
    estimator: Fits,
    n: int = 200,
    *,
    n_draws: int = 99,
    quantities: Callable[[Theta, Data], ArrayLike | Mapping[str, float]] | None = None,
    names: Sequence[str] | None = None,
    path: str | os.PathLike[str] | None = None,
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
        Takes parameters and data and returns a number, several, or a dict of numbers by name, which are ranked beside
        the parameters. It is called with the true parameters and with each draw. Ties are broken at random.
    names : sequence of str of length d, default=None
        Of the parameters; None means the target's, or x0, x1 and so on.
    path : path-like, default=None
        A file for finished replications, written at most once per second and complete at any time. The same call
        resumes where it was interrupted, and retries failed replications; a larger `n` adds to it.
    n_jobs : int, default=None
        Number of parallel replications, as in joblib; ``joblib.parallel_config("dask")`` sends them to a cluster.
        Ranks do not depend on it.
    random_state : int, RandomState or None, default=None
        Seeds the replications, each by its number. None continues with the seed of the file, if there is one.

    Returns
    -------
    calibration : Calibration
        Ranks, p-values, `plot()` and `failures`.

    Raises
    ------
    TypeError, ValueError
        A parameter, or what one of the functions has returned in the first replication, is not as described; or the
        file at `path` is of other settings. All are raised before the first fit.
    RuntimeError
        No replication succeeded.
    OSError
        The file cannot be written.

    Warns
    -----
    UserWarning
        Some replications failed: something raised an exception, or draws were not finite. They have no ranks.

    See Also
    --------
    posterior_sbc : The same around one set of observed data.
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
    _check_callables(simulate_prior=simulate_prior)
    problem = Problem(
        "simulate_prior", simulate_prior, simulate_data, make_target, estimator, n_draws, quantities, names
    )
    return _calibrated(problem, n, path, n_jobs, random_state)


def posterior_sbc(  # noqa: PLR0913
    posterior: BaseApproximator | Parameters,
    simulate_data: Callable[[Theta, np.random.RandomState], Data],
    make_target: Callable[[Data, Data], object],
    estimator: Fits,
    y_observed: Data,
    n: int = 200,
    *,
    n_draws: int = 99,
    quantities: Callable[[Theta, Data, Data], ArrayLike | Mapping[str, float]] | None = None,
    names: Sequence[str] | None = None,
    path: str | os.PathLike[str] | None = None,
    n_jobs: int | None = None,
    random_state: RandomState = None,
) -> Calibration:
    r"""Check fits on data whose parameters are known, drawn from the posterior of observed data.

    .. math::
        \theta \sim p(\theta | y_\mathrm{obs}), \quad y \sim p(y | \theta), \quad
        x_1, \ldots, x_L \sim q(x | y_\mathrm{obs}, y) \approx p(\theta | y_\mathrm{obs}, y)

    It is `sbc` with this posterior as the prior: it checks fits near the observed data, not over the whole prior.

    Parameters
    ----------
    posterior : approximator, array-like of shape (m, d) or dict of arrays of shape (m, ...)
        Draws of the posterior of `y_observed`, one picked at random for each replication, or a fitted
        approximator, which draws them.
    simulate_data : callable
        As in `sbc`, independent of `y_observed` given the parameters.
    make_target : callable
        Takes `y_observed` and simulated data and returns the target of the posterior of both.
    estimator : approximator
        Unfitted, as in `sbc`.
    y_observed : object
        The observed data, of any kind.
    n, n_draws, names, path, n_jobs, random_state
        See `sbc`.
    quantities : callable, default=None
        Takes parameters, `y_observed` and simulated data; otherwise as in `sbc`.

    Returns
    -------
    calibration : Calibration

    Raises
    ------
    NotFittedError
        `posterior` is an approximator without a fit.
    TypeError, ValueError, RuntimeError, OSError
        As `sbc` does.

    Warns
    -----
    UserWarning
        Some replications failed.

    See Also
    --------
    sbc : Simulation-based calibration.

    References
    ----------
    Säilynoja, T., Schmitt, M., Bürkner, P.-C. and Vehtari, A. (2025). Posterior SBC: simulation-based calibration
    checking conditional on data. https://arxiv.org/abs/2502.03279

    Examples
    --------
    >>> import numpy as np
    >>> from skksivi.baselines import Laplace
    >>> from skksivi.calibration import posterior_sbc
    >>> def make_target(*data):
    ...     y = np.concatenate(data)
    ...     return lambda x: y.sum() - (1 + len(y)) * x
    >>> y = np.array([0.3, 1.2, 0.8])
    >>> result = posterior_sbc(
    ...     posterior=Laplace().fit(make_target(y), n_features=1),
    ...     simulate_data=lambda theta, rng: theta + rng.normal(size=3),
    ...     make_target=make_target,
    ...     estimator=Laplace(),
    ...     y_observed=y,
    ...     n=50,
    ...     random_state=0,
    ... )
    >>> result.p_value > 0.05
    True
    """
    draw = _picking(posterior)
    problem = Problem(
        "posterior", draw, simulate_data, make_target, estimator, n_draws, quantities, names, (y_observed,)
    )
    return _calibrated(problem, n, path, n_jobs, random_state)


def _check_callables(**functions: object) -> None:
    """Raise TypeError if one of these is not a function."""
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"`{name}` must be a function, got a {type(function).__name__}.")


def _picking(posterior: BaseApproximator | Parameters) -> Callable[[np.random.RandomState], object]:
    """Return a function that draws from a posterior."""
    if hasattr(posterior, "fit"):
        check_fit(posterior, name="posterior")
    if isinstance(posterior, BaseApproximator):
        return partial(_drawn, posterior)
    arrays = posterior if isinstance(posterior, Mapping) else {"posterior": posterior}
    draws = {str(name): np.asarray(without_graph(values)) for name, values in arrays.items()}
    named = isinstance(posterior, Mapping)
    lengths = {values.shape[:1] for values in draws.values()}
    if len(lengths) != 1 or min(lengths) < (1,) or not (named or draws["posterior"].ndim == 2):
        shapes = ", ".join(f"{name} of shape {values.shape}" for name, values in draws.items())
        raise ValueError(
            "`posterior` must be a fitted approximator, draws of shape (m, d), or a dict of arrays of m draws each; "
            f"got {shapes or 'an empty dict'}."
        )
    return partial(_picked, draws, named)


def _drawn(posterior: BaseApproximator, rng: np.random.RandomState) -> np.ndarray:
    return posterior.sample(1, random_state=rng)[0]


def _picked(draws: dict[str, np.ndarray], named: bool, rng: np.random.RandomState) -> Parameters:
    i = rng.randint(len(next(iter(draws.values()))))
    row = {name: values[i] for name, values in draws.items()}
    return row if named else row["posterior"]


def _calibrated(
    problem: Problem, n: int, path: str | os.PathLike[str] | None, n_jobs: int | None, random_state: RandomState
) -> Calibration:
    """Make the replications that are missing, and return all of them."""
    _check(problem, n)
    record = Record(path)
    seed = make_seed(random_state) if random_state is not None or record.seed is None else record.seed
    first, names = _first(problem, seed, n)
    if path is not None:
        record.begin(seed, _identity(problem, seed, names, first))
    tasks = [delayed(replicate)(problem, seed, i, names) for i in range(n) if i not in record.ranks]
    failed: list[Failure] = []
    try:
        for i, found in Parallel(n_jobs=n_jobs, return_as="generator_unordered")(tasks):
            if isinstance(found, str):
                failed.append(Failure(i, found))
            else:
                record.add(i, found)
    finally:
        record.write()
    failures = tuple(sorted(failed, key=lambda failure: failure.replication))
    done = [i for i in sorted(record.ranks) if i < n]
    if not done:
        raise RuntimeError(f"None of the {n} replications succeeded. {_reason(failures[0])}")
    if failures:
        warn_caller(
            f"{len(failures)} of {n} replications failed and have no ranks. {_reason(failures[0])} If failing "
            "depends on the parameters, the ranks of the others are not uniform even where the fits are right: "
            "remove the cause and call again" + (", with the same `path` to repeat these only." if path else ".")
        )
    ranks = np.array([record.ranks[i] for i in done])
    return Calibration(ranks, problem.n_draws, names, np.array(done), failures)


def _reason(failure: Failure) -> str:
    return f"The first, number {failure.replication}: {failure.message.rstrip('.')}."


def _check(problem: Problem, n: int) -> None:
    """Raise TypeError or ValueError for what can be told from the parameters alone."""
    check_integer(n, "n", min_val=1)
    check_integer(problem.n_draws, "n_draws", min_val=1)
    _check_callables(simulate_data=problem.simulate_data, make_target=problem.make_target)
    if problem.quantities is not None:
        _check_callables(quantities=problem.quantities)
    estimator = problem.estimator
    if isinstance(estimator, type):
        raise TypeError(f"`estimator` is the class {estimator.__name__}; pass an instance, {estimator.__name__}().")
    missing = [name for name in ("fit", "sample", "get_params") if not hasattr(estimator, name)]
    if missing:
        raise TypeError(
            f"`estimator` must be an approximator, got a {type(estimator).__name__}, which has no "
            f"{', '.join(missing)}."
        )
    clone(estimator)


def _first(problem: Problem, seed: int, n: int) -> tuple[Simulated, tuple[str, ...]]:
    """Return the first replication that can be simulated, without a fit, and the names of its quantities."""
    failures = []
    for i in range(n):
        try:
            simulated = problem.simulate(streams(seed, i)[0])
            own = {} if problem.quantities is None else problem.quantity(simulated.theta, simulated.data)
        except CallError as error:
            failures.append(Failure(i, str(error)))
            continue
        names = (*simulated.names, *own)
        if len(names) > len(set(names)):
            raise ValueError(f"`names` and `quantities` give one name twice, in {', '.join(names)}; rename one.")
        return simulated, names
    raise RuntimeError(f"None of the {n} replications could be simulated. {_reason(failures[0])}")


def _identity(problem: Problem, seed: int, names: tuple[str, ...], simulated: Simulated) -> str:
    """Return a hash of what tells these replications from others: settings, and numbers of the first."""
    estimator = problem.estimator
    settings: list[object] = [seed, problem.n_draws, names, type(estimator).__name__]
    for name, value in estimator.get_params(deep=False).items():
        if name not in FREE:
            with suppress(ValueError):  # of what cannot be told apart
                settings.append((name, described(name, value)))
    with np.errstate(over="ignore"):  # rounded, so that another computer finds the same
        first = np.round([*flat(simulated.theta), *_scores(simulated.target)], 6).astype(np.float32) + 0
    return joblib.hash([*settings, first])


def _scores(target: Any) -> list[float]:  # noqa: ANN401
    """Return what the score of a target is at some points, nothing where it cannot be told."""
    if not hasattr(target, "score_fn"):
        return []
    with warnings.catch_warnings(), suppress(Exception):  # the fit will raise the same, and warn
        warnings.simplefilter("ignore")
        score = in_double(target, target.n_features)
        x = torch.randn(3, score.n_features, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return score(x).flatten().tolist()
    return []
