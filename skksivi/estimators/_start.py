"""The start of a training."""

from __future__ import annotations

from typing import Generic, NamedTuple

import numpy as np
import torch

from skksivi.coordinates._affine import Affine
from skksivi.estimators._trained import F
from skksivi.pilot._whitening import Whitening
from skksivi.stein._path import Memory
from skksivi.training._guard import MomentPenalty

#: How far coordinates are moved to the target at most: in standard deviations, and the factor of scale.
MAX_SHIFT, MAX_RATIO = 5.0, 100.0


class Start(NamedTuple, Generic[F]):
    """The start of a training: coordinates, a family in them, the penalty that ties it to a pilot, the seed of its
    noise, a checksum of the score's values there, and the draws that it keeps.
    """

    whitening: Whitening
    family: F
    penalty: MomentPenalty | None
    seed: int
    answers: str
    memory: Memory | None = None


def untrained() -> dict[str, object]:
    """Return the report on a fit that draws from its start."""
    return {
        "loss_curve_": np.empty(0),
        "ksd_curve_": np.empty((0, 2)),
        "engine_": "eager",
        "n_iter_": 0,
        "best_iter_": 0,
        "certificate_": None,
    }


def is_close(found: Affine, start: Affine) -> bool:
    """Tell whether one Gaussian is as near to another as a start should be to its target."""
    shift = start.whiten(found.m[None])
    scales = torch.linalg.svdvals(torch.linalg.solve_triangular(start.L, found.L, upper=False))
    return bool(shift.square().mean() < MAX_SHIFT**2 and scales.max() < MAX_RATIO and scales.min() > 1 / MAX_RATIO)
