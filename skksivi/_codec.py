"""Values to json and tensors, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from skksivi._foreign import FOREIGN
from skksivi._saved import KINDS, NAMES, register

#: Largest nesting of objects and lists.
MAX_DEPTH = 12

#: Largest number of bytes of a header.
MAX_HEADER = 2**20

#: Number types in a file, by their names there.
DTYPES = {"F32": torch.float32, "F64": torch.float64, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool}

T = TypeVar("T")

for name, kind in FOREIGN.items():
    register(name, kind)


def encode(value: object, path: str, tensors: dict[str, Tensor]) -> object:
    """Return `value` in a form for json, and put the tensors in it into `tensors`."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if type(value) is list or type(value) is nn.ModuleList:
        return [encode(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
    if type(value) is np.ndarray and value.dtype.isnative and value.dtype.kind in "fib":
        return {"is": "array", **_put(torch.from_numpy(np.array(value, order="K")), path, tensors)}
    if isinstance(value, Tensor):
        return {"is": "tensor", **_put(value.detach().cpu(), path, tensors)}
    if type(value) not in NAMES:
        raise _refusal(value, path)
    name = NAMES[type(value)]
    parts = KINDS[name].parts(value)
    return {"is": name, **{part: encode(parts[part], _joined(path, part), tensors) for part in parts}}


def _decode(node: object, path: str, tensors: dict[str, Tensor], device: torch.device) -> object:
    """Return the value of parsed json, and take its tensors out of `tensors`."""
    if path.count(".") >= MAX_DEPTH:
        raise ValueError(f"`{path}` is nested too deep")
    if isinstance(node, list):
        return [_decode(item, f"{path}.{i}", tensors, device) for i, item in enumerate(node)]
    if isinstance(node, float) and not math.isfinite(node):
        raise ValueError(f"`{path}` is not finite")
    if not isinstance(node, dict):
        return node
    name = node.pop("is", None)
    if name in ("tensor", "array"):
        return _named(path, lambda **how: _take(name, path, tensors, device, **how), node)
    if not isinstance(name, str) or name not in KINDS:
        raise ValueError(f"`{_joined(path, 'is')}` is {name!r}, which is not of a class that can be saved")
    parts = {part: _decode(node[part], _joined(path, part), tensors, device) for part in node}
    return _named(path, KINDS[name].build, parts)


def _named(path: str, build: Callable[..., T], parts: Mapping[str, Any]) -> T:
    """Return the object built from parts; an error names the path to it."""
    try:
        return build(**parts)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # the file may hold anything
        reason = str(error) if isinstance(error, ValueError) else f"it holds something else, {error!r}"
        raise ValueError(f"`{path}`: {reason}" if path else reason) from error


def parsed(text: str | bytes) -> Any:  # noqa: ANN401
    """Return the value of json; raise ValueError for a duplicate key, which readers resolve differently."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"`{max(keys, key=keys.count)}` stands twice")
        return found

    return json.loads(text, object_pairs_hook=once)


def read_header(file: BinaryIO, size: int) -> tuple[bytes, dict[str, str], dict[str, Tensor]]:
    """Read the header of safetensors with so many bytes in a file.

    Returns
    -------
    start : bytes
        The bytes read.
    about : dict
        Its texts.
    plan : dict
        The tensors, without memory.

    Raises
    ------
    ValueError
        The tensors do not fit that many bytes.
    """
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, MAX_HEADER):
        raise ValueError("it has no header of its length")
    start += file.read(length)
    header = parsed(start[8:])
    about = header.pop("__metadata__")
    plan = {name: _named(name, _planned, {"entry": entry}) for name, entry in header.items()}
    if len(start) + sum(x.numel() * x.itemsize for x in plan.values()) != size:
        raise ValueError("its length does not match its shape")
    return start, about, plan


def _planned(entry: dict[str, Any]) -> Tensor:
    """Return a tensor of a header, without memory."""
    return torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device="meta")


def decoded(state: str, tensors: Mapping[str, Tensor], device: torch.device, check: Callable[[object], T]) -> T:
    """Return the value of a state, which must pass `check` and use all tensors."""
    left = dict(tensors)
    value = check(_decode(parsed(state), "", left, device))
    if left:
        raise ValueError(f"it holds `{next(iter(left))}`, which no part of it uses")
    return value


def _joined(path: str, part: str) -> str:
    return f"{path}.{part}" if path else part


def _put(x: Tensor, path: str, tensors: dict[str, Tensor]) -> dict[str, bool]:
    """Store a tensor in the order that it has in memory; return whether that is the order of its transpose."""
    if x.dtype not in DTYPES.values():
        raise _refusal(x, path)
    transposed = x.dim() == 2 and not x.is_contiguous() and x.mT.is_contiguous()
    tensors[path] = (x.mT if transposed else x).clone(memory_format=torch.contiguous_format)
    return {"transposed": True} if transposed else {}


def _take(
    name: str, path: str, tensors: dict[str, Tensor], device: torch.device, *, transposed: bool = False
) -> Tensor | np.ndarray:
    if path not in tensors:
        raise ValueError("it is missing")
    x = tensors.pop(path)
    x = x.mT if transposed else x
    return x.to(device) if name == "tensor" else _as_array(x)


def _as_array(x: Tensor) -> np.ndarray:
    """Return a numpy array; for a tensor without memory, repeated ones, which are valid scales."""
    if x.is_meta:
        return np.broadcast_to(torch.ones((), dtype=x.dtype).numpy(), tuple(x.shape))
    return x.numpy()


def _refusal(value: object, path: str) -> TypeError:
    what = repr(value) if isinstance(value, float) else f"of type {type(value).__name__}"
    return TypeError(
        f"`{path}` is {what}, which cannot be saved without pickle; call set_params({path.split('.')[0]}=...) with "
        "its default, a number, a name, an array or an object of this package first, which changes nothing learned."
    )
