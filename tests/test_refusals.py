"""What a beginner's score is told: one table of scores and what is said, each by one message and before a fit."""

import math
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from members import every, refused
from plain_targets import GaussianScore, as_score, normal, normal_array, own, resolved, stan, student_score, words_of
from torch import distributions as dist
from torch import nn
from torch.nn.functional import dropout, logsigmoid

from skksivi import KSIVIApproximator
from skksivi.baselines import Laplace
from skksivi.metrics import ksd
from skksivi.score._domain import check_proper, flat_direction
from skksivi.score._refusals import REFUSALS
from skksivi.targets import Banana, Target, from_log_prob, from_score_fn

ROOT = Path(__file__).parents[1]
MEAN, PRECISION = torch.tensor([1.0, 2.0, 3.0]), torch.eye(3) + 0.1
MODULE, LAYER, SINGLE = nn.Linear(3, 3).double(), nn.Linear(3, 3), torch.eye(3)
NETWORK = nn.Sequential(nn.Tanh(), nn.Dropout(0.2), nn.Linear(2, 2)).double()
NO_FEATURES = type("NoFeatures", (Target,), {"log_prob": lambda self, x: -x.square().sum(-1)})
A, Y = normal(12, 3), normal(12, seed=1)
with torch.inference_mode():
    INFERENCE = torch.ones(5, 2, dtype=torch.float64)


class Forgetful(Target):
    """A product that forgets the points at the next call."""

    n_features = 2

    def score_fn(self, x):
        return 1 - x**3

    def score_vjp(self, x):
        self.slope = -3 * x**2
        return 1 - x**3, lambda v: self.slope * v


def gradient(log_prob, reduced=torch.sum):
    def score_fn(x):
        x = x if x.requires_grad else x.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(reduced(log_prob(x)), x, create_graph=True)[0]

    return score_fn


def cubic(x, has_graph=True):
    return 1 - (x if has_graph else x.detach()) ** 3


def with_product(factor, score_fn=cubic):
    return own(2, score_fn=score_fn, score_vjp=lambda x: (cubic(x), lambda v: -factor * x**2 * v))


def of_dropout(x):
    return NETWORK(x.double()).to(x) - 3 * x


def branch(f, sign, d):
    """A density with a branch that is not taken, whose derivative is NaN."""

    def log_prob(x):
        v = sign * x[:, -1]
        return -x.square().sum(1) / 2 - 0.1 * torch.where(v > 0, f(v), 0.0)

    return from_log_prob(log_prob, d)


def within(low, high, value=-math.inf, d=2, **options):
    """A density whose coordinates are between two numbers."""

    def log_prob(x):
        u, v = (x - low).abs(), (high - x).abs()
        rates = (u if math.isinf(high) else 0) + (v if math.isinf(low) else 0)
        powers = sum(a.log() for a, end in ((u, low), (v, high)) if math.isfinite(end))
        return torch.where((x > low) & (x < high), powers - rates, value).sum(1)

    return from_log_prob(log_prob, d, **options)


def law(of, is_checked):
    of = of.expand([2])
    of._validate_args = is_checked
    return from_log_prob(lambda x: of.log_prob(x).sum(1), 2)


def refusing(error, f=torch.neg):
    """A function that raises far out."""

    def refuses(x):
        if (abs(x) > 8).any():
            raise error
        return f(x)

    return refuses


def power_tails(a):
    return lambda x: -a * x / (1 + x.square().sum(1, keepdim=True))


def sites():
    from numpyro import sample

    return sample


IN_PLACE, COUPLED, RAISED = "changed its input in place", "rows must be independent", "count as outside the target"
IMPROPER, CONSTANT, NAN = r"improper in a direction \(", "zero, or another constant, at all", "its gradient is not at"
RANDOM, SIGN, HALF = r"call its `\.eval\(\)`", "it may have the wrong sign", "`score_fn` computes in half precision"

#: A score or a target, its number of features unless it is a target, and what is said.
ROWS = [
    # what is no score
    (None, 3, r"must be a function .* got a NoneType"),
    ("abc", 3, "got a str"),
    (Banana, None, "is the class Banana; pass an instance"),
    (type("Model", (), {"__module__": "pymc.model"})(), None, r"a Model\. Make .*targets\.from_pymc\(model\)"),
    (stan(2, torch.neg), None, r"targets\.from_bridgestan\(model\)"),
    (sites, None, r"is a model.*targets\.from_numpyro\(model"),
    (dist.Normal(0.0, 1.0), None, r"targets\.from_log_prob\(model\.log_prob"),
    (NO_FEATURES(), None, "`n_features` is missing from the target NoFeatures"),
    # what it returns
    (lambda x: -x.sum(1), 3, r"shape \(2,\), expected \(2, 3\)"),
    (lambda x: -x.mT, 3, r"shape \(3, 2\), expected \(2, 3\)"),
    (lambda x: -x[:, None], 3, r"shape \(2, 1, 3\), expected \(2, 3\)"),
    (lambda x: -x[1:], 3, r"shape \(1, 3\), expected \(2, 3\)"),
    (lambda X: -np.linalg.norm(X * np.ones(3), axis=1), 3, r"shape \(2,\)"),
    (lambda x: None, 3, "returned a NoneType, expected"),
    (lambda x: (x.sum(), -x), 3, "returned a tuple"),
    (lambda x: (-x).tolist(), 3, "returned a list"),
    (lambda x: -x * 1j, 3, "complex"),
    (lambda x: -x.long(), 3, "int64"),
    (lambda x: x > 0, 3, "bool"),
    (lambda x: np.full(x.shape, None), 3, "type object"),
    (lambda x: x.neg_(), 3, IN_PLACE),
    (lambda X: np.negative(X, out=X), 3, IN_PLACE),
    # what it takes
    (lambda x: (MEAN.to(x) - x) @ PRECISION.to(x), 2, r"`n_features` is 2\b.*Set n_features=3"),
    (lambda X: (MEAN.numpy() - X) @ PRECISION.double().numpy(), 4, r"`n_features` is 4\b.*Set n_features=3"),
    (LAYER, 4, r"`n_features` is 4\b.*Set n_features=3"),
    (from_log_prob(lambda x: -((x - MEAN.to(x)) ** 2).sum(1), 2), None, r"is 2, but `log_prob` .*\(2, 3\)"),
    (lambda b: A.mT.to(b) @ (Y.to(b) - A.to(b) @ b), 3, r"`score_fn` takes one point, of shape \(3,\)"),
    (lambda b: A.numpy().T @ (Y.numpy() - A.numpy() @ np.asarray(b)), 3, r"takes one point.*np\.stack"),
    (from_log_prob(lambda b: -((A.to(b) @ b - Y.to(b)) ** 2).sum(), 3), None, "takes one point.*vmap.log_prob"),
    (from_log_prob(lambda b: -(b**2).sum() - torch.logsumexp(b, 0), 3), None, r"takes one point, of shape \(3,\)"),
    (MODULE, 3, r"torch\.float64.*no torch\.float32.*set dtype='float64'"),
    (from_log_prob(lambda x: -MODULE(x).square().sum(1), 3), None, r"`log_prob` .*set dtype='float64'"),
    (from_log_prob(lambda X: -np.sum(X**2, 1), 2), None, r"`log_prob` .* torch .*from_score_fn"),
    (from_log_prob(lambda X: scipy.stats.norm.logpdf(X).sum(1), 2), None, r"`log_prob` .* torch .*from_score_fn"),
    (from_log_prob(lambda x: [-(row @ row) for row in x], 2), None, r"`log_prob` .* torch .*from_score_fn"),
    (from_log_prob(lambda x: -(x @ INFERENCE.mT).square().sum(1), 2), None, r"inference_mode"),
    (lambda x: x @ torch.ones(x.shape[1] + 3, 5).to(x), 2, "shapes cannot be multiplied"),
    # where it is finite, or raises
    (lambda x: x * torch.nan, 3, r"not finite at any of .* \(are there NaN in the data\?\); set `init`"),
    (lambda x: torch.where((x - 1e4).abs() < 100, 1e4 - x, torch.inf), 2, "not finite at any of .* origin; set"),
    (refusing(torch.linalg.LinAlgError("not positive definite")), 3, RAISED),
    (refusing(ZeroDivisionError("division by zero")), 3, RAISED),
    (refusing(RuntimeError("Failed to converge after 50 iterations")), 3, RAISED),
    (own(3, log_prob=refusing(ValueError("far out"), lambda x: -x.square().sum(1) / 2)), None, RAISED),
    # rows, calls and precision
    (gradient(lambda x: -x.square().sum(1) / 2, torch.mean), 2, rf"{COUPLED}.*\.sum\(\)"),
    (lambda x: of_dropout(x), 2, RANDOM),
    (lambda x: of_dropout(x).detach(), 2, RANDOM),
    (lambda x: -3 * x + dropout(x, 0.5), 2, RANDOM),
    (own(2, score_fn=of_dropout, score_vjp=lambda x: (of_dropout(x), lambda v: -3 * v)), None, RANDOM),
    (lambda x: 1 - x.half(), 2, HALF),
    (lambda x: (1 - np.asarray(x.detach())).astype(np.float16), 2, HALF),
    (lambda x: (1 - x.bfloat16()).to(x), 2, HALF),
    (lambda x: torch.stack([1 - x[:, 0], (1 - x[:, 1].bfloat16()).to(x)], 1), 2, HALF),
    # its Jacobian
    (from_score_fn(lambda x: cubic(x.detach()), 2, products="autograd"), None, "`products` is 'autograd', but"),
    (from_score_fn(lambda x: cubic(x), 2, products="none"), None, "`products` of the target must be one of"),
    (with_product(2.85), None, "`score_vjp` returns a product that differs"),
    (with_product(3.15, lambda x: cubic(x, has_graph=False)), None, "`score_vjp` returns a product that differs"),
    (with_product(3, torch.neg), None, "`score_vjp` returns a score that differs"),
    (own(2, score_fn=cubic, score_vjp=lambda x: (cubic(x)[:1], lambda v: v)), None, r"`score_vjp` .* shapes \(1"),
    (Forgetful(), None, "`score_vjp` .* another call"),
    (lambda x: -x @ x.new_tensor([[1.0, 0.3], [0.0, 1.0]]), 2, r"not symmetric, by \d+%"),
    # its domain
    (branch(torch.sqrt, 1, 1), None, NAN),
    (branch(lambda v: (1 / (v.abs() + v)).atan(), -1, 2), None, NAN),
    (branch(lambda v: v.log().square(), 1, 5), None, rf"{NAN}.*torch\.where"),
    (branch(lambda v: v**0.5, -1, 2), None, NAN),
    (within(0.0, 1.0, names=["a", "b"]), None, r'seems bounded.*\(a: "unit interval", b.*targets\.constrained'),
    (gradient(within(0.0, math.inf).log_prob), 2, r'seems bounded.*\(x\[0\]: "positive".*targets\.constrained'),
    (within(-math.inf, 0.0), None, r'seems bounded.*\("below", 0\)'),
    (within(-2.0, 3.0), None, r'seems bounded.*\("interval", -2, 3\)'),
    (within(0.5, math.inf, -1e10), None, r'seems bounded.*\("above", 0.5\)'),
    (within(0.0, 1.0, math.nan, d=1), None, r'seems bounded.*"unit interval"'),
    (law(dist.Beta(2.0, 2.0), is_checked=True), None, r"seems bounded.*targets\.constrained"),
    (law(dist.LogNormal(0.0, 1.0), is_checked=False), None, r"seems bounded.*targets\.constrained"),
    (lambda x: torch.cat([-x[:, 1:], -(x[:, :1] > 0).to(x)], 1).flip(1), 40, r'\(x\[0\]: "positive"\)'),
    *((f, 2, SIGN) for f in (lambda x: (x - 3) ** 3, lambda x: x[:], torch.sinh, lambda x: x + (2 * x).sin())),
    # its mass
    (lambda x: x.new_tensor([-1.0, 0.0]) * x, 2, rf"{IMPROPER}\+1 in `x\[1\]`"),
    (lambda x: (1 - x.sum(1, keepdim=True)).expand_as(x), 2, IMPROPER),
    (lambda x: x.flip(1) - x, 2, IMPROPER),
    (lambda x: 0 * x, 2, CONSTANT),
    (lambda x: 0 * x + 3, 1, CONSTANT),
    (lambda x: 0 * x + 3, 3000, CONSTANT),
    *((power_tails(a * d), d, r"fall as \|x\|\^-.* may have infinite mass") for d in (1, 5) for a in (0.5, 0.9)),
]  # fmt: skip


def asked(target, d):
    """Ask a score as before a fit; torch has one generator of its own, for dropout."""
    torch.manual_seed(0)
    check_proper(resolved(target, d, dtype=torch.float32).double)


@cache
def said_of(row):
    target, d, _ = ROWS[row]
    return words_of(lambda: asked(target, d))


@every("row", range(len(ROWS)))
def test_a_score_is_told_once_what_is_wrong(row):
    said = said_of(row)
    assert len(said) == 1, said
    assert re.search(ROWS[row][2], said[0], re.S), said


def test_every_message_is_told_and_stands_on_the_page():
    page = (ROOT / "doc" / "messages.rst").read_text().replace("``", "`")
    entries = [".*".join(map(re.escape, entry.split("..."))) for entry in re.findall(r"\* - (.*)\n", page)]
    said = [words for row in range(len(ROWS)) for words in said_of(row)]
    for _, _, _, words in REFUSALS:
        fixed = [re.escape(part) for part in re.split(r"\{.*?\}", words)]
        assert any(re.fullmatch(".*?".join(fixed), each, re.S) for each in said), words
        assert any(re.match(entry, words.replace("{name}", "log_prob")) for entry in entries), words


#: Scores of which nothing is said, by the fault that they might be taken for.
RIGHT = {
    "half precision: signs": (lambda x: -torch.tensor([4096.0, 0.125]).to(x) * x.sign(), 2),
    "half precision: counts": (lambda x: (torch.linspace(-3, 3, 40).to(x) > x[..., None]).sum(-1).to(x) - 20, 2),
    "half precision: clipped": (lambda x: -x.clamp(-1, 1), 2),
    "bounds: overflow": (from_log_prob(lambda x: -x.exp().exp().sum(1) + x.sum(1), 3), None),
    "bounds: sigmoid": (gradient(lambda x: (torch.sigmoid(x) * (1 - torch.sigmoid(x))).log().sum(1)), 3),
    "bounds: underflow": (from_log_prob(lambda x: (-x.square() / 2).exp().log().sum(1), 3), None),
    "bounds: mixture": (gradient(lambda x: sum((-((x - m) ** 2).sum(1) / 2).exp() for m in (-3, 3)).log()), 3),
    "bounds: far": (from_log_prob(lambda x: -(x / 1e-4).cosh().log().sum(1), 3), None),
    "mass: power tails": (power_tails(4.0), 3),
    "mass: weak prior": (from_log_prob(lambda x: logsigmoid(x.sum(1)) - 1e-12 * x.square().sum(1), 2), None),
    "mass: far and flat": (from_log_prob(lambda x: -(x.abs() - 1e4).relu().sum(1), 2), None),
    "coupled: rounding": (lambda x: student_score(x) * (1 + 1e-5 * math.sin(len(x))), 2),
    "coupled: single precision": (lambda x: -(x.float() @ A.float().mT) @ A.float() / 12, 3),
    "an own product": (with_product(3), None),
    "single precision": (lambda x: -x.float() @ SINGLE, 3),
}


@every("target, d", RIGHT)
def test_a_right_score_is_told_nothing(target, d):
    assert words_of(lambda: asked(target, d)) == []


@every("d", [2, 5])
@every("form", [lambda f: f, lambda f: lambda X: f(torch.from_numpy(X)).numpy()])
def test_rows_that_depend_on_each_other_are_refused(form, d):
    """Of scores of all shapes and scales."""
    scale = 10 ** torch.linspace(-6, 6, d, dtype=torch.float64)
    couplings = [
        lambda f: lambda x: f(x) / len(x),
        lambda f: lambda x: f(x - x.mean(0)),
        lambda f: lambda x: f((x - x.mean(0)) / x.std(0)),
        lambda f: lambda x: f(x) + 0.1 * f(x).mean(0),
        lambda f: lambda x: f(x - x[:1]),
        lambda f: lambda x: f(x) + x[-1],
        lambda f: lambda x: f(x + x.roll(1, 0)),
        lambda f: lambda x: f(x) / f(x).norm(),
        lambda f: lambda x: f((x @ x.mT).softmax(1) @ x),
        lambda f: lambda x: torch.cat([block / len(block) for block in f(x).split(20)]),
        lambda f: lambda x: f(torch.cat([x[:, :1] - x[:, :1].mean(), x[:, 1:]], 1)),
    ]
    for score_fn in (lambda x: 1 - x, lambda x: 1 - x - x**3, student_score, lambda x: -x / scale.to(x) ** 2):
        for couple in couplings:
            with pytest.raises(ValueError, match=COUPLED):
                resolved(form(couple(score_fn)), d)
    refused(ValueError, COUPLED, lambda: ksd(normal_array(20, d), couplings[0](torch.neg)))


@every("seed", range(4))
def test_a_flat_direction_is_found_and_no_other(seed):
    d = 2 + 2 * seed
    p = GaussianScore(d, 2 * seed, 30 * seed, seed)
    assert flat_direction(as_score(p.score_fn, d=d)) is None
    precision = (1 / p.lam).index_fill(0, torch.tensor(seed), 0.0)
    found = flat_direction(as_score(lambda x: -(((x - p.mean) @ p.V) * precision) @ p.V.mT, d=d))
    assert (found @ p.V[:, seed]).abs() / found.norm() > 0.999


def test_a_mistake_is_told_before_the_score_is_asked_for_much():
    sizes = []
    with pytest.raises(ValueError, match=IMPROPER):
        KSIVIApproximator().fit(lambda x: sizes.append(len(x)) or x.flip(1) - x, n_features=2)
    assert sum(sizes) < 1000


@every("other", [lambda x: torch.ones(x.shape[1] + 3, 5).to(x), lambda X: np.ones((X.shape[1] + 3, 5))])
def test_an_error_of_the_function_itself_is_shown_with_what_it_was_given(other):
    """Of the kind of points that it takes, and nothing of the other kind."""
    with pytest.raises((RuntimeError, ValueError), match=r"shapes cannot|mismatch in its core") as raised:
        resolved(lambda x: x @ other(x), 2)
    assert raised.value.__notes__ == ["Raised by `score_fn` on a trial input of shape (2, 2), torch.float64."]


def test_what_a_score_raises_is_told_once_of_a_target():
    target = from_score_fn(refusing(torch.linalg.LinAlgError("not positive definite")), 2)
    (words,) = words_of(lambda: [Laplace().fit(target) for _ in range(2)])
    assert RAISED in words


def test_a_function_of_one_type_is_told():
    with pytest.raises(TypeError, match=r"torch\.float32.*no torch\.float64.*set dtype='float32'"):
        KSIVIApproximator(dtype="float64").fit(lambda x: -x @ SINGLE, n_features=3)


@every("error", [OSError, NotImplementedError, RecursionError, torch.OutOfMemoryError])
def test_errors_of_other_kinds_end_the_fit(error):
    refused(error, "elsewhere", lambda: Laplace().fit(refusing(error("elsewhere")), n_features=2))
