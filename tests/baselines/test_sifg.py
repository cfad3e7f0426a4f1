"""SIFG: particles with noise as a mixture, the direction of the noise, and Gaussians with known moments."""

import math

import pytest
import torch
from plain_targets import generator, normal

from skksivi.baselines import SIFG
from skksivi.baselines._critics import NoisyPoints
from skksivi.score._probe import in_double


def test_the_family_is_the_mixture_around_the_points():
    points = NoisyPoints(normal(6, 3), 0.4, 0.1)
    family = points.family()
    x = family.draw(20_000, generator()).x
    k = torch.cdist(x, points.u).argmin(1)
    assert torch.bincount(k, minlength=6).min() > 20_000 / 6 * 0.6
    e = (x[:, None] - points.u).square().sum(2).mean(1) - points.u.var(0, correction=0).sum() * 2
    assert abs(e.mean() - 3 * 0.4**2) < 4.5 * e.std() / math.sqrt(20_000)
    torch.testing.assert_close(family.sigma(x[:1]), torch.full((3,), 0.4).double())


def test_the_density_of_a_fit_is_that_of_the_mixture():
    q = SIFG(n_particles=7, max_iter=5, dtype="float64", whiten=None, random_state=0).fit(lambda x: -x, n_features=2)
    X, family = torch.as_tensor(q.sample(50, random_state=0)), q.family_
    parts = torch.distributions.Normal(family.mixing.points, family.sigma(X[:1])).log_prob(X[:, None]).sum(2)
    torch.testing.assert_close(torch.as_tensor(q.score_samples(X)), parts.logsumexp(1) - math.log(7))


def gradients(spread, **parameters):
    """The mean gradients in the points and in log sigma^2, of points of a spread and N(0, 1), with sigma = .6."""
    points = NoisyPoints(spread * normal(2000, 1), 0.6, 0.0)
    est = SIFG(hidden_layer_sizes=(32,), critic_learning_rate=0.02, max_iter=150, n_critic_steps=2, **parameters)
    objective = est._objective(in_double(torch.neg, 1), points, generator())
    u, a = [], []
    with torch.no_grad():
        for t in range(150):
            objective.advance(t / 150)
            objective()
            u.append(points.u.grad.clone())
            a.append(points.log_variance.grad.clone())
    return points, torch.stack(u[100:]).mean(0), torch.stack(a[100:]).mean().item()


@pytest.mark.parametrize("spread", [0.4, 1.2])
def test_points_and_noise_move_as_those_of_a_gaussian(spread):
    """Of q = N(0, v) with v = spread^2 + .36: v_m = -(1 - 1/v) y_m, and dKL/da = .36 (1 - 1/v) / 2."""
    points, of_u, of_a = gradients(spread)
    v = spread**2 + 0.36
    slope = (of_u * points.u).sum() / points.u.square().sum()
    assert abs(slope - (1 - 1 / v)) < 0.1
    assert abs(of_a - 0.18 * (1 - 1 / v)) < 0.03


def test_noise_that_is_not_to_move_does_not():
    assert gradients(0.4, adaptive=False)[2] == 0
    q = SIFG(adaptive=False, initial_scale=0.25, max_iter=20, random_state=0).fit(lambda x: 3 - x, n_features=2)
    torch.testing.assert_close(q.family_.sigma(torch.zeros(1, 2)), torch.full((2,), 0.25))
