"""Semi-implicit families, their hierarchies, and the samplers that a fit is."""

from skksivi.families._density import log_joint
from skksivi.families._layer import (
    Constant,
    Hierarchy,
    MultilayerPerceptron,
    Residual,
    SemiImplicit,
    covariance_kept,
    diagonal_gaussian_log_prob,
    gaussian_layer,
)
from skksivi.families._samplers import Chains, Gaussian, Layer, Layers, Particles
from skksivi.families._weights import cheap_certificate

__all__ = [
    "Chains", "Constant", "Gaussian", "Hierarchy", "Layer", "Layers", "MultilayerPerceptron",
    "Particles", "Residual", "SemiImplicit", "cheap_certificate", "covariance_kept", "diagonal_gaussian_log_prob",
    "gaussian_layer", "log_joint",
]  # fmt: skip
