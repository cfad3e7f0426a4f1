"""Curves: the loss of a training, and ranks of a simulation-based calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils import check_scalar

from skksivi._utils.checks import check_integer
from skksivi._utils.monte_carlo import check_ranks, counts_below, uniform_band
from skksivi.base import BaseApproximator, check_fit, loss_label
from skksivi.plotting._base import COLOURS, FAINT, own_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection
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
class CalibrationDisplay:
    """Distribution functions of ranks minus the uniform one, with a simultaneous band for uniform ranks.

    Draws that are too narrow give a line that is first above and then below zero, draws that are too wide the
    reverse; draws that are too high stay above zero, draws that are too low below.

    Parameters
    ----------
    ranks : ndarray of shape (n, k)
        Of k quantities in n replications, from 0 to `n_draws`.
    n_draws : int
        Number of draws among which each true value was ranked.
    names : sequence of str of length k, default=None
        None means x0, x1 and so on.

    Attributes
    ----------
    ax_ : Axes
    figure_ : Figure
    lines_ : list of Line2D
        One for each quantity. Those beyond the seventh that stay in the band are grey, and not in the legend.
    band_ : PolyCollection

    See Also
    --------
    skksivi.calibration.sbc : Simulation-based calibration.

    References
    ----------
    Säilynoja, T., Bürkner, P.-C. and Vehtari, A. (2022). Graphical test for discrete uniformity and its applications
    in goodness-of-fit evaluation and multiple sample comparison. https://arxiv.org/abs/2103.10522

    Examples
    --------
    >>> import numpy as np
    >>> from skksivi.plotting import CalibrationDisplay
    >>> ranks = np.random.RandomState(0).randint(100, size=(200, 3))
    >>> display = CalibrationDisplay.from_ranks(ranks, 99)
    >>> len(display.lines_)
    3
    """

    ranks: np.ndarray
    n_draws: int
    names: Sequence[str] | None = None

    @classmethod
    def from_ranks(
        cls,
        ranks: ArrayLike,
        n_draws: int,
        *,
        names: Sequence[str] | None = None,
        level: float = 0.95,
        ax: Axes | None = None,
    ) -> Self:
        """Show ranks.

        Parameters
        ----------
        ranks : array-like of shape (n, k) or (n,)
            Integers from 0 to `n_draws`.
        n_draws : int
            Number of draws among which each true value was ranked.
        names : sequence of str of length k, default=None
            None means x0, x1 and so on.
        level : float, default=0.95
            See `plot`.
        ax : Axes, default=None
            Where to draw; None makes a figure.

        Returns
        -------
        display : CalibrationDisplay

        Raises
        ------
        ValueError
            Ranks are not integers from 0 to `n_draws`, there is another number of names, or `level` is not in (0, 1).
        """
        n_draws = check_integer(n_draws, "n_draws", min_val=1)
        ranks = check_ranks(ranks, n_draws)
        if names is not None and len(names) != ranks.shape[1]:
            raise ValueError(f"`names` are {len(names)}, expected {ranks.shape[1]}, one for each column of `ranks`.")
        return cls(ranks=ranks, n_draws=n_draws, names=names).plot(ax, level=level)

    def plot(self, ax: Axes | None = None, *, level: float = 0.95) -> Self:
        """Draw.

        Parameters
        ----------
        ax : Axes, default=None
            Where to draw; None makes a figure.
        level : float, default=0.95
            At least this probability that all lines of uniform ranks stay in the band. The complement is divided by
            the number of lines.

        Returns
        -------
        self : CalibrationDisplay
        """
        check_scalar(level, "level", float, min_val=0, max_val=1, include_boundaries="neither")
        ax = own_axes(ax, (6.4, 4))
        self.ax_, self.figure_ = ax, ax.figure
        n, k = self.ranks.shape
        names = [f"x{j}" for j in range(k)] if self.names is None else self.names
        z = np.arange(1, self.n_draws + 1) / (self.n_draws + 1)
        low, high = uniform_band(n, self.n_draws, 1 - (1 - level) / k)
        label = f"{level:.0%} band" + (" of all lines" if k > 1 else "")
        self.band_: PolyCollection = ax.fill_between(
            z, low / n - z, high / n - z, color=FAINT, alpha=0.3, linewidth=0, label=label
        )
        ax.axhline(0, color=FAINT, linewidth=0.8)
        self.lines_: list[Line2D] = []
        for j, (name, ranks) in enumerate(zip(names, self.ranks.T, strict=True)):
            counts = counts_below(ranks, self.n_draws)
            plain = j >= len(COLOURS) and not ((counts < low) | (counts > high)).any()
            style = (
                {"color": FAINT, "linewidth": 0.8} if plain else {"color": COLOURS[j % len(COLOURS)], "label": name}
            )
            self.lines_ += ax.plot(z, counts / n - z, **style)
        ax.set(xlabel="rank of the true value, as a share of the draws", ylabel="ECDF difference", xlim=(0, 1))
        ax.legend(frameon=False, fontsize="small")
        return self
