"""The fused op is an implementation of the plain formulas of `_stein`, which are its specification."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skksivi.kernels import IMQ, Gaussian, Laplace, Riesz
from skksivi.stein import _fused
from skksivi.stein._estimators import GRADIENT_ESTIMATORS
from skksivi.stein._fused import value_and_gradients

KERNELS = [Gaussian, IMQ, lambda **p: IMQ(exponent=0.3, **p), Laplace, *(
    lambda r=r, **p: Riesz(exponent=r, **p) for r in (0.5, 1.0, 1.5)
), lambda **p: Riesz(norm="l1", **p)]  # fmt: skip


def specification(x, f, kernel, estimator):
    x, f = x.clone().requires_grad_(), f.clone().requires_grad_()
    value = estimator.estimate(x, f, kernel)
    return value.detach(), *torch.autograd.grad(value.sum(), (x, f))


def assert_equal_specification(x, f, kernel, estimator, rtol=1e-9):
    actual, expected = value_and_gradients(x, f, kernel, estimator), specification(x, f, kernel, estimator)
    rounding = 1e-15 * f.square().max()  # of the diagonal, where k = 1, which is taken out of a sum over all pairs
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        assert (a - e).abs().max() <= rtol * e.abs().max() + rounding


@given(
    make=st.sampled_from(KERNELS),
    bandwidth=st.one_of(st.just("median"), st.floats(0.2, 20)),
    estimator=st.sampled_from(list(GRADIENT_ESTIMATORS.values())),
    layers=st.sampled_from([(), (1,), (3,), (2, 2)]),
    n=st.integers(3, 40),
    d=st.integers(1, 12),
    tile_rows=st.sampled_from([1, 3, 64]),
    shift=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 10_000),
)
def test_value_and_gradients_equal_the_specification(
    make, bandwidth, estimator, layers, n, d, tile_rows, shift, seed
):
    generator = torch.Generator().manual_seed(seed)
    shape = (*layers, estimator.n_batches * n, d)
    x, f = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fused, "MIN_TILE_ROWS", tile_rows)
        patch.setitem(_fused.TILE_ENTRIES, "cpu", tile_rows * n)
        kernel = make(bandwidth=bandwidth)
        # The slope of a kernel with a kink at x = y magnifies the rounding error of the distance of a close pair.
        rtol = 1e-9 if kernel.smooth else 1e-9 + 1e-14 / closest(x) ** 2
        assert_equal_specification(x + shift, f, kernel, estimator, rtol)


def closest(x):
    x = x.flatten(0, -2)
    return min(torch.pdist(x).min().item(), 1)


@pytest.mark.parametrize("n", [400, 512])
@pytest.mark.parametrize("estimator", GRADIENT_ESTIMATORS.values(), ids=GRADIENT_ESTIMATORS)
def test_the_median_of_a_subsample_is_that_of_the_specification(estimator, n):
    """At 512 draws a tile has as many rows as the subsample."""
    generator = torch.Generator().manual_seed(0)
    x, f = torch.randn(2, n * estimator.n_batches, 3, generator=generator, dtype=torch.float64)
    assert_equal_specification(x, f, Gaussian(), estimator)


@pytest.mark.parametrize("estimator", GRADIENT_ESTIMATORS.values(), ids=GRADIENT_ESTIMATORS)
@pytest.mark.parametrize("make", KERNELS[:-1])
def test_identical_draws_give_finite_gradients(make, estimator):
    x, f = torch.ones(8, 2), torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    for result in value_and_gradients(x, f, make(), estimator):
        assert result.isfinite().all()


@pytest.mark.parametrize("estimator", GRADIENT_ESTIMATORS.values(), ids=GRADIENT_ESTIMATORS)
@pytest.mark.parametrize("make", KERNELS[:4])
def test_single_precision_agrees_with_double_far_from_the_origin(make, estimator):
    x, f = torch.randn(2, 200, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    double = value_and_gradients(x, f, make(), estimator)
    single = value_and_gradients((x + 100).float(), f.float(), make(), estimator)
    for s, d in zip(single, double, strict=True):
        assert (s - d).abs().max() < 1e-3 * d.abs().max()


@pytest.mark.parametrize("row", [0, 5, -1])
@pytest.mark.parametrize("estimator", GRADIENT_ESTIMATORS.values(), ids=GRADIENT_ESTIMATORS)
@pytest.mark.parametrize("make", KERNELS[:4])
def test_one_draw_that_is_far_out_does_not_spoil_the_others(make, estimator, row):
    x, f = torch.randn(2, 200, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[row] = 1e3
    _, double, _ = value_and_gradients(x, f, make(), estimator)
    _, single, _ = value_and_gradients(x.float(), f.float(), make(), estimator)
    near = (x < 100).all(1)
    assert (single - double)[near].abs().max() < 1e-3 * double[near].abs().max()


@pytest.mark.parametrize("estimator", GRADIENT_ESTIMATORS.values(), ids=GRADIENT_ESTIMATORS)
def test_the_inputs_are_left_alone(estimator):
    x, f = torch.randn(2, 20, 3, generator=torch.Generator().manual_seed(0))
    before = x.clone(), f.clone()
    for make in KERNELS:
        value_and_gradients(x, f, make(), estimator)
    assert torch.equal(x, before[0])
    assert torch.equal(f, before[1])
