r"""Short Hamiltonian chains around the one mode of a target, and importance sampling from what they show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.pilot._affine import Affine, standard_normal
from skksivi.pilot._chains import (
    PilotPoints,
    adapted_by_scores,
    batch_and_match,
    covariance_root,
    lobatto,
    lobatto_nodes,
    revive,
)
from skksivi.pilot._importance import (
    PLAIN,
    Draws,
    moments,
    pilot_of,
    pilot_with,
    refined,
    settled,
    standard_pilot,
    without_wrong_density,
)
from skksivi.pilot._mixture import MOST_FEATURES
from skksivi.pilot._modes import LostError, ModeMaps, dense_mode, find_modes, score_divergence
from skksivi.pilot._others import all_modes
from skksivi.pilot._several import Weighing, laplace, pilot_of_several
from skksivi.pilot._tails import fitted_tails
from skksivi.pilot._warp import Warp, fitted_warp
from skksivi.score._improper import has_power_tails
from skksivi.score._score import DifferentiableScore, Score, ScoreFunction
from skksivi.score._tally import SpentError


class ShortSettings(NamedTuple):
    """The settings of `short_pilot`."""

    #: The most features, and those up to which modes are found by dense Newton steps, points are weighed, and
    #: coordinates may be warped.
    max_features: int = 4000
    few_features: int = MOST_FEATURES
    #: The most numbers in the points of all chains.
    max_kept: int = 2**26
    #: The score divergence below which the Gaussian at the mode will do, that below which it is the target itself,
    #: that of a metric which no points improve, the draws by which it is found, and iterations of a Gaussian that is
    #: fitted.
    near_gaussian: float = 0.05
    gaussian: float = 1e-4
    exact: float = 0.01
    n_compared: int = 64
    n_matched: int = 16
    #: Chains, trajectories to warm up and those kept in each stage, of many features too, those of which have more at
    #: the end, their lengths, the most steps of one, the acceptance, and about how many calls a trajectory takes.
    n_chains: int = 32
    n_warm: int = 12
    stages: tuple[int, ...] = (40, 80, 160, 320)
    stages_of_many: tuple[int, ...] = (40, 80, 80, 160, 320)
    more_stages: tuple[int, ...] = (640, 1280)
    low_stages: tuple[int, ...] = (40, 80)
    lengths: tuple[float, float] = (0.5, 3.5)
    max_leapfrogs: int = 10
    acceptance: float = 0.8
    n_calls: int = 4
    #: The R-hat above which chains begin again, and that above which they do so at once; that at which their word is
    #: taken where no mixture has weights that count, and the features from which on that may be so; the trajectories
    #: after which the second standard error will do, and that of means which no longer chains improve.
    max_rhat: float = 1.2
    elsewhere: float = 2.0
    agreed: float = 1.03
    many_features: int = 30
    late: int = 200
    max_se: tuple[float, float] = (0.02, 0.05)
    nearly: float = 0.1
    #: The stages of chains in warped coordinates, how often these are fitted, how far points may have moved since, in
    #: standard deviations, the first and last of many features too, and how many times as far a draw may be.
    stages_warped: tuple[int, ...] = (40, 80)
    stages_warped_of_many: tuple[int, ...] = (40, 80, 160)
    n_warps: int = 4
    settled: float = 0.1
    settled_of_many: float = 0.15
    astray: float = 20.0
    #: How far chains get from a mode, in its standard deviations, if that is a spike: of few features, where it is
    #: given up, and of many, where the curvature at a mode says less.
    of_spike: float = 30.0
    of_spike_of_many: float = 300.0
    #: Points of a Gaussian, where no more may be spent.
    n_of_gaussian: int = 2000


SHORT = ShortSettings()

#: Returns a pilot with more points, in the coordinates of a map, and adds to what was drawn.
Refine = Callable[[Affine, PilotPoints, list[Draws]], PilotPoints]

#: Calls of a short pilot, about.
N_EXPECTED = SHORT.n_chains * (SHORT.n_warm + SHORT.stages[0]) * SHORT.n_calls


class Chains(NamedTuple):
    """Chains u (n, d) with their scores and log p up to a constant of each, and the step of their integrator."""

    u: Tensor
    s: Tensor
    log_p: Tensor
    step: float

    @classmethod
    def at(cls, score_u: DifferentiableScore, u: Tensor, step: float) -> Chains:
        """Return chains that start at u (n, d)."""
        log_p = u.new_zeros(len(u)) if score_u.log_prob is None else score_u.log_prob(u).detach()
        return cls(u, score_u(u).detach(), log_p, step)


def short_pilot(
    score_fn: Score,
    starts: Tensor,
    generator: torch.Generator,
    *,
    alone: bool,
    stages: Sequence[int] = SHORT.stages,
    more_stages: Sequence[int] = SHORT.more_stages,
    warps: bool = False,
) -> tuple[ModeMaps, PilotPoints] | None:
    """Return points near a target, and its modes; None where none is found, or chains do not explore several.

    Of many features chains start where the search for a mode did, if that finds none. They explore hierarchies whose
    mode is far from the mass.

    The points have converged if the importance weights of draws of a Gaussian mixture, fitted to chains that agree
    with each other, have a large effective share and a light tail, if means and scales by these have small standard
    errors, and if the mixture is near the target. In many dimensions, where no mixture has such weights, they have
    too if the chains as good as agree and have small standard errors themselves.

    Parameters
    ----------
    score_fn : Score
    starts : Tensor of shape (k, d)
        Where the search for modes starts.
    generator : torch.Generator
    alone : bool
        Whether no other modes are looked for.
    stages : sequence of int, default=SHORT.stages
        Trajectories that are kept in each.
    more_stages : sequence of int, default=SHORT.more_stages
        Those of many features, after coordinates have been warped.
    warps : bool, default=False
        Whether the coordinates may be warped, if that makes the points converge.

    Raises
    ------
    SpentError
        The score may not be asked often enough to find a mode; later the best points so far are returned.
    """
    try:
        modes = _first_modes(score_fn, starts, generator)
    except (LostError, torch.linalg.LinAlgError):
        has_few = starts.shape[1] < SHORT.many_features
        return None if has_few else _without_mode(score_fn, starts[0], generator, (*stages, *more_stages))
    try:
        pilot = standard_pilot(modes.maps[0].m, SHORT.n_of_gaussian).unwhitened(modes.maps[0])
        score_fn = without_wrong_density(score_fn, modes.maps[0])
    except (LostError, torch.linalg.LinAlgError):
        return None
    try:
        if not alone and len(modes.maps) == 1:
            modes = all_modes(score_fn, starts[0], modes.maps[0], generator)
        if len(modes.maps) > 1:
            pilot = pilot_of(laplace(modes), SHORT.n_of_gaussian)
            return _of_several(score_fn, modes, generator, stages)
        for found in _pilots(score_fn, modes.maps[0], starts[0], generator, (stages, more_stages), warps=warps):
            pilot = found if len(found.x) else pilot
            if pilot.converged:
                break
    except (LostError, torch.linalg.LinAlgError):
        return None
    except SpentError:  # what there is will have to do
        pass
    return modes, pilot


def _first_modes(score_fn: Score, starts: Tensor, generator: torch.Generator) -> ModeMaps:
    """Return the modes above the starts (k, d), of many dimensions that above the first."""
    if starts.shape[1] <= SHORT.few_features:
        return find_modes(score_fn, starts, generator)
    return ModeMaps([dense_mode(score_fn, starts[0], generator)], starts.new_ones(1))


def _without_mode(
    score_fn: Score, start: Tensor, generator: torch.Generator, stages: Sequence[int]
) -> tuple[ModeMaps, PilotPoints] | None:
    """Return no mode and points of chains around a start (d,), None where errors are not small or they run off."""
    at_start = Affine.shift(start)
    try:
        score_fn = without_wrong_density(score_fn, at_start)
        for pilot in _by_stages(score_fn, at_start, generator, stages, at_once=False):
            if pilot.converged:
                break
    except (LostError, torch.linalg.LinAlgError):
        return None
    settled_there = pilot.converged or pilot.error() < SHORT.nearly
    return (ModeMaps([], start[:0]), pilot) if settled_there and _are_held(score_fn, pilot.x) else None


def _are_held(score_fn: Score, x: Tensor) -> bool:
    """Tell whether the score holds points x (n, d) together, E[-s^T (x - E x)] = d, at least to a factor of two."""
    x = x[:: max(1, len(x) // SHORT.n_compared)]
    held = -(score_fn(x).detach() * (x - x.mean(0))).mean().item()
    return 0.5 < held < 2


def _of_several(
    score_fn: Score, modes: ModeMaps, generator: torch.Generator, stages: Sequence[int]
) -> tuple[ModeMaps, PilotPoints] | None:
    """Return points near several modes, None where they have not converged."""

    def explore(weighing: Weighing, mode: Affine) -> PilotPoints:
        metric = matched(score_fn, mode, generator)
        for pilot in _by_stages(score_fn, metric, generator, stages, refine=weighing.refined):
            if pilot.converged:
                break
        return pilot

    pilot = pilot_of_several(score_fn, modes, explore, generator)
    return None if pilot is None else (modes, pilot)


def _pilots(
    score_fn: Score,
    mode: Affine,
    start: Tensor,
    generator: torch.Generator,
    stages: tuple[Sequence[int], Sequence[int]],
    *,
    warps: bool,
) -> Iterator[PilotPoints]:
    """Yield better and better pilots, if they may be warped also in coordinates of other forms, by stages before that
    and, of many features, after it.
    """
    before, after = stages
    warps = warps and len(mode.m) <= SHORT.few_features
    if warps and (better := _with_tails(score_fn, mode, generator)) is not None:
        yield better
    metric, has_few = matched(score_fn, mode, generator), len(mode.m) < SHORT.many_features
    warps, least = warps and not has_power_tails(score_fn), SHORT.of_spike if has_few else SHORT.of_spike_of_many
    yield standard_pilot(metric.m, SHORT.n_of_gaussian).unwhitened(metric)
    is_spike = was_spike = False
    ensemble = _Ensemble(score_fn, metric, generator)
    for pilot in chain(ensemble.by_metric(), *map(ensemble.stage, before)):
        yield pilot
        is_spike = bool(metric.whiten(pilot.x).square().mean(0).max() > least**2)
        if warps and has_few and (is_spike or len(pilot.x) == SHORT.n_chains * before[0]):
            yield from _curved(score_fn, pilot.x, generator)
        if warps and is_spike and not was_spike:
            yield from _curved(score_fn, _around(score_fn, start, generator), generator)
        if is_spike and has_few:
            return
        was_spike = was_spike or is_spike
    if has_few:
        return
    if warps:
        yield from _curved(score_fn, pilot.x, generator)
    for n in after:
        yield from ensemble.stage(n)


def _curved(score_fn: Score, x: Tensor, generator: torch.Generator) -> Iterator[PilotPoints]:
    """Yield points in coordinates that are warped by points x (n, d), if they converge there."""
    if (better := _warped(score_fn, x, generator)) is not None:
        yield better


def matched(score_fn: ScoreFunction, mode: Affine, generator: torch.Generator) -> Affine:
    """Return the Gaussian at a mode, or the one fitted by batch and match if its score is nearer the target's."""
    error = score_divergence(score_fn, mode, generator, SHORT.n_compared)
    if error < SHORT.near_gaussian or len(mode.m) > SHORT.few_features:
        return mode
    q = batch_and_match(score_fn, mode, generator, SHORT.n_matched)
    return q if score_divergence(score_fn, q, generator, SHORT.n_compared) < error else mode


def _by_stages(
    score_fn: Score,
    metric: Affine,
    generator: torch.Generator,
    stages: Sequence[int],
    *,
    at_once: bool = True,
    refine: Refine | None = None,
) -> Iterator[PilotPoints]:
    """Yield the pilots of importance sampling from the Gaussian of the metric, if that may do, and of chains."""
    ensemble = _Ensemble(score_fn, metric, generator, refine)
    if at_once:
        yield from ensemble.by_metric()
    for n in stages:
        yield from ensemble.stage(n)


class _Ensemble:
    """Chains that explore a target in the coordinates of a metric.

    They warm up their step; each stage is tested in the middle and at its end. Chains that are far apart there begin
    again with a metric by their points and scores, unless theirs is exact.
    """

    def __init__(
        self, score_fn: Score, metric: Affine, generator: torch.Generator, refine: Refine | None = None
    ) -> None:
        self.score_fn, self.metric, self.generator = score_fn, metric, generator
        self.refine, self.has_few = refine or self._refined, len(metric.m) <= SHORT.few_features
        self.x: Tensor | None = None
        self.step = len(metric.m) ** -0.25
        self.kept, self.drawn = list[Chains](), list[Draws]()

    def _refined(self, metric: Affine, pilot: PilotPoints, drawn: list[Draws]) -> PilotPoints:
        return refined(metric.pull_back(self.score_fn), pilot, drawn, self.generator)

    def by_metric(self) -> Iterator[PilotPoints]:
        """Yield a pilot of draws of the Gaussian of the metric, if it is near the target."""
        error = score_divergence(self.score_fn, self.metric, self.generator, SHORT.n_compared)
        of_gaussian = partial(standard_pilot, self.metric.m)
        if error < SHORT.near_gaussian and self.has_few:
            yield self.refine(self.metric, of_gaussian(), []).unwhitened(self.metric)
        elif error < SHORT.gaussian:
            yield of_gaussian(SHORT.n_of_gaussian)._replace(converged=True).unwhitened(self.metric)

    def stage(self, n: int) -> Iterator[PilotPoints]:
        """Yield the pilots of n more trajectories, none where these are more numbers than are kept."""
        score_fn, metric, generator = self.score_fn, self.metric, self.generator
        x = self._starts() if self.x is None else self.x
        if (len(self.kept) + n) * x.numel() > SHORT.max_kept:
            return
        score_u = metric.pull_back(score_fn)
        chains = Chains.at(score_u, metric.whiten(x), self.step)
        for _ in range(2):
            n_warm = 0 if self.kept else SHORT.n_warm
            score_fn.tally.begin("short chains", len(x) * (n_warm + n // 2) * SHORT.n_calls)
            chains = warmed_up(score_u, chains, generator) if n_warm else chains
            for _ in range(n // 2):
                chains = trajectory(score_u, chains, generator)
                self.kept.append(chains)
            draws = Draws(torch.stack([c.u for c in self.kept]), torch.stack([c.s for c in self.kept]))
            apart = disagreement(draws.u)
            refine = partial(self.refine, metric) if self.has_few else None
            yield _judged(draws, apart, generator, refine, self.drawn).unwhitened(metric)
            if apart > SHORT.elsewhere:
                break
        self.x, self.step = metric.unwhiten(chains.u), chains.step
        error = score_divergence(score_fn, metric, generator, SHORT.n_compared)
        if apart > SHORT.max_rhat and error > SHORT.exact:
            self.metric = adapted_by_scores(metric, draws.points, draws.scores)
            self.kept, self.drawn = [], []

    def _starts(self) -> Tensor:
        """Return draws (n_chains, d) of the Gaussian, at which there is a score."""
        x = self.metric.unwhiten(standard_normal(SHORT.n_chains, self.metric.m, self.generator))
        return revive(x.where(self.score_fn(x).isfinite().all(1, keepdim=True), torch.nan), self.generator)


def _judged(
    draws: Draws,
    apart: float,
    generator: torch.Generator,
    refine: Callable[[PilotPoints, list[Draws]], PilotPoints] | None,
    drawn: list[Draws],
) -> PilotPoints:
    """Return the pilot of the draws of chains that are so far apart, refined if they agree."""
    by = moments(draws)
    pilot = pilot_with(draws.points, by)
    if apart <= SHORT.max_rhat and refine is not None:
        pilot = refine(pilot, drawn)
    if not pilot.converged and apart <= SHORT.agreed and draws.u.shape[2] >= SHORT.many_features:
        most = SHORT.max_se[len(draws.u) >= SHORT.late]
        pilot = settled(pilot_with(draws.points, by), by, most, generator)
    return pilot


def _with_tails(score_fn: Score, mode: Affine, generator: torch.Generator) -> PilotPoints | None:
    """Return points in coordinates without power tails, None where there are none, or where they do not converge."""
    tails = fitted_tails(score_fn, mode)
    if tails is None:
        return None
    score_y, at_zero = tails.pull_back(score_fn), Affine.shift(torch.zeros_like(mode.m))
    try:
        for found in _by_stages(score_y, matched(score_y, at_zero, generator), generator, SHORT.stages_warped):
            if found.converged:
                return found._replace(warp=tails)
    except (LostError, torch.linalg.LinAlgError):
        pass
    return None


def _around(score_fn: Score, start: Tensor, generator: torch.Generator) -> Tensor:
    """Return points (n, d) of chains around a start (d,), in units of the parameters; none where they are lost."""
    try:
        *_, found = _by_stages(score_fn, Affine.shift(start), generator, SHORT.stages_warped, at_once=False)
    except (LostError, torch.linalg.LinAlgError):
        return start[None, :][:0]
    return found.x


def _warped(score_fn: Score, x: Tensor, generator: torch.Generator) -> PilotPoints | None:
    """Return points in coordinates that are fitted to points x (n, d), None where they do not converge there.

    Chains in these coordinates reach further than the points, so that they are fitted again until nothing moves.
    """
    has_few = x.shape[1] < SHORT.many_features
    stages = SHORT.stages_warped if has_few else SHORT.stages_warped_of_many
    most = SHORT.settled if has_few else SHORT.settled_of_many
    try:
        for _ in range(SHORT.n_warps):
            warp = fitted_warp(x)
            if warp is None:
                return None
            score_y, y = warp.pull_back(score_fn), warp.warp(x)[0]
            metric, moved = Affine(y.mean(0), covariance_root(y)), math.inf
            refine = partial(_refined_along, score_y, warp.drivers, generator) if warp.drivers else None
            for found in _by_stages(score_y, metric, generator, stages, at_once=False, refine=refine):
                moved = min(moved, _moved(metric.whiten(found.x)))
                if found.converged and moved < most and not _goes_astray(warp, found):
                    return found._replace(warp=warp)
                if moved >= most and len(found.x) >= SHORT.n_chains * SHORT.stages_warped[0]:
                    break
            x = warp.unwarp(found.x)[0]
    except (LostError, torch.linalg.LinAlgError):
        pass
    return None


def _refined_along(
    score_y: Score,
    drivers: list[int],
    generator: torch.Generator,
    metric: Affine,
    pilot: PilotPoints,
    drawn: list[Draws],
) -> PilotPoints:
    """Return a pilot with more points, that looks for what chains have not reached along the drivers of others."""
    plan = PLAIN._replace(least_rounds=6, forgets=True, keeps=False, along=metric.L[drivers])
    return refined(metric.pull_back(score_y), pilot, drawn, generator, plan)


def _goes_astray(warp: Warp, found: PilotPoints) -> bool:
    """Tell whether draws are far from all points in coordinates of the target, as of scales that grow too fast."""
    draws = pilot_of(found.mixture, SHORT.n_of_gaussian).x if found.mixture is not None else found.x
    x, y = warp.unwarp(found.x)[0], warp.unwarp(draws)[0]
    centre = x.median(0).values
    return not bool(((y - centre).abs().amax(0) < SHORT.astray * (x - centre).abs().amax(0)).all())


def _moved(u: Tensor) -> float:
    """Return how far points u (n, d) are from mean zero and unit variances."""
    return max(u.mean(0).abs().max().item(), u.std(0).log().abs().max().item())


def warmed_up(score_u: DifferentiableScore, start: Chains, generator: torch.Generator) -> Chains:
    """Move chains while their step is adapted; those that cannot leave their start go on from another's place."""
    chains = start
    for _ in range(SHORT.n_warm):
        chains = trajectory(score_u, chains, generator, adapts=True)
    has_moved = (chains.u != start.u).any(1, keepdim=True)
    if has_moved.all():
        return chains
    return Chains.at(score_u, revive(chains.u.where(has_moved, torch.nan), generator), chains.step)


def trajectory(
    score_u: DifferentiableScore, at: Chains, generator: torch.Generator, *, adapts: bool = False
) -> Chains:
    r"""Move chains by one trajectory of Hamiltonian dynamics.

    With :math:`v \sim N(0, I)` and some steps :math:`v \gets v + \tfrac h2 s(u),\ u \gets u + h v,\
    v \gets v + \tfrac h2 s(u)`, the end is accepted with probability :math:`\min(1, e^{-\Delta H})`. Of a
    score alone the difference of log p is its integral along the chord, by Lobatto's rule.

    References
    ----------
    Neal, R. (2011). MCMC using Hamiltonian dynamics. Handbook of Markov chain Monte Carlo.
    """
    u, s, log_p, step = at
    low, high = SHORT.lengths
    h = step * (0.8 + 0.4 * torch.rand(len(u), 1, generator=generator, dtype=u.dtype, device=u.device))
    momentum = standard_normal(len(u), u, generator)
    y, s_y, v = u, s, momentum
    length = low + (high - low) * torch.rand(1, generator=generator, dtype=u.dtype, device=u.device).item()
    for _ in range(max(1, min(SHORT.max_leapfrogs, round(length / step)))):
        v = v + h / 2 * s_y
        y = y + h * v
        s_y = score_u(y).detach()
        v = v + h / 2 * s_y
    if score_u.log_prob is None:
        s_1, s_2 = score_u(torch.cat(lobatto_nodes(u, y))).detach().chunk(2)
        log_p_y = log_p + lobatto(s, s_1, s_2, s_y, y - u)
    else:
        log_p_y = score_u.log_prob(y).detach()
    gain = log_p_y - log_p + (momentum.square() - v.square()).sum(1) / 2
    gain = gain.nan_to_num(-math.inf, -math.inf, -math.inf)
    uniform = torch.rand(len(u), generator=generator, dtype=u.dtype, device=u.device)
    accept = uniform.log() < gain
    if adapts:
        step *= math.exp(0.4 * (gain.clamp_max(0).exp().mean().item() - SHORT.acceptance))
    u, s = (end.where(accept[:, None], start) for end, start in ((y, u), (s_y, s)))
    return Chains(u, s, log_p_y.where(accept, log_p), step)


def disagreement(u: Tensor) -> float:
    """Return the largest R-hat of the coordinates of chains (n, n_chains, d) and of their squares."""
    return rhat(torch.cat([u, (u - u.mean((0, 1))).square()], 2)).max().item()


def rhat(u: Tensor) -> Tensor:
    r"""Return the potential scale reductions (d,) of the halves of chains (n, n_chains, d).

    References
    ----------
    Gelman, A. et al. (2013). Bayesian data analysis, section 11.4.
    """
    half = len(u) // 2
    parts = torch.cat([u[:half], u[-half:]], 1)
    within = parts.var(0).mean(0)
    return ((half - 1) / half + parts.mean(0).var(0) / within).sqrt()
