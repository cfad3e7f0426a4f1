"""Particles: SVGD, KSD descent and MIED by their definitions, where they start and end, what is drawn from them."""

import itertools
import math

import numpy as np
import pytest
import torch
from members import every
from misbehaving import Misbehaving
from plain_targets import generator, normal, student_score
from sklearn.exceptions import ConvergenceWarning

from skksivi import kernels
from skksivi.baselines import MALA, MIED, SVGD, KSDDescent
from skksivi.baselines._particles import MOLLIFIERS, ksd_gradient, last_fall, mied_gradient, svgd_direction
from skksivi.baselines._points import find_start
from skksivi.families._samplers import Particles
from skksivi.score._probe import in_double
from skksivi.score._score import autograd_pullback
from skksivi.start import find_whitening
from skksivi.targets import Banana, from_score_fn

KERNELS = {
    "gaussian": (kernels.Gaussian, lambda r, h: torch.exp(-(r**2) / (2 * h**2))),
    "imq": (kernels.IMQ, lambda r, h: (1 + r**2 / h**2) ** -0.5),
    "laplace": (kernels.Laplace, lambda r, h: torch.exp(-r / h)),
}


def by_definition(x, s, k):
    """The double sum, with the gradient of the kernel in its first argument by automatic differentiation."""
    phi = s.clone()  # of i = j, where the gradient of a radial kernel is zero
    for i, j in itertools.permutations(range(len(x)), 2):
        y = x[j].clone().requires_grad_()
        value = k((y - x[i]).norm())
        phi[i] += value.detach() * s[j] + torch.autograd.grad(value, y)[0]
    return phi / len(x)


@every("cls, k", KERNELS)
@every("bandwidth", [0.7, "median"])
def test_the_direction_is_its_definition(bandwidth, cls, k):
    x = normal(6, 3)
    h = cls(bandwidth=bandwidth).frozen(x).bandwidth
    expected = by_definition(x, student_score(x), lambda r: k(r, h))
    actual = svgd_direction(x, student_score(x), cls(bandwidth=bandwidth))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


# Where points start


def test_points_where_the_score_is_not_finite_go_to_others():
    score = in_double(lambda x: 1 / x.clamp_min(0).sqrt().sqrt() - x, 2)
    _, u = find_start((torch.ones(2), torch.eye(2)), None, 500, score, generator())
    x = u + 1
    assert score(x).isfinite().all()
    assert len(x.unique(dim=0)) > 300  # the share of a quadrant, Phi(1)^2 = 0.71


ENDING = [(SVGD(n_particles=20, max_iter=999), 120, "not finite"), (KSDDescent(tol=0), 39, "The loss is nan at")]


@every("q, call, words", ENDING)
def test_a_score_that_ends_to_be_finite_ends_the_fit_and_keeps_the_particles(q, call, words):
    q.set_params(whiten=None, random_state=0)
    with pytest.raises(FloatingPointError, match=words):
        q.fit(Misbehaving(lambda s: torch.nan * s, call), n_features=2)
    assert 0 < q.n_iter_ <= 150
    assert np.isfinite(q.sample(20)).all()


# Draws


def test_up_to_their_number_draws_are_particles_without_replacement():
    q = SVGD(n_particles=40, max_iter=20, random_state=0).fit(lambda x: 3 - x, n_features=2)
    for n in (1, 25, 40):
        drawn = set(map(tuple, q.sample(n)))
        assert len(drawn) == n
        assert drawn <= set(map(tuple, q.particles_))
    assert not np.array_equal(q.sample(40, random_state=0), q.sample(40, random_state=1))


def test_more_draws_reach_half_way_to_the_nearest_other_particle():
    n, X = 30_000, np.zeros((4, 3))
    X[:, 0] = 0, 1, 1000, 1004
    whitening, _ = find_whitening(None, in_double(torch.neg, 3), generator())
    drawn = Particles(X, whitening).sample(n, generator()).numpy()
    far = drawn[:, 0] > 500
    assert abs(far.mean() - 0.5) < 4 * math.sqrt(0.25 / n)
    for r, pair in ((1, drawn[~far]), (4, drawn[far])):
        square = np.mean(pair[:, 1:] ** 2)
        assert square == pytest.approx((r / 2) ** 2 / 3, rel=4 * math.sqrt(2 / pair[:, 1:].size))


SMOOTH = {
    "gaussian": (kernels.Gaussian(bandwidth=1.3), lambda r2: torch.exp(-r2 / (2 * 1.3**2))),
    "imq": (kernels.IMQ(bandwidth=0.8), lambda r2: (1 + r2 / 0.64) ** -0.5),
    "imq 0.3": (kernels.IMQ(bandwidth=0.8, exponent=0.3), lambda r2: (1 + r2 / 0.64) ** -0.3),
}


def score_fn(x):
    """Of log p = -sum cosh(x_i) - (x_1 x_2 ... )^2 / 2, whose Jacobian is no diagonal."""
    others = x.prod(-1, keepdim=True) / x
    return -x.sinh() - x.prod(-1, keepdim=True) * others


def discrepancy(x, k):
    """The mean of the Stein kernel over all pairs, by automatic differentiation of the kernel."""
    total, s = 0, score_fn(x)
    for i, j in itertools.product(range(len(x)), repeat=2):
        a, b = x[i] + 0, x[j] + 0
        value = k((a - b).square().sum())
        in_a, in_b = torch.autograd.grad(value, (a, b), create_graph=True)
        trace = sum(torch.autograd.grad(in_a[c], b, create_graph=True)[0][c] for c in range(len(a)))
        total = total + s[i] @ s[j] * value + s[i] @ in_b + s[j] @ in_a + trace
    return total / len(x) ** 2


@every("kernel, k", SMOOTH)
def test_value_and_gradient_are_those_of_the_definition(kernel, k):
    x = normal(5, 3).requires_grad_()
    expected = discrepancy(x, k)
    value, dx, ds = ksd_gradient(x.detach(), score_fn(x.detach()), kernel)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-10, atol=0)
    (gradient,) = torch.autograd.grad(expected, x)
    torch.testing.assert_close(dx + autograd_pullback(score_fn, x)[1](ds), gradient, rtol=1e-9, atol=1e-11)


def test_lbfgs_that_ends_too_early_says_so():
    q = KSDDescent(n_particles=20, max_iter=10, random_state=0)
    with pytest.warns(ConvergenceWarning, match=r"after 10 iterations, .* fell by \d+%. Raise `max_iter`"):
        q.fit(lambda x: -x - x**3, n_features=2)
    q.set_params(solver="adam").fit(lambda x: -x - x**3, n_features=2)  # whose steps are as many as were asked for
    converged = q.set_params(solver="lbfgs", max_iter=100, tol=0.0).fit(lambda x: -x - x**3, n_features=2)
    assert (converged.n_iter_, last_fall([5.0, 3.0, 4.0])) == (100, 0)
    assert last_fall([9.0] * 10 + [8.0] * 18 + [7.0, 6.0]) == 1 / 4


FORMULAS = {
    "riesz": lambda r2, epsilon, d: (r2 + epsilon**2) ** (-(d + 1e-4) / 2),
    "gaussian": lambda r2, epsilon, d: torch.exp(-r2 / (2 * epsilon**2)),
    "laplace": lambda r2, epsilon, d: torch.exp(-r2.sqrt() / epsilon),
}


def energy(x, log_prob, formula, epsilon):
    """The definition, pair by pair."""
    n, d = x.shape
    p, total = log_prob(x).exp(), 0
    for i, j in itertools.product(range(n), repeat=2):
        r2 = (x[i] - x[j]).square().sum()
        if i == j:
            nearest = min((x[i] - x[k]).norm() for k in range(n) if k != i)
            r2 = (nearest.detach() / (1.3 * d) ** (1 / d)) ** 2
        total = total + formula(r2, epsilon, d) * (p[i] * p[j]) ** -0.5
    return torch.log(total / n**2)


@every("d", [1, 2, 3])
@every("name", list(FORMULAS))
def test_energy_and_gradient_are_those_of_the_definition(name, d):
    def log_prob(x):
        return -x.cosh().sum(-1) - x.prod(-1).square()

    x = normal(6, d, seed=d).requires_grad_()
    (s,) = torch.autograd.grad(log_prob(x).sum(), x)
    expected = energy(x, log_prob, FORMULAS[name], 0.5)
    (gradient,) = torch.autograd.grad(expected, x)
    x = x.detach()
    value, actual = mied_gradient(x, log_prob(x), s, MOLLIFIERS[name], 0.5)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(actual, gradient, rtol=1e-9, atol=1e-11)


# Log-densities from scores


def test_without_log_prob_the_fit_is_the_same():
    """Along every step the log-density of the banana is a polynomial of degree four."""
    banana, q = Banana(), MIED(n_particles=30, max_iter=100, random_state=0)
    with_density = q.fit(banana).particles_
    assert not np.array_equal(q.fit(Banana().score_fn, n_features=2).particles_, with_density)
    np.testing.assert_allclose(q.particles_, with_density, rtol=0, atol=1e-4)


SHORT = MALA(n_chains=20, n_warmup=20, n_draws=2, random_state=0)


@every("q", [MIED(n_particles=20, max_iter=20, random_state=0), SHORT])
def test_a_density_that_contradicts_the_score_is_left_alone(q):
    target = from_score_fn(Banana().score_fn, 2, log_prob=lambda x: 10 * Banana().log_prob(x))
    with pytest.warns(UserWarning, match="`log_prob` of the target contradicts its `score_fn`"):
        X = q.fit(target).sample(20, random_state=0)
    np.testing.assert_array_equal(q.fit(Banana().score_fn, n_features=2).sample(20, random_state=0), X)
