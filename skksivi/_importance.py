"""Importance weights of the draws of a fit, and what they tell of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from skksivi._arrays import RandomState, as_array, make_rng, make_seed, resolve_device
from skksivi._numbers import check_integer
from skksivi._warnings import warn_caller
from skksivi.base import BaseApproximator, ordinary_mode
from skksivi.families._samplers import HasDensity, Refined, Sampler, knows_density
from skksivi.metrics._psis import most_trusted, pareto_smoothed
from skksivi.pilot._rules import log_density, origin_of
from skksivi.score._score import Score, ScoreFunction
from skksivi.score._target import compared_score
from skksivi.targets._base import Target

#: The fewest draws whose ratio must be finite, and their smallest effective share.
LEAST_DRAWS, LEAST_SHARE = 100, 0.45

#: The share of the target that refined draws may lack where its ratio to the fit is largest.
LOST = 0.01

A = TypeVar("A", bound=BaseApproximator)


class Estimate(NamedTuple):
    """A number, or an array of numbers, and its standard error."""

    value: float | np.ndarray
    se: float | np.ndarray


class Certificate(NamedTuple):
    """How far a fit is from its target.

    Attributes
    ----------
    divergence : float
        KL(q || p) + KL(p || q), in nats.
    se : float
        Its standard error.
    k : float
        The shape of the tail of the importance ratios.
    share : float
        The effective share of the draws, between 0 and 1.
    trusted : bool
        Whether k is small enough for the draws to tell of p at all.
    """

    divergence: float
    se: float
    k: float
    share: float
    trusted: bool


class Evidence(NamedTuple):
    """Bounds on the log evidence, and an estimate; of a target known by its score relative to log p at `reference`.

    Attributes
    ----------
    elbo : Estimate
        E_q[log p - log q], from below.
    log_z : Estimate
        The logarithm of the integral of p.
    eubo : Estimate
        E_p[log p - log q], from above.
    k : float
        The shape of the tail of the importance ratios.
    trusted : bool
        Whether k is small enough for `log_z` and `eubo`.
    reference : ndarray of shape (n_features,) or None
        Where p is one; None where the target has a `log_prob`.
    """

    elbo: Estimate
    log_z: Estimate
    eubo: Estimate
    k: float
    trusted: bool
    reference: np.ndarray | None


@dataclass(frozen=True)
class ImportanceSample:
    r"""Draws of a fit, and their weights for the target.

    Attributes
    ----------
    X : ndarray of shape (n, n_features)
    log_ratios : ndarray of shape (n,)
        log p - log q, in nats.
    std : ndarray of shape (n,)
        Standard errors of the log q.
    weights : ndarray of shape (n,)
        Pareto-smoothed ratios; they sum to one.
    k : float
        The shape of the tail of the ratios, which have 1/k finite moments.
    reference : ndarray of shape (n_features,) or None
        Where p is one, of a target known by its score alone.
    """

    X: np.ndarray
    log_ratios: np.ndarray
    std: np.ndarray
    weights: np.ndarray
    k: float
    reference: np.ndarray | None

    @property
    def share(self) -> float:
        r"""The effective share of the draws, :math:`1 / (n \sum_i w_i^2)`."""
        return float(1 / (len(self.weights) * np.square(self.weights).sum()))

    @property
    def trusted(self) -> bool:
        """Whether k is at most min(1 - 1 / log10(n), 0.7), and the effective share at least 0.45.

        Tails that no draw has reached lengthen neither: a small share of good draws is the only sign of them.
        """
        return self.k <= most_trusted(len(self.weights)) and self.share >= LEAST_SHARE

    def certificate(self) -> Certificate:
        r"""Return how far the fit is from the target.

        .. math:: J = \mathrm{KL}(q \| p) + \mathrm{KL}(p \| q) = E_q \ell - E_p \ell, \qquad
            \ell = \log q - \log p,

        in which the normaliser of p cancels; what the errors of log q add is taken off.
        """
        n, ell = len(self.weights), -self.log_ratios
        if np.isinf(ell).any():  # the fit has mass where the target has none
            return Certificate(math.inf, 0.0, self.k, self.share, self.trusted)
        under_p = self.weights @ ell
        influence = ell - ell.mean() - n * self.weights * (ell - under_p)
        divergence = ell.mean() - under_p - np.square(self.std).mean()
        return Certificate(float(divergence), float(influence.std() / math.sqrt(n)), self.k, self.share, self.trusted)

    def evidence(self) -> Evidence:
        """Return bounds on the log evidence, and its estimate by importance sampling.

        The errors of log q, which the draws may share, are in the standard errors. Where the target has no density at
        some draws the lower bound is -inf.
        """
        n, w = len(self.weights), self.weights
        r = self.log_ratios[w > 0]
        eubo, top, shared = float(w[w > 0] @ r), r.max(), float(w @ self.std)
        log_z = float(np.log(np.exp(r - top).sum() / n) + top)
        covered = len(r) == n
        elbo = Estimate(float(r.mean()), math.hypot(r.std() / math.sqrt(n), shared))
        return Evidence(
            elbo if covered else Estimate(-math.inf, 0.0),
            Estimate(log_z, math.hypot(np.sqrt(np.square(n * w - 1).mean() / n), shared)),
            Estimate(eubo, math.hypot((n * w[w > 0] * (r - eubo)).std() / math.sqrt(n), shared)),
            self.k,
            self.trusted,
            self.reference,
        )

    def expectation(self, f: Callable[[np.ndarray], ArrayLike]) -> Estimate:
        """Return the mean of a function under the target.

        Parameters
        ----------
        f : callable
            Maps X (n, n_features) to an array whose first axis has length n.

        Returns
        -------
        estimate : Estimate
            A pair ``(value, se)``, each of the shape of f of one draw.

        Raises
        ------
        ValueError
            f returns another number of rows, or k is too large.
        """
        _check_trusted(self, "an expectation")
        values = np.asarray(f(self.X), dtype=np.float64)
        if values.shape[:1] != self.weights.shape:
            raise ValueError(f"`f` returned shape {values.shape}, expected a row for each of {len(self.X)} draws.")
        mean = np.tensordot(self.weights, values, 1)
        se = np.sqrt(np.tensordot(np.square(self.weights), np.square(values - mean), 1))
        return Estimate(mean[()], se[()])

    def sample(self, n_samples: int, random_state: RandomState = None) -> np.ndarray:
        """Draw rows with these weights, each about as often as its weight says.

        Parameters
        ----------
        n_samples : int
        random_state : int, RandomState or None, default=None

        Returns
        -------
        X : ndarray of shape (n_samples, n_features)
            In random order; rows of large weight more than once.

        Raises
        ------
        TypeError, ValueError
            `n_samples` is not an integer, or negative; or k is too large.
        """
        check_integer(n_samples, "n_samples", min_val=0)
        _check_trusted(self, "a sample")
        rng = make_rng(random_state)
        levels = (np.arange(n_samples) + rng.uniform()) / max(n_samples, 1)
        rows = np.searchsorted(np.cumsum(self.weights)[:-1], levels)
        return self.X[rng.permutation(rows)]


def _check_trusted(sample: ImportanceSample, what: str) -> None:
    """Raise ValueError unless the weights can be trusted."""
    if not sample.trusted:
        raise ValueError(
            f"The importance ratios have a tail of shape k = {sample.k:.2f}, where {most_trusted(len(sample.X)):.2f} "
            f"is allowed, and the draws an effective share of {sample.share:.2f}, where {LEAST_SHARE} is needed: "
            f"{what} would rest on a few draws. Improve the fit first, see `diagnose`."
        )


def importance_sample(
    est: BaseApproximator, target: Target | ScoreFunction, *, n_samples: int = 2000, random_state: RandomState = None
) -> ImportanceSample:
    r"""Weigh draws of a fit by the density of its target.

    The ratios p / q are smoothed by the generalised Pareto distribution of their tail. Of a target that has no
    `log_prob`, log p is the integral of its score along lines from a mode, at some 50 points for each draw.

    Parameters
    ----------
    est : approximator
        Fitted, with a density.
    target : Target or callable
        What it was fitted to, or its score function.
    n_samples : int, default=2000
        How many draws, at least 100.
    random_state : int, RandomState or None, default=None

    Returns
    -------
    sample : ImportanceSample
        With ``certificate()``, ``evidence()``, ``expectation(f)`` and ``sample(n)``.

    See Also
    --------
    refine : A fit that draws by these weights.

    Raises
    ------
    NotFittedError
        Before `fit`.
    TypeError
        The fit has no density, or `n_samples` is not an integer.
    ValueError
        The target has another dimension than `est`, or fewer than 100 ratios are finite.

    Warns
    -----
    UserWarning
        Draws where the log-density of the target is NaN are left out.

    References
    ----------
    Vehtari, A. et al. (2024). Pareto smoothed importance sampling. https://arxiv.org/abs/1507.02646

    Examples
    --------
    >>> from skksivi import importance_sample
    >>> from skksivi.baselines import Laplace
    >>> from skksivi.targets import Banana
    >>> weighed = importance_sample(Laplace().fit(Banana()), Banana(), random_state=0)
    >>> weighed.trusted
    False
    """
    return _weighed_draws(est, target, n_samples, random_state)[1]


def _weighed_draws(
    est: BaseApproximator, target: Target | ScoreFunction, n_samples: int, random_state: RandomState
) -> tuple[Score, ImportanceSample]:
    """Return the score of a target, for float64 points, and draws of a fit that are weighed by it."""
    check_integer(n_samples, "n_samples", min_val=LEAST_DRAWS)
    check_is_fitted(est)
    device = resolve_device(est.device)
    with ordinary_mode(device), torch.no_grad():
        score = compared_score(target, est.n_features_in_, est.dtype, est.device)
        if not knows_density(est.sampler_):
            raise TypeError(f"{type(est).__name__} has no density, and its draws no weights; see `score_samples`.")
        x = torch.as_tensor(est.sample(n_samples, make_seed(random_state)), dtype=torch.float64, device=device)
        sample = weighed(est.sampler_, score, x)
    if len(sample.X) < len(x):
        warn_caller(f"{len(x) - len(sample.X)} of {len(x)} draws are left out: the density of `target` is NaN there.")
    return score, sample


def weighed(sampler: HasDensity, score: Score, x: Tensor) -> ImportanceSample:
    """Return draws x (n, d) of a sampler with their weights, without those where log p is NaN.

    Raises
    ------
    ValueError
        Fewer than 100 are left.
    """
    origin = origin_of(score)
    log_p = log_density(score, origin, x)
    kept = ~(log_p.isnan() | log_p.isposinf())
    n_inside = int(log_p.isfinite().sum())
    if n_inside < LEAST_DRAWS:
        raise ValueError(
            f"`target` has a finite log-density at {n_inside} of {len(x)} draws; {LEAST_DRAWS} are needed."
        )
    log_q, std = sampler.log_density(x[kept])
    log_ratios = as_array(log_p[kept] - log_q)
    inside = np.isfinite(log_ratios)
    log_weights, k = pareto_smoothed(log_ratios[inside])
    weights = np.zeros(len(log_ratios))
    weights[inside] = np.exp(log_weights - log_weights.max())
    reference = None if origin is None else as_array(origin.m)
    return ImportanceSample(as_array(x[kept]), log_ratios, as_array(std), weights / weights.sum(), k, reference)


def refine(est: A, target: Target | ScoreFunction, *, n_samples: int = 2000, random_state: RandomState = None) -> A:
    r"""Correct a fit by the importance weights of its draws.

    The fit that is returned has draws x of `est` that are kept with probability

    .. math:: \min\left(1, \frac{p(x)}{c\, q(x)}\right), \qquad E_q \max\left(0, \frac{p(x)}{q(x)} - c\right) = 0.01

    for normalised p: they are independent, and 99% of the target. What no draw of `est` is near, a mode or a tail,
    remains lost.

    Parameters
    ----------
    est : approximator
        Fitted, with a density.
    target : Target or callable
        What it was fitted to, or its score function.
    n_samples : int, default=2000
        Draws by which c is found, at least 100.
    random_state : int, RandomState or None, default=None

    Returns
    -------
    refined : approximator
        A copy of `est` with other draws and their density, until its next `fit`. A draw costs about c densities of
        the fit and of the target, between one and some ten. A file of it, see `skksivi.save`, is loaded with the
        target.

    Raises
    ------
    NotFittedError
        Before `fit`.
    TypeError
        The fit has no density, or `n_samples` is not an integer.
    ValueError
        k-hat or the effective share of the draws forbid it, see `importance_sample`; or the target has another
        dimension than `est`.

    See Also
    --------
    importance_sample : The weights, and expectations by them.

    References
    ----------
    Liu, J. S., Chen, R. and Wong, W. H. (1998). Rejection control and sequential importance sampling. JASA 93(443).

    Examples
    --------
    >>> from skksivi import refine
    >>> from skksivi.baselines import Laplace
    >>> def score_fn(x):  # of N(0, 1); the fit is to N(0, 0.8)
    ...     return -x
    >>> q = Laplace(random_state=0).fit(lambda x: -1.25 * x, n_features=1)
    >>> refine(q, score_fn, random_state=0).sample(10_000).std().round(1)
    np.float64(1.0)
    """
    check_is_fitted(est)
    if isinstance(est.sampler_, Refined):
        est = _with_sampler(est, est.sampler_.sampler)
    score, sample = _weighed_draws(est, target, n_samples, random_state)
    _check_trusted(sample, "a refined fit")
    w = np.sort(sample.weights * len(sample.weights))[::-1]
    lost = (np.cumsum(w) - np.arange(1, len(w) + 1) * w) / len(w)
    log_bound = float(sample.evidence().log_z.value + np.log(w[lost <= LOST][-1]))
    acceptance = float(np.exp(np.minimum(sample.log_ratios - log_bound, 0)).mean())
    with ordinary_mode(score.device), torch.no_grad():
        return _with_sampler(est, Refined(est.sampler_, score, origin_of(score), log_bound, acceptance))


def _with_sampler(est: A, sampler: Sampler) -> A:
    """Return a copy of a fit with another sampler and a stream of its own."""
    made = copy.copy(est)
    made.__dict__.update(sampler_=sampler, _random_state=copy.deepcopy(vars(est)["_random_state"]))
    return made


def certificate(
    est: BaseApproximator, target: Target | ScoreFunction, *, n_samples: int = 2000, random_state: RandomState = None
) -> Certificate:
    r"""Tell how far a fit is from its target, without draws of the target or its normaliser.

    .. math:: J = \mathrm{KL}(q \| p) + \mathrm{KL}(p \| q) = E_q[\log q - \log p] - E_p[\log q - \log p]

    with the mean under p by the importance weights of the draws. A mode that the fit lacks is not seen.

    Parameters
    ----------
    est, target, n_samples, random_state
        As for `importance_sample`.

    Returns
    -------
    certificate : Certificate
        A named tuple: ``divergence`` in nats, ``se``, ``k``, ``share`` and ``trusted``.

    Examples
    --------
    >>> from skksivi import certificate
    >>> from skksivi.baselines import Laplace
    >>> q = Laplace(random_state=0).fit(lambda x: -x, n_features=2)
    >>> round(certificate(q, lambda x: 0.1 - x, random_state=0).divergence, 2)  # 0.1^2 a feature
    0.02
    """
    return importance_sample(est, target, n_samples=n_samples, random_state=random_state).certificate()


def evidence(
    est: BaseApproximator, target: Target | ScoreFunction, *, n_samples: int = 2000, random_state: RandomState = None
) -> Evidence:
    r"""Estimate the log evidence :math:`\log Z = \log \int p(x)\, dx`, and bounds on it.

    .. math:: E_q[\log p - \log q] \le \log Z \le E_p[\log p - \log q]

    Parameters
    ----------
    est, target, n_samples, random_state
        As for `importance_sample`.

    Returns
    -------
    evidence : Evidence
        A named tuple: ``elbo``, ``log_z`` and ``eubo``, each with its standard error, ``k``, ``trusted`` and the
        ``reference`` point where p is taken to be one if the target is known by its score alone.

    Examples
    --------
    >>> from skksivi import evidence
    >>> from skksivi.baselines import Laplace
    >>> from skksivi.targets import from_log_prob
    >>> normal = from_log_prob(lambda x: -x.square().sum(-1) / 2, n_features=2)
    >>> round(evidence(Laplace().fit(normal), normal, random_state=0).log_z.value, 3)  # log(2 pi)
    1.838
    """
    return importance_sample(est, target, n_samples=n_samples, random_state=random_state).evidence()
