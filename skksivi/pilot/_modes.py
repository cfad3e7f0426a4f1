r"""The modes of a target and their weights, from scores alone, in float64.

Ascents from points at distances of several orders of magnitude end at modes; the curvature there shows which of them
are the same. In few dimensions the score is evaluated at many more points, and followed from those where it does not
lead back, because a narrow mode is found only from its neighbourhood.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.coordinates._affine import FAR, Affine, standard_normal
from skksivi.coordinates._lines import log_ratio
from skksivi.coordinates._whitening import looks, n_looks
from skksivi.pilot._mixture import Components, score_divergence
from skksivi.pilot._newton import MAX_STEPS, is_spike, jacobians, over_kinks, search_modes
from skksivi.pilot._symmetries import MAX_MODES, N_TRIED, REACH, Symmetry, around, images, same_mode, symmetries_of
from skksivi.score._domain import Bound, call_of
from skksivi.score._products import falls
from skksivi.score._score import DifferentiableScore, Score
from skksivi.score._tally import DivergedError, ImproperError

#: Points around the origin, and around the best mode, from which modes are searched at first, at most, and the most
#: numbers in them.
MAX_STARTS, MAX_IN_STARTS = 96, 1600


class ModeMaps(NamedTuple):
    """The modes of a target.

    Attributes
    ----------
    maps : list of Affine
        Maps x = m + L u to them, best first.
    weights : Tensor of shape (k,)
        Their shares of the mass.
    symmetries : tuple of Symmetry
        Maps that leave the target as it is and take modes to others.
    ascents : (int, int) or None
        How many ascents of the last round ended at a mode, and how many at a new one; None without ascents.
    n_looks : int
        Points at which the score was looked at for narrow modes.
    unweighed : tuple of Affine
        The modes whose share is not known: the score alone does not tell it across a valley where p is zero.
    """

    maps: list[Affine]
    weights: Tensor
    symmetries: tuple[Symmetry, ...] = ()
    ascents: tuple[int, int] | None = None
    n_looks: int = 0
    unweighed: tuple[Affine, ...] = ()

    def mixture(self) -> Components:
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
    modes within a few standard deviations of each other count as one. If no search has converged, their ends are
    taken as modes, unless `n_steps` limits the search.

    Raises
    ------
    ValueError
        All searches left the region where the score is finite, or none has converged in `n_steps`.
    """
    found, converged = search_modes(score_fn, starts, n_steps or MAX_STEPS)
    maps = [*known, *(a for a, at_a_mode in zip(found, converged.tolist(), strict=True) if at_a_mode)]
    if not maps and n_steps is not None:
        raise ValueError(f"none of {len(starts)} searches for a mode has converged in {n_steps} steps")
    maps = maps or [over_kinks(score_fn, a) for a in found if a.m.abs().max() < FAR]
    if not maps:
        raise DivergedError(torch.stack([a.m for a in found]) if found else None)
    distinct: list[Affine] = []
    for a in maps:
        if not any(same_mode(a, b) for b in distinct):
            distinct.append(a)
    return ranked(score_fn, distinct, generator)


def ridge_of(
    score_fn: DifferentiableScore, starts: Tensor, mode: Affine, generator: torch.Generator
) -> Affine | None:
    r"""Return a Gaussian around a ridge of modes, None if a mode is no part of one.

    On a ridge, as of a density that does not change under rotations, the curvature along it is rounding, and log p
    falls far sooner than it says. The modes are no list then: searches end all along the ridge, and the moments of
    their ends, of twice the covariance, are those of the Gaussian.
    """
    lam, V = torch.linalg.eigh(mode.L @ mode.L.mT)  # variances, of which the largest are those along the ridge
    if lam[-1] < 1e8 * lam[0]:
        return None
    t = 0.1 * lam[-1].sqrt() * V[:, -1]
    if not (score_fn(torch.stack([mode.m + t, mode.m - t])).detach() @ t).abs().amin() > 1:  # .01 of a Gaussian
        return None
    x = torch.cat([scattered(starts[0], 32, generator), scattered(mode.m, 32, generator)])
    found, converged = search_modes(score_fn, x, MAX_STEPS)
    ends = torch.stack([mode.m, *(a.m for a, ok in zip(found, converged.tolist(), strict=True) if ok)])
    covariance = 2 * torch.cov(ends.mT, correction=0) + falls(score_fn, mode.m).square().diag()
    return Affine(ends.mean(0), torch.linalg.cholesky(covariance))


def mode_from_prior(score_fn: Score, mode: Affine, generator: torch.Generator) -> Affine | None:
    """Return a mode of more mass than another, if the likeliest of some draws from the prior leads to one.

    The draws do not take numbers of the generator: what follows is the same with and without a prior.
    """
    x = score_fn.from_prior(32, torch.Generator(mode.m.device).manual_seed(generator.initial_seed()))
    if score_fn.log_prob is None or not len(x):
        return None
    likeliest = score_fn.log_prob(x).detach().nan_to_num(-math.inf, -math.inf).argmax()
    found, converged = search_modes(score_fn, x[likeliest][None], MAX_STEPS)
    if not (len(found) and converged[0]) or is_spike(found[0]) or same_mode(mode, found[0]):
        return None
    gain = _height(score_fn, mode, found[0]) + found[0].log_determinant() - mode.log_determinant()
    return found[0] if gain > 0 else None


def ranked(
    score_fn: DifferentiableScore,
    distinct: list[Affine],
    generator: torch.Generator,
    symmetries: Sequence[Symmetry] = (),
) -> ModeMaps:
    """Return modes with their weights, best first, without modes of negligible weight.

    Across a valley where p is zero an integral of the score diverges. There the heights are those of the target's
    own log p, or of an image under a symmetry. Without either the mode is kept, unweighed, with the share of the
    best. If it does not resemble its Gaussian it is left out: it is a spike, or a flat region far out.
    """
    divergences = [0.0] if len(distinct) == 1 else [score_divergence(score_fn, a, generator) for a in distinct]
    (_, best), *others = sorted(zip(divergences, distinct, strict=True), key=itemgetter(0))
    kept, evidence, afar = [best], [best.log_determinant()], list[Affine]()
    for divergence, a in others:
        height = log_ratio(score_fn, best.m, a.m)
        if not height.isfinite() and divergence < 1.0:  # for each feature
            height = _height(score_fn, best, a)
            afar += [] if height.isfinite() else [a]
        if height.isfinite():
            kept.append(a)
            evidence.append(height + a.log_determinant())
    unweighed, orbits = list[Affine](), [[a, *images([a], symmetries)] for a in kept] if afar else []
    for a in afar:
        alike = [k for k, orbit in enumerate(orbits) if any(same_mode(a, b) for b in orbit)]
        if not alike:
            unweighed.append(a)
            orbits.append([a, *images([a], symmetries)])
        kept.append(a)
        evidence.append(evidence[alike[0] if alike else 0])
    weights = torch.stack(evidence).softmax(0)
    order = [k for k in weights.argsort(descending=True).tolist() if weights[k] >= 1e-3]  # of the target
    found = ModeMaps([kept[k] for k in order], weights[order] / weights[order].sum())
    return found._replace(unweighed=tuple(unweighed))


def _height(score_fn: DifferentiableScore, a: Affine, b: Affine) -> Tensor:
    """Return the difference of the target's own log p at two modes, NaN without one."""
    if score_fn.log_prob is None:
        return a.m.new_tensor(math.nan)
    at_a, at_b = score_fn.log_prob(torch.stack([a.m, b.m])).detach()
    return at_b - at_a


def search_around(
    score_fn: DifferentiableScore,
    starts: Tensor,
    generator: torch.Generator,
    *,
    alone: bool,
    n_starts: int = MAX_STARTS,
) -> ModeMaps:
    """Search for modes from the starts and, unless they are to be alone, from points around them and the best one."""
    if alone:
        return find_modes(score_fn, starts, generator)
    n = min(n_starts, MAX_IN_STARTS // starts.shape[1])
    found = find_modes(score_fn, torch.cat([starts, scattered(starts[0], n, generator)]), generator)
    return find_modes(score_fn, around(found.maps[0], n, generator), generator, found.maps)


# The other modes of a target

#: The mean square of a score at which an ascent has arrived, and the steps from which it knows the curvature.
LEVEL, N_PAIRS = 1e-4, 8

#: How far log p at the end of an ascent may be below the best, in nats.
MOST_BELOW = 20.0

#: The squared distance from a mode, in its standard deviations, below which an ascent has come back to it; in fewer
#: dimensions these.
BACK = 4.0


def all_modes(
    score_fn: Score, start: Tensor, mode: Affine, generator: torch.Generator, *, thorough: bool = False
) -> ModeMaps:
    """Return a mode and all others to which ascents lead, from points around it, around a start (d,) and elsewhere,
    by at most a quarter of the calls that are left.

    There are rounds of ascents, from points around all modes found so far, and from points that have each coordinate
    of one of these, until one finds no other.
    """
    score_u, symmetries = mode.pull_back(score_fn), symmetries_of(score_fn, mode)
    kinds, found = [mode], [mode, *images([mode], symmetries)]
    n_starts = 64  # points of a round
    x = scattered(start, n_starts // 2, generator)
    again = torch.Generator(start.device).manual_seed(generator.initial_seed())
    from_prior = score_fn.from_prior(n_starts // 4, again)
    x[: len(from_prior)] = from_prior
    n = n_looks(len(start), thorough=thorough)
    ends, new, tally = mode.m[None, :][:0], list[Affine](), score_fn.tally
    with tally.trying((tally.left or 2**40) // 4):
        u = torch.cat([mode.whiten(x), contradicting(score_u, start, generator, n)])
        for _ in range(10):
            n_each = max(4, n_starts // (2 * len(kinds)))
            u = ascended(score_u, torch.cat([u, *(mode.whiten(around(a, n_each, generator)) for a in kinds)]))
            ends, new = u, _new_modes(score_fn, found, u)
            kinds.extend(new)
            found.extend(new)
            check_aperiodic(score_fn, found)
            found.extend(images(found, symmetries))
            if not new or len(found) > MAX_MODES:
                break
            u = mode.whiten(
                torch.cat([scattered(start, n_starts // 4, generator), crossed(found, n_starts // 4, generator)])
            )
    modes = ranked(score_fn, found, generator, symmetries)
    ended = sum(int(_near(a, mode, ends).sum()) for a in new if any(a is b for b in modes.maps))
    return modes._replace(symmetries=symmetries, ascents=(len(ends), ended), n_looks=n)


def few_modes(score_fn: Score, start: Tensor, mode: Affine, generator: torch.Generator, n: int) -> ModeMaps:
    """Return a mode and another one, if n ascents from around it, and one from where it is mirrored at the start (d,)
    of its search, lead to one; their weights are not known.
    """
    x = torch.cat([around(mode, n, generator), (2 * start - mode.m)[None]])
    ends = ascended(mode.pull_back(score_fn), mode.whiten(x))
    others = ends[~_near(mode, mode, ends)]
    maps = [mode, *_new_modes(score_fn, [mode], others[:1])]
    found = ModeMaps(maps, mode.m.new_full((len(maps),), 1 / len(maps)))
    return found._replace(ascents=(len(ends), len(others) if len(maps) > 1 else 0))


def crossed(modes: Sequence[Affine], n: int, generator: torch.Generator) -> Tensor:
    """Return points (n, d), each coordinate that of some mode: those of independent parts are modes themselves."""
    m = torch.stack([a.m for a in modes])
    return m.gather(0, torch.randint(len(m), (n, m.shape[1]), generator=generator, device=m.device))


def _near(a: Affine, first: Affine, u: Tensor) -> Tensor:
    """Tell which points u (n, d), in the coordinates of a first mode, are within the reach of another."""
    return a.whiten(first.unwhiten(u)).square().sum(1) < min(u.shape[1], REACH)


def contradicting(score_u: DifferentiableScore, like: Tensor, generator: torch.Generator, n: int) -> Tensor:
    """Return points u (k, d) of n at which the score is looked at, where it does not lead back to the origin.

    Of too many those are kept where the score is largest for the distance, as it is near narrow modes, and as many
    others.
    """
    d = len(like)
    if not n:
        return like.new_empty(0, d)
    u = looks(d, n, int(torch.randint(2**31, (1,), generator=generator, device=generator.device))).to(like)
    s = torch.cat([score_u(part).detach() for part in u.split(6144)])  # as many as without high effort, at most
    r, steepness = u.norm(dim=1), s.norm(dim=1) / u.norm(dim=1)
    usual = steepness[r.argsort()].unfold(0, 32, 32).nanmedian(1).values  # of those as far out
    is_steep = steepness > 8 * usual[(r.argsort().argsort() // 32).clamp_max(len(usual) - 1)]
    elsewhere = s.isfinite().all(1) & ((torch.cosine_similarity(s, -u) < 0.9) | is_steep)
    u, s = u[elsewhere], s[elsewhere]
    order = (s.norm(dim=1) / u.norm(dim=1)).argsort(descending=True)
    half = 16
    rest = order[half:]
    return u[torch.cat([order[:half], rest[:: max(1, -(-len(rest) // half))]])]


def ascended(score_u: DifferentiableScore, u: Tensor) -> Tensor:
    r"""Return the ends (k, d) of those ascents from points u (n, d) that have arrived at a mode.

    Near the origin, which is a mode, they stop. Steps are by the limited-memory BFGS method, clipped to a length of
    :math:`2 + 2 \|u\|`. A step is quartered if log p would fall, by the trapezoidal rule: longer ones
    lead into the region of another mode.

    References
    ----------
    Liu, D. and Nocedal, J. (1989). On the limited memory BFGS method for large scale optimization. Mathematical
    Programming 45.
    """
    u, s, back = u.clone(), score_u(u).detach(), min(u.shape[1], BACK)
    curvature, length = Curvature(s), torch.ones_like(u[:, :1])
    for _ in range(30):
        i = ((u.square().sum(1) >= back) & (s.square().mean(1) > LEVEL)).nonzero()[:, 0]
        if not len(i):
            break
        du = length[i] * curvature.newton_step(i, s[i])
        du *= (2 * (1 + u[i].norm(dim=1, keepdim=True)) / du.norm(dim=1, keepdim=True)).clamp_max(1)
        tried = score_u(u[i] + du).detach()
        falls = (du * (s[i] + tried)).sum(1, keepdim=True) < 0
        stays = falls | ~tried.isfinite().all(1, keepdim=True)
        moves = ~stays[:, 0]
        curvature.add(i[moves], du[moves], (s[i] - tried)[moves])
        u[i], s[i] = u[i] + du.where(~stays, 0), s[i].where(stays, tried)
        length[i] = (length[i] / 4).where(stays, 1)
    arrived = (s.square().mean(1) < LEVEL) | (u.square().sum(1) < back)
    return u[u.isfinite().all(1) & arrived]


class Curvature:
    """The curvature by the last steps of ascents; the scores s (n, d) at their starts set a first length.

    Attributes
    ----------
    du, ds : Tensor of shape (N_PAIRS, n, d)
        Steps and how much the score fell, the latest last.
    inverse : Tensor of shape (N_PAIRS, n, 1)
        One over their products, zero for none.
    scale : Tensor of shape (n, 1)
        Of the steps beside them.
    """

    def __init__(self, s: Tensor) -> None:
        self.du, self.ds = s.new_zeros(2, N_PAIRS, *s.shape).unbind()
        self.inverse = s.new_zeros(N_PAIRS, len(s), 1)
        self.scale = (0.1 / s.norm(dim=1, keepdim=True)).clamp_max(1)

    def newton_step(self, i: Tensor, s: Tensor) -> Tensor:
        """Return the steps (k, d) of ascents i (k,) with scores s (k, d), by the two loops over pairs."""
        du, ds, inverse = self.du[:, i], self.ds[:, i], self.inverse[:, i]
        factors = torch.zeros_like(inverse)
        for j in reversed(range(N_PAIRS)):
            factors[j] = inverse[j] * (du[j] * s).sum(1, keepdim=True)
            s = s - factors[j] * ds[j]
        step = self.scale[i] * s
        for j in range(N_PAIRS):
            step = step + (factors[j] - inverse[j] * (ds[j] * step).sum(1, keepdim=True)) * du[j]
        return step

    def add(self, i: Tensor, du: Tensor, ds: Tensor) -> None:
        """Add steps of ascents i (k,). If the score did not fall, discard all and double the next step."""
        product = (du * ds).sum(1)
        falls = product > 1e-8 * du.norm(dim=1) * ds.norm(dim=1)
        self.inverse[:, i[~falls]] = 0
        self.scale[i[~falls]] *= 2
        i, du, ds, product = i[falls], du[falls], ds[falls], product[falls, None]
        for pairs, latest in ((self.du, du), (self.ds, ds), (self.inverse, 1 / product)):
            pairs[:, i] = torch.cat([pairs[1:, i], latest[None]])
        self.scale[i] = product / ds.square().sum(1, keepdim=True)


def _new_modes(score_fn: Score, known: Sequence[Affine], u: Tensor) -> list[Affine]:
    """Return the modes at the ends u (k, d) of ascents, in the coordinates of the first known mode, but for these."""
    first, new = known[0], list[Affine]()
    score_u = first.pull_back(score_fn)
    if score_u.log_prob is not None and len(u):  # the highest first; those far below them have no mass
        log_p = score_u.log_prob(torch.cat([u, first.whiten(torch.stack([a.m for a in known]))])).detach()
        log_p = log_p.nan_to_num(-math.inf, -math.inf, -math.inf)
        order = log_p[: len(u)].argsort(descending=True)
        u = u[order][log_p[order] > log_p.max() - MOST_BELOW]
    for _ in range(24):
        for a in (*known, *new):
            u = u[~_near(a, first, u)]
        if not len(u):
            break
        end, u = u[:1], u[1:]
        if torch.linalg.eigvalsh(-jacobians(score_u, end)).amin() <= LEVEL:  # a flat region is not a mode
            continue
        maps, converged = search_modes(score_fn, first.unwhiten(end), MAX_STEPS)
        if len(maps) and converged[0] and not any(same_mode(maps[0], a) for a in (*known, *new)):
            new.append(maps[0])
    return new


def check_aperiodic(score_fn: Score, modes: Sequence[Affine]) -> None:
    """Refuse a score that is the same many periods away along a coordinate, some of them from a mode to another.

    Raises
    ------
    ImproperError
    """
    first, *others = modes
    sd, bounds = first.L.norm(dim=1), dict[int, Bound]()
    alike = [a for a in others if _is_beside(a, first)]
    if len(alike) < 2:
        return
    x = first.unwhiten(standard_normal(N_TRIED, first.m, torch.Generator(sd.device).manual_seed(0)))
    s, m = score_fn(x).detach(), _polished(score_fn, first)
    for a in sorted(alike, key=lambda a: (a.m - first.m).norm().item())[:8]:
        gap = _polished(score_fn, a) - m
        j = int((gap / sd).abs().argmax())
        for period in (gap[j].abs() / k for k in range(6, 0, -1)):
            far = x.clone()
            far[:, j] += period * (9973 if score_fn.step < 1e-4 else 31)  # not so many of a multiple of it
            if j not in bounds and (score_fn(far).detach() - s).abs().max() <= score_fn.step * s.abs().max():
                bounds[j] = Bound(j, (m[j] - period / 2).item(), (m[j] + period / 2).item())
    if bounds:
        names = ", ".join(f"{score_fn.label(j)}, with a period of {b.high - b.low:.5g}" for j, b in bounds.items())
        raise ImproperError(
            f"The target is periodic in {names}, so that it has infinite mass. Keep to one period around a mode: "
            "give the density of the parameters to skksivi.targets.constrained, as in constrained(log_prob, "
            f"{call_of(score_fn, list(bounds.values()))})."
        )


def _is_beside(a: Affine, first: Affine) -> bool:
    """Tell whether a mode differs from another in its place alone, and there in one coordinate."""
    sd = first.L.norm(dim=1)
    aside = 0.1  # of the widths
    is_off = ((a.m - first.m) / sd).abs() > aside
    return bool(is_off.sum() == 1 and ((a.L - first.L).abs() <= aside * sd[:, None]).all())


def _polished(score_fn: Score, mode: Affine) -> Tensor:
    """Return a mode (d,) after more Newton steps."""
    m = mode.m
    for _ in range(4):
        m = m + mode.unwhiten_direction(mode.whiten_score(score_fn(m[None]).detach()))[0]
    return m
