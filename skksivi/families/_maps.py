"""Parameterised functions of z whose gradients are written by hand."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from skksivi._saved import is_instance, is_weights, saved

#: Takes the gradient of a loss in the value of a map, (n, d), and sets `grad` of the parameters. Returns a function
#: that computes the gradient in z, (n, latent_dim).
Pullback = Callable[[Tensor], Callable[[], Tensor]]


class Map(nn.Module, ABC):
    """A parameterised function of z with a hand-written pullback of gradients."""

    @abstractmethod
    def forward(self, z: Tensor) -> Tensor:
        """Map (n, latent_dim) to (n, d), or to (d,) for all rows alike."""

    @abstractmethod
    def with_pullback(self, z: Tensor) -> tuple[Tensor, Pullback]:
        """Return the value at z and the pullback. To be called without automatic differentiation, on parameters that
        have a `grad`.
        """


@saved("Constant", {"value": (is_weights, "d")}, "_d")
class Constant(Map):
    """A free vector that ignores z."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)

    def forward(self, z: Tensor) -> Tensor:
        return self.value

    def with_pullback(self, z: Tensor) -> tuple[Tensor, Pullback]:
        def pullback(dy: Tensor) -> Callable[[], Tensor]:
            torch.sum(dy, 0, out=self.value.grad)
            return lambda: torch.zeros_like(z)

        return self.value, pullback


@saved("MultilayerPerceptron", {"layers": (is_instance(list), "")})
class MultilayerPerceptron(Map):
    """A ReLU network, its weights drawn by torch's own rule for linear layers.

    Parameters
    ----------
    sizes : sequence of int
        Of the input, the hidden layers and the output.
    generator : torch.Generator
    dtype : torch.dtype
    """

    def __init__(self, sizes: Sequence[int], generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        layers = []
        for n_in, n_out in itertools.pairwise(sizes):
            linear = nn.utils.skip_init(nn.Linear, n_in, n_out, device=generator.device, dtype=dtype)
            bound = 1 / math.sqrt(n_in)
            nn.init.uniform_(linear.weight, -bound, bound, generator=generator)
            nn.init.uniform_(linear.bias, -bound, bound, generator=generator)
            layers.append(linear)
        self.layers = nn.ModuleList(layers)

    @classmethod
    def restored(cls, layers: list[nn.Linear]) -> MultilayerPerceptron:
        """Return the network of linear layers that fit."""
        if not all(a.out_features == b.in_features for a, b in itertools.pairwise(layers)):
            raise ValueError("the layers of its network do not fit")
        network = cls([], torch.Generator(), torch.float32)
        network.layers.extend(layers)
        return network

    @property
    def linear(self) -> list[nn.Linear]:
        """The layers."""
        return [layer for layer in self.layers if isinstance(layer, nn.Linear)]

    @property
    def shape(self) -> tuple[int, int]:
        """The dimensions of z and of the value."""
        layers = self.linear
        return layers[0].in_features, layers[-1].out_features

    def forward(self, z: Tensor) -> Tensor:
        *hidden, last = self.layers
        for layer in hidden:
            z = layer(z).relu()
        return last(z)

    def with_pullback(self, z: Tensor) -> tuple[Tensor, Pullback]:
        layers, inputs = self.linear, [z]
        for layer in layers[:-1]:
            inputs.append(torch.addmm(layer.bias, inputs[-1], layer.weight.T).relu_())

        def pullback(dy: Tensor) -> Callable[[], Tensor]:
            for i, (layer, h) in reversed(list(enumerate(zip(layers, inputs, strict=True)))):
                torch.mm(dy.T, h, out=layer.weight.grad)
                torch.sum(dy, 0, out=layer.bias.grad)
                if i > 0:
                    dy = torch.ops.aten.threshold_backward(dy @ layer.weight, h, 0)
            return lambda: dy @ layers[0].weight

        return torch.addmm(layers[-1].bias, inputs[-1], layers[-1].weight.T), pullback

    def start_at(self, value: Tensor) -> MultilayerPerceptron:
        """Make the network start as a constant function of value (d,); return it."""
        last = self.linear[-1]
        with torch.no_grad():
            last.weight.zero_()
            last.bias.copy_(value)
        return self


@saved("LinearSkip", {"A": (is_weights, "dz"), "network": (is_instance(MultilayerPerceptron), "zd")}, "zd")
class LinearSkip(Map):
    """The map z -> A z + network(z)."""

    def __init__(self, A: Tensor, network: Map) -> None:
        super().__init__()
        self.A = nn.Parameter(A)
        self.network = network

    def forward(self, z: Tensor) -> Tensor:
        return z @ self.A.T + self.network(z)

    def with_pullback(self, z: Tensor) -> tuple[Tensor, Pullback]:
        out, pull_network = self.network.with_pullback(z)

        def pullback(dy: Tensor) -> Callable[[], Tensor]:
            torch.mm(dy.T, z, out=self.A.grad)
            dz = pull_network(dy)
            return lambda: dz() + dy @ self.A

        return torch.addmm(out, z, self.A.T), pullback


@saved("Residual", {"unit": (is_weights, "d"), "network": (is_instance(MultilayerPerceptron), "dd")}, "dd")
class Residual(Map):
    """The map z -> z + unit * network(z), with a fixed unit (d,) for each coordinate."""

    unit: Tensor

    def __init__(self, unit: Tensor, network: Map) -> None:
        super().__init__()
        self.register_buffer("unit", unit)
        self.network = network

    def forward(self, z: Tensor) -> Tensor:
        return torch.addcmul(z, self.unit, self.network(z))

    def with_pullback(self, z: Tensor) -> tuple[Tensor, Pullback]:
        out, pull_network = self.network.with_pullback(z)

        def pullback(dy: Tensor) -> Callable[[], Tensor]:
            dz = pull_network(self.unit * dy)
            return lambda: dz() + dy

        return torch.addcmul(z, self.unit, out), pullback
