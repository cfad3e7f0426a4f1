"""Metrics: against POT, closed forms and plain means of the Stein kernel."""

import math

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skksivi import metrics
from skksivi._stein import stein_kernel
from skksivi.kernels import IMQ, Gaussian, Laplace, Riesz
from skksivi.metrics import Judge, kl_divergence, ksd, sliced_wasserstein
from skksivi.targets import Banana, Target

REPEATABLE = settings(derandomize=True, deadline=None, max_examples=20)
SEEDS, SIZES, DIMENSIONS = st.integers(0, 10**6), st.integers(2, 40), st.integers(1, 4)
every_order = pytest.mark.parametrize("p", [1, 2])


def normal(*shape, seed=0):
    return np.random.RandomState(seed).normal(size=shape)


def directions(n_projections, d, seed):
    theta = np.random.RandomState(seed).normal(size=(d, n_projections))
    return theta / np.linalg.norm(theta, axis=0)


@every_order
@REPEATABLE
@given(n=SIZES, m=SIZES, d=DIMENSIONS, seed=SEEDS)
def test_sliced_wasserstein_is_that_of_pot(p, n, m, d, seed):
    X, Y = normal(n, d, seed=seed), 2 * normal(m, d, seed=seed + 1) + 1
    expected = ot.sliced_wasserstein_distance(X, Y, p=p, projections=directions(20, d, seed))
    assert sliced_wasserstein(X, Y, p=p, n_projections=20, random_state=seed) == pytest.approx(expected, rel=1e-9)


@every_order
@REPEATABLE
@given(n=SIZES, d=DIMENSIONS, copies=st.integers(1, 3), seed=SEEDS)
def test_sliced_wasserstein_is_zero_between_equal_samples(p, n, d, copies, seed):
    """Equal as distributions: neither order nor the number of copies counts."""
    X = normal(n, d, seed=seed)
    Y = np.random.RandomState(seed).permutation(np.tile(X, (copies, 1)))
    assert sliced_wasserstein(X, Y, p=p, n_projections=20, random_state=0) < 1e-9


@every_order
@REPEATABLE
@given(scale=st.floats(1e-3, 1e3), shift=st.floats(-1e3, 1e3), seed=SEEDS)
def test_sliced_wasserstein_has_the_units_of_the_data(p, scale, shift, seed):
    X, Y = normal(15, 3, seed=seed), normal(11, 3, seed=seed + 1)
    value, changed = (
        sliced_wasserstein(a, b, p=p, n_projections=20, random_state=0)
        for a, b in [(X, Y), (scale * X + shift, scale * Y + shift)]
    )
    assert changed == pytest.approx(scale * value, rel=1e-6)


def test_sliced_wasserstein_is_symmetric():
    X, Y = normal(15, 3), normal(11, 3, seed=1)
    assert sliced_wasserstein(X, Y, random_state=0) == pytest.approx(sliced_wasserstein(Y, X, random_state=0))


def test_sliced_wasserstein_of_a_shift_is_its_mean_projection():
    """E (theta^T v)^2 = |v|^2 / d, with variance at most 3 |v|^4 / d^2 over directions."""
    X, v, n = normal(50, 3), np.array([3.0, 0.0, 4.0]), 20_000
    value = sliced_wasserstein(X, X + v, n_projections=n, random_state=0)
    assert abs(value**2 - 25 / 3) < 4 * math.sqrt(3 / n) * 25 / 3


@pytest.mark.parametrize("make", [lambda: 5, lambda: np.random.RandomState(5)], ids=["int", "RandomState"])
def test_sliced_wasserstein_repeats_with_its_random_state(make):
    X, Y = normal(30, 3), normal(20, 3, seed=1)
    a, b = (sliced_wasserstein(X, Y, n_projections=5, random_state=make()) for _ in range(2))
    assert a == b == sliced_wasserstein(X, Y, n_projections=5, random_state=5)
    assert a != sliced_wasserstein(X, Y, n_projections=5, random_state=6)


@pytest.mark.parametrize("metric", [sliced_wasserstein, kl_divergence])
def test_two_samples_that_cannot_be_compared_are_named(metric):
    X = normal(9, 2)
    with pytest.raises(ValueError, match="`X` has 2 columns and `Y` has 3"):
        metric(X, normal(9, 3))
    with pytest.raises(ValueError, match="X contains NaN"):
        metric(np.full((9, 2), np.nan), X)
    with pytest.raises(ValueError, match="Y contains infinity"):
        metric(X, np.full((9, 2), np.inf))
    with pytest.raises(ValueError, match="2D"):
        metric(X, X[0])


def exact_kl(m, S):
    """KL(N(m, S) || N(0, I))."""
    return (np.trace(S) + m @ m - len(m) - np.linalg.slogdet(S)[1]) / 2


@pytest.mark.parametrize("shift", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("n_neighbors", [1, 3, 10])
def test_kl_divergence_of_two_normals(shift, n_neighbors):
    """Four standard errors, from Var log p/q and psi'(k) of each distance to a neighbour, and 0.01 for the bias."""
    n, m, L = 20_000, np.array([shift, 0.0]), np.array([[1.1, 0.0], [0.3, 0.8]])
    S = L @ L.T
    X, Y = m + normal(n, 2) @ L.T, normal(n, 2, seed=1)
    M = S - np.eye(2)
    var_log_ratio = np.trace(M @ M) / 2 + m @ S @ m
    trigamma = math.pi**2 / 6 - sum(1 / j**2 for j in range(1, n_neighbors))
    margin = 4 * math.sqrt((var_log_ratio + 2 * trigamma) / n)
    assert abs(kl_divergence(X, Y, n_neighbors=n_neighbors) - exact_kl(m, S)) < margin + 0.01


def test_kl_divergence_takes_samples_of_different_sizes():
    assert abs(kl_divergence(normal(5000, 1), normal(20_000, 1, seed=1))) < 4 * math.sqrt(2 * 0.4 / 5000) + 0.01


def standard_score(x):
    return -x


def cubic_score(x):
    return -(x**3) - x.roll(1, -1)


def stein_matrix(X, score_fn, kernel):
    x = torch.as_tensor(X)
    return stein_kernel(x, score_fn(x), x, score_fn(x), kernel.frozen(x)).numpy()


@pytest.mark.parametrize("kernel", [Gaussian(), IMQ(), IMQ(bandwidth=0.7), Laplace(), Riesz(exponent=1.5)], ids=str)
@REPEATABLE
@given(n=SIZES, d=st.integers(2, 4), seed=SEEDS)
def test_u_statistic_is_the_mean_over_pairs_of_different_rows(kernel, n, d, seed):
    X = normal(n, d, seed=seed)
    expected = stein_matrix(X, cubic_score, kernel)[~np.eye(n, dtype=bool)].mean()
    assert ksd(X, cubic_score, kernel=kernel) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("kernel", [Gaussian(), IMQ(), IMQ(bandwidth=0.7)], ids=str)
@REPEATABLE
@given(n=SIZES, d=DIMENSIONS, seed=SEEDS)
def test_v_statistic_is_the_mean_over_all_pairs_and_never_negative(kernel, n, d, seed):
    X = normal(n, d, seed=seed)
    v, u = (ksd(X, cubic_score, kernel=kernel, statistic=statistic) for statistic in "vu")
    assert v == pytest.approx(stein_matrix(X, cubic_score, kernel).mean(), rel=1e-9)
    assert v >= 0
    assert v >= u


@pytest.mark.parametrize("statistic", ["u", "v"])
@pytest.mark.parametrize("tile", [1, 7, 100, 10**9])
def test_tiles_do_not_matter(monkeypatch, statistic, tile):
    X = normal(100, 2)
    expected = ksd(X, cubic_score, statistic=statistic)
    monkeypatch.setattr(metrics, "TILE", tile)
    assert ksd(X, cubic_score, statistic=statistic) == pytest.approx(expected, rel=1e-12)


def test_more_rows_than_one_tile_equal_one_block(monkeypatch):
    X = normal(metrics.TILE + 76, 2)
    expected = ksd(X, cubic_score)
    monkeypatch.setattr(metrics, "TILE", 10**9)
    assert ksd(X, cubic_score) == pytest.approx(expected, rel=1e-12)


def test_ksd_default_kernel_is_the_imq():
    X = normal(30, 2)
    assert ksd(X, cubic_score) == ksd(X, cubic_score, kernel=IMQ())


def test_ksd_has_the_inverse_squared_units_of_the_sample():
    X = normal(30, 2)
    scaled = ksd(1000 * X, lambda x: -x / 1e6)
    assert scaled == pytest.approx(ksd(X, standard_score) / 1e6, rel=1e-9)


def test_u_statistic_is_unbiased_at_the_target():
    values = np.array([ksd(X, standard_score, kernel=IMQ(bandwidth=1.0)) for X in normal(300, 20, 2)])
    assert abs(values.mean()) < 4 * values.std() / math.sqrt(len(values))


class LogProbOnly(Target):
    n_features = 2

    def log_prob(self, x):
        return -x.square().sum(-1) / 2


def test_ksd_takes_a_target_or_its_score_function():
    X, target = normal(30, 2), Banana()
    assert ksd(X, target) == ksd(X, target.score_fn)
    assert ksd(X, LogProbOnly()) == pytest.approx(ksd(X, standard_score), rel=1e-12)


SINGLE = torch.tensor([[2.0, 0.5], [0.5, 1.0]])


def single_precision_score(x):
    return -x @ SINGLE


def test_a_score_in_single_precision_only_is_judged_nearly_alike():
    X = normal(50, 2)
    with pytest.raises(RuntimeError, match="dtype"):
        single_precision_score(torch.as_tensor(X))
    double = ksd(X, lambda x: -x @ SINGLE.to(x))
    assert ksd(X, single_precision_score) == pytest.approx(double, rel=1e-5, abs=1e-5)
    assert ksd(X.astype(np.float32), single_precision_score) == pytest.approx(double, rel=1e-5, abs=1e-5)
    draws = torch.as_tensor(X)
    expected = Judge(lambda x: -x @ SINGLE.to(x), 2)(draws)
    assert Judge(single_precision_score, 2)(draws) == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    ("kernel", "statistic", "d"),
    [
        (Laplace(), "v", 2),
        (Laplace(), "u", 1),
        (Riesz(), "v", 2),
        (Riesz(), "u", 1),
        (Riesz(norm="l1"), "u", 2),
        (Riesz(norm="l1"), "v", 2),
    ],
    ids=str,
)
def test_a_stein_kernel_that_does_not_exist_is_named(kernel, statistic, d):
    with pytest.raises(ValueError, match=r"IMQ"):
        ksd(normal(9, d), standard_score, kernel=kernel, statistic=statistic)


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda: ksd(normal(9, 2), standard_score, statistic="w"), ValueError, "`statistic` must be 'u' or 'v'"),
        (lambda: ksd(normal(1, 2), standard_score), ValueError, "minimum of 2"),
        (lambda: ksd(np.full((9, 2), np.nan), standard_score), ValueError, "X contains NaN"),
        (lambda: ksd(normal(9, 2), standard_score, kernel=IMQ(bandwidth=-1)), ValueError, "`bandwidth`"),
        (lambda: ksd(normal(9, 2), lambda x: x.sum(-1)), ValueError, "`score_fn` returned shape"),
        (lambda: ksd(normal(9, 2), lambda x: 0), TypeError, "`score_fn` returned a int"),
    ],
    ids=["statistic", "one row", "NaN", "bandwidth", "shape of the score", "type of the score"],
)
def test_a_mistake_is_named(act, error, message):
    with pytest.raises(error, match=message):
        act()


def pushed(score_fn, A, b):
    """The score of A x + b for x with this score."""
    inverse = torch.linalg.inv(A)
    return lambda y: score_fn((y - b) @ inverse.mT) @ inverse


AFFINE = [
    (torch.diag(torch.tensor([1e-3, 1e3])).double(), torch.tensor([1.0, -500.0]).double()),
    (torch.tensor([[2.0, 1.0], [-3.0, 0.5]]).double(), torch.tensor([30.0, -20.0]).double()),
]


@pytest.mark.parametrize(("A", "b"), AFFINE, ids=["units", "shear"])
def test_judge_depends_on_the_target_alone(A, b):
    """An affine map of both the target and the draws changes nothing."""
    x = torch.as_tensor(normal(200, 2)).exp()
    expected = Judge(standard_score, 2)(x)
    assert Judge(pushed(standard_score, A, b), 2)(x @ A.mT + b) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("A", [A for A, _ in AFFINE], ids=["units", "shear"])
def test_judge_does_not_depend_on_the_units_of_a_skewed_target(A):
    """Without a shift the climb to the mode starts at the same point, so that its early stop is the same."""

    def gumbel_score(x):
        return 1 - torch.exp(x - 0.5)

    x = torch.as_tensor(normal(200, 2))
    y, score_fn = x @ A.mT, pushed(gumbel_score, A, torch.zeros(2).double())
    assert Judge(score_fn, 2)(y) == pytest.approx(Judge(gumbel_score, 2)(x), rel=1e-6)


def test_judge_is_the_u_statistic_in_whitened_coordinates():
    x = torch.as_tensor(normal(50, 2))
    expected = ksd(x.numpy(), standard_score, kernel=IMQ(bandwidth=math.sqrt(2)))
    assert Judge(standard_score, 2)(x) == pytest.approx(expected, rel=1e-9)


def test_judge_prefers_the_target_to_a_shifted_and_to_a_scaled_one():
    x, judge = torch.as_tensor(normal(1000, 2)), Judge(standard_score, 2)
    assert judge(x) < min(judge(x + 0.3), judge(1.3 * x), judge(0.7 * x))
