"""What goes wrong in a fit is told, or does not matter; what was learned is not lost. One fault, one test.

Those of scores, files and checkpoints are in the tests of these.
"""

import itertools
import logging
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from approximators import global_state, good_fit
from members import every, refused
from misbehaving import Misbehaving, raising
from plain_targets import words_of
from sklearn.base import clone

import skksivi
from skksivi import KSIVIApproximator, diagnose, modes
from skksivi.baselines import SVGD, Laplace
from skksivi.kernels import KERNELS
from skksivi.metrics import ksd
from skksivi.targets import Banana, ConditionedDiffusion, from_log_prob, from_rows, from_score_fn

#: A batch size that no other call of the score has.
ODD = 23
SHORT = KSIVIApproximator(whiten=None, batch_size=ODD, max_iter=30, hidden_layer_sizes=(8,), random_state=0)


def normal_score(x):
    return 1 - x


def failing(call, error, **options):
    return Misbehaving(raising(error("on fire")), call, score_fn=normal_score, **options)


def assert_equal(q, other):
    np.testing.assert_array_equal(q.sample(20, random_state=0), other.sample(20, random_state=0))
    np.testing.assert_array_equal(q.loss_curve_, other.loss_curve_)


# Scores


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
        refused(TypeError, r"must be an? .*int", call, n)
    for call, cls in itertools.product(TAKERS, (Banana, torch.nn.ReLU)):
        refused(TypeError, f"is the class {cls.__name__}; pass an instance", call, cls)


READERS = ["summary", "diagnose", "expectation", "modes", "importance_sample", "refine", "evidence"]


@every("name", READERS)
def test_draws_that_are_not_finite_are_named_with_their_coordinate(name):
    target = from_log_prob(lambda x: -x.square().sum(1) / 2, 3, names=["a", "b", "c"])
    q, particles = (est.fit(target) for est in (Laplace(), SVGD(n_particles=100, max_iter=1)))
    q.sampler_.map.m[1], particles.sampler_.x[7, 1] = np.nan, np.nan
    for est, n in [(q, r"(\d+)")] + [(particles, "1")] * (name in READERS[:3]):
        with pytest.raises(ValueError, match=rf"{n} of \d+ draws of `est` are not finite, in `b`: fit again, see"):
            getattr(skksivi, name)(est, target=target)


#: What comes at any points from one call on, as after an update of the data; torch raises RuntimeError for most.
LATER = {
    "shape": (lambda x: -x @ torch.ones(x.shape[1] + 1, 2).to(x), RuntimeError),
    "in place": (lambda x: x.detach().requires_grad_().add_(1), RuntimeError),
    "anything": (raising(RuntimeError("everywhere")), RuntimeError),
    "a value": (raising(ValueError("the file is closed")), ValueError),
}


@every("fault, error", LATER)
def test_a_fault_of_the_function_is_no_matter_of_the_points(fault, error):
    score_fn = Misbehaving(fault, 30)
    with pytest.raises(error):
        KSIVIApproximator(random_state=0).fit(score_fn, n_features=2)
    assert score_fn.n_calls < 40


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_score_on_another_device_is_brought_back(device):
    there = "cuda" if device == "cpu" else "cpu"
    q = clone(SHORT).set_params(whiten="laplace", device=device).fit(lambda x: 1 - x.to(there), n_features=2)
    np.testing.assert_allclose(q.sample(10_000).mean(0), 1, atol=0.1)


@every("kind", [np.nan, -np.inf])
def test_one_row_of_a_score_that_is_not_finite_costs_one_step(kind):
    def spoilt():
        spoil = lambda s: s.index_fill(0, torch.tensor([5]), kind)  # noqa: E731
        return Misbehaving(spoil, 12, rows=ODD, once=True, score_fn=normal_score)

    raised, skipped = (clone(SHORT).set_params(optimizer__nonfinite=rule) for rule in ("raise", "skip"))
    refused(FloatingPointError, "at iteration 12:", lambda: raised.fit(spoilt(), n_features=2))
    with pytest.warns(UserWarning, match="1 of 30 iterations were skipped"):
        skipped.fit(spoilt(), n_features=2)
    assert_equal(raised, skipped)
    assert np.isfinite(raised.sample(1000)).all()


@every("rule, bound", [("raise", 0.3), ("skip", 3.0)])
def test_a_region_where_the_score_is_not_finite_is_told_and_the_draws_are_finite(bound, rule):
    q = clone(SHORT).set_params(optimizer__nonfinite=rule)
    score_fn = lambda x: torch.where(x[:, :1] > bound, torch.nan, normal_score(x))  # noqa: E731
    words = words_of(lambda: q.fit(score_fn, n_features=2))
    assert any("were skipped" in each or "not finite" in each for each in words)
    assert np.isfinite(q.sample(100)).all()


# What ends a fit


@every("error, call", [(KeyboardInterrupt, 0), (OSError, 9), (MemoryError, 9), (KeyboardInterrupt, 30)])
def test_what_ends_a_fit_leaves_no_trace_outside_of_it(error, call):
    clone(SHORT).fit(normal_score, n_features=2)  # what torch imports late brings filters of warnings
    before = global_state()
    with pytest.raises(error):
        clone(SHORT).set_params(whiten="laplace").fit(failing(call, error), n_features=2)
    assert global_state() == before


@every("error, call", [(KeyboardInterrupt, 1), (ConnectionError, 9), (TimeoutError, 30), (KeyboardInterrupt, 100)])
def test_where_a_fit_was_stopped_and_whether_it_can_be_used_is_logged(error, call, caplog):
    caplog.clear()
    q = clone(SHORT).set_params(max_iter=300)
    with pytest.raises(error):
        q.fit(failing(call, error, rows=ODD), n_features=2)
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
    q = clone(SHORT).set_params(max_iter=10**6, optimizer__decay=None)
    set_timer = lambda s: signal.setitimer(signal.ITIMER_REAL, 0.02) and s  # noqa: E731
    score_fn = Misbehaving(set_timer, 19, rows=ODD, once=True, score_fn=normal_score)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            q.fit(score_fn, n_features=2)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert q.n_iter_ == len(q.loss_curve_)
    assert score_fn.n_calls - q.n_iter_ in (0, 1)
    shorter = [clone(q).set_params(max_iter=q.n_iter_ + k).fit(normal_score, n_features=2) for k in (0, 1)]
    X = q.sample(20, random_state=0)
    assert any(np.array_equal(X, other.sample(20, random_state=0)) for other in shorter)


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_made_an_error_does_not_cost_the_fit(tmp_path):
    q = clone(SHORT).set_params(checkpoint=tmp_path / "fit.ckpt", checkpoint__every=10)
    refused(UserWarning, "too wide", lambda: q.fit(lambda x: -x / x.new_tensor([1.0, 1e-3]) ** 2, n_features=2))
    assert hasattr(q, "n_features_in_") or (tmp_path / "fit.ckpt").exists()


# Processes and sizes


@every("kernel, whiten", [*((kernel, "laplace") for kernel in KERNELS), ("gaussian", None)])
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
ALL_PAIRS = "fit(5, whiten=None, max_iter=1, batch_size=10_000, method='ksivi')"
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
    assert float(subprocess.check_output([sys.executable, "-c", script], env=environment)) < most
