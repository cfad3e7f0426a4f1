"""The moments of a target by points near it and their scores, and mixtures that have them."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi._utils.monte_carlo import controlled, second_order, stein_features
from skksivi.coordinates._affine import Affine, standard_normal
from skksivi.coordinates._lines import checked_density
from skksivi.judge import Grade, Verdict
from skksivi.mixing import GaussianMixtureDraws, log_student
from skksivi.pilot._mixture import Components, covariance_root
from skksivi.pilot._newton import look_for_jump
from skksivi.pilot._points import PilotPoints
from skksivi.score._score import Score

#: Degrees of freedom of Student's t beyond the number of features, and how much wider it is than a mixture, in units
#: of 1 / sqrt(d).
DF, WIDER = 2, 0.25


class Moments(NamedTuple):
    """The mean (d,) and standard deviations (d,) of a target, a root (d, d) of its covariance, and standard errors.

    The root is None where points are too few for it. The standard errors are of the means, in standard
    deviations, and of the logarithms of the scales.
    """

    mean: Tensor
    sd: Tensor
    root: Tensor | None
    mean_se: Tensor
    sd_se: Tensor

    @property
    def se(self) -> float:
        """The largest standard error."""
        return max(self.mean_se.max().item(), self.sd_se.max().item())


def moments_by_scores(u: Tensor, s: Tensor) -> Moments:
    """Return mean and covariance of a target by its draws u with scores s, (n, n_parts, d), and control variates; of
    many features the scales.

    Parts are independent of each other, and standard errors come from their spread.
    """
    n, n_parts, d = u.shape
    points, scores = (a.transpose(0, 1).flatten(0, 1) for a in (u, s))
    centre, scale = points.mean(0), points.std(0, correction=0)
    z, s_z = (points - centre) / scale, scores * scale
    has_pairs = z.numel() * d <= 2**25 and len(z) > d
    i, j = torch.tril_indices(d, d) if has_pairs else torch.arange(d).expand(2, d)
    own, products = second_order(z, s_z, i, j), z[:, i] * z[:, j]
    products = products - own * ((products * own).mean(0) / own.square().mean(0))
    y = controlled(torch.cat([z, products], 1), stein_features(z, s_z))
    if not y.isfinite().all():  # squares of the scores are not
        return plain_moments(u)
    mean, second = y.mean(0).tensor_split([d])
    se = y.view(n_parts, n, -1).mean(1).std(0) / math.sqrt(n_parts)
    sd = (second[i == j] - mean.square()).clamp_min(torch.finfo(z.dtype).tiny).sqrt()
    root = None
    if has_pairs:
        root = _root_of(z, mean, second, (i, j))
    elif len(z) >= 2 * d:  # points for each feature
        as_drawn, failed = torch.linalg.cholesky_ex(z.mT @ z / len(z))
        if not failed:  # there are as many different points as features
            root = _steadied(as_drawn, z, s_z)
            ratio = sd / root.norm(dim=1)  # which is far from one only where few draws carry the regression
            root = root * ratio.where((ratio > 0.5) & (ratio < 2), 1.0)[:, None]
    root = None if root is None else scale[:, None] * root
    return Moments(centre + scale * mean, scale * sd, root, se[:d], se[d:][i == j] / 2)


def plain_moments(u: Tensor) -> Moments:
    """Return mean and covariance of draws u (n, n_parts, d) as they are, with standard errors from parts."""
    mean, sd, root_parts = u.mean((0, 1)), u.std((0, 1), correction=0), math.sqrt(u.shape[1])
    mean_se, sd_se = (of_parts.std(0) / sd / root_parts for of_parts in (u.mean(0), u.std(0)))
    return Moments(mean, sd, covariance_root(u.flatten(0, 1)), mean_se, sd_se)


def _steadied(root: Tensor, z: Tensor, s: Tensor) -> Tensor:
    r"""Return a root L (d, d) of the covariance of many features, given that of points z (n, d) with scores s.

    In whitened coordinates, by Stein's identity :math:`E[s u^\top] = -I`,

    .. math:: C = E\!\left[u u^\top + \tfrac12 (A + A^\top)\right], \qquad
        A = \Lambda (s u^\top + I), \qquad \Lambda_{ii} = 1 / E s_i^2,

    has the least noise: none where the target is Gaussian, as much as that of the points where tails are heavy. The
    coordinates are at first those of the regression of the scores on the points, whose slope is :math:`-C^{-1}`.
    """
    eye = torch.eye(len(root)).to(root)
    u, s_u = torch.linalg.solve_triangular(root, z.mT, upper=False).mT, s @ root
    slope = s_u.mT @ u / len(u)
    factor, failed = torch.linalg.cholesky_ex(-(slope + slope.mT) / 2)
    if not failed:
        factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor))
    root = root if failed else root @ factor
    for _ in range(2):
        u, s_u = torch.linalg.solve_triangular(root, z.mT, upper=False).mT, s @ root
        A = (s_u.mT @ u / len(u) + eye) / s_u.square().mean(0)[:, None]
        factor, failed = torch.linalg.cholesky_ex(u.mT @ u / len(u) + (A + A.mT) / 2)
        root = root if failed else root @ factor
    return root


def _root_of(z: Tensor, mean: Tensor, second: Tensor, pairs: tuple[Tensor, Tensor]) -> Tensor:
    """Return a root (d, d) of the covariance of points z (n, d), with better means and products of pairs."""
    i, j = pairs
    covariance = z.mT @ z / len(z)
    as_drawn, failed = torch.linalg.cholesky_ex(covariance)
    as_drawn = covariance_root(z) if failed else as_drawn
    covariance[i, j] = covariance[j, i] = second - mean[i] * mean[j]
    root, failed = torch.linalg.cholesky_ex(covariance)
    return as_drawn if failed else root


# Mixtures and their points


def shifted_mixture(mixture: Components, by: Moments) -> Components:
    """Return a mixture moved to a mean and a covariance, or as much of that as is known."""
    return mixture.with_scales(by.mean, by.sd) if by.root is None else mixture.with_moments(by.mean, by.root)


def _points_of(mixture: Components, n: int) -> Tensor:
    """Return n points of a mixture, the same ones each time."""
    return mixture.draws()(n, mixture.means, torch.Generator(mixture.means.device).manual_seed(0))


def standard_normal_mixture(like: Tensor) -> Components:
    """Return the normal distribution of the features of `like` (d,) as a mixture."""
    m, eye = Affine.shift(torch.zeros_like(like))
    return Components(like.new_ones(1), m[None], eye[None])


def pilot_of_mixture(mixture: Components, n: int = 0) -> PilotPoints:
    """Return n points of a mixture, whose means are not known."""
    sd, k = mixture.covariances.diagonal(dim1=1, dim2=2).sqrt().amax(0), len(mixture.weights)
    verdict = Verdict(Grade.ROUGH, "a Gaussian" if k == 1 else f"{k} Gaussians")
    return PilotPoints(_points_of(mixture, n), [n], sd, verdict, mixture=mixture)


def pilot_with(points: Tensor, by: Moments, found_by: str = "importance sampling") -> PilotPoints:
    """Return points (n, d) mapped to a mean and a covariance, or its scales."""
    away = points - points.mean(0)
    if by.root is None:
        points = by.mean + away * (by.sd / points.std(0, correction=0))
    else:
        L = torch.linalg.cholesky(away.mT @ away / len(away))
        points = by.mean + torch.linalg.solve_triangular(L, away.mT, upper=False).mT @ by.root.mT
    return PilotPoints(points, [len(points)], by.mean_se * points.std(0), found_by=found_by)


class HeavyTailed(NamedTuple):
    r"""Student's t about each component of a mixture, a little wider.

    .. math:: u = m_k + \left(1 + \tfrac{1}{4 \sqrt d}\right) L_k \xi / \sqrt{\chi^2_\nu / \nu}, \quad \nu = d + 2.

    The weights of draws from the mixture itself would have a heavy tail where it lacks one.
    """

    scaled: GaussianMixtureDraws

    @classmethod
    def wider(cls, q: GaussianMixtureDraws) -> HeavyTailed:
        return cls(q.scaled(1 + WIDER / math.sqrt(q.latent_dim)))

    @property
    def df(self) -> int:
        return self.scaled.latent_dim + DF

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n points (n, d)."""
        means = self.scaled.means
        chi2 = standard_normal(n, means.new_empty(self.df), generator).square().sum(1, keepdim=True)
        xi = standard_normal(n, means, generator) / (chi2 / self.df).sqrt()
        return self.scaled.placed(self.scaled.components(n, generator), xi)

    def log_density(self, u: Tensor) -> Tensor:
        """Evaluate the log-density (n,) at points u (n, d)."""
        tops = self.scaled.log_parts(self.scaled.means).diagonal()[:, None]  # of the Gaussians, at their own means
        squares = 2 * (tops - self.scaled.log_parts(u))
        return log_student(tops, squares, u.shape[1], self.df).logsumexp(0)


def without_wrong_density(score_fn: Score, mode: Affine) -> Score:
    """Return a score without its density, with a warning, if its differences near a mode are not the integrals."""
    n = 3 if score_fn.tally.is_frugal else 8
    u = standard_normal(n, mode.m, torch.Generator(mode.m.device).manual_seed(0))
    jumps = partial(look_for_jump, score_fn)
    return checked_density(score_fn, mode.m[None], mode.unwhiten(u), jumps)
