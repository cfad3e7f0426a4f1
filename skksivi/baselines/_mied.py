"""Mollified interaction energy descent."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from skksivi.base import Constraints, Interval, Real, StrOptions
from skksivi.baselines._descent import Descending, MovingPoints, set_gradient
from skksivi.baselines._points import (
    Particled,
    density_in_u,
    find_start,
    initial_log_densities,
    ratio_in_u,
)
from skksivi.families._samplers import Particles
from skksivi.kernels import squared_distances
from skksivi.score._score import Score
from skksivi.training._run import Fit, Run

#: Maps squared distances D, a width epsilon and the dimension d to log phi and its derivative in D.
Mollifier = Callable[[Tensor, float, int], tuple[Tensor, Tensor]]

#: Excess of the exponent of Riesz's mollifier over the dimension, for which it tends to Dirac's delta.
EXCESS = 1e-4


def riesz(D: Tensor, epsilon: float, d: int) -> tuple[Tensor, Tensor]:
    r"""Return the logarithm of :math:`(D + \epsilon^2)^{-s/2}`, s just above d, and its derivative in D."""
    D = D + epsilon**2
    half = (d + EXCESS) / 2
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
    whiten : str, Pilot, (m, L) or None, default="laplace"
        The affine map x = m + L u in whose coordinates the particles move, as in `skksivi.KSIVIApproximator`; None
        moves them in x. By default it is the cheapest map that makes step and widths independent of the units of x: a
        search for one mode.
    init : array-like of shape (n, n_features), default=None
        Particles to start with; a search for modes starts there too. None draws them from N(0, I) in u.
    device : str or torch.device, default="auto"
        Where to compute; "auto" uses a GPU if there is one.
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
