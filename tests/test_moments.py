"""Moments that hold a fit: the gradient is that of the formula, departures are counted coordinate by coordinate."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from members import every
from plain_targets import GaussianScore, normal

from skksivi.stein._discrepancy import stein_shift
from skksivi.targets import Banana
from skksivi.training._guard import MomentPenalty, departure, moments

SEEDS = st.integers(0, 10**6)


@given(n=st.integers(2, 30), d=st.integers(1, 4), weight=st.floats(0.1, 10), seed=SEEDS)
def test_the_gradient_is_that_of_the_formula(n, d, weight, seed):
    """Each moment is written out; at first a batch moves the running averages by 1 - memory, and these forget."""
    target, u = moments(normal(50, d, seed=seed)), normal(n, d, seed=seed + 1).requires_grad_()
    gaps = u.mean(0) - target.first, u.mT @ u / n - target.second, (u**3).mean(0) - target.third
    penalty = sum(gap.square().sum() / share for gap, share in zip(gaps, (1, 2, 15), strict=True))
    (expected,) = torch.autograd.grad(weight * penalty, u)
    for memory, n_steps, share in ((0.0, 1, 1.0), (0.9, 1, 0.1), (0.5, 60, 1.0)):
        remembering, before = MomentPenalty(target, weight, memory=memory), [a.clone() for a in target]
        for _ in range(n_steps):
            last = remembering.gradient(u.detach())
        torch.testing.assert_close(last, share * expected, rtol=1e-9, atol=1e-12)
        assert all(map(torch.equal, target, before))


# Departures


START = normal(4000, 3)
one = torch.tensor([0.0, 1.0, 0.0]).double()
DEPARTURES = {
    "the start itself": (START, True),
    "a shift of 0.2": (START + 0.2 * one, True),
    "a shift of 0.4": (START + 0.4 * one, False),  # the third moment changes by 1.2 + 0.064
    "9% wider in one coordinate": (START * (1 + 0.09 * one), True),
    "12% wider in one coordinate": (START * (1 + 0.12 * one), False),
    "12% narrower in one coordinate": (START / (1 + 0.12 * one), False),
    "skewed in one coordinate": (torch.where(one > 0, START.exp(), START) / (1 + 1.1 * one), False),
}


@every("u, accepted", DEPARTURES)
def test_a_departure_is_accepted_if_no_coordinate_went_far(u, accepted):
    assert departure(u, START).accepted is accepted


def test_a_lost_tail_is_no_accepted_departure():
    """The third moment of a skewed start counts in its own standard deviations."""
    start = START.exp()
    lost = start.clamp_max(start.quantile(0.97, 0))
    assert (departure(lost, start).third < -0.8).all()
    assert not departure(lost, start).accepted


@given(log10=st.floats(-3, 3), seed=SEEDS)
def test_a_departure_has_no_units(log10, seed):
    u, start = normal(2, 100, 3, seed=seed)
    scale, shift = 10**log10, normal(3, seed=seed + 1)
    for a, b in zip(departure(u, start), departure(scale * u + shift, scale * start + shift), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@every("scale, log10_condition", [(0.5, 6), (3.0, 0)])
def test_stein_shift_is_the_squared_distance_in_standard_deviations(scale, log10_condition):
    """Of draws that are as wide as the target; those wider or narrower by a factor have its square as a factor.

    It depends on the covariance of the draws, which is known to within sqrt(2 / n).
    """
    p = GaussianScore(3, log10_condition, size=5.0, seed=0)
    u = normal(20_000, 3) * scale + torch.tensor([0.0, 3.0, 4.0])
    x = p.mean + (u * p.lam.sqrt()) @ p.V.mT
    square, se = stein_shift(x, p.score_fn(x))
    assert square.item() == pytest.approx((5 * scale) ** 2, rel=4 * (2 / len(x)) ** 0.5)
    assert se < 0.02 * square


def test_stein_shift_is_zero_for_exact_draws_of_anything_also_if_they_are_few():
    x = Banana().sample(50_000, torch.Generator().manual_seed(0))
    for part in (x, x[:200]):
        square, se = stein_shift(part, Banana().score_fn(part))
        assert square.abs() < 4 * se
    x = normal(100, 1000)
    square, se = stein_shift(x, -x)
    assert square < 4 * se
