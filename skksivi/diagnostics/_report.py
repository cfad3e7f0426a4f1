"""What a report holds, says and shows."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from skksivi._utils.tables import html_table
from skksivi.plotting import LossDisplay
from skksivi.plotting._base import COLOURS, FAINT, REFERENCE_COLOUR, thinned
from skksivi.score._tally import Stage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Bounds of Stein variances.
STEIN_VARIANCES = (0.8, 1.25)


def outlier_limit(norms: np.ndarray) -> float:
    """Return the length of a whitened score beyond which a draw is an outlier, given lengths from chains (m,)."""
    return float(np.quantile(norms, 0.999))


class Check(NamedTuple):
    """One line of a diagnosis.

    Attributes
    ----------
    name : str
    value : float
        The checked number, NaN if there is none.
    text : str
        The value in words, and its limit.
    verdict : str
        "ok", "warn", or "not available: " and why.
    remedy : str
        What to do, in one sentence; empty unless the verdict is "warn".

    See Also
    --------
    Diagnosis : The report.
    """

    name: str
    value: float
    text: str
    verdict: str
    remedy: str = ""


@dataclass(repr=False)
class Diagnosis:
    """The report of `skksivi.diagnose`; index it by the name of a check.

    Attributes
    ----------
    estimator : str
        The class of the fit.
    checks : tuple of Check
    X : ndarray of shape (n, d)
        The examined draws.
    modes : ndarray of shape (n,)
        The index of the mode of each draw.
    lost : ndarray of shape (k, d)
        Modes without draws.
    score_norms : ndarray of shape (n,)
        Lengths of the whitened scores of the draws, infinite where the score is not finite.
    reference_norms : ndarray of shape (m,)
        The same at points to which Metropolis chains have moved some of the draws; empty if there are none.
    variances, variance_errors : ndarray of shape (d,)
        The Stein variances, with standard errors.
    losses : ndarray or None
        The `loss_curve_`.
    stages : tuple of Stage
        The `stages_` of the fit: score calls and seconds of each.
    fitted_by : str
        The `fitted_by_` of the fit, empty without one.

    See Also
    --------
    skksivi.diagnose : A report on a fit.
    Check : One line of a report.

    Examples
    --------
    >>> from skksivi import diagnose
    >>> from skksivi.baselines import Laplace
    >>> report = diagnose(Laplace(random_state=0).fit(lambda x: -x, n_features=2), lambda x: -x, random_state=0)
    >>> report.ok
    True
    >>> report.checks[-1].name
    'Stein variances'
    >>> figure = report.plot()
    >>> figure.savefig("report.png")  # doctest: +SKIP
    """

    estimator: str
    checks: tuple[Check, ...]
    X: np.ndarray = field(compare=False)
    modes: np.ndarray = field(compare=False)
    lost: np.ndarray = field(compare=False)
    score_norms: np.ndarray = field(compare=False)
    reference_norms: np.ndarray = field(compare=False)
    variances: np.ndarray = field(compare=False)
    variance_errors: np.ndarray = field(compare=False)
    losses: np.ndarray | None = field(default=None, compare=False)
    stages: tuple[Stage, ...] = field(default=(), compare=False)
    fitted_by: str = field(default="", compare=False)

    @property
    def ok(self) -> bool:
        """Whether no check warns. Those not available were not made, and say nothing: `summary` counts them."""
        return not self.warnings

    @property
    def warnings(self) -> tuple[Check, ...]:
        """The checks that warn."""
        return tuple(check for check in self.checks if check.verdict == "warn")

    @property
    def summary(self) -> str:
        """How many checks are ok, not available and to look at, in words."""
        ok, n = sum(check.verdict == "ok" for check in self.checks), len(self.checks)
        return f"{ok} ok, {n - ok - len(self.warnings)} not available, {len(self.warnings)} to look at"

    def __getitem__(self, name: str) -> Check:
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(f"no check is named {name!r}; there are {', '.join(c.name for c in self.checks)}.")

    def _head(self) -> str:
        n, d = self.X.shape
        return f"{self.estimator}, {n} draws of {d} features: {self.summary}"

    def _cost(self) -> str:
        """Say what made the fit, from how many calls of each stage; nothing where that is unknown."""
        if not self.stages:
            return ""
        made = f"by {self.fitted_by}, " if self.fitted_by else ""
        text = f"{made}from {sum(stage.n_calls for stage in self.stages):,} score calls: "
        return text + ", ".join(f"{s.name} {s.n_calls:,}" for s in self.stages)

    def _note(self) -> str:
        is_needed = self.modes.max(initial=0) > 0 or self["modes"].verdict == "warn"
        return "KSD is insensitive to the weights of modes: see the line on modes." if is_needed else ""

    def _rows(self) -> list[tuple[str, str, str, str]]:
        """Return the name of each check, a mark, what it found and what to do."""
        checks = self.checks
        return [(c.name, *((c.verdict, c.text) if c.text else ("-", c.verdict)), c.remedy) for c in checks]

    def __str__(self) -> str:
        width, indent = 80, " " * 25
        lines = [self._head()]
        lines += textwrap.wrap(self._cost(), width, initial_indent="  ", subsequent_indent="    ")
        for name, mark, text, remedy in self._rows():
            lines += textwrap.wrap(f"  {mark:<5} {name:<16} {text}", width, subsequent_indent=indent)
            lines += textwrap.wrap(remedy, width, initial_indent=indent, subsequent_indent=indent)
        lines += textwrap.wrap(self._note(), width, initial_indent=indent, subsequent_indent=indent)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the same as a table of HTML."""
        below = ". ".join(filter(None, [self._note().rstrip("."), self._cost()]))
        head = ("check", "", "found", "to do")
        return html_table(self._rows(), head=head, above=self._head(), below=below, align="left")

    __repr__ = __str__

    def plot(self, axes: np.ndarray | None = None) -> Figure:
        """Show the loss, the Stein variances, the lengths of the scores and the modes.

        Parameters
        ----------
        axes : array of 4 Axes, default=None
            Where to draw; None makes a figure.

        Returns
        -------
        figure : Figure

        Raises
        ------
        ValueError
            `axes` are not four.
        """
        return draw_report(self, axes)


#: Colour of failed checks.
WARNING_COLOUR = COLOURS[1]


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
