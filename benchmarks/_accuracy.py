"""How far draws are from reference draws, and the rule by which a study calls a fit accurate.

Coordinates may hide what a direction shows. So errors are also those of the worst of 200 random directions and of the
leading ones, of the smallest and the largest variances and the largest shift. Half of the draws finds these and the
other half judges them. The extreme of many numbers is large by chance, which 3.5 standard errors allow for.
"""

from __future__ import annotations

import math

import numpy as np

N_RANDOM, N_EXTREME, N_SE = 200, 3, 3.5

#: The largest error of a mean, in sd, and of an sd, as a share.
MOST = 0.1


def moments(X, R):
    """Return the largest error of a mean, in sd, and the range of the ratios of sds, of draws X and R (n, d)."""
    if not np.isfinite(X).all():
        return {"mean": math.inf, "sd_min": 0.0, "sd_max": math.inf}
    shift, ratio = compared(np.asarray(X, dtype=np.float64), R)  # sums of many float32 lose digits
    return {"mean": float(np.abs(shift).max()), "sd_min": float(ratio.min()), "sd_max": float(ratio.max())}


def along_directions(X, R):
    """Return the largest errors along directions, beyond the noise, of a mean, in sd, and of log sd."""
    if not np.isfinite(X).all():
        return {"shift_along": math.inf, "scale_along": math.inf}
    X = np.asarray(X, dtype=np.float64)
    V = directions(X[::2], R[::2])
    x, r = X[1::2] @ V, R[1::2] @ V
    shift, ratio = compared(x, r)
    of_mean = np.sqrt(ratio**2 / len(x) + 1 / len(r))
    of_scale = np.hypot(log_sd_error(x), log_sd_error(r))
    return {
        "shift_along": float((np.abs(shift) - N_SE * of_mean).max().clip(0)),
        "scale_along": float((np.abs(np.log(ratio)) - N_SE * of_scale).max().clip(0)),
    }


def compared(X, R):
    """Return the differences of the means, in sd, and the ratios of the sds."""
    sd = R.std(0)
    return (X.mean(0) - R.mean(0)) / sd, X.std(0) / sd


def log_sd_error(X):
    """Return the standard errors of the logarithms of the sds."""
    z = (X - X.mean(0)) / X.std(0)
    return np.sqrt(((z**4).mean(0) - 1) / len(X)) / 2


def directions(X, R):
    """Return random directions and those in which draws X (n, d) are least like R, (d, k)."""
    d = R.shape[1]
    L = np.linalg.cholesky(np.atleast_2d(np.cov(R.T)))
    u = np.linalg.solve(L, (X - R.mean(0)).T)
    V = np.linalg.eigh(np.atleast_2d(np.cov(u)))[1]
    random = np.random.RandomState(0).standard_normal((d, N_RANDOM))
    return np.linalg.solve(L.T, np.column_stack([random, V[:, :N_EXTREME], V[:, -N_EXTREME:], u.mean(1)]))


def is_accurate(found):
    """Return whether every mean is within 0.1 sd and every sd within 10%; where known, also along directions."""
    return (
        max(found["mean"], found.get("shift_along", 0.0)) < MOST
        and found["sd_min"] > 1 - MOST
        and found["sd_max"] < 1 + MOST
        and found.get("scale_along", 0.0) < MOST
    )
