"""Other methods behind the same fit, sample and score."""

from skksivi.baselines._gaussian import Laplace

__all__ = ["Laplace"]
