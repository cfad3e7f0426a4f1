"""The divergence by nearest neighbours: against that of normals."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_targets import normal_array

from skksivi.metrics import kl_divergence


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
