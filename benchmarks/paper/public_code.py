"""Targets and the kernel of the public code of the method, where it differs from the paper."""

from __future__ import annotations

import math

import torch
from sklearn.base import clone

from skksivi.kernels import Kernel
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


class InMetric(Kernel):
    """A kernel k(x, y) C^-1 of matrices, with C the covariance of the first of two batches, held fixed.

    Where tails are heavy it matters which: draws far out in the other batch then count in full. With `detached` k is
    divided by its median over log(n + 1), through which no gradient flows, as the code divides Riesz's kernel.
    """

    def __init__(self, kernel, *, detached=False):
        self.kernel, self.detached = kernel, detached

    def weighted(self, x, f):
        """Move the root of C^-1 into f, as `Kernel.weighted`."""
        first = x.chunk(2, -2)[0].double()
        centred = first - first.mean(-2, keepdim=True)
        C = centred.mT @ centred / (first.shape[-2] - 1) + 1e-8 * torch.eye(x.shape[-1])
        root = torch.linalg.inv(torch.linalg.cholesky(C)).to(f)
        kernel, g, pull = (self._fixed(x) if self.detached else self.kernel).weighted(x, f @ root.mT)

        def pullback(dx, dg):
            dx, dg = pull(dx, dg)
            return dx, dg @ root

        return kernel, g, pullback

    def _fixed(self, x):
        first, second = x.chunk(2, -2)
        k = self.kernel.with_bandwidth(1.0)
        median = k(first[:128], second[:128]).median().item()
        return k.with_bandwidth(median / math.log(len(first) + 1))

    def with_bandwidth(self, bandwidth):
        return clone(self).set_params(kernel=self.kernel.with_bandwidth(bandwidth))

    def check(self):
        self.kernel.check()

    def profile(self, t):
        return self.kernel.profile(t)

    def slope(self, t, k):
        return self.kernel.slope(t, k)

    def median_level(self, n):
        return self.kernel.median_level(n)


DIFFUSIONS = {"paper": ConditionedDiffusion, "bounded": BoundedDiffusion}
NETWORKS = {"y": BayesianNeuralNetwork, "legacy": LegacyNetwork}
