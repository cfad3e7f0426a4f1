"""What the docstrings of public names hold, as the pages of the manual show them."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

from skksivi import HKSIVIApproximator, KSIVIApproximator

API = Path(__file__).parents[1] / "doc" / "api.rst"


def public_names():
    """Each name on the page of the API as (module, name)."""
    module = ""
    for line in API.read_text("utf-8").splitlines():
        if found := re.fullmatch(r"\.\. (?:current)?module:: (\S+)", line):
            module = found[1]
        elif found := re.fullmatch(r" {4}([A-Za-z]\w*)", line):
            yield module, found[1]


NAMES = list(public_names())


def public(module, name):
    return getattr(importlib.import_module(module), name)


def section(found, title):
    """Return the entries of a section of a numpydoc docstring: each head, and the indented text below it."""
    doc = inspect.getdoc(found)
    body = re.search(rf"^{title}\n-+\n((?:(?!^\S.*\n-+$).*\n?)*)", doc, re.MULTILINE)
    return re.findall(r"^(\S.*)\n?((?:^ .*\n?)*)", body[1], re.MULTILINE) if body else []


def exists(name, module):
    """Tell whether this is a full name, or one of the module."""
    if name.startswith("skksivi."):
        module, name = name.rsplit(".", 1)
    return (module, name) in NAMES


def test_the_page_has_every_display_and_metric():
    for module in ("skksivi.plotting", "skksivi.metrics", "skksivi.baselines"):
        assert {(module, name) for name in importlib.import_module(module).__all__} <= set(NAMES)


def test_every_public_name_says_what_else_to_see():
    for module, name in NAMES:
        entries = [head.split(" : ")[0] for head, _ in section(public(module, name), "See Also")]
        assert entries, name
        assert all(exists(entry, module) for entry in entries), entries
        assert name not in entries
        assert len(set(entries)) == len(entries)


@pytest.mark.parametrize("cls", [KSIVIApproximator, HKSIVIApproximator])
def test_the_estimators_describe_each_parameter_by_itself(cls):
    described = {head.split(" : ")[0]: (head, text) for head, text in section(cls, "Parameters")}
    assert list(described) == list(inspect.signature(cls).parameters)
    for name, (head, text) in described.items():
        assert "default=" in head, name
        assert text.strip(), name
        assert not re.fullmatch(r"\s*See `\w+`\.?\s*", text), name
