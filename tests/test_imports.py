"""What is imported, and when."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import skksivi
from skksivi import targets
from skksivi._utils.lazy import lazy

#: All modules of which no part of the name begins with an underscore.
PUBLIC = [
    name
    for name in ("skksivi", *(module.name for module in pkgutil.walk_packages(skksivi.__path__, "skksivi.")))
    if "._" not in name
]

LAZY = pytest.mark.parametrize("package", [skksivi, targets], ids=lambda p: p.__name__)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_alone_are_listed(name):
    module = importlib.import_module(name)
    public = getattr(module, "__all__", [])
    assert [entry for entry in dir(module) if not entry.startswith("_")] == sorted(set(public) - {"__version__"})
    assert all(hasattr(module, entry) for entry in public)


@LAZY
def test_a_name_that_is_not_there_is_told(package):
    for name in ("nothing", "_nothing"):
        with pytest.raises(AttributeError, match=f"'{package.__name__}' has no attribute '{name}'"):
            getattr(package, name)


def test_a_submodule_that_is_not_listed_is_found_too(tmp_path, monkeypatch):
    (tmp_path / "package_of_one").mkdir()
    for name in ("__init__", "part", "_private"):
        (tmp_path / "package_of_one" / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module("package_of_one")
    _, _, load = lazy("package_of_one", {})
    assert not hasattr(package, "part")
    assert load("part") is package.part is sys.modules["package_of_one.part"]
    with pytest.raises(AttributeError, match="no attribute '_private'"):
        load("_private")


@LAZY
def test_a_type_checker_is_told_of_the_names_that_are_there(package):
    """The imports under `TYPE_CHECKING` name each public object once, in the module where it is."""
    body = ast.parse(Path(package.__file__).read_text("utf-8")).body
    told = {}
    for node in next(node for node in body if isinstance(node, ast.If)).body:
        for alias in node.names:
            assert alias.name not in told
            told[alias.name] = importlib.import_module(node.module)
    assert told.keys() == set(package.__all__)
    for name, module in told.items():
        assert getattr(package, name) is getattr(module, name)


def test_an_import_that_fails_within_is_no_missing_name(tmp_path, monkeypatch):
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").touch()
    (tmp_path / "broken_package" / "_part.py").write_text("import math\nmath.nothing\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("broken_package")
    _, _, load = lazy("broken_package", {"_part": ["name"]})
    with pytest.raises(ImportError, match=r"`broken_package\._part` could not be imported: module 'math' has no"):
        load("name")
    monkeypatch.delitem(sys.modules, "broken_package")


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
for name in skksivi.__all__:
    getattr(skksivi, name)
assert not loaded("matplotlib", "jax", "pymc", "arviz_base", "ot")
"""


THREADS = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
import skksivi
names = ["baselines", "diagnose", "KSIVIRegressor", "plotting", "model_selection", "save", "modes", "to_arviz"]
together = Barrier(len(names))
def touch(name):
    together.wait()
    return getattr(skksivi, name)
with ThreadPoolExecutor(len(names)) as pool:
    assert None not in list(pool.map(touch, names))
"""


@pytest.mark.slow
def test_threads_may_be_the_first_to_use_a_name():
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


WITHOUT_CALLBACKS = """
import sys
import sklearn.linear_model, sklearn.model_selection
sys.modules["sklearn.callback"] = None  # as before scikit-learn 1.9
import skksivi
q = skksivi.baselines.Laplace().fit(lambda x: -x, n_features=1)
skksivi.KSIVIApproximator(whiten="laplace", max_iter=101, verbose=2, random_state=0).fit(lambda x: -x, n_features=1)
q.set_callbacks(skksivi.callbacks.EarlyStopping())
"""


def test_fits_do_without_the_callbacks_of_scikit_learn():
    done = subprocess.run([sys.executable, "-c", WITHOUT_CALLBACKS], capture_output=True, text=True, check=False)
    assert "iteration 101 of 101" in done.stderr
    assert "ImportError: `set_callbacks` needs scikit-learn 1.9" in done.stderr


@pytest.mark.slow
def test_what_is_not_used_is_not_imported():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
