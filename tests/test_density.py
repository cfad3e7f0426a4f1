"""Log-densities of semi-implicit fits, against exact ones."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from linear_family import LinearFamily, layer
from plain_targets import generator, normal
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

from skksivi import HKSIVIApproximator, KSIVIApproximator
from skksivi import mixing as mixings
from skksivi.baselines import Laplace
from skksivi.families._density import TOLERANCE, hierarchy_log_density, layer_log_density
from skksivi.families._layer import Hierarchy, MultilayerPerceptron
from skksivi.mixing import GaussianMixtureDraws, NormalDraws, StudentTDraws
from skksivi.parameters import Pilot, Scale

pytestmark = pytest.mark.filterwarnings("ignore:The draws:sklearn.exceptions.ConvergenceWarning")


def network(n_in, n_out, seed=0, size=1.0):
    made = MultilayerPerceptron([n_in, 12, 9, n_out], generator(seed), torch.float64)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=size / math.sqrt(parameter.shape[-1]), generator=generator(seed + 1))
    return made.requires_grad_(False)


@pytest.mark.parametrize("d", [2, 10])
def test_of_a_linear_family_it_is_the_gaussian(d):
    made = LinearFamily(d, d)
    x = made.law().sample((50,)) * torch.linspace(0.5, 2, 50)[:, None].double()
    value, se = layer_log_density(made.family.requires_grad_(False), x, 0)
    assert (value - made.law().log_prob(x)).abs().max() < 0.02
    assert se.max() <= TOLERANCE


@given(d=st.integers(1, 4), k=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_of_a_mixture_and_a_linear_map_it_is_a_mixture(d, k, seed):
    factors = normal(k, d, d, seed=seed).tril(-1) + torch.eye(d)
    mixing = GaussianMixtureDraws(3 * normal(k, d, seed=seed + 1), factors, torch.ones(k).double() / k)
    sigma = torch.full((d,), 0.3).double()
    family = layer(mixing, d, (4,), sigma=0.3, scale=Scale(), skip=torch.eye(d)).requires_grad_(False)
    covariances = factors @ factors.mT + sigma.square().diag()
    law = MixtureSameFamily(Categorical(mixing.weights), MultivariateNormal(mixing.means, covariances))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        x = law.sample((30,))
    value, se = layer_log_density(family, x, seed)
    assert (value - law.log_prob(x)).abs().max() < 0.05 + 8 * se.max()


def by_quadrature(family, x, half_width=9.0, n=60_001):
    """log q at x (n, d) of a family whose z has one dimension."""
    z = torch.linspace(-half_width, half_width, n).double()[:, None]
    log_joint = family.log_prob(x, z) + family.mixing.log_density(z)
    return log_joint.logsumexp(1) + math.log(2 * half_width / (n - 1))


@pytest.mark.parametrize("form", ["constant", "network"])
@pytest.mark.parametrize("mixing", [NormalDraws(1), StudentTDraws(1, 8.0)], ids=["normal", "Student"])
def test_of_networks_it_is_the_integral_over_z(form, mixing):
    family = layer(mixing, sizes=(4,), sigma=0.3, scale=Scale(form))
    family.mean, family.log_variance = network(1, 2, size=4.0), family.log_variance.requires_grad_(False)
    x = family.draw(40, generator()).x
    value, se = layer_log_density(family, x, 1)
    off = (value - by_quadrature(family, x, 30.0)).abs()
    assert off.median() < 0.05
    assert (off < 0.02 + 5 * se).all()


def chain(d=3, n_layers=3):
    """Layers of Langevin steps to N(0, I) from a mixture, with networks that are zero."""
    eyes, shares = torch.eye(d).double().expand(2, -1, -1), torch.tensor([0.4, 0.6]).double()
    mixing = GaussianMixtureDraws(normal(2, d), eyes, shares)
    return Hierarchy.langevin(
        [1.0] * n_layers, mixing=mixing, hidden_layer_sizes=(4,), initial_scale=torch.full((d,), 0.5).double(),
        min_scale=1e-3, generator=generator(),
    ).requires_grad_(False)  # fmt: skip


@pytest.mark.parametrize("d", [1, 8])
def test_of_a_linear_hierarchy_it_is_a_mixture(d):
    """Each layer is x (1 - sigma^2 / 2) + sigma xi."""
    family = chain(d)
    means, variance, shrink = family.mixing.means, 1.0, 1 - 0.5**2 / 2
    for _ in range(3):
        means, variance = shrink * means, shrink**2 * variance + 0.5**2
    parts = MultivariateNormal(means, variance * torch.eye(d).double())
    law = MixtureSameFamily(Categorical(family.mixing.weights), parts)
    x = law.sample((40,))
    value, se = hierarchy_log_density(family, x, torch.neg, 0)
    assert ((value - law.log_prob(x)).abs() < 0.01 + 5 * se).all()
    assert se.max() < 0.1


@pytest.mark.parametrize("cls", [KSIVIApproximator, HKSIVIApproximator])
def test_estimators_give_the_density_of_x_and_its_error(cls):
    q = cls(max_iter=2, batch_size=8, hidden_layer_sizes=(5,), whiten=([3.0, -1.0], [[2.0, 0.0], [1.0, 0.5]]))
    q.set_params(random_state=0, mixing="normal").fit(lambda x: -x, n_features=2)
    X = q.sample(50)
    value, se = q.score_samples(X, return_std=True)
    np.testing.assert_array_equal(q.score_samples(X), value)
    np.testing.assert_allclose(value, q.sampler_.log_density(torch.as_tensor(X).double()).value)
    assert ((se > 0) & (se < 0.2)).all()


def test_densities_that_are_vague_are_warned_of(monkeypatch):
    q = KSIVIApproximator(max_iter=2, batch_size=8, mixing="normal", whiten=None, random_state=0)
    q.fit(lambda x: -x, n_features=2)
    monkeypatch.setattr("skksivi.base.MAX_VAGUE", 0.0)
    q.score_samples([[0.0, 0.0]], return_std=True)
    with pytest.warns(UserWarning, match="1 of 1 log-densities have standard errors above"):
        q.score_samples([[0.0, 0.0]])


def test_mixing_distributions_without_density_are_named():
    mixing = lambda n, generator: torch.randn(n, 2, generator=generator)  # noqa: E731
    q = KSIVIApproximator(mixing=mixing, max_iter=2, batch_size=8, whiten=None, random_state=0)
    q.fit(lambda x: -x, n_features=2)
    with pytest.raises(TypeError, match="has no density, since `mixing` has none; score it against a target"):
        q.score_samples([[0.0, 0.0]])


ROOT = torch.tensor([[1.0, 0.0, 0.0], [3.0, 1.0, 0.0], [3.0, 3.0, 1.0]], dtype=torch.float64)
MIXINGS = ["auto", "normal", mixings.StudentT(2.0), mixings.GaussianMixture([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])]


@cache
def fits():
    """Fits of every family, to a correlated Gaussian."""
    settings = {"max_iter": 2, "batch_size": 8, "hidden_layer_sizes": (5,), "whiten": "laplace", "random_state": 0}
    made = [Laplace(), *(KSIVIApproximator(mixing=mixing, **settings) for mixing in MIXINGS[1:])]
    made += [KSIVIApproximator(**{**settings, "whiten": Pilot(budget=1000)})]
    made += [KSIVIApproximator(scale="network", **settings), HKSIVIApproximator(n_layers=2, **settings)]
    return [q.fit(lambda x: -torch.cholesky_solve(x.mT, ROOT.to(x)).mT, n_features=3) for q in made]


@pytest.mark.slow
@given(exponent=st.floats(-300, 308), direction=st.tuples(*[st.floats(-1.7, 1.7)] * 3))
def test_densities_of_finite_points_are_numbers_or_minus_infinity(exponent, direction):
    X = 10**exponent * np.array([direction, (0.0, 1.0, 0.0), (1.7, -1.7, 1.0)])
    for q in fits():
        value, se = q.score_samples(X, return_std=True)
        assert (value < math.inf).all()
        assert not np.isnan(se).any()
