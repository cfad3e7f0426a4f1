"""The common base of the chains: which states are kept, and diagnostics of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from skksivi.base import Constraints, Integral, Interval
from skksivi.baselines._points import Started
from skksivi.coordinates._whitening import Whitening

#: Fewest states of a chain for diagnostics.
MIN_DRAWS = 4


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
    if chains.shape[1] < MIN_DRAWS:
        raise ValueError(
            f"`diagnose` needs {MIN_DRAWS} states per chain at least, got {chains.shape[1]}; raise `n_draws`."
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
