"""What lies farther out than the draws: by weighted draws, and by chains that start at them and leave the target
invariant.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import kolmogorov
from scipy.stats import betabinom, norm
from torch import Tensor

from skksivi._utils.arrays import as_array
from skksivi.coordinates._affine import Affine
from skksivi.diagnostics._geometry import RUN_AWAY, Geometry, middle
from skksivi.diagnostics._report import Check
from skksivi.diagnostics._view import View, judged
from skksivi.families._weights import ImportanceSample
from skksivi.judge._numbers import WeightedRows
from skksivi.judge._thresholds import THRESHOLDS
from skksivi.pilot._mixture import gaussian_of
from skksivi.pilot._mode_weights import Cells
from skksivi.stein._directions import N_SCORES, first_difference

#: The share of the draws that count as farthest out, and the accepted share of chains that end beyond the others.
FARTHEST, MAX_BEYOND = 0.001, 0.01

#: Largest accepted distance of distribution functions, which a shift by 0.38 standard deviations has.
MAX_DISTANCE = 0.15

#: Draws, at least and for each feature, and features, at most, where directions other than coordinates are tried.
LEAST_DRAWS, LEAST_OF_EACH, MAX_FEATURES = 400, 10, 1000

#: The most positions of draws of a fit that are compared with weighted draws, in all directions.
MAX_HEIGHTS = 2**23

#: The p-value, over all directions, below which a difference is significant.
MAX_PVALUE = 0.01


class LargestDifference(NamedTuple):
    """The largest difference of ends and draws over directions, its Bonferroni p-value, and the direction."""

    value: float
    pvalue: float
    direction: int


def heights(cells: Cells, x: Tensor) -> Tensor:
    """Return the positions of points x (n, d) in their cell: distance from its centre, coordinates, principal axes.

    Shape (n, 1 + 2 d), in units of the cell; the axes are the principal ones of its correlation.
    """
    cell, found = cells.assign(x), x.new_empty(len(x), 1 + 2 * x.shape[1])
    for k, a in enumerate(cells.maps):
        inside, (U, scales, sd) = x[cell == k], principal_axes(a)
        z = (inside - a.m) / sd
        radius = torch.linalg.vector_norm(a.whiten(inside), dim=1, keepdim=True)
        found[cell == k] = torch.cat([radius, z, z @ U / scales], 1)
    return found


def principal_axes(a: Affine) -> tuple[Tensor, Tensor, Tensor]:
    """Return the principal axes (d, d) of the correlation of a cell, in columns, scales along them, and its sds."""
    sd = torch.linalg.vector_norm(a.L, dim=1)
    U, scales, _ = torch.linalg.svd(a.L / sd[:, None])
    return U, scales, sd


def ends_beyond(draws: Tensor, ends: Tensor) -> LargestDifference:
    r"""Find the direction in which the ends (t, m, k) of m chains, at t times, exceed the draws (n, k) most.

    If the draws are right, the number of ends beyond the r-th farthest draw is beta-binomial at any time: a count of
    m further draws with the probability :math:`\mathrm{Beta}(r, n + 1 - r)`. The mean over times varies
    less.
    """
    n, m, r = len(draws), ends.shape[1], max(1, round(FARTHEST * len(draws)))
    beyond = (ends > draws.topk(r, dim=0).values[-1]).double().sum(1).mean(0)
    most = beyond.max().item()
    pvalue = draws.shape[1] * float(betabinom.sf(math.floor(most) - 1, m, r, n + 1 - r))
    return LargestDifference(most / m, min(1.0, pvalue), int(beyond.argmax()))


def ends_apart(draws: Tensor, ends: Tensor) -> LargestDifference:
    """Find the direction in which the ends (t, m, k) of m chains, at t times, are farthest from the draws (n, k).

    The distance is Kolmogorov's. The p-value holds for the ends at one time; the mean over times varies less.

    References
    ----------
    Smirnov, N. (1948). Table for estimating the goodness of fit of empirical distributions. Annals of Mathematical
    Statistics 19(2).
    """
    n, (t, m, _) = len(draws), ends.shape
    steps = torch.cat([draws.new_full((n,), 1 / n), draws.new_full((t * m,), -1 / (t * m))])
    distances = steps[torch.cat([draws, ends.flatten(0, 1)]).argsort(0)].cumsum(0).abs().amax(0)
    largest = distances.max().item()
    pvalue = draws.shape[1] * float(kolmogorov(math.sqrt(n * m / (n + m)) * largest))
    return LargestDifference(largest, min(1.0, pvalue), int(distances.argmax()))


def mass_beyond(draws: Tensor, at_rows: Tensor, rows: WeightedRows) -> LargestDifference:
    """Find the direction in which most of the target's mass lies beyond the farthest of the draws (n, k), by weighted
    rows (m, k), beyond its standard errors.
    """
    limits = draws.topk(max(1, round(FARTHEST * len(draws))), dim=0).values[-1]
    share, se = rows.means(*(as_array((h > limits).double()) for h in (at_rows, draws)))
    z = (share - FARTHEST) / np.maximum(se, np.finfo(np.float64).tiny)
    k = int(
        np.where(share > THRESHOLDS.beyond, z, -np.inf).argmax()
        if (share > THRESHOLDS.beyond).any()
        else share.argmax()
    )
    return LargestDifference(float(share[k]), min(1.0, draws.shape[1] * float(norm.sf(z[k]))), k)


def check_chains(view: View, geometry: Geometry, sample: ImportanceSample | None) -> tuple[Check, Check]:
    """Check the tails by weighted draws, where these are reliable, and the tails and the shape by chains."""
    x, late = view.x[view.finite], geometry.ends.flatten(0, 1)
    cells = geometry.cells.refined(torch.cat([x, late]), middle)  # a fit to the draws alone would suit only them
    weighted = None if sample is None or not sample.trusted else _weighted_tails(view, cells, sample)
    if not len(geometry.ends):
        missing = Check("tails", math.nan, "", f"not available: {RUN_AWAY}")
        return weighted or missing, missing._replace(name="shape")
    draws, ends = heights(cells, x), heights(cells, late).view(*geometry.ends.shape[:2], -1)
    tails = _tails(view, cells, ends_beyond(_sides(draws), _sides(ends)), "of chains end", MAX_BEYOND)
    if weighted is not None and weighted.remedy:
        tails = weighted
    shape = _shape(view, cells, ends_apart(draws, ends))
    return tails, shape if shape.remedy else _along_direction(view, x) or shape


def _weighted_tails(view: View, cells: Cells, sample: ImportanceSample) -> Check:
    """Estimate the mass that lies farther out than the draws."""
    some = sample.draws[: MAX_HEIGHTS // (4 * view.x.shape[1] + 1)]
    draws, at_rows = (_sides(heights(cells, torch.as_tensor(X).to(view.x))) for X in (some, sample.X))
    beyond = mass_beyond(draws, at_rows, sample.rows)
    return _tails(view, cells, beyond, "of the mass, by weights, lies", THRESHOLDS.beyond)


def _sides(h: Tensor) -> Tensor:
    """Return heights (..., k) on both sides of all directions but the distance, which is the first."""
    return torch.cat([h, -h[..., 1:]], -1)


def _tails(view: View, cells: Cells, beyond: LargestDifference, what: str, most: float) -> Check:
    """Check how much lies farther out than the draws."""
    share, pvalue, k = beyond
    d = view.x.shape[1]
    where = _in_words(view, cells, k) if k <= 2 * d else f"{_in_words(view, cells, k - 2 * d)}, below"
    text = f"{share:.1%} {what} beyond {1 - FARTHEST:.1%} of the draws {where}, p = {pvalue:.2g}"
    todo = view.correction("whiten", "mixing", "max_iter", "n_warmup")
    remedy = f"The target has tails that the fit lacks, {where}: {todo}."
    return judged("tails", share, text, remedy if share > most and pvalue < MAX_PVALUE else None)


def _shape(view: View, cells: Cells, apart: LargestDifference) -> Check:
    """Compare the distributions of the draws and of the ends of chains."""
    distance, pvalue, k = apart
    where = _in_words(view, cells, k)
    text = f"chains end up to {distance:.2f} apart {where}, p = {pvalue:.2g}"
    todo = view.correction("whiten", "mixing", "max_iter", "n_warmup")
    remedy = f"Chains that start at the draws leave their distribution {where}: {todo}."
    return judged("shape", distance, text, remedy if distance > MAX_DISTANCE and pvalue < MAX_PVALUE else None)


def _along_direction(view: View, x: Tensor) -> Check | None:
    """Look for a direction along which Gibbs steps move draws x (n, d), as chains may be too short to do."""
    n, d = x.shape
    if n < max(LEAST_DRAWS, LEAST_OF_EACH * d) or d > MAX_FEATURES:  # fewer are whitened too well by themselves
        return None
    map_ = gaussian_of(x)
    u = map_.whiten(x)
    found = first_difference(map_.pull_back(view.score), u[:N_SCORES], lambda: (u, x))
    if found is None:
        return None
    words, todo = found.words(view.score.label), view.correction("whiten", "mixing", "max_iter", "n_warmup")
    return judged(
        "shape",
        float(found.step.range),
        f"a Gibbs step along a direction changes the 99.8% range by {found.step.range:.2g} times",
        f"The draws are wrong along {words}: {todo}.",
    )


def _in_words(view: View, cells: Cells, direction: int) -> str:
    """Say which of the directions of `heights` it is, a principal axis of a single mode by its largest loadings."""
    axis, i = divmod(direction - 1, view.x.shape[1])
    if not direction:
        return "in the distance from the centre"
    if not axis:
        return f"in {view.score.label(i)}"
    if len(cells.maps) > 1:
        return f"along principal axis {i}"
    v = principal_axes(cells.maps[0])[0][:, i]
    largest = v.abs().argsort(descending=True)[:3].tolist()
    return f"along principal axis {i} ({', '.join(f'{v[j]:+.2f} {view.score.label(j)}' for j in largest)})"
