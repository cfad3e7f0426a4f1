r"""An ensemble of chains around the modes of a target, from scores alone, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi._lazy import keeping_random
from skksivi.pilot._affine import Affine, AffineMap, standard_normal
from skksivi.pilot._curved import Curved
from skksivi.pilot._mixture import Components, fitted_mixture
from skksivi.pilot._modes import FAR, N_COMPARED, LostError, ModeMaps, log_ratio
from skksivi.score._score import ScoreFunction

with keeping_random():
    from sklearn.covariance import ledoit_wolf


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
    #: The fall of log p from a mode, in nats a feature, beyond which a Gaussian is too wide to start from.
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


CHAINS = ChainSettings()


#: Points for each feature that a covariance takes.
FEW = 20


class PilotPoints(NamedTuple):
    """Points near the target, and what is known of them.

    Attributes
    ----------
    x : Tensor of shape (n, d)
        Points, sorted by the mode they are near.
    n_of_mode : list of int
        How many belong to each.
    mean_se : Tensor of shape (d,)
        Standard errors of their mean, from the spread over independent chains.
    converged : bool
        Whether the earlier and the later half of the points agree.
    dense : bool
        Whether there is mass between the points of a mode.
    mixture : Components or None
        One that was fitted to them.
    warp : Curved or None
        The map to the coordinates of the target; they are y of this, if there is one.
    """

    x: Tensor
    n_of_mode: list[int]
    mean_se: Tensor
    converged: bool
    dense: bool = True
    mixture: Components | None = None
    warp: Curved | None = None

    def map(self) -> Affine:
        """Return the map by mean and covariance: of points that are too few for it by that of their one Gaussian."""
        n, d = self.x.shape
        if self.mixture is not None and len(self.mixture.weights) == 1 and n < FEW * d:
            return self.mixture.map()
        return Affine(self.x.mean(0), covariance_root(self.x))

    def error(self) -> float:
        """Return the largest standard error of a mean, in standard deviations."""
        return (self.mean_se / self.x.std(0)).max().item()

    def of_modes(self) -> Sequence[Tensor]:
        """Return the points of each mode."""
        return self.x.split(self.n_of_mode)

    def thinned(self, n: int) -> PilotPoints:
        """Return at most about n of the points, the same share of each mode."""
        every = -(-len(self.x) // n)
        parts = [part[::every] for part in self.of_modes()]
        return self._replace(x=torch.cat(parts), n_of_mode=[len(part) for part in parts])

    def whitened(self, map: AffineMap, dtype: torch.dtype) -> PilotPoints:  # noqa: A002
        """Return the points in the coordinates of a map."""
        return self._replace(x=map.whiten(self.x).to(dtype))

    def mixture_in(self, map: AffineMap, generator: torch.Generator) -> Components:  # noqa: A002
        """Return a mixture for these points in the coordinates of a map."""
        if self.mixture is not None and isinstance(map, Affine):
            return self.mixture.whitened(map)
        return fitted_mixture(self._replace(x=map.whiten(self.x)).of_modes(), generator)

    def unwhitened(self, map: Affine) -> PilotPoints:  # noqa: A002
        """Return the points in x, if these are those of u, and their errors for whatever correlation."""
        scale = map.L.norm(dim=1)
        mixture = None if self.mixture is None else self.mixture.unwhitened(map)
        return self._replace(x=map.unwhiten(self.x), mean_se=self.mean_se.max() * scale, mixture=mixture)

    def conditional_sd(self, score_fn: ScoreFunction, map: AffineMap) -> Tensor:  # noqa: A002
        r"""Return the standard deviations (d,) of the coordinates u of a map while the others stand still.

        By Stein's identity the mean of their inverse squares is :math:`E s_i^2 = E[-\partial_i s_i]`. A few rows do.
        None is above one, the standard deviation of all of u: points that have not come to the target would say so.
        """
        x = self.x[:: max(1, len(self.x) // N_COMPARED)]
        return map.whiten_score(score_fn(x).detach()).square().mean(0).rsqrt().clamp_max(1.0)

    def width_within(self) -> Tensor:
        """Return the interquartile ranges (d,) within the narrowest mode, in units of a normal's deviation.

        Heavy tails have no say in them.
        """
        quartiles = self.x.new_tensor([0.25, 0.75])
        ranges = [part.quantile(quartiles, dim=0).diff(dim=0)[0] for part in self.of_modes()]
        return torch.stack(ranges).amin(0) / 1.349


def lobatto_nodes(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the inner nodes (n, d) of Lobatto's rule of four points, :math:`x + t (y - x)` with
    :math:`t = \tfrac12 \mp \tfrac{1}{2 \sqrt 5}`.
    """
    return torch.lerp(x, y, 0.5 - 0.5 / math.sqrt(5)), torch.lerp(x, y, 0.5 + 0.5 / math.sqrt(5))


def lobatto(s_x: Tensor, s_1: Tensor, s_2: Tensor, s_y: Tensor, gap: Tensor) -> Tensor:
    r"""Integrate the score along lines by Lobatto's rule of four points, from its values there.

    .. math:: \log p(y) - \log p(x) \approx \tfrac{1}{12} \left( s_x + 5 s_1 + 5 s_2 + s_y \right)^\top (y - x).

    It is exact where log p is a polynomial of degree six along the line; else the error is
    :math:`-g^{(6)}(t) / 1{,}512{,}000` for some t in [0, 1], of :math:`g(t) = s(x + t (y - x))^\top (y - x)`.

    Parameters
    ----------
    s_x, s_1, s_2, s_y : Tensor of shape (n, d)
        The scores at x, at the `lobatto_nodes` and at y.
    gap : Tensor of shape (n, d)
        The y - x.

    Returns
    -------
    log_ratio : Tensor of shape (n,)

    References
    ----------
    Abramowitz, M. and Stegun, I. (1964). Handbook of mathematical functions, 25.4.32.
    """
    return ((s_x + 5 * (s_1 + s_2) + s_y) * gap).sum(1) / 12


def kronrod(score_fn: ScoreFunction, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    r"""Integrate the score along lines by Kronrod's extension of Lobatto's rule of four points, to seven.

    Parameters
    ----------
    score_fn : callable
    a : Tensor of shape (d,)
    b : Tensor of shape (n, d)

    Returns
    -------
    log_ratio : Tensor of shape (n,)
        :math:`\log p(b) - \log p(a)`.
    gap : Tensor of shape (n,)
        What Lobatto's rule would say less; the error is much smaller.

    References
    ----------
    Gander, W. and Gautschi, W. (2000). Adaptive quadrature: revisited. BIT 40(1).
    """
    outer, inner = math.sqrt(2 / 3), 1 / math.sqrt(5)
    nodes = a.new_tensor([1 - outer, 1 - inner, 1, 1 + inner, 1 + outer, 2])
    points = torch.lerp(a, b, nodes[:, None, None] / 2)
    s_a, s = score_fn(a[None]).detach(), score_fn(points.flatten(0, 1)).detach().view(points.shape)
    f1, f2, f3, f4, f5, f_b = (s * (b - a)).sum(-1)
    ends = (s_a * (b - a)).sum(-1) + f_b
    ratio = (77 * ends + 432 * (f1 + f5) + 625 * (f2 + f4) + 672 * f3) / 2940
    return ratio, ratio - (ends + 5 * (f2 + f4)) / 12


# A Gaussian


def batch_and_match(score_fn: ScoreFunction, start: Affine, generator: torch.Generator, n_iter: int = 60) -> Affine:
    r"""Fit a Gaussian by matching its score to the target's on batches of its own draws.

    In the coordinates u of the present N(m, L L^T), with draws u_b and scores g_b of means and covariances
    :math:`\bar u, C, \bar g, \Gamma` and a learning rate :math:`\lambda`, :math:`r = \lambda / (1 + \lambda)`,

    .. math::
        U = \lambda \Gamma + r\, \bar g \bar g^\top, \quad V = I + \lambda C + r\, \bar u \bar u^\top = R R^\top, \\
        \Sigma = 2 R \left(I + (I + 4 R^\top U R)^{1/2}\right)^{-1} R^\top, \quad \mu = r (\Sigma \bar g + \bar u).

    References
    ----------
    Cai, D. et al. (2024). Batch and match: black-box variational inference with a score-based divergence.
    https://arxiv.org/abs/2402.14758
    """
    d, (m, L) = len(start.m), start
    eye, shrink = torch.eye(d, dtype=m.dtype, device=m.device), 1.0
    for t in range(n_iter):
        rate = min(1.0, 20 / (t + 1))
        r = rate / (1 + rate)
        u = shrink * standard_normal(max(4 * d, 64), m, generator)
        g = score_fn(m + u @ L.mT).detach() @ L
        finite = g.isfinite().all(1)
        if finite.double().mean() < 0.5:
            shrink /= 2
            continue
        u, g = u[finite], g[finite]
        u_mean, g_mean = u.mean(0), g.mean(0)
        U = rate * g.mT.cov(correction=0) + r * g_mean.outer(g_mean)
        R = torch.linalg.cholesky(eye + rate * u.mT.cov(correction=0) + r * u_mean.outer(u_mean))
        try:
            lam, W = torch.linalg.eigh(R.mT @ U @ R)
        except torch.linalg.LinAlgError:  # scores too far apart in size
            continue
        root = R @ W * (2 / (1 + (1 + 4 * lam.clamp_min(0)).sqrt())).sqrt()
        sigma = root @ root.mT
        factor, failed = torch.linalg.cholesky_ex(sigma)
        mu = r * (sigma @ g_mean + u_mean)
        if not failed and mu.isfinite().all():
            m, L = m + L @ mu, L @ factor
    return Affine(m, L)


def lower_bound(score_fn: ScoreFunction, q: Affine, origin: Tensor, generator: torch.Generator) -> float:
    r"""Return the evidence lower bound of q = N(m, L L^T) up to a constant, with a median instead of the mean.

    .. math:: E_q \log \frac{p(x)}{p(x_0)} + \log \det L
    """
    x = q.unwhiten(standard_normal(CHAINS.n_compared, q.m, generator))
    return (
        log_ratio(score_fn, origin, x).nan_to_num(-math.inf, -math.inf, -math.inf).median() + q.log_determinant()
    ).item()


# Chains


def clipped_drift(s: Tensor) -> Tensor:
    r"""Return scores (n, d) of standardised coordinates, those longer than :math:`5 \sqrt d` cut to that length.

    It is five times the length of a score of N(0, I): a chain that starts far out does not overshoot.
    """
    return s * (5 * math.sqrt(s.shape[1]) / torch.linalg.vector_norm(s, dim=1, keepdim=True)).clamp_max(1)


class Ensemble(NamedTuple):
    """Chains x (n, d) and their preconditioner L (d, d)."""

    x: Tensor
    L: Tensor


def langevin(score_fn: ScoreFunction, chains: Ensemble, generator: torch.Generator, step: float = 0.1) -> Ensemble:
    r"""Move an ensemble towards the target by the Langevin scheme of Leimkuhler and Matthews.

    .. math:: x_{t+1} = x_t + L \left[ h L^\top s(x_t) + \sqrt{h / 2}\, (\xi_t + \xi_{t+1}) \right],

    whose covariance is exact for Gaussians. L is adapted twice to the covariance of the chains. Chains that leave the
    finite numbers go on from another's place.

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
    return Ensemble(x, L)


def metropolis(
    score_fn: ScoreFunction, chains: Ensemble, generator: torch.Generator, acceptance: float = 0.65
) -> tuple[Tensor, Ensemble]:
    r"""Run Metropolis-adjusted Langevin chains that need no density.

    The steps are :math:`y = x + L v` with :math:`v = h L^\top s(x) + \sqrt{2 h}\, \xi`, h a random share of a common
    step, which is adapted to the rate of acceptance; :math:`\log p(y) - \log p(x)` is the integral of the score from
    x to y by Lobatto's rule of four points. What is left of the bias is the error of that rule.

    Returns
    -------
    kept : Tensor of shape (n_kept, n, d)
        The chains at every third step, once the step size is adapted.
    chains : Ensemble
        As they are at the end.

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
    return torch.stack(kept), Ensemble(x, adapted(L, x))


def revive(x: Tensor, generator: torch.Generator) -> Tensor:
    """Put chains that are not finite, or as good as, in the places of others."""
    finite = (x.abs() < FAR).all(1)
    if finite.all():
        return x
    alive = x[finite]
    if not len(alive):
        raise LostError
    others = torch.randint(len(alive), (len(x),), generator=generator, device=x.device)
    return torch.where(finite[:, None], x, alive[others])


def adapted(L: Tensor, x: Tensor) -> Tensor:
    """Return a root of the covariance of x, shrunk towards L L^T where the points are few (Ledoit and Wolf 2004)."""
    u = torch.linalg.solve_triangular(L, (x - x.mean(0)).mT, upper=False).mT
    covariance, _ = ledoit_wolf(u.cpu().numpy())
    factor, failed = torch.linalg.cholesky_ex(torch.as_tensor(covariance).to(L))
    return L if failed else L @ factor


def adapted_by_scores(metric: Affine, u: Tensor, s: Tensor) -> Affine:
    r"""Return a map with :math:`L L^\top = \Sigma` for points u (n, d) and scores s (n, d) in a map's coordinates.

    With :math:`\Sigma\, \mathrm{Cov}(s)\, \Sigma = \mathrm{Cov}(u)` it is the geometric mean of the covariance of the
    points and the inverse of that of the scores, which are equal for a Gaussian. Where the points are few, or have
    not been everywhere, scores know more; both are shrunk (Ledoit and Wolf 2004).

    References
    ----------
    Titsias, M. (2023). Optimal preconditioning and Fisher adaptive Langevin sampling. NeurIPS.
    """
    scale = (u.std(0) / s.std(0)).sqrt()
    C, F = (torch.as_tensor(ledoit_wolf(a.cpu().numpy())[0]).to(u) for a in (u / scale, s * scale))
    lam, V = torch.linalg.eigh(F)
    root, inverse = V * lam.sqrt() @ V.mT, V * lam.rsqrt() @ V.mT
    mu, W = torch.linalg.eigh(root @ C @ root)
    factor = torch.linalg.cholesky(inverse @ (W * mu.sqrt() @ W.mT) @ inverse)
    return Affine(metric.unwhiten(u.mean(0)[None])[0], metric.L @ (scale[:, None] * factor))


def find_pilot(
    score_fn: ScoreFunction,
    modes: ModeMaps,
    generator: torch.Generator,
    budget: int,
    begin: Callable[[str, int], None] | None = None,
) -> PilotPoints:
    """Run chains around each mode, and pool them by the weights of the modes.

    Parameters
    ----------
    score_fn : callable
    modes : ModeMaps
    generator : torch.Generator
    budget : int
        Points at which the score may be evaluated, which sets the number of chains; chains that do not converge, or
        mix slowly, take up to three times as many.
    begin : callable, default=None
        Is told each stage, and how many calls it takes.
    """
    n_chains = min(max(budget // (CHAINS.n_langevin + 3 * CHAINS.n_metropolis), CHAINS.min_chains), CHAINS.max_chains)
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
        mean_se, sd = standard_error(kept, modes.weights), _moments(kept, modes.weights)[1]
        if converged and (mean_se / sd).max() < CHAINS.tolerance:
            break
    points = [k.flatten(0, 1) for k in kept]
    share = min(len(p) / w for p, w in zip(points, weights, strict=True))
    x = torch.cat([_some(p, int(share * w), generator) for p, w in zip(points, weights, strict=True)])
    return PilotPoints(*_by_mode(x, modes.maps), mean_se, converged)


def _by_mode(x: Tensor, maps: Sequence[Affine]) -> tuple[Tensor, list[int]]:
    """Return the points sorted by the Gaussian they most likely come from, chains may have crossed over, and counts.

    The Gaussian of a mode that has hardly a point is left out.
    """
    distances = [a.whiten(x).square().sum(1) + 2 * a.log_determinant() for a in maps]
    nearest = torch.stack(distances).argmin(0)
    counts = nearest.bincount(minlength=len(maps))
    if len(maps) > 1 and counts.min() < CHAINS.min_points_of_mode:
        return _by_mode(x, [a for a, n in zip(maps, counts.tolist(), strict=True) if n >= CHAINS.min_points_of_mode])
    return x[nearest.argsort()], counts.tolist()


def _some(points: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Return n of the points, in random order."""
    return points[torch.randperm(len(points), generator=generator, device=points.device)[:n]]


def _start(score_fn: ScoreFunction, mode: Affine, n: int, generator: torch.Generator) -> Ensemble:
    """Return n chains drawn from the better Gaussian of the one at the mode and the one fitted from there."""
    mode = narrowed(score_fn, mode, generator)
    candidates = [mode]
    if len(mode.m) <= CHAINS.max_matched_features:
        candidates.append(batch_and_match(score_fn, mode, generator))
    bounds = [lower_bound(score_fn, q, mode.m, generator) for q in candidates]
    q = candidates[bounds.index(max(bounds))]
    return Ensemble(q.unwhiten(standard_normal(n, q.m, generator)), q.L)


def narrowed(score_fn: ScoreFunction, q: Affine, generator: torch.Generator) -> Affine:
    """Halve the largest principal widths of a Gaussian at a mode until it is not far out of the target.

    A curvature that vanishes in some direction, as along a ring, makes it as wide as floating-point numbers allow.
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


def standard_error(kept: Sequence[Tensor], weights: Tensor) -> Tensor:
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


def covariance_root(x: Tensor) -> Tensor:
    """Return the Cholesky factor of the covariance of points (n, d), however close to singular their correlation."""
    centred = x - x.mean(0)
    sd = centred.square().mean(0).sqrt().clamp_min(torch.finfo(x.dtype).tiny)
    correlation = (centred / sd).mT @ (centred / sd) / len(x)
    for ridge in (0.0, 1e-13, 1e-10, 1e-7):
        factor, failed = torch.linalg.cholesky_ex(correlation + ridge * torch.eye(len(sd)).to(x))
        if not failed:
            break
    return sd[:, None] * factor
