r"""The affine map x = m + L u that gives a target about zero mean and unit covariance, by a choice of rules."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from skksivi._utils.arrays import as_numbers, as_tensor
from skksivi.coordinates._affine import Affine, AffineMap, Identity, LowRank
from skksivi.parameters import Init, Pilot, Whiten, chains_of
from skksivi.pilot._chains import CHAINS, find_pilot
from skksivi.pilot._gaussian import batch_and_match, covariance_root
from skksivi.pilot._hamiltonian import HAMILTONIAN
from skksivi.pilot._importance import PLAIN, PartedDraws, pilot_of_mixture, refined_pilot, without_wrong_density
from skksivi.pilot._masses import with_mode_weights
from skksivi.pilot._mixture import MOST_FEATURES
from skksivi.pilot._modes import MODES, ModeMaps, same_mode, search_around
from skksivi.pilot._newton import check_mode, laplace, newton_cg
from skksivi.pilot._others import all_modes
from skksivi.pilot._points import PilotPoints, are_known
from skksivi.pilot._short import SHORT, short_pilot
from skksivi.pilot._underdamped import surrounding, underdamped_pilot
from skksivi.pilot._whitening import GIVEN, LAPLACE, MATCHED, Whitening
from skksivi.score._errors import DIVERGED, BudgetError
from skksivi.score._improper import ImproperError
from skksivi.score._probe import doubt_of_sign
from skksivi.score._score import Score
from skksivi.score._tally import Tally

#: How many times the `budget` a search may take, unless it has a limit of its own.
MOST_TIMES = 10

#: Features beyond which the map is diagonal plus low rank, by the curvature at a mode: a Newton step costs O(d^3).
MAX_FEATURES = 1000

#: Median square of a coordinate of the short chains, in units of the long ones, beyond which they disagree.
FAR_APART = 9.0

#: Points of long chains from which importance sampling starts, its most rounds, and the effective share that it needs
#: to be better than these points.
N_REFINED, N_REFINEMENTS, SHARE_REFINED = 10_000, 36, 0.7

#: The stages that find points near the target.
EXPLORATIONS = {
    "Langevin chains",
    "Metropolis chains",
    "importance sampling",
    "short chains",
    "underdamped Langevin chains",
}

#: Numbers in the points of a pilot that are kept, at most.
MAX_POINTS = 2**22


class Search(NamedTuple):
    """The arguments of a rule that finds a map.

    Attributes
    ----------
    score : Score
    starts : Tensor of shape (k, d)
        Where mode searches start.
    alone : bool
        Whether they start nowhere else.
    chains : Pilot
        Budget and settings of the chains.
    generator : torch.Generator
    n_calls : int
        Score calls before the search.
    warps : bool
        Whether the coordinates may be warped.
    """

    score: Score
    starts: Tensor
    alone: bool
    chains: Pilot
    generator: torch.Generator
    n_calls: int
    warps: bool = False

    @property
    def left(self) -> int:
        """The remaining budget."""
        tally = self.score.tally
        left = self.chains.budget - (tally.total - self.n_calls)
        return left if tally.limit is None else min(left, tally.limit - tally.total)


#: A map, and the pilot if there is one.
Found = tuple[Whitening, PilotPoints | None]


def find_whitening(
    whiten: Whiten, score_fn: Score, generator: torch.Generator, *, init: Init = None, warps: bool = False
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

    Raises
    ------
    ValueError
        The given (m, L) or `init` does not fit the target, or the score is not finite where the mode searches start.
    """
    starts, d = starting_points(init, score_fn.n_features, score_fn.device), score_fn.n_features
    if not isinstance(whiten, str | Pilot):
        map_ = Identity(starts.new_zeros(d)) if whiten is None else _given(whiten, d, score_fn.device)
        return Whitening(map_, modes=np.empty((0, d)), weights=np.empty(0), found_by=GIVEN), None
    rule = RULES[whiten.rule if isinstance(whiten, Pilot) else whiten]
    before, chains, alone = score_fn.tally.total, chains_of(whiten) or Pilot(), init is not None
    if score_fn.mode is not None:  # no other mode is possible
        starts, alone = score_fn.mode[None], True
    score_fn.tally.begin("search for modes")
    with score_fn.tally.at_most(MOST_TIMES * max(chains.budget, CHAINS.least_calls)):
        whitening, pilot = rule(Search(score_fn, starts, alone, chains, generator, before, warps))
    return replace(whitening, n_score_calls=score_fn.tally.total - before), pilot


def _of_mode(map_: AffineMap, mode: Affine | LowRank) -> Whitening:
    """Return a map that comes from one mode."""
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


def _by_chains(search: Search) -> Found:
    """Return mean and covariance of chains around the modes, and the chains; the curvature if features are many."""
    double, effort, generator, by = search.score.double, search.chains.effort, search.generator, LAPLACE
    short = best = None
    d, short_chains = double.n_features, partial(short_pilot, double, effort=effort, warps=search.warps)
    if d <= SHORT.max_features:
        short = best = short_chains(search.starts, generator, alone=search.alone)
        by = LAPLACE if short is None else _explored_by(double.tally)
        if short is not None and (_short_chains_suffice(*short, effort) or d > MAX_FEATURES or double.tally.is_spent):
            return _of_points(*short, by)
        search = search._replace(n_calls=double.tally.total)  # the budget is for the long chains
    if d > MAX_FEATURES:
        return _by_curvature(search)
    try:
        for n_starts in (MODES.max_starts,) if search.alone else (MODES.few_starts, MODES.max_starts):
            double.tally.begin("search for modes")
            modes = search_around(double, search.starts, generator, alone=search.alone, n_starts=n_starts)
            _check_mass(search, modes.maps[0])
            chains = partial(short_chains, alone=n_starts == MODES.max_starts)
            if short is not None and (better := _from_another(modes, short[0], chains, generator)) is not None:
                return _of_points(*better, _explored_by(double.tally))
            best = short or (modes, pilot_of_mixture(modes.mixture(), HAMILTONIAN.n_of_gaussian))
        pilot = _by_long_chains(search, modes)
    except BudgetError:
        if best is None:
            raise
        return _of_points(*best, by)
    if short is not None and short[1].converged and not pilot.converged:
        return _of_points(*short, by)
    found, _ = _of_points(modes, pilot, _explored_by(double.tally))
    if short is not None and found.map.whiten(short[1].x).square().mean(1).median() > FAR_APART:
        return replace(found, converged=False), pilot._replace(converged=False)  # the short chains ended elsewhere
    return found, pilot


def _check_mass(search: Search, mode: Affine) -> None:
    """Refuse a density that grows far out, or that repeats itself around a mode, before long chains run off.

    Raises
    ------
    ImproperError
    """
    score = search.score.double
    if (doubt := doubt_of_sign(score)) is not None:
        raise ImproperError(doubt)
    if search.alone:  # otherwise all modes have been searched for
        with suppress(*DIVERGED):
            all_modes(score, search.starts[0], mode, torch.Generator(score.device).manual_seed(0))


def _explored_by(tally: Tally) -> str:
    """Return what has found the points of a pilot: the stage that began last among those that do."""
    return next((stage for stage in reversed(tally.begun) if stage in EXPLORATIONS), LAPLACE)


def _from_another(
    modes: ModeMaps,
    before: ModeMaps,
    short_chains: Callable[..., tuple[ModeMaps, PilotPoints] | None],
    generator: torch.Generator,
) -> tuple[ModeMaps, PilotPoints] | None:
    """Return what short chains find at a mode, if it is the only one, not that of before, and they converge there."""
    if len(modes.maps) > 1 or len(before.maps) > 1 or same_mode(modes.maps[0], before.maps[0]):
        return None
    found = short_chains(modes.maps[0].m[None], generator)
    return found if found is not None and found[1].converged else None


def _short_chains_suffice(modes: ModeMaps, pilot: PilotPoints, effort: str) -> bool:
    """Tell whether the points of short chains suffice, by themselves or because long chains would be no better: if no
    mode was found, coordinates are warped, or the errors of many features are small.
    """
    if effort == "low" or not modes.maps:
        return True
    if pilot.converged and effort == "high" and pilot.warp is None:
        return False
    return are_known(pilot.x.shape[1], converged=pilot.converged, error=pilot.error)


def _by_long_chains(search: Search, modes: ModeMaps) -> PilotPoints:
    """Return points around the modes of a target."""
    double, generator = search.score.double, search.generator
    pilot = find_pilot(double, modes, generator, search.left, double.tally.begin)
    if len(pilot.n_of_mode) > 1:
        double.tally.begin("weights of modes")
        try:
            return with_mode_weights(double, pilot, generator)
        except BudgetError:
            return pilot._replace(converged=False)
    if search.chains.effort == "high" or double.n_features > MOST_FEATURES:
        return pilot
    map_ = Affine(pilot.x.mean(0), covariance_root(pilot.x))
    better, drawn = pilot.thinned(N_REFINED).whitened(map_, pilot.x.dtype), list[PartedDraws]()
    score_u, n_drawn = map_.pull_back(without_wrong_density(double, modes.maps[0])), -1
    while n_drawn < len(drawn) < N_REFINEMENTS:
        n_drawn = len(drawn)
        better = refined_pilot(score_u, better, drawn, generator, PLAIN._replace(least_share=SHARE_REFINED))
        if better.converged:
            return better.unwhitened(map_)
    return pilot


def _of_points(modes: ModeMaps, pilot: PilotPoints, found_by: str) -> Found:
    """Return the map by the mean and the covariance of a pilot."""
    y, mean_se, map_ = pilot.x, pilot.mean_se, pilot.map()
    x = y if pilot.warp is None else pilot.warp.unwarp(y)[0]
    if pilot.warp is not None:
        mean_se = (mean_se / y.std(0)).max() * x.std(0)
    mean, mean_se, sd = (a.cpu().numpy() for a in (x.mean(0), mean_se, x.std(0)))
    symmetries = torch.stack(modes.symmetries).cpu().numpy() if modes.symmetries else None
    ascents = None if modes.ascents is None else np.array(modes.ascents)
    where, shares = torch.stack([a.m for a in modes.maps]) if modes.maps else y[:0], modes.weights
    where, shares = where.cpu().numpy(), shares.cpu().numpy()
    found = Whitening(map_, pilot.warp, modes=where, weights=shares, converged=pilot.converged, found_by=found_by)
    return replace(found, mean=mean, mean_se=mean_se, sd=sd, symmetries=symmetries, ascents=ascents), pilot


def _diagonal(search: Search) -> Found:
    """Return a scale for each coordinate, and the chains that it comes from."""
    score, starts, modes = search.score, search.starts, np.empty((0, search.score.n_features))
    if len(starts) == 1:
        mode = newton_cg(score.double, starts[0], search.generator)
        modes, starts = mode.m.cpu().numpy()[None], surrounding(mode, search.generator)
    map_, pilot = underdamped_pilot(score, starts, search.generator, search.left)
    mean, mean_se, sd = (a.cpu().numpy() for a in (map_.m, pilot.mean_se, map_.D))
    found = Whitening(map_, modes=modes, weights=np.ones(len(modes)), converged=pilot.converged)
    return replace(found, mean=mean, mean_se=mean_se, sd=sd, found_by=_explored_by(score.tally)), pilot


def _by_curvature(search: Search) -> Found:
    """Return a map that is diagonal plus low rank, by the curvature at a mode of many features."""
    mode = newton_cg(search.score.double, search.starts[0], search.generator)
    return _of_mode(mode, mode), None


def _unless_many(rule: Callable[[Search], Found]) -> Callable[[Search], Found]:
    """Return a rule that uses only the curvature if there are many features."""
    return lambda search: rule(search) if search.score.n_features <= MAX_FEATURES else _by_curvature(search)


#: The rules that find a map, by the name that `whiten` gives them.
RULES: dict[str, Callable[[Search], Found]] = {
    "auto": _by_chains,
    "bam": _unless_many(_matched),
    "diagonal": _diagonal,
    "laplace": _unless_many(_at_mode),
}


def points_near_target(whiten: Whiten, init: Init) -> Init:
    """Return the points near the target that these parameters give, or None."""
    pair = _pair(whiten)
    return init if pair is None or init is not None else pair[0] if len(pair) else None


def check_start(whiten: Whiten, init: Init, d: int) -> None:
    """Raise ValueError for coordinates or points that do not fit a target of d features."""
    starting_points(init, d)
    if (pair := _pair(whiten)) is not None:
        _given(pair, d)


def starting_points(init: Init, d: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the points (k, d) where mode searches start."""
    if init is None:
        return torch.zeros(1, d, dtype=torch.float64, device=device)
    starts = as_tensor(as_numbers(init, "init"), device=device)
    if starts.dim() not in (1, 2) or starts.shape[-1] != d or not len(starts) or not starts.isfinite().all():
        raise ValueError(f"`init` must be a finite vector of shape {(d,)} or a matrix of such rows, got {init!r}.")
    return starts.view(-1, d)


def _pair(whiten: Whiten) -> tuple[ArrayLike, ArrayLike] | None:
    """Return the (m, L) that is given, None for a rule or nothing."""
    return None if whiten is None or isinstance(whiten, str | Pilot) else whiten


def _given(pair: tuple[ArrayLike, ArrayLike], d: int, device: torch.device | str = "cpu") -> Affine:
    """Return the map of a pair (m, L)."""
    if len(pair) != 2:
        raise ValueError(f"`whiten` must be a pair (mean, Cholesky factor), got {len(pair)} item(s).")
    m, L = (as_tensor(as_numbers(a, "whiten"), device=device) for a in pair)
    fits = m.shape == (d,) and L.shape == (d, d) and m.isfinite().all() and L.isfinite().all()
    if not (fits and (L.diagonal() > 0).all() and L.equal(L.tril())):
        raise ValueError(
            f"`whiten` must be a finite vector of shape {(d,)} and a lower triangular matrix of shape {(d, d)} with "
            f"a positive diagonal (the Cholesky factor of a covariance), got shapes {tuple(m.shape)} and "
            f"{tuple(L.shape)}."
        )
    return Affine(m, L)
