"""Whether a fit is trained, what it returns, and what it says of itself."""

import copy
import re
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from approximators import gaussian_score, short_fits
from joblib import parallel_config
from members import every, refused
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.experimental import enable_halving_search_cv  # noqa: F401
from sklearn.model_selection import GridSearchCV, cross_val_score

from skksivi import HKSIVIApproximator, KSIVIApproximator, diagnose
from skksivi.model_selection import Replicates, neg_distance_scorer, neg_divergence_scorer, neg_ksd_scorer
from skksivi.parameters import Adam, Network, Pilot, Scale
from skksivi.targets import from_score_fn
from skksivi.terms import Entropic

BOTH = [KSIVIApproximator, HKSIVIApproximator]

#: A value of each training parameter, often that of "auto", since any value counts.
SET = {
    "kernel": "gaussian", "bandwidth": "median", "gradient_estimator": "u-statistic", "latent_dim": 2,
    "hidden_layer_sizes": (50, 50), "mixing": "pilot", "scale": Scale(), "initial_scale": 0.25, "batch_size": 128,
    "learning_rate": 5e-3, "optimizer": Adam(), "annealing": "linear", "terms": [Entropic(0.1)],
}  # fmt: skip


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


def fit(cls=KSIVIApproximator, **parameters):
    return cls(max_iter=3, random_state=0, **parameters).fit(gaussian_score, n_features=2)


def test_a_fit_whose_training_parameters_are_left_alone_is_its_good_start():
    q = fit()
    assert (q.n_iter_, q.best_iter_, len(q.loss_curve_)) == (0, 0, 0)
    assert q.fitted_by_ == "importance sampling"
    np.testing.assert_array_equal(q.sample(5), fit(method="start", early_stopping=0.1).sample(5))


def test_the_layers_of_a_hierarchy_are_trained_because_they_move_the_points_of_the_pilot(quiet):
    assert (fit(HKSIVIApproximator).n_iter_, fit(HKSIVIApproximator, method="start").n_iter_) == (3, 0)


def test_setting_a_training_parameter_trains(quiet, uncertified):
    """A hierarchy is trained in any case."""
    assert KSIVIApproximator()._resolved().method == "auto"
    for name in KSIVIApproximator._training:
        assert KSIVIApproximator(**{name: SET[name]})._resolved().method == "ksivi"
    assert fit(bandwidth="median").fitted_by_ == "kernel Stein discrepancy"


@pytest.mark.parametrize("cls", BOTH)
def test_a_method_says_how_a_fit_is_made(cls, quiet, uncertified):
    by = {method: fit(cls, method=method).fitted_by_ for method in ("ksivi", "path", "start")}
    assert (by["ksivi"], by["path"]) == ("kernel Stein discrepancy", "path gradient")
    with pytest.warns(UserWarning, match=r"`method` is 'start', so `batch_size`, `learning_rate` will be ignored"):
        assert fit(cls, method="start", batch_size=8, learning_rate=0.1).fitted_by_ == by["start"]
    both = {"method": "path", "gradient_estimator": "vanilla"}
    refused(ValueError, "'vanilla'.* but `method` is 'path'", lambda: fit(cls, **both))


def test_what_shapes_the_start_is_not_ignored():
    q = fit(method="start", mixing="normal", latent_dim=1, initial_scale=0.5, scale=Scale(floor=0.1))
    assert q.family_.mixing.latent_dim == 1
    assert q.certificate_ is not None


@pytest.mark.parametrize("cls", BOTH)
def test_no_call_is_spent_on_a_verdict_that_nobody_asks_for(cls, quiet):
    trained, at_start = (fit(cls, certify=False, method=by) for by in ("ksivi", "start"))
    assert trained.verdict_ is None
    assert "certificate" not in {stage.name for q in (trained, at_start) for stage in q.stages_}
    assert cls is HKSIVIApproximator or at_start.verdict_.good  # by the draws of the start


def test_a_training_with_low_effort_is_told(quiet, uncertified):
    with pytest.warns(UserWarning, match=r"since `method` is 'ksivi', although the `effort` of Pilot is 'low'"):
        assert fit(method="ksivi", whiten=Pilot(effort="low")).n_iter_ == 3
    with pytest.warns(UserWarning, match=r"since `kernel` is set, although"):
        fit(kernel="imq", whiten=Pilot(effort="low"))


@every(
    "parameters, made",
    [
        ({}, "importance sampling"),
        ({"gradient_estimator": "vanilla"}, "kernel Stein discrepancy"),
        ({"whiten": "laplace", "method": "start"}, "Laplace approximation"),
        ({"whiten": (np.zeros(2), np.eye(2)), "method": "start"}, "given coordinates"),
        ({"whiten": None}, "path gradient"),
        ({"whiten": Pilot("diagonal", budget=20_000), "method": "start"}, "underdamped Langevin chains"),
    ],
)
def test_a_fit_says_how_it_was_made(parameters, made, quiet):
    q = fit(**parameters, early_stopping=False)
    assert q.fitted_by_ == made
    assert repr(q).endswith(f"  # fitted by {made}")
    assert "fitted by" not in repr(clone(q))
    assert repr(copy.deepcopy(q)) == repr(q)
    assert q.whitening_.converged == isinstance(parameters.get("whiten", Pilot()), Pilot)  # others nobody has checked
    if "method" in parameters:
        report = diagnose(q, gaussian_score, n_samples=100, random_state=0)
        assert f"by {made}, from" in re.sub(r"\s+", " ", str(report))


def test_a_training_that_nobody_asked_for_returns_its_start_where_it_fails(monkeypatch):
    def fails(*_):
        raise FloatingPointError("the loss is not finite")

    monkeypatch.setattr("skksivi.estimators._ksd.SteinTrained._needs_training", lambda *_: True)
    monkeypatch.setattr("skksivi.training._loop._check_finite", fails)
    with pytest.warns(ConvergenceWarning, match="A training of it failed: the loss is not finite"):
        q = KSIVIApproximator(random_state=0).fit(gaussian_score, n_features=2)
    assert q.fitted_by_ == "importance sampling"
    with pytest.raises(FloatingPointError, match="the loss is not finite"):
        KSIVIApproximator(method="path", random_state=0).fit(gaussian_score, n_features=2)


#: A training that leads away from any good start.
SPOILT = {
    KSIVIApproximator: {"method": "path", "learning_rate": 0.5, "batch_size": 8, "max_iter": 200},
    HKSIVIApproximator: {"method": "path", "learning_rate": 0.2, "batch_size": 8, "max_iter": 100},
}
EXACT = np.array([1.0, -2.0]), np.linalg.cholesky([[2.0, 0.6], [0.6, 0.5]])


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("whiten", ["auto", EXACT], ids=["auto", "exact"])
def test_a_start_that_is_clearly_better_is_returned_with_a_warning(cls, whiten):
    q = cls(whiten=whiten, random_state=0, **SPOILT[cls])
    with pytest.warns(ConvergenceWarning, match=r"did not improve on its start, which is returned|is kept\. Lower"):
        q.fit(gaussian_score, n_features=2)
    assert (q.best_iter_, q.n_iter_, len(q.loss_curve_)) == (0, q.max_iter, q.max_iter)
    assert q.fitted_by_ in ("importance sampling", "batch and match", "given coordinates")
    wide = q.sample(4000).std(0) / np.sqrt([2.0, 0.5])  # the layers of an exact base are a little so
    assert np.abs(wide - 1).max() < 0.2


def test_nothing_is_said_of_a_training_that_is_good_though_its_start_was_better(quiet):
    q = KSIVIApproximator(whiten="laplace", max_iter=300, random_state=0).fit(torch.neg, n_features=10)
    assert q.best_iter_ == q.n_iter_ > 0
    assert q.verdict_.good


@pytest.mark.parametrize("cls", BOTH)
def test_the_last_state_is_returned_where_nothing_is_to_end_the_training(cls, quiet):
    q = cls(early_stopping=False, random_state=0, **SPOILT[cls]).fit(gaussian_score, n_features=2)
    assert (q.best_iter_, q.n_iter_) == (q.max_iter, q.max_iter)
    assert np.abs(q.sample(4000).std(axis=0) / np.sqrt([2.0, 0.5]) - 1).max() > 0.1


TARGET = from_score_fn(gaussian_score, n_features=2)


def test_the_grades_of_settings_that_train_differ(quiet):
    q = KSIVIApproximator(max_iter=20, random_state=0)
    grades = [cross_val_score(clone(q).set_params(learning_rate=r), TARGET, cv=Replicates(1)) for r in (1e-4, 1e-2)]
    assert not np.intersect1d(*grades).size


@pytest.mark.parametrize(
    "scoring",
    [None, neg_ksd_scorer(n_samples=50), neg_distance_scorer(np.eye(2)), neg_divergence_scorer(n_samples=100)],
    ids=["own", "ksd", "distance", "divergence"],
)
def test_a_search_over_what_does_nothing_is_told(scoring):
    options = {"cv": Replicates(1), "scoring": scoring, "refit": False}
    search = GridSearchCV(KSIVIApproximator(random_state=0), {"max_iter": [10, 20]}, **options)
    with pytest.warns(UserWarning, match=r"is its start, by .* set method='ksivi'.* `max_iter` did not change"):
        search.fit(TARGET)


def test_a_network_is_the_whole_mean_without_a_linear_skip(quiet):
    torch.manual_seed(0)
    q = fit(hidden_layer_sizes=Network((5,), linear_skip=False), whiten="laplace", early_stopping=False)
    with pytest.raises(ValueError, match="`hidden_layer_sizes` must hold positive integers"):
        fit(hidden_layer_sizes=Network((0,)))
    assert sum(p.numel() for p in q.family_.mean.parameters()) == 2 * 5 + 5 + 5 * 2 + 2


SEARCHES = (Path(__file__).parents[1] / "doc" / "sklearn.rst").read_text("utf-8")


@pytest.mark.slow
def test_each_listing_of_the_manual_searches(quiet):
    listings = re.findall(r"code-block:: python\n\n(.*?)\n\n(?=\S)", SEARCHES, re.DOTALL)
    found = {"target": TARGET}
    distributed = pytest.importorskip("distributed", reason="needs dask")
    with (
        short_fits(),
        distributed.LocalCluster(2, processes=False, dashboard_address="127.0.0.1:0") as found["cluster"],
    ):
        for listing in listings:
            code = listing.replace('"tcp://scheduler:8786"', "cluster").replace("Replicates(3)", "Replicates(2)")
            code = code.replace('["auto", 0.5, 1.0]', '["auto"]')  # of the bandwidth
            with parallel_config("threading"):
                exec(textwrap.dedent(code), found)  # noqa: S102
            results = found["search"].cv_results_
            scores = results.get("mean_test_score", results.get("mean_test_divergence"))
            assert len(set(scores)) == len(scores) == 4
    assert len(listings) == 3


def test_training_parameters_that_are_left_alone_have_the_values_of_the_docstring(quiet):
    written = {"hidden_layer_sizes": (100, 100), "batch_size": 32, "learning_rate": 5e-3, "initial_scale": 0.25}
    written |= {"kernel": "gaussian", "optimizer": Adam(warm_up=200)}
    a, b = (fit(method="path", early_stopping=False, whiten="laplace", **more) for more in ({}, written))
    np.testing.assert_array_equal(a.sample(5), b.sample(5))
