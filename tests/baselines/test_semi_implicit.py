"""SIVI, PVI and KPG: their gradients, by the formulas, and targets with known moments."""

import math

import numpy as np
import pytest
import torch
from linear_family import TARGET, LinearFamily, evaluated, gradients, layer, objective_of, target_score, z_scores
from plain_targets import generator, normal

from skksivi.baselines import KPG, PVI, SIVI
from skksivi.baselines._semi_implicit import mixture
from skksivi.mixing import AtomDraws, NormalDraws
from skksivi.parameters import Scale
from skksivi.score._probe import in_double
from skksivi.score._score import Tempered
from skksivi.training._loop import Scheduled, flatten


def log_mixture(x, mu, others, sigma):
    """The log-density of the mixture by torch's distributions, row by row."""
    means = torch.cat([mu[:, None], others.expand(len(x), *others.shape)], 1)
    log_probs = torch.distributions.Normal(means, sigma).log_prob(x[:, None]).sum(-1)
    return log_probs.logsumexp(1) - math.log(means.shape[1])


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
    score = Tempered(in_double(target_score, 2), temperature.value)
    est = SIVI(n_auxiliary=K, batch_size=n, max_iter=1)
    loss, actual = evaluated(est._objective(score, temperature, family, generator(1)), family)

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


def family(n_particles=3):
    found = layer(AtomDraws(normal(n_particles, 2)), sizes=(5,), scale=Scale())
    flatten(found)
    return found


def law(q):
    """The mixture, with a graph to its parameters."""
    mu = q.mean(q.mixing.points)
    parts = torch.distributions.Independent(torch.distributions.Normal(mu, q.sigma(q.mixing.points)), 1)
    return torch.distributions.MixtureSameFamily(torch.distributions.Categorical(torch.ones(len(mu)).double()), parts)


def particle_objective_of(q, *, n, regularization=0.0):
    est = PVI(batch_size=n, regularization=regularization, learning_rate=0.0, max_iter=1)
    found = est._objective(in_double(target_score, 2), Scheduled("annealing", 1.0, q.mixing.points), q, generator())
    found.advance(0.0)
    return found


def by_autograd(q, n):
    """The gradient of E[log q - log p] with that of log q in the parameters, at fresh draws from each particle."""
    z = q.mixing.points
    x = q.mean(z)[(torch.arange(n) % len(z))] + q.sigma(z) * normal(n, 2, seed=11)
    value = (law(q).log_prob(x) - TARGET.log_prob(x)).mean()
    z_gradient, *others = torch.autograd.grad(value, [z, *(p for p in q.parameters() if p is not z)])
    return torch.cat([len(z) * z_gradient.flatten(), *(g.flatten() for g in others)])


def test_the_gradients_are_those_of_the_divergence():
    q = family()
    z = q.mixing.points
    rows = gradients(particle_objective_of(q, n=300), [z, *(p for p in q.parameters() if p is not z)], 60)
    assert z_scores(rows, by_autograd(q, 300_000))[rows.std(0) > 0].max() < 4.5


def test_the_regularisation_pulls_particles_to_zero():
    q = family()
    free, held = (gradients(particle_objective_of(q, n=30, regularization=r), [q.mixing.points], 1) for r in (0, 2.5))
    torch.testing.assert_close((held - free).view(-1, 2), 2.5 * q.mixing.points.detach())


WIDTH = 0.8


def smoothed_difference(q, x, normalised):
    """E[k(x, x') (s_p - s_q)(x')] over x' of a Gaussian q, in closed form: k q is a Gaussian in x' and its mass."""
    law = q.law()
    H = WIDTH**2 * torch.eye(2).double()
    both = torch.distributions.MultivariateNormal(law.loc, law.covariance_matrix + H)
    mass = 2 * math.pi * WIDTH**2 * both.log_prob(x).exp()
    gain = law.covariance_matrix @ torch.linalg.inv(both.covariance_matrix)
    centre = law.loc + (x - law.loc) @ gain.mT
    difference = target_score(centre) - q.score_fn(centre)  # linear, so that its mean is that at the mean
    return (difference if normalised else mass[:, None] * difference).detach()


@pytest.mark.parametrize("normalised", [False, True])
def test_the_gradient_of_the_training_is_that_of_draws_moved_along_the_average(normalised):
    """In closed form without weights; with them, up to a bias of order 1 / n that is below the noise."""
    q, n = LinearFamily(), 400
    est = KPG(batch_size=n, bandwidth=WIDTH, importance_sampling=normalised, max_iter=1)
    rows, again = gradients(objective_of(est, q), q.parameters[:2], 80), generator(seed=1)
    z = q.family.draw_latent(200_000, again)
    sigma = q.family.sigma(z)
    with torch.no_grad():
        x = q.family.mean(z) + sigma * torch.empty(len(z), 2).double().normal_(generator=again)
        v = smoothed_difference(q, x, normalised)
        expected = -torch.cat([(v.mT @ z / len(z)).flatten(), v.mean(0)])
    assert z_scores(rows, expected).max() < 4.5 + normalised * 2
