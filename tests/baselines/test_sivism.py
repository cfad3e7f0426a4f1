"""SIVI-SM: the critic's bound, its optimum, the gradient against it, and Gaussians with known moments."""

import math

import numpy as np
import pytest
import torch
from linear_family import TARGET, LinearFamily, layer, spied_critics, target_score, z_scores
from plain_targets import generator, normal

from skksivi.baselines import SIVISM, _critics
from skksivi.baselines._critics import Critics, fisher_bound
from skksivi.families._layer import MultilayerPerceptron
from skksivi.mixing import NormalDraws
from skksivi.parameters import Adam
from skksivi.score._probe import in_double
from skksivi.score._score import Tempered
from skksivi.training._loop import Scheduled, flatten, learning_rate_factor


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


def fisher_divergence(q):
    """E |s_p - s_q|^2 of two Gaussians, with a graph, and the matrix and vector of s_p - s_q."""
    law = q.law()
    slope = law.precision_matrix - TARGET.precision_matrix
    intercept = TARGET.precision_matrix @ TARGET.loc - law.precision_matrix @ law.loc
    at_mean = slope @ law.loc + intercept
    return (slope @ law.covariance_matrix @ slope.mT).trace() + at_mean.square().sum(), slope, intercept


def draw(q, n, again):
    """Draws of the linear family, their f, and the pullback through both."""
    (x, s_p, s_q), pull = q.family.draw_with_pullback(n, again, in_double(target_score, 2))
    return x, s_p - s_q, lambda dx, df: pull(dx, df, -df)


def linear_critics(max_iter):
    steps = Adam(betas=(0.5, 0.99), ema=None)
    factor = learning_rate_factor(steps.decay, max_iter)
    rate = Scheduled("rate", lambda t: 0.05 * factor(round(t * max_iter)), torch.zeros((), dtype=torch.float64))
    return Critics([2, 2], 1, rate, steps.betas, generator())


def best_critic(q):
    """A linear critic after many steps."""
    critics, again, n = linear_critics(max_iter=200), generator(1), 200
    for t in range(n):
        x, f, _ = draw(q, 300, again)
        critics.rate.advance(t / n)
        critics.ascend(x[None], f[None])
    return critics


@torch.no_grad()
def test_the_best_critic_is_the_difference_of_the_scores():
    q = LinearFamily()
    critics, (divergence, slope, intercept) = best_critic(q), fisher_divergence(q)
    linear = critics.networks[0].layers[0]
    torch.testing.assert_close(linear.weight, slope, rtol=0, atol=0.05)
    torch.testing.assert_close(linear.bias, intercept, rtol=0, atol=0.05)
    x, f, _ = draw(q, 50_000, generator(2))
    assert critics.bounds(x[None], f[None]).value.item() == pytest.approx(divergence.item(), rel=0.03)


def test_the_gradient_against_the_best_critic_is_that_of_the_fisher_divergence():
    q, again, rows = LinearFamily(), generator(), []
    divergence, slope, intercept = fisher_divergence(q)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(divergence, q.parameters)])
    with torch.no_grad():
        critics = linear_critics(max_iter=400)
        critics.networks[0].layers[0].weight.copy_(slope)
        critics.networks[0].layers[0].bias.copy_(intercept)
        for _ in range(100):
            x, f, pullback = draw(q, 200, again)
            bound = critics.bounds(x[None], f[None])
            pullback(bound.dx[0], bound.df[0])
            rows.append(torch.cat([p.grad.flatten() for p in q.parameters]))
    assert z_scores(torch.stack(rows), expected).max() < 4


def test_the_gradient_of_the_training_is_that_of_the_objective(monkeypatch):
    family = layer(NormalDraws(2), 3, (7,))
    flatten(family)
    again = generator(1)
    made, states = spied_critics(_critics, monkeypatch, again)
    psi, c, n = 0.6, torch.tensor(0.3).double(), 50
    est = SIVISM(batch_size=n, n_critic_steps=3, max_iter=2, critic_skip=psi)
    score, temperature = in_double(lambda x: 1 - x.pow(3), 3), Scheduled("annealing", c.item(), c)
    objective = est._objective(Tempered(score, temperature.value), temperature, family, again)
    objective.advance(0.0)
    with torch.no_grad():
        loss = objective()
    assert len(states) == 3
    actual = [p.grad.clone() for p in family.parameters()]

    again.set_state(states[-1])
    z = family.draw_latent(n, again)
    xi = torch.empty(n, 3).double().normal_(generator=again)
    x = family.mean(z) + family.sigma(z) * xi
    s_p = c * (1 - x.pow(3))
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
        with pytest.raises(
            ValueError, match=f"`critic_skip` returned {wrong!r} at progress 0, expected a number of zero or more"
        ):
            loss_curve(lambda progress, wrong=wrong: wrong)


def test_widths_of_the_critic_are_checked():
    with pytest.raises(ValueError, match="`critic_hidden_layer_sizes` must hold positive integers"):
        SIVISM(critic_hidden_layer_sizes=(8, 0)).fit(target_score, n_features=2)
