"""Points that move, where they start, and what they are moved by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from skksivi._utils.arrays import RandomState, as_tensor
from skksivi.base import Constraints, Integral, Interval, Real, StrOptions
from skksivi.coordinates import Whitening, along_chord, checked_density, log_ratio
from skksivi.estimators import Whitened
from skksivi.kernels import Kernel, resolve_kernel
from skksivi.parameters import Adam, Init, Whiten
from skksivi.pilot import LogRatio
from skksivi.score import Score, ScoreFunction
from skksivi.start import find_whitening
from skksivi.training import Objective, minimise


class MovingPoints(nn.Module):
    """Points u (n, d) that move."""

    def __init__(self, u: Tensor) -> None:
        super().__init__()
        self.u = nn.Parameter(u, requires_grad=False)


def set_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Set the gradient of a parameter, in the memory that it may share with an optimiser."""
    if parameter.grad is None:
        parameter.grad = gradient.clone()
    else:
        parameter.grad.copy_(gradient)


class Descending:
    """Base of the estimators that descend by Adam."""

    max_iter: int
    learning_rate: float
    learning_rate_decay: str | None

    def _descend(
        self,
        gradient_fn: Callable[[], Tensor],
        module: nn.Module,
        generator: torch.Generator,
        ema: float | None = None,
    ) -> tuple[np.ndarray, BaseException | None]:
        """Move the parameters of a module against the gradient that `gradient_fn` sets.

        Returns
        -------
        curve : ndarray of shape (n_iter,)
            The values that `gradient_fn` returned.
        ended_by : FloatingPointError, KeyboardInterrupt or None
            The error that ended it early; the module holds the last finite state.
        """
        steps, rate = Adam(decay=self.learning_rate_decay, ema=ema), self.learning_rate
        run = minimise(Objective(gradient_fn), module, steps, generator, learning_rate=rate, max_iter=self.max_iter)
        curve = run.losses.astype(np.float64)
        if isinstance(run.ended_by, FloatingPointError):
            return curve, not_finite(str(run.ended_by))
        if not (run.ended_by is None or isinstance(run.ended_by, KeyboardInterrupt)):
            raise run.ended_by
        return curve, run.ended_by


def not_finite(what: str) -> FloatingPointError:
    return FloatingPointError(
        f"{what}: `score_fn` may be undefined or huge where the draws are. Lower `learning_rate`, or choose another "
        "`whiten` or `init`, so that the fit starts near the target."
    )


#: Constraints of the parameters of a kernel.
RADIAL: Constraints = {
    "kernel": "no_validation",  # resolve_kernel says more
    "bandwidth": [Interval(Real, 0, None, closed="neither"), StrOptions({"median"}), None],
}

#: Maps points (n, d) to log p (n,), up to a constant.
Density = Callable[[Tensor], Tensor]


@dataclass(kw_only=True, eq=False, repr=False)
class Started(Whitened):
    """Base of the methods that start at points."""

    #: The fewest points.
    _at_least: ClassVar[int] = 1

    whiten: Whiten = "laplace"
    init: Init = None
    device: str | torch.device = "auto"
    dtype: str = "float64"
    random_state: RandomState = None

    def _check_parameters(self, n_features: int) -> None:
        super()._check_parameters(n_features)
        if self.init is not None and np.ndim(self.init) != 2:
            raise ValueError(
                f"`init` has shape {np.shape(self.init)}, expected (n, {n_features}): one point per row."
            )
        if self.init is not None and len(np.asarray(self.init)) < self._at_least:
            raise ValueError(f"`init` has {len(np.asarray(self.init))} row(s), expected {self._at_least} at least.")


def find_start(
    whiten: Whiten, init: Init, n: int, score_fn: Score, generator: torch.Generator
) -> tuple[Whitening, Tensor]:
    """Return the coordinates u of a fit, and the points (n, d) in them at which it starts.

    A point where the score is not finite gives its place to another.

    Parameters
    ----------
    whiten : {"auto", "bam", "diagonal", "laplace"}, (m, L) or None
    init : array-like of shape (n, d) or None
        Starting points x, also of the search for a mode; None draws them from N(0, I) in u.
    n : int
        How many to draw.
    score_fn : Score
    generator : torch.Generator

    Raises
    ------
    ValueError
        The score is finite at none of the points.
    """
    d = score_fn.n_features
    whitening, _ = find_whitening(whiten, score_fn, generator, init=init)
    score_fn.tally.begin("training")
    if init is None:
        u = torch.randn(n, d, generator=generator, dtype=torch.float64, device=score_fn.device)
    else:
        u = whitening.whiten(as_tensor(init, dtype=torch.float64, device=score_fn.device))
    finite = score_fn.double(whitening.push_forward(u)).isfinite().all(1)
    if not finite.any():
        raise ValueError(
            f"`score_fn` is finite at none of the {len(u)} points at the start; set `init` to points where it is."
        )
    others = u[finite][torch.randint(int(finite.sum()), (len(u),), generator=generator, device=u.device)]
    return whitening, torch.where(finite[:, None], u, others).to(score_fn.dtype)


@dataclass(kw_only=True, eq=False, repr=False)
class Particled(Started):
    """Base of the methods that move two particles or more."""

    _parameter_constraints: ClassVar[Constraints] = {
        "n_particles": [Interval(Integral, 2, None, closed="left")],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "learning_rate": [Interval(Real, 0, None, closed="neither")],
        "learning_rate_decay": [StrOptions({"cosine"}), None],
    }
    _at_least: ClassVar[int] = 2

    n_particles: int = 200
    max_iter: int = 1000
    learning_rate: float = 0.1
    learning_rate_decay: str | None = "cosine"


def radial_kernel(kernel: str | Kernel, bandwidth: float | str | None, *, smooth: bool = False) -> Kernel:
    """Return the kernel k(x, y) = phi(|x - y|) of a method that needs its derivatives.

    Raises
    ------
    ValueError
        It is of another form, or not `smooth` at x = y where it must be.
    """
    resolved = resolve_kernel(kernel, bandwidth)
    if resolved.centred or not resolved.euclidean or (smooth and not resolved.smooth):
        kinds = "Gaussian or IMQ" if smooth else "Gaussian, IMQ or Laplace"
        raise ValueError(f"`kernel` is {type(resolved).__name__}, but its derivatives are needed; use {kinds}.")
    return resolved


# The density, from its score where need be


def density_in_u(score_fn: Score, whitening: Whitening, u: Tensor) -> Density | None:
    """Return the map of points (n, d) to log p (n,) up to a constant, None where the target has no `log_prob`.

    A `log_prob` whose differences near the points u are not the integrals of the score is left alone, with a warning:
    it was inherited by a target with another score, say.
    """
    if (log_prob := score_fn.log_prob) is None:
        return None

    @torch.no_grad()
    def at(u: Tensor) -> Tensor:
        return log_prob(whitening.push_forward(u.double()).to(score_fn.dtype)).to(u)

    u = u[:16].double()
    is_right = (
        checked_density(score_fn.double, whitening.push_forward(u), whitening.push_forward(u + 0.1)).log_prob
        is not None
    )
    return at if is_right or not at(u).isfinite().any() else None


def ratio_in_u(density: Density | None, score_u: ScoreFunction) -> LogRatio:
    """Return what compares log-densities, by their values or else by integrals of the score."""
    if density is None:
        return partial(along_chord, score_u)
    return lambda u, _, v, __: density(v) - density(u)


def initial_log_densities(density: Density | None, score_u: ScoreFunction, u: Tensor) -> Tensor:
    """Return log p (n,) at points u (n, d), up to a constant.

    Raises
    ------
    ValueError
        The density is not known, and integrals of the score do not converge instead.
    """
    log_p = log_ratio(score_u, u[0], u) if density is None else density(u)
    if not log_p.isfinite().all():
        raise ValueError(
            "Log p is unknown at the starting points: integrals of the score between them do not converge, or "
            "`log_prob` is not finite. Fit a Target with `log_prob`, or set `init` to points near the target."
        )
    return log_p
