"""Kernel Stein discrepancies: how far a sample is from a target known by its score."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from numbers import Real
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils import check_array, check_scalar
from torch import Tensor

from skksivi._utils.arrays import as_tensor, make_generator, without_graph
from skksivi._utils.numbers import check_integer
from skksivi.kernels import IMQ, Kernel, resolve_kernel
from skksivi.metrics._samples import check_statistic
from skksivi.score import ScoreFunction, in_double
from skksivi.stein import finite_scores, mean_within, stein_matrix, tiles, upper_blocks


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
        derivative at x = y, so they allow only "u", in two or more dimensions; Riesz with norm="l1" and Tilted allow
        neither.

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
    if kernel.tilted or not kernel.euclidean:
        raise ValueError(
            f"There is no Stein kernel of {kernel!r}, only of kernels of the Euclidean distance without a weight; "
            "use IMQ, Gaussian or Riesz(norm='l2')."
        )
    if not kernel.smooth and (statistic == "v" or X.shape[1] == 1):
        raise ValueError(
            f"{type(kernel).__name__} has no second derivative at x = y, which statistic={statistic!r} with "
            f"{X.shape[1]} column(s) needs; use IMQ or Gaussian, or statistic='u' with two or more columns."
        )
    x = as_tensor(X, dtype=torch.float64)
    s = in_double(score_fn, x.shape[1])(x)
    return stein_matrix(x, finite_scores(s), kernel.frozen(x)), len(x)
