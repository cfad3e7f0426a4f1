"""scikit-learn's checks of estimators, those that need no data."""

import re

import pytest
from sklearn.utils.estimator_checks import check_estimator

from skksivi import HKSIVIApproximator, KSIVIApproximator
from skksivi._version import DOCUMENTATION

QUICK = {"max_iter": 20, "batch_size": 16, "hidden_layer_sizes": (8,), "whiten": "laplace", "random_state": 0}


APPROXIMATORS = [KSIVIApproximator(**QUICK), HKSIVIApproximator(n_layers=2, **QUICK)]


@pytest.mark.parametrize("estimator", APPROXIMATORS, ids=lambda q: type(q).__name__)
def test_the_checks_that_need_no_data_pass(estimator):
    """Of the constructor, parameters, clones, tags and the representation; the others hand an array to `fit`."""
    results = check_estimator(estimator, on_fail=None, on_skip=None)
    passed = {r["check_name"] for r in results if r["status"] == "passed"}
    needed = "estimator_cloneable no_attributes_set_in_init parameters_default_constructible get_params_invariance "
    needed += "set_params do_not_raise_errors_in_init_or_set_params estimator_repr estimator_tags_renamed "
    needed += "valid_tag_types mixin_order estimators_unfitted"
    assert {f"check_{name}" for name in needed.split()} <= passed


@pytest.mark.parametrize("estimator", APPROXIMATORS, ids=lambda q: type(q).__name__)
def test_the_html_representation_shows_parameters(estimator):
    pytest.importorskip("sklearn", "1.9", reason="older ones show no descriptions")
    html = estimator._repr_html_()
    described = re.findall(r'"param-doc-description"', html)
    assert len(described) > 10
    page = f"{type(estimator).__module__.split('._')[0]}.{type(estimator).__name__}.html"
    assert f'href="{DOCUMENTATION}/generated/{page}' in html
