"""Credible intervals, one row per parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils import check_scalar

from skksivi.plotting._base import (
    OfDraws,
    as_reference,
    as_row,
    as_samples,
    check_features,
    layers_of,
    own_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import LineCollection
    from matplotlib.lines import Line2D

#: Height that the intervals of a row share, of the distance between rows.
HEIGHT = 0.6


@dataclass(kw_only=True, eq=False, repr=False)
class ForestDisplay(OfDraws):
    """Median and central credible intervals of each parameter, one row each, with reference draws.

    A thick line is the inner interval, a thin one the outer. Rows run from the top.

    Parameters
    ----------
    samples : dict of str to ndarray of shape (n, d)
        Draws by the name of their source.
    reference : ndarray of shape (m, d), default=None
        Exact draws, shown in grey above the others.
    features : sequence of int, default=None
        Columns to show; None means all.
    feature_names : sequence of str of length d, default=None
        None means x0, x1 and so on.
    truth : ndarray of shape (d,), default=None
        Values to mark in each row, such as those that data were simulated with.

    Attributes
    ----------
    ax_ : Axes
    figure_ : Figure
    intervals_ : ndarray of shape (n_samples, k, 5)
        For each sample, the reference first, and each row: lower ends of the outer and the inner interval, median,
        upper ends of the inner and the outer interval.
    medians_ : list of Line2D
        One for each sample.
    lines_ : list of (LineCollection, LineCollection)
        Outer and inner intervals of each sample.

    See Also
    --------
    MarginalsDisplay : Whole marginals, and pairs.

    Examples
    --------
    >>> import numpy as np
    >>> from skksivi.plotting import ForestDisplay
    >>> X, Y = np.random.RandomState(0).normal(size=(2, 1000, 3))
    >>> display = ForestDisplay.from_draws({"fit": X}, Y, feature_names=["a", "b", "c"])
    >>> display.intervals_.shape
    (2, 3, 5)
    """

    samples: Mapping[str, np.ndarray]
    reference: np.ndarray | None = None
    features: Sequence[int] | None = None
    feature_names: Sequence[str] | None = None
    truth: np.ndarray | None = None

    @classmethod
    def from_draws(
        cls,
        X: ArrayLike | Mapping[str, ArrayLike],
        reference: ArrayLike | None = None,
        *,
        features: Sequence[int] | None = None,
        feature_names: Sequence[str] | None = None,
        truth: ArrayLike | None = None,
        levels: tuple[float, float] = (0.5, 0.9),
        ax: Axes | None = None,
    ) -> Self:
        """Show draws.

        Parameters
        ----------
        X : array-like of shape (n, d), or dict of such by name
        reference : array-like of shape (m, d), default=None
            Exact draws.
        features : sequence of int, default=None
            Columns to show; None means all.
        feature_names : sequence of str of length d, default=None
            None means x0, x1 and so on.
        truth : array-like of shape (d,), default=None
            Values to mark in each row.
        levels : (float, float), default=(0.5, 0.9)
            Probabilities of the inner and the outer interval.
        ax : Axes, default=None
            Where to draw; None makes a figure.

        Returns
        -------
        display : ForestDisplay

        Raises
        ------
        ValueError
            The samples, the reference, the names and the truth differ in their number of columns, a feature is none
            of these, or the levels do not rise within (0, 1).
        """
        samples = as_samples(X)
        d = next(iter(samples.values())).shape[1]
        check_features(features, feature_names, d)
        display = cls(
            samples=samples,
            reference=as_reference(reference, samples),
            features=features,
            feature_names=feature_names,
            truth=as_row(truth, d, "truth"),
        )
        return display.plot(ax, levels=levels)

    def plot(self, ax: Axes | None = None, *, levels: tuple[float, float] = (0.5, 0.9)) -> Self:
        """Draw.

        Parameters
        ----------
        ax : Axes, default=None
            Where to draw; None makes a figure.
        levels : (float, float), default=(0.5, 0.9)
            Probabilities of the inner and the outer interval.

        Returns
        -------
        self : ForestDisplay
        """
        inner, outer = levels
        check_scalar(outer, "levels", float, min_val=0, max_val=1, include_boundaries="neither")
        check_scalar(inner, "levels", float, min_val=0, max_val=outer, include_boundaries="neither")
        d = next(iter(self.samples.values())).shape[1]
        shown = list(range(d) if self.features is None else self.features)
        layers = layers_of(self.samples, self.reference)
        at = np.array([1 - outer, 1 - inner, 1, 1 + inner, 1 + outer]) / 2
        self.intervals_ = np.stack([np.quantile(X[:, shown], at, axis=0).T for _, X, _ in layers])
        ax = own_axes(ax, (6.4, 0.8 + 0.16 * len(shown) * (1 + len(layers))))
        self.ax_, self.figure_ = ax, ax.figure
        rows = np.arange(len(shown), dtype=float)
        shifts = HEIGHT * ((np.arange(len(layers)) + 0.5) / len(layers) - 0.5)
        self.medians_: list[Line2D] = []
        self.lines_: list[tuple[LineCollection, LineCollection]] = []
        for (name, _, colour), shift, ends in zip(layers, shifts, self.intervals_, strict=True):
            thin = ax.hlines(rows + shift, ends[:, 0], ends[:, 4], color=colour, linewidth=1)
            thick = ax.hlines(rows + shift, ends[:, 1], ends[:, 3], color=colour, linewidth=3)
            self.lines_.append((thin, thick))
            self.medians_ += ax.plot(ends[:, 2], rows + shift, "o", color=colour, mfc="w", markersize=4, label=name)
        if self.truth is not None:
            ax.plot(self.truth[shown], rows, "kx", markersize=5, label="truth")
        names = [f"x{i}" for i in shown] if self.feature_names is None else [self.feature_names[i] for i in shown]
        ax.set_yticks(rows, names)
        ax.set(ylim=(len(shown) - 0.4, -0.6), xlabel=f"median, {inner:.0%} and {outer:.0%} intervals")
        ax.grid(axis="x", color="0.92")
        ax.set_axisbelow(True)
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(axis="y", length=0)
        if len(layers) > 1 or self.truth is not None:
            ax.legend(frameon=False, fontsize="small")
        return self
