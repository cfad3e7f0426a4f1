"""A mixture that is fitted again to the weighted draws by which the judge has found a fit to be off."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from skksivi._utils.monte_carlo import systematic_rows
from skksivi.coordinates._whitening import Attempt, Whitening
from skksivi.estimators._judge import Judged, is_better
from skksivi.estimators._trained import F
from skksivi.families._density import LogDensity
from skksivi.families._derived import sampler_density
from skksivi.families._layer import SemiImplicit
from skksivi.families._samplers import Sampler
from skksivi.families._weights import ImportanceSample, weighted_draws
from skksivi.judge import THRESHOLDS
from skksivi.mixing import GaussianMixtureDraws
from skksivi.pilot._importance import LEAST_POINTS, Plan, fitted, refined_pilot
from skksivi.pilot._mixture import Components, fitted_mixture, gaussian_of
from skksivi.pilot._points import PilotPoints
from skksivi.score._score import Score
from skksivi.training._run import Fit


@dataclass(frozen=True)
class MixtureSampler:
    """Draws x of a mixture of Gaussians, in float64."""

    mixture: GaussianMixtureDraws

    in_parts: ClassVar[bool] = True

    @property
    def n_features(self) -> int:
        return self.mixture.latent_dim

    def attributes(self) -> dict[str, object]:
        return {}

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        return self.mixture(n, self.mixture.means, generator)

    def log_density(self, x: Tensor) -> LogDensity:
        """Evaluate its log-density (n,) at points x (n, d)."""
        return LogDensity(self.mixture.log_density(x), x.new_zeros(len(x)))


def refitted(
    whitening: Whitening, score: Score, sample: ImportanceSample, generator: torch.Generator
) -> tuple[Whitening, PilotPoints] | None:
    """Return coordinates and points by importance from a mixture that is fitted to the weighted draws of a fit; None
    where these are too few.
    """
    d, score = sample.X.shape[1], score.double
    before, began = score.tally.total, time.monotonic()
    stage = "refit to weighted draws"
    score.tally.begin(stage)
    found = weighted_mixture(whitening, score, sample, generator)
    if found is None:
        return None
    sample, mixture = found
    x = resampled_points(sample)
    map_ = gaussian_of(x)
    start = PilotPoints(map_.whiten(x), [len(x)], torch.ones(d).to(x), mixture=mixture.whitened(map_))
    plan = Plan(fitted, least_share=0.15, most_rounds=8, forgets=True)
    points = refined_pilot(map_.pull_back(score), start, [], generator, plan)
    if not points.converged:
        mean_se = start.mean_se / (sample.share * len(sample.weights)) ** 0.5
        points = start._replace(verdict=points.verdict, mean_se=mean_se)
    points = points.unwhitened(map_)
    n_calls = score.tally.total - before
    attempt = Attempt(stage, n_calls, time.monotonic() - began, str(points.verdict))
    mean, mean_se, sd = (a.cpu().numpy() for a in (points.x.mean(0), points.mean_se, points.x.std(0)))
    coordinates = replace(
        whitening,
        map=points.map(),
        warp=None,
        mean=mean,
        mean_se=mean_se,
        sd=sd,
        verdict=points.verdict,
        found_by="importance sampling",
        n_score_calls=whitening.n_score_calls + n_calls,
        attempts=[*whitening.attempts, attempt],
    )
    return coordinates, points


def weighted_mixture(
    whitening: Whitening, score: Score, sample: ImportanceSample, generator: torch.Generator
) -> tuple[ImportanceSample, Components] | None:
    """Return the weighted draws of a mixture that is fitted to those of a fit, and the mixture; None where these are
    too few.

    What a fit lacks becomes a Gaussian of its own, for draws around it to find more of that, until the weights are
    even enough for the adaptive mixtures of a pilot.
    """
    mixture = fitted_mixture([torch.as_tensor(sample.draws[:LEAST_POINTS]).to(score.device)], generator)
    mixture, best = with_lost_mass(mixture, sample), None
    for i in range(5):
        if sample.share * len(sample.weights) < sample.X.shape[1] + 2:
            break
        mixture = em_step(mixture, sample) if i else mixture
        found = next(weighted_draws(MixtureSampler(mixture.draws()), score, i, (4,), whitening), None)
        if found is None or (best is not None and found.share < best[0].share):
            break
        sample, best = found, (found, mixture)
        if sample.trusted and sample.share > 0.35:  # of .5 to .7 where all is right
            break
    return best


def with_lost_mass(mixture: Components, sample: ImportanceSample) -> Components:
    """Return a mixture fitted to weighted draws, with a Gaussian for the mass that the fit hardly has, if any."""
    if sample.lost == 0:
        return mixture
    part = lost_part(torch.as_tensor(sample.X).to(mixture.means), sample)
    weights = torch.cat([(1 - sample.lost) * mixture.weights, sample.lost * part.weights])
    return Components(weights, *(torch.cat(both) for both in zip(mixture[1:], part[1:], strict=True)))


def lost_part(x: Tensor, sample: ImportanceSample) -> Components:
    """Return a Gaussian for the weighted draws, at x (n, d) in some coordinates, where the fit has less than a tenth
    of the density.
    """
    w, v, d = *(torch.as_tensor(a).to(x) for a in (sample.weights, sample.weights_of_fit)), x.shape[1]
    w = w.where(w > 10 * v, 0.0)
    w = w / w.sum()
    m = w @ x
    scatter = (w[:, None] * (x - m)).mT @ (x - m)
    n = 1 / float(w.square().sum())
    covariance = 1.5 * (n * scatter + d * scatter.diagonal().diag()) / (n + d)  # few, which fall short far out
    return Components(w.new_ones(1), m[None], covariance[None])


def em_step(mixture: Components, sample: ImportanceSample) -> Components:
    """Return a mixture after a step of EM with weighted draws, each Gaussian counting as many draws as features."""
    x, d = torch.as_tensor(sample.X).to(mixture.means), mixture.means.shape[1]
    w = mixture.draws().log_parts(x).softmax(0) * torch.as_tensor(sample.weights).to(x)  # (k, n)
    n = w.sum(1).square() / w.square().sum(1)
    means = w @ x / w.sum(1, keepdim=True)
    shrinkage = (d / (n + d))[:, None]
    means = (1 - shrinkage) * means + shrinkage * mixture.means
    away = x - means[:, None]
    scatter = (w[:, :, None] * away).mT @ away / w.sum(1)[:, None, None]
    covariances = (1 - shrinkage[..., None]) * scatter + shrinkage[..., None] * mixture.covariances
    return Components(0.999 * w.sum(1) + 0.001 / len(w), means, covariances)


def resampled_points(sample: ImportanceSample) -> Tensor:
    """Return points (n, d) that are picked by their weights, evenly."""
    return torch.as_tensor(sample.X[systematic_rows(sample.weights, LEAST_POINTS)])


def lacks_mass(family: nn.Module, sample: ImportanceSample) -> bool:
    """Tell whether a mixture of Gaussians lacks mass that weighted draws show, be it too little for an error that is
    beyond its limit.
    """
    least = max(THRESHOLDS.near * THRESHOLDS.beyond, 1.6 * sample.lost_se)  # 2 of 32 samples of right fits have it
    return sample.lost > least and isinstance(getattr(family, "mixing", None), GaussianMixtureDraws)


@torch.no_grad()
def with_lost_part(family: F, whitening: Whitening, sample: ImportanceSample) -> F:
    """Return a copy of a family that is a mixture of Gaussians, with one more for the mass that it hardly has."""
    new = cast("SemiImplicit", copy.deepcopy(family))
    old = cast("GaussianMixtureDraws", new.mixing)
    u = whitening.whiten(torch.as_tensor(sample.X).to(old.means.device))
    part = lost_part(u, sample).draws(old.means.dtype, noise=new.sigma(old.means[:1]).square()[0])
    share = old.weights.new_tensor([sample.lost])
    means, factors = torch.cat([old.means, part.means]), torch.cat([old.factors, part.factors])
    new.mixing = GaussianMixtureDraws(means, factors, torch.cat([(1 - share) * old.weights, share]))
    return cast("F", new)


def improves(fit: Fit, by: Judged, before: Fit, by_before: Judged) -> bool:
    """Tell whether a fit, given its verdict, is better than the one before it, which was fitted again."""
    if by_before.verdict.good:
        is_right, sample = by.verdict.good, by.sample  # other draws than a part was made of
    else:
        is_right, sample = is_better(by.verdict, by_before.verdict), by_before.sample
    return is_right and sample is not None and gains(fit.sampler, before.sampler, sample)


def gains(fit: Sampler, before: Sampler, sample: ImportanceSample) -> bool:
    r"""Tell whether :math:`E_p[\log q]` of a fit exceeds that of the one before it, whose weighted draws these are.

    A fit that has lost a narrow part of the target has no draws that show it.
    """
    x = torch.as_tensor(sample.X)
    new, old = (sampler_density(sampler).log_density(x).value for sampler in (fit, before))
    rows = torch.as_tensor(sample.weights) > 0
    return bool(torch.as_tensor(sample.weights)[rows] @ (new - old)[rows].clamp(-1e6, 1e6) > 0)
