r"""What the methods with one layer :math:`x = \mu(z) + \sigma \odot \xi` share: all but the gradient."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from skksivi._utils.arrays import RandomState
from skksivi.base import Constraints, Integral, Interval, StrOptions
from skksivi.coordinates._composed import score_for_training
from skksivi.estimators._trained import MAX_LATENT_DIM, Trained, temperature
from skksivi.families._layer import SemiImplicit, covariance_kept, diagonal_gaussian_log_prob, gaussian_layer
from skksivi.families._samplers import Layer
from skksivi.mixing import Mixing, NormalDraws
from skksivi.parameters import Adam, Annealing, Init, Scale, Whiten, checked_object
from skksivi.pilot._pilot import find_whitening
from skksivi.score._score import DifferentiableScore, Score, Tempered
from skksivi.training._loop import Objective, Scheduled, learning_rate_factor
from skksivi.training._run import Fit, Run


@dataclass(kw_only=True, eq=False, repr=False)
class TrainedBaseline(Trained):
    """Base of the methods that train a family, with the parameters that all of them have."""

    initial_scale: float = 1.0
    scale: str | Scale = "constant"
    whiten: Whiten = "laplace"
    init: Init = None
    learning_rate: float = 1e-3
    optimizer: str | Adam = "adam"
    device: str | torch.device = "auto"
    dtype: str = "float32"
    random_state: RandomState = None
    verbose: int = 0

    def _rate(self, name: str, first: float, like: Tensor) -> Scheduled:
        """Return a further learning rate, which falls as that of the family does."""
        factor = learning_rate_factor(self._steps.decay, self.max_iter)
        return Scheduled(name, lambda t: first * factor(round(t * self.max_iter)), like)


@dataclass(kw_only=True, eq=False, repr=False)
class SemiImplicitVI(TrainedBaseline):
    """Base of the methods that fit one semi-implicit layer; a leaf gives `_objective`."""

    _parameter_constraints: ClassVar[Constraints] = {
        "latent_dim": [Interval(Integral, 1, None, closed="left"), None],
        "linear_skip": ["boolean"],
        "annealing": [StrOptions({"linear"}), callable, None],
    }

    family_: SemiImplicit = field(init=False)

    latent_dim: int | None = None
    hidden_layer_sizes: Sequence[int] = (100, 100)
    linear_skip: bool = False
    batch_size: int = 128
    max_iter: int = 5000
    annealing: Annealing = None

    def _check_parameters(self, n_features: int) -> None:
        super()._check_parameters(n_features)
        temperature(self.annealing, torch.zeros(())).check()

    @abstractmethod
    def _objective(
        self, score_u: DifferentiableScore, temperature: Scheduled, family: SemiImplicit, generator: torch.Generator
    ) -> Objective:
        """Return what is minimised, for a score and the schedule of the inverse temperature that is in it."""

    def _fit(self, score_fn: Score, run: Run) -> Fit:
        generator = run.generator
        whitening, _ = find_whitening(self.whiten, score_fn, generator, init=self.init)
        family, seed = self._build(score_fn, generator), generator.initial_seed()
        tempers = temperature(self.annealing, next(family.parameters()))
        score_u = Tempered(score_for_training(score_fn, whitening, generator), tempers.value)
        objective = self._objective(score_u, tempers, family, generator)
        return self._trained(objective, family, lambda family: Layer(family, whitening, seed), run)

    def _build(self, score_fn: Score, generator: torch.Generator) -> SemiImplicit:
        d = score_fn.n_features
        sigma = torch.full((d,), float(self.initial_scale), dtype=score_fn.dtype, device=score_fn.device)
        mixing = self._mixing(self.latent_dim or min(d, MAX_LATENT_DIM), sigma, generator)
        return gaussian_layer(
            sigma,
            scale=checked_object(Scale, self.scale),
            mixing=mixing,
            hidden_layer_sizes=self.hidden_layer_sizes,
            generator=generator,
            skip=covariance_kept(sigma, mixing.latent_dim) if self.linear_skip else None,
        )

    def _mixing(self, latent_dim: int, like: Tensor, generator: torch.Generator) -> Mixing:
        return NormalDraws(latent_dim)


class LayerDraws(NamedTuple):
    r"""Draws :math:`x = \mu(z) + \sigma \odot \xi` (n, d), and how a layer is moved with them.

    Attributes
    ----------
    z : Tensor of shape (n, latent_dim)
    xi, x : Tensor of shape (n, d)
    sigma : Tensor of shape (d,)
    pull_layer : callable
        The pullback of gradients in mu and sigma to the parameters.
    """

    z: Tensor
    xi: Tensor
    x: Tensor
    sigma: Tensor
    pull_layer: Callable[[Tensor, Tensor], object]

    @classmethod
    def by(cls, family: SemiImplicit, n: int, generator: torch.Generator) -> LayerDraws:
        z = family.draw_latent(n, generator)
        mu, sigma, pull_layer = family.conditional_with_pullback(z)
        xi = torch.empty_like(mu).normal_(generator=generator)
        return cls(z, xi, torch.addcmul(mu, sigma, xi), sigma, pull_layer)

    def follow(self, v: Tensor) -> None:
        r"""Give the parameters the gradient :math:`-E[(\partial x / \partial \phi)^\top v(x)]`, for v (n, d)."""
        self.pull_layer(-v / len(v), -v * self.xi / len(v))


def mixture_score(x: Tensor, mu: Tensor, sigma: Tensor) -> Tensor:
    r"""Return the score (n, d) of :math:`\frac1k \sum_j N(\mu_j, \sigma^2)` at x (n, d).

    Parameters
    ----------
    x : Tensor of shape (n, d)
    mu : Tensor of shape (k, d)
    sigma : Tensor of shape (d,)
    """
    log_parts = diagonal_gaussian_log_prob(x, mu, sigma.pow(-2).expand_as(mu))
    return (log_parts.softmax(1) @ mu - x) / sigma.square()
