"""Whole classes of scores that give wrong results without a word, over generated cases: mended or named."""

import copy
import itertools
import math
import warnings
from functools import partial

import numpy as np
import plain_targets
import pytest
import torch
from approximators import short
from hypothesis import given
from hypothesis import strategies as st
from plain_targets import RING, log_gamma_score, normal, normal_array, own, student_score
from torch import distributions as dist
from torch.autograd.function import once_differentiable

from skksivi import HKSIVIApproximator, KSIVIApproximator
from skksivi.baselines import MALA, SVGD, Laplace
from skksivi.coordinates._affine import Affine
from skksivi.metrics import kl_divergence, ksd
from skksivi.score._score import STEPS, Halves, central_difference
from skksivi.targets import Banana, Target, from_log_prob

resolved = partial(plain_targets.resolved, dtype=torch.float32)


# Memory that is used again


def whole(store, x, call):
    return store.setdefault(x.dtype, torch.empty(5000, x.shape[1], dtype=x.dtype))[: len(x)]


def in_turn(store, x, call):
    return store.setdefault((x.dtype, x.shape, call % 3), torch.empty_like(x))


def columns(store, x, call):
    return store.setdefault(x.dtype, torch.empty(x.shape[1], 5000, dtype=x.dtype)).mT[: len(x)]


BUFFERS = [whole, in_turn, columns]


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


class InArray:
    """The same of arrays."""

    def __init__(self, function, buffer):
        self.inner = InBuffer(function, buffer, False)

    def __call__(self, X):
        return self.inner(torch.from_numpy(X)).numpy()


class OwnProduct(Target):
    def __init__(self, buffer, of_scores, of_products):
        self.scores = InBuffer(cube, buffer, False) if of_scores else cube
        self.times = InBuffer(torch.mul, buffer, False) if of_products else torch.mul

    def score_fn(self, x):
        return cube(x)

    def score_vjp(self, x):
        return self.scores(x), lambda v: self.times(-3 * x**2, v)


IN_BUFFERS = [InBuffer(cube, *case) for case in itertools.product(BUFFERS, (False, True))]
IN_ARRAYS = [InArray(cube, buffer) for buffer in BUFFERS]
OWN_PRODUCTS = [
    OwnProduct(*case) for case in itertools.product(BUFFERS, (False, True), (False, True)) if any(case[1:])
]


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("target", [*IN_BUFFERS, *IN_ARRAYS, *OWN_PRODUCTS])
def test_a_result_outlives_the_next_call(target, dtype):
    target, d = copy.deepcopy(target), 3  # with memory of its own
    if isinstance(target, OwnProduct):
        target.n_features = d
    score = resolved(target, d, dtype=dtype)
    for n in (3, 40):
        x, y, v = (normal(n, d, seed=k).to(dtype) for k in range(3))
        first, (kept, pull) = score(x), score.with_pullback(x)
        score(y)
        product = pull(v)
        score.with_pullback(y)[1](y)
        for s in (first, kept):
            torch.testing.assert_close(s, cube(x))
        torch.testing.assert_close(product, -3 * x**2 * v, rtol=1e-2, atol=1e-2)
        halves = Halves(score, torch.Generator())
        torch.testing.assert_close(halves.with_pullback(x)[1](v), -3 * x**2 * v, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("score_fn", [lambda x: x, lambda x: x[:], lambda x: x.view(-1, 2)], ids=range(3))
def test_a_score_is_no_view_of_its_points(score_fn):
    with pytest.warns(UserWarning, match="wrong sign"):
        score = resolved(score_fn, 2)
    x = normal(3, 2).float()
    assert score(x).data_ptr() != x.data_ptr()


def test_a_density_in_a_buffer_outlives_the_next_call():
    density = InBuffer(lambda x: -x.square().sum(1)[:, None] / 2, whole, True)
    score = resolved(own(2, log_prob=lambda x: density(x)[:, 0]))
    x = normal(5, 2).float()
    value = score.log_prob(x)
    score.log_prob(2 * x)
    torch.testing.assert_close(value, -x.square().sum(1) / 2)


# Rows that depend on each other


def in_blocks(x):
    return torch.cat([block / len(block) for block in x.split(20)])


#: What makes one row of a score another's affair.
COUPLINGS = {
    "mean": lambda f: lambda x: f(x) / len(x),
    "centred": lambda f: lambda x: f(x - x.mean(0)),
    "standardised": lambda f: lambda x: f((x - x.mean(0)) / x.std(0)),
    "scores centred": lambda f: lambda x: f(x) - f(x).mean(0),
    "a little": lambda f: lambda x: f(x) + 0.1 * f(x).mean(0),
    "first row": lambda f: lambda x: f(x - x[:1]),
    "last row": lambda f: lambda x: f(x) + x[-1],
    "neighbour": lambda f: lambda x: f(x + x.roll(1, 0)),
    "normed": lambda f: lambda x: f(x) / f(x).norm(),
    "attention": lambda f: lambda x: f((x @ x.mT).softmax(1) @ x),
    "blocks": lambda f: lambda x: in_blocks(f(x)),
    "one coordinate": lambda f: lambda x: f(torch.cat([x[:, :1] - x[:, :1].mean(), x[:, 1:]], 1)),
}


def badly_scaled(x):
    scale = 10 ** torch.linspace(-6, 6, x.shape[1], dtype=x.dtype)
    return -x / scale.flip(0) ** 2


SCORES = {
    "normal": lambda x: 1 - x, "cubic": lambda x: 1 - x - x**3, "Student": student_score,
    "log-Gamma": log_gamma_score, "badly scaled": badly_scaled, "ring": RING.score_fn,
}  # fmt: skip


def of_arrays(score_fn):
    return lambda X: score_fn(torch.from_numpy(X)).numpy()


def coupled():
    for (name, score_fn), (kind, couple), d in itertools.product(SCORES.items(), COUPLINGS.items(), (2, 5)):
        if (name == "ring" and d != 2) or (kind == "one coordinate" and name == "ring"):
            continue
        for form in (lambda f: f, of_arrays, lambda f: lambda x, f=f: f(x.float()).to(x)):
            yield form(couple(score_fn)), d


@pytest.mark.parametrize("k", range(3))
def test_rows_that_depend_on_each_other_are_refused(k):
    for score_fn, d in itertools.islice(coupled(), k, None, 3):
        with pytest.raises(ValueError, match="rows must be independent"):
            resolved(score_fn, d)


def test_a_distance_to_a_score_of_coupled_rows_is_refused():
    with pytest.raises(ValueError, match="rows must be independent"):
        ksd(normal_array(20, 3), COUPLINGS["mean"](lambda x: -x))


def rounded(digits):
    return lambda f: lambda x: (f(x) * (1 + 10.0**-digits * math.sin(len(x)))).to(x)


def of_type(dtype, d):
    precision = (0.1 + torch.eye(d)).to(dtype)
    return lambda x: -(x.to(dtype) @ precision).to(x)


@pytest.mark.filterwarnings("ignore:`score_fn` computes in half precision:UserWarning")
@pytest.mark.parametrize("d", [2, 50])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_that_depends_on_the_size_of_the_batch_is_no_coupling(d, dtype):
    resolved(of_type(dtype, d), d)
    for name in {"normal", "cubic", "Student"}:
        resolved(rounded(5)(SCORES[name]), d)
    data = torch.randn(2000, d, generator=torch.Generator().manual_seed(0))
    resolved(lambda x: -(x.float() @ data.mT) @ data / 2000, d)


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


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("log_prob", LOG_PROBS.values(), ids=LOG_PROBS)
def test_where_torch_lacks_a_second_derivative_products_are_differences(log_prob, dtype):
    target = from_log_prob(log_prob, 2)
    score = resolved(target, dtype=dtype)
    assert score.by_differences
    x, v = normal(5, 2), normal(5, 2, seed=1)
    expected = central_difference(target.score_fn, x, v, 1e-4)
    torch.testing.assert_close(
        score.with_pullback(x.to(dtype))[1](v.to(dtype)).double(), expected, rtol=1e-2, atol=1e-2
    )
    target.products = "autograd"
    with pytest.raises(ValueError, match=r"`products` is 'autograd', but .* second derivative"):
        resolved(target, dtype=dtype)


# Second derivatives of torch that are NaN


def mixed(gap, d, log10_sd, weight):
    """Two far modes by `logaddexp`, whose second derivative is NaN where one is far below the other."""
    sd, centre = 10**log10_sd, gap * torch.nn.functional.one_hot(torch.tensor(0), d)

    def part(x, m, shift):
        return shift - ((x / sd - m.to(x)) ** 2).sum(1) / 2

    return lambda x: torch.logaddexp(part(x, -centre, 0.0), part(x, centre, weight))


def masked(gap, d, log10_sd, weight):
    """A part that is zero on one side, whose second derivative is infinite, times zero, there."""

    def log_prob(x):
        z = x / 10**log10_sd
        return -(z.square() / 2 + (z - gap / 100).relu() ** 1.5).sum(1)

    return log_prob


def powered(gap, d, log10_sd, weight):
    """A second derivative that is infinite at zero."""
    return lambda x: -((x / 10**log10_sd).abs() ** (1.2 + gap / 200)).sum(1)


def normed(gap, d, log10_sd, weight):
    """A norm, of which the second derivative is NaN at zero."""
    return lambda x: -(x / 10**log10_sd).norm(dim=1).square() / 2 - (x / 10**log10_sd)[:, 0] * weight / 10


MAKERS = st.sampled_from([mixed, masked, powered, normed])
NAN = st.tuples(MAKERS, st.floats(1, 100), st.integers(1, 4), st.floats(-4, 4), st.floats(-2, 2))


@given(case=NAN, seed=st.integers(0, 10**6), dtype=st.sampled_from(["float32", "float64"]))
def test_second_derivatives_that_are_nan_are_differences(case, seed, dtype):
    """At the points of a fit the products are finite, and those of differences where they were not."""
    make, gap, d, log10_sd, weight = case
    score = resolved(from_log_prob(make(gap, d, log10_sd, weight), d), dtype=getattr(torch, dtype))
    map_ = Affine(torch.zeros(d).double(), 10**log10_sd * torch.eye(d).double())
    u, v = normal(50, d, seed=seed), normal(50, d, seed=seed + 1)
    u[0] = 0
    for of_u in (map_.pull_back(score), map_.pull_back(score.double)):
        s, pull = of_u.with_pullback(u)
        assert (pull(v).isfinite() & of_u.product(u, v).isfinite())[s.isfinite()].all()


QUICK = {"max_iter": 100, "whiten": "laplace", "random_state": 0}
FITTED = Laplace(random_state=0).fit(torch.neg, n_features=2)


def test_tensors_with_a_graph_are_taken_for_what_they_hold():
    X, Y = normal(50, 2), normal(50, 2, seed=1)
    x, y = X.clone().requires_grad_(), 1.0 * Y.clone().requires_grad_()
    np.testing.assert_array_equal(FITTED.score_samples(x), FITTED.score_samples(X))
    assert FITTED.score(x) == FITTED.score(X)
    named = from_log_prob(lambda x: -x.square().sum(1), 2, names=["a", "b"])
    np.testing.assert_array_equal(named.constrain(x)["a"], X[:, 0])
    assert ksd(x, torch.neg) == ksd(X, torch.neg)
    assert kl_divergence(x, y) == kl_divergence(X, Y)
    started, plain = (KSIVIApproximator(init=init[:3], **QUICK).fit(torch.neg, n_features=2) for init in (x, X))
    np.testing.assert_array_equal(started.sample(3), plain.sample(3))


@pytest.mark.parametrize(
    ("cls", "whiten"),
    [(KSIVIApproximator, "laplace"), (HKSIVIApproximator, None), (Laplace, None), (SVGD, None), (MALA, "laplace")],
)
def test_the_default_device_does_not_matter(cls, whiten):
    def outcome():
        target, q = Banana(), short(cls(random_state=0))
        if hasattr(q, "whiten"):
            q.set_params(whiten=whiten)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            q.fit(target)
            X = q.sample(20)
            return X, q.score(target), ksd(X, target), q.score(X) if hasattr(q.sampler_, "log_density") else 0

    expected = outcome()
    with torch.device("meta"):
        found = outcome()
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


# Bounds


def gradient(log_prob):
    def score_fn(x):
        x = x if x.requires_grad else x.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(log_prob(x).sum(), x, create_graph=True)[0]

    return score_fn


def beyond(log_prob, low, high, value):
    """A log-density of which each coordinate is between two numbers, and another value elsewhere."""
    return lambda x: torch.where((x > low) & (x < high), log_prob(x), value).sum(1)


def beta(x, low, high):
    u = (x - low) / (high - low)
    return u.abs().log() + 2 * (1 - u).abs().log()


def gamma(x, low, high):
    return (2 * (x - low).abs().log() - (x - low)) if high == math.inf else (high - x).abs().log() - (high - x)


BOUNDS = {
    (0.0, 1.0): "unit interval", (0.0, math.inf): "positive", (-math.inf, 0.0): r'\("below", 0\)',
    (-2.0, 3.0): r'\("interval", -2, 3\)', (0.5, math.inf): r'\("above", 0.5\)',
}  # fmt: skip


@pytest.mark.parametrize(
    ("bounds", "d", "value"),
    [*((bounds, 2, -math.inf) for bounds in BOUNDS), ((0.0, 1.0), 1, math.nan), ((0.0, math.inf), 5, -1e10)],
)
def test_a_target_with_bounds_is_told_how_to_transform_it(bounds, d, value):
    part = gamma if math.inf in map(abs, bounds) else beta
    log_prob = beyond(lambda x: part(x, *bounds), *bounds, value)
    named = from_log_prob(log_prob, d, names=list("abcde"[:d]))
    for target, name in ((named, "a"), (gradient(log_prob), r"x\[0\]")):
        with pytest.warns(UserWarning, match=f"seems bounded.*{name}: .?{BOUNDS[bounds]}.*targets.constrained"):
            resolved(target, d)


def test_a_bound_of_one_coordinate_of_many_is_told():
    def log_prob(x):
        return -x[:, :-1].square().sum(1) + torch.where(x[:, -1] > 0, -x[:, -1], -math.inf)

    with pytest.warns(UserWarning, match=r"\(x\[39\]: \"positive\"\)"):
        resolved(gradient(log_prob), 40)


@pytest.mark.parametrize("law", [dist.Beta(2.0, 2.0), dist.LogNormal(0.0, 1.0)], ids=["Beta", "LogNormal"])
@pytest.mark.parametrize("is_checked", [True, False])
def test_a_distribution_with_bounds_is_told_how_to_transform_it(law, is_checked):
    law = law.expand([2])
    law._validate_args = is_checked
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((ValueError, UserWarning), match=r"seems bounded.*targets\.constrained"):
            resolved(from_log_prob(lambda x: law.log_prob(x).sum(1), 2))


OUT_OF_RANGE = {
    "overflow": lambda x: -x.exp().exp().sum(1) + x.sum(1),
    "sigmoid": lambda x: (torch.sigmoid(x) * (1 - torch.sigmoid(x))).log().sum(1),
    "underflow": lambda x: (-x.square() / 2).exp().log().sum(1),
    "mixture": lambda x: sum((-((x - m) ** 2).sum(1) / 2).exp() for m in (-3, 3)).log(),
    "far": lambda x: -(x / 1e-4).cosh().log().sum(1),
}


@pytest.mark.parametrize("log_prob", OUT_OF_RANGE.values(), ids=OUT_OF_RANGE)
def test_numbers_that_leave_their_range_are_no_bound(log_prob):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolved(from_log_prob(log_prob, 3))
        resolved(gradient(log_prob), 3)


# Functions that raise where they are not defined

FAR = 8.0


def refusing(error, function=lambda x: -x):
    """Return a function, the score of a standard normal by default, which raises at points far out."""

    def refuses(x):
        if (abs(x) > FAR).any():
            raise error
        return function(x)

    return refuses


def with_nan(x):
    return torch.where((x.abs() > FAR).any(1, keepdim=True), torch.nan, -x)


DIVIDING = refusing(ZeroDivisionError("division by zero"))
REFUSALS = {
    "torch's matrix": refusing(torch.linalg.LinAlgError("not positive definite")),
    "numpy's matrix": refusing(np.linalg.LinAlgError("not positive definite")),
    "range": refusing(ValueError("out of range")),
    "overflow": refusing(OverflowError("math range error")),
    "solver": refusing(RuntimeError("Failed to converge after 50 iterations")),
    "density": own(3, log_prob=refusing(ValueError("far out"), lambda x: -x.square().sum(1) / 2)),
    "product": own(3, score_fn=DIVIDING, score_vjp=lambda x: (DIVIDING(x), torch.neg)),
}


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("target", REFUSALS.values(), ids=REFUSALS)
def test_rows_that_raise_are_nan_and_are_counted(target, dtype):
    with pytest.warns(UserWarning, match="count as outside the target"):
        score = resolved(target, 3, dtype=dtype)
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=dtype)
    x[[2, 11, 12]] *= 100
    expected, before = with_nan(x), score.tally.total
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is told once
        s, pull = score.with_pullback(x)
    assert score.tally.total > before + len(x)
    assert score.tally.n_rejected >= 3
    for found in (s, score(x)):
        torch.testing.assert_close(found, expected, equal_nan=True)
    inside = expected.isfinite().all(1)
    v = torch.ones_like(x)
    torch.testing.assert_close(pull(v)[inside], -v[inside], rtol=1e-3, atol=1e-3)
    if score.log_prob is not None:
        assert score.log_prob(x).isfinite().tolist() == inside.tolist()


@pytest.mark.parametrize("name", ["range", pytest.param("product", marks=pytest.mark.slow)])
def test_a_function_that_raises_far_out_is_fitted_as_one_that_is_nan_there(name, uncertified):
    """A certificate looks for the rows that raise along every line."""

    def draws(target):
        q = KSIVIApproximator(random_state=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return q.fit(target, n_features=3).sample(20_000)

    X, expected = draws(REFUSALS[name]), draws(with_nan)
    for moment in (np.mean, np.std):
        np.testing.assert_allclose(moment(X, 0), moment(expected, 0), atol=0.05)


@pytest.mark.parametrize("error", [OSError, NotImplementedError, RecursionError, torch.OutOfMemoryError])
def test_errors_of_other_kinds_end_the_fit(error):
    with pytest.raises(error, match="elsewhere"):
        KSIVIApproximator(random_state=0).fit(refusing(error("elsewhere")), n_features=2)


def test_a_density_that_works_in_double_precision_alone_is_fitted():
    def score_fn(x):
        if x.dtype != torch.float64:
            raise torch.linalg.LinAlgError("not positive definite")
        return 1 - x

    X = KSIVIApproximator(random_state=0).fit(score_fn, n_features=2).sample(20_000)
    np.testing.assert_allclose(X.mean(0), 1, atol=0.05)
