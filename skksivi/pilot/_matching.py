r"""Gaussian mixtures that also match the scores of a target, which have been evaluated anyway.

With points u_i of a target and its scores s_i there, a mixture q minimises

.. math:: \frac1n \sum_i \Big( -\log q(u_i) + \tfrac12 \| \nabla \log q(u_i) - s_i \|^2 \Big),

likelihood, which is sensitive to weights, plus Fisher divergence, to which each point contributes d numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from skksivi.pilot._mixture import Components


class MatchingSettings(NamedTuple):
    """The settings of `score_matched`."""

    #: Largest number of points, and the share of them for validation.
    n_points: int = 4000
    held_out: float = 0.25
    #: The weight of the divergence.
    weight: float = 0.3
    #: Iterations, and the most features.
    n_iter: int = 40
    max_features: int = 60
    #: Largest contribution of a point, in squared differences of scores per feature.
    most: float = 50.0


MATCHING = MatchingSettings()


class MixtureParameters(NamedTuple):
    r"""The parameters of a mixture: log-weights (k,), means (k, d), and L (k, d, d) with precisions :math:`L L^\top`,
    whose diagonal is stored as logarithms.
    """

    log_weights: Tensor
    means: Tensor
    roots: Tensor

    @classmethod
    def of(cls, mixture: Components) -> MixtureParameters:
        """Return the parameters of a mixture."""
        L = torch.linalg.cholesky(torch.linalg.inv(mixture.covariances))
        logs = L.diagonal(dim1=1, dim2=2).log()
        return cls(mixture.weights.log(), mixture.means.clone(), L.tril(-1) + torch.diag_embed(logs))

    def factors(self) -> Tensor:
        """Return L (k, d, d)."""
        return self.roots.tril(-1) + torch.diag_embed(self.roots.diagonal(dim1=1, dim2=2).exp())

    def mixture(self) -> Components:
        """Return the mixture."""
        covariances = torch.cholesky_inverse(self.factors())
        return Components(self.log_weights.softmax(0), self.means, (covariances + covariances.mT) / 2)

    def losses(self, u: Tensor, s: Tensor) -> Tensor:
        """Return the terms (n,) of the objective, of points u (n, d) and scores s (n, d)."""
        L, d = self.factors(), u.shape[1]
        z = (u - self.means[:, None]) @ L  # (k, n, d)
        heights = self.log_weights.log_softmax(0) + self.roots.diagonal(dim1=1, dim2=2).sum(1)
        log_parts = heights[:, None] - z.square().sum(2) / 2
        own = -(log_parts.softmax(0)[:, :, None] * (z @ L.mT)).sum(0)
        gaps = (own - s).square().sum(1).clamp_max(MATCHING.most * d)
        return MATCHING.weight * gaps / 2 - log_parts.logsumexp(0) + d / 2 * math.log(2 * math.pi)


def score_matched(mixture: Components, u: Tensor, s: Tensor, generator: torch.Generator) -> Components:
    """Return a mixture moved to match also scores s (n, d) at points u (n, d), if held-out points confirm it.

    References
    ----------
    Hyvarinen, A. (2005). Estimation of non-normalized statistical models by score matching. JMLR 6.
    """
    if u.shape[1] > MATCHING.max_features:
        return mixture
    rows = torch.randperm(len(u), generator=generator, device=u.device)[: MATCHING.n_points]
    n_held_out = int(MATCHING.held_out * len(rows))
    u_held_out, s_held_out = u[rows[:n_held_out]], s[rows[:n_held_out]]
    u, s = u[rows[n_held_out:]], s[rows[n_held_out:]]
    start = MixtureParameters.of(mixture)
    found = MixtureParameters(*(a.clone().requires_grad_() for a in start))
    optimizer = torch.optim.LBFGS(found, max_iter=MATCHING.n_iter, history_size=20, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = found.losses(u, s).mean()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    found = MixtureParameters(*(a.detach() for a in found))
    before, after = (a.losses(u_held_out, s_held_out).mean() for a in (start, found))
    return found.mixture() if after < before else mixture
