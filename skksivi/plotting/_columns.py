"""Columns of draws: marginals, pairs and credible intervals; and rows of candidates of a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.model_selection import GridSearchCV
from sklearn.utils import check_scalar
from sklearn.utils.validation import check_is_fitted

from skksivi.plotting._base import (
    COLOURS,
    FAINT,
    OfDraws,
    as_reference,
    as_row,
    as_samples,
    check_features,
    density_and_levels,
    layers_of,
    own_axes,
    panels,
    span,
    thinned,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import LineCollection
    from matplotlib.lines import Line2D

#: Both ends of what is shown of columns.
Limits = dict[int, tuple[float, float]]

#: Coordinates that are all shown unless some are named, and how many of more.
MAX_FEATURES, SOME_FEATURES = 10, 6

#: Draws from which a density is estimated.
MOST_BLURRED = 20_000


@dataclass(kw_only=True, eq=False, repr=False)
class OfColumns(OfDraws):
    """Base of the displays of some columns of draws by name, with reference draws and true values."""

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
        ax: Axes | None = None,
        **options: object,
    ) -> Self:
        """Show draws.

        Parameters
        ----------
        X : array-like of shape (n, d), or dict of such by name
        reference : array-like of shape (m, d), default=None
            Exact draws, shown in grey.
        features : sequence of int, default=None
            Columns to show.
        feature_names : sequence of str of length d, default=None
            None means x0, x1 and so on.
        truth : array-like of shape (d,), default=None
            Values to mark, such as those that data were simulated with; None or NaN for those that are not known.
        ax : Axes, default=None
            Where to draw; None makes a figure.
        **options
            What `plot` takes.

        Returns
        -------
        display : object

        Raises
        ------
        ValueError
            The samples, the reference, the names and the truth differ in their number of columns, a feature is none
            of these, or an option is out of its range.
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
        return display.plot(ax, **options)


@dataclass(kw_only=True, eq=False, repr=False)
class MarginalsDisplay(OfColumns):
    """Marginals on the diagonal and pairs of coordinates below it, with reference draws.

    A title is the median of the first sample, in its colour, and the distances to its 5% and 95% quantiles. Lines
    around pairs enclose the region of highest density that holds half, or 95%, of the draws.

    Parameters
    ----------
    samples : dict of str to ndarray of shape (n, d)
        Draws by the name of where they are from.
    reference : ndarray of shape (m, d), default=None
        Exact draws, shown in grey.
    features : sequence of int, default=None
        Columns to show; None means all up to ten, else the first six.
    feature_names : sequence of str of length d, default=None
        None means x0, x1 and so on.
    truth : ndarray of shape (d,), default=None
        Values to mark by lines, such as those that data were simulated with; NaN for those that are not known.

    Attributes
    ----------
    ax_ : Axes
        The axes given or made, now empty: the panels lie where it was.
    axes_ : ndarray of shape (k, k) of Axes or None
        The panels, None above the diagonal.
    figure_ : Figure
    lines_ : list of list of Line2D
        Of each sample the marginals, reference first.

    See Also
    --------
    ForestDisplay : Credible intervals, one row per parameter.

    Examples
    --------
    >>> import numpy as np
    >>> from skksivi.plotting import MarginalsDisplay
    >>> X, Y = np.random.RandomState(0).normal(size=(2, 1000, 3))
    >>> display = MarginalsDisplay.from_draws({"fit": X}, reference=Y)
    >>> display.axes_.shape
    (3, 3)
    """

    def plot(self, ax: Axes | None = None, *, kind: str = "contour") -> Self:
        """Draw.

        Parameters
        ----------
        ax : Axes, default=None
            Replaced by the panels; None makes a figure.
        kind : {"contour", "scatter"}, default="contour"
            How pairs are shown: by lines that enclose half and 95% of the draws, or as up to 2,000 points. The
            reference is always shown by lines.

        Returns
        -------
        self : MarginalsDisplay
        """
        if kind not in ("contour", "scatter"):
            raise ValueError(f"`kind` must be 'contour' or 'scatter', got {kind!r}.")
        layers, limits = layers_of(self.samples, self.reference), self._limits()
        k, d = len(limits), layers[0][1].shape[1]
        size = 1.9 if k <= SOME_FEATURES else 1.5
        ax = own_axes(ax, (size * k + 0.6, size * k + 0.4))
        self.ax_, self.figure_ = ax, ax.figure
        self.axes_ = panels(ax, k)
        self.lines_: list[list[Line2D]] = [[] for _ in layers]
        for (i, j), panel in np.ndenumerate(self.axes_):
            if j <= i:
                self._fill((i, j), layers, limits, kind)
            else:
                panel.remove()
                self.axes_[i, j] = None
        if len(layers) > 1 or k < d:
            from matplotlib.lines import Line2D

            handles = [Line2D([], [], color=colour, label=name) for name, _, colour in layers if len(layers) > 1]
            corner, note = ax if k > 1 else self.axes_[0, 0], f"{k} of {d} shown" if k < d else None
            if k == 1:
                corner.set_ylim(top=1.6 * corner.get_ylim()[1])
            corner.legend(handles=handles, title=note, frameon=False, loc="upper right")
        return self

    def _limits(self) -> Limits:
        """Return the limits of each column: nearly all of the reference, else of all samples, and the truth."""
        shown = list(self.samples.values()) if self.reference is None else [self.reference]
        d = shown[0].shape[1]
        some = range(d if d <= MAX_FEATURES else SOME_FEATURES) if self.features is None else self.features
        limits: Limits = {}
        for c in map(int, some):
            ends = [end for X in shown for end in span(X[:, c])]
            ends += [] if self.truth is None or not np.isfinite(self.truth[c]) else [self.truth[c]]
            margin = 0.04 * (max(ends) - min(ends))
            limits[c] = (min(ends) - margin, max(ends) + margin)
        return limits

    def _fill(
        self, at: tuple[int, int], layers: list[tuple[str, np.ndarray, str]], limits: Limits, kind: str
    ) -> None:
        """Draw and label the marginal of a column, or a pair."""
        panel, columns = self.axes_[at], list(limits)
        a, b = (columns[i] for i in at)
        names = [f"x{c}" if self.feature_names is None else self.feature_names[c] for c in (a, b)]
        for (_, X, colour), lines in zip(layers, self.lines_, strict=True):
            if a == b:
                lines.append(_marginal(panel, X[:, a], colour))
            elif kind == "scatter" and X is not self.reference:
                x, y = thinned(X[:, [b, a]]).T
                panel.scatter(x, y, s=2, color=colour, alpha=0.4, linewidths=0)
            else:
                _contours(panel, thinned(X[:, [b, a]], MOST_BLURRED), colour)
        for c, draw in ((b, panel.axvline), (a, panel.axhline))[: 1 + (a != b)]:
            if self.truth is not None and np.isfinite(self.truth[c]):
                draw(self.truth[c], color="k", linewidth=0.8, linestyle="--")
        is_last, is_first = a == columns[-1], b == columns[0]
        panel.tick_params(labelsize=8, labelbottom=is_last, labelleft=is_first and a != b)
        panel.locator_params(nbins=4)
        panel.set(xlim=limits[b], xlabel=names[1] if is_last else "")
        if a == b:
            colour = COLOURS[0] if len(layers) > 1 else "k"
            panel.set_title(_interval(next(iter(self.samples.values()))[:, a]), fontsize=10, color=colour)
            panel.set(yticks=[], ylim=(0, None))
            panel.spines[["left", "right", "top"]].set_visible(False)
        else:
            panel.set(ylim=limits[a], ylabel=names[0] if is_first else "")


def _interval(x: np.ndarray) -> str:
    """Return the median of values (n,), and how far their 5% and 95% quantiles are below and above."""
    low, middle, high = np.quantile(x, [0.05, 0.5, 0.95])
    digits = 2 - int(np.floor(np.log10(max(high - low, 1e-9 * abs(middle), 1e-300))))
    form = f".{max(digits, 0)}f" if -3 < digits < 7 else ".3g"
    return f"${middle + 0.0:{form}}^{{+{high - middle:{form}}}}_{{-{middle - low:{form}}}}$"


def _marginal(ax: Axes, x: np.ndarray, colour: str) -> Line2D:
    """Draw the histogram of values (n,), as a density."""
    counts, edges = np.histogram(x, min(50, 1 + int(2 * len(x) ** (1 / 3))), span(x))
    heights = np.repeat(counts / len(x) / (edges[1] - edges[0]), 2)
    return ax.plot(np.repeat(edges, 2), [0, *heights, 0], color=colour, linewidth=1.2)[0]


def _contours(ax: Axes, X: np.ndarray, colour: str) -> None:
    (x, y), density, levels = density_and_levels(X, (0.5, 0.95))
    ax.contour(x, y, density.T, levels=levels, colors=colour, linewidths=1.2)


@dataclass(kw_only=True, eq=False, repr=False)
class ForestDisplay(OfColumns):
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
        # of the distance between rows, which its intervals share
        shifts = 0.6 * ((np.arange(len(layers)) + 0.5) / len(layers) - 0.5)
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


@dataclass(kw_only=True, eq=False, repr=False)
class SearchDisplay:
    """Scores of the candidates of a search, one row each: replicates, means with one standard error, and the choice.

    Parameters
    ----------
    scores : ndarray of shape (n_candidates, n_replicates)
        Larger is better.
    labels : sequence of str of length n_candidates
    chosen : int
        The row to mark.

    Attributes
    ----------
    ax_ : Axes
    figure_ : Figure
    means_ : ErrorbarContainer
    replicates_ : list of Line2D
        One for each replicate.

    See Also
    --------
    skksivi.model_selection.within_noise : The simplest candidate within one standard error of the best.

    Examples
    --------
    >>> import numpy as np
    >>> from skksivi.plotting import SearchDisplay
    >>> scores = np.array([[-0.20, -0.22], [-0.21, -0.25]])
    >>> display = SearchDisplay(scores=scores, labels=["as it is", "bandwidth=1"], chosen=0).plot()
    >>> len(display.replicates_)
    2
    """

    scores: np.ndarray
    labels: Sequence[str]
    chosen: int

    @classmethod
    def from_search(cls, search: GridSearchCV, *, metric: str = "score", ax: Axes | None = None) -> Self:
        """Show what a search found.

        Parameters
        ----------
        search : GridSearchCV or RandomizedSearchCV
            Fitted.
        metric : str, default="score"
            One of several scorers, by its name.
        ax : Axes, default=None
            Where to draw; None makes a figure.

        Returns
        -------
        display : SearchDisplay

        Raises
        ------
        NotFittedError
            Before `fit`.
        ValueError
            The search has no scorer of this name.
        """
        check_is_fitted(search)
        found = search.cv_results_
        first = "split0_test_"
        known = sorted(key.removeprefix(first) for key in found if key.startswith(first))
        if metric not in known:
            raise ValueError(f"`metric` is {metric!r}, expected one of {known}, the scorers of the search.")
        scores = np.stack([found[f"split{k}_test_{metric}"] for k in range(search.n_splits_)], -1)
        labels = [", ".join(f"{name}={value}" for name, value in own.items()) for own in found["params"]]
        return cls(scores=scores, labels=[label or "as it is" for label in labels], chosen=search.best_index_).plot(
            ax
        )

    def plot(self, ax: Axes | None = None) -> Self:
        """Draw.

        Parameters
        ----------
        ax : Axes, default=None
            Where to draw; None makes a figure.

        Returns
        -------
        self : SearchDisplay
        """
        (n, m), rows = self.scores.shape, np.arange(len(self.scores))
        ax = own_axes(ax, (6.4, 1 + 0.28 * n))
        self.ax_, self.figure_ = ax, ax.figure
        self.replicates_: list[Line2D] = [ax.plot(own, rows, "|", color=FAINT)[0] for own in self.scores.T]
        means, se = self.scores.mean(1), self.scores.std(1, ddof=min(1, m - 1)) / np.sqrt(m)
        self.means_ = ax.errorbar(means, rows, xerr=se, fmt="o", color=COLOURS[0])
        ax.plot(means[self.chosen], self.chosen, "o", ms=14, mfc="none", color=COLOURS[1], label="chosen")
        ax.set_yticks(rows, self.labels)
        ax.set(ylim=(n - 0.4, -0.6), xlabel="score: means, standard errors, replicates")
        ax.grid(axis="x", color="0.92")
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, fontsize="small")
        return self
