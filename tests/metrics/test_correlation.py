"""Errors of pairwise correlations."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from skksivi.metrics import correlation_error


def sample(n, d, seed):
    rng = np.random.RandomState(seed)
    return rng.normal(size=(n, d)) @ rng.normal(size=(d, d))


@given(n=st.integers(3, 30), m=st.integers(3, 30), d=st.integers(2, 6), seed=st.integers(0, 10**6))
def test_correlation_error_is_its_formula(n, m, d, seed):
    X, Y = sample(n, d, seed), sample(m, d, seed + 1)
    errors = [
        scipy.stats.pearsonr(X[:, i], X[:, j])[0] - scipy.stats.pearsonr(Y[:, i], Y[:, j])[0]
        for i in range(d)
        for j in range(i)
    ]
    assert len(errors) == d * (d - 1) / 2
    assert correlation_error(X, Y) == pytest.approx(math.sqrt(np.mean(np.square(errors))), rel=1e-9)
    assert correlation_error(X, Y, summary="max") == pytest.approx(np.max(np.abs(errors)), rel=1e-9)


@pytest.mark.parametrize(
    ("X", "Y", "options", "message"),
    [
        (sample(9, 2, 0), sample(9, 2, 1), {"summary": "mean"}, "`summary` must be 'rms' or 'max', got 'mean'"),
        (sample(9, 1, 0), sample(9, 1, 1), {}, "1 column"),
        (sample(9, 3, 0) * [1, 1, 0], sample(9, 3, 1), {}, "Column 2 of `X` is constant"),
        (sample(9, 3, 0), sample(9, 3, 1) * [0, 1, 1] + 0.1, {}, "Column 0 of `Y` is constant"),
    ],
    ids=["summary", "one column", "constant in X", "constant in Y"],
)
def test_a_mistake_is_named(X, Y, options, message):
    with pytest.raises(ValueError, match=message):
        correlation_error(X, Y, **options)
