"""The modes of a fit, and their weights from the score of the target."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from skksivi._utils.arrays import RandomState, listed, make_generator, resolve_device, shown_by_rows, with_error
from skksivi.base import BaseApproximator, check_finite, check_fit
from skksivi.coordinates._affine import Affine
from skksivi.coordinates._lines import along_chord
from skksivi.families._derived import unweighted
from skksivi.pilot._chains import ChainState, mala_step, revive
from skksivi.pilot._log_density import MAX_GAP, MIN_SHARE, Cells, Mass, masses, normalised
from skksivi.pilot._modes import find_modes
from skksivi.score._score import Score, ScoreFunction
from skksivi.score._target import compared_score
from skksivi.targets._base import Target
from skksivi.training._run import ordinary_mode

#: Draws from which the shares of the modes are estimated.
N_ASSIGNED = 20_000


@shown_by_rows
class Modes(NamedTuple):
    """Modes, their weights under the target and their shares of a fit.

    Attributes
    ----------
    centres : ndarray of shape (k, d)
        Means of the states of chains that start at the draws of each.
    weights : ndarray of shape (k,)
        Under the target; they sum to one.
    standard_errors : ndarray of shape (k,)
        Of the weights.
    shares : ndarray of shape (k,)
        Of draws of the fitted family, before any refinement.
    trusted : bool
        Whether every weight rests on enough points and two ways to it agree.
    reason : str
        Why not, empty if they are trusted.
    """

    centres: np.ndarray
    weights: np.ndarray
    standard_errors: np.ndarray
    shares: np.ndarray
    trusted: bool
    reason: str

    def _rows(self) -> list[tuple[str, str]]:
        weights = ", ".join(map(with_error, self.weights[:5].tolist(), self.standard_errors[:5].tolist()))
        where = ", ".join(map(listed, self.centres[:5].round(3))) if self.centres.shape[1] <= 3 else ""
        trusted, more = "yes" if self.trusted else f"no, {self.reason}", ", ..." * (len(self.weights) > 5)
        names = "modes", "at", "weights", "shares of the draws", "trusted"
        found = str(len(self.weights)), where, weights + more, listed(self.shares), trusted
        return list(zip(names, found, strict=True))


def modes(est: BaseApproximator, target: Target | ScoreFunction, *, random_state: RandomState = None) -> Modes:
    r"""Find the modes among the draws of a fit, and their weights under the target.

    The discrepancy is insensitive to the weights of distant modes. This function estimates them from the score.
    Searches from draws find the modes, and space is divided into regions by their Gaussians. The differences of log p
    between the centres are integrals of the score along lines, by an adaptive rule that detects when it fails. The
    mass of each region is estimated by bridge sampling between a proposal and chains that start at draws of the fit,
    and again by importance sampling alone. If the target has a `log_prob` it is used instead of the integrals.

    Parameters
    ----------
    est : approximator
        Fitted.
    target : Target or callable
        What it was fitted to.
    random_state : int, RandomState or None, default=None

    Returns
    -------
    modes : Modes
        A named tuple, by falling weight: ``centres`` of shape (k, d), ``weights`` with ``standard_errors``, the
        ``shares`` of the fit's draws, whether the weights are ``trusted``, and the ``reason`` if they are not. A mode
        without draws is not detected.

    Raises
    ------
    NotFittedError
        Before `fit`.

    See Also
    --------
    diagnose : A report on a fit.
    refine : A fit corrected by importance weights.

    Examples
    --------
    >>> from skksivi import KSIVIApproximator, modes
    >>> from skksivi.targets import Multimodal
    >>> q = KSIVIApproximator(max_iter=300, random_state=0).fit(Multimodal())
    >>> modes(q, Multimodal(), random_state=0).weights.round(1)
    array([0.5, 0.5])
    """
    check_fit(est, target)
    device = resolve_device(est.device_)
    generator = make_generator(random_state, device)
    with ordinary_mode(device), torch.no_grad():
        score = compared_score(target, est.n_features_in_, est.dtype, est.device_)
        x = unweighted(est.sampler_).sample(N_ASSIGNED, generator).to(device, torch.float64)
        check_finite(x, score)
        cells = _find_cells(score, x, generator)
        return weigh_cells(score, x, cells, generator)


def _find_cells(score: Score, x: Tensor, generator: torch.Generator) -> Cells:
    """Return the cells of the modes above some of the draws x (n, d), those without draws left out.

    The first draws may hold none of a rare mode: further searches start at those least like the modes found so far.
    """
    n_starts = 200  # draws from which modes are searched at a time
    found, n_found = find_modes(score, x[:n_starts], generator), 0
    while len(found.maps) > n_found:
        n_found = len(found.maps)
        squares = torch.stack([a.whiten(x).square().sum(1) for a in found.maps]).amin(0)
        found = find_modes(score, x[squares.topk(n_starts).indices], generator, found.maps)
    cells = Cells(found.maps, found.weights.log())
    return cells.sorted_by(cells.counts(x).nonzero().flatten())


def weigh_cells(score: Score, x: Tensor, cells: Cells, generator: torch.Generator) -> Modes:
    """Return the weights of cells, by falling weight, and the shares of the draws x (n, d) in them.

    The shapes of the draws may be off: Gaussians are fitted to chains that start there, one half for the fit and the
    other for the bridge.
    """
    cell = cells.assign(x)
    squares = torch.stack([a.whiten(x).square().mean(1) for a in cells.maps]).amin(0)
    far = (squares > 5.0**2).double().mean().item()
    chains = [mode_chains(score, x[cell == k][:300], a, generator) for k, a in enumerate(cells.maps)]
    cells = cells.refined(torch.cat([c[:, ::2].flatten(0, 1) for c in chains]))
    others = torch.cat([c[-1, 1::2] for c in chains])
    found = masses(score, cells, others, generator, 2000)
    weights, errors = normalised(found)
    order = weights.argsort(descending=True)
    cells, found = cells.sorted_by(order), [found[k] for k in order.tolist()]
    shares = cells.counts(x) / len(x)
    centres = torch.stack([a.m for a in cells.maps])
    reason = next((_doubt(a.m, m) for a, m in zip(cells.maps, found, strict=True) if not m.trusted), "")
    if len(found) == 1:  # whose weight is one, whatever its mass
        reason = ""
    if not reason and far > 0.2:
        reason = f"{far:.0%} of the draws are far from every mode that could be compared with others"
    if not reason and not (shares > 0).all():
        reason = "one of them has states of chains, but none of the draws"
    numbers = [a.cpu().numpy() for a in (centres, weights[order], errors[order], shares)]
    return Modes(*numbers, not reason, reason)  # type: ignore[call-arg, arg-type]


def mode_chains(score: ScoreFunction, x: Tensor, a: Affine, generator: torch.Generator) -> Tensor:
    """Return the states (n_kept, n, d) of chains that start at draws x (n, d) of a mode, fifty at least."""
    u = a.whiten(x.repeat(-(-50 // len(x)), 1))
    return a.unwhiten(metropolis(lambda u: a.whiten_score(score(a.unwhiten(u)).detach()), u, generator))


def metropolis(score_u: ScoreFunction, u: Tensor, generator: torch.Generator) -> Tensor:
    """Run Metropolis-adjusted Langevin chains that need no density: log p differs by integrals of the score.

    Each step has a random share of a common size, which is adapted to the rate of acceptance.

    Parameters
    ----------
    score_u : callable
    u : Tensor of shape (n, d)
        Where the chains start.
    generator : torch.Generator

    Returns
    -------
    kept : Tensor of shape (n_kept, n, d)
        The chains at every third step, once the step size is adapted.
    """
    n, d = u.shape
    common, kept = 1.3 * d ** (-1 / 3), []
    n_steps = 150
    every = max(3, n_steps * u.numel() // 2**25)  # so many numbers are kept at most
    u = revive(u.where(score_u(u).isfinite().all(1)[:, None], torch.nan), generator)
    state = ChainState(u, score_u(u))
    for t in range(1, n_steps + 1):
        h = common * 0.25 ** torch.rand(n, 1, generator=generator, dtype=u.dtype, device=u.device)
        state, alpha = mala_step(state, score_u, partial(along_chord, score_u), h, generator)
        if t <= n_steps // 3:
            common *= math.exp(0.3 * (alpha.mean().item() - 0.65))  # which is accepted
        elif t % every == 0:
            kept.append(state.u)
    return torch.stack(kept)


def _doubt(centre: Tensor, mass: Mass) -> str:
    where = listed(centre)
    if math.isnan(mass.share):
        return f"the score alone does not tell the weight of the mode at {where}, across a valley where p is zero"
    return (
        f"the weight of the mode at {where} rests on an effective share of {mass.share:.2g} of its points "
        f"({MIN_SHARE} is needed), and on two estimates that differ by {abs(mass.gap):.1%} "
        f"({MAX_GAP:.0%} is allowed)"
    )
