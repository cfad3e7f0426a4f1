"""SVGD: its direction by the definition, moments of Gaussians, and what all particles do: start, descend and draw."""

import math

import numpy as np
import pytest
import torch
from misbehaving import Misbehaving
from plain_targets import generator, normal, student_score

from skksivi import kernels
from skksivi.base import LEAST_WIDTH
from skksivi.baselines import SVGD
from skksivi.baselines._particles import svgd_direction
from skksivi.baselines._points import find_start
from skksivi.families._samplers import Particles
from skksivi.pilot._pilot import find_whitening
from skksivi.score._probe import in_double

KERNELS = {
    "gaussian": (kernels.Gaussian, lambda r, h: torch.exp(-(r**2) / (2 * h**2))),
    "imq": (kernels.IMQ, lambda r, h: (1 + r**2 / h**2) ** -0.5),
    "laplace": (kernels.Laplace, lambda r, h: torch.exp(-r / h)),
}


def unwhitened(d):
    return find_whitening(None, in_double(lambda x: -x, d), generator())[0]


def by_definition(x, s, k):
    """The double sum, with the gradient of the kernel in its first argument by automatic differentiation."""
    phi = torch.zeros_like(x)
    for i, x_i in enumerate(x):
        for j, x_j in enumerate(x):
            if i == j:  # where the gradient of a radial kernel is zero
                phi[i] += s[j]
                continue
            y = x_j.clone().requires_grad_()
            value = k((y - x_i).norm())
            phi[i] += value.detach() * s[j] + torch.autograd.grad(value, y)[0]
    return phi / len(x)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("bandwidth", [0.7, "median"])
def test_the_direction_is_its_definition(name, bandwidth):
    cls, k = KERNELS[name]
    x = normal(6, 3)
    h = cls(bandwidth=bandwidth).frozen(x).bandwidth
    expected = by_definition(x, student_score(x), lambda r: k(r, h))
    actual = svgd_direction(x, student_score(x), cls(bandwidth=bandwidth))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_the_direction_does_not_depend_on_where_the_origin_is():
    x, s = normal(8, 2), normal(8, 2, seed=1)
    near = svgd_direction(x, s, kernels.IMQ())
    torch.testing.assert_close(svgd_direction(x + 1e6, s, kernels.IMQ()), near, rtol=1e-7, atol=1e-7)


# Where points start


def test_particles_start_where_init_says():
    X = np.random.RandomState(0).normal(size=(9, 2))
    q = SVGD(init=X, max_iter=1, learning_rate=1e-12, random_state=0).fit(lambda x: 3 - x, n_features=2)
    np.testing.assert_allclose(q.particles_, X, atol=1e-9)


def test_points_where_the_score_is_not_finite_go_to_others():
    score = in_double(lambda x: 1 / x.clamp_min(0).sqrt().sqrt() - x, 2)
    _, u = find_start((torch.ones(2), torch.eye(2)), None, 500, score, generator())
    x = u + 1
    assert score(x).isfinite().all()
    assert len(x.unique(dim=0)) > 300  # the share of a quadrant, Phi(1)^2 = 0.71


def test_a_score_that_ends_to_be_finite_ends_the_fit_and_keeps_the_particles():
    q = SVGD(whiten=None, n_particles=20, max_iter=1000, random_state=0)
    with pytest.raises(FloatingPointError):
        q.fit(Misbehaving(lambda s: torch.nan * s, 120), n_features=2)
    assert 50 <= q.n_iter_ <= 150
    assert np.isfinite(q.sample(20)).all()


# Draws


def test_up_to_their_number_draws_are_particles_without_replacement():
    q = SVGD(n_particles=40, max_iter=20, random_state=0).fit(lambda x: 3 - x, n_features=2)
    rows = {tuple(row) for row in q.particles_}
    for n in (1, 25, 40):
        drawn = {tuple(row) for row in q.sample(n)}
        assert len(drawn) == n
        assert drawn <= rows
    assert not np.array_equal(q.sample(40, random_state=0), q.sample(40, random_state=1))


def test_more_draws_are_smeared_to_the_last(monkeypatch):
    """The last five, drawn for themselves, would be bare particles."""
    monkeypatch.setattr("skksivi.base.CHUNK", 20 * LEAST_WIDTH)
    q = SVGD(n_particles=10, max_iter=5, random_state=0).fit(lambda x: 3 - x, n_features=2)
    assert not {tuple(row) for row in q.particles_} & {tuple(row) for row in q.sample(45)}


def test_more_draws_reach_half_way_to_the_nearest_other_particle():
    n, X = 30_000, np.zeros((4, 3))
    X[:, 0] = 0, 1, 1000, 1004
    drawn = Particles(X, unwhitened(3)).sample(n, generator()).numpy()
    far = drawn[:, 0] > 500
    assert abs(far.mean() - 0.5) < 4 * math.sqrt(0.25 / n)
    for r, pair in ((1, drawn[~far]), (4, drawn[far])):
        square = np.mean(pair[:, 1:] ** 2)
        assert square == pytest.approx((r / 2) ** 2 / 3, rel=4 * math.sqrt(2 / pair[:, 1:].size))
