r"""An ensemble of chains around the modes of a target, from scores alone, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.coordinates._affine import FAR, Affine, standard_normal
from skksivi.coordinates._lines import lobatto, lobatto_nodes, log_ratio
from skksivi.pilot._gaussian import adapted, batch_and_match
from skksivi.pilot._modes import ModeMaps
from skksivi.pilot._points import PilotPoints
from skksivi.score._errors import DivergedError
from skksivi.score._score import ScoreFunction


class ChainSettings(NamedTuple):
    """The settings of `find_pilot`."""

    #: The fewest chains of an ensemble, the most, and the fewest around one mode.
    min_chains: int = 128
    max_chains: int = 2048
    min_chains_of_mode: int = 64
    #: The most features with which a Gaussian is fitted to the scores before the chains start, a step in O(d^3).
    max_matched_features: int = 200
    #: Draws by which Gaussians are compared by line integrals.
    n_compared: int = 32
    #: The fall of log p from a mode, in nats per feature, beyond which a Gaussian is too wide to start from.
    too_far: float = 1000.0
    #: Steps of the chains without and with the Metropolis test.
    n_langevin: int = 200
    n_metropolis: int = 150
    #: The fewest Metropolis steps from one kept state of a chain to the next, and the most numbers that are kept.
    keep_every: int = 3
    max_kept: int = 2**25
    #: The most rounds of Metropolis steps, and the standard error of the means, in sd, below which they end before.
    max_rounds: int = 4
    tolerance: float = 0.015
    #: Points of a pilot below which a mode does not count as one.
    min_points_of_mode: int = 20

    @property
    def least_calls(self) -> int:
        """The fewest calls of an ensemble."""
        return self.min_chains * (self.n_langevin + 3 * self.n_metropolis)


CHAINS = ChainSettings()


def lower_bound(score_fn: ScoreFunction, q: Affine, origin: Tensor, generator: torch.Generator) -> float:
    r"""Return the evidence lower bound of q = N(m, L L^T) up to a constant, with a median instead of the mean.

    .. math:: E_q \log \frac{p(x)}{p(x_0)} + \log \det L
    """
    x = q.unwhiten(standard_normal(CHAINS.n_compared, q.m, generator))
    return (
        log_ratio(score_fn, origin, x).nan_to_num(-math.inf, -math.inf, -math.inf).median() + q.log_determinant()
    ).item()


def clipped_drift(s: Tensor, longest: float = 5.0) -> Tensor:
    r"""Return scores (n, d) of standardised coordinates, those longer than `longest` :math:`\sqrt d` clipped to that.

    It is so many times the length of a score of N(0, I): a chain that starts far out does not overshoot.
    """
    return s * (longest * math.sqrt(s.shape[1]) / torch.linalg.vector_norm(s, dim=1, keepdim=True)).clamp_max(1)


class EnsembleState(NamedTuple):
    """Chains x (n, d) and their preconditioner L (d, d)."""

    x: Tensor
    L: Tensor


def langevin(
    score_fn: ScoreFunction, chains: EnsembleState, generator: torch.Generator, step: float = 0.1
) -> EnsembleState:
    r"""Move an ensemble towards the target by the Langevin scheme of Leimkuhler and Matthews.

    .. math:: x_{t+1} = x_t + L \left[ h L^\top s(x_t) + \sqrt{h / 2}\, (\xi_t + \xi_{t+1}) \right],

    whose covariance is exact for Gaussians. L is adapted twice to the covariance of the chains. Chains that are no
    longer finite resume from another's state.

    References
    ----------
    Leimkuhler, B. and Matthews, C. (2013). Rational construction of stochastic numerical methods for molecular
    sampling. https://arxiv.org/abs/1203.5428
    """
    x, L = chains
    xi = standard_normal(len(x), x, generator)
    for t in range(1, CHAINS.n_langevin + 1):
        drift = clipped_drift(score_fn(x).detach() @ L)
        xi_next = standard_normal(len(x), x, generator)
        x = revive(x + (step * drift + math.sqrt(step / 2) * (xi + xi_next)) @ L.mT, generator)
        xi = xi_next
        if t in (CHAINS.n_langevin // 3, 2 * CHAINS.n_langevin // 3):
            L = adapted(L, x)
    return EnsembleState(x, L)


def metropolis(
    score_fn: ScoreFunction, chains: EnsembleState, generator: torch.Generator, acceptance: float = 0.65
) -> tuple[Tensor, EnsembleState]:
    r"""Run Metropolis-adjusted Langevin chains that need no density.

    The steps are :math:`y = x + L v` with :math:`v = h L^\top s(x) + \sqrt{2 h}\, \xi`, h a random share of a common
    step, which is adapted to the rate of acceptance; :math:`\log p(y) - \log p(x)` is the integral of the score from
    x to y by Lobatto's rule of four points. The only bias left is the error of that rule.

    Returns
    -------
    kept : Tensor of shape (n_kept, n, d)
        The chains at every third step, once the step size is adapted.
    chains : Ensemble
        Their state at the end.

    References
    ----------
    Roberts, G. and Tweedie, R. (1996). Exponential convergence of Langevin distributions and their discrete
    approximations. Bernoulli 2(4).
    """
    x, L = chains
    n, d = x.shape
    common, kept = 1.3 * d ** (-1 / 3), []
    every = max(CHAINS.keep_every, CHAINS.n_metropolis * x.numel() // CHAINS.max_kept)
    x = revive(x.where(score_fn(x).isfinite().all(1)[:, None], torch.nan), generator)
    s = score_fn(x).detach() @ L
    for t in range(1, CHAINS.n_metropolis + 1):
        h = common * 0.25 ** torch.rand(n, 1, generator=generator, dtype=x.dtype, device=x.device)
        drift = h * clipped_drift(s)
        v = drift + (2 * h).sqrt() * standard_normal(n, x, generator)
        y = x + v @ L.mT
        s_1, s_2, s_y = (score_fn(torch.cat([*lobatto_nodes(x, y), y])).detach() @ L).chunk(3)
        log_p_ratio = lobatto(s, s_1, s_2, s_y, v)
        back = v + h * clipped_drift(s_y)
        log_q_ratio = ((v - drift).square() - back.square()).sum(1) / (4 * h[:, 0])
        log_ratio = (log_p_ratio + log_q_ratio).nan_to_num(-math.inf, -math.inf, -math.inf)
        accept = torch.rand(n, generator=generator, dtype=x.dtype, device=x.device).log() < log_ratio
        x, s = torch.where(accept[:, None], y, x), torch.where(accept[:, None], s_y, s)
        if t <= CHAINS.n_metropolis // 3:
            common *= math.exp(0.3 * (log_ratio.clamp_max(0).exp().mean().item() - acceptance))
        elif t % every == 0:
            kept.append(x)
    return torch.stack(kept), EnsembleState(x, adapted(L, x))


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


def find_pilot(
    score_fn: ScoreFunction,
    modes: ModeMaps,
    generator: torch.Generator,
    budget: int,
    begin: Callable[[str, int], None] | None = None,
) -> PilotPoints:
    """Run chains around each mode, and pool them with the weights of the modes.

    Parameters
    ----------
    score_fn : callable
    modes : ModeMaps
    generator : torch.Generator
    budget : int
        Points at which the score may be evaluated, which sets the number of chains; chains that do not converge, or
        mix slowly, take up to three times as many.
    begin : callable, default=None
        Called with each stage and its number of calls.
    """
    n_chains = min(max(CHAINS.min_chains * budget // CHAINS.least_calls, CHAINS.min_chains), CHAINS.max_chains)
    weights = modes.weights.tolist()
    fewest = min(CHAINS.min_chains_of_mode, max(16, 2 * n_chains // len(weights)))
    sizes = [max(fewest, round(n_chains * w)) for w in weights]
    begin = begin or (lambda *_: None)
    begin("Langevin chains", sum(sizes) * CHAINS.n_langevin)
    ensembles = [
        langevin(score_fn, _start(score_fn, mode, n, generator), generator)
        for mode, n in zip(modes.maps, sizes, strict=True)
    ]
    kept: list[Tensor] = []
    for _ in range(CHAINS.max_rounds):
        begin("Metropolis chains", sum(sizes) * 3 * CHAINS.n_metropolis)
        rounds = [metropolis(score_fn, e, generator) for e in ensembles]
        latest, ensembles = [r[0] for r in rounds], [r[1] for r in rounds]
        converged = has_converged(latest, modes.weights)
        kept = [torch.cat(pair) for pair in zip(kept, latest, strict=True)] if kept and converged else latest
        mean_se, sd = chain_standard_error(kept, modes.weights), _moments(kept, modes.weights)[1]
        if converged and (mean_se / sd).max() < CHAINS.tolerance:
            break
    points = [k.flatten(0, 1) for k in kept]
    share = min(len(p) / w for p, w in zip(points, weights, strict=True))
    orders = [torch.randperm(len(p), generator=generator, device=p.device) for p in points]
    x = torch.cat([p[i[: int(share * w)]] for p, i, w in zip(points, orders, weights, strict=True)])
    return PilotPoints(*_by_mode(x, modes.maps), mean_se, converged)


def _by_mode(x: Tensor, maps: Sequence[Affine]) -> tuple[Tensor, list[int]]:
    """Return the points sorted by the Gaussian they most likely come from, since chains may cross, and counts.

    The Gaussian of a mode with hardly any points is left out.
    """
    distances = [a.whiten(x).square().sum(1) + 2 * a.log_determinant() for a in maps]
    nearest = torch.stack(distances).argmin(0)
    counts = nearest.bincount(minlength=len(maps))
    if len(maps) > 1 and counts.min() < CHAINS.min_points_of_mode:
        return _by_mode(x, [a for a, n in zip(maps, counts.tolist(), strict=True) if n >= CHAINS.min_points_of_mode])
    return x[nearest.argsort()], counts.tolist()


def _start(score_fn: ScoreFunction, mode: Affine, n: int, generator: torch.Generator) -> EnsembleState:
    """Return n chains drawn from the Gaussian at the mode or from the one fitted from there, whichever is better."""
    mode = narrowed(score_fn, mode, generator)
    candidates = [mode]
    if len(mode.m) <= CHAINS.max_matched_features:
        candidates.append(batch_and_match(score_fn, mode, generator))
    bounds = [lower_bound(score_fn, q, mode.m, generator) for q in candidates]
    q = candidates[bounds.index(max(bounds))]
    return EnsembleState(q.unwhiten(standard_normal(n, q.m, generator)), q.L)


def narrowed(score_fn: ScoreFunction, q: Affine, generator: torch.Generator) -> Affine:
    """Halve the largest principal widths of a Gaussian at a mode until it is not far outside the target.

    If the curvature vanishes in some direction, as along a ring, it is as wide as floating-point numbers allow.
    """
    for _ in range(100):
        log_ratio_ = lower_bound(score_fn, q, q.m, generator) - q.log_determinant().item()
        if log_ratio_ > -CHAINS.too_far * len(q.m):
            break
        U, widths, _ = torch.linalg.svd(q.L)
        root = U * widths.clamp_max(widths[0] / 2)
        q = Affine(q.m, torch.linalg.qr(root.mT)[1].mT)
        q = Affine(q.m, q.L * q.L.diagonal().sign())
    return q


def _moments(kept: Sequence[Tensor], weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (d,) of chains (n_kept, n, d) of several modes, weighted."""
    mean = sum(w * k.mean((0, 1)) for w, k in zip(weights, kept, strict=True))
    variance = sum(w * (k - mean).square().mean((0, 1)) for w, k in zip(weights, kept, strict=True))
    return mean, variance.sqrt()


def chain_standard_error(kept: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Return the standard error (d,) of the weighted mean; chains are independent."""
    variances = [w**2 * k.mean(0).var(0) / k.shape[1] for w, k in zip(weights, kept, strict=True)]
    return torch.stack(variances).sum(0).sqrt()


def has_converged(kept: Sequence[Tensor], weights: Tensor) -> bool:
    """Tell whether the halves of the kept chains agree in mean and scale, within the noise of that many chains."""
    (early, early_sd), (late, late_sd) = (
        _moments(half, weights) for half in zip(*(k.chunk(2) for k in kept), strict=True)
    )
    apart = torch.maximum((early - late).abs() / late_sd, (early_sd / late_sd).log().abs()).max()
    n, d = sum(k.shape[1] for k in kept), kept[0].shape[2]
    return bool(apart < (0.5 + math.sqrt(2 * math.log(2 * d))) / math.sqrt(n))
