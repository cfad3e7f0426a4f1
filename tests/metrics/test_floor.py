"""The floor: what a metric is between exact samples."""

import numpy as np
import pytest

from skksivi.metrics import NoiseFloor, noise_floor


def labelled(n):
    """Rows that tell which they are."""
    return np.arange(float(n))[:, None]


@pytest.mark.parametrize(("n", "m"), [(4, None), (4, 6), (5, 5)])
def test_each_repetition_compares_rows_of_which_none_is_in_both(n, m):
    seen = []
    noise_floor(lambda X, Y: seen.append((X, Y)) or 0.0, labelled(10), n, m, n_repeats=7, random_state=0)
    assert len(seen) == 7
    for X, Y in seen:
        assert X.shape == (n, 1)
        assert Y.shape == (m or n, 1)
        assert len(np.unique(np.vstack([X, Y]))) == len(X) + len(Y)
    assert len({X.tobytes() for X, _ in seen}) > 1


def test_floor_is_mean_and_standard_deviation_of_the_values():
    values = [3.0, 5.0, 10.0]
    left = iter(values)
    floor = noise_floor(lambda X, Y: next(left), labelled(10), 2, n_repeats=3)
    assert floor == NoiseFloor(pytest.approx(np.mean(values)), pytest.approx(np.std(values, ddof=1)))
    assert (floor.mean, floor.sd) == floor


def test_floor_repeats_with_its_random_state():
    Y = np.random.RandomState(0).normal(size=(50, 1))
    a, b, c = (noise_floor(lambda X, Z: X.mean() - Z.mean(), Y, 10, random_state=seed) for seed in (3, 3, 4))
    assert a == b != c


@pytest.mark.parametrize(
    ("n", "m", "options", "message"),
    [
        (6, None, {}, "`Y` has 10 rows, expected n [+] m = 12 at least"),
        (2, 9, {}, "n [+] m = 11"),
        (0, None, {}, "n == 0"),
        (2, 0, {}, "m == 0"),
        (2, None, {"n_repeats": 1}, "n_repeats == 1"),
        (2.0, None, {}, "n must be an instance of int"),
    ],
)
def test_a_mistake_is_named(n, m, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        noise_floor(lambda X, Y: 0.0, labelled(10), n, m, **options)
