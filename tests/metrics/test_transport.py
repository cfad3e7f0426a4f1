"""Distances of transport: against POT and closed forms."""

import math
import sys

import numpy as np
import ot
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_targets import normal_array

from skksivi import metrics
from skksivi.metrics import sliced_wasserstein, wasserstein_in_box

SEEDS, SIZES, DIMENSIONS = st.integers(0, 10**6), st.integers(2, 40), st.integers(1, 4)


def directions(n_projections, d, seed):
    theta = np.random.RandomState(seed).normal(size=(d, n_projections))
    return theta / np.linalg.norm(theta, axis=0)


@pytest.mark.parametrize("p", [1, 2])
@given(n=SIZES, m=SIZES, d=DIMENSIONS, seed=SEEDS)
def test_sliced_wasserstein_is_that_of_pot(p, n, m, d, seed):
    X, Y = normal_array(n, d, seed=seed), 2 * normal_array(m, d, seed=seed + 1) + 1
    expected = ot.sliced_wasserstein_distance(X, Y, p=p, projections=directions(20, d, seed))
    assert sliced_wasserstein(X, Y, p=p, n_projections=20, random_state=seed) == pytest.approx(expected, rel=1e-9)


def test_sliced_wasserstein_repeats_with_its_random_state():
    X, Y = normal_array(30, 3), normal_array(20, 3, seed=1)
    a, b, c = (
        sliced_wasserstein(X, Y, n_projections=5, random_state=seed) for seed in (5, np.random.RandomState(5), 6)
    )
    assert a == b != c


@pytest.mark.parametrize("chunk", [1, 100, 777])
def test_chunks_of_projections_do_not_matter(monkeypatch, chunk):
    X, Y = normal_array(30, 3), normal_array(20, 3, seed=1)
    expected = sliced_wasserstein(X, Y, n_projections=50, random_state=0)
    monkeypatch.setattr(metrics, "CHUNK", chunk)
    assert sliced_wasserstein(X, Y, n_projections=50, random_state=0) == pytest.approx(expected, rel=1e-12)


# In a box


@given(n=SIZES, m=SIZES, d=DIMENSIONS, seed=SEEDS)
def test_wasserstein_in_box_is_that_of_pot_on_the_rows_inside(n, m, d, seed):
    X, Y = normal_array(n, d, seed=seed), 2 * normal_array(m, d, seed=seed + 1)
    X[0] = Y[0] = 0.0
    x, y = (A[[max(abs(v) for v in row) <= 1.5 for row in A]] for A in (X, Y))
    cost = ((x[:, None] - y[None]) ** 2).sum(-1)
    expected = ot.emd2(np.full(len(x), 1 / len(x)), np.full(len(y), 1 / len(y)), cost)
    assert wasserstein_in_box(X, Y, 1.5) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_faces_of_the_box_belong_to_it():
    assert wasserstein_in_box([[2.0, -2.0]], [[0.0, 0.0]], 2) == pytest.approx(8)


def test_without_pot_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(ImportError, match="pip install pot"):
        wasserstein_in_box([[1.0]], [[1.0]], 5)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        *((lambda p=p: sliced_wasserstein([[1.0]], [[1.0]], p=p), "`p` must be") for p in (0.5, math.inf, math.nan)),
        *((lambda n=n: sliced_wasserstein([[1.0]], [[1.0]], n_projections=n), "n_projections") for n in (0, 2.5)),
        *((lambda a=a: wasserstein_in_box([[1.0]], [[1.0]], a), "half_width") for a in (0, -1.0, "5")),
        (lambda: wasserstein_in_box([[9.0]], [[1.0]], 5), "`X` has no row in the box"),
        (lambda: wasserstein_in_box([[1.0]], [[9.0]], 5), "`Y` has no row in the box"),
    ],
)
def test_a_mistake_is_named(act, message):
    with pytest.raises((ValueError, TypeError), match=message):
        act()
