"""Checks of single numbers, and warnings that point at the line of the user; without torch."""

from __future__ import annotations

import math
import re
import sys
import warnings
from numbers import Integral, Real

from sklearn.utils import check_scalar


def check_integer(value: object, name: str, *, min_val: int, max_val: int | None = None) -> int:
    """Return an integer from `min_val` to `max_val`.

    Raises
    ------
    TypeError
        It is none; neither is True or False.
    ValueError
        It is out of the range.
    """
    if isinstance(value, bool):
        raise TypeError(f"`{name}` must be an int, got the truth value {value}.")
    return int(check_scalar(value, name, Integral, min_val=min_val, max_val=max_val))


def check_number(value: object, name: str, *, min_val: float, max_val: float) -> float:
    """Return a number from `min_val` to `max_val`.

    Raises
    ------
    TypeError
        It is none; neither is True or False.
    ValueError
        It is out of the range, or NaN.
    """
    if isinstance(value, bool):
        raise TypeError(f"`{name}` must be a number, got the truth value {value}.")
    number = float(check_scalar(value, name, Real, min_val=min_val, max_val=max_val))
    if math.isnan(number):
        raise ValueError(f"`{name}` must be a number from {min_val:g} to {max_val:g}, got NaN.")
    return number


def shown(value: object) -> str:
    """Return a value for a message: numbers of numpy as plain ones, the shape of an array or a tensor."""
    if getattr(value, "shape", ()):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"  # type: ignore[attr-defined]
    return plain(repr(value.item() if hasattr(value, "item") and hasattr(value, "shape") else value))


def plain(words: str) -> str:
    """Return words in which numbers of numpy and torch are written as others."""
    return re.sub(r"(?:np\.\w+|tensor)\(([^(),]*)[^()]*\)", r"\1", words)


#: How a model of another library becomes a target, by its package or a method.
BRIDGES = {
    "pymc": "from_pymc(model)", "numpyro": "from_numpyro(model, *its arguments)",
    "log_density_gradient": "from_bridgestan(model)", "cmdstanpy": "from_bridgestan(bridgestan.StanModel(stan_file))",
    "log_prob": "from_log_prob(model.log_prob, d)", "logpdf": "from_score_fn(score_fn, d, log_prob=model.logpdf)",
}  # fmt: skip


def bridge_of(model: object) -> str:
    """Return the sentence that makes a target of a model of another library, nothing for anything else."""
    model = getattr(model, "func", model)  # of functools.partial
    found = {cls.__module__.partition(".")[0] for cls in type(model).__mro__}
    if not callable(model):
        found |= {name for name in BRIDGES if hasattr(model, name)}
    elif names := getattr(getattr(model, "__code__", None), "co_names", ()):
        known = [*names, *map(getattr(model, "__globals__", {}).get, names)] * ("sample" in names)
        origins = (getattr(a, "__module__", None) or getattr(a, "__name__", None) or a for a in known)
        found = {str(name).partition(".")[0] for name in origins} & {"numpyro"}
    words = next((BRIDGES[name] for name in BRIDGES if name in found), "")
    return f" Make a target of it: skksivi.targets.{words}." if words else ""


def is_number(value: object) -> bool:
    """Tell whether this is a number, neither True nor False, nor an integer of more than 64 bits."""
    long = isinstance(value, Integral) and abs(int(value)) >= 2**63
    return isinstance(value, Real) and not isinstance(value, bool) and not long


def lies_between(value: object, low: float, high: float) -> bool:
    """Tell whether this is a number strictly between two others."""
    return is_number(value) and low < float(value) < high  # type: ignore[arg-type]


#: Packages whose frames stand between the line that is told and the warning: scikit-learn wraps `fit`, NumPyro runs
#: the model.
PASSED = ("skksivi", "sklearn", "numpyro")


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line from which the package was called, however deep the warning arises."""
    frame, level = sys._getframe(), 1  # noqa: SLF001
    while frame.f_back is not None and _package(frame.f_globals) in PASSED:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _package(variables: dict[str, object]) -> str:
    return str(variables.get("__name__")).partition(".")[0]
