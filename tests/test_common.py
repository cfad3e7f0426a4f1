"""The contract of every approximator."""

import copy
import hashlib
import io
import itertools
import pickle
import subprocess
import sys
import xml.etree.ElementTree
from functools import cache
from inspect import signature

import approximators
import joblib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import scipy.stats
import torch
from approximators import APPROXIMATORS, COVARIANCE, MEAN, GaussianTarget, gaussian_score, good_fit, short
from awkward_arrays import every_view
from hypothesis import given
from hypothesis import strategies as st
from members import every, refused
from misbehaving import Misbehaving, raising
from plain_targets import UnmovableModule
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import skksivi
from skksivi import (
    HKSIVIApproximator,
    KSIVIApproximator,
    baselines,
    diagnose,
    expectation,
    importance_sample,
    summary,
)
from skksivi.base import LEAST_WIDTH, BaseApproximator
from skksivi.baselines import MIED, SIVI, SVGD, FullRankVI, KSDDescent, Laplace, MeanFieldVI
from skksivi.calibration import Calibration
from skksivi.kernels import IMQ
from skksivi.model_selection import Replicates
from skksivi.plotting import ForestDisplay
from skksivi.predictors import KSIVIClassifier, KSIVIRegressor
from skksivi.targets import Banana, EightGaussians, from_log_prob, from_score_fn

# Of a few iterations, which converge nowhere.
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")

#: What holds of every good fit, and of every short one; the functions below that are appended to these.
OF_A_GOOD_FIT, OF_A_SHORT_FIT = [], []

#: Each in a few iterations, and one whose chains come before the training, as by default.
REPEATABLE = {type(q).__name__: short(q) for q in APPROXIMATORS}
REPEATABLE["piloted"] = short(KSIVIApproximator(random_state=0)).set_params(whiten="auto", whiten__budget=1000)
EVERY_SHORT = pytest.mark.parametrize("k", REPEATABLE)


@pytest.mark.parametrize("name", [type(q).__name__ for q in APPROXIMATORS])
def test_a_good_fit_keeps_the_contract(name):
    for check in OF_A_GOOD_FIT:
        check(good_fit(name))


@EVERY_SHORT
def test_a_short_fit_keeps_the_contract(k):
    for check in OF_A_SHORT_FIT:
        check(k)


def test_every_approximator_is_under_contract():
    own = [getattr(skksivi, name) for name in skksivi.__all__ if name.endswith("Approximator")]
    public = [*own, *(getattr(skksivi.baselines, name) for name in skksivi.baselines.__all__)]
    assert {type(q) for q in APPROXIMATORS} == set(public)


def test_what_the_base_class_does_is_done_by_it_alone():
    """So that a few of them will do for all."""
    for cls in map(type, APPROXIMATORS):
        for name in ("fit", "score", "score_samples"):
            assert getattr(cls, name) is getattr(BaseApproximator, name)
        assert cls.sample in (BaseApproximator.sample, HKSIVIApproximator.sample)


A_FEW_FITS = [short(KSIVIApproximator(random_state=0)), Laplace(random_state=0)]
A_FEW = pytest.mark.parametrize("q", A_FEW_FITS, ids=lambda q: type(q).__name__)


@A_FEW
@pytest.mark.filterwarnings("always")
def test_warnings_point_at_the_line_that_called_fit(q, recwarn):
    turning = torch.tensor([[-1.0, 0.9], [-0.9, -1.0]])
    clone(q).fit(lambda x: x @ turning.mT.to(x), n_features=2)
    assert any("not symmetric" in str(w.message) for w in recwarn)
    assert {w.filename for w in recwarn} == {__file__}


@OF_A_GOOD_FIT.append
def draws_have_the_moments_of_the_target(fitted):
    X = fitted.sample(20_000, random_state=1)
    covariance = approximators.covariance_of_fit(fitted).numpy()
    sd = np.sqrt(np.diag(covariance))
    assert np.abs((X.mean(0) - MEAN.numpy()) / sd).max() < 0.1
    assert np.abs((np.cov(X.T) - covariance) / np.outer(sd, sd)).max() < 0.1


@OF_A_GOOD_FIT.append
def sample_has_the_shape_and_type_asked_for_and_a_stream_that_a_seed_repeats(fitted):
    for n in (0, 1, 7):
        X = fitted.sample(n)
        assert isinstance(X, np.ndarray)
        assert (X.shape, X.dtype) == ((n, 2), fitted.dtype)
    assert not np.array_equal(fitted.sample(5), fitted.sample(5))
    np.testing.assert_array_equal(fitted.sample(5, random_state=1), fitted.sample(5, random_state=1))


@OF_A_GOOD_FIT.append
def sample_in_chunks_has_the_same_law(fitted):
    whole = fitted.sample(5000, random_state=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skksivi.base.CHUNK", 500 * LEAST_WIDTH)
        parts = fitted.sample(5000, random_state=3)
    standard_errors = (whole.mean(0) - parts.mean(0)) / whole.std(0) * np.sqrt(2500)
    assert np.abs(standard_errors).max() < 4
    assert len(np.unique(parts, axis=0)) == len(np.unique(whole, axis=0))  # states and points are not picked twice


@OF_A_GOOD_FIT.append
def score_samples_is_the_log_density_of_the_target_and_score_its_mean(fitted):
    X = np.random.RandomState(0).multivariate_normal(MEAN.numpy(), COVARIANCE.numpy(), 200)
    if not approximators.has_density(fitted):
        for judge, remedy in ((fitted.score_samples, ""), (fitted.score, "; score it against a target")):
            refused(TypeError, f"has no density{remedy}", judge, X)
        return
    assert fitted.score(X) == pytest.approx(fitted.score_samples(X).mean())
    law = torch.distributions.MultivariateNormal(MEAN.double(), approximators.covariance_of_fit(fitted).double())
    expected = law.log_prob(torch.as_tensor(X))
    assert np.mean(np.abs(fitted.score_samples(X) - expected.numpy())) < 0.1


@cache
def grade_of_a_worse_fit():
    return Laplace(random_state=0).fit(lambda x: gaussian_score(x - 0.5), n_features=2).score(gaussian_score)


@OF_A_GOOD_FIT.append
def a_mixture_of_gaussians_is_shown_as_one_and_nothing_else_is(fitted):
    fits = [fitted]
    if isinstance(fitted, Laplace):
        eight = EightGaussians()
        fits += [KSIVIApproximator(method="start", random_state=0).fit(t) for t in (eight, GaussianTarget())]
    for q in fits:
        assert {"weights_", "means_", "covariances_"} & set(dir(type(q)())) == set()
        if not (isinstance(q, Laplace | MeanFieldVI | FullRankVI | baselines.BatchAndMatch) or q is not fitted):
            with pytest.raises(AttributeError, match=r"is no mixture of Gaussians, so there are no `weights_`"):
                _ = q.means_
            continue
        X, parts = q.sample(20), zip(q.weights_, q.means_, q.covariances_, strict=True)
        density = sum(w * scipy.stats.multivariate_normal(m, C).pdf(X) for w, m, C in parts)
        np.testing.assert_allclose(np.log(density), q.score_samples(X), atol=1e-5)


@pytest.mark.parametrize("cls", [KSIVIApproximator, HKSIVIApproximator])
def test_a_fit_shows_what_it_was_made_with(cls, uncertified):
    """No parameter of the training stays open, and the fit that has them all is the same fit."""
    q = short(cls(random_state=0)).set_params(batch_size="auto", hidden_layer_sizes="auto", kernel="imq")
    q.set_params(method="path").fit(gaussian_score, n_features=2)
    assert q.gradient_estimator_ is None  # of the discrepancy
    left_out = ("annealing", "terms", "bandwidth", "bridge", "gradient_estimator")
    names = [name for name in q._training if name not in left_out]
    made = {name: getattr(q, f"{name}_") for name in names}
    assert not any(value is None or (isinstance(value, str) and value == "auto") for value in made.values())
    assert isinstance(made["kernel"], IMQ)
    assert np.all(np.isfinite(q.bandwidth_))
    again = clone(q).set_params(**made | {"kernel": "imq"}).fit(gaussian_score, n_features=2)
    np.testing.assert_array_equal(again.sample(9), q.sample(9))
    start = cls(method="start", whiten="laplace").fit(gaussian_score, n_features=2)
    assert (start.bandwidth_, start.mixing_) == (None, "normal")


@OF_A_GOOD_FIT.append
def score_of_a_target_prefers_the_better_fit(fitted):
    assert grade_of_a_worse_fit() < fitted.score(gaussian_score) < 0.05


def score_by_autograd(x):
    return torch.autograd.grad(GaussianTarget().log_prob(x).sum(), x, create_graph=True)[0]


@every("judged", [gaussian_score, GaussianTarget(), score_by_autograd])
def test_a_target_is_judged_by_its_score_and_the_same_each_time(judged):
    q, before = good_fit("Laplace"), approximators.global_state()
    assert q.score(judged) == q.score(judged) == pytest.approx(q.score(gaussian_score), rel=1e-3)
    assert approximators.global_state() == before


@every_view
def test_arrays_are_scored_and_started_from_whatever_their_layout(view):
    X, start = np.random.RandomState(0).normal(size=(9, 2)), np.array([3.0, -1.0])
    q, other = (Laplace(init=init).fit(gaussian_score, n_features=2) for init in (start, view(start)))
    np.testing.assert_array_equal(other.score_samples(view(X)), q.score_samples(X))


def test_a_score_function_that_is_a_module_is_left_where_it_is():
    module = UnmovableModule(gaussian_score)
    q = Laplace(random_state=0).fit(module, n_features=2)
    assert q.score(module) == q.score(gaussian_score)


def test_reports_are_shown_in_a_notebook_with_every_word_escaped():
    names = ("<b>", "b&w")
    target = from_log_prob(GaussianTarget().log_prob, 2, names=names)
    q = Laplace(random_state=0).fit(target)
    calibrated = Calibration(np.zeros((50, 2), int), 9, names)
    for shown, words in (
        (summary(q, target, random_state=0), ("&lt;b&gt;", "b&amp;w", "score calls", "\u00b1")),
        (diagnose(q, target, n_samples=500, random_state=0), ("Laplace, 500 draws", "Stein variances", "calls: ")),
        (importance_sample(q, target, random_state=0).certificate(), ("nats", "k-hat", "reliable", "\u00b1")),
        (skksivi.evidence(q), ("log evidence", "\u00b1", "reliable")),
        (skksivi.modes(q, target, random_state=0), ("weights", "1 \u00b1 0")),
        (good_fit("KSIVIApproximator").verdict_, ("grade", "by")),
        (good_fit("KSIVIApproximator").whitening_, ("found by", "score calls")),
        (calibrated, ("50 replications", "&lt;b&gt;", "b&amp;w", "draws too narrow")),
    ):
        page = shown._repr_html_()
        xml.etree.ElementTree.fromstring(f"<div>{page}</div>")  # noqa: S314
        assert all(word in page for word in words), page
        assert "<table>" in page
        assert "array(" not in repr(shown)


def test_a_search_is_shown_in_a_notebook_as_is_its_best_fit():
    search = GridSearchCV(A_FEW_FITS[1], {"random_state": [0]}, cv=Replicates(2)).fit(GaussianTarget())
    assert {"fit", "score"} <= set(dir(search.best_estimator_)) & set(dir(search))
    assert "Laplace" in search._repr_html_()


@cache
def first_fit(k):
    """A short fit, of a score that it keeps only if it samples by it, and how often that was called."""
    score_fn = Misbehaving(None, np.inf, score_fn=gaussian_score)
    q = clone(REPEATABLE[k])
    keeps_score = isinstance(q, HKSIVIApproximator | baselines.HSIVISM)
    return q.fit(gaussian_score if keeps_score else score_fn, n_features=2), score_fn.n_calls


@OF_A_SHORT_FIT.append
def a_fit_is_cloned_copied_pickled_shown_and_drawn(k):
    q, file = copy.deepcopy(first_fit(k)[0]), io.BytesIO()
    joblib.dump(q, file)
    file.seek(0)
    for copied in (pickle.loads(pickle.dumps(q)), joblib.load(file), copy.deepcopy(q)):  # noqa: S301
        np.testing.assert_array_equal(copied.sample(9, random_state=2), q.sample(9, random_state=2))
        np.testing.assert_array_equal(copied.sample(9), copy.deepcopy(q).sample(9))
    name, nonsense = type(q).__name__, type(q)()
    for parameter in nonsense.get_params(deep=False):
        setattr(nonsense, parameter, object())
    assert "sample" in dir(nonsense)  # for which scikit-learn evaluates every property
    assert {"fit", "score"} <= set(dir(q)) & set(dir(type(q)()))
    assert all(name in shown for shown in (repr(q), q._repr_html_(), type(q)()._repr_html_()))
    assert len(ForestDisplay.from_estimator(q, n_samples=100).medians_[0].get_xdata()) == 2
    plt.close("all")
    assert str(clone(q).get_params()) == str(q.get_params())
    assert q.set_params(random_state=7).random_state == 7


@OF_A_SHORT_FIT.append
def a_seed_repeats_a_fit_whatever_the_default_dtype(k):
    X = copy.deepcopy(first_fit(k)[0]).sample(100)
    torch.set_default_dtype(torch.float64)
    try:
        again = clone(REPEATABLE[k]).fit(gaussian_score, n_features=2)
    finally:
        torch.set_default_dtype(torch.float32)
    np.testing.assert_array_equal(again.sample(100), X)
    other = clone(REPEATABLE[k]).set_params(random_state=1).fit(gaussian_score, n_features=2)
    assert not np.array_equal(other.sample(100), X)


DIGESTS = """
import hashlib, skksivi
for q in (skksivi.KSIVIApproximator(max_iter=20, method="path"), skksivi.baselines.Laplace()):
    X = q.set_params(random_state=0).fit(lambda x: 1 - x, n_features=3).sample(100)
    print(hashlib.sha256(X.tobytes()).hexdigest())
"""
SCRIPT = """
import random, numpy as np, torch
def state():
    parts = [torch.get_rng_state().numpy().tobytes(), repr(np.random.get_state()), repr(random.getstate())]
    return parts, torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
before = state()
import skksivi
for name in skksivi.__all__:
    getattr(skksivi, name)
assert state() == before, "import changed global state"
"""


@pytest.mark.slow
def test_same_seed_same_result_in_two_processes(capsys):
    there = subprocess.check_output([sys.executable, "-c", SCRIPT + DIGESTS], text=True)
    exec(DIGESTS, {})  # noqa: S102
    here = capsys.readouterr().out
    assert here == there
    assert [len(line) for line in here.split()] == 2 * [len(hashlib.sha256().hexdigest())]


@OF_A_SHORT_FIT.append
def a_fit_counts_its_scores_and_changes_nothing_else(k):
    """What is not counted is the trial of the function before a fit, at some 200 points."""
    sizes, before = [], approximators.global_state()
    q = clone(REPEATABLE[k]).set_params(random_state=None)
    q.fit(lambda x: sizes.append(len(x)) or gaussian_score(x), n_features=2)
    n_asked = sum(sizes)
    # a product by automatic differentiation evaluates the function at its points once more
    assert n_asked - 400 <= q.n_score_calls_ + q.n_products_ <= n_asked + q.n_products_
    assert sum(stage.n_calls for stage in q.stages_) == q.n_score_calls_ + q.n_products_
    assert all(stage.seconds >= 0 for stage in q.stages_)
    X = q.sample(10)
    if approximators.has_density(q):
        q.score(X)
    assert approximators.global_state() == before


@OF_A_SHORT_FIT.append
def a_fit_that_ends_early_leaves_the_earlier_one_or_can_be_used(k):
    """What is done after the training, to see what may be wrong with it, does not make it undone."""

    def stopped_by(error, call):
        with pytest.raises(error):
            q.fit(Misbehaving(raising(error), call, score_fn=gaussian_score), n_features=2)
        return q.sample(5, random_state=0)

    q, (whole, n_calls) = clone(REPEATABLE[k]), first_fit(k)
    with pytest.raises(NotFittedError):
        stopped_by(OSError, 4)
    X = q.fit(lambda x: -x, n_features=2).sample(5, random_state=0)
    np.testing.assert_array_equal(stopped_by(KeyboardInterrupt, 4), X)
    for call in (n_calls // 2, n_calls - 1):
        Y = stopped_by(OSError, call)
        assert np.array_equal(Y, X) or np.array_equal(Y, whole.sample(5, random_state=0))
        assert np.isfinite(stopped_by(KeyboardInterrupt, call)).all()
        X = q.sample(5, random_state=0)


@EVERY_SHORT
def test_a_whitened_fit_has_no_units(k, uncertified):
    scale = torch.tensor([2.0**10, 2.0**-10])
    q = clone(REPEATABLE[k]).set_params(dtype="float64")
    if hasattr(q, "whiten"):
        q.set_params(whiten="laplace")
    X = clone(q).fit(gaussian_score, n_features=2).sample(50)
    Y = clone(q).fit(lambda x: gaussian_score(x / scale.to(x)) / scale.to(x), n_features=2).sample(50)
    np.testing.assert_allclose(Y / scale.numpy(), X, rtol=1e-4, atol=1e-4)


FAR = [
    *(cls(max_iter=300) for cls in (MeanFieldVI, FullRankVI)),
    *(cls(n_particles=100, max_iter=n) for cls, n in ((SVGD, 100), (KSDDescent, 30), (MIED, 100))),
    KSDDescent(n_particles=100, solver="adam", max_iter=100),
    *(cls(n_chains=200, n_warmup=100, n_draws=20) for cls in (baselines.MALA, baselines.SGLD)),
]


@every("q", FAR)
def test_float32_will_do_for_a_target_far_from_the_origin(q):
    X = q.set_params(dtype="float32", random_state=0).fit(lambda x: 100 * (1000 - x), n_features=2).sample(4000)
    assert np.abs(X.astype(float).mean(0) - 1000).max() < 0.012
    assert np.abs(10 * X.std(0) - 1).max() < 0.12


@every("cls", [KSIVIApproximator, SIVI])
def test_draws_far_from_the_target_are_told(cls):
    """They start at zero, 40 standard deviations off in each coordinate."""
    with pytest.warns(ConvergenceWarning, match=r"too far from the target: .* is 3(\.\d)?e\+03, but should be 0"):
        short(cls(random_state=0)).fit(lambda x: 40 - x, n_features=2)


@A_FEW
@pytest.mark.filterwarnings("ignore:`log_prob` of the target contradicts its `score_fn`:UserWarning")
def test_a_subclass_with_a_new_score_or_density_does_not_use_the_old_product(q):
    class Tempered(Banana):
        def score_fn(self, x):
            return 0.1 * super().score_fn(x)

    class Narrow(Banana):
        def log_prob(self, x):
            return super().log_prob(x) - 50 * (x - 1).square().sum(-1)

    plain = Banana().score_fn
    for target, score_fn in ((Tempered(), lambda x: 0.1 * plain(x)), (Narrow(), lambda x: plain(x) - 100 * (x - 1))):
        fits = clone(q).fit(target), clone(q).fit(score_fn, n_features=2)
        approximators.assert_close(*(fit.sample(20) for fit in fits))


@A_FEW
def test_fits_in_threads_equal_those_in_sequence(q):
    seeds = range(2)

    def draws(seed):
        return clone(q).set_params(random_state=seed).fit(gaussian_score, n_features=2).sample(50)

    threaded = joblib.Parallel(n_jobs=2, backend="threading")(joblib.delayed(draws)(seed) for seed in seeds)
    np.testing.assert_array_equal(threaded, [*map(draws, seeds)])


TABLE = np.zeros((5, 2))
FORMS = [np.array, pd.DataFrame, torch.tensor, scipy.sparse.csr_matrix, np.ndarray.tolist]


@every("data", [pd.Series(TABLE[:, 0]), {"x": [1.0]}, *(form(TABLE) for form in FORMS)])
def test_a_fit_of_data_points_to_the_predictors(data):
    for arguments in ((data,), (data, np.zeros(5))):
        with pytest.raises(TypeError, match=r"must be a function .* use KSIVIRegressor or KSIVIClassifier"):
            Laplace().fit(*arguments)


@OF_A_GOOD_FIT.append
def the_summary_of_any_fit_is_the_posterior_or_says_why_not(fitted):
    """Five standard errors of one of four numbers are exceeded with probability 3e-6."""
    found = summary(fitted, GaussianTarget(), n_samples=200, random_state=0)
    numbers, se = np.column_stack([found.mean, found.sd]), np.column_stack([found.mean_se, found.sd_se])
    if np.isnan(se).any():
        assert "their errors are unknown" in found.warning
        assert set(found.notes) == {"errors unknown"}
    else:
        assert (np.abs(numbers - [[1, 2**0.5], [-2, 0.5**0.5]]) < 5 * se).all()


NAMES = "diagnose evidence expectation importance_sample modes refine summary to_arviz"
OF_A_FIT = [getattr(skksivi, name) for name in NAMES.split()]


@cache
def mistaken_for_fits():
    X, y = np.random.RandomState(0).normal(size=(20, 2)), np.arange(20) % 2
    model = KSIVIClassifier(approximator=Laplace(), n_draws=5, random_state=0)
    pipeline = make_pipeline(StandardScaler(), clone(model)).fit(X, y)
    search = GridSearchCV(pipeline, {"ksiviclassifier__n_draws": [5]}, cv=2).fit(X, y)
    several = KSIVIRegressor(model="linear", approximator=Laplace(), n_draws=5).fit(X, X)
    return {
        "predictor": (clone(model).fit(X, y), r"KSIVIClassifier; pass model\.approximator_ and model\.target_\."),
        "unfitted predictor": (model, r"fit it, and pass model\.approximator_"),
        "pipeline": (pipeline, r"pass model\[-1\]\.approximator_ and model\[-1\]\.target_"),
        "search": (search, r"pass (model\.best_estimator_\[-1\])\.approximator_ and \1\.target_"),
        "several columns": (several, r"pass model\.estimators_\[0\]\.approximator_ and"),
        "class": (Laplace, "the class Laplace; pass an instance"),
        "number": (3, " int"),
    }


@every("function", OF_A_FIT)
def test_what_is_no_fitted_approximator_is_told_what_to_pass(function):
    for name, (est, message) in mistaken_for_fits().items():
        if function is expectation and name == "number":  # of draws
            continue
        with pytest.raises(TypeError, match=f"`est` must be .*approximator, got .*{message}"):
            function(est, target=GaussianTarget())
    fits = good_fit("Laplace"), mistaken_for_fits()["predictor"][0]
    for swapped in itertools.product((GaussianTarget(), gaussian_score), fits):
        with pytest.raises(TypeError, match="the arguments are swapped: the approximator comes first"):
            function(*swapped)


@every("function", OF_A_FIT)
def test_what_is_wrong_with_a_function_of_a_fit_is_told(function):
    q = good_fit("Laplace")
    with pytest.raises(NotFittedError):
        function(Laplace(), target=GaussianTarget())
    refused(
        ValueError, r"target`? has 3 features, expected 2", lambda: function(q, target=from_score_fn(torch.neg, 3))
    )
    refused(TypeError, r"`target` must be a Target\b", lambda: function(q, target=np.zeros((5, 2))))
    if "n_samples" in signature(function).parameters and function is not skksivi.to_arviz:
        for wrong, error in ((0, ValueError), (True, TypeError), (1e3, TypeError)):
            with pytest.raises(error, match="n_samples"):
                function(q, target=GaussianTarget(), n_samples=wrong)


MISTAKES = {
    "no n_features": (lambda q: q.fit(gaussian_score), ValueError, "n_features"),
    "n_features=0": (lambda q: q.fit(gaussian_score, n_features=0), ValueError, "n_features"),
    "n_features against target": (lambda q: q.fit(GaussianTarget(), n_features=3), ValueError, "n_features"),
    "unknown device": (lambda q: q.set_params(device="tpu9").fit(gaussian_score, n_features=2), ValueError, "tpu9"),
    "dtype": (lambda q: q.set_params(dtype="int8").fit(gaussian_score, n_features=2), ValueError, "dtype"),
    "sample before fit": (lambda q: q.sample(), NotFittedError, "not fitted"),
    "score before fit": (lambda q: q.score(gaussian_score), NotFittedError, "not fitted"),
}


@every("act, error, message", MISTAKES)
@every("q", A_FEW_FITS)
def test_a_mistake_before_or_in_fit_gives_a_clear_error(q, act, error, message):
    refused(error, message, lambda: act(clone(q)))


LATER_MISTAKES = {
    "n_samples=-1": (lambda q: q.sample(-1), ValueError, "n_samples == -1"),
    "n_samples=2.5": (lambda q: q.sample(2.5), TypeError, "n_samples"),
    "n_samples=nan": (lambda q: q.sample(np.nan), TypeError, "n_samples"),
    "n_samples='3'": (lambda q: q.sample("3"), TypeError, "n_samples"),
    "columns": (lambda q: q.score_samples(np.zeros((4, 3))), ValueError, "3 columns, expected 2"),
    "one dimension": (lambda q: q.score_samples(np.zeros(2)), ValueError, "2D"),
    "NaN": (lambda q: q.score(np.full((4, 2), np.nan)), ValueError, "NaN"),
    "another target": (lambda q: q.score(from_score_fn(lambda x: -x, 3)), ValueError, "3"),
}


@every("act, error, message", LATER_MISTAKES)
@every("name", ["Laplace", "HKSIVIApproximator"])
def test_a_mistake_after_fit_gives_a_clear_error(name, act, error, message):
    refused(error, message, lambda: act(good_fit(name)))


@pytest.mark.parametrize("make", [Laplace, lambda **own: KSIVIApproximator(whiten="laplace", max_iter=2, **own)])
@given(log10_size=st.floats(-6, 12), log10_scale=st.floats(-6, 6), seed=st.integers(0, 10**6))
def test_draws_can_be_told_apart_however_far_they_are_from_the_origin(make, log10_size, log10_scale, seed):
    """Means of 2,000 draws are within five standard errors, which rounding to float32 would often spoil."""
    scale = torch.tensor(10.0**log10_scale).double()
    mean = 10.0**log10_size * torch.tensor([1.0, -0.5]).double()
    q = make(dtype="float32", random_state=seed).fit(lambda x: (mean.to(x) - x) / scale.to(x) ** 2, n_features=2)
    X = q.sample(2000, random_state=0).astype(np.float64)
    if mean.abs().max() < 1e12 * scale:  # float64 itself can tell them apart
        assert min(len(np.unique(column)) for column in X.T) > 1000
        np.testing.assert_allclose(X.std(0) / scale.numpy(), 1, atol=0.2)
    assert q.score_samples(X[:3]).shape == (3,)
