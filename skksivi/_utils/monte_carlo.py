r"""Statistics of draws: Pareto-smoothed importance weights, ranks, and Stein control variates, of mean zero.

By Stein's identity :math:`E[s(x)^\top g(x) + \nabla \cdot g(x)] = 0` under the density whose score is s.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

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


def counts_below(ranks: np.ndarray, n_draws: int) -> np.ndarray:
    """Return how many of the ranks (n,) are below 1, ..., L, an array (L,)."""
    return np.bincount(ranks, minlength=n_draws + 1)[:n_draws].cumsum()


def uniformity(ranks: np.ndarray, n_draws: int) -> float:
    r"""Return the p-value of uniform ranks (n,), by the least probability of a tail.

    .. math:: \gamma = \min_k 2 \min\{P(C \le C_k), P(C \ge C_k)\}, \qquad C \sim B(n, k / (L + 1))

    The p-value is the probability of a :math:`\gamma` as small, exact for any n and L.
    """
    tails = tail_probabilities(len(ranks), n_draws)
    gamma = tails[np.arange(n_draws), counts_below(ranks, n_draws)].min()
    return max(1 - coverage(tails > gamma), gamma / 2)  # the latter where the difference is rounding


@lru_cache(maxsize=32)
def uniform_band(n: int, n_draws: int, level: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the largest counts (L,) below 1, ..., L in a band that n uniform ranks are in together.

    They are so with a probability of `level` at least, and a set of ranks leaves the band where its p-value by
    `uniformity` is 1 - `level` at most.
    """
    tails = tail_probabilities(n, n_draws)
    gammas = np.concatenate([[0.0], np.unique(tails)])
    first, last = 0, len(gammas)  # the band of the first covers enough, of the last not
    while last - first > 1:
        middle = (first + last) // 2
        first, last = (middle, last) if coverage(tails > gammas[middle]) >= level else (first, middle)
    inside = tails > gammas[first]
    return inside.argmax(1), n - inside[:, ::-1].argmax(1)


def coverage(inside: np.ndarray) -> float:
    """Return the probability that the counts of n uniform ranks below 1, ..., L are inside, an array (L, n + 1).

    Given their number, the ranks follow a Poisson process: its counts have independent steps.
    """
    n, n_draws = inside.shape[1] - 1, len(inside)
    if not inside.any(1).all():
        return 0.0
    step = np.exp(log_poisson(n, n / (n_draws + 1)))
    step = step[: 1 + np.flatnonzero(step > 1e-40)[-1]]  # less is negligible
    lows, highs = inside.argmax(1).tolist(), (n - inside[:, ::-1].argmax(1)).tolist()
    f, at = np.ones(1), 0
    for low, high in zip(lows, highs, strict=True):
        f = np.convolve(f, step)[max(low - at, 0) : high - at + 1]
        at = max(low, at)
        if not f.size:
            return 0.0
    whole = np.convolve(f, step)
    if n - at >= len(whole):
        return 0.0
    return min(float(whole[n - at] / np.exp(log_poisson(n, n)[n])), 1.0)


@lru_cache(maxsize=4)
def tail_probabilities(n: int, n_draws: int) -> np.ndarray:
    """Return twice the smaller tail of each count of n uniform ranks below 1, ..., L, an array (L, n + 1)."""
    k, c = np.arange(1, n_draws + 1)[:, None], np.arange(n + 1)
    p = k / (n_draws + 1)
    log_factorials = _log_factorials(n)
    log_choose = log_factorials[n] - log_factorials - log_factorials[::-1]
    pmf = np.exp(log_choose + c * np.log(p) + (n - c) * np.log1p(-p))
    tails = np.minimum(2 * np.minimum(pmf.cumsum(1), pmf[:, ::-1].cumsum(1)[:, ::-1]), 1.0)
    tails.setflags(write=False)
    return tails


def log_poisson(n: int, mean: float) -> np.ndarray:
    """Return the log-probabilities of 0, ..., n."""
    return np.arange(n + 1) * np.log(mean) - mean - _log_factorials(n)


def _log_factorials(n: int) -> np.ndarray:
    return np.concatenate([[0.0], np.log(np.arange(1, n + 1)).cumsum()])


#: Draws for each control variate, at least, and folds of the draws.
N_OF_EACH, N_FOLDS = 20, 10


def stein_features(u: Tensor, s: Tensor) -> Tensor:
    r"""Return control variates (n, p) of draws u (n, d) with scores s.

    These are :math:`s_i` and :math:`s_i u_j + \delta_{ij}`, of the latter those with i = j alone where draws are few.
    """
    n, d = u.shape
    if N_OF_EACH * (d * d + d) > n:
        return torch.cat([s, s * u + 1], 1)
    products = s[:, :, None] * u[:, None] + torch.eye(d).to(u)
    return torch.cat([s, products.flatten(1)], 1)


def second_order(u: Tensor, s: Tensor, i: Tensor, j: Tensor) -> Tensor:
    r"""Return control variates :math:`\tfrac12 (u_i s_j + u_j s_i) + \delta_{ij}`, for pairs of indices (p,)."""
    return (u[:, i] * s[:, j] + u[:, j] * s[:, i]) / 2 + (i == j).to(u)


def controlled(y: Tensor, features: Tensor) -> Tensor:
    r"""Return :math:`y - \beta^\top f`, values y (n, m) of the same means and less spread.

    References
    ----------
    Assaraf, R. and Caffarel, M. (1999). Zero-variance principle for Monte Carlo algorithms. Physical Review Letters
    83(23).
    Mira, A., Solgi, R. and Imparato, D. (2013). Zero variance Markov chain Monte Carlo for Bayesian estimators.
    Statistics and Computing 23(5).
    """
    n, mean = len(y), y.mean(0)
    fold = torch.arange(n, device=y.device) * N_FOLDS // n
    return mean + cross_fitted(y - mean, features, torch.ones_like(y[:, 0]), fold)


def cross_fitted(y: Tensor, f: Tensor, v: Tensor, fold: Tensor) -> Tensor:
    r"""Return :math:`y - \beta^\top f` (n, m), with the regression of weights v (n,) on the other folds.

    On its own it would fit what is rare, as the draws in a tail, and hide its share in the mean.
    """
    f = f / ((v @ f.square()) / v.sum()).sqrt().clamp_min(torch.finfo(f.dtype).tiny)
    design = torch.cat([torch.ones_like(f[:, :1]), f], 1)
    scaled = design * v[:, None]
    gram, moments = scaled.mT @ design, scaled.mT @ y
    gram.diagonal().add_(1e-12 * v.sum())
    r = y.clone()
    for i in (fold == k for k in range(N_FOLDS)):
        beta = torch.linalg.solve(gram - scaled[i].mT @ design[i], moments - scaled[i].mT @ y[i])[1:]
        r[i] -= f[i] @ beta
    return r
