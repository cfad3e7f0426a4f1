"""Means of a kernel over pairs: against plain formulas, scipy and closed forms of normals."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_formulas import MEMBERS
from plain_targets import normal_array

from skksivi.kernels import IMQ, Gaussian, Riesz, Tilted
from skksivi.metrics import energy_distance, mmd
from skksivi.stein import _discrepancy

SEEDS, SIZES, DIMENSIONS = st.integers(0, 10**6), st.integers(2, 30), st.integers(1, 4)
both_statistics = pytest.mark.parametrize("statistic", ["u", "v"])


def plain(k, X, Y, statistic):
    """MMD^2 by loops over the pairs, k a function of two tensors (n, d)."""
    x, y = torch.as_tensor(X), torch.as_tensor(Y)

    def mean(a, b, within):
        i, j = torch.meshgrid(torch.arange(len(a)), torch.arange(len(b)), indexing="ij")
        values = k(a[i.flatten()], b[j.flatten()])
        return values[(i != j).flatten()].mean() if within and statistic == "u" else values.mean()

    return (mean(x, x, True) + mean(y, y, True) - 2 * mean(x, y, False)).item()


@both_statistics
@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: str(m[0]))
@given(n=SIZES, m=SIZES, d=DIMENSIONS, seed=SEEDS)
def test_mmd_is_its_formula_under_every_kernel(member, statistic, n, m, d, seed):
    kernel, formula, _ = member
    kernel = type(kernel)(**{**kernel.get_params(), "bandwidth": 0.8})
    X, Y = normal_array(n, d, seed=seed), 2 * normal_array(m, d, seed=seed + 1) + 0.5
    expected = plain(lambda x, y: formula(x, y, 0.8), X, Y, statistic)
    assert mmd(X, Y, kernel=kernel, statistic=statistic) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@both_statistics
@pytest.mark.parametrize("r", [0.5, 1.0, 1.7])
@given(n=SIZES, m=SIZES, d=DIMENSIONS, seed=SEEDS)
def test_energy_distance_is_its_formula(statistic, r, n, m, d, seed):
    X, Y = normal_array(n, d, seed=seed), 2 * normal_array(m, d, seed=seed + 1) + 0.5
    expected = plain(lambda x, y: -((x - y).norm(dim=-1) ** r), X, Y, statistic)
    assert energy_distance(X, Y, exponent=r, statistic=statistic) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@both_statistics
@pytest.mark.parametrize("metric", [mmd, energy_distance])
@pytest.mark.parametrize("tile", [1, 7])
def test_tiles_do_not_matter(monkeypatch, metric, statistic, tile):
    X, Y = normal_array(15, 2), normal_array(13, 2, seed=1)
    expected = metric(X, Y, statistic=statistic)
    monkeypatch.setattr(_discrepancy, "TILE", tile)
    assert metric(X, Y, statistic=statistic) == pytest.approx(expected, rel=1e-6)


def test_a_median_bandwidth_is_that_of_the_reference():
    X, Y = normal_array(40, 2), normal_array(30, 2, seed=1)
    assert mmd(X, Y) == mmd(X, Y, kernel=IMQ().frozen(torch.as_tensor(Y)))
    assert mmd(X, Y, kernel="gaussian") == mmd(X, Y, kernel=Gaussian())
    assert mmd(1e3 * X, 1e3 * Y) == pytest.approx(mmd(X, Y), rel=1e-9)


def test_draws_far_from_the_origin_keep_their_digits():
    """In 1e8 plus units of one, half the digits are left."""
    X, Y = normal_array(40, 2).round(6), normal_array(30, 2, seed=1).round(6)
    for metric in (energy_distance, lambda *pair: mmd(*pair, kernel=Riesz(bandwidth=1.0))):
        assert metric(X + 2.0**27, Y + 2.0**27) == pytest.approx(metric(X, Y), abs=1e-6)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda X: mmd(X, X, statistic="w"), "`statistic` must be 'u' or 'v'"),
        (lambda X: energy_distance(X, X, statistic=None), "`statistic` must be 'u' or 'v'"),
        (lambda X: mmd(X, X, kernel="cosine"), "`kernel` must be"),
        (lambda X: mmd(X, X, kernel=Tilted(Gaussian())), "`kernel` is Tilted"),
        (lambda X: mmd(X, 0 * X), "median distance"),
        (lambda X: energy_distance(X, X, exponent=2), "`exponent`"),
    ],
    ids=["statistic", "no statistic", "kernel", "tilted", "one point", "exponent"],
)
def test_a_mistake_is_named(act, message):
    with pytest.raises(ValueError, match=message):
        act(normal_array(9, 2))
