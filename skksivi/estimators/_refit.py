"""A mixture that is fitted again to the weighted draws by which the judge has found a fit to be off."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import cast

import torch
from torch import Tensor, nn

from skksivi._utils.arrays import as_array, as_tensor
from skksivi._utils.monte_carlo import systematic_rows
from skksivi.coordinates._affine import Affine
from skksivi.coordinates._whitening import Attempt, Whitening
from skksivi.estimators._judge import Judged, is_better
from skksivi.estimators._trained import F
from skksivi.families._derived import Pooled, sampler_density
from skksivi.families._layer import SemiImplicit
from skksivi.families._samplers import Gaussian
from skksivi.families._weights import ImportanceSample, weighted_draws
from skksivi.judge import THRESHOLDS, Grade, Verdict
from skksivi.mixing import GaussianMixtureDraws
from skksivi.pilot._importance import LEAST_POINTS, Plan, fitted, refined_pilot
from skksivi.pilot._mixture import Components, fitted_mixture, gaussian_of
from skksivi.pilot._points import PilotPoints
from skksivi.score._score import Score
from skksivi.training._run import Fit


def refitted(
    whitening: Whitening, score: Score, sample: ImportanceSample, generator: torch.Generator, fit: Components | None
) -> tuple[Whitening, PilotPoints] | None:
    """Return coordinates and points by importance from a mixture that is fitted to the weighted draws of a fit; None
    where these are too few.
    """
    d, score = sample.X.shape[1], score.double
    before, began = score.tally.total, time.monotonic()
    stage = "refit to weighted draws"
    score.tally.begin(stage)
    found = weighted_mixture(whitening, score, sample, generator, fit)
    if found is None:
        return None
    sample, mixture = found
    x, error = resampled_points(sample).to(score.device), (sample.share * len(sample.weights)) ** -0.5
    map_ = gaussian_of(x)
    start = PilotPoints(map_.whiten(x), [len(x)], error * torch.ones(d).to(x), mixture=mixture.whitened(map_))
    points = start._replace(verdict=Verdict(Grade.RELIABLE_WEIGHTS, f"errors {error:.2g}"))
    if not knows_moments(sample):
        plan = Plan(fitted, least_share=0.15, most_rounds=8, forgets=True)
        points = refined_pilot(map_.pull_back(score), start, [], generator, plan)
        points = points if points.converged else start._replace(verdict=points.verdict)
    points = points.unwhitened(map_)
    n_calls = score.tally.total - before
    attempt = Attempt(stage, n_calls, time.monotonic() - began, str(points.verdict))
    mean, mean_se, sd = map(as_array, (points.x.mean(0), points.mean_se, points.x.std(0)))
    new = replace(whitening, map=points.map(), warp=None, mean=mean, mean_se=mean_se, sd=sd, verdict=points.verdict)
    calls, attempts = whitening.n_score_calls + n_calls, [*whitening.attempts, attempt]
    return replace(new, found_by="importance sampling", n_score_calls=calls, attempts=attempts), points


def weighted_mixture(
    whitening: Whitening, score: Score, sample: ImportanceSample, generator: torch.Generator, fit: Components | None
) -> tuple[ImportanceSample, Components] | None:
    """Return the weighted draws of a mixture that is fitted to those of a fit, and the mixture; None where these are
    too few.

    What a fit lacks becomes a Gaussian of its own, for draws around it to find more of that, until the weights are
    even enough for the adaptive mixtures of a pilot.
    """
    if knows_moments(sample):
        return sample, refitted_evenly(fit, sample, generator)
    mixture = fitted_mixture([torch.as_tensor(sample.draws[:LEAST_POINTS]).to(score.device)], generator)
    mixture, best = with_lost_mass(mixture, sample), None
    for i in range(5):
        if sample.share * len(sample.weights) < sample.X.shape[1] + 2:
            break
        mixture = mixture.fitted_to(resampled_points(sample).to(score.device)) if i else mixture
        gaussians = tuple(map(Gaussian, map(Affine, mixture.means, mixture.factors())))
        found = next(weighted_draws(Pooled(gaussians, mixture.weights), score, i, (4,), whitening), None)
        if found is None or (best is not None and found.share < best[0].share):
            break
        sample, best = found, (found, mixture)
        if is_even(sample):
            break
    return best


def is_even(sample: ImportanceSample) -> bool:
    """Tell whether the weights of draws are about as even as where a fit is right, which has a share of .5 to .7."""
    return sample.trusted and sample.share > 0.35


def knows_moments(sample: ImportanceSample) -> bool:
    """Tell whether a mixture may be fitted to draws: their weights are even, and count as a thousand or more."""
    return is_even(sample) and sample.share * len(sample.weights) > 1000


def refitted_evenly(fit: Components | None, sample: ImportanceSample, generator: torch.Generator) -> Components:
    """Return the mixture of a fit moved to weighted draws, or split, or a new one: whichever is best at draws it has
    not seen.
    """
    rows = as_array(torch.randperm(len(sample.weights), generator=generator, device=generator.device))
    shuffled = replace(sample, X=sample.X[rows], weights=sample.weights[rows])
    x = resampled_points(shuffled, round(sample.share * len(rows))).to(generator.device)
    ways: list[Callable[[Tensor], Components]] = [partial(fitted, generator=generator)]
    if fit is not None:
        ways += [fit.fitted_to, lambda x: fit.split_alike(x).fitted_to(x)]
    pairs = list(permutations(x.chunk(2)))
    return max(ways, key=lambda way: sum(float(way(a).draws().log_density(b).mean()) for a, b in pairs))(x)


def with_lost_mass(mixture: Components, sample: ImportanceSample) -> Components:
    """Return a mixture fitted to weighted draws, with a Gaussian for the mass that the fit hardly has, if any."""
    if sample.lost == 0:
        return mixture
    part = lost_part(torch.as_tensor(sample.X).to(mixture.means), sample)
    return Components.together([mixture, part], [1 - sample.lost, sample.lost])


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


def resampled_points(sample: ImportanceSample, n: int = LEAST_POINTS) -> Tensor:
    """Return points (n, d) that are picked by their weights, evenly."""
    return torch.as_tensor(sample.X[systematic_rows(sample.weights, n)])


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


def improves(fit: Fit, by: Judged, before: Fit, by_before: Judged, device: torch.device, *, has_part: bool) -> bool:
    r"""Tell whether a fit, given its verdict, is better than the one before it, to which a part was added or which
    was fitted again. Then its :math:`E_p[\log q]` must be larger, too: one that has lost a narrow part has no draws
    there.
    """
    is_right = is_better(by.verdict, by_before.verdict)
    if has_part or by_before.sample is None or not is_right:
        return is_right
    w, x = (as_tensor(a, device=device) for a in (by_before.sample.weights, by_before.sample.X))
    new, old = (sampler_density(each.sampler).log_density(x).value[w > 0] for each in (fit, before))
    return bool(w[w > 0] @ (new - old).clamp(-1e6, 1e6) > 0)
