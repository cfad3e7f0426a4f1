"""MIED: energy and gradient by the definition; log-densities from scores alone; moments of Gaussians."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from plain_targets import normal

from skksivi.baselines import MALA, MIED
from skksivi.baselines._particles import MOLLIFIERS, mied_gradient
from skksivi.targets import Banana, from_score_fn

FORMULAS = {
    "riesz": lambda r2, epsilon, d: (r2 + epsilon**2) ** (-(d + 1e-4) / 2),
    "gaussian": lambda r2, epsilon, d: torch.exp(-r2 / (2 * epsilon**2)),
    "laplace": lambda r2, epsilon, d: torch.exp(-r2.sqrt() / epsilon),
}


def energy(x, log_prob, formula, epsilon):
    """The definition, pair by pair."""
    n, d = x.shape
    p, total = log_prob(x).exp(), 0
    for i in range(n):
        for j in range(n):
            if i == j:
                nearest = min((x[i] - x[k]).norm() for k in range(n) if k != i)
                r2 = (nearest.detach() / (1.3 * d) ** (1 / d)) ** 2
            else:
                r2 = (x[i] - x[j]).square().sum()
            total = total + formula(r2, epsilon, d) * (p[i] * p[j]) ** -0.5
    return torch.log(total / n**2)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("d", [1, 2, 3])
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


def test_a_constant_in_log_p_shifts_the_energy_alone():
    x, log_p, s = normal(5, 2), normal(5, seed=1), normal(5, 2, seed=2)
    value, gradient = mied_gradient(x, log_p, s, MOLLIFIERS["riesz"], 1e-4)
    shifted, same = mied_gradient(x, log_p + 800, s, MOLLIFIERS["riesz"], 1e-4)
    torch.testing.assert_close(shifted, value - 800)
    torch.testing.assert_close(same, gradient)


# Log-densities from scores


def test_without_log_prob_the_fit_is_the_same():
    """Along every step the log-density of the banana is a polynomial of degree four."""
    banana, q = Banana(), MIED(n_particles=30, max_iter=100, random_state=0)
    with_density = q.fit(banana).particles_
    assert not np.array_equal(q.fit(Banana().score_fn, n_features=2).particles_, with_density)
    np.testing.assert_allclose(q.particles_, with_density, rtol=0, atol=1e-4)


SHORT = [
    MIED(n_particles=20, max_iter=20, random_state=0),
    MALA(n_chains=20, n_warmup=20, n_draws=2, random_state=0),
]


@pytest.mark.parametrize(("q", "of_arrays"), [(SHORT[0], False), (SHORT[1], False), (SHORT[1], True)])
def test_a_density_of_arrays_or_one_that_contradicts_the_score_is_left_alone(q, of_arrays):
    score_fn = (lambda X: -np.sinh(X)) if of_arrays else Banana().score_fn
    target = from_score_fn(score_fn, 2)
    target.log_prob = (lambda X: -np.cosh(X).sum(-1)) if of_arrays else lambda x: 10 * Banana().log_prob(x)
    words = "`log_prob` of the target contradicts its `score_fn`"
    with nullcontext() if of_arrays else pytest.warns(UserWarning, match=words):
        X = q.fit(target).sample(20, random_state=0)
    np.testing.assert_array_equal(q.fit(score_fn, n_features=2).sample(20, random_state=0), X)
