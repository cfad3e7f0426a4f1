"""What the pilot builds on: line integrals of the score, weights of modes, Gaussians fitted by scores."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_targets import GaussianScore, Mixture, as_score, generator, normal, origin, triangular

from skksivi.coordinates._affine import Affine
from skksivi.coordinates._lines import by_neighbours, kronrod, lobatto, lobatto_nodes, log_ratio
from skksivi.pilot._mixture import batch_and_match, covariance_root, matched
from skksivi.pilot._modes import find_modes
from skksivi.pilot._points import PilotPoints

SEEDS = st.integers(0, 10**6)


def unit(d):
    return Affine(origin(d), torch.eye(d).double())


# Line integrals


def test_kronrods_rule_is_exact_for_degree_ten_and_tells_its_gap_and_neighbours_are_for_degree_two():
    b, a, slope = normal(20, 3), normal(3, seed=1), torch.tensor([1.0, -0.5, 2.0]).double()
    coefficients, powers = normal(11, seed=2), torch.arange(1, 11).double()

    def log_prob(x):
        return ((x @ slope)[:, None] ** torch.arange(11)) @ coefficients

    def score_fn(x):
        return (((x @ slope)[:, None] ** (powers - 1)) @ (powers * coefficients[1:]))[:, None] * slope

    ratio, gap = kronrod(score_fn, a, b)
    torch.testing.assert_close(ratio, log_prob(b) - log_prob(a[None]), rtol=1e-8, atol=1e-8)
    by_four = lobatto(score_fn(a[None]), *map(score_fn, lobatto_nodes(a.expand_as(b), b)), score_fn(b), b - a)
    torch.testing.assert_close(ratio - gap, by_four)
    x, square = normal(60, 3, seed=3), normal(60, 3, seed=3).square() @ slope
    torch.testing.assert_close(by_neighbours(x, 2 * slope * x, square[:2]), square)


@pytest.mark.parametrize("low", [1.0, 10.0, 100.0])
def test_log_ratio_sees_kinks_wherever_they_are(low):
    """Of 60 pairs of peaks of other widths, at distances of one decade; Legendre's rule missed the kink of 3%."""
    generator, missed = torch.Generator().manual_seed(0), 0
    for _ in range(60):
        distance, first, second, share = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
        far, sds = low * 10**distance, [10 ** (first - 0.5), 10 ** (second - 0.5)]
        p = Mixture([1 - 0.9 * share, 0.9 * share], [[0.0, 0.0], [0.6 * far, 0.8 * far]], sds)
        exact = p.log_prob(p.means[1:]) - p.log_prob(p.means[:1])
        missed += not (log_ratio(p.score_fn, *p.means) - exact).abs() < 0.05
    assert missed <= 1


# Modes


def test_modes_below_the_least_weight_are_left_out():
    p = Mixture([1 - 1e-4, 1e-4], [[-5.0, 0.0], [5.0, 0.0]], [1.0, 1.0])
    found = find_modes(as_score(p.score_fn), p.means, generator())
    assert found.weights.tolist() == [1.0]
    torch.testing.assert_close(found.maps[0].m, p.means[0])


# A Gaussian


@given(d=st.integers(1, 5), log10_condition=st.floats(0, 8), seed=SEEDS)
def test_batch_and_match_finds_a_gaussian_of_any_condition(d, log10_condition, seed):
    """From one standard deviation off and scales up to three times off, each step shrinks what is left."""
    p = GaussianScore(d, log10_condition if d > 1 else 0, 1.0, seed)
    exact = torch.linalg.cholesky(p.V * p.lam @ p.V.mT)
    direction = torch.nn.functional.normalize(normal(d, seed=seed), dim=0)
    start = Affine(p.mean + exact @ direction, exact @ triangular(d, 2, seed) * (3 if seed % 2 else 1 / 3))
    m, L = batch_and_match(p.score_fn, start, generator(seed))
    W = p.standardise(L)
    assert p.standardise(m - p.mean).norm() < 0.01
    torch.testing.assert_close(W @ W.mT, torch.eye(d).double(), rtol=0, atol=0.01)


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_far_gaussian_is_matched_if_it_has_more_mass(share, monkeypatch):
    """It fits the scores far out, but that is where the target is only if it has more mass."""
    target = Mixture([1 - share, share], [[0.0, 0.0], [60.0, 60.0]], [1.0, 1.0])
    far, mode = Affine(origin(2) + 60, unit(2).L), Affine(origin(2), 1.5 * unit(2).L)
    monkeypatch.setattr("skksivi.pilot._mixture.batch_and_match", lambda *_: far)
    assert matched(target.score_fn, mode, generator()) is (far if share > 0.5 else mode)


# Covariances


@given(d=st.integers(1, 5), log10=st.floats(0, 12), seed=SEEDS)
def test_covariance_root_is_a_root_of_the_sample_covariance(d, log10, seed):
    scales = 10 ** (log10 * (torch.linspace(0, 1, d).double() - 0.5))
    x = 100 * normal(d, seed=seed) * scales + normal(50, d, seed=seed + 1) * scales
    L = covariance_root(x)
    expected = x.mT.cov(correction=0).view(d, d)
    torch.testing.assert_close(L @ L.mT / scales.outer(scales), expected / scales.outer(scales), rtol=0, atol=1e-9)
    assert torch.equal(L, L.tril())
    assert (L.diagonal() > 0).all()


@pytest.mark.parametrize(
    "x",
    [
        normal(50, 1).repeat(1, 3),
        normal(2, 5),
        normal(50, 2) @ normal(2, 4),
        normal(50, 2) * torch.tensor([1.0, 0.0]),
    ],
    ids=["equal columns", "two points", "low rank", "a constant column"],
)
def test_covariance_root_of_a_singular_correlation(x):
    L = covariance_root(x)
    torch.testing.assert_close(L @ L.mT, x.mT.cov(correction=0), rtol=0, atol=1e-6)
    assert (L.diagonal() > 0).all()


def test_a_thinned_pilot_keeps_the_shares_of_the_modes():
    pilot = PilotPoints(normal(1000, 2), [800, 200], torch.ones(2))
    thin = pilot.thinned(100)
    assert thin.n_of_mode == [80, 20]
    assert thin.x.shape == (100, 2)
    assert pilot.thinned(5000).x.equal(pilot.x)
