"""KSIVI, HKSIVI and what trained approximators share."""

from skksivi.estimators._hksivi import HKSIVIApproximator
from skksivi.estimators._ksivi import KSIVIApproximator
from skksivi.estimators._start import answers_at, as_fitted
from skksivi.estimators._trained import Trained, Whitened, langevin_scale, temperature

__all__ = [
    "HKSIVIApproximator", "KSIVIApproximator", "Trained", "Whitened", "answers_at", "as_fitted", "langevin_scale",
    "temperature",
]  # fmt: skip
