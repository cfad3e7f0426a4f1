r"""Stein control variates: functions of draws and their scores that have mean zero.

By Stein's identity :math:`E[s(x)^\top g(x) + \nabla \cdot g(x)] = 0` under the density whose score is s.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Draws for each control variate, at least, and folds of the draws.
N_OF_EACH, N_FOLDS = 20, 10


def stein_features(u: Tensor, s: Tensor) -> Tensor:
    r"""Return control variates (n, p) of draws u (n, d) with scores s.

    These are :math:`s_i` and :math:`s_i u_j + \delta_{ij}`, of the latter those with i = j alone where draws are few.
    """
    n, d = u.shape
    if N_OF_EACH * (d * d + d) > n:
        return torch.cat([s, s * u + 1], 1)
    products = s[:, :, None] * u[:, None] + torch.eye(d).to(u)
    return torch.cat([s, products.flatten(1)], 1)


def second_order(u: Tensor, s: Tensor, i: Tensor, j: Tensor) -> Tensor:
    r"""Return control variates :math:`\tfrac12 (u_i s_j + u_j s_i) + \delta_{ij}`, for pairs of indices (p,)."""
    return (u[:, i] * s[:, j] + u[:, j] * s[:, i]) / 2 + (i == j).to(u)


def controlled(y: Tensor, features: Tensor) -> Tensor:
    r"""Return :math:`y - \beta^\top f`, values y (n, m) of the same means and less spread.

    References
    ----------
    Assaraf, R. and Caffarel, M. (1999). Zero-variance principle for Monte Carlo algorithms. Physical Review Letters
    83(23).
    Mira, A., Solgi, R. and Imparato, D. (2013). Zero variance Markov chain Monte Carlo for Bayesian estimators.
    Statistics and Computing 23(5).
    """
    n, mean = len(y), y.mean(0)
    fold = torch.arange(n, device=y.device) * N_FOLDS // n
    return mean + cross_fitted(y - mean, features, torch.ones_like(y[:, 0]), fold)


def cross_fitted(y: Tensor, f: Tensor, v: Tensor, fold: Tensor) -> Tensor:
    r"""Return :math:`y - \beta^\top f` (n, m), with the regression of weights v (n,) on the other folds.

    On its own it would fit what is rare, as the draws in a tail, and hide its share in the mean.
    """
    f = f / ((v @ f.square()) / v.sum()).sqrt().clamp_min(torch.finfo(f.dtype).tiny)
    design = torch.cat([torch.ones_like(f[:, :1]), f], 1)
    scaled = design * v[:, None]
    gram, moments = scaled.mT @ design, scaled.mT @ y
    gram.diagonal().add_(1e-12 * v.sum())
    r = y.clone()
    for i in (fold == k for k in range(N_FOLDS)):
        beta = torch.linalg.solve(gram - scaled[i].mT @ design[i], moments - scaled[i].mT @ y[i])[1:]
        r[i] -= f[i] @ beta
    return r
