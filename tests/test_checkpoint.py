"""Checkpoints: an interrupted fit ends as one that never was interrupted."""

import errno
import pickle
import subprocess
import sys
import time
from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
import pytest
import torch
from joblib import parallel_backend
from members import every, refused
from misbehaving import Misbehaving, raising
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV

import skksivi
from skksivi import HKSIVIApproximator, KSIVIApproximator, baselines
from skksivi._utils import codec
from skksivi.estimators._checkpoint import Saved
from skksivi.kernels import Gaussian
from skksivi.model_selection import Replicates, neg_ksd_scorer
from skksivi.parameters import Adam, Checkpoint, Network, Pilot
from skksivi.targets import Minibatches, Target, from_rows, from_score_fn
from skksivi.terms import Term

pytestmark = pytest.mark.filterwarnings("ignore:The draws are too:sklearn.exceptions.ConvergenceWarning")

D = 3
SETTINGS = {"max_iter": 30, "batch_size": 23, "hidden_layer_sizes": (8,), "random_state": 3}
TINY = KSIVIApproximator(whiten=None, mixing="normal", **SETTINGS | {"max_iter": 20, "random_state": 0})
TINY_LAYERS = HKSIVIApproximator(n_layers=2, whiten=None, **SETTINGS | {"max_iter": 20, "random_state": 0})


def normal_score(x):
    return -x


def interrupted(q, score_fn, path, **settings):
    """Leave behind the checkpoint of a fit that was interrupted after its first save; return the fit."""
    q = clone(q).set_params(checkpoint=path, checkpoint__every=10, **settings)
    save = Saved.__call__

    def stop(saving, progress):
        save(saving, progress)
        if progress.n_done == 10:
            raise InterruptedError
        return False

    with patch.object(Saved, "__call__", stop), pytest.raises(InterruptedError):
        q.fit(score_fn, n_features=D)
    assert not hasattr(q, "family_")
    return q


def fitted(q, score_fn=normal_score, **settings):
    return clone(q).set_params(**settings).fit(score_fn, n_features=D)


@pytest.fixture(scope="module")
def whole():
    return fitted(TINY)


def assert_same_fit(*fits):
    np.testing.assert_equal(*((q.loss_curve_, q.ksd_curve_, q.whitening_.L, q.best_iter_) for q in fits))
    np.testing.assert_array_equal(*(q.sample(50, random_state=0) for q in fits))


def assert_refused(q, message, score_fn=normal_score):
    before = q.checkpoint.path.read_bytes()
    refused(ValueError, message, lambda: q.fit(score_fn, n_features=D))
    assert q.checkpoint.path.read_bytes() == before


COMPARED = {"optimizer": Adam(ema=None), "early_stopping": 0.01, "learning_rate": 1e-4}
FITS = {
    "pilot": KSIVIApproximator(**SETTINGS, whiten=Pilot(budget=1000), annealing="linear"),
    "none": KSIVIApproximator(**SETTINGS, whiten=None),
    "compared": KSIVIApproximator(**SETTINGS, **COMPARED, mixing="normal", whiten="laplace"),
    "path": KSIVIApproximator(**SETTINGS, whiten="laplace", method="path"),
    "any seed": KSIVIApproximator(**SETTINGS | {"random_state": None}, whiten=None),
    "layers": HKSIVIApproximator(**SETTINGS, whiten=None, n_layers=2),
    "layers at a pilot": HKSIVIApproximator(**SETTINGS, whiten=Pilot(budget=1000), n_layers=2),
    "minibatches": KSIVIApproximator(**SETTINGS, whiten="laplace", mixing="normal"),
}


@pytest.mark.parametrize("kind", FITS)
def test_an_interrupted_fit_resumes_bit_for_bit(kind, tmp_path):
    seeds, score = iter([7, 7, 8]), Minibatches(rows_of(), 10) if kind == "minibatches" else normal_score
    with patch("skksivi.base.make_seed", lambda given: next(seeds) if given is None else int(given)):
        whole = fitted(FITS[kind], score)
        q = interrupted(FITS[kind], score, tmp_path / "fit.ckpt")
        assert_same_fit(q.fit(score, n_features=D), whole)
    assert list(tmp_path.iterdir()) == []


def test_a_score_that_raises_leaves_the_last_checkpoint(whole, tmp_path):
    q = clone(TINY).set_params(checkpoint=tmp_path / "fit.ckpt", checkpoint__every=5)
    with pytest.raises(OSError, match="on fire"):
        q.fit(Misbehaving(raising(OSError("on fire")), 12, rows=23, score_fn=normal_score), n_features=D)
    assert_same_fit(q.fit(normal_score, n_features=D), whole)


# The fingerprint of a fit


def moved(by):
    return lambda x: torch.as_tensor(by).to(x) - x


def normal(**methods):
    """A standard normal target with methods that say something else."""
    return type("Own", (Target,), {"n_features": D, "score_fn": lambda self, x: -x, **methods})()


def with_product(c):
    return normal(score_vjp=lambda self, x: (-x, lambda v: c * v))


def with_height(h):
    return normal(log_prob=lambda self, x: -x.square().sum(1) / 2 + h * (x.abs().amax(1) > 30))


def rows_of(*left_out):
    data = torch.randn(50, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data[list(left_out)] = 0.0

    def score_fn(x, rows):
        return -x + len(data) / len(rows) * (data.to(x)[rows] - x[:, None]).sum(1)

    return from_rows(score_fn, n_rows=len(data), n_features=D)


def closure(c):
    return lambda t: 0.1 + c * t


def own_kernel(c):
    class Own(Gaussian):
        def profile(self, t):
            return (-c * t / 2).exp()

        def slope(self, t, k):
            return -c / 2 * k

    return Own(bandwidth=1.0)


def own_term(c):
    class Own(Term):
        def gradient(self, draws, w):
            return -c * w * draws.s / len(draws.x)

    return Own()


def bumped(height):
    """A narrow bump far out, which the points around the origin do not see, but the fit does."""
    m = torch.tensor([3e3, 0.0, 0.0])
    return lambda x: m.to(x) - x + height * torch.exp(-(x - m.to(x)).square().sum(1, keepdim=True))


EYE = torch.eye(D).tolist()
SCORES = {
    "moved a little": (moved(0.0), moved(1e-9)),
    "permuted precision": (lambda x: -x * x.new_tensor([1.0, 2, 3]), lambda x: -x * x.new_tensor([2.0, 1, 3])),
    "another mean of the same sum": (moved([1.0, 0.0, 0.0]), moved([0.0, 1.0, 0.0])),
    "minibatch size": (Minibatches(rows_of(), 10), Minibatches(rows_of(), 20)),
    "minibatches or not": (Minibatches(rows_of(), 10), rows_of()),
    "one observation": (Minibatches(rows_of(), 10), Minibatches(rows_of(0), 10)),
    "replicate": (rows_of()[1], rows_of()[2]),
    "product": (with_product(-1.0), with_product(-1.0 - 1e-6)),
    "density far out": (with_height(0.0), with_height(1e-3)),
}
SETTINGS_OF_FITS = [
    *[("random_state", 0, 1), ("random_state", None, 0), ("max_iter", 20, 21), ("dtype", "float32", "float64")],
    *[("init", [0.0] * D, [0.0, 0.0, 1e-12]), ("whiten", ([0.0] * D, EYE), ([0.0, 0.0, 1e-12], EYE))],
    *[("kernel", own_kernel(1.0), own_kernel(2.0)), ("terms", (own_term(1.0),), (own_term(2.0),))],
    *[("annealing", closure(0.1), closure(0.2)), ("annealing", closure(0.1), lambda t: 0.1 + 0.1 * t + (t == 0.95))],
    *[("hidden_layer_sizes", (8,), Network((8,), linear_skip=False))],
    ("bridge", lambda u: 1 - u, lambda u: 1 - u * u),
]  # fmt: skip
OTHER_FITS = [
    *[(name, {}, {}, *scores) for name, scores in SCORES.items()],
    *[(name, {name: a}, {name: b}, normal_score, normal_score) for name, a, b in SETTINGS_OF_FITS],
    *[("far out", {"whiten": at}, {}, bumped(0.0), bumped(0.1)) for at in (([3e3, 0.0, 0.0], EYE), "laplace")],
]


@every("name, settings, changes, before, after", OTHER_FITS)
def test_a_checkpoint_is_of_one_fit(name, settings, changes, before, after, tmp_path):
    q = TINY_LAYERS if name == "bridge" else TINY
    q = interrupted(q, before, tmp_path / "fit.ckpt", **settings).set_params(**changes)
    assert_refused(q, r"`checkpoint` .*fit\.ckpt.* is of another fit: settings or score differ", after)
    q.checkpoint.path.unlink()


def test_what_returns_the_same_resumes(tmp_path):
    before = {"annealing": closure(0.1), "terms": (own_term(1.0),), "kernel": own_kernel(1.0), "init": [0.0] * D}
    after = {"terms": [own_term(1.0)], "kernel": own_kernel(1.0), "init": torch.zeros(D).tolist()}
    after |= {"annealing": lambda t: 0.1 + 0.1 * t, "hidden_layer_sizes": [8]}
    q = interrupted(TINY, normal_score, tmp_path / "fit.ckpt", **before).set_params(**after)
    assert_same_fit(q.fit(normal_score, n_features=D), fitted(TINY, **before))
    assert not q.checkpoint.path.exists()


COUNTER = iter(range(10**9))
UNIDENTIFIED = [
    ("a function among the parameters", {"annealing": lambda t: 0.5 + 1e-9 * next(COUNTER)}, normal_score),
    ("mixing", {"mixing": lambda n, generator: torch.randn(n, D, generator=generator)}, normal_score),
    ("`score_fn`, or", {}, lambda x: -x + 1e-9 * torch.randn_like(x)),
    ("set warm_start=False", {"warm_start": True}, normal_score),
]


@every("name, parameters, score_fn", UNIDENTIFIED)
def test_what_cannot_be_identified_is_refused(name, parameters, score_fn, tmp_path):
    with pytest.raises(ValueError, match=f"`checkpoint` .*{name}"):
        fitted(TINY, score_fn, checkpoint=tmp_path / "fit.ckpt", **parameters)
    assert list(tmp_path.iterdir()) == []


def test_a_search_below_a_folder_is_one_without_checkpoints(tmp_path):
    target, grid = from_score_fn(normal_score, D), {"learning_rate": [1e-3, 1e-2]}
    scores, options = [], {"scoring": neg_ksd_scorer(n_samples=50), "cv": Replicates(2), "n_jobs": 2, "refit": False}
    (tmp_path / "fits").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "fits")
    interrupted(TINY, normal_score, tmp_path / "link", learning_rate=1e-3)  # of another replicate
    for checkpoint in (None, Checkpoint(tmp_path / "link", every=5)):
        with parallel_backend("threading"):
            search = GridSearchCV(clone(TINY).set_params(checkpoint=checkpoint), grid, **options).fit(target)
        scores.append([search.cv_results_[f"split{k}_test_score"] for k in range(2)])
    np.testing.assert_array_equal(*scores)
    assert len(list((tmp_path / "fits").iterdir())) == 1


# Disks and kills


def test_a_checkpoint_that_cannot_be_written_is_told_before_the_fit(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "none" / "x", tmp_path / "file" / "x", f"{tmp_path}/a\0b"):
        q = clone(TINY).set_params(checkpoint=path, whiten="auto")
        with pytest.raises(ValueError, match=r"(?s)`checkpoint` .* cannot be written"):
            q.fit(Misbehaving(raising(AssertionError("too late")), 100), n_features=D)


FULL = OSError(errno.ENOSPC, "no space left")


@every("name, error", [("os.fsync", FULL), ("skksivi.estimators._checkpoint.pack", MemoryError())])
def test_a_disk_that_breaks_during_a_fit_costs_no_fit(name, error, whole, tmp_path):
    save, n_saves = Saved.__call__, iter(range(9))

    def saves_once(saving, progress):
        with patch(name, side_effect=error) if next(n_saves) else nullcontext():
            return save(saving, progress)

    q = clone(TINY).set_params(checkpoint=tmp_path / "fit.ckpt", checkpoint__every=5)
    with patch.object(Saved, "__call__", saves_once), pytest.warns(match="could not be written") as told:
        q.fit(normal_score, n_features=D)
    assert len(told) == 1
    assert_same_fit(q, whole)
    assert list(tmp_path.iterdir()) == []


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
    path, q = tmp_path / "fit.ckpt", KSIVIApproximator(whiten=None, **SETTINGS | {"max_iter": 100})
    whole = clone(q).fit(lambda x: 1 - x, n_features=3)
    settings = {**SETTINGS, "max_iter": 100, "whiten": None}
    script = SCRIPT.format(threads=torch.get_num_threads(), settings=settings, path=str(path))
    for n_writes in (4, 8):
        with subprocess.Popen([sys.executable, "-c", script]) as process:
            written = set()
            while len(written) < n_writes and process.poll() is None:
                written |= {path.stat().st_mtime_ns} if path.exists() else set()
                time.sleep(0.002)
            process.kill()
    n_saved = len(codec.unpack(path.read_bytes(), lambda _: "cpu")["state"]["losses"])
    assert 0 < n_saved < 100
    resumed = q.set_params(checkpoint=Checkpoint(path, every=100)).fit(lambda x: 1 - x, n_features=3)
    assert_same_fit(resumed, whole)
    assert not path.exists()


# Damaged and other files


#: Another object, one without a start, and an estimator; nothing, and a pickle.
OBJECTS = {"hash": 3}, {"hash": "", "start": 3, "state": {}}, baselines.Laplace()
OTHERS = [b"", pickle.dumps(3), *map(codec.pack, OBJECTS)]


def test_other_files_are_refused(tmp_path):
    q = interrupted(TINY, normal_score, tmp_path / "fit.ckpt")
    refused(ValueError, r"fit\.ckpt.* no estimator", skksivi.load, q.checkpoint.path)
    damaged = q.checkpoint.path.read_bytes()[:-9] + b"something"
    for content in (damaged, *OTHERS):
        q.checkpoint.path.write_bytes(content)
        assert_refused(q, r"`checkpoint` .*fit\.ckpt.* is damaged, or not a file of this.* Remove it, or")
