"""Coordinates in which curved targets are straight: `skksivi.coordinates._warp`, and fits in them."""

import warnings
from dataclasses import replace

import joblib
import numpy as np
import pytest
import torch
from plain_targets import Bent, generator, gumbel, normal
from sklearn.base import clone

import skksivi
from skksivi import KSIVIApproximator, certificate, diagnose, expectation, refine
from skksivi.coordinates._warp import Level, Warp, skewed, unskewed
from skksivi.coordinates._warp_fit import fitted_warp, reshaped
from skksivi.parameters import Checkpoint, Network, Pilot
from skksivi.score._target import resolve_score
from skksivi.targets import Funnel
from skksivi.terms import Entropic


def bare(target):
    return target.score_fn


@pytest.fixture(scope="module")
def warp():
    return fitted_warp(Funnel(5).sample(4000, generator(1)))


@pytest.fixture(scope="module")
def bent():
    return KSIVIApproximator(random_state=0).fit(Bent())


# The map


def test_it_has_an_inverse_and_its_determinant(warp):
    x = Funnel(5).sample(20, generator(2))
    y, log_scale = warp.warp(x)
    back, the_same = warp.unwarp(y)
    torch.testing.assert_close(back, x)
    torch.testing.assert_close(the_same, log_scale)
    J = torch.stack([torch.autograd.functional.jacobian(lambda y: warp.unwarp(y[None])[0][0], row) for row in y])
    torch.testing.assert_close(torch.linalg.slogdet(J).logabsdet, log_scale)


def test_what_drives_what_is_found():
    funnel = fitted_warp(Funnel(5).sample(4000, generator(1)))
    assert [level.members.tolist() for level in funnel.levels] == [[0], [1, 2, 3, 4]]
    assert funnel.levels[1].drivers.tolist() == [0]
    slope = funnel.levels[1].scale[0] / funnel.unit[0]
    torch.testing.assert_close(slope, torch.full_like(slope, 0.5), atol=0.03, rtol=0)
    banana = fitted_warp(Bent(4).sample(4000))
    assert banana.levels[1].members.tolist() == [1]
    assert banana.levels[1].drivers.tolist() == [0]


def test_a_neck_is_open_where_no_points_have_been():
    """x_i ~ N(mu, tau): their sds in warped coordinates are 1 at log tau = -6, by points of log tau > -1."""
    z = normal(20_000, 7)
    z[:, 1] = -1 + z[:, 1].abs()
    z[:, 0] = 2 + 3 * z[:, 0]
    narrow = z.clone()
    narrow[:, 1] = -6
    of_group = [torch.cat([a[:, :2], a[:, :1] + a[:, 1:2].exp() * a[:, 2:]], 1) for a in (z, narrow)]
    warp = fitted_warp(of_group[0][:2000])
    y, _ = warp.warp(of_group[1])
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
    u = (y - y.mean(0)) / y.std(0)
    assert (u.pow(3).mean(0)).abs().max() < 0.2  # five standard errors
    torch.testing.assert_close(warp.unwarp(y)[0], x)


def test_curved_targets_are_normal_in_its_coordinates(warp):
    """At draws that it has not seen; the errors of 4,000 are below 0.1 in all but one of 10^6 cases."""
    y, _ = warp.warp(Funnel(5).sample(4000, generator(3)))
    z = (y - y.mean(0)) / y.std(0)
    assert (z.pow(4).mean(0) - 3).abs().max() < 0.6
    assert torch.corrcoef(z.square().mT).fill_diagonal_(0).abs().max() < 0.1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("d", [2, 10, 40])
def test_gaussians_are_left_alone(d, seed):
    A = normal(d, d, seed=seed)
    assert fitted_warp(normal(3000, d, seed=seed + 10) @ A) is None


def test_points_that_tell_nothing_are_left_alone():
    x = normal(500, 3)
    assert fitted_warp(x[:6]) is None
    x[:, 1] = 1.0
    assert fitted_warp(x) is None
    assert fitted_warp(x / 0) is None


@pytest.mark.parametrize("has_density", [True, False])
def test_the_score_is_that_of_the_density(warp, has_density):
    target = Funnel(5)
    score = resolve_score(target if has_density else bare(target), 5, dtype=torch.float64, device=torch.device("cpu"))
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
    assert Warp(zeros[0], zeros[0] + 1, [level]).unwarp(zeros)[0].shape == (1, 1)
    for act, message in (
        (lambda: replace(warp, levels=warp.levels[:1]), "each coordinate once"),
        (lambda: replace(warp, levels=warp.levels[::-1]), "not below it"),
        (lambda: Level(i, i, zeros, zeros, zeros, zeros), "do not fit its drivers"),
        (lambda: replace(level, shape=0 * level.shape), "no positive weight"),
    ):
        with pytest.raises(ValueError, match=message):
            act()


# Fits


@pytest.mark.parametrize("target", [Bent(2), pytest.param(bare(Bent(2)), marks=pytest.mark.slow)])
def test_a_wide_banana_is_fitted(target):
    """Standard deviations within 10%, of 40,000 draws on either side; without a warp they are 5 to 7 and 3 to 6."""
    q = KSIVIApproximator(random_state=1).fit(target, n_features=2)
    ratio = q.sample(40_000).std(0) / Bent(2).sample(40_000).std(0).numpy()
    assert isinstance(q.whitening_.warp, Warp)
    assert np.abs(ratio - 1).max() < 0.1
    assert q.n_score_calls_ + q.n_products_ < 100_000


def test_what_a_fit_offers_is_in_the_coordinates_of_the_target(bent, tmp_path):
    target = Bent()
    X = target.sample(2000).numpy()
    # the density: exact up to what the fit is off, in nats
    exact = target.log_prob(torch.as_tensor(X)).numpy() - np.log(2 * np.pi * 10)
    log_q, std = bent.score_samples(X, return_std=True)
    assert np.abs(log_q - exact).mean() < 0.1
    assert std.max() < 0.1
    assert certificate(bent, target, random_state=0).divergence < 0.1
    assert diagnose(bent, target, random_state=0).ok
    mean = expectation(bent, target, lambda x: x)
    assert (np.abs(mean.value) < 5 * mean.se + 0.5).all()
    assert refine(bent, target, random_state=0).sample(5).shape == (5, 2)
    np.testing.assert_allclose(bent.whitening_.mean, [0, 0], atol=2.0)
    np.testing.assert_allclose(bent.whitening_.sd, [10, 14.2], rtol=0.25)
    u = bent.whitening_.whiten(torch.as_tensor(X))
    assert (u.std(0) - 1).abs().max() < 0.15
    # and it can be kept
    path = tmp_path / "bent.skksivi"
    skksivi.save(bent, path)
    loaded = skksivi.load(path)
    np.testing.assert_array_equal(loaded.sample(5, random_state=0), bent.sample(5, random_state=0))
    joblib.dump(bent, tmp_path / "bent.joblib")
    again = joblib.load(tmp_path / "bent.joblib")
    np.testing.assert_array_equal(again.score_samples(X[:5]), bent.score_samples(X[:5]))


@pytest.mark.slow
def test_it_can_be_trained_go_on_and_be_interrupted(tmp_path):
    q = KSIVIApproximator(max_iter=20, train=True, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained = clone(q).set_params(checkpoint=Checkpoint(tmp_path / "fit.checkpoint", every=10)).fit(Bent())
        warm = KSIVIApproximator(warm_start=True, random_state=0).fit(Bent())
        n_before = warm.n_score_calls_
        warm.set_params(max_iter=20, train=True).fit(Bent())
    assert trained.whitening_.warp is not None
    assert isinstance(warm.whitening_.warp, Warp)
    assert warm.n_iter_ == 20
    assert warm.n_score_calls_ < n_before + 20 * 128
    ratio = warm.sample(20_000).std(0) / Bent().sample(20_000).std(0).numpy()
    assert np.abs(ratio - 1).max() < 0.2


@pytest.mark.parametrize(
    "parameters",
    [
        {"whiten": "laplace"},
        {"annealing": "linear"},
        {"terms": [Entropic(0.1)]},
        {"latent_dim": 2},
        {"hidden_layer_sizes": Network((8,), linear_skip=False)},
    ],
    ids=lambda parameters: next(iter(parameters)),
)
def test_what_would_have_no_meaning_in_warped_coordinates_forbids_them(parameters, uncertified):
    quick = KSIVIApproximator(whiten=Pilot(effort="low"), max_iter=1, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        q = clone(quick).set_params(**parameters).fit(Bent())
    assert q.whitening_.warp is None


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
    skewness = [(((a[:, 0] - a[:, 0].mean()) / a[:, 0].std()) ** 3).mean().abs() for a in (y_plain, y)]
    assert skewness[1] < 0.3 * skewness[0]
