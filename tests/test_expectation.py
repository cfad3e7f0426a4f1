"""Means by Stein control variates: what is exact, what the standard errors cover, and what is refused."""

import re

import numpy as np
import pytest
import torch
from approximators import COVARIANCE, MEAN, GaussianTarget, good_fit, has_density
from hypothesis import given
from hypothesis import strategies as st
from members import every
from plain_targets import normal_array, own
from scipy import signal, stats

from skksivi import KSIVIRegressor, expectation, refine
from skksivi.baselines import Laplace
from skksivi.targets import Banana, BayesianLogisticRegression, Minibatches, from_log_prob, from_score_fn


def products(X):
    return X[:, :, None] * X[:, None]


def gaussian(d, seed):
    """Return mean, covariance and the score of a random Gaussian of arrays."""
    A, m = normal_array(d, d, seed=seed), normal_array(d, seed=seed + 1)
    C = A @ A.T / d + 0.3 * np.eye(d)
    return m, C, lambda X: -np.linalg.solve(C, (X - m).T).T


# What is exact


@given(d=st.integers(1, 4), shift=st.floats(-0.5, 0.5), ratio=st.floats(0.7, 1.4), seed=st.integers(0, 10**6))
def test_means_and_covariances_of_gaussians_are_exact_by_wrong_draws(d, shift, ratio, seed):
    """Normal draws of another mean and covariance, 40 for each control variate."""
    m, C, score_fn = gaussian(d, seed)
    X = m + shift + ratio * normal_array(40 * (d + d * (d + 1) // 2 + 1), d, seed=seed + 2)
    found = expectation(X, target=score_fn(X))
    exact = found.n_control_variates >= d  # a tail seems heavy in one of a hundred cases
    np.testing.assert_allclose(found.value[exact], m[exact], atol=1e-5)
    assert (found.se[exact] < 1e-5).all()
    second = expectation(X, products, score_fn(X))
    exact = second.n_control_variates == d + d * (d + 1) // 2
    np.testing.assert_allclose(second.value[exact], (C + np.outer(m, m))[exact], atol=1e-4)
    assert found.n_score_calls == 0


def test_a_shifted_fit_gives_the_moments_of_the_target():
    """A Gaussian that is off by 0.3 sd; what is outside the span is still off, and `shift` tells."""
    q = Laplace(random_state=0).fit(lambda x: 0.3 - x, n_features=3)
    X = q.sample(2000, random_state=0)
    for weighted in (False, True):
        est, target = (q, torch.neg) if weighted else (X, -X)
        found = expectation(est, target=target, random_state=0)
        assert (np.abs(found.plain.value) > 0.2).all() == (not weighted)
        assert (np.abs(found.shift) > 4).all() == (not weighted)
        assert (found.variance_reduction > 1e6).all()
        np.testing.assert_allclose(found.value, 0, atol=1e-6)
        np.testing.assert_array_equal(expectation(est, target=target, random_state=0).value, found.value)
        np.testing.assert_allclose(expectation(est, products, target, random_state=0).value, np.eye(3), atol=1e-5)
    far = expectation(X, lambda X: X[:, 0] > 1, -X)
    assert abs(far.value - stats.norm.sf(1)) < abs(far.plain.value - stats.norm.sf(1)) / 2


def test_calls_are_those_that_were_made():
    """Of a weighted fit log p at 2,000 draws and scores at those that matter; by the score alone integrals."""

    n = [0]

    def score_fn(x):
        n[0] += len(x)
        return -x

    def log_prob(x):
        n[0] += len(x)
        return -x.square().sum(-1) / 2

    q = Laplace(random_state=0).fit(lambda x: 0.3 - x, n_features=2)
    for kind, most in ((own(2, log_prob=log_prob, score_fn=score_fn), 4100), (score_fn, 150_000)):
        n[0] = 0
        found = expectation(q, target=kind, random_state=0)
        assert 1500 < found.n_score_calls < most
        assert 0 <= n[0] - found.n_score_calls <= 4  # by which a function is looked at first


@pytest.mark.parametrize("name", ["KSIVIApproximator", "MeanFieldVI", "SVGD", "MALA"])
def test_every_kind_of_approximator_has_the_moments_of_its_target(name):
    """Those whose draws are wrong as well: of independent coordinates, or of a hundred particles."""
    q = good_fit(name)
    found = expectation(q, target=GaussianTarget(), random_state=0)
    np.testing.assert_allclose(found.value, MEAN, atol=1e-4)
    assert (found.se <= found.plain.se).all()
    if name != "SVGD":  # 100 particles are too few
        second = expectation(q, products, GaussianTarget(), random_state=0)
        np.testing.assert_allclose(second.value, COVARIANCE + torch.outer(MEAN, MEAN), atol=1e-3)
    if has_density(q) and name != "MeanFieldVI":
        assert (found.se < 1e-3).all()


# What the standard errors cover


def log_gamma(rng, n, d):
    X = np.log(rng.gamma(2.0, size=(n, d)))
    return X, 2 - np.exp(X)


def chains(n_chains):
    """States of autoregressions with correlation 0.9."""

    def draws(rng, n, d):
        noise = rng.normal(size=(n_chains, n // n_chains, d))
        noise[:, 1:] *= np.sqrt(1 - 0.81)
        X = signal.lfilter([1], [1, -0.9], noise, axis=1)
        return X, -X

    return draws


def by_scores(draws, f=None):
    X, s = draws
    return expectation(X, f, s)


def several(X):
    return np.column_stack([X[:, 0], np.abs(X[:, -1]), np.sin(X.sum(1)), X[:, 0] > 0.5, np.tanh(X[:, 0] * X[:, -1])])


@pytest.mark.slow
@pytest.mark.parametrize(("draws", "n", "d"), [(log_gamma, 100, 3), (chains(4), 1000, 2)])
def test_intervals_cover(draws, n, d):
    """Of 150 intervals of 95% at least 129, with or without control variates, cover 500 times as many exact draws.

    With a true coverage of 93%, as 60 skewed draws have, a false alarm in 1,000 of each.
    """
    rng = np.random.RandomState(0)
    exact = by_scores(draws(rng, 500 * 150, d), several)
    found = [by_scores(draws(rng, n, d), several) for _ in range(150)]
    error = np.abs([e.value - exact.value for e in found])
    covered = (error <= 1.96 * np.hypot([e.se for e in found], exact.se)).mean(0)
    assert (covered >= 0.86).all(), covered
    mse = np.square(error).mean(0) / np.square([e.plain.value - exact.value for e in found]).mean(0)
    assert (mse < 1.3).all(), mse


@every("n_chains", [1, 4, 40])
def test_states_of_chains_count_for_less(n_chains):
    """Means of autoregressions with correlation 0.9 have 19 times the variance of those of independent draws.

    Of twenty estimates of it, each with at least 19 degrees of freedom, the mean has a standard deviation of 7%.
    """
    rng = np.random.RandomState(0)
    se = [by_scores(chains(n_chains)(rng, 8000, 1)).plain.se for _ in range(20)]
    assert 0.75 < np.mean(np.square(se)) * 8000 / 19 < 1.4


def test_control_variates_without_a_variance_are_left_out():
    """Scores of N(0, 1) at draws of Student's t with 1.5 degrees of freedom have none, those at normal draws have."""
    rng, n_used = np.random.RandomState(0), []
    for draw in (lambda n: rng.standard_t(1.5, size=(n, 1)), lambda n: rng.normal(size=(n, 1))):
        X = [draw(1000) for _ in range(20)]
        n_used.append(np.mean([expectation(x, lambda x: np.sin(x[:, 0]), -x).n_control_variates > 0 for x in X]))
    assert n_used[0] <= 0.3
    assert n_used[1] == 1


# Weights


def test_weights_take_the_bias_from_what_control_variates_leave():
    """Five standard errors: a false alarm in 10^6."""
    q = Laplace(random_state=0).fit(lambda x: 0.3 - x, n_features=1)
    found = expectation(q, lambda X: X > 1, torch.neg, random_state=0)
    assert abs(found.value - stats.norm.sf(1)) < 5 * found.se
    assert abs(found.plain.value - stats.norm.sf(1)) < 5 * found.plain.se
    assert found.variance_reduction > 1.3
    refined = expectation(refine(q, torch.neg, random_state=0), lambda X: X > 1, torch.neg, random_state=0)
    assert abs(refined.value - stats.norm.sf(1)) < 5 * refined.se + 0.01  # it may lack 1% of the target


def test_weights_that_cannot_be_trusted_leave_no_finite_error():
    q = Laplace().fit(Banana())
    found, X = expectation(q, target=Banana(), random_state=0), q.sample(2000, random_state=0)
    np.testing.assert_allclose(found.plain.value, X.mean(0), atol=0.15)  # of the fit, not of the target
    assert (found.n_control_variates >= 2).all()
    assert np.isinf([found.se, found.plain.se]).all()
    np.testing.assert_array_equal(found.variance_reduction, 1)


@pytest.mark.filterwarnings("ignore:The target seems bounded")
def test_where_a_function_is_undefined_at_draws_of_the_fit_it_is_no_control_variate():
    """Of N(0, 1) above zero, and logarithms."""
    half = from_log_prob(lambda x: torch.where(x[:, 0] > 0, -x.square().sum(-1) / 2, -np.inf), n_features=1)
    q = Laplace(random_state=0).fit(lambda x: -x, n_features=1)
    found = expectation(q, lambda X: np.log(X) if (X > 0).all() else np.log(X.clip(0)), half, random_state=0)
    assert np.isfinite(found.value).all()


def test_the_scores_of_chains_are_those_of_a_few_of_their_states():
    assert expectation(good_fit("MALA"), target=GaussianTarget(), n_samples=60).n_score_calls < 1000


# What is taken, and what is refused


def test_arrays_and_tensors_of_either_type_give_the_same():
    X = normal_array(500, 2).astype(np.float32)
    found = expectation(X, lambda X: X.sum(1) ** 3, -X)
    assert isinstance(found.value, float)
    for kind in (X.tolist(), X.astype(float), torch.as_tensor(X), torch.as_tensor(X).double().requires_grad_()):
        for target in (-X, torch.as_tensor(-X), lambda x: -x, from_score_fn(lambda x: -x, 2)):
            assert expectation(kind, lambda X: X.sum(1) ** 3, target).value == pytest.approx(found.value, rel=1e-6)
    seen = []
    expectation(torch.as_tensor(X), lambda x: seen.append(x) or x.exp(), -X)
    assert seen[0].dtype == torch.float64
    assert expectation(X, lambda X: X[:, :, None, None] > 0, -X).se.shape == (2, 1, 1)


def test_degenerate_draws_have_the_moments_that_their_scores_tell():
    """Constant and equal coordinates, more features than draws, draws that are all alike.

    By scores of N(m, I), of their mean m, E x = m and, but of constants, E x^2 = m^2 + 1.
    """
    X = normal_array(300, 3)
    for Z in (np.c_[X, np.ones(300)], np.c_[X, X], normal_array(30, 40), np.ones((100, 2)), 1e-9 * X, 1e6 + 1e-3 * X):
        mean, varies = Z.mean(0), Z.std(0) > 0
        of_means = expectation(Z, target=mean - Z)
        np.testing.assert_allclose(of_means.value, mean, rtol=1e-9, atol=1e-12 * np.abs(Z).max())
        of_squares = expectation(Z, lambda Z: Z**2, mean - Z)
        assert np.isfinite(of_squares.se).all()
        if len(Z) > Z.shape[1] and Z.std() > 0.1:
            np.testing.assert_allclose(of_squares.value, mean**2 + varies, rtol=1e-9)
            assert of_squares.se.max() < 1e-9
        if not varies.any():
            np.testing.assert_allclose(of_squares.value, 1, rtol=1e-12)


def test_a_function_may_write_into_its_draws():
    def f(X):
        X -= 7
        return X[:, 0] ** 2 + 7

    X = normal_array(300, 2)
    assert expectation(X, f, -X).value == expectation(X, lambda X: (X[:, 0] - 7) ** 2 + 7, -X).value


def test_minibatches_are_scored_by_all_of_the_data():
    X = normal_array(200, 2)
    whole = BayesianLogisticRegression(X, X[:, 0] > 0.2)
    q = Laplace(random_state=0).fit(whole)
    a, b = (expectation(q, target=t, random_state=0).value for t in (whole, Minibatches(whole, batch_size=10)))
    np.testing.assert_allclose(a, b, rtol=1e-10)


X = normal_array(50, 2)
BROKEN = np.where(np.arange(100).reshape(50, 2) == 7, np.nan, X)
REFUSED = [
    (X, -X[:40], None, "`target` has shape (40, 2), expected (50, 2): a score for each draw"),
    (X, from_score_fn(lambda x: -x, 3), None, "`target` has 3 features, expected 2 as the draws have"),
    (BROKEN, -X, None, "`est` has draws that are not finite at 1 of 50 draws"),
    (X, BROKEN, None, "`target` has scores that are not finite at 1 of 50 draws"),
    (X[:19], -X[:19], None, "`est` has 19 draws; standard errors need 20 at least"),
    (X[:, 0], -X[:, 0], None, "`est` has shape (50,), expected (n, n_features) or (n_chains"),
    (X, -X, lambda X: X.sum(), "`f` returned shape (), expected a row for each of 50 draws"),
    (X, -X, lambda X: X[:7], "`f` returned shape (7, 2), expected a row for each of 50 draws"),
    (X, -X, lambda X: np.log(np.abs(X) - 1e9), "`f` returned values that are not finite at 50 of 50"),
    (X, -X, lambda X: X + 1j, "`f(X)` must hold real numbers"),
    (X, None, None, "`target` is None, but `est` are draws"),
    (X, -X, 3, "`f` must be a function of (X), got 3"),
    (X, "scores", None, "`target` must hold real numbers"),
    (KSIVIRegressor(), -X, None, "got a KSIVIRegressor; fit it, and pass model.approximator_"),
    (Laplace, -X, None, "`est` must be a fitted approximator"),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@every("est, target, f, message", REFUSED)
def test_what_cannot_be_estimated_is_named(est, target, f, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        expectation(est, f, target)


@pytest.mark.filterwarnings("ignore:`score_fn` returns different values")
def test_random_scores_are_refused():
    noise = torch.Generator().manual_seed(0)

    def noisy(x):
        return -x + 0.1 * torch.randn(x.shape, generator=noise, dtype=x.dtype)

    q = good_fit("Laplace")
    for est in (X, q):
        with pytest.raises(ValueError, match="`target` has a score that is random; an exact one is needed"):
            expectation(est, target=noisy)
    with pytest.raises(ValueError, match="n_samples"):
        expectation(q, target=GaussianTarget(), n_samples=19)
