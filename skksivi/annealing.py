"""Temperature schedules: functions of training progress in [0, 1] that multiply the score of the target."""

from __future__ import annotations

from sklearn.base import BaseEstimator

__all__ = ["Linear"]


class Linear(BaseEstimator):
    """Raise the inverse temperature linearly to one, then stay there.

    At inverse temperature c the fit follows p(x)^c, whose score is c times that of p: flatter modes are easier to
    reach. The paper's schedule min(1, 0.1 + t / 25,000) over 50,000 iterations is the default.

    Parameters
    ----------
    start : float, default=0.1
        Inverse temperature at the start, in (0, 1].
    until : float, default=0.45
        Share of the training after which it is one, in (0, 1].

    Examples
    --------
    >>> from skksivi.annealing import Linear
    >>> schedule = Linear(start=0.2, until=0.5)
    >>> [round(schedule(progress), 2) for progress in (0.0, 0.25, 0.9)]
    [0.2, 0.6, 1.0]
    """

    def __init__(self, start: float = 0.1, until: float = 0.45) -> None:
        self.start = start
        self.until = until

    def __call__(self, progress: float) -> float:
        """Return the inverse temperature at `progress` in [0, 1]."""
        if not (0 < self.start <= 1 and 0 < self.until <= 1):
            raise ValueError(f"`start` and `until` must lie in (0, 1], got {self.start!r} and {self.until!r}.")
        return min(1.0, self.start + (1 - self.start) * progress / self.until)
