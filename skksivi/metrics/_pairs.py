"""Discrepancies that are means of a kernel over pairs of draws."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike

from skksivi._utils.arrays import as_tensor
from skksivi.kernels import IMQ, Kernel, Riesz, resolve_kernel
from skksivi.metrics._base import check_pair, check_statistic
from skksivi.stein._discrepancy import mean_between, mean_within


def mmd(X: ArrayLike, Y: ArrayLike, *, kernel: str | Kernel | None = None, statistic: str = "u") -> float:
    r"""Estimate the squared maximum mean discrepancy between two samples.

    .. math:: \mathrm{MMD}^2 = E\, k(x, x') + E\, k(y, y') - 2 E\, k(x, y)

    Values under different kernels or bandwidths cannot be compared. A median bandwidth is set on Y, the reference, so
    that the values of several X against one Y can.

    Parameters
    ----------
    X : array-like of shape (n, d)
    Y : array-like of shape (m, d)
    kernel : str or Kernel, default=None
        None means `skksivi.kernels.IMQ`.
    statistic : {"u", "v"}, default="u"
        Whether means within a sample are over pairs of different rows, "u", which is unbiased and may be negative, or
        over all pairs, "v", which is never negative, zero for equal samples and biased upward.

    Returns
    -------
    discrepancy : float
        The squared discrepancy, without units.

    Raises
    ------
    ValueError
        X and Y differ in their number of columns, hold non-finite values or fewer than two rows, or the kernel is
        tilted.

    See Also
    --------
    energy_distance : A distance without parameters.
    noise_floor : The Monte Carlo noise of a metric.

    References
    ----------
    Gretton, A. et al. (2012). A kernel two-sample test. Journal of Machine Learning Research 13.
    https://jmlr.org/papers/v13/gretton12a.html

    Examples
    --------
    >>> import numpy as np
    >>> from skksivi.metrics import mmd
    >>> X, Y = np.random.RandomState(0).normal(size=(2, 1000, 2))
    >>> bool(abs(mmd(X, Y)) < 0.002 < mmd(X + 0.3, Y))
    True
    """
    X, Y = check_pair(X, Y, min_samples=2)
    kernel = IMQ() if kernel is None else resolve_kernel(kernel)
    if kernel.tilted:
        raise ValueError("`kernel` is Tilted, which MMD does not support; pass the kernel inside it.")
    return _squared_mmd(X, Y, kernel.frozen(as_tensor(Y, dtype=torch.float64)), statistic)


def energy_distance(X: ArrayLike, Y: ArrayLike, *, exponent: float = 1.0, statistic: str = "u") -> float:
    r"""Estimate the energy distance between two samples.

    .. math:: D = 2 E \|x - y\|^r - E \|x - x'\|^r - E \|y - y'\|^r

    It is the squared maximum mean discrepancy of a Riesz kernel of width one, and needs no bandwidth.

    Parameters
    ----------
    X : array-like of shape (n, d)
    Y : array-like of shape (m, d)
    exponent : float, default=1.0
        The r of the formula, in (0, 2).
    statistic : {"u", "v"}, default="u"
        Whether means within a sample are over pairs of different rows, "u", which is unbiased and may be negative, or
        over all pairs, "v", which is never negative, zero for equal samples and biased upward.

    Returns
    -------
    distance : float
        As in the formula, without a root, in the units of the data to the power r.

    Raises
    ------
    ValueError
        X and Y differ in their number of columns, hold non-finite values or fewer than two rows; `exponent` does not
        lie in (0, 2).

    See Also
    --------
    mmd : Maximum mean discrepancy.
    sliced_wasserstein : Transport along random directions.
    noise_floor : The Monte Carlo noise of a metric.

    References
    ----------
    Székely, G. and Rizzo, M. (2013). Energy statistics: a class of statistics based on distances. Journal of
    Statistical Planning and Inference 143(8).

    Examples
    --------
    >>> from skksivi.metrics import energy_distance
    >>> energy_distance([[0.0], [2.0]], [[5.0], [7.0]], statistic="v")
    8.0
    """
    X, Y = check_pair(X, Y, min_samples=2)
    return _squared_mmd(X, Y, resolve_kernel(Riesz(bandwidth=1.0, exponent=exponent)), statistic)


def _squared_mmd(X: np.ndarray, Y: np.ndarray, kernel: Kernel, statistic: str) -> float:
    """Return MMD^2 under a kernel of fixed bandwidth."""
    check_statistic(statistic)
    x, y = (as_tensor(A, dtype=torch.float64) for A in (X, Y))
    h2 = kernel.fixed_squared_bandwidth(x)

    def phi(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        # the terms of one argument alone that a centred kernel has besides would cancel
        return kernel.profile(kernel.squared_distances(a, b) / h2)

    def within(a: torch.Tensor) -> torch.Tensor:
        trace = len(a) * kernel.profile(a.new_zeros(())) if statistic == "v" else None
        return mean_within(lambda i, j: phi(a[i], a[j]), len(a), trace)

    between = mean_between(lambda i, j: phi(x[i], y[j]), len(x), len(y))
    return (within(x) + within(y) - 2 * between).item()
