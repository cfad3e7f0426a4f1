r"""The kernelised path gradient of KL(q || p), which takes no product with the Jacobian of the score.

At draws x of q the divergence descends most steeply along :math:`s_p - s_q`. The score of q is not known, but
its kernel average is, by Stein's identity :math:`E_q[k(x, y) s_q(y) + \nabla_y k(x, y)] = 0`, so that

.. math:: v(x) = \frac{\sum_j k(x, y_j) s_p(y_j) + \nabla_y k(x, y_j)}{\sum_j k(x, y_j)},
    \qquad y_j \sim q,

is the mean of :math:`s_p - s_q` near x, zero everywhere if q = p. The draws y are from the last iterations, so they
cost no further scores.

References
----------
Liu, Q. and Wang, D. (2016). Stein variational gradient descent. https://arxiv.org/abs/1608.04471

Pielok, T., Bischl, B. and Rügamer, D. (2026). Path gradients for semi-implicit variational inference. AISTATS.

Feng, Y., Wang, D. and Liu, Q. (2017). Learning to draw samples with amortized Stein variational gradient descent.
https://arxiv.org/abs/1707.06626
"""

from __future__ import annotations

import torch
from torch import Tensor

from skksivi.kernels import Kernel

#: Draws that are kept, if batches are large.
N_DRAWS = 2560


class Memory:
    """The draws of the last iterations, with the scores of the target there.

    Parameters
    ----------
    x, s : Tensor of shape (..., m, d)
        Oldest first; leading axes are the layers of a hierarchy.
    """

    def __init__(self, x: Tensor, s: Tensor) -> None:
        self.x = x
        self.s = s

    @classmethod
    def empty(cls, like: Tensor) -> Memory:
        return cls(like.new_empty(0, 0), like.new_empty(0, 0))

    def begin(self, x: Tensor, s: Tensor) -> None:
        """Fill the memory with copies of the first draws (..., n, d)."""
        s, times = s.nan_to_num(0.0, 0.0, 0.0), n_batches(x.shape[-2])
        self.x, self.s = (torch.cat([a] * times, -2) for a in (x, s))

    def add(self, x: Tensor, s: Tensor) -> None:
        """Replace the oldest draws by these (..., n, d) with their scores, leaving out any that are not finite."""
        n, finite = x.shape[-2], (x + s).isfinite().all(-1, keepdim=True)
        for kept, new in ((self.x, x), (self.s, s)):
            kept.copy_(torch.cat([kept[..., n:, :], new.where(finite, kept[..., -n:, :])], -2))

    def squared_width(self) -> Tensor:
        """Return the squared bandwidth h^2 (..., 1, 1) that the draws determine."""
        return 0.35**2 * self.x.var(-2).sum(-1)[..., None, None]  # of the root of the summed variances


def n_batches(n: int) -> int:
    """Return how many batches of n draws are kept: each iteration compares its own with all of them."""
    return max(1, min(20, N_DRAWS // n))


def averages(kernel: Kernel) -> bool:
    """Tell whether a kernel is positive with the gradient of its profile, so that it gives local averages."""
    if kernel.centred or kernel.tilted or not kernel.euclidean:
        return False
    return bool((kernel.profile(torch.logspace(-6, 6, 200, dtype=torch.float64, device="cpu")) >= 0).all())


def velocity(x: Tensor, memory: Memory, kernel: Kernel, h2: Tensor | None = None) -> Tensor:
    """Return v (..., n, d) at draws x (..., n, d).

    Parameters
    ----------
    x : Tensor
    memory : Memory
        The draws y with the scores of p there.
    kernel : Kernel
        A positive kernel.
    h2 : Tensor of shape (..., 1, 1), default=None
        Its squared bandwidth; None means its own.
    """
    y, s = memory.x, memory.s
    squared = kernel.squared_distances(x, y)
    if h2 is None:
        h2 = kernel.squared_bandwidth(squared, within=False)
    t = squared / h2
    k = kernel.profile(t)
    e = kernel.slope(t, k) * (-2 / h2)  # so that grad_y k = e (x - y)
    pull = k @ s + e.sum(-1, keepdim=True) * x - e @ y
    return pull / k.sum(-1, keepdim=True).clamp_min(1e-3 * y.shape[-2])  # x that is alone does not move
