"""How often a fit evaluates a score, for how long, and up to what limit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from skksivi._utils.log import LOGGER

T = TypeVar("T")

#: Name of the stage of a fit before the first that is announced, and the unit of most lengths.
CHECKS, CALLS = "checks", "score calls"


#: What was told of targets, which is told only once of each.
TOLD: MutableMapping[object, set[str]] = WeakKeyDictionary()


def told_of(target: object) -> set[str]:
    """Return what was told of a target or a function before; nothing of one without a hash or weak references."""
    with suppress(TypeError):
        return TOLD.setdefault(target, set())
    return set()


@dataclass(frozen=True)
class Stage:
    """A part of a fit, with what it took.

    Attributes
    ----------
    name : str
    n_calls : int
        Evaluations of the score or log p, and products with the Jacobian of the score.
    seconds : float
        It is not compared, because equal fits may differ in it.
    """

    name: str
    n_calls: int
    seconds: float = field(compare=False)

    def __str__(self) -> str:
        return f"{self.name} {self.n_calls:,} calls, {self.seconds:.2g} s"


class Listener(Protocol):
    """An object that follows a fit by its evaluations of the score."""

    def begin(self, stage: str, length: int, unit: str, so_far: int) -> None:
        """Take note that a stage begins after `so_far` calls, of a length in some unit, zero if unknown."""

    def hear(self, so_far: int, limit: int | None) -> None:
        """Take note of the number of calls so far, and of the most that are allowed."""


@dataclass
class Tally:
    """Counts of score calls: points at which it was evaluated, and products with its Jacobian.

    A product by finite differences counts as two evaluations, a product by automatic differentiation as a product.
    A `fault` of the target that a fit has come upon is told in the place of what follows from it; it `has_suspect`
    where log p and scores do not agree, and `is_random` where scores differ from call to call, which was told. A fit
    `is_frugal` where calls are so expensive that checks and searches make do with few.
    """

    n_values: int = 0
    n_products: int = 0
    n_mended: int = 0
    n_rejected: int = 0
    told: set[str] = field(default_factory=set, compare=False, repr=False)  # of the target, by this fit or another
    fault: str | None = field(default=None, compare=False, repr=False)
    raised: Exception | None = field(default=None, compare=False, repr=False)  # by the target, last
    has_suspect: bool = field(default=False, compare=False, repr=False)
    is_random: bool = field(default=False, compare=False, repr=False)
    is_frugal: bool = field(default=False, compare=False, repr=False)
    limit: int | None = field(default=None, compare=False, repr=False)
    spent: int = field(default=0, compare=False, repr=False)  # the limit that has been reached
    listener: Listener | None = field(default=None, compare=False, repr=False)
    stages: dict[str, Stage] = field(default_factory=dict, compare=False, repr=False)
    last: str = field(default=CHECKS, compare=False, repr=False)  # the stage that was announced
    _reserved: int = field(default=0, compare=False, repr=False)
    _now: tuple[str, int, float] = field(
        default_factory=lambda: (CHECKS, 0, time.monotonic()), compare=False, repr=False
    )

    def add(self, *, values: int = 0, products: int = 0) -> None:
        """Count calls about to be made.

        Raises
        ------
        BudgetError
            They would exceed the limit.
        """
        if self.limit is not None and values + products > (self.left or 0):
            self.spent = self.limit
            raise BudgetError
        self.n_values += values
        self.n_products += products
        if self.listener is not None:
            self.listener.hear(self.total, self.limit)

    def marking(self, f: Callable[..., T], *args: object) -> T:
        """Call a function of the target, and remember what it raises as its own."""
        try:
            return f(*args)
        except Exception as error:
            self.raised = error
            raise

    def found(self, fault: str | None) -> None:
        """Keep the first fault; a search that knows of one may take few more calls."""
        if fault is not None and self.fault is None:
            self.fault = fault
            self.limit = None if self.limit is None else min(self.limit, self.total + 20_000)

    @contextmanager
    def at_most(self, n: int) -> Iterator[None]:
        """Allow no more than n calls within a context, unless there is a limit."""
        if self.limit is not None:
            yield
            return
        self.limit = self.total + n
        try:
            yield
        finally:
            self.limit = None

    @contextmanager
    def reserving(self, n: int) -> Iterator[None]:
        """Reserve calls for later."""
        self._reserved += n
        try:
            yield
        finally:
            self._reserved -= n

    @contextmanager
    def trying(self, n: int) -> Iterator[None]:
        """Allow about n calls within a context, which ends without an error where these do not suffice."""
        spent = self.spent
        with self.reserving(max(0, (self.left or n) - n)):
            try:
                yield
            except BudgetError:
                self.spent = spent

    def begin(self, stage: str, length: int = 0, unit: str = CALLS) -> None:
        """Announce a stage of a fit of about this length, zero if unknown."""
        self.end(stage)
        self.last = stage
        if self.listener is not None:
            self.listener.begin(stage, length, unit, self.total)

    def end(self, next_stage: str = "") -> None:
        """Add the calls and seconds of the current stage to the total under its name, and begin the next."""
        (name, n_before, began), now = self._now, time.monotonic()
        before = self.stages.get(name, Stage(name, 0, 0.0))
        n_calls, seconds = self.total - n_before, now - began
        self.stages[name] = Stage(name, before.n_calls + n_calls, before.seconds + seconds)
        self._now = (next_stage, self.total, now)

    def mended(self, product: Tensor, differences: Callable[[Tensor], Tensor]) -> Tensor:
        """Return products (n, d) by differentiation, or by finite differences in rows where they are not finite.

        Torch's second derivative of a finite function may be NaN: of `logaddexp` if one argument is far below the
        other, or of a branch of `where` that is not taken. A warning is given once.
        """
        if product.is_cuda and torch.cuda.is_current_stream_capturing():  # which allows no check of values
            return product
        if math.isfinite(product.sum()):
            return product
        bad = ~product.isfinite().all(-1)
        if not bad.any():
            return product
        found = differences(bad)
        if not self.n_mended and found.isfinite().any():
            LOGGER.info(
                "score: the derivative by torch is not finite at %d of %d points where the score is; differences of "
                "the score take its place at such points",
                len(found),
                len(product),
            )
        self.n_mended += len(found)
        return product.index_put((bad,), found.to(product))

    def __getstate__(self) -> dict[str, int | None]:
        """Leave the listener and the limit, which belong to one fit."""
        own = {"limit": None, "spent": 0, "listener": None, "raised": None}
        return {**vars(self), **own}

    @property
    def left(self) -> int | None:
        """Calls that are left, None without a limit."""
        return None if self.limit is None else max(0, self.limit - self._reserved - self.total)

    @property
    def seconds_per_call(self) -> float:
        """The mean of the checks, zero before they have ended."""
        checks = self.stages.get(CHECKS)
        return checks.seconds / max(1, checks.n_calls) if checks else 0.0

    @property
    def is_scarce(self) -> bool:
        """Whether so few calls are left that a judge has none for more than one look."""
        return self.left is not None and self.left < 2000

    @property
    def is_spent(self) -> bool:
        """Whether the calls that were allowed did not suffice."""
        return self.spent > 0

    @property
    def total(self) -> int:
        """Evaluations and products together."""
        return self.n_values + self.n_products


# What ends a fit early, apart from errors of the score itself


class BudgetError(Exception):
    """A score would be evaluated more often than the limit allows."""


class DivergedError(ValueError):
    """The search for a target has produced points x (n, d) that are not finite, or too far in some feature."""

    def __init__(self, x: Tensor | None = None) -> None:
        self.feature = None if x is None or not x.numel() else int(x.abs().nan_to_num(math.inf).mean(0).argmax())
        super().__init__(
            "The search for the target reached values that are not finite: `score_fn` may have the wrong sign (it "
            "is the gradient of log p, not of -log p) or belong to no proper density. Else set `init` to a point "
            "near a mode or, where there is such a parameter, `whiten` to a pair (mean, Cholesky factor) or to None."
        )


class ImproperError(ValueError):
    """The target has no finite mass."""


#: What ends a search, or chains, that have left the finite numbers.
DIVERGED = (DivergedError, torch.linalg.LinAlgError)


class Doubt(NamedTuple):
    """What seems wrong with the domain of a target.

    Attributes
    ----------
    words : str
        For the user.
    ends : Tensor of shape (d, 2) or None
        Where the density seems to end along each coordinate, infinite where it does not; None if that is not it.
    """

    words: str
    ends: Tensor | None = None

    def concerns(self, x: Tensor) -> bool:
        """Tell whether an end is so near to draws x (n, d) that it is no number that overflows far out."""
        if self.ends is None:
            return True
        near = (self.ends.to(x) - x.mean(0)[:, None]).abs() < 20 * x.std(0)[:, None]
        return not bool(x.isfinite().all()) or bool(near.any())
