r"""The network that stands for :math:`s_p - s_q`, for the methods that train one against the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from skksivi.base import Constraints, Integral, Interval, Real
from skksivi.families._layer import Map, MultilayerPerceptron
from skksivi.parameters import Adam
from skksivi.training._loop import Iterate, Scheduled

#: Constraints of its parameters.
CRITIC: Constraints = {
    "critic_hidden_layer_sizes": ["array-like"],
    "critic_learning_rate": [Interval(Real, 0, None, closed="neither")],
    "n_critic_steps": [Interval(Integral, 1, None, closed="left")],
}


class FisherBound(NamedTuple):
    """Values () or (T,), and the gradients in x, in f and in the offset of the critic, (n, d) or (T, n, d)."""

    value: Tensor
    dx: Tensor
    df: Tensor
    doffset: Tensor


def fisher_bound(network: Map, x: Tensor, f: Tensor, offset: Tensor | float = 0.0) -> FisherBound:
    r"""Evaluate :math:`E[2 g^\top f - \|g\|^2]`, g(x) = network(x) + offset, and set the gradient of the parameters.

    With :math:`f = s_p(x) - s_{q(\cdot|z)}(x)` its maximum over g is the Fisher divergence, at
    :math:`g = E[f | x] = s_p - s_q`.

    Parameters
    ----------
    network : Map
    x, f : Tensor of shape (n, d)
    offset : Tensor of shape (n, d), default=0
    """
    h, pull = network.with_pullback(x)
    g = h + offset
    dg = (f - g) * (2 / len(x))
    return FisherBound((g * (2 * f - g)).sum(-1).mean(), pull(dg)(), g * (2 / len(x)), dg)


class Critics:
    """Networks g_t that are trained to be s_p - s_q, one per layer of draws.

    Parameters
    ----------
    sizes : sequence of int
        Numbers of units of the layers of each network.
    n_layers : int
        Of the draws, each of which has a network.
    rate : Scheduled
        The learning rate, of the type of the networks.
    betas : pair of float
        Of Adam.
    generator : torch.Generator
    """

    def __init__(
        self,
        sizes: Sequence[int],
        n_layers: int,
        rate: Scheduled,
        betas: tuple[float, float],
        generator: torch.Generator,
    ) -> None:
        self.networks = [MultilayerPerceptron(sizes, generator, rate.value.dtype) for _ in range(n_layers)]
        self._iterate = Iterate(nn.ModuleList(self.networks), Adam(betas=betas, ema=None))
        self.rate = rate

    def ascend(self, x: Tensor, f: Tensor, offset: Tensor | None = None) -> None:
        """Take a step of Adam up the bounds at x, f and the offsets of the networks, all (T, n, d)."""
        value = self.bounds(x, f, offset).value.sum()
        self._iterate.gradient.neg_()  # a step descends
        self._iterate.rate.copy_(self.rate.value)
        self._iterate.step(value)

    def bounds(self, x: Tensor, f: Tensor, offset: Tensor | None = None) -> FisherBound:
        """Evaluate the bounds, one per layer, and set the gradient of the networks."""
        offset = torch.zeros_like(x) if offset is None else offset
        parts = [fisher_bound(*part) for part in zip(self.networks, x, f, offset, strict=True)]
        return FisherBound(*(torch.stack(part) for part in zip(*parts, strict=True)))
