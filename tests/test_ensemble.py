"""Several fits to one target: their mixture, its weights, and whether they agree."""

import math
import re

import numpy as np
import pytest
import torch
from joblib import parallel_config
from plain_targets import PAIR, generator, normal, normal_array
from scipy import stats
from sklearn.exceptions import ConvergenceWarning

from skksivi import ensemble, importance_sample
from skksivi.base import BaseApproximator
from skksivi.baselines import SVGD, Laplace
from skksivi.coordinates._affine import Affine, Identity
from skksivi.coordinates._whitening import Whitening
from skksivi.families._derived import Pooled, knows_density
from skksivi.families._samplers import Gaussian, Particles
from skksivi.inference._ensemble import MAX_RHAT, N_COMPARED, best_weights, disagreements
from skksivi.targets import from_log_prob
from skksivi.training._run import Fit


def gaussian(mean, scale=1.0):
    mean = torch.as_tensor(mean, dtype=torch.float64)
    return Gaussian(Affine(mean, scale * torch.eye(len(mean), dtype=torch.float64)))


class OneMode(BaseApproximator):
    """Fits one of the two modes of `PAIR`, by its seed; nothing, where a divisor says so."""

    def __init__(self, fails_at=(), device="cpu", dtype="float64", random_state=None):
        self.fails_at, self.device, self.dtype, self.random_state = fails_at, device, dtype, random_state

    def _fit(self, score_fn, run):
        if self.random_state in self.fails_at:
            raise ArithmeticError("no mode here")
        side = 1.0 if self.random_state % 2 else -1.0
        return Fit(gaussian([3.0 * side, 0.0]), {})


PAIR_TARGET = from_log_prob(PAIR.log_prob, n_features=2)
QUIET = pytest.mark.filterwarnings("ignore:The fits disagree")


def sides(found):
    """Return the weights of the members on the left and on the right."""
    right = np.array([member.sampler_.map.m[0] > 0 for member in found.members])
    return found.weights[~right].sum(), found.weights[right].sum()


# The mixture


def test_a_pool_has_the_density_and_the_moments_of_the_mixture():
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    parts = [gaussian([0.0, 1.0]), gaussian([4.0, -1.0], 0.5), gaussian([-2.0, 0.0], 2.0)]
    pool, x = Pooled(tuple(parts), weights), 3 * normal(50, 2)
    expected = torch.stack([part.log_density(x).value for part in parts]).add(weights.log()[:, None]).logsumexp(0)
    torch.testing.assert_close(pool.log_density(x).value, expected)
    n = 20_000
    draws = pool.sample(n, generator())
    means = torch.stack([part.map.m for part in parts])
    variances = torch.tensor([1.0, 0.25, 4.0], dtype=torch.float64)[:, None] + means.square()
    mean, second = weights @ means, weights @ variances
    se = ((second - mean.square()) / n).sqrt()
    assert ((draws.mean(0) - mean).abs() < 4.5 * se).all()  # one in 70,000 by chance
    assert ((draws[: n // 2].mean(0) - mean).abs() < 4.5 * math.sqrt(2) * se).all()  # the order is random
    assert pool.sample(0, generator()).shape == (0, 2)


def test_a_pool_has_a_density_if_all_of_its_parts_have():
    whitening = Whitening(Identity(torch.zeros(2)), modes=np.zeros((1, 2)), weights=np.ones(1))
    particles = Particles(normal_array(10, 2), whitening)
    weights = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert knows_density(Pooled((gaussian([0.0, 0.0]),) * 2, weights))
    mixed = Pooled((gaussian([0.0, 0.0]), particles), weights)
    assert not knows_density(mixed)
    assert not mixed.in_parts


# The weights


def test_the_best_weights_are_stationary():
    log_q, omega = normal(200, 4), normal(200).softmax(0)
    log_q[7] = -math.inf  # a draw that no fit could have given
    w = best_weights(log_q, omega)
    seen = omega * log_q.isfinite().any(1) / (1 - omega[7])
    slope = seen @ (log_q.exp() / (log_q.exp() @ w)[:, None]).nan_to_num(0)
    assert w.sum() == pytest.approx(1)
    assert (slope <= 1 + 1e-4).all()  # Karush, Kuhn and Tucker
    assert (w * (slope - 1)).abs().max() < 1e-4


@QUIET
def test_copies_of_a_fit_share_its_weight():
    found = ensemble(OneMode(), PAIR_TARGET, n_fits=6, random_state=1)
    n_right = sum(member.random_state % 2 for member in found.members)
    assert n_right not in (0, 3, 6)  # else equal weights would do
    np.testing.assert_allclose(sides(found), 0.5, atol=0.05)
    assert abs(found.log_z.value) < 4 * found.log_z.se + 0.01
    np.testing.assert_allclose(found.elbo, -math.log(2), atol=0.1)  # of one mode of two
    assert importance_sample(found.pooled, PAIR_TARGET, random_state=0).share > 0.5  # half of the draws are wider
    X = found.sample(4000, random_state=0)
    assert abs((X[:, 0] > 0).mean() - 0.5) < 0.05 + 4 * 0.008
    log_q = found.score_samples(X[:50])
    np.testing.assert_allclose(log_q, PAIR.log_prob(torch.from_numpy(X[:50])), atol=0.15)


@QUIET
def test_equal_weights_ask_for_no_score():
    found = ensemble(OneMode(), PAIR_TARGET, n_fits=3, pooling="equal", random_state=0)
    np.testing.assert_array_equal(found.weights, [1 / 3] * 3)
    assert found.elbo is found.log_z is None
    assert np.isnan(ensemble(Laplace(), PAIR_TARGET, n_fits=1, pooling="equal").r_hat).all()


def test_fits_that_cannot_be_weighed_count_equally():
    far = from_log_prob(lambda x: -(x - 40.0).square().sum(-1) / 2, n_features=2)
    with pytest.warns(
        UserWarning, match=r"get equal weights, because .* cannot be trusted: .*k = .*modes\(ensemble.poo"
    ):
        found = ensemble(OneMode(), far, n_fits=1, random_state=0)
    assert found.weights.tolist() == [1.0]


def test_particles_have_no_density_to_be_weighed_by():
    q = SVGD(n_particles=10, max_iter=2)
    with pytest.raises(TypeError, match="`pooling` is 'evidence', but the fits have no density; set pooling='equal'"):
        ensemble(q, PAIR_TARGET, n_fits=1)


# Whether they agree


def test_r_hat_is_one_for_equal_distributions_and_sees_places_and_widths():
    same = [normal_array(N_COMPARED, 3, seed=k) for k in range(4)]
    assert disagreements(same).max() < 1.02
    moved = [X + np.array([0.0, k, 0.0]) for k, X in enumerate(same)]
    wider = [X * [1.0, 1.0, 1.0 + 2 * k] for k, X in enumerate(same)]
    assert (disagreements(moved) > MAX_RHAT).tolist() == [False, True, False]
    assert (disagreements(wider) > MAX_RHAT).tolist() == [False, False, True]
    infinite = [stats.cauchy.rvs(size=(N_COMPARED, 1), random_state=k) for k in range(4)]
    assert disagreements(infinite)[0] < 1.02


def test_fits_to_different_modes_are_told_to_disagree():
    with pytest.warns(
        ConvergenceWarning, match=r"The fits disagree: R-hat is \d.* in `x\[0\]`, above the limit of 1.05"
    ):
        found = ensemble(OneMode(), PAIR_TARGET, n_fits=6, random_state=1)
    assert found.r_hat[0] > 1.5
    assert found.r_hat[1] < MAX_RHAT


# Many fits


@QUIET
def test_a_fit_that_fails_does_not_end_the_others():
    seeds = [member.random_state for member in ensemble(OneMode(), PAIR_TARGET, 4, random_state=0).members]
    message = "1 of 4 fits failed and are left out. The first, of seed .*: ArithmeticError: no mode here."
    with pytest.warns(UserWarning, match=message):
        found = ensemble(OneMode(fails_at=seeds[1:2]), PAIR_TARGET, 4, pooling="equal", random_state=0)
    assert [member.random_state for member in found.members] == [seeds[0], *seeds[2:]]
    assert found.failures == ((seeds[1], "ArithmeticError: no mode here"),)
    with pytest.raises(RuntimeError, match=r"None of the 4 fits succeeded. The first, of seed .* no mode here\."):
        ensemble(OneMode(fails_at=seeds), PAIR_TARGET, 4, random_state=0)


@QUIET
def test_the_number_of_jobs_changes_nothing():
    alone = ensemble(OneMode(), PAIR_TARGET, 4, random_state=0)
    with parallel_config("threading"):
        there = ensemble(OneMode(), PAIR_TARGET, 4, n_jobs=2, random_state=0)
    np.testing.assert_array_equal(alone.weights, there.weights)
    np.testing.assert_array_equal(alone.sample(20, 0), there.sample(20, 0))


MISTAKES = {
    "class": (lambda: ensemble(Laplace, PAIR_TARGET), "`est` must be an approximator, got the class Laplace; pass"),
    "n_fits": (lambda: ensemble(Laplace(), PAIR_TARGET, 0), "n_fits == 0, must be >= 1"),
    "pooling": (
        lambda: ensemble(Laplace(), PAIR_TARGET, pooling="best"),
        "must be 'evidence' or 'equal', got 'best'",
    ),
    "n_samples": (lambda: ensemble(Laplace(), PAIR_TARGET, n_samples=9), "n_samples == 9, must be >= 100"),
    "n_features": (lambda: ensemble(Laplace(), torch.neg), "`n_features` is missing"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake):
    act, message = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        act()
