"""A fast sampler for a posterior known through its score: importance sampling and semi-implicit inference.

What is named here is imported when it is first used.
"""

from typing import TYPE_CHECKING

from skksivi._utils.lazy import lazy as _lazy

if TYPE_CHECKING:
    from skksivi import amortized as amortized
    from skksivi import annealing as annealing
    from skksivi import baselines as baselines
    from skksivi import calibration as calibration
    from skksivi import datasets as datasets
    from skksivi import kernels as kernels
    from skksivi import metrics as metrics
    from skksivi import mixing as mixing
    from skksivi import model_selection as model_selection
    from skksivi import parameters as parameters
    from skksivi import plotting as plotting
    from skksivi import targets as targets
    from skksivi import terms as terms
    from skksivi._arviz import to_arviz as to_arviz
    from skksivi._paper import paper_settings as paper_settings
    from skksivi._utils import __version__ as __version__
    from skksivi.amortized import AmortizedKSIVI as AmortizedKSIVI
    from skksivi.diagnostics import diagnose as diagnose
    from skksivi.estimators import HKSIVIApproximator as HKSIVIApproximator
    from skksivi.estimators import KSIVIApproximator as KSIVIApproximator
    from skksivi.inference._expectation import expectation as expectation
    from skksivi.inference._importance import evidence as evidence
    from skksivi.inference._importance import importance_sample as importance_sample
    from skksivi.inference._importance import refine as refine
    from skksivi.inference._modes import modes as modes
    from skksivi.inference._summary import compare as compare
    from skksivi.inference._summary import summary as summary
    from skksivi.persistence import load as load
    from skksivi.persistence import save as save
    from skksivi.predictors import KSIVIClassifier as KSIVIClassifier
    from skksivi.predictors import KSIVIRegressor as KSIVIRegressor
else:
    __all__, __dir__, __getattr__ = _lazy(
        __name__,
        {
            "": [
                "amortized", "annealing", "baselines", "calibration", "datasets", "kernels", "metrics", "mixing",
                "model_selection", "parameters", "plotting", "targets", "terms",
            ],
            "_utils": ["__version__"],
            "estimators": ["HKSIVIApproximator", "KSIVIApproximator"],
            "inference._expectation": ["expectation"],
            "inference._importance": ["evidence", "importance_sample", "refine"],
            "inference._modes": ["modes"],
            "inference._summary": ["compare", "summary"],
            "_arviz": ["to_arviz"],
            "_paper": ["paper_settings"],
            "amortized": ["AmortizedKSIVI"],
            "diagnostics": ["diagnose"],
            "persistence": ["load", "save"],
            "predictors": ["KSIVIClassifier", "KSIVIRegressor"],
        },
    )  # fmt: skip
