r"""The score of large data near its mode, from a part of the data and an expansion of the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from skksivi._utils.arrays import as_tensor
from skksivi.coordinates._affine import Affine, standard_normal
from skksivi.pilot._modes import search_around
from skksivi.pilot._newton import jacobians, saddle_free_newton
from skksivi.score._score import N_SKETCHED, Parts, Score
from skksivi.score._tally import Tally

LOGGER = logging.getLogger("skksivi")


#: The most features of an expansion, and of one that corrects the slope of every minibatch and whose mode is sought
#: from many points: a product for each.
MAX_FEATURES, MAX_SLOPES = 1000, 200

#: Standard deviations from the mode, in each of the coordinates u, beyond which the correction stays as it is.
REACH = 8.0

#: How many times the observations grow from one search for the mode to the next, and from one check to the next.
GROWTH, GROWN_CHECK = 16, 4

#: The most steps of a search in all of the data by the curvature of a part, and the Newton decrement per feature at
#: which it ends.
MAX_STEPS, TOLERANCE = 12, 1e-2

#: Points around the mode at which the score of a part is compared with that of all, and the largest root mean square
#: of the differences of a coordinate, in units of u.
N_COMPARED, MAX_ERROR = 64, 0.05


class Expansion(NamedTuple):
    r"""The score of all of the data at its mode.

    Attributes
    ----------
    map : Affine
        The x = m + L u with the mode m and :math:`L L^\top` the inverse of :math:`-\nabla s(m)`.
    inverse : Tensor of shape (d, d)
        The inverse of L.
    s : Tensor of shape (d,)
        The score of u at zero, small; its Jacobian there is -I.
    """

    map: Affine
    inverse: Tensor
    s: Tensor

    def to(self, dtype: torch.dtype) -> Expansion:
        m, L = self.map
        return Expansion(Affine(m.to(dtype), L.to(dtype)), self.inverse.to(dtype), self.s.to(dtype))


class Correction(NamedTuple):
    r"""The correction from the score of a part of the data to the score of all at the mode, in value and slope.

    .. math:: c(u) = s_u(0) - \hat s_u(0) - (I + \nabla \hat s_u(0))\, u,

    with :math:`\hat s` the score of the part and u clipped to the range of the expansion in each coordinate. Over
    random parts its mean is zero.

    References
    ----------
    Baker, J. et al. (2019). Control variates for stochastic gradient MCMC. https://arxiv.org/abs/1706.05439
    """

    expansion: Expansion
    s: Tensor
    slope: Tensor

    @classmethod
    def of(cls, part: Score, expansion: Expansion, *, slopes: bool = True) -> Correction:
        """Return the correction of a part, with an expansion in its dtype, with or without the slope."""
        (m, L), _, s = expansion
        at, pull = part.with_pullback(m.expand(len(m) if slopes else 1, -1).clone())
        slope = pull(L.mT.contiguous()) @ L if slopes else torch.zeros_like(L)
        if slopes:
            slope.diagonal().add_(1.0)
        return cls(expansion, s - at[0] @ L, slope.neg())

    def __call__(self, x: Tensor) -> Tensor:
        """Evaluate the correction at x (n, d)."""
        inverse = self.expansion.inverse
        u = (x - self.expansion.map.m) @ inverse.mT
        return torch.addmm(self.s, u.clamp(-REACH, REACH), self.slope.mT) @ inverse

    def product(self, x: Tensor, v: Tensor) -> Tensor:
        """Return J^T v at x (n, d) for v (n, d)."""
        inverse = self.expansion.inverse
        near = ((x - self.expansion.map.m) @ inverse.mT).abs() <= REACH
        return ((v @ inverse.mT) @ self.slope * near) @ inverse


def corrected(part: Score, expansion: Expansion, *, slopes: bool = True) -> Score:
    """Return the score of a part of the data, corrected."""
    correction = Correction.of(part, expansion, slopes=slopes)

    def score_vjp(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        s, pull = part.score_vjp(x)  # type: ignore[misc]
        return s + correction(x), lambda v: pull(v) + correction.product(x, v)

    own = None if part.score_vjp is None else score_vjp
    return replace(part, score_fn=lambda x: part.score_fn(x) + correction(x), score_vjp=own)


def large_data(score: Score, near: ArrayLike | None = None) -> Score:
    """Transform a target of large data: minibatches have little noise near the mode, and values cost little.

    A minibatch is corrected by an expansion of the score of all of the data at the mode; and so is a part of the data
    that takes their place, of as many observations as are needed to agree with them around the mode. Where there are
    several modes, none is found, or the target has no minibatches, the score is returned as it is.

    Parameters
    ----------
    score : Score
    near : array-like of shape (d,) or (1, d), default=None
        Where the search for the mode starts, and nowhere else.
    """
    double, d = score.double, score.n_features
    parts = double.parts
    if parts is None or d > MAX_FEATURES:
        return score
    X = np.zeros((1, d)) if near is None else np.atleast_2d(np.asarray(near, dtype=np.float64))
    before, exact = double.tally.total, replace(double, tally=Tally(listener=double.tally.listener))
    starts = as_tensor(X, dtype=torch.float64, device=score.device)
    expansion = _expansion(exact, parts, starts, alone=near is not None) if X.shape == (1, d) else None
    if expansion is None:
        LOGGER.info("minibatches: no single mode was found, so that the pilot sees all %d rows", parts.n_rows)
        return score
    n, error = _rows_needed(exact, parts, expansion)
    double.tally.n_values += exact.tally.n_values
    double.tally.n_products += exact.tally.n_products
    in_double = None if score.in_double is None else _with(score.in_double, expansion, n)
    found = replace(_with(score, expansion, n), in_double=in_double)
    LOGGER.info(
        "minibatches: with an expansion at the mode %d of %d rows stand for all, to %.1g of a standard score; %d "
        "scores of all and %d of parts have found that",
        n,
        parts.n_rows,
        error,
        exact.tally.total,
        double.tally.total - before - exact.tally.total,
    )
    return found


def _with(score: Score, expansion: Expansion, n: int) -> Score:
    """Return the score of n observations for all of them, and minibatches, both corrected."""
    draw, parts = score.minibatch, score.parts
    if draw is None or parts is None:
        return score
    slopes, mode = score.n_features <= MAX_SLOPES, expansion.map.m
    expansion = expansion.to(score.dtype)
    few = score if n >= parts.n_rows else corrected(parts.of(n), expansion)
    return replace(
        few,
        minibatch=lambda generator: corrected(draw(generator), expansion, slopes=slopes),
        parts=parts,
        exact=score,
        mode=mode,
    )


def _expansion(score: Score, parts: Parts, starts: Tensor, *, alone: bool) -> Expansion | None:
    """Return the expansion at the mode, None if there is another or none is found."""
    alone = alone or score.n_features > MAX_SLOPES
    try:
        modes = search_around(score.sketch(), starts, torch.Generator(score.device).manual_seed(0), alone=alone)
        if len(modes.maps) > 1:
            return None
        at = _mode(score, parts, modes.maps[0])
    except ValueError:
        return None
    if at is None:
        return None
    m, L = at
    factor, failed = torch.linalg.cholesky_ex(-L.mT @ jacobians(score, m[None])[0] @ L)
    if failed:  # also where it is not finite
        return None
    R = torch.linalg.qr(torch.linalg.inv(factor) @ L.mT).R
    L = R.mT * R.diagonal().sign()
    return Expansion(Affine(m, L), torch.linalg.inv(L), score(m[None])[0] @ L)


def _mode(score: Score, parts: Parts, at: Affine) -> Affine | None:
    """Return the mode given all of the data near the mode given a few, None if the search has not converged.

    It is sought in growing parts of the data and then, by the curvature of the last of them, in all.
    """
    n, d = N_SKETCHED * GROWTH, score.n_features
    while 4 * n < parts.n_rows:
        at, _ = saddle_free_newton(parts.of(n), at.m)
        n *= GROWTH
    x, last = at.m, float("inf")
    for _ in range(MAX_STEPS):
        s = at.whiten_score(score(x[None]))
        decrement = s.square().sum().item()
        if decrement < TOLERANCE * d / 2:  # all of the data may have twice the curvature of a part
            return at._replace(m=x)
        if not decrement < last / 2:
            break
        x, last = x + at.unwhiten_direction(s)[0], decrement
    at, converged = saddle_free_newton(score, at.m, 30)
    return at if converged else None


def _rows_needed(score: Score, parts: Parts, expansion: Expansion) -> tuple[int, float]:
    """Return how many observations suffice near the mode, and the remaining error."""
    generator, n_rows = torch.Generator(score.device).manual_seed(0), parts.n_rows
    u = standard_normal(N_COMPARED, expansion.s, generator)
    sizes = torch.ones(N_COMPARED, 1).to(u)
    sizes[1::2] = 2.0
    x = expansion.map.unwhiten(sizes * u)
    s, n = score(x), max(N_SKETCHED, parts.batch_size)
    while GROWN_CHECK * n < n_rows:
        gap = expansion.map.whiten_score(corrected(parts.of(n), expansion)(x) - s) / sizes
        error = gap.square().mean(0).max().sqrt().item()
        if error < MAX_ERROR:
            return n, error
        n *= GROWN_CHECK
    return n_rows, 0.0
