"""Hamiltonian chains, those of many parameters, and how fits from them are judged."""

import math

import numpy as np
import pytest
import torch
from members import every
from plain_targets import as_score, generator, gumbel, gumbel_log_prob, gumbel_score, normal, origin, resolved

from skksivi import HKSIVIApproximator, KSIVIApproximator
from skksivi.coordinates._affine import Affine
from skksivi.estimators._judge import contradiction
from skksivi.judge import Errors
from skksivi.parameters import Pilot
from skksivi.pilot._chains import (
    MAX_RHAT,
    N_CHAINS,
    ChainEnsemble,
    ChainStates,
    disagreement,
    rhat,
    trajectory,
    warmed_up,
)
from skksivi.pilot._points import MANY_FEATURES
from skksivi.start import find_whitening


@every("log_prob", [None, gumbel_log_prob])
def test_trajectories_leave_the_target_as_it_is(log_prob):
    """Means and variances of 40,000 chains of three features after ten trajectories; five standard errors."""
    x, score = gumbel(40_000, 3), as_score(gumbel_score, log_prob, d=3)
    chains, moved, noise = ChainStates.at(score, x, 0.9), 0.0, generator(1)
    for _ in range(10):
        chains = trajectory(score, chains, noise)
        moved = max(moved, (chains.u != x).any(1).double().mean().item())
    assert moved > 0.5
    mean, variance = np.euler_gamma, math.pi**2 / 6
    se, se_of_variance = (x.std() / 200).item(), ((x - x.mean()).square().std() / 200).item()
    np.testing.assert_allclose(chains.u.mean(0), mean, atol=5 * se)
    np.testing.assert_allclose(chains.u.var(0), variance, atol=5 * se_of_variance)


def test_chains_that_cannot_move_go_on_from_the_place_of_others():
    """Beyond ten the score is so long that no step of a common length is accepted."""
    score, x = as_score(lambda x: -x.where(x.abs() < 10, 1e9 * x)), torch.zeros(32, 1).double()
    x[-1] = 20.0
    assert warmed_up(score, ChainStates.at(score, x, 1.0), generator()).u.abs().max() < 6


def test_chains_that_stay_apart_disagree():
    u = normal(40, 32, 2)
    assert disagreement(u) < MAX_RHAT
    u[:, :4, 1] += 3
    assert disagreement(u) > MAX_RHAT
    assert rhat(u)[0] < MAX_RHAT


@every("log_prob", [None, gumbel_log_prob])
def test_stages_of_chains_have_the_moments_of_a_skewed_target(log_prob):
    """From a Gaussian that is too narrow and .45 sd off; five standard errors of a mean, 10% of a scale."""
    metric, sd = Affine(origin(2), 0.6 * torch.eye(2).double()), math.pi / math.sqrt(6)
    ensemble = ChainEnsemble(as_score(gumbel_score, log_prob, d=2), metric, generator())
    first, points = (ensemble.stage(80) for _ in range(2))
    assert len(points.x) == 2 * len(first.x) == 2 * N_CHAINS * 80
    np.testing.assert_array_less((points.x.mean(0) - np.euler_gamma).abs(), 5 * points.mean_se)
    np.testing.assert_allclose(points.x.std(0) / sd, 1, atol=0.1)


@pytest.mark.slow
def test_chains_that_run_off_are_not_taken_for_a_fit_without_a_mode():
    with pytest.raises(ValueError, match="wrong sign"):
        KSIVIApproximator(random_state=0).fit(lambda x: x, n_features=MANY_FEATURES)


def test_a_width_that_chains_know_is_no_error_where_the_score_depends_on_others():
    """By scores nine times as steep as their own draws are too wide in one coordinate, unless chains deny it."""
    score, x = as_score(lambda x: -x * x.new_tensor([9.0, 1.0]), d=2), normal(2000, 2)
    nothing = np.zeros(2)
    chains = Errors(nothing, nothing, nothing, nothing, np.zeros((2, 2)), np.zeros((2, 2)))
    assert "too wide in `x[0]`" in contradiction(x, score(x), score)
    assert "too wide in `x[0]`" in contradiction(x, score(x), score, chains._replace(sd=nothing + np.log(3)))
    assert contradiction(x, score(x), score, chains) is None


SLOW = pytest.mark.slow
MODES = np.array([[-30.0, 0.0], [30.0, 0.0]])


@pytest.mark.slow
def test_from_one_start_the_chains_surround_the_mode():
    m, true_sd = torch.arange(5.0).double(), 10 ** torch.arange(-2.0, 3).double()
    precision = torch.linalg.inv((0.5 * torch.eye(5) + 0.5) * true_sd.outer(true_sd))
    score, rule = resolved(lambda x: (m.to(x) - x) @ precision.to(x), 5), Pilot("diagonal", budget=100_000)
    whitening, pilot = find_whitening(rule, score, generator(), init=m + 3 * true_sd)
    assert ((torch.as_tensor(whitening.mean) - m).abs() < 5 * (true_sd / 20**0.5)).all()
    assert ((torch.as_tensor(whitening.sd) / true_sd).log().abs() < 0.5).all()
    assert whitening.n_score_calls == pytest.approx(100_000, rel=0.1)
    assert pilot.converged
    assert len(pilot.n_of_mode) == 20


def two_modes(x):
    """The score of two standard normals, 60 apart."""
    first = x[:, :1]
    return torch.cat([30 * torch.tanh(30 * first) - first, -x[:, 1:]], 1)


@pytest.mark.filterwarnings("ignore:The training did not improve")  # which is short
@pytest.mark.parametrize("approximator", [KSIVIApproximator, pytest.param(HKSIVIApproximator, marks=SLOW)])
def test_every_start_keeps_its_mode(approximator):
    q = approximator(init=np.repeat(MODES, 8, 0), max_iter=100, random_state=0)
    q.set_params(whiten=Pilot("diagonal", budget=16_000)).fit(two_modes, n_features=2)
    X = q.sample(4000, random_state=0)
    left = X[:, 0] < 0
    assert abs(left.mean() - 0.5) < 5 * 0.5 / 4000**0.5
    for part, mode in ((X[left], MODES[0]), (X[~left], MODES[1])):
        assert np.abs(part.mean(0) - mode).max() < 0.3
        assert np.abs(np.log(part.std(0))).max() < 0.25
