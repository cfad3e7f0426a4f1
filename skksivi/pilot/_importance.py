r"""Importance sampling from Gaussian mixtures that are fitted to its draws, with control variates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from skksivi._utils.arrays import as_array, as_tensor
from skksivi._utils.monte_carlo import controlled, pareto_smoothed, second_order, stein_features, systematic_rows
from skksivi.coordinates._affine import Affine, standard_normal
from skksivi.coordinates._lines import by_neighbours, checked_density, kronrod, lobatto, lobatto_nodes
from skksivi.judge import THRESHOLDS, Grade, Verdict
from skksivi.mixing import GaussianMixtureDraws, log_student
from skksivi.pilot._mixture import Components, covariance_root, fitted_mixture, score_matched
from skksivi.pilot._newton import look_for_jump
from skksivi.pilot._points import PilotPoints, judge_weights, limit_of_divergence
from skksivi.score._score import DifferentiableScore, Score, ScoreFunction
from skksivi.score._tally import BudgetError

#: Draws of a round, at least, and points of a pilot at least, filled up by draws of the mixture.
N_DRAWS, LEAST_POINTS = 512, 2000

#: Degrees of freedom of the proposal beyond the number of features, and how much wider it is than the mixture, in
#: units of 1 / sqrt(d).
DF, WIDER = 2, 0.25


#: The error of a rule along a line, or of differences of neighbours, in nats, above which there are more nodes.
MAX_ERROR = 0.1


#: Fits a mixture to points (n, d).
Refit = Callable[[Tensor, torch.Generator], Components]


class BatchedDraws(NamedTuple):
    """Draws u (n, n_parts, d) of a target with their scores; parts are independent of each other."""

    u: Tensor
    s: Tensor

    @property
    def points(self) -> Tensor:
        """Return the draws (n n_parts, d), part by part."""
        return self.u.transpose(0, 1).flatten(0, 1)

    @property
    def scores(self) -> Tensor:
        """Return their scores (n n_parts, d)."""
        return self.s.transpose(0, 1).flatten(0, 1)


class TargetMoments(NamedTuple):
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


def fitted(x: Tensor, generator: torch.Generator) -> Components:
    """Return a mixture fitted to points (n, d) of chains."""
    return fitted_mixture([x], generator, shuffles=False)


class Heights(NamedTuple):
    """Values log_p (k,), up to a constant, at the means of the Gaussians of a mixture."""

    mixture: Components
    log_p: Tensor

    def nearest(self, u: Tensor) -> Tensor:
        """Return for each of points u (n, d) the Gaussian that has most density there."""
        return self.mixture.draws().log_parts(u).argmax(0)


class Plan(NamedTuple):
    """The settings of a refinement.

    Attributes
    ----------
    fit : callable
        Fits the mixture to points.
    least_share : float, default=0.5
        Smallest share of the draws that count.
    least_rounds, most_rounds : int, default=1 and 12
    forgets : bool, default=False
        Whether to discard the previous points, because they are in the wrong places or in wrong numbers near each
        mode.
    moves : bool, default=True
        Whether the mixture is finally moved to match scores and moments.
    keeps : bool, default=True
        Whether a mixture near the target is used for another round.
    along : Tensor of shape (r, d), default=None
        Linear functions of u along which some draws go further, where chains have not been.
    n_draws : int, default=512
        Of a round, at least.
    heights : Heights, default=None
        Where log p is known, for integrals of a score to start there; by default they start at the mixture's mean.
    far : float, default=0.1
        The divergence of the mixture for each feature, in nats, beyond which draws are only points to fit the next
        one to: their scores are zero where log p was evaluated instead.
    """

    fit: Refit
    least_share: float = 0.5
    least_rounds: int = 1
    most_rounds: int = 12
    forgets: bool = False
    moves: bool = True
    keeps: bool = True
    along: Tensor | None = None
    n_draws: int = N_DRAWS
    heights: Heights | None = None
    far: float = THRESHOLDS.late_divergence[0]

    def is_far(self, divergence: float, n_features: int) -> bool:
        """Tell whether the divergence of a mixture is too large for its draws to count."""
        return divergence > self.far * n_features

    def stretched(self, mixture: Components) -> Components:
        """Return a mixture, with stretched components if directions are given."""
        if self.along is None:
            return mixture
        return mixture.stretched(self.along, by=3.0, share=0.25)


PLAIN = Plan(fitted)


def from_afar(n_features: int) -> Plan | None:
    """Return the plan of mixtures that move from afar to a target of few features, None if these are too many.

    Ten draws for each feature are to count in every round.
    """
    plan = Plan(fitted, least_share=10 * n_features / N_DRAWS, most_rounds=8, forgets=True)
    return plan if plan.least_share < PLAIN.least_share else None


def refined_pilot(
    score_u: DifferentiableScore,
    pilot: PilotPoints,
    drawn: list[BatchedDraws],
    generator: torch.Generator,
    plan: Plan = PLAIN,
) -> PilotPoints:
    """Return a pilot with more points, by importance from a mixture that is fitted to them again and again, and to
    the scores of all draws in the end.

    The pilot has converged as soon as the means and scales of all that was `drawn`, to which more is added, are
    accurate and the mixture is near the target. It ends if too few of the draws count.

    References
    ----------
    Cappé, O. et al. (2008). Adaptive importance sampling in general mixture classes. Statistics and Computing 18(4).
    """
    mixture, reason, n_far = pilot.mixture, "", 0
    for i in range(plan.most_rounds):
        mixture = mixture or plan.fit(pilot.x, generator)
        score_u.tally.begin("importance sampling", 2 * plan.n_draws)
        try:
            found = resampled(score_u, mixture, generator, plan)
        except BudgetError:
            break
        if found is None:
            reason = f"an effective sample size below {plan.least_share:.0%} of the draws"
            break
        draws, divergence = found
        near = limit_of_divergence(divergence, pilot.x.shape[1], i + 1)
        if plan.is_far(near.value, pilot.x.shape[1]):
            x, mixture, reason, n_far = torch.cat([pilot.x, draws.points]), None, str(near), n_far + 1
            pilot = pilot._replace(x=x, n_of_mode=[len(x)], mixture=None, found_by="importance sampling")
            continue
        drawn.append(draws)
        by = target_moments(BatchedDraws(*(torch.cat(parts) for parts in zip(*drawn, strict=True))))
        points = [each.points for each in drawn] if plan.forgets else [pilot.x, draws.points]
        pilot = pilot_with(torch.cat(points), by)
        verdict = judge_weights(divergence, by.se, pilot.x.shape[1], i + 1)
        reason = verdict.reason
        if verdict.good and i + 1 - n_far >= plan.least_rounds:
            score_u.tally.has_suspect |= score_u.log_prob is not None and _contradicts_scores(drawn)
            if plan.moves:
                u, s = (torch.cat(parts) for parts in zip(*((a.points, a.scores) for a in drawn), strict=True))
                mixture = shifted_mixture(score_matched(mixture, u, s, generator), by)
            more = _points_of(mixture, max(0, LEAST_POINTS - len(pilot.x)))
            return pilot_with(torch.cat([pilot.x, more]), by)._replace(verdict=verdict, mixture=mixture)
        mixture = mixture if plan.keeps and near.holds else None
    return pilot._replace(verdict=Verdict(Grade.ROUGH, reason))


def _contradicts_scores(drawn: list[BatchedDraws]) -> bool:
    """Tell whether the scores of draws from a target, whose mean is zero, are off by many standard errors."""
    means = torch.cat([draws.s for draws in drawn]).mean(0)
    return bool((means.mean(0).abs() > 4 * means.std(0) / math.sqrt(len(means))).any())


def shifted_mixture(mixture: Components, by: TargetMoments) -> Components:
    """Return a mixture moved to a mean and a covariance, or as much of that as is known."""
    return mixture.with_scales(by.mean, by.sd) if by.root is None else mixture.with_moments(by.mean, by.root)


def without_wrong_density(score_fn: Score, mode: Affine) -> Score:
    """Return a score without its density, with a warning, if its differences near a mode are not the integrals."""
    n = 3 if score_fn.tally.is_frugal else 8
    u = standard_normal(n, mode.m, torch.Generator(mode.m.device).manual_seed(0))
    jumps = partial(look_for_jump, score_fn)
    return checked_density(score_fn, mode.m[None], mode.unwhiten(u), jumps)


def _points_of(mixture: Components, n: int) -> Tensor:
    """Return n points of a mixture, the same ones each time."""
    return mixture.draws()(n, mixture.means, torch.Generator(mixture.means.device).manual_seed(0))


def standard_pilot(like: Tensor, n: int = 0) -> PilotPoints:
    """Return n points of the normal distribution of the features of `like` (d,), which is their mixture."""
    m, eye = Affine.shift(torch.zeros_like(like))
    return pilot_of_mixture(Components(like.new_ones(1), m[None], eye[None]), n)


def pilot_of_mixture(mixture: Components, n: int = 0) -> PilotPoints:
    """Return n points of a mixture, whose means are not known."""
    sd, k = mixture.covariances.diagonal(dim1=1, dim2=2).sqrt().amax(0), len(mixture.weights)
    verdict = Verdict(Grade.ROUGH, "a Gaussian" if k == 1 else f"{k} Gaussians")
    return PilotPoints(_points_of(mixture, n), [n], sd, verdict, mixture=mixture)


def pilot_with(points: Tensor, by: TargetMoments, found_by: str = "importance sampling") -> PilotPoints:
    """Return points (n, d) mapped to a mean and a covariance, or its scales."""
    away = points - points.mean(0)
    if by.root is None:
        points = by.mean + away * (by.sd / points.std(0, correction=0))
    else:
        L = torch.linalg.cholesky(away.mT @ away / len(away))
        points = by.mean + torch.linalg.solve_triangular(L, away.mT, upper=False).mT @ by.root.mT
    return PilotPoints(points, [len(points)], by.mean_se * points.std(0), found_by=found_by)


def resampled(
    score_u: DifferentiableScore, mixture: Components, generator: torch.Generator, plan: Plan = PLAIN
) -> tuple[BatchedDraws, tuple[float, float]] | None:
    r"""Return draws of the target by importance from a mixture q, and how far that is from the target, with an error.

    .. math:: J = \mathrm{KL}(q \| p) + \mathrm{KL}(p \| q) = E_p\!\left[\log \tfrac{p}{q}\right] -
        E_q\!\left[\log \tfrac{p}{q}\right].

    None if too few of the weighted draws count, the tail of their weights is heavy, or the target is not finite where
    the mixture has mass. Draws where it is not finite count as outside.
    """
    d, parts = mixture.means.shape[1], 32  # from whose spread come standard errors
    n = parts * math.ceil(max(plan.n_draws, 10 * d) / parts)
    q, wide = mixture.draws(), HeavyTailed.wider(plan.stretched(mixture).draws())
    u = wide.sample(n, generator)
    own = q.log_density(u) - wide.log_density(u)
    if score_u.log_prob is None:
        s, ratios = along_lines(score_u, q, plan.heights or _of_centre(mixture), u, own)
    else:
        s, ratios = None, score_u.log_prob(u).detach() - q.log_density(u)
    inside = ratios.isfinite()
    if not own.softmax(0)[~inside].sum() <= 1e-4:  # of the mass of the mixture; NaN where its density is
        return None
    u, s = u[inside], None if s is None else s[inside]
    ell, own = as_array(ratios[inside]), as_array(own[inside])
    log_weights, k = pareto_smoothed(ell + own)
    w, v = (as_array(torch.as_tensor(a).softmax(0)) for a in (log_weights, own))
    share = 1 / np.square(w).sum() / n
    if share < plan.least_share or (k > 0.7 and share < 0.8):
        return None
    under_p, under_q = w @ ell, v @ ell
    with np.errstate(over="ignore"):  # of ratios far out, where neither has mass
        J, se = under_p - under_q, (n * w * (ell - under_p) - n * v * (ell - under_q)).std() / math.sqrt(n)
    rows = systematic_rows(w, n).reshape(parts, -1).T  # equal ones in one part
    kept, i = torch.unique(as_tensor(rows, device=u.device), return_inverse=True)
    score_of = torch.zeros_like if plan.is_far(float(J), d) else score_u
    s = score_of(u[kept]).detach() if s is None else s[kept]
    if not s.isfinite().all():
        return None
    return BatchedDraws(u[kept][i], s[i]), (float(J), float(se))


def nearest_points(log_prob: ScoreFunction, found: Sequence[PilotPoints], generator: torch.Generator) -> int:
    """Return which of several sets of points has the mixture q with the largest E_p log q, by draws of all of them.

    Those of a set alone would not show what it lacks.
    """
    mixtures = [points.mixture or fitted(points.x, generator) for points in found]
    wide = HeavyTailed.wider(Components.together(mixtures, [1 / len(mixtures)] * len(mixtures)).draws())
    x = wide.sample(1024, generator)
    w = (log_prob(x).detach() - wide.log_density(x)).nan_to_num(-math.inf, -math.inf, -math.inf).softmax(0)
    inside = w > 0
    values = [w[inside] @ each.draws().log_density(x[inside]) for each in mixtures]
    return int(torch.stack(values).nan_to_num(-math.inf).argmax())


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


def _of_centre(mixture: Components) -> Heights:
    """Return the mean of a mixture as where log p is zero."""
    m = mixture.weights @ mixture.means
    return Heights(Components(m.new_ones(1), m[None], mixture.covariances[:1]), m.new_zeros(1))


def along_lines(
    score_u: DifferentiableScore, q: GaussianMixtureDraws, known: Heights, u: Tensor, own: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Return the score at u (n, d), and :math:`\log p(u) / q(u)` up to a constant, by the score alone.

    It is the integral of :math:`s_p - s_q` from the nearest point where log p is known, smooth where they are alike:
    from one of u to the next, if that agrees along some lines with Lobatto's rule, or by that and, where it is wrong
    for :math:`s_q`, whose integral is known, by Kronrod's. The weights of u are by the ratio and others, own (n,).
    """
    origins, nearest, k = known.mixture.means, known.nearest(u), len(known.log_p)
    x = torch.cat([origins, u])
    s, s_q, log_q = score_u(x).detach(), q.score(x), q.log_density(x)
    f, at_origins = s - s_q, known.log_p - log_q[:k]

    def by_rules(rows: slice) -> Tensor:
        a, end, start = nearest[rows], u[rows], origins[nearest[rows]]
        inner = torch.cat(lobatto_nodes(start, end))
        inner_q = q.score(inner)
        (p_1, p_2), (q_1, q_2) = (score_u(inner).detach() - inner_q).chunk(2), inner_q.chunk(2)
        ratio = lobatto(f[:k][a], p_1, p_2, f[k:][rows], end - start)
        of_q = lobatto(s_q[:k][a], q_1, q_2, s_q[k:][rows], end - start)
        is_wrong = (of_q - log_q[k:][rows] + log_q[a]).abs() > MAX_ERROR
        if is_wrong.any():
            ratio[is_wrong] = kronrod(lambda x: score_u(x) - q.score(x), start[is_wrong], end[is_wrong])[0]
        return ratio + at_origins[a]

    some, ratio, finite = by_rules(slice(32)), torch.full_like(own, torch.nan), f.isfinite().all(1)
    finite[:k] = True
    if len(x) < 1500:  # else the equations take longer than scores
        C = (q.weights[:, None, None] * q.factors @ q.factors.mT).sum(0)
        within = Affine(origins[0], torch.linalg.cholesky(C))
        near = by_neighbours(within.whiten(x[finite]), f[finite].nan_to_num(0, 0, 0) @ within.L, at_origins)
        ratio[finite[k:]] = near[k:]
    w = (some + own[:32]).nan_to_num(-torch.inf, -torch.inf).softmax(0)
    w, error = w[w > 0], (ratio[:32] - some)[w > 0]
    is_near = len(w) > 0 and bool(w @ (error - w @ error).square() < MAX_ERROR**2)
    return s[k:], ratio if is_near else torch.cat([some, by_rules(slice(32, None))])


def target_moments(draws: BatchedDraws) -> TargetMoments:
    """Return mean and covariance of a target by draws and control variates; of many features the scales.

    Standard errors come from the spread of parts.
    """
    n, n_parts, d = draws.u.shape
    points, scores = draws.points, draws.scores
    centre, scale = points.mean(0), points.std(0, correction=0)
    z, s_z = (points - centre) / scale, scores * scale
    has_pairs = z.numel() * d <= 2**25 and len(z) > d
    i, j = torch.tril_indices(d, d) if has_pairs else torch.arange(d).expand(2, d)
    own, products = second_order(z, s_z, i, j), z[:, i] * z[:, j]
    products = products - own * ((products * own).mean(0) / own.square().mean(0))
    y = controlled(torch.cat([z, products], 1), stein_features(z, s_z))
    if not y.isfinite().all():  # squares of the scores are not
        return plain_moments(draws.u)
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
    return TargetMoments(centre + scale * mean, scale * sd, root, se[:d], se[d:][i == j] / 2)


def plain_moments(u: Tensor) -> TargetMoments:
    """Return mean and covariance of draws u (n, n_parts, d) as they are, with standard errors from parts."""
    mean, sd, root_parts = u.mean((0, 1)), u.std((0, 1), correction=0), math.sqrt(u.shape[1])
    mean_se, sd_se = (of_parts.std(0) / sd / root_parts for of_parts in (u.mean(0), u.std(0)))
    return TargetMoments(mean, sd, covariance_root(u.flatten(0, 1)), mean_se, sd_se)


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
