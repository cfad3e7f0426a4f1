"""The value of a metric that no method can be below."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils import check_array, check_random_state

from skksivi._utils.arrays import without_graph
from skksivi._utils.numbers import check_integer


class NoiseFloor(NamedTuple):
    """Mean and standard deviation of a metric between independent exact samples.

    See Also
    --------
    noise_floor : The Monte Carlo noise of a metric.
    """

    mean: float
    sd: float


def noise_floor(
    metric: Callable[[np.ndarray, np.ndarray], float],
    Y: ArrayLike,
    n: int,
    m: int | None = None,
    *,
    n_repeats: int = 10,
    random_state: int | np.random.RandomState | None = None,
) -> NoiseFloor:
    """Compute the values of a metric between exact samples, as a baseline for results.

    Each repetition takes two samples of n and m different rows of Y at random. Repetitions may share rows, so that
    the standard deviation is too small unless Y has several times n + m rows.

    Parameters
    ----------
    metric : callable
        Maps two arrays of shapes (n, d) and (m, d) to a number.
    Y : array-like of shape (n_rows, d)
        Exact draws of the target.
    n : int
        Rows of each sample that represents the draws.
    m : int, default=None
        Rows of each sample that represents the reference; None means n.
    n_repeats : int, default=10
        Repetitions, two at least.
    random_state : int, RandomState or None, default=None
        Draws the rows.

    Returns
    -------
    floor : NoiseFloor
        With fields `mean` and `sd`, the standard deviation of one value.

    Raises
    ------
    ValueError
        Y has fewer than n + m rows.

    See Also
    --------
    sliced_wasserstein : Transport along random directions.
    NoiseFloor : Its mean and standard deviation.

    Examples
    --------
    >>> import numpy as np
    >>> from skksivi.metrics import noise_floor, sliced_wasserstein
    >>> Y = np.random.RandomState(0).normal(size=(10_000, 22))
    >>> floor = noise_floor(sliced_wasserstein, Y, 1000, random_state=0)
    >>> print(f"{floor.mean:.2f}, less than {floor.mean + 4 * floor.sd:.1f}")
    0.08, less than 0.1

    Options are bound by a lambda, and a metric of one sample ignores the other:

    >>> from skksivi.metrics import ksd
    >>> floor = noise_floor(lambda X, _: ksd(X, lambda x: -x), Y, 100, random_state=0)
    >>> abs(floor.mean) < floor.sd
    True
    """
    Y = check_array(without_graph(Y), dtype=np.float64, input_name="Y")
    m = n if m is None else m
    for name, value, least in [("n", n, 1), ("m", m, 1), ("n_repeats", n_repeats, 2)]:
        check_integer(value, name, min_val=least)
    if n + m > len(Y):
        raise ValueError(f"`Y` has {len(Y)} rows, expected n + m = {n + m} at least; lower `n` or `m`, or draw more.")
    rng = check_random_state(random_state)
    rows = [rng.permutation(len(Y))[: n + m] for _ in range(n_repeats)]
    values = [metric(Y[some[:n]], Y[some[n:]]) for some in rows]
    return NoiseFloor(float(np.mean(values)), float(np.std(values, ddof=1)))
