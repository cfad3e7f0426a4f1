"""Hard shapes: bends, tails, far and narrow modes, labels that may be switched, many dimensions.

Those with `sample` have exact draws. The reference draws of the others are made like those of
benchmarks/posteriors.py, with the settings of `hmc`.
"""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import torch
from _expensive import Counties
from _suites import ManyWell
from posteriors import Funnel, StochasticVolatility, eight_schools_centred, normal, tensor
from torch.nn.functional import softplus

from skksivi.targets import Target


def normals(n, d, generator):
    return torch.randn(n, d, generator=generator, dtype=torch.float64)


class WideBanana(Target):
    """a ~ N(0, 10^2), b | a ~ N(-(a^2 - 100) / 10, 1), and normal ones beside."""

    def __init__(self, n_features):
        self.n_features = n_features

    def log_prob(self, x):
        r = x[:, 1] + (x[:, 0].square() - 100) / 10
        return -((x[:, 0] / 10).square() + r.square() + x[:, 2:].square().sum(1)) / 2

    def sample(self, n, generator):
        x = normals(n, self.n_features, generator)
        x[:, 0] *= 10
        x[:, 1] -= (x[:, 0].square() - 100) / 10
        return x


class SquaredChain(Target):
    """x_1 ~ N(0, 1), x_i | x_{i-1} ~ N(x_{i-1}^2, .3^2)."""

    n_features = 3

    def log_prob(self, x):
        r = (x[:, 1:] - x[:, :-1].square()) / 0.3
        return -(x[:, 0].square() + r.square().sum(1)) / 2

    def sample(self, n, generator):
        x = normals(n, self.n_features, generator)
        for i in range(1, self.n_features):
            x[:, i] = x[:, i - 1].square() + 0.3 * x[:, i]
        return x


class CentredCounties(Target):
    """The counties in their centred form, x = (m, log tau, log s, a, b), with a spike where tau is zero."""

    n_features = Counties.n_features

    def __init__(self):
        self.easier = Counties()

    def split(self, x):
        top, a, b = x.split([5, Counties.n_counties, Counties.n_counties], -1)
        return top, a, b, *top[..., :4].split(1, -1)

    def log_prob(self, x):
        top, a, b, m_1, m_2, log_tau_1, log_tau_2 = self.split(x)
        z, w = (a - m_1) * (-log_tau_1).exp(), (b - m_2) * (-log_tau_2).exp()
        log_scales = Counties.n_counties * (log_tau_1 + log_tau_2)
        return self.easier.log_prob(torch.cat([top, z, w], -1)) - log_scales[..., 0]

    def from_easier(self, x):
        top, z, w, m_1, m_2, log_tau_1, log_tau_2 = self.split(x)
        return torch.cat([top, m_1 + log_tau_1.exp() * z, m_2 + log_tau_2.exp() * w], -1)

    def to(self, **kwargs):
        moved = super().to(**kwargs)
        moved.easier = self.easier.to(**kwargs)
        return moved


class FewGroups(Target):
    """y_jk ~ N(mu + tau z_j, sigma^2), 5 groups of 3, tau, sigma ~ C+(0, 1), mu ~ N(0, 10^2), z ~ N(0, I).

    x = (log tau, log sigma, mu, z), or in its centred form (log tau, log sigma, mu, mu + tau z).
    """

    n_groups, n_of_group, n_features = 5, 3, 8

    def __init__(self, *, centred):
        rng = np.random.RandomState(3)
        self.centred = centred
        effects = 0.5 * rng.normal(size=(self.n_groups, 1))
        self.y = tensor(1 + effects + rng.normal(size=(self.n_groups, self.n_of_group)))

    def log_prob(self, x):
        log_tau, log_sigma, mu, z = x.split([1, 1, 1, self.n_groups], -1)
        spread = z - mu if self.centred else log_tau.exp() * z
        of_groups = normal(spread, log_tau) + log_tau * (not self.centred)
        data = normal(self.y - (mu + spread)[..., None], log_sigma[..., None])
        scales = log_tau - softplus(2 * log_tau) + log_sigma - softplus(2 * log_sigma)
        return data.sum((-2, -1)) + of_groups.sum(-1) + (scales - mu.square() / 200)[..., 0]

    def sample(self, n, generator):
        """Draw n points: the scales from a grid, within its cells, the others given them."""
        log_tau, log_sigma = (torch.linspace(a, b, 501).double() for a, b in ((-11, 5), (-2, 2)))
        t, s = torch.meshgrid(log_tau, log_sigma, indexing="ij")
        cell = torch.multinomial(
            self._marginal(t, s)[0].flatten().softmax(0), n, replacement=True, generator=generator
        )
        within = torch.rand(2, n, generator=generator, dtype=torch.float64) - 0.5
        t, s = (a.flatten()[cell] + w * step for a, w, step in zip((t, s), within, (16 / 500, 4 / 500), strict=True))
        _, mean, precision = self._marginal(t, s)
        xi = normals(n, 1 + self.n_groups, generator)
        mu = mean + xi[:, 0] * precision.rsqrt()
        of_data = self.n_of_group * (2 * (t - s)).exp()  # the precision of z by the data
        shift = (self.y.mean(1) - mu[:, None]) * (-t).exp()[:, None]
        z = (of_data / (1 + of_data))[:, None] * shift + xi[:, 1:] * (1 + of_data).rsqrt()[:, None]
        return torch.cat([torch.stack([t, s, mu], 1), mu[:, None] + t.exp()[:, None] * z if self.centred else z], 1)

    def _marginal(self, t, s):
        """Return log p(log tau, log sigma) up to a constant, and the mean and the precision of mu given these."""
        means = self.y.mean(1)
        v = (2 * t).exp() + (2 * s).exp() / self.n_of_group
        precision = self.n_groups / v + 0.01
        mean = means.sum() / v / precision
        of_means = mean.square() * precision - precision.log() - means.square().sum() / v - self.n_groups * v.log()
        n_within = self.y.numel() - self.n_groups
        within = (self.y - means[:, None]).square().sum() * (-2 * s).exp() + 2 * n_within * s
        scales = t - softplus(2 * t) + s - softplus(2 * s)
        return (of_means - within) / 2 + scales, mean, precision


class Students(Target):
    """Independent t distributions, or a multivariate one."""

    def __init__(self, df, n_features, *, joint=False):
        self.df, self.n_features, self.joint = df, n_features, joint

    def log_prob(self, x):
        if self.joint:
            return -(self.df + self.n_features) / 2 * (x.square().sum(1) / self.df).log1p()
        return -(self.df + 1) / 2 * (x.square() / self.df).log1p().sum(1)

    def sample(self, n, generator):
        shape = (n, 1) if self.joint else (n, self.n_features)
        gamma = torch.distributions.Gamma(self.df / 2, self.df / 2)
        seed = torch.randint(2**31, (), generator=generator).item()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            scale = gamma.sample(shape).double()
        return normals(n, self.n_features, generator) / scale.sqrt()


class Directions(Target):
    """Independent variables along directions that are no coordinates: the first k of a kind, the others normal."""

    KINDS = MappingProxyType({
        "t3": lambda z: -2 * (z.square() / 3).log1p(),
        "double exponential": lambda z: -(z.square() + 1e-4).sqrt(),
        "Gumbel": lambda z: -z - (-z).exp(),
        "two humps": lambda z: torch.logaddexp(-(z - 2).square() / 2, -(z + 2).square() / 2),
    })  # fmt: skip

    def __init__(self, kind, d, k):
        self.n_features, self.k, self.log_density = d, k, self.KINDS[kind]
        self.V = torch.linalg.qr(normals(d, d, torch.Generator().manual_seed(d))).Q

    def log_prob(self, x):
        z = x @ self.V.to(x)
        return self.log_density(z[:, : self.k]).sum(1) - z[:, self.k :].square().sum(1) / 2

    def exact(self, level):
        """Return the quantiles along one of the directions at a level and one less it, and the standard deviation of
        draws that are clipped to them.
        """
        t = torch.linspace(-300, 300, 1_200_001, dtype=torch.float64)
        p = self.log_density(t).softmax(0).numpy()
        ends = np.interp([level, 1 - level], p.cumsum(), t.numpy())
        clipped = t.numpy().clip(*ends)
        return ends, np.sqrt(p @ (clipped - p @ clipped) ** 2)


class Normals(Target):
    """Isotropic Gaussians at means (k, d), of standard deviations and weights (k,)."""

    def __init__(self, means, sds, weights):
        self.n_features = len(means[0])
        self.means, self.log_sds, self.weights = tensor(means), tensor(sds).log(), tensor(weights)

    def log_prob(self, x):
        parts = normal(x[:, None] - self.means, self.log_sds[:, None]).sum(-1)
        return (parts + self.weights.log()).logsumexp(-1)

    def sample(self, n, generator):
        k = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        return self.means[k] + self.log_sds[k].exp()[:, None] * normals(n, self.n_features, generator)

    def shares(self, X):
        """Return the share (k,) of draws X in each component."""
        squares = torch.cdist(torch.as_tensor(X).double(), self.means).square() * (-2 * self.log_sds).exp()
        return np.bincount((squares / 2 + self.n_features * self.log_sds).argmin(1), minlength=len(self.means)) / len(
            X
        )


def apart(d, distance, sds=(1.0, 1.0), weights=(0.8, 0.2)):
    """Two Gaussians in a direction that is no coordinate."""
    v = np.random.RandomState(d).normal(size=d)
    return Normals(np.stack([np.zeros(d), distance * v / np.linalg.norm(v)]), sds, weights)


class Labels(Target):
    """y ~ k normals of sd one, of equal shares and unknown means, which have a prior alike."""

    def __init__(self, k):
        rng = np.random.RandomState(k)
        self.n_features = k
        self.y = tensor(np.concatenate([rng.normal(4 * j, 1, 20 + 5 * j) for j in range(k)]))

    def log_prob(self, x):
        parts = -(self.y - x[..., None]).square() / 2
        return parts.logsumexp(-2).sum(-1) - (x - 4).square().sum(-1) / 50


class Field(Target):
    """y ~ Poisson(e^x), x a Gaussian field of covariance exp(-distance / 6) on a grid of rows and columns."""

    hmc = MappingProxyType({"n_warmup": 15, "n_rounds": 20, "n_trajectories": 6})

    def __init__(self, n_rows, n_columns):
        rng = np.random.RandomState(1)
        sites = np.stack(np.meshgrid(np.arange(n_rows), np.arange(n_columns), indexing="ij"), -1).reshape(-1, 2)
        K = np.exp(-np.linalg.norm(sites[:, None] - sites, axis=-1) / 6) + 1e-8 * np.eye(len(sites))
        self.n_features = len(sites)
        self.y = tensor(rng.poisson(np.exp(np.linalg.cholesky(K) @ rng.standard_normal(len(sites)))))
        self.precision = tensor(np.linalg.inv(K))

    def log_prob(self, x):
        return (self.y * x - x.exp()).sum(-1) - ((x @ self.precision) * x).sum(-1) / 2


class ItemResponse(Target):
    """logit P(y_ij) = a_i - b_j of people i and items j, a and b ~ N(0, 1)."""

    n_people, n_items, n_features = 400, 100, 500
    hmc = MappingProxyType({"dense": False, "n_chains": 100, "n_warmup": 10, "n_rounds": 40, "n_trajectories": 4})

    def __init__(self):
        rng = np.random.RandomState(4)
        a, b = rng.standard_normal(self.n_people), rng.standard_normal(self.n_items)
        self.y = tensor(rng.uniform(size=(self.n_people, self.n_items)) < 1 / (1 + np.exp(b - a[:, None])))

    def log_prob(self, x):
        logits = x[:, : self.n_people, None] - x[:, None, self.n_people :]
        return (self.y * logits - softplus(logits)).sum((1, 2)) - x.square().sum(1) / 2


def large_field():
    target = Field(44, 45)
    target.hmc = {"n_chains": 100, "n_warmup": 5, "n_rounds": 40, "n_trajectories": 3, "adapts": False}
    return target


def long_volatility(n_days):
    target = volatility(n_days)
    del target.hmc
    target.nuts = {"n_warmup": 400}
    return target


def volatility(n_days):
    rng = np.random.RandomState(3)
    h = np.zeros(n_days)
    for t in range(1, n_days):
        h[t] = 0.95 * h[t - 1] + 0.25 * rng.standard_normal()
    target = StochasticVolatility(np.exp(h / 2) * rng.standard_normal(n_days))
    target.hmc = {"n_warmup": 40, "n_rounds": 40, "n_trajectories": 10}
    return target


class Shell(Target):
    """log p = -(|x| - 5)^2 / (2 sd^2): a sphere of modes."""

    def __init__(self, n_features, sd):
        self.n_features, self.sd = n_features, sd

    def log_prob(self, x):
        return -(x.norm(dim=1) - 5).square() / (2 * self.sd**2)

    def sample(self, n, generator):
        r = torch.linspace(1e-3, 5 + 10 * self.sd, 20_001, dtype=torch.float64)
        log_p = (self.n_features - 1) * r.log() - (r - 5).square() / (2 * self.sd**2)
        x = normals(n, self.n_features, generator)
        return x / x.norm(dim=1, keepdim=True) * r[log_p.exp().multinomial(n, True, generator=generator), None]


class Drawn(Target):
    """A density in the plane, sampled on a grid of [-5, 5]^2."""

    n_features = 2

    def sample(self, n, generator):
        t = torch.linspace(-5, 5, 2001, dtype=torch.float64)
        x = torch.cartesian_prod(t, t)
        x = x[self.log_prob(x).softmax(0).multinomial(n, True, generator=generator)]
        return x + (torch.rand(x.shape, generator=generator) - 0.5) * (t[1] - t[0])


class Product(Drawn):
    """1 ~ N(ab, .01), a and b ~ N(0, 1)."""

    def log_prob(self, x):
        return -(x.prod(1) - 1).square() / 0.02 - x.square().sum(1) / 2


class Spiral(Drawn):
    """Sixty normals of deviation .25 along a spiral."""

    def log_prob(self, x):
        t = torch.linspace(0.5, 9.4, 60).to(x)
        means = torch.stack([t * t.cos(), t * t.sin()], 1) / 2
        return (-torch.cdist(x, means).square() / (2 * 0.25**2)).logsumexp(1)


class LatentProcess(Target):
    """logit P(y_i) = 2 x_i at a hundred sites, x a Gaussian process of covariance exp(-distance / .2)."""

    n_features = 100
    hmc = MappingProxyType({"n_warmup": 15, "n_rounds": 20, "n_trajectories": 6})

    def __init__(self):
        t, rng = np.linspace(0, 1, 100), np.random.RandomState(0)
        K = np.exp(-np.abs(np.subtract.outer(t, t)) / 0.2) + 1e-6 * np.eye(100)
        x = np.linalg.cholesky(K) @ rng.standard_normal(100)
        self.y, self.precision = tensor(rng.uniform(size=100) < 1 / (1 + np.exp(-2 * x))), tensor(np.linalg.inv(K))

    def log_prob(self, x):
        return (self.y * 2 * x - softplus(2 * x)).sum(1) - ((x @ self.precision) * x).sum(1) / 2


class CorrelatedStudents(Students):
    """A multivariate t distribution of correlations .9^|i - j|."""

    def __init__(self, df, n_features):
        super().__init__(df, n_features, joint=True)
        i = torch.arange(n_features)
        self.L = torch.linalg.cholesky(0.9 ** (i[:, None] - i).abs().double())

    def log_prob(self, x):
        return super().log_prob(torch.linalg.solve_triangular(self.L, x.mT, upper=False).mT)

    def sample(self, n, generator):
        return super().sample(n, generator) @ self.L.mT


DIMENSIONS = (2, 5, 20)
SHAPES = {
    **{f"wide banana, d = {d}": lambda d=d: WideBanana(d) for d in (2, 4, 10)},
    "squared chain": SquaredChain,
    "funnel": Funnel,
    "eight schools, centred": eight_schools_centred,
    "five groups": lambda: FewGroups(centred=False),
    "five groups, centred": lambda: FewGroups(centred=True),
    "counties, centred": CentredCounties,
    **{f"independent Cauchys, d = {d}": lambda d=d: Students(1.0, d) for d in DIMENSIONS},
    **{f"independent t{nu}, d = {d}": lambda nu=nu, d=d: Students(float(nu), d) for nu in (2, 3) for d in DIMENSIONS},
    **{f"multivariate t2, d = {d}": lambda d=d: Students(2.0, d, joint=True) for d in DIMENSIONS},
    "three modes, .9, .09, .01": lambda: Normals(
        [[0.0] * 5, [10.0, 0, 0, 0, 0], [0.0, 10, 0, 0, 0]], [1.0] * 3, [0.9, 0.09, 0.01]
    ),
    **{f"two modes {r} apart, d = {d}": lambda r=r, d=d: apart(d, r) for d in (2, 8, 32, 128) for r in (5, 10, 50)},
    "narrow mode": lambda: apart(5, 8.7, (1.0, 0.3), (0.5, 0.5)),
    **{f"labels of {k}": lambda k=k: Labels(k) for k in (2, 3, 4)},
    "field of 484 sites": lambda: Field(22, 22),
    "items and people, 500": ItemResponse,
    "volatility of 300 days": lambda: volatility(300),
}
DIRECTIONS = {
    f"{kind} along {k}, d = {d}": lambda kind=kind, d=d, k=k: Directions(kind, d, d if k == "all" else k)
    for kind in Directions.KINDS
    for k in (1, 3, "all")
    for d in (5, 20, 100)
}
LARGE = {
    "field of 1,980 sites": large_field,
    "volatility of 1,000 days": lambda: long_volatility(1000),
}
#: By which the defaults and trainings are compared.
CATALOGUE = {
    "ring of sd .1": lambda: Shell(2, 0.1),
    "shell of sd .1, d = 3": lambda: Shell(3, 0.1),
    "shell of sd .5, d = 8": lambda: Shell(8, 0.5),
    "product": Product,
    "spiral": Spiral,
    "correlated t3, d = 10": lambda: CorrelatedStudents(3.0, 10),
    "many wells, d = 32": lambda: ManyWell(32),
    "funnel, d = 20": lambda: Funnel(20),
    "funnel, d = 101": lambda: Funnel(101),
    "latent process of 100 sites": LatentProcess,
}
