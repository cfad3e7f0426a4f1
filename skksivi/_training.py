"""The one optimisation loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

#: Iterations between two looks at the losses; nothing is read from the device in between.
CHECK_EVERY = 100


class Run(NamedTuple):
    """What a run of the loop leaves beside the trained module."""

    losses: np.ndarray
    monitored: np.ndarray


class Plateau:
    """Tell when a monitored value has stopped falling.

    Parameters
    ----------
    monitor : callable
        Gives the value for the module as it stands.
    tol : float
        The relative fall that counts as progress.
    patience : int
        Iterations without progress after which to stop.
    """

    def __init__(self, monitor: Callable[[nn.Module], float], tol: float, patience: int) -> None:
        self.monitor = monitor
        self.tol = tol
        self.patience = patience
        self.values: list[float] = []
        self._best, self._best_iteration = math.inf, 0

    def reached(self, module: nn.Module, iteration: int) -> bool:
        """Look at the module after `iteration` iterations."""
        value = self.monitor(module)
        self.values.append(value)
        if value < self._best - self.tol * abs(self._best) or math.isinf(self._best):
            self._best, self._best_iteration = value, iteration
        return iteration - self._best_iteration >= self.patience


def learning_rate_factor(decay: Any, max_iter: int) -> Callable[[int], float]:
    """Return the factor of the learning rate at iteration t.

    `decay` is None (constant), "cosine" (to zero at `max_iter`) or a pair (factor, every): times `factor` after
    each `every` iterations.
    """
    if decay is None:
        return lambda _: 1.0
    if isinstance(decay, str):
        return lambda t: (1 + math.cos(math.pi * t / max_iter)) / 2
    factor, every = decay
    return lambda t: factor ** (t // every)


def _exponential_average(decay: float) -> Callable[[Any, Any, Tensor | int], None]:
    """Return the update of an exponential average whose memory grows to 1 / (1 - decay) steps."""

    @torch.no_grad()
    def update(averaged: Any, current: Any, n_averaged: Tensor | int) -> None:
        weight = max(1 - decay, 9 / (10 + int(n_averaged)))
        for a, p in zip(averaged, current, strict=True):
            a.lerp_(p, weight)

    return update


def minimise(
    loss_fn: Callable[[float], Tensor],
    module: nn.Module,
    *,
    max_iter: int,
    learning_rate: float,
    learning_rate_decay: Any,
    betas: tuple[float, float],
    max_grad_norm: float | None,
    ema_decay: float | None,
    plateau: Plateau | None,
) -> Run:
    """Minimise a stochastic loss over the parameters of a module, in place, by Adam.

    Parameters
    ----------
    loss_fn : callable
        Maps progress in [0, 1) to a fresh estimate of the loss.
    module : Module
    max_iter, learning_rate, learning_rate_decay, betas, max_grad_norm, ema_decay
        As those of the approximators.
    plateau : Plateau or None
        When to stop early.

    Raises
    ------
    FloatingPointError
        The loss is not finite.
    """
    parameters = list(module.parameters())
    optimizer = torch.optim.Adam(parameters, lr=learning_rate, betas=betas, fused=True)
    factor = learning_rate_factor(learning_rate_decay, max_iter)
    average = AveragedModel(module, multi_avg_fn=_exponential_average(ema_decay)) if ema_decay else None
    losses = torch.zeros(max_iter, dtype=parameters[0].dtype, device=parameters[0].device)
    n_iter = 0
    for t in range(max_iter):
        optimizer.param_groups[0]["lr"] = learning_rate * factor(t)
        optimizer.zero_grad()
        loss = loss_fn(t / max_iter)
        loss.backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        optimizer.step()
        if average is not None:
            average.update_parameters(module)
        losses[t] = loss.detach()
        n_iter = t + 1
        if n_iter % CHECK_EVERY == 0 or n_iter == max_iter:
            _check_finite(losses[:n_iter])
            if plateau is not None and plateau.reached(average.module if average else module, n_iter):
                break
    if average is not None:
        module.load_state_dict(average.module.state_dict())
    return Run(losses[:n_iter].cpu().numpy(), np.array(plateau.values if plateau else []))


def _check_finite(losses: Tensor) -> None:
    finite = losses.isfinite()
    if not finite.all():
        iteration = int((~finite).nonzero()[0])
        raise FloatingPointError(
            f"The loss is {losses[iteration].item()} at iteration {iteration}: `score_fn` may be undefined or huge "
            "where the draws lie. Use dtype='float64', a smaller `learning_rate` or `initial_scale`, or rescale "
            "the parameters."
        )
