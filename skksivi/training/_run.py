"""A fit under way: where and from what seed it runs, what it reports, what it may cost, and what is kept of it."""

from __future__ import annotations

import logging
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from sklearn.exceptions import ConvergenceWarning

from skksivi._utils.arrays import make_generator
from skksivi.coordinates._lines import fault_in_coordinates
from skksivi.score import Score, Tally
from skksivi.score._improper import ImproperError
from skksivi.score._probe import trial_points
from skksivi.score._tally import DIVERGED, BudgetError, DivergedError

if TYPE_CHECKING:
    from skksivi.families._samplers import Sampler

LOGGER = logging.getLogger("skksivi")

#: Errors that may end a fit and leave the estimator fitted, in the state that was reached.
KEEPING = (KeyboardInterrupt, FloatingPointError, BudgetError, ConnectionError, TimeoutError)


class Fit(NamedTuple):
    """What `_fit` returns.

    Attributes
    ----------
    sampler : Sampler
    report : mapping of str to object
        The other learned attributes, by their public names.
    ended_by : BaseException or None
        The error that ended the fit early, if the state reached is to be kept.
    remark : str or None
        A warning to give when the fit is over.
    """

    sampler: Sampler
    report: Mapping[str, object]
    ended_by: BaseException | None = None
    remark: str | None = None


@dataclass
class Run:
    """A fit under way.

    Attributes
    ----------
    seed : int
    device : torch.device
    tally : Tally
        Counts its score calls.
    show : callable or None
        Shows callbacks the fit as if it ended now; returns whether one of them asks to stop.
    keeping : type or tuple of types
        The errors after which the fit that was kept last is the result.
    finish : callable
        Called when the result is stored, with whether the fit is complete.
    generator : torch.Generator
        What it draws from.
    kept : Fit or None
        The best fit so far.
    """

    seed: int
    device: torch.device
    tally: Tally
    show: Callable[[Fit], bool] | None = None
    keeping: type[BaseException] | tuple[type[BaseException], ...] = KEEPING
    finish: Callable[[bool], None] = lambda _: None
    generator: torch.Generator = field(init=False)
    kept: Fit | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.generator = make_generator(self.seed, self.device)

    def keep(self, fit: Fit) -> Fit:
        """Keep a fit, which is the result if an error ends the run; return it."""
        self.kept = fit
        return fit

    def result(self, fit: Callable[[Run], Fit], advice: str) -> Fit:
        """Return what a function of the run returns or, if an error ends that, the fit that was kept last."""
        try:
            found = fit(self)
        except self.keeping as error:
            if self.kept is None:
                raise
            found = self.kept._replace(ended_by=error)
        self.tally.limit = None
        return _of_budget(found, self.tally, advice) if self.tally.is_spent else found


def _of_budget(fit: Fit, tally: Tally, advice: str) -> Fit:
    """Return a fit that has spent its budget, with a remark about it."""
    n_iter = fit.report.get("n_iter_", 0)
    reached = f"after {n_iter} iterations of the training" if n_iter else "before the training began"
    todo = advice or "raise `max_score_calls` or `budget` of whiten=skksivi.parameters.Pilot(...)"
    remark = (
        f"The {tally.spent:,} evaluations of `max_score_calls` were spent {reached}, and the fit is the best until "
        f"then: {todo}, or check the fit by `skksivi.diagnose`."
    )
    return fit._replace(ended_by=None if isinstance(fit.ended_by, BudgetError) else fit.ended_by, remark=remark)


@contextmanager
def explained(score: Score) -> Iterator[None]:
    """Explain errors by a score that is not the gradient of a known log p, or by the doubt about a target, if there
    is one, and leave out the warnings that it explains.

    Raises
    ------
    ValueError
        The wrong score, the doubt, or the budget was spent before there was anything to return.
    FloatingPointError
        The doubt, where numbers that are not finite have ended the fit.
    """
    doubt = None if score.doubt is None else score.doubt.words
    try:
        with ExitStack() as undo:
            if doubt is not None:
                undo.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore", ConvergenceWarning)
            yield
    except BudgetError:
        raise ValueError(
            f"The {score.tally.spent:,} evaluations of `max_score_calls` were spent before there was anything to "
            "return: checks of the score and the search for a mode take some 500 to 3,000, more with many features, "
            "and several modes 10,000 and more. Raise `max_score_calls` of whiten=Pilot(...), or set `init` near the "
            "mode."
        ) from None
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        is_lost = isinstance(error, (ImproperError, *DIVERGED))
        if is_lost and (fault := _fault_of_score(score.double)) is not None:
            raise ValueError(
                f"`score_fn` is not the gradient of `log_prob`: {fault}. Correct one of them, or set log_prob = None "
                "in a target with another score."
            ) from None
        if isinstance(error, DivergedError) and doubt is None and error.feature is not None:
            raise ValueError(f"{error} It was lost first or farthest in {score.label(error.feature)}.") from None
        if isinstance(error, ImproperError) or (isinstance(error, DivergedError) and doubt is not None):
            raise ValueError(doubt or str(error)) from None
        if doubt is None:
            raise
        kind = FloatingPointError if isinstance(error, FloatingPointError) else ValueError
        raise kind(f"{doubt} The fit has ended: {textwrap.shorten(str(error), 160)}") from error


def _fault_of_score(score: Score) -> str | None:
    """Say in which coordinates the score is not the slope of the target's own log p, at points of order one."""
    score.tally.limit, x = None, trial_points(score)
    return fault_in_coordinates(score, x, score(x).detach().square().mean(0).rsqrt().clamp_max(1))


@contextmanager
def logged(verbose: int) -> Iterator[None]:
    """Show the progress of a fit, by the user's log handlers if there are any."""
    with ExitStack() as undo:
        if verbose > 0 and not LOGGER.hasHandlers():
            handler = logging.StreamHandler()
            LOGGER.addHandler(handler)
            undo.callback(LOGGER.removeHandler, handler)
        level = logging.INFO if verbose == 1 else logging.DEBUG
        if verbose > 0 and not LOGGER.isEnabledFor(level):
            undo.callback(LOGGER.setLevel, LOGGER.level)
            LOGGER.setLevel(level)
        yield


@contextmanager
def ordinary_mode(device: torch.device) -> Iterator[None]:
    """Restore torch's default modes for gradients, dtype and device within a context, whatever the caller has set."""
    with ExitStack() as modes:
        if torch.empty(0).device.type != "cpu":  # `get_default_device` of torch 2.6 fails after a reset
            modes.enter_context(torch.device("cpu"))
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.enable_grad())
        modes.enter_context(torch.autocast(device.type, enabled=False))
        yield
