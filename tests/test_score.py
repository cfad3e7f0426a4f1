"""Any score function is safe: products with its Jacobian are right, whatever it is made of, or refused."""

import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import plain_targets
import pytest
import torch
from approximators import short
from hypothesis import given
from hypothesis import strategies as st
from members import every, refused
from plain_targets import PAIR, RING, GaussianScore, as_score, log_gamma_score, normal, own, student_score
from torch.autograd.function import once_differentiable

from skksivi import KSIVIApproximator, targets
from skksivi.baselines import Laplace
from skksivi.coordinates._affine import Affine
from skksivi.metrics import ksd
from skksivi.parameters import Pilot
from skksivi.pilot._newton import jacobians
from skksivi.score._domain import grows_outward
from skksivi.score._probe import in_double, trial_points
from skksivi.score._products import choose_product
from skksivi.score._refusals import ASYMMETRY
from skksivi.score._score import STEPS, Halves, Tempered, autograd_pullback, central_difference
from skksivi.targets import Banana, from_log_prob, from_score_fn


def quartic(x):
    """Of log p = -sum (x_i - 1)^4 / 4 - (sum x_i)^2 / 2."""
    return -((x - 1) ** 3) - x.sum(1)[:, None]


def quartic_of_arrays(X):
    assert isinstance(X, np.ndarray)
    return -((X - 1) ** 3) - np.sum(X, axis=1, keepdims=True)


X, Y = np.random.RandomState(0).normal(size=(30, 4)), np.arange(30) % 2
TARGETS = {
    "Banana": (Banana().score_fn, 2),
    "XShaped": (targets.XShaped().score_fn, 2),
    "Multimodal": (targets.Multimodal().score_fn, 2),
    "logistic regression": (targets.BayesianLogisticRegression(X, Y).to(dtype=torch.float64).score_fn, 4),
    "diffusion": (targets.ConditionedDiffusion().to(dtype=torch.float64).score_fn, 100),
    "ring": (RING.score_fn, 2),
    "pair": (PAIR.score_fn, 2),
    "log-Gamma": (log_gamma_score, 3),
    "Student": (student_score, 3),
    "Cauchy": (lambda x: -2 * x / (1 + x.square()), 2),
    "Laplace": (lambda x: -x.sign(), 2),
    "quartic": (quartic, 3),
    "far and badly scaled": (GaussianScore(4, 12, 1e4, seed=0).score_fn, 4),
}
every_target = every("name", list(TARGETS))


def resolved(score_fn, d, products="auto", dtype=torch.float32, near=None):
    target = score_fn if products == "auto" else from_score_fn(score_fn, d, products=products)
    return plain_targets.resolved(target, d, dtype=dtype, near=near)


# The products


IN_DOUBLE_ONLY = {"far and badly scaled", "logistic regression"}


@every("name, dtype", [(n, t) for t in STEPS for n in TARGETS if t == torch.float64 or n not in IN_DOUBLE_ONLY])
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
    sizes, step = [], STEPS[torch.float32]
    plain = central_difference(lambda x: sizes.append(len(x)) or torch.sin(x), x, v, step)
    assert sizes == [8]
    scaled = central_difference(torch.sin, x, v * size, step)
    torch.testing.assert_close(scaled / size, plain, rtol=1e-2, atol=1e-3)
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
    u, v, found = normal(9, 2), normal(9, 2, seed=1), []
    for sinh, products in ((np.sinh, "auto"), (torch.sinh, "autograd")):
        score = resolved(lambda x, sinh=sinh: -sinh(x / size) / size, 2, products, near=[size, size])
        s, pull = map_.pull_back(score.double).with_pullback(u)
        found.append((s, pull(v)))
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-7)


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
every_fault = every("fault", FAULTY)


@every_fault
def test_a_graph_with_a_hole_is_found(fault):
    for score_fn, d in (TARGETS[name] for name in TARGETS if name != "Laplace"):
        assert resolved(fault(score_fn), d).by_differences
        with pytest.raises(ValueError, match=r"`products` is 'autograd', but .* set products='auto'"):
            resolved(fault(score_fn), d, "autograd")


def test_no_graph_is_found_where_differences_are_too_coarse_to_compare():
    """At a scale of 1e-6, which a step of 1e-5 leaps over."""
    score_fn = lambda x: -torch.sinh(x / 1e-6)  # noqa: E731
    assert resolved(lambda x: score_fn(x.detach()), 2, near=[1e-6, 1e-6]).by_differences
    assert not resolved(score_fn, 2, near=[1e-6, 1e-6]).by_differences


def test_a_score_with_its_own_product_is_evaluated_without_a_graph():
    """A graph would hold what each of many draws needs for its product, gigabytes for a network on large data."""

    seen = []
    for more, needs_graph in (({}, True), ({"score_vjp": lambda x: (-x, torch.neg)}, False)):
        target = own(2, score_fn=lambda x: seen.append(x.requires_grad) or -x, **more)
        score = resolved(target, None, dtype=torch.float64)
        seen.clear()
        score(normal(3, 2))
        assert seen == [needs_graph]


# How it is called


WEIGHTS = torch.tensor([[2.0, 0.5], [0.5, 1.0]])


BLACK_BOXES = {
    "numpy": lambda X: -np.tanh(X) * np.cosh(X) / np.cosh(X) - X + np.tanh(X),
    "arrays only": lambda X: -X.astype(float),
    "float32 arrays": lambda X: -X.astype(np.float32),
    "tensors to arrays": lambda x: -x.detach().numpy(),
    "tensors without a graph": lambda x: torch.from_numpy(-x.numpy()),
    "its own autograd": lambda x: torch.autograd.grad(-x.square().sum() / 2, x)[0].numpy(),
    "a mixture of both": lambda X: -np.ones(2) * X,
    "another type": lambda x: -x.double(),
    "long double": lambda X: -np.asarray(X, np.longdouble) * np.longdouble(1),
    "big-endian": lambda X: (-X * np.ones(2)).astype(">f8"),
}


@every("name", list(BLACK_BOXES))
@every("dtype", list(STEPS))
def test_black_boxes_are_called_with_what_they_take(name, dtype):
    score = resolved(BLACK_BOXES[name], 2, dtype=dtype)
    x, v = normal(5, 2), normal(5, 2, seed=1)
    for a in (score, score.double):
        s, pull = a.with_pullback(x.to(dtype))
        torch.testing.assert_close(s, -x.to(dtype))
        torch.testing.assert_close(pull(v.to(dtype)), -v.to(dtype), rtol=1e-3, atol=1e-3)


@every("of_score", [BLACK_BOXES["arrays only"], torch.neg])
@every("of_density", [lambda X: (X.astype(">f8") ** 2).sum(1) / -2, lambda x: -x.square().sum(1) / 2])
def test_a_score_has_the_density_that_is_given_with_it(of_density, of_score):
    """Of tensors or arrays, both in one process or by workers."""
    for options in ({}, {"n_jobs": 1, "chunk_size": 2}):
        target = from_score_fn(of_score, 2, log_prob=of_density, names=["a", "b"], **options)
        score, x = resolved(target, 2), normal(5, 2)
        torch.testing.assert_close(score.log_prob(x), -x.square().sum(1) / 2)
        assert score.names == ("a", "b")
        assert list(target.constrain(x)) == ["a", "b"]
    for f, words in ((torch.neg, r"shape \(2, 2\) for two points"), (lambda X: X @ np.ones(3), "mismatch in its")):
        refused((TypeError, ValueError), words, lambda f=f: from_score_fn(of_score, 2, log_prob=f))


def test_a_score_of_single_precision_gets_steps_of_single_precision():
    assert resolved(BLACK_BOXES["float32 arrays"], 2).double.step == STEPS[torch.float32]
    assert resolved(lambda x: -x @ WEIGHTS, 2).double.step == STEPS[torch.float32]
    assert resolved(BLACK_BOXES["arrays only"], 2).double.step == STEPS[torch.float64]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu")], ids=range(2))
def test_the_mode_around_a_fit_does_not_matter(mode):
    """Of a fit by a pilot that trains."""
    q = KSIVIApproximator(max_iter=5, batch_size=16, whiten=Pilot(budget=1000), method="path", random_state=0)
    expected = q.fit(quartic, n_features=2).sample(5)
    with mode():
        np.testing.assert_array_equal(q.fit(quartic, n_features=2).sample(5), expected)
        assert np.isfinite(q.score(quartic))
        Laplace(dtype="float32").fit(lambda x: -x @ WEIGHTS, n_features=2)


# Memory that is used again


def whole(store, x, call):
    return store.setdefault(x.dtype, torch.empty(5000, x.shape[1], dtype=x.dtype))[: len(x)]


def in_turn(store, x, call):
    return store.setdefault((x.dtype, x.shape, call % 3), torch.empty_like(x))


class InBuffer:
    """A function whose results are written into memory that is its own."""

    def __init__(self, function, buffer, has_graph):
        self.function, self.buffer, self.has_graph = function, buffer, has_graph
        self.store, self.n_calls = {}, 0

    def __call__(self, *args):
        value = self.function(*args)
        self.n_calls += 1
        out = self.buffer(self.store, value.detach(), self.n_calls)
        return out.detach().copy_(value if self.has_graph else value.detach())


def cube(x):
    return 1 - x**3


def in_arrays(buffer):
    inner = InBuffer(cube, buffer, False)
    return lambda X: inner(torch.from_numpy(X)).numpy()


def own_product(buffer):
    scores, times = InBuffer(cube, buffer, False), InBuffer(torch.mul, buffer, False)
    return own(3, score_fn=cube, score_vjp=lambda x: (scores(x), lambda v: times(-3 * x**2, v)))


@every("dtype", list(STEPS))
@every("buffer", [whole, in_turn])
@every("make", [lambda buffer: InBuffer(cube, buffer, True), in_arrays, own_product])
def test_a_result_outlives_the_next_call(make, buffer, dtype):
    score = resolved(make(buffer), 3, dtype=dtype)
    for n in (3, 40):
        x, y, v = (normal(n, 3, seed=k).to(dtype) for k in range(3))
        first, (kept, pull) = score(x), score.with_pullback(x)
        score(y)
        product = pull(v)
        score.with_pullback(y)[1](y)
        for s in (first, kept):
            torch.testing.assert_close(s, cube(x))
        torch.testing.assert_close(product, -3 * x**2 * v, rtol=1e-2, atol=1e-2)
        halves = Halves(score, torch.Generator())
        torch.testing.assert_close(halves.with_pullback(x)[1](v), -3 * x**2 * v, rtol=1e-2, atol=1e-2)


def test_a_density_in_a_buffer_outlives_the_next_call():
    density = InBuffer(lambda x: -x.square().sum(1)[:, None] / 2, whole, True)
    score = resolved(own(2, log_prob=lambda x: density(x)[:, 0]), None)
    x = normal(5, 2).float()
    value = score.log_prob(x)
    score.log_prob(2 * x)
    torch.testing.assert_close(value, -x.square().sum(1) / 2)


# Functions that raise where they are not defined

FAR = 8.0


def refusing(error, function=lambda x: -x):
    """Return a function, the score of a standard normal by default, which raises at points far out."""

    def refuses(x):
        if (abs(x) > FAR).any():
            raise error
        return function(x)

    return refuses


DIVIDING = refusing(ZeroDivisionError("division by zero"))
RAISING = {
    "torch's matrix": refusing(torch.linalg.LinAlgError("not positive definite")),
    "solver": refusing(RuntimeError("Failed to converge after 50 iterations")),
    "density": own(3, log_prob=refusing(ValueError("far out"), lambda x: -x.square().sum(1) / 2)),
    "product": own(3, score_fn=DIVIDING, score_vjp=lambda x: (DIVIDING(x), torch.neg)),
}


@every("target", RAISING)
def test_rows_that_raise_are_nan_and_are_counted(target):
    with pytest.warns(UserWarning, match="count as outside the target"):
        score = resolved(target, 3)
    x = normal(20, 3).float()
    x[[2, 11, 12]] *= 100
    expected, before = torch.where((x.abs() > FAR).any(1, keepdim=True), torch.nan, -x), score.tally.total
    s, pull = score.with_pullback(x)  # it is told once
    assert score.tally.total > before + len(x)
    assert score.tally.n_rejected >= 3
    for found in (s, score(x)):
        torch.testing.assert_close(found, expected, equal_nan=True)
    inside = expected.isfinite().all(1)
    v = torch.ones_like(x)
    torch.testing.assert_close(pull(v)[inside], -v[inside], rtol=1e-3, atol=1e-3)
    if score.log_prob is not None:
        assert score.log_prob(x).isfinite().tolist() == inside.tolist()


# Derivatives that torch lacks


class Once(torch.autograd.Function):
    """Half of the square, of which the derivative has none."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square() / 2

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


CENTRES = torch.tensor([[1.0, 0.0], [0.0, -1.0], [2.0, 2.0]])
LOG_PROBS = {
    "cdist": lambda x: -torch.cdist(x, CENTRES.to(x)).square().sum(1) / 2,
    "pdist": lambda x: (
        -torch.stack([torch.pdist(torch.cat([row[None], CENTRES.to(x)])) for row in x]).square().sum(1)
    ),
    "once": lambda x: -Once.apply(x - 1).sum(1),
    "partly": lambda x: -Once.apply(x[:, 0]) - x[:, 1].square(),
}


@every("log_prob", LOG_PROBS)
def test_where_torch_lacks_a_second_derivative_products_are_differences(log_prob):
    target, x, v = from_log_prob(log_prob, 2), normal(5, 2), normal(5, 2, seed=1)
    score = resolved(target, None)
    assert score.by_differences
    expected = central_difference(target.score_fn, x, v, 1e-4).float()
    torch.testing.assert_close(score.with_pullback(x.float())[1](v.float()), expected, rtol=1e-2, atol=1e-2)
    target.products = "autograd"
    refused(ValueError, r"`products` is 'autograd', but .* second derivative", resolved, target, None)


# Second derivatives of torch that are NaN


def mixed(gap, d, log10_sd, weight):
    """Two far modes by `logaddexp`, whose second derivative is NaN where one is far below the other."""
    centre = gap * torch.nn.functional.one_hot(torch.tensor(0), d)

    def part(x, m, shift):
        return shift - ((x / 10**log10_sd - m.to(x)) ** 2).sum(1) / 2

    return lambda x: torch.logaddexp(part(x, -centre, 0.0), part(x, centre, weight))


def masked(gap, d, log10_sd, weight):
    """A part that is zero on one side, whose second derivative is infinite, times zero, there."""

    def log_prob(x):
        z = x / 10**log10_sd
        return -(z.square() / 2 + (z - gap / 100).relu() ** 1.5).sum(1)

    return log_prob


MAKERS = st.sampled_from([mixed, masked])
NAN = st.tuples(MAKERS, st.floats(1, 100), st.integers(1, 4), st.floats(-4, 4), st.floats(-2, 2))


@given(case=NAN, seed=st.integers(0, 10**6), dtype=st.sampled_from(["float32", "float64"]))
def test_second_derivatives_that_are_nan_are_differences(case, seed, dtype):
    """At the points of a fit the products are finite, and those of differences where they were not."""
    make, gap, d, log10_sd, weight = case
    score = resolved(from_log_prob(make(gap, d, log10_sd, weight), d), None, dtype=getattr(torch, dtype))
    map_ = Affine(torch.zeros(d).double(), 10**log10_sd * torch.eye(d).double())
    u, v = normal(50, d, seed=seed), normal(50, d, seed=seed + 1)
    u[0] = 0
    for of_u in (map_.pull_back(score), map_.pull_back(score.double)):
        s, pull = of_u.with_pullback(u)
        assert (pull(v).isfinite() & of_u.product(u, v).isfinite())[s.isfinite()].all()


# What it is the gradient of


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


@every("radius", [1.0, 10.0, 1e2, 1e3])
def test_the_wrong_sign_is_named_from_three_shells_on(radius):
    """Of distances 1, 10, 100, ... the score is finite up to a radius."""
    score = in_double(lambda x: x.where(x.norm(dim=1, keepdim=True) < 2 * radius, torch.nan), 3)
    assert grows_outward(score) == (radius >= 100)


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


@every("name", ["plain", "whitened", "tempered", "halves", "nested"])
@every("by_differences", [False, True])
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


FITTED = Laplace(random_state=0).fit(torch.neg, n_features=2)


@pytest.mark.filterwarnings("ignore")
@every("cls, whiten", [(KSIVIApproximator, "laplace"), (Laplace, None)])
def test_the_default_device_does_not_matter(cls, whiten):
    def outcome():
        target, q = Banana(), short(cls(random_state=0))
        if hasattr(q, "whiten"):
            q.set_params(whiten=whiten)
        X = q.fit(target).sample(20)
        return X, q.score(target), ksd(X, target), q.score(X) if hasattr(q.sampler_, "log_density") else 0

    expected = outcome()
    with torch.device("meta"):
        found = outcome()
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_density_that_works_in_double_precision_alone_is_fitted():
    def score_fn(x):
        if x.dtype != torch.float64:
            raise torch.linalg.LinAlgError("not positive definite")
        return 1 - x

    X = KSIVIApproximator(random_state=0).fit(score_fn, n_features=2).sample(20_000)
    np.testing.assert_allclose(X.mean(0), 1, atol=0.05)
