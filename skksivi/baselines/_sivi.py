"""Semi-implicit variational inference by the surrogate bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from skksivi._utils.arrays import check_function
from skksivi.base import Constraints, Integral, Interval
from skksivi.baselines._semi_implicit import SemiImplicitVI
from skksivi.families._layer import SemiImplicit
from skksivi.parameters import Adam
from skksivi.score._score import DifferentiableScore
from skksivi.training._loop import Objective, Scheduled


@dataclass(kw_only=True, eq=False, repr=False)
class SIVI(SemiImplicitVI):
    r"""Fit a semi-implicit layer by the surrogate evidence lower bound.

    The fitted distribution is the law of :math:`x = \mu(z) + \sigma \odot \xi` with normal z and :math:`\xi`. Its
    density is estimated from the z from which x was drawn and K others,

    .. math::
        \underline{\mathcal L}^{(K)} = E \left[\log p(x) - \log \frac{1}{K + 1} \sum_{k=0}^{K} q(x | z_k)\right],
        \quad x \sim q(x | z_0), \quad z_0, \dots, z_K \sim q(z),

    which lies below the exact bound and approaches it as K grows. The target enters the gradient only through its
    score,
    :math:`\nabla_\phi E \log p(x) = E[(\partial x / \partial \phi)^\top s_p(x)]`.

    Parameters
    ----------
    n_auxiliary : int or callable, default=100
        The K, or a function of progress in [0, 1) that returns it, such as ``lambda progress: int(10 + 90 *
        progress)``. All draws of an iteration share the K others. Time and memory follow the largest K.
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
        The estimate of the Fisher divergence :math:`E \|s_p(x) - s_q(x)\|^2` at each iteration, with the score of the
        mixture of K + 1 as s_q. The bound itself needs log p.
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
    skksivi.KSIVIApproximator : One semi-implicit layer, the first choice.
    UIVI : Unbiased gradients of the evidence bound, by inner chains.
    SIVISM : Semi-implicit inference by score matching.

    References
    ----------
    Yin, M. and Zhou, M. (2018). Semi-implicit variational inference. https://arxiv.org/abs/1805.11183

    Examples
    --------
    >>> from skksivi.baselines import SIVI
    >>> q = SIVI(max_iter=500, learning_rate=0.02, random_state=0).fit(lambda x: 3 - x, n_features=1)
    >>> q.sample(10_000).mean().round(1)
    np.float32(3.0)
    """

    _parameter_constraints: ClassVar[Constraints] = {
        "n_auxiliary": [Interval(Integral, 0, None, closed="left"), callable],
    }

    _adam: ClassVar[Adam] = Adam(betas=(0.9, 0.999), ema=None)

    n_auxiliary: int | Callable[[float], int] = 100

    def _check_parameters(self, n_features: int) -> None:
        super()._check_parameters(n_features)
        self._most_auxiliary()

    def _most_auxiliary(self) -> int:
        """Return the largest K."""
        given = self.n_auxiliary
        if callable(given):
            check_function(given, "n_auxiliary", "progress")
        numbers = [given(t / self.max_iter) for t in range(self.max_iter)] if callable(given) else [given]
        bad = [K for K in numbers if not (isinstance(K, Integral) and int(K) >= 0)]
        if bad:
            raise ValueError(f"`n_auxiliary` returned {bad[0]!r}, expected an integer of zero or more.")
        return int(max(numbers))

    def _objective(
        self, score_u: DifferentiableScore, temperature: Scheduled, family: SemiImplicit, generator: torch.Generator
    ) -> Objective:
        n, most = self.batch_size, self._most_auxiliary()
        K = Scheduled("n_auxiliary", self.n_auxiliary, next(family.parameters()))

        def gradient_fn() -> Tensor:
            z = family.draw_latent(n + most, generator)
            mu, sigma, pull_layer = family.conditional_with_pullback(z)
            xi = torch.empty_like(mu[:n]).normal_(generator=generator)
            x = torch.addcmul(mu[:n], sigma, xi)
            q = mixture(x, mu[:n], mu[n:], sigma, K.value)
            s_p, _ = score_u.with_pullback(x)
            f = s_p - q.dx
            pull_layer(torch.cat([q.dmu - f, q.dothers]) / n, (q.dsigma - f * xi) / n)
            return f.square().sum(-1).mean()

        return Objective(gradient_fn, [temperature, K])


class Mixture(NamedTuple):
    """A log-density at each row, shape (n,), and the gradients of the sum of it: in x and in the means, and the terms
    (n, d) whose sum is that in sigma.
    """

    log_q: Tensor
    dx: Tensor
    dmu: Tensor
    dothers: Tensor
    dsigma: Tensor


def mixture(x: Tensor, mu: Tensor, others: Tensor, sigma: Tensor, K: Tensor) -> Mixture:
    r"""Evaluate :math:`\log \frac{1}{K+1} \left[N(x_i; \mu_i, \sigma^2) + \sum_{k=1}^K N(x_i; m_k, \sigma^2)\right]`.

    Parameters
    ----------
    x, mu : Tensor of shape (n, d)
    others : Tensor of shape (k, d)
        The means m.
    sigma : Tensor of shape (d,)
    K : Tensor of shape ()
        How many of the others are taken, the first ones.
    """
    c = mu.mean(0)  # rounding grows with the distance from the origin
    y, b, m = (x - c) / sigma, (mu - c) / sigma, (others - c) / sigma
    xi, squares = y - b, y.square()
    own = xi.square().sum(1, keepdim=True) / -2
    left_out = torch.arange(len(m), device=x.device) >= K
    rest = torch.addmm(m.square().sum(1) / -2, y, m.mT) - squares.sum(1, keepdim=True) / 2
    log_weights = torch.cat([own, rest.masked_fill(left_out, -math.inf)], 1)
    log_sum = log_weights.logsumexp(1, keepdim=True)
    w = (log_weights - log_sum).exp()
    w_own, w = w[:, :1], w[:, 1:]
    mean = torch.addcmul(w @ m, w_own, b)
    spread = squares - 2 * y * mean + w_own * b.square() + w @ m.square()
    return Mixture(
        log_q=log_sum[:, 0] - (sigma.log() + math.log(2 * math.pi) / 2).sum() - (K + 1).log(),
        dx=(mean - y) / sigma,
        dmu=w_own * xi / sigma,
        dothers=torch.addcmul(w.mT @ y, w.sum(0)[:, None], m, value=-1) / sigma,
        dsigma=(spread - 1) / sigma,
    )
