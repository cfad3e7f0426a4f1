"""Scores of targets whose moments are known, written plainly."""

import math
import warnings
from types import SimpleNamespace

import numpy as np
import torch

from skksivi.score._score import Score
from skksivi.score._target import resolve_score
from skksivi.targets import Target


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def normal_array(*shape, seed=0):
    return np.random.RandomState(seed).normal(size=shape)


def origin(d):
    return torch.zeros(d, dtype=torch.float64)


def as_score(score_fn, log_prob=None, d=1):
    """The score of tensors as the functions of the package are given it, without its being probed."""
    return Score(score_fn, d, torch.float64, torch.device("cpu"), 1e-5, log_prob=log_prob)


def resolved(target, d=None, dtype=torch.float64, near=None):
    """The score of a target as a fit has it, in the cpu."""
    return resolve_score(target, d, dtype=dtype, device=torch.device("cpu"), near=near)


def words_of(act):
    """All that is said by warnings and an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            act()
        except Exception as error:
            caught = [*caught, error]
    return [str(getattr(item, "message", item)) for item in caught]


def triangular(d, log10_condition, seed):
    """A lower triangular matrix with a positive diagonal, of scales spread over the root of a condition number."""
    scales = 10 ** (log10_condition / 2 * (torch.linspace(0, 1, d, dtype=torch.float64) - 0.5))
    return scales[:, None] * (torch.eye(d, dtype=torch.float64) + normal(d, d, seed=seed).tril(-1) / d)


def gumbel_score(x):
    """Of independent standard Gumbel features, whose mean is Euler's constant and whose variance is pi^2 / 6."""
    return torch.exp(-x) - 1


def gumbel_log_prob(x):
    return (-x - torch.exp(-x)).sum(-1)


def gumbel(n, d, seed=0):
    return -torch.log(-torch.log(torch.rand(n, d, generator=generator(seed), dtype=torch.float64)))


def gaussian(d, seed):
    """Return mean, precision and the score of a random Gaussian."""
    A, m = normal(d, d, seed=seed), normal(d, seed=seed + 1)
    P = A @ A.mT / d + 0.3 * torch.eye(d).double()
    return m, P, lambda x: -(x - m) @ P


class GaussianScore:
    """N(mean, V diag(lam) V^T) with eigenvalues spread over `condition`."""

    def __init__(self, d, log10_condition, size, seed):
        self.mean = size * normal(d, seed=seed) / normal(d, seed=seed).norm()
        self.V = torch.linalg.qr(normal(d, d, seed=seed + 1)).Q
        self.lam = 10 ** (log10_condition * (torch.linspace(0, 1, d, dtype=torch.float64) - 0.5))

    def score_fn(self, x):
        return -(((x - self.mean.to(x)) @ self.V.to(x)) / self.lam.to(x)) @ self.V.to(x).mT

    def standardise(self, v):
        """Lam^(-1/2) V^T v, of unit covariance for a draw v; v of shape (d, ...)."""
        return (self.V / self.lam.sqrt()).mT @ v


class Mixture:
    """Normals with weights (k,), means (k, d) and standard deviations (k,)."""

    def __init__(self, weights, means, sds):
        self.weights, self.means, self.sds = (torch.tensor(a, dtype=torch.float64) for a in (weights, means, sds))

    def log_prob(self, x):
        weights, means, sds = (a.to(x) for a in (self.weights, self.means, self.sds))
        d = x.shape[-1]
        squared = (x[..., None, :] - means).square().sum(-1) / sds**2
        return (weights.log() - d * sds.log() - squared / 2).logsumexp(-1) - d / 2 * math.log(2 * math.pi)

    def score_fn(self, x):
        weights, means, sds = (a.to(x) for a in (self.weights, self.means, self.sds))
        r = x[..., None, :] - means
        shares = (weights.log() - x.shape[-1] * sds.log() - r.square().sum(-1) / sds**2 / 2).softmax(-1)
        return -(shares[..., None] * r / sds[:, None] ** 2).sum(-2)

    def shares_of(self, x):
        """The shares of the points x (n, d) nearest to each mean."""
        nearest = torch.cdist(torch.as_tensor(x).double(), self.means).argmin(1)
        return torch.bincount(nearest, minlength=len(self.means)) / len(x)


ANGLES = [k * math.pi / 4 for k in range(8)]
PAIR = Mixture([0.5, 0.5], [[-3.0, 0.0], [3.0, 0.0]], [1.0, 1.0])
UNEQUAL = Mixture([0.8, 0.2], [[-6.0, 0.0], [6.0, 3.0]], [0.5, 2.0])
RING = Mixture([1 / 8] * 8, [[10 * math.cos(t), 10 * math.sin(t)] for t in ANGLES], [1.0] * 8)

#: Shape of the log-Gamma target.
SHAPE = 1.5


def log_gamma_score(x):
    """Of independent x_i = log G_i with G_i of Gamma(1.5): skewed to the left."""
    return SHAPE - x.exp()


def log_gamma_draws(n, d, seed=0):
    """Gamma(1.5) is half of chi-square with three degrees of freedom."""
    return (normal(3, n, d, seed=seed).square().sum(0) / 2).log()


def student_score(x, df=5.0):
    """Of Student's t, of covariance df / (df - 2) I."""
    return -(df + x.shape[-1]) * x / (df + x.square().sum(-1, keepdim=True))


def student_log_prob(x, df=5.0):
    d = x.shape[-1]
    constant = math.lgamma((df + d) / 2) - math.lgamma(df / 2) - d / 2 * math.log(df * math.pi)
    return constant - (df + d) / 2 * torch.log1p(x.square().sum(-1) / df)


def pushed(score_fn, A, b):
    """The score of A x + b for x with this score."""
    inverse = torch.linalg.inv(A)
    return lambda y: score_fn((y - b.to(y)) @ inverse.to(y).mT) @ inverse.to(y)


class UnmovableModule(torch.nn.Module):
    """A score function with a method `to`, which would move it in place."""

    def __init__(self, score_fn):
        super().__init__()
        self.score_fn_of_module = score_fn

    def forward(self, x):
        return self.score_fn_of_module(x)

    def to(self, *args, **kwargs):
        raise AssertionError("moved in place")


class Bent(Target):
    """a ~ N(0, 10^2), b | a ~ N(-(a^2 - 100) / 10, 1), and normal ones beside."""

    def __init__(self, n_features=2):
        self.n_features = n_features

    def log_prob(self, x):
        r = x[:, 1] + (x[:, 0].square() - 100) / 10
        return -((x[:, 0] / 10).square() + r.square() + x[:, 2:].square().sum(1)) / 2

    def sample(self, n, noise=None):
        z = torch.randn(n, self.n_features, generator=noise or generator(1), dtype=torch.float64)
        z[:, 0] *= 10
        z[:, 1] -= (z[:, 0].square() - 100) / 10
        return z


def own(d, **functions):
    """A target of d features and of a class of its own, whose methods are functions."""
    return type("Own", (Target,), {"n_features": d} | {name: staticmethod(f) for name, f in functions.items()})()


def stan(d, log_density_gradient, **methods):
    """What BridgeStan's models have, and other methods of theirs."""
    return SimpleNamespace(param_unc_num=lambda: d, log_density_gradient=log_density_gradient, **methods)


class LogisticDensity(Target):
    """A logistic regression with a standard normal prior by its density alone."""

    def __init__(self, A, y):
        self.A, self.signs, self.n_rows = torch.from_numpy(A), torch.from_numpy(2.0 * y - 1), len(A)
        self.n_features = A.shape[1]

    def log_prob(self, x):
        return torch.nn.functional.logsigmoid(self.signs * (x @ self.A.mT)).sum(-1) - x.square().sum(-1) / 2
