"""The report of a diagnosis."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from skksivi.diagnostics._figure import draw_report
from skksivi.score._tally import Stage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Columns of a printed report, those of a terminal, and its indent.
WIDTH, INDENT = 80, " " * 25


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

    def __str__(self) -> str:
        n, d = self.X.shape
        lines = [f"{self.estimator}, {n} draws of {d} features: {self.summary}"]
        if self.stages:
            n_calls = sum(stage.n_calls for stage in self.stages)
            made = f"by {self.fitted_by}, " if self.fitted_by else ""
            text = f"{made}from {n_calls:,} score calls: "
            text += ", ".join(f"{s.name} {s.n_calls:,}" for s in self.stages)
            lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
        for check in self.checks:
            mark, text = (check.verdict, check.text) if check.text else ("-", check.verdict)
            lines += textwrap.wrap(f"  {mark:<5} {check.name:<16} {text}", WIDTH, subsequent_indent=INDENT)
            lines += textwrap.wrap(check.remedy, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
        if self.modes.max(initial=0) > 0 or self["modes"].verdict == "warn":
            note = "KSD is insensitive to the weights of modes: see the line on modes."
            lines += textwrap.wrap(note, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
        return "\n".join(lines)

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
