"""Checkpoints: an interrupted fit ends as one that never was interrupted."""

import errno
import hashlib
import io
import json
import os
import pickle
import socket
import stat
import subprocess
import sys
import time
import tracemalloc
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import safetensors.torch
import torch
from approximators import GaussianTarget
from changed_fits import BRIDGES, PARAMETERS, SAME, SCORES, TARGETS, changed_score, changed_target, normal_score
from changed_fits import D as N_FEATURES
from hypothesis import given, settings
from hypothesis import strategies as st
from joblib import parallel_backend
from misbehaving import Misbehaving, raising
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV

import skksivi
from skksivi import HKSIVIApproximator, KSIVIApproximator, baselines
from skksivi.kernels import Laplace
from skksivi.model_selection import Replicates, neg_ksd_scorer
from skksivi.parameters import Adam, Checkpoint, Pilot
from skksivi.targets import from_score_fn
from skksivi.training._checkpoint import CheckpointFile
from skksivi.training._hooks import Saving

pytestmark = pytest.mark.filterwarnings("ignore:The draws are too:sklearn.exceptions.ConvergenceWarning")

#: A batch size that no other call of the score has.
ODD = 23
SETTINGS = {"max_iter": 30, "batch_size": ODD, "hidden_layer_sizes": (8,), "random_state": 3}


#: Bytes before the numbers of a checkpoint and what they are.
N_BEFORE = len("skksivi checkpoint 2\n") + 64


class StoppedError(Exception):
    pass


def stopping_after(n_iterations):
    class Stopping(GaussianTarget):
        left = n_iterations

        def score_fn(self, x):
            Stopping.left -= len(x) == ODD  # not a trial before the training
            if Stopping.left < 0:
                raise StoppedError
            return super().score_fn(x)

    return Stopping()


KINDS = {
    "pilot": {"whiten": Pilot(budget=1000), "annealing": "linear"},  # without which there is no training
    "none": {"whiten": None},
    "compared": {"mixing": "normal", "whiten": "laplace", "optimizer": Adam(ema=None), "early_stopping": 0.01},
}


def assert_same_fit(q, other):
    np.testing.assert_array_equal(q.loss_curve_, other.loss_curve_)
    np.testing.assert_array_equal(q.ksd_curve_, other.ksd_curve_)
    np.testing.assert_array_equal(q.sample(50, random_state=0), other.sample(50, random_state=0))
    np.testing.assert_array_equal(q.whitening_.L, other.whitening_.L)
    assert q.best_iter_ == other.best_iter_


@pytest.mark.parametrize(("kind", "n_iterations"), [("pilot", 1), ("pilot", 12), ("none", 12), ("compared", 29)])
def test_an_interrupted_fit_goes_on_bit_for_bit(kind, n_iterations, tmp_path):
    path = tmp_path / "fit.ckpt"
    q = KSIVIApproximator(**SETTINGS | KINDS[kind], checkpoint=Checkpoint(path, every=10))
    with pytest.raises(StoppedError):
        q.fit(stopping_after(n_iterations))
    assert not hasattr(q, "family_")
    assert path.exists() == (n_iterations > 10)
    whole = KSIVIApproximator(**SETTINGS | KINDS[kind]).fit(GaussianTarget())
    assert_same_fit(q.fit(GaussianTarget()), whole)
    assert list(tmp_path.iterdir()) == []


SMALL = {"batch_size": ODD, "max_iter": 20, "hidden_layer_sizes": (8,), "random_state": 0}
TINY = KSIVIApproximator(whiten=None, mixing="normal", **SMALL)
TINY_LAYERS = HKSIVIApproximator(n_layers=2, whiten=None, **SMALL)


@pytest.fixture
def interrupt(monkeypatch, tmp_path):
    """Leave behind the checkpoint of a fit that ended half way, and return what is to go on with it."""

    def after(q, score_fn, **settings):
        q = clone(q).set_params(checkpoint=tmp_path / "fit.ckpt", checkpoint__every=10, **settings)
        save = Saving.__call__

        def stop(saving, progress):
            save(saving, progress)
            raise StoppedError

        monkeypatch.setattr(Saving, "__call__", stop)
        with pytest.raises(StoppedError):
            q.fit(score_fn, n_features=N_FEATURES)
        monkeypatch.setattr(Saving, "__call__", save)
        assert (tmp_path / "fit.ckpt").exists()
        return q

    return after


def assert_refused(q, score_fn, name="`checkpoint`"):
    path = q.checkpoint.path
    before = path.read_bytes()
    with pytest.raises(ValueError, match=name):
        q.fit(score_fn, n_features=N_FEATURES)
    assert path.read_bytes() == before


@pytest.fixture
def left_behind(interrupt):
    return interrupt(TINY, normal_score)


def test_another_fit_is_refused_by_the_name_of_what_differs(left_behind):
    assert_refused(clone(left_behind).set_params(learning_rate=0.5), normal_score, r"= 0\.005, this one has 0\.5")
    assert_refused(
        clone(left_behind).set_params(kernel=Laplace()), normal_score, "kernel = .*, this .* has .*Laplace"
    )
    assert_refused(left_behind, lambda x: 1 - x, "score_fn at random points")


def test_an_array_counts_to_its_last_entry(interrupt):
    init = np.random.RandomState(0).normal(size=(600, N_FEATURES))
    q = interrupt(TINY, normal_score, init=init)
    other = init.copy()
    other[300] += 1
    assert_refused(q.set_params(init=other), normal_score, r"init = an array \(600, 3\) .*, this one has an array")


def settings_in(path):
    return json.loads(parts_of(path)[0]["settings"])


def parts_of(path):
    """The texts and the tensors of a checkpoint, given by its path or its bytes."""
    content = (path if isinstance(path, bytes) else path.read_bytes())[N_BEFORE:]
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length])["__metadata__"], safetensors.torch.load(content)


def put_together(about, tensors):
    """A checkpoint of texts and tensors, with the right checksums."""
    return signed(safetensors.torch.save(tensors, about))


def signed(content):
    length = 8 + int.from_bytes(content[:8], "little")
    digests = [hashlib.sha256(part).digest() for part in (content[:length], content[length:])]
    return b"skksivi checkpoint 2\n" + b"".join(digests) + content


def test_a_fit_goes_on_on_its_device(left_behind):
    path = left_behind.checkpoint.path
    with CheckpointFile(path, settings_in(path), lambda found: found, "meta").opened() as file:
        assert {p.device.type for p in file.found.family.parameters()} == {"meta"}
        assert file.found.whitening.map.m.device.type == "meta"
        assert file.found.flat.device.type == "meta"


def torch_pickle(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def saved_estimator(path):
    skksivi.save(baselines.Laplace().fit(lambda x: -x, n_features=2), path)
    return path.read_bytes()


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "pickle", "pickle of torch", "saved estimator"])
def test_a_damaged_file_is_named_and_nothing_in_it_is_run(damage, left_behind, tmp_path):
    whole = left_behind.checkpoint.path.read_bytes()

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "bomb"),)

    damaged = {
        "cut": whole[: len(whole) // 2],
        "flipped": whole[:100] + bytes(b ^ 255 for b in whole[100:2000]) + whole[2000:],
        "empty": b"",
        "pickle": pickle.dumps(Bomb()),
        "pickle of torch": torch_pickle({"settings": Bomb()}),
        "saved estimator": saved_estimator(tmp_path / "q"),
    }
    left_behind.checkpoint.path.write_bytes(damaged[damage])
    assert_refused(left_behind, normal_score, "damaged")
    assert not (tmp_path / "bomb").exists()


def test_a_failed_write_leaves_the_last_whole_file(tmp_path):
    checkpoint = CheckpointFile(tmp_path / "fit.ckpt", {"a": "1"}, lambda found: found)
    with checkpoint.opened():
        checkpoint.save([1, 2.5])
        with pytest.raises(TypeError):
            checkpoint.save([lambda: None])
    with CheckpointFile(tmp_path / "fit.ckpt", {"a": "1"}, lambda found: found).opened() as file:
        assert file.found == [1, 2.5]
    assert [p.name for p in tmp_path.iterdir()] == ["fit.ckpt"]


# The identity of a fit


@pytest.mark.parametrize("kind", SCORES)
def test_a_checkpoint_is_of_one_score(kind, interrupt):
    before, after = changed_score(kind, 0)
    assert_refused(interrupt(TINY, before), after)


@pytest.mark.parametrize("kind", TARGETS)
def test_a_checkpoint_is_of_one_target(kind, interrupt):
    before, after = changed_target(kind, 0)
    assert_refused(interrupt(TINY, before), after)


@pytest.mark.parametrize(
    ("name", "before", "after"), [(name, *pair) for name, pairs in PARAMETERS.items() for pair in pairs]
)
def test_a_checkpoint_is_of_one_setting(name, before, after, interrupt):
    q = interrupt(TINY, normal_score, **{name: before})
    assert_refused(q.set_params(**{name: after}), normal_score, f"`checkpoint` .* {name}")


@pytest.mark.parametrize(("before", "after"), BRIDGES)
def test_a_checkpoint_is_of_one_bridge(before, after, interrupt):
    q = interrupt(TINY_LAYERS, normal_score, bridge=before)
    assert_refused(q.set_params(bridge=after), normal_score)


@pytest.mark.parametrize(
    ("name", "before", "after"), [(name, *pair) for name, pairs in SAME.items() for pair in pairs]
)
def test_what_returns_the_same_goes_on(name, before, after, interrupt):
    q = interrupt(TINY, normal_score, **{name: before}).set_params(**{name: after})
    went_on = q.fit(normal_score, n_features=N_FEATURES)
    assert not q.checkpoint.path.exists()
    if name != "random_state":
        whole = clone(TINY).set_params(**{name: before}).fit(normal_score, n_features=N_FEATURES)
        assert_same_fit(went_on, whole)


def test_the_whitened_target_counts_where_it_is(interrupt, tmp_path):
    """A narrow bump far out, which the points around the origin do not see, but the fit does."""
    m = torch.tensor([3e3, 0.0, 0.0])

    def bumped(height):
        return lambda x: m.to(x) - x + height * torch.exp(-(x - m.to(x)).square().sum(1, keepdim=True))

    whiten = (m.tolist(), torch.eye(N_FEATURES).tolist())
    assert_refused(interrupt(TINY, bumped(0.0), whiten=whiten), bumped(0.1))
    (tmp_path / "fit.ckpt").unlink()
    q = interrupt(TINY, bumped(0.0), whiten="laplace")
    assert_refused(q, bumped(0.1))


ONE_AFTER_ANOTHER = iter(range(10**9))

UNIDENTIFIED = {
    "annealing": lambda t: 0.5 + 1e-9 * next(ONE_AFTER_ANOTHER),
    "mixing": lambda n, generator: torch.randn(n, N_FEATURES, generator=generator),
}


@pytest.mark.parametrize("name", ["annealing", "mixing"])
def test_what_cannot_be_told_from_others_is_refused(name, tmp_path):
    q = clone(TINY).set_params(checkpoint=tmp_path / "fit.ckpt", **{name: UNIDENTIFIED[name]})
    with pytest.raises(ValueError, match=f"`checkpoint` cannot .*{name}"):
        q.fit(normal_score, n_features=N_FEATURES)
    with pytest.raises(ValueError, match=r"`checkpoint` cannot identify .*score_fn at random points"):
        clone(TINY).set_params(checkpoint=tmp_path / "fit.ckpt").fit(
            lambda x: -x + 1e-9 * torch.randn_like(x), n_features=N_FEATURES
        )
    assert list(tmp_path.iterdir()) == []


# Several fits at a time


class Slow:
    """Takes its time, so that fits in threads overlap."""

    def __call__(self, x):
        time.sleep(1e-4)
        return normal_score(x)


def fits_in_threads(checkpoints):
    def fit(checkpoint):
        q = clone(TINY).set_params(checkpoint=checkpoint, checkpoint__every=5, max_iter=50)
        try:
            return q.fit(Slow(), n_features=N_FEATURES)
        except ValueError as error:
            return error

    with ThreadPoolExecutor(len(checkpoints)) as pool:
        return list(pool.map(fit, checkpoints))


def test_one_fit_at_a_time_has_a_checkpoint(tmp_path):
    whole = clone(TINY).set_params(max_iter=50).fit(normal_score, n_features=N_FEATURES)
    (tmp_path / "link.ckpt").symlink_to(tmp_path / "fit.ckpt")
    results = fits_in_threads([tmp_path / "fit.ckpt", tmp_path / "link.ckpt"] * 2)
    fitted = [q for q in results if isinstance(q, KSIVIApproximator)]
    assert fitted
    for q in fitted:
        assert_same_fit(q, whole)
    for error in results:
        if isinstance(error, ValueError):
            assert "`checkpoint` " in str(error)
            assert "in use by another fit; leave `checkpoint` out of searches" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["link.ckpt"]


@pytest.mark.parametrize("backend", ["threading", pytest.param("loky", marks=pytest.mark.slow)])
def test_a_search_below_a_folder_is_one_without_checkpoints(backend, tmp_path):
    target, grid = from_score_fn(normal_score, N_FEATURES), {"learning_rate": [1e-3, 1e-2]}
    scores, scorer = [], neg_ksd_scorer(n_samples=50)
    for checkpoint in (None, Checkpoint(tmp_path, every=5)):
        q = clone(TINY).set_params(checkpoint=checkpoint)
        with parallel_backend(backend):
            search = GridSearchCV(q, grid, scoring=scorer, cv=Replicates(2), n_jobs=2, refit=False).fit(target)
        scores.append([search.cv_results_[f"split{k}_test_score"] for k in range(2)])
    np.testing.assert_array_equal(*scores)
    assert list(tmp_path.iterdir()) == []


def test_fits_below_a_folder_go_on_each_with_its_own(interrupt, tmp_path):
    folder = tmp_path / "fits"
    folder.mkdir()
    (tmp_path / "fit.ckpt").symlink_to(folder)
    fits = [interrupt(TINY, normal_score, learning_rate=rate) for rate in (1e-3, 1e-2, 1e-1)]
    assert len(list(folder.iterdir())) == 3
    for q in fits:
        whole = clone(q).set_params(checkpoint=None).fit(normal_score, n_features=N_FEATURES)
        assert_same_fit(q.fit(normal_score, n_features=N_FEATURES), whole)
    assert list(folder.iterdir()) == []


CANDIDATES = st.tuples(st.sampled_from([1e-3, 1e-2]), st.integers(0, 3), st.sampled_from(SCORES), st.booleans())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@settings(max_examples=2)
@given(candidates=st.lists(CANDIDATES, min_size=2, max_size=3, unique=True))
def test_candidates_below_a_folder_do_not_meet(candidates, interrupt, tmp_path):
    """Whatever they differ in, also if all are interrupted: rate, seed, target and replicate."""
    (tmp_path / "fit.ckpt").mkdir(exist_ok=True)
    fits = [
        (interrupt(TINY, score_fn, learning_rate=rate, random_state=seed), score_fn)
        for rate, seed, kind, second in candidates
        for score_fn in [changed_score(kind, 0)[second]]
    ]
    for q, score_fn in fits:
        whole = clone(q).set_params(checkpoint=None).fit(score_fn, n_features=N_FEATURES)
        assert_same_fit(q.fit(score_fn, n_features=N_FEATURES), whole)
    assert list((tmp_path / "fit.ckpt").iterdir()) == []


@pytest.mark.slow
def test_a_process_that_is_killed_holds_nothing_up(tmp_path):
    script = f"""
import time
from skksivi.training._checkpoint import CheckpointFile
with CheckpointFile({str(tmp_path / "fit.ckpt")!r}, {{}}, lambda found: found).opened() as file:
    file.aside.touch()
    print("begun", flush=True)
    time.sleep(60)
"""
    file = CheckpointFile(tmp_path / "fit.ckpt", {}, lambda found: found)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        with pytest.raises(ValueError, match="in use by another fit"), file.opened():
            pass
        process.kill()
    assert {path.name for path in tmp_path.iterdir()} == {"fit.ckpt.lock", "fit.ckpt.tmp"}
    with file.opened():
        file.save([1])
    assert [path.name for path in tmp_path.iterdir()] == ["fit.ckpt"]


# Disks


UNWRITABLE = {
    "no folder": lambda path: path / "none" / "fit.ckpt",
    "below a file": lambda path: (path / "file").write_text("") or path / "file" / "fit.ckpt",
    "long name": lambda path: path / ("x" * 300),
    "not long before": lambda path: path / ("x" * 254),
    "loop": lambda path: (path / "loop").symlink_to(path / "loop") or path / "loop" / "fit.ckpt",
    "null": lambda path: str(path) + "/a\0b",
    "proc": lambda path: "/proc/fit.ckpt",
    "dev": lambda path: "/dev/full/fit.ckpt",
}


@pytest.mark.parametrize("kind", UNWRITABLE)
def test_a_checkpoint_that_cannot_be_written_is_told_before_the_fit(kind, tmp_path):
    q = clone(TINY).set_params(checkpoint=UNWRITABLE[kind](tmp_path), whiten="auto")
    score_fn = Misbehaving(raising(AssertionError("too late")), 100)
    with pytest.raises(ValueError, match=r"(?s)`checkpoint` .* cannot be written"):
        q.fit(score_fn, n_features=N_FEATURES)
    assert score_fn.n_calls < 100


@pytest.mark.parametrize("call", ["fsync", "replace", "open", "chmod"])
def test_a_disk_that_fails_during_a_fit_costs_no_fit(call, monkeypatch, tmp_path):
    whole = clone(TINY).fit(normal_score, n_features=N_FEATURES)
    write, fails = CheckpointFile._write, raising(OSError(errno.ENOSPC, "no space left"))

    def failing_write(file, data):
        write(file, data)
        with monkeypatch.context() as broken:
            broken.setattr(os, call, lambda *args: fails(args))
            write(file, data)

    monkeypatch.setattr(CheckpointFile, "_write", failing_write)
    q = clone(TINY).set_params(checkpoint=tmp_path / "fit.ckpt", checkpoint__every=5)
    with pytest.warns(UserWarning, match="`checkpoint` .* could not be written") as caught:
        q.fit(normal_score, n_features=N_FEATURES)
    assert len(caught) == 1
    assert_same_fit(q, whole)
    assert list(tmp_path.iterdir()) == []


def test_no_memory_for_a_checkpoint_costs_no_fit(monkeypatch, tmp_path):
    monkeypatch.setattr(CheckpointFile, "_to_bytes", lambda file, value: raising(MemoryError())(value))
    q = clone(TINY).set_params(checkpoint=tmp_path / "fit.ckpt", checkpoint__every=5)
    with pytest.warns(UserWarning, match="`checkpoint` .* could not be written"):
        q.fit(normal_score, n_features=N_FEATURES)
    assert_same_fit(q, clone(TINY).fit(normal_score, n_features=N_FEATURES))


@pytest.mark.parametrize("error", [PermissionError(13, "denied"), MemoryError()])
def test_a_checkpoint_that_cannot_be_read_is_not_called_damaged(error, interrupt, monkeypatch):
    q = interrupt(TINY, normal_score)
    before = q.checkpoint.path.read_bytes()
    with monkeypatch.context() as broken:
        broken.setattr(CheckpointFile, "_content", lambda file, stream: raising(error)(stream))
        with pytest.raises(type(error)) as caught:
            q.fit(normal_score, n_features=N_FEATURES)
    [note] = caught.value.__notes__
    assert f"`checkpoint` {str(q.checkpoint.path)!r}" in note
    assert "damaged" not in note
    assert q.checkpoint.path.read_bytes() == before
    assert_same_fit(q.fit(normal_score, n_features=N_FEATURES), clone(TINY).fit(normal_score, n_features=N_FEATURES))


@pytest.mark.parametrize("mode", [0o640, 0o400])
def test_a_checkpoint_keeps_its_mode_and_a_link_stays_one(mode, interrupt, tmp_path):
    q = interrupt(TINY, normal_score)
    q.checkpoint.path.chmod(mode)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "fit.ckpt")
    seen = []

    save = Saving.__call__

    def look(saving, progress):
        done = save(saving, progress)
        seen.append((stat.S_IMODE((tmp_path / "fit.ckpt").stat().st_mode), link.is_symlink()))
        return done

    with patch.object(Saving, "__call__", look):
        q.set_params(checkpoint__path=link, checkpoint__every=5).fit(normal_score, n_features=N_FEATURES)
    assert seen == [(mode, True)] * 2
    assert link.is_symlink()
    assert not (tmp_path / "fit.ckpt").exists()


def test_a_new_checkpoint_is_its_owners(interrupt):
    assert stat.S_IMODE(interrupt(TINY, normal_score).checkpoint.path.stat().st_mode) == 0o600


# Files of strangers


def places(node, path=()):
    """Every place in a piece of json."""
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, part in items:
        yield from places(part, (*path, key))


def with_part(node, path, change):
    """A copy of a piece of json in which one place is changed; `change` returns the new parts of what holds it."""
    if not path:
        return change(node)
    key, *rest = path
    copy = dict(node) if isinstance(node, dict) else list(node)
    copy[key] = with_part(copy[key], rest, change)
    return copy


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


#: What may stand in the place of something else.
STRANGE = [
    None, True, -1, 0, 1.5, 10**30, "", "nothing", [], [1], {}, {"is": "tensor"},
    {"is": "Normal", "latent_dim": 10**12},
    {"is": "MultilayerPerceptron", "layers": []}, {"is": "device", "name": "cpu"}, {"is": "kernels.Gaussian"},
    {"is": "KSIVIApproximator"}, {"is": "none"}, {"is": ["a"]}, nested(11), nested(400),
    {"is": "tuple", "items": [0] * 1000},
]  # fmt: skip


def strange_tensors(x):
    """Tensors that may stand in the place of x: of other shapes, types and values."""
    nan = (
        x.clone().double().index_fill_(0, torch.tensor([0]), torch.nan)
        if x.dim() and len(x)
        else x.double() * torch.nan
    )
    return [
        nan.to(x.dtype) if x.is_floating_point() else x - 2**40,
        nan.to(x.dtype) * 0 + torch.inf if x.is_floating_point() else x + 2**40,
        x[..., None], x.flatten()[:0], x.flatten()[:-1], torch.cat([x.flatten(), x.flatten()]), x[None],
        torch.zeros(0, 10**12), torch.zeros(10**6, 0),
        x.double() if x.dtype != torch.float64 else x.float(),
        x.long() if x.is_floating_point() else x.double(), x.bool(), x.int(),
    ]  # fmt: skip


@pytest.fixture(scope="module", params=["none", "pilot", "layers"])
def crafted(request, tmp_path_factory):
    """An interrupted fit, its checkpoint and the whole fit."""
    path = tmp_path_factory.mktemp("crafted") / "fit.ckpt"
    settings = {"batch_size": 23, "max_iter": 20, "hidden_layer_sizes": (4,), "random_state": 0}
    q = {
        "none": KSIVIApproximator(**settings, whiten=None, early_stopping=0.1),
        "pilot": KSIVIApproximator(**settings, whiten=Pilot(budget=10_000)),
        "layers": HKSIVIApproximator(**settings, whiten=Pilot(budget=10_000), n_layers=2),
    }[request.param]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = clone(q).fit(normal_score, n_features=N_FEATURES)
    q.set_params(checkpoint=path, checkpoint__every=10)
    with patch.object(Saving, "__call__", stopping(Saving.__call__)), pytest.raises(StoppedError):
        q.fit(normal_score, n_features=N_FEATURES)
    return q, path.read_bytes(), whole


def stopping(save):
    def stop(saving, progress):
        save(saving, progress)
        raise StoppedError

    return stop


def told_or_harmless(crafted, content):
    """Whether a file is refused by name, quickly, and else gives what the whole fit is."""
    q, _, whole = crafted
    q.checkpoint.path.write_bytes(content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            resumed = clone(q).fit(normal_score, n_features=N_FEATURES)
    except ValueError as error:
        return "`checkpoint`" in str(error) and "fit.ckpt" in str(error)
    same = np.array_equal(resumed.loss_curve_, whole.loss_curve_) and resumed.best_iter_ == whole.best_iter_
    return same and np.array_equal(resumed.sample(50, random_state=0), whole.sample(50, random_state=0))


def without(key, node):
    """A piece of json without one of its parts."""
    if isinstance(node, dict):
        return {name: part for name, part in node.items() if name != key}
    return node[:key] + node[key + 1 :]


def crafted_files(content, rng):
    """Files that lie: each place of the description changed or left out, each tensor another. They are made late."""
    about, tensors = parts_of(content)
    state = json.loads(about["state"])

    def with_state(place, change):
        return put_together({**about, "state": json.dumps(with_part(state, place, change))}, tensors)

    def with_tensors(changes):
        return put_together(about, {name: x for name, x in {**tensors, **changes}.items() if x is not None})

    for place in places(state):
        for strange in STRANGE:
            yield f"{place} is {strange!r:.40}", partial(with_state, place, lambda _, strange=strange: strange)
        if place:
            yield f"{place} left out", partial(with_state, place[:-1], partial(without, place[-1]))
    for name, x in tensors.items():
        for other in strange_tensors(x):
            yield f"{name} {other.dtype} {tuple(other.shape)}", partial(with_tensors, {name: other.contiguous()})
        yield f"no {name}", partial(with_tensors, {name: None})
        for key, y in tensors.items():
            if rng.rand() < 0.1 and (y.shape, y.dtype) != (x.shape, x.dtype):
                yield f"{key} for {name}", partial(with_tensors, {name: y.clone()})
    yield "one more", partial(with_tensors, {"more": torch.ones(1)})
    if state["penalty"] is not None:
        free = {name: x for name, x in tensors.items() if not name.startswith("penalty")}
        untied = {**about, "state": json.dumps({**state, "penalty": None})}
        yield "no penalty", partial(put_together, untied, free)


def crafted_headers(content, about):
    def header(dtype="F32", shape=(1,), end=4, **texts):
        x = {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}
        return json.dumps({"__metadata__": {**about, **texts}, "x": x})

    for text in (
        header(shape=[10**5, 10**5], end=4 * 10**10), header(dtype="F4"), header(shape=[-1]), header(shape=[10**30]),
        header(shape="many"), header(shape=[0, 10**18], end=0), header(settings="[]"), header(settings="{"),
        header(state="[" * 10**5), header(state="{}"), json.dumps({"__metadata__": {}}), json.dumps({}),
        json.dumps([]), "[" * 10**5, "{", "\0" * 100,
    ):  # fmt: skip
        encoded = text.encode()
        yield text[:40], partial(signed, len(encoded).to_bytes(8, "little") + encoded)
    for length in (0, 2**20 + 1, 2**40, 2**64 - 1):
        yield f"header of {length}", partial(signed, length.to_bytes(8, "little") + bytes(100))
    for format_ in (b"1", b"3", b"20", b"x", b""):
        yield f"format {format_}", partial(content.replace, b"checkpoint 2", b"checkpoint " + format_, 1)
    yield "torch", partial(torch_pickle, {"x": torch.ones(2)})
    yield "bytearray", lambda: b"\x80\x02c__builtin__\nbytearray\nJ\x00\xca\x9a;\x85R."


@pytest.fixture
def assert_all_told(crafted, record_property):
    def told(files):
        wrong = [name for name, content in files if not told_or_harmless(crafted, content())]
        record_property("cases", len(files))
        record_property("wrong", len(wrong))
        assert wrong == []

    return told


@pytest.mark.slow
def test_a_crafted_checkpoint_is_told_or_harmless(crafted, assert_all_told):
    rng = np.random.RandomState(1)
    files = list(crafted_files(crafted[1], rng))
    assert len(files) > 500
    assert_all_told([files[k] for k in rng.choice(len(files), 40, replace=False)])


def test_some_crafted_checkpoints_are_told_or_harmless(crafted, assert_all_told):
    rng = np.random.RandomState(0)
    files = list(crafted_files(crafted[1], rng))
    assert_all_told([files[k] for k in rng.choice(len(files), 10, replace=False)])


@pytest.mark.parametrize("crafted", ["none"], indirect=True)
def test_headers_that_lie_are_told(crafted, assert_all_told):
    assert_all_told(list(crafted_headers(crafted[1], parts_of(crafted[1])[0])))


@pytest.mark.parametrize("format_", [b"1", b"3"])
def test_another_format_is_named(format_, left_behind):
    path = left_behind.checkpoint.path
    path.write_bytes(path.read_bytes().replace(b"checkpoint 2", b"checkpoint " + format_, 1))
    assert_refused(left_behind, normal_score, f"has format {format_.decode()}, but this version reads format 2")


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "sparse", "sparse with its beginning"])
def test_what_is_no_file_of_fits_is_refused_unread(kind, left_behind, tmp_path, monkeypatch):
    q = left_behind
    path, content = q.checkpoint.path, q.checkpoint.path.read_bytes()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            monkeypatch.chdir(tmp_path)  # the path of a socket is short
            server.bind("fit.ckpt")
    else:
        path.write_bytes(content if "beginning" in kind else b"")
        os.truncate(path, 2**31)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"`checkpoint` .*fit\.ckpt"):
            q.fit(normal_score, n_features=N_FEATURES)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
