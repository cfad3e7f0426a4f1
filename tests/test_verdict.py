"""What is returned of a training: the better of two fits, where it ends, and what is said of it."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plain_targets import as_score

from skksivi import KSIVIApproximator
from skksivi.coordinates._affine import Identity
from skksivi.estimators._verdict import (
    MAX_FEATURES,
    Judge,
    WhenGood,
    better,
    is_good,
    not_worse,
    recentred,
    remark_of,
)
from skksivi.families._weights import Certificate
from skksivi.parameters import Pilot
from skksivi.pilot._points import MANY_FEATURES
from skksivi.training._guard import Departure, Watch, Worsening
from skksivi.training._run import Fit

D = 3
SCORE = as_score(lambda x: -x, d=D)


def layer(shift=0.0, d=D):
    """Return the sampler of N(shift, I)."""
    given = np.full(d, shift), np.eye(d)
    q = KSIVIApproximator(
        whiten=given, gradient_estimator="u-statistic", train=False, random_state=0, dtype="float64"
    )
    with pytest.warns(UserWarning, match="train"):
        q.fit(lambda x: shift - x, n_features=d)
    return q.sampler_


LAYER = layer()


def certificate(divergence=0.0, se=0.01, trusted=True):
    return Certificate(divergence, se, se, 0.2, 0.9, trusted)


def fit_of(sampler=LAYER, found=None, best_iter=5, n_iter=5, **report):
    return Fit(
        sampler,
        {"certificate_": found, "best_iter_": best_iter, "n_iter_": n_iter, "fitted_by_": "", "score_checksum_": ""}
        | report,
    )


# The better of two


@pytest.mark.parametrize(
    ("new", "kept"),
    [
        (certificate(0.0), True),
        (certificate(0.105), True),  # within the noise
        (certificate(0.2), False),
        (certificate(0.2, se=0.1), True),
        (None, True),
    ],
)
def test_the_start_is_returned_if_it_is_better_beyond_noise(new, kept):
    before, trained = fit_of(found=certificate(0.1), best_iter=0), fit_of(found=new)
    found = better(trained, before)
    assert (found is trained) == kept
    if not kept:
        assert found.report["best_iter_"] == 0
        assert "is 0.2 nats at its end and was 0.1" in found.remark
    assert better(trained, fit_of()) is trained


def test_small_divergences_make_no_difference():
    trained = fit_of(found=certificate(0.0074, se=0.0))
    assert better(trained, fit_of(found=certificate(0.0, se=0.0))) is trained


@pytest.mark.parametrize(("shift", "kept"), [(0.0, True), (0.2, True), (2.0, False)])
def test_a_training_that_leads_away_is_undone(shift, kept):
    start = SimpleNamespace(whitening=LAYER.whitening)
    judge = Judge(SCORE, LAYER.whitening.map, 0)
    moved = replace(LAYER, family=Shifted(LAYER.family, shift))
    before, trained = fit_of(best_iter=0), fit_of(moved)
    found = not_worse(trained, before, judge, start)
    assert (found is trained) == kept
    assert not_worse(trained._replace(remark="of another kind"), before, judge, start).sampler is moved
    several = SimpleNamespace(whitening=replace(LAYER.whitening, modes=np.zeros((2, D))))
    assert not_worse(trained, before, judge, several) is trained
    assert not_worse(fit_of(moved, best_iter=0), before, judge, start).sampler is moved


class Shifted:
    def __init__(self, family, shift):
        self.family, self.shift, self.n_features = family, shift, family.n_features

    def __getattr__(self, name):
        return getattr(self.family, name)

    def draw(self, n, generator):
        return SimpleNamespace(x=self.family.draw(n, generator).x + self.shift)


# Whether a start will do


@pytest.mark.parametrize(
    ("found", "d", "converged", "effort", "good"),
    [
        (certificate(0.0), D, False, "auto", True),
        (certificate(1.0), D, True, "auto", False),
        (certificate(1.0), D, True, "low", True),
        (certificate(1.0, trusted=False), D, True, "auto", False),
        (certificate(3.0, trusted=False), MANY_FEATURES, True, "auto", True),
        (certificate(3.0, trusted=False), MANY_FEATURES, False, "auto", False),
        (None, D, True, "auto", True),
        (None, D, False, "auto", False),
        (None, MAX_FEATURES + 1, False, "auto", True),
        (None, MAX_FEATURES, False, "auto", False),
    ],
)
def test_a_start_is_good_by_its_certificate_or_by_its_chains(found, d, converged, effort, good):
    sampler = replace(LAYER, family=SimpleNamespace(n_features=d))
    whitening = replace(LAYER.whitening, converged=converged)
    assert is_good(fit_of(sampler, found), whitening, Pilot(effort=effort)) == good
    assert not is_good(fit_of(SimpleNamespace(n_features=d)), whitening, None)


def test_small_errors_of_many_features_will_do():
    sd = np.ones(MANY_FEATURES)
    whitening = replace(LAYER.whitening, converged=False, sd=sd, mean_se=0.05 * sd)
    sampler = replace(LAYER, family=SimpleNamespace(n_features=MANY_FEATURES))
    assert is_good(fit_of(sampler), whitening, None)
    assert not is_good(fit_of(sampler), replace(whitening, mean_se=0.2 * sd), None)


# When a training ends


def progress_of(family):
    return SimpleNamespace(iterate=SimpleNamespace(averaged=nullcontext), module=family)


def test_a_training_ends_when_its_certificate_is_good():
    hook = WhenGood(lambda family: replace(LAYER, family=family), SCORE, 0)
    assert not hook.at_end
    assert hook(progress_of(LAYER.family))
    far = WhenGood(lambda _: layer(1.0), SCORE, 0)
    assert not far(progress_of(LAYER.family))
    assert not WhenGood(lambda _: SimpleNamespace(), SCORE, 0)(progress_of(LAYER.family))


# Its mean


def test_a_mean_that_is_visibly_off_is_corrected():
    off, exact = fit_of(layer(0.3)), fit_of()
    found = recentred(off, SCORE, 0)
    torch.testing.assert_close(found.sampler.whitening.map.m, torch.zeros(D).double(), atol=0.06, rtol=0)
    assert found.report["score_checksum_"]
    assert recentred(exact, SCORE, 0) is exact
    at_start = fit_of(layer(0.3), best_iter=0)
    assert recentred(at_start, SCORE, 0) is at_start
    identity = replace(LAYER.whitening, map=Identity(torch.zeros(D).double()))
    unmoved = fit_of(replace(LAYER, whitening=identity, family=Shifted(LAYER.family, 0.3)))
    assert recentred(unmoved, SCORE, 0) is unmoved
    undefined = as_score(lambda x: x * torch.nan, d=D)
    assert recentred(off, undefined, 0) is off


# What is said


def watch(last, *values, keeps_best=True):
    found = Watch(lambda _: (0.0, last), None, keeps_best=keeps_best)
    found.last, found.values = last, list(enumerate(values))
    return found


def test_what_is_said_of_a_training_that_did_not_help():
    worse, fine = Worsening(2.0, 0.1), Worsening(0.1, 0.1)
    assert "did not improve on its start, which is returned: by Stein" in remark_of(watch(worse, 1.0, 2.0), 0, 0)
    assert "state of iteration 7, which is kept" in remark_of(watch(worse, 1.0, 2.0), 7, 0)
    assert "`ksd_curve_` is 1 there and at least 2 after it" in remark_of(watch(fine, 1.0, 3.0, 2.0), 4, 4)
    assert remark_of(watch(fine, 1.0, 2.0), 7, 0) is None
    assert remark_of(watch(fine, 1.0), 0, 0) is None
    assert remark_of(watch(worse, 1.0, 2.0, keeps_best=False), 0, 0) is None
    departed = Departure(torch.tensor([1.0, 0.5]), torch.tensor([0.0, 0.2]))
    assert "coordinate 1 of the whitened draws at 0.50 times its standard deviation" in remark_of(
        watch(departed, 1.0, 2.0), 3, 0
    )
