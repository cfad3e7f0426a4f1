"""Fits in the containers of other libraries, and in files that need none."""

from skksivi.exports._arrays import export
from skksivi.exports._arviz import to_arviz

__all__ = ["export", "to_arviz"]
