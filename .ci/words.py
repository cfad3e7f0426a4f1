"""The manual's English: patterns that readers stumbled over, each with what to write instead.

`python .ci/words.py` reads the pages, README, CHANGELOG, CONTRIBUTING, the texts and comments of the examples, and
docstrings of public names, and lists the lines that have one of them. Code and its output are left out.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: A pattern, without regard to case, and the remedy.
WORDS = {
    r"(?:that|those) of(?! (?:a kind|interest))\b": "name the noun again, or use the possessive",
    r"(?<!most\s)(?<!some\s)\bof which\b": "make two sentences",
    r"\bin (?:the )?place of\b": "instead of",
    r"(?-i:\bAs of\b)": "See X, or: Same as in X",
    r"\bdear(?:er|est)?\b": "expensive",
    r"\bmend(?:s|ed|ing)?\b": "correct, repair",
    r"\bstray\b|\bastray\b": "outlying, an outlier",
    r"\bgrades?\b|\bgraded\b|\bgrading\b": "score (goodness of fit)",
    r"\bjudge[sd]?\b|\bjudging\b": "evaluate, compare, check",
    r"\bclimb(?:s|ed|ing)?\b": "mode search, optimise",
    r"\bsettled?\b|\bsettling\b": "converged",
    r"\bverbs?\b": "methods",
    r"\bhangs? together\b": "are correlated",
    r"\bof strangers\b|\bstranger's\b": "untrusted",
    r"\b(?:scores?|draws?|calls?|points|row|one|nats|products?|seconds|milliseconds|ms|numbers|steps|evaluations) "
    r"an? (?:iteration|row|column|coordinate|draw|layer|feature|fit|mode|pass|score|step|transition)\b": (
        "per iteration, per row, ..."
    ),
    r"\bhas but\b|\bbut few\b": "only",
    r"\bmind(?:s)? outliers\b|\blooks? out for\b": "is robust to, checks",
    r"\b(?:kernels?|statistics?|discrepanc(?:y|ies)|checks?|loss|KSD|scores?) (?:sees?|knows?|minds?)\b": (
        "responds to, is sensitive to, measures"
    ),
    r"\bfor the whole to\b|\bat its word\b|\bfor ever\b|\bthe like\b": "say it plainly",
    r"\btells? nothing\b|\bnothing tells\b": "there is no warning, is uninformative",
    r"\bsome (?:number|map) of\b|\bsome map\b": "an arbitrary map",
    r"\bwho does not\b|\bwho compares\b": "readers who, those who; or rewrite",
    r"\bno bell\b": "not Gaussian",
    r"\ba few hundred good\b": "a few hundred accurate",
    r"\bsmeared\b": "resampled with a kernel density estimate",
    r"\bin a line\b": "In brief",
    r"\bwritten out\b": "explicit",
    r"\bthe better judge\b": "the better choice for evaluation",
    r"\bgo(?:es|ing)? on (?:from|where|at|with|after)\b|\bwent on\b": "resumes, continues",
    r"\banew\b": "again, or a verb with re-",
    r"\bwill do(?: too)?(?=[.:;,])": "works",
    r"\b(?:runs?|ran) (?:away|off)\b": "diverges",
    r"\b(?:can|cannot) be had\b|\bat hand\b": "is available",
    r"\b(?:is|are) no (?:approximator|column|coordinate|function|integer|model|positive|sequence|"
    r"square|substitute|table|target|whole)s?\b": "is not a",
    r"\bof one's own\b": "your own",
    r"\bmake a target of\b|\bmade a target\b": "make a target from, turn into a target",
    r"\bscore is asked\b|\basks? for (?:the )?scores?\b|\basked at\b": "evaluates the score",
    r"\bweighed\b": "weight, or estimate the weight",
    r"\blet pass\b|\bis told of\b|\bare told\b": "allowed; is reported",
    r"\b(?:draws?|chains?|ranks?|fits?|halves|pilot|training) sees?\b": "uses, is given, reaches",
    r"\bmakes? of it\b|\bon purpose\b": "does with it; deliberately",
}
PATTERNS = [(re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE), remedy) for pattern, remedy in WORDS.items()]
#: Classes whose methods the manual shows with what derives from them.
BASES = ("BaseApproximator", "DensityMixing", "Mixing", "ParameterObject", "Display", "Trained")
#: Literals, sessions of Python up to an empty line, and blocks below two colons or the name of a language.
CODE = re.compile(
    r"``.*?``|:[\w:]+:`[^`]*`|`[^`]*`|https?://\S+"
    r"|^ *>>> .*?(?=^\s*$|\Z)"
    r"|(?:::|^ *\.\. code-block:: \w+)\n\s*\n(?P<indent> +)\S.*?(?=^(?!(?P=indent)|\s*$)|\Z)",
    re.DOTALL | re.MULTILINE,
)


def texts() -> Iterator[tuple[Path, int, str]]:
    """Each file, the number of the line before, and a text that starts after it."""
    for path in [
        ROOT / "README.rst",
        ROOT / "CHANGELOG.rst",
        ROOT / "CONTRIBUTING.rst",
        *sorted((ROOT / "doc").glob("*.rst")),
        *sorted((ROOT / "doc/guide").glob("*.rst")),
    ]:
        yield path, 0, path.read_text("utf-8")
    for path in sorted((ROOT / "examples").rglob("*.rst")):
        yield path, 0, path.read_text("utf-8")
    for path in sorted((ROOT / "examples").rglob("*.py")):
        yield from prose(path)
    public = {*re.findall(r"^    (\w+)$", (ROOT / "doc/api.rst").read_text("utf-8"), re.MULTILINE), *BASES}
    for path in sorted((ROOT / "skksivi").rglob("*.py")):
        yield from docstrings(path, public)


def prose(path: Path) -> Iterator[tuple[Path, int, str]]:
    """The docstrings and the comments of an example."""
    yield from docstrings(path)
    for number, line in enumerate(path.read_text("utf-8").splitlines()):
        if line.lstrip().startswith("#"):
            yield path, number, line


def docstrings(path: Path, public: set[str] | None = None) -> Iterator[tuple[Path, int, str]]:
    """The docstrings of a module and its names that are not private or, if given, of the public ones alone."""
    stack: list[ast.Module | ast.ClassDef | ast.FunctionDef] = [ast.parse(path.read_text("utf-8"))]
    while stack:
        node = stack.pop()
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.ClassDef, ast.FunctionDef)) or child.name.startswith("_"):
                continue
            if public is None or isinstance(node, ast.ClassDef) or child.name in public:
                stack.append(child)
        if public is not None and isinstance(node, ast.Module) and path.name != "__init__.py":
            continue
        first = node.body[0] if node.body else None
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            yield path, first.lineno - 1, first.value.value


def found() -> list[str]:
    """The lines with one of the patterns, each with the remedy."""
    lines = []
    for path, before, text in texts():
        blank = CODE.sub(lambda code: re.sub(r"\S", " ", code.group()), text)
        for pattern, remedy in PATTERNS:
            for match in pattern.finditer(blank):
                number = before + 1 + blank.count("\n", 0, match.start())
                what = " ".join(match.group().split())
                lines.append(f"{path.relative_to(ROOT)}:{number}: {what!r}: {remedy}")
    return sorted(lines)


if __name__ == "__main__":
    lines = found()
    print(*lines, f"{len(lines)} places to write otherwise" if lines else "The words are fine.", sep="\n")
    sys.exit(bool(lines))
