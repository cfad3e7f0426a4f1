"""Two tiers of tests: a quick one for every change, and a slow one.

A test is slow by its mark, a page by the list below. The quick tier leaves these out and gives a property test few
examples; the slow tier takes them and the property tests again, with many.
"""

import os

import matplotlib
import pytest
from hypothesis import HealthCheck, settings

#: Pages and docstrings whose examples make full fits, or compile a model.
SLOW_EXAMPLES = {
    "amortized.rst",
    "bridges.rst",
    "diagnose.rst",
    "hierarchies.rst",
    "how.rst",
    "installation.rst",
    "nuts.rst",
    "quick_start.rst",
    "scores.rst",
    "sklearn.rst",
    "skksivi.amortized._estimator.AmortizedKSIVI",
    "skksivi.baselines._reverse.AISIVI",
    "skksivi.baselines._critics.HSIVISM",
    "skksivi.baselines._critics.SIVISM",
    "skksivi.baselines._reverse.UIVI",
    "skksivi.model_selection.Replicates",
    "skksivi.model_selection.neg_ksd_scorer",
    "skksivi.predictors._predictors.KSIVIClassifier",
    "skksivi.predictors._predictors.KSIVIRegressor",
    "skksivi.bridges._jax.from_numpyro",
    "skksivi.bridges._pymc.from_pymc",
}

#: Those whose amortised networks take fewer steps, for what they show does not depend on them.
SHORT_NETWORKS = {
    "amortized.rst",
    "skksivi.amortized._estimator.AmortizedKSIVI",
}

pytest_plugins = ["cpu_budget"]
matplotlib.use("agg")

#: Most functions of JAX are called a few times: compiling them well would take longer than they do.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

for name, n in {"quick": 10, "full": 25}.items():
    settings.register_profile(
        name,
        max_examples=n,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
settings.load_profile("quick")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.name in SLOW_EXAMPLES:
            item.add_marker("slow")


@pytest.fixture
def uncertified(monkeypatch):
    """Make fits without a certificate, which takes most of the time of a short one."""
    monkeypatch.setattr("skksivi.estimators._judge.weighted_draws", lambda *_: ())


@pytest.fixture
def short_networks(monkeypatch):
    """Make the trainings of amortised networks short."""
    monkeypatch.setattr("skksivi.amortized._training.MOST_STEPS", 300)


@pytest.fixture(autouse=True)
def short_examples(request):
    if request.node.name in SHORT_NETWORKS:
        request.getfixturevalue("short_networks")
