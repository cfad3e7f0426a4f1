"""Particles that descend together: SVGD, KSD descent and MIED."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from skksivi._utils.checks import warn_caller
from skksivi.base import Constraints, Interval, Real, StrOptions
from skksivi.baselines._points import (
    RADIAL,
    Descending,
    MovingPoints,
    Particled,
    density_in_u,
    find_start,
    initial_log_densities,
    not_finite,
    radial_kernel,
    ratio_in_u,
    set_gradient,
)
from skksivi.coordinates import score_for_training
from skksivi.families import Particles
from skksivi.kernels import Kernel, squared_distances
from skksivi.score import Score
from skksivi.training import Fit, Run


def svgd_direction(x: Tensor, s: Tensor, kernel: Kernel) -> Tensor:
    r"""Return the direction in which particles move,

    .. math:: \phi(x_i) = \frac1n \sum_j k(x_j, x_i) s(x_j) + \nabla_{x_j} k(x_j, x_i),

    whose second term is :math:`2 \varphi'(t_{ij}) (x_j - x_i) / h^2` for :math:`k = \varphi(t)`,
    :math:`t_{ij} = \|x_i - x_j\|^2 / h^2`.

    Parameters
    ----------
    x, s : Tensor of shape (n, d)
        The particles, and the score at each.
    kernel : Kernel
        No gradient goes through a median width.

    Returns
    -------
    phi : Tensor of shape (n, d)

    References
    ----------
    Liu, Q. and Wang, D. (2016). Stein variational gradient descent: a general purpose Bayesian inference algorithm,
    Algorithm 1. https://arxiv.org/abs/1608.04471
    """
    x = x - x.mean(0)  # far from the origin the products would cancel
    squared = squared_distances(x, x).fill_diagonal_(0)
    h2 = kernel.squared_bandwidth(squared, within=True)
    t = squared / h2
    k = kernel.profile(t)
    e = 2 * kernel.slope(t, k) / h2
    return (k @ s + e @ x - e.sum(1, keepdim=True) * x) / len(x)


@dataclass(kw_only=True, eq=False, repr=False)
class SVGD(Descending, Particled):
    r"""Particles moved by Stein variational gradient descent, the steepest descent of KL(q || p) in a kernel space.

    .. math:: x_i \leftarrow x_i + \epsilon\, \phi(x_i), \quad
        \phi(x_i) = \frac1n \sum_j k(x_j, x_i) s_p(x_j) + \nabla_{x_j} k(x_j, x_i),

    with Adam's steps. The fewer the particles and the more the dimensions, the narrower the result: for a Gaussian in
    ten dimensions, 200 particles have 0.93 of the standard deviations with the IMQ kernel and 0.73 with the Gaussian.

    Parameters
    ----------
    whiten : str, Pilot, (m, L) or None, default="laplace"
        The affine map x = m + L u in whose coordinates the particles move, as in `skksivi.KSIVIApproximator`; None
        moves them in x. By default it is the cheapest map that makes step and widths independent of the units of x: a
        search for one mode.
    init : array-like of shape (n, n_features), default=None
        Particles to start with; a search for modes starts there too. None draws them from N(0, I) in u.
    kernel : {"imq", "gaussian", "laplace"} or Kernel, default="imq"
        The kernel k; the method's authors use "gaussian". Riesz's cannot be used here.
    bandwidth : float, "median" or None, default=None
        Width of the kernel in whitened units; None leaves it to `kernel`, whose default is the median heuristic.
    n_particles : int, default=200
        Number of particles, two at least; not used with `init`.
    max_iter : int, default=1000
        Iterations.
    learning_rate : float, default=0.1
        Step size of Adam, in whitened units.
    learning_rate_decay : "cosine" or None, default="cosine"
        Lower the rate to zero along a cosine, or keep it.
    device : str or torch.device, default="auto"
        Where to compute; "auto" is the device of the target's tensors, or the CPU.
    dtype : {"float32", "float64"}, default="float64"
        Precision of the computation and of the draws.
    random_state : int, RandomState or None, default=None
        Seeds the start and the samples.

    Attributes
    ----------
    particles_ : ndarray of shape (n_particles, n_features)
        `sample` gives n of them without replacement. Of more than there are, it draws with replacement and adds a
        Gaussian that reaches half-way to the nearest other particle, which makes the draws a little wider.
    norm_curve_ : ndarray of shape (`n_iter_`,)
        Root mean square of :math:`\|\phi(x_i)\|`, in whitened units; it is zero when the particles are at rest. The
        method has no computable loss.
    whitening_ : Whitening
        The map x = m + L u.
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
    KSDDescent : Particles that descend the kernel Stein discrepancy.
    MIED : Particles of a mollified energy.

    References
    ----------
    Liu, Q. and Wang, D. (2016). Stein variational gradient descent: a general purpose Bayesian inference algorithm.
    https://arxiv.org/abs/1608.04471

    Examples
    --------
    >>> from skksivi.baselines import SVGD
    >>> q = SVGD(n_particles=50, max_iter=200, random_state=0).fit(lambda x: (3 - x) / 4, n_features=1)
    >>> q.particles_.mean(axis=0).round(2)
    array([3.])
    """

    _parameter_constraints: ClassVar[Constraints] = RADIAL

    kernel: str | Kernel = "imq"
    bandwidth: float | str | None = None

    def _check_parameters(self, n_features: int) -> None:
        super()._check_parameters(n_features)
        radial_kernel(self.kernel, self.bandwidth)

    def _fit(self, score_fn: Score, run: Run) -> Fit:
        generator = run.generator
        kernel = radial_kernel(self.kernel, self.bandwidth)
        whitening, u = find_start(self.whiten, self.init, self.n_particles, score_fn, generator)
        score_u, particles = score_for_training(score_fn, whitening, generator), MovingPoints(u)

        def gradient_fn() -> Tensor:
            phi = svgd_direction(particles.u, score_u.with_pullback(particles.u)[0], kernel)
            set_gradient(particles.u, -phi)
            return phi.square().sum(1).mean().sqrt()

        norms, ended_by = self._descend(gradient_fn, particles, generator)
        x = whitening.push_forward(particles.u.double()).cpu().numpy()
        return Fit(Particles(x, whitening), {"norm_curve_": norms, "n_iter_": len(norms)}, ended_by)


def ksd_gradient(x: Tensor, s: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return the squared KSD of particles and its gradients in them and in their scores,

    .. math::
        F = \frac{1}{n^2} \sum_{ij} k_p(x_i, x_j), \quad
        k_p = \varphi\, s_i^\top s_j - 2 \varphi' C_{ij} - 2 d \varphi' - 4 D_{ij} \varphi'', \quad
        C_{ij} = (s_i - s_j)^\top (x_i - x_j),

    for :math:`k = \varphi(D)`, :math:`D_{ij} = \|x_i - x_j\|^2`. With
    :math:`(\Delta_W y)_i = \sum_j W_{ij} (y_i - y_j)` and :math:`G = \partial k_p / \partial D`,

    .. math::
        n^2 \nabla_x F = 4 \Delta_G x - 4 \Delta_{\varphi'} s, \quad
        n^2 \nabla_s F = 2 \varphi s - 4 \Delta_{\varphi'} x, \quad
        G = \varphi' s_i^\top s_j - 2 \varphi'' C - (2 d + 4) \varphi'' - 4 D \varphi'''.

    Where s is the score at x, the gradient in the particles is :math:`\nabla_x F + J^\top \nabla_s F`.

    Parameters
    ----------
    x, s : Tensor of shape (n, d)
        The particles, and the score at each.
    kernel : Kernel
        Of a fixed bandwidth, with derivatives at x = y.

    Returns
    -------
    ksd : Tensor of shape ()
    dx, ds : Tensors of shape (n, d)

    References
    ----------
    Korba, A. et al. (2021). Kernel Stein discrepancy descent. https://arxiv.org/abs/2105.09994
    """
    n, d = x.shape
    x = x - x.mean(0)  # far from the origin the products would cancel
    D = squared_distances(x, x).fill_diagonal_(0)
    phi, dphi, ddphi, dddphi = kernel.derivatives(D, 3)
    products, sx = s @ s.mT, s @ x.mT
    C = sx.diagonal() + sx.diagonal().unsqueeze(1) - sx - sx.mT
    k_p = phi * products - 2 * dphi * C - 2 * d * dphi - 4 * D * ddphi
    G = dphi * products - 2 * ddphi * C - (2 * d + 4) * ddphi - 4 * D * dddphi
    dx = 4 * _laplacian(G, x) - 4 * _laplacian(dphi, s)
    ds = 2 * phi @ s - 4 * _laplacian(dphi, x)
    return k_p.mean(), dx / n**2, ds / n**2


def _laplacian(W: Tensor, y: Tensor) -> Tensor:
    return W.sum(1, keepdim=True) * y - W @ y


def last_fall(losses: list[float]) -> float:
    """Return the relative fall of the lowest loss in the last tenth."""
    lowest = np.minimum.accumulate(losses)[-1 - max(1, len(losses) // 10) :]
    return 1 - lowest[-1] / lowest[0]


@dataclass(kw_only=True, eq=False, repr=False)
class KSDDescent(Descending, Particled):
    r"""Particles that minimise their kernel Stein discrepancy from the target.

    .. math:: \min_{x_1, \dots, x_n} \frac{1}{n^2} \sum_{ij} k_p(x_i, x_j)

    with the Stein kernel :math:`k_p` of a smooth kernel k. The gradient takes products with the Jacobian of the
    score. Particles on a symmetry plane of the target, or far from all of its mass, may stay there, and the
    discrepancy is hardly sensitive to wrong weights of separated modes.

    Parameters
    ----------
    whiten : str, Pilot, (m, L) or None, default="laplace"
        The affine map x = m + L u in whose coordinates the particles move, as in `skksivi.KSIVIApproximator`; None
        moves them in x. By default it is the cheapest map that makes step and widths independent of the units of x: a
        search for one mode.
    init : array-like of shape (n, n_features), default=None
        Particles to start with; a search for modes starts there too. None draws them from N(0, I) in u.
    kernel : {"imq", "gaussian"} or Kernel, default="imq"
        The kernel k, with derivatives at x = y.
    bandwidth : float, "median" or None, default=None
        Width of the kernel in whitened units; None leaves it to `kernel`, whose default is the median heuristic. It
        is set on the initial particles and then fixed.
    solver : {"lbfgs", "adam"}, default="lbfgs"
        L-BFGS with a line search by Wolfe's conditions, which needs no step size, or Adam.
    n_particles : int, default=200
        Number of particles, two at least; not used with `init`.
    max_iter : int, default=300
        Number of iterations; with "lbfgs" the maximum, with at most 1.25 times as many evaluations. A
        `ConvergenceWarning` says if the discrepancy was still falling at the end, by more than 1% in the last tenth.
    learning_rate : float, default=0.1
        Step size of Adam, in whitened units.
    learning_rate_decay : "cosine" or None, default="cosine"
        Lower Adam's rate to zero along a cosine, or keep it.
    tol : float, default=1e-7
        L-BFGS stops when n KSD^2 changes by less, the largest entry of its gradient is smaller, or no coordinate
        moves by more than tol / n.
    device : str or torch.device, default="auto"
        Where to compute; "auto" is the device of the target's tensors, or the CPU.
    dtype : {"float32", "float64"}, default="float64"
        Precision of the computation and of the draws.
    random_state : int, RandomState or None, default=None
        Seeds the start and the samples.

    Attributes
    ----------
    particles_ : ndarray of shape (n_particles, n_features)
        `sample` returns n of them without replacement. If n exceeds their number, it draws with replacement and adds
        Gaussian noise that reaches half-way to the nearest other particle, which makes the draws slightly wider.
    loss_curve_ : ndarray
        The squared discrepancy in whitened units at each evaluation.
    whitening_ : Whitening
        The map x = m + L u.
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
    SVGD : Stein variational gradient descent.
    skksivi.metrics.ksd : The kernel Stein discrepancy, from the score alone.

    References
    ----------
    Korba, A., Aubin-Frankowski, P.-C., Majewski, S. and Ablin, P. (2021). Kernel Stein discrepancy descent.
    https://arxiv.org/abs/2105.09994

    Examples
    --------
    >>> from skksivi.baselines import KSDDescent
    >>> q = KSDDescent(n_particles=50, random_state=0).fit(lambda x: (3 - x) / 4, n_features=1)
    >>> q.particles_.mean(axis=0).round(2)
    array([3.])
    """

    _parameter_constraints: ClassVar[Constraints] = {
        **RADIAL,
        "solver": [StrOptions({"lbfgs", "adam"})],
        "tol": [Interval(Real, 0, None, closed="left")],
    }

    kernel: str | Kernel = "imq"
    bandwidth: float | str | None = None
    solver: str = "lbfgs"
    max_iter: int = 300
    tol: float = 1e-7

    def _check_parameters(self, n_features: int) -> None:
        super()._check_parameters(n_features)
        radial_kernel(self.kernel, self.bandwidth, smooth=True)

    def _fit(self, score_fn: Score, run: Run) -> Fit:
        generator = run.generator
        kernel = radial_kernel(self.kernel, self.bandwidth, smooth=True)
        whitening, u = find_start(self.whiten, self.init, self.n_particles, score_fn, generator)
        kernel, score_u, particles = kernel.frozen(u), whitening.pull_back(score_fn), MovingPoints(u)

        def gradient_fn() -> Tensor:
            s, pull = score_u.with_pullback(particles.u)
            ksd, dx, ds = ksd_gradient(particles.u, s, kernel)
            set_gradient(particles.u, dx + pull(ds))
            return ksd

        if self.solver == "lbfgs":
            losses, n_iter, ended_by = self._lbfgs(gradient_fn, particles.u, run)
        else:
            losses, ended_by = self._descend(gradient_fn, particles, generator)
            n_iter = len(losses)
        x = whitening.push_forward(particles.u.double()).cpu().numpy()
        return Fit(Particles(x, whitening), {"loss_curve_": losses, "n_iter_": n_iter}, ended_by)

    def _lbfgs(
        self, gradient_fn: Callable[[], Tensor], u: Tensor, run: Run
    ) -> tuple[np.ndarray, int, BaseException | None]:
        """Minimise by L-BFGS.

        Returns
        -------
        losses : ndarray
            One per evaluation.
        n_iter : int
        ended_by : FloatingPointError, KeyboardInterrupt or None
            The error that ended it early; `u` is then the best point evaluated.
        """
        losses: list[float] = []
        best, max_eval, ended_by = u.clone(), self.max_iter * 5 // 4, None
        optimiser = torch.optim.LBFGS(
            [u],
            max_iter=self.max_iter,
            max_eval=max_eval,
            tolerance_grad=self.tol / len(u),
            tolerance_change=self.tol / len(u),
            history_size=20,
            line_search_fn="strong_wolfe",
        )

        @torch.no_grad()
        def closure() -> float:
            losses.append(gradient_fn().item())
            if not np.isfinite(losses[-1]):
                raise not_finite(f"The loss is {losses[-1]} at evaluation {len(losses)}")
            if losses[-1] <= min(losses):
                best.copy_(u)
            return losses[-1]

        try:
            optimiser.step(closure)
        except run.keeping as error:
            u.copy_(best)  # from wherever a line search was
            ended_by = error
        n_iter = optimiser.state[u].get("n_iter", 0)
        ran_out = ended_by is None and (n_iter >= self.max_iter or len(losses) >= max_eval)
        if ran_out and (fall := last_fall(losses)) > 0.01:
            warn_caller(
                f"L-BFGS has stopped after {n_iter} iterations, in the last tenth of which the discrepancy fell by "
                f"{fall:.0%}. Raise `max_iter`.",
                ConvergenceWarning,
            )
        return np.array(losses), n_iter, ended_by


#: Maps squared distances D, a width epsilon and the dimension d to log phi and its derivative in D.
Mollifier = Callable[[Tensor, float, int], tuple[Tensor, Tensor]]


def riesz(D: Tensor, epsilon: float, d: int) -> tuple[Tensor, Tensor]:
    r"""Return the logarithm of :math:`(D + \epsilon^2)^{-s/2}`, s just above d, and its derivative in D."""
    D = D + epsilon**2
    half = (d + 1e-4) / 2  # the mollifier tends to Dirac's delta
    return -half * D.log(), -half / D


def gaussian_kernel(D: Tensor, epsilon: float, _d: int) -> tuple[Tensor, Tensor]:
    r"""Return the logarithm of :math:`\exp(-D / (2 \epsilon^2))` and its derivative in D."""
    slope = -1 / (2 * epsilon**2)
    return slope * D, torch.full_like(D, slope)


def laplace_kernel(D: Tensor, epsilon: float, _d: int) -> tuple[Tensor, Tensor]:
    r"""Return the logarithm of :math:`\exp(-\sqrt D / \epsilon)` and its derivative in D."""
    distance = D.sqrt()
    return -distance / epsilon, -1 / (2 * epsilon * distance.clamp_min(torch.finfo(D.dtype).tiny ** 0.5))


MOLLIFIERS: dict[str, Mollifier] = {"riesz": riesz, "gaussian": gaussian_kernel, "laplace": laplace_kernel}


def mied_gradient(x: Tensor, log_p: Tensor, s: Tensor, mollifier: Mollifier, epsilon: float) -> tuple[Tensor, Tensor]:
    r"""Return the mollified interaction energy of particles and its gradient,

    .. math::
        E = \log \frac{1}{n^2} \sum_{ij} e^{a_{ij}}, \quad
        a_{ij} = \log \phi_\epsilon(D_{ij}) - \tfrac12 \left( \log p(x_i) + \log p(x_j) \right), \quad
        D_{ij} = \|x_i - x_j\|^2,

    where :math:`D_{ii} = r_i^2 / (1.3\, d)^{2/d}`, for the distance :math:`r_i` to the nearest other particle, stands
    instead of zero and is held fixed. With :math:`w = \mathrm{softmax}(a)`,

    .. math::
        \nabla_i E = 4 \sum_{j \ne i} w_{ij} \frac{\partial \log \phi_\epsilon}{\partial D}(D_{ij}) (x_i - x_j)
        - \sum_j w_{ij} s(x_i).

    Parameters
    ----------
    x, s : Tensor of shape (n, d)
        The particles, and the score at each.
    log_p : Tensor of shape (n,)
        Log-densities of the target there, up to a constant.
    mollifier : callable
    epsilon : float

    Returns
    -------
    energy : Tensor of shape ()
    gradient : Tensor of shape (n, d)

    References
    ----------
    Li, L. et al. (2023). Sampling with mollified interaction energy descent.
    https://arxiv.org/abs/2210.13400
    """
    n, d = x.shape
    D = squared_distances(x, x)
    nearest = D.fill_diagonal_(math.inf).amin(1)
    D.diagonal().copy_(nearest / (1.3 * d) ** (2 / d))
    log_phi, slope = mollifier(D, epsilon, d)
    a = log_phi - (log_p + log_p.unsqueeze(1)) / 2
    energy = a.flatten().logsumexp(0)
    w = (a - energy).exp()
    g = (w * slope).fill_diagonal_(0)
    gradient = 4 * (g.sum(1, keepdim=True) * x - g @ x) - w.sum(1, keepdim=True) * s
    return energy - 2 * math.log(n), gradient


@dataclass(kw_only=True, eq=False, repr=False)
class MIED(Descending, Particled):
    r"""Particles that minimise a mollified interaction energy, close to the chi-square divergence from the target.

    .. math::
        E = \log \frac{1}{n^2} \sum_{ij} \phi_\epsilon(x_i - x_j) \left( p(x_i)\, p(x_j) \right)^{-1/2},

    with a mollifier :math:`\phi_\epsilon` that tends to Dirac's delta, and for i = j the distance to the nearest
    other particle, scaled, instead of zero. The fewer the particles and the more the dimensions, the farther the
    minimum is from the target: for a Gaussian in ten dimensions, 200 particles have 0.8 of the standard deviations.

    The energy compares the densities at the particles. If the target has no `log_prob`, the changes of log p are
    summed from integrals of the score along the path of each particle, by a rule that is exact if log p is a
    polynomial of degree six along a step.

    Parameters
    ----------
    whiten : str, Pilot, (m, L) or None, default="laplace"
        The affine map x = m + L u in whose coordinates the particles move, as in `skksivi.KSIVIApproximator`; None
        moves them in x. By default it is the cheapest map that makes step and widths independent of the units of x: a
        search for one mode.
    init : array-like of shape (n, n_features), default=None
        Particles to start with; a search for modes starts there too. None draws them from N(0, I) in u.
    mollifier : {"riesz", "gaussian", "laplace"}, default="riesz"
        With the squared distance D, :math:`(D + \epsilon^2)^{-s/2}` with s just above the dimension,
        :math:`\exp(-D / (2 \epsilon^2))` or :math:`\exp(-\sqrt{D} / \epsilon)`. Under the latter two,
        particles more than a few :math:`\epsilon` apart do not interact, so it must suit their number.
    epsilon : float, default=1e-4
        The width :math:`\epsilon > 0`, in whitened units; with "gaussian" and "laplace" take 0.3 to 1.
    n_particles : int, default=200
        Number of particles, two at least; not used with `init`.
    max_iter : int, default=1000
        Iterations.
    learning_rate : float, default=0.03
        Step size of Adam, in whitened units.
    learning_rate_decay : "cosine" or None, default="cosine"
        Lower the rate to zero along a cosine, or keep it.
    device : str or torch.device, default="auto"
        Where to compute; "auto" is the device of the target's tensors, or the CPU.
    dtype : {"float32", "float64"}, default="float64"
        Precision of the computation and of the draws.
    random_state : int, RandomState or None, default=None
        Seeds the start and the samples.

    Attributes
    ----------
    particles_ : ndarray of shape (n_particles, n_features)
        `sample` gives n of them without replacement. Of more than there are, it draws with replacement and adds a
        Gaussian that reaches half-way to the nearest other particle, which makes the draws a little wider.
    loss_curve_ : ndarray of shape (`n_iter_`,)
        The energy E, up to a constant, in whitened units.
    whitening_ : Whitening
        The map x = m + L u.
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
    SVGD : Stein variational gradient descent.
    KSDDescent : Particles that descend the kernel Stein discrepancy.

    References
    ----------
    Li, L., Liu, Q., Korba, A., Yurochkin, M. and Solomon, J. (2023). Sampling with mollified interaction energy
    descent. https://arxiv.org/abs/2210.13400

    Examples
    --------
    >>> from skksivi.baselines import MIED
    >>> q = MIED(n_particles=50, random_state=0).fit(lambda x: (3 - x) / 4, n_features=1)
    >>> q.particles_.mean(axis=0).round()
    array([3.])
    """

    _parameter_constraints: ClassVar[Constraints] = {
        "mollifier": [StrOptions(set(MOLLIFIERS))],
        "epsilon": [Interval(Real, 0, None, closed="neither")],
    }

    mollifier: str = "riesz"
    epsilon: float = 1e-4
    learning_rate: float = 0.03

    def _fit(self, score_fn: Score, run: Run) -> Fit:
        generator = run.generator
        whitening, u = find_start(self.whiten, self.init, self.n_particles, score_fn, generator)
        score_u, density = whitening.pull_back(score_fn), density_in_u(score_fn, whitening, u)
        log_ratio, mollifier = ratio_in_u(density, score_u), MOLLIFIERS[self.mollifier]
        log_p, s, particles = initial_log_densities(density, score_u, u), score_u(u), MovingPoints(u.clone())

        def gradient_fn() -> Tensor:
            v, s_v = particles.u, score_u(particles.u)
            log_p.add_(log_ratio(u, s, v, s_v))
            u.copy_(v)
            s.copy_(s_v)
            energy, gradient = mied_gradient(v, log_p, s_v, mollifier, self.epsilon)
            set_gradient(particles.u, gradient)
            return energy

        losses, ended_by = self._descend(gradient_fn, particles, generator)
        x = whitening.push_forward(particles.u.double()).cpu().numpy()
        return Fit(Particles(x, whitening), {"loss_curve_": losses, "n_iter_": len(losses)}, ended_by)
