"""Seven models of simulation-based inference whose likelihood has a gradient, in coordinates without bounds.

Written from their definitions in Lueckmann, J.-M. et al. (2021). Benchmarking simulation-based inference. AISTATS.
Parameters x are on the whole line: of a uniform prior the logit, of a log-normal one the logarithm. `features` is
what both methods are given of the data. `reference` draws from the posterior, exactly or by importance weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import torch
from torch.nn.functional import logsigmoid, softplus

from skksivi import importance_sample
from skksivi.baselines import Laplace
from skksivi.targets import from_log_prob

F64 = torch.float64


class Model(ABC):
    """A prior, a simulator and a likelihood."""

    n_features: int

    @abstractmethod
    def prior(self, n, rng):
        """Draw n parameters (n, d)."""

    @abstractmethod
    def simulate(self, X, rng):
        """Return the features (n, c) of data of each of the parameters."""

    @abstractmethod
    def log_prob(self, x, y):
        """Evaluate log p(x, y) for rows of pairs."""

    def score_fn(self, x, y):
        """Return the gradient in x."""
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad(self.log_prob(x, y).sum(), x, create_graph=True)[0]

    def target(self, y):
        """Return the posterior given the features y (c,)."""
        y = torch.as_tensor(y, dtype=F64)
        return from_log_prob(lambda x: self.log_prob(x, y.to(x).expand(len(x), -1)), n_features=self.n_features)

    def reference(self, y, n, rng, x):
        """Draw n parameters given the features y (c,), which the parameters x (d,) have made."""
        return evolved_draws(self, y, x, n, rng)


def importance_draws(model, y, n, rng):
    """Return draws by the importance weights of those of the Gaussian at the mode, with tails."""
    target, seed = model.target(y), rng.randint(2**31)
    fit = Laplace(random_state=seed).fit(target)
    sample = importance_sample(fit, target, n_samples=60_000, random_state=seed)
    weights = sample.weights / sample.weights.sum()
    if sample.k > 0.7 or 1 / np.square(weights).sum() < 5 * n:
        raise RuntimeError(f"the reference cannot be trusted: k = {sample.k:.2f}, share {sample.share:.2f}")
    return sample.X[rng.choice(len(sample.X), n, p=weights)]


def evolved_draws(model, y, start, n, rng):
    """Return draws by n chains of differential evolution, all near a start, which is a draw of the posterior itself.

    ter Braak, C. (2006). A Markov chain Monte Carlo version of the genetic algorithm differential evolution.
    Statistics and Computing 16.
    """
    y = torch.as_tensor(y, dtype=F64).expand(n, -1)

    def log_prob(x):
        with torch.no_grad():
            return np.nan_to_num(model.log_prob(torch.from_numpy(x), y).numpy(), nan=-np.inf)

    d, i = len(start), np.arange(n)
    x = start + 0.01 * rng.normal(size=(n, d))
    log_p = log_prob(x)
    for t in range(250):
        a, b = (i + rng.randint(1, n, size=(2, n))) % n
        gamma = 1.0 if t % 10 == 9 else 2.38 / math.sqrt(2 * d)
        moved = x + gamma * (x[a] - x[b]) + 1e-4 * rng.normal(size=x.shape)
        log_moved = log_prob(moved)
        taken = np.log(rng.uniform(size=n)) < log_moved - log_p
        x[taken], log_p[taken] = moved[taken], log_moved[taken]
    return x


class Box(Model):
    """A uniform prior on (-b, b) in each coordinate; x are logits."""

    bound: float

    def prior(self, n, rng):
        return rng.logistic(size=(n, self.n_features))

    def theta(self, x):
        return self.bound * (2 * torch.sigmoid(x) - 1) if isinstance(x, torch.Tensor) else self.bound * np.tanh(x / 2)

    def x(self, theta):
        return 2 * np.arctanh(theta / self.bound)

    def log_prob(self, x, y):
        return self.log_likelihood(self.theta(x), y) + (logsigmoid(x) + logsigmoid(-x)).sum(-1)

    @abstractmethod
    def log_likelihood(self, theta, y):
        """Evaluate log p(y | theta) for rows of pairs, up to a constant."""

    def kept(self, draw, n):
        """Return n of the draws of a function that lie within the bounds, as x."""
        found = np.empty((0, self.n_features))
        while len(found) < n:
            theta = draw()
            found = np.concatenate([found, theta[(np.abs(theta) < self.bound).all(1)]])
        return self.x(found[:n])


class GaussianLinear(Model):
    """A normal mean in ten dimensions: prior and noise of variance 0.1."""

    n_features = 10

    def prior(self, n, rng):
        return math.sqrt(0.1) * rng.normal(size=(n, 10))

    def simulate(self, X, rng):
        return X + math.sqrt(0.1) * rng.normal(size=X.shape)

    def log_prob(self, x, y):
        return -(x.square() + (y - x).square()).sum(-1) / 0.2

    def reference(self, y, n, rng, x):
        return y / 2 + math.sqrt(0.05) * rng.normal(size=(n, 10))


class GaussianMixture(Box):
    """A mean in two dimensions, seen with noise of standard deviation 1 or 0.1, each in half of the cases."""

    n_features, bound = 2, 10.0

    def simulate(self, X, rng):
        return self.theta(X) + rng.choice([1.0, 0.1], size=(len(X), 1)) * rng.normal(size=X.shape)

    def log_likelihood(self, theta, y):
        square = (y - theta).square().sum(-1) / 2
        return torch.logaddexp(-square, -100 * square + math.log(100))

    def reference(self, y, n, rng, x):
        def draw():
            return y + rng.choice([1.0, 0.1], size=(4 * n, 1)) * rng.normal(size=(4 * n, 2))

        return self.kept(draw, n)


class BernoulliGLM(Model):
    """A generalised linear model of 100 binary outcomes, an offset and a filter of nine lags with a smooth prior."""

    n_features = 10

    def __init__(self):
        F = np.zeros((9, 9))
        for i in range(9):
            F[i, i] = 1 + math.sqrt(i / 9)
            if i >= 1:
                F[i, i - 1] = -2
            if i >= 2:
                F[i, i - 2] = 1
        precision = np.zeros((10, 10))
        precision[0, 0], precision[1:, 1:] = 0.5, F.T @ F
        self.root = np.linalg.cholesky(np.linalg.inv(precision))
        stimulus = np.random.RandomState(42).normal(size=100)
        lags = [np.concatenate([np.zeros(k), stimulus[: 100 - k]]) for k in range(9)]
        self.V = np.column_stack([np.ones(100), *lags])
        self.precision, self.design = torch.from_numpy(precision), torch.from_numpy(self.V)

    def prior(self, n, rng):
        return rng.normal(size=(n, 10)) @ self.root.T

    def simulate(self, X, rng):
        p = 1 / (1 + np.exp(-X @ self.V.T))
        return (rng.uniform(size=p.shape) < p).astype(float) @ self.V

    def log_prob(self, x, y):
        log_p = -((x @ self.precision.to(x)) * x).sum(-1) / 2
        return log_p + (x * y).sum(-1) - softplus(x @ self.design.to(x).mT).sum(-1)

    def reference(self, y, n, rng, x):
        return importance_draws(self, y, n, rng)


class LogisticRegression(BernoulliGLM):
    """Forty binary outcomes, an intercept and nine standard normal columns, standard normal coefficients."""

    def __init__(self):
        self.V = np.column_stack([np.ones(40), np.random.RandomState(0).normal(size=(40, 9))])
        self.root, self.precision, self.design = np.eye(10), torch.eye(10, dtype=F64), torch.from_numpy(self.V)

    def pairs(self, n, rng):
        X = self.prior(n, rng)
        return X, self.simulate(X, rng)


class SLCP(Box):
    """Four points of a normal distribution in two dimensions, whose mean and covariance have uniform priors."""

    n_features, bound = 5, 3.0

    def simulate(self, X, rng):
        t = self.theta(X)
        s1, s2, rho = t[:, 2] ** 2, t[:, 3] ** 2, np.tanh(t[:, 4])
        xi = rng.normal(size=(len(X), 4, 2))
        first = t[:, None, 0] + s1[:, None] * xi[..., 0]
        second = t[:, None, 1] + s2[:, None] * (rho[:, None] * xi[..., 0] + np.sqrt(1 - rho**2)[:, None] * xi[..., 1])
        return np.stack([first, second], -1).reshape(len(X), 8)

    def log_likelihood(self, theta, y):
        s1, s2, rho = theta[:, 2, None].square(), theta[:, 3, None].square(), theta[:, 4, None].tanh()
        a, b = ((y[:, j::2] - theta[:, j, None]) / s for j, s in ((0, s1), (1, s2)))
        rest = 1 / theta[:, 4, None].cosh().square()  # 1 - rho^2
        square = (a.square() - 2 * rho * a * b + b.square()) / rest
        return -(square / 2 + s1.log() + s2.log() + rest.log() / 2).sum(-1)

    def reference(self, y, n, rng, x):
        y, m = y.reshape(4, 2), 2_000_000
        mean = y.mean(0)
        t = rng.uniform(-3, 3, size=(m, 3))
        s1, s2, rho = t[:, 0] ** 2, t[:, 1] ** 2, np.tanh(t[:, 2])
        rest = 1 / np.cosh(t[:, 2]) ** 2
        S = (y - mean).T @ (y - mean)
        square = (S[0, 0] / s1**2 - 2 * rho * S[0, 1] / (s1 * s2) + S[1, 1] / s2**2) / rest
        log_w = -square / 2 - 3 * (np.log(s1) + np.log(s2) + np.log(rest) / 2)
        w = np.exp(log_w - log_w.max())
        w /= w.sum()

        def draw():
            i = rng.choice(m, 4 * n, p=w)
            xi = rng.normal(size=(4 * n, 2)) / 2
            first = mean[0] + s1[i] * xi[:, 0]
            second = mean[1] + s2[i] * (rho[i] * xi[:, 0] + np.sqrt(rest[i]) * xi[:, 1])
            return np.column_stack([first, second, t[i]])

        return self.kept(draw, n)


class TwoMoons(Box):
    """Two crescents; the edge of each, at which the density jumps, is a slope of width 0.002 to the score."""

    n_features, bound = 2, 1.0

    def simulate(self, X, rng):
        t, n = self.theta(X), len(X)
        alpha, r = rng.uniform(-math.pi / 2, math.pi / 2, n), rng.normal(0.1, 0.01, n)
        p = np.column_stack([r * np.cos(alpha) + 0.25, r * np.sin(alpha)])
        shift = np.column_stack([-np.abs(t[:, 0] + t[:, 1]), t[:, 1] - t[:, 0]]) / math.sqrt(2)
        return p + shift

    def log_likelihood(self, theta, y):
        v1 = y[:, 0] - 0.25 + (theta[:, 0] + theta[:, 1]).abs() / math.sqrt(2)
        v2 = y[:, 1] - (theta[:, 1] - theta[:, 0]) / math.sqrt(2)
        r = (v1.square() + v2.square()).sqrt()
        return -(((r - 0.1) / 0.01).square()) / 2 - r.log() + logsigmoid(v1 / 0.002)

    def reference(self, y, n, rng, x):
        def draw():
            m = 8 * n
            alpha, r = rng.uniform(-math.pi / 2, math.pi / 2, m), rng.normal(0.1, 0.01, m)
            q1, q2 = r * np.cos(alpha) + 0.25 - y[0], y[1] - r * np.sin(alpha)
            total, keep = rng.choice([-1.0, 1.0], m) * q1 * math.sqrt(2), q1 >= 0
            difference = q2 * math.sqrt(2)
            return np.column_stack([total - difference, total + difference])[keep] / 2

        return self.kept(draw, n)


class LotkaVolterra(Model):
    """Predators and prey at ten times, with noise of 10%; Runge-Kutta steps of 0.15 in logarithms."""

    n_features = 4
    mean, sd = (-0.125, -3.0, -0.125, -3.0), 0.5

    def prior(self, n, rng):
        return np.array(self.mean) + self.sd * rng.normal(size=(n, 4))

    def log_states(self, x):
        a, b, c, d = x.exp().unbind(-1)

        def slope(s):
            return torch.stack([a - b * s[:, 1].clamp_max(20).exp(), d * s[:, 0].clamp_max(20).exp() - c], -1)

        s = x.new_tensor([math.log(30), 0.0]).expand(len(x), 2)
        found = [s]
        for _ in range(9):
            s = runge_kutta(slope, s, 0.15, 14)
            found.append(s)
        return torch.cat(found, 1)

    def simulate(self, X, rng):
        with torch.no_grad():
            states = self.log_states(torch.as_tensor(X)).numpy()
        return states + 0.1 * rng.normal(size=states.shape)

    def log_prob(self, x, y):
        prior = -((x - x.new_tensor(self.mean)) / self.sd).square().sum(-1) / 2
        return prior - ((y - self.log_states(x)) / 0.1).square().sum(-1) / 2


class SIR(Model):
    """An epidemic among a million, of whom 1,000 are tested at ten times; features are logits of the shares."""

    n_features = 2
    mean, sd = (math.log(0.4), math.log(0.125)), (0.5, 0.2)

    def prior(self, n, rng):
        return np.array(self.mean) + np.array(self.sd) * rng.normal(size=(n, 2))

    def infected(self, x):
        """Return the shares of infected (n, 10)."""
        beta, gamma = x.exp().unbind(-1)

        def slope(s):
            infection = beta * (s[:, 0] + 0.0).exp()
            return torch.stack([-beta * s[:, 1].exp(), infection - gamma], -1)

        s = x.new_tensor([math.log1p(-1e-6), math.log(1e-6)]).expand(len(x), 2)
        found = [s[:, 1]]
        for _ in range(9):
            s = runge_kutta(slope, s, 1.0, 17)
            found.append(s[:, 1])
        return torch.stack(found, 1).clamp(-60, -1e-9)

    def simulate(self, X, rng):
        with torch.no_grad():
            p = self.infected(torch.as_tensor(X)).exp().numpy()
        k = rng.binomial(1000, p)
        return np.log((k + 0.5) / (1000.5 - k))

    def log_prob(self, x, y):
        k = 1001 * torch.sigmoid(y) - 0.5
        log_p = self.infected(x)
        prior = -((x - x.new_tensor(self.mean)) / x.new_tensor(self.sd)).square().sum(-1) / 2
        return prior + (k * log_p + (1000 - k) * torch.log1p(-log_p.exp())).sum(-1)


def runge_kutta(slope, s, step, n):
    """Return the state after n steps of the fourth order."""
    for _ in range(n):
        k1 = slope(s)
        k2 = slope(s + step / 2 * k1)
        k3 = slope(s + step / 2 * k2)
        k4 = slope(s + step * k3)
        s = s + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return s


MODELS = {
    "Gaussian linear": GaussianLinear,
    "Gaussian mixture": GaussianMixture,
    "Bernoulli GLM": BernoulliGLM,
    "SLCP": SLCP,
    "two moons": TwoMoons,
    "SIR": SIR,
    "Lotka-Volterra": LotkaVolterra,
}
