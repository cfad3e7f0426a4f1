"""Particle variational inference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from skksivi.base import Constraints, Integral, Interval, Real
from skksivi.baselines._descent import set_gradient
from skksivi.baselines._semi_implicit import SemiImplicitVI, mixture_score
from skksivi.families._layer import SemiImplicit
from skksivi.mixing import AtomDraws, Mixing
from skksivi.parameters import Adam
from skksivi.score._score import DifferentiableScore
from skksivi.training._loop import Objective, Scheduled


@dataclass(kw_only=True, eq=False, repr=False)
class PVI(SemiImplicitVI):
    r"""Fit a semi-implicit layer whose mixing distribution is a set of particles, which move with its network.

    The fitted distribution is the mixture :math:`q(x) = \frac1M \sum_{m=1}^M N(x; \mu(z_m), \sigma^2)`. Its density
    is known, so that no bound is needed. The regularised divergence

    .. math::
        \mathcal E_\lambda(\phi, r) = E_q\left[\log q(x) - \log p(x)\right] + \lambda\, KL(r \,\|\, N(0, I))

    of the parameters :math:`\phi` of :math:`\mu` and :math:`\sigma` and the law r of z falls along its gradient flow,
    the Wasserstein flow in r. For M particles it is

    .. math::
        d\phi = -\nabla_\phi \mathcal E\, dt, \qquad
        dz_m = E_\xi\left[\left(\frac{\partial x}{\partial z_m}\right)^\top (s_p - s_q)(x)\right] dt
        - \lambda z_m\, dt + \sqrt{2 \lambda}\, dW_m, \quad x = \mu(z_m) + \sigma \odot \xi,

    with the score :math:`s_q` of the mixture. The gradient in :math:`\phi` is the path gradient of the same form.

    It differs from the paper as follows. Both are moved by Adam, where the paper has RMSProp and a preconditioner for
    the particles; :math:`\phi` is not regularised; :math:`\sigma` does not depend on z, whereas the paper has a
    network or a skip there for some targets; and an iteration takes `batch_size` draws, spread evenly over the
    particles.

    Parameters
    ----------
    n_particles : int, default=100
        The M.
    regularization : float, default=1e-8
        The :math:`\lambda`, zero or more, in nats.
    latent_dim, hidden_layer_sizes, linear_skip, initial_scale, scale, batch_size, max_iter, learning_rate, optimizer
        See `SIVI`.
    whiten, init, annealing, device, dtype, random_state, verbose
        See `skksivi.KSIVIApproximator`; `whiten` is "laplace" by default.

    Attributes
    ----------
    family_ : Module
        The fitted family, in the coordinates u of the training.
    whitening_ : Whitening
        The map x = m + L u, the identity with whiten=None.
    loss_curve_ : ndarray of shape (`n_iter_`,)
        The estimate of the Fisher divergence :math:`E \|s_p(x) - s_q(x)\|^2` at each iteration.
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
    SIFG : A gradient flow of noisy particles.
    SIVI : Semi-implicit inference by the evidence bound.

    References
    ----------
    Lim, J. N. and Johansen, A. M. (2024). Particle semi-implicit variational inference. NeurIPS.
    https://arxiv.org/abs/2407.00649

    Examples
    --------
    >>> from skksivi.baselines import PVI
    >>> q = PVI(max_iter=300, learning_rate=0.02, random_state=0).fit(lambda x: 3 - x, n_features=1)
    >>> q.sample(10_000).mean().round(1)
    np.float32(3.0)
    """

    _parameter_constraints: ClassVar[Constraints] = {
        "n_particles": [Interval(Integral, 1, None, closed="left")],
        "regularization": [Interval(Real, 0, None, closed="left")],
    }

    _adam: ClassVar[Adam] = Adam(betas=(0.9, 0.999), ema=None)

    n_particles: int = 100
    regularization: float = 1e-8

    def _mixing(self, latent_dim: int, like: Tensor, generator: torch.Generator) -> Mixing:
        return AtomDraws(like.new_empty(self.n_particles, latent_dim).normal_(generator=generator))

    def _objective(
        self, score_u: DifferentiableScore, temperature: Scheduled, family: SemiImplicit, generator: torch.Generator
    ) -> Objective:
        (z,), turn = family.mixing.parameters(), torch.arange(self.batch_size, device=generator.device)
        kick = math.sqrt(2 * self.regularization * self.learning_rate)

        def gradient_fn() -> Tensor:
            z.add_(torch.empty_like(z).normal_(generator=generator), alpha=kick)
            mu, sigma, pull_layer = family.conditional_with_pullback(z)
            m = (turn + torch.randint(len(z), (1,), generator=generator, device=z.device)) % len(z)
            xi = torch.empty(len(m), family.n_features).to(mu).normal_(generator=generator)
            x = torch.addcmul(mu[m], sigma, xi)
            f = score_u.with_pullback(x)[0] - mixture_score(x, mu, sigma)
            of_z = pull_layer(torch.zeros_like(mu).index_add_(0, m, -f / len(m)), -f * xi / len(m))
            set_gradient(z, len(z) * of_z() + self.regularization * z)
            return f.square().sum(-1).mean()

        return Objective(gradient_fn, [temperature])
