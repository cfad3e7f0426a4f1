"""Every name on the page from the paper to the code exists."""

import re
from pathlib import Path
from pkgutil import resolve_name

from skksivi import baselines

PAGE = (Path(__file__).parents[1] / "doc" / "equations.rst").read_text("utf-8")
PRIVATE = {f"skksivi.{name}" for name in re.findall(r":source:`([\w.]+)`", PAGE)}
PUBLIC = set(re.findall(r":(?:class|func):`~?(skksivi[\w.]+)`", PAGE))


def test_every_name_exists():
    assert (len(PRIVATE) > 15, len(PUBLIC) > 10) == (True, True)
    for name in PRIVATE | PUBLIC:
        resolve_name(name)


def test_the_page_has_every_baseline():
    assert {f"skksivi.baselines.{name}" for name in baselines.__all__} <= PUBLIC
