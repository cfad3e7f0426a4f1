"""Checkpoints: an interrupted fit ends as one that never was interrupted."""

import io
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch

import skksivi
from skksivi import KSIVIApproximator
from skksivi.kernels import Laplace
from skksivi.parameters import Adam, Checkpoint, Pilot
from skksivi.targets import Banana
from skksivi.training._checkpoint import CheckpointFile

BATCH_SIZE = 100
SETTINGS = {
    "max_iter": 200,
    "batch_size": BATCH_SIZE,
    "whiten": Pilot(budget=20_000),
    "random_state": 3,
}


class StoppedError(Exception):
    pass


def stopping_after(n_iterations):
    class Stopping(Banana):
        left = n_iterations

        def score_vjp(self, x):
            Stopping.left -= len(x) == BATCH_SIZE  # not a trial before the training
            if Stopping.left < 0:
                raise StoppedError
            return super().score_vjp(x)

    return Stopping()


@pytest.fixture(scope="module")
def uninterrupted():
    return KSIVIApproximator(**SETTINGS).fit(Banana())


def assert_same_fit(q, other):
    np.testing.assert_array_equal(q.loss_curve_, other.loss_curve_)
    np.testing.assert_array_equal(q.ksd_curve_, other.ksd_curve_)
    np.testing.assert_array_equal(q.sample(50, random_state=0), other.sample(50, random_state=0))
    np.testing.assert_array_equal(q.whitening_.L, other.whitening_.L)
    assert q.best_iter_ == other.best_iter_


@pytest.mark.parametrize("n_iterations", [1, 25, 64, 199])
def test_an_interrupted_fit_goes_on_bit_for_bit(n_iterations, uninterrupted, tmp_path):
    path = tmp_path / "fit.ckpt"
    q = KSIVIApproximator(**SETTINGS, checkpoint=Checkpoint(path, every=20))
    with pytest.raises(StoppedError):
        q.fit(stopping_after(n_iterations))
    assert not hasattr(q, "family_")
    assert path.exists() == (n_iterations > 20)
    assert_same_fit(q.fit(Banana()), uninterrupted)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options", [{"whiten": None}, {"mixing": "normal", "optimizer": Adam(ema=None), "early_stopping": 0.01}]
)
def test_every_kind_of_fit_goes_on(options, tmp_path):
    settings = {**SETTINGS, **options}
    whole = KSIVIApproximator(**settings).fit(Banana())
    q = KSIVIApproximator(**settings, checkpoint=Checkpoint(tmp_path / "fit.ckpt", every=20))
    with pytest.raises(StoppedError):
        q.fit(stopping_after(120))
    assert_same_fit(q.fit(Banana()), whole)


@pytest.mark.slow
def test_a_killed_process_goes_on(uninterrupted, tmp_path):
    path = tmp_path / "fit.ckpt"
    script = textwrap.dedent(
        f"""
        from skksivi import KSIVIApproximator
        from skksivi.parameters import Checkpoint, Pilot
        from skksivi.targets import Banana
        checkpoint = Checkpoint({str(path)!r}, every=20)
        KSIVIApproximator(**{ {**SETTINGS, "max_iter": 200}!r}, checkpoint=checkpoint).fit(Banana())
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    while process.poll() is None and not path.exists():
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert_same_fit(KSIVIApproximator(**SETTINGS, checkpoint=Checkpoint(path, every=20)).fit(Banana()), uninterrupted)


@pytest.fixture
def left_behind(tmp_path):
    path = tmp_path / "fit.ckpt"
    with pytest.raises(StoppedError):
        KSIVIApproximator(**SETTINGS, checkpoint=Checkpoint(path, every=20)).fit(stopping_after(100))
    return path


def test_another_fit_is_refused_by_the_name_of_what_differs(left_behind):
    with pytest.raises(ValueError, match=r"learning_rate = 0\.002, this one has 0\.5"):
        KSIVIApproximator(**SETTINGS, learning_rate=0.5, checkpoint=Checkpoint(left_behind, every=20)).fit(Banana())
    with pytest.raises(ValueError, match=r"kernel = .*, this one has .*Laplace"):
        KSIVIApproximator(**SETTINGS, kernel=Laplace(), checkpoint=Checkpoint(left_behind)).fit(Banana())
    with pytest.raises(ValueError, match="score_fn at -1/2 and 1/2"):
        KSIVIApproximator(**SETTINGS, checkpoint=Checkpoint(left_behind, every=20)).fit(lambda x: -x, n_features=2)
    assert left_behind.exists()


def test_an_array_counts_to_its_last_entry(tmp_path):
    init = np.random.RandomState(0).normal(size=(600, 2))
    settings = {**SETTINGS, "checkpoint": Checkpoint(tmp_path / "fit.ckpt", every=20)}
    with pytest.raises(StoppedError):
        KSIVIApproximator(**settings, init=init).fit(stopping_after(100))
    other = init.copy()
    other[300] += 1
    with pytest.raises(ValueError, match=r"init = an array \(600, 2\) .*, this one has an array"):
        KSIVIApproximator(**settings, init=other).fit(Banana())


def test_a_fit_goes_on_on_its_device(left_behind):
    settings = torch.load(io.BytesIO(left_behind.read_bytes()[32:]), weights_only=False)["settings"]
    found = CheckpointFile(left_behind, settings, "meta").found
    assert {p.device.type for p in found["family"].parameters()} == {"meta"}
    assert found["whitening"].map.m.device.type == "meta"


def torch_pickle(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def saved_estimator(path):
    skksivi.save(KSIVIApproximator(**SETTINGS).set_params(max_iter=1).fit(lambda x: -x, n_features=2), path)
    return path.read_bytes()


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "pickle", "pickle of torch", "saved estimator"])
def test_a_damaged_file_is_named_and_nothing_in_it_is_run(damage, left_behind, tmp_path):
    whole = left_behind.read_bytes()

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
    left_behind.write_bytes(damaged[damage])
    with pytest.raises(ValueError, match="damaged"):
        KSIVIApproximator(**SETTINGS, checkpoint=Checkpoint(left_behind, every=20)).fit(Banana())
    assert not (tmp_path / "bomb").exists()


def test_a_failed_write_leaves_the_last_whole_file(tmp_path):
    checkpoint = CheckpointFile(tmp_path / "fit.ckpt", {"a": 1})
    checkpoint.save({"n": 1})
    with pytest.raises((AttributeError, pickle.PicklingError)):
        checkpoint.save({"n": lambda: None})
    assert CheckpointFile(tmp_path / "fit.ckpt", {"a": 1}).found["n"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["fit.ckpt"]
