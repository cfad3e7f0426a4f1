r"""An affine map x = m + L u that puts a target near mean zero and unit covariance, from scores alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from skksivi._score import Score, ScoreFunction, in_double

#: Features beyond which coordinates are left as they are: a Newton step costs O(d^3).
MAX_FEATURES = 1000


class Affine(NamedTuple):
    """The map x = m + L u: m of shape (d,), L lower triangular of shape (d, d)."""

    m: Tensor
    L: Tensor

    def pull_back(self, score_fn: Score) -> WhitenedScore:
        """Return the score of u in the type and on the device of the score of x."""
        m, L = (a.to(dtype=score_fn.dtype, device=score_fn.device) for a in self)
        return WhitenedScore(score_fn, Affine(m, L))

    def whiten(self, x: Tensor) -> Tensor:
        """Return u of shape (n, d)."""
        return torch.linalg.solve_triangular(self.L, (x - self.m).mT, upper=False).mT

    def unwhiten(self, u: Tensor) -> Tensor:
        """Return x of shape (n, d)."""
        return self.m + u @ self.L.mT

    def whiten_score(self, s: Tensor) -> Tensor:
        r"""Return the score in u, :math:`s_u = L^\top s_x`, of shape (n, d)."""
        return s @ self.L

    def log_determinant(self) -> Tensor:
        """Return log det L."""
        return self.L.diagonal().log().sum()


class WhitenedScore(NamedTuple):
    r"""The score in u, :math:`s_u(u) = L^\top s_x(m + L u)`."""

    score_fn: Score
    map: Affine

    def with_pullback(self, u: Tensor) -> tuple[Tensor, ScoreFunction]:
        """Return the score at u (n, d), and the map of v to J_u^T v = L^T J_x^T L v."""
        s, pull = self.score_fn.with_pullback(self.map.unwhiten(u))
        return self.map.whiten_score(s), lambda v: pull(v @ self.map.L.mT) @ self.map.L


class Identity(NamedTuple):
    """The map x = u."""

    def pull_back(self, score_fn: Score) -> Score:
        """Return the score of x."""
        return score_fn

    def whiten(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def unwhiten(self, u: Tensor) -> Tensor:
        """Return u."""
        return u

    def whiten_score(self, s: Tensor) -> Tensor:
        """Return s."""
        return s

    def log_determinant(self) -> float:
        """Return 0."""
        return 0.0


def find_whitening(whiten: Any, score_fn: Score) -> Affine | Identity:
    """Return the float64 map that an approximator's parameter `whiten` asks for.

    Raises
    ------
    ValueError
        The given (m, L) does not fit the target, or the score is not finite at the origin.
    """
    d = score_fn.n_features
    if whiten is None or (isinstance(whiten, str) and d > MAX_FEATURES):
        return Identity()
    if isinstance(whiten, str):
        double = in_double(score_fn.score_fn, d, score_fn.device)
        origin = torch.zeros(d, dtype=torch.float64, device=score_fn.device)
        if not double(origin[None]).isfinite().all():
            raise ValueError(
                "`score_fn` is not finite at the origin, where the search for a mode starts; set `whiten` to a "
                "pair (mean, Cholesky factor) that is roughly right, or to None."
            )
        return saddle_free_newton(double, origin)
    if len(whiten) != 2:
        raise ValueError(f"`whiten` must be a pair (mean, Cholesky factor), got {len(whiten)} item(s).")
    m, L = (torch.as_tensor(a, dtype=torch.float64, device=score_fn.device) for a in whiten)
    if m.shape != (d,) or L.shape != (d, d) or not _is_map(m, L):
        raise ValueError(
            f"`whiten` must be a finite vector of shape {(d,)} and a lower triangular matrix of shape {(d, d)} with "
            f"a positive diagonal (the Cholesky factor of a covariance), got shapes {tuple(m.shape)} and "
            f"{tuple(L.shape)}."
        )
    return Affine(m, L)


def _is_map(m: Tensor, L: Tensor) -> bool:
    finite = m.isfinite().all() and L.isfinite().all()
    return bool(finite and (L.diagonal() > 0).all() and L.equal(L.tril()))


def jacobian(score_fn: ScoreFunction, x: Tensor) -> Tensor:
    """Return the Jacobian (d, d) of the score at x (d,), one batched vector-Jacobian product with the identity."""
    rows = x.expand(len(x), -1).clone().requires_grad_()
    with torch.enable_grad():
        s = score_fn(rows)
        (J,) = torch.autograd.grad(s, rows, torch.eye(len(x), dtype=x.dtype, device=x.device))
    return (J + J.mT) / 2


def saddle_free_newton(score_fn: ScoreFunction, x: Tensor, max_iter: int = 200) -> Affine:
    r"""Climb to a mode from scores alone; return it with a root of the inverse curvature there.

    With :math:`-\nabla s = V \mathrm{diag}(\lambda) V^\top`, the step is :math:`p = V |\lambda|^{-1} V^\top s`
    (Dauphin et al. 2014), shortened by a search on the slope :math:`s(x + t p)^\top p`.

    Parameters
    ----------
    score_fn : callable
        The score, for float64 points.
    x : Tensor of shape (d,), float64
        Where to start.
    max_iter : int, default=200

    Returns
    -------
    map : Affine
        The mode m, or where the climb ended, and L with :math:`L L^\top = V |\lambda|^{-1} V^\top`.
    """
    for _ in range(max_iter):
        s = score_fn(x[None])[0].detach()
        lam, V = _curvature(score_fn, x)
        p = V @ ((V.mT @ s) / lam.abs())
        decrement = s @ p
        if decrement < 1e-4 * len(x):
            if lam[0] > 0:
                break
            p = V[:, 0] * lam[0].abs().rsqrt()  # a saddle: leave along its steepest direction
            x = x + p
            continue
        step = _line_search(score_fn, x, p, decrement)
        if step == 0:
            break
        x = x + step * p
    lam, V = _curvature(score_fn, x)
    R = torch.linalg.qr((V * lam.abs().rsqrt()).mT).R
    return Affine(x, (R * R.diagonal().sign()[:, None]).mT)


def _curvature(score_fn: ScoreFunction, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, smallest first, and eigenvectors of minus the Jacobian; tiny ones are floored."""
    J = jacobian(score_fn, x)
    if not (x.isfinite().all() and J.isfinite().all()):
        raise ValueError(
            "The search for a mode left the region where `score_fn` is finite: it may have the wrong sign (it is the "
            "gradient of log p, not of -log p) or belong to no proper density. Else set `whiten` to a pair (mean, "
            "Cholesky factor), or to None."
        )
    lam, V = torch.linalg.eigh(-J)
    top = lam.abs().max()
    floor = torch.where(top > 0, 1e-14 * top, 1.0)  # no curvature at all says nothing of the scale
    return torch.where(lam.abs() < floor, floor, lam), V


def _line_search(score_fn: ScoreFunction, x: Tensor, p: Tensor, decrement: Tensor) -> Tensor:
    """Return the step t: one where the slope there is small, else the last before the slope changes sign."""

    def slope(t: Tensor) -> Tensor:
        return score_fn(x + t[:, None] * p).detach() @ p

    middle, end = slope(x.new_tensor([0.5, 1.0]))
    if middle > 0 and end.abs() < decrement / 2:
        return x.new_tensor(1.0)
    t = torch.cat([x.new_zeros(1), 2.0 ** torch.arange(-40, 11, dtype=x.dtype, device=x.device)])
    for _ in range(3):
        climbing = slope(t[1:]) > 0  # False where the score is not finite
        last = int(climbing.long().cumprod(0).sum())
        if last == len(t) - 1:
            break
        t = torch.linspace(t[last].item(), t[last + 1].item(), 9, dtype=x.dtype, device=x.device)
        last = 0
    return t[last]
