"""The coordinates of a fit, and what was learned on the way to them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from skksivi.coordinates._affine import AffineMap
from skksivi.coordinates._curved import Curved
from skksivi.score._score import Score

#: What finds the map where no chains do.
LAPLACE, MATCHED, GIVEN = "Laplace approximation", "batch and match", "given coordinates"


@dataclass
class Whitening:
    """The map x = m + L u of a fit, with results of the search for it.

    Attributes
    ----------
    map : Affine, LowRank or Identity
    modes : ndarray of shape (n_modes, d)
        Modes found, best first; none if the map was given.
    weights : ndarray of shape (n_modes,)
        Their shares of the target by Laplace's approximation, heights compared by line integrals of the score.
    n_score_calls : int
        Points at which the score was evaluated.
    converged : bool
        Whether the chains of the pilot agreed with each other at their end.
    mean, mean_se, sd : ndarray of shape (d,) or None
        Moments of the pilot, and standard errors of its mean; with whiten="auto" and "diagonal".
    warp : Curved or None
        A map from coordinates y in which a curved target is nearly Gaussian; `map` is then in these coordinates,
        y = m + L u.
    symmetries : ndarray of shape (n_symmetries, d) or None
        Permutations of the coordinates, such as the labels of a mixture, that leave the target invariant and map one
        mode to another. The modes that are images of each other have equal weights.
    ascents : ndarray of shape (2,) or None
        How many ascents of the last round of the search ended at a mode, and how many at a new one; None if no
        other modes were searched.
    found_by : str
        What has found the map and, with a pilot, its points.
    """

    map: AffineMap
    modes: np.ndarray
    weights: np.ndarray
    n_score_calls: int = 0
    converged: bool = True
    mean: np.ndarray | None = None
    mean_se: np.ndarray | None = None
    sd: np.ndarray | None = None
    warp: Curved | None = None
    symmetries: np.ndarray | None = None
    ascents: np.ndarray | None = None
    found_by: str = LAPLACE

    def seen(self, score: Score) -> Score:
        """Return the score in the coordinates of the map."""
        return score if self.warp is None else self.warp.pull_back(score)

    def whiten(self, x: Tensor) -> Tensor:
        """Return u (n, d) of points x (n, d)."""
        return self.map.whiten(x if self.warp is None else self.warp.warp(x)[0])

    def to(self, device: torch.device) -> Whitening:
        """Return the same with its map on a device."""
        if self.map.m.device == device:
            return self
        warp = None if self.warp is None else self.warp.to(device)
        return replace(self, map=type(self.map)(*(a.to(device) for a in self.map)), warp=warp)

    @property
    def m(self) -> np.ndarray:
        """The shift, shape (d,)."""
        return self.map.m.cpu().numpy()

    @property
    def L(self) -> np.ndarray:  # noqa: N802
        """The factor of the covariance, shape (d, d); lower triangular up to 1,000 features."""
        m = self.map.m
        return self.map.unwhiten_direction(torch.eye(len(m), dtype=m.dtype, device=m.device)).mT.cpu().numpy()

    @property
    def error(self) -> float:
        """The largest standard error of the mean, in standard deviations; inf where there is none."""
        return math.inf if self.mean_se is None or self.sd is None else float((self.mean_se / self.sd).max())

    @property
    def unseen(self) -> float:
        """The share of the ascents of the last round of the search that found a new mode; nan without ascents."""
        n, n_new = (0, 0) if self.ascents is None else self.ascents.tolist()
        return n_new / n if n else math.nan

    def missed(self, share: float) -> float:
        """Return the probability that the last round missed a mode to which this share of its ascents leads.

        Raises
        ------
        ValueError
            `share` is not from 0 to 1.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"`share` is a share of the ascents, from 0 to 1, got {share}.")
        n = 0 if self.ascents is None else int(self.ascents[0])
        return float((1 - share) ** n)

    @property
    def condition(self) -> float:
        """The condition number of the covariance L L^T."""
        return float(np.linalg.cond(self.L)) ** 2
