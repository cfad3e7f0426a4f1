"""Posteriors that people bring: on unconstrained parameters, in the raw units of their data.

Each is a `skksivi.targets.Target` known by its `log_prob`; `sample` is there where an exact sampler is. Their
reference draws are made by `python benchmarks/reference.py posteriors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from torch.nn.functional import logsigmoid, pad, softplus

from skksivi.datasets import load_waveform
from skksivi.targets import (
    Banana,
    BayesianLogisticRegression,
    ConditionedDiffusion,
    Funnel,
    Multimodal,
    Target,
    XShaped,
)


def normal(r, log_sd):
    """Return log N(r; 0, sd^2) of each entry, up to its constant."""
    return -(r * (-log_sd).exp()).square() / 2 - log_sd


def wide(x, sd=10.0):
    """Return the log-density of the prior N(0, sd^2) on every column of x (n, k), up to its constant."""
    return -(x / sd).square().sum(-1) / 2


def tensor(a):
    return torch.as_tensor(np.asarray(a), dtype=torch.float64)


def discounted_sum(x, rate):
    """Return y_t = x_t + rate y_{t-1} along the last axis of x (..., T), for rates (..., 1), in log T steps."""
    step = 1
    while step < x.shape[-1]:
        x = x + rate * pad(x[..., :-step], (step, 0))
        step, rate = 2 * step, rate.square()
    return x


def with_intercept(X):
    return np.column_stack([np.ones(len(X)), X])


# Densities with an exact sampler


class Gaussian(Target):
    """N(m, L L^T), the coordinates at scales and distances of your choice."""

    def __init__(self, mean, covariance):
        self.n_features = len(mean)
        self.mean = tensor(mean)
        self.root = torch.linalg.cholesky(tensor(covariance))
        self.precision = torch.cholesky_inverse(self.root)

    def log_prob(self, x):
        r = x - self.mean
        return -(r @ self.precision * r).sum(-1) / 2

    def sample(self, n, generator):
        return self.mean + torch.randn(n, self.n_features, generator=generator, dtype=torch.float64) @ self.root.mT


class StudentT(Gaussian):
    """The multivariate t_5, log p = -(5 + d)/2 log(1 + r^T P r / 5)."""

    df = 5

    def log_prob(self, x):
        r = x - self.mean
        return -(self.df + self.n_features) / 2 * torch.log1p((r @ self.precision * r).sum(-1) / self.df)

    def sample(self, n, generator):
        normals = torch.randn(n, self.df, generator=generator, dtype=torch.float64)
        return (
            self.mean + (super().sample(n, generator) - self.mean) * normals.square().mean(-1, keepdim=True).rsqrt()
        )


class LogGamma(Target):
    """x = m + A log g, g_i ~ Gamma(a_i): with y = A^-1 (x - m), log p = a^T y - sum e^y."""

    def __init__(self, a, mean, A):
        self.n_features = len(a)
        self.a, self.mean, self.A, self.inverse = map(tensor, (a, mean, A, np.linalg.inv(A)))

    def log_prob(self, x):
        y = (x - self.mean) @ self.inverse.mT
        return y @ self.a - y.exp().sum(-1)

    def sample(self, n, generator):
        seed = torch.randint(2**31, (), generator=generator).item()
        g = np.random.RandomState(seed).gamma(self.a.numpy(), size=(n, self.n_features))
        return self.mean + tensor(np.log(g)) @ self.A.mT


class Blobs(Target):
    """Isotropic Gaussians of equal weight, log p = logsumexp_k log N(x; m_k, s_k^2 I)."""

    def __init__(self, means, sds):
        self.n_features = len(means[0])
        self.means, self.log_sds = tensor(means), tensor(sds).log()

    def log_prob(self, x):
        return normal(x[:, None] - self.means, self.log_sds[:, None]).sum(-1).logsumexp(-1)

    def sample(self, n, generator):
        k = torch.randint(len(self.means), (n,), generator=generator)
        xi = torch.randn(n, self.n_features, generator=generator, dtype=torch.float64)
        return self.means[k] + self.log_sds[k].exp()[:, None] * xi


# Regressions


class Regression(Target):
    """The posterior of x = (beta, shape parameters) with linear predictor eta = X beta, prior beta ~ N(0, sd^2)."""

    n_shapes = 0
    prior_sd = 10.0

    def __init__(self, X, y):
        self.X, self.y = tensor(X), tensor(y)
        self.n_features = self.X.shape[1] + self.n_shapes

    def log_prob(self, x):
        beta, *shapes = x.split([self.X.shape[1], *self.n_shapes * [1]], -1)
        return wide(beta, self.prior_sd) + self.log_likelihood(beta @ self.X.mT, *shapes)


class LinearRegression(Regression):
    """y ~ N(eta, sigma^2), log sigma ~ N(0, 5^2)."""

    n_shapes = 1
    prior_sd = 1000.0

    def log_likelihood(self, eta, log_sigma):
        return normal(self.y - eta, log_sigma).sum(-1) + wide(log_sigma, 5.0)


class RobustRegression(Regression):
    """y ~ eta + sigma t_nu, log sigma ~ N(0, 5^2), nu ~ Gamma(2, 0.1)."""

    n_shapes = 2
    prior_sd = 1000.0

    def log_likelihood(self, eta, log_sigma, log_nu):
        nu = log_nu.exp()
        r = (self.y - eta) * (-log_sigma).exp()
        log_t = ((nu + 1) / 2).lgamma() - (nu / 2).lgamma() - log_nu / 2 - log_sigma
        log_t = log_t - (nu + 1) / 2 * torch.log1p(r.square() / nu)
        return log_t.sum(-1) + wide(log_sigma, 5.0) + (2 * log_nu - 0.1 * nu)[:, 0]


class PoissonRegression(Regression):
    """y ~ Poisson(e^eta)."""

    def log_likelihood(self, eta):
        return eta @ self.y - eta.exp().sum(-1)


class NegativeBinomialRegression(Regression):
    """y ~ Poisson(e^eta g), g ~ Gamma(r, r), log r ~ N(0, 2^2)."""

    n_shapes = 1

    def log_likelihood(self, eta, log_r):
        r, odds = log_r.exp(), eta - log_r
        log_nb = (self.y + r).lgamma() - r.lgamma() + self.y * odds - (self.y + r) * softplus(odds)
        return log_nb.sum(-1) + wide(log_r, 2.0)


class WeibullRegression(Regression):
    """P(T > t) = exp(-(t e^-eta)^k), log k ~ N(0, 1), y = (log t, whether it ended)."""

    n_shapes = 1

    def log_likelihood(self, eta, log_k):
        log_t, ended = self.y
        z = log_k.exp() * (log_t - eta)
        return (ended * (log_k + z) - z.exp()).sum(-1) + wide(log_k, 1.0)


class OrderedLogit(Regression):
    """P(y <= k) = sigmoid(c_k - eta), the shape parameters are c_0 and log(c_k - c_{k-1}) ~ N(0, 2^2)."""

    n_shapes = 3

    def log_likelihood(self, eta, c_0, *log_gaps):
        y, top = self.y.long(), self.n_shapes
        log_gaps = torch.cat(log_gaps, -1)
        cuts = torch.cat([c_0, log_gaps.exp()], -1).cumsum(-1)
        below, above = y < top, y > 0
        # sigmoid(a) - sigmoid(b) = sigmoid(a) sigmoid(-b) (1 - e^-(a - b))
        log_p = logsigmoid(cuts[:, y[below]] - eta[:, below]).sum(-1)
        log_p = log_p + logsigmoid(eta[:, above] - cuts[:, y[above] - 1]).sum(-1)
        counts = torch.bincount(y, minlength=top + 1)[1:top].to(eta)
        return log_p + (-torch.expm1(-log_gaps.exp())).log() @ counts + wide(c_0) + wide(log_gaps, 2.0)


# Hierarchies


class EightSchools(Target):
    """y_j ~ N(mu + tau z_j, s_j^2), z ~ N(0, I), mu ~ N(0, 5^2), tau ~ C+(0, 5); x = (mu, log tau, z)."""

    n_features = 10

    def __init__(self):
        self.y = tensor([28, 8, -3, 7, -1, 1, 18, 12])
        self.log_sd = tensor([15, 10, 16, 11, 9, 11, 10, 18]).log()

    def log_prob(self, x):
        mu, log_tau, z = x.split([1, 1, 8], -1)
        half_cauchy = log_tau - softplus(2 * (log_tau - math.log(5)))
        likelihood = normal(self.y - mu - log_tau.exp() * z, self.log_sd)
        return likelihood.sum(-1) + wide(z, 1.0) + wide(mu, 5.0) + half_cauchy[:, 0]


class HierarchicalNormal(Target):
    """y_ij ~ N(mu + tau z_i, sigma^2), z ~ N(0, I), mu ~ N(0, 1000^2), tau ~ N+(0, 100^2), log sigma ~ N(0, 5^2).

    x = (mu, log tau, log sigma, z).
    """

    def __init__(self, Y):
        self.n_features = 3 + len(Y)
        self.Y = tensor(Y)

    def log_prob(self, x):
        mu, log_tau, log_sigma, z = x.split([1, 1, 1, len(self.Y)], -1)
        theta = mu + log_tau.exp() * z
        likelihood = normal(self.Y - theta[:, :, None], log_sigma[:, :, None]).sum((-2, -1))
        half_normal = log_tau[:, 0] + wide(log_tau.exp(), 100.0)
        return likelihood + wide(z, 1.0) + wide(mu, 1000.0) + half_normal + wide(log_sigma, 5.0)


class Centred(Target):
    """A hierarchy of x = (mu, log tau, ..., z), now in (mu, log tau, ..., theta) with theta = mu + tau z.

    Its density at theta = mu has no bound as tau falls to zero.
    """

    def __init__(self, easier, n_groups):
        self.n_features = easier.n_features
        self.easier, self.n_groups = easier, n_groups

    def log_prob(self, x):
        top, theta = x[:, : -self.n_groups], x[:, -self.n_groups :]
        mu, log_tau = x[:, :1], x[:, 1:2]
        z = (theta - mu) * (-log_tau).exp()
        return self.easier.log_prob(torch.cat([top, z], -1)) - self.n_groups * log_tau[:, 0]

    def from_easier(self, x):
        top, z = x[:, : -self.n_groups], x[:, -self.n_groups :]
        return torch.cat([top, x[:, :1] + x[:, 1:2].exp() * z], -1)

    def to(self, **kwargs):
        moved = super().to(**kwargs)
        moved.easier = self.easier.to(**kwargs)
        return moved


class HierarchicalLogistic(Target):
    """logit P(y) = a + b age + tau z_j, z ~ N(0, I), tau ~ N+(0, 1), a, b ~ N(0, 10^2); x = (a, b, log tau, z)."""

    def __init__(self, age, group, y):
        self.age, self.y = tensor(age), tensor(y)
        self.group = torch.as_tensor(group)
        self.n_features = 3 + int(self.group.max()) + 1

    def log_prob(self, x):
        a, b, log_tau, z = x.split([1, 1, 1, self.n_features - 3], -1)
        logits = a + b * self.age + log_tau.exp() * z[:, self.group]
        half_normal = log_tau[:, 0] + wide(log_tau.exp(), 1.0)
        return logits @ self.y - softplus(logits).sum(-1) + wide(a) + wide(b) + half_normal + wide(z, 1.0)


# Time series, a Gaussian process, a mixture


class Garch(Target):
    """r_t ~ N(mu, v_t), v_t = omega + alpha (r_{t-1} - mu)^2 + beta v_{t-1}.

    x = (mu, log omega, logit(alpha + beta), logit(alpha / (alpha + beta))) ~ N((0, 0, 2, -1), (10, 10, 1.5, 1.5)^2).
    """

    n_features = 4

    def __init__(self, returns):
        self.returns = tensor(returns)

    def log_prob(self, x):
        mu, log_omega, persistence, share = x.split(1, -1)
        alpha, beta = persistence.sigmoid() * share.sigmoid(), persistence.sigmoid() * (-share).sigmoid()
        r = self.returns - mu
        past = pad(r[:, :-1].square(), (1, 0), value=self.returns.var().item())
        log_v = discounted_sum(log_omega.exp() + alpha * past, beta).log()
        return normal(r, log_v / 2).sum(-1) + wide(x[:, :2]) + wide(persistence - 2, 1.5) + wide(share + 1, 1.5)


class StochasticVolatility(Target):
    """r_t ~ N(0, e^h_t), h_t - mu = phi (h_{t-1} - mu) + s z_t, z ~ N(0, I); x = (mu, atanh phi, log s, z).

    mu ~ N(0, 10^2), atanh phi ~ N(1.5, 0.5^2), log s ~ N(-1, 0.5^2).
    """

    def __init__(self, returns):
        self.returns = tensor(returns)
        self.n_features = 3 + len(returns)

    def log_prob(self, x):
        mu, atanh_phi, log_s, z = x.split([1, 1, 1, len(self.returns)], -1)
        h = mu + log_s.exp() * discounted_sum(z, atanh_phi.tanh())
        priors = wide(mu) + wide(atanh_phi - 1.5, 0.5) + wide(log_s + 1, 0.5) + wide(z, 1.0)
        return normal(self.returns, h / 2).sum(-1) + priors


class GaussianProcess(Target):
    """y ~ N(0, K), K = a^2 (exp(-(t - t')^2 / 2 l^2) + 1e-6 I) + s^2 I; x = (log l, log a, log s) ~ N(c, 1.5^2)."""

    n_features = 3

    def __init__(self, t, y):
        self.squares, self.y = (tensor(t)[:, None] - tensor(t)).square(), tensor(y)
        self.centre = tensor([5.0, 20.0, 5.0]).log()

    def log_prob(self, x):
        length, amplitude, noise = x[:, :, None, None].exp().square().unbind(1)
        identity = torch.eye(len(self.y), dtype=x.dtype, device=x.device)
        K = amplitude * ((-self.squares / (2 * length)).exp() + 1e-6 * identity) + noise * identity
        L = torch.linalg.cholesky_ex(K).L  # log p is not a number where K is not positive: no error
        z = torch.linalg.solve_triangular(L, self.y.expand(len(x), -1)[..., None], upper=False)[..., 0]
        return wide(z, 1.0) - L.diagonal(dim1=-2, dim2=-1).log().sum(-1) + wide(x - self.centre, 1.5)


class OrderedMixture(Target):
    """y_i ~ (1 - w) N(m, s_1^2) + w N(m + gap, s_2^2); x = (m, log gap, log s_1, log s_2, logit w).

    m ~ N(0, 100^2), log gap ~ N(3, 0.5^2), log s ~ N(2, 0.4^2), logit w ~ N(0, 1).
    """

    n_features = 5

    def __init__(self, y):
        self.y = tensor(y)

    def log_prob(self, x):
        m, log_gap, log_s1, log_s2, logit_w = x.split(1, -1)
        first = logsigmoid(-logit_w) + normal(self.y - m, log_s1)
        second = logsigmoid(logit_w) + normal(self.y - m - log_gap.exp(), log_s2)
        likelihood = torch.stack([first, second]).logsumexp(0).sum(-1)
        scales = wide(log_gap - 3, 0.5) + wide(x[:, 2:4] - 2, 0.4)
        return likelihood + wide(m, 100.0) + scales + wide(logit_w, 1.0)


# Their data


def badly_scaled():
    """Marginal sds 1e-3 to 1e3, correlated, means at up to 1e4 sds."""
    rng = np.random.RandomState(0)
    A = rng.standard_normal((10, 14))
    sds = np.logspace(-3, 3, 10)
    correlation = np.corrcoef(A)
    return Gaussian(sds * [0, 1e4, -3, 0, 1e3, 0, -1e4, 1, 3e3, -1e3], correlation * np.outer(sds, sds))


def ill_conditioned():
    """Condition number 1e10 along random axes."""
    rng = np.random.RandomState(1)
    Q, _ = np.linalg.qr(rng.standard_normal((20, 20)))
    return Gaussian(10 * rng.standard_normal(20), Q * np.logspace(-5, 5, 20) @ Q.T)


def hundred_dimensional():
    rng = np.random.RandomState(2)
    A = rng.standard_normal((100, 150))
    return Gaussian(rng.standard_normal(100), A @ A.T / 150)


def student_t():
    rng = np.random.RandomState(3)
    sds = np.array([0.1, 1, 1, 10, 100])
    return StudentT(3 * sds, np.corrcoef(rng.standard_normal((5, 7))) * np.outer(sds, sds))


def log_gamma():
    rng = np.random.RandomState(4)
    Q, _ = np.linalg.qr(rng.standard_normal((5, 5)))
    return LogGamma([0.5, 0.7, 1, 1.5, 2], [1, 0, -20, 5, 0], np.array([0.1, 1, 10, 1, 5])[:, None] * Q)


def eight_blobs():
    angles = np.arange(8) * np.pi / 4
    return Blobs(5 * np.column_stack([np.cos(angles), np.sin(angles)]), np.full(8, 0.7))


def two_blobs():
    return Blobs(np.outer([-1, 1], [3.0, 2, 0, -2, 1]), [1.0, 0.3])


def waveform_target():
    X, y = load_waveform(return_X_y=True)
    return BayesianLogisticRegression(X, y, prior_precision=0.01, fit_intercept=True)


def diabetes():
    X, y = load_diabetes(return_X_y=True, scaled=False)
    return LinearRegression(with_intercept(X), y)


def stack_loss():
    """Brownlee's plant: air flow, water temperature and acid against the ammonia lost, 21 days, some outliers."""
    air = [80, 80, 75, 62, 62, 62, 62, 62, 58, 58, 58, 58, 58, 58, 50, 50, 50, 50, 50, 56, 70]
    water = [27, 27, 25, 24, 22, 23, 24, 24, 23, 18, 18, 17, 18, 19, 18, 18, 19, 19, 20, 20, 20]
    acid = [89, 88, 90, 87, 87, 87, 93, 93, 87, 80, 89, 88, 82, 93, 89, 86, 72, 79, 80, 82, 91]
    loss = [42, 37, 37, 28, 18, 18, 19, 20, 15, 14, 14, 13, 11, 12, 8, 7, 8, 8, 9, 15, 15]
    return RobustRegression(with_intercept(np.column_stack([air, water, acid])), loss)


def breast_cancer():
    return BayesianLogisticRegression(*load_breast_cancer(return_X_y=True), fit_intercept=True)


def twenty_irises():
    """Two species, ten flowers of each, that petals all but separate."""
    X, y = load_iris(return_X_y=True)
    rows = np.r_[70:80, 130:140]
    return BayesianLogisticRegression(X[rows, 2:], y[rows], prior_precision=1e-3, fit_intercept=True)


def bioassay():
    """Racine et al. (1986): five animals at each of four log-doses, 0, 1, 3, 5 deaths."""
    dose = np.repeat([-0.86, -0.30, -0.05, 0.73], 5)
    died = np.concatenate([np.arange(5) < deaths for deaths in (0, 1, 3, 5)])
    return BayesianLogisticRegression(dose[:, None], died, prior_precision=1e-3, fit_intercept=True)


def people(rng, n):
    """Return rows of age in years, yearly income and whether one smokes."""
    return np.column_stack([rng.uniform(20, 80, n), rng.uniform(1e4, 1e5, n), rng.uniform(size=n) < 0.3])


def doctor_visits():
    rng = np.random.RandomState(5)
    X = with_intercept(people(rng, 200))
    return PoissonRegression(X, rng.poisson(np.exp(X @ [-0.5, 0.02, -5e-6, 0.4])))


def sick_days():
    rng = np.random.RandomState(6)
    X = with_intercept(people(rng, 150))
    return NegativeBinomialRegression(
        X, rng.poisson(np.exp(X @ [0.5, 0.02, -5e-6, 0.5]) * rng.gamma(1.5, 1 / 1.5, 150))
    )


def survival():
    """Days to the end of a treatment, watched for at most 1,000."""
    rng = np.random.RandomState(7)
    X = with_intercept(people(rng, 120))
    days = np.exp(X @ [8.0, -0.03, 4e-6, -0.5]) * rng.weibull(1.4, 120)
    return WeibullRegression(X, [np.log(np.minimum(days, 1000)), days < 1000])


def satisfaction():
    """Four ordered answers."""
    rng = np.random.RandomState(8)
    X = people(rng, 150)
    latent = X @ [0.03, 2e-5, -0.5] + rng.logistic(size=150)
    return OrderedLogit(X, np.digitize(latent, [0.5, 2, 4.5]))


def autoregression():
    """An AR(2) about the level 500, as the regression of y_t on (1, y_{t-1}, y_{t-2})."""
    rng = np.random.RandomState(9)
    y = [500.0, 500.0]
    for shock in 20 * rng.standard_normal(150):
        y.append(100 + 0.5 * y[-1] + 0.3 * y[-2] + shock)
    return LinearRegression(with_intercept(np.column_stack([y[1:-1], y[:-2]])), y[2:])


def eight_schools_centred():
    return Centred(EightSchools(), 8)


def exam_marks():
    """Ten schools of forty pupils."""
    rng = np.random.RandomState(10)
    Y = 500 + 50 * rng.standard_normal((10, 1)) + 80 * rng.standard_normal((10, 40))
    return Centred(HierarchicalNormal(Y), len(Y))


def hospitals():
    """Fifteen hospitals, twelve patients in each."""
    rng = np.random.RandomState(11)
    group, age = np.repeat(np.arange(15), 12), rng.uniform(20, 80, 180)
    logits = -3 + 0.05 * age + 0.8 * rng.standard_normal(15)[group]
    return HierarchicalLogistic(age, group, rng.uniform(size=180) < 1 / (1 + np.exp(-logits)))


def simulate_garch():
    rng = np.random.RandomState(12)
    v, returns = 1.0, []
    for z in rng.standard_normal(250):
        returns.append(0.05 + v**0.5 * z)
        v = 0.1 + 0.25 * (returns[-1] - 0.05) ** 2 + 0.65 * v
    return Garch(returns)


def stochastic_volatility():
    rng = np.random.RandomState(13)
    h, returns = 0.0, []
    for z, shock in rng.standard_normal((30, 2)):
        h = 0.9 * h + 0.5 * shock
        returns.append(np.exp(h / 2) * z)
    return StochasticVolatility(returns)


def gaussian_process():
    rng = np.random.RandomState(14)
    t = np.sort(rng.uniform(0, 30, 30))
    return GaussianProcess(t, 25 * np.sin(t / 4) + 10 * np.cos(t / 2.3) + 6 * rng.standard_normal(30))


def geyser():
    """Minutes between eruptions, short ones and long ones."""
    rng = np.random.RandomState(15)
    return OrderedMixture(np.r_[rng.normal(55, 7, 15), rng.normal(78, 8, 25)])


class Posterior(NamedTuple):
    """How to make it, and what is hard about it."""

    make: Callable[[], Target]
    kind: set[str]


POSTERIORS = {
    "badly_scaled": Posterior(badly_scaled, {"gaussian"}),
    "ill_conditioned": Posterior(ill_conditioned, {"gaussian"}),
    "hundred_dimensional": Posterior(hundred_dimensional, {"gaussian"}),
    "diabetes": Posterior(diabetes, {"regression"}),
    "stack_loss": Posterior(stack_loss, {"regression", "skewed"}),
    "waveform": Posterior(waveform_target, {"regression"}),
    "breast_cancer": Posterior(breast_cancer, {"regression"}),
    "twenty_irises": Posterior(twenty_irises, {"regression", "skewed"}),
    "bioassay": Posterior(bioassay, {"regression", "skewed"}),
    "doctor_visits": Posterior(doctor_visits, {"regression"}),
    "sick_days": Posterior(sick_days, {"regression"}),
    "survival": Posterior(survival, {"regression"}),
    "satisfaction": Posterior(satisfaction, {"regression"}),
    "autoregression": Posterior(autoregression, {"regression"}),
    "eight_schools": Posterior(EightSchools, {"hierarchical", "skewed"}),
    "eight_schools_centred": Posterior(eight_schools_centred, {"hierarchical", "funnel"}),
    "exam_marks": Posterior(exam_marks, {"hierarchical"}),
    "hospitals": Posterior(hospitals, {"hierarchical", "skewed"}),
    "garch": Posterior(simulate_garch, {"skewed"}),
    "stochastic_volatility": Posterior(stochastic_volatility, {"hierarchical"}),
    "gaussian_process": Posterior(gaussian_process, {"skewed"}),
    "geyser": Posterior(geyser, {"skewed"}),
    "diffusion": Posterior(ConditionedDiffusion, {"curved"}),
    "log_gamma": Posterior(log_gamma, {"skewed"}),
    "student_t": Posterior(student_t, {"heavy"}),
    "funnel": Posterior(Funnel, {"funnel"}),
    "banana": Posterior(Banana, {"curved"}),
    "x_shaped": Posterior(XShaped, {"curved"}),
    "multimodal": Posterior(Multimodal, {"modes"}),
    "eight_blobs": Posterior(eight_blobs, {"modes"}),
    "two_blobs": Posterior(two_blobs, {"modes"}),
}


if __name__ == "__main__":
    for name, (make, kind) in POSTERIORS.items():
        print(f"{name:<24}{make().n_features:>5}  {', '.join(sorted(kind))}")
