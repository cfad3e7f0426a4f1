"""The coordinates of a fit, and what was learned on the way to them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from skksivi.coordinates._composed import Coordinates

#: What finds the map where no chains do.
LAPLACE, MATCHED, GIVEN = "Laplace approximation", "batch and match", "given coordinates"


@dataclass(kw_only=True)
class Whitening(Coordinates):
    """The coordinates x = m + L u of a fit, with results of the search for them.

    Attributes
    ----------
    map : Affine, LowRank or Identity
    warp : Curved or None
        A map from coordinates y in which a curved target is nearly Gaussian; `map` is then in these coordinates,
        y = m + L u.
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
    symmetries : ndarray of shape (n_symmetries, d) or None
        Permutations of the coordinates, such as the labels of a mixture, that leave the target invariant and map one
        mode to another. The modes that are images of each other have equal weights.
    ascents : ndarray of shape (2,) or None
        How many ascents of the last round of the search ended at a mode, and how many at a new one; None if no
        other modes were searched.
    found_by : str
        What has found the map and, with a pilot, its points.
    """

    modes: np.ndarray
    weights: np.ndarray
    n_score_calls: int = 0
    converged: bool = True
    mean: np.ndarray | None = None
    mean_se: np.ndarray | None = None
    sd: np.ndarray | None = None
    symmetries: np.ndarray | None = None
    ascents: np.ndarray | None = None
    found_by: str = LAPLACE

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
