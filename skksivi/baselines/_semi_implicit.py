r"""What the methods with one layer :math:`x = \mu(z) + \sigma \odot \xi` share: all but the gradient."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from skksivi._affine import WhitenedScore
from skksivi._families import Hierarchy, Normal, SemiImplicit, gaussian_layer
from skksivi._fitting import (
    CONSTRAINTS,
    KEEPING,
    check_parameters,
    concluded,
    n_reports,
    optimiser_of,
    points_near_target,
    reporter,
)
from skksivi._samplers import Fit, Layer, Sampler
from skksivi._score import Halves, Score, ScoreFunction
from skksivi._training import Objective, Scheduled, minimise
from skksivi._whitening import Whitening, find_whitening, pulled_back
from skksivi.annealing import Linear
from skksivi.base import BaseApproximator, Integral, Interval, Tell

#: Largest latent dimension chosen by default.
MAX_LATENT_DIM = 100

#: Constraints of the parameters that every training has.
TRAINING = {
    name: CONSTRAINTS[name]
    for name in (
        "hidden_layer_sizes", "initial_scale", "min_scale", "whiten", "init", "whiten_budget", "batch_size",
        "max_iter", "learning_rate", "learning_rate_decay", "betas", "ema_decay", "max_grad_norm", "nonfinite",
        "verbose",
    )
}  # fmt: skip

#: A score in the coordinates of the training.
ScoreInU = Score | WhitenedScore | Halves


class SemiImplicitVI(BaseApproximator):
    """Base of the methods that fit one semi-implicit layer; a leaf gives `_objective`."""

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **BaseApproximator._parameter_constraints,
        **TRAINING,
        "latent_dim": [Interval(Integral, 1, None, closed="left"), None],
        "linear_skip": ["boolean"],
        "annealing": CONSTRAINTS["annealing"],
    }

    annealing: Callable[[float], float] | str | None
    latent_dim: int | None
    hidden_layer_sizes: Sequence[int]
    linear_skip: bool
    initial_scale: float
    min_scale: float
    whiten: Any
    init: Any
    whiten_budget: int
    family_: SemiImplicit
    whitening_: Whitening
    loss_curve_: np.ndarray
    n_iter_: int

    @abstractmethod
    def _objective(
        self, score_u: ScoreInU, temperature: Scheduled, family: SemiImplicit, generator: torch.Generator
    ) -> Objective:
        """Return what is minimised, of a score and the inverse temperature that multiplies it."""

    def score_samples(self, X: Any) -> np.ndarray:
        r"""Estimate the log-density of the fitted distribution.

        .. math:: \log \frac{1}{K} \sum_{k=1}^{K} q(x | z_k), \quad z_k \sim q(z), \quad K = 10{,}000.

        It is too small on average, little in few dimensions, much where :math:`\sigma` is small against the spread
        of :math:`\mu(z)` in many.

        Parameters
        ----------
        X : array-like of shape (n, n_features)

        Returns
        -------
        log_density : ndarray of shape (n,)
            In nats, float64.

        Raises
        ------
        NotFittedError
            Before `fit`.
        ValueError
            X has another number of columns than the target had, or holds non-finite values.
        """
        return super().score_samples(X)

    def _points_near_target(self) -> Any:
        return points_near_target(self)

    def _n_reports(self) -> int:
        return n_reports(self)

    def _fit(self, score_fn: Score, generator: torch.Generator, tell: Tell | None) -> Fit:
        check_parameters(self)
        whitening, _ = find_whitening(self.whiten, score_fn, generator, init=self.init, budget=self.whiten_budget)
        family = self._build(score_fn, generator)
        temperature = Scheduled("annealing", self._annealing(), next(family.parameters()), positive=True)
        objective = self._objective(pulled_back(score_fn, whitening, generator), temperature, family, generator)
        seed = generator.initial_seed()
        return train(self, objective, family, generator, lambda family: Layer(family, whitening, seed), tell)

    def _annealing(self) -> Callable[[float], float] | float:
        if self.annealing is None:
            return 1.0
        return Linear() if isinstance(self.annealing, str) else self.annealing

    def _conclude(self, fit: Fit, score_fn: Score, generator: torch.Generator) -> BaseException | None:
        return concluded(fit, score_fn, generator)

    def _build(self, score_fn: Score, generator: torch.Generator) -> SemiImplicit:
        """Return a new family."""
        d = score_fn.n_features
        return gaussian_layer(
            d,
            mixing=Normal(self.latent_dim or min(d, MAX_LATENT_DIM)),
            hidden_layer_sizes=self.hidden_layer_sizes,
            linear_skip=self.linear_skip,
            scale="constant",
            initial_scale=self.initial_scale,
            min_scale=self.min_scale,
            generator=generator,
            dtype=score_fn.dtype,
        )


def train(
    est: Any,
    objective: Objective,
    family: SemiImplicit | Hierarchy,
    generator: torch.Generator,
    sampler_of: Callable[[Any], Sampler],
    tell: Tell | None,
) -> Fit:
    """Minimise over the parameters of the family; return what was learned, unless there is nothing to keep."""
    run = minimise(
        objective,
        family,
        optimiser_of(est),
        generator,
        max_iter=est.max_iter,
        nonfinite=est.nonfinite,
        hooks=reporter(est, sampler_of, tell),
    )
    if not (run.ended_by is None or isinstance(run.ended_by, KEEPING)):
        raise run.ended_by
    losses = run.losses.astype(np.float64)
    report = {"loss_curve_": losses, "n_iter_": len(losses)}
    return Fit(sampler_of(family.requires_grad_(False)), report, run.ended_by)


def layer_with_pullback(family: SemiImplicit, z: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], None]]:
    """Return mu(z) (k, d), sigma (d,) and the way of gradients back to the parameters.

    It takes the gradient of a loss in mu, (k, d), and the terms (n, d) whose sum over rows is that in sigma.
    """
    mu, pull_mean = family.mean.with_pullback(z)
    a, pull_log_variance = family.log_variance.with_pullback(z)
    e_a = a.exp()
    sigma = (e_a + family.min_scale**2).sqrt_()

    def pullback(dmu: Tensor, dsigma: Tensor) -> None:
        pull_mean(dmu)
        pull_log_variance(dsigma * (e_a / (2 * sigma)))

    return mu, sigma, pullback


class Tempered(NamedTuple):
    """A score times the inverse temperature, a tensor."""

    score_u: Any
    inverse_temperature: Tensor

    def with_pullback(self, u: Tensor) -> tuple[Tensor, ScoreFunction]:
        """Return the score at u (n, d), and the map of v (n, d) to J^T v (n, d)."""
        s, pull = self.score_u.with_pullback(u)
        return self.inverse_temperature * s, lambda v: pull(self.inverse_temperature * v)
