"""Names of a package that are imported when they are first used (SPEC 1)."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec, resolve_name

#: Held while something is imported: two threads that import parts of one library at once may see a half of it.
_IMPORTING = threading.RLock()


@contextmanager
def keeping_random() -> Iterator[None]:
    """Leave the state of `random` as it is, from which a library may draw when it is imported, as rich does."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def lazy(
    package: str, where: Mapping[str, Sequence[str]], unlisted: Sequence[str] = ()
) -> tuple[list[str], Callable[[], list[str]], Callable[[str], object]]:
    """Return `__all__`, `__dir__` and `__getattr__` of a package.

    Parameters
    ----------
    package : str
        Its `__name__`.
    where : mapping of str to sequence of str
        Names by the submodule that defines them, with a dot before those of the parent, and below "" submodules that
        are listed; the others are found too.
    unlisted : sequence of str
        Names of `where` that other parts of the library need, but no user.
    """
    home = {name: module for module, names in where.items() for name in names}

    def load(name: str) -> object:
        module = resolve_name(f".{home.get(name) or name}", package)
        if name not in home and (name.startswith("_") or find_spec(module) is None):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with _IMPORTING:
            try:
                found = import_module(module)
            except AttributeError as error:  # which would be taken for a name that is missing here
                raise ImportError(f"`{module}` could not be imported: {error}") from error
        if home.get(name):
            found = getattr(found, name)
        setattr(sys.modules[package], name, found)
        return found

    names = sorted(home.keys() - set(unlisted))
    return names, names.copy, load
