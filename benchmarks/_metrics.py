"""Metrics of the paper's tables."""

from __future__ import annotations

import math

import numpy as np
import ot
from sklearn.neighbors import NearestNeighbors


def wasserstein_in_box(X, Y, half_width):
    """Return W2^2 between the rows of X and of Y in the box [-a, a]^d, with equal weights on these rows.

    The few distant draws of a heavy tail, which differ between any two samples, then do not dominate. See Li, L. et
    al. (2023). Sampling with mollified interaction energy descent. https://arxiv.org/abs/2210.13400
    """
    X, Y = (A[(np.abs(A) <= half_width).all(1)] for A in (X, Y))
    return float(ot.emd2([], [], ot.dist(X, Y), numItermax=10**8)) if len(X) else math.nan


def kl_divergence(X, Y, n_neighbors=3):
    r"""Estimate KL(p || q) in nats from samples X of p and Y of q by the distances to their k-th neighbours.

    .. math:: \frac{d}{n} \sum_i \log \frac{\nu_k(x_i)}{\rho_k(x_i)} + \log \frac{m}{n - 1}

    See Wang, Q., Kulkarni, S. and Verdú, S. (2009). Divergence estimation for multidimensional densities via
    k-nearest-neighbor distances. IEEE Transactions on Information Theory 55(5).
    """
    rho = NearestNeighbors(n_neighbors=n_neighbors).fit(X).kneighbors()[0][:, -1]
    nu = NearestNeighbors(n_neighbors=n_neighbors).fit(Y).kneighbors(X)[0][:, -1]
    return float(X.shape[1] * np.mean(np.log(nu / rho)) + math.log(len(Y) / (len(X) - 1)))
