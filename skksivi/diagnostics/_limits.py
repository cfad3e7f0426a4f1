"""The limits of the checks that the figure also shows."""

from __future__ import annotations

import numpy as np

#: The quantile of the chains' scores beyond which a draw is an outlier.
OUTLIER = 0.999

#: Bounds of Stein variances.
STEIN_VARIANCES = (0.8, 1.25)


def outlier_limit(norms: np.ndarray) -> float:
    """Return the length of a whitened score beyond which a draw is an outlier, given lengths from chains (m,)."""
    return float(np.quantile(norms, OUTLIER))
