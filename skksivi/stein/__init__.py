"""Estimators of the kernel Stein discrepancy, and the terms beside them."""

from skksivi.stein._discrepancy import finite_scores, mean_between, mean_within, stein_matrix, tiles, upper_blocks
from skksivi.stein._estimators import GRADIENT_ESTIMATORS, Memory, value_and_gradients, velocity

__all__ = [
    "GRADIENT_ESTIMATORS", "Memory", "finite_scores", "mean_between", "mean_within", "stein_matrix", "tiles",
    "upper_blocks", "value_and_gradients", "velocity",
]  # fmt: skip
