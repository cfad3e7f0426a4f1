r"""What there is to know of a fit without draws of the target, in one report.

No single number tells a good fit. The discrepancy sees wrong places and shapes but not wrong weights of modes,
importance ratios see lost tails, Stein's identity sees wrong widths, and the loss says whether the training had come
to its end.
"""

from __future__ import annotations

import copy
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from sklearn.utils import check_scalar
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from skksivi._affine import Affine
from skksivi._arrays import as_array, make_seed, resolve_device
from skksivi._cells import Cells
from skksivi._fitting import N_MIXING_DRAWS
from skksivi._modes import Modes, _chains, _weigh
from skksivi._moments import stein_variances
from skksivi._pilot import around, covariance_root, find_modes
from skksivi._score import Score
from skksivi.base import BaseApproximator, ordinary_mode, score_of
from skksivi.metrics import Judge, ksd_test
from skksivi.plotting import LossDisplay
from skksivi.plotting._base import COLOURS, FAINT, REFERENCE_COLOUR, thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Check", "Diagnosis", "diagnose"]

#: Draws of the test by the discrepancy, and its random signs.
N_TESTED, N_BOOTSTRAP = 1000, 499

#: The p-value below which a discrepancy is beyond doubt, and the shift of every coordinate, in sd, that it may equal.
MAX_PVALUE, MAX_SHIFT = 0.01, 0.1

#: The squared discrepancy of a whitened Gaussian, per coordinate and per squared shift: E k(u, u') is about this.
KSD_OF_SHIFT = 1 / math.sqrt(3)

#: Draws whose importance ratios are found, the fewest of them, and the effective share beyond which no tail matters.
N_WEIGHED, MIN_RATIOS, HARMLESS = 2000, 50, 0.95

#: Draws at which two estimates of a log-density are compared, and their median difference, in nats, beyond which
#: ratios to it say nothing.
N_COMPARED, MAX_GAP = 200, 0.3

#: Draws from which chains start, up to 200 features, and the fewest; numbers in them, beyond.
N_MOVED, N_FEWEST, N_NUMBERS = 500, 100, 100_000

#: The quantile of the chains' scores beyond which a draw is astray, and the share allowed.
ASTRAY, MAX_ASTRAY = 0.999, 0.01

#: Draws, and points around all of them, from which climbs to modes start; features up to which there are climbs.
N_STARTS, N_AROUND, MAX_CLIMBED = 100, 40, 200

#: The share of a mode, by the curvature there, from which its lack of draws matters.
MIN_LOST = 0.01

#: The share of draws that may lie in a wrong mode.
MAX_MISPLACED = 0.05

#: Blocks of the last quarter of the loss, and the share of its whole fall that may fall there.
N_BLOCKS, MAX_FALL = 24, 0.05

#: Condition number of the draws in the coordinates of the training.
MAX_CONDITION = 100.0

#: Bounds of Stein variances.
STEIN_VARIANCES = (0.8, 1.25)

#: Standard errors within which a difference is noise.
N_SE = 4.0

#: Columns of a printed report, and its indent.
WIDTH, INDENT = 110, " " * 25

#: Errors that tell why a number cannot be had.
REFUSALS = (ValueError, ArithmeticError, ImportError, torch.linalg.LinAlgError)


class Check(NamedTuple):
    """One line of a diagnosis.

    Attributes
    ----------
    name : str
    value : float
        The number that was judged, NaN where there is none.
    text : str
        It in words, with what it is compared with.
    verdict : str
        "ok", "warn", or "not available: " and why.
    remedy : str
        What to do, one sentence; empty unless the verdict is "warn".
    """

    name: str
    value: float
    text: str
    verdict: str
    remedy: str = ""


@dataclass(repr=False)
class Diagnosis:
    """The report of `skksivi.diagnose`; indexed by the name of a check it gives that one.

    Attributes
    ----------
    estimator : str
        The class of the fit.
    checks : tuple of Check
    X : ndarray of shape (n, d)
        The draws that were looked at.
    modes : ndarray of shape (n,)
        Indices of the modes they are in.
    lost : ndarray of shape (k, d)
        Modes in which there are none.
    score_norms : ndarray of shape (n,)
        Lengths of their whitened scores, infinite where the score is not finite.
    reference_norms : ndarray of shape (m,)
        The same where Metropolis chains have moved some of them, empty if there are none.
    variances, variance_errors : ndarray of shape (d,)
        By Stein's identity, with standard errors.
    losses : ndarray or None
        The `loss_curve_`.

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

    @property
    def ok(self) -> bool:
        """Whether no check warns."""
        return not self.warnings

    @property
    def warnings(self) -> tuple[Check, ...]:
        """The checks that warn."""
        return tuple(check for check in self.checks if check.verdict == "warn")

    def __getitem__(self, name: str) -> Check:
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(f"no check is named {name!r}; there are {', '.join(c.name for c in self.checks)}.")

    def __str__(self) -> str:
        n, d = self.X.shape
        lines = [f"{self.estimator}, {n} draws of {d} features: {_summary(self.checks)}"]
        for check in self.checks:
            mark, text = (check.verdict, check.text) if check.text else ("-", check.verdict)
            lines += textwrap.wrap(f"  {mark:<5} {check.name:<16} {text}", WIDTH, subsequent_indent=INDENT)
            lines += textwrap.wrap(check.remedy, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
        if self.modes.max(initial=0) > 0 or self["modes"].verdict == "warn":
            lines.append(f"{INDENT}KSD does not see the weights of modes: judge these by the line on modes.")
        return "\n".join(lines)

    __repr__ = __str__

    def plot(self, axes: Any = None) -> Figure:
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
        if axes is None:
            import matplotlib.pyplot as plt  # not above, like all of matplotlib: it takes long

            _, axes = plt.subplots(2, 2, figsize=(9.5, 7), layout="constrained")
        axes = np.asarray(axes, dtype=object).ravel()
        if len(axes) != 4:
            raise ValueError(f"`axes` must be four, got {len(axes)}.")
        for draw, ax in zip((_plot_loss, _plot_variances, _plot_norms, _plot_modes), axes, strict=True):
            draw(self, ax)
        return axes[0].figure


class _View(NamedTuple):
    """What the checks look at: a fit, the score of its target, and draws x with scores s there, both (n, d)."""

    est: BaseApproximator
    score: Score
    x: Tensor
    s: Tensor
    generator: torch.Generator
    seed: int

    @property
    def finite(self) -> Tensor:
        """Where the score is finite (n,)."""
        return self.s.isfinite().all(1)


class _Geometry(NamedTuple):
    """The cell of each draw (n,), modes without draws (k, d), lengths of whitened scores (n,) and of chains' (m,)."""

    cell: Tensor
    lost: Tensor
    norms: Tensor
    reference: Tensor


def diagnose(
    est: BaseApproximator,
    target: Any,
    *,
    n_samples: int = 2000,
    random_state: int | np.random.RandomState | None = None,
) -> Diagnosis:
    r"""Report on a fit, from its draws and the score of its target.

    Seven checks, each with a value, a verdict and, where it warns, a remedy. With draws x, their scores s and
    whitened scores :math:`L^\top s`, L the Cholesky factor of the draws' covariance within their mode, they are:

    "KSD"
        The squared kernel Stein discrepancy, under the one kernel of `est.score`, which depends on the target alone,
        and the p-value of `skksivi.metrics.ksd_test` on 1,000 draws. Warns if it is beyond doubt (p < 0.01) and more
        than that of a Gaussian of which every coordinate is shifted by 0.1 standard deviations, which is 0.006 a
        feature. It does not see the weights of modes, nor a mode that is missing. Draws of chains or particles,
        which depend on one another, make the p-value approximate.
    "Pareto k-hat"
        The shape of the tail of the importance ratios :math:`r = p(x) / q(x)`. Above
        :math:`\min(1 - 1 / \log_{10} n, 0.7)` the fit lacks tails or a part of the target next to its draws, unless
        the ratios are as good as equal, by their effective share :math:`(E r)^2 / E r^2` of 95% or more. Needs a
        target with `log_prob`, a fit with a density and arviz-stats. Where the density is a mean over mixing draws, x
        is drawn of that very mean, so that its error gives no tails; where two such means differ by 0.3 nats, as in
        many dimensions, nothing is said.
    "stray draws"
        The share of draws in regions where the target has hardly any mass: those whose whitened score
        :math:`\|L^\top s(x)\|` is longer than 99.9% of those found where Metropolis-adjusted Langevin chains, which
        leave the target as it is, have moved 500 of the draws, fewer beyond 200 features; and those where the score
        is not finite. Of exact draws it is 0.1%. Warns above 1%.
    "modes"
        The share of draws that lie in a wrong mode, :math:`\tfrac12 \sum_k |w_k - \hat w_k|` for modes found by
        climbs from draws and from points three and ten standard deviations around them, with the weights of
        `skksivi.modes`. Warns above 5%, if beyond the standard errors, and of modes without draws whose share by
        Laplace's approximation is more than 1%. A mode far outside the draws is not seen. Up to 200 features.
    "loss plateau"
        The fall of `loss_curve_` in its last quarter by Theil and Sen's slope through means of blocks, as a share of
        the whole fall from the first quarter on. Warns if it is over 5% and four standard errors.
    "whitening"
        The condition number of the covariance of the draws in the coordinates of the training, and before whitening.
        Warns above 100, and where the chains behind the whitening have not settled.
    "Stein variances"
        :math:`-E[s_i (x_i - E x_i)]` of each coordinate, one if the fit is right; below it is too narrow, above too
        wide. Warns if one is outside [0.8, 1.25] by four standard errors.

    All together take one to a few seconds where the score is cheap: it is evaluated at some 300,000 points, and at
    200,000 more a mode where there are several.

    Parameters
    ----------
    est : approximator
        Fitted. For a predictor pass its `approximator_` and `target_`.
    target : Target or callable
        What it was fitted to, or its score function.
    n_samples : int, default=2000
        Draws to look at, at least 100; particles and states of chains are taken once at most.
    random_state : int, RandomState or None, default=None
        Makes the report repeatable.

    Returns
    -------
    diagnosis : Diagnosis
        Printed, it is the report; `ok`, `checks` and `plot()` are the rest.

    Raises
    ------
    TypeError
        `est` is not an approximator.
    NotFittedError
        Before `fit`.
    ValueError
        The target has another dimension than `est`, or its score is finite at none of the draws.

    References
    ----------
    Liu, Q., Lee, J. and Jordan, M. (2016). A kernelized Stein discrepancy for goodness-of-fit tests.
    https://arxiv.org/abs/1602.03253

    Owen, A. and Zhou, Y. (2000). Safe and effective importance sampling. JASA 95(449).

    Vehtari, A. et al. (2024). Pareto smoothed importance sampling. https://arxiv.org/abs/1507.02646

    Yao, Y. et al. (2018). Yes, but did it work? Evaluating variational inference. https://arxiv.org/abs/1802.02538

    Examples
    --------
    >>> from skksivi import KSIVIApproximator, diagnose
    >>> from skksivi.targets import Multimodal
    >>> q = KSIVIApproximator(max_iter=500, random_state=0).fit(Multimodal())
    >>> diagnose(q, Multimodal(), random_state=0).ok
    True
    """
    if not isinstance(est, BaseApproximator):
        raise TypeError(f"`est` must be a fitted approximator, got a {type(est).__name__}.")
    check_is_fitted(est)
    check_scalar(n_samples, "n_samples", Integral, min_val=100)
    device, seed = resolve_device(est.device), make_seed(random_state)
    with ordinary_mode(device), torch.no_grad():
        score = score_of(est, target)
        x = torch.as_tensor(est.sample(_n_draws(est, n_samples), seed), dtype=torch.float64, device=device)
        view = _View(est, score, x, score(x), torch.Generator(device).manual_seed(seed), seed)
        if view.finite.sum() < 2:
            raise ValueError(f"`target` has a score that is finite at {int(view.finite.sum())} of {len(x)} draws.")
        return _report(view)


def _report(view: _View) -> Diagnosis:
    """Make every check."""
    geometry, modes = _geometry_and_modes(view)
    variances, errors = stein_variances(view.x[view.finite], view.s[view.finite])
    losses = getattr(view.est, "loss_curve_", None)
    checks = (
        _guarded("KSD", _check_ksd, view),
        _guarded("Pareto k-hat", _check_ratios, view),
        _guarded("stray draws", _check_strays, view.est, geometry),
        modes,
        _guarded("loss plateau", _check_loss, view.est, losses),
        _guarded("whitening", _check_whitening, view),
        _check_variances(view.est, variances, errors),
    )
    return Diagnosis(
        type(view.est).__name__,
        checks,
        X=as_array(view.x),
        modes=as_array(geometry.cell),
        lost=as_array(geometry.lost),
        score_norms=as_array(geometry.norms),
        reference_norms=as_array(geometry.reference),
        variances=as_array(variances),
        variance_errors=as_array(errors),
        losses=losses,
    )


def _summary(checks: tuple[Check, ...]) -> str:
    warn, ok = (sum(check.verdict == verdict for check in checks) for verdict in ("warn", "ok"))
    return f"{warn} of {warn + ok} checks warn" if warn else f"all of {ok} checks are ok"


def _n_draws(est: Any, n: int) -> int:
    """Return the number of draws to look at: no particle or state of a chain twice."""
    points = getattr(est, "particles_", getattr(est, "chains_", None))
    return n if points is None else min(n, math.prod(points.shape[:-1]))


def _judged(name: str, value: float, text: str, remedy: str | None) -> Check:
    """Return a check that warns if there is a remedy."""
    return Check(name, value, text, "warn" if remedy else "ok", remedy or "")


def _guarded(name: str, check: Callable[..., Check], *args: Any) -> Check:
    """Return the check, or why it cannot be had."""
    try:
        return check(*args)
    except REFUSALS as reason:
        return Check(name, math.nan, "", f"not available: {reason}")


def _advice(est: Any, *parameters: str, otherwise: str = "use `KSIVIApproximator`") -> str:
    """Say what to change of the parameters that the estimator has and that do not have the value already."""
    own = est.get_params()
    if not any(hasattr(est, name) for name in ("family_", "particles_", "chains_")):
        return "one Gaussian is not enough, use `KSIVIApproximator`"
    texts = {
        "init": "start there by `init`",
        "max_iter": f"raise `max_iter` beyond {own.get('max_iter')}",
        "whiten": "set whiten='auto'",
        "n_warmup": f"raise `n_warmup` beyond {own.get('n_warmup')}",
        "mixing": "let `mixing` be 'auto' or a StudentT",
        "whiten_budget": "raise `whiten_budget`",
    }
    given = [name for name in parameters if name in own and str(own[name]) != "auto"]
    return ", or ".join([texts[name] for name in given] or [otherwise])


# The checks


def _check_ksd(view: _View) -> Check:
    """Test the draws by the discrepancy in the coordinates of `est.score`."""
    d = view.x.shape[1]
    judge = Judge(view.score, d, view.x.device)
    u = judge.map.whiten(view.x[view.finite][:N_TESTED])

    def score_u(u: Tensor) -> Tensor:
        on_device = u.to(view.x.device)
        return judge.map.whiten_score(view.score(judge.map.unwhiten(on_device))).to(u)

    test = ksd_test(as_array(u), score_u, kernel=judge.kernel, n_bootstrap=N_BOOTSTRAP, random_state=view.seed)
    allowed = d * MAX_SHIFT**2 * KSD_OF_SHIFT
    text = f"{test.statistic:.2g} with p = {test.pvalue:.2g}, up to {allowed:.2g} allowed"
    far = test.pvalue < MAX_PVALUE and test.statistic > allowed
    todo = _advice(view.est, "whiten", "mixing", "max_iter", "n_warmup")
    return _judged("KSD", test.statistic, text, f"The draws are not those of the target: {todo}." if far else None)


def _check_ratios(view: _View) -> Check:
    """Find the tail of the importance ratios."""
    if view.score.log_prob is None:
        raise ValueError("the target has no `log_prob` of tensors")
    x, log_q = _draws_with_density(view.est, view.generator)
    log_ratios = as_array(view.score.log_prob(x)) - log_q
    log_ratios = log_ratios[np.isfinite(log_ratios)]
    if len(log_ratios) < MIN_RATIOS:
        raise ValueError(f"there are {len(log_ratios)} finite importance ratios, {MIN_RATIOS} are needed")
    k, limit = _pareto_shape(log_ratios), min(1 - 1 / math.log10(len(x)), 0.7)
    share = _effective_share(log_ratios)
    text = f"{k:.2f}, up to {limit:.2f} allowed, effective share {share:.1%}"
    todo = _advice(view.est, "whiten", "mixing", "max_iter")
    lost = f"The fit lacks tails or a part of the target beside its draws: {todo}."
    return _judged("Pareto k-hat", k, text, lost if k > limit and share < HARMLESS else None)


def _draws_with_density(est: Any, generator: torch.Generator) -> tuple[Tensor, np.ndarray]:
    r"""Return draws (n, d) and the logarithms (n,) of their density, unweighted.

    Where that is a mean over K mixing draws :math:`z_k`, the draws x are of this very mixture, one of each
    :math:`q(x | z_k)`: then the ratios to it are exact, where those to the estimated density of other draws would
    have tails of their own (Owen and Zhou 2000). It must resemble the mixture of other mixing draws.

    Raises
    ------
    ValueError
        There is no density, or the mixtures differ too much.
    """
    if type(est)._log_density is BaseApproximator._log_density:
        raise ValueError(f"{type(est).__name__} has no density")
    q = copy.copy(est)
    vars(q).pop("reweighting_", None)
    if not hasattr(q, "family_"):
        x = q._sample(N_WEIGHED, generator).double()
        return x, q.score_samples(as_array(x))
    q.family_ = copy.deepcopy(q.family_).double()
    x = q._sample(N_MIXING_DRAWS, torch.Generator(generator.device).manual_seed(q._seed))  # the seed of z_k
    x = x[torch.randperm(len(x), generator=generator, device=x.device)[:N_WEIGHED]]
    log_q = q.score_samples(as_array(x))
    q._seed += 1
    gap = float(np.median(np.abs(log_q[:N_COMPARED] - q.score_samples(as_array(x[:N_COMPARED])))))
    if gap > MAX_GAP:
        raise ValueError(f"the density of the fit is an estimate, too rough here: two differ by {gap:.2g} nats")
    return x, log_q


def _pareto_shape(log_ratios: np.ndarray) -> float:
    """Return the shape k of the generalised Pareto distribution of the largest ratios, zero if all are equal."""
    try:
        from arviz_stats.base import array_stats  # an extra
    except ImportError as error:
        raise ImportError("arviz-stats is not installed, pip install 'skksivi[arviz]'") from error
    if np.ptp(log_ratios) < 1e-6:  # rounding errors have no tail
        return 0.0
    return float(array_stats.psislw(-log_ratios)[1])  # which takes minus the logarithms


def _effective_share(log_ratios: np.ndarray) -> float:
    r"""Return :math:`(\sum_i r_i)^2 / (n \sum_i r_i^2)`, one if all ratios are equal."""
    ratios = np.exp(log_ratios - log_ratios.max())
    return float(ratios.mean() ** 2 / np.square(ratios).mean())


def _geometry_and_modes(view: _View) -> tuple[_Geometry, Check]:
    """Find the modes near the draws, weigh them, and run chains in them."""
    x = view.x[view.finite]
    whole = Affine(x.mean(0), covariance_root(x))
    cells, lost = Cells([whole], x.new_zeros(1)), (x[:0], x.new_zeros(0))
    try:
        cells, lost = _find_cells(view, whole)
        check = _check_modes(view, cells, lost)
    except REFUSALS as reason:
        check = Check("modes", math.nan, "", f"not available: {reason}")
    return _geometry(view, cells, lost[0]), check


def _find_cells(view: _View, whole: Affine) -> tuple[Cells, tuple[Tensor, Tensor]]:
    """Return the cells of modes that have draws, and the centres (k, d) and shares (k,) of those that have none."""
    x, d = view.x[view.finite], view.x.shape[1]
    if d > MAX_CLIMBED:
        raise ValueError(f"there are {d} features, and modes are searched up to {MAX_CLIMBED}")
    starts = torch.cat([x[:N_STARTS], around(whole, N_AROUND, view.generator)])
    found = find_modes(view.score, starts, view.generator)
    cells = Cells(found.maps, found.weights.log())
    counts = cells.counts(x)
    empty = (counts == 0) & (found.weights > MIN_LOST)
    centres = torch.stack([a.m for a in found.maps])
    return cells.sorted_by(counts.nonzero().flatten()), (centres[empty], found.weights[empty])


def _check_modes(view: _View, cells: Cells, lost: tuple[Tensor, Tensor]) -> Check:
    """Compare the shares of modes with their weights."""
    centres, shares = lost
    if len(centres):
        where = np.array2string(as_array(centres[0])[:5], precision=2)
        text = f"{len(centres)} of {len(centres) + len(cells.maps)} without draws, of share {shares.sum():.0%}"
        remedy = f"No draw is in the mode at {where}: {_advice(view.est, 'whiten', 'init')}."
        return _judged("modes", shares.sum().item(), text, remedy)
    if len(cells.maps) == 1:
        return _judged("modes", 0.0, "1", None)
    found, _, _ = _weigh(view.score, view.x[view.finite], cells, view.generator)
    if not found.trusted:
        raise ValueError(f"the weights of {len(found.weights)} modes are not to be trusted, {found.reason}")
    return _judged(*_misplaced(found, len(view.x)))


def _misplaced(found: Modes, n: int) -> tuple[str, float, str, str | None]:
    """Judge the weights of modes by n draws."""
    gaps = found.shares - found.weights
    misplaced = float(np.abs(gaps).sum() / 2)
    noise = np.sqrt(found.standard_errors**2 + found.weights * (1 - found.weights) / n)
    wrong = misplaced > MAX_MISPLACED and (np.abs(gaps) > N_SE * noise).any()
    k = int(np.abs(gaps).argmax())
    remedy = (
        f"The mode at {np.array2string(found.centres[k][:5], precision=2)} has {found.shares[k]:.0%} of the draws, "
        f"where its weight is {found.weights[k]:.0%}: modes(est, target, reweight=True) mends that."
    )
    text = f"{len(gaps)}, {misplaced:.1%} of the draws in a wrong one"
    return "modes", misplaced, text, remedy if wrong else None


def _geometry(view: _View, cells: Cells, lost: Tensor) -> _Geometry:
    """Measure whitened scores at the draws and where chains have moved some of them."""
    x = view.x[view.finite]
    cells = cells.refined(x)
    norms = view.x.new_full((len(view.x),), math.inf)
    norms[view.finite] = _whitened_norms(cells, cells.assign(x), view.s[view.finite])
    n_moved = max(N_FEWEST, min(N_MOVED, N_NUMBERS // x.shape[1]))
    try:
        y = _moved(view.score, x[:n_moved], cells, view.generator)
        s = view.score(y)
        at_home = stein_variances(y, s)[0].mean() > 0  # else they have run away
        reference = _whitened_norms(cells, cells.assign(y), s)[: len(y) if at_home else 0]
    except REFUSALS:
        reference = x.new_empty(0)
    return _Geometry(cells.assign(view.x), lost, norms, reference)


def _moved(score: Score, x: Tensor, cells: Cells, generator: torch.Generator) -> Tensor:
    """Return the states of Metropolis chains that start at draws x (n, d), each with the map of its cell."""
    cell = cells.assign(x)
    parts = [_chains(score, x[cell == k], cells.maps[k], generator) for k in cell.unique().tolist()]
    return torch.cat([part.flatten(0, 1) for part in parts])


def _whitened_norms(cells: Cells, cell: Tensor, s: Tensor) -> Tensor:
    """Return the lengths (n,) of scores s (n, d) whitened by the maps of their cells."""
    norms = s.new_empty(len(s))
    for k, a in enumerate(cells.maps):
        norms[cell == k] = torch.linalg.vector_norm(a.whiten_score(s[cell == k]), dim=1)
    return norms


def _check_strays(est: Any, geometry: _Geometry) -> Check:
    """Count the draws whose scores are longer than those of the target."""
    if not len(geometry.reference):
        raise ValueError("chains that start at the draws run away, as from a score of the wrong sign")
    limit = _limit(geometry.reference)
    share = (geometry.norms > limit).double().mean().item()
    text = f"{share:.1%} with whitened scores longer than {limit:.3g}"
    remedy = (
        f"Draws lie where the target has hardly any mass: {_advice(est, 'whiten', 'mixing', 'max_iter', 'n_warmup')}."
    )
    return _judged("stray draws", share, text, remedy if share > MAX_ASTRAY else None)


def _limit(norms: Any) -> float:
    return float(np.quantile(as_array(norms), ASTRAY))


def _check_loss(est: Any, losses: np.ndarray | None) -> Check:
    """Tell whether the loss is still falling in its last quarter."""
    if losses is None:
        hint = ", see its `diagnose()`" if hasattr(est, "diagnose") else ""
        raise ValueError(f"{type(est).__name__} has no loss curve{hint}")
    finite = losses[np.isfinite(losses)]
    last = finite[-(len(finite) // 4) :]
    if len(last) < 2 * N_BLOCKS:
        raise ValueError(f"a quarter of the loss curve is {len(last)} iterations, and {2 * N_BLOCKS} are needed")
    slope, se = theil_sen(np.array([block.mean() for block in np.array_split(last, N_BLOCKS)]))
    whole = abs(np.median(finite[: len(last)]) - np.median(last)) + abs(slope) * N_BLOCKS
    fall = float(-slope * N_BLOCKS / whole) if whole > 0 else 0.0
    falling = fall > MAX_FALL and -slope > N_SE * se
    steep = abs(slope) > N_SE * se
    way = f"{fall:.0%} of its fall is in the last quarter" if steep else "flat in the last quarter"
    text = f"{way}, slope {slope / max(se, 1e-300):.1f} standard errors"
    todo = _advice(est, "max_iter", otherwise="train on")
    return _judged("loss plateau", fall, text, f"The loss is still falling: {todo}." if falling else None)


def theil_sen(y: np.ndarray) -> tuple[float, float]:
    r"""Return the median of the slopes of all pairs of equidistant values (n,), and its standard error.

    .. math:: \hat b = \mathrm{median}_{i < j} \frac{y_j - y_i}{j - i}, \qquad
        \mathrm{se} = \sqrt{\pi / 3}\, \hat\sigma \left( \sum_i (i - \bar i)^2 \right)^{-1/2}

    with :math:`\hat\sigma` the median absolute residual over 0.6745: the efficiency of the slope is that of
    Wilcoxon's test, :math:`3 / \pi` for Gaussian noise.

    References
    ----------
    Sen, P. K. (1968). Estimates of the regression coefficient based on Kendall's tau. JASA 63(324).
    """
    t = np.arange(len(y), dtype=np.float64)
    i, j = np.triu_indices(len(y), 1)
    slope = np.median((y[j] - y[i]) / (j - i))
    residuals = y - slope * t
    sigma = np.median(np.abs(residuals - np.median(residuals))) / 0.6745
    return float(slope), float(math.sqrt(math.pi / 3) * sigma / np.linalg.norm(t - t.mean()))


def _check_whitening(view: _View) -> Check:
    """Compare the condition of the draws' covariance before and after whitening."""
    whitening: Any = getattr(view.est, "whitening_", None)
    if whitening is None:
        raise ValueError(f"{type(view.est).__name__} is not whitened")
    n, d = view.x.shape
    if n < 2 * d:
        raise ValueError(f"there are {n} draws of {d} features; `n_samples` of {2 * d} are needed")
    before, after = (_condition(points) for points in (view.x, whitening.map.whiten(view.x)))
    text = f"condition {after:.2g}, before whitening {before:.2g}"
    remedy = None
    if after > MAX_CONDITION:
        todo = _advice(view.est, "whiten", otherwise="rescale the parameters")
        remedy = f"The coordinates of the training are of unlike scales: {todo}."
    if not whitening.settled:
        todo = _advice(view.est, "whiten_budget", otherwise="start near a mode by `init`")
        remedy = f"The chains that explored the target had not settled: {todo}."
    return _judged("whitening", after, text + ("" if whitening.settled else ", not settled"), remedy)


def _condition(x: Tensor) -> float:
    """Return the condition number of the covariance of points (n, d)."""
    return float(torch.linalg.cond(x - x.mean(0)) ** 2)


def _check_variances(est: Any, variances: Tensor, errors: Tensor) -> Check:
    """Judge the widths by Stein's identity."""
    low, high = STEIN_VARIANCES
    excess = torch.maximum(low - variances, variances - high) / errors.clamp_min(1e-300)
    i = int(excess.argmax())
    value, text = variances[i].item(), f"{variances.min():.2f} to {variances.max():.2f}, errors {errors.max():.2g}"
    remedy = None
    if excess[i] > N_SE:
        way, todo = "narrow" if value < low else "wide", _advice(est, "whiten", "max_iter", "n_warmup")
        remedy = f"The draws are too {way}, most in coordinate {i}: {todo}."
    if (variances + N_SE * errors < 0).any():
        remedy = "The score has the wrong sign: it is the gradient of log p, not of -log p."
    return _judged("Stein variances", value, text, remedy)


# The figure


def _plot_loss(report: Diagnosis, ax: Axes) -> None:
    """Show the loss, or that there is none."""
    if report.losses is None:
        ax.text(0.5, 0.5, f"{report.estimator} has no loss", ha="center", va="center", color=REFERENCE_COLOUR)
        ax.set_axis_off()
        return
    LossDisplay(losses=report.losses).plot(ax)
    ax.axvspan(0.75 * len(report.losses), len(report.losses), color=FAINT, alpha=0.2, linewidth=0, zorder=-1)


def _plot_variances(report: Diagnosis, ax: Axes) -> None:
    """Show the Stein variances with two standard errors."""
    i = np.arange(len(report.variances))
    ax.axhspan(*STEIN_VARIANCES, color=FAINT, alpha=0.2, linewidth=0)
    ax.axhline(1, color=FAINT, linewidth=0.8)
    ax.errorbar(i, report.variances, 2 * report.variance_errors, fmt="o", color=COLOURS[0], markersize=4)
    ax.locator_params(axis="x", integer=True)
    ax.set(xlabel="coordinate", ylabel=r"Stein variance $-E[s_i (x_i - E x_i)]$")
    ax.margins(y=0.2)


def _plot_norms(report: Diagnosis, ax: Axes) -> None:
    """Show the lengths of whitened scores, of the draws and of where chains moved them."""
    norms, reference = report.score_norms[np.isfinite(report.score_norms)], report.reference_norms
    top = max([np.quantile(norms, 0.999), *([1.3 * _limit(reference)] if len(reference) else [])])
    bins = np.linspace(0, top, 51).tolist()
    ax.hist(norms.clip(max=top), bins, density=True, color=COLOURS[0], alpha=0.5, label="draws")
    if len(reference):
        ax.hist(reference, bins, density=True, histtype="step", color=REFERENCE_COLOUR, label="moved by chains")
        ax.axvline(_limit(reference), color=COLOURS[1], linewidth=1, label="stray beyond")
    ax.set(xlabel=r"length of the whitened score $|L^\top s|$", yticks=[], ylim=(0, 1.5 * ax.get_ylim()[1]))
    ax.legend(frameon=False, loc="upper left")


def _plot_modes(report: Diagnosis, ax: Axes) -> None:
    """Show the draws in the plane of most spread, coloured by mode, and the modes that have none."""
    u, lost = _in_plane(report)
    cells = np.unique(report.modes)
    for k in cells:
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
    ax.set(xlabel=x_name, ylabel=y_name, title="draws by mode")


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
