"""One judge of points and fits: how far may a number that is read off them be from the posterior's?

What is good enough is one table of limits. What is said of points and fits is a grade, the reason, the remedy, and
the errors of the numbers that are read off them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from skksivi._utils.arrays import listed, shown_by_rows, with_error
from skksivi._utils.monte_carlo import (
    most_trusted,
    pareto_smoothed,
    standard_error,
    systematic_rows,
)

__all__ = ["THRESHOLDS", "Errors", "Grade", "Verdict", "WeightedDraws"]
__dir__ = __all__.copy

#: The smallest effective sample size of reliable weights, and the largest share of the draws of a fit where log p may
#: be unknown.
LEAST_EFFECTIVE, MOST_LEFT_OUT = 30, 0.01


class Thresholds(NamedTuple):
    """The limits within which a fit, or the points of a stage, are good enough."""

    #: The errors of means and of 5% and 95% quantiles, in sd, and of sds, as a share; the mass of the draws in a
    #: tail, beyond their 0.1% or 99.9% quantile, and how much more the posterior may have there; the standard errors
    #: by which a limit must be exceeded, twice as many of quantiles and tails; and the part of it beyond which more
    #: draws are asked.
    mean: float = 0.1
    quantile: float = 0.1
    sd: float = 0.1
    tail: float = 0.001
    beyond: float = 0.004
    n_se: float = 1.0
    near: float = 0.5
    #: A fit is good if the error of every number and two standard errors are within this, in sd or, of an sd, as a
    #: difference of logarithms; farther off than the last, in sd, it is not said how far.
    within: float = 0.2
    far: float = 1e4
    #: How many times as large as the posterior's an sd is no noise of a heavy tail.
    spread: float = 1e3
    #: The divergence of an amortised fit per feature, in nats.
    divergence: float = 0.05

    #: Chains: R-hat, and the largest standard error; the trajectories after which the second will do, that of means
    #: which no longer chains improve.
    rhat: float = 1.03
    chain_errors: tuple[float, float] = (0.02, 0.05)
    long_chains: int = 200
    #: The largest standard error of a mean, in sd, of many features where chains do not agree.
    small_errors: float = 0.1
    #: Warped coordinates of many features: how far points may have moved, in sd, since these were fitted to them.
    moved: float = 0.15
    #: The share of the last ascents that found modes which no others had found, where mass may be at further ones.
    unseen: float = 0.02
    #: A Gaussian that is the target itself: the divergence of their scores.
    same_score: float = 1e-4


THRESHOLDS = Thresholds()


class Grade(IntEnum):
    """How well points or a fit are known to have the numbers of a target, from worst to best.

    A number is wrong; none could be judged; they may be off; of many features the means are known; all are right.
    """

    WRONG = 0
    UNKNOWN = 1
    ROUGH = 2
    SMALL_ERRORS = 3
    GOOD = 4


class Worst(NamedTuple):
    """The number that is farthest beyond its limit: what it is, of which column, its error and the standard error."""

    kind: str
    column: int
    error: float
    se: float
    excess: float


class Errors(NamedTuple):
    """How far the numbers of a fit are from the posterior's, column by column; NaN where that was not assessed.

    Attributes
    ----------
    mean, mean_se : ndarray of shape (k,)
        The fit's less the posterior's, in standard deviations of the posterior.
    sd, sd_se : ndarray of shape (k,)
        The logarithm of the ratio of the fit's to the posterior's.
    quantiles, quantiles_se : ndarray of shape (2, k)
        Of 5% and 95%, in standard deviations of the posterior.
    beyond, beyond_se : ndarray of shape (2, k) or None
        The mass of the posterior beyond the 0.1% and 99.9% quantiles of the draws; None where it is not known.

    See Also
    --------
    Verdict : What is said of a fit that has these.
    """

    mean: np.ndarray
    mean_se: np.ndarray
    sd: np.ndarray
    sd_se: np.ndarray
    quantiles: np.ndarray
    quantiles_se: np.ndarray
    beyond: np.ndarray | None = None
    beyond_se: np.ndarray | None = None

    @classmethod
    def between(cls, fit: Numbers, posterior: Numbers) -> Errors:
        """Return the errors of the numbers of a fit, given the posterior's."""
        tiny = np.finfo(np.float64).tiny
        unit = np.maximum(posterior.sd, 1e-150)  # of a constant
        return cls(
            (fit.mean - posterior.mean) / unit,
            np.hypot(posterior.mean_se, fit.mean_se) / unit,
            np.log(np.maximum(fit.sd, tiny) / unit),
            np.hypot(posterior.sd_se, fit.sd_se) / unit,
            (fit.quantiles - posterior.quantiles) / unit,
            np.hypot(posterior.quantiles_se, fit.quantiles_se) / unit,
        )

    @classmethod
    def less_fit(cls, fit: Numbers, posterior: Numbers) -> Errors:
        """Return the same, given standard errors of the differences as the posterior's."""
        return cls.between(Numbers(*fit[:3], *(np.zeros_like(a) for a in fit[3:])), posterior)

    def _parts(self) -> list[tuple[str, np.ndarray, np.ndarray, float, int]]:
        """Return the kinds of numbers, each with its errors (k,), their standard errors, the limit, and how often the
        standard errors count: of quantiles and tails twice, for there are more, and their noise has heavier tails.
        """
        found = [
            ("mean", self.mean, self.mean_se, THRESHOLDS.mean, 1),
            ("standard deviation", self.sd, self.sd_se, math.log1p(THRESHOLDS.sd), 1),
            ("5% quantile", self.quantiles[0], self.quantiles_se[0], THRESHOLDS.quantile, 2),
            ("95% quantile", self.quantiles[1], self.quantiles_se[1], THRESHOLDS.quantile, 2),
        ]
        if self.beyond is not None and self.beyond_se is not None:
            sides = zip(("lower", "upper"), (self.beyond - THRESHOLDS.tail).clip(0), self.beyond_se, strict=True)
            found += [(f"{side} tail", lost, se, THRESHOLDS.beyond, 2) for side, lost, se in sides]
        return found

    def worst(self, n_se: float) -> Worst:
        """Return the number farthest beyond its limit, of errors that are so many standard errors nearer to zero."""
        found = list[Worst]()
        for kind, error, se, limit, times in self._parts():
            with np.errstate(invalid="ignore"):  # of an infinite error
                excess = np.nan_to_num((np.abs(error) - times * n_se * se) / limit, nan=-math.inf)
            excess[np.isinf(error)] = math.inf
            k = int(excess.argmax())
            found.append(Worst(kind, k, float(error[k]), float(se[k]), float(excess[k])))
        return max(found, key=lambda each: each.excess)

    @property
    def bound(self) -> Worst:
        """The number that may be farthest off, with its error and two standard errors as the excess."""
        kinds = "mean", "standard deviation", "5% quantile", "95% quantile"
        errors = np.array([self.mean, self.sd, *self.quantiles])
        se = np.array([self.mean_se, self.sd_se, *self.quantiles_se])
        far = np.nan_to_num(np.abs(errors) + 2 * se, nan=-math.inf, posinf=math.inf)
        i, k = np.unravel_index(int(far.argmax()), far.shape)
        return Worst(kinds[i], int(k), float(errors[i, k]), float(se[i, k]), float(far[i, k]))

    @property
    def se_of_moments(self) -> float:
        """The largest standard error of a mean or a standard deviation in units of its limit."""
        parts = self.mean_se / THRESHOLDS.mean, self.sd_se / math.log1p(THRESHOLDS.sd)
        return float(np.nanmax(np.concatenate([[0.0], *parts])))


@shown_by_rows
@dataclass(frozen=True, order=True)
class Verdict:
    """How good points or a fit are, and why; compared by the grade alone.

    A fit is good if every number that was assessed is `within` 0.2 of the posterior's.

    Attributes
    ----------
    grade : Grade
    reason : str
    remedy : str
        What to do, empty where nothing is needed.
    errors : Errors or None
        None where they are not known.
    by : str
        What says it: "weights", "chains", which know no quantiles, or Stein's "identities"; empty if nothing does.

    See Also
    --------
    Errors : How far the numbers of a fit are from the posterior's.
    skksivi.diagnose : A report on a fit.
    """

    grade: Grade
    reason: str = field(default="", compare=False)
    remedy: str = field(default="", compare=False)
    errors: Errors | None = field(default=None, compare=False)
    by: str = field(default="", compare=False)

    @classmethod
    def of(cls, errors: Errors, label: Callable[[int], str], by: str) -> Verdict:
        """Return what errors say, given the names of columns."""
        bound, worst = errors.bound, errors.worst(THRESHOLDS.n_se)
        if bound.excess <= THRESHOLDS.within and not (worst.excess > 1 and worst.kind.endswith("tail")):
            what = f"every number is within {bound.excess:.2g} sd (the {bound.kind} of {label(bound.column)})"
            return cls(Grade.GOOD, what, errors=errors, by=by)
        if worst.excess > 1:
            return cls(Grade.WRONG, words_of(worst, label), errors=errors, by=by)
        words = words_of(bound, label)
        return cls(Grade.ROUGH, f"{words}, which is not within {THRESHOLDS.within:g} sd", errors=errors, by=by)

    @property
    def good(self) -> bool:
        """Whether every number that was assessed is within 0.2 of the posterior's."""
        return self.grade >= Grade.GOOD

    @property
    def settled(self) -> bool:
        """Whether it is good, and no error seems to be beyond 0.1."""
        return self.good and (self.errors is None or self.errors.worst(0).excess <= 1)

    @property
    def within(self) -> float:
        """The largest error and two standard errors: of means and quantiles in sd, of sds as a difference of
        logarithms; NaN where none is known.
        """
        return math.nan if self.errors is None else self.errors.bound.excess

    def __str__(self) -> str:
        return self.grade.name.lower().replace("_", " ") + (f": {self.reason}" if self.reason else "")

    def _rows(self) -> list[tuple[str, str]]:
        grade = str(self).partition(":")[0]
        return [("grade", grade), ("reason", self.reason), ("to do", self.remedy), ("by", self.by)]


def words_of(worst: Worst, label: Callable[[int], str]) -> str:
    """Describe an error in words, given the names of columns."""
    name = label(worst.column)
    if worst.kind.endswith("tail"):
        mass = f"{worst.error + THRESHOLDS.tail:.1%} of the mass, standard error {worst.se:.1%},"
        return f"{mass} is beyond {1 - THRESHOLDS.tail:.1%} of the draws in the {worst.kind} of {name}"
    what = f"the {worst.kind} of {name}"
    if not abs(worst.error) < THRESHOLDS.far:
        return f"{what} is far off the posterior's"
    if worst.kind == "standard deviation":
        return f"{what} is {math.exp(worst.error):.2f} times the posterior's, standard error {worst.se:.2g}"
    return f"{what} is {worst.error:+.2f} sd from the posterior's, standard error {worst.se:.2g}"


class Numbers(NamedTuple):
    """What is read off a distribution, column by column.

    Attributes
    ----------
    mean, sd : ndarray of shape (k,)
    quantiles : ndarray of shape (n_levels, k)
    mean_se, sd_se, quantiles_se : ndarray
        Standard errors, of the same shapes.
    """

    mean: np.ndarray
    sd: np.ndarray
    quantiles: np.ndarray
    mean_se: np.ndarray
    sd_se: np.ndarray
    quantiles_se: np.ndarray

    @classmethod
    def of_draws(cls, g: np.ndarray, levels: np.ndarray) -> Numbers:
        """Return those of independent draws g (m, k); the errors of quantiles are by Woodruff's intervals."""
        m, mean, sd = len(g), g.mean(0), g.std(0)
        away = np.square(g - mean)
        noise = np.sqrt(levels * (1 - levels) / m)
        ordered = np.sort(np.ascontiguousarray(g.T))  # once, and by rows: much faster
        low, middle, high = (np.quantile(ordered, (levels + z * noise).clip(0, 1), axis=1) for z in (-1, 0, 1))
        tiny = np.finfo(np.float64).tiny
        sd_se = away.std(0) / np.maximum(2 * sd, tiny) / math.sqrt(m)
        return cls(mean, sd, middle, sd / math.sqrt(m), sd_se, (high - low) / 2)


class Estimate(NamedTuple):
    """A number, or an array of numbers, and its standard error."""

    value: float | np.ndarray
    se: float | np.ndarray


@shown_by_rows
class Certificate(NamedTuple):
    """How far a fit is from its target, as far as weighted draws reach.

    Attributes
    ----------
    divergence : float
        KL(q || p) + KL(p || q), in nats. It adds over features: a small one does not say that each number read off
        the fit is right, see `skksivi.diagnose`.
    se : float
        Its standard error, with what a heavy tail may add that the draws have not shown.
    se_below : float
        Without that: how far the divergence may be below. It is more often underestimated than overestimated.
    k : float
        The shape of the tail of the importance ratios, k-hat.
    share : float
        The effective sample size as a share of the draws, between 0 and 1. Half of the draws are wider than the fit,
        so that it may be a half where the fit is right.
    trusted : bool
        Whether the weights are reliable: an effective sample size of 30 or more, a k-hat of 0.7 or less (somewhat
        less of few draws), and log p known at 99% of the draws of the fit. It says nothing of modes that no draw has
        reached, nor that the divergence is small.
    """

    divergence: float
    se: float
    se_below: float
    k: float
    share: float
    trusted: bool

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("divergence, in nats", f"{self.divergence:.2g} ± {self.se:.2g}"),
            ("k-hat", f"{self.k:.2f}"),
            ("effective sample size", f"{self.share:.0%} of the draws"),
            ("weights", "reliable" if self.trusted else "not reliable"),
        ]


@shown_by_rows
class Evidence(NamedTuple):
    """Bounds on the log evidence, and an estimate; of a target known by its score relative to log p at `reference`.

    Where the weights are not reliable the standard errors of `log_z` and `eubo` are infinite.

    Attributes
    ----------
    elbo : Estimate
        E_q[log p - log q], from below.
    log_z : Estimate
        The logarithm of the integral of p.
    eubo : Estimate
        E_p[log p - log q], from above.
    k : float
        The shape of the tail of the importance ratios.
    trusted : bool
        Whether the weights are reliable, as `log_z` and `eubo` need, see `Certificate`.
    reference : ndarray of shape (n_features,) or None
        Where p is one; None where the target has a `log_prob`.
    """

    elbo: Estimate
    log_z: Estimate
    eubo: Estimate
    k: float
    trusted: bool
    reference: np.ndarray | None

    def _rows(self) -> list[tuple[str, str]]:
        names = "log evidence", "lower bound", "upper bound", "k-hat", "weights", "relative to log p at"
        bounds = (with_error(float(found.value), float(found.se)) for found in (self.log_z, self.elbo, self.eubo))
        weights = "reliable" if self.trusted else "not reliable"
        reference = "" if self.reference is None else listed(self.reference)
        return list(zip(names, [*bounds, f"{self.k:.2f}", weights, reference], strict=True))


@dataclass(frozen=True, repr=False)
class WeightedDraws:
    r"""Draws of a fit and of wider Gaussians, weighted for the posterior p and for the fit q.

    The judge of a fit reads them, a refit is fitted to them, and the fit keeps them as `weighted_draws_`. The mean of
    f under p is estimated with the fit as a control variate, whose own means are known from further draws,

    .. math:: \hat\theta = \sum_i w_i f(x_i) - \beta \left(\sum_i v_i f(x_i) - E_q f\right),

    for weights w of p and v of q. Where the fit is right both are the same, and so the difference of the numbers of
    p and q has hardly an error; where it is far off :math:`\beta` is near zero.

    Attributes
    ----------
    X : ndarray of shape (n, n_features)
        Half are draws of the fit; the others are of Gaussians wider than it, in all directions or along a
        coordinate, which look where it does not draw.
    of_fit : ndarray of shape (n,), bool
        Which are draws of the fit.
    log_p : ndarray of shape (n,)
        The log-density of the posterior, of a target known by its score relative to `reference`.
    log_q, log_q_se : ndarray of shape (n,)
        The log-density of the fit, and its standard errors.
    log_m : ndarray of shape (n,)
        The log-density of both kinds of draws together.
    weights, weights_of_fit : ndarray of shape (n,)
        Ratios of p, Pareto-smoothed, and of q to that density. Each set sums to one.
    k : float
        The shape of the tail of the ratios of p, which have 1/k finite moments.
    log_z, log_z_se : float
        The logarithm of their mean, and its standard error.
    draws : ndarray of shape (m, n_features)
        Further draws of the fit.
    seed, n_calls, n_left_out : int
        What they were drawn by, the score calls that they took, and how many draws of the fit are not among them,
        since log p is unknown there: the target's is NaN, or the integral of its score leads through too deep a
        valley.
    reference : ndarray of shape (n_features,) or None
        Where p is one, of a target known by its score alone.
    names : tuple of str
        Of the k parameters of the model, or of the coordinates.
    parameters, parameters_of_draws : ndarray of shape (n, k) and (m, k), or None
        Their values at `X` and `draws`; None where they are the coordinates.
    up_to_constant : bool
        Whether `log_p` leaves a constant out, as far as the target says.
    data : tuple of str
        Checksums of the data of the target, of those that it shows.

    References
    ----------
    Owen, A. and Zhou, Y. (2000). Safe and effective importance sampling. JASA 95(449).
    """

    X: np.ndarray
    of_fit: np.ndarray
    log_p: np.ndarray
    log_q: np.ndarray
    log_q_se: np.ndarray
    log_m: np.ndarray
    weights: np.ndarray
    weights_of_fit: np.ndarray
    k: float
    log_z: float
    log_z_se: float
    draws: np.ndarray
    seed: int
    n_calls: int
    n_left_out: int = 0
    reference: np.ndarray | None = None
    names: tuple[str, ...] = ()
    parameters: np.ndarray | None = None
    parameters_of_draws: np.ndarray | None = None
    up_to_constant: bool = False
    data: tuple[str, ...] = ()

    # What they are worth

    @property
    def share(self) -> float:
        r"""The effective sample size as a share of the draws, :math:`1 / (n \sum_i w_i^2)`."""
        return float(1 / (len(self.weights) * np.square(self.weights).sum()))

    @property
    def effective(self) -> float:
        """The effective sample size."""
        return self.share * len(self.weights)

    @property
    def left_out(self) -> float:
        """The share of the draws of the fit that are not among them."""
        return self.n_left_out / max(1, int(self.of_fit.sum()) + self.n_left_out)

    @property
    def lost(self) -> float:
        """The share of the posterior's mass where its density is more than ten times the fit's."""
        return float(self.weights[self.weights > 10 * self.weights_of_fit].sum())

    @property
    def trusted(self) -> bool:
        """Whether the weights are reliable: k is at most min(1 - 1 / log10(n), 0.7), or below one with an effective
        sample size of 200; this is at least 30; and at most 1% is left out.

        A part of the posterior that no draw has reached shows in none of these.
        """
        light = self.k <= most_trusted(len(self.weights)) or (self.k < 1 and self.effective >= 200)
        return light and self.effective >= LEAST_EFFECTIVE and self.left_out <= MOST_LEFT_OUT

    def reliability(self) -> str:
        """Say why the weights are not reliable."""
        if self.left_out > MOST_LEFT_OUT:
            return f"log p is unknown at {self.left_out:.0%} of its draws: give the target a `log_prob`"
        size = f"effective sample size {self.effective:.0f}, {LEAST_EFFECTIVE} are needed"
        return f"k-hat {self.k:.2f}, {most_trusted(len(self.weights)):.2f} is allowed; {size}"

    def __repr__(self) -> str:
        n, reliable = len(self.weights), "reliable" if self.trusted else "not reliable"
        return f"WeightedDraws(n={n:,}, effective={self.effective:,.0f}, k={self.k:.2f}, weights {reliable})"

    # Numbers of the posterior

    def means(self, f: np.ndarray, g: np.ndarray, *, less: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        r"""Return the means (k,) of values f (n, k) of the rows, with standard errors, given g (m, k) at `draws`.

        A standard error includes what a heavy tail may add that the rows have not shown. It is that of the mean less
        so many times the fit's own, 0 or 1, in which the further draws count :math:`\beta - \text{less}` times.
        """
        w, v, known = self.weights, self.weights_of_fit, g.mean(0)
        under_p, under_q = w @ f, v @ f
        of_p, of_q = (len(f) * a[:, None] * (f - mean) for a, mean in ((w, under_p), (v, under_q)))
        beta = _slopes(of_p, of_q)
        rows = np.array([standard_error(column) for column in (of_p - beta * of_q).T])
        return under_p - beta * (under_q - known), np.hypot(rows, abs(beta - less) * g.std(0) / math.sqrt(len(g)))

    def shares(self, f: np.ndarray, g: np.ndarray, *, less: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return `means` of values that are 0 or 1, and the slopes (k,).

        Standard errors have no part for a tail that the rows have not shown, but for one more of those that count.
        """
        f, g, w, v = f.astype(np.float64), g.astype(np.float64), self.weights, self.weights_of_fit
        under_p, under_q, known = w @ f, v @ f, g.mean(0)
        of_p, of_q = (len(f) * a[:, None] * (f - mean) for a, mean in ((w, under_p), (v, under_q)))
        beta = _slopes(of_p, of_q)
        gaps = np.abs(w - beta[:, None] * v)
        one_more = np.square(gaps).sum(1) / np.maximum(gaps.sum(1), np.finfo(np.float64).tiny)
        rows = np.hypot((of_p - beta * of_q).std(0) / math.sqrt(len(f)), one_more)
        se = np.hypot(rows, abs(beta - less) * np.sqrt(known * (1 - known) / len(g)))
        return under_p - beta * (under_q - known), se, beta

    def numbers(self, f: np.ndarray, g: np.ndarray, levels: np.ndarray, *, less: float = 0.0) -> Numbers:
        """Return the numbers of the columns of f (n, k), given g (m, k) at `draws`, and levels of quantiles."""
        mean, mean_se = self.means(f, g, less=less)
        variance, variance_se = self.means(np.square(f - mean), np.square(g - mean), less=less)
        sd = np.sqrt(variance.clip(np.finfo(np.float64).tiny))
        pairs = [self._quantiles(*columns, levels, less) for columns in zip(f.T, g.T, strict=True)]
        quantiles, quantiles_se = np.array(pairs).transpose(1, 2, 0)
        sd_se = np.minimum(variance_se / (2 * sd), np.sqrt(variance_se))  # the latter of a number that hardly varies
        return Numbers(mean, sd, quantiles, mean_se, sd_se, quantiles_se)

    def _quantiles(
        self, f: np.ndarray, g: np.ndarray, levels: np.ndarray, less: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return quantiles of one column, f (n,) and g (m,), with standard errors.

        The signed measure of rows and draws of q is a distribution function but for noise. That of a level is carried
        over to a quantile by Woodruff's interval.
        """
        w, v, order = self.weights, self.weights_of_fit, np.argsort(np.concatenate([f, g]))
        places = np.concatenate([f, g])[order]
        tiny, found = np.finfo(np.float64).tiny, []
        for level, place in zip(levels, np.quantile(g, levels), strict=True):
            beta = float(self.shares((f <= place)[:, None], (g <= place)[:, None])[2][0])
            masses = np.concatenate([w - beta * v, np.full(len(g), beta / len(g))])[order]
            cumulative = np.maximum.accumulate(masses.cumsum())
            middle = np.interp(level, cumulative, places)
            # One row may carry the level: it is below the quantile or above, whichever is less certain
            reached = min(int(np.searchsorted(cumulative, level)), len(places) - 1)
            at = places[[max(reached - 1, 0), reached]]
            se = float(self.shares(f[:, None] <= at, g[:, None] <= at, less=less)[1].max())
            low, high = np.interp(np.clip([level - se, level + se], level / 10, 0.9 + level / 10), cumulative, places)
            reach = np.clip([level - 2 * se, level + 2 * se], level / 2, (1 + level) / 2)
            far = np.abs(np.interp(reach, cumulative, places) - middle).max() / 2
            # where the density has a gap nearby the interval is to reach over it
            found.append((middle, max(far if far > (high - low) else (high - low) / 2, tiny)))
        values, errors = np.array(found).T
        return values, errors

    def knows_variance(self, f: np.ndarray) -> np.ndarray:
        """Tell of each column of values f (n, k) of the rows whether it seems to have a variance under p: its
        standard error is smaller, it does not rest on rows that weigh less than one draw, and the tail has a shape
        well below a half.
        """
        away = np.square(f - self.weights @ f)
        variance = self.weights @ away
        influence = len(f) * self.weights[:, None] * (away - variance)
        known = np.array([standard_error(column) for column in influence.T]) < variance
        drawn = away[systematic_rows(self.weights, len(f))]
        shapes = [pareto_smoothed(np.log(a + np.finfo(np.float64).tiny) / 2)[1] for a in drawn.T]
        return known & (2 * drawn.mean(0) > variance) & (np.array(shapes) < 0.4)

    def expectation(self, f: Callable[[np.ndarray], ArrayLike]) -> Estimate:
        """Return the mean of a function under the posterior, with the fit as a control variate.

        Parameters
        ----------
        f : callable
            Maps X (n, n_features) to an array whose first axis has length n.

        Returns
        -------
        estimate : Estimate
            A pair ``(value, se)``, each of the shape of f of one draw.

        Raises
        ------
        ValueError
            f returns another number of rows, or the weights are not reliable.
        """
        self.check_trusted("an expectation")
        values, of_draws = (np.asarray(f(X), dtype=np.float64) for X in (self.X, self.draws))
        for found, X in ((values, self.X), (of_draws, self.draws)):
            if found.shape[:1] != X.shape[:1]:
                raise ValueError(f"`f` returned shape {found.shape}, expected a row for each of {len(X)} draws.")
        columns = values.reshape(len(values), -1), of_draws.reshape(len(of_draws), -1)
        mean, se = (a.reshape(values.shape[1:])[()] for a in self.means(*columns))
        return Estimate(mean, se)

    def certificate(self) -> Certificate:
        r"""Return how far the fit is from the target.

        .. math:: J = \mathrm{KL}(q \| p) + \mathrm{KL}(p \| q) = E_q \ell - E_p \ell, \qquad
            \ell = \log q - \log p,

        in which the normaliser of p cancels; what the errors of log q add is taken off. The mean under q is that of
        the draws of the fit alone.
        """
        w, own, ell = self.weights, self.of_fit, self.log_q - self.log_p
        if np.isinf(ell[own]).any():  # the fit has mass where the target has none
            return Certificate(math.inf, 0.0, 0.0, self.k, self.share, self.trusted)
        n, v = len(w), own / own.sum()
        ell = np.where(((v > 0) | (w > 0)) & np.isfinite(ell), ell, 0.0)
        under_q, under_p = v @ ell, w @ ell
        influence = n * v * (ell - under_q) - n * w * (ell - under_p)
        divergence = float(under_q - under_p - np.square(self.log_q_se[own]).mean())
        se_below = float(influence.std() / math.sqrt(n))
        return Certificate(divergence, standard_error(influence), se_below, self.k, self.share, self.trusted)

    def finite_certificate(self) -> Certificate | None:
        """Return the certificate, None if a number of it is not finite."""
        found = self.certificate()
        return found if all(map(math.isfinite, found)) else None

    def evidence(self) -> Evidence:
        """Return bounds on the log evidence, and its estimate by importance sampling.

        The integral of the fit's density, which is one, is a control variate. The errors of log q, which the draws
        may share, and what heavy tails of the ratios may add that the draws have not shown are in the standard
        errors. These are infinite where the weights are not reliable. Where the target has no density at some draws
        the lower bound is -inf.
        """
        n, w, log_ratios = len(self.weights), self.weights, self.log_p - self.log_q
        own, r = log_ratios[self.of_fit], log_ratios[w > 0]
        eubo, shared = float(w[w > 0] @ r), float(w @ self.log_q_se) if self.trusted else math.inf
        elbo = Estimate(-math.inf, 0.0)
        if np.isfinite(own).all():
            elbo = Estimate(float(own.mean()), math.hypot(standard_error(own), self.log_q_se[self.of_fit].mean()))
        return Evidence(
            elbo,
            Estimate(self.log_z, math.hypot(self.log_z_se, shared)),
            Estimate(eubo, math.hypot(standard_error(n * w[w > 0] * (r - eubo)), shared)),
            self.k,
            self.trusted,
            self.reference,
        )

    def check_trusted(self, what: str) -> None:
        """Raise ValueError unless the weights are reliable."""
        if self.left_out > MOST_LEFT_OUT:
            raise ValueError(
                f"The log-density of the target is unknown at {self.left_out:.0%} of the draws, beyond a deep valley "
                f"where the target is known by its score alone: {what} would lack that part. Give it a `log_prob`."
            )
        if not self.trusted:
            raise ValueError(
                f"The importance weights are not reliable: their tail has the shape k = {self.k:.2f} "
                f"({most_trusted(len(self.X)):.2f} is allowed), and the effective sample size is "
                f"{self.effective:.0f} ({LEAST_EFFECTIVE} are needed), so that {what} would rest on a few draws. "
                "Improve the fit first, see `diagnose`."
            )


def _slopes(of_p: np.ndarray, of_q: np.ndarray) -> np.ndarray:
    """Return the slopes (k,) of the regression of influences (n, k) under p on those under q, from zero to one."""
    squares = np.square(of_q).sum(0)
    return ((of_p * of_q).sum(0) / np.maximum(squares, np.finfo(np.float64).tiny)).clip(0, 1)


def monotone_in(x: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Return of which column of x (n, d) each one of g (n, k) is a monotone function, -1 of none, by fifty rows."""
    orders = {np.argsort(s * a, kind="stable").tobytes(): j for j, a in enumerate(x[:50].T) for s in (1, -1)}
    return np.array([orders.get(np.argsort(a, kind="stable").tobytes(), -1) for a in g[:50].T])
