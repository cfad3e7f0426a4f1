"""The fetchers: original files, a local server with faults, damaged, shared and read-only caches."""

import hashlib
import io
import os
import sys
import threading
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from sklearn.model_selection import train_test_split
from unix_compress import compress

from skksivi import datasets
from skksivi.datasets import _base, _uci, _waveform, fetch_boston, fetch_waveform, uci_splits
from skksivi.datasets._base import Recipe, load_descr
from skksivi.datasets._download import Limits
from skksivi.datasets._readers import MAX_BYTES

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


def original(name):
    path = UCI / ORIGINALS[name][0]
    if not path.exists():
        pytest.skip(f"there is no ../shared/data/uci/{path.name}, the original file, beside the repository")
    return path


def put_original(name, home):
    """Put an original file where a fetcher finds it; return its path."""
    path = original(name)
    home.mkdir(exist_ok=True)
    (home / path.name).write_bytes(path.read_bytes())
    return path


def recipe_of(name):
    return _waveform.RECIPE if name == "waveform" else _uci.RECIPES[name]


def set_recipe(monkeypatch, name, recipe):
    if name == "waveform":
        monkeypatch.setattr(_waveform, "RECIPE", recipe)
    else:
        monkeypatch.setitem(_uci.RECIPES, name, recipe)


# A server that fails on demand


class Server(ThreadingHTTPServer):
    """Serves `files`; an entry of `faults`, taken from the front, says how the next answer goes wrong."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.faults, self.asked = {}, [], []
        self.over = threading.Event()

    def url(self, name):
        return f"http://127.0.0.1:{self.server_port}/{name}"


#: Faults of a server that comes to no end: bytes that it sends at once, None for the headers; how many it sends at a
#: time after that, and seconds before each.
SLOW = {
    "stalls": (0, 2**20, 2),
    "stalls within": (None, 2**20, 2),
    "drips headers": (0, 1, 0.05),
    "drips": (None, 1, 0.05),
    "endless": (None, 2**20, 0),
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path.lstrip("/")
        self.server.asked.append(name)
        fault = self.server.faults.pop(0) if self.server.faults else None
        if isinstance(fault, int) or name not in self.server.files:
            self.send_error(fault or 404)
            return
        body = self.server.files[name]
        if fault == "drop":
            self.close_connection = True
            return
        if fault in SLOW:
            self.answer_slowly(fault, body)
            return
        self.send_response(200)
        if fault == "truncate":  # the header tells
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()  # without a length the end of the connection is the end of the body
        if fault == "corrupt":
            body = body.replace(b"1", b"2")
        self.wfile.write(body[: len(body) // 2] if fault in ("truncate", "shorten") else body)

    def answer_slowly(self, fault, body):
        """Give the right answer in the end, so that a fetcher that waits for it does not fail."""
        header = b"HTTP/1.0 200 OK\r\nServer: slow\r\n\r\n"
        whole = header + (bytes(40 * 2**20) if fault == "endless" else body)
        start, step, pause = SLOW[fault]
        start = len(header) if start is None else start
        with suppress(OSError):  # the other side has gone
            self.wfile.write(whole[:start])
            for i in range(start, len(whole), step):
                self.server.over.wait(pause)
                self.wfile.write(whole[i : i + step])

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


# The original files


@pytest.fixture(params=ORIGINALS)
def served(request, server, monkeypatch):
    """A data set whose archive is served in the way of the UCI repository."""
    name = request.param
    path, recipe = original(name), recipe_of(request.param)
    content = path.read_bytes()
    if name == "boston":
        server.files["housing.data"] = content
        urls = (server.url("housing.data"),)
    else:
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("Readme.txt", "1 2 3")
            if name == "waveform":
                archive.writestr("waveform.data.Z", compress(content))
            else:
                archive.writestr(f"folder/{path.name}", content)
        server.files["the+archive.zip"] = packed.getvalue()
        urls = (server.url("the+archive.zip"),)
    set_recipe(monkeypatch, name, replace(recipe, urls=urls))
    return name


def test_every_original_is_fetched_from_a_server(served, server, home):
    fetch, (_, shape) = FETCHERS[served], ORIGINALS[served]
    bunch = fetch(data_home=home)
    X, y = fetch(data_home=home, return_X_y=True, download_if_missing=False)
    assert len(server.asked) == 1
    assert bunch.data.shape == X.shape == shape == (len(y), len(bunch.feature_names))
    assert bunch.data.dtype == np.float64
    np.testing.assert_array_equal(bunch.data, X)
    np.testing.assert_array_equal(bunch.target, y)
    assert os.listdir(home) == [Path(bunch.data_filename).name]
    assert bunch.frame is None


def test_the_target_is_the_column_that_the_source_names(home):
    """Of the protein data the first, of the others the last."""
    for name, (_, shape) in ORIGINALS.items():
        if name == "concrete":  # an Excel file
            continue
        path = put_original(name, home)
        bunch = FETCHERS[name](data_home=home, as_frame=name != "waveform")
        lines = [line for line in path.read_text("utf-8-sig").replace('"', "").splitlines() if line.strip()]
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
    assert train.data.shape == (400, 21)
    assert test.data.shape == (4600, 21)
    assert len(train.target_names) == 2
    Z = np.concatenate([train.data, test.data])
    np.testing.assert_allclose(Z.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(Z.std(0, ddof=1), 1)
    rows = np.loadtxt(UCI.parent / "waveform_train_rows.txt", dtype=int)
    np.testing.assert_array_equal(train.target, y[rows] != 1)
    np.testing.assert_allclose(train.data, (X[rows] - X.mean(0)) / X.std(0, ddof=1), atol=1e-12)
    np.testing.assert_array_equal(np.delete(y, rows) != 1, test.target)


@pytest.mark.skipif(
    not (UCI.parent / "waveform.mat").exists(),
    reason="there is no ../shared/data/waveform.mat beside the repository",
)
def test_the_waveform_split_is_that_of_the_file_in_circulation(home):
    from scipy.io import loadmat

    put_original("waveform", home)
    X, y = fetch_waveform(data_home=home, subset="train", return_X_y=True)
    published = loadmat(UCI.parent / "waveform.mat")
    np.testing.assert_allclose(published["X_train"], np.insert(X, 0, 1, axis=1), atol=1e-6)
    np.testing.assert_array_equal(published["y_train"].ravel(), y)


# A small data set instead of Boston's: what follows needs no original


TABLE = np.random.RandomState(0).normal(size=(20, 4)).round(3)
TEXT = "a,b,c,y\n" + "\n".join(",".join(map(str, row)) for row in TABLE)


@pytest.fixture
def small(server, monkeypatch):
    """A recipe of 20 rows with one address, under the name of Boston's."""
    server.files["small.csv"] = TEXT.encode()
    recipe = Recipe(
        name="boston",
        urls=(server.url("small.csv"),),
        files=("table.csv",),
        sha256=hashlib.sha256(TABLE.astype("<f8").tobytes()).hexdigest(),
        n_samples=20,
        feature_names=("a", "b", "c"),
        target="y",
    )
    set_recipe(monkeypatch, "boston", recipe)
    return recipe


def fetch_small(home, **options):
    X, y = fetch_boston(data_home=home, return_X_y=True, **({"delay": 0} | options))
    np.testing.assert_array_equal(np.column_stack([X, y]), TABLE)
    return X


def test_a_bunch_has_what_scikit_learns_have(small, home):
    bunch = fetch_boston(data_home=home)
    assert set(bunch) == {"data", "target", "frame", "feature_names", "target_names", "DESCR", "data_filename"}
    assert bunch.feature_names == ["a", "b", "c"]
    assert bunch.target_names == ["y"]
    assert Path(bunch.data_filename) == home / "skksivi_boston.npz"
    bunch.data[0, 0] = np.nan  # the caller's own
    fetch_small(home)


def test_the_default_folder_is_scikit_learns(small, home, monkeypatch):
    monkeypatch.setenv("SCIKIT_LEARN_DATA", str(home))
    fetch_small(None)
    assert os.listdir(home) == ["skksivi_boston.npz"]


def test_frames(small, home):
    pd = pytest.importorskip("pandas")
    bunch = fetch_boston(data_home=home, as_frame=True)
    X, y = fetch_boston(data_home=home, as_frame=True, return_X_y=True)
    pd.testing.assert_frame_equal(bunch.frame, pd.DataFrame(TABLE, columns=["a", "b", "c", "y"]))
    pd.testing.assert_frame_equal(bunch.data, X)
    pd.testing.assert_series_equal(bunch.target, y)
    assert y.name == "y"


def test_without_pandas_a_frame_is_refused_before_anything_is_downloaded(small, server, home, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"`as_frame=True` needs pandas: .*pip install"):
        fetch_boston(data_home=home, as_frame=True)
    assert not server.asked


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (404, "HTTP Error 404"),
        (503, "HTTP Error 503"),
        ("drop", "closed connection"),
        ("truncate", "it ended"),
        ("shorten", "numbers, expected a table of shape"),
        ("corrupt", "sha256"),
    ],
)
def test_a_failed_download_is_named_and_tried_again(fault, reason, small, server, home):
    server.faults[:] = [fault, fault]
    with pytest.warns(UserWarning, match=reason) as warned:
        fetch_small(home, n_retries=2)
    assert len(warned) == 2
    assert all(small.urls[0] in str(warning.message) for warning in warned)
    assert all(warning.filename == __file__ for warning in warned)
    assert server.asked == ["small.csv"] * 3
    assert os.listdir(home) == ["skksivi_boston.npz"]


@pytest.mark.parametrize("fault", [404, "corrupt"])
def test_when_the_retries_are_used_up_the_error_says_which_file_to_put_where(fault, small, server, home):
    server.faults[:] = [fault] * 9
    with pytest.raises(OSError, match="could not be") as caught:
        fetch_small(home, n_retries=1)
    for part in (small.urls[0], "'table.csv'", "'small.csv'", repr(str(home)), "`data_home`"):
        assert part in str(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert len(server.asked) == 2
    assert os.listdir(home) == []


#: Bounds of a test, and what is said of a server that goes beyond.
SHORT = Limits(max_bytes=2**21, stall=0.3, total=0.6)
BEYOND = {
    "stalls": "timed out",
    "stalls within": "timed out",
    "drips headers": "not complete after 0.6 seconds",
    "drips": "not complete after 0.6 seconds",
    "endless": "more than 2,097,152 bytes",
}


@pytest.mark.parametrize("fault", SLOW)
def test_a_server_that_comes_to_no_end_is_left(fault, small, server, home, monkeypatch):
    """It would give the right answer, if late: only a fetcher that waits for it succeeds."""
    monkeypatch.setattr(_base, "LIMITS", SHORT)
    server.faults[:] = [fault]
    with pytest.raises(OSError, match=f"could not be downloaded: .*{BEYOND[fault]}"):
        fetch_small(home, n_retries=0)
    server.faults[:] = [fault]
    with pytest.warns(UserWarning, match=BEYOND[fault]):
        fetch_small(home, n_retries=1)


def packed(content, method=zipfile.ZIP_DEFLATED):
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", method) as file:
        file.writestr("table.csv", content)
    return archive.getvalue()


#: The table within more than is read: the end of a name, the content, and what is said of it.
BOMBS = {
    "archive": (".zip", lambda: packed(LONG), "more than 33,554,432 bytes"),
    "archive that claims less": (
        ".zip",
        lambda: packed(LONG).replace(len(LONG).to_bytes(4, "little"), (100).to_bytes(4, "little")),
        "CRC",
    ),
    "archive by bzip2": (".zip", lambda: packed(TEXT, zipfile.ZIP_BZIP2), "another method than deflate"),
    "archive by lzma": (".zip", lambda: packed(TEXT, zipfile.ZIP_LZMA), "another method than deflate"),
    "text": (".csv", lambda: LONG, "more than 33,554,432 bytes"),
}
LONG = b"\n" * MAX_BYTES + TEXT.encode()


@pytest.mark.parametrize("where", ["download", "by hand"])
@pytest.mark.parametrize("case", BOMBS)
def test_what_unpacks_without_bound_is_refused(case, where, small, server, home, monkeypatch):
    suffix, make, message = BOMBS[case]
    name, content = f"bomb{suffix}", make()
    set_recipe(monkeypatch, "boston", replace(small, urls=(server.url(name),)))
    home.mkdir()
    (home / name).write_bytes(content) if where == "by hand" else server.files.update({name: content})
    if where == "download":
        with pytest.raises(OSError, match=f"could not be downloaded: .*{message}"):
            fetch_small(home, n_retries=0)
        return
    with pytest.warns(UserWarning, match=message), pytest.raises(OSError, match="are not in"):
        fetch_small(home, download_if_missing=False)


UNUSABLE = {
    "a file": lambda home: home.write_text("x"),
    "below a file": lambda home: (home.parent / "x").write_text("x"),
    "a cache that is a folder": lambda home: (home / "skksivi_boston.npz").mkdir(parents=True),
    "a cache that is a device": lambda home: (home.mkdir(), (home / "skksivi_boston.npz").symlink_to("/dev/zero")),
    "a link to nowhere": lambda home: home.symlink_to(home.parent / "nowhere"),
    "a long name": lambda home: None,
    "not ours": lambda home: home.mkdir(mode=0),
    "a file of another": lambda home: (home.mkdir(), (home / "table.csv").touch(mode=0)),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_folder_that_cannot_be_used_is_told_by_name(case, small, server, home, monkeypatch):
    UNUSABLE[case](home)
    folder = {"below a file": home.parent / "x" / "y", "a long name": home / ("x" * 300)}.get(case, home)
    if "ours" in case or "another" in case:  # the superuser may read them
        monkeypatch.setattr(Path, "exists", failing)
        monkeypatch.setattr("builtins.open", failing)
    with pytest.raises(ValueError, match=r"`data_home` is .*which cannot be used: .* Name a folder that can be"):
        fetch_small(folder)
    assert not server.asked


def failing(*args, **options):
    raise PermissionError(13, "Permission denied")


def test_offline_is_an_oserror(small, home, monkeypatch):
    with Server() as closed:
        url = closed.url("small.csv")
    set_recipe(monkeypatch, "boston", replace(small, urls=(url,)))
    with pytest.raises(OSError, match=r"refused.* put 'table.csv' or 'small.csv'"):
        fetch_small(home, n_retries=0)


def test_the_second_address_helps_at_once(small, server, home, monkeypatch):
    set_recipe(monkeypatch, "boston", replace(small, urls=(server.url("gone.zip"), server.url("small.csv"))))
    with pytest.warns(UserWarning, match="gone.zip"):
        fetch_small(home, n_retries=0)


def test_the_wait_is_between_rounds(small, server, home, monkeypatch):
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    server.faults[:] = [404] * 3
    with pytest.warns(UserWarning, match="404"):
        fetch_small(home, n_retries=3, delay=2.5)
    assert waits == [2.5] * 3


def test_without_permission_nothing_is_downloaded(small, server, home):
    with pytest.raises(OSError, match=r"`download_if_missing` is False. Put 'table.csv' or 'small.csv' there"):
        fetch_small(home, download_if_missing=False)
    assert not server.asked


@pytest.mark.parametrize("name", ["table.csv", "small.csv"])
def test_a_file_put_there_by_hand_is_enough(name, small, server, home):
    home.mkdir()
    (home / name).write_text(TEXT)
    fetch_small(home, download_if_missing=False)
    (home / name).unlink()
    fetch_small(home, download_if_missing=False)  # from the cache
    assert not server.asked


def test_a_wrong_file_put_there_by_hand_is_named_and_kept(small, server, home):
    home.mkdir()
    (home / "table.csv").write_text(TEXT[:-9])
    with pytest.warns(UserWarning, match=r"table.csv' does not hold the boston data"):
        fetch_small(home)
    assert server.asked
    assert (home / "table.csv").exists()
    (home / "skksivi_boston.npz").unlink()
    with pytest.warns(UserWarning, match=r"table.csv"), pytest.raises(OSError, match="download_if_missing"):
        fetch_small(home, download_if_missing=False)


def other_archive(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda _: other_archive(table=TABLE[::-1]),
        lambda _: other_archive(other=TABLE),
        lambda _: other_archive(table=np.array([print], dtype=object)),  # a pickle, which is not loaded
    ],
)
def test_a_damaged_cache_is_named_and_made_again(damage, small, server, home):
    fetch_small(home)
    cache = home / "skksivi_boston.npz"
    whole = cache.read_bytes()
    cache.write_bytes(damage(whole))
    with pytest.warns(UserWarning, match=r"skksivi_boston.npz' is damaged and rebuilt") as warned:
        fetch_small(home)
    assert warned[0].filename == __file__
    assert len(server.asked) == 2
    fetch_small(home)
    assert len(server.asked) == 2


def test_a_damaged_cache_is_removed_even_when_the_download_fails(small, server, home):
    home.mkdir()
    (home / "skksivi_boston.npz").write_bytes(b"PK")
    server.faults[:] = [404]
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(OSError, match="could not be downloaded"):
        fetch_small(home, n_retries=0)
    assert os.listdir(home) == []


def test_no_flipped_bit_of_a_cache_passes(small, server, home):
    """Either the numbers are the right ones still, or the cache is found damaged and rebuilt."""
    fetch_small(home)
    cache = home / "skksivi_boston.npz"
    whole = cache.read_bytes()
    found = 0
    for place in range(0, len(whole), 29):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        cache.write_bytes(flipped)
        asked = len(server.asked)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            fetch_small(home)
        assert len(warned) == len(server.asked) - asked
        found += len(warned)
    assert found > len(whole) // 58


@pytest.fixture(params=["no permission", "full"])
def read_only(request, home, monkeypatch):
    """Make the folder one that cannot be written; for the superuser, who may write anywhere, writing fails."""
    home.mkdir()

    def lock():
        home.chmod(0o500)
        if os.access(home, os.W_OK) or request.param == "full":
            home.chmod(0o700)
            monkeypatch.setattr(os, "fsync", fail)

    def fail(descriptor):
        raise OSError(28, "No space left on device") if request.param == "full" else PermissionError(13, "not yours")

    yield lock
    home.chmod(0o700)


def test_what_cannot_be_cached_is_returned_with_a_warning(small, home, read_only):
    read_only()
    with pytest.warns(UserWarning, match=r"skksivi_boston.npz' could not be written"):
        bunch = fetch_boston(data_home=home)
    np.testing.assert_array_equal(bunch.data, TABLE[:, :3])
    assert bunch.data_filename is None
    assert os.listdir(home) == []


def test_a_read_only_folder_serves_its_cache_and_its_originals(small, server, home, read_only):
    (home / "table.csv").write_text(TEXT)
    fetch_small(home, download_if_missing=False)
    read_only()
    fetch_small(home, download_if_missing=False)
    assert not server.asked


def test_a_cache_is_readable_by_others(small, home):
    umask = os.umask(0o022)
    try:
        fetch_small(home)
    finally:
        os.umask(umask)
    assert (home / "skksivi_boston.npz").stat().st_mode & 0o777 == 0o644


def test_many_may_fetch_at_the_same_time(small, server, home):
    """Each gets the table; afterwards one whole cache is there, and nothing else."""
    barrier = threading.Barrier(8)

    def fetch(_):
        barrier.wait()
        return [fetch_small(home) for _ in range(5)]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fetch, range(8)))
    assert os.listdir(home) == ["skksivi_boston.npz"]
    asked = len(server.asked)
    fetch_small(home)
    assert len(server.asked) == asked


# The list of recipes


@pytest.mark.parametrize("name", FETCHERS)
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
    for (train, test), seed in zip(uci_splits("boston", 3), (42, 43, 44), strict=True):
        X_train, X_test = train_test_split(X, test_size=0.1, random_state=seed)
        np.testing.assert_array_equal(X[train], X_train)
        np.testing.assert_array_equal(X[test], X_test)


@pytest.mark.parametrize("name", _uci.RECIPES)
def test_a_split_parts_the_rows(name):
    n = ORIGINALS[name][1][0]
    splits = uci_splits(name)
    assert len(splits) == 20
    for train, test in splits:
        np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), np.arange(n))
        assert len(test) == -(-n // 10)
    assert len({tuple(test) for _, test in splits}) == 20
