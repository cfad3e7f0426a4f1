"""Whole classes of scores that give wrong results without a word, over generated cases: mended or named."""

import itertools
import math

import pytest
import torch
from plain_targets import RING, log_gamma_score, normal, normal_array, student_score

from skksivi import KSIVIApproximator
from skksivi.metrics import ksd
from skksivi.score._score import STEPS, Halves
from skksivi.score._target import resolve_score
from skksivi.targets import Target

CPU = torch.device("cpu")


def resolved(target, d=None, dtype=torch.float32, near=None):
    return resolve_score(target, d, dtype=dtype, device=CPU, near=near)


# Memory that is used again


def whole(store, x, call):
    return store.setdefault(x.dtype, torch.empty(5000, x.shape[1], dtype=x.dtype))[: len(x)]


def by_size(store, x, call):
    return store.setdefault((x.dtype, x.shape), torch.empty_like(x))


def grown(store, x, call):
    if len(store.get(x.dtype, ())) < len(x):
        store[x.dtype] = torch.empty_like(x)
    return store[x.dtype][: len(x)]


def in_turn(store, x, call):
    return store.setdefault((x.dtype, x.shape, call % 3), torch.empty_like(x))


def columns(store, x, call):
    return store.setdefault(x.dtype, torch.empty(x.shape[1], 5000, dtype=x.dtype)).mT[: len(x)]


BUFFERS = [whole, by_size, grown, in_turn, columns]


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


class OwnProduct(Target):
    n_features = 2

    def __init__(self, buffer, of_scores, of_products):
        self.scores = InBuffer(cube, buffer, False) if of_scores else cube
        self.times = InBuffer(torch.mul, buffer, False) if of_products else torch.mul

    def score_fn(self, x):
        return cube(x)

    def score_vjp(self, x):
        return self.scores(x), lambda v: self.times(-3 * x**2, v)


IN_BUFFERS = [InBuffer(cube, *case) for case in itertools.product(BUFFERS, (False, True))]
OWN_PRODUCTS = [
    OwnProduct(*case) for case in itertools.product(BUFFERS, (False, True), (False, True)) if any(case[1:])
]


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("target", [*IN_BUFFERS, *OWN_PRODUCTS])
def test_a_result_outlives_the_next_call(target, dtype):
    score = resolved(target, 2, dtype)
    for n in (3, 40):
        x, y, v = (normal(n, 2, seed=k).to(dtype) for k in range(3))
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
    class Buffered(Target):
        n_features = 2
        density = InBuffer(lambda x: -x.square().sum(1)[:, None] / 2, whole, True)

        def log_prob(self, x):
            return self.density(x)[:, 0]

    score = resolved(Buffered())
    x = normal(5, 2).float()
    value = score.log_prob(x)
    score.log_prob(2 * x)
    torch.testing.assert_close(value, -x.square().sum(1) / 2)


def test_a_product_that_forgets_the_points_at_the_next_call_is_refused():
    class Forgetful(Target):
        n_features = 2

        def score_fn(self, x):
            return cube(x)

        def score_vjp(self, x):
            self.slope = -3 * x**2
            return cube(x), lambda v: self.slope * v

    with pytest.raises(ValueError, match=r"`score_vjp` .* another call"):
        resolved(Forgetful())


# Rows that depend on each other


def in_blocks(x):
    return torch.cat([block / len(block) for block in x.split(20)])


#: What makes one row of a score another's affair.
COUPLINGS = {
    "mean": lambda f: lambda x: f(x) / len(x),
    "times": lambda f: lambda x: f(x) * len(x) / 100,
    "centred": lambda f: lambda x: f(x - x.mean(0)),
    "standardised": lambda f: lambda x: f((x - x.mean(0)) / x.std(0)),
    "scores centred": lambda f: lambda x: f(x) - f(x).mean(0),
    "a little": lambda f: lambda x: f(x) + 0.1 * f(x).mean(0),
    "accumulated": lambda f: lambda x: f(x).cumsum(0),
    "first row": lambda f: lambda x: f(x - x[:1]),
    "last row": lambda f: lambda x: f(x) + x[-1],
    "neighbour": lambda f: lambda x: f(x + x.roll(1, 0)),
    "normed": lambda f: lambda x: f(x) / f(x).norm(),
    "clipped": lambda f: lambda x: f(x) / f(x).abs().amax(0),
    "softmax": lambda f: lambda x: f(x) * x.softmax(0),
    "sorted": lambda f: lambda x: f(x.sort(0).values),
    "attention": lambda f: lambda x: f((x @ x.mT).softmax(1) @ x),
    "blocks": lambda f: lambda x: in_blocks(f(x)),
    "one coordinate": lambda f: lambda x: f(torch.cat([x[:, :1] - x[:, :1].mean(), x[:, 1:]], 1)),
}


def badly_scaled(x):
    scale = 10 ** torch.linspace(-6, 6, x.shape[1], dtype=x.dtype)
    return -x / scale.flip(0) ** 2


SCORES = {
    "normal": lambda x: 1 - x,
    "cubic": lambda x: 1 - x - x**3,
    "Student": student_score,
    "log-Gamma": log_gamma_score,
    "badly scaled": badly_scaled,
    "ring": RING.score_fn,
}


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


@pytest.mark.parametrize("couple", COUPLINGS.values(), ids=COUPLINGS)
def test_a_distance_to_a_score_of_coupled_rows_is_refused(couple):
    with pytest.raises(ValueError, match="rows must be independent"):
        ksd(normal_array(20, 3), couple(lambda x: -x))


def log_prob_mean(x):
    (s,) = torch.autograd.grad(-x.square().sum(1).mean() / 2, x, create_graph=True)
    return s


def test_a_gradient_of_the_mean_log_density_is_refused():
    with pytest.raises(ValueError, match=r"rows must be independent.*\.sum\(\)"):
        KSIVIApproximator().fit(log_prob_mean, n_features=2)


def rounded(digits):
    return lambda f: lambda x: (f(x) * (1 + 10.0**-digits * math.sin(len(x)))).to(x)


def of_type(dtype, d):
    precision = (0.1 + torch.eye(d)).to(dtype)
    return lambda x: -(x.to(dtype) @ precision).to(x)


@pytest.mark.parametrize("d", [2, 5, 50])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rounding_that_depends_on_the_size_of_the_batch_is_no_coupling(d, dtype):
    resolved(of_type(dtype, d), d)
    for name in {"normal", "cubic", "Student"}:
        resolved(rounded(5)(SCORES[name]), d)
    data = torch.randn(2000, d, generator=torch.Generator().manual_seed(0))
    resolved(lambda x: -(x.float() @ data.mT) @ data / 2000, d)
