"""Adaptive importance sampling: mixtures that are fitted to weighted draws, their density, and what stays."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from members import every
from plain_targets import UNEQUAL, Bent, as_score, gaussian, generator, gumbel_score, normal, resolved, student_score

from skksivi import KSIVIApproximator
from skksivi.coordinates._affine import Affine
from skksivi.coordinates._marginals import fitted_marginals
from skksivi.coordinates._warp import fitted_warp
from skksivi.coordinates._whitening import Whitening
from skksivi.families._derived import DefensiveMixture, gaussians_of
from skksivi.families._samplers import Gaussians
from skksivi.pilot._mixture import Components
from skksivi.start._adaptive import N_DRAWS, AdaptiveSampler, Weights
from skksivi.targets import from_log_prob, from_score_fn

M, P, SCORE = gaussian(3, 1)
ROOT = torch.linalg.cholesky(torch.linalg.inv(P))
SD = ROOT.norm(dim=1)


def of_one(m, L):
    return Components(m.new_ones(1), m[None], (L @ L.mT)[None])


def sampler(known):
    """One of a correlated normal target, whose density is known up to exp(2), or whose score alone."""
    by_density = from_log_prob(lambda x: 2 - ((x - M) @ P * (x - M)).sum(1) / 2, 3)
    score = resolved(by_density if known else from_score_fn(SCORE, 3))
    modes = Whitening(Affine(M, ROOT), modes=M.numpy()[None], weights=np.ones(1))
    return AdaptiveSampler(score, modes, of_one(M, ROOT), generator(1))


def test_weights_are_tempered_to_the_least_effective_number_alone():
    even, few = np.log(np.random.RandomState(0).uniform(0.5, 1, 400)), 5 * normal(400).numpy()
    found = Weights.of(even, 50)
    assert found.effective == pytest.approx(1 / np.square(found.values).sum())
    np.testing.assert_allclose(found.values, np.exp(even) / np.exp(even).sum(), rtol=0.05)
    found = Weights.of(np.r_[few, -np.inf], 50)
    assert found.effective < 20
    assert 1 / np.square(found.values).sum() == pytest.approx(50, rel=0.01)
    assert (found.values[-1], found.values.sum()) == (0, pytest.approx(1))
    assert np.corrcoef(few, np.log(found.values[:-1]))[0, 1] > 0.95


@every("known", [True, False])
def test_a_shifted_narrow_gaussian_becomes_the_target_and_all_draws_are_kept(known):
    own = sampler(known)
    assert own.improve(of_one(M + 1.5 * SD, 0.4 * ROOT))
    assert own.best.verdict.settled
    m, L = own.best.gaussians.mixture.map()
    np.testing.assert_allclose((m - M) / SD, 0, atol=0.1)
    np.testing.assert_allclose(L.norm(dim=1) / SD, 1, atol=0.1)
    pool, w = own.pool, own.pool.weights()
    x = pool.x
    assert len(pool.sources) > 1
    assert len(x) == len(w.values) == sum(len(source.rows.x) for source in pool.sources)
    np.testing.assert_allclose((torch.as_tensor(w.values) @ x - M) / SD, 0, atol=4 / w.effective**0.5)
    parts = [s.mixture.log_density(x).value + math.log(len(s.rows.x) / len(x)) for s in pool.sources]
    torch.testing.assert_close(torch.stack(parts).logsumexp(0), pool.log_mixture())
    r = (pool.log_p - pool.log_mixture()).exp()  # by the score alone p is one at the mode
    log_z = 1.5 * math.log(2 * math.pi) + ROOT.diagonal().log().sum().item() + 2 * known
    assert abs(r.mean().log() - log_z) < 4 * r.std() / r.mean() / len(r) ** 0.5


def test_a_mixture_that_is_right_stays():
    own, right = sampler(known=True), of_one(M, ROOT)
    assert own.improve(right)
    assert own.best.gaussians.mixture is right
    assert [len(source.rows.x) for source in own.pool.sources] == [N_DRAWS]
    torch.testing.assert_close(own.points().mean(0), M, rtol=0, atol=0.1)


AT_ZERO = Affine(torch.zeros(2).double(), torch.eye(2).double())
RADIUS = fitted_marginals(as_score(student_score, d=2), AT_ZERO, generator())


@every("warp", [None, fitted_warp(Bent().sample(2000)), RADIUS])
def test_densities_of_gaussians_and_of_what_defends_them_are_normalised(warp):
    """Ratios have mean one, within five standard errors, in x as in coordinates y that are warped."""
    m, L = torch.tensor([0.5, -0.3]).double(), torch.tensor([[1.0, 0.0], [0.5, 0.8]]).double()
    q = Gaussians(Components.together([of_one(m, L), of_one(-m, 0.5 * L)], [0.7, 0.3]), warp)
    mixture = DefensiveMixture.of(q, generator())
    narrow = Gaussians(of_one(m, 0.3 * L), warp)  # which neither is bounded by
    for own, other in ((q, mixture), (mixture, replace(mixture, map=Affine(m, 1.3 * L))), (narrow, mixture)):
        x = other.sample(40_000, generator(1))
        r = (own.log_density(x).value - other.log_density(x).value).exp()
        assert abs(r.mean() - 1) < 5 * r.std() / len(r) ** 0.5
        assert r.std() < 10


@every("target, has_warp", [(from_log_prob(UNEQUAL.log_prob, 2), False), (from_score_fn(gumbel_score, 2), True)])
def test_a_layer_of_gaussians_has_their_density(target, has_warp):
    sampler = KSIVIApproximator(random_state=0, method="start").fit(target).sampler_
    found, x = gaussians_of(sampler), sampler.sample(200, generator())
    assert (found.warp is not None) == has_warp
    torch.testing.assert_close(found.log_density(x).value, sampler.log_density(x).value, rtol=1e-4, atol=1e-4)


def test_weights_of_far_gaussians_are_those_of_the_points():
    eye = torch.eye(3).double()
    q = Components.together([of_one(M, eye), of_one(M + 20, eye)], [0.5, 0.5])
    found = q.reweighed(torch.cat([M + normal(300, 3), M + 20 + normal(100, 3)]))
    np.testing.assert_allclose(found.weights, [0.75, 0.25], atol=1e-4)
    assert found.means is q.means
