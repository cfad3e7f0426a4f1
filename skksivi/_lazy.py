"""Names of a package that are imported when they are first used (SPEC 1)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy(
    package: str, public: Sequence[str], where: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package.

    Parameters
    ----------
    package : str
        Its `__name__`.
    public : sequence of str
        Its `__all__`. Names that are not in `where` are submodules.
    where : mapping of str to sequence of str
        Names by the submodule that defines them.
    """
    home = {name: module for module, names in where.items() for name in names}

    def load(name: str) -> Any:
        if name not in public:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = f"{package}.{home.get(name, name)}"
        try:
            found = import_module(module)
        except AttributeError as error:  # which would be taken for a name that is missing here
            raise ImportError(f"`{module}` could not be imported: {error}") from error
        if name in home:
            found = getattr(found, name)
        setattr(sys.modules[package], name, found)
        return found

    return load, lambda: sorted(public)
