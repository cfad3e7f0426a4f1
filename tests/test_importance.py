"""Importance weights of the draws of a fit, and what they tell."""

import itertools
import math
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from members import every
from plain_targets import normal_array, own, student_log_prob, words_of
from scipy import special
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning

from skksivi import (
    HKSIVIApproximator,
    KSIVIApproximator,
    diagnose,
    evidence,
    expectation,
    importance_sample,
    load,
    refine,
    save,
    summary,
)
from skksivi._utils.monte_carlo import pareto_smoothed
from skksivi.baselines import SVGD, Laplace
from skksivi.families._derived import Refined
from skksivi.families._weights import N_CHEAP
from skksivi.judge import Errors, Numbers
from skksivi.mixing import StudentT
from skksivi.targets import Banana, EightGaussians, from_log_prob


def gaussian(mean, sd, log_constant=0.0):
    """A target N(mean, sd^2), times a constant."""
    mean, sd = torch.as_tensor(mean), torch.as_tensor(sd)
    return from_log_prob(lambda x: log_constant - ((x - mean) / sd).square().sum(-1) / 2, n_features=len(mean))


def fitted(mean, sd):
    return Laplace(dtype="float64", random_state=0).fit(gaussian(mean, sd))


def test_smoothing_keeps_the_order_and_the_bulk_and_ratios_that_are_practically_equal():
    """Not even the tail of Cauchy's distribution is one, where it adds less than a fifth to any of them."""
    r = normal_array(1000)
    smoothed, k = pareto_smoothed(r)
    order = np.argsort(r)
    np.testing.assert_array_equal(smoothed[order[:-100]], r[order[:-100]])
    assert (np.diff(smoothed[order]) >= -1e-12).all()
    assert smoothed.max() <= r.max()
    assert k < 0.7
    tail = np.abs(np.random.RandomState(0).standard_cauchy(2000))
    equal = np.log1p(1e-3 * tail.clip(max=50))
    log_ratios, k = pareto_smoothed(equal)
    np.testing.assert_array_equal(log_ratios, equal)
    assert k == 0
    assert pareto_smoothed(np.log1p(tail))[1] > 0.7


def test_k_is_that_of_arviz():
    array_stats = pytest.importorskip("arviz_stats.base", reason="arviz-stats is an extra").array_stats
    for scale in (0.1, 1.0, 3.0):
        r = scale * normal_array(2000)
        assert pareto_smoothed(r)[1] == pytest.approx(float(array_stats.psislw(-r)[1]), abs=0.02)


@given(mean=st.floats(-0.5, 0.5), ratio=st.floats(0.8, 1.1), d=st.integers(1, 3), log_constant=st.floats(-50, 50))
def test_gaussians_have_their_divergence_and_evidence(mean, ratio, d, log_constant):
    """Of q = N(0, I) and p = e^c N(m, r^2 I), by five of their own standard errors."""
    target = gaussian([mean] * d, [ratio] * d, log_constant)
    sample = importance_sample(fitted([0.0] * d, [1.0] * d), target, n_samples=1000, random_state=0)
    kl_qp = d / 2 * ((1 + mean**2) / ratio**2 - 1 + 2 * math.log(ratio))
    kl_pq = d / 2 * (ratio**2 + mean**2 - 1 - 2 * math.log(ratio))
    found = sample.certificate()
    assert abs(found.divergence - kl_qp - kl_pq) < 5 * found.se + 0.01
    log_z = log_constant + d * math.log(ratio * math.sqrt(2 * math.pi))
    elbo, estimate, eubo = sample.evidence()[:3]
    for bound, exact in ((elbo, log_z - kl_qp), (estimate, log_z), (eubo, log_z + kl_pq)):
        assert abs(bound.value - exact) < 5 * bound.se + 0.01


def test_a_divergence_does_not_rest_on_where_no_draw_of_the_fit_is():
    """Log p of -e^x is -10^100 and less where the Student t where the wider draws reach."""
    target = from_log_prob(lambda x: (x - x.exp()).sum(-1), n_features=4)
    q = fitted([special.digamma(1)] * 4, [special.polygamma(1, 1) ** 0.5] * 4)
    found = [importance_sample(q, target, random_state=seed).certificate() for seed in range(5)]
    assert max(c.divergence for c in found) < 100


def test_scores_alone_give_the_same_relative_to_a_named_point():
    q, target = fitted([0.3, 0.0], [1.2, 1.0]), gaussian([0.0, 0.1], [1.0, 1.0], log_constant=7.0)
    a, b = (importance_sample(q, t, n_samples=500, random_state=0) for t in (target, target.score_fn))
    assert a.reference is None
    np.testing.assert_allclose(b.reference, [0.0, 0.1], atol=1e-6)
    at_reference = target.log_prob(torch.as_tensor(b.reference)[None]).item()
    np.testing.assert_allclose(b.log_p + at_reference, a.log_p, atol=1e-3)
    assert b.certificate().divergence == pytest.approx(a.certificate().divergence, abs=1e-3)


def test_expectations_are_those_of_the_target():
    sample = importance_sample(fitted([0.0], [1.2]), gaussian([0.4], [1.0]), n_samples=4000, random_state=0)
    value, se = sample.expectation(lambda X: np.column_stack([X, X**2]))
    assert (np.abs(value - [0.4, 1.16]) < 5 * se).all()
    assert isinstance(sample.expectation(lambda X: X[:, 0]).value, float)


@given(d=st.integers(1, 5), seed=st.integers(0, 1000))
def test_the_numbers_of_a_fit_to_itself_differ_by_nothing(d, seed):
    """By the fit as a control variate, however heavy the tails; those of separate draws differ by noise."""
    sample = importance_sample(fitted([0.0] * d, [1.0] * d), gaussian([0.0] * d, [1.0] * d), random_state=seed)
    levels = np.array([0.05, 0.95])
    posterior = sample.numbers(sample.X, sample.draws, levels)
    assert Errors.between(Numbers.of_draws(sample.draws, levels), posterior).worst(0).excess < 0.05


BENT = Laplace(random_state=0).fit(Banana())
NORMAL, FAR = gaussian([0.0], [1.0]), gaussian([0.0] * 8, [1.0] * 8)
NOWHERE = from_log_prob(lambda x: torch.where(x[:, 0] > 4, -x[:, 0], -math.inf), n_features=1)
REFUSED = [
    (lambda q: importance_sample(SVGD(n_particles=200, max_iter=2).fit(NORMAL), NORMAL), "SVGD has no density"),
    (lambda q: refine(quick(mixing=no_density).fit(NORMAL), NORMAL), "none, so its draws have no weights"),
    (lambda q: evidence(q, 3), "`target` must be a Target or its score function, got a int"),
    (lambda q: evidence(q), "This fit of Laplace has kept no weighted draws: pass `target`"),
    (lambda q: importance_sample(q, n_samples=200), "`n_samples` asks for further draws, which need `target`"),
    (lambda q: importance_sample(q, NORMAL, n_samples=99), "n_samples"),
    (lambda q: refine(q, NORMAL, n_samples=99), "n_samples"),
    (lambda q: importance_sample(q, NORMAL).expectation(lambda X: np.ones(3)), r"`f` returned shape \(3,\)"),
    (lambda q: importance_sample(q, NOWHERE, random_state=0), r"finite log-density at \d+ of 1000 draws"),
    (lambda q: importance_sample(BENT, Banana(), random_state=0).expectation(np.sum), r"shape k = .* \(0.70 is"),
    (lambda q: refine(fitted([40.0] * 8, [0.1] * 8), FAR, random_state=0), "rest on a few draws. Improve the fit"),
]


@pytest.mark.filterwarnings("ignore:The target seems bounded")
@every("act, message", REFUSED)
def test_what_cannot_be_weighed_or_refined_is_named(act, message):
    with pytest.raises((TypeError, ValueError), match=message):
        act(fitted([0.0], [1.0]))


def test_a_refined_fit_that_keeps_no_draw_says_so():
    moved = refine(fitted([0.0], [1.0]), NORMAL, random_state=0)
    moved.sampler_ = replace(moved.sampler_, log_bound=1e3)
    with pytest.raises(RuntimeError, match="Hardly any draw of the fit is kept; call `refine` again"):
        moved.sample(5)


@pytest.mark.filterwarnings("ignore:The target seems bounded")
def test_draws_where_the_target_has_no_density_weigh_nothing():
    half = from_log_prob(lambda x: torch.where(x[:, 0] > 0, -x.square().sum(-1) / 2, -math.inf), n_features=1)
    sample = importance_sample(fitted([0.0], [1.0]), half, random_state=0)
    assert len(sample.X) == 2000
    assert (sample.weights[sample.X[:, 0] < 0] == 0).all()
    elbo, log_z, eubo = sample.evidence()[:3]
    assert abs(log_z.value - math.log(math.sqrt(2 * math.pi) / 2)) < 5 * log_z.se
    assert np.isfinite(eubo.value)
    assert (elbo.value, sample.certificate().divergence) == (-math.inf, math.inf)


@pytest.mark.filterwarnings("ignore:The target seems bounded")
def test_draws_whose_density_is_not_a_number_are_left_out():
    broken = own(1, log_prob=lambda x: (x[:, 0] + 1).log() * 0 - x.square().sum(-1) / 2, score_fn=torch.neg)
    with pytest.warns(UserWarning, match="of 1000 draws are left out: the density of `target` is NaN there"):
        sample = importance_sample(fitted([0.0], [1.0]), broken, random_state=0)
    assert (sample.X[sample.of_fit] > -1).all()
    assert 0.1 < sample.left_out < 0.2
    assert not sample.certificate().trusted
    with pytest.raises(ValueError, match=r"density of the target is unknown at 16% of the draws.*a mean|an expect"):
        sample.expectation(np.sum)


# What a fit has kept


def counted(d, shift=0.0):
    """A target N(shift, I) by its score alone, with parameters of a model, and the list of the sizes of its calls."""
    calls = []

    def score_fn(x):
        calls.append(len(x))
        return shift - x

    return own(d, score_fn=score_fn, constrain=lambda X: {"a": np.exp(X[:, 0]), "b": X[:, 1:]}), calls


def test_what_a_fit_has_paid_for_answers_without_its_target(tmp_path):
    target, calls = counted(3)
    q = KSIVIApproximator(random_state=0).fit(target)
    save(q, tmp_path / "q.skksivi")
    n = len(calls)
    for fit in (q, pickle.loads(pickle.dumps(q)), load(tmp_path / "q.skksivi")):  # noqa: S301
        table = summary(fit)
        assert table.names == ("a", "b[0]", "b[1]")
        assert abs(table.mean[0] - math.exp(0.5)) < 5 * table.mean_se[0] < 0.2
        assert "; 0 score calls" in table.source
        assert np.isfinite(evidence(fit).log_z.se)
        found = expectation(fit, lambda X: X[:, 0] > 1)
        assert abs(found.value - special.ndtr(-1)) < 5 * found.se < 0.1
        assert found.n_score_calls == 0
        assert importance_sample(fit).certificate() == q.certificate_
    assert len(calls) == n


def test_further_draws_follow_those_that_were_kept():
    target, calls = counted(3)
    q = KSIVIApproximator(random_state=0).fit(target)
    kept, n = q.weighted_draws_, sum(calls)
    more = importance_sample(q, target, n_samples=1000)
    np.testing.assert_array_equal(more.X[: len(kept.X)], kept.X)
    assert len(np.unique(more.X, axis=0)) == len(more.X) == 1000
    assert len(q.weighted_draws_.X) == 1000
    closer = summary(q, target, within=0.015)
    assert (closer.mean_se[1:] < 0.015).all()
    n, n_rows = sum(calls), len(q.weighted_draws_.X)
    importance_sample(q, target, n_samples=10**6, max_score_calls=2000)
    assert n < sum(calls) < n + 2400  # with checks of the target
    assert n_rows < len(q.weighted_draws_.X) < n_rows + 2000
    rival = fitted([0.0] * 3, [1.0] * 3)
    importance_sample(rival, target, n_samples=200)
    with pytest.raises(ValueError, match="has kept no weighted draws: pass `target`"):
        summary(rival.fit(counted(3, 5.0)[0]))  # those of another fit are gone
    other = importance_sample(q, counted(3, 0.2)[0], n_samples=500, random_state=0)
    assert len(other.X) == 500
    assert other.certificate().divergence > 0.02 > importance_sample(q).certificate().divergence


# Refined fits


def log_gamma(shape, d):
    """The target of d independent logarithms of Gamma(shape): skewed to the left."""
    return from_log_prob(lambda x: (shape * x - x.exp()).sum(-1), n_features=d)


def test_refined_fits_are_better_or_refused():
    """A mean is accurate within 0.1 standard deviations, a standard deviation within 10%."""
    refused, was_accurate, is_accurate, n = 0, 0, 0, 10
    for q, target, mean, sd in imperfect_fits():
        try:
            refined = refine(q, target, random_state=0)
        except ValueError as error:
            refused += "importance ratios have a tail" in str(error)
            continue
        draws = [fit.sample(4000, random_state=1) for fit in (q, refined)]
        errors = [max(np.abs([(X.mean(0) - mean) / sd, np.log(X.std(0) / sd)]).ravel()) for X in draws]
        was_accurate += errors[0] < 0.1
        is_accurate += errors[1] < 0.1
        assert errors[1] < 0.1 or errors[0] >= 0.1
    assert refused <= 3
    assert is_accurate >= was_accurate + (n - was_accurate) / 2


def imperfect_fits():
    """Fits that are narrow, shifted or not skewed, their targets, and the mean and standard deviation of these."""
    for d in (2, 20):
        for shift, ratio in ((0.2, 0.85), (0.1, 1.1), (0.0, 1.0)):
            yield fitted([shift] * d, [ratio] * d), gaussian([0.0] * d, [1.0] * d), 0.0, 1.0
    for d, shape in itertools.product((2, 5), (3.0, 10.0)):
        target, sd = log_gamma(shape, d), special.polygamma(1, shape) ** 0.5
        yield Laplace(random_state=0).fit(target), target, special.digamma(shape), sd


def test_refined_draws_are_distinct_independent_and_have_their_density():
    target = gaussian([0.4, 0.0], [1.0, 1.0])
    q = refine(fitted([0.0, 0.0], [0.9, 1.1]), target, random_state=0)
    X, Y = q.sample(5000), q.sample(5000)
    assert len({*X[:, 0]} | {*Y[:, 0]}) == 10_000
    assert q.sample(0).shape == (0, 2)
    exact = target.log_prob(torch.as_tensor(X)).numpy() - math.log(2 * math.pi)
    assert abs(np.exp(exact - q.score_samples(X)).mean() - 1) < 0.03
    assert diagnose(q, target, random_state=0).ok
    assert not isinstance(refine(q, target, random_state=1).sampler_.sampler, Refined)


def test_a_refined_fit_is_a_copy_that_is_saved_without_its_target(tmp_path):
    target = gaussian([0.1, 0.0], [1.0, 1.0])
    q = HKSIVIApproximator(max_iter=2, n_layers=2, batch_size=8, hidden_layer_sizes=(5,), random_state=0).fit(target)
    stands, X = q._random_state.get_state()[2], q.sample(5, random_state=0)
    refined = refine(q, target, random_state=0)
    np.testing.assert_array_equal(q.sample(5, random_state=0), X)
    assert refined.sample(3, layer=2).shape == refined.sample(3).shape == (3, 2)
    assert q._random_state.get_state()[2] == stands
    save(refined, tmp_path / "q.skksivi")
    with pytest.raises(ValueError, match=r"load\(path, score_fn=...\)"):
        load(tmp_path / "q.skksivi").sample(1)
    loaded = load(tmp_path / "q.skksivi", score_fn=target)
    np.testing.assert_array_equal(loaded.sample(20, random_state=0), refined.sample(20, random_state=0))
    assert not isinstance(refined.fit(target).sampler_, Refined)


# The certificate of a fit


def quick(**params):
    """A fit of two iterations from a start of your choice."""
    return KSIVIApproximator(max_iter=2, batch_size=8, hidden_layer_sizes=(5,), random_state=0, **params)


def no_density(n, generator):
    return torch.randn(n, 1, generator=generator)


def test_a_fit_has_the_certificate_of_its_draws():
    target = log_gamma(3.0, 3)
    for known in (target, target.score_fn):
        q = quick().fit(known, n_features=3)
        found, full = q.certificate_, importance_sample(q, target, random_state=0).certificate()
        assert found.trusted
        bias = 1e-4  # of ratios of sums
        assert abs(found.divergence - full.divergence) < bias + 5 * math.hypot(found.se, full.se)


def test_it_takes_a_few_hundred_scores_and_changes_no_draw(monkeypatch):
    """Unless the start has weighed the same draws, which then takes no more."""
    at_once = KSIVIApproximator(random_state=0).fit(torch.neg, n_features=2)
    assert at_once.certificate_.trusted
    assert "certificate" not in {stage.name for stage in at_once.stages_}
    given = KSIVIApproximator(whiten=([0, 0], np.eye(2)), method="start", random_state=0)
    q = clone(given).fit(torch.neg, n_features=2)
    (n_calls,) = (stage.n_calls for stage in q.stages_ if stage.name == "certificate")
    assert 200 < n_calls < 700
    monkeypatch.setattr("skksivi.estimators._judge.weighted_draws", lambda *_: ())
    without = clone(given).fit(torch.neg, n_features=2)
    assert without.certificate_ is None
    np.testing.assert_array_equal(without.sample(5), q.sample(5))


@every("shift, ratio, wrong", [(0.04, 0.98, False), (0.5, 0.9, True)])
def test_bad_fits_are_told_by_their_certificate(shift, ratio, wrong):
    whiten = [shift] * 2, (ratio * np.eye(2)).tolist()
    q = KSIVIApproximator(whiten=whiten, method="start", random_state=0)
    said = words_of(lambda: q.fit(gaussian([0.0, 0.0], [1.0, 1.0])))
    assert q.certificate_.trusted
    assert any(re.search(r"The fit is wrong: .* from the posterior", m) for m in said) == wrong


@pytest.mark.slow
def test_what_has_no_cheap_certificate_has_none():
    assert quick(mixing=no_density).fit(log_gamma(3.0, 1)).certificate_ is None
    assert quick().fit(EightGaussians()).certificate_.trusted
    short = HKSIVIApproximator(max_iter=2, batch_size=8, n_layers=2, random_state=0)
    assert short.fit(NORMAL).certificate_ is None
    raised = []

    def log_prob(x):
        if len(x) == N_CHEAP:
            raised.append(x)
            raise NotImplementedError
        return -x.square().sum(-1) / 2

    late = own(1, log_prob=log_prob, score_fn=torch.neg)
    assert quick(whiten="laplace", mixing="normal").fit(late).certificate_ is None
    assert raised


def test_certificates_are_saved_and_made_anew_by_warm_starts(tmp_path):
    q = quick(warm_start=True, mixing=StudentT(8.0), whiten=([0.0], [[1.0]])).fit(NORMAL)
    before = q.certificate_
    save(q, tmp_path / "q.skksivi")
    assert load(tmp_path / "q.skksivi").certificate_ == before
    with pytest.warns(ConvergenceWarning, match="the posterior's"):
        q.fit(gaussian([0.0], [2.0]))
    assert q.certificate_.divergence > before.divergence


# Known evidences


def is_honest(found, exact):
    """Within 0.05 nats, or within four standard errors, which are infinite where the weights are not trusted."""
    return abs(found.log_z.value - exact) < max(0.05, 4 * found.log_z.se)


@every("d", [1, 30])
@every("shift, ratio", [(0.0, 1.0), (0.1, 0.95), (0.0, 0.85), (0.2, 1.0), (0.0, 0.5), (1.0, 1.0)])
def test_the_evidence_of_a_gaussian_is_within_its_error(d, shift, ratio):
    found = evidence(fitted([shift] * d, [ratio] * d), gaussian([0.0] * d, [1.0] * d), random_state=0)
    assert is_honest(found, d / 2 * math.log(2 * math.pi))
    assert found.trusted or max(abs(shift), 1 - ratio) * math.sqrt(d) > 0.45


@every("d, df", [(2, 3.0), (10, 5.0)])
def test_tails_that_the_fit_lacks_are_in_the_evidence(d, df):
    """Draws of the Gaussian alone miss 0.01 to 0.3 nats, by up to eight standard errors."""
    q, student = fitted([0.0] * d, [1.0] * d), from_log_prob(lambda x: student_log_prob(x, df), n_features=d)
    assert all(is_honest(evidence(q, student, random_state=seed), 0.0) for seed in range(5))


def test_a_valley_to_the_reference_leaves_out_what_lies_beyond(monkeypatch):
    """By its score alone, a target of two modes with a zero of the density between them."""

    def score_fn(x):
        return torch.stack([2 / x[:, 0] - 4 * (x[:, 0] - 4 * x[:, 0].sign()), -x[:, 1]], 1)

    q = KSIVIApproximator(method="start", init=[[4.1, 0.0], [-4.1, 0.0]], random_state=0)
    with pytest.warns(ConvergenceWarning, match="weight of the mode .* is unknown"):
        q.fit(score_fn, n_features=2)
    for m in q.whitening_.modes.copy():
        q.whitening_.modes[:] = m, *[each for each in q.whitening_.modes.copy() if (each != m).any()]
        with pytest.warns(UserWarning, match="left out"):
            assert importance_sample(q, score_fn, random_state=0).left_out == pytest.approx(0.5, abs=0.1)
