"""AISIVI: the flow of the reverse conditional, importance sampling by it, gradients, Gaussians of known moments."""

import pytest
import torch
from linear_family import LinearFamily, exact_gradient, gradients, objective_of, target_score, z_scores
from plain_targets import generator, normal

from skksivi.baselines import AISIVI
from skksivi.baselines._reverse import ReverseFlow, reverse_score


def flow(latent_dim=2, n_couplings=3, *, moved=True):
    found = ReverseFlow(latent_dim, 2, n_couplings, (8,), generator(), torch.float64)
    if moved:
        with torch.no_grad():
            for i, parameter in enumerate(found.parameters()):
                parameter.add_(0.3 * normal(*parameter.shape, seed=i))
    return found.requires_grad_(False)


def test_it_starts_at_the_distribution_of_z():
    z = normal(5, 2)
    expected = torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(1)
    torch.testing.assert_close(flow(moved=False).log_density(z, normal(5, 2, seed=1)), expected)


@pytest.mark.parametrize(("latent_dim", "n_couplings"), [(1, 4), (2, 0), (2, 3), (3, 4)])
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


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_score_by_importance_sampling_is_that_of_the_mixture(share):
    q, tau, x = LinearFamily(), flow(), normal(6, 2)
    rows = []
    with torch.no_grad():
        for seed in range(50):
            rows.append(reverse_score(q.family, tau, x, 1000, round(1000 * share), generator(seed=seed)))
    assert z_scores(torch.stack(rows), q.score_fn(x)).max() < 4.5


@pytest.mark.slow
def test_the_flow_learns_the_reverse_conditional(monkeypatch):
    """Which is a Gaussian here: P = I + A^T A / sigma^2 and mean P^-1 A^T (x - b) / sigma^2."""
    made = []
    init = ReverseFlow.__init__

    def spied(self, *args):
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(ReverseFlow, "__init__", spied)
    q, sizes = LinearFamily(), {"batch_size": 128, "n_inner_samples": 2, "flow_hidden_layer_sizes": (16,)}
    objective = objective_of(AISIVI(max_iter=150, flow_learning_rate=0.02, **sizes), q)  # the layer does not move
    with torch.no_grad():
        for t in range(150):
            objective.advance(t / 150)
            objective()
        sigma, z = q.family.sigma(torch.zeros(1, 2).double()), normal(4000, 2)
        x = q.family.mean(z) + sigma * normal(4000, 2, seed=5)
        P = torch.eye(2).double() + q.A.mT @ (q.A / sigma[:, None] ** 2)
        mean = torch.linalg.solve(P, ((x - q.b) / sigma**2 @ q.A).mT).mT
        exact = torch.distributions.MultivariateNormal(mean, precision_matrix=P).log_prob(z)
        divergence = (exact - made[0].log_density(z, x)).mean()
        before = (exact - flow(moved=False).log_density(z, x)).mean()
    assert divergence < 0.05 < 0.5 < before


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_the_gradient_of_the_training_is_that_of_the_divergence(share):
    q = LinearFamily()
    est = AISIVI(
        batch_size=30, n_inner_samples=150, n_couplings=2, flow_hidden_layer_sizes=(8,), prior_share=share, max_iter=1
    )
    assert z_scores(gradients(objective_of(est, q), q.parameters, 40), exact_gradient(q)).max() < 4.5


def test_widths_of_the_flow_are_checked():
    with pytest.raises(ValueError, match="flow_hidden_layer_sizes"):
        AISIVI(flow_hidden_layer_sizes=(0,)).fit(target_score, n_features=2)
