"""What is said while something takes long."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOGGER = logging.getLogger("skksivi")

#: Seconds after which it is said what takes long.
LONG_WAIT = 5.0

#: Modules on the stack of what is one of many: of a search, a cross-validation or a worker.
OF_MANY = ("joblib._dask", "joblib.parallel", "sklearn.model_selection")


def tell(line: str, *values: object) -> None:
    """Log a line, as a warning, which is printed, where nobody has configured logging."""
    LOGGER.log(logging.INFO if LOGGER.hasHandlers() else logging.WARNING, line, *values)


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Say that something takes long, and how long it took, if it does and is not one of many."""
    before, began = threading.Timer(LONG_WAIT, tell, ["%s ...", what]), time.monotonic()
    before.daemon = True
    if not is_one_of_many():
        before.start()
    try:
        yield
    finally:
        was_told = before.finished.is_set()
        before.cancel()
    if was_told:
        tell("%s took %.0f s.", what, time.monotonic() - began)


def is_one_of_many() -> bool:
    """Tell whether a search, a cross-validation or a worker is what asks."""
    frame = sys._getframe()  # noqa: SLF001
    while frame.f_back is not None:
        frame = frame.f_back
        if str(frame.f_globals.get("__name__")).startswith(OF_MANY):
            return True
    return False
