r"""Gaussians fitted to a target by its score, or to points near it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi._utils.lazy import keeping_random
from skksivi.coordinates._affine import Affine, standard_normal
from skksivi.pilot._mixture import MOST_FEATURES
from skksivi.score._score import ScoreFunction

with keeping_random():
    from sklearn.covariance import ledoit_wolf


class GaussianSettings(NamedTuple):
    """The settings of `matched`, and of comparisons by scores."""

    #: Draws by which a Gaussian is compared with its target, and fewer of them.
    n_draws: int = 256
    n_quick: int = 64
    #: The score divergence below which the Gaussian at a mode will do, and iterations of one that is fitted instead.
    near: float = 0.05
    n_iter: int = 16


GAUSSIAN = GaussianSettings()


def score_divergence(
    score_fn: ScoreFunction, q: Affine, generator: torch.Generator, n_draws: int = GAUSSIAN.n_draws
) -> float:
    """Return the median over draws x of q = N(m, L L^T) of |L^T (s_p(x) - s_q(x))|^2 / d."""
    u = standard_normal(n_draws, q.m, generator)
    gap = q.whiten_score(score_fn(q.unwhiten(u)).detach()) + u
    return gap.square().mean(1).nan_to_num(math.inf, math.inf).median().item()


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


def adapted(L: Tensor, x: Tensor) -> Tensor:
    """Return a root of the covariance of x, shrunk towards L L^T where the points are few (Ledoit and Wolf 2004)."""
    u = torch.linalg.solve_triangular(L, (x - x.mean(0)).mT, upper=False).mT
    covariance, _ = ledoit_wolf(u.cpu().numpy())
    factor, failed = torch.linalg.cholesky_ex(torch.as_tensor(covariance).to(L))
    return L if failed else L @ factor


def adapted_by_scores(metric: Affine, u: Tensor, s: Tensor) -> Affine:
    r"""Return a map with :math:`L L^\top = \Sigma` for points u (n, d) and scores s (n, d) in a map's coordinates.

    With :math:`\Sigma\, \mathrm{Cov}(s)\, \Sigma = \mathrm{Cov}(u)` it is the geometric mean of the covariance of the
    points and the inverse covariance of the scores, which are equal for a Gaussian. If the points are few, or do not
    cover the target, the scores are more informative; both are shrunk (Ledoit and Wolf 2004).

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


def covariance_root(x: Tensor) -> Tensor:
    """Return the Cholesky factor of the covariance of points (n, d), even if their correlation is nearly singular."""
    centred = x - x.mean(0)
    sd = centred.square().mean(0).sqrt().clamp_min(torch.finfo(x.dtype).tiny)
    correlation = (centred / sd).mT @ (centred / sd) / len(x)
    for ridge in (0.0, 1e-13, 1e-10, 1e-7):
        factor, failed = torch.linalg.cholesky_ex(correlation + ridge * torch.eye(len(sd)).to(x))
        if not failed:
            break
    return sd[:, None] * factor


def matched(score_fn: ScoreFunction, mode: Affine, generator: torch.Generator) -> Affine:
    """Return the Gaussian at a mode, or the one fitted by batch and match if its score is nearer the target's."""
    error = score_divergence(score_fn, mode, generator, GAUSSIAN.n_quick)
    if error < GAUSSIAN.near or len(mode.m) > MOST_FEATURES:
        return mode
    q = batch_and_match(score_fn, mode, generator, GAUSSIAN.n_iter)
    return q if score_divergence(score_fn, q, generator, GAUSSIAN.n_quick) < error else mode
