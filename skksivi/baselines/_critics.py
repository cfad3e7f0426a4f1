"""Training against critics, which estimate a Fisher divergence: SIVI-SM, SIFG and HSIVI-SM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from skksivi.annealing import BRIDGES, bridge_levels
from skksivi.base import Constraints, Integral, Interval, Real, StrOptions
from skksivi.baselines._points import MovingPoints, set_gradient
from skksivi.baselines._semi_implicit import SemiImplicitVI, TrainedBaseline
from skksivi.coordinates import Whitening, score_for_training
from skksivi.estimators import langevin_scale
from skksivi.families import Constant, Hierarchy, Layer, Layers, MultilayerPerceptron, SemiImplicit
from skksivi.mixing import AtomDraws, NormalDraws
from skksivi.parameters import Adam, Bridge, Schedule, Whiten, check_widths, checked_object
from skksivi.pilot import PilotPoints
from skksivi.score import DifferentiableScore, Score
from skksivi.start import find_whitening
from skksivi.training import Fit, Iterate, Objective, Run, Scheduled

#: Constraints of its parameters.
CRITIC: Constraints = {
    "critic_hidden_layer_sizes": ["array-like"],
    "critic_learning_rate": [Interval(Real, 0, None, closed="neither")],
    "n_critic_steps": [Interval(Integral, 1, None, closed="left")],
}


class FisherBound(NamedTuple):
    """Values () or (T,), and the gradients in x, in f and in the offset of the critic, (n, d) or (T, n, d)."""

    value: Tensor
    dx: Tensor
    df: Tensor
    doffset: Tensor


def fisher_bound(network: MultilayerPerceptron, x: Tensor, f: Tensor, offset: Tensor | float = 0.0) -> FisherBound:
    r"""Evaluate :math:`E[2 g^\top f - \|g\|^2]`, g(x) = network(x) + offset, and set the gradient of the parameters.

    With :math:`f = s_p(x) - s_{q(\cdot|z)}(x)` its maximum over g is the Fisher divergence, at
    :math:`g = E[f | x] = s_p - s_q`.

    Parameters
    ----------
    network : MultilayerPerceptron
    x, f : Tensor of shape (n, d)
    offset : Tensor of shape (n, d), default=0
    """
    h, pull = network.with_pullback(x)
    g = h + offset
    dg = (f - g) * (2 / len(x))
    return FisherBound((g * (2 * f - g)).sum(-1).mean(), pull(dg)(), g * (2 / len(x)), dg)


class Critics:
    """Networks g_t that are trained to be s_p - s_q, one per layer of draws.

    Parameters
    ----------
    sizes : sequence of int
        Numbers of units of the layers of each network.
    n_layers : int
        Of the draws, each of which has a network.
    rate : Scheduled
        The learning rate, of the type of the networks.
    betas : pair of float
        Of Adam.
    generator : torch.Generator
    """

    def __init__(
        self,
        sizes: Sequence[int],
        n_layers: int,
        rate: Scheduled,
        betas: tuple[float, float],
        generator: torch.Generator,
    ) -> None:
        self.networks = [MultilayerPerceptron(sizes, generator, rate.value.dtype) for _ in range(n_layers)]
        self._iterate = Iterate(nn.ModuleList(self.networks), Adam(betas=betas, ema=None))
        self.rate = rate

    def ascend(self, x: Tensor, f: Tensor, offset: Tensor | None = None) -> None:
        """Take a step of Adam up the bounds at x, f and the offsets of the networks, all (T, n, d)."""
        value = self.bounds(x, f, offset).value.sum()
        self._iterate.gradient.neg_()  # a step descends
        self._iterate.rate.copy_(self.rate.value)
        self._iterate.step(value)

    def bounds(self, x: Tensor, f: Tensor, offset: Tensor | None = None) -> FisherBound:
        """Evaluate the bounds, one per layer, and set the gradient of the networks."""
        offset = torch.zeros_like(x) if offset is None else offset
        parts = [fisher_bound(*part) for part in zip(self.networks, x, f, offset, strict=True)]
        return FisherBound(*(torch.stack(part) for part in zip(*parts, strict=True)))


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
    whiten : str, Pilot, (m, L) or None, default="laplace"
        The affine map x = m + L u in whose coordinates the family is trained, see `skksivi.KSIVIApproximator`; None
        trains in x, as in the paper, where a start at N(0, I) may never come near the target. By default it is the
        cheapest map that makes the start independent of the units of x: a mode search.
    init
        See `skksivi.KSIVIApproximator`.
    latent_dim : int, default=None
        Dimension of z; None means the dimension of x, up to 100.
    hidden_layer_sizes : int or sequence of int, default=(100, 100)
        Widths of the hidden layers of the network :math:`\mu`.
    linear_skip : bool, default=False
        Whether :math:`\mu(z) = A z + \mathrm{NN}(z)` with a network that starts at zero.
    scale : "constant" or Scale, default="constant"
        The floor of :math:`\sigma`, see `skksivi.parameters.Scale`.
    initial_scale : float, default=1.0
        Start of :math:`\sigma`.
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
    whiten, init
        See `skksivi.KSIVIApproximator`; `whiten` is "laplace" by default. Particles start at N(0, I) in u.
    hidden_layer_sizes : int or sequence of int, default=(100, 100)
        Widths of the hidden layers of the network.
    scale : "constant" or Scale, default="constant"
        The floor of :math:`\sigma`, see `skksivi.parameters.Scale`.
    initial_scale : float, default=0.3
        Initial :math:`\sigma`, in whitened units.
    n_particles : int, default=500
        The M.
    adaptive : bool, default=True
        Whether :math:`\sigma` moves too.
    critic_learning_rate : float, default=2e-3
        Step size of its Adam, lowered as `learning_rate` is.
    n_critic_steps : int, default=5
        Its steps per iteration, each with fresh noise, which take no score.
    max_iter : int, default=2000
        Iterations of the optimiser.
    learning_rate : float, default=1e-2
        Step size of Adam, in whitened units.
    optimizer : "adam" or Adam, default="adam"
        Adam's settings, see `skksivi.parameters.Adam`; "adam" is Adam(betas=(0.9, 0.999), ema=None).
    device, dtype, random_state, verbose
        See `skksivi.KSIVIApproximator`.

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

    n_particles: int = 500
    adaptive: bool = True
    critic_learning_rate: float = 2e-3
    n_critic_steps: int = 5
    hidden_layer_sizes: int | Sequence[int] = (100, 100)
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
        critics = Critics([d, *self._widths(), d], 1, rate, self._steps.betas, generator)

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
    whiten : str, Pilot, (m, L) or None, default="auto"
        The affine map in whose coordinates the family is trained, see `skksivi.KSIVIApproximator`; None trains in x,
        as in the paper. The default differs because the Langevin steps of the layers are stable only in the units of
        the target.
    init
        See `skksivi.KSIVIApproximator`.
    n_layers : int, default=5
        The T of the formula.
    bridge : {"linear", "quadratic", "cosine", "geometric", "none"}, callable or Bridge, default="linear"
        The :math:`\lambda_t` as a function of t / T, see `skksivi.HKSIVIApproximator`.
    hidden_layer_sizes : int or sequence of int, default=(50, 50)
        Widths of the hidden layers of each network :math:`\bar\mu_t`, which starts at zero.
    scale : "constant" or Scale, default="constant"
        The floor of :math:`\sigma`, see `skksivi.parameters.Scale`.
    initial_scale : float, default=1.0
        The :math:`\sigma_{\mathrm{ini}}`. Its unit is the width of the target's narrowest mode or, if less, the
        conditional width of a coordinate given the others, if whiten="auto" has found them, otherwise one in u. With
        more than twice the smallest standard deviation of the target, the initial chain leaves the target.
    critic_hidden_layer_sizes : sequence of int, default=(128, 128)
        Widths of the hidden layers of each g_t, the critics.
    critic_learning_rate : float, default=5e-3
        Step size of their Adam, with the schedule of `learning_rate`.
    n_critic_steps : int, default=1
        Their steps per iteration, on fresh draws, before the step of the layers.
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
    hidden_layer_sizes: int | Sequence[int] = (50, 50)
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
        return Hierarchy.langevin(
            bridge_levels(self._levels(), self.n_layers),
            mixing=NormalDraws(score_fn.n_features),
            hidden_layer_sizes=self._widths(),
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
