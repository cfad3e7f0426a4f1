"""A score function that can be trusted: its values, and products with its Jacobian."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

#: Maps (n, d) points to (n, d) gradients of log p.
ScoreFunction = Callable[[Tensor], Tensor]


#: Maps points to their scores and a function v -> J^T v.
ScoreWithProduct = Callable[[Tensor], tuple[Tensor, ScoreFunction]]


#: Step of a central difference by the type in which a score is computed, in units of 1 + |x|.
STEPS = {torch.float32: 3e-3, torch.float64: 1e-5}


@dataclass(frozen=True)
class Score:
    """A score function that was probed: it answers in the type and on the device of its input.

    Attributes
    ----------
    score_fn : callable
        The gradient of log p at each row, (n, d) -> (n, d).
    n_features : int
        The d it is for.
    dtype : torch.dtype
        The type of the points it is given.
    device : torch.device
        Where it is computed.
    step : float
        Step of its central differences.
    score_vjp : callable or None
        Maps (n, d) points to their scores and the vector-Jacobian product there.
    by_differences : bool
        Whether products with the Jacobian are central differences of the score.
    minibatch : callable or None
        Draws, from a generator, the score as a minibatch of the data tells it.
    log_prob : callable or None
        Maps points (n, d) of type `dtype` to log p (n,), up to a constant, where the target has one of tensors.
    in_double : Score or None
        The same score computed in float64, from data that were never rounded; None if this is it.
    """

    score_fn: ScoreFunction
    n_features: int
    dtype: torch.dtype
    device: torch.device
    step: float
    score_vjp: ScoreWithProduct | None = None
    by_differences: bool = False
    minibatch: Callable[[torch.Generator], Score] | None = None
    log_prob: Callable[[Tensor], Tensor] | None = None
    in_double: Score | None = None

    @property
    def double(self) -> Score:
        """The same score computed in float64."""
        return self.in_double or self

    def on_all_data(self) -> Score:
        """Return the same score without minibatches."""
        double = None if self.in_double is None else self.in_double.on_all_data()
        return replace(self, minibatch=None, in_double=double)

    def like(self, score_fn: ScoreFunction, score_vjp: ScoreWithProduct | None) -> Score:
        """Return another function that is called as this one is."""
        if isinstance(self.score_fn, BlackBox):
            score_fn = BlackBox(score_fn, self.score_fn.kind)
        return replace(self, score_fn=score_fn, score_vjp=None if self.score_vjp is None else score_vjp)

    def __call__(self, x: Tensor) -> Tensor:
        """Evaluate the score at x (n, d)."""
        if x.requires_grad:
            return self.score_fn(x.to(self.dtype)).to(x)
        at = x.detach().to(self.dtype)
        with torch.enable_grad():  # a score that differentiates log p itself needs points with a graph
            s = self.score_fn(at.requires_grad_() if self.score_vjp is None else at)
        return s.detach().to(x)

    def with_pullback(self, x: Tensor) -> tuple[Tensor, ScoreFunction]:
        """Return the score at x (n, d) without a graph, and the map of v (n, d) to J^T v (n, d)."""
        if self.by_differences:
            return self(x), lambda v: self.jacobian_product(x, v)
        if self.score_vjp is not None:
            return self.score_vjp(x)
        return autograd_pullback(self, x)

    def jacobian_product(self, x: Tensor, v: Tensor) -> Tensor:
        """Return J^T v for points x (n, d) and directions v (n, d)."""
        if self.by_differences:
            return central_difference(self, x.to(self.dtype), v.to(self.dtype), self.step).to(v)
        return self.with_pullback(x)[1](v)


# Products with the Jacobian


def autograd_pullback(score_fn: ScoreFunction, x: Tensor) -> tuple[Tensor, ScoreFunction]:
    """Return the score at x (n, d), and the map of v to J^T v by its graph; no graph means J = 0."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        s = score_fn(x)

    def pullback(v: Tensor) -> Tensor:
        if not s.requires_grad:
            return torch.zeros_like(v)
        return torch.autograd.grad(s, x, v, allow_unused=True, materialize_grads=True)[0]

    return s.detach(), pullback


def central_difference(score_fn: ScoreFunction, x: Tensor, v: Tensor, step: float) -> Tensor:
    r"""Return J v, which is J^T v for a gradient, from one batch of both ends.

    .. math:: J v \approx \|v\|_\infty \frac{s(x + h w) - s(x - h w)}{2 h}, \quad w = v / \|v\|_\infty, \quad
        h = \text{step} \, (1 + \max_i |w_i x_i|).

    The largest entry, and no other norm, is one that can be divided by: squares of small float32 numbers are zero.
    """
    size = v.abs().amax(-1, keepdim=True)
    w = v / size.where(size > 0, 1)
    h = step * (1 + (w * x).abs().amax(-1, keepdim=True))
    ahead, behind = score_fn(torch.cat([x + h * w, x - h * w])).detach().chunk(2)
    return (ahead - behind) / (2 * h) * size


def jacobian_product(score_fn: ScoreFunction, x: Tensor, v: Tensor) -> Tensor:
    """Return J^T v by the rule of a `Score`, of a bare function by autograd."""
    own = getattr(score_fn, "jacobian_product", None)
    return autograd_pullback(score_fn, x)[1](v) if own is None else own(x, v)


class Halves(NamedTuple):
    """A score of which two halves of the points see independent minibatches of the data.

    A product of two estimates from one minibatch would be biased by the covariance of their errors. Within a finite
    difference a minibatch stays the same.
    """

    draw: Callable[[], Any]

    def with_pullback(self, x: Tensor) -> tuple[Tensor, ScoreFunction]:
        """Return the score at x (n, d) without a graph, and the map of v (n, d) to J^T v (n, d)."""
        scores, pulls = zip(*(self.draw().with_pullback(half) for half in x.chunk(2)), strict=True)

        def pullback(v: Tensor) -> Tensor:
            return torch.cat([pull(half) for pull, half in zip(pulls, v.chunk(2), strict=True)])

        return torch.cat(scores), pullback


# What it is called with, and what it returns


def _graph(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def _in_float64(x: Tensor) -> Tensor:
    return x.detach().to(device="cpu", dtype=torch.float64, copy=True)


#: What a function may take, tried in this order: tensors with a graph, arrays, tensors without a graph, and with one
#: for its own use. All but the first are given float64 on the CPU.
POINTS: dict[str, Callable[[Tensor], Any]] = {
    "graph": _graph,
    "array": lambda x: _in_float64(x).numpy(),
    "tensor": _in_float64,
    "leaf": lambda x: _in_float64(x).requires_grad_(),
}


class BlackBox:
    """A score function of arrays, or of tensors without a graph, in the place of one of tensors."""

    def __init__(self, score_fn: Callable[[Any], Any], kind: str) -> None:
        self.score_fn = score_fn
        self.kind = kind

    def __call__(self, x: Tensor) -> Tensor:
        """Evaluate the score at x (n, d)."""
        with torch.set_grad_enabled(self.kind == "leaf"), np.errstate(all="ignore"):  # modes are searched far out
            return _as_tensor(self.score_fn(POINTS[self.kind](x))).to(x)


def _as_tensor(s: Any) -> Tensor:
    """Return a copy of what a function returned, which may be a buffer that it uses again."""
    return s.detach().clone() if isinstance(s, Tensor) else torch.from_numpy(np.array(s))
