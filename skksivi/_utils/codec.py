"""Files of objects that hold data alone: a header in json, then numbers, in the safetensors format.

The header has three texts: ``format``, the version of what is described here; ``state``, the object; ``checksum``, of
the state and the tensors, which detects damage, not who wrote the file.

In the state, numbers, strings, None and lists stand for themselves. ``{"is": "coordinates._affine:Affine", "state":
{name: value, ...}}`` is an object of a class of the package, with its attributes; ``{"is": "tensor"}``,
``"parameter"``, ``"array"``, ``"text"`` or ``"objects"`` stands for the tensor that is named by the way there, as
``whitening_.map.m``. If ``transposed`` it is stored as its transpose, since products of matrices round by their order
in memory.

A file is taken for hostile. A name in it finds only a class that holds data, from `PLACES` or `FOREIGN`, and imports
nothing; no constructor is called, only the checks of a dataclass. No size in it can be larger than the file. That a
checksum is right does not make a fit of it: what does not fit together fails where it is drawn from.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import safetensors.torch
import torch
from numpy.random import RandomState
from sklearn.base import BaseEstimator
from torch import Tensor, nn

#: Of the files that this version writes and reads.
FORMAT = "5"

#: Largest number of bytes of a file, unless the caller says otherwise, and of a header.
MAX_BYTES, MAX_HEADER = 2**32, 2**20

#: The modules and folders, followed by a dot, whose classes a file may name.
PLACES = (
    *("annealing.", "kernels.", "mixing.", "parameters.", "terms.", "judge.", "coordinates.", "families."),
    *("estimators.", "baselines.", "predictors.", "amortized."),
    *("pilot._log_density.", "score._tally.", "stein._estimators.", "training._guard."),
)

#: The classes of other libraries that it may name.
OTHERS = (tuple, dict, RandomState, nn.Linear, nn.ModuleList, nn.Sequential, nn.ELU, nn.SiLU)
FOREIGN: dict[str, type] = {cls.__name__: cls for cls in OTHERS}


# Names of classes


def name_of(cls: type) -> str | None:
    """Return the name of a class in a file, None if objects of it are not saved."""
    names = cls.__name__, f"{cls.__module__.removeprefix('skksivi.')}:{cls.__name__}"
    return next((name for name in names if _class_of(name) is cls), None)


def is_known(value: object) -> bool:
    """Tell whether a value is a name, or an object of a class that can be saved."""
    return isinstance(value, str) or name_of(type(value)) is not None


def _class_of(name: str) -> type | None:
    """Return the class of a name in a file: of another library or, if it is nothing but its data, of this package."""
    if name in FOREIGN:
        return FOREIGN[name]
    module, _, own = name.partition(":")
    cls = getattr(sys.modules.get(f"skksivi.{module}"), own, None)
    if not isinstance(cls, type):
        return None
    is_own = cls.__module__ == f"skksivi.{module}" and f"{module}.".startswith(PLACES)
    is_data = is_dataclass(cls) or issubclass(cls, (BaseEstimator, Enum, nn.Module)) or hasattr(cls, "_fields")
    return cls if is_own and is_data else None


# Objects to bytes


def pack(value: object, shown: Callable[[Any], Any] = lambda value: value) -> bytes:
    """Return the content of a file.

    Parameters
    ----------
    value : object
    shown : callable, optional
        Maps each object in it to the one that is written in its place.

    Raises
    ------
    TypeError
        A part is of a class that cannot be saved.
    ValueError
        What is not a tensor or an array takes too much place.
    """
    tensors: dict[str, Tensor] = {}

    def encode(value: Any, path: str) -> object:  # noqa: ANN401
        value = shown(value.item() if isinstance(value, np.generic) else value)
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, torch.device):
            return str(value)
        if isinstance(value, list):
            return [encode(item, f"{path}.{i}") for i, item in enumerate(value)]
        if isinstance(value, Tensor | np.ndarray) and (found := _numbers(value)):
            kind, x = found
            transposed = x.dim() == 2 and not x.is_contiguous() and x.mT.is_contiguous()
            tensors[path] = (x.mT if transposed else x).clone(memory_format=torch.contiguous_format)
            return {"is": kind, "transposed": transposed}
        if (name := name_of(type(value))) is None:
            raise TypeError(
                f"`{path}` is of type {type(value).__name__}, which cannot be saved without pickle; call "
                f"set_params({path.split('.')[0]}=...) with its default, a number, a name, an array or an object of "
                "this package first, which changes nothing learned."
            )
        parts = _parts(value).items()
        return {"is": name, "state": {part: encode(x, f"{path}.{part}".lstrip(".")) for part, x in parts}}

    state = json.dumps(encode(value, ""))
    content = safetensors.torch.save(
        tensors, {"format": FORMAT, "state": state, "checksum": _checksum(state, tensors)}
    )
    if (length := int.from_bytes(content[:8], "little")) > MAX_HEADER:
        raise ValueError(f"Parameters take {length} bytes, at most {MAX_HEADER} fit; make long lists numpy arrays.")
    return content


def _numbers(value: Tensor | np.ndarray) -> tuple[str, Tensor] | None:
    """Return the kind of a tensor or an array and the numbers in it, None if there are no such numbers."""
    if isinstance(value, Tensor):
        kind = "parameter" if isinstance(value, nn.Parameter) else "tensor"
        return None if value.is_complex() else (kind, value.detach().cpu())
    if value.dtype.kind in "fiub" and value.dtype.isnative:
        return "array", torch.from_numpy(np.array(value, order="K"))
    if value.ndim == 1 and all(isinstance(item, str) for item in value):
        letters = np.ascontiguousarray(value.astype(str))[:, None].view(np.int32)
        return "objects" if value.dtype.hasobject else "text", torch.from_numpy(letters)
    return None


def _parts(value: Any) -> Mapping[str, Any]:  # noqa: ANN401
    """Return what `_built` makes an object of its class from."""
    if isinstance(value, tuple | Enum):
        return {"items": list(value) if isinstance(value, tuple) else [value.value]}
    if isinstance(value, dict):
        return {"items": [list(item) for item in value.items()]}
    if isinstance(value, RandomState):
        return dict(value.get_state(legacy=False))
    return {name: part for name, part in vars(value).items() if _is_part(type(value), name)}


def _is_part(cls: type, name: str) -> bool:
    """Tell whether an attribute of objects of a class is data: a field, or what the class has not itself."""
    if issubclass(cls, nn.Module) and name[0] == "_":
        return name in ("_parameters", "_buffers", "_modules")
    return not hasattr(cls, name) or (is_dataclass(cls) and name in {field.name for field in fields(cls)})


def _checksum(state: str, tensors: Mapping[str, Tensor]) -> str:
    return joblib.hash([state, {name: x.numpy() for name, x in tensors.items()}])


# Bytes to objects


def unpack(
    content: bytes, device_of: Callable[[Any], torch.device], checked: Callable[[Any], Any] = lambda value: value
) -> Any:  # noqa: ANN401
    """Return the object of the content of a file; its modules do not train.

    Parameters
    ----------
    content : bytes
    device_of : callable
        Maps the state, as in json, to the device of the tensors.
    checked : callable, optional
        Maps each object in it to the one that is returned in its place, or raises.
    """
    state, tensors = _opened(content)
    device = device_of(state)

    def decode(node: Any, path: str) -> Any:  # noqa: ANN401
        if isinstance(node, list):
            return [decode(item, f"{path}.{i}") for i, item in enumerate(node)]
        if not isinstance(node, dict):
            return node
        if "state" not in node:
            return _of_numbers(node["is"], tensors[path].mT if node["transposed"] else tensors[path], device)
        if (cls := _class_of(node["is"])) is None:
            raise ValueError(f"it names {node['is']!r}, which is not of a class that can be saved")
        parts = {part: decode(x, f"{path}.{part}".lstrip(".")) for part, x in node["state"].items()}
        return checked(_built(cls, parts, len(content)))

    return decode(state, "")


def _opened(content: bytes) -> tuple[Any, dict[str, Tensor]]:
    """Return the state and the tensors of a file that is whole."""
    length = int.from_bytes(content[:8], "little")
    if not 0 < length <= min(MAX_HEADER, len(content) - 8):
        raise ValueError("it has no header of its length (joblib.load reads a pickle, if you trust who wrote it)")
    about = json.loads(content[8 : 8 + length])["__metadata__"]
    if about["format"] != FORMAT:
        raise ValueError(f"it has format {about['format']}, and this one reads {FORMAT} (skksivi 0.1.0 reads 4)")
    tensors = {name: x.clone() for name, x in safetensors.torch.load(content).items()}  # aligned: the same rounding
    if any(max(x.shape, default=0) > len(content) for x in tensors.values()):  # of tensors without numbers
        raise ValueError("a size in it is larger than the file")
    if _checksum(about["state"], tensors) != about["checksum"]:
        raise ValueError("its checksum is wrong")
    return json.loads(about["state"]), tensors


def _of_numbers(kind: str, x: Tensor, device: torch.device) -> Tensor | np.ndarray:
    """Return the tensor or the array of a kind that has these numbers."""
    if kind == "parameter":
        return nn.Parameter(x.to(device), requires_grad=False)
    if kind in ("text", "objects"):
        letters = x.numpy().view(f"U{x.shape[1]}")[:, 0]
        return letters if kind == "text" else letters.astype(object)
    return x.to(device) if kind == "tensor" else x.numpy()


def _built(cls: type, parts: dict[str, Any], size: int) -> object:
    """Return an object of a class with these parts, without its constructor."""
    if issubclass(cls, tuple | dict):
        return getattr(cls, "_make", cls)(parts["items"])
    if issubclass(cls, Enum):
        return cls(*parts["items"])
    if cls is RandomState:
        random_state = RandomState(0)
        random_state.set_state(parts)
        if not 0 <= parts["state"]["pos"] <= len(parts["state"]["key"]):  # numpy takes any, and reads memory there
            raise ValueError("the position of a random state is out of its range")
        return random_state
    if not all(_is_part(cls, name) for name in parts):
        raise ValueError(f"a {cls.__name__} in it has other parts: {', '.join(parts)}")
    value = object.__new__(cls)
    if isinstance(value, nn.Module):
        nn.Module.__init__(value)
        if any(isinstance(x, int) and x > size for x in parts.values()):
            raise ValueError("a size in it is larger than the file")
    vars(value).update(parts)
    if hasattr(value, "__post_init__"):  # the checks of a dataclass
        value.__post_init__()
    return value


# Files


def read(path: Path, take: Callable[[bytes], Any], named: str, max_bytes: int = MAX_BYTES, remedy: str = "") -> Any:  # noqa: ANN401
    """Return what `take` makes from the content of a file; `remedy` is what to do about a damaged one.

    Raises
    ------
    ValueError
        It is not a regular file, too long, not one of this package, or `take` fails.
    OSError, MemoryError
        It cannot be read, although it may be intact.
    """
    size = path.stat().st_size
    if not path.is_file() or size > max_bytes:  # opening a pipe would block
        raise ValueError(f"{named} of {size} bytes is no regular file of at most {max_bytes} bytes.")
    with open(path, "rb") as file:
        content = file.read(size)
    try:
        return take(content)
    except MemoryError:
        raise
    except Exception as error:  # the file may hold anything
        reason = str(error) if isinstance(error, ValueError) else f"it holds something else, {error!r}"
        raise ValueError(
            f"{named} is damaged, or not a file of this version of skksivi: "
            f"{textwrap.shorten(reason.rstrip('.'), 300)}.{remedy}"
        ) from error


def write(path: Path, content: bytes) -> None:
    """Write a file under another name, flush and rename it, so that the old or the new one is whole.

    Raises
    ------
    OSError
        It names the file, not the one that is written first; or a folder, a device or a pipe is there.
    """
    file_at = Path(os.path.realpath(path))  # a link stays one
    aside = file_at.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        if file_at.exists() and not file_at.is_file():
            raise FileExistsError(errno.EEXIST, "Exists and is no regular file, so that it is not replaced")
        with open(aside, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if file_at.exists():
            shutil.copymode(file_at, aside)
        os.replace(aside, file_at)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
    finally:  # also when a signal ends it
        with suppress(OSError):
            aside.unlink(missing_ok=True)
