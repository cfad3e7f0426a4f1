"""Affine maps: inverse to themselves, and scores that are gradients in the new coordinates."""

import numpy as np
import pytest
import torch
from plain_targets import GaussianScore, normal

from skksivi.coordinates._affine import Affine, Identity, LowRank
from skksivi.coordinates._whitening import Whitening
from skksivi.score._probe import probe

AFFINE = Affine(normal(3), normal(3, 3, seed=1).tril(-1) + torch.diag(torch.tensor([0.1, 1.0, 20.0]).double()))
LOW_RANK = LowRank(
    normal(3), normal(3, seed=1).exp(), torch.linalg.qr(normal(3, 2, seed=2)).Q, torch.tensor([0.1, 9.0]).double()
)
NO_RANK = LowRank(normal(3), normal(3, seed=1).exp(), torch.empty(3, 0).double(), torch.empty(0).double())
every_map = pytest.mark.parametrize(
    "map_", [AFFINE, LOW_RANK, NO_RANK, Identity(torch.zeros(1))], ids=["affine", "low rank", "diagonal", "identity"]
)


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


def test_the_factor_of_an_affine_map_is_its_l():
    torch.testing.assert_close(factor(AFFINE), AFFINE.L)
    assert Whitening(AFFINE, modes=np.empty((0, 3)), weights=np.empty(0)).condition == pytest.approx(
        torch.linalg.cond(AFFINE.L @ AFFINE.L.mT).item(), rel=1e-6
    )


@every_map
def test_whitened_score_is_the_gradient_in_u(map_):
    def log_prob(x):
        return -(x**4).sum(-1) - x.prod(-1)

    u = normal(6, 3, seed=2).requires_grad_()
    x = map_.unwhiten(u)
    (s_u,) = torch.autograd.grad(log_prob(x).sum(), u, retain_graph=True)
    (s_x,) = torch.autograd.grad(log_prob(x).sum(), x)
    torch.testing.assert_close(map_.whiten_score(s_x), s_u)


def test_identity_changes_nothing():
    x = normal(4, 3)
    identity = Identity(torch.zeros(1))
    for f in (identity.whiten, identity.unwhiten, identity.whiten_score, identity.pull_back):
        assert f(x) is x


@every_map
def test_the_whitened_score_and_its_product_are_those_of_the_composition(map_):
    p = GaussianScore(3, 4, 10, seed=0)
    score_fn = probe(p.score_fn, 3, dtype=torch.float64, device=torch.device("cpu"))
    u = normal(5, 3).requires_grad_()
    composed = map_.whiten_score(p.score_fn(map_.unwhiten(u)))
    s, pull = map_.pull_back(score_fn).with_pullback(u.detach())
    v = normal(5, 3, seed=9)
    torch.testing.assert_close(s, composed.detach())
    torch.testing.assert_close(pull(v), torch.autograd.grad(composed, u, v)[0])


@every_map
def test_the_whitened_score_answers_in_the_type_of_its_input(map_):
    score_fn = probe(GaussianScore(3, 4, 10, seed=0).score_fn, 3, dtype=torch.float64, device=torch.device("cpu"))
    u = normal(5, 3)
    v = normal(5, 3, seed=1)
    (exact, pull_exact), (s, pull) = (map_.pull_back(score_fn).with_pullback(a) for a in (u, u.float()))
    product = pull(v.float())
    assert s.dtype == product.dtype == torch.float32
    torch.testing.assert_close(s.double(), exact, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(product.double(), pull_exact(v), rtol=1e-4, atol=1e-2)
