"""What to write instead of words that readers stumbled over: `python .ci/words.py` lists the lines that have one.
It reads the pages, the examples' texts and comments, and docstrings of public names, without code.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = {
    r"(that|those) of(?! (a kind|interest))\b|(?<!most\s)(?<!some\s)\bof which\b": "name the noun; two sentences",
    r"\b(climb\w*|ascents?|settled?|settling)\b": "mode search; converged, of chains only; stable",
    r"\b(graded|grading|judg(ed|ing|e?ments?))\b": "score (goodness of fit); compare, check, verdict",
    r"\b(weighed|masses of modes|stray|astray)\b": "importance resampling; mode weights; outlier",
    r"\b(mend(s|ed|ing)?|dear(er|est)?|strangers?|for ever|anew|smeared|at hand|in place of)\b": "say it plainly",
    r"\b(can|cannot) be had\b|\b(is|are) (no|but) (function|model|positive|table|target)s?\b": "is available; is not",
    r"\b(goes|going|went|go) on (from|where|at|with|after)\b|\b(runs?|ran) (away|off)\b": "resumes; diverges",
    r"\b(tells? nothing|nothing tells|is told of|are told|let pass)\b": "reports; allowed",
    r"\b(scores?|draws?|calls?|seconds|ms|steps) an? (iteration|row|draw|layer|feature|fit|mode|step)\b": "per",
    r"\b(kernel|statistic|discrepancy|check|loss|KSD|chain|fit)s? (sees?|knows?|minds?)\b": "responds to, measures",
}
PATTERNS = [(re.compile(words.replace(" ", r"\s+"), re.IGNORECASE), remedy) for words, remedy in WORDS.items()]
CODE = re.compile(  # literals, roles, addresses, sessions of Python, and blocks below two colons or a language
    r"``.*?``|:[\w:]+:`[^`]*`|`[^`]*`|https?://\S+|^ *>>> .*?(?=^\s*$|\Z)"
    r"|(?:::|^ *\.\. code-block:: \w+)\n\s*\n(?P<indent> +)\S.*?(?=^(?!(?P=indent)|\s*$)|\Z)",
    re.DOTALL | re.MULTILINE,
)
PUBLIC = {*re.findall(r"(?m)^    (\w+)$", (ROOT / "doc/api.rst").read_text("utf-8")), "BaseApproximator"}


def docstrings(path, names=None):
    """Yield the line before and the text of each docstring of a file, or of those names in it."""
    tree = ast.parse(path.read_text("utf-8"))
    for top in [tree] if names is None else [node for node in tree.body if getattr(node, "name", "") in names]:
        for node in ast.walk(top):
            has_one = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
            if has_one and not getattr(node, "name", "").startswith("_"):
                yield node.body[0].lineno - 1, ast.get_docstring(node, clean=False)


def found():
    """List the lines with one of the words, each with the remedy."""
    folders = (ROOT, ROOT / "doc", ROOT / "doc/guide", ROOT / "examples")
    rst = [(path, [(0, path.read_text("utf-8"))]) for folder in folders for path in folder.glob("*.rst")]
    examples = list((ROOT / "examples").rglob("*.py"))
    comments = [(path, [(0, re.sub(r"(?m)^(?!\s*#).*$", "", path.read_text("utf-8")))]) for path in examples]
    code = [(path, docstrings(path, PUBLIC)) for path in (ROOT / "skksivi").rglob("*.py")]
    for path, texts in [*rst, *comments, *((path, docstrings(path)) for path in examples), *code]:
        for before, text in texts:
            blank = CODE.sub(lambda code: re.sub(r"\S", " ", code.group()), text)
            for match, remedy in ((match, remedy) for words, remedy in PATTERNS for match in words.finditer(blank)):
                number = before + 1 + blank.count("\n", 0, match.start())
                yield f"{path.relative_to(ROOT)}:{number}: {' '.join(match.group().split())!r}: {remedy}"


if __name__ == "__main__":
    lines = sorted(found())
    print(*lines, f"{len(lines)} places to write otherwise" if lines else "The words are fine.", sep="\n")
    sys.exit(bool(lines))
