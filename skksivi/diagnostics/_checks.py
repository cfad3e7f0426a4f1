"""The checks of a diagnosis that need no modes."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from skksivi._utils.arrays import as_array
from skksivi._utils.psis import most_trusted
from skksivi.diagnostics._report import Check
from skksivi.diagnostics._view import N_SE, View, judged
from skksivi.estimators._judge import of_weights
from skksivi.families._derived import knows_density, unweighted
from skksivi.families._samplers import Chains
from skksivi.families._weights import LEAST_EFFECTIVE, MOST_LEFT_OUT, ImportanceSample, importance_weights
from skksivi.judge._thresholds import THRESHOLDS
from skksivi.metrics import ksd_test
from skksivi.stein._discrepancy import FixedKernelKSD

#: Draws of the test by the discrepancy, and its random signs.
N_TESTED, N_BOOTSTRAP = 1000, 499

#: The p-value below which a discrepancy is significant.
MAX_PVALUE = 0.01

#: The squared discrepancy of a whitened Gaussian, per coordinate and per squared shift: E k(u, u') is about this.
KSD_OF_SHIFT = 1 / math.sqrt(3)

#: The most draws that are weighted.
N_WEIGHED = 2000

#: Blocks of the last quarter of the loss, and the accepted share of its total fall there.
N_BLOCKS, MAX_FALL = 24, 0.05

#: Condition number of the draws in the coordinates of the training.
MAX_CONDITION = 100.0


def check_ksd(view: View) -> Check:
    """Test the draws by the discrepancy in the coordinates of `est.score`."""
    d = view.x.shape[1]
    judge = FixedKernelKSD(view.score, d, view.x.device)
    u = judge.map.whiten(view.x[view.finite][:N_TESTED])

    def score_u(u: Tensor) -> Tensor:
        on_device = u.to(view.x.device)
        return judge.map.whiten_score(view.score(judge.map.unwhiten(on_device))).to(u)

    test = ksd_test(as_array(u), score_u, kernel=judge.kernel, n_bootstrap=N_BOOTSTRAP, random_state=view.seed)
    allowed = d * THRESHOLDS.mean**2 * KSD_OF_SHIFT
    text = f"{test.statistic:.2g}, up to {allowed:.2g} allowed; a test of 0 has p = {test.pvalue:.2g}"
    far = test.pvalue < MAX_PVALUE and test.statistic > allowed
    todo = view.correction("whiten", "mixing", "max_iter", "n_warmup")
    return judged("KSD", test.statistic, text, f"The draws do not come from the target: {todo}." if far else None)


def importance_sample_of(view: View) -> ImportanceSample:
    """Return some of the draws, with importance weights."""
    if not knows_density(view.sampler):
        raise ValueError(f"{view.name} has no density")
    return importance_weights(view.sampler, view.score, view.x[view.finite][:N_WEIGHED], view.seed)


def check_weights(view: View, sample: ImportanceSample) -> Check:
    """Check whether the importance weights are reliable."""
    n, effective = len(sample.weights), sample.share * len(sample.weights)
    text = f"effective sample size {effective:,.0f} of {n:,}, k-hat {sample.k:.2f}; "
    text += f"{sample.lost:.1%} of the mass where p > 10 q"
    if sample.left_out > MOST_LEFT_OUT:
        why = f"the log-density of the target is unknown at {sample.left_out:.0%} of the draws: give it a `log_prob`"
        return judged("weights", effective, text, f"The weights are not reliable, since {why}.")
    needed = f"effective sample size {LEAST_EFFECTIVE} or more and k-hat {most_trusted(n):.2f} or less"
    remedy = f"The fit is too far from the target for reliable weights ({needed}): "
    remedy += f"{view.advice('whiten', 'mixing', 'max_iter')}."
    return judged("weights", effective, text, None if sample.trusted else remedy)


def check_errors(view: View, sample: ImportanceSample) -> Check:
    """Check the means, standard deviations and quantiles of the draws against the posterior's, by the weights."""
    verdict = of_weights(sample, view.score)
    if not sample.trusted or verdict.errors is None:
        raise ValueError("the weights are not reliable")
    if verdict.good and verdict.errors.se > 1:  # within the noise, which is no proof that it is small
        raise ValueError(f"the standard errors are up to {verdict.errors.se:.1f} times what is allowed")
    text = f"{verdict.reason}; up to {THRESHOLDS.mean:g} sd and {THRESHOLDS.sd:.0%} allowed"
    remedy = f"A number read off the draws is wrong: {view.correction('whiten', 'mixing', 'max_iter')}."
    return judged("errors", verdict.errors.worst(0).excess, text, None if verdict.good else remedy)


def check_loss(view: View) -> Check:
    """Tell whether the loss is still falling in its last quarter."""
    losses = view.report.get("loss_curve_")
    if losses is None:
        hint = ", see its `diagnose()`" if isinstance(unweighted(view.sampler), Chains) else ""
        raise ValueError(f"{view.name} has no loss curve{hint}")
    if not len(losses):
        raise ValueError("the start was accurate, so nothing was trained")
    finite = losses[np.isfinite(losses)]
    last = finite[-(len(finite) // 4) :]
    if len(last) < 2 * N_BLOCKS:
        raise ValueError(f"a quarter of the loss curve is {len(last)} iterations, and {2 * N_BLOCKS} are needed")
    slope, se = theil_sen(np.array([block.mean() for block in np.array_split(last, N_BLOCKS)]))
    whole = abs(np.median(finite[: len(last)]) - np.median(last)) + abs(slope) * N_BLOCKS
    fall = float(-slope * N_BLOCKS / whole) if whole > 0 else 0.0
    falling = fall > MAX_FALL and -slope > N_SE * se
    steep = abs(slope) > N_SE * se
    way = f"{fall:.0%} of its fall is in the last quarter" if steep else "level in the last quarter"
    text = f"{way}, slope {slope / max(se, 1e-300):.1f} standard errors, beyond {N_SE:g} it counts"
    todo = view.advice("max_iter", otherwise="train on")
    return judged("loss plateau", fall, text, f"The loss is still falling: {todo}." if falling else None)


def theil_sen(y: np.ndarray) -> tuple[float, float]:
    r"""Return the median of the slopes of all pairs of equidistant values (n,), and its standard error.

    .. math:: \hat b = \mathrm{median}_{i < j} \frac{y_j - y_i}{j - i}, \qquad
        \mathrm{se} = \sqrt{\pi / 3}\, \hat\sigma \left( \sum_i (i - \bar i)^2 \right)^{-1/2}

    with :math:`\hat\sigma` the median absolute residual over 0.6745: the efficiency of the slope equals the
    efficiency of Wilcoxon's test, :math:`3 / \pi` for Gaussian noise.

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


def check_whitening(view: View) -> Check:
    """Compare the condition of the draws' covariance before and after whitening."""
    whitening = view.report.get("whitening_")
    if whitening is None:
        raise ValueError(f"{view.name} is not whitened")
    n, d = view.x.shape
    if n < 2 * d:
        raise ValueError(f"there are {n} draws of {d} features; `n_samples` of {2 * d} are needed")
    before, after = (_condition(points) for points in (view.x, whitening.whiten(view.x)))
    text = f"condition {after:.2g}, before whitening {before:.2g}"
    remedy = None
    if after > MAX_CONDITION:
        todo = view.advice("whiten", otherwise="rescale the parameters")
        remedy = f"The coordinates of the training have different scales: {todo}."
    if not whitening.converged:
        todo = view.advice("whiten", otherwise="start near a mode by `init`")
        remedy = f"The chains that explored the target had not converged: {todo}."
    if whitening.attempts:
        last = whitening.attempts[-1]
        text += f"; {last.stage}: {last.verdict or 'no points'}"
    return judged("whitening", after, text + ("" if whitening.converged else ", not converged"), remedy)


def _condition(x: Tensor) -> float:
    """Return the condition number of the covariance of points (n, d)."""
    return float(torch.linalg.cond(x - x.mean(0)) ** 2)
