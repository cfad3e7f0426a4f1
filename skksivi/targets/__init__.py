"""Distributions to approximate, each known by the gradient of its log-density; imported when first used."""

from typing import TYPE_CHECKING

from skksivi._utils.lazy import lazy

if TYPE_CHECKING:
    from skksivi.bridges import from_bridgestan as from_bridgestan
    from skksivi.bridges import from_jax as from_jax
    from skksivi.bridges import from_numpyro as from_numpyro
    from skksivi.bridges import from_pymc as from_pymc
    from skksivi.bridges import non_centered as non_centered
    from skksivi.bridges import paired_from_numpyro as paired_from_numpyro
    from skksivi.bridges import paired_from_pymc as paired_from_pymc
    from skksivi.targets._base import Target as Target
    from skksivi.targets._base import check_hyperprior as check_hyperprior
    from skksivi.targets._base import from_rows as from_rows
    from skksivi.targets._base import from_score_fn as from_score_fn
    from skksivi.targets._constrained import constrained as constrained
    from skksivi.targets._constrained import paired_constrained as paired_constrained
    from skksivi.targets._diffusion import ConditionedDiffusion as ConditionedDiffusion
    from skksivi.targets._linear import BayesianLinearRegression as BayesianLinearRegression
    from skksivi.targets._linear import BayesianLogisticRegression as BayesianLogisticRegression
    from skksivi.targets._linear import BayesianMultinomialRegression as BayesianMultinomialRegression
    from skksivi.targets._minibatches import Minibatches as Minibatches
    from skksivi.targets._models import BrownianBridge as BrownianBridge
    from skksivi.targets._models import ItemResponse as ItemResponse
    from skksivi.targets._models import LogGaussianCox as LogGaussianCox
    from skksivi.targets._models import SeedGermination as SeedGermination
    from skksivi.targets._models import SparseLogisticRegression as SparseLogisticRegression
    from skksivi.targets._models import StochasticVolatility as StochasticVolatility
    from skksivi.targets._named import NamedPairs as NamedPairs
    from skksivi.targets._named import NamedTarget as NamedTarget
    from skksivi.targets._named import coordinate_names as coordinate_names
    from skksivi.targets._named import from_log_prob as from_log_prob
    from skksivi.targets._network import BayesianNeuralNetwork as BayesianNeuralNetwork
    from skksivi.targets._network import log_normal_mixture as log_normal_mixture
    from skksivi.targets._network import outputs_of_networks as outputs_of_networks
    from skksivi.targets._sharded import Sharded as Sharded
    from skksivi.targets._toy import Banana as Banana
    from skksivi.targets._toy import EightGaussians as EightGaussians
    from skksivi.targets._toy import Funnel as Funnel
    from skksivi.targets._toy import GaussianMixture as GaussianMixture
    from skksivi.targets._toy import ManyWell as ManyWell
    from skksivi.targets._toy import Multimodal as Multimodal
    from skksivi.targets._toy import Rosenbrock as Rosenbrock
    from skksivi.targets._toy import StudentT as StudentT
    from skksivi.targets._toy import XShaped as XShaped
else:
    __all__, __dir__, __getattr__ = lazy(
        __name__,
        {
            "_base": ["Target", "check_hyperprior", "from_rows", "from_score_fn"],
            "_named": ["NamedPairs", "NamedTarget", "coordinate_names", "from_log_prob"],
            "_constrained": ["constrained", "paired_constrained"],
            "_diffusion": ["ConditionedDiffusion"],
            ".bridges": [
                "from_bridgestan", "from_jax", "from_numpyro", "from_pymc", "non_centered", "paired_from_numpyro",
                "paired_from_pymc",
            ],
            "_linear": ["BayesianLinearRegression", "BayesianLogisticRegression", "BayesianMultinomialRegression"],
            "_minibatches": ["Minibatches"],
            "_sharded": ["Sharded"],
            "_models": [
                "BrownianBridge", "ItemResponse", "LogGaussianCox", "SeedGermination", "SparseLogisticRegression",
                "StochasticVolatility",
            ],
            "_network": ["BayesianNeuralNetwork", "log_normal_mixture", "outputs_of_networks"],
            "_toy": [
                "Banana", "EightGaussians", "Funnel", "GaussianMixture", "ManyWell", "Multimodal", "Rosenbrock",
                "StudentT", "XShaped",
            ],
        },
    )  # fmt: skip
