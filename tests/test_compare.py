"""Models compared by their evidence."""

import math
import re

import numpy as np
import pytest
import torch
from torch.distributions import Gamma, Poisson

from skksivi import compare
from skksivi.baselines import SVGD, Laplace
from skksivi.targets import Banana, BayesianLinearRegression, constrained, from_log_prob, from_score_fn

COUNTS = torch.tensor([3.0, 5.0, 2.0], dtype=torch.float64)


def of_counts(a, b):
    """Return a model of counts, and its log evidence."""

    def log_prob(rate):
        return Gamma(a, b).log_prob(rate) + Poisson(rate[:, None]).log_prob(COUNTS).sum(1)

    n, total = len(COUNTS), float(COUNTS.sum())
    exact = a * math.log(b) - math.lgamma(a) + math.lgamma(a + total) - (a + total) * math.log(b + n)
    return constrained(log_prob, {"rate": "positive"}), exact - float(torch.lgamma(COUNTS + 1).sum())


def test_differences_are_logarithms_of_bayes_factors():
    models = {f"Gamma({a}, {b})": of_counts(a, b) for a, b in [(2.0, 0.1), (2.0, 1.0), (20.0, 1.0)]}
    exact = {name: log_z for name, (_, log_z) in models.items()}
    fits = {name: (Laplace(random_state=0).fit(target), target) for name, (target, _) in models.items()}
    table = compare(fits, random_state=0)
    assert table.names == tuple(sorted(exact, key=lambda name: -exact[name]))
    expected = np.array([exact[name] for name in table.names])
    assert (abs(table.log_z - expected) < 4 * table.log_z_se).all()
    error = abs(table.difference - (expected - expected[0]))
    assert error[0] == table.difference_se[0] == 0
    assert (error[1:] < 4 * table.difference_se[1:]).all()
    assert table == compare(fits, random_state=0)
    assert table.to_frame().loc["Gamma(20.0, 1.0)", "difference"] == table.difference[-1]
    assert " ± " in str(table)


def test_a_model_whose_weights_are_not_reliable_comes_last_without_an_error():
    far = Laplace(random_state=0).fit(lambda x: 1e4 * (5 - x), n_features=1)
    table = compare({"a": (far, with_data()[1]), "b": with_data()}, random_state=0)
    assert table.names == ("b", "a")
    assert np.isinf(table.difference_se[1])
    assert re.fullmatch(r"\|weights not reliable, k-hat \d+\.\d+", "|".join(table.notes))


def with_data(**data):
    """Return a pair of a fit and a normal target with some data."""
    target = from_log_prob(lambda x: -x.square().sum(-1) / 2, n_features=1)
    vars(target).update(data)
    return NORMAL, target


NORMAL = Laplace(random_state=0).fit(lambda x: -x, n_features=1)
ROWS = BayesianLinearRegression(np.eye(3), np.arange(3.0))
UNLIKE = {
    "values": [{"y": [1.0, 2.0]}, {"y": [1.0, 3.0]}],
    "length": [{"y": [1.0, 2.0]}, {"y": [1.0, 2.0, 2.0]}],
    "kinds": [{"y": [1.0, 2.0]}, {"y": [1.0], "z": [3.0]}],
}


@pytest.mark.parametrize("data", UNLIKE.values(), ids=UNLIKE)
def test_models_of_other_data_are_refused(data):
    with pytest.raises(ValueError, match=r"targets of 'a' and 'b' have other data"):
        compare({"first": with_data()} | {a: with_data(observed_data=d) for a, d in zip("ab", data, strict=True)})
    with pytest.raises(ValueError, match=r"targets of 'a' and 'b' have other data"):
        compare({"a": with_data(n_rows=2), "b": with_data(n_rows=3)})


def test_data_may_have_another_name_shape_and_order_or_be_unknown():
    data = [{"y": [[1.0, np.nan], [3.0, 2.0]]}, {"count": np.float32([3, 2, np.nan, 1])}, {}, None]
    compare({str(i): with_data(observed_data=d) for i, d in enumerate(data)}, random_state=0)


@pytest.mark.parametrize(
    ("fits", "error", "message"),
    [
        ({}, TypeError, "`fits` must be a dict of fits"),
        ({"a": Laplace().fit(torch.neg, n_features=1)}, ValueError, "has kept no weighted draws"),
        ({"a": (NORMAL,)}, TypeError, "`fits` must be a dict of fits"),
        ([with_data()], TypeError, "`fits` must be a dict of fits"),
        ({"a": with_data()[::-1]}, TypeError, r"`fits\['a'\]\[0\]`"),
        ({"a": (SVGD(n_particles=20, max_iter=2).fit(Banana()), Banana())}, TypeError, "has no density"),
        ({"a": (NORMAL, lambda x: -x)}, ValueError, r"`fits\['a'\]`: the target has an unknown constant"),
        ({"a": (NORMAL, from_score_fn(lambda x: -x, n_features=1))}, ValueError, "has an unknown constant"),
        ({"a": (Laplace(random_state=0).fit(ROWS), ROWS)}, ValueError, "has an unknown constant"),
    ],
)
def test_what_cannot_be_compared_is_refused(fits, error, message):
    with pytest.raises(error, match=message):
        compare(fits)
