"""What every metric between two samples has in common: one list, one contract."""

from functools import partial
from inspect import signature

import numpy as np
import pytest
import torch
from awkward_arrays import every_view
from hypothesis import given
from hypothesis import strategies as st

from skksivi import metrics
from skksivi.kernels import IMQ, Gaussian, Laplace, Riesz
from skksivi.metrics import (
    correlation_error,
    energy_distance,
    kl_divergence,
    mmd,
    sliced_wasserstein,
    wasserstein_in_box,
)

SEEDS, SIZES = st.integers(0, 10**6), st.integers(3, 30)

#: Name: metric of X and Y, the power of it that is a metric, and its degree in the units of the data.
METRICS = {
    "sliced_wasserstein, p=1": (partial(sliced_wasserstein, n_projections=20, random_state=0, p=1), 1, 1),
    "sliced_wasserstein, p=2": (partial(sliced_wasserstein, n_projections=20, random_state=0), 1, 1),
    "wasserstein_in_box": (partial(wasserstein_in_box, half_width=1e9), 1 / 2, 2),
    "mmd, Gaussian": (partial(mmd, kernel=Gaussian(bandwidth=1.5), statistic="v"), 1 / 2, None),
    "mmd, IMQ": (partial(mmd, kernel=IMQ(bandwidth=0.5), statistic="v"), 1 / 2, None),
    "mmd, Laplace": (partial(mmd, kernel=Laplace(bandwidth=1.0), statistic="v"), 1 / 2, None),
    "mmd, Riesz": (partial(mmd, kernel=Riesz(bandwidth=1.0, exponent=1.5), statistic="v"), 1 / 2, 1.5),
    "energy_distance, r=1": (partial(energy_distance, statistic="v"), 1 / 2, 1),
    "energy_distance, r=0.5": (partial(energy_distance, statistic="v", exponent=0.5), 1 / 2, 0.5),
    "correlation_error, rms": (partial(correlation_error, summary="rms"), 1, 0),
    "correlation_error, max": (partial(correlation_error, summary="max"), 1, 0),
}
#: Those that are the same in rotated coordinates.
ROTATIONAL = [name for name in METRICS if not name.startswith(("sliced", "correlation"))]
#: All that take two samples, a new one too, with their defaults.
DEFAULTS = [
    partial(wasserstein_in_box, half_width=5) if metric is wasserstein_in_box else metric
    for metric in (getattr(metrics, name) for name in metrics.__all__)
    if [*signature(metric).parameters][:2] == ["X", "Y"]
]
every_metric = pytest.mark.parametrize("name", METRICS)
every_default = pytest.mark.parametrize(
    "metric", DEFAULTS, ids=lambda metric: getattr(metric, "func", metric).__name__
)


def sample(n, seed, d=3):
    """Correlated columns, a skewed one among them, elsewhere for each seed."""
    rng = np.random.RandomState(seed)
    A = rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + rng.normal(size=d)
    A[:, 0] = np.exp(A[:, 0] / 4)
    return A


def rotation(d, seed):
    return np.linalg.qr(np.random.RandomState(seed).normal(size=(d, d)))[0]


@every_metric
@given(n=SIZES, m=SIZES, seed=SEEDS)
def test_neither_sample_comes_first(name, n, m, seed):
    metric, _, _ = METRICS[name]
    X, Y = sample(n, seed), sample(m, seed + 1)
    assert metric(X, Y) == pytest.approx(metric(Y, X), rel=1e-9, abs=1e-12)


@every_metric
@given(n=SIZES, copies=st.integers(1, 3), seed=SEEDS)
def test_equal_samples_are_at_zero(name, n, copies, seed):
    """Equal as distributions: neither order nor the number of copies counts. Roots raise rounding to 1e-7 or so."""
    metric, _, _ = METRICS[name]
    X = sample(n, seed)
    Y = np.random.RandomState(seed).permutation(np.tile(X, (copies, 1)))
    assert abs(metric(X, Y)) < 1e-4 * (1 if "r=0.5" in name else 1e-3)


@every_metric
@given(n=SIZES, seed=SEEDS)
def test_different_samples_are_not_at_zero(name, n, seed):
    metric, _, _ = METRICS[name]
    assert metric(sample(n, seed), sample(n, seed + 1)) > 1e-4


@every_metric
@given(n=SIZES, m=SIZES, k=SIZES, seed=SEEDS)
def test_a_way_round_is_not_shorter(name, n, m, k, seed):
    metric, power, _ = METRICS[name]
    X, Y, Z = sample(n, seed), sample(m, seed + 1), sample(k, seed + 2)
    xy, yz, xz = (metric(a, b) ** power for a, b in [(X, Y), (Y, Z), (X, Z)])
    assert xz <= xy + yz + 1e-9


@every_metric
@given(n=SIZES, m=SIZES, shift=st.floats(-1e3, 1e3), seed=SEEDS)
def test_a_shift_of_both_samples_changes_nothing(name, n, m, shift, seed):
    metric, _, _ = METRICS[name]
    X, Y = sample(n, seed), sample(m, seed + 1)
    assert metric(X + shift, Y + shift) == pytest.approx(metric(X, Y), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", ROTATIONAL)
@given(n=SIZES, m=SIZES, seed=SEEDS)
def test_a_rotation_of_both_samples_changes_nothing(name, n, m, seed):
    metric, _, _ = METRICS[name]
    X, Y, Q = sample(n, seed), sample(m, seed + 1), rotation(3, seed)
    assert metric(X @ Q, Y @ Q) == pytest.approx(metric(X, Y), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", [name for name, (_, _, degree) in METRICS.items() if degree is not None])
@given(n=SIZES, m=SIZES, scale=st.floats(1e-3, 1e3), seed=SEEDS)
def test_a_metric_has_its_units(name, n, m, scale, seed):
    metric, _, degree = METRICS[name]
    X, Y = sample(n, seed), sample(m, seed + 1)
    assert metric(scale * X, scale * Y) == pytest.approx(scale**degree * metric(X, Y), rel=1e-6)


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
