"""Search: replicates, scorers, and scikit-learn's, optuna's and dask's tools on a target."""

import math
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from approximators import GaussianTarget
from joblib import parallel_config
from members import every, refused
from sklearn.base import clone
from sklearn.exceptions import FitFailedWarning
from sklearn.experimental import enable_halving_search_cv  # noqa: F401
from sklearn.model_selection import GridSearchCV, HalvingGridSearchCV, KFold, ShuffleSplit, cross_validate

from skksivi import KSIVIApproximator
from skksivi.baselines import Laplace
from skksivi.kernels import IMQ
from skksivi.metrics import ksd, mmd, sliced_wasserstein
from skksivi.model_selection import (
    Replicates,
    neg_distance_scorer,
    neg_divergence_scorer,
    neg_ksd_scorer,
    within_noise,
)
from skksivi.targets import Banana, from_score_fn

TARGET = Banana()
QUICK = KSIVIApproximator(whiten=None, max_iter=4, hidden_layer_sizes=(4,), batch_size=8, random_state=0)
QUICK.set_params(gradient_estimator="u-statistic")  # without a search for coordinates
GRID = {"bandwidth": [0.5, 2.0]}
SCORER = neg_ksd_scorer(n_samples=300)

#: The quick fits are far from their end, of which a warning tells.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The draws are too:sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore:A candidate of this search is its start:UserWarning"),
]


def standard_score(x):
    return -x


class Draws:
    """An estimator whose draws are those of N(0, I), changed by a function."""

    def __init__(self, d, change=lambda X: X):
        self.d = d
        self.change = change

    def sample(self, n_samples, random_state=None):
        return self.change(np.random.RandomState(random_state.randint(2**31)).normal(size=(n_samples, self.d)))


# Replicates


def test_row_zero_is_the_target_and_other_rows_are_replicates():
    index = np.array([3]), Ellipsis  # as scikit-learn asks
    assert TARGET[np.array([0]), ...] is TARGET[:] is TARGET[...] is TARGET[0] is TARGET
    assert TARGET[index].replicate == TARGET[3].replicate == (3,)
    assert (TARGET[3][7].replicate, TARGET[3].to(dtype=torch.float32).replicate) == ((3, 7), (3,))
    assert TARGET.replicate == ()


def rows(cv):
    return [int(train[0]) for train, _ in cv.split(TARGET)]


def test_folds_are_other_rows_for_training_and_test_alike():
    for train, test in Replicates(5).split(TARGET):
        assert train.shape == test.shape == (1,)
        assert train[0] == test[0] != 0
    assert len(set(rows(Replicates(5)))) == Replicates(5).get_n_splits() == 5


def test_folds_are_those_of_random_state():
    assert rows(Replicates(3)) == rows(Replicates(3, random_state=0)) != rows(Replicates(3, random_state=1))
    assert rows(Replicates(3)) == rows(Replicates(5))[:3]
    before = str(np.random.get_state())
    assert rows(Replicates(2, random_state=None)) != rows(Replicates(2, random_state=None))
    rng = np.random.RandomState(4)
    assert rows(Replicates(2, random_state=rng)) != rows(Replicates(2, random_state=rng))
    assert str(np.random.get_state()) == before


@every("make", {"int": lambda: 0, "RandomState": lambda: np.random.RandomState(0)})
def test_the_seed_of_a_fit_comes_from_the_estimator_and_the_replicate(make):
    def draws(target, random_state):
        return clone(QUICK).set_params(random_state=random_state).fit(target).sample(4).tolist()

    every = [draws(target, make()) for target in (TARGET, TARGET[1], TARGET[2], TARGET[1][2])]
    every += [draws(TARGET[1], 7), draws(TARGET[1], None)]
    assert (len({str(some) for some in every}), draws(TARGET[1], make())) == (len(every), every[1])
    assert draws(TARGET[1], None) == every[-1]


def test_the_folds_of_an_inner_search_are_others_in_each_outer_fold():
    inner = GridSearchCV(QUICK, {"bandwidth": [1.0]}, cv=Replicates(1), scoring=SCORER)
    outer = cross_validate(inner, TARGET, cv=Replicates(2), scoring=lambda *_: 0.0, return_estimator=True)
    first, second = (search.best_score_ for search in outer["estimator"])
    assert first != second


@pytest.mark.slow
def test_the_table_does_not_depend_on_the_number_of_jobs():
    """Less the times."""
    search, tables = GridSearchCV(QUICK, GRID, cv=Replicates(2), scoring=SCORER), []
    for n_jobs in (1, 2):
        with parallel_config("loky", n_jobs=n_jobs):
            found = clone(search).fit(TARGET).cv_results_
        tables.append({name: column for name, column in found.items() if not name.endswith("_time")})
    np.testing.assert_equal(*tables)


# Search tools


def assert_found(search):
    assert search.best_estimator_.sample(3).shape == (3, 2)
    assert math.isfinite(search.best_score_)


def test_grid_search_over_every_kind_of_parameter():
    grid = [
        {"kernel": ["gaussian", IMQ()], "bandwidth": [0.5, "median"]},
        {"kernel": [IMQ(bandwidth=1.0)], "kernel__bandwidth": [2.0], "bandwidth": [None]},
        {"batch_size": [16], "learning_rate": [1e-2], "hidden_layer_sizes": [(), (10, 10)]},
        {"whiten": ["laplace"], "gradient_estimator": ["vanilla"]},
    ]
    search = GridSearchCV(QUICK, grid, cv=Replicates(1), scoring=SCORER, error_score="raise").fit(TARGET)
    assert_found(search)
    assert len(search.cv_results_["params"]) == 8
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()


def test_the_default_grade_is_that_of_the_estimator():
    search = GridSearchCV(QUICK, {"bandwidth": [1.0]}, cv=Replicates(1)).fit(TARGET)
    row = rows(Replicates(1))[0]
    assert search.best_score_ == clone(QUICK).set_params(bandwidth=1.0).fit(TARGET[row]).score(TARGET)


@pytest.mark.slow
def test_halving_search_gives_the_survivors_more_iterations():
    resources = {"resource": "max_iter", "min_resources": 2, "max_resources": 4, "factor": 2}
    search = HalvingGridSearchCV(QUICK, GRID, **resources, cv=Replicates(2), scoring=SCORER).fit(TARGET)
    assert (search.n_resources_, search.n_candidates_, search.best_estimator_.n_iter_) == ([2, 4], [2, 1], 4)
    assert_found(search)


#: Of five candidates the third is best, the first two are within its standard error of 0.2, and the last has failed.
SCORES = np.array([[-1.1, -1.1], [-1.2, -1.1], [-0.8, -1.2], [-3, -3], [math.nan, 0]])


def found(scores, params):
    return {"params": params} | {f"split{k}_test_a": column for k, column in enumerate(np.transpose(scores))}


@every("sizes, expected", [((1, 1, 1, 0, 0), 0), ((2, 1, 2, 0, 0), 1), ((2, 2, 1, 0, 0), 2)])
def test_the_simplest_candidate_within_one_standard_error_is_kept(sizes, expected):
    results = found(SCORES, [dict.fromkeys("xy"[:size]) for size in sizes])
    assert within_noise(results, "a") == expected
    assert results["within_noise_a"].tolist() == [True, True, True, False, False]
    assert results["se_test_a"][:4] == pytest.approx([0, 0.05, 0.2, 0])


@every("scores, metric", [(SCORES, "b"), (SCORES[:, :1], "a"), (math.nan * SCORES, "a")])
def test_a_choice_within_noise_needs_replicates_of_a_known_scorer_and_finite_scores(scores, metric):
    refused(ValueError, "`within_noise` found", lambda: within_noise(found(scores, [{}] * 5), metric))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.filterwarnings("ignore:`optuna.terminator` module has been deprecated:FutureWarning")
def test_optuna_search():
    optuna = pytest.importorskip("optuna")
    integration = pytest.importorskip("optuna_integration")
    of = optuna.distributions
    space = {"learning_rate": of.FloatDistribution(1e-4, 1e-1, log=True), "batch_size": of.IntDistribution(16, 64)}
    space["kernel"] = of.CategoricalDistribution(["gaussian", "imq"])
    options = {"cv": Replicates(2), "scoring": SCORER, "n_trials": 2, "random_state": 0}
    search = integration.OptunaSearchCV(QUICK, space, **options)
    first = clone(search).fit(TARGET)
    assert_found(first)
    assert clone(search).fit(TARGET).best_params_ == first.best_params_


def test_a_search_can_be_cloned_and_pickled():
    search = GridSearchCV(QUICK, GRID, cv=Replicates(2), scoring=SCORER)
    assert repr(clone(search)) == repr(pickle.loads(pickle.dumps(search))) == repr(search)  # noqa: S301


class Exploding(Banana):
    """A target whose score is not finite far out, where wide fits have draws."""

    def score_fn(self, x):
        return torch.where(x.abs() > 20, math.nan, super().score_fn(x))


FAILURES = {
    "parameter out of range": (TARGET, {"learning_rate": [-1.0, 1e-2]}, FitFailedWarning),
    "training diverges": (Exploding(), {"initial_scale": [100.0, 1.0]}, FitFailedWarning),
    "draws cannot be judged": (Exploding(), {"initial_scale": [8.0, 1.0]}, UserWarning),
}


@every("target, grid, warning", FAILURES)
def test_a_failed_candidate_scores_nan_and_the_search_goes_on(target, grid, warning):
    estimator = clone(QUICK).set_params(optimizer__nonfinite="skip" if warning is UserWarning else "raise")
    search = GridSearchCV(estimator, grid, cv=Replicates(2), scoring=SCORER)
    with pytest.warns(warning), pytest.warns(UserWarning, match="non-finite"):
        search.fit(target)
    assert np.isnan(search.cv_results_["mean_test_score"]).tolist() == [True, False]
    assert search.best_index_ == 1
    assert_found(search)


# Scorers


def test_neg_divergence_is_that_of_gaussians():
    """Of N(0, I) from N(m, s^2) in its first coordinate, by 16 replicates; false alarms: 1 in 10,000."""
    m, s = 0.3, 1.2
    target = from_score_fn(lambda x: -(x - torch.tensor([m, 0.0])) / torch.tensor([s**2, 1.0]), 2)
    q = Laplace().fit(from_score_fn(standard_score, 2))
    grades = np.array([neg_divergence_scorer()(q, target[k]) for k in range(1, 17)])
    divergence = (1 + m**2) / (2 * s**2) + (s**2 + m**2) / 2 - 1
    assert abs(grades.mean() + divergence) < 5 * grades.std(ddof=1) / 4
    assert neg_divergence_scorer()(q, from_score_fn(standard_score, 2)) == pytest.approx(0, abs=1e-4)


A = np.array([[2.0, 0.0, 0.0], [-3.0, 0.5, 0.0], [100.0, 7.0, 50.0]])


def test_neg_ksd_is_the_formula_of_its_docstring_in_any_units():
    d, n, widths = 3, 50, (0.5, 2.0)
    scorer = neg_ksd_scorer(n_samples=n, widths=widths)
    value = scorer(Draws(d, np.exp), from_score_fn(standard_score, d))
    X = Draws(d, np.exp).sample(n, np.random.RandomState([0]))
    imq = [math.sqrt(1 + 2 / c**2) * ksd(X, standard_score, kernel=IMQ(bandwidth=c * math.sqrt(d))) for c in widths]
    linear = (X @ X.T) ** 2 - (X**2).sum(1) - (X**2).sum(1)[:, None] + d  # k_p of k = x^T x', with s = -x
    mean = linear[~np.eye(n, dtype=bool)].mean() / math.sqrt(d)
    assert value == pytest.approx(-np.mean([*imq, mean]), rel=1e-7)
    assert neg_ksd_scorer(widths=1.0) == neg_ksd_scorer(widths=(1.0,))
    inverse = torch.as_tensor(np.linalg.inv(A))
    moved = from_score_fn(lambda y: -(y @ inverse.mT) @ inverse, 3)
    assert scorer(Draws(d, lambda X: np.exp(X) @ A.T), moved) == pytest.approx(value, rel=1e-6)


def test_neg_ksd_takes_a_target_or_its_score_function_and_repeats():
    q = clone(QUICK).fit(TARGET)
    before = pickle.dumps(q._random_state.get_state())
    assert SCORER(q, TARGET) == SCORER(q, TARGET.score_fn) == SCORER(q, TARGET, None)
    assert pickle.dumps(q._random_state.get_state()) == before
    assert pickle.loads(pickle.dumps(SCORER))(q, TARGET) == SCORER(q, TARGET)  # noqa: S301


def test_scorers_judge_replicates_by_independent_draws():
    q = Laplace().fit(TARGET)
    reference = np.random.RandomState(0).normal(size=(100, 2))
    for scorer in (SCORER, neg_distance_scorer(reference), neg_divergence_scorer(n_samples=100)):
        assert len({scorer(q, target) for target in (TARGET, TARGET[1], TARGET[2])}) == 3
        assert scorer(q, TARGET[1]) == scorer(q, TARGET[1])


def reference():
    return np.random.RandomState(1).normal(size=(200, 2)) * [1.0, 100.0]


@every("metric, function", [("mmd", mmd), ("sliced_wasserstein", partial(sliced_wasserstein, random_state=0))])
def test_neg_distance_is_that_of_standardised_coordinates(metric, function):
    Y, X = reference(), Draws(2).sample(200, np.random.RandomState([0]))
    sd = Y.std(0)
    assert neg_distance_scorer(Y, metric=metric)(Draws(2)) == -function(X / sd, Y / sd)
    in_other_units = neg_distance_scorer(Y * [1000.0, 0.1], metric=metric)(Draws(2, lambda X: X * [1000.0, 0.1]))
    assert in_other_units == pytest.approx(-function(X / sd, Y / sd), rel=1e-9)


def test_neg_distance_takes_a_function_of_raw_draws_and_a_constant_column():
    Y = reference()
    scorer = neg_distance_scorer(Y, metric=lambda X, Z: len(X) + Z[0, 0], n_samples=70)
    assert scorer(Draws(2), TARGET) == -(70 + Y[0, 0])
    assert math.isfinite(neg_distance_scorer(Y * [0, 1])(Draws(2)))


MISTAKES = {
    "n_samples": (lambda: neg_ksd_scorer(n_samples=1), "n_samples"),
    "too few for weights": (lambda: neg_divergence_scorer(n_samples=99), "n_samples"),
    "no widths": (lambda: neg_ksd_scorer(widths=()), "`widths` must hold positive numbers"),
    "width": (lambda: neg_ksd_scorer(widths="wide"), "`widths` must hold positive numbers"),
    "widths": (lambda: neg_ksd_scorer(widths=(1.0, -1.0)), "`widths` must hold positive numbers"),
    "metric": (lambda: neg_distance_scorer(reference(), metric="euclid"), "`metric` must be one of"),
    "reference": (lambda: neg_distance_scorer([[np.nan, 0.0], [1.0, 1.0]]), "X_reference contains NaN"),
    "columns": (lambda: neg_distance_scorer(np.eye(3))(Draws(2)), "`X_reference` has 3 columns"),
    "no fold": (lambda: list(Replicates(0).split(TARGET)), "n_splits"),
    "half a fold": (lambda: list(Replicates(2.5).split(TARGET)), "n_splits"),
    "folds of data": (lambda: list(Replicates().split(np.zeros((5, 2)))), r"`X` must be a Target.*KFold"),
    "data": (lambda: SCORER(Draws(2), np.ones((5, 2))), "`X` must be a Target or its score function, got a ndarray"),
    "features": (lambda: SCORER(Draws(2), from_score_fn(standard_score, 3)), "target of 3 features, but .* have 2"),
    "score": (lambda: SCORER(Draws(2), from_score_fn(lambda x: x * math.nan, 2)), "finite"),
}


@every("act, message", MISTAKES)
def test_a_mistake_is_named(act, message):
    refused((TypeError, ValueError), message, act)


# A cluster


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning", "ignore:A candidate of this search")
def test_candidates_of_a_fold_find_the_same_coordinates():
    q = KSIVIApproximator(max_iter=1, random_state=0).set_params(whiten__budget=1000)
    other = clone(q).set_params(learning_rate=0.1, batch_size=8, hidden_layer_sizes=(3,), max_iter=2)
    a, b = (p.fit(GaussianTarget()[[3]]).whitening_ for p in (q, other))
    np.testing.assert_array_equal(a.m, b.m)
    np.testing.assert_array_equal(a.L, b.L)


@every("cv", [None, 3, KFold(), ShuffleSplit()])
def test_a_search_that_would_split_rows_says_what_to_do(cv):
    search = GridSearchCV(KSIVIApproximator(max_iter=2), {"learning_rate": [0.1]}, cv=cv)
    refused(ValueError, r"no rows to split: set cv=skksivi.model_selection.Replicates", lambda: search.fit(Banana()))
    halving = HalvingGridSearchCV(QUICK, GRID, cv=Replicates(2), scoring=SCORER)
    refused(ValueError, "resource='max_iter', max_resources=2000, which a halving search", halving.fit, TARGET)
