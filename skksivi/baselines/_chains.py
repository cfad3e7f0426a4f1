"""Markov chains in whitened coordinates: MALA and SGLD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from skksivi._utils.checks import is_number, shown, warn_caller
from skksivi.base import Constraints, Integral, Interval, Real, StrOptions
from skksivi.baselines._points import Started, density_in_u, find_start, ratio_in_u
from skksivi.coordinates import Whitening, score_for_training
from skksivi.families import Chains
from skksivi.pilot import ChainState, clipped_drift, mala_step
from skksivi.score import Score
from skksivi.training import Fit, Run


def run_chains(
    step: Callable[[int], Tensor], n_warmup: int, n_draws: int, thin: int
) -> tuple[Tensor, int, KeyboardInterrupt | None]:
    """Run chains, and keep every `thin`-th state after the warm-up; Ctrl-C is raised if none was kept yet.

    Parameters
    ----------
    step : callable
        Maps the number of the step to the states (n, d) after it.
    n_warmup, n_draws, thin : int

    Returns
    -------
    chains : Tensor of shape (n, n_draws, d)
        With fewer draws if it was interrupted.
    n_iter : int
        Number of steps.
    ended_by : KeyboardInterrupt or None
    """
    kept: list[Tensor] = []
    n_iter, ended_by = 0, None
    try:
        for t in range(n_warmup + n_draws * thin):
            u = step(t)
            n_iter = t + 1
            if n_iter > n_warmup and (n_iter - n_warmup) % thin == 0:
                kept.append(u)
    except KeyboardInterrupt as error:
        if not kept:
            raise
        ended_by = error
    return torch.stack(kept, 1), n_iter, ended_by


def pushed_forward(chains: Tensor, whitening: Whitening) -> np.ndarray:
    """Return chains (n, n_draws, d) in x."""
    u = chains.flatten(0, 1).double()
    return whitening.push_forward(u).view(chains.shape).cpu().numpy()


def diagnostics(chains: np.ndarray) -> dict[str, np.ndarray]:
    """Return R-hat and effective sample sizes of chains (n_chains, n_draws, d), each of shape (d,).

    Raises
    ------
    ImportError
        arviz-stats is not installed.
    ValueError
        The chains are too short.
    """
    fewest = 4
    if chains.shape[1] < fewest:
        raise ValueError(
            f"`diagnose` needs {fewest} states per chain at least, got {chains.shape[1]}; raise `n_draws`."
        )
    try:
        from arviz_stats.base import array_stats
    except ImportError as error:
        raise ImportError("`diagnose` needs arviz-stats; install it: pip install 'skksivi[arviz]'.") from error
    axes = {"chain_axis": 0, "draw_axis": 1}
    return {
        "r_hat": array_stats.rhat(chains, **axes),
        "ess_bulk": array_stats.ess(chains, method="bulk", **axes),
        "ess_tail": array_stats.ess(chains, method="tail", prob=(0.05, 0.95), **axes),
    }


@dataclass(kw_only=True, eq=False, repr=False)
class ChainApproximator(Started):
    """Base of the methods that run chains."""

    _parameter_constraints: ClassVar[Constraints] = {
        "n_chains": [Interval(Integral, 1, None, closed="left")],
        "n_warmup": [Interval(Integral, 0, None, closed="left")],
        "n_draws": [Interval(Integral, 1, None, closed="left")],
        "thin": [Interval(Integral, 1, None, closed="left")],
    }

    n_chains: int = 100
    n_warmup: int = 1000
    n_draws: int = 100
    thin: int = 20

    chains_: np.ndarray = field(init=False)

    def diagnose(self) -> dict[str, np.ndarray]:
        """Return what tells whether the chains have mixed, by arviz-stats.

        Returns
        -------
        diagnostics : dict of ndarray of shape (n_features,)
            "r_hat", rank-normalised and split, near one, NaN of a single chain; "ess_bulk" and "ess_tail", effective
            sample sizes for the centre and for the 5% and 95% quantiles.

        Raises
        ------
        NotFittedError
            Before `fit`.
        ImportError
            arviz-stats is not installed.
        ValueError
            Fewer than four states of each chain were kept.

        References
        ----------
        Vehtari, A. et al. (2021). Rank-normalization, folding, and localization: an improved R-hat for assessing
        convergence of MCMC. Bayesian Analysis 16(2).
        """
        check_is_fitted(self)
        return diagnostics(self.chains_)


def adapted_step(h: Tensor, alpha: Tensor, t: int, target: float) -> Tensor:
    r"""Return the step size after the t-th step of the warm-up, by Robbins and Monro's rule.

    .. math:: \log h_{t + 1} = \log h_t + (t + 1)^{-0.6} (\bar\alpha_t - \alpha^*)
    """
    return h * ((alpha.mean() - target) * (t + 1) ** -0.6).exp()


@dataclass(kw_only=True, eq=False, repr=False)
class MALA(ChainApproximator):
    r"""Many Metropolis-adjusted Langevin chains in parallel.

    .. math:: v = u + h\, s_u(u) + \sqrt{2 h}\, \xi, \quad \xi \sim N(0, I),

    accepted with the probability that leaves the target invariant, in coordinates x = m + L u that precondition the
    chains. A score longer than :math:`5 \sqrt d` in u is cut to that length, in the proposal and in its probability.

    The probability compares log p at u and v. If the target has no `log_prob`, the difference is the integral of the
    score from u to v by Lobatto's rule with four points, with two more evaluations of the score. It is exact if log p
    is a polynomial of degree six along the line; otherwise its error is the seventh derivative of log p along the
    line, at some point on it, divided by 1,512,000.

    Parameters
    ----------
    whiten : str, Pilot, (m, L) or None, default="laplace"
        The affine map x = m + L u that preconditions the chains, as in `skksivi.KSIVIApproximator`; None means x
        itself. By default it is the cheapest map that makes the step independent of the units of x: a mode search.
    init : array-like of shape (n_chains, n_features), default=None
        States to start with; a search for modes starts there too. None draws them from N(0, I) in u.
    n_chains : int, default=100
        Number of chains; not used with `init`.
    n_warmup : int, default=500
        Steps that are discarded, in which the step size is adapted.
    n_draws : int, default=100
        States kept per chain.
    thin : int, default=10
        Steps between kept states.
    step_size : float or "auto", default="auto"
        The step size h > 0, or one that is adapted to the rate of acceptance in the warm-up.
    target_acceptance : float, default=0.574
        That rate; the default is the best for many independent coordinates.
    device : str or torch.device, default="auto"
        Where to compute; "auto" is the device of the target's tensors, or the CPU.
    dtype : {"float32", "float64"}, default="float64"
        Precision of the computation and of the draws; float32 rounds differences of log p.
    random_state : int, RandomState or None, default=None
        Seeds the chains and the samples.

    Attributes
    ----------
    chains_ : ndarray of shape (n_chains, n_draws, n_features)
        `sample` returns n of the states without replacement, or with replacement if there are fewer.
    acceptance_rate_ : float
        Mean probability of acceptance after the warm-up.
    acceptance_curve_ : ndarray of shape (`n_iter_`,)
        Its mean over the chains at each step.
    step_size_ : float
        The h after the warm-up.
    whitening_ : Whitening
        The map x = m + L u.
    n_iter_ : int
        Number of steps.
    n_features_in_ : int
        Dimension of the target.
    n_score_calls_, n_products_ : int
        Points at which `fit` evaluated the score or log p, and products with the Jacobian of the score.
    stages_ : list of Stage
        The cost of each stage of `fit`: ``name``, ``n_calls`` and ``seconds``.

    See Also
    --------
    SGLD : Langevin chains on minibatches.
    skksivi.KSIVIApproximator : One semi-implicit layer, the first choice.

    References
    ----------
    Roberts, G. and Tweedie, R. (1996). Exponential convergence of Langevin distributions and their discrete
    approximations. Bernoulli 2(4).

    Roberts, G. and Rosenthal, J. (1998). Optimal scaling of discrete approximations to Langevin diffusions. Journal
    of the Royal Statistical Society B 60.

    Examples
    --------
    >>> from skksivi.baselines import MALA
    >>> q = MALA(random_state=0).fit(lambda x: (3 - x) / 4, n_features=1)
    >>> q.sample(10_000).std(axis=0).round(1)
    array([2.])
    """

    _parameter_constraints: ClassVar[Constraints] = {
        "step_size": [Interval(Real, 0, None, closed="neither"), StrOptions({"auto"})],
        "target_acceptance": [Interval(Real, 0, 1, closed="neither")],
    }

    acceptance_rate_: float = field(init=False)

    n_warmup: int = 500
    thin: int = 10
    step_size: float | str = "auto"
    target_acceptance: float = 0.574

    def _fit(self, score_fn: Score, run: Run) -> Fit:
        generator = run.generator
        whitening, u = find_start(self.whiten, self.init, self.n_chains, score_fn, generator)
        score_fn.tally.begin("chains")
        score_u = whitening.pull_back(score_fn)
        log_ratio = ratio_in_u(density_in_u(score_fn, whitening, u), score_u)
        adapts = self.step_size == "auto"
        h = u.new_tensor(u.shape[1] ** (-1 / 3) if adapts else self.step_size)
        state, acceptance = ChainState(u, score_u(u)), []

        def step(t: int) -> Tensor:
            nonlocal state, h
            state, alpha = mala_step(state, score_u, log_ratio, h, generator)
            acceptance.append(alpha.mean())
            if adapts and t < self.n_warmup:
                h = adapted_step(h, alpha, t, self.target_acceptance)
            return state.u

        chains, n_iter, ended_by = run_chains(step, self.n_warmup, self.n_draws, self.thin)
        curve = torch.stack(acceptance[:n_iter]).double().cpu().numpy()
        rate = float(curve[self.n_warmup :].mean())
        report = {"n_iter_": n_iter, "acceptance_curve_": curve, "acceptance_rate_": rate, "step_size_": h.item()}
        return Fit(Chains(pushed_forward(chains, whitening), whitening), report, ended_by)

    def _conclude(self, fit: Fit, score_fn: Score, generator: torch.Generator) -> None:
        rate = self.acceptance_rate_
        if fit.ended_by is None and rate < 0.1:
            warn_caller(
                f"Only {rate:.1%} of the steps were accepted, so the chains have hardly moved. Raise `n_warmup`, "
                "lower `step_size`, or set `whiten` to 'bam' or 'auto'.",
                ConvergenceWarning,
            )


def sgld_step(u: Tensor, s: Tensor, epsilon: float, generator: torch.Generator) -> Tensor:
    r"""Return the chains after one step,

    .. math:: u + \frac{\epsilon}{2}\, s + \sqrt{\epsilon}\, \xi, \quad \xi \sim N(0, I).

    Parameters
    ----------
    u, s : Tensor of shape (n, d)
        The chains, and the score at each, or an unbiased estimate of it.
    epsilon : float
        The step size, in squared units of u.
    generator : torch.Generator

    References
    ----------
    Welling, M. and Teh, Y. (2011). Bayesian learning via stochastic gradient Langevin dynamics, Eq. (4).
    """
    xi = torch.randn(u.shape, generator=generator, dtype=u.dtype, device=u.device)
    return u + epsilon / 2 * s + epsilon**0.5 * xi


def step_sizes(step_size: float | tuple[float, float, float]) -> Callable[[int], float]:
    r"""Return the step size at step t: a constant, or :math:`a (b + t)^{-\gamma}` of three numbers."""
    if isinstance(step_size, Real | float):  # a float is a Real, but not to mypy
        return lambda _: float(step_size)
    if len(step_size) != 3 or not all(is_number(c) for c in step_size):
        raise ValueError(f"`step_size` must be a number or three, (a, b, gamma), got {shown(step_size)}.")
    a, b, gamma = (float(c) for c in step_size)
    if not (a > 0 and b > 0 and 0 <= gamma <= 1):
        raise ValueError(f"`step_size` must have a > 0, b > 0 and gamma in [0, 1], got {shown(step_size)}.")
    return lambda t: a * (b + t) ** -gamma


@dataclass(kw_only=True, eq=False, repr=False)
class SGLD(ChainApproximator):
    r"""Many chains of stochastic gradient Langevin dynamics in parallel.

    .. math::
        u_{t+1} = u_t + \frac{\epsilon_t}{2}\, \hat s_u(u_t) + \sqrt{\epsilon_t}\, \xi_t, \quad \xi_t \sim N(0, I),

    in coordinates x = m + L u, with a score :math:`\hat s` on a minibatch of the data if the target draws them
    (`skksivi.targets.Minibatches`). The error of a step is not corrected: the variance of a Gaussian is too large by
    the factor :math:`1 / (1 - \epsilon / 4)` if its precision is one in u, and by more with the minibatch noise that
    an expansion at the mode leaves. At each step the first half of the chains uses one minibatch and the second half
    another, so errors of chains are correlated; `diagnose` treats the chains as independent. A score longer than
    `max_score` :math:`\sqrt d` in u is cut to that length.

    Parameters
    ----------
    whiten : str, Pilot, (m, L) or None, default="laplace"
        The affine map x = m + L u that preconditions, as in `skksivi.KSIVIApproximator`; None is x itself. By default
        it is the cheapest map that makes the step independent of the units of x: a mode search.
    init : array-like of shape (n_chains, n_features), default=None
        States to start with; a search for modes starts there too. None draws them from N(0, I) in u.
    n_chains : int, default=100
        Number of chains; not used with `init`.
    n_warmup : int, default=1000
        Steps that are discarded.
    n_draws : int, default=100
        States that are kept of each chain.
    thin : int, default=20
        Steps from one of them to the next.
    step_size : float or (a, b, gamma), default=0.05
        The :math:`\epsilon_t`, a constant or :math:`a (b + t)^{-\gamma}`, in squared units of u. With a decreasing
        step all kept states have equal weight.
    max_score : float or None, default=5.0
        The length of a score in u, in units of :math:`\sqrt d`, to which longer ones are cut. Scores that long are
        rare in whitened coordinates, where chains that start far out may otherwise leave. In x itself they can be the
        rule: with whiten=None set a number in its units, or None, which cuts nothing.
    device : str or torch.device, default="auto"
        Where to compute; "auto" is the device of the target's tensors, or the CPU.
    dtype : {"float32", "float64"}, default="float64"
        Precision of the computation and of the draws.
    random_state : int, RandomState or None, default=None
        Seeds the chains and the samples.

    Attributes
    ----------
    chains_ : ndarray of shape (n_chains, n_draws, n_features)
        `sample` gives n of the states without replacement, of more than there are with replacement.
    whitening_ : Whitening
        The map x = m + L u.
    n_iter_ : int
        Number of steps.
    n_features_in_ : int
        Dimension of the target.
    n_score_calls_, n_products_ : int
        Points at which `fit` evaluated the score or log p, and products with the Jacobian of the score.
    stages_ : list of Stage
        The cost of each stage of `fit`: ``name``, ``n_calls`` and ``seconds``.

    See Also
    --------
    MALA : Langevin chains that are exact in the long run.
    skksivi.targets.Minibatches : A target that sees part of its data at a time.

    References
    ----------
    Welling, M. and Teh, Y. (2011). Bayesian learning via stochastic gradient Langevin dynamics. ICML.

    Examples
    --------
    >>> from skksivi.baselines import SGLD
    >>> q = SGLD(random_state=0).fit(lambda x: (3 - x) / 4, n_features=1)
    >>> q.sample(10_000).std(axis=0).round(1)
    array([2.])
    """

    _parameter_constraints: ClassVar[Constraints] = {
        "step_size": [Interval(Real, 0, None, closed="neither"), "array-like"],
        "max_score": [Interval(Real, 0, None, closed="neither"), None],
    }

    step_size: float | tuple[float, float, float] = 0.05
    max_score: float | None = 5.0

    def _check_parameters(self, n_features: int) -> None:
        super()._check_parameters(n_features)
        step_sizes(self.step_size)

    def _fit(self, score_fn: Score, run: Run) -> Fit:
        generator = run.generator
        epsilon, longest = step_sizes(self.step_size), self.max_score
        whitening, u = find_start(self.whiten, self.init, self.n_chains, score_fn, generator)
        score_u = score_for_training(score_fn, whitening, generator)

        def step(t: int) -> Tensor:
            nonlocal u
            s, _ = score_u.with_pullback(u)
            u = sgld_step(u, s if longest is None else clipped_drift(s, longest), epsilon(t), generator)
            return u

        chains, n_iter, ended_by = run_chains(step, self.n_warmup, self.n_draws, self.thin)
        if not chains.isfinite().all():
            raise ended_by or FloatingPointError(
                "Chains have reached values that are not finite: `score_fn` may be undefined or have the wrong sign "
                "somewhere. "
                "Lower `step_size`, or set `whiten` or `init` so that they start near the target."
            )
        return Fit(Chains(pushed_forward(chains, whitening), whitening), {"n_iter_": n_iter}, ended_by)
