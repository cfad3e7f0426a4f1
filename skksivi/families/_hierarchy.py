"""The hierarchical family of the paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from skksivi.families._layer import Constant, Drawn, DrawPullback, Map, MultilayerPerceptron, Pullback
from skksivi.mixing import Mixing
from skksivi.score._score import DifferentiableScore, ScoreFunction


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
