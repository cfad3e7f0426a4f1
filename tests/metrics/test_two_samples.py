"""What every metric between two samples has in common: one list, one contract."""

from functools import partial
from inspect import signature

import numpy as np
import pytest
import torch
from awkward_arrays import every_view

from skksivi import metrics
from skksivi.metrics import (
    correlation_error,
    energy_distance,
    kl_divergence,
    mmd,
    sliced_wasserstein,
    wasserstein_in_box,
)

#: All that take two samples, a new one too, with their defaults.
DEFAULTS = [
    partial(wasserstein_in_box, half_width=5) if metric is wasserstein_in_box else metric
    for metric in (getattr(metrics, name) for name in metrics.__all__)
    if [*signature(metric).parameters][:2] == ["X", "Y"]
]
every_default = pytest.mark.parametrize(
    "metric", DEFAULTS, ids=lambda metric: getattr(metric, "func", metric).__name__
)


def sample(n, seed, d=3):
    """Correlated columns, a skewed one among them, elsewhere for each seed."""
    rng = np.random.RandomState(seed)
    A = rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + rng.normal(size=d)
    A[:, 0] = np.exp(A[:, 0] / 4)
    return A


@every_default
def test_samples_may_be_tensors_or_of_single_precision(metric):
    X, Y = (sample(9, seed).astype(np.float32) for seed in (0, 1))
    state = {"random_state": 0} if metric is sliced_wasserstein else {}
    expected = metric(X.astype(float), Y.astype(float), **state)
    assert metric(torch.as_tensor(X), torch.as_tensor(Y), **state) == expected
    assert metric(X.tolist(), Y, **state) == expected
    assert isinstance(expected, float)


@every_view
@every_default
def test_samples_may_have_any_layout(metric, view):
    X, Y = sample(9, 0), sample(9, 1)
    state = {"random_state": 0} if metric is sliced_wasserstein else {}
    assert metric(view(X), view(Y), **state) == metric(X, Y, **state)


@every_default
def test_two_samples_that_cannot_be_compared_are_named(metric):
    X = sample(9, 0, d=2)
    for pair, message in (
        ((X, sample(9, 0, d=3)), "`X` has 2 columns and `Y` has 3"),
        ((np.full((9, 2), np.nan), X), "X contains NaN"),
        ((X, np.full((9, 2), np.inf)), "Y contains infinity"),
        ((X, X[0]), "2D"),
        ((X[:0], X), "0 sample"),
    ):
        with pytest.raises(ValueError, match=message):
            metric(*pair)


@pytest.mark.parametrize("metric", [mmd, energy_distance, kl_divergence, correlation_error])
def test_one_row_is_too_few(metric):
    for n, m in ((1, 9), (9, 1)):
        with pytest.raises(ValueError, match="minimum of 2"):
            metric(sample(n, 0), sample(m, 1))
