"""Finished replications in a file."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from skksivi._utils.codec import write


class Record:
    """Finished replications, kept in a file if a path is given.

    Parameters
    ----------
    path : path-like or None

    Attributes
    ----------
    seed : int or None
    settings : str or None
        What tells these replications from others; None while there is no file.
    ranks : dict of int to list of int
        Without replications that failed, which are tried again.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path)
        self.seed: int | None = None
        self.settings: str | None = None
        self.ranks: dict[int, list[int]] = {}
        self.written = 0.0  # time of the last write
        if self.path is not None and self.path.exists():
            try:
                document = json.loads(self.path.read_text("utf-8"))
                self.seed, self.settings = int(document["seed"]), str(document["settings"])
                self.ranks = {int(i): [int(rank) for rank in ranks] for i, ranks in document["ranks"].items()}
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise ValueError(
                    f"`path` is {str(path)!r}, which is not a complete calibration file; name another."
                ) from error

    def begin(self, seed: int, settings: str) -> None:
        """Set what the coming replications are, which must be the file's, and write the file."""
        if self.settings not in (None, settings):
            raise ValueError(
                f"`path` is {str(self.path)!r}, which holds replications of other settings: seed, estimator, names, "
                "or parameters, data or target of the first replication differ. Give another `path`, or the settings "
                "of the file; random_state=None takes its seed."
            )
        self.seed, self.settings = seed, settings
        self.write()

    def add(self, i: int, ranks: list[int]) -> None:
        """Add a replication, and write the file unless it was written in the last second."""
        self.ranks[i] = ranks
        if time.monotonic() - self.written > 1:
            self.write()

    def write(self) -> None:
        """Write the file, so that the old or the new one is whole."""
        self.written = time.monotonic()
        if self.path is not None:
            document = {"seed": self.seed, "settings": self.settings, "ranks": self.ranks}
            write(self.path, json.dumps(document).encode())
