"""Declarations by classes of what is saved of their objects, for files of estimators and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

Holds = Callable[[Any], bool]

#: Checks of the parts of an object, and a letter for each of their sizes: equal letters are equal sizes.
Parts = dict[str, tuple[Holds, str]]

Sizes = tuple[int | None, ...]

C = TypeVar("C", bound=type)
V = TypeVar("V")

#: The smallest positive number in a file, and the largest by dtype: float64 fits float32, and squares do not
#: overflow.
SMALLEST = 2.0**-126
LARGEST = {"float32": 2.0**63, "float64": 2.0**100}


def _is_unknown(x: Tensor | np.ndarray) -> bool:
    """Tell whether a tensor or an array has no memory for its numbers, or none of them."""
    return x.is_meta or x.numel() == 0 if isinstance(x, Tensor) else not any(x.strides) or x.size == 0


def _lies_in(x: Tensor | np.ndarray, low: float, high: float) -> bool:
    """Tell whether all numbers lie in a range, and none is NaN or too large, without memory of their size."""
    if _is_unknown(x):
        return True
    smallest, largest = x.aminmax() if isinstance(x, Tensor) else (x.min(), x.max())
    most = LARGEST.get(str(x.dtype).removeprefix("torch."), math.inf)
    return max(low, -most) <= smallest.item() and largest.item() <= min(high, most)


def is_tensor(
    *dtypes: torch.dtype,
    low: float = -math.inf,
    high: float = math.inf,
    also: Callable[[Tensor], bool] | None = None,
) -> Holds:
    """Return a check for a tensor of certain dtypes, with numbers in a range, and perhaps a further condition."""

    def holds(value: object) -> bool:
        if not isinstance(value, Tensor) or value.dtype not in dtypes or not _lies_in(value, low, high):
            return False
        return also is None or _is_unknown(value) or also(value)

    return holds


def weights_from(low: float) -> Holds:
    """Return a check for a tensor that is not empty: an empty one may claim any length for its other side."""
    holds = is_tensor(torch.float32, torch.float64, low=low)
    return lambda value: holds(value) and isinstance(value, Tensor) and value.numel() > 0


def is_array(
    dtype: type,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    also: Callable[[np.ndarray], bool] | None = None,
) -> Holds:
    """Return the same for an array."""

    def holds(value: object) -> bool:
        if not isinstance(value, np.ndarray) or value.dtype != dtype or not _lies_in(value, low, high):
            return False
        return also is None or _is_unknown(value) or also(value)

    return holds


def is_curve(value: object) -> bool:
    """Tell whether `value` is an array of float64, possibly with NaN or infinite entries."""
    return isinstance(value, np.ndarray) and value.dtype == np.float64


def is_error(value: object) -> bool:
    """Tell whether `value` is such an array of numbers of zero or more."""
    if not isinstance(value, np.ndarray) or not is_curve(value):
        return False
    return _is_unknown(value) or np.nanmin(value, initial=0) >= 0


def _is_factor(x: Tensor) -> bool:
    return x.dim() >= 2 and bool((x.diagonal(dim1=-2, dim2=-1) >= SMALLEST).all()) and not x.triu(1).any()


def _is_orthonormal(x: Tensor) -> bool:
    return x.dim() == 2 and (x.mT @ x).allclose(torch.eye(x.shape[1]).to(x), atol=1e-6)


def is_integer(low: int, high: int = 2**63 - 1) -> Holds:
    return lambda value: type(value) is int and low <= value <= high


def is_float(low: float, high: float) -> Holds:
    return lambda value: type(value) is float and low <= value <= high


def is_instance(*classes: type) -> Holds:
    return lambda value: isinstance(value, classes)


def is_list_of(*classes: type) -> Holds:
    """Return a check for a list of one or more objects of certain classes."""
    return lambda value: (
        isinstance(value, list) and len(value) > 0 and all(isinstance(item, classes) for item in value)
    )


def is_one_of(*names: str) -> Holds:
    return lambda value: isinstance(value, str) and value in names


def or_none(holds: Holds) -> Holds:
    return lambda value: value is None or holds(value)


def is_width(value: object) -> bool:
    """Tell whether `value` is a number whose square torch can represent."""
    return (type(value) is int or type(value) is float) and 0 <= value <= 1e9


DOUBLES, INDICES = is_tensor(torch.float64), is_tensor(torch.int64)
POSITIVE = is_tensor(torch.float64, low=SMALLEST)
NOT_NEGATIVE = is_tensor(torch.float64, low=0)
FACTOR = is_tensor(torch.float64, also=_is_factor)  # a Cholesky factor
FACTORS = is_tensor(torch.float32, torch.float64, also=_is_factor)
ORTHONORMAL = is_tensor(torch.float64, also=_is_orthonormal)
WEIGHTS, POSITIVE_WEIGHTS = weights_from(-math.inf), weights_from(SMALLEST)
ARRAY, NONNEGATIVE = is_array(np.float64), is_array(np.float64, low=0)
SHARES = is_array(np.float64, low=0, also=lambda x: math.isclose(x.sum(), 1, rel_tol=1e-6))
CURVE = is_curve
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

    They are rebuilt by its class method `restored`, if it has one, or else by the class.

    Parameters
    ----------
    name : str
        Name of the class in a file.
    spec : Parts
        Checks of its parts.
    sizes : str, default=""
        The letters of the parts' sizes that its neighbours must agree with; a letter of no part fits any size. A
        class with an attribute `shape` uses it.
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
    """Return the parts if they agree with the specification.

    Raises
    ------
    ValueError
        A part is missing, unknown, of another type, or does not fit the others.
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
    first: dict[str, str] = {}
    for name, (_, letters) in spec.items():
        if parts[name] is None or not letters:
            continue
        sizes = _sizes(parts[name])
        if len(sizes) != len(letters):
            raise ValueError(f"`{name}` has {len(sizes)} dimensions, expected {len(letters)}")
        for letter, size in zip(letters, sizes, strict=True):
            if size is not None and known.setdefault(letter, size) != size:
                raise ValueError(f"`{name}` has size {size} where `{first[letter]}` has {known[letter]}")
            first.setdefault(letter, name)
    return known


def _sizes(value: object) -> Sizes:
    """Return the sizes that other parts are compared with; None fits all."""
    if isinstance(value, int):
        return (value,)
    return tuple(value.shape) if hasattr(value, "shape") else KINDS[NAMES[type(value)]].sizes(value)
