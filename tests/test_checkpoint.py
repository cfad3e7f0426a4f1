"""Checkpoints: an interrupted fit ends as one that never was interrupted."""

import errno
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from changed_fits import BRIDGES, PARAMETERS, SAME, SCORES, TARGETS, changed_score, changed_target, normal_score
from changed_fits import D as N_FEATURES
from joblib import parallel_backend
from misbehaving import Misbehaving, raising
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV

import skksivi
from skksivi import HKSIVIApproximator, KSIVIApproximator, baselines
from skksivi._utils import codec
from skksivi.estimators._checkpoint import Saving
from skksivi.model_selection import Replicates, neg_ksd_scorer
from skksivi.parameters import Adam, Checkpoint, Pilot
from skksivi.targets import from_score_fn
from skksivi.terms import Entropic

pytestmark = pytest.mark.filterwarnings("ignore:The draws are too:sklearn.exceptions.ConvergenceWarning")

SETTINGS = {"max_iter": 30, "batch_size": 23, "hidden_layer_sizes": (8,), "random_state": 3}
TINY = KSIVIApproximator(whiten=None, mixing="normal", **SETTINGS | {"max_iter": 20, "random_state": 0})
TINY_LAYERS = HKSIVIApproximator(n_layers=2, whiten=None, **SETTINGS | {"max_iter": 20, "random_state": 0})


class StoppedError(Exception):
    pass


def interrupted(q, score_fn, path, **settings):
    """Leave behind the checkpoint of a fit that was interrupted after its first save; return the fit."""
    q = clone(q).set_params(checkpoint=path, checkpoint__every=10, **settings)
    save = Saving.__call__

    def stop(saving, progress):
        save(saving, progress)
        if progress.n_done == 10:
            raise StoppedError
        return False

    with patch.object(Saving, "__call__", stop), pytest.raises(StoppedError):
        q.fit(score_fn, n_features=N_FEATURES)
    assert not hasattr(q, "family_")
    return q


@pytest.fixture
def left_behind(tmp_path):
    return interrupted(TINY, normal_score, tmp_path / "fit.ckpt")


@pytest.fixture(scope="module")
def whole():
    return fitted(TINY)


def fitted(q, score_fn=normal_score, **settings):
    return clone(q).set_params(**settings).fit(score_fn, n_features=N_FEATURES)


def assert_same_fit(q, other):
    np.testing.assert_array_equal(q.loss_curve_, other.loss_curve_)
    np.testing.assert_array_equal(q.ksd_curve_, other.ksd_curve_)
    np.testing.assert_array_equal(q.sample(50, random_state=0), other.sample(50, random_state=0))
    np.testing.assert_array_equal(q.whitening_.L, other.whitening_.L)
    assert q.best_iter_ == other.best_iter_


def assert_refused(q, message, score_fn=normal_score):
    path = q.checkpoint.path
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        q.fit(score_fn, n_features=N_FEATURES)
    assert path.read_bytes() == before


FITS = {
    "pilot": KSIVIApproximator(**SETTINGS, whiten=Pilot(budget=1000), annealing="linear"),
    "none": KSIVIApproximator(**SETTINGS, whiten=None),
    "compared": KSIVIApproximator(
        **SETTINGS,
        mixing="normal",
        whiten="laplace",
        optimizer=Adam(ema=None),
        early_stopping=0.01,
        learning_rate=1e-4,
    ),
    "path": KSIVIApproximator(**SETTINGS, whiten="laplace", gradient_estimator="path"),
    "any seed": KSIVIApproximator(**SETTINGS | {"random_state": None}, whiten=None),
    "layers": HKSIVIApproximator(**SETTINGS, whiten=None, n_layers=2),
    "layers at a pilot": HKSIVIApproximator(**SETTINGS, whiten=Pilot(budget=1000), n_layers=2),
}


@pytest.mark.parametrize("kind", FITS)
def test_an_interrupted_fit_resumes_bit_for_bit(kind, tmp_path):
    seeds = iter([7, 7, 8])
    with patch("skksivi.base.make_seed", lambda given: next(seeds) if given is None else int(given)):
        q = FITS[kind]
        whole = fitted(q)
        q = interrupted(q, normal_score, tmp_path / "fit.ckpt")
        assert_same_fit(q.fit(normal_score, n_features=N_FEATURES), whole)
    assert list(tmp_path.iterdir()) == []


def test_a_score_that_raises_leaves_the_last_checkpoint(tmp_path):
    q = clone(TINY).set_params(checkpoint=tmp_path / "fit.ckpt", checkpoint__every=5)
    with pytest.raises(OSError, match="on fire"):
        q.fit(Misbehaving(raising(OSError("on fire")), 12, rows=23, score_fn=normal_score), n_features=N_FEATURES)
    assert_same_fit(q.fit(normal_score, n_features=N_FEATURES), fitted(TINY))


# The fingerprint of a fit

CHANGED = {
    **{f"score: {kind}": (TINY, {}, {}, *changed_score(kind, 0)) for kind in SCORES},
    **{f"target: {kind}": (TINY, {}, {}, *changed_target(kind, 0)) for kind in TARGETS},
    **{
        f"{name} {k}": (TINY, {name: pair[0]}, {name: pair[1]}, normal_score, normal_score)
        for name, pairs in PARAMETERS.items()
        for k, pair in enumerate(pairs)
    },
    **{
        f"bridge {k}": (TINY_LAYERS, {"bridge": pair[0]}, {"bridge": pair[1]}, normal_score, normal_score)
        for k, pair in enumerate(BRIDGES)
    },
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_checkpoint_is_of_one_fit(case, tmp_path):
    q, before, after, score_before, score_after = CHANGED[case]
    q = interrupted(q, score_before, tmp_path / "fit.ckpt", **before).set_params(**after)
    assert_refused(q, r"`checkpoint` .*fit\.ckpt.* is of another fit: settings or score differ", score_after)


@pytest.mark.parametrize(
    ("name", "before", "after"), [(name, *pair) for name, pairs in SAME.items() for pair in pairs]
)
def test_what_returns_the_same_resumes(name, before, after, tmp_path):
    q = interrupted(TINY, normal_score, tmp_path / "fit.ckpt", **{name: before}).set_params(**{name: after})
    resumed = q.fit(normal_score, n_features=N_FEATURES)
    assert not q.checkpoint.path.exists()
    assert_same_fit(resumed, fitted(TINY, **{name: before}))


@pytest.mark.parametrize("whiten", [([3e3, 0.0, 0.0], torch.eye(N_FEATURES).tolist()), "laplace"])
def test_the_score_counts_where_the_fit_is(whiten, tmp_path):
    """A narrow bump far out, which the points around the origin do not see, but the fit does."""
    m = torch.tensor([3e3, 0.0, 0.0])

    def bumped(height):
        return lambda x: m.to(x) - x + height * torch.exp(-(x - m.to(x)).square().sum(1, keepdim=True))

    q = interrupted(TINY, bumped(0.0), tmp_path / "fit.ckpt", whiten=whiten)
    assert_refused(q, "is of another fit", bumped(0.1))


class Unidentified(Entropic):
    """A term with a parameter that no text identifies."""

    def __init__(self, weight=1.0, of=None):
        super().__init__(weight)
        self.of = {1, 2}


COUNTER = iter(range(10**9))
UNIDENTIFIED = {
    "a function among the parameters": ({"annealing": lambda t: 0.5 + 1e-9 * next(COUNTER)}, normal_score),
    "mixing": ({"mixing": lambda n, generator: torch.randn(n, N_FEATURES, generator=generator)}, normal_score),
    "terms": ({"terms": (Unidentified(),)}, normal_score),
    "`score_fn`, or": ({}, lambda x: -x + 1e-9 * torch.randn_like(x)),
    "set warm_start=False": ({"warm_start": True}, normal_score),
}


@pytest.mark.parametrize("name", UNIDENTIFIED)
def test_what_cannot_be_identified_is_refused(name, tmp_path):
    parameters, score_fn = UNIDENTIFIED[name]
    with pytest.raises(ValueError, match=f"`checkpoint` .*{name}"):
        fitted(TINY, score_fn, checkpoint=tmp_path / "fit.ckpt", **parameters)
    assert list(tmp_path.iterdir()) == []


# Folders


def test_fits_below_a_folder_resume_each_with_its_own(tmp_path):
    (tmp_path / "fits").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "fits")
    fits = [interrupted(TINY, normal_score, tmp_path / "link", learning_rate=rate) for rate in (1e-3, 1e-2)]
    assert len(list((tmp_path / "fits").iterdir())) == 2
    for q in fits:
        whole = fitted(q, checkpoint=None)
        assert_same_fit(q.fit(normal_score, n_features=N_FEATURES), whole)
    assert list((tmp_path / "fits").iterdir()) == []


def test_a_search_below_a_folder_is_one_without_checkpoints(tmp_path):
    target, grid = from_score_fn(normal_score, N_FEATURES), {"learning_rate": [1e-3, 1e-2]}
    scores, scorer = [], neg_ksd_scorer(n_samples=50)
    for checkpoint in (None, Checkpoint(tmp_path, every=5)):
        q = clone(TINY).set_params(checkpoint=checkpoint)
        with parallel_backend("threading"):
            search = GridSearchCV(q, grid, scoring=scorer, cv=Replicates(2), n_jobs=2, refit=False).fit(target)
        scores.append([search.cv_results_[f"split{k}_test_score"] for k in range(2)])
    np.testing.assert_array_equal(*scores)
    assert list(tmp_path.iterdir()) == []


# Disks and kills

UNWRITABLE = {
    "no folder": lambda path: path / "none" / "fit.ckpt",
    "below a file": lambda path: (path / "file").write_text("") or path / "file" / "fit.ckpt",
    "long name": lambda path: path / ("x" * 300),
    "null": lambda path: str(path) + "/a\0b",
    "dev": lambda path: "/dev/full/fit.ckpt",
}


@pytest.mark.parametrize("kind", UNWRITABLE)
def test_a_checkpoint_that_cannot_be_written_is_told_before_the_fit(kind, tmp_path):
    q = clone(TINY).set_params(checkpoint=UNWRITABLE[kind](tmp_path), whiten="auto")
    score_fn = Misbehaving(raising(AssertionError("too late")), 100)
    with pytest.raises(ValueError, match=r"(?s)`checkpoint` .* cannot be written"):
        q.fit(score_fn, n_features=N_FEATURES)
    assert score_fn.n_calls < 100


NO_SPACE = OSError(errno.ENOSPC, "no space left")
BROKEN = {
    "full": ("os.fsync", NO_SPACE),
    "read-only": ("os.replace", PermissionError(13, "denied")),
    "memory": ("skksivi.estimators._checkpoint.pack", MemoryError()),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_disk_that_breaks_during_a_fit_costs_no_fit(kind, whole, tmp_path):
    name, error = BROKEN[kind]
    save, n_saves = Saving.__call__, iter(range(9))

    def saves_once(saving, progress):
        if next(n_saves) == 0:
            return save(saving, progress)
        with patch(name, side_effect=error):
            return save(saving, progress)

    q = clone(TINY).set_params(checkpoint=tmp_path / "fit.ckpt", checkpoint__every=5)
    with (
        patch.object(Saving, "__call__", saves_once),
        pytest.warns(UserWarning, match="could not be written") as told,
    ):
        q.fit(normal_score, n_features=N_FEATURES)
    assert len(told) == 1
    assert_same_fit(q, whole)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_vanishes_costs_no_fit_and_errors_say_so(whole, tmp_path):
    folder = tmp_path / "fits"
    score_fn = Misbehaving(
        lambda s: shutil.rmtree(folder, ignore_errors=True) or s, 5, rows=23, score_fn=normal_score
    )
    q = clone(TINY).set_params(checkpoint=folder / "fit.ckpt", checkpoint__every=10)
    folder.mkdir()
    with pytest.warns(UserWarning, match="could not be written"):
        assert_same_fit(q.fit(score_fn, n_features=N_FEATURES), whole)
    folder.mkdir()

    def vanish_or_raise(s):
        shutil.rmtree(folder, ignore_errors=True)
        if score_fn.n_calls > 15:
            raise StoppedError
        return s

    score_fn = Misbehaving(vanish_or_raise, 5, rows=23, score_fn=normal_score)
    with pytest.raises(StoppedError) as caught:
        q.fit(score_fn, n_features=N_FEATURES)
    assert "could not be written" in caught.value.__notes__[0]


def test_a_file_that_cannot_be_removed_is_told(left_behind, whole):
    unlink = Path.unlink

    def denied(path, missing_ok=False):
        if path.name == "fit.ckpt":
            raise PermissionError(13, "denied")
        unlink(path, missing_ok)

    with patch.object(Path, "unlink", denied), pytest.warns(UserWarning, match="could not be removed"):
        assert_same_fit(left_behind.fit(normal_score, n_features=N_FEATURES), whole)


@pytest.mark.parametrize("error", [PermissionError(13, "denied"), MemoryError()])
def test_a_checkpoint_that_cannot_be_read_is_not_called_damaged(error, left_behind, whole):
    before = left_behind.checkpoint.path.read_bytes()
    with (
        patch(
            "skksivi.estimators._checkpoint.unpack" if isinstance(error, MemoryError) else "os.fstat",
            side_effect=error,
        ),
        pytest.raises(type(error)) as caught,
    ):
        left_behind.fit(normal_score, n_features=N_FEATURES)
    [note] = caught.value.__notes__
    assert "may be whole: keep it" in note
    assert left_behind.checkpoint.path.read_bytes() == before
    assert_same_fit(left_behind.fit(normal_score, n_features=N_FEATURES), whole)


SCRIPT = """
import warnings, torch
warnings.simplefilter("ignore")
torch.set_num_threads({threads})
from skksivi import KSIVIApproximator
from skksivi.parameters import Checkpoint
KSIVIApproximator(**{settings}, checkpoint=Checkpoint({path!r}, every=1)).fit(lambda x: 1 - x, n_features=3)
"""


@pytest.mark.slow
def test_kills_lose_nothing(tmp_path):
    """Each run resumes from the one that was killed before; most of its time goes into writing."""
    path = tmp_path / "fit.ckpt"
    parameters = {"batch_size": 20, "max_iter": 100, "whiten": None, "hidden_layer_sizes": (8,), "random_state": 3}
    whole = KSIVIApproximator(**parameters).fit(lambda x: 1 - x, n_features=3)
    script = SCRIPT.format(threads=torch.get_num_threads(), settings=parameters, path=str(path))
    for n_writes in (4, 8):
        with subprocess.Popen([sys.executable, "-c", script]) as process:
            written = set()
            while len(written) < n_writes and process.poll() is None:
                written |= {path.stat().st_mtime_ns} if path.exists() else set()
                time.sleep(0.002)
            process.kill()
    n_saved = len(codec.unpack(path.read_bytes(), skksivi.persistence.KINDS, lambda _: "cpu")["state"]["losses"])
    assert 0 < n_saved < 100
    resumed = KSIVIApproximator(**parameters, checkpoint=Checkpoint(path, every=100)).fit(
        lambda x: 1 - x, n_features=3
    )
    assert_same_fit(resumed, whole)
    assert not path.exists()


# Damaged and other files


def test_damage_at_any_place_is_told(left_behind):
    path, content = left_behind.checkpoint.path, left_behind.checkpoint.path.read_bytes()
    for i in range(0, len(content), len(content) // 30):
        path.write_bytes(content[:i] + bytes([content[i] ^ 4]) + content[i + 1 :])
        assert_refused(
            left_behind, r"`checkpoint` .*fit\.ckpt.* is damaged, or not a file of this version of skksivi"
        )


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("bomb",)


OTHERS = {
    "pickle": pickle.dumps(Bomb()),
    "earlier version": b"skksivi checkpoint 2\n" + bytes(200),
    "another object": codec.pack({"fit": 3}, {}),
    "no object": codec.pack([1.0], {}),
    "no start": codec.pack({"fit": "", "start": 3, "state": {}}, {}),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_files_are_refused_and_nothing_in_them_is_run(kind, left_behind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    left_behind.checkpoint.path.write_bytes(OTHERS[kind])
    assert_refused(
        left_behind,
        r"`checkpoint` .*fit\.ckpt.* is damaged, or not a file of this version|not written by a fit; name an",
    )
    assert not (tmp_path / "bomb").exists()


def test_a_saved_estimator_is_no_checkpoint_and_no_checkpoint_an_estimator(left_behind):
    path = left_behind.checkpoint.path
    with pytest.raises(ValueError, match="no estimator"):
        skksivi.load(path)
    skksivi.save(baselines.Laplace(), path)
    assert_refused(left_behind, "not of a class that can be saved")
