r"""The weights of modes, and points near several, from the score alone.

Space is divided into cells, each the points where the Gaussian of one mode is the likeliest. The discrepancy is
insensitive to the masses of distant cells; integrals of the score along lines are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.coordinates._affine import Affine
from skksivi.coordinates._lines import checked_density, kronrod, log_ratio
from skksivi.pilot._importance import BatchedDraws, HeavyTailed, Plan, Refit, fitted, pilot_of_mixture, refined_pilot
from skksivi.pilot._mixture import Components, fitted_mixture, gaussian_of
from skksivi.pilot._modes import ModeMaps
from skksivi.pilot._points import PilotPoints
from skksivi.pilot._symmetries import MAX_MODES, Exchange, Symmetry, image, same_mode
from skksivi.score._score import Score, ScoreFunction

#: Points of the proposal for a mass, and of that and of the mode for a pilot.
N_IMPORTANCE, N_QUICK = 2000, 400

#: Degrees of freedom of the wider half of the proposal.
DF = 5.0

#: The least effective share of the points and the largest difference of two estimates that are trusted.
MIN_SHARE, MAX_GAP = 0.2, 0.1


class Cells(NamedTuple):
    """A partition of space by the likeliest of k Gaussians.

    Attributes
    ----------
    maps : list of Affine
    log_weights : Tensor of shape (k,)
    """

    maps: list[Affine]
    log_weights: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """The number of cells and the dimension."""
        return len(self.maps), len(self.maps[0].m)

    def assign(self, x: Tensor) -> Tensor:
        """Return the indices (n,) of the cells of points x (n, d)."""
        return self.log_shares(x).argmax(1)

    def log_shares(self, x: Tensor) -> Tensor:
        """Return the logarithms (n, k), up to a constant of each row, of the shares that the Gaussians have at x."""
        halves = [a.whiten(x).square().sum(1) / 2 + a.log_determinant() for a in self.maps]
        return self.log_weights - torch.stack(halves, 1)

    def counts(self, x: Tensor) -> Tensor:
        """Return the number of points of x (n, d) in each cell, shape (k,)."""
        return self.assign(x).bincount(minlength=len(self.maps))

    def sorted_by(self, order: Tensor) -> Cells:
        """Return the cells in another order (k,)."""
        return Cells([self.maps[k] for k in order.tolist()], self.log_weights[order])

    def refined(self, x: Tensor, fit: Callable[[Tensor], Affine] = gaussian_of) -> Cells:
        """Return the cells of the Gaussians fitted to the points in each; a cell with hardly any points is kept."""
        cell, d = self.assign(x), x.shape[1]
        parts = [x[cell == k] for k in range(len(self.maps))]
        maps = [fit(part) if len(part) > 5 * d else a for part, a in zip(parts, self.maps, strict=True)]
        shares = x.new_tensor([len(part) + 0.5 for part in parts]) / len(x)
        return Cells(maps, shares.log())


class Mass(NamedTuple):
    """The logarithm of the integral of p over a cell, relative to p at a point, and whether it can be trusted.

    Attributes
    ----------
    log_mass : float
        By importance sampling.
    se : float
        Its standard error.
    share : float
        Effective share of the points.
    gap : float
        Difference from the estimate by bridge sampling, NaN without points of the mode.
    """

    log_mass: float
    se: float
    share: float
    gap: float

    @property
    def trusted(self) -> bool:
        """Whether two estimates agree and rest on enough points."""
        return self.share >= MIN_SHARE and abs(self.gap) <= MAX_GAP


def log_densities(score_fn: Score, cells: Cells) -> Callable[[Tensor, int], Tensor]:
    """Return log p at points (n, d) of a cell, up to a constant of all cells: the target's own, or by lines."""
    for a in cells.maps:
        score_fn = checked_density(score_fn, a.m[None], a.unwhiten(torch.eye(len(a.m)).to(a.m)[:8]))
    if (own := score_fn.log_prob) is not None:
        return lambda x, _: own(x)
    centres = torch.stack([a.m for a in cells.maps])
    heights = log_ratio(score_fn, centres[0], centres)
    return lambda x, k: heights[k] + log_ratio(score_fn, centres[k], x)


def mass(
    log_p: Callable[[Tensor, int], Tensor],
    cells: Cells,
    k: int,
    points: Tensor,
    generator: torch.Generator,
    n: int = N_IMPORTANCE,
) -> Mass:
    r"""Estimate the mass of a cell.

    By importance sampling from g, half the Gaussian of the cell and half a Student t of five degrees of freedom, and
    by bridge sampling between g and points of p in the cell (Meng and Wong 1996).

    Parameters
    ----------
    log_p : callable
        Maps points and the index of their cell to log p, NaN where it is not known.
    cells : Cells
    k : int
        The cell.
    points : Tensor of shape (n, d)
        Draws of p in the cell, which did not help to fit its Gaussian.
    generator : torch.Generator
    n : int
        Points of g.
    """
    a = cells.maps[k]
    x = propose(a, n, generator)
    inside = cells.assign(x) == k
    log_w = x.new_full((len(x),), -math.inf)
    log_w[inside] = (log_p(x[inside], k) - log_proposal(a, x[inside])).nan_to_num(-math.inf)
    log_mass, w = _log_mean(log_w), (log_w - log_w.max()).exp().nan_to_num(0)
    share = (w.sum().square() / (len(w) * w.square().sum())).item()
    se = (w.std() / w.mean() / math.sqrt(len(w))).item()
    gap = math.nan
    if len(points):
        y = points[:500]
        log_v = log_p(y, k) - log_proposal(a, y)
        gap = log_mass - bridge(log_w, log_v[log_v.isfinite()])
    return Mass(log_mass, se, share, gap)


def bridge(log_w: Tensor, log_v: Tensor, n_iter: int = 50) -> float:
    """Return the logarithm of the ratio of normalisers from log p/g at draws of g, and at draws of p."""
    n, m, log_r = len(log_w), len(log_v), _log_mean(log_w)
    if not m:
        return math.nan
    prior = math.log(m / n)
    for _ in range(n_iter):
        above = _log_mean(log_w - torch.logaddexp(log_w + prior, torch.full_like(log_w, log_r)))
        below = _log_mean(-torch.logaddexp(log_v + prior, torch.full_like(log_v, log_r)))
        log_r = above - below
    return log_r


def _log_mean(log_w: Tensor) -> float:
    return (log_w.logsumexp(0) - math.log(len(log_w))).item()


def propose(a: Affine, n: int, generator: torch.Generator) -> Tensor:
    """Draw from half a Gaussian, half a Student t."""
    d = len(a.m)
    u = torch.randn(n, d, generator=generator, dtype=a.m.dtype, device=a.m.device)
    chi = torch.randn(n // 2, int(DF), generator=generator, dtype=a.m.dtype, device=a.m.device).square().sum(1)
    u[: n // 2] *= (DF / chi).sqrt()[:, None]
    return a.unwhiten(u)


def log_proposal(a: Affine, x: Tensor) -> Tensor:
    """Return log g at points (n, d)."""
    d, squares = x.shape[1], a.whiten(x).square().sum(1)
    gaussian = -squares / 2 - d / 2 * math.log(2 * math.pi)
    constant = math.lgamma((DF + d) / 2) - math.lgamma(DF / 2) - d / 2 * math.log(DF * math.pi)
    student = constant - (DF + d) / 2 * torch.log1p(squares / DF)
    return torch.logaddexp(gaussian, student) - math.log(2) - a.log_determinant()


def with_mode_weights(score_fn: Score, pilot: PilotPoints, generator: torch.Generator) -> PilotPoints:
    """Return the points of a pilot, resampled to the masses of the modes if their numbers differ significantly."""
    parts = pilot.x.split(pilot.n_of_mode)
    shares = pilot.x.new_tensor(pilot.n_of_mode) / len(pilot.x)
    shuffled = [part[torch.randperm(len(part), generator=generator, device=part.device)] for part in parts]
    maps = [gaussian_of(part[::2]) for part in shuffled]
    cells = Cells(maps, shares.log())
    log_p = log_densities(score_fn, cells)
    masses = [
        mass(log_p, cells, k, part[1::2][cells.assign(part[1::2]) == k][:N_QUICK], generator, N_QUICK)
        for k, part in enumerate(shuffled)
    ]
    weights, errors = (a.to(shares) for a in normalised(masses))
    if not all(m.trusted for m in masses) or ((weights - shares).abs() < 3 * errors).all():
        return pilot
    most = min(len(part) / w for part, w in zip(parts, weights.tolist(), strict=True))
    kept = [part[: max(N_LEAST, int(most * w))] for part, w in zip(shuffled, weights.tolist(), strict=True)]
    return pilot._replace(x=torch.cat(kept), n_of_mode=[len(part) for part in kept])


def pooled(parts: Sequence[PilotPoints], modes: ModeMaps, generator: torch.Generator) -> PilotPoints:
    """Return the points of chains around each mode, as many of each as its weight says."""
    weights = modes.weights.tolist()
    most = min(len(part.x) / w for part, w in zip(parts, weights, strict=True))
    orders = [torch.randperm(len(part.x), generator=generator, device=part.x.device) for part in parts]
    x = torch.cat([p.x[i[: int(most * w)]] for p, i, w in zip(parts, orders, weights, strict=True)])
    mean_se = sum((w * part.mean_se).square() for part, w in zip(parts, weights, strict=True))
    verdict = min(part.verdict for part in parts)
    return PilotPoints(*by_mode(x, modes.maps), torch.as_tensor(mean_se).sqrt(), verdict)


def by_mode(x: Tensor, maps: Sequence[Affine]) -> tuple[Tensor, list[int]]:
    """Return the points sorted by the Gaussian they most likely come from, since chains may cross, and counts.

    The Gaussian of a mode with hardly any points is left out.
    """
    distances = [a.whiten(x).square().sum(1) + 2 * a.log_determinant() for a in maps]
    nearest = torch.stack(distances).argmin(0)
    counts = nearest.bincount(minlength=len(maps))
    fewest = 20  # points of chains
    if len(maps) > 1 and counts.min() < fewest:
        return by_mode(x, [a for a, n in zip(maps, counts.tolist(), strict=True) if n >= fewest])
    return x[nearest.argsort()], counts.tolist()


def normalised(masses: Sequence[Mass]) -> tuple[Tensor, Tensor]:
    """Return the weights (k,) of the cells and their standard errors."""
    weights = torch.tensor([mass.log_mass for mass in masses], dtype=torch.float64).softmax(0)
    variances = torch.tensor([mass.se**2 for mass in masses], dtype=torch.float64)
    # of w_k = m_k / sum m: relative errors (e_k - sum_j w_j e_j)
    spread = (weights.square() * variances).sum() + (1 - 2 * weights) * variances
    return weights, weights * spread.clamp_min(0).sqrt()


# Points near several modes

#: Evaluates log p (n,) at points (n, d).
DensityFunction = Callable[[Tensor], Tensor]


#: Points of a mixture, and of chains, by which a mode is weighted, and the parts of them from which its error comes.
N_WEIGHED = 512

#: Points of a mode that are kept whatever its weight, so that a distribution can be fitted to them.
N_LEAST = 10


def pilot_of_several(
    score: Score,
    modes: ModeMaps,
    explore: Callable[[Weighing, Affine], PilotPoints],
    generator: torch.Generator,
    by_image: Callable[[], PilotPoints | None],
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
    by_image : callable
        Returns points by one image of what symmetries leave as it is, or None.
    """
    log_prob = score.log_prob or by_lines(score, modes)
    weighing = Weighing(replace(score, log_prob=log_prob), modes, generator)
    pilot = weighing.at_once()
    if pilot.converged:
        return pilot
    if (pilot_of_images := by_image()) is not None:
        return pilot_of_images
    groups = _groups(modes, partial(explore, weighing))
    if groups is None or len(groups) == 1:
        return None if groups is None else groups[0].pilot
    score.tally.begin("weights of modes", N_WEIGHED * len(groups))
    weighed = dict[int, tuple[float, float]]()
    for group in groups:
        if group.alike not in weighed:
            weighed[group.alike] = log_integral(log_prob, group.pilot, generator)
    values, errors = torch.tensor([weighed[group.alike] for group in groups]).to(modes.weights).unbind(1)
    if not values.isfinite().all() or not errors.max() <= 0.1:
        return None
    return mix([group.pilot for group in groups], values.softmax(0), errors)


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
        pilot = self.refined(map_, pilot_of_mixture(mixture), [], refit, least_rounds=5)
        if pilot.converged:
            pilot = pilot._replace(mixture=with_moments_of(reweighed(cells, pilot), pilot.x)).unwhitened(map_)
        return pilot

    def refined(
        self, a: Affine, pilot: PilotPoints, drawn: list[BatchedDraws], refit: Refit = fitted, least_rounds: int = 1
    ) -> PilotPoints:
        """Return a pilot with more points, in the coordinates of a map."""
        plan = Plan(refit, least_rounds=least_rounds, forgets=True, moves=False)
        return refined_pilot(a.pull_back(self.score), pilot, drawn, self.generator, plan)


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


def with_moments_of(mixture: Components, x: Tensor) -> Components:
    """Return a mixture moved to the mean and the covariance of points (n, d), if that gains more than it costs.

    The gain is the divergence of the Gaussians with these moments and with the mixture's, the cost that of components
    from where they were: far apart and narrow, they are placed better than moments can.
    """
    own, by = mixture.map(), gaussian_of(x)
    other = mixture.with_moments(*by)
    A = torch.linalg.solve_triangular(own.L, by.L, upper=False)
    gain = (A.square().sum() + own.whiten(by.m[None]).square().sum() - len(A)) / 2 - A.diagonal().log().sum()
    roots = torch.linalg.cholesky(mixture.covariances)
    shifts = torch.linalg.solve_triangular(roots, (other.means - mixture.means)[:, :, None], upper=False)
    return other if mixture.weights @ shifts.square().sum((1, 2)) / 2 < gain else mixture


def fitted_by_cells(cells: Cells, at_modes: Components, x: Tensor, generator: torch.Generator) -> Components:
    """Return a mixture of those that are fitted to the points (n, d) of each cell, where these are not too few."""
    cell, parts = cells.assign(x), list[Components]()
    for k in range(len(cells.maps)):
        own = x[cell == k]
        if len(own) >= 10 * x.shape[1]:
            part = fitted_mixture([own], generator)
        else:
            part = Components(x.new_ones(1), at_modes.means[k : k + 1], at_modes.covariances[k : k + 1])
        parts.append(part._replace(weights=part.weights * (len(own) + 0.5)))
    mixture = Components(*(torch.cat(a) for a in zip(*parts, strict=True)))
    return mixture._replace(weights=mixture.weights / mixture.weights.sum())


class Group(NamedTuple):
    """A converged pilot, with the modes (k,) near it, and the number of that of which it is an image."""

    pilot: PilotPoints
    near: Tensor
    alike: int


def _groups(modes: ModeMaps, explore: Callable[[Affine], PilotPoints]) -> list[Group] | None:
    """Return pilots that together are near all modes, each near others; None where they are not."""
    groups = list[Group]()
    for k, mode in enumerate(modes.maps):
        if any(group.near[k] for group in groups):
            continue
        pilot = explore(mode)
        group = Group(pilot, are_near(modes, pilot.x), k)
        if not pilot.converged or not group.near[k]:
            return None
        groups = [other for other in groups if not (other.near <= group.near).all()]  # which it has explored too
        if _overlaps(group, groups):
            return None
        groups.append(group)
        new = [group]
        for group in new:  # which grows by what symmetries make of it
            for there in (image_of_pilot(group.pilot, symmetry) for symmetry in modes.symmetries):
                other = Group(there, are_near(modes, there.x), k)
                if not _overlaps(other, groups):
                    groups.append(other)
                    new.append(other)
    return groups


def _overlaps(group: Group, others: Sequence[Group]) -> bool:
    return any((group.near & other.near).any() for other in others)


def are_near(modes: ModeMaps, x: Tensor) -> Tensor:
    """Tell near which modes (k,) points x (n, d) are."""
    return Cells(modes.maps, modes.weights.log()).counts(x).cpu() > len(x) / 100


def image_of_pilot(pilot: PilotPoints, symmetry: Symmetry) -> PilotPoints:
    """Return the pilot to which a symmetry takes another."""
    x, mixture = symmetry(pilot.x), pilot.mixture
    if not isinstance(symmetry, Exchange):
        if mixture is not None:
            mixture = fitted_mixture([x], torch.Generator(x.device).manual_seed(0))
        return pilot._replace(x=x, mean_se=pilot.error * x.std(0), mixture=mixture)
    if mixture is not None:
        order, signs = symmetry
        covariances = mixture.covariances[:, order][:, :, order] * signs[:, None] * signs
        mixture = Components(mixture.weights, symmetry(mixture.means), covariances)
    return pilot._replace(x=x, mean_se=pilot.mean_se[symmetry.order], mixture=mixture)


def symmetrised(pilot: PilotPoints, mode: Affine, symmetries: Sequence[Symmetry]) -> tuple[PilotPoints, ModeMaps]:
    """Return points near all images of a mode under symmetries, as many near each, and these modes."""
    found = [(mode, pilot)]
    for a, part in found:  # which grows
        for g in symmetries:
            b = image(a, g)
            if len(found) < MAX_MODES and not any(same_mode(b, other) for other, _ in found):
                found.append((b, image_of_pilot(part, g)))
    maps, parts = zip(*found, strict=True)
    equal = pilot.x.new_full((len(parts),), 1 / len(parts))
    return mix(parts, equal, torch.zeros_like(equal)), ModeMaps(list(maps), equal, tuple(symmetries))


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
            rough = ~(gap.abs() < 0.05)  # nats
            if rough.any():
                ratio[rough] = log_ratio(score_fn, centre, x[rows[rough]])
            value[rows] += ratio
        for k, a in enumerate(modes.maps if modes.unweighed else ()):  # a valley may not be where cells meet
            rows = value.isnan().nonzero()[:, 0]
            value[rows] = heights[k] + log_ratio(score_fn, a.m, x[rows])
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
    wide = HeavyTailed.wider(mixture.draws())
    n = N_WEIGHED
    points = torch.cat([wide.sample(n, generator), pilot.x[:: max(1, len(pilot.x) // n)][:n]])
    log_p = log_prob(points).detach()
    w, v = (log_p - wide.log_density(points)).nan_to_num(-math.inf).tensor_split([n])
    n = 8
    parts = [bridge(w[i::n], v[i::n]) for i in range(n)]
    return bridge(w, v), torch.tensor(parts).std().item() / math.sqrt(n)


def _mixture(pilot: PilotPoints) -> Components:
    """Return the mixture of a pilot that has converged."""
    if pilot.mixture is None:
        raise TypeError("a pilot without a mixture")
    return pilot.mixture


def _mean(pilot: PilotPoints) -> Tensor:
    mixture = pilot.mixture
    return pilot.x.mean(0) if mixture is None else mixture.weights @ mixture.means


def mix(pilots: Sequence[PilotPoints], weights: Tensor, errors: Tensor) -> PilotPoints:
    """Return the points and mixtures of pilots with weights (k,), whose logarithms have standard errors (k,)."""
    most = min(len(pilot.x) / w for pilot, w in zip(pilots, weights.tolist(), strict=True))
    kept = list[Tensor]()
    for pilot, w in zip(pilots, weights.tolist(), strict=True):
        n = max(N_LEAST, int(most * w))
        kept.append(pilot.x[torch.linspace(0, len(pilot.x) - 1, min(n, len(pilot.x))).long()])
    means = torch.stack([_mean(pilot) for pilot in pilots])
    away = means - weights @ means
    own = torch.stack([pilot.mean_se for pilot in pilots])
    mean_se = ((weights[:, None] * own).square() + ((weights * errors)[:, None] * away).square()).sum(0).sqrt()
    verdict, n_of_mode = min(pilot.verdict for pilot in pilots), [len(x) for x in kept]
    mixtures = [(w, pilot.mixture) for w, pilot in zip(weights, pilots, strict=True) if pilot.mixture is not None]
    if len(mixtures) < len(pilots):
        return PilotPoints(torch.cat(kept), n_of_mode, mean_se, verdict)
    mixture = Components(
        torch.cat([w * a.weights for w, a in mixtures]),
        torch.cat([a.means for _, a in mixtures]),
        torch.cat([a.covariances for _, a in mixtures]),
    )
    return PilotPoints(torch.cat(kept), n_of_mode, mean_se, verdict, mixture=mixture)
