"""UIVI: the reverse conditional and its chains, gradients that are unbiased, and Gaussians with known moments."""

import math

import numpy as np
import pytest
import torch
from linear_family import LinearFamily, exact_gradient, gradients, layer, objective_of, target_score, z_scores
from plain_targets import generator, normal

from skksivi.baselines import UIVI
from skksivi.baselines._reverse import HamiltonianChain, ReverseConditional
from skksivi.mixing import NormalDraws


def joint_draws(q, n, again):
    """z, its x and the reverse conditional of those x."""
    z = q.family.draw_latent(n, again)
    sigma = q.family.sigma(z)
    x = q.family.mean(z) + sigma * torch.empty(n, q.family.n_features).double().normal_(generator=again)
    return z, x, ReverseConditional(q.family.mean, x, sigma)


def test_the_reverse_conditional_is_that_of_the_family():
    family = layer(NormalDraws(2), 3, skip=torch.eye(3, 2)).requires_grad_(False)
    family.mean.network.layers[-1].weight.copy_(normal(3, 8))
    x, z = normal(5, 3).requires_grad_(), normal(5, 2, seed=1).requires_grad_()
    log_q = torch.distributions.Normal(family.mean(z), family.sigma(z)).log_prob(x).sum(-1)
    log_joint = log_q + torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(-1)
    conditional_score, gradient = torch.autograd.grad(log_joint.sum(), (x, z))
    state = ReverseConditional(family.mean, x.detach(), family.sigma(z)).at(z.detach())
    torch.testing.assert_close(state.gradient, gradient)
    torch.testing.assert_close(state.conditional_score, conditional_score)
    torch.testing.assert_close(state.log_density.diff(), log_joint.detach().diff())


@pytest.mark.parametrize("step", [0.1, 1.2])
def test_a_chain_leaves_the_reverse_conditional_as_it_is(step):
    n, q, again = 20_000, LinearFamily(), generator()
    with torch.no_grad():
        z, x, density = joint_draws(q, n, again)
        chain = HamiltonianChain(density, torch.tensor(step), 3)
        state, acceptance = density.at(z), 1.0
        for _ in range(5):
            state, probability = chain.move(state, again)
            acceptance = min(acceptance, probability.mean().item())
    assert acceptance > 0.9 if step == 0.1 else 0.3 < acceptance < 0.7  # where it is exact by what it refuses
    w = torch.cat([state.z, x - q.b.detach()], 1).mT
    A, C = q.A.detach(), q.law().covariance_matrix.detach()
    expected = torch.cat([torch.cat([torch.eye(2), A.mT], 1), torch.cat([A, C], 1)])
    scale = expected.diagonal().sqrt()
    assert (w.mean(1) / scale).abs().max() < 4.5 / math.sqrt(n)
    deviations = (w.cov() - expected) / (scale[:, None] * scale)
    assert deviations.abs().max() < 4.5 * math.sqrt(2 / n)


@pytest.mark.slow
def test_the_gradient_of_the_training_is_the_unbiased_one():
    q = LinearFamily()
    objective = objective_of(UIVI(batch_size=200, n_burn_in=7, max_iter=1), q)
    rows = gradients(objective, q.parameters, 60)[20:]  # the length of the steps has converged
    assert z_scores(rows, exact_gradient(q)).max() < 4.5


@pytest.mark.slow
def test_the_steps_find_the_length_at_which_nine_in_ten_are_accepted(monkeypatch):
    seen = []
    move = HamiltonianChain.move

    def spied(chain, state, again):
        state, probability = move(chain, state, again)
        seen.append(probability.mean().item())
        return state, probability

    monkeypatch.setattr(HamiltonianChain, "move", spied)
    UIVI(whiten="laplace", max_iter=100, batch_size=64, n_burn_in=0, learning_rate=1e-5, random_state=0).fit(
        target_score, n_features=2
    )
    assert np.mean(seen[-50:]) == pytest.approx(0.9, abs=0.02)
