r"""Points of a funnel: by the profile of a target along some directions, or in coordinates that are warped.

The profile is a mixture of Gaussians from which importance sampling starts. Given :math:`A^\top u = c` the other
coordinates have a conditional mode u(c) and, by the curvature there, a conditional covariance :math:`R R^\top`.
Laplace's approximation gives the marginal density of c,

.. math:: p(c) \propto p(u(c)) \, \det(R^\top R)^{1/2}.

From one value of c to the next, all of this is followed into the neck of a funnel. In the centred form of a
hierarchy, this is where its scale is small, and its members are far closer together than chains ever see them.

In that form the density has no bound either: a search for the mode ends in a spike, where the scale of a group is
zero and its members are together. The mass is elsewhere; the profile along the logarithm of that scale finds it.

References
----------
Rue, H., Martino, S. and Chopin, N. (2009). Approximate Bayesian inference for latent Gaussian models by using
integrated nested Laplace approximations. Journal of the Royal Statistical Society B 71(2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.coordinates._affine import Affine, Plane, WhitenedScore
from skksivi.coordinates._lines import by_few_points, kronrod
from skksivi.coordinates._warp import Warp, fitted_warp, reshaped
from skksivi.judge import THRESHOLDS
from skksivi.pilot._chains import N_OF_GAUSSIAN, ChainEnsemble
from skksivi.pilot._importance import (
    PLAIN,
    BatchedDraws,
    Heights,
    pilot_of_mixture,
    pilot_with,
    plain_moments,
    refined_pilot,
    resampled,
)
from skksivi.pilot._mixture import Components, gaussian_of
from skksivi.pilot._newton import MAX_STEPS, is_spike, search_modes
from skksivi.pilot._points import MANY_FEATURES, PilotPoints, judge_weights
from skksivi.score._score import DifferentiableScore, Score
from skksivi.score._tally import DIVERGED

#: The weight of a Gaussian along the profile that is the same for all.
SAME = 0.1

#: Draws of a round.
N_DRAWS = 2048


class Node(NamedTuple):
    """The conditional mode u (d,) at c (k,), a root R (d, d - k) of the conditional covariance, and log p(u) and
    log p(c), up to a constant.
    """

    c: Tensor
    u: Tensor
    root: Tensor
    height: float
    log_marginal: float

    @property
    def log_scale(self) -> float:
        """The logarithm of the conditional scale."""
        return self.log_marginal - self.height


class Conditionals(NamedTuple):
    """The conditional modes of u, x = m + L u, given c = A^T u, with orthonormal A (d, k) and Q (d, d - k) across."""

    score_x: Score
    metric: Affine
    A: Tensor
    Q: Tensor

    @classmethod
    def given(cls, score_x: Score, metric: Affine, directions: Tensor) -> Conditionals:
        """Return those given the products of u with some directions (d, k)."""
        d, k = directions.shape
        Q, R = torch.linalg.qr(torch.cat([directions, torch.eye(d).to(directions)], 1))
        return cls(score_x, metric, Q[:, :k] * R.diagonal()[:k].sign(), Q[:, k:])

    def plane(self, c: Tensor) -> Plane:
        """Return the plane of those x whose c (k,) is given."""
        return Plane(self.metric.unwhiten((self.A @ c)[None])[0], self.metric.L @ self.Q)

    def node(self, c: Tensor, last: Node | None = None) -> Node | None:
        """Return the node at c (k,), from the last one; None where it is not found."""
        start = self.Q.new_zeros(self.Q.shape[1]) if last is None else last.u @ self.Q
        score_w = WhitenedScore(self.score_x, self.plane(c))
        maps, converged = search_modes(score_w, start[None], 60 if last is None else 12)
        if not maps or not converged[0] or is_spike(maps[0]):
            return None
        u, height = self.A @ c + self.Q @ maps[0].m, 0.0
        if last is not None:
            score_u, ends = self.metric.pull_back(self.score_x), torch.stack([last.u, u])
            if score_u.log_prob is None:
                gain = by_few_points(score_u, last.u, u[None], [(kronrod, 0.01)])
            else:
                gain = score_u.log_prob(ends).diff()
            height = last.height + gain.item()
        if not math.isfinite(height):
            return None
        return Node(c, u, self.Q @ maps[0].L, height, height + maps[0].log_determinant().item())

    def beside(self, node: Node, j: int, step: float) -> Node | None:
        """Return the node that is a step along direction j away from another."""
        c = node.c.clone()
        c[j] += step
        return self.node(c, node)


def profiled(
    score_fn: Score, x: Tensor, scalers: Sequence[int], generator: torch.Generator, *, known: bool = False
) -> PilotPoints | None:
    """Return points by importance from the profile along some coordinates, None where they do not converge.

    Parameters
    ----------
    score_fn : Score
    x : Tensor of shape (n, d)
        Points near the target, for the centre and the units.
    scalers : sequence of int
        The coordinates on which the scales of others depend.
    generator : torch.Generator
    known : bool, default=False
        Whether the points x will do if they agree with what the profile shows, so that None is returned.
    """
    metric = gaussian_of(x)
    found = by_profile(Conditionals.given(score_fn, metric, metric.L[scalers].mT), generator, x if known else None)
    return found if found is not None and found.converged else None


def by_profile(given: Conditionals, generator: torch.Generator, known: Tensor | None = None) -> PilotPoints | None:
    """Return points by importance from the profile, or of the profile itself, where these do not converge, features
    are many or they are like points (n, d) that are known; None where it has no end.
    """
    try:
        known_by = profile(given)
    except DIVERGED:
        return None
    if known_by is None:
        return None
    mixture, heights = known_by
    score_u, found = given.metric.pull_back(given.score_x), None
    if mixture.means.shape[1] < MANY_FEATURES:
        doubt = None if known is None else partial(_differ, given.metric.whiten(known) @ given.A, given.A)
        found = _converged(score_u, mixture, heights, generator, doubt)
    return (found or pilot_of_mixture(mixture, N_DRAWS)).unwhitened(given.metric)


def _converged(
    score_u: DifferentiableScore,
    start: Components,
    heights: Heights,
    generator: torch.Generator,
    doubt: Callable[[Tensor], bool] | None,
) -> PilotPoints | None:
    """Return points by importance from a mixture that is fitted to them again and again, None if few of them count or
    they raise no doubt about what is known.

    The mixture is not moved as a whole to the moments of the draws: a move that is short for the mass would leave the
    neck.
    """
    mixture, drawn, d = start, list[Tensor](), start.means.shape[1]
    plan = PLAIN._replace(n_draws=N_DRAWS, least_share=0.05, far=-math.inf, heights=heights)
    n_rounds = 8
    soon = 3  # large errors end the search then; later two Gaussians are about a value, as scales not held give tails
    for i in range(1, n_rounds + 1):
        score_u.tally.begin("importance sampling", 2 * N_DRAWS)
        found = resampled(score_u, mixture, generator, plan)
        if found is None:
            return None
        draws, divergence = found
        drawn.append(draws.u)
        u, by = torch.cat(drawn).flatten(0, 1), plain_moments(torch.cat(drawn))
        if doubt is not None and not doubt(torch.cat(drawn)):
            return None
        if i == soon:
            start = start.of_widths((0.8, 1.8), (0.6, 0.4))
        mixture = start.fitted_to(u)
        verdict = judge_weights(divergence, by.se, d, i, THRESHOLDS.profile_errors[i == n_rounds])
        if verdict.good:
            return pilot_with(u, by)._replace(verdict=verdict, mixture=mixture)
        if i == soon and by.se > 0.1:
            return None
    return None


def _differ(known: Tensor, A: Tensor, u: Tensor) -> bool:
    """Tell whether c (n, k) that are known have other means or scales than the A^T u of draws u (n, n_parts, d)."""
    by = plain_moments(u @ A)
    shift, ratio = (known.mean(0) - by.mean) / by.sd, (known.std(0) / by.sd).log()
    return any(bool((a.abs() > 3.0 * se).any()) for a, se in ((shift, by.mean_se), (ratio, by.sd_se)))


def profile(given: Conditionals) -> tuple[Components, Heights] | None:
    """Return Gaussians of u along each direction, through the top of the marginal density, and log p at their means;
    None where one of them has no end.
    """
    found = _top_of(given)
    if found is None:
        return None
    top, sds = found
    lines = list[list[Node]]()
    for j, sd in enumerate(sds):
        below, above = (_side(given, top, j, side * sd) for side in (-1, 1))
        nodes = [*reversed(below), top, *above]
        ends = max(nodes[0].log_marginal, nodes[-1].log_marginal)
        if len(nodes) < 3 or ends > _highest(nodes) - 4.0:
            return None
        lines.append(nodes)
    mixture = _mixture(lines)
    return mixture, Heights(mixture, mixture.means.new_tensor([node.height for nodes in lines for node in nodes]))


def _top_of(given: Conditionals) -> tuple[Node, list[float]] | None:
    """Return the node where the marginal density is largest along each direction, and its standard deviations there,
    by the curvature; None where none is found.
    """
    k = given.A.shape[1]
    top, sds = given.node(given.A.new_zeros(k)), [0.5] * k
    for j in list(range(k)) * min(k, 2):  # of several directions each is climbed along twice
        found = None if top is None else _line_search(given, top, j, sds[j])
        if found is None:
            return None
        top, sds[j] = found
    return None if top is None else (top, sds)


def _line_search(given: Conditionals, node: Node, j: int, step: float) -> tuple[Node, float] | None:
    """Return the highest node along direction j, and the standard deviation there; None where there is no end."""
    ahead = _bracket(given, node, j, step)
    if ahead is None:
        return None
    if ahead[0] is None:  # it goes down
        back = _bracket(given, node, j, -step)
        if back is None:
            return None
        ahead = back[0] or ahead[2], *back[1:]
    nodes = sorted((each for each in ahead if each is not None), key=lambda each: each.c[j].item())
    (a, b, c), (f_a, f_b, f_c) = ([get(each) for each in nodes] for get in (lambda n: n.c[j].item(), _log_marginal))
    slope, bend = (f_b - f_a) / (b - a), 2 * ((f_c - f_b) / (c - b) - (f_b - f_a) / (b - a)) / (c - a)
    if not bend < 0:
        return None
    top = given.beside(ahead[1], j, (a + b) / 2 - slope / bend - ahead[1].c[j].item())
    return max(ahead[1], top or ahead[1], key=_log_marginal), (-bend) ** -0.5


def _bracket(given: Conditionals, node: Node, j: int, step: float) -> tuple[Node | None, Node, Node] | None:
    """Return three nodes in a row, the second the highest, the first None where all steps go down."""
    before = None
    for _ in range(12):
        new = given.beside(node, j, step)
        if new is None:
            step /= 4
        elif new.log_marginal <= node.log_marginal:
            return before, node, new
        else:
            before, node, step = node, new, 2 * step
    return None


def _side(given: Conditionals, top: Node, j: int, sd: float) -> list[Node]:
    """Return the nodes from the top to where the marginal density is small, or to the last that is found."""
    first = 0.5  # standard deviations by the curvature at the top
    nodes, step = [top], first
    aim = 0.7  # of the log conditional scale over the root of d, and a third of that of the log marginal density
    for _ in range(80):
        last = nodes[-1]
        node, change = given.beside(last, j, step * sd), math.inf
        if node is not None:
            change = abs(node.log_scale - last.log_scale) / math.sqrt(len(node.u))
            change += abs(node.log_marginal - last.log_marginal) / 3
            if change < 2 * aim:
                nodes.append(node)
        if nodes[-1].log_marginal < _highest(nodes) - 7.0 or step < first / 50:
            break
        step = min(4.0, step * min(2.0, max(0.5, aim / max(change, 1e-9))))
    return nodes[1:]


def _log_marginal(node: Node) -> float:
    return node.log_marginal


def _highest(nodes: Sequence[Node]) -> float:
    """Return the largest logarithm of the marginal density."""
    return max(map(_log_marginal, nodes))


def _mixture(lines: Sequence[Sequence[Node]]) -> Components:
    """Return a Gaussian about each node, as wide along its own line as neighbours are apart, and along the others as
    the target is.
    """
    mixtures, spreads = list[Components](), list[Tensor]()
    for j, nodes in enumerate(lines):
        u, roots, c = (torch.stack(parts) for parts in zip(*((a.u, a.root, a.c[j]) for a in nodes), strict=True))
        log_marginal = u.new_tensor([node.log_marginal for node in nodes])
        (slopes,), (gaps,) = torch.gradient(u, spacing=(c,), dim=0), torch.gradient(c)
        shares, v = (log_marginal + gaps.log()).softmax(0), 0.5 * gaps[:, None] * slopes
        weights = (1 - SAME) * shares + SAME / len(nodes)
        mixtures.append(Components(weights, u, roots @ roots.mT + v[:, :, None] * v[:, None]))
        spreads.append((shares @ (c - shares @ c).square()).sqrt() * slopes[log_marginal.argmax()])
    wide = [torch.outer(spread, spread) for spread in spreads]
    parts = [a._replace(covariances=a.covariances + sum(wide) - own) for a, own in zip(mixtures, wide, strict=True)]
    return Components.together(parts, [1 / len(parts)] * len(parts))


# Out of a spike


def out_of_spike(score_fn: Score, mode: Affine, start: Tensor, generator: torch.Generator) -> PilotPoints | None:
    """Return points by the profile along all that leads into a spike from a start (d,); None where that has no end.

    Parameters
    ----------
    score_fn : Score
    mode : Affine
        Where the search for a mode ended.
    start : Tensor of shape (d,)
        Where it started.
    generator : torch.Generator
    """
    metric, directions, Q, score_w = Affine.shift(start), list[Tensor](), torch.eye(len(start)).to(start), score_fn
    for _ in range(3):  # scales that may lead into a spike
        directions.append(Q @ what_scales(score_w, mode))
        given = Conditionals.given(score_fn, metric, torch.stack(directions, 1))
        Q, score_w = given.Q, WhitenedScore(score_fn, given.plane(start.new_zeros(len(directions))))
        maps, _ = search_modes(score_w, start.new_zeros(1, Q.shape[1]), MAX_STEPS)
        if not maps:
            return None
        mode = maps[0]
        if not is_spike(mode):
            return by_profile(given, generator)
    return None


def what_scales(score_fn: DifferentiableScore, spike: Affine) -> Tensor:
    """Return the direction (d,), of those without curvature, in which the largest curvature at a spike grows."""
    variances, V = torch.linalg.eigh(spike.L @ spike.L.mT)
    flat, steepest = V[:, variances > variances[-1] / 10], V[:, 0]
    step = torch.maximum(variances[-1].sqrt(), 1e-3 * spike.m.norm())  # in steep ones curvature along them is rounded
    x = torch.cat([spike.m[None], spike.m + step * flat.mT])
    v = steepest.expand(len(x), -1).clone()
    curvature = -(score_fn.product(x, v) * v).sum(1)
    a = flat @ (curvature[1:] / curvature[0]).log()
    return a / a.norm()


# In warped coordinates

#: The stages of chains in warped coordinates.
STAGES = (40, 80)


def around_start(score_fn: Score, start: Tensor, generator: torch.Generator) -> Tensor:
    """Return points (n, d) of chains around a start (d,), in units of the parameters; none if the chains diverge."""
    try:
        *_, found = ChainEnsemble(score_fn, Affine.shift(start), generator).by_stages(STAGES)
    except DIVERGED:
        return start[None, :][:0]
    return found.x


def by_scales(score_fn: Score, x: Tensor, generator: torch.Generator) -> PilotPoints | None:
    """Return points by the profile along coordinates that scale others, if points x (n, d) show some and are not as
    those.
    """
    warp = fitted_warp(x)
    if warp is None or not warp.scalers:
        return None
    return profiled(score_fn, x, warp.scalers, generator, known=True)


def warped(score_fn: Score, x: Tensor, generator: torch.Generator) -> Iterator[PilotPoints]:
    """Yield points in coordinates that are fitted to points x (n, d), if chains converge there.

    Chains in these coordinates reach further than the points, so the coordinates are fitted again until nothing
    moves.
    """
    has_many = x.shape[1] >= MANY_FEATURES
    stages, most = (40, 80, 160) if has_many else STAGES, THRESHOLDS.moved[has_many]
    was_profiled = False
    try:
        for _ in range(4):
            score_fn.tally.begin("warped coordinates")
            warp = fitted_warp(x)
            if warp is None:
                return
            if warp.scalers and not (was_profiled or has_many):  # of many the profile is no more than a start
                was_profiled = True
                if (better := profiled(score_fn, x, warp.scalers, generator)) is not None:
                    yield better
                    return
            score_y, y = warp.pull_back(score_fn), warp.warp(x)[0]
            metric, moved = gaussian_of(y), math.inf
            refine = partial(_refined_along, score_y, warp.drivers, generator) if warp.drivers else None
            ensemble = ChainEnsemble(score_y, metric, generator, refine)
            for found in ensemble.by_stages(stages):
                u = metric.whiten(found.x)
                moved = min(moved, max(u.mean(0).abs().max().item(), u.std(0).log().abs().max().item()))
                if found.converged and moved < most and not _goes_astray(warp, found):
                    yield _finished(warp, found)
                    return
                if moved >= most and len(found.x) >= ensemble.n_chains * STAGES[0]:
                    break
            x = warp.unwarp(found.x)[0]
    except DIVERGED:
        return


def _finished(warp: Warp, found: PilotPoints) -> PilotPoints:
    """Return points with their coordinates, whose drivers have the tails of these points unless they are weighed."""
    if found.verdict.good and found.verdict.by == "weights":
        return found._replace(warp=warp)
    x = warp.unwarp(found.x)[0]
    shaped = reshaped(warp, x)
    return found._replace(x=shaped.warp(x)[0], mixture=None, warp=shaped)


def _refined_along(
    score_y: Score,
    drivers: list[int],
    generator: torch.Generator,
    metric: Affine,
    pilot: PilotPoints,
    drawn: list[BatchedDraws],
) -> PilotPoints:
    """Return a pilot with more points, searching along the drivers of coordinates where chains have not been."""
    plan = PLAIN._replace(least_rounds=6, forgets=True, keeps=False, along=metric.L[drivers], n_draws=1024)
    return refined_pilot(metric.pull_back(score_y), pilot, drawn, generator, plan)


def _goes_astray(warp: Warp, found: PilotPoints) -> bool:
    """Tell whether draws are far from all points in coordinates of the target, as if scales grew too fast."""
    draws = found.x if found.mixture is None else pilot_of_mixture(found.mixture, N_OF_GAUSSIAN).x
    x, y = warp.unwarp(found.x)[0], warp.unwarp(draws)[0]
    centre = x.median(0).values
    return not bool(((y - centre).abs().amax(0) < THRESHOLDS.astray * (x - centre).abs().amax(0)).all())
