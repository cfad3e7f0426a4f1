"""Kernels: every member against its formula, its symmetries and its edge cases."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from members import every, refused
from plain_targets import normal
from sklearn.base import clone

from skksivi.kernels import IMQ, KERNELS, Gaussian, Laplace, Riesz, median_pair, resolve_kernel, squared_distances


def gaussian(x, y, h):
    return torch.exp(-(x - y).square().sum(-1) / (2 * h**2))


def imq(x, y, h, exponent):
    return (1 + (x - y).square().sum(-1) / h**2) ** -exponent


def laplace(x, y, h):
    return torch.exp(-(x - y).norm(dim=-1) / h)


def riesz(x, y, h, exponent, p):
    return sum(sign * v.norm(p=p, dim=-1) ** exponent for sign, v in [(1, x), (1, y), (-1, x - y)]) / h**exponent


# A member, its formula on aligned rows, and its bandwidth h at a median squared distance of n draws.
MEMBERS = [
    (Gaussian(), gaussian, lambda med, n: (med / (2 * math.log(n + 1))).sqrt()),
    *(
        (IMQ(exponent=beta), partial(imq, exponent=beta), lambda med, n: (med / math.log(n + 1)).sqrt())
        for beta in (0.25, 0.5, 1.5)
    ),
    (Laplace(), laplace, lambda med, n: med.sqrt() / math.log(n + 1)),
    *(
        (Riesz(exponent=r, norm=norm), partial(riesz, exponent=r, p=p), lambda med, n: med.sqrt())
        for r, norm, p in [(0.5, "l2", 2), (1.0, "l2", 2), (1.5, "l2", 2), (0.5, "l1", 1), (1.0, "l1", 1)]
    ),
]

SEEDS, SIZES, DIMENSIONS = st.integers(0, 10**6), st.integers(2, 12), st.integers(1, 5)

every_member = every("kernel, formula, width", MEMBERS)
every_kernel = every("kernel", [kernel for kernel, _, _ in MEMBERS])
every_bandwidth = every("bandwidth", ["median", 0.7])


def off_diagonal(k):
    return k[..., ~torch.eye(k.shape[-1], dtype=torch.bool)]


def distances(x, y, kernel):
    """The distances of all pairs in the norm of a kernel."""
    return (x[..., :, None, :] - y[..., None, :, :]).norm(p=1 if getattr(kernel, "norm", "l2") == "l1" else 2, dim=-1)


def lower_median(values):
    return values.sort().values[(len(values) - 1) // 2]


def test_every_kernel_is_under_test():
    assert {type(kernel) for kernel, _, _ in MEMBERS} == set(KERNELS.values())


@given(n=SIZES, m=SIZES, d=DIMENSIONS, h=st.floats(0.1, 10), seed=SEEDS)
@every_member
def test_kernel_equals_its_formula_and_its_matrix_is_positive_semidefinite(kernel, formula, width, n, m, d, h, seed):
    x, y = normal(n, d, seed=seed), normal(m, d, seed=seed + 1)
    fixed = clone(kernel).set_params(bandwidth=h)
    torch.testing.assert_close(fixed(x, y), formula(x[:, None], y[None], h), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(*(off_diagonal(k) for k in (fixed(x), fixed(x, x))), rtol=1e-9, atol=1e-12)
    for k in (fixed(x), kernel(x)):
        assert k.isfinite().all()
        torch.testing.assert_close(k, k.mT, rtol=1e-12, atol=1e-12)
        lam = torch.linalg.eigvalsh(k)
        assert lam[0] > -1e-12 * n * lam[-1]


@every("n", [2, 3, 6, 7])
@every_member
def test_median_rule_puts_the_lower_median_of_different_rows_at_its_level(kernel, formula, width, n):
    """And that of all pairs of two sets."""
    x, y = normal(n, 3), normal(5, 3, seed=1)
    i, j = torch.triu_indices(n, n, 1)
    h = width(lower_median(distances(x, x, kernel)[i, j]) ** 2, n).item()
    assert kernel.frozen(x).bandwidth == pytest.approx(h, rel=1e-12)
    expected = formula(x[:, None], x[None], h)
    torch.testing.assert_close(off_diagonal(kernel(x)), off_diagonal(expected), rtol=1e-9, atol=1e-12)
    h = width(lower_median(distances(x, y, kernel).flatten()) ** 2, n).item()
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


@given(scale=st.floats(1e-6, 1e6), n=st.integers(3, 12), d=DIMENSIONS, seed=SEEDS)
@every_kernel
def test_median_bandwidth_is_free_of_units(kernel, scale, n, d, seed):
    x = normal(n, d, seed=seed)
    torch.testing.assert_close(off_diagonal(kernel(scale * x)), off_diagonal(kernel(x)), rtol=1e-7, atol=1e-12)


@every("shift", [1.0, 1e3, 1e6])
@every_bandwidth
@every("kernel", [Gaussian(), IMQ(), Laplace()])
def test_translation_changes_nothing_even_far_from_the_origin(kernel, bandwidth, shift):
    """The shifted rows themselves are rounded, by `shift` times 1e-16; distances must lose no more than that."""
    kernel, x, y = clone(kernel).set_params(bandwidth=bandwidth), normal(8, 3), normal(5, 3, seed=1)
    atol = 100 * shift * torch.finfo(x.dtype).eps
    torch.testing.assert_close(off_diagonal(kernel(x + shift)), off_diagonal(kernel(x)), rtol=0, atol=atol)
    torch.testing.assert_close(kernel(x + shift, y + shift), kernel(x, y), rtol=0, atol=atol)
    torch.testing.assert_close(kernel(x).diagonal(), torch.ones_like(x[:, 0]), rtol=0, atol=1e-6)


#: All at the origin, at one point, far away; all but one.
IDENTICAL = [torch.full((6, 2), at) for at in (0, 0.1, 1e4 / 3)] + [torch.tensor([[0.1, 0.2]] * 5 + [[30.0, -1.0]])]


@every("rows", IDENTICAL)
@every("dtype", [torch.float32, torch.float64])
@every_kernel
def test_identical_draws_give_finite_values_and_gradients(kernel, dtype, rows):
    x = rows.to(dtype).requires_grad_()
    for k in (kernel(x), kernel(x, x.detach()), kernel(x.detach(), x)):
        (g,) = torch.autograd.grad(k.sum(), x)
        assert k.isfinite().all()
        assert g.isfinite().all()


@every_kernel
def test_frozen_is_a_copy_with_a_number_that_gives_the_same_values(kernel):
    x = normal(20, 2)
    frozen = kernel.frozen(x.clone().requires_grad_())
    assert type(frozen.bandwidth) is float
    assert kernel.bandwidth == "median"
    assert frozen.get_params() == kernel.get_params() | {"bandwidth": frozen.bandwidth}
    torch.testing.assert_close(off_diagonal(frozen(x)), off_diagonal(kernel(x)), rtol=1e-12, atol=1e-14)
    assert kernel.with_bandwidth(0.7).frozen(x).bandwidth == pytest.approx(0.7, rel=1e-15)


def test_the_median_looks_at_128_rows_only():
    """A kernel at the first, a frozen one at evenly spaced ones."""
    x = normal(2500, 1)
    assert Gaussian().frozen(x).bandwidth == Gaussian().frozen(x[::10]).bandwidth
    x = normal(400, 2)
    x[128:] *= 1e3
    median, _, _ = median_pair(squared_distances(x, x), within=True)
    first = x[:128]
    torch.testing.assert_close(median, median_pair(squared_distances(first, first), within=True)[0])


@given(t=st.floats(1e-3, 1e3))
@every_kernel
def test_slope_is_the_derivative_of_the_profile(kernel, t):
    t = torch.tensor(t, dtype=torch.float64, requires_grad=True)
    k = kernel.profile(t)
    torch.testing.assert_close(kernel.slope(t, k), torch.autograd.grad(k, t)[0], rtol=1e-10, atol=1e-14)


@every_kernel
def test_the_diagonal_is_exact_whatever_the_outlier(kernel):
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    x[0] = 1000.0
    kernel = kernel.with_bandwidth(1.0)
    own = torch.cat([kernel(row[None]).flatten() for row in x])
    torch.testing.assert_close(kernel(x).diagonal(), own)


def test_a_median_of_nothing_is_named():
    refused(ValueError, "two draws", lambda: Gaussian()(torch.zeros(1, 2)))
    refused(ValueError, "median distance of the draws is zero", lambda: Gaussian().frozen(torch.ones(5, 2)))


BAD = [
    *(("bandwidth", kernel.with_bandwidth(h)) for kernel, _, _ in MEMBERS for h in (
        0, -1, math.nan, math.inf, True, "mean", None, [1.0]
    )),
    *(("exponent", IMQ(exponent=beta)) for beta in (0, -0.5, math.nan, math.inf)),
    *(("exponent", Riesz(exponent=r)) for r in (0, -1, 2, 2.5, math.nan)),
    *(("exponent", Riesz(exponent=r, norm="l1")) for r in (0, 1.01, 1.5, math.nan)),
    *(("norm", Riesz(norm=norm)) for norm in ("l3", 2, None)),
]  # fmt: skip


@every("name, kernel", BAD)
def test_a_bad_parameter_is_named(name, kernel):
    for evaluate in (kernel, kernel.frozen, lambda x: kernel(x, x)):
        with pytest.raises(ValueError, match=rf"`{name}` (of {type(kernel).__name__} )?must"):
            evaluate(normal(3, 2))


def test_resolve_finds_a_kernel_by_name_or_copies_it_and_sets_its_bandwidth():
    for name, cls in KERNELS.items():
        assert type(resolve_kernel(name)) is cls
        assert (resolve_kernel(name).bandwidth, resolve_kernel(name, 2.0).bandwidth) == ("median", 2.0)
    for kernel, _, _ in MEMBERS:
        assert resolve_kernel(kernel, 2.0).get_params() == kernel.get_params() | {"bandwidth": 2.0}
        assert kernel.bandwidth == "median"


NO_KERNEL = [("cauchy", None, "'cauchy'"), (Gaussian, None, "must be a Kernel"), ("imq", -1.0, "`bandwidth`")]


@every("kernel, bandwidth, message", NO_KERNEL)
def test_resolve_names_what_it_cannot_use(kernel, bandwidth, message):
    refused((TypeError, ValueError), message, resolve_kernel, kernel, bandwidth)
