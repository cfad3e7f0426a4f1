"""What a sample tells of its distance from a target: the discrepancy under one kernel, and Stein's identities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import reduce

import torch
from torch import Tensor

from skksivi.coordinates._affine import AffineMap, Identity
from skksivi.kernels import IMQ, Kernel, squared_distances
from skksivi.pilot._log_density import judging_map
from skksivi.pilot._pilot import MAX_FEATURES
from skksivi.score import ScoreFunction, in_double

#: Rows and columns of a block of pairs: its temporaries stay in a processor's cache.
TILE = 256

#: Maps slices of rows and of columns to this block of a matrix.
Matrix = Callable[[slice, slice], Tensor]


def stein_variances(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    r"""Estimate :math:`-E[s_i (x_i - E x_i)]` (d,) and its standard error from draws x (n, d) and their scores.

    By Stein's identity it is one if the draws are from the density with this score, whatever it is. If that density
    is Gaussian and the draws are too wide or too narrow, it is the square of their scale.
    """
    terms = (x.mean(0) - x) * s
    return terms.mean(0), terms.std(0) / math.sqrt(len(x))


def stein_shift(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    r"""Estimate :math:`E[s]^\top \Sigma\, E[s]` from draws x (n, d) and their scores, and the error from the latter.

    With :math:`\Sigma` the covariance of the draws it has no units. By Stein's identity it is zero if the draws are
    from the density with this score; for a shifted Gaussian it is the squared distance in standard deviations. Each
    factor takes one half of the scores, so that noise is not taken for a shift.
    """
    centred, (first, second) = x - x.mean(0), s.chunk(2)
    terms = second @ (centred.mT @ (centred @ first.mean(0))) / len(x)
    return terms.mean(), 2 * terms.std() / math.sqrt(len(x))


def stein_error(x: Tensor, s: Tensor) -> float:
    """Return by how much draws x (n, d) with scores s are off, by Stein's identities, infinite if any is not finite.

    It is the largest error of a mean, in standard deviations, estimated by the covariance times the mean score, or
    the largest relative error of a standard deviation, whichever is larger.
    """
    centred, variances = x - x.mean(0), stein_variances(x, s)[0]
    means = centred.mT @ (centred @ s.mean(0)) / len(x) / x.std(0)
    errors = torch.cat([means, variances.clamp_min(0).sqrt() - 1]).abs()
    return errors.max().item() if errors.isfinite().all() else math.inf


def agree(x: Tensor, s: Tensor) -> bool:
    """Tell whether draws x (n, d) may be from the density with scores s, by Stein's identities.

    They may if no scale is off by more than 5%, and no mean by more than 0.1 standard deviations, each plus five
    standard errors.
    """
    (variances, se), (square, se_of_square) = stein_variances(x, s), stein_shift(x, s)
    return bool(((variances - 1).abs() <= 0.1 + 5 * se).all() and square <= 0.01 + 5 * se_of_square)


# Means over pairs of rows, a block at a time


def tiles(n: int) -> list[slice]:
    """Return slices of n rows, `TILE` each."""
    return [slice(start, start + TILE) for start in range(0, n, TILE)]


def upper_blocks(matrix: Matrix, n: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield rows, columns and the block there of a matrix (n, n), less its diagonal and what is below."""
    rows = tiles(n)
    for k, i in enumerate(rows):
        yield i, i, matrix(i, i).triu(1)
        for j in rows[k + 1 :]:
            yield i, j, matrix(i, j)


def mean_within(matrix: Matrix, n: int, trace: Tensor | None = None) -> Tensor:
    """Return the mean of a symmetric matrix (n, n) with this trace, or the mean of its off-diagonal entries."""
    off_diagonal = 2 * reduce(torch.add, (block.sum() for _, _, block in upper_blocks(matrix, n)))
    return off_diagonal / (n * (n - 1)) if trace is None else (off_diagonal + trace) / n**2


def mean_between(matrix: Matrix, n: int, m: int) -> Tensor:
    """Return the mean of a matrix (n, m)."""
    return reduce(torch.add, (matrix(i, j).sum() for i in tiles(n) for j in tiles(m))) / (n * m)


# The discrepancy under one kernel


def stein_kernel(x: Tensor, s_x: Tensor, y: Tensor, s_y: Tensor, kernel: Kernel) -> Tensor:
    r"""Evaluate the Stein kernel on all pairs of rows, the paper's Eq. (stein-kernel-def).

    With :math:`k = \varphi(D)`, :math:`D = \|x-y\|^2` and r = x - y,

    .. math::
        k_p = s(x)^\top s(y) \varphi + 2 \varphi' (r^\top s(y) - s(x)^\top r) - 2 d \varphi' - 4 D \varphi''.

    Parameters
    ----------
    x, s_x : Tensor of shape (n, d)
        Points and the score of p there.
    y, s_y : Tensor of shape (m, d)
        Points and the score of p there.
    kernel : Kernel
        With a fixed bandwidth (`kernel.frozen`).

    Returns
    -------
    k_p : Tensor of shape (n, m)
    """
    squared = squared_distances(x, y)
    phi, dphi, ddphi = kernel.derivatives(squared, 2)
    s_r = (s_x * x).sum(-1, keepdim=True) - s_x @ y.mT
    r_s = x @ s_y.mT - (y * s_y).sum(-1).unsqueeze(-2)
    k_p = s_x @ s_y.mT * phi + 2 * dphi * (r_s - s_r) - 2 * x.shape[-1] * dphi - 4 * squared * ddphi
    if kernel.centred:
        k_p = k_p - _stein_offset(x, s_x, kernel) @ s_y.mT - s_x @ _stein_offset(y, s_y, kernel).mT
    return k_p


def _stein_offset(x: Tensor, s_x: Tensor, kernel: Kernel) -> Tensor:
    r"""Return :math:`s(x) u(x) + \nabla u(x)` of a centred kernel's part :math:`u(x) = \varphi(\|x\|^2)`."""
    phi, dphi = kernel.derivatives(x.square().sum(-1, keepdim=True), 1)
    return s_x * phi + 2 * dphi * x


def stein_matrix(x: Tensor, s: Tensor, kernel: Kernel) -> Matrix:
    """Return the matrix (n, n) of the Stein kernel between points x (n, d) with scores s."""
    return lambda i, j: stein_kernel(x[i], s[i], x[j], s[j], kernel)


def finite_scores(s: Tensor) -> Tensor:
    """Raise ValueError unless all scores are finite."""
    bad = (~s.isfinite()).any(-1).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"`score_fn` is not finite at {len(bad)} of the {len(s)} draws, row {bad[0]} the first, so they cannot "
            "be evaluated."
        )
    return s.detach()


class FixedKernelKSD:
    r"""The squared KSD of draws under one kernel that depends on the target alone.

    The coordinates are whitened once, by the curvature at a mode found from the target's own scores, from the origin
    or, if they are not finite there, from points scattered around it (up to 1,000 features). The kernel is
    :math:`(1 + \|u-u'\|^2 / d)^{-1/2}` in them. It does not depend on a candidate, so candidates of a search can be
    compared.

    Parameters
    ----------
    score_fn : callable
        The score of the target.
    n_features : int
    device : device or str, default="cpu"
    map : Affine, LowRank or Identity, default=None
        Other coordinates to use instead.
    """

    def __init__(
        self,
        score_fn: ScoreFunction,
        n_features: int,
        device: torch.device | str = "cpu",
        map: AffineMap | None = None,  # noqa: A002
    ) -> None:
        self.score_fn = in_double(score_fn, n_features, device)
        if map is None and n_features <= MAX_FEATURES:
            map = judging_map(self.score_fn)  # noqa: A001
        self.map = map or Identity(torch.zeros(n_features, dtype=torch.float64, device=device))
        self.kernel = IMQ(bandwidth=math.sqrt(n_features))

    def __call__(self, x: Tensor, kernel: Kernel | None = None) -> float:
        """Return the U-statistic of the squared discrepancy of draws x (n, d), under its kernel or another."""
        x = x.detach().double()
        s = finite_scores(self.score_fn(x))
        u, s_u = self.map.whiten(x), self.map.whiten_score(s)
        return mean_within(stein_matrix(u, s_u, kernel or self.kernel), len(u)).item()
