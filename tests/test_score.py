"""Any score function is safe: products with its Jacobian are right, whatever it is made of, or refused."""

import importlib
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import plain_targets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_targets import PAIR, RING, GaussianScore, as_score, log_gamma_score, normal, own, student_score

from skksivi import KSIVIApproximator
from skksivi.baselines import Laplace
from skksivi.coordinates._affine import Affine
from skksivi.metrics import ksd
from skksivi.parameters import Pilot
from skksivi.pilot._newton import jacobians
from skksivi.score._improper import check_proper, flat_direction
from skksivi.score._probe import ASYMMETRY, choose_product, grows_outward, in_double, trial_points
from skksivi.score._score import STEPS, Halves, Tempered, autograd_pullback, central_difference
from skksivi.targets import (
    Banana,
    BayesianLogisticRegression,
    ConditionedDiffusion,
    Multimodal,
    XShaped,
    from_score_fn,
)


def quartic(x):
    """Of log p = -sum (x_i - 1)^4 / 4 - (sum x_i)^2 / 2."""
    return -((x - 1) ** 3) - x.sum(1)[:, None]


def quartic_of_arrays(X):
    assert isinstance(X, np.ndarray)
    return -((X - 1) ** 3) - np.sum(X, axis=1, keepdims=True)


X, Y = np.random.RandomState(0).normal(size=(30, 4)), np.arange(30) % 2
TARGETS = {
    "Banana": (Banana().score_fn, 2),
    "XShaped": (XShaped().score_fn, 2),
    "Multimodal": (Multimodal().score_fn, 2),
    "BayesianLogisticRegression": (BayesianLogisticRegression(X, Y).to(dtype=torch.float64).score_fn, 4),
    "ConditionedDiffusion": (ConditionedDiffusion().to(dtype=torch.float64).score_fn, 100),
    "ring": (RING.score_fn, 2),
    "pair": (PAIR.score_fn, 2),
    "log-Gamma": (log_gamma_score, 3),
    "Student": (student_score, 3),
    "Cauchy": (lambda x: -2 * x / (1 + x.square()), 2),
    "Laplace": (lambda x: -x.sign(), 2),
    "quartic": (quartic, 3),
    "far and badly scaled": (GaussianScore(4, 12, 1e4, seed=0).score_fn, 4),
}
every_target = pytest.mark.parametrize("name", TARGETS)


def resolved(score_fn, d, products="auto", dtype=torch.float32, near=None):
    target = score_fn if products == "auto" else from_score_fn(score_fn, d, products=products)
    return plain_targets.resolved(target, d, dtype=dtype, near=near)


# The products


IN_DOUBLE_ONLY = {"far and badly scaled", "BayesianLogisticRegression"}


@pytest.mark.parametrize(
    ("name", "dtype"), [(n, t) for t in STEPS for n in TARGETS if t == torch.float64 or n not in IN_DOUBLE_ONLY]
)
def test_a_central_difference_is_the_product_of_autograd(name, dtype):
    score_fn, d = TARGETS[name]
    x, v = normal(20, d).to(dtype), normal(20, d, seed=1).to(dtype)
    s, pull = autograd_pullback(score_fn, x)
    product = pull(v)
    scale = product.norm(dim=1).max() + s.norm(dim=1).max()
    tolerance = {torch.float32: 5e-4, torch.float64: 1e-8}[dtype]
    error = (central_difference(score_fn, x, v, STEPS[dtype]) - product).norm(dim=1)
    assert error.median() < tolerance * scale


@given(d=st.integers(1, 5), seed=st.integers(0, 10**6), log10=st.floats(-25, 25))
def test_a_central_difference_is_linear_in_the_size_of_the_direction(d, seed, log10):
    """Even where its square is no float32 number; both ends are one call."""
    x, v, size = normal(4, d, seed=seed).float(), normal(4, d, seed=seed + 1).float(), np.float32(10**log10)
    sizes = []
    plain = central_difference(lambda x: sizes.append(len(x)) or torch.sin(x), x, v, STEPS[torch.float32])
    assert sizes == [8]
    torch.testing.assert_close(
        central_difference(torch.sin, x, v * size, STEPS[torch.float32]) / size, plain, rtol=1e-2, atol=1e-3
    )
    assert torch.equal(central_difference(torch.sin, x, 0 * v, 3e-3), 0 * v)


@pytest.mark.parametrize("score_fn", [quartic_of_arrays, lambda x: quartic(x).detach()], ids=["numpy", "detached"])
def test_jacobians_and_pullbacks_do_not_need_a_graph(score_fn):
    score = resolved(score_fn, 3)
    assert score.by_differences
    x, v = normal(5, 3), normal(5, 3, seed=1)
    torch.testing.assert_close(jacobians(score.double, x), jacobians(as_score(quartic), x), rtol=1e-6, atol=1e-6)
    s, pull = score.with_pullback(x.float())
    assert s.dtype == pull(v.float()).dtype == torch.float32
    torch.testing.assert_close(pull(v.float()).double(), autograd_pullback(quartic, x)[1](v), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_differences_are_taken_in_the_units_of_the_whitened_target(size):
    """In which x the target is, 1e-5 or 1e6 wide, does not matter then."""
    map_ = Affine(torch.zeros(2).double(), size * torch.tensor([[1.0, 0.0], [0.5, 1.0]]).double())
    u, v = normal(9, 2), normal(9, 2, seed=1)
    by_differences = map_.pull_back(resolved(lambda x: -np.sinh(x / size) / size, 2, near=[size, size]).double)
    by_autograd = map_.pull_back(
        resolved(lambda x: -torch.sinh(x / size) / size, 2, "autograd", near=[size, size]).double
    )
    (s, pull), (expected, exact_pull) = by_differences.with_pullback(u), by_autograd.with_pullback(u)
    torch.testing.assert_close((s, pull(v)), (expected, exact_pull(v)), rtol=1e-7, atol=1e-7)


# Which product is taken


@every_target
def test_right_graphs_are_used_without_a_warning(name):
    score_fn, d = TARGETS[name]
    assert not resolved(score_fn, d).by_differences
    assert not resolved(score_fn, d, "autograd").by_differences
    assert resolved(score_fn, d, "finite-difference").by_differences


def last_detached(score_fn):
    def partly(x):
        s = score_fn(x)
        return torch.cat([s[:, :-1], s[:, -1:].detach()], 1)

    return partly


def last_input_detached(score_fn):
    return lambda x: score_fn(torch.cat([x[:, :-1], x[:, -1:].detach()], 1))


def behind_parameters(score_fn):
    one = torch.nn.Parameter(torch.ones(()))
    return lambda x: one.to(x) * score_fn(x.detach())


FAULTY = [lambda f: lambda x: f(x.detach()), last_detached, last_input_detached, behind_parameters]
every_fault = pytest.mark.parametrize("fault", FAULTY, ids=["detached", "last output", "last input", "parameters"])


@every_fault
@pytest.mark.parametrize("name", sorted(set(TARGETS) - {"Laplace"}))
def test_a_graph_with_a_hole_is_found(name, fault):
    score_fn, d = TARGETS[name]
    assert resolved(fault(score_fn), d).by_differences
    with pytest.raises(ValueError, match=r"`products` is 'autograd', but .* set products='auto'"):
        resolved(fault(score_fn), d, "autograd")


@every_fault
def test_a_hole_is_found_in_single_precision_too(fault):
    def score_fn(x):
        return -x @ WEIGHTS  # refuses float64

    assert resolved(fault(score_fn), 2).by_differences
    assert not resolved(score_fn, 2).by_differences


def test_no_graph_is_found_where_differences_are_too_coarse_to_compare():
    """At a scale of 1e-6, which a step of 1e-5 leaps over."""

    def score_fn(x):
        return -torch.sinh(x / 1e-6)

    assert resolved(lambda x: score_fn(x.detach()), 2, near=[1e-6, 1e-6]).by_differences
    assert not resolved(score_fn, 2, near=[1e-6, 1e-6]).by_differences


@pytest.mark.parametrize(
    "score_fn",
    [torch.ones_like, torch.zeros_like, lambda x: 0 * x + 1, np.ones_like, lambda x: x.detach() * 0 + 2],
    ids=range(5),
)
def test_a_constant_score_is_legitimate(score_fn):
    score = resolved(score_fn, 3)
    x = normal(4, 3)
    assert torch.equal(score.with_pullback(x)[1](x), torch.zeros(4, 3).double())


@pytest.mark.parametrize("has_graph", [True, False])
@pytest.mark.parametrize("factor", [2.85, 3.0, 3.15])
def test_an_own_product_is_preferred_and_refused_if_it_is_wrong_by_a_twentieth(has_graph, factor):
    def score_fn(x):
        return -((x if has_graph else x.detach()) ** 3)

    target = own(2, score_fn=score_fn, score_vjp=lambda x: (score_fn(x), lambda v: -factor * x**2 * v))
    if factor == 3:
        score = resolved(target, None)
        assert score.score_vjp is not None
        assert not score.by_differences
    else:
        with pytest.raises(ValueError, match="`score_vjp` returns a product"):
            resolved(target, None)
    target.products = "finite-difference"
    assert resolved(target, None).score_vjp is None


def test_a_score_with_its_own_product_is_evaluated_without_a_graph():
    """A graph would hold what each of many draws needs for its product, gigabytes for a network on large data."""

    def score_fn(x):
        seen.append(x.requires_grad)
        return -x

    seen = []
    for more, needs_graph in (({}, True), ({"score_vjp": lambda x: (-x, torch.neg)}, False)):
        score = resolved(own(2, score_fn=score_fn, **more), None, dtype=torch.float64)
        seen.clear()
        score(normal(3, 2))
        assert seen == [needs_graph]


# How it is called


WEIGHTS = torch.tensor([[2.0, 0.5], [0.5, 1.0]])


def own_autograd_to_numpy(x):
    return torch.autograd.grad(-x.square().sum() / 2, x)[0].numpy()


BLACK_BOXES = {
    "numpy": lambda X: -np.tanh(X) * np.cosh(X) / np.cosh(X) - X + np.tanh(X),
    "arrays only": lambda X: -X.astype(float),
    "float32 arrays": lambda X: -X.astype(np.float32),
    "tensors to arrays": lambda x: -x.detach().numpy(),
    "tensors without a graph": lambda x: torch.from_numpy(-x.numpy()),
    "its own autograd": own_autograd_to_numpy,
    "a mixture of both": lambda X: -np.ones(2) * X,
    "another type": lambda x: -x.double(),
}


@pytest.mark.parametrize("name", BLACK_BOXES)
@pytest.mark.parametrize("dtype", STEPS)
def test_black_boxes_are_called_with_what_they_take(name, dtype):
    score = resolved(BLACK_BOXES[name], 2, dtype=dtype)
    x, v = normal(5, 2), normal(5, 2, seed=1)
    for a in (score, score.double):
        s, pull = a.with_pullback(x.to(dtype))
        torch.testing.assert_close(s, -x.to(dtype))
        torch.testing.assert_close(pull(v.to(dtype)), -v.to(dtype), rtol=1e-3, atol=1e-3)


def test_a_score_of_single_precision_gets_steps_of_single_precision():
    assert resolved(BLACK_BOXES["float32 arrays"], 2).double.step == STEPS[torch.float32]
    assert resolved(lambda x: -x @ WEIGHTS, 2).double.step == STEPS[torch.float32]
    assert resolved(BLACK_BOXES["arrays only"], 2).double.step == STEPS[torch.float64]


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, pytest.param(lambda: torch.autocast("cpu"), marks=pytest.mark.slow)], ids=range(2)
)
def test_the_mode_around_a_fit_does_not_matter(mode):
    """Of a fit by a pilot that trains."""
    q = KSIVIApproximator(max_iter=5, batch_size=16, whiten=Pilot(budget=1000), train=True, random_state=0)
    expected = q.fit(quartic, n_features=2).sample(5)
    with mode():
        np.testing.assert_array_equal(q.fit(quartic, n_features=2).sample(5), expected)
        assert np.isfinite(q.score(quartic))
        Laplace(dtype="float32").fit(lambda x: -x @ WEIGHTS, n_features=2)


# Warnings and errors


@every_target
def test_the_asymmetry_of_a_hessian_is_rounding(name):
    score_fn, d = TARGETS[name]
    for products in ("auto", "finite-difference"):
        score = in_double(score_fn, d)
        assert choose_product(score, products, trial_points(score))[1] < ASYMMETRY / 10


def test_no_posterior_of_the_benchmarks_is_warned_of(monkeypatch):
    """Heavy tails, funnels, spikes and modes, at all scales; a hole in the graph and a wrong sign are found."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    for posterior in importlib.import_module("posteriors").POSTERIORS.values():
        target = posterior.make()
        assert not resolved(target, None).by_differences
        target.products = "finite-difference"
        assert resolved(target, None).by_differences
        score_fn, d = target.to(dtype=torch.float64).score_fn, target.n_features
        assert resolved(last_detached(lambda x, score_fn=score_fn: score_fn(x.double())), d).by_differences
        with pytest.warns(UserWarning, match="wrong sign"):
            resolved(lambda x, score_fn=score_fn: -score_fn(x.double()), d)


@given(d=st.integers(2, 20), log10=st.floats(-2, 2), twist=st.floats(0.05, 1), seed=st.integers(0, 10**6))
def test_an_antisymmetric_part_of_a_twentieth_of_the_curvature_is_named(d, log10, twist, seed):
    rng = np.random.RandomState(seed)
    root = 10**log10 * (np.eye(d) + np.tril(rng.normal(size=(d, d)), -1) / d)
    precision = np.linalg.inv(root @ root.T)
    scale = np.sqrt(np.diag(precision))
    part = twist * np.triu(np.outer(scale, scale), 1)
    for A, is_named in ((precision, False), (precision + part - part.T, True)):
        A = torch.as_tensor(A)
        score = in_double(lambda x, A=A: -x @ A.to(x).mT, d)
        assert (choose_product(score, "auto", trial_points(score))[1] > ASYMMETRY) == is_named


@pytest.mark.parametrize("radius", [1.0, 10.0, 1e2, 1e3])
def test_the_wrong_sign_is_named_from_three_shells_on(radius):
    """Of distances 1, 10, 100, ... the score is finite up to a radius."""

    def score_fn(x):
        return x.where(x.norm(dim=1, keepdim=True) < 2 * radius, torch.nan)

    assert grows_outward(in_double(score_fn, 3)) == (radius >= 100)


def test_init_and_whiten_tell_where_a_score_is_finite():
    def far(x):
        return torch.where((x - 1e4).abs() < 100, 1e4 - x, torch.nan)

    with pytest.raises(ValueError, match="not finite at any"):
        resolved(far, 2)
    options = {"max_iter": 10, "mixing": "normal", "random_state": 0, "dtype": "float64"}
    KSIVIApproximator(init=[1e4 + 1, 1e4 + 2], whiten="laplace", **options).fit(far, n_features=2)
    pair = ([1e4 + 1, 1e4 + 1], [[1.0, 0.0], [0.0, 1.0]])
    KSIVIApproximator(whiten=pair, **options).fit(far, n_features=2)


# The whole


def test_metrics_take_scores_of_arrays():
    q = Laplace(random_state=0).fit(quartic_of_arrays, n_features=2)
    assert q.score(quartic_of_arrays) == pytest.approx(q.score(quartic), rel=1e-3)
    X = q.sample(200)
    assert ksd(X, quartic_of_arrays) == pytest.approx(ksd(X, quartic), rel=1e-6)


def wrapped(score):
    """Every wrapper of a score, with the factor and the coordinates of what it gives."""
    half = Affine(torch.zeros(2).double(), 0.5 * torch.eye(2).double())
    return {
        "plain": (score, 1.0, 1.0),
        "whitened": (half.pull_back(score), 1.0, 0.5),
        "tempered": (Tempered(score, torch.tensor(0.3).double()), 0.3, 1.0),
        "halves": (Halves(score, torch.Generator()), 1.0, 1.0),
        "nested": (Tempered(half.pull_back(score), torch.tensor(0.3).double()), 0.3, 0.5),
    }


@pytest.mark.parametrize("name", ["plain", "whitened", "tempered", "halves", "nested"])
@pytest.mark.parametrize("by_differences", [False, True])
def test_a_wrapper_forwards_value_product_density_minibatch_and_counts(name, by_differences):
    def log_prob(x):
        return -x.pow(4).sum(-1)

    plain = replace(as_score(lambda x: -4 * x.pow(3), log_prob, d=2), by_differences=by_differences)
    plain = replace(plain, minibatch=lambda generator: replace(plain, minibatch=None))
    score, c, scale = wrapped(plain)[name]
    x, v = torch.linspace(-1, 1, 12).double().view(6, 2), torch.linspace(2, 1, 12).double().view(6, 2)
    s, product = -4 * c * scale * (scale * x).pow(3), -12 * c * scale**2 * (scale * x).square() * v
    torch.testing.assert_close(score(x), s)
    assert score.tally is plain.tally
    assert (plain.tally.n_values, plain.tally.n_products) == (6, 0)
    value, pull = score.with_pullback(x)
    torch.testing.assert_close(value, s)
    torch.testing.assert_close(pull(v), product, rtol=1e-6, atol=1e-8)
    assert plain.tally.n_values == (24 if by_differences else 12)
    torch.testing.assert_close(score.product(x, v), product, rtol=1e-6, atol=1e-8)
    assert (plain.tally.n_values, plain.tally.n_products) == ((36, 0) if by_differences else (12, 12))
    torch.testing.assert_close(score.log_prob(x), c * log_prob(scale * x))
    part = score.minibatch(torch.Generator())
    assert type(part) is type(score)
    torch.testing.assert_close(part(x), s)


def test_without_density_or_minibatches_wrappers_have_none():
    for score, _, _ in wrapped(as_score(lambda x: -x, d=2)).values():
        assert score.log_prob is None
        assert score.minibatch is None


# Whether the density can be normalised


@given(d=st.integers(2, 8), log10_condition=st.floats(0, 6), size=st.floats(0, 100), seed=st.integers(0, 10**6))
def test_a_flat_direction_is_found_and_no_other(d, log10_condition, size, seed):
    p = GaussianScore(d, log10_condition, size, seed)
    assert flat_direction(as_score(p.score_fn, d=d)) is None
    precision = 1 / p.lam
    precision[seed % d] = 0.0

    def score_fn(x):
        return -(((x - p.mean) @ p.V) * precision) @ p.V.mT

    found = flat_direction(as_score(score_fn, d=d))
    assert (found @ p.V[:, seed % d]).abs() / found.norm() > 0.999


@pytest.mark.parametrize("d", [1, 2, 5])
def test_tails_that_have_no_finite_mass_are_warned_of(d):
    for exponent, is_proper in ((0.5 * d, False), (0.9 * d, False), (d + 1.0, True), (d + 3.0, True)):

        def score_fn(x, a=exponent):
            return -a * x / (1 + x.square().sum(1, keepdim=True))

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_proper(as_score(score_fn, d=d))
        assert any("may have infinite mass" in str(w.message) for w in caught) != is_proper
