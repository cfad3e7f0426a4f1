"""Kernel semi-implicit variational inference: a fast sampler for a posterior known through its score."""

from skksivi import (
    annealing,
    baselines,
    callbacks,
    datasets,
    kernels,
    metrics,
    mixing,
    model_selection,
    plotting,
    targets,
)
from skksivi._hksivi import HKSIVIApproximator
from skksivi._ksivi import KSIVIApproximator
from skksivi._modes import modes
from skksivi._version import __version__
from skksivi.diagnostics import diagnose
from skksivi.export import to_arviz
from skksivi.persistence import load, save
from skksivi.predictors import KSIVIClassifier, KSIVIRegressor

__all__ = [
    "HKSIVIApproximator",
    "KSIVIApproximator",
    "KSIVIClassifier",
    "KSIVIRegressor",
    "__version__",
    "annealing",
    "baselines",
    "callbacks",
    "datasets",
    "diagnose",
    "kernels",
    "load",
    "metrics",
    "mixing",
    "model_selection",
    "modes",
    "plotting",
    "save",
    "targets",
    "to_arviz",
]
