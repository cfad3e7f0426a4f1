"""The most that a fit may ask of the score, and fits that take at most 1,000 calls by a Gaussian process."""

import itertools
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from approximators import APPROXIMATORS, has_density, short
from members import every
from plain_targets import Mixture, gumbel_log_prob, gumbel_score, normal
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning

from skksivi import HKSIVIApproximator, KSIVIApproximator
from skksivi.coordinates._affine import Affine
from skksivi.parameters import Pilot
from skksivi.pilot._log_density import Seen, gradient_covariance
from skksivi.score import Tally
from skksivi.targets import BayesianLogisticRegression, EightGaussians, Target, from_log_prob

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
#: Each of two layers asks for the score at the draws by which the type of their numbers is found.
N_AFTER = 400


class Counted(Target):
    """Independent Gumbel features, and the points at which they were asked for."""

    def __init__(self, d):
        self.n_features, self.sizes = d, []
        self.note = self.sizes.append  # which a copy shares

    def score_fn(self, x):
        self.note(len(x))
        return gumbel_score(x)

    def log_prob(self, x):
        self.note(len(x))
        return gumbel_log_prob(x)


@every("n, bare", [(1200, False), (2500, True)])
def test_a_budget_is_kept(n, bare):
    target = Counted(3)
    q = KSIVIApproximator(whiten=Pilot(max_score_calls=n), max_iter=30, random_state=0)
    q = q.fit(target.score_fn, n_features=3) if bare else q.fit(target)
    assert sum(target.sizes) == q.n_score_calls_ + q.n_products_ <= n
    assert np.isfinite(q.sample(100)).all()


#: Points and chains are lost where a budget ends.
SHORT = [short(q) for q in APPROXIMATORS if "whiten" in q.get_params() and has_density(q)]
#: What makes steps of a training wide and many.
WIDE = {"batch_size": 500, "n_particles": 200, "max_iter": 10**5}


@pytest.mark.parametrize("q", SHORT, ids=lambda q: type(q).__name__)
def test_a_budget_ends_any_fit_and_leaves_what_was_found(q, uncertified):
    target, own = Counted(2), {name: WIDE[name] for name in WIDE.keys() & q.get_params().keys()}
    q = clone(q).set_params(whiten=Pilot(max_score_calls=8000), **own)
    with pytest.warns(ConvergenceWarning, match=r"8,000 evaluations of `max_score_calls` were spent"):
        q.fit(target)
    assert sum(target.sizes) <= 8000 + N_AFTER
    assert q.n_iter_ < 10**5
    assert len(getattr(q, "loss_curve_", range(q.n_iter_))) == q.n_iter_
    assert np.isfinite(q.sample(50)).all()


def test_without_enough_for_a_step_of_the_training_the_start_is_returned():
    with pytest.warns(ConvergenceWarning, match="spent before the training began"):
        q = KSIVIApproximator(whiten=Pilot(max_score_calls=1500), random_state=0).fit(Counted(2))
    assert q.n_iter_ == 0
    assert np.isfinite(q.sample(100)).all()


@every("n", [1, 300])
def test_too_little_for_any_answer_says_what_is_needed(n):
    with pytest.raises(ValueError, match=f"The {n} evaluations of `max_score_calls` .* take some 500 to 3,000"):
        KSIVIApproximator(whiten=Pilot(max_score_calls=n), random_state=0).fit(Counted(3))


def test_too_little_for_several_modes_is_told():
    """Those that were found are kept."""
    with pytest.warns(ConvergenceWarning, match="max_score_calls"):
        q = KSIVIApproximator(whiten=Pilot(max_score_calls=6500), random_state=0).fit(EightGaussians(shift=5.0))
    assert len(q.whitening_.modes) == 8
    X = torch.as_tensor(q.sample(800)).double()
    assert (torch.cdist(X, EightGaussians(shift=5.0).means.double()).argmin(1).bincount(minlength=8) > 50).all()


def test_a_large_budget_changes_nothing():
    fits = (KSIVIApproximator(whiten=whiten, random_state=0) for whiten in ("auto", Pilot(max_score_calls=10**9)))
    np.testing.assert_array_equal(*(q.fit(torch.neg, n_features=2).sample(5, random_state=0) for q in fits))


def test_a_budget_belongs_to_one_fit():
    q = HKSIVIApproximator(whiten=Pilot(max_score_calls=20_000), max_iter=2, random_state=0).fit(Counted(2))
    assert len(pickle.loads(pickle.dumps(q)).sample(50_000)) == 50_000  # noqa: S301


def cubic(u):
    a, b = u.T
    return -u.square().sum(1) / 2 + 0.1 * a**3 - 0.2 * a * b**2


def gradient_of(log_p, u):
    u = u.clone().requires_grad_()
    return torch.autograd.grad(log_p(u).sum(), u)[0]


def test_a_surrogate_reproduces_a_cubic_by_gradients_and_its_score_is_its_gradient_also_beyond_its_reach():
    u, seen = 1.5 * normal(60, 2), Seen(Affine.shift(torch.zeros(2).double()))
    seen.add(u, gradient_of(cubic, u))
    seen.refit()
    u = u / 2
    gaps = seen.model.log_prob(u) - cubic(u)
    assert (gaps - gaps.median()).abs().max() < 1e-3
    assert seen.error(u, gradient_of(cubic, u)) < 1e-6
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
    return KSIVIApproximator(whiten=Pilot(effort="frugal", **settings), random_state=0, verbose=-1).fit(target)


def test_a_regression_is_good_by_a_thousand_calls():
    target = regression()
    q = frugal(target)
    assert q.verdict_.good
    assert q.n_score_calls_ + q.n_products_ <= 1000
    assert q.fitted_by_ == "surrogate"
    assert {"search for modes", "surrogate", "certificate"} < {stage.name for stage in q.stages_}
    X, R = (est.sample(20_000) for est in (q, KSIVIApproximator(random_state=0, verbose=-1).fit(target)))
    assert (np.abs(X.mean(0) - R.mean(0)) < 0.1 * R.std(0)).all()


GAUSSIAN = from_log_prob(lambda x: -(x - 1).square().sum(1) / 2, 2)


def test_where_narrow_modes_are_not_looked_for_a_verdict_is_good_only_if_one_mode_is_known():
    q = frugal(GAUSSIAN)
    assert not q.verdict_.good
    assert "skip=['other modes']" in q.verdict_.reason
    assert frugal(GAUSSIAN, skip=["other modes"]).verdict_.good


@pytest.mark.slow
def test_two_blobs_are_not_good():
    """N(-m, I) and N(m, .3^2 I), equal in mass."""
    blobs = Mixture([0.5, 0.5], [[-3.0, -2.0], [3.0, 2.0]], [1.0, 0.3])
    assert not frugal(from_log_prob(blobs.log_prob, 2)).verdict_.good


def partial(x):
    """A regression in single precision whose score is NaN in a corner."""
    value = -(x.float() - 0.5).square().sum(1) / 2 - 0.1 * x.float()[:, 0] ** 4
    return value.where((x > 1.5).sum(1) < 2, torch.nan).to(x.dtype)


@pytest.mark.filterwarnings("ignore::UserWarning")
@every("target, most", [(GAUSSIAN, 300), (regression(4), 300), (from_log_prob(partial, 2), 400)])
def test_a_small_budget_or_a_score_that_fails_gives_a_fit_that_says_what_is_missing(target, most):
    q = frugal(target, max_score_calls=most)
    assert q.n_score_calls_ + q.n_products_ <= most
    assert not q.verdict_.good
    assert q.verdict_.reason
    assert np.isfinite(q.sample(100)).all()


@pytest.mark.parametrize(("effort", "name"), [("auto", "surrogate"), ("low", "importance sampling")])
def test_an_effort_that_is_left_open_is_frugal_where_a_call_is_slow(monkeypatch, effort, name):
    monkeypatch.setattr(Tally, "seconds_per_call", 1.0)
    monkeypatch.setattr("skksivi.estimators._start.time", SimpleNamespace(monotonic=itertools.count().__next__))
    q = KSIVIApproximator(whiten=Pilot(effort=effort, skip=["other modes"]), random_state=0, verbose=-1)
    assert name in q.fit(GAUSSIAN).whitening_.report()
