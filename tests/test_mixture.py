"""Gaussian mixtures that are fitted to points and to scores, and importance sampling from them."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from members import every
from plain_targets import gaussian, generator, gumbel, gumbel_score, normal
from scipy.stats import multivariate_t

from skksivi._utils.monte_carlo import controlled, stein_features
from skksivi.mixing import GaussianMixtureDraws
from skksivi.pilot import _mixture
from skksivi.pilot._mixture import Components, MixtureParameters, fitted_mixture, score_matched
from skksivi.pilot._moments import DF, WIDER, HeavyTailed, moments_by_scores


@given(d=st.integers(1, 5), n=st.integers(40, 300), gap=st.floats(0, 1e4), log_scale=st.floats(-4, 4))
def test_modes_have_the_means_shares_and_variances_of_their_points_however_far_apart(d, n, gap, log_scale):
    """The last step of the EM algorithm keeps the mean and the variances of what it is fitted to."""
    scale = math.exp(log_scale)
    points = normal(n, d).exp(), gap + scale * normal(2 * n, d, seed=1)
    mixture = fitted_mixture(points, generator())
    first = (mixture.means - points[0].mean(0)).norm(dim=1) < (mixture.means - points[1].mean(0)).norm(dim=1)
    if gap < 100 * (1 + scale):
        return
    for part, share, own in ((points[0], 1 / 3, first), (points[1], 2 / 3, ~first)):
        w, sd = mixture.weights[own], part.std(0, correction=0)
        torch.testing.assert_close(w.sum().item(), share)
        m, L = Components(w / w.sum(), mixture.means[own], mixture.covariances[own]).map()
        torch.testing.assert_close((m - part.mean(0)) / sd, torch.zeros(d).double(), rtol=0, atol=1e-3)
        torch.testing.assert_close(L.norm(dim=1) / sd, torch.ones(d).double(), rtol=0, atol=1e-3)


@given(k=st.integers(1, 4), d=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_common_noise_is_in_every_component_and_no_more_could_be(k, d, seed):
    a = normal(k, d, d, seed=seed)
    C = a @ a.mT + 0.01 * torch.eye(d)
    mixture = Components(torch.ones(k) / k, normal(k, d), C)
    noise = mixture.common_variances()
    least = torch.linalg.eigvalsh(C / (noise.sqrt()[:, None] * noise.sqrt())).amin()
    conditional = torch.linalg.inv(C).diagonal(dim1=1, dim2=2).reciprocal().amin(0)
    assert least > 1 - 1e-6
    assert least < 1 + 1e-6 or (noise / conditional - 1).abs().max() < 1e-9
    L = mixture.factors(0.5 * noise)
    torch.testing.assert_close(L @ L.mT + 0.5 * noise.diag(), C)
    too_much = mixture.factors(1e6 * noise)
    torch.testing.assert_close(too_much @ too_much.mT, C)


def test_heavy_tails_leave_the_quartiles_alone():
    x = normal(4000, 2) / normal(4000, 2, seed=1).abs()  # a product of Cauchys
    z = fitted_mixture([x], generator()).draws()(40_000, x, generator())
    levels = torch.tensor([0.25, 0.75]).double()
    ratio = z.quantile(levels, dim=0).diff(dim=0) / x.quantile(levels, dim=0).diff(dim=0)
    assert ((ratio - 1).abs() < 0.15).all()


@every("points", [torch.zeros(30, 2), normal(30, 2) * torch.tensor([1.0, 0.0]), normal(3, 5)])
def test_points_in_a_subspace_have_a_mixture(points):
    mixture = fitted_mixture([points.double()], generator())
    assert len(mixture.weights) <= _mixture.MAX_COMPONENTS
    assert all(part.isfinite().all() for part in (*mixture, mixture.factors()))


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


def test_the_objective_is_that_of_the_density_and_its_gradient():
    u, s, q = normal(50, 2), normal(50, 2, seed=3), crescent().draws()
    x = u.clone().requires_grad_()
    (own,) = torch.autograd.grad(q.log_density(x).sum(), x)
    expected = _mixture.FISHER_WEIGHT * (own - s).square().sum(1) / 2 - q.log_density(u)
    parameters = MixtureParameters.of(crescent())
    torch.testing.assert_close(parameters.losses(u, s), expected)
    torch.testing.assert_close(tuple(parameters.mixture()), tuple(crescent()))


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
    assert score_matched(start, *normal(2, 40, _mixture.MOST_FULL + 1).unbind(), generator()) is start


def test_a_point_does_not_count_more_than_some_do():
    u = torch.cat([normal(200, 2), torch.full((1, 2), 1.0).double()])
    s = torch.cat([-u[:-1], torch.full((1, 2), 1e12).double()])
    mixture = score_matched(fitted_mixture([u], generator()), u, s, generator())
    torch.testing.assert_close(mixture.map().m, torch.zeros(2).double(), atol=0.3, rtol=0)


# Control variates


@every("d", [1, 3])
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
        by = moments_by_scores(u, gumbel_score(u))
        sd = by.root.norm(dim=1)
        beyond += [((by.mean - mean) / sd).abs() > 1.96 * by.mean_se, (sd.log() - log_sd).abs() > 1.96 * by.sd_se]
    assert torch.cat(beyond).double().mean() < 0.09


@given(d=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_moments_of_a_gaussian_are_exact(d, seed):
    m, P, score_fn = gaussian(d, seed)
    root = torch.linalg.cholesky(torch.linalg.inv(P))
    u = m + normal(20 * 32, d, seed=seed + 2).view(20, 32, d) @ root.mT
    by = moments_by_scores(u, score_fn(u))
    np.testing.assert_allclose(by.mean, m, atol=0.02 * root.norm(dim=1).max())
    np.testing.assert_allclose(by.root @ by.root.mT, root @ root.mT, atol=0.03 * root.square().sum())


@every("of_gaussian, most", [(True, 0.1), (False, 0.7)])
def test_covariances_of_many_features_have_less_noise_than_their_points(of_gaussian, most):
    """Along the worst direction: by a tenth, and by the share that the scores leave, of rotated coordinates."""
    n, d = 3200, 150
    u, A = (normal if of_gaussian else gumbel)(n, d), torch.linalg.qr(normal(d, d, seed=1)).Q
    score, variance = (-u, 1.0) if of_gaussian else (gumbel_score(u), math.pi**2 / 6)
    x, s = u @ A.mT, score @ A.mT
    by = moments_by_scores(x.view(100, 32, d), s.view(100, 32, d))
    found = torch.linalg.eigvalsh(torch.stack([torch.cov(x.mT), by.root @ by.root.mT]) / variance)
    before, after = (found - 1).abs().amax(1)
    assert after < most * before


def test_fewer_different_points_than_features_have_no_covariance():
    u = normal(32, 160).repeat(50, 1, 1)
    assert moments_by_scores(u, -u).root is None


@every("d", [2, 160])
def test_scores_whose_squares_overflow_are_left_out_of_moments(d):
    x = normal(1600, d)
    s = -x
    s[0, 0] = 1e308
    by = moments_by_scores(x.view(50, 32, d), s.view(50, 32, d))
    torch.testing.assert_close(by.mean, x.mean(0))
    torch.testing.assert_close(by.root.norm(dim=1), x.std(0, correction=0))


# Importance


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
