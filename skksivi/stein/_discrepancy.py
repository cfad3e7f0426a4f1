r"""What a sample tells of its distance from a target: the discrepancy under one kernel, and Stein's identities.

A divergence adds over features and so hides one direction among many. With draws u of a fit in whitened coordinates,
and scores s of the target there, the leading eigenvectors of :math:`E[(s + u)(s + u)^\top]` are the directions in
which the target is least like N(0, I). These are suspect, and so is where draws contradict Stein's identities
:math:`E[s] = 0` and :math:`E[s u^\top] = -I` most, if beyond the noise. Along such a direction v a Gibbs step draws
:math:`v^\top u` again, from the target given all else. This leaves draws of the target as they are and moves others
towards it. The conditional density is an integral of the score along a line, and so is known also where no draw has
been, as in a missing tail. Suspect are further the directions in which draws are far wider or narrower than N(0, I),
or shifted. Many draws show these at no further scores, where a few hundred scores of many features show none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import reduce
from typing import NamedTuple

import numpy as np
import torch
from scipy.interpolate import PchipInterpolator
from torch import Tensor

from skksivi._utils.arrays import as_array, as_tensor
from skksivi.coordinates._affine import AffineMap, Identity
from skksivi.kernels import IMQ, Kernel, squared_distances
from skksivi.pilot._log_density import judging_map
from skksivi.pilot._points import MAX_FEATURES
from skksivi.score import in_double
from skksivi.score._score import DifferentiableScore, ScoreFunction

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


# Along the directions that are most suspect

#: Draws whose scores are asked for.
N_SCORES = 200

#: Leading directions at most, and the most from which they are chosen.
N_DIRECTIONS, N_TURNED = 2, 10

#: Lines and nodes of each, at first and where they show a difference.
LINES = ((16, 33), (48, 49))

#: Score calls of all of it, at most.
MOST_CALLS = N_SCORES + 2 * N_TURNED + (2 * N_DIRECTIONS + 3) * sum(n_lines * n_nodes for n_lines, n_nodes in LINES)

#: Differences that do not matter: of the means, in standard deviations, and of the logarithms of the standard
#: deviations.
MOST_SHIFT, MOST_SCALE = 0.25, 0.2


class Step(NamedTuple):
    """What a Gibbs step changes along a direction, in units of the draws before it.

    Attributes
    ----------
    shift, shift_se : float
        The change of the mean and its standard error.
    scale, scale_se : float
        The ratio of the standard deviations, and the standard error of its logarithm.
    range, least_range, most_range : float
        The ratio of the ranges that hold 99.8%, and its bounds by the noise of the draws' range; the second is
        infinite where no line alone reaches over that range, but only all lines together, which are few.
    """

    shift: float
    shift_se: float
    scale: float
    scale_se: float
    range: float
    least_range: float
    most_range: float

    @property
    def matters(self) -> bool:
        """Whether the draws are far enough from the target to say so."""
        return (
            abs(self.shift) > MOST_SHIFT + 3 * self.shift_se  # noise
            or abs(math.log(self.scale)) > MOST_SCALE + 3 * self.scale_se
            or math.log(self.least_range) > 0.25
            or math.log(self.most_range) < -0.25
        )


class Difference(NamedTuple):
    """A direction along which draws are wrong.

    Attributes
    ----------
    correlations : Tensor of shape (d,)
        Of the coordinates with it.
    step : Step
        What a Gibbs step changes along it.
    """

    correlations: Tensor
    step: Step

    def words(self, label: Callable[[int], str]) -> str:
        """Describe it, given the names of coordinates."""
        largest = self.correlations.abs().argsort(descending=True)[:3].tolist()
        names = ", ".join(f"{self.correlations[i]:+.2f} with {label(i)}" for i in largest)
        return (
            f"a direction whose correlations are {names}: given all else, the target there is {self.step.scale:.2g} "
            f"times as wide in standard deviations and {self.step.range:.2g} times in its 99.8% range, and its mean "
            f"is {self.step.shift:+.2f} standard deviations away"
        )


@torch.no_grad()
def first_difference(
    score_u: DifferentiableScore, few: Tensor, draw: Callable[[], tuple[Tensor, Tensor]]
) -> Difference | None:
    """Return the first of the leading directions along which draws are wrong, None if there is none.

    Parameters
    ----------
    score_u : callable
        The score of the target in whitened coordinates, for float64 points.
    few : Tensor of shape (m, d)
        Draws in whitened coordinates.
    draw : callable
        Returns many draws, as tensors of shape (n, d): in whitened coordinates, and the same in those of the target.
    """
    V, (u, x) = suspect_directions(score_u, few), draw()
    if V is None or not u.isfinite().all():
        return None
    for v in torch.cat([V, non_gaussian_directions(u)], 1).mT:
        for n_lines, n_nodes in LINES:
            step = gibbs_step(score_u, u, v, n_lines, n_nodes)
            if step is None or not step.matters:
                break
        else:
            return Difference(torch.corrcoef(torch.cat([(u @ v)[None], x.mT]))[0, 1:], step)
    return None


def suspect_directions(score_u: DifferentiableScore, u: Tensor) -> Tensor | None:
    """Return the directions (d, k) along which draws u (n, d) are suspect by the scores there, None if these or their
    squares are not finite.
    """
    off = score_u(u) + u
    if not off.square().sum().isfinite():
        return None
    return torch.cat([leading_directions(score_u, u[0], off), contradicting_directions(u, off - u)], 1)


def leading_directions(score_u: DifferentiableScore, u: Tensor, off: Tensor) -> Tensor:
    r"""Return the directions (d, k) in which values of :math:`s(u) + u` (n, d) are largest.

    In the space of the leading eigenvectors they are turned to those of the Jacobian at a draw u (d,). Where
    directions are independent and alike, the former are any mixtures of them, the latter the directions themselves.
    """
    sizes, V = torch.linalg.eigh(off.mT @ off / len(off))
    W = V[:, sizes > 0.05][:, -N_TURNED:]
    if W.shape[1] > 1:
        within = score_u.product(u.expand(W.shape[1], -1), W.mT) @ W
        W = W @ torch.linalg.eigh((within + within.mT) / 2).eigenvectors
    return W[:, (off @ W).square().sum(0).argsort(descending=True)[:N_DIRECTIONS]]


def contradicting_directions(u: Tensor, s: Tensor) -> Tensor:
    r"""Return the directions (d, k) in which draws u (n, d) with scores s contradict :math:`E[s] = 0` and
    :math:`E[s u^\top] = -I` most, those beyond the noise.

    Half of the draws finds them, and the other half judges them.
    """
    (u, u_after), (s, s_after) = u.chunk(2), s.chunk(2)
    W = stein_violations(u, s)
    s_w, u_w = s_after @ W, u_after @ W
    terms = torch.stack([s_w[:, 0], s_w[:, 1] * u_w[:, 1] + 1], 1)
    z = terms.mean(0).abs() * math.sqrt(len(terms)) / terms.std(0)
    return W[:, z > 5]  # standard errors


def non_gaussian_directions(u: Tensor) -> Tensor:
    """Return the directions (d, k) in which the scale and the mean of draws u (n, d) are least those of N(0, I), if
    that matters.
    """
    variances, V = torch.linalg.eigh(torch.atleast_2d(u.mT.cov()))
    off = (variances.clamp_min(torch.finfo(u.dtype).tiny).log() / 2).abs()
    leading = off.argsort(descending=True)[:N_DIRECTIONS]
    W, mean = V[:, leading[off[leading] > MOST_SCALE]], u.mean(0)
    return W if mean.norm() < MOST_SHIFT else torch.cat([W, mean[:, None] / mean.norm()], 1)


def stein_violations(u: Tensor, s: Tensor, w: Tensor | float = 1.0) -> Tensor:
    r"""Return where points u (n, d) contradict :math:`E[s] = 0` and :math:`E[s u^\top] = -w I` most, as (d, 2)."""
    excess = u.mT @ s / len(u)
    excess.diagonal().add_(w)
    sizes, V = torch.linalg.eigh((excess + excess.mT) / 2)
    return torch.stack([torch.nn.functional.normalize(s.mean(0), dim=0), V[:, sizes.abs().argmax()]], 1)


def gibbs_step(score_u: ScoreFunction, u: Tensor, v: Tensor, n_lines: int, n_nodes: int) -> Step | None:
    """Return what Gibbs steps along v (d,) from the last n_lines of draws u (n, d) change; None if scores are not
    finite on most lines, or the draws hardly determine their own width.

    The draws' own moments are known, so places on the lines and their squares are control variates.
    """
    own = as_array(u @ v)
    unit = own.std()
    own = (own - own.mean()) / unit
    own_se = ((own**4).mean() - 1) ** 0.5 / (2 * len(own) ** 0.5)  # of the logarithm of the standard deviation
    if not own_se <= 0.1:  # the draws' own log sd, if this uncertain, is no standard to compare with
        return None
    t, p, kept = conditionals(score_u, u[-n_lines:], v, n_nodes)
    if kept.mean() < 0.5:
        return None
    before = own[-n_lines:][kept]
    after = before[:, None] + t / unit
    controls = np.stack([np.ones_like(before), before, np.square(before) - 1], 1)
    moments = np.stack([(p * after).sum(1), (p * np.square(after)).sum(1)], 1)
    coefficients = np.linalg.lstsq(controls, moments)[0]
    mean, square = coefficients[0]
    residuals = moments - controls @ coefficients
    se = np.sqrt(np.square(residuals).sum(0) / (len(before) - 3) * np.linalg.pinv(controls.T @ controls)[0, 0])
    variance = max(square - mean**2, np.finfo(float).tiny)
    order = after.ravel().argsort()
    places, levels = after.ravel()[order], p.ravel()[order].cumsum() / len(p)
    tail = 1e-3  # the probability in each tail beyond the range that is compared
    low, high = np.interp([tail, 1 - tail], levels, places)
    noise = 1.5 * (tail / len(own)) ** 0.5
    tails = np.array([tail, max(tail - noise, 0.0), tail + noise])
    first, last = np.quantile(own, [tails, 1 - tails])
    ratio, least, most = max(high - low, np.finfo(float).tiny) / (last - first)
    widths = np.sqrt((moments[:, 1] - np.square(moments[:, 0])).clip(0))
    is_whole = max(moments[:, 0].std(), widths.std()) < 0.2 * variance**0.5  # all lines have the whole range
    most = most if is_whole else math.inf
    return Step(mean, se[0], variance**0.5, math.hypot(se[1] / (2 * variance), own_se), ratio, least, most)


def conditionals(
    score_u: ScoreFunction, u: Tensor, v: Tensor, n_nodes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return distances t (m,) along v (d,), their probabilities (k, m) given all else on the lines through points
    u (n, d), and which lines (n,) are kept, where scores are finite.
    """
    unit = 0.3  # of the nodes, which are closer near the middle
    end = float(np.arcsinh(30.0 / unit))  # half the length of a line
    # eight points between two nodes
    w, fine = np.linspace(-end, end, n_nodes), np.linspace(-end, end, 8 * (n_nodes - 1) + 1)
    nodes = as_tensor(unit * np.sinh(w), device=u.device)
    s = score_u((u[:, None] + nodes[:, None] * v).flatten(0, 1)).view(len(u), n_nodes, -1)
    slopes = as_array(s @ v)
    kept = np.isfinite(slopes).all(1)
    steepest = 1e6  # log p has surely ended at such a slope, and larger ones would leave rounding errors in the sums
    steep = (slopes[kept] * unit * np.cosh(w)).clip(-steepest, steepest)
    log_p = PchipInterpolator(w, steep, axis=1).antiderivative()(fine)
    centre = len(fine) // 2
    log_p -= log_p[:, [centre]]
    for half in (log_p[:, centre:], log_p[:, centre::-1]):
        ended = np.fmax.accumulate(half, 1) - half > 15.0  # nats
        half[np.logical_or.accumulate(ended, 1) | np.isnan(half)] = -np.inf
    log_p += np.log(np.cosh(fine))
    p = np.exp(log_p - log_p.max(1, keepdims=True))
    return unit * np.sinh(fine), p / p.sum(1, keepdims=True), kept
