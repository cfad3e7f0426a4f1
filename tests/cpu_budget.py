"""The CPU budget of a tier of tests, in units of a fixed piece of work, so that it holds on slow machines too.

Each process times the work before its first test, and again every few seconds, for a shared machine changes its
speed. A full run of a tier prints `CPU 412 s, 0.9 of the budget` at its end. Above 1.2 it fails and names the tests
that grew most; no test fails for its own time. `PYTEST_ADDOPTS=--record-costs make test` makes the costs of this run
the budget of its tier.
"""

import json
import os
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

RECORDED = Path(__file__).with_suffix(".json")
LIMIT, N_NAMED = 1.2, 20
#: Seconds of CPU between two timings of the work, and from how many units the cost of a test is kept.
EVERY, KEPT = 5.0, 40

#: The tier by the marks and the profile of its command; options that make a run less than a tier, or slower.
TIERS = {("not slow", None): "quick", ("slow or hypothesis", "full"): "slow"}
OTHER_RUNS = ("keyword", "deselect", "ignore", "ignore_glob", "lf", "collectonly", "cov_source")


def tier_of(config):
    option = config.getoption
    if config.args_source is not config.ArgsSource.TESTPATHS or any(option(name, None) for name in OTHER_RUNS):
        return None
    return TIERS.get((option("markexpr"), option("--hypothesis-profile", None)))


def cpu():
    """Return the CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def work():
    """Small products of matrices and their derivatives, and Python: what the tests do."""
    weights = torch.full((50, 50), 0.01, requires_grad=True)
    for k in range(40):
        torch.full((100, 50), k / 40).mm(weights).tanh().square().mean().backward()
    counts = Counter()
    for k in range(20_000):
        counts[f"{k % 1000}"] += k


def seconds_of_work():
    """Return the best of three repeats, in one thread: others would spend their time waiting."""
    n_threads, times = torch.get_num_threads(), [cpu()]
    torch.set_num_threads(1)
    for _ in range(3):
        work()
        times.append(cpu())
    torch.set_num_threads(n_threads)
    return min(after - before for before, after in pairwise(times))


class Meter:
    """The units and the seconds that this process has spent, by the names of tests."""

    def __init__(self):
        self.units, self.seconds, self.last, self.due = Counter(), 0.0, 0.0, 0.0

    def charge(self, name):
        """Charge what has been spent since the last call."""
        spent = cpu() - self.last
        if cpu() >= self.due:
            self.unit, self.due = seconds_of_work(), cpu() + EVERY
        self.units[name] += spent / self.unit
        self.seconds += spent
        self.last = cpu()


def verdict(units, seconds, recorded):
    """Return the line of a run and, above the limit, those of the tests that grew most, in seconds of this run."""
    total = sum(units.values())
    share, second = total / recorded["total"], seconds / total
    line = f"CPU {seconds:.0f} s, {share:.1f} of the budget"
    if share <= LIMIT:
        return [line]
    grown = {name: cost - recorded["tests"].get(name, 0) for name, cost in units.items()}
    most = sorted(grown, key=grown.get, reverse=True)[:N_NAMED]
    rows = [f"{grown[name] * second:+8.1f} s, now {units[name] * second:6.1f} s  {name}" for name in most]
    return [f"{line}, above {LIMIT}. These tests grew most:", *rows]


def record(tier, units):
    """Make these costs the budget of a tier."""
    budgets = json.loads(RECORDED.read_text("utf-8"))
    tests = {name: round(cost) for name, cost in sorted(units.items()) if cost >= KEPT}
    budgets[tier] = {"total": round(sum(units.values())), "tests": tests}
    RECORDED.write_text(json.dumps(budgets, indent=1, sort_keys=True) + "\n", "utf-8")


class Budget:
    """The hooks: of a process that runs tests, and of the one that collects what its workers have spent."""

    def __init__(self, config):
        self.config, self.tier, self.meter, self.lines = config, tier_of(config), Meter(), []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        if not self.meter.units:
            self.meter.charge("imports and collection")
        result = yield
        self.meter.charge(item.nodeid)
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        spent = getattr(node, "workeroutput", {}).get("spent", {})
        self.meter.units.update(spent.get("units", {}))
        self.meter.seconds += spent.get("seconds", 0.0)

    def pytest_sessionfinish(self, session, exitstatus):
        meter = self.meter
        if hasattr(self.config, "workerinput"):
            self.config.workeroutput["spent"] = {"units": dict(meter.units), "seconds": meter.seconds}
        elif self.tier and exitstatus == pytest.ExitCode.OK:  # what fails or is stopped tells nothing of costs
            if self.config.getoption("record_costs"):
                record(self.tier, meter.units)
            self.lines = verdict(meter.units, meter.seconds, json.loads(RECORDED.read_text("utf-8"))[self.tier])
            session.exitstatus = pytest.ExitCode(len(self.lines) > 1)

    def pytest_terminal_summary(self, terminalreporter):
        for line in self.lines:
            terminalreporter.write_line(line, red=len(self.lines) > 1)


def pytest_addoption(parser):
    parser.addoption("--record-costs", action="store_true", help="make the costs of this run the budget of its tier")


def pytest_configure(config):
    config.pluginmanager.register(Budget(config))
