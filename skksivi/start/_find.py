r"""The start of a fit: a mixture of Gaussians near its target, in coordinates that are found with it.

======================  ==============================================================================================
Source                  What it adds
======================  ==============================================================================================
mode search             the Gaussian at the mode, by Newton steps
independent directions  coordinates in which tails, skewness and humps along directions are normal
other modes             far and narrow modes, labels that are switched
importance sampling     draws of a mixture around the modes, weighted, to which it is fitted again and again; out of a
                        spike, of a mixture along its profile
short chains            where weights fail: points of Hamiltonian chains that start at the weighted draws, to which a
                        mixture is fitted, also in warped coordinates, and weighted in its turn
======================  ==============================================================================================

Each runs if it applies, and the first after which the numbers of the mixture are known ends the list. Together they
take at most the `budget` of a `Pilot`, and what was found when that ends is kept. `Pilot(effort="low")` has shorter
chains. Those of 30 features or more are judged by whether they agree, since weights fail there. Beyond 4,000 features
the map is by the curvature at one mode.

`effort="frugal"` has a list of its own: the mode search, other modes by a dozen ascents, some 100 calls, and
"surrogate", importance sampling and short chains on a surrogate of log p, by 100 to 400 scores. Where it leaves
calls, there are more ascents.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from skksivi._utils.arrays import as_array, listed
from skksivi._utils.checks import warn_caller
from skksivi.coordinates._affine import Affine, AffineMap, Identity, LowRank, standard_normal
from skksivi.coordinates._marginals import fitted_marginals
from skksivi.coordinates._warp import Warp, fitted_warp, reshaped
from skksivi.coordinates._whitening import (
    GIVEN,
    MATCHED,
    Attempt,
    Curved,
    Whitening,
    map_of_pair,
    n_looks,
    starting_points,
)
from skksivi.judge import THRESHOLDS, Grade, Verdict
from skksivi.parameters import Init, Pilot, Whiten, chains_of
from skksivi.pilot._chains import N_CHAINS, N_OF_MANY, SHORT_CHAINS, ChainEnsemble, surrounding, underdamped_pilot
from skksivi.pilot._log_density import Seen, Surrogate, spread_points
from skksivi.pilot._mixture import (
    MOST_FEATURES,
    N_QUICK,
    Components,
    batch_and_match,
    fitted_mixture,
    gaussian_of,
    score_divergence,
)
from skksivi.pilot._modes import (
    ModeMaps,
    all_modes,
    few_modes,
    find_modes,
    mode_from_prior,
    ridge_of,
    search_around,
)
from skksivi.pilot._moments import HeavyTailed, pilot_of_mixture, standard_normal_mixture, without_wrong_density
from skksivi.pilot._newton import (
    check_mode,
    dense_mode,
    fault_of_noise,
    is_spike,
    laplace,
    look_for_jump,
    newton_cg,
    over_noise,
)
from skksivi.pilot._points import MANY_FEATURES, MAX_FEATURES, PilotPoints
from skksivi.pilot._profile import out_of_spike
from skksivi.pilot._symmetries import Exchange, images, told
from skksivi.score._domain import doubt_of_sign, has_power_tails
from skksivi.score._probe import trial_points
from skksivi.score._products import steadied
from skksivi.score._score import Score
from skksivi.score._tally import DIVERGED, BudgetError, ImproperError
from skksivi.start._adaptive import MOST_ROUNDS, N_POINTS, WEIGHTS, AdaptiveSampler
from skksivi.start._cells import CELLS, MOST_CELLED, gaussians_of_parts, points_of_cells

LOGGER = logging.getLogger("skksivi")

#: Features beyond which nothing but the curvature is looked at.
MOST_EXPLORED = 4000

#: Calls of a start, at least.
LEAST_CALLS = 20_000

#: Numbers in the points of a pilot that are kept, at most.
MAX_POINTS = 2**22

#: Trajectories of short chains, stage by stage; low effort takes the first two stages.
TRAJECTORIES = (40, 80, 160, 320)

#: The names of the other sources.
MODES, DIRECTIONS, OTHERS, SURROGATE = "mode search", "independent directions", "other modes", "surrogate"

#: Tells whether it has found what is good enough.
Source = Callable[["Search", AdaptiveSampler], bool]

#: A map, and the points near the target if there are any.
Found = tuple[Whitening, PilotPoints | None]


@dataclass
class Search:
    """What a start is looked for with, and what is known of the target.

    Attributes
    ----------
    score : Score
        In float64.
    starts : Tensor of shape (k, d)
        Where mode searches start.
    alone : bool
        Whether they start nowhere else.
    settings : Pilot
    generator : torch.Generator
    warps : bool
        Whether the coordinates may be warped.
    modes : ModeMaps
        Those that were found, best first; of those that are images of each other one may stand for all.
    points : PilotPoints
        Those of the best mixture, of chains or of the surrogate; at first of Gaussians at the modes.
    attempts : list of Attempt
    """

    score: Score
    starts: Tensor
    alone: bool
    settings: Pilot
    generator: torch.Generator
    warps: bool
    modes: ModeMaps = field(init=False)
    points: PilotPoints = field(init=False)
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def n_features(self) -> int:
        return self.starts.shape[1]

    @property
    def mode(self) -> Affine:
        """The best mode."""
        return self.modes.maps[0]

    @property
    def is_spike(self) -> bool:
        """Whether the search for a mode has ended in a spike, which is no matter of units."""
        return len(self.modes.maps) == 1 and self.score.units is None and is_spike(self.mode)

    @property
    def effort(self) -> str:
        """The effort, which is low where more would not make up for a fault of the target."""
        if self.score.tally.is_frugal:
            return "frugal"
        return "low" if self.score.tally.fault else self.settings.effort

    @contextmanager
    def source(self, name: str) -> Iterator[None]:
        """Record what a source takes, and how good what was found is after it."""
        tally, began = self.score.tally, time.monotonic()
        before = tally.total
        try:
            yield
        finally:
            verdict = str(self.points.verdict) if hasattr(self, "points") else ""
            self.attempts.append(Attempt(name, tally.total - before, time.monotonic() - began, verdict))
            LOGGER.debug("pilot: %s", self.attempts[-1])


def find_whitening(
    whiten: Whiten, score_fn: Score, generator: torch.Generator, *, init: Init = None, warps: bool = False
) -> Found:
    """Return the float64 map specified by an approximator's parameter `whiten`, and the points of "auto".

    Parameters
    ----------
    whiten : one of `RULES`, Pilot, (m, L) or None
    score_fn : Score
    generator : torch.Generator
    init : array-like of shape (d,) or (k, d), default=None
        Where the mode searches start; None means the origin and, with "auto", points around it.
    warps : bool, default=False
        Whether the caller accepts warped coordinates.

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
    with suppress(BudgetError):  # what follows keeps the start
        at_origin = score_fn.double(starts) if init is None else starts
        if (at_origin.isnan() | (rule is explored and at_origin.isinf())).any():  # as of x / |x|
            starts = trial_points(score_fn)[:1].to(starts)
    before, settings, alone = score_fn.tally.total, chains_of(whiten) or Pilot(), init is not None
    if score_fn.mode is not None:  # no other mode is possible
        starts, alone = score_fn.mode[None], True
    score_fn.tally.begin("search for modes")
    search = Search(score_fn, starts, alone, settings, generator, warps)
    # "diagonal" has chains of so many steps, and products with the Jacobian besides
    with score_fn.tally.at_most(max(settings.budget, LEAST_CALLS) * (1 if rule is explored else 10)):
        whitening, points = rule(search)
    if score_fn.tally.limit is None:  # it was the budget of the start that was spent
        score_fn.tally.spent = 0
    n_calls, by_score = score_fn.tally.total - before, search.score.log_prob is None and score_fn.log_prob is not None
    return replace(whitening, n_score_calls=n_calls, attempts=search.attempts, by_score=by_score), points


def check_stages(names: Sequence[object]) -> None:
    """Raise ValueError unless there are sources of these names that can be left out."""
    known = DIRECTIONS, OTHERS, WEIGHTS, CELLS, SHORT_CHAINS, SURROGATE
    for name in names:
        if not (isinstance(name, str) and name in known):
            raise ValueError(f"`skip` has {name!r}, which is no stage; these are {', '.join(map(repr, known))}.")


def explored(search: Search) -> Found:
    """Return coordinates and points by the sources, by the curvature at a mode if features are many."""
    search.score, d = replace(search.score.double, doubt=search.score.doubt), search.n_features
    search.warps &= d <= MOST_FEATURES
    if d > MOST_EXPLORED:
        return _by_curvature(search)
    with search.source(MODES):
        try:
            search.modes = first_modes(search)
        except BudgetError:  # then a Gaussian around the start is all there is
            search.modes = _at_start(search)
        search.points = pilot_of_mixture(search.modes.mixture(), 2000)
    sampler = AdaptiveSampler(search.score, _whitening_of(search.modes), search.modes.mixture(), search.generator)
    sources = FRUGAL if search.effort == "frugal" else SOURCES
    with suppress(BudgetError):
        for name, finds in sources:
            if name in search.settings.skip:
                continue
            with search.source(name), suppress(*DIVERGED):
                if finds(search, sampler):
                    return _of_points(search)
        check_mass(search)
    check_resolved(search)
    if d > MAX_FEATURES and not search.points.verdict.good:
        return _by_curvature(search)
    return _of_points(search)


# The sources: each tells whether it has found what is good enough


def first_modes(search: Search) -> ModeMaps:
    """Return the mode to which Newton steps lead, also from a likely draw of the prior, or a Gaussian at a ridge."""
    score, starts, generator = search.score, search.starts, search.generator
    if search.n_features > MOST_FEATURES:
        modes = ModeMaps([dense_mode(score, starts[0], generator)], starts.new_ones(1))
    else:
        is_open = not search.alone and search.effort != "frugal"
        try:
            modes = _found_from(search)
        except DIVERGED:  # as where p is zero at the start
            modes = search_around(score, starts, generator, alone=search.alone)
        if is_open and (better := mode_from_prior(score, modes.maps[0], generator)) is not None:
            modes = ModeMaps([better], starts.new_ones(1))
        if is_open and (ridge := ridge_of(score, starts, modes.maps[0], generator)) is not None:
            modes = ModeMaps([ridge], starts.new_ones(1))
    if score.is_rough:
        search.score = score = steadied(score, modes.maps[0].m[None])
        modes = find_modes(score, torch.stack([a.m for a in modes.maps]), generator)
        if not is_spike(modes.maps[0]):  # in which rounding is as large
            modes = modes._replace(maps=[over_noise(score, mode) for mode in modes.maps])
            score.tally.found(fault_of_noise(score, modes.maps[0]))
    check_mode(score, starts[0], modes.maps[0])
    search.score = without_wrong_density(score, modes.maps[0])
    return modes


def _found_from(search: Search) -> ModeMaps:
    """Return the modes that searches from the starts find or, where that would take half of few calls, the start."""
    with search.score.tally.trying(450) if search.effort == "frugal" else nullcontext():
        return find_modes(search.score, search.starts, search.generator)
    return _at_start(search)


def _at_start(search: Search) -> ModeMaps:
    return ModeMaps([Affine.shift(search.starts[0])], search.starts.new_ones(1))


def by_directions(search: Search, sampler: AdaptiveSampler) -> bool:
    """Find coordinates in which the independent directions of a target are normal, if all else nearly is.

    Unless the mode is alone, or all directions are independent, no other mode may be found.
    """
    if not search.warps or search.is_spike:
        return False
    mode, generator = search.mode, search.generator
    curved = fitted_marginals(search.score, mode, generator)
    if curved is None:
        return False
    score_y, at_zero = curved.pull_back(search.score), Affine.shift(torch.zeros_like(mode.m))
    if not score_divergence(score_y, at_zero, generator, N_QUICK) < 0.05:
        return False
    if not (search.alone or curved.is_whole):
        start_y = curved.warp(search.starts[:1])[0][0]
        if len(all_modes(score_y, start_y, at_zero, generator).maps) > 1:
            return False
    mixture = standard_normal_mixture(mode.m)
    if _improves(search, sampler, mixture, curved, n_rounds=2):
        return True
    is_near = sampler.best is not None and sampler.best.is_even
    return is_near and _improves(search, sampler, mixture, curved)


def by_other_modes(search: Search, sampler: AdaptiveSampler) -> bool:
    """Find the other modes, to which ascents from all around lead."""
    if len(search.modes.maps) == 1 and not search.alone:
        thorough = search.effort == "high"
        search.modes = all_modes(search.score, search.starts[0], search.mode, search.generator, thorough=thorough)
        if search.n_features >= MANY_FEATURES:
            search.modes = one_for_all(search.modes)
        search.points = pilot_of_mixture(search.modes.mixture(), 2000)
        sampler.modes, sampler.cells = _whitening_of(search.modes), search.modes.mixture()
    return False


def by_weights(search: Search, sampler: AdaptiveSampler) -> bool:
    """Find a mixture by importance sampling from the Gaussians at the modes, or from the profile of a spike."""
    score, mode, d = search.score, search.mode, search.n_features
    check_inside(search)
    if d > MOST_FEATURES:  # no weights count, unless the target is a Gaussian
        error = score_divergence(score, mode, search.generator, N_QUICK)
        if error > THRESHOLDS.same_score:
            return False
        verdict = Verdict(Grade.GOOD, f"the target is this Gaussian, score divergence {error:.1g}", by="weights")
        search.points = pilot_of_mixture(search.modes.mixture(), 2000)._replace(verdict=verdict)
        return True
    mixture = search.modes.mixture()
    if search.is_spike:
        found = out_of_spike(score, mode, search.starts[0])
        return found is not None and _improves(search, sampler, found)
    if d > MOST_CELLED:
        return _improves(search, sampler, mixture)
    if _improves(search, sampler, mixture, n_rounds=4):
        return True
    best = sampler.best
    return best is not None and best.is_even and _improves(search, sampler, best.gaussians.mixture, n_rounds=6)


def _has_cells(search: Search) -> bool:
    return (
        search.n_features <= MOST_CELLED and search.score.log_prob is not None and CELLS not in search.settings.skip
    )


def by_cells(search: Search, sampler: AdaptiveSampler) -> bool:
    """Find a mixture of many small Gaussians, or one in warped coordinates, by a tree of cells; of few features."""
    log_prob, generator = search.score.log_prob, search.generator
    if log_prob is None or not _has_cells(search):
        return False
    search.score.tally.begin(CELLS)
    (m, L), means = search.points.map(), search.modes.mixture().means
    axes = Affine(m, L.norm(dim=1).diag())
    x, w = points_of_cells(log_prob, axes, axes.whiten(means).abs().max().item(), generator)
    even = x[torch.multinomial(w, N_POINTS, replacement=True, generator=generator)]
    small = gaussians_of_parts(x, w)
    if search.warps and not has_power_tails(search.score) and (warp := fitted_warp(even)) is not None:
        in_warped = fitted_mixture([warp.warp(even)[0]], generator)
        is_better = sampler.share(in_warped, warp) > sampler.share(small)
        if is_better and _improves(search, sampler, in_warped, warp, n_rounds=4):
            return True
    return _improves(search, sampler, small)


def by_chains(search: Search, sampler: AdaptiveSampler) -> bool:
    """Find points by short Hamiltonian chains from the weighted draws, and a mixture that is fitted to them, also in
    warped coordinates; of many features points that agree will do.
    """
    if _has_cells(search):  # which are more thorough
        return False
    score, d, generator = search.score, search.n_features, search.generator
    has_many = d >= MANY_FEATURES
    warps, ensemble = search.warps and not has_power_tails(score), _chains(search, sampler)
    u = standard_normal(32, search.mode.m, torch.Generator(search.mode.m.device).manual_seed(0))
    look_for_jump(score, ensemble.metric.unwhiten(torch.cat([u[:1] * 0, 1.5 * u])))
    for n in TRAJECTORIES[:2] if search.effort == "low" else TRAJECTORIES:
        found = ensemble.stage(n)
        warp, mixture = fitted_warp(found.x) if warps else None, found.mixture or fitted_mixture([found.x], generator)
        if has_many:
            if d <= MOST_FEATURES and _improves(search, sampler, mixture, n_rounds=2 if found.converged else 4):
                return True
            if search.points.draws is None or search.points.verdict.grade == Grade.WRONG or found.converged:
                search.points = found
            if found.converged:
                return True
            if warp is not None and (in_warped := _in_warped(search, warp, found.x)) is not None:
                search.points = in_warped
                return True
        elif _improves_best_of(search, sampler, mixture, warp, found.x):
            return True
        elif sampler.best is not None and sampler.best.is_even and not sampler.has_lost:  # more would be vain
            return False
    return False


def _improves_best_of(
    search: Search, sampler: AdaptiveSampler, mixture: Components, warp: Warp | None, x: Tensor
) -> bool:
    """Improve a mixture, or that of points x (n, d) in warped coordinates if the weights of this are more even; these
    are fitted again to the weighted draws.
    """
    if warp is None:
        return _improves(search, sampler, mixture)
    in_warped = fitted_mixture([warp.warp(x)[0]], search.generator)
    if sampler.share(in_warped, warp) <= sampler.share(mixture):
        return _improves(search, sampler, mixture)
    for _ in range(3):
        if _improves(search, sampler, in_warped, warp, n_rounds=6):
            return True
        x = sampler.points()
        if (warp := fitted_warp(x)) is None:
            break
        in_warped = fitted_mixture([warp.warp(x)[0]], search.generator)
    return False


def _chains(search: Search, sampler: AdaptiveSampler) -> ChainEnsemble:
    """Return chains that start at the weighted draws, or around the start where a mode is a spike."""
    if not sampler.pool.sources:
        around = Affine.shift(search.starts[0]) if search.is_spike else search.mode
        return ChainEnsemble(search.score, around, search.generator)
    x, d = sampler.points(), search.n_features
    n = N_OF_MANY if d >= MANY_FEATURES else N_CHAINS
    rows = torch.randperm(len(x), generator=search.generator, device=x.device)[:n]
    metric = search.mode if sampler.pool.weights().effective < 2 * d else gaussian_of(x)
    return ChainEnsemble(search.score, metric, search.generator, x[rows])


def _in_warped(search: Search, warp: Warp, x: Tensor) -> PilotPoints | None:
    """Return points of chains of many features in warped coordinates that are fitted to points x (n, d), and again to
    theirs while these move; None where they do not agree.
    """
    with suppress(*DIVERGED):
        for _ in range(4):
            metric, moved = gaussian_of(warp.warp(x)[0]), math.inf
            ensemble = ChainEnsemble(warp.pull_back(search.score), metric, search.generator)
            for n in TRAJECTORIES[:3]:
                found = ensemble.stage(n)
                u = metric.whiten(found.x)
                moved = min(moved, max(u.mean(0).abs().max().item(), u.std(0).log().abs().max().item()))
                x = warp.unwarp(found.x)[0]
                if found.converged and moved < THRESHOLDS.moved:
                    shaped = reshaped(warp, x)
                    return found._replace(x=shaped.warp(x)[0], mixture=None, warp=shaped)
                if moved >= THRESHOLDS.moved:
                    break
            if (again := fitted_warp(x)) is None:
                return None
            warp = again
    return None


def _improves(
    search: Search,
    sampler: AdaptiveSampler,
    mixture: Components,
    warp: Curved | None = None,
    n_rounds: int = MOST_ROUNDS,
) -> bool:
    """Let a mixture be improved, and take note of the best so far, whatever ends that."""
    if not sampler.pool.sources and search.is_spike and warp is None:  # out of which no line leads
        top = mixture.means[mixture.weights.argmax()]
        sampler.modes = Whitening(mixture.map(), modes=as_array(top[None]), weights=np.ones(1))
        sampler.cells = None
    try:
        return sampler.improve(mixture, warp, n_rounds)
    finally:
        if (best := sampler.best) is not None and (best.draws.trusted or search.n_features < MANY_FEATURES):
            (mixture, warp), x = (best.gaussians.mixture, best.gaussians.warp), sampler.points()
            y = x if warp is None else warp.warp(x)[0]
            if best.verdict.good:  # then its own draws are no less right, and have less noise
                y = pilot_of_mixture(mixture, len(x)).x
            own = PilotPoints(y, [len(y)], y.std(0) / math.sqrt(sampler.pool.weights().effective), best.verdict)
            search.points = own._replace(mixture=mixture, warp=warp, found_by=WEIGHTS, draws=best.draws)


#: The sources by their names, in the order in which they are asked.
SOURCES: tuple[tuple[str, Source], ...] = (
    (DIRECTIONS, by_directions),
    (OTHERS, by_other_modes),
    (WEIGHTS, by_weights),
    (CELLS, by_cells),
    (SHORT_CHAINS, by_chains),
)


# Where scores are expensive


def by_few_ascents(search: Search, _sampler: AdaptiveSampler) -> bool:
    """Find another mode, to which a dozen ascents lead."""
    tally, most = search.score.tally, 150  # calls, which leave as many for the next source
    if len(search.modes.maps) == 1 and not search.alone:
        search.modes = search.modes._replace(ascents=(0, 0))
        if (tally.left or 0) >= 2 * most:
            with tally.trying(most):
                n = 4 if n_looks(search.n_features) else 10  # less where many looks would be needed as well
                search.modes = few_modes(search.score, search.starts[0], search.mode, search.generator, n)
    return False


def by_surrogate(search: Search, _sampler: AdaptiveSampler) -> bool:
    """Find points by the sources of a target that costs nothing, on a surrogate of log p by the scores of few points.

    In each round the scores at some of its points tell how far off it is; with those of others around them it is
    fitted again. The points of a round are no better than the surrogate, and never more than rough.
    """
    score, generator, d = search.score, search.generator, search.n_features
    if d > MOST_FEATURES:
        return False
    score.tally.begin(SURROGATE, score.tally.left or 0)
    mixture = search.modes.mixture()
    seen, n_own = Seen(mixture.map()), min(24 + 2 * d, 90) // 3
    x = HeavyTailed.wider(mixture.draws()).sample(min(2 * d + 30, 90), generator)
    seen.add(x, score(x).detach())
    error, least = math.inf, math.inf
    for _ in range(16):
        if (score.tally.left or 0) < 10 or len(seen.x) < 3:
            break
        seen.refit()
        points = _of_surrogate(seen.model, search)
        own = points.x[torch.randperm(len(points.x), generator=generator, device=x.device)[:n_own]]
        mixture = points.mixture or fitted_mixture([points.x], generator)
        u = torch.cat([own, spread_points(seen, mixture, 2 * n_own, own, generator)])[: score.tally.left]
        points, x = points.unwhitened(seen.metric), seen.metric.unwhiten(u)
        s = score(x).detach()
        before, error, around = error, seen.error(x[:n_own], s[:n_own]), seen.error(x[n_own:], s[n_own:])
        if error <= 1.5 * least:
            least = min(error, least)
            verdict = Verdict(Grade.ROUGH, f"a surrogate by {len(seen.x)} scores, off by {error**0.5:.2g}")
            search.points = points._replace(verdict=verdict, found_by=SURROGATE, draws=None)
        if max(before, error) < 0.02 and around < 0.1:
            break
        seen.add(x, s)
        if error < 0.5:
            seen.metric = gaussian_of(points.x)
    return False


def _of_surrogate(model: Surrogate, search: Search) -> PilotPoints:
    """Return points near a surrogate."""
    at_zero = Affine.shift(torch.zeros_like(search.starts[0]))
    modes = ModeMaps([at_zero], at_zero.m.new_ones(1))
    of_model = Search(model.as_score(), at_zero.m[None], True, Pilot(effort="low"), search.generator, warps=False)
    of_model.modes, of_model.points = modes, pilot_of_mixture(modes.mixture(), 2000)
    sampler = AdaptiveSampler(of_model.score, _whitening_of(modes), modes.mixture(), search.generator)
    for finds in (by_weights, by_chains):
        with suppress(*DIVERGED):
            if finds(of_model, sampler):
                break
    return of_model.points


def by_last_ascents(search: Search, _sampler: AdaptiveSampler) -> bool:
    """Look for other modes from around the points that were found, by the calls that are left."""
    tally, modes = search.score.tally, search.modes
    left = tally.left or 0
    if len(modes.maps) == 1 and modes.ascents is not None and not n_looks(search.n_features) and left >= 60:
        tally.begin("search for modes", left)
        with tally.trying(left):
            n, metric = min(left // 7, 64), search.points.map()
            found = few_modes(search.score, search.starts[0], metric, search.generator, n)
            search.modes = modes._replace(ascents=found.ascents)
    return False


FRUGAL: tuple[tuple[str, Source], ...] = (
    (OTHERS, by_few_ascents),
    (SURROGATE, by_surrogate),
    (OTHERS, by_last_ascents),
)


# What is refused where nothing was good enough


def check_mass(search: Search) -> None:
    """Refuse a density that grows far out, or that repeats itself around a mode.

    Raises
    ------
    ImproperError
    """
    if (doubt := doubt_of_sign(search.score)) is not None:
        raise ImproperError(doubt)
    if search.alone:  # otherwise all modes have been searched for
        with suppress(*DIVERGED):
            generator = torch.Generator(search.starts.device).manual_seed(0)
            all_modes(search.score, search.starts[0], search.mode, generator)


def check_inside(search: Search) -> None:
    """Refuse a target that is bounded but has a score of zero beyond its bounds, if points near it lie there.

    Raises
    ------
    ImproperError
    """
    doubt, x = search.score.doubt, search.points.x
    if doubt is not None and doubt.ends is not None:
        low, high = doubt.ends.to(x).unbind(1)
        beyond = x[((x < low) | (x > high)).any(1)][:100]
        if 100 * len(beyond) > len(x) and not search.score(beyond).detach().all(1).any():
            raise ImproperError(doubt.words)


def check_resolved(search: Search) -> None:
    """Refuse a target of single precision that is known by a spike alone, or by points that it does not tell apart.

    Raises
    ------
    ValueError
    """
    score, mode, x = search.score, search.mode, search.points.x
    if score.type_computed == torch.float64 or search.points.warp is not None:
        return
    if is_spike(mode):
        x, sd = mode.m[None], mode.L.norm(dim=1)
    else:
        sd = x.std(0)
    is_point = sd < 100 * torch.finfo(score.type_computed).eps * x.mean(0).abs()
    if not (is_spike(mode) or is_point.any()):
        return
    j = int((sd / x.mean(0).abs()).argmin())
    raise ValueError(
        "The target is computed in float32, whose rounding hides where its mass is: the search ends in a spike, with "
        f"{score.label(j)} at {x.mean(0)[j]:.4g} give or take {sd[j]:.1g}, as where a scale of a hierarchy or of a "
        "random walk is zero, or units differ too much. Compute it in float64"
        f"{f' ({score.advice})' if score.advice else ''}, or give the model in its non-centred form."
    )


# The coordinates


def _whitening_of(modes: ModeMaps) -> Whitening:
    """Return the coordinates of modes."""
    where = torch.stack([a.m for a in modes.maps]).cpu().numpy()
    return Whitening(modes.mixture().map(), modes=where, weights=modes.weights.cpu().numpy())


def _of_points(search: Search) -> Found:
    """Return the map by the mean and the covariance of the points, near all modes that are images of each other."""
    points, modes = symmetrised(search)
    if modes.unweighed:
        warn_caller(
            f"The weight of the mode at {' and at '.join(listed(a.m) for a in modes.unweighed)} is unknown, and "
            "taken to be that of the best: p is zero between them, or nearly, so that the score alone does not tell. "
            "Fit a target with its `log_prob`, see skksivi.targets.from_log_prob.",
            ConvergenceWarning,
        )
        points = points._replace(draws=None)  # whose weights rest on that
    y, mean_se, warp = points.x, points.mean_se, points.warp
    x = y if warp is None else warp.unwarp(y)[0]
    if warp is not None:
        mean_se = (mean_se / y.std(0)).max() * x.std(0)
    mean, mean_se, sd = (a.cpu().numpy() for a in (x.mean(0), mean_se, x.std(0)))
    coded = [g.coded() for g in modes.symmetries if isinstance(g, Exchange)]
    found = replace(
        _whitening_of(modes),
        map=points.map() if points.mixture is None or points.draws is None else points.mixture.map(),
        warp=warp,
        verdict=points.verdict,
        mean=mean,
        mean_se=mean_se,
        sd=sd,
        symmetries=torch.stack(coded).cpu().numpy() if coded else None,
        ascents=None if modes.ascents is None else np.array(modes.ascents),
        n_looks=modes.n_looks,
        found_by=points.found_by,
    )
    return found, points


def one_for_all(modes: ModeMaps) -> ModeMaps:
    """Return one mode if all are images of it, which points near it then show."""
    if not modes.symmetries or len(images(modes.maps[:1], modes.symmetries)) + 1 != len(modes.maps):
        return modes
    return modes._replace(maps=modes.maps[:1], weights=modes.weights.new_ones(1))


def symmetrised(search: Search) -> tuple[PilotPoints, ModeMaps]:
    """Return the points near all images of a mode, if they are of one, and all modes; or warn of missing ones."""
    points, modes = search.points, search.modes
    if not (missing := images(modes.maps, modes.symmetries)):
        return points, modes
    n = len(modes.maps)
    if points.warp is None and n == 1:
        parts, maps = [points], [modes.maps[0], *missing]
        for part in parts:  # which grows
            for g in modes.symmetries:
                x = g(part.x)
                if not any(torch.allclose(x.mean(0), other.x.mean(0)) for other in parts) and len(parts) < len(maps):
                    parts.append(part._replace(x=x, mean_se=points.error * x.std(0), mixture=None))
        x = torch.cat([part.x for part in parts])
        all_of_them = points._replace(x=x, n_of_mode=[len(part.x) for part in parts], mixture=None, draws=None)
        equal = modes.weights.new_full((len(maps),), 1 / len(maps))
        se = torch.stack([part.mean_se for part in parts]).square().mean(0).sqrt() / math.sqrt(len(parts))
        return all_of_them._replace(mean_se=se), modes._replace(maps=maps, weights=equal)
    warn_caller(
        f"The fit has {n} of {n + len(missing)} modes that are images of each other, and equal in mass: the "
        f"density does not change with {' or '.join(told(g, search.score.label) for g in modes.symmetries[:3])}. If "
        "one is enough, fix that sign or order in the model, as by a positive loading or increasing means.",
        ConvergenceWarning,
    )
    return points, modes


# The other rules


def _of_mode(map_: AffineMap, mode: Affine | LowRank) -> Whitening:
    return Whitening(map_, modes=mode.m.cpu().numpy()[None], weights=np.ones(1))


def _at_mode(search: Search) -> Found:
    """Return the Laplace approximation."""
    mode = _laplace(search)
    return _of_mode(mode, mode), None


def _laplace(search: Search) -> Affine:
    """Return the mode found from the start."""
    score, start = search.score.double, search.starts[0]
    mode, _ = laplace(score, start)
    check_mode(score, start, mode)
    return mode


def _matched(search: Search) -> Found:
    """Return the Gaussian that batch and match fits from the Laplace approximation."""
    mode = _laplace(search)
    found = _of_mode(batch_and_match(search.score.double, mode, search.generator), mode)
    return replace(found, found_by=MATCHED), None


def _diagonal(search: Search) -> Found:
    """Return a scale for each coordinate, and the chains that it comes from."""
    score, starts, modes = search.score, search.starts, np.empty((0, search.n_features))
    tally, budget = score.tally, search.settings.budget
    if len(starts) == 1:
        mode = newton_cg(score.double, starts[0], search.generator)
        modes, starts = mode.m.cpu().numpy()[None], surrounding(mode, search.generator)
    left = budget if tally.limit is None else min(budget, tally.limit - tally.total)
    map_, points = underdamped_pilot(score, starts, search.generator, left)
    mean, mean_se, sd = (a.cpu().numpy() for a in (map_.m, points.mean_se, map_.D))
    found = Whitening(map_, modes=modes, weights=np.ones(len(modes)), verdict=points.verdict)
    return replace(found, mean=mean, mean_se=mean_se, sd=sd, found_by=points.found_by), points


def _by_curvature(search: Search) -> Found:
    """Return a map that is diagonal plus low rank, by the curvature at a mode of many features."""
    mode = newton_cg(search.score.double, search.starts[0], search.generator)
    return _of_mode(mode, mode), None


def _unless_many(rule: Callable[[Search], Found]) -> Callable[[Search], Found]:
    """Return a rule that uses only the curvature if there are many features."""
    return lambda search: rule(search) if search.n_features <= MAX_FEATURES else _by_curvature(search)


#: The rules that find a map, by the name that `whiten` gives them.
RULES: dict[str, Callable[[Search], Found]] = {
    "auto": explored,
    "bam": _unless_many(_matched),
    "diagonal": _diagonal,
    "laplace": _unless_many(_at_mode),
}
