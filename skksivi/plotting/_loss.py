"""The course of a training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import ArrayLike

from skksivi.base import BaseApproximator, check_fit, loss_label
from skksivi.plotting._base import COLOURS, FAINT, own_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

#: Blocks of iterations whose means are drawn.
N_BLOCKS = 100

#: Ratio of the largest to the last block from which the axis is logarithmic beyond the noise.
WIDE = 30


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
    ScoreCallsDisplay : Error against score calls.
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
    blocks = np.array_split(np.arange(len(losses)), min(N_BLOCKS, max(1, len(losses))))
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
    if means.max() > WIDE * small > 0:
        if finite.min() > 0:
            ax.set_yscale("log")
        else:
            ax.set_yscale("symlog", linthresh=small)
            ax.set_ylim(min(last.min(), -small), finite.max())
        return
    low, high = np.quantile(finite, [0.01, 0.99])
    low, high = min(low, means.min(), 0), max(high, means.max(), 0)
    ax.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
