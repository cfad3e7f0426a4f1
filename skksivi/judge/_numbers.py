"""Means, standard deviations and quantiles of a posterior by weighted rows, and their standard errors."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from skksivi._utils.psis import standard_error


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
