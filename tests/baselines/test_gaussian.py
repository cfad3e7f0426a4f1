"""Gaussians: gradients of the bound in closed form, the right moments, the optimum where it is known."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from members import every
from plain_targets import PAIR, SHAPE, GaussianScore, log_gamma_score, normal, origin, triangular
from sklearn.exceptions import ConvergenceWarning

from skksivi.baselines import BatchAndMatch, FullRankVI, Laplace, MeanFieldVI
from skksivi.baselines._gaussian import at_mode, conditional_scales, full_rank_gradient, mean_field_gradient
from skksivi.coordinates._affine import Affine, LowRank


def gaussian(d):
    return GaussianScore(d, log10_condition=2, size=3.0, seed=d)


def covariance(p):
    return p.V * p.lam @ p.V.mT


def sigma_points(d):
    """Points whose mean is zero and whose second moment is I, so that means of quadratic functions are exact."""
    return math.sqrt(d) * torch.cat([torch.eye(d), -torch.eye(d)]).double()


def bound(p, a, T):
    """The evidence lower bound of N(a, T T^T) for a Gaussian target, up to a constant."""
    precision = torch.linalg.inv(covariance(p))
    gap = a - p.mean
    return -(gap @ precision @ gap + (precision * (T @ T.mT)).sum()) / 2 + torch.linalg.slogdet(T).logabsdet


def test_the_mean_field_gradient_is_that_of_the_bound():
    p, xi = gaussian(4), sigma_points(4)
    a, b = normal(2, 4, seed=1).requires_grad_().unbind()
    expected = torch.autograd.grad(bound(p, a, torch.diag(b.exp())), (a, b))
    torch.testing.assert_close(mean_field_gradient(p.score_fn(a + b.exp() * xi), xi, b), expected)


def test_the_full_rank_gradient_is_that_of_the_bound():
    p, xi, T = gaussian(4), sigma_points(4), normal(4, 4, seed=3).tril(-1).requires_grad_()
    a, b = normal(2, 4, seed=1).requires_grad_().unbind()
    L = T.tril(-1) + torch.diag(b.exp())
    expected = torch.autograd.grad(bound(p, a, L), (a, b, T))
    torch.testing.assert_close(full_rank_gradient(p.score_fn(a + xi @ L.mT), xi, b), expected)


@every("d", [2, 10])
def test_batch_and_match_and_laplace_are_exact_on_a_gaussian(d):
    p = gaussian(d)
    for q in (BatchAndMatch(random_state=0), Laplace()):
        q.fit(p.score_fn, n_features=d)
        np.testing.assert_allclose(q.mean_, p.mean, rtol=0, atol=1e-6)
        np.testing.assert_allclose(q.covariance_, covariance(p), rtol=0, atol=1e-6 * p.lam.max())
    assert BatchAndMatch(random_state=0).fit(p.score_fn, n_features=d).score_divergence_ < 1e-10


@every("cls", [MeanFieldVI, FullRankVI])
def test_the_optimum_on_log_gamma_variables(cls):
    """With s = c - e^x, E s = 0 and E[s xi] sigma = -1 give sigma^2 = 1 / c and m = log c - 1 / (2 c)."""
    start = Laplace().fit(log_gamma_score, n_features=1)
    assert start.mean_[0] == pytest.approx(math.log(SHAPE), abs=0.02)  # the optimum is elsewhere
    q = cls(max_iter=500, random_state=0).fit(log_gamma_score, n_features=3)
    np.testing.assert_allclose(q.mean_, math.log(SHAPE) - 1 / (2 * SHAPE), atol=0.05)
    np.testing.assert_allclose(np.diag(q.covariance_), 1 / SHAPE, rtol=0.12)


def test_conditional_scales_are_those_of_a_coordinate_given_the_others():
    L = triangular(5, 2, seed=0)
    precision = torch.linalg.inv(L @ L.mT)
    torch.testing.assert_close(conditional_scales(Affine(origin(5), L)), precision.diagonal().rsqrt())


def test_a_low_rank_map_has_a_triangular_factor_of_the_same_covariance(monkeypatch):
    V = torch.linalg.qr(normal(6, 2, seed=1)).Q
    low = LowRank(normal(6), normal(6, seed=2).abs() + 0.1, V, torch.tensor([3.0, 0.2], dtype=torch.float64))
    L = low.unwhiten_direction(torch.eye(6).double()).mT
    found = SimpleNamespace(map=low), None
    monkeypatch.setattr("skksivi.baselines._gaussian.find_whitening", lambda *_, **__: found)
    m, factor = at_mode(None, None, None)
    torch.testing.assert_close(factor @ factor.mT, L @ L.mT)
    assert factor.equal(factor.tril())
    assert (factor.diagonal() > 0).all()
    assert m is low.m


@every("cls", [Laplace, MeanFieldVI, FullRankVI, BatchAndMatch])
def test_init_chooses_the_mode(cls):
    for x in (-2.5, 2.5):
        q = cls(init=[x, 0.0], max_iter=20, random_state=0).fit(PAIR.score_fn, n_features=2)
        assert np.abs(q.mean_ - [math.copysign(3, x), 0]).max() < 0.3


@every("cls", [Laplace, MeanFieldVI, FullRankVI, BatchAndMatch])
def test_a_score_that_is_not_finite_at_the_origin_is_fitted_from_init(cls):
    """The error advises it."""
    gamma_score = lambda x: 4 / x - 2  # noqa: E731
    with pytest.raises(ValueError, match=r"is not finite where the search .* set `init` to a point"):
        cls(random_state=0).fit(gamma_score, n_features=1)
    q = Laplace(init=[1.5]).fit(gamma_score, n_features=1)
    assert q.mean_[0] == pytest.approx(2, abs=0.01)
    assert q.covariance_[0, 0] == pytest.approx(1, abs=0.02)


def test_a_search_that_does_not_converge_is_told():
    """Newton's step goes a third of the way to the mode of exp(-(x - 50)^4 / 4)."""
    with pytest.warns(ConvergenceWarning, match="not converged in 1 steps.*Raise `max_iter`, or set `init`"):
        cut = Laplace(max_iter=1).fit(lambda x: (50 - x) ** 3, n_features=1)
    assert cut.mean_[0] == pytest.approx(50 / 3)
    assert Laplace().fit(lambda x: (50 - x) ** 3, n_features=1).mean_[0] == pytest.approx(50, abs=0.2)


@every("cls", [MeanFieldVI, FullRankVI])
def test_an_average_over_iterations_is_kept(cls):
    """The last iterate alone is off by three times as much, 0.05 sd."""
    q = cls(max_iter=300, learning_rate_decay=None, random_state=0).fit(lambda x: 3 - x, n_features=30)
    assert np.sqrt(np.mean((q.mean_ - 3) ** 2)) < 0.025
