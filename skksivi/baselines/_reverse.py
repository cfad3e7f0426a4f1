"""Layers whose scores need the latent z given x: by a chain (UIVI) or a flow (AISIVI)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from skksivi.base import Constraints, Integral, Interval, Real
from skksivi.baselines._semi_implicit import LayerDraws, SemiImplicitVI
from skksivi.families import MultilayerPerceptron, SemiImplicit, log_joint
from skksivi.mixing import NormalDraws
from skksivi.parameters import Adam, check_widths
from skksivi.score import DifferentiableScore
from skksivi.training import Iterate, Objective, Scheduled, by_autograd


@dataclass(kw_only=True, eq=False, repr=False)
class UIVI(SemiImplicitVI):
    r"""Fit a semi-implicit layer by unbiased estimates of the gradient of the evidence lower bound.

    The fitted distribution is the law of :math:`x = \mu(z) + \sigma \odot \xi` with normal z and :math:`\xi`. Because
    :math:`E \nabla_\phi \log q(x) = 0` at fixed x, the gradient of the bound is

    .. math::
        \nabla_\phi \mathcal L = E\left[\left(\frac{\partial x}{\partial \phi}\right)^\top
        \left(s_p(x) - s_q(x)\right)\right], \quad
        s_q(x) = E_{q(z'|x)}\left[\nabla_x \log q(x | z')\right].

    The expectation is over the reverse conditional :math:`q(z' | x) \propto q(z') q(x | z')`. It is estimated by
    Hamiltonian Monte Carlo, one chain per draw. The z that generated x is an exact draw from it, so the chain starts
    at equilibrium and need only forget that z. The gradient is unbiased up to the remaining dependence on it.

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
    n_inner_samples : int, default=5
        Consecutive states of a chain that are averaged.
    n_burn_in : int, default=5
        Transitions before these, in which the chain forgets its z.
    n_leapfrog_steps : int, default=5
        Leapfrog steps per transition. Their length is adapted towards an acceptance of 0.9 from one iteration to the
        next. If :math:`\sigma` is small compared with the spread of :math:`\mu(z)`, a chain forgets slowly: use more.
    batch_size : int, default=128
        Draws per iteration.
    max_iter : int, default=5000
        Iterations of the optimiser.
    learning_rate : float, default=1e-3
        Step size of Adam.
    optimizer : "adam" or Adam, default="adam"
        Adam's settings, see `skksivi.parameters.Adam`; "adam" is Adam(betas=(0.9, 0.999), ema=None).
    annealing, device, dtype, random_state, verbose
        See `skksivi.KSIVIApproximator`.

    Attributes
    ----------
    family_ : Module
        The fitted family, in the coordinates u of the training.
    whitening_ : Whitening
        The map x = m + L u, the identity with whiten=None.
    loss_curve_ : ndarray of shape (`n_iter_`,)
        The mean of :math:`\|s_p(x) - s_q(x)\|^2` at each iteration, the Fisher divergence, too large by the variance
        of s_q. The bound itself needs log p and log q.
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
    AISIVI : Path gradients by importance sampling.

    References
    ----------
    Titsias, M. and Ruiz, F. (2019). Unbiased implicit variational inference. https://arxiv.org/abs/1808.02078

    Examples
    --------
    >>> from skksivi.baselines import UIVI
    >>> q = UIVI(max_iter=150, learning_rate=0.05, random_state=0).fit(lambda x: 3 - x, n_features=1)
    >>> q.sample(10_000).mean().round(1)
    np.float32(3.0)
    """

    _parameter_constraints: ClassVar[Constraints] = {
        "n_inner_samples": [Interval(Integral, 1, None, closed="left")],
        "n_burn_in": [Interval(Integral, 0, None, closed="left")],
        "n_leapfrog_steps": [Interval(Integral, 1, None, closed="left")],
    }

    n_inner_samples: int = 5
    n_burn_in: int = 5
    n_leapfrog_steps: int = 5

    def _objective(
        self, score_u: DifferentiableScore, temperature: Scheduled, family: SemiImplicit, generator: torch.Generator
    ) -> Objective:
        step = next(family.parameters()).new_full((), 0.1)

        def gradient_fn() -> Tensor:
            drawn = LayerDraws.by(family, self.batch_size, generator)
            density = ReverseConditional(family.mean, drawn.x, drawn.sigma)
            chain = HamiltonianChain(density, step, self.n_leapfrog_steps)
            s_q, acceptance = chain.mean_score(drawn.z, self.n_burn_in, self.n_inner_samples, generator)
            step.mul_(torch.exp(0.5 * (acceptance - 0.9)))
            f = score_u.with_pullback(drawn.x)[0] - s_q
            drawn.follow(f)
            return f.square().sum(-1).mean()

        return Objective(gradient_fn, [temperature])


class LatentState(NamedTuple):
    """Where chains are, z (n, latent_dim), with log q(z | x) (n,), up to a constant, its gradient in z, and the score
    of q(x | z) in x (n, d).
    """

    z: Tensor
    log_density: Tensor
    gradient: Tensor
    conditional_score: Tensor


class ReverseConditional(NamedTuple):
    r"""The density :math:`q(z | x) \propto N(z; 0, I)\, N(x; \mu(z), \sigma^2)` for each row of x.

    Attributes
    ----------
    mean : callable
    x : Tensor of shape (n, d)
    sigma : Tensor of shape (d,)
    """

    mean: Callable[[Tensor], Tensor]
    x: Tensor
    sigma: Tensor

    def at(self, z: Tensor) -> LatentState:
        """Evaluate it at z (n, latent_dim), row by row."""
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            mu = self.mean(z)
        xi = (self.x - mu.detach()) / self.sigma
        (pulled,) = torch.autograd.grad(mu, z, xi / self.sigma)
        z = z.detach()
        return LatentState(z, -(z.square().sum(-1) + xi.square().sum(-1)) / 2, pulled - z, -xi / self.sigma)


class HamiltonianChain(NamedTuple):
    """Hamiltonian Monte Carlo on the reverse conditional, one chain a row.

    Attributes
    ----------
    density : ReverseConditional
    step : Tensor of shape ()
        Length of a leapfrog step.
    n_leapfrog_steps : int
    """

    density: ReverseConditional
    step: Tensor
    n_leapfrog_steps: int

    def mean_score(
        self, z: Tensor, n_burn_in: int, n_samples: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        r"""Estimate :math:`s_q(x) = E_{q(z'|x)} \nabla_x \log q(x | z')` by chains from z (n, latent_dim).

        Returns
        -------
        s_q : Tensor of shape (n, d)
        acceptance : Tensor of shape ()
            The mean probability of acceptance.
        """
        state = self.density.at(z)
        s_q, acceptance = torch.zeros_like(self.density.x), torch.zeros_like(self.step)
        for i in range(n_burn_in + n_samples):
            state, probability = self.move(state, generator)
            acceptance += probability.mean()
            if i >= n_burn_in:
                s_q += state.conditional_score
        return s_q / n_samples, acceptance / (n_burn_in + n_samples)

    def move(self, start: LatentState, generator: torch.Generator) -> tuple[LatentState, Tensor]:
        """Make one transition; return where the chains are and their probabilities of acceptance (n,)."""
        p = first = torch.empty_like(start.z).normal_(generator=generator)
        end = start
        for _ in range(self.n_leapfrog_steps):
            p = p + self.step / 2 * end.gradient
            end = self.density.at(end.z + self.step * p)
            p = p + self.step / 2 * end.gradient
        gain = end.log_density - start.log_density + (first.square() - p.square()).sum(-1) / 2
        probability = gain.exp().nan_to_num(0.0).clamp(max=1)
        uniform = torch.rand(len(p), generator=generator, dtype=p.dtype, device=p.device)
        accepted = uniform < probability
        return LatentState(*(_where(accepted, a, b) for a, b in zip(end, start, strict=True))), probability


def _where(accepted: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(accepted if a.dim() == 1 else accepted[:, None], a, b)


@dataclass(kw_only=True, eq=False, repr=False)
class AISIVI(SemiImplicitVI):
    r"""Fit a semi-implicit layer by path gradients, with the score of q by importance sampling.

    The fitted distribution is the law of :math:`x = \mu(z) + \sigma \odot \xi` with normal z and :math:`\xi`. Like
    `UIVI` it moves draws along :math:`s_p - s_q`, with

    .. math::
        s_q(x) = E_{q(z|x)}\left[\nabla_x \log q(x | z)\right]
        \approx \sum_{k=1}^K w_k \nabla_x \log q(x | z_k), \quad
        w_k \propto \frac{q(z_k)\, q(x | z_k)}{\tau(z_k | x)}, \quad z_k \sim \tau(\cdot | x).

    The proposal :math:`\tau` is a conditional flow of affine couplings, which starts at q(z). It is trained beside
    the layer by the forward divergence, without bias:

    .. math:: \min_\tau E_{q(x)}\left[\mathrm{KL}(q(z | x) \,\|\, \tau(z | x))\right]
        = \min_\tau -E_{q(z)\, q(x|z)}\left[\log \tau(z | x)\right] + \mathrm{const}.

    It differs from the paper as follows. A share of the :math:`z_k` is drawn from q(z), and :math:`\tau` in the
    weights is the mixture of both, which bounds them; the flow takes one step per iteration instead of separate
    phases; and the default K is far smaller than the thousands of the public settings.

    Parameters
    ----------
    whiten, init
        See `skksivi.KSIVIApproximator`; `whiten` is "laplace" by default.
    latent_dim, hidden_layer_sizes, linear_skip, scale, initial_scale
        See `SIVI`.
    n_inner_samples : int, default=32
        The K.
    prior_share : float, default=0.1
        Share of the :math:`z_k` from q(z), from 0 to 1; with 1 there is no flow.
    n_couplings : int, default=4
        Couplings of the flow after its first layer, a scale and a shift that are functions of x.
    flow_hidden_layer_sizes : sequence of int, default=(64,)
        Widths of the hidden layers of each.
    flow_learning_rate : float, default=2e-3
        Step size of its Adam, with the schedule of `learning_rate`.
    n_flow_steps : int, default=1
        Its steps per iteration, each on `batch_size` fresh pairs (z, x), which take no score.
    batch_size, max_iter, learning_rate, optimizer
        See `SIVI`.
    annealing, device, dtype, random_state, verbose
        See `skksivi.KSIVIApproximator`.

    Attributes
    ----------
    family_ : Module
        The fitted family, in the coordinates u of the training.
    whitening_ : Whitening
        The map x = m + L u, the identity with whiten=None.
    loss_curve_ : ndarray of shape (`n_iter_`,)
        The mean of :math:`\|s_p(x) - s_q(x)\|^2` at each iteration, which overestimates the Fisher divergence by the
        variance of s_q.
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
    UIVI : Unbiased gradients of the evidence bound, by inner chains.
    KPG : The kernelised path gradient alone.

    References
    ----------
    Pielok, T., Bischl, B. and Rügamer, D. (2025). Revisiting unbiased implicit variational inference. ICML.
    https://arxiv.org/abs/2506.03839

    Hesterberg, T. (1995). Weighted average importance sampling and defensive mixture distributions. Technometrics
    37(2).

    Examples
    --------
    >>> from skksivi.baselines import AISIVI
    >>> q = AISIVI(max_iter=300, learning_rate=0.02, random_state=0).fit(lambda x: 3 - x, n_features=1)
    >>> q.sample(10_000).mean().round(1)
    np.float32(3.0)
    """

    _parameter_constraints: ClassVar[Constraints] = {
        "n_inner_samples": [Interval(Integral, 1, None, closed="left")],
        "prior_share": [Interval(Real, 0, 1, closed="both")],
        "n_couplings": [Interval(Integral, 0, None, closed="left")],
        "flow_hidden_layer_sizes": ["array-like"],
        "flow_learning_rate": [Interval(Real, 0, None, closed="neither")],
        "n_flow_steps": [Interval(Integral, 1, None, closed="left")],
    }

    n_inner_samples: int = 32
    prior_share: float = 0.1
    n_couplings: int = 4
    flow_hidden_layer_sizes: Sequence[int] = (64,)
    flow_learning_rate: float = 2e-3
    n_flow_steps: int = 1

    def _check_parameters(self, n_features: int) -> None:
        super()._check_parameters(n_features)
        check_widths(self.flow_hidden_layer_sizes, "flow_hidden_layer_sizes")

    def _objective(
        self, score_u: DifferentiableScore, temperature: Scheduled, family: SemiImplicit, generator: torch.Generator
    ) -> Objective:
        n, widths, like = self.batch_size, self.flow_hidden_layer_sizes, next(family.parameters())
        flow = ReverseFlow(
            family.mixing.latent_dim, family.n_features, self.n_couplings, widths, generator, like.dtype
        )
        iterate = Iterate(flow, Adam(betas=self._steps.betas, ema=None))
        rate = self._rate("flow_learning_rate", self.flow_learning_rate, like)
        n_prior = round(self.prior_share * self.n_inner_samples)

        def train_flow() -> None:
            z, _, x, *_ = LayerDraws.by(family, n, generator)
            loss = by_autograd(lambda: -flow.log_density(z, x).mean(), flow)()
            iterate.rate.copy_(rate.value)
            iterate.step(loss)

        def gradient_fn() -> Tensor:
            for _ in range(self.n_flow_steps if n_prior < self.n_inner_samples else 0):
                train_flow()
            drawn = LayerDraws.by(family, n, generator)
            s_q = reverse_score(family, flow, drawn.x, self.n_inner_samples, n_prior, generator)
            f = score_u.with_pullback(drawn.x)[0] - s_q
            drawn.follow(f)
            return f.square().sum(-1).mean()

        return Objective(gradient_fn, [temperature, rate])


def reverse_score(
    family: SemiImplicit, flow: ReverseFlow, x: Tensor, n_draws: int, n_prior: int, generator: torch.Generator
) -> Tensor:
    r"""Estimate :math:`s_q(x) = E_{q(z|x)} \nabla_x \log q(x | z)` (n, d) at x (n, d) by importance sampling.

    Parameters
    ----------
    family : SemiImplicit
        Of one sigma (d,) for all z.
    flow : ReverseFlow
        The proposal.
    x : Tensor of shape (n, d)
    n_draws, n_prior : int
        Draws for each x, and how many of them are from q(z).
    generator : torch.Generator
    """
    each = x.repeat_interleave(n_draws, 0)
    prior = family.draw_latent(len(each), generator)
    z, share = prior, n_prior / n_draws
    log_proposal = flow.base.log_density(prior)
    if n_prior < n_draws:
        from_prior = (torch.arange(len(each), device=x.device) % n_draws < n_prior)[:, None]
        z = torch.where(from_prior, prior, flow.draw(each, generator))
        log_proposal = flow.log_density(z, each) + math.log1p(-share)
        if n_prior:
            log_proposal = torch.logaddexp(log_proposal, flow.base.log_density(z) + math.log(share))
    mu, sigma = family.mean(z).view(len(x), n_draws, -1), family.sigma(z)
    w = (log_joint(family, each, z) - log_proposal).view(len(x), n_draws).softmax(1)
    return ((w[:, None] @ mu)[:, 0] - x) / sigma.square()


class ReverseFlow(nn.Module):
    r"""A density :math:`\tau(z | x)` of the z that an x was made of, by affine couplings; it starts at N(0, I).

    The first layer shifts and scales all of z by functions of x; the others shift and scale one half of z by
    functions of x and the other half, in turns.

    Parameters
    ----------
    latent_dim, n_features, n_couplings : int
    hidden_layer_sizes : int or sequence of int
    generator : torch.Generator
    dtype : torch.dtype
    """

    def __init__(
        self,
        latent_dim: int,
        n_features: int,
        n_couplings: int,
        hidden_layer_sizes: Sequence[int],
        generator: torch.Generator,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.base = NormalDraws(latent_dim)
        index = torch.arange(latent_dim, device=generator.device)
        n_couplings = n_couplings if latent_dim > 1 else 0
        self.kept = [index[:0], *(index[index % 2 == i % 2] for i in range(n_couplings))]
        self.moved = [index, *(index[index % 2 != i % 2] for i in range(n_couplings))]
        self.networks = nn.ModuleList(
            MultilayerPerceptron(
                [n_features + len(kept), *hidden_layer_sizes, 2 * len(moved)], generator, dtype
            ).start_at(torch.zeros(2 * len(moved), dtype=dtype, device=generator.device))
            for kept, moved in zip(self.kept, self.moved, strict=True)
        )

    def draw(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Draw one z for each row of x (n, d), shape (n, latent_dim)."""
        z = self.base(len(x), x, generator)
        for i, moved in enumerate(self.moved):
            shift, log_scale = self._coupling(i, z, x)
            z[:, moved] = torch.addcmul(shift, log_scale.exp(), z[:, moved])
        return z

    def log_density(self, z: Tensor, x: Tensor) -> Tensor:
        r"""Evaluate :math:`\log \tau(z_i | x_i)` (n,) at z (n, latent_dim) and x (n, d)."""
        log_jacobian = z.new_zeros(len(z))
        for i, moved in reversed(list(enumerate(self.moved))):
            shift, log_scale = self._coupling(i, z, x)
            z = z.index_copy(1, moved, (z[:, moved] - shift) * (-log_scale).exp())
            log_jacobian = log_jacobian - log_scale.sum(1)
        return log_jacobian + self.base.log_density(z)

    def _coupling(self, i: int, z: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shift and the logarithm of the scale of a layer, from what of z it keeps."""
        shift, raw = self.networks[i](torch.cat([z[:, self.kept[i]], x], 1)).chunk(2, 1)
        largest = 3.0  # logarithm of a factor
        return shift, largest * torch.tanh(raw / largest)
