"""The Metropolis-adjusted Langevin algorithm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from skksivi._utils.warnings import warn_caller
from skksivi.base import Constraints, Interval, Real, StrOptions
from skksivi.baselines._chains import ChainApproximator, pushed_forward, run_chains
from skksivi.baselines._points import LogRatio, density_in_u, find_start, ratio_in_u
from skksivi.families._samplers import Chains
from skksivi.pilot._chains import clipped_drift
from skksivi.score._score import Score, ScoreFunction
from skksivi.training._run import Fit, Run

#: Rate of acceptance below which a run should not be trusted.
LOWEST = 0.1


class ChainState(NamedTuple):
    """Chains at u (n, d), and the score there."""

    u: Tensor
    s: Tensor


def mala_step(
    state: ChainState, score_u: ScoreFunction, log_ratio: LogRatio, h: Tensor, generator: torch.Generator
) -> tuple[ChainState, Tensor]:
    r"""Propose Langevin steps, and accept each with the probability of Metropolis and Hastings.

    .. math::
        v = u + h\, \tilde s(u) + \sqrt{2 h}\, \xi, \quad
        \alpha = \min\left(1, \frac{p(v)\, q(u | v)}{p(u)\, q(v | u)}\right), \quad
        \log q(v | u) = -\frac{\|v - u - h\, \tilde s(u)\|^2}{4 h} + \mathrm{const},

    with the `clipped_drift` :math:`\tilde s`.

    Parameters
    ----------
    state : ChainState
    score_u : callable
    log_ratio : callable
        Maps (u, s(u), v, s(v)) to log p(v) - log p(u).
    h : Tensor of shape ()
        The step size h > 0.
    generator : torch.Generator

    Returns
    -------
    state : ChainState
    alpha : Tensor of shape (n,)
        The probabilities of acceptance; zero where the score or log p is not finite at v.

    References
    ----------
    Roberts, G. and Tweedie, R. (1996). Exponential convergence of Langevin distributions and their discrete
    approximations. Bernoulli 2(4).
    """
    u, s = state
    noise = (2 * h).sqrt() * torch.randn(u.shape, generator=generator, dtype=u.dtype, device=u.device)
    v = u + h * clipped_drift(s) + noise
    s_v = score_u(v)
    back = u - v - h * clipped_drift(s_v)
    log_alpha = log_ratio(u, s, v, s_v) + (noise.square().sum(1) - back.square().sum(1)) / (4 * h)
    alpha = log_alpha.nan_to_num(-torch.inf, torch.inf, -torch.inf).exp().clamp_max(1)
    accepted = torch.rand(len(u), generator=generator, dtype=u.dtype, device=u.device)[:, None] < alpha[:, None]
    return ChainState(v.where(accepted, u), s_v.where(accepted, s)), alpha


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
    whiten : str, Pilot, (m, L) or None, default="laplace"
        The affine map x = m + L u that preconditions the chains, as in `skksivi.KSIVIApproximator`; None means x
        itself. By default it is the cheapest map that makes the step independent of the units of x: a mode search.
    init : array-like of shape (n_chains, n_features), default=None
        States to start with; a search for modes starts there too. None draws them from N(0, I) in u.
    device : str or torch.device, default="auto"
        Where to compute; "auto" uses a GPU if there is one.
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
        if fit.ended_by is None and rate < LOWEST:
            warn_caller(
                f"Only {rate:.1%} of the steps were accepted, so the chains have hardly moved. Raise `n_warmup`, "
                "lower `step_size`, or set `whiten` to 'bam' or 'auto'.",
                ConvergenceWarning,
            )
