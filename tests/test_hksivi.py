"""HKSIVIApproximator: the hierarchy is that of the paper, its gradients are exact, and it keeps far modes."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from approximators import start_of
from members import every, refused
from plain_targets import as_score, generator, normal
from sklearn.base import clone

from skksivi import HKSIVIApproximator, mixing
from skksivi.annealing import BRIDGES, Linear, bridge_levels
from skksivi.estimators._start import Start
from skksivi.families._layer import Hierarchy, MultilayerPerceptron
from skksivi.judge import Grade, Verdict
from skksivi.kernels import Gaussian
from skksivi.mixing import Bootstrap, GaussianMixtureDraws, StudentTDraws
from skksivi.parameters import Pilot
from skksivi.pilot._points import PilotPoints
from skksivi.score._probe import in_double
from skksivi.stein._estimators import GRADIENT_ESTIMATORS
from skksivi.targets import EightGaussians, XShaped

pytestmark = pytest.mark.usefixtures("uncertified")


AGREED, ROUGH = Verdict(Grade.GOOD), Verdict(Grade.ROUGH)

QUICK = HKSIVIApproximator(n_layers=2, max_iter=30, batch_size=32, hidden_layer_sizes=(8,), random_state=0)
QUICK.set_params(whiten=Pilot(budget=20_000))


def fit(score_fn=torch.neg, n_features=2, **parameters):
    return clone(QUICK).set_params(**parameters).fit(score_fn, n_features=n_features)


def cut(drift, sigma):
    """Steps of the Langevin chain no longer than 5 sqrt(d) in units of sigma."""
    length = (drift / sigma).norm(dim=1, keepdim=True)
    return drift * (5 * drift.shape[1] ** 0.5 / length).clamp_max(1)


def hierarchy(*, levels=(1.0, 0.6, 0.3), d=2):
    noise = generator(0)
    networks = [MultilayerPerceptron([d, 7, d], noise, torch.float64) for _ in levels]
    sigma = torch.linspace(0.7, 0.5, d, dtype=torch.float64)
    return Hierarchy(networks, mixing=StudentTDraws(d, 3.0), levels=levels, initial_scale=sigma, min_scale=1e-2)


def by_the_formulas(family, n, generator, score_fn):
    """Draws and f of every layer, written out from the paper with a graph."""
    x, xs, fs = family.mixing(n, family.half_square, generator), [], []
    for t in reversed(range(family.n_layers)):
        level, before = family.levels[t], x.detach()

        def s_t(x, level=level):
            return (1 - level) * family.mixing.score(x) + level * score_fn(x)

        sigma_ini = (2 * family.half_square).sqrt()
        mu = before + family.networks[t](before) + cut(family.half_square * s_t(before), sigma_ini)
        xi = torch.empty_like(mu).normal_(generator=generator)
        x = mu + family.sigma(t) * xi
        xs.insert(0, x)
        fs.insert(0, s_t(x) + xi / family.sigma(t))
    return torch.stack(xs), torch.stack(fs)


def test_draws_and_gradients_are_those_of_the_formulas():
    family = hierarchy()
    score_fn = lambda x: 9 * XShaped().score_fn(x)  # noqa: E731  # some of whose steps are cut
    for p in family.parameters():
        p.grad = torch.zeros_like(p)
    with torch.no_grad():
        (x, s_t, c), pullback = family.draw_with_pullback(5, generator(1), as_score(score_fn))
        a, b = torch.randn(2, *x.shape, generator=generator(2), dtype=x.dtype)
        pullback(a.clone(), b.clone(), -b)
    xs, fs = by_the_formulas(family, 5, generator(1), score_fn)
    torch.testing.assert_close(x, xs)
    torch.testing.assert_close(s_t - c, fs)
    parameters = [*family.parameters()]
    expected = torch.autograd.grad((a * xs).sum() + (b * fs).sum(), parameters)
    torch.testing.assert_close([p.grad for p in parameters], [*expected], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("estimator", ["u-statistic", "vanilla"])
def test_a_step_takes_the_gradient_of_the_weighted_discrepancies(estimator):
    weights = [1.0, 0.5, 0.2]
    q = clone(QUICK).set_params(n_layers=3, bridge__weights=weights, bandwidth="median", gradient_estimator=estimator)
    family, score = hierarchy(), in_double(XShaped().to(dtype=torch.float64).score_fn, 2)
    for p in family.parameters():
        p.grad = torch.zeros_like(p)
    with torch.no_grad():
        value = q._resolved()._objective(score, family, Start(None, family, None, 0, ""), generator(1))()
    estimate, n_batches = GRADIENT_ESTIMATORS[estimator]
    xs, fs = by_the_formulas(family, n_batches * q.batch_size, generator(1), score)
    expected = sum(beta * estimate(x, f, Gaussian()) for beta, x, f in zip(weights, xs, fs, strict=True))
    torch.testing.assert_close(value, expected.detach())
    for p, g in zip(family.parameters(), torch.autograd.grad(expected, list(family.parameters())), strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-8, atol=1e-10)


def test_every_layer_starts_at_the_initial_scale_and_stays_above_its_floor():
    sigma = torch.tensor([0.4, 0.9]).double()
    family = Hierarchy([], mixing=StudentTDraws(2, 3.0), levels=[1.0, 0.5], initial_scale=sigma, min_scale=0.3)
    for t in range(2):
        torch.testing.assert_close(family.sigma(t), sigma)
        family.log_variances[t].value.data.fill_(-100.0)
        torch.testing.assert_close(family.sigma(t), torch.full_like(sigma, 0.3))


OPTIONS = [
    {"n_layers": 1, "mixing": "pilot"},
    {"n_layers": 4, "gradient_estimator": "vanilla"},
    *({"bridge": name} for name in BRIDGES),
    {"bridge": lambda u: 1 - u**2, "mixing": mixing.StudentT(df=3.0)},
    {"bridge__weights": [1.0, 0.1], "mixing": "normal"},
    {"mixing": mixing.GaussianMixture([[-1.0, 0.0], [1.0, 0.0]]), "whiten__weight": 0.5},
    {"mixing": lambda n, generator: torch.randn(n, 2, generator=generator)},
]


@every("parameters", OPTIONS)
def test_every_option_trains_and_samples(parameters):
    q = fit(**parameters)
    X = q.sample(500, random_state=0)
    assert np.abs(X.mean(0)).max() < 0.5
    assert (np.abs(np.log(X.std(0))) < 0.5).all()
    assert callable(parameters.get("mixing")) or np.isfinite(q.score_samples(X[:2])).all()
    assert len(q.loss_curve_) == q.n_iter_ == 30


def test_layers_are_sampled_by_their_index_and_a_warm_start_goes_on():
    q = fit(whiten=None, mixing="normal")
    X = q.sample(3, random_state=1)
    assert q.sample(3, layer=2).shape == (3, 2)
    assert [np.array_equal(X, q.sample(3, random_state=1, layer=k)) for k in (0, 1)] == [True, False]
    for wrong in (-1, 3, 0.5, True):
        with pytest.raises((TypeError, ValueError), match="layer"):
            q.sample(3, layer=wrong)
    assert q.set_params(warm_start=True).fit(torch.neg, n_features=2).n_iter_ == 60
    assert q.set_params(n_layers=4).fit(torch.neg, n_features=2).family_.n_layers == 2  # the family is the old one


STARTS = [(AGREED, 2.0, "auto"), (AGREED, 2.0, "linear"), (AGREED, 0.0, "auto"), (ROUGH, 2.0, "auto")]


@every("verdict, weight, bridge", STARTS)
def test_moments_of_a_converged_pilot_hold_the_layers_if_all_are_at_the_target(verdict, weight, bridge):
    """And the base is a mixture where the pilot is dense, and its points elsewhere."""
    q = clone(QUICK).set_params(whiten__weight=weight, bridge=bridge)
    for dense, base in ((True, GaussianMixtureDraws), (False, Bootstrap)):
        pilot = PilotPoints(normal(400, 2), [400], torch.ones(2), verdict, dense=dense)
        family, penalty = start_of(q, pilot)
        assert isinstance(family.mixing, base)
        assert (penalty is not None) == (verdict is AGREED and weight > 0 and bridge == "auto")
        if penalty is not None:
            assert penalty.weight == weight
            assert {a.shape[0] for a in penalty.target} == {2}


TWO = partial(mixing.GaussianMixture, [[0.0, 1.0]])
MISTAKES = [
    ("n_layers", {"n_layers": 0}),
    *(("bridge", {"bridge": wrong}) for wrong in ("cubic", lambda u: u)),
    *(("weights", {"bridge__weights": wrong}) for wrong in ([1.0], [1.0, -1.0], [1.0, float("inf")], [0.0, 0.0])),
    *(("mixing", {"mixing": wrong}) for wrong in ("cauchy", mixing.StudentT, lambda n, generator: torch.zeros(n, 3))),
    ("mixing", {"mixing": "pilot"}),
    ("df", {"mixing": mixing.StudentT(df=-1.0)}),
    ("means", {"mixing": mixing.GaussianMixture([[0.0]])}),
    *(("scales", {"mixing": TWO(scales=wrong)}) for wrong in (0.0, [1.0, 2.0])),
    ("weights", {"mixing": TWO(weights=[-1.0])}),
]


@every("name, parameters", MISTAKES)
def test_a_bad_parameter_gives_an_error_that_names_it(name, parameters):
    refused((TypeError, ValueError), f"`{name}`|'{name}'", lambda: fit(whiten=None, **parameters))


@every("name", BRIDGES)
def test_bridges_fall_from_the_target_to_the_base(name):
    levels = bridge_levels(name, 5)
    assert (levels[0], levels) == (1, sorted(levels, reverse=True))
    assert min(levels) > 0


def test_the_default_is_the_papers_schedule_over_50000_iterations():
    for t in (0, 1, 10_000, 22_500, 30_000, 50_000):
        assert Linear()(t / 50_000) == pytest.approx(min(1, 0.1 + t / 25_000), rel=1e-12)
    refused(ValueError, "`start` and `until`", lambda: Linear(start=0.0)(0.5))


@pytest.mark.slow
def test_unequal_modes_of_a_ring_are_kept():
    weights = np.array([0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05])
    target = EightGaussians(shift=10.0, weights=weights)
    X = HKSIVIApproximator(n_layers=3, max_iter=500, batch_size=128, random_state=0).fit(target).sample(20_000)
    nearest = ((X[:, None] - target.means.numpy()) ** 2).sum(-1).argmin(1)
    assert np.abs(np.bincount(nearest, minlength=8) / len(X) / weights - 1).max() < 0.15
    assert max(np.abs(X[nearest == k].std(0) - 1).max() for k in range(8)) < 0.2


def test_rows_that_a_score_spoils_are_drawn_again():
    """The score is NaN at random, as it may be at rare points; the draws are those of the other points."""
    q, rng = fit(), generator(0)
    for share in (0.001, 0.4):
        score_fn = lambda x, share=share: -x.where(torch.rand(len(x), 1, generator=rng) > share, torch.nan)  # noqa: E731
        x = replace(q.sampler_, score=as_score(score_fn, d=2)).sample(4000, generator())
        assert x.isfinite().all()
        np.testing.assert_allclose(x.std(0), q.sample(4000).std(0), rtol=0.15)
    with pytest.raises(FloatingPointError, match="`score_fn` is not finite"):
        replace(q.sampler_, score=as_score(lambda x: x * torch.nan, d=2)).sample(10, generator())
