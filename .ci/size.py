"""The size of the project: `python .ci/size.py` prints it by folder, and fails above the limits of pyproject.toml.
A line of code is not blank, no comment and in no docstring. A file of tests counts for the part of the package that
it names most, a public name and a constructor's parameters where they are defined. A name that the page of the API
leaves out is no promise to users: it is at the border between parts of the package. Limits only fall: of lines their
sum, each other one by itself, compared with the limits of a day ago where git knows these.
"""

import ast
import importlib
import inspect
import io
import pkgutil
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
API = (ROOT / "doc" / "api.rst").read_text("utf-8")
MODULES, NAMES = re.findall(r"module:: (\S+)", API), re.findall(r"(?m)^    (\w+)$", API)
EMPTY = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def limits_of(text):
    """Return the limits in the text of a pyproject.toml, by part and column, and the names of the satellites."""
    found = dict(tomllib.loads(text)["tool"].get("skksivi", {}).get("size", {}))
    satellites = found.pop("of_satellites", [])
    return {(part, column): most for part, row in found.items() for column, most in row.items()}, satellites


def a_day_ago():
    """Return the limits of the newest commit that is a day old, none where git does not know it."""

    def git(*words):
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False).stdout  # noqa: S607

    commit = git("rev-list", "-1", "--before=1 day ago", "HEAD").strip()
    return limits_of(git("show", f"{commit}:pyproject.toml"))[0] if commit else {}


def risen(limits, before):
    """Return a sentence for each limit that is higher than before; those of lines count by their sum."""
    in_all = [sum(most for (_, column), most in each.items() if column == "code") for each in (limits, before)]
    pairs = [
        (f"{column} of {part}", most, before.get((part, column), most)) for (part, column), most in limits.items()
    ]
    pairs = [pair for pair in pairs if not pair[0].startswith("code ")] + [("lines in all", *in_all)] * bool(before)
    return [
        f"The limit of {what} rose from {old} to {new}: name what goes for it."
        for what, new, old in pairs
        if new > old
    ]


LIMITS, SATELLITES = limits_of((ROOT / "pyproject.toml").read_text("utf-8"))


def code_lines(path):
    """Count the lines of a file that hold code."""
    text = path.read_text("utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {line for token in tokens if token.type not in EMPTY for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            code -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(code)


def measured():
    """Return the sizes of each folder of the package, of the other folders, and of core and satellites together."""
    sizes = defaultdict(Counter)
    for path in (ROOT / "skksivi").rglob("*.py"):
        sizes[path.relative_to(ROOT / "skksivi").parts[0].removesuffix(".py")]["code"] += code_lines(path)
    for path in (ROOT / "tests").rglob("*.py"):
        named = Counter(name for name in re.findall(r"skksivi\.(\w+)", path.read_text("utf-8")) if name in sizes)
        sizes[named.most_common(1)[0][0] if named else "__init__"]["tests"] += code_lines(path)
    modules = [name for _, name, _ in pkgutil.walk_packages([str(ROOT / "skksivi")], "skksivi.") if "._" not in name]
    promised = defaultdict(bool)
    for module in map(importlib.import_module, ["skksivi", *modules]):
        for name in getattr(module, "__all__", ()):
            if str(getattr(thing := getattr(module, name), "__module__", "")).startswith("skksivi."):
                promised[thing] |= module.__name__ in MODULES and name in NAMES
    for thing, is_promised in promised.items():
        parameters = len(inspect.signature(thing).parameters) if is_promised and inspect.isclass(thing) else 0
        row = Counter(names=1, parameters=parameters) if is_promised else Counter(border=1)
        sizes[thing.__module__.split(".")[1]] += row
    for name, row in sorted(sizes.items()):
        sizes["satellites" if name in SATELLITES else "core"] += row
    for name in ("skksivi", "tests", "benchmarks"):
        sizes[name]["code"] = sum(map(code_lines, (ROOT / name).rglob("*.py")))
    return sizes


if __name__ == "__main__":
    sizes, columns = measured(), ("code", "tests", "names", "parameters", "border")
    for name, row in [("", dict(zip(columns, columns, strict=True))), *sizes.items()]:
        print(f"{name:16}" + "".join(f"{row[column]:>12}" for column in columns))
    grown = [
        f"{part} has {sizes[part][column]} {column}, {sizes[part][column] - most} more than pyproject.toml allows."
        for (part, column), most in LIMITS.items()
        if sizes[part][column] > most
    ]
    grown += risen(LIMITS, a_day_ago())
    print(*grown or ["Nothing grew."], sep="\n")
    sys.exit(bool(grown))
