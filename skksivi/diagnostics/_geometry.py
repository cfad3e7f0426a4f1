"""Where the modes are, how many draws are in each and how many are outliers."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from skksivi._arrays import as_array
from skksivi._modes import Modes, run_chains, weigh
from skksivi.diagnostics._limits import outlier_limit
from skksivi.diagnostics._report import Check
from skksivi.diagnostics._view import N_SE, REFUSALS, View, judged
from skksivi.pilot._affine import Affine
from skksivi.pilot._chains import covariance_root
from skksivi.pilot._masses import Cells
from skksivi.pilot._modes import MODES, around, find_modes
from skksivi.score._score import Score
from skksivi.stein._discrepancy import stein_variances

#: Draws from which chains start, up to 50 features, and the fewest; numbers in them, beyond, and in the chains of all
#: modes, 50 of each, where their weights are compared.
N_MOVED, N_FEWEST, N_NUMBERS, N_COMPARED = 500, 100, 25_000, 50_000

#: The share of draws that may be outliers.
MAX_OUTLIERS = 0.01

#: Draws, and points around all of them, from which modes are searched, fewer in many dimensions, and the most
#: features with which they are.
N_STARTS, N_AROUND, MAX_SEARCHED = 100, 40, 200

#: Steps of such a search: one that has a mode to find takes a few.
N_STEPS = 25

#: The share of a mode, by the curvature there, from which its lack of draws matters.
MIN_LOST = 0.01

#: Draws of a mode from which its width is judged.
N_OF_MODE = 50

#: The quantile of the draws' distances from their mode beyond which chains are counted, and the share of chains that
#: may end there; where the draws are right it is one less the quantile.
FARTHEST, MAX_BEYOND = 0.999, 0.02

#: The share of draws that may lie in a wrong mode.
MAX_MISPLACED = 0.05


class Geometry(NamedTuple):
    """The cells of the modes, that of each draw (n,), modes without draws (k, d), lengths of whitened scores (n,) and
    of chains' (m,), and the share of chains that end farther out than all but one in a thousand of the draws.
    """

    cells: Cells
    cell: Tensor
    lost: Tensor
    norms: Tensor
    reference: Tensor
    beyond: float


def geometry_and_modes(view: View) -> tuple[Geometry, Check]:
    """Find the modes near the draws, weigh them, and run chains in them."""
    x = view.x[view.finite]
    whole = Affine(x.mean(0), covariance_root(x))
    cells, lost = Cells([whole], x.new_zeros(1)), (x[:0], x.new_zeros(0))
    try:
        cells, lost = _find_cells(view, whole)
        check = _check_modes(view, cells, lost)
    except REFUSALS as reason:
        check = Check("modes", math.nan, "", f"not available: {reason}")
    return _geometry(view, cells, lost[0]), check


def _find_cells(view: View, whole: Affine) -> tuple[Cells, tuple[Tensor, Tensor]]:
    """Return the cells of modes that have draws, and the centres (k, d) and shares (k,) of those that have none."""
    x, d = view.x[view.finite], view.x.shape[1]
    if d > MAX_SEARCHED:
        raise ValueError(f"there are {d} features, and modes are searched up to {MAX_SEARCHED}")
    n_drawn, n_around = (min(n, MODES.max_in_starts // d) for n in (N_STARTS, N_AROUND))
    starts = torch.cat([x[:n_drawn], around(whole, n_around, view.generator)])
    found = find_modes(view.score, starts, view.generator, n_steps=N_STEPS)
    cells = Cells(found.maps, found.weights.log())
    counts = cells.counts(x)
    empty = (counts == 0) & (found.weights > MIN_LOST)
    centres = torch.stack([a.m for a in found.maps])
    return cells.sorted_by(counts.nonzero().flatten()), (centres[empty], found.weights[empty])


def _check_modes(view: View, cells: Cells, lost: tuple[Tensor, Tensor]) -> Check:
    """Compare the shares of modes with their weights."""
    centres, shares = lost
    if len(centres):
        where = np.array2string(as_array(centres[0])[:5], precision=2)
        text = f"{len(centres)} of {len(centres) + len(cells.maps)} without draws, of share {shares.sum():.0%}"
        remedy = f"No draw is in the mode at {where}: {view.advice('whiten', 'init')}."
        return judged("modes", shares.sum().item(), text, remedy)
    if len(cells.maps) == 1:
        return judged("modes", 0.0, "1", None)
    x, d = view.x[view.finite], view.x.shape[1]
    x, most = x[: max(N_FEWEST, N_NUMBERS // d)], N_COMPARED // (50 * d)
    if len(cells.maps) > max(2, most):
        raise ValueError(f"there are {len(cells.maps)} modes, and the weights of {most} are compared in {d} features")
    found, _, _ = weigh(view.score, x, cells.sorted_by(cells.counts(x).nonzero().flatten()), view.generator)
    if not found.trusted:
        raise ValueError(f"the weights of {len(found.weights)} modes are not to be trusted, {found.reason}")
    return judged(*_misplaced(found, len(x)))


def _misplaced(found: Modes, n: int) -> tuple[str, float, str, str | None]:
    """Judge the weights of modes by n draws."""
    gaps = found.shares - found.weights
    misplaced = float(np.abs(gaps).sum() / 2)
    noise = np.sqrt(found.standard_errors**2 + found.weights * (1 - found.weights) / n)
    wrong = misplaced > MAX_MISPLACED and (np.abs(gaps) > N_SE * noise).any()
    k = int(np.abs(gaps).argmax())
    remedy = (
        f"The mode at {np.array2string(found.centres[k][:5], precision=2)} has {found.shares[k]:.0%} of the draws, "
        f"where its weight is {found.weights[k]:.0%}: modes(est, target, reweight=True) corrects that."
    )
    text = f"{len(gaps)}, {misplaced:.1%} of the draws in a wrong one"
    return "modes", misplaced, text, remedy if wrong else None


def _geometry(view: View, cells: Cells, lost: Tensor) -> Geometry:
    """Measure whitened scores at the draws and where chains have moved some of them."""
    x = view.x[view.finite]
    cells = cells.refined(x)
    norms = view.x.new_full((len(view.x),), math.inf)
    norms[view.finite] = _whitened_norms(cells, cells.assign(x), view.s[view.finite])
    n_moved = max(N_FEWEST, min(N_MOVED, N_NUMBERS // x.shape[1]))
    try:
        chains = _moved(view.score, x[:n_moved], cells, view.generator)
        y = torch.cat([part.flatten(0, 1) for part in chains])
        s = view.score(y)
        at_home = stein_variances(y, s)[0].mean() > 0  # else they have run away
        reference = _whitened_norms(cells, cells.assign(y), s)[: len(y) if at_home else 0]
        ends = _distances(cells, torch.cat([part[-1] for part in chains]))
        limits = _distances(cells, x).quantile(FARTHEST, dim=1, keepdim=True)
        beyond = (ends > limits).double().mean(1).max().item()
    except REFUSALS:
        reference, beyond = x.new_empty(0), math.nan
    return Geometry(cells, cells.assign(view.x), lost, norms, reference, beyond)


def _moved(score: Score, x: Tensor, cells: Cells, generator: torch.Generator) -> list[Tensor]:
    """Return the states (n_kept, n, d) of Metropolis chains from the draws x (n, d) of each cell, with its map."""
    cell = cells.assign(x)
    return [run_chains(score, x[cell == k], cells.maps[k], generator) for k in cell.unique().tolist()]


def _distances(cells: Cells, x: Tensor) -> Tensor:
    """Return distances (2, n) of points from the centre of their cell, in its units and in sds of a coordinate."""
    cell, rows = cells.assign(x), torch.arange(len(x), device=x.device)
    whole = torch.stack([torch.linalg.vector_norm(a.whiten(x), dim=1) for a in cells.maps])
    single = torch.stack([((x - a.m).abs() / torch.linalg.vector_norm(a.L, dim=1)).amax(1) for a in cells.maps])
    return torch.stack([whole[cell, rows], single[cell, rows]])


def _whitened_norms(cells: Cells, cell: Tensor, s: Tensor) -> Tensor:
    """Return the lengths (n,) of scores s (n, d) whitened by the maps of their cells."""
    norms = s.new_empty(len(s))
    for k, a in enumerate(cells.maps):
        norms[cell == k] = torch.linalg.vector_norm(a.whiten_score(s[cell == k]), dim=1)
    return norms


def variances_within(x: Tensor, s: Tensor, cells: Cells) -> tuple[Tensor, Tensor]:
    r"""Estimate the Stein variance (d,) of each coordinate in its worst mode, and its standard error.

    With the shares :math:`r_k` that the Gaussian of mode k has of the mixture of all, and any centre m, it is

    .. math:: -E[r_k s_i (x_i - m_i)] \,/\, E\left[\partial_i \left(r_k (x_i - m_i)\right)\right].

    By Stein's identity it is one where the draws x (n, d) are those of the density of their scores s, wherever modes
    overlap; where they are apart it is the square of the scale of the mode.
    """
    r = cells.log_shares(x).softmax(1)
    g = torch.stack([torch.linalg.solve_triangular(a.L.mT, -a.whiten(x).mT, upper=True).mT for a in cells.maps])
    mean = torch.einsum("nk,knd->nd", r, g)
    variances, errors = [], []
    counts = r.sum(0)
    for k in (counts >= counts.max().clamp_max(N_OF_MODE)).nonzero().flatten().tolist():
        gap, share = x - cells.maps[k].m, r[:, k, None]
        slope = share * (1 + (g[k] - mean) * gap)
        v = -(share * gap * s).mean(0) / slope.mean(0)
        variances.append(v)
        errors.append((share * gap * s + v * slope).std(0) / slope.mean(0).abs() / math.sqrt(len(x)))
    v, se = torch.stack(variances), torch.stack(errors)
    worst = ((v - 1).abs() / se.clamp_min(torch.finfo(se.dtype).tiny)).argmax(0, keepdim=True)
    return v.gather(0, worst)[0], se.gather(0, worst)[0]


def check_outliers(view: View, geometry: Geometry) -> Check:
    """Count the draws whose scores are longer than those of the target."""
    if not len(geometry.reference):
        raise ValueError("chains that start at the draws run away, as from a score of the wrong sign")
    limit = outlier_limit(as_array(geometry.reference))
    share = (geometry.norms > limit).double().mean().item()
    text = f"{share:.1%} with whitened scores longer than {limit:.3g}"
    remedy = (
        f"Draws lie where the target has hardly any mass: {view.advice('whiten', 'mixing', 'max_iter', 'n_warmup')}."
    )
    return judged("outliers", share, text, remedy if share > MAX_OUTLIERS else None)


def check_tails(view: View, geometry: Geometry) -> Check:
    """Count the chains that end farther out than the draws lie."""
    if not len(geometry.reference):
        raise ValueError("chains that start at the draws run away, as from a score of the wrong sign")
    text = f"{geometry.beyond:.1%} of chains end farther out than {FARTHEST:.1%} of the draws"
    remedy = f"The target has tails that the fit has not: {view.advice('whiten', 'mixing', 'max_iter', 'n_warmup')}."
    return judged("tails", geometry.beyond, text, remedy if geometry.beyond > MAX_BEYOND else None)
