r"""The estimators of `_stein`, value and gradients in one pass of closed forms.

With :math:`t_{ij} = \|x_i - y_j\|^2 / h^2`, :math:`k = \varphi(t)` and :math:`A = F G^\top`, the estimate is
:math:`L = w \sum_{ij} A_{ij} k_{ij}`, and with :math:`E = A \varphi'(t)`,

.. math::
    \frac{\partial L}{\partial F} = w\, k\, G, \qquad
    \frac{\partial L}{\partial x_i} = \frac{2 w}{h^2} \Big(x_i \sum_j E_{ij} - \sum_j E_{ij} y_j\Big), \qquad
    \frac{\partial L}{\partial h^2} = -\frac{w}{h^2} \sum_{ij} E_{ij} t_{ij}.

A median width hands the last one on to the two draws whose distance is the median. Rows are taken in tiles:
memory is O(tile * N + N d), and no (N, N, d) tensor exists. The plain formulas of `_stein` are the specification.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from skksivi._stein import GradientEstimator
from skksivi.kernels import MAX_MEDIAN_DRAWS, Kernel, median_pair, squared_distances

#: Entries of a tile: on a CPU it stays in the cache, on a GPU it keeps the device busy.
TILE_ENTRIES = defaultdict(lambda: 2**26, cpu=2**16)
MIN_TILE_ROWS = 64

#: Columns up to which a product with a tall thin matrix is faster transposed.
THIN = 8


def fused_ksd(x: Tensor, f: Tensor, kernel: Kernel, estimator: GradientEstimator) -> Tensor:
    """Compute `estimator.estimate(x, f, kernel)`, once differentiable in x and f.

    Parameters
    ----------
    x, f : Tensor of shape (..., estimator.n_batches * n, d)
    kernel : Kernel
        One of other than Euclidean distances goes through the plain formula.
    estimator : GradientEstimator

    Returns
    -------
    value : Tensor of shape (...)
    """
    if not kernel._euclidean:
        return estimator.estimate(x, f, kernel)
    return _FusedKSD.apply(x, f, kernel, estimator.n_batches)


class _FusedKSD(torch.autograd.Function):
    """The gradients are at hand once the value is; the backward pass only scales them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Tensor, kernel: Kernel, n_batches: int) -> Tensor:
        layers = x.shape[:-2]
        x3, f3 = x.flatten(0, -3) if layers else x[None], f.flatten(0, -3) if layers else f[None]
        value, dx, df = _value_and_gradients(x3, f3, kernel, n_batches)
        ctx.save_for_backward(dx.view_as(x), df.view_as(f))
        return value.view(layers)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dx, df = ctx.saved_tensors
        grad = grad[..., None, None]
        return grad * dx, grad * df, None, None


def _value_and_gradients(x: Tensor, f: Tensor, kernel: Kernel, n_batches: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return L of shape (l,) and its gradients in `x` and `f`, all three of shape (l, n_batches * n, d)."""
    within = n_batches == 1
    n = x.shape[-2] // n_batches
    w = 1 / (n * (n - 1) if within else n * n)
    first, second = slice(0, n), slice(0, n) if within else slice(n, 2 * n)
    centred = x - x.mean(-2, keepdim=True)
    h2, send_back = _width(centred[:, first], centred[:, second], kernel, within)
    u = centred * h2.rsqrt()
    offset, offset_slope = _offsets(x * h2.rsqrt(), kernel)

    value, dh2 = x.new_zeros(len(x)), x.new_zeros(len(x))
    dx, df = torch.zeros_like(x), torch.zeros_like(f)
    a_sums = torch.zeros_like(x[..., 0])
    step = max(MIN_TILE_ROWS, TILE_ENTRIES[x.device.type] // n)
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        t = _squared(u[:, rows], u[:, second])
        k = kernel._profile(t)
        e = kernel._slope(t, k)
        a = f[:, rows] @ f[:, second].mT
        if offset is not None:
            k += offset[:, rows, None] + offset[:, None, second]
        if within:  # a draw is no pair with itself
            k.diagonal(start, -2, -1).zero_()
            a.diagonal(start, -2, -1).zero_()
        e *= a
        value += _dot(a, k)
        dh2 -= _dot(e, t)
        df[:, rows] = _product(k, f[:, second])
        dx[:, rows] = e.sum(-1, keepdim=True) * u[:, rows] - _product(e, u[:, second])
        if not within:
            df[:, second] += _product(k.mT, f[:, rows])
            dx[:, second] += e.sum(-2).unsqueeze(-1) * u[:, second] - _product(e.mT, u[:, rows])
        if offset is not None:
            a_sums[:, rows] += a.sum(-1)
            a_sums[:, second] += a.sum(-2)
    if within:  # each pair was met once, and has two ends
        dx, df = 2 * dx, 2 * df
    if offset_slope is not None:
        r = x * h2.rsqrt()
        dx += (offset_slope * a_sums).unsqueeze(-1) * r
        dh2 -= (offset_slope * a_sums * r.square().sum(-1)).sum(-1)
    dx *= 2 * w * h2.rsqrt()
    send_back(dx, w * dh2 / h2[:, 0, 0])
    return w * value, dx, w * df


def _width(x: Tensor, y: Tensor, kernel: Kernel, within: bool) -> tuple[Tensor, Callable[[Tensor, Tensor], None]]:
    """Return h^2 (l, 1, 1) and the function that adds the gradient dL/dh^2 to that of the draws."""
    kernel._check()
    if not isinstance(kernel.bandwidth, str):
        h2 = x.new_full((1, 1, 1), float(kernel.bandwidth) ** 2)
        return h2, lambda *_: None
    n = x.shape[-2]
    block = squared_distances(x[:, :MAX_MEDIAN_DRAWS], y[:, :MAX_MEDIAN_DRAWS])
    median, i, j = median_pair(block, within=within)
    h2 = kernel._from_median(median, n)
    layer = torch.arange(len(x), device=x.device)

    def send_back(dx: Tensor, dh2: Tensor) -> None:
        level = kernel._median_level(n)
        slope = torch.where(median / level < h2, 0.0, dh2 / level)  # zero where the floor holds
        pull = 2 * slope[:, None] * (x[layer, i] - y[layer, j])
        dx[layer, i] += pull
        dx[layer, j if within else j + n] -= pull

    return h2[:, None, None], send_back


def _offsets(r: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return what a centred kernel adds to a row of k, -phi(|r|^2), and the derivative in |r|^2."""
    if not kernel._centred:
        return None, None
    t = r.square().sum(-1)
    phi = kernel._profile(t)
    return -phi, -kernel._slope(t, phi)


def _squared(u: Tensor, v: Tensor) -> Tensor:
    """Return the squared distances (l, n, m) of centred rows, in few passes."""
    t = torch.baddbmm(v.square().sum(-1).unsqueeze(-2), u, v.mT, alpha=-2)
    return t.add_(u.square().sum(-1, keepdim=True)).clamp_min_(0)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of a * b over all but the first axis."""
    return torch.linalg.vecdot(a.flatten(1), b.flatten(1))


def _product(e: Tensor, y: Tensor) -> Tensor:
    """Return e @ y for a wide e; transposed where y is thin, which is several times faster."""
    return (y.mT.contiguous() @ e.mT).mT if y.shape[-1] <= THIN else e @ y
