r"""Underdamped Langevin chains for targets of many parameters: a step costs O(d)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.coordinates._affine import LowRank, standard_normal
from skksivi.pilot._chains import revive
from skksivi.pilot._points import PilotPoints, judge_halves
from skksivi.score._errors import DivergedError
from skksivi.score._score import Score


class UnderdampedSettings(NamedTuple):
    """The settings of `underdamped_pilot`."""

    #: Chains where one start is given.
    n_chains: int = 20
    #: The fewest steps of a chain and the most, and the states of each that are kept.
    min_steps: int = 200
    max_steps: int = 20_000
    n_kept: int = 50
    #: A step in units of the shortest period of a chain, and the share of a momentum that is left after it.
    step: float = 0.7
    memory: float = 0.98
    #: The mean square of a momentum, in many dimensions, beyond which it is drawn again.
    hottest: float = 4.0
    #: Steps from one estimate of the largest curvature to the next, and the products with the Jacobian of each.
    curvature_every: int = 200
    n_products: int = 10


UNDERDAMPED = UnderdampedSettings()


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
    n_steps = min(max(budget // len(starts), UNDERDAMPED.min_steps), UNDERDAMPED.max_steps)
    score_fn.tally.begin("underdamped Langevin chains", n_steps * len(starts))
    kept = underdamped(score_fn, starts.to(score_fn.dtype), n_steps, generator).double()
    points, mean_se = kept.transpose(0, 1).flatten(0, 1), kept.mean(0).std(0) / math.sqrt(len(starts))
    verdict = judge_halves(kept)
    return diagonal_map(points), PilotPoints(points, [len(kept)] * len(starts), mean_se, verdict, dense=False)


def diagonal_map(x: Tensor) -> LowRank:
    """Return the map that standardises each coordinate of points (n, d)."""
    mean, sd = x.mean(0), x.std(0)
    return LowRank(mean, sd.where(sd > 0, 1.0), mean.new_empty(len(mean), 0), mean.new_empty(0))


def surrounding(mode: LowRank, generator: torch.Generator) -> Tensor:
    """Draw the starts (k, d) of chains around a mode by the curvature there."""
    return mode.unwhiten(standard_normal(UNDERDAMPED.n_chains, mode.m, generator))


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
    hottest = UNDERDAMPED.hottest * (1 + 10 / x.shape[1])
    noise, every = math.sqrt(1 - UNDERDAMPED.memory**2), max(1, n_steps // (2 * UNDERDAMPED.n_kept))
    kept: list[Tensor] = []
    s = score_fn(x)
    for t in range(n_steps):
        if t % UNDERDAMPED.curvature_every == 0:
            direction, curvature = _largest_curvature(
                score_fn, x, direction + standard_normal(len(x), x, generator), UNDERDAMPED.n_products
            )
            h, calm, calm_s = UNDERDAMPED.step * curvature.rsqrt(), x, s
        p = p + h / 2 * s
        x = x + h / 2 * p
        p = UNDERDAMPED.memory * p + noise * standard_normal(len(x), x, generator)
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


def _largest_curvature(score_fn: Score, x: Tensor, v: Tensor, n_products: int) -> tuple[Tensor, Tensor]:
    """Return the direction (n, d) of largest curvature at each point of x, and the curvature (n, 1)."""
    size = _size(v)
    for _ in range(n_products):
        v = score_fn.product(x, v / size).nan_to_num(1.0)
        size = _size(v).clamp_min(torch.finfo(v.dtype).tiny)
    return v / size, size


def _size(v: Tensor) -> Tensor:
    return torch.linalg.vector_norm(v, dim=1, keepdim=True)
