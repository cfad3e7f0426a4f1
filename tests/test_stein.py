"""Estimators of the discrepancy: their gradients, their mean and their variance, against plain formulas."""

import math
from functools import partial
from typing import NamedTuple

import pytest
import torch
from kernel_formulas import MEMBERS, gaussian
from plain_targets import normal
from sklearn.base import clone
from torch import Tensor

from skksivi.kernels import IMQ, KERNELS, Gaussian
from skksivi.stein._discrepancy import stein_kernel
from skksivi.stein._estimators import GRADIENT_ESTIMATORS, u_statistic, vanilla

IDS = [str(kernel) for kernel, _, _ in MEMBERS]
every_member = pytest.mark.parametrize(("kernel", "formula", "width"), MEMBERS, ids=IDS)
every_bandwidth = pytest.mark.parametrize("bandwidth", ["median", 0.7])
every_estimator = pytest.mark.parametrize("estimate", [vanilla, u_statistic], ids=["vanilla", "u-statistic"])


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
    return (formula(x[i], x[j], h) * (f[i] * f[j]).sum(-1)).mean()


def value_and_gradients(function, x, f):
    x, f = x.clone().requires_grad_(), f.clone().requires_grad_()
    value = function(x, f)
    return value.detach(), *torch.autograd.grad(value.sum(), (x, f))


def test_every_kernel_and_estimator_is_under_test():
    assert {type(kernel) for kernel, _, _ in MEMBERS} == set(KERNELS.values())
    assert {(e.estimate, e.n_batches) for e in GRADIENT_ESTIMATORS.values()} == {(vanilla, 2), (u_statistic, 1)}


@every_member
@every_bandwidth
@every_estimator
def test_value_and_gradients_equal_those_of_the_mean_over_pairs(estimate, bandwidth, kernel, formula, width):
    """With "median" the gradient flows through the width as well."""
    kernel, x, f = clone(kernel).set_params(bandwidth=bandwidth), normal(10, 3), normal(10, 3, seed=1)
    actual = value_and_gradients(lambda x, f: estimate(x, f, kernel), x, f)
    expected = value_and_gradients(lambda x, f: plain(estimate, x, f, kernel, formula, width), x, f)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * b.abs().max().item())


@every_estimator
def test_the_median_width_has_a_gradient_of_its_own(estimate):
    """Scaling x leaves a median kernel as it is, so that its gradient has no component along x."""
    x, f = normal(10, 3), normal(10, 3, seed=1)
    _, g, _ = value_and_gradients(lambda x, f: estimate(x, f, IMQ()), x, f)
    _, g_frozen, _ = value_and_gradients(lambda x, f: estimate(x, f, IMQ().frozen(x)), x, f)
    assert abs((g * x).sum()) < 1e-12 < 1e-3 < abs((g_frozen * x).sum())


@every_member
@every_bandwidth
@every_estimator
def test_a_leading_axis_equals_the_loop(estimate, bandwidth, kernel, formula, width):
    kernel, x, f = clone(kernel).set_params(bandwidth=bandwidth), normal(4, 6, 2), normal(4, 6, 2, seed=1)
    actual = value_and_gradients(lambda x, f: estimate(x, f, kernel), x, f)
    loop = [value_and_gradients(lambda x, f: estimate(x, f, kernel), *layer) for layer in zip(x, f, strict=True)]
    assert actual[0].shape == (4,)
    for a, layers in zip(actual, zip(*loop, strict=True), strict=True):
        torch.testing.assert_close(a, torch.stack(layers), rtol=1e-10, atol=1e-12)


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
        eye = torch.eye(len(self.m), dtype=x.dtype)
        inflated = self.S + h**2 * eye
        w = torch.linalg.solve(inflated, (x - self.m).mT).mT
        z = (torch.linalg.det(inflated / h**2) * torch.exp(((x - self.m) * w).sum(-1))).rsqrt()
        return z.unsqueeze(-1) * self.marginal_f(self.m + w @ self.S)

    def squared_ksd(self, h):
        """Z (tr(B C_xy B^T) + |B m + b|^2): under q(x) q(y) k(x, y) / Z, (x, y) is jointly normal with means m."""
        P, eye = torch.linalg.inv(self.S), torch.eye(len(self.m), dtype=self.m.dtype)
        precision = torch.cat(
            [torch.cat([P + eye / h**2, -eye / h**2], 1), torch.cat([-eye / h**2, P + eye / h**2], 1)]
        )
        d, B = len(self.m), P - eye
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


@pytest.fixture(params=[1, 2, 3], ids="d={}".format)
def family(request):
    return Linear.example(request.param)


def test_closed_form_is_the_discrepancy_of_the_marginal_scores(family):
    (x, _), (y, _) = family.draw(500_000), family.draw(500_000, seed=2)
    values = gaussian(x, y, H) * (family.marginal_f(x) * family.marginal_f(y)).sum(-1)
    assert abs(values.mean() - family.squared_ksd(H)) < 4 * standard_error(values)


def test_closed_form_is_zero_where_q_is_the_target():
    q = Linear(torch.zeros(2, dtype=torch.float64), 0.8 * torch.eye(2, dtype=torch.float64), sigma=0.6)
    assert abs(q.squared_ksd(H)) < 1e-15


@every_estimator
def test_estimators_are_unbiased(family, estimate):
    values = estimate(*family.draw(N_REPEATS, 8), Gaussian(bandwidth=H))
    assert abs(values.mean() - family.squared_ksd(H)) < 4 * standard_error(values)


@every_estimator
def test_gradients_in_the_familys_parameters_are_unbiased(family, estimate):
    m, A = family.m.clone().requires_grad_(), family.A.clone().requires_grad_()
    expected = torch.autograd.grad(family._replace(m=m, A=A).squared_ksd(H), (m, A))
    copies = [a.detach().expand(N_REPEATS, *a.shape).clone().requires_grad_() for a in (m.unsqueeze(0), A)]
    values = estimate(*Linear(*copies).draw(N_REPEATS, 8), Gaussian(bandwidth=H))
    for g, exact in zip(torch.autograd.grad(values.sum(), copies), expected, strict=True):
        assert ((g.mean(0) - exact).abs() < 4 * standard_error(g)).all()


def test_variances_are_those_of_the_paper_at_the_same_number_of_draws(family):
    """With zeta_1 = Var E[h | theta], zeta_2 = Var h, and N draws in all, vanilla's in two halves."""
    N, k = 8, Gaussian(bandwidth=H)
    (x, f), (y, g) = family.draw(500_000, seed=10), family.draw(500_000, seed=12)
    zeta1, error1 = variance_and_error((f * family.conditional_mean(x, H)).sum(-1))
    zeta2, error2 = variance_and_error(gaussian(x, y, H) * (f * g).sum(-1))
    assert zeta2 >= 2 * zeta1
    measured = {}
    for estimate, a1, a2 in [
        (vanilla, 4 * (N - 2) / N**2, 4 / N**2),
        (u_statistic, 4 * (N - 2) / (N * (N - 1)), 2 / (N * (N - 1))),
    ]:
        variance, error = variance_and_error(estimate(*family.draw(N_REPEATS, N), k))
        assert abs(variance - (a1 * zeta1 + a2 * zeta2)) < 4 * (error + a1 * error1 + a2 * error2)
        measured[estimate] = variance
    assert measured[u_statistic] < measured[vanilla]


STEIN_MEMBERS = [member for member in MEMBERS if getattr(member[0], "norm", "l2") == "l2"]
every_stein_member = pytest.mark.parametrize(
    ("kernel", "formula"), [m[:2] for m in STEIN_MEMBERS], ids=[str(m[0]) for m in STEIN_MEMBERS]
)


def differentiated_stein_kernel(x, s_x, y, s_y, k):
    """s(x)^T s(y) k + s(x)^T grad_y k + s(y)^T grad_x k + tr(grad_x grad_y k) of one pair."""
    grad_x, grad_y = torch.func.grad(k, argnums=(0, 1))(x, y)
    mixed = torch.func.jacrev(torch.func.grad(k, argnums=1), argnums=0)(x, y)
    return (s_x @ s_y) * k(x, y) + s_x @ grad_y + s_y @ grad_x + mixed.trace()


@every_stein_member
@pytest.mark.parametrize("h", [0.7, 2.0])
@pytest.mark.parametrize("d", [1, 3])
def test_stein_kernel_equals_its_definition_differentiated_twice(kernel, formula, h, d):
    x, s_x, y, s_y = (normal(n, d, seed=seed) for seed, n in enumerate([3, 3, 4, 4]))
    actual = stein_kernel(x, s_x, y, s_y, clone(kernel).set_params(bandwidth=h))
    for i in range(3):
        for j in range(4):
            expected = differentiated_stein_kernel(x[i], s_x[i], y[j], s_y[j], partial(formula, h=h))
            torch.testing.assert_close(actual[i, j], expected, rtol=1e-9, atol=1e-9)


@every_stein_member
def test_stein_kernel_has_mean_zero_under_the_target(kernel, formula):
    """In five dimensions the singularity at x = y of the rough kernels is square-integrable."""
    x, y = normal(4, 5), normal(50_000, 5, seed=1)
    k_p = stein_kernel(x, -x, y, -y, clone(kernel).set_params(bandwidth=1.5)).mT
    assert (k_p.mean(0).abs() < 4 * standard_error(k_p)).all()


def test_u_statistic_of_the_stein_kernel_has_the_discrepancy_as_its_mean(family):
    n, kernel = 40, Gaussian(bandwidth=H)
    blocks, _ = family.draw(150, n)
    values = torch.stack([stein_kernel(x, -x, x, -x, kernel).fill_diagonal_(0).sum() for x in blocks]) / (n * (n - 1))
    assert abs(values.mean() - family.squared_ksd(H)) < 4 * standard_error(values)


@pytest.mark.parametrize("kernel", [Gaussian(), IMQ(exponent=0.25), IMQ(), IMQ(exponent=1.5)], ids=str)
def test_stein_kernel_matrix_is_positive_semidefinite(kernel):
    x, s = normal(12, 2), normal(12, 2, seed=1)
    lam = torch.linalg.eigvalsh(stein_kernel(x, s, x, s, clone(kernel).set_params(bandwidth=1.0)))
    assert lam[0] > -1e-12 * lam[-1]
