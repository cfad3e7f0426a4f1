"""Hamiltonian chains, and how fits from them are judged."""

import math

import numpy as np
import pytest
import torch
from plain_targets import as_score, generator, gumbel, gumbel_log_prob, gumbel_score, normal

from skksivi import KSIVIApproximator
from skksivi.coordinates._affine import Affine
from skksivi.estimators._judge import contradiction
from skksivi.judge import THRESHOLDS, Errors
from skksivi.pilot._chains import MAX_RHAT, ChainEnsemble, ChainStates, disagreement, rhat, trajectory, warmed_up
from skksivi.pilot._importance import N_DRAWS
from skksivi.pilot._points import MANY_FEATURES
from skksivi.targets import Banana


@pytest.mark.parametrize("log_prob", [None, gumbel_log_prob])
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

    def score_fn(x):
        return -x.where(x.abs() < 10, 1e9 * x)

    start = ChainStates.at(
        as_score(score_fn, d=1), torch.cat([torch.zeros(31, 1), torch.full((1, 1), 20.0)]).double(), 1.0
    )
    assert warmed_up(as_score(score_fn, d=1), start, generator()).u.abs().max() < 6


def test_chains_that_stay_apart_disagree():
    u = torch.randn(40, 32, 2, generator=generator(), dtype=torch.float64)
    assert disagreement(u) < MAX_RHAT
    u[:, :4, 1] += 3
    assert disagreement(u) > MAX_RHAT
    assert rhat(u)[0] < MAX_RHAT


def ensemble(score_fn, log_prob, L):
    metric = Affine(torch.zeros(len(L), dtype=torch.float64), L)
    return ChainEnsemble(as_score(score_fn, log_prob, d=len(L)), metric, generator())


def test_mixtures_move_to_a_skewed_target():
    """Two Gumbel distributions, from a Gaussian that is too narrow and .45 sd off."""
    narrow = ensemble(gumbel_score, gumbel_log_prob, 0.6 * torch.eye(2, dtype=torch.float64))
    (points,) = narrow.by_mixtures()
    assert points.converged
    sd, atol = math.pi / math.sqrt(6), 4 * max(THRESHOLDS.errors_of_weights)
    np.testing.assert_allclose((points.x.mean(0) - np.euler_gamma) / sd, 0, atol=atol)
    np.testing.assert_allclose(points.x.std(0) / sd, 1, atol=atol)


def test_mixtures_that_do_not_arrive_leave_no_trace():
    """The chains that follow are those that there would be without them."""
    bent = ensemble(Banana().score_fn, Banana().log_prob, 1e-3 * torch.eye(2, dtype=torch.float64))
    before = bent.generator.get_state()
    (points,) = bent.by_mixtures()
    assert not points.converged
    assert torch.equal(bent.generator.get_state(), before)


def test_draws_from_afar_are_points_without_scores():
    """The limit ends it after a round."""
    narrow = ensemble(gumbel_score, gumbel_log_prob, 0.5 * torch.eye(2, dtype=torch.float64))
    narrow.score_fn.tally.limit = narrow.score_fn.tally.total + N_DRAWS
    (points,) = narrow.by_mixtures()
    assert points.n_of_mode == [len(points.x)] == [N_DRAWS]
    assert points.mixture is None
    assert not points.converged


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
