"""The chains of many parameters: exact for Gaussians, whatever their scales, and a start for fits of many modes."""

import numpy as np
import pytest
import torch
from plain_targets import generator, resolved

from skksivi import HKSIVIApproximator, KSIVIApproximator
from skksivi.parameters import Pilot
from skksivi.pilot._pilot import find_whitening

MODES = np.array([[-30.0, 0.0], [30.0, 0.0]])


def stiff():
    """A Gaussian of five correlated coordinates, of scales from 0.01 to 100."""
    scales = torch.tensor([0.01, 0.1, 1.0, 10.0, 100.0], dtype=torch.float64)
    L = torch.linalg.cholesky(0.5 * torch.eye(5, dtype=torch.float64) + 0.5)
    return torch.arange(5.0, dtype=torch.float64), scales[:, None] * L


def gaussian_score(m, L):
    precision = torch.cholesky_inverse(L)
    return lambda x: (m.to(x) - x) @ precision.to(x)


@pytest.mark.slow
def test_from_one_start_the_chains_surround_the_mode():
    m, L = stiff()
    score = resolved(gaussian_score(m, L), 5)
    whitening, pilot = find_whitening("diagonal", score, generator(), init=m + 3 * L.diagonal())
    true_sd = L.square().sum(1).sqrt()
    se = true_sd / 20**0.5
    assert ((torch.as_tensor(whitening.mean) - m).abs() < 5 * se).all()
    assert ((torch.as_tensor(whitening.sd) / true_sd).log().abs() < 0.5).all()
    assert whitening.n_score_calls == pytest.approx(400_000, rel=0.1)
    assert pilot.converged
    assert len(pilot.n_of_mode) == 20


def two_modes(x):
    """The score of two standard normals, 60 apart."""
    first = x[:, :1]
    return torch.cat([30 * torch.tanh(30 * first) - first, -x[:, 1:]], 1)


@pytest.mark.filterwarnings("ignore:The training did not improve")  # which is short
@pytest.mark.parametrize(
    "approximator", [KSIVIApproximator, pytest.param(HKSIVIApproximator, marks=pytest.mark.slow)]
)
def test_every_start_keeps_its_mode(approximator):
    q = approximator(
        whiten=Pilot("diagonal", budget=16_000), init=np.repeat(MODES, 8, 0), max_iter=100, random_state=0
    ).fit(two_modes, n_features=2)
    X = q.sample(4000, random_state=0)
    left = X[:, 0] < 0
    assert abs(left.mean() - 0.5) < 5 * 0.5 / 4000**0.5
    for part, mode in ((X[left], MODES[0]), (X[~left], MODES[1])):
        assert np.abs(part.mean(0) - mode).max() < 0.3
        assert np.abs(np.log(part.std(0))).max() < 0.25
