"""Interrupted fits that resume as if nothing had happened.

A checkpoint is one file of numbers and their description. It is written under another name, flushed to the disk and
renamed, so that a process killed at any moment leaves the last complete file. Reading it runs no code in it, and the
sizes that it claims are checked before memory is allocated.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

import safetensors.torch
import torch
from torch import Tensor

from skksivi._codec import MAX_HEADER, decoded, encode, parsed, read_header
from skksivi._warnings import warn_caller

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

#: Format of the files that this version writes and reads.
FORMAT = 2

#: How a file begins, before its format and the end of the line, and the length of the two checksums that follow.
MAGIC, N_DIGEST = b"skksivi checkpoint ", 32

#: Bytes of a file, at most.
MAX_BYTES = 2**32

#: Written as a trial before anything else is done.
TRIAL = bytes(2**12)

#: Errors of a file system without locks.
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}

T = TypeVar("T")


class CheckpointFile(Generic[T]):
    """Where a fit is saved at intervals, and the state that an earlier one left there.

    Parameters
    ----------
    path : path-like
        The file or, if several fits need one each, an existing folder. A link stays a link.
    settings : dict
        The settings that a fit must share with the one that it continues: names to short texts.
    check : callable
        Raises ValueError unless it is given the state of such a fit; the first call has no memory for its numbers.
    device : torch.device, default=cpu
        Device for the tensors of the file.

    Attributes
    ----------
    found : object or None
        The content of the file, once it is `opened`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: Mapping[str, str],
        check: Callable[[object], T],
        device: torch.device | str = "cpu",
    ) -> None:
        self.named = str(path)
        self.settings = dict(settings)
        self.check = check
        self.device = torch.device(device)
        try:
            self.path = Path(os.path.realpath(path))
            if self.path.is_dir():
                self.path /= f"{hashlib.sha256(json.dumps(self.settings).encode()).hexdigest()[:16]}.ckpt"
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from error
        self.found: T | None = None
        self.failure: Exception | None = None
        self.reads_only = False
        self._is_ours = False

    @property
    def aside(self) -> Path:
        """Where a file is written before it takes its place."""
        return self.path.with_name(self.path.name + ".tmp")

    @contextmanager
    def opened(self, *, reads_only: bool = False) -> Iterator[CheckpointFile[T]]:
        """Read the file and lock it for this fit, unless another process of this fit does.

        Raises
        ------
        ValueError
            It cannot be written, another fit uses it, it is not a checkpoint or one of another fit.
        OSError, MemoryError
            It cannot be read, although it may be intact.
        """
        self.reads_only = reads_only
        with nullcontext() if reads_only else self._held():
            if not reads_only:
                try:
                    self._try()
                except OSError as error:
                    raise self._unwritable(error) from error
            self.found = self._read()
            self._is_ours = self.found is not None and not reads_only
            try:
                yield self
            except BaseException as error:
                if self.failure is not None:
                    error.add_note(self._lost())
                raise

    # Reading

    def _read(self) -> T | None:
        if not self.path.exists():
            return None
        if not self.path.is_file():  # opening a pipe would block
            raise ValueError(f"`checkpoint` {self.named!r} is not a regular file; name another.")
        try:
            with open(self.path, "rb") as file:
                return self._content(file)
        except (OSError, MemoryError) as error:
            error.add_note(f"This happened while `checkpoint` {self.named!r} was read, which may be whole: keep it.")
            raise
        except AnotherFitError:
            raise
        except Exception as error:
            reason = error if isinstance(error, ValueError) else f"it holds something else, {error!r}"
            raise ValueError(
                f"`checkpoint` {self.named!r} is not a checkpoint of this version of skksivi, or is damaged: "
                f"{textwrap.shorten(str(reason).rstrip('.'), 300)}; remove it or name another file."
            ) from error

    def _content(self, file: BinaryIO) -> T:
        """Return the content of a file, after checks of its claims, the cheapest first."""
        size = os.fstat(file.fileno()).st_size
        if size > MAX_BYTES:
            raise ValueError(f"it has {size} bytes, more than {MAX_BYTES}")
        line = file.read(len(MAGIC)) + file.readline(20)
        if not line.startswith(MAGIC):
            raise ValueError("it does not begin as one")
        if line != _first_line():
            found = line[len(MAGIC) :].decode(errors="replace").strip()
            raise ValueError(f"it has format {found}, but this version reads format {FORMAT}")
        digests = file.read(N_DIGEST), file.read(N_DIGEST)
        start, about, plan = read_header(file, size - len(line) - 2 * N_DIGEST)
        _verify(start, digests[0])
        self._compare(parsed(about["settings"]))
        decoded(about["state"], plan, torch.device("meta"), self.check)

        rest = file.read(size)
        _verify(rest, digests[1])
        tensors = {
            name: x.clone() for name, x in safetensors.torch.load(start + rest).items()
        }  # aligned: the same rounding
        return decoded(about["state"], tensors, self.device, self.check)

    def _compare(self, theirs: Mapping[str, str]) -> None:
        for name in [*self.settings, *theirs]:
            if theirs.get(name) != self.settings.get(name):
                self.refuse(name, str(theirs.get(name)), str(self.settings.get(name)))

    def refuse(self, name: str, theirs: str, ours: str) -> None:
        """Raise ValueError for a setting in which the fit that wrote the file differs."""
        raise AnotherFitError(
            f"`checkpoint` {self.named!r} belongs to a fit with {name} = {textwrap.shorten(theirs, 200)}, this one "
            f"has {ours}; set it back, remove the file or name another."
        )

    # Writing

    def save(self, value: T) -> None:
        """Replace the last value by a new one, or leave the last unchanged.

        Where the disk does not let it, that is told when the fit ends.
        """
        if self.reads_only:
            return
        try:
            self._write(self._to_bytes(value))
        except (OSError, MemoryError) as error:
            self.failure = error

    def _to_bytes(self, value: T) -> bytes:
        tensors: dict[str, Tensor] = {}
        state = json.dumps(encode(value, "", tensors))
        content = safetensors.torch.save(tensors, {"settings": json.dumps(self.settings), "state": state})
        length = 8 + int.from_bytes(content[:8], "little")
        if length > MAX_HEADER or len(content) > MAX_BYTES:
            raise MemoryError(f"{length} and {len(content)} bytes are more than a checkpoint may have")
        digests = (hashlib.sha256(part).digest() for part in (content[:length], content[length:]))
        return b"".join([_first_line(), *digests, content])

    def _write(self, data: bytes) -> None:
        try:
            self._put_aside(data)
            if self.path.exists():
                os.chmod(self.aside, stat.S_IMODE(self.path.stat().st_mode))
            os.replace(self.aside, self.path)
        except BaseException:
            with suppress(OSError):
                self.aside.unlink(missing_ok=True)
            raise
        self._is_ours = True

    def _put_aside(self, data: bytes) -> None:
        self.aside.unlink(missing_ok=True)
        with open(os.open(self.aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def finish(self, *, remove: bool) -> None:
        """Remove the file of a completed fit, and warn if it could not be written or removed."""
        if remove and self._is_ours:
            try:
                self.path.unlink(missing_ok=True)
            except OSError as error:
                warn_caller(f"`checkpoint` {self.named!r} could not be removed ({error}); remove it.")
        if self.failure is not None:
            warn_caller(self._lost())

    def _lost(self) -> str:
        return (
            f"`checkpoint` {self.named!r} could not be written every time ({self.failure!r}), so that a kill would "
            "have cost what was learned since; make room, or name a file elsewhere."
        )

    # One fit at a time

    def _try(self) -> None:
        """Write under the other name, where a killed fit may have left a file."""
        self._put_aside(TRIAL)
        self.aside.unlink()

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold a lock, which the system releases if the process dies."""
        lock = self.path.with_name(self.path.name + ".lock")
        try:
            descriptor = _locked(lock)
        except BlockingIOError as error:
            raise ValueError(
                f"`checkpoint` {self.named!r} is in use by another fit; leave `checkpoint` out of searches, or name "
                "an existing folder, in which each fit has its own file."
            ) from error
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            yield
        finally:
            with suppress(OSError):
                lock.unlink(missing_ok=True)
            os.close(descriptor)

    def _unwritable(self, error: Exception) -> ValueError:
        return ValueError(
            f"`checkpoint` {self.named!r} cannot be written ({error}); name a file in a folder that exists and is "
            "writable."
        )


class AnotherFitError(ValueError):
    """A checkpoint is intact, but belongs to another fit."""


def _first_line() -> bytes:
    return MAGIC + f"{FORMAT}\n".encode()


def _verify(data: bytes, digest: bytes) -> None:
    """Raise ValueError unless data have a checksum."""
    if hashlib.sha256(data).digest() != digest:
        raise ValueError("its checksum is wrong")


def _locked(path: Path) -> int:
    """Return the descriptor of an existing file locked by no other process, or raise BlockingIOError."""
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            _lock(descriptor)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    if sys.platform == "win32":
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(*error.args) from error
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
