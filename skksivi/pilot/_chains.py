r"""Chains from scores alone: Hamiltonian ones, stage by stage, and underdamped Langevin ones of many parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.coordinates._affine import FAR, Affine, LowRank, standard_normal
from skksivi.coordinates._lines import along_chord
from skksivi.pilot._mixture import N_QUICK, adapted_by_scores, fitted_mixture, score_divergence
from skksivi.pilot._moments import moments_by_scores, pilot_with, shifted_mixture
from skksivi.pilot._points import MANY_FEATURES, PilotPoints, judge_chains, judge_halves
from skksivi.score._score import DifferentiableScore, Score, ScoreFunction
from skksivi.score._tally import DivergedError

#: Chains, of few features and of many, where most calls go into the way to the mass and fewer chains get there;
#: trajectories to warm up, and about how many calls one takes.
N_CHAINS, N_OF_MANY, N_WARM, N_CALLS = 32, 16, 12, 4

#: The name of this stage.
SHORT_CHAINS = "short chains"

#: The R-hat above which chains begin again.
MAX_RHAT = 1.2


#: Maps points x, their scores, points y and their scores, all (n, d), to log p(y) - log p(x), (n,).
LogRatio = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


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
    for _ in range(N_WARM):
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
    low, high = 0.5, 3.5
    h = step * (0.8 + 0.4 * torch.rand(len(u), 1, generator=generator, dtype=u.dtype, device=u.device))
    momentum = standard_normal(len(u), u, generator)
    y, s_y, v = u, s, momentum
    length = low + (high - low) * torch.rand(1, generator=generator, dtype=u.dtype, device=u.device).item()
    for _ in range(max(1, min(10, round(length / step)))):
        v = v + h / 2 * s_y
        y = y + h * v
        s_y = score_u(y).detach()
        v = v + h / 2 * s_y
    log_prob = score_u.log_prob
    log_p_y = log_p + along_chord(score_u, u, s, y, s_y) if log_prob is None else log_prob(y).detach()
    gain = log_p_y - log_p + (momentum.square() - v.square()).sum(1) / 2
    gain = gain.nan_to_num(-math.inf, -math.inf, -math.inf)
    uniform = torch.rand(len(u), generator=generator, dtype=u.dtype, device=u.device)
    accept = uniform.log() < gain
    if adapts:
        step *= math.exp(0.4 * (gain.clamp_max(0).exp().mean().item() - 0.8))
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
    starts : Tensor of shape (n_chains, d), default=None
        None draws them from the Gaussian of the metric.
    """

    def __init__(
        self, score_fn: Score, metric: Affine, generator: torch.Generator, starts: Tensor | None = None
    ) -> None:
        self.score_fn, self.metric, self.generator, self.x = score_fn, metric, generator, starts
        self.step, self.kept = len(metric.m) ** -0.25, list[ChainStates]()

    def stage(self, n: int) -> PilotPoints:
        """Return the points of n more trajectories of each chain, or as many of them as memory allows."""
        score_fn, metric, generator = self.score_fn, self.metric, self.generator
        x = self._starts() if self.x is None else self.x
        score_u = metric.pull_back(score_fn)
        chains, n = ChainStates.at(score_u, metric.whiten(x), self.step), min(n, 2**26 // x.numel() - len(self.kept))
        for _ in range(2):
            n_warm = 0 if self.kept else N_WARM
            score_fn.tally.begin(SHORT_CHAINS, len(x) * (n_warm + n // 2) * N_CALLS)
            chains = warmed_up(score_u, chains, generator) if n_warm else chains
            for _ in range(n // 2):
                chains = trajectory(score_u, chains, generator)
                self.kept.append(chains)
            u, s = (torch.stack(parts) for parts in zip(*((c.u, c.s) for c in self.kept), strict=True))
            apart = disagreement(u)
            found = self._judged(u, s, apart)
            if apart > 2 or found.converged:
                break
        self.x, self.step = metric.unwhiten(chains.u), chains.step
        if (
            apart > MAX_RHAT and score_divergence(score_fn, metric, generator, N_QUICK) > 0.01
        ):  # else no points improve
            self.metric = adapted_by_scores(metric, u.transpose(0, 1).flatten(0, 1), s.transpose(0, 1).flatten(0, 1))
            self.kept = []
        return found

    def _judged(self, u: Tensor, s: Tensor, apart: float) -> PilotPoints:
        """Return the states u of chains with scores s, (n, n_chains, d), that are so far apart."""
        by = moments_by_scores(u, s)
        points = pilot_with(u.transpose(0, 1).flatten(0, 1), by, SHORT_CHAINS)
        verdict = judge_chains(apart, by.se, u.shape[2], len(u))
        points = points._replace(verdict=verdict)
        if verdict.good:
            mixture = fitted_mixture([points.x], self.generator, shuffles=False)
            points = points._replace(mixture=shifted_mixture(mixture, by))
        return points.unwhitened(self.metric)

    def _starts(self) -> Tensor:
        """Return draws (n_chains, d) of the Gaussian with finite scores."""
        n = N_OF_MANY if len(self.metric.m) >= MANY_FEATURES else N_CHAINS
        x = self.metric.unwhiten(standard_normal(n, self.metric.m, self.generator))
        return revive(x.where(self.score_fn(x).isfinite().all(1, keepdim=True), torch.nan), self.generator)


# Langevin chains


def clipped_drift(s: Tensor, longest: float = 5.0) -> Tensor:
    r"""Return scores (..., d) of standardised coordinates, lengths above `longest` :math:`\sqrt d` clipped to it.

    It is so many times the length of a score of N(0, I): a chain that starts far out does not overshoot.
    """
    return s * (longest * math.sqrt(s.shape[-1]) / torch.linalg.vector_norm(s, dim=-1, keepdim=True)).clamp_max(1)


class ChainState(NamedTuple):
    """Chains at u (n, d), and the score there."""

    u: Tensor
    s: Tensor


def mala_step(
    state: ChainState, score_u: ScoreFunction, log_ratio: LogRatio, h: Tensor, generator: torch.Generator
) -> tuple[ChainState, Tensor]:
    r"""Propose Langevin steps, and accept each with the probability of Metropolis and Hastings.

    .. math::
        v = u + h\, \tilde s(u) + \sqrt{2 h}\, \xi, \quad
        \alpha = \min\left(1, \frac{p(v)\, q(u | v)}{p(u)\, q(v | u)}\right), \quad
        \log q(v | u) = -\frac{\|v - u - h\, \tilde s(u)\|^2}{4 h} + \mathrm{const},

    with the `clipped_drift` :math:`\tilde s`.

    Parameters
    ----------
    state : ChainState
    score_u : callable
    log_ratio : callable
        Maps (u, s(u), v, s(v)) to log p(v) - log p(u).
    h : Tensor of shape () or (n, 1)
        The step sizes h > 0.
    generator : torch.Generator

    Returns
    -------
    state : ChainState
    alpha : Tensor of shape (n,)
        The probabilities of acceptance; zero where the score or log p is not finite at v.

    References
    ----------
    Roberts, G. and Tweedie, R. (1996). Exponential convergence of Langevin distributions and their discrete
    approximations. Bernoulli 2(4).
    """
    u, s = state
    noise = (2 * h).sqrt() * torch.randn(u.shape, generator=generator, dtype=u.dtype, device=u.device)
    v = u + h * clipped_drift(s) + noise
    s_v = score_u(v)
    back = u - v - h * clipped_drift(s_v)
    log_alpha = log_ratio(u, s, v, s_v) + (noise.square().sum(1) - back.square().sum(1)) / (4 * h).flatten()
    alpha = log_alpha.nan_to_num(-torch.inf, torch.inf, -torch.inf).exp().clamp_max(1)
    accepted = torch.rand(len(u), generator=generator, dtype=u.dtype, device=u.device)[:, None] < alpha[:, None]
    return ChainState(v.where(accepted, u), s_v.where(accepted, s)), alpha


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


# Chains of underdamped Langevin dynamics, for targets of many parameters: a step costs O(d)


def underdamped_pilot(
    score_fn: Score, starts: Tensor, generator: torch.Generator, budget: int
) -> tuple[LowRank, PilotPoints]:
    """Run chains from each start, and return a scale for each coordinate and the chains' points.

    Parameters
    ----------
    score_fn : Score
    starts : Tensor of shape (k, d)
    generator : torch.Generator
    budget : int
        Points at which the score may be evaluated, which sets the number of steps.

    Raises
    ------
    ValueError
        The chains left the region where the score is finite.
    """
    n_steps = min(max(budget // len(starts), 200), 20_000)
    name = "underdamped Langevin chains"
    score_fn.tally.begin(name, n_steps * len(starts))
    kept = underdamped(score_fn, starts.to(score_fn.dtype), n_steps, generator).double()
    points, mean_se = kept.transpose(0, 1).flatten(0, 1), kept.mean(0).std(0) / math.sqrt(len(starts))
    verdict, n = judge_halves(kept), [len(kept)] * len(starts)
    return diagonal_map(points), PilotPoints(points, n, mean_se, verdict, dense=False, found_by=name)


def diagonal_map(x: Tensor) -> LowRank:
    """Return the map that standardises each coordinate of points (n, d)."""
    mean, sd = x.mean(0), x.std(0)
    return LowRank(mean, sd.where(sd > 0, 1.0), mean.new_empty(len(mean), 0), mean.new_empty(0))


def surrounding(mode: LowRank, generator: torch.Generator) -> Tensor:
    """Draw the starts (k, d) of chains around a mode by the curvature there."""
    return mode.unwhiten(standard_normal(20, mode.m, generator))


def underdamped(score_fn: Score, x: Tensor, n_steps: int, generator: torch.Generator) -> Tensor:
    r"""Run chains of underdamped Langevin dynamics from x (n, d); return states of the second half (n_kept, n, d).

    Kicks and drifts of the momentum p by the splitting of Leimkuhler and Matthews,

    .. math::
        p \leftarrow p + \tfrac h2 s(x), \quad x \leftarrow x + \tfrac h2 p, \quad
        p \leftarrow c p + \sqrt{1 - c^2}\, \xi, \quad x \leftarrow x + \tfrac h2 p, \quad
        p \leftarrow p + \tfrac h2 s(x),

    whose positions have the exact covariance of a Gaussian. The step h is a share of the shortest period of each
    chain, :math:`0.7 / \sqrt{\lambda_{\max}}` with the largest curvature :math:`\lambda_{\max}` by power iteration.
    A chain with too much energy, by too long a step or from far out, gets a new momentum; if its score has also
    grown, it returns to where the step was chosen and halves the step. A chain that is no longer finite resumes from
    another's state.

    References
    ----------
    Leimkuhler, B. and Matthews, C. (2013). Rational construction of stochastic numerical methods for molecular
    sampling. https://arxiv.org/abs/1203.5428
    """
    if not score_fn(x).isfinite().any():
        raise DivergedError
    p, direction = (standard_normal(len(x), x, generator) for _ in range(2))
    # the mean square of a momentum is one, give or take sqrt(2 / d)
    hottest = 4 * (1 + 10 / x.shape[1])
    memory = 0.98  # the share of a momentum that is left after a step
    noise, every = math.sqrt(1 - memory**2), max(1, n_steps // 100)
    kept: list[Tensor] = []
    s = score_fn(x)
    for t in range(n_steps):
        if t % 200 == 0:
            direction, curvature = _largest_curvature(score_fn, x, direction + standard_normal(len(x), x, generator))
            h, calm, calm_s = 0.7 * curvature.rsqrt(), x, s
        p = p + h / 2 * s
        x = x + h / 2 * p
        p = memory * p + noise * standard_normal(len(x), x, generator)
        x = revive(x + h / 2 * p, generator)
        s = score_fn(x)
        p = p + h / 2 * s
        hot = ~(p.square().mean(1, keepdim=True) < hottest)
        lost = hot & ~(_size(s) < 2 * _size(calm_s))
        x, s = torch.where(lost, calm, x), torch.where(lost, calm_s, s)
        p, h = torch.where(hot, standard_normal(len(x), x, generator), p), torch.where(lost, h / 2, h)
        if t >= n_steps // 2 and t % every == 0:
            kept.append(x)
    return torch.stack(kept)


def _largest_curvature(score_fn: Score, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the direction (n, d) of largest curvature at each point of x, and the curvature (n, 1)."""
    size = _size(v)
    for _ in range(10):
        v = score_fn.product(x, v / size).nan_to_num(1.0)
        size = _size(v).clamp_min(torch.finfo(v.dtype).tiny)
    return v / size, size


def _size(v: Tensor) -> Tensor:
    return torch.linalg.vector_norm(v, dim=1, keepdim=True)
