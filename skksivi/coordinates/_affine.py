r"""Affine maps x = m + L u, and the score of a target in the coordinates u."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.score._score import Score, ScoreFunction, Wrapped, central_difference

#: Larger numbers are taken to be infinite.
FAR = 1e75


def standard_normal(n: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw n rows of standard normal numbers, with the columns, dtype and device of `like`."""
    return torch.randn(n, like.shape[-1], generator=generator, dtype=like.dtype, device=like.device)


class Affine(NamedTuple):
    """The map x = m + L u: m of shape (d,), L lower triangular of shape (d, d)."""

    m: Tensor
    L: Tensor

    @classmethod
    def shift(cls, m: Tensor) -> Affine:
        """Return the map x = m + u."""
        return cls(m, torch.eye(len(m), dtype=m.dtype, device=m.device))

    def pull_back(self, score_fn: Score) -> WhitenedScore:
        """Return the score of u in the type and on the device of the score of x."""
        m, L = (a.to(dtype=score_fn.dtype, device=score_fn.device) for a in self)
        return WhitenedScore(score_fn, Affine(m, L))

    def whiten(self, x: Tensor) -> Tensor:
        """Return u of shape (n, d)."""
        return torch.linalg.solve_triangular(self.L, (x - self.m).mT, upper=False).mT

    def unwhiten(self, u: Tensor) -> Tensor:
        """Return x of shape (n, d)."""
        return self.m + u @ self.L.mT

    def whiten_score(self, s: Tensor) -> Tensor:
        r"""Return the score in u, :math:`s_u = L^\top s_x`, of shape (n, d)."""
        return s @ self.L

    def unwhiten_direction(self, v: Tensor) -> Tensor:
        """Return L v for rows v of shape (n, d)."""
        return v @ self.L.mT

    def log_determinant(self) -> Tensor:
        """Return log det L."""
        return self.L.diagonal().log().sum()


class LowRank(NamedTuple):
    r"""The map x = m + D (I + V diag(r - 1) V^T) u of many dimensions: a scale for each coordinate, and r in a few
    directions.

    m and D are of shape (d,), V of shape (d, k) with orthonormal columns, r of shape (k,).
    """

    m: Tensor
    D: Tensor
    V: Tensor
    r: Tensor

    def pull_back(self, score_fn: Score) -> WhitenedScore:
        """Return the score of u in the type and on the device of the score of x."""
        return WhitenedScore(score_fn, LowRank(*(a.to(dtype=score_fn.dtype, device=score_fn.device) for a in self)))

    def _stretched(self, u: Tensor, r: Tensor) -> Tensor:
        return u + (u @ self.V * (r - 1)) @ self.V.mT

    def whiten(self, x: Tensor) -> Tensor:
        """Return u of shape (n, d)."""
        return self._stretched((x - self.m) / self.D, 1 / self.r)

    def unwhiten(self, u: Tensor) -> Tensor:
        """Return x of shape (n, d)."""
        return self.m + self.unwhiten_direction(u)

    def whiten_score(self, s: Tensor) -> Tensor:
        r"""Return the score in u, :math:`s_u = L^\top s_x`, of shape (n, d)."""
        return self._stretched(s * self.D, self.r)

    def unwhiten_direction(self, v: Tensor) -> Tensor:
        """Return L v for rows v of shape (n, d)."""
        return self.D * self._stretched(v, self.r)

    def log_determinant(self) -> Tensor:
        return self.D.log().sum() + self.r.log().sum()


class Identity(NamedTuple):
    """The map x = u: m is zero, of shape (d,)."""

    m: Tensor

    def pull_back(self, score_fn: Score) -> Score:
        return score_fn

    def whiten(self, x: Tensor) -> Tensor:
        return x

    def unwhiten(self, u: Tensor) -> Tensor:
        return u

    def whiten_score(self, s: Tensor) -> Tensor:
        return s

    def unwhiten_direction(self, v: Tensor) -> Tensor:
        return v

    def log_determinant(self) -> float:
        return 0.0


class Plane(NamedTuple):
    """The map x = m + A w into a hyperplane: m of shape (d,), A of shape (d, d - 1)."""

    m: Tensor
    A: Tensor

    def unwhiten(self, w: Tensor) -> Tensor:
        """Return x of shape (n, d)."""
        return self.m + w @ self.A.mT

    def whiten_score(self, s: Tensor) -> Tensor:
        r"""Return the score in w, :math:`s_w = A^\top s_x`, of shape (n, d - 1)."""
        return s @ self.A

    def unwhiten_direction(self, v: Tensor) -> Tensor:
        """Return A v for rows v of shape (n, d - 1)."""
        return v @ self.A.mT


#: The maps of a `Whitening`.
AffineMap = Affine | LowRank | Identity


@dataclass(frozen=True)
class WhitenedScore(Wrapped):
    r"""The score in u, :math:`s_u(u) = L^\top s_x(m + L u)`, in the dtype of m and L, returned in the dtype of u."""

    score: Score
    map: AffineMap | Plane

    @property
    def log_prob(self) -> ScoreFunction | None:
        """The density of u up to a constant, if the density of x is known."""
        log_prob = self.score.log_prob
        return None if log_prob is None else lambda u: log_prob(self.map.unwhiten(u.to(self.map.m))).to(u)

    def __call__(self, u: Tensor) -> Tensor:
        """Evaluate the score at u (n, d)."""
        return self._at(u.to(self.map.m)).to(u)

    def with_pullback(self, u: Tensor) -> tuple[Tensor, ScoreFunction]:
        """Return the score at u (n, d), and the map of v to J_u^T v = L^T J_x^T L v.

        Finite differences are taken along u, where one step suits every coordinate.
        """
        if self.score.by_differences:
            return self(u), lambda v: self.product(u, v)
        self.score.tally.add(values=len(u))
        s, pull = self._differentiated(u)
        return self.map.whiten_score(s).to(u), pull

    def _differentiated(self, u: Tensor) -> tuple[Tensor, ScoreFunction]:
        """Return the score of x at u (n, d), and the pullback, by differences in u where it is not finite."""
        s, pull = self.score.differentiated(self.map.unwhiten(u.to(self.map.m)))

        def pullback(v: Tensor) -> Tensor:
            product = self.map.whiten_score(pull(self.map.unwhiten_direction(v.to(s))))
            return self.score.tally.mended(product, lambda rows: self._differences(u[rows], v[rows])).to(v)

        return s, pullback

    def product(self, u: Tensor, v: Tensor) -> Tensor:
        """Return J_u^T v for points u (n, d) and directions v (n, d), without the score."""
        if self.score.by_differences:
            return self._differences(u, v).to(v)
        return self._differentiated(u)[1](v)

    def _differences(self, u: Tensor, v: Tensor) -> Tensor:
        double = self.score.double
        return central_difference(replace(self, score=double), u.to(self.map.m), v.to(self.map.m), double.step)

    def _at(self, u: Tensor) -> Tensor:
        return self.map.whiten_score(self.score(self.map.unwhiten(u)))
