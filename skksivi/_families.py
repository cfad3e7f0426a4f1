r"""Semi-implicit families: a mixing draw z, then a Gaussian layer :math:`x = \mu(z) + \sigma(z) \xi`."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Draw(NamedTuple):
    """Draws and the score of the conditional that each came from, both of shape (..., n, d)."""

    x: Tensor
    score: Tensor


def _standard_normal(noise: Tensor) -> Tensor:
    return noise


#: Maps of standard normal noise (n, latent_dim) to draws of the mixing distribution q(z).
MIXINGS: dict[str, Callable[[Tensor], Tensor]] = {"normal": _standard_normal}


class Map(nn.Module, ABC):
    """A parameterised function of z with a hand-written way back for gradients."""

    @abstractmethod
    def forward(self, z: Tensor) -> Tensor:
        """Map (n, latent_dim) to (n, d), or to (d,) for all rows alike."""

    @abstractmethod
    def with_pullback(self, z: Tensor) -> tuple[Tensor, Callable[[Tensor], None]]:
        """Return the value at z, and the function that takes the gradient of a loss in it, (n, d), and sets `grad` of
        the parameters. To be called without automatic differentiation, on parameters that have a `grad`.
        """


class Constant(Map):
    """A free vector that ignores z."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)

    def forward(self, z: Tensor) -> Tensor:
        return self.value

    def with_pullback(self, z: Tensor) -> tuple[Tensor, Callable[[Tensor], None]]:
        def pullback(dy: Tensor) -> None:
            torch.sum(dy, 0, out=self.value.grad)

        return self.value, pullback


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

    def forward(self, z: Tensor) -> Tensor:
        *hidden, last = self.layers
        for layer in hidden:
            z = layer(z).relu()
        return last(z)

    def with_pullback(self, z: Tensor) -> tuple[Tensor, Callable[[Tensor], None]]:
        layers: list[Any] = list(self.layers)
        inputs = [z]
        for layer in layers[:-1]:
            inputs.append(torch.addmm(layer.bias, inputs[-1], layer.weight.T).relu_())

        def pullback(dy: Tensor) -> None:
            for i, (layer, h) in reversed(list(enumerate(zip(layers, inputs, strict=True)))):
                torch.mm(dy.T, h, out=layer.weight.grad)
                torch.sum(dy, 0, out=layer.bias.grad)
                if i > 0:
                    dy = torch.ops.aten.threshold_backward(dy @ layer.weight, h, 0)

        return torch.addmm(layers[-1].bias, inputs[-1], layers[-1].weight.T), pullback

    def start_at(self, value: float) -> MultilayerPerceptron:
        """Make the network start as a constant function; return it."""
        last: Any = self.layers[-1]
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, value)
        return self


class LinearSkip(Map):
    """The map z -> A z + network(z)."""

    def __init__(self, A: Tensor, network: Map) -> None:
        super().__init__()
        self.A = nn.Parameter(A)
        self.network = network

    def forward(self, z: Tensor) -> Tensor:
        return z @ self.A.T + self.network(z)

    def with_pullback(self, z: Tensor) -> tuple[Tensor, Callable[[Tensor], None]]:
        out, pull_network = self.network.with_pullback(z)

        def pullback(dy: Tensor) -> None:
            torch.mm(dy.T, z, out=self.A.grad)
            pull_network(dy)

        return torch.addmm(out, z, self.A.T), pullback


class SemiImplicit(nn.Module):
    r"""The family q(x) = E_q(z) N(x; mu(z), diag sigma(z)^2), with sigma^2 = exp(a) + floor^2.

    Parameters
    ----------
    mean : Map
        The map mu from (n, latent_dim) to (n, d).
    log_variance : Map
        The map a from (n, latent_dim) to (d,) or (n, d).
    n_features : int
        The dimension d of x.
    latent_dim : int
        Dimension of z.
    mixing : {"normal"}
        Distribution of z.
    min_scale : float
        The floor of sigma, which keeps the layer from collapsing onto its mean.
    """

    def __init__(
        self,
        mean: Map,
        log_variance: Map,
        *,
        n_features: int,
        latent_dim: int,
        mixing: str,
        min_scale: float,
    ) -> None:
        super().__init__()
        self.mean = mean
        self.log_variance = log_variance
        self.n_features = n_features
        self.latent_dim = latent_dim
        self.mixing = mixing
        self.min_scale = min_scale

    def sigma(self, z: Tensor) -> Tensor:
        """Return the standard deviations, shape (d,) or (n, d)."""
        return (self.log_variance(z).exp() + self.min_scale**2).sqrt()

    def draw_latent(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw z of shape (n, latent_dim) from the mixing distribution."""
        like = next(self.parameters())
        noise = torch.empty(n, self.latent_dim, dtype=like.dtype, device=like.device)
        return MIXINGS[self.mixing](noise.normal_(generator=generator))

    def draw(self, n: int, generator: torch.Generator) -> Draw:
        r"""Draw n rows, :math:`x = \mu(z) + \sigma(z) \xi` with conditional score :math:`-\xi / \sigma(z)`."""
        return self.draw_with_pullback(n, generator)[0]

    def draw_with_pullback(self, n: int, generator: torch.Generator) -> tuple[Draw, Callable[[Tensor, Tensor], None]]:
        r"""Draw n rows; return them and the way of gradients back to the parameters.

        Returns
        -------
        draw : Draw
        pullback : callable
            Takes the gradients of a loss in x and in the conditional score c, both (n, d), and sets those of the
            parameters. With :math:`x = \mu + \sigma \xi`, :math:`c = -\xi / \sigma` and
            :math:`\sigma^2 = e^a + \text{floor}^2`,
            :math:`\partial L / \partial a = (\partial_x L + \partial_c L / \sigma^2)\, \xi\, e^a / (2 \sigma)`.
        """
        like = next(self.parameters())
        noise = torch.empty(n * (self.latent_dim + self.n_features), dtype=like.dtype, device=like.device)
        noise.normal_(generator=generator)
        z = MIXINGS[self.mixing](noise[: n * self.latent_dim].view(n, -1))
        xi = noise[n * self.latent_dim :].view(n, -1)
        mu, pull_mean = self.mean.with_pullback(z)
        a, pull_log_variance = self.log_variance.with_pullback(z)
        e_a = a.exp()
        sigma = (e_a + self.min_scale**2).sqrt_()

        def pullback(dx: Tensor, dscore: Tensor) -> None:
            pull_mean(dx)
            d_sigma = torch.addcdiv(dx, dscore, sigma.square()).mul_(xi)
            pull_log_variance(d_sigma.mul_(e_a / (2 * sigma)))

        return Draw(torch.addcmul(mu, sigma, xi), xi / -sigma), pullback

    def log_prob(self, x: Tensor, z: Tensor) -> Tensor:
        """Return log q(x_i | z_j) for all pairs, shape (n, k), of x (n, d) and z (k, latent_dim)."""
        mu = self.mean(z)
        precision = self.sigma(z).pow(-2).expand_as(mu)
        squared = x.square() @ precision.mT - 2 * x @ (precision * mu).mT + (precision * mu.square()).sum(-1)
        log_determinant = precision.log().sum(-1) - x.shape[-1] * math.log(2 * math.pi)
        return (log_determinant - squared) / 2


def gaussian_layer(
    n_features: int,
    *,
    latent_dim: int,
    hidden_layer_sizes: Sequence[int],
    mixing: str,
    linear_skip: bool,
    scale: str,
    initial_scale: float,
    min_scale: float,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> SemiImplicit:
    """Build a family; with `linear_skip`, latent_dim >= d and initial_scale <= 1, it starts at N(0, I)."""

    def network() -> MultilayerPerceptron:
        return MultilayerPerceptron([latent_dim, *hidden_layer_sizes, n_features], generator, dtype)

    if linear_skip:
        A = torch.eye(n_features, latent_dim, dtype=dtype, device=generator.device) * math.sqrt(
            max(1 - initial_scale**2, 0)
        )
        mean: Map = LinearSkip(A, network().start_at(0.0))
    else:
        mean = network()
    a = math.log(initial_scale**2 - min_scale**2)
    log_variance = (
        Constant(torch.full((n_features,), a, dtype=dtype, device=generator.device))
        if scale == "constant"
        else network().start_at(a)
    )
    return SemiImplicit(
        mean, log_variance, n_features=n_features, latent_dim=latent_dim, mixing=mixing, min_scale=min_scale
    )
