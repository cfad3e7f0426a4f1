"""The arithmetic of the budget of CPU."""

import json
from collections import Counter

import cpu_budget
import pytest


def test_a_cost_is_counted_in_units_of_the_work_at_the_speed_of_its_time(monkeypatch):
    """A machine that is three times as slow from its second test on changes seconds, and no unit."""
    clock, speeds = [0.0], iter([0.5, 1.5, 1.5])
    monkeypatch.setattr(cpu_budget, "cpu", lambda: clock[0])
    monkeypatch.setattr(cpu_budget, "seconds_of_work", lambda: next(speeds))
    meter = cpu_budget.Meter()
    for name, seconds in (("start", 8.0), ("a", 24.0), ("a", 12.0), ("b", 3.0)):
        clock[0] += seconds
        meter.charge(name)
    assert meter.units == {"start": 16, "a": 16 + 8, "b": 2}
    assert meter.seconds == 47


def test_a_run_within_its_budget_says_so_in_one_line():
    assert cpu_budget.verdict({"a": 300, "b": 150}, 90.0, {"total": 500, "tests": {}}) == [
        "CPU 90 s, 0.9 of the budget"
    ]
    assert len(cpu_budget.verdict({"a": 600}, 9.0, {"total": 500, "tests": {}})) == 1


def test_above_the_limit_the_tests_that_grew_most_are_named():
    units = {"grew": 400, "large": 1000, "new": 80, "fell": 50} | {f"small {k}": 1 for k in range(30)}
    recorded = {"total": 1000, "tests": {"grew": 100, "large": 900, "fell": 70, "gone": 500}}
    head, *rows = cpu_budget.verdict(units, 156.0, recorded)
    assert head == "CPU 156 s, 1.6 of the budget, above 1.2. These tests grew most:"
    assert [row.split("s  ")[1] for row in rows[:3]] == ["grew", "large", "new"]
    assert rows[0].split() == ["+30.0", "s,", "now", "40.0", "s", "grew"]
    assert len(rows) == 20


def test_the_costs_of_a_run_are_kept_of_its_tier_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_budget, "RECORDED", tmp_path / "budget.json")
    kept = {"total": 7, "tests": {}}
    (tmp_path / "budget.json").write_text(json.dumps({"quick": kept, "slow": kept}))
    cpu_budget.record("slow", Counter({"large": 99.7, "small": 0.4}))
    found = json.loads((tmp_path / "budget.json").read_text())
    assert found == {"quick": kept, "slow": {"total": 100, "tests": {"large": 100}}}


@pytest.mark.parametrize("tier", ["quick", "slow"])
def test_each_tier_has_a_budget(tier):
    recorded = json.loads(cpu_budget.RECORDED.read_text("utf-8"))[tier]
    assert sum(recorded["tests"].values()) <= recorded["total"]
