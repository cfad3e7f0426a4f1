"""Weighted draws of a fit: those it has kept, more of them, and a fit that draws by them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from skksivi._utils.arrays import RandomState, as_array, make_seed, resolve_device
from skksivi._utils.checks import check_integer, check_number, warn_caller
from skksivi._utils.log import LONG_WAIT, tell
from skksivi.base import BaseApproximator, check_finite, check_fit, without_density
from skksivi.coordinates._affine import Affine
from skksivi.families._derived import SHARE, DefensiveMixture, Refined, knows_density
from skksivi.families._samplers import Sampler
from skksivi.families._weights import LEAST_DRAWS, Source, kept_draws
from skksivi.judge import Evidence, WeightedDraws
from skksivi.pilot._mixture import gaussian_of
from skksivi.score._score import Score, ScoreFunction
from skksivi.score._tally import BudgetError, Tally
from skksivi.score._target import compared_score
from skksivi.targets._base import Target
from skksivi.training._run import ordinary_mode

#: Weighted draws of a fit that has kept none, those that are added at a time, and the most that `within` may take.
N_DRAWS, N_ADDED, MOST_DRAWS = 2000, 2048, 2**17

#: The difference of log p at kept draws, in nats, beyond which a target is another one.
SAME = 0.01

A = TypeVar("A", bound=BaseApproximator)


class Limits(NamedTuple):
    """How many weighted draws there are to be: their number, or the largest standard error, and the most calls."""

    n_samples: int | None = None
    within: float | None = None
    max_score_calls: int | None = None

    def check(self) -> None:
        """Raise unless they are None or in their range."""
        if self.n_samples is not None:
            check_integer(self.n_samples, "n_samples", min_val=LEAST_DRAWS)
        if self.within is not None:
            check_number(self.within, "within", min_val=1e-4, max_val=10.0)
        if self.max_score_calls is not None:
            check_integer(self.max_score_calls, "max_score_calls", min_val=1)


def weighted_draws_of(
    est: BaseApproximator,
    target: Target | ScoreFunction | None,
    largest_se: Callable[[WeightedDraws], float],
    limits: Limits,
    random_state: RandomState = None,
) -> tuple[WeightedDraws, Score | None]:
    """Return the weighted draws that a fit has kept or, given its target, more of them, which it keeps, too; and the
    score of the target.
    """
    check_fit(est, target)
    kept: WeightedDraws | None = getattr(est, "weighted_draws_", None)
    if target is None:
        if named := [name for name, value in limits._asdict().items() if value is not None]:
            raise ValueError(f"`{named[0]}` asks for further draws, which need `target`: pass it as well.")
        if kept is None:
            why = f"This fit of {type(est).__name__} has kept no weighted draws"
            why = why if knows_density(est.sampler_) else without_density(est)
            raise ValueError(f"{why}: pass `target`, the one that it was fitted to.")
        return kept, None
    limits.check()
    with ordinary_mode(resolve_device(est.device_)), torch.no_grad():
        score = compared_score(target, est.n_features_in_, est.dtype, est.device_)
        if not knows_density(est.sampler_):
            raise TypeError(f"{without_density(est)}, so its draws have no weights; use one that has.")
        check_finite(X := est.sample(LEAST_DRAWS, 0), score)
        x = torch.as_tensor(X[:2], dtype=torch.float64, device=score.device)
        if not torch.allclose(score(x), score(x), rtol=1e-3, equal_nan=True):
            raise ValueError("`target` has a score that is random; an exact one is needed, of all data.")
        score.tally.begin("weighted draws")
        seed = make_seed(random_state) if kept is None or random_state is not None else kept.seed
        before = kept if kept is not None and kept.seed == seed else None
        source = Source(est.sampler_, score, seed, before=before, is_exact=True)
        is_own = kept is None or is_same(kept, source)
        if before is not None and not is_own:
            before, source = None, Source(est.sampler_, score, seed, is_exact=True)
        if limits.max_score_calls is not None:
            score.tally.limit = score.tally.total + limits.max_score_calls
        draws = _drawn(source, before, largest_se, limits)
    if draws.n_left_out > (before.n_left_out if before is not None else 0):
        n = draws.n_left_out + int(draws.of_fit.sum())
        warn_caller(f"{draws.n_left_out} of {n} draws are left out: the density of `target` is NaN there.")
    if draws is not before and is_own:
        est.__dict__["weighted_draws_"] = kept_draws(draws, score)
    return replace(draws, up_to_constant=score.up_to_constant, data=score.data), score


def is_same(kept: WeightedDraws, source: Source) -> bool:
    """Tell whether log p at some kept draws is what it was."""
    rows = np.flatnonzero(kept.of_fit & np.isfinite(kept.log_p))[:4]
    x, log_m = (torch.as_tensor(a[rows], device=source.score.device) for a in (kept.X, kept.log_m))
    log_p = source.log_prob(x, log_m)
    if log_p is None:
        return False
    return bool((np.abs(as_array(log_p) - kept.log_p[rows]) < SAME + 1e-5 * np.abs(kept.log_p[rows])).all())


def _drawn(
    source: Source,
    draws: WeightedDraws | None,
    largest_se: Callable[[WeightedDraws], float],
    limits: Limits,
) -> WeightedDraws:
    """Return weighted draws that follow others, as many as are asked for, or as the limit of the calls allows."""
    tally, within, error = source.score.tally, limits.within, math.inf
    most = limits.n_samples or (MOST_DRAWS if within is not None else N_DRAWS if draws is None else 0)
    if within is not None:  # of the numbers of the fit
        source.free, source.n_free = None, max(source.n_free, int(4 / within**2))
    while draws is None or len(draws.X) + draws.n_left_out < most:
        n, needed, before = 0 if draws is None else len(draws.X), most, error
        if within is not None and draws is not None:
            error = largest_se(draws)
            needed = min(most, max(N_DRAWS, int(1.1 * n * min(error / within, 8.0) ** 2)))
            if error <= within or error > 0.95 * before:  # which more draws do not lower
                break
        least, first = (1.0, 1.0) if source.score.log_prob is not None else (3.0, 12.0)
        cost = first if draws is None else max(least, draws.n_calls / n)
        left = math.inf if tally.left is None else tally.left
        if before == math.inf:  # at first
            _tell(min(cost * (needed - n), left), tally)
        step = int(min(needed, max(n + N_ADDED, 2 * n), n + 0.9 * left / cost))
        try:
            found = source.draw(step) if step > (n if n else LEAST_DRAWS - 1) else None
        except BudgetError:
            found = None
        if found is None:
            break
        draws = found
    if draws is None:
        raise ValueError(
            f"`max_score_calls` does not suffice for {LEAST_DRAWS} weighted draws, at about {cost:.0f} calls each; "
            "raise it."
        )
    return draws


def _tell(n_calls: float, tally: Tally) -> None:
    """Say what further draws cost, if they take long."""
    seconds = n_calls * tally.seconds_per_call
    if seconds > LONG_WAIT:
        line = "Further weighted draws take up to %s score calls, at %.2g s each, %s s in all."
        tell(line, f"{n_calls:,.0f}", tally.seconds_per_call, f"{seconds:,.0f}")


def _se_of_means(draws: WeightedDraws) -> float:
    """Return the largest standard error of a mean of the coordinates, in sd."""
    if not draws.trusted:
        return math.inf
    mean_se, sd = draws.means(draws.X, draws.draws)[1], draws.draws.std(0)
    return float((mean_se / np.maximum(sd, np.finfo(np.float64).tiny)).max())


def importance_sample(
    est: BaseApproximator,
    target: Target | ScoreFunction | None = None,
    *,
    n_samples: int | None = None,
    within: float | None = None,
    max_score_calls: int | None = None,
    random_state: RandomState = None,
) -> WeightedDraws:
    r"""Return weighted draws of a fit for its target: those that the fit has kept, at no call of the score, or more.

    Half of the draws are the fit's. The others come from Gaussians with its mean that are wider, in all directions or
    along one coordinate, so that a halo or a tail that the fit lacks is found and no ratio is far from the rest. The
    ratios of p to the density of all draws are smoothed by the generalised Pareto distribution of their tail. For a
    target without `log_prob`, log p is the integral of its score along lines from a mode, at three to ten points per
    draw, or some 50 where these do not do.

    Parameters
    ----------
    est : approximator
        Fitted, with a density.
    target : Target or callable, default=None
        What it was fitted to, or its score function. None takes the draws that the fit has kept, `weighted_draws_`.
        Given the target the fit keeps what is drawn; a fit that has kept none gets 2,000.
    n_samples : int, default=None
        How many draws there are to be, at least 100.
    within : float, default=None
        They are drawn until the largest standard error of a mean, in standard deviations, is below this.
    max_score_calls : int, default=None
        The most calls of the score, checks of the target aside; what was drawn until then is used.
    random_state : int, RandomState or None, default=None
        With a number, all draws are new.

    Returns
    -------
    draws : WeightedDraws
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
        The fit has kept no draws, and there is no `target`; that has another dimension than `est`, or fewer than 100
        ratios are finite.

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
    >>> q = Laplace().fit(Banana())
    >>> importance_sample(q, Banana(), random_state=0).trusted
    False
    >>> len(importance_sample(q).X)  # what it has kept
    2000
    """
    limits = Limits(n_samples, within, max_score_calls)
    return weighted_draws_of(est, target, _se_of_means, limits, random_state)[0]


def evidence(
    est: BaseApproximator,
    target: Target | ScoreFunction | None = None,
    *,
    n_samples: int | None = None,
    within: float | None = None,
    max_score_calls: int | None = None,
    random_state: RandomState = None,
) -> Evidence:
    r"""Estimate the log evidence :math:`\log Z = \log \int p(x)\, dx`, and bounds on it.

    .. math:: E_q[\log p - \log q] \le \log Z \le E_p[\log p - \log q]

    Parameters
    ----------
    est, target, n_samples, within, max_score_calls, random_state
        As for `importance_sample`; `within` limits the standard error of :math:`\log Z`, in nats.

    Returns
    -------
    evidence : Evidence
        A named tuple: ``elbo``, ``log_z`` and ``eubo``, each with its standard error, ``k``, ``trusted`` and the
        ``reference`` point at which p is set to one if the target is known only by its score.

    See Also
    --------
    importance_sample : Weighted draws, and the divergence of the fit.
    compare : The evidence of several models.

    Examples
    --------
    >>> from skksivi import evidence
    >>> from skksivi.baselines import Laplace
    >>> from skksivi.targets import from_log_prob
    >>> normal = from_log_prob(lambda x: -x.square().sum(-1) / 2, n_features=2)
    >>> round(evidence(Laplace().fit(normal), normal, random_state=0).log_z.value, 2)  # log(2 pi)
    1.84
    """

    def se(draws: WeightedDraws) -> float:
        return float(draws.evidence().log_z.se)

    limits = Limits(n_samples, within, max_score_calls)
    return weighted_draws_of(est, target, se, limits, random_state)[0].evidence()


def refine(
    est: A, target: Target | ScoreFunction, *, n_samples: int | None = None, random_state: RandomState = None
) -> A:
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
    n_samples : int, default=None
        Number of weighted draws to determine c, see `importance_sample`.
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
    draws, score = weighted_draws_of(est, target, _se_of_means, Limits(n_samples), random_state)
    draws.check_trusted("a refined fit")
    acceptance, bound, share = max(_accepted(draws, share) for share in (0.9, 0.7, SHARE))
    device = resolve_device(est.device_)
    with ordinary_mode(device), torch.no_grad():
        of_wide = torch.Generator(device).manual_seed(draws.seed ^ 2)
        proposal = replace(DefensiveMixture.of(est.sampler_, of_wide), share=share)
        origin = None if draws.reference is None else _origin(draws, device)
        log_bound = draws.log_z + math.log(bound)
        return _with_sampler(est, Refined(proposal, score, origin, log_bound, acceptance))


def _accepted(draws: WeightedDraws, share: float) -> tuple[float, float, float]:
    """Return the share of proposals that rejection keeps where so many of them are the fit's, and the bound c of the
    ratios, with this share.
    """
    n, v, w = len(draws.X), np.exp(draws.log_q - draws.log_m), draws.weights
    mass = (share * v + (1 - share) / (1 - SHARE) * (1 - SHARE * v).clip(0)) / n  # of the rows, under such proposals
    ratios = w / np.maximum(mass, np.finfo(np.float64).tiny)
    order = np.argsort(-ratios, kind="stable")
    lost = np.cumsum(w[order]) - ratios[order] * np.cumsum(mass[order])
    bound = ratios[order][lost <= 0.003][-1]  # of the target, where its ratio to the proposals is largest
    return float(np.minimum(w / bound, mass).sum()), float(bound), share


def _origin(draws: WeightedDraws, device: torch.device) -> Affine:
    """Return a map to where p is one."""
    L = gaussian_of(torch.as_tensor(draws.draws, device=device)).L
    return Affine(torch.as_tensor(draws.reference, device=device), L)


def _with_sampler(est: A, sampler: Sampler) -> A:
    """Return a copy of a fit with another sampler and a stream of its own."""
    made = copy.copy(est)
    made.__dict__.update(sampler_=sampler, _random_state=copy.deepcopy(vars(est)["_random_state"]))
    if hasattr(est, "verdict_"):
        made.__dict__["verdict_"] = None  # nobody has judged it
    made.__dict__.pop("weighted_draws_", None)
    return made
