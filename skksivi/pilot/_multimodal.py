"""Points near a target of several modes, from short chains around each, and the weights of the modes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.coordinates._affine import Affine
from skksivi.coordinates._lines import kronrod, log_ratio
from skksivi.pilot._importance import PartedDraws, Plan, Refit, Wider, fitted, pilot_of_mixture, refined_pilot
from skksivi.pilot._mixture import Components, fitted_mixture
from skksivi.pilot._mode_weights import Cells, bridge
from skksivi.pilot._modes import ModeMaps
from skksivi.pilot._points import PilotPoints
from skksivi.score._score import Score, ScoreFunction

#: Evaluates log p (n,) at points (n, d).
DensityFunction = Callable[[Tensor], Tensor]


class SeveralSettings(NamedTuple):
    """The settings of `pilot_of_several`."""

    #: Share of the points around a mode that may be near others, if it is weighted by itself.
    stray: float = 0.01
    #: Points of a mixture, and of chains, by which it is weighted, and the parts of them from which its error comes.
    n_weighed: int = 512
    n_parts: int = 8
    #: The error of Lobatto's rule along a line, in nats, above which it is split into panels.
    rough: float = 0.05
    #: The standard error of the logarithm of a weight at most.
    max_se: float = 0.1
    #: Rounds of importance sampling from all modes at once, at least.
    n_rounds: int = 5
    #: Points for each feature to which a mixture is fitted, at least.
    n_fitted: int = 10
    #: Points of a mode that are kept whatever its weight.
    n_least: int = 10


SEVERAL = SeveralSettings()


def pilot_of_several(
    score: Score, modes: ModeMaps, explore: Callable[[Weighing, Affine], PilotPoints], generator: torch.Generator
) -> PilotPoints | None:
    """Return points near all modes, as many of each as its weight says; None if one was not explored or weighted.

    Where chains around one mode reach others, they explore these too.

    Parameters
    ----------
    score : Score
    modes : ModeMaps
    explore : callable
        Returns points near the target around a mode, given a `Weighing`.
    generator : torch.Generator
    """
    log_prob = score.log_prob or by_lines(score, modes)
    weighing = Weighing(replace(score, log_prob=log_prob), modes, generator)
    pilot = weighing.at_once()
    if pilot.converged:
        return pilot
    groups = _groups(modes, partial(explore, weighing))
    if groups is None or len(groups) == 1:
        return None if groups is None else groups[0].pilot
    score.tally.begin("weights of modes", SEVERAL.n_weighed * len(groups))
    weighed = dict[int, tuple[float, float]]()
    for group in groups:
        if group.alike not in weighed:
            weighed[group.alike] = log_integral(log_prob, group.pilot, generator)
    values, errors = torch.tensor([weighed[group.alike] for group in groups]).to(modes.weights).unbind(1)
    if not values.isfinite().all() or not errors.max() <= SEVERAL.max_se:
        return None
    return put_together([group.pilot for group in groups], values.softmax(0), errors)


class Weighing(NamedTuple):
    """Importance sampling from mixtures that have components at all modes.

    Attributes
    ----------
    score : Score
        One with a log-density.
    modes : ModeMaps
    generator : torch.Generator
    """

    score: Score
    modes: ModeMaps
    generator: torch.Generator

    def at_once(self) -> PilotPoints:
        """Return points by importance sampling from the Gaussians at the modes."""
        mixture = self.modes.mixture()
        map_ = mixture.map()
        mixture = mixture.whitened(map_)
        weights, means, covariances = mixture
        maps = [Affine(m, torch.linalg.cholesky(C)) for m, C in zip(means, covariances, strict=True)]
        cells = Cells(maps, weights.log())
        refit = partial(fitted_by_cells, cells, mixture)
        pilot = self.refined(map_, pilot_of_mixture(mixture), [], refit, SEVERAL.n_rounds)
        return pilot._replace(mixture=reweighed(cells, pilot)).unwhitened(map_) if pilot.converged else pilot

    def refined(
        self, map_: Affine, pilot: PilotPoints, drawn: list[PartedDraws], refit: Refit = fitted, least_rounds: int = 1
    ) -> PilotPoints:
        """Return a pilot with more points, in the coordinates of a map."""
        score_u = map_.pull_back(self.score)
        plan = Plan(refit, least_rounds=least_rounds, forgets=True, moves=False)
        return refined_pilot(score_u, pilot, drawn, self.generator, plan)


def reweighed(cells: Cells, pilot: PilotPoints) -> Components:
    """Return the mixture of a pilot with weights that give each cell its share of the points, if these differ."""
    weights, means, covariances = _mixture(pilot)
    cell, shares = cells.assign(means), cells.counts(pilot.x).to(weights) / len(pilot.x)
    own = torch.zeros_like(shares).index_add(0, cell, weights)
    off = (own - shares).abs() > 3 * (shares * (1 - shares) / len(pilot.x)).sqrt()
    if not off.any() or (own[shares > 0] == 0).any():
        return Components(weights, means, covariances)
    weights = weights * (shares / own)[cell]
    return Components(weights / weights.sum(), means, covariances)


def fitted_by_cells(cells: Cells, at_modes: Components, x: Tensor, generator: torch.Generator) -> Components:
    """Return a mixture of those that are fitted to the points (n, d) of each cell, where these are not too few."""
    cell, parts = cells.assign(x), list[Components]()
    for k in range(len(cells.maps)):
        own = x[cell == k]
        if len(own) >= SEVERAL.n_fitted * x.shape[1]:
            part = fitted_mixture([own], generator)
        else:
            part = Components(x.new_ones(1), at_modes.means[k : k + 1], at_modes.covariances[k : k + 1])
        parts.append(part._replace(weights=part.weights * (len(own) + 0.5)))
    mixture = Components(*(torch.cat(a) for a in zip(*parts, strict=True)))
    return mixture._replace(weights=mixture.weights / mixture.weights.sum())


class Group(NamedTuple):
    """A converged pilot, with the modes (k,) near it, and permutations to its copies."""

    pilot: PilotPoints
    near: Tensor
    alike: int


def _groups(modes: ModeMaps, explore: Callable[[Affine], PilotPoints]) -> list[Group] | None:
    """Return pilots that together are near all modes, each near others; None where they are not."""
    cells = Cells(modes.maps, modes.weights.log())
    groups = list[Group]()
    for k, mode in enumerate(modes.maps):
        if any(group.near[k] for group in groups):
            continue
        pilot = explore(mode)
        group = Group(pilot, _near(cells, pilot), k)
        if not pilot.converged or not group.near[k]:
            return None
        groups = [other for other in groups if not (other.near <= group.near).all()]  # which it has explored too
        if _meets(group, groups):
            return None
        groups.append(group)
        new = [group]
        for group in new:  # which grows by what permutations make of it
            for image in (permuted_pilot(group.pilot, p) for p in modes.symmetries):
                other = Group(image, _near(cells, image), k)
                if not _meets(other, groups):
                    groups.append(other)
                    new.append(other)
    return groups


def _meets(group: Group, others: Sequence[Group]) -> bool:
    return any((group.near & other.near).any() for other in others)


def _near(cells: Cells, pilot: PilotPoints) -> Tensor:
    """Tell near which modes (k,) the points of a pilot are."""
    return cells.counts(pilot.x).cpu() > SEVERAL.stray * len(pilot.x)


def permuted_pilot(pilot: PilotPoints, permutation: Tensor) -> PilotPoints:
    """Return a pilot of the coordinates in another order (d,)."""
    weights, means, covariances = _mixture(pilot)
    mixture = Components(weights, means[:, permutation], covariances[:, permutation][:, :, permutation])
    return pilot._replace(x=pilot.x[:, permutation], mean_se=pilot.mean_se[permutation], mixture=mixture)


def by_lines(score_fn: ScoreFunction, modes: ModeMaps) -> DensityFunction:
    """Return log p, up to a constant, by integrals of the score from the nearest mode.

    Along such lines there is no valley, in which a rule of a few nodes would miss a kink.
    """
    cells = Cells(modes.maps, modes.weights.log())
    heights = modes.weights.log() - torch.stack([a.log_determinant() for a in modes.maps])

    def log_prob(x: Tensor) -> Tensor:
        cell = cells.assign(x)
        value = heights[cell]
        for k in cell.unique().tolist():
            rows, centre = (cell == k).nonzero()[:, 0], modes.maps[k].m
            ratio, gap = kronrod(score_fn, centre, x[rows])
            rough = ~(gap.abs() < SEVERAL.rough)
            if rough.any():
                ratio[rough] = log_ratio(score_fn, centre, x[rows[rough]])
            value[rows] += ratio
        return value

    return log_prob


def log_integral(log_prob: DensityFunction, pilot: PilotPoints, generator: torch.Generator) -> tuple[float, float]:
    """Return the logarithm of the integral of p near the points of a pilot, and its standard error.

    The estimate is by bridge sampling between the pilot's mixture, with wider tails, and its points.

    References
    ----------
    Meng, X.-L. and Wong, W. (1996). Simulating ratios of normalizing constants via a simple identity. Statistica
    Sinica 6(4).
    """
    mixture = _mixture(pilot)
    wide = Wider.than(mixture.draws())
    n = SEVERAL.n_weighed
    points = torch.cat([wide.sample(n, generator), pilot.x[:: max(1, len(pilot.x) // n)][:n]])
    log_p = log_prob(points).detach()
    w, v = (log_p - wide.log_density(points)).nan_to_num(-math.inf).tensor_split([n])
    n = SEVERAL.n_parts
    parts = [bridge(w[i::n], v[i::n]) for i in range(n)]
    return bridge(w, v), torch.tensor(parts).std().item() / math.sqrt(n)


def _mixture(pilot: PilotPoints) -> Components:
    """Return the mixture of a pilot that has converged."""
    if pilot.mixture is None:
        raise TypeError("a pilot without a mixture")
    return pilot.mixture


def put_together(pilots: Sequence[PilotPoints], weights: Tensor, errors: Tensor) -> PilotPoints:
    """Return the points and mixtures of pilots with weights (k,), whose logarithms have standard errors (k,)."""
    most = min(len(pilot.x) / w for pilot, w in zip(pilots, weights.tolist(), strict=True))
    kept = list[Tensor]()
    for pilot, w in zip(pilots, weights.tolist(), strict=True):
        n = max(SEVERAL.n_least, int(most * w))
        kept.append(pilot.x[torch.linspace(0, len(pilot.x) - 1, min(n, len(pilot.x))).long()])
    mixtures = [_mixture(pilot) for pilot in pilots]
    mixture = Components(
        torch.cat([w * a.weights for w, a in zip(weights, mixtures, strict=True)]),
        torch.cat([a.means for a in mixtures]),
        torch.cat([a.covariances for a in mixtures]),
    )
    means = torch.stack([a.weights @ a.means for a in mixtures])
    away = means - weights @ means
    own = torch.stack([pilot.mean_se for pilot in pilots])
    mean_se = ((weights[:, None] * own).square() + ((weights * errors)[:, None] * away).square()).sum(0).sqrt()
    verdict = min(pilot.verdict for pilot in pilots)
    return PilotPoints(torch.cat(kept), [len(x) for x in kept], mean_se, verdict, mixture=mixture)
