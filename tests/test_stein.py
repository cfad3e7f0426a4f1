"""Estimators of the discrepancy against plain formulas: their gradients and moments, fused ones, those of paths."""

import math
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from members import every
from plain_targets import normal
from sklearn.base import clone
from test_kernels import MEMBERS, gaussian
from torch import Tensor

from skksivi import KSIVIApproximator
from skksivi.estimators._ksd import rate_of_kl, squared_ksd
from skksivi.families._layer import Drawn
from skksivi.kernels import IMQ, Gaussian, Kernel, Laplace, Riesz
from skksivi.stein import _estimators
from skksivi.stein._discrepancy import stein_kernel
from skksivi.stein._estimators import GRADIENT_ESTIMATORS, Memory, u_statistic, value_and_gradients, vanilla, velocity
from skksivi.targets import Banana

every_estimator = every("estimate", [vanilla, u_statistic])


def pairs_of(estimate, n):
    """The index pairs that an estimator averages over."""
    if estimate is vanilla:
        return torch.cartesian_prod(torch.arange(n // 2), torch.arange(n // 2, n)).unbind(-1)
    return torch.nonzero(~torch.eye(n, dtype=torch.bool)).unbind(-1)


def plain(estimate, x, f, kernel, formula, width):
    """The estimate as a mean over pairs, with the bandwidth from their sorted distances."""
    i, j = pairs_of(estimate, len(x))
    h = kernel.bandwidth
    if h == "median":
        p = 1 if getattr(kernel, "norm", "l2") == "l1" else 2
        distances = (x[i] - x[j]).norm(p=p, dim=-1).sort().values
        h = width(distances[(len(i) - 1) // 2] ** 2, len(x) // 2 if estimate is vanilla else len(x))
    k = formula(x[i], x[j], h)
    if estimate is _estimators.normalized and not kernel.centred:
        rows, columns = torch.cartesian_prod(*2 * [torch.arange(len(x))]).unbind(-1)
        r = formula(x[rows], x[columns], h).detach().abs().view(len(x), -1).mean(1)
        r = r.clamp_min(r.max() / len(x))
        k = k * (r[i] * r[j]) ** -0.25
    return (k * (f[i] * f[j]).sum(-1)).mean()


def by_autograd(function, x, f):
    x, f = x.clone().requires_grad_(), f.clone().requires_grad_()
    value = function(x, f)
    return value.detach(), *torch.autograd.grad(value.sum(), (x, f))


@every("kernel, formula, width", MEMBERS)
@every("bandwidth", ["median", 0.7])
@every("estimate", [e.estimate for e in GRADIENT_ESTIMATORS.values()])
def test_value_and_gradients_equal_those_of_the_mean_over_pairs(estimate, bandwidth, kernel, formula, width):
    """With "median" the gradient flows through the width as well; a leading axis equals the loop."""
    kernel, x, f = clone(kernel).set_params(bandwidth=bandwidth), normal(4, 10, 3), normal(4, 10, 3, seed=1)
    actual = by_autograd(lambda x, f: estimate(x, f, kernel), x, f)
    by_pairs = lambda x, f: plain(estimate, x, f, kernel, formula, width)  # noqa: E731
    loop = [by_autograd(by_pairs, *layer) for layer in zip(x, f, strict=True)]
    for a, b in zip(actual, map(torch.stack, zip(*loop, strict=True)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * b.abs().max().item())


class Linear(NamedTuple):
    """The semi-implicit family x = m + A z + sigma xi; its law is N(m, S). The target is p = N(0, I)."""

    m: Tensor
    A: Tensor
    sigma: float = 0.6

    @classmethod
    def example(cls, d):
        return cls(normal(d) / 2, normal(d, 2, seed=1) / 2)

    @property
    def S(self):  # noqa: N802
        return self.A @ self.A.mT + self.sigma**2 * torch.eye(self.A.shape[-2], dtype=self.A.dtype)

    def draw(self, *shape, seed=0):
        """Rows x and f = s_p(x) - s_q(x|z) of shape (*shape, d)."""
        *_, d, latent_dim = self.A.shape
        z, xi = normal(*shape, latent_dim, seed=seed), normal(*shape, d, seed=seed + 1)
        x = self.m + z @ self.A.mT + self.sigma * xi
        return x, -x + xi / self.sigma

    def marginal_f(self, x):
        """s_p(x) - s_q(x) = B x + b, the mean of f given x."""
        return -x + torch.linalg.solve(self.S, (x - self.m).mT).mT

    def conditional_mean(self, x, h):
        """E[k(x, y) f(y)] over y ~ q: under q(y) k(x, y) / Z(x), y is normal again."""
        inflated = self.S + h**2 * torch.eye(len(self.m), dtype=x.dtype)
        w = torch.linalg.solve(inflated, (x - self.m).mT).mT
        z = (torch.linalg.det(inflated / h**2) * torch.exp(((x - self.m) * w).sum(-1))).rsqrt()
        return z.unsqueeze(-1) * self.marginal_f(self.m + w @ self.S)

    def squared_ksd(self, h):
        """Z (tr(B C_xy B^T) + |B m + b|^2): under q(x) q(y) k(x, y) / Z, (x, y) is jointly normal with means m."""
        P, d = torch.linalg.inv(self.S), len(self.m)
        eye = torch.eye(d, dtype=P.dtype)
        precision = torch.block_diag(P, P) + torch.kron(torch.tensor([[1.0, -1], [-1, 1]]), eye) / h**2
        B = P - eye
        C_xy = torch.linalg.inv(precision)[:d, d:]
        Z = (torch.linalg.det(P) ** 2 / torch.linalg.det(precision)).sqrt()
        return Z * ((B @ C_xy @ B.mT).trace() + self.m.square().sum())  # B m + b = -m


H = 1.3
N_REPEATS = 20_000


def standard_error(values):
    return values.std(0) / math.sqrt(len(values))


def variance_and_error(values):
    """The sample variance and its standard error, from the fourth moment."""
    centred = values - values.mean()
    variance = centred.square().mean()
    return variance, ((centred**4).mean() - variance**2).sqrt() / math.sqrt(len(values))


every_family = every("family", [Linear.example(d) for d in (1, 2, 3)])


@every_family
@every_estimator
def test_estimators_are_unbiased(family, estimate):
    values = estimate(*family.draw(N_REPEATS, 8), Gaussian(bandwidth=H))
    assert abs(values.mean() - family.squared_ksd(H)) < 4 * standard_error(values)


@every_family
@every_estimator
def test_gradients_in_the_familys_parameters_are_unbiased(family, estimate):
    m, A = family.m.clone().requires_grad_(), family.A.clone().requires_grad_()
    expected = torch.autograd.grad(family._replace(m=m, A=A).squared_ksd(H), (m, A))
    copies = [a.detach().expand(N_REPEATS, *a.shape).clone().requires_grad_() for a in (m.unsqueeze(0), A)]
    values = estimate(*Linear(*copies).draw(N_REPEATS, 8), Gaussian(bandwidth=H))
    for g, exact in zip(torch.autograd.grad(values.sum(), copies), expected, strict=True):
        assert ((g.mean(0) - exact).abs() < 4 * standard_error(g)).all()


@every_family
def test_variances_are_those_of_the_paper_at_the_same_number_of_draws(family):
    """With zeta_1 = Var E[h | theta], zeta_2 = Var h, and N draws in all, vanilla's in two halves."""
    N, k = 8, Gaussian(bandwidth=H)
    (x, f), (y, g) = family.draw(500_000, seed=10), family.draw(500_000, seed=12)
    zeta1, error1 = variance_and_error((f * family.conditional_mean(x, H)).sum(-1))
    zeta2, error2 = variance_and_error(gaussian(x, y, H) * (f * g).sum(-1))
    assert zeta2 >= 2 * zeta1
    measured = []
    for estimate, pairs, a2 in ((u_statistic, N * (N - 1), 2), (vanilla, N**2, 4)):
        variance, error = variance_and_error(estimate(*family.draw(N_REPEATS, N), k))
        a1, a2 = 4 * (N - 2) / pairs, a2 / pairs
        assert abs(variance - (a1 * zeta1 + a2 * zeta2)) < 4 * (error + a1 * error1 + a2 * error2)
        measured.append(variance)
    assert measured == sorted(measured)


def differentiated_stein_kernel(x, s_x, y, s_y, k):
    """s(x)^T s(y) k + s(x)^T grad_y k + s(y)^T grad_x k + tr(grad_x grad_y k) of one pair."""
    grad_x, grad_y = torch.func.grad(k, argnums=(0, 1))(x, y)
    mixed = torch.func.jacrev(torch.func.grad(k, argnums=1), argnums=0)(x, y)
    return (s_x @ s_y) * k(x, y) + s_x @ grad_y + s_y @ grad_x + mixed.trace()


@every("h", [0.7, 2.0])
@every("d", [1, 3])
@every("kernel, formula", [m[:2] for m in MEMBERS if getattr(m[0], "norm", "l2") == "l2"])
def test_stein_kernel_equals_its_definition_differentiated_twice(kernel, formula, h, d):
    x, s_x, y, s_y = (normal(n, d, seed=seed) for seed, n in enumerate([3, 3, 4, 4]))
    actual = stein_kernel(x, s_x, y, s_y, clone(kernel).set_params(bandwidth=h))
    for i in range(3):
        for j in range(4):
            expected = differentiated_stein_kernel(x[i], s_x[i], y[j], s_y[j], partial(formula, h=h))
            torch.testing.assert_close(actual[i, j], expected, rtol=1e-9, atol=1e-9)


@every("kernel", [Gaussian(), IMQ(exponent=0.25), IMQ(), IMQ(exponent=1.5)])
def test_stein_kernel_matrix_is_positive_semidefinite(kernel):
    x, s = normal(12, 2), normal(12, 2, seed=1)
    lam = torch.linalg.eigvalsh(stein_kernel(x, s, x, s, clone(kernel).set_params(bandwidth=1.0)))
    assert lam[0] > -1e-12 * lam[-1]


# The fused op is an implementation of the plain formulas, which are its specification

MAKERS = [Gaussian, IMQ, lambda **p: IMQ(exponent=0.3, **p), Laplace, *(
    lambda r=r, **p: Riesz(exponent=r, **p) for r in (0.5, 1.0, 1.5)
), lambda **p: Riesz(norm="l1", **p)]  # fmt: skip


every_pairing = every("estimator", GRADIENT_ESTIMATORS)


def assert_equal_specification(x, f, kernel, estimator, rtol=1e-9):
    actual = value_and_gradients(x, f, kernel, estimator)
    expected = by_autograd(lambda x, f: estimator.estimate(x, f, kernel), x, f)
    rounding = 1e-15 * f.square().max()  # of the diagonal, where k = 1, which is taken out of a sum over all pairs
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        assert (a - e).abs().max() <= rtol * e.abs().max() + rounding


@given(
    make=st.sampled_from(MAKERS),
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
        patch.setattr(_estimators, "MIN_TILE_ROWS", tile_rows)
        patch.setitem(_estimators.TILE_ENTRIES, "cpu", tile_rows * n)
        kernel = make(bandwidth=bandwidth)
        # The slope of a kernel with a kink at x = y magnifies the rounding error of the distance of a close pair.
        closest = min(torch.pdist(x.flatten(0, -2)).min().item(), 1)
        rtol = 1e-9 if kernel.smooth else 1e-9 + 1e-14 / closest**2
        assert_equal_specification(x + shift, f, kernel, estimator, rtol)


@every("n", [400, 512])
@every_pairing
def test_the_median_of_a_subsample_is_that_of_the_specification(estimator, n):
    """At 512 draws a tile has as many rows as the subsample."""
    generator = torch.Generator().manual_seed(0)
    x, f = torch.randn(2, n * estimator.n_batches, 3, generator=generator, dtype=torch.float64)
    assert_equal_specification(x, f, Gaussian(), estimator)


@every_pairing
@every("make", MAKERS[:-1])
def test_identical_draws_give_finite_gradients(make, estimator):
    x, f = torch.ones(8, 2), torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    for result in value_and_gradients(x, f, make(), estimator):
        assert result.isfinite().all()


@every_pairing
@every("make", MAKERS[:4])
def test_single_precision_agrees_with_double_far_from_the_origin(make, estimator):
    x, f = normal(2, 200, 5)
    double = value_and_gradients(x, f, make(), estimator)
    single = value_and_gradients((x + 100).float(), f.float(), make(), estimator)
    for s, d in zip(single, double, strict=True):
        assert (s - d).abs().max() < 1e-3 * d.abs().max()


@every("row", [0, 5, -1])
@every_pairing
@every("make", MAKERS[:4])
def test_one_draw_that_is_far_out_does_not_spoil_the_others(make, estimator, row):
    x, f = torch.randn(2, 200, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[row] = 1e3
    _, double, _ = value_and_gradients(x, f, make(), estimator)
    _, single, _ = value_and_gradients(x.float(), f.float(), make(), estimator)
    near = (x < 100).all(1)
    assert (single - double)[near].abs().max() < 1e-3 * double[near].abs().max()


@every_pairing
def test_the_inputs_are_left_alone(estimator):
    rows = normal(2, 20, 3)
    before = rows.clone()
    for make in MAKERS:
        value_and_gradients(*rows, make(), estimator)
    assert torch.equal(rows, before)


# The kernelised path gradient of KL(q || p)


class Hat(Kernel):
    """Positive definite in two dimensions, but negative far from zero."""

    def profile(self, t):
        return (1 - t / 2) * torch.exp(-t / 2)

    def slope(self, t, k):
        return (t / 4 - 1) * torch.exp(-t / 2)

    def median_level(self, n):
        return 1.0


@given(
    kernel=st.sampled_from([Gaussian(bandwidth=0.7), IMQ(bandwidth=1.3), Laplace(bandwidth=2.0)]),
    n=st.integers(1, 5),
    m=st.integers(1, 9),
    d=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)
def test_the_velocity_is_a_kernel_mean_of_scores_and_gradients(kernel, n, m, d, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y, s = (torch.randn(k, d, generator=generator, dtype=torch.float64) for k in (n, m, m))
    y.requires_grad_()
    k = kernel(x, y)
    gradients = torch.stack([torch.autograd.grad(row.sum(), y, retain_graph=True)[0].sum(0) for row in k])
    expected = (k @ s + gradients) / k.sum(1, keepdim=True).clamp_min(1e-3 * m)
    actual = velocity(x, Memory(y.detach(), s), kernel)
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-6, atol=1e-8)


@every("n_layers", [0, 2])
def test_the_loss_is_the_rate_at_which_the_divergence_falls(n_layers):
    """The mean over draws of v . (s_p - s_q(x | z)), for each layer; the gradient in x is -v / n."""
    shape = (n_layers,) * (n_layers > 0) + (6, 3)
    x, s, c = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kernel = Gaussian(bandwidth=0.7)
    rate, dx, *others = rate_of_kl(kernel, 6, Memory.empty(x), adapts=False).gradients(Drawn(x, s, c))
    v = velocity(x, Memory(x, s), kernel)
    torch.testing.assert_close(rate, torch.einsum("...ij,...ij->...", v, s - c) / 6)
    torch.testing.assert_close(dx, -v / 6)
    assert not any(other.any() for other in others)


@every("n, in_halves, n_draws", [(4, False, 4), (5, False, 5), (4, True, 4), (5, True, 6)])
def test_an_odd_batch_in_halves_has_one_draw_more(n, in_halves, n_draws):
    objective = squared_ksd(Gaussian(), GRADIENT_ESTIMATORS["u-statistic"], n, in_halves=in_halves)
    assert objective.n_draws == n_draws


@every("n", [1, 2, 100, 128, 129, 1000, 2560, 10**5])
def test_large_batches_are_remembered_less_often(n):
    memory = Memory.empty(torch.zeros(()))
    memory.begin(torch.zeros(n, 1), torch.zeros(n, 1))
    assert len(memory.x) == n * _estimators.n_batches(n) <= max(n, _estimators.N_DRAWS)


def test_new_draws_take_the_place_of_the_oldest_and_those_that_are_not_finite_stay_out():
    memory = Memory(torch.arange(6.0)[:, None], torch.zeros(6, 1))
    memory.add(torch.tensor([[7.0], [8.0]]), torch.tensor([[1.0], [torch.nan]]))
    assert memory.x.flatten().tolist() == [2, 3, 4, 5, 7, 5]
    assert memory.s.flatten().tolist() == [0, 0, 0, 0, 1, 0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("kernel", [Riesz(), Hat()])
def test_kernels_that_give_no_means_are_left_to_the_discrepancy(kernel):
    assert not _estimators.averages(kernel)
    small = {"whiten": None, "max_iter": 5, "batch_size": 16, "random_state": 0, "kernel": kernel}
    with pytest.raises(ValueError, match=r"`method` is 'path'.*positive kernel"):
        KSIVIApproximator(method="path", **small).fit(Banana())
    fits = [KSIVIApproximator(gradient_estimator=name, **small).fit(Banana()) for name in ("auto", "u-statistic")]
    assert (fits[0].loss_curve_ == fits[1].loss_curve_).all() == kernel.centred  # which has no row means
