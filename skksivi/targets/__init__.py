"""Distributions to approximate, each known by the gradient of its log-density."""

from skksivi.targets._base import Minibatches, Target, from_rows, from_score_fn
from skksivi.targets._diffusion import ConditionedDiffusion
from skksivi.targets._logistic import BayesianLogisticRegression
from skksivi.targets._toy import Banana, Multimodal, XShaped

__all__ = [
    "Banana",
    "BayesianLogisticRegression",
    "ConditionedDiffusion",
    "Minibatches",
    "Multimodal",
    "Target",
    "XShaped",
    "from_rows",
    "from_score_fn",
]
