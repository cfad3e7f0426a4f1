r"""One report on a fit, without draws from the target: what it holds, says and shows.

No single number identifies a good fit. The discrepancy detects wrong locations and shapes but not wrong weights of
modes, weighted draws detect wrong numbers and lost tails, Stein's identity detects wrong widths, and the loss shows
whether the training had converged.
"""

from __future__ import annotations

import math
import textwrap
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from skksivi._utils.arrays import RandomState, as_array, html_table, make_seed, resolve_device
from skksivi._utils.checks import check_integer
from skksivi._utils.log import telling
from skksivi.base import BaseApproximator, check_finite, check_fit, of_predictor
from skksivi.diagnostics._checks import (
    allowed_ksd,
    check_chains,
    check_errors,
    check_ksd,
    check_loss,
    check_means,
    check_variances,
    check_weights,
    check_whitening,
    importance_sample_of,
    stein_moments,
)
from skksivi.diagnostics._geometry import (
    REFUSALS,
    STEIN_VARIANCES,
    Check,
    View,
    check_outliers,
    geometry_and_modes,
    guarded,
    outlier_limit,
)
from skksivi.families._derived import Refined, unweighted
from skksivi.families._samplers import Chains, Particles, Sampler
from skksivi.judge import THRESHOLDS
from skksivi.plotting import LossDisplay
from skksivi.plotting._base import COLOURS, FAINT, REFERENCE_COLOUR, thinned
from skksivi.score._score import ScoreFunction
from skksivi.score._tally import Stage
from skksivi.score._target import compared_score
from skksivi.targets._base import Target
from skksivi.training._run import ordinary_mode

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from skksivi.predictors import KSIVIClassifier, KSIVIRegressor


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
    score_norms : tuple of ndarray of shape (n,) and (m,)
        Lengths of the whitened scores of the draws, infinite where the score is not finite; and at points to which
        Metropolis chains have moved some of the draws, empty if there are none.
    variances : tuple of ndarray of shape (d,)
        The Stein variances, and their standard errors.
    losses : ndarray or None
        The `loss_curve_`.
    cost : str
        What made the fit, from how many calls of each stage, where that is known, and the calls of the report.

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
    score_norms: tuple[np.ndarray, np.ndarray] = field(compare=False)
    variances: tuple[np.ndarray, np.ndarray] = field(compare=False)
    losses: np.ndarray | None = field(default=None, compare=False)
    cost: str = field(default="", compare=False)

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
        ok, look = (sum(check.verdict == verdict for check in self.checks) for verdict in ("ok", "look"))
        n, wrong = len(self.checks), len(self.warnings)
        beside = f", {look} to look at beside reliable weights" if look else ""
        return f"{ok} ok, {n - ok - look - wrong} not available, {wrong} wrong{beside}"

    def __getitem__(self, name: str) -> Check:
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(f"no check is named {name!r}; there are {', '.join(c.name for c in self.checks)}.")

    def _head(self) -> str:
        n, d = self.X.shape
        return f"{self.estimator}, {n} draws of {d} features: {self.summary}"

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
        lines += textwrap.wrap(self.cost, width, initial_indent="  ", subsequent_indent="    ")
        for name, mark, text, remedy in self._rows():
            lines += textwrap.wrap(f"  {mark:<5} {name:<16} {text}", width, subsequent_indent=indent)
            lines += textwrap.wrap(remedy, width, initial_indent=indent, subsequent_indent=indent)
        lines += textwrap.wrap(self._note(), width, initial_indent=indent, subsequent_indent=indent)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the same as a table of HTML."""
        below = ". ".join(filter(None, [self._note().rstrip("."), self.cost]))
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

        figure, axes = plt.subplots(2, 2, figsize=(9.5, 7), layout="constrained")
        figure._ipython_display_ = partial(_leave_to_pyplot, figure)  # type: ignore[attr-defined]
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


def _leave_to_pyplot(figure: Figure) -> None:
    """Show nothing as the value of a cell of a notebook that shows the figure, which is open, at its end.

    Raises
    ------
    NotImplementedError
        In any other case: IPython then shows the figure as it does others.
    """
    import matplotlib.pyplot as plt

    is_value = any(frame.name == "compute_format_data" for frame in traceback.extract_stack())
    if not (is_value and plt.fignum_exists(figure.number)):
        raise NotImplementedError


def _plot_checks(report: Diagnosis, ax: Axes) -> None:
    """List the checks, those that fail in colour."""
    n = len(report.checks)
    styles = {
        "ok": ("\u2713", REFERENCE_COLOUR, "normal"),
        "look": ("?", REFERENCE_COLOUR, "normal"),
        "warn": ("\u2717", WARNING_COLOUR, "bold"),
    }
    for k, check in enumerate(report.checks):
        mark, colour, weight = styles.get(check.verdict, ("\u2013", FAINT, "normal"))
        at = 1 - (k + 0.5) / n
        ax.text(0.1, at, f"{mark}  {check.name}", transform=ax.transAxes, va="center", color=colour, weight=weight)
    ax.set_title(report.summary, fontsize=10, wrap=True)
    ax.set_axis_off()


def _plot_loss(report: Diagnosis, ax: Axes) -> None:
    """Show the loss, its last quarter shaded."""
    losses = np.asarray(report.losses)
    LossDisplay(losses=losses).plot(ax)
    ax.axvspan(0.75 * len(losses), len(losses), color=FAINT, alpha=0.2, linewidth=0, zorder=-1)


def _plot_variances(report: Diagnosis, ax: Axes) -> None:
    """Show the Stein variances with two standard errors."""
    values, errors = report.variances
    i = np.arange(len(values))
    ax.axhspan(*STEIN_VARIANCES, color=FAINT, alpha=0.2, linewidth=0)
    ax.axhline(1, color=FAINT, linewidth=0.8)
    ax.errorbar(i, values, 2 * errors, fmt="o", color=COLOURS[0], markersize=4)
    ax.locator_params(axis="x", integer=True)
    ax.set(xlabel="coordinate", ylabel=r"Stein variance $-E[s_w u_w]$")
    ax.margins(y=0.2)


def _plot_norms(report: Diagnosis, ax: Axes) -> None:
    """Show the lengths of whitened scores, of the draws and of where chains moved them."""
    norms, reference = report.score_norms
    norms = norms[np.isfinite(norms)]
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


# All checks of a fit


def diagnose(
    est: BaseApproximator | KSIVIRegressor | KSIVIClassifier,
    target: Target | ScoreFunction | None = None,
    *,
    n_samples: int = 2000,
    random_state: RandomState = None,
) -> Diagnosis:
    r"""Report on a fit, from its draws and the score of its target.

    There are eleven checks, each with a value, a verdict and, if it warns, a remedy. With draws x, their scores s and
    whitened scores :math:`L^\top s`, where L is the Cholesky factor of the covariance of the central draws of a mode,
    they are:

    "KSD"
        The squared kernel Stein discrepancy, under the kernel of `est.score`, which depends only on the target, and
        the p-value of `skksivi.metrics.ksd_test` on 1,000 draws. Warns if it is significant (p < 0.01) and larger
        than for a Gaussian whose mean is shifted by 0.1 standard deviations in every coordinate, 0.006 per feature.
        It is insensitive to the weights of modes and to a missing mode. For dependent draws, of chains or particles,
        the p-value is approximate.
    "weights"
        The effective sample size of 2,000 importance-weighted draws, half of them from Gaussians wider than the fit,
        see `skksivi.importance_sample`, and the share of the mass of the target p where the fit q has less than a
        tenth of its density. Warns if the weights are not reliable: an effective sample size below 30, or a k-hat,
        the shape of the tail of the ratios, above :math:`\min(1 - 1 / \log_{10} n, 0.7)`, or above one where the
        effective sample size is at least 200. Needs a fit with a density. For a target without `log_prob`, log p is
        the integral of the score along lines.
    "errors"
        How far a mean, standard deviation, 5% or 95% quantile read off the draws is from the posterior's, by these
        weights: the largest error plus two standard errors, see `skksivi.judge.Verdict`. Warns if one is wrong.
        Includes the parameters of a model in its own units. Needs reliable weights. Then this line decides, with
        those on tails and modes, and what the others see is "look" in the place of "warn" unless it is far off.
    "outliers"
        The share of draws in regions where the target has hardly any mass: those whose whitened score
        :math:`\|L^\top s(x)\|` is longer than 99.9% of those found where Metropolis-adjusted Langevin chains, which
        leave the target invariant, have moved 500 of the draws, fewer beyond 200 features; and those where the score
        is not finite. For exact draws it is 0.1%. Warns above 2%.
    "tails"
        The share of these chains that end beyond 99.9% of the draws, in the direction where it is largest: from the
        centre of their mode, to either side in each coordinate, or along a principal axis. It is 0.1% in each if the
        draws are right. Warns above 1% if p < 0.01, with Bonferroni's correction for the directions: the target has
        tails, or a side, where there are no draws. The ends are means over six times late in the chains, which makes
        false alarms rarer than p suggests. No density is needed. Where the weights are reliable, also the share of
        the target's mass there, which may not exceed 0.5%.
    "shape"
        Kolmogorov's distance of the ends of these chains from the draws, in the same directions. Warns above 0.15 if
        p < 0.01, with Bonferroni's correction: the chains leave every distribution but the target's.
    "modes"
        The share of draws that lie in a wrong mode, :math:`\tfrac12 \sum_k |w_k - \hat w_k|` for modes found by
        searches from draws, from points around them and, as in a fit, from points far out, with the weights of
        `skksivi.modes`. Warns above 5%, if beyond the standard errors; of modes with more than 1% of the mass and
        hardly a draw; and if more than 5% of the fit's mode searches would lead to modes that it has not found, see
        `whitening_.unseen`. A mode to which no search leads is not detected. Up to 200 features.
    "loss plateau"
        The fall of `loss_curve_` in its last quarter, by the Theil-Sen slope through means of blocks, as a share of
        the total fall from the first quarter on. Warns if it exceeds 5% and four standard errors.
    "whitening"
        The condition number of the covariance of the draws in the coordinates of the training, and before whitening.
        Warns above 100, and if the chains behind the whitening have not converged.
    "Stein means"
        How far the target's mean is from the mean of the draws, :math:`E[s_w] / E[s_w^2]` standard deviations, which
        is zero if the fit is right: in each coordinate and in the direction of the mean whitened score, which is
        found with one half of the draws and evaluated on the other; in each mode. Warns above 0.1, if beyond four
        standard errors.
    "Stein variances"
        :math:`-E[s_w u_w]` in the same directions of whitened coordinates u, and in the direction where it is
        farthest from one, found with one half of the draws. It is one if the fit is right, less if it is too narrow,
        more if it is too wide. Warns if a value is outside [0.8, 1.25] by four standard errors.

    A check that is not made is "not available" and says why; it is not "ok". Where the weights are reliable, the
    remedy of wrong draws is `skksivi.refine`. Fewer than one in a hundred reports on exact draws, from targets of
    many kinds, warn, see :doc:`/diagnose`. A report takes one to a few seconds if the score is cheap: it is evaluated
    at some 300,000 points, and at 200,000 more per mode if there are several.

    Parameters
    ----------
    est : approximator, KSIVIRegressor or KSIVIClassifier
        Fitted. A predictor knows its target.
    target : Target or callable, default=None
        What it was fitted to, or its score function; an approximator needs it.
    n_samples : int, default=2000
        Number of draws, at least 100; particles and states of chains are used at most once.
    random_state : int, RandomState or None, default=None
        Makes the report repeatable.

    Returns
    -------
    diagnosis : Diagnosis
        Print it for the report; it also has `ok`, `checks` and `plot()`.

    Raises
    ------
    TypeError
        `est` is not an approximator.
    NotFittedError
        Before `fit`.
    ValueError
        The target does not have the dimension of `est`, its score is finite at none of the draws, or the draws are
        not finite or all the same in a coordinate.

    See Also
    --------
    refine : A fit that draws by the weights.
    importance_sample : Weighted draws, and the divergence from the target.
    modes : The modes of a fit and their weights.
    skksivi.calibration.sbc : Simulation-based calibration.

    References
    ----------
    Liu, Q., Lee, J. and Jordan, M. (2016). A kernelized Stein discrepancy for goodness-of-fit tests.
    https://arxiv.org/abs/1602.03253

    Kent, J. and Tyler, D. (1991). Redescending M-estimates of multivariate location and scatter. Annals of Statistics
    19(4).

    Vehtari, A. et al. (2024). Pareto smoothed importance sampling. https://arxiv.org/abs/1507.02646

    Yao, Y. et al. (2018). Yes, but did it work? Evaluating variational inference. https://arxiv.org/abs/1802.02538

    Examples
    --------
    >>> from skksivi import KSIVIApproximator, diagnose
    >>> from skksivi.targets import Multimodal
    >>> q = KSIVIApproximator(max_iter=300, random_state=0).fit(Multimodal())
    >>> diagnose(q, Multimodal(), n_samples=1000, random_state=0).ok
    True
    """
    est, target = of_predictor(est, target)
    check_fit(est, target)
    check_integer(n_samples, "n_samples", min_val=100)
    device, seed = resolve_device(est.device_), make_seed(random_state)
    with ordinary_mode(device), torch.no_grad(), telling("The report on the fit, by some 300,000 calls of the score"):
        score = compared_score(target, est.n_features_in_, est.dtype, est.device_)
        generator = torch.Generator(device).manual_seed(seed)
        X = est.sample(_n_draws(unweighted(est.sampler_), n_samples), seed)
        x = torch.as_tensor(X, dtype=torch.float64, device=device)
        check_finite(x, score)
        if fixed := (x == x[0]).all(0).nonzero().flatten().tolist():
            also = f" and {len(fixed) - 1} other coordinates" if len(fixed) > 1 else ""
            raise ValueError(f"All draws of `est` are the same in {score.label(fixed[0])}{also}: each must vary.")
        name, parameters, report = type(est).__name__, est.get_params(), dict(vars(est))
        view = View(name, parameters, est.sampler_, report, score, x, score(x), generator, seed)
        if view.finite.sum() < 2:
            raise ValueError(f"`target` has a score that is finite at {int(view.finite.sum())} of {len(x)} draws.")
        return _report(view)


def _report(view: View) -> Diagnosis:
    """Make every check."""
    sample, missing = None, ""
    try:
        sample = importance_sample_of(view)
        view = view._replace(refines=sample.trusted and not isinstance(view.sampler, Refined))
    except REFUSALS as reason:
        missing = f"not available: {reason}"
    geometry, modes = geometry_and_modes(view)
    moments = stein_moments(view.x[view.finite], view.s[view.finite], geometry.cells)
    d = view.x.shape[1]
    checks: tuple[Check, ...] = (
        guarded("KSD", check_ksd, view),
        *(
            Check(name, math.nan, "", missing) if sample is None else guarded(name, check, view, sample)
            for name, check in (("weights", check_weights), ("errors", check_errors))
        ),
        guarded("outliers", check_outliers, view, geometry),
        *check_chains(view, geometry, sample),
        modes,
        guarded("loss plateau", check_loss, view),
        guarded("whitening", check_whitening, view),
        guarded("Stein means", check_means, view, moments),
        guarded("Stein variances", check_variances, view, moments),
    )
    if sample is not None and sample.trusted:
        checks = tuple(_beside_weights(check, d) for check in checks)
    return Diagnosis(
        view.name,
        checks,
        X=as_array(view.x),
        modes=as_array(geometry.cell),
        lost=as_array(geometry.lost),
        score_norms=(as_array(geometry.norms), as_array(geometry.reference)),
        variances=(as_array(moments.variance[:d]), as_array(moments.variance_se[:d])),
        losses=view.report.get("loss_curve_"),
        cost=_cost(view.report.get("fitted_by_", ""), view.report["stages_"], view.score.tally.total),
    )


def _cost(made_by: str, stages: Sequence[Stage], n_calls: int) -> str:
    """Say what made a fit, from how many calls of each stage, if that is known, and how many a report took."""
    total = f"{f'by {made_by}, ' if made_by else ''}from {sum(stage.n_calls for stage in stages):,} calls: "
    made = total + ", ".join(f"{stage.name} {stage.n_calls:,}" for stage in stages) + "; " if stages else ""
    return f"{made}this report took {n_calls:,}"


def _beside_weights(check: Check, d: int) -> Check:
    """Return a check of a fit of d features as it counts where reliable weights have judged the errors: it says what
    it sees, and warns if that is twice as far off as it allows, since a part of a fit may be off where its numbers
    are right.
    """
    far = {
        "KSD": check.value > 100 * allowed_ksd(d),  # of a shift ten times as large: it sees what no number shows
        "Stein means": check.value > 2 * THRESHOLDS.mean,
        "Stein variances": abs(math.log(max(check.value, 1e-300))) > 2 * math.log(STEIN_VARIANCES[1]),
    }
    decides = check.name in ("weights", "errors", "modes", "tails") or far.get(check.name, False)
    return check if decides or check.verdict != "warn" else check._replace(verdict="look")


def _n_draws(sampler: Sampler, n: int) -> int:
    """Return the number of draws to check: no particle or state of a chain twice."""
    return min(n, math.prod(sampler.x.shape[:-1])) if isinstance(sampler, Particles | Chains) else n
