r"""What there is to know of a fit without draws of the target, in one report.

No single number tells a good fit. The discrepancy sees wrong places and shapes but not wrong weights of modes,
importance ratios see lost tails, Stein's identity sees wrong widths, and the loss says whether the training had come
to its end.
"""

from __future__ import annotations

import math

import torch
from sklearn.utils.validation import check_is_fitted

from skksivi._arrays import RandomState, as_array, make_seed, resolve_device
from skksivi._numbers import check_integer
from skksivi.base import BaseApproximator, ordinary_mode
from skksivi.diagnostics._checks import (
    check_divergence,
    check_ksd,
    check_loss,
    check_ratios,
    check_variances,
    check_whitening,
    weighed_draws,
)
from skksivi.diagnostics._geometry import check_outliers, check_tails, geometry_and_modes, variances_within
from skksivi.diagnostics._report import Check, Diagnosis
from skksivi.diagnostics._view import REFUSALS, View, guarded
from skksivi.families._samplers import Chains, Particles, Sampler, unweighted
from skksivi.score._score import ScoreFunction
from skksivi.score._target import compared_score
from skksivi.targets._base import Target


def diagnose(
    est: BaseApproximator, target: Target | ScoreFunction, *, n_samples: int = 2000, random_state: RandomState = None
) -> Diagnosis:
    r"""Report on a fit, from its draws and the score of its target.

    Nine checks, each with a value, a verdict and, where it warns, a remedy. With draws x, their scores s and
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
        the ratios are as good as equal, by their effective share :math:`(E r)^2 / E r^2` of 95% or more. Needs a fit
        with a density. Of a target without `log_prob`, log p is the integral of the score along lines.
    "divergence"
        :math:`\mathrm{KL}(q \| p) + \mathrm{KL}(p \| q)` by the same weights, see `skksivi.certificate`. Warns above
        0.05 nats a feature, and of coordinates whose mean is off by 0.1 standard deviations of the draws, or the
        spread by 10%, always if beyond four standard errors. Needs a k-hat that can be trusted.
    "outliers"
        The share of draws in regions where the target has hardly any mass: those whose whitened score
        :math:`\|L^\top s(x)\|` is longer than 99.9% of those found where Metropolis-adjusted Langevin chains, which
        leave the target as it is, have moved 500 of the draws, fewer beyond 200 features; and those where the score
        is not finite. Of exact draws it is 0.1%. Warns above 1%.
    "tails"
        The share of these chains that end farther from the centre of their mode, in its units, than 99.9% of the
        draws, which is 0.1% if the draws are right. Warns above 2%: the target has tails where there are no draws.
        It needs no density.
    "modes"
        The share of draws that lie in a wrong mode, :math:`\tfrac12 \sum_k |w_k - \hat w_k|` for modes found by
        searches from draws and from points three and ten standard deviations around them, with the weights of
        `skksivi.modes`. Warns above 5%, if beyond the standard errors, and of modes without draws whose share by
        Laplace's approximation is more than 1%. A mode far outside the draws is not seen. Up to 200 features.
    "loss plateau"
        The fall of `loss_curve_` in its last quarter by Theil and Sen's slope through means of blocks, as a share of
        the whole fall from the first quarter on. Warns if it is over 5% and four standard errors.
    "whitening"
        The condition number of the covariance of the draws in the coordinates of the training, and before whitening.
        Warns above 100, and where the chains behind the whitening have not converged.
    "Stein variances"
        :math:`-E[s_i (x_i - E x_i)]` of each coordinate, one if the fit is right; below it is too narrow, above too
        wide. Where there are several modes that of the mode in which it is farthest from one, in standard errors.
        Warns if one is outside [0.8, 1.25] by four standard errors.

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
    if not isinstance(est, BaseApproximator):
        raise TypeError(f"`est` must be a fitted approximator, got a {type(est).__name__}.")
    check_is_fitted(est)
    check_integer(n_samples, "n_samples", min_val=100)
    device, seed = resolve_device(est.device), make_seed(random_state)
    with ordinary_mode(device), torch.no_grad():
        score = compared_score(target, est.n_features_in_, est.dtype, est.device)
        generator = torch.Generator(device).manual_seed(seed)
        X = est.sample(_n_draws(unweighted(est.sampler_), n_samples), seed)
        x = torch.as_tensor(X, dtype=torch.float64, device=device)
        name, parameters, report = type(est).__name__, est.get_params(), dict(vars(est))
        view = View(name, parameters, est.sampler_, report, score, x, score(x), generator, seed)
        if view.finite.sum() < 2:
            raise ValueError(f"`target` has a score that is finite at {int(view.finite.sum())} of {len(x)} draws.")
        return _report(view)


def _report(view: View) -> Diagnosis:
    """Make every check."""
    geometry, modes = geometry_and_modes(view)
    variances, errors = variances_within(view.x[view.finite], view.s[view.finite], geometry.cells)
    checks = (
        guarded("KSD", check_ksd, view),
        *weight_checks(view),
        guarded("outliers", check_outliers, view, geometry),
        guarded("tails", check_tails, view, geometry),
        modes,
        guarded("loss plateau", check_loss, view),
        guarded("whitening", check_whitening, view),
        guarded("Stein variances", check_variances, view, variances, errors),
    )
    return Diagnosis(
        view.name,
        checks,
        X=as_array(view.x),
        modes=as_array(geometry.cell),
        lost=as_array(geometry.lost),
        score_norms=as_array(geometry.norms),
        reference_norms=as_array(geometry.reference),
        variances=as_array(variances),
        variance_errors=as_array(errors),
        losses=view.report.get("loss_curve_"),
    )


def weight_checks(view: View) -> tuple[Check, Check]:
    """Make the checks that rest on importance weights, or say why they cannot be had."""
    try:
        sample = weighed_draws(view)
    except REFUSALS as reason:
        verdict = f"not available: {reason}"
        return Check("Pareto k-hat", math.nan, "", verdict), Check("divergence", math.nan, "", verdict)
    return check_ratios(view, sample), guarded("divergence", check_divergence, view, sample)


def _n_draws(sampler: Sampler, n: int) -> int:
    """Return the number of draws to look at: no particle or state of a chain twice."""
    return min(n, math.prod(sampler.x.shape[:-1])) if isinstance(sampler, Particles | Chains) else n
