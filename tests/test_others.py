"""Other modes of a target, permutations that leave it as it is, and what each mode weighs."""

import importlib
import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from members import every, refused
from plain_targets import Mixture, as_score, gaussian, generator, gumbel_score, normal, origin, resolved
from sklearn.exceptions import ConvergenceWarning

from skksivi import KSIVIApproximator, diagnose, load, save
from skksivi.coordinates._affine import Affine
from skksivi.judge import THRESHOLDS
from skksivi.pilot._modes import all_modes, ridge_of
from skksivi.pilot._newton import fault_of_jump, saddle_free_newton
from skksivi.pilot._symmetries import images, symmetries_of
from skksivi.score._score import STEPS
from skksivi.targets import GaussianMixture, constrained, from_log_prob


def unit(d, scale=1.0):
    return scale * torch.eye(d).double()


def apart(d, distance, sds=(1.0, 1.0), weights=(0.5, 0.5), seed=0):
    """Two normal components at the origin and in a random direction."""
    v = np.random.RandomState(seed).normal(size=d)
    return Mixture(weights, np.stack([np.zeros(d), distance * v / np.linalg.norm(v)]), sds)


MIXTURES = {
    "apart": Mixture([0.5, 0.5], [[8.0, 4.0], [-8.0, 0.0]], [1.0, 1.0]),
    "unequal": Mixture([0.7, 0.3], [[6.0, 3.0], [-6.0, 0.0]], [2.0, 1.0]),
    "32 features": apart(32, 10.0),
    "100 features": apart(100, 10.0),
    "narrow": apart(3, 9.0, (1.0, 0.3)),
}


@every("p", list(MIXTURES.values()))
def test_another_mode_is_found(p):
    d = p.means.shape[1]
    found = all_modes(as_score(p.score_fn, d=d), origin(d), Affine(p.means[0], unit(d, p.sds[0])), generator())
    assert len(found.maps) == 2
    assert torch.cdist(p.means, torch.stack([a.m for a in found.maps])).amin(1).max() < 0.5


def scattered_mixture(k, d, half_width):
    centres = np.random.RandomState(0).uniform(-half_width, half_width, (k, d))
    centres[0] = 0
    return Mixture(np.full(k, 1 / k), centres, np.ones(k))


def test_many_modes_are_found_until_a_round_finds_no_other():
    """Those that overlap are one; nine of ten at least."""
    p = scattered_mixture(40, 10, 20.0)
    found = all_modes(as_score(p.score_fn, d=10), origin(10), Affine(origin(10), unit(10)), generator())
    assert 36 <= len(found.maps) <= 40
    n, n_new = found.ascents
    assert n > 40
    assert n_new == 0


@pytest.mark.slow
def test_a_search_that_finds_new_modes_to_its_end_says_so():
    """There are 300, and the search ends at 120."""
    p = scattered_mixture(300, 5, 60.0)
    with pytest.warns(ConvergenceWarning, match="the search for modes ended while"):
        q = KSIVIApproximator(max_iter=50, random_state=0).fit(p.score_fn, n_features=5)
    assert q.whitening_.unseen > THRESHOLDS.unseen
    assert not q.verdict_.good


def test_wells_along_independent_directions_are_fitted_without_a_list_of_their_modes(monkeypatch):
    """There are 2^8, which the list of modes ends far before."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    p = importlib.import_module("_suites").ManyWell(16)
    q = KSIVIApproximator(random_state=0).fit(p)
    X, Y = q.sample(20_000), p.sample(20_000, generator()).numpy()
    assert q.verdict_.good
    np.testing.assert_allclose(X.mean(0), Y.mean(0), atol=0.06)
    np.testing.assert_allclose(X.std(0), Y.std(0), rtol=0.05)


def test_a_ridge_is_told_from_a_mode_of_which_one_direction_is_wide():
    ring = as_score(lambda x: -4 * (1 - 5 / x.norm(dim=1, keepdim=True)) * x, d=2)
    mode, _ = saddle_free_newton(ring, torch.tensor([3.0, 1.0]).double())
    m, L = ridge_of(ring, torch.tensor([[3.0, 1.0]]).double(), mode, generator())
    assert m.norm() < 2
    assert 3 < torch.linalg.svdvals(L)[-1] <= torch.linalg.svdvals(L)[0] < 10
    scales = torch.tensor([1e-6, 1e6]).double()
    wide = Affine(origin(2), scales.diag())
    assert ridge_of(as_score(lambda x: -x / scales**2, d=2), origin(2)[None], wide, generator()) is None


def test_a_missed_mode_has_a_probability_and_a_search_that_did_not_end_is_told():
    """It grows as modes get narrower and, of more dimensions than looks are for, is nearly one."""
    p = MIXTURES["apart"]
    q = KSIVIApproximator(random_state=0).fit(p.score_fn, n_features=2)
    n, n_new = q.whitening_.ascents
    assert n > 0
    assert n_new == q.whitening_.unseen == 0
    by_width = [q.whitening_.missed(0.3, width) for width in (1.0, 0.2, 0.05, 0.01)]
    assert (by_width, by_width[1]) == (sorted(by_width), 0)
    assert by_width[-1] > 0.9
    assert replace(q.whitening_, modes=np.zeros((1, 20))).missed(0.3, 0.5) > 0.9
    nothing = replace(q.whitening_, ascents=None)
    assert nothing.missed(0.05) == 1
    assert math.isnan(nothing.unseen)
    refused(ValueError, "`weight` is the share", nothing.missed, 1.5)
    refused(ValueError, "`width` is a share", nothing.missed, 0.5, 2.0)
    q.whitening_ = replace(q.whitening_, ascents=np.array([100, 8]))
    check = diagnose(q, p.score_fn, random_state=0)["modes"]
    assert "8% of the last ascents found new ones" in check.text
    assert "`init`" in check.remedy


@every("width, thorough", [(0.2, False), (0.05, True)])
def test_narrow_modes_are_found_where_nearly_none_is_missed(width, thorough):
    for seed in range(2):
        score = as_score(apart(3, 5.5, (1.0, width), (0.7, 0.3), seed).score_fn, d=3)
        start = Affine(origin(3), unit(3))
        assert len(all_modes(score, origin(3), start, generator(seed), thorough=thorough).maps) == 2


def test_a_mode_of_more_mass_is_found_from_the_prior_alone():
    """It is where the prior is, too far for ascents from around zero; the other is 20 nats below."""
    law = GaussianMixture([[0.0] * 8, [200.0] * 8], weights=[1e-9, 1])
    law.prior_draws = lambda n, seed: np.random.RandomState(seed).normal(200, 3, (n, 8))
    assert np.abs(KSIVIApproximator(random_state=0).fit(law).sample(100, random_state=0) - 200).max() < 6


@given(seed=st.integers(0, 10**6))
def test_no_other_mode_and_no_symmetry_is_found_where_there_is_none(seed):
    m, P, score_fn = gaussian(4, seed)
    at = Affine(m, torch.linalg.cholesky(torch.linalg.inv(P)))
    for score, mode in ((as_score(score_fn, d=4), at), (as_score(gumbel_score, d=4), Affine(origin(4), unit(4)))):
        assert len(all_modes(score, origin(4), mode, generator(seed)).maps) == 1
        assert symmetries_of(score, mode) == ()


# Symmetries


@every(
    "log_prob, start, n_modes",
    [
        (lambda x: -(x.prod(1) - 8).square() / 2 - x.square().sum(1) / 2, [2.0, 2.0, 2.0], 4),  # any two signs may
        (lambda x: -(x.square() - 9).square().sum(1) / 8, [3.0, 3.0], 4),
        (lambda x: -(x.square() - 9).square().sum(1) / 8 + 1e-3 * x[:, 0], [3.0, 3.0], 2),
    ],
)
def test_signs_that_may_change_are_found(log_prob, start, n_modes):
    score = resolved(from_log_prob(log_prob, len(start)), dtype=torch.float32)
    mode = saddle_free_newton(score, torch.tensor(start).double())[0]
    assert len(images([mode], symmetries_of(score, mode))) + 1 == n_modes


def labelled():
    """y ~ a mixture of three normals of unknown shares and means, and an unknown normal variable beside each."""
    rng = np.random.RandomState(0)
    y = torch.as_tensor(np.concatenate([rng.normal(6 * j, 1, 20) for j in range(3)]))

    def log_prob(share, mean, common):
        parts = share.log()[:, :, None] - (y - mean[:, :, None]).square() / 2
        return parts.logsumexp(1).sum(1) - (mean - 6).square().sum(1) / 50 - common.square().sum(1) / 2 - common[:, 0]

    return constrained(log_prob, {"share": ("simplex", 3), "mean": ("real", 3), "common": ("real", 3)})


def test_labels_on_a_simplex_are_exchanged_with_all_that_they_name():
    target = labelled()
    start = target.unconstrain({"share": [0.3, 0.3, 0.4], "mean": [0.0, 6.0, 12.0], "common": [0.0, 0.0, 0.0]})
    score = resolved(target)
    mode = saddle_free_newton(score, torch.as_tensor(start))[0]
    found = [mode, *images([mode], symmetries_of(score, mode))]
    order = target.constrain(torch.stack([a.m for a in found]).numpy())["mean"].argsort(1)
    assert len(found) == 6
    assert set(map(tuple, order.tolist())) == set(itertools.permutations(range(3)))


@pytest.mark.slow
def test_all_labels_are_in_a_fit_in_equal_shares(tmp_path):
    """Six orders of three means, 6,000 draws: five standard errors of a share are .024."""
    target = labelled()
    q = KSIVIApproximator(random_state=0).fit(target)
    assert len(q.whitening_.modes) == 6
    assert q.n_score_calls_ < 40_000
    order = target.constrain(q.sample(6000))["mean"].argsort(1)
    shares = [(order == p).all(1).mean() for p in itertools.permutations(range(3))]
    np.testing.assert_allclose(shares, 1 / 6, atol=5 * math.sqrt(5 / 36 / 6000))
    save(q, tmp_path / "q")
    for name in ("symmetries", "ascents"):
        np.testing.assert_array_equal(getattr(load(tmp_path / "q").whitening_, name), getattr(q.whitening_, name))


@every("jump", [0.0, 2.0])
def test_the_rounding_of_log_p_in_float32_is_no_jump(jump):
    """Numbers near 3e6 are rounded by a quarter."""

    def log_prob(x):
        return (3e6 - x.square().sum(1) / 2).float().double() + jump * (x[:, 0] > 0.3)

    score = replace(resolved(from_log_prob(lambda x: -x.square().sum(1) / 2, 2)), log_prob=log_prob, in_double=None)
    x = normal(20, 2)
    found = fault_of_jump(replace(score, step=STEPS[torch.float32]), x)
    assert found is None if jump == 0 else "near `x[0]` = 0.3," in found


# Weights


@every("d, distance, sds", [(2, 5.0, (1.0, 1.0)), (8, 50.0, (1.0, 2.0)), (40, 12.0, (1.0, 1.0))])
def test_modes_weigh_what_they_should(d, distance, sds):
    """Two in ten by 20,000 draws, of a standard error of .003, within .03 in all."""
    p = apart(d, distance, sds, (0.8, 0.2))
    q = KSIVIApproximator(random_state=0).fit(p.score_fn, n_features=d)
    assert q.n_score_calls_ < 80_000
    X = torch.as_tensor(q.sample(20_000)).double()
    v = p.means[1] / p.means[1].norm()
    far = (X @ v > distance * sds[0] / sum(sds)).double().mean().item()
    assert abs(far - 0.2) < 0.03


def powers(x):
    """log p of |x_1|^4 times a normal that is not about zero: two modes, of different mass, and zero between them."""
    return 4 * x[:, 0].abs().log() - (x[:, 0] - 0.1).square() / 2 - x[:, 1].square() / 2


def test_modes_beyond_a_valley_of_zero_density_weigh_what_they_should():
    q = KSIVIApproximator(random_state=0).fit(from_log_prob(powers, 2))
    assert q.n_score_calls_ < 40_000
    t = np.linspace(0, 10, 10_001)
    above, below = (t**4 * np.exp(-((sign * t - 0.1) ** 2) / 2) for sign in (1, -1))
    share = above.sum() / (above.sum() + below.sum())
    assert abs((q.sample(20_000, random_state=0)[:, 0] > 0).mean() - share) < 0.05


@pytest.mark.filterwarnings("error")
def test_a_slanted_valley_of_zero_density_is_no_jump():
    """The modes are less than four standard deviations from each other, and nothing is told."""
    d, at = 4, -0.5
    v = np.linspace(-1, 1, d) / np.linalg.norm(np.linspace(-1, 1, d))
    log_prob = lambda x: 2 * (x @ x.new_tensor(v) - at).abs().log() - x.square().sum(1) / 2  # noqa: E731
    q = KSIVIApproximator(random_state=0).fit(from_log_prob(log_prob, d))
    assert q.n_score_calls_ < 40_000
    t = np.linspace(-10, 10, 20_001)
    mass = (t - at) ** 2 * np.exp(-(t**2) / 2)
    assert abs((q.sample(20_000, random_state=0) @ v > at).mean() - mass[t > at].sum() / mass.sum()) < 0.05


def test_the_score_alone_does_not_tell_weights_beyond_a_valley():
    score_fn = from_log_prob(powers, 2).score_fn
    with pytest.warns(ConvergenceWarning, match=r"The weight of the mode at \[.*\] is unknown") as told:
        q = KSIVIApproximator(init=[[2.0, 0.0], [-2.0, 0.0]], random_state=0).fit(score_fn, n_features=2)
    assert len(told) == 1
    assert 0.3 < (q.sample(2000, random_state=0)[:, 0] > 0).mean() < 0.7


def two_parameters(n_persons, n_items):
    """log p of a two-parameter logistic model: slopes and abilities change sign together, intercepts do not."""
    rng = np.random.RandomState(0)
    ability, slope = rng.normal(size=(n_persons, 1)), rng.uniform(1, 2, n_items) * np.sign(rng.normal(size=n_items))
    y = torch.as_tensor(rng.uniform(size=(n_persons, n_items)) < 1 / (1 + np.exp(-ability * slope))).double()

    def log_prob(x):
        a, b, t = x[:, :n_items], x[:, n_items : 2 * n_items], x[:, 2 * n_items :]
        eta = t[:, :, None] * a[:, None] + b[:, None]
        return (y.to(x) * eta - torch.nn.functional.softplus(eta)).sum((1, 2)) - x.square().sum(1) / 2

    return from_log_prob(log_prob, 2 * n_items + n_persons)


@pytest.mark.slow
def test_signs_that_change_together_are_a_symmetry_and_both_modes_in_a_fit():
    target = two_parameters(30, 4)
    q = KSIVIApproximator(random_state=0).fit(target)
    changed = q.whitening_.symmetries[0] < 0  # ~j is minus coordinate j
    np.testing.assert_array_equal(changed, np.r_[np.ones(4), np.zeros(4), np.ones(30)] == 1)
    assert len(q.whitening_.modes) == 2
    X = q.sample(10_000, random_state=0)
    assert np.abs((X[:, changed] > 0).mean(0) - 0.5).max() < 0.03
