"""Fits that take at most 1,000 calls, by a Gaussian process that is given scores at few points."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plain_targets import normal

from skksivi import KSIVIApproximator
from skksivi.coordinates._affine import Affine
from skksivi.parameters import Pilot
from skksivi.pilot._surrogate import Seen, gradient_covariance
from skksivi.score import Tally
from skksivi.targets import BayesianLogisticRegression, Target, from_log_prob


def cubic(u):
    a, b = u.T
    return -u.square().sum(1) / 2 + 0.1 * a**3 - 0.2 * a * b**2


def gradient_of(log_p, u):
    u = u.clone().requires_grad_()
    return torch.autograd.grad(log_p(u).sum(), u)[0]


@pytest.fixture
def seen():
    u = 1.5 * normal(60, 2)
    found = Seen(Affine.shift(torch.zeros(2).double()))
    found.add(u, gradient_of(cubic, u))
    found.refit()
    return found


def test_a_surrogate_by_gradients_reproduces_a_cubic(seen):
    u = seen.x / 2
    gaps = seen.model.log_prob(u) - cubic(u)
    assert (gaps - gaps.median()).abs().max() < 1e-3
    assert seen.error(u, gradient_of(cubic, u)) < 1e-6


def test_the_score_of_a_surrogate_is_its_gradient_also_beyond_its_reach(seen):
    u = torch.cat([normal(20, 2, seed=1), 20 * normal(20, 2, seed=2)])
    torch.testing.assert_close(seen.model.score(u), gradient_of(seen.model.log_prob, u))


def test_the_covariance_of_gradients_is_the_derivative_of_the_kernel():
    u, width = normal(3, 2), 1.3
    K = gradient_covariance(u, width).view(3, 2, 3, 2)
    for i, j in itertools.product(range(3), repeat=2):
        H = torch.autograd.functional.hessian(
            lambda w: (-(w[:2] - w[2:]).square().sum() / 2 / width**2).exp(), torch.cat([u[i], u[j]])
        )
        torch.testing.assert_close(K[i, :, j], H[:2, 2:])


def regression(d=6):
    rng = np.random.RandomState(0)
    X = rng.standard_normal((300, d))
    return BayesianLogisticRegression(X, rng.uniform(size=300) < 1 / (1 + np.exp(-X[:, 0])), prior_precision=0.1)


def frugal(target, **settings):
    q = KSIVIApproximator(whiten=Pilot(effort="frugal", **settings), random_state=0, verbose=-1)
    return q.fit(target)


def test_a_regression_is_good_by_a_thousand_calls():
    target = regression()
    q = frugal(target)
    assert q.verdict_.good
    assert q.n_score_calls_ + q.n_products_ <= 1000
    assert q.fitted_by_ == "surrogate"
    assert {"search for modes", "surrogate", "certificate"} < {stage.name for stage in q.stages_}
    exact = KSIVIApproximator(random_state=0, verbose=-1).fit(target)
    X, R = q.sample(20_000), exact.sample(20_000)
    assert (np.abs(X.mean(0) - R.mean(0)) < 0.1 * R.std(0)).all()


class Gaussian(Target):
    n_features = 2

    def log_prob(self, x):
        return -(x - 1).square().sum(1) / 2


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_where_narrow_modes_are_not_looked_for_a_verdict_is_good_only_if_one_mode_is_known():
    q = frugal(Gaussian())
    assert not q.verdict_.good
    assert "skip=['other modes']" in q.verdict_.reason
    assert frugal(Gaussian(), skip=["other modes"]).verdict_.good


def blobs(x):
    """N(-m, I) and N(m, .3^2 I), equal in mass."""
    m = x.new_tensor([3.0, 2.0])
    parts = (-(x + m).square().sum(1) / 2, -(x - m).square().sum(1) / 0.18 - 2 * np.log(0.3))
    return torch.stack(parts).logsumexp(0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_two_blobs_are_not_good():
    assert not frugal(from_log_prob(blobs, 2)).verdict_.good


class Partial(Target):
    """A regression in single precision whose score is NaN in a corner."""

    n_features = 2

    def log_prob(self, x):
        value = -(x.float() - 0.5).square().sum(1) / 2 - 0.1 * x.float()[:, 0] ** 4
        return value.where((x > 1.5).sum(1) < 2, torch.nan).to(x.dtype)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("target", "most"),
    [(Gaussian(), 300), (regression(4), 300), pytest.param(Partial(), 1000, marks=pytest.mark.slow)],
)
def test_a_small_budget_or_a_score_that_fails_gives_a_fit_that_says_what_is_missing(target, most):
    q = frugal(target, max_score_calls=most)
    assert q.n_score_calls_ + q.n_products_ <= most
    assert not q.verdict_.good
    assert q.verdict_.reason
    assert np.isfinite(q.sample(100)).all()


@pytest.mark.parametrize(("effort", "name"), [("auto", "surrogate"), ("low", "matched Gaussian")])
def test_an_effort_that_is_left_open_is_frugal_where_a_call_is_slow(monkeypatch, effort, name):
    monkeypatch.setattr(Tally, "seconds_per_call", 1.0)
    clock = SimpleNamespace(monotonic=itertools.count().__next__)
    monkeypatch.setattr("skksivi.estimators._start.time", clock)
    q = KSIVIApproximator(whiten=Pilot(effort=effort, skip=["other modes"]), random_state=0, verbose=-1)
    assert name in q.fit(Gaussian()).whitening_.report()
