"""Whitening: affine maps, the rules that find those that standardise a target, and reports that tell how."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from members import every
from plain_targets import RING, UNEQUAL, GaussianScore, generator, normal, resolved

from skksivi.coordinates._affine import Affine, Identity, LowRank
from skksivi.coordinates._whitening import score_for_training
from skksivi.estimators._start import find_coordinates
from skksivi.parameters import Pilot
from skksivi.score._probe import in_double
from skksivi.start import _find, find_whitening

AFFINE = Affine(normal(3), normal(3, 3, seed=1).tril(-1) + torch.diag(torch.tensor([0.1, 1.0, 20.0]).double()))
LOW_RANK = LowRank(
    normal(3), normal(3, seed=1).exp(), torch.linalg.qr(normal(3, 2, seed=2)).Q, torch.tensor([0.1, 9.0]).double()
)
NO_RANK = LowRank(normal(3), normal(3, seed=1).exp(), torch.empty(3, 0).double(), torch.empty(0).double())
every_map = every("map_", [AFFINE, LOW_RANK, NO_RANK, Identity(torch.zeros(1))])


def factor(map_):
    """The L of x = m + L u."""
    shift = map_.unwhiten(torch.zeros(1, 3).double())
    return (map_.unwhiten(torch.eye(3).double()) - shift).mT


@every_map
def test_a_map_is_affine_and_has_an_inverse_and_its_determinant(map_):
    x, L = normal(6, 3, seed=2), factor(map_)
    torch.testing.assert_close(map_.unwhiten(map_.whiten(x)), x)
    torch.testing.assert_close(map_.whiten(map_.unwhiten(x)), x)
    torch.testing.assert_close(map_.unwhiten(x), map_.unwhiten(torch.zeros(1, 3).double()) + x @ L.mT)
    assert float(map_.log_determinant()) == pytest.approx(torch.linalg.slogdet(L).logabsdet.item())
    if not isinstance(map_, Identity):
        torch.testing.assert_close(map_.unwhiten_direction(x), x @ L.mT)


@every_map
def test_the_whitened_score_and_its_product_are_those_of_the_composition_in_the_type_of_the_input(map_):
    p = GaussianScore(3, 4, 10, seed=0)
    score_fn = in_double(p.score_fn, 3)
    u, v = normal(5, 3).requires_grad_(), normal(5, 3, seed=9)
    x = map_.unwhiten(u)
    (s_u,) = torch.autograd.grad(x, u, p.score_fn(x), create_graph=True)
    (expected,) = torch.autograd.grad(s_u, u, v)
    for dtype, rtol, atol in ((torch.float64, 1e-7, 1e-7), (torch.float32, 1e-4, 1e-2)):
        s, pull = map_.pull_back(score_fn).with_pullback(u.detach().to(dtype))
        product = pull(v.to(dtype))
        assert s.dtype == product.dtype == dtype
        torch.testing.assert_close(s.double(), s_u.detach(), rtol=rtol, atol=atol)
        torch.testing.assert_close(product.double(), expected, rtol=rtol, atol=atol)


def whitening_of(whiten, score_fn, d, *, seed=0, **options):
    rule = Pilot(whiten, budget=10_000) if whiten == "diagonal" else whiten
    return find_whitening(rule, in_double(score_fn, d), generator(seed), **options)


# The rules


@every("rule", list(_find.RULES))
def test_many_features_get_a_diagonal_and_a_few_directions(monkeypatch, rule):
    monkeypatch.setattr(_find, "MAX_FEATURES", 1)
    monkeypatch.setattr(_find, "MOST_EXPLORED", 1)
    p = GaussianScore(4, 0, 10, seed=0)
    whitening, pilot = whitening_of(rule, p.score_fn, 4)
    assert isinstance(whitening.map, LowRank)
    assert (pilot is None) == (rule != "diagonal")
    np.testing.assert_allclose(whitening.L, np.eye(4), atol=1e-6 if pilot is None else 0.5)
    np.testing.assert_allclose(whitening.modes[0], p.mean, atol=0.1)


WIDE = [1.0, 0.0]
BAD_PAIRS = [
    ([0.0], [[1.0]]), ([0.0, 0.0], [1.0, 1.0]), ([0.0, 0.0], [WIDE, [0.0, 0.0]]), ([0.0, 0.0], [[-1.0, 0.0], WIDE]),
    ([0.0, 0.0], [WIDE, [np.nan, 1.0]]), ([0.0, np.nan], np.eye(2)), ([0.0, 0.0], [[1.0, 0.5], [0.5, 1]]), ([0, 0],),
]  # fmt: skip


def test_a_pair_that_is_no_affine_map_and_an_init_that_is_no_point_are_named():
    for whiten in BAD_PAIRS:
        with pytest.raises(ValueError, match="`whiten` must be"):
            find_whitening(whiten, in_double(torch.neg, 2), generator())
    for init in [[0.0], [[0.0]], 0.0, [0.0, np.nan], np.zeros((0, 2)), np.zeros((1, 1, 2))]:
        with pytest.raises(ValueError, match=r"`init` must be a finite vector of shape \(2,\)"):
            whitening_of("auto", torch.neg, 2, init=init)


# The automatic rule


@settings(max_examples=5)
@given(seed=st.integers(0, 10**6))
def test_a_gaussian_of_scales_from_a_thousandth_to_a_thousand_is_standardised(seed):
    """Moments of 128 chains of 33 correlated states: their errors are 5% and 5%."""
    p = GaussianScore(4, 12, 1e4, seed)
    whitening, pilot = whitening_of("auto", p.score_fn, 4, seed=seed)
    m, L = whitening.map
    W = p.standardise(L)
    assert p.standardise(m - p.mean).abs().max() < 0.25
    assert (W @ W.mT - torch.eye(4)).abs().max() < 0.25
    assert whitening.converged
    assert whitening.condition == pytest.approx(1e12, rel=0.5)
    assert len(whitening.modes) == len(whitening.weights) == len(pilot.n_of_mode) == 1


def test_the_report_is_that_of_the_points():
    whitening, pilot = whitening_of("auto", GaussianScore(3, 2, 10, seed=0).score_fn, 3)
    own = pilot.mixture.map()
    for ours, of_points in (("m", own.m), ("L", own.L), ("mean", pilot.x.mean(0)), ("sd", pilot.x.std(0))):
        np.testing.assert_allclose(getattr(whitening, ours), of_points)
    np.testing.assert_allclose(whitening.mean_se, pilot.mean_se)
    assert whitening.condition == pytest.approx(np.linalg.cond(whitening.L) ** 2)
    u = whitening.map.whiten(pilot.x)
    torch.testing.assert_close(u.mT.cov(correction=0), torch.eye(3).double(), rtol=0, atol=0.15)


@every("p", [UNEQUAL, RING])
def test_all_modes_of_a_mixture_are_found_with_their_weights(p):
    """The integral across the kink between two modes is off by at most 0.02, a weight by w (1 - w) times that."""
    whitening, _ = whitening_of("auto", p.score_fn, 2)
    assert len(whitening.modes) == len(p.means)
    nearest = np.linalg.norm(whitening.modes[:, None] - p.means.numpy(), axis=-1).argmin(1)
    assert sorted(nearest) == list(range(len(p.means)))
    np.testing.assert_allclose(whitening.weights, p.weights[nearest], atol=0.01)
    m, L = whitening.map
    mean = p.weights @ p.means
    covariance = (p.means - mean).mT * p.weights @ (p.means - mean) + (p.weights @ p.sds**2) * torch.eye(2)
    size = covariance.diagonal().sqrt()
    assert ((m - mean) / size).abs().max() < 0.1
    assert ((L @ L.mT - covariance) / size.outer(size)).abs().max() < 0.1


# The type of numbers


@every("d, far", [(5, 3.0), (100, 0.5)])
def test_a_pair_is_brought_to_a_gaussian_along_every_direction(d, far):
    """Each whitened coordinate is off by that much, so one direction by sqrt(d) times that, which averages hide."""
    p = GaussianScore(d, 2, 10, seed=0)
    L = torch.linalg.cholesky(p.V * p.lam @ p.V.mT)
    score = in_double(p.score_fn, d)
    whitening, _ = find_coordinates((p.mean + far * L.sum(1), L), None, score, generator(0), warps=False, moves=True)
    m, L = whitening.map
    assert p.standardise(m - p.mean).norm() < 0.1
    np.testing.assert_allclose(torch.linalg.svdvals(p.standardise(L)), np.ones(d), rtol=0.1)


@every("log10_condition, size, is_single", [(2, 10.0, True), (12, 1.0, False), (0, 1e7, False), (8, 1e5, False)])
def test_where_rounding_costs_more_than_a_hundredth_training_is_in_double(log10_condition, size, is_single):
    score = resolved(GaussianScore(3, log10_condition, size, seed=0).score_fn, 3, torch.float32)
    whitening, _ = find_whitening("laplace", score, generator())
    pulled = score_for_training(score, whitening, torch.Generator())
    assert pulled.score is (score if is_single else score.double)
    u = normal(50, 3).float()
    s, _ = pulled.with_pullback(u)
    assert s.dtype == torch.float32
    torch.testing.assert_close(s, -u, rtol=1e-3, atol=0.05)


def test_the_score_is_pulled_back_by_a_given_pair_and_without_whitening_by_nothing():
    score = resolved(torch.neg, 2, torch.float32)
    whitening, _ = find_whitening(([1, 2], [[1.0, 0.0], [0.5, 2.0]]), score, generator())
    s, _ = score_for_training(score, whitening, torch.Generator()).with_pullback(torch.ones(1, 2))
    torch.testing.assert_close(s, torch.tensor([[-4.25, -9.0]]))  # -L^T (m + L u)
    whitening, pilot = find_whitening(None, score, generator())
    assert isinstance(whitening.map, Identity)
    assert (whitening.modes.shape, pilot) == ((0, 2), None)
    assert score_for_training(score, whitening, torch.Generator()) is score
    by_differences = resolved(lambda X: -np.tanh(X), 2, torch.float32)  # in float64
    assert score_for_training(by_differences, whitening, torch.Generator()) is by_differences.double
