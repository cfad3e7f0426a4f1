r"""What scales the others where the search for a mode ends in a spike.

In the centred form of a hierarchy the density has no bound: as the scale of a group goes to zero, its members come
together. The mass is elsewhere, and is found by the profile along the logarithm of that scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skksivi.coordinates._affine import Affine, WhitenedScore
from skksivi.pilot._newton import NEWTON, is_spike, search_modes
from skksivi.pilot._points import PilotPoints
from skksivi.pilot._profile import Conditionals, by_profile
from skksivi.score._score import DifferentiableScore, Score

#: Scales that may lead into a spike, at most.
MAX_SCALERS = 3


def out_of_spike(score_fn: Score, mode: Affine, start: Tensor, generator: torch.Generator) -> PilotPoints | None:
    """Return points by the profile along all that leads into a spike from a start (d,); None where that has no end.

    Parameters
    ----------
    score_fn : Score
    mode : Affine
        Where the search for a mode ended.
    start : Tensor of shape (d,)
        Where it started.
    generator : torch.Generator
    """
    metric, directions, Q, score_w = Affine.shift(start), list[Tensor](), torch.eye(len(start)).to(start), score_fn
    for _ in range(MAX_SCALERS):
        directions.append(Q @ what_scales(score_w, mode))
        given = Conditionals.given(score_fn, metric, torch.stack(directions, 1))
        Q, score_w = given.Q, WhitenedScore(score_fn, given.plane(start.new_zeros(len(directions))))
        maps, _ = search_modes(score_w, start.new_zeros(1, Q.shape[1]), NEWTON.max_steps)
        if not maps:
            return None
        mode = maps[0]
        if not is_spike(mode):
            return by_profile(given, generator)
    return None


def what_scales(score_fn: DifferentiableScore, spike: Affine) -> Tensor:
    """Return the direction (d,), of those without curvature, in which the largest curvature at a spike grows."""
    variances, V = torch.linalg.eigh(spike.L @ spike.L.mT)
    flat, steepest = V[:, variances > variances[-1] / 10], V[:, 0]
    x = torch.cat([spike.m[None], spike.m + variances[-1].sqrt() * flat.mT])
    v = steepest.expand(len(x), -1).clone()
    curvature = -(score_fn.product(x, v) * v).sum(1)
    a = flat @ (curvature[1:] / curvature[0]).log()
    return a / a.norm()
