"""Where a training starts: at points of a pilot, in coordinates of the target, at the last fit, or at a mixture that
is fitted again to the weighted draws by which the judge has found a fit to be off.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from operator import itemgetter
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

import joblib
import numpy as np
import torch
from torch import Tensor, nn

from skksivi._utils.arrays import as_array, as_tensor, resolve_device
from skksivi._utils.monte_carlo import systematic_rows
from skksivi.base import BaseApproximator, learn
from skksivi.coordinates._affine import Affine
from skksivi.coordinates._whitening import MATCHED, Attempt, Whitening, starting_points
from skksivi.estimators._judge import Judged, is_better
from skksivi.families._density import LogDensity
from skksivi.families._derived import sampler_density
from skksivi.families._layer import SemiImplicit
from skksivi.families._samplers import Gaussian, Sampler
from skksivi.families._weights import weighted_draws
from skksivi.judge import THRESHOLDS, Grade, Verdict, WeightedDraws
from skksivi.mixing import GaussianMixtureDraws, MixingLike, check_mixing
from skksivi.parameters import Init, Whiten, chains_of
from skksivi.pilot._importance import LEAST_POINTS, Plan, fitted, refined_pilot
from skksivi.pilot._mixture import N_ITER, Components, batch_and_match, fitted_mixture, gaussian_of, worst_divergence
from skksivi.pilot._modes import all_modes, find_modes
from skksivi.pilot._pilot import MAX_FEATURES, find_whitening
from skksivi.pilot._points import PilotPoints
from skksivi.score._score import Score
from skksivi.score._tally import DIVERGED, BudgetError, Tally
from skksivi.stein._estimators import Memory
from skksivi.training._guard import MomentPenalty
from skksivi.training._run import Fit, Run

LOGGER = logging.getLogger("skksivi")

#: The most calls of a fit that is frugal.
FRUGAL_CALLS = 1000

#: Score evaluations reserved from the budget for the last steps: the scale of the family and a certificate.
N_RESERVED = 400

#: Points at which the score of a start is compared, and the most modes.
N_COMPARED, N_NEAR = 15, 4

F = TypeVar("F", bound=nn.Module)


class Past(NamedTuple):
    """The training that a warm start continues.

    Attributes
    ----------
    losses : ndarray of shape (n_iter,)
    looks : ndarray of shape (n_looks, 2)
    made_by : str or None
        What made its draws; None if there was no training.
    same_target : bool
        Whether its score had the same values.
    """

    losses: np.ndarray = np.empty(0)
    looks: np.ndarray = np.empty((0, 2))
    made_by: str | None = None
    same_target: bool = False

    def report(self) -> dict[str, object]:
        """Return the learned attributes of a fit without further training."""
        n = len(self.losses)
        return {
            "bandwidth_": None,
            "loss_curve_": self.losses,
            "ksd_curve_": self.looks,
            "engine_": "eager",
            "n_iter_": n,
            "best_iter_": n,
            "weighted_draws_": None,
            "certificate_": None,
            "verdict_": None,
        }


class Start(NamedTuple, Generic[F]):
    """The start of a training: coordinates, a family in them, the penalty that ties it to a pilot, the seed of its
    noise, a checksum of the score's values there, the draws that it keeps, and the training before it.
    """

    whitening: Whitening
    family: F
    penalty: MomentPenalty | None
    seed: int
    answers: str
    memory: Memory | None = None
    past: Past = Past()

    @classmethod
    def from_fit(cls, est: Any, score: Score, seed: int) -> Start[F]:  # noqa: ANN401
        family = copy.deepcopy(est.family_).to(score.device, score.dtype).requires_grad_()
        family.mixing = copy.deepcopy(est.family_.mixing).to(score.device)  # a deep copy keeps its precision
        whitening = est.whitening_.to(score.device)
        answers = answers_at(score, whitening)
        past = Past(est.loss_curve_, est.ksd_curve_, est.fitted_by_, answers == est.score_checksum_)
        return cls(whitening, family, None, seed, answers, past=past)

    @property
    def continues(self) -> bool:
        """Whether there was a training before."""
        return self.past.made_by is not None

    @property
    def made_by(self) -> str:
        return self.past.made_by or self.whitening.found_by

    def fit(self, sampler_of: Callable[[F], Sampler]) -> Fit:
        """Return the fit that draws from the start."""
        sampler = sampler_of(copy.deepcopy(self.family).requires_grad_(False))
        return Fit(sampler, {"score_checksum_": self.answers, **self.past.report(), "fitted_by_": self.made_by})


def answers_at(score: Score, whitening: Whitening) -> str:
    """Return a checksum of the score's values at a fit."""
    score = whitening.straighten(score)
    x = whitening.map.unwhiten(normal_points(score).to(whitening.map.m))
    modes = torch.from_numpy(np.array(whitening.modes[:N_NEAR])).to(x)
    return joblib.hash(known(score.double(torch.cat([x, modes.reshape(-1, x.shape[1])])), score))


def normal_points(score: Score) -> Tensor:
    """Return normal points (n, d), always the same."""
    size = N_COMPARED, score.n_features
    return torch.randn(*size, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(score.device)


def known(s: Tensor, score: Score) -> np.ndarray:
    """Return numbers s (n, ...), of ranks rounded to six digits of the largest, which do not depend on how many."""
    if score.rank is not None:
        size = s.abs().nan_to_num(0, 0, 0).reshape(len(s), -1).amax(1)
        unit = torch.exp2(size.log2().floor() - 20).view(-1, *[1] * (s.dim() - 1))  # a power of two, without rounding
        s = (s / unit).round() * unit
    return np.where(s.isnan().cpu(), np.nan, as_array(s))  # NaN of one sign


def as_fitted(est: BaseApproximator, sampler: Sampler, made_by: str, seed: int) -> BaseApproximator:
    """Return an unfitted estimator fitted: it draws by a sampler of its family that something else has made."""
    report = {"score_checksum_": "", "fitted_by_": made_by, **Past().report()}
    learn(est, Fit(sampler, report), Run(seed, resolve_device(est.device), Tally()))
    return est


def find_coordinates(
    whiten: Whiten,
    init: Init,
    score: Score,
    generator: torch.Generator,
    *,
    warps: bool,
    moves: bool,
    accepts: Callable[[Whitening, PilotPoints], bool] | None = None,
) -> tuple[Whitening, PilotPoints | None]:
    """Return coordinates, and the points of a pilot; without a pilot they are first moved to the target if `moves`.

    A network learns best in units of the target. With several modes a Gaussian would lose some.
    """
    limit, share = score.tally.limit or math.inf, 0.28 if score.log_prob is not None else 0.4
    with score.tally.reserving(int(min(N_RESERVED, share * limit))):
        whitening, pilot = find_whitening(whiten, score, generator, init=init, warps=warps, accepts=accepts)
        if pilot is not None or not (isinstance(whitening.map, Affine) and moves):
            return whitening, pilot
        before = score.tally.total
        try:
            map_ = _brought_to_target(whitening.map, score.double, generator)
        except (*DIVERGED, BudgetError):
            return whitening, pilot
        n_calls = whitening.n_score_calls + score.tally.total - before
        found_by = whitening.found_by if map_ is whitening.map else MATCHED
        return replace(whitening, map=map_, n_score_calls=n_calls, found_by=found_by), pilot


def turn_frugal(whiten: Whiten, init: Init, score: Score) -> None:
    """Make do with few calls of a score if effort="auto" leaves that open and a call for one point takes long."""
    chains, tally, slow = chains_of(whiten), score.tally, 0.05  # seconds
    is_open = chains is not None and (chains.rule, chains.effort) == ("auto", "auto")
    if not is_open or score.minibatch is not None or tally.seconds_per_call <= slow:
        return
    x, seconds = starting_points(init, score.n_features, score.device)[:1], math.inf
    for _ in range(2):  # the first may compile
        began = time.monotonic()
        score.double(x)
        seconds = min(seconds, time.monotonic() - began)
    if seconds > slow:
        tally.is_frugal = True
        if tally.limit is None:
            tally.limit = tally.total + FRUGAL_CALLS
        LOGGER.info("pilot: effort='frugal' in the place of 'auto', since a call of the score takes %.2g s", seconds)


def _brought_to_target(map_: Affine, score: Score, generator: torch.Generator) -> Affine:
    """Return the Gaussian that is fitted to a target of one mode, starting from a map; that map where it fails.

    If the scores at the mode are nearer to the map's, the fit starts from the map moved there.
    """
    modes = find_modes(score, map_.m[None], generator).maps
    if len(modes) > 1 or len(all_modes(score, map_.m, modes[0], generator).maps) > 1:
        return map_
    error, found = worst_divergence(score, map_), map_
    near = 0.25  # along the worst direction
    if error > near:
        at_mode = Affine(modes[0].m, map_.L)
        error, found = min((error, found), (worst_divergence(score, at_mode), at_mode), key=itemgetter(0))
    for _ in range(3):
        if error < near:
            break
        fitted = batch_and_match(score, found, generator, N_ITER)
        error_of_fitted = worst_divergence(score, fitted)
        if not error_of_fitted < error:
            break
        error, found = error_of_fitted, fitted
    return found if _is_close(found, map_) else map_


def _is_close(found: Affine, start: Affine) -> bool:
    """Tell whether one Gaussian is as near to another as a start should be to its target."""
    shift = start.whiten(found.m[None])
    scales = torch.linalg.svdvals(torch.linalg.solve_triangular(start.L, found.L, upper=False))
    most = 100.0
    # a shift of five standard deviations, and a hundredfold scale
    return bool(shift.square().mean() < 5.0**2 and scales.max() < most and scales.min() > 1 / most)


def check_points(mixing: MixingLike, whiten: Whiten, latent_dim: int, n_features: int, needed: str = "") -> None:
    """Raise unless z can be drawn; a pilot, if there is one, provides points, and nothing else is `needed`."""
    check_mixing(mixing, latent_dim)
    chains = chains_of(whiten)
    has_pilot = chains is not None and (chains.rule == "diagonal" or n_features <= MAX_FEATURES)
    if isinstance(mixing, str) and mixing == "pilot" and (needed or not has_pilot):
        raise ValueError(
            f"`mixing` is 'pilot', which needs {needed}whiten='diagonal' or, up to {MAX_FEATURES} features, "
            "'auto'; change it, or set mixing='normal'."
        )


def weight_of_pilot(whiten: Whiten, pilot: PilotPoints) -> float:
    """Return the weight of the penalty that ties a fit to its pilot, zero for none."""
    chains = chains_of(whiten)
    return chains.weight if chains is not None and pilot.converged else 0.0


# Fitted again to the weighted draws by which the judge has found a fit to be off


@dataclass(frozen=True)
class Gaussians:
    r"""The mixture :math:`\sum_i w_i N(m_i, L_i L_i^\top)` as a sampler."""

    parts: tuple[Gaussian, ...]
    weights: Tensor

    in_parts: ClassVar[bool] = True

    @property
    def n_features(self) -> int:
        return self.parts[0].n_features

    def attributes(self) -> dict[str, object]:
        return {}

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n rows (n, d), in random order."""
        which = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        counts = which.bincount(minlength=len(self.parts)).tolist()
        x = torch.cat([part.sample(m, generator) for part, m in zip(self.parts, counts, strict=True)])
        return x[torch.randperm(n, generator=generator, device=x.device)]

    def log_density(self, x: Tensor) -> LogDensity:
        """Evaluate log q (n,) at points x (n, d)."""
        values = torch.stack([part.log_density(x).value for part in self.parts], 1)
        value = (values + self.weights.log()).logsumexp(1)
        return LogDensity(value, torch.zeros_like(value))


def refitted(
    whitening: Whitening, score: Score, sample: WeightedDraws, generator: torch.Generator, fit: Components | None
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
    x, error = resampled_points(sample).to(score.device), (sample.effective) ** -0.5
    map_ = gaussian_of(x)
    start = PilotPoints(map_.whiten(x), [len(x)], error * torch.ones(d).to(x), mixture=mixture.whitened(map_))
    points = start._replace(verdict=Verdict(Grade.GOOD, f"errors {error:.2g}", by="weights"))
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
    whitening: Whitening, score: Score, sample: WeightedDraws, generator: torch.Generator, fit: Components | None
) -> tuple[WeightedDraws, Components] | None:
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
        if sample.effective < sample.X.shape[1] + 2:
            break
        mixture = mixture.fitted_to(resampled_points(sample).to(score.device)) if i else mixture
        gaussians = tuple(map(Gaussian, map(Affine, mixture.means, mixture.factors())))
        found = next(weighted_draws(Gaussians(gaussians, mixture.weights), score, i, (4,), whitening), None)
        if found is None or (best is not None and found.share < best[0].share):
            break
        sample, best = found, (found, mixture)
        if is_even(sample):
            break
    return best


def is_even(sample: WeightedDraws) -> bool:
    """Tell whether the weights of draws are about as even as where a fit is right, which has a share of .5 to .7."""
    return sample.trusted and sample.share > 0.35


def knows_moments(sample: WeightedDraws) -> bool:
    """Tell whether a mixture may be fitted to draws: their weights are even, and count as a thousand or more."""
    return is_even(sample) and sample.effective > 1000


def refitted_evenly(fit: Components | None, sample: WeightedDraws, generator: torch.Generator) -> Components:
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


def with_lost_mass(mixture: Components, sample: WeightedDraws) -> Components:
    """Return a mixture fitted to weighted draws, with a Gaussian for the mass that the fit hardly has, if any."""
    if sample.lost == 0:
        return mixture
    part = lost_part(torch.as_tensor(sample.X).to(mixture.means), sample)
    return Components.together([mixture, part], [1 - sample.lost, sample.lost])


def lost_part(x: Tensor, sample: WeightedDraws) -> Components:
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


def resampled_points(sample: WeightedDraws, n: int = LEAST_POINTS) -> Tensor:
    """Return points (n, d) that are picked by their weights, evenly."""
    return torch.as_tensor(sample.X[systematic_rows(sample.weights, n)])


def lacks_mass(family: nn.Module, sample: WeightedDraws) -> bool:
    """Tell whether a mixture of Gaussians lacks mass that weighted draws show, be it too little for an error that is
    beyond its limit.
    """
    least = max(THRESHOLDS.near * THRESHOLDS.beyond, 1.6 * sample.lost_se)  # 2 of 32 samples of right fits have it
    return sample.lost > least and isinstance(getattr(family, "mixing", None), GaussianMixtureDraws)


@torch.no_grad()
def with_lost_part(family: F, whitening: Whitening, sample: WeightedDraws) -> F:
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
    if has_part or by_before.draws is None or not is_right:
        return is_right
    w, x = (as_tensor(a, device=device) for a in (by_before.draws.weights, by_before.draws.X))
    new, old = (sampler_density(each.sampler).log_density(x).value[w > 0] for each in (fit, before))
    return bool(w[w > 0] @ (new - old).clamp(-1e6, 1e6) > 0)
