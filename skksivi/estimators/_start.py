"""Where a training starts: at points of a pilot, in coordinates of the target, or at the last fit."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

import joblib
import numpy as np
import torch
from torch import Tensor, nn

from skksivi._utils.arrays import as_array, resolve_device
from skksivi._utils.log import LOGGER
from skksivi.base import BaseApproximator, learn
from skksivi.coordinates._affine import Affine
from skksivi.coordinates._whitening import MATCHED, Whitening, starting_points
from skksivi.estimators._judge import Judged
from skksivi.families._samplers import Sampler
from skksivi.mixing import MixingLike, check_mixing
from skksivi.parameters import Init, Whiten, chains_of
from skksivi.pilot._mixture import N_ITER, batch_and_match, worst_divergence
from skksivi.pilot._modes import all_modes, find_modes
from skksivi.pilot._points import MAX_FEATURES, PilotPoints
from skksivi.score._score import Score
from skksivi.score._tally import DIVERGED, BudgetError, Tally
from skksivi.start import find_whitening
from skksivi.stein._estimators import Memory
from skksivi.training._guard import MomentPenalty
from skksivi.training._run import Fit, Run

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
    noise, a checksum of the score's values there, the verdict of its mixture, the draws that it keeps, and the
    training before it.
    """

    whitening: Whitening
    family: F
    penalty: MomentPenalty | None
    seed: int
    answers: str
    judged: Judged | None = None
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
) -> tuple[Whitening, PilotPoints | None]:
    """Return coordinates, and the points of a pilot; without a pilot they are first moved to the target if `moves`.

    A network learns best in units of the target. With several modes a Gaussian would lose some.
    """
    limit, share = score.tally.limit or math.inf, 0.28 if score.log_prob is not None else 0.4
    with score.tally.reserving(int(min(N_RESERVED, share * limit))):
        whitening, pilot = find_whitening(whiten, score, generator, init=init, warps=warps)
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
