"""What a fit costs, and how good it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils import check_scalar

from skksivi.base import BaseApproximator, check_fit
from skksivi.plotting._base import COLOURS, FAINT, N_DRAWS, own_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

    Fits = BaseApproximator | Sequence[BaseApproximator]


#: Shapes of points, so that more methods than there are colours can be told apart.
MARKERS = "osD^vPX"


@dataclass(kw_only=True, eq=False, repr=False)
class ScoreCallsDisplay:
    """Error of fits against the score calls that they took, one curve per method.

    Both axes are logarithmic, and lower and further left is better. A method with one fit is a single point.

    Parameters
    ----------
    curves : dict of str to ndarray of shape (k, 2)
        For each method, rows of score calls and errors, in order of the calls.
    floor : float, default=None
        Monte Carlo noise of the error, its value between exact draws; differences below it are meaningless.
    ylabel : str, default="error"

    Attributes
    ----------
    ax_ : Axes
    figure_ : Figure
    lines_ : list of Line2D
        One for each method.

    See Also
    --------
    skksivi.metrics.noise_floor : The value of a metric between exact draws.
    LossDisplay : The training of one fit.

    Examples
    --------
    >>> from skksivi.plotting import ScoreCallsDisplay
    >>> curves = {"NUTS": [[1000, 0.5], [10_000, 0.1]], "KSIVI": [[8000, 0.08]]}
    >>> display = ScoreCallsDisplay.from_curves(curves, floor=0.05)
    >>> [line.get_label() for line in display.lines_]
    ['NUTS', 'KSIVI']
    """

    curves: Mapping[str, np.ndarray]
    floor: float | None = None
    ylabel: str = "error"

    @classmethod
    def from_curves(
        cls,
        curves: Mapping[str, ArrayLike],
        *,
        floor: float | None = None,
        ylabel: str = "error",
        ax: Axes | None = None,
    ) -> Self:
        """Show measured errors.

        Parameters
        ----------
        curves : dict of str to array-like of shape (k, 2)
            For each method, rows of score calls and errors, in any order.
        floor : float, default=None
            Value of the error between exact draws.
        ylabel : str, default="error"
        ax : Axes, default=None
            Where to draw; None makes a figure.

        Returns
        -------
        display : ScoreCallsDisplay

        Raises
        ------
        ValueError
            There is no curve, one is not rows of two finite numbers, or its calls or the floor are not positive.
        """
        if not curves:
            raise ValueError("`curves` is empty; give rows of score calls and errors by the name of the method.")
        if floor is not None:
            check_scalar(floor, "floor", Real, min_val=0, include_boundaries="neither")
        checked = {name: _curve(rows, name) for name, rows in curves.items()}
        return cls(curves=checked, floor=floor, ylabel=ylabel).plot(ax)

    @classmethod
    def from_estimators(
        cls,
        estimators: Mapping[str, Fits],
        metric: Callable[[np.ndarray], float],
        *,
        floor: float | None = None,
        ylabel: str = "error",
        n_samples: int = N_DRAWS,
        random_state: int | np.random.RandomState | None = 0,
        ax: Axes | None = None,
    ) -> Self:
        """Show the errors of fitted estimators.

        Parameters
        ----------
        estimators : dict of str to approximator, or to sequence of approximators
            Fitted; several with one name, with different budgets, make a curve.
        metric : callable
            Maps draws (n_samples, d) to an error, such as the distance from reference draws.
        floor : float, default=None
            Value of the error between exact draws.
        ylabel : str, default="error"
        n_samples : int, default=10_000
        random_state : int, RandomState or None, default=0
            None continues the estimators' own streams.
        ax : Axes, default=None
            Where to draw; None makes a figure.

        Returns
        -------
        display : ScoreCallsDisplay

        Raises
        ------
        NotFittedError, ValueError
            As `sample` and `from_curves` do.
        """
        curves: dict[str, list[tuple[float, float]]] = {}
        for name, fits in estimators.items():
            curves[name] = []
            for q in fits if isinstance(fits, Sequence) else [fits]:
                check_fit(q, name="estimators")
                error = metric(q.sample(n_samples, random_state=random_state))
                curves[name].append((q.n_score_calls_ + q.n_products_, error))
        return cls.from_curves(curves, floor=floor, ylabel=ylabel, ax=ax)

    def plot(self, ax: Axes | None = None) -> Self:
        """Draw.

        Parameters
        ----------
        ax : Axes, default=None
            Where to draw; None makes a figure.

        Returns
        -------
        self : ScoreCallsDisplay
        """
        ax = own_axes(ax, (6.4, 4.2))
        self.ax_, self.figure_ = ax, ax.figure
        self.lines_: list[Line2D] = []
        for k, (name, rows) in enumerate(self.curves.items()):
            colour, marker = COLOURS[k % len(COLOURS)], MARKERS[k % len(MARKERS)]
            self.lines_ += ax.plot(rows[:, 0], rows[:, 1], color=colour, marker=marker, markersize=6, label=name)
        if self.floor is not None:
            ax.axhline(self.floor, color=FAINT, linestyle="--", linewidth=1.2, label="between exact draws")
        ax.set(xscale="log", yscale="log", xlabel="score calls", ylabel=self.ylabel)
        ax.margins(0.08)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, fontsize="small")
        return self


def _curve(rows: ArrayLike, name: str) -> np.ndarray:
    """Return rows of calls and errors (k, 2), ordered by calls."""
    curve = np.asarray(rows, dtype=np.float64)
    if curve.ndim != 2 or curve.shape[1] != 2 or not len(curve):
        raise ValueError(
            f"`curves[{name!r}]` has shape {curve.shape}, expected (k, 2), rows of score calls and errors."
        )
    if not np.isfinite(curve).all() or (curve[:, 0] <= 0).any():
        raise ValueError(f"`curves[{name!r}]` must hold finite numbers, with positive score calls.")
    return curve[np.argsort(curve[:, 0], kind="stable")]
