"""Draws in the plane, of a fit or of the layers of a hierarchy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils import check_array

from skksivi._utils.arrays import without_graph
from skksivi.base import check_fit
from skksivi.plotting._base import (
    COLOURS,
    MAX_POINTS,
    HasLogProb,
    OfDraws,
    as_samples,
    box_and_levels,
    check_target,
    draw_contours,
    own_axes,
    panels,
    thinned,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PathCollection, QuadMesh

    from skksivi.estimators import HKSIVIApproximator


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


@dataclass(kw_only=True, eq=False, repr=False)
class LayersDisplay:
    """Two coordinates of each layer of a hierarchy, from the base to the fit.

    Parameters
    ----------
    layers : list of ndarray of shape (n, d)
        Draws of the layers, the base first.
    features : (int, int), default=(0, 1)
        Columns to show.
    target : Target, default=None
        With two features and `log_prob`; its contours enclose 50, 90 and 99% of the mass.
    names : list of str, default=None
        Titles of the layers; None means layer T, ..., layer 0, as in `sample(layer=t)`.

    Attributes
    ----------
    ax_ : Axes
        The axes given or made, now empty: the panels lie where it was.
    axes_ : ndarray of shape (n_layers,) of Axes
    figure_ : Figure
    clouds_ : list of PathCollection

    See Also
    --------
    DensityDisplay : Draws in the plane under contours of the target.
    skksivi.HKSIVIApproximator : A hierarchy of layers, for distant modes.

    Examples
    --------
    >>> import numpy as np
    >>> from skksivi.plotting import LayersDisplay
    >>> base = np.random.RandomState(0).normal(size=(500, 2))
    >>> display = LayersDisplay.from_draws([base, base / 2, base / 4])
    >>> display.axes_.shape
    (3,)
    """

    layers: Sequence[np.ndarray]
    features: tuple[int, int] = (0, 1)
    target: HasLogProb | None = None
    names: Sequence[str] | None = None

    @classmethod
    def from_draws(
        cls,
        layers: Sequence[ArrayLike],
        target: HasLogProb | None = None,
        *,
        features: tuple[int, int] = (0, 1),
        names: Sequence[str] | None = None,
        ax: Axes | None = None,
    ) -> Self:
        """Show draws of layers.

        Parameters
        ----------
        layers : list of array-like of shape (n, d)
            Draws, the base first.
        target : Target, default=None
            With two features and `log_prob`.
        features : (int, int), default=(0, 1)
            Columns to show.
        names : list of str, default=None
            Titles of the layers; None means layer T, ..., layer 0, as in `sample(layer=t)`.
        ax : Axes, default=None
            Replaced by the panels; None makes a figure.

        Returns
        -------
        display : LayersDisplay

        Raises
        ------
        TypeError
            The target has no `log_prob`.
        ValueError
            There is no layer, a layer lacks one of the columns, or `names` has another length.
        """
        if not len(layers):
            raise ValueError("`layers` is empty; give a list of arrays, the base first.")
        arrays = [check_array(without_graph(X), dtype=np.float64, input_name="layers") for X in layers]
        fewest = min(X.shape[1] for X in arrays)
        if not all(0 <= i < fewest for i in features):
            raise ValueError(f"`features` must hold columns from 0 to {fewest - 1}, got {features!r}.")
        if names is not None and len(names) != len(arrays):
            raise ValueError(f"`names` has {len(names)} entries, expected {len(arrays)}, one per layer.")
        check_target(target)
        return cls(layers=arrays, features=features, target=target, names=names).plot(ax)

    @classmethod
    def from_estimator(
        cls,
        estimator: HKSIVIApproximator,
        target: HasLogProb | None = None,
        *,
        features: tuple[int, int] = (0, 1),
        n_samples: int = MAX_POINTS,
        random_state: int | np.random.RandomState | None = 0,
        ax: Axes | None = None,
    ) -> Self:
        """Show the layers of a fitted estimator.

        Parameters
        ----------
        estimator : HKSIVIApproximator
            Fitted.
        target, features, ax
            See `from_draws`.
        n_samples : int, default=2000
        random_state : int, RandomState or None, default=0
            The same for each layer; None continues the estimator's own stream.

        Returns
        -------
        display : LayersDisplay

        Raises
        ------
        NotFittedError
            Before `fit`.
        TypeError
            The estimator has no layers.
        """
        check_fit(estimator, name="estimator")
        if not hasattr(estimator, "n_layers"):
            raise TypeError(
                f"`estimator` must have layers, as HKSIVIApproximator has; got {type(estimator).__name__}."
            )
        of_layers: Any = getattr(estimator, "family_", estimator)
        steps = range(of_layers.n_layers, -1, -1)
        layers = [estimator.sample(n_samples, random_state, layer=t) for t in steps]
        return cls.from_draws(layers, target, features=features, ax=ax)

    def plot(self, ax: Axes | None = None) -> Self:
        """Draw.

        Parameters
        ----------
        ax : Axes, default=None
            Replaced by the panels; None makes a figure.

        Returns
        -------
        self : LayersDisplay
        """
        n = len(self.layers)
        ax = own_axes(ax, (2.4 * n + 0.4, 2.7))
        self.ax_, self.figure_ = ax, ax.figure
        self.axes_ = panels(ax, 1, n, sharex=True, sharey=True)[0]
        pairs = [X[:, list(self.features)] for X in self.layers]
        box, levels = box_and_levels(pairs, self.target)
        names = [f"layer {t}" for t in range(n - 1, -1, -1)] if self.names is None else self.names
        self.clouds_: list[PathCollection] = []
        for panel, X, name in zip(self.axes_, pairs, names, strict=True):
            x, y = thinned(X).T
            self.clouds_.append(panel.scatter(x, y, s=4, color=COLOURS[0], alpha=0.4, linewidths=0))
            if self.target is not None:
                draw_contours(panel, self.target, levels, box)
            panel.set(xlim=box[:2], ylim=box[2:], title=name, xlabel=f"x{self.features[0]}")
        self.axes_[0].set_ylabel(f"x{self.features[1]}")
        return self
