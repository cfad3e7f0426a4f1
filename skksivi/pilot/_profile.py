r"""The profile of a target along a coordinate, as a mixture of Gaussians from which importance sampling starts.

Given :math:`a^\top u = c` the other coordinates have a conditional mode u(c) and, by the curvature there, a
conditional covariance :math:`R R^\top`. Laplace's approximation gives the marginal density of c,

.. math:: p(c) \propto p(u(c)) \, \det(R^\top R)^{1/2}.

From one value of c to the next, all of this is followed into the neck of a funnel. In the centred form of a
hierarchy, this is where its scale is small, and its members are far closer together than chains ever see them.

References
----------
Rue, H., Martino, S. and Chopin, N. (2009). Approximate Bayesian inference for latent Gaussian models by using
integrated nested Laplace approximations. Journal of the Royal Statistical Society B 71(2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.pilot._affine import Affine, Plane, WhitenedScore
from skksivi.pilot._gaussian import covariance_root
from skksivi.pilot._importance import IMPORTANCE, PLAIN, pilot_with, plain_moments, resampled
from skksivi.pilot._lines import log_ratio
from skksivi.pilot._mixture import Components
from skksivi.pilot._newton import LOST, search_modes
from skksivi.pilot._points import PilotPoints
from skksivi.score._score import DifferentiableScore, Score


class ProfileSettings(NamedTuple):
    """The settings of `profiled`."""

    #: Values of c on either side of the centre at most, the first step and the longest, in standard deviations.
    n_values: int = 40
    first_step: float = 0.5
    longest_step: float = 2.0
    #: The change from one value to the next that steps aim at: of the logarithm of the conditional scale, over the
    #: root of the number of features, plus a third of that of the marginal density.
    change: float = 0.7
    #: Steps of the search for the first conditional mode, and for the next ones, which are near.
    max_steps: tuple[int, int] = (60, 12)
    #: The logarithm of the marginal density below its largest at which a side ends, and which it has to reach.
    depth: float = 7.0
    least_depth: float = 4.0
    #: The standard deviation of a Gaussian along the profile, in distances of its neighbours; the weight that is the
    #: same for all.
    width: float = 0.5
    same: float = 0.1
    #: Draws of a round, the most rounds, and the effective share of the draws from which on they count.
    n_draws: int = 2048
    n_rounds: int = 8
    least_share: float = 0.05
    #: The standard errors that will do, before the last round and after it; the round after which errors above the
    #: last number end the search.
    max_se: tuple[float, float] = (0.03, 0.05)
    soon: int = 3
    most_se: float = 0.1
    #: As how many draws, for each feature, a Gaussian counts when it is fitted to them.
    strength: float = 20.0


PROFILE = ProfileSettings()


class Node(NamedTuple):
    """The conditional mode u (d,) at c, a root R (d, d - 1) of the conditional covariance, and log p(u) and log p(c),
    up to a constant.
    """

    c: float
    u: Tensor
    root: Tensor
    height: float
    log_marginal: float

    @property
    def log_scale(self) -> float:
        """The logarithm of the conditional scale."""
        return self.log_marginal - self.height


def profiled(score_fn: Score, x: Tensor, scalers: Sequence[int], generator: torch.Generator) -> PilotPoints | None:
    """Return points by importance from the profiles along some coordinates, None where they do not converge.

    Parameters
    ----------
    score_fn : Score
    x : Tensor of shape (n, d)
        Points near the target, for the centre and the units.
    scalers : sequence of int
        The coordinates on which the scales of others depend.
    generator : torch.Generator
    """
    metric = Affine(x.mean(0), covariance_root(x))
    try:
        profiles = [profile(score_fn, metric, metric.L[j]) for j in scalers]
    except LOST:
        return None
    known = [each for each in profiles if each is not None]
    if len(known) < len(profiles):
        return None
    found = _converged(metric.pull_back(score_fn), Components.together(known), generator)
    return None if found is None else found.unwhitened(metric)


def _converged(score_u: DifferentiableScore, start: Components, generator: torch.Generator) -> PilotPoints | None:
    """Return points by importance from a mixture that is fitted to them again and again, None if few of them count.

    The mixture is not moved as a whole to the moments of the draws: a move that is short for the mass would leave the
    neck.
    """
    mixture, drawn, d = start, list[Tensor](), start.means.shape[1]
    plan = PLAIN._replace(n_draws=PROFILE.n_draws, least_share=PROFILE.least_share)
    for i in range(1, PROFILE.n_rounds + 1):
        score_u.tally.begin("importance sampling", 2 * PROFILE.n_draws)
        found = resampled(score_u, mixture, generator, plan)
        if found is None:
            return None
        draws, (divergence, _) = found
        drawn.append(draws.u)
        u, by = torch.cat(drawn).flatten(0, 1), plain_moments(torch.cat(drawn))
        mixture = start.fitted_to(u, PROFILE.strength * d)
        if divergence <= IMPORTANCE.near * d and by.se <= PROFILE.max_se[i == PROFILE.n_rounds]:
            return pilot_with(u, by)._replace(converged=True, mixture=mixture)
        if i == PROFILE.soon and by.se > PROFILE.most_se:
            return None
    return None


def profile(score_x: Score, metric: Affine, a: Tensor) -> Components | None:
    """Return Gaussians of u, x = m + L u, along the profile by a^T u, a of shape (d,), None where that has no end."""
    a = a / a.norm()
    Q = torch.linalg.qr(torch.cat([a[:, None], torch.eye(len(a)).to(a)], 1)).Q[:, 1:]
    centre = _node(score_x, metric, a, Q)
    if centre is None:
        return None
    below, above = (_side(score_x, metric, a, Q, centre, side) for side in (-1, 1))
    nodes = [*reversed(below), centre, *above]
    ends = max(nodes[0].log_marginal, nodes[-1].log_marginal)
    return _mixture(nodes) if len(nodes) > 2 and ends < _top(nodes) - PROFILE.least_depth else None


def _side(score_x: Score, metric: Affine, a: Tensor, Q: Tensor, centre: Node, side: int) -> list[Node]:
    """Return the nodes from the centre to where the marginal density is small, or to the last that is found."""
    nodes, step = [centre], PROFILE.first_step
    while len(nodes) <= PROFILE.n_values and nodes[-1].log_marginal > _top(nodes) - PROFILE.depth:
        last = nodes[-1]
        node = _node(score_x, metric, a, Q, last.c + side * step, last)
        if node is None:
            break
        nodes.append(node)
        change = abs(node.log_scale - last.log_scale) / math.sqrt(len(a))
        change += abs(node.log_marginal - last.log_marginal) / 3
        step = min(PROFILE.longest_step, step * min(2.0, max(0.5, PROFILE.change / max(change, 1e-9))))
    return nodes[1:]


def _top(nodes: Sequence[Node]) -> float:
    """Return the largest logarithm of the marginal density."""
    return max(node.log_marginal for node in nodes)


def _node(
    score_x: Score, metric: Affine, a: Tensor, Q: Tensor, c: float = 0.0, last: Node | None = None
) -> Node | None:
    """Return the node at c, from the last one, with orthonormal Q (d, d - 1) across a; None where it is not found."""
    plane = Plane(metric.unwhiten(c * a[None])[0], metric.L @ Q)
    start = a.new_zeros(len(a) - 1) if last is None else last.u @ Q
    maps, converged = search_modes(WhitenedScore(score_x, plane), start[None], PROFILE.max_steps[last is not None])
    if not maps or not converged[0]:
        return None
    u, height = c * a + Q @ maps[0].m, 0.0
    if last is not None:
        score_u, ends = metric.pull_back(score_x), torch.stack([last.u, u])
        gain = log_ratio(score_u, *ends) if score_u.log_prob is None else score_u.log_prob(ends).diff()
        height = last.height + gain.item()
    if not math.isfinite(height):
        return None
    return Node(c, u, Q @ maps[0].L, height, height + maps[0].log_determinant().item())


def _mixture(nodes: Sequence[Node]) -> Components:
    """Return a Gaussian about each node, as wide along the profile as neighbours are apart."""
    u, roots = (torch.stack(parts) for parts in zip(*((node.u, node.root) for node in nodes), strict=True))
    c, log_marginal = u.new_tensor([(node.c, node.log_marginal) for node in nodes]).mT
    (slopes,), (gaps,) = torch.gradient(u, spacing=(c,), dim=0), torch.gradient(c)
    v = PROFILE.width * gaps[:, None] * slopes
    weights = (log_marginal + gaps.log()).softmax(0)
    weights = (1 - PROFILE.same) * weights + PROFILE.same / len(nodes)
    return Components(weights, u, roots @ roots.mT + v[:, :, None] * v[:, None])
