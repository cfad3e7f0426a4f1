"""The rules of whitening: a map that standardises the target, and a report that tells how it was found."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_targets import RING, UNEQUAL, GaussianScore, Mixture, generator, normal

from skksivi.coordinates._affine import Identity, LowRank
from skksivi.coordinates._curved import score_for_training
from skksivi.estimators._start import find_coordinates
from skksivi.parameters import Pilot
from skksivi.pilot import _pilot
from skksivi.pilot._pilot import RULES, find_whitening
from skksivi.score._probe import in_double
from skksivi.score._target import resolve_score

SEEDS = st.integers(0, 10**6)
FEW = settings(max_examples=5)
every_rule = pytest.mark.parametrize("rule", RULES)


def cheap(whiten, budget=0):
    return Pilot(whiten, budget=budget) if isinstance(whiten, str) and whiten in ("auto", "diagonal") else whiten


def whitening_of(whiten, score_fn, d, *, budget=0, seed=0, **options):
    return find_whitening(cheap(whiten, budget), in_double(score_fn, d), generator(seed), **options)


# The rules


@every_rule
def test_many_features_get_a_diagonal_and_a_few_directions(monkeypatch, rule):
    monkeypatch.setattr(_pilot, "MAX_FEATURES", 1)
    monkeypatch.setattr(_pilot, "MOST_EXPLORED", 1)
    p = GaussianScore(4, 0, 10, seed=0)
    whitening, pilot = whitening_of(rule, p.score_fn, 4)
    assert isinstance(whitening.map, LowRank)
    assert (pilot is None) == (rule != "diagonal")
    np.testing.assert_allclose(whitening.L, np.eye(4), atol=1e-6 if pilot is None else 0.5)
    np.testing.assert_allclose(whitening.modes[0], p.mean, atol=0.1)


@pytest.mark.parametrize(
    "whiten",
    [
        ([0.0], [[1.0]]), ([0.0, 0.0], [1.0, 1.0]), ([0.0, 0.0], [[1.0, 0.0], [0.0, 0.0]]),
        ([0.0, 0.0], [[-1.0, 0.0], [0.0, 1.0]]), ([0.0, 0.0], [[1.0, 0.0], [float("nan"), 1.0]]),
        ([0.0, float("nan")], [[1.0, 0.0], [0.0, 1.0]]), ([0.0, 0.0], [[1.0, 0.5], [0.5, 1.0]]), ([0.0, 0.0],),
    ],
    ids=str,
)  # fmt: skip
def test_a_pair_that_is_no_affine_map_is_named(whiten):
    with pytest.raises(ValueError, match="`whiten` must be"):
        whitening_of(whiten, lambda x: -x, 2)


# Where the search starts


@pytest.mark.parametrize("init", [[0.0], [[0.0]], 0.0, [0.0, np.nan], np.zeros((0, 2)), np.zeros((1, 1, 2))], ids=str)
def test_an_init_that_is_no_point_is_named(init):
    with pytest.raises(ValueError, match=r"`init` must be a finite vector of shape \(2,\)"):
        whitening_of("auto", lambda x: -x, 2, init=init)


# The automatic rule


def standardised(whitening, mean, root):
    """The map of whitening seen from that to mean zero and unit covariance: the shift and L L^T."""
    W = np.linalg.solve(root, whitening.L)
    return np.linalg.solve(root, whitening.m - mean), W @ W.T


@FEW
@given(seed=SEEDS)
def test_a_gaussian_of_scales_from_a_thousandth_to_a_thousand_is_standardised(seed):
    """Moments of 128 chains of 33 correlated states: their errors are 5% and 5%."""
    p = GaussianScore(4, 12, 1e4, seed)
    whitening, pilot = whitening_of("auto", p.score_fn, 4, seed=seed)
    shift, covariance = standardised(whitening, p.mean.numpy(), (p.V * p.lam.sqrt()).numpy())
    assert np.abs(shift).max() < 0.25
    assert np.abs(covariance - np.eye(4)).max() < 0.25
    assert whitening.converged
    assert whitening.condition == pytest.approx(1e12, rel=0.5)
    assert len(whitening.modes) == len(whitening.weights) == len(pilot.n_of_mode) == 1


def test_the_report_is_that_of_the_points():
    p = GaussianScore(3, 2, 10, seed=0)
    whitening, pilot = whitening_of("auto", p.score_fn, 3)
    np.testing.assert_allclose(whitening.m, pilot.x.mean(0))
    np.testing.assert_allclose(whitening.mean, pilot.x.mean(0))
    np.testing.assert_allclose(whitening.sd, pilot.x.std(0))
    np.testing.assert_array_equal(whitening.mean_se, pilot.mean_se)
    np.testing.assert_allclose(whitening.L @ whitening.L.T, np.cov(pilot.x.T, bias=True), rtol=1e-6)
    assert whitening.condition == pytest.approx(np.linalg.cond(whitening.L) ** 2)
    u = whitening.map.whiten(pilot.x)
    torch.testing.assert_close(u.mT.cov(correction=0), torch.eye(3).double(), rtol=0, atol=1e-9)


def covariance_of(p):
    mean = p.weights @ p.means
    spread = (p.means - mean).mT * p.weights @ (p.means - mean)
    return mean.numpy(), (spread + (p.weights @ p.sds**2) * torch.eye(p.means.shape[1])).numpy()


APART = Mixture([0.5, 0.5], [[-8.0, 0.0], [8.0, 4.0]], [1.0, 1.0])


@pytest.mark.parametrize("p", [APART, UNEQUAL, RING], ids=["two", "unequal", "ring"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_all_modes_of_a_mixture_are_found_with_their_weights(p, seed):
    """The integral across the kink between two modes is off by at most 0.02, a weight by w (1 - w) times that."""
    whitening, _ = whitening_of("auto", p.score_fn, 2, seed=seed)
    assert len(whitening.modes) == len(p.means)
    nearest = np.linalg.norm(whitening.modes[:, None] - p.means.numpy(), axis=-1).argmin(1)
    assert sorted(nearest) == list(range(len(p.means)))
    np.testing.assert_allclose(whitening.weights, p.weights[nearest], atol=0.01)
    mean, covariance = covariance_of(p)
    size = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose((whitening.m - mean) / size, 0, atol=0.1)
    np.testing.assert_allclose((whitening.L @ whitening.L.T - covariance) / np.outer(size, size), 0, atol=0.1)


# The type of numbers


def resolved(score_fn, d):
    return resolve_score(score_fn, d, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("far", [0.5, 3.0])
@pytest.mark.parametrize("d", [5, 100])
def test_a_pair_is_brought_to_a_gaussian_along_every_direction(d, far):
    """Each whitened coordinate is off by that much, so one direction by sqrt(d) times that, which averages hide."""
    p = GaussianScore(d, 2, 10, seed=0)
    L = torch.linalg.cholesky(p.V * p.lam @ p.V.mT)
    score = in_double(p.score_fn, d)
    whitening, _ = find_coordinates((p.mean + far * L.sum(1), L), None, score, generator(0), warps=False, moves=True)
    m, L = whitening.map
    assert p.standardise(m - p.mean).norm() < 0.1
    np.testing.assert_allclose(torch.linalg.svdvals(p.standardise(L)), np.ones(d), rtol=0.1)


@pytest.mark.parametrize(
    ("log10_condition", "size", "is_single"), [(2, 10.0, True), (12, 1.0, False), (0, 1e7, False), (8, 1e5, False)]
)
def test_where_rounding_costs_more_than_a_hundredth_training_is_in_double(log10_condition, size, is_single):
    p = GaussianScore(3, log10_condition, size, seed=0)
    score = resolved(p.score_fn, 3)
    whitening, _ = find_whitening("laplace", score, generator())
    pulled = score_for_training(score, whitening, torch.Generator())
    assert pulled.score is (score if is_single else score.double)
    u = normal(50, 3).float()
    s, _ = pulled.with_pullback(u)
    assert s.dtype == torch.float32
    torch.testing.assert_close(s, -u, rtol=1e-3, atol=0.05)


def test_without_whitening_nothing_is_pulled_back():
    score = resolved(lambda x: -x, 2)
    whitening, pilot = find_whitening(None, score, generator())
    assert isinstance(whitening.map, Identity)
    assert whitening.modes.shape == (0, 2)
    assert pilot is None
    assert score_for_training(score, whitening, torch.Generator()) is score
    by_differences = resolved(lambda X: -np.tanh(X), 2)  # in float64
    assert score_for_training(by_differences, whitening, torch.Generator()) is by_differences.double


def test_whitening_by_a_given_pair_pulls_the_score_back_by_it():
    score = resolved(lambda x: -x, 2)
    whitening, _ = find_whitening(([1, 2], [[1.0, 0.0], [0.5, 2.0]]), score, generator())
    assert [a.tolist() for a in whitening.map] == [[1, 2], [[1, 0], [0.5, 2]]]
    s, _ = score_for_training(score, whitening, torch.Generator()).with_pullback(torch.ones(1, 2))
    torch.testing.assert_close(s, torch.tensor([[-4.25, -9.0]]))  # -L^T (m + L u)
