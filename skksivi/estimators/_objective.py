"""What a training minimises: the discrepancy of one or of many layers, or KL(q || p), with further terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.families._layer import Drawn, Family
from skksivi.kernels import Kernel
from skksivi.pilot._chains import clipped_drift
from skksivi.score._score import DifferentiableScore
from skksivi.stein import Memory, value_and_gradients, velocity
from skksivi.stein._estimators import GRADIENT_ESTIMATORS, GradientEstimator
from skksivi.training._guard import Steering
from skksivi.training._loop import Objective, Scheduled


class ObjectiveEstimate(NamedTuple):
    """An estimate of an objective from draws.

    Attributes
    ----------
    n_draws : int
    gradients : callable
        Maps draws to the value, and its gradients in the fields of `Drawn`.
    """

    n_draws: int
    gradients: Callable[[Drawn], tuple[Tensor, ...]]


def squared_ksd(
    kernel: Kernel, estimator: GradientEstimator, batch_size: int, *, in_halves: bool
) -> ObjectiveEstimate:
    """Return the estimate of KSD^2; with a minibatch for each half of the draws, by the pairs between these."""
    n_draws = estimator.n_batches * batch_size
    if in_halves:  # pairs within a half are biased
        estimator, n_draws = GRADIENT_ESTIMATORS["vanilla"], n_draws + n_draws % 2

    def gradients(drawn: Drawn) -> tuple[Tensor, ...]:
        ksd, dx, df = value_and_gradients(drawn.x, drawn.target_score - drawn.conditional_score, kernel, estimator)
        return ksd, dx, df, -df

    return ObjectiveEstimate(n_draws, gradients)


def rate_of_kl(kernel: Kernel, batch_size: int, memory: Memory, *, adapts: bool) -> ObjectiveEstimate:
    """Return the rate at which KL(q || p) falls along the kernelised path gradient, with that gradient."""

    def gradients(drawn: Drawn) -> tuple[Tensor, ...]:
        x, s, zero = drawn.x, clipped_drift(drawn.target_score), torch.zeros_like(drawn.x)
        if not len(memory.x):
            memory.begin(x, s)
        v = velocity(x, memory, kernel, memory.squared_width() if adapts else None)
        memory.add(x, s)
        rate = (v * (s - drawn.conditional_score)).sum(-1).mean(-1)
        return rate, -v / x.shape[-2], zero, zero

    return ObjectiveEstimate(batch_size, gradients)


def objective_of(
    estimate: ObjectiveEstimate,
    score_u: DifferentiableScore,
    family: Family,
    generator: torch.Generator,
    *,
    terms: Sequence[Steering] = (),
    schedules: Sequence[Scheduled] = (),
    weights: Sequence[float] | None = None,
) -> Objective:
    """Return the sum of estimates over layers, with weights, and of the further terms."""
    beta = None if weights is None else next(family.parameters()).new_tensor(weights)

    def gradient_fn() -> Tensor:
        drawn, pull = family.draw_with_pullback(estimate.n_draws, generator, score_u)
        value, dx, ds, dc = estimate.gradients(drawn)
        for term in terms:
            dx.add_(term.gradient(drawn.x, drawn.target_score))
        if beta is not None:
            value = beta @ value
            dx, ds, dc = (gradient * beta[:, None, None] for gradient in (dx, ds, dc))
        pull(dx, ds, dc)
        return value

    return Objective(gradient_fn, schedules)
