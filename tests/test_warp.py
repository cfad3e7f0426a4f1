"""Coordinates in which curved targets are straight and others normal, and fits in these."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from members import every, refused
from plain_targets import Bent, generator, gumbel, gumbel_score, normal, origin, resolved
from scipy import stats
from sklearn.base import clone

import skksivi
from skksivi import KSIVIApproximator, diagnose, expectation, importance_sample, refine
from skksivi.coordinates._affine import Affine
from skksivi.coordinates._marginals import Marginals, Quantiles, fitted_marginals
from skksivi.coordinates._warp import Level, Warp, fitted_warp, reshaped, skewed, unskewed
from skksivi.parameters import Network, Pilot
from skksivi.pilot._newton import saddle_free_newton
from skksivi.targets import Banana, Funnel, Target
from skksivi.terms import Entropic


@pytest.fixture(scope="module")
def warp():
    return fitted_warp(Funnel(5).sample(4000, generator(1)))


# The map


def test_it_has_an_inverse_and_its_determinant(warp):
    x = Funnel(5).sample(20, generator(2))
    y, log_scale = warp.warp(x)
    back, the_same = warp.unwarp(y)
    torch.testing.assert_close(back, x)
    torch.testing.assert_close(the_same, log_scale)
    J = torch.stack([torch.autograd.functional.jacobian(lambda y: warp.unwarp(y[None])[0][0], row) for row in y])
    torch.testing.assert_close(torch.linalg.slogdet(J).logabsdet, log_scale)


def test_what_drives_what_is_found(warp):
    assert [level.members.tolist() for level in warp.levels] == [[0], [1, 2, 3, 4]]
    assert warp.levels[1].drivers.tolist() == [0]
    slope = warp.levels[1].scale[0] / warp.unit[0]
    torch.testing.assert_close(slope, torch.full_like(slope, 0.5), atol=0.03, rtol=0)
    banana = fitted_warp(Bent(4).sample(4000))
    assert (banana.levels[1].members.tolist(), banana.levels[1].drivers.tolist()) == ([1], [0])


def test_a_neck_is_open_where_no_points_have_been():
    """x_i ~ N(mu, tau): their sds in warped coordinates are 1 at log tau = -6, by points of log tau > -1."""
    mu, log_tau, z = normal(20_000, 7).split([1, 1, 5], 1)
    mu, log_tau = 2 + 3 * mu, log_tau.abs() - 1
    wide, narrow = (torch.cat([mu, log, mu + log.exp() * z], 1) for log in (log_tau, torch.full_like(log_tau, -6)))
    warp = fitted_warp(wide[:2000])
    y, _ = warp.warp(narrow)
    assert warp.drivers == [1]
    assert (y[:, 2:].std(0).log().abs() < 0.8).all()  # by a line that is fitted they are 100 and more
    assert (y[:, 2:].mean(0).abs() < 1).all()


def test_what_drives_others_may_be_skewed():
    z = normal(4000, 3)
    v = torch.tensor([0.5, 0.7], dtype=torch.float64)
    t, log_slope = skewed(z, *v)
    back, inverse = unskewed(t, *v)
    torch.testing.assert_close(back, z)
    torch.testing.assert_close(inverse, -log_slope)
    x = torch.stack([t[:, 0], *((t[:, :1] / 4).exp() * z[:, 1:]).mT], 1)
    warp = fitted_warp(x)
    y, _ = warp.warp(x)
    assert np.abs(stats.skew(y)).max() < 0.2  # five standard errors
    torch.testing.assert_close(warp.unwarp(y)[0], x)


def test_curved_targets_are_normal_in_its_coordinates(warp):
    """At draws that it has not seen; the errors of 4,000 are below 0.1 in all but one of 10^6 cases."""
    y, _ = warp.warp(Funnel(5).sample(4000, generator(3)))
    assert np.abs(stats.kurtosis(y)).max() < 0.6
    assert torch.corrcoef((y - y.mean(0)).square().mT).fill_diagonal_(0).abs().max() < 0.1


def test_gaussians_and_points_that_tell_nothing_are_left_alone():
    for d, seed in itertools.product((2, 40), range(2)):
        assert fitted_warp(normal(3000, d, seed=seed + 10) @ normal(d, d, seed=seed)) is None
    x = normal(500, 3)
    assert fitted_warp(x[:6]) is None
    x[:, 1] = 1.0
    assert fitted_warp(x) is None
    assert fitted_warp(x / 0) is None


@every("has_density", [True, False])
def test_the_score_is_that_of_the_density(warp, has_density):
    target = Funnel(5)
    score = resolved(target if has_density else target.score_fn, 5)
    n_before, pulled = score.tally.n_values, warp.pull_back(score.double)
    y = normal(6, 5, seed=4).requires_grad_()
    x, log_scale = warp.unwarp(y)
    (expected,) = torch.autograd.grad((target.log_prob(x) + log_scale).sum(), y)
    torch.testing.assert_close(pulled(y.detach()), expected)
    assert score.tally.n_values == n_before + 6
    assert (pulled.log_prob is None) != has_density
    if has_density:
        torch.testing.assert_close(pulled.log_prob(y.detach()), (target.log_prob(x) + log_scale).detach())


def test_levels_that_make_no_map_are_refused(warp):
    i, zeros = torch.arange(1), torch.zeros(1, 1, dtype=torch.float64)
    level = Level(i, i[:0], zeros, zeros, zeros, torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    for act, message in (
        (lambda: replace(warp, levels=warp.levels[:1]), "each coordinate once"),
        (lambda: replace(warp, levels=warp.levels[::-1]), "not below it"),
        (lambda: Level(i, i, zeros, zeros, zeros, zeros), "do not fit its drivers"),
        (lambda: replace(level, shape=0 * level.shape), "no positive weight"),
    ):
        refused(ValueError, message, act)


# Fits


@pytest.mark.slow
def test_a_wide_banana_is_fitted_by_its_score_alone():
    """Standard deviations within 10%, of 40,000 draws on either side; without a warp they are 5 to 7 and 3 to 6."""
    fits = [KSIVIApproximator(random_state=k).fit(Bent().score_fn, n_features=2) for k in (1, 2)]
    for q in fits:
        ratio = q.sample(40_000).std(0) / Bent(2).sample(40_000).std(0).numpy()
        assert isinstance(q.whitening_.warp, Warp)
        assert np.abs(ratio - 1).max() < 0.1
    assert np.mean([q.n_score_calls_ + q.n_products_ for q in fits]) < 100_000


def test_what_a_fit_offers_is_in_the_coordinates_of_the_target(tmp_path):
    target = Bent()
    bent, x = KSIVIApproximator(random_state=0).fit(target), target.sample(2000)
    log_q, std = bent.score_samples(x, return_std=True)
    exact = target.log_prob(x).numpy() - np.log(2 * np.pi * 10)
    assert np.abs(log_q - exact).mean() < 0.1  # what the fit is off, in nats
    assert std.max() < 0.1
    assert importance_sample(bent, target, random_state=0).certificate().divergence < 0.1
    assert diagnose(bent, target, random_state=0).ok
    mean = expectation(bent, target=target)
    assert (np.abs(mean.value) < 5 * mean.se + 0.5).all()
    assert refine(bent, target, random_state=0).sample(5).shape == (5, 2)
    np.testing.assert_allclose(bent.whitening_.mean, [0, 0], atol=2.0)
    np.testing.assert_allclose(bent.whitening_.sd, [10, 14.2], rtol=0.25)
    assert (bent.whitening_.whiten(x).std(0) - 1).abs().max() < 0.15
    skksivi.save(bent, tmp_path / "bent")
    loaded = skksivi.load(tmp_path / "bent")
    np.testing.assert_array_equal(loaded.sample(5, random_state=0), bent.sample(5, random_state=0))


WITHOUT = [
    {"whiten": "laplace"}, {"annealing": "linear"}, {"terms": [Entropic(0.1)]}, {"latent_dim": 2},
    {"hidden_layer_sizes": Network((8,), linear_skip=False)},
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_what_would_have_no_meaning_in_warped_coordinates_forbids_them(uncertified):
    quick = KSIVIApproximator(whiten=Pilot(effort="low"), max_iter=1, random_state=0)
    for parameters in ({}, *WITHOUT):
        warp = clone(quick).set_params(**parameters).fit(gumbel_score, n_features=2).whitening_.warp
        assert (warp is None) == bool(parameters), parameters


def test_drivers_of_points_that_have_converged_are_skewed():
    """The scale is exp(l) with a skewed l, which the first warp takes as Gaussian; all else stays as it is."""
    log_scale = -gumbel(4000, 1) / 2
    x = torch.cat([log_scale, log_scale.exp() * normal(4000, 3)], 1)
    level, *others = (warp := fitted_warp(x)).levels
    plain = replace(warp, levels=[replace(level, shape=torch.tensor([[0.0], [1.0]]).double()), *others])
    shaped = reshaped(plain, x)
    y_plain, y = (a.warp(x)[0] for a in (plain, shaped))
    torch.testing.assert_close(shaped.unwarp(y)[0], x)
    torch.testing.assert_close(y[:, 1:], y_plain[:, 1:])
    before, after = (abs(stats.skew(a[:, 0])) for a in (y_plain, y))
    assert after < 0.3 * before


def tensor(a):
    return torch.as_tensor(a, dtype=torch.float64)


class Students(Target):
    """x = m + A z with z of independent t distributions, or of a multivariate one."""

    def __init__(self, df, m, A, radial=False):
        self.df, self.m, self.A, self.radial = tensor(df), tensor(m), tensor(A), radial
        self.n_features = len(m)

    def log_prob(self, x):
        z = torch.linalg.solve(self.A, (x - self.m).mT).mT
        if self.radial:
            return -(self.df + self.n_features) / 2 * (z.square().sum(1) / self.df).log1p()
        df = self.df.where(self.df.isfinite(), 1.0)
        of_t = -(df + 1) / 2 * (z.square() / df).log1p()
        return torch.where(self.df.isfinite(), of_t, -z.square() / 2).sum(1)


TARGETS = {
    "Cauchys": Students([1.0, 1.0, 1.0], [5.0, 0, -300], np.diag([1e-3, 1, 100])),
    "t2 and t5": Students([2.0, 5.0], [0.0, 1.0], np.eye(2)),
    "one of three": Students([math.inf, 1.5, math.inf], [0.0, 0, 2], np.diag([1.0, 2, 3])),
    "one": Students([3.0], [1.0], np.eye(1)),
    "multivariate": Students(2.0, [1.0, 2, 3], [[2.0, 0, 0], [1.0, 0.5, 0], [-3.0, 1, 4]], radial=True),
}


def mode_of(target):
    score = resolved(target).double
    return score, saddle_free_newton(score, origin(target.n_features))[0]


def fitted(target):
    score, mode = mode_of(target)
    return score, fitted_marginals(score, mode, generator())


@every("target", list(TARGETS.values()))
def test_a_map_has_an_inverse_and_its_determinant_and_the_target_is_normal_in_its_coordinates(target):
    score, map_ = fitted(target)
    y = 3 * normal(200, target.n_features)
    y[0] = 25.0  # beyond the nodes
    x, log_scale = map_.unwarp(y)
    torch.testing.assert_close(map_.warp(x), (y, log_scale), rtol=1e-9, atol=1e-9)
    J = torch.autograd.functional.jacobian(lambda row: map_.unwarp(row[None])[0][0], y[1] / 3)
    torch.testing.assert_close(torch.linalg.slogdet(J)[1], map_.unwarp(y[1:2] / 3)[1][0], rtol=1e-6, atol=1e-7)
    assert map_.is_radial == target.radial
    y = torch.cat([normal(99, target.n_features), origin(target.n_features)[None]])
    torch.testing.assert_close(map_.pull_back(score)(y), -y, rtol=0, atol=0.01)


def rotation(d, seed):
    return torch.linalg.qr(normal(d, d, seed=seed)).Q


#: Log-densities, up to a constant.
KINDS = {
    "t3": lambda z: -2 * (z.square() / 3).log1p(),
    "double exponential": lambda z: -(1e-2 + 2 * z.square()).sqrt(),
    "Gumbel": lambda z: -z - (-z).exp(),
    "two humps": lambda z: torch.logaddexp(-(z - 2).square() / 2, -(z + 2).square() / 2),
    "kink": lambda z: -(2**0.5) * z.abs(),
}

#: The kind and the number of independent directions. Two humps are normal near their modes, so that one may be
#: missed; kinks have no curvature.
FOUND = [(kind, k) for kind in KINDS for k in (1, 5) if kind != "kink" and (kind, k) != ("two humps", 1)]


class Rotated(Target):
    """Independent variables along directions that are no coordinates: the first k of a kind, the others normal."""

    def __init__(self, kind, d, k, seed=0):
        self.kind, self.n_features, self.k, self.V = kind, d, k, rotation(d, seed)

    def log_prob(self, x):
        z = x @ self.V.to(x)
        return KINDS[self.kind](z[:, : self.k]).sum(1) - z[:, self.k :].square().sum(1) / 2


@every("kind, k", FOUND)
def test_independent_directions_are_found(kind, k):
    target = Rotated(kind, 5, k)
    score, map_ = fitted(target)
    found = target.V.mT @ torch.linalg.solve(map_.map.L.mT, map_.V)[:, : len(map_.quantiles.values)]
    assert found.shape[1] == k
    torch.testing.assert_close(found.abs().amax(0) / found.norm(dim=0), torch.ones(k).double(), rtol=0, atol=1e-4)
    y = normal(100, 5)
    assert (map_.pull_back(score)(y) + y).square().mean().sqrt() < 0.05


class OfTwo(Target):
    """A bivariate t3, whose place may depend on a normal variable, along directions that are no coordinates."""

    n_features, V = 3, rotation(3, 1)

    def __init__(self, bend):
        self.bend = bend

    def log_prob(self, x):
        z = x @ self.V.to(x)
        own = z[:, :2] - self.bend * (z[:, 2:].square() - 1)
        return -2.5 * (own.square().sum(1) / 3).log1p() - z[:, 2].square() / 2


def test_the_radius_of_some_or_all_directions_is_found():
    score, map_ = fitted(OfTwo(0.0))
    assert (map_.is_radial, map_.n_mapped) == (True, 2)
    y = normal(100, 3)
    torch.testing.assert_close(map_.pull_back(score)(y), -y, rtol=0, atol=0.01)
    for d in (9, 20):
        assert fitted(Students(3.0, [0.0] * d, np.eye(d), radial=True))[1].n_mapped == d


@every("target", [OfTwo(0.5), Banana(), Students([0.01], [0.0], np.eye(1))])
def test_bent_targets_and_those_with_hardly_a_tail_are_left_alone(target):
    assert fitted(target)[1] is None


def test_normal_targets_cost_four_products_a_feature():
    score, mode = mode_of(Students([math.inf] * 7, [0.0] * 7, np.eye(7)))
    before = score.tally.total
    assert fitted_marginals(score, mode, generator()) is None
    assert score.tally.total - before <= 4 * 2 * 7 + 8


@every("values, message", [([[0.0, 2.0, 1.0]], "do not increase"), ([[0.0, 1.0]] * 3, "do not fit")])
def test_quantiles_that_make_no_map_are_refused(values, message):
    eye, curve = torch.eye(2).double(), tensor(values)
    with pytest.raises(ValueError, match=message):
        Marginals(Affine.shift(torch.zeros(2).double()), eye, 2, Quantiles(-1.0, 1.0, curve, torch.ones_like(curve)))


@pytest.mark.parametrize("name", ["one of three", pytest.param("multivariate", marks=pytest.mark.slow)])
def test_fits_have_the_tails_of_the_target(name, recwarn):
    """The shares of draws beyond quantiles are right to 2% and five standard errors, a false alarm in a million."""
    target = TARGETS[name]
    q = KSIVIApproximator(random_state=0).fit(target)
    assert not len(recwarn)
    assert q.n_score_calls_ < 6000
    assert isinstance(q.whitening_.warp, Marginals)
    assert abs(q.certificate_.divergence) < 0.01
    X = q.sample(400_000)
    z = torch.linalg.solve(target.A, (tensor(X) - target.m).mT).mT.numpy()
    for level in (0.001, 0.25, 0.75, 0.999):
        for column, df in zip(z.T, target.df.expand(target.n_features).tolist(), strict=True):
            law = stats.t(df) if math.isfinite(df) else stats.norm
            share = (column < law.ppf(level)).mean()
            assert abs(share - level) < 5 * math.sqrt(level * (1 - level) / len(X)) + 0.02 * min(level, 1 - level)
    assert (tensor(q.score_samples(X[:50])) - target.log_prob(tensor(X[:50]))).std() < 0.05


@pytest.mark.parametrize(("kind", "k"), [("kink", 1), pytest.param("two humps", 20, marks=pytest.mark.slow)])
def test_fits_have_the_quantiles_of_directions_that_are_no_coordinates(kind, k, recwarn):
    """The 99.8% ranges of 100,000 draws, to 10%: seven standard errors."""
    target = Rotated(kind, 20, k)
    z = KSIVIApproximator(random_state=0).fit(target).sample(100_000) @ target.V.numpy()
    t = np.linspace(-60, 60, 400_001)
    p = np.exp(KINDS[kind](tensor(t)).numpy())
    ends = np.interp([0.001, 0.999], p.cumsum() / p.sum(), t)
    np.testing.assert_allclose(np.quantile(z[:, :k], [0.001, 0.999], axis=0).mean(1), ends, rtol=0.1)
    np.testing.assert_allclose(z[:, k:].std(0), 1, atol=0.03)
    assert not len(recwarn)
