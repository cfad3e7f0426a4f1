"""Kernel semi-implicit variational inference: a fast sampler for a posterior known through its score.

What is named here is imported when it is first used.
"""

from typing import TYPE_CHECKING

from skksivi._utils.lazy import lazy
from skksivi._version import __version__

if TYPE_CHECKING:
    from skksivi import (
        amortized,
        annealing,
        baselines,
        calibration,
        callbacks,
        datasets,
        kernels,
        metrics,
        mixing,
        model_selection,
        parameters,
        plotting,
        targets,
        terms,
    )
    from skksivi._paper import paper_settings
    from skksivi.amortized import AmortizedKSIVI
    from skksivi.diagnostics import diagnose
    from skksivi.estimators._hksivi import HKSIVIApproximator
    from skksivi.estimators._ksivi import KSIVIApproximator
    from skksivi.export import to_arviz
    from skksivi.inference._ensemble import ensemble
    from skksivi.inference._expectation import expectation
    from skksivi.inference._importance import certificate, evidence, importance_sample, refine
    from skksivi.inference._modes import modes
    from skksivi.inference._summary import summary
    from skksivi.persistence import load, save
    from skksivi.predictors import KSIVIClassifier, KSIVIRegressor

__all__ = [
    "AmortizedKSIVI",
    "HKSIVIApproximator",
    "KSIVIApproximator",
    "KSIVIClassifier",
    "KSIVIRegressor",
    "__version__",
    "amortized",
    "annealing",
    "baselines",
    "calibration",
    "callbacks",
    "certificate",
    "datasets",
    "diagnose",
    "ensemble",
    "evidence",
    "expectation",
    "importance_sample",
    "kernels",
    "load",
    "metrics",
    "mixing",
    "model_selection",
    "modes",
    "paper_settings",
    "parameters",
    "plotting",
    "refine",
    "save",
    "summary",
    "targets",
    "terms",
    "to_arviz",
]

if not TYPE_CHECKING:  # a checker would take any name for one of these
    __dir__ = __all__.copy
    __getattr__ = lazy(
        __name__,
        {
            "estimators._hksivi": ["HKSIVIApproximator"],
            "estimators._ksivi": ["KSIVIApproximator"],
            "inference._ensemble": ["ensemble"],
            "inference._expectation": ["expectation"],
            "inference._importance": ["certificate", "evidence", "importance_sample", "refine"],
            "inference._modes": ["modes"],
            "inference._summary": ["summary"],
            "_paper": ["paper_settings"],
            "amortized": ["AmortizedKSIVI"],
            "diagnostics": ["diagnose"],
            "export": ["to_arviz"],
            "persistence": ["load", "save"],
            "predictors": ["KSIVIClassifier", "KSIVIRegressor"],
        },
    )
