"""What the parts of an object must hold, and how their sizes are compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Holds = Callable[[Any], bool]


def _finite(x: Any) -> bool:
    """Tell whether a tensor or an array holds neither NaN nor infinity, without memory of its size."""
    if isinstance(x, Tensor):
        return x.is_meta or x.numel() == 0 or all(bool(extreme.isfinite()) for extreme in x.aminmax())
    without_memory = not any(x.strides)
    return without_memory or x.size == 0 or bool(np.isfinite(x.min()) and np.isfinite(x.max()))


def is_tensor(*dtypes: torch.dtype) -> Holds:
    return lambda value: isinstance(value, Tensor) and value.dtype in dtypes and _finite(value)


def is_weights(value: Any) -> bool:
    """Tell whether `value` is a tensor that is not empty: an empty one may claim any length for its other side."""
    return is_tensor(torch.float32, torch.float64)(value) and value.numel() > 0


def is_array(dtype: type, *, finite: bool = True) -> Holds:
    return lambda value: isinstance(value, np.ndarray) and value.dtype == dtype and (not finite or _finite(value))


def is_integer(low: int, high: float = math.inf) -> Holds:
    return lambda value: type(value) is int and low <= value <= high


def is_instance(*classes: type) -> Holds:
    return lambda value: isinstance(value, classes)


def or_none(holds: Holds) -> Holds:
    return lambda value: value is None or holds(value)


def is_width(value: Any) -> bool:
    """Tell whether `value` is a number whose square is one of torch."""
    return type(value) in (int, float) and 0 <= value <= 1e9


DOUBLES, INDICES = is_tensor(torch.float64), is_tensor(torch.int64)
ARRAY, CURVE = is_array(np.float64), is_array(np.float64, finite=False)
COUNT, SIZE = is_integer(0), is_integer(1)

Sizes = tuple[int | None, ...]

#: What the parts of an object hold, and a letter for each of their sizes: equal letters are equal sizes.
Parts = dict[str, tuple[Holds, str]]


class Kind(NamedTuple):
    """How the objects of a class are taken apart, put together and compared with their neighbours."""

    cls: type
    parts: Callable[[Any], dict[str, Any]]
    build: Callable[..., Any]
    sizes: Callable[[Any], Sizes] = lambda _: ()


#: The classes that a file may name, and their names, which `_kinds` enters.
KINDS: dict[str, Kind] = {}
NAMES: dict[type, str] = {}


def checked(parts: dict[str, Any], spec: Parts) -> dict[str, Any]:
    """Return the parts if they are those of the specification.

    Raises
    ------
    ValueError
        One is missing, too many, of another type, or does not fit the others.
    """
    if parts.keys() != spec.keys():
        raise ValueError(f"it lacks or should not hold {sorted(parts.keys() ^ spec.keys())}")
    known: dict[str, int] = {}
    for name, (holds, letters) in spec.items():
        if not holds(parts[name]):
            raise ValueError(f"`{name}` is of another type or out of its range")
        if parts[name] is None or not letters:
            continue
        sizes = _sizes(parts[name])
        if len(sizes) != len(letters):
            raise ValueError(f"`{name}` has {len(sizes)} dimensions, expected {len(letters)}")
        for letter, size in zip(letters, sizes, strict=True):
            if size is not None and known.setdefault(letter, size) != size:
                raise ValueError(f"`{name}` has size {size} where others have {known[letter]}")
    return parts


def _sizes(value: Any) -> Sizes:
    """Return what the sizes of other parts are compared with; None fits all."""
    if isinstance(value, int):
        return (value,)
    return tuple(value.shape) if hasattr(value, "shape") else KINDS[NAMES[type(value)]].sizes(value)
