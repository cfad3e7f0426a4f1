"""The loop of the public code, operation by operation, in plain autograd, with several seeds as a leading axis.

It says what the paper's settings give without this package: no whitening, no guard, no fused step, one Adam. What
differs from the public code is that the seeds are independent fits side by side, that distances come from products of
matrices, and that a median is taken over the pairs of 128 draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


def median_of(pairs: Tensor) -> Tensor:
    """Return the median, (..., 1, 1), of the pairs (..., n, n) of the first 128 draws."""
    return pairs[..., :128, :128].flatten(-2).median(-1).values[..., None, None]


def gaussian(x: Tensor, y: Tensor) -> Tensor:
    """Return exp(-|x - y|^2 / (2 h^2)), with 2 h^2 the median over log(N + 1), through which gradients flow."""
    squared = x.square().sum(-1)[..., :, None] + y.square().sum(-1)[..., None, :] - 2 * x @ y.mT
    return torch.exp(-squared * (math.log(x.shape[-2] + 1) / median_of(squared)))


def riesz(x: Tensor, y: Tensor) -> Tensor:
    """Return the l1 form over the median of itself, without its gradient, times log(N + 1)."""
    k = x.abs().sum(-1)[..., :, None] + y.abs().sum(-1)[..., None, :] - torch.cdist(x, y, p=1)
    return k * (math.log(x.shape[-2] + 1) / median_of(k.detach()))


def inverse_covariance(x: Tensor) -> Tensor:
    """Return the metric on <f, f'> of the public code, from draws (..., n, d)."""
    return covariance(x).inverse()


def covariance(x: Tensor) -> Tensor:
    """Return the metric that is invariant under linear maps: scores transform like gradients."""
    u = x.detach() - x.detach().mean(-2, keepdim=True)
    return u.mT @ u / (x.shape[-2] - 1) + 1e-8 * torch.eye(x.shape[-1])


@dataclass(kw_only=True)
class PlainKSIVI:
    """KSIVI by the vanilla estimator, for several seeds at once; after `fit`, `draw` returns (n_seeds, n, d)."""

    latent_dim: int
    width: int
    log_variance: float
    n_draws: int
    max_iter: int
    learning_rate: float
    decay_every: int
    betas: tuple[float, float] = (0.9, 0.999)
    kernel: object = gaussian
    metric: object = None
    annealed: bool = False
    entropic: float = 0.0
    entropic_until: int = 0
    n_seeds: int = 3
    random_state: int = 0

    def fit(self, target, at=()):
        """Train; return what `draw(1000)` gives after each number of iterations in `at`."""
        self.generator = torch.Generator().manual_seed(self.random_state)
        sizes = (self.latent_dim, self.width, self.width, target.n_features)
        self.layers = [self._linear(*pair) for pair in pairwise(sizes)]
        self.log_var = torch.full((self.n_seeds, 1, target.n_features), self.log_variance, requires_grad=True)
        parameters = [self.log_var, *(p for layer in self.layers for p in layer)]
        adam = torch.optim.Adam(parameters, lr=self.learning_rate, betas=self.betas)
        schedule = torch.optim.lr_scheduler.StepLR(adam, self.decay_every, 0.9)
        seen = []
        for t in range(1, self.max_iter + 1):
            temperature = min(1.0, 0.1 + t / (self.max_iter // 2)) if self.annealed else 1.0
            loss = self.loss(target, temperature, self.entropic * (t < self.entropic_until))
            adam.zero_grad()
            loss.sum().backward()
            adam.step()
            schedule.step()
            if t in at:
                seen.append(self.draw(1000))
        return seen

    def loss(self, target, temperature, entropic):
        """Return mean <f, f'> k(x, x') for each seed, less what holds the draws together."""
        (x, f), (y, g) = (self._draws_and_scores(target, temperature) for _ in range(2))
        products = (f if self.metric is None else f @ self.metric(x)) @ g.mT
        loss = (products * self.kernel(x, y)).mean((-2, -1))
        return (
            loss - entropic * temperature * target.log_prob(x.flatten(0, 1)).view(self.n_seeds, -1).mean(-1)
            if entropic
            else loss
        )

    def _draws_and_scores(self, target, temperature):
        """Return x = mu(z) + sigma xi, and f = s_p(x) + xi / sigma, the second with its graph."""
        x, scaled_noise = self._forward(self.n_draws)
        s = target.score_fn(x.flatten(0, 1)).view_as(x)
        return x, temperature * s + scaled_noise

    def _forward(self, n):
        z = torch.randn(self.n_seeds, n, self.latent_dim, generator=self.generator)
        *hidden, (W, b) = self.layers
        for V, c in hidden:
            z = torch.relu(z @ V + c)
        sigma = (self.log_var.clamp_min(-20) / 2).exp()
        xi = torch.randn(self.n_seeds, n, W.shape[-1], generator=self.generator)
        return z @ W + b + sigma * xi, xi / sigma

    @torch.no_grad()
    def draw(self, n):
        return self._forward(n)[0]

    def _linear(self, n_in, n_out):
        """Return weights and biases as torch draws them."""
        shapes = ((self.n_seeds, n_in, n_out), (self.n_seeds, 1, n_out))
        uniform = (2 * torch.rand(shape, generator=self.generator) - 1 for shape in shapes)
        return tuple((u / math.sqrt(n_in)).requires_grad_() for u in uniform)
