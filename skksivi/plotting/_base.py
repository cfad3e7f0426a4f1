"""What displays share: axes, colours, names of samples and contours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.ndimage import gaussian_filter, map_coordinates
from scipy.spatial import cKDTree
from sklearn.utils import check_array

from skksivi._utils.arrays import as_numbers, without_graph
from skksivi.base import BaseApproximator, check_fit
from skksivi.score import HasLogProb

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.contour import QuadContourSet
    from matplotlib.gridspec import GridSpecBase

#: x0, x1, y0, y1.
Box = tuple[float, float, float, float]

#: Okabe and Ito's colours and Tol's wine, which readers with a colour vision deficiency tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255")
REFERENCE_COLOUR = "0.25"
FAINT = "0.6"

#: Draws that estimators are asked for.
N_DRAWS = 10_000

#: Points of a cloud, beyond which it is but a blot.
MAX_POINTS = 2000


class OfDraws:
    """Base of the displays of draws; a leaf gives `from_draws`."""

    from_draws: Callable[..., Self]
    plot: Callable[..., Self]

    @classmethod
    def from_estimator(
        cls,
        estimator: BaseApproximator,
        *others: object,
        n_samples: int = N_DRAWS,
        random_state: int | np.random.RandomState | None = 0,
        **options: object,
    ) -> Self:
        """Show draws of a fitted estimator.

        Parameters
        ----------
        estimator : approximator
            Fitted.
        *others, **options
            What `from_draws` takes after the draws.
        n_samples : int, default=10_000
        random_state : int, RandomState or None, default=0
            None continues the estimator's own stream.

        Returns
        -------
        display : object

        Raises
        ------
        NotFittedError, TypeError, ValueError
            As `sample` and `from_draws` do.
        """
        check_fit(estimator, name="estimator")
        X = {type(estimator).__name__: estimator.sample(n_samples, random_state=random_state)}
        return cls.from_draws(X, *others, **options)


def own_axes(ax: Axes | None, figsize: tuple[float, float] | None = None) -> Axes:
    """Return the axes, or the axes of a new figure."""
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt  # not above, like all of matplotlib: it takes long

    return plt.subplots(figsize=figsize, layout="constrained")[1]


def panels(ax: Axes, k: int) -> np.ndarray:
    """Put axes (k, k), one scale per column, where some are, which become empty and stay the current ones."""
    from matplotlib.gridspec import GridSpecFromSubplotSpec

    figure = ax.figure
    current = figure.gca()
    ax.set_axis_off()
    place = ax.get_subplotspec()
    if place is None:
        x0, y0, x1, y1 = ax.get_position().extents
        grid: GridSpecBase = figure.add_gridspec(k, k, left=x0, right=x1, bottom=y0, top=y1)
    else:
        grid = GridSpecFromSubplotSpec(k, k, place)
    axes = grid.subplots(sharex="col", squeeze=False)
    figure.sca(current)
    return axes


def as_samples(X: ArrayLike | Mapping[str, ArrayLike]) -> dict[str, np.ndarray]:
    """Return samples by name, each an array (n, d) with the same d."""
    named = dict(X) if isinstance(X, Mapping) else {"draws": X}
    if not named:
        raise ValueError("`X` is empty; give an array of draws, or a dict of such by name.")
    samples = {key: check_array(without_graph(A), dtype=np.float64, input_name=str(key)) for key, A in named.items()}
    widths = {key: A.shape[1] for key, A in samples.items()}
    if len(set(widths.values())) > 1:
        raise ValueError(f"The samples have different numbers of columns, {widths}; they must agree.")
    return samples


def as_reference(reference: ArrayLike | None, samples: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Return reference draws with as many columns as the samples, if there are some."""
    if reference is None:
        return None
    reference = check_array(without_graph(reference), dtype=np.float64, input_name="reference")
    d = next(iter(samples.values())).shape[1]
    if reference.shape[1] != d:
        raise ValueError(f"`reference` has {reference.shape[1]} columns, expected {d} as in the draws.")
    return reference


def as_row(values: ArrayLike | None, d: int, name: str) -> np.ndarray | None:
    """Return a value for each column of the draws, if there are some."""
    if values is None:
        return None
    row = as_numbers(values, name)
    if row.shape != (d,):
        raise ValueError(f"`{name}` has shape {row.shape}, expected {(d,)}, a value for each column of the draws.")
    return row


def check_features(features: Sequence[int] | None, feature_names: Sequence[str] | None, d: int) -> None:
    """Raise unless these are columns of d, and names of all."""
    if features is not None and (not len(features) or not all(0 <= i < d for i in features)):
        raise ValueError(f"`features` must hold columns from 0 to {d - 1}, got {list(features)!r}.")
    if feature_names is not None and len(feature_names) != d:
        raise ValueError(f"`feature_names` has {len(feature_names)} entries, expected {d}.")


def layers_of(samples: Mapping[str, np.ndarray], reference: np.ndarray | None) -> list[tuple[str, np.ndarray, str]]:
    """Return names, samples and colours, the reference first so that it lies below."""
    layers = [] if reference is None else [("reference", reference, REFERENCE_COLOUR)]
    return layers + [(name, X, COLOURS[k % len(COLOURS)]) for k, (name, X) in enumerate(samples.items())]


def thinned(X: np.ndarray, most: int = MAX_POINTS) -> np.ndarray:
    """Return so many rows at most, evenly spaced."""
    return X[:: -(-len(X) // most)]


def span(x: np.ndarray) -> tuple[float, float]:
    """Return the range of nearly all values (n,) with a margin, which ends at the least and the largest value."""
    low, high = np.quantile(x, [0.01, 0.99])
    margin = 0.3 * (high - low)
    low, high = max(x.min(), low - margin), min(x.max(), high + margin)
    least = 1e-9 * max(1.0, abs(low))  # of a constant
    return (float(low), float(high)) if high - low > least else (low - least, low + least)


def density_and_levels(X: np.ndarray, masses: Sequence[float]) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Estimate the density of pairs, and the levels above which it is at these shares of the pairs themselves.

    Each draw is blurred by two thirds of the distance within which a share n^(-1/3) of them is, but not across the
    ends of their range. Around the grid lie zeros, so that all lines are closed.

    Parameters
    ----------
    X : ndarray of shape (n, 2)
    masses : sequence of float

    Returns
    -------
    places : list of two ndarray of shape (m,)
        Of the grid, in both columns.
    density : ndarray of shape (m, m)
        Up to a constant.
    levels : ndarray
        Rising; without those of shares that lie in part beyond the grid.
    """
    m, least, most = 128, 1.0, 12.0  # cells of the grid, and the widths of a blur, in cells
    low, high = np.transpose([span(column) for column in X.T])
    cells = (X - low) / (high - low) * m - 0.5
    some = thinned(cells)
    near = 1 + int(len(some) * len(X) ** (-1 / 3))
    widths = cKDTree(some).query(cells, k=[min(near, len(some))])[0][:, 0] / 1.5
    bands = np.round(2 * np.log2(widths.clip(least, most)))
    density = np.zeros((m + 2, m + 2))
    for band in np.unique(bands):
        counts, _ = np.histogramdd(cells[bands == band], m, [(-0.5, m - 0.5)] * 2)
        density[1:-1, 1:-1] += gaussian_filter(counts, 2 ** (band / 2))
    of_draws = map_coordinates(density, cells.T + 1, order=1)
    levels = np.unique(np.quantile(of_draws, 1 - np.array(masses)))
    places = [a + (np.arange(m + 2) - 0.5) / m * (b - a) for a, b in zip(low, high, strict=True)]
    return places, density, levels[levels > 0]


def enclosing_levels(density: np.ndarray, masses: Sequence[float]) -> np.ndarray:
    """Return the levels of a density on equal cells above which it has these masses, rising."""
    heights = np.sort(density, axis=None)[::-1]
    mass = np.cumsum(heights)
    return np.unique([heights[np.searchsorted(mass, m * mass[-1])] for m in masses])


def check_target(target: HasLogProb | None) -> None:
    """Raise unless a target's density can be drawn."""
    if target is None:
        return
    if getattr(target, "log_prob", None) is None:
        raise TypeError(
            f"`target` must have `log_prob` for its contours, but {type(target).__name__} has none; leave it out, or "
            "give draws of it by MarginalsDisplay."
        )
    if target.n_features != 2:
        raise ValueError(f"`target` has {target.n_features} features, expected 2.")


def log_density_on_grid(target: HasLogProb, box: Box) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x (n,), y (n,) and the log-density (n, n), up to a constant, of a target of two features in a box."""
    n = 200
    x, y = np.linspace(*box[:2], n), np.linspace(*box[2:], n)
    points = torch.as_tensor(np.stack(np.meshgrid(x, y), -1).reshape(-1, 2))
    with torch.no_grad():
        log_density = target.log_prob(points).reshape(n, n).cpu().numpy()
    return x, y, np.nan_to_num(log_density, nan=-math.inf)


def box_and_levels(samples: Sequence[np.ndarray], target: HasLogProb | None) -> tuple[Box, np.ndarray]:
    """Find the box of nearly all draws, two columns each, and of a target's mass near them.

    Returns
    -------
    box : (x0, x1, y0, y1)
    levels : ndarray of shape (3,)
        Of the target's log-density, enclosing 99, 90 and 50% of the mass; empty without a target.
    """
    low, high = np.quantile(np.concatenate(list(samples)), [0.001, 0.999], axis=0)
    levels = np.empty(0)
    for _ in range(6):
        if target is None:
            break
        width = np.maximum(high - low, 1e-9)
        x, y, log_density = log_density_on_grid(target, _box(low - width / 2, high + width / 2))
        top = log_density.max()
        least, *masses = np.log(enclosing_levels(np.exp(log_density - top), (0.999, 0.99, 0.9, 0.5))) + top
        levels = np.array(masses or [least])  # one where all the mass is in one cell
        rows, columns = np.nonzero(log_density >= least)
        before = low, high
        low = np.minimum(low, [x[columns.min()], y[rows.min()]])
        high = np.maximum(high, [x[columns.max()], y[rows.max()]])
        if (before[0] <= low).all() and (high <= before[1]).all():
            break
    margin = 0.08 * np.maximum(high - low, 1e-9)
    return _box(low - margin, high + margin), levels


def draw_contours(ax: Axes, target: HasLogProb, levels: np.ndarray, box: Box) -> QuadContourSet:
    """Draw lines of the log-density of a target in a box."""
    x, y, log_density = log_density_on_grid(target, box)
    bounded = np.maximum(log_density, levels[0] - 1e3)
    return ax.contour(x, y, bounded, levels=levels, colors=REFERENCE_COLOUR, linewidths=1, linestyles="solid")


def _box(low: np.ndarray, high: np.ndarray) -> Box:
    return float(low[0]), float(high[0]), float(low[1]), float(high[1])
