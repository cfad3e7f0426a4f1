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


#: How much of the spread of a smoothed bootstrap is noise, at the root.
JITTER = 0.2


class Mixing(nn.Module, ABC):
    """A distribution q(z) that can be sampled; nothing else is asked of it."""

    latent_dim: int

    @abstractmethod
    def forward(self, n: int, like: Tensor, generator: torch.Generator) -> Tensor:
        """Draw z of shape (n, latent_dim), of the type and on the device of `like`."""

    def score(self, z: Tensor) -> Tensor:
        """Return the gradient of a log-density near that of z, by default that of the standard normal."""
        return -z

    def score_slope(self, z: Tensor) -> Tensor:
        """Return the diagonal of the Jacobian of `score`, which has no other entries, shape (n, latent_dim)."""
        return -torch.ones_like(z)


class Normal(Mixing):
    """The standard normal."""

    def __init__(self, latent_dim: int) -> None:
        super().__init__()
        self.latent_dim = latent_dim

    def forward(self, n: int, like: Tensor, generator: torch.Generator) -> Tensor:
        z = torch.empty(n, self.latent_dim, dtype=like.dtype, device=like.device)
        return z.normal_(generator=generator)


class StudentT(Mixing):
    r"""Independent Student t entries, by Bailey's polar method.

    .. math:: z = \sqrt{\nu (U^{-2 / \nu} - 1)} \cos(2 \pi V), \quad U, V \sim U(0, 1).

    References
    ----------
    Bailey, R. (1994). Polar generation of random variates with the t-distribution. Mathematics of Computation 62.
    """

    def __init__(self, latent_dim: int, df: float) -> None:
        super().__init__()
        self.latent_dim = latent_dim
        self.df = df

    def forward(self, n: int, like: Tensor, generator: torch.Generator) -> Tensor:
        shape, options = (2, n, self.latent_dim), {"dtype": torch.float64, "device": like.device}
        u, v = torch.rand(shape, generator=generator, **options).unbind()  # type: ignore[call-overload]
        u = 1 - u  # in (0, 1]
        return (self.df * torch.expm1(u.log() * (-2 / self.df))).sqrt().mul_((2 * math.pi * v).cos()).to(like.dtype)

    def score(self, z: Tensor) -> Tensor:
        """Return the gradient of log q at z (n, latent_dim)."""
        return -(self.df + 1) * z / (self.df + z.square())

    def score_slope(self, z: Tensor) -> Tensor:
        """Return the diagonal of the Jacobian of `score`, all of it, shape (n, latent_dim)."""
        squares = z.square()
        return (self.df + 1) * (squares - self.df) / (self.df + squares).square()


class GaussianMixture(Mixing):
    """A mixture of spherical Gaussians.

    Parameters
    ----------
    means : Tensor of shape (k, latent_dim)
    scales : Tensor of shape (k,)
    weights : Tensor of shape (k,)
        They sum to one.
    """

    means: Tensor
    scales: Tensor
    levels: Tensor

    def __init__(self, means: Tensor, scales: Tensor, weights: Tensor) -> None:
        super().__init__()
        self.latent_dim = means.shape[1]
        self.register_buffer("means", means)
        self.register_buffer("scales", scales)
        self.register_buffer("levels", weights.double().cumsum(0)[:-1])

    def forward(self, n: int, like: Tensor, generator: torch.Generator) -> Tensor:
        uniform = torch.rand(n, generator=generator, dtype=torch.float64, device=like.device)
        k = torch.searchsorted(self.levels, uniform)
        xi = torch.empty(n, self.latent_dim, dtype=self.means.dtype, device=like.device).normal_(generator=generator)
        return torch.addcmul(self.means[k], self.scales[k, None], xi).to(like.dtype)


class Sampler(Mixing):
    """Whatever a function of the number of draws and a generator returns."""

    def __init__(self, sample: Callable[[int, torch.Generator], Tensor], latent_dim: int) -> None:
        super().__init__()
        self.sample = sample
        self.latent_dim = latent_dim

    def forward(self, n: int, like: Tensor, generator: torch.Generator) -> Tensor:
        z = torch.as_tensor(self.sample(n, generator))
        if z.shape != (n, self.latent_dim):
            raise ValueError(
                f"`mixing` returned shape {tuple(z.shape)}, expected {(n, self.latent_dim)}: as many rows as asked "
                "for, each of `latent_dim` entries."
            )
        return z.to(like)


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
    jitter : float, default=JITTER
        The j of the formula.
    """

    points: Tensor
    first: Tensor
    size: Tensor

    def __init__(self, points: Tensor, n_of_mode: Sequence[int], jitter: float = JITTER) -> None:
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
        return diagonal_gaussian_log_prob(x, mu, self.sigma(z).pow(-2).expand_as(mu))


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
    residual: bool = False,
) -> SemiImplicit:
    """Build a family whose sigma starts at `initial_scale`, a number or a vector (d,).

    With `linear_skip`, a z of d or more dimensions and a scale of at most one, it has the mean and covariance of z.
    With `residual` the network moves a z of d dimensions in units of `initial_scale`.
    """
    options: Any = {"dtype": dtype, "device": generator.device}
    sigma = torch.as_tensor(initial_scale, **options).expand(n_features)

    def network() -> MultilayerPerceptron:
        return MultilayerPerceptron([mixing.latent_dim, *hidden_layer_sizes, n_features], generator, dtype)

    if residual:
        mean: Map = Residual(sigma.clone(), network().start_at(torch.zeros_like(sigma)))
    elif linear_skip:
        A = torch.eye(n_features, mixing.latent_dim, **options) * (1 - sigma.square()).clamp_min(0).sqrt()[:, None]
        mean = LinearSkip(A, network().start_at(torch.zeros_like(sigma)))
    else:
        mean = network()
    a = (sigma.square() - min_scale**2).log()
    log_variance = Constant(a.clone()) if scale == "constant" else network().start_at(a)
    return SemiImplicit(mean, log_variance, n_features=n_features, mixing=mixing, min_scale=min_scale)


class Hierarchy(nn.Module):
    r"""The hierarchical family of the paper, :math:`x_T \sim q_T`, then for t = T-1, ..., 0

    .. math::
        x_t = \mu_t(x_{t+1}) + \sigma_t \odot \xi_t, \qquad
        \mu_t(x) = x + \bar\mu_t(x) + \tfrac12 \sigma_{\mathrm{ini}}^2 \odot s_t(x),

    with networks :math:`\bar\mu_t` that start at zero and the scores of the bridge,
    :math:`s_t = (1 - \lambda_t) s_{\mathrm{base}} + \lambda_t s_p`, so that it starts as a Langevin chain. Its steps
    are cut to :math:`5 \sqrt d` in units of :math:`\sigma_{\mathrm{ini}}`: scores that grow faster than linearly
    would throw it out. The layer of index t is drawn from that of index t + 1; draws come stacked as (T, n, d), the
    last layer (t = 0) first.

    Parameters
    ----------
    networks : sequence of Map
        One a layer; or one for all, of which the input is (x, lambda_t).
    mixing : Mixing
        The base q_T.
    levels : sequence of float
        The lambdas, of layer 0 first.
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

    @property
    def n_layers(self) -> int:
        """The T of the formula."""
        return len(self.levels)

    def bridge(self, t: int, x: Tensor, s_p: Tensor) -> Tensor:
        """Return s_t at x (n, d) of the target's score there, the paper's Eq. (geometric)."""
        level = self.levels[t]
        return s_p if level == 1 else torch.add(level * s_p, self.mixing.score(x), alpha=1 - level)

    def drift_with_pullback(self, t: int, x: Tensor, s_p: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the Langevin step at x (n, d), cut, and the map of gradients in it to those in s_t."""
        sigma = (2 * self.half_square).sqrt()
        w = sigma / 2 * self.bridge(t, x, s_p)
        norm = torch.linalg.vector_norm(w, dim=1, keepdim=True)
        factor = (5 * math.sqrt(self.n_features) / norm).clamp_max(1)

        def pullback(g: Tensor) -> Tensor:
            v = sigma * g
            along = (w * v).sum(1, keepdim=True) / norm.square()
            return sigma / 2 * factor * (v - along.where(factor < 1, 0) * w)

        return sigma * factor * w, pullback

    def mean_with_pullback(self, t: int, x: Tensor, s_p: Tensor) -> tuple[Tensor, Pullback, Callable]:
        """Return mu_t at x (n, d), the way back through its network, and that through the Langevin step."""
        network: Any = self.networks[t % len(self.networks)]
        shared = len(self.networks) < self.n_layers
        inputs = torch.cat([x, x.new_full((len(x), 1), self.levels[t])], 1) if shared else x
        residual, pull = network.with_pullback(inputs)
        drift, pull_drift = self.drift_with_pullback(t, x, s_p)
        return x + residual + drift, pull, pull_drift

    def sigma(self, t: int) -> Tensor:
        """Return the standard deviations of a layer, shape (d,)."""
        a: Any = self.log_variances[t]
        return (a.value.exp() + self.min_scale**2).sqrt()

    def draw(
        self, n: int, generator: torch.Generator, score_fn: Callable[[Tensor], Tensor], layer: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Draw n rows of a layer; return the x (n, d) that they were drawn from, and the rows."""
        x = previous = self.mixing(n, self.half_square, generator)
        for t in reversed(range(layer, self.n_layers)):
            previous = x
            mu = self.mean_with_pullback(t, x, score_fn(x))[0]
            x = mu + self.sigma(t) * torch.empty_like(mu).normal_(generator=generator)
        return previous, x

    def draw_with_pullback(
        self, n: int, generator: torch.Generator, score_with_pullback: Any, *, through: bool
    ) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], None]]:
        """Draw n rows of every layer.

        Parameters
        ----------
        n : int
        generator : torch.Generator
        score_with_pullback : callable
            Maps x (n, d) to the target's score and its vector-Jacobian product.
        through : bool
            Whether the loss of a layer is differentiated through the layers that it stands on.

        Returns
        -------
        x : Tensor of shape (T, n, d)
        f : Tensor of shape (T, n, d)
            The scores of the bridge less those of the conditionals.
        pullback : callable
            Takes the gradients of a loss in x and f and sets those of the parameters.
        """
        T, d = self.n_layers, self.n_features
        x = self.mixing(n, self.half_square, generator)
        sigmas = [self.sigma(t) for t in range(T)]
        parts: list[list[Any]] = [[None] * T for _ in range(6)]
        xs, fs, xis, pull_means, pull_drifts, pull_scores = parts
        s_p, _ = score_with_pullback(x)
        for t in reversed(range(T)):
            mu, pull_means[t], pull_drifts[t] = self.mean_with_pullback(t, x, s_p)
            xis[t] = torch.empty_like(mu).normal_(generator=generator)
            xs[t] = x = torch.addcmul(mu, sigmas[t], xis[t])
            s_p, pull_scores[t] = score_with_pullback(x)
            fs[t] = torch.addcdiv(self.bridge(t, x, s_p), xis[t], sigmas[t])

        def pullback(dx: Tensor, df: Tensor) -> None:
            carried, drift = None, 0.0  # what the layer above, of index t - 1, says of x_t and of s_p there
            shared = _Sum(self.networks[0]) if len(self.networks) < T else None
            for t in range(T):
                level, x, g = self.levels[t], xs[t], dx[t]
                g = g + pull_scores[t](level * df[t] + drift)
                if level < 1:
                    g.addcmul_(self.mixing.score_slope(x), df[t], value=1 - level)
                if carried is not None:
                    g += carried
                dz = pull_means[t](g, through)
                if shared is not None:
                    shared.add()
                self._pull_scale(t, g, df[t], xis[t], sigmas[t])
                if through and t + 1 < T:
                    of_score = pull_drifts[t](g)
                    carried = g + (1 - level) * self.mixing.score_slope(xs[t + 1]) * of_score + dz[:, :d]
                    drift = level * of_score
            if shared is not None:
                shared.finish()

        return torch.stack(xs), torch.stack(fs), pullback

    def _pull_scale(self, t: int, dx: Tensor, df: Tensor, xi: Tensor, sigma: Tensor) -> None:
        """Set the gradient of a in sigma^2 = e^a + floor^2; f holds + xi / sigma."""
        a: Any = self.log_variances[t]
        d_sigma = ((dx - df / sigma.square()) * xi).sum(0)
        torch.mul(d_sigma, a.value.exp() / (2 * sigma), out=a.value.grad)

    def log_prob(self, x: Tensor, before: Tensor, score_fn: Callable[[Tensor], Tensor]) -> Tensor:
        """Return log N(x_i; mu_0(x'_j), sigma_0^2), shape (n, k), of x (n, d) and draws x' (k, d) of layer 1."""
        mu = self.mean_with_pullback(0, before, score_fn(before))[0]
        return diagonal_gaussian_log_prob(x, mu, self.sigma(0).pow(-2).expand_as(mu))


def langevin_hierarchy(
    levels: Sequence[float],
    *,
    mixing: Mixing,
    hidden_layer_sizes: Sequence[int],
    initial_scale: Tensor,
    min_scale: float,
    generator: torch.Generator,
    shared_network: bool = False,
) -> Hierarchy:
    """Build a hierarchy whose networks start at zero, so that it is a chain of Langevin steps."""
    d, zero = len(initial_scale), torch.zeros_like(initial_scale)
    sizes = [d + shared_network, *hidden_layer_sizes, d]
    networks = [
        MultilayerPerceptron(sizes, generator, zero.dtype).start_at(zero)
        for _ in range(1 if shared_network else len(levels))
    ]
    return Hierarchy(networks, mixing=mixing, levels=levels, initial_scale=initial_scale, min_scale=min_scale)


class _Sum:
    """The sum of the gradients that several ways back through one network set."""

    def __init__(self, network: nn.Module) -> None:
        self._parameters: list[Any] = list(network.parameters())
        self._totals = [torch.zeros_like(p) for p in self._parameters]

    def add(self) -> None:
        for total, p in zip(self._totals, self._parameters, strict=True):
            total += p.grad

    def finish(self) -> None:
        for total, p in zip(self._totals, self._parameters, strict=True):
            p.grad.copy_(total)


def diagonal_gaussian_log_prob(x: Tensor, mu: Tensor, precision: Tensor) -> Tensor:
    """Return log N(x_i; mu_j, diag(1 / precision_j)) for all pairs, shape (n, k)."""
    c = mu.mean(0)  # far from the origin the products would cancel
    x, mu = x - c, mu - c
    squared = x.square() @ precision.mT - 2 * x @ (precision * mu).mT + (precision * mu.square()).sum(-1)
    log_determinant = precision.log().sum(-1) - x.shape[-1] * math.log(2 * math.pi)
    return (log_determinant - squared) / 2
