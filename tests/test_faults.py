"""What goes wrong in a fit is told, or does not matter; what was learned is not lost. One fault, one test.

Those of scores, files and checkpoints are in the tests of these.
"""

import copy
import itertools
import logging
import os
import re
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest
import scipy.stats
import torch
from approximators import global_state, good_fit
from misbehaving import Misbehaving, raising
from plain_targets import own, resolved
from sklearn.base import clone

import skksivi
from skksivi import KSIVIApproximator, diagnose, modes
from skksivi.baselines import SVGD, Laplace
from skksivi.kernels import KERNELS
from skksivi.metrics import ksd
from skksivi.targets import Banana, ConditionedDiffusion, Target, from_log_prob, from_rows, from_score_fn

#: A batch size that no other call of the score has.
ODD = 23
SHORT = KSIVIApproximator(whiten=None, batch_size=ODD, max_iter=30, hidden_layer_sizes=(8,), random_state=0)


def normal_score(x):
    return 1 - x


def failing(call, error=OSError):
    return Misbehaving(raising(error("on fire")), call, score_fn=normal_score)


def assert_equal(q, other):
    np.testing.assert_array_equal(q.sample(20, random_state=0), other.sample(20, random_state=0))
    np.testing.assert_array_equal(q.loss_curve_, other.loss_curve_)


# Scores


class NoFeatures(Target):
    def log_prob(self, x):
        return -x.square().sum(-1)


class Forgetful(Target):
    """A product that forgets the points at the next call."""

    n_features = 2

    def score_fn(self, x):
        return 1 - x**3

    def score_vjp(self, x):
        self.slope = -3 * x**2
        return 1 - x**3, lambda v: self.slope * v


def of_the_mean_density(x):
    (s,) = torch.autograd.grad(-x.square().sum(1).mean() / 2, x, create_graph=True)
    return s


MEAN, PRECISION, MODULE = torch.tensor([1.0, 2.0, 3.0]), torch.eye(3) + 0.1, torch.nn.Linear(3, 3).double()
OF_THREE = [
    lambda x: (MEAN.to(x) - x) @ PRECISION.to(x),
    lambda x: MEAN.to(x) - x,
    lambda X: (MEAN.numpy() - X) @ PRECISION.double().numpy(),
    torch.nn.Linear(3, 3),
]
DENSITIES_OF_THREE = [
    lambda x: -((x - MEAN.to(x)) ** 2).sum(1),
    lambda x: torch.distributions.MultivariateNormal(MEAN.to(x), PRECISION.to(x)).log_prob(x),
    lambda x: -torch.nn.functional.linear(x, PRECISION.to(x)).square().sum(1),
]
NO_TENSORS = [
    lambda X: -np.sum(X**2, 1), lambda X: -(X.astype(float) ** 2).sum(1), lambda X: scipy.stats.norm.logpdf(X).sum(1),
    lambda x: -x.detach().square().sum(1), lambda X: np.array([-(x @ x).item() for x in X]),
    lambda x: [-(row @ row) for row in x],
]  # fmt: skip
OF_DOUBLE = [
    MODULE,
    lambda x: -x @ torch.eye(3).double(),
    from_log_prob(lambda x: -MODULE(x).square().sum(1), 3),
    from_log_prob(lambda x: -(x @ torch.eye(3).double() * x).sum(1), 3),
]
IN_PLACE, IMPROPER = "changed its input in place", "improper in a direction"

#: A score or a target, the number of features (three, if a target has none), the error, and what it says.
MISTAKES = [
    (None, 3, TypeError, r"must be a function .* got a NoneType"),
    ("abc", 3, TypeError, "got a str"),
    (Banana, None, TypeError, "is the class Banana; pass an instance"),
    (NoFeatures(), None, ValueError, "`n_features` is missing from the target NoFeatures"),
    (lambda x: -x.sum(1), 3, ValueError, r"shape \(2,\), expected \(2, 3\)"),
    (lambda x: -x[:, :1], 3, ValueError, r"shape \(2, 1\), expected \(2, 3\)"),
    (lambda x: -x.mT, 3, ValueError, r"shape \(3, 2\), expected \(2, 3\)"),
    (lambda x: -x[:, None], 3, ValueError, r"shape \(2, 1, 3\), expected \(2, 3\)"),
    (lambda x: -x[1:], 3, ValueError, r"shape \(1, 3\), expected \(2, 3\)"),
    (lambda x: -x.sum(), 3, ValueError, r"shape \(\), expected \(2, 3\)"),
    (lambda X: -np.linalg.norm(X * np.ones(3), axis=1), 3, ValueError, r"shape \(2,\)"),
    (lambda x: None, 3, TypeError, "returned a NoneType, expected"),
    (lambda x: (x.sum(), -x), 3, TypeError, "returned a tuple"),
    (lambda x: (-x).tolist(), 3, TypeError, "returned a list"),
    (lambda x: -x * 1j, 3, TypeError, "complex"),
    (lambda x: -x.long(), 3, TypeError, "int64"),
    (lambda x: x > 0, 3, TypeError, "bool"),
    (lambda x: np.full(x.shape, None), 3, TypeError, "type object"),
    (lambda x: np.full(x.shape, "a"), 3, TypeError, "type <U1"),
    (lambda x: x.neg_(), 3, ValueError, IN_PLACE),
    (lambda X: np.negative(X, out=X), 3, ValueError, IN_PLACE),
    (lambda x: x.__imul__(-1), 3, ValueError, IN_PLACE),
    (lambda x: x * torch.nan, 3, ValueError, "not finite at any of .* set `init`"),
    (Forgetful(), None, ValueError, r"`score_vjp` .* another call"),
    (of_the_mean_density, 2, ValueError, r"rows must be independent.*\.sum\(\)"),
    *((f, d, ValueError, rf"`n_features` is {d}\b|Set n_features=3") for f in OF_THREE for d in (2, 4)),
    *(
        (from_log_prob(f, d), None, ValueError, rf"`n_features` is {d}, but `log_prob` .* \(2, 3\)")
        for f in DENSITIES_OF_THREE
        for d in (2, 4)
    ),
    *((from_log_prob(f, 2), None, TypeError, r"`log_prob` .* torch .*from_score_fn") for f in NO_TENSORS),
    *((f, 3, TypeError, r"torch\.float64.*no torch\.float32.*set dtype='float64'") for f in OF_DOUBLE),
    (lambda x: x.new_tensor([-1.0, 0.0]) * x, 2, ValueError, rf"{IMPROPER} \(\+1 in `x\[1\]`"),
    (lambda x: 0 * x, 2, ValueError, "zero, or another constant, at all trial points"),
    (lambda x: 0 * x + 3, 1, ValueError, "constant, at all trial points"),
    (lambda x: 0 * x + 3, 3000, ValueError, "constant, at all trial points"),
    (lambda x: (1 - x.sum(1, keepdim=True)).expand_as(x), 2, ValueError, IMPROPER),
    (lambda x: x.flip(1) - x, 2, ValueError, IMPROPER),
]


@pytest.mark.parametrize(("target", "d", "error", "message"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_named_before_the_score_is_asked_for_much(target, d, error, message):
    """Warnings before it would be errors."""
    n_asked = 0

    def counted(x):
        nonlocal n_asked
        n_asked += len(x)
        return target(x)

    plain = not callable(target) or isinstance(target, type | torch.nn.Module)
    with pytest.raises(error, match=message):
        KSIVIApproximator().fit(target if plain else counted, n_features=None if isinstance(target, Target) else d)
    assert n_asked < (4000 if d == 3000 else 10_000)


def test_numbers_of_single_precision_alone_are_named():
    with pytest.raises(TypeError, match=r"torch\.float32.*no torch\.float64.*set dtype='float32'"):
        KSIVIApproximator(dtype="float64").fit(lambda x: -x @ torch.eye(3), n_features=3)


def test_errors_of_the_function_itself_are_shown_with_what_it_was_given():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        resolved(lambda x: x @ torch.ones(x.shape[1] + 3, 5).to(x), 2)
    notes = "\n".join(raised.value.__notes__)
    assert re.search(r"trial input of shape \(2, 2\).*Called with an array it raised TypeError", notes, re.S)


LAPLACE = Laplace(random_state=0)
#: Whatever takes a number of features, or a target.
COUNTS = [
    lambda n: LAPLACE.fit(torch.neg, n_features=n),
    lambda n: from_score_fn(torch.neg, n),
    lambda n: from_log_prob(torch.sum, n),
    lambda n: from_rows(torch.neg, n_rows=3, n_features=n),
    lambda n: from_rows(torch.neg, n_rows=n, n_features=1),
    lambda n: ConditionedDiffusion(n_features=n),
    lambda n: good_fit("Laplace").sample(n),
]
TAKERS = [
    lambda target: LAPLACE.fit(target),
    lambda target: good_fit("Laplace").score(target),
    lambda target: ksd(np.eye(20, 2), target),
    lambda target: diagnose(good_fit("Laplace"), target),
    lambda target: modes(good_fit("Laplace"), target),
]


def test_a_truth_value_is_no_number_and_a_class_no_target():
    for call, n in itertools.product(COUNTS, (True, np.True_, False)):
        with pytest.raises(TypeError, match=r"must be an? .*int"):
            call(n)
    for call, cls in itertools.product(TAKERS, (Banana, torch.nn.ReLU)):
        with pytest.raises(TypeError, match=f"is the class {cls.__name__}; pass an instance"):
            call(cls)


READERS = ["summary", "diagnose", "expectation", "modes", "importance_sample", "refine", "certificate", "evidence"]


@pytest.mark.parametrize("name", READERS)
def test_draws_that_are_not_finite_are_named_with_their_coordinate(name):
    target = from_log_prob(lambda x: -x.square().sum(1) / 2, 3, names=["a", "b", "c"])
    q, particles = (est.fit(target) for est in (Laplace(), SVGD(n_particles=100, max_iter=1)))
    q.sampler_.map.m[1], particles.sampler_.x[7, 1] = np.nan, np.nan
    for est, n in [(q, r"(\d+)")] + [(particles, "1")] * (name in READERS[:3]):
        with pytest.raises(ValueError, match=rf"{n} of \d+ draws of `est` are not finite, in `b`: fit again, see"):
            getattr(skksivi, name)(est, target)


#: What comes at any points from one call on, as after an update of the data; torch raises RuntimeError for most.
LATER = {
    "shape": (lambda x: -x @ torch.ones(x.shape[1] + 1, 2).to(x), RuntimeError),
    "rows": (lambda x: -x + x.sum(1).expand(3, -1).mean(0), RuntimeError),
    "type": (lambda x: -x @ torch.eye(x.shape[1], dtype=torch.float16), RuntimeError),
    "in place": (lambda x: x.detach().requires_grad_().add_(1), RuntimeError),
    "anything": (raising(RuntimeError("everywhere")), RuntimeError),
    "a value": (raising(ValueError("the file is closed")), ValueError),
}


@pytest.mark.parametrize(("fault", "error"), LATER.values(), ids=LATER)
def test_a_fault_of_the_function_is_no_matter_of_the_points(fault, error):
    score_fn = Misbehaving(fault, 30)
    with pytest.raises(error):
        KSIVIApproximator(random_state=0).fit(score_fn, n_features=2)
    assert score_fn.n_calls < 40


HALVES = {
    "float16": lambda x: 1 - x.half(),
    "bfloat16": lambda x: 1 - x.bfloat16(),
    "arrays of float16": lambda x: (1 - np.asarray(x.detach())).astype(np.float16),
    "float16 inside": lambda x: (1 - x.half()).to(x),
    "bfloat16 in a coordinate": lambda x: torch.stack([1 - x[:, 0], (1 - x[:, 1].bfloat16()).to(x)], 1),
}
#: In double precision, with few digits.
STEPS = {
    "signs": lambda x: -x.sign(),
    "signs of several sizes": lambda x: -torch.tensor([4096.0, 0.125]).to(x) * x.sign(),
    "counts": lambda x: (torch.linspace(-3, 3, 40).to(x) > x[..., None]).sum(-1).to(x) - 20,
    "clipped": lambda x: -x.clamp(-1, 1),
}


@pytest.mark.parametrize("score_fn", HALVES.values(), ids=HALVES)
def test_a_score_in_half_precision_is_adapted(score_fn):
    with pytest.warns(UserWarning, match="`score_fn` computes in half precision"):
        X = clone(SHORT).set_params(whiten="laplace").fit(score_fn, n_features=2).sample(10_000)
    np.testing.assert_allclose(X.mean(0), 1, atol=0.1)
    np.testing.assert_allclose(X.std(0), 1, atol=0.1)


@pytest.mark.filterwarnings("ignore:The mode search has not converged:sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("score_fn", STEPS.values(), ids=STEPS)
def test_a_step_function_is_not_taken_for_half_precision(score_fn):
    Laplace(random_state=0).fit(score_fn, n_features=2)  # a warning would be an error


DOUBLE = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(2, 2)).double()
SINGLE = copy.deepcopy(DOUBLE).float()


def of_dropout(x):
    return DOUBLE(x) - 3 * x


DROPOUT = {
    "double": of_dropout,
    "single": lambda x: SINGLE(x) - 3 * x,
    "function": lambda x: -3 * x + torch.nn.functional.dropout(x, 0.5),
    "no graph": lambda x: (DOUBLE(x) - 3 * x).detach(),
    "a product": own(2, score_fn=of_dropout, score_vjp=lambda x: (of_dropout(x), lambda v: -3 * v)),
}


@pytest.mark.parametrize("score_fn", DROPOUT.values(), ids=DROPOUT)
@pytest.mark.parametrize("q", [Laplace(), SVGD(n_particles=50, max_iter=10), KSIVIApproximator(train=False)])
def test_of_dropout_eval_is_named_and_nothing_else(q, score_fn):
    """Such as that rows depend on each other, that the Jacobian is not symmetric, or of noise."""
    torch.manual_seed(0)
    dtype = "float32" if score_fn is DROPOUT["single"] else "float64"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            clone(q).set_params(dtype=dtype, random_state=0).fit(score_fn, n_features=2)
        except ValueError as error:
            warnings.warn(str(error), stacklevel=1)
    assert ["call its `.eval()`" in str(each.message) for each in caught] == [True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_score_on_another_device_is_brought_back(device):
    there = "cuda" if device == "cpu" else "cpu"
    q = clone(SHORT).set_params(whiten="laplace", device=device).fit(lambda x: 1 - x.to(there), n_features=2)
    np.testing.assert_allclose(q.sample(10_000).mean(0), 1, atol=0.1)


@pytest.mark.parametrize("kind", [np.nan, -np.inf])
def test_one_row_of_a_score_that_is_not_finite_costs_one_step(kind):
    def spoil(s):
        return s.index_fill(0, torch.tensor([5]), kind)

    raised, skipped = (clone(SHORT).set_params(optimizer__nonfinite=rule) for rule in ("raise", "skip"))
    with pytest.raises(FloatingPointError, match="at iteration 12:"):
        raised.fit(Misbehaving(spoil, 12, rows=ODD, once=True, score_fn=normal_score), n_features=2)
    with pytest.warns(UserWarning, match="1 of 30 iterations were skipped"):
        skipped.fit(Misbehaving(spoil, 12, rows=ODD, once=True, score_fn=normal_score), n_features=2)
    assert_equal(raised, skipped)
    assert np.isfinite(raised.sample(1000)).all()


@pytest.mark.parametrize("rule", ["raise", "skip"])
@pytest.mark.parametrize("bound", [0.3, 3.0])
def test_a_region_where_the_score_is_not_finite_is_told_and_the_draws_are_finite(bound, rule):
    q = clone(SHORT).set_params(optimizer__nonfinite=rule)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            q.fit(lambda x: torch.where(x[:, :1] > bound, torch.nan, normal_score(x)), n_features=2)
        except FloatingPointError as error:
            assert "not finite" in str(error)  # noqa: PT017
        else:
            assert any("were skipped" in str(w.message) or "not finite" in str(w.message) for w in caught)
    assert np.isfinite(q.sample(100)).all()


# What ends a fit


@pytest.mark.parametrize(
    ("error", "call"), [(KeyboardInterrupt, 0), (OSError, 9), (MemoryError, 9), (KeyboardInterrupt, 30)]
)
def test_what_ends_a_fit_leaves_no_trace_outside_of_it(error, call):
    clone(SHORT).fit(normal_score, n_features=2)  # what torch imports late brings filters of warnings
    before = global_state()
    with pytest.raises(error):
        clone(SHORT).set_params(whiten="laplace").fit(failing(call, error), n_features=2)
    assert global_state() == before


@pytest.mark.parametrize(
    ("error", "call"), [(KeyboardInterrupt, 1), (ConnectionError, 9), (TimeoutError, 30), (KeyboardInterrupt, 100)]
)
def test_where_a_fit_was_stopped_and_whether_it_can_be_used_is_logged(error, call, caplog):
    q = clone(SHORT).set_params(max_iter=300)
    asked = Misbehaving(raising(error), call, rows=ODD, score_fn=normal_score)
    with pytest.raises(error):
        q.fit(asked, n_features=2)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    n_iter = getattr(q, "n_iter_", 0)
    where = f"at iteration {n_iter}" if n_iter else "in the stage 'training'"
    assert line == f"{error.__name__} ended the fit {where}; the fit until then is kept and can be used."
    assert q.sample(3).shape == (3, 2)
    with pytest.raises(error):
        clone(q).set_params(whiten="auto").fit(failing(24, error), n_features=2)
    assert caplog.records[-1].getMessage().endswith("there was nothing to keep yet.")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The draws are too:sklearn.exceptions.ConvergenceWarning")
def test_ctrl_c_at_any_moment_leaves_a_fit_of_so_many_iterations():
    """The signal may fall between any two operations; the iteration that it falls into may count or not."""
    q, n_calls = clone(SHORT).set_params(max_iter=10**6, optimizer__decay=None), 0

    def score_fn(x):
        nonlocal n_calls
        n_calls += len(x) == ODD
        if n_calls == 20:
            signal.setitimer(signal.ITIMER_REAL, 0.02)
        return normal_score(x)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            q.fit(score_fn, n_features=2)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert q.n_iter_ == len(q.loss_curve_)
    assert n_calls - q.n_iter_ in (0, 1)
    shorter = [clone(q).set_params(max_iter=q.n_iter_ + k).fit(normal_score, n_features=2) for k in (0, 1)]
    X = q.sample(20, random_state=0)
    assert any(np.array_equal(X, other.sample(20, random_state=0)) for other in shorter)


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_made_an_error_does_not_cost_the_fit(tmp_path):
    q = clone(SHORT).set_params(checkpoint=tmp_path / "fit.ckpt", checkpoint__every=10)
    with pytest.raises(UserWarning, match="too wide"):
        q.fit(lambda x: -x / x.new_tensor([1.0, 1e-3]) ** 2, n_features=2)
    assert hasattr(q, "n_features_in_") or (tmp_path / "fit.ckpt").exists()


# Processes and sizes


@pytest.mark.parametrize(
    ("kernel", "whiten"),
    [*((kernel, "laplace") for kernel in KERNELS), ("gaussian", None), ("imq", "bam"), ("gaussian", "auto")],
)
def test_one_dimension_is_enough(kernel, whiten):
    """Every kernel by the quickest rule, every rule once: the two do not know of each other."""
    own = {"max_iter": 30} if whiten else {"max_iter": 400, "learning_rate": 2e-2, "hidden_layer_sizes": (8,)}
    q = KSIVIApproximator(kernel=kernel, whiten=whiten, random_state=0, **own)
    X = q.fit(normal_score, n_features=1).sample(10_000)
    assert abs(X.mean() - 1) < 0.25
    assert abs(X.std() - 1) < 0.15


MEMORY = """
import resource, warnings
from skksivi import KSIVIApproximator
warnings.simplefilter("ignore")
def fit(d, **parameters):
    return KSIVIApproximator(random_state=0, **parameters).fit(lambda x: 1 - x, n_features=d)
q = fit({d}, whiten=None, max_iter=2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
{act}
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
ALL_PAIRS = "fit(5, whiten=None, max_iter=1, batch_size=10_000, gradient_estimator='u-statistic')"
#: The features, a line, and the most megabytes that it takes: of no matrix of all pairs, and little beyond the draws.
SIZES = {
    "many draws an iteration": (5, ALL_PAIRS, 10_000**2 * 4 / 1e6 / 2),
    "many features": (5000, "assert fit(5000, max_iter=2).sample(3).shape == (3, 5000)", 5000**2 * 8 / 1e6),
    "millions of draws": (1, "X = q.sample(2**21); assert X.shape == (2**21, 1)", 1000),
}


@pytest.mark.slow
@pytest.mark.parametrize(("d", "act", "most"), SIZES.values(), ids=SIZES)
def test_memory_is_that_of_no_matrix_of_all_pairs(d, act, most):
    """Beyond a small fit in as many dimensions, in a process of its own."""
    script, environment = MEMORY.format(d=d, act=act), {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert float(done.stdout) < most
