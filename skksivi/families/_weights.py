"""Importance weights, and what they tell."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from skksivi._utils.arrays import as_array
from skksivi._utils.psis import most_trusted, pareto_smoothed, standard_error
from skksivi.coordinates._lines import kronrod
from skksivi.families._density import N_DRAWS, LogDensity
from skksivi.families._derived import TAILS, Defended, knows_density, sampler_density
from skksivi.families._samplers import Layer, Layers, Sampler
from skksivi.pilot._modes import log_density, origin_of
from skksivi.pilot._pilot import MAX_FEATURES
from skksivi.score._score import Score

#: The fewest draws whose ratio must be finite, and their smallest effective share.
LEAST_DRAWS, LEAST_SHARE = 100, 0.45

#: The largest share of the draws of a fit where log p may be unknown.
MOST_LEFT_OUT = 0.01

#: Draws of a cheap certificate; those where log p is an integral of the score by seven points; and what 95% of these
#: may be off by with four points, in nats, where seven are off by a tenth.
N_CHEAP, N_INTEGRATED, MAX_GAP = 256, 160, 0.5


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
        Its standard error, with what a heavy tail may add that the draws have not shown.
    se_below : float
        Without that: how far the divergence may be below. It is more often underestimated than overestimated.
    k : float
        The shape of the tail of the importance ratios.
    share : float
        The effective share of the draws, between 0 and 1.
    trusted : bool
        Whether k is small enough for the draws to tell of p at all.
    """

    divergence: float
    se: float
    se_below: float
    k: float
    share: float
    trusted: bool


class Evidence(NamedTuple):
    """Bounds on the log evidence, and an estimate; of a target known by its score relative to log p at `reference`.

    Where the weights cannot be trusted the standard errors of `log_z` and `eubo` are infinite.

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
        Nine in ten are draws of the fit; the last are of a Student t distribution with its mean and covariance and
        three degrees of freedom, for tails that it may lack.
    log_ratios : ndarray of shape (n,)
        log p - log q, in nats.
    std : ndarray of shape (n,)
        Standard errors of the log q.
    weights : ndarray of shape (n,)
        Pareto-smoothed ratios of p to the density of both kinds of draws together; they sum to one.
    k : float
        The shape of the tail of these ratios, which have 1/k finite moments.
    log_z : float
        The logarithm of their mean.
    of_fit : ndarray of shape (n,), bool
        Which are draws of the fit.
    weights_of_fit : ndarray of shape (n,)
        Ratios of q to that density; they sum to one.
    reference : ndarray of shape (n_features,) or None
        Where p is one, of a target known by its score alone.
    left_out : float
        The share of the draws of the fit that are not among them, since log p is unknown there: the target's is NaN,
        or the integral of its score leads through too deep a valley.
    """

    X: np.ndarray
    log_ratios: np.ndarray
    std: np.ndarray
    weights: np.ndarray
    k: float
    log_z: float
    of_fit: np.ndarray
    weights_of_fit: np.ndarray
    reference: np.ndarray | None
    left_out: float

    @property
    def share(self) -> float:
        r"""The effective share of the draws, :math:`1 / (n \sum_i w_i^2)`."""
        return float(1 / (len(self.weights) * np.square(self.weights).sum()))

    @property
    def trusted(self) -> bool:
        """Whether k is at most min(1 - 1 / log10(n), 0.7), the share at least 0.45, and 1% left out at most.

        A part of the target that no draw has reached shows in none of these; a small share is the only sign of it.
        """
        reached = self.k <= most_trusted(len(self.weights)) and self.share >= LEAST_SHARE
        return reached and self.left_out <= MOST_LEFT_OUT

    def certificate(self) -> Certificate:
        r"""Return how far the fit is from the target.

        .. math:: J = \mathrm{KL}(q \| p) + \mathrm{KL}(p \| q) = E_q \ell - E_p \ell, \qquad
            \ell = \log q - \log p,

        in which the normaliser of p cancels; what the errors of log q add is taken off. Draws of the Student t where
        not one draw of the fit is likely have no say in the mean under q: log p may be of any size there.
        """
        n, w, ell = len(self.weights), self.weights, -self.log_ratios
        if np.isinf(ell[self.of_fit]).any():  # the fit has mass where the target has none
            return Certificate(math.inf, 0.0, 0.0, self.k, self.share, self.trusted)
        v = np.where(self.weights_of_fit < 1 / n**2, 0.0, self.weights_of_fit)
        ell = np.where(((v > 0) | (w > 0)) & np.isfinite(ell), ell, 0.0)
        under_q, under_p = v @ ell, w @ ell
        influence = n * v * (ell - under_q) - n * w * (ell - under_p)
        divergence = float(under_q - under_p - np.square(self.std[self.of_fit]).mean())
        se_below = float(influence.std() / math.sqrt(n))
        return Certificate(divergence, standard_error(influence), se_below, self.k, self.share, self.trusted)

    def evidence(self) -> Evidence:
        """Return bounds on the log evidence, and its estimate by importance sampling.

        The errors of log q, which the draws may share, and what heavy tails of the ratios may add that the draws have
        not shown are in the standard errors. These are infinite where the
        weights cannot be trusted. Where the target has no density at some draws the lower bound is -inf.
        """
        n, w, own = len(self.weights), self.weights, self.log_ratios[self.of_fit]
        r = self.log_ratios[w > 0]
        eubo, shared = float(w[w > 0] @ r), float(w @ self.std) if self.trusted else math.inf
        elbo = Estimate(-math.inf, 0.0)
        if np.isfinite(own).all():
            elbo = Estimate(float(own.mean()), math.hypot(standard_error(own), self.std[self.of_fit].mean()))
        return Evidence(
            elbo,
            Estimate(self.log_z, math.hypot(standard_error(n * w), shared)),
            Estimate(eubo, math.hypot(standard_error(n * w[w > 0] * (r - eubo)), shared)),
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


def check_trusted(sample: ImportanceSample, what: str) -> None:
    """Raise ValueError unless the weights can be trusted."""
    if sample.left_out > MOST_LEFT_OUT:
        raise ValueError(
            f"The log-density of the target is unknown at {sample.left_out:.0%} of the draws, beyond a deep valley "
            f"where the target is known by its score alone: {what} would lack that part. Give it a `log_prob`."
        )
    if not sample.trusted:
        raise ValueError(
            f"The importance ratios have a tail of shape k = {sample.k:.2f} ({most_trusted(len(sample.X)):.2f} is "
            f"allowed), and the draws have an effective share of {sample.share:.2f} ({LEAST_SHARE} is needed): "
            f"{what} would rest on a few draws. Improve the fit first, see `diagnose`."
        )


def importance_weights(sampler: Sampler, score: Score, x: Tensor, seed: int) -> ImportanceSample:
    """Return draws x (n, d) of a sampler, the last of them replaced by its defended tails, with their weights.

    Raises
    ------
    ValueError
        The target has no density at nearly all of them.
    """
    origin = origin_of(score)
    defended, x = with_tails(sampler, x, seed)
    return weigh(defended, x, log_density(score, origin, x), None if origin is None else as_array(origin.m))


def with_tails(sampler: Sampler, x: Tensor, seed: int) -> tuple[Defended, Tensor]:
    """Return a sampler with defended tails, and draws x (n, d) of it whose last are of these tails."""
    generator, n_tails = torch.Generator(x.device).manual_seed(seed ^ 2), round(TAILS * len(x))  # others than x
    defended = Defended.of(sampler, generator)
    return defended, torch.cat([x[: len(x) - n_tails], defended.tails(n_tails, generator)])


def weigh(
    defended: Defended,
    x: Tensor,
    log_p: Tensor,
    reference: np.ndarray | None = None,
    log_density: Callable[[Tensor], LogDensity] | None = None,
) -> ImportanceSample:
    """Return draws x (n, d) `with_tails`, with log p (n,), and their weights, without those where log p is NaN.

    Raises
    ------
    ValueError
        The target has no density at nearly all of them.
    """
    of_fit = torch.arange(len(x), device=x.device) < len(x) - round(TAILS * len(x))
    kept, n_inside = ~(log_p.isnan() | log_p.isposinf()), int((log_p.isfinite() & of_fit).sum())
    if n_inside < (1 - TAILS) * LEAST_DRAWS:
        raise ValueError(
            f"`target` has a finite log-density at {n_inside} of {int(of_fit.sum())} draws; "
            f"{(1 - TAILS) * LEAST_DRAWS:.0f} are needed."
        )
    left_out = float((of_fit & ~kept).sum() / of_fit.sum())
    n, x, log_p, of_fit = len(x) - int((of_fit & ~kept).sum()), x[kept], log_p[kept], of_fit[kept]
    of_sampler = (log_density or sampler_density(defended.sampler).log_density)(x)
    log_m = defended.mixed(of_sampler, x).value
    log_ratios, log_q, std = as_array(log_p - log_m), *map(as_array, of_sampler)
    inside = np.isfinite(log_ratios)
    log_weights, k = pareto_smoothed(log_ratios[inside])
    top, weights = log_ratios[inside].max(), np.zeros(len(log_ratios))
    weights[inside] = np.exp(log_weights - log_weights.max())
    log_z = float(np.log(np.exp(log_ratios[inside] - top).sum() / n) + top)
    own, v = as_array(of_fit), as_array((of_sampler.value - log_m).softmax(0))
    differences, weights = as_array(log_p) - log_q, weights / weights.sum()
    return ImportanceSample(as_array(x), differences, std, weights, k, log_z, own, v, reference, left_out)


@torch.no_grad()
def cheap_certificate(sampler: Layer | Layers, score: Score, seed: int, times: int = 1) -> Certificate | None:
    """Return the certificate of some draws, for at most 1,000 values of the score, or `times` as many.

    It is None if the sampler has no density or more than 1,000 features, if log p cannot be found that cheaply, or if
    the fit has mass where the target has none. It does not depend on coordinates: draws are of the target that is
    straightened. The density of a hierarchy also evaluates the score, at 20,000 points
    per layer.
    """
    if not knows_density(sampler) or sampler.n_features > MAX_FEATURES:
        return None
    score, sampler = sampler.whitening.straighten(score), replace(sampler, whitening=sampler.whitening.straight)
    generator = torch.Generator(score.device).manual_seed(seed)
    try:
        if score.log_prob is not None:
            defended, x = with_tails(sampler, sampler.sample(times * N_CHEAP, generator), seed)
            log_p = score.log_prob(x)
        else:
            defended, x = with_tails(sampler, sampler.sample(times * N_INTEGRATED, generator), seed)
            log_p, gaps = kronrod(score, sampler.whitening.map.m, x)
            if not gaps[: len(x) - round(TAILS * len(x))].abs().nanquantile(0.95) <= MAX_GAP:
                return None
        found = weigh(defended, x, log_p, log_density=lambda x: sampler.log_density(x, N_DRAWS)).certificate()
    except Exception:  # a fit is not to fail by this, whatever its score may raise
        return None
    return found if all(math.isfinite(number) for number in found) else None
