"""KSD descent: the value is the V-statistic, the gradient that of automatic differentiation; moments of Gaussians."""

import numpy as np
import pytest
import torch
from misbehaving import Misbehaving
from plain_targets import normal
from sklearn.exceptions import ConvergenceWarning

from skksivi import kernels
from skksivi.baselines import KSDDescent, _particles
from skksivi.baselines._particles import ksd_gradient, last_fall
from skksivi.score._score import autograd_pullback

KERNELS = {
    "gaussian": (kernels.Gaussian(bandwidth=1.3), lambda r2: torch.exp(-r2 / (2 * 1.3**2))),
    "imq": (kernels.IMQ(bandwidth=0.8), lambda r2: (1 + r2 / 0.64) ** -0.5),
    "imq 0.3": (kernels.IMQ(bandwidth=0.8, exponent=0.3), lambda r2: (1 + r2 / 0.64) ** -0.3),
}


def score_fn(x):
    """Of log p = -sum cosh(x_i) - (x_1 x_2 ... )^2 / 2, whose Jacobian is no diagonal."""
    others = x.prod(-1, keepdim=True) / x
    return -x.sinh() - x.prod(-1, keepdim=True) * others


def discrepancy(x, k):
    """The mean of the Stein kernel over all pairs, by automatic differentiation of the kernel."""
    total, s = 0, score_fn(x)
    for x_i, s_i in zip(x, s, strict=True):
        for x_j, s_j in zip(x, s, strict=True):
            a, b = x_i + 0, x_j + 0
            value = k((a - b).square().sum())
            (in_a,) = torch.autograd.grad(value, a, create_graph=True)
            (in_b,) = torch.autograd.grad(value, b, create_graph=True)
            trace = sum(torch.autograd.grad(in_a[c], b, create_graph=True)[0][c] for c in range(len(a)))
            total = total + s_i @ s_j * value + s_i @ in_b + s_j @ in_a + trace
    return total / len(x) ** 2


@pytest.mark.parametrize("name", KERNELS)
def test_value_and_gradient_are_those_of_the_definition(name):
    kernel, k = KERNELS[name]
    x = normal(5, 3).requires_grad_()
    expected = discrepancy(x, k)
    value, dx, ds = ksd_gradient(x.detach(), score_fn(x.detach()), kernel)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-10, atol=0)
    (gradient,) = torch.autograd.grad(expected, x)
    torch.testing.assert_close(dx + autograd_pullback(score_fn, x)[1](ds), gradient, rtol=1e-9, atol=1e-11)


def test_lbfgs_stops_at_its_tolerance():
    few, many = (
        KSDDescent(n_particles=20, tol=tol, random_state=0).fit(lambda x: -x, n_features=1) for tol in (1e-3, 1e-7)
    )
    assert few.n_iter_ < many.n_iter_ < 300
    assert len(many.loss_curve_) >= many.n_iter_
    assert many.loss_curve_[-1] < few.loss_curve_[-1]


def test_a_discrepancy_that_is_not_finite_ends_the_fit():
    q = KSDDescent(whiten=None, max_iter=300, tol=0.0)
    with pytest.raises(FloatingPointError, match=r"The loss is nan at evaluation .* choose another `whiten`"):
        q.fit(Misbehaving(lambda s: torch.nan * s, 39), n_features=2)
    assert np.isfinite(q.particles_).all()


def test_lbfgs_that_ends_too_early_says_so():
    q = KSDDescent(n_particles=20, max_iter=10, random_state=0)
    with pytest.warns(ConvergenceWarning, match=r"after 10 iterations, .* fell by \d+%. Raise `max_iter`"):
        q.fit(lambda x: -x - x**3, n_features=2)
    q.set_params(solver="adam").fit(lambda x: -x - x**3, n_features=2)  # whose steps are as many as were asked for
    converged = q.set_params(solver="lbfgs", max_iter=100, tol=0.0).fit(lambda x: -x - x**3, n_features=2)
    assert converged.n_iter_ == 100
    assert last_fall([5.0, 3.0, 4.0]) == 0
    assert last_fall([5.0, 4.0, 3.0]) == 1 / 4
    assert last_fall([9.0] * 10 + [8.0] * 18 + [7.0, 6.0]) == 1 / 4


@pytest.mark.parametrize("end", [KeyboardInterrupt, FloatingPointError])
@pytest.mark.parametrize("n_calls", [1, 9])
def test_lbfgs_that_is_interrupted_keeps_the_best_particles(end, n_calls, monkeypatch):
    """A line search stands anywhere when it ends."""
    seen = []

    def spy(x, s, kernel):
        if len(seen) == n_calls:
            raise end
        ksd, dx, ds = ksd_gradient(x, s, kernel)
        seen.append((ksd.item(), x.clone()))
        return ksd, dx, ds

    monkeypatch.setattr(_particles, "ksd_gradient", spy)
    q = KSDDescent(whiten=None, n_particles=20, bandwidth=0.3, random_state=0)
    with pytest.raises(end):
        q.fit(lambda x: -x - 50 * x**3, n_features=2)
    values = [value for value, _ in seen]
    best = min(seen, key=lambda pair: pair[0])[1]
    np.testing.assert_array_equal(q.particles_, best)
    np.testing.assert_array_equal(q.loss_curve_, values)
    assert 0 < q.n_iter_ <= n_calls
    assert np.isfinite(q.sample(30)).all()
