"""Gaussians and mixtures of them, fitted to the points that chains have left near a target, or to its scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from skksivi._utils.arrays import as_array, as_tensor
from skksivi._utils.lazy import keeping_random
from skksivi.coordinates._affine import Affine, standard_normal
from skksivi.coordinates._lines import log_ratio
from skksivi.mixing import GaussianMixtureDraws
from skksivi.score._score import ScoreFunction
from skksivi.score._tally import DivergedError

with keeping_random():
    from scipy.optimize import minimize
    from sklearn.covariance import ledoit_wolf
    from sklearn.mixture import GaussianMixture


#: Largest number of components of all modes, besides one of each.
MAX_COMPONENTS = 64

#: Features beyond which covariances of several components are diagonal, and beyond which there is one component.
#: Up to the last, points are weighed, coordinates warped, and modes found by dense Newton steps.
MOST_FULL, MOST_FEATURES = 60, 200

#: The weight of the Fisher divergence.
FISHER_WEIGHT = 0.3

#: Fits a mixture to points (n, d).
FitMixture = Callable[[np.ndarray], GaussianMixture]


class Components(NamedTuple):
    """The Gaussians of a mixture.

    Attributes
    ----------
    weights : Tensor of shape (k,)
    means : Tensor of shape (k, d)
    covariances : Tensor of shape (k, d, d)
    """

    weights: Tensor
    means: Tensor
    covariances: Tensor

    def common_variances(self) -> Tensor:
        r"""Return variances (d,) of noise that is in every component.

        These are :math:`\lambda v` with :math:`v_i = \min_k 1 / (C_k^{-1})_{ii}` and the largest
        :math:`\lambda \le 1` for which no :math:`C_k - \lambda\, \mathrm{diag}\, v` has a negative eigenvalue.
        """
        v = torch.linalg.inv(self.covariances).diagonal(dim1=1, dim2=2).reciprocal().amin(0)
        scaled = self.covariances / (v.sqrt()[:, None] * v.sqrt())
        return v * torch.linalg.eigvalsh(scaled).amin().clamp_max(1)

    def unwhitened(self, map_: Affine) -> Components:
        """Return the mixture of x = m + L u, given this one of u."""
        return Components(self.weights, map_.unwhiten(self.means), map_.L @ self.covariances @ map_.L.mT)

    def whitened(self, map_: Affine) -> Components:
        """Return the mixture of u, given this one of x = m + L u."""
        half = torch.linalg.solve_triangular(map_.L, self.covariances, upper=False)
        covariances = torch.linalg.solve_triangular(map_.L, half.mT, upper=False)
        return Components(self.weights, map_.whiten(self.means), (covariances + covariances.mT) / 2)

    def map(self) -> Affine:
        """Return the map by mean and covariance."""
        m = self.weights @ self.means
        away = self.means - m
        covariance = torch.einsum("k,kij->ij", self.weights, self.covariances) + (self.weights * away.mT) @ away
        return Affine(m, torch.linalg.cholesky(covariance))

    def with_moments(self, mean: Tensor, root: Tensor) -> Components:
        """Return the mixture moved to a mean (d,) and a covariance with that root (d, d)."""
        return self.whitened(self.map()).unwhitened(Affine(mean, root))

    def with_scales(self, mean: Tensor, sd: Tensor) -> Components:
        """Return the mixture moved to a mean (d,) and standard deviations (d,)."""
        m, L = self.map()
        D = sd / L.norm(dim=1)
        return Components(self.weights, mean + D * (self.means - m), D[:, None] * self.covariances * D)

    @classmethod
    def together(cls, mixtures: Sequence[Components], shares: Sequence[float] | Tensor) -> Components:
        """Return the mixture of mixtures."""
        weights, means, covariances = zip(*mixtures, strict=True)
        weights = tuple(w * share for w, share in zip(weights, shares, strict=True))
        return cls(torch.cat(weights), torch.cat(means), torch.cat(covariances))

    def fitted_to(self, x: Tensor) -> Components:
        """Return the mixture moved towards points x (n, d) by steps of EM, each Gaussian counting as 20 d points.

        References
        ----------
        Cappé, O. et al. (2008). Adaptive importance sampling in general mixture classes. Statistics and Computing
        18(4).
        """
        start, strength = self.moved_alike(x).moved_alike(x), 20.0 * x.shape[1]
        mixture = start
        for _ in range(3):
            shares = mixture.draws().log_parts(x).softmax(0)  # (k, n)
            n = shares.sum(1)
            total = (n + strength)[:, None]
            means = (shares @ x + strength * start.means) / total
            away, moved = x - means[:, None], start.means - means
            scatter = (shares[:, :, None] * away).mT @ away
            own = start.covariances + moved[:, :, None] * moved[:, None]
            covariances = (scatter + strength * own) / total[..., None]
            mixture = Components(0.999 * n / len(x) + 0.001 / len(n), means, covariances)
        return mixture

    def reweighed(self, x: Tensor) -> Components:
        """Return the mixture with the weights that are likeliest given points x (n, d), after some steps of EM."""
        log_parts, weights = self.draws().log_parts(x) - self.weights.log()[:, None], self.weights
        for _ in range(20):
            weights = (log_parts + weights.log()[:, None]).softmax(0).mean(1).clamp_min(1e-6)
        return self._replace(weights=weights / weights.sum())

    def moved_alike(self, x: Tensor) -> Components:
        """Return the mixture whose Gaussians are all moved alike, in units of their own, towards points x (n, d)."""
        shares = self.draws().log_parts(x).softmax(0)  # (k, n)
        L = torch.linalg.cholesky(self.covariances)
        z = torch.linalg.solve_triangular(L, (x - self.means[:, None]).mT, upper=False).mT  # (k, n, d)
        shift = torch.einsum("kn,kni->i", shares, z) / len(x)
        z = z - shift
        scatter = ((shares[:, :, None] * z).mT @ z).sum(0) / len(x)
        return Components(0.999 * shares.mean(1) + 0.001 / len(shares), self.means + L @ shift, L @ scatter @ L.mT)

    def split_alike(self, x: Tensor) -> Components:
        r"""Return the mixture with two Gaussians in place of each, alike in units of their own, along the coordinate
        in which points x (n, d) are least like normal ones: a component's mean moves by :math:`a v`, and its
        covariance by :math:`(b^2 - 1) v v^\top`, with :math:`v = C e_j / \sqrt{C_{jj}}`.
        """
        k, sd = self.draws().log_parts(x).argmax(0), self.covariances.diagonal(dim1=1, dim2=2).sqrt()
        z = (x - self.means[k]) / sd[k]
        u = (z - z.mean(0)) / z.std(0)
        j = int((u.pow(3).mean(0).square() + (u.pow(4).mean(0) - 3).square() / 4).argmax())  # Jarque and Bera's
        found = GaussianMixture(2, tol=1e-5, max_iter=500, random_state=0).fit(as_array(z[:, j : j + 1]))
        v = self.covariances[..., j] / sd[:, j : j + 1]
        parts = [
            Components(self.weights, self.means + a * v, self.covariances + (b - 1) * v[:, :, None] * v[:, None])
            for a, b in zip(found.means_.ravel(), found.covariances_.ravel(), strict=True)
        ]
        return Components.together(parts, found.weights_.tolist())

    def factors(self, noise: Tensor | float = 0.0) -> Tensor:
        """Return Cholesky factors (k, d, d) of the covariances without noise of variances (d,), if it is in them."""
        narrowed = self.covariances - torch.as_tensor(noise).expand(self.means.shape[1]).diag().to(self.means)
        factors, failed = torch.linalg.cholesky_ex(narrowed)
        return factors.where(failed[:, None, None] == 0, torch.linalg.cholesky(self.covariances))

    def draws(self, dtype: torch.dtype | None = None, noise: Tensor | float = 0.0) -> GaussianMixtureDraws:
        """Return what draws from the mixture in a type, less noise of variances (d,), and knows its density."""
        means, factors = (a.to(dtype or a.dtype) for a in (self.means, self.factors(noise)))
        return GaussianMixtureDraws(means, factors, self.weights)


def fitted_mixture(points: Sequence[Tensor], generator: torch.Generator, *, shuffles: bool = True) -> Components:
    """Fit a mixture to the points (n, d) of each mode, and put them together with the shares of the points.

    Points in order come from long chains and are not shuffled, so that the halves validate each other.
    """
    n = sum(map(len, points))
    parts = [_fitted(x, math.ceil(MAX_COMPONENTS * len(x) / n), generator, shuffles=shuffles) for x in points]
    return Components.together(parts, [len(x) / n for x in points])


def _shrunk(u: np.ndarray) -> GaussianMixture:
    """Return one Gaussian for points (n, d), its covariance shrunk where they are few (Ledoit and Wolf 2004)."""
    mixture, sd = GaussianMixture(1), u.std(0)
    mixture.weights_, mixture.means_ = np.ones(1), u.mean(0, keepdims=True)
    covariance = ledoit_wolf(u / sd)[0] * sd[:, None] * sd
    mixture.covariances_ = (covariance + mixture.reg_covar * np.eye(u.shape[1]))[None]
    mixture.precisions_cholesky_ = np.linalg.inv(np.linalg.cholesky(mixture.covariances_[0])).T[None]
    return mixture


def _fitted(x: Tensor, most: int, generator: torch.Generator, *, shuffles: bool) -> Components:
    """Return the mixture, of so many components at most, that is best at points it has not seen.

    Units are robust to tails.
    """
    seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))
    rows = np.random.RandomState(seed).permutation(len(x))[:20_000] if shuffles else np.arange(len(x))
    points = as_array(x[as_tensor(rows, device=x.device)].double())
    low, middle, high = np.quantile(points, [0.25, 0.5, 0.75], axis=0)
    width = np.where(high > low, (high - low) / 1.349, points.std(0))
    width[width == 0] = 1.0
    u = (points - middle) / width
    tried, others = np.split(u, [min(5000, -(-len(u) // 2))])
    best = max(_candidates(tried, others, most, seed), key=itemgetter(0))[1](u)
    covariances = best.covariances_ if best.covariance_type == "full" else _diagonal(best.covariances_)
    parts = best.weights_, middle + best.means_ * width, covariances * width[:, None] * width
    return Components(*(as_tensor(a, device=x.device) for a in parts))


def _candidates(u: np.ndarray, others: np.ndarray, most: int, seed: int) -> Iterator[tuple[float, FitMixture]]:
    """Fit mixtures of 1, 2, 4, ... components to points (n, d), while they get better at others; say how good, and
    how to fit them again.
    """
    n, d = u.shape
    most_all_full = 6  # features up to which all covariances are full
    if d > most_all_full:
        yield _shrunk(u).score(others), _shrunk
    if d > MOST_FEATURES:
        return
    for kind in ("full",) if d <= most_all_full else ("full", "diag"):
        best = -math.inf
        for k in (2**i for i in range(int(math.log2(most)) + 1)):
            if k > 1 and (2 * k > n or (kind == "full" and d > MOST_FULL)):
                break
            mixture = GaussianMixture(k, covariance_type=kind, init_params="random_from_data", random_state=seed)
            log_likelihood = mixture.set_params(max_iter=500).fit(u).score(others)
            yield log_likelihood, partial(_polished, mixture)
            if log_likelihood < best:
                break
            best = log_likelihood


def _polished(mixture: GaussianMixture, u: np.ndarray) -> GaussianMixture:
    """Return a mixture after two more steps of the EM algorithm, with all points (n, d)."""
    start = {"weights": mixture.weights_, "means": mixture.means_, "precisions": mixture.precisions_}
    again = GaussianMixture(mixture.n_components, covariance_type=mixture.covariance_type, tol=1e9)
    return again.set_params(**{f"{name}_init": value for name, value in start.items()}).fit(u)


def _diagonal(variances: np.ndarray) -> np.ndarray:
    """Return covariances (k, d, d) of variances (k, d)."""
    return variances[:, :, None] * np.eye(variances.shape[1])


# Mixtures that also match scores


class MixtureParameters(NamedTuple):
    r"""The parameters of a mixture: log-weights (k,), means (k, d), and L (k, d, d) with precisions :math:`L L^\top`,
    whose diagonal is stored as logarithms.
    """

    log_weights: Tensor
    means: Tensor
    roots: Tensor

    @classmethod
    def of(cls, mixture: Components) -> MixtureParameters:
        L = torch.linalg.cholesky(torch.linalg.inv(mixture.covariances))
        logs = L.diagonal(dim1=1, dim2=2).log()
        return cls(mixture.weights.log(), mixture.means.clone(), L.tril(-1) + torch.diag_embed(logs))

    def factors(self) -> Tensor:
        """Return L (k, d, d)."""
        return self.roots.tril(-1) + torch.diag_embed(self.roots.diagonal(dim1=1, dim2=2).exp())

    def mixture(self) -> Components:
        covariances = torch.cholesky_inverse(self.factors())
        return Components(self.log_weights.softmax(0), self.means, (covariances + covariances.mT) / 2)

    def losses(self, u: Tensor, s: Tensor) -> Tensor:
        """Return the terms (n,) of the objective, of points u (n, d) and scores s (n, d)."""
        L, d = self.factors(), u.shape[1]
        z = (u - self.means[:, None]) @ L  # (k, n, d)
        heights = self.log_weights.log_softmax(0) + self.roots.diagonal(dim1=1, dim2=2).sum(1)
        log_parts = heights[:, None] - z.square().sum(2) / 2
        own = -(log_parts.softmax(0)[:, :, None] * (z @ L.mT)).sum(0)
        gaps = (own - s).square().sum(1).clamp_max(50.0 * d)
        return FISHER_WEIGHT * gaps / 2 - log_parts.logsumexp(0) + d / 2 * math.log(2 * math.pi)


def score_matched(mixture: Components, u: Tensor, s: Tensor, generator: torch.Generator) -> Components:
    r"""Return a mixture moved to match also scores s (n, d) at points u (n, d), if held-out points confirm it.

    With a weight :math:`\lambda` it minimises

    .. math:: \frac1n \sum_i \Big( -\log q(u_i) + \tfrac\lambda2 \| \nabla \log q(u_i) - s_i \|^2 \Big),

    likelihood, which is sensitive to weights, plus Fisher divergence, to which each point contributes d numbers.

    References
    ----------
    Hyvarinen, A. (2005). Estimation of non-normalized statistical models by score matching. JMLR 6.
    """
    if u.shape[1] > MOST_FULL:
        return mixture
    rows = torch.randperm(len(u), generator=generator, device=u.device)[:4000]
    n_held_out = len(rows) // 4
    u_held_out, s_held_out = u[rows[:n_held_out]], s[rows[:n_held_out]]
    u, s = u[rows[n_held_out:]], s[rows[n_held_out:]]
    start = MixtureParameters.of(mixture)

    def parameters(theta: Tensor) -> MixtureParameters:
        parts = theta.split([a.numel() for a in start])
        return MixtureParameters(*(part.view_as(a) for part, a in zip(parts, start, strict=True)))

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        with torch.enable_grad():
            theta = torch.as_tensor(values).to(u).requires_grad_()
            value = parameters(theta).losses(u, s).mean()
            return value.item(), as_array(torch.autograd.grad(value, theta)[0])

    at_first = as_array(torch.cat([a.flatten() for a in start]))
    # not torch's, which imports a compiler at its first step
    end = minimize(loss, at_first, jac=True, method="L-BFGS-B", options={"maxiter": 40, "maxcor": 20})
    found = parameters(torch.as_tensor(end.x).to(u))
    before, after = (a.losses(u_held_out, s_held_out).mean() for a in (start, found))
    return found.mixture() if after < before else mixture


# Gaussians that are fitted to a target by its score, or to points near it

#: Draws by which a Gaussian is compared with its target, and fewer of them.
N_DRAWS, N_QUICK = 256, 64

#: The score divergence below which the Gaussian at a mode will do, and iterations of one that is fitted instead.
NEAR, N_ITER = 0.05, 16


def score_divergence(score_fn: ScoreFunction, q: Affine, generator: torch.Generator, n_draws: int = N_DRAWS) -> float:
    """Return the median over draws x of q = N(m, L L^T) of |L^T (s_p(x) - s_q(x))|^2 / d."""
    gaps = score_gaps(score_fn, q, generator, n_draws)
    return gaps.square().mean(1).nan_to_num(math.inf, math.inf).median().item()


def worst_divergence(score_fn: ScoreFunction, q: Affine) -> float:
    """Return the largest mean over directions v of (v^T L^T (s_p(x) - s_q(x)))^2; infinity if a score is not finite.

    An average over many features would hide one direction. Draws are from the same noise each time.
    """
    noise = torch.Generator(q.m.device).manual_seed(0)
    gaps = score_gaps(score_fn, q, noise, max(N_QUICK, len(q.m)))
    return torch.linalg.matrix_norm(gaps, 2).square().item() / len(gaps) if gaps.isfinite().all() else math.inf


def score_gaps(score_fn: ScoreFunction, q: Affine, generator: torch.Generator, n_draws: int) -> Tensor:
    """Return L^T (s_p(x) - s_q(x)) at draws x of q, shape (n, d)."""
    u = standard_normal(n_draws, q.m, generator)
    return q.whiten_score(score_fn(q.unwhiten(u)).detach()) + u


def batch_and_match(score_fn: ScoreFunction, start: Affine, generator: torch.Generator, n_iter: int = 60) -> Affine:
    r"""Fit a Gaussian by matching its score to the target's on batches of its own draws.

    In the coordinates u of the present N(m, L L^T), with draws u_b and scores g_b of means and covariances
    :math:`\bar u, C, \bar g, \Gamma` and a learning rate :math:`\lambda`, :math:`r = \lambda / (1 + \lambda)`,

    .. math::
        U = \lambda \Gamma + r\, \bar g \bar g^\top, \quad V = I + \lambda C + r\, \bar u \bar u^\top = R R^\top, \\
        \Sigma = 2 R \left(I + (I + 4 R^\top U R)^{1/2}\right)^{-1} R^\top, \quad \mu = r (\Sigma \bar g + \bar u).

    References
    ----------
    Cai, D. et al. (2024). Batch and match: black-box variational inference with a score-based divergence.
    https://arxiv.org/abs/2402.14758
    """
    d, (m, L) = len(start.m), start
    eye, shrink = torch.eye(d, dtype=m.dtype, device=m.device), 1.0
    for t in range(n_iter):
        rate = min(1.0, 20 / (t + 1))
        r = rate / (1 + rate)
        u = shrink * standard_normal(max(4 * d, 64), m, generator)
        g = score_fn(m + u @ L.mT).detach() @ L
        finite = g.isfinite().all(1)
        if finite.double().mean() < 0.5:
            shrink /= 2
            continue
        u, g = u[finite], g[finite]
        u_mean, g_mean = u.mean(0), g.mean(0)
        U = rate * g.mT.cov(correction=0) + r * g_mean.outer(g_mean)
        R = torch.linalg.cholesky(eye + rate * u.mT.cov(correction=0) + r * u_mean.outer(u_mean))
        try:
            lam, W = torch.linalg.eigh(R.mT @ U @ R)
        except torch.linalg.LinAlgError:  # scores too far apart in size
            continue
        root = R @ W * (2 / (1 + (1 + 4 * lam.clamp_min(0)).sqrt())).sqrt()
        sigma = root @ root.mT
        factor, failed = torch.linalg.cholesky_ex(sigma)
        mu = r * (sigma @ g_mean + u_mean)
        if not failed and mu.isfinite().all():
            m, L = m + L @ mu, L @ factor
    return Affine(m, L)


def adapted_by_scores(metric: Affine, u: Tensor, s: Tensor) -> Affine:
    r"""Return a map with :math:`L L^\top = \Sigma` for points u (n, d) and scores s (n, d) in a map's coordinates.

    With :math:`\Sigma\, \mathrm{Cov}(s)\, \Sigma = \mathrm{Cov}(u)` it is the geometric mean of the covariance of the
    points and the inverse covariance of the scores, which are equal for a Gaussian. If the points are few, or do not
    cover the target, the scores are more informative; both are shrunk (Ledoit and Wolf 2004).

    Raises
    ------
    DivergedError
        Points or scores are not finite, or do not vary.

    References
    ----------
    Titsias, M. (2023). Optimal preconditioning and Fisher adaptive Langevin sampling. NeurIPS.
    """
    scale = (u.std(0) / s.std(0)).sqrt()
    if not (u.isfinite().all() and s.isfinite().all() and scale.isfinite().all() and scale.all()):
        raise DivergedError(metric.unwhiten(u))
    C, F = (torch.as_tensor(ledoit_wolf(a.cpu().numpy())[0]).to(u) for a in (u / scale, s * scale))
    lam, V = torch.linalg.eigh(F)
    root, inverse = V * lam.sqrt() @ V.mT, V * lam.rsqrt() @ V.mT
    mu, W = torch.linalg.eigh(root @ C @ root)
    factor = torch.linalg.cholesky(inverse @ (W * mu.sqrt() @ W.mT) @ inverse)
    return Affine(metric.unwhiten(u.mean(0)[None])[0], metric.L @ (scale[:, None] * factor))


def covariance_root(x: Tensor) -> Tensor:
    """Return the Cholesky factor of the covariance of points (n, d), even if their correlation is nearly singular."""
    centred = x - x.mean(0)
    sd = centred.square().mean(0).sqrt().clamp_min(torch.finfo(x.dtype).tiny)
    correlation = (centred / sd).mT @ (centred / sd) / len(x)
    for ridge in (0.0, 1e-13, 1e-10, 1e-7):
        factor, failed = torch.linalg.cholesky_ex(correlation + ridge * torch.eye(len(sd)).to(x))
        if not failed:
            break
    return sd[:, None] * factor


def gaussian_of(x: Tensor) -> Affine:
    """Return the map by mean and covariance of points (n, d)."""
    return Affine(x.mean(0), covariance_root(x))


def matched(score_fn: ScoreFunction, mode: Affine, generator: torch.Generator) -> Affine:
    """Return the Gaussian at a mode, or the one fitted by batch and match if its score is nearer the target's.

    One far from the mode must also have more mass by its height and width: scores vanish in a flat region too.
    """
    error = score_divergence(score_fn, mode, generator, N_QUICK)
    if error < NEAR or len(mode.m) > MOST_FEATURES:
        return mode
    q = batch_and_match(score_fn, mode, generator, N_ITER)
    if not score_divergence(score_fn, q, generator, N_QUICK) < error:
        return mode
    is_far = mode.whiten(q.m[None]).abs().max() > 30.0  # it has more mass than others there
    if is_far and not log_ratio(score_fn, mode.m, q.m) + q.log_determinant() > mode.log_determinant():
        return mode
    return q
