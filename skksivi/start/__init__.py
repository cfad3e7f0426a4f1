"""Where a fit starts: a mixture of Gaussians near its target, in coordinates that are found with it."""

from skksivi.start._find import find_whitening

__all__ = ["find_whitening"]
