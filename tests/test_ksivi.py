"""KSIVIApproximator: its options mean what the paper means by them."""

import math

import numpy as np
import pytest
import torch
from approximators import start_of
from hypothesis import given
from hypothesis import strategies as st
from linear_family import layer
from members import every, refused
from plain_targets import UNEQUAL, GaussianScore, generator, normal, origin
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning

from skksivi import KSIVIApproximator
from skksivi.annealing import Linear
from skksivi.estimators._start import Start
from skksivi.estimators._trained import Comparison
from skksivi.families._layer import LinearSkip
from skksivi.judge import Grade, Verdict
from skksivi.kernels import IMQ, Gaussian
from skksivi.mixing import GaussianMixtureDraws, NormalDraws
from skksivi.parameters import Network, Pilot, Scale
from skksivi.pilot._mixture import fitted_mixture
from skksivi.pilot._points import PilotPoints
from skksivi.score._probe import in_double
from skksivi.stein._estimators import GRADIENT_ESTIMATORS
from skksivi.targets import Multimodal
from skksivi.terms import Entropic
from skksivi.training._guard import moments

AGREED, ROUGH = Verdict(Grade.GOOD), Verdict(Grade.ROUGH)

pytestmark = pytest.mark.filterwarnings("ignore:The draws are too:sklearn.exceptions.ConvergenceWarning")


QUICK = KSIVIApproximator(max_iter=30, batch_size=16, hidden_layer_sizes=(8,), random_state=0)


def fit(score_fn=torch.neg, n_features=2, **parameters):
    return clone(QUICK).set_params(**parameters).fit(score_fn, n_features=n_features)


@pytest.mark.parametrize("estimator", ["u-statistic", "vanilla"])
@pytest.mark.parametrize("schedule", [None, (0.625, 0.0), (0.625, 2.0)])
def test_a_step_takes_the_gradient_of_the_objective_in_the_parameters(estimator, schedule):
    """Of KSD^2 of p^c less a / n sum log p(x_i)."""
    c, a = schedule or (1.0, 0.0)
    q = clone(QUICK).set_params(gradient_estimator=estimator, kernel="imq", bandwidth="median")
    q.set_params(annealing=schedule and (lambda progress: c), terms=[Entropic(a)] if schedule else [])
    family = layer(NormalDraws(2), sizes=(5,), scale=Scale("network", floor=0.1), skip=torch.eye(2))
    for p in family.parameters():
        torch.nn.init.normal_(p, generator=generator(1))
        p.grad = torch.zeros_like(p)
    target = Multimodal().to(dtype=torch.float64)
    score = in_double(target.score_fn, 2)
    with torch.no_grad():
        objective = q._resolved()._objective(score, family, Start(None, family, None, 0, ""), generator(2))
        objective.advance(0.0)
        value = objective()

    n, estimate = q.batch_size * (1 if estimator == "u-statistic" else 2), GRADIENT_ESTIMATORS[estimator].estimate
    x, conditional_score = family.draw(n, generator(2))
    ksd = estimate(x, c * score(x) - conditional_score, IMQ())
    expected = ksd - a / n * target.log_prob(x).sum()
    torch.testing.assert_close(value, ksd.detach())
    for p, g in zip(family.parameters(), torch.autograd.grad(expected, list(family.parameters())), strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-8, atol=1e-10)


def start(pilot, **parameters):
    """The family and the penalty that a fit to N(0, I) would start from in its own coordinates."""
    return start_of(clone(QUICK).set_params(**parameters), pilot)


@every("n_of_mode", [[1000], [600, 400]])
def test_a_family_starts_as_the_mixture_fitted_to_a_dense_pilot(n_of_mode):
    x = torch.cat([normal(600, 2) * torch.tensor([1.0, 0.3]) - 3, 0.1 * normal(400, 2, seed=1)])
    pilot = PilotPoints(x, n_of_mode, torch.ones(2), AGREED)
    family, _ = start(pilot, initial_scale=0.5, scale=Scale(floor=1e-4))
    mixture = fitted_mixture(pilot.of_modes(), generator())
    L, sigma = family.mixing.factors, family.sigma(x[:1])
    assert isinstance(family.mean, LinearSkip)
    torch.testing.assert_close(family.mean(x), x)
    torch.testing.assert_close(sigma, 0.5 * mixture.common_variances().sqrt())
    of_family = family.mixing.weights, family.mixing.means, L @ L.mT + sigma.square().diag()
    torch.testing.assert_close(of_family, tuple(mixture))
    close, _ = start(PilotPoints(1e-6 * normal(400, 2), [400], torch.ones(2), AGREED))
    torch.testing.assert_close(close.sigma(origin(2)), torch.full((2,), 2e-3).double())  # the floor


def test_a_pilot_that_is_not_dense_gives_its_points_and_the_conditional_spread():
    x = 4 * normal(400, 2)  # where E s_i^2 = 16
    family, _ = start(PilotPoints(x, [400], torch.ones(2), AGREED, dense=False), initial_scale=0.5)
    z = family.draw_latent(50, generator())
    assert torch.cdist(z, x).amin(1).max() < 1e-6
    torch.testing.assert_close(family.mean(z), z)
    torch.testing.assert_close(family.sigma(z), torch.full((2,), 0.5 / 4).double(), rtol=0.2, atol=0)


@every("verdict, weight", [(AGREED, 0.0), (AGREED, 2.0), (ROUGH, 2.0)])
def test_moments_of_a_converged_pilot_hold_the_fit(verdict, weight):
    x = normal(400, 2)
    _, penalty = start(PilotPoints(x, [400], torch.ones(2), verdict), whiten__weight=weight)
    assert (penalty is not None) == (verdict is AGREED and weight > 0)
    if penalty is not None:
        assert penalty.weight == weight
        torch.testing.assert_close(list(penalty.target), list(moments(x)))


def test_without_a_pilot_coordinates_that_z_does_not_reach_start_at_one_if_whitened():
    for parameters, last in (({}, 1.0), ({"whiten": None}, 0.5), ({"hidden_layer_sizes__linear_skip": False}, 0.5)):
        family, penalty = start(None, latent_dim=1, initial_scale=0.5, **parameters)
        assert penalty is None
        torch.testing.assert_close(family.sigma(normal(1, 1)), torch.tensor([0.5, last]).double())


POINTS = [
    {"kernel": Gaussian(bandwidth=2.0), "init": [0.1, -0.1], "optimizer__decay": None},
    {"kernel": "riesz", "bandwidth": 0.7, "annealing": "linear", "optimizer__ema": None},
    {"kernel": "laplace", "bandwidth": "median", "scale": "network"},
    {"kernel": "imq", "gradient_estimator": "vanilla", "optimizer__decay": (0.9, 10), "dtype": "float64"},
    {"bandwidth": None, "mixing": "pilot", "whiten__weight": 0.0, "initial_scale": 1.5},
    {"whiten__budget": 0, "init": np.eye(2), "hidden_layer_sizes": (), "optimizer__max_norm": 1.0},
    {"annealing": Linear(start=0.5), "early_stopping": 0.1},
]
NO_POINTS = [
    {"mixing": "normal", "latent_dim": 1},
    {"latent_dim": 5, "whiten": ([0.1, 0.2], [[1.0, 0.0], [0.5, 2.0]])},
    {"hidden_layer_sizes": 5, "whiten": "bam", "initial_scale": 1.0},
    {"hidden_layer_sizes": Network(5, linear_skip=False)},
    {"whiten": None},
]


@every("parameters", POINTS + NO_POINTS)
def test_every_option_trains_and_samples_from_the_pilot_where_there_is_one(parameters, uncertified):
    q = fit(**parameters)
    has_points = any(parameters is p for p in POINTS)
    assert isinstance(q.family_.mixing, GaussianMixtureDraws if has_points else NormalDraws)
    assert np.isfinite(q.sample(10)).all()
    assert np.isfinite(q.score_samples(np.zeros((1, 2)))).all()


def test_warm_start_continues_and_a_cold_start_forgets(uncertified):
    q, score_fn = clone(QUICK).set_params(warm_start=True, max_iter=20, optimizer__decay=None), lambda x: 3 - x
    first, whitening = q.fit(score_fn, n_features=2).loss_curve_, q.whitening_
    q.fit(score_fn, n_features=2)
    assert q.n_iter_ == 40
    assert q.whitening_ is whitening
    assert q.best_iter_ in (0, 20, 40)
    np.testing.assert_array_equal(q.loss_curve_[:20], first)
    np.testing.assert_array_equal(q.set_params(warm_start=False).fit(score_fn, n_features=2).loss_curve_, first)
    refused(ValueError, "warm_start", lambda: q.set_params(warm_start=True).fit(score_fn, n_features=3))


@pytest.mark.filterwarnings("ignore:The training did not improve")
def test_early_stopping_stops_on_a_plateau_only(monkeypatch, uncertified):
    monkeypatch.setattr("skksivi.training._guard.PATIENCE", 200)
    plateau = fit(max_iter=5000, early_stopping=True)
    assert plateau.n_iter_ < 5000
    assert len(plateau.ksd_curve_) == 1 + plateau.n_iter_ // 500
    monkeypatch.setattr("skksivi.training._guard.PATIENCE", 2000)
    assert fit(max_iter=500, early_stopping=True).n_iter_ == 500


# The default: a pilot, then a fit that starts at its points


def test_init_restricts_the_fit_to_the_modes_named(uncertified):
    q = fit(UNEQUAL.score_fn, init=UNEQUAL.means[1])
    assert len(q.whitening_.modes) == 1
    np.testing.assert_allclose(q.sample(2000, random_state=0).mean(0), UNEQUAL.means[1], atol=0.8)


def test_a_warm_start_goes_on_where_the_mean_was_corrected(monkeypatch, uncertified):
    q = clone(QUICK).set_params(method="path", whiten=(np.zeros(2), np.eye(2)), warm_start=True)
    whitening = q.set_params(max_iter=1).fit(lambda x: 10 - x, n_features=2).whitening_
    assert (whitening.m != 0).all()
    monkeypatch.setattr(Comparison, "accepts", lambda *_: pytest.fail("the target is taken for another"))
    assert q.set_params(learning_rate=1e-12).fit(lambda x: 10 - x, n_features=2).whitening_ is whitening


@pytest.mark.slow
def test_means_are_corrected_only_where_draws_are_many(uncertified):
    """Of 300 features 2,000 draws tell little: control variates would move a mean that is right."""
    q = fit(lambda x: 10 - x, 300, method="path", whiten=(np.zeros(300), np.eye(300)), max_iter=1)
    assert (q.whitening_.m == 0).all()


def test_a_refused_warm_start_leaves_the_fit_as_it_was(uncertified):
    q = fit(dtype="float64", whiten=None)
    X = q.sample(20, random_state=0)
    q.set_params(dtype="float32", warm_start=True, method="path", kernel="riesz")
    refused(ValueError, "`method` is 'path'", lambda: q.fit(torch.neg, n_features=2))
    q.set_params(dtype="float64")
    np.testing.assert_array_equal(q.sample(20, random_state=0), X)
    assert next(q.family_.parameters()).dtype == torch.float64


MISTAKES = {
    "kernel": "cauchy", "bandwidth": 0, "gradient_estimator": "v", "batch_size": 1, "hidden_layer_sizes": (10, 0),
    "initial_scale": 1e-4, "learning_rate": -1.0, "optimizer__decay": ("a", "b"), "max_iter": 0,
    "whiten": (np.zeros(2), np.zeros((2, 2))),
}  # fmt: skip
#: The pilot cannot be the mixing where there is none.
POINTLESS = {"whiten": None}, {"whiten": "laplace"}, {"latent_dim": 2}, {"hidden_layer_sizes__linear_skip": False}
MISTAKES = [
    *((name.split("__")[-1], {name: wrong}) for name, wrong in MISTAKES.items()),
    *(("annealing", {"annealing": wrong}) for wrong in (Linear, lambda progress: None)),
    ("mixing", {"mixing": "flow"}),
    *((r"`mixing` is 'pilot', which needs .*mixing='normal'", {"mixing": "pilot"} | more) for more in POINTLESS),
]


@every("words, parameters", MISTAKES)
def test_a_bad_parameter_gives_an_error_that_names_it(words, parameters):
    refused(ValueError, words, lambda: fit(**parameters))


@pytest.mark.filterwarnings("ignore:The target seems bounded")
def test_a_score_that_becomes_nan_is_reported_with_its_iteration():
    with pytest.raises(FloatingPointError, match=r"iteration 0: .* not finite at \d+ of 4000 fresh draws, rows \[0"):
        fit(lambda x: torch.where(x.abs() < 0.05, -x, torch.nan * x), whiten=None)


@every("scale, way", [(1e-3, "wide"), (1e3, "narrow")])
def test_draws_far_too_wide_or_narrow_are_told(scale, way):
    with pytest.warns(ConvergenceWarning, match=rf"too {way} in `x\[1\]`.*1 of 2 coordinates"):
        fit(lambda x: -x / torch.tensor([1.0, scale]) ** 2, whiten=None)


@every("shift, whiten", [(0.3, "laplace"), (2.0, Pilot(budget=0))])
def test_a_warm_start_follows_a_target_that_has_moved(shift, whiten):
    """Standard errors of means of 20,000 draws are 0.007; a pilot of 128 chains adds 0.015 and 1%."""
    q = KSIVIApproximator(whiten=whiten, max_iter=30, warm_start=True, random_state=0)
    q.fit(torch.neg, n_features=2)
    q.fit(lambda x: (shift - x) / 1.25**2, n_features=2)
    X = q.sample(20_000)
    np.testing.assert_allclose([X.mean(0) - shift, X.std(0) - 1.25], 0, atol=0.1)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@given(d=st.integers(1, 10), rate=st.floats(-3, 0), batch_size=st.integers(4, 32), seed=st.integers(0, 10**6))
def test_no_training_is_worse_than_its_exact_start(d, rate, batch_size, seed):
    """Or not by more than the quarter of a standard deviation that noise of short trainings may hide."""
    p = GaussianScore(d, seed % 7, 1.0, seed)
    L = torch.linalg.cholesky(p.V * p.lam @ p.V.mT)
    q = KSIVIApproximator(whiten=(p.mean.numpy(), L.numpy()), max_iter=40, hidden_layer_sizes=(8,))
    q.set_params(batch_size=batch_size, learning_rate=10**rate, random_state=seed).fit(p.score_fn, n_features=d)
    z = p.standardise(torch.as_tensor(q.sample(4000, random_state=0)).double().mT - p.mean[:, None])
    assert z.mean(1).abs().max() < 0.35 + 5 / math.sqrt(4000)
    assert (z.std(1) - 1).abs().max() < 0.35 + 5 / math.sqrt(2 * 4000)


def test_a_warm_start_that_is_spoilt_keeps_the_fit_it_went_on_from():
    q = fit(lambda x: 1 - x, whiten=(np.ones(2), np.eye(2)), max_iter=60, batch_size=8, learning_rate=1e-12)
    before = q.sample(4000, random_state=0)
    with pytest.warns(ConvergenceWarning, match="did not improve on its start"):
        q.set_params(warm_start=True, learning_rate=5.0).fit(lambda x: 1 - x, n_features=2)
    assert (q.best_iter_, q.n_iter_) == (60, 120)
    np.testing.assert_allclose(q.sample(4000, random_state=0), before, atol=1e-5)
