"""Points near a target in coordinates that are warped, where chains converge."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from skksivi.coordinates._affine import Affine
from skksivi.coordinates._warp import Warp
from skksivi.coordinates._warp_fit import fitted_warp, reshaped
from skksivi.judge import THRESHOLDS, Grade
from skksivi.pilot._chains import N_OF_GAUSSIAN, ChainEnsemble
from skksivi.pilot._importance import PLAIN, BatchedDraws, pilot_of_mixture, refined_pilot
from skksivi.pilot._mixture import gaussian_of
from skksivi.pilot._points import MANY_FEATURES, PilotPoints
from skksivi.pilot._profile import profiled
from skksivi.score._score import Score
from skksivi.score._tally import DIVERGED

#: The stages of chains in warped coordinates.
STAGES = (40, 80)


def around_start(score_fn: Score, start: Tensor, generator: torch.Generator) -> Tensor:
    """Return points (n, d) of chains around a start (d,), in units of the parameters; none if the chains diverge."""
    try:
        *_, found = ChainEnsemble(score_fn, Affine.shift(start), generator).by_stages(STAGES)
    except DIVERGED:
        return start[None, :][:0]
    return found.x


def by_scales(score_fn: Score, x: Tensor, generator: torch.Generator) -> PilotPoints | None:
    """Return points by the profile along coordinates that scale others, if points x (n, d) show some and are not as
    those.
    """
    warp = fitted_warp(x)
    if warp is None or not warp.scalers:
        return None
    return profiled(score_fn, x, warp.scalers, generator, known=True)


def warped(score_fn: Score, x: Tensor, generator: torch.Generator) -> Iterator[PilotPoints]:
    """Yield points in coordinates that are fitted to points x (n, d), if chains converge there.

    Chains in these coordinates reach further than the points, so the coordinates are fitted again until nothing
    moves.
    """
    has_many = x.shape[1] >= MANY_FEATURES
    stages, most = (40, 80, 160) if has_many else STAGES, THRESHOLDS.moved[has_many]
    was_profiled = False
    try:
        for _ in range(4):
            score_fn.tally.begin("warped coordinates")
            warp = fitted_warp(x)
            if warp is None:
                return
            if warp.scalers and not (was_profiled or has_many):  # of many the profile is no more than a start
                was_profiled = True
                if (better := profiled(score_fn, x, warp.scalers, generator)) is not None:
                    yield better
                    return
            score_y, y = warp.pull_back(score_fn), warp.warp(x)[0]
            metric, moved = gaussian_of(y), math.inf
            refine = partial(_refined_along, score_y, warp.drivers, generator) if warp.drivers else None
            ensemble = ChainEnsemble(score_y, metric, generator, refine)
            for found in ensemble.by_stages(stages):
                u = metric.whiten(found.x)
                moved = min(moved, max(u.mean(0).abs().max().item(), u.std(0).log().abs().max().item()))
                if found.converged and moved < most and not _goes_astray(warp, found):
                    yield _finished(warp, found)
                    return
                if moved >= most and len(found.x) >= ensemble.n_chains * STAGES[0]:
                    break
            x = warp.unwarp(found.x)[0]
    except DIVERGED:
        return


def _finished(warp: Warp, found: PilotPoints) -> PilotPoints:
    """Return points with their coordinates, whose drivers have the tails of these points unless they are weighed."""
    if found.verdict.grade == Grade.RELIABLE_WEIGHTS:
        return found._replace(warp=warp)
    x = warp.unwarp(found.x)[0]
    shaped = reshaped(warp, x)
    return found._replace(x=shaped.warp(x)[0], mixture=None, warp=shaped)


def _refined_along(
    score_y: Score,
    drivers: list[int],
    generator: torch.Generator,
    metric: Affine,
    pilot: PilotPoints,
    drawn: list[BatchedDraws],
) -> PilotPoints:
    """Return a pilot with more points, searching along the drivers of coordinates where chains have not been."""
    plan = PLAIN._replace(least_rounds=6, forgets=True, keeps=False, along=metric.L[drivers], n_draws=1024)
    return refined_pilot(metric.pull_back(score_y), pilot, drawn, generator, plan)


def _goes_astray(warp: Warp, found: PilotPoints) -> bool:
    """Tell whether draws are far from all points in coordinates of the target, as if scales grew too fast."""
    draws = found.x if found.mixture is None else pilot_of_mixture(found.mixture, N_OF_GAUSSIAN).x
    x, y = warp.unwarp(found.x)[0], warp.unwarp(draws)[0]
    centre = x.median(0).values
    return not bool(((y - centre).abs().amax(0) < THRESHOLDS.astray * (x - centre).abs().amax(0)).all())
