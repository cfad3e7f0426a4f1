r"""The profile of a funnel: a mixture of Gaussians from which importance sampling starts.

Given :math:`A^\top u = c` the other coordinates have a conditional mode u(c) and, by the curvature there, a
conditional covariance :math:`R R^\top`. Laplace's approximation gives the marginal density of c,

.. math:: p(c) \propto p(u(c)) \, \det(R^\top R)^{1/2}.

From one value of c to the next, all of this is followed into the neck of the funnel. In the centred form of a
hierarchy, this is where its scale is small, and its members are far closer together than chains ever see them. In
that form the density has no bound either: a search for the mode ends in a spike, where the scale of a group is zero.
The mass is elsewhere; the profile along the logarithm of that scale finds it.

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

from skksivi.coordinates._affine import Affine, Plane, WhitenedScore
from skksivi.coordinates._lines import by_few_points, kronrod
from skksivi.pilot._mixture import Components
from skksivi.pilot._newton import MAX_STEPS, endless, is_spike, search_modes
from skksivi.score._score import DifferentiableScore, Score

#: The weight of a Gaussian along the profile that is the same for all.
SAME = 0.1


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


def profile(given: Conditionals) -> Components | None:
    """Return Gaussians in x along each direction, through the top of the marginal density; None where one of them has
    no end.
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
    return _mixture(lines).unwhitened(given.metric)


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
    before, climbed = None, [node]
    for _ in range(12):
        new = given.beside(node, j, step)
        if new is None:
            step /= 4
        elif new.log_marginal <= node.log_marginal:
            return before, node, new
        else:
            climbed.append(new)
            before, node, step = node, new, 2 * step
    _check_end(given, climbed, j)
    return None


def _check_end(given: Conditionals, climbed: Sequence[Node], j: int) -> None:
    """Refuse a marginal density that rises along direction j as fast at last as before, until rounding ends it.

    Raises
    ------
    ImproperError
    """
    c, height = ([get(node) for node in climbed] for get in (lambda n: n.c[j].item(), _log_marginal))
    slopes = [(height[i + 1] - height[i]) / abs(c[i + 1] - c[i]) for i in range(len(c) - 1)]
    rises = 50.0  # nats
    if len(slopes) > 4 and height[-1] - height[0] > rises and min(slopes[-3:]) > 0.9 * slopes[-5]:
        way = given.A[:, j] * (1 if c[-1] > c[0] else -1)
        i = int(way.abs().argmax())
        raise endless(f"{given.score_x.label(i)} -> {'' if way[i] > 0 else '-'}inf")


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


def out_of_spike(score_fn: Score, mode: Affine, start: Tensor) -> Components | None:
    """Return a mixture along all that leads into a spike from a start (d,); None where that has no end.

    Parameters
    ----------
    score_fn : Score
    mode : Affine
        Where the search for a mode ended.
    start : Tensor of shape (d,)
        Where it started.
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
            return profile(given)
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
