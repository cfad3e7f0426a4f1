"""Semi-implicit functional gradient flow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from skksivi.base import Constraints, Integral, Interval
from skksivi.baselines._critic import CRITIC, Critics
from skksivi.baselines._descent import MovingPoints, set_gradient
from skksivi.baselines._semi_implicit import TrainedBaseline
from skksivi.coordinates._composed import score_for_training
from skksivi.families._layer import Constant, MultilayerPerceptron, SemiImplicit
from skksivi.families._samplers import Layer
from skksivi.mixing import AtomDraws
from skksivi.parameters import Adam
from skksivi.pilot._pilot import find_whitening
from skksivi.score._score import DifferentiableScore, Score
from skksivi.training._loop import Objective
from skksivi.training._run import Fit, Run


@dataclass(kw_only=True, eq=False, repr=False)
class SIFG(TrainedBaseline):
    r"""Particles with Gaussian noise, moved along the gradient flow of KL(q || p).

    The fitted distribution is the law of :math:`x = y_m + \sigma \xi`, with m uniform over M particles: a mixture of
    Gaussians. Its Wasserstein gradient flow in the particles and its derivative in :math:`\sigma` are

    .. math::
        \frac{dy_m}{dt} = E_\xi\left[(s_p - s_q)(y_m + \sigma \xi)\right], \qquad
        \frac{\partial \mathrm{KL}}{\partial \sigma} = -E\left[\xi^\top (s_p - s_q)(x)\right].

    The score of q is a network that is trained beside them by denoising score matching,

    .. math:: s_q = \arg\min_g E \left\|g(y_m + \sigma \xi) + \xi / \sigma\right\|^2.

    With ``adaptive=False``, :math:`\sigma` is fixed, as in the non-adaptive version of the method. It differs from
    the paper in that the particles, the network and :math:`\sigma` all take the steps of Adam, one draw of
    :math:`\xi` per particle each.

    Parameters
    ----------
    n_particles : int, default=500
        The M.
    adaptive : bool, default=True
        Whether :math:`\sigma` moves too.
    hidden_layer_sizes : sequence of int, default=(100, 100)
        Widths of the hidden layers of the network.
    critic_learning_rate : float, default=2e-3
        Step size of its Adam, lowered as `learning_rate` is.
    n_critic_steps : int, default=5
        Its steps per iteration, each with fresh noise, which take no score.
    initial_scale : float, default=0.3
        Initial :math:`\sigma`, in whitened units.
    scale : "constant" or Scale, default="constant"
        The floor of :math:`\sigma`, see `skksivi.parameters.Scale`.
    max_iter : int, default=2000
        Iterations of the optimiser.
    learning_rate : float, default=1e-2
        Step size of Adam, in whitened units.
    optimizer : "adam" or Adam, default="adam"
        Adam's settings, see `skksivi.parameters.Adam`; "adam" is Adam(betas=(0.9, 0.999), ema=None).
    whiten, init, device, dtype, random_state, verbose
        See `skksivi.KSIVIApproximator`; `whiten` is "laplace" by default. Particles start at N(0, I) in u.

    Attributes
    ----------
    family_ : Module
        The fitted family, in the coordinates u of the training; its particles are ``family_.mixing.points``.
    whitening_ : Whitening
        The map x = m + L u, the identity with whiten=None.
    loss_curve_ : ndarray of shape (`n_iter_`,)
        The mean of :math:`\|s_p(x) - g(x)\|^2` at each iteration.
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
    PVI : Particles as the mixing distribution.
    SVGD : Stein variational gradient descent.

    References
    ----------
    Zhang, S., Cheng, Z. and Zhang, C. (2025). Semi-implicit functional gradient flow for efficient sampling.
    https://arxiv.org/abs/2410.17935

    Examples
    --------
    >>> from skksivi.baselines import SIFG
    >>> q = SIFG(max_iter=200, random_state=0).fit(lambda x: 3 - x, n_features=1)
    >>> q.sample(10_000).mean().round(1)
    np.float32(3.0)
    """

    _parameter_constraints: ClassVar[Constraints] = {
        "n_particles": [Interval(Integral, 2, None, closed="left")],
        "adaptive": ["boolean"],
        **{name: CRITIC[name] for name in ("critic_learning_rate", "n_critic_steps")},
    }

    _adam: ClassVar[Adam] = Adam(betas=(0.9, 0.999), ema=None)

    n_particles: int = 500
    adaptive: bool = True
    critic_learning_rate: float = 2e-3
    n_critic_steps: int = 5
    hidden_layer_sizes: Sequence[int] = (100, 100)
    initial_scale: float = 0.3
    max_iter: int = 2000
    learning_rate: float = 1e-2

    def _fit(self, score_fn: Score, run: Run) -> Fit:
        generator = run.generator
        whitening, _ = find_whitening(self.whiten, score_fn, generator, init=self.init)
        d, seed = score_fn.n_features, generator.initial_seed()
        like = torch.empty(self.n_particles, d, dtype=score_fn.dtype, device=score_fn.device)
        noisy = NoisyPoints(like.normal_(generator=generator), float(self.initial_scale), self._floor())
        objective = self._objective(score_for_training(score_fn, whitening, generator), noisy, generator)
        return self._trained(objective, noisy, lambda p: Layer(p.family(), whitening, seed), run)

    def _objective(self, score_u: DifferentiableScore, noisy: NoisyPoints, generator: torch.Generator) -> Objective:
        u, (n, d) = noisy.u, noisy.u.shape
        rate = self._rate("critic_learning_rate", self.critic_learning_rate, u)
        critics = Critics([d, *self.hidden_layer_sizes, d], 1, rate, self._steps.betas, generator)

        def draw() -> tuple[Tensor, Tensor]:
            xi = torch.empty_like(u).normal_(generator=generator)
            return torch.addcmul(u, noisy.sigma, xi), xi

        def gradient_fn() -> Tensor:
            for _ in range(self.n_critic_steps):
                x, xi = draw()
                critics.ascend(x[None], (xi / -noisy.sigma)[None])
            x, xi = draw()
            v = score_u.with_pullback(x)[0] - critics.networks[0](x)
            set_gradient(u, -v)
            slope = noisy.log_variance.exp() / (2 * noisy.sigma)
            set_gradient(noisy.log_variance, -(v * xi).sum() / n * slope * self.adaptive)
            return v.square().sum(1).mean()

        return Objective(gradient_fn, [critics.rate])


class NoisyPoints(MovingPoints):
    """Points u (n, d) with noise of one standard deviation, of which sigma^2 = exp(log_variance) + floor^2."""

    def __init__(self, u: Tensor, sigma: float, floor: float) -> None:
        super().__init__(u)
        self.floor = floor
        self.log_variance = nn.Parameter(u.new_full((1,), sigma**2 - floor**2).log(), requires_grad=False)

    @property
    def sigma(self) -> Tensor:
        """The standard deviation, shape (1,)."""
        return (self.log_variance.exp() + self.floor**2).sqrt()

    def family(self) -> SemiImplicit:
        """Return the points and their noise as a layer whose mean is z itself."""
        d, u = self.u.shape[1], self.u.detach()
        linear = nn.utils.skip_init(nn.Linear, d, d, dtype=u.dtype, device=u.device)
        with torch.no_grad():
            linear.weight.copy_(torch.eye(d))
            linear.bias.zero_()
        a = self.log_variance.detach().expand(d).clone()
        mean, mixing = MultilayerPerceptron.of([linear]), AtomDraws(u.clone())
        family = SemiImplicit(mean, Constant(a), n_features=d, mixing=mixing, min_scale=self.floor)
        return family.requires_grad_(False)
