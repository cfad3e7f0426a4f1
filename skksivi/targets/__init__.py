"""Distributions to approximate, each known by the gradient of its log-density; imported when first used."""

from typing import TYPE_CHECKING

from skksivi._utils.lazy import lazy as _lazy

if TYPE_CHECKING:
    from skksivi.bridges import from_bridgestan as from_bridgestan
    from skksivi.bridges import from_jax as from_jax
    from skksivi.bridges import from_numpyro as from_numpyro
    from skksivi.bridges import from_pymc as from_pymc
    from skksivi.score import remembered as remembered
    from skksivi.targets._base import Target as Target
    from skksivi.targets._base import check_hyperprior as check_hyperprior
    from skksivi.targets._base import from_rows as from_rows
    from skksivi.targets._constrained import NamedTarget as NamedTarget
    from skksivi.targets._constrained import Shares as Shares
    from skksivi.targets._constrained import constrained as constrained
    from skksivi.targets._constrained import coordinate_name as coordinate_name
    from skksivi.targets._constrained import coordinate_names as coordinate_names
    from skksivi.targets._constrained import from_log_prob as from_log_prob
    from skksivi.targets._constrained import from_score_fn as from_score_fn
    from skksivi.targets._linear import BayesianLinearRegression as BayesianLinearRegression
    from skksivi.targets._linear import BayesianLogisticRegression as BayesianLogisticRegression
    from skksivi.targets._linear import BayesianMultinomialRegression as BayesianMultinomialRegression
    from skksivi.targets._minibatches import Minibatches as Minibatches
    from skksivi.targets._network import BayesianNeuralNetwork as BayesianNeuralNetwork
    from skksivi.targets._network import log_normal_mixture as log_normal_mixture
    from skksivi.targets._network import outputs_of_networks as outputs_of_networks
    from skksivi.targets._sharded import Sharded as Sharded
    from skksivi.targets._toy import Banana as Banana
    from skksivi.targets._toy import ConditionedDiffusion as ConditionedDiffusion
    from skksivi.targets._toy import EightGaussians as EightGaussians
    from skksivi.targets._toy import Funnel as Funnel
    from skksivi.targets._toy import GaussianMixture as GaussianMixture
    from skksivi.targets._toy import Multimodal as Multimodal
    from skksivi.targets._toy import StudentT as StudentT
    from skksivi.targets._toy import XShaped as XShaped
else:
    __all__, __dir__, __getattr__ = _lazy(
        __name__,
        {
            ".score": ["remembered"],
            "_base": ["Target", "check_hyperprior", "from_rows"],
            "_constrained": [
                "NamedTarget", "Shares", "constrained", "coordinate_name", "coordinate_names", "from_log_prob",
                "from_score_fn",
            ],
            ".bridges": ["from_bridgestan", "from_jax", "from_numpyro", "from_pymc"],
            "_linear": ["BayesianLinearRegression", "BayesianLogisticRegression", "BayesianMultinomialRegression"],
            "_minibatches": ["Minibatches"],
            "_sharded": ["Sharded"],
            "_network": ["BayesianNeuralNetwork", "log_normal_mixture", "outputs_of_networks"],
            "_toy": [
                "Banana", "ConditionedDiffusion", "EightGaussians", "Funnel", "GaussianMixture", "Multimodal",
                "StudentT", "XShaped",
            ],
        },
        [
            "NamedTarget", "Shares", "check_hyperprior", "coordinate_name", "coordinate_names",
            "log_normal_mixture", "outputs_of_networks",
        ],
    )  # fmt: skip
