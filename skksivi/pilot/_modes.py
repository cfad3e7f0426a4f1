r"""The modes of a target and their weights, from scores alone, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.coordinates._affine import FAR, Affine, standard_normal
from skksivi.coordinates._lines import log_ratio
from skksivi.pilot._gaussian import score_divergence
from skksivi.pilot._mixture import Components
from skksivi.pilot._newton import NEWTON, laplace, search_modes
from skksivi.score._errors import DivergedError
from skksivi.score._score import DifferentiableScore, Score


class ModeSettings(NamedTuple):
    """The settings of `search_around`, and of the modes that count."""

    #: Points around the origin, and around the best mode, from which modes are searched at first, at most, and the
    #: most numbers in them.
    few_starts: int = 8
    max_starts: int = 96
    max_in_starts: int = 1600
    #: The squared distance, in standard deviations, within which two modes count as one, and the fewest dimensions of
    #: it.
    reach: float = 9.0
    #: Share of the target below which a mode is left out.
    min_weight: float = 1e-3


MODES = ModeSettings()


class ModeMaps(NamedTuple):
    """The modes of a target.

    Attributes
    ----------
    maps : list of Affine
        Maps x = m + L u to them, best first.
    weights : Tensor of shape (k,)
        Their shares of the mass.
    symmetries : tuple of Tensor of shape (d,)
        Permutations of the coordinates that leave the target as it is.
    ascents : (int, int) or None
        How many ascents of the last round ended at a mode, and how many at a new one; None without ascents.
    """

    maps: list[Affine]
    weights: Tensor
    symmetries: tuple[Tensor, ...] = ()
    ascents: tuple[int, int] | None = None

    def mixture(self) -> Components:
        """Return the Gaussians at the modes."""
        means, covariances = (torch.stack(a) for a in zip(*((a.m, a.L @ a.L.mT) for a in self.maps), strict=True))
        return Components(self.weights, means, covariances)


def scattered(x: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Return n points around x at distances of several orders, for a target whose units are not known.

    Every other point has one scale for all coordinates, the others a scale for each.
    """
    scales = torch.tensor([1.0, 3.0, 10.0, 30.0, 100.0]).to(x)
    of_each = scales[torch.randint(5, (n, len(x)), generator=generator, device=x.device)]
    of_all = scales.repeat(-(-n // 5))[:n, None].expand_as(of_each)
    alike = torch.arange(n, device=x.device)[:, None] % 2 == 0
    return x + torch.where(alike, of_all, of_each) * standard_normal(n, x, generator)


def around(mode: Affine, n: int, generator: torch.Generator) -> Tensor:
    """Return n points three or ten standard deviations from a mode."""
    scales = torch.tensor([3.0, 10.0]).repeat(-(-n // 2))[:n, None].to(mode.m)
    return mode.unwhiten(scales * standard_normal(n, mode.m, generator))


def find_modes(
    score_fn: DifferentiableScore,
    starts: Tensor,
    generator: torch.Generator,
    known: Sequence[Affine] = (),
    *,
    n_steps: int | None = None,
) -> ModeMaps:
    r"""Search for a mode from each start, and weight the modes by Laplace's approximation.

    A mode's share is proportional to :math:`p(m) \det L`, the heights compared by integrals of the score. Two
    modes within a few standard deviations of each other count as one. If an integral cannot be trusted, the
    mode that resembles its Gaussian less is dropped: it is a spike, or a flat region far out. If no search has
    converged, their ends are taken as modes, unless `n_steps` limits the search.

    Raises
    ------
    ValueError
        All searches left the region where the score is finite, or none has converged in `n_steps`.
    """
    found, converged = search_modes(score_fn, starts, n_steps or NEWTON.max_steps)
    maps = [*known, *(a for a, at_a_mode in zip(found, converged.tolist(), strict=True) if at_a_mode)]
    if not maps and n_steps is not None:
        raise ValueError(f"none of {len(starts)} searches for a mode has converged in {n_steps} steps")
    maps = maps or [a for a in found if a.m.abs().max() < FAR]
    if not maps:
        raise DivergedError(torch.stack([a.m for a in found]) if found else None)
    distinct: list[Affine] = []
    for a in maps:
        if not any(same_mode(a, b) for b in distinct):
            distinct.append(a)
    return ranked(score_fn, distinct, generator)


def ranked(score_fn: DifferentiableScore, distinct: list[Affine], generator: torch.Generator) -> ModeMaps:
    """Return modes with their weights, best first, without modes of negligible weight."""
    if len(distinct) > 1:
        distinct = sorted(distinct, key=lambda a: score_divergence(score_fn, a, generator))
    best, *others = distinct
    evidence = [best.log_determinant()]
    kept = [best]
    for a in others:
        height = log_ratio(score_fn, best.m, a.m)
        if height.isfinite():
            kept.append(a)
            evidence.append(height + a.log_determinant())
    weights = torch.stack(evidence).softmax(0)
    order = [k for k in weights.argsort(descending=True).tolist() if weights[k] >= MODES.min_weight]
    return ModeMaps([kept[k] for k in order], weights[order] / weights[order].sum())


def search_around(
    score_fn: DifferentiableScore,
    starts: Tensor,
    generator: torch.Generator,
    *,
    alone: bool,
    n_starts: int = MODES.max_starts,
) -> ModeMaps:
    """Search for modes from the starts and, unless they are to be alone, from points around them and the best one."""
    if alone:
        return find_modes(score_fn, starts, generator)
    n = min(n_starts, MODES.max_in_starts // starts.shape[1])
    found = find_modes(score_fn, torch.cat([starts, scattered(starts[0], n, generator)]), generator)
    return find_modes(score_fn, around(found.maps[0], n, generator), generator, found.maps)


def same_mode(a: Affine, b: Affine) -> bool:
    """Tell whether one mode is within the range of the other."""
    reach = min(len(a.m), MODES.reach)
    return bool(a.whiten(b.m[None]).square().sum() < reach or b.whiten(a.m[None]).square().sum() < reach)


# The log-density, the target's own or by line integrals from a mode

#: Lines along which the score is integrated at a time.
N_INTEGRALS = 500


def judging_map(score_fn: Score) -> Affine:
    """Return the map to a mode that depends on the target alone."""
    origin = torch.zeros(score_fn.n_features, dtype=torch.float64, device=score_fn.device)
    try:
        return laplace(score_fn, origin)[0]
    except ValueError:
        generator = torch.Generator(score_fn.device).manual_seed(0)
        return find_modes(score_fn, scattered(origin, MODES.max_starts, generator), generator).maps[0]


def origin_of(score_fn: Score) -> Affine | None:
    """Return the map to the mode where p is set to one, if only its score is known."""
    return None if score_fn.log_prob is not None else judging_map(score_fn)


def log_density(score_fn: Score, origin: Affine | None, x: Tensor) -> Tensor:
    """Return log p (n,) at points x (n, d): the target's own, or integrals of the score from an origin.

    Raises
    ------
    ValueError
        Neither is available.
    """
    if origin is None:
        if score_fn.log_prob is None:
            raise ValueError("The target has no `log_prob`, which is needed here.")
        return score_fn.log_prob(x)
    score_u, u = origin.pull_back(score_fn), origin.whiten(x)
    return torch.cat([log_ratio(score_u, torch.zeros_like(origin.m), part) for part in u.split(N_INTEGRALS)])
