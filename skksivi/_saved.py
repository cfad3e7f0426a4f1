"""What is saved of an object: its class declares it, files of estimators and checkpoints read it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

Holds = Callable[[Any], bool]

#: What the parts of an object hold, and a letter for each of their sizes: equal letters are equal sizes.
Parts = dict[str, tuple[Holds, str]]

Sizes = tuple[int | None, ...]

C = TypeVar("C", bound=type)
V = TypeVar("V")


def _finite(x: Tensor | np.ndarray) -> bool:
    """Tell whether a tensor or an array holds neither NaN nor infinity, without memory of its size."""
    if isinstance(x, Tensor):
        return x.is_meta or x.numel() == 0 or all(bool(extreme.isfinite()) for extreme in x.aminmax())
    without_memory = not any(x.strides)
    return without_memory or x.size == 0 or bool(np.isfinite(x.min()) and np.isfinite(x.max()))


def is_tensor(*dtypes: torch.dtype) -> Holds:
    return lambda value: isinstance(value, Tensor) and value.dtype in dtypes and _finite(value)


def is_weights(value: object) -> bool:
    """Tell whether `value` is a tensor that is not empty: an empty one may claim any length for its other side."""
    return isinstance(value, Tensor) and is_tensor(torch.float32, torch.float64)(value) and value.numel() > 0


def is_array(dtype: type, *, finite: bool = True) -> Holds:
    return lambda value: isinstance(value, np.ndarray) and value.dtype == dtype and (not finite or _finite(value))


def is_integer(low: int, high: float = math.inf) -> Holds:
    return lambda value: type(value) is int and low <= value <= high


def is_instance(*classes: type) -> Holds:
    return lambda value: isinstance(value, classes)


def or_none(holds: Holds) -> Holds:
    return lambda value: value is None or holds(value)


def is_width(value: object) -> bool:
    """Tell whether `value` is a number whose square is one of torch."""
    return (type(value) is int or type(value) is float) and 0 <= value <= 1e9


DOUBLES, INDICES = is_tensor(torch.float64), is_tensor(torch.int64)
ARRAY, CURVE = is_array(np.float64), is_array(np.float64, finite=False)
COUNT, SIZE, SEED = is_integer(0), is_integer(1), is_integer(0, 2**32 - 1)


class Kind(NamedTuple):
    """How the objects of a class are taken apart, put together and compared with their neighbours."""

    cls: type
    parts: Callable[[Any], Mapping[str, object]]
    build: Callable[..., object]
    sizes: Callable[[Any], Sizes] = lambda _: ()


#: The classes that a file may name, and their names there.
KINDS: dict[str, Kind] = {}
NAMES: dict[type, str] = {}


def register(name: str, kind: Kind) -> None:
    """Let files name a class."""
    KINDS[name], NAMES[kind.cls] = kind, name


def saved(
    name: str, spec: Parts, sizes: str = "", *, parts: Callable[[Any], Mapping[str, object]] | None = None
) -> Callable[[C], C]:
    """Declare what is saved of the objects of a class.

    They are put together by its class method `restored`, where it has one, or else by the class.

    Parameters
    ----------
    name : str
        That of the class in a file.
    spec : Parts
        What its parts hold.
    sizes : str, default=""
        The letters of the parts' sizes that its neighbours must agree with; one of no part fits any size. A class
        with an attribute `shape` has that.
    parts : callable, default=None
        Returns the parts of an object; None means its attributes of these names.
    """

    def take(value: object) -> Mapping[str, object]:
        return parts(value) if parts else {part: getattr(value, part) for part in spec}

    def declare(cls: C) -> C:
        build = getattr(cls, "restored", cls)
        kind = Kind(
            cls,
            take,
            lambda **parts: build(**checked(parts, spec)),
            lambda value: tuple(map(_matched(take(value), spec).get, sizes)),
        )
        register(name, kind)
        return cls

    return declare


def saved_by_parameters(name: str, check: Callable[[Any], object]) -> Callable[[C], C]:
    """Declare that objects with scikit-learn's parameters are saved by these, and what raises if one is bad."""

    def declare(cls: C) -> C:
        def build(**parameters: object) -> object:
            check(described := cls(**parameters))
            return described

        register(name, Kind(cls, lambda described: described.get_params(deep=False), build))
        return cls

    return declare


def checked(parts: dict[str, V], spec: Parts) -> dict[str, V]:
    """Return the parts if they are those of the specification.

    Raises
    ------
    ValueError
        One is missing, too many, of another type, or does not fit the others.
    """
    if parts.keys() != spec.keys():
        raise ValueError(f"it lacks or should not hold {sorted(parts.keys() ^ spec.keys())}")
    for name, (holds, _) in spec.items():
        if not holds(parts[name]):
            raise ValueError(f"`{name}` is of another type or out of its range")
    _matched(parts, spec)
    return parts


def _matched(parts: Mapping[str, object], spec: Parts) -> dict[str, int]:
    """Return the size that each letter stands for; raise ValueError where it stands for two."""
    known: dict[str, int] = {}
    for name, (_, letters) in spec.items():
        if parts[name] is None or not letters:
            continue
        sizes = _sizes(parts[name])
        if len(sizes) != len(letters):
            raise ValueError(f"`{name}` has {len(sizes)} dimensions, expected {len(letters)}")
        for letter, size in zip(letters, sizes, strict=True):
            if size is not None and known.setdefault(letter, size) != size:
                raise ValueError(f"`{name}` has size {size} where others have {known[letter]}")
    return known


def _sizes(value: object) -> Sizes:
    """Return what the sizes of other parts are compared with; None fits all."""
    if isinstance(value, int):
        return (value,)
    return tuple(value.shape) if hasattr(value, "shape") else KINDS[NAMES[type(value)]].sizes(value)
