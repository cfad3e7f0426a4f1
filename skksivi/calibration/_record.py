"""Finished replications in a file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from skksivi._utils.codec import write

#: Fewest seconds between two writes of the file.
EVERY = 1.0

#: Accepted difference of numbers of the first replication between computers.
SAME = 1e-6


class Record:
    """Finished replications, kept in a file if a path is given.

    Parameters
    ----------
    path : path-like or None

    Attributes
    ----------
    settings : dict
        Settings of the file, empty while there is none.
    ranks : dict of int to list of int
    failures : dict of int to str
        Failures in the file are left out and tried again.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(os.path.realpath(path))
        self.settings: dict[str, Any] = {}
        self.ranks: dict[int, list[int]] = {}
        self.failures: dict[int, str] = {}
        self.written = 0.0  # time of the last write
        if self.path is not None and self.path.exists():
            try:
                self._read(json.loads(self.path.read_text("utf-8")))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise ValueError(
                    f"`path` is {str(path)!r}, which is not a complete calibration file; name another."
                ) from error

    def _read(self, document: Any) -> None:  # noqa: ANN401
        settings = document["settings"]
        k, n_draws, seed = len(settings["names"]), settings["n_draws"], settings["seed"]
        for i, ranks in document["ranks"].items():
            if len(ranks) != k or not all(type(rank) is int and 0 <= rank <= n_draws for rank in ranks):
                raise ValueError(f"{ranks} are not ranks")
            self.ranks[int(i)] = ranks
        if type(seed) is not int or seed < 0:
            raise ValueError(f"{seed} is not a seed")
        np.asarray(settings["first"], dtype=np.float64)
        self.settings = settings

    def begin(self, settings: dict[str, object]) -> None:
        """Set the settings of the coming replications, which must agree with the file's, and write the file."""
        differ = _differences(self.settings, settings) if self.settings else []
        if differ:
            raise ValueError(
                f"`path` is {str(self.path)!r}, which holds replications of other settings: {'; '.join(differ)}. "
                "Give another `path`, or the settings of the file."
            )
        self.settings = settings
        self.write()

    def add(self, i: int, found: list[int] | str) -> None:
        """Add a replication, and write the file unless it was written just before."""
        if isinstance(found, str):
            self.failures[i] = found
        else:
            self.ranks[i] = found
        if time.monotonic() - self.written > EVERY:
            self.write()

    def write(self) -> None:
        """Write the file, so that the old or the new one is whole."""
        self.written = time.monotonic()
        if self.path is not None:
            document = {"settings": self.settings, "ranks": self.ranks, "failures": self.failures}
            write(self.path, json.dumps(document).encode())


def _differences(there: Mapping[str, object], own: Mapping[str, object]) -> list[str]:
    """Return texts of the settings in which a file differs."""
    names = sorted((there.keys() | own.keys()) - {"first", "seed"})
    texts = [
        f"{name} is {there.get(name)}, not {own.get(name)}" for name in names if there.get(name) != own.get(name)
    ]
    if there.get("seed") != own.get("seed"):
        texts.append("`random_state` differs; None takes the one of the file")
    a, b = (np.array(settings.get("first", []), dtype=np.float64) for settings in (there, own))
    if texts or (a.shape == b.shape and np.allclose(a, b, rtol=SAME, atol=SAME, equal_nan=True)):
        return texts
    return ["parameters, data or target of the first replication"]
