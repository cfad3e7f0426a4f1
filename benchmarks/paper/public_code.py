"""Targets as the public code of the method has them, where it differs from the paper."""

from __future__ import annotations

from skksivi.targets import BayesianNeuralNetwork, ConditionedDiffusion


class BoundedDiffusion(ConditionedDiffusion):
    """The conditioned diffusion whose posterior has the drift b(x) = 10 x (1 - x^2) / (1 + x^2).

    The observations are those of the paper's drift.
    """

    @staticmethod
    def _drift(x):
        return 10 * x * (1 - x.square()) / (1 + x.square())

    @staticmethod
    def _slope(x):
        return 10 * (1 - 4 * x.square() - x.pow(4)) / (1 + x.square()).square()

    @staticmethod
    def _bend(x):
        return 40 * x * (x.square() - 3) / (1 + x.square()).pow(3)


class LegacyNetwork(BayesianNeuralNetwork):
    """A network whose likelihood takes the precision of the noise of y for that of the standardised y.

    It is too weak, by the variance of y. Predictions have the precision of y.
    """

    def _precisions(self, theta):
        return [self.prior_precision, self.noise_precision]


DIFFUSIONS = {"paper": ConditionedDiffusion, "bounded": BoundedDiffusion}
NETWORKS = {"y": BayesianNeuralNetwork, "legacy": LegacyNetwork}
