r"""Schedules: of the temperature along a training, and of the bridge along the layers of a hierarchy.

A temperature schedule is a function of training progress in [0, 1] by which the score of the target is multiplied.
A bridge is a function of u = t / T in [0, 1), the place of layer t, and gives the weight :math:`\lambda_t` of the
target in :math:`s_t = (1 - \lambda_t) s_{\mathrm{base}} + \lambda_t s_p`; it is one at u = 0, the last layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sklearn.base import BaseEstimator

from skksivi._utils.arrays import check_function
from skksivi._utils.checks import lies_between, shown

__all__ = ["BRIDGES", "Linear"]
__dir__ = __all__.copy

#: Bridges by name.
BRIDGES: dict[str, Callable[[float], float]] = {
    "linear": lambda u: 1 - u,
    "quadratic": lambda u: (1 - u) ** 2,
    "cosine": lambda u: (1 + math.cos(math.pi * u)) / 2,
    "geometric": lambda u: 0.01**u,
    "none": lambda _: 1.0,
}


@dataclass(eq=False, repr=False)
class Linear(BaseEstimator):
    """Raise the inverse temperature linearly to one, then stay there.

    At inverse temperature c the fit follows p(x)^c, whose score is c times the score of p: flatter modes are easier
    to reach. The paper's schedule min(1, 0.1 + t / 25,000) over 50,000 iterations is the default.

    Parameters
    ----------
    start : float, default=0.1
        Inverse temperature at the start, in (0, 1].
    until : float, default=0.45
        Share of the training after which it is one, in (0, 1].

    See Also
    --------
    skksivi.parameters.Bridge : The path of a hierarchy from its base to the target.

    Examples
    --------
    >>> from skksivi.annealing import Linear
    >>> schedule = Linear(start=0.2, until=0.5)
    >>> [round(schedule(progress), 2) for progress in (0.0, 0.25, 0.9)]
    [0.2, 0.6, 1.0]
    """

    start: float = 0.1
    until: float = 0.45

    def __call__(self, progress: float) -> float:
        """Return the inverse temperature at `progress` in [0, 1]."""
        if not all(lies_between(share, 0, math.nextafter(1, 2)) for share in (self.start, self.until)):
            raise ValueError(f"`start` and `until` must lie in (0, 1], got {shown((self.start, self.until))}.")
        return min(1.0, self.start + (1 - self.start) * progress / self.until)


def bridge_levels(bridge: str | Callable[[float], float], n_layers: int) -> list[float]:
    """Return the weights of the target in the layers t = 0, ..., T - 1, checked."""
    weight = BRIDGES[bridge] if isinstance(bridge, str) else bridge
    check_function(weight, "bridge", "u")
    levels = [float(weight(t / n_layers)) for t in range(n_layers)]
    if levels[0] != 1 or not all(0 < level <= 1 for level in levels):
        raise ValueError(f"`bridge` must be one at 0 and in (0, 1] up to 1, got {levels} for {n_layers} layers.")
    return levels
