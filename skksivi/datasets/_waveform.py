"""The waveform data of Breiman et al. (1984)."""

from __future__ import annotations

from importlib import resources
from typing import Any

import numpy as np
from sklearn.utils import Bunch, check_random_state, check_scalar

_POSITIONS = np.arange(1, 22)
_WAVES = np.stack([np.maximum(6 - np.abs(_POSITIONS - peak), 0) for peak in (11, 15, 7)])
#: The pair of waves that each class mixes.
_PAIRS = np.array([(1, 2), (0, 2), (0, 1)])


def make_waveform(
    n_samples: int = 5000, *, random_state: int | np.random.RandomState | None = None
) -> tuple[np.ndarray, np.ndarray]:
    r"""Generate the three-class waveform problem.

    Each sample mixes two of three triangular waves h at 21 positions,

    .. math:: x_j = u h_a(j) + (1 - u) h_b(j) + \varepsilon_j, \quad u \sim U(0, 1), \quad \varepsilon_j \sim N(0, 1)

    and its class, drawn with equal probabilities, is the pair (a, b).

    Parameters
    ----------
    n_samples : int, default=5000
    random_state : int, RandomState or None, default=None

    Returns
    -------
    X : ndarray of shape (n_samples, 21)
    y : ndarray of shape (n_samples,)
        Classes 0, 1, 2.

    References
    ----------
    Breiman, L., Friedman, J., Olshen, R. and Stone, C. (1984). Classification and Regression Trees, section 2.6.1.

    Examples
    --------
    >>> from skksivi.datasets import make_waveform
    >>> X, y = make_waveform(100, random_state=0)
    >>> X.shape, y.shape
    ((100, 21), (100,))
    """
    check_scalar(n_samples, "n_samples", int, min_val=0)
    rng = check_random_state(random_state)
    y = rng.randint(3, size=n_samples)
    u = rng.uniform(size=(n_samples, 1))
    a, b = _PAIRS[y].T
    return u * _WAVES[a] + (1 - u) * _WAVES[b] + rng.normal(size=(n_samples, 21)), y


def load_waveform(*, return_X_y: bool = False) -> Any:
    """Return the training set of the waveform benchmark: binary, standardised, 400 rows.

    5,000 rows of `make_waveform` with a fixed seed, prepared as the paper prepares the UCI file: columns
    standardised over all rows (n - 1 in the variance), class 1 against the two others, the first 400 rows kept.

    Parameters
    ----------
    return_X_y : bool, default=False
        Whether to return (data, target) instead of a Bunch.

    Returns
    -------
    data : Bunch
        With `data` (400, 21), `target` (400,) of 0 and 1, `feature_names`, `target_names` and `DESCR`.
    (data, target) : tuple of ndarray
        With `return_X_y`.

    Examples
    --------
    >>> from skksivi.datasets import load_waveform
    >>> X, y = load_waveform(return_X_y=True)
    >>> X.shape, float(y.mean())
    ((400, 21), 0.6625)
    """
    X, classes = make_waveform(5000, random_state=1984)
    X = (X - X.mean(axis=0)) / X.std(axis=0, ddof=1)
    X, y = X[:400], (classes[:400] != 1).astype(int)
    if return_X_y:
        return X, y
    return Bunch(
        data=X,
        target=y,
        feature_names=[f"x{j}" for j in _POSITIONS],
        target_names=["class 1", "class 0 or 2"],
        DESCR=resources.files("skksivi.datasets").joinpath("descr", "waveform.rst").read_text("utf-8"),
    )


def load_waveform_posterior() -> np.ndarray:
    r"""Return exact draws of the posterior of a logistic regression on `load_waveform`.

    The posterior is ``BayesianLogisticRegression(X, y, prior_precision=0.01, fit_intercept=True)``. The draws are
    the last states of 2,000 independent, long, preconditioned Metropolis-adjusted Langevin chains; the command
    ``python benchmarks/reference.py waveform`` makes the file again and prints its diagnostics.

    Returns
    -------
    X : ndarray of shape (2000, 22)
        The intercept first. Two halves of 1,000 give the noise floor of a comparison.

    Examples
    --------
    >>> from skksivi.datasets import load_waveform_posterior
    >>> load_waveform_posterior().shape
    (2000, 22)
    """
    path = resources.files("skksivi.datasets").joinpath("data", "waveform_posterior.npz")
    with resources.as_file(path) as file, np.load(file) as archive:
        return archive["draws"]
