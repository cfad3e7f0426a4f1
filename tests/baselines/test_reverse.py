"""UIVI and AISIVI: the reverse conditional by a chain and by a flow, gradients and moments."""

import math

import pytest
import torch
from linear_family import LinearFamily, exact_gradient, gradients, layer, objective_of, z_scores
from members import every
from plain_targets import generator, normal

from skksivi.baselines import AISIVI, UIVI
from skksivi.baselines._reverse import HamiltonianChain, ReverseConditional, ReverseFlow
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


def flow(latent_dim=2, n_couplings=3, *, moved=True):
    found = ReverseFlow(latent_dim, 2, n_couplings, (8,), generator(), torch.float64)
    if moved:
        with torch.no_grad():
            for i, parameter in enumerate(found.parameters()):
                parameter.add_(0.3 * normal(*parameter.shape, seed=i))
    return found.requires_grad_(False)


@every("latent_dim, n_couplings", [(1, 4), (2, 0), (2, 3), (3, 4)])
def test_the_density_is_that_of_the_draws(latent_dim, n_couplings):
    tau, x = flow(latent_dim, n_couplings), normal(4, 2, seed=7)
    z = tau.draw(x, generator(seed=3))
    e = torch.empty(4, latent_dim).double().normal_(generator=generator(seed=3))
    J = torch.autograd.functional.jacobian(lambda e: _pushed(tau, e, x), e)
    J = torch.stack([J[i, :, i] for i in range(4)])
    log_base = torch.distributions.Normal(0.0, 1.0).log_prob(e).sum(1)
    torch.testing.assert_close(tau.log_density(z, x), log_base - torch.linalg.slogdet(J).logabsdet)


def _pushed(tau, e, x):
    """The z of noise e, written without changes in place."""
    z = e
    for i, moved in enumerate(tau.moved):
        shift, log_scale = tau._coupling(i, z, x)
        z = z.index_copy(1, moved, shift + log_scale.exp() * z[:, moved])
    return z


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_the_gradient_of_the_training_is_that_of_the_divergence(share):
    q = LinearFamily()
    settings = {"batch_size": 30, "n_inner_samples": 150, "n_couplings": 2, "flow_hidden_layer_sizes": (8,)}
    est = AISIVI(**settings, prior_share=share, max_iter=1)
    assert z_scores(gradients(objective_of(est, q), q.parameters, 40), exact_gradient(q)).max() < 4.5
