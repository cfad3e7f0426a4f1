"""The divergence by nearest neighbours: against that of normals."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_targets import normal_array

from skksivi.metrics import kl_divergence


def exact_kl(m, S):
    """KL(N(m, S) || N(0, I))."""
    return (np.trace(S) + m @ m - len(m) - np.linalg.slogdet(S)[1]) / 2


@pytest.mark.parametrize(("shift", "n_neighbors"), [(0.0, 1), (0.5, 3), (1.0, 10)])
def test_kl_divergence_of_two_normals(shift, n_neighbors):
    """Four standard errors, from Var log p/q and psi'(k) of each distance to a neighbour, and 0.01 for the bias."""
    n, m, L = 20_000, np.array([shift, 0.0]), np.array([[1.1, 0.0], [0.3, 0.8]])
    S = L @ L.T
    X, Y = m + normal_array(n, 2) @ L.T, normal_array(n, 2, seed=1)
    M = S - np.eye(2)
    var_log_ratio = np.trace(M @ M) / 2 + m @ S @ m
    trigamma = math.pi**2 / 6 - sum(1 / j**2 for j in range(1, n_neighbors))
    margin = 4 * math.sqrt((var_log_ratio + 2 * trigamma) / n)
    assert abs(kl_divergence(X, Y, n_neighbors=n_neighbors) - exact_kl(m, S)) < margin + 0.01


@given(seed=st.integers(0, 10**6), shift=st.floats(-100, 100), scale=st.floats(1e-3, 1e3))
def test_kl_divergence_is_the_same_in_turned_shifted_and_scaled_coordinates(seed, shift, scale):
    X, Y = normal_array(40, 3, seed=seed), normal_array(50, 3, seed=seed + 1) + 0.3
    Q = np.linalg.qr(normal_array(3, 3, seed=seed))[0]
    assert kl_divergence(scale * X @ Q + shift, scale * Y @ Q + shift) == pytest.approx(kl_divergence(X, Y), abs=1e-5)


@given(n=st.integers(5, 30), m=st.integers(5, 30), k=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_kl_divergence_is_its_formula(n, m, k, seed):
    X, Y = normal_array(n, 2, seed=seed), normal_array(m, 2, seed=seed + 1)
    rho, nu = (np.sort(np.linalg.norm(X[:, None] - A[None], axis=-1), axis=1) for A in (X, Y))
    expected = 2 * np.mean(np.log(nu[:, k - 1] / rho[:, k])) + math.log(m / (n - 1))
    assert kl_divergence(X, Y, n_neighbors=k) == pytest.approx(expected, rel=1e-9)


def test_repeated_rows_are_named_and_more_neighbours_the_remedy():
    X, Y = np.repeat(normal_array(20, 2), 2, axis=0), normal_array(50, 2, seed=1)
    for pair in ((X, Y), (Y, Y.copy())):
        with pytest.raises(ValueError, match="repeated rows"):
            kl_divergence(*pair, n_neighbors=1)
    assert math.isfinite(kl_divergence(X, Y, n_neighbors=2))


@pytest.mark.parametrize(("n", "m", "n_neighbors"), [(3, 9, 3), (9, 2, 3), (9, 9, 0), (9, 9, 1.5), (9, 9, True)])
def test_a_number_of_neighbours_that_does_not_exist_is_named(n, m, n_neighbors):
    with pytest.raises((ValueError, TypeError), match="n_neighbors"):
        kl_divergence(normal_array(n, 2), normal_array(m, 2, seed=1), n_neighbors=n_neighbors)
