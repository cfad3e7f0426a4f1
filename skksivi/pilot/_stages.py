"""The stages of the pilot: each proposes points near a target from what is known of it so far."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Protocol, cast

import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from skksivi._utils.checks import warn_caller
from skksivi.coordinates._affine import Affine, standard_normal
from skksivi.coordinates._marginals import fitted_marginals
from skksivi.coordinates._whitening import LONG_CHAINS, Attempt, Whitening, n_looks
from skksivi.judge import THRESHOLDS, Grade, Verdict
from skksivi.parameters import Pilot
from skksivi.pilot._chains import N_CALLS, N_CHAINS, N_OF_GAUSSIAN, N_WARM, ChainEnsemble, Refine, as_they_are
from skksivi.pilot._importance import (
    HeavyTailed,
    fitted,
    nearest_points,
    pilot_of_mixture,
    standard_pilot,
    without_wrong_density,
)
from skksivi.pilot._log_density import Seen, Surrogate, spread_points
from skksivi.pilot._mixture import MOST_FEATURES, gaussian_of, matched
from skksivi.pilot._mode_weights import (
    are_near,
    pilot_of_orbit,
    pilot_of_several,
    pooled,
    symmetrised,
    with_mode_weights,
)
from skksivi.pilot._modes import (
    MAX_STARTS,
    ModeMaps,
    all_modes,
    few_modes,
    find_modes,
    mode_from_prior,
    ridge_of,
    search_around,
)
from skksivi.pilot._newton import check_mode, dense_mode, fault_of_noise, is_spike, look_for_jump, over_noise
from skksivi.pilot._points import MANY_FEATURES, PilotPoints
from skksivi.pilot._profile import around_start, by_scales, out_of_spike, warped
from skksivi.pilot._symmetries import Symmetry, images, same_mode, told
from skksivi.score._domain import doubt_of_sign, has_power_tails
from skksivi.score._products import steadied
from skksivi.score._score import Score
from skksivi.score._tally import DIVERGED, BudgetError, DivergedError, ImproperError

LOGGER = logging.getLogger("skksivi")


#: Trajectories of short chains, stage by stage; low effort takes the first two stages.
TRAJECTORIES = (40, 80, 160, 320)


#: Long chains, at least, and their trajectories, stage by stage.
MIN_CHAINS, LONG_TRAJECTORIES = 128, (200, 200, 200)
LEAST_CALLS = MIN_CHAINS * (N_WARM + LONG_TRAJECTORIES[0]) * N_CALLS

#: Before a search.
NO_MODES = ModeMaps([], torch.empty(0))


@dataclass
class Known:
    """What is known of a target; stages add to it.

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
    accepts : callable or None
        Judges a map and points of which no stage is sure.
    modes : ModeMaps
        Those that were found, none at first; of those that are images of each other one may stand for all.
    symmetries : tuple of Symmetry
        Maps that leave the target as it is and take modes to others.
    metric : Affine or None
        A Gaussian near the target.
    ensemble : ChainEnsemble or None
        Chains that may go on.
    points : PilotPoints or None
        The last that were found.
    others : list of tuple
        Those before, none of which was good, with their modes.
    modes_of_points : ModeMaps
        The modes that were known then: a wider search may find others, and no better points.
    attempts : list of Attempt
    """

    score: Score
    starts: Tensor
    alone: bool
    settings: Pilot
    generator: torch.Generator
    warps: bool
    accepts: Callable[[Whitening, PilotPoints], bool] | None = None
    modes: ModeMaps = NO_MODES
    symmetries: tuple[Symmetry, ...] = ()
    metric: Affine | None = None
    ensemble: ChainEnsemble | None = None
    points: PilotPoints | None = None
    others: list[tuple[PilotPoints, ModeMaps]] = field(default_factory=list)
    modes_of_points: ModeMaps = NO_MODES
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def n_features(self) -> int:
        return self.starts.shape[1]

    @property
    def mode(self) -> Affine:
        """The best mode."""
        return self.modes.maps[0]

    @property
    def has_one_mode(self) -> bool:
        return len(self.modes.maps) == 1

    def takes_one_for_all(self) -> bool:
        """Go on with one mode if all are images of it, which points near it then show."""
        maps, symmetries = self.modes.maps, self.symmetries
        if not symmetries or len(images(maps[:1], symmetries)) + 1 != len(maps):
            return False
        self.modes = self.modes._replace(maps=maps[:1], weights=self.modes.weights.new_ones(1))
        return True

    def symmetrise(self) -> None:
        """Take the points near one mode to all of its images, or warn that these are missing."""
        points, modes = self.points, self.modes_of_points
        if points is None or not (missing := images(modes.maps, self.symmetries)):
            return
        if points.warp is None and len(modes.maps) == 1:
            self.points, found = symmetrised(points, modes.maps[0], self.symmetries)
            self.modes_of_points = found._replace(ascents=modes.ascents, n_looks=modes.n_looks)
            return
        n = len(modes.maps)
        warn_caller(
            f"The fit has {n} of {n + len(missing)} modes that are images of each other, and equal in mass: the "
            f"density does not change with {' or '.join(told(g, self.score.label) for g in self.symmetries[:3])}. If "
            "one is enough, fix that sign or order in the model, as by a positive loading or increasing means.",
            ConvergenceWarning,
        )

    @property
    def chains(self) -> ChainEnsemble:
        """The chains, which go on where they were."""
        if self.ensemble is None:
            metric = self.metric or matched(self.score, self.mode, self.generator)
            self.ensemble = ChainEnsemble(self.score, metric, self.generator)
        return self.ensemble

    @cached_property
    def has_power_tails(self) -> bool:
        return has_power_tails(self.score)

    @property
    def verdict(self) -> Verdict | None:
        return None if self.points is None else self.points.judged()

    @property
    def effort(self) -> str:
        """The effort, which is low where more would not make up for a fault of the target."""
        if self.score.tally.is_frugal:
            return "frugal"
        return "low" if self.score.tally.fault else self.settings.effort

    def within_effort(self, n_trajectories: tuple[int, ...]) -> tuple[int, ...]:
        """Return the numbers of trajectories that the effort allows."""
        return n_trajectories[:2] if self.effort == "low" else n_trajectories

    def add(self, points: PilotPoints) -> None:
        """Take note of points that were found, unless better ones are known, or why there are none."""
        if not len(points.x) and self.points is not None:
            self.points = self.points._replace(verdict=points.verdict)
        elif len(points.x) and (self.points is None or not _is_better(self.points.judged(), points.judged())):
            if self.points is not None:
                self.others.append((self.points, self.modes_of_points))
            self.points, self.modes_of_points = points, self.modes

    def take_best(self) -> None:
        """Take those of all points, none of which is good, that are nearest to the target by weighted draws.

        The last stay where log p is not known: its integrals to points far off cannot be trusted.
        """
        now, log_prob = self.points, self.score.log_prob
        if now is None or now.judged().grade > Grade.ROUGH or self.n_features >= MANY_FEATURES or log_prob is None:
            return
        if self.effort == "frugal":  # the last go by all scores
            return
        found = [each for each in ((now, self.modes_of_points), *reversed(self.others)) if each[0].warp is None]
        if now.warp is None and len(found) > 1:
            with suppress(BudgetError):
                i = nearest_points(log_prob, [points for points, _ in found], self.generator)
                self.points, self.modes_of_points = found[i]
                self.others.clear()


def _is_better(a: Verdict, b: Verdict) -> bool:
    """Tell whether points are better than others; of good ones the later are as good."""
    return not b.good and a > b


class PilotStage(Protocol):
    """A way to points near a target.

    Attributes
    ----------
    name : str
    """

    @property
    def name(self) -> str: ...

    def applies(self, known: Known) -> bool:
        """Tell whether it can add anything."""
        ...

    def propose(self, known: Known) -> Iterator[PilotPoints]:
        """Yield successively better points.

        Raises
        ------
        DivergedError
            Searches or chains left the region where the score is finite.
        BudgetError
        """
        ...


def run_stages(stages: tuple[PilotStage, ...], known: Known) -> None:
    """Run the stages that apply, until the points of one are good enough."""
    tally = known.score.tally
    for stage in stages:
        if not stage.applies(known) or stage.name in known.settings.skip:
            continue
        n_before, n_attempts, began, verdict = tally.total, len(known.attempts), time.monotonic(), ""
        try:
            for points in stage.propose(known):
                known.add(points)
                verdict = str(points.judged())
                if points.converged:
                    if tally.has_suspect:
                        x = points.x[:: max(1, len(points.x) // 32)]
                        look_for_jump(known.score, x if points.warp is None else points.warp.unwarp(x)[0])
                    return
        finally:
            inner, spent = known.attempts[n_attempts:], time.monotonic() - began
            n_calls = tally.total - n_before - sum(attempt.n_calls for attempt in inner)
            attempt = Attempt(stage.name, n_calls, spent - sum(attempt.seconds for attempt in inner), verdict)
            known.attempts.append(attempt)
            LOGGER.debug("pilot: %s", attempt)


class Newton:
    """The mode to which Newton steps lead from the start, and the Gaussian by the curvature there."""

    name = "mode search"

    def applies(self, known: Known) -> bool:
        return not known.modes.maps

    def propose(self, known: Known) -> Iterator[PilotPoints]:
        score, starts = known.score, known.starts
        if known.n_features <= MOST_FEATURES:
            modes = _first_modes(known)
            is_open = not known.alone and known.effort != "frugal"
            if is_open and (better := mode_from_prior(score, modes.maps[0], known.generator)) is not None:
                modes = ModeMaps([better], starts.new_ones(1))
            if is_open and (ridge := ridge_of(score, starts, modes.maps[0], known.generator)) is not None:
                modes, known.metric = ModeMaps([ridge], starts.new_ones(1)), ridge
        else:
            modes = ModeMaps([dense_mode(score, starts[0], known.generator)], starts.new_ones(1))
        if score.is_rough:
            known.score = score = steadied(score, modes.maps[0].m[None])
            modes = find_modes(score, torch.stack([a.m for a in modes.maps]), known.generator)
            if not is_spike(modes.maps[0]):  # in which rounding is as large
                modes = modes._replace(maps=[over_noise(score, mode) for mode in modes.maps])
                score.tally.found(fault_of_noise(score, modes.maps[0]))
        known.modes = modes
        yield standard_pilot(modes.maps[0].m, N_OF_GAUSSIAN).unwhitened(modes.maps[0])
        check_mode(score, starts[0], modes.maps[0])
        known.score = without_wrong_density(score, modes.maps[0])


def _first_modes(known: Known) -> ModeMaps:
    """Return the modes that searches from the starts find or, where that would take half of few calls, the start."""
    with known.score.tally.trying(450) if known.effort == "frugal" else nullcontext():
        return find_modes(known.score, known.starts, known.generator)
    return ModeMaps([Affine.shift(known.starts[0])], known.starts.new_ones(1))


class IndependentDirections:
    """Coordinates in which the independent directions of a target are normal, if all else nearly is.

    Unless the mode is alone, or all directions are independent, no other mode may be found.
    """

    name = "independent directions"

    def applies(self, known: Known) -> bool:
        return known.warps and bool(known.modes.maps)

    def propose(self, known: Known) -> Iterator[PilotPoints]:
        mode = known.mode
        curved = fitted_marginals(known.score, mode, known.generator)
        if curved is None:
            return
        score_y, at_zero = curved.pull_back(known.score), Affine.shift(torch.zeros_like(mode.m))
        ensemble = ChainEnsemble(score_y, matched(score_y, at_zero, known.generator), known.generator)
        found = next((points for points in ensemble.by_metric() if points.converged), None)
        if found is None or not are_near(known.modes, curved.unwarp(found.x)[0]).all():
            return
        if not (known.alone or curved.is_whole):
            start_y = curved.warp(known.starts[:1])[0][0]
            if len(all_modes(score_y, start_y, ensemble.metric, known.generator).maps) > 1:
                return
        known.modes = ModeMaps([mode], known.starts.new_ones(1))
        yield found._replace(warp=curved)


class OtherModes:
    """The other modes, to which ascents from all around lead."""

    name = "other modes"

    def applies(self, known: Known) -> bool:
        return known.has_one_mode and not known.alone

    def propose(self, known: Known) -> Iterator[PilotPoints]:
        thorough = known.effort == "high"
        known.modes = all_modes(known.score, known.starts[0], known.mode, known.generator, thorough=thorough)
        known.symmetries = known.modes.symmetries
        if known.n_features >= MANY_FEATURES and known.takes_one_for_all():
            return
        if len(known.modes.maps) > 1:
            yield pilot_of_mixture(known.modes.mixture(), N_OF_GAUSSIAN)


class AllModes:
    """Importance sampling from Gaussians at all modes, or from chains around each, weighted by bridge sampling."""

    name = "all modes"

    def applies(self, known: Known) -> bool:
        return len(known.modes.maps) > 1

    def propose(self, known: Known) -> Iterator[PilotPoints]:
        yield pilot_of_mixture(known.modes.mixture(), N_OF_GAUSSIAN)

        def explore(refine: Refine, mode: Affine) -> PilotPoints:
            metric = matched(known.score, mode, known.generator)
            ensemble = ChainEnsemble(known.score, metric, known.generator, refine)
            stages = ensemble.by_stages(known.within_effort(TRAJECTORIES))
            return first_converged(chain(ensemble.by_metric(), stages))

        by_image = partial(pilot_of_orbit, known.score, known.modes, known.symmetries, known.generator)
        found = pilot_of_several(known.score, known.modes, explore, known.generator, by_image)
        if found is not None:
            yield found
        elif not known.takes_one_for_all():
            raise DivergedError


def first_converged(pilots: Iterator[PilotPoints]) -> PilotPoints:
    """Return the first of some pilots that has converged, or the last."""
    for pilot in pilots:
        if pilot.converged:
            break
    return pilot


def until_spent(pilots: Iterator[PilotPoints]) -> Iterator[PilotPoints]:
    """Yield pilots until the budget ends, if that leaves one."""
    found = False
    try:
        for pilot in pilots:
            found = True
            yield pilot
    except BudgetError:
        if not found:
            raise


class Spike:
    """The profile along what scales the others, where the search for a mode ends in a spike."""

    name = "profile of a spike"

    def applies(self, known: Known) -> bool:
        return known.warps and known.has_one_mode and known.score.units is None and is_spike(known.mode)

    def propose(self, known: Known) -> Iterator[PilotPoints]:
        found = out_of_spike(known.score, known.mode, known.starts[0], known.generator)
        if found is None:
            check_resolved(known)  # chains would start from the spike
            return
        known.metric = gaussian_of(found.x)
        yield found
        if known.n_features >= MANY_FEATURES and not found.converged:  # of which chains do not enter the neck
            yield from warped(known.score, found.x, known.generator)


def check_resolved(known: Known) -> None:
    """Refuse a target of single precision that is known by a spike alone, or by points that it does not tell apart.

    Raises
    ------
    ValueError
    """
    score, points = known.score, known.points
    if score.type_computed == torch.float64:
        return
    by_mode = is_spike(known.mode) or (points is not None and points.warp is not None)
    x = known.mode.m[None] if points is None or by_mode else points.x
    sd = known.mode.L.norm(dim=1) if len(x) < 2 else x.std(0)
    is_point = sd < 100 * torch.finfo(score.type_computed).eps * x.mean(0).abs()
    if not (is_spike(known.mode) or is_point.any()):
        return
    j = int((sd / x.mean(0).abs()).argmin())
    raise ValueError(
        "The target is computed in float32, whose rounding hides where its mass is: the search ends in a spike, with "
        f"{score.label(j)} at {x.mean(0)[j]:.4g} give or take {sd[j]:.1g}, as where a scale of a hierarchy or of a "
        "random walk is zero, or units differ too much. Compute it in float64"
        f"{f' ({score.advice})' if score.advice else ''}, or give the model in its non-centred form."
    )


class MatchedGaussian:
    """Importance sampling from the Gaussian at the mode, or from one fitted to the scores, and from mixtures that are
    fitted to its draws.
    """

    name = "matched Gaussian"

    def applies(self, known: Known) -> bool:
        return known.has_one_mode

    def propose(self, known: Known) -> Iterator[PilotPoints]:
        metric = known.chains.metric
        yield standard_pilot(metric.m, N_OF_GAUSSIAN).unwhitened(metric)
        for points in chain(known.chains.by_metric(), known.chains.by_mixtures()):
            yield _out_of_neck(known, points)


def _out_of_neck(known: Known, points: PilotPoints) -> PilotPoints:
    """Return points that have converged, or better ones where these are absent from the neck of a funnel."""
    if not (known.warps and points.converged and known.n_features < MANY_FEATURES) or known.has_power_tails:
        return points
    return by_scales(known.score, points.x, known.generator) or points


class ShortChains:
    """Short Hamiltonian chains and importance sampling from what they show, also in warped coordinates.

    Of few features coordinates are warped after the first trajectories, and wherever chains get far from the mode,
    which is then given up; of many only around the start, for the curvature at a mode says less there.
    """

    name = "short chains"

    def applies(self, known: Known) -> bool:
        return known.has_one_mode

    def propose(self, known: Known) -> Iterator[PilotPoints]:
        metric, has_many = known.chains.metric, known.n_features >= MANY_FEATURES
        u = standard_normal(32, metric.m, torch.Generator(metric.m.device).manual_seed(0))
        look_for_jump(known.score, metric.unwhiten(torch.cat([u[:1] * 0, 1.5 * u])))
        # how far from the mode chains have got away, in units of the metric
        most, was_far = 300.0 if has_many else 30.0, False
        n_first = N_CHAINS * TRAJECTORIES[0]
        warps = known.warps and not known.has_power_tails
        of_many = known.n_features > MOST_FEATURES
        n_trajectories = known.within_effort((40, 80, 80, 160, 320) if of_many else TRAJECTORIES)
        for points in known.chains.by_stages(n_trajectories):
            yield _out_of_neck(known, points)
            is_far = bool(metric.whiten(points.x).square().mean(0).max() > most**2)
            if warps and not has_many and (is_far or len(points.x) == n_first):
                yield from warped(known.score, points.x, known.generator)
            agree = has_many and points.error < THRESHOLDS.chain_errors[1]  # and need no others
            if warps and is_far and not (was_far or agree):
                x = around_start(known.score, known.starts[0], known.generator)
                yield from warped(known.score, x, known.generator)
            if is_far and not has_many:
                break
            was_far |= is_far
        if is_spike(known.mode):
            check_resolved(known)


class WarpedCoordinates:
    """Chains of many features in coordinates that are warped."""

    name = "warped coordinates"

    def applies(self, known: Known) -> bool:
        return known.warps and known.has_one_mode and known.n_features >= MANY_FEATURES

    def propose(self, known: Known) -> Iterator[PilotPoints]:
        if known.points is None or known.has_power_tails:
            return
        # what drives a coordinate shows in chains that told where its middle is, before some entered a neck
        if min(points.error for points, _ in (*known.others, (known.points, None))) < THRESHOLDS.small_errors:
            yield from warped(known.score, known.points.x, known.generator)


class MoreTrajectories:
    """The same chains of many features, for longer."""

    name = "more trajectories"

    def applies(self, known: Known) -> bool:
        return known.has_one_mode and known.n_features >= MANY_FEATURES and known.effort != "low"

    def propose(self, known: Known) -> Iterator[PilotPoints]:
        return known.chains.by_stages((640, 1280))


# Where scores are expensive


class FewAscents:
    """The other modes, to which a dozen ascents lead."""

    name = OtherModes.name

    def applies(self, known: Known) -> bool:
        return known.has_one_mode and not known.alone

    def propose(self, known: Known) -> Iterator[PilotPoints]:
        tally, most = known.score.tally, 150  # calls, which leave as many for the next stage
        known.modes = known.modes._replace(ascents=(0, 0))
        if (tally.left or 0) < 2 * most:
            return
        with tally.trying(most):
            n = 4 if n_looks(known.n_features) else 10  # less where many looks would be needed as well
            known.modes = few_modes(known.score, known.starts[0], known.mode, known.generator, n)
        yield pilot_of_mixture(known.modes.mixture(), N_OF_GAUSSIAN)


class FewScores:
    """The stages of a target that costs nothing, on a surrogate of log p by the scores of few points.

    In each round the scores at some of its points tell how far off it is; with those of others around them it is
    fitted again. The points of a round are no better than the surrogate, and never more than rough.
    """

    name = "surrogate"

    def applies(self, known: Known) -> bool:
        return known.n_features <= MOST_FEATURES

    def propose(self, known: Known) -> Iterator[PilotPoints]:
        score, generator, d = known.score, known.generator, known.n_features
        score.tally.begin(self.name, score.tally.left or 0)
        mixture = known.modes.mixture()
        seen, n_own = Seen(mixture.map()), min(24 + 2 * d, 90) // 3
        x = HeavyTailed.wider(mixture.draws()).sample(min(2 * d + 30, 90), generator)
        seen.add(x, score(x).detach())
        error, least = math.inf, math.inf
        for _ in range(16):
            if (score.tally.left or 0) < 10:
                break
            if len(seen.x) < 3:
                raise DivergedError(x)
            seen.refit()
            points = _of_surrogate(seen.model, known)
            own = points.x[torch.randperm(len(points.x), generator=generator, device=x.device)[:n_own]]
            mixture = points.mixture or fitted(points.x, generator)
            u = torch.cat([own, spread_points(seen, mixture, 2 * n_own, own, generator)])[: score.tally.left]
            points, x = points.unwhitened(seen.metric), seen.metric.unwhiten(u)
            s = score(x).detach()
            before, error, around = error, seen.error(x[:n_own], s[:n_own]), seen.error(x[n_own:], s[n_own:])
            if error <= 1.5 * least:
                least = min(error, least)
                verdict = Verdict(Grade.ROUGH, f"a surrogate by {len(seen.x)} scores, off by {error**0.5:.2g}")
                yield points._replace(verdict=verdict, found_by=self.name)
            if max(before, error) < 0.02 and around < 0.1:
                break
            seen.add(x, s)
            if error < 0.5:
                seen.metric = gaussian_of(points.x)


class LastAscents:
    """More ascents, from around the points that were found, by the calls that are left."""

    name = OtherModes.name

    def applies(self, known: Known) -> bool:
        ascents, left = known.modes.ascents, known.score.tally.left or 0
        return known.has_one_mode and ascents is not None and not n_looks(known.n_features) and left >= 60

    def propose(self, known: Known) -> Iterator[PilotPoints]:
        tally, around = known.score.tally, known.mode if known.points is None else known.points.map()
        left = tally.left or 0
        tally.begin("search for modes", left)
        with tally.trying(left):
            found = few_modes(known.score, known.starts[0], around, known.generator, min(left // 7, 64))
            known.modes_of_points = known.modes_of_points._replace(ascents=found.ascents)
        yield from ()


def _of_surrogate(model: Surrogate, known: Known) -> PilotPoints:
    """Return points near a surrogate."""
    at_zero = Affine.shift(torch.zeros_like(known.starts[0]))
    of_model = Known(model.as_score(), at_zero.m[None], True, Pilot(effort="low"), known.generator, warps=False)
    of_model.modes = ModeMaps([at_zero], at_zero.m.new_ones(1))
    of_model.add(standard_pilot(at_zero.m, N_OF_GAUSSIAN))
    with suppress(*DIVERGED):
        run_stages((MatchedGaussian(), ShortChains()), of_model)
    of_model.take_best()
    return cast("PilotPoints", of_model.points)


# Where short chains are not enough


@dataclass(frozen=True)
class WiderSearch:
    """A search for modes from points all around, and the stages before from another single mode, if there is one.

    A density that grows far out, or repeats itself, is refused here, before long chains run off.
    """

    stages: tuple[PilotStage, ...]
    n_starts: int
    name: str = "wider mode search"

    def applies(self, known: Known) -> bool:
        if known.alone:
            return self.n_starts == MAX_STARTS
        # another from more starts is of use where the first one has found several modes, or none
        return self.n_starts < MAX_STARTS or known.points is None or not known.has_one_mode

    def propose(self, known: Known) -> Iterator[PilotPoints]:
        modes = search_around(known.score, known.starts, known.generator, alone=known.alone, n_starts=self.n_starts)
        check_mass(known, modes.maps[0])
        before, known.modes = known.modes, modes._replace(ascents=known.modes.ascents, n_looks=known.modes.n_looks)
        if known.points is None:
            check_resolved(known)
            yield pilot_of_mixture(modes.mixture(), N_OF_GAUSSIAN)
            if len(modes.maps) > 1:  # as where p is zero at the start
                with suppress(*DIVERGED):
                    yield from AllModes().propose(known)
        elif len(before.maps) == len(modes.maps) == 1 and not same_mode(modes.maps[0], before.maps[0]):
            start, alone = modes.maps[0].m[None], self.n_starts == MAX_STARTS
            there = Known(known.score, start, alone, known.settings, known.generator, known.warps)
            there.attempts = known.attempts
            with suppress(*DIVERGED):
                run_stages(self.stages, there)
            if there.points is not None and there.points.converged:
                known.modes, known.symmetries = there.modes, there.symmetries or known.symmetries
                yield there.points


def check_mass(known: Known, mode: Affine) -> None:
    """Refuse a density that grows far out, or that repeats itself around a mode.

    Raises
    ------
    ImproperError
    """
    if (doubt := doubt_of_sign(known.score)) is not None:
        raise ImproperError(doubt)
    if known.alone:  # otherwise all modes have been searched for
        with suppress(*DIVERGED):
            all_modes(known.score, known.starts[0], mode, torch.Generator(known.starts.device).manual_seed(0))


class LongChains:
    """Many long chains around each mode, pooled by the weights of the modes, and importance sampling from them.

    Chains that end far from those before do not count as converged.
    """

    name = LONG_CHAINS

    def applies(self, known: Known) -> bool:
        return bool(known.modes.maps)

    def propose(self, known: Known) -> Iterator[PilotPoints]:
        before, modes, tally = known.points, known.modes, known.score.tally
        longest, left = N_CALLS * (N_WARM + sum(LONG_TRAJECTORIES)), tally.left or known.settings.budget
        n_chains = min(max(left // longest, MIN_CHAINS), 2048)
        fewest = min(64, max(16, 2 * n_chains // len(modes.maps)))
        refine = as_they_are if len(modes.maps) > 1 or known.settings.effort == "high" else None
        parts = list[PilotPoints]()
        for mode, w in zip(modes.maps, modes.weights.tolist(), strict=True):
            n_others = len(modes.maps) - len(parts) - 1  # each of which may take as much of what is left
            with tally.reserving((tally.left or 0) * n_others // (n_others + 1)):
                parts.append(self._around(known, mode, max(fewest, round(n_chains * w)), refine))
        found = parts[0]
        if len(parts) > 1:
            tally.begin("weights of modes")
            found = pooled(parts, modes)
            with suppress(BudgetError):
                found = with_mode_weights(known.score, found, known.generator)
        if before is not None and found.converged and self._are_apart(found, before):
            apart = Verdict(Grade.ROUGH, "long chains end far from the points before")
            known.points, found = before._replace(verdict=apart), found._replace(verdict=apart)
        yield found

    def _around(self, known: Known, mode: Affine, n: int, refine: Refine | None) -> PilotPoints:
        """Return the points of n chains around a mode, of its Gaussian where the budget of one of several ends."""
        try:
            metric = matched(known.score, mode, known.generator)
            ensemble = ChainEnsemble(known.score, metric, known.generator, refine, n, self.name)
            return first_converged(until_spent(ensemble.by_stages(LONG_TRAJECTORIES)))
        except BudgetError:
            if known.has_one_mode:
                raise
            return pilot_of_mixture(ModeMaps([mode], mode.m.new_ones(1)).mixture(), N_OF_GAUSSIAN)

    def _are_apart(self, found: PilotPoints, before: PilotPoints) -> bool:
        return bool(found.map().whiten(before.x).square().mean(1).median() > THRESHOLDS.far_apart)
