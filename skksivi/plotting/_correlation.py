"""Correlations of a fit beside the reference's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import ArrayLike

from skksivi.metrics._correlation import correlation_error, correlations
from skksivi.plotting._base import COLOURS, FAINT, OfDraws, as_reference, as_samples, own_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PathCollection


@dataclass(kw_only=True, eq=False, repr=False)
class CorrelationDisplay(OfDraws):
    """Correlation coefficients of all pairs of coordinates, of the fit (vertical) against the reference (horizontal).

    Points of a right fit lie on the diagonal. The band is two standard errors to either side, from the numbers of
    draws, for normal coordinates.

    Parameters
    ----------
    samples : dict of str to ndarray of shape (n, d)
    reference : ndarray of shape (m, d)

    Attributes
    ----------
    ax_ : Axes
    figure_ : Figure
    points_ : list of PathCollection
        One of d (d - 1) / 2 points for each sample.

    See Also
    --------
    MarginalsDisplay : Marginals and pairs beside reference draws.
    skksivi.metrics.correlation_error : The error of pairwise correlations.

    Examples
    --------
    >>> import numpy as np
    >>> from skksivi.plotting import CorrelationDisplay
    >>> X, Y = np.random.RandomState(0).normal(size=(2, 1000, 22))
    >>> display = CorrelationDisplay.from_draws({"fit": X}, reference=Y)
    >>> display.points_[0].get_offsets().shape
    (231, 2)
    """

    samples: Mapping[str, np.ndarray]
    reference: np.ndarray

    @classmethod
    def from_draws(
        cls, X: ArrayLike | Mapping[str, ArrayLike], reference: ArrayLike, *, ax: Axes | None = None
    ) -> Self:
        """Show draws with reference draws.

        Parameters
        ----------
        X : array-like of shape (n, d), or dict of such by name
        reference : array-like of shape (m, d)
            Exact draws.
        ax : Axes, default=None
            Where to draw; None makes a figure.

        Returns
        -------
        display : CorrelationDisplay

        Raises
        ------
        ValueError
            The samples and the reference differ in their number of columns, which is two at least, or a column is
            constant.
        """
        samples = as_samples(X)
        exact = np.asarray(as_reference(reference, samples))
        for A in samples.values():
            correlation_error(A, exact)  # which says what cannot be compared
        return cls(samples=samples, reference=exact).plot(ax)

    def plot(self, ax: Axes | None = None) -> Self:
        """Draw.

        Parameters
        ----------
        ax : Axes, default=None
            Where to draw; None makes a figure.

        Returns
        -------
        self : CorrelationDisplay
        """
        ax = own_axes(ax, (4.8, 4.8))
        self.ax_, self.figure_ = ax, ax.figure
        expected = correlations(self.reference, "reference")
        r = np.linspace(-1, 1, 201)
        n = min(len(X) for X in self.samples.values())
        margin = 2 * (1 - r**2) * np.sqrt(1 / n + 1 / len(self.reference))
        ax.fill_between(r, r - margin, r + margin, color=FAINT, alpha=0.4, linewidth=0, zorder=0)
        ax.plot(r, r, color=FAINT, linewidth=0.8, zorder=0)
        self.points_: list[PathCollection] = []
        for k, (name, X) in enumerate(self.samples.items()):
            points = ax.scatter(
                expected, correlations(X, name), s=12, color=COLOURS[k % len(COLOURS)], alpha=0.7, linewidths=0
            )
            points.set_label(f"{name}, rms error {correlation_error(X, self.reference):.3f}")
            self.points_.append(points)
        everything = np.concatenate([points.get_offsets() for points in self.points_])
        low, high = everything.min(), everything.max()
        pad = 0.05 * max(high - low, 0.1)
        ax.set(xlim=(low - pad, high + pad), ylim=(low - pad, high + pad))
        ax.set_aspect("equal")
        ax.set(xlabel="correlation, reference", ylabel="correlation, fit")
        ax.legend(frameon=False, loc="upper left")
        return self
