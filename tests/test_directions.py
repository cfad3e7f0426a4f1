"""Gibbs steps along directions: they leave draws of the target as they are and show what others lack."""

import math
import re

import numpy as np
import pytest
import torch
from members import every
from plain_targets import normal, resolved, words_of
from scipy import stats

from skksivi import KSIVIApproximator, diagnose
from skksivi.baselines import Laplace
from skksivi.stein._discrepancy import first_difference, gibbs_step
from skksivi.targets import Banana, Multimodal, StudentT, XShaped, from_score_fn

#: Scores of one variable, what they are the scores of, and its mean and standard deviation.
KINDS = {
    "t3": (lambda z: -4 * z / (3 + z**2), stats.t(3)),
    "double exponential": (lambda z: -math.sqrt(2) * (20 * z).tanh(), stats.laplace(scale=0.5**0.5)),
    "Gumbel": (lambda z: (-z).exp() - 1, stats.gumbel_r()),
}


def rotated(d, seed):
    return np.linalg.qr(np.random.RandomState(seed).normal(size=(d, d)))[0]


def independent(kind, k, Q):
    """A target of k variables of a kind along the first columns of Q, normal along the others."""
    score, Q = KINDS[kind][0], torch.as_tensor(Q)

    def score_fn(x):
        z = x @ Q.to(x)
        return torch.cat([score(z[:, :k]), -z[:, k:]], 1) @ Q.mT.to(x)

    return from_score_fn(score_fn, n_features=len(Q))


def draws(kind, k, Q, n, seed):
    """Exact draws (n, d), standardised along each column of Q, and their map."""
    rng, d = np.random.RandomState(seed), len(Q)
    z = rng.normal(size=(n, d))
    z[:, :k] = KINDS[kind][1].rvs((n, k), random_state=rng)
    return torch.as_tensor(z @ Q.T)


@every("d", [2, 20])
@every("kind", list(KINDS))
def test_exact_draws_are_not_accused(kind, d):
    Q = rotated(d, 0)
    score = resolved(independent(kind, 1, Q))
    for seed in range(3):
        u = draws(kind, 1, Q, 20_000, seed)
        assert first_difference(score, u[:200], lambda u=u: (u, u)) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("d", "k"), [(5, 1), (20, 1), pytest.param(20, 3, marks=pytest.mark.slow)])
def test_a_fit_that_lacks_a_tail_is_told_with_its_direction(kind, d, k):
    """The Gaussian of the right moments: 99.8% of a t3 are twice as wide, those of the others a third or a fifth."""
    Q, variable = rotated(d, 1), KINDS[kind][1]
    mean, sd = np.zeros(d), np.ones(d)
    mean[:k], sd[:k] = variable.mean() / 2, variable.std() / 2
    start = Q @ mean, np.linalg.cholesky(Q * sd**2 @ Q.T)
    target = independent(kind, k, Q)
    q = KSIVIApproximator(whiten=start, method="start", random_state=0)
    assert len(words_of(lambda: q.fit(target))) == 1
    found = first_difference(*in_whitened(q, target))
    assert np.abs(found.correlations.numpy() @ Q).argmax() < k
    assert found.step.scale > 1.2
    assert diagnose(q, target, random_state=0)["shape"].verdict in ("warn", "look")


def test_a_principal_axis_is_named_by_its_loadings():
    """The three largest, up to the sign of the axis, of the direction that has the tail."""
    Q = rotated(20, 1)
    target = independent("t3", 1, Q)
    check = diagnose(Laplace().fit(target), target, random_state=0)["tails"]
    assert check.verdict == "warn"
    named = re.search(r"principal axis \d+ \((.*)\), p = ", check.text)[1]
    loadings = {int(j): float(a) for a, j in re.findall(r"([+-]0\.\d\d) `x\[(\d+)\]`", named)}
    assert set(loadings) == set(np.abs(Q[:, 0]).argsort()[-3:])
    found, expected = np.array([*loadings.values()]), Q[[*loadings], 0]
    np.testing.assert_allclose(found * np.sign(found @ expected), expected, atol=0.1)


def in_whitened(q, target, n=20_000):
    u = q.sampler_.sample_in_u(n, torch.Generator().manual_seed(0))
    return q.whitening_.pull_back(resolved(target).double), u[:200], lambda: (u, q.whitening_.push_forward(u))


@pytest.mark.filterwarnings("error")
@every("target", [XShaped(), Multimodal(), StudentT(), Banana()])
def test_default_fits_are_not_accused(target):
    KSIVIApproximator(random_state=1).fit(target)


@every("shift, scale", [(0.0, 1.0), (1.0, 1.0), (0.0, 0.5)])
def test_directions_that_are_right_do_not_hide_one_that_is_wrong(shift, scale):
    """Two have two humps, of the target and of the draws; along a third the draws are off, or not."""
    rng, Q = np.random.RandomState(0), torch.as_tensor(rotated(6, 3))

    def score_fn(x):
        z = x @ Q.to(x)
        humps = -(z[:, :2] - 0.9 * (0.9 * z[:, :2] / 0.19).tanh()) / 0.19  # modes at -.9 and .9, variance one
        return torch.cat([humps, -z[:, 2:]], 1) @ Q.mT.to(x)

    z = rng.normal(size=(20_000, 6))
    z[:, :2] = 0.9 * rng.choice([-1, 1], (20_000, 2)) + 0.19**0.5 * z[:, :2]
    z[:, 2] = shift + scale * z[:, 2]
    u = torch.as_tensor(z) @ Q.mT
    found = first_difference(resolved(from_score_fn(score_fn, 6)), u[:200], lambda: (u, u))
    assert (found is None) == ((shift, scale) == (0.0, 1.0))
    assert found is None or np.abs(found.correlations.numpy() @ Q.numpy()).argmax() == 2


@every("shift, scale", [(0.0, 0.5), (0.0, 1.0), (0.0, 2.0), (0.5, 1.0)])
def test_an_error_that_a_few_scores_of_many_features_do_not_show_is_told(shift, scale):
    Q = torch.as_tensor(rotated(100, 4))
    u = normal(20_000, 100)
    u[:, 0] = shift + scale * u[:, 0]
    u = u @ Q.mT
    found = first_difference(resolved(from_score_fn(torch.neg, 100)), u[:200], lambda: (u, u))
    assert (found is None) == ((shift, scale) == (0.0, 1.0))
    assert found is None or np.abs(found.correlations.numpy() @ Q.numpy()).argmax() == 0
    assert found is None or found.step.scale == pytest.approx(1 / scale, rel=0.1)
    assert found is None or found.step.shift == pytest.approx(-shift, abs=0.05)


def test_a_score_that_ends_is_left_alone():
    u, v = normal(1000, 2), torch.tensor([1.0, 0.0]).double()
    assert gibbs_step(lambda x: -x.where(x.abs() < 5, torch.nan), u, v, 16, 33) is None


def test_draws_that_are_far_too_wide_are_told():
    """All lines have their mass at one place."""
    u = 1e6 * normal(1000, 2)
    found = first_difference(resolved(from_score_fn(lambda x: -x * 1e12, 2)), u[:200] / 1e6, lambda: (u / 1e6, u))
    assert found.step.scale < 0.1
