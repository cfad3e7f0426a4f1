r"""A target that exchanges of labels and changes of signs leave as it is, by one of its images alone.

With a group of such maps g and any density h,

.. math:: p_1(x) = p(x) \, \frac{h(x)}{\sum_g h(g x)}

is smooth, has the mass of one image, and adds up to p with its images under all g: draws of it, each taken to a
random image, are draws of p. The density h is a mixture of Gaussians at one mode of each kind, those near the best,
so that :math:`p_1` has few modes although the images of p may overlap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.coordinates._affine import Affine, standard_normal
from skksivi.judge._thresholds import THRESHOLDS
from skksivi.judge._verdict import Grade
from skksivi.pilot._chains import ChainEnsemble, as_they_are
from skksivi.pilot._importance import PLAIN, fitted, pilot_with, plain_moments, resampled
from skksivi.pilot._mixture import Components, fitted_mixture, gaussian_of, matched
from skksivi.pilot._mode_weights import image_of_pilot, mix
from skksivi.pilot._modes import ModeMaps
from skksivi.pilot._points import MANY_FEATURES, Limit, PilotPoints, within
from skksivi.pilot._symmetries import Exchange, Symmetry, images, same_mode
from skksivi.score._score import Score
from skksivi.score._tally import DIVERGED

#: The most maps of a group, the factorial of four labels.
MOST_MAPS = 24


class Group(NamedTuple):
    """Maps that leave a target as it is: the identity, then one after another a symmetry after a map before it.

    Attributes
    ----------
    steps : list of (int, Symmetry)
        The map before each but the first, and the symmetry.
    """

    steps: list[tuple[int, Symmetry]]

    @classmethod
    def of(cls, symmetries: Sequence[Symmetry], mode: Affine) -> Group | None:
        """Return the group of some symmetries, None if it has too many maps; they differ at points around a mode."""
        x = mode.unwhiten(standard_normal(2, mode.m, torch.Generator(mode.m.device).manual_seed(0)))
        steps, found = list[tuple[int, Symmetry]](), [x]
        for k, y in enumerate(found):  # which grows
            for g in symmetries:
                new = g(y)
                if not any(torch.allclose(new, other, rtol=1e-6, atol=1e-8) for other in found):
                    steps.append((k, g))
                    found.append(new)
                if len(found) > MOST_MAPS:
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
    mixture = Components(weights, g(means), torch.stack([L @ L.mT for L in roots])).fitted_to(x, 20.0 * x.shape[1])
    return pilot._replace(x=x, mean_se=pilot.error * x.std(0), mixture=mixture)


def pilot_of_orbit(
    score: Score, modes: ModeMaps, symmetries: Sequence[Symmetry], generator: torch.Generator
) -> PilotPoints | None:
    """Return points near modes of several kinds, and all of their images, by one image of the target; None if few
    points count there, or there are too many images. Of modes of one kind chains around one tell as much.
    """
    if not symmetries or len(modes.maps[0].m) >= MANY_FEATURES:
        return None
    kinds, group = one_of_each(modes, symmetries), Group.of(symmetries, modes.maps[0])
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


def one_image(score: Score, group: Group, modes: ModeMaps) -> Score:
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
        verdict = within(Grade.RELIABLE_WEIGHTS, Limit("errors {:.2g}", by.se, THRESHOLDS.profile_errors[last]))
        if verdict.good and (last or not is_far):
            return pilot_with(u, by)._replace(verdict=verdict, mixture=mixture).unwhitened(map_)
        mixture = fitted_mixture([u], generator) if i < 2 else mixture.fitted_to(u, 20.0 * u.shape[1])
    return None
