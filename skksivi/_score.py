"""What a user's score function may return, checked before it is trusted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: Maps (n, d) points to (n, d) gradients of log p.
ScoreFunction = Callable[[Tensor], Tensor]

#: Maps points to their scores and a function v -> J^T v.
ScoreWithProduct = Callable[[Tensor], tuple[Tensor, ScoreFunction]]


class Score:
    """A score function that was probed: it answers in the type and on the device of its input.

    Parameters
    ----------
    score_fn : callable
        The gradient of log p at each row, (n, d) -> (n, d).
    n_features : int
        The d it is for.
    dtype : torch.dtype
        The type in which it is computed.
    device : torch.device
        Where it is computed.
    score_vjp : callable, default=None
        Maps (n, d) points to their scores and the vector-Jacobian product there; automatic by default.
    double : Score, default=None
        The same score computed in float64, from data that were never rounded; itself by default.
    """

    def __init__(
        self,
        score_fn: ScoreFunction,
        n_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        score_vjp: ScoreWithProduct | None = None,
        double: Score | None = None,
    ) -> None:
        self.score_fn = score_fn
        self.n_features = n_features
        self.dtype = dtype
        self.device = device
        self.score_vjp = score_vjp
        self.double = double or self

    def __call__(self, x: Tensor) -> Tensor:
        """Evaluate the score at x (n, d)."""
        if x.requires_grad:
            return self.score_fn(x.to(self.dtype)).to(x)
        with torch.enable_grad():  # a score that differentiates log p itself needs points with a graph
            s = self.score_fn(x.detach().to(self.dtype).requires_grad_())
        return s.detach().to(x)

    def with_pullback(self, x: Tensor) -> tuple[Tensor, ScoreFunction]:
        """Return the score at x (n, d) without a graph, and the map of v (n, d) to J^T v (n, d)."""
        if self.score_vjp is not None:
            return self.score_vjp(x)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            s = self(x)
        return s.detach(), lambda v: torch.autograd.grad(s, x, v)[0]


def probe(
    score_fn: ScoreFunction,
    n_features: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    score_vjp: ScoreWithProduct | None = None,
) -> Score:
    """Call `score_fn` on two and on three points; return it adapted, or say what is wrong with it.

    Raises
    ------
    TypeError
        It does not return a tensor.
    ValueError
        It returns another shape than that of its input, or a tensor without a graph back to it.
    """
    for n in (2, 3):  # two sizes, so that (d, n) and (n,) cannot pass for (n, d)
        x = torch.linspace(-1, 1, n * n_features, dtype=dtype, device=device)
        x = x.reshape(n, n_features)
        before = x.clone()
        try:
            with torch.enable_grad():
                s = score_fn(x.requires_grad_())
        except Exception as error:
            error.add_note(
                f"Raised by `score_fn` on a trial input of shape {(n, n_features)}, {dtype}. If its data "
                "are of another type, give them this one or set the parameter `dtype`."
            )
            raise
        if not torch.equal(x, before):
            raise ValueError("`score_fn` changed its input in place; it must leave the points it is given alone.")
        if not isinstance(s, Tensor):
            raise TypeError(
                f"`score_fn` returned a {type(s).__name__}, expected a torch tensor of the shape of its input, "
                f"{(n, n_features)}."
            )
        if s.shape != x.shape:
            raise ValueError(
                f"`score_fn` returned shape {tuple(s.shape)}, expected {tuple(x.shape)} as its input: the "
                "gradient of log p at each row."
            )
        if not s.requires_grad:
            raise ValueError(
                "`score_fn` returned a tensor without a graph back to its input, but training differentiates "
                "through the score; remove `detach`, `no_grad` and numpy from it."
            )
    if score_vjp is not None:
        _check_product(score_vjp, x, s)
    return Score(score_fn, n_features, dtype=dtype, device=device, score_vjp=score_vjp)


def _check_product(score_vjp: ScoreWithProduct, x: Tensor, s: Tensor) -> None:
    """Compare a given product with the automatic one at the points x with scores s."""
    v = torch.linspace(-1, 2, x.numel(), dtype=x.dtype, device=x.device).reshape(x.shape)
    (expected,) = torch.autograd.grad(s, x, v)
    with torch.no_grad():
        own, vjp = score_vjp(x.detach().clone())
        product = vjp(v)
    for name, a, b in (("a score", own, s), ("a product", product, expected)):
        if a.shape != b.shape or (a - b).abs().max() > 1e-2 * b.abs().max() + 1e-6:
            raise ValueError(
                f"`score_vjp` returns {name} that differs from that of `score_fn`; correct it, or leave it out and "
                "let the product be automatic."
            )


def in_double(
    score_fn: ScoreFunction,
    n_features: int,
    device: torch.device | str = "cpu",
    score_vjp: ScoreWithProduct | None = None,
) -> Score:
    """Return the score for float64 points, computed in float32 where `score_fn` takes nothing else."""
    device = torch.device(device)
    try:
        return probe(score_fn, n_features, dtype=torch.float64, device=device, score_vjp=score_vjp)
    except RuntimeError as error:
        try:
            return probe(score_fn, n_features, dtype=torch.float32, device=device, score_vjp=score_vjp)
        except RuntimeError:
            raise error from None
