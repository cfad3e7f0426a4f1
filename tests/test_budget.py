"""The most that a fit may ask of the score."""

import pickle

import numpy as np
import pytest
import torch
from approximators import APPROXIMATORS, has_density, short
from plain_targets import gumbel_log_prob, gumbel_score
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning

from skksivi import HKSIVIApproximator, KSIVIApproximator
from skksivi.baselines import SVGD
from skksivi.parameters import Pilot
from skksivi.targets import EightGaussians, Target

#: Draws of a hierarchy ask for the score, those too by which the type of their numbers is found.
N_AFTER = 200


class Counted(Target):
    """Independent Gumbel features, and the points at which they were asked for."""

    def __init__(self, d):
        self.n_features, self.sizes = d, []
        self.note = self.sizes.append  # which a copy shares

    @property
    def n_asked(self):
        return sum(self.sizes)

    def score_fn(self, x):
        self.note(len(x))
        return gumbel_score(x)

    def log_prob(self, x):
        self.note(len(x))
        return gumbel_log_prob(x)


@pytest.mark.parametrize(("n", "bare"), [(1200, False), (2500, True), (8000, False)])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_budget_is_kept(n, bare):
    target = Counted(3)
    q = KSIVIApproximator(whiten=Pilot(max_score_calls=n), max_iter=30, random_state=0)
    q = q.fit(target.score_fn, n_features=3) if bare else q.fit(target)
    assert target.n_asked == q.n_score_calls_ + q.n_products_ <= n
    assert np.isfinite(q.sample(100)).all()


#: Points and chains are lost where a budget ends.
SHORT = [short(q) for q in APPROXIMATORS if "whiten" in q.get_params() and has_density(q)]
#: What makes steps of a training wide and many.
WIDE = {"batch_size": 500, "n_particles": 200, "max_iter": 10**5}


@pytest.mark.parametrize("q", SHORT, ids=lambda q: type(q).__name__)
def test_a_budget_ends_any_fit_and_leaves_what_was_found(q, uncertified):
    target, own = Counted(2), {name: WIDE[name] for name in WIDE.keys() & q.get_params().keys()}
    q = clone(q).set_params(whiten=Pilot(max_score_calls=20_000), **own)
    with pytest.warns(ConvergenceWarning, match=r"20,000 evaluations of `max_score_calls` were spent"):
        q.fit(target)
    assert target.n_asked <= 20_000 + N_AFTER
    assert q.n_iter_ < 10**5
    assert len(getattr(q, "loss_curve_", range(q.n_iter_))) == q.n_iter_
    assert np.isfinite(q.sample(50)).all()


def test_without_enough_for_a_step_of_the_training_the_start_is_returned():
    with pytest.warns(ConvergenceWarning, match="spent before the training began"):
        q = KSIVIApproximator(whiten=Pilot(max_score_calls=1500), random_state=0).fit(Counted(2))
    assert q.n_iter_ == 0
    assert np.isfinite(q.sample(100)).all()


@pytest.mark.parametrize("n", [1, 300])
def test_too_little_for_any_answer_says_what_is_needed(n):
    with pytest.raises(
        ValueError, match=f"The {n} evaluations of `max_score_calls` .* a mode take some 500 to 3,000"
    ):
        KSIVIApproximator(whiten=Pilot(max_score_calls=n), random_state=0).fit(Counted(3))


def test_too_little_for_several_modes_is_told():
    """Those that were found are kept."""
    with pytest.warns(ConvergenceWarning, match="max_score_calls"):
        q = KSIVIApproximator(whiten=Pilot(max_score_calls=6500), random_state=0).fit(EightGaussians(shift=5.0))
    assert len(q.whitening_.modes) == 8
    X = torch.as_tensor(q.sample(800)).double()
    assert (torch.cdist(X, EightGaussians(shift=5.0).means.double()).argmin(1).bincount(minlength=8) > 50).all()


def test_a_large_budget_changes_nothing():
    limited = KSIVIApproximator(whiten=Pilot(max_score_calls=10**9), random_state=0).fit(torch.neg, n_features=2)
    free = KSIVIApproximator(random_state=0).fit(torch.neg, n_features=2)
    np.testing.assert_array_equal(limited.sample(5, random_state=0), free.sample(5, random_state=0))


def test_methods_of_points_keep_a_budget_too():
    with pytest.raises(ValueError, match="The 700 evaluations of `max_score_calls`"):
        SVGD(whiten=Pilot(max_score_calls=700), random_state=0).fit(lambda x: 1 - x, n_features=2)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_budget_belongs_to_one_fit():
    q = HKSIVIApproximator(whiten=Pilot(max_score_calls=20_000), max_iter=2, random_state=0).fit(Counted(2))
    assert len(pickle.loads(pickle.dumps(q)).sample(50_000)) == 50_000  # noqa: S301
