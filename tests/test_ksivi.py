"""KSIVIApproximator: its options mean what the paper means by them."""

import math

import numpy as np
import pytest
import torch
from sklearn.base import clone

from skksivi import KSIVIApproximator
from skksivi.annealing import Linear
from skksivi.kernels import KERNELS, Gaussian
from skksivi.metrics import kl_divergence
from skksivi.targets import Banana, Multimodal, XShaped


def normal_score(x):
    return -x


def shifted_score(x):
    return 3 - x


QUICK = KSIVIApproximator(max_iter=30, batch_size=16, hidden_layer_sizes=(8,), random_state=0)


def fit(score_fn=normal_score, n_features=2, **parameters):
    return clone(QUICK).set_params(**parameters).fit(score_fn, n_features=n_features)


def test_fitted_attributes():
    q = fit(max_iter=37)
    assert q.n_iter_ == 37
    assert q.loss_curve_.shape == (37,)
    assert np.isfinite(q.loss_curve_).all()
    assert q.n_features_in_ == 2


@pytest.mark.parametrize(
    "parameters",
    [
        *({"kernel": name} for name in KERNELS),
        {"kernel": Gaussian(bandwidth=2.0)},
        {"bandwidth": 0.7},
        {"gradient_estimator": "vanilla"},
        {"bandwidth": "median"},
        {"bandwidth": None},
        {"latent_dim": 1},
        {"latent_dim": 5},
        {"mixing": "normal"},
        {"mixing": "pilot"},
        {"pilot_weight": 0.0},
        {"whiten": "bam"},
        {"whiten": "laplace"},
        {"whiten_budget": 0},
        {"init": [0.1, -0.1]},
        {"init": np.eye(2)},
        {"hidden_layer_sizes": ()},
        {"linear_skip": False},
        {"scale": "network"},
        {"initial_scale": 1.5},
        {"whiten": None},
        {"whiten": ([1.0, 2.0], [[1.0, 0.0], [0.5, 2.0]])},
        {"learning_rate_decay": (0.9, 10)},
        {"learning_rate_decay": None},
        {"annealing": "linear"},
        {"annealing": Linear(start=0.5)},
        {"ema_decay": None},
        {"max_grad_norm": 1.0},
        {"tol": 0.1, "n_iter_no_change": 100},
        {"dtype": "float64"},
    ],
    ids=str,
)
def test_every_option_trains_and_samples(parameters):
    q = fit(**parameters)
    assert np.isfinite(q.sample(10)).all()
    assert np.isfinite(q.score_samples(np.zeros((1, 2)))).all()


def test_the_start_with_a_linear_skip_is_the_laplace_approximation():
    q = fit(shifted_score, max_iter=1, learning_rate=1e-12, whiten="laplace")
    X = q.sample(20_000, random_state=0)
    assert np.abs(X.mean(0) - 3).max() < 4 / math.sqrt(len(X))
    np.testing.assert_allclose(np.cov(X.T), np.eye(2), atol=4 * math.sqrt(2 / len(X)))


def test_annealing_multiplies_the_score():
    cold, plain = (fit(lambda x: -x / 4, annealing=lambda _: 4.0, whiten=None), fit(whiten=None))
    np.testing.assert_array_equal(cold.loss_curve_, plain.loss_curve_)


def test_linear_annealing_is_the_default_schedule_object():
    np.testing.assert_array_equal(fit(annealing="linear").loss_curve_, fit(annealing=Linear()).loss_curve_)


def test_vanilla_takes_two_batches():
    sizes = set()

    def score_fn(x):
        sizes.add(len(x))
        return -x

    fit(score_fn, gradient_estimator="vanilla", whiten=None)
    assert 32 in sizes
    sizes.clear()
    fit(score_fn, gradient_estimator="u-statistic", whiten=None)
    assert 16 in sizes
    assert 32 not in sizes


def test_warm_start_continues_and_a_cold_start_forgets():
    q = clone(QUICK).set_params(warm_start=True, max_iter=20, learning_rate_decay=None)
    first = q.fit(shifted_score, n_features=2).loss_curve_
    whitening = q.whitening_
    q.fit(shifted_score, n_features=2)
    assert q.n_iter_ == 40
    assert q.whitening_ is whitening
    assert q.best_iter_ in (0, 20, 40)
    np.testing.assert_array_equal(q.loss_curve_[:20], first)
    q.set_params(warm_start=False).fit(shifted_score, n_features=2)
    np.testing.assert_array_equal(q.loss_curve_, first)
    q.set_params(warm_start=True)
    with pytest.raises(ValueError, match="warm_start"):
        q.fit(shifted_score, n_features=3)


def test_early_stopping_stops_on_a_plateau_only():
    plateau = fit(max_iter=5000, tol=0.01, n_iter_no_change=200)
    assert plateau.n_iter_ < 5000
    assert len(plateau.ksd_curve_) == 1 + plateau.n_iter_ // 500
    patient = fit(max_iter=500, tol=0.01, n_iter_no_change=1000)
    assert patient.n_iter_ == 500


def test_whitening_makes_a_badly_scaled_target_easy():
    scale = torch.tensor([1e-3, 1e3])
    q = fit(lambda x: (1 - x / scale) / scale, dtype="float64")
    z = q.sample(5000, random_state=0) / scale.numpy() - 1
    assert np.abs(z.mean(0)).max() < 0.2
    assert np.abs(z.std(0) - 1).max() < 0.2


def test_score_samples_converges_to_the_log_density_of_a_one_dimensional_fit():
    q = KSIVIApproximator(max_iter=500, random_state=0).fit(normal_score, n_features=1)
    grid = np.linspace(-8, 8, 4001)[:, None]
    assert np.trapezoid(np.exp(q.score_samples(grid)), grid[:, 0]) == pytest.approx(1, abs=1e-6)
    heights, edges = np.histogram(q.sample(200_000, random_state=0), bins=40, range=(-3, 3), density=True)
    density = np.exp(q.score_samples((edges[1:] + edges[:-1])[:, None] / 2))
    assert np.abs(heights - density).max() < 4 * math.sqrt(density.max() / (200_000 * 0.15)) + 0.002


@pytest.mark.parametrize(
    ("target", "parameters", "bound"),
    [
        (Banana(), {"kernel": "gaussian", "initial_scale": 0.5}, 0.5),
        (Multimodal(), {"kernel": "imq", "annealing": "linear"}, 0.1),
        (XShaped(), {"kernel": "gaussian"}, 0.5),
    ],
    ids=["banana", "multimodal", "x-shaped"],
)
def test_toys_are_fitted_with_the_papers_settings_shortened(target, parameters, bound):
    """The start has a divergence above 1; 50 times fewer draws and iterations than the paper."""
    q = KSIVIApproximator(
        **{"initial_scale": 1.0, **parameters},
        latent_dim=3,
        hidden_layer_sizes=(50, 50),
        linear_skip=False,
        whiten=None,
        batch_size=100,
        max_iter=4000,
        learning_rate=2e-3,
        random_state=0,
    ).fit(target)
    truth = target.sample(20_000, torch.Generator().manual_seed(0))
    assert kl_divergence(q.sample(20_000), truth) < bound


MISTAKES = {
    "kernel": ({"kernel": "cauchy"}, "kernel"),
    "bandwidth": ({"bandwidth": 0}, "bandwidth"),
    "bandwidth of a kernel": ({"kernel": Gaussian(bandwidth=-1.0)}, "bandwidth"),
    "gradient_estimator": ({"gradient_estimator": "v"}, "gradient_estimator"),
    "batch_size": ({"batch_size": 1}, "batch_size"),
    "hidden_layer_sizes": ({"hidden_layer_sizes": (10, 0)}, "hidden_layer_sizes"),
    "betas": ({"betas": (0.9, 1.0)}, "betas"),
    "initial_scale": ({"initial_scale": 1e-4}, "initial_scale"),
    "learning_rate": ({"learning_rate": -1.0}, "learning_rate"),
    "learning_rate_decay": ({"learning_rate_decay": (2.0, 100)}, "learning_rate_decay"),
    "learning_rate_decay of words": ({"learning_rate_decay": ("a", "b")}, "learning_rate_decay"),
    "whiten not a pair": ({"whiten": (np.zeros(2),)}, "whiten"),
    "whiten shape": ({"whiten": (np.zeros(3), np.eye(3))}, "whiten"),
    "whiten singular": ({"whiten": (np.zeros(2), np.zeros((2, 2)))}, "whiten"),
    "max_iter": ({"max_iter": 0}, "max_iter"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_bad_parameter_gives_an_error_that_names_it(mistake):
    parameters, name = MISTAKES[mistake]
    with pytest.raises(ValueError, match=f"{name}|{name.split()[0]}"):
        fit(**parameters)


def test_a_score_that_becomes_nan_is_reported_with_its_iteration():
    def score_fn(x):
        return torch.where(x.abs() < 1e-3, -x, torch.nan * x)

    with pytest.raises(FloatingPointError, match="iteration 0"):
        fit(score_fn, whiten=None)


def test_a_score_that_is_nan_at_the_origin_names_the_remedy():
    with pytest.raises(ValueError, match="whiten"):
        fit(lambda x: torch.log(x))
