"""SIVI: the surrogate bound and its gradients by definition, its order in K, and Gaussians with known moments."""

import math

import numpy as np
import pytest
import torch
from linear_family import TARGET, LinearFamily, layer, target_score
from plain_targets import generator, normal
from sklearn.base import clone

from skksivi.baselines import SIVI
from skksivi.baselines._semi_implicit import mixture
from skksivi.mixing import NormalDraws
from skksivi.score._probe import in_double
from skksivi.score._score import Tempered
from skksivi.training._loop import Scheduled, flatten


def log_mixture(x, mu, others, sigma):
    """The log-density of the mixture by torch's distributions, row by row."""
    means = torch.cat([mu[:, None], others.expand(len(x), *others.shape)], 1)
    log_probs = torch.distributions.Normal(means, sigma).log_prob(x[:, None]).sum(-1)
    return log_probs.logsumexp(1) - math.log(means.shape[1])


@pytest.mark.parametrize("K", [0, 1, 4])
def test_the_mixture_and_its_gradients_are_those_of_the_definition(K):
    x, mu, others = (normal(n, 3, seed=seed).requires_grad_() for seed, n in enumerate([5, 5, 4]))
    sigma = normal(3, seed=3).exp().requires_grad_()
    q = mixture(x.detach(), mu.detach(), others.detach(), sigma.detach(), torch.tensor(K))
    expected = log_mixture(x, mu, others[:K], sigma)
    torch.testing.assert_close(q.log_q, expected.detach())
    dx, dmu, dothers, dsigma = torch.autograd.grad(expected.sum(), (x, mu, others, sigma))
    for actual, gradient in [(q.dx, dx), (q.dmu, dmu), (q.dothers, dothers), (q.dsigma.sum(0), dsigma)]:
        torch.testing.assert_close(actual, gradient)


def test_the_mixture_is_as_good_far_from_the_origin_in_float32():
    far = [64 + normal(n, 3, seed=seed).float() / 100 for seed, n in enumerate([5, 5, 4])]
    near = [a.double() - 64 for a in far]
    sigma, K = torch.full((3,), 0.01), torch.tensor(4)
    actual, expected = mixture(*far, sigma, K).log_q, mixture(*near, sigma.double(), K).log_q
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


def test_the_gradient_is_that_of_the_surrogate_bound():
    family = layer(NormalDraws(3))
    flatten(family)
    n, K, c = 6, 4, torch.tensor(0.3).double()
    temperature = Scheduled("annealing", c.item(), c)
    est = SIVI(n_auxiliary=K, batch_size=n, max_iter=1)
    objective = est._objective(
        Tempered(in_double(target_score, 2), temperature.value), temperature, family, generator(1)
    )
    objective.advance(0.0)
    with torch.no_grad():
        loss = objective()
    actual = [p.grad.clone() for p in family.parameters()]

    again = generator(1)
    z = family.draw_latent(n + K, again)
    mu, sigma = family.mean(z), family.sigma(z)
    x = mu[:n] + sigma * torch.empty(n, 2).double().normal_(generator=again)
    log_q = log_mixture(x, mu[:n], mu[n:], sigma)
    bound = (c * TARGET.log_prob(x) - log_q).mean()
    expected = torch.autograd.grad(-bound, list(family.parameters()), retain_graph=True)
    torch.testing.assert_close(actual, list(expected))
    (s_q,) = torch.autograd.grad(log_q.sum(), x)
    torch.testing.assert_close(loss, (c * target_score(x) - s_q).square().sum(-1).mean().detach())


def test_the_bound_rises_with_k_to_the_exact_one():
    q, numbers, again, n_batches = LinearFamily(), (0, 1, 10, 100, 300), generator(), 20
    exact, gaps, ratios = [], [], []
    with torch.no_grad():
        for _ in range(n_batches):  # independent, each with others of its own
            z, others = q.family.draw_latent(300, again), q.family.draw_latent(300, again)
            mu, sigma = q.family.mean(z), q.family.sigma(z)
            x = mu + sigma * torch.empty_like(mu).normal_(generator=again)
            log_q = q.law().log_prob(x)
            exact.append((TARGET.log_prob(x) - log_q).mean())
            log_qs = [mixture(x, mu, q.family.mean(others), sigma, torch.tensor(K)).log_q for K in numbers]
            gaps.append(torch.stack([(log_q_K - log_q).mean() for log_q_K in log_qs]))
            ratios.append((log_qs[0] - log_q).exp().mean())
        expected = -q.kl_divergence(TARGET)
    exact, gaps, ratio = torch.stack(exact), torch.stack(gaps), torch.stack(ratios).mean()
    assert abs(exact.mean() - expected) < 4 * exact.std() / math.sqrt(n_batches)
    se = gaps.std(0) / math.sqrt(n_batches)
    assert (gaps.mean(0) > 0).all()  # a lower bound
    assert (gaps.mean(0).diff() < 0).all()  # that rises
    assert gaps.mean(0)[0] > 0.5
    for K, gap, error in zip(numbers[3:], gaps.mean(0)[3:], se[3:], strict=True):  # to second order in 1 / K
        assert abs(gap - (ratio - 1) / (2 * K)) < 4 * error + 0.1 * gap


def test_a_schedule_of_k_takes_the_place_of_a_number():
    def fitted(n_auxiliary):
        q = SIVI(n_auxiliary=n_auxiliary, max_iter=20, batch_size=16, random_state=0)
        return q.fit(target_score, n_features=2).loss_curve_

    np.testing.assert_array_equal(fitted(lambda progress: 7), fitted(7))
    seen = []
    rising = fitted(lambda progress: seen.append(progress) or int(10 * progress))
    np.testing.assert_allclose(seen[-20:], np.arange(20) / 20)
    assert not np.array_equal(rising, fitted(9))
    with pytest.raises(ValueError, match=r"`n_auxiliary` returned 2\.5, expected an integer"):
        fitted(lambda progress: 2.5)


def test_whitening_makes_it_free_of_units():
    scale = torch.tensor([1e3, 1e-3])
    q = SIVI(max_iter=20, batch_size=16, dtype="float64", random_state=0)
    X = clone(q).fit(target_score, n_features=2).sample(100)
    Y = clone(q).fit(lambda x: target_score(x / scale.to(x)) / scale.to(x), n_features=2).sample(100)
    np.testing.assert_allclose(Y / scale.numpy(), X, rtol=1e-4, atol=1e-4)


def test_a_loss_that_is_not_finite_is_explained_and_the_state_kept():
    def breaks(x):
        return torch.where(x.abs() > 2.5, torch.nan, -x)

    q = SIVI(max_iter=2000, random_state=0)
    with pytest.raises(FloatingPointError, match=r"seems bounded.*The fit has ended: The loss"):
        q.fit(breaks, n_features=2)
    assert np.isfinite(q.sample(5)).all()
