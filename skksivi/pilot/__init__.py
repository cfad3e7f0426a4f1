"""What is learned of a target before training: its modes, chains around them, coordinates."""

from skksivi.pilot._chains import clipped_drift
from skksivi.pilot._mixture import batch_and_match, score_divergence
from skksivi.pilot._newton import check_mode, laplace
from skksivi.pilot._pilot import find_whitening
from skksivi.pilot._points import PilotPoints

__all__ = [
    "PilotPoints", "batch_and_match", "check_mode", "clipped_drift", "find_whitening", "laplace", "score_divergence",
]  # fmt: skip
