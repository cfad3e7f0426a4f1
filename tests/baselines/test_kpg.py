"""KPG: averages by a kernel, whose means are known of Gaussians."""

import math

import pytest
import torch
from linear_family import LinearFamily, gradients, objective_of, target_score, z_scores
from plain_targets import generator, normal

from skksivi.baselines import KPG
from skksivi.baselines._semi_implicit import kernel_average
from skksivi.kernels import Gaussian, Riesz
from skksivi.score._probe import in_double
from skksivi.training._loop import Scheduled

WIDTH = 0.8


@pytest.mark.parametrize("normalised", [False, True])
def test_it_is_the_average_over_the_other_draws(normalised):
    x, f = normal(6, 3), normal(6, 3, seed=1)
    for i, v in enumerate(kernel_average(x, f, Gaussian(bandwidth=WIDTH), normalised)):
        w = torch.stack([torch.exp((x[i] - y).square().sum() / (-2 * WIDTH**2)) for y in x])
        others = torch.arange(6) != i
        expected = (w[others, None] * f[others]).sum(0) / (w[others].sum() if normalised else 5)
        torch.testing.assert_close(v, expected)


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


def test_it_rests_at_the_target():
    q = LinearFamily()
    est = KPG(batch_size=400, bandwidth=WIDTH, max_iter=1)
    own = in_double(q.score_fn, 2)
    objective = est._objective(own, Scheduled("annealing", 1.0, q.b), q.family, generator())
    objective.advance(0.0)
    assert z_scores(gradients(objective, q.parameters, 60)).max() < 4.5


def test_kernels_that_are_no_averages_are_refused():
    with pytest.raises(ValueError, match="use Gaussian, IMQ or Laplace"):
        KPG(kernel=Riesz()).fit(target_score, n_features=2)
