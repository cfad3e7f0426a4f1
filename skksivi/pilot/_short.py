r"""Points near a target from short Hamiltonian chains, and importance sampling from what they show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.coordinates._affine import Affine
from skksivi.coordinates._marginals import fitted_marginals
from skksivi.pilot._gaussian import GAUSSIAN, covariance_root, matched
from skksivi.pilot._hamiltonian import HAMILTONIAN, HamiltonianEnsemble
from skksivi.pilot._importance import pilot_of_mixture, standard_pilot, without_wrong_density
from skksivi.pilot._mixture import MOST_FEATURES
from skksivi.pilot._modes import ModeMaps, find_modes
from skksivi.pilot._newton import check_mode, dense_mode, is_spike
from skksivi.pilot._others import all_modes
from skksivi.pilot._points import MANY_FEATURES, PilotPoints, are_known
from skksivi.pilot._several import Weighing, pilot_of_several
from skksivi.pilot._spike import out_of_spike
from skksivi.pilot._warped import around_start, by_scales, warped
from skksivi.score._errors import DIVERGED, BudgetError
from skksivi.score._improper import has_power_tails
from skksivi.score._score import Score


class ShortSettings(NamedTuple):
    """The settings of `short_pilot`."""

    #: The most features.
    max_features: int = 4000
    #: Trajectories that are kept in each stage, of more features too, and by a low effort; those of many features
    #: have more at the end.
    stages: tuple[int, ...] = (40, 80, 160, 320)
    stages_of_many: tuple[int, ...] = (40, 80, 80, 160, 320)
    low_stages: tuple[int, ...] = (40, 80)
    more_stages: tuple[int, ...] = (640, 1280)
    #: How far chains get from a mode, in its standard deviations, if that is a spike: of few features, where it is
    #: given up, and of many, where the curvature at a mode says less.
    of_spike: float = 30.0
    of_spike_of_many: float = 300.0


SHORT = ShortSettings()

#: Calls of a short pilot, about.
N_EXPECTED = HAMILTONIAN.n_chains * (HAMILTONIAN.n_warm + SHORT.stages[0]) * HAMILTONIAN.n_calls


class Trajectories(NamedTuple):
    """The trajectories of each stage of chains, and those of many features after coordinates have been warped."""

    first: tuple[int, ...]
    more: tuple[int, ...] = ()

    @classmethod
    def of(cls, effort: str, n_features: int) -> Trajectories:
        """Return those of an effort."""
        if effort == "low":
            return cls(SHORT.low_stages)
        return cls(SHORT.stages if n_features <= MOST_FEATURES else SHORT.stages_of_many, SHORT.more_stages)


def short_pilot(
    score_fn: Score,
    starts: Tensor,
    generator: torch.Generator,
    *,
    alone: bool,
    effort: str = "auto",
    warps: bool = False,
) -> tuple[ModeMaps, PilotPoints] | None:
    """Return points near a target, and its modes; None if none is found, or chains do not explore several.

    With many features, chains start where the search for a mode did if that finds none. They explore hierarchies
    whose mode is far from the mass.

    The points have converged if the importance weights of draws of a Gaussian mixture, fitted to chains that agree
    with each other, have a large effective share and a light tail, if means and scales by these have small standard
    errors, and if the mixture is near the target. In many dimensions, where no mixture has such weights, they have
    also converged if the chains nearly agree and have small standard errors themselves.

    Parameters
    ----------
    score_fn : Score
    starts : Tensor of shape (k, d)
        Where the search for modes starts.
    generator : torch.Generator
    alone : bool
        Whether to search for no other modes.
    effort : {"low", "auto", "high"}, default="auto"
        Which sets the stages of chains.
    warps : bool, default=False
        Whether the coordinates may be warped, if that makes the points converge.

    Raises
    ------
    BudgetError
        The budget does not suffice to find a mode; if it is spent later, the best points so far are returned.
    """
    stages, warps = Trajectories.of(effort, starts.shape[1]), warps and starts.shape[1] <= MOST_FEATURES
    try:
        modes = _first_modes(score_fn, starts, generator)
    except DIVERGED:
        if starts.shape[1] < MANY_FEATURES:
            return None
        return _without_mode(score_fn, starts[0], generator, chain(*stages))
    check_mode(score_fn, starts[0], modes.maps[0])
    pilot = standard_pilot(modes.maps[0].m, HAMILTONIAN.n_of_gaussian).unwhitened(modes.maps[0])
    try:
        score_fn = without_wrong_density(score_fn, modes.maps[0])
        at_mode = score_fn, starts[0], modes.maps[0], generator
        if warps and (pilot_y := _with_marginals(*at_mode, alone=alone)) is not None:
            return ModeMaps(modes.maps[:1], modes.weights.new_ones(1)), pilot_y
        if not alone and len(modes.maps) == 1:
            modes = all_modes(*at_mode)
        if len(modes.maps) > 1:
            pilot = pilot_of_mixture(modes.mixture(), HAMILTONIAN.n_of_gaussian)
            return _of_several(score_fn, modes, generator, stages.first)
        for found in _pilots(*at_mode, stages, warps=warps):
            pilot = found if len(found.x) else pilot
            if pilot.converged:
                break
    except DIVERGED:
        return None
    except BudgetError:  # keep the best so far
        pass
    return modes, pilot


def _with_marginals(
    score_fn: Score, start: Tensor, mode: Affine, generator: torch.Generator, *, alone: bool
) -> PilotPoints | None:
    """Return points in coordinates where the independent directions of a target are normal, if all else nearly is.

    Unless the mode is `alone`, or all directions are independent, no other mode may be found from the start (d,).
    """
    curved = fitted_marginals(score_fn, mode, generator)
    if curved is None:
        return None
    score_y, at_zero = curved.pull_back(score_fn), Affine.shift(torch.zeros_like(mode.m))
    ensemble = HamiltonianEnsemble(score_y, matched(score_y, at_zero, generator), generator)
    found = next((pilot for pilot in ensemble.by_metric() if pilot.converged), None)
    if found is None:
        return None
    if not (alone or curved.is_whole):
        others = all_modes(score_y, curved.warp(start[None])[0][0], ensemble.metric, generator)
        found = found if len(others.maps) == 1 else None
    return None if found is None else found._replace(warp=curved)


def _first_modes(score_fn: Score, starts: Tensor, generator: torch.Generator) -> ModeMaps:
    """Return the modes found from the starts (k, d); in many dimensions only from the first."""
    if starts.shape[1] <= MOST_FEATURES:
        return find_modes(score_fn, starts, generator)
    return ModeMaps([dense_mode(score_fn, starts[0], generator)], starts.new_ones(1))


def _without_mode(
    score_fn: Score, start: Tensor, generator: torch.Generator, stages: Iterable[int]
) -> tuple[ModeMaps, PilotPoints] | None:
    """Return no mode and points of chains around a start (d,), None if errors are not small or chains diverge."""
    at_start = Affine.shift(start)
    try:
        score_fn = without_wrong_density(score_fn, at_start)
        pilot = _first_converged(HamiltonianEnsemble(score_fn, at_start, generator).by_stages(stages))
    except DIVERGED:
        return None
    is_known = are_known(len(start), converged=pilot.converged, error=pilot.error)
    return (ModeMaps([], start[:0]), pilot) if is_known and _are_held(score_fn, pilot.x) else None


def _first_converged(pilots: Iterator[PilotPoints]) -> PilotPoints:
    """Return the first of some pilots that has converged, or the last."""
    for pilot in pilots:
        if pilot.converged:
            break
    return pilot


def _are_held(score_fn: Score, x: Tensor) -> bool:
    """Tell whether the score holds points x (n, d) together, E[-s^T (x - E x)] = d, at least to a factor of two."""
    x = x[:: max(1, len(x) // GAUSSIAN.n_quick)]
    held = -(score_fn(x).detach() * (x - x.mean(0))).mean().item()
    return 0.5 < held < 2


def _of_several(
    score_fn: Score, modes: ModeMaps, generator: torch.Generator, stages: Iterable[int]
) -> tuple[ModeMaps, PilotPoints] | None:
    """Return points near several modes, None where they have not converged."""

    def explore(weighing: Weighing, mode: Affine) -> PilotPoints:
        ensemble = HamiltonianEnsemble(score_fn, matched(score_fn, mode, generator), generator, weighing.refined)
        return _first_converged(chain(ensemble.by_metric(), ensemble.by_stages(stages)))

    pilot = pilot_of_several(score_fn, modes, explore, generator)
    return None if pilot is None else (modes, pilot)


def _pilots(
    score_fn: Score, start: Tensor, mode: Affine, generator: torch.Generator, stages: Trajectories, *, warps: bool
) -> Iterator[PilotPoints]:
    """Yield successively better pilots, if they may be warped also in coordinates of other forms."""
    metric, has_many = matched(score_fn, mode, generator), len(mode.m) >= MANY_FEATURES
    if warps and is_spike(mode) and (found := out_of_spike(score_fn, mode, start, generator)) is not None:
        yield found
        metric = Affine(found.x.mean(0), covariance_root(found.x))
    warps, far = warps and not has_power_tails(score_fn), SHORT.of_spike_of_many if has_many else SHORT.of_spike
    yield standard_pilot(metric.m, HAMILTONIAN.n_of_gaussian).unwhitened(metric)
    is_far = was_far = False
    ensemble = HamiltonianEnsemble(score_fn, metric, generator)
    for pilot in chain(ensemble.by_metric(), ensemble.by_stages(stages.first)):
        better = None
        if warps and not has_many and pilot.converged:  # points may be absent from a neck
            better = by_scales(score_fn, pilot.x, generator)
        yield better or pilot
        is_far = bool(metric.whiten(pilot.x).square().mean(0).max() > far**2)
        is_first = len(pilot.x) == HAMILTONIAN.n_chains * stages.first[0]
        if warps and not has_many and (is_far or is_first):
            yield from warped(score_fn, pilot.x, generator)
        if warps and is_far and not was_far:
            yield from warped(score_fn, around_start(score_fn, start, generator), generator)
        if is_far and not has_many:
            return
        was_far = was_far or is_far
    if has_many:
        if warps:
            yield from warped(score_fn, pilot.x, generator)
        yield from ensemble.by_stages(stages.more)
