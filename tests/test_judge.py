"""The judge: numbers by weighted rows, the mixture that draws them, verdicts, and a fit that is fitted again."""

import inspect
import math
import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from plain_targets import as_score
from sklearn.exceptions import ConvergenceWarning

from skksivi import KSIVIApproximator
from skksivi.coordinates._affine import Affine
from skksivi.coordinates._lines import in_panels
from skksivi.estimators import _judge
from skksivi.families._derived import SCALES, STRETCHES, DefensiveMixture
from skksivi.families._samplers import Gaussian
from skksivi.families._weights import Source
from skksivi.judge import THRESHOLDS, Errors, Grade, Numbers, Verdict, WeightedDraws
from skksivi.start import _errors
from skksivi.start._errors import of_weights
from skksivi.targets import from_log_prob, from_score_fn

LEVELS = np.array([0.05, 0.5, 0.95])


def gaussian(mean, root):
    return Gaussian(Affine(torch.as_tensor(mean).double(), torch.as_tensor(root).double()))


def with_weights(w, v):
    """Weighted draws of which nothing but the weights is known."""
    nothing = np.empty(0)
    return WeightedDraws(*[nothing] * 6, w, v, k=0.0, log_z=0.0, log_z_se=0.0, draws=nothing, seed=0, n_calls=0)


def rng_of(seed=0):
    return torch.Generator().manual_seed(seed)


# Errors


def test_a_tail_that_only_the_draws_have_is_an_error_and_one_that_both_have_is_none():
    """Log-normal numbers, of which a fit has .05% at exp(6); and Student's t with three degrees, with no known sd."""
    rng = np.random.default_rng(0)
    f, g = (np.exp(0.3 * rng.standard_normal((n, 1))) for n in (1000, 20_000))
    far, w = np.arange(1000) < 10, np.full(1000, 1e-3)
    f[far], g[:10] = math.exp(6), math.exp(6)
    rows = with_weights(np.where(far, 0.0, 1 / 990), np.where(far, 0.0005 / 10, 0.9995 / 990))
    assert _errors._errors(rows, f, g).sd > math.log(1.5)
    f, g = (rng.standard_t(3, (n, 1)) for n in (1000, 20_000))
    assert _errors._errors(with_weights(w, w), f, 1.3 * g).sd == 0


# The proposal


@pytest.mark.parametrize("d", [1, 5])
def test_the_defensive_mixture_is_the_mean_of_its_gaussians(d):
    root = torch.randn(d, d, generator=rng_of(d), dtype=torch.float64).tril(-1) + torch.eye(d)
    q, x = gaussian(torch.ones(d), root), 3 * torch.randn(50, d, generator=rng_of(1), dtype=torch.float64)
    C, eye = root @ root.mT, torch.eye(d).double()

    def log_normal(covariance):
        law = torch.distributions.MultivariateNormal(torch.ones(d).double(), covariance, validate_args=False)
        return law.log_prob(x)

    scaled = [log_normal(s**2 * C) - math.log(2 * len(SCALES)) for s in SCALES]
    v = [C @ eye[j] / C[j, j].sqrt() for j in range(d)]
    stretched = [
        log_normal(C + (t**2 - 1) * v[j].outer(v[j])) - math.log(2 * d * len(STRETCHES))
        for t in STRETCHES
        for j in range(d)
    ]
    wide = torch.stack(scaled + stretched).logsumexp(0)
    expected = torch.logaddexp(q.log_density(x).value + math.log(0.3), wide + math.log(0.7))
    torch.testing.assert_close(DefensiveMixture(q, q.map, share=0.3).log_density(x).value, expected)


def test_ratios_to_the_defensive_mixture_have_mean_one():
    q = gaussian([1.0, -2.0], [[2.0, 0], [1, 0.5]])
    mixture = DefensiveMixture.of(q, rng_of())
    x = mixture.sample(100_000, rng_of(1))
    ratios = (q.log_density(x).value - mixture.log_density(x).value).exp()
    assert ratios.max() <= 2 + 1e-9
    assert abs(ratios.mean() - 1) < 5 * ratios.std() / len(x) ** 0.5  # one in two million by chance


# Numbers by weights


def test_numbers_of_equal_weights_are_those_of_the_fit():
    g = np.random.RandomState(0).normal(size=(20_000, 2))
    w = np.full(500, 1 / 500)
    found, own = with_weights(w, w).numbers(g[:500], g, LEVELS), Numbers.of_draws(g, LEVELS)
    for a, b in ((found.mean, own.mean), (found.sd, own.sd), (found.quantiles, own.quantiles)):
        np.testing.assert_allclose(a, b, atol=5e-3)
    np.testing.assert_allclose(found.mean_se, own.mean_se, rtol=1e-6)
    differences = with_weights(w, w).numbers(g[:500], g, LEVELS, less=1.0)  # of which no noise is left
    np.testing.assert_allclose(np.concatenate([differences.mean_se, differences.sd_se]), 0, atol=1e-12)


def test_the_worst_error_is_the_one_farthest_beyond_its_limit():
    zero = np.zeros(3)
    errors = Errors(np.array([0, 0.3, -0.5]), np.array([0, 0.01, 0.2]), zero, zero, *np.zeros((2, 2, 3)))
    worst = errors.worst(2.0)
    assert (worst.kind, worst.column) == ("mean", 1)
    assert worst.excess == pytest.approx(0.28 / THRESHOLDS.mean)
    assert Verdict(Grade.WRONG) < Verdict(Grade.ROUGH) < Verdict(Grade.GOOD)


def test_good_is_a_bound():
    """On the error and two standard errors of every number that was assessed; none of these is no error."""
    zero, unknown = np.zeros(2), np.full((2, 2), math.nan)
    for mean, se, grade in ((0.1, 0.04, Grade.GOOD), (0.1, 0.06, Grade.ROUGH), (0.3, 0.05, Grade.WRONG)):
        errors = Errors(np.array([0, mean]), np.array([0, se]), zero, zero, unknown, unknown)
        verdict = Verdict.of(errors, "xy".__getitem__, "chains")
        assert verdict.grade == grade
        assert verdict.within == pytest.approx(mean + 2 * se)
        assert "mean of y" in verdict.reason
    assert str(Verdict.of(errors._replace(mean=zero), "xy".__getitem__, "")) == (
        "good: every number is within 0.1 sd (the mean of y)"
    )
    assert math.isnan(Verdict(Grade.ROUGH).within)
    far = Verdict.of(errors._replace(mean=np.array([0, 1e20])), "xy".__getitem__, "")
    assert far.reason == "the mean of y is far off the posterior's"


def broken(*_args, **_parameters):
    raise KeyError("a bug")


def test_what_fails_in_the_judge_is_no_verdict(monkeypatch):
    """Each function of it that is reached; what the target itself raises is the target's."""
    score = as_score(lambda x: -x, d=2, log_prob=lambda x: -x.square().sum(1) / 2)
    sampler = KSIVIApproximator(random_state=0).fit(from_log_prob(lambda x: -x.square().sum(1) / 2, 2)).sampler_
    parts = {f.__module__ for f in (_judge.weighted_draws, _errors.with_parameters, _errors.suspect_directions)}
    parts |= {_judge.__name__, _errors.__name__}
    names = [
        (module, name)
        for module in (_judge, _errors)
        for name, f in vars(module).items()
        if inspect.isfunction(f) and f.__module__ in parts and name not in ("judge", "judged")
    ]
    reached = 0
    for module, name in names:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, broken)
            verdict = _judge.judge(sampler, score, 0).verdict
        assert verdict.grade in (Grade.GOOD, Grade.UNKNOWN)
        if verdict.grade == Grade.UNKNOWN:
            reached += 1
            assert verdict.reason == "it could not be judged: KeyError: 'a bug'"
    assert reached >= 8
    monkeypatch.setattr(WeightedDraws, "numbers", broken)  # of the start as well
    with pytest.warns(ConvergenceWarning, match="could not be judged: KeyError"):
        fit = KSIVIApproximator(max_iter=50, random_state=0).fit(from_log_prob(lambda x: -x.square().sum(1) / 2, 2))
    assert fit.verdict_.grade == Grade.UNKNOWN


@pytest.mark.parametrize(
    ("shift", "scale", "grade", "words"),
    [
        (0, 1, Grade.GOOD, ""),
        (0.5, 1, Grade.WRONG, r"mean of `x\[0\]`"),
        (0, 0.7, Grade.WRONG, r"(deviation|quantile) of `x\[0\]`"),
        (4, 1, Grade.ROUGH, r"weighted draws is .*; as far as these tell, .*standard error .* of `x\[0\]`"),
    ],
)
def test_a_fit_is_wrong_where_a_number_is(shift, scale, grade, words):
    q = gaussian([shift, 0], [[scale, 0], [0, 1]])
    score = as_score(lambda x: -x, d=2, log_prob=lambda x: -x.square().sum(1) / 2)
    verdict = of_weights(Source(q, score, 0, is_exact=True).draw(1000), score)
    assert verdict.grade == grade
    assert re.search(words, verdict.reason)


@pytest.mark.parametrize(("shift", "d", "grade"), [(0, 40, Grade.GOOD), (0.5, 40, Grade.WRONG), (0, 4, Grade.WRONG)])
def test_chains_that_know_many_numbers_decide_where_weights_accuse(monkeypatch, shift, d, grade):
    target = from_log_prob(lambda x: -x.square().sum(1) / 2, d)
    sampler = KSIVIApproximator(random_state=0).fit(target).sampler_
    known = replace(sampler.whitening, mean=np.full(d, shift), sd=np.ones(d), mean_se=np.full(d, 0.01))
    accused = Verdict(Grade.WRONG, "by weights")
    monkeypatch.setattr(_judge, "of_weights", lambda *_: accused)
    score = as_score(lambda x: -x, d=d, log_prob=lambda x: -x.square().sum(1) / 2)
    verdict = _judge.judge(replace(sampler, whitening=known), score, 0).verdict
    assert verdict.grade == grade
    assert (verdict.reason == "by weights") == (d == 4)


# Lines that lead far out


def test_panels_do_not_pass_over_a_narrow_core():
    """Along a line that leaves a core of sd .01 for a halo of sd 1 at once, log p falls by a few nats."""

    def log_prob(x):
        r = x.square().sum(1)
        return torch.stack([-r / 2e-4 - math.log(0.01), -r / 2]).logsumexp(0)

    score = as_score(lambda x: torch.func.grad(lambda x: log_prob(x).sum())(x), d=1)
    b = torch.tensor([[0.5], [1.0], [2.0]]).double()
    exact = log_prob(b) - log_prob(torch.zeros(1, 1).double())
    whole, gap = in_panels(score, torch.zeros(1).double(), b, b[:, 0] / 0.04)
    assert ((whole - exact).abs() < 0.5 + gap).all()
    assert (gap > 0.05).all()


# Fits


def mixture(weights, sds, d):
    """The mixture of Gaussians around zero."""

    def log_prob(x):
        r = x.square().sum(1)
        parts = [math.log(w) - r / (2 * s**2) - d * math.log(s) for w, s in zip(weights, sds, strict=True)]
        return torch.stack(parts).logsumexp(0)

    return from_log_prob(log_prob, d)


@pytest.mark.slow
def test_a_shoulder_is_found_and_fitted():
    """1.5% of the mass lies around -4 sd of a coordinate that bends with another."""

    def log_prob(x):
        z = x[:, 4] - 0.3 * (x[:, 0].square() - 1)
        parts = -z.square() / 2 + math.log(0.985), -((z + 4) / 1.5).square() / 2 + math.log(0.015 / 1.5)
        return torch.stack(parts).logsumexp(0) - x[:, :4].square().sum(1) / 2

    q = KSIVIApproximator(method="start", random_state=2).fit(from_log_prob(log_prob, 5))
    assert q.verdict_.good
    low, high = np.quantile(q.sample(50_000)[:, 4], [0.001, 0.999])
    assert high - low == pytest.approx(10.12, rel=0.2)


@pytest.mark.parametrize("raises", [False, True])
def test_lines_are_not_refined_where_the_score_ends(raises):
    """Where its score is NaN, or it raises, a target known by its score alone has no mass to be integrated."""

    def score_fn(x):
        outside = (x.abs() > 8).any(1, keepdim=True)
        if raises and outside.any():
            raise ValueError
        return -x.where(~outside, torch.nan)

    target = from_score_fn(score_fn, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The score or log p raised", UserWarning)
        q = KSIVIApproximator(random_state=0).fit(target)
    assert q.verdict_.grade == Grade.GOOD
    assert q.n_score_calls_ < 12_000  # where they are, 39,000 more, or 530,000 where it raises


def test_a_halo_is_found_and_fitted():
    d, sds, share = 5, (0.02, 1.0), 0.3
    q = KSIVIApproximator(method="start", random_state=0).fit(mixture((1 - share, share), sds, d))
    outside = np.square(q.sample(20_000)).sum(1) > (6 * sds[0]) ** 2 * d
    assert abs(outside.mean() - share) < (0.05 if q.verdict_.good else 0.15)
