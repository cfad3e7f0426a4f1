r"""Log-densities of semi-implicit families, by importance sampling of the mixing draws behind each x.

.. math:: q(x) = \int q(z)\, N(x; \mu(z), \mathrm{diag}\, \sigma(z)^2)\, dz

For one layer, the distribution of z given x is nearly Gaussian where mu is nearly linear. Gauss-Newton steps
find its modes. The integral is estimated by the mean weight of draws from Gaussians and Student t distributions with
the curvature at these modes, and from q(z), which bounds the weights.

A hierarchy resembles a Langevin chain, which is reversed: each layer is drawn given the one below it by a linear
regression, learned from draws of the family.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from skksivi.families._layer import Hierarchy, SemiImplicit
from skksivi.mixing import IN_CACHE, AtomDraws, DensityMixing, GaussianMixtureDraws, Mixing, NormalDraws, log_student
from skksivi.pilot._mixture import covariance_root
from skksivi.score._score import ScoreFunction

#: Mixing draws among which the starts are found, and starts for each x.
N_BANK, N_STARTS = 2048, 2

#: Gauss-Newton steps at most, and the lengths of a step that are tried.
N_STEPS, LENGTHS = 8, (1.0, 0.5, 0.2, 0.05)

#: Initial draws for each x, which grow while the standard error exceeds a tolerance, in nats, and the most.
N_DRAWS, TOLERANCE, MOST_DRAWS = 128, 0.03, 2**11

#: Numbers held in memory at a time.
CHUNK = 2**22


class LogDensity(NamedTuple):
    """Estimates of log-densities (n,) and their standard errors (n,), in nats."""

    value: Tensor
    se: Tensor


class Proposal(NamedTuple):
    """Gaussians N(z, (C C^T)^{-1}) for each x (n, d): z (n, m, latent_dim) and C (n, m, latent_dim, latent_dim)."""

    x: Tensor
    z: Tensor
    C: Tensor

    def rows(self, rows: Tensor | slice) -> Proposal:
        """Return the proposals for some of the x."""
        return Proposal(*(part[rows] for part in self))


class Weights(NamedTuple):
    """Log-weights (n, k) of k draws for each of n rows, and controls (n, k, p), functions of the draws of mean 0."""

    logarithms: Tensor
    controls: Tensor


def refined(
    weigh: Callable[[Tensor, int, torch.Generator], Weights], x: Tensor, width: int, seed: int, most: int = MOST_DRAWS
) -> LogDensity:
    """Return the logarithms of the means of weights of rows x (n, d), with more draws where the error is too large.

    All rows use the same random numbers, so that the value at a row does not depend on the others. A draw uses
    `width` numbers, and a row at most `most` draws.
    """
    value, se = x.new_empty(len(x)), x.new_full((len(x),), math.inf)
    n_draws = N_DRAWS
    while n_draws <= most and len(rough := torch.nonzero(se > TOLERANCE)[:, 0]):
        for rows in rough.split(max(1, CHUNK // (n_draws * width))):
            value[rows], se[rows] = log_mean(weigh(rows, n_draws, seeded(seed + n_draws, x)))
        n_draws *= 4
    return LogDensity(value, se)


def seeded(seed: int, like: Tensor) -> torch.Generator:
    return torch.Generator(like.device).manual_seed(seed)


def log_mean(weights: Weights) -> LogDensity:
    """Return the logarithms of the means (n,) of weights, as the intercepts of their regressions on the controls."""
    top = weights.logarithms.amax(1, keepdim=True)
    w, h = (weights.logarithms - top).exp()[:, :, None], weights.controls
    w_mean, h_mean = w.mean(1, keepdim=True), h.mean(1, keepdim=True)
    centred = h - h_mean
    ridge = 1e-10 * torch.eye(h.shape[2]).to(h) * (1 + h.square().sum((1, 2), keepdim=True))
    beta = torch.linalg.solve(centred.mT @ centred + ridge, centred.mT @ (w - w_mean))
    residuals, mean = w - w_mean - centred @ beta, w_mean - h_mean @ beta
    left = mean > 0.1 * w_mean  # otherwise the regression rests on a few weights
    residuals, mean = residuals.where(left, w - w_mean), mean.where(left, w_mean)
    se = residuals.square().sum((1, 2)).sqrt() / w.shape[1] / mean[:, 0, 0]
    return LogDensity(top[:, 0] + mean[:, 0, 0].log(), se)


# One layer


def layer_log_density(family: SemiImplicit, x: Tensor, seed: int, most: int = MOST_DRAWS) -> LogDensity:
    """Estimate log q at points x (n, d) of a family in float64 whose mixing has a density or is discrete.

    The density of a mixture of Gaussians is exact.

    Raises
    ------
    TypeError
        The mixing distribution is of another kind.
    """
    if isinstance(family.mixing, AtomDraws):
        return LogDensity(_of_atoms(family, x, family.mixing.points), x.new_zeros(len(x)))
    with_density(family.mixing)
    mixture = as_mixture(family)
    if mixture is not None:
        return LogDensity(mixture.log_density(x), x.new_zeros(len(x)))
    bank = family.draw_latent(N_BANK, seeded(seed, x))
    of_mixing = len(LENGTHS) * with_density(family.mixing).width
    width = max(N_BANK, N_STARTS * max(x.shape[1] ** 2, bank.shape[1] ** 2, of_mixing, _hidden(family) * x.shape[1]))
    tiles = [_of_tile(family, tile, bank, seed, most) for tile in x.split(max(1, CHUNK // width))]
    return LogDensity(*(torch.cat(part) for part in zip(*tiles, strict=True)))


def _of_atoms(family: SemiImplicit, x: Tensor, z: Tensor) -> Tensor:
    r"""Return :math:`\log \frac1k \sum_j q(x_i | z_j)` (n,) at points x (n, d), for z (k, latent_dim)."""
    tiles = [family.log_prob(tile, z).logsumexp(1) for tile in x.split(max(1, CHUNK // len(z)))]
    return torch.cat(tiles) - math.log(len(z))


def as_mixture(family: SemiImplicit) -> GaussianMixtureDraws | None:
    r"""Return the mixture of :math:`N(A m_k + c, A L_k L_k^\top A^\top + \Sigma)` that a family is, or None.

    It is one if z has a mixture of :math:`N(m_k, L_k L_k^\top)`, :math:`\mu(z) = A z + c` and sigma is constant.
    """
    z, mixing = next(family.parameters()).new_zeros(1, family.mixing.latent_dim), family.mixing
    # covariances of more features are not factored
    if not (family.mean.is_affine and family.log_variance.is_affine) or family.n_features > 1000:
        return None
    if family.log_variance.jacobian(z).any():
        return None
    if isinstance(mixing, NormalDraws):
        mixing = GaussianMixtureDraws(z, torch.eye(z.shape[1]).to(z)[None], z.new_ones(1))
    if not isinstance(mixing, GaussianMixtureDraws):
        return None
    A, sigma = family.mean.jacobian(z)[0], family.sigma(z).expand(1, -1)[0]
    root = A @ mixing.factors.to(z)
    # The triangle of [A L_k, Sigma^{1/2}]; a Cholesky factor of the product would lose half of the digits.
    upper = torch.linalg.qr(torch.cat([root, sigma.diag().expand_as(root @ root.mT)], -1).mT).R
    diagonal = upper.diagonal(dim1=-2, dim2=-1)
    if not (upper.isfinite().all() and diagonal.all()):
        return None
    factors = (upper * diagonal.sign().unsqueeze(-1)).mT
    return GaussianMixtureDraws(mixing.means.to(z) @ A.mT + family.mean(0 * z), factors, mixing.weights)


def _hidden(family: nn.Module) -> int:
    """Return the width of the widest layer, the memory of one row."""
    return max(max(p.shape) for p in family.parameters())


def log_joint(family: SemiImplicit, x: Tensor, z: Tensor) -> Tensor:
    """Return log q(z) + log N(x; mu(z), sigma(z)^2), shape (...), of x (..., d) and z (..., latent_dim)."""
    step, rows = max(1, IN_CACHE // _hidden(family)), (a.reshape(-1, a.shape[-1]) for a in (x, z))
    parts = zip(*(a.split(step) for a in rows), strict=True)
    return torch.cat([_log_joint(family, x, z) for x, z in parts]).view(z.shape[:-1])


def _log_joint(family: SemiImplicit, x: Tensor, z: Tensor) -> Tensor:
    """Return log q(z) + log N(x; mu(z), sigma(z)^2), shape (n,), of x (n, d) and z (n, latent_dim)."""
    mu, sigma = family.mean(z), family.sigma(z)
    log_scale = sigma.log().expand_as(mu).sum(-1) + mu.shape[-1] / 2 * math.log(2 * math.pi)
    return with_density(family.mixing).log_density(z) - log_scale - ((x - mu) / sigma).square().sum(-1) / 2


def with_density(mixing: Mixing) -> DensityMixing:
    """Raise TypeError for a distribution without a density."""
    if not isinstance(mixing, DensityMixing):
        raise TypeError(f"a mixing distribution without density: {type(mixing).__name__}")
    return mixing


def _of_tile(family: SemiImplicit, x: Tensor, bank: Tensor, seed: int, most: int) -> LogDensity:
    """Estimate log q at points x (n, d), from starts in a bank of mixing draws."""
    proposal = climbed(family, x, bank[family.log_prob(x, bank).topk(N_STARTS, 1).indices])

    def weigh(rows: Tensor, n_draws: int, generator: torch.Generator) -> Weights:
        return _weights(family, proposal.rows(rows), n_draws, generator)

    return refined(weigh, x, max(with_density(family.mixing).width, _hidden(family)), seed, most)


def climbed(family: SemiImplicit, x: Tensor, starts: Tensor) -> Proposal:
    r"""Return modes of z given x (n, d), and the curvature there, from starts (n, m, latent_dim).

    A step is :math:`H^{-1} \nabla \log q(x, z)` with :math:`H = J^\top \Sigma^{-1} J + P`, J the Jacobian of mu and P
    the precision of q(z), or the fraction of it that gives the highest value.
    """
    n, m, latent_dim = starts.shape
    z, x_ = starts.reshape(n * m, -1), x.repeat_interleave(m, 0)
    lengths, every = z.new_tensor(LENGTHS)[:, None, None], torch.arange(n * m, device=z.device)
    for _ in range(N_STEPS):
        with torch.enable_grad():
            at = z.detach().requires_grad_()
            height = log_joint(family, x_, at)
            (gradient,) = torch.autograd.grad(height.sum(), at)
        step = torch.cholesky_solve(gradient[:, :, None], _curvature(family, z))[:, :, 0]
        tried = z + lengths * step
        best, k = log_joint(family, x_.expand(len(LENGTHS), -1, -1), tried).nan_to_num(-math.inf).max(0)
        gain = best - height.detach()
        z = tried[k, every].where(gain[:, None] > 0, z)
        if not (gain > 1e-3).any():
            break
    return Proposal(x, z.view(n, m, -1), _curvature(family, z).view(n, m, latent_dim, latent_dim))


def _curvature(family: SemiImplicit, z: Tensor) -> Tensor:
    """Return Cholesky factors (n, latent_dim, latent_dim) of H at z (n, latent_dim), or of P if rounding spoils H."""
    J = family.mean.jacobian(z) / family.sigma(z).expand(len(z), -1)[:, :, None]
    P = with_density(family.mixing).precision(z)
    H = J.mT @ J + P
    H.diagonal(dim1=1, dim2=2).mul_(1 + 1e-12)
    factors, failed = torch.linalg.cholesky_ex(H)
    return factors if not failed.any() else factors.where(failed[:, None, None] == 0, torch.linalg.cholesky(P))


def _weights(family: SemiImplicit, proposal: Proposal, n_draws: int, generator: torch.Generator) -> Weights:
    """Return the weights of draws of z; controls are the shares of the parts of the proposal, with known means.

    References
    ----------
    Owen, A. and Zhou, Y. (2000). Safe and effective importance sampling. JASA 95(449).
    """
    x, z, C = proposal
    n, m, d = z.shape
    n_gaussian, n_student = max(2, int(0.4 * n_draws / m)), max(2, int(0.4 * n_draws / m))  # the rest is from q(z)
    n_mixing = max(2, n_draws - m * (n_gaussian + n_student))
    e = torch.randn(m, n_gaussian + n_student, d, generator=generator, dtype=z.dtype, device=z.device)
    df = 10
    chi = torch.randn(m, n_student, df, generator=generator, dtype=z.dtype, device=z.device)
    e[:, n_gaussian:] /= chi.square().mean(-1, keepdim=True).sqrt()
    near = z[:, :, None] + e @ torch.linalg.solve_triangular(C, torch.eye(d).to(C).expand_as(C), upper=False)
    mixing = family.draw_latent(n_mixing, generator).expand(n, -1, -1)
    draws = torch.cat([near.flatten(1, 2), mixing], 1)
    log_parts = [with_density(family.mixing).log_density(draws.flatten(0, 1)).view(n, -1) + math.log(n_mixing)]
    for j in range(m):
        e = (draws - z[:, j, None]) @ C[:, j]
        square, log_scale = e.square().sum(-1), C[:, j].diagonal(dim1=1, dim2=2).log().sum(1)[:, None]
        top = log_scale - d / 2 * math.log(2 * math.pi)
        log_parts += [top - square / 2 + math.log(n_gaussian), log_student(top, square, d, df) + math.log(n_student)]
    parts = torch.stack(log_parts, 2) - math.log(draws.shape[1])
    log_proposal = parts.logsumexp(2)
    log_weights = log_joint(family, x[:, None].expand(-1, draws.shape[1], -1), draws) - log_proposal
    shares = log_parts[0].new_tensor([n_mixing, *[n_gaussian, n_student] * m]) / draws.shape[1]
    controls = (parts - log_proposal[:, :, None]).exp() - shares
    return Weights(log_weights, controls[:, :, 1:])  # they sum to zero


# A hierarchy


class BackwardKernel(NamedTuple):
    """The regression of a layer on features (n, k) of the one below it: coefficients B (k, d) and noise C (d, d)."""

    B: Tensor
    C: Tensor


def hierarchy_log_density(
    family: Hierarchy, x: Tensor, score_fn: ScoreFunction, seed: int, most: int = MOST_DRAWS
) -> LogDensity:
    """Estimate log q at points x (n, d) of a hierarchy in float64 whose base has a density."""
    base = with_density(family.mixing)
    kernels = backward_kernels(family, score_fn, seeded(seed, x))

    def weigh(rows: Tensor, n_draws: int, generator: torch.Generator) -> Weights:
        low = x[rows].repeat_interleave(n_draws, 0)
        log_weights, s_p = torch.zeros_like(low[:, 0]), score_fn(low)
        for t, (B, C) in enumerate(kernels):
            e = torch.randn(n_draws, low.shape[1], generator=generator, dtype=low.dtype, device=low.device)
            e = e.repeat(len(rows), 1)
            high = _features(family, t, low, s_p) @ B + e @ C.mT
            s_p = score_fn(high)
            log_back = -e.square().sum(1) / 2 - C.diagonal().log().sum() - low.shape[1] / 2 * math.log(2 * math.pi)
            log_weights += family.log_conditional(t, low, high, s_p) - log_back
            low = high
        logarithms = (log_weights + base.log_density(low)).view(-1, n_draws)
        return Weights(logarithms, logarithms.new_empty(*logarithms.shape, 0))

    return refined(weigh, x, max(2 * x.shape[1], base.width, _hidden(family)), seed, most)


def backward_kernels(family: Hierarchy, score_fn: ScoreFunction, generator: torch.Generator) -> list[BackwardKernel]:
    """Regress every layer on the one below it, using draws of the family."""
    layers, kernels = family.path(8192, generator, score_fn), []
    for t, (low, high) in enumerate(itertools.pairwise(layers)):
        phi = _features(family, t, low, score_fn(low))
        B = torch.linalg.pinv(phi, rtol=1e-10) @ high  # for a Gaussian target the step is linear in x
        kernels.append(BackwardKernel(B, covariance_root(high - phi @ B)))
    return kernels


def _features(family: Hierarchy, t: int, x: Tensor, s_p: Tensor) -> Tensor:
    """Return 1, x and the Langevin step at x (n, d): a reversed chain is nearly linear in them."""
    return torch.cat([torch.ones_like(x[:, :1]), x, family.drift(t, x, s_p)], 1)
