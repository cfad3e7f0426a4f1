"""The content of an address, within bounds on its size and on the time it takes."""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.request import build_opener

from skksivi.datasets._readers import MAX_BYTES


class Limits(NamedTuple):
    """What a download may take: bytes, seconds without an answer, and seconds in all."""

    max_bytes: int = MAX_BYTES
    stall: float = 30.0
    total: float = 300.0


def download(url: str, limits: Limits) -> bytes:
    """Return the content of an address.

    Raises
    ------
    OSError, HTTPException
        It could not be read within the time.
    ValueError
        It is larger than allowed, or broke off.
    """
    outcome: SimpleQueue[bytes | Exception] = SimpleQueue()

    def work() -> None:
        try:
            outcome.put(_body(url, limits))
        except Exception as error:
            if isinstance(error, HTTPError):  # which keeps the connection
                error.close()
            outcome.put(error)

    # a thread, since looking up a name and reading the headers byte by byte have no bound of their own
    threading.Thread(target=work, daemon=True).start()
    try:
        found = outcome.get(timeout=limits.total)
    except Empty:
        raise _too_slow(limits) from None
    if isinstance(found, Exception):
        raise found
    return found


def _body(url: str, limits: Limits) -> bytes:
    content, deadline = bytearray(), time.monotonic() + limits.total
    with build_opener().open(url, timeout=limits.stall) as response:
        while chunk := response.read1(2**16):  # what has arrived: `read` would wait for all of it
            content += chunk
            if len(content) > limits.max_bytes:
                raise ValueError(f"it has more than {limits.max_bytes:,} bytes")
            if time.monotonic() > deadline:
                raise _too_slow(limits)
        if response.length:
            raise ValueError(f"it ended {response.length:,} bytes early")
    return bytes(content)


def _too_slow(limits: Limits) -> TimeoutError:
    return TimeoutError(f"it was not complete after {limits.total:g} seconds")
