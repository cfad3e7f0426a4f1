"""Coordinates of a target, affine or curved, what was learned on the way to those of a fit, and the parameters that
give them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from skksivi._utils.arrays import as_numbers, as_tensor, shown_by_rows
from skksivi._utils.checks import shown
from skksivi.coordinates._affine import FAR, Affine, AffineMap, Identity, WhitenedScore
from skksivi.judge import Verdict
from skksivi.parameters import Init, Pilot, Whiten
from skksivi.score._score import DifferentiableScore, Halves, Score, ScoreFunction

#: What finds the map where no chains do.
LAPLACE, MATCHED, GIVEN = "Laplace approximation", "batch and match", "given coordinates"


@dataclass
class Coordinates:
    r"""Coordinates u, in which x = y or, with a warp, x = x(y), and :math:`y = m + L u`.

    Attributes
    ----------
    map : Affine, LowRank or Identity
        The map from u to y.
    warp : Curved or None
        The map from y to x.
    """

    map: AffineMap
    warp: Curved | None = None

    def straighten(self, score: Score) -> Score:
        """Return the score of y, given the score of x."""
        return score if self.warp is None else self.warp.pull_back(score)

    def pull_back(self, score: Score) -> Score | WhitenedScore:
        """Return the score of u, given the score of x."""
        return self.map.pull_back(self.straighten(score))

    def push_forward(self, u: Tensor) -> Tensor:
        """Return the points x (n, d) at u (n, d)."""
        y = self.map.unwhiten(u)
        return y if self.warp is None else self.warp.unwarp(y)[0]

    def whiten(self, x: Tensor) -> Tensor:
        """Return the u (n, d) of points x (n, d)."""
        return self.map.whiten(x if self.warp is None else self.warp.warp(x)[0])

    def log_density(self, of_u: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-densities of points x (n, d) and their standard errors, given a function that returns those
        of points u; they are -inf where no draw can be.
        """
        y, log_scale = (x, None) if self.warp is None else self.warp.warp(x)
        u = self.map.whiten(y)
        finite = (u.abs() < FAR).all(1)  # beyond, squares are infinite
        value, se = x.new_full((len(x),), -math.inf), x.new_zeros(len(x))
        if finite.any():
            value[finite], se[finite] = of_u(u[finite])
        impossible = value.isnan()
        value = value.where(~impossible, -math.inf) - self.map.log_determinant()
        return value if log_scale is None else value - log_scale, se.where(~impossible, 0.0)

    def to(self, device: torch.device) -> Self:
        if self.map.m.device == device:
            return self
        warp = None if self.warp is None else self.warp.to(device)
        return replace(self, map=type(self.map)(*(a.to(device) for a in self.map)), warp=warp)

    @property
    def m(self) -> np.ndarray:
        """The shift, shape (d,)."""
        return self.map.m.cpu().numpy()

    @property
    def L(self) -> np.ndarray:  # noqa: N802
        """The factor of the covariance, shape (d, d); lower triangular up to 1,000 features."""
        m = self.map.m
        return self.map.unwhiten_direction(torch.eye(len(m), dtype=m.dtype, device=m.device)).mT.cpu().numpy()

    @property
    def condition(self) -> float:
        """The condition number of the covariance L L^T."""
        return float(np.linalg.cond(self.L)) ** 2


def score_for_training(score: Score, coordinates: Coordinates, generator: torch.Generator) -> DifferentiableScore:
    """Return the score of u for a training, with minibatches drawn by the generator.

    It is in float64 if rounding costs more than 1%, and for finite differences.
    """
    score = coordinates.straighten(score)
    score_u = coordinates.map.pull_back(score.double if _needs_double(score, coordinates.map) else score)
    return score_u if score_u.minibatch is None else Halves(score_u, generator)


def _needs_double(score: Score, map_: AffineMap) -> bool:
    """Tell whether rounding costs more than 1% of the score of u, or products are finite differences."""
    if score.by_differences or isinstance(map_, Identity):
        return score.by_differences
    exact, rounded = map_.pull_back(score.double), map_.pull_back(score)
    u = torch.randn(64, score.n_features, generator=torch.Generator().manual_seed(0))
    u = u.to(dtype=score.dtype, device=score.device)
    s = exact.with_pullback(u)[0]
    error = torch.linalg.vector_norm(rounded.with_pullback(u)[0] - s, dim=1) / torch.linalg.vector_norm(s, dim=1)
    return bool(error.nan_to_num(math.inf).median() >= 0.01)


class Curved(ABC):
    """A smooth map from coordinates y, in which a target is nearly Gaussian, to its own, x."""

    @abstractmethod
    def to(self, device: torch.device) -> Self:
        """Return the same on a device."""

    @abstractmethod
    def unwarp(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return x (n, d) and the log-determinants (n,) of dx / dy at y (n, d)."""

    @abstractmethod
    def warp(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return y (n, d) and the log-determinants (n,) of dx / dy at x (n, d)."""

    def pulled_back(self, y: Tensor, score_at: ScoreFunction) -> Tensor:
        """Return the scores of y (n, d), given what returns those at x."""
        with torch.enable_grad():
            y = y.detach().double().requires_grad_()
            x, log_scale = self.unwarp(y)
            (s,) = torch.autograd.grad((x * score_at(x.detach())).sum() + log_scale.sum(), y)
        return s.detach()

    def pull_back(self, score: Score) -> Score:
        r"""Return the score of y, :math:`J^\top s(x(y)) + \nabla_y \log \det J`, counted as a score of x.

        Its products are differences.
        """
        double = score.double

        def score_fn(y: Tensor) -> Tensor:
            return self.pulled_back(y, double.uncounted)

        def log_density(log_prob: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
            x, log_scale = self.unwarp(y.double())
            return log_prob(x).detach() + log_scale.detach()

        return replace(
            double,
            score_fn=score_fn,
            score_vjp=None,
            by_differences=True,
            units=None,
            log_prob=None if double.log_prob is None else partial(log_density, double.log_prob),
            in_double=None,
            minibatch=None,
            parts=None,
            exact=None,
            mode=None,
            names=(),
        )


# Of a fit


@dataclass(frozen=True)
class Attempt:
    """A stage of the pilot: what it cost, and how good the points were after it.

    Attributes
    ----------
    stage : str
    n_calls : int
        Evaluations of the score or of log p, and products with the Jacobian of the score.
    seconds : float
        It is not compared, because equal fits may differ in it.
    verdict : str
        Of the points that it found, and why; empty if it found none.
    """

    stage: str
    n_calls: int
    seconds: float = field(compare=False)
    verdict: str = ""

    def __str__(self) -> str:
        return f"{self.stage:<22} {self.n_calls:>9,} calls {self.seconds:>7.2f} s  {self.verdict or 'no points'}"


@shown_by_rows
@dataclass(kw_only=True, repr=False)
class Whitening(Coordinates):
    """The coordinates x = m + L u of a fit, with results of the search for them.

    Attributes
    ----------
    map : Affine, LowRank or Identity
    warp : Curved or None
        A map from coordinates y in which a curved target is nearly Gaussian; `map` is then in these coordinates,
        y = m + L u.
    modes : ndarray of shape (n_modes, d)
        Modes found, best first; none if the map was given.
    weights : ndarray of shape (n_modes,)
        Their shares of the target by Laplace's approximation, heights compared by line integrals of the score.
    n_score_calls : int
        Points at which the score was evaluated.
    verdict : Verdict or None
        On the points of the pilot; None where there were none, and nobody has checked the map.
    mean, mean_se, sd : ndarray of shape (d,) or None
        Moments of the pilot, and standard errors of its mean; with whiten="auto" and "diagonal".
    symmetries : ndarray of shape (n_symmetries, d) or None
        Permutations of the coordinates, such as the labels of a mixture, that leave the target invariant and map one
        mode to another; ~j stands for minus coordinate j. The modes that are images of each other have equal weights.
    ascents : ndarray of shape (2,) or None
        How many ascents of the last round of the search ended at a mode, and how many at a new one; None if no
        other modes were searched.
    n_looks : int
        Points at which the score was looked at for narrow modes, in one to five dimensions.
    found_by : str
        What has found the map and, with a pilot, its points.
    attempts : list of Attempt
        The stages of whiten="auto", in the order in which they ran.
    by_score : bool
        Whether log p of the target contradicts its score, or is unknown near the mode, and is not used.
    """

    modes: np.ndarray
    weights: np.ndarray
    n_score_calls: int = 0
    verdict: Verdict | None = None
    mean: np.ndarray | None = None
    mean_se: np.ndarray | None = None
    sd: np.ndarray | None = None
    symmetries: np.ndarray | None = None
    ascents: np.ndarray | None = None
    n_looks: int = 0
    found_by: str = LAPLACE
    attempts: Sequence[Attempt] = ()
    by_score: bool = False

    @property
    def converged(self) -> bool:
        """Whether the points of the pilot are good enough that nothing better was needed: draws by importance with
        reliable weights, or chains that agree.
        """
        return self.verdict is not None and self.verdict.good

    @property
    def is_rough(self) -> bool:
        """Whether the points of the pilot are not good enough."""
        return self.verdict is not None and not self.verdict.good

    @property
    def error(self) -> float:
        """The largest standard error of the mean, in standard deviations; inf where there is none."""
        return math.inf if self.mean_se is None or self.sd is None else float((self.mean_se / self.sd).max())

    @property
    def unseen(self) -> float:
        """The share of the ascents of the last round of the search that found a new mode; nan without ascents."""
        n, n_new = (0, 0) if self.ascents is None else self.ascents.tolist()
        return n_new / n if n else math.nan

    def missed(self, weight: float, width: float = 1.0) -> float:
        """Return the probability that the search missed a Gaussian mode beside a single other one, also Gaussian.

        It is the share of such modes, at distances of four to eight standard deviations of the other, whose density
        is the larger one at none of the points around that one from which, or at which, the search looks. From all
        others the score leads away. Of some dimensions on, this is nearly one for any narrow mode.

        Parameters
        ----------
        weight : float
            Its share of the mass.
        width : float, default=1.0
            Its width, as a share of the other's.

        Raises
        ------
        ValueError
            `weight` is not between 0 and 1, or `width` not from 0 to 1.
        """
        if not 0 < weight < 1:
            raise ValueError(f"`weight` is the share of the mass of a mode, between 0 and 1, got {weight}.")
        if not 0 < width <= 1:
            raise ValueError(f"`width` is a share of the width of a mode, from 0 to 1, got {width}.")
        if self.ascents is None:
            return 1.0
        return share_missed(self.modes.shape[1], self.n_looks, weight, width)

    def _rows(self) -> list[tuple[str, str]]:
        verdict, calls = str(self.verdict or "").partition(":")[0], f"{self.n_score_calls:,}"
        found = self.found_by, len(self.map.m), self.warp or "", len(self.modes), calls, verdict
        names = "found by", "features", "curved by", "modes", "score calls", "verdict"
        return list(zip(names, map(str, found), strict=True))

    def report(self) -> str:
        """Return a line for each stage of the pilot: its cost, and how good the points were after it, and why."""
        return "\n".join(map(str, self.attempts)) or self.found_by


def check_start(whiten: Whiten, init: Init, d: int) -> None:
    """Raise ValueError for coordinates or points that do not fit a target of d features."""
    starting_points(init, d)
    if (pair := given_pair(whiten)) is not None:
        map_of_pair(pair, d)


def starting_points(init: Init, d: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the points (k, d) where mode searches start."""
    if init is None:
        return torch.zeros(1, d, dtype=torch.float64, device=device)
    starts = as_tensor(as_numbers(init, "init"), device=device)
    if starts.dim() not in (1, 2) or starts.shape[-1] != d or not len(starts) or not starts.isfinite().all():
        raise ValueError(f"`init` must be a finite vector of shape {(d,)} or a matrix of these, got {shown(init)}.")
    return starts.view(-1, d)


def given_pair(whiten: Whiten) -> tuple[ArrayLike, ArrayLike] | None:
    """Return the (m, L) that is given, None for a rule or nothing."""
    return None if whiten is None or isinstance(whiten, str | Pilot) else whiten


def map_of_pair(pair: tuple[ArrayLike, ArrayLike], d: int, device: torch.device | str = "cpu") -> Affine:
    """Return the map of a pair (m, L)."""
    if len(pair) != 2:
        raise ValueError(f"`whiten` must be a pair (mean, Cholesky factor), got {len(pair)} item(s).")
    m, L = (as_tensor(as_numbers(a, "whiten"), device=device) for a in pair)
    fits = m.shape == (d,) and L.shape == (d, d) and m.isfinite().all() and L.isfinite().all()
    if not (fits and (L.diagonal() > 0).all() and L.equal(L.tril())):
        raise ValueError(
            f"`whiten` must be a finite vector of shape {(d,)} and a lower triangular matrix of shape {(d, d)} with "
            f"a positive diagonal (the Cholesky factor of a covariance), got shapes {tuple(m.shape)} and "
            f"{tuple(L.shape)}."
        )
    return Affine(m, L)


# Where the score is looked at around a mode, in its standard deviations, and what these looks miss


def n_looks(d: int, *, thorough: bool = False) -> int:
    """Return the number of looks in d dimensions, none in more than five."""
    in_dimensions = (128, 512, 1024, 2048, 6144)  # one, two, ...
    n = in_dimensions[d - 1] if d <= len(in_dimensions) else 0
    return min(32 * n, 2**15) if thorough else n


def looks(d: int, n: int, seed: int) -> Tensor:
    r"""Return n points (n, d) around the origin.

    In two and three dimensions they are a lattice in the volume and the angles, because a Gaussian of a share s of
    the width and a weight w exceeds a standard normal density at a distance R from it within about
    :math:`s \sqrt{R^2 + 2 d \log(1 / s) + 2 \log(w / (1 - w))}`; their density is the inverse of that volume. Half as
    far apart, beyond ten, are those for wider ones. Else directions and the logarithms of distances are of a low
    discrepancy.
    """
    if not n:
        return torch.empty(0, d, dtype=torch.float64)
    near, far = 3.0, 15.0  # distances from the mode
    if d not in (2, 3):
        levels = torch.quasirandom.SobolEngine(d + 1, scramble=True, seed=seed).draw(n)
        directions = torch.special.ndtri(levels.double()[:, 1:].clamp(1e-9, 1 - 1e-9))
        r = near * (far / near) ** levels.double()[:, :1]
        return r * directions / directions.norm(dim=1, keepdim=True)
    rng = np.random.RandomState(seed)
    first = np.arange(n)[:, None]
    irrational = np.array([0.6180339887498949] if d == 2 else [0.7548776662466927, 0.5698402909980532])
    angles = (rng.uniform(size=d - 1) + first * irrational) % 1
    grid = np.geomspace(near, far, 1000)
    density = grid ** (d - 1) / (grid**2 + 5 * d) ** (d / 2) * np.where(grid < 10, 1, 0.5**d)
    volume = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) * np.diff(grid))])
    r = np.interp((first + rng.uniform()) / n * volume[-1], volume, grid)
    t = 2 * math.pi * angles[:, :1]
    rim = np.concatenate([np.cos(t), np.sin(t)], 1)
    if d == 3:
        height = 2 * angles[:, 1:] - 1
        rim = np.concatenate([np.sqrt(1 - height**2) * rim, height], 1)
        rim = rim @ np.linalg.qr(rng.normal(size=(3, 3)))[0]
    return torch.from_numpy(r * rim)


def share_missed(d: int, n: int, weight: float, width: float) -> float:
    """Return the share of Gaussians of a weight and of a share of the width of a standard normal, four to eight from
    it, that exceed it at none of n looks, nor where ascents start from around it.
    """
    generator = torch.Generator().manual_seed(0)
    centres, starts = torch.randn(532, d, generator=generator, dtype=torch.float64).split([500, 32])
    starts = starts * torch.tensor([3.0, 10.0]).repeat(16)[:, None]  # as `around` a mode
    u = torch.cat([looks(d, n, 0).double(), starts])
    distances = torch.linspace(4, 8, len(centres), dtype=torch.float64)[:, None]
    centres = distances * centres / centres.norm(dim=1, keepdim=True)
    gain = math.log(weight / (1 - weight)) - d * math.log(width) + u.square().sum(1) / 2
    return float(1 - (gain > (torch.cdist(centres, u) / width).square() / 2).any(1).double().mean())
