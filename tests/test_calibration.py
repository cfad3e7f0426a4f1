"""Simulation-based calibration: uniform ranks, their bands, right and wrong fits, and failures."""

import itertools

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from joblib import parallel_config
from members import every, refused
from sklearn.base import BaseEstimator

from skksivi._utils.monte_carlo import counts_below, coverage, tail_probabilities, uniform_band, uniformity
from skksivi.baselines import Laplace
from skksivi.calibration import Calibration, sbc
from skksivi.targets import constrained, from_log_prob, from_score_fn

# Ranks and bands


@every("n, n_draws", [(1, 7), (5, 3), (10, 1)])
def test_the_probability_of_a_band_and_a_p_value_are_shares_of_all_ranks(n, n_draws):
    all_ranks = list(itertools.product(range(n_draws + 1), repeat=n))  # each as likely as another
    counts = np.array([counts_below(np.array(ranks), n_draws) for ranks in all_ranks])
    tails = tail_probabilities(n, n_draws)
    for gamma in np.unique(tails):
        inside = tails > gamma
        share = inside[np.arange(n_draws), counts].all(1).mean()
        assert coverage(inside) == pytest.approx(share, abs=1e-12)
    p = np.array([uniformity(ranks, n_draws) for ranks in np.array(all_ranks)])
    as_small = (p[:, None] >= np.unique(p) - 1e-12).mean(0)
    np.testing.assert_allclose(np.append(1 - as_small, 1)[1:], np.unique(p), atol=1e-9)


@every("n, n_draws, level", [(200, 99, 0.9), (37, 200, 0.5)])
def test_a_line_leaves_the_band_where_its_p_value_is_as_small(n, n_draws, level):
    low, high = uniform_band(n, n_draws, level)
    powers = np.repeat([1, 1.1, 1.3], 20)[:, None]
    ranks = np.floor((n_draws + 1) * np.random.RandomState(0).uniform(size=(60, n)) ** powers).astype(int)
    counts = np.array([counts_below(row, n_draws) for row in ranks])
    left = ((counts < low) | (counts > high)).any(1)
    np.testing.assert_array_equal(left, [uniformity(row, n_draws) <= 1 - level + 1e-12 for row in ranks])
    assert 0 < sum(left) < len(left)


def test_extreme_ranks_have_small_p_values_of_the_right_order():
    assert 0.1**20 <= uniformity(np.zeros(20, dtype=int), 9) < 1e-13
    assert uniformity(np.arange(100) % 10, 9) == pytest.approx(1, abs=1e-3)


# Right and wrong posteriors

D = np.repeat([[1.0, 0.0], [0.8, 0.6]], 2, axis=0)


def prior(rng):
    return 1 + rng.normal(size=2)


def data(theta, rng):
    return D @ theta + rng.normal(size=4)


def posterior(mean=1.0, sd=1.0):
    """Make posteriors by the prior N(mean, sd^2): their means and samplers."""

    def make_target(y):
        C = np.linalg.inv(D.T @ D + np.eye(2) / sd**2)
        m = C @ (D.T @ y + mean / sd**2)
        return m, lambda n, rng: m + rng.normal(size=(n, 2)) @ np.linalg.cholesky(C).T

    return make_target


class Exact(BaseEstimator):
    """Draws of a posterior whose sampler is what it is fitted to, if its mean is low; changed by a function."""

    def __init__(self, change=lambda X: X, limit=np.inf):
        self.change, self.limit = change, limit

    def fit(self, target):
        self.mean_, self.sampler_ = target
        if self.mean_[0] > self.limit:
            raise ArithmeticError("the matrix is singular.")
        return self

    def sample(self, n_samples, random_state=None):
        return self.change(self.sampler_(n_samples, np.random.RandomState(random_state)))


def calibrated(make_target=None, estimator=None, **options):
    return sbc(prior, data, make_target or posterior(), estimator or Exact(), **{"random_state": 0, **options})


@every("wrong", [{"mean": -1.0}, {"sd": 0.5}])
def test_wrong_posteriors_are_found(wrong):
    assert calibrated(posterior(**wrong)).p_value < 1e-3


@every("shift, scale, way", [(1, 1, "high"), (-1, 1, "low"), (0, 2, "wide"), (0, 0.5, "narrow")])
def test_a_report_names_what_is_wrong_with_draws(shift, scale, way):
    rng = np.random.RandomState(0)
    ranks = (shift + scale * rng.normal(size=(300, 19)) < rng.normal(size=(300, 1))).sum(1, keepdims=True)
    assert f"draws too {way}" in str(Calibration(ranks, 19, ("a",)))


def test_a_fit_that_ignores_the_data_is_found_by_a_quantity_of_the_data_alone():
    """Modrak et al.: draws of the prior have uniform ranks of parameters."""

    def quantities(theta, y):
        return {"log-likelihood": -np.square(y - D @ theta).sum() / 2}

    result = calibrated(lambda y: (np.ones(2), lambda n, rng: 1 + rng.normal(size=(n, 2))), quantities=quantities)
    assert result.names == ("x0", "x1", "log-likelihood")
    assert result.p_values[:2].min() > 0.001
    assert result.p_values[2] < 1e-10
    assert calibrated(quantities=quantities).p_value > 0.001


@every("quantity", [lambda theta, y: float(theta[0] > 1), lambda theta, y: 0.0])
def test_ties_are_broken_at_random(quantity):
    result = calibrated(quantities=quantity)
    assert result.names[-1] == "quantity"
    assert result.p_values[-1] > 0.001


# Seeds and jobs


@pytest.mark.parametrize("backend", ["threading", pytest.param("loky", marks=pytest.mark.slow)])
def test_ranks_are_those_of_the_random_state_and_do_not_depend_on_the_number_of_jobs(backend):
    first, other = (calibrated(n=20, random_state=seed).ranks for seed in (3, 4))
    assert (first != other).any()
    with parallel_config(backend):
        there = calibrated(n=20, n_jobs=2, random_state=np.random.RandomState(3))
    np.testing.assert_array_equal(there.ranks, first)


# Failures


def test_failures_are_told_and_the_others_kept():
    text = r" of 30 replications failed and have no ranks. The first: ArithmeticError: the matrix is singular. If"
    with pytest.warns(UserWarning, match=text) as told:
        result = calibrated(estimator=Exact(limit=1.5), n=30)
    assert str(told[0].message).startswith(f"{result.n_failures} of 30")
    assert 3 < result.n_failures == 30 - len(result.ranks) < 27
    assert result.failure == "ArithmeticError: the matrix is singular."
    assert {tuple(ranks) for ranks in result.ranks} < {tuple(ranks) for ranks in calibrated(n=30).ranks}
    assert f", {result.n_failures} more failed: p = " in str(result)


def raising(*_):
    raise KeyError("nothing")


#: What fails in every replication.
HOPELESS = [
    (lambda y: raising, Laplace(), "KeyError: 'nothing'"),
    (lambda y: lambda x: -x, Laplace(max_iter=-1), "InvalidParameterError: .*max_iter"),
    (lambda y: None, Laplace(), "TypeError: "),
    (posterior(), Exact(lambda X: X[1:]), "ValueError: there are 98 draws of 2 quantities, expected 99"),
    (posterior(), Exact(lambda X: X * np.nan), "ValueError: parameters, draws or .* are NaN"),
    (posterior(), Exact(lambda X: X[:, :1]), "ValueError: all input arrays must have the same shape"),
]


@every("make_target, estimator, text", HOPELESS)
def test_if_nothing_succeeds_the_error_says_why(make_target, estimator, text):
    with pytest.raises(RuntimeError, match=f"None of the 2 replications succeeded. The first: {text}"):
        calibrated(make_target, estimator, n=2)


def test_another_number_of_quantities_is_a_failure():
    with pytest.warns(UserWarning, match=r"there are 99 draws of . quantities, expected 99 of ."):
        calibrated(quantities=lambda theta, y: np.zeros(1 if y[0] > 0 else 2), n=20)


# Bad input

OF_THREE = from_score_fn(lambda x: -x, 3)
FUNCTIONS = {"simulate_prior": prior, "simulate_data": lambda *_: np.ones(4), "make_target": lambda y: torch.neg}
BAD = [
    *(({name: raising}, KeyError, "nothing") for name in (*FUNCTIONS, "quantities")),
    ({"estimator": Laplace}, TypeError, "`estimator` must be an unfitted approximator, .* got <class"),
    ({"estimator": 3}, TypeError, "`estimator` must be an unfitted approximator, .* got 3"),
    ({"n": 0}, ValueError, "n == 0"),
    ({"n": 0.5}, TypeError, "n must be an instance of int"),
    ({"n_draws": 0}, ValueError, "n_draws == 0"),
    ({"simulate_prior": lambda rng: np.array([1, np.nan])}, ValueError, "parameters, .* are NaN"),
    ({"simulate_prior": lambda rng: ["a"]}, ValueError, "could not convert string"),
    ({"simulate_prior": lambda rng: {"a": 1.0}}, ValueError, "needs one with `constrain`"),
    ({"make_target": lambda y: OF_THREE}, ValueError, r"\(2,\)\}, but the target of `make_target` has .*\(3,\)"),
    ({"names": ["a"]}, ValueError, "`names` are 1, expected 2"),
    ({"names": ["a", "a"]}, ValueError, "give one name twice, in a, a"),
    ({"quantities": lambda theta, y: {"x0": 1.0}}, ValueError, "one name twice, in x0, x1, x0"),
    ({"quantities": lambda theta, y: np.nan}, ValueError, "`quantities` are NaN"),
]


@every("changes, kind, text", BAD)
def test_bad_input_is_told_before_the_first_fit(changes, kind, text, monkeypatch):
    monkeypatch.setattr(Laplace, "fit", lambda *_: pytest.fail("it was fitted"))
    refused(kind, text, lambda: sbc(**FUNCTIONS | {"estimator": Laplace()} | changes))


# Parameters by name


def of_scale(y):
    def log_prob(mean, scale):
        of_data = -((torch.as_tensor(y) - mean[:, None]) / scale[:, None]).square().sum(1) / 2 - len(y) * scale.log()
        return of_data - mean.square() / 2 - scale

    return constrained(log_prob, {"mean": "real", "scale": "positive"})


def test_parameters_by_name_are_ranked_among_draws_of_the_model():
    def quantities(theta, y):
        return {"sum": theta["mean"] + theta["scale"], "of y": y[:2]}

    of_theta = lambda theta, rng: theta["mean"] + theta["scale"] * rng.normal(size=5)  # noqa: E731
    of_prior = lambda rng: {"scale": rng.exponential(), "mean": rng.normal()}  # noqa: E731
    result = sbc(of_prior, of_theta, of_scale, Laplace(), n=5, quantities=quantities, random_state=0)
    assert result.names == ("scale", "mean", "sum", "of y[0]", "of y[1]")
    assert result.ranks.shape == (5, 5)


@pytest.mark.parametrize("theta", [{"tau": 1.0}, {"mean": np.ones(2)}])
def test_parameters_that_the_target_does_not_have_are_told(theta):
    with pytest.raises(ValueError, match=r"but the target of `make_target` has \{'mean': .*, 'scale': .*\}"):
        sbc(lambda rng: theta, lambda *_: np.ones(3), of_scale, Laplace(), n=2)


def test_names_are_those_given_or_of_the_target_or_numbers():
    target = from_log_prob(lambda x: -x.square().sum(1) / 2, 2, names=["a", "b"])
    assert calibrated(lambda y: target, Laplace(), n=2).names == ("a", "b")
    assert calibrated(lambda y: target, Laplace(), n=2, names=["c", "d"]).names == ("c", "d")
    of_a_number = sbc(lambda rng: rng.normal(), lambda theta, _: theta, lambda y: lambda x: y - 2 * x, Laplace(), n=2)
    assert of_a_number.names == ("x0",)


# Results


def test_a_line_leaves_the_band_where_the_joint_p_value_is_small():
    ranks = np.random.RandomState(0).randint(20, size=(100, 9))
    ranks[:, 8] = np.minimum(ranks[:, 8], 5)
    result = Calibration(ranks, 19, tuple("abcdefghi"))
    assert result.p_value == min(1, 9 * result.p_values.min())  # Bonferroni's
    assert f"p = {result.p_value:.2g}" in str(result).splitlines()[0]
    given = plt.figure().subplots()
    assert result.plot(given) is given
    assert [text.get_text() for text in given.get_legend().get_texts()] == ["95% band of all lines", *"abcdefg", "i"]
    for column, line in zip(ranks.T, given.get_lines()[1:], strict=True):
        z, difference = line.get_data()
        np.testing.assert_allclose(z, np.arange(1, 20) / 20)
        np.testing.assert_allclose(difference + z, [(column < k).mean() for k in range(1, 20)])
    np.testing.assert_array_equal(result.p_values <= 0.05 / 9, np.arange(9) == 8)
    assert Calibration(ranks[:, :1], 19, ("a",)).plot().get_legend().get_texts()[0].get_text() == "95% band"
    plt.close("all")
