"""Importance weights of the draws of a fit, and a fit that draws by them."""

from __future__ import annotations

import copy
from typing import TypeVar

import numpy as np
import torch

from skksivi._utils.arrays import RandomState, make_seed, resolve_device
from skksivi._utils.checks import check_integer, warn_caller
from skksivi.base import BaseApproximator, check_finite, check_fit, without_density
from skksivi.families._derived import DefensiveMixture, Refined, knows_density
from skksivi.families._samplers import Sampler
from skksivi.families._weights import (
    LEAST_DRAWS,
    SHARE,
    Certificate,
    Evidence,
    ImportanceSample,
    check_trusted,
    importance_weights,
)
from skksivi.pilot._log_density import origin_of
from skksivi.score._score import Score, ScoreFunction
from skksivi.score._target import compared_score
from skksivi.targets._base import Target
from skksivi.training._run import ordinary_mode

A = TypeVar("A", bound=BaseApproximator)


def importance_sample(
    est: BaseApproximator, target: Target | ScoreFunction, *, n_samples: int = 2000, random_state: RandomState = None
) -> ImportanceSample:
    r"""Weight draws of a fit by the density of its target.

    Half of the draws are the fit's. The others come from Gaussians with its mean that are wider, in all directions or
    along one coordinate, so that a halo or a tail that the fit lacks is found and no ratio is far from the rest. The
    ratios of p to the density of all draws are smoothed by the generalised Pareto distribution of their tail. For a
    target without `log_prob`, log p is the integral of its score along lines from a mode, at about ten
    points per draw, or some 50 where these do not do.

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
        With ``certificate()``, ``evidence()`` and ``expectation(f)``.

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

    Hesterberg, T. (1995). Weighted average importance sampling and defensive mixture distributions. Technometrics
    37(2).

    Examples
    --------
    >>> from skksivi import importance_sample
    >>> from skksivi.baselines import Laplace
    >>> from skksivi.targets import Banana
    >>> sample = importance_sample(Laplace().fit(Banana()), Banana(), random_state=0)
    >>> sample.trusted
    False
    """
    return importance_draws(est, target, n_samples, random_state)[1]


def importance_draws(
    est: BaseApproximator,
    target: Target | ScoreFunction,
    n_samples: int,
    random_state: RandomState,
    share: float = SHARE,
) -> tuple[Score, ImportanceSample]:
    """Return the score of a target, for float64 points, and draws, a share of a fit, with weights by it."""
    check_fit(est, target)
    check_integer(n_samples, "n_samples", min_val=LEAST_DRAWS)
    device = resolve_device(est.device_)
    with ordinary_mode(device), torch.no_grad():
        score = compared_score(target, est.n_features_in_, est.dtype, est.device_)
        if not knows_density(est.sampler_):
            raise TypeError(f"{without_density(est)}, so its draws have no weights; use one that has.")
        seed = make_seed(random_state)
        x = torch.as_tensor(est.sample(n_samples, seed), dtype=torch.float64, device=device)
        check_finite(x, score)
        sample = importance_weights(est.sampler_, score, x, seed, share)
    n, n_left = round(share * n_samples), int(sample.of_fit.sum())
    if n_left < n:
        warn_caller(f"{n - n_left} of {n} draws are left out: the density of `target` is NaN there.")
    return score, sample


def refine(est: A, target: Target | ScoreFunction, *, n_samples: int = 2000, random_state: RandomState = None) -> A:
    r"""Correct a fit by the importance weights of its draws.

    The returned fit proposes draws x of `est`, and some from wider Gaussians for tails that it lacks, and keeps them
    with probability

    .. math:: \min\left(1, \frac{p(x)}{c\, q(x)}\right), \qquad E_q \max\left(0, \frac{p(x)}{q(x)} - c\right) = 0.003

    for normalised p: the kept draws are independent, and follow the target up to 0.3% of its mass. A mode or a tail
    that no draw of `est` comes near remains lost.

    Parameters
    ----------
    est : approximator
        Fitted, with a density.
    target : Target or callable
        What it was fitted to, or its score function.
    n_samples : int, default=2000
        Number of draws to determine c, at least 100.
    random_state : int, RandomState or None, default=None

    Returns
    -------
    refined : approximator
        A copy of `est` with corrected draws and their density, until its next `fit`. A draw costs about c densities
        of the fit and of the target, between one and a few tens. To load a file of it, see `skksivi.save`, pass the
        target.

    Raises
    ------
    NotFittedError
        Before `fit`.
    TypeError
        The fit has no density, or `n_samples` is not an integer.
    ValueError
        The weights are not reliable, see `importance_sample`; or the target does not have the dimension of `est`.

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
    check_fit(est, target)
    while isinstance(est.sampler_, Refined | DefensiveMixture):
        est = _with_sampler(est, est.sampler_.sampler)
    for share in (0.9, SHARE):  # where the fit lacks a halo or a tail, more wide draws are needed
        score, sample = importance_draws(est, target, n_samples, random_state, share)
        if sample.trusted:
            break
    check_trusted(sample, "a refined fit")
    w = np.sort(sample.weights * len(sample.weights))[::-1]
    lost = (np.cumsum(w) - np.arange(1, len(w) + 1) * w) / len(w)
    bound = w[lost <= 0.003][-1]  # of the target, where its ratio to the fit is largest
    acceptance = float(np.minimum(sample.weights * len(sample.weights) / bound, 1).mean())
    with ordinary_mode(score.device), torch.no_grad():
        proposal = DefensiveMixture.of(est.sampler_, torch.Generator(score.device).manual_seed(0), share)
        log_bound = float(sample.log_z + np.log(bound))
        return _with_sampler(est, Refined(proposal, score, origin_of(score), log_bound, acceptance))


def _with_sampler(est: A, sampler: Sampler) -> A:
    """Return a copy of a fit with another sampler and a stream of its own."""
    made = copy.copy(est)
    made.__dict__.update(sampler_=sampler, _random_state=copy.deepcopy(vars(est)["_random_state"]))
    if hasattr(est, "verdict_"):
        made.__dict__["verdict_"] = None  # nobody has judged it
    return made


def certificate(
    est: BaseApproximator, target: Target | ScoreFunction, *, n_samples: int = 2000, random_state: RandomState = None
) -> Certificate:
    r"""Estimate how far a fit is from its target, without draws or the normalising constant of the target.

    .. math:: J = \mathrm{KL}(q \| p) + \mathrm{KL}(p \| q) = E_q[\log q - \log p] - E_p[\log q - \log p]

    with the mean under p by the importance weights of the draws. A mode that no draw has reached is not detected,
    whether the weights are reliable (``trusted``) or not.

    Parameters
    ----------
    est, target, n_samples, random_state
        As for `importance_sample`.

    Returns
    -------
    certificate : Certificate
        A named tuple: ``divergence`` in nats, ``se``, ``se_below``, ``k``, ``share`` and ``trusted``.

    See Also
    --------
    diagnose : A report on a fit.
    importance_sample : Draws with importance weights.

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
        ``reference`` point at which p is set to one if the target is known only by its score.

    See Also
    --------
    certificate : An estimate of the divergence from the target.
    importance_sample : Draws with importance weights.

    Examples
    --------
    >>> from skksivi import evidence
    >>> from skksivi.baselines import Laplace
    >>> from skksivi.targets import from_log_prob
    >>> normal = from_log_prob(lambda x: -x.square().sum(-1) / 2, n_features=2)
    >>> round(evidence(Laplace().fit(normal), normal, random_state=0).log_z.value, 2)  # log(2 pi)
    1.84
    """
    return importance_sample(est, target, n_samples=n_samples, random_state=random_state).evidence()
