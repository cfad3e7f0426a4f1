"""Means and widths by Stein's identity, mode by mode, in coordinates and in the directions that stand out."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.diagnostics._limits import STEIN_VARIANCES
from skksivi.diagnostics._report import Check
from skksivi.diagnostics._view import N_SE, View, judged
from skksivi.judge._thresholds import THRESHOLDS
from skksivi.pilot._mode_weights import Cells
from skksivi.stein._directions import most_contradicting

#: Fewest draws of a mode that is checked.
N_OF_MODE = 50

#: The standard error of a Stein variance above which it is uninformative.
MAX_ERROR = 0.5


class ModeTerms(NamedTuple):
    """The share r (n,) that a mode has of each draw and its gradient, the draws less their centre and their scores,
    all (n, d).
    """

    r: Tensor
    slope: Tensor
    gap: Tensor
    s: Tensor

    def turned(self, L: Tensor) -> ModeTerms:
        """Return the same in coordinates u with x = m + L u."""
        u = torch.linalg.solve_triangular(L, self.gap.mT, upper=False).mT
        return ModeTerms(self.r, self.slope @ L, u, self.s @ L)

    def halves(self) -> tuple[ModeTerms, ModeTerms]:
        """Return the terms of the earlier and of the later half of the draws."""
        first, second = zip(*(a.chunk(2) for a in self), strict=True)
        return ModeTerms(*first), ModeTerms(*second)


class SteinMoments(NamedTuple):
    """Shifts and variances (d + 2,), with standard errors, and the coordinates closest to their directions.

    The directions are the d coordinates and two that stand out; with several modes each value is the worst.
    """

    shift: Tensor
    shift_se: Tensor
    variance: Tensor
    variance_se: Tensor
    shift_along: Tensor
    variance_along: Tensor


def terms_of(x: Tensor, s: Tensor, cells: Cells) -> list[tuple[ModeTerms, Tensor]]:
    """Return the terms of each mode that has enough of the draws x (n, d), and a root L (d, d) of its covariance."""
    r = cells.log_shares(x).softmax(1)
    g = torch.stack([torch.linalg.solve_triangular(a.L.mT, -a.whiten(x).mT, upper=True).mT for a in cells.maps])
    mean, counts = torch.einsum("nk,knd->nd", r, g), r.sum(0)
    return [
        (ModeTerms(r[:, k], r[:, k, None] * (g[k] - mean), x - cells.maps[k].m, s), cells.maps[k].L)
        for k in (counts >= counts.max().clamp_max(N_OF_MODE)).nonzero().flatten().tolist()
    ]


def shifts(terms: ModeTerms, directions: Tensor) -> tuple[Tensor, Tensor]:
    r"""Estimate the shift from the mean of the draws to the target's in directions w (d, k), and the standard errors.

    .. math:: \delta_w = E[r\, s_w + \partial_w r] \,/\, E[r\, s_w^2]

    By Stein's identity it is zero if the draws are from the density with these scores. If they are slightly shifted,
    it is the correction, a step of Fisher scoring.
    """
    s_w = terms.s @ directions
    t, information = terms.r[:, None] * s_w + terms.slope @ directions, (terms.r[:, None] * s_w.square()).mean(0)
    information = information.clamp_min(torch.finfo(t.dtype).tiny)
    return t.mean(0) / information, t.std(0) / information / math.sqrt(len(t))


def variances(terms: ModeTerms, directions: Tensor) -> tuple[Tensor, Tensor]:
    r"""Estimate Stein variances in directions w (d, k), and their standard errors.

    .. math:: -E[r\, x_w s_w] \,/\, E[\partial_w (r\, x_w)]

    By Stein's identity it is one if the draws are from the density with these scores, even where modes overlap. For
    separated modes it is the squared scale of the mode.
    """
    x_w, r = terms.gap @ directions, terms.r[:, None]
    slope, flux = r * directions.square().sum(0) + terms.slope @ directions * x_w, r * x_w * (terms.s @ directions)
    v = -flux.mean(0) / slope.mean(0)
    return v, (flux + v * slope).std(0) / slope.mean(0).abs() / math.sqrt(len(r))


def stein_moments(x: Tensor, s: Tensor, cells: Cells) -> SteinMoments:
    """Estimate moments of each mode in whitened coordinates, along each of x and in two directions that stand out.

    The two are the direction of the mean score, and the direction in which the Stein variance is farthest from one.
    They are chosen with one half of the draws and evaluated with the other, so that the choice adds no bias.
    """
    parts = []
    for terms, L in terms_of(x, s, cells):
        u = terms.turned(L)
        rows = (L / torch.linalg.vector_norm(L, dim=1, keepdim=True)).mT  # x_i rises by its sd along column i
        first, second = u.halves()
        t = first.r[:, None] * first.s + first.slope
        found = most_contradicting(first.gap, t, first.r.mean())
        pairs = [pair for f in (shifts, variances) for pair in zip(f(u, rows), f(second, found), strict=True)]
        nearest = torch.cat([torch.arange(len(L), device=x.device), (rows.mT @ found).abs().argmax(0)])
        parts.append((*map(torch.cat, pairs), nearest))
    shift, shift_se, variance, variance_se, nearest = map(torch.stack, zip(*parts, strict=True))
    tiny = torch.finfo(x.dtype).tiny
    farthest = (shift.abs() - N_SE * shift_se).argmax(0, keepdim=True)
    worst = ((variance - 1).abs() / variance_se.clamp_min(tiny)).argmax(0, keepdim=True)
    of_shift, of_variance = (shift, shift_se), (variance, variance_se)
    return SteinMoments(
        *(a.gather(0, farthest)[0] for a in of_shift),
        *(a.gather(0, worst)[0] for a in of_variance),
        *(nearest.gather(0, k)[0] for k in (farthest, worst)),
    )


def check_means(view: View, moments: SteinMoments) -> Check:
    """Check the means by Stein's identity E[s] = 0."""
    excess = moments.shift.abs() - N_SE * moments.shift_se
    i = int(excess.argmax())
    value, label = moments.shift[i].item(), view.score.label(int(moments.shift_along[i]))
    text = f"off by {abs(value):.2f} sd, most in {label}, standard error {moments.shift_se[i]:.1g}"
    todo = view.correction("whiten", "max_iter", "n_warmup")
    remedy = f"The mean of the target is {abs(value):.2f} sd from the mean of the draws, most in {label}: {todo}."
    return judged("Stein means", abs(value), text, remedy if excess[i] > THRESHOLDS.mean else None)


def check_variances(view: View, moments: SteinMoments) -> Check:
    """Check the widths by Stein's identity."""
    low, high = STEIN_VARIANCES
    v, se = moments.variance, moments.variance_se
    excess = torch.maximum(low - v, v - high) / se.clamp_min(1e-300)
    i = int(excess.argmax())
    value, text = v[i].item(), f"{v.min():.2f} to {v.max():.2f}, errors {se.max():.2g}"
    remedy = None
    if excess[i] > N_SE:
        way, todo = "narrow" if value < low else "wide", view.correction("whiten", "max_iter", "n_warmup")
        remedy = f"The draws are too {way}, most in {view.score.label(int(moments.variance_along[i]))}: {todo}."
    if (v + N_SE * se < 0).any():
        remedy = "The score has the wrong sign: it is the gradient of log p, not of -log p."
    if remedy is None and se.max() > MAX_ERROR:
        raise ValueError(f"their standard errors are up to {se.max():.2g}, as with tails that are too heavy")
    return judged("Stein variances", value, text, remedy)
