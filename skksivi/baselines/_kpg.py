"""Semi-implicit variational inference by the kernelised path gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from skksivi.base import Constraints
from skksivi.baselines._points import RADIAL, radial_kernel
from skksivi.baselines._semi_implicit import LayerDraws, SemiImplicitVI
from skksivi.families._layer import SemiImplicit
from skksivi.kernels import Kernel
from skksivi.parameters import Adam
from skksivi.score._score import DifferentiableScore
from skksivi.training._loop import Objective, Scheduled


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
    importance_sampling : bool, default=False
        Whether the average has weights that sum to one.
    kernel : {"gaussian", "imq", "laplace"} or Kernel, default="gaussian"
        The kernel k, a function of the distance.
    bandwidth : float, "median" or None, default=None
        Its width in whitened units; None leaves it to `kernel`, whose default is the median heuristic.
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

    _adam: ClassVar[Adam] = Adam(betas=(0.9, 0.999), ema=None)

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
