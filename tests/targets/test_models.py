"""Posteriors of the public suites: their densities written a second time, with scipy, and bad input."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from plain_targets import generator, normal
from scipy import integrate, stats

from skksivi import targets

rng = np.random.RandomState(0)
X, y = rng.normal(size=(8, 3)), np.arange(8) % 2
WALK = np.array([0.2, np.nan, -0.1, 0.4])
ANSWERS = np.array([[1, 0, np.nan], [0, 0, 1.0]])
COUNTS = np.array([[1, 0], [2, 4]])
RETURNS = np.array([0.3, -0.1, 0.8])
GERMINATED = np.array([10, 23, 23, 26, 17, 5, 53, 55, 32, 46, 10, 8, 10, 8, 23, 0, 3, 22, 15, 32, 3])
SOWN = np.array([39, 62, 81, 51, 39, 6, 74, 72, 51, 79, 13, 16, 30, 28, 45, 4, 12, 41, 30, 51, 7])


def sigmoid(t):
    return 1 / (1 + np.exp(-t))


def bridge(x):
    (log_sigma, log_tau), w, there = x[:2], x[2:], np.isfinite(WALK)
    walk = stats.norm(np.r_[0, w[:-1]], np.exp(log_sigma)).logpdf(w).sum()
    seen = stats.norm(w[there], np.exp(log_tau)).logpdf(WALK[there]).sum()
    return walk + seen + stats.norm(0, 2).logpdf(x[:2]).sum()


def answers(x):
    m, a, b = x[0], x[1:3], x[3:]
    p, asked = sigmoid(m + a[:, None] - b), np.isfinite(ANSWERS)
    likelihood = stats.bernoulli(p[asked]).logpmf(ANSWERS[asked]).sum()
    return likelihood + stats.norm(0.75, 1).logpdf(m) + stats.norm().logpdf(x[1:]).sum()


def cox(x):
    r = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])
    K = 1.5 * np.exp(-np.linalg.norm(r[:, None] - r, axis=2) / (2 * 0.7))
    field = stats.multivariate_normal(4 * [np.log(7) - 0.75], K).logpdf(x)
    return field + stats.poisson(np.exp(x) / 4).logpmf(COUNTS.ravel()).sum()


def volatility(x):
    (logit, mu, log_s), z = x[:3], x[3:]
    u, s = sigmoid(logit), np.exp(log_s)
    phi, h = 2 * u - 1, []
    for t, shock in enumerate(z):
        h.append(mu + s * shock / np.sqrt(1 - phi**2) if t == 0 else mu + phi * (h[-1] - mu) + s * shock)
    of_phi = stats.beta(20, 1.5).logpdf(u) + np.log(u * (1 - u))
    of_scales = stats.cauchy(0, 5).logpdf(mu) + stats.halfcauchy(0, 2).logpdf(s) + log_s
    likelihood = stats.norm(0, np.exp(np.array(h) / 2)).logpdf(RETURNS).sum()
    return likelihood + of_phi + of_scales + stats.norm().logpdf(z).sum()


def sparse(x):
    scales, z = np.exp(x[:4]), x[4:]
    p = sigmoid(X @ (z * scales[1:] * scales[0]))
    priors = stats.gamma(0.5, scale=2).logpdf(scales).sum() + x[:4].sum() + stats.norm().logpdf(z).sum()
    return stats.bernoulli(p).logpmf(y).sum() + priors


def seeds(x):
    alpha, log_tau, b = x[:4], x[4], x[5:]
    u, v = np.arange(21) >= 11, np.isin(np.arange(21), [*range(5, 11), *range(16, 21)])
    p = sigmoid(alpha[0] + alpha[1] * u + alpha[2] * v + alpha[3] * u * v + b)
    likelihood = stats.binom(SOWN, p).logpmf(GERMINATED).sum()
    of_tau = stats.gamma(0.01, scale=100).logpdf(np.exp(log_tau)) + log_tau
    of_b = stats.norm(0, np.exp(-log_tau / 2)).logpdf(b).sum()
    return likelihood + of_tau + of_b + stats.norm(0, 10).logpdf(alpha).sum()


def funnel(x):
    return stats.norm(0, 3).logpdf(x[0]) + stats.norm(0, np.exp(x[0] / 2)).logpdf(x[1:]).sum()


def rosenbrock(x):
    a, b = x[:2], x[2:]
    return stats.norm(1, 1).logpdf(a).sum() + stats.norm(a**2, 0.1**0.5).logpdf(b).sum()


def mixture(x):
    return np.log(np.mean([stats.multivariate_normal(m, 0.3 * np.eye(2)).pdf(x) for m in ([0, 1], [2, -1])]))


DENSITIES = {
    "bridge": (targets.BrownianBridge(WALK), bridge),
    "answers": (targets.ItemResponse(ANSWERS), answers),
    "cox": (targets.LogGaussianCox(COUNTS, variance=1.5, length=0.7), cox),
    "volatility": (targets.StochasticVolatility(RETURNS), volatility),
    "sparse": (targets.SparseLogisticRegression(X, y), sparse),
    "seeds": (targets.SeedGermination(), seeds),
    "funnel": (targets.Funnel(4), funnel),
    "rosenbrock": (targets.Rosenbrock(4), rosenbrock),
    "mixture": (targets.GaussianMixture([[0, 1], [2, -1]], 0.3), mixture),
}
NORMALISED = {"funnel", "rosenbrock", "mixture"}


@pytest.mark.parametrize("name", DENSITIES)
def test_the_density_is_that_of_the_model(name):
    target, log_density = DENSITIES[name]
    x = 0.7 * normal(6, target.n_features)
    actual, expected = target.log_prob(x), torch.tensor([log_density(row) for row in x.numpy()])
    if name not in NORMALISED:
        actual, expected = actual - actual[0], expected - expected[0]
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_they_have_the_dimensions_of_the_suites():
    made = targets.BrownianBridge(), targets.ManyWell(), targets.Rosenbrock()
    assert [target.n_features for target in made] == [32, 32, 36]
    assert targets.ItemResponse(np.zeros((400, 100))).n_features == 501
    assert targets.SparseLogisticRegression(np.tile(X, 9)[:, :25], y).n_features == 51
    assert targets.LogGaussianCox(np.eye(40)).n_features == 1600


def test_wells_have_their_integral_and_their_shares():
    def density(x):
        log_p = targets.ManyWell(2).log_prob(torch.tensor([x, 0.0], dtype=torch.float64)).item()
        return math.exp(log_p) * math.sqrt(2 * math.pi)

    mass = {side: integrate.quad(density, *sorted((0, side * 5)), epsabs=1e-12)[0] for side in (-1, 1)}
    assert mass[-1] + mass[1] == pytest.approx(1, abs=1e-10)
    n = 40_000
    x = targets.ManyWell(4).sample(n, generator())
    share = (x[:, ::2] > 0).double().mean(0)
    assert (share - mass[1]).abs().max() < 4.5 * (mass[1] * mass[-1] / n) ** 0.5


def test_the_expected_count_of_the_cox_process_is_the_one_observed():
    target = targets.LogGaussianCox(10 * COUNTS)
    assert math.exp(target.mean + 1.91 / 2) == pytest.approx(70)


#: Targets, arguments that are right, and for some of the others what they may not be.
SETTINGS = [
    (targets.EightGaussians, {}, {"radius": [0.0], "scale": [-1.0], "shift": [[1.0, 2.0, 3.0], np.nan]}),
    (targets.EightGaussians, {}, {"weights": [[1.0] * 7, [0.0] + [1.0] * 7]}),
    (targets.StudentT, {}, {"df": [0.0, "2"]}),
    (targets.ConditionedDiffusion, {}, {"n_features": [0]}),
    (targets.BayesianLogisticRegression, {"X": X, "y": y}, {"prior_precision": [0.0]}),
    (targets.BayesianNeuralNetwork, {"X": X, "y": y}, {"hyperprior": [(1.0, 0.0), (1.0, 0.1, 1.0)], "n_hidden": [0]}),
    (targets.BayesianNeuralNetwork, {"X": X, "y": y}, {"prior_precision": [0.0], "noise_precision": [-1.0]}),
    (targets.from_score_fn, {"score_fn": torch.neg}, {"n_features": [0]}),
    (targets.Funnel, {}, {"n_features": [1], "scale": [0.0]}),
    (targets.Rosenbrock, {}, {"variance": [-1.0]}),
    (targets.GaussianMixture, {"means": np.eye(2)}, {"covariances": [[[[1.0]]], -1.0], "weights": [[1.0, 0.0]]}),
    (targets.GaussianMixture, {"means": [[0.0, 0.0]]}, {"covariances": [[[[1.0, 2.0], [2.0, 1.0]]]]}),
    (targets.GaussianMixture, {}, {"means": [[1.0, 2.0], [[np.nan]]]}),
    (targets.BrownianBridge, {}, {"observations": [[[0.0]], [np.nan, np.nan], [np.inf, 0.0]]}),
    (targets.LogGaussianCox, {"counts": COUNTS}, {"length": [0.0], "variance": [-1.0]}),
    (targets.StochasticVolatility, {}, {"returns": [[0.1], [0.1, np.nan]]}),
]
BOTH_GIVEN = {"hyperprior": (1.0, 0.1), "prior_precision": 1.0, "noise_precision": 1.0}
MISFITS = [
    (targets.ManyWell, (3,), "must be even"),
    (targets.Rosenbrock, (5,), "must be even"),
    (targets.ConditionedDiffusion, (12,), "multiple of 5"),
    *((targets.BayesianLogisticRegression, (X, labels), "two classes") for labels in (np.zeros(8), np.arange(8))),
    (partial(targets.BayesianNeuralNetwork, **BOTH_GIVEN), (X, y), "leave one of them out"),
    (targets.from_score_fn, (3, 2), "callable"),
    (targets.ItemResponse, ([[2, 0]],), "zeros and ones"),
    (targets.ItemResponse, ([1, 0],), "2D"),
    (targets.LogGaussianCox, ([[1, 0]],), "a square"),
    (targets.LogGaussianCox, ([[0, 0], [0, 0]],), "not all zero"),
    (targets.SparseLogisticRegression, (X, np.zeros(8)), "two classes"),
    (targets.SparseLogisticRegression, (X, y[:3]), "inconsistent numbers"),
]
MISFITS += [
    (partial(make, **right | {name: value}), (), name)
    for make, right, wrong in SETTINGS
    for name, values in wrong.items()
    for value in values
]


@pytest.mark.parametrize(("make", "args", "message"), MISFITS)
def test_a_setting_out_of_range_is_named(make, args, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(*args)
