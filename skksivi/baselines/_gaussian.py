"""Gaussian approximations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor, nn

from skksivi._utils.arrays import RandomState
from skksivi._utils.checks import warn_caller
from skksivi.base import BaseApproximator, Constraints, Integral, Interval, Real, StrOptions
from skksivi.baselines._points import Descending, set_gradient
from skksivi.coordinates import Affine, Coordinates, score_for_training, starting_points
from skksivi.families import Gaussian
from skksivi.parameters import Init
from skksivi.pilot import batch_and_match, check_mode, laplace, score_divergence
from skksivi.score import Score
from skksivi.start import find_whitening
from skksivi.training import Fit, Run


@dataclass(kw_only=True, eq=False, repr=False)
class FromMode(BaseApproximator):
    """Base of the Gaussians, which start at a mode."""

    _parameter_constraints: ClassVar[Constraints] = {
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "init": ["array-like", None],
    }

    max_iter: int = 200
    init: Init = None
    device: str | torch.device = "auto"
    dtype: str = "float64"
    random_state: RandomState = None

    def _check_parameters(self, n_features: int) -> None:
        super()._check_parameters(n_features)
        starting_points(self.init, n_features)
        if self.init is not None and np.ndim(self.init) != 1:
            raise ValueError(f"`init` has shape {np.shape(self.init)}, expected ({n_features},): one point.")

    def _points_near_target(self) -> Init:
        return self.init


class Laplace(FromMode):
    r"""Gaussian at a mode, with the inverse curvature there as covariance.

    The mode is found from the score alone, by saddle-free Newton steps in float64. A step takes the whole Jacobian
    and its eigenvectors, :math:`O(d^3)`, even beyond 1,000 features, where whiten="laplace" of
    `skksivi.KSIVIApproximator` uses products only.

    Parameters
    ----------
    init : array-like of shape (n_features,), default=None
        Where the mode search starts; None means the origin.
    max_iter : int, default=200
        Maximal number of Newton steps; a `ConvergenceWarning` is given if they have not reached a mode.
    device : str or torch.device, default="auto"
        Where to compute; "auto" is the device of the target's tensors, or the CPU.
    dtype : {"float32", "float64"}, default="float64"
        Type of the draws.
    random_state : int, RandomState or None, default=None
        Seeds the samples.

    Attributes
    ----------
    mean_ : ndarray of shape (n_features,)
        The mode.
    covariance_ : ndarray of shape (n_features, n_features)
        The inverse of minus the Jacobian of the score there.
    n_features_in_ : int
        Dimension of the target.
    n_score_calls_, n_products_ : int
        Points at which `fit` evaluated the score or log p, and products with the Jacobian of the score.
    stages_ : list of Stage
        The cost of each stage of `fit`: ``name``, ``n_calls`` and ``seconds``.

    See Also
    --------
    FullRankVI : Gaussian with full covariance.
    BatchAndMatch : Gaussian fitted to the scores.

    References
    ----------
    Dauphin, Y. et al. (2014). Identifying and attacking the saddle point problem in high-dimensional non-convex
    optimization. https://arxiv.org/abs/1406.2572

    Examples
    --------
    >>> from skksivi.baselines import Laplace
    >>> Laplace().fit(lambda x: (3 - x) / 4, n_features=1).covariance_
    array([[4.]])
    """

    def _fit(self, score_fn: Score, run: Run) -> Fit:
        (start,) = starting_points(self.init, score_fn.n_features, score_fn.device)
        mode, converged = laplace(score_fn.double, start, self.max_iter)
        check_mode(score_fn.double, start, mode)
        if not converged and not score_fn.tally.is_random:  # which was told
            warn_caller(
                f"The mode search has not converged in {self.max_iter} steps; `mean_` is where it ended. Raise "
                "`max_iter`, or set `init` to a point near a mode.",
                ConvergenceWarning,
            )
        return Fit(Gaussian(mode), {})


# The evidence lower bound

#: Takes scores and normal numbers (n, d) and b (d,), and returns the gradients in a, in b and, of full rank, in T.
BoundGradient = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def mean_field_gradient(s: Tensor, xi: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the gradient of the evidence lower bound of :math:`x = a + e^b \odot \xi` in a and b, both (d,),

    .. math:: \nabla_a = E\, s(x), \quad \nabla_b = E\left[s(x) \odot \xi\right] \odot e^b + 1,

    whose last term comes from the entropy.

    Parameters
    ----------
    s, xi : Tensor of shape (n, d)
        The score of the target at the draws, and the normal numbers that they were made from.
    b : Tensor of shape (d,)
    """
    return s.mean(0), (s * xi).mean(0) * b.exp() + 1


def full_rank_gradient(s: Tensor, xi: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return the gradient of the evidence lower bound of :math:`x = a + (T + \mathrm{diag}\, e^b)\, \xi`,

    .. math::
        \nabla_a = E\, s(x), \quad \nabla_b = \mathrm{diag}(G) \odot e^b + 1, \quad
        \nabla_T = \mathrm{tril}_{-1}(G), \quad G = E\left[s(x)\, \xi^\top\right],

    in a and b, both (d,), and the strictly lower triangular T (d, d).

    Parameters
    ----------
    s, xi : Tensor of shape (n, d)
        The score of the target at the draws, and the normal numbers that they were made from.
    b : Tensor of shape (d,)
    """
    G = s.mT @ xi / len(s)
    return s.mean(0), G.diagonal() * b.exp() + 1, G.tril(-1)


class _Parameters(nn.Module):
    """The parameters of a Gaussian, zero at the start: a, b and, of full rank, T."""

    def __init__(self, d: int, *, full_rank: bool, like: Tensor) -> None:
        super().__init__()
        sizes = [(d,), (d,), (d, d)][: 3 if full_rank else 2]
        zeros = (torch.zeros(size, dtype=like.dtype, device=like.device) for size in sizes)
        self.each = nn.ParameterList(nn.Parameter(zero, requires_grad=False) for zero in zeros)

    def map(self) -> Affine:
        """Return the map xi -> a + (T + diag e^b) xi."""
        a, b, *T = self.each
        return Affine(a.detach(), sum(T, torch.diag(b.exp())).detach())


def at_mode(score_fn: Score, init: Init, generator: torch.Generator) -> Affine:
    """Return the lower triangular map of the Laplace approximation found from `init`."""
    whitening, _ = find_whitening("laplace", score_fn, generator, init=init)
    map_ = whitening.map
    if isinstance(map_, Affine):
        return map_
    eye = torch.eye(len(map_.m), dtype=map_.m.dtype, device=map_.m.device)
    R = torch.linalg.qr(map_.unwhiten_direction(eye)).R
    return Affine(map_.m, (R * R.diagonal().sign()[:, None]).mT)


def conditional_scales(q: Affine) -> Tensor:
    r"""Return :math:`(\Lambda_{ii})^{-1/2}`, shape (d,), with the precision :math:`\Lambda = (L L^\top)^{-1}`.

    They are the scales of the independent Gaussian that is nearest to q in KL(. || q).
    """
    eye = torch.eye(len(q.m), dtype=q.m.dtype, device=q.m.device)
    return torch.linalg.solve_triangular(q.L, eye, upper=False).square().sum(0).rsqrt()


@dataclass(kw_only=True, eq=False, repr=False)
class Ascending(Descending, FromMode):
    """Base of the Gaussians that maximise the evidence lower bound."""

    _parameter_constraints: ClassVar[Constraints] = {
        "batch_size": [Interval(Integral, 1, None, closed="left")],
        "learning_rate": [Interval(Real, 0, None, closed="neither")],
        "learning_rate_decay": [StrOptions({"cosine"}), None],
    }

    batch_size: int = 64
    max_iter: int = 1000
    learning_rate: float = 0.03
    learning_rate_decay: str | None = "cosine"

    def _ascend(self, score_fn: Score, start: Affine, gradient: BoundGradient, generator: torch.Generator) -> Fit:
        """Maximise the bound by `mean_field_gradient` or `full_rank_gradient`, from the start, in its units."""
        score_fn.tally.begin("training")
        score_u = score_for_training(score_fn, Coordinates(start), generator)
        d, full_rank = score_fn.n_features, gradient is full_rank_gradient
        q = _Parameters(d, full_rank=full_rank, like=torch.empty(0, dtype=score_fn.dtype, device=score_fn.device))

        def gradient_fn() -> Tensor:
            a, b, *T = q.each
            xi = torch.randn(self.batch_size, d, generator=generator, dtype=a.dtype, device=a.device)
            u = a + b.exp() * xi
            for strict in T:
                u += xi @ strict.mT
            s, _ = score_u.with_pullback(u)
            norm = a.new_zeros(())
            for parameter, g in zip(q.each, gradient(s, xi, b), strict=True):
                set_gradient(parameter, -g)
                norm += g.square().sum()
            return norm.sqrt()

        norms, ended_by = self._descend(gradient_fn, q, generator, 0.99)
        (m, L), (a, T) = start, (value.double() for value in q.map())
        return Fit(Gaussian(Affine(m + L @ a, L @ T)), {"norm_curve_": norms, "n_iter_": len(norms)}, ended_by)


@dataclass(kw_only=True, eq=False, repr=False)
class MeanFieldVI(Ascending):
    r"""Gaussian of independent coordinates that maximises the evidence lower bound.

    .. math:: \max_{m, \sigma}\; E_q \log p(x) + \sum_i \log \sigma_i, \quad q = N(m, \mathrm{diag}\, \sigma^2),

    by reparameterised gradients, which need the score alone, and the entropy in closed form. It starts at the mode,
    with the scales that are right if the target is Gaussian, and takes its steps in these units. If coordinates are
    correlated the variances are too small: for a Gaussian, they are the conditional variances given all other
    coordinates.

    Parameters
    ----------
    init : array-like of shape (n_features,), default=None
        Where the mode search starts, at which the fit starts; None means the origin.
    batch_size : int, default=64
        Draws per iteration.
    max_iter : int, default=1000
        Iterations.
    learning_rate : float, default=0.03
        Step size of Adam.
    learning_rate_decay : "cosine" or None, default="cosine"
        Lower the rate to zero along a cosine, or keep it.
    device : str or torch.device, default="auto"
        Where to compute; "auto" is the device of the target's tensors, or the CPU.
    dtype : {"float32", "float64"}, default="float64"
        Precision of the computation and of the draws.
    random_state : int, RandomState or None, default=None
        Seeds the fit and the samples.

    Attributes
    ----------
    mean_ : ndarray of shape (n_features,)
    covariance_ : ndarray of shape (n_features, n_features)
        Diagonal.
    norm_curve_ : ndarray of shape (`n_iter_`,)
        Norm of the estimated gradient at each iteration. The bound itself is not known from a score.
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
    FullRankVI : Gaussian with full covariance.
    Laplace : Gaussian at the mode, the quickest thing to try.

    References
    ----------
    Kucukelbir, A. et al. (2017). Automatic differentiation variational inference. Journal of Machine Learning
    Research 18(14). https://arxiv.org/abs/1603.00788

    Examples
    --------
    >>> from skksivi.baselines import MeanFieldVI
    >>> MeanFieldVI(random_state=0).fit(lambda x: (3 - x) / 4, n_features=1).covariance_.round()
    array([[4.]])
    """

    def _fit(self, score_fn: Score, run: Run) -> Fit:
        start = at_mode(score_fn, self.init, run.generator)
        independent = Affine(start.m, conditional_scales(start).diag())
        return self._ascend(score_fn, independent, mean_field_gradient, run.generator)


@dataclass(kw_only=True, eq=False, repr=False)
class FullRankVI(Ascending):
    r"""Gaussian that maximises the evidence lower bound.

    .. math:: \max_{m, L}\; E_q \log p(x) + \log \det L, \quad q = N(m, L L^\top),

    by reparameterised gradients, which need only the score, and the entropy in closed form. It starts at the Laplace
    approximation, and takes its steps in coordinates whitened by it.

    Parameters
    ----------
    init : array-like of shape (n_features,), default=None
        Where the mode search starts, at which the fit starts; None means the origin.
    batch_size : int, default=64
        Draws per iteration.
    max_iter : int, default=2000
        Iterations.
    learning_rate : float, default=0.03
        Step size of Adam.
    learning_rate_decay : "cosine" or None, default="cosine"
        Lower the rate to zero along a cosine, or keep it.
    device : str or torch.device, default="auto"
        Where to compute; "auto" is the device of the target's tensors, or the CPU.
    dtype : {"float32", "float64"}, default="float64"
        Precision of the computation and of the draws.
    random_state : int, RandomState or None, default=None
        Seeds the fit and the samples.

    Attributes
    ----------
    mean_ : ndarray of shape (n_features,)
    covariance_ : ndarray of shape (n_features, n_features)
    norm_curve_ : ndarray of shape (`n_iter_`,)
        Norm of the estimated gradient at each iteration. The bound itself is not known from a score.
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
    MeanFieldVI : Gaussian of independent coordinates.
    BatchAndMatch : Gaussian fitted to the scores.

    References
    ----------
    Kucukelbir, A. et al. (2017). Automatic differentiation variational inference. Journal of Machine Learning
    Research 18(14). https://arxiv.org/abs/1603.00788

    Examples
    --------
    >>> from skksivi.baselines import FullRankVI
    >>> FullRankVI(random_state=0).fit(lambda x: (3 - x) / 4, n_features=1).covariance_.round()
    array([[4.]])
    """

    max_iter: int = 2000

    def _fit(self, score_fn: Score, run: Run) -> Fit:
        start = at_mode(score_fn, self.init, run.generator)
        return self._ascend(score_fn, start, full_rank_gradient, run.generator)


@dataclass(kw_only=True, eq=False, repr=False)
class BatchAndMatch(FromMode):
    r"""Gaussian whose score matches the target's on batches of its own draws.

    Each step minimises, in closed form, the sum of a divergence of scores, from a batch of draws, and the KL
    divergence from the previous Gaussian. It starts at the Laplace approximation, and is the rule behind
    whiten="bam".

    Parameters
    ----------
    init : array-like of shape (n_features,), default=None
        Where the mode search starts, at which the fit starts; None means the origin.
    max_iter : int, default=60
        Steps, each of max(4 d, 64) draws and a few products of (d, d) matrices.
    device : str or torch.device, default="auto"
        Where to compute; "auto" is the device of the target's tensors, or the CPU.
    dtype : {"float32", "float64"}, default="float64"
        Type of the draws; the fit is in float64.
    random_state : int, RandomState or None, default=None
        Seeds the fit and the samples.

    Attributes
    ----------
    mean_ : ndarray of shape (n_features,)
    covariance_ : ndarray of shape (n_features, n_features)
    score_divergence_ : float
        Median over draws x of q of :math:`\|L^\top (s_p(x) - s_q(x))\|^2 / d`, zero if p is Gaussian.
    n_iter_ : int
        Number of steps.
    n_features_in_ : int
        Dimension of the target.
    n_score_calls_, n_products_ : int
        Points at which `fit` evaluated the score or log p, and products with the Jacobian of the score.
    stages_ : list of Stage
        The cost of each stage of `fit`: ``name``, ``n_calls`` and ``seconds``.

    See Also
    --------
    FullRankVI : Gaussian with full covariance.
    Laplace : Gaussian at the mode, the quickest thing to try.

    References
    ----------
    Cai, D. et al. (2024). Batch and match: black-box variational inference with a score-based divergence.
    https://arxiv.org/abs/2402.14758

    Examples
    --------
    >>> from skksivi.baselines import BatchAndMatch
    >>> BatchAndMatch(random_state=0).fit(lambda x: (3 - x) / 4, n_features=1).covariance_.round(6)
    array([[4.]])
    """

    max_iter: int = 60

    def _fit(self, score_fn: Score, run: Run) -> Fit:
        start = at_mode(score_fn, self.init, run.generator)
        matched = batch_and_match(score_fn.double, start, run.generator, self.max_iter)
        divergence = score_divergence(score_fn.double, matched, run.generator)
        return Fit(Gaussian(matched), {"score_divergence_": divergence, "n_iter_": self.max_iter})
