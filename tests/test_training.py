"""The optimisation loop."""

import itertools
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from members import every
from torch import nn

from skksivi.parameters import Adam
from skksivi.score._tally import Tally
from skksivi.training import _guard
from skksivi.training._guard import Watch, tolerance_of
from skksivi.training._loop import Objective, by_autograd, learning_rate_factor, minimise
from skksivi.training._run import Fit, Run


def network():
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    for i, p in enumerate(module.parameters()):
        torch.nn.init.constant_(p, 0.1 * (i + 1))
    return module


def run(module, loss_fn=None, *, max_iter=200, hooks=(), schedules=(), **options):
    objective = Objective(by_autograd(loss_fn or quadratic(module), module), schedules)
    adam = Adam(**{"betas": (0.9, 0.999), "decay": None, "ema": None} | options)
    return minimise(objective, module, adam, torch.Generator(), learning_rate=0.05, max_iter=max_iter, hooks=hooks)


def quadratic(module):
    return lambda: sum((p - 1).square().sum() for p in module.parameters())


def state(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def after(n, **options):
    """The state after n iterations."""
    module = network()
    run(module, max_iter=n, **options)
    return state(module)


def test_steps_equal_those_of_plain_adam():
    plain = network()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.05, betas=(0.9, 0.999))
    for t in range(20):
        optimizer.param_groups[0]["lr"] = 0.05 * 0.5 ** (t // 7)
        optimizer.zero_grad()
        quadratic(plain)().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    torch.testing.assert_close(after(20, decay=(0.5, 7), max_norm=1.0), state(plain), rtol=1e-5, atol=1e-6)


def test_the_average_is_the_exponential_average_of_the_iterates():
    average = after(0)
    for t in range(40):
        average = average + max(0.1, 9 / (10 + t)) * (after(t + 1) - average)
    torch.testing.assert_close(after(40, ema=0.9), average, rtol=1e-4, atol=1e-5)


def test_learning_rate_factors():
    assert learning_rate_factor(None, 10)(7) == 1
    assert learning_rate_factor((0.9, 3), 10)(7) == pytest.approx(0.81)
    cosine = learning_rate_factor("cosine", 10)
    assert [cosine(t) for t in (0, 5, 10)] == pytest.approx([1, 0.5, 0])


def report(accepted):
    return SimpleNamespace(accepted=accepted)


def judge_of(values, accepted=None):
    """A judge that gives one value after the other, whatever the module."""
    found = zip(values, map(report, accepted or [True] * len(values)), strict=True)
    return lambda module: next(found)


def states(module, watch, n):
    """Let `watch` look at n states of a module whose parameter is the iteration; tell when it would stop."""
    stops = []
    for t in range(100, 100 * (n + 1), 100):
        module.value.data.fill_(t)
        stops.append(watch.look(module, t))
    return stops


@pytest.fixture
def holder():
    module = nn.Module()
    module.value = nn.Parameter(torch.zeros(()))
    return module


def test_early_stopping_is_a_tolerance_or_true():
    assert [tolerance_of(value) for value in (True, np.True_, 0.1)] == [0.01, 0.01, 0.1]
    assert not any(tolerance_of(value) for value in ("auto", None, False, np.False_))


@every(
    "values, ends",
    [
        (np.linspace(1, 0, 10), False),
        ([1.0] * 4, True),
        (100 * 0.9999 ** np.arange(4), True),
        (0.995 ** np.arange(20), False),  # falls below the share of the mark add up to progress
        ([1.0, 0.5, 2.0, 3.0, 4.0], True),
    ],
)
def test_a_plateau_is_told_from_progress_since_the_last_that_was_made(values, ends, holder, monkeypatch):
    monkeypatch.setattr(_guard, "PATIENCE", 300)
    assert states(holder, Watch(judge_of(values), 0.01), len(values)) == [False] * (len(values) - 1) + [ends]
    without = Watch(judge_of(values), None)
    assert not any(states(holder, without, len(values)))
    assert without.values == [(100 * (i + 1), value) for i, value in enumerate(values)]


@every(
    "values, accepted, best",
    [
        ([3.0, 2.0, 0.0, 2.5, -1.0], [True, True, False, True, False], 200),
        ([1.0, 2.0], [False, False], 200),
        ([np.inf, np.nan], [True, True], 200),
    ],
)
def test_the_best_admissible_state_is_brought_back_and_else_the_last_one_stays(values, accepted, best, holder):
    watch = Watch(judge_of(values, accepted), None, keeps_best=True)
    states(holder, watch, len(values))
    assert watch.restore(holder) == holder.value.item() == best
    assert watch.last == report(accepted[-1])
    plain = Watch(judge_of(values, accepted), None)
    states(holder, plain, len(values))
    assert plain.restore(holder) == holder.value.item() == 100 * len(values)


def test_the_watch_sees_the_average_each_so_often_and_at_the_end():
    module, seen = network(), []

    def judge(module):
        seen.append(state(module))
        return float(len(seen)), report(True)

    watch = Watch(judge, None, every=40)
    run(module, max_iter=100, ema=0.9, hooks=[watch])
    assert watch.values == [(40, 1.0), (80, 2.0), (100, 3.0)]
    torch.testing.assert_close(seen[-1], state(module))


def sometimes_nan(module, when, what=torch.nan):
    """A loss whose gradient is not finite at some iterations."""
    count = itertools.count()
    return lambda: quadratic(module)() * (what if when(next(count)) else 1)


@every("what", [torch.nan, torch.inf])
def test_a_loss_that_is_not_finite_ends_the_loop_in_the_last_finite_state_or_is_left_out(what):
    module = network()
    result = run(module, sometimes_nan(module, lambda t: t >= 130, what))
    assert isinstance(result.ended_by, FloatingPointError)
    assert "iteration 130" in str(result.ended_by)
    assert state(module).equal(after(130))
    module = network()
    result = run(module, sometimes_nan(module, lambda t: t % 2 == 1, what), max_iter=100, nonfinite="skip")
    assert result.ended_by is None
    np.testing.assert_array_equal(np.isfinite(result.losses), np.arange(100) % 2 == 0)
    assert state(module).equal(after(50))
    result = run(module, sometimes_nan(module, lambda t: t >= 50, what), max_iter=1000, nonfinite="skip")
    assert isinstance(result.ended_by, FloatingPointError)
    assert len(result.losses) == 200  # a hundred in a row are too many
    assert state(module).isfinite().all()


def test_a_gradient_that_is_not_finite_counts_as_a_loss_that_is_not():
    module = network()
    result = run(module, lambda: quadratic(module)() + (0 * module[0].weight.sum()).sqrt(), max_iter=5)  # 0 / 0
    assert state(module).equal(state(network()))
    assert np.isnan(result.losses).all()
    assert isinstance(result.ended_by, FloatingPointError)


@every("error", [KeyboardInterrupt, ValueError, MemoryError])
def test_what_ends_the_loop_is_returned_with_the_state_before(error):
    module = network()
    losses = Mock(side_effect=[1.0] * 30 + [error])
    result = run(module, lambda: losses() * quadratic(module)(), ema=0.9)
    assert isinstance(result.ended_by, error)
    assert len(result.losses) == 30
    assert state(module).equal(after(30, ema=0.9))


# A run that ends early


def ending(error, *kept):
    """Return a fit that keeps some reports and is ended by an error."""

    def fit(run):
        for report in kept:
            run.keep(Fit(None, report))
        raise error

    return fit


def new_run():
    return Run(0, torch.device("cpu"), Tally())


@every("error", [KeyboardInterrupt(), FloatingPointError(), ConnectionError(), TimeoutError(), ZeroDivisionError()])
def test_a_run_that_ends_early_returns_what_it_has_kept_last(error):
    """Errors of other kinds end it, unless it keeps after any."""
    run = new_run()
    if isinstance(error, ZeroDivisionError):
        with pytest.raises(ZeroDivisionError):
            run.result(ending(error, {"n_iter_": 3}), "")
        run.keeping = BaseException
    found = run.result(ending(error, {"n_iter_": 0}, {"n_iter_": 3}), "")
    assert (found.report, found.ended_by) == ({"n_iter_": 3}, error)
    with pytest.raises(type(error)):
        new_run().result(ending(error), "")


def test_a_spent_budget_is_a_remark_and_no_error():
    run = new_run()
    run.tally.limit = 10

    def fit(run):
        run.keep(Fit(None, {"n_iter_": 3}))
        run.tally.add(values=11)

    found = run.result(fit, "take less")
    assert found.ended_by is None
    assert run.tally.limit is None
    assert "The 10 evaluations of `max_score_calls` were spent after 3 iterations" in found.remark
    assert "take less" in found.remark
