"""The contract of every target."""

import numpy as np
import pytest
import torch

from skksivi.targets import (
    Banana,
    BayesianLogisticRegression,
    ConditionedDiffusion,
    Multimodal,
    Target,
    XShaped,
    from_score_fn,
)

rng = np.random.RandomState(0)
X, y = rng.normal(size=(30, 3)), rng.randint(2, size=30)
TARGETS = [
    Banana(),
    Multimodal(),
    XShaped(),
    BayesianLogisticRegression(X, y, fit_intercept=True),
    ConditionedDiffusion(10),
    ConditionedDiffusion(10, drift="bounded"),
]
EXACT = [target for target in TARGETS if hasattr(target, "sample")]


@pytest.fixture(params=TARGETS, ids=lambda target: type(target).__name__)
def target(request):
    return request.param


@pytest.fixture(params=EXACT, ids=lambda target: type(target).__name__)
def exact(request):
    return request.param


def points(target, dtype=torch.float64, n=7):
    return 2 * torch.randn(n, target.n_features, generator=torch.Generator().manual_seed(0), dtype=dtype)


def test_score_is_the_gradient_of_log_prob(target):
    x = points(target)
    torch.testing.assert_close(target.score_fn(x), Target.score_fn(target, x), rtol=1e-10, atol=1e-10)


def test_jacobian_of_the_score_is_symmetric_and_right(target):
    x = points(target, n=1)[0]
    J = torch.autograd.functional.jacobian(lambda a: target.score_fn(a[None])[0], x)
    H = torch.autograd.functional.hessian(lambda a: target.log_prob(a[None])[0], x)
    torch.testing.assert_close(J, H, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(J, J.mT)


def test_rows_are_independent(target):
    x = points(target)
    torch.testing.assert_close(target.score_fn(x)[2:3], target.score_fn(x[2:3]))
    torch.testing.assert_close(target.log_prob(x)[2:3], target.log_prob(x[2:3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_type_follows_the_input_and_single_agrees_with_double(target, dtype):
    x = points(target, dtype)
    for moved in (target, target.to(dtype=dtype), target.to(dtype=torch.float32)):
        s = moved.score_fn(x)
        assert s.dtype == dtype
        torch.testing.assert_close(s.double(), target.score_fn(x.double()), rtol=1e-4, atol=1e-4)


def test_moving_leaves_the_original_alone(target):
    before = target.score_fn(points(target))
    target.to(dtype=torch.float32)
    torch.testing.assert_close(target.score_fn(points(target)), before, rtol=0, atol=0)


def test_scikit_learn_sees_something_it_can_split_but_not_convert_or_call(target):
    assert target.shape == (1, target.n_features)
    assert target[np.arange(1), ...] is target
    assert not callable(target)
    assert not hasattr(target, "fit")
    with pytest.raises(TypeError, match="not an array"):
        np.asarray(target)


def test_exact_draws_satisfy_the_stein_identities(exact):
    """E[s] = 0 and E[s_i x_j] = -delta_ij, within 4 standard errors."""
    x = exact.sample(50_000, torch.Generator().manual_seed(1))
    s = exact.score_fn(x)
    products = s[:, :, None] * x[:, None, :] + torch.eye(exact.n_features)
    for values in (s, products):
        z = values.mean(0) / values.std(0) * len(values) ** 0.5
        assert z.abs().max() < 4


def test_exact_targets_are_normalised(exact):
    """Importance sampling from a wide Gaussian estimates the integral of p."""
    proposal = torch.distributions.MultivariateNormal(torch.tensor([0.0, 1.0]).double(), 16 * torch.eye(2).double())
    x = proposal.mean + 4 * torch.randn(200_000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w = (exact.log_prob(x) - proposal.log_prob(x)).exp()
    assert abs(w.mean() - 1) < 4 * w.std() / len(w) ** 0.5


def test_scores_are_finite_far_out(target):
    assert target.score_fn(1e3 * points(target)).isfinite().all()
    x = (1e3 * points(target)).requires_grad_()
    (g,) = torch.autograd.grad(target.score_fn(x).sum(), x)
    assert g.isfinite().all()


def test_the_banana_opens_upward_at_one():
    x = Banana().sample(20_000, torch.Generator().manual_seed(0))
    assert x[:, 1].mean() == pytest.approx(2, abs=0.1)
    assert torch.corrcoef(torch.stack([x[:, 0].square(), x[:, 1]]))[0, 1] > 0.7


def test_logistic_regression_adds_its_intercept_only_when_asked():
    plain = BayesianLogisticRegression(np.column_stack([np.ones(30), X]), y, prior_precision=0.3)
    own = BayesianLogisticRegression(X, y, prior_precision=0.3, fit_intercept=True)
    torch.testing.assert_close(plain.score_fn(points(plain)), own.score_fn(points(own)))
    assert BayesianLogisticRegression(X, y).n_features == 3


def test_logistic_regression_takes_any_two_labels():
    named = np.where(y == 1, "yes", "no")
    x = points(BayesianLogisticRegression(X, y))
    torch.testing.assert_close(
        BayesianLogisticRegression(X, named).score_fn(x), BayesianLogisticRegression(X, y).score_fn(x)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((X, np.zeros(30)), "two classes"), ((X, np.arange(30)), "two classes"), ((X, y, 0.0), "prior_precision")],
)
def test_logistic_regression_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        BayesianLogisticRegression(*arguments)


def test_a_subclass_needs_neither_init_nor_score():
    class Quartic(Target):
        n_features = 2

        def log_prob(self, x):
            return -x.pow(4).sum(-1)

    x = torch.ones(3, 2, requires_grad=True)
    s = Quartic().score_fn(x)
    torch.testing.assert_close(s, torch.full((3, 2), -4.0))
    (g,) = torch.autograd.grad(s.sum(), x)
    torch.testing.assert_close(g, torch.full((3, 2), -12.0))


def test_a_subclass_with_a_wrong_log_prob_is_told():
    class Column(Target):
        n_features = 2

        def log_prob(self, x):
            return -x.square().sum(-1, keepdim=True)

    with pytest.raises(ValueError, match=r"\(3, 1\), expected \(3,\)"):
        Column().score_fn(torch.ones(3, 2))
    with pytest.raises(TypeError, match="score_fn"):
        type("Empty", (Target,), {"n_features": 1})().score_fn(torch.ones(1, 1))


def test_from_score_fn_refuses():
    with pytest.raises(TypeError, match="callable"):
        from_score_fn(3, 2)
    with pytest.raises(ValueError, match="n_features"):
        from_score_fn(torch.neg, 0)


@pytest.mark.parametrize("target", [t for t in TARGETS if t.score_vjp], ids=lambda t: type(t).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_score_vjp_equals_autograd(target, dtype):
    x, v = points(target, dtype).requires_grad_(), points(target, dtype).flip(0)
    expected = target.score_fn(x)
    (product,) = torch.autograd.grad(expected, x, v)
    s, vjp = target.score_vjp(x.detach())
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(s, expected.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(vjp(v), product, rtol=tolerance, atol=tolerance)
