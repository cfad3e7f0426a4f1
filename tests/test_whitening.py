"""Whitening: exact on Gaussians however they are scaled, and an affine map elsewhere."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skksivi import _whitening
from skksivi._score import in_double, probe
from skksivi._whitening import Affine, Identity, find_whitening, jacobian, saddle_free_newton
from skksivi.targets import Multimodal

REPEATABLE = settings(derandomize=True, deadline=None, max_examples=25)
SEEDS = st.integers(0, 10**6)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def origin(d):
    return torch.zeros(d, dtype=torch.float64)


class Normal:
    """N(mean, V diag(lam) V^T) with eigenvalues spread over `condition`."""

    def __init__(self, d, log10_condition, size, seed):
        self.mean = size * normal(d, seed=seed) / normal(d, seed=seed).norm()
        self.V = torch.linalg.qr(normal(d, d, seed=seed + 1)).Q
        self.lam = 10 ** (log10_condition * (torch.linspace(0, 1, d, dtype=torch.float64) - 0.5))

    def score_fn(self, x):
        return -(((x - self.mean) @ self.V) / self.lam) @ self.V.mT

    def standardise(self, v):
        """Lam^(-1/2) V^T v, of unit covariance for a draw v; v of shape (d, ...)."""
        return (self.V / self.lam.sqrt()).mT @ v


def mixture_score(x):
    """The score of an even mixture of N(-3 e, I) and N(3 e, I), e = (1, 0)."""
    e = x.new_tensor([1.0, 0.0])
    return -x + 3 * torch.tanh(3 * x[..., :1]) * e


@REPEATABLE
@given(d=st.integers(1, 6), log10_condition=st.floats(0, 10), size=st.floats(0, 1e3), seed=SEEDS)
def test_a_gaussian_is_whitened_exactly_from_the_origin(d, log10_condition, size, seed):
    """Rounding costs the condition number times 1e-16; the climb stops within 0.01 sd of the mode a coordinate."""
    p = Normal(d, log10_condition if d > 1 else 0, size, seed)
    m, L = saddle_free_newton(p.score_fn, origin(d))
    W = p.standardise(L)
    assert p.standardise(m - p.mean).norm() < 1e-2 * d**0.5
    torch.testing.assert_close(W @ W.mT, torch.eye(d, dtype=W.dtype), rtol=0, atol=1e-4)
    assert torch.equal(L, L.tril())
    assert (L.diagonal() > 0).all()


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_units_do_not_matter(scale):
    def score_fn(x):
        return (1 - x / scale) / scale

    m, L = saddle_free_newton(score_fn, origin(2))
    torch.testing.assert_close(m / scale, torch.ones(2, dtype=m.dtype), rtol=1e-6, atol=0)
    torch.testing.assert_close(L / scale, torch.eye(2, dtype=m.dtype), rtol=1e-6, atol=0)


@pytest.mark.parametrize("score_fn", [mixture_score, Multimodal().score_fn], ids=["mixture", "Multimodal"])
def test_the_climb_leaves_a_saddle_for_a_mode(score_fn):
    assert score_fn(origin(2)[None]).abs().max() < 1e-12
    assert torch.linalg.eigvalsh(jacobian(score_fn, origin(2))).prod() < 0
    m, L = saddle_free_newton(score_fn, origin(2))
    precision = -jacobian(score_fn, m)
    s = score_fn(m[None])[0]
    assert torch.linalg.eigvalsh(precision).min() > 0
    assert s @ torch.linalg.solve(precision, s) < 2e-4
    torch.testing.assert_close(L @ L.mT, torch.linalg.inv(precision), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", [3.0, 30.0, -300.0])
def test_the_climb_goes_up_a_heavy_tail_against_its_curvature(mode):
    """Student's t is convex in its tails, where Newton's own step would lead away."""

    def score_fn(x):
        r = x - mode
        return -6 * r / (5 + r.square().sum(-1, keepdim=True))

    m, L = saddle_free_newton(score_fn, origin(2))
    torch.testing.assert_close(m, torch.full_like(m, mode), rtol=0, atol=0.05)
    torch.testing.assert_close(L @ L.mT, 5 / 6 * torch.eye(2, dtype=m.dtype), rtol=0, atol=0.02)


@REPEATABLE
@given(d=st.integers(1, 5), seed=SEEDS)
def test_jacobian_is_the_hessian_of_the_log_density(d, seed):
    A, x = normal(d, d, seed=seed), normal(d, seed=seed + 1)

    def log_prob(x):
        return -(x @ A).cosh().log().sum(-1) - x.square().sum(-1)

    def score_fn(x):
        return -torch.tanh(x @ A) @ A.mT - 2 * x

    expected = torch.autograd.functional.jacobian(lambda x: score_fn(x[None])[0], x)
    torch.testing.assert_close(jacobian(score_fn, x), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(jacobian(score_fn, x), torch.autograd.functional.hessian(log_prob, x))


def test_jacobian_does_not_need_gradients_to_be_on():
    with torch.no_grad():
        assert torch.equal(jacobian(lambda x: -2 * x, origin(2)), -2 * torch.eye(2, dtype=torch.float64))


@pytest.fixture
def affine():
    return Affine(normal(3), normal(3, 3, seed=1).tril(-1) + torch.diag(torch.tensor([0.1, 1.0, 20.0]).double()))


def test_whiten_and_unwhiten_are_inverse(affine):
    x = normal(6, 3, seed=2)
    torch.testing.assert_close(affine.unwhiten(affine.whiten(x)), x)
    torch.testing.assert_close(affine.whiten(affine.unwhiten(x)), x)
    torch.testing.assert_close(affine.unwhiten(x)[0], affine.m + affine.L @ x[0])


def test_whitened_score_is_the_gradient_in_u(affine):
    def log_prob(x):
        return -(x**4).sum(-1) - x.prod(-1)

    u = normal(6, 3, seed=2).requires_grad_()
    x = affine.unwhiten(u)
    (s_u,) = torch.autograd.grad(log_prob(x).sum(), u, retain_graph=True)
    (s_x,) = torch.autograd.grad(log_prob(x).sum(), x)
    torch.testing.assert_close(affine.whiten_score(s_x), s_u)


def test_identity_changes_nothing():
    x = normal(4, 3)
    identity = Identity()
    for f in (identity.whiten, identity.unwhiten, identity.whiten_score, identity.pull_back):
        assert f(x) is x


def test_the_whitened_score_and_its_product_are_those_of_the_composition(affine):
    p = Normal(3, 4, 10, seed=0)
    score_fn = probe(p.score_fn, 3, dtype=torch.float64, device=torch.device("cpu"))
    u = normal(5, 3).requires_grad_()
    composed = affine.whiten_score(p.score_fn(affine.unwhiten(u)))
    s, pull = affine.pull_back(score_fn).with_pullback(u.detach())
    v = normal(5, 3, seed=9)
    torch.testing.assert_close(s, composed.detach())
    torch.testing.assert_close(pull(v), torch.autograd.grad(composed, u, v)[0])


def test_laplace_whitening_is_the_saddle_free_newton_map():
    p = Normal(3, 4, 10, seed=0)
    expected = saddle_free_newton(p.score_fn, origin(3))
    for a, b in zip(find_whitening("laplace", in_double(p.score_fn, 3)), expected, strict=True):
        assert torch.equal(a, b)


def test_a_score_in_single_precision_is_whitened_in_double():
    scale = torch.tensor([[2.0, 0.0], [0.0, 5.0]])
    m, L = find_whitening("laplace", in_double(lambda x: -(x - 1) @ scale, 2))
    assert m.dtype == L.dtype == torch.float64
    torch.testing.assert_close(m, torch.ones(2).double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(L, torch.diag(torch.tensor([2.0, 5.0]).double().rsqrt()), rtol=0, atol=1e-5)


def test_none_and_many_features_give_the_identity(monkeypatch):
    score_fn = in_double(lambda x: 3 * (1 - x), 2)
    assert find_whitening(None, score_fn) == Identity()
    monkeypatch.setattr(_whitening, "MAX_FEATURES", 1)
    assert find_whitening("laplace", score_fn) == Identity()


def test_a_mode_without_curvature_leaves_the_scale():
    m, L = find_whitening("laplace", in_double(lambda x: -x.pow(3), 2))
    assert torch.equal(m, origin(2))
    assert torch.equal(L, torch.eye(2).double())


def test_a_given_pair_is_used_as_it_is():
    m, L = find_whitening(([1, 2], [[1.0, 0.0], [0.5, 2.0]]), in_double(lambda x: -x, 2))
    assert m.tolist() == [1, 2]
    assert L.tolist() == [[1, 0], [0.5, 2]]


@pytest.mark.parametrize(
    "whiten",
    [
        ([0.0], [[1.0]]),
        ([0.0, 0.0], [1.0, 1.0]),
        ([0.0, 0.0], [[1.0, 0.0], [0.0, 0.0]]),
        ([0.0, 0.0], [[-1.0, 0.0], [0.0, 1.0]]),
        ([0.0, 0.0], [[1.0, 0.0], [float("nan"), 1.0]]),
        ([0.0, float("nan")], [[1.0, 0.0], [0.0, 1.0]]),
        ([0.0, 0.0], [[1.0, 0.5], [0.5, 1.0]]),
    ],
    ids=str,
)
def test_a_pair_that_is_no_affine_map_is_named(whiten):
    with pytest.raises(ValueError, match="`whiten` must be"):
        find_whitening(whiten, in_double(lambda x: -x, 2))


def test_a_score_that_is_not_finite_at_the_origin_is_named():
    with pytest.raises(ValueError, match="not finite at the origin"):
        find_whitening("laplace", in_double(lambda x: 1 / x, 2))
