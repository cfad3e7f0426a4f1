"""Interrupted fits that go on as if nothing had happened.

A checkpoint is one file of tensors, numbers and the package's own modules, written to the side, flushed to the disk
and renamed, so that a kill at any moment leaves the last whole one. It is read without running what it holds.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from torch import nn

from skksivi._arrays import as_array
from skksivi._saved import CHECKPOINTED
from skksivi.score._score import Score

#: Of the files this version writes and reads.
FORMAT = 1

#: What a checkpoint may hold beside tensors, plain values and the classes of this package.
FOREIGN: list[Any] = [
    nn.Linear,
    nn.ModuleList,
    bytes,
    np.dtype,
    np.ndarray,
    type(np.dtype(np.float64)),
    np.empty(0).__reduce__()[0],
]


#: Parameters that the mark of a fit leaves out.
ELSEWHERE = {"checkpoint", "device", "random_state", "verbose"}


def settings_of(parameters: Mapping[str, object], score: Score) -> dict[str, object]:
    """Return what a fit must share with the one that it continues: parameters, and the score at two points."""
    ends = torch.tensor([[-0.5], [0.5]], dtype=torch.float64).expand(2, score.n_features)
    at_ends = score.double(ends.to(score.device)).sum(1).tolist()
    return {
        **{name: _named(value) for name, value in parameters.items() if name.partition("__")[0] not in ELSEWHERE},
        "n_features": score.n_features,
        "score_fn at -1/2 and 1/2": [f"{s:.6g}" for s in at_ends],
    }


def _named(value: object) -> object:
    """Return a setting, of an object or a function its name; parameters of objects are settings of their own.

    Of an array its shape and a checksum, for its text leaves out the most of it.
    """
    if callable(value) or isinstance(value, BaseEstimator):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, list | tuple):
        return [_named(item) for item in value]
    if hasattr(value, "__array__"):
        array = np.ascontiguousarray(as_array(value))
        return f"an array {array.shape} with checksum {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
    return value


class CheckpointFile:
    """Where a fit is saved now and then, and what an earlier one has left there.

    Parameters
    ----------
    path : path-like
    settings : dict
        What a fit must share with the one that it continues: names to plain values.
    device : torch.device, default=cpu
        Where the tensors of the file are to be.

    Attributes
    ----------
    found : dict or None
        What the file holds.

    Raises
    ------
    ValueError
        The file is not a checkpoint, or belongs to a fit with other settings.
    """

    def __init__(
        self, path: str | os.PathLike[str], settings: Mapping[str, object], device: torch.device | str = "cpu"
    ) -> None:
        self.path = Path(path)
        self.device = device
        self.settings = {name: str(value) for name, value in settings.items()}
        self.found: dict[str, Any] | None = None
        if self.path.exists():
            self.found = self._read()

    def _read(self) -> dict[str, Any]:
        try:
            state = _loaded(self.path.read_bytes(), self.device)
            theirs = state["settings"]
        except Exception as error:
            raise ValueError(
                f"`checkpoint` {str(self.path)!r} is not a checkpoint of this version of skksivi, or is damaged; "
                "remove it or name another file."
            ) from error
        for name in sorted(self.settings.keys() | theirs.keys()):
            if theirs.get(name) != self.settings.get(name):
                raise ValueError(
                    f"`checkpoint` {str(self.path)!r} belongs to a fit with {name} = {theirs.get(name)}, this one "
                    f"has {self.settings.get(name)}; set it back, remove the file or name another."
                )
        return state

    def save(self, state: dict[str, Any]) -> None:
        """Write a state over the last, or leave the last as it is."""
        folder = self.path.parent
        handle, name = tempfile.mkstemp(prefix=self.path.name, suffix=".tmp", dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                content = io.BytesIO()
                torch.save({"format": FORMAT, "settings": self.settings, **state}, content)
                file.write(hashlib.sha256(content.getbuffer()).digest())
                file.write(content.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


#: Held while the classes of this package are on the list of those that torch may load, which all threads share.
_LOADING = threading.Lock()


def _loaded(content: bytes, device: torch.device | str) -> dict[str, Any]:
    """Return the state of a file: its checksum, then what torch has saved."""
    digest, content = content[:32], content[32:]
    if hashlib.sha256(content).digest() != digest:
        raise ValueError("its checksum is wrong")
    with _LOADING:
        listed = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([cls for cls in FOREIGN + CHECKPOINTED if cls not in listed]):
            return torch.load(io.BytesIO(content), map_location=device, weights_only=True)
