r"""What is learned of a target before training: a list of stages, each of which proposes points near it.

A stage runs if it applies; the first whose points are good enough ends the list. Before the last two the judge of
fits is asked whether the points of fewer than 30 features do all the same.

======================  ==================================  =========  ==============================================
Stage                   When                                Calls      What it adds
======================  ==================================  =========  ==============================================
mode search             always                              160        The Gaussian at the mode, by Newton steps
independent directions  up to 200 features                  1,200      Tails, skewness and humps along directions
other modes             one mode, no `init`                 1,600      Far and narrow modes, labels that are switched
all modes               several modes                       4,600      Points near each, and the weights of the modes
profile of a spike      the curvature is nearly singular    8,400      The mass of a hierarchy in its centred form
matched Gaussian        one mode                            1,900      Importance weights, and mixtures that adapt
short chains            one mode                            45,000     Bent targets, also in warped coordinates
warped coordinates      30 to 200 features                  36,000     Funnels of many features
more trajectories       30 features or more                            Chains that mix slowly
wider mode search       nothing above was good enough       65,000     A better mode, and the same stages from there
long chains             nothing above was good enough       the rest   Chains around all modes, pooled by weights
======================  ==================================  =========  ==============================================

Calls are medians of `benchmarks/ablation.py`, which shows what is lost without each stage; together they
are at most the `budget` of a `Pilot`. There are stages up to 4,000 features. With more than 1,000 the last two do not
run and, without points, the map is by the curvature at a mode; with fewer than 30 long chains do not run where a
training may follow. `Pilot(effort="low")` ends before "more trajectories", with shorter chains; `effort="high"` runs
the last two whatever was found before, unless coordinates are warped. What is good enough is said in `_points`.

`effort="frugal"` has a list of its own: the mode search, other modes by a dozen ascents, some 100 calls, and
"surrogate", which runs matched Gaussian and short chains on a surrogate of log p, by 100 to 400 scores. Where it
leaves calls, there are more ascents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning

from skksivi._utils.arrays import listed
from skksivi._utils.checks import warn_caller
from skksivi.coordinates._affine import Affine, AffineMap, Identity, LowRank
from skksivi.coordinates._whitening import GIVEN, MATCHED, Whitening, map_of_pair, starting_points
from skksivi.judge import Grade
from skksivi.parameters import Init, Pilot, Whiten, chains_of
from skksivi.pilot._chains import surrounding, underdamped_pilot
from skksivi.pilot._mixture import MOST_FEATURES, batch_and_match
from skksivi.pilot._modes import FEW_STARTS, MAX_STARTS, ModeMaps
from skksivi.pilot._newton import check_mode, laplace, newton_cg
from skksivi.pilot._points import MANY_FEATURES, PilotPoints
from skksivi.pilot._stages import (
    LEAST_CALLS,
    AllModes,
    FewAscents,
    FewScores,
    IndependentDirections,
    Known,
    LastAscents,
    LongChains,
    MatchedGaussian,
    MoreTrajectories,
    Newton,
    OtherModes,
    PilotStage,
    ShortChains,
    Spike,
    WarpedCoordinates,
    WiderSearch,
    check_resolved,
    run_stages,
)
from skksivi.pilot._symmetries import Exchange
from skksivi.score._probe import trial_points
from skksivi.score._score import Score
from skksivi.score._tally import DIVERGED, BudgetError

#: Features beyond which the map is diagonal plus low rank, by the curvature at a mode: a Newton step costs O(d^3).
MAX_FEATURES = 1000

#: Features beyond which nothing but the curvature is looked at.
MOST_EXPLORED = 4000

#: Numbers in the points of a pilot that are kept, at most.
MAX_POINTS = 2**22

#: The stages that explore a target, of which effort="low" leaves the last out, and those that do where they were not
#: enough.
QUICK: tuple[PilotStage, ...] = (
    Newton(),
    IndependentDirections(),
    OtherModes(),
    AllModes(),
    Spike(),
    MatchedGaussian(),
    ShortChains(),
    WarpedCoordinates(),
    MoreTrajectories(),
)
FRUGAL: tuple[PilotStage, ...] = (Newton(), FewAscents(), FewScores(), LastAscents())
THOROUGH: tuple[PilotStage, ...] = (WiderSearch(QUICK, FEW_STARTS), WiderSearch(QUICK, MAX_STARTS), LongChains())

#: A map, and the pilot if there is one.
Found = tuple[Whitening, PilotPoints | None]


def find_whitening(
    whiten: Whiten,
    score_fn: Score,
    generator: torch.Generator,
    *,
    init: Init = None,
    warps: bool = False,
    accepts: Callable[[Whitening, PilotPoints], bool] | None = None,
) -> Found:
    """Return the float64 map specified by an approximator's parameter `whiten`, and the pilot of "auto".

    Parameters
    ----------
    whiten : one of `RULES`, Pilot, (m, L) or None
    score_fn : Score
    generator : torch.Generator
    init : array-like of shape (d,) or (k, d), default=None
        Where the mode searches start; None means the origin and, with "auto", points around it.
    warps : bool, default=False
        Whether the caller accepts warped coordinates.
    accepts : callable, default=None
        Judges points of few features of which no stage is sure, before wider searches and long chains.

    Raises
    ------
    ValueError
        The given (m, L) or `init` does not fit the target, or the score is not finite where the mode searches start.
    """
    starts, d = starting_points(init, score_fn.n_features, score_fn.device), score_fn.n_features
    if not isinstance(whiten, str | Pilot):
        map_ = Identity(starts.new_zeros(d)) if whiten is None else map_of_pair(whiten, d, score_fn.device)
        return Whitening(map_, modes=np.empty((0, d)), weights=np.empty(0), found_by=GIVEN), None
    rule = RULES[whiten.rule if isinstance(whiten, Pilot) else whiten]
    if init is None and score_fn.double(starts).isnan().any():  # as of x / |x| at the origin
        starts = trial_points(score_fn)[:1].to(starts)
    before, settings, alone = score_fn.tally.total, chains_of(whiten) or Pilot(), init is not None
    if score_fn.mode is not None:  # no other mode is possible
        starts, alone = score_fn.mode[None], True
    score_fn.tally.begin("search for modes")
    known = Known(score_fn, starts, alone, settings, generator, warps, accepts)
    # "diagonal" has chains of so many steps, and products with the Jacobian besides
    most = max(settings.budget, LEAST_CALLS) * (1 if rule is explored else 10)
    with score_fn.tally.at_most(most):
        whitening, pilot = rule(known)
    n_calls, by_score = score_fn.tally.total - before, known.score.log_prob is None and score_fn.log_prob is not None
    return replace(whitening, n_score_calls=n_calls, attempts=known.attempts, by_score=by_score), pilot


def check_stages(names: Sequence[object]) -> None:
    """Raise ValueError unless there are stages of these names."""
    stages = list(dict.fromkeys(stage.name for stage in (*QUICK, *FRUGAL, *THOROUGH)))
    for name in names:
        if not (isinstance(name, str) and name in stages):
            raise ValueError(f"`skip` has {name!r}, which is no stage; these are {', '.join(map(repr, stages))}.")


def explored(known: Known) -> Found:
    """Return mean and covariance of the points of the stages, and the points; the curvature if features are many."""
    known.score = known.score.double
    known.warps &= known.n_features <= MOST_FEATURES
    try:
        if known.n_features <= MOST_EXPLORED:
            try:
                run_stages(FRUGAL if known.effort == "frugal" else QUICK, known)
            except DIVERGED:
                known.points = known.points if known.effort in ("low", "frugal") else None
        suffices = _suffices(known)
        if known.modes.maps and not suffices:
            check_resolved(known)
        if known.n_features <= MAX_FEATURES and not suffices:
            with suppress(*(DIVERGED if known.points is not None else ())):
                run_stages(THOROUGH, known)
    except BudgetError:
        if known.points is None:
            raise
    else:
        known.take_best()
    known.symmetrise()
    if known.points is None:
        return _by_curvature(known)
    _warn_of_unweighed(known.modes_of_points)
    return _of_points(known, known.points)


def _suffices(known: Known) -> bool:
    """Tell whether wider searches and long chains would be no better."""
    points, effort = known.points, known.effort
    if points is None or known.score.tally.is_spent:
        return points is not None
    if effort == "high" and points.warp is None:
        return False
    if effort in ("low", "frugal") or points.judged().grade > Grade.ROUGH:
        return True
    if known.accepts is None or known.n_features >= MANY_FEATURES or known.modes_of_points.unweighed:
        return False
    known.take_best()
    return known.points is not None and known.accepts(*_of_points(known, known.points))


def _warn_of_unweighed(modes: ModeMaps) -> None:
    """Warn of modes whose weights are not known."""
    if modes.unweighed:
        warn_caller(
            f"The weight of the mode at {' and at '.join(listed(a.m) for a in modes.unweighed)} is unknown, and "
            "taken to be that of the best: p is zero between them, or nearly, so that the score alone does not tell. "
            "Fit a target with its `log_prob`, see skksivi.targets.from_log_prob.",
            ConvergenceWarning,
        )


def _of_points(known: Known, points: PilotPoints) -> tuple[Whitening, PilotPoints]:
    """Return the map by the mean and the covariance of a pilot."""
    y, mean_se, map_, modes = points.x, points.mean_se, points.map(), known.modes_of_points
    x = y if points.warp is None else points.warp.unwarp(y)[0]
    if points.warp is not None:
        mean_se = (mean_se / y.std(0)).max() * x.std(0)
    mean, mean_se, sd = (a.cpu().numpy() for a in (x.mean(0), mean_se, x.std(0)))
    coded = [g.coded() for g in modes.symmetries if isinstance(g, Exchange)]
    symmetries = torch.stack(coded).cpu().numpy() if coded else None
    ascents = None if modes.ascents is None else np.array(modes.ascents)
    where = torch.stack([a.m for a in modes.maps])
    found = Whitening(
        map_,
        points.warp,
        modes=where.cpu().numpy(),
        weights=modes.weights.cpu().numpy(),
        verdict=points.verdict,
        mean=mean,
        mean_se=mean_se,
        sd=sd,
        symmetries=symmetries,
        ascents=ascents,
        n_looks=modes.n_looks,
        found_by=points.found_by,
    )
    return found, points


# The other rules


def _of_mode(map_: AffineMap, mode: Affine | LowRank) -> Whitening:
    return Whitening(map_, modes=mode.m.cpu().numpy()[None], weights=np.ones(1))


def _at_mode(known: Known) -> Found:
    """Return the Laplace approximation."""
    mode = _laplace(known)
    return _of_mode(mode, mode), None


def _laplace(known: Known) -> Affine:
    """Return the mode found from the start."""
    score, start = known.score.double, known.starts[0]
    mode, _ = laplace(score, start)
    check_mode(score, start, mode)
    return mode


def _matched(known: Known) -> Found:
    """Return the Gaussian that batch and match fits from the Laplace approximation."""
    mode = _laplace(known)
    found = _of_mode(batch_and_match(known.score.double, mode, known.generator), mode)
    return replace(found, found_by=MATCHED), None


def _diagonal(known: Known) -> Found:
    """Return a scale for each coordinate, and the chains that it comes from."""
    score, starts, modes = known.score, known.starts, np.empty((0, known.n_features))
    tally, budget = score.tally, known.settings.budget
    if len(starts) == 1:
        mode = newton_cg(score.double, starts[0], known.generator)
        modes, starts = mode.m.cpu().numpy()[None], surrounding(mode, known.generator)
    left = budget if tally.limit is None else min(budget, tally.limit - tally.total)
    map_, points = underdamped_pilot(score, starts, known.generator, left)
    mean, mean_se, sd = (a.cpu().numpy() for a in (map_.m, points.mean_se, map_.D))
    found = Whitening(map_, modes=modes, weights=np.ones(len(modes)), verdict=points.verdict)
    return replace(found, mean=mean, mean_se=mean_se, sd=sd, found_by=points.found_by), points


def _by_curvature(known: Known) -> Found:
    """Return a map that is diagonal plus low rank, by the curvature at a mode of many features."""
    mode = newton_cg(known.score.double, known.starts[0], known.generator)
    return _of_mode(mode, mode), None


def _unless_many(rule: Callable[[Known], Found]) -> Callable[[Known], Found]:
    """Return a rule that uses only the curvature if there are many features."""
    return lambda known: rule(known) if known.n_features <= MAX_FEATURES else _by_curvature(known)


#: The rules that find a map, by the name that `whiten` gives them.
RULES: dict[str, Callable[[Known], Found]] = {
    "auto": explored,
    "bam": _unless_many(_matched),
    "diagonal": _diagonal,
    "laplace": _unless_many(_at_mode),
}
