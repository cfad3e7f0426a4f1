"""PVI: the mixture over particles, and gradients of its divergence."""

import torch
from linear_family import TARGET, gradients, layer, target_score, z_scores
from plain_targets import generator, normal

from skksivi.baselines import PVI
from skksivi.baselines._semi_implicit import mixture_score
from skksivi.mixing import AtomDraws
from skksivi.parameters import Scale
from skksivi.score._probe import in_double
from skksivi.training._loop import Scheduled, flatten


def family(n_particles=3):
    found = layer(AtomDraws(normal(n_particles, 2)), sizes=(5,), scale=Scale())
    flatten(found)
    return found


def law(q):
    """The mixture, with a graph to its parameters."""
    mu = q.mean(q.mixing.points)
    parts = torch.distributions.Independent(torch.distributions.Normal(mu, q.sigma(q.mixing.points)), 1)
    return torch.distributions.MixtureSameFamily(torch.distributions.Categorical(torch.ones(len(mu)).double()), parts)


def test_the_score_of_a_mixture_is_the_gradient_of_its_log_density():
    q, x = family(), normal(4, 2, seed=9).requires_grad_()
    (expected,) = torch.autograd.grad(law(q).log_prob(x).sum(), x)
    mu, sigma = q.mean(q.mixing.points), q.sigma(q.mixing.points)
    torch.testing.assert_close(mixture_score(x, mu, sigma), expected)


def test_the_density_of_a_fit_is_that_of_the_mixture():
    q = PVI(n_particles=7, max_iter=5, dtype="float64", whiten=None, random_state=0).fit(target_score, n_features=2)
    X = q.sample(50, random_state=0)
    torch.testing.assert_close(torch.as_tensor(q.score_samples(X)), law(q.family_).log_prob(torch.as_tensor(X)))
    assert len(q.family_.mixing.points) == 7


def objective_of(q, *, n, regularization=0.0):
    est = PVI(batch_size=n, regularization=regularization, learning_rate=0.0, max_iter=1)
    found = est._objective(in_double(target_score, 2), Scheduled("annealing", 1.0, q.mixing.points), q, generator())
    found.advance(0.0)
    return found


def by_autograd(q, n):
    """The gradient of E[log q - log p] with that of log q in the parameters, at fresh draws from each particle."""
    z = q.mixing.points
    m = torch.arange(n) % len(z)
    x = q.mean(z)[m] + q.sigma(z) * normal(n, 2, seed=11)
    value = (law(q).log_prob(x) - TARGET.log_prob(x)).mean()
    z_gradient, *others = torch.autograd.grad(value, [z, *(p for p in q.parameters() if p is not z)])
    return torch.cat([len(z) * z_gradient.flatten(), *(g.flatten() for g in others)])


def test_the_gradients_are_those_of_the_divergence():
    q = family()
    z = q.mixing.points
    rows = gradients(objective_of(q, n=300), [z, *(p for p in q.parameters() if p is not z)], 60)
    assert z_scores(rows, by_autograd(q, 300_000))[rows.std(0) > 0].max() < 4.5


def test_the_regularisation_pulls_particles_to_zero():
    q = family()
    gradients = []
    for regularization in (0.0, 2.5):
        with torch.no_grad():
            objective_of(q, n=30, regularization=regularization)()
        gradients.append(q.mixing.points.grad.clone())
    torch.testing.assert_close(gradients[1] - gradients[0], 2.5 * q.mixing.points.detach())


def test_every_particle_has_its_turn():
    """Of a batch of two draws, which go to neighbours."""
    q = family(n_particles=5)
    objective, moved = objective_of(q, n=2), torch.zeros(5)
    for _ in range(30):
        with torch.no_grad():
            objective()
        touched = q.mixing.points.grad.abs().sum(1) > 0
        assert touched.sum() == 2
        moved += touched
    assert moved.min() > 0
