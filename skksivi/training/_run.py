"""A fit under way: where and from what seed it runs, what it may cost, what is kept of it, and what it says."""

from __future__ import annotations

import logging
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sklearn.exceptions import ConvergenceWarning

from skksivi._utils.arrays import make_generator
from skksivi._utils.log import LOGGER, LONG_WAIT, is_one_of_many, tell
from skksivi.coordinates._lines import fault_in_coordinates
from skksivi.score import Score
from skksivi.score._probe import trial_points
from skksivi.score._tally import CALLS, CHECKS, DIVERGED, BudgetError, DivergedError, ImproperError, Tally
from skksivi.score._target import is_divided
from skksivi.training._loop import CHECK_EVERY, Hook, Progress

if TYPE_CHECKING:
    from skksivi.families._samplers import Sampler

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
    reports : sequence of Hook
        What follows its iterations.
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
    reports: Sequence[Hook] = ()
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
        level = {-1: logging.ERROR, 1: logging.INFO}.get(verbose, logging.DEBUG)
        if verbose < 0 or (verbose > 0 and not LOGGER.isEnabledFor(level)):
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


#: Seconds between two lines of one stage.
SECONDS_BETWEEN = 10.0

#: Takes the place of a bar where there is none.
NO_BAR: Any = SimpleNamespace(n=0, update=lambda _: None, close=lambda: None)


@dataclass(eq=False)
class Reporter:
    """Says what a fit does, how far it is and how long it may take.

    With a positive `verbose` these are a line per stage and, for a stage of known length, its progress: a bar in a
    terminal or a notebook where tqdm is installed, otherwise further lines. With zero it is one line, once the fit
    has taken five seconds and again if it takes longer than that line has told. It is a warning, which is printed
    where nobody has configured logging, and is left out of searches and workers. With -1 there is nothing.

    Parameters
    ----------
    verbose : int
    target : Target or callable
        As it is given to `fit`.
    clock : callable, default=time.monotonic
        Returns seconds.
    """

    verbose: int
    target: object
    clock: Callable[[], float] = time.monotonic

    every: int = field(init=False, default=CHECK_EVERY)
    at_end: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        self._stage, self._length, self._unit, self._n_before = CHECKS, 0, CALLS, 0
        self._began = self._stage_began = self._told = self.clock()
        self._due, self._bar = LONG_WAIT, NO_BAR

    @contextmanager
    def following(self, tally: Tally) -> Iterator[None]:
        """Follow a fit by its score calls within a context."""
        tally.listener = self
        try:
            yield
        finally:
            tally.listener = None
            self._bar.close()

    def begin(self, stage: str, length: int, unit: str, so_far: int) -> None:
        """Say what begins, with the cost predicted by the calls of the stage before."""
        now, n_calls = self.clock(), so_far - self._n_before
        self._bar.close()
        if self.verbose > 0 and (length or stage != self._stage):
            cost = f", about {length:,} {unit} to come" if length else ""
            if length and unit == CALLS and n_calls:
                each = (now - self._stage_began) / n_calls
                cost += f", at {each:.2g} s each, about {length * each:.2g} s"
            LOGGER.info("%s: %s %s and %.1f s so far%s", stage, f"{so_far:,}", CALLS, now - self._began, cost)
        self._stage, self._length, self._unit, self._n_before = stage, length, unit, so_far
        self._stage_began = self._told = now
        self._bar = _bar(stage, length, unit) if self.verbose > 0 and length and _is_watched() else NO_BAR

    def hear(self, so_far: int, limit: int | None) -> None:
        """Say, where it is time, how far the stage is or what the fit costs."""
        now, n = self.clock(), so_far - self._n_before
        if self.verbose == 0:
            self._tell_price(now - self._began, so_far, limit)
        elif self._unit == CALLS:
            self._bar.update(n - self._bar.n)
            if self.verbose > 0 and self._bar is NO_BAR and now - self._told > SECONDS_BETWEEN:
                of = f" of about {self._length:,}" if n <= self._length else ""
                LOGGER.info("%s: %s%s %s, %.0f s", self._stage, f"{n:,}", of, CALLS, now - self._stage_began)
                self._told = now

    def __call__(self, progress: Progress) -> bool:
        """Say how far a training is, as a hook of it."""
        n, now, is_last = progress.n_done, self.clock(), progress.n_done == self._length
        to_come = (now - self._told) / (n % CHECK_EVERY or CHECK_EVERY) * (self._length - n)
        self._told = now
        self._bar.update(n - self._bar.n)
        if is_last:
            self._bar.close()
        is_due = is_last or (self._bar is NO_BAR and n % (500 if self.verbose == 1 else CHECK_EVERY) == 0)
        if is_due and self.verbose > 0:
            line = "iteration %d of %d, loss %.3g, %.1f s, about %.1f s to come"
            LOGGER.info(line, n, self._length, progress.loss.item(), now - self._stage_began, to_come)
        return False

    def _tell_price(self, seconds: float, so_far: int, limit: int | None) -> None:
        if seconds <= self._due or not so_far:
            return
        usual = 10 ** max(4, len(str(so_far)))  # most fits take less than 10,000 calls, or else less than 100,000
        most = min(usual, limit or usual)
        in_all, words = seconds * most / so_far, "Most fits take up to" if most == usual else "The budget ends at"
        self._due = max(60.0, in_all)
        if is_one_of_many():
            return
        line = (
            f"The fit has taken {seconds:.0f} s so far and is at: {self._stage or 'fit'}. The score was evaluated "
            f"at {so_far:,} points, {seconds / so_far:.2g} s each. {words} {most:,}, which would "
            f"be {in_all:,.0f} s in all."
        )
        tell("%s%s", line, self._advice())

    def _advice(self) -> str:
        n_rows = getattr(self.target, "n_rows", None)
        if n_rows is None or n_rows < 10_000 or is_divided(self.target):
            return ""
        return f" Of the {n_rows:,} rows of the target skksivi.targets.Minibatches takes some at a time."


def _bar(stage: str, length: int, unit: str) -> Any:  # noqa: ANN401
    """Return a bar that goes when it is closed, none without tqdm."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return NO_BAR
    return tqdm(total=length, desc=stage, unit=f" {unit}", leave=False)


def _is_watched() -> bool:
    """Tell whether the standard error is a terminal, or the cell of a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules
