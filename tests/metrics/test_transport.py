"""Distances of transport: against POT and closed forms."""

import math
import sys

import numpy as np
import ot
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_targets import normal_array

from skksivi.metrics import _transport, sliced_wasserstein, wasserstein_in_box

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


def test_sliced_wasserstein_of_a_shift_is_its_mean_projection():
    """E (theta^T v)^2 = |v|^2 / d, with variance at most 3 |v|^4 / d^2 over directions."""
    X, v, n = normal_array(50, 3), np.array([3.0, 0.0, 4.0]), 20_000
    value = sliced_wasserstein(X, X + v, n_projections=n, random_state=0)
    assert abs(value**2 - 25 / 3) < 4 * math.sqrt(3 / n) * 25 / 3


@pytest.mark.parametrize("make", [lambda: 5, lambda: np.random.RandomState(5)], ids=["int", "RandomState"])
def test_sliced_wasserstein_repeats_with_its_random_state(make):
    X, Y = normal_array(30, 3), normal_array(20, 3, seed=1)
    a, b = (sliced_wasserstein(X, Y, n_projections=5, random_state=make()) for _ in range(2))
    assert a == b == sliced_wasserstein(X, Y, n_projections=5, random_state=5)
    assert a != sliced_wasserstein(X, Y, n_projections=5, random_state=6)


@pytest.mark.parametrize("chunk", [1, 100, 777])
def test_chunks_of_projections_do_not_matter(monkeypatch, chunk):
    X, Y = normal_array(30, 3), normal_array(20, 3, seed=1)
    expected = sliced_wasserstein(X, Y, n_projections=50, random_state=0)
    monkeypatch.setattr(_transport, "CHUNK", chunk)
    assert sliced_wasserstein(X, Y, n_projections=50, random_state=0) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("p", [0.5, math.inf, math.nan])
def test_an_order_out_of_range_is_named(p):
    with pytest.raises(ValueError, match="`p` must be"):
        sliced_wasserstein(normal_array(9, 2), normal_array(9, 2), p=p)


@pytest.mark.parametrize("n_projections", [0, 2.5])
def test_a_number_of_projections_that_is_none_is_named(n_projections):
    with pytest.raises((ValueError, TypeError), match="n_projections"):
        sliced_wasserstein(normal_array(9, 2), normal_array(9, 2), n_projections=n_projections)


# In a box


@given(n=SIZES, m=SIZES, d=DIMENSIONS, seed=SEEDS)
def test_wasserstein_in_box_is_that_of_pot_on_the_rows_inside(n, m, d, seed):
    X, Y = normal_array(n, d, seed=seed), 2 * normal_array(m, d, seed=seed + 1)
    X[0] = Y[0] = 0.0
    x, y = (A[[max(abs(v) for v in row) <= 1.5 for row in A]] for A in (X, Y))
    cost = ((x[:, None] - y[None]) ** 2).sum(-1)
    expected = ot.emd2(np.full(len(x), 1 / len(x)), np.full(len(y), 1 / len(y)), cost)
    assert wasserstein_in_box(X, Y, 1.5) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_rows_outside_the_box_do_not_count():
    X, Y = np.random.RandomState(0).uniform(-2, 2, (2, 30, 2))
    expected = wasserstein_in_box(X, Y, 2)
    assert expected > 0.01
    outside = [[2.1, 0.0], [0.0, -1e9], [-3.0, 3.0]]
    assert wasserstein_in_box(np.vstack([outside, X]), Y, 2) == pytest.approx(expected, rel=1e-12)
    assert wasserstein_in_box(X, np.vstack([Y, outside]), 2) == pytest.approx(expected, rel=1e-12)


def test_the_faces_of_the_box_belong_to_it():
    assert wasserstein_in_box([[2.0, -2.0]], [[0.0, 0.0]], 2) == pytest.approx(8)


def test_an_empty_box_is_named():
    with pytest.raises(ValueError, match="`X` has no row in the box"):
        wasserstein_in_box([[9.0]], [[1.0]], 5)
    with pytest.raises(ValueError, match="`Y` has no row in the box"):
        wasserstein_in_box([[1.0]], [[9.0]], 5)


@pytest.mark.parametrize("half_width", [0, -1.0, "5"])
def test_a_box_that_is_none_is_named(half_width):
    with pytest.raises((ValueError, TypeError), match="half_width"):
        wasserstein_in_box([[1.0]], [[1.0]], half_width)


def test_without_pot_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(ImportError, match="pip install pot"):
        wasserstein_in_box([[1.0]], [[1.0]], 5)
