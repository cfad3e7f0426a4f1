r"""Semi-implicit families: a mixing draw z, then a Gaussian layer :math:`x = \mu(z) + \sigma(z) \xi`, or several."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from skksivi.mixing import Mixing
from skksivi.parameters import Scale
from skksivi.score._score import DifferentiableScore, ScoreFunction

# Parameterised functions of z, whose gradients are written by hand

#: Takes the gradient of a loss in the value of a map, (n, d), and sets `grad` of the parameters. Returns a function
#: that computes the gradient in z, (n, latent_dim).
Pullback = Callable[[Tensor], Callable[[], Tensor]]


class Map(nn.Module, ABC):
    """A parameterised function of z with a hand-written pullback of gradients."""

    @property
    @abstractmethod
    def is_affine(self) -> bool:
        """Whether it is an affine function now, as most are at the start of a training."""

    @abstractmethod
    def forward(self, z: Tensor) -> Tensor:
        """Map (n, latent_dim) to (n, d), or to (d,) for all rows alike."""

    @abstractmethod
    def jacobian(self, z: Tensor) -> Tensor:
        """Return the derivatives (n, d, latent_dim) at z (n, latent_dim)."""

    @abstractmethod
    def with_pullback(self, z: Tensor) -> tuple[Tensor, Pullback]:
        """Return the value at z and the pullback. To be called without automatic differentiation, on parameters that
        have a `grad`.
        """


class Constant(Map):
    """A free vector that ignores z."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)

    @property
    def is_affine(self) -> bool:
        return True

    def forward(self, z: Tensor) -> Tensor:
        return self.value

    def jacobian(self, z: Tensor) -> Tensor:
        return z.new_zeros(len(z), len(self.value), z.shape[1])

    def with_pullback(self, z: Tensor) -> tuple[Tensor, Pullback]:
        def pullback(dy: Tensor) -> Callable[[], Tensor]:
            torch.sum(dy, 0, out=self.value.grad)
            return lambda: torch.zeros_like(z)

        return self.value, pullback


class MultilayerPerceptron(Map):
    """A ReLU network whose weights are drawn by torch's rule for linear layers.

    Parameters
    ----------
    sizes : sequence of int
        Sizes of the input, the hidden layers and the output.
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
    def of(cls, layers: list[nn.Linear]) -> MultilayerPerceptron:
        """Return the network of these linear layers."""
        network = cls([], torch.Generator(), torch.float32)
        network.layers.extend(layers)
        return network

    @property
    def linear(self) -> list[nn.Linear]:
        return [layer for layer in self.layers if isinstance(layer, nn.Linear)]

    @property
    def shape(self) -> tuple[int, int]:
        """The dimensions of z and of the value."""
        layers = self.linear
        return layers[0].in_features, layers[-1].out_features

    @property
    def is_affine(self) -> bool:
        return len(self.layers) == 1 or not bool(self.linear[-1].weight.any())

    def forward(self, z: Tensor) -> Tensor:
        *hidden, last = self.layers
        for layer in hidden:
            z = layer(z).relu()
        return last(z)

    def jacobian(self, z: Tensor) -> Tensor:
        first, *others = self.linear
        J = first.weight.mT.expand(len(z), -1, -1)  # transposed: one product of matrices a layer
        z = first(z)
        for layer in others:
            J = (J * (z > 0)[:, None]) @ layer.weight.mT
            z = layer(z.relu())
        return J.mT

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


class LinearSkip(Map):
    """The map z -> A z + network(z)."""

    def __init__(self, A: Tensor, network: Map) -> None:
        super().__init__()
        self.A = nn.Parameter(A)
        self.network = network

    @property
    def is_affine(self) -> bool:
        return self.network.is_affine

    def forward(self, z: Tensor) -> Tensor:
        return z @ self.A.T + self.network(z)

    def jacobian(self, z: Tensor) -> Tensor:
        return self.A + self.network.jacobian(z)

    def with_pullback(self, z: Tensor) -> tuple[Tensor, Pullback]:
        out, pull_network = self.network.with_pullback(z)

        def pullback(dy: Tensor) -> Callable[[], Tensor]:
            torch.mm(dy.T, z, out=self.A.grad)
            dz = pull_network(dy)
            return lambda: dz() + dy @ self.A

        return torch.addmm(out, z, self.A.T), pullback


class Residual(Map):
    """The map z -> z + unit * network(z), with a fixed unit (d,) for each coordinate."""

    unit: Tensor

    def __init__(self, unit: Tensor, network: Map) -> None:
        super().__init__()
        self.register_buffer("unit", unit)
        self.network = network

    @property
    def is_affine(self) -> bool:
        return self.network.is_affine

    def forward(self, z: Tensor) -> Tensor:
        return torch.addcmul(z, self.unit, self.network(z))

    def jacobian(self, z: Tensor) -> Tensor:
        return torch.eye(z.shape[1]).to(z) + self.unit[:, None] * self.network.jacobian(z)

    def with_pullback(self, z: Tensor) -> tuple[Tensor, Pullback]:
        out, pull_network = self.network.with_pullback(z)

        def pullback(dy: Tensor) -> Callable[[], Tensor]:
            dz = pull_network(self.unit * dy)
            return lambda: dz() + dy

        return torch.addcmul(z, self.unit, out), pullback


# A layer


class Draw(NamedTuple):
    """Draws and the score of the conditional that each came from, both of shape (n, d)."""

    x: Tensor
    score: Tensor


class Drawn(NamedTuple):
    """Draws x of a family, the target's score there, and the score of the conditional that each came from.

    All are of shape (n, d), or (T, n, d) where a family has T layers.
    """

    x: Tensor
    target_score: Tensor
    conditional_score: Tensor


#: Takes the gradients of a loss in the fields of `Drawn`, which it may overwrite, and sets the gradients of the
#: parameters.
DrawPullback = Callable[[Tensor, Tensor, Tensor], None]


class Family(Protocol):
    """A family that the objectives of this package can train."""

    n_features: int

    def draw_with_pullback(
        self, n: int, generator: torch.Generator, score: DifferentiableScore
    ) -> tuple[Drawn, DrawPullback]:
        """Draw n rows of every layer; return them and the pullback of gradients to the parameters."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the trainable parameters."""


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
        z, xi = self._noise(n, generator)
        mu, sigma, _ = self.conditional_with_pullback(z)
        return Draw(torch.addcmul(mu, sigma, xi), xi / -sigma)

    def conditional_with_pullback(
        self, z: Tensor
    ) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Callable[[], Tensor]]]:
        r"""Return mu(z) (n, d), sigma(z) (d,) or (n, d), and the pullback of gradients to the parameters.

        It takes the gradient of a loss in mu, (n, d), and terms (n, d) that are, or sum over rows to, the gradient in
        sigma. It returns a function that computes the gradient in z through mu. With
        :math:`\sigma^2 = e^a + \text{floor}^2` it uses
        :math:`\partial L / \partial a = \partial_\sigma L\, e^a / (2 \sigma)`.
        """
        mu, pull_mean = self.mean.with_pullback(z)
        a, pull_log_variance = self.log_variance.with_pullback(z)
        e_a = a.exp()
        sigma = (e_a + self.min_scale**2).sqrt_()

        def pullback(dmu: Tensor, dsigma: Tensor) -> Callable[[], Tensor]:
            pull_log_variance(dsigma * (e_a / (2 * sigma)))
            return pull_mean(dmu)

        return mu, sigma, pullback

    def draw_with_pullback(
        self, n: int, generator: torch.Generator, score: DifferentiableScore
    ) -> tuple[Drawn, DrawPullback]:
        r"""Draw n rows; return them and the pullback of gradients to the parameters.

        With :math:`x = \mu + \sigma \xi`, the conditional score :math:`c = -\xi / \sigma` and the target's s(x), the
        gradient in x is :math:`g = \partial_x L + J_s^\top \partial_s L`, and the gradient in sigma is
        :math:`(g + \partial_c L / \sigma^2)\, \xi`.
        """
        z, xi = self._noise(n, generator)
        mu, sigma, pull_conditional = self.conditional_with_pullback(z)
        x = torch.addcmul(mu, sigma, xi)
        s, pull_score = score.with_pullback(x)

        def pullback(dx: Tensor, ds: Tensor, dc: Tensor) -> None:
            g = dx.add_(pull_score(ds))
            pull_conditional(g, torch.addcdiv(g, dc, sigma.square()).mul_(xi))

        return Drawn(x, s, xi / -sigma), pullback

    def _noise(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw z (n, latent_dim) and xi (n, d)."""
        z = self.draw_latent(n, generator)
        return z, torch.empty(n, self.n_features, dtype=z.dtype, device=z.device).normal_(generator=generator)

    def log_prob(self, x: Tensor, z: Tensor) -> Tensor:
        """Return log q(x_i | z_j) for all pairs, shape (n, k), of x (n, d) and z (k, latent_dim)."""
        mu = self.mean(z)
        return diagonal_gaussian_log_prob(x, mu, self.sigma(z).pow(-2).expand_as(mu))


def covariance_kept(sigma: Tensor, latent_dim: int) -> Tensor:
    """Return the A (d, latent_dim) for which A z + sigma xi has unit covariance if z does."""
    return torch.eye(len(sigma), latent_dim).to(sigma) * (1 - sigma.square()).clamp_min(0).sqrt()[:, None]


def gaussian_layer(
    initial_scale: Tensor,
    *,
    scale: Scale,
    mixing: Mixing,
    hidden_layer_sizes: Sequence[int],
    generator: torch.Generator,
    skip: Tensor | None = None,
    residual: bool = False,
) -> SemiImplicit:
    """Build a family whose sigma starts at `initial_scale` (d,), in its dtype.

    With a `skip` A (d, latent_dim) it starts at x = A z + sigma xi. With `residual` the network moves a z of d
    dimensions in units of `initial_scale`.
    """
    sigma, zero, d = initial_scale, torch.zeros_like(initial_scale), len(initial_scale)

    def network() -> MultilayerPerceptron:
        return MultilayerPerceptron([mixing.latent_dim, *hidden_layer_sizes, d], generator, sigma.dtype)

    if residual:
        mean: Map = Residual(sigma.clone(), network().start_at(zero))
    elif skip is not None:
        mean = LinearSkip(skip.to(sigma), network().start_at(zero))
    else:
        mean = network()
    a = (sigma.square() - scale.floor**2).log()
    log_variance = Constant(a.clone()) if scale.form == "constant" else network().start_at(a)
    return SemiImplicit(mean, log_variance, n_features=d, mixing=mixing, min_scale=scale.floor)


def diagonal_gaussian_log_prob(x: Tensor, mu: Tensor, precision: Tensor) -> Tensor:
    """Return log N(x_i; mu_j, diag(1 / precision_j)) for all pairs, shape (n, k)."""
    c = mu.mean(0)  # far from the origin the products would lose digits
    x, mu = x - c, mu - c
    squared = x.square() @ precision.mT - 2 * x @ (precision * mu).mT + (precision * mu.square()).sum(-1)
    log_determinant = precision.log().sum(-1) - x.shape[-1] * math.log(2 * math.pi)
    return (log_determinant - squared) / 2


# A hierarchy of layers


class Hierarchy(nn.Module):
    r"""The hierarchical family of the paper, :math:`x_T \sim q_T`, then for t = T-1, ..., 0

    .. math::
        x_t = \mu_t(x_{t+1}) + \sigma_t \odot \xi_t, \qquad
        \mu_t(x) = x + \bar\mu_t(x) + \tfrac12 \sigma_{\mathrm{ini}}^2 \odot s_t(x),

    with networks :math:`\bar\mu_t` that start at zero and the scores of the bridging distributions,
    :math:`s_t = (1 - \lambda_t) s_{\mathrm{base}} + \lambda_t s_p`, so that it starts as a Langevin chain. Its steps
    are clipped to :math:`5 \sqrt d` in units of :math:`\sigma_{\mathrm{ini}}`: scores that grow faster than linearly
    would make it diverge. Layer t is drawn given layer t + 1; draws are stacked as (T, n, d), the last layer
    (t = 0) first.

    Parameters
    ----------
    networks : sequence of Map
        One per layer.
    mixing : Mixing
        The base q_T.
    levels : sequence of float
        The lambdas, layer 0 first.
    initial_scale : Tensor of shape (d,)
    min_scale : float
    """

    half_square: Tensor

    def __init__(
        self,
        networks: Sequence[Map],
        *,
        mixing: Mixing,
        levels: Sequence[float],
        initial_scale: Tensor,
        min_scale: float,
    ) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.mixing = mixing
        self.levels = [float(level) for level in levels]
        self.min_scale = min_scale
        self.n_features = len(initial_scale)
        a = (initial_scale.square() - min_scale**2).log()
        self.log_variances = nn.ModuleList(Constant(a.clone()) for _ in self.levels)
        self.register_buffer("half_square", initial_scale.square() / 2)

    @classmethod
    def langevin(
        cls,
        levels: Sequence[float],
        *,
        mixing: Mixing,
        hidden_layer_sizes: Sequence[int],
        initial_scale: Tensor,
        min_scale: float,
        generator: torch.Generator,
    ) -> Hierarchy:
        """Return a hierarchy whose networks start at zero, so that it is a chain of Langevin steps."""
        d, zero = len(initial_scale), torch.zeros_like(initial_scale)
        sizes = [d, *hidden_layer_sizes, d]
        networks = [MultilayerPerceptron(sizes, generator, zero.dtype).start_at(zero) for _ in levels]
        return cls(networks, mixing=mixing, levels=levels, initial_scale=initial_scale, min_scale=min_scale)

    @property
    def a(self) -> list[Constant]:
        """The `log_variances`, by their name in files."""
        return [a for a in self.log_variances if isinstance(a, Constant)]

    @property
    def maps(self) -> list[Map]:
        return [network for network in self.networks if isinstance(network, Map)]

    @property
    def n_layers(self) -> int:
        """The T of the formula."""
        return len(self.levels)

    def bridge(self, t: int, x: Tensor, s_p: Tensor) -> Tensor:
        """Return s_t at x (n, d), given the target's score there, the paper's Eq. (geometric)."""
        level = self.levels[t]
        return s_p if level == 1 else torch.add(level * s_p, self.mixing.score(x), alpha=1 - level)

    def drift(self, t: int, x: Tensor, s_p: Tensor) -> Tensor:
        """Return the clipped Langevin step at x (n, d)."""
        sigma = (2 * self.half_square).sqrt()
        w = sigma / 2 * self.bridge(t, x, s_p)
        norm = torch.linalg.vector_norm(w, dim=1, keepdim=True)
        return sigma * (5 * math.sqrt(self.n_features) / norm).clamp_max(1) * w

    def mean_with_pullback(self, t: int, x: Tensor, s_p: Tensor) -> tuple[Tensor, Pullback]:
        """Return mu_t at x (n, d), and the pullback through its network."""
        residual, pull = self.maps[t].with_pullback(x)
        return x + residual + self.drift(t, x, s_p), pull

    def sigma(self, t: int) -> Tensor:
        """Return the standard deviations of a layer, shape (d,)."""
        return (self.a[t].value.exp() + self.min_scale**2).sqrt()

    def draw(
        self, n: int, generator: torch.Generator, score_fn: Callable[[Tensor], Tensor], layer: int = 0
    ) -> Tensor:
        """Draw n rows (n, d) of a layer."""
        return self.path(n, generator, score_fn, layer)[0]

    def path(
        self, n: int, generator: torch.Generator, score_fn: Callable[[Tensor], Tensor], layer: int = 0
    ) -> list[Tensor]:
        """Draw n rows (n, d) of a layer and all above it, each row given the row of the next; that layer first."""
        layers = [self.mixing(n, self.half_square, generator)]
        for t in reversed(range(layer, self.n_layers)):
            mu = self.mean_with_pullback(t, layers[0], score_fn(layers[0]))[0]
            layers.insert(0, mu + self.sigma(t) * torch.empty_like(mu).normal_(generator=generator))
        return layers

    def draw_with_pullback(
        self, n: int, generator: torch.Generator, score: DifferentiableScore
    ) -> tuple[Drawn, DrawPullback]:
        """Draw n rows of every layer, with the scores s_t; return them, (T, n, d), and the pullback."""
        T = self.n_layers
        x = self.mixing(n, self.half_square, generator)
        sigmas = [self.sigma(t) for t in range(T)]
        layers: list[_Layer] = []  # index 0 first
        s_p, _ = score.with_pullback(x)
        for t in reversed(range(T)):
            mu, pull_mean = self.mean_with_pullback(t, x, s_p)
            xi = torch.empty_like(mu).normal_(generator=generator)
            x = torch.addcmul(mu, sigmas[t], xi)
            s_p, pull_score = score.with_pullback(x)
            layers.insert(0, _Layer(x, self.bridge(t, x, s_p), xi, pull_mean, pull_score))

        def pullback(dx: Tensor, ds: Tensor, dc: Tensor) -> None:
            for t, layer in enumerate(layers):  # each is trained for its own target alone
                level = self.levels[t]
                g = dx[t] + layer.pull_score(level * ds[t])
                if level < 1:
                    g.addcmul_(self.mixing.score_slope(layer.x), ds[t], value=1 - level)
                layer.pull_mean(g)
                self._pull_scale(t, g, dc[t], layer.xi, sigmas[t])

        drawn = zip(*((a.x, a.bridge, a.xi / -sigma) for a, sigma in zip(layers, sigmas, strict=True)), strict=True)
        return Drawn(*(torch.stack(part) for part in drawn)), pullback

    def _pull_scale(self, t: int, dx: Tensor, dc: Tensor, xi: Tensor, sigma: Tensor) -> None:
        """Set the gradient of a in sigma^2 = e^a + floor^2; the conditional score is -xi / sigma."""
        a = self.a[t].value
        d_sigma = ((dx + dc / sigma.square()) * xi).sum(0)
        torch.mul(d_sigma, a.exp() / (2 * sigma), out=a.grad)

    def log_conditional(self, t: int, low: Tensor, high: Tensor, s_p: Tensor) -> Tensor:
        """Return log N(x_i; mu_t(x'_i), sigma_t^2) (n,) of x (n, d) given x' (n, d) above it, with scores s_p."""
        mu, sigma = self.mean_with_pullback(t, high, s_p)[0], self.sigma(t)
        log_scale = sigma.log().sum() + len(sigma) / 2 * math.log(2 * math.pi)
        return -((low - mu) / sigma).square().sum(1) / 2 - log_scale


class _Layer(NamedTuple):
    """Draws of a layer, the scores s_t there, their noise, and their pullbacks."""

    x: Tensor
    bridge: Tensor
    xi: Tensor
    pull_mean: Pullback
    pull_score: ScoreFunction
