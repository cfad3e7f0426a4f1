"""Pictures of fits, by classes in the style of scikit-learn's displays.

Each class has `plot(ax=None)`, which draws into the axes it is given, or into a new figure, and class methods that
compute what is shown and call it. The drawn objects are in attributes: `ax_`, `figure_`, lines and so on.
"""

from skksivi.plotting._columns import ForestDisplay, MarginalsDisplay, SearchDisplay
from skksivi.plotting._curves import DensityDisplay, LossDisplay

__all__ = ["DensityDisplay", "ForestDisplay", "LossDisplay", "MarginalsDisplay", "SearchDisplay"]
