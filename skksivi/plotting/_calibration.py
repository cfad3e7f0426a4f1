"""Ranks of a simulation-based calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils import check_scalar

from skksivi._utils.numbers import check_integer
from skksivi.metrics._ranks import check_ranks, counts_below, uniform_band
from skksivi.plotting._base import COLOURS, FAINT, own_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection
    from matplotlib.lines import Line2D


@dataclass(kw_only=True, eq=False, repr=False)
class CalibrationDisplay:
    """Distribution functions of ranks minus the uniform one, with a simultaneous band for uniform ranks.

    Draws that are too narrow give a line that is first above and then below zero, draws that are too wide the
    reverse; draws that are too high stay above zero, draws that are too low below.

    Parameters
    ----------
    ranks : ndarray of shape (n, k)
        Of k quantities in n replications, from 0 to `n_draws`.
    n_draws : int
        Number of draws among which each true value was ranked.
    names : sequence of str of length k, default=None
        None means x0, x1 and so on.

    Attributes
    ----------
    ax_ : Axes
    figure_ : Figure
    lines_ : list of Line2D
        One for each quantity. Those beyond the seventh that stay in the band are grey, and not in the legend.
    band_ : PolyCollection

    See Also
    --------
    skksivi.calibration.sbc : Simulation-based calibration.

    References
    ----------
    Säilynoja, T., Bürkner, P.-C. and Vehtari, A. (2022). Graphical test for discrete uniformity and its applications
    in goodness-of-fit evaluation and multiple sample comparison. https://arxiv.org/abs/2103.10522

    Examples
    --------
    >>> import numpy as np
    >>> from skksivi.plotting import CalibrationDisplay
    >>> ranks = np.random.RandomState(0).randint(100, size=(200, 3))
    >>> display = CalibrationDisplay.from_ranks(ranks, 99)
    >>> len(display.lines_)
    3
    """

    ranks: np.ndarray
    n_draws: int
    names: Sequence[str] | None = None

    @classmethod
    def from_ranks(
        cls,
        ranks: ArrayLike,
        n_draws: int,
        *,
        names: Sequence[str] | None = None,
        level: float = 0.95,
        ax: Axes | None = None,
    ) -> Self:
        """Show ranks.

        Parameters
        ----------
        ranks : array-like of shape (n, k) or (n,)
            Integers from 0 to `n_draws`.
        n_draws : int
            Number of draws among which each true value was ranked.
        names : sequence of str of length k, default=None
            None means x0, x1 and so on.
        level : float, default=0.95
            See `plot`.
        ax : Axes, default=None
            Where to draw; None makes a figure.

        Returns
        -------
        display : CalibrationDisplay

        Raises
        ------
        ValueError
            Ranks are not integers from 0 to `n_draws`, there is another number of names, or `level` is not in (0, 1).
        """
        n_draws = check_integer(n_draws, "n_draws", min_val=1)
        ranks = check_ranks(ranks, n_draws)
        if names is not None and len(names) != ranks.shape[1]:
            raise ValueError(f"`names` are {len(names)}, expected {ranks.shape[1]}, one for each column of `ranks`.")
        return cls(ranks=ranks, n_draws=n_draws, names=names).plot(ax, level=level)

    def plot(self, ax: Axes | None = None, *, level: float = 0.95) -> Self:
        """Draw.

        Parameters
        ----------
        ax : Axes, default=None
            Where to draw; None makes a figure.
        level : float, default=0.95
            At least this probability that all lines of uniform ranks stay in the band. The complement is divided by
            the number of lines.

        Returns
        -------
        self : CalibrationDisplay
        """
        check_scalar(level, "level", float, min_val=0, max_val=1, include_boundaries="neither")
        ax = own_axes(ax, (6.4, 4))
        self.ax_, self.figure_ = ax, ax.figure
        n, k = self.ranks.shape
        names = [f"x{j}" for j in range(k)] if self.names is None else self.names
        z = np.arange(1, self.n_draws + 1) / (self.n_draws + 1)
        low, high = uniform_band(n, self.n_draws, 1 - (1 - level) / k)
        label = f"{level:.0%} band" + (" of all lines" if k > 1 else "")
        self.band_: PolyCollection = ax.fill_between(
            z, low / n - z, high / n - z, color=FAINT, alpha=0.3, linewidth=0, label=label
        )
        ax.axhline(0, color=FAINT, linewidth=0.8)
        self.lines_: list[Line2D] = []
        for j, (name, ranks) in enumerate(zip(names, self.ranks.T, strict=True)):
            counts = counts_below(ranks, self.n_draws)
            plain = j >= len(COLOURS) and not ((counts < low) | (counts > high)).any()
            style = (
                {"color": FAINT, "linewidth": 0.8} if plain else {"color": COLOURS[j % len(COLOURS)], "label": name}
            )
            self.lines_ += ax.plot(z, counts / n - z, **style)
        ax.set(xlabel="rank of the true value, as a share of the draws", ylabel="ECDF difference", xlim=(0, 1))
        ax.legend(frameon=False, fontsize="small")
        return self
