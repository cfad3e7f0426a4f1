r"""The first three moments of whitened draws, which keep a fit near its pilot and show if it has departed.

The kernel Stein discrepancy is almost insensitive to lost tails and to an escape along a flat tail; moments are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from skksivi.training._loop import CHECK_EVERY, Progress, State

#: Iterations without a substantial improvement after which a training is at a plateau.
PATIENCE = 2000


class Moments(NamedTuple):
    r"""The moments :math:`E u` (..., d), :math:`E u u^\top` (..., d, d) and :math:`E u_i^3` (..., d)."""

    first: Tensor
    second: Tensor
    third: Tensor


def moments(u: Tensor) -> Moments:
    """Estimate the moments from draws (..., n, d)."""
    return Moments(u.mean(-2), u.mT @ u / u.shape[-2], u.pow(3).mean(-2))


class Steering(Protocol):
    """A term added to the gradient of the discrepancy in the draws."""

    def gradient(self, x: Tensor, s: Tensor) -> Tensor:
        """Return the gradient in draws x (..., n, d) with scores s."""


@dataclass(eq=False)
class MomentPenalty:
    r"""A penalty on the departure of the draws' moments from given ones,

    .. math::
        w \left( \|\Delta E u\|^2 + \tfrac12 \|\Delta E u u^\top\|_F^2 + \tfrac1{15} \|\Delta E u^3\|^2 \right),

    each term divided by the variance of its estimate under N(0, I). The departures are running averages over
    batches; the gradient is taken through the current batch.

    Parameters
    ----------
    target : Moments
        With the leading axes of the draws.
    weight : float
        The w of the formula.
    memory : float, default=0.95
        Decay of the running averages.
    running : Moments, default=None
        The averages of a training under way.
    """

    target: Moments
    weight: float
    memory: float = 0.95
    running: Moments | None = None

    def gradient(self, u: Tensor, s: Tensor | None = None) -> Tensor:
        """Return the gradient in the draws u (..., n, d), for each layer separately."""
        running = self.running = self.running or Moments(*(a.clone() for a in self.target))
        for average, now in zip(running, moments(u), strict=True):
            average.lerp_(now, 1 - self.memory)
        first, second, third = (a - b for a, b in zip(running, self.target, strict=True))
        gradient = 2 * u @ second + 2 * first.unsqueeze(-2) + 0.4 * third.unsqueeze(-2) * u.square()
        return gradient.mul_(self.weight / u.shape[-2])


class Departure(NamedTuple):
    """How far the draws of a fit have moved since its start, by coordinate.

    Attributes
    ----------
    sd_ratio : Tensor of shape (d,)
    third : Tensor of shape (d,)
        The change of the third moment of standardised draws.
    """

    sd_ratio: Tensor
    third: Tensor

    @property
    def excess(self) -> Tensor:
        """The departure (d,) in units of what is allowed: 10% of the standard deviation, 0.8 of the third moment."""
        return torch.maximum(self.sd_ratio.log().abs() / math.log(1.1), self.third.abs() / 0.8)

    @property
    def accepted(self) -> bool:
        """Whether every coordinate is within the allowed departure."""
        return bool((self.excess <= 1).all())


def departure(u: Tensor, start: Tensor) -> Departure:
    """Compare draws with draws of the start, both (n, d), preferably from the same noise."""
    mean, sd = start.mean(0), start.std(0)
    third = ((u - mean) / sd).pow(3).mean(0) - ((start - mean) / sd).pow(3).mean(0)
    return Departure(u.std(0) / sd, third)


class Worsening(NamedTuple):
    """The errors of the draws of a state and of the start by Stein's identities, in standard deviations.

    Attributes
    ----------
    error, at_start : float
    """

    error: float
    at_start: float

    @property
    def accepted(self) -> bool:
        """Whether the state is not worse than the start, by more than the noise of the comparison."""
        return self.error <= self.at_start + 0.05


class Acceptable(Protocol):
    """The report on a state, in addition to its value."""

    @property
    def accepted(self) -> bool: ...


def tolerance_of(early_stopping: str | bool | float | None) -> float | None:
    """Return the `tol` of a parameter `early_stopping`, None if no plateau ends the training."""
    if keeps_last(early_stopping) or isinstance(early_stopping, str):
        return None
    return 0.01 if isinstance(early_stopping, bool | np.bool_) else early_stopping


def keeps_last(early_stopping: str | bool | float | None) -> bool:
    """Tell whether a training returns its last state, whatever it is worth."""
    return early_stopping is None or (isinstance(early_stopping, bool | np.bool_) and not early_stopping)


@dataclass(eq=False)
class Watch:
    """Evaluates a module at intervals, remembers its best state, and tells when it has stopped improving.

    Parameters
    ----------
    judge : callable
        Returns the value of the current module, smaller is better, and a report whose `accepted` tells whether
        the state may be kept.
    tol : float or None
        It tells to stop when the value has not fallen by this share for `PATIENCE` iterations, with None never.
    every : int, default=CHECK_EVERY
        Iterations between evaluations.
    keeps_best : bool, default=False
        Whether `restore` brings the best state back.
    noise : float, default=0
        By how much the value of the first state must be smaller than another's to be better.
    """

    judge: Callable[[nn.Module], tuple[float, Acceptable]]
    tol: float | None
    every: int = CHECK_EVERY
    keeps_best: bool = False
    noise: float = 0.0

    at_end: bool = field(init=False, default=True)
    values: list[tuple[int, float]] = field(init=False, default_factory=list)
    last: Acceptable | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._best_iteration: int | None = None
        self._best_state: Tensor | None = None
        self._mark, self._marked_at = math.inf, 0

    def __call__(self, progress: Progress) -> bool:
        """Evaluate the averaged module; tell whether to stop."""
        with progress.iterate.averaged():
            return self.look(progress.module, progress.n_done)

    def look(self, module: nn.Module, iteration: int) -> bool:
        """Evaluate the module after `iteration` iterations; tell whether to stop."""
        value, self.last = self.judge(module)
        best = math.inf if self._best_iteration is None else dict(self.values)[self._best_iteration]
        best += self.noise if self.values and self._best_iteration == self.values[0][0] else 0.0
        if self.keeps_best and self.last.accepted and value < best:
            self._best_iteration = iteration
            self._best_state = nn.utils.parameters_to_vector(module.parameters()).detach()
        return self._note(iteration, value)

    def _note(self, iteration: int, value: float) -> bool:
        """Record a value; tell whether the last substantial improvement is too long ago."""
        self.values.append((iteration, value))
        if self.tol is None:
            return False
        if value < self._mark - self.tol * abs(self._mark) or math.isinf(self._mark):
            self._mark, self._marked_at = value, iteration
        return iteration - self._marked_at >= PATIENCE

    def state(self) -> State:
        looks = np.array(self.values, dtype=np.float64).reshape(-1, 2)
        return {"looks": looks, "best_iteration": self._best_iteration, "best": self._best_state}

    def resume(self, state: State) -> None:
        self.values, self._mark, self._marked_at = [], math.inf, 0
        for iteration, value in state["looks"].tolist():
            self._note(int(iteration), value)
        self._best_iteration, self._best_state = state["best_iteration"], state["best"]

    @torch.no_grad()
    def restore(self, module: nn.Module) -> int:
        """Restore the best state; return its iteration."""
        if self._best_state is None or self._best_iteration is None:
            return self.values[-1][0] if self.values else 0
        parameters = list(module.parameters())
        for p, best in zip(parameters, self._best_state.split([p.numel() for p in parameters]), strict=True):
            p.copy_(best.view_as(p))
        return self._best_iteration
