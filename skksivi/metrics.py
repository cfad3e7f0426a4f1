"""How close two samples are to each other, or a sample to a target known by its score."""

from __future__ import annotations

import math
from numbers import Integral

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils import check_array, check_random_state, check_scalar
from torch import Tensor

from skksivi._affine import Affine, Identity
from skksivi._arrays import as_tensor
from skksivi._score import ScoreFunction, in_double
from skksivi._stein import stein_kernel
from skksivi._whitening import MAX_FEATURES, judging_map
from skksivi.kernels import IMQ, Kernel, resolve_kernel

__all__ = ["kl_divergence", "ksd", "sliced_wasserstein"]

#: Rows of a block of a Stein kernel matrix.
TILE = 1024


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
    zero: compare a result with this floor.

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
        In the units of the data.

    Raises
    ------
    ValueError
        X and Y differ in their number of columns, or hold non-finite values; `p` or `n_projections` is below 1.

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
    X, Y = _pair(X, Y)
    check_scalar(n_projections, "n_projections", Integral, min_val=1)
    if not 1 <= p < math.inf:
        raise ValueError(f"`p` must be a finite number of at least 1, got {p!r}.")
    theta = check_random_state(random_state).normal(size=(X.shape[1], n_projections))
    theta /= np.linalg.norm(theta, axis=0)
    x, y = np.sort(X @ theta, axis=0), np.sort(Y @ theta, axis=0)
    # The quantile functions are steps: between two neighbouring levels both are constant.
    levels = np.union1d(np.arange(1, len(X) + 1) / len(X), np.arange(1, len(Y) + 1) / len(Y))
    widths = np.diff(levels, prepend=0.0)
    middle = levels - widths / 2
    gaps = np.abs(x[(middle * len(X)).astype(int)] - y[(middle * len(Y)).astype(int)])
    return float(np.mean(widths @ gaps**p) ** (1 / p))


def kl_divergence(X: ArrayLike, Y: ArrayLike, *, n_neighbors: int = 3) -> float:
    r"""Estimate KL(p || q) from samples X of p and Y of q by nearest neighbours.

    .. math:: \frac{d}{n} \sum_i \log \frac{\nu_k(x_i)}{\rho_k(x_i)} + \log \frac{m}{n - 1}

    with :math:`\rho_k, \nu_k` the distances of x_i to its k-th neighbour in X and in Y. Meant for many draws in few
    dimensions (100,000 in two); with 1,000 draws in 22 dimensions its noise is about 0.1, and it may be negative.

    Parameters
    ----------
    X : array-like of shape (n, d)
    Y : array-like of shape (m, d)
    n_neighbors : int, default=3
        The k of the formula.

    Returns
    -------
    divergence : float
        In nats.

    Raises
    ------
    ValueError
        X and Y differ in their number of columns, hold non-finite values or repeated rows.

    References
    ----------
    Wang, Q., Kulkarni, S. and Verdú, S. (2009). Divergence estimation for multidimensional densities via
    k-nearest-neighbor distances. IEEE Transactions on Information Theory 55(5).
    """
    from sklearn.neighbors import NearestNeighbors  # not above: it imports rich, which draws from `random`

    X, Y = _pair(X, Y)
    rho = NearestNeighbors(n_neighbors=n_neighbors).fit(X).kneighbors()[0][:, -1]
    nu = NearestNeighbors(n_neighbors=n_neighbors).fit(Y).kneighbors(X)[0][:, -1]
    if not (rho.all() and nu.all()):
        raise ValueError(
            f"The distance to neighbour {n_neighbors} is zero for some row: `X` or `Y` has repeated rows; remove "
            "them or raise `n_neighbors`."
        )
    return float(X.shape[1] * np.mean(np.log(nu / rho)) + math.log(len(Y) / (len(X) - 1)))


def ksd(X: ArrayLike, score_fn: ScoreFunction, *, kernel: str | Kernel | None = None, statistic: str = "u") -> float:
    r"""Estimate the squared kernel Stein discrepancy of a sample from a target.

    .. math:: \mathrm{KSD}^2 = E\, k_p(x, x')

    by the mean of the Stein kernel over all pairs ("v", never negative, biased upward) or over pairs of different
    rows ("u", unbiased). Values under different kernels or bandwidths cannot be compared, and no kernel sees wrong
    weights of well separated modes.

    Parameters
    ----------
    X : array-like of shape (n, d)
    score_fn : callable or Target
        The gradient of log p at each row, (n, d) -> (n, d) tensors.
    kernel : str or Kernel, default=None
        None means `IMQ()`. A median bandwidth is set on X and is part of the result.
    statistic : {"u", "v"}, default="u"

    Returns
    -------
    discrepancy : float
        The squared discrepancy, in the inverse squared units of X.

    Raises
    ------
    ValueError
        The Stein kernel does not exist: Laplace and Riesz have no second derivative at x = y, so that they allow
        "u" in two or more dimensions only, and Riesz with norm="l1" neither.

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
    X = check_array(X, dtype=np.float64, ensure_min_samples=2, input_name="X")
    kernel = IMQ() if kernel is None else resolve_kernel(kernel)
    if statistic not in ("u", "v"):
        raise ValueError(f"`statistic` must be 'u' or 'v', got {statistic!r}.")
    if not kernel._euclidean:
        raise ValueError("The Stein kernel of Riesz(norm='l1') does not exist; use norm='l2', IMQ or Gaussian.")
    if not kernel._smooth and (statistic == "v" or X.shape[1] == 1):
        raise ValueError(
            f"{type(kernel).__name__} has no second derivative at x = y, which statistic={statistic!r} with "
            f"{X.shape[1]} column(s) needs; use IMQ or Gaussian, or statistic='u' with two or more columns."
        )
    x = as_tensor(X, dtype=torch.float64)
    score_fn = in_double(getattr(score_fn, "score_fn", score_fn), x.shape[1])
    return _mean_stein_kernel(x, score_fn(x).detach(), kernel.frozen(x), diagonal=statistic == "v")


def _mean_stein_kernel(x: Tensor, s: Tensor, kernel: Kernel, *, diagonal: bool) -> float:
    """Return the mean of k_p over all pairs of rows, with or without those of a row with itself."""
    n, total = len(x), x.new_zeros(())
    for x_i, s_i, start in zip(x.split(TILE), s.split(TILE), range(0, n, TILE), strict=True):
        k_p = stein_kernel(x_i, s_i, x, s, kernel)
        total += k_p.sum() - (0 if diagonal else k_p.diagonal(start).sum())
    return (total / (n * n if diagonal else n * (n - 1))).item()


class Judge:
    r"""The squared KSD of draws under one kernel that depends on the target alone.

    The coordinates are whitened once, by the curvature at a mode found from the target's own scores, from the origin
    on or, where they are not finite there, from points scattered around it (up to 1,000 features), and the kernel is
    :math:`(1 + \|u-u'\|^2 / d)^{-1/2}` there. Nothing of a candidate enters, so that candidates of a search can be
    compared.

    Parameters
    ----------
    score_fn : callable
        The score of the target.
    n_features : int
    device : device or str, default="cpu"
    map : Affine or Identity, default=None
        Other coordinates in the place of those.
    """

    def __init__(
        self,
        score_fn: ScoreFunction,
        n_features: int,
        device: torch.device | str = "cpu",
        map: Affine | Identity | None = None,  # noqa: A002
    ) -> None:
        self.score_fn = in_double(score_fn, n_features, device)
        if map is None and n_features <= MAX_FEATURES:
            map = judging_map(self.score_fn)  # noqa: A001
        self.map = map or Identity(torch.zeros(n_features, dtype=torch.float64, device=device))
        self.kernel = IMQ(bandwidth=math.sqrt(n_features))

    def __call__(self, x: Tensor) -> float:
        """Return the U-statistic of the squared discrepancy of draws x (n, d)."""
        x = x.detach().double()
        s = self.score_fn(x)
        if not s.isfinite().all():
            raise ValueError("`score_fn` is not finite at some of the draws, so that they cannot be judged by it.")
        u, s_u = self.map.whiten(x), self.map.whiten_score(s)
        return _mean_stein_kernel(u, s_u, self.kernel, diagonal=False)


def _pair(X: ArrayLike, Y: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    X = check_array(X, dtype=np.float64, input_name="X")
    Y = check_array(Y, dtype=np.float64, input_name="Y")
    if X.shape[1] != Y.shape[1]:
        raise ValueError(f"`X` has {X.shape[1]} columns and `Y` has {Y.shape[1]}; they must agree.")
    return X, Y
