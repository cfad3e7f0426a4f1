"""The two stages of the training of a conditional family: places, and mixture."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from sklearn.linear_model import RidgeCV
from sklearn.mixture import GaussianMixture
from torch import Tensor, nn

from skksivi._utils.arrays import as_array, as_tensor
from skksivi.amortized._contexts import Laplaces, Rows, take
from skksivi.amortized._family import Conditional, SkipNetwork, factor_parts

#: Steps of a training, at most.
MOST_STEPS = 6000

#: The share of the epochs that may pass without a better held-out value before a training ends, if the value is not
#: falling: at a high rate it may rise at once, and fall again.
PATIENCE = 0.25

#: What counts as the logarithm of a density, at least.
LEAST = -1e4


class Split(NamedTuple):
    """Numbers of rows for training and those that are held out."""

    train: Tensor
    held_out: Tensor


def split(n: int, generator: torch.Generator) -> Split:
    order = torch.randperm(n, generator=generator, device=generator.device)
    n_held = round(0.2 * n)
    return Split(order[n_held:], order[:n_held])


# Places: the exact divergence between Gaussians


def divergence(m: Tensor, L: Tensor, target: Laplaces) -> Tensor:
    r"""Return :math:`KL(N(m, L L^\top) \| N(m_i, P_i^{-1}))` (n,) of m (n, d) and L (n, d, d)."""
    gap, d = (m - target.m)[..., None], m.shape[1]
    quadratic = (gap.mT @ target.P @ gap)[:, 0, 0]
    trace = (target.P @ L).mul(L).sum((1, 2))
    log_det = 2 * L.diagonal(dim1=1, dim2=2).log().sum(1) + torch.logdet(target.P)
    return (quadratic + trace - d - log_det) / 2


def start_places(family: Conditional, h: Tensor, found: Laplaces) -> None:
    """Let m(h) and L(h) be the ridge regressions of the modes, and of the factors there, on h (n, p)."""
    L = torch.linalg.cholesky(torch.linalg.inv(found.P))
    log_D, lower = factor_parts(L)
    spread = torch.hypot(found.m.std(0, correction=0), log_D.exp().mean(0))
    family.m0.copy_(found.m.mean(0))
    family.s0.copy_(spread)
    family.l0.copy_(log_D.mean(0))
    values = [(found.m - family.m0) / spread, log_D - family.l0]
    if family.triangle is None:
        values.append(lower)
    else:
        with torch.no_grad():
            family.triangle.copy_(lower.mean(0))
    ridge_start(family.place.linear, h, torch.cat(values, 1))


@torch.no_grad()
def ridge_start(linear: nn.Linear, h: Tensor, values: Tensor) -> None:
    """Set a linear map to the ridge regression of values (n, k) on h (n, p), each with its own penalty."""
    constant = values.std(0, correction=0) <= 1e-10
    linear.weight.zero_()
    linear.bias.copy_(values.mean(0))
    if len(h) < 3 or constant.all():
        return
    moving = as_array(values[:, ~constant])
    fitted = RidgeCV(torch.logspace(-8, 3, 12).tolist(), alpha_per_target=True).fit(as_array(h), moving)
    linear.weight[~constant] = as_tensor(fitted.coef_.reshape(moving.shape[1], -1)).to(h)
    linear.bias[~constant] = as_tensor(fitted.intercept_.reshape(-1)).to(h)


@torch.no_grad()
def places_of_parameters(family: Conditional, y: Rows, x: Tensor) -> None:
    """Let m(h) be the ridge regression of parameters x (n, d) on h, and L the factor of what that leaves."""
    d, h = family.n_features, family.features(y)
    family.place = SkipNetwork.like(family.place)
    start_places(family, h, Laplaces(x, torch.eye(d).to(x).expand(len(x), d, d), torch.arange(len(x))))
    rest = x - family.places(h).m
    covariance = rest.mT @ rest / len(rest) + 1e-10 * torch.eye(d).to(x)
    log_D, lower = factor_parts(torch.linalg.cholesky(covariance))
    family.l0.copy_(log_D)
    (family.place.linear.bias[2 * d :] if family.triangle is None else family.triangle).copy_(lower)


def fit_places(family: Conditional, y: Rows, found: Laplaces, rate: float, generator: torch.Generator) -> float:
    """Regress maps on contexts; return the held-out divergence per feature, infinite where there are too few."""
    rows, d = split(len(found.m), generator), family.n_features
    own = take(y, found.numbers)

    def loss(index: Tensor) -> Tensor:
        h = family.features(take(own, index))
        return divergence(*family.places(h), found.rows(index)).mean() / d

    with torch.no_grad():
        h = family.features(own)
    start_places(family, h[rows.train], found.rows(rows.train))
    if len(found.m) < 20:  # too few to train a network
        start_places(family, h, found)
        return math.inf
    parts = [family.place, *([] if family.summary is None else [family.summary])]
    return train(loss, parts, rows, 1000, rate, generator)  # few, as they are fitted after each round of searches


def train(
    loss: Callable[[Tensor], Tensor],
    parts: list[nn.Module],
    rows: Split,
    fewest: int,
    rate: float,
    generator: torch.Generator,
) -> float:
    """Minimise a mean over rows by Adam, with at least `fewest` steps scheduled; return the best held-out value.

    The rate falls as a cosine. The parameters of the best epoch are kept, the start included; the training ends when
    the held-out value has not improved for a quarter of the epochs, and is not falling. A loss that is not finite
    ends nothing. The decay of the weights corresponds to a prior, and falls with the number of rows.
    """
    parameters = [p for part in parts for p in part.parameters()]
    with torch.no_grad():
        best = loss(rows.held_out).item()
    kept, n = [p.detach().clone() for p in parameters], len(rows.train)
    size = min(200, max(100, n // 80))  # some 80 minibatches, of 100 to 200 rows
    n_batches = -(-n // size)
    n_epochs = min(1000, -(-min(MOST_STEPS, max(fewest, 75 * n_batches)) // n_batches))
    optimiser = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.1 * min(1.0, 1000 / n))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, partial(_share_of_rate, n_epochs * n_batches))
    # all orders at once, so that an early end changes no later random number
    orders = [torch.randperm(n, generator=generator, device=generator.device) for _ in range(n_epochs)]
    since: list[float] = []  # held-out values since the best
    for order in orders:
        for index in rows.train[order].split(size):
            optimiser.zero_grad()
            with torch.enable_grad():
                value = loss(index)
                value.backward()
            norm = nn.utils.clip_grad_norm_(parameters, 5.0)
            if torch.isfinite(value + norm):
                optimiser.step()
            schedule.step()
        with torch.no_grad():
            now = loss(rows.held_out).item()
        since.append(now)
        if now < best:
            best, kept, since = now, [p.detach().clone() for p in parameters], []
        if has_stalled(since, PATIENCE * n_epochs):
            break
    _restore(parameters, kept)
    return best


def has_stalled(values: list[float], patience: float) -> bool:
    """Tell whether there are as many values as the patience, and the last of these are on average falling no more."""
    if not values or len(values) < patience:
        return False
    half = max(1, int(patience) // 2)
    earlier, later = values[-2 * half : -half], values[-half:]
    return not sum(later) < sum(earlier)


def _share_of_rate(n_steps: int, step: int) -> float:
    """Return the share of the learning rate at a step, which rises at first and falls to zero."""
    # rises in the first 5% of the steps
    return min(1.0, (step + 1) / (0.05 * n_steps)) * (1 + math.cos(math.pi * step / n_steps)) / 2


@torch.no_grad()
def _restore(parameters: list[nn.Parameter], kept: list[Tensor]) -> None:
    for p, value in zip(parameters, kept, strict=True):
        p.copy_(value)


# Mixture: likelihood and scores of parameters with their contexts


class Pairs(NamedTuple):
    """Points x (n, d) with the scores s (n, d) there, NaN where unknown, and which (n,) are exact draws."""

    x: Tensor
    s: Tensor
    exact: Tensor


@torch.no_grad()
def start_mixture(family: Conditional, y: Rows, x: Tensor, seed: int) -> float:
    """Start the mixture at one of all u = L(h)^-1 (x - m(h)) together, for all h alike; return its log-likelihood."""
    m, L = family.places(family.features(y))
    u = torch.linalg.solve_triangular(L, (x - m)[..., None], upper=False)[..., 0]
    scale = u.abs().quantile(0.99).clamp_min(3.0)
    inside = (u.abs() <= 3 * scale).all(1)
    k = min(family.n_components, int(inside.sum()) // (2 * family.n_features) or 1)
    fitted = GaussianMixture(k, reg_covar=1e-4, random_state=seed).fit(as_array(u[inside]))
    covariances = as_tensor(fitted.covariances_).to(x)
    narrowest = torch.linalg.eigvalsh(covariances)[:, 0].amin()
    family.sigma0.clamp_(max=narrowest.sqrt().item() / 2)
    factors = torch.linalg.cholesky(covariances - family.sigma0.square().diag())
    log_D, lower = factor_parts(factors)
    log_w, means = as_tensor(fitted.weights_).to(x).log(), as_tensor(fitted.means_).to(x)
    parts = torch.cat([log_w[:, None], means, log_D, lower], 1)
    extra = family.n_components - k
    if extra:  # copies of the first, of no weight to speak of
        spare = parts[:1].repeat(extra, 1)
        spare[:, 0] = -5.0
        parts = torch.cat([parts, spare])
    if family.heads is not None:
        family.heads.linear.weight.zero_()
        family.heads.linear.bias.copy_(parts.flatten())
    log_q = as_tensor(fitted.score_samples(as_array(u))).to(x)
    return float((log_q - L.diagonal(dim1=1, dim2=2).log().sum(1)).clamp_min(LEAST).mean())


class Terms(NamedTuple):
    """The weights a and b of `fit_scores`."""

    likelihood: float
    scores: float


def fit_scores(
    family: Conditional, y: Rows, pairs: Pairs, rows: Split, terms: Terms, rate: float, generator: torch.Generator
) -> None:
    r"""Fit the maps and the mixture at points x of contexts y.

    The loss is :math:`-a \log q(x | y) + \tfrac{b}{d} \|L^\top (\nabla \log q(x | y) - s)\|^2` with the weights a
    of the likelihood and b of the scores, the squares bounded. The second term is least where q = p, whatever the
    points are; the first one takes exact draws of the posteriors, such as the parameters that made the contexts.
    """
    d, known, exact = family.n_features, pairs.s.isfinite().all(1), pairs.exact

    def loss(index: Tensor) -> Tensor:
        with torch.enable_grad():
            h, x = family.features(take(y, index)), pairs.x[index].clone().requires_grad_()
            places = family.places(h)
            log_q = family.log_prob(x, h, places)
            s_q = torch.autograd.grad(log_q.sum(), x, create_graph=True)[0]
            L, has = places.L.detach(), known[index]
            gap = ((s_q - pairs.s[index].nan_to_num(0.0, 0.0, 0.0))[:, None] @ L)[:, 0]
            square = 25 * torch.log1p(gap.square().sum(1) / (25 * d))  # as of lengths from which drifts are clipped
            distance = (square * has).sum() / has.sum().clamp_min(1)
            likelihood = (log_q * exact[index]).sum() / exact[index].sum().clamp_min(1)
            return terms.scores * distance - terms.likelihood * likelihood

    parts = [m for m in (family.place, family.heads, family.summary) if m is not None]
    train(loss, parts, rows, 2400, rate, generator)


@torch.no_grad()
def log_probs(family: Conditional, y: Rows, x: Tensor) -> Tensor:
    """Return log q (n,) at points x (n, d) of n contexts, at least `LEAST`."""
    return family.log_prob(x, family.features(y)).nan_to_num(LEAST, LEAST, LEAST).clamp_min(LEAST)
