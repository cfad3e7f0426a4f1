"""Targets whose rows lie in several processes, which sum their scores."""

from __future__ import annotations

import math
import pickle
import platform
import textwrap
import time
import zlib
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from skksivi._utils import __version__
from skksivi._utils.arrays import as_array, as_tensor
from skksivi.targets._base import ALL_CLASSES, Summed, Target, log_prob_of, numbers_of, prior_of

T = TypeVar("T")

#: Numbers of the first message; some of them show whether all ranks ask for the same: messages of other lengths than
#: the others expect would end a process. What does not fit follows in a second.
FIRST, HEAD = 8192, 3

#: Seconds in which a rank that is not lost says so.
PATIENCE = 1.0

#: Relative differences of two priors that are no rounding.
TOLERANCE = 1e-9


@dataclass
class Traffic:
    """What was sent for a target that is summed over processes.

    Attributes
    ----------
    n_calls : int
        Scores, products and log-densities that were asked for, at any number of points.
    n_messages : int
        Messages of each rank, or round trips to the workers.
    n_bytes : int
        Bytes of them, as they leave one rank or the client; an all-reduce over a ring of W ranks sends 2 (W - 1) / W
        times as many over each connection.
    """

    n_calls: int = 0
    n_messages: int = 0
    n_bytes: int = 0


class Shard(NamedTuple):
    """The target of some of the rows, and the prior that is in it, None where that is to be counted."""

    target: Any
    prior: Target | None

    def evaluate(self, function: Callable[..., Tensor], *points: Tensor) -> Tensor:
        """Return what a function of a target and of points (n, d) gives for the rows, with the prior in one shard."""
        found = function(self.target, *points)
        if self.prior is not None:
            found = found - function(self.prior, *points)
        shape = points[0].shape[:-1] if function is log_prob_of else points[0].shape
        if tuple(found.shape) != tuple(shape):
            raise ValueError(f"`score_fn` returned shape {tuple(found.shape)}, expected {tuple(shape)} as its input.")
        return found


def made_shard(
    target_of_rows: Any,  # noqa: ANN401
    prior: Target | None,
    rank: int,
    n_ranks: int,
) -> tuple[Shard, dict[str, object]]:
    """Return the shard of a rank, and what it must share with the others.

    Raises
    ------
    TypeError
        It has no target, or its prior is not known.
    ValueError
        It has no rows.
    """
    target = target_of_rows if hasattr(target_of_rows, "score_fn") else target_of_rows(rank, n_ranks)
    if not hasattr(target, "score_fn") or isinstance(target, type):
        raise TypeError(f"`target_of_rows` returned a {type(target).__name__}, expected a target.")
    n_rows = getattr(target, "n_rows", None)
    if n_rows == 0:
        raise ValueError("The target has no rows; use fewer ranks or shards.")
    prior = prior_of(target, prior)
    facts = {
        "target": type(target).__name__,
        "n_features": int(target.n_features),
        "names": getattr(target, "names", None),
        "classes": None if (found := getattr(target, "classes", None)) is None else np.asarray(found).tolist(),
        "products": getattr(target, "products", "auto"),
        "batch_size": getattr(target, "batch_size", None),
        "log_prob": getattr(target, "log_prob", None) is not None,
        "score_vjp": getattr(target, "score_vjp", None) is not None,
        "version of skksivi": __version__,
        "version of torch": torch.__version__,
        "version of numpy": np.__version__,
        "version of Python": platform.python_version(),
        "prior": numbers_of(prior),
    }
    return Shard(target, prior if rank else None), facts


def check_equal(facts: list[dict[str, Any]], what: str) -> None:
    """Raise ValueError if one of several has other facts than the first."""
    for k, other in enumerate(facts):
        for name, expected in facts[0].items():
            same = other[name] == expected
            if name == "prior" and len(other[name]) == len(expected):
                same = np.allclose(other[name], expected, rtol=TOLERANCE, atol=TOLERANCE)
            if not same:
                raise ValueError(
                    f"`target_of_rows` of {what} {k} has {name} = {other[name]!r}, but {what} 0 has "
                    f"{expected!r}; all must have the same."
                )


class Ranks:
    """The processes of a group, which are asked for sums at the same time.

    Raises
    ------
    ValueError
        This process is in no group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "`group` is missing: this process is in no group. Start the script by torchrun, and call "
                "torch.distributed.init_process_group('gloo') first, with 'nccl' on GPUs."
            )
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("`group` does not have this process.")
        on_gpu = dist.get_backend(group) == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.traffic = Traffic()

    def gather(self, own: object) -> list[Any]:
        found: list[Any] = [None] * self.size
        self._talk(lambda: dist.all_gather_object(found, own, self.group))
        return found

    def sum(self, own: Callable[[], Tensor], points: tuple[Tensor, ...], n: int) -> Tensor:
        """Return the sum (n,) over ranks of what they compute, float64.

        Raises
        ------
        ConnectionError
            A rank is lost, or asks for other points.
        Exception
            What the first rank with an error has raised, on all ranks.
        """
        error: Exception | None = None
        try:
            numbers = own().reshape(-1).to(self.device, torch.float64)
        except Exception as raised:
            error, numbers = raised, torch.zeros(n, dtype=torch.float64, device=self.device)
        c = float(_checksum(points, n) >> 12)  # twenty bits: its square, summed over ranks, is exact in float64
        head = numbers.new_tensor([float(error is not None), c, c * c])
        first = numbers.new_zeros(FIRST)
        first[:HEAD] = head
        first[HEAD : HEAD + n] = numbers[: FIRST - HEAD]
        self._reduce(first)
        n_failed, total, of_squares = map(int, first[:HEAD].tolist())
        self.traffic.n_calls += 1
        if self.size * of_squares != total**2:
            raise ConnectionError(
                f"The {self.size} ranks are out of step: they evaluate the score at different points. Give all of "
                "them the same estimator, an integer as its `random_state`, one `checkpoint` that all can read, and "
                "machines with the same arithmetic."
            )
        if n_failed:
            self._raise_first(error)
        rest = numbers[FIRST - HEAD :].contiguous()
        if len(rest):
            self._reduce(rest)
        return torch.cat([first[HEAD : HEAD + n], rest])

    def _reduce(self, numbers: Tensor) -> None:
        self._talk(lambda: dist.all_reduce(numbers, group=self.group))
        self.traffic.n_messages += 1
        self.traffic.n_bytes += numbers.numel() * numbers.element_size()

    def _raise_first(self, own: Exception | None) -> None:
        """Raise the error of the first rank that has one."""
        errors = self.gather(_portable(own))
        rank = next(k for k, error in enumerate(errors) if error is not None)
        error = own if rank == self.rank and own is not None else errors[rank]
        error.add_note(f"Raised on rank {rank} of {self.size}.")
        raise error

    def _talk(self, act: Callable[[], object]) -> None:
        try:
            act()
        except RuntimeError as error:
            raise ConnectionError(
                f"Rank {self.rank} of {self.size} has lost {self._missing()}: a process has ended or does not "
                "answer, or the network has failed. Start all ranks again; a fit with a `checkpoint` resumes from "
                f"there, with any number of ranks. It said: {textwrap.shorten(str(error), 160)}"
            ) from error

    def _missing(self) -> str:
        """Return the names of the ranks that do not say that they are there."""
        try:
            store, began = dist.distributed_c10d._get_default_store(), time.monotonic()  # noqa: SLF001
            store.set(f"skksivi is here/{self.rank}", "")
            while True:
                lost = [k for k in range(self.size) if not store.check([f"skksivi is here/{k}"])]
                if not lost or time.monotonic() > began + PATIENCE:
                    break
                time.sleep(0.01)
        except RuntimeError:
            return "rank 0, or the network"
        return ("rank " + ", ".join(map(str, lost))) if lost else "another rank"


def _portable(error: Exception | None) -> Exception | None:
    """Return an error that can be sent, of the same kind if that can be."""
    try:
        return pickle.loads(pickle.dumps(error))  # noqa: S301
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _checksum(points: tuple[Tensor, ...], n: int) -> int:
    """Return a checksum of 32 bits of points, and of how many numbers are asked for there."""
    c = n
    for x in map(as_array, points):
        c = zlib.crc32(np.ascontiguousarray(x).tobytes(), zlib.crc32(repr(x.shape).encode(), c))
    return c


class Sharded(Summed):
    r"""A target whose data are divided among several processes, the ranks of a group of torch.distributed.

    Each rank has the target of its own rows,

    .. math:: \log p(x) = \log p_0(x) + \sum_r \ell_r(x), \qquad \log p_r = \log p_0 + \ell_r,

    and only sums of scores, products and log-densities over ranks are sent: (n, d) numbers for n points, whatever the
    number of rows. All ranks run the same script and fit in step from the same `random_state`; each ends with the
    same fit. Each sum compares the points of the ranks. If the target of each rank is one of `Minibatches`, in memory
    or by a loader, a training step takes one minibatch from each rank.

    Parameters
    ----------
    target_of_rows : Target or callable
        The target of the rows of this rank; or a function of the rank and the number of ranks that makes it, whose
        errors are raised in all ranks. Of labels some ranks may lack a class where a function makes their targets.
    prior : Target, default=None
        The :math:`p_0` that is in the target of each rank, to be counted once. By default
        ``target.subset(rows)`` without rows, which `BayesianLogisticRegression` and `BayesianMultinomialRegression`
        have.
    group : ProcessGroup, default=None
        None for all ranks.

    Attributes
    ----------
    rank : int
        Number of this process.
    n_ranks : int
    traffic : Traffic
        With ``n_calls``, ``n_messages`` and ``n_bytes``, of this rank.

    Raises
    ------
    ValueError
        This process is in no group; a shard is empty; the ranks have different targets, priors or versions.
    TypeError
        `target_of_rows` is not, or does not return, a target, or `prior` is missing.
    ConnectionError
        In a fit: a rank is lost, or evaluates the score at other points. Training that has begun keeps its state,
        and a `checkpoint` can be resumed with any number of ranks, or with the same number if they use minibatches.
        The first rank writes it, and all must be able to read it.

    See Also
    --------
    Minibatches : Scores from some of the rows.

    Examples
    --------
    One process is a group of its own; ``torchrun --nproc-per-node 2 script.py`` starts two, without the first
    arguments.

    >>> import numpy as np
    >>> import torch.distributed as dist
    >>> from skksivi.targets import BayesianLogisticRegression, Sharded
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> X = np.random.RandomState(0).normal(size=(1000, 3))
    >>> def target_of_rows(rank, n_ranks):
    ...     rows = slice(rank, None, n_ranks)
    ...     return BayesianLogisticRegression(X[rows], X[rows, 0] > 0.1)
    >>> target = Sharded(target_of_rows)
    >>> target
    Sharded(BayesianLogisticRegression(n_features=3), rank 0 of 1)
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        target_of_rows: Target | Callable[[int, int], Target],
        *,
        prior: Target | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._ranks = Ranks(group)
        self.rank, self.n_ranks, self.traffic = self._ranks.rank, self._ranks.size, self._ranks.traffic
        self._is_told = False
        try:
            self._shard, own = copy_context().run(self._made, target_of_rows, prior, self.rank, self.n_ranks)
        except Exception as error:
            if not self._is_told:
                self._ranks.gather(f"{type(error).__name__}: {error}")
            raise
        check_equal(self._gathered(own), "rank")
        if hasattr(self.target, "minibatch"):
            self.n_rows = sum(self._ranks.gather(self.target.n_rows))
            self.batch_size = self.n_ranks * self.target.batch_size
        self.n_features = self.target.n_features
        self.products = getattr(self.target, "products", "auto")
        self.names = getattr(self.target, "names", None)

    def _made(self, *given: Any) -> tuple[Shard, dict[str, object]]:  # noqa: ANN401
        ALL_CLASSES.set(lambda classes, _: np.unique(np.concatenate(self._gathered(classes))))
        return made_shard(*given)

    def _gathered(self, own: T) -> list[T]:
        """Return what each rank has to tell, which is of one kind.

        Raises
        ------
        ValueError
            A rank has failed, or asks for the classes of all when another does not.
        """
        found: list[Any] = self._ranks.gather(own)
        self._is_told = True
        for k, other in enumerate(found):
            if isinstance(other, str):
                raise ValueError(f"`target_of_rows` has failed on rank {k}. {other}")
            if type(other) is not type(own):
                raise ValueError(f"`target_of_rows` makes another kind of target on rank {k} than on {self.rank}.")
        self._is_told = False
        return found

    @property
    def target(self) -> Any:  # noqa: ANN401
        """The target of the rows of this rank."""
        return self._shard.target

    def total(self, evaluate: Callable[..., Tensor], *points: Tensor) -> Tensor:
        """Return the sum over ranks of a function of a target and of points (..., d)."""
        x = points[0]
        shape = tuple(x.shape[:-1]) if evaluate is log_prob_of else tuple(x.shape)
        own = partial(self._shard.evaluate, evaluate, *points)
        s = self._ranks.sum(lambda: as_tensor(own()), points, math.prod(shape)).reshape(shape)
        return s.to(x) if isinstance(x, Tensor) else s.numpy().astype(x.dtype)

    @property
    def minibatch(self) -> Callable[[torch.Generator], Sharded] | None:
        """Draws a minibatch of the rows of each rank, if their targets do."""
        draw = getattr(self.target, "minibatch", None)
        return None if draw is None else lambda generator: self._of(draw(generator))

    @property
    def rewind(self) -> Callable[[int], None] | None:
        """Returns the loader of each rank to its place, if there are any."""
        return getattr(self.target, "rewind", None)

    def part(self, n: int) -> Sharded:
        """Return the target of n rows, as many of each rank."""
        return self._of(self.target.part(math.ceil(n / self.n_ranks)))

    def _of(self, target: Target) -> Sharded:
        return self._replaced(_shard=self._shard._replace(target=target))

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Sharded:
        """Return a copy whose targets are on `device` and of type `dtype`."""
        target, prior = (part and part.to(device=device, dtype=dtype) for part in self._shard)
        return self._replaced(_shard=Shard(target, prior))

    def __repr__(self) -> str:
        return f"Sharded({self.target!r}, rank {self.rank} of {self.n_ranks})"
