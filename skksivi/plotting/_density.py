"""Draws in the plane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import ArrayLike

from skksivi.plotting._base import (
    COLOURS,
    HasLogProb,
    OfDraws,
    as_samples,
    box_and_levels,
    check_target,
    draw_contours,
    own_axes,
    thinned,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PathCollection, QuadMesh


@dataclass(kw_only=True, eq=False, repr=False)
class DensityDisplay(OfDraws):
    """Draws in two dimensions under the contours of a target.

    Parameters
    ----------
    X : ndarray of shape (n, 2)
    target : Target, default=None
        With `log_prob`; the lines enclose 50, 90 and 99% of its mass.

    Attributes
    ----------
    ax_ : Axes
    figure_ : Figure
    cloud_ : PathCollection or QuadMesh
        The draws.
    contours_ : QuadContourSet or None

    See Also
    --------
    MarginalsDisplay : Marginals and pairs beside reference draws.
    LayersDisplay : The layers of a hierarchy.

    Examples
    --------
    >>> from skksivi.baselines import Laplace
    >>> from skksivi.plotting import DensityDisplay
    >>> from skksivi.targets import Banana
    >>> display = DensityDisplay.from_estimator(Laplace().fit(Banana()), Banana())
    >>> display.figure_.savefig("density.png")  # doctest: +SKIP
    """

    X: np.ndarray
    target: HasLogProb | None = None

    @classmethod
    def from_draws(
        cls,
        X: ArrayLike,
        target: HasLogProb | None = None,
        *,
        kind: str = "scatter",
        extent: Sequence[float] | None = None,
        ax: Axes | None = None,
    ) -> Self:
        """Show draws.

        Parameters
        ----------
        X : array-like of shape (n, 2)
        target : Target, default=None
            With two features and `log_prob`.
        kind : {"scatter", "histogram"}, default="scatter"
            Up to 2,000 points, or the number of all draws in small squares, whose shades follow its square root.
        extent : (x0, x1, y0, y1), default=None
            The box to show; None finds one that holds the draws and the target's mass near them.
        ax : Axes, default=None
            Where to draw; None makes a figure.

        Returns
        -------
        display : DensityDisplay

        Raises
        ------
        TypeError
            The target has no `log_prob`.
        ValueError
            X or the target has not two features, or `kind` is unknown.
        """
        (X,) = as_samples(X).values()
        if X.shape[1] != 2:
            raise ValueError(f"`X` has {X.shape[1]} columns, expected 2; show pairs of more by MarginalsDisplay.")
        check_target(target)
        return cls(X=X, target=target).plot(ax, kind=kind, extent=extent)

    def plot(self, ax: Axes | None = None, *, kind: str = "scatter", extent: Sequence[float] | None = None) -> Self:
        """Draw.

        Parameters
        ----------
        ax : Axes, default=None
            Where to draw; None makes a figure.
        kind : {"scatter", "histogram"}, default="scatter"
        extent : (x0, x1, y0, y1), default=None

        Returns
        -------
        self : DensityDisplay
        """
        if kind not in ("scatter", "histogram"):
            raise ValueError(f"`kind` must be 'scatter' or 'histogram', got {kind!r}.")
        if extent is not None and len(extent) != 4:
            raise ValueError(f"`extent` must be four numbers, x0, x1, y0 and y1, got {extent!r}.")
        found, levels = box_and_levels([self.X], self.target)
        x0, x1, y0, y1 = found if extent is None else extent
        ax = own_axes(ax, (4.8, 4.8))
        self.ax_, self.figure_ = ax, ax.figure
        if kind == "scatter":
            x, y = thinned(self.X).T
            self.cloud_: PathCollection | QuadMesh = ax.scatter(x, y, s=6, color=COLOURS[0], alpha=0.4, linewidths=0)
        else:
            bins = [np.linspace(x0, x1, 101), np.linspace(y0, y1, 101)]
            from matplotlib.colors import PowerNorm

            # shades follow the root of the counts, so that thin parts are visible beside the peak
            shades = PowerNorm(0.5, vmin=0)
            self.cloud_ = ax.hist2d(self.X[:, 0], self.X[:, 1], bins=bins, cmap="Blues", cmin=1, norm=shades)[-1]
        self.contours_ = None if self.target is None else draw_contours(ax, self.target, levels, (x0, x1, y0, y1))
        ax.set(xlim=(x0, x1), ylim=(y0, y1), xlabel="x0", ylabel="x1")
        return self
