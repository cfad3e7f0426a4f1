"""How close two samples are to each other, or a sample to a target known by its score.

`mmd` and `ksd` are squared; `sliced_wasserstein` is not. Between two exact samples they are not zero: `noise_floor`
gives their values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from numbers import Real
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils import check_array, check_random_state, check_scalar
from torch import Tensor

from skksivi._utils.arrays import as_tensor, make_generator, without_graph
from skksivi._utils.checks import check_integer, shown
from skksivi.kernels import IMQ, Kernel, resolve_kernel
from skksivi.score import ScoreFunction, in_double
from skksivi.stein import finite_scores, mean_between, mean_within, stein_matrix, tiles, upper_blocks

__all__ = ["KSDTest", "NoiseFloor", "ksd", "ksd_test", "mmd", "noise_floor", "sliced_wasserstein"]
__dir__ = __all__.copy


def check_pair(X: ArrayLike, Y: ArrayLike, *, min_samples: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return two samples as finite float64 arrays with the same number of columns."""
    X = check_array(without_graph(X), dtype=np.float64, ensure_min_samples=min_samples, input_name="X")
    Y = check_array(without_graph(Y), dtype=np.float64, ensure_min_samples=min_samples, input_name="Y")
    if X.shape[1] != Y.shape[1]:
        raise ValueError(f"`X` has {X.shape[1]} columns and `Y` has {Y.shape[1]}; they must agree.")
    return X, Y


def check_statistic(statistic: str) -> None:
    """Raise unless `statistic` names a mean over pairs."""
    if statistic not in ("u", "v"):
        raise ValueError(f"`statistic` must be 'u' or 'v', got {statistic!r}.")


#: Projected values that are sorted at a time.
CHUNK = 2**22


def sliced_wasserstein(
    X: ArrayLike,
    Y: ArrayLike,
    *,
    n_projections: int = 1000,
    p: float = 2,
    random_state: int | np.random.RandomState | None = None,
) -> float:
    r"""Compute the sliced Wasserstein distance between two samples.

    .. math:: SW_p = \left( E_\theta\, W_p^p(\theta^\top X, \theta^\top Y) \right)^{1/p}

    with directions :math:`\theta` uniform on the sphere. Between two exact samples of one distribution it is not
    zero: compare a result with its `noise_floor`.

    Parameters
    ----------
    X : array-like of shape (n, d)
    Y : array-like of shape (m, d)
    n_projections : int, default=1000
    p : float, default=2
        Order of the distance, p >= 1.
    random_state : int, RandomState or None, default=None
        Draws the directions.

    Returns
    -------
    distance : float
        Not squared, in the units of the data.

    Raises
    ------
    ValueError
        X and Y differ in their number of columns, or hold non-finite values; `p` or `n_projections` is below 1.

    See Also
    --------
    mmd : Maximum mean discrepancy.
    noise_floor : The Monte Carlo noise of a metric.

    References
    ----------
    Bonneel, N. et al. (2015). Sliced and Radon Wasserstein barycenters of measures. Convention of the POT library.

    Examples
    --------
    >>> import numpy as np
    >>> from skksivi.metrics import sliced_wasserstein
    >>> X = np.random.RandomState(0).normal(size=(500, 3))
    >>> round(sliced_wasserstein(X, X + [3.0, 0.0, 0.0], random_state=0), 1)
    1.7
    """
    X, Y = check_pair(X, Y)
    check_integer(n_projections, "n_projections", min_val=1)
    if not 1 <= p < math.inf:
        raise ValueError(f"`p` must be a finite number of at least 1, got {shown(p)}.")
    theta = check_random_state(random_state).normal(size=(X.shape[1], n_projections))
    theta /= np.linalg.norm(theta, axis=0)
    n_chunks = -(-n_projections * (len(X) + len(Y)) // CHUNK)
    chunks = np.array_split(theta, min(n_chunks, n_projections), axis=1)
    costs = [_line_costs(X @ some, Y @ some, p) for some in chunks]
    return float(np.mean(np.concatenate(costs)) ** (1 / p))


def _line_costs(x: np.ndarray, y: np.ndarray, p: float) -> np.ndarray:
    """Return W_p^p between column k of x (n, K) and of y (m, K), for each k."""
    x, y = np.sort(x, axis=0), np.sort(y, axis=0)
    # The quantile functions are steps: between two neighbouring levels both are constant.
    levels = np.union1d(np.arange(1, len(x) + 1) / len(x), np.arange(1, len(y) + 1) / len(y))
    widths = np.diff(levels, prepend=0.0)
    middle = levels - widths / 2
    return widths @ np.abs(x[(middle * len(x)).astype(int)] - y[(middle * len(y)).astype(int)]) ** p


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
        X and Y differ in their number of columns, or hold non-finite values or fewer than two rows.

    See Also
    --------
    sliced_wasserstein : Transport along random directions.
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
    check_statistic(statistic)
    x, y = (as_tensor(A, dtype=torch.float64) for A in (X, Y))
    kernel = kernel.frozen(y)
    h2 = kernel.fixed_squared_bandwidth(x)

    def phi(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        # the terms of one argument alone that a centred kernel has besides would cancel
        return kernel.profile(kernel.squared_distances(a, b) / h2)

    def within(a: torch.Tensor) -> torch.Tensor:
        trace = len(a) * kernel.profile(a.new_zeros(())) if statistic == "v" else None
        return mean_within(lambda i, j: phi(a[i], a[j]), len(a), trace)

    between = mean_between(lambda i, j: phi(x[i], y[j]), len(x), len(y))
    return (within(x) + within(y) - 2 * between).item()


class NoiseFloor(NamedTuple):
    """Mean and standard deviation of a metric between independent exact samples.

    See Also
    --------
    noise_floor : The Monte Carlo noise of a metric.
    """

    mean: float
    sd: float


def noise_floor(
    metric: Callable[[np.ndarray, np.ndarray], float],
    Y: ArrayLike,
    n: int,
    m: int | None = None,
    *,
    n_repeats: int = 10,
    random_state: int | np.random.RandomState | None = None,
) -> NoiseFloor:
    """Compute the values of a metric between exact samples, as a baseline for results.

    Each repetition takes two samples of n and m different rows of Y at random. Repetitions may share rows, so that
    the standard deviation is too small unless Y has several times n + m rows.

    Parameters
    ----------
    metric : callable
        Maps two arrays of shapes (n, d) and (m, d) to a number.
    Y : array-like of shape (n_rows, d)
        Exact draws of the target.
    n : int
        Rows of each sample that represents the draws.
    m : int, default=None
        Rows of each sample that represents the reference; None means n.
    n_repeats : int, default=10
        Repetitions, two at least.
    random_state : int, RandomState or None, default=None
        Draws the rows.

    Returns
    -------
    floor : NoiseFloor
        With fields `mean` and `sd`, the standard deviation of one value.

    Raises
    ------
    ValueError
        Y has fewer than n + m rows.

    See Also
    --------
    sliced_wasserstein : Transport along random directions.
    NoiseFloor : Its mean and standard deviation.

    Examples
    --------
    >>> import numpy as np
    >>> from skksivi.metrics import noise_floor, sliced_wasserstein
    >>> Y = np.random.RandomState(0).normal(size=(10_000, 22))
    >>> floor = noise_floor(sliced_wasserstein, Y, 1000, random_state=0)
    >>> print(f"{floor.mean:.2f}, less than {floor.mean + 4 * floor.sd:.1f}")
    0.08, less than 0.1

    Options are bound by a lambda, and a metric of one sample ignores the other:

    >>> from skksivi.metrics import ksd
    >>> floor = noise_floor(lambda X, _: ksd(X, lambda x: -x), Y, 100, random_state=0)
    >>> abs(floor.mean) < floor.sd
    True
    """
    Y = check_array(without_graph(Y), dtype=np.float64, input_name="Y")
    m = n if m is None else m
    for name, value, least in [("n", n, 1), ("m", m, 1), ("n_repeats", n_repeats, 2)]:
        check_integer(value, name, min_val=least)
    if n + m > len(Y):
        raise ValueError(f"`Y` has {len(Y)} rows, expected n + m = {n + m} at least; lower `n` or `m`, or draw more.")
    rng = check_random_state(random_state)
    rows = [rng.permutation(len(Y))[: n + m] for _ in range(n_repeats)]
    values = [metric(Y[some[:n]], Y[some[n:]]) for some in rows]
    return NoiseFloor(float(np.mean(values)), float(np.std(values, ddof=1)))


def ksd(X: ArrayLike, score_fn: ScoreFunction, *, kernel: str | Kernel | None = None, statistic: str = "u") -> float:
    r"""Estimate the squared kernel Stein discrepancy of a sample from a target.

    .. math:: \mathrm{KSD}^2 = E\, k_p(x, x')

    by the mean of the Stein kernel over all pairs ("v", never negative, biased upward) or over pairs of different
    rows ("u", unbiased). Values under different kernels or bandwidths cannot be compared, and no kernel detects wrong
    weights of well-separated modes.

    Parameters
    ----------
    X : array-like of shape (n, d)
    score_fn : callable or Target
        The gradient of log p at each row, (n, d) -> (n, d) tensors.
    kernel : str or Kernel, default=None
        None means `skksivi.kernels.IMQ`. A median bandwidth is set on X and is part of the result.
    statistic : {"u", "v"}, default="u"

    Returns
    -------
    discrepancy : float
        The squared discrepancy, in the inverse squared units of X.

    Raises
    ------
    ValueError
        The score is not finite at a row of X, or the Stein kernel does not exist: Laplace and Riesz have no second
        derivative at x = y, so they allow only "u", in two or more dimensions; Riesz with norm="l1" allows neither.

    See Also
    --------
    ksd_test : A test by the kernel Stein discrepancy.
    skksivi.model_selection.neg_ksd_scorer : A scorer that needs the score alone.

    References
    ----------
    Liu, Q., Lee, J. and Jordan, M. (2016). A kernelized Stein discrepancy for goodness-of-fit tests.
    https://arxiv.org/abs/1602.03253

    Examples
    --------
    >>> import numpy as np
    >>> from skksivi.metrics import ksd
    >>> X = np.random.RandomState(0).normal(size=(1000, 2))
    >>> bool(abs(ksd(X, lambda x: -x)) < 0.01 < ksd(X + 0.3, lambda x: -x))
    True
    """
    check_statistic(statistic)
    k_p, n = _stein_matrix_of(X, score_fn, kernel, statistic)
    trace = reduce(torch.add, (k_p(i, i).trace() for i in tiles(n))) if statistic == "v" else None
    return mean_within(k_p, n, trace).item()


class KSDTest(NamedTuple):
    """Statistic and p-value of a goodness-of-fit test.

    See Also
    --------
    ksd_test : A test by the kernel Stein discrepancy.
    """

    statistic: float
    pvalue: float


def ksd_test(
    X: ArrayLike,
    score_fn: ScoreFunction,
    *,
    kernel: str | Kernel | None = None,
    n_bootstrap: int = 999,
    flip_probability: float = 0.5,
    random_state: int | np.random.RandomState | None = None,
) -> KSDTest:
    r"""Test whether a sample is from a target, by a wild bootstrap of its kernel Stein discrepancy.

    .. math:: T(w) = \frac{1}{n (n - 1)} \sum_{i \ne j} w_i w_j k_p(x_i, x_j)

    is the U-statistic of `ksd` at w = 1. For draws from the target, as n grows, random signs w do not change its
    distribution, and the p-value is the share of :math:`T(w) \ge T(1)`, including w = 1. For a Markov chain the signs
    of neighbouring rows must agree over its correlation time: they are a chain themselves, which flips at each row
    with `flip_probability`.

    With many draws the test rejects any approximation, however good: then `ksd`, not the p-value, measures its
    quality. It takes about n^2 (n_bootstrap + 30) operations and 8 n n_bootstrap bytes.

    Parameters
    ----------
    X : array-like of shape (n, d)
        Draws, in their order if they are from a chain. Bring the coordinates to similar scales first: the kernel
        treats them equally.
    score_fn : callable or Target
        The gradient of log p at each row, (n, d) -> (n, d) tensors.
    kernel : str or Kernel, default=None
        None means `skksivi.kernels.IMQ`. A median bandwidth is set on X.
    n_bootstrap : int, default=999
        Random signs; the least p-value is 1 / (n_bootstrap + 1).
    flip_probability : float, default=0.5
        One half for independent draws, about one over the autocorrelation time for a chain.
    random_state : int, RandomState or None, default=None
        Draws the signs.

    Returns
    -------
    test : KSDTest
        With fields `statistic`, the U-statistic of the squared discrepancy, and `pvalue`.

    Raises
    ------
    ValueError
        As `ksd` does; `n_bootstrap` is below 1 or `flip_probability` not in (0, 1).

    See Also
    --------
    ksd : The kernel Stein discrepancy, from the score alone.
    skksivi.diagnose : A report on a fit.

    References
    ----------
    Chwialkowski, K., Strathmann, H. and Gretton, A. (2016). A kernel test of goodness of fit.
    https://arxiv.org/abs/1602.02964

    Liu, Q., Lee, J. and Jordan, M. (2016). A kernelized Stein discrepancy for goodness-of-fit tests.
    https://arxiv.org/abs/1602.03253

    Examples
    --------
    >>> import numpy as np
    >>> from skksivi.metrics import ksd_test
    >>> X = np.random.RandomState(0).normal(size=(300, 2))
    >>> ksd_test(X, lambda x: -x, random_state=0).pvalue > 0.05
    True
    >>> ksd_test(X + 0.3, lambda x: -x, random_state=0).pvalue < 0.05
    True
    """
    check_integer(n_bootstrap, "n_bootstrap", min_val=1)
    check_scalar(flip_probability, "flip_probability", Real, min_val=0, max_val=1, include_boundaries="neither")
    k_p, n = _stein_matrix_of(X, score_fn, kernel, "u")
    w = _random_signs(n, 1 + n_bootstrap, flip_probability, make_generator(random_state))
    w[:, 0] = 1
    terms = ((w[i] * (block @ w[j])).sum(0) for i, j, block in upper_blocks(k_p, n))
    T = 2 / (n * (n - 1)) * reduce(torch.add, terms)
    tie = 1e-9 * T[0].abs()  # all signs flipped give T(1) again, but for rounding
    return KSDTest(T[0].item(), (T - T[0] >= -tie).double().mean().item())


def _random_signs(n: int, n_chains: int, flip_probability: float, generator: torch.Generator) -> Tensor:
    """Return chains of signs in columns (n, n_chains); each flips at each row with this probability."""
    uniform = torch.rand(n, n_chains, generator=generator, dtype=torch.float64, device="cpu")
    return uniform.lt_(flip_probability).mul_(-2).add_(1).cumprod_(0)


def _stein_matrix_of(
    X: ArrayLike, score_fn: ScoreFunction, kernel: str | Kernel | None, statistic: str
) -> tuple[Callable[[slice, slice], Tensor], int]:
    """Return the matrix of the Stein kernel between the rows of X, and their number."""
    X = check_array(without_graph(X), dtype=np.float64, ensure_min_samples=2, input_name="X")
    kernel = IMQ() if kernel is None else resolve_kernel(kernel)
    if not kernel.euclidean:
        raise ValueError(
            f"There is no Stein kernel of {kernel!r}, only of kernels of the Euclidean distance; use IMQ, Gaussian "
            "or Riesz(norm='l2')."
        )
    if not kernel.smooth and (statistic == "v" or X.shape[1] == 1):
        raise ValueError(
            f"{type(kernel).__name__} has no second derivative at x = y, which statistic={statistic!r} with "
            f"{X.shape[1]} column(s) needs; use IMQ or Gaussian, or statistic='u' with two or more columns."
        )
    x = as_tensor(X, dtype=torch.float64)
    s = in_double(score_fn, x.shape[1])(x)
    return stein_matrix(x, finite_scores(s), kernel.frozen(x)), len(x)
