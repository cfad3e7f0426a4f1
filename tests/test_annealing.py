"""Temperature schedules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skksivi.annealing import Linear

SHARES = st.floats(1e-3, 1)


@given(start=SHARES, until=SHARES)
def test_linear_goes_from_its_start_to_one_and_stays(start, until):
    schedule = Linear(start=start, until=until)
    assert schedule(0.0) == start
    assert schedule(until) == pytest.approx(1, rel=1e-12)
    assert schedule(until / 2) == pytest.approx((start + 1) / 2, rel=1e-12)
    assert schedule(1.0) == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("t", [0, 1, 10_000, 22_500, 30_000, 50_000])
def test_default_is_the_papers_schedule_over_50000_iterations(t):
    assert Linear()(t / 50_000) == pytest.approx(min(1, 0.1 + t / 25_000), rel=1e-12)
