"""What a report is of, and the cells of its draws around the modes of the target."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from skksivi._utils.arrays import MOST_LISTED, as_array, listed
from skksivi.coordinates._affine import Affine, standard_normal
from skksivi.families._derived import unweighted
from skksivi.families._samplers import Gaussian, Sampler
from skksivi.inference._modes import Modes, mode_chains, weigh_cells
from skksivi.parameters import Whiten, chains_of
from skksivi.pilot._log_density import Cells, masses
from skksivi.pilot._mixture import covariance_root
from skksivi.pilot._modes import MAX_IN_STARTS, all_modes, find_modes
from skksivi.pilot._symmetries import around
from skksivi.score._score import Score, ScoreFunction
from skksivi.stein._discrepancy import stein_variances

#: Bounds of Stein variances.
STEIN_VARIANCES = (0.8, 1.25)

#: Number of standard errors within which a difference is noise.
N_SE = 4.0

#: Errors that explain why a number is not available.
REFUSALS = (ValueError, ArithmeticError, ImportError, torch.linalg.LinAlgError)

#: What to change, by the name of a parameter; {} stands for its value.
TEXTS = {
    "init": "start there too by `init`, a row for each mode",
    "max_iter": "raise `max_iter` beyond {}",
    "n_warmup": "raise `n_warmup` beyond {}",
    "mixing": "let `mixing` be 'auto' or a StudentT",
    "whiten": "set whiten='auto'",
    "effort": "raise the `effort` of whiten=Pilot(...) from {!r}",
    "budget": "raise the `budget` of whiten=Pilot(...) beyond {}",
}


def outlier_limit(norms: np.ndarray) -> float:
    """Return the length of a whitened score beyond which a draw is an outlier, given lengths from chains (m,)."""
    return float(np.quantile(norms, 0.999))


class Check(NamedTuple):
    """One line of a diagnosis.

    Attributes
    ----------
    name : str
    value : float
        The checked number, NaN if there is none.
    text : str
        The value in words, and its limit.
    verdict : str
        "ok", "warn", "look", of what does not decide where weights are reliable, or "not available: " and why.
    remedy : str
        What to do, in one sentence; empty unless the verdict is "warn" or "look".

    See Also
    --------
    Diagnosis : The report.
    """

    name: str
    value: float
    text: str
    verdict: str
    remedy: str = ""


class View(NamedTuple):
    """The input of the checks.

    Attributes
    ----------
    name : str
        Class name of the approximator.
    parameters : mapping of str to object
        Parameters of the approximator.
    sampler : Sampler
        The sampler of the fit.
    report : mapping of str to object
        Its learned attributes.
    score : Score
        Score of the target.
    x, s : Tensor of shape (n, d)
        Draws, and scores there.
    generator : torch.Generator
    seed : int
    refines : bool
        Whether `refine` corrects the fit, by reliable weights.
    """

    name: str
    parameters: Mapping[str, object]
    sampler: Sampler
    report: Mapping[str, Any]
    score: Score
    x: Tensor
    s: Tensor
    generator: torch.Generator
    seed: int
    refines: bool = False

    @property
    def finite(self) -> Tensor:
        """Where the score is finite (n,)."""
        return self.s.isfinite().all(1)

    def correction(self, *names: str) -> str:
        """Return advice on draws that are wrong: their weights where these are reliable, otherwise parameters."""
        names = names or ("whiten", "mixing", "max_iter", "n_warmup")
        return "correct the fit by `skksivi.refine`" if self.refines else self.advice(*names)

    def advice(self, *names: str, otherwise: str | None = None) -> str:
        """Return advice on parameters of the approximator that would change something."""
        if isinstance(unweighted(self.sampler), Gaussian):
            return "one Gaussian is not enough, use `KSIVIApproximator`"
        parameters = {name: self.parameters.get(name, "auto") for name in names}
        parameters = {name: value for name, value in parameters.items() if str(value) != "auto"}
        if self.report.get("n_iter_", math.inf) < parameters.get("max_iter", 0):  # it had ended, or there was none
            del parameters["max_iter"]
        if "whiten" in names and "whiten" in self.parameters:
            chains = chains_of(cast("Whiten", self.parameters["whiten"]))
            if chains is not None:
                parameters.pop("whiten", None)
                if self.report["whitening_"].is_rough:
                    parameters = {"effort": "low"} if chains.effort == "low" else {"budget": chains.budget}
            else:  # iterations make up only slowly for bad coordinates
                parameters.pop("max_iter", None)
        order = [name for name in ("effort", "budget", *names) if name in parameters]
        best = self.name == "KSIVIApproximator"
        last = "reparametrise the model to avoid funnels and spikes" if best else "use `KSIVIApproximator`"
        return ", or ".join([TEXTS[name].format(parameters[name]) for name in order] or [otherwise or last])


def judged(name: str, value: float, text: str, remedy: str | None) -> Check:
    """Return a check that warns if there is a remedy."""
    return Check(name, value, text, "warn" if remedy else "ok", remedy or "")


def guarded(name: str, check: Callable[..., Check], *args: object) -> Check:
    """Return the check, or why it is not available."""
    try:
        return check(*args)
    except REFUSALS as reason:
        return Check(name, math.nan, "", f"not available: {reason}")


#: Draws from which chains start, at least, and numbers in them, at most.
N_FEWEST, N_NUMBERS = 100, 25_000


#: The share of a mode, by the curvature there, from which its lack of draws matters.
MIN_LOST = 0.01


#: Why the ends of chains are not available.
RUN_AWAY = "chains that start at the draws diverge, as with a score of the wrong sign"


class Geometry(NamedTuple):
    """The cells of the modes, the cell of each draw (n,), modes without draws (k, d), lengths of whitened scores (n,)
    and of chains' (m,), and the ends of the chains (t, k, d) at t times; no chains if these diverge.
    """

    cells: Cells
    cell: Tensor
    lost: Tensor
    norms: Tensor
    reference: Tensor
    ends: Tensor


def geometry_and_modes(view: View) -> tuple[Geometry, Check]:
    """Find the modes near the draws, weight them, and run chains in them."""
    x = view.x[view.finite]
    whole = middle(x)
    cells, lost = Cells([whole], x.new_zeros(1)), (x[:0], x.new_zeros(0))
    try:
        cells, lost = _find_cells(view, whole)
        check = _check_modes(view, cells, lost)
    except REFUSALS as reason:
        check = Check("modes", math.nan, "", f"not available: {reason}")
    return _geometry(view, cells, lost[0]), check


def _find_cells(view: View, whole: Affine) -> tuple[Cells, tuple[Tensor, Tensor]]:
    """Return the cells of modes that have draws, and the centres (k, d) and shares (k,) of those that have none."""
    x, d = view.x[view.finite], view.x.shape[1]
    most = 200
    if d > most:
        raise ValueError(f"there are {d} features, and modes are searched for only up to {most}")
    n_drawn, n_around = (min(n, MAX_IN_STARTS // d) for n in (80, 30))  # fewer in many dimensions
    like = whole.unwhiten(standard_normal(n_around, whole.m, view.generator))
    n_elsewhere = 8
    elsewhere = view.score.from_prior(n_elsewhere, view.generator)
    if not len(elsewhere):
        elsewhere = standard_normal(n_elsewhere, whole.m, view.generator)
    starts = torch.cat([x[:n_drawn], around(whole, n_around, view.generator), like, elsewhere])
    n_steps = 25  # few, if there is a mode
    found = find_modes(view.score, starts, view.generator, n_steps=n_steps)
    with suppress(*REFUSALS):  # as far as a fit has searched
        others = all_modes(view.score, torch.zeros_like(whole.m), found.maps[0], view.generator)
        centres = torch.stack([a.m for a in others.maps])
        found = find_modes(view.score, centres, view.generator, found.maps, n_steps=n_steps)
    cells = Cells(found.maps, found.weights.log())
    counts = cells.counts(x)
    # a neighbour's draws may be across the border
    empty = (counts <= 0.02 * found.weights * len(x)) & (found.weights > MIN_LOST)
    drawn = cells.sorted_by(((counts > 0) & ~empty).nonzero().flatten())
    # best first
    return drawn, _with_mass(view, drawn.refined(x, middle), cells.sorted_by(empty.nonzero().flatten()[:5]))


def _with_mass(view: View, drawn: Cells, lost: Cells) -> tuple[Tensor, Tensor]:
    """Return the centres (k, d) and shares (k,) of those modes without draws that hold mass.

    The curvature overstates the mass of a spike, such as a funnel's.
    """
    n, cells = len(drawn.maps), Cells([*drawn.maps, *lost.maps], torch.cat([drawn.log_weights, lost.log_weights]))
    log_masses = drawn.log_weights.new_zeros(len(cells.maps))
    if lost.maps:
        found = masses(view.score, cells, view.x[:0], view.generator)
        log_masses = torch.tensor([m.log_mass for m in found]).to(log_masses)
    shares = log_masses.softmax(0)[n:]
    centres = torch.stack([a.m for a in cells.maps])[n:]
    return centres[shares > MIN_LOST], shares[shares > MIN_LOST]


def _check_modes(view: View, cells: Cells, lost: tuple[Tensor, Tensor]) -> Check:
    """Compare the shares of modes with their weights."""
    centres, shares = lost
    if len(centres):
        text = f"{len(centres)} of {len(centres) + len(cells.maps)} without draws, of share {shares.sum():.0%}"
        where = f"{listed(centres[0])}{', lost[0] of this report' if centres.shape[1] > MOST_LISTED else ''}"
        remedy = f"No draw is in the mode at {where}: {view.advice('whiten', 'init')}."
        return judged("modes", shares.sum().item(), text, remedy)
    whitening = view.report.get("whitening_")
    if whitening is not None and whitening.unseen > 0.05:
        text = f"{len(whitening.modes)} found, and {whitening.unseen:.0%} of the last ascents found new ones"
        remedy = "The search for modes did not finish: pass points near further modes as `init`, (k, n_features)."
        return judged("modes", whitening.unseen, text, remedy)
    if len(cells.maps) == 1:
        return judged("modes", 0.0, "1", None)
    x, d = view.x[view.finite], view.x.shape[1]
    x, most = x[: max(N_FEWEST, N_NUMBERS // d)], 50_000 // (50 * d)  # in the chains of all modes, 50 of each
    if len(cells.maps) > max(2, most):
        raise ValueError(f"there are {len(cells.maps)} modes, and the weights of {most} are compared in {d} features")
    found = weigh_cells(view.score, x, cells.sorted_by(cells.counts(x).nonzero().flatten()), view.generator)
    if not found.trusted:
        raise ValueError(f"the weights of {len(found.weights)} modes cannot be trusted, {found.reason}")
    return judged(*_misplaced(found, len(x)))


def _misplaced(found: Modes, n: int) -> tuple[str, float, str, str | None]:
    """Check the weights of modes given n draws."""
    gaps = found.shares - found.weights
    misplaced = float(np.abs(gaps).sum() / 2)
    noise = np.sqrt(found.standard_errors**2 + found.weights * (1 - found.weights) / n)
    wrong = misplaced > 0.05 and (np.abs(gaps) > N_SE * noise).any()
    k = int(np.abs(gaps).argmax())
    remedy = (
        f"The mode at {listed(found.centres[k])} has {found.shares[k]:.0%} of the draws, "
        f"but its weight is {found.weights[k]:.0%}: refine(est, target) corrects that if the fit has a density; fit "
        "again with whiten='auto' otherwise, which weighs the modes before a training."
    )
    text = f"{len(gaps)}, {misplaced:.1%} of the draws in a wrong one"
    return "modes", misplaced, text, remedy if wrong else None


def middle(x: Tensor) -> Affine:
    r"""Return the centre of points (n, d) and the root of their covariance, or of a robust covariance.

    They belong to the likeliest Student t, found by iterating the weights :math:`w_i = (\nu + d) / (\nu +
    \|u_i\|^2)`, scaled so that half of the points are within the median distance of a normal. Heavy tails do not
    affect them.

    References
    ----------
    Kent, J. and Tyler, D. (1991). Redescending M-estimates of multivariate location and scatter. Annals of Statistics
    19(4).
    """
    d = x.shape[1]
    found = Affine(x.median(0).values, covariance_root(x))
    df = 3.0  # of the Student t whose fit gives the centre
    for _ in range(20):
        w = (df + d) / (df + found.whiten(x).square().sum(1, keepdim=True))
        m = (w * x).sum(0) / w.sum()
        z = w.sqrt() * (x - m)
        found = Affine(m, covariance_root(torch.cat([z, -z])))
    median = d * (1 - 2 / (9 * d)) ** 3  # of chi-squared, by Wilson and Hilferty
    return Affine(m, found.L * (found.whiten(x).square().sum(1).median() / median).sqrt())


def _geometry(view: View, cells: Cells, lost: Tensor) -> Geometry:
    """Measure whitened scores at the draws and where chains have moved some of them."""
    x = view.x[view.finite]
    cells = cells.refined(x, middle)
    norms = view.x.new_full((len(view.x),), math.inf)
    norms[view.finite] = _whitened_norms(cells, cells.assign(x), view.s[view.finite])
    n_moved = max(N_FEWEST, min(500, N_NUMBERS // x.shape[1]))
    reference, ends = x.new_empty(0), x.new_empty(0, *x.shape)
    try:
        chains = _moved(view.score, x[:n_moved], cells, view.generator)
        y = torch.cat([part.flatten(0, 1) for part in chains])
        s = view.score(y)
        if stein_variances(y, s)[0].mean() > 0:  # otherwise they have diverged
            reference = _whitened_norms(cells, cells.assign(y), s)
            ends = torch.cat([part[slice(-16, None, 3)] for part in chains], 1)  # late states count as ends
    except REFUSALS:
        pass
    return Geometry(cells, cells.assign(view.x), lost, norms, reference, ends)


def _moved(score: Score, x: Tensor, cells: Cells, generator: torch.Generator) -> list[Tensor]:
    """Return the states (n_kept, n, d) of Metropolis chains from the draws x (n, d) of each cell, with its map.

    They stay in their cell, because chains that move between cells with different preconditioners would not leave the
    target invariant.
    """
    cell = cells.assign(x)
    parts = ((k, x[cell == k]) for k in cell.unique().tolist())
    return [mode_chains(_inside(score, cells, k), y, cells.maps[k], generator)[:, : len(y)] for k, y in parts]


def _inside(score: Score, cells: Cells, k: int) -> ScoreFunction:
    """Return the score in a cell, NaN elsewhere, so that chains reject moves out of it."""
    return lambda x: torch.where((cells.assign(x) == k)[:, None], score(x), torch.nan)


def _whitened_norms(cells: Cells, cell: Tensor, s: Tensor) -> Tensor:
    """Return the lengths (n,) of scores s (n, d) whitened by the maps of their cells."""
    norms = s.new_empty(len(s))
    for k, a in enumerate(cells.maps):
        norms[cell == k] = torch.linalg.vector_norm(a.whiten_score(s[cell == k]), dim=1)
    return norms


def check_outliers(view: View, geometry: Geometry) -> Check:
    """Count the draws whose scores are longer than expected under the target."""
    if not len(geometry.reference):
        raise ValueError(RUN_AWAY)
    limit = outlier_limit(as_array(geometry.reference))
    share = (geometry.norms > limit).double().mean().item()
    text = f"{share:.1%} with whitened scores longer than {limit:.3g}"
    remedy = f"Draws lie where the target has hardly any mass: {view.correction()}."
    return judged("outliers", share, text, remedy if share > 0.02 else None)
