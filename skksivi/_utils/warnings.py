"""Warnings that point at the line of the user."""

from __future__ import annotations

import sys
import warnings
from typing import Protocol

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


class HasParameters(Protocol):
    """A candidate of a search."""

    def get_params(self) -> dict[str, object]: ...


#: The last grade of each replicate of a target in this process, with the settings of its fit.
_LAST: dict[tuple[object, ...], tuple[float, dict[str, str]]] = {}


def compared(estimator: HasParameters, X: object, grade: float) -> float:
    """Return a grade, and warn if it equals that of the last candidate, which had other settings."""
    replicate = getattr(X, "replicate", ())
    if not (replicate and hasattr(estimator, "get_params")):
        return grade
    key = type(estimator), type(X), *replicate
    settings = {name: repr(value) for name, value in estimator.get_params().items()}
    last, before = _LAST.get(key, (None, {}))
    _LAST[key] = grade, settings
    known = (settings.keys() & before.keys()) - {"checkpoint", "device", "verbose"}  # not meant to change a fit
    changed = sorted(name for name in known if settings[name] != before[name])
    if grade == last and changed:
        warn_caller(
            f"Two candidates of this search have the same score, {grade:.6g}: {_all_of(changed)} did not change what "
            f"is returned{_why(estimator)}."
        )
    return grade


def _all_of(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _why(estimator: HasParameters) -> str:
    n_iter, made = getattr(estimator, "n_iter_", None), getattr(estimator, "fitted_by_", None)
    if made is None:
        return ""
    if n_iter == 0:
        return f", for both are their start, by {made}, without training; set train=True to search over trainings"
    if getattr(estimator, "best_iter_", n_iter) == 0:
        return f", for both are their start, by {made}, on which training has not improved"
    return ""
