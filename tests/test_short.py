"""Short Hamiltonian chains, and the tests that they will do."""

import math

import numpy as np
import pytest
import torch
from plain_targets import as_score, gaussian, generator, gumbel, gumbel_log_prob, gumbel_score
from sklearn.exceptions import ConvergenceWarning

from skksivi import KSIVIApproximator
from skksivi.parameters import Pilot
from skksivi.pilot._short import SHORT, Chains, disagreement, rhat, trajectory, warmed_up
from skksivi.targets import Banana


def normal_score(x):
    return -x


@pytest.mark.parametrize("log_prob", [None, gumbel_log_prob])
def test_trajectories_leave_the_target_as_it_is(log_prob):
    """Means and variances of 40,000 chains of three features after ten trajectories; five standard errors."""
    x, score = gumbel(40_000, 3), as_score(gumbel_score, log_prob, d=3)
    chains, moved, noise = Chains.at(score, x, 0.9), 0.0, generator(1)
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

    start = Chains.at(
        as_score(score_fn, d=1), torch.cat([torch.zeros(31, 1), torch.full((1, 1), 20.0)]).double(), 1.0
    )
    assert warmed_up(as_score(score_fn, d=1), start, generator()).u.abs().max() < 6


def test_chains_that_stay_apart_disagree():
    u = torch.randn(40, 32, 2, generator=generator(), dtype=torch.float64)
    assert disagreement(u) < SHORT.max_rhat
    u[:, :4, 1] += 3
    assert disagreement(u) > SHORT.max_rhat
    assert rhat(u)[0] < SHORT.max_rhat


CORRELATED = gaussian(5, 0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("score_fn", "mean", "sd"),
    [
        (normal_score, 0.0, 1.0),
        (gumbel_score, np.euler_gamma, math.pi / 6**0.5),
        (CORRELATED[2], CORRELATED[0].numpy(), torch.linalg.inv(CORRELATED[1]).diagonal().sqrt().numpy()),
    ],
    ids=["normal", "gumbel", "correlated"],
)
def test_a_default_fit_spends_little_and_is_accurate(score_fn, mean, sd, seed):
    """Errors of means and scales are four standard errors of short chains; long ones would take 400,000 scores."""
    q = KSIVIApproximator(max_iter=1, random_state=seed).fit(score_fn, n_features=5)
    assert q.whitening_.n_score_calls < 110_000
    X = q.sample(20_000, random_state=0)
    np.testing.assert_allclose((X.mean(0) - mean) / sd, 0, atol=0.12)
    np.testing.assert_allclose(X.std(0) / sd, 1, atol=0.12)


def test_the_effort_is_kept():
    calls = {
        effort: KSIVIApproximator(max_iter=1, whiten=Pilot(effort=effort, budget=0), random_state=0)
        .fit(normal_score, n_features=2)
        .whitening_.n_score_calls
        for effort in ("low", "auto", "high")
    }
    assert calls["low"] == calls["auto"] < 20_000 < calls["high"]


@pytest.mark.slow
def test_low_effort_says_that_it_did_not_do():
    q = KSIVIApproximator(max_iter=1, whiten=Pilot(effort="low"), early_stopping=None, random_state=0)
    with pytest.warns(ConvergenceWarning, match="`effort`"):
        q.fit(Banana())
    assert q.whitening_.n_score_calls < 100_000
