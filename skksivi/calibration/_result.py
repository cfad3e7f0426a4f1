"""The result of a calibration, and a file of finished replications."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from skksivi._utils.codec import write
from skksivi._utils.monte_carlo import counts_below, uniform_band, uniformity
from skksivi._utils.tables import html_table
from skksivi.plotting import CalibrationDisplay

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Record:
    """Finished replications, kept in a file if a path is given.

    Parameters
    ----------
    path : path-like or None

    Attributes
    ----------
    seed : int or None
    settings : str or None
        What tells these replications from others; None while there is no file.
    ranks : dict of int to list of int
        Without replications that failed, which are tried again.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path)
        self.seed: int | None = None
        self.settings: str | None = None
        self.ranks: dict[int, list[int]] = {}
        self.written = 0.0  # time of the last write
        if self.path is not None and self.path.exists():
            try:
                document = json.loads(self.path.read_text("utf-8"))
                self.seed, self.settings = int(document["seed"]), str(document["settings"])
                self.ranks = {int(i): [int(rank) for rank in ranks] for i, ranks in document["ranks"].items()}
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise ValueError(
                    f"`path` is {str(path)!r}, which is not a complete calibration file; name another."
                ) from error

    def begin(self, seed: int, settings: str) -> None:
        """Set what the coming replications are, which must be the file's, and write the file."""
        if self.settings not in (None, settings):
            raise ValueError(
                f"`path` is {str(self.path)!r}, which holds replications of other settings: seed, estimator, names, "
                "or parameters, data or target of the first replication differ. Give another `path`, or the settings "
                "of the file; random_state=None takes its seed."
            )
        self.seed, self.settings = seed, settings
        self.write()

    def add(self, i: int, ranks: list[int]) -> None:
        """Add a replication, and write the file unless it was written in the last second."""
        self.ranks[i] = ranks
        if time.monotonic() - self.written > 1:
            self.write()

    def write(self) -> None:
        """Write the file, so that the old or the new one is whole."""
        self.written = time.monotonic()
        if self.path is not None:
            document = {"seed": self.seed, "settings": self.settings, "ranks": self.ranks}
            write(self.path, json.dumps(document).encode())


class Failure(NamedTuple):
    """A replication without ranks.

    Attributes
    ----------
    replication : int
        Its number, starting at zero.
    message : str
        The exception, and what raised it.

    See Also
    --------
    Calibration : The ranks and their p-values.
    """

    replication: int
    message: str


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """The ranks of a simulation-based calibration; printed, it is a table of p-values.

    Attributes
    ----------
    ranks : ndarray of shape (n, k)
        How many of the draws are below the true value of each quantity, from 0 to `n_draws`.
    n_draws : int
        Draws of each fit.
    names : tuple of str of length k
        Names of the quantities: the parameters, then your own.
    replications : ndarray of shape (n,)
        The numbers of the replications that have ranks, in increasing order.
    failures : tuple of Failure
        The others.

    See Also
    --------
    skksivi.plotting.CalibrationDisplay : Draws it.

    Examples
    --------
    >>> import numpy as np
    >>> from skksivi.calibration import Calibration
    >>> ranks = np.random.RandomState(0).randint(100, size=(200, 2))
    >>> result = Calibration(ranks, 99, ("a", "b"), np.arange(200))
    >>> result.p_value > 0.05
    True
    """

    ranks: np.ndarray
    n_draws: int
    names: tuple[str, ...]
    replications: np.ndarray
    failures: tuple[Failure, ...] = ()

    @cached_property
    def p_values(self) -> np.ndarray:
        """P-value of each quantity (k,), exact for any number of replications: small if its ranks are not uniform."""
        return np.array([uniformity(ranks, self.n_draws) for ranks in self.ranks.T])

    @property
    def p_value(self) -> float:
        """Joint p-value: k times the smallest, which is valid however the quantities depend on one another."""
        return min(1.0, float(self.p_values.min()) * len(self.names))

    def ecdf_bands(self, level: float = 0.95) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a simultaneous band for the distribution function of uniform ranks.

        Parameters
        ----------
        level : float, default=0.95
            At least this probability for each quantity by itself. Its line leaves the band if its p-value is at most
            1 - `level`.

        Returns
        -------
        z, low, high : ndarrays of shape (n_draws,)
            The points k / (n_draws + 1), and the least and the largest share of ranks below k.
        """
        low, high = uniform_band(len(self.ranks), self.n_draws, level)
        return np.arange(1, self.n_draws + 1) / (self.n_draws + 1), low / len(self.ranks), high / len(self.ranks)

    def ecdf(self) -> np.ndarray:
        """Return the shares (n_draws, k) of ranks below 1, ..., `n_draws`, which compare with `ecdf_bands`."""
        return np.stack([counts_below(ranks, self.n_draws) for ranks in self.ranks.T], 1) / len(self.ranks)

    def plot(self, ax: Axes | None = None, *, level: float = 0.95) -> CalibrationDisplay:
        """Show the distribution functions of the ranks minus the uniform one, in a band.

        Parameters
        ----------
        ax : Axes, default=None
            Where to draw; None makes a figure.
        level : float, default=0.95
            At least this probability that all lines of uniform ranks are in the band.

        Returns
        -------
        display : CalibrationDisplay
        """
        return CalibrationDisplay.from_ranks(self.ranks, self.n_draws, names=self.names, level=level, ax=ax)

    def _head(self) -> str:
        failed = f", {len(self.failures)} more failed" if self.failures else ""
        return f"{len(self.ranks)} replications, {self.n_draws} draws of each fit{failed}: p = {self.p_value:.2g}"

    def _rows(self) -> list[tuple[str, str, str]]:
        """Return the name, p-value and, where it is below 5% over their number, the fault of each quantity."""
        return [
            (name, f"{p:.2g}", _shape(ranks, self.n_draws) if p * len(self.names) < 0.05 else "")
            for name, p, ranks in zip(self.names, self.p_values, self.ranks.T, strict=True)
        ]

    def __str__(self) -> str:
        width = max(map(len, self.names))
        lines = [f"  {name:<{width}}  p = {p:<8}{wrong}" for name, p, wrong in self._rows()]
        return "\n".join(line.rstrip() for line in [self._head(), *lines])

    def _repr_html_(self) -> str:
        """Return the same as a table of HTML."""
        return html_table(self._rows(), head=("", "p", ""), above=self._head())

    __repr__ = __str__


def _shape(ranks: np.ndarray, n_draws: int) -> str:
    """Return what most stands out of ranks (n,) that are not uniform, by moments in their standard errors."""
    u = (ranks + 0.5) / (n_draws + 1) - 0.5
    shift = np.sqrt(12 * len(u)) * u.mean()
    spread = np.sqrt(len(u) / 0.8) * (12 * np.square(u).mean() - 1)
    if abs(spread) > abs(shift):
        return "draws too narrow" if spread > 0 else "draws too wide"
    return "draws too low" if shift > 0 else "draws too high"
