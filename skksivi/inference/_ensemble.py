"""Several fits to one target, pooled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from joblib import Parallel, delayed
from numpy.typing import ArrayLike
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from skksivi._utils.arrays import RandomState, as_array, as_tensor, make_rng, make_seed, resolve_device
from skksivi._utils.checks import check_integer, warn_caller
from skksivi._utils.monte_carlo import most_trusted
from skksivi.base import BaseApproximator, check_approximator
from skksivi.families._derived import Pooled, knows_density
from skksivi.families._weights import LEAST_DRAWS, MOST_LEFT_OUT, Estimate, ImportanceSample, importance_weights
from skksivi.pilot._chains import rhat
from skksivi.score._target import TargetOrScore, compared_score, unwrapped
from skksivi.training._run import ordinary_mode

#: Draws of each fit that are compared, and the R-hat of a coordinate above which fits are reported to disagree.
N_COMPARED, MAX_RHAT = 1000, 1.05


A = TypeVar("A", bound=BaseApproximator)


class FailedFit(NamedTuple):
    """A fit that raised something.

    Attributes
    ----------
    seed : int
        Its `random_state`.
    message : str
        What it raised.
    """

    seed: int
    message: str


@dataclass(frozen=True, eq=False)
class Ensemble(Generic[A]):
    """Fits to one target, and a sampler of their mixture.

    Attributes
    ----------
    members : tuple of approximator
        The fits that succeeded.
    weights : ndarray of shape (k,)
        Their shares of the draws, which sum to one.
    elbo : ndarray of shape (k,) or None
        E_q[log p - log q] of each, from the draws that determined the weights; None if the weights are equal.
    log_z : Estimate or None
        The log evidence, from the draws of all fits.
    r_hat : ndarray of shape (n_features,)
        How far the fits disagree, one if they do not: the larger R-hat of ranks and folded ranks, with fits instead
        of chains. NaN for a single fit.
    failures : tuple of FailedFit
        The fits that failed.
    pooled : approximator
        An approximator that draws from all of them, for functions that take a fit, such as `skksivi.modes` and
        `skksivi.importance_sample`.
    """

    members: tuple[A, ...]
    weights: np.ndarray
    elbo: np.ndarray | None
    log_z: Estimate | None
    r_hat: np.ndarray
    failures: tuple[FailedFit, ...]
    pooled: A

    def sample(self, n_samples: int = 1, random_state: RandomState = None) -> np.ndarray:
        """Draw from all fits by their weights, shape (n_samples, n_features), see `BaseApproximator.sample`."""
        return self.pooled.sample(n_samples, random_state)

    def score_samples(self, X: ArrayLike, *, return_std: bool = False) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Evaluate the log-density of the mixture of fits, see `BaseApproximator.score_samples`."""
        return self.pooled.score_samples(X, return_std=return_std)


def ensemble(
    est: A,
    target: TargetOrScore,
    n_fits: int = 4,
    *,
    pooling: str = "evidence",
    n_samples: int = 1000,
    n_features: int | None = None,
    n_jobs: int | None = None,
    random_state: RandomState = None,
) -> Ensemble[A]:
    r"""Fit several times from different seeds, and pool the fits.

    With ``pooling="evidence"`` the weights belong to the mixture :math:`q_w = \sum_i w_i q_i` with the least upper
    bound on the log evidence,

    .. math:: \min_w E_p[\log p - \log q_w] \ge \log Z,

    a convex problem: two fits to the same mode share its weight, and a wrong fit gets none. The mean under p is
    estimated by importance weights of draws of all fits, as in `skksivi.evidence`. A fit that fails is left out.

    Parameters
    ----------
    est : approximator
        With a `random_state`, which is replaced.
    target : Target or callable
        As for `fit`.
    n_fits : int, default=4
    pooling : {"evidence", "equal"}, default="evidence"
        "equal" needs no density and evaluates no score.
    n_samples : int, default=1000
        Number of draws to determine the weights, at least 100. For a target without `log_prob` each costs some 50
        scores.
    n_features : int, default=None
        Needed with a bare score function.
    n_jobs : int, default=None
        Number of parallel fits, as in joblib; ``joblib.parallel_config("dask")`` sends them to a cluster.
    random_state : int, RandomState or None, default=None
        Determines the seeds of the fits, independent of `n_jobs`.

    Returns
    -------
    ensemble : Ensemble
        With ``sample`` and ``score_samples``, ``weights`` and ``r_hat``.

    Raises
    ------
    TypeError
        `est` is not an approximator, or one of its fits has no density where pooling is by evidence.
    ValueError
        A parameter is out of its range.
    RuntimeError
        No fit succeeded.

    Warns
    -----
    UserWarning
        Fits failed; or the importance weights cannot be trusted, so that all fits get equal weights.
    ConvergenceWarning
        The fits disagree: R-hat is above 1.05 in some coordinate.

    See Also
    --------
    KSIVIApproximator : One semi-implicit layer, the first choice.
    diagnose : A report on a fit.

    References
    ----------
    Margossian, C. et al. (2024). Nested R-hat: assessing the convergence of Markov chain Monte Carlo when running
    many short chains. Bayesian Analysis.

    Yao, Y., Vehtari, A. and Gelman, A. (2022). Stacking for non-mixing Bayesian computations. JMLR 23(79).

    Examples
    --------
    >>> from skksivi import ensemble
    >>> from skksivi.baselines import Laplace
    >>> from skksivi.targets import Banana
    >>> found = ensemble(Laplace(), Banana(), n_fits=2, pooling="equal", random_state=0)
    >>> found.sample(1000).shape
    (1000, 2)
    >>> found.r_hat.round(2)
    array([1., 1.])
    """
    check_approximator(est, target)
    if pooling not in ("evidence", "equal"):
        raise ValueError(f"`pooling` must be 'evidence' or 'equal', got {pooling!r}.")
    check_integer(n_fits, "n_fits", min_val=1)
    check_integer(n_samples, "n_samples", min_val=LEAST_DRAWS)
    unwrapped(target, n_features)
    rng = make_rng(random_state)
    seeds = [make_seed(rng) for _ in range(n_fits)]
    found = Parallel(n_jobs)(delayed(_fitted)(est, target, n_features, seed) for seed in seeds)
    failures = tuple(fit for fit in found if isinstance(fit, FailedFit))
    members = tuple(fit for fit in found if not isinstance(fit, FailedFit))
    if not members:
        raise RuntimeError(f"None of the {n_fits} fits succeeded. {_reasons(failures)}")
    if failures:
        warn_caller(f"{len(failures)} of {n_fits} fits failed and are left out. {_reasons(failures)}")
    equal = torch.full((len(members),), 1 / len(members), dtype=torch.float64, device=members[0].device_)
    weights, elbo, log_z = equal, None, None
    if pooling == "evidence":
        pool = Pooled(tuple(member.sampler_ for member in members), equal)
        weights, elbo, log_z = _by_evidence(_pooled(members, equal, seeds[0]), pool, target, n_samples, seeds[0])
    r_hat = disagreements([member.sample(N_COMPARED, seed) for member, seed in zip(members, seeds, strict=False)])
    if (r_hat > MAX_RHAT).any():
        worst = int(np.nanargmax(r_hat))
        warn_caller(
            f"The fits disagree: R-hat is {r_hat[worst]:.2f} in `x[{worst}]`, above the limit of {MAX_RHAT}. "
            "Some have missed modes or have not converged: give all modes that they have found as `init`, or see "
            "`members` one by one, by `skksivi.diagnose`.",
            ConvergenceWarning,
        )
    pooled = _pooled(members, weights, make_seed(rng))
    return Ensemble(members, as_array(weights), elbo, log_z, r_hat, failures, pooled)


def _fitted(est: A, target: TargetOrScore, n_features: int | None, seed: int) -> A | FailedFit:
    """Return a fit of a copy of `est`, or why there is none."""
    try:
        return clone(est).set_params(random_state=seed).fit(target, n_features=n_features)
    except Exception as error:
        return FailedFit(seed, f"{type(error).__name__}: {error}")


def _reasons(failures: tuple[FailedFit, ...]) -> str:
    return f"The first, of seed {failures[0].seed}: {failures[0].message.rstrip('.')}."


def _pooled(members: tuple[A, ...], weights: Tensor, seed: int) -> A:
    """Return a fit that draws from some fits by their weights."""
    first = members[0]
    made = clone(first)
    made.__dict__.update(
        sampler_=Pooled(tuple(member.sampler_ for member in members), weights),
        n_features_in_=first.n_features_in_,
        device_=first.device_,
        n_score_calls_=sum(member.n_score_calls_ for member in members),
        n_products_=sum(member.n_products_ for member in members),
        _seed=seed,
        _random_state=np.random.RandomState([seed, 1]),
        _dtype_of_draws=max(vars(member)["_dtype_of_draws"] for member in members),  # float64 is after float32
    )
    return made


def _by_evidence(
    pooled: A, pool: Pooled, target: TargetOrScore, n_samples: int, seed: int
) -> tuple[Tensor, np.ndarray | None, Estimate | None]:
    """Return the weights of the fits in a pool of equal weights, the ELBO of each and the log evidence."""
    if not knows_density(pool):
        raise TypeError("`pooling` is 'evidence', but the fits have no density; set pooling='equal'.")
    device = resolve_device(pooled.device_)
    with ordinary_mode(device), torch.no_grad():
        score = compared_score(target, pooled.n_features_in_, pooled.dtype, pooled.device_)
        x = as_tensor(pooled.sample(n_samples, seed), dtype=torch.float64, device=device)
        try:
            sample = importance_weights(pool, score, x, seed)
        except ValueError as error:
            reason = str(error).rstrip(".")
        else:
            if (reason := _doubt(sample)) == "":
                log_q = pool.log_densities(as_tensor(sample.X, device=device))
                w = best_weights(log_q, as_tensor(sample.weights, device=device))
                return w, _elbo(sample, as_array(log_q)), sample.evidence().log_z
    warn_caller(
        f"The fits get equal weights, because the importance weights of their draws cannot be trusted: {reason}. "
        "Improve the fits, or weight separated modes by `skksivi.modes(ensemble.pooled, target, reweight=True)`."
    )
    return pool.weights, None, None


def _doubt(sample: ImportanceSample) -> str:
    """Say why weights of draws are too uncertain to weigh fits by, nothing if they are not."""
    n, n_effective = len(sample.weights), sample.share * len(sample.weights)
    if sample.k > most_trusted(n) or n_effective < LEAST_DRAWS:
        return (
            f"their tail has the shape k = {sample.k:.2f} ({most_trusted(n):.2f} is allowed), and they are worth "
            f"{n_effective:.0f} draws ({LEAST_DRAWS} are needed)"
        )
    if sample.left_out > MOST_LEFT_OUT:
        return f"the log-density of the target is unknown at {sample.left_out:.0%} of the draws"
    return ""


def _elbo(sample: ImportanceSample, log_q: np.ndarray) -> np.ndarray:
    """Return E_q[log p - log q] (k,) of fits with log-densities (n, k) at the draws of all of them."""
    log_pool = np.logaddexp.reduce(log_q, 1) - np.log(log_q.shape[1])
    with np.errstate(invalid="ignore"):
        ratios = np.exp(log_q - log_pool[:, None])
        v = sample.weights_of_fit[:, None] * np.nan_to_num(ratios)
        log_p = sample.log_ratios + log_pool
        return np.where(v > 0, v * (log_p[:, None] - log_q), 0.0).sum(0) / v.sum(0)


def best_weights(log_q: Tensor, omega: Tensor) -> Tensor:
    r"""Return the weights w (k,) that maximise :math:`\sum_j \omega_j \log \sum_i w_i q_i(x_j)`, by EM.

    Parameters
    ----------
    log_q : Tensor of shape (n, k)
        Log-densities of the fits.
    omega : Tensor of shape (n,)
        Weights of the draws. Those where no fit has a density are left out.
    """
    seen = log_q.isfinite().any(1)
    log_q, omega = log_q[seen], omega[seen] / omega[seen].sum()
    w = torch.full_like(log_q[0], 1 / log_q.shape[1])
    for _ in range(1000):
        w = omega @ (log_q + w.log()).softmax(1)
    return w / w.sum()


def disagreements(samples: list[np.ndarray]) -> np.ndarray:
    """Return the larger R-hat (d,) of ranks and of folded ranks of independent draws (n, d) of several fits."""
    if len(samples) == 1:
        return np.full(samples[0].shape[1], np.nan)
    x = torch.stack([as_tensor(X, dtype=torch.float64) for X in samples], 1)
    folded = (x - x.flatten(0, 1).median(0).values).abs()
    return as_array(torch.maximum(*(rhat(_normal_scores(part)) for part in (x, folded))))


def _normal_scores(x: Tensor) -> Tensor:
    """Return the normal quantiles of the ranks of x (n, k, d) in each coordinate."""
    flat = x.flatten(0, 1)
    ranks = flat.argsort(0).argsort(0).to(x)
    return torch.special.ndtri((ranks + 0.625) / (len(flat) + 0.25)).view_as(x)
