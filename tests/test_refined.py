"""Control variates, and importance sampling from mixtures that are fitted to its draws."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_targets import as_score, gaussian, generator, gumbel, gumbel_log_prob, gumbel_score, normal, origin
from scipy.stats import multivariate_t

from skksivi._utils.monte_carlo import controlled, stein_features
from skksivi.mixing import GaussianMixtureDraws
from skksivi.pilot._importance import (
    DF,
    LEAST_POINTS,
    WIDER,
    BatchedDraws,
    HeavyTailed,
    refined_pilot,
    resampled,
    standard_pilot,
    target_moments,
)
from skksivi.pilot._mixture import Components

# Control variates


@pytest.mark.parametrize("d", [1, 3])
def test_control_variates_have_mean_zero(d):
    """Five standard errors: a false alarm in 100,000."""
    x = gumbel(200_000, d)
    f = stein_features(x, gumbel_score(x))
    assert f.shape == (200_000, d + d * d)
    assert (f.mean(0).abs() < 5 * f.std(0) / math.sqrt(len(f))).all()


def test_few_control_variates_take_no_memory_of_many():
    x = torch.zeros(2, 1, dtype=torch.float64).expand(2, 10**6)  # of whose pairs there are 16 TB
    assert stein_features(x, x).shape == (2, 2 * 10**6)


def test_control_variates_are_fitted_to_other_draws():
    """So that they do not take a rare one for their own."""
    x = gumbel(400, 2)
    y, features = x.square(), stein_features(x, gumbel_score(x))
    moved = y.clone()
    moved[7] += 100
    change = controlled(moved, features) - controlled(y, features)
    torch.testing.assert_close(change[:40], (moved - y)[:40])


# Moments


def test_standard_errors_of_moments_are_right():
    """Of 4 x 200 errors 5% are above 1.96 standard errors; more than 9% in one of 10,000 studies."""
    mean, log_sd = np.euler_gamma, math.log(math.pi / 6**0.5)
    beyond = []
    for seed in range(200):
        u = gumbel(20 * 32, 2, seed).view(20, 32, 2)
        by = target_moments(BatchedDraws(u, gumbel_score(u)))
        sd = by.root.norm(dim=1)
        beyond += [((by.mean - mean) / sd).abs() > 1.96 * by.mean_se, (sd.log() - log_sd).abs() > 1.96 * by.sd_se]
    assert torch.cat(beyond).double().mean() < 0.09


@given(d=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_moments_of_a_gaussian_are_exact(d, seed):
    m, P, score_fn = gaussian(d, seed)
    root = torch.linalg.cholesky(torch.linalg.inv(P))
    u = m + normal(20 * 32, d, seed=seed + 2).view(20, 32, d) @ root.mT
    by = target_moments(BatchedDraws(u, score_fn(u)))
    np.testing.assert_allclose(by.mean, m, atol=0.02 * root.norm(dim=1).max())
    np.testing.assert_allclose(by.root @ by.root.mT, root @ root.mT, atol=0.03 * root.square().sum())


@pytest.mark.parametrize(("of_gaussian", "most"), [(True, 0.1), (False, 0.7)], ids=["Gaussian", "Gumbel"])
def test_covariances_of_many_features_have_less_noise_than_their_points(of_gaussian, most):
    """Along the worst direction: by a tenth, and by the share that the scores leave, of rotated coordinates."""
    n, d = 3200, 150
    u, A = (normal if of_gaussian else gumbel)(n, d), torch.linalg.qr(normal(d, d, seed=1)).Q
    score, variance = (-u, 1.0) if of_gaussian else (gumbel_score(u), math.pi**2 / 6)
    x, s = u @ A.mT, score @ A.mT
    by = target_moments(BatchedDraws(x.view(100, 32, d), s.view(100, 32, d)))
    before, after = (
        (torch.linalg.eigvalsh(C / variance) - 1).abs().max() for C in (torch.cov(x.mT), by.root @ by.root.mT)
    )
    assert after < most * before


def test_fewer_different_points_than_features_have_no_covariance():
    u = normal(32, 160).repeat(50, 1, 1)
    assert target_moments(BatchedDraws(u, -u)).root is None


@pytest.mark.parametrize("d", [2, 160])
def test_scores_whose_squares_overflow_are_left_out_of_moments(d):
    x = normal(1600, d)
    s = -x
    s[0, 0] = 1e308
    by = target_moments(BatchedDraws(x.view(50, 32, d), s.view(50, 32, d)))
    torch.testing.assert_close(by.mean, x.mean(0))
    torch.testing.assert_close(by.root.norm(dim=1), x.std(0, correction=0))


# Importance


def mixture(d):
    means = torch.stack([origin(d), 0.7 * torch.ones(d).double()])
    covariances = torch.stack([torch.eye(d).double(), 2 * torch.eye(d).double()])
    return Components(torch.tensor([0.7, 0.3]).double(), means, covariances)


def test_what_is_weighed_has_the_density_of_student_t():
    d, nu = 3, 3 + DF
    m, L = normal(1, d), torch.eye(d).double() + 0.3 * normal(d, d).tril()
    wide = HeavyTailed.wider(GaussianMixtureDraws(m, L[None], torch.ones(1).double()))
    u = wide.sample(20_000, generator())
    log_density = wide.log_density(u)
    shape = (1 + WIDER / math.sqrt(d)) ** 2 * (L @ L.mT)
    np.testing.assert_allclose(log_density, multivariate_t(m[0].numpy(), shape.numpy(), nu).logpdf(u.numpy()))
    whitened = torch.linalg.solve_triangular(L, (u - m).mT, upper=False)
    expected = nu / (nu - 2) * (1 + WIDER / math.sqrt(d)) ** 2  # kurtosis 9: five standard errors
    np.testing.assert_allclose(whitened.square().mean(1), expected, rtol=5 * math.sqrt(8 / 20_000))


@pytest.mark.parametrize("known", [True, False])
def test_draws_by_importance_are_those_of_the_target(known):
    """Means and variances of 12,800 draws whose weights count as 60%; five standard errors."""
    score = as_score(gumbel_score, gumbel_log_prob if known else None, d=2)
    noise = generator()
    found = [resampled(score, mixture(2), noise) for _ in range(20)]
    assert sum(each is None for each in found) <= 1  # log p by scores at near points makes a tail look heavier
    x = torch.cat([each[0].points for each in found if each is not None])
    se = math.pi / 6**0.5 / math.sqrt(0.6 * len(x))
    np.testing.assert_allclose(x.mean(0), np.euler_gamma, atol=5 * se)
    np.testing.assert_allclose(x.var(0), math.pi**2 / 6, atol=5 * se * 2.5)


@given(d=st.integers(1, 8), seed=st.integers(0, 1000))
def test_a_gaussian_is_accepted_at_once(d, seed):
    pilot, drawn = standard_pilot(origin(d)), []
    found = refined_pilot(as_score(lambda x: -x, d=d), pilot, drawn, generator(seed))
    assert found.converged
    assert len(drawn) == 1
    assert len(found.x) == LEAST_POINTS
    torch.testing.assert_close(found.mixture.means[0], origin(d), atol=0.01, rtol=0)
