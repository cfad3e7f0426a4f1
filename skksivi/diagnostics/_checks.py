"""The checks of a report: weights, discrepancy and training, identities of Stein, and chains."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import kolmogorov
from scipy.stats import betabinom, norm
from torch import Tensor

from skksivi._utils.arrays import as_array
from skksivi._utils.monte_carlo import most_trusted
from skksivi.coordinates._affine import Affine
from skksivi.diagnostics._geometry import N_SE, RUN_AWAY, STEIN_VARIANCES, Check, Geometry, View, judged, middle
from skksivi.estimators._judge import of_weights
from skksivi.families._derived import knows_density, unweighted
from skksivi.families._samplers import Chains
from skksivi.families._weights import Source
from skksivi.inference._importance import is_same
from skksivi.judge import LEAST_EFFECTIVE, MOST_LEFT_OUT, THRESHOLDS, Grade, WeightedDraws
from skksivi.metrics import ksd_test
from skksivi.pilot._log_density import Cells
from skksivi.pilot._mixture import gaussian_of
from skksivi.pilot._points import MAX_FEATURES
from skksivi.stein._discrepancy import (
    N_SCORES,
    FixedKernelKSD,
    first_difference,
    stein_violations,
    suspect_directions,
)

#: Weighted draws of a report.
N_WEIGHTED = 2000

#: The p-value, of the discrepancy or over all directions, below which it is significant.
MAX_PVALUE = 0.01


def allowed_ksd(d: int) -> float:
    """Return about the KSD of a whitened Gaussian that is shifted by the limit of a mean in each of d coordinates."""
    return d * THRESHOLDS.mean**2 / math.sqrt(3)


def check_ksd(view: View) -> Check:
    """Test the draws by the discrepancy in the coordinates of `est.score`."""
    d = view.x.shape[1]
    judge = FixedKernelKSD(view.score, d, view.x.device)
    u = judge.map.whiten(view.x[view.finite][:1000])

    def score_u(u: Tensor) -> Tensor:
        on_device = u.to(view.x.device)
        return judge.map.whiten_score(view.score(judge.map.unwhiten(on_device))).to(u)

    test = ksd_test(as_array(u), score_u, kernel=judge.kernel, n_bootstrap=499, random_state=view.seed)
    allowed = allowed_ksd(d)
    text = f"{test.statistic:.2g}, up to {allowed:.2g} allowed; a test of 0 has p = {test.pvalue:.2g}"
    far = test.pvalue < MAX_PVALUE and test.statistic > allowed
    remedy = f"The draws do not come from the target: {view.correction()}."
    return judged("KSD", test.statistic, text, remedy if far else None)


def importance_sample_of(view: View) -> WeightedDraws:
    """Return some of the draws, with importance weights."""
    if not knows_density(view.sampler):
        raise ValueError(f"{view.name} has no density")
    kept = view.report.get("weighted_draws_")  # on which the verdict rests
    source = Source(view.sampler, view.score, kept.seed if kept else view.seed, before=kept, is_exact=True)
    if kept is not None and not is_same(kept, source):
        kept, source = None, Source(view.sampler, view.score, view.seed, is_exact=True)
    found = source.draw(N_WEIGHTED + (len(kept.X) if kept else 0))
    if found is None:
        raise ValueError("the log-density of the target cannot be found by its score")
    return found


def check_weights(view: View, sample: WeightedDraws) -> Check:
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


def check_errors(view: View, sample: WeightedDraws) -> Check:
    """Check the means, standard deviations and quantiles of the draws against the posterior's, by the weights."""
    map_, V = None, None
    if 1 < sample.draws.shape[1] <= MAX_FEATURES:
        draws = torch.as_tensor(sample.draws).to(view.score.device)
        with suppress(torch.linalg.LinAlgError):  # of draws in a plane
            map_ = gaussian_of(draws)
            V = suspect_directions(map_.pull_back(view.score.double), map_.whiten(draws[: N_SCORES // 2]))
    verdict = of_weights(sample, view.score, map_, V)
    if not sample.trusted or verdict.errors is None:
        raise ValueError("the weights are not reliable")
    todo = view.correction("whiten", "mixing", "max_iter")
    if verdict.grade == Grade.ROUGH:
        return Check("errors", verdict.within, verdict.reason, "look", f"A number may be off: {todo}.")
    remedy = f"A number read off the draws is wrong: {todo}."
    return judged("errors", verdict.within, verdict.reason, None if verdict.good else remedy)


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
    n_blocks = 24
    if len(last) < 2 * n_blocks:
        raise ValueError(f"a quarter of the loss curve is {len(last)} iterations, and {2 * n_blocks} are needed")
    slope, se = theil_sen(np.array([block.mean() for block in np.array_split(last, n_blocks)]))
    whole = abs(np.median(finite[: len(last)]) - np.median(last)) + abs(slope) * n_blocks
    fall = float(-slope * n_blocks / whole) if whole > 0 else 0.0
    falling = fall > 0.05 and -slope > N_SE * se
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
    if after > 100.0:
        todo = view.advice("whiten", otherwise="rescale the parameters")
        remedy = f"The coordinates of the training have different scales: {todo}."
    if whitening.is_rough:
        todo = view.advice("whiten", otherwise="start near a mode by `init`")
        remedy = f"The chains that explored the target had not converged: {todo}."
    if whitening.attempts:
        last = whitening.attempts[-1]
        text += f"; {last.stage}: {last.verdict or 'no points'}"
    return judged("whitening", after, text + (", not converged" if whitening.is_rough else ""), remedy)


def _condition(x: Tensor) -> float:
    """Return the condition number of the covariance of points (n, d)."""
    return float(torch.linalg.cond(x - x.mean(0)) ** 2)


class ModeTerms(NamedTuple):
    """The share r (n,) that a mode has of each draw and its gradient, the draws less their centre and their scores,
    all (n, d).
    """

    r: Tensor
    slope: Tensor
    gap: Tensor
    s: Tensor

    def turned(self, L: Tensor) -> ModeTerms:
        """Return the same in coordinates u with x = m + L u."""
        u = torch.linalg.solve_triangular(L, self.gap.mT, upper=False).mT
        return ModeTerms(self.r, self.slope @ L, u, self.s @ L)

    def halves(self) -> tuple[ModeTerms, ModeTerms]:
        """Return the terms of the earlier and of the later half of the draws."""
        first, second = zip(*(a.chunk(2) for a in self), strict=True)
        return ModeTerms(*first), ModeTerms(*second)


class SteinMoments(NamedTuple):
    """Shifts and variances (d + 2,), with standard errors, and the coordinates closest to their directions.

    The directions are the d coordinates and two that stand out; with several modes each value is the worst.
    """

    shift: Tensor
    shift_se: Tensor
    variance: Tensor
    variance_se: Tensor
    shift_along: Tensor
    variance_along: Tensor


def terms_of(x: Tensor, s: Tensor, cells: Cells) -> list[tuple[ModeTerms, Tensor]]:
    """Return the terms of each mode that has enough of the draws x (n, d), and a root L (d, d) of its covariance."""
    r = cells.log_shares(x).softmax(1)
    g = torch.stack([torch.linalg.solve_triangular(a.L.mT, -a.whiten(x).mT, upper=True).mT for a in cells.maps])
    mean, counts = torch.einsum("nk,knd->nd", r, g), r.sum(0)
    return [
        (ModeTerms(r[:, k], r[:, k, None] * (g[k] - mean), x - cells.maps[k].m, s), cells.maps[k].L)
        for k in (counts >= counts.max().clamp_max(50)).nonzero().flatten().tolist()
    ]


def shifts(terms: ModeTerms, directions: Tensor) -> tuple[Tensor, Tensor]:
    r"""Estimate the shift from the mean of the draws to the target's in directions w (d, k), and the standard errors.

    .. math:: \delta_w = E[r\, s_w + \partial_w r] \,/\, E[r\, s_w^2]

    By Stein's identity it is zero if the draws are from the density with these scores. If they are slightly shifted,
    it is the correction, a step of Fisher scoring.
    """
    s_w = terms.s @ directions
    t, information = terms.r[:, None] * s_w + terms.slope @ directions, (terms.r[:, None] * s_w.square()).mean(0)
    information = information.clamp_min(torch.finfo(t.dtype).tiny)
    return t.mean(0) / information, t.std(0) / information / math.sqrt(len(t))


def variances(terms: ModeTerms, directions: Tensor) -> tuple[Tensor, Tensor]:
    r"""Estimate Stein variances in directions w (d, k), and their standard errors.

    .. math:: -E[r\, x_w s_w] \,/\, E[\partial_w (r\, x_w)]

    By Stein's identity it is one if the draws are from the density with these scores, even where modes overlap. For
    separated modes it is the squared scale of the mode.
    """
    x_w, r = terms.gap @ directions, terms.r[:, None]
    slope, flux = r * directions.square().sum(0) + terms.slope @ directions * x_w, r * x_w * (terms.s @ directions)
    v = -flux.mean(0) / slope.mean(0)
    return v, (flux + v * slope).std(0) / slope.mean(0).abs() / math.sqrt(len(r))


def stein_moments(x: Tensor, s: Tensor, cells: Cells) -> SteinMoments:
    """Estimate moments of each mode in whitened coordinates, along each of x and in two directions that stand out.

    The two are the direction of the mean score, and the direction in which the Stein variance is farthest from one.
    They are chosen with one half of the draws and evaluated with the other, so that the choice adds no bias.
    """
    parts = []
    for terms, L in terms_of(x, s, cells):
        u = terms.turned(L)
        rows = (L / torch.linalg.vector_norm(L, dim=1, keepdim=True)).mT  # x_i rises by its sd along column i
        first, second = u.halves()
        t = first.r[:, None] * first.s + first.slope
        found = stein_violations(first.gap, t, first.r.mean())
        pairs = [pair for f in (shifts, variances) for pair in zip(f(u, rows), f(second, found), strict=True)]
        nearest = torch.cat([torch.arange(len(L), device=x.device), (rows.mT @ found).abs().argmax(0)])
        parts.append((*map(torch.cat, pairs), nearest))
    shift, shift_se, variance, variance_se, nearest = map(torch.stack, zip(*parts, strict=True))
    tiny = torch.finfo(x.dtype).tiny
    farthest = (shift.abs() - N_SE * shift_se).argmax(0, keepdim=True)
    worst = ((variance - 1).abs() / variance_se.clamp_min(tiny)).argmax(0, keepdim=True)
    of_shift, of_variance = (shift, shift_se), (variance, variance_se)
    return SteinMoments(
        *(a.gather(0, farthest)[0] for a in of_shift),
        *(a.gather(0, worst)[0] for a in of_variance),
        *(nearest.gather(0, k)[0] for k in (farthest, worst)),
    )


def check_means(view: View, moments: SteinMoments) -> Check:
    """Check the means by Stein's identity E[s] = 0."""
    excess = moments.shift.abs() - N_SE * moments.shift_se
    i = int(excess.argmax())
    value, label = moments.shift[i].item(), view.score.label(int(moments.shift_along[i]))
    text = f"off by {abs(value):.2f} sd, most in {label}, standard error {moments.shift_se[i]:.1g}"
    todo = view.correction("whiten", "max_iter", "n_warmup")
    remedy = f"The mean of the target is {abs(value):.2f} sd from the mean of the draws, most in {label}: {todo}."
    return judged("Stein means", abs(value), text, remedy if excess[i] > THRESHOLDS.mean else None)


def check_variances(view: View, moments: SteinMoments) -> Check:
    """Check the widths by Stein's identity."""
    low, high = STEIN_VARIANCES
    v, se = moments.variance, moments.variance_se
    excess = torch.maximum(low - v, v - high) / se.clamp_min(1e-300)
    i = int(excess.argmax())
    value, text = v[i].item(), f"{v.min():.2f} to {v.max():.2f}, errors {se.max():.2g}"
    remedy = None
    if excess[i] > N_SE:
        way, todo = "narrow" if value < low else "wide", view.correction("whiten", "max_iter", "n_warmup")
        remedy = f"The draws are too {way}, most in {view.score.label(int(moments.variance_along[i]))}: {todo}."
    if (v + N_SE * se < 0).any():
        remedy = "The score has the wrong sign: it is the gradient of log p, not of -log p."
    if remedy is None and se.max() > 0.5:  # it is uninformative
        raise ValueError(f"their standard errors are up to {se.max():.2g}, as with tails that are too heavy")
    return judged("Stein variances", value, text, remedy)


class LargestDifference(NamedTuple):
    """The largest difference of ends and draws over directions, its Bonferroni p-value, and the direction."""

    value: float
    pvalue: float
    direction: int


def heights(cells: Cells, x: Tensor) -> Tensor:
    """Return the positions of points x (n, d) in their cell: distance from its centre, coordinates, principal axes.

    Shape (n, 1 + 2 d), in units of the cell; the axes are the principal ones of its correlation.
    """
    cell, found = cells.assign(x), x.new_empty(len(x), 1 + 2 * x.shape[1])
    for k, a in enumerate(cells.maps):
        inside, (U, scales, sd) = x[cell == k], principal_axes(a)
        z = (inside - a.m) / sd
        radius = torch.linalg.vector_norm(a.whiten(inside), dim=1, keepdim=True)
        found[cell == k] = torch.cat([radius, z, z @ U / scales], 1)
    return found


def principal_axes(a: Affine) -> tuple[Tensor, Tensor, Tensor]:
    """Return the principal axes (d, d) of the correlation of a cell, in columns, scales along them, and its sds."""
    sd = torch.linalg.vector_norm(a.L, dim=1)
    U, scales, _ = torch.linalg.svd(a.L / sd[:, None])
    return U, scales, sd


def ends_beyond(draws: Tensor, ends: Tensor) -> LargestDifference:
    r"""Find the direction in which the ends (t, m, k) of m chains, at t times, exceed the draws (n, k) most.

    If the draws are right, the number of ends beyond the r-th farthest draw is beta-binomial at any time: a count of
    m further draws with the probability :math:`\mathrm{Beta}(r, n + 1 - r)`. The mean over times varies
    less.
    """
    n, m, r = len(draws), ends.shape[1], max(1, round(THRESHOLDS.tail * len(draws)))
    beyond = (ends > draws.topk(r, dim=0).values[-1]).double().sum(1).mean(0)
    most = beyond.max().item()
    pvalue = draws.shape[1] * float(betabinom.sf(math.floor(most) - 1, m, r, n + 1 - r))
    return LargestDifference(most / m, min(1.0, pvalue), int(beyond.argmax()))


def ends_apart(draws: Tensor, ends: Tensor) -> LargestDifference:
    """Find the direction in which the ends (t, m, k) of m chains, at t times, are farthest from the draws (n, k).

    The distance is Kolmogorov's. The p-value holds for the ends at one time; the mean over times varies less.

    References
    ----------
    Smirnov, N. (1948). Table for estimating the goodness of fit of empirical distributions. Annals of Mathematical
    Statistics 19(2).
    """
    n, (t, m, _) = len(draws), ends.shape
    steps = torch.cat([draws.new_full((n,), 1 / n), draws.new_full((t * m,), -1 / (t * m))])
    distances = steps[torch.cat([draws, ends.flatten(0, 1)]).argsort(0)].cumsum(0).abs().amax(0)
    largest = distances.max().item()
    pvalue = draws.shape[1] * float(kolmogorov(math.sqrt(n * m / (n + m)) * largest))
    return LargestDifference(largest, min(1.0, pvalue), int(distances.argmax()))


def mass_beyond(draws: Tensor, at_rows: Tensor, rows: WeightedDraws) -> LargestDifference:
    """Find the direction in which most of the target's mass lies beyond the farthest of the draws (n, k), by weighted
    rows (m, k), beyond its standard errors.
    """
    limits = draws.topk(max(1, round(THRESHOLDS.tail * len(draws))), dim=0).values[-1]
    share, se, _ = rows.shares(*(as_array(h > limits) for h in (at_rows, draws)))
    z = (share - THRESHOLDS.tail) / np.maximum(se, np.finfo(np.float64).tiny)
    matters = share > THRESHOLDS.tail + THRESHOLDS.beyond
    k = int(np.where(matters, z, -np.inf).argmax() if matters.any() else share.argmax())
    return LargestDifference(float(share[k]), min(1.0, draws.shape[1] * float(norm.sf(z[k]))), k)


def check_chains(view: View, geometry: Geometry, sample: WeightedDraws | None) -> tuple[Check, Check]:
    """Check the tails by weighted draws, where these are reliable, and the tails and the shape by chains."""
    x, late = view.x[view.finite], geometry.ends.flatten(0, 1)
    cells = geometry.cells.refined(torch.cat([x, late]), middle)  # a fit to the draws alone would suit only them
    weighted = None if sample is None or not sample.trusted else _weighted_tails(view, cells, sample)
    if not len(geometry.ends):
        missing = Check("tails", math.nan, "", f"not available: {RUN_AWAY}")
        return weighted or missing, missing._replace(name="shape")
    draws, ends = heights(cells, x), heights(cells, late).view(*geometry.ends.shape[:2], -1)
    tails = _tails(view, cells, ends_beyond(_sides(draws), _sides(ends)), "of chains end", 0.01)
    if weighted is not None and weighted.remedy:
        tails = weighted
    shape = _shape(view, cells, ends_apart(draws, ends))
    return tails, shape if shape.remedy else _along_direction(view, x) or shape


def _weighted_tails(view: View, cells: Cells, sample: WeightedDraws) -> Check:
    """Estimate the mass that lies farther out than the draws."""
    some = sample.draws[: 2**23 // (4 * view.x.shape[1] + 1)]
    draws, at_rows = (_sides(heights(cells, torch.as_tensor(X).to(view.x))) for X in (some, sample.X))
    beyond = mass_beyond(draws, at_rows, sample)
    return _tails(view, cells, beyond, "of the mass, by weights, lies", THRESHOLDS.tail + THRESHOLDS.beyond)


def _sides(h: Tensor) -> Tensor:
    """Return heights (..., k) on both sides of all directions but the distance, which is the first."""
    return torch.cat([h, -h[..., 1:]], -1)


def _tails(view: View, cells: Cells, beyond: LargestDifference, what: str, most: float) -> Check:
    """Check how much lies farther out than the draws."""
    share, pvalue, k = beyond
    d = view.x.shape[1]
    where = _in_words(view, cells, k) if k <= 2 * d else f"{_in_words(view, cells, k - 2 * d)}, below"
    text = f"{share:.1%} {what} beyond {1 - THRESHOLDS.tail:.1%} of the draws {where}, p = {pvalue:.2g}"
    remedy = f"The target has tails that the fit lacks, {where}: {view.correction()}."
    return judged("tails", share, text, remedy if share > most and pvalue < MAX_PVALUE else None)


def _shape(view: View, cells: Cells, apart: LargestDifference) -> Check:
    """Compare the distributions of the draws and of the ends of chains."""
    distance, pvalue, k = apart
    where = _in_words(view, cells, k)
    text = f"chains end up to {distance:.2f} apart {where}, p = {pvalue:.2g}"
    remedy = f"Chains that start at the draws leave their distribution {where}: {view.correction()}."
    # a shift by 0.38 standard deviations has this distance
    return judged("shape", distance, text, remedy if distance > 0.15 and pvalue < MAX_PVALUE else None)


def _along_direction(view: View, x: Tensor) -> Check | None:
    """Look for a direction along which Gibbs steps move draws x (n, d), as chains may be too short to do."""
    n, d = x.shape
    if n < max(400, 10 * d) or d > 1000:  # fewer are whitened too well by themselves
        return None
    map_ = gaussian_of(x)
    u = map_.whiten(x)
    found = first_difference(map_.pull_back(view.score), u[:N_SCORES], lambda: (u, x))
    if found is None:
        return None
    words, todo = found.words(view.score.label), view.correction()
    return judged(
        "shape",
        float(found.step.range),
        f"a Gibbs step along a direction changes the 99.8% range by {found.step.range:.2g} times",
        f"The draws are wrong along {words}: {todo}.",
    )


def _in_words(view: View, cells: Cells, direction: int) -> str:
    """Say which of the directions of `heights` it is, a principal axis of a single mode by its largest loadings."""
    axis, i = divmod(direction - 1, view.x.shape[1])
    if not direction:
        return "in the distance from the centre"
    if not axis:
        return f"in {view.score.label(i)}"
    if len(cells.maps) > 1:
        return f"along principal axis {i}"
    v = principal_axes(cells.maps[0])[0][:, i]
    largest = v.abs().argsort(descending=True)[:3].tolist()
    return f"along principal axis {i} ({', '.join(f'{v[j]:+.2f} {view.score.label(j)}' for j in largest)})"
