"""From a recipe to a table: the original file, by scikit-learn's downloads, and the numbers in it, verified."""

from __future__ import annotations

import hashlib
import io
import math
import os
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from importlib import resources
from itertools import dropwhile
from pathlib import Path, PurePosixPath
from subprocess import DEVNULL, PIPE, Popen
from tempfile import TemporaryFile
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from sklearn.utils import Bunch, check_scalar

from skksivi._utils.checks import check_integer, check_number

#: The present addresses of the UCI repository, and the old ones that it still serves.
UCI = "https://archive.ics.uci.edu/static/public"
OLD_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases"

#: Bytes of a file, packed or not, at most: ten times the largest there is.
MAX_BYTES = 2**25


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What makes one table of numbers out of public files.

    Parameters
    ----------
    name : str
        Of the description, ``descr/<name>.rst``.
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

    def read(self, path: Path) -> np.ndarray:
        """Return the table of an original file, or raise ValueError if it is not in there."""
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        try:
            return self.verify(_numbers(path.name, content, self.files))
        except ImportError:
            raise
        except Exception as error:  # a damaged file may raise anything
            raise ValueError(f"{str(path)!r} does not hold the {self.name} data: {_reason(error)}") from error


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


def _fetch_table(recipe: Recipe, options: Options) -> tuple[np.ndarray, str]:
    """Return the table and the name of the original file that holds it, which is downloaded if it is not there."""
    from sklearn.datasets import fetch_file, get_data_home  # not above: it imports rich, which draws from `random`

    try:
        home = Path(get_data_home(options.data_home))
    except (OSError, ValueError) as error:
        raise ValueError(f"`data_home` is {options.data_home!r}, which cannot be used: {_reason(error)}.") from None
    for path in filter(Path.is_file, (home / name for name in recipe.originals)):
        try:
            return recipe.read(path), str(path)
        except ValueError as error:
            raise ValueError(f"{error}. Remove it, and it is downloaded again.") from error
    remedy = f"Put {' or '.join(map(repr, recipe.originals))} there, or name the folder where it is as `data_home`."
    if not options.download_if_missing:
        raise OSError(
            f"The {recipe.name} data, from {' or '.join(recipe.urls)}, are not in {str(home)!r}, and "
            f"`download_if_missing` is False. {remedy}"
        )
    failures = []
    for url in recipe.urls:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Retry downloading", UserWarning)  # the error tells of all failures
                path = fetch_file(url, home, _file_name(url), n_retries=options.n_retries, delay=options.delay)
            try:
                table = recipe.read(path)
            except ValueError:
                path.unlink()
                raise
            path.chmod(0o644)  # as downloaded, nobody else may read it
            return table, str(path)
        except (OSError, HTTPException, ValueError) as error:
            failures.append(f"{url}: {_reason(error)}")
    raise OSError(f"The {recipe.name} data could not be downloaded to {str(home)!r}: {'; '.join(failures)}. {remedy}")


def _numbers(name: str, content: bytes, members: Sequence[str]) -> np.ndarray:
    """Return the numbers of a file row by row, without what stands above the first row of numbers.

    The suffix tells the format; in a zip archive it is the first of `members`, in whatever folder.
    """
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
    suffix = PurePosixPath(name).suffix
    if suffix == ".zip":
        return _numbers(*_member(content, members), members)
    if suffix == ".Z":
        return _numbers(name.removesuffix(suffix), _uncompressed(content), members)
    rows = _sheet(content) if suffix in (".xls", ".xlsx") else _lines(content)
    return np.array([float(cell) for row in dropwhile(_is_heading, rows) for cell in row])


def _member(content: bytes, members: Sequence[str]) -> tuple[str, bytes]:
    """Return name and content of the first of `members` in a zip archive."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        found = {PurePosixPath(path).name: path for path in archive.namelist()}
        for name in filter(found.__contains__, members):
            with archive.open(found[name]) as file:
                return name, file.read(MAX_BYTES + 1)
    raise ValueError(f"none of its files {sorted(found)} is one of {list(members)}")


def _uncompressed(content: bytes) -> bytes:
    """Return what Unix ``compress`` packed, which no library here reads."""
    with TemporaryFile() as packed:
        packed.write(content)
        packed.seek(0)
        try:
            with Popen(["gzip", "-dc"], stdin=packed, stdout=PIPE, stderr=DEVNULL) as gzip:  # noqa: S607
                return gzip.stdout.read(MAX_BYTES + 1)  # type: ignore[union-attr]
        except FileNotFoundError as error:
            raise ImportError("Unpacking a file in .Z needs the program gzip; or unpack it by hand.") from error


def _sheet(content: bytes) -> Iterable[Sequence[Any]]:
    """Return the cells of each row of an Excel file's first sheet."""
    try:
        from python_calamine import CalamineWorkbook
    except ImportError as error:
        raise ImportError(
            "An Excel file needs python-calamine: install it with `pip install python-calamine`."
        ) from error
    return CalamineWorkbook.from_filelike(io.BytesIO(content)).get_sheet_by_index(0).to_python()


def _lines(content: bytes) -> Iterable[Sequence[str]]:
    """Return the cells of each line of a text, between blanks, commas and semicolons."""
    text = content.decode("utf-8-sig").replace(",", " ").replace(";", " ")
    return map(str.split, text.splitlines())


def _is_heading(row: Sequence[Any]) -> bool:
    """Tell whether a row is empty or has a cell that is no number."""
    try:
        return not [float(cell) for cell in row]
    except (TypeError, ValueError):
        return True


def _import_pandas() -> ModuleType:
    """Return pandas, which `as_frame` alone needs."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("`as_frame=True` needs pandas: install it with `pip install pandas`.") from error
    return pandas


def _file_name(url: str) -> str:
    return PurePosixPath(urlsplit(url).path).name


def _reason(error: BaseException) -> str:
    """Return what went wrong as a part of a sentence."""
    return str(error).rstrip(".") or type(error).__name__
