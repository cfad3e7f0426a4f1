"""Data sets from their original files and from small ones, what is refused, splits, and the waveform data."""

import hashlib
import inspect
import io
import math
import os
import re
import shutil
import sys
import threading
import zipfile
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from members import every, refused
from sklearn.model_selection import train_test_split

from skksivi import datasets
from skksivi.datasets import _base, _uci, fetch_boston, fetch_waveform, load_waveform, make_waveform
from skksivi.datasets._base import Recipe, load_descr
from skksivi.targets import BayesianLogisticRegression

UCI = Path(__file__).parents[3] / "shared" / "data" / "uci"
FETCHERS = {name: getattr(datasets, f"fetch_{name}") for name in (*_uci.RECIPES, "waveform")}
#: For each data set, the original file at hand, and the shape that the paper works with.
ORIGINALS = {
    "boston": ("housing.data", (506, 13)),
    "concrete": ("Concrete_Data.xls", (1030, 8)),
    "power": ("ccpp_sheet1.csv", (9568, 4)),
    "wine_red": ("winequality-red.csv", (1599, 11)),
    "yacht": ("yacht_hydrodynamics.data", (308, 6)),
    "protein": ("CASP.csv", (45730, 9)),
    "waveform": ("waveform.data", (5000, 21)),
}


def put_original(name, home):
    """Put an original file where a fetcher finds it; return its path."""
    path = UCI / ORIGINALS[name][0]
    if not path.exists():
        pytest.skip(f"there is no ../shared/data/uci/{path.name}, the original file, beside the repository")
    return shutil.copy(path, home)


def recipe_of(name):
    return _uci.WAVEFORM if name == "waveform" else _uci.RECIPES[name]


def compress(content):
    """Pack bytes as Unix ``compress`` may: codes of nine bits for single bytes, cleared before they would grow."""
    packed = bytearray(b"\x1f\x9d\x90")
    for start in range(0, len(content), 247):
        codes = [*content[start : start + 247], 256]
        packed += sum(code << 9 * i for i, code in enumerate(codes)).to_bytes(-(-9 * len(codes) // 8), "little")
    return bytes(packed)


def archive(**files):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in files.items():
            file.writestr(name, content)
    return packed.getvalue()


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        self.server.asked.append(self.path)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serves the files of `folder`, and lists what it was asked for."""
    monkeypatch.setenv("no_proxy", "*")
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as server:
        server.folder, server.asked, server.url = folder, [], f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield server
        server.shutdown()


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


# The original files


def test_the_target_of_an_original_is_the_column_that_the_source_names(home):
    """Of the protein data the first, of the others the last."""
    for name, (_, shape) in ORIGINALS.items():
        path = put_original(name, home)
        bunch = FETCHERS[name](data_home=home, as_frame=name != "waveform")
        assert bunch.data.shape == shape == (len(bunch.target), len(bunch.feature_names))
        if name == "concrete":  # an Excel file
            continue
        lines = [line for line in Path(path).read_text("utf-8-sig").replace('"', "").splitlines() if line.strip()]
        row = np.array(lines[-1].replace(",", " ").replace(";", " ").split(), dtype=float)
        X, y = np.asarray(bunch.data), np.asarray(bunch.target)
        whole = np.insert(X[-1], 0 if name == "protein" else shape[1], y[-1])
        np.testing.assert_array_equal(whole, row)
        if name in ("protein", "power", "wine_red"):  # these have a heading
            heading = lines[0].replace(";", ",").split(",")
            assert sorted([*bunch.feature_names, *bunch.target_names]) == sorted(heading)


def test_the_waveform_split_is_the_benchmarks(home):
    """Standardised columns, class 1 against the rest, 400 and 4,600 rows that make up the whole."""
    put_original("waveform", home)
    X, y = fetch_waveform(data_home=home, return_X_y=True)
    assert set(y) == {0, 1, 2}
    assert np.issubdtype(y.dtype, np.integer)
    train, test = (fetch_waveform(data_home=home, subset=subset) for subset in ("train", "test"))
    assert (train.data.shape, test.data.shape) == ((400, 21), (4600, 21))
    assert len(train.target_names) == 2
    Z = np.concatenate([train.data, test.data])
    np.testing.assert_allclose(Z.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(Z.std(0, ddof=1), 1)
    rows = np.loadtxt(UCI.parent / "waveform_train_rows.txt", dtype=int)
    np.testing.assert_array_equal(train.target, y[rows] != 1)
    np.testing.assert_allclose(train.data, (X[rows] - X.mean(0)) / X.std(0, ddof=1), atol=1e-12)
    np.testing.assert_array_equal(np.delete(y, rows) != 1, test.target)


# A small data set instead of Boston's: what follows needs no original


TABLE = np.random.RandomState(0).normal(size=(20, 4)).round(3)
TEXT = "a,b,c,y\n" + "\n".join(",".join(map(str, row)) for row in TABLE)


@pytest.fixture
def small(server, monkeypatch):
    """A recipe of 20 rows with two addresses, of which the first is not there, under the name of Boston's."""
    (server.folder / "small.csv").write_text(TEXT)
    names = {"name": "boston", "feature_names": ("a", "b", "c"), "target": "y"}
    urls, files = (f"{server.url}/gone.zip", f"{server.url}/small.csv"), ("table.csv", "table.xls")
    sha256 = hashlib.sha256(TABLE.astype("<f8").tobytes()).hexdigest()
    recipe = Recipe(**names, urls=urls, files=files, sha256=sha256, n_samples=20)
    monkeypatch.setitem(_uci.RECIPES, "boston", recipe)


def fetch_small(home, **options):
    X, y = fetch_boston(data_home=home, return_X_y=True, **({"n_retries": 0, "delay": 0} | options))
    np.testing.assert_array_equal(np.column_stack([X, y]), TABLE)


def test_the_second_address_helps_and_the_default_folder_is_scikit_learns(small, home, monkeypatch):
    monkeypatch.setenv("SCIKIT_LEARN_DATA", str(home))
    fetch_small(None)
    assert os.listdir(home) == ["small.csv"]


@pytest.mark.parametrize("served", [None, TEXT.replace("1", "2"), TEXT[:-9], "<html>"])
def test_a_download_that_fails_says_which_file_to_put_where(served, small, server, home):
    (server.folder / "small.csv").unlink()
    if served is not None:
        (server.folder / "small.csv").write_text(served)
    with pytest.raises(OSError, match="could not be downloaded") as caught:
        fetch_small(home)
    for part in (f"{server.url}/gone.zip: ", "'table.csv'", "'small.csv'", repr(str(home)), "`data_home`"):
        assert part in str(caught.value)
    assert os.listdir(home) == []


def test_without_permission_nothing_is_downloaded(small, server, home):
    with pytest.raises(OSError, match=r"`download_if_missing` is False. Put 'table.csv' or .* as `data_home`"):
        fetch_small(home, download_if_missing=False)
    assert not server.asked


#: The table in every layout of text, packed, and in a folder of an archive among other files.
LAYOUTS = {
    "table.csv": TEXT.encode(),
    "small.csv": ("\ufeff" + TEXT.replace("\n", "\r\n").replace(",", ";") + "\r\n").encode(),
    "gone.zip": archive(**{"a/Readme.txt": "1 2", "a/table.csv": TEXT.replace(",", "  ").replace("\n", "\n\n")}),
    "table.csv.Z": compress(b"Of 1978,\n\nthen 1 2 3:\n" + "\n ".join(map(str, TABLE.ravel())).encode()),
}


@every("name", list(LAYOUTS))
def test_a_file_put_there_by_hand_is_enough_and_is_read_up_to_the_limit(name, small, server, home, monkeypatch):
    recipe = recipe_of("boston")
    monkeypatch.setitem(_uci.RECIPES, "boston", replace(recipe, files=(*recipe.files, "table.csv.Z")))
    (home / name).write_bytes(LAYOUTS[name])
    fetch_small(home)
    assert not server.asked
    with monkeypatch.context() as patch:
        patch.setattr(_base, "MAX_BYTES", len(TEXT) // 2)
        refused(ValueError, "it has more than", fetch_small, home)
    (home / name).unlink()


@every("name", ["table.csv", "gone.zip", "table.xls"])
@every("content", [b"", TEXT[:-9].encode(), archive(other=b"1")])
def test_a_wrong_file_put_there_by_hand_is_named_and_kept(name, content, small, home):
    (home / name).write_bytes(content)
    refused(ValueError, rf"{name}' does not hold the boston data: .*\. Remove it", fetch_small, home)
    (home / name).unlink()


@pytest.mark.parametrize("case", ["a file", "below a file", "a link to nowhere", "a long name"])
def test_a_folder_that_cannot_be_used_is_told_by_name(case, small, tmp_path):
    folder = tmp_path / ("x" * 300 if "long" in case else "x")
    folder.symlink_to(tmp_path / "nowhere") if "link" in case else "long" in case or folder.write_text("")
    with pytest.raises(ValueError, match=r"`data_home` is .*which cannot be used: "):
        fetch_small(folder / "y" if "below" in case else folder)


def test_a_bunch_has_what_scikit_learns_have_and_frames_the_names(small, home):
    bunch = fetch_boston(data_home=home, n_retries=0)
    assert set(bunch) == {"data", "target", "frame", "feature_names", "target_names", "DESCR", "data_filename"}
    assert (bunch.feature_names, bunch.target_names, bunch.frame) == (["a", "b", "c"], ["y"], None)
    pd = pytest.importorskip("pandas")
    bunch = fetch_boston(data_home=home, as_frame=True)
    X, y = fetch_boston(data_home=home, as_frame=True, return_X_y=True)
    pd.testing.assert_frame_equal(bunch.frame, pd.DataFrame(TABLE, columns=["a", "b", "c", "y"]))
    pd.testing.assert_frame_equal(bunch.data, X)
    pd.testing.assert_series_equal(bunch.target, y)
    assert y.name == "y"


def test_a_library_that_is_missing_is_named_with_the_remedy(small, server, home, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"`as_frame=True` needs pandas: .*pip install"):
        fetch_boston(data_home=home, as_frame=True)
    assert not server.asked
    monkeypatch.setitem(sys.modules, "python_calamine", None)
    (home / "table.xls").touch()
    refused(ImportError, r"needs python-calamine: .*pip install", fetch_small, home)


# The list of recipes


@every("name", list(FETCHERS))
def test_a_recipe_is_whole(name):
    recipe, (original_name, (n, d)) = recipe_of(name), ORIGINALS[name]
    assert recipe.shape == (n, d + 1)
    assert original_name in recipe.originals
    assert all(url.startswith(("https://archive.ics.uci.edu/", "http://lib.stat.cmu.edu/")) for url in recipe.urls)
    for part in (f":Number of Instances: {n}", "**Source:**", "**Licence:**", "**Not checked:**"):
        assert part in load_descr(recipe.name)


# Splits


def test_the_first_split_is_the_papers():
    X = np.arange(506.0)[:, None] ** 2
    for (train, test), seed in zip(datasets.uci_splits("boston", 3), (42, 43, 44), strict=True):
        X_train, X_test = train_test_split(X, test_size=0.1, random_state=seed)
        np.testing.assert_array_equal(X[train], X_train)
        np.testing.assert_array_equal(X[test], X_test)


NO_INTEGERS = [True, 1.5, math.nan, "3", None, -1]
NO_SECONDS = [True, math.nan, math.inf, 10**400, -1.0, "1"]
NO_TRUTH = [0, "yes", None, np.ones(2)]
NO_NAMES = ["iris", 3, None, np.array(["train", "test"])]
NO_FOLDERS = [3, True, b"folder", "nul\0byte"]

#: Bad values by the type of the default, or by the name of an argument.
BAD = {int: NO_INTEGERS, float: NO_SECONDS, bool: NO_TRUTH}
BAD |= {"name": NO_NAMES, "subset": NO_NAMES, "data_home": NO_FOLDERS}

CASES = {
    f"{function}({argument}={bad!r})": (function, argument, bad)
    for function in datasets.__all__
    for argument, parameter in inspect.signature(getattr(datasets, function)).parameters.items()
    if argument != "random_state"
    for bad in BAD.get(argument) or BAD[type(parameter.default)]
}


@every("function, argument, bad", CASES)
def test_a_bad_argument_is_refused_by_name(function, argument, bad, tmp_path):
    function = getattr(datasets, function)
    given = {"name": "yacht", "download_if_missing": False, "data_home": tmp_path, argument: bad}
    arguments = {name: given[name] for name in inspect.signature(function).parameters if name in given}
    refused((TypeError, ValueError), rf"\b{re.escape(argument)}\b", lambda: function(**arguments))
    assert not list(tmp_path.iterdir())


def test_class_moments_are_those_of_the_mixture():
    """E x = (h_a + h_b) / 2 and Var x = 1 + (h_a - h_b)^2 / 12."""
    X, y = make_waveform(60_000, random_state=0)
    j = np.arange(1, 22)
    h = [np.maximum(6 - np.abs(j - peak), 0) for peak in (11, 15, 7)]
    for k, (a, b) in enumerate([(1, 2), (0, 2), (0, 1)]):
        of_class, expected = X[y == k], 1 + (h[a] - h[b]) ** 2 / 12
        n = len(of_class)
        assert np.abs((of_class.mean(0) - (h[a] + h[b]) / 2) / np.sqrt(expected / n)).max() < 4
        assert np.abs((of_class.var(0) - expected) / (expected * np.sqrt(2 / n))).max() < 4


def test_the_benchmark_set_is_the_papers():
    bunch, (X, y) = load_waveform(), load_waveform(return_X_y=True)
    np.testing.assert_array_equal(np.column_stack([bunch.data, bunch.target]), np.column_stack([X, y]))
    assert X.shape == (400, len(bunch.feature_names)) == (400, 21)
    assert set(y) == {0, 1}
    assert np.mean(y) == pytest.approx(2 / 3, abs=4 * np.sqrt(2 / 9 / 400))
    assert np.abs(X.mean(0)).max() < 4 / np.sqrt(400)
    assert "Breiman" in bunch.DESCR


def test_the_reference_draws_belong_to_the_posterior():
    """Stein identity E[s] = 0 within 4.5 standard errors for the 22 coefficients."""
    draws = datasets.load_waveform_posterior()
    assert draws.shape == (2000, 22)
    target = BayesianLogisticRegression(*load_waveform(return_X_y=True), fit_intercept=True)
    s = target.score_fn(torch.as_tensor(draws).double())
    assert (s.mean(0) / s.std(0) * len(s) ** 0.5).abs().max() < 4.5
