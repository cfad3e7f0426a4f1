"""The log-density of a target, its own or by integrals of its score from a mode."""

from __future__ import annotations

import torch
from torch import Tensor

from skksivi.coordinates._affine import Affine
from skksivi.coordinates._lines import log_ratio
from skksivi.pilot._modes import MODES, find_modes, scattered
from skksivi.pilot._newton import laplace
from skksivi.score._score import Score

#: Lines along which the score is integrated at a time.
N_INTEGRALS = 500


def judging_map(score_fn: Score) -> Affine:
    """Return the map to a mode that depends on the target alone."""
    origin = torch.zeros(score_fn.n_features, dtype=torch.float64, device=score_fn.device)
    try:
        return laplace(score_fn, origin)[0]
    except ValueError:
        generator = torch.Generator(score_fn.device).manual_seed(0)
        return find_modes(score_fn, scattered(origin, MODES.max_starts, generator), generator).maps[0]


def origin_of(score_fn: Score) -> Affine | None:
    """Return the map to the mode where p is set to one, if only its score is known."""
    return None if score_fn.log_prob is not None else judging_map(score_fn)


def log_density(score_fn: Score, origin: Affine | None, x: Tensor) -> Tensor:
    """Return log p (n,) at points x (n, d): the target's own, or integrals of the score from an origin.

    Raises
    ------
    ValueError
        Neither is available.
    """
    if origin is None:
        if score_fn.log_prob is None:
            raise ValueError("The target has no `log_prob`, which is needed here.")
        return score_fn.log_prob(x)
    score_u, u = origin.pull_back(score_fn), origin.whiten(x)
    return torch.cat([log_ratio(score_u, torch.zeros_like(origin.m), part) for part in u.split(N_INTEGRALS)])
