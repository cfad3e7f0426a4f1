r"""Ensembles of Hamiltonian chains in the coordinates of a metric, stage by stage, from scores alone, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.coordinates._affine import FAR, Affine, standard_normal
from skksivi.coordinates._lines import lobatto, lobatto_nodes
from skksivi.pilot._gaussian import GAUSSIAN, adapted_by_scores, score_divergence
from skksivi.pilot._importance import (
    PartedDraws,
    fitted,
    pilot_with,
    refined_pilot,
    shifted_mixture,
    standard_pilot,
    target_moments,
)
from skksivi.pilot._mixture import MOST_FEATURES
from skksivi.pilot._points import Level, PilotPoints, Verdict, judge_chains
from skksivi.score._errors import DivergedError
from skksivi.score._score import DifferentiableScore, Score


class ChainSettings(NamedTuple):
    """The settings of a `ChainEnsemble`."""

    #: Chains, and trajectories to warm up; about how many calls a trajectory takes.
    n_chains: int = 32
    n_warm: int = 12
    n_calls: int = 4
    #: Lengths of trajectories, their most steps, and the acceptance.
    lengths: tuple[float, float] = (0.5, 3.5)
    max_leapfrogs: int = 10
    acceptance: float = 0.8
    #: The most numbers in the points of all chains.
    max_kept: int = 2**26
    #: The score divergence below which a metric stays, for no points improve it, and that below which its Gaussian is
    #: the target itself, whose points these are.
    exact: float = 0.01
    gaussian: float = 1e-4
    n_of_gaussian: int = 2000
    #: The R-hat above which chains begin again, and that above which they do so at once.
    max_rhat: float = 1.2
    elsewhere: float = 2.0


CHAINS = ChainSettings()

#: Returns a pilot with more points, in the coordinates of a map, and adds to what was drawn.
Refine = Callable[[Affine, PilotPoints, list[PartedDraws]], PilotPoints]


class ChainStates(NamedTuple):
    """Chains u (n, d) with their scores, their log p up to a constant each, and the step of their integrator."""

    u: Tensor
    s: Tensor
    log_p: Tensor
    step: float

    @classmethod
    def at(cls, score_u: DifferentiableScore, u: Tensor, step: float) -> ChainStates:
        """Return chains that start at u (n, d)."""
        log_p = u.new_zeros(len(u)) if score_u.log_prob is None else score_u.log_prob(u).detach()
        return cls(u, score_u(u).detach(), log_p, step)


def warmed_up(score_u: DifferentiableScore, start: ChainStates, generator: torch.Generator) -> ChainStates:
    """Move chains while their step is adapted; those that cannot leave their start resume from another's state."""
    chains = start
    for _ in range(CHAINS.n_warm):
        chains = trajectory(score_u, chains, generator, adapts=True)
    has_moved = (chains.u != start.u).any(1, keepdim=True)
    if has_moved.all():
        return chains
    return ChainStates.at(score_u, revive(chains.u.where(has_moved, torch.nan), generator), chains.step)


def trajectory(
    score_u: DifferentiableScore, at: ChainStates, generator: torch.Generator, *, adapts: bool = False
) -> ChainStates:
    r"""Move chains by one trajectory of Hamiltonian dynamics.

    With :math:`v \sim N(0, I)` and some steps :math:`v \gets v + \tfrac h2 s(u),\ u \gets u + h v,\
    v \gets v + \tfrac h2 s(u)`, the end is accepted with probability :math:`\min(1, e^{-\Delta H})`. If only
    the score is known, the difference of log p is its integral along the chord, by Lobatto's rule.

    References
    ----------
    Neal, R. (2011). MCMC using Hamiltonian dynamics. Handbook of Markov chain Monte Carlo.
    """
    u, s, log_p, step = at
    low, high = CHAINS.lengths
    h = step * (0.8 + 0.4 * torch.rand(len(u), 1, generator=generator, dtype=u.dtype, device=u.device))
    momentum = standard_normal(len(u), u, generator)
    y, s_y, v = u, s, momentum
    length = low + (high - low) * torch.rand(1, generator=generator, dtype=u.dtype, device=u.device).item()
    for _ in range(max(1, min(CHAINS.max_leapfrogs, round(length / step)))):
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
        step *= math.exp(0.4 * (gain.clamp_max(0).exp().mean().item() - CHAINS.acceptance))
    u, s = (end.where(accept[:, None], start) for end, start in ((y, u), (s_y, s)))
    return ChainStates(u, s, log_p_y.where(accept, log_p), step)


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


class ChainEnsemble:
    """Chains that explore a target in the coordinates of a metric.

    They warm up their step; each stage is tested in the middle and at its end. Chains that are far apart there
    restart with a metric from their points and scores, unless their metric is exact.

    Parameters
    ----------
    score_fn : Score
    metric : Affine
    generator : torch.Generator
    refine : callable, default=None
        What makes more of the points of chains that roughly agree; None means importance sampling.
    n_chains : int, default=32
    name : str, default="short chains"
    """

    def __init__(
        self,
        score_fn: Score,
        metric: Affine,
        generator: torch.Generator,
        refine: Refine | None = None,
        n_chains: int = CHAINS.n_chains,
        name: str = "short chains",
    ) -> None:
        self.score_fn, self.metric, self.generator = score_fn, metric, generator
        self.n_chains, self.name = n_chains, name
        self.refine: Refine = refine or (
            lambda metric, pilot, drawn: refined_pilot(metric.pull_back(score_fn), pilot, drawn, generator)
        )
        self.has_few = len(metric.m) <= MOST_FEATURES
        self.x: Tensor | None = None
        self.step = len(metric.m) ** -0.25
        self.kept, self.drawn = list[ChainStates](), list[PartedDraws]()

    def by_metric(self) -> Iterator[PilotPoints]:
        """Yield a pilot of draws of the Gaussian of the metric, if it is near the target."""
        error = score_divergence(self.score_fn, self.metric, self.generator, GAUSSIAN.n_quick)
        of_gaussian = partial(standard_pilot, self.metric.m)
        if error < GAUSSIAN.near and self.has_few:
            yield self.refine(self.metric, of_gaussian(), []).unwhitened(self.metric)
        elif error < CHAINS.gaussian:
            verdict = Verdict(Level.WEIGHTS_COUNT, f"the target is this Gaussian, score divergence {error:.1g}")
            yield of_gaussian(CHAINS.n_of_gaussian)._replace(verdict=verdict).unwhitened(self.metric)

    def by_stages(self, stages: Iterable[int]) -> Iterator[PilotPoints]:
        """Yield the pilots of more trajectories, stage by stage."""
        for n in stages:
            yield from self.stage(n)

    def stage(self, n: int) -> Iterator[PilotPoints]:
        """Yield the pilots of n more trajectories, none if they exceed the numbers that are kept."""
        score_fn, metric, generator = self.score_fn, self.metric, self.generator
        x = self._starts() if self.x is None else self.x
        if (len(self.kept) + n) * x.numel() > CHAINS.max_kept:
            return
        score_u = metric.pull_back(score_fn)
        chains = ChainStates.at(score_u, metric.whiten(x), self.step)
        for _ in range(2):
            n_warm = 0 if self.kept else CHAINS.n_warm
            score_fn.tally.begin(self.name, len(x) * (n_warm + n // 2) * CHAINS.n_calls)
            chains = warmed_up(score_u, chains, generator) if n_warm else chains
            for _ in range(n // 2):
                chains = trajectory(score_u, chains, generator)
                self.kept.append(chains)
            draws = PartedDraws(torch.stack([c.u for c in self.kept]), torch.stack([c.s for c in self.kept]))
            apart = disagreement(draws.u)
            yield self._judged(draws, apart).unwhitened(metric)
            if apart > CHAINS.elsewhere:
                break
        self.x, self.step = metric.unwhiten(chains.u), chains.step
        error = score_divergence(score_fn, metric, generator, GAUSSIAN.n_quick)
        if apart > CHAINS.max_rhat and error > CHAINS.exact:
            self.metric = adapted_by_scores(metric, draws.points, draws.scores)
            self.kept, self.drawn = [], []

    def _judged(self, draws: PartedDraws, apart: float) -> PilotPoints:
        """Return the pilot of the draws of chains that are so far apart, refined if they agree."""
        by = target_moments(draws)
        plain = pilot_with(draws.points, by)
        if apart <= CHAINS.max_rhat and self.has_few:
            pilot = self.refine(self.metric, plain, self.drawn)
            if pilot.converged:
                return pilot
        else:
            pilot = plain
        verdict = judge_chains(apart, by.se, len(self.metric.m), len(draws.u), len(self.kept[0].u))
        if not verdict.converged:
            return pilot._replace(verdict=verdict)
        return plain._replace(verdict=verdict, mixture=shifted_mixture(fitted(plain.x, self.generator), by))

    def _starts(self) -> Tensor:
        """Return draws (n_chains, d) of the Gaussian with finite scores."""
        x = self.metric.unwhiten(standard_normal(self.n_chains, self.metric.m, self.generator))
        return revive(x.where(self.score_fn(x).isfinite().all(1, keepdim=True), torch.nan), self.generator)


def revive(x: Tensor, generator: torch.Generator) -> Tensor:
    """Replace chains that are not finite, or nearly so, by copies of others."""
    finite = (x.abs() < FAR).all(1)
    if finite.all():
        return x
    alive = x[finite]
    if not len(alive):
        raise DivergedError(x)
    others = torch.randint(len(alive), (len(x),), generator=generator, device=x.device)
    return torch.where(finite[:, None], x, alive[others])
