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


class Mixing(nn.Module, ABC):
    """A distribution q(z) that can be sampled; nothing else is asked of it."""

    latent_dim: int

    @abstractmethod
    def forward(self, n: int, like: Tensor, generator: torch.Generator) -> Tensor:
        """Draw z of shape (n, latent_dim), of the type and on the device of `like`."""


class Normal(Mixing):
    """The standard normal."""

    def __init__(self, latent_dim: int) -> None:
        super().__init__()
        self.latent_dim = latent_dim

    def forward(self, n: int, like: Tensor, generator: torch.Generator) -> Tensor:
        z = torch.empty(n, self.latent_dim, dtype=like.dtype, device=like.device)
        return z.normal_(generator=generator)


class Bootstrap(Mixing):
    r"""A smoothed bootstrap of points near the target.

    .. math:: z = \bar c + \sqrt{1 - j^2}\, (c_i - \bar c) + \frac{j}{\sqrt 2} (c_a - c_b)

    with points c_i, c_a, c_b drawn from those of one mode, of mean :math:`\bar c`. It has the mean and the covariance
    of the points, mode by mode, whatever the scale of each.

    Parameters
    ----------
    points : Tensor of shape (n, d)
        Those of one mode after those of another.
    n_of_mode : list of int
        How many belong to each; they sum to n.
    jitter : float, default=0.2
        The j of the formula.
    """

    points: Tensor
    first: Tensor
    size: Tensor

    def __init__(self, points: Tensor, n_of_mode: Sequence[int], jitter: float = 0.2) -> None:
        super().__init__()
        self.latent_dim = points.shape[1]
        shrink = math.sqrt(1 - jitter**2)
        self.reach = jitter / (math.sqrt(2) * shrink)
        parts = [c.mean(0).lerp(c, shrink) for c in points.split(list(n_of_mode))]
        size = torch.tensor(n_of_mode, device=points.device)
        self.register_buffer("points", torch.cat(parts))
        self.register_buffer("first", (size.cumsum(0) - size).repeat_interleave(size))
        self.register_buffer("size", size.repeat_interleave(size))

    def forward(self, n: int, like: Tensor, generator: torch.Generator) -> Tensor:
        uniform = torch.rand(3, n, generator=generator, device=like.device, dtype=torch.float64)
        i = (uniform[0] * len(self.points)).long()
        others = (self.first[i] + (uniform[1:] * self.size[i]).long()).flatten()
        c_a, c_b = self.points.index_select(0, others).chunk(2)
        return torch.add(self.points.index_select(0, i), c_a - c_b, alpha=self.reach).to(like.dtype)


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

    def start_at(self, value: Tensor) -> MultilayerPerceptron:
        """Make the network start as a constant function of value (d,); return it."""
        last: Any = self.layers[-1]
        with torch.no_grad():
            last.weight.zero_()
            last.bias.copy_(value)
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
    mixing : Mixing
        The distribution of z.
    min_scale : float
        The floor of sigma, which keeps the layer from collapsing onto its mean.
    """

    def __init__(self, mean: Map, log_variance: Map, *, n_features: int, mixing: Mixing, min_scale: float) -> None:
        super().__init__()
        self.mean = mean
        self.log_variance = log_variance
        self.n_features = n_features
        self.mixing = mixing
        self.min_scale = min_scale

    def sigma(self, z: Tensor) -> Tensor:
        """Return the standard deviations, shape (d,) or (n, d)."""
        return (self.log_variance(z).exp() + self.min_scale**2).sqrt()

    def draw_latent(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw z of shape (n, latent_dim) from the mixing distribution."""
        return self.mixing(n, next(self.parameters()), generator)

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
        z = self.draw_latent(n, generator)
        xi = torch.empty(n, self.n_features, dtype=z.dtype, device=z.device).normal_(generator=generator)
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
    mixing: Mixing,
    hidden_layer_sizes: Sequence[int],
    linear_skip: bool,
    scale: str,
    initial_scale: float | Tensor,
    min_scale: float,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> SemiImplicit:
    """Build a family whose sigma starts at `initial_scale`, a number or a vector (d,).

    With `linear_skip`, a z of d or more dimensions and a scale of at most one, it has the mean and covariance of z.
    """
    options: Any = {"dtype": dtype, "device": generator.device}
    sigma = torch.as_tensor(initial_scale, **options).expand(n_features)

    def network() -> MultilayerPerceptron:
        return MultilayerPerceptron([mixing.latent_dim, *hidden_layer_sizes, n_features], generator, dtype)

    if linear_skip:
        A = torch.eye(n_features, mixing.latent_dim, **options) * (1 - sigma.square()).clamp_min(0).sqrt()[:, None]
        mean: Map = LinearSkip(A, network().start_at(torch.zeros_like(sigma)))
    else:
        mean = network()
    a = (sigma.square() - min_scale**2).log()
    log_variance = Constant(a.clone()) if scale == "constant" else network().start_at(a)
    return SemiImplicit(mean, log_variance, n_features=n_features, mixing=mixing, min_scale=min_scale)
