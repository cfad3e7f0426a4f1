"""One report on a fit, from its draws and the score of its target."""

from skksivi.diagnostics._diagnose import diagnose
from skksivi.diagnostics._report import Check, Diagnosis

__all__ = ["Check", "Diagnosis", "diagnose"]
