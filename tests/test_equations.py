"""Every name on the page from the paper to the code exists."""

import importlib
import re
from pathlib import Path

import pytest

from skksivi import baselines

PAGE = (Path(__file__).parents[1] / "doc" / "equations.rst").read_text("utf-8")
PRIVATE = {f"skksivi.{name}" for name in re.findall(r":source:`([\w.]+)`", PAGE)}
PUBLIC = set(re.findall(r":(?:class|func):`~?(skksivi[\w.]+)`", PAGE))


@pytest.mark.parametrize("name", sorted(PRIVATE | PUBLIC))
def test_the_name_exists(name):
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        break
    for part in parts[n:]:
        found = getattr(found, part)


def test_the_page_has_every_baseline():
    assert {f"skksivi.baselines.{name}" for name in baselines.__all__} <= PUBLIC


def test_the_page_names_much_of_the_package():
    assert len(PRIVATE) > 15
    assert len(PUBLIC) > 10
