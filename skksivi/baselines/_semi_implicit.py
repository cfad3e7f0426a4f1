r"""What the methods with one layer :math:`x = \mu(z) + \sigma \odot \xi` share: all but the gradient."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from skksivi.base import Integral, Interval, StrOptions
from skksivi.estimators._trained import MAX_LATENT_DIM, Trained, temperature
from skksivi.families._layer import SemiImplicit, gaussian_layer
from skksivi.families._samplers import Fit, Layer, Tell
from skksivi.mixing import NormalDraws
from skksivi.pilot._affine import WhitenedScore
from skksivi.pilot._rules import pulled_back
from skksivi.score._score import Halves, Score, ScoreFunction
from skksivi.training._loop import Objective, Scheduled

#: A score in the coordinates of the training.
ScoreInU = Score | WhitenedScore | Halves


class SemiImplicitVI(Trained):
    """Base of the methods that fit one semi-implicit layer; a leaf gives `_objective`."""

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **Trained._parameter_constraints,
        "latent_dim": [Interval(Integral, 1, None, closed="left"), None],
        "linear_skip": ["boolean"],
        "annealing": [StrOptions({"linear"}), callable, None],
    }

    annealing: Callable[[float], float] | str | None
    latent_dim: int | None
    linear_skip: bool
    family_: SemiImplicit

    @abstractmethod
    def _objective(
        self, score_u: ScoreInU, temperature: Scheduled, family: SemiImplicit, generator: torch.Generator
    ) -> Objective:
        """Return what is minimised, of a score and the inverse temperature that multiplies it."""

    def _fit(self, score_fn: Score, generator: torch.Generator, tell: Tell | None) -> Fit:
        self._check_parameters()
        whitening, _ = self._find_whitening(score_fn, generator)
        family, seed = self._build(score_fn, generator), generator.initial_seed()
        tempers = temperature(self.annealing, next(family.parameters()))
        objective = self._objective(pulled_back(score_fn, whitening, generator), tempers, family, generator)
        return self._train(objective, family, generator, lambda family: Layer(family, whitening, seed), tell)

    def _build(self, score_fn: Score, generator: torch.Generator) -> SemiImplicit:
        """Return a new family."""
        d = score_fn.n_features
        return gaussian_layer(
            d,
            mixing=NormalDraws(self.latent_dim or min(d, MAX_LATENT_DIM)),
            hidden_layer_sizes=self.hidden_layer_sizes,
            linear_skip=self.linear_skip,
            scale="constant",
            initial_scale=self.initial_scale,
            min_scale=self.min_scale,
            generator=generator,
            dtype=score_fn.dtype,
        )


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
