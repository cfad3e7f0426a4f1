"""Gaussian mixtures that match scores, too."""

import torch
from plain_targets import generator, normal

from skksivi.pilot._mixture import (
    FISHER_WEIGHT,
    MOST_FULL,
    Components,
    MixtureParameters,
    fitted_mixture,
    score_matched,
)


def crescent():
    """Return three Gaussians along a bend."""
    L = torch.tensor([[[1.0, 0], [0.5, 0.7]], [[0.8, 0], [0, 0.6]], [[1.0, 0], [-0.5, 0.7]]]).double()
    means = torch.tensor([[-2.0, -1], [0, 0], [2, -1]]).double()
    return Components(torch.tensor([0.3, 0.5, 0.2]).double(), means, L @ L.mT)


def divergence(p, q, n=20_000):
    """Return KL(p || q) + KL(q || p) by draws."""
    p, q = p.draws(), q.draws()
    x, y = p(n, p.means, generator(1)), q(n, p.means, generator(2))
    return ((p.log_density(x) - q.log_density(x)).mean() + (q.log_density(y) - p.log_density(y)).mean()).item()


def test_parameters_tell_the_mixture():
    for of, back in zip(crescent(), MixtureParameters.of(crescent()).mixture(), strict=True):
        torch.testing.assert_close(back, of)


def test_the_objective_is_that_of_the_density_and_its_gradient():
    u, s, q = normal(50, 2), normal(50, 2, seed=3), crescent().draws()
    x = u.clone().requires_grad_()
    (own,) = torch.autograd.grad(q.log_density(x).sum(), x)
    expected = FISHER_WEIGHT * (own - s).square().sum(1) / 2 - q.log_density(u)
    torch.testing.assert_close(MixtureParameters.of(crescent()).losses(u, s), expected)


def test_a_mixture_moves_to_the_target_by_few_points():
    """By 300 points from a divergence of one nat to less than a tenth."""
    target, start = crescent().draws(), crescent()
    start = Components(torch.ones(3).double() / 3, start.means + 0.5 * normal(3, 2), 1.5 * start.covariances)
    u = target(300, target.means, generator())
    found = score_matched(start, u, target.score(u), generator())
    assert divergence(crescent(), found) < 0.1 * divergence(crescent(), start)


def test_a_mixture_stays_where_scores_make_it_no_better():
    """Scores that are noise are matched by chance alone, which those that are held out tell."""
    u = normal(40, 5)
    start = Components(torch.ones(1).double(), torch.zeros(1, 5).double(), torch.eye(5)[None].double())
    assert score_matched(start, u, 30 * normal(40, 5, seed=1), generator()) is start
    assert score_matched(start, *normal(2, 40, MOST_FULL + 1).unbind(), generator()) is start


def test_a_point_does_not_count_more_than_some_do():
    u = torch.cat([normal(200, 2), torch.full((1, 2), 1.0).double()])
    s = torch.cat([-u[:-1], torch.full((1, 2), 1e12).double()])
    mixture = score_matched(fitted_mixture([u], generator()), u, s, generator())
    torch.testing.assert_close(mixture.map().m, torch.zeros(2).double(), atol=0.3, rtol=0)
