"""The checks of a diagnosis that need no modes."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from skksivi._utils.arrays import as_array
from skksivi._utils.psis import most_trusted, pareto_smoothed
from skksivi.diagnostics._report import Check
from skksivi.diagnostics._view import MAX_SHIFT, N_SE, View, judged
from skksivi.families._derived import knows_density, unweighted
from skksivi.families._samplers import Chains
from skksivi.families._weights import Estimate, ImportanceSample, importance_weights
from skksivi.metrics import ksd_test
from skksivi.stein._discrepancy import FixedKernelKSD

#: Draws of the test by the discrepancy, and its random signs.
N_TESTED, N_BOOTSTRAP = 1000, 499

#: The p-value below which a discrepancy is significant.
MAX_PVALUE = 0.01

#: The squared discrepancy of a whitened Gaussian, per coordinate and per squared shift: E k(u, u') is about this.
KSD_OF_SHIFT = 1 / math.sqrt(3)

#: Number of draws with importance ratios, and the effective share above which their tail does not matter.
N_WEIGHED, HARMLESS = 2000, 0.95

#: Largest accepted divergence per feature, in nats, and logarithm of a ratio of standard deviations.
MAX_DIVERGENCE, MAX_LOG_RATIO = 0.05, math.log(1.1)

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
    allowed = d * MAX_SHIFT**2 * KSD_OF_SHIFT
    text = f"{test.statistic:.2g}, up to {allowed:.2g} allowed; a test of 0 has p = {test.pvalue:.2g}"
    far = test.pvalue < MAX_PVALUE and test.statistic > allowed
    todo = view.advice("whiten", "mixing", "max_iter", "n_warmup")
    return judged("KSD", test.statistic, text, f"The draws do not come from the target: {todo}." if far else None)


def importance_sample_of(view: View) -> ImportanceSample:
    """Return some of the draws, with importance weights."""
    if not knows_density(view.sampler):
        raise ValueError(f"{view.name} has no density")
    return importance_weights(view.sampler, view.score, view.x[view.finite][:N_WEIGHED], view.seed)


def check_ratios(view: View, sample: ImportanceSample) -> Check:
    """Check the tail of the importance ratios."""
    r = sample.log_ratios[sample.of_fit]
    log_weights, k = pareto_smoothed(r[np.isfinite(r)])
    w, limit = np.exp(log_weights - log_weights.max()), most_trusted(len(r))
    share = w.sum() ** 2 / np.square(w).sum() / len(r)
    text = f"{k:.2f}, up to {limit:.2f} allowed, effective share {share:.1%}"
    todo = view.advice("whiten", "mixing", "max_iter")
    lost = k > limit and share < HARMLESS
    far = not sample.trusted and share < math.exp(-MAX_DIVERGENCE * sample.X.shape[1])
    lacks = "lacks tails or a part of the target next to its draws"
    what = lacks if lost else "is too far from the target for importance weights"
    return judged("Pareto k-hat", k, text, f"The fit {what}: {todo}." if lost or far else None)


def check_divergence(view: View, sample: ImportanceSample) -> Check:
    """Check the divergence from the target, and the mean and the spread of each coordinate, by the weights."""
    if not sample.trusted:
        raise ValueError(
            f"k-hat is {sample.k:.2f}, the effective share {sample.share:.1%}: the weights are uninformative"
        )
    (J, se, se_below, *_), d = sample.certificate(), sample.X.shape[1]
    (shift, shift_se), (square, square_se) = (map(np.asarray, found) for found in moments_by_weights(sample))
    off = np.abs(shift) - N_SE * shift_se - MAX_SHIFT
    wide = np.abs(np.log(square)) / 2 - N_SE * square_se / (2 * square) - MAX_LOG_RATIO
    text = f"{J:.2g} nats, standard error {se:.1g}, up to {MAX_DIVERGENCE * d:.2g} allowed"
    todo, remedy = view.advice("whiten", "mixing", "max_iter"), None
    i, j = int(off.argmax()), int(wide.argmax())
    if J - N_SE * se_below > MAX_DIVERGENCE * d:
        remedy = f"The draws do not come from the target: {todo}."
    if wide[j] > 0:
        way = "narrow" if square[j] > 1 else "wide"
        ratio = f"the sd of the target is {square[j] ** 0.5:.2f} times theirs"
        remedy = f"The draws are too {way} in {view.score.label(j)}, {ratio}: {todo}."
    if off[i] > 0:
        where = f"{shift[i]:+.2f} sd from the mean of the draws"
        remedy = f"The mean of the target in {view.score.label(i)} is {where}: {todo}."
    return judged("divergence", J, text, remedy)


def moments_by_weights(sample: ImportanceSample) -> tuple[Estimate, Estimate]:
    """Return means and mean squares (d,) of the target, in units u of the moments of the fit, with standard errors.

    Both use weights of the same draws, so that heavy tails affect them equally.
    """
    n, w, v = len(sample.weights), sample.weights[:, None], sample.weights_of_fit[:, None]
    centred = sample.X - (v * sample.X).sum(0)
    u = centred / np.sqrt((v * np.square(centred)).sum(0))

    def mean(f: np.ndarray, of_fit: float) -> Estimate:
        value = (w * f).sum(0)
        return Estimate(value, n**0.5 * (w * (f - value) - v * (f - of_fit)).std(0))

    return mean(u, 0.0), mean(np.square(u), 1.0)


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
