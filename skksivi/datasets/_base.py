"""From a recipe to a table: download, verification and cache in scikit-learn's manner."""

from __future__ import annotations

import hashlib
import io
import math
import os
import secrets
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from importlib import resources
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from sklearn.utils import Bunch, check_scalar

from skksivi._utils.numbers import check_integer, check_number
from skksivi._utils.warnings import warn_caller
from skksivi.datasets._download import Limits, download
from skksivi.datasets._readers import MAX_BYTES, read_numbers

#: The present addresses of the UCI repository, and the old ones that it still serves.
UCI = "https://archive.ics.uci.edu/static/public"
OLD_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases"

#: What one download may take.
LIMITS = Limits()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What makes one table of numbers out of public files.

    Parameters
    ----------
    name : str
        Of the cache and of the description, ``descr/<name>.rst``.
    urls : tuple of str
        Tried in turn.
    files : tuple of str
        Names under which the table goes, alone or inside an archive.
    sha256 : str
        Of the table with its target, little-endian float64 in C order.
    n_samples : int
    feature_names : tuple of str
    target : str
        Name of the target.
    target_column : int, default=-1
        Its place among the columns.
    """

    name: str
    urls: tuple[str, ...]
    files: tuple[str, ...]
    sha256: str
    n_samples: int
    feature_names: tuple[str, ...]
    target: str
    target_column: int = -1

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the table, target included."""
        return self.n_samples, len(self.feature_names) + 1

    @property
    def originals(self) -> tuple[str, ...]:
        """The names of files that hold the table: the files themselves and the archives they come in."""
        return tuple(dict.fromkeys([*self.files, *map(_file_name, self.urls)]))

    def verify(self, numbers: np.ndarray) -> np.ndarray:
        """Return the numbers as the table, or raise ValueError if they are not the right ones."""
        if numbers.size != math.prod(self.shape):
            raise ValueError(f"it holds {numbers.size} numbers, expected a table of shape {self.shape}")
        table = np.asarray(numbers, dtype="<f8").reshape(self.shape)
        digest = hashlib.sha256(table.tobytes()).hexdigest()
        if digest != self.sha256:
            raise ValueError(f"the sha256 of its numbers is {digest}, expected {self.sha256}")
        return table.astype(np.float64)

    def read(self, name: str, content: bytes) -> np.ndarray:
        """Return the table of an original file, or raise ValueError if it is not in there."""
        try:
            return self.verify(read_numbers(name, content, self.files))
        except ImportError:
            raise
        except Exception as error:  # a damaged file may raise anything
            raise ValueError(_reason(error)) from error


class Options(NamedTuple):
    """The options of every fetcher."""

    data_home: str | os.PathLike[str] | None
    download_if_missing: bool
    return_X_y: bool  # noqa: N815  # as scikit-learn calls it
    as_frame: bool
    n_retries: int
    delay: float


def fetch(
    recipe: Recipe,
    options: Options,
    *,
    prepare: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]] = lambda X, y: (X, y),
    target_names: Sequence[str] | None = None,
) -> Any:  # noqa: ANN401
    """Return the data of a recipe, prepared, as a Bunch or a pair."""
    for name in ("download_if_missing", "return_X_y", "as_frame"):
        check_scalar(getattr(options, name), name, (bool, np.bool_))
    check_integer(options.n_retries, "n_retries", min_val=0)
    check_number(options.delay, "delay", min_val=0, max_val=threading.TIMEOUT_MAX)
    pandas = _import_pandas() if options.as_frame else None
    table, data_filename = _fetch_table(recipe, options)
    X, y = prepare(np.delete(table, recipe.target_column, axis=1), table[:, recipe.target_column].copy())
    frame = None
    if pandas is not None:
        X, y = pandas.DataFrame(X, columns=list(recipe.feature_names)), pandas.Series(y, name=recipe.target)
        frame = pandas.concat([X, y], axis=1)
    if options.return_X_y:
        return X, y
    return Bunch(
        data=X,
        target=y,
        frame=frame,
        feature_names=list(recipe.feature_names),
        target_names=[recipe.target] if target_names is None else list(target_names),
        DESCR=load_descr(recipe.name),
        data_filename=data_filename,
    )


def load_descr(name: str) -> str:
    return resources.files("skksivi.datasets").joinpath("descr", f"{name}.rst").read_text("utf-8")


def _fetch_table(recipe: Recipe, options: Options) -> tuple[np.ndarray, str | None]:
    """Return the table and the name of its cache, from there, else from an original file, else from the network.

    A cache that cannot be written is warned of, and None takes the place of its name.
    """
    with _usable(options.data_home):
        home = _home(options.data_home)
        cache = home / f"skksivi_{recipe.name}.npz"
        table = _from_cache(recipe, cache)
        if table is not None:
            return table, str(cache)
        table = _from_originals(recipe, home)
    if table is None:
        if not options.download_if_missing:
            raise OSError(
                f"The {recipe.name} data are not in {str(home)!r} and `download_if_missing` is False. "
                f"Put {_names(recipe)} there, from {' or '.join(recipe.urls)}, or name the folder where it is as "
                "`data_home`."
            )
        table = _download(recipe, home, options.n_retries, options.delay)
    return table, str(cache) if _written(cache, table) else None


def _home(data_home: str | os.PathLike[str] | None) -> Path:
    """Return the folder of the cache and of original files, which is made if it is not there."""
    from sklearn.datasets import get_data_home  # not above: it imports rich, which draws from `random`

    return Path(get_data_home(data_home))


@contextmanager
def _usable(data_home: object) -> Iterator[None]:
    """Raise ValueError where the folder, or a file in it, cannot be read."""
    try:
        yield
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"`data_home` is {data_home!r}, which cannot be used: {_reason(error)}. Name a folder that can be read "
            "and written, or None for scikit-learn's."
        ) from None


def _from_cache(recipe: Recipe, cache: Path) -> np.ndarray | None:
    """Return the table of the cache; a damaged one is named and removed."""
    try:
        content = _content(cache)
    except FileNotFoundError:
        return None
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive, archive.open("table.npy") as file:
            return recipe.verify(np.load(io.BytesIO(file.read(MAX_BYTES))))
    except Exception as error:  # a damaged archive may raise anything
        warn_caller(f"The cache {str(cache)!r} is damaged and rebuilt: {_reason(error)}.")
    with suppress(OSError):
        cache.unlink()
    return None


def _from_originals(recipe: Recipe, home: Path) -> np.ndarray | None:
    """Return the table of an original file that was put into the folder; files that do not hold it are named."""
    for path in filter(Path.is_file, (home / name for name in recipe.originals)):
        content = _content(path)
        try:
            return recipe.read(path.name, content)
        except ValueError as error:
            warn_caller(f"{str(path)!r} does not hold the {recipe.name} data: {error}.")
    return None


def _content(path: Path) -> bytes:
    """Return the content of a file, of one that is too large a part that is too large."""
    if path.exists() and not (path.is_file() or path.is_dir()):  # opening a pipe would block
        raise ValueError(f"{str(path)!r} is not a regular file")
    with open(path, "rb") as file:
        return file.read(MAX_BYTES + 1)


def _download(recipe: Recipe, home: Path, n_retries: int, delay: float) -> np.ndarray:
    """Return the table from the first address that gives it, with a warning of each that did not before."""
    failures: list[tuple[str, str]] = []
    for attempt in range(1 + n_retries):
        if attempt:
            time.sleep(delay)
        for url in recipe.urls:
            try:
                table = recipe.read(_file_name(url), download(url, LIMITS))
            except (OSError, HTTPException, ValueError) as error:
                failures.append((url, _reason(error)))
                continue
            for failed, reason in failures:
                warn_caller(f"{failed} did not give the {recipe.name} data: {reason}.")
            return table
    listed = "; ".join(f"{url}: {reason}" for url, reason in dict(failures).items())
    raise OSError(
        f"The {recipe.name} data could not be downloaded: {listed}. Without a connection, put {_names(recipe)}, from "
        f"one of these addresses, into {str(home)!r}, or name the folder where it is as `data_home`."
    )


def _written(cache: Path, table: np.ndarray) -> bool:
    """Write the cache whole or not at all, and tell whether that went well; if not, warn."""
    aside = cache.with_name(f".{cache.name}.{secrets.token_hex(8)}")
    try:
        with open(aside, "xb") as file:
            np.savez_compressed(file, table=table)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, cache)
    except OSError as error:
        warn_caller(f"The cache {str(cache)!r} could not be written: {_reason(error)}.")
        return False
    finally:
        with suppress(OSError):
            aside.unlink()
    return True


def _import_pandas() -> ModuleType:
    """Return pandas, which `as_frame` alone needs."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("`as_frame=True` needs pandas: install it with `pip install pandas`.") from error
    return pandas


def _names(recipe: Recipe) -> str:
    """Return the names of the original files as a part of a sentence."""
    return " or ".join(repr(name) for name in recipe.originals)


def _file_name(url: str) -> str:
    return PurePosixPath(urlsplit(url).path).name


def _reason(error: BaseException) -> str:
    """Return what went wrong as a part of a sentence."""
    return str(error).rstrip(".") or type(error).__name__
