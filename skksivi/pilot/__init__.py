"""What a start is made of: modes, chains around them, mixtures fitted to points."""

from skksivi.pilot._chains import ChainState, LogRatio, clipped_drift, mala_step
from skksivi.pilot._mixture import batch_and_match, score_divergence
from skksivi.pilot._newton import check_mode, laplace
from skksivi.pilot._points import PilotPoints

__all__ = [
    "ChainState", "LogRatio", "PilotPoints", "batch_and_match", "check_mode", "clipped_drift", "laplace", "mala_step",
    "score_divergence",
]  # fmt: skip
