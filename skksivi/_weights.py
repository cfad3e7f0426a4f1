"""Importance weights, and what they tell."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from skksivi._arrays import RandomState, as_array, make_rng
from skksivi._numbers import check_integer
from skksivi._saved import is_float, is_instance, saved
from skksivi.families._density import N_DRAWS, LogDensity
from skksivi.families._samplers import HasDensity, Layer, Layers, knows_density
from skksivi.metrics._psis import most_trusted, pareto_smoothed
from skksivi.pilot._chains import kronrod
from skksivi.pilot._rules import log_density, origin_of
from skksivi.score._score import Score

#: The fewest draws whose ratio must be finite, and their smallest effective share.
LEAST_DRAWS, LEAST_SHARE = 100, 0.45

#: The largest number of a certificate.
LARGE = 1e300

#: Draws of a cheap certificate; those where log p is an integral of the score by seven points; and what 95% of these
#: may be off by with four points, in nats, where seven are off by a tenth.
N_CHEAP, N_INTEGRATED, MAX_GAP = 256, 160, 0.5


class Estimate(NamedTuple):
    """A number, or an array of numbers, and its standard error."""

    value: float | np.ndarray
    se: float | np.ndarray


@saved(
    "Certificate",
    {
        "divergence": (is_float(-LARGE, LARGE), ""),
        "se": (is_float(0, LARGE), ""),
        "k": (is_float(-LARGE, LARGE), ""),
        "share": (is_float(0, 1.01), ""),
        "trusted": (is_instance(bool), ""),
    },
)
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
        check_trusted(self, "an expectation")
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
        check_trusted(self, "a sample")
        rng = make_rng(random_state)
        levels = (np.arange(n_samples) + rng.uniform()) / max(n_samples, 1)
        rows = np.searchsorted(np.cumsum(self.weights)[:-1], levels)
        return self.X[rng.permutation(rows)]


def check_trusted(sample: ImportanceSample, what: str) -> None:
    """Raise ValueError unless the weights can be trusted."""
    if not sample.trusted:
        raise ValueError(
            f"The importance ratios have a tail of shape k = {sample.k:.2f}, where {most_trusted(len(sample.X)):.2f} "
            f"is allowed, and the draws an effective share of {sample.share:.2f}, where {LEAST_SHARE} is needed: "
            f"{what} would rest on a few draws. Improve the fit first, see `diagnose`."
        )


def weighed(sampler: HasDensity, score: Score, x: Tensor) -> ImportanceSample:
    """Return draws x (n, d) of a sampler with their weights, without those where log p is NaN.

    Raises
    ------
    ValueError
        Fewer than 100 are left.
    """
    origin = origin_of(score)
    reference = None if origin is None else as_array(origin.m)
    return weigh(x, log_density(score, origin, x), sampler.log_density, reference)


def weigh(
    x: Tensor, log_p: Tensor, log_density: Callable[[Tensor], LogDensity], reference: np.ndarray | None = None
) -> ImportanceSample:
    """Return draws x (n, d) with log p (n,) and their weights, without those where log p is NaN.

    Raises
    ------
    ValueError
        Fewer than 100 are left.
    """
    kept = ~(log_p.isnan() | log_p.isposinf())
    n_inside = int(log_p.isfinite().sum())
    if n_inside < LEAST_DRAWS:
        raise ValueError(
            f"`target` has a finite log-density at {n_inside} of {len(x)} draws; {LEAST_DRAWS} are needed."
        )
    log_q, std = log_density(x[kept])
    log_ratios = as_array(log_p[kept] - log_q)
    inside = np.isfinite(log_ratios)
    log_weights, k = pareto_smoothed(log_ratios[inside])
    weights = np.zeros(len(log_ratios))
    weights[inside] = np.exp(log_weights - log_weights.max())
    return ImportanceSample(as_array(x[kept]), log_ratios, as_array(std), weights / weights.sum(), k, reference)


@torch.no_grad()
def cheap_certificate(sampler: Layer | Layers, score: Score, seed: int) -> Certificate | None:
    """Return the certificate of some draws, for at most 1,000 points at which the score is evaluated.

    It is None where the sampler has no density, where log p cannot be found that cheaply, and where the fit has mass
    and the target has none. The density of a hierarchy asks for the score, too, at 20,000 points a layer.
    """
    if not knows_density(sampler):
        return None
    generator = torch.Generator(score.device).manual_seed(seed)
    try:
        if score.log_prob is not None:
            x = sampler.sample(N_CHEAP, generator)
            log_p = score.log_prob(x)
        else:
            x = sampler.sample(N_INTEGRATED, generator)
            log_p, gaps = kronrod(score, sampler.whitening.map.m, x)
            if not gaps.abs().nanquantile(0.95) <= MAX_GAP:
                return None
        found = weigh(x, log_p, lambda x: sampler.log_density(x, N_DRAWS)).certificate()
    except Exception:  # a fit is not to fail by this, whatever its score may raise
        return None
    return found if all(math.isfinite(number) for number in found) else None
