"""One report on a fit, from its draws and the score of its target."""

from skksivi.diagnostics._report import Check, Diagnosis, diagnose

__all__ = ["Check", "Diagnosis", "diagnose"]
