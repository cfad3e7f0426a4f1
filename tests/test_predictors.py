"""The predictors are scikit-learn's and predict by the posterior, processes by that of the highest evidence."""

import pickle
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import scipy.special
import scipy.stats
import torch
from awkward_arrays import every_view
from hypothesis import given
from hypothesis import strategies as st
from members import every, refused
from scipy.integrate import dblquad
from scipy.stats import multivariate_normal
from sklearn import config_context
from sklearn.base import BaseEstimator, clone
from sklearn.datasets import load_diabetes, load_iris
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, Matern
from sklearn.linear_model import BayesianRidge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import estimator_checks
from sklearn.utils.estimator_checks import parametrize_with_checks

from skksivi import KSIVIApproximator, KSIVIClassifier, KSIVIRegressor, diagnose, summary
from skksivi.baselines import SVGD, Laplace, MeanFieldVI
from skksivi.parameters import Pilot, Scale
from skksivi.predictors import _predictors, _process
from skksivi.predictors._predictors import trained_weights
from skksivi.predictors._process import LEAST_NOISE, PROFILES, Precisions, fit_process, log_evidence
from skksivi.targets import BayesianNeuralNetwork

#: What a predictor does with draws does not depend on where they come from.
ESTIMATORS = [
    KSIVIRegressor(model="linear", approximator=Laplace(), random_state=0),
    KSIVIRegressor(model="network", n_hidden=4, approximator=Laplace(), random_state=0),
    KSIVIClassifier(approximator=Laplace(), random_state=0),
    KSIVIRegressor(random_state=0),
]
#: One that trains.
TINY = KSIVIApproximator(max_iter=2, batch_size=8, hidden_layer_sizes=(4,), whiten="laplace")
TINY.set_params(gradient_estimator="u-statistic")
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
X, Y = load_diabetes(return_X_y=True)
IRIS, SPECIES = load_iris(return_X_y=True)


@parametrize_with_checks([ESTIMATORS[0], ESTIMATORS[2]])
def test_the_checks_of_scikit_learn_pass(estimator, check):
    check(estimator)


#: Those of scikit-learn's checks that depend on the model; the others are of what all models have in common.
OF_MODELS = ("fit2d_1sample", "methods_subset_invariance", "sample_weight_equivalence_on_dense_data")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("check", OF_MODELS)
@pytest.mark.parametrize("estimator", [ESTIMATORS[1], ESTIMATORS[3]], ids=["network", "process"])
def test_the_checks_of_models_pass_with_networks_and_processes(estimator, check):
    getattr(estimator_checks, f"check_{check}")(type(estimator).__name__, clone(estimator))


@pytest.mark.slow
def test_a_linear_regression_is_that_of_scikit_learn():
    models = KSIVIRegressor(model="linear", n_draws=4000, random_state=0), BayesianRidge()
    (mean, std), (their_mean, their_std) = (m.fit(X, Y).predict(X, return_std=True) for m in models)
    assert np.abs(mean - their_mean).max() < 0.1 * their_std.min()
    np.testing.assert_allclose(std, their_std, rtol=0.03)


@pytest.mark.slow
def test_a_classifier_predicts_the_mean_over_the_posterior():
    x = IRIS[:, :1]
    model = KSIVIClassifier(prior_precision=2.0, n_draws=20_000, random_state=0).fit(x, SPECIES == 2)
    z = (x - x.mean()) / x.std()
    a, b = np.meshgrid(*2 * [np.linspace(-6, 6, 201)], indexing="ij")  # the posterior on a grid
    logits = a.ravel() + z * b.ravel()
    log_p = np.where(SPECIES[:, None] == 2, -np.logaddexp(0, -logits), -np.logaddexp(0, logits)).sum(0)
    log_p -= a.ravel() ** 2 + b.ravel() ** 2
    p = np.exp(log_p - log_p.max())
    expected = (1 / (1 + np.exp(-logits)) * p).sum(1) / p.sum()
    assert np.abs(model.predict_proba(x)[:, 1] - expected).max() < 0.01


@pytest.mark.parametrize("model", ["process", "linear", pytest.param("network", marks=pytest.mark.slow)])
def test_predictions_of_a_regressor_agree_with_each_other(model):
    m = KSIVIRegressor(model=model, n_hidden=4, approximator=TINY, n_draws=500, random_state=0).fit(X[:80], Y[:80])
    mean, std = m.predict(X[:5], return_std=True)
    np.testing.assert_array_equal(m.predict(X[:5]), mean)
    new = m.sample_y(X[:5], 20_000)
    assert (np.abs(new.mean(1) - mean) < 5 * std / np.sqrt(20_000) + 0.01 * std).all()
    kurtosis = scipy.stats.kurtosis(new, axis=1, fisher=False)  # outputs of networks have long tails
    assert (np.abs(new.std(1) / std - 1) < 5 * np.sqrt((kurtosis - 1) / 80_000) + 0.01).all()
    at = np.linspace(mean[0] - 12 * std[0], mean[0] + 12 * std[0], 4001)
    density = np.exp([m.log_predictive_density(X[:1], [y])[0] for y in at[::20]])
    assert density.sum() * (at[20] - at[0]) == pytest.approx(1, abs=1e-3)
    low, high = m.predict_quantiles(X[:1], [0.1, 0.8])[0]
    for quantile, level in ((low, 0.1), (high, 0.8)):
        assert (new[0] < quantile).mean() == pytest.approx(level, abs=0.02)


#: What tables of few rows may be: X, y, a generator -> X, y.
AWKWARD = {
    "near copies of columns": lambda X, y, rng: (np.column_stack([X, X + 1e-9 * rng.normal(size=X.shape)]), y),
    "near copies of rows": lambda X, y, rng: (X[:1] + 1e-9 * rng.normal(size=X.shape), y),
    "copies of rows": lambda X, y, rng: (X[rng.randint(2, size=len(X))], y),
    "a constant column": lambda X, y, rng: (np.column_stack([X, np.full(len(X), rng.choice([0, 3.3, 1e12]))]), y),
    "constant columns": lambda X, y, rng: (np.full(X.shape, 3.3), y),
    "a constant y": lambda X, y, rng: (X, np.full(len(y), rng.choice([0, 1e-12, 1e12]))),
    "no noise": lambda X, y, rng: (X, X.sum(1)),
    "an outlier": lambda X, y, rng: (np.concatenate([1e9 * X[:1], X[1:]]), np.concatenate([1e9 * y[:1], y[1:]])),
    "far from zero": lambda X, y, rng: (X + 1e9, y - 1e9),
    "more columns than rows": lambda X, y, rng: (rng.normal(size=(len(X), 2 * len(X))), y),
    "counts": lambda X, y, rng: (X, rng.poisson(np.exp(X[:, 0].clip(max=3)))),
}


@given(
    kind=st.sampled_from(list(AWKWARD)),
    model=st.sampled_from(["process", "linear"]),
    n=st.integers(2, 40),
    log10_scales=st.tuples(st.floats(-12, 12), st.floats(-12, 12)),
    seed=st.integers(0, 10**6),
)
def test_tables_of_any_kind_and_scale_are_fitted(kind, model, n, log10_scales, seed):
    rng, (scale, scale_of_y) = np.random.RandomState(seed), np.power(10.0, log10_scales)
    x = rng.normal(size=(n, 2))
    x, y = AWKWARD[kind](x, x @ [1.0, -1.0] + 0.3 * rng.normal(size=n), rng)
    x, y = scale * x, scale_of_y * y
    m = KSIVIRegressor(model=model, approximator=Laplace(), n_draws=50, random_state=0).fit(x, y)
    for at in (x, 10 * x + scale):
        mean, std = m.predict(at, return_std=True)
        assert np.isfinite(mean).all()
        assert (np.isfinite(std) & (std > 0)).all()
    assert np.abs(m.predict(x) - y).max() <= 3 * (np.ptp(y) or 1) + 1e-6 * np.abs(y).max()


def test_a_curve_is_learned_its_functions_are_drawn_whole_and_where_there_are_no_data_little_is_known():
    rng = np.random.RandomState(0)
    x = np.concatenate([rng.uniform(-2, -0.5, 40), rng.uniform(0.5, 2, 40)])[:, None]
    y = np.sin(3 * x[:, 0]) + 0.1 * rng.normal(size=80)
    m = KSIVIRegressor(approximator=Laplace(), random_state=0).fit(x, y)
    std, between, beyond = (m.predict(at, return_std=True)[1] for at in (x, [[0.0]], [[6.0]]))
    assert m.score(x, np.sin(3 * x[:, 0])) > 0.98
    assert 0.08 < np.median(std) < 0.13
    assert between > 1.5 * np.median(std)
    assert beyond > 5 * np.median(std)
    m = KSIVIRegressor(approximator=Laplace(), n_draws=50, random_state=0).fit(x, np.sin(4 * x[:, 0]))
    at = np.array([[3.0], [3.01], [9.0]])
    y = m.sample_y(at, 4000)
    near, far = np.corrcoef(y)[0, 1:]
    assert near > 0.98 > 0.9 > far
    np.testing.assert_allclose(y.std(1), m.predict(at, return_std=True)[1], rtol=0.05)


def test_columns_of_y_are_regressed_each_by_itself():
    y = np.column_stack([Y, X[:, 0]])
    m = clone(ESTIMATORS[0]).fit(X, y)
    one = clone(ESTIMATORS[0]).fit(X, Y)
    both = np.stack(m.predict(X[:7], return_std=True))
    np.testing.assert_array_equal(both[:, :, 0], one.predict(X[:7], return_std=True))
    assert m.predict_quantiles(X[:7], [0.1, 0.9]).shape == (7, 2, 2)
    assert m.sample_y(X[:7], 3).shape == (7, 2, 3)
    density = sum(e.log_predictive_density(X[:7], y[:7, k]) for k, e in enumerate(m.estimators_))
    np.testing.assert_array_equal(m.log_predictive_density(X[:7], y[:7]), density)
    np.testing.assert_array_equal(m.fit(X, Y).predict(X[:7]), both[0, :, 0])


def test_weights_of_classes_are_those_of_their_rows():
    y = SPECIES == 2
    m = clone(ESTIMATORS[2])
    balanced = clone(m).set_params(class_weight="balanced").fit(IRIS, y)
    by_dict = clone(m).set_params(class_weight={False: 0.75, True: 1.5}).fit(IRIS, y)
    np.testing.assert_array_equal(balanced.predict_proba(IRIS), by_dict.predict_proba(IRIS))
    assert balanced.predict_proba(IRIS)[:, 1].mean() > m.fit(IRIS, y).predict_proba(IRIS)[:, 1].mean()


@pytest.mark.parametrize("m", [KSIVIClassifier(), KSIVIRegressor(), KSIVIRegressor(model="network")])
def test_parameters_of_the_default_approximator_are_set_as_those_of_a_given_one(m):
    given = {"bandwidth": 2.0, "whiten": "auto", "whiten__budget": 7}
    one = clone(m).set_params(**{f"approximator__{name}": value for name, value in given.items()})
    assert repr(clone(one).approximator) == repr(clone(m._default_approximator()).set_params(**given))
    assert clone(one).get_params()["approximator__whiten__budget"] == 7
    assert m.approximator is None
    with pytest.raises(ValueError, match="Invalid parameter 'width'"):
        one.set_params(approximator=None, n_draws=3, approximator__width=1)
    assert one.n_draws == m.n_draws


def test_a_model_and_parameters_of_its_default_approximator_are_searched_together(uncertified):
    own = {"max_iter": [2], "method": ["ksivi"], "whiten": ["laplace"]}
    grid = {"model": ["linear", "process"], **{f"approximator__{name}": values for name, values in own.items()}}
    search = GridSearchCV(KSIVIRegressor(random_state=0), grid, cv=2, error_score="raise").fit(X[:20, :2], Y[:20])
    assert search.best_estimator_.approximator_.n_iter_ == 2
    q = KSIVIRegressor().set_params(model="linear", approximator__max_iter=2).approximator
    assert q.get_params() == KSIVIApproximator(max_iter=2).get_params()


def test_sample_weights_are_routed_through_a_pipeline():
    w, Z = np.random.RandomState(0).randint(3, size=len(Y)), StandardScaler().fit_transform(X)
    with config_context(enable_metadata_routing=True):
        model = clone(ESTIMATORS[0]).set_fit_request(sample_weight=True)
        pipeline = make_pipeline(StandardScaler().set_fit_request(sample_weight=False), model)
        pipeline.fit(X, Y, sample_weight=w)
    weighted, unweighted = (clone(ESTIMATORS[0]).fit(Z, Y, sample_weight=given).predict(Z) for given in (w, None))
    np.testing.assert_array_equal(pipeline.predict(X), weighted)
    assert np.abs(weighted - unweighted).max() > 1


@pytest.mark.slow
def test_networks_of_many_rows_see_minibatches_and_trained_starts_are_better_than_random_ones():
    rng = np.random.RandomState(0)
    x = rng.normal(size=(1200, 2))
    y = x[:, 0] * x[:, 1] + 0.1 * rng.normal(size=1200)
    target = BayesianNeuralNetwork(x, y, n_hidden=10, hyperprior=(1.0, 0.1))
    theta = trained_weights(target, 3, np.random.RandomState(0))
    assert theta.shape == (3, target.n_features)
    assert (theta[:, -2] == 0).all()  # a log lambda that is learned
    assert target.rmse(theta[:1], x, y) < 0.5 < y.std()
    chains = KSIVIApproximator(whiten=Pilot("diagonal", budget=8000), scale=Scale(floor=1e-5), max_iter=20)
    model = KSIVIRegressor(model="network", n_hidden=10, approximator=chains, random_state=0).fit(x, y)
    assert model.score(x, y) > 0.9


@pytest.mark.parametrize("approximator", [Laplace(), TINY])
def test_any_approximator_will_do_and_is_left_alone(approximator, uncertified):
    m = KSIVIRegressor(model="linear", approximator=approximator, random_state=0).fit(X, Y)
    assert m.score(X, Y) > 0.45
    assert approximator.random_state is None
    assert not hasattr(approximator, "n_features_in_")
    again = KSIVIRegressor(model="linear", approximator=approximator, random_state=0).fit(X, Y)
    np.testing.assert_array_equal(again.predict(X), m.predict(X))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(m)).predict(X), m.predict(X))  # noqa: S301


LINEAR = KSIVIRegressor(model="linear", approximator=Laplace(), random_state=0)
WEIGHTS = (np.zeros(len(Y)), -np.ones(len(Y)), np.ones(3), ["a"] * len(Y))
BY_CLASS = ({0: -1.0, 1: 1.0}, {0: "a"}, {0: np.nan})
TWO = np.column_stack([Y, Y])
COLUMNS = (Y, np.column_stack([Y, Y, Y]), TWO[:7])
#: What is done with a regressor, and what is said of it.
WRONG = [
    (lambda m: m.set_params(model="cubic").fit(X, Y), "'model'"),
    (lambda m: m.set_params(n_draws=0).fit(X, Y), "'n_draws'"),
    (lambda m: m.set_params(hyperprior=(1.0, -1.0)).fit(X, Y), "`hyperprior`"),
    (lambda m: m.set_params(hyperprior=("a", "b")).fit(X, Y), "`hyperprior`"),
    (lambda m: m.set_params(approximator="laplace").fit(X, Y), "'approximator'"),
    *((lambda m, w=w: m.fit(X, Y, sample_weight=w), "`sample_weight`") for w in WEIGHTS),
    *((lambda _, w=w: KSIVIClassifier(class_weight=w).fit(X, Y > 140), "`class_weight` must give") for w in BY_CLASS),
    (lambda m: m.fit(X, Y).log_predictive_density(X[:4], Y[:3]), r"`y` has shape \(3,\), expected \(4,\)"),
    (lambda m: m.fit(X, Y).log_predictive_density(X[:1], [np.nan]), "y contains NaN"),
    (lambda m: m.fit(X, Y).sample_y(X, -1), "n_samples == -1"),
    (lambda m: m.fit(X, Y).sample_y(X, True), "`n_samples` must be an int, got the truth value True"),
    *((lambda m, q=q: m.fit(X, Y).predict_quantiles(X, q), "quantiles") for q in ([0.0], [1.2], 0.5)),
    (lambda m: m.fit(X, Y).predict_quantiles(X, ["half"]), "`quantiles` must hold real numbers, got an array of <U4"),
    (lambda _: clone(ESTIMATORS[2]).fit(IRIS, SPECIES).predict_quantiles(IRIS, [1.0]), "quantiles"),
    (lambda m: summary(m.fit(X, TWO)), r"pass model\.estimators_\[0\]"),
    (lambda m: summary(m.fit(X, Y), m.target_), r"pass model\.approximator_ and model\.target_"),
    (lambda m: m.fit(X, np.full(len(X), "a")), "`y` must hold real numbers, got an array of <U1"),
    *((lambda m, y=y: m.fit(X, TWO).log_predictive_density(X, y), r"expected \(442, 2\)") for y in COLUMNS),
]


@every("act, message", WRONG)
def test_what_is_wrong_is_named(act, message):
    refused((ValueError, TypeError), message, lambda: act(clone(LINEAR)))


@every_view
@pytest.mark.parametrize("estimator", [ESTIMATORS[0], ESTIMATORS[2]])
def test_data_may_have_any_layout(estimator, view):
    x, y, w = X[:40], 1.0 * (Y[:40] > 140), np.ones(40)
    expected = clone(estimator).fit(x, y, w).predict(x)
    m = clone(estimator).fit(view(x), view(y), view(w))
    m.draws_ = view(m.draws_)  # as joblib may hand them to its workers
    np.testing.assert_array_equal(m.predict(view(x)), expected)
    frame = pd.DataFrame(view(x))
    np.testing.assert_array_equal(clone(estimator).fit(frame, pd.Series(y), w).predict(frame), expected)


@pytest.mark.parametrize("model", ["linear", "process"])
def test_predictions_are_of_the_model_that_was_fitted(model):
    m = clone(ESTIMATORS[1]).set_params(model=model).fit(X[:100], Y[:100])
    expected = m.predict(X)
    m.set_params(model={"linear": "network", "process": "linear"}[model])
    np.testing.assert_array_equal(m.predict(X), expected)


@pytest.mark.parametrize("q", [MeanFieldVI(max_iter=2), SVGD(n_particles=50, max_iter=2)])
def test_predictions_of_many_rows_are_made_in_parts(q, monkeypatch):
    model = "linear" if isinstance(q, MeanFieldVI) else "network"
    m = KSIVIRegressor(model=model, n_hidden=2, approximator=q, n_draws=50, random_state=0).fit(X[:50], Y[:50])
    outputs = KSIVIRegressor._outputs

    def predictions():
        return m.predict(X), *m.predict(X, return_std=True), m.sample_y(X, 3), m.log_predictive_density(X, Y)

    whole = predictions()
    monkeypatch.setattr(_predictors, "CHUNK", 50 * 7)
    with patch.object(KSIVIRegressor, "_outputs", autospec=True, side_effect=outputs) as asked:
        for one, other in zip(predictions(), whole, strict=True):
            np.testing.assert_allclose(one, other)
    assert max(len(call.args[1]) for call in asked.call_args_list) == 7


def named(X):
    return pd.DataFrame(1e3 * X + 5).add_prefix("measure ")


@pytest.mark.parametrize("y", [Y, np.column_stack([Y, X[:, 0]])], ids=["one", "several"])
def test_coefficients_of_a_linear_regressor_give_its_predictions(y):
    m = clone(ESTIMATORS[0]).fit(named(X), y)
    assert m.coef_.shape == (*y.shape[1:], 10)
    np.testing.assert_allclose(named(X).to_numpy() @ m.coef_.T + m.intercept_, m.predict(named(X)), rtol=1e-6)
    assert (list(m.draw_names_[:2]), len(m.draw_names_)) == (["intercept", "measure 0"], 13)


def test_the_table_of_a_regressor_is_that_of_least_squares_in_the_units_of_the_data():
    frame = named(X[:, :4]).rename(columns={"measure 0": "intercept"})  # a name that is taken
    m = KSIVIRegressor(model="linear", hyperprior=(1e-3, 1e-3), random_state=0).fit(frame, 10 * Y)
    with patch.object(m.target_, "score_fn", None), patch.object(m.target_, "log_prob", None):  # no call of either
        table = summary(m)
    names = "intercept", "intercept (x0)", "measure 1", "measure 2", "measure 3", "prior precision", "noise sd"
    assert table.names == summary(m, random_state=1).names == names
    A = np.column_stack([np.ones(len(X)), frame])
    beta, (rss,) = np.linalg.lstsq(A, 10 * Y)[:2]
    se = np.sqrt(rss / (len(Y) - 5) * np.linalg.inv(A.T @ A).diagonal())
    assert (np.abs(table.mean[:5] - beta) < 0.3 * se + 5 * table.mean_se[:5]).all()  # the prior shrinks
    np.testing.assert_allclose(table.sd[:5], se, rtol=0.1)
    assert table.mean[-1] == pytest.approx((rss / (len(Y) - 5)) ** 0.5, rel=0.01)
    assert m.verdict_.good
    assert m.verdict_.errors.mean.shape >= (7 + 3,)  # coordinates, and parameters that are not these in other units
    assert diagnose(m, n_samples=500, random_state=0)["errors"].verdict == "ok"


@pytest.mark.parametrize("k", [2, 3])
def test_the_table_of_a_classifier_has_the_coefficients_that_predict(k):
    labels = np.array(["a", "b", "c"])[np.minimum(SPECIES, k - 1)]
    m = clone(ESTIMATORS[2]).fit(named(IRIS), labels)
    drawn = m.target_.constrain(m.draws_)
    assert summary(m, n_samples=200).names == tuple(drawn) == tuple(m.draw_names_)
    B = np.array(list(drawn.values())).reshape(5, -1, m.n_draws)
    np.testing.assert_allclose(B.mean(-1).T, np.column_stack([m.intercept_, m.coef_]))
    logits = B[0] + np.einsum("np,pks->nks", named(IRIS), B[1:])
    p = scipy.special.softmax(np.concatenate([0 * logits, logits], 1) if k == 2 else logits, axis=1)
    expected = p.mean(-1), p.std(-1), *np.quantile(p, [0.1, 0.9], axis=-1)
    quantiles = np.moveaxis(m.predict_quantiles(named(IRIS), [0.1, 0.9]), -1, 0)
    for one, other in zip((*m.predict_proba(named(IRIS), return_std=True), *quantiles), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-9)


@pytest.mark.parametrize("m", [ESTIMATORS[1], clone(ESTIMATORS[1]).set_params(prior_precision=None), ESTIMATORS[3]])
@pytest.mark.parametrize("q", [Laplace(), SVGD(n_particles=50, max_iter=2)])  # with a density and without
def test_what_is_not_linear_has_a_table_without_coefficients(m, q):
    m = clone(m).set_params(approximator=q)
    assert not any(hasattr(m, name) for name in ("coef_", "intercept_", "draw_names_", "verdict_"))
    m.fit(X[:40, :2], Y[:40])
    assert not hasattr(m, "coef_")
    assert "coef_" not in dir(m) or "__dir__" not in vars(BaseEstimator)  # before scikit-learn 1.8
    names = [name for name in m.draw_names_ if not name.startswith("log(")] or ["prior precision (relative)"]
    assert summary(m).names[: len(names)] == tuple(names)
    np.testing.assert_allclose(m.target_.constrain(m.draws_)["noise sd"] ** 2, m._noise_variance(m.draws_)[:, 0])


RNG = np.random.RandomState(0)
ROWS = RNG.normal(size=(40, 2))
VALUES = np.sin(2 * ROWS[:, 0]) + 0.2 * RNG.normal(size=40)
VALUES = (VALUES - VALUES.mean()) / VALUES.std()
ONES = np.ones(40)
THETA = torch.tensor([-1.5, -1.0, 0.1, 0.2, 0.6], dtype=torch.float64)
NOISE = float(torch.exp(2 * THETA[0])) + LEAST_NOISE


def kernel_of(theta, profile):
    a, c, *scales = np.exp(theta[1:].numpy())
    smooth = {"gaussian": RBF(scales), "matern": Matern(scales, nu=1.5)}[profile]
    return ConstantKernel(1.0) + ConstantKernel(a**2) * DotProduct(1e-9) + ConstantKernel(c**2) * smooth


@every("profile", list(PROFILES))
def test_the_evidence_is_the_density_of_y(profile):
    K = kernel_of(THETA, profile)(ROWS) + NOISE * np.eye(40)
    x, y, w = map(torch.as_tensor, (ROWS, VALUES, ONES))
    means, spreads = _process.before(5, 2)
    found = log_evidence(THETA, profile, x, y, w) + ((THETA - means) / spreads).square().sum() / 2
    expected = multivariate_normal(np.zeros(40), K).logpdf(VALUES) + 20 * np.log(2 * np.pi)
    assert float(found) == pytest.approx(expected, rel=1e-6)


@every("profile", list(PROFILES))
def test_predictions_at_the_highest_evidence_are_those_of_scikit_learn(profile, monkeypatch):
    hyper = _process.Hyper(THETA, profile, 0.0)
    monkeypatch.setattr(_process, "choose", lambda *data: hyper)
    process, _ = fit_process(ROWS, VALUES, ONES, 1.0, RNG)
    theirs = GaussianProcessRegressor(kernel_of(THETA, profile), alpha=NOISE, optimizer=None).fit(ROWS, VALUES)
    new = np.random.RandomState(1).normal(size=(30, 2)) * 2
    mean, sd = theirs.predict(new, return_std=True)
    phi, left_out = process.features(new)
    beta, variance = process.coefficients(np.zeros((1, 2)))
    np.testing.assert_allclose(phi @ beta[0], mean, atol=2e-4)
    np.testing.assert_allclose(np.square(phi) @ variance[0] + left_out, sd**2, atol=2e-4)


def test_the_posterior_of_the_precisions_is_that_with_coefficients():
    e, h, yy, n, a = torch.tensor([3.0, 0.5]).double(), torch.tensor([2.0, -0.4]).double(), 4.0, 7.0, 1.5
    target = Precisions(e, h, yy, n, a)

    def log_integral(x):
        lam, gam = np.exp(x)

        def joint(*b):
            error = yy - 2 * h.numpy() @ b + e.numpy() @ np.square(b)
            return lam * gam ** (n / 2) * np.exp(-(gam * error + lam * np.dot(b, b)) / 2)

        return np.log(dblquad(joint, -15, 15, -15, 15)[0]) + a * (x.sum() - lam - gam)

    points = np.array([[0.0, 0.0], [0.7, -0.5]])
    ours, expected = target.log_prob(torch.as_tensor(points)).numpy(), [log_integral(x) for x in points]
    np.testing.assert_allclose(np.diff(ours), np.diff(expected), rtol=1e-5, atol=1e-6)


def test_of_many_rows_some_are_centres_and_all_are_seen(monkeypatch):
    monkeypatch.setattr(_process, "N_ROWS", 30)
    process, posterior = fit_process(ROWS, VALUES, ONES, 1.0, np.random.RandomState(0))
    assert (len(process.centres), posterior.n) == (30, 40)
