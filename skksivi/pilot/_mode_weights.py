r"""Points near several modes, as many near each as its weight says, also of modes that are images of each other.

The discrepancy is insensitive to the masses of distant modes; integrals of the score along lines are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.coordinates._affine import Affine, standard_normal
from skksivi.judge import THRESHOLDS
from skksivi.pilot._chains import ChainEnsemble, Refine, as_they_are
from skksivi.pilot._importance import (
    PLAIN,
    BatchedDraws,
    Plan,
    Refit,
    fitted,
    pilot_of_mixture,
    pilot_with,
    plain_moments,
    refined_pilot,
    resampled,
)
from skksivi.pilot._log_density import Cells, Mass, log_prob_around, mass, masses, normalised
from skksivi.pilot._mixture import Components, fitted_mixture, gaussian_of, matched
from skksivi.pilot._modes import ModeMaps
from skksivi.pilot._points import MANY_FEATURES, Limit, PilotPoints, within
from skksivi.pilot._symmetries import MAX_MODES, Exchange, Symmetry, image, images, same_mode
from skksivi.score._score import Score
from skksivi.score._tally import DIVERGED

# Points by importance sampling, or of short chains around each mode


def pilot_of_several(
    score: Score,
    modes: ModeMaps,
    explore: Callable[[Refine, Affine], PilotPoints],
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
        Returns points near the target around a mode, given what makes more of them.
    generator : torch.Generator
    by_image : callable
        Returns points by one image of what symmetries leave as it is, or None.
    """
    log_prob = log_prob_around(score, modes)
    refine = partial(_refined, replace(score, log_prob=log_prob), generator)
    pilot = _at_once(modes, refine)
    if pilot.converged:
        return pilot
    if (pilot_of_images := by_image()) is not None:
        return pilot_of_images
    groups = _groups(modes, partial(explore, refine))
    if groups is None or len(groups) == 1:
        return None if groups is None else groups[0].pilot
    score.tally.begin("weights of modes", 512 * len(groups))
    found = dict[int, Mass]()
    for group in groups:
        if group.alike not in found:
            found[group.alike] = mass(log_prob, mixture_of(group.pilot).draws(), group.pilot.x, generator)
    values, errors = torch.tensor([found[group.alike][:2] for group in groups]).to(modes.weights).unbind(1)
    if not values.isfinite().all() or not errors.max() <= 0.1:
        return None
    return mix([group.pilot for group in groups], values.softmax(0), errors)


def _refined(
    score: Score,
    generator: torch.Generator,
    a: Affine,
    pilot: PilotPoints,
    drawn: list[BatchedDraws],
    refit: Refit = fitted,
    least_rounds: int = 1,
) -> PilotPoints:
    """Return a pilot with more points, in the coordinates of a map; a mixture has components at all modes."""
    plan = Plan(refit, least_rounds=least_rounds, forgets=True, moves=False)
    return refined_pilot(a.pull_back(score), pilot, drawn, generator, plan)


def _at_once(modes: ModeMaps, refine: Callable[..., PilotPoints]) -> PilotPoints:
    """Return points by importance sampling from the Gaussians at the modes."""
    mixture = modes.mixture()
    map_ = mixture.map()
    mixture = mixture.whitened(map_)
    weights, means, covariances = mixture
    maps = [Affine(m, torch.linalg.cholesky(C)) for m, C in zip(means, covariances, strict=True)]
    cells = Cells(maps, weights.log())
    pilot = refine(map_, pilot_of_mixture(mixture), [], partial(fitted_by_cells, cells, mixture), least_rounds=5)
    if pilot.converged:
        pilot = pilot._replace(mixture=with_moments_of(mixture_of(pilot), pilot.x)).unwhitened(map_)
    return pilot


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
    cell, counts, parts = cells.assign(x), cells.counts(x) + 0.5, list[Components]()
    for k in range(len(cells.maps)):
        if counts[k] > 10 * x.shape[1]:
            parts.append(fitted_mixture([x[cell == k]], generator))
        else:
            parts.append(Components(x.new_ones(1), at_modes.means[k : k + 1], at_modes.covariances[k : k + 1]))
    mixture = Components.together(parts, counts)
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


# Images of points under symmetries


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


# Points of long chains


def with_mode_weights(score_fn: Score, pilot: PilotPoints, generator: torch.Generator) -> PilotPoints:
    """Return the points of a pilot, resampled to the masses of the modes if their numbers differ significantly."""
    parts = pilot.of_modes()
    shares = pilot.x.new_tensor(pilot.n_of_mode) / len(pilot.x)
    cells = Cells([gaussian_of(part[::2]) for part in parts], shares.log())
    found = masses(score_fn, cells, torch.cat([part[1::2] for part in parts]), generator)
    weights, errors = (a.to(shares) for a in normalised(found))
    if not all(m.trusted for m in found) or ((weights - shares).abs() < 3 * errors).all():
        return pilot
    kept = in_proportion(parts, weights)
    return pilot._replace(x=torch.cat(kept), n_of_mode=[len(part) for part in kept])


def pooled(parts: Sequence[PilotPoints], modes: ModeMaps) -> PilotPoints:
    """Return the points of chains around each mode, as many of each as its weight says."""
    found = mix(parts, modes.weights, torch.zeros_like(modes.weights))
    x, n_of_mode = by_mode(found.x, modes.maps)
    return found._replace(x=x, n_of_mode=n_of_mode, mixture=None)


def by_mode(x: Tensor, maps: Sequence[Affine]) -> tuple[Tensor, list[int]]:
    """Return the points sorted by the Gaussian they most likely come from, since chains may cross, and counts.

    The Gaussian of a mode with hardly any points is left out.
    """
    nearest = Cells(list(maps), x.new_zeros(len(maps))).assign(x)
    counts = nearest.bincount(minlength=len(maps))
    fewest = 20  # points of chains
    if len(maps) > 1 and counts.min() < fewest:
        return by_mode(x, [a for a, n in zip(maps, counts.tolist(), strict=True) if n >= fewest])
    return x[nearest.argsort()], counts.tolist()


# Parts put together by their weights


def mixture_of(pilot: PilotPoints) -> Components:
    """Return the mixture of a pilot that has converged."""
    if pilot.mixture is None:
        raise TypeError("a pilot without a mixture")
    return pilot.mixture


def in_proportion(parts: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """Return some of the rows of each part, in proportion to weights (k,), ten at least: a distribution is fitted to
    them.
    """
    most = min(len(part) / w for part, w in zip(parts, weights.tolist(), strict=True))
    counts = (min(max(10, int(most * w)), len(part)) for part, w in zip(parts, weights.tolist(), strict=True))
    return [part[torch.linspace(0, len(part) - 1, n).long()] for part, n in zip(parts, counts, strict=True)]


def mix(pilots: Sequence[PilotPoints], weights: Tensor, errors: Tensor) -> PilotPoints:
    """Return the points and mixtures of pilots with weights (k,), whose logarithms have standard errors (k,)."""
    kept = in_proportion([pilot.x for pilot in pilots], weights)
    mixtures = [pilot.mixture for pilot in pilots if pilot.mixture is not None]
    has_all = len(mixtures) == len(pilots)
    means = torch.stack([q.weights @ q.means for q in mixtures] if has_all else [p.x.mean(0) for p in pilots])
    away = means - weights @ means
    own = torch.stack([pilot.mean_se for pilot in pilots])
    mean_se = ((weights[:, None] * own).square() + ((weights * errors)[:, None] * away).square()).sum(0).sqrt()
    verdict, n_of_mode = min(pilot.verdict for pilot in pilots), [len(x) for x in kept]
    found = PilotPoints(torch.cat(kept), n_of_mode, mean_se, verdict, found_by=pilots[0].found_by)
    return found._replace(mixture=Components.together(mixtures, weights)) if has_all else found


# Modes that are images of each other


class SymmetryGroup(NamedTuple):
    """Maps that leave a target as it is: the identity, then one after another a symmetry after a map before it.

    Attributes
    ----------
    steps : list of (int, Symmetry)
        The map before each but the first, and the symmetry.
    """

    steps: list[tuple[int, Symmetry]]

    @classmethod
    def of(cls, symmetries: Sequence[Symmetry], mode: Affine) -> SymmetryGroup | None:
        """Return the group of some symmetries, None if it has too many maps; they differ at points around a mode."""
        x = mode.unwhiten(standard_normal(2, mode.m, torch.Generator(mode.m.device).manual_seed(0)))
        steps, found = list[tuple[int, Symmetry]](), [x]
        for k, y in enumerate(found):  # which grows
            for g in symmetries:
                new = g(y)
                if not any(torch.allclose(new, other, rtol=1e-6, atol=1e-8) for other in found):
                    steps.append((k, g))
                    found.append(new)
                if len(found) > 24:  # the factorial of four labels
                    return None
        return cls(steps)

    def of_points(self, x: Tensor) -> Tensor:
        """Return the images (k, n, d) of points x (n, d)."""
        found = [x]
        for k, g in self.steps:
            found.append(g(found[k]))
        return torch.stack(found)

    def of_pilot(self, pilot: PilotPoints) -> PilotPoints:
        """Return the points of all images of a pilot, as many of each."""
        found = [pilot.thinned(4000)]
        for k, g in self.steps:
            found.append(_image(found[k], g))
        equal = pilot.x.new_full((len(found),), 1 / len(found))
        return mix(found, equal, torch.zeros_like(equal))


def _image(pilot: PilotPoints, g: Symmetry) -> PilotPoints:
    """Return the image of a pilot, with the Gaussians to which tangents at their means take those of its mixture."""
    if isinstance(g, Exchange) or pilot.mixture is None:
        return image_of_pilot(pilot, g)
    x, (weights, means, covariances) = g(pilot.x), pilot.mixture
    roots = [g.tangent(m, L) for m, L in zip(means, torch.linalg.cholesky(covariances), strict=True)]
    mixture = Components(weights, g(means), torch.stack([L @ L.mT for L in roots])).fitted_to(x)
    return pilot._replace(x=x, mean_se=pilot.error * x.std(0), mixture=mixture)


def pilot_of_orbit(
    score: Score, modes: ModeMaps, symmetries: Sequence[Symmetry], generator: torch.Generator
) -> PilotPoints | None:
    """Return points near modes of several kinds, and all of their images, by one image of the target; None if few
    points count there, or there are too many images. Of modes of one kind chains around one tell as much.
    """
    if not symmetries or len(modes.maps[0].m) >= MANY_FEATURES:
        return None
    kinds, group = one_of_each(modes, symmetries), SymmetryGroup.of(symmetries, modes.maps[0])
    if group is None or len(kinds.maps) == 1:
        return None
    try:
        found = fitted_image(one_image(score, group, kinds), kinds, generator)
    except DIVERGED:
        return None
    return None if found is None else group.of_pilot(found)


def one_of_each(modes: ModeMaps, symmetries: Sequence[Symmetry]) -> ModeMaps:
    """Return the best mode, and of each other kind of modes that are images of each other the one nearest to it."""
    best, left, kept, weights = modes.maps[0], list(zip(modes.maps, modes.weights, strict=True)), [], []
    while left:
        orbit = [left[0][0], *images([left[0][0]], symmetries)]
        alike = [w for a, w in left if any(same_mode(a, b) for b in orbit)]
        left = [(a, w) for a, w in left if not any(same_mode(a, b) for b in orbit)]
        kept.append(min(orbit, key=lambda a: best.whiten(a.m[None]).square().sum().item()))
        weights.append(torch.stack(alike).sum())
    return ModeMaps(kept, torch.stack(weights) / torch.stack(weights).sum())


def one_image(score: Score, group: SymmetryGroup, modes: ModeMaps) -> Score:
    """Return the score of the part of a target near some modes, whose images under a group add up to all of it."""
    h, density, own = modes.mixture().draws(), score.log_prob, score.score_fn

    def log_share(x: Tensor) -> Tensor:
        there = group.of_points(x)
        log_h = h.log_density(there.flatten(0, 1)).view(there.shape[:2])
        return log_h[0] - log_h.logsumexp(0)

    def score_fn(x: Tensor) -> Tensor:
        s, y = own(x).detach(), x.detach().requires_grad_()
        return s + torch.autograd.grad(log_share(y).sum(), y)[0]

    def log_prob(x: Tensor) -> Tensor:
        return density(x) + log_share(x)  # type: ignore[misc]

    own_density = None if density is None else log_prob
    return replace(
        score,
        score_fn=score_fn,
        score_vjp=None,
        by_differences=True,
        log_prob=own_density,
        labels=None,
        in_double=None,
    )


def fitted_image(score: Score, modes: ModeMaps, generator: torch.Generator) -> PilotPoints | None:
    """Return points of one image by importance, from a mixture that is fitted to chains and then again and again to
    its draws; None if few of them count or their errors stay large.
    """
    *_, found = ChainEnsemble(score, matched(score, modes.maps[0], generator), generator, as_they_are).stage(80)
    map_ = gaussian_of(found.x)
    score_u, x, drawn = map_.pull_back(score), map_.whiten(found.x), list[Tensor]()
    mixture, n_rounds = fitted(x, generator).of_widths((1.0, 3.0), (0.6, 0.4)), 12
    plan = PLAIN._replace(n_draws=4096, least_share=0.05, far=-math.inf)
    for i in range(n_rounds):
        score_u.tally.begin("importance sampling", plan.n_draws)
        if (draws := resampled(score_u, mixture, generator, plan)) is None:
            return None
        is_far = draws[1][0] > 0.1 * x.shape[1]  # nats
        drawn.append(draws[0].u)
        u, by = torch.cat(drawn).flatten(0, 1), plain_moments(torch.cat(drawn))
        last = i == n_rounds - 1
        verdict = within("weights", Limit("errors {:.2g}", by.se, THRESHOLDS.profile_errors[last]))
        if verdict.good and (last or not is_far):
            return pilot_with(u, by)._replace(verdict=verdict, mixture=mixture).unwhitened(map_)
        mixture = fitted_mixture([u], generator) if i < 2 else mixture.fitted_to(u)
    return None
