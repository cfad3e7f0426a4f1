"""Points of a target of few features by a tree of cells: no chain gets around what is rugged, or a thin ridge."""

from __future__ import annotations

import torch
from torch import Tensor

from skksivi.coordinates._affine import Affine
from skksivi.pilot._mixture import Components
from skksivi.score._score import ScoreFunction

#: The name of this source, and features up to which it is asked.
CELLS, MOST_CELLED = "tree of cells", 3

#: Cells along each axis at first, by the number of features.
N_FIRST = {1: 256, 2: 32, 3: 12}

#: Half the width of the first box, in sd, and how often it may be doubled.
WIDTH, MOST_DOUBLED = 8.0, 4

#: Calls at most, cells that are split at once, and how many must count.
MOST_CALLS, N_SPLIT, LEAST_CELLS = 24_000, 400, 200

#: The largest share of a cell at the end.
MOST_SHARE = 1 / 1000

#: Points that are drawn from the cells, how many make a Gaussian, and the power of p by which they are drawn, so that
#: there are some in the tails.
N_POINTS, N_OF_GAUSSIAN, POWER = 2**16, 128, 0.7


def points_of_cells(
    log_prob: ScoreFunction, map_: Affine, reach: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return points (n, d) of the cells of a tree, and their weights (n,).

    Parameters
    ----------
    log_prob : callable
        Maps points x (n, d) to log p (n,).
    map_ : Affine
        By whose axes the cells are split.
    reach : float
        How far from its centre there is mass for sure, in its units.
    generator : torch.Generator
    """
    width = max(WIDTH, 1.5 * reach)
    for _ in range(MOST_DOUBLED):
        tree = Tree(log_prob, map_, width)
        tree.grow()
        if tree.at_border() < 1e-3:
            break
        width *= 2
    u, weights = tree.points(N_POINTS, generator)
    return map_.unwhiten(u), weights


class Tree:
    """Cells with centres u (n, d) and half widths h (n, d) in the coordinates of a map, and log p (n,) at the centre.

    They are split in three along the axis in which log p differs most, first by a power of p so small that many cells
    count, so that what is thin is found from where it is near.
    """

    def __init__(self, log_prob: ScoreFunction, map_: Affine, width: float) -> None:
        d = len(map_.m)
        self.log_prob, self.map, self.width, self.n_calls, n = log_prob, map_, width, 0, N_FIRST[d]
        axis = (torch.arange(n).to(map_.m) + 0.5) * (2 * width / n) - width
        self.u = torch.cartesian_prod(*[axis] * d).view(-1, d)
        self.h, self.log_p = torch.full_like(self.u, width / n), self._at(self.u)

    def grow(self) -> None:
        """Split cells until none holds much of the mass."""
        while self.n_calls < MOST_CALLS:
            power = self._power()
            shares = self._shares(power)
            least = MOST_SHARE if power == 1 else 0.1 / len(shares)
            rows = shares.argsort(descending=True)[:N_SPLIT]
            rows = rows[shares[rows] > least]
            if not len(rows):
                break
            self._split(rows)

    def at_border(self) -> float:
        """Return the share of the mass of cells at the border."""
        outer = (self.u.abs() + 1.5 * self.h > self.width).any(1)
        return float(self._shares(1.0)[outer].sum())

    def points(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return points (n, d), uniform within cells that are picked by a power of p, and their weights (n,)."""
        rows = torch.multinomial(self._shares(POWER), n, replacement=True, generator=generator)
        jitter = 2 * torch.rand(n, self.u.shape[1], generator=generator, device=self.u.device).to(self.u) - 1
        return self.u[rows] + self.h[rows] * jitter, ((1 - POWER) * self.log_p[rows]).softmax(0)

    def _at(self, u: Tensor) -> Tensor:
        self.n_calls += len(u)
        return self.log_prob(self.map.unwhiten(u)).nan_to_num(-1e300, 1e300, -1e300)

    def _shares(self, power: float) -> Tensor:
        return (self.h.log().sum(1) + power * self.log_p).softmax(0)

    def _power(self) -> float:
        """Return the largest power of p, at most one, by which enough cells count."""
        low, high = 0.0, 1.0
        if 1 / self._shares(1.0).square().sum() >= LEAST_CELLS:
            return 1.0
        for _ in range(30):
            power = (low + high) / 2
            low, high = (power, high) if 1 / self._shares(power).square().sum() >= LEAST_CELLS else (low, power)
        return low

    def _split(self, rows: Tensor) -> None:
        """Split cells in three, along the axis in which log p differs most from that at the centre."""
        (u, h, log_p), d = (self.u[rows], self.h[rows], self.log_p[rows]), self.u.shape[1]
        steps = torch.diag_embed(2 / 3 * h)  # (n, d, d)
        sides = torch.stack([u[:, None] + steps, u[:, None] - steps], 1)  # (n, 2, d, d)
        at_sides = self._at(sides.reshape(-1, d)).view(len(rows), 2, d)
        axis = (at_sides - log_p[:, None, None]).abs().clamp_max(1e300).sum(1).argmax(1)
        each = torch.arange(len(rows), device=u.device)
        narrow = h.clone()
        narrow[each, axis] /= 3
        self.h[rows] = narrow
        self.u = torch.cat([self.u, sides[each, 0, axis], sides[each, 1, axis]])
        self.h = torch.cat([self.h, narrow, narrow])
        self.log_p = torch.cat([self.log_p, at_sides[each, 0, axis], at_sides[each, 1, axis]])


def gaussians_of_parts(x: Tensor, w: Tensor) -> Components:
    """Return a mixture of a Gaussian for each part of points x (n, d) with weights w (n,), which are halved along
    their longest axis.
    """
    parts, found = [torch.arange(len(x), device=x.device)], list[tuple[Tensor, Tensor, Tensor]]()
    while parts:
        rows = parts.pop()
        share = w[rows].sum()
        p, y = w[rows] / share, x[rows]
        away = y - p @ y
        covariance = (p * away.mT) @ away
        if len(rows) < 2 * N_OF_GAUSSIAN:
            found.append((share, p @ y, 1.5 * covariance))
            continue
        order = rows[(away @ torch.linalg.eigh(covariance)[1][:, -1]).argsort()]
        parts += order.chunk(2)
    return Components(*(torch.stack(each) for each in zip(*found, strict=True)))
