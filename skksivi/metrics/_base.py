"""What metrics share: two samples that fit together, and means over pairs of rows, a block at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils import check_array

from skksivi._utils.arrays import without_graph


def check_pair(X: ArrayLike, Y: ArrayLike, *, min_samples: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return two samples as finite float64 arrays with the same number of columns."""
    X = check_array(without_graph(X), dtype=np.float64, ensure_min_samples=min_samples, input_name="X")
    Y = check_array(without_graph(Y), dtype=np.float64, ensure_min_samples=min_samples, input_name="Y")
    if X.shape[1] != Y.shape[1]:
        raise ValueError(f"`X` has {X.shape[1]} columns and `Y` has {Y.shape[1]}; they must agree.")
    return X, Y


def check_statistic(statistic: str) -> None:
    """Raise unless `statistic` names a mean over pairs."""
    if statistic not in ("u", "v"):
        raise ValueError(f"`statistic` must be 'u' or 'v', got {statistic!r}.")
