"""Coordinates u in which a target is nearly N(0, I), by affine maps, warps and tails; integrals along lines."""

from skksivi.coordinates._affine import Affine
from skksivi.coordinates._lines import along_chord, checked_density, log_ratio
from skksivi.coordinates._whitening import Coordinates, Whitening, score_for_training, starting_points

__all__ = [
    "Affine", "Coordinates", "Whitening", "along_chord", "checked_density", "log_ratio", "score_for_training",
    "starting_points",
]  # fmt: skip
