r"""Stein control variates: functions of draws and their scores that have mean zero.

By Stein's identity :math:`E[s(x)^\top g(x) + \nabla \cdot g(x)] = 0` under the density whose score is s.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Draws for each control variate, at least, and the ridge in units of the variance of a control variate.
N_OF_EACH, RIDGE = 20, 1e-3


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

    :math:`\beta` is the regression of y on the control variates f (n, p), with a small ridge.

    References
    ----------
    Assaraf, R. and Caffarel, M. (1999). Zero-variance principle for Monte Carlo algorithms. Physical Review Letters
    83(23).
    Mira, A., Solgi, R. and Imparato, D. (2013). Zero variance Markov chain Monte Carlo for Bayesian estimators.
    Statistics and Computing 23(5).
    """
    f = features - features.mean(0)
    gram = f.mT @ f + (RIDGE * f.square().sum(0) + torch.finfo(f.dtype).tiny).diag()
    return y - features @ torch.linalg.solve(gram, f.mT @ (y - y.mean(0)))
