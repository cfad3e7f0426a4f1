"""The report on a fit: what each check sees, and that exact draws pass them all."""

import copy
import importlib
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from approximators import GaussianTarget, gaussian_score, global_state, good_fit, has_density
from plain_targets import student_log_prob

from skksivi import KSIVIApproximator, diagnose, refine
from skksivi.base import BaseApproximator
from skksivi.baselines import MALA, SVGD, FullRankVI, Laplace
from skksivi.coordinates._affine import Affine
from skksivi.coordinates._whitening import Whitening
from skksivi.diagnostics import Check
from skksivi.families._density import LogDensity
from skksivi.judge import Grade, Verdict
from skksivi.targets import Banana, EightGaussians, GaussianMixture, StudentT, Target, from_log_prob, from_score_fn
from skksivi.training._run import Fit

NAMES = [
    "KSD", "weights", "errors", "outliers", "tails", "shape", "modes", "loss plateau", "whitening", "Stein means",
    "Stein variances",
]  # fmt: skip


def seen(report):
    """What warns, or is to be looked at beside reliable weights."""
    return {check.name for check in report.checks if check.verdict in ("warn", "look")}


@pytest.fixture
def good():
    return good_fit("KSIVIApproximator")


@cache
def report_of(name):
    return diagnose(good_fit(name), GaussianTarget(), random_state=0)


@pytest.fixture
def report():
    return report_of("KSIVIApproximator")


class Exact(BaseApproximator):
    """The draws and the density of a target itself, moved and scaled."""

    def __init__(self, target, shift=0.0, scale=1.0, device="cpu", dtype="float64", random_state=0):
        self.target, self.shift, self.scale = target, shift, scale
        self.device, self.dtype, self.random_state = device, dtype, random_state

    def _fit(self, score_fn, run):
        return Fit(ExactSampler(self.target, self.shift, self.scale), {})


class ExactSampler(NamedTuple):
    target: Target
    shift: float
    scale: float

    in_parts = True

    @property
    def n_features(self):
        return self.target.n_features

    def attributes(self):
        return {}

    def sample(self, n, generator):
        return self.shift + self.scale * self.target.sample(n, generator).double()

    def log_density(self, x):
        value = self.target.log_prob((x - self.shift) / self.scale) - self.n_features * math.log(self.scale)
        return LogDensity(value, torch.zeros_like(value))


class Normal(Target):
    def __init__(self, d):
        self.n_features = d

    def log_prob(self, x):
        return -x.square().sum(-1) / 2 - self.n_features / 2 * math.log(2 * math.pi)

    def sample(self, n, generator):
        return torch.randn(n, self.n_features, generator=generator)


def in_units(unit):
    """Two independent Gaussians, one wider than the other by a factor of 30."""
    return GaussianMixture([[3.0 * unit, -200.0 * unit]], [np.diag([unit**2, (30 * unit) ** 2])])


# Every approximator, and what is right


@pytest.mark.parametrize("name", ["KSIVIApproximator", "MeanFieldVI", "SVGD"])
def test_every_approximator_has_a_report(name):
    fitted, report = good_fit(name), report_of(name)
    assert [check.name for check in report.checks] == NAMES
    for check in report.checks:
        assert check.verdict in ("ok", "warn", "look") or check.verdict.startswith("not available: ")
        assert np.isfinite(check.value) == bool(check.text) == (not check.verdict.startswith("not"))
        assert bool(check.remedy) == (check.verdict in ("warn", "look"))
    missing = {check.name for check in report.checks if not check.text}
    assert ("weights" in missing) == (not has_density(fitted))
    assert ("whitening" in missing) == (not hasattr(fitted, "whitening_"))
    assert ("loss plateau" in missing) >= (not hasattr(fitted, "loss_curve_"))
    n_warn = len(report.warnings)
    n_look = sum(check.verdict == "look" for check in report.checks)
    counts = f"{len(NAMES) - len(missing) - n_warn - n_look} ok, {len(missing)} not available, {n_warn} wrong"
    assert str(report).startswith(f"{name}, {len(report.X)} draws of 2 features: {counts}")
    assert not seen(report) & {"outliers", "modes"}
    assert report.ok == (n_warn == 0) == (name != "MeanFieldVI")
    for check in ("KSD", "Stein variances"):
        assert (check in seen(report)) == (name == "MeanFieldVI")


TARGETS = [StudentT(), pytest.param(EightGaussians(), marks=pytest.mark.slow), Normal(12)]


@pytest.mark.parametrize("target", TARGETS, ids=repr)
def test_exact_draws_pass_every_check(target):
    report = diagnose(Exact(target).fit(target), target, random_state=0)
    assert report.ok, report
    assert report["outliers"].value < 0.005
    assert report["weights"].value > 900  # half of the 2,000 draws are the fit's
    assert report["errors"].value < 0.05  # by quantiles and tails where there is no variance


def test_a_spike_without_mass_is_no_lost_mode(monkeypatch):
    """The mode of this funnel is where v = -40.5, thirteen standard deviations below its mean."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    study = importlib.import_module("diagnose")
    funnel = study.Funnel(10, 3.0)
    assert diagnose(study.Known(funnel, density=False).fit(funnel), funnel, random_state=0)["modes"].verdict != "warn"


# What each check sees


@pytest.mark.parametrize(("scale", "way"), [(0.7, "narrow"), (1.4, "wide")])
def test_a_wrong_width_is_seen_by_its_stein_variance(scale, way):
    report = diagnose(Exact(Normal(3), scale=scale).fit(Normal(3)), Normal(3), random_state=0)
    assert seen(report) >= {"KSD", "Stein variances"}
    assert f"too {way}" in report["Stein variances"].remedy
    values, errors = report.variances
    assert np.abs(values - scale**2).max() < 4 * errors.max()


@pytest.mark.parametrize(
    ("shift", "names"), [(0.3, {"KSD", "errors", "shape", "Stein means"}), (0.05, set())], ids=["large", "small"]
)
def test_a_shift_is_seen_that_is_more_than_what_is_allowed(shift, names):
    assert seen(diagnose(Exact(Normal(3), shift=shift).fit(Normal(3)), Normal(3), random_state=0)) == names


def test_unlike_scales_in_training_are_seen():
    unit = 1e-3
    q = Exact(in_units(unit)).fit(in_units(unit))
    map_ = Affine(torch.zeros(2).double(), torch.eye(2).double() * unit)
    q.whitening_ = Whitening(map_, modes=np.empty((0, 2)), weights=np.empty(0))
    report = diagnose(q, in_units(unit), random_state=0)
    assert seen(report) == {"whitening"}
    assert report["whitening"].value == pytest.approx(900, rel=0.2)
    q.whitening_.map = Affine(torch.zeros(2).double(), torch.diag(torch.tensor([1.0, 30.0], dtype=torch.float64)))
    assert diagnose(q, in_units(unit), random_state=0)["whitening"].value == pytest.approx(1, rel=0.2)


def test_chains_that_have_not_converged_are_seen(good):
    q = copy.copy(good)
    q.whitening_ = replace(good.whitening_, verdict=Verdict(Grade.ROUGH))
    check = diagnose(q, GaussianTarget(), n_samples=200, random_state=0)["whitening"]
    assert check.verdict == "look"
    assert "`budget` of whiten=Pilot" in check.remedy


def test_modes_are_looked_for_as_far_away_as_by_a_fit():
    """A lighter mode at 40 standard deviations."""
    means = torch.zeros(2, 10, dtype=torch.float64)
    means[1] = 40 / math.sqrt(10)
    target = GaussianMixture(means, weights=[0.6, 0.4])
    alone = from_score_fn(target.score_fn, n_features=10)
    report = diagnose(Laplace().fit(alone), alone, n_samples=500, random_state=0)
    assert report["modes"].verdict == "warn"
    np.testing.assert_allclose(report.lost, means[1:], atol=0.01)
    assert report["modes"].value == pytest.approx(0.4, abs=0.05)


@pytest.mark.slow
def test_wrong_weights_are_seen_and_corrected_as_the_remedy_says():
    weights = np.array([0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05])
    target = EightGaussians(shift=5.0, weights=weights)
    q = KSIVIApproximator(method="start", random_state=0).fit(EightGaussians(shift=5.0))
    check = diagnose(q, target, random_state=0)["modes"]
    assert check.verdict == "warn"
    assert "refine(est, target) corrects that" in check.remedy
    assert check.value == pytest.approx(np.abs(weights - 1 / 8).sum() / 2, abs=0.04)
    assert diagnose(refine(q, target, random_state=0), target, random_state=0)["modes"].verdict == "ok"


def test_lost_tails_are_seen_by_weighted_draws_and_by_chains():
    report = diagnose(FullRankVI(max_iter=300, random_state=0).fit(StudentT()), StudentT(), random_state=0)
    assert seen(report) - {"shape"} == {"errors", "tails"}


def beside(d, share, mean, sd):
    """A Gaussian N(0, I), and a share of the mass that is farther out or wider in some coordinates."""
    covariances = [np.eye(d), np.diag(np.broadcast_to(np.square(sd), d))]
    return GaussianMixture([[0.0] * d, mean], covariances, weights=[1 - share, share])


@pytest.mark.parametrize(
    ("target", "share"),
    [
        pytest.param(beside(3, 0.05, [0.0] * 3, [4.0]), 0.04, marks=pytest.mark.slow),
        (beside(5, 0.015, [0.0] * 4 + [-4.0], [1.0] * 4 + [1.5]), 0.012),
    ],
    ids=["light halo", "shoulder"],
)
def test_mass_that_lies_farther_out_than_the_draws_is_seen_and_mended(target, share):
    q = Exact(Normal(target.n_features)).fit(target)
    report = diagnose(q, target, random_state=0)
    assert "tails" in seen(report)
    assert report["tails"].value == pytest.approx(share, rel=0.4)
    assert {check.remedy.split(": ")[1] for check in report.warnings} == {"correct the fit by `skksivi.refine`."}
    assert diagnose(refine(q, target, random_state=0), target, random_state=0).ok


class Cut(Target):
    """Student's t of which the draws leave out what is farthest out."""

    def __init__(self, d, df, lost):
        self.n_features, self.df, self.lost = d, df, lost

    def log_prob(self, x):
        return student_log_prob(x, self.df)

    def sample(self, n, generator):
        x = torch.randn(2 * n, self.n_features, generator=generator).double()
        chi = torch.randn(2 * n, self.df, generator=generator).double().square().mean(1, keepdim=True)
        x = x / chi.sqrt()
        return x[x.norm(dim=1) < x.norm(dim=1).quantile(1 - self.lost)][:n]


def test_tails_that_are_cut_off_are_seen_by_chains():
    """5% of the mass is lost; neither the ratios nor the widths tell."""
    cut = Cut(5, 3, 0.05)
    check = diagnose(Exact(cut).fit(cut), cut, random_state=0)["tails"]
    assert check.verdict == "warn"
    assert "tails that the fit lacks" in check.remedy


def test_draws_beside_a_curved_ridge_are_outliers():
    q = Laplace(random_state=0).fit(Banana())
    report = diagnose(q, Banana(), random_state=0)
    assert "outliers" in seen(report)
    assert report["outliers"].value > 0.1


def test_a_score_that_is_not_finite_is_an_outlier(good):
    def score_fn(x):
        return torch.where(x[:, :1] > 4, torch.nan, gaussian_score(x))

    report = diagnose(good, score_fn, n_samples=500, random_state=0)
    outside = (report.X[:, 0] > 4).mean()
    assert outside > 0.01
    assert report["outliers"].value == pytest.approx(outside, abs=0.002)
    assert report.plot() is not None
    plt.close("all")


def test_the_wrong_sign_is_seen(good):
    with pytest.warns(UserWarning, match="wrong sign"):
        report = diagnose(good, lambda x: -gaussian_score(x), random_state=0)
    assert "wrong sign" in report["Stein variances"].remedy
    assert "wrong sign" in report["outliers"].verdict
    assert report["modes"].verdict.startswith("not available: ")


# The loss


@pytest.mark.parametrize(
    ("loss", "scale", "offset", "verdict"),
    [
        (lambda t: np.exp(-3 * t), 1e-4, -3.0, "look"),
        (lambda t: 1e6 * np.exp(-200 * t) - 5 * t, 1.0, 0.0, "look"),
        (lambda t: np.exp(-12 * t), 1e-4, -3.0, "ok"),
        (lambda t: 0 * t, 1.0, 0.0, "ok"),
        (lambda t: -np.exp(-3 * t), 1.0, 0.0, "ok"),
    ],
)
def test_a_loss_that_still_falls_is_seen_in_any_units(good, loss, scale, offset, verdict):
    q, t = copy.copy(good), np.linspace(0, 1, 2000)
    noise = 0.02 * np.random.RandomState(0).standard_t(3, 2000)
    q.loss_curve_ = scale * (loss(t) + noise) + offset
    check = diagnose(q, from_score_fn(gaussian_score, 2), n_samples=100, random_state=0)["loss plateau"]
    assert check.verdict == verdict
    assert ("raise `max_iter`" in check.remedy) == (verdict == "look")


# A report


def test_coordinates_have_the_names_of_the_target():
    named = from_log_prob(lambda x: -x.square().sum(-1) / 2, n_features=2, names=["alpha", "beta"])
    q = Laplace(random_state=0).fit(lambda x: -x / x.new_tensor([1.0, 0.7]) ** 2, n_features=2)
    report = diagnose(q, named, random_state=0)
    assert " of `beta` is " in report["errors"].text
    assert "most in `beta`" in report["Stein variances"].remedy


def test_neither_global_states_nor_the_stream_of_the_estimator_are_touched(good):
    before, seed, stream = global_state(), good._seed, str(good._random_state.get_state())
    diagnose(good, GaussianTarget(), n_samples=200)
    assert global_state() == before
    assert str(good._random_state.get_state()) == stream
    assert good._seed == seed
    assert good.family_.mean is not None
    assert {p.dtype for p in good.family_.parameters()} == {torch.float32}


def test_points_are_looked_at_once():
    svgd = SVGD(n_particles=60, max_iter=5, random_state=0).fit(GaussianTarget())
    report = diagnose(svgd, GaussianTarget(), random_state=0)
    assert len(np.unique(report.X, axis=0)) == len(report.X) == 60
    mala = MALA(n_chains=20, n_warmup=50, n_draws=10, random_state=0).fit(GaussianTarget())
    report = diagnose(mala, GaussianTarget(), random_state=0)
    assert len(report.X) == 200
    assert "see its `diagnose()`" in report["loss plateau"].verdict


def test_a_check_is_found_by_its_name(report):
    assert isinstance(report["KSD"], Check)
    with pytest.raises(KeyError, match="no check is named 'ksd'; there are KSD"):
        report["ksd"]


# The figure


@pytest.mark.parametrize("d", [1, 2])
def test_the_figure_has_four_panels(d, uncertified):
    q = KSIVIApproximator(max_iter=20, whiten="laplace", mixing="normal", random_state=0).fit(Normal(d))
    report = diagnose(q, Normal(d), n_samples=200, random_state=0)
    figure, axes = plt.subplots(1, 4)
    assert report.plot(axes) is figure
    with pytest.raises(ValueError, match="`axes` must be four, got 2"):
        report.plot(axes[:2])
    loss, variances, norms, draws = axes
    assert loss.get_xlabel() == "iteration"
    np.testing.assert_allclose(variances.lines[-1].get_ydata(), report.variances[0])
    assert norms.get_legend() is not None
    assert len(draws.collections[0].get_offsets()) == len(report.X)
    plt.close(figure)


def test_a_fit_without_loss_and_with_lost_modes_is_drawn():
    target = EightGaussians(shift=5.0)
    report = diagnose(Laplace(random_state=0).fit(target), target, random_state=0)
    figure = report.plot()
    assert figure.axes[0].get_title() == report.summary
    marks = {"ok": "✓", "warn": "✗"}
    expected = [f"{marks.get(check.verdict, '–')}  {check.name}" for check in report.checks]
    assert [text.get_text() for text in figure.axes[0].texts] == expected
    assert figure.axes[3].get_title() == "modes: warning"
    assert figure.axes[3].get_legend_handles_labels()[1] == ["mode without draws"]

    def compute_format_data():  # as IPython calls what shows the value of a cell
        figure._ipython_display_()

    compute_format_data()  # shows nothing: pyplot does at the end of the cell
    plt.close(figure)
    with pytest.raises(NotImplementedError):
        compute_format_data()


# Mistakes


def test_fewer_draws_than_a_report_needs_are_refused(good):
    with pytest.raises(ValueError, match="n_samples == 50"):
        diagnose(good, GaussianTarget(), n_samples=50)


@pytest.mark.parametrize(
    ("values", "message"),
    [([1.0], r"All draws of `est` are the same in `x\[1\]`"), ([-1.0, 0.0, 1.0], None)],
    ids=["constant", "ties"],
)
def test_draws_that_are_constant_are_refused_and_ties_are_not(monkeypatch, values, message):
    def sample(self, n, generator):
        return torch.stack([torch.randn(n, generator=generator), torch.tensor(values).repeat(n)[:n]], 1).double()

    monkeypatch.setattr(ExactSampler, "sample", sample)
    q = Exact(Normal(2)).fit(Normal(2))
    if message is None:
        found = diagnose(q, Normal(2), random_state=0).checks
        assert np.isfinite([check.value for check in found if check.text]).all()
    else:
        with pytest.raises(ValueError, match=message):
            diagnose(q, Normal(2), random_state=0)
