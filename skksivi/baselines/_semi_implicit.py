"""Semi-implicit layers, trained by bounds or gradients of the divergence: SIVI, PVI and KPG."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from skksivi._utils.arrays import RandomState, check_function
from skksivi._utils.checks import shown
from skksivi.base import Constraints, Integral, Interval, Real, StrOptions
from skksivi.baselines._points import RADIAL, radial_kernel, set_gradient
from skksivi.coordinates import score_for_training
from skksivi.estimators import Trained, temperature
from skksivi.families import Layer, SemiImplicit, covariance_kept, diagonal_gaussian_log_prob, gaussian_layer
from skksivi.kernels import Kernel
from skksivi.mixing import AtomDraws, Mixing, NormalDraws
from skksivi.parameters import Adam, Annealing, Init, Scale, Whiten, checked_object
from skksivi.score import DifferentiableScore, Score, Tempered
from skksivi.start import find_whitening
from skksivi.training import Fit, Objective, Run, Scheduled, learning_rate_factor


@dataclass(kw_only=True, eq=False, repr=False)
class TrainedBaseline(Trained):
    """Base of the methods that train a family, with the parameters that all of them have."""

    _adam: ClassVar[Adam] = Adam(betas=(0.9, 0.999), ema=None)

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
    hidden_layer_sizes: int | Sequence[int] = (100, 100)
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
        mixing = self._mixing(self._n_latent(d), sigma, generator)
        return gaussian_layer(
            sigma,
            scale=checked_object(Scale, self.scale),
            mixing=mixing,
            hidden_layer_sizes=self._widths(),
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
    n_auxiliary : int or callable, default=100
        The K, or a function of progress in [0, 1) that returns it, such as ``lambda progress: int(10 + 90 *
        progress)``. All draws of an iteration share the K others. Time and memory follow the largest K.
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
        "n_auxiliary": [Interval(Integral, 0, None, closed="left"), callable]
    }

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
            raise ValueError(f"`n_auxiliary` returned {shown(bad[0])}, expected an integer of zero or more.")
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
    whiten, init
        See `skksivi.KSIVIApproximator`; `whiten` is "laplace" by default.
    latent_dim, hidden_layer_sizes, linear_skip, scale, initial_scale
        See `SIVI`.
    n_particles : int, default=100
        The M.
    regularization : float, default=1e-8
        The :math:`\lambda`, zero or more, in nats.
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


@dataclass(kw_only=True, eq=False, repr=False)
class KPG(SemiImplicitVI):
    r"""Fit a semi-implicit layer by the kernelised path gradient of the divergence.

    The fitted distribution is the law of :math:`x = \mu(z) + \sigma \odot \xi` with normal z and :math:`\xi`. The
    path gradient of KL(q || p) moves draws along :math:`s_p - s_q`. The score :math:`s_q` is not known, but its
    kernel average is, because the conditional of each draw has the same one:

    .. math::
        \nabla_\phi \mathrm{KL} \approx -E\left[\left(\frac{\partial x}{\partial \phi}\right)^\top v(x)\right],
        \quad v(x) = E_{x', z'}\left[k(x, x') \left(s_p(x') - s_{q(\cdot|z')}(x')\right)\right].

    No product with the Jacobian of the score is taken. The average is over the other draws of the iteration, which
    makes it unbiased for v, not for :math:`s_p - s_q`: v is smoothed by the kernel and weighted by the density of q
    near x.

    With `importance_sampling` (KPG-IS) draws x' of q represent draws from a density proportional to
    :math:`k(x, \cdot)\, q`, by self-normalised weights: v is divided by :math:`E[k(x, x')]`, which removes the weight
    by the density. The paper announces a correction of the bias by importance sampling; this implementation may
    differ in details, because it is based only on the abstract and the equation above.

    Parameters
    ----------
    whiten, init
        See `skksivi.KSIVIApproximator`; `whiten` is "laplace" by default.
    latent_dim, hidden_layer_sizes, linear_skip, scale, initial_scale
        See `SIVI`.
    importance_sampling : bool, default=False
        Whether the average has weights that sum to one.
    kernel : {"gaussian", "imq", "laplace"} or Kernel, default="gaussian"
        The kernel k, a function of the distance.
    bandwidth : float, "median" or None, default=None
        Its width in whitened units; None leaves it to `kernel`, whose default is the median heuristic.
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
        The mean of :math:`\langle f(x), v(x) \rangle` with f in the brackets of v, at each iteration: the estimate of
        the squared kernel Stein discrepancy or, with `importance_sampling`, of a Fisher divergence of averages.
    n_iter_ : int
        Number of iterations.
    n_features_in_ : int
        Dimension of the target.
    n_score_calls_, n_products_ : int
        Points at which `fit` evaluated the score or log p, and products with the Jacobian of the score.
    stages_ : list of Stage
        The cost of each stage of `fit`: ``name``, ``n_calls`` and ``seconds``.

    Raises
    ------
    ValueError
        The kernel is not a positive function of the distance.

    See Also
    --------
    skksivi.KSIVIApproximator : One semi-implicit layer, the first choice.
    AISIVI : Path gradients by importance sampling.

    References
    ----------
    Pielok, T., Bischl, B. and Rügamer, D. (2026). Semi-implicit variational inference via kernelized path gradient
    descent. AISTATS. https://arxiv.org/abs/2506.05088

    Examples
    --------
    >>> from skksivi.baselines import KPG
    >>> q = KPG(max_iter=500, learning_rate=0.02, random_state=0).fit(lambda x: 3 - x, n_features=1)
    >>> q.sample(10_000).mean().round(1)
    np.float32(3.0)
    """

    _parameter_constraints: ClassVar[Constraints] = {**RADIAL, "importance_sampling": ["boolean"]}

    importance_sampling: bool = False
    kernel: str | Kernel = "gaussian"
    bandwidth: float | str | None = None

    def _check_parameters(self, n_features: int) -> None:
        super()._check_parameters(n_features)
        radial_kernel(self.kernel, self.bandwidth)

    def _objective(
        self, score_u: DifferentiableScore, temperature: Scheduled, family: SemiImplicit, generator: torch.Generator
    ) -> Objective:
        kernel = radial_kernel(self.kernel, self.bandwidth)

        def gradient_fn() -> Tensor:
            drawn = LayerDraws.by(family, self.batch_size, generator)
            f = score_u.with_pullback(drawn.x)[0] + drawn.xi / drawn.sigma
            v = kernel_average(drawn.x, f, kernel, self.importance_sampling)
            drawn.follow(v)
            return (f * v).sum(-1).mean()

        return Objective(gradient_fn, [temperature])


def kernel_average(x: Tensor, f: Tensor, kernel: Kernel, normalised: bool) -> Tensor:
    r"""Return :math:`\sum_{j \ne i} w_{ij} f_j` (n, d), :math:`w_{ij} = k(x_i, x_j) / (n - 1)`.

    Parameters
    ----------
    x, f : Tensor of shape (n, d)
    kernel : Kernel
    normalised : bool
        Whether the weights of a row are divided by their sum, if they sum to more than the smallest number.
    """
    k = kernel(x).fill_diagonal_(0)
    total = k.sum(1, keepdim=True).clamp_min(torch.finfo(k.dtype).tiny) if normalised else len(x) - 1
    return k @ f / total
