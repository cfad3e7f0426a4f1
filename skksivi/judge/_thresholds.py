"""What is good enough: the one table of limits."""

from __future__ import annotations

from typing import NamedTuple


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
