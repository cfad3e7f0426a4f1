"""Warnings that point at the line of the user."""

from __future__ import annotations

import sys
import warnings

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
