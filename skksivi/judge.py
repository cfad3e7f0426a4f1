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

from skksivi._utils.monte_carlo import standard_error

__all__ = ["THRESHOLDS", "Errors", "Grade", "Verdict"]
__dir__ = __all__.copy


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
    #: The largest standard error in units of the limit, of a quantile of twice it, with which a number is known.
    most_se: float = 2.0
    #: The divergence of an amortised fit per feature, in nats.
    divergence: float = 0.05

    #: Points of a stage by importance, set by `benchmarks/defaults.py` and `benchmarks/shapes.py`: the largest
    #: standard error of a mean, in sd, and of a relative scale, and the divergence of the proposal for each feature;
    #: the round from which on the second error will do, and the second pair, that of the divergence and that of it
    #: less two standard errors.
    errors_of_weights: tuple[float, float] = (0.02, 0.03)
    proposal: float = 0.03
    late_round: int = 5
    late_divergence: tuple[float, float] = (0.1, 0.05)
    #: Chains: R-hat, and the largest standard error; the trajectories after which the second will do, that of means
    #: which no longer chains improve.
    rhat: float = 1.03
    chain_errors: tuple[float, float] = (0.02, 0.05)
    long_chains: int = 200
    #: The largest standard error of a mean, in sd, of many features where chains do not agree.
    small_errors: float = 0.1
    #: Points of a profile: the largest standard error, before and in the last round.
    profile_errors: tuple[float, float] = (0.03, 0.05)
    #: Warped coordinates: how far points may have moved, in sd, since these were fitted to them, of few and of many
    #: features; and how many times farther out draws may be than all points.
    moved: tuple[float, float] = (0.1, 0.15)
    astray: float = 20.0
    #: Long chains: the mean square of whitened points before them, of their median.
    far_apart: float = 9.0
    #: The share of the last ascents that found modes which no others had found, where mass may be at further ones.
    unseen: float = 0.02
    #: A Gaussian that is the target itself: the divergence of their scores.
    same_score: float = 1e-4


THRESHOLDS = Thresholds()


class Grade(IntEnum):
    """How well points or a fit are known to have the numbers of a target, from worst to best."""

    WRONG = 0
    ROUGH = 1
    SMALL_ERRORS = 2
    CHAINS_AGREE = 3
    RELIABLE_WEIGHTS = 4


class Worst(NamedTuple):
    """The number that is farthest beyond its limit: what it is, of which column, its error and the standard error."""

    kind: str
    column: int
    error: float
    se: float
    excess: float


class Errors(NamedTuple):
    """How far the numbers of a fit are from the posterior's, column by column.

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

    def _parts(self) -> list[tuple[str, np.ndarray, np.ndarray, float]]:
        """Return the kinds of numbers, each with its errors (k,), their standard errors and the limit.

        Standard errors of quantiles count twice: there are more of these, and their noise has heavier tails.
        """
        most = THRESHOLDS.quantile
        found = [
            ("mean", self.mean, self.mean_se, THRESHOLDS.mean),
            ("standard deviation", self.sd, self.sd_se, math.log1p(THRESHOLDS.sd)),
            ("5% quantile", self.quantiles[0], 2 * self.quantiles_se[0], most),
            ("95% quantile", self.quantiles[1], 2 * self.quantiles_se[1], most),
        ]
        if self.beyond is not None and self.beyond_se is not None:
            sides = zip(("lower", "upper"), (self.beyond - THRESHOLDS.tail).clip(0), 2 * self.beyond_se, strict=True)
            found += [(f"{side} tail", lost, se, THRESHOLDS.beyond) for side, lost, se in sides]
        return found

    def worst(self, n_se: float) -> Worst:
        """Return the number farthest beyond its limit, of errors that are so many standard errors nearer to zero."""
        found = list[Worst]()
        for kind, error, se, limit in self._parts():
            excess = np.nan_to_num((np.abs(error) - n_se * se) / limit, nan=math.inf)
            k = int(excess.argmax())
            found.append(Worst(kind, k, float(error[k]), float(se[k]), float(excess[k])))
        return max(found, key=lambda each: each.excess)

    @property
    def se_of_moments(self) -> float:
        """The largest standard error of a mean or a standard deviation in units of its limit."""
        return float(max((self.mean_se / THRESHOLDS.mean).max(), (self.sd_se / math.log1p(THRESHOLDS.sd)).max()))

    @property
    def se(self) -> float:
        """The same of quantiles as well, in units of twice their limit: by as many draws a 5% quantile of a Gaussian
        has twice the standard error of a mean.
        """
        return max(self.se_of_moments, float(self.quantiles_se.max()) / (2 * THRESHOLDS.quantile))


@dataclass(frozen=True, order=True)
class Verdict:
    """How good points or a fit are, and why; compared by the grade alone.

    Attributes
    ----------
    grade : Grade
    reason : str
    remedy : str
        What to do, empty where nothing is needed.
    errors : Errors or None
        None where they are not known.

    See Also
    --------
    Errors : How far the numbers of a fit are from the posterior's.
    skksivi.diagnose : A report on a fit.
    """

    grade: Grade
    reason: str = field(default="", compare=False)
    remedy: str = field(default="", compare=False)
    errors: Errors | None = field(default=None, compare=False)

    @property
    def good(self) -> bool:
        """Whether nothing better is needed."""
        return self.grade >= Grade.CHAINS_AGREE

    def __str__(self) -> str:
        return self.grade.name.lower().replace("_", " ") + (f" ({self.reason})" if self.reason else "")


def words_of(worst: Worst, label: Callable[[int], str]) -> str:
    """Describe an error in words, given the names of columns."""
    name = label(worst.column)
    if not math.isfinite(worst.error):
        return f"the error of the {worst.kind} of {name} is not known"
    if worst.kind.endswith("tail"):
        mass = f"{worst.error + THRESHOLDS.tail:.1%} of the mass, standard error {worst.se / 2:.1%},"
        return f"{mass} is beyond {1 - THRESHOLDS.tail:.1%} of the draws in the {worst.kind} of {name}"
    what, se = f"the {worst.kind} of {name}", worst.se / (2 if worst.kind.endswith("quantile") else 1)
    if worst.kind == "standard deviation":
        return f"{what} is {math.exp(worst.error):.2f} times the posterior's, standard error {se:.2g}"
    return f"{what} is {worst.error:+.2f} sd from the posterior's, standard error {se:.2g}"


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
        low, middle, high = (np.quantile(g, (levels + z * noise).clip(0, 1), axis=0) for z in (-1, 0, 1))
        tiny = np.finfo(np.float64).tiny
        sd_se = away.std(0) / np.maximum(2 * sd, tiny) / math.sqrt(m)
        return cls(mean, sd, middle, sd / math.sqrt(m), sd_se, (high - low) / 2)


class WeightedRows(NamedTuple):
    r"""Rows of a proposal, weighted for a posterior p and for a fit q whose own means are known from further draws.

    The mean of f under p is estimated with the fit as a control variate,

    .. math:: \hat\theta = \sum_i w_i f(x_i) - \beta \left(\sum_i v_i f(x_i) - E_q f\right),

    for weights w of p and v of q. Where the fit is right both are the same, and so the difference of the numbers of
    p and q has hardly an error; where it is far off :math:`\beta` is near zero.

    Attributes
    ----------
    w, v : ndarray of shape (n,)
        They sum to one.
    less : float
        Standard errors are those of the numbers less so many times the fit's own, 0 or 1, in which the further draws
        count :math:`\beta - \text{less}` times.

    References
    ----------
    Owen, A. and Zhou, Y. (2000). Safe and effective importance sampling. JASA 95(449).
    """

    w: np.ndarray
    v: np.ndarray
    less: float = 0.0

    def means(self, f: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the means (k,) of values f (n, k) of the rows, with standard errors, given g (m, k) of draws of q.

        A standard error includes what a heavy tail may add that the rows have not shown.
        """
        under_p, under_q, known = self.w @ f, self.v @ f, g.mean(0)
        of_p, of_q = (len(f) * a[:, None] * (f - mean) for a, mean in ((self.w, under_p), (self.v, under_q)))
        beta = _slopes(of_p, of_q)
        rows = np.array([standard_error(column) for column in (of_p - beta * of_q).T])
        return under_p - beta * (under_q - known), np.hypot(
            rows, abs(beta - self.less) * g.std(0) / math.sqrt(len(g))
        )

    def numbers(self, f: np.ndarray, g: np.ndarray, levels: np.ndarray) -> Numbers:
        """Return the numbers of the columns of f (n, k), given g (m, k) of draws of q, and levels of quantiles."""
        mean, mean_se = self.means(f, g)
        variance, variance_se = self.means(np.square(f - mean), np.square(g - mean))
        sd = np.sqrt(variance.clip(np.finfo(np.float64).tiny))
        pairs = [self._quantiles(*columns, levels) for columns in zip(f.T, g.T, strict=True)]
        quantiles, quantiles_se = np.array(pairs).transpose(1, 2, 0)
        sd_se = np.minimum(variance_se / (2 * sd), np.sqrt(variance_se))  # the latter of a number that hardly varies
        return Numbers(mean, sd, quantiles, mean_se, sd_se, quantiles_se)

    def _quantiles(self, f: np.ndarray, g: np.ndarray, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return quantiles of one column, f (n,) and g (m,), with standard errors.

        The signed measure of rows and draws of q is a distribution function but for noise. That of a level is carried
        over to a quantile by Woodruff's interval.
        """
        order = np.argsort(np.concatenate([f, g]), kind="stable")
        places = np.concatenate([f, g])[order]
        tiny, found = np.finfo(np.float64).tiny, []
        for level, place in zip(levels, np.quantile(g, levels), strict=True):
            below = (f <= place)[:, None].astype(np.float64)
            beta = float(_slopes(*(len(f) * a[:, None] * (below - a @ below) for a in (self.w, self.v)))[0])
            masses = np.concatenate([self.w - beta * self.v, np.full(len(g), beta / len(g))])[order]
            cumulative = np.maximum.accumulate(masses.cumsum())
            middle = np.interp(level, cumulative, places)
            # One row may carry the level: it is below the quantile or above, whichever is less certain
            reached = min(int(np.searchsorted(cumulative, level)), len(places) - 1)
            at = (f[:, None] <= places[[max(reached - 1, 0), reached]]).astype(np.float64)
            of_p, of_q = (len(f) * a[:, None] * (at - a @ at) for a in (self.w, self.v))
            rows = max(standard_error(column) for column in (of_p - beta * of_q).T)
            se = math.hypot(rows, abs(beta - self.less) * math.sqrt(level * (1 - level) / len(g)))
            low, high = np.interp([level - se, level + se], cumulative, places)
            found.append((middle, max((high - low) / 2, tiny)))
        values, errors = np.array(found).T
        return values, errors


def _slopes(of_p: np.ndarray, of_q: np.ndarray) -> np.ndarray:
    """Return the slopes (k,) of the regression of influences (n, k) under p on those under q, from zero to one."""
    squares = np.square(of_q).sum(0)
    return ((of_p * of_q).sum(0) / np.maximum(squares, np.finfo(np.float64).tiny)).clip(0, 1)
