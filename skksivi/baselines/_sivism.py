"""Semi-implicit variational inference by score matching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from skksivi.base import Constraints, Interval, Real
from skksivi.baselines._critic import CRITIC, Critics
from skksivi.baselines._semi_implicit import SemiImplicitVI
from skksivi.families._layer import SemiImplicit
from skksivi.parameters import Adam, Schedule, check_widths
from skksivi.score._score import DifferentiableScore
from skksivi.training._loop import Objective, Scheduled


@dataclass(kw_only=True, eq=False, repr=False)
class SIVISM(SemiImplicitVI):
    r"""Fit a semi-implicit layer by the Fisher divergence, against a network that estimates it.

    The fitted distribution is the law of :math:`x = \mu(z) + \sigma \odot \xi` with normal z and :math:`\xi`, trained
    by

    .. math::
        \min_\phi \max_g\, E\left[2 g(x)^\top \left(s_p(x) - s_{q(\cdot|z)}(x)\right) - \|g(x)\|^2\right],
        \quad \max_g = E_q \|s_p(x) - s_q(x)\|^2.

    The network g, the critic, takes a few steps on fresh draws before each step of :math:`\phi`.

    Parameters
    ----------
    critic_hidden_layer_sizes : sequence of int, default=(256, 256)
        Widths of the hidden layers of g.
    critic_learning_rate : float, default=2e-3
        Step size of its Adam, lowered as `learning_rate` is.
    critic_skip : float or callable, default=0.5
        The :math:`\psi` of :math:`g(x) = \mathrm{NN}(x) + \psi s_p(x)`, or a function of progress in [0, 1) that
        returns it: a network alone is slow to learn large scores. The paper does not mention it; the method's public
        code has ``lambda progress: 1.004 ** (-200 * progress)``.
    n_critic_steps : int, default=1
        Its steps per iteration.
    latent_dim : int, default=None
        Dimension of z; None means the dimension of x, up to 100.
    hidden_layer_sizes : sequence of int, default=(100, 100)
        Widths of the hidden layers of the network :math:`\mu`.
    linear_skip : bool, default=False
        Whether :math:`\mu(z) = A z + \mathrm{NN}(z)` with a network that starts at zero.
    initial_scale : float, default=1.0
        Start of :math:`\sigma`.
    scale : "constant" or Scale, default="constant"
        The floor of :math:`\sigma`, see `skksivi.parameters.Scale`.
    whiten : str, Pilot, (m, L) or None, default="laplace"
        The affine map x = m + L u in whose coordinates the family is trained, see `skksivi.KSIVIApproximator`; None
        trains in x, as in the paper, where a start at N(0, I) may never come near the target. By default it is the
        cheapest map that makes the start independent of the units of x: a mode search.
    init
        See `skksivi.KSIVIApproximator`.
    batch_size : int, default=128
        Draws per step, of the critic and of the sampler.
    max_iter : int, default=5000
        Iterations of the optimiser.
    learning_rate : float, default=1e-3
        Step size of Adam.
    optimizer : "adam" or Adam, default="adam"
        Adam's settings, see `skksivi.parameters.Adam`; "adam" is Adam(betas=(0.5, 0.99), ema=None).
    annealing, device, dtype, random_state, verbose
        See `skksivi.KSIVIApproximator`.

    Attributes
    ----------
    family_ : Module
        The fitted family, in the coordinates u of the training.
    whitening_ : Whitening
        The map x = m + L u, the identity with whiten=None.
    loss_curve_ : ndarray of shape (`n_iter_`,)
        The objective at each iteration, which estimates the Fisher divergence from below.
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
    SIVI : Semi-implicit inference by the evidence bound.
    HSIVISM : A hierarchy by score matching.

    References
    ----------
    Yu, L. and Zhang, C. (2023). Semi-implicit variational inference via score matching.
    https://arxiv.org/abs/2308.10014

    Examples
    --------
    >>> from skksivi.baselines import SIVISM
    >>> q = SIVISM(critic_hidden_layer_sizes=(64, 64), max_iter=1000, random_state=0)
    >>> q = q.fit(lambda x: 3 - x, n_features=1)
    >>> q.sample(10_000).mean().round(1)
    np.float32(3.0)
    """

    _parameter_constraints: ClassVar[Constraints] = {
        **CRITIC,
        "critic_skip": [Interval(Real, 0, None, closed="left"), callable],
    }

    _adam: ClassVar[Adam] = Adam(betas=(0.5, 0.99), ema=None)

    critic_hidden_layer_sizes: Sequence[int] = (256, 256)
    critic_learning_rate: float = 2e-3
    critic_skip: Schedule = 0.5
    n_critic_steps: int = 1

    def _check_parameters(self, n_features: int) -> None:
        super()._check_parameters(n_features)
        check_widths(self.critic_hidden_layer_sizes, "critic_hidden_layer_sizes")
        Scheduled("critic_skip", self.critic_skip, torch.zeros(())).check()

    def _objective(
        self, score_u: DifferentiableScore, temperature: Scheduled, family: SemiImplicit, generator: torch.Generator
    ) -> Objective:
        like = next(family.parameters())
        sizes = [family.n_features, *self.critic_hidden_layer_sizes, family.n_features]
        rate = self._rate("critic_learning_rate", self.critic_learning_rate, like)
        critics = Critics(sizes, 1, rate, self._steps.betas, generator)
        skip = Scheduled("critic_skip", self.critic_skip, like)
        psi = skip.value

        draw = partial(family.draw_with_pullback, self.batch_size, generator, score_u)

        def gradient_fn() -> Tensor:
            for _ in range(self.n_critic_steps):
                u, s_p, s_q = draw()[0]
                critics.ascend(u[None], (s_p - s_q)[None], psi * s_p[None])
            (u, s_p, s_q), pull = draw()
            bound = critics.bounds(u[None], (s_p - s_q)[None], psi * s_p[None])
            pull(bound.dx[0], bound.df[0] + psi * bound.doffset[0], -bound.df[0])
            return bound.value[0]

        return Objective(gradient_fn, [temperature, critics.rate, skip])
