"""Adaptive importance sampling: weighted draws say how far a mixture of Gaussians is off, and one is fitted to them.

All draws are kept, and weighted by the mixture of all that has drawn them. A mixture is judged by draws that it was
not fitted to, and exchanged only for one that is better at others.

References
----------
Cappé, O. et al. (2008). Adaptive importance sampling in general mixture classes. Statistics and Computing 18(4).

Cornuet, J.-M. et al. (2012). Adaptive multiple importance sampling. Scandinavian Journal of Statistics 39(4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from skksivi._utils.arrays import as_array
from skksivi._utils.monte_carlo import pareto_smoothed, systematic_rows
from skksivi.coordinates._affine import Affine
from skksivi.coordinates._whitening import Curved, Whitening
from skksivi.families._samplers import Gaussians
from skksivi.families._weights import Source, UnknownWeightsError
from skksivi.judge import LEAST_EFFECTIVE, Grade, Verdict, WeightedDraws
from skksivi.pilot._mixture import MAX_COMPONENTS, Components, fitted_mixture, score_matched
from skksivi.pilot._moments import moments_by_scores, shifted_mixture
from skksivi.pilot._newton import look_for_jump
from skksivi.score._score import Score
from skksivi.score._tally import DivergedError
from skksivi.start._errors import of_weights, suspects, unknown
from skksivi.stein._discrepancy import N_SCORES

#: The name of this source.
WEIGHTS = "importance sampling"

#: Draws of a mixture at first, and at most.
N_DRAWS, MOST_DRAWS = 512, 8192

#: Calls after which a mixture is exchanged no more: where only the score is known a draw may take ten.
MOST_CALLS = 50_000

#: The effective share of the draws from which on more of them, instead of chains, tell what is not known.
EVEN = 0.3

#: Rounds from one start; those in a row whose weights are hardly more even; and by how much they are if they are.
MOST_ROUNDS, MOST_VAIN, GAIN = 16, 3, 1.2

#: The mass that other draws show where a mixture hardly has any: from which on it may get a Gaussian for it, and the
#: most that it may lack.
LEAST_LOST, MOST_LOST = 0.002, 0.02

#: Points that a mixture is fitted to, picked by their weights: at least, and at most where as many count.
N_FITTED, MOST_FITTED = 2048, 8192

#: Points of a start.
N_POINTS = 2000

#: Makes a mixture of another one and rows (n,) of points, picked by their weights.
Step = Callable[[Components, Tensor], Components]


class Candidate(NamedTuple):
    """A mixture in some coordinates, with draws that it was not fitted to, and their verdict."""

    gaussians: Gaussians
    draws: WeightedDraws
    verdict: Verdict

    @property
    def is_even(self) -> bool:
        """Whether more draws tell what is not known."""
        return self.draws.trusted and self.draws.share > EVEN

    def worth(self, lost: float) -> tuple[bool, bool, float]:
        """Return how far its numbers may be off, or how even the weights are if that is not known, given the mass
        that it has lost by all draws.
        """
        trusted = self.draws.trusted and lost <= MOST_LOST
        return self.verdict.good, trusted, -self.verdict.within if trusted else self.draws.share


class Weights(NamedTuple):
    """Normalised weights (n,), tempered where few draws count, and how many count before that."""

    values: np.ndarray
    effective: float

    @classmethod
    def of(cls, log_ratios: np.ndarray, least: float) -> Weights:
        """Return smoothed weights to a power, one or so small that this effective number counts.

        Raises
        ------
        DivergedError
            No draw has any weight.
        """
        inside, values = np.isfinite(log_ratios), np.zeros(len(log_ratios))
        if not inside.any():
            raise DivergedError
        log_w = pareto_smoothed(log_ratios[inside])[0]

        def to_the(power: float) -> np.ndarray:
            w = np.exp(power * (log_w - log_w.max()))
            return w / w.sum()

        effective = float(1 / np.square(to_the(1.0)).sum())
        low, high = (1.0, 1.0) if effective >= least else (0.0, 1.0)
        for _ in range(20 if low < high else 0):
            power = (low + high) / 2
            low, high = (power, high) if 1 / np.square(to_the(power)).sum() >= least else (low, power)
        values[inside] = to_the(low)
        return cls(values, effective)


class Pool:
    """All draws x (n, d) of some sources, in their order, with log p (n,), their scores (n, d), NaN where these were
    not needed, and the log-densities (k, n) of what has drawn them.
    """

    def __init__(self, d: int, device: torch.device) -> None:
        self.sources, self.counts = list[Source](), list[int]()
        empty = torch.empty(0, d, dtype=torch.float64, device=device)
        self.x, self.s, self.log_p, self.log_q = empty, empty, empty.sum(1), empty.sum(1)[None][:0]

    def add(self, source: Source) -> None:
        """Keep the draws of a source that are new."""
        if source not in self.sources:
            self.sources.append(source)
            self.counts.append(0)
            self.log_q = torch.cat([self.log_q, self._density(source, self.x)[None]])
        k = self.sources.index(source)
        x, log_p = source.rows.x[self.counts[k] :], source.rows.log_p[self.counts[k] :]
        log_q = torch.stack([self._density(each, x) for each in self.sources])
        self.x, self.log_p = torch.cat([self.x, x]), torch.cat([self.log_p, log_p])
        self.s = torch.cat([self.s, torch.full_like(x, math.nan)])
        self.log_q, self.counts[k] = torch.cat([self.log_q, log_q], 1), len(source.rows.x)

    def log_mixture(self) -> Tensor:
        """Return the log-density (n,) of all that has drawn the draws."""
        shares = self.log_q.new_tensor(self.counts) / len(self.x)
        return (self.log_q + shares.log()[:, None]).logsumexp(0)

    def weights(self) -> Weights:
        """Return the weights (n,) of the draws, given the mixture of what has drawn them."""
        log_ratios = as_array(self.log_p - self.log_mixture())
        return Weights.of(np.where(np.isnan(log_ratios), -np.inf, log_ratios), 5 * self.x.shape[1] + 20)

    def scores_at(self, rows: Tensor, score: Score) -> Tensor:
        """Return the scores at rows; those that were taken before cost no call."""
        missing = torch.unique(rows[self.s[rows].isnan().all(1)])
        if len(missing):
            self.s[missing] = score(self.x[missing]).detach()
        return self.s[rows]

    @staticmethod
    def _density(source: Source, x: Tensor) -> Tensor:
        found = source.mixture.log_density(x).value
        return found.nan_to_num(-math.inf, math.inf, -math.inf)  # NaN far beyond a warp's points


class AdaptiveSampler:
    """Draws of mixtures near a target, of which each is fitted to those before.

    Parameters
    ----------
    score : Score
        In float64.
    modes : Whitening
        From whose modes a score is integrated.
    cells : Components
        The Gaussians at these.
    generator : torch.Generator

    Attributes
    ----------
    best : Candidate or None
    pool : Pool
        All draws.
    """

    def __init__(self, score: Score, modes: Whitening, cells: Components, generator: torch.Generator) -> None:
        self.score, self.modes, self.generator = score, modes, generator
        self.cells: Components | None = cells
        self.best: Candidate | None = None
        self.pool = Pool(score.n_features, score.device)

    def improve(self, mixture: Components, warp: Curved | None = None, n_rounds: int = MOST_ROUNDS) -> bool:
        """Draw from a mixture, fit a better one, and so on until its numbers are known; tell whether they are."""
        if warp is not None and self.score.log_prob is None:  # lines that are bent elsewhere have other errors
            self.pool = Pool(self.score.n_features, self.score.device)
        n_first = max(N_DRAWS, 10 * mixture.means.shape[1])
        n, source, kept, evenest, n_vain = n_first, self._source(mixture, warp), None, 0.0, 0
        began = self.score.tally.total
        for i in range(n_rounds):
            draws = self._drawn(source, n)
            if draws is None:
                return False
            lacking = self._lacking(Gaussians(mixture, warp))
            found = Candidate(Gaussians(mixture, warp), draws, self._judged(source, draws, lacking))
            verdict, is_even = found.verdict, found.is_even
            best = self.best
            if best is None or found.worth(lacking.sum()) > best.worth(self._lacking(best.gaussians).sum()):
                self.best = found
            if verdict.settled:
                self._look_for_contradiction(draws)
                return True
            n_vain = 0 if is_even or draws.share > GAIN * evenest else n_vain + (n == n_first)
            is_last = n >= (MOST_DRAWS if is_even else 4 * n_first) or n_vain == MOST_VAIN
            is_last |= self.score.tally.total - began > MOST_CALLS
            if is_last or i == n_rounds - 1:
                break
            if kept is not None and draws.share < 0.9 * evenest:  # it seemed better by chance
                (mixture, source, n), kept = kept, None
                continue
            evenest = max(evenest, draws.share)
            # what is off by less than a likelihood tells goes for whatever is not clearly worse
            must_go = is_even and not verdict.good and n > (n_first if verdict.grade == Grade.WRONG else 4 * n_first)
            noise = -2 if must_go else 2 if is_even and verdict.grade == Grade.ROUGH else 0
            other = self._better(mixture, warp, lacking, noise)
            if other is None and verdict.good:
                return True
            if other is None:
                n *= 2
            else:
                kept = (mixture, source, 2 * n) if is_even and verdict.grade > Grade.WRONG else None
                mixture, source, n = other, self._source(other, warp), max(n // 2, n_first)
        return verdict.good

    @property
    def has_lost(self) -> bool:
        """Whether the best mixture lacks mass that all draws show."""
        return self.best is not None and self._lacking(self.best.gaussians).sum() > LEAST_LOST

    def share(self, mixture: Components, warp: Curved | None = None) -> float:
        """Return the effective share of some draws of a mixture, which are kept, zero where they have no weights."""
        draws = self._drawn(self._source(mixture, warp), N_DRAWS)
        return 0.0 if draws is None else draws.share

    def _drawn(self, source: Source, n: int) -> WeightedDraws | None:
        """Return n draws of a source, which are kept, None where they have no weights."""
        self.score.tally.begin(WEIGHTS, n)
        try:
            draws = source.draw(n)
        except UnknownWeightsError:
            return None
        if draws is not None:
            self.pool.add(source)
        return draws

    def points(self, n: int = N_POINTS) -> Tensor:
        """Return points (n, d) that are picked from all draws by their weights."""
        rows = systematic_rows(self.pool.weights().values, n)
        return self.pool.x[torch.as_tensor(rows, device=self.pool.x.device)]

    def _source(self, mixture: Components, warp: Curved | None) -> Source:
        """Return what draws from a mixture and around it, by a seed of its own."""
        seed = int(torch.randint(2**31, (1,), generator=self.generator, device=self.generator.device))
        modes, where, cells = self.modes, None, self.cells if warp is None else None
        if warp is not None:
            modes = Whitening(mixture.map(), warp, modes=modes.modes, weights=modes.weights)
        if self.pool.sources and self.pool.sources[0].reference is not None:
            where = torch.as_tensor(self.pool.sources[0].reference).to(mixture.means)
        return Source(Gaussians(mixture, warp), self.score, seed, modes, reference=where, cells=cells)

    def _lacking(self, q: Gaussians) -> np.ndarray:
        """Return the weights (n,) of all draws where a mixture has less than a tenth of the target's density, zero
        elsewhere: its own draws do not show a narrow part that it has lost.
        """
        pool, w = self.pool, self.pool.weights()
        log_w = np.log(np.maximum(w.values, np.finfo(np.float64).tiny))
        of_fit = as_array(q.log_density(pool.x).value - pool.log_mixture()) - math.log(len(pool.x))
        return np.where((log_w > of_fit + math.log(10)) & (w.effective >= LEAST_EFFECTIVE), w.values, 0.0)

    def _judged(self, source: Source, draws: WeightedDraws, lacking: np.ndarray) -> Verdict:
        """Return the verdict of draws; of good ones also along the directions in which the mixture is suspect."""
        try:
            verdict = of_weights(draws, self.score)
        except Exception as error:
            return unknown(error, self.score)
        if verdict.good and (lost := float(lacking.sum())) > MOST_LOST:
            words = f"{lost:.0%} of the mass that other draws show is where it has less than a tenth of the density"
            return Verdict(Grade.WRONG, words, by="weights")
        if not verdict.good:
            return verdict
        x = source.sampler.sample(N_SCORES // 2, torch.Generator(self.score.device).manual_seed(source.seed))
        map_ = source.mixture.map if source.mixture.warp is None else self.modes.map
        if not isinstance(map_, Affine):
            return verdict
        V = suspects(self.score, map_, map_.whiten(x))
        return verdict if V is None else of_weights(draws, self.score, map_, V, verdict.errors)

    def _look_for_contradiction(self, draws: WeightedDraws) -> None:
        """Look for a jump where the mean score of the target is not zero although its weights are reliable."""
        tally, rows = self.score.tally, systematic_rows(draws.weights, 64)
        if self.score.log_prob is None or tally.is_frugal:
            return
        x = torch.as_tensor(draws.X[rows], device=self.score.device)
        s = self.score(x).detach()
        tally.has_suspect |= bool((s.mean(0).abs() > 5 * s.std(0) / math.sqrt(len(s))).any())
        if tally.has_suspect:
            look_for_jump(self.score, x[::2])

    def _better(
        self, mixture: Components, warp: Curved | None, lacking: np.ndarray, n_se: float
    ) -> Components | None:
        """Return a mixture that is better at half of the draws, by so many standard errors, fitted to all of them;
        None where the one there is stays.
        """
        w, x = self.pool.weights(), self.pool.x
        y, values = (x, w.values) if warp is None else _in_coordinates(warp, x, w.values)

        def scores_at(rows: Tensor) -> Tensor:
            s = self.pool.scores_at(rows, self.score)
            return s if warp is None else warp.pulled_back(y[rows], lambda _: s)

        points = WeightedPoints(y, values, scores_at, mixture.map(), self.generator)
        part = lost_part(y, lacking) if lacking.sum() > LEAST_LOST else None
        return points.better(mixture, points.steps(len(mixture.weights), w.effective, part), n_se)


class WeightedPoints(NamedTuple):
    """Points y (n, d) of a target with weights w (n,), in some coordinates, and the map by which these are whitened.

    `scores_at` returns the scores at rows of the points.
    """

    y: Tensor
    w: np.ndarray
    scores_at: Callable[[Tensor], Tensor]
    map: Affine
    generator: torch.Generator

    def better(self, q: Components, steps: Sequence[Sequence[Step]], n_se: float) -> Components | None:
        r"""Return the mixture that the best of some steps after another make of q, fitted to half of the points and
        compared at the others by :math:`E_p \log q`, and fitted to all; None where they do not gain so many standard
        errors, or lose more than that if it is negative.
        """
        first, second = self._permuted(torch.arange(len(self.y), device=self.y.device)).chunk(2)
        n = int(min(max(1 / np.square(self.w).sum(), N_FITTED), MOST_FITTED))
        few, held_out = self._picked(first, n // 2), second[self._w(second) > 0]
        v = self._w(held_out) / self._w(held_out).sum()

        def heights(q: Components) -> Tensor:
            return q.draws().log_density(self.y[held_out])

        best, taken, at_first = q, list[Step](), heights(q)
        now = at_first
        for each in steps:
            tried = [(step, r) for step in each if (r := _fitted(step, best, few)) is not None]
            gain, i = max(((float(v @ (heights(r) - now)), i) for i, (_, r) in enumerate(tried)), default=(0.0, 0))
            if tried and (gain > 0 or (n_se < 0 and not taken)):
                step, best = tried[i]
                taken, now = [*taken, step], heights(best)
        gains = now - at_first
        if not taken or not v @ gains > n_se * (v * (gains - v @ gains)).norm():
            return None
        all_rows = self._picked(torch.cat([first, second]), n)
        for step in taken:
            if (fitted := _fitted(step, q, all_rows)) is None:
                return best
            q = fitted
        return q

    def steps(self, n_components: int, effective: float, lacking: Components | None) -> list[list[Step]]:
        """Return what may be made of a mixture: first reweighed, moved by EM, split along the least normal
        coordinate, with a Gaussian for the mass that it lacks or new; then matched to the scores; and moved to the
        moments by these, which is all for few points.
        """
        y, d = self.y, self.y.shape[1]

        if n_components > 2 * MAX_COMPONENTS:  # more than so few points tell
            return []
        if effective < 5 * d:
            return [[self._moved]]
        steps: list[Step] = [
            lambda q, rows: q.reweighed(y[rows]),
            lambda q, rows: q.fitted_to(y[rows]),
            lambda q, rows: q.split_alike(y[rows]).fitted_to(y[rows]),
        ]
        if lacking is not None:
            steps.append(lambda q, _: Components.together([q, lacking], [1 - float(lacking.weights), 1.0]))
        if effective > 20 * d:
            steps.append(lambda _, rows: fitted_mixture([y[rows]], self.generator))
        return [steps, [self._matched], [self._moved]]

    def _matched(self, q: Components, rows: Tensor) -> Components:
        u, s = self._scored(rows)
        return score_matched(q.whitened(self.map), u, s, self.generator).unwhitened(self.map)

    def _moved(self, q: Components, rows: Tensor) -> Components:
        d = self.y.shape[1]
        u, s = (a[: len(a) // 32 * 32].view(-1, 32, d) for a in self._scored(rows))
        return shifted_mixture(q.whitened(self.map), moments_by_scores(u, s)).unwhitened(self.map)

    def _scored(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return points in whitened coordinates with their scores, where these are finite."""
        rows = rows[:N_FITTED]
        u, s = self.map.whiten(self.y[rows]), self.map.whiten_score(self.scores_at(rows))
        finite = s.isfinite().all(1)
        return u[finite], s[finite]

    def _picked(self, rows: Tensor, n: int) -> Tensor:
        """Return n of some rows by their weights, in random order."""
        p = as_array(self._w(rows))
        return self._permuted(rows[torch.as_tensor(systematic_rows(p / p.sum(), n), device=rows.device)])

    def _permuted(self, rows: Tensor) -> Tensor:
        return rows[torch.randperm(len(rows), generator=self.generator, device=rows.device)]

    def _w(self, rows: Tensor) -> Tensor:
        return torch.as_tensor(self.w, device=rows.device)[rows]


def _in_coordinates(warp: Curved, x: Tensor, w: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """Return points in the coordinates of a warp, and weights that are zero where these overflow."""
    y = warp.warp(x)[0]
    finite = y.isfinite().all(1)
    w = np.where(as_array(finite), w, 0.0)
    return y.where(finite[:, None], 0.0), w / w.sum()


def _fitted(step: Step, q: Components, rows: Tensor) -> Components | None:
    """Return a mixture without parts of negligible weight, None where it degenerates."""
    try:
        weights, means, covariances = step(q, rows)
        kept = weights > 1e-4
        sd = covariances[kept].diagonal(dim1=1, dim2=2).sqrt()
        correlations = covariances[kept] / (sd[:, :, None] * sd[:, None])
        if not (torch.linalg.eigvalsh(correlations) > 1e-14).all() or not means.isfinite().all():
            return None
        return Components(weights[kept] / weights[kept].sum(), means[kept], covariances[kept])
    except (torch.linalg.LinAlgError, ValueError):
        return None


def lost_part(x: Tensor, weights: np.ndarray) -> Components:
    """Return a Gaussian for the points x (n, d) with weights (n,), the sum of which is its own."""
    w, d = torch.as_tensor(weights).to(x), x.shape[1]
    share = w.sum()
    w = w / share
    m = w @ x
    scatter = (w[:, None] * (x - m)).mT @ (x - m)
    n = 1 / float(w.square().sum())
    covariance = 1.5 * (n * scatter + d * scatter.diagonal().diag()) / (n + d)  # few, which fall short far out
    return Components(share[None], m[None], covariance[None])
