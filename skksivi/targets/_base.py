"""What a target is: a distribution known by the gradient of its log-density."""

from __future__ import annotations

import copy
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from skksivi._score import ScoreFunction


class Target:
    """A distribution to approximate, known by its score.

    A subclass gives `n_features` and either `score_fn(x)` or `log_prob(x)`, whose gradient is then the score; it
    need not call `__init__`. Optional: `sample(n, generator)` where an exact sampler exists, and `score_vjp(x)`,
    which returns the score and its vector-Jacobian product, the map of v to J^T v (n, d), to spare the automatic
    one. A target can be handed to scikit-learn's search tools in the place of X: indexing gives the target itself.

    Attributes
    ----------
    n_features : int
        Dimension d.

    Examples
    --------
    >>> import torch
    >>> from skksivi.targets import Target
    >>> class Cauchy(Target):
    ...     n_features = 1
    ...     def log_prob(self, x):
    ...         return -torch.log1p(x**2).sum(-1)
    >>> Cauchy().score_fn(torch.tensor([[1.0]]))
    tensor([[-1.]])
    """

    n_features: int
    score_vjp: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let a new density not inherit the score of the old one, nor a new score the product of the old one."""
        super().__init_subclass__(**kwargs)
        if "log_prob" in vars(cls) and "score_fn" not in vars(cls):
            cls.score_fn = Target.score_fn  # type: ignore[method-assign]
        if "score_fn" in vars(cls) and "score_vjp" not in vars(cls):
            cls.score_vjp = None

    def score_fn(self, x: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of x (n, d), by automatic differentiation of `log_prob`."""
        if not hasattr(self, "log_prob"):
            raise TypeError(f"{type(self).__name__} must define `score_fn(x)` or `log_prob(x)`.")
        differentiable = x.requires_grad
        with torch.enable_grad():
            x = x if differentiable else x.detach().requires_grad_()
            log_prob = self.log_prob(x)
            if log_prob.shape != x.shape[:-1]:
                raise ValueError(
                    f"`log_prob` of {type(self).__name__} returned shape {tuple(log_prob.shape)}, expected "
                    f"{tuple(x.shape[:-1])}, one value a row."
                )
            (s,) = torch.autograd.grad(log_prob.sum(), x, create_graph=differentiable)
        return s

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return a copy whose floating-point tensors are on `device` and of type `dtype`."""
        moved = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(moved, name, value.to(device=device, dtype=dtype))
        return moved

    @property
    def shape(self) -> tuple[int, int]:
        """One "row" of n_features, so that scikit-learn can count and split it."""
        return (1, self.n_features)

    def __getitem__(self, index: Any) -> Self:
        return self

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError(f"A target is not an array; {type(self).__name__} is known by its score only.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n_features={self.n_features})"


class _ScoreTarget(Target):
    def __init__(self, score_fn: ScoreFunction, n_features: int) -> None:
        self._score_fn = score_fn
        self.n_features = n_features

    def score_fn(self, x: Tensor) -> Tensor:
        return self._score_fn(x)


def from_score_fn(score_fn: ScoreFunction, n_features: int) -> Target:
    """Make a target of a bare score function.

    Parameters
    ----------
    score_fn : callable
        The gradient of log p at each row, (n, n_features) tensor -> (n, n_features) tensor.
    n_features : int

    Returns
    -------
    target : Target

    Examples
    --------
    >>> from skksivi.targets import from_score_fn
    >>> from_score_fn(lambda x: -x, n_features=3).shape
    (1, 3)
    """
    if not callable(score_fn):
        raise TypeError(f"`score_fn` must be callable, got a {type(score_fn).__name__}.")
    if not isinstance(n_features, int | np.integer) or n_features < 1:
        raise ValueError(f"`n_features` must be a positive integer, got {n_features!r}.")
    return _ScoreTarget(score_fn, int(n_features))
