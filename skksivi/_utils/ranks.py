r"""Whether ranks are uniform: their empirical distribution function against simultaneous bands.

Of n ranks among L draws, uniform on 0, ..., L, the number below k is binomial, :math:`C_k \sim B(n, k / (L + 1))`.
The numbers below k = 1, ..., L are a Markov chain, whose probability of staying in a band is a recursion.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike


def check_ranks(ranks: ArrayLike, n_draws: int) -> np.ndarray:
    """Return ranks as integers (n, k), each from 0 to `n_draws`.

    Raises
    ------
    ValueError
        They are something else.
    """
    R = np.asarray(ranks)
    R = R[:, None] if R.ndim == 1 else R
    if R.ndim != 2 or not R.size or R.dtype.kind not in "iu":
        raise ValueError(f"`ranks` must be integers of shape (n, k), got {R.dtype} of shape {R.shape}.")
    if R.min() < 0 or R.max() > n_draws:
        raise ValueError(f"`ranks` go from {R.min()} to {R.max()}, expected 0 to {n_draws}, the number of draws.")
    return R


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
