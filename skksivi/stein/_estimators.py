r"""Estimators of the kernel Stein discrepancy as plain formulas, and their gradients in closed form.

For training, the discrepancy of a semi-implicit q needs kernel values only: with
:math:`f = s_p(x) - s_{q(\cdot|z)}(x)`,

.. math:: \mathrm{KSD}(q\|p)^2 = E\left[k(x, x') \langle f, f' \rangle\right].

To evaluate any sample, it is the mean of the Stein kernel :math:`k_p`, which needs the score of p alone.
Leading axes of the inputs are kept: they are the layers of a hierarchy.

**In closed form.** With :math:`t_{ij} = \|x_i - y_j\|^2 / h^2`, :math:`k = \varphi(t)` and :math:`A = F G^\top`, the
estimate is :math:`L = w \sum_{ij} A_{ij} k_{ij}`, and with :math:`E = A \varphi'(t)`,

.. math::
    \frac{\partial L}{\partial F} = w\, k\, G, \qquad
    \frac{\partial L}{\partial x_i} = \frac{2 w}{h^2} \sum_j E_{ij} (x_i - y_j), \qquad
    \frac{\partial L}{\partial h^2} = -\frac{1}{2 h^2} \sum_i x_i^\top \frac{\partial L}{\partial x_i},

the last because L is a function of x / h. A median bandwidth passes it to the two draws whose distance is the median.
Rows are taken in tiles: memory is O(tile * N + N d), and no (N, N, d) tensor exists. The plain formulas
are the specification.

**The path gradient** of KL(q || p) takes no product with the Jacobian of the score. At draws x of q the divergence
descends most steeply along :math:`s_p - s_q`. The score of q is not known, but its kernel average is, by Stein's
identity :math:`E_q[k(x, y) s_q(y) + \nabla_y k(x, y)] = 0`, so that

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

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.kernels import MAX_MEDIAN_DRAWS, Kernel, centre, median_pair


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


#: Of the powers 1/8, 1/4 and 1/2 the best from eight wrong starts, `benchmarks/training_variants.json`.
POWER = 0.25


def normalized(x: Tensor, f: Tensor, kernel: Kernel) -> Tensor:
    r"""Return the U-statistic under :math:`k(x, y) (r(x)\, r(y))^{-1/4}`, with r the row means of k, held fixed.

    This kernel is positive definite, too. Both draws of a pair are of q, so that a tail counts by its mass squared;
    r follows the density of q, so that it counts by more here.
    """
    return u_statistic(x, _row_weights(x, kernel) * f, kernel)


def _row_weights(x: Tensor, kernel: Kernel) -> Tensor:
    """Return r^-POWER, (..., n, 1), of means over the first draws; one where a kernel grows with the distance."""
    x, n = x.detach(), x.shape[-2]
    if kernel.centred:
        return torch.ones_like(x[..., :1])
    r = kernel(x, None if n <= MAX_MEDIAN_DRAWS else x[..., :MAX_MEDIAN_DRAWS, :]).abs().mean(-1, keepdim=True)
    return r.clamp_min((r.amax(-2, keepdim=True) / n).clamp_min(torch.finfo(r.dtype).tiny)) ** -POWER


class GradientEstimator(NamedTuple):
    """An estimate of KSD^2 and the number of batches of draws that it takes."""

    estimate: Callable[[Tensor, Tensor, Kernel], Tensor]
    n_batches: int


GRADIENT_ESTIMATORS = {
    "u-statistic": GradientEstimator(u_statistic, n_batches=1),
    "vanilla": GradientEstimator(vanilla, n_batches=2),
    "normalized": GradientEstimator(normalized, n_batches=1),
}


# The paper's two in closed forms, value and gradients in one pass

#: Entries of a tile: on a CPU it stays in the cache, on a GPU it keeps the device busy.
TILE_ENTRIES = defaultdict(lambda: 2**26, cpu=2**16)
MIN_TILE_ROWS = 64


def value_and_gradients(
    x: Tensor, f: Tensor, kernel: Kernel, estimator: GradientEstimator
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `estimator.estimate(x, f, kernel)` and its gradients.

    Parameters
    ----------
    x, f : Tensor of shape (..., estimator.n_batches * n, d)
        Leading axes are independent problems, the layers of a hierarchy.
    kernel : Kernel
        A kernel of other than Euclidean distances is evaluated by the plain formula.
    estimator : GradientEstimator
        An estimator that is not in `GRADIENT_ESTIMATORS` is evaluated by the plain formula.

    Returns
    -------
    value : Tensor of shape (...)
    dx, df : Tensors of the shape of x
        The gradients of each layer's value.
    """
    if estimator.estimate is normalized:
        r = _row_weights(x, kernel)
        value, dx, dg = value_and_gradients(x, r * f, kernel, GRADIENT_ESTIMATORS["u-statistic"])
        return value, dx, r * dg
    kernel, g, pullback = kernel.weighted(x, f)
    if not kernel.euclidean or estimator.estimate not in (u_statistic, vanilla):
        value, dx, dg = _by_autograd(x, g, kernel, estimator)
        return value, *pullback(dx, dg)
    layers, (n, d) = x.shape[:-2], x.shape[-2:]
    value, dx, dg = _fused(x.reshape(-1, n, d), g.reshape(-1, n, d), kernel, within=estimator.n_batches == 1)
    return value.view(layers), *pullback(dx.view(x.shape), dg.view(x.shape))


def _by_autograd(x: Tensor, f: Tensor, kernel: Kernel, estimator: GradientEstimator) -> tuple[Tensor, Tensor, Tensor]:
    x, f = x.detach().requires_grad_(), f.detach().requires_grad_()
    with torch.enable_grad():
        value = estimator.estimate(x, f, kernel)
        dx, df = torch.autograd.grad(value.sum(), (x, f))
    return value.detach(), dx, df


def _fused(x: Tensor, f: Tensor, kernel: Kernel, *, within: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return L of shape (l,) and its gradients in `x` and `f` (l, n, d), which hold two halves unless `within`."""
    n, d = x.shape[1] if within else x.shape[1] // 2, x.shape[2]
    w = 1 / (n * (n - 1) if within else n * n)
    centred = x - centre(x)
    left, right = _factors(centred)
    u, v = _halves(left, within)[0], _halves(right, within)[1]
    width = _Width(u, v, kernel, within=within)
    offset = _Offset(x, f, width.scale, kernel, within) if kernel.centred else None

    x1, f = _stored(left[:, :, : d + 1]), _stored(f)
    sums, df = torch.zeros_like(x1), torch.zeros_like(f)
    (u1, v1), (f_u, g), (sums_u, sums_v), (df_u, dg) = (_halves(a, within) for a in (x1, f, sums, df))
    step = min(n, max(MIN_TILE_ROWS, TILE_ENTRIES[x.device.type] // n))
    for start in range(0, n, step):
        u_i, u1_i, f_i, sums_i, df_i = (_rows(a, start, step) for a in (u, u1, f_u, sums_u, df_u))
        t = width.scaled_distances(u_i, v)
        k = kernel.profile(t)
        e = kernel.slope(t, k)
        a = torch.bmm(f_i, g.mT)
        if within:  # a draw does not pair with itself
            a.diagonal(start, 1, 2).zero_()
        if offset is not None:
            k = offset.add(k, start)
        if within:
            k.diagonal(start, 1, 2).zero_()
        e.mul_(a)
        df_i.baddbmm_(k, g)
        sums_i.baddbmm_(e, v1)
        if not within:
            dg.baddbmm_(k.mT, f_i)
            sums_v.baddbmm_(e.mT, u1_i)
    ends = 2 if within else 1  # within one batch each pair is visited once and has two ends
    df.mul_(w * ends)
    dx = (sums[:, :, d:] * centred).sub_(sums[:, :, :d])
    if offset is not None:
        offset.pull(dx)
    dx.mul_(2 * w * ends * width.scale)
    width.pull(dx, centred if offset is None else x)
    value = torch.linalg.vecdot(f_u.flatten(1), df[:, :n].flatten(1))
    return value / 2 if within else value, dx, df


class _Width:
    """The bandwidth of a kernel: `scale` is 1 / h^2, (l, 1, 1); `pull` sends its gradient back to the median pair."""

    def __init__(self, u: Tensor, v: Tensor, kernel: Kernel, *, within: bool) -> None:
        n, m = u.shape[1], MAX_MEDIAN_DRAWS
        self.n, self.block = n, None
        if not isinstance(kernel.bandwidth, str):
            self.scale = u.new_full((1, 1, 1), 1 / kernel.fixed_squared_bandwidth(u))
            return
        self.block = _squared_distances(_rows(u, 0, m), _rows(v, 0, m))
        median, i, j = median_pair(self.block, within=within)
        h2 = kernel.median_squared_bandwidth(median, n)
        self.scale = h2.reciprocal()[:, None, None]
        self.pair = torch.stack([i, j if within else j + n], 1)[:, :, None]
        sets_width = median >= 0.999 * kernel.median_level(n) * h2  # otherwise the floor of h^2 sets it
        self.inverse_median = sets_width / median.clamp_min(torch.finfo(median.dtype).tiny)

    def scaled_distances(self, u: Tensor, v: Tensor) -> Tensor:
        """Return t of the draws u; if these are all draws, the median has already computed their distances."""
        if self.block is not None and self.block.shape[1] == u.shape[1] == self.n:
            return self.block.mul_(self.scale)
        return _squared_distances(u, v).mul_(self.scale)

    def pull(self, dx: Tensor, x: Tensor) -> None:
        """Add to dx the gradient through the median D = |x_i - x_j|^2, dL/dD = -<x, dx> / (2 D)."""
        if self.block is None:
            return
        index = self.pair.expand(-1, -1, x.shape[2])
        twice_dD = (torch.linalg.vecdot(x.flatten(1), dx.flatten(1)) * self.inverse_median)[:, None, None]
        gap = x.gather(1, index).diff(dim=1).mul_(twice_dD)  # x_j - x_i
        dx.scatter_add_(1, index, torch.cat([gap, -gap], 1))


class _Offset:
    """What a centred kernel adds to phi(|x - y|^2 / h^2): o(x) + o(y) with o(x) = -phi(|x|^2 / h^2), (l, n, 1)."""

    def __init__(self, x: Tensor, f: Tensor, scale: Tensor, kernel: Kernel, within: bool) -> None:
        t = x.square().sum(2, keepdim=True) * scale
        phi = kernel.profile(t)
        self.x, self.slope, (self.o_u, self.o_v) = x, kernel.slope(t, phi), _halves(-phi, within)
        self.sums = (f * _sum_of_others(f, within)).sum(2, keepdim=True)  # of the <f, f'> of each draw

    def add(self, k: Tensor, start: int) -> Tensor:
        """Add the offsets to the rows k of the kernel from `start` on."""
        return k.add_(self.o_u[:, start : start + k.shape[1]]).add_(self.o_v.mT)

    def pull(self, dx: Tensor) -> None:
        """Add this part of the gradient in x, without the factor 2 w / h^2, to dx."""
        dx.addcmul_(self.slope * self.sums, self.x, value=-1)


def _sum_of_others(f: Tensor, within: bool) -> Tensor:
    """Return the sum of the f' that each f (l, n, d) is paired with."""
    if within:
        return f.sum(1, keepdim=True) - f
    halves = f.unflatten(1, (2, -1))
    return halves.sum(2, keepdim=True).flip(1).expand_as(halves).flatten(1, 2)


def _factors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (x, 1, |x|^2) and (-2 x, |x|^2, 1), both (l, n, d + 2), whose products are squared distances."""
    norms = x.square().sum(2, keepdim=True)
    one = torch.ones_like(norms)
    return torch.cat([x, one, norms], 2), torch.cat([-2 * x, norms, one], 2)


def _squared_distances(u: Tensor, v: Tensor) -> Tensor:
    """Return |u_i - v_j|^2 from the factors of either side."""
    return torch.bmm(u, v.mT).clamp_min_(0)


def _stored(a: Tensor) -> Tensor:
    """Return a (l, n, c), stored by columns if they are few: products with it are several times as fast."""
    return a.mT.contiguous().mT if a.shape[2] <= 9 else a  # few columns are stored by columns


def _halves(a: Tensor, within: bool) -> tuple[Tensor, Tensor]:
    """Return the two batches of draws, which are the same one if `within`."""
    if within:
        return a, a
    n = a.shape[1] // 2
    return a[:, :n], a[:, n:]


def _rows(a: Tensor, start: int, step: int) -> Tensor:
    return a if a.shape[1] <= step else a[:, start : start + step]


# The kernelised path gradient

#: Draws that are kept, if batches are large.
N_DRAWS = 2560


@dataclass(eq=False)
class Memory:
    """The draws of the last iterations, with the scores of the target there.

    Parameters
    ----------
    x, s : Tensor of shape (..., m, d)
        Oldest first; leading axes are the layers of a hierarchy.
    """

    x: Tensor
    s: Tensor

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
    if kernel.centred or not kernel.euclidean:
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
