"""Errors of dependence."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from skksivi.metrics._base import check_pair


def correlation_error(X: ArrayLike, Y: ArrayLike, *, summary: str = "rms") -> float:
    r"""Compute the distance between the pairwise correlations of two samples.

    .. math:: \left( \frac{2}{d (d - 1)} \sum_{i < j} (r_{ij}(X) - r_{ij}(Y))^2 \right)^{1/2}

    or :math:`\max_{i < j} |r_{ij}(X) - r_{ij}(Y)|`, with r the correlation coefficients.

    Parameters
    ----------
    X : array-like of shape (n, d)
    Y : array-like of shape (m, d)
    summary : {"rms", "max"}, default="rms"
        Root of the mean square, or largest absolute difference, over the pairs of columns.

    Returns
    -------
    error : float
        Not squared, without units, from 0 to 2.

    Raises
    ------
    ValueError
        X and Y differ in their number of columns, hold non-finite values, a constant column or fewer than two rows or
        columns.

    See Also
    --------
    noise_floor : The Monte Carlo noise of a metric.

    Examples
    --------
    >>> from skksivi.metrics import correlation_error
    >>> round(correlation_error([[0.0, 0.0], [1.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]), 6)
    2.0
    """
    X, Y = check_pair(X, Y, min_samples=2)
    if summary not in ("rms", "max"):
        raise ValueError(f"`summary` must be 'rms' or 'max', got {summary!r}.")
    if X.shape[1] < 2:
        raise ValueError("`X` and `Y` have 1 column; a correlation needs two.")
    errors = np.abs(correlations(X, "X") - correlations(Y, "Y"))
    return float(errors.max() if summary == "max" else np.sqrt(np.mean(errors**2)))


def correlations(A: np.ndarray, name: str) -> np.ndarray:
    """Return the correlation coefficients of the pairs of columns, shape (d (d - 1) / 2,)."""
    constant = np.flatnonzero(np.ptp(A, axis=0) == 0)
    if len(constant):
        raise ValueError(f"Column {constant[0]} of `{name}` is constant and has no correlations; leave it out.")
    return np.corrcoef(A, rowvar=False)[np.triu_indices(A.shape[1], 1)]
