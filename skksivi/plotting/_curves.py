"""The loss of a training, and draws in the plane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import ArrayLike

from skksivi.base import BaseApproximator, check_fit, loss_label
from skksivi.plotting._base import (
    COLOURS,
    FAINT,
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
    from matplotlib.lines import Line2D


@dataclass(kw_only=True, eq=False, repr=False)
class LossDisplay:
    """Loss at each iteration, and the discrepancy under the fixed kernel that monitors the training.

    The two are under different kernels, so each has its own axis, in the colour of its line. The loss of the
    U-statistic falls to zero up to noise, and may be negative.

    Parameters
    ----------
    losses : array-like of shape (n_iter,)
        See `loss_curve_` of the estimator.
    monitored : array-like of shape (k,), default=None
        Values of the fixed-kernel discrepancy.
    monitored_at : array-like of shape (k,), default=None
        Iterations of these.
    label : str, default="loss"
        Of the axis of the losses.

    Attributes
    ----------
    ax_ : Axes
        Of the loss.
    monitor_ax_ : Axes or None
        Of the discrepancy, with the same iterations.
    figure_ : Figure
    line_ : Line2D
        Means of the loss over blocks of iterations.
    monitor_line_ : Line2D or None

    See Also
    --------
    skksivi.diagnose : A report on a fit.

    Examples
    --------
    >>> from skksivi import KSIVIApproximator
    >>> from skksivi.plotting import LossDisplay
    >>> from skksivi.targets import XShaped
    >>> q = KSIVIApproximator(max_iter=600, random_state=0).fit(XShaped())
    >>> display = LossDisplay.from_estimator(q)
    >>> display.figure_.savefig("loss.png")  # doctest: +SKIP
    """

    losses: ArrayLike
    monitored: ArrayLike | None = None
    monitored_at: ArrayLike | None = None
    label: str = "loss"

    @classmethod
    def from_estimator(cls, estimator: BaseApproximator, *, ax: Axes | None = None, monitor: bool = True) -> Self:
        """Show the training of a fitted estimator.

        Parameters
        ----------
        estimator : approximator
            Fitted, with a `loss_curve_`.
        ax : Axes, default=None
            Where to draw; None makes a figure.
        monitor : bool, default=True
            Whether to show `ksd_curve_` too, where there is one.

        Returns
        -------
        display : LossDisplay

        Raises
        ------
        NotFittedError
            Before `fit`.
        TypeError
            The estimator has no loss curve.
        """
        check_fit(estimator, name="estimator")
        if not hasattr(estimator, "loss_curve_"):
            raise TypeError(f"`estimator` must have a `loss_curve_`, but {type(estimator).__name__} has none.")
        losses, values = estimator.loss_curve_, getattr(estimator, "ksd_curve_", [])
        label = loss_label(estimator)
        if not (monitor and len(values)):
            return cls(losses=losses, label=label).plot(ax)
        at, monitored = np.asarray(values).T
        return cls(losses=losses, monitored=monitored, monitored_at=at, label=label).plot(ax)

    def plot(self, ax: Axes | None = None) -> Self:
        """Draw.

        Parameters
        ----------
        ax : Axes, default=None
            Where to draw; None makes a figure.

        Returns
        -------
        self : LossDisplay
        """
        ax = own_axes(ax)
        self.ax_, self.figure_ = ax, ax.figure
        losses = np.asarray(self.losses, dtype=np.float64)
        at, means = _block_means(losses)
        ax.plot(np.arange(1, len(losses) + 1), losses, color=COLOURS[0], linewidth=0.5, alpha=0.25)
        (self.line_,) = ax.plot(at, means, color=COLOURS[0], label="loss, means of blocks")
        _set_scale(ax, losses, means)
        if ax.get_yscale() != "log":
            ax.axhline(0, color=FAINT, linewidth=0.8, zorder=0)
        ax.set(xlabel="iteration", ylabel=self.label)
        self.monitor_ax_: Axes | None = None
        self.monitor_line_: Line2D | None = None
        if self.monitored is not None:
            self.monitor_ax_, self.monitor_line_ = self._plot_monitor(ax)
        return self

    def _plot_monitor(self, ax: Axes) -> tuple[Axes, Line2D]:
        values = np.asarray(self.monitored, dtype=np.float64)
        current = ax.figure.gca()
        beside = ax.twinx()
        ax.figure.sca(current)
        (line,) = beside.plot(np.asarray(self.monitored_at), values, "o-", color=COLOURS[1], markersize=4)
        low, high = min(values.min(), 0), max(values.max(), 0)
        beside.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
        beside.set_ylabel(r"KSD$^2$ under a fixed kernel", color=COLOURS[1])
        for axes, colour in ((ax, COLOURS[0]), (beside, COLOURS[1])):
            axes.yaxis.label.set_color(colour)
            axes.tick_params(axis="y", colors=colour)
        return beside, line


def _block_means(losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return middles and means of up to 100 blocks of iterations, less what is not finite."""
    blocks = np.array_split(np.arange(len(losses)), min(100, max(1, len(losses))))
    finite = [block[np.isfinite(losses[block])] for block in blocks]
    finite = [block for block in finite if len(block)]
    return np.array([block.mean() + 1 for block in finite]), np.array([losses[block].mean() for block in finite])


def _set_scale(ax: Axes, losses: np.ndarray, means: np.ndarray) -> None:
    """Let neither single iterations nor the first ones hide the rest."""
    finite = losses[np.isfinite(losses)]
    if not len(finite):
        return
    last = finite[-max(1, len(finite) // 5) :]
    small = max(abs(means[-1]), last.std())
    if means.max() > 30 * small > 0:
        if finite.min() > 0:
            ax.set_yscale("log")
        else:
            ax.set_yscale("symlog", linthresh=small)
            ax.set_ylim(min(last.min(), -small), finite.max())
        return
    low, high = np.quantile(finite, [0.01, 0.99])
    low, high = min(low, means.min(), 0), max(high, means.max(), 0)
    ax.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))


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
