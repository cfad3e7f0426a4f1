"""Pictures of fits, by classes in the style of scikit-learn's displays.

Each class has `plot(ax=None)`, which draws into the axes it is given, or into a new figure, and class methods that
compute what is shown and call it. The drawn objects are in attributes: `ax_`, `figure_`, lines and so on.
"""

from skksivi.plotting._calibration import CalibrationDisplay
from skksivi.plotting._calls import ScoreCallsDisplay
from skksivi.plotting._correlation import CorrelationDisplay
from skksivi.plotting._density import DensityDisplay
from skksivi.plotting._forest import ForestDisplay
from skksivi.plotting._layers import LayersDisplay
from skksivi.plotting._loss import LossDisplay
from skksivi.plotting._marginals import MarginalsDisplay
from skksivi.plotting._path import PathDisplay

__all__ = [
    "CalibrationDisplay",
    "CorrelationDisplay",
    "DensityDisplay",
    "ForestDisplay",
    "LayersDisplay",
    "LossDisplay",
    "MarginalsDisplay",
    "PathDisplay",
    "ScoreCallsDisplay",
]
