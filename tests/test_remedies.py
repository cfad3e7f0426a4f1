"""What a warning or a diagnosis says to do helps, if it is done: the first thing that it names."""

import re
import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone

from skksivi import KSIVIApproximator, diagnose
from skksivi.targets import GaussianMixture, StudentT

LAPLACE = {"whiten": "laplace", "mixing": "normal", "max_iter": 200}
PAIR = GaussianMixture([[-6.0, 0.0], [6.0, 1.0]])

#: A target, settings of a fit, what is said, and the settings that follow it.
CASES = {
    "lost modes": (PAIR, LAPLACE, r"No draw is in the mode at .*: set whiten='auto'", {"whiten": "auto"}),
    "lost tails": (StudentT(), LAPLACE, r"is wrong.*: set whiten='auto'", {"whiten": "auto", "mixing": "auto"}),
}


def error_and_words(q, target):
    """The largest error of a quantile, in units of the range of its coordinate, and all that is said of the fit."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        X = q.fit(target).sample(4000, random_state=0)
        report = diagnose(q, target, random_state=0)
    Y = target.sample(20_000, torch.Generator().manual_seed(0)).numpy()
    found, right = (np.quantile(draws, [0.1, 0.5, 0.9], axis=0) for draws in (X, Y))
    said = [str(w.message) for w in caught] + [check.remedy for check in report.warnings]
    return np.abs((found - right) / (right[2] - right[0])).max(), said


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_is_said_helps(name):
    target, settings, message, remedy = CASES[name]
    q = KSIVIApproximator(method="path", random_state=0, **settings)
    before, said = error_and_words(q, target)
    assert any(re.search(message, text) for text in said), said
    after, then = error_and_words(clone(q).set_params(**remedy), target)
    assert not any(re.search(message, text) for text in then)
    assert after < 0.7 * before
