"""Stochastic gradient Langevin dynamics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from skksivi._utils.numbers import is_number
from skksivi.base import Constraints, Interval, Real
from skksivi.baselines._chains import ChainApproximator, pushed_forward, run_chains
from skksivi.baselines._points import find_start
from skksivi.coordinates._composed import score_for_training
from skksivi.families._samplers import Chains
from skksivi.pilot._chains import clipped_drift
from skksivi.score._score import Score
from skksivi.training._run import Fit, Run


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
        raise ValueError(f"`step_size` must be a number or three, (a, b, gamma), got {step_size!r}.")
    a, b, gamma = (float(c) for c in step_size)
    if not (a > 0 and b > 0 and 0 <= gamma <= 1):
        raise ValueError(f"`step_size` must have a > 0, b > 0 and gamma in [0, 1], got {step_size!r}.")
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
    whiten : str, Pilot, (m, L) or None, default="laplace"
        The affine map x = m + L u that preconditions, as in `skksivi.KSIVIApproximator`; None is x itself. By default
        it is the cheapest map that makes the step independent of the units of x: a mode search.
    init : array-like of shape (n_chains, n_features), default=None
        States to start with; a search for modes starts there too. None draws them from N(0, I) in u.
    device : str or torch.device, default="auto"
        Where to compute; "auto" uses a GPU if there is one.
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
