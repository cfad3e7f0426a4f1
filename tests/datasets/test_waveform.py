"""The waveform data: its generator, its preparation, its reference draws."""

from pathlib import Path

import numpy as np
import pytest
import torch

from skksivi.datasets import load_waveform, load_waveform_posterior, make_waveform
from skksivi.targets import BayesianLogisticRegression

UCI = Path(__file__).parents[3] / "shared" / "data" / "uci" / "waveform.data"


def moments(X, y):
    return [(X[y == k].mean(0), X[y == k].var(0), (y == k).sum()) for k in range(3)]


def test_class_moments_are_those_of_the_mixture():
    """E x = (h_a + h_b) / 2 and Var x = 1 + (h_a - h_b)^2 / 12."""
    X, y = make_waveform(60_000, random_state=0)
    j = np.arange(1, 22)
    h = [np.maximum(6 - np.abs(j - peak), 0) for peak in (11, 15, 7)]
    for (mean, variance, n), (a, b) in zip(moments(X, y), [(1, 2), (0, 2), (0, 1)], strict=True):
        expected = 1 + (h[a] - h[b]) ** 2 / 12
        assert np.abs((mean - (h[a] + h[b]) / 2) / np.sqrt(expected / n)).max() < 4
        assert np.abs((variance - expected) / (expected * np.sqrt(2 / n))).max() < 4


def test_the_generator_is_seeded_and_checked():
    for a, b in zip(make_waveform(10, random_state=3), make_waveform(10, random_state=3), strict=True):
        np.testing.assert_array_equal(a, b)
    assert make_waveform(0)[0].shape == (0, 21)
    with pytest.raises(ValueError, match="n_samples"):
        make_waveform(-1)


def test_the_benchmark_set_is_the_papers():
    bunch = load_waveform()
    X, y = load_waveform(return_X_y=True)
    np.testing.assert_array_equal(bunch.data, X)
    np.testing.assert_array_equal(bunch.target, y)
    assert X.shape == (400, len(bunch.feature_names)) == (400, 21)
    assert set(y) == {0, 1}
    assert np.mean(y) == pytest.approx(2 / 3, abs=4 * np.sqrt(2 / 9 / 400))
    assert np.abs(X.mean(0)).max() < 4 / np.sqrt(400)
    assert "Breiman" in bunch.DESCR


def test_the_reference_draws_belong_to_the_posterior():
    """Stein identity E[s] = 0 within 4.5 standard errors for the 22 coefficients."""
    draws = load_waveform_posterior()
    assert draws.shape == (2000, 22)
    target = BayesianLogisticRegression(*load_waveform(return_X_y=True), fit_intercept=True)
    s = target.score_fn(torch.as_tensor(draws).double())
    assert (s.mean(0) / s.std(0) * len(s) ** 0.5).abs().max() < 4.5
