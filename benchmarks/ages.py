"""When the rows of each study were made, and by which commit: `python benchmarks/ages.py [--manual doc]`.

Rows carry the commit of the code that made them. Those of before 28 November 2026 have the commit that recorded them
instead, which may be some hours younger than the code. `git diff --stat COMMIT -- skksivi` shows what has changed. A
test fails where files of a fit have changed since our rows of a quoted study were made, or since the later commit to
which fits are `UNMOVED`: the study is to be run again, or the fits to be compared, or its age to be explained.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from _harness import command, rst, show_tables

HERE = Path(__file__).parent
#: The studies of the pages that compare.
QUOTED = {
    "comparison": ["frontier", "defaults", "shapes", "training", "comparison"],
    "suites": ["suites", "toys"],
}
#: Those whose rows of ours are of older code, and why.
OLDER = {
    "frontier": "an hour: those always trained, whose trainings have not changed since",
    "comparison": "twenty minutes, of the day of the last change",
    "suites": "half an hour: the slow ones, and some of the day of the last change",
    "toys": "ten minutes, of the day of the last change",
    "shapes": "half an hour: the slow ones, and some of the day of the last change",
    "training": "two and a half hours, of trainings that have not changed since",
}
#: The parts of the package that decide what a default fit is.
FIT = ("coordinates", "estimators", "families", "judge.py", "pilot", "score", "start", "training")
#: Commits after which no default fit has moved until a later one.
UNMOVED = {"05968660": "7218844c"}


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
    return f"{first['date'][:10]}, {first.get('commit') or first['recorded']}"


def changed(commit: str) -> set[str]:
    """Return the files of a fit that have changed since a commit; raise CalledProcessError if it is not known."""
    paths, commit = [f"skksivi/{part}" for part in FIT], commit.removesuffix("-dirty")
    git = ["git", "-C", str(HERE.parent), "diff", "--name-only", UNMOVED.get(commit, commit), "--", *paths]
    return set(subprocess.run(git, capture_output=True, text=True, check=True).stdout.split())


def line(name: str, document: dict[str, Any]) -> tuple[str, ...]:
    made = versions(document)
    newest = max(some["date"] for some in made)
    return name, str(len(made)), oldest(made), newest[:10], oldest(versions(document, ours=True))


def tables() -> dict[str, str]:
    """Return the table of all studies, and those of the pages that compare."""
    found = documents()
    pages = {"ages": list(found), **{f"ages_{page}": names for page, names in QUOTED.items()}}
    heads = ("Study", "Rows", "Oldest row", "Newest row", "Oldest row of KSIVI")
    return {page: rst(heads, [line(name, found[name]) for name in names]) for page, names in pages.items()}


if __name__ == "__main__":
    show_tables(command(__doc__).parse_args(), tables())
