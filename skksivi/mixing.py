r"""Distributions of the latent z of a semi-implicit family, and of the base of a hierarchy.

A ReLU network of Gaussian z has Gaussian tails: heavy tails of x come from those of z, through the linear skip.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator

from skksivi import _families

__all__ = ["GaussianMixture", "Normal", "StudentT"]


class Normal(BaseEstimator):
    """The standard normal.

    Examples
    --------
    >>> from skksivi import KSIVIApproximator
    >>> from skksivi.mixing import Normal
    >>> KSIVIApproximator(mixing=Normal())
    KSIVIApproximator(mixing=Normal())
    """

    def build(self, latent_dim: int) -> _families.Mixing:
        """Return the sampler of z in `latent_dim` dimensions."""
        return _families.Normal(latent_dim)


class StudentT(BaseEstimator):
    """Independent Student t entries.

    Parameters
    ----------
    df : float, default=3.0
        Degrees of freedom > 0; the tails of x fall as those of the smallest that the target has at best.

    Examples
    --------
    >>> from skksivi import KSIVIApproximator
    >>> from skksivi.mixing import StudentT
    >>> KSIVIApproximator(mixing=StudentT(df=2.0))
    KSIVIApproximator(mixing=StudentT(df=2.0))
    """

    def __init__(self, df: float = 3.0) -> None:
        self.df = df

    def build(self, latent_dim: int) -> _families.Mixing:
        """Return the sampler of z in `latent_dim` dimensions."""
        if not 0 < self.df < math.inf:
            raise ValueError(f"`df` of StudentT must be a positive number, got {self.df!r}.")
        return _families.StudentT(latent_dim, float(self.df))


class GaussianMixture(BaseEstimator):
    """A mixture of spherical Gaussians.

    Parameters
    ----------
    means : array-like of shape (k, latent_dim)
    scales : float or array-like of shape (k,), default=1.0
        Standard deviations.
    weights : array-like of shape (k,), default=None
        They need not sum to one; None means equal ones.

    Examples
    --------
    >>> from skksivi.mixing import GaussianMixture
    >>> GaussianMixture([[-3.0, 0.0], [3.0, 0.0]]).build(2).latent_dim
    2
    """

    def __init__(self, means: ArrayLike, scales: Any = 1.0, weights: Any = None) -> None:
        self.means = means
        self.scales = scales
        self.weights = weights

    def build(self, latent_dim: int) -> _families.Mixing:
        """Return the sampler of z in `latent_dim` dimensions."""
        means = np.asarray(self.means, dtype=np.float64)
        if means.ndim != 2 or means.shape[1] != latent_dim or not len(means) or not np.isfinite(means).all():
            raise ValueError(f"`means` must be finite, of shape (k, {latent_dim}), got shape {means.shape}.")
        scales = np.asarray(self.scales, dtype=np.float64)
        scales = np.full(len(means), scales) if scales.ndim == 0 else scales
        weights = np.ones(len(means)) if self.weights is None else np.asarray(self.weights, dtype=np.float64)
        for name, values in (("scales", scales), ("weights", weights)):
            if values.shape != (len(means),) or not (np.isfinite(values) & (values > 0)).all():
                raise ValueError(f"`{name}` must be {len(means)} positive numbers, got {getattr(self, name)!r}.")
        parts = (torch.from_numpy(a.copy()) for a in (means, scales, weights / weights.sum()))
        return _families.GaussianMixture(*parts)


def build_mixing(mixing: Any, latent_dim: int) -> _families.Mixing:
    """Return the sampler of a name, which means the normal, of an object of this module or of a function."""
    if isinstance(mixing, str):
        return _families.Normal(latent_dim)
    if isinstance(mixing, type):
        raise TypeError(f"`mixing` is the class {mixing.__name__}; give an object of it, {mixing.__name__}(...).")
    return mixing.build(latent_dim) if hasattr(mixing, "build") else _families.Sampler(mixing, latent_dim)
