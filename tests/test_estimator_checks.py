"""scikit-learn's checks of estimators, on the approximators and on one that takes data instead of a target."""

import re

import pytest
import torch
from members import every
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.validation import check_is_fitted, validate_data

from skksivi import HKSIVIApproximator, KSIVIApproximator
from skksivi._utils import DOCUMENTATION
from skksivi.targets import Target

QUICK = {"max_iter": 20, "batch_size": 16, "hidden_layer_sizes": (8,), "whiten": "laplace", "random_state": 0}


class MeanPosterior(Target):
    """Of the mean of normal rows of unit variance, under a normal prior."""

    def __init__(self, X):
        self.n_features = X.shape[1]
        self._sum, self._n = torch.tensor(X).double().sum(0), len(X)

    def score_fn(self, x):
        return self._sum.to(x) - (self._n + 1) * x


class ApproximatorOfData(KSIVIApproximator):
    """The posterior of a mean, fitted to data by the training loop of the package."""

    def fit(self, X, y=None):
        X = validate_data(self, X)
        return super().fit(MeanPosterior(X))

    def score_samples(self, X):
        check_is_fitted(self)
        return super().score_samples(validate_data(self, X, reset=False))

    def score(self, X, y=None):
        return float(self.score_samples(X).mean())


@pytest.mark.filterwarnings("ignore:The draws are too:sklearn.exceptions.ConvergenceWarning")
def test_an_approximator_of_data_passes_the_checks(uncertified):
    check_estimator(ApproximatorOfData(**QUICK), on_skip=None)


APPROXIMATORS = [KSIVIApproximator(**QUICK), HKSIVIApproximator(n_layers=2, **QUICK)]


@every("estimator", APPROXIMATORS)
def test_the_checks_that_need_no_data_pass(estimator):
    """Of the constructor, parameters, clones, tags and the representation; the others hand an array to `fit`."""
    results = check_estimator(estimator, on_fail=None, on_skip=None)
    passed = {r["check_name"] for r in results if r["status"] == "passed"}
    names = (
        "estimator_cloneable no_attributes_set_in_init parameters_default_constructible get_params_invariance "
        "set_params do_not_raise_errors_in_init_or_set_params estimator_repr estimator_tags_renamed valid_tag_types "
        "mixin_order estimators_unfitted"
    )
    assert {f"check_{name}" for name in names.split()} <= passed


@every("estimator", APPROXIMATORS)
def test_the_html_representation_shows_parameters(estimator):
    pytest.importorskip("sklearn", "1.9", reason="older ones show no descriptions")
    html = estimator._repr_html_()
    assert len(re.findall(r'"param-doc-description"', html)) > 10
    page = f"{type(estimator).__module__.split('._')[0]}.{type(estimator).__name__}.html"
    assert f'href="{DOCUMENTATION}/generated/{page}' in html
