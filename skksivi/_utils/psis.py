"""Pareto-smoothed importance sampling."""

from __future__ import annotations

import math

import numpy as np

#: The fewest ratios of a tail that exceed the rest beyond rounding.
FEWEST = 5


def systematic_rows(weights: np.ndarray, n: int) -> np.ndarray:
    """Return the n rows that systematic resampling picks by weights (m,), which sum to one."""
    levels = (np.arange(n) + 0.5) / n
    return np.searchsorted(weights.cumsum(), levels).clip(max=len(weights) - 1)


def pareto_smoothed(log_ratios: np.ndarray) -> tuple[np.ndarray, float]:
    r"""Replace the largest ratios by quantiles of the generalised Pareto distribution that they follow.

    Parameters
    ----------
    log_ratios : ndarray of shape (n,)
        Logarithms of importance ratios, finite.

    Returns
    -------
    log_weights : ndarray of shape (n,)
        Logarithms of the smoothed ratios, none above the largest ratio.
    k : float
        The shape of the tail: ratios have 1/k finite moments. Zero if the largest exceed the others by less than a
        fifth of the mean: such a tail says nothing.

    References
    ----------
    Vehtari, A. et al. (2024). Pareto smoothed importance sampling. JMLR 25(72).
    """
    n = len(log_ratios)
    top = log_ratios.max()
    n_tail = tail_length(n)
    order = np.argsort(log_ratios, kind="stable")
    tail, cut = order[-n_tail:], log_ratios[order[-n_tail - 1]] - top
    if -math.expm1(cut) < 0.2 * np.exp(log_ratios - top).mean():  # its excess over the rest does not matter
        return log_ratios, 0.0
    excesses = np.exp(log_ratios[tail] - top) - math.exp(cut)
    above = excesses > 1e-6  # rounding errors have no tail
    tail, excesses, n_tail = tail[above], excesses[above], int(above.sum())
    if n_tail < FEWEST:
        return log_ratios, 0.0
    k, sigma = generalised_pareto(excesses)
    levels = (np.arange(n_tail) + 0.5) / n_tail
    quantiles = -sigma * np.log1p(-levels) if abs(k) < 1e-9 else sigma * np.expm1(-k * np.log1p(-levels)) / k
    smoothed = log_ratios.copy()
    smoothed[tail] = np.minimum(np.log(math.exp(cut) + quantiles), 0.0) + top
    return smoothed, k


def generalised_pareto(x: np.ndarray) -> tuple[float, float]:
    r"""Fit shape k and scale sigma of a generalised Pareto distribution to positive, rising x (n,).

    The posterior mean of :math:`b = -k / \sigma` on a grid gives both; k is then drawn a little to 1/2.

    References
    ----------
    Zhang, J. and Stephens, M. (2009). A new and efficient estimation method for the generalized Pareto distribution.
    Technometrics 51(3).
    """
    n = len(x)
    n_grid = 30 + int(math.sqrt(n))
    quartile = x[int(n / 4 + 0.5) - 1]
    b = 1 / x[-1] + (1 - np.sqrt(n_grid / (np.arange(1, n_grid + 1) - 0.5))) / (3 * quartile)
    b = b[np.abs(b) * x[-1] > 1e-9]  # there the shape is zero
    if not len(b):
        return 0.0, float(x.mean())
    shapes = np.log1p(-b[:, None] * x).mean(1)
    log_likelihoods = n * (np.log(-b / shapes) - shapes - 1)
    weights = np.exp(log_likelihoods - log_likelihoods.max())
    b_mean = float(b @ weights / weights.sum())
    k = float(np.log1p(-b_mean * x).mean())
    n_prior = 10  # the weight of the prior k = 1/2, in points
    return (n * k + n_prior / 2) / (n + n_prior), -k / b_mean


def standard_error(values: np.ndarray) -> float:
    """Return the standard error of the mean of n independent values (n,), with a possible tail beyond the largest."""
    return math.hypot(values.std() / math.sqrt(len(values)), beyond_the_largest(values))


def beyond_the_largest(values: np.ndarray) -> float:
    r"""Return the possible contribution to the mean of n values of a heavy tail beyond the largest.

    It is :math:`E[D\, 1(D > u)] = E[D | D > u] / n` of the distances D from the mean, u their quantile of level
    1 - 1/n, for a generalised Pareto tail whose shape is larger than the one found by its standard error,
    :math:`(1 + k) / \sqrt m` for m points, but at most 0.8.

    Parameters
    ----------
    values : ndarray of shape (n,)

    Returns
    -------
    error : float
        In the units of the values, zero without a tail.
    """
    distances = np.sort(np.abs(values - values.mean()))
    n, n_tail = len(values), tail_length(len(values))
    cut, excesses = distances[-n_tail - 1], distances[-n_tail:] - distances[-n_tail - 1]
    excesses = excesses[excesses > 1e-12 * distances[-1]]  # rounding errors have no tail
    if len(excesses) < FEWEST:
        return 0.0
    k, sigma = generalised_pareto(excesses)
    k = min(k + (1 + k) / math.sqrt(len(excesses)), 0.8)  # at one the mean is infinite
    log_n = math.log(len(excesses))
    u = sigma * (math.expm1(k * log_n) / k if abs(k) > 1e-9 else log_n)
    return float(cut + u + (sigma + k * u) / (1 - k)) / n


def tail_length(n: int) -> int:
    return math.ceil(min(0.2 * n, 3 * math.sqrt(n)))


def most_trusted(n: int) -> float:
    """Return the largest k with which n ratios can be trusted."""
    return min(1 - 1 / math.log10(n), 0.7)
