"""Semi-implicit families: their scores, densities and start, against autograd and torch.distributions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from members import every
from plain_targets import as_score, generator, normal, student_score
from scipy import stats

from skksivi.families import _layer
from skksivi.families._layer import Constant, LinearSkip, MultilayerPerceptron, Residual, gaussian_layer
from skksivi.mixing import Bootstrap, GaussianMixtureDraws, NormalDraws, StudentTDraws
from skksivi.parameters import Scale

SHAPES = {"n_features": st.integers(1, 4), "latent_dim": st.integers(1, 5), "seed": st.integers(0, 10**6)}
every_scale = every("scale", ["constant", "network"])


def start(
    n_features=2, seed=0, latent_dim=None, *, initial_scale=0.5, scale="constant", min_scale=1e-3, linear_skip=True,
    **options,
):  # fmt: skip
    sigma = torch.as_tensor(initial_scale, dtype=torch.float64).expand(n_features)
    options = {"hidden_layer_sizes": (7,), "mixing": NormalDraws(latent_dim or n_features)} | options
    skip = _layer.covariance_kept(sigma, options["mixing"].latent_dim) if linear_skip else None
    scale = Scale(scale, floor=min_scale)
    return gaussian_layer(sigma, scale=scale, skip=skip, generator=generator(seed), **options)


def trained(n_features=2, seed=0, **options):
    """A family whose parameters are anything, as training may leave them."""
    family = start(n_features, seed, **options)
    for parameter in family.parameters():
        torch.nn.init.normal_(parameter, std=0.7, generator=generator(seed + 1))
    return family


@given(**SHAPES)
@every("linear_skip", [True, False])
@every_scale
def test_density_is_normal_and_its_gradient_is_the_score_of_a_draw(scale, linear_skip, n_features, latent_dim, seed):
    family = trained(n_features, seed, scale=scale, linear_skip=linear_skip, latent_dim=latent_dim)
    draw = family.draw(6, generator(seed))
    z = family.draw_latent(6, generator(seed))
    x = draw.x.detach().requires_grad_()
    log_prob = family.log_prob(x, z)
    expected = torch.distributions.Normal(family.mean(z), family.sigma(z)).log_prob(x[:, None]).sum(-1)
    torch.testing.assert_close(log_prob, expected, rtol=1e-9, atol=1e-9)
    (score,) = torch.autograd.grad(log_prob.diagonal().sum(), x)
    torch.testing.assert_close(draw.score, score, rtol=1e-8, atol=1e-8)


def test_the_density_is_as_exact_far_from_the_origin():
    mu = torch.randn(3, 2, generator=generator(0)).double()
    x, precision = mu + 0.001, torch.full_like(mu, 1e6)
    near, far = (_layer.diagonal_gaussian_log_prob(x + shift, mu + shift, precision) for shift in (0.0, 1e6))
    torch.testing.assert_close(far.diagonal(), near.diagonal(), rtol=0, atol=1e-3)


@every("initial_scale, n_features, latent_dim", [(0.01, 1, 1), (0.5, 2, 5), (1.0, 3, 3), ([0.1, 0.5, 0.9], 3, 3)])
@every_scale
def test_start_with_a_linear_skip_is_the_standard_normal(scale, initial_scale, n_features, latent_dim):
    family = start(n_features, scale=scale, initial_scale=initial_scale, latent_dim=latent_dim)
    sigma, n = family.sigma(family.draw_latent(20, generator())), 40_000
    expected = torch.tensor(initial_scale).double().expand_as(sigma)
    torch.testing.assert_close(sigma, expected, rtol=1e-6, atol=0)
    x = family.draw(n, generator()).x.detach().numpy()
    eye = np.eye(n_features)
    assert np.abs(x.mean(0)).max() < 4 / math.sqrt(n)
    assert (np.abs(np.cov(x.T) - eye) < 4 * np.sqrt((1 + eye) / n)).all()
    assert (np.abs((x**4).mean(0) - 3) < 4 * math.sqrt(96 / n)).all()


@every("min_scale", [1e-4, 1e-2, 0.3])
@every_scale
def test_sigma_never_falls_below_its_floor(scale, min_scale):
    family = trained(scale=scale, min_scale=min_scale)
    for parameter in family.log_variance.parameters():
        parameter.data.mul_(100)
    sigma = family.sigma(family.draw_latent(1000, generator()))
    assert (sigma >= min_scale * (1 - 1e-12)).all()


def test_weights_start_uniform_with_the_variance_of_torch():
    """1 / (3 n_in), the rule of its linear layers, so that a layer does not scale what goes through."""
    for layer in MultilayerPerceptron([100, 400, 25], generator(), torch.float64).layers:
        bound = 1 / math.sqrt(layer.in_features)
        for p in layer.parameters():
            assert p.abs().max() <= bound
            assert abs(p.square().mean() / (bound**2 / 3) - 1) < 4 * math.sqrt(4 / 5 / p.numel())


# Mixing distributions


@every("df", [1.0, 3.0, 20.0])
def test_draws_of_student_have_the_quantiles_of_its_law(df):
    n, levels = 100_000, np.array([0.01, 0.1, 0.25, 0.5, 0.9, 0.99])
    z = StudentTDraws(2, df)(n, normal(1), generator()).numpy()
    below = z.T[:, None] < stats.t(df).ppf(levels)[:, None]
    assert (np.abs(below.mean(2) - levels) < 4 * np.sqrt(levels * (1 - levels) / n)).all()
    together = (below[0][:, None] & below[1]).mean(2)
    independent = levels[:, None] * levels
    assert (np.abs(together - independent) < 4 * np.sqrt(independent * (1 - independent) / n)).all()


OF_TORCH = torch.distributions.Normal(0.0, 1.0), torch.distributions.StudentT(2.5)


@every("mixing, law", [*zip((NormalDraws(3), StudentTDraws(3, 2.5)), OF_TORCH, strict=True)])
def test_scores_of_a_mixing_distribution_are_derivatives_of_its_log_density(mixing, law):
    z = normal(6, 3).requires_grad_()
    (first,) = torch.autograd.grad(law.log_prob(z).sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z)
    torch.testing.assert_close(mixing.score(z), first)
    torch.testing.assert_close(mixing.score_slope(z), second)


def a_mixture(d=3):
    factors = torch.eye(d).double() + normal(2, d, d, seed=1).tril() / 3
    return GaussianMixtureDraws(normal(2, d), factors, torch.tensor([0.3, 0.7]).double())


def test_a_mixture_of_full_covariances_has_its_law():
    """Four standard errors, of moments and of the share of draws in each of 20 half-spaces."""
    mixture, n = a_mixture(), 100_000
    parts = torch.distributions.MultivariateNormal(mixture.means, scale_tril=mixture.factors)
    law = torch.distributions.MixtureSameFamily(torch.distributions.Categorical(mixture.weights), parts)
    z, exact = mixture(n, normal(1), generator()), law.sample((n,))
    torch.testing.assert_close(mixture.log_density(z[:50]), law.log_prob(z[:50]))
    for v in normal(20, 3, seed=3):
        a, b = (z @ v > 0.5).double().mean(), (exact @ v > 0.5).double().mean()
        assert abs(a - b) < 4 * math.sqrt(2 * 0.25 / n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skksivi.mixing.CHUNK", 60)
        torch.testing.assert_close(mixture(n, normal(1), generator()), z)


@every("mixing", [NormalDraws(3), StudentTDraws(3, 2.5), a_mixture()])
def test_precisions_are_positive_definite_and_near_the_curvature_of_the_log_density(mixing):
    assert (torch.linalg.eigvalsh(mixing.precision(normal(40, 3))) > 0).all()
    at = torch.zeros(3).double() if len(getattr(mixing, "means", [])) == 0 else mixing.means[0]
    at = at.clone().requires_grad_()
    (slope,) = torch.autograd.grad(mixing.log_density(at[None])[0], at, create_graph=True)
    hessian = torch.stack([torch.autograd.grad(slope[i], at, retain_graph=True)[0] for i in range(3)])
    ratios = torch.linalg.eigvals(torch.linalg.solve(mixing.precision(at[None].detach())[0], -hessian)).real
    assert ((ratios > -0.5) & (ratios < 1.2)).all()


# Points as mixing distribution


@every("sigma", [0.1, 0.5])
@every_scale
def test_a_start_on_whitened_points_has_their_mean_and_covariance(scale, sigma):
    """E z z^T = I, and with it E x x^T; the points have bounded fourth moments."""
    points = torch.randn(500, 3, generator=generator(5), dtype=torch.float64).exp()
    u = torch.linalg.solve(torch.linalg.cholesky(points.mT.cov(correction=0)), (points - points.mean(0)).mT).mT
    family = start(3, mixing=Bootstrap(u), scale=scale, initial_scale=sigma)
    x = family.draw(100_000, generator()).x.detach()
    products = x[:, :, None] * x[:, None]
    assert (x.mean(0).abs() < 4 / math.sqrt(len(x))).all()
    assert ((products.mean(0) - torch.eye(3).double()).abs() < 4 * products.std(0) / math.sqrt(len(x))).all()


@every("linear_skip", [True, False])
@every_scale
def test_pullback_equals_autograd_through_the_draw(scale, linear_skip):
    """The same noise, once by hand and once by automatic differentiation of x and the conditional score."""
    options = {"hidden_layer_sizes": (5, 4), "latent_dim": 2, "initial_scale": 0.7, "min_scale": 0.1}
    family = start(3, scale=scale, linear_skip=linear_skip, **options)
    for p in family.parameters():
        torch.nn.init.normal_(p, generator=generator(1))
        p.grad = torch.full_like(p, torch.nan)  # to be set, not added to
    (dx, ds, dc), same = normal(3, 6, 3, seed=2), generator(3)
    with torch.no_grad():
        drawn, pullback = family.draw_with_pullback(6, generator(3), as_score(student_score))
        pullback(dx.clone(), ds, dc)
    z = family.draw_latent(6, same)
    xi = torch.empty(6, 3, dtype=torch.float64).normal_(generator=same)
    sigma = family.sigma(z)
    x, c = family.mean(z) + sigma * xi, -xi / sigma
    s = student_score(x)
    torch.testing.assert_close([*drawn], [a.detach() for a in (x, s, c)])
    parameters = [*family.parameters()]
    expected = torch.autograd.grad((x * dx + s * ds + c * dc).sum(), parameters)
    torch.testing.assert_close([p.grad for p in parameters], [*expected], rtol=1e-10, atol=1e-12)


def perceptron(*sizes):
    return MultilayerPerceptron(sizes, generator(4), torch.float64)


MAPS = {
    "constant": lambda: Constant(normal(3)),
    "perceptron": lambda: perceptron(3, 6, 5, 3),
    "linear skip": lambda: LinearSkip(normal(3, 3), perceptron(3, 5, 3)),
    "residual": lambda: Residual(normal(3, seed=2), perceptron(3, 5, 3)),
    "nested": lambda: Residual(normal(3, seed=2), LinearSkip(normal(3, 3), perceptron(3, 5, 3))),
}


@every("name", list(MAPS))
def test_the_jacobian_and_the_pullback_of_a_map_are_those_of_autograd(name):
    map_, z, dy = MAPS[name](), normal(6, 3, seed=3), normal(6, 3, seed=5)
    assert map_.is_affine == (name == "constant")
    J = torch.stack([torch.autograd.functional.jacobian(map_, row) for row in z])
    torch.testing.assert_close(map_.jacobian(z).expand(6, 3, 3), J)
    for p in map_.parameters():
        p.grad = torch.full_like(p, torch.nan)  # to be set, not added to
    with torch.no_grad():
        y, pullback = map_.with_pullback(z)
        torch.testing.assert_close(pullback(dy.clone())(), (dy[:, None] @ J)[:, 0])
    expected = map_(z)
    torch.testing.assert_close(y, expected)
    of_parameters = torch.autograd.grad((expected * dy).sum(), list(map_.parameters()))
    torch.testing.assert_close([p.grad for p in map_.parameters()], [*of_parameters])


def test_a_network_is_affine_that_has_one_layer_or_whose_last_is_zero():
    last_is_zero = perceptron(3, 5, 4, 2)
    last_is_zero.linear[-1].weight.data.zero_()
    assert last_is_zero.is_affine
    assert perceptron(3, 2).is_affine
    assert last_is_zero.shape == perceptron(3, 2).shape == (3, 2)


def test_a_residual_network_starts_at_the_identity_and_moves_in_units_of_the_scale():
    sigma = torch.tensor([0.1, 0.5, 2.0]).double()
    mean, z = start(3, residual=True, initial_scale=sigma).mean, normal(5, 3)
    torch.testing.assert_close(mean(z), z)
    mean.network.layers[-1].bias.data.fill_(1.0)
    torch.testing.assert_close(mean(z), z + sigma)
