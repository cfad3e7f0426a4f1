"""What the benchmarks bring along: targets of the public suites and metrics of the paper."""

import importlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from plain_targets import generator, normal_array
from scipy.spatial.distance import cdist

from skksivi.targets import Target


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return importlib.import_module


@pytest.mark.parametrize("name", ["ManyWell", "Rosenbrock"])
def test_draws_and_score_of_a_suite_are_those_of_its_density(module, name):
    """Stein's identities of 40,000 draws: 4.5 standard errors."""
    target = getattr(module("_suites"), name)(4)
    x = target.sample(40_000, generator())
    s = target.score_fn(x)
    torch.testing.assert_close(s, Target.score_fn(target, x))
    for terms in (s, s * x + 1):
        assert (terms.mean(0) / terms.std(0)).abs().max() < 4.5 / math.sqrt(len(x))


def test_metrics_of_the_paper_are_their_formulas(module):
    metrics, X, Y = module("_metrics"), normal_array(30, 2), 2 * normal_array(20, 2, seed=1)
    rho, nu = (np.sort(cdist(X, A))[:, k] for A, k in ((X, 3), (Y, 2)))
    assert metrics.kl_divergence(X, Y) == pytest.approx(2 * np.mean(np.log(nu / rho)) + math.log(20 / 29))
    few, many = np.array([[1.0, -1.0], [3.0, 0.0]]), np.array([[0.0, 0.0], [0.0, 1.0], [0.0, 2.5]])
    assert metrics.wasserstein_in_box(few, many, 2) == pytest.approx((2 + 5) / 2)
    assert math.isnan(metrics.wasserstein_in_box(few[1:], many, 2))
