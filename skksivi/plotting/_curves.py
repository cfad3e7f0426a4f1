"""The loss of a training, and draws in the plane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
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

    The two are under different kernels, so each has its own axis, in the colour of its line; of several fits each has
    a colour, and dotted lines are the discrepancy. The loss of the discrepancy falls to zero up to noise, and may be
    negative.

    Parameters
    ----------
    losses : array-like of shape (n_iter,), or dict of such by name
        See `loss_curve_` of the estimator; empty of a fit that was not trained.
    monitored : array-like of shape (n_looks, 2), or dict of such by name, default=None
        Iterations and values of the fixed-kernel discrepancy, see `ksd_curve_`.
    label : str, default="loss"
        Of the axis of the losses.

    Attributes
    ----------
    ax_ : Axes
        Of the loss.
    monitor_ax_ : Axes or None
        Of the discrepancy, with the same iterations.
    figure_ : Figure
    lines_ : list of Line2D
        Means of the loss over blocks of iterations, of each fit.
    line_ : Line2D
        The first of them.
    monitor_lines_ : list of Line2D
        Of the fits that have looks.
    monitor_line_ : Line2D or None
        The first of them.

    See Also
    --------
    skksivi.diagnose : A report on a fit.

    Examples
    --------
    >>> from skksivi import KSIVIApproximator
    >>> from skksivi.plotting import LossDisplay
    >>> from skksivi.targets import XShaped
    >>> fits = {n: KSIVIApproximator(max_iter=n, random_state=0).fit(XShaped()) for n in (200, 600)}
    >>> display = LossDisplay.from_estimator(fits)
    >>> display.figure_.savefig("loss.png")  # doctest: +SKIP
    """

    losses: ArrayLike | Mapping[str, ArrayLike]
    monitored: ArrayLike | Mapping[str, ArrayLike] | None = None
    label: str = "loss"

    @classmethod
    def from_estimator(
        cls,
        estimator: BaseApproximator | Mapping[str, BaseApproximator],
        *,
        ax: Axes | None = None,
        monitor: bool = True,
    ) -> Self:
        """Show the training of a fitted estimator, or of several.

        Parameters
        ----------
        estimator : approximator, or dict of such by name
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
            An estimator has no loss curve.
        ValueError
            The dict is empty.
        """
        fits = dict(estimator) if isinstance(estimator, Mapping) else {type(estimator).__name__: estimator}
        if not fits:
            raise ValueError("`estimator` is an empty dict; give a fit, or a dict of fits by name.")
        for name, fit in fits.items():
            check_fit(fit, name="estimator" if fit is estimator else f"estimator[{name!r}]")
            if not hasattr(fit, "loss_curve_"):
                raise TypeError(f"`estimator` must have a `loss_curve_`, but {type(fit).__name__} has none.")
        labels = {loss_label(fit) for fit in fits.values()}
        looks = {name: getattr(fit, "ksd_curve_", ()) for name, fit in fits.items()} if monitor else None
        losses = {name: fit.loss_curve_ for name, fit in fits.items()}
        return cls(losses=losses, monitored=looks, label=labels.pop() if len(labels) == 1 else "loss").plot(ax)

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
        curves = {name: np.asarray(losses, dtype=np.float64) for name, losses in _by_name(self.losses).items()}
        looks = {name: np.asarray(a) for name, a in _by_name(self.monitored).items() if np.size(a)}
        self.lines_: list[Line2D] = []
        for (name, losses), colour in zip(curves.items(), cycle(COLOURS)):
            ax.plot(np.arange(1, len(losses) + 1), losses, color=colour, linewidth=0.5, alpha=0.25)
            label = name if len(losses) else f"{name}: not trained"
            self.lines_ += ax.plot(*_block_means(losses), color=colour, label=label)
        self.line_ = self.lines_[0]
        _set_scale(ax, [losses[np.isfinite(losses)] for losses in curves.values() if np.isfinite(losses).any()])
        if ax.get_yscale() != "log":
            ax.axhline(0, color=FAINT, linewidth=0.8, zorder=0)
        ax.set(xlabel="iteration", ylabel=self.label)
        if len(curves) > 1:
            ax.legend(frameon=False, loc="upper right")
        if not any(map(len, curves.values())):
            ax.text(0.5, 0.53, "Nothing was trained: the fit is its start.", transform=ax.transAxes, ha="center")
            ax.set(xticks=[], yticks=[])
            looks = {}
        self.monitor_ax_: Axes | None
        self.monitor_ax_, self.monitor_lines_ = _plot_looks(ax, looks, list(curves)) if looks else (None, [])
        self.monitor_line_ = next(iter(self.monitor_lines_), None)
        return self


def _by_name(curves: ArrayLike | Mapping[str, ArrayLike] | None) -> dict[str, ArrayLike]:
    """Return curves by the names of fits, an empty one of a single fit."""
    return dict(curves) if isinstance(curves, Mapping) else {} if curves is None else {"": curves}


def _plot_looks(ax: Axes, looks: Mapping[str, np.ndarray], names: list[str]) -> tuple[Axes, list[Line2D]]:
    """Draw looks (n_looks, 2) in axes beside the losses of fits of these names: of one fit in a colour of its own."""
    current, beside, lines, alone = ax.figure.gca(), ax.twinx(), list["Line2D"](), len(names) == 1
    ax.figure.sca(current)
    for name, curve in looks.items():
        colour = COLOURS[1 if alone else names.index(name) % len(COLOURS)]
        lines += beside.plot(*curve.T, "o-" if alone else "o:", color=colour, markersize=4)
    beside.axhline(0, linewidth=0)  # zero is within the limits
    beside.set_ylabel(r"KSD$^2$ under a fixed kernel" + (", dotted" if not alone else ""))
    for axes, colour in ((ax, COLOURS[0]), (beside, COLOURS[1])) if alone else ():
        axes.yaxis.label.set_color(colour)
        axes.tick_params(axis="y", colors=colour)
    return beside, lines


def _block_means(losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return middles and means of up to 100 blocks of iterations, less what is not finite."""
    blocks = np.array_split(np.arange(len(losses)), min(100, max(1, len(losses))))
    finite = [block[np.isfinite(losses[block])] for block in blocks]
    finite = [block for block in finite if len(block)]
    return np.array([block.mean() + 1 for block in finite]), np.array([losses[block].mean() for block in finite])


def _set_scale(ax: Axes, curves: list[np.ndarray]) -> None:
    """Let neither single iterations nor the first ones hide the rest of finite losses."""
    if not curves:
        return
    finite, means = np.concatenate(curves), [_block_means(losses)[1] for losses in curves]
    last = [losses[-max(1, len(losses) // 5) :] for losses in curves]
    small = max(max(abs(mean[-1]), end.std()) for mean, end in zip(means, last, strict=True))
    low, high = min(map(np.min, means)), max(map(np.max, means))
    if high > 30 * small > 0 and low > -small:
        if finite.min() > 0:
            ax.set_yscale("log")
        else:
            ax.set_yscale("symlog", linthresh=10 ** np.ceil(np.log10(small)))
            ax.set_ylim(min(*map(np.min, last), -small), finite.max())
        return
    ends = np.quantile(finite, [0.01, 0.99])
    low, high = min(ends[0], low, 0), max(ends[1], high, 0)
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
