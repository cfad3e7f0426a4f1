"""Metrics: against plain formulas and POT; what all of two samples share; the size and power of the test."""

import math
from functools import partial
from inspect import signature
from unittest.mock import Mock

import numpy as np
import ot
import pytest
import torch
from awkward_arrays import every_view
from hypothesis import given
from hypothesis import strategies as st
from members import every, refused
from plain_targets import normal_array, pushed
from test_kernels import MEMBERS

from skksivi import metrics
from skksivi._utils.arrays import make_generator
from skksivi.kernels import IMQ, Gaussian, Laplace, Riesz
from skksivi.metrics import NoiseFloor, ksd, ksd_test, mmd, noise_floor, sliced_wasserstein
from skksivi.stein import _discrepancy
from skksivi.stein._discrepancy import FixedKernelKSD, stein_kernel

SEEDS, SIZES, DIMENSIONS = st.integers(0, 10**6), st.integers(2, 30), st.integers(1, 4)
BOTH_STATISTICS = ["u", "v"]


def standard_score(x):
    return -x


def cubic_score(x):
    return -(x**3) - x.roll(1, -1)


# What all have in common

#: All that take two samples, a new one too, with their defaults.
PARAMETERS = {metric: [*signature(metric).parameters] for metric in (getattr(metrics, n) for n in metrics.__all__)}
DEFAULTS = [metric for metric, names in PARAMETERS.items() if names[:2] == ["X", "Y"]]
SEEDED = [partial(f, random_state=0) if "random_state" in PARAMETERS[f] else f for f in DEFAULTS]
every_default = every("metric", SEEDED)


def sample(n, seed, d=3):
    """Correlated columns, a skewed one among them, elsewhere for each seed."""
    rng = np.random.RandomState(seed)
    A = rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + rng.normal(size=d)
    A[:, 0] = np.exp(A[:, 0] / 4)
    return A


@every_view
@every_default
def test_samples_may_have_any_layout(metric, view):
    X, Y = sample(30, 0), sample(9, 1)
    assert metric(view(X), view(Y)) == metric(X, Y)
    assert ksd(view(X), cubic_score) == ksd(X, cubic_score)
    assert ksd_test(view(X), cubic_score, random_state=0) == ksd_test(X, cubic_score, random_state=0)


@every_default
def test_two_samples_that_cannot_be_compared_are_named(metric):
    X = sample(9, 0, d=2)
    for pair, message in (
        ((X, sample(9, 0, d=3)), "`X` has 2 columns and `Y` has 3"),
        ((np.full((9, 2), np.nan), X), "X contains NaN"),
        ((X, np.full((9, 2), np.inf)), "Y contains infinity"),
        ((X, X[0]), "2D"),
        ((X[:0], X), "0 sample"),
    ):
        with pytest.raises(ValueError, match=message):
            metric(*pair)


RANDOM = {
    "noise floor": partial(noise_floor, lambda X, Y: X.mean() - Y.mean(), sample(50, 0), 10),
    "distance": partial(sliced_wasserstein, sample(30, 0), sample(20, 1), n_projections=5),
    "test": partial(ksd_test, normal_array(50, 2), standard_score),
}


@every("act", RANDOM)
def test_a_value_repeats_with_its_random_state_and_leaves_global_ones_alone(act):
    before = torch.get_rng_state()
    a, b, c, d = (act(random_state=state) for state in (5, *map(np.random.RandomState, (5, 5)), 6))
    assert a == b == c != d
    assert torch.equal(torch.get_rng_state(), before)


IN_PARTS = {
    **{f"mmd {s}": (_discrepancy, "TILE", partial(mmd, statistic=s), 1e-6) for s in BOTH_STATISTICS},
    "test": (_discrepancy, "TILE", lambda X, Y: ksd_test(X, cubic_score, random_state=0), 1e-9),
    "distance": (metrics, "CHUNK", partial(sliced_wasserstein, n_projections=50, random_state=0), 1e-12),
}


@every("module, name, act, rel", IN_PARTS)
def test_tiles_and_chunks_do_not_matter(monkeypatch, module, name, act, rel):
    pair = normal_array(23, 3), normal_array(13, 3, seed=1)
    expected = act(*pair)
    for size in (1, 7, 100):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, size)
            assert act(*pair) == pytest.approx(expected, rel=rel)


# The sliced Wasserstein distance and the maximum mean discrepancy


@every("p", [1, 2])
@given(n=SIZES, m=SIZES, d=DIMENSIONS, seed=SEEDS)
def test_sliced_wasserstein_is_that_of_pot(p, n, m, d, seed):
    X, Y = normal_array(n, d, seed=seed), 2 * normal_array(m, d, seed=seed + 1) + 1
    theta = normal_array(d, 20, seed=seed)
    expected = ot.sliced_wasserstein_distance(X, Y, p=p, projections=theta / np.linalg.norm(theta, axis=0))
    assert sliced_wasserstein(X, Y, p=p, n_projections=20, random_state=seed) == pytest.approx(expected, rel=1e-9)


def plain_mmd(k, X, Y, statistic):
    """MMD^2 by loops over the pairs, k a function of two tensors (n, d)."""
    x, y = torch.as_tensor(X), torch.as_tensor(Y)

    def mean(a, b):
        values = torch.stack([k(row, b) for row in a])
        return values[~torch.eye(len(a), dtype=torch.bool)].mean() if a is b and statistic == "u" else values.mean()

    return (mean(x, x) + mean(y, y) - 2 * mean(x, y)).item()


@given(n=SIZES, m=SIZES, d=DIMENSIONS, seed=SEEDS)
@every("statistic", BOTH_STATISTICS)
@every("kernel, formula, width", MEMBERS)
def test_mmd_is_its_formula_under_every_kernel(kernel, formula, width, statistic, n, m, d, seed):
    X, Y = normal_array(n, d, seed=seed), 2 * normal_array(m, d, seed=seed + 1) + 0.5
    expected = plain_mmd(lambda x, y: formula(x, y, 0.8), X, Y, statistic)
    found = mmd(X, Y, kernel=kernel.with_bandwidth(0.8), statistic=statistic)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


# The floor: what a metric is between exact samples


def labelled(n):
    """Rows that tell which they are."""
    return np.arange(float(n))[:, None]


@every("n, m", [(4, None), (4, 6), (5, 5)])
def test_each_repetition_compares_rows_of_which_none_is_in_both(n, m):
    seen = []
    noise_floor(lambda X, Y: seen.append((X, Y)) or 0.0, labelled(10), n, m, n_repeats=7, random_state=0)
    assert len(seen) == 7
    for X, Y in seen:
        assert (X.shape, Y.shape) == ((n, 1), (m or n, 1))
        assert len(np.unique(np.vstack([X, Y]))) == len(X) + len(Y)
    assert len({X.tobytes() for X, _ in seen}) > 1


def test_floor_is_mean_and_standard_deviation_of_the_values():
    values = [3.0, 5.0, 10.0]
    floor = noise_floor(Mock(side_effect=values), labelled(10), 2, n_repeats=3)
    assert floor == NoiseFloor(pytest.approx(np.mean(values)), pytest.approx(np.std(values, ddof=1)))
    assert (floor.mean, floor.sd) == floor


# Kernel Stein discrepancies and their test


def stein_matrix(X, score_fn, kernel):
    x = torch.as_tensor(X)
    return stein_kernel(x, score_fn(x), x, score_fn(x), kernel.frozen(x)).numpy()


@given(n=SIZES, d=DIMENSIONS, seed=SEEDS)
@every("kernel", [Gaussian(), IMQ(), IMQ(bandwidth=0.7), Laplace(), Riesz(exponent=1.5)])
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


@given(n=SIZES, d=DIMENSIONS, seed=SEEDS)
def test_ksd_test_is_its_formula(n, d, seed):
    """T(w) for the signs w in columns, by the whole matrix; the first column holds ones."""
    X = normal_array(n, d, seed=seed)
    test = ksd_test(X, cubic_score, n_bootstrap=50, random_state=seed)
    signs = metrics._random_signs(n, 51, 0.5, make_generator(seed)).numpy()
    signs[:, 0] = 1
    H = stein_matrix(X, cubic_score, IMQ())
    np.fill_diagonal(H, 0.0)
    T = np.einsum("ib,ij,jb->b", signs, H, signs) / (n * (n - 1))
    assert test == pytest.approx((T[0], np.mean(T - T[0] >= -1e-9 * abs(T[0]))), rel=1e-6)
    assert test.statistic == pytest.approx(ksd(X, cubic_score), rel=1e-9)


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
    assert rejections(rng.uniform(-math.sqrt(3), math.sqrt(3), (10, 300, 2))).all()
    assert rejections(rng.exponential(size=(10, 300, 2)) - 1).all()


@pytest.mark.slow
def test_signs_that_hold_on_allow_for_a_chain():
    """Of autoregressions with the standard normal as stationary distribution."""
    noise = normal_array(400, 200, 1, seed=2)
    x = noise[:1]
    for xi in noise[1:]:
        x = np.vstack([x, 0.8 * x[-1:] + 0.6 * xi])
    samples = x.transpose(1, 0, 2)
    assert rejections(samples).mean() > 0.3
    assert rejections(samples, flip_probability=0.05).mean() < 0.12


@every("A, b", [([[1e-3, 0], [0, 1e3]], [1, -500]), ([[2, 1], [-3, 0.5]], [30, -20])])
def test_judge_depends_on_the_target_alone(A, b):
    """An affine map of both the target and the draws changes nothing."""
    A, b = (torch.tensor(a, dtype=torch.float64) for a in (A, b))
    x = torch.as_tensor(normal_array(200, 2)).exp()
    expected = FixedKernelKSD(standard_score, 2)(x)
    assert FixedKernelKSD(pushed(standard_score, A, b), 2)(x @ A.mT + b) == pytest.approx(expected, rel=1e-6)


def test_judge_is_the_u_statistic_in_whitened_coordinates():
    X = normal_array(50, 2)
    expected = ksd(X, standard_score, kernel=IMQ(bandwidth=math.sqrt(2)))
    assert FixedKernelKSD(standard_score, 2)(torch.as_tensor(X)) == pytest.approx(expected, rel=1e-9)


# Mistakes

NINE, ONE, TWO = normal_array(9, 2), normal_array(9, 1), {"X": [[1.0]], "Y": [[1.0]]}
FLOOR = {"metric": lambda X, Y: 0.0, "Y": labelled(10), "n": 2}
OF_SCORE = {"X": NINE, "score_fn": standard_score}
#: A metric, its right arguments, those that are wrong, and what is said.
MISTAKES = [
    *((sliced_wasserstein, TWO, {"p": p}, "`p` must be") for p in (0.5, math.inf, math.nan)),
    *((sliced_wasserstein, TWO, {"n_projections": n}, "n_projections") for n in (0, 2.5)),
    (mmd, {"X": NINE, "Y": NINE}, {"statistic": "w"}, "`statistic` must be 'u' or 'v'"),
    (mmd, {"X": NINE, "Y": NINE}, {"kernel": "cosine"}, "`kernel` must be"),
    (mmd, {"X": NINE, "Y": 0 * NINE}, {}, "median distance"),
    *((mmd, {"X": NINE, "Y": NINE}, {name: NINE[:1]}, "minimum of 2") for name in ("X", "Y")),
    (noise_floor, FLOOR, {"n": 6}, "`Y` has 10 rows, expected n [+] m = 12 at least"),
    (noise_floor, FLOOR, {"m": 9}, "n [+] m = 11"),
    (noise_floor, FLOOR, {"n": 0}, "n == 0"),
    (noise_floor, FLOOR, {"m": 0}, "m == 0"),
    (noise_floor, FLOOR, {"n_repeats": 1}, "n_repeats == 1"),
    (noise_floor, FLOOR, {"n": 2.0}, "n must be an instance of int"),
    (ksd, OF_SCORE, {"statistic": "w"}, "`statistic` must be 'u' or 'v'"),
    (ksd, OF_SCORE, {"X": NINE[:1]}, "minimum of 2"),
    (ksd, OF_SCORE, {"X": np.full((9, 2), np.nan)}, "X contains NaN"),
    (ksd, OF_SCORE, {"kernel": IMQ(bandwidth=-1)}, "`bandwidth`"),
    (ksd, OF_SCORE, {"score_fn": lambda x: x.sum(-1)}, "`score_fn` returned shape"),
    (ksd, OF_SCORE, {"score_fn": lambda x: 0}, "`score_fn` returned a int"),
    (ksd, {"score_fn": torch.log}, {"X": [[2], [-1], [3], [-4]]}, "not finite at 2 of the 4 draws, row 1 the first"),
    (ksd, OF_SCORE, {"kernel": Riesz(norm="l1"), "statistic": "u"}, "Riesz.*IMQ"),
    *((ksd, OF_SCORE, {"kernel": k, "statistic": "v"}, "IMQ") for k in (Laplace(), Riesz(), Riesz(norm="l1"))),
    *((ksd, OF_SCORE, {"kernel": k, "X": ONE}, f"{type(k).__name__}.*IMQ") for k in (Laplace(), Riesz())),
    *((ksd_test, OF_SCORE, {"n_bootstrap": n}, "n_bootstrap") for n in (0, 9.5)),
    *((ksd_test, OF_SCORE, {"flip_probability": p}, "flip_probability") for p in (0, 1)),
    (ksd_test, OF_SCORE, {"kernel": Laplace(), "X": ONE}, "IMQ"),
    (ksd_test, OF_SCORE, {"score_fn": lambda x: -x.log()}, "not finite"),
    (ksd_test, OF_SCORE, {"X": ONE[:1]}, "minimum of 2"),
]


@every("act, right, wrong, message", MISTAKES)
def test_a_mistake_is_named(act, right, wrong, message):
    refused((ValueError, TypeError), message, lambda: act(**{**right, **wrong}))
