"""The optimisation loop, and what is done between its iterations."""

from skksivi.training._loop import Iterate, Objective, Scheduled, by_autograd, learning_rate_factor, minimise
from skksivi.training._run import Fit, Reporter, Run, logged, ordinary_mode

__all__ = [
    "Fit", "Iterate", "Objective", "Reporter", "Run", "Scheduled", "by_autograd", "learning_rate_factor",
    "logged", "minimise", "ordinary_mode",
]  # fmt: skip
