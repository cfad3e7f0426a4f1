"""Tables of numbers with their standard errors: those of a posterior, and the evidence of several models."""

from __future__ import annotations

import math
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from scipy.special import ndtr, ndtri

from skksivi._utils.arrays import RandomState, as_array, html_table, make_rng, make_seed, resolve_device, with_error
from skksivi._utils.checks import lies_between, shown
from skksivi.base import BaseApproximator, check_finite, check_fit, of_predictor, without_density
from skksivi.coordinates._whitening import Whitening
from skksivi.families._derived import Derived, Refined, asks_for_score, knows_density, unweighted
from skksivi.families._samplers import Chains, Layers, Particles, Sampler
from skksivi.families._weights import MAX_FREE, N_FREE, with_parameters
from skksivi.inference._importance import Limits, importance_sample, weighted_draws_of
from skksivi.judge import THRESHOLDS, Errors, Evidence, Grade, Numbers, Verdict, WeightedDraws, monotone_in, words_of
from skksivi.pilot._points import MANY_FEATURES, has_small_errors
from skksivi.score._score import ScoreFunction
from skksivi.score._target import compared_score
from skksivi.targets._base import Target
from skksivi.training._run import ordinary_mode

if TYPE_CHECKING:
    from pandas import DataFrame

    from skksivi.predictors import KSIVIClassifier, KSIVIRegressor


#: Columns of a printed table at most, and levels of the quantiles by which a fit is compared with its target.
WIDTH, COMPARED = 100, (0.05, 0.95)


class Table(ABC):
    """Rows of numbers with their standard errors."""

    names: tuple[str, ...]
    notes: tuple[str, ...]
    warning: str
    source: str

    @abstractmethod
    def _columns(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return each number and its standard errors by its name."""

    def to_frame(self) -> DataFrame:
        """Return a row for each name, with all digits.

        Returns
        -------
        frame : pandas.DataFrame
            With two columns for each number, such as "mean" and "mean_se", and "note".

        Raises
        ------
        ImportError
            pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("`to_frame` needs pandas: install it with `pip install pandas`.") from error
        columns: dict[str, object] = {}
        for name, (value, se) in self._columns().items():
            columns |= {name: value, f"{name}_se": se}
        return pandas.DataFrame({**columns, "note": list(self.notes)}, index=pandas.Index(self.names, name="name"))

    def _rows(self) -> tuple[list[str], list[list[str]]]:
        """Return the head and the lines of a table, a cell for each number with its standard error; some of many."""
        k, columns = len(self.names), self._columns()
        most = 60
        some = range(k) if k <= most else [*range(most // 2), *range(k - most // 2, k)]
        cells = ([with_error(value[i], se[i]) for value, se in columns.values()] for i in some)
        rows = [[self.names[i], *row, self.notes[i]] for i, row in zip(some, cells, strict=True)]
        if len(rows) < k:
            rows.insert(most // 2, [f"... {k - len(rows):,} more ...", *([""] * len(columns)), ""])
        has_notes = any(row[-1] for row in rows)
        return ["", *columns, *(["note"] if has_notes else [])], [row if has_notes else row[:-1] for row in rows]

    def __str__(self) -> str:
        head, rows = self._rows()
        lines = textwrap.wrap(self.warning, WIDTH) + [line.rstrip() for line in _aligned(head, rows)]
        return "\n".join([*lines, *textwrap.wrap(self.source, WIDTH)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the same as a table of HTML."""
        head, rows = self._rows()
        return html_table(rows, head=head, above=self.warning, below=self.source)


@dataclass(frozen=True, repr=False)
class Summary(Table):
    """The numbers of a posterior, parameter by parameter, and the standard error of each.

    Attributes
    ----------
    names : tuple of str
        Of the k parameters.
    levels : tuple of float
        Of the quantiles.
    mean, sd : ndarray of shape (k,)
    quantiles : ndarray of shape (n_levels, k)
    mean_se, sd_se, quantiles_se : ndarray
        Standard errors as estimates of the posterior's numbers, of the same shapes; NaN where unknown.
    notes : tuple of str
        Empty, or why a number or its standard error is not known: "errors unknown", "constant", both of a coordinate
        in which a fit has collapsed, or at how many draws a parameter is not finite.
    warning : str
        What is wrong with the fit and what to do, in one sentence; empty if nothing is.
    source : str
        What the numbers come from, and the score calls that they took.
    """

    names: tuple[str, ...]
    levels: tuple[float, ...]
    mean: np.ndarray = field(compare=False)
    sd: np.ndarray = field(compare=False)
    quantiles: np.ndarray = field(compare=False)
    mean_se: np.ndarray = field(compare=False)
    sd_se: np.ndarray = field(compare=False)
    quantiles_se: np.ndarray = field(compare=False)
    notes: tuple[str, ...]
    warning: str
    source: str

    def _columns(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        found = {"mean": (self.mean, self.mean_se), "sd": (self.sd, self.sd_se)}
        for level, q, se in zip(self.levels, self.quantiles, self.quantiles_se, strict=True):
            found[f"{100 * level:.10g}%"] = q, se
        return found


def _aligned(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    """Yield the lines of a table, in parts one below the other where it is too wide."""
    longest = 30
    table = [head, *([row[0][: longest - 1] + "…" if len(row[0]) > longest else row[0], *row[1:]] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    parts, used = [[0]], widths[0]
    for j, width in enumerate(widths[1:], 1):
        if used + 2 + width > WIDTH and len(parts[-1]) > 1:
            parts.append([0])
            used = widths[0]
        parts[-1].append(j)
        used += 2 + width
    for part in parts:
        for row in table:
            yield "  ".join([row[0].ljust(widths[0]), *(row[j].rjust(widths[j]) for j in part[1:])])


def summary(
    est: BaseApproximator | KSIVIRegressor | KSIVIClassifier,
    target: Target | ScoreFunction | None = None,
    quantiles: Sequence[float] = (0.05, 0.5, 0.95),
    *,
    n_samples: int | None = None,
    within: float | None = None,
    max_score_calls: int | None = None,
    random_state: RandomState = None,
) -> Summary:
    r"""Tabulate means, standard deviations and quantiles of a posterior, each with its standard error.

    The numbers are the posterior's, not the fit's: draws with importance weights, half from the fit and half from
    wider Gaussians that look where it does not draw, correct the fit's own. A fit has kept such draws, so that
    ``summary(q)`` takes no call of the score. A standard error says how far a number may be from the posterior's.
    Where the weights are not reliable the numbers are the fit's own, and a sentence above the table says so. In 30
    dimensions or more their standard errors then combine the errors of the chains behind the fit with the difference
    between its draws and these chains, for coordinates and monotone functions of one coordinate. All other errors are
    unknown. A narrow mode that no draw has reached shows in no number.

    Parameters
    ----------
    est : approximator, KSIVIRegressor or KSIVIClassifier
        Fitted. A predictor knows its target; the rows are then its parameters in the units of the data.
    target : Target or callable, default=None
        What it was fitted to, or its score function. If it has `constrain`, the rows are parameters of the model,
        with names such as "b[0]" or "b[1, 2]"; otherwise coordinates, with the `names` of the target or as "x[0]".
        None takes the draws that the fit has kept.
    quantiles : sequence of float, default=(0.05, 0.5, 0.95)
        Their levels, rising, strictly between 0 and 1.
    n_samples : int, default=None
        How many weighted draws there are to be, see `importance_sample`; 2,000 of a fit that has kept none. Standard
        errors fall as the root of the number. Each parameter takes some 5 milliseconds: 2,000 of them take 10
        seconds.
    within : float, default=None
        Draws are added until the largest standard error of a mean or quantile, in standard deviations, is below this.
    max_score_calls : int, default=None
        The most calls for further draws; what was drawn until then is used.
    random_state : int, RandomState or None, default=None
        With a number all draws are new.

    Returns
    -------
    summary : Summary
        Prints as a table, in which a number ends at the first digit of its standard error; ``to_frame()`` is a data
        frame with the columns "mean", "mean_se", "sd", "sd_se", "5%", "5%_se" and so on. Its attributes ``mean``,
        ``mean_se``, ``sd``, ``sd_se``, ``quantiles`` and ``quantiles_se`` are arrays.

    Raises
    ------
    NotFittedError
        Before `fit`.
    TypeError
        `est` is no approximator, `target` no target, or `n_samples` no integer.
    ValueError
        The fit has kept no draws, and there is no `target`; `quantiles` or `n_samples` is out of range; the target
        has another dimension than `est`, hardly any density where the fit draws, or a `constrain` that does not
        return a row for each draw.

    Warns
    -----
    UserWarning
        Draws where the log-density of the target is NaN are left out.

    See Also
    --------
    expectation : Means of functions under the target.
    importance_sample : The weighted draws.
    diagnose : A report on a fit.

    References
    ----------
    Owen, A. and Zhou, Y. (2000). Safe and effective importance sampling. JASA 95(449).

    Woodruff, R. S. (1952). Confidence intervals for medians and other position measures. JASA 47(260).

    Examples
    --------
    >>> from skksivi import summary
    >>> from skksivi.baselines import Laplace
    >>> from skksivi.targets import constrained
    >>> target = constrained(lambda sd: 3 * sd.log() - 2 * sd, {"sd": "positive"})  # Gamma(4, 2)
    >>> table = summary(Laplace(random_state=0).fit(target), target, random_state=0)
    >>> table.names
    ('sd',)
    >>> abs(table.mean - 2) < 4 * table.mean_se
    array([ True])
    """
    limits, is_predictor = Limits(n_samples, within, max_score_calls), not isinstance(est, BaseApproximator)
    est, known = of_predictor(est, target)
    has_draws = getattr(est, "weighted_draws_", None) is not None
    if not (is_predictor and has_draws and limits == Limits() and random_state is None):  # else these will do
        target = known
    check_fit(est, target)
    levels = _checked(quantiles)
    every = np.union1d(levels, COMPARED)
    sample, before = None, _calls_of_draws(est.sampler_)
    if knows_density(est.sampler_) or target is None:

        def largest_se(draws: WeightedDraws) -> float:
            return _largest_se(draws, levels)

        sample, score = weighted_draws_of(est, target, largest_se, limits, random_state)
        if score is not None:  # a model may have many more parameters than coordinates
            k = len(score.parameters_at(sample.draws[:2])[0])
            sample = with_parameters(replace(sample, draws=sample.draws[: max(1000, MAX_FREE // k)]), score)
        if not sample.names:
            raise ValueError("The fit has not kept the parameters of its model: pass `target`.")
        names, draws, n_calls = list(sample.names), sample.draws, 0 if score is None else score.tally.total
        g = draws if sample.parameters_of_draws is None else sample.parameters_of_draws
    else:
        with ordinary_mode(resolve_device(est.device_)):
            score = compared_score(cast("Target", target), est.n_features_in_, est.dtype, est.device_)
        draws = _own_draws(est, n_samples or 1000, random_state)
        check_finite(draws, score)
        names = score.parameters_at(draws[:2])[0]  # a model may have many more than coordinates
        g, n_calls = score.parameters_at(draws[: max(1000, MAX_FREE // len(names))])[1], score.tally.total
    chains = _chains_behind(est)
    if sample is not None and sample.trusted:
        table, by = _by_weights(sample, g, every), "weights"
    elif chains is not None:
        table, by = _by_chains(chains, draws, g, every), "chains"
    else:
        table, by = _without_errors(g, every), ""
    warning = _warning(est, sample, table, names, np.searchsorted(every, COMPARED), by)
    asked = np.searchsorted(every, levels)
    found = table.posterior
    found = found._replace(quantiles=found.quantiles[asked], quantiles_se=found.quantiles_se[asked])
    notes = tuple(_note(found, i, int(n), levels) for i, n in enumerate(table.n_bad))
    source = _source(sample, len(draws), n_calls + _calls_of_draws(est.sampler_) - before, by)
    return Summary(tuple(names), tuple(levels.tolist()), *found, notes, warning, source)


def _largest_se(draws: WeightedDraws, levels: np.ndarray) -> float:
    """Return the largest standard error of a mean or quantile of the coordinates, in sd."""
    if not draws.trusted:
        return math.inf
    found = draws.numbers(draws.X, draws.draws, levels)
    return float((np.vstack([found.mean_se, found.quantiles_se]) / np.maximum(found.sd, 1e-300)).max())


def _checked(quantiles: Sequence[float]) -> np.ndarray:
    """Return levels of quantiles as an array."""
    listed = isinstance(quantiles, Sequence | np.ndarray) and all(lies_between(q, 0, 1) for q in quantiles)
    levels = np.array(quantiles, np.float64) if listed else np.zeros(2)
    if not (np.diff(levels) > 0).all():
        raise ValueError(
            "`quantiles` must be rising numbers strictly between 0 and 1, such as (0.05, 0.5, 0.95), got "
            f"{shown(quantiles)}."
        )
    return levels


def _calls_of_draws(sampler: Sampler) -> int:
    """Return the calls so far of the scores by which a sampler draws, if it does."""
    parts = [part for part in (sampler, unweighted(sampler)) if isinstance(part, Layers | Refined)]
    return sum({id(part.score): part.score.tally.total for part in parts if part.score is not None}.values())


def _own_draws(est: BaseApproximator, n_samples: int, random_state: RandomState) -> np.ndarray:
    """Return draws (m, d) of a fit without a density, stored points at most once."""
    sampler, n = est.sampler_, min(N_FREE, MAX_FREE // est.n_features_in_)
    if isinstance(sampler, Particles | Chains):
        X = as_array(sampler.x).reshape(-1, est.n_features_in_)
        return X[:: math.ceil(len(X) / n)].astype(np.float64)
    return est.sample(n_samples if asks_for_score(sampler) else n, make_seed(random_state)).astype(np.float64)


# The numbers


class _Table(NamedTuple):
    """The numbers of the fit and of the posterior, and at how many points each parameter is not finite."""

    fit: Numbers
    posterior: Numbers
    n_bad: np.ndarray


def _without_errors(g: np.ndarray, levels: np.ndarray, f: np.ndarray | None = None) -> _Table:
    """Return the numbers of parameters g (m, k) of draws, without errors; those of f (n, k) must be finite, too, and
    a parameter that is constant there as well has none.
    """
    both = [g] if f is None else [g, f]
    n_bad = np.sum([(~np.isfinite(a)).sum(0) for a in both], 0)
    fit = Numbers(*(np.full((*head, g.shape[1]), np.nan) for head in ((), (), levels.shape) * 2))
    fit = _filled(fit, n_bad == 0, lambda k: Numbers.of_draws(g[:, k], levels))
    low, high = np.min([a.min(0) for a in both], 0), np.max([a.max(0) for a in both], 0)
    with np.errstate(invalid="ignore"):
        constant = (n_bad == 0) & (high - low <= 1e-12 * np.maximum(np.abs(low), np.abs(high)))  # but for rounding
    zero = np.zeros((len(levels), 1))
    fit = _filled(fit, constant, lambda k: Numbers(g[0, k], zero[0], g[0, k] + zero, zero[0], zero[0], zero))
    known = constant & (f is not None)  # else a fit may have collapsed, which says nothing of the posterior
    errors = (np.where(known, 0.0, np.full_like(a, np.nan)) for a in fit[3:])
    posterior = Numbers(*fit[:3], *errors)
    return _Table(fit, posterior, n_bad)


def _filled(numbers: Numbers, which: np.ndarray, make: Callable[[np.ndarray], Numbers]) -> Numbers:
    """Return numbers with others in some columns, of some hundred at a time, so that memory is bounded."""
    found, columns = Numbers(*(a.copy() for a in numbers)), np.flatnonzero(which)
    for i in range(0, len(columns), 500):
        k = columns[i : i + 500]
        for a, b in zip(found, make(k), strict=True):
            a[..., k] = b
    return found


def _by_weights(sample: WeightedDraws, g: np.ndarray, levels: np.ndarray) -> _Table:
    """Return numbers by weighted draws."""
    f = sample.X if sample.parameters is None else sample.parameters
    table = _without_errors(g, levels, f)
    which = np.isnan(table.posterior.mean_se) & (table.n_bad == 0)
    found = _filled(table.posterior, which, lambda k: sample.numbers(f[:, k], g[:, k], levels))
    beyond = np.minimum(levels, 1 - levels) * sample.effective
    found.quantiles_se[np.ix_(beyond < 4, which)] = np.nan  # two standard errors reach the end
    return table._replace(posterior=found)


class _Moments(NamedTuple):
    """What chains have found: means and standard deviations (d,) of the coordinates, and errors in sd."""

    mean: np.ndarray
    sd: np.ndarray
    error: np.ndarray


def _chains_behind(est: BaseApproximator) -> _Moments | None:
    """Return the moments that chains behind a fit of many features have found, if they are reliable."""
    found, d = getattr(est, "whitening_", None), est.n_features_in_
    if not isinstance(found, Whitening) or found.mean is None or found.mean_se is None or found.sd is None:
        return None
    if d < MANY_FEATURES or not (found.sd > 0).all() or not (found.converged or has_small_errors(d, found.error)):
        return None
    return _Moments(found.mean, found.sd, found.mean_se / found.sd)


def _by_chains(chains: _Moments, draws: np.ndarray, g: np.ndarray, levels: np.ndarray) -> _Table:
    """Return numbers of draws (m, d), with the errors of chains and the difference from these in the coordinates, and
    in parameters that are monotone functions of one.
    """
    table, tiny = _without_errors(g, levels), np.finfo(np.float64).tiny
    noise = np.hypot(chains.error, 1 / math.sqrt(len(g)))
    of_mean = np.hypot(noise, (draws.mean(0) - chains.mean) / chains.sd)
    of_sd = np.hypot(noise, np.log(np.maximum(draws.std(0), tiny) / chains.sd))
    j = monotone_in(draws, g)
    which = (j >= 0) & (table.fit.sd > 0) & (table.n_bad == 0)

    def make(k: np.ndarray) -> Numbers:
        own, z = _columns(table.fit, k), ndtri(levels)[:, None]
        se = np.hypot(of_mean[j[k]], z * of_sd[j[k]])  # of a quantile, in sd
        low, high = (np.round(ndtr(z + s * se) * (len(g) - 1)).astype(int) for s in (-1, 1))
        ordered = np.sort(g[:, k], axis=0)
        half = (np.take_along_axis(ordered, high, 0) - np.take_along_axis(ordered, low, 0)) / 2
        return own._replace(mean_se=own.sd * of_mean[j[k]], sd_se=own.sd * of_sd[j[k]], quantiles_se=half)

    return table._replace(posterior=_filled(table.posterior, which, make))


def _columns(numbers: Numbers, k: np.ndarray) -> Numbers:
    return Numbers(*(a[..., k] for a in numbers))


# What is said of them


def _note(found: Numbers, i: int, n_bad: int, levels: np.ndarray) -> str:
    """Say why a number of a parameter, or its error, is not known."""
    if n_bad:
        return f"not finite at {n_bad:,} draws"
    unknown = np.isnan(found.mean_se[i])
    if found.sd[i] == 0:
        return "constant, errors unknown" if unknown else "constant"
    if unknown:
        return "errors unknown"
    few = [f"{100 * q:.10g}%" for q, se in zip(levels, found.quantiles_se[:, i], strict=True) if np.isnan(se)]
    return f"few draws beyond {', '.join(few)}" if few else ""


def _warning(
    est: BaseApproximator,
    sample: WeightedDraws | None,
    table: _Table,
    names: list[str],
    compared: np.ndarray,
    by: str,
) -> str:
    """Say in a sentence what is wrong with a fit, and what to do."""
    verdict = None if isinstance(est.sampler_, Derived) else getattr(est, "verdict_", None)  # it is another fit's
    grade, reason = (verdict.grade, verdict.reason) if isinstance(verdict, Verdict) else (None, "")
    another = "; or `target` is not what was fitted, for which it was good" * (grade == Grade.GOOD)
    see = "see `diagnose(est, target)`"
    if by == "weights" and sample is not None:
        found = _worst(table, names, compared) or _away(sample) or reason * (grade == Grade.WRONG)
        corrected = f"Draws of the fit are off, unlike this table: {found}; `refine(est, target)` corrects them"
        return f"{corrected}{another}." if found else ""
    if by == "chains":
        return (
            f"The fit was found to be {grade.name.lower()}: {reason}; {see}."
            if grade is not None and grade < Grade.GOOD
            else ""
        )
    own = "The numbers are the fit's own, and their errors are unknown"
    if sample is None:
        return f"{own}: {without_density(est)}, so its draws have no weights; {see}."
    away = f", and {found}" if (found := _away(sample)) else ""
    return f"{own}: the weights of its draws are not reliable ({sample.reliability()}){away}; {see}{another}."


def _worst(table: _Table, names: list[str], compared: np.ndarray) -> str:
    """Describe the worst error of a fit, if one is beyond its limit."""
    which = np.flatnonzero(np.isfinite(table.posterior.mean_se) & (table.posterior.sd > 0))
    if not len(which):
        return ""
    fit, known = (_columns(numbers, which) for numbers in (table.fit, table.posterior))
    se = np.nan_to_num(known.quantiles_se, nan=math.inf)
    known = known._replace(quantiles=known.quantiles[compared], quantiles_se=se[compared])
    fit = fit._replace(quantiles=fit.quantiles[compared], quantiles_se=fit.quantiles_se[compared])
    worst = Errors.between(fit, known).worst(THRESHOLDS.n_se)
    return words_of(worst, lambda i: f"`{names[which[i]]}`") if worst.excess > 1 else ""


def _away(sample: WeightedDraws) -> str:
    """Say how much of the posterior is where the fit hardly draws, if that is much."""
    return f"{sample.lost:.0%} of the posterior is where the fit hardly draws" if sample.lost > 0.05 else ""


def _source(sample: WeightedDraws | None, n_draws: int, n_calls: int, by: str) -> str:
    """Say what numbers rest on, and what they cost."""
    n = n_draws if sample is None else len(sample.weights)
    draws = "draws of the fit"
    if sample is not None:
        draws = f"weighted draws, effective sample size {sample.effective:,.0f}, k-hat {sample.k:.2f}"
    errors = "; errors by the chains behind the fit" * (by == "chains")
    return f"{n:,} {draws}{errors}; {n_calls:,} score calls" + "; ± one standard error" * bool(by)


# Models of the same data, compared by their evidence


@dataclass(frozen=True, repr=False)
class Comparison(Table):
    """The log evidence of models, from the highest to the lowest.

    Attributes
    ----------
    names : tuple of str
        Of the k models; those whose weights are not reliable come last.
    log_z, log_z_se : ndarray of shape (k,)
        Natural logarithms of the evidence, and standard errors; infinite where the weights are not reliable.
    difference, difference_se : ndarray of shape (k,)
        What they are above the first, and standard errors.
    notes : tuple of str
        Empty, or why a standard error is not known.
    source : str
        What the numbers come from.
    """

    names: tuple[str, ...]
    log_z: np.ndarray = field(compare=False)
    log_z_se: np.ndarray = field(compare=False)
    difference: np.ndarray = field(compare=False)
    difference_se: np.ndarray = field(compare=False)
    notes: tuple[str, ...]
    source: str
    warning = ""

    def _columns(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        return {"log_z": (self.log_z, self.log_z_se), "difference": (self.difference, self.difference_se)}


def compare(
    fits: Mapping[str, BaseApproximator | tuple[BaseApproximator, Target]],
    *,
    n_samples: int | None = None,
    random_state: RandomState = None,
) -> Comparison:
    r"""Tabulate the log evidence of several models of the same data, and the differences, with standard errors.

    A difference of :math:`\log Z` is the logarithm of a Bayes factor. It depends on the priors, which must be proper,
    and `log_prob` must have all of its constants: models in PyMC, NumPyro and Stan have them, and for your own only
    you can tell. What cannot be compared is refused: a target known by its score alone, one that leaves constants out
    and says so, by ``up_to_constant = True``, and targets with other data, by their `observed_data` or `n_rows`.

    Parameters
    ----------
    fits : dict of str to approximator, or to (approximator, Target)
        A fit with a density by the name of each model, whose evidence comes from the weighted draws that it has kept;
        a pair of a fit and its target draws more, see `importance_sample`.
    n_samples : int, default=None
        How many draws of each fit there are to be, for pairs.
    random_state : int, RandomState or None, default=None

    Returns
    -------
    comparison : Comparison
        Prints as a table, the best model first; ``to_frame()`` is a data frame with the columns "log_z", "log_z_se",
        "difference", "difference_se" and "note". ``names``, ``log_z`` and so on are its attributes.

    Raises
    ------
    NotFittedError
        Before `fit`.
    TypeError
        `fits` is not a dict of fits, or a fit has no density.
    ValueError
        The evidences cannot be compared, or a fit has kept no weighted draws.

    See Also
    --------
    evidence : Of one model, with bounds.
    to_arviz : For leave-one-out, which depends less on the priors.

    References
    ----------
    Kass, R. E. and Raftery, A. E. (1995). Bayes factors. JASA 90(430).

    Examples
    --------
    >>> import torch
    >>> from skksivi import compare
    >>> from skksivi.baselines import Laplace
    >>> from skksivi.targets import from_log_prob
    >>> def model(sd):  # 1.5 ~ N(x, 1), x ~ N(0, sd^2)
    ...     prior, noise = torch.distributions.Normal(0, sd), torch.distributions.Normal(1.5, 1)
    ...     return from_log_prob(lambda x: (prior.log_prob(x) + noise.log_prob(x)).sum(-1), n_features=1)
    >>> models = {f"sd = {sd}": model(sd) for sd in (1, 10)}
    >>> table = compare({name: (Laplace().fit(target), target) for name, target in models.items()}, random_state=0)
    >>> table.names, table.difference.round(2)
    (('sd = 1', 'sd = 10'), array([ 0.  , -1.41]))
    """
    pairs = (
        [each if isinstance(each, tuple) else (each, None) for each in dict(fits).values()]
        if (isinstance(fits, Mapping))
        else []
    )
    if not pairs or not all(len(pair) == 2 for pair in pairs):
        raise TypeError("`fits` must be a dict of fits such as {'name': q}, or of pairs {'name': (q, target)}.")
    rng, kept, found = make_rng(random_state), list[WeightedDraws](), list[Evidence]()
    for name, (est, target) in zip(fits, pairs, strict=True):
        check_fit(est, target, f"fits[{name!r}]" + "[0]" * (target is not None))
        n = None if target is None else n_samples
        kept.append(importance_sample(est, target, n_samples=n, random_state=make_seed(rng)))
        found.append(kept[-1].evidence())
        if kept[-1].up_to_constant or found[-1].reference is not None:
            raise ValueError(
                f"`fits[{name!r}]`: the target has an unknown constant, which its evidence would need; fit one whose "
                "`log_prob` has all of its constants."
            )
    for (a, one), (b, other) in combinations(zip(fits, kept, strict=True), 2):
        if any(x.split()[0] == y.split()[0] and x != y for x in one.data for y in other.data):
            raise ValueError(
                f"`fits`: the targets of {a!r} and {b!r} have other data (`observed_data` or `n_rows`), so that "
                "their evidences cannot be compared; fit both to the same data."
            )
    z, se = np.array([one.log_z for one in found]).T
    order = np.lexsort([-z, np.isinf(se)])
    best, z, se = order[0], z[order], se[order]
    notes = tuple("" if found[i].trusted else f"weights not reliable, k-hat {found[i].k:.2f}" for i in order)
    difference_se = np.where(order == best, 0.0, np.hypot(se, se[0]))
    counts = " and ".join(f"{n:,}" for n in sorted({len(draws.X) for draws in kept}))
    source = f"{counts} weighted draws for each model; ± one standard error"
    return Comparison(tuple(list(fits)[i] for i in order), z, se, z - z[0], difference_se, notes, source)
