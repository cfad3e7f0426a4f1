"""The search for modes: exact on Gaussians however they are scaled, one start as well as many."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_targets import PAIR, GaussianScore, as_score, normal, origin, pushed, student_score, triangular

from skksivi.coordinates._affine import LowRank
from skksivi.pilot._newton import TOLERANCE, jacobians, newton_cg, saddle_free_newton, search_modes
from skksivi.targets import Multimodal

SEEDS = st.integers(0, 10**6)


@given(d=st.integers(1, 6), log10_condition=st.floats(0, 10), size=st.floats(0, 1e3), seed=SEEDS)
def test_a_gaussian_is_whitened_exactly_from_the_origin(d, log10_condition, size, seed):
    """Rounding costs the condition number times 1e-16; the search stops within 0.01 sd of the mode a coordinate."""
    p = GaussianScore(d, log10_condition if d > 1 else 0, size, seed)
    (m, L), converged = saddle_free_newton(as_score(p.score_fn), origin(d))
    assert converged
    W = p.standardise(L)
    assert p.standardise(m - p.mean).norm() < 1e-2 * d**0.5
    torch.testing.assert_close(W @ W.mT, torch.eye(d, dtype=W.dtype), rtol=0, atol=1e-4)
    assert torch.equal(L, L.tril())
    assert (L.diagonal() > 0).all()


@pytest.mark.parametrize("score_fn", [PAIR.score_fn, Multimodal().score_fn], ids=["mixture", "Multimodal"])
def test_the_search_leaves_a_saddle_for_a_mode(score_fn):
    assert score_fn(origin(2)[None]).abs().max() < 1e-12
    assert torch.linalg.eigvalsh(jacobians(as_score(score_fn), origin(2)[None])[0]).prod() < 0
    (m, L), _ = saddle_free_newton(as_score(score_fn), origin(2))
    precision = -jacobians(as_score(score_fn), m[None])[0]
    s = score_fn(m[None])[0]
    assert torch.linalg.eigvalsh(precision).min() > 0
    assert s @ torch.linalg.solve(precision, s) < 2 * TOLERANCE
    torch.testing.assert_close(L @ L.mT, torch.linalg.inv(precision), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", [3.0, 30.0, -300.0])
def test_the_search_goes_up_a_heavy_tail_against_its_curvature(mode):
    """Student's t is convex in its tails, where Newton's own step would lead away."""

    def score_fn(x):
        r = x - mode
        return -6 * r / (5 + r.square().sum(-1, keepdim=True))

    (m, L), _ = saddle_free_newton(as_score(score_fn), origin(2))
    torch.testing.assert_close(m, torch.full_like(m, mode), rtol=0, atol=0.05)
    torch.testing.assert_close(L @ L.mT, 5 / 6 * torch.eye(2, dtype=m.dtype), rtol=0, atol=0.02)


def test_a_mode_without_curvature_leaves_the_scale():
    (m, L), _ = saddle_free_newton(as_score(lambda x: -x.pow(3)), origin(2))
    assert torch.equal(m, origin(2))
    assert torch.equal(L, torch.eye(2).double())


# Many starts


def test_a_start_without_a_finite_score_is_dropped_and_harms_no_other():
    def score_fn(x):
        return torch.where(x[:, :1] < -5, torch.nan, 1 - x)

    starts = torch.tensor([[0.0, 0.0], [-9.0, 0.0], [4.0, 4.0], [-9.0, 1.0]]).double()
    maps, converged = search_modes(as_score(score_fn), starts)
    assert converged.tolist() == [True, True]
    for m, L in maps:
        torch.testing.assert_close(m, torch.ones(2).double())
        torch.testing.assert_close(L, torch.eye(2).double())
    assert search_modes(as_score(score_fn), starts[[1, 3]])[0] == []


def test_a_search_cut_short_has_not_converged():
    maps, converged = search_modes(as_score(student_score), 100 + normal(3, 2), 1)
    assert len(maps) == 3
    assert not converged.any()


# Many dimensions


@pytest.mark.parametrize("seed", range(3))
def test_many_dimensions_a_diagonal_and_a_few_directions_whiten_a_gaussian(seed):
    """Precision D^-1 (I + V diag(99) V^T) D^-1: after the map its eigenvalues are within a factor of e^0.5 of one
    and 2 each way, for the diagonal is known from 256 random signs and what stands out by less is left.
    """
    d = 60
    scale, V = 10 ** normal(d, seed=seed), torch.linalg.qr(normal(d, 3, seed=seed + 1)).Q
    mean = 100 * normal(d, seed=seed + 2) * scale

    def score_fn(x):
        u = (x - mean) / scale
        return -(u + 99 * (u @ V) @ V.mT) / scale

    found = newton_cg(as_score(score_fn), origin(d), torch.Generator().manual_seed(seed))
    assert isinstance(found, LowRank)
    u = (found.m - mean) / scale
    assert u.square().sum() + 99 * (u @ V).square().sum() < 1e-2 * d
    W = found.unwhiten_direction(torch.eye(d).double()) / scale
    eigenvalues = torch.linalg.eigvalsh(W @ W.mT + 99 * (W @ V) @ (W @ V).mT)
    assert 1 / 4 < eigenvalues.min() <= eigenvalues.max() < 4


@pytest.mark.parametrize(
    "score_fn", [lambda x: x, lambda x: x + 1, lambda x: x.pow(3) + 1], ids=["x", "x + 1", "x^3 + 1"]
)
def test_many_dimensions_the_wrong_sign_is_named(score_fn):
    with pytest.raises(ValueError, match="wrong sign"):
        newton_cg(as_score(score_fn), origin(4), torch.Generator())


@given(seed=SEEDS, log10=st.floats(0, 6))
def test_a_search_on_a_concave_log_density_is_affine_equivariant(seed, log10):
    """Newton's step is; the factor is the only lower triangular one with a positive diagonal."""
    A = triangular(3, log10, seed)
    b = 10 * normal(3, seed=seed + 1)

    def score_fn(x):
        return -2 * torch.tanh(x - 1) - x / 2

    start = normal(3, seed=seed + 2)
    (m, L), _ = saddle_free_newton(as_score(score_fn), start)
    (m_y, L_y), _ = saddle_free_newton(as_score(pushed(score_fn, A, b)), A @ start + b)
    torch.testing.assert_close(torch.linalg.solve(A, m_y - b), m, rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.linalg.solve(A, L_y), L, rtol=0, atol=1e-3)
