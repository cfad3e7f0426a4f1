"""What goes wrong in a fit is told, or does not matter; what was learned is not lost. One fault, one test.

Those of scores, files and checkpoints are in the tests of these.
"""

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings

import numpy as np
import pytest
import torch
from approximators import global_state
from misbehaving import Misbehaving, raising
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from skksivi import KSIVIApproximator
from skksivi.baselines import Laplace
from skksivi.kernels import KERNELS
from skksivi.targets import Target

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


def test_of_dropout_eval_is_named():
    network = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 2)).double()

    class Product(Target):
        n_features = 2

        def score_fn(self, x):
            return network(x) - 3 * x

        def score_vjp(self, x):
            return self.score_fn(x), lambda v: -3 * v

    laplace = Laplace(random_state=0)
    with pytest.warns(UserWarning, match=r"different values .* dropout, call its `\.eval\(\)`"):
        laplace.fit(lambda x: -3 * x + torch.nn.functional.dropout(x, 0.5), n_features=2)
    with pytest.raises(ValueError, match=r"call its `\.eval\(\)`"):
        laplace.fit(lambda x: (network(x) - 3 * x).detach(), n_features=2)
    with pytest.raises(ValueError, match=r"call its `\.eval\(\)`"):  # not that the product is wrong
        laplace.fit(Product())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_score_on_another_device_is_brought_back(device):
    there = "cuda" if device == "cpu" else "cpu"
    q = clone(SHORT).set_params(whiten="laplace", device=device).fit(lambda x: 1 - x.to(there), n_features=2)
    np.testing.assert_allclose(q.sample(10_000).mean(0), 1, atol=0.1)


def nan_derivative_everywhere(x):
    return torch.where(x.abs() < 1e3, 4 * (1 - x), x * torch.sqrt(x - 1e6))


def nan_derivative_outside(x):
    r = x.norm(dim=1, keepdim=True)
    return 4 * (1 - x) + torch.where(r < 1.5, 0, 0 * torch.sqrt(r - 1.5))


@pytest.mark.parametrize("whiten", [None, "laplace"])
@pytest.mark.parametrize("score_fn", [nan_derivative_everywhere, nan_derivative_outside])
def test_a_finite_score_with_a_derivative_that_is_nan_is_fitted_by_differences_or_told(score_fn, whiten):
    """The part of `where` that is not taken has a derivative too, and zero times NaN is NaN."""
    q = KSIVIApproximator(whiten=whiten, max_iter=200, batch_size=50, learning_rate=5e-3, random_state=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        X = q.fit(score_fn, n_features=2).sample(4000)
    assert caught or np.abs(X.std(0) - 0.5).max() < 0.1


@pytest.mark.parametrize("kind", [np.nan, np.inf, -np.inf])
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


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError])
@pytest.mark.parametrize("call", [0, 9, 30])
def test_what_ends_a_fit_leaves_no_trace_outside_of_it(error, call):
    clone(SHORT).fit(normal_score, n_features=2)  # what torch imports late brings filters of warnings
    before = global_state()
    with pytest.raises(error):
        clone(SHORT).set_params(whiten="laplace").fit(failing(call, error), n_features=2)
    assert global_state() == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, ConnectionError])
@pytest.mark.parametrize("call", [1, 9, 30, 100])
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
@pytest.mark.parametrize("share", [0.5])
@pytest.mark.filterwarnings("ignore:The draws are too:sklearn.exceptions.ConvergenceWarning")
def test_ctrl_c_at_any_moment_leaves_a_fit_of_so_many_iterations(share):
    """The signal may fall between any two operations; the iteration that it falls into may count or not."""
    q = clone(SHORT).set_params(max_iter=300, optimizer__decay=None)
    start = time.perf_counter()
    clone(q).fit(normal_score, n_features=2)
    score_fn, seconds = Misbehaving(None, np.inf, rows=ODD, score_fn=normal_score), time.perf_counter() - start
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, share * seconds)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            q.fit(score_fn, n_features=2)
            time.sleep(10)  # the machine was faster the second time
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if score_fn.n_calls == 0:
        with pytest.raises(NotFittedError):
            q.sample()
        return
    assert q.n_iter_ == len(q.loss_curve_)
    assert score_fn.n_calls - q.n_iter_ in (0, 1)
    shorter = [clone(q).set_params(max_iter=max(q.n_iter_ + k, 1)).fit(normal_score, n_features=2) for k in (0, 1)]
    X = q.sample(20, random_state=0)
    assert any(np.array_equal(X, other.sample(20, random_state=0)) for other in shorter)


@pytest.mark.parametrize(
    "call", [*(pytest.param(k, id=f"call {k} of ten") for k in (0, 3, 6, 9)), pytest.param(10, id="last")]
)
def test_an_error_at_any_call_leaves_the_earlier_fit_or_a_whole_one(call):
    """What is done after the training, to see what may be wrong with it, does not make it undone."""
    q = clone(SHORT).set_params(whiten="laplace").fit(lambda x: -x, n_features=3)
    whole = clone(q).fit(counting := Misbehaving(None, np.inf, score_fn=normal_score), n_features=2)
    draws = [fit.sample(20, random_state=0) for fit in ((q,) if call < 10 else (q, whole))]
    broken = failing((counting.n_calls - 1) * call // 10)
    with pytest.raises(OSError, match="on fire"):
        q.fit(broken, n_features=2)
    X = q.sample(20, random_state=0)
    assert any(np.array_equal(X, Y) for Y in draws)


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_made_an_error_does_not_cost_the_fit(tmp_path):
    q = clone(SHORT).set_params(checkpoint=tmp_path / "fit.ckpt", checkpoint__every=10)
    with pytest.raises(UserWarning, match="too wide"):
        q.fit(lambda x: -x / x.new_tensor([1.0, 1e-3]) ** 2, n_features=2)
    assert hasattr(q, "n_features_in_") or (tmp_path / "fit.ckpt").exists()


# Processes and sizes


@pytest.mark.parametrize(
    ("kernel", "whiten"),
    [*((kernel, "laplace") for kernel in KERNELS), ("riesz", None), ("imq", "bam"), ("gaussian", "auto")],
)
def test_one_dimension_is_enough(kernel, whiten):
    """Every kernel by the quickest rule, every rule once: the two do not know of each other."""
    max_iter = 30 if whiten else 1000
    q = KSIVIApproximator(kernel=kernel, whiten=whiten, max_iter=max_iter, random_state=0)
    X = q.fit(normal_score, n_features=1).sample(10_000)
    assert abs(X.mean() - 1) < 0.25  # Riesz without whitening is slow
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


def peak_megabytes(d, act):
    """What a line takes beyond a small fit in d dimensions, in a process of its own."""
    script = MEMORY.format(d=d, act=textwrap.dedent(act))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout)


@pytest.mark.slow
def test_many_draws_an_iteration_take_no_matrix_of_all_pairs():
    n = 10_000
    act = f"fit(5, whiten=None, max_iter=1, batch_size={n}, gradient_estimator='u-statistic')"
    assert peak_megabytes(5, act) < n**2 * 4 / 1e6 / 2


@pytest.mark.slow
def test_thousands_of_dimensions_take_no_matrix_of_all_pairs():
    d = 5000
    assert peak_megabytes(d, f"assert fit({d}, max_iter=2).sample(3).shape == (3, {d})") < d**2 * 8 / 1e6


@pytest.mark.slow
def test_millions_of_draws_take_little_more_than_themselves():
    n = 2**21
    assert peak_megabytes(1, f"X = q.sample({n}); assert X.shape == ({n}, 1)") < 1000
