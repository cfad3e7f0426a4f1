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
    shown_by_rows,
    with_error,
)
from skksivi._utils.checks import check_integer
from skksivi._utils.monte_carlo import N_FOLDS, N_OF_EACH, cross_fitted, pareto_smoothed, second_order, standard_error
from skksivi.base import BaseApproximator, check_finite, check_fit
from skksivi.coordinates._affine import Affine, AffineMap
from skksivi.families._derived import knows_density, unweighted
from skksivi.families._samplers import Chains, Particles, Sampler
from skksivi.inference._importance import Limits, weighted_draws_of
from skksivi.judge import Estimate, WeightedDraws
from skksivi.pilot._mixture import covariance_root
from skksivi.pilot._points import MAX_FEATURES
from skksivi.score._score import Score, ScoreFunction, is_target
from skksivi.score._target import compared_score
from skksivi.targets._base import Target
from skksivi.training._run import ordinary_mode

#: The fewest draws.
LEAST = 20

#: The most numbers in the control variates of all draws.
MAX_NUMBERS = 2**25


@shown_by_rows
class Expectation(NamedTuple):
    """Means under a target, each of the shape of f of one draw.

    Attributes
    ----------
    value : float or ndarray
        By control variates.
    se : float or ndarray
        Standard errors. Those of a fit with a density are infinite where its importance weights are not reliable;
        those of other draws do not include the bias that is left if draws and target differ.
    plain : Estimate
        The mean of f over the draws, with its standard error ``plain.se``, without control variates.
    shift : float or ndarray
        The difference of `value` and ``plain.value`` in its own standard errors. Beyond four the draws, or their
        weights, are not those of the target; NaN where no Stein control variate was used.
    n_control_variates : int or ndarray of int
        How many were used, zero where none helped. The fit counts as one.
    n_score_calls : int
        Points at which the score or the density of the target was evaluated, with those by which they are checked.
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

    def _rows(self) -> list[tuple[str, str]]:
        first = zip(np.ravel(self.value)[:9], np.ravel(self.se), strict=False)
        return [("value", ", ".join(with_error(*pair) for pair in first)), ("score calls", f"{self.n_score_calls:,}")]


#: A target by its score, or the scores of draws.
TargetOrScores = Target | ScoreFunction | ArrayLike | Tensor


class Scored(NamedTuple):
    """Draws x (n, d) with scores s (n, d), or None, and weights w (n,) that sum to one, independent from one batch to
    the next.

    `map` has coordinates that were not learned from these draws, and `n_score_calls` tells their cost. They are the
    weighted `draws` of a fit that have a weight, if there are any; standard errors are finite where these are
    `reliable`.
    """

    x: Tensor
    s: Tensor | None
    w: Tensor
    batch: Tensor
    map: AffineMap | None
    n_score_calls: int
    draws: WeightedDraws | None = None
    reliable: bool = True


def expectation(
    est: BaseApproximator | ArrayLike | Tensor,
    f: Callable[[Any], ArrayLike | Tensor] | None = None,
    target: TargetOrScores | None = None,
    *,
    n_samples: int | None = None,
    within: float | None = None,
    max_score_calls: int | None = None,
    random_state: RandomState = None,
) -> Expectation:
    r"""Estimate the mean of a function under a target, from draws and scores, by control variates.

    Draws of a fit with a density are weighted for the target, see `importance_sample`: half of them look where the
    fit does not draw, so that what it lacks is in the estimate and in its standard error. A fit keeps such draws,
    `weighted_draws_`: these answer without the target, at no call of its score, with the fit as the control variate.

    By Stein's identity :math:`E_p[s^\top g + \nabla \cdot g] = 0` for the score s of p. With the gradients g of
    polynomials, these are functions of mean zero under the target,

    .. math:: \varphi_i = s_i, \qquad \varphi_{ij} = \tfrac12 (u_i s_j + u_j s_i) + \delta_{ij},

    in coordinates u of about unit covariance, and the estimate is the mean of :math:`f - \beta^\top \varphi`. The
    :math:`\beta` for each draw comes from a regression on the nine tenths of the draws that do not include it, so
    that the standard error does not rest on what the regression has fitted. Each f has the largest set, of none, the
    first order, squares and all pairs, that does not raise its standard error; or the fit itself as a control
    variate, whose mean of f is known from further draws. There are at least twenty
    effective draws per control variate and forty more, and none is used whose tail is so heavy that it has no
    variance.

    The identity holds for the target, whatever the draws: if f is a combination of control variates, as are means and
    covariances of a Gaussian, the result is exact even if the draws are not. Otherwise draws that are not weighted,
    from another density q, leave a bias of at most

    .. math:: \mathrm{sd}_q(f - \beta^\top \varphi)\, \sqrt{E_q (p / q - 1)^2},

    which falls with the standard error but is not included in it: so for arrays, for chains and particles, and for
    fits whose weights are not reliable, where the standard error is infinite. With a `shift` beyond four, look at
    `diagnose`. A mode that no draw has reached is not detected. At bounds, if it has any, the target's density must
    fall to zero.

    Parameters
    ----------
    est : approximator, array-like of shape (n, n_features) or (n_chains, n_draws, n_features)
        A fitted approximator; or draws that are independent, or states of chains, whose standard errors come from
        batch means. Chains of a fit are treated as chains. Particles, which repel each other, count as independent.
    f : callable, default=None
        Maps draws (n, n_features), a float64 array, or a tensor if `est` is one, to values (n, ...). None is the
        identity, for means.
    target : Target, callable, or array-like of the shape of the draws, default=None
        The target of the fit, its score function, or the scores of the draws. None takes the weighted draws that a
        fit has kept. Given the target their scores are control variates, too. With `skksivi.targets.Minibatches` all
        of the data are used.
    n_samples : int, default=None
        How many weighted draws of a fit there are to be, see `importance_sample`; of another fit draws, 2,000 by
        default and at least 20, where particles and states of chains are used at most once.
    within : float, default=None
        Weighted draws are added until the largest standard error with the fit as a control variate, in standard
        deviations of f, is below this.
    max_score_calls : int, default=None
        The most calls for further weighted draws.
    random_state : int, RandomState or None, default=None
        With a number all weighted draws are new.

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
        `est` is neither an approximator nor an array, or `f` is not a function.
    ValueError
        Draws, scores or values of f are too few, not finite or of another shape than expected; the score is random.

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
    >>> X = q.sample(2000, random_state=0)  # of N(0.3, I)
    >>> found = expectation(X, target=-X)  # by the scores of N(0, I)
    >>> found.plain.value.round(1), abs(found.value).round(6)
    (array([0.3, 0.3]), array([0., 0.]))
    >>> tail = expectation(q, lambda X: X[:, 0] > 1, lambda x: -x, random_state=0)  # weighted: 0.1587
    >>> bool(abs(tail.value - 0.1587) < 2 * tail.se), bool(tail.se < 0.01)
    (True, True)
    """
    if isinstance(est, BaseApproximator | type) or hasattr(est, "fit") or is_target(est) or callable(est):
        check_fit(est, f if target is None else target)
    if f is not None:
        check_function(f, "f", "X")
    device = resolve_device(
        est.device_ if isinstance(est, BaseApproximator) else est.device if isinstance(est, Tensor) else "cpu"
    )
    limits = Limits(n_samples, within, max_score_calls)
    with ordinary_mode(device), torch.no_grad():
        if isinstance(est, BaseApproximator):
            draws = _of_fit(est, f, cast("Target | None", target), limits, random_state)
        else:
            draws = _given(est, target, device)
    values = _values(f, draws.x if isinstance(est, Tensor) else as_array(draws.x))
    _check_finite(values, "`f` returned values")
    with torch.no_grad():
        y = as_tensor(values, device=device).reshape(len(values), -1)
        by_fit = None if draws.draws is None else _by_fit(f, values, draws.draws)
        numbers = [as_array(a).reshape(values.shape[1:])[()] for a in _controlled(y, draws, by_fit)]
    value, se, plain, plain_se, shift, n_used = numbers
    return Expectation(value, se, Estimate(plain, plain_se), shift, n_used, draws.n_score_calls)


def _values(f: Callable[[Any], ArrayLike | Tensor] | None, X: np.ndarray | Tensor) -> np.ndarray:
    """Return values (n, ...) of f at draws (n, d), into which it may write."""
    own = X.clone() if isinstance(X, Tensor) else X.copy()
    try:
        found = own if f is None else f(own)
    except Exception as error:
        error.add_note(f"Raised by `f` of `expectation`, which got an array of shape {tuple(own.shape)}.")
        raise
    values = as_numbers(as_array(found), "f(X)")
    if values.shape[:1] != (len(X),):
        raise ValueError(f"`f` returned shape {values.shape}, expected a row for each of {len(X)} draws.")
    return values


# The draws


def _of_fit(
    est: BaseApproximator,
    f: Callable[[Any], ArrayLike | Tensor] | None,
    target: Target | None,
    limits: Limits,
    random_state: RandomState,
) -> Scored:
    """Return draws of a fit, with their scores if there is a target; weighted, if its density allows."""
    has_density = knows_density(est.sampler_) and est.n_features_in_ <= MAX_FEATURES
    if target is None or has_density:
        draws, score = weighted_draws_of(est, target, lambda draws: _se_by_fit(f, draws), limits, random_state)
        x, w = (as_tensor(a[has_weight(draws)], device=est.device_) for a in (draws.X, draws.weights))
        if score is None and draws.trusted:
            return Scored(x, None, w / w.sum(), _batches(x), None, 0, draws)
        if score is None:
            x = as_tensor(draws.draws, device=est.device_)
            w = torch.full_like(x[:, 0], 1 / len(x))
            return Scored(x, None, w, _batches(x), None, 0, reliable=False)
        if draws.trusted:
            return _scored(x, score, w, _map_of(unweighted(est.sampler_)))._replace(draws=draws)
    score = compared_score(cast("Target", target), est.n_features_in_, est.dtype, est.device_)
    fit, n = unweighted(est.sampler_), limits.n_samples
    n = 2000 if n is None else check_integer(n, "n_samples", min_val=LEAST)
    if isinstance(fit, Chains):
        X = _thinned(fit.x, n)
    else:
        X = est.sample(min(n, len(fit.x)) if isinstance(fit, Particles) else n, make_seed(random_state))
    x = as_tensor(X, dtype=torch.float64, device=score.device)
    check_finite(x.flatten(0, -2), score)
    ones = torch.ones_like(x[..., 0]).flatten()
    return _scored(x, score, ones, _map_of(fit))._replace(reliable=not knows_density(est.sampler_))


def _map_of(fit: Sampler) -> AffineMap | None:
    """Return the coordinates of a fit that are an affine map."""
    coordinates = getattr(fit, "whitening", fit)
    return getattr(coordinates, "map", None) if getattr(coordinates, "warp", None) is None else None


def has_weight(draws: WeightedDraws) -> np.ndarray:
    """Tell of each draw (n,) whether it counts: the score may overflow at others, and is not evaluated there."""
    return draws.weights > 1e-9 / len(draws.weights)


def _se_by_fit(f: Callable[[Any], ArrayLike | Tensor] | None, draws: WeightedDraws) -> float:
    """Return the largest standard error of a mean of f in its sd, with the fit as a control variate."""
    if not draws.trusted:
        return math.inf
    counts = has_weight(draws)
    values = _values(f, draws.X[counts])
    found = _by_fit(f, values, draws)
    if found is None:
        return math.inf
    w = draws.weights[counts] / draws.weights[counts].sum()
    y = values.reshape(len(values), -1)
    sd = np.sqrt(w @ np.square(y - w @ y))
    return float((found[1] / np.maximum(sd, np.finfo(np.float64).tiny)).max())


def _thinned(chains: np.ndarray, n: int) -> np.ndarray:
    """Return about n states of chains (n_chains, n_draws, d), evenly from all of them or the last of some."""
    step = math.ceil(chains[:, :, 0].size / n)
    return chains[:, step - 1 :: step] if step <= chains.shape[1] else chains[:n, -1:]


def _given(X: ArrayLike | Tensor, target: TargetOrScores | None, device: torch.device) -> Scored:
    """Return draws that were given, with their scores."""
    x = as_tensor(as_numbers(X, "est"), device=device)
    if x.ndim not in (2, 3) or 0 in x.shape:
        raise ValueError(
            f"`est` has shape {tuple(x.shape)}, expected (n, n_features) or (n_chains, n_draws, n_features)."
        )
    if target is None:
        raise ValueError("`target` is None, but `est` are draws: pass the target, or their scores.")
    w = torch.ones_like(x[..., 0]).flatten()
    if is_target(target) or callable(target):
        d = getattr(target, "n_features", x.shape[-1])
        if d != x.shape[-1]:
            raise ValueError(f"`target` has {d} features, expected {x.shape[-1]} as the draws have.")
        score = compared_score(target, x.shape[-1], "float64", device, x.flatten(0, -2).double())
        return _scored(x, score, w, None)
    s = as_tensor(as_numbers(cast("ArrayLike", target), "target"), device=device)
    if s.shape != x.shape:
        raise ValueError(f"`target` has shape {tuple(s.shape)}, expected {tuple(x.shape)}: a score for each draw.")
    return _scored(x, s, w, None)


def _scored(points: Tensor, score: Score | Tensor, w: Tensor, map_: AffineMap | None) -> Scored:
    """Return draws, unless they or their scores are not finite, or too few."""
    x = points.flatten(0, -2)
    if len(x) < LEAST:
        raise ValueError(f"`est` has {len(x)} draws; standard errors need {LEAST} at least.")
    _check_finite(as_array(x), "`est` has draws")
    s = score.flatten(0, -2) if isinstance(score, Tensor) else score(x)
    if isinstance(score, Tensor):
        _check_finite(as_array(s), "`target` has scores")
        return Scored(x, s, w / w.sum(), _batches(points), map_, 0)
    _check_repeated(score, x, s)
    return Scored(x, s, w / w.sum(), _batches(points), map_, score.tally.n_values)


def _check_repeated(score: Score, x: Tensor, s: Tensor | None = None) -> None:
    """Raise ValueError where scores s at draws x (n, d) are not finite or, if evaluated again, other ones."""
    s = score(x[:2]) if s is None else s
    _check_finite(as_array(s), "`target` has scores")
    if not torch.allclose(score(x[:2]), s[:2], rtol=1e-3):
        raise ValueError("`target` has a score that is random; an exact one is needed, of all data.")


def _check_finite(values: np.ndarray, what: str) -> None:
    """Raise ValueError unless all values (n, ...) are finite."""
    n = int((~np.isfinite(values).reshape(len(values), -1).all(1)).sum())
    if n:
        raise ValueError(f"{what} that are not finite at {n} of {len(values)} draws; expected finite numbers.")


def _batches(x: Tensor) -> Tensor:
    """Return the batch (n,) of each draw: itself, or of chains (n_chains, n_draws, d) a chain, or a part if few."""
    n_chains, n_draws = x.shape[0], x.shape[1] if x.ndim > 2 else 1
    n_parts = min(math.ceil(20 / n_chains), n_draws)  # the fewest batches, if there are so many states
    part = torch.arange(n_draws, device=x.device) * n_parts // n_draws
    return (torch.arange(n_chains, device=x.device)[:, None] * n_parts + part).flatten()


# The regression


def _controlled(y: Tensor, draws: Scored, by_fit: tuple[np.ndarray, np.ndarray] | None) -> tuple[Tensor, ...]:
    """Return means of values y (n, m) with standard errors, both also without control variates, the difference of the
    means in standard errors and the number of control variates, each (m,), given means with the fit as one.
    """
    rounding = 1e-12 * y.abs().amax(0)
    plain, plain_se = mean_and_se(y, draws)
    y, plain_se = y - plain, plain_se.maximum(rounding)
    zero, unknown = torch.zeros_like(plain), torch.full_like(plain, math.nan)
    found = [torch.stack([zero, plain_se, unknown, zero])]
    if by_fit is not None:
        mean, se = (as_tensor(a, device=y.device) for a in by_fit)
        found.append(torch.stack([mean - plain, se.maximum(rounding), unknown, zero + 1]))
    for features in control_variates(draws):
        r, p = cross_fitted(y, features, draws.w.square(), draws.batch % N_FOLDS), features.shape[1]
        mean, se = mean_and_se(r, draws, p)
        difference, its_se = mean_and_se(r - y, draws)
        shift = (difference / its_se).where(its_se > rounding, 0.0)
        found.append(torch.stack([mean, se.maximum(rounding), shift, zero + p]))
    tried = torch.stack(found)
    # some more than the smallest is allowed, for more control variates
    allowed = tried[:, 1] <= 1.1 * tried[:, 1].amin(0)
    last = len(tried) - 1 - allowed.flip(0).int().argmax(0)
    mean, se, shift, n_used = tried.gather(0, last.expand(1, 4, -1))[0]
    if not draws.reliable:
        se, plain_se = zero + math.inf, zero + math.inf
    return plain + mean, se, plain, plain_se, shift, n_used.long()


def _by_fit(
    f: Callable[[Any], ArrayLike | Tensor] | None, values: np.ndarray, sample: WeightedDraws
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return means (m,) of values (k, ...) at the draws that have a weight, with the fit as a control variate and
    standard errors; None where f is not finite at draws of the fit, as beyond bounds of the target.
    """
    counts, v, k = has_weight(sample), sample.weights_of_fit, math.prod(values.shape[1:])
    others = ~counts & (v > 1e-9 / len(v))
    n_known = max(len(v), MAX_NUMBERS // max(k, 1))
    with np.errstate(all="ignore"):
        more = _values(f, np.concatenate([sample.X[others], sample.draws[:n_known]])).reshape(-1, k)
    if not np.isfinite(more).all():
        return None
    all_values, n_others = np.zeros((len(v), k)), int(others.sum())
    all_values[counts], all_values[others] = values.reshape(-1, k), more[:n_others]
    return sample.means(all_values, more[n_others:])


def control_variates(draws: Scored) -> list[Tensor]:
    """Return the sets of control variates (n, p) that the draws allow: scores, with squares, with all pairs."""
    x, s = draws.x, draws.s
    if s is None:
        return []
    n, d = n_effective(draws), x.shape[1]

    def allow(p: int) -> bool:
        return N_OF_EACH * (p + 2) <= n and len(x) * p <= MAX_NUMBERS

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
    # else its variance is infinite
    return [all(pareto_smoothed(np.log(np.maximum(side, tiny)))[1] <= 0.5 for side in (a, -a)) for a in some]


def mean_and_se(r: Tensor, draws: Scored, p: int = 0) -> tuple[Tensor, Tensor]:
    r"""Return weighted means (m,) of values r (n, m), with standard errors of batches that are independent.

    They are enlarged so that 1.96 of them give a 95% interval for any number B of batches: Student's quantile is
    about
    :math:`1 + 1.21 / (B - 1)` times as large. All batches share the coefficients of p control variates, which rest on
    mostly the same draws. Those of an importance sample include what a heavy tail may add.
    """
    w, mean, n = draws.w, draws.w @ r, n_effective(draws)
    if draws.draws is not None:
        influence = np.zeros((len(draws.draws.weights), r.shape[1]))
        influence[has_weight(draws.draws)] = as_array(len(influence) * w[:, None] * (r - mean))
        se = mean.new_tensor([standard_error(column) for column in influence.T])
        return mean, se * math.sqrt(n / (n - 2 * p))
    n_batches = int(draws.batch[-1]) + 1
    sums = torch.zeros(n_batches, r.shape[1]).to(r).index_add_(0, draws.batch, w[:, None] * (r - mean))
    variance = sums.square().sum(0) * n_batches / (n_batches - 1) * n / (n - 2 * p)
    return mean, (1 + 1.21 / (n_batches - 1)) * variance.sqrt()


def n_effective(draws: Scored) -> float:
    """Return the effective number of weighted draws, the number of all others."""
    return len(draws.x) if draws.draws is None else 1 / float(draws.w.square().sum())
