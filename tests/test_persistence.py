"""Files of estimators: what is saved comes back bit for bit, and what is not a whole file of `save` is refused."""

import copy
import errno
import functools
import json
import os
import pickle
import re
import subprocess
import sys
import warnings
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from approximators import APPROXIMATORS, short
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted

import skksivi
from skksivi import AmortizedKSIVI, HKSIVIApproximator, KSIVIApproximator, kernels, mixing, refine
from skksivi._utils import codec
from skksivi.amortized import DeepSets, _training
from skksivi.annealing import Linear
from skksivi.baselines import Laplace
from skksivi.parameters import Adam, Network, Pilot, Scale
from skksivi.predictors import KSIVIClassifier, KSIVIRegressor
from skksivi.targets import Banana, from_score_fn
from skksivi.terms import Entropic

MEAN = torch.tensor([1.0, -2.0])
FACTOR = np.array([[1.5, 0.0], [0.4, 0.6]])


def score_fn(x):
    return (torch.linspace(1, -2, x.shape[1]).to(x) - x) / (1 + 0.1 * x.square())


OWN = {"max_iter": 5, "batch_size": 8, "hidden_layer_sizes": (4,), "random_state": 3}


def ksivi(**parameters):
    return KSIVIApproximator(**OWN | parameters)


def hksivi(**parameters):
    return HKSIVIApproximator(**OWN | {"n_layers": 2} | parameters)


#: Approximators of every kind of sampler, family, coordinates and parameter, and each one with its own parameters.
ESTIMATORS = {
    "pilot": ksivi(whiten=Pilot(budget=1000), annealing=Linear(start=0.5), terms=(Entropic(0.1),)),
    "tails": ksivi(whiten=Pilot(budget=1000), method="start"),
    "laplace": ksivi(whiten="laplace", scale="network", learning_rate=5e-3),
    "no skip": ksivi(whiten="bam", dtype="float64", hidden_layer_sizes=Network([6], linear_skip=False)),
    "given": ksivi(whiten=(MEAN.numpy(), np.asfortranarray(FACTOR)), latent_dim=3, early_stopping=1e-3),
    "tensors and numpy numbers": ksivi(
        whiten=(MEAN.double(), torch.as_tensor(FACTOR).mT.contiguous().mT), optimizer=Adam(ema=None),
        max_iter=np.int64(3), learning_rate=np.float32(0.01), scale=Scale(floor=np.float64(0.001)),
    ),
    "kernel": ksivi(kernel=kernels.IMQ(bandwidth=1.25, exponent=0.25), bandwidth=None, whiten=None),
    "RandomState": ksivi(random_state=np.random.RandomState(5), init=[0.5, 0.5], device=torch.device("cpu")),
    "many features": ksivi(whiten="laplace", hidden_layer_sizes=(3,), batch_size=4, max_iter=3),  # a low-rank map
    "Student mixing": ksivi(mixing=mixing.StudentT(df=4.0), whiten="laplace", annealing=Linear(start=0.5)),
    "mixture": ksivi(mixing=mixing.GaussianMixture([[-1.0, 0.0], [1.0, 0.5]], scales=[1.0, 0.5], weights=[1, 3])),
    "hierarchy": hksivi(whiten=Pilot(budget=1000)),
    "hierarchy from N(0, I)": hksivi(mixing="normal", bridge="cosine", whiten="laplace"),
    **{type(q).__name__: short(q) for q in APPROXIMATORS},
}  # fmt: skip


def amortised(**parameters):
    q = AmortizedKSIVI(max_score_calls=1500, hidden_layer_sizes=(4,), random_state=0, **parameters)
    X = np.random.RandomState(0).normal(size=(60, 2))
    Y = X + np.random.RandomState(1).normal(size=X.shape)
    with patch.object(_training, "MOST_STEPS", 20):
        if q.summary is None:
            return q.fit(lambda x, y: y - 2 * x, Y, X, n_features=2)
        return q.fit(lambda x, y: torch.cat(list(y)) - 2 * x, list(Y[:, None]), n_features=2)


def regression(**options):
    return KSIVIRegressor(approximator=ksivi(whiten="laplace"), **options)


DATA = np.random.RandomState(0).normal(size=(30, 2))
WEIGHTS = {"low": 2.0, "middle": 1.0, "high": 1.0}
LABELS = np.array(["low", "middle", "high"])[np.arange(30) % 3]
FRAME = pd.DataFrame(DATA, columns=["a", "b"])

#: Fits that are made from others, or have another interface.
MADE = {
    "refined": lambda: refine(Laplace(random_state=0).fit(torch.neg, n_features=2), torch.neg, random_state=0),
    "amortised": lambda: amortised(n_components=2),
    "amortised sets": lambda: amortised(summary=DeepSets(2, 3, 4)),
    "process": lambda: KSIVIRegressor(random_state=0).fit(FRAME, DATA[:, 0] ** 2),
    "network": lambda: regression(model="network", n_hidden=3).fit(DATA, DATA[:, 0]),
    "columns": lambda: regression(model="linear").fit(DATA, DATA),
    "names": lambda: KSIVIClassifier(approximator=ksivi(whiten="laplace"), class_weight=WEIGHTS).fit(FRAME, LABELS),
}
SLOW = {"many features", "process", "amortised sets"}
MEMBERS = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in (*ESTIMATORS, *MADE)]

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@functools.cache
def fitted(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        d = 1002 if name == "many features" else 2  # whose map has a low rank
        return MADE[name]() if name in MADE else clone(ESTIMATORS[name]).fit(score_fn, n_features=d)


def by_file(q, folder, **options):
    skksivi.save(q, folder / "q.safetensors")
    return skksivi.load(folder / "q.safetensors", **options)


def content_of(q, folder):
    skksivi.save(q, folder / "content")
    return (folder / "content").read_bytes()


def header_of(content):
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]


def checksum_of(q, folder):
    """The checksum of all that is saved of an estimator."""
    return header_of(content_of(q, folder))["checksum"]


def outputs(q, X):
    """What an estimator draws and predicts, with and without its own stream."""
    if isinstance(q, KSIVIClassifier):
        return [q.predict(X), q.predict_proba(X)]
    if isinstance(q, KSIVIRegressor):
        return [q.predict(X), q.sample_y(X, 3)]
    if isinstance(q, AmortizedKSIVI):
        context = np.ones((2, 2)) if q.summary is not None else [0.0, 1.0]
        return [q.sample(9, context, random_state=0), q.sample(2, context), q.score_samples(np.eye(2), context)]
    drawn = [q.sample(99, random_state=0), q.sample(5), q.sample(1)]
    try:
        return [*drawn, q.score_samples(drawn[0][:2])]
    except TypeError:  # it has no density
        return drawn


@pytest.mark.parametrize("name", MEMBERS)
def test_what_is_saved_comes_back_bit_for_bit(name, tmp_path):
    q = copy.deepcopy(fitted(name))
    X = FRAME if hasattr(q, "feature_names_in_") else DATA
    outputs(q, X)  # a stream under way
    needs_score = name in ("hierarchy", "hierarchy from N(0, I)", "HKSIVIApproximator", "HSIVISM")
    given = {"score_fn": torch.neg} if name == "refined" else {"score_fn": score_fn} if needs_score else {}
    loaded = by_file(q, tmp_path, **given)
    assert vars(loaded).keys() == vars(q).keys() - {"approximator_", "target_"}
    assert checksum_of(loaded, tmp_path) == checksum_of(q, tmp_path)
    for a, b in zip(outputs(loaded, X), outputs(q, X), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def test_an_unfitted_estimator_comes_back_and_a_fitted_one_can_be_fitted_again(tmp_path):
    for q in (ESTIMATORS["kernel"], ESTIMATORS["RandomState"], AmortizedKSIVI(summary=DeepSets(2), n_components=3)):
        loaded = by_file(q, tmp_path, score_fn=score_fn)
        assert checksum_of(loaded, tmp_path) == checksum_of(q, tmp_path)
        with pytest.raises(NotFittedError):
            check_is_fitted(loaded)
    q = by_file(fitted("given"), tmp_path)
    again = clone(q).fit(score_fn, n_features=2)
    np.testing.assert_array_equal(q.fit(score_fn, n_features=2).sample(9), again.sample(9))
    q.set_params(warm_start=True).fit(score_fn, n_features=2)
    assert len(q.loss_curve_) == 10


def test_what_belongs_to_a_machine_or_a_user_is_left_out(tmp_path):
    for device in ("cuda:93", torch.device("cuda:93"), "meta"):
        q = copy.deepcopy(fitted("laplace")).set_params(device=device, checkpoint=tmp_path / "there")
        q.note, q.kernel_ = "mine", OwnKernel()
        loaded = by_file(q, tmp_path)
        assert (loaded.device, loaded.checkpoint) == ("auto", None)
        assert not {"note", "kernel_"} & vars(loaded).keys()
        np.testing.assert_array_equal(loaded.sample(5, random_state=0), fitted("laplace").sample(5, random_state=0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_fit_of_a_gpu_loads_on_a_cpu(tmp_path):
    q = ksivi(whiten=Pilot(budget=1000), device="cuda").fit(score_fn, n_features=2)
    np.testing.assert_array_equal(by_file(q, tmp_path).sample(50, random_state=0), q.sample(50, random_state=0))
    script = "import skksivi, sys; q = skksivi.load(sys.argv[1]); print(q.device, q.sample(4).shape, q.whitening_)"
    command, hidden = [sys.executable, "-c", script, tmp_path / "q.safetensors"], {"CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.check_output(command, text=True, env=os.environ | hidden)
    assert found.startswith("auto (4, 2)")
    assert "cuda" not in found


def test_what_draws_by_the_score_needs_it(tmp_path):
    for name in ("hierarchy", "refined"):
        with pytest.raises(ValueError, match="score_fn="):
            by_file(fitted(name), tmp_path).sample()
    with pytest.raises(ValueError, match="3 features, expected 2"):
        by_file(fitted("hierarchy"), tmp_path, score_fn=from_score_fn(torch.neg, 3))
    assert pickle.dumps(by_file(fitted("laplace"), tmp_path, score_fn=lambda x: -x))  # one that does not keeps none


# Saving


class OwnKernel(kernels.Gaussian):
    pass


class OwnApproximator(Laplace):
    pass


def lost():
    q = Laplace(random_state=0).fit(torch.neg, n_features=2)
    q.sampler_.map.L[0, 0] = torch.nan
    return q


FULL = OSError(errno.ENOSPC, "No space left on device")
REFUSED = [
    (ksivi(annealing=lambda progress: 1.0), TypeError, r"`annealing` is of type function.*set_params"),
    (ksivi(kernel=OwnKernel()), TypeError, "`kernel` is of type OwnKernel"),
    (ksivi(init=np.array([None, 1])), TypeError, "`init` is of type ndarray"),
    (ksivi(init=torch.ones(2, dtype=torch.complex64)), TypeError, "`init` is of type Tensor"),
    (AmortizedKSIVI(summary=torch.nn.Tanh()), TypeError, "`summary` is of type Tanh"),
    (Laplace(random_state=np.random.RandomState(np.random.PCG64())), ValueError, "MT19937"),
    (ksivi(learning_rate=np.inf), ValueError, "learning_rate"),
    (ksivi(init=[0.123456789] * 100_000), ValueError, "long lists numpy arrays"),
    (lost(), ValueError, "not finite"),
    (OwnApproximator(), TypeError, "must be KSIVIApproximator.* got OwnApprox"),
    (Banana(), TypeError, "got .*Banana.* what was fitted to a target"),
    (Laplace, TypeError, "fitted or not; got <class"),
    ("fsync", OSError, "No space left on device: '.*q'"),
    ("replace", OSError, "No space left on device: '.*q'"),
]


def test_what_cannot_be_saved_is_refused_and_the_old_file_stays(tmp_path):
    (tmp_path / "q").write_text("old")
    for q, error, message in REFUSED:
        broken = patch.object(os, q, side_effect=FULL) if isinstance(q, str) else nullcontext()
        with broken, pytest.raises(error, match=message):
            skksivi.save(Laplace() if isinstance(q, str) else q, tmp_path / "q")
        assert (os.listdir(tmp_path), (tmp_path / "q").read_text()) == (["q"], "old")


def test_files_are_regular_ones_and_errors_name_them(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "there").touch(mode=0o640)
    (tmp_path / "link").symlink_to(tmp_path / "there")
    save = partial(skksivi.save, Laplace())
    for call, error, path in [
        (skksivi.load, FileNotFoundError, tmp_path / "nowhere"),
        (skksivi.load, ValueError, tmp_path),
        (skksivi.load, ValueError, tmp_path / "pipe"),
        (skksivi.load, ValueError, "/dev/zero"),
        (save, FileNotFoundError, tmp_path / "nowhere" / "q"),
        (save, FileExistsError, tmp_path),
        (save, FileExistsError, tmp_path / "pipe"),
        (save, TypeError, 5),
    ]:
        with pytest.raises(error, match=str(path) if path != 5 else "os.PathLike object, not int"):
            call(path)
    assert (tmp_path / "pipe").is_fifo()
    save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").stat().st_mode & 0o777 == 0o640
    with pytest.raises(ValueError, match="no regular file of at most 99 bytes"):
        skksivi.load(tmp_path / "there", max_bytes=99)
    os.truncate(tmp_path / "there", 2**33)
    with pytest.raises(ValueError, match="8589934592 bytes is no regular file of at most 4294967296"):
        skksivi.load(tmp_path / "there")


# Other files


def refused(content, folder, **options):
    """Load a file with this content; return the sentence that refuses it."""
    path = folder / "bad"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(repr(str(path)))) as caught:
        skksivi.load(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert "emove" not in message  # it may be the user's
    return message


def test_damage_at_any_place_is_found(tmp_path):
    content = content_of(fitted("pilot"), tmp_path)
    step = len(content) // 60
    for i in range(0, len(content), step):
        refused(content[:i] + bytes([content[i] ^ (1 << i % 8)]) + content[i + 1 :], tmp_path)
    for i in range(0, len(content), 5 * step):
        refused(content[:i], tmp_path)
        refused(content[:i] + b"more" + content[i:], tmp_path)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("bomb",)


OTHERS = [
    (b"", "no header of its length"),
    (b"clinic,rate\nA,0.3\n", "no header of its length"),
    ((2**62).to_bytes(8, "little") + b"{}" * 99, "no header of its length"),
    ((2**21).to_bytes(8, "little") + b" " * 2**22, "no header of its length"),
    (pickle.dumps(Bomb()), "joblib.load reads a pickle, if you trust"),
    ((2**20).to_bytes(8, "little") + b"[" * 2**20, "damaged, or not a file of this version"),
    (safetensors.torch.save({"a": torch.ones(2)}, {"format": "pt"}), "it has format pt, and this one reads 5"),
    (safetensors.torch.save({}, {"format": "4"}), r"format 4, and this one reads 5 \(skksivi 0.1.0 reads 4\)"),
]


def test_other_files_are_refused_and_nothing_in_them_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content, message in OTHERS:
        assert re.search(message, refused(content, tmp_path))
        assert not Path("bomb").exists()


# Malice: the checksum is right


def opened(content):
    return json.loads(header_of(content)["state"]), safetensors.torch.load(content)


def closed(state, tensors):
    return safetensors.torch.save(tensors, {"format": "5", "state": json.dumps(state), "checksum": "right"})


def places(node):
    """All places in a piece of json."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield node, key
        yield from places(value)


#: A place in the state of the fit "given", what is put there, and what the refusal says.
STATES = [
    ("is", "os.system", "'os.system', which is not of a class"),
    ("is", "targets._toy:Banana", "'targets._toy:Banana', which is not of a class"),
    ("is", "kernels:resolve_kernel", "which is not of a class"),
    ("state.kernel", {"is": "kernels:Kernel", "state": {}}, "abstract"),
    ("is", "coordinates._whitening:Whitening", "other parts"),
    ("state._sample", "x", "other parts"),
    ("state.sampler_.state.family.state._forward_hooks", None, "other parts"),
    ("state.checkpoint", "here", "checkpoint"),
    ("state.sampler_.state.family.state.min_scale", float("nan"), "not finite"),
    ("state.sampler_.state.family.state.min_scale", 10**8, "larger than the file"),
    ("state.early_stopping", {"is": "tensor", "transposed": False}, "early_stopping"),
    ("state._random_state.state.state.state.items", [["key", [0] * 624], ["pos", 10**6]], "position"),
    ("no rows", torch.empty(0, 10**12), "larger than the file"),
    ("no columns", torch.empty(10**12, 0), "larger than the file"),
]


def test_a_state_that_lies_is_refused(tmp_path):
    content = content_of(fitted("given"), tmp_path)
    for way, value, message in STATES:
        state, tensors = opened(content)
        *path, last = way.split(".")
        if isinstance(value, torch.Tensor):
            tensors[way] = value
        else:
            functools.reduce(dict.get, path, state)[last] = value
        with patch.object(codec, "_checksum", lambda *_: "right"):
            assert re.search(message, refused(closed(state, tensors), tmp_path)), way


def test_a_state_is_not_nested_beyond_recursion(tmp_path):
    state = '{"is": "baselines._gaussian:Laplace", "state": {"init": %s}}' % ("[" * 100_000 + "]" * 100_000)
    about = {"format": "5", "state": state, "checksum": codec._checksum(state, {})}
    assert "RecursionError" in refused(safetensors.torch.save({}, about), tmp_path)


TENSOR = {"is": "tensor", "transposed": True}
STRANGE = [None, True, -1, 1e300, "nothing", [], TENSOR, {"is": ["tensor"]}, {"is": "dict", "state": [1]}]


@pytest.mark.parametrize("name", ["pilot", "hierarchy", "names"])
def test_a_crafted_file_is_refused_by_name_or_opened(name, tmp_path):
    """One place is changed, or one tensor is another; nothing but a ValueError may come of it."""
    content, rng = content_of(fitted(name), tmp_path), np.random.RandomState(0)
    for k in range(20):
        state, tensors = opened(content)
        found = list(places(state))
        node, key = found[rng.randint(len(found))]
        node[key] = STRANGE[k % len(STRANGE)]
        changed = sorted(tensors)[rng.randint(len(tensors))]
        tensors[changed] = [tensors[changed], tensors[changed].flatten()[:-1].clone(), tensors[changed].long()][k % 3]
        (tmp_path / "bad").write_bytes(closed(state, tensors))
        with patch.object(codec, "_checksum", lambda *_: "right"), suppress(ValueError):
            skksivi.load(tmp_path / "bad")
