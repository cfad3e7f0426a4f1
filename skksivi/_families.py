r"""Semi-implicit families: a mixing draw z, then a Gaussian layer :math:`x = \mu(z) + \sigma(z) \xi`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

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


class SemiImplicit(nn.Module):
    r"""The family q(x) = E_q(z) N(x; mu(z), diag sigma(z)^2), with sigma^2 = exp(a) + floor^2.

    Parameters
    ----------
    mean : Module
        The map mu from (n, latent_dim) to (n, d).
    log_variance : Module
        The map a from (n, latent_dim) to (d,) or (n, d).
    latent_dim : int
        Dimension of z.
    mixing : {"normal"}
        Distribution of z.
    min_scale : float
        The floor of sigma, which keeps the layer from collapsing onto its mean.
    """

    def __init__(
        self, mean: nn.Module, log_variance: nn.Module, *, latent_dim: int, mixing: str, min_scale: float
    ) -> None:
        super().__init__()
        self.mean = mean
        self.log_variance = log_variance
        self.latent_dim = latent_dim
        self.mixing = mixing
        self.min_scale = min_scale

    def sigma(self, z: Tensor) -> Tensor:
        """Return the standard deviations, shape (d,) or (n, d)."""
        return (self.log_variance(z).exp() + self.min_scale**2).sqrt()

    def draw_latent(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw z of shape (n, latent_dim) from the mixing distribution."""
        return MIXINGS[self.mixing](self._normal(n, self.latent_dim, generator))

    def draw(self, n: int, generator: torch.Generator) -> Draw:
        r"""Draw n rows, :math:`x = \mu(z) + \sigma(z) \xi` with conditional score :math:`-\xi / \sigma(z)`."""
        z = self.draw_latent(n, generator)
        mu, sigma = self.mean(z), self.sigma(z)
        xi = self._normal(n, mu.shape[-1], generator)
        return Draw(mu + sigma * xi, -xi / sigma)

    def log_prob(self, x: Tensor, z: Tensor) -> Tensor:
        """Return log q(x_i | z_j) for all pairs, shape (n, k), of x (n, d) and z (k, latent_dim)."""
        mu = self.mean(z)
        precision = self.sigma(z).pow(-2).expand_as(mu)
        squared = x.square() @ precision.mT - 2 * x @ (precision * mu).mT + (precision * mu.square()).sum(-1)
        log_determinant = precision.log().sum(-1) - x.shape[-1] * math.log(2 * math.pi)
        return (log_determinant - squared) / 2

    def _normal(self, n: int, dim: int, generator: torch.Generator) -> Tensor:
        like = next(self.parameters())
        return torch.randn(n, dim, generator=generator, dtype=like.dtype, device=like.device)


class LinearSkip(nn.Module):
    """The map z -> A z + network(z)."""

    def __init__(self, linear: nn.Linear, network: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.network = network

    def forward(self, z: Tensor) -> Tensor:
        """Map (n, latent_dim) to (n, d)."""
        return self.linear(z) + self.network(z)


class Constant(nn.Module):
    """A free vector that ignores z."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)

    def forward(self, z: Tensor) -> Tensor:
        """Return the vector, shape (d,)."""
        return self.value


def multilayer_perceptron(sizes: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    """Return a ReLU network whose weights come from `generator`, by torch's own rule for linear layers."""
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(sizes):
        linear = nn.utils.skip_init(nn.Linear, n_in, n_out, device=generator.device)
        bound = 1 / math.sqrt(n_in)
        nn.init.uniform_(linear.weight, -bound, bound, generator=generator)
        nn.init.uniform_(linear.bias, -bound, bound, generator=generator)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _last_layer_at(network: nn.Sequential, value: float) -> nn.Sequential:
    """Make the network start as a constant function."""
    nn.init.zeros_(network[-1].weight)  # type: ignore[arg-type]
    nn.init.constant_(network[-1].bias, value)  # type: ignore[arg-type]
    return network


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
    mean: nn.Module = multilayer_perceptron([latent_dim, *hidden_layer_sizes, n_features], generator)
    if linear_skip:
        linear = nn.utils.skip_init(nn.Linear, latent_dim, n_features, bias=False, device=generator.device)
        nn.init.eye_(linear.weight)
        with torch.no_grad():
            linear.weight.mul_(math.sqrt(max(1 - initial_scale**2, 0)))
        mean = LinearSkip(linear, _last_layer_at(mean, 0.0))  # type: ignore[arg-type]
    start = math.log(initial_scale**2 - min_scale**2)
    log_variance: nn.Module = (
        Constant(torch.full((n_features,), start, device=generator.device))
        if scale == "constant"
        else _last_layer_at(multilayer_perceptron([latent_dim, *hidden_layer_sizes, n_features], generator), start)
    )
    family = SemiImplicit(mean, log_variance, latent_dim=latent_dim, mixing=mixing, min_scale=min_scale)
    return family.to(dtype)
