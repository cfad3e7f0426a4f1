"""What is returned of a training: the better of two fits, where it ends, and what is said of it."""

import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from members import every
from plain_targets import as_score

from skksivi import KSIVIApproximator
from skksivi.coordinates._affine import Identity
from skksivi.estimators._judge import better, remedy_of
from skksivi.estimators._trained import WhenGood, recentred, remark_of
from skksivi.judge import Errors, Grade, Verdict
from skksivi.training._guard import Departure, Watch, Worsening
from skksivi.training._run import Fit

D = 3
SCORE = as_score(lambda x: -x, d=D)


def layer(shift=0.0, d=D):
    """Return the sampler of N(shift, I)."""
    given = {"whiten": (np.full(d, shift), np.eye(d)), "method": "start", "random_state": 0, "dtype": "float64"}
    with pytest.warns(UserWarning, match="method"):
        q = KSIVIApproximator(gradient_estimator="u-statistic", **given).fit(lambda x: shift - x, n_features=d)
    return q.sampler_


LAYER = layer()


def verdict(grade, error=0.0, se=0.01):
    zero = np.zeros(D)
    errors = Errors(zero + error, zero + se, zero, zero + se, np.zeros((2, D)), np.full((2, D), se))
    return Verdict(grade, f"the mean is {error} sd off", errors=errors)


def fit_of(sampler=LAYER, found=None, best_iter=5, n_iter=5, **report):
    kept = {"weighted_draws_": None, "certificate_": None, "verdict_": found, "fitted_by_": "", "score_checksum_": ""}
    return Fit(sampler, kept | {"best_iter_": best_iter, "n_iter_": n_iter} | report)


# The better of two


GOOD, WRONG, ROUGH = Grade.GOOD, Grade.WRONG, Grade.ROUGH


@every(
    "old, new, kept",
    [
        (verdict(GOOD), verdict(GOOD, 0.08), True),
        (verdict(GOOD), verdict(WRONG, 0.3), False),
        (verdict(GOOD), Verdict(ROUGH), False),
        (verdict(WRONG, 0.5), verdict(WRONG, 0.3), True),
        (verdict(WRONG, 0.3), verdict(WRONG, 0.5), False),
        (verdict(ROUGH, 0.3), verdict(WRONG, 0.2), True),
        (Verdict(ROUGH), Verdict(ROUGH), True),
        (None, verdict(WRONG, 0.5), True),
    ],
)
def test_the_start_is_returned_with_a_word_if_the_training_is_worse(old, new, kept):
    before, trained = fit_of(found=old, best_iter=0), fit_of(found=new)
    found = better(trained, before)
    assert (found is trained) == kept
    if not kept:
        assert found.report["best_iter_"] == 0
        assert found.report["verdict_"] is old
        assert "did not improve on its start, which is returned" in found.remark


class Shifted:
    def __init__(self, family, shift):
        self.family, self.shift, self.n_features = family, shift, family.n_features

    def __getattr__(self, name):
        return getattr(self.family, name)

    def draw(self, n, generator):
        return SimpleNamespace(x=self.family.draw(n, generator).x + self.shift)


# When a training ends


def progress_of(family):
    return SimpleNamespace(iterate=SimpleNamespace(averaged=nullcontext), module=family)


def test_a_training_ends_when_the_judge_finds_no_error():
    hook = WhenGood(lambda family: replace(LAYER, family=family), SCORE, 0)
    assert not hook.at_end
    assert hook(progress_of(LAYER.family))
    for other in (layer(1.0), SimpleNamespace()):
        assert not WhenGood(lambda _, other=other: other, SCORE, 0)(progress_of(LAYER.family))
    v, wide = torch.full((10, 1), 10**-0.5).double(), layer(d=10)  # 88% as wide along v, 99% in a coordinate
    narrow = as_score(lambda x: -x - 0.3 * x @ v.to(x) @ v.to(x).mT, d=10)
    assert not WhenGood(lambda _: wide, narrow, 0)(progress_of(wide.family))


# Its mean


def test_a_mean_that_is_visibly_off_is_corrected():
    off = fit_of(layer(0.3))
    found = recentred(off, SCORE, 0)
    torch.testing.assert_close(found.sampler.whitening.map.m, torch.zeros(D).double(), atol=0.06, rtol=0)
    assert found.report["score_checksum_"]
    identity = replace(LAYER.whitening, map=Identity(torch.zeros(D).double()))
    unmoved = fit_of(replace(LAYER, whitening=identity, family=Shifted(LAYER.family, 0.3)))
    for kept in (fit_of(), fit_of(layer(0.3), best_iter=0), unmoved):
        assert recentred(kept, SCORE, 0) is kept
    assert recentred(off, as_score(lambda x: x * torch.nan, d=D), 0) is off


# What is said


def test_units_are_named_where_points_and_scores_differ_by_many_orders():
    sd = np.array([1e-9, 1.0, 1e5])
    sampler = replace(LAYER, whitening=replace(LAYER.whitening, sd=sd))
    words = remedy_of(sampler, as_score(lambda x: -x / torch.as_tensor(sd).to(x) ** 2, d=D))
    message = r"the units of the target may differ too much, as scores .* in `x\[0\]` and .* in `x\[2\]` do"
    assert re.match(message, words)
    assert "units" not in remedy_of(sampler, as_score(lambda x: -x.sign(), d=D))  # its points have collapsed


def watch(last, *values, keeps_best=True):
    found = Watch(lambda _: (0.0, last), None, keeps_best=keeps_best)
    found.last, found.values = last, list(enumerate(values))
    return found


def test_what_is_said_of_a_training_that_did_not_help():
    worse, fine = Worsening(2.0, 0.1), Worsening(0.1, 0.1)
    departed = Departure(torch.tensor([1.0, 0.5]), torch.tensor([0.0, 0.2]))
    for last, values, best, words in (
        (worse, (1.0, 2.0), (0, 0), "did not improve on its start, which is returned: by Stein"),
        (worse, (1.0, 2.0), (7, 0), "state of iteration 7, which is kept"),
        (fine, (1.0, 3.0, 2.0), (4, 4), "`ksd_curve_` is 1 there and at least 2 after it"),
        (departed, (1.0, 2.0), (3, 0), "coordinate 1 of the whitened draws at 0.50 times its standard deviation"),
    ):
        assert words in remark_of(watch(last, *values), *best)
    plain = watch(worse, 1.0, 2.0, keeps_best=False)
    for silent, best in ((watch(fine, 1.0, 2.0), 7), (watch(fine, 1.0), 0), (plain, 0)):
        assert remark_of(silent, best, 0) is None
