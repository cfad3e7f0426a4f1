"""Parameterised functions of z whose gradients are written by hand."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from skksivi._saved import is_instance, is_weights, saved

#: Takes the gradient of a loss in the value of a map, (n, d), and sets `grad` of the parameters. Returns the gradient
#: in z, (n, latent_dim), if a second argument asks for it.
Pullback = Callable[..., Any]


class Map(nn.Module, ABC):
    """A parameterised function of z with a hand-written way back for gradients."""

    @abstractmethod
    def forward(self, z: Tensor) -> Tensor:
        """Map (n, latent_dim) to (n, d), or to (d,) for all rows alike."""

    @abstractmethod
    def with_pullback(self, z: Tensor) -> tuple[Tensor, Pullback]:
        """Return the value at z and the way back. To be called without automatic differentiation, on parameters that
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
        def pullback(dy: Tensor, wants_input: bool = False) -> Tensor | None:
            torch.sum(dy, 0, out=self.value.grad)
            return torch.zeros_like(z) if wants_input else None

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
    def shape(self) -> tuple[int, int]:
        """The dimensions of z and of the value."""
        first: Any = self.layers[0]
        last: Any = self.layers[-1]
        return first.in_features, last.out_features

    def forward(self, z: Tensor) -> Tensor:
        *hidden, last = self.layers
        for layer in hidden:
            z = layer(z).relu()
        return last(z)

    def with_pullback(self, z: Tensor) -> tuple[Tensor, Pullback]:
        layers: list[Any] = list(self.layers)
        inputs = [z]
        for layer in layers[:-1]:
            inputs.append(torch.addmm(layer.bias, inputs[-1], layer.weight.T).relu_())

        def pullback(dy: Tensor, wants_input: bool = False) -> Tensor | None:
            for i, (layer, h) in reversed(list(enumerate(zip(layers, inputs, strict=True)))):
                torch.mm(dy.T, h, out=layer.weight.grad)
                torch.sum(dy, 0, out=layer.bias.grad)
                if i > 0:
                    dy = torch.ops.aten.threshold_backward(dy @ layer.weight, h, 0)
            return dy @ layers[0].weight if wants_input else None

        return torch.addmm(layers[-1].bias, inputs[-1], layers[-1].weight.T), pullback

    def start_at(self, value: Tensor) -> MultilayerPerceptron:
        """Make the network start as a constant function of value (d,); return it."""
        last: Any = self.layers[-1]
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

        def pullback(dy: Tensor, wants_input: bool = False) -> Tensor | None:
            torch.mm(dy.T, z, out=self.A.grad)
            dz = pull_network(dy, wants_input)
            return dz + dy @ self.A if wants_input else None

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

        def pullback(dy: Tensor, wants_input: bool = False) -> Tensor | None:
            dz = pull_network(self.unit * dy, wants_input)
            return dz + dy if wants_input else None

        return torch.addcmul(z, self.unit, out), pullback
