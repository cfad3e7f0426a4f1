"""Distributions to approximate, each known by the gradient of its log-density; imported when first used."""

from typing import TYPE_CHECKING

from skksivi._utils.lazy import lazy

if TYPE_CHECKING:
    from skksivi.bridges._jax import from_jax, from_numpyro, non_centered, paired_from_numpyro
    from skksivi.bridges._pymc import from_pymc, paired_from_pymc
    from skksivi.bridges._stan import from_bridgestan
    from skksivi.targets._base import Target, from_rows, from_score_fn
    from skksivi.targets._constrained import constrained, paired_constrained
    from skksivi.targets._diffusion import ConditionedDiffusion
    from skksivi.targets._linear import BayesianLinearRegression, BayesianMultinomialRegression
    from skksivi.targets._logistic import BayesianLogisticRegression
    from skksivi.targets._minibatches import Minibatches
    from skksivi.targets._models import (
        BrownianBridge,
        ItemResponse,
        LogGaussianCox,
        SeedGermination,
        SparseLogisticRegression,
        StochasticVolatility,
    )
    from skksivi.targets._named import from_log_prob
    from skksivi.targets._network import BayesianNeuralNetwork
    from skksivi.targets._shapes import Funnel, ManyWell, Rosenbrock
    from skksivi.targets._sharded import Sharded
    from skksivi.targets._toy import Banana, EightGaussians, GaussianMixture, Multimodal, StudentT, XShaped

__all__ = [
    "Banana",
    "BayesianLinearRegression",
    "BayesianLogisticRegression",
    "BayesianMultinomialRegression",
    "BayesianNeuralNetwork",
    "BrownianBridge",
    "ConditionedDiffusion",
    "EightGaussians",
    "Funnel",
    "GaussianMixture",
    "ItemResponse",
    "LogGaussianCox",
    "ManyWell",
    "Minibatches",
    "Multimodal",
    "Rosenbrock",
    "SeedGermination",
    "Sharded",
    "SparseLogisticRegression",
    "StochasticVolatility",
    "StudentT",
    "Target",
    "XShaped",
    "constrained",
    "from_bridgestan",
    "from_jax",
    "from_log_prob",
    "from_numpyro",
    "from_pymc",
    "from_rows",
    "from_score_fn",
    "non_centered",
    "paired_constrained",
    "paired_from_numpyro",
    "paired_from_pymc",
]

if not TYPE_CHECKING:  # a checker would take any name for one of these
    __dir__ = __all__.copy
    __getattr__ = lazy(
        __name__,
        {
            "_base": ["Target", "from_rows", "from_score_fn"],
            "_named": ["from_log_prob"],
            "_constrained": ["constrained", "paired_constrained"],
            "_diffusion": ["ConditionedDiffusion"],
            ".bridges._jax": ["from_jax", "from_numpyro", "non_centered", "paired_from_numpyro"],
            "_linear": ["BayesianLinearRegression", "BayesianMultinomialRegression"],
            "_logistic": ["BayesianLogisticRegression"],
            "_minibatches": ["Minibatches"],
            "_sharded": ["Sharded"],
            "_models": [
                "BrownianBridge",
                "ItemResponse",
                "LogGaussianCox",
                "SeedGermination",
                "SparseLogisticRegression",
                "StochasticVolatility",
            ],
            "_network": ["BayesianNeuralNetwork"],
            ".bridges._pymc": ["from_pymc", "paired_from_pymc"],
            "_shapes": ["Funnel", "ManyWell", "Rosenbrock"],
            ".bridges._stan": ["from_bridgestan"],
            "_toy": ["Banana", "EightGaussians", "GaussianMixture", "Multimodal", "StudentT", "XShaped"],
        },
    )
