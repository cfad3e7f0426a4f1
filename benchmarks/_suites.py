"""Targets of the public suites, on parameters without bounds."""

from __future__ import annotations

import math

import numpy as np
import torch
from posteriors import discounted_sum, tensor
from torch.nn.functional import logsigmoid, pad

from skksivi.targets import Target

#: The walk that the public suites observe: thirty points, of which ten in the middle are missing.
WALK = (
    0.21592641, 0.118771404, -0.07945447, 0.037677474, -0.27885845, -0.1484156, -0.3250906, -0.22957903, -0.44110894,
    -0.09830782, *10 * (math.nan,), -0.8786016, -0.83736074, -0.7384849, -0.8939254, -0.7774566, -0.70238715,
    -0.87771565, -0.51853573, -0.6948214, -0.6202789,
)  # fmt: skip

#: Of 21 plates: seeds that germinated, seeds, the kind of seed and the extract.
GERMINATED = (10, 23, 23, 26, 17, 5, 53, 55, 32, 46, 10, 8, 10, 8, 23, 0, 3, 22, 15, 32, 3)
SOWN = (39, 62, 81, 51, 39, 6, 74, 72, 51, 79, 13, 16, 30, 28, 45, 4, 12, 41, 30, 51, 7)
KIND = (*11 * (0,), *10 * (1,))
EXTRACT = (*5 * (0,), *6 * (1,), *5 * (0,), *5 * (1,))


class BrownianBridge(Target):
    """w_t ~ N(w_{t-1}, sigma^2), w_0 = 0, y_t ~ N(w_t, tau^2) at both ends; x = (log sigma, log tau, w).

    log sigma, log tau ~ N(0, 2^2). See the inference gym, https://pypi.org/project/inference_gym
    """

    up_to_constant, n_features = True, 2 + len(WALK)

    def __init__(self):
        y = np.array(WALK)
        self.there = torch.as_tensor(np.flatnonzero(np.isfinite(y)))
        self.y = tensor(y[np.isfinite(y)])

    def log_prob(self, x):
        log_scales, w = x[..., :2], x[..., 2:]
        log_sigma, log_tau = log_scales.unbind(-1)
        steps = (w - pad(w[..., :-1], (1, 0))).square().sum(-1)
        misfit = (self.y.to(x) - w[..., self.there]).square().sum(-1)
        walk = -steps * (-2 * log_sigma).exp() / 2 - w.shape[-1] * log_sigma
        noise = -misfit * (-2 * log_tau).exp() / 2 - len(self.y) * log_tau
        return walk + noise - log_scales.square().sum(-1) / 8


class StochasticVolatility(Target):
    """r_t ~ N(0, e^h_t), h_t = mu + phi (h_{t-1} - mu) + s z_t, h_1 = mu + s z_1 / (1 - phi^2)^(1/2), z ~ N(0, I).

    x = (logit((1 + phi) / 2), mu, log s, z); mu ~ Cauchy(0, 5), s ~ half-Cauchy(0, 2), (1 + phi) / 2 ~ Beta(20, 1.5).
    """

    up_to_constant = True

    def __init__(self, returns):
        self.n_features = 3 + len(returns)
        self.r = tensor(returns)

    def log_prob(self, x):
        logit, mu, log_s, z = x.split([1, 1, 1, x.shape[-1] - 3], -1)
        phi = torch.tanh(logit / 2)
        log_first = -(math.log(4) + logsigmoid(logit) + logsigmoid(-logit)) / 2  # of 1 / sqrt(1 - phi^2)
        shocks = torch.cat([z[..., :1] * log_first.exp(), z[..., 1:]], -1)
        h = mu + log_s.exp() * discounted_sum(shocks, phi)
        precision = (-h).clamp_max(60.0).exp()  # log p is below -1e20 or so, and exponentials would overflow
        likelihood = -(h + self.r.to(x).square() * precision).sum(-1, keepdim=True) / 2
        of_phi = 20 * logsigmoid(logit) + 1.5 * logsigmoid(-logit)
        of_scales = log_s - torch.log1p((mu / 5).square()) - torch.log1p((2 * log_s).exp() / 4)
        return (likelihood + of_phi + of_scales)[..., 0] - z.square().sum(-1) / 2


class SparseLogisticRegression(Target):
    """P(y_i = 1) = sigmoid(x_i^T beta), beta_j = z_j lambda_j tau; x = (log tau, log lambda, z).

    z ~ N(0, I), lambda_j, tau ~ Gamma(1/2, 1/2). See the inference gym, https://pypi.org/project/inference_gym
    """

    up_to_constant = True

    def __init__(self, X, y):
        self.n_features = 2 * X.shape[1] + 1
        self.signed = tensor((2.0 * y - 1)[:, None] * X)

    def log_prob(self, x):
        k = self.signed.shape[1]
        log_scales, z = x[..., : k + 1], x[..., k + 1 :]
        beta = z * (log_scales[..., 1:] + log_scales[..., :1]).exp()
        likelihood = logsigmoid(beta @ self.signed.to(x).mT).sum(-1)
        return likelihood + (log_scales - log_scales.exp()).sum(-1) / 2 - z.square().sum(-1) / 2


class SeedGermination(Target):
    """r_i ~ Binomial(n_i, sigmoid(a_0 + a_1 u_i + a_2 v_i + a_12 u_i v_i + b_i)), b_i ~ N(0, 1 / tau).

    x = (a, log tau, b); a ~ N(0, 10^2 I), tau ~ Gamma(.01, .01). See Crowder, M. J. (1978). Beta-binomial anova for
    proportions. Applied Statistics 27(1).
    """

    up_to_constant, n_features = True, 26

    def __init__(self):
        u, v = np.array(KIND), np.array(EXTRACT)
        self.X = tensor(np.column_stack([np.ones(21), u, v, u * v]))
        self.r, self.n = tensor(GERMINATED), tensor(SOWN)

    def log_prob(self, x):
        alpha, log_tau, b = x.split([4, 1, 21], -1)
        logits, r, n = alpha @ self.X.to(x).mT + b, self.r.to(x), self.n.to(x)
        likelihood = (r * logsigmoid(logits) + (n - r) * logsigmoid(-logits)).sum(-1)
        of_tau = (21 / 2 + 0.01) * log_tau - log_tau.exp() * (0.01 + b.square().sum(-1, keepdim=True) / 2)
        return likelihood + of_tau[..., 0] - alpha.square().sum(-1) / 200


class ManyWell(Target):
    """log p = sum of -a^4 + 6 a^2 + a / 2 - b^2 / 2 over pairs (a, b) of neighbours, up to log Z: 2^(d/2) modes.

    The right one of each two wells has 85% of the probability. See Midgley, L. et al. (2023). Flow annealed
    importance sampling bootstrap. https://arxiv.org/abs/2208.01893
    """

    def __init__(self, n_features=32):
        self.n_features = n_features

    def log_prob(self, x):
        a, b = x[..., ::2], x[..., 1::2]
        constant = 9.374541173869195 + math.log(2 * math.pi) / 2  # of the integral of exp(-x^4 + 6 x^2 + x / 2)
        square = a.square()
        return (square * (6 - square) + (a - b.square()) / 2 - constant).sum(-1)

    def score_fn(self, x):
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([4 * a * (3 - a.square()) + 0.5, -b], -1).flatten(-2)

    def sample(self, n, generator):
        x = torch.randn(n, self.n_features, generator=generator, dtype=torch.float64, device=generator.device)
        x[:, ::2] = wells(n * self.n_features // 2, generator).view(n, self.n_features // 2)
        return x


class Rosenbrock(Target):
    """Rosenbrock's curve in pairs, x_i ~ N(1, 1) and x_{d/2 + i} ~ N(x_i^2, 0.1).

    See Grumitt, R. et al. (2022). Deterministic Langevin Monte Carlo with normalizing flows for Bayesian inference.
    https://arxiv.org/abs/2205.14240
    """

    variance = 0.1

    def __init__(self, n_features=36):
        self.n_features = n_features

    def log_prob(self, x):
        a, b = x.chunk(2, -1)
        constant = math.log(2 * math.pi) + math.log(self.variance) / 2
        return -((a - 1).square() / 2 + (b - a.square()).square() / (2 * self.variance) + constant).sum(-1)

    def score_fn(self, x):
        a, b = x.chunk(2, -1)
        of_b = (a.square() - b) / self.variance
        return torch.cat([1 - a - 2 * a * of_b, of_b], -1)

    def sample(self, n, generator):
        xi = torch.randn(n, self.n_features, generator=generator, dtype=torch.float64, device=generator.device)
        a, b = xi.chunk(2, 1)
        return torch.cat([1 + a, (1 + a).square() + math.sqrt(self.variance) * b], 1)


def wells(n, generator):
    """Draw n numbers of the density proportional to exp(-(x^2 - 3)^2 + x / 2), by rejection.

    With m the root of 3 on the side of x, (x^2 - 3)^2 = (x - m)^2 (x + m)^2 >= 3 (x - m)^2.
    """
    x = torch.empty(n, dtype=torch.float64, device=generator.device)
    left = torch.arange(n, device=generator.device)
    while len(left):
        u = torch.rand(2, len(left), generator=generator, dtype=torch.float64, device=generator.device)
        m = torch.where(u[0] < torch.sigmoid(u.new_tensor(math.sqrt(3))), math.sqrt(3), -math.sqrt(3)).to(u)
        xi = torch.randn(len(left), generator=generator, dtype=torch.float64, device=generator.device)
        tried = m + 1 / 12 + xi / math.sqrt(6)
        log_ratio = 3 * (tried - m).square() - (tried.square() - 3).square()
        accepted = (tried * m > 0) & (u[1].log() < log_ratio)
        x[left[accepted]] = tried[accepted]
        left = left[~accepted]
    return x
