"""Targets that are trained on a part of the data at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextvars import copy_context
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from skksivi._utils.checks import check_integer
from skksivi.score import ScoreFunction, ScoreWithProduct
from skksivi.targets._base import (
    ALL_CLASSES,
    Blocks,
    Divisible,
    Forms,
    OfRows,
    Summed,
    Target,
    in_chunks,
    log_prob_of,
    prior_of,
    pulled,
)

#: A batch of a loader.
B = TypeVar("B")

#: Rows of the beginning of a stream that are kept in memory.
N_KEPT = 2**16


class Minibatches(Target):
    r"""A target whose training uses a random part of its data at a time.

    The kernel Stein discrepancy multiplies two scores. From one minibatch their product would be biased by the
    covariance of the noise; the two halves of a batch of draws therefore use independent minibatches, and pairs
    within a half are left out. Within a finite difference a minibatch stays the same. If the target has a single
    mode, minibatches are corrected by an expansion of the score there, so that little noise remains, and the pilot
    uses a part of the data that is corrected in the same way. Scores of all of the data are evaluated in blocks.

    Parameters
    ----------
    target : Target
        With `n_rows`, the number of its observations, and `subset(rows)`, the target given only the observations
        named by a tensor of integers, each counted n_rows / len(rows) times. `from_rows` makes one.
    batch_size : int
        Observations of a minibatch, drawn with replacement.

    See Also
    --------
    from_rows : A target of a score function that takes some of the rows.
    Sharded : Rows in several processes.

    References
    ----------
    Baker, J. et al. (2019). Control variates for stochastic gradient MCMC. https://arxiv.org/abs/1706.05439

    Examples
    --------
    >>> import numpy as np
    >>> from skksivi.targets import BayesianLogisticRegression, Minibatches
    >>> X = np.random.RandomState(0).normal(size=(1000, 3))
    >>> target = BayesianLogisticRegression(X, X[:, 0] > 0.1)
    >>> Minibatches(target, batch_size=100)
    Minibatches(BayesianLogisticRegression(n_features=3), batch_size=100)
    """

    def __init__(self, target: Divisible, batch_size: int) -> None:
        if hasattr(target, "total"):
            raise TypeError(
                f"`target` is a {type(target).__name__}, whose rows lie elsewhere; give `Sharded` a function that "
                "returns the `Minibatches` of each rank."
            )
        for name in ("n_rows", "subset"):
            if not hasattr(target, name):
                raise TypeError(
                    f"`target` must have `n_rows` and `subset(rows)`, but {type(target).__name__} has no `{name}`; "
                    "define it, or make a target by skksivi.targets.from_rows."
                )
        self.target = target
        self.batch_size = check_integer(batch_size, "batch_size", min_val=1)

    @classmethod
    def from_loader(
        cls,
        loader: Iterable[B] | Callable[[], Iterable[B]],
        target_of_batch: Callable[[B], OfRows],
        *,
        n_rows: int | None = None,
        prior: Target | None = None,
    ) -> Stream:
        """Make a target from data that are read in batches, and need not fit into memory.

        A minibatch is the next batch. Batches must therefore be random parts of the data, as from a
        `torch.utils.data.DataLoader` that shuffles, or from files whose rows are in random order. A copy of the
        stream, and a new fit, start again at the first batch. A fit that resumes from a `checkpoint` reads forward to
        the batch where it stopped, for which the order must be the same each time. The mode and the checks of a fit
        need all of the data: they take some five to twenty passes over the loader, each with the memory of one batch.
        A batch may be empty, or lack classes that `BayesianLogisticRegression` or `BayesianMultinomialRegression`
        find in others.

        Parameters
        ----------
        loader : iterable or callable
            Returns the same rows in each iteration over it: a list, a DataLoader, or a function that returns
            an iterator, such as ``lambda: parquet_file.iter_batches(1000)`` with pyarrow. An IterableDataset may
            change their order.
        target_of_batch : callable
            Makes the target from the rows of a batch, with `n_rows` and the prior.
        n_rows : int, default=None
            Number of rows of a pass; None counts them in one more pass, as classes are found if the first batch may
            lack some.
        prior : Target, default=None
            The prior in the target of each batch, to be counted once. By default the target given no rows, as for
            `Sharded`.

        Returns
        -------
        target : Stream
            With ``n_passes`` and ``n_rows_read`` of all passes and minibatches so far.

        Raises
        ------
        TypeError
            The loader can be read only once, or `target_of_batch` does not return a target with rows.
        ValueError
            A batch has other features or columns than the first, or a class that the first pass lacks; a pass has
            fewer or more rows than it should. In a fit, training that has begun keeps its state.

        Examples
        --------
        >>> import numpy as np
        >>> from skksivi.targets import BayesianLogisticRegression, Minibatches
        >>> X = np.random.RandomState(0).normal(size=(1000, 3))
        >>> y = X[:, 0] > 0.1
        >>> def batches():  # of a file, say
        ...     for k in range(0, 1000, 100):
        ...         yield X[k : k + 100], y[k : k + 100]
        >>> target = Minibatches.from_loader(batches, lambda batch: BayesianLogisticRegression(*batch))
        >>> target
        Stream(n_features=3, n_rows=1000, batch_size=100)
        """
        return Stream(Reader(loader, target_of_batch), n_rows, prior)

    @property
    def n_features(self) -> int:  # type: ignore[override]
        """Dimension d."""
        return self.target.n_features

    def minibatch(self, generator: torch.Generator) -> Target:
        """Draw observations and return the target given only these."""
        rows = torch.randint(self.target.n_rows, (self.batch_size,), generator=generator, device=generator.device)
        return self.target.subset(rows)

    @property
    def n_rows(self) -> int:
        """Number of observations."""
        return self.target.n_rows

    @property
    def prior(self) -> Target:
        """The prior that is in the target."""
        return prior_of(self.target, None)

    def part(self, n: int) -> Blocks:
        """Return the target given only n observations, always the same ones; all if there are fewer."""
        if n >= self.n_rows:
            return Blocks(self.target)
        order = torch.randperm(self.n_rows, generator=torch.Generator().manual_seed(0), device="cpu")
        return Blocks(self.target, order[:n])

    def score_fn(self, x: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of x (n, d), from all of the data, a block at a time."""
        return Blocks(self.target).score_fn(x)

    @property
    def score_vjp(self) -> ScoreWithProduct | None:
        """The product of the target, if it has one."""
        return Blocks(self.target).score_vjp

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return a copy whose target is on `device` and of type `dtype`."""
        return self._replaced(target=self.target.to(device=device, dtype=dtype))

    def __repr__(self) -> str:
        return f"Minibatches({self.target!r}, batch_size={self.batch_size})"


@dataclass
class Reading:
    """How often the rows of a loader were read, by all copies of a stream."""

    n_passes: int = 0
    n_rows: int = 0


class BrokenLoaderError(ValueError, ConnectionError):
    """A loader does not give what it gave before; what was learned until then is kept."""


class Reader(Generic[B]):
    """Makes targets of the batches of a loader, and looks whether they belong together."""

    def __init__(self, loader: Iterable[B] | Callable[[], Iterable[B]], target_of_batch: Callable[[B], OfRows]):
        if not callable(target_of_batch):
            raise TypeError(f"`target_of_batch` must be a function, got a {type(target_of_batch).__name__}.")
        if not (callable(loader) or hasattr(loader, "__iter__")):
            raise TypeError(f"`loader` must be iterable, or return an iterator, got a {type(loader).__name__}.")
        if hasattr(loader, "__next__"):
            raise TypeError(
                f"`loader` is a {type(loader).__name__}, which can be read only once; pass the function that makes "
                "it, or an object that can be iterated again."
            )
        self.loader = loader
        self.target_of_batch = target_of_batch
        self.device: torch.device | str | None = None
        self.dtype: torch.dtype | None = None
        self.reading = Reading()
        self.columns: object = None
        self.n_features: int | None = None
        self.classes: np.ndarray | None = None
        self.learns = self.may_lack = False

    def targets(self) -> Iterator[OfRows]:
        """Yield the targets of batches; raise BrokenLoaderError where they cannot be read."""
        try:
            yield from self._targets()
        except BrokenLoaderError:
            raise
        except OSError as error:
            raise BrokenLoaderError(f"`loader` failed in a pass: {error}.") from error

    def _targets(self) -> Iterator[OfRows]:
        batches = self.loader() if callable(self.loader) else self.loader
        for k, batch in enumerate(batches):
            if _is_empty(batch):
                continue
            try:
                made = copy_context().run(self._made, batch)
            except Exception as error:
                error.add_note(f"Raised by `target_of_batch` for batch {k} of `loader`.")
                raise
            target = self._checked(made, batch, k)
            self.reading.n_rows += target.n_rows
            moves = self.device is not None or self.dtype is not None
            yield target.to(device=self.device, dtype=self.dtype) if moves else target

    def _made(self, batch: B) -> OfRows:
        ALL_CLASSES.set(self._all_classes)
        return self.target_of_batch(batch)

    def _all_classes(self, classes: np.ndarray, most: float) -> np.ndarray:
        """Return the classes of all rows, those known until now while they are learned."""
        known = classes if self.classes is None else self.classes
        if self.learns:
            self.classes = np.union1d(known, classes)
            self.may_lack = len(self.classes) < most
            return self.classes if len(self.classes) > 1 else np.repeat(self.classes, 2)  # the other is still to come
        if new := set(classes.tolist()) - set(known.tolist()):
            raise BrokenLoaderError(
                f"`loader` gives a class {min(new)!r}, which a pass before lacks: {known.tolist()}."
            )
        return known

    def _checked(self, target: OfRows, batch: B, k: int) -> OfRows:
        if not (hasattr(target, "score_fn") and hasattr(target, "n_rows")):
            raise TypeError(
                f"`target_of_batch` returned a {type(target).__name__} for batch {k}, expected a target with "
                "`n_rows`."
            )
        d, columns = int(target.n_features), _columns(batch)
        if self.n_features is None or (self.learns and self.may_lack and columns == self.columns):
            self.n_features, self.columns = d, columns
        if (d, columns) != (self.n_features, self.columns):
            raise BrokenLoaderError(
                f"`loader` changes its columns: batch {k} gives {d} features from {columns}, but the first batch "
                f"{self.n_features} from {self.columns}."
            )
        return target


def _columns(batch: Any) -> object:  # noqa: ANN401
    """Return the names of the columns of a batch, or the shapes of its rows."""
    if hasattr(batch, "schema"):
        return batch.schema.names
    if isinstance(batch, dict):
        return {name: _columns(part) for name, part in batch.items()}
    if isinstance(batch, list | tuple):
        return [_columns(part) for part in batch]
    return tuple(np.shape(batch)[1:])


def _is_empty(batch: Any) -> bool:  # noqa: ANN401
    """Tell whether a batch has no rows."""
    parts = list(batch.values()) if isinstance(batch, dict) else batch
    is_nested = isinstance(parts, list | tuple) and len(parts)
    return _is_empty(parts[0]) if is_nested else tuple(np.shape(parts)[:1]) == (0,)


class Weighted(Summed):
    r"""A target of some of the rows of a stream, which count for all of them.

    .. math:: \log p(x) \approx \log p_0(x) + \frac{n}{\sum_b n_b} \sum_b \ell_b(x), \qquad
        \log p_b = \log p_0 + \ell_b

    Parameters
    ----------
    targets : callable or list
        The :math:`p_b`, or what yields them.
    n : int
    prior : Target
        The :math:`p_0`.
    """

    def __init__(
        self, targets: Callable[[], Iterable[OfRows]] | list[OfRows], n: int, prior: Target, forms: Target | Forms
    ) -> None:
        self.targets = targets
        self.n = n
        self.prior = prior
        self.target = forms
        self.n_features = prior.n_features

    def batches(self) -> Iterable[OfRows]:
        return self.targets() if callable(self.targets) else self.targets

    def total(self, evaluate: Callable[..., Tensor], *points: Tensor) -> Tensor:
        """Return the sum of what a function of a target and of points (..., d) gives, for all rows."""
        x, d = points[0], self.n_features
        flat = [p.reshape(-1, d) for p in points]
        at_prior = evaluate(self.prior, *flat)
        total, n_taken = 0.0 * at_prior, 0
        for target in self.batches():
            total = total + (in_chunks(evaluate, target, flat, target.n_rows) - at_prior)
            n_taken += target.n_rows
        found = at_prior + self.n / n_taken * total
        return found.reshape(x.shape[:-1] if evaluate is log_prob_of else x.shape)

    def product(self, x: Tensor) -> tuple[Tensor, ScoreFunction]:
        """Return the score at x (n, d) and its vector-Jacobian product, by the products of the targets."""
        if not isinstance(self.targets, list) or len(self.targets) != 1:  # one can be kept, with what it has computed
            return super().product(x)
        (target,) = self.targets
        c = self.n / target.n_rows
        (s, pull), (at_prior, pull_prior) = pulled(target, x), pulled(self.prior, x)
        return c * s + (1 - c) * at_prior, lambda v: c * pull(v) + (1 - c) * pull_prior(v)


class Stream(Weighted):
    """A target of data that are read a batch at a time; `Minibatches.from_loader` makes one.

    Attributes
    ----------
    n_features, n_rows, batch_size : int
    n_passes, n_rows_read : int
        Passes over all of the data, and rows that were read, minibatches included, by this stream and its copies.
    """

    def __init__(self, reader: Reader, n_rows: int | None, prior: Target | None) -> None:
        reader.learns = True
        first = next(reader.targets(), None)
        if first is None:
            raise ValueError("`loader` is empty; it must give one batch at least.")
        may_lack = reader.may_lack
        n = sum(t.n_rows for t in reader.targets()) if n_rows is None or may_lack else None
        reader.reading.n_passes += n is not None
        reader.learns = False
        if may_lack:
            reader.n_features, first = None, next(reader.targets())
        self._reader = reader
        forms = Forms(None if first.score_vjp is None else True)  # all of log p would be a pass each time
        self.n_rows = check_integer(n if n_rows is None else n_rows, "n_rows", min_val=1)
        super().__init__([], self.n_rows, prior_of(first, prior), forms)
        self.products = getattr(first, "products", "auto")
        self.batch_size = first.n_rows
        self._next: Iterator[OfRows] | None = None
        self._kept: list[OfRows] = []

    @property
    def n_passes(self) -> int:
        return self._reader.reading.n_passes

    @property
    def n_rows_read(self) -> int:
        return self._reader.reading.n_rows

    def batches(self) -> Iterator[OfRows]:
        yield from self._pass()
        self._reader.reading.n_passes += 1

    def _pass(self) -> Iterator[OfRows]:
        """Yield the targets of all batches; raise ValueError if they have another number of rows than they should."""
        n = 0
        for target in self._reader.targets():
            n += target.n_rows
            yield target
        if n != self.n_rows:
            fact = "ended early: it" if n < self.n_rows else "repeats rows, or has more of them than before: it"
            raise BrokenLoaderError(f"`loader` {fact} gave {n} rows in a pass, expected `n_rows` = {self.n_rows}.")

    def minibatch(self, generator: torch.Generator) -> Target:
        """Return the target of the next batch, counted for all rows; after the last comes the first."""
        if self._next is None:
            self.rewind(0)
        return self._of([next(self._next)])  # type: ignore[arg-type]

    def rewind(self, n: int) -> None:
        """Let the next minibatch be the one after n, from the first batch on."""
        self._next = islice(self._forever(), n, None)

    def _forever(self) -> Iterator[OfRows]:
        while True:
            yield from self._pass()

    def part(self, n: int) -> Target:
        """Return the target of the first n rows, in whole batches, counted for all; of all if there are no more."""
        if n >= self.n_rows:
            return self
        if n > N_KEPT:
            return self._of(lambda: _until(self._reader.targets(), n))
        if sum(target.n_rows for target in self._kept) < n:
            self._kept = list(_until(self._reader.targets(), n))
        return self._of(list(_until(self._kept, n)))

    def _of(self, targets: Callable[[], Iterable[OfRows]] | list[OfRows]) -> Weighted:
        return Weighted(targets, self.n_rows, self.prior, self.target)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return a copy that starts from the beginning, of targets on `device` and of type `dtype`."""
        reader = copy.copy(self._reader)
        reader.device, reader.dtype = device or reader.device, dtype or reader.dtype
        return self._replaced(_reader=reader, prior=self.prior.to(device=device, dtype=dtype))

    def __getstate__(self) -> dict[str, object]:
        """Leave the place in the loader, and the batches kept from it: a copy starts from the beginning."""
        return {**vars(self), "_next": None, "_kept": []}

    def __repr__(self) -> str:
        return f"Stream(n_features={self.n_features}, n_rows={self.n_rows}, batch_size={self.batch_size})"


def _until(targets: Iterable[OfRows], n: int) -> Iterator[OfRows]:
    """Yield targets until they have n rows together."""
    for target in targets:
        yield target
        n -= target.n_rows
        if n <= 0:
            return
