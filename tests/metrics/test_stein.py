"""Kernel Stein discrepancies: against plain means of the Stein kernel; the test's size and power."""

import math

import numpy as np
import pytest
import torch
from awkward_arrays import every_view
from hypothesis import given
from hypothesis import strategies as st
from plain_targets import normal_array, pushed

from skksivi import metrics
from skksivi._utils.arrays import make_generator
from skksivi.kernels import IMQ, Gaussian, Laplace, Riesz, Tilted
from skksivi.metrics import ksd, ksd_test
from skksivi.stein import _discrepancy
from skksivi.stein._discrepancy import FixedKernelKSD, stein_kernel
from skksivi.targets import Banana, from_log_prob

SEEDS, SIZES, DIMENSIONS = st.integers(0, 10**6), st.integers(2, 40), st.integers(1, 4)


def standard_score(x):
    return -x


def cubic_score(x):
    return -(x**3) - x.roll(1, -1)


def stein_matrix(X, score_fn, kernel):
    x = torch.as_tensor(X)
    return stein_kernel(x, score_fn(x), x, score_fn(x), kernel.frozen(x)).numpy()


@pytest.mark.parametrize("kernel", [Gaussian(), IMQ(), IMQ(bandwidth=0.7), Laplace(), Riesz(exponent=1.5)], ids=str)
@given(n=SIZES, d=DIMENSIONS, seed=SEEDS)
def test_statistics_are_means_over_pairs(kernel, n, d, seed):
    """The U-statistic over pairs of different rows, the V-statistic, never negative, over all."""
    X = normal_array(n, d if kernel.smooth else d + 1, seed=seed)
    H = stein_matrix(X, cubic_score, kernel)
    u = ksd(X, cubic_score, kernel=kernel)
    assert u == pytest.approx(H[~np.eye(n, dtype=bool)].mean(), rel=1e-6, abs=1e-6)
    if kernel.smooth:
        v = ksd(X, cubic_score, kernel=kernel, statistic="v")
        assert v == pytest.approx(H.mean(), rel=1e-9)
        assert v >= max(u, 0)


@every_view
def test_draws_may_have_any_layout(view):
    X = normal_array(30, 2)
    assert ksd(view(X), cubic_score) == ksd(X, cubic_score)
    assert ksd_test(view(X), cubic_score, random_state=0) == ksd_test(X, cubic_score, random_state=0)


def test_ksd_takes_a_target_or_its_score_function():
    X, target = normal_array(30, 2), Banana()
    assert ksd(X, target) == ksd(X, target.score_fn)
    density = from_log_prob(lambda x: -x.square().sum(-1) / 2, 2)
    assert ksd(X, density) == pytest.approx(ksd(X, standard_score), rel=1e-12)


SINGLE = torch.tensor([[2.0, 0.5], [0.5, 1.0]])


def single_precision_score(x):
    return -x @ SINGLE


def test_a_score_in_single_precision_only_is_judged_nearly_alike():
    X = normal_array(50, 2)
    with pytest.raises(RuntimeError, match="dtype"):
        single_precision_score(torch.as_tensor(X))
    double = ksd(X, lambda x: -x @ SINGLE.to(x))
    assert ksd(X, single_precision_score) == pytest.approx(double, rel=1e-5, abs=1e-5)
    assert ksd(X.astype(np.float32), single_precision_score) == pytest.approx(double, rel=1e-5, abs=1e-5)
    draws = torch.as_tensor(X)
    expected = FixedKernelKSD(lambda x: -x @ SINGLE.to(x), 2)(draws)
    assert FixedKernelKSD(single_precision_score, 2)(draws) == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    ("kernel", "statistic", "d"),
    [
        (Laplace(), "v", 2), (Laplace(), "u", 1), (Riesz(), "v", 2), (Riesz(), "u", 1), (Riesz(norm="l1"), "u", 2),
        (Riesz(norm="l1"), "v", 2), (Tilted(Gaussian()), "u", 2), (Tilted(Tilted(IMQ())), "v", 2),
    ],
    ids=str,
)  # fmt: skip
def test_a_stein_kernel_that_does_not_exist_is_named(kernel, statistic, d):
    with pytest.raises(ValueError, match=rf"{type(kernel).__name__}.*IMQ"):
        ksd(normal_array(9, d), standard_score, kernel=kernel, statistic=statistic)


# The test


def plain_test(X, score_fn, signs):
    """T(w) for the signs w in columns, by the whole matrix; the first column holds ones."""
    H, n = stein_matrix(X, score_fn, IMQ()), len(X)
    np.fill_diagonal(H, 0.0)
    T = np.einsum("ib,ij,jb->b", signs, H, signs) / (n * (n - 1))
    return T[0], np.mean(T - T[0] >= -1e-9 * abs(T[0]))


@given(n=SIZES, d=DIMENSIONS, seed=SEEDS)
def test_ksd_test_is_its_formula(n, d, seed):
    X = normal_array(n, d, seed=seed)
    test = ksd_test(X, cubic_score, n_bootstrap=50, random_state=seed)
    signs = metrics._random_signs(n, 51, 0.5, make_generator(seed)).numpy()
    signs[:, 0] = 1
    assert test == pytest.approx(plain_test(X, cubic_score, signs), rel=1e-6)
    assert test.statistic == pytest.approx(ksd(X, cubic_score), rel=1e-9)


@pytest.mark.parametrize("tile", [1, 7, 10**9])
def test_tiles_do_not_matter_for_the_test(monkeypatch, tile):
    X = normal_array(2 * 10 + 3, 2)
    monkeypatch.setattr(_discrepancy, "TILE", 10)
    expected = ksd_test(X, cubic_score, random_state=0)
    monkeypatch.setattr(_discrepancy, "TILE", tile)
    assert ksd_test(X, cubic_score, random_state=0) == pytest.approx(expected, rel=1e-9)


def test_no_block_is_larger_than_a_tile(monkeypatch):
    sizes = []

    def recorded(x, s_x, y, s_y, kernel):
        sizes.append((len(x), len(y)))
        return stein_kernel(x, s_x, y, s_y, kernel)

    monkeypatch.setattr(_discrepancy, "stein_kernel", recorded)
    n = 3 * _discrepancy.TILE + 1
    ksd_test(normal_array(n, 2), cubic_score, n_bootstrap=5)
    assert max(max(size) for size in sizes) == _discrepancy.TILE
    assert sum(a * b for a, b in sizes) < 0.7 * n**2  # each pair once, but within a tile


def test_the_test_repeats_with_its_random_state_and_leaves_global_ones_alone():
    X, before = normal_array(50, 2), torch.get_rng_state()
    a, b = (ksd_test(X, standard_score, random_state=np.random.RandomState(5)) for _ in range(2))
    assert a == b == ksd_test(X, standard_score, random_state=5)
    assert a != ksd_test(X, standard_score, random_state=6)
    assert torch.equal(torch.get_rng_state(), before)


def rejections(samples, **options):
    """Whether each sample is rejected at 5%."""
    tests = (ksd_test(X, standard_score, n_bootstrap=99, random_state=k, **options) for k, X in enumerate(samples))
    return np.array([test.pvalue <= 0.05 for test in tests])


@pytest.mark.slow
def test_the_test_has_its_size():
    """Of 400 exact samples 5% are rejected, give or take three standard errors, 1.1% each."""
    assert 0.017 <= rejections(normal_array(400, 100, 2)).mean() <= 0.083


def test_draws_of_another_shape_are_rejected():
    """Means and variances are those of the target."""
    rng = np.random.RandomState(0)
    uniform = rng.uniform(-math.sqrt(3), math.sqrt(3), (10, 300, 2))
    exponential = rng.exponential(size=(10, 300, 2)) - 1
    assert rejections(uniform).all()
    assert rejections(exponential).all()


def chains(n_chains, n, correlation, seed):
    """Autoregressions with the standard normal as stationary distribution."""
    noise = normal_array(n, n_chains, 1, seed=seed)
    x = noise[:1]
    for xi in noise[1:]:
        x = np.vstack([x, correlation * x[-1:] + math.sqrt(1 - correlation**2) * xi])
    return x.transpose(1, 0, 2)


@pytest.mark.slow
def test_signs_that_hold_on_allow_for_a_chain():
    samples = chains(200, 400, 0.8, seed=2)
    assert rejections(samples).mean() > 0.3
    assert rejections(samples, flip_probability=0.05).mean() < 0.12


@pytest.mark.parametrize(
    ("act", "options", "message"),
    [
        (ksd, {"statistic": "w"}, "`statistic` must be 'u' or 'v'"),
        (ksd, {"X": normal_array(1, 2)}, "minimum of 2"),
        (ksd, {"X": np.full((9, 2), np.nan)}, "X contains NaN"),
        (ksd, {"kernel": IMQ(bandwidth=-1)}, "`bandwidth`"),
        (ksd, {"score_fn": lambda x: x.sum(-1)}, "`score_fn` returned shape"),
        (ksd, {"score_fn": lambda x: 0}, "`score_fn` returned a int"),
        (
            ksd,
            {"X": [[2], [-1], [3], [-4]], "score_fn": torch.log},
            "not finite at 2 of the 4 draws, row 1 the first",
        ),
        (ksd_test, {"n_bootstrap": 0}, "n_bootstrap"),
        (ksd_test, {"n_bootstrap": 9.5}, "n_bootstrap"),
        (ksd_test, {"flip_probability": 0}, "flip_probability"),
        (ksd_test, {"flip_probability": 1}, "flip_probability"),
        (ksd_test, {"kernel": Laplace(), "X": normal_array(9, 1)}, "IMQ"),
        (ksd_test, {"score_fn": lambda x: -x.log()}, "not finite"),
        (ksd_test, {"X": normal_array(1, 1)}, "minimum of 2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else getattr(value, "__name__", "message"),
)
def test_a_mistake_is_named(act, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        act(**{"X": normal_array(9, 2), "score_fn": standard_score, **options})


# The judge


AFFINE = [
    (torch.diag(torch.tensor([1e-3, 1e3])).double(), torch.tensor([1.0, -500.0]).double()),
    (torch.tensor([[2.0, 1.0], [-3.0, 0.5]]).double(), torch.tensor([30.0, -20.0]).double()),
]


@pytest.mark.parametrize(("A", "b"), AFFINE, ids=["units", "shear"])
def test_judge_depends_on_the_target_alone(A, b):
    """An affine map of both the target and the draws changes nothing."""
    x = torch.as_tensor(normal_array(200, 2)).exp()
    expected = FixedKernelKSD(standard_score, 2)(x)
    assert FixedKernelKSD(pushed(standard_score, A, b), 2)(x @ A.mT + b) == pytest.approx(expected, rel=1e-6)


def test_judge_is_the_u_statistic_in_whitened_coordinates():
    x = torch.as_tensor(normal_array(50, 2))
    expected = ksd(x.numpy(), standard_score, kernel=IMQ(bandwidth=math.sqrt(2)))
    assert FixedKernelKSD(standard_score, 2)(x) == pytest.approx(expected, rel=1e-9)
