"""What the docstrings of public names hold, as the pages of the manual show them."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
from numpydoc.docscrape import ClassDoc, FunctionDoc

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
every_name = pytest.mark.parametrize(("module", "name"), NAMES, ids=".".join)


def parsed(module, name):
    found = getattr(importlib.import_module(module), name)
    return ClassDoc(found, config={"show_class_members": False}) if inspect.isclass(found) else FunctionDoc(found)


def exists(name, module):
    """Tell whether this is a full name, or one of the module."""
    if name.startswith("skksivi."):
        module, name = name.rsplit(".", 1)
    return (module, name) in NAMES


def test_the_page_has_every_display_and_metric():
    for module in ("skksivi.plotting", "skksivi.metrics", "skksivi.baselines"):
        assert {(module, name) for name in importlib.import_module(module).__all__} <= set(NAMES)


@every_name
def test_every_public_name_says_what_else_to_see(module, name):
    entries = [entry for entry, _ in (pair for group, _ in parsed(module, name)["See Also"] for pair in group)]
    assert entries
    assert all(exists(entry, module) for entry in entries), entries
    assert name not in entries
    assert len(set(entries)) == len(entries)


@pytest.mark.parametrize("cls", [KSIVIApproximator, HKSIVIApproximator])
def test_the_estimators_describe_each_parameter_by_itself(cls):
    described = {p.name: p for p in parsed("skksivi", cls.__name__)["Parameters"]}
    assert set(described) == set(cls().get_params(deep=False))
    for parameter in described.values():
        assert "default=" in parameter.type or parameter.name == "n_layers"
        assert not re.match(r"See `\w+`\.?$", " ".join(parameter.desc)), parameter.name
