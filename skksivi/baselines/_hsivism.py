"""Hierarchical semi-implicit variational inference by score matching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from skksivi.annealing import BRIDGES, bridge_levels
from skksivi.base import Constraints, Integral, Interval, StrOptions
from skksivi.baselines._critic import CRITIC, Critics
from skksivi.baselines._semi_implicit import TrainedBaseline
from skksivi.coordinates._composed import score_for_training
from skksivi.coordinates._whitening import Whitening
from skksivi.estimators._trained import langevin_scale
from skksivi.families._hierarchy import Hierarchy, langevin_hierarchy
from skksivi.families._samplers import Layers
from skksivi.mixing import NormalDraws
from skksivi.parameters import Adam, Bridge, Whiten, check_widths, checked_object
from skksivi.pilot._pilot import find_whitening
from skksivi.pilot._points import PilotPoints
from skksivi.score._score import DifferentiableScore, Score
from skksivi.training._loop import Objective
from skksivi.training._run import Fit, Run


@dataclass(kw_only=True, eq=False, repr=False)
class HSIVISM(TrainedBaseline):
    r"""Fit a hierarchy of Gaussian layers by Fisher divergences, each against a network that estimates it.

    The layers are the same as in `skksivi.HKSIVIApproximator`, from the base :math:`x_T \sim N(0, I)` on

    .. math::
        x_t = \mu_t(x_{t+1}) + \sigma_t \odot \xi_t, \qquad
        \mu_t(x) = x + \bar\mu_t(x) + \tfrac12 \sigma_{\mathrm{ini}}^2 \odot s_t(x),

    with :math:`s_t = (1 - \lambda_t) s_{\mathrm{base}} + \lambda_t s_p`, and are trained by

    .. math::
        \min_\phi \max_g \sum_t E\left[2 g_t(x_t)^\top \left(s_t(x_t) - s_{q(\cdot|x_{t+1})}(x_t)\right)
        - \|g_t(x_t)\|^2\right].

    The score is part of the sampler, so that `sample` calls it; a fitted estimator can be pickled if the score can.

    Parameters
    ----------
    n_layers : int, default=5
        The T of the formula.
    bridge : {"linear", "quadratic", "cosine", "geometric", "none"}, callable or Bridge, default="linear"
        The :math:`\lambda_t` as a function of t / T, see `skksivi.HKSIVIApproximator`.
    critic_hidden_layer_sizes : sequence of int, default=(128, 128)
        Widths of the hidden layers of each g_t, the critics.
    critic_learning_rate : float, default=5e-3
        Step size of their Adam, with the schedule of `learning_rate`.
    n_critic_steps : int, default=1
        Their steps per iteration, on fresh draws, before the step of the layers.
    hidden_layer_sizes : sequence of int, default=(50, 50)
        Widths of the hidden layers of each network :math:`\bar\mu_t`, which starts at zero.
    initial_scale : float, default=1.0
        The :math:`\sigma_{\mathrm{ini}}`. Its unit is the width of the target's narrowest mode or, if less, the
        conditional width of a coordinate given the others, if whiten="auto" has found them, otherwise one in u. With
        more than twice the smallest standard deviation of the target, the initial chain leaves the target.
    scale : "constant" or Scale, default="constant"
        The floor of :math:`\sigma`, see `skksivi.parameters.Scale`.
    whiten : str, Pilot, (m, L) or None, default="auto"
        The affine map in whose coordinates the family is trained, see `skksivi.KSIVIApproximator`; None trains in x,
        as in the paper. The default differs because the Langevin steps of the layers are stable only in the units of
        the target.
    init
        See `skksivi.KSIVIApproximator`.
    batch_size : int, default=256
        Draws of each layer per step, of the critics and of the layers.
    max_iter : int, default=3000
        Iterations of the optimiser.
    learning_rate : float, default=1e-3
        Step size of Adam.
    optimizer : "adam" or Adam, default="adam"
        Adam's settings, see `skksivi.parameters.Adam`; "adam" is Adam(betas=(0.5, 0.99), ema=None).
    device, dtype, random_state, verbose
        See `skksivi.KSIVIApproximator`. Minibatches are not used: the chain needs the score of all of the data.

    Attributes
    ----------
    family_ : Module
        The fitted layers, in the coordinates u of the training.
    whitening_ : Whitening
        The map x = m + L u and how it was found.
    loss_curve_ : ndarray of shape (`n_iter_`,)
        The objective at each iteration, which estimates the sum of the Fisher divergences from below.
    n_iter_ : int
        Number of iterations.
    n_features_in_ : int
        Dimension of the target.
    n_score_calls_, n_products_ : int
        Points at which `fit` evaluated the score or log p, and products with the Jacobian of the score.
    stages_ : list of Stage
        The cost of each stage of `fit`: ``name``, ``n_calls`` and ``seconds``.

    See Also
    --------
    skksivi.HKSIVIApproximator : The same layers, with the kernel Stein discrepancy instead of the critics.

    References
    ----------
    Yu, L., Xie, T., Zhu, Y., Yang, T., Zhang, X. and Zhang, C. (2023). Hierarchical semi-implicit variational
    inference with application to diffusion model acceleration. https://arxiv.org/abs/2310.17153

    Examples
    --------
    >>> from skksivi.baselines import HSIVISM
    >>> q = HSIVISM(n_layers=2, max_iter=300, random_state=0).fit(lambda x: 3 - x, n_features=1)
    >>> q.sample(10_000).mean().round(1)
    np.float32(3.0)
    """

    _parameter_constraints: ClassVar[Constraints] = {
        **CRITIC,
        "n_layers": [Interval(Integral, 1, None, closed="left")],
        "bridge": [StrOptions(set(BRIDGES)), callable, Bridge],
    }

    family_: Hierarchy = field(init=False)

    _adam: ClassVar[Adam] = Adam(betas=(0.5, 0.99), ema=None)

    n_layers: int = 5
    bridge: str | Callable[[float], float] | Bridge = "linear"
    critic_hidden_layer_sizes: Sequence[int] = (128, 128)
    critic_learning_rate: float = 5e-3
    n_critic_steps: int = 1
    hidden_layer_sizes: Sequence[int] = (50, 50)
    whiten: Whiten = "auto"
    batch_size: int = 256
    max_iter: int = 3000

    def _check_parameters(self, n_features: int) -> None:
        super()._check_parameters(n_features)
        check_widths(self.critic_hidden_layer_sizes, "critic_hidden_layer_sizes")
        bridge_levels(self._levels(), self.n_layers)

    def _fit(self, score_fn: Score, run: Run) -> Fit:
        generator = run.generator
        score = score_fn.on_all_data()
        whitening, pilot = find_whitening(self.whiten, score, generator, init=self.init)
        family = self._build(score, whitening, pilot, generator)
        objective = self._objective(score_for_training(score, whitening, generator), family, generator)
        seed = generator.initial_seed()
        return self._trained(objective, family, lambda family: Layers(family, whitening, score.double, seed), run)

    def _levels(self) -> str | Callable[[float], float]:
        """Return the levels of the bridge, whose layers have equal weights."""
        bridge = checked_object(Bridge, self.bridge)
        if bridge.weights is not None or bridge.levels == "auto":
            raise ValueError(
                f"`bridge` is {bridge!r}, but HSIVISM has levels by name or function, and equal weights."
            )
        return bridge.levels

    def _build(
        self, score_fn: Score, whitening: Whitening, pilot: PilotPoints | None, generator: torch.Generator
    ) -> Hierarchy:
        """Return layers that are a Langevin chain along the bridge."""
        return langevin_hierarchy(
            bridge_levels(self._levels(), self.n_layers),
            mixing=NormalDraws(score_fn.n_features),
            hidden_layer_sizes=self.hidden_layer_sizes,
            initial_scale=langevin_scale(self.initial_scale, self._floor(), score_fn, whitening, pilot),
            min_scale=self._floor(),
            generator=generator,
        )

    def _objective(self, score_u: DifferentiableScore, family: Hierarchy, generator: torch.Generator) -> Objective:
        sizes = [family.n_features, *self.critic_hidden_layer_sizes, family.n_features]
        rate = self._rate("critic_learning_rate", self.critic_learning_rate, family.half_square)
        critics = Critics(sizes, self.n_layers, rate, self._steps.betas, generator)

        draw = partial(family.draw_with_pullback, self.batch_size, generator, score_u)

        def gradient_fn() -> Tensor:
            for _ in range(self.n_critic_steps):
                u, s_t, s_q = draw()[0]
                critics.ascend(u, s_t - s_q)
            (u, s_t, s_q), pull = draw()
            bound = critics.bounds(u, s_t - s_q)
            pull(bound.dx, bound.df, -bound.df)
            return bound.value.sum()

        return Objective(gradient_fn, [critics.rate])
