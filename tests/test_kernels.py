"""Kernels: every member against its formula, its symmetries and its edge cases."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_formulas import MEMBERS
from plain_targets import normal
from sklearn.base import clone

from skksivi.kernels import IMQ, KERNELS, Gaussian, Laplace, Riesz, median_pair, resolve_kernel, squared_distances

SEEDS, SIZES, DIMENSIONS = st.integers(0, 10**6), st.integers(2, 12), st.integers(1, 5)


IDS = [str(kernel) for kernel, _, _ in MEMBERS]
every_member = pytest.mark.parametrize(("kernel", "formula", "width"), MEMBERS, ids=IDS)
every_kernel = pytest.mark.parametrize("kernel", [kernel for kernel, _, _ in MEMBERS], ids=IDS)
invariant_kernels = pytest.mark.parametrize("kernel", [Gaussian(), IMQ(), Laplace()], ids=str)
every_bandwidth = pytest.mark.parametrize("bandwidth", ["median", 0.7])


def off_diagonal(k):
    return k[..., ~torch.eye(k.shape[-1], dtype=torch.bool)]


def naive_median(x, kernel):
    """The lower median over pairs i < j of the squared distance, by sorting."""
    p = 1 if getattr(kernel, "norm", "l2") == "l1" else 2
    X = x.numpy()
    pairs = sorted(np.linalg.norm(X[i] - X[j], ord=p) ** 2 for i in range(len(X)) for j in range(i))
    return pairs[(len(pairs) - 1) // 2]


def test_every_kernel_is_under_test():
    assert {type(kernel) for kernel, _, _ in MEMBERS} == set(KERNELS.values())


@every_member
@given(n=SIZES, m=SIZES, d=DIMENSIONS, h=st.floats(0.1, 10), seed=SEEDS)
def test_kernel_equals_its_formula(kernel, formula, width, n, m, d, h, seed):
    x, y = normal(n, d, seed=seed), normal(m, d, seed=seed + 1)
    k = clone(kernel).set_params(bandwidth=h)(x, y)
    torch.testing.assert_close(k, formula(x[:, None], y[None], h), rtol=1e-9, atol=1e-12)


@every_member
@pytest.mark.parametrize("n", [2, 3, 6, 7])
def test_median_rule_puts_the_lower_median_of_different_rows_at_its_level(kernel, formula, width, n):
    x = normal(n, 3)
    h = width(torch.tensor(naive_median(x, kernel), dtype=torch.float64), n).item()
    assert kernel.frozen(x).bandwidth == pytest.approx(h, rel=1e-12)
    torch.testing.assert_close(
        off_diagonal(kernel(x)), off_diagonal(formula(x[:, None], x[None], h)), rtol=1e-9, atol=1e-12
    )


@every_member
def test_median_between_two_sets_is_over_all_pairs(kernel, formula, width):
    x, y = normal(4, 2), normal(5, 2, seed=1)
    p = 1 if getattr(kernel, "norm", "l2") == "l1" else 2
    pairs = torch.cdist(x, y, p=p).square().flatten().sort().values
    h = width(pairs[(len(pairs) - 1) // 2], len(x)).item()
    torch.testing.assert_close(kernel(x, y), formula(x[:, None], y[None], h), rtol=1e-9, atol=1e-12)


@every_bandwidth
@every_kernel
def test_leading_axes_equal_the_loop(kernel, bandwidth):
    kernel = clone(kernel).set_params(bandwidth=bandwidth)
    x, y = normal(2, 3, 6, 2), normal(2, 3, 5, 2, seed=1)
    within, between = kernel(x), kernel(x, y)
    assert within.shape == (2, 3, 6, 6)
    for t in np.ndindex(2, 3):
        torch.testing.assert_close(off_diagonal(within[t]), off_diagonal(kernel(x[t])), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(between[t], kernel(x[t], y[t]), rtol=1e-12, atol=1e-14)


@every_bandwidth
@pytest.mark.parametrize("shift", [1.0, 1e3, 1e6])
@invariant_kernels
def test_translation_changes_nothing_even_far_from_the_origin(kernel, bandwidth, shift):
    """The shifted rows themselves are rounded, by `shift` times 1e-16; distances must lose no more than that."""
    kernel, x, y = clone(kernel).set_params(bandwidth=bandwidth), normal(8, 3), normal(5, 3, seed=1)
    atol = 100 * shift * torch.finfo(x.dtype).eps
    torch.testing.assert_close(off_diagonal(kernel(x + shift)), off_diagonal(kernel(x)), rtol=0, atol=atol)
    torch.testing.assert_close(kernel(x + shift, y + shift), kernel(x, y), rtol=0, atol=atol)


IDENTICAL = {
    "all at the origin": torch.zeros(6, 2),
    "all at one point": torch.full((6, 2), 0.1),
    "all far away": torch.full((6, 2), 1e4 / 3),
    "all but one": torch.tensor([[0.1, 0.2]] * 5 + [[30.0, -1.0]]),
}


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows", IDENTICAL)
def test_identical_draws_give_finite_values_and_gradients(kernel, dtype, rows):
    x = IDENTICAL[rows].to(dtype).requires_grad_()
    for k in (kernel(x), kernel(x, x.detach()), kernel(x.detach(), x)):
        (g,) = torch.autograd.grad(k.sum(), x)
        assert k.isfinite().all()
        assert g.isfinite().all()


@every_bandwidth
@every_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_evaluated_in_single(kernel, bandwidth, dtype):
    kernel, x = clone(kernel).set_params(bandwidth=bandwidth), normal(6, 2).to(dtype)
    assert kernel(x).dtype == torch.float32
    assert torch.equal(kernel(x), kernel(x.float()))
    assert torch.equal(kernel(x, 2 * x), kernel(x.float(), 2 * x.float()))
    assert kernel.frozen(x).bandwidth == kernel.frozen(x.float()).bandwidth


@every_kernel
def test_frozen_is_a_copy_with_a_number_that_gives_the_same_values(kernel):
    x = normal(20, 2)
    frozen = kernel.frozen(x.clone().requires_grad_())
    assert type(frozen.bandwidth) is float
    assert kernel.bandwidth == "median"
    assert frozen.get_params() == kernel.get_params() | {"bandwidth": frozen.bandwidth}
    torch.testing.assert_close(off_diagonal(frozen(x)), off_diagonal(kernel(x)), rtol=1e-12, atol=1e-14)


def test_frozen_uses_at_most_128_evenly_spaced_rows():
    x = normal(2500, 1)
    assert Gaussian().frozen(x).bandwidth == Gaussian().frozen(x[::10]).bandwidth


@given(n=SIZES, m=SIZES, d=DIMENSIONS, seed=SEEDS)
def test_squared_distances_equal_the_sum_over_coordinates(n, m, d, seed):
    x, y = normal(n, d, seed=seed), normal(m, d, seed=seed + 1)
    expected = (x[:, None] - y[None]).square().sum(-1)
    torch.testing.assert_close(squared_distances(x, y), expected, rtol=0, atol=1e-12)
    assert (squared_distances(x, x) >= 0).all()


def test_median_pair_within_leaves_out_a_row_with_itself():
    values = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 3.0], [2.0, 3.0, 0.0]])
    for within, expected in ((True, 2.0), (False, 1.0)):
        median, i, j = median_pair(values, within=within)
        assert median == values[i, j] == expected
    median, i, j = median_pair(torch.stack([values, 2 * values]), within=True)
    assert median.tolist() == [2, 4]
    assert [values[a, b].item() for a, b in zip(i, j, strict=True)] == [2, 2]


@pytest.mark.parametrize("kernel", [Gaussian(), IMQ()], ids=repr)
def test_median_width_under_transforms_of_torch(kernel):
    x = torch.randn(3, 20, 2, generator=torch.Generator().manual_seed(0))

    def total(x):
        return kernel(x).square().sum()

    torch.testing.assert_close(torch.func.vmap(kernel)(x), kernel(x))
    y = x.clone().requires_grad_()
    total(y).backward()
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(total))(x), y.grad)


def test_median_looks_at_the_first_128_rows_only():
    x = normal(400, 2)
    x[128:] *= 1e3
    median, _, _ = median_pair(squared_distances(x, x), within=True)
    first = x[:128]
    torch.testing.assert_close(median, median_pair(squared_distances(first, first), within=True)[0])


@every_kernel
@given(t=st.floats(1e-3, 1e3))
def test_slope_is_the_derivative_of_the_profile(kernel, t):
    t = torch.tensor(t, dtype=torch.float64, requires_grad=True)
    k = kernel.profile(t)
    torch.testing.assert_close(kernel.slope(t, k), torch.autograd.grad(k, t)[0], rtol=1e-10, atol=1e-14)


@every_kernel
def test_the_diagonal_is_exact_whatever_the_outlier(kernel):
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    x[0] = 1000.0
    kernel = clone(kernel).set_params(bandwidth=1.0)
    own = torch.cat([kernel(row[None]).flatten() for row in x])
    torch.testing.assert_close(kernel(x).diagonal(), own)


def test_a_median_of_nothing_is_named():
    with pytest.raises(ValueError, match="two draws"):
        Gaussian()(torch.zeros(1, 2))
    with pytest.raises(ValueError, match="median distance of the draws is zero"):
        Gaussian().frozen(torch.ones(5, 2))


@every_kernel
@pytest.mark.parametrize("bandwidth", [0, -1, math.nan, math.inf, True, "mean", None, [1.0]], ids=str)
def test_a_bad_bandwidth_is_named(kernel, bandwidth):
    kernel = clone(kernel).set_params(bandwidth=bandwidth)
    for evaluate in (kernel, kernel.frozen, lambda x: kernel(x, x)):
        with pytest.raises(ValueError, match="`bandwidth` must be"):
            evaluate(normal(3, 2))


BAD = [
    *(("exponent", IMQ(exponent=beta)) for beta in (0, -0.5, math.nan, math.inf)),
    *(("exponent", Riesz(exponent=r)) for r in (0, -1, 2, 2.5, math.nan)),
    *(("exponent", Riesz(exponent=r, norm="l1")) for r in (0, 1.01, 1.5, math.nan)),
    *(("norm", Riesz(norm=norm)) for norm in ("l3", 2, None)),
]


@pytest.mark.parametrize(("name", "kernel"), BAD, ids=str)
def test_a_bad_exponent_or_norm_is_named(name, kernel):
    with pytest.raises(ValueError, match=rf"`{name}` of {type(kernel).__name__} must"):
        kernel(normal(3, 2))


@pytest.mark.parametrize("name", KERNELS)
def test_resolve_finds_a_kernel_by_name_and_sets_its_bandwidth(name):
    assert type(resolve_kernel(name)) is KERNELS[name]
    assert resolve_kernel(name).bandwidth == "median"
    assert resolve_kernel(name, 2.0).bandwidth == 2.0


@every_kernel
def test_resolve_copies_a_kernel(kernel):
    resolved = resolve_kernel(kernel, 2.0)
    assert resolved.get_params() == kernel.get_params() | {"bandwidth": 2.0}
    assert kernel.bandwidth == "median"


def test_resolve_names_what_it_cannot_use():
    with pytest.raises(ValueError, match="'cauchy'"):
        resolve_kernel("cauchy")
    with pytest.raises(TypeError, match="`kernel` must be a Kernel"):
        resolve_kernel(Gaussian)
    with pytest.raises(ValueError, match="`bandwidth`"):
        resolve_kernel("imq", -1.0)
