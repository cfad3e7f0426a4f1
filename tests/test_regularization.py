"""Heavy tails and regularised discrepancies: the entropic term, and tails that tempering breaks."""

import math

import numpy as np
import pytest
import torch
from members import every
from sklearn.base import clone

from skksivi import KSIVIApproximator
from skksivi.parameters import Adam
from skksivi.score._domain import tail_exponent
from skksivi.targets import StudentT
from skksivi.terms import Entropic

pytestmark = pytest.mark.usefixtures("uncertified")


QUICK = KSIVIApproximator(max_iter=30, batch_size=16, hidden_layer_sizes=(8,), whiten="laplace", random_state=0)


@pytest.mark.filterwarnings("ignore:The draws are too:sklearn.exceptions.ConvergenceWarning")
def test_the_entropic_term_moves_draws_up_and_is_scheduled():
    settings = {"whiten": None, "max_iter": 100, "learning_rate": 1e-2, "initial_scale": 0.9, "optimizer": Adam()}
    settings["gradient_estimator"] = "u-statistic"
    plain, pulled, late = (
        clone(QUICK).set_params(**settings, terms=[Entropic(w)]).fit(lambda x: 5 - x, n_features=2)
        for w in (0.0, 10.0, lambda progress: 10.0 * (progress > 2))
    )
    assert pulled.sample(500).mean() > plain.sample(500).mean() + 0.2
    np.testing.assert_array_equal(late.loss_curve_, plain.loss_curve_)


@every("name", ["annealing", "weight of Entropic"])
@every("wrong", [-1, math.inf, math.nan])
def test_a_schedule_that_goes_wrong_is_named_and_no_other(name, wrong):
    schedule = lambda progress: 1.0 if progress < 0.5 else wrong  # noqa: E731
    scheduled = {"annealing": {"annealing": schedule}, "weight of Entropic": {"terms": [Entropic(schedule)]}}
    q = clone(QUICK).set_params(max_iter=10, whiten=None, **scheduled[name])
    with pytest.raises(ValueError, match=f"^`{name}` returned {wrong} at progress 0.5, expected a (positive )?num"):
        q.fit(torch.neg, n_features=2)


def cauchy(x):
    return -4 * x / (1 + x.square().sum(1, keepdim=True))


def test_tails_are_told_from_the_score():
    assert tail_exponent(StudentT().score_fn, 2) == pytest.approx(6)  # a product of two: proper for c > 1 / 3
    assert tail_exponent(lambda x: -0.5 * x / x.square().sum(1, keepdim=True), 2) == pytest.approx(0.5)
    assert tail_exponent(lambda x: -x, 2) is None
    assert tail_exponent(lambda x: -x / (1 + x.square().sum(1, keepdim=True)).sqrt(), 2) is None
    assert tail_exponent(cauchy, 3) == pytest.approx(4)


@every("share, found", [(0.01, True), (0.03, False)])
def test_an_exponent_is_that_of_the_farthest_points_if_nearer_ones_agree_to_two_percent(share, found):
    def score_fn(x):
        r2 = x.square().sum(1, keepdim=True)
        return -4 * torch.where(r2 > 25e10, 1.0, 1 + share) * x / r2

    assert tail_exponent(score_fn, 2) == (pytest.approx(4) if found else None)


def test_tempering_that_breaks_a_heavy_tailed_target_is_warned_of():
    tempered = clone(QUICK).set_params(annealing="linear", whiten=None)
    with pytest.warns(UserWarning, match=r"infinite mass below 0\.75"):
        tempered.fit(cauchy, n_features=3)
    for never_low in (lambda progress: 0.8 + 0.2 * progress, lambda progress: 1.0 if progress <= 1 else 0.1):
        tempered.set_params(annealing=never_low).fit(cauchy, n_features=3)
    tempered.set_params(annealing="linear").fit(lambda x: -x, n_features=3)
