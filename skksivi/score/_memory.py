"""Scores that are remembered, in memory or in a file that only grows, so that no point is evaluated twice."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import joblib
import numpy as np
import torch
from torch import Tensor

from skksivi._utils.arrays import as_array, as_tensor, listed
from skksivi._utils.checks import warn_caller
from skksivi.score._score import BlackBox, Score, is_target, refuse_class

try:
    import fcntl
except ImportError:  # on Windows, where one process alone may write
    fcntl = None  # type: ignore[assignment]

#: The first bytes of a file, and those of the length and the checksum of a record.
MAGIC, N_HEAD = b"skksivi scores 1\n", 12

#: A function of points, with or without a graph.
Function = Callable[[Any], Any]


def remembered(target: Any, path: str | os.PathLike[str] | None = None) -> Any:  # noqa: ANN401
    """Return a target whose scores and log-densities are remembered: no point is evaluated twice.

    A fit that was killed is run again as it was: it makes the calls that are missing, and one of score and log p to
    see that a file is of this target; its draws are the same bit for bit. What comes after it, such as
    `skksivi.diagnose`, is served from the same points. Products with the Jacobian of the score are not remembered.

    Parameters
    ----------
    target : Target or callable
        Or its score function, of tensors or arrays.
    path : str or PathLike, default=None
        A file to which points are appended, each with a checksum: a kill can only lose the last of them. Several
        processes may use it. None remembers in this process alone.

    Returns
    -------
    target : Target or callable
        With the attributes of the one that is given.

    Raises
    ------
    ValueError
        The file is damaged, or of another target or no such file.

    See Also
    --------
    from_score_fn : Workers for a score that takes long.

    Examples
    --------
    >>> from skksivi import KSIVIApproximator, summary
    >>> from skksivi.targets import from_score_fn, remembered
    >>> n_calls = []
    >>> def score_fn(X):
    ...     n_calls.append(len(X))
    ...     return -X
    >>> target = remembered(from_score_fn(score_fn, n_features=2))
    >>> first = KSIVIApproximator(random_state=0).fit(target)
    >>> n = sum(n_calls)
    >>> again = KSIVIApproximator(random_state=0).fit(target)
    >>> sum(n_calls) - n < 30, bool((again.sample(5) == first.sample(5)).all())  # products at trial points
    (True, True)
    """
    refuse_class(target)
    if not is_target(target) and not callable(target):
        raise TypeError(f"`target` must be a Target or its score function, got a {type(target).__name__}.")
    memory = Memory(None if path is None else Path(path), fingerprint(target))
    memory.check("score", target.score_fn if is_target(target) else target)
    memory.check("log_prob", getattr(target, "log_prob", None))
    return Remembered(target, memory) if is_target(target) else partial(memory.served, "score", target)


class Remembered:
    """A target with the attributes of another, whose values come from a memory."""

    def __init__(self, target: Any, memory: Memory) -> None:  # noqa: ANN401
        self.target, self.memory = target, memory
        if getattr(target, "log_prob", None) is not None:
            self.log_prob = partial(memory.served, "log_prob", target.log_prob)
        self.score_fn = partial(memory.served, "score", target.score_fn)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name in ("target", "memory", "log_prob", "score_fn") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.target, name)

    def __getitem__(self, index: object) -> Remembered:
        return Remembered(self.target[index], self.memory)

    def __repr__(self) -> str:
        return f"remembered({self.target!r})"

    def to(self, **where: object) -> Remembered:
        """Return the target on another device or of another type, with the same memory."""
        return Remembered(self.target.to(**where), self.memory) if hasattr(self.target, "to") else self


class Memory:
    """Values by the bytes of their points, kind and types, and the file that holds them."""

    def __init__(self, path: Path | None, owner: str, parameter: str = "path") -> None:
        self.path, self.owner, self.end, self.label = path, owner, 0, f"`{parameter}` {str(path)!r}"
        self.values: dict[bytes, tuple[np.ndarray, bool]] = {}
        if path is not None:
            with self._locked():
                pass

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) if self.path is None else {**vars(self), "values": {}, "end": 0}

    def of(self, score: Score) -> Score:
        """Return a score whose values in float64 are served from here."""
        double = score.double
        asked: Function = partial(self.served, "score", double.score_fn)
        if isinstance(double.score_fn, BlackBox):
            asked = BlackBox(partial(self.served, "score", double.score_fn.score_fn), double.score_fn.kind)
        log_prob = None if double.log_prob is None else partial(self.served, "log_prob", double.log_prob)
        double = replace(double, score_fn=asked, log_prob=log_prob)
        return double if score.in_double is None else replace(score, in_double=double)

    def check(self, kind: str, f: Function | None) -> None:
        """Refuse the values of a file if f, at the first of its points, has another one.

        Raises
        ------
        ValueError
        """
        first = next((key for key in self.values if key.startswith(f"{kind} ".encode())), None)
        if f is None or first is None:
            return
        _, dtype, name, row = first.split(b" ", 3)
        x = np.frombuffer(row, dtype.decode())[None].copy()
        found, known = f(torch.as_tensor(x) if name == b"Tensor" else x), self.values[first][0]
        y = as_array(found)[0] if isinstance(found, Tensor | np.ndarray) and len(found) else np.empty(0)
        rounding = np.finfo(known.dtype).eps ** 0.5 * max(1.0, np.abs(known[np.isfinite(known)]).max(initial=0))
        if y.shape != known.shape or not np.allclose(y, known, rtol=0, atol=rounding, equal_nan=True):
            raise ValueError(
                f"{self.label} holds the scores of another target: at x = {listed(x[0])} the {kind} is "
                f"{listed(known.ravel())} there, {listed(y.ravel())} now. Name another file, one for each target "
                "and its data."
            )

    def served(self, kind: str, f: Function, x: Any) -> Any:  # noqa: ANN401
        """Return f at points x (n, d), a tensor or an array, whose graph evaluates f again."""
        if isinstance(x, Tensor) and x.requires_grad:
            return _WithGraph.apply(x, f, partial(self._values, kind, f))
        return self._values(kind, f, x)

    def _values(self, kind: str, f: Function, x: Any) -> Any:  # noqa: ANN401
        X = np.ascontiguousarray(as_array(x))
        if X.ndim != 2 or not len(X):
            return f(x)
        tag = f"{kind} {X.dtype} {type(x).__name__} ".encode()
        keys = [tag + row.tobytes() for row in X]
        new = {key: i for i, key in reversed([*enumerate(keys)]) if key not in self.values}
        if new:
            rows = sorted(new.values())
            found = f(x[rows])
            Y = as_array(found) if isinstance(found, Tensor | np.ndarray) else np.empty(0)
            if Y.shape[:1] != (len(rows),) or Y.dtype.kind != "f":  # which is the caller's to refuse
                return found if len(rows) == len(X) else f(x)
            self._add([keys[i] for i in rows], Y.copy(), isinstance(found, Tensor))
        values, are_tensors = zip(*(self.values[key] for key in keys), strict=True)
        return as_tensor(np.stack(values), device=x.device) if all(are_tensors) else np.stack(values)

    def _add(self, keys: list[bytes], Y: np.ndarray, is_tensor: bool) -> None:
        """Keep values Y (n, ...), of a tensor or an array, and append them to the file."""
        try:
            self._write(keys, Y, is_tensor)
        except OSError as error:
            warn_caller(
                f"{self.label} cannot be written any more ({error.strerror}), so that a kill would cost what is "
                "learned from here on; make room, or name a file elsewhere."
            )
            self.path = None
        self.values |= {key: (y, is_tensor) for key, y in zip(keys, Y, strict=True)}

    def _write(self, keys: list[bytes], Y: np.ndarray, is_tensor: bool) -> None:
        """Append values to the file, if there is one."""
        if self.path is not None:
            header = json.dumps([str(Y.dtype), Y.shape, is_tensor, [len(key) for key in keys]]).encode()
            body = len(header).to_bytes(8, "little") + header + b"".join(keys) + Y.tobytes()
            with self._locked() as file:
                file.write(len(body).to_bytes(8, "little") + zlib.crc32(body).to_bytes(4, "little") + body)
                self.end = file.tell()

    @contextmanager
    def _locked(self) -> Iterator[IO[bytes]]:
        """Open the file for this process alone, at its end, after what others have added."""
        path = Path(self.path or "")
        with path.open("a+b") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            if self.end == 0:
                self._begin(file)
            self._read(file)
            yield file
            file.flush()

    def _begin(self, file: IO[bytes]) -> None:
        """Read the head of the file, or write that of an empty one."""
        head = MAGIC + self.owner.encode() + b"\n"
        file.seek(0, os.SEEK_END)
        if file.tell() == 0:
            file.write(head)
        file.seek(0)
        found = file.read(len(head))
        if not found.startswith(MAGIC):
            raise ValueError(f"{self.label} holds no remembered scores; name another file.")
        if found != head:
            raise ValueError(f"{self.label} holds the scores of another target; name another file, one for each.")
        self.end = len(head)

    def _read(self, file: IO[bytes]) -> None:
        """Take what the file has gained, and cut off the record that a kill has left unfinished."""
        file.seek(self.end)
        while head := file.read(N_HEAD):
            n, check = int.from_bytes(head[:8], "little"), int.from_bytes(head[8:], "little")
            size = os.fstat(file.fileno()).st_size
            if len(head) < N_HEAD or n > size - file.tell():
                file.truncate(self.end)
                break
            body = file.read(n)
            if zlib.crc32(body) != check:
                raise ValueError(f"{self.label} is damaged at byte {self.end:,}; remove it.")
            at = 8 + int.from_bytes(body[:8], "little")
            dtype, shape, is_tensor, sizes = json.loads(body[8:at])
            places = np.cumsum([at, *sizes])
            Y = np.frombuffer(body[places[-1] :], dtype).reshape(shape)
            for a, b, y in zip(places, places[1:], Y, strict=False):
                self.values[body[a:b]] = y, is_tensor
            self.end = file.tell()
        file.seek(0, os.SEEK_END)


class _WithGraph(torch.autograd.Function):
    """Remembered values, and a product with the Jacobian that evaluates the function again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Function, values: Function) -> Tensor:  # noqa: ANN401
        ctx.f = f
        ctx.save_for_backward(x)
        with torch.enable_grad():  # a score that differentiates log p by itself needs points with a graph
            return values(x.detach().requires_grad_())

    @staticmethod
    def backward(ctx: Any, *v: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.f(x)
            if not y.requires_grad:
                return torch.zeros_like(x), None, None
            return torch.autograd.grad(y, x, v[0])[0], None, None


def fingerprint(target: Any) -> str:  # noqa: ANN401
    """Return a checksum of what tells targets apart without a call: class, dimension, code, what it closes over."""
    function = target.score_fn if is_target(target) else target
    parts: list[object] = [type(target).__name__, getattr(target, "n_features", None)]
    for f in (function, getattr(target, "log_prob", None), getattr(target, "_score_fn", None)):
        code = getattr(getattr(f, "__func__", f), "__code__", None)
        if code is not None:
            parts += [
                code.co_code,
                [c for c in code.co_consts if isinstance(c, (int, float, str, bytes, type(None)))],
            ]
        for cell in getattr(f, "__closure__", None) or ():
            value = cell.cell_contents
            if isinstance(value, (int, float, str, np.ndarray, Tensor)):
                parts.append(as_array(value) if isinstance(value, Tensor) else value)
    return str(joblib.hash(parts))
