"""What is imported, and when."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from members import every, refused

import skksivi
from skksivi import targets
from skksivi._utils.lazy import lazy

#: All modules of which no part of the name begins with an underscore.
PUBLIC = [
    name
    for name in ("skksivi", *(module.name for module in pkgutil.walk_packages(skksivi.__path__, "skksivi.")))
    if "._" not in name
]


@every("name", PUBLIC)
def test_public_names_alone_are_listed(name):
    module = importlib.import_module(name)
    public = getattr(module, "__all__", [])
    assert [entry for entry in dir(module) if not entry.startswith("_")] == sorted(set(public) - {"__version__"})
    assert all(hasattr(module, entry) for entry in public)


def test_a_submodule_that_is_not_listed_is_found_too_and_one_that_fails_is_no_missing_name(tmp_path, monkeypatch):
    (tmp_path / "package_of_one").mkdir()
    for name in ("__init__", "part", "_private", "_broken"):
        (tmp_path / "package_of_one" / f"{name}.py").write_text("import math\nmath.nothing" if "_b" in name else "")
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module("package_of_one")
    _, _, load = lazy("package_of_one", {"_broken": ["name"]})
    assert not hasattr(package, "part")
    assert load("part") is package.part is sys.modules["package_of_one.part"]
    refused(AttributeError, "no attribute '_private'", load, "_private")
    refused(ImportError, r"`package_of_one\._broken` could not be imported: module 'math' has no", load, "name")


@every("package", [skksivi, targets])
def test_a_type_checker_is_told_of_the_names_that_are_there_and_a_user_of_others(package):
    """The imports under `TYPE_CHECKING` name each public object once, in the module where it is."""
    for name in ("nothing", "_nothing"):
        refused(AttributeError, f"'{package.__name__}' has no attribute '{name}'", getattr, package, name)
    body = ast.parse(Path(package.__file__).read_text("utf-8")).body
    told = {}
    for node in next(node for node in body if isinstance(node, ast.If)).body:
        for alias in node.names:
            assert alias.name not in told
            told[alias.name] = importlib.import_module(node.module)
    assert told.keys() >= set(package.__all__)
    for name, module in told.items():
        assert getattr(package, name) is getattr(module, name)


SCRIPT = """
import sys
def loaded(*names):
    return [name for name in names if name in sys.modules]
import skksivi
assert not loaded("torch", "numpy", "sklearn", "matplotlib")
import skksivi.datasets
assert not loaded("torch", "sklearn.datasets", "python_calamine")
from skksivi import KSIVIApproximator
from skksivi.targets import Banana
rest = "baselines", "calibration", "diagnostics", "persistence", "plotting", "predictors"
rest += "targets._jax", "targets._pymc"
assert not loaded("matplotlib", *(f"skksivi.{name}" for name in rest))
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
names = ["baselines", "diagnose", "KSIVIRegressor", "plotting", "model_selection", "save", "modes", "to_arviz"]
together = Barrier(len(names))
def touch(name):
    together.wait()
    return getattr(skksivi, name)
with ThreadPoolExecutor(len(names)) as pool:
    assert None not in list(pool.map(touch, names))
for name in skksivi.__all__:
    getattr(skksivi, name)
assert not loaded("matplotlib", "jax", "pymc", "arviz_base", "ot")
"""


@pytest.mark.slow
def test_what_is_not_used_is_not_imported_and_threads_may_be_the_first_to_use_a_name():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
