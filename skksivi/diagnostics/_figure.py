"""The figure of a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from skksivi.diagnostics._limits import STEIN_VARIANCES, outlier_limit
from skksivi.plotting import LossDisplay
from skksivi.plotting._base import COLOURS, FAINT, REFERENCE_COLOUR, thinned

#: Colour of failed checks.
WARNING_COLOUR = COLOURS[1]

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from skksivi.diagnostics._report import Diagnosis


def draw_report(report: Diagnosis, axes: np.ndarray | None = None) -> Figure:
    """Draw the four panels of a report into axes, of a new figure if there are none; return their figure."""
    if axes is None:
        import matplotlib.pyplot as plt  # imported here because it is slow

        _, axes = plt.subplots(2, 2, figsize=(9.5, 7), layout="constrained")
    axes = np.asarray(axes, dtype=object).ravel()
    if len(axes) != 4:
        raise ValueError(f"`axes` must be four, got {len(axes)}.")
    trained = report.losses is not None and len(report.losses) > 0
    first = (_plot_loss, ("loss plateau",)) if trained else (_plot_checks, ())
    panels = (first, (_plot_variances, ("Stein variances",)), (_plot_norms, ("outliers",)), (_plot_modes, ("modes",)))
    for (draw, names), ax in zip(panels, axes, strict=True):
        draw(report, ax)
        for name in names:
            fails = report[name].verdict == "warn"
            ax.set_title(f"{name}: warning" if fails else name, color=WARNING_COLOUR if fails else "k", fontsize=10)
    return axes[0].figure


def _plot_checks(report: Diagnosis, ax: Axes) -> None:
    """List the checks, those that fail in colour."""
    n = len(report.checks)
    styles = {"ok": ("\u2713", REFERENCE_COLOUR, "normal"), "warn": ("\u2717", WARNING_COLOUR, "bold")}
    for k, check in enumerate(report.checks):
        mark, colour, weight = styles.get(check.verdict, ("\u2013", FAINT, "normal"))
        at = 1 - (k + 0.5) / n
        ax.text(0.1, at, f"{mark}  {check.name}", transform=ax.transAxes, va="center", color=colour, weight=weight)
    ax.set_title(report.summary, fontsize=10)
    ax.set_axis_off()


def _plot_loss(report: Diagnosis, ax: Axes) -> None:
    """Show the loss, its last quarter shaded."""
    losses = np.asarray(report.losses)
    LossDisplay(losses=losses).plot(ax)
    ax.axvspan(0.75 * len(losses), len(losses), color=FAINT, alpha=0.2, linewidth=0, zorder=-1)


def _plot_variances(report: Diagnosis, ax: Axes) -> None:
    """Show the Stein variances with two standard errors."""
    i = np.arange(len(report.variances))
    ax.axhspan(*STEIN_VARIANCES, color=FAINT, alpha=0.2, linewidth=0)
    ax.axhline(1, color=FAINT, linewidth=0.8)
    ax.errorbar(i, report.variances, 2 * report.variance_errors, fmt="o", color=COLOURS[0], markersize=4)
    ax.locator_params(axis="x", integer=True)
    ax.set(xlabel="coordinate", ylabel=r"Stein variance $-E[s_w u_w]$")
    ax.margins(y=0.2)


def _plot_norms(report: Diagnosis, ax: Axes) -> None:
    """Show the lengths of whitened scores, of the draws and of where chains moved them."""
    norms, reference = report.score_norms[np.isfinite(report.score_norms)], report.reference_norms
    top = max([np.quantile(norms, 0.999), *([1.3 * outlier_limit(reference)] if len(reference) else [])])
    bins = np.linspace(0, top, 51).tolist()
    ax.hist(norms.clip(max=top), bins, density=True, color=COLOURS[0], alpha=0.5, label="draws")
    if len(reference):
        ax.hist(reference, bins, density=True, histtype="step", color=REFERENCE_COLOUR, label="moved by chains")
        ax.axvline(outlier_limit(reference), color=COLOURS[1], linewidth=1, label="outliers beyond")
    ax.set(xlabel=r"length of the whitened score $|L^\top s|$", yticks=[], ylim=(0, 1.5 * ax.get_ylim()[1]))
    ax.legend(frameon=False, loc="upper left")


def _plot_modes(report: Diagnosis, ax: Axes) -> None:
    """Show the draws in the plane of most spread, coloured by mode, and the modes that have none."""
    u, lost = _in_plane(report)
    cells = np.unique(report.modes)
    if len(cells) > len(COLOURS):  # colours would repeat: use shades
        x, y = thinned(u).T
        ax.scatter(x, y, s=6, color=COLOURS[0], alpha=0.4, linewidths=0)
    for k in cells if len(cells) <= len(COLOURS) else ():
        x, y = thinned(u)[thinned(report.modes) == k].T
        ax.scatter(x, y, s=6, color=COLOURS[k % len(COLOURS)], alpha=0.4, linewidths=0)
    for k in cells if len(cells) > 1 else ():
        where, share = np.median(u[report.modes == k], axis=0), np.mean(report.modes == k)
        box = {"fc": "w", "ec": "none", "alpha": 0.7, "pad": 1}
        ax.text(where[0], where[1], f"{share:.0%}", ha="center", va="center", bbox=box)
    if len(lost):
        ax.plot(*lost.T, "x", color=REFERENCE_COLOUR, label="mode without draws")
        ax.legend()
    names = {1: ("x0", "draw"), 2: ("x0", "x1")}
    x_name, y_name = names.get(report.X.shape[1], ("direction of most spread", "second direction"))
    ax.set(xlabel=x_name, ylabel=y_name)


def _in_plane(report: Diagnosis) -> tuple[np.ndarray, np.ndarray]:
    """Return draws (n, 2) and modes without draws (k, 2), of many features along two principal directions."""
    X, lost, d = report.X, report.lost, report.X.shape[1]
    if d == 1:
        return np.column_stack([X, np.arange(len(X))]), np.column_stack([lost, np.zeros(len(lost))])
    if d == 2:
        return X, lost
    mean, sd = X.mean(0), X.std(0)
    plane = np.linalg.svd((X - mean) / sd, full_matrices=False)[2][:2].T
    return (X - mean) / sd @ plane, (lost - mean) / sd @ plane
