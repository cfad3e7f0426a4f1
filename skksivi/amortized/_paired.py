"""A score of pairs: the gradient of log p(x | y) in x, for rows x and contexts y."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from skksivi.amortized._contexts import Rows, ScoreOfPairs, given, parts, repeated, take, tiled
from skksivi.score import REJECTIONS, Score, ScoreFunction, Tally, choose_product, first_points, in_parts, probe


class PairedScore:
    """A score of pairs that was probed.

    Parameters
    ----------
    score_fn : callable
        Maps x (n, d) and n contexts to (n, d).
    n_features : int
    y : Rows
        The contexts of the training, by which it is probed.
    device : torch.device
    """

    def __init__(self, score_fn: ScoreOfPairs, n_features: int, y: Rows, device: torch.device) -> None:
        self.score_fn = score_fn
        points = torch.randn(2, n_features, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        compared = take(y, torch.linspace(0, len(y) - 1, min(4, len(y))).long())
        self.template, _ = choose_product(self._probed(compared, n_features, device), "auto", points.to(device))
        self._check_context(compared, points.to(device))

    @property
    def tally(self) -> Tally:
        return self.template.tally

    @property
    def n_features(self) -> int:
        return self.template.n_features

    def _probed(self, y: Rows, n_features: int, device: torch.device) -> Score:
        """Return the score of the first of some contexts at which it does not raise, probed."""
        errors = []
        for part in parts(y, 1):
            try:
                return probe(at_contexts(self.score_fn, part), n_features, dtype=torch.float64, device=device)
            except REJECTIONS as error:
                errors.append(error)
        raise errors[0]

    def _of_each(self, y: Rows) -> ScoreFunction:
        """Return the function of points that `at_contexts` makes, NaN at pairs where it raises."""
        whole = at_contexts(self.score_fn, y)

        def function(x: Tensor) -> Tensor:
            def points(rows: Tensor) -> Tensor:
                return x[rows if isinstance(x, Tensor) else rows.numpy()]

            def at(rows: Tensor) -> Tensor:
                own = take(tiled(y, len(x) // len(y)), rows)
                return torch.as_tensor(self.score_fn(points(rows), given(own, x)))

            def nothing(row: Tensor) -> Tensor:
                return torch.as_tensor(points(row) * math.nan)

            try:
                return whole(x)
            except (*REJECTIONS, RuntimeError):
                return torch.cat(in_parts(at, torch.arange(len(x)), nothing, self.tally, self._again))

        return function

    def _again(self, n: int) -> None:
        """Raise RuntimeError if the function no longer works where it was called first, with n rows."""
        like = torch.empty(0, self.n_features, dtype=torch.float64, device=self.template.device)
        try:
            self.template.score_fn(first_points(2, like).repeat(-(-n // 2), 1)[:n])
        except REJECTIONS as error:
            raise RuntimeError(f"`score_fn` raises at every pair: {type(error).__name__}: {error}") from error

    def rows(self, y: Rows) -> Score:
        """Return the score of points x (n, d), the rows of which belong to n contexts."""
        return self.template.like(self._of_each(y), None)

    def __call__(self, x: Tensor, y: Rows) -> Tensor:
        """Evaluate the score at x (n, d) of n contexts."""
        return self.rows(y)(x)

    def jacobians(self, x: Tensor, y: Rows) -> Tensor:
        """Return the Jacobians (n, d, d) at x (n, d) of n contexts, by d products each."""
        n, d = x.shape
        directions = torch.eye(d).to(x).repeat(n, 1)
        return self.rows(repeated(y, d)).product(x.repeat_interleave(d, 0), directions).view(n, d, d)

    def _check_context(self, y: Rows, x: Tensor) -> None:
        """Raise ValueError if the score is the same for all of some contexts."""
        s = self(x.repeat(len(y), 1), repeated(y, len(x))).view(len(y), *x.shape)
        if (s == s[:1]).all():
            raise ValueError(
                f"`score_fn` returned the same at {len(x)} points for each of {len(y)} contexts, expected it to "
                "depend on its second argument, rows of `contexts` that belong to the rows of the first."
            )


def at_contexts(score_fn: ScoreOfPairs, y: Rows) -> ScoreFunction:
    """Return the function of points, to which the contexts belong in turn, as often as there are points."""

    def function(x: Tensor) -> Tensor:
        return score_fn(x, given(tiled(y, len(x) // len(y)), x))

    return function
