r"""Semi-implicit families: a mixing draw z, then a Gaussian layer :math:`x = \mu(z) + \sigma(z) \xi`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from skksivi.families._maps import Constant, LinearSkip, Map, MultilayerPerceptron, Residual
from skksivi.mixing import Mixing


class Draw(NamedTuple):
    """Draws and the score of the conditional that each came from, both of shape (..., n, d)."""

    x: Tensor
    score: Tensor


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


def diagonal_gaussian_log_prob(x: Tensor, mu: Tensor, precision: Tensor) -> Tensor:
    """Return log N(x_i; mu_j, diag(1 / precision_j)) for all pairs, shape (n, k)."""
    c = mu.mean(0)  # far from the origin the products would cancel
    x, mu = x - c, mu - c
    squared = x.square() @ precision.mT - 2 * x @ (precision * mu).mT + (precision * mu.square()).sum(-1)
    log_determinant = precision.log().sum(-1) - x.shape[-1] * math.log(2 * math.pi)
    return (log_determinant - squared) / 2
