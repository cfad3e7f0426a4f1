"""Means of functions under a target, by draws, their scores and Stein control variates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from skksivi._utils.arrays import (
    RandomState,
    as_array,
    as_numbers,
    as_tensor,
    check_function,
    make_seed,
    resolve_device,
)
from skksivi._utils.control_variates import N_FOLDS, N_OF_EACH, cross_fitted, second_order
from skksivi._utils.numbers import check_integer
from skksivi._utils.psis import pareto_smoothed
from skksivi.base import BaseApproximator, check_fit
from skksivi.coordinates._affine import Affine, AffineMap
from skksivi.families._derived import Reweighted, unweighted
from skksivi.families._samplers import Chains, Particles
from skksivi.families._weights import Estimate, check_trusted
from skksivi.inference._importance import importance_draws
from skksivi.pilot._mixture import covariance_root
from skksivi.score._score import Score, ScoreFunction, is_target
from skksivi.score._target import compared_score
from skksivi.targets._base import Target
from skksivi.training._run import ordinary_mode

#: The fewest draws.
LEAST = 20

#: The fewest batches of states of chains, if there are so many.
N_BATCHES = 20

#: The shape of a tail from which on a control variate has no finite variance.
MAX_K = 0.5

#: The standard error that is allowed for more control variates, in units of the smallest.
SLACK = 1.1

#: The least standard error, by rounding, in units of the largest value.
ROUNDING = 1e-12

#: The most numbers in the control variates of all draws.
MAX_NUMBERS = 2**25


class Expectation(NamedTuple):
    """Means under a target, each of the shape of f of one draw.

    Attributes
    ----------
    value : float or ndarray
        By control variates.
    se : float or ndarray
        Standard errors. Where draws and target differ, they do not tell what bias is left.
    plain : Estimate
        The mean of f over the draws, with its standard error ``plain.se``, without control variates.
    shift : float or ndarray
        The difference of `value` and ``plain.value`` in its own standard errors. Beyond four the draws are not those
        of the target; NaN where no control variate was used.
    n_control_variates : int or ndarray of int
        How many were used, zero where none helped.
    n_score_calls : int
        Points at which the score was evaluated, with those by which it is checked.
    """

    value: float | np.ndarray
    se: float | np.ndarray
    plain: Estimate
    shift: float | np.ndarray
    n_control_variates: int | np.ndarray
    n_score_calls: int

    @property
    def variance_reduction(self) -> float | np.ndarray:
        """The ratio of the variances without and with control variates."""
        with np.errstate(invalid="ignore"):
            return np.where(self.plain.se == self.se, 1.0, np.square(self.plain.se / np.asarray(self.se)))[()]


#: A target by its score, or the scores of draws.
TargetOrScores = Target | ScoreFunction | ArrayLike | Tensor


class WeightedDraws(NamedTuple):
    """Draws x (n, d) with scores s (n, d) and weights w (n,) that sum to one, independent from one batch to the next.

    `map` has coordinates that were not learned from these draws, and `n_score_calls` tells their cost.
    """

    x: Tensor
    s: Tensor
    w: Tensor
    batch: Tensor
    map: AffineMap | None
    n_score_calls: int


def expectation(
    est: BaseApproximator | ArrayLike | Tensor,
    target: TargetOrScores,
    f: Callable[[Any], ArrayLike | Tensor] | None = None,
    *,
    n_samples: int = 2000,
    weights: bool = False,
    random_state: RandomState = None,
) -> Expectation:
    r"""Estimate the mean of a function under a target, from draws and scores, by Stein control variates.

    By Stein's identity :math:`E_p[s^\top g + \nabla \cdot g] = 0` for the score s of p. With the gradients g of
    polynomials, these are functions of mean zero under the target,

    .. math:: \varphi_i = s_i, \qquad \varphi_{ij} = \tfrac12 (u_i s_j + u_j s_i) + \delta_{ij},

    in coordinates u of about unit covariance, and the estimate is the mean of :math:`f - \beta^\top \varphi`. The
    :math:`\beta` for each draw comes from a regression on the nine tenths of the draws that do not include it, so
    that the standard error is honest. Each f has the largest set, of none, the first order, squares and all pairs,
    that does not raise its standard error. There are at least twenty draws per control variate and forty more, and
    none is used whose tail is so heavy that it has no variance.

    The identity holds for the target, whatever the draws: if f is a combination of control variates, as are means and
    covariances of a Gaussian, the result is exact even if the draws are not. Otherwise draws from another density q
    leave a bias of at most

    .. math:: \mathrm{sd}_q(f - \beta^\top \varphi)\, \sqrt{E_q (p / q - 1)^2},

    which falls with the standard error but is not included in it. With a `shift` beyond four, look at `diagnose` or
    use `weights`. Neither detects a mode without draws. At bounds, if it has any, the target's density must fall to
    zero.

    Parameters
    ----------
    est : approximator, array-like of shape (n, n_features) or (n_chains, n_draws, n_features)
        A fitted approximator; or draws that are independent, or states of chains, whose standard errors come from
        batch means. Chains of a fit are treated as chains. Particles, which repel each other, count as independent.
    target : Target, callable, or array-like of the shape of the draws
        The target of the fit, its score function, or the scores of the draws. With `skksivi.targets.Minibatches` all
        of the data are used.
    f : callable, default=None
        Maps draws (n, n_features), a float64 array, or a tensor if `est` is one, to values (n, ...). None is the
        identity, for means.
    n_samples : int, default=2000
        Draws of a fit, at least 20; particles and states of chains are used at most once.
    weights : bool, default=False
        Whether to weight the draws of a fit, see `importance_sample`, so that no bias remains. Needs a density.
    random_state : int, RandomState or None, default=None
        Draws from the fit.

    Returns
    -------
    found : Expectation
        A named tuple: `value`, `se`, `plain` without control variates, `shift`, `n_control_variates` and
        `n_score_calls`, and the ratio `variance_reduction`.

    Raises
    ------
    NotFittedError
        Before `fit`.
    TypeError
        `est` is neither an approximator nor an array, `f` is not a function, or, with `weights`, the fit has no
        density.
    ValueError
        Draws, scores or values of f are too few, not finite or of another shape than expected; the score is random;
        with `weights`, k-hat or the effective share of the draws forbid it.

    See Also
    --------
    importance_sample : The weights.
    refine : A fit that draws by them.

    References
    ----------
    Assaraf, R. and Caffarel, M. (1999). Zero-variance principle for Monte Carlo algorithms. Physical Review Letters
    83(23).

    Mira, A., Solgi, R. and Imparato, D. (2013). Zero variance Markov chain Monte Carlo for Bayesian estimators.
    Statistics and Computing 23(5).

    South, L. F. et al. (2022). Postprocessing of MCMC. Annual Review of Statistics and Its Application 9.

    Examples
    --------
    >>> from skksivi import expectation
    >>> from skksivi.baselines import Laplace
    >>> q = Laplace(random_state=0).fit(lambda x: 0.3 - x, n_features=2)
    >>> found = expectation(q, lambda x: -x, random_state=0)  # of N(0, I), by draws of N(0.3, I)
    >>> found.plain.value.round(1), abs(found.value).round(6)
    (array([0.3, 0.3]), array([0., 0.]))
    >>> expectation(q, lambda x: -x, lambda X: X[:, 0] ** 2, random_state=0).value.round(6)
    np.float64(1.0)
    """
    if f is not None:
        check_function(f, "f", "X")
    if not isinstance(weights, bool):
        raise TypeError(f"`weights` must be True or False, got {weights!r}.")
    if isinstance(est, BaseApproximator | type) or hasattr(est, "fit") or is_target(est) or callable(est):
        check_fit(est, target)
    device = resolve_device(est.device if isinstance(est, BaseApproximator | Tensor) else "cpu")
    with ordinary_mode(device), torch.no_grad():
        if isinstance(est, BaseApproximator):
            draws = _of_fit(est, cast("Target", target), n_samples, random_state, weights=weights)
        elif weights:
            raise TypeError("`weights` needs an approximator, but `est` is an array of draws.")
        else:
            draws = _given(est, target, device)
    X = draws.x.clone() if isinstance(est, Tensor) else as_array(draws.x).copy()  # f may write into it
    values = as_numbers(as_array(X if f is None else f(X)), "f(X)")
    if values.shape[:1] != (len(X),):
        raise ValueError(f"`f` returned shape {values.shape}, expected a row for each of {len(X)} draws.")
    _check_finite(values, "`f` returned values")
    with torch.no_grad():
        y = as_tensor(values, device=device).reshape(len(X), -1)
        numbers = [as_array(a).reshape(values.shape[1:])[()] for a in _controlled(y, draws)]
    value, se, plain, plain_se, shift, n_used = numbers
    return Expectation(value, se, Estimate(plain, plain_se), shift, n_used, draws.n_score_calls)


# The draws


def _of_fit(
    est: BaseApproximator, target: Target, n_samples: int, random_state: RandomState, *, weights: bool
) -> WeightedDraws:
    """Return draws of a fit, with their scores."""
    fit, w = unweighted(est.sampler_), None
    if weights:
        score, sample = importance_draws(est, target, n_samples, random_state)
        check_trusted(sample, "an expectation")
        X, w = sample.X[sample.weights > 0], sample.weights[sample.weights > 0]
    else:
        check_integer(n_samples, "n_samples", min_val=LEAST)
        score = compared_score(target, est.n_features_in_, est.dtype, est.device)
        if isinstance(fit, Chains):
            X = _thinned(fit.x, n_samples)
        else:
            n_samples = min(n_samples, len(fit.x)) if isinstance(fit, Particles) else n_samples
            X = est.sample(n_samples, make_seed(random_state))
    x = as_tensor(X, dtype=torch.float64, device=score.device)
    w = torch.ones_like(x[..., 0]) if w is None else as_tensor(w, device=x.device)
    if isinstance(fit, Chains) and isinstance(est.sampler_, Reweighted):
        w = est.sampler_.ratios[est.sampler_.cells.assign(x.flatten(0, 1))]
    coordinates = getattr(fit, "whitening", fit)
    map_ = getattr(coordinates, "map", None) if getattr(coordinates, "warp", None) is None else None
    return _scored(x, score, w.flatten(), map_)


def _thinned(chains: np.ndarray, n: int) -> np.ndarray:
    """Return about n states of chains (n_chains, n_draws, d), evenly from all of them or the last of some."""
    step = math.ceil(chains[:, :, 0].size / n)
    return chains[:, step - 1 :: step] if step <= chains.shape[1] else chains[:n, -1:]


def _given(X: ArrayLike | Tensor, target: TargetOrScores, device: torch.device) -> WeightedDraws:
    """Return draws that were given, with their scores."""
    x = as_tensor(as_numbers(X, "est"), device=device)
    if x.ndim not in (2, 3) or 0 in x.shape:
        raise ValueError(
            f"`est` has shape {tuple(x.shape)}, expected (n, n_features) or (n_chains, n_draws, n_features)."
        )
    w = torch.ones_like(x[..., 0]).flatten()
    if is_target(target) or callable(target):
        d = getattr(target, "n_features", x.shape[-1])
        if d != x.shape[-1]:
            raise ValueError(f"`target` has {d} features, expected {x.shape[-1]} as the draws have.")
        return _scored(x, compared_score(target, x.shape[-1], "float64", device), w, None)
    s = as_tensor(as_numbers(cast("ArrayLike", target), "target"), device=device)
    if s.shape != x.shape:
        raise ValueError(f"`target` has shape {tuple(s.shape)}, expected {tuple(x.shape)}: a score for each draw.")
    return _scored(x, s, w, None)


def _scored(points: Tensor, score: Score | Tensor, w: Tensor, map_: AffineMap | None) -> WeightedDraws:
    """Return draws, unless they or their scores are not finite, or too few."""
    x = points.flatten(0, -2)
    if len(x) < LEAST:
        raise ValueError(f"`est` has {len(x)} draws; standard errors need {LEAST} at least.")
    _check_finite(as_array(x), "`est` has draws")
    s = score.flatten(0, -2) if isinstance(score, Tensor) else score(x)
    _check_finite(as_array(s), "`target` has scores")
    if isinstance(score, Tensor):
        return WeightedDraws(x, s, w / w.sum(), _batches(points), map_, 0)
    if not torch.allclose(score(x[:2]), s[:2], rtol=1e-3):
        raise ValueError("`target` has a score that is random; control variates need an exact one, of all data.")
    return WeightedDraws(x, s, w / w.sum(), _batches(points), map_, score.tally.n_values)


def _check_finite(values: np.ndarray, what: str) -> None:
    """Raise ValueError unless all values (n, ...) are finite."""
    n = int((~np.isfinite(values).reshape(len(values), -1).all(1)).sum())
    if n:
        raise ValueError(f"{what} that are not finite at {n} of {len(values)} draws; expected finite numbers.")


def _batches(x: Tensor) -> Tensor:
    """Return the batch (n,) of each draw: itself, or of chains (n_chains, n_draws, d) a chain, or a part if few."""
    n_chains, n_draws = x.shape[0], x.shape[1] if x.ndim > 2 else 1
    n_parts = min(math.ceil(N_BATCHES / n_chains), n_draws)
    part = torch.arange(n_draws, device=x.device) * n_parts // n_draws
    return (torch.arange(n_chains, device=x.device)[:, None] * n_parts + part).flatten()


# The regression


def _controlled(y: Tensor, draws: WeightedDraws) -> tuple[Tensor, ...]:
    """Return means of values y (n, m) with standard errors, both also without control variates, the difference of the
    means in standard errors and the number of control variates, each (m,).
    """
    rounding = ROUNDING * y.abs().amax(0)
    plain, plain_se = mean_and_se(y, draws.w, draws.batch)
    y, plain_se = y - plain, plain_se.maximum(rounding)
    zero = torch.zeros_like(plain)
    found = [torch.stack([zero, plain_se, torch.full_like(plain, math.nan), zero])]
    for features in control_variates(draws):
        r, p = cross_fitted(y, features, draws.w.square(), draws.batch % N_FOLDS), features.shape[1]
        mean, se = mean_and_se(r, draws.w, draws.batch, p)
        difference, its_se = mean_and_se(r - y, draws.w, draws.batch, p)
        shift = (difference / its_se).where(its_se > rounding, 0.0)
        found.append(torch.stack([mean, se.maximum(rounding), shift, torch.full_like(mean, p)]))
    tried = torch.stack(found)
    allowed = tried[:, 1] <= SLACK * tried[:, 1].amin(0)
    last = len(tried) - 1 - allowed.flip(0).int().argmax(0)
    mean, se, shift, n_used = tried.gather(0, last.expand(1, 4, -1))[0]
    return plain + mean, se, plain, plain_se, shift, n_used.long()


def control_variates(draws: WeightedDraws) -> list[Tensor]:
    """Return the sets of control variates (n, p) that the draws allow: scores, with squares, with all pairs."""
    x, s = draws.x, draws.s
    n, d = x.shape

    def allow(p: int) -> bool:
        return N_OF_EACH * (p + 2) <= n and n * p <= MAX_NUMBERS

    if not allow(d):
        return []
    L = covariance_root(x)
    u, s_u = torch.linalg.solve_triangular(L, (x - x.mean(0)).mT, upper=False).mT, s @ L
    sets = [s_u]
    if allow(2 * d):  # of other coordinates than those that were learned from x, which would bias them
        map_ = draws.map or Affine(x.mean(0), x.std(0).diag())
        map_ = type(map_)(*(a.to(x) for a in map_))
        a, b = x - map_.m, map_.unwhiten_direction(map_.whiten_score(s))
        variances = map_.unwhiten_direction(torch.eye(d).to(x)).square().sum(0)
        sets.append(torch.cat([s_u, a * b + variances], 1))
    if allow(d + d * (d + 1) // 2):  # whose span no coordinates change
        i, j = torch.tril_indices(d, d, device=x.device)
        sets.append(torch.cat([s_u, second_order(u, s_u, i, j)], 1))
    lights = [f[:, _has_variance(draws.w[:, None] * f)] for f in sets]
    return [f for f in lights if f.shape[1]]


def _has_variance(f: Tensor) -> list[bool]:
    """Tell of each column of f (n, p) whether both of its tails are light enough."""
    some = as_array(f[:: math.ceil(len(f) / 10_000)]).T
    tiny = np.finfo(np.float64).tiny
    return [all(pareto_smoothed(np.log(np.maximum(side, tiny)))[1] <= MAX_K for side in (a, -a)) for a in some]


def mean_and_se(r: Tensor, w: Tensor, batch: Tensor, p: int = 0) -> tuple[Tensor, Tensor]:
    r"""Return weighted means (m,) of values r (n, m), with standard errors of batches that are independent.

    They are enlarged so that 1.96 of them give a 95% interval for any number B of batches: Student's quantile is
    about
    :math:`1 + 1.21 / (B - 1)` times as large. All batches share the coefficients of p control variates, which rest on
    mostly the same draws.
    """
    mean, n_batches = w @ r, int(batch[-1]) + 1
    sums = torch.zeros(n_batches, r.shape[1]).to(r).index_add_(0, batch, w[:, None] * (r - mean))
    variance = sums.square().sum(0) * n_batches / (n_batches - 1) * len(r) / (len(r) - 2 * p)
    return mean, (1 + 1.21 / (n_batches - 1)) * variance.sqrt()
