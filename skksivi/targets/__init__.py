"""Distributions to approximate, each known by the gradient of its log-density; imported when first used."""

from typing import TYPE_CHECKING

from skksivi._utils.lazy import lazy

if TYPE_CHECKING:
    from skksivi.bridges._jax import from_jax as from_jax
    from skksivi.bridges._jax import from_numpyro as from_numpyro
    from skksivi.bridges._jax import non_centered as non_centered
    from skksivi.bridges._jax import paired_from_numpyro as paired_from_numpyro
    from skksivi.bridges._pymc import from_pymc as from_pymc
    from skksivi.bridges._pymc import paired_from_pymc as paired_from_pymc
    from skksivi.bridges._stan import from_bridgestan as from_bridgestan
    from skksivi.targets._base import Target as Target
    from skksivi.targets._base import from_rows as from_rows
    from skksivi.targets._base import from_score_fn as from_score_fn
    from skksivi.targets._constrained import constrained as constrained
    from skksivi.targets._constrained import paired_constrained as paired_constrained
    from skksivi.targets._diffusion import ConditionedDiffusion as ConditionedDiffusion
    from skksivi.targets._linear import BayesianLinearRegression as BayesianLinearRegression
    from skksivi.targets._linear import BayesianMultinomialRegression as BayesianMultinomialRegression
    from skksivi.targets._logistic import BayesianLogisticRegression as BayesianLogisticRegression
    from skksivi.targets._minibatches import Minibatches as Minibatches
    from skksivi.targets._models import BrownianBridge as BrownianBridge
    from skksivi.targets._models import ItemResponse as ItemResponse
    from skksivi.targets._models import LogGaussianCox as LogGaussianCox
    from skksivi.targets._models import SeedGermination as SeedGermination
    from skksivi.targets._models import SparseLogisticRegression as SparseLogisticRegression
    from skksivi.targets._models import StochasticVolatility as StochasticVolatility
    from skksivi.targets._named import from_log_prob as from_log_prob
    from skksivi.targets._network import BayesianNeuralNetwork as BayesianNeuralNetwork
    from skksivi.targets._shapes import Funnel as Funnel
    from skksivi.targets._shapes import ManyWell as ManyWell
    from skksivi.targets._shapes import Rosenbrock as Rosenbrock
    from skksivi.targets._sharded import Sharded as Sharded
    from skksivi.targets._toy import Banana as Banana
    from skksivi.targets._toy import EightGaussians as EightGaussians
    from skksivi.targets._toy import GaussianMixture as GaussianMixture
    from skksivi.targets._toy import Multimodal as Multimodal
    from skksivi.targets._toy import StudentT as StudentT
    from skksivi.targets._toy import XShaped as XShaped
else:
    __all__, __dir__, __getattr__ = lazy(
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
