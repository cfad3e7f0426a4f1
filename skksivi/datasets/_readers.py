"""The numbers of a file: text or Excel, alone, in a zip archive or packed by Unix ``compress``."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from itertools import dropwhile
from pathlib import PurePosixPath
from typing import Any

import numpy as np

#: What `Unix compress` writes for "forget all strings but the single bytes".
_CLEAR = 256

#: Bytes of a file, packed or not, at most: ten times the largest there is.
MAX_BYTES = 2**25

#: What a process that reads an Excel file may take: bytes of memory, and seconds.
SHEET_MEMORY, SHEET_SECONDS = 2**30, 60

#: Prints the cells of the first sheet. A file of a few kilobytes may claim cells for terabytes, at which the library
#: ends the process.
_PRINT_SHEET = """
import io, json, sys
memory, max_bytes = map(int, sys.argv[1:])
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
except (ImportError, OSError, ValueError):  # as on Windows
    pass
from python_calamine import CalamineWorkbook
rows = CalamineWorkbook.from_filelike(io.BytesIO(sys.stdin.buffer.read())).get_sheet_by_index(0).to_python()
text = json.dumps(rows, default=str)
sys.exit("its first sheet is too large") if len(text) > max_bytes else print(text)
"""


def read_numbers(name: str, content: bytes, members: Sequence[str], max_bytes: int = MAX_BYTES) -> np.ndarray:
    """Return the numbers of a file row by row, without what stands above the first row of numbers.

    Parameters
    ----------
    name : str
        Its suffix tells the format: `.zip`, `.Z`, `.xls`, `.xlsx`, anything else is text whose numbers are separated
        by blanks, commas or semicolons.
    content : bytes
    members : sequence of str
        Names of the files of which one is looked for in an archive, in whatever folder.
    max_bytes : int, default=MAX_BYTES
        Bytes of the file, and of what is unpacked of it, at most.

    Returns
    -------
    numbers : ndarray of shape (n,)
        float64.

    Raises
    ------
    ImportError
        An Excel file, and python-calamine is not installed.
    Exception
        Of any kind, where the content is not of the format or too large.
    """
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    path = PurePosixPath(name)
    if path.suffix == ".zip":
        return read_numbers(*_member(content, members, max_bytes), members, max_bytes)
    if path.suffix == ".Z":
        return read_numbers(path.stem, uncompress(content, max_bytes), members, max_bytes)
    rows = _sheet(name, content, max_bytes) if path.suffix in (".xls", ".xlsx") else _lines(content)
    return np.array([float(cell) for row in dropwhile(_is_heading, rows) for cell in row])


def _member(content: bytes, members: Sequence[str], max_bytes: int) -> tuple[str, bytes]:
    """Return name and content of the first of `members` in a zip archive."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        found = {PurePosixPath(member.filename).name: member for member in archive.infolist()}
        for name in members:
            if name in found:
                if found[name].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ValueError("it is packed by another method than deflate")  # the others unpack without bound
                with archive.open(found[name]) as file:
                    return name, file.read(max_bytes + 1)
    raise ValueError(f"none of its files {sorted(found)} is one of {list(members)}")


def _lines(content: bytes) -> Iterable[Sequence[str]]:
    """Return the cells of each line of a text."""
    return (re.findall(r"[^\s,;]+", line) for line in content.decode("utf-8-sig").splitlines())


def _sheet(name: str, content: bytes, max_bytes: int) -> Iterable[Sequence[Any]]:
    """Return the cells of each row of an Excel file's first sheet, read in a process of its own."""
    try:
        import python_calamine  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"Reading {name!r} needs python-calamine: install it with `pip install python-calamine`."
        ) from error
    done = subprocess.run(  # noqa: S603  # of nothing but what is above
        [sys.executable, "-c", _PRINT_SHEET, str(SHEET_MEMORY), str(max_bytes)],
        input=content,
        capture_output=True,
        timeout=SHEET_SECONDS,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines()
        reason = lines[-1] if done.returncode == 1 and lines else "its reader failed"
        raise ValueError(f"it cannot be read as an Excel file: {reason}")
    return json.loads(done.stdout)


def _is_heading(row: Sequence[str | float]) -> bool:
    """Tell whether a row is empty or has a cell that is no number."""
    try:
        return not [float(cell) for cell in row]
    except (TypeError, ValueError):
        return True


def uncompress(packed: bytes, max_bytes: int = MAX_BYTES) -> bytes:
    """Undo Unix ``compress``, the ``.Z`` of old archives, which the standard library does not read.

    The codes of Lempel, Ziv and Welch, of 9 bits at first and one more each time the table of strings is full, lie in
    groups of eight, lowest bits first; a change of their width, or a clearing of the table, ends a group early.

    Raises
    ------
    ValueError
        The content is not of this format, damaged, or of more bytes than allowed.

    References
    ----------
    Welch, T. (1984). A technique for high-performance data compression. Computer 17(6).
    https://doi.org/10.1109/MC.1984.1659158
    """
    if packed[:2] != b"\x1f\x9d" or len(packed) < 3 or not 10 <= packed[2] & 31 <= 16:
        raise ValueError("it does not start as a file of Unix compress does")
    max_width, clears = packed[2] & 31, bool(packed[2] & 128)
    first = [bytes([byte]) for byte in range(256)] + [b""] * clears
    table, width, last, strings, size, start = first.copy(), 9, b"", [], 0, 3
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
                raise ValueError(f"its code {code} is undefined")
            string = table[code] if code < len(table) else last + last[:1]
            strings.append(string)
            size += len(string)
            if size > max_bytes:
                raise ValueError(f"it has more than {max_bytes:,} bytes")
            if last and len(table) < 1 << max_width:
                table.append(last + string[:1])
            last = string
            if len(table) == 1 << width and width < max_width:
                width += 1
                break
    return b"".join(strings)
