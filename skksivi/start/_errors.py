"""How far the numbers of a fit may be from the posterior's, by weighted draws."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor

from skksivi._utils.arrays import as_array
from skksivi.coordinates._affine import Affine
from skksivi.coordinates._whitening import Whitening
from skksivi.families._weights import with_parameters
from skksivi.judge import THRESHOLDS, Errors, Grade, Numbers, Verdict, WeightedDraws, monotone_in, words_of
from skksivi.pilot._points import MANY_FEATURES
from skksivi.score._score import Score
from skksivi.score._tally import BudgetError
from skksivi.stein._discrepancy import suspect_directions

#: Levels of the quantiles that are judged.
LEVELS = np.array([0.05, 0.95])


def seems_off(errors: Errors) -> bool:
    """Tell whether an error is probably beyond its limit, or surely near it."""
    return is_beyond(errors) or errors.worst(THRESHOLDS.n_se).excess > THRESHOLDS.near


def is_beyond(errors: Errors) -> bool:
    return errors.worst(THRESHOLDS.n_se / 2).excess > 1


def unknown(error: Exception, score: Score) -> Verdict:
    """Return the verdict of what failed in judging; raise what the score itself has raised, or what ends a fit."""
    if error is score.tally.raised or isinstance(error, (BudgetError, ConnectionError, TimeoutError)):
        raise error
    reason = f"it could not be judged: {type(error).__name__}: {error}"
    return Verdict(Grade.UNKNOWN, reason, "check the fit by `skksivi.diagnose`, and report this error")


def suspects(score: Score, coordinates: Whitening | Affine, u: Tensor) -> Tensor | None:
    """Return the directions (d, k) of coordinates along which draws u (n, d) are suspect by some scores."""
    if u.shape[1] == 1 or score.tally.fault is not None:
        return None
    return suspect_directions(coordinates.pull_back(score.double), u)


def of_weights(
    draws: WeightedDraws,
    score: Score,
    whitening: Whitening | Affine | None = None,
    V: Tensor | None = None,
    known: Errors | None = None,
) -> Verdict:
    """Judge a fit by its weighted draws, in the parameters of its model and, unless some coordinates show in none, in
    the coordinates and along directions V (d, k) of whitened ones; but for these the errors may be known.
    """
    reason = (
        f"the effective sample size of {len(draws.weights)} weighted draws is {draws.effective:.0f}, k-hat "
        f"{draws.k:.2f}, and {draws.lost:.0%} of the mass is where the fit has less than a tenth of the density"
    )
    if not draws.trusted and draws.X.shape[1] >= MANY_FEATURES:
        return Verdict(Grade.ROUGH, reason)
    names, f, g = _parameters(draws, score)
    shows, columns, labels = f is draws.X, [(f, g)], [f"`{name}`" for name in names]
    if f is not draws.X and (shows := _shown_in(g, draws.draws)):
        new = ~_repeats(g, draws.draws)
        columns = [(f[:, new], g[:, new])] * bool(new.any()) + [(draws.X, draws.draws)]
        labels = [label for label, kept in zip(labels, new, strict=True) if kept]
        labels += [score.label(i) for i in range(score.n_features)]
    columns = columns if known is None else []
    if whitening is not None and V is not None and V.shape[1] and shows:
        along = [whitening.whiten(torch.as_tensor(X).to(V)) @ V for X in (draws.X, draws.draws)]
        columns.append((as_array(along[0]), as_array(along[1])))
        labels += [_direction(torch.as_tensor(draws.draws).to(V), a, score) for a in along[1].mT]
    with np.errstate(all="ignore"):  # of constants
        found = [*filter(None, [known]), *(_errors(draws, *pair) for pair in columns)]
    errors = Errors(*(np.concatenate(parts, -1) for parts in zip(*found, strict=True)))
    if draws.trusted:
        return Verdict.of(errors, labels.__getitem__, "weights")
    words = words_of(errors.worst(0), labels.__getitem__)
    return Verdict(Grade.ROUGH, f"{reason}; as far as these tell, {words}", errors=errors)


def _shown_in(g: np.ndarray, x: np.ndarray) -> bool:
    """Tell whether each column of x (m, d) shows in parameters g (m, k): one is a monotone function of it, or it is a
    linear function of all.
    """
    hidden = sorted({*range(x.shape[1])} - {*monotone_in(x, g).tolist()})
    n = 4 * g.shape[1] + 4
    if not hidden or len(g) < n or g.shape[1] < x.shape[1]:
        return not hidden
    a, b = ((values - values.mean(0)) / values.std(0) for values in (g[:n], x[:n, hidden]))
    return bool((np.square(a @ np.linalg.lstsq(a, b)[0] - b).mean(0) < 1e-9).all())


def _repeats(g: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Tell which of parameters g (m, k) are a column of x (m, d) in other units."""
    j = monotone_in(x, g)
    a, b = ((values - values.mean(0)) / values.std(0) for values in (g, x[:, j]))
    return (j >= 0) & (np.abs((a * b).mean(0)) > 1 - 1e-9)


def _parameters(draws: WeightedDraws, score: Score) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the names of parameters, and their values at weighted draws and at other draws; the coordinates where a
    model has none, many more, or cannot be evaluated. A parameter that is constant, or not finite at a draw of
    weight, is left out.
    """
    coordinates = [score.label(i).strip("`") for i in range(score.n_features)], draws.X, draws.draws
    try:
        draws = with_parameters(draws, score)
    except Exception as error:
        if error is score.tally.raised or isinstance(error, (TypeError, ValueError)):
            return coordinates
        raise
    f, g = draws.parameters, draws.parameters_of_draws
    if f is None or g is None or len(draws.names) > 2 * score.n_features + 100:  # predictions of rows are among them
        return coordinates
    moves = np.isfinite(f).all(0) & np.isfinite(g).all(0) & (g.std(0) > 0)
    return (
        ([name for name, kept in zip(draws.names, moves, strict=True) if kept], f[:, moves], g[:, moves])
        if (moves.any())
        else coordinates
    )


def _errors(draws: WeightedDraws, f: np.ndarray, g: np.ndarray) -> Errors:
    """Return the errors of the numbers of draws g (m, k), given values f (n, k) of weighted draws.

    A posterior may have no mean or no standard deviation: where these are not known, and their own noise may have no
    bound, they are not assessed, and quantiles count by their levels, as many sd as these are of a Gaussian; unless
    the draws spread so far that their tail is not the posterior's.
    """
    found = Errors.less_fit(Numbers.of_draws(g, LEVELS), draws.numbers(f, g, LEVELS, less=1.0))
    low, high = np.quantile(g, [THRESHOLDS.tail, 1 - THRESHOLDS.tail], axis=0)
    sides = [draws.shares(x, y)[:2] for x, y in ((f < low, g < low), (f > high, g > high))]
    beyond, beyond_se = (np.array(parts) for parts in zip(*sides, strict=True))
    heavy = (np.maximum(found.sd_se, found.mean_se) > THRESHOLDS.sd) & (found.sd < math.log(THRESHOLDS.spread))
    heavy[heavy] = ~draws.knows_variance(f[:, heavy])
    if heavy.any():
        nothing = np.where(heavy, math.nan, 0.0)
        at = np.quantile(g[:, heavy], LEVELS, axis=0)
        levels, se = zip(*(draws.shares(f[:, heavy] <= q, g[:, heavy] <= q, less=1.0)[:2] for q in at), strict=True)
        unit = norm.pdf(norm.ppf(LEVELS))[:, None]
        found.quantiles[:, heavy] = (np.array(levels) - LEVELS[:, None]) / unit
        found.quantiles_se[:, heavy] = np.array(se) / unit
        found = found._replace(mean=found.mean + nothing, sd=found.sd + nothing)
    return found._replace(beyond=beyond, beyond_se=beyond_se)


def _direction(x: Tensor, a: Tensor, score: Score) -> str:
    """Describe a linear function a (n,) of draws x (n, d) by its largest correlations."""
    r = torch.corrcoef(torch.cat([a[None], x.mT]))[0, 1:].nan_to_num(0)
    if r.abs().max() > 0.995:  # a coordinate
        return score.label(int(r.abs().argmax()))
    largest = r.abs().argsort(descending=True)[:3].tolist()
    return f"the direction with correlations {', '.join(f'{r[i]:+.2f} with {score.label(i)}' for i in largest)}"
