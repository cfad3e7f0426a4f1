"""Paths, whose coordinates are values at successive times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils import check_scalar

from skksivi.plotting._base import (
    COLOURS,
    REFERENCE_COLOUR,
    OfDraws,
    as_reference,
    as_row,
    as_samples,
    own_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection
    from matplotlib.lines import Line2D


@dataclass(kw_only=True, eq=False, repr=False)
class PathDisplay(OfDraws):
    """Mean and credible band of a path, such as a conditioned diffusion.

    Parameters
    ----------
    samples : dict of str to ndarray of shape (n, d)
        Draws of the path, one column per time.
    times : ndarray of shape (d,), default=None
        None means 1, 2, ..., d.
    reference : ndarray of shape (m, d), default=None
        Exact draws, whose mean and band are dashed lines.
    truth : ndarray of shape (d,), default=None
        The path that was observed.
    observed : (times, values), default=None
        The observations.

    Attributes
    ----------
    ax_ : Axes
    figure_ : Figure
    lines_ : list of Line2D
        The mean of each sample.
    bands_ : list of PolyCollection

    See Also
    --------
    ForestDisplay : Credible intervals, one row per parameter.

    Examples
    --------
    >>> from skksivi.baselines import Laplace
    >>> from skksivi.plotting import PathDisplay
    >>> from skksivi.targets import ConditionedDiffusion
    >>> target = ConditionedDiffusion(50)
    >>> display = PathDisplay.from_estimator(Laplace().fit(target), truth=target.path)
    >>> display.figure_.savefig("path.png")  # doctest: +SKIP
    """

    samples: Mapping[str, np.ndarray]
    times: np.ndarray | None = None
    reference: np.ndarray | None = None
    truth: np.ndarray | None = None
    observed: tuple[ArrayLike, ArrayLike] | None = None

    @classmethod
    def from_draws(
        cls,
        X: ArrayLike | Mapping[str, ArrayLike],
        reference: ArrayLike | None = None,
        *,
        times: ArrayLike | None = None,
        truth: ArrayLike | None = None,
        observed: tuple[ArrayLike, ArrayLike] | None = None,
        level: float = 0.95,
        ax: Axes | None = None,
    ) -> Self:
        """Show draws of a path.

        Parameters
        ----------
        X : array-like of shape (n, d), or dict of such by name
            A time a column.
        reference : array-like of shape (m, d), default=None
            Exact draws.
        times : array-like of shape (d,), default=None
            None means 1, 2, ..., d.
        truth : array-like of shape (d,), default=None
            The path that was observed.
        observed : (times, values), default=None
            The observations.
        level : float, default=0.95
            Probability of the band, which lies between two quantiles of each time.
        ax : Axes, default=None
            Where to draw; None makes a figure.

        Returns
        -------
        display : PathDisplay

        Raises
        ------
        ValueError
            Times, truth or reference do not have d columns, or `level` is not in (0, 1).
        """
        samples = as_samples(X)
        d = next(iter(samples.values())).shape[1]
        display = cls(
            samples=samples,
            times=as_row(times, d, "times"),
            reference=as_reference(reference, samples),
            truth=as_row(truth, d, "truth"),
            observed=observed,
        )
        return display.plot(ax, level=level)

    def plot(self, ax: Axes | None = None, *, level: float = 0.95) -> Self:
        """Draw.

        Parameters
        ----------
        ax : Axes, default=None
            Where to draw; None makes a figure.
        level : float, default=0.95

        Returns
        -------
        self : PathDisplay
        """
        check_scalar(level, "level", float, min_val=0, max_val=1, include_boundaries="neither")
        ax = own_axes(ax, (7, 4))
        self.ax_, self.figure_ = ax, ax.figure
        d = next(iter(self.samples.values())).shape[1]
        times = np.arange(1, d + 1) if self.times is None else self.times
        self.lines_: list[Line2D] = []
        self.bands_: list[PolyCollection] = []
        for k, (name, X) in enumerate(self.samples.items()):
            colour, (low, high) = COLOURS[k % len(COLOURS)], _band(X, level)
            self.bands_.append(ax.fill_between(times, low, high, color=colour, alpha=0.25, linewidth=0))
            self.lines_ += ax.plot(times, X.mean(0), color=colour, label=f"{name}, mean and {level:.0%} band")
        if self.reference is not None:
            for k, row in enumerate([self.reference.mean(0), *_band(self.reference, level)]):
                label = None if k else "reference"
                ax.plot(times, row, "--", color=REFERENCE_COLOUR, linewidth=1 if k else 1.4, label=label)
        if self.truth is not None:
            ax.plot(times, self.truth, color="k", linewidth=0.8, alpha=0.6, label="true path")
        if self.observed is not None:
            ax.plot(*map(np.asarray, self.observed), "o", color="k", markersize=3.5, label="observations")
        ax.set(xlabel="time", ylabel="value")
        ax.margins(x=0.01)
        ax.legend(frameon=False, fontsize="small")
        return self


def _band(X: np.ndarray, level: float) -> np.ndarray:
    """Return the quantiles (2, d) that leave half of 1 - level outside each."""
    return np.quantile(X, [(1 - level) / 2, (1 + level) / 2], axis=0)
