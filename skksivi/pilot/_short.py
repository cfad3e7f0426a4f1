r"""Short Hamiltonian chains around the one mode of a target, from scores alone, and the tests that they will do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from skksivi._arrays import as_array
from skksivi._control_variates import controlled, second_order, stein_features
from skksivi._psis import pareto_smoothed
from skksivi.mixing import GaussianMixtureDraws
from skksivi.pilot._affine import Affine, standard_normal
from skksivi.pilot._chains import PilotPoints, adapted, batch_and_match, lobatto, lobatto_nodes, revive
from skksivi.pilot._mixture import Components, fitted_mixture
from skksivi.pilot._modes import LostError, ModeMaps, around, find_modes, jacobians, scattered, score_divergence
from skksivi.score._score import Score, ScoreFunction


class ShortSettings(NamedTuple):
    """The settings of `short_pilot`."""

    #: The most features.
    max_features: int = 200
    #: Points around the mode and around the start from which others are looked for, and steps of each.
    n_looks: int = 64
    n_ascents: int = 30
    #: The mean square of a score at which an ascent has arrived, and how many that have are followed to a mode.
    level: float = 1e-4
    n_checked: int = 4
    #: The score divergence below which the Gaussian at the mode will do, else iterations of the one that is fitted,
    #: that of a metric which no points improve, and the draws by which it is found.
    near_gaussian: float = 0.05
    exact: float = 0.01
    n_compared: int = 64
    n_matched: int = 20
    #: Chains, trajectories to warm up and those kept in each stage, their lengths, the most steps of one, the
    #: acceptance, and about how many calls a trajectory takes.
    n_chains: int = 32
    n_warm: int = 20
    stages: tuple[int, ...] = (40, 80, 160, 320)
    low_stages: tuple[int, ...] = (40, 80)
    lengths: tuple[float, float] = (0.5, 3.5)
    max_leapfrogs: int = 10
    acceptance: float = 0.8
    n_calls: int = 4
    #: What chains that agree have at most: R-hat, and standard errors of means and of relative scales; and the R-hat
    #: above which they begin again.
    max_rhat: float = 1.1
    begins_again: float = 1.2
    max_se: tuple[float, float] = (0.03, 0.03)
    #: The most numbers in the products of pairs of coordinates of all points.
    max_products: int = 2**25
    #: Draws of the mixture that are weighed, nodes from one to the next, the share of them that is effective,
    #: the shape of the tail of the ratios, the share above which that does not matter, and the divergence of a
    #: feature, in nats.
    n_weighed: int = 256
    n_nodes: int = 3
    least_share: float = 0.5
    max_k: float = 0.7
    harmless: float = 0.8
    max_divergence: float = 0.06


SHORT = ShortSettings()

#: Calls of a short pilot, about.
N_EXPECTED = SHORT.n_chains * (SHORT.n_warm + SHORT.stages[0]) * SHORT.n_calls


class Chains(NamedTuple):
    """Chains u (n, d) with their scores, and the step of their integrator."""

    u: Tensor
    s: Tensor
    step: float


def short_pilot(
    score_fn: Score, starts: Tensor, generator: torch.Generator, *, alone: bool, stages: Sequence[int] = SHORT.stages
) -> tuple[ModeMaps, PilotPoints] | None:
    """Return points near a target of one mode, and that mode; None where there are several, or none is found.

    The points have converged if the chains agree with each other, the standard errors of means and scales are small,
    and a Gaussian mixture fitted to the points is near the target: its importance weights have an effective share of
    one half and a light tail, and the divergence is at most 0.06 nats per feature.

    Parameters
    ----------
    score_fn : Score
    starts : Tensor of shape (k, d)
        Where the search for the mode starts.
    generator : torch.Generator
    alone : bool
        Whether no other mode is looked for.
    stages : sequence of int, default=SHORT.stages
        Trajectories that are kept in each.
    """
    try:
        modes = find_modes(score_fn, starts, generator)
        if len(modes.maps) > 1 or (not alone and finds_others(score_fn, starts[0], modes.maps[0], generator)):
            return None
        metric = matched(score_fn, modes.maps[0], generator)
        return modes, _by_stages(score_fn, metric, generator, stages)
    except (LostError, torch.linalg.LinAlgError):
        return None


def finds_others(score_fn: Score, start: Tensor, mode: Affine, generator: torch.Generator) -> bool:
    r"""Tell whether ascents from points around a mode and a start lead to another.

    In the coordinates u of the mode a step, cut to a length of :math:`2 + 2 \|u\|` and made a quarter where the score
    turns back at its end, is

    .. math:: u_{t+1} = u_t + \frac{\|\Delta u\|^2}{- \Delta u^\top \Delta s}\, s(u_t).

    References
    ----------
    Barzilai, J. and Borwein, J. (1988). Two-point step size gradient methods. IMA Journal of Numerical Analysis 8(1).
    """
    n, score_u = SHORT.n_looks // 2, mode.pull_back(score_fn)
    u = mode.whiten(torch.cat([scattered(start, n, generator), around(mode, n, generator)]))
    s = score_u(u).detach()
    rate = (0.1 / s.norm(dim=1, keepdim=True)).clamp_max(1)
    for _ in range(SHORT.n_ascents):
        i = (s.square().mean(1) > SHORT.level).nonzero()[:, 0]
        if not len(i):
            break
        du = rate[i] * s[i]
        du *= (2 * (1 + u[i].norm(dim=1, keepdim=True)) / du.norm(dim=1, keepdim=True)).clamp_max(1)
        tried = score_u(u[i] + du).detach()
        turned = torch.cosine_similarity(tried, du)[:, None] < -0.5
        stays = turned & (tried.square().mean(1, keepdim=True) > SHORT.level) | ~tried.isfinite().all(1, keepdim=True)
        secant = du.square().sum(1, keepdim=True) / (du * (s[i] - tried)).sum(1, keepdim=True)
        secant = secant.where((secant > 0) & secant.isfinite(), 2 * rate[i])
        u[i], s[i] = u[i] + du.where(~stays, 0), s[i].where(stays, tried)
        rate[i] = (rate[i] / 4).where(stays, secant)
    elsewhere = u.isfinite().all(1) & (u.square().mean(1) > 4) & (s.square().mean(1) < SHORT.level)
    ends = u[elsewhere][: SHORT.n_checked]
    if len(ends):  # a flat region is no mode
        ends = ends[torch.linalg.eigvalsh(-jacobians(score_u, ends)).amin(1) > SHORT.level]
    return len(ends) > 0 and len(find_modes(score_fn, mode.unwhiten(ends), generator, [mode]).maps) > 1


def matched(score_fn: ScoreFunction, mode: Affine, generator: torch.Generator) -> Affine:
    """Return the Gaussian at a mode, or the one fitted by batch and match if its score is nearer the target's."""
    error = score_divergence(score_fn, mode, generator, SHORT.n_compared)
    if error < SHORT.near_gaussian:
        return mode
    q = batch_and_match(score_fn, mode, generator, SHORT.n_matched)
    return q if score_divergence(score_fn, q, generator, SHORT.n_compared) < error else mode


def _by_stages(score_fn: Score, metric: Affine, generator: torch.Generator, stages: Sequence[int]) -> PilotPoints:
    """Return the points of chains, after a warm-up of their step, as soon as they pass the tests.

    Each stage is tested in the middle and at its end. Chains that are far apart there begin again with the covariance
    of their points as metric, unless theirs is exact.
    """
    x = metric.unwhiten(standard_normal(SHORT.n_chains, metric.m, generator))
    x = revive(x.where(score_fn(x).isfinite().all(1, keepdim=True), torch.nan), generator)
    step = metric.m.numel() ** -0.25
    kept: list[Chains] = []
    for n in stages:
        score_u = metric.pull_back(score_fn)
        chains = Chains(metric.whiten(x), metric.whiten_score(score_fn(x).detach()), step)
        for _ in range(2):
            n_warm = 0 if kept else SHORT.n_warm
            n_calls = SHORT.n_chains * (n_warm + n // 2) * SHORT.n_calls
            score_fn.tally.begin(f"whitening, {SHORT.n_chains} short chains", n_calls)
            for _ in range(n_warm):
                chains = trajectory(score_u, chains, generator, adapts=True)
            for _ in range(n // 2):
                chains = trajectory(score_u, chains, generator)
                kept.append(chains)
            u, s = torch.stack([c.u for c in kept]), torch.stack([c.s for c in kept])
            apart = disagreement(u)
            pilot = _judged(score_u, u, s, apart, generator).unwhitened(metric)
            if pilot.converged:
                return pilot
        x, step = metric.unwhiten(chains.u), chains.step
        error = score_divergence(score_fn, metric, generator, SHORT.n_compared)
        if apart > SHORT.begins_again and error > SHORT.exact:
            metric = Affine(metric.unwhiten(u.mean((0, 1))), adapted(metric.L, metric.unwhiten(u.flatten(0, 1))))
            kept = []
    return pilot


def trajectory(score_u: ScoreFunction, at: Chains, generator: torch.Generator, *, adapts: bool = False) -> Chains:
    r"""Move chains by one trajectory of Hamiltonian dynamics, accepted by scores alone.

    With :math:`v \sim N(0, I)` and some steps :math:`v \gets v + \tfrac h2 s(u),\ u \gets u + h v,\
    v \gets v + \tfrac h2 s(u)`, the end is accepted with probability :math:`\min(1, e^{-\Delta H})`, where the
    difference of log p is the integral of the score along the chord, by Lobatto's rule.

    References
    ----------
    Neal, R. (2011). MCMC using Hamiltonian dynamics. Handbook of Markov chain Monte Carlo.
    """
    u, s, step = at
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
    s_1, s_2 = score_u(torch.cat(lobatto_nodes(u, y))).detach().chunk(2)
    gain = lobatto(s, s_1, s_2, s_y, y - u) + (momentum.square() - v.square()).sum(1) / 2
    gain = gain.nan_to_num(-math.inf, -math.inf, -math.inf)
    uniform = torch.rand(len(u), generator=generator, dtype=u.dtype, device=u.device)
    accept = (uniform.log() < gain)[:, None]
    if adapts:
        step *= math.exp(0.4 * (gain.clamp_max(0).exp().mean().item() - SHORT.acceptance))
    return Chains(y.where(accept, u), s_y.where(accept, s), step)


def _judged(score_u: ScoreFunction, u: Tensor, s: Tensor, apart: float, generator: torch.Generator) -> PilotPoints:
    """Return the points of chains u (n, n_chains, d) with scores s and, if they pass the other tests, a mixture."""
    points, mean_se, sd_se = corrected(u, s)
    found = PilotPoints(points, [len(points)], mean_se * points.std(0), converged=False)
    accurate = mean_se.max() <= SHORT.max_se[0] and sd_se.max() <= SHORT.max_se[1]
    if not (accurate and apart <= SHORT.max_rhat):
        return found
    mixture = fitted_mixture([points], generator, shuffles=False)
    return found._replace(mixture=mixture, converged=weighs_well(score_u, mixture, generator))


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


def corrected(u: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return chains u (n, n_chains, d) with scores s as points, their moments corrected by control variates.

    Returns
    -------
    points : Tensor of shape (n n_chains, d)
        Mapped to the means and covariance that they should have, of many features to the means and scales.
    mean_se, sd_se : Tensor of shape (d,)
        Standard errors of means and of the logarithms of scales, in standard deviations, by the spread of chains.
    """
    n, n_chains, d = u.shape
    points, scores = (a.transpose(0, 1).flatten(0, 1) for a in (u, s))
    centre, scale = points.mean(0), points.std(0, correction=0)
    z, s_z = (points - centre) / scale, scores * scale
    has_pairs = z.numel() * d <= SHORT.max_products
    i, j = torch.tril_indices(d, d) if has_pairs else torch.arange(d).expand(2, d)
    own, products = second_order(z, s_z, i, j), z[:, i] * z[:, j]
    products = products - own * ((products * own).mean(0) / own.square().mean(0))
    y = controlled(torch.cat([z, products], 1), stein_features(z, s_z))
    mean, second = y.mean(0).tensor_split([d])
    se = y.view(n_chains, n, -1).mean(1).std(0) / math.sqrt(n_chains)
    covariance = z.mT @ z / len(z) if has_pairs else torch.eye(d).to(z)
    now = torch.linalg.cholesky(covariance)
    covariance[i, j] = covariance[j, i] = second - mean[i] * mean[j]
    wanted, failed = torch.linalg.cholesky_ex(covariance)
    wanted = now if failed else wanted
    z = mean + torch.linalg.solve_triangular(now, z.mT, upper=False).mT @ wanted.mT
    return centre + scale * z, se[:d], se[d:][i == j] / 2


def weighs_well(score_u: ScoreFunction, mixture: Components, generator: torch.Generator) -> bool:
    r"""Tell whether the importance weights of draws of a mixture q are fit to be used.

    :math:`\log p(u) / q(u)` is the integral of :math:`s_p - s_q` from the mean, smooth where they are alike. The
    divergence :math:`\mathrm{KL}(q \| p) + \mathrm{KL}(p \| q)` must be small, too.
    """
    q = GaussianMixtureDraws(mixture.means, mixture.factors(), mixture.weights)
    u = q(SHORT.n_weighed, mixture.means, generator)
    origin = mixture.weights @ mixture.means
    nodes, weights = np.polynomial.legendre.leggauss(SHORT.n_nodes)
    ratios = torch.zeros(len(u)).to(u)
    for t, w in zip((nodes + 1) / 2, weights / 2, strict=True):
        x = torch.lerp(origin.expand_as(u), u, float(t))
        ratios += float(w) * ((score_u(x).detach() - q.score(x)) * (u - origin)).sum(1)
    if not ratios.isfinite().all():
        return False
    log_ratios = as_array(ratios)
    log_weights, k = pareto_smoothed(log_ratios)
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    share, divergence = 1 / np.square(weights).sum() / len(weights), weights @ log_ratios - log_ratios.mean()
    has_light_tail = k <= SHORT.max_k or share >= SHORT.harmless
    return bool(share >= SHORT.least_share and has_light_tail and divergence <= SHORT.max_divergence * u.shape[1])
