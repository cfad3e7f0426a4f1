"""What is good enough, in one table of limits, and what is said of points and fits: a grade, the reason, the remedy,
and the errors of the numbers read off them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from skksivi.judge._numbers import Numbers


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
    def of_moments(self) -> float:
        """The largest error of a mean or a standard deviation in units of its limit."""
        return _in_limits(np.abs(self.mean), np.abs(self.sd))

    @property
    def se_of_moments(self) -> float:
        """The largest standard error of a mean or a standard deviation in units of its limit."""
        return _in_limits(self.mean_se, self.sd_se)

    @property
    def se(self) -> float:
        """The same of quantiles as well, in units of twice their limit: by as many draws a 5% quantile of a Gaussian
        has twice the standard error of a mean.
        """
        return max(self.se_of_moments, float(self.quantiles_se.max()) / (2 * THRESHOLDS.quantile))


def _in_limits(of_means: np.ndarray, of_sds: np.ndarray) -> float:
    """Return the largest of numbers (k,) of means and of sds in units of their limits."""
    return float(max((of_means / THRESHOLDS.mean).max(), (of_sds / math.log1p(THRESHOLDS.sd)).max()))


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
