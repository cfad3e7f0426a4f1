"""The crossing between numpy arrays and torch tensors, devices, data types and seeds; numbers in words and tables."""

from __future__ import annotations

import contextlib
import html
import math
from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils import check_random_state
from torch import Tensor

from skksivi._utils.checks import bridge_of, shown

T = TypeVar("T")

#: What draws or seeds; None means fresh entropy, or a stream that goes on.
RandomState = int | np.random.RandomState | None

#: The most numbers of a point in a message.
MOST_LISTED = 20

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def as_tensor(
    X: ArrayLike | Tensor, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """Return `X` as a tensor of the given type, or its own, on the given device, without a graph.

    An array that torch does not take as it is, with negative strides or read-only, is copied.
    """
    x = X.detach() if isinstance(X, Tensor) else torch.from_numpy(np.require(native(X), requirements=["C", "W", "E"]))
    return x.to(device=device, dtype=dtype)


def native(X: ArrayLike) -> np.ndarray:
    """Return an array that torch takes, longdouble as float64, in the byte order of the machine."""
    a = np.asarray(X)
    return a.astype(np.float64 if a.dtype == np.longdouble else a.dtype.newbyteorder("="), copy=False)


def as_array(x: ArrayLike | Tensor) -> np.ndarray:
    return x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)


def without_graph(X: ArrayLike | Tensor) -> ArrayLike:
    """Return what numpy can read: a tensor as an array, anything else as it is."""
    return as_array(X) if isinstance(X, Tensor) else X


def as_numbers(X: ArrayLike | Tensor, name: str) -> np.ndarray:
    """Return `X` as an array of float64.

    Raises
    ------
    TypeError
        It does not hold real numbers.
    ValueError
        Its rows differ in length, or it is no array.
    """
    try:
        array = as_array(X)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{name}` must hold numbers, in rows of one length, got {shown(X)}.") from error
    try:
        return array.astype(np.float64, casting="unsafe" if array.dtype == object else "same_kind")
    except (TypeError, ValueError, OverflowError) as error:
        check_columns(X, name)
        raise TypeError(f"`{name}` must hold real numbers, got an array of {array.dtype}.{bridge_of(X)}") from error


def check_columns(X: object, name: str) -> None:
    """Raise ValueError for a column of a data frame that does not hold numbers."""
    for column in getattr(X, "columns", ()):
        try:
            np.asarray(X[column]).astype(np.float64)  # type: ignore[index]
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"Column {column!r} of `{name}` does not hold numbers ({error}). Encode it, as by "
                "sklearn.preprocessing.OneHotEncoder, or leave it out."
            ) from error


def check_function(function: Callable[..., object], name: str, arguments: str) -> None:
    """Raise TypeError if a function given as the parameter `name` cannot be called with these arguments."""
    try:
        signature(function).bind(*arguments.split(", "))
    except TypeError as error:
        raise TypeError(f"`{name}` must be a function of ({arguments}), got {shown(function)}: {error}.") from error
    except ValueError:  # of some functions written in C nothing is known
        return


def resolve_device(device: str | torch.device, target: object = None) -> torch.device:
    """Turn the name of a device into one that is present; "auto" is where a target has its tensors, or the CPU."""
    if device == "auto":
        tensors = (x for x in getattr(target, "__dict__", {}).values() if isinstance(x, Tensor))
        return next((x.device for x in tensors if x.is_floating_point()), torch.device("cpu"))
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"`device` is {device!r}, which cannot be used on this machine; use 'auto' or 'cpu'."
        ) from error
    return resolved


def make_rng(random_state: RandomState) -> np.random.RandomState:
    """None means fresh entropy, never numpy's global state."""
    return check_random_state(np.random.RandomState() if random_state is None else random_state)


def make_seed(random_state: RandomState) -> int:
    """Draw one seed from `random_state`; None means fresh entropy, never numpy's global state."""
    return int(make_rng(random_state).randint(np.iinfo(np.int32).max))


def make_generator(random_state: RandomState, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a torch generator of its own stream, seeded from `random_state`."""
    return torch.Generator(device).manual_seed(make_seed(random_state))


def argmedian(values: Tensor) -> Tensor:
    """Return the index (...) of the lower median of values (..., n)."""
    values = values.detach()
    if values.device.type == "cpu":
        k = (values.shape[-1] - 1) // 2
        with contextlib.suppress(RuntimeError):  # inside a transform of torch.func there is no array
            return torch.from_numpy(np.argpartition(values.numpy(), k)[..., k])  # a fifth of torch's time
    return values.median(-1).indices


def location_and_scale(a: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return weighted mean and standard deviation of columns (n, ...); the latter is one where they are constant."""
    mean = np.average(a, axis=0, weights=w)
    scale = np.sqrt(np.average((a - mean) ** 2, axis=0, weights=w))
    return mean, np.where(scale <= 1e-12 * np.abs(mean), 1.0, scale)


def check_sample_weight(sample_weight: ArrayLike | None, n: int) -> np.ndarray:
    """Return weights (n,) of observations, ones by default.

    Raises
    ------
    TypeError
        They are not real numbers.
    ValueError
        They are not n finite numbers of zero or more, one of them positive.
    """
    if sample_weight is None:
        return np.ones(n)
    w = as_numbers(sample_weight, "sample_weight")
    if w.shape != (n,) or not np.isfinite(w).all() or (w < 0).any() or not w.any():
        raise ValueError(
            f"`sample_weight` must be {n} finite numbers of zero or more, one for each observation and not all zero; "
            f"got shape {w.shape}: {np.array2string(w, threshold=4, edgeitems=2)}."
        )
    return w


def listed(x: ArrayLike) -> str:
    """Return a vector as a list that can be pasted, abridged if it is long."""
    values = [f"{float(value):.4g}" for value in as_array(x)]
    return f"[{', '.join(values if len(values) <= MOST_LISTED else [*values[:5], '...'])}]"


def with_error(value: float, se: float) -> str:
    """Return a number and its standard error, both to the first digit of the latter; "?" is what is unknown."""
    if math.isnan(value):
        return "?"
    if not math.isfinite(se):
        return f"{value:.3g} ± ?"
    if se <= 1e-12 * abs(value) or se < 1e-200:  # of a constant, or a value that many draws share
        return f"{value:.6g} ± 0"
    last = int(f"{se:.0e}".partition("e")[2])
    size = int(f"{max(abs(value), se):.0e}".partition("e")[2])
    if size > 6 or last < -6:
        return f"{value:.{max(size - last, 0)}e} ± {se:.0e}"
    value, se = round(value, -last) + 0.0, round(se, -last)  # no -0
    return f"{value:.{max(-last, 0)}f} ± {se:.{max(-last, 0)}f}"


def shown_by_rows(cls: type[T]) -> type[T]:
    """Give a class a line and an HTML table of what its `_rows()` returns, pairs of a name and words, if any."""

    def line(self: T) -> str:
        return f"{cls.__name__}({'; '.join(f'{name}: {words}' for name, words in self._rows() if words)})"  # type: ignore[attr-defined]

    def table(self: T) -> str:
        rows = (row for row in self._rows() if row[1])  # type: ignore[attr-defined]
        return html_table(rows, align="left")

    cls.__repr__, cls._repr_html_ = line, table  # type: ignore[assignment, method-assign, attr-defined]
    return cls


def html_table(
    rows: Iterable[Sequence[str]], *, head: Sequence[str] = (), above: str = "", below: str = "", align: str = "right"
) -> str:
    """Return a table with paragraphs around it, all of plain text; the first cell of a row names it."""
    lines = ["".join(f"<th>{html.escape(text)}</th>" for text in head)] if head else []
    for name, *cells in rows:
        row = "".join(f'<td style="text-align: {align}">{html.escape(text)}</td>' for text in cells)
        lines.append(f"<th>{html.escape(name)}</th>{row}")
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    before, after = (f"<p>{html.escape(text)}</p>" if text else "" for text in (above, below))
    return f"{before}<table>{table}</table>{after}"
