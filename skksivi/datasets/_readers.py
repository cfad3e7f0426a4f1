"""The numbers of a file: text or Excel, alone, in a zip archive or packed by Unix ``compress``."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterable, Sequence
from itertools import dropwhile
from pathlib import PurePosixPath
from typing import Any

import numpy as np

#: What `Unix compress` writes for "forget all strings but the single bytes".
_CLEAR = 256


def read_numbers(name: str, content: bytes, members: Sequence[str]) -> np.ndarray:
    """Return the numbers of a file row by row, without what stands above the first row of numbers.

    Parameters
    ----------
    name : str
        Its suffix tells the format: `.zip`, `.Z`, `.xls`, `.xlsx`, anything else is text whose numbers are separated
        by blanks, commas or semicolons.
    content : bytes
    members : sequence of str
        Names of the files of which one is looked for in an archive, in whatever folder.

    Returns
    -------
    numbers : ndarray of shape (n,)
        float64.

    Raises
    ------
    ImportError
        An Excel file, and python-calamine is not installed.
    Exception
        Of any kind, where the content is not of the format.
    """
    path = PurePosixPath(name)
    if path.suffix == ".zip":
        return read_numbers(*_member(content, members), members)
    if path.suffix == ".Z":
        return read_numbers(path.stem, uncompress(content), members)
    rows = _sheet(name, content) if path.suffix in (".xls", ".xlsx") else _lines(content)
    return np.array([float(cell) for row in dropwhile(_is_heading, rows) for cell in row])


def _member(content: bytes, members: Sequence[str]) -> tuple[str, bytes]:
    """Return name and content of the first of `members` in a zip archive."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        found = {PurePosixPath(name).name: name for name in archive.namelist()}
        for name in members:
            if name in found:
                return name, archive.read(found[name])
    raise ValueError(f"none of its files {sorted(found)} is one of {list(members)}")


def _lines(content: bytes) -> Iterable[Sequence[str]]:
    """Return the cells of each line of a text."""
    return (re.findall(r"[^\s,;]+", line) for line in content.decode("utf-8-sig").splitlines())


def _sheet(name: str, content: bytes) -> Iterable[Sequence[Any]]:
    """Return the cells of each row of an Excel file's first sheet."""
    try:
        from python_calamine import CalamineWorkbook
    except ImportError as error:
        raise ImportError(
            f"Reading {name!r} needs python-calamine: install it with `pip install python-calamine`."
        ) from error
    return CalamineWorkbook.from_filelike(io.BytesIO(content)).get_sheet_by_index(0).to_python()


def _is_heading(row: Sequence[str | float]) -> bool:
    """Tell whether a row is empty or has a cell that is no number."""
    try:
        return not [float(cell) for cell in row]
    except (TypeError, ValueError):
        return True


def uncompress(packed: bytes) -> bytes:
    """Undo Unix ``compress``, the ``.Z`` of old archives, which the standard library does not read.

    The codes of Lempel, Ziv and Welch, of 9 bits at first and one more each time the table of strings is full, lie in
    groups of eight, lowest bits first; a change of their width, or a clearing of the table, ends a group early.

    Raises
    ------
    ValueError
        The content is not of this format, or damaged.

    References
    ----------
    Welch, T. (1984). A technique for high-performance data compression. Computer 17(6).
    https://doi.org/10.1109/MC.1984.1659158
    """
    if packed[:2] != b"\x1f\x9d" or len(packed) < 3 or not 10 <= packed[2] & 31 <= 16:
        raise ValueError("it does not start as a file of Unix compress does")
    max_width, clears = packed[2] & 31, bool(packed[2] & 128)
    first = [bytes([byte]) for byte in range(256)] + [b""] * clears
    table, width, last, strings, start = first.copy(), 9, b"", [], 3
    while start < len(packed):
        group = packed[start : start + width]
        start += width
        bits = int.from_bytes(group, "little")
        for shift in range(0, 8 * len(group) - width + 1, width):
            code = bits >> shift & (1 << width) - 1
            if clears and code == _CLEAR:
                table, width, last = first.copy(), 9, b""
                break
            if code > len(table) or (code == len(table) and not last):
                raise ValueError(f"its code {code} stands for nothing yet")
            string = table[code] if code < len(table) else last + last[:1]
            strings.append(string)
            if last and len(table) < 1 << max_width:
                table.append(last + string[:1])
            last = string
            if len(table) == 1 << width and width < max_width:
                width += 1
                break
    return b"".join(strings)
