"""The loop of the public code, operation by operation, in plain autograd, on the targets of this package.

It says what the settings give without this package's estimators: no whitening, no guard, no fused step. Where it
differs from the public code, distances come from products of matrices, a median is taken over the pairs of 128 draws,
and log sigma^2 has no floor. `within`, the U-statistic, is as the public code has it for networks.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from sklearn.base import BaseEstimator

from skksivi.targets._network import outputs_of_networks


def median_of(pairs):
    """Return the median of the pairs (n, n) of the first 128 draws."""
    return pairs[:128, :128].flatten().median()


def gaussian(x, y):
    """Return exp(-|x - y|^2 / (2 h^2)), with 2 h^2 the median over log(N + 1), through which gradients flow."""
    squared = x.square().sum(1)[:, None] + y.square().sum(1) - 2 * x @ y.mT
    return torch.exp(-squared * (math.log(len(x) + 1) / median_of(squared)))


def riesz(x, y):
    """Return |x| + |y| - |x - y| in the l1 norm, over its median without the gradient, times log(N + 1)."""
    k = x.abs().sum(1)[:, None] + y.abs().sum(1) - torch.cdist(x, y, p=1)
    return k * (math.log(len(x) + 1) / median_of(k.detach()))


def inverse_covariance(x):
    """Return the metric on <f, f'> of the public code, C^-1 of the draws (n, d)."""
    return (torch.cov(x.detach().mT) + 1e-8 * torch.eye(x.shape[1])).inverse()


def perceptron(layers, z):
    *hidden, (W, b) = layers
    for V, c in hidden:
        z = torch.relu(z @ V + c)
    return z @ W + b


def around(mean, log_var, generator):
    """Return x = mean + sigma xi and xi / sigma, both (n, d)."""
    sigma, xi = (log_var / 2).exp(), torch.randn(mean.shape, generator=generator)
    return mean + sigma * xi, xi / sigma


class PlainKSIVI(BaseEstimator):
    """KSIVI, x = mu(z) + sigma xi with a perceptron mu of two hidden layers, by two batches or the pairs of one."""

    def __init__(
        self, *, latent_dim, width, log_variance, batch_size, max_iter, learning_rate, decay_every,
        betas=(0.9, 0.999), kernel=gaussian, metric=None, annealed=False, entropic=0.0, within=False,
        aside=None, random_state=0,
    ):  # fmt: skip
        self.latent_dim, self.width, self.log_variance, self.batch_size = latent_dim, width, log_variance, batch_size
        self.max_iter, self.learning_rate, self.decay_every, self.betas = max_iter, learning_rate, decay_every, betas
        self.kernel, self.metric, self.annealed, self.entropic = kernel, metric, annealed, entropic
        self.within, self.aside, self.random_state = within, aside, random_state

    def fit(self, target):
        self.generator_ = torch.Generator().manual_seed(self.random_state)
        self.layers_, self.log_var_ = self._conditional(self.latent_dim, target.n_features)
        self._begin(target)
        adam = torch.optim.Adam(self._parameters(), lr=self.learning_rate, betas=self.betas)
        schedule = torch.optim.lr_scheduler.StepLR(adam, self.decay_every, 0.9)
        for t in range(1, self.max_iter + 1):
            adam.zero_grad()
            self._loss(target, t / self.max_iter).backward()
            self._step(adam)
            schedule.step()
        self.n_iter_ = self.max_iter
        return self

    def _parameters(self):
        return [self.log_var_, *sum(self.layers_, ())]

    def _begin(self, target):
        """Prepare the network."""

    def _step(self, adam):
        adam.step()

    def _loss(self, target, progress):
        """Return the mean of k <f, f'> with f = s_p(x) + xi / sigma, less what holds the first draws together."""
        temperature = min(1.0, 0.1 + 2 * progress) if self.annealed else 1.0
        x, noise = self._draw(self.batch_size, self.generator_)
        y, other_noise = (x, noise) if self.within else self._draw(self.batch_size, self.generator_)
        f, g = temperature * target.score_fn(x) + noise, temperature * target.score_fn(y) + other_noise
        loss = self._discrepancy(x, f, y, g)
        if self.entropic and progress < 0.4:
            loss = loss - self.entropic * temperature * target.log_prob(x).mean()
        return loss

    def _discrepancy(self, x, f, y, g):
        """Return the mean of k(x, y) <f, g>, all (n, d)."""
        products = (f if self.metric is None else f @ self.metric(x)) @ g.mT
        if self.within:
            products = products.fill_diagonal_(0)
        return (products * self.kernel(x, y)).mean()

    def _draw(self, n, generator):
        """Return x and xi / sigma, both (n, d)."""
        z = torch.randn(n, self.latent_dim, generator=generator)
        return around(perceptron(self.layers_, z), self.log_var_, generator)

    @torch.no_grad()
    def sample(self, n_samples, random_state):
        return self._draw(n_samples, torch.Generator().manual_seed(random_state))[0].numpy()

    def _conditional(self, n_in, n_out):
        """Return the layers of a mean and the log variances of a new conditional."""
        layers = [self._linear(*pair) for pair in pairwise((n_in, self.width, self.width, n_out))]
        return layers, torch.full((n_out,), float(self.log_variance), requires_grad=True)

    def _linear(self, n_in, n_out):
        """Return weights and biases as torch draws them."""
        uniform = (2 * torch.rand(shape, generator=self.generator_) - 1 for shape in ((n_in, n_out), (n_out,)))
        return tuple((u / math.sqrt(n_in)).requires_grad_() for u in uniform)


class PlainHKSIVI(PlainKSIVI):
    """HKSIVI by the same loop: the paper's hierarchy of five such layers, from N(0, I), of which there is no code.

    Layer t is drawn around x + mu_t(x) + sigma_ini^2 / 2 s_t(x), with a network mu_t that starts at zero, s_t =
    lambda_t s_p - (1 - lambda_t) x and lambda_t = 1 - t / 5. The loss is the sum over t of the mean of k <f, f'>.
    """

    n_layers = 5

    def _parameters(self):
        return [a for layers, log_var in self.conditionals_ for a in (log_var, *sum(layers, ()))]

    def _begin(self, target):
        d, self.score_fn_ = target.n_features, target.score_fn
        self.conditionals_ = [self._conditional(d, d) for _ in range(self.n_layers)]
        with torch.no_grad():
            for layers, _ in self.conditionals_:
                for a in layers[-1]:
                    a.zero_()

    def _loss(self, target, progress):
        first, second = (self._path(self.batch_size, self.generator_) for _ in range(2))
        return sum(self._discrepancy(*a, *b) for a, b in zip(first, second, strict=True))

    def _path(self, n, generator):
        """Return x_t and f_t, (n, d), of all layers, the last first."""
        x, path = torch.randn(n, self.conditionals_[0][1].numel(), generator=generator), []
        s_p = self.score_fn_(x)
        for t in reversed(range(self.n_layers)):
            (layers, log_var), level = self.conditionals_[t], 1 - t / self.n_layers
            step = math.exp(self.log_variance) / 2 * (level * s_p - (1 - level) * x)
            x, noise = around(x + perceptron(layers, x) + step, log_var, generator)
            s_p = self.score_fn_(x)
            path.insert(0, (x, level * s_p - (1 - level) * x + noise))
        return path

    def _draw(self, n, generator):
        return self._path(n, generator)[0]


def fit_mean(draw, parameters, target, X, y):
    """Train parameters on rows X (n, p) and y (n,): the squared error of the mean prediction by the weights drawn."""
    X, y = target._check_inputs(X).float(), torch.as_tensor(y).float()
    adam = torch.optim.Adam(parameters, lr=0.01)
    for _ in range(99):
        adam.zero_grad()
        predicted = outputs_of_networks(X, draw(), target.n_hidden).mean(1) * target.y_scale + target.y_mean
        (predicted - y).square().mean().backward()
        adam.step()


class PlainNetwork(PlainKSIVI):
    """The same for the weights of a network, with what the public code adds there.

    The mean is first trained on rows of `aside`, X and y. All draws of an iteration see the same 100 rows, taken in
    turn; log p by them is a term of the loss. Gradients are cut to norm one, and draws are from the moving average of
    the parameters.
    """

    def _begin(self, target):
        self.rows_ = torch.arange(target.n_rows)
        fit_mean(lambda: self._draw(self.batch_size, self.generator_)[0], self._parameters(), target, *self.aside)
        self.averages_ = [a.detach().clone() for a in self._parameters()]

    def _loss(self, target, progress):
        rows, self.rows_ = self.rows_[:100], self.rows_.roll(-100)
        part = target.subset(rows)
        (x, noise), (y, other_noise) = (self._draw(self.batch_size, self.generator_) for _ in range(2))
        log_p, log_p_y = part.log_prob(x), part.log_prob(y)
        f, g = (torch.autograd.grad(a.sum(), b, create_graph=True)[0] for a, b in ((log_p, x), (log_p_y, y)))
        return self._discrepancy(x, f + noise, y, g + other_noise) - self.entropic * log_p.mean()

    def _step(self, adam):
        torch.nn.utils.clip_grad_norm_(self._parameters(), 1.0)
        adam.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.averages_, self._parameters(), 0.001)

    def sample(self, n_samples, random_state):
        self.log_var_, *layers = self.averages_
        self.layers_ = list(zip(layers[::2], layers[1::2], strict=True))
        return super().sample(n_samples, random_state)
