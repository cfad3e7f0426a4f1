"""Files of estimators: what is saved comes back, and what is not a whole file of `save` is refused."""

import copy
import hashlib
import itertools
import json
import math
import os
import pickle
import re
import resource
import subprocess
import sys
from pathlib import Path

import joblib
import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from approximators import APPROXIMATORS, short
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

import skksivi
from skksivi import HKSIVIApproximator, KSIVIApproximator, KSIVIClassifier, KSIVIRegressor, kernels, mixing, modes
from skksivi._codec import KINDS, NAMES
from skksivi.annealing import Cosine, Linear
from skksivi.baselines import (
    HSIVISM,
    MALA,
    MIED,
    SGLD,
    SIVI,
    SIVISM,
    SVGD,
    UIVI,
    BatchAndMatch,
    FullRankVI,
    KSDDescent,
    Laplace,
    MeanFieldVI,
)
from skksivi.families._derived import Reweighted
from skksivi.families._samplers import HasDensity, Layers
from skksivi.parameters import Adam, Network, Pilot, Scale
from skksivi.pilot._affine import Affine
from skksivi.pilot._masses import Cells
from skksivi.targets import Multimodal

MEAN = torch.tensor([1.0, -2.0])
FACTOR = np.array([[1.5, 0.0], [0.4, 0.6]])


def score_fn(x):
    return (MEAN.to(x) - x) / (1 + 0.1 * x.square())


class HeavyScore:
    """A score that can be pickled, as hierarchies need, which sample by it."""

    def __init__(self, d):
        self.mean = torch.linspace(1, -2, d)

    def __call__(self, x):
        return (self.mean.to(x) - x) / (1 + 0.1 * x.square())


def ksivi(**parameters):
    return KSIVIApproximator(**{"max_iter": 50, "hidden_layer_sizes": (7, 5), "random_state": 3} | parameters)


def hksivi(**parameters):
    settings = {
        "n_layers": 2,
        "max_iter": 30,
        "hidden_layer_sizes": (7, 5),
        "whiten": Pilot(budget=1000),
        "random_state": 3,
    }
    return HKSIVIApproximator(**settings | parameters)


ESTIMATORS = {
    "pilot": ksivi(whiten=Pilot(budget=1000), annealing=Linear(start=0.5)),
    "tails": ksivi(whiten=Pilot(budget=1000)),
    "no whitening": ksivi(whiten=None),
    "laplace": ksivi(whiten="laplace", scale="network", learning_rate=5e-3),
    "bam": ksivi(whiten="bam", dtype="float64", hidden_layer_sizes=Network([6], linear_skip=False)),
    "given": ksivi(whiten=(MEAN.numpy(), np.asfortranarray(FACTOR)), latent_dim=3, early_stopping=1e-3),
    "tensors": ksivi(whiten=(MEAN.double(), torch.as_tensor(FACTOR).mT.contiguous().mT), optimizer=Adam(ema=None)),
    "kernel": ksivi(kernel=kernels.IMQ(bandwidth=1.25, exponent=0.25), bandwidth=None, whiten=None),
    "riesz": ksivi(kernel=kernels.Riesz(norm="l1"), annealing=Linear(start=0.3), device=torch.device("cpu")),
    "numpy numbers": ksivi(
        max_iter=np.int64(20), learning_rate=np.float32(0.01), scale=Scale(floor=np.float64(0.001))
    ),
    "RandomState": ksivi(random_state=np.random.RandomState(5), init=[0.5, 0.5]),
    "many features": ksivi(whiten="laplace", hidden_layer_sizes=(3,), batch_size=4, max_iter=3),  # a low-rank map
    "Student mixing": ksivi(mixing=mixing.StudentT(df=4.0), whiten="laplace", annealing=Cosine(start=0.5)),
    "mixture, tilted": ksivi(
        mixing=mixing.GaussianMixture([[-1.0, 0.0], [1.0, 0.5]], scales=np.array([1.0, 0.5]), weights=[1, 3]),
        kernel=kernels.Tilted(kernels.IMQ(), exponent=-0.25),
        bandwidth=0.8,
        whiten="laplace",
    ),
    "hierarchy": hksivi(),
    "shared hierarchy": hksivi(shared_network=True, mixing="normal", bridge="cosine", whiten="laplace"),
    "SIVI": SIVI(n_auxiliary=10, max_iter=20, hidden_layer_sizes=(7,), linear_skip=True, random_state=3),
    "SIVI-SM": SIVISM(critic_hidden_layer_sizes=(5,), max_iter=20, hidden_layer_sizes=(7,), whiten="laplace"),
    "UIVI": UIVI(max_iter=5, hidden_layer_sizes=[7], dtype="float64", annealing=Linear(), random_state=3),
    "HSIVI-SM": HSIVISM(n_layers=2, critic_hidden_layer_sizes=(5,), max_iter=20, whiten="laplace", random_state=3),
    "Laplace": Laplace(random_state=1),
    "Laplace in float32": Laplace(random_state=None, dtype="float32", max_iter=7),
    "mean field": MeanFieldVI(max_iter=20, random_state=1),
    "full rank": FullRankVI(max_iter=20, dtype="float32", init=[0.5, 0.5], random_state=1),
    "batch and match": BatchAndMatch(max_iter=20, random_state=1),
    "SVGD": SVGD(kernel=kernels.Gaussian(bandwidth=0.7), n_particles=30, max_iter=20, random_state=1),
    "KSD descent": KSDDescent(n_particles=20, max_iter=10, init=np.linspace(-1, 1, 40).reshape(20, 2)),
    "MIED": MIED(n_particles=20, max_iter=10, whiten=(MEAN.numpy(), FACTOR), random_state=1),
    "SGLD": SGLD(n_chains=5, n_warmup=3, n_draws=4, step_size=(0.1, 1.0, 0.5), whiten=None, random_state=1),
    "MALA": MALA(n_chains=5, n_warmup=3, n_draws=4, whiten="bam", dtype="float32", random_state=1),
}
ESTIMATORS |= {type(q).__name__: short(q) for q in APPROXIMATORS if type(q) not in map(type, ESTIMATORS.values())}
N_FEATURES = {"many features": 1002}

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{told}:sklearn.exceptions.ConvergenceWarning")
    for told in ("The draws are too", "L-BFGS has stopped")
]


class Lazily(dict):
    """Values made by a function of their keys, when they are first asked for."""

    def __init__(self, make):
        self.make = make

    def __missing__(self, key):
        self[key] = self.make(key)
        return self[key]


@pytest.fixture(scope="module")
def fitted():
    def fit(name):
        d = N_FEATURES.get(name, 2)
        return clone(ESTIMATORS[name]).fit(HeavyScore(d), n_features=d)

    return Lazily(fit)


@pytest.fixture
def fitted_one(fitted, name):
    return fitted[name]


@pytest.fixture(scope="module")
def saved(fitted, tmp_path_factory):
    """Files of some of them, as bytes."""
    path = tmp_path_factory.mktemp("saved") / "q.safetensors"

    def content(q):
        skksivi.save(q, path)
        return path.read_bytes()

    names = ("pilot", "laplace", "no whitening", "Laplace")
    return {name: content(fitted[name]) for name in names}


def by_file(q, folder):
    skksivi.save(q, folder / "q.safetensors")
    score_fn = HeavyScore(q.n_features_in_) if hasattr(q, "sampler_") and isinstance(q.sampler_, Layers) else None
    return skksivi.load(folder / "q.safetensors", score_fn=score_fn)


def by_joblib(q, folder):
    joblib.dump(q, folder / "q.joblib")
    return joblib.load(folder / "q.joblib")


def by_pickle(q, folder):
    return pickle.loads(pickle.dumps(q))  # noqa: S301


def assert_same(a, b):
    """Compare values of any kind, bit for bit."""
    assert type(a) is type(b) or not isinstance(b, np.ndarray | torch.Tensor | tuple | list)
    if isinstance(a, torch.nn.Module):
        assert_same(vars(a), vars(b))
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.stride(), a.requires_grad) == (b.dtype, b.stride(), b.requires_grad)
        assert torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        np.testing.assert_array_equal(a, b, strict=True)
    elif isinstance(a, np.random.RandomState):
        assert_same(a.get_state(), b.get_state())
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a.keys() - {"score"}:  # of a hierarchy, which is given anew
            assert_same(a[name], b[name])
    elif isinstance(a, tuple | list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif hasattr(a, "__dict__") and not isinstance(a, type):
        assert_same(vars(a), vars(b))
    else:
        assert a == b or (a != a and b != b)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(pytest.param(name, by_file, marks=[pytest.mark.slow] * (name in N_FEATURES)) for name in ESTIMATORS),
        *itertools.product(["tails", "hierarchy", "SVGD"], [by_pickle, by_joblib]),
    ],
)
def test_a_fitted_estimator_comes_back_bit_for_bit(fitted_one, name, way, tmp_path):
    q = copy.deepcopy(fitted_one)
    q.sample(5)
    loaded = way(q, tmp_path)
    X = q.sample(300, random_state=0)
    np.testing.assert_array_equal(loaded.sample(300, random_state=0), X, strict=True)
    if isinstance(q.sampler_, HasDensity):
        np.testing.assert_array_equal(loaded.score_samples(X[:2]), q.score_samples(X[:2]), strict=True)
    if q.n_features_in_ == 2:
        np.testing.assert_array_equal(loaded.score(score_fn), q.score(score_fn))
    assert_same(loaded.get_params(), q.get_params())
    assert_same(loaded, q)
    for n in (7, 1, 4):  # its own stream goes on
        np.testing.assert_array_equal(loaded.sample(n), q.sample(n))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_unfitted_estimator_comes_back(name, tmp_path):
    loaded = by_file(ESTIMATORS[name], tmp_path)
    assert_same(loaded.get_params(), ESTIMATORS[name].get_params())
    with pytest.raises(NotFittedError):
        loaded.sample()


def test_every_approximator_can_be_saved():
    own = [skksivi.KSIVIApproximator, skksivi.HKSIVIApproximator]
    public = [*own, *(getattr(skksivi.baselines, name) for name in skksivi.baselines.__all__)]
    assert {*public, *kernels.KERNELS.values()} <= NAMES.keys()
    assert {type(q) for q in ESTIMATORS.values()} == set(public)
    assert {kind.cls: name for name, kind in KINDS.items()} == NAMES


def test_a_loaded_estimator_can_be_fitted_again(fitted, tmp_path):
    q = by_file(fitted["given"], tmp_path)
    expected = clone(ESTIMATORS["given"]).fit(score_fn, n_features=2).sample(9)
    np.testing.assert_array_equal(q.fit(score_fn, n_features=2).sample(9), expected)
    q.set_params(warm_start=True).fit(score_fn, n_features=2)
    assert len(q.loss_curve_) == 100


def test_a_device_that_is_not_here_becomes_auto(fitted, tmp_path):
    for device in ("cuda:93", torch.device("cuda:93"), "meta"):
        q = copy.deepcopy(fitted["laplace"]).set_params(device=device)
        loaded = by_file(q, tmp_path)
        assert loaded.device == "auto"
        np.testing.assert_array_equal(loaded.sample(5, random_state=0), fitted["laplace"].sample(5, random_state=0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_fit_of_a_gpu_loads_on_a_cpu(tmp_path):
    q = ksivi(whiten=Pilot(budget=1000), device="cuda").fit(score_fn, n_features=2)
    np.testing.assert_array_equal(by_file(q, tmp_path).sample(50, random_state=0), q.sample(50, random_state=0))
    script = (
        "import skksivi, sys; q = skksivi.load(sys.argv[1]); print(q.device, q.sample(4).shape, q.family_.mean.A)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "q.safetensors")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.stdout.startswith("auto (4, 2)")
    assert "cuda" not in done.stdout


def test_no_global_state_changes(saved, tmp_path):
    path = tmp_path / "q"
    path.write_bytes(saved["pilot"])
    before = torch.get_rng_state().tolist(), str(np.random.get_state()), torch.get_default_dtype()
    skksivi.save(skksivi.load(path), path)
    assert (torch.get_rng_state().tolist(), str(np.random.get_state()), torch.get_default_dtype()) == before


def test_the_file_is_safetensors_that_others_can_open(fitted, tmp_path):
    skksivi.save(fitted["laplace"], tmp_path / "q")
    tensors = safetensors.torch.load_file(tmp_path / "q")
    assert torch.equal(tensors["sampler_.family.mean.A"], fitted["laplace"].family_.mean.A)


# ---- saving


class OwnKernel(kernels.Gaussian):
    pass


class OwnApproximator(Laplace):
    pass


REFUSED = {
    "a function": (ksivi(annealing=lambda progress: 1.0), TypeError, r"`annealing` is of type function.*set_params"),
    "a kernel of one's own": (ksivi(kernel=OwnKernel()), TypeError, "`kernel` is of type OwnKernel"),
    "an infinite number": (ksivi(learning_rate=math.inf), TypeError, "`learning_rate` is inf"),
    "an array of objects": (ksivi(init=np.array([None, 1])), TypeError, "`init` is of type ndarray"),
    "complex numbers": (ksivi(init=torch.ones(2, dtype=torch.complex64)), TypeError, "`init` is of type Tensor"),
    "another generator": (
        Laplace(random_state=np.random.RandomState(np.random.PCG64())),
        TypeError,
        "RandomState of PCG64",
    ),
    "a parameter out of range": (ksivi(batch_size=1), ValueError, "batch_size"),
    "a bandwidth out of range": (ksivi(kernel=kernels.Gaussian(bandwidth=-1.0)), ValueError, "bandwidth"),
    "endless parameters": (ksivi(init=[0.123456789] * 100_000), ValueError, "long lists numpy arrays"),
    "a class of one's own": (OwnApproximator(), TypeError, "must be one of KSIVIApproximator, HKSIVIApproximator, "),
    "a kernel": (kernels.Gaussian(), TypeError, "got Gaussian"),
    "an instance of nothing": (None, TypeError, "got NoneType"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_saved_is_refused_and_the_old_file_stays(case, tmp_path):
    q, error, message = REFUSED[case]
    path = tmp_path / "q.safetensors"
    path.write_text("old")
    with pytest.raises(error, match=message):
        skksivi.save(q, path)
    assert os.listdir(tmp_path) == ["q.safetensors"]
    assert path.read_text() == "old"


def test_a_fit_with_numbers_that_are_not_finite_is_refused(fitted, tmp_path):
    q = copy.deepcopy(fitted["laplace"])
    q.family_.mean.A[0, 0] = math.nan
    with pytest.raises(ValueError, match="`A` is of another type or out of its range"):
        skksivi.save(q, tmp_path / "q")


def test_learned_attributes_that_are_not_known_are_not_lost_in_silence(fitted, tmp_path):
    q = copy.deepcopy(fitted["Laplace"])
    q.extra_ = 3
    with pytest.raises(ValueError, match="`extra_` is not an attribute of Laplace"):
        skksivi.save(q, tmp_path / "q")


def test_the_place_of_a_checkpoint_is_left_out(fitted, tmp_path):
    q = copy.deepcopy(fitted["laplace"]).set_params(checkpoint=tmp_path / "there")
    assert by_file(q, tmp_path).checkpoint is None


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_an_error_while_writing_leaves_the_old_file(fitted, saved, step, tmp_path, monkeypatch):
    path = tmp_path / "q.safetensors"
    path.write_bytes(saved["Laplace"])

    def fails(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(os, step, fails)
    with pytest.raises(OSError, match="disk is full"):
        skksivi.save(fitted["laplace"], path)
    assert path.read_bytes() == saved["Laplace"]
    assert os.listdir(tmp_path) == ["q.safetensors"]


def test_a_score_that_is_not_needed_is_not_kept(fitted, tmp_path):
    skksivi.save(fitted["laplace"], tmp_path / "q")
    assert pickle.dumps(skksivi.load(tmp_path / "q", score_fn=lambda x: -x))


def test_saving_goes_through_links_and_heeds_the_umask(fitted, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "q")
    skksivi.save(fitted["Laplace"], tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "plain").touch()
    assert (tmp_path / "there" / "q").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_file_system_problems_are_os_errors(fitted, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        skksivi.load(tmp_path / "nowhere")
    with pytest.raises(IsADirectoryError):
        skksivi.load(tmp_path)
    with pytest.raises(OSError, match="nowhere"):
        skksivi.save(fitted["Laplace"], tmp_path / "nowhere" / "q")
    with pytest.raises(IsADirectoryError):
        skksivi.save(fitted["Laplace"], tmp_path)


# ---- damage: none of it is loaded


def refused(content, folder):
    """Load a file with this content; return the sentence that refuses it."""
    path = folder / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(repr(str(path)))) as caught:
        skksivi.load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400 + len(str(path))
    return message


def times(n):
    """So many times the examples of other property tests: these are quick, and what they look for is rare."""
    return settings(max_examples=n * settings.get_profile(settings.get_current_profile_name()).max_examples)


which = st.sampled_from(["laplace", "pilot", "Laplace"])
places = st.one_of(st.floats(0, 1, exclude_max=True), st.integers(0, 3000))


def place(where, content):
    """A place in the file: a share of its length, or one near its start, where the header is."""
    return int(where * len(content)) if isinstance(where, float) else min(where, len(content) - 1)


@times(6)
@given(which, places, st.integers(0, 7))
def test_a_flipped_bit_is_found(saved, tmp_path, name, where, bit):
    content = bytearray(saved[name])
    content[place(where, content)] ^= 1 << bit
    refused(content, tmp_path)


@times(3)
@given(which, places)
def test_a_truncated_file_is_found(saved, tmp_path, name, where):
    refused(saved[name][: place(where, saved[name])], tmp_path)


@times(3)
@given(which, places, st.binary(min_size=1, max_size=40), st.booleans())
def test_bytes_put_in_or_over_are_found(saved, tmp_path, name, where, extra, over):
    content = saved[name]
    i = place(where, content)
    changed = content[:i] + extra + content[i + over * len(extra) :]
    if changed != content:
        refused(changed, tmp_path)


@times(2)
@given(st.binary(max_size=200), st.booleans())
def test_noise_is_refused(tmp_path, noise, with_length):
    refused(len(noise).to_bytes(8, "little") + noise if with_length else noise, tmp_path)


# ---- malice: the checksum is right


def opened(content):
    """The header, the state and the numbers of a file."""
    n = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + n])
    return header, json.loads(header["__metadata__"]["state"]), content[8 + n :]


def closed(header, state, payload):
    """A file of any claims, with their checksum."""
    state = state if isinstance(state, str) else json.dumps(state)
    header = header | {"__metadata__": {**header["__metadata__"], "state": state, "sha256": "0" * 64}}
    text = json.dumps(header, separators=(",", ":")).encode()
    content = len(text).to_bytes(8, "little") + text + payload
    digest = hashlib.sha256(content).hexdigest().encode()
    return content.replace(b'"sha256":"' + b"0" * 64, b'"sha256":"' + digest)


def put(node, way, value):
    """Put a value at a place of a piece of json, as "sampler_.family.mean.A"."""
    *path, last = way.split(".")
    for key in path:
        node = node[int(key) if key.isdigit() else key]
    node[last] = value


def with_state(content, changes):
    header, state, payload = opened(content)
    for way, value in changes.items():
        put(state, way, value)
    return closed(header, state, payload)


def with_text(content, old, new):
    header, _, payload = opened(content)
    text = header["__metadata__"]["state"]
    assert old in text
    return closed(header, text.replace(old, new), payload)


def with_whole_state(content, text):
    header, _, payload = opened(content)
    return closed(header, text, payload)


def with_header(content, way, value):
    header, state, payload = opened(content)
    put(header, way, value)
    return closed(header, state, payload)


def with_tensors(content, tensors, changes):
    """The file with other tensors, None for none, whose shapes in the header are right."""
    kept = {name: x for name, x in (safetensors.torch.load(content) | tensors).items() if x is not None}
    header, _, payload = opened(safetensors.torch.save(kept, {"state": "{}", "format": "2"}))
    return with_state(closed(header, opened(content)[1], payload), changes)


def with_start(content, name, number):
    """The file with another first number of a tensor."""
    x = safetensors.torch.load(content)[name]
    x.view(-1)[0] = number
    return with_tensors(content, {name: x}, {})


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def test_the_files_of_malice_are_else_those_of_save(saved, tmp_path):
    for content in saved.values():
        for same in (closed(*opened(content)), with_tensors(content, {}, {})):
            (tmp_path / "q").write_bytes(same)
            skksivi.load(tmp_path / "q")


WHOLE_FILES = {
    "empty": (b"", "no header"),
    "header longer than the file": ((2**62).to_bytes(8, "little") + b"{}" * 99, "no header"),
    "header longer than allowed": ((2**21).to_bytes(8, "little") + b" " * 2**22, "no header"),
    "a pickle": (pickle.dumps([1, 2] * 100), "no header"),
    "nested lists": ((2**20).to_bytes(8, "little") + b"[" * 2**20, "RecursionError"),
    "a list": ((2).to_bytes(8, "little") + b"[]", "something else"),
    "plain safetensors": (safetensors.torch.save({"a": torch.ones(2)}), "__metadata__"),
    "safetensors of others": (safetensors.torch.save({"a": torch.ones(2)}, {"format": "pt"}), "format pt, but"),
}

MIXING = "sampler_.family.mixing"

#: A place in the state of the fit by "laplace", what is put there, and what the refusal says.
STATES = {
    "another class": ("is", "os.system", "'os.system', which is not of a class"),
    "a class for a class": ("sampler_.family.is", "Whitening", "it lacks or should not hold"),
    "another estimator": ("is", "baselines.Laplace", "it lacks or should not hold"),
    "an unknown parameter": ("evil", 1, "should not hold.*evil"),
    "a method": ("_sample", "x", "should not hold.*_sample"),
    "a checkpoint": ("checkpoint", "/etc/passwd", "should not hold.*checkpoint"),
    "a type of text": ("dtype", "S1000000000", "dtype"),
    "a parameter out of range": ("batch_size", -1, "batch_size"),
    "an infinite parameter": ("learning_rate", math.inf, "`learning_rate` is not finite"),
    "NaN": ("sampler_.family.min_scale", math.nan, "`sampler_.family.min_scale` is not finite"),
    "a negative scale": ("sampler_.family.min_scale", -1.0, "`min_scale`"),
    "a scale beyond float32": ("sampler_.family.min_scale", 1e308, "`min_scale`"),
    "an object as a parameter": ("kernel", {"is": "Normal", "latent_dim": 2}, "kernel"),
    "a nested parameter": ("init", nested(400), "`init.0.0.0.*` is nested too deep"),
    "no features": ("n_features_in_", 0, "n_features_in_"),
    "true features": ("n_features_in_", True, "n_features_in_"),
    "many features": ("n_features_in_", 10**12, "`n_features_in_` has size|has size 1000000000000 where"),
    "other features of the family": ("sampler_.family.n_features", 3, "n_features"),
    "a long z": (f"{MIXING}.latent_dim", 10**12, "mixing"),
    "no mean": ("sampler_.family.mean", None, "`mean`"),
    "no layers": ("sampler_.family.mean.network.layers", [], "`layers` is of another type"),
    "a tensor for an array": ("loss_curve_", {"is": "tensor"}, "`loss_curve_`"),
    "a transposed vector": ("loss_curve_.transposed", True, "dimension|mT"),
    "a tensor that is not there": ("early_stopping", {"is": "tensor"}, "`early_stopping`: it is missing"),
    "no curve": ("ksd_curve_", None, "`ksd_curve_`"),
    "a long seed": ("_seed", 2**32, "_seed"),
    "a stream beyond its state": ("_random_state.position", 10**6, "position"),
    "a stream before its state": ("_random_state.position", -1, "position"),
}

#: The same of the header.
HEADERS = {
    "another version": ("__metadata__.format", "1", "format 1, but this version of skksivi reads format 2"),
    "a huge tensor": ("loss_curve_.shape", [2**40], "its length does not"),
    "a tensor beyond integers": ("loss_curve_.shape", [2**62, 2**62], "overflow"),
    "a negative length": ("loss_curve_.shape", [-50], "negative"),
    "another shape": ("loss_curve_.shape", [25, 2], "2 dimensions, expected 1"),
    "an endless shape": ("loss_curve_.shape", [1] * 99_999 + [50], "dimension"),
    "offsets elsewhere": ("loss_curve_.data_offsets", [10**15, 10**15 + 400], "SafetensorError"),
    "overlapping offsets": ("loss_curve_.data_offsets", [0, 400], "SafetensorError"),
    "an unknown type": ("loss_curve_.dtype", "F8_E4M3", "F8_E4M3"),
}

LAYER = {"is": "Linear", "weight": {"is": "tensor"}, "bias": {"is": "tensor"}}
NETWORK = [f"sampler_.family.mean.network.layers.{i}.{part}" for i in range(3) for part in ("weight", "bias")]
EMPTY_LAYERS = {
    "sampler_.family.mean.layers.0.weight": torch.empty(0, 10**12),
    "sampler_.family.mean.layers.0.bias": torch.empty(0),
    "sampler_.family.mean.layers.1.weight": torch.empty(2, 0),
    "sampler_.family.mean.layers.1.bias": torch.zeros(2),
}

#: What takes more: a function of the files of `saved`.
FILES = {
    "a number for the state": (lambda f: with_whole_state(f["laplace"], "5"), "no estimator"),
    "a kernel": (lambda f: with_whole_state(f["laplace"], '{"is": "kernels.Gaussian"}'), "no estimator"),
    "nested state": (lambda f: with_whole_state(f["laplace"], '{"a":' * 100_000), "RecursionError"),
    "an endless integer": (lambda f: with_text(f["laplace"], '"max_iter": 50', '"max_iter": ' + "9" * 9999), "4300"),
    "a number beyond floats": (lambda f: with_text(f["laplace"], "0.005", "1e999"), "`learning_rate` is not finite"),
    "a tensor used by none": (
        lambda f: with_tensors(f["laplace"], {"more": torch.ones(2)}, {}),
        "no part of it uses",
    ),
    "NaN in the map": (lambda f: with_start(f["laplace"], "sampler_.whitening.map.m", math.nan), "`m`"),
    "infinity in the family": (lambda f: with_start(f["laplace"], "sampler_.family.mean.A", math.inf), "`A`"),
    "infinity in the moments": (lambda f: with_start(f["Laplace"], "sampler_.map.m", -math.inf), "`m`"),
    "levels beyond one": (lambda f: with_start(f["pilot"], f"{MIXING}.levels", 2.0), "`levels` is"),
    "levels that fall": (
        lambda f: with_tensors(f["pilot"], {f"{MIXING}.levels": torch.tensor([0.7, 0.3, 0.2]).double()}, {}),
        "sums of as many weights",
    ),
    "a factor that is none": (lambda f: with_start(f["pilot"], f"{MIXING}.factors", 0.0), "`factors` is"),
    "layers that do not fit": (
        lambda f: with_tensors(f["laplace"], {NETWORK[2]: torch.zeros(5, 6)}, {}),
        "layers of its network",
    ),
    "a map of other features": (
        lambda f: with_tensors(f["laplace"], {"sampler_.whitening.map.L": torch.eye(3).double()}, {}),
        "`L` has size",
    ),
    "a map without dimensions": (
        lambda f: with_tensors(f["laplace"], {"sampler_.whitening.map.m": torch.tensor(1.0).double()}, {}),
        "`m` has 0 dim",
    ),
    "two types": (
        lambda f: with_tensors(f["laplace"], {"sampler_.family.mean.A": torch.eye(2).double()}, {}),
        "several types",
    ),
    "integers": (
        lambda f: with_tensors(f["laplace"], {"sampler_.family.mean.A": torch.ones(2, 2).long()}, {}),
        "`A`",
    ),
    "a long z without weights": (
        lambda f: with_tensors(
            f["no whitening"],
            {**dict.fromkeys(["sampler_.family.mean.A", *NETWORK]), **EMPTY_LAYERS},
            {
                f"{MIXING}.latent_dim": 10**12,
                "sampler_.family.mean": {"is": "MultilayerPerceptron", "layers": [LAYER, LAYER]},
            },
        ),
        "`weight`",
    ),
}


@pytest.mark.parametrize("case", WHOLE_FILES)
def test_other_files_are_refused(case, tmp_path):
    content, message = WHOLE_FILES[case]
    assert re.search(message, refused(content, tmp_path))


@pytest.mark.parametrize("case", STATES)
def test_a_state_that_lies_is_refused(saved, case, tmp_path):
    way, value, message = STATES[case]
    assert re.search(message, refused(with_state(saved["laplace"], {way: value}), tmp_path))


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_lies_is_refused(saved, case, tmp_path):
    way, value, message = HEADERS[case]
    assert re.search(message, refused(with_header(saved["laplace"], way, value), tmp_path))


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_lies_is_refused(saved, case, tmp_path):
    make, message = FILES[case]
    assert re.search(message, refused(make(saved), tmp_path))


OTHER = {"is": "Normal", "latent_dim": 2}

#: What is put instead of lists in a hierarchy, and what the refusal says.
LAYERS = {
    "a network too few": ("networks", lambda networks: networks[1:], "the layers of its hierarchy do not fit"),
    "no network": ("networks", lambda networks: [OTHER, *networks[1:]], "`networks` is of another type"),
    "a scale too few": ("a", lambda a: a[1:], "the layers of its hierarchy do not fit"),
    "no scale": ("a", lambda a: [OTHER, *a[1:]], "`a` is of another type"),
    "a level above one": ("levels", lambda levels: [2.0, *levels[1:]], "the layers of its hierarchy do not fit"),
}


@pytest.mark.parametrize("case", LAYERS)
def test_a_hierarchy_that_lies_is_refused(fitted, case, tmp_path):
    name, change, message = LAYERS[case]
    skksivi.save(fitted["hierarchy"], tmp_path / "q")
    header, state, payload = opened((tmp_path / "q").read_bytes())
    family = state["sampler_"]["family"]
    family[name] = change(family[name])
    assert message in refused(closed(header, state, payload), tmp_path)


def test_a_hierarchy_of_two_types_is_refused(fitted, tmp_path):
    skksivi.save(fitted["hierarchy"], tmp_path / "q")
    double = {"sampler_.family.a.0.value": torch.zeros(2).double()}
    assert "several types" in refused(with_tensors((tmp_path / "q").read_bytes(), double, {}), tmp_path)


def test_the_cells_of_other_weights_have_maps_that_fit(tmp_path):
    target = Multimodal()
    q = Laplace(random_state=0).fit(target)
    cells = Cells([Affine(torch.zeros(2).double(), torch.eye(2).double())], torch.zeros(1).double())
    q.sampler_ = Reweighted(q.sampler_, cells, torch.ones(1).double())
    skksivi.save(q, tmp_path / "q")
    header, state, payload = opened((tmp_path / "q").read_bytes())
    state["sampler_"]["cells"]["maps"] = []
    assert "`maps` is of another type" in refused(closed(header, state, payload), tmp_path)


def ways(node, way=()):
    """All places in a piece of json."""
    if way:
        yield way
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from ways(value, (*way, key))


values = st.one_of(
    st.sampled_from(
        [None, True, -1, 0, 1, 2, 3, 10**30, 1e308, -0.5, math.nan, math.inf, "", "x", "cuda", "float64"]
    ),
    st.sampled_from([{}, {"is": "tensor"}, {"is": "array"}, {"is": ["tensor"]}, {"is": "tuple", "items": "ab"}]),
    st.builds(lambda name: {"is": name}, st.sampled_from(list(KINDS))),
    st.lists(st.integers(-3, 2**70), max_size=3),
)


@times(8)
@given(which, st.integers(0, 10**6), values, st.booleans(), st.booleans())
def test_any_edit_is_refused_or_gives_an_estimator_that_works(saved, tmp_path, name, i, value, in_state, removes):
    header, state, payload = opened(saved[name])
    root = state if in_state else header
    found = [way for way in ways(root) if way[0] != "__metadata__"]
    *path, last = found[i % len(found)]
    node = root
    for key in path:
        node = node[key]
    if removes:
        del node[last]
    else:
        node[last] = value
    content = closed(header, state, payload)
    (tmp_path / "q").write_bytes(content)
    try:
        q = skksivi.load(tmp_path / "q")
    except ValueError:
        return
    X = q.sample(3, random_state=0)
    assert X.shape == (3, 2)
    q.sample(2)
    if name == "Laplace":
        q.score_samples(np.zeros((2, 2)))


def with_huge(content, name, changes):
    """The file with 8 GiB of zeros as its last tensor, instead of another if there is one; and its length."""
    header, state, payload = opened(content)
    begin, end = header.pop(name, {"data_offsets": (0, 0)})["data_offsets"]
    payload = payload[:begin] + payload[end:]
    for entry in header.values():
        if entry.get("data_offsets", [0])[0] >= end > 0:
            entry["data_offsets"] = [offset - (end - begin) for offset in entry["data_offsets"]]
    header[name] = {"dtype": "F64", "shape": [2**30], "data_offsets": [len(payload), len(payload) + 2**33]}
    start = closed(header, state | changes, payload)
    return start, len(start) + 2**33


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("loss_curve_", {}),  # of 50 iterations
        ("init", {"init": {"is": "array"}, "n_iter_": 51}),
        ("sampler_.family.mean.A", {}),
        ("more", {}),
    ],
)
def test_claims_are_compared_before_memory_is_spent(saved, tmp_path, name, changes):
    start, length = with_huge(saved["laplace"], name, changes)
    path = tmp_path / "q"
    path.write_bytes(start)
    os.truncate(path, length)
    with pytest.raises(ValueError, match="more than the 4294967296 of `max_bytes`"):
        skksivi.load(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"where `\w+` has|dimensions|no part of it uses|out of its range"):
        skksivi.load(path, max_bytes=2**40)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


def test_a_pipe_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match="not a regular file"):
            skksivi.load(path)


def test_a_hierarchy_needs_its_score_to_draw(fitted, tmp_path):
    q = fitted["hierarchy"]
    skksivi.save(q, tmp_path / "q")
    with pytest.raises(ValueError, match="score_fn="):
        skksivi.load(tmp_path / "q").sample()
    with pytest.raises(ValueError, match="3 features, expected 2"):
        skksivi.load(tmp_path / "q", score_fn=Banana3())


class Banana3:
    n_features = 3

    def score_fn(self, x):
        return -x


def test_new_weights_of_modes_are_kept(tmp_path):
    target = Multimodal()
    q = KSIVIApproximator(whiten=Pilot(budget=1000), random_state=3).fit(target)
    modes(q, target, reweight=True, random_state=0)
    loaded = by_file(q, tmp_path)
    np.testing.assert_array_equal(loaded.sample(99, random_state=0), q.sample(99, random_state=0))
    np.testing.assert_array_equal(loaded.score_samples(np.eye(2)), q.score_samples(np.eye(2)))


MODEL = ksivi(max_iter=5, whiten="laplace")
DATA = np.random.RandomState(0).normal(size=(30, 2))
LABELS = np.array(["low", "middle", "high"])[np.arange(30) % 3]
PREDICTORS = {
    "process": (KSIVIRegressor(random_state=0), DATA[:, 0] ** 2),
    "linear": (KSIVIRegressor(model="linear", approximator=MODEL), DATA[:, 0]),
    "network": (KSIVIRegressor(model="network", n_hidden=3, prior_precision=None, approximator=MODEL), DATA[:, 0]),
    "columns": (KSIVIRegressor(model="linear", approximator=MODEL), DATA),
    "two classes": (KSIVIClassifier(approximator=MODEL), DATA[:, 0] > 0),
    "names": (KSIVIClassifier(approximator=MODEL, class_weight="balanced"), LABELS),
}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("name", PREDICTORS)
def test_a_predictor_predicts_the_same_after_saving(name, tmp_path):
    unfitted, y = PREDICTORS[name]
    X = pd.DataFrame(DATA, columns=["a", "b"])
    model = clone(unfitted).fit(X, y)
    skksivi.save(model, tmp_path / "model")
    loaded = skksivi.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    assert loaded.predict(X).dtype == model.predict(X).dtype
    np.testing.assert_array_equal(loaded.feature_names_in_, model.feature_names_in_)
    if isinstance(model, KSIVIRegressor):
        np.testing.assert_array_equal(loaded.sample_y(X, 3), model.sample_y(X, 3))
        np.testing.assert_array_equal(loaded.log_predictive_density(X, y), model.log_predictive_density(X, y))
    else:
        np.testing.assert_array_equal(loaded.predict_proba(X), model.predict_proba(X))
    assert str(loaded) == str(model)
    skksivi.save(unfitted, tmp_path / "model")
    with pytest.raises(NotFittedError):
        skksivi.load(tmp_path / "model").predict(X)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("name", PREDICTORS)
def test_a_predictor_that_does_not_fit_together_is_refused(name, tmp_path):
    unfitted, y = PREDICTORS[name]
    model = clone(unfitted).fit(DATA, y)
    for part, value in {"draws_": np.ones((4, 1)), "_X_mean": np.ones(5), "_X_scale": np.full(2, np.nan)}.items():
        wrong = copy.deepcopy(model)
        one = wrong.estimators_[0] if name == "columns" else wrong
        setattr(one, part, value)
        with pytest.raises(ValueError, match=r"draws_|_X_"):
            skksivi.save(wrong, tmp_path / "model")
