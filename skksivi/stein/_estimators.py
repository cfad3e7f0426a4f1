r"""Estimators of the kernel Stein discrepancy as plain formulas, which specify the fused ones.

For training, the discrepancy of a semi-implicit q needs kernel values only: with
:math:`f = s_p(x) - s_{q(\cdot|z)}(x)`,

.. math:: \mathrm{KSD}(q\|p)^2 = E\left[k(x, x') \langle f, f' \rangle\right].

To evaluate any sample, it is the mean of the Stein kernel :math:`k_p`, which needs the score of p alone.
Leading axes of the inputs are kept: they are the layers of a hierarchy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from skksivi.kernels import Kernel


def vanilla(x: Tensor, f: Tensor, kernel: Kernel) -> Tensor:
    r"""Return :math:`N^{-2} \sum_{ij} k(x_{1i}, x_{2j}) \langle f_{1i}, f_{2j} \rangle` over two halves of 2N rows.

    The gradient is the paper's Eq. (sto_grad).
    """
    (x1, x2), (f1, f2) = x.chunk(2, -2), f.chunk(2, -2)
    return (kernel(x1, x2) * (f1 @ f2.mT)).mean((-2, -1))


def u_statistic(x: Tensor, f: Tensor, kernel: Kernel) -> Tensor:
    r"""Return :math:`\frac{1}{N(N-1)} \sum_{i \ne j} k(x_i, x_j) \langle f_i, f_j \rangle` over N rows.

    The gradient is the paper's Eq. (sto_grad_u).
    """
    n = x.shape[-2]
    terms = kernel(x) * (f @ f.mT)
    return (terms.sum((-2, -1)) - terms.diagonal(dim1=-2, dim2=-1).sum(-1)) / (n * (n - 1))


class GradientEstimator(NamedTuple):
    """An estimate of KSD^2 and the number of batches of draws that it takes."""

    estimate: Callable[[Tensor, Tensor, Kernel], Tensor]
    n_batches: int


GRADIENT_ESTIMATORS = {
    "u-statistic": GradientEstimator(u_statistic, n_batches=1),
    "vanilla": GradientEstimator(vanilla, n_batches=2),
}
