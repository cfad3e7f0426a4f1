"""Unbiased implicit variational inference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from skksivi.base import Constraints, Integral, Interval
from skksivi.baselines._semi_implicit import LayerDraws, SemiImplicitVI
from skksivi.families._layer import Map, SemiImplicit
from skksivi.parameters import Adam
from skksivi.score._score import DifferentiableScore
from skksivi.training._loop import Objective, Scheduled

#: Step of the leapfrog at the start, the mean acceptance that it is moved towards, and by how much of its logarithm.
FIRST_STEP, ACCEPTANCE, ADAPTATION = 0.1, 0.9, 0.5


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
    n_inner_samples : int, default=5
        Consecutive states of a chain that are averaged.
    n_burn_in : int, default=5
        Transitions before these, in which the chain forgets its z.
    n_leapfrog_steps : int, default=5
        Leapfrog steps per transition. Their length is adapted towards an acceptance of 0.9 from one iteration to the
        next. If :math:`\sigma` is small compared with the spread of :math:`\mu(z)`, a chain forgets slowly: use more.
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

    _adam: ClassVar[Adam] = Adam(betas=(0.9, 0.999), ema=None)

    n_inner_samples: int = 5
    n_burn_in: int = 5
    n_leapfrog_steps: int = 5

    def _objective(
        self, score_u: DifferentiableScore, temperature: Scheduled, family: SemiImplicit, generator: torch.Generator
    ) -> Objective:
        step = next(family.parameters()).new_full((), FIRST_STEP)

        def gradient_fn() -> Tensor:
            drawn = LayerDraws.by(family, self.batch_size, generator)
            density = ReverseConditional(family.mean, drawn.x, drawn.sigma)
            chain = HamiltonianChain(density, step, self.n_leapfrog_steps)
            s_q, acceptance = chain.mean_score(drawn.z, self.n_burn_in, self.n_inner_samples, generator)
            step.mul_(torch.exp(ADAPTATION * (acceptance - ACCEPTANCE)))
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
    mean : Map
    x : Tensor of shape (n, d)
    sigma : Tensor of shape (d,)
    """

    mean: Map
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
