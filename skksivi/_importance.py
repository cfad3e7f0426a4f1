"""Importance weights of the draws of a fit, and what they tell of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from skksivi._arrays import RandomState, as_array, make_rng, make_seed, resolve_device
from skksivi._numbers import check_integer
from skksivi._psis import most_trusted, pareto_smoothed
from skksivi._warnings import warn_caller
from skksivi.base import BaseApproximator, ordinary_mode
from skksivi.families._samplers import HasDensity, knows_density
from skksivi.pilot._modes import log_ratio
from skksivi.pilot._rules import judging_map
from skksivi.score._score import Score, ScoreFunction
from skksivi.score._target import compared_score
from skksivi.targets._base import Target

#: The fewest draws whose ratio must be finite, and their smallest effective share.
LEAST_DRAWS, LEAST_SHARE = 100, 0.45


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
        self._check_trusted("an expectation")
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
        self._check_trusted("a sample")
        rng = make_rng(random_state)
        levels = (np.arange(n_samples) + rng.uniform()) / max(n_samples, 1)
        rows = np.searchsorted(np.cumsum(self.weights)[:-1], levels)
        return self.X[rng.permutation(rows)]

    def _check_trusted(self, what: str) -> None:
        if not self.trusted:
            raise ValueError(
                f"The importance ratios have a tail of shape k = {self.k:.2f}, where {most_trusted(len(self.X)):.2f} "
                f"is allowed, and the draws an effective share of {self.share:.2f}, where {LEAST_SHARE} is needed: "
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
    return sample


def weighed(sampler: HasDensity, score: Score, x: Tensor) -> ImportanceSample:
    """Return draws x (n, d) of a sampler with their weights, without those where log p is NaN.

    Raises
    ------
    ValueError
        Fewer than 100 are left.
    """
    log_p, reference = _log_density(score, x)
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
    return ImportanceSample(as_array(x[kept]), log_ratios, as_array(std), weights / weights.sum(), k, reference)


def _log_density(score: Score, x: Tensor) -> tuple[Tensor, np.ndarray | None]:
    """Return log p (n,) at draws x (n, d), and where it is zero if it is known by its score alone."""
    if score.log_prob is not None:
        return score.log_prob(x), None
    mode = judging_map(score)
    score_u = mode.pull_back(score)
    u = mode.whiten(x)
    return torch.cat([log_ratio(score_u, torch.zeros_like(u[0]), part) for part in u.split(500)]), as_array(mode.m)


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
