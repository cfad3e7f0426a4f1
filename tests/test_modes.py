"""The weights of modes: masses of cells from the score alone, and fits that are drawn by them."""

import math

import numpy as np
import pytest
import torch
from approximators import DrawsOf
from members import every
from plain_targets import Mixture, as_score, log_gamma_draws, log_gamma_score, normal, student_log_prob
from plain_targets import generator as seeded
from scipy.special import digamma, polygamma

from skksivi import KSIVIApproximator, modes
from skksivi.base import BaseApproximator
from skksivi.baselines import Laplace
from skksivi.coordinates._affine import Affine
from skksivi.inference._modes import metropolis
from skksivi.judge import Grade, Verdict
from skksivi.pilot._log_density import Cells, masses, normalised
from skksivi.targets import EightGaussians, from_log_prob
from skksivi.training._run import Fit

AGREED = Verdict(Grade.GOOD)

WEIGHTS = np.array([0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05])
#: A few hundred iterations of a normal mixing: the fits are rough, and say so.
pytestmark = pytest.mark.filterwarnings("ignore:The fit (is|may be) wrong")


def student_and_gaussian(d, weight=0.3, distance=20.0, df=3.0):
    """log p of a Student t at the origin and a Gaussian far off, and its gradient."""

    def log_prob(x):
        gaussian = -(x - distance).square().sum(-1) / 2 - d / 2 * math.log(2 * math.pi)
        return torch.stack([gaussian + math.log(weight), student_log_prob(x, df) + math.log(1 - weight)]).logsumexp(0)

    return log_prob, from_log_prob(log_prob, d).score_fn


def draws_of_both(n, d):
    student = normal(n, d) / (normal(n, 3, seed=1).square().sum(1) / 3).sqrt()[:, None]
    return student, 20 + normal(n, d, seed=2)


@every("d, exact", [(1, True), (5, False)])
def test_masses_are_those_of_modes_that_are_no_gaussians(d, exact):
    log_prob, score_fn = student_and_gaussian(d)
    score = as_score(score_fn, log_prob if exact else None)
    generator, (student, gaussian) = seeded(), draws_of_both(4000, d)
    eye = torch.eye(d, dtype=torch.float64)
    maps = [Affine(student.median(0).values, 1.3 * eye), Affine(gaussian.mean(0), eye)]
    cells = Cells(maps, torch.zeros(2, dtype=torch.float64))
    found = masses(score, cells, torch.cat([student, gaussian]), generator, 2000)
    weights, errors = normalised(found)
    assert all(m.trusted for m in found)
    assert abs(weights[1] - 0.3) < 4 * errors[1]
    assert errors[1] < 0.02


RING = EightGaussians(shift=5.0, weights=WEIGHTS)


def test_unequal_weights_are_found():
    """From draws that have equal ones."""
    target, q = RING, Drawn(EightGaussians(shift=5.0).sample).fit(RING)
    found = modes(q, target, random_state=0)
    assert found.trusted
    assert (found.reason, found.centres.shape) == ("", (8, 2))
    assert found.shares.sum() == pytest.approx(1)
    assert (np.abs(found.weights - np.sort(WEIGHTS)[::-1]) < 4 * found.standard_errors).all()
    assert (found.standard_errors < 0.03 * found.weights).all()


def test_one_mode_has_weight_one():
    found = modes(Laplace().fit(lambda x: -x, n_features=2), lambda x: -x, random_state=0)
    assert found.weights.tolist() == found.shares.tolist() == [1.0]
    assert found.trusted


class Drawn(BaseApproximator):
    """Draws by a function (n, generator) -> (n, d), whatever the target."""

    def __init__(self, draw, device="cpu", dtype="float64", random_state=0):
        self.draw, self.device, self.dtype, self.random_state = draw, device, dtype, random_state

    def _fit(self, score_fn, run):
        return Fit(DrawsOf(self.draw, score_fn.n_features), {})


def two_cauchys(n, generator):
    """Exact draws of two spherical Cauchys in ten dimensions, to which no proposal comes near."""
    z = torch.randn(n, 11, generator=generator, dtype=torch.float64)
    x = z[:, :10] / z[:, 10:].abs()
    x[::2, 0] += 3000
    return x


def two_cauchys_log_prob(x):
    squares = torch.stack([x.square().sum(-1), (x - torch.eye(1, 10).to(x) * 3000).square().sum(-1)])
    return (-5.5 * torch.log1p(squares)).logsumexp(0)


def test_draws_in_no_mode_that_could_be_weighed_are_told():
    target = EightGaussians(weights=[1.0] + 7 * [1e-6])  # of which only one is a mode worth its name
    q = KSIVIApproximator(whiten=(np.zeros(2), 6 * np.eye(2)), method="start", random_state=0).fit(target)
    found = modes(q, target, random_state=0)
    assert not found.trusted
    assert "far from every mode" in found.reason


@pytest.mark.slow
def test_weights_that_rest_on_too_little_are_refused():
    score_fn = from_log_prob(two_cauchys_log_prob, 10).score_fn
    found = modes(Drawn(two_cauchys).fit(score_fn, n_features=10), score_fn, random_state=0)
    assert len(found.weights) == 2
    assert not found.trusted
    assert "effective share" in found.reason


RARE = 0.001


def with_a_rare_mode(n, generator):
    """Draws of two normals, 12 apart, of which the second has few."""
    x = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return x + torch.where(torch.rand(n, generator=generator) < RARE, 6.0, -6.0)[:, None] * torch.eye(1, 2)


def test_a_mode_of_few_draws_is_seen():
    """The two have equal weights in the target."""
    p = Mixture([0.5, 0.5], [[-6.0, 0.0], [6.0, 0.0]], [1.0, 1.0])
    found = modes(Drawn(with_a_rare_mode).fit(p.score_fn, n_features=2), p.score_fn, random_state=0)
    np.testing.assert_allclose(found.weights, 0.5, atol=0.02)
    assert 0 < found.shares.min() < 2 * RARE


# Chains from draws of a mode


@every("factor", [1.0, 1.1])
def test_metropolis_leaves_the_target_invariant(factor):
    """By the first three moments over chains, which are independent; a score that is off by a tenth is seen."""
    kept = metropolis(lambda x: factor * log_gamma_score(x), log_gamma_draws(4000, 2), seeded())
    z = (kept - digamma(1.5)) / math.sqrt(polygamma(1, 1.5))
    powers = torch.stack([z**k for k in (1, 2, 3)]).mean((1, 3))  # (3, n)
    off = powers.mean(1) - torch.tensor([0.0, 1.0, polygamma(2, 1.5) / polygamma(1, 1.5) ** 1.5])
    standard_errors = powers.std(1) / math.sqrt(4000)
    assert (off.abs() < 4 * standard_errors).all() if factor == 1 else (off.abs() > 6 * standard_errors).any()


def test_metropolis_never_accepts_a_place_without_a_finite_score():
    def score_fn(x):
        return torch.where(x < 0, torch.nan, 1 - x)

    assert (metropolis(score_fn, normal(200, 1).abs() + 0.1, seeded()) >= 0).all()


def test_a_score_that_is_nan_at_the_origin_starts_elsewhere():
    assert KSIVIApproximator(random_state=0).fit(lambda x: -x * (x / x), n_features=2).verdict_.good
