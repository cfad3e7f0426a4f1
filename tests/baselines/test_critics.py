"""SIVI-SM, SIFG and HSIVI-SM: critics, gradients by the definitions, and targets with known moments."""

import math

import numpy as np
import pytest
import torch
from linear_family import evaluated, layer, spied_critics, target_score
from plain_targets import Mixture, generator, normal

from skksivi.baselines import HSIVISM, SIFG, SIVISM, _critics
from skksivi.baselines._critics import NoisyPoints, fisher_bound
from skksivi.families._layer import MultilayerPerceptron
from skksivi.mixing import NormalDraws
from skksivi.score._probe import in_double
from skksivi.score._score import Tempered
from skksivi.start import find_whitening
from skksivi.training._loop import Scheduled, flatten


def score_fn(x):
    return 1 - x.pow(3)


def test_the_bound_and_its_gradients_are_those_of_the_definition():
    network = MultilayerPerceptron([3, 8, 3], generator(), torch.float64)
    flatten(network)
    x, f, offset = (normal(6, 3, seed=seed).requires_grad_() for seed in range(3))
    g = network(x) + offset
    expected = (2 * g * f - g.square()).sum(-1).mean()
    gradients = torch.autograd.grad(expected, (x, f, offset, *network.parameters()))
    with torch.no_grad():
        bound = fisher_bound(network, x, f, offset)
    torch.testing.assert_close(bound.value, expected.detach())
    actual = (bound.dx, bound.df, bound.doffset, *(p.grad for p in network.parameters()))
    torch.testing.assert_close(actual, gradients)


def test_the_gradient_of_the_training_is_that_of_the_objective(monkeypatch):
    family = layer(NormalDraws(2), 3, (7,))
    flatten(family)
    again = generator(1)
    made, states = spied_critics(_critics, monkeypatch, again)
    psi, c, n = 0.6, torch.tensor(0.3).double(), 50
    est = SIVISM(batch_size=n, n_critic_steps=3, max_iter=2, critic_skip=psi)
    score, temperature = in_double(score_fn, 3), Scheduled("annealing", c.item(), c)
    loss, actual = evaluated(est._objective(Tempered(score, temperature.value), temperature, family, again), family)
    assert len(states) == 3

    again.set_state(states[-1])
    z = family.draw_latent(n, again)
    xi = torch.empty(n, 3).double().normal_(generator=again)
    x = family.mean(z) + family.sigma(z) * xi
    s_p = c * score_fn(x)
    g, f = made[0].networks[0](x) + psi * s_p, s_p + xi / family.sigma(z)
    expected = (2 * g * f - g.square()).sum(-1).mean()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(actual, list(torch.autograd.grad(expected, list(family.parameters()))))


def test_the_skip_of_the_critic_may_change_with_progress():
    def loss_curve(critic_skip):
        q = SIVISM(critic_skip=critic_skip, max_iter=20, batch_size=16, random_state=0)
        return q.fit(target_score, n_features=2).loss_curve_

    np.testing.assert_array_equal(loss_curve(lambda progress: 0.25), loss_curve(0.25))
    falling = loss_curve(lambda progress: 1 - progress)
    assert falling[0] == loss_curve(1.0)[0]
    assert falling[-1] != loss_curve(1.0)[-1]
    for wrong in (-1, math.inf, math.nan, "a"):
        message = f"`critic_skip` returned {wrong!r} at progress 0, expected a number of zero or more"
        with pytest.raises(ValueError, match=message):
            loss_curve(lambda progress, wrong=wrong: wrong)


def gradients(spread, **parameters):
    """The mean gradients in the points and in log sigma^2, of points of a spread and N(0, 1), with sigma = .6."""
    points = NoisyPoints(spread * normal(2000, 1), 0.6, 0.0)
    est = SIFG(hidden_layer_sizes=(32,), critic_learning_rate=0.02, max_iter=150, n_critic_steps=2, **parameters)
    objective = est._objective(in_double(torch.neg, 1), points, generator())
    rows = []
    with torch.no_grad():
        for t in range(150):
            objective.advance(t / 150)
            objective()
            rows.append(torch.cat([points.u.grad, points.log_variance.grad.view(-1, 1)]))
    mean = torch.stack(rows[100:]).mean(0)
    return points, mean[:-1], mean[-1].item()


@pytest.mark.parametrize("spread", [0.4, 1.2])
def test_points_and_noise_move_as_those_of_a_gaussian(spread):
    """Of q = N(0, v) with v = spread^2 + .36: v_m = -(1 - 1/v) y_m, and dKL/da = .36 (1 - 1/v) / 2."""
    points, of_u, of_a = gradients(spread)
    v = spread**2 + 0.36
    assert abs(((of_u * points.u).sum() / points.u.square().sum()) - (1 - 1 / v)) < 0.1
    assert abs(of_a - 0.18 * (1 - 1 / v)) < 0.03


def test_noise_that_is_not_to_move_does_not():
    assert gradients(0.4, adaptive=False)[2] == 0
    q = SIFG(adaptive=False, initial_scale=0.25, max_iter=20, random_state=0).fit(lambda x: 3 - x, n_features=2)
    torch.testing.assert_close(q.family_.sigma(torch.zeros(1, 2)), torch.full((2,), 0.25))


def test_the_gradient_of_the_training_is_that_of_the_sum_of_bounds(monkeypatch):
    again = generator(1)
    made, states = spied_critics(_critics, monkeypatch, again)
    n, d, T = 20, 2, 3
    est = HSIVISM(n_layers=T, batch_size=n, hidden_layer_sizes=(5,), initial_scale=0.6)
    score = in_double(score_fn, d)
    whitening, _ = find_whitening(None, score, again)
    family = est._build(score, whitening, None, again)
    for p in family.networks.parameters():
        torch.nn.init.normal_(p, std=0.5, generator=again)
    flatten(family)
    loss, actual = evaluated(est._objective(score, family, again), family)
    assert len(states) == est.n_critic_steps

    again.set_state(states[-1])
    x, total = torch.empty(n, d).double().normal_(generator=again), 0.0
    for t in reversed(range(T)):
        before = x.detach()
        level = 1 - t / T
        bridge = lambda x, level=level: level * score_fn(x) - (1 - level) * x  # noqa: E731
        sigma = family.sigma(t)
        xi = torch.empty(n, d).double().normal_(generator=again)
        x = before + family.networks[t](before) + 0.6**2 / 2 * bridge(before) + sigma * xi
        f, g = bridge(x) + xi / sigma, made[0].networks[t](x)
        total = total + (2 * g * f - g.square()).sum(-1).mean()
    torch.testing.assert_close(loss, total.detach())
    torch.testing.assert_close(actual, list(torch.autograd.grad(total, list(family.parameters()))))


def test_scales_of_the_layers_follow_the_narrowest_mode():
    p = Mixture([0.5, 0.5], [[-6.0, 0.0], [6.0, 0.0]], [0.5, 0.5])
    q = HSIVISM(n_layers=2, max_iter=1, learning_rate=1e-9, random_state=0).fit(p.score_fn, n_features=2)
    # The pilot's standard deviation is six along the first coordinate, and in its units a mode has a twelfth.
    scales = q.family_.half_square.mul(2).sqrt().numpy()
    np.testing.assert_allclose(scales, [0.5 / np.sqrt(36.25), 1.0], rtol=0.1)
