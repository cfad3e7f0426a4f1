"""When the rows of each study were made, and by which commit: `python benchmarks/ages.py [--manual doc]`.

Rows carry the commit of the code that made them. Those of before 28 November 2026 have the commit that recorded them
instead, which may be some hours younger than the code. `git diff --stat COMMIT -- skksivi` shows what has changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from _harness import command, rst, show_tables

HERE = Path(__file__).parent
#: The studies of the pages that compare.
QUOTED = {
    "comparison": ["frontier", "defaults", "shapes", "training", "comparison"],
    "suites": ["suites", "toys"],
}
#: Of these the studies that have rows without the commit that made them, and why they are not made again.
OLDER = {
    "frontier": "two hours, most of them rivals', which do not change; `defaults` has the newer default fits",
    "shapes": "some fits take a million calls",
    "training": "two and a half hours",
    "comparison": "most rows are other methods', trained as before",
    "suites": "most rows are other methods'; the page says what newer versions do",
    "toys": "most rows are other methods', and KSIVI in the paper's settings",
}


def documents() -> dict[str, dict[str, Any]]:
    """Return the results by the name of the study."""
    paths = [*sorted(HERE.glob("*.json")), *sorted(HERE.glob("paper/results/*.json"))]
    return {str(path.relative_to(HERE).with_suffix("")): json.loads(path.read_text("utf-8")) for path in paths}


def versions(document: dict[str, Any], *, ours: bool = False) -> list[dict[str, str]]:
    """Return the versions that made each row, or each row of KSIVI where there are others."""
    rows = document["rows"]
    own = [row for row in rows if "ksivi" in str(row.get("method")).lower()]
    return [row.get("versions", document.get("versions")) for row in (own if ours and own else rows)]


def oldest(made: list[dict[str, str]]) -> str:
    """Return the date and the commit of the oldest of some rows."""
    first = min(made, key=lambda some: some["date"])
    return f"{first['date']}, {first.get('commit') or first['recorded']}"


def line(name: str, document: dict[str, Any]) -> tuple[str, ...]:
    made = versions(document)
    newest = max(some["date"] for some in made)
    return name, str(len(made)), oldest(made), newest, oldest(versions(document, ours=True))


def tables() -> dict[str, str]:
    """Return the table of all studies, and those of the pages that compare."""
    found = documents()
    pages = {"ages": list(found), **{f"ages_{page}": names for page, names in QUOTED.items()}}
    heads = ("Study", "Rows", "Oldest row", "Newest row", "Oldest row of KSIVI")
    return {page: rst(heads, [line(name, found[name]) for name in names]) for page, names in pages.items()}


if __name__ == "__main__":
    show_tables(command(__doc__).parse_args(), tables())
