"""Points near a target, and what is known of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.coordinates._affine import Affine, AffineMap
from skksivi.coordinates._curved import Curved
from skksivi.pilot._gaussian import GAUSSIAN, covariance_root
from skksivi.pilot._mixture import Components, fitted_mixture
from skksivi.score._score import ScoreFunction

#: Points for each feature that a covariance takes.
FEW = 20

#: Features from which on points that have not converged will do if no standard error of a mean, in standard
#: deviations, is above the second number.
MANY_FEATURES, SMALL_ERROR = 30, 0.1


def are_known(n_features: int, *, converged: bool, error: float) -> bool:
    """Tell whether the points that have these errors tell the moments of a target."""
    return converged or (n_features >= MANY_FEATURES and error < SMALL_ERROR)


class PilotPoints(NamedTuple):
    """Points near the target, with their properties.

    Attributes
    ----------
    x : Tensor of shape (n, d)
        Points, sorted by the mode they are near.
    n_of_mode : list of int
        Number of points near each mode.
    mean_se : Tensor of shape (d,)
        Standard errors of their mean, from the spread over independent chains.
    converged : bool
        Whether the earlier and the later half of the points agree.
    dense : bool
        Whether there is mass between the points of a mode.
    mixture : Components or None
        A mixture fitted to the points.
    warp : Curved or None
        The map to the coordinates of the target, if the points are in its coordinates y.
    """

    x: Tensor
    n_of_mode: list[int]
    mean_se: Tensor
    converged: bool
    dense: bool = True
    mixture: Components | None = None
    warp: Curved | None = None

    def map(self) -> Affine:
        """Return the map by mean and covariance; if points are too few, by the covariance of their only Gaussian."""
        n, d = self.x.shape
        if self.mixture is not None and len(self.mixture.weights) == 1 and n < FEW * d:
            return self.mixture.map()
        return Affine(self.x.mean(0), covariance_root(self.x))

    @property
    def error(self) -> float:
        """The largest standard error of a mean, in standard deviations."""
        return (self.mean_se / self.x.std(0)).max().item()

    def of_modes(self) -> Sequence[Tensor]:
        """Return the points of each mode."""
        return self.x.split(self.n_of_mode)

    def thinned(self, n: int) -> PilotPoints:
        """Return at most about n of the points, the same share of each mode."""
        every = -(-len(self.x) // n)
        parts = [part[::every] for part in self.of_modes()]
        return self._replace(x=torch.cat(parts), n_of_mode=[len(part) for part in parts])

    def whitened(self, map: AffineMap, dtype: torch.dtype) -> PilotPoints:  # noqa: A002
        """Return the points in the coordinates of a map."""
        return self._replace(x=map.whiten(self.x).to(dtype))

    def mixture_in(self, map: AffineMap, generator: torch.Generator) -> Components:  # noqa: A002
        """Return a mixture for these points in the coordinates of a map."""
        if self.mixture is not None and isinstance(map, Affine):
            return self.mixture.whitened(map)
        return fitted_mixture(self._replace(x=map.whiten(self.x)).of_modes(), generator)

    def unwhitened(self, map: Affine) -> PilotPoints:  # noqa: A002
        """Return the points in x, given points in u, with errors that hold for any correlation."""
        scale = map.L.norm(dim=1)
        mixture = None if self.mixture is None else self.mixture.unwhitened(map)
        return self._replace(x=map.unwhiten(self.x), mean_se=self.mean_se.max() * scale, mixture=mixture)

    def conditional_sd(self, score_fn: ScoreFunction, map: AffineMap) -> Tensor:  # noqa: A002
        r"""Return the standard deviations (d,) of the coordinates u of a map given the others.

        By Stein's identity the mean of their inverse squares is :math:`E s_i^2 = E[-\partial_i s_i]`. A few rows do.
        They are capped at one, the marginal standard deviation of u, which points not yet at the target would exceed.
        """
        x = self.x[:: max(1, len(self.x) // GAUSSIAN.n_draws)]
        return map.whiten_score(score_fn(x).detach()).square().mean(0).rsqrt().clamp_max(1.0)

    def width_within(self) -> Tensor:
        """Return the interquartile ranges (d,) within the narrowest mode, in units of a normal's deviation.

        Heavy tails do not affect them.
        """
        quartiles = self.x.new_tensor([0.25, 0.75])
        ranges = [part.quantile(quartiles, dim=0).diff(dim=0)[0] for part in self.of_modes()]
        return torch.stack(ranges).amin(0) / 1.349
