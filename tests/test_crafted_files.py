"""Files of estimators that were crafted: each is refused by name, or what it says can be drawn from."""

import copy
import hashlib
import json
import math
import re
import warnings
from functools import partial

import numpy as np
import pytest
import safetensors.torch
import torch
from approximators import APPROXIMATORS, GaussianTarget, short
from sklearn.base import clone

import skksivi
from skksivi import AmortizedKSIVI, HKSIVIApproximator, KSIVIApproximator, mixing
from skksivi.amortized import DeepSets, _training
from skksivi.baselines import Laplace
from skksivi.families._derived import Reweighted, knows_density
from skksivi.parameters import Network, Pilot, Scale
from skksivi.pilot._affine import Affine, LowRank
from skksivi.pilot._masses import Cells

#: Kinds of fits, beside one of each approximator.
KINDS_OF_FITS = {
    "pilot": KSIVIApproximator(whiten=Pilot(budget=1000)),
    "diagonal": KSIVIApproximator(whiten=Pilot("diagonal", budget=1000)),
    "Student t": KSIVIApproximator(mixing=mixing.StudentT(), whiten="laplace"),
    "mixture": KSIVIApproximator(mixing=mixing.GaussianMixture([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]])),
    "network": KSIVIApproximator(
        scale=Scale("network", floor=0), hidden_layer_sizes=Network(linear_skip=False), whiten="bam"
    ),
    "hierarchy": HKSIVIApproximator(whiten=Pilot(budget=1000), n_layers=2),
    "shared network": HKSIVIApproximator(shared_network=True, mixing="normal", n_layers=2, dtype="float64"),
}
AMORTISED = {
    "amortised": {"n_components": 2},
    "amortised sets": {"summary": DeepSets(2, 3, 4)},
}
NAMES = [*(type(q).__name__ for q in APPROXIMATORS), *KINDS_OF_FITS, *AMORTISED, "low rank", "reweighted"]


def tiny(q):
    sizes = {"max_iter": 3, "batch_size": 8, "hidden_layer_sizes": (4,), "random_state": 0}
    return q.set_params(**{name: value for name, value in sizes.items() if name in q.get_params()})


def amortised(*, n_components="auto", summary=None):
    """A fit to the mean of a normal distribution, for one observation or for sets."""
    options = {"max_score_calls": 1500, "hidden_layer_sizes": (4,), "random_state": 0}
    q = AmortizedKSIVI(n_components=n_components, summary=summary, **options)
    rng = np.random.RandomState(0)
    X = rng.normal(size=(60, 2))
    Y = X + rng.normal(size=X.shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_training, "MOST_EPOCHS", 20)
        if summary is None:
            return q.fit(lambda x, y: y - 2 * x, Y, X, n_features=2)
        return q.fit(
            lambda x, y: torch.cat([s.sum(0, keepdim=True) for s in y]) - 2 * x, list(Y[:, None]), n_features=2
        )


def fitted(name):
    """A fit of a kind, and some of its attributes replaced."""
    if name in AMORTISED:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return amortised(**AMORTISED[name])
    if name in KINDS_OF_FITS:
        q = tiny(clone(KINDS_OF_FITS[name]))
    else:
        q = short(next((q for q in APPROXIMATORS if type(q).__name__ == name), Laplace(random_state=0)))
    if name == "low rank":
        q = tiny(KSIVIApproximator(whiten="laplace"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        q.fit(GaussianTarget())
    if name == "low rank":
        m, one = torch.zeros(2).double(), torch.ones(1).double()
        q.whitening_.map = LowRank(m, m + 2, torch.tensor([[0.6], [0.8]]).double(), 3 * one)
    if name == "reweighted":
        maps = [Affine(torch.tensor([k, 0.0]).double(), torch.eye(2).double()) for k in (-1.0, 1.0)]
        cells = Cells(maps, torch.tensor([0.25, 0.75]).double().log())
        q.sampler_ = Reweighted(q.sampler_, cells, torch.tensor([0.5, 1.5]).double())
    return q


def opened(content):
    """The texts of a file, its state and its tensors."""
    n = int.from_bytes(content[:8], "little")
    about = json.loads(content[8 : 8 + n])["__metadata__"]
    return about, json.loads(about["state"]), safetensors.torch.load(content)


def closed(about, state, tensors):
    """A file of any claims, with their checksum."""
    if not isinstance(state, str):
        state = json.dumps(state)
    content = safetensors.torch.save(tensors, {**about, "state": state, "sha256": "0" * 64})
    digest = hashlib.sha256(content).hexdigest().encode()
    return content.replace(b'"sha256":"' + b"0" * 64, b'"sha256":"' + digest)


def places(node, way=()):
    """All places in a piece of json."""
    if way:
        yield way
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from places(value, (*way, key))


def at(node, way):
    for key in way:
        node = node[key]
    return node


STRANGE = [
    None, True, -1, 0, 1, 3, 1.5, -0.5, 1e-300, 1e300, 10**30, math.nan, math.inf, "", "nothing", [], [1], {},
    {"is": "tensor"}, {"is": "array"}, {"is": ["tensor"]}, {"is": "nothing"}, {"is": "tuple", "items": [0] * 100},
    {"is": "Normal", "latent_dim": 10**12}, {"is": "MultilayerPerceptron", "layers": []}, {"is": "kernels.Gaussian"},
]  # fmt: skip


def changed(state, way, value):
    state = copy.deepcopy(state)
    at(state, way[:-1])[way[-1]] = value
    return state


def without(state, way):
    state = copy.deepcopy(state)
    del at(state, way[:-1])[way[-1]]
    return state


def doubled(state, way):
    """The state as text, in which a key stands twice, of which one value is none."""
    node = copy.deepcopy(state)
    at(node, way[:-1])[f"{way[-1]} too"] = "none"
    return json.dumps(node).replace(f"{way[-1]} too", way[-1])


def strange_tensors(x):
    """Tensors that may stand in the place of x, by what was done to it."""
    first = torch.zeros_like(x).flatten()
    first[:1] = 1
    first = first.view(x.shape).bool()
    yield "zeros", torch.zeros_like(x)
    yield "zero first", x.masked_fill(first, 0)
    yield "negative", -x - (x == 0).to(x.dtype)
    yield "negative first", x.where(~first, -x - 1)
    yield "large", x * 1000
    yield "reversed", x.flatten().flip(0).view(x.shape)
    for number in (1e-300, 1e15, -1e15, 1e31, -1e31, 1e300, -1e300, math.inf, -math.inf, math.nan):
        if x.is_floating_point():
            value = torch.tensor(number, dtype=torch.float64).to(x.dtype)
            yield f"{number} first", x.masked_fill(first, value)
            yield f"all {number}", value.expand(x.shape)
    if not x.is_floating_point():
        for number in (-(2**40), 2**40, 2**63 - 1):
            yield f"{number} first", x.masked_fill(first, number)
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.float16):
        if dtype != x.dtype:
            yield f"{dtype}", x.to(dtype)
    yield "longer", torch.cat([x.flatten(), x.flatten()[:1]])
    yield "shorter", x.flatten()[:-1]
    yield "empty", x.flatten()[:0]
    yield "flat", x.flatten()
    yield "one more row", torch.cat([x, x[:1]])
    yield "one row less", x[:-1]
    yield "one more column", torch.cat([x, x[..., :1]], -1)
    yield "one column less", x[..., :-1]
    yield "transposed", x.mT if x.dim() > 1 else x[None]
    yield "another axis", x[..., None]
    yield "a number", x.flatten()[:1].sum().to(x.dtype)
    yield "no rows", torch.zeros(0, 10**12, dtype=x.dtype)
    yield "no columns", torch.zeros(10**6, 0, dtype=x.dtype)


def crafted_states(about, state, tensors):
    """Files of which the json was changed: what, the part that it is in, and the file, made late."""
    for way in places(state):
        name = ".".join(map(str, way))
        for value in STRANGE:
            if value != at(state, way) or type(value) is not type(at(state, way)):
                yield f"{name} = {value!r:.40}", way, partial(closed, about, changed(state, way, value), tensors)
        yield f"no {name}", way, partial(closed, about, without(state, way), tensors)
        if isinstance(way[-1], str):
            more = changed(state, (*way[:-1], "more"), 1)
            yield f"{name} twice", way[-1:], partial(closed, about, doubled(state, way), tensors)
            yield f"{name} and more", ("more",), partial(closed, about, more, tensors)


def crafted_tensors(about, state, tensors):
    """The same of files of which a tensor was changed."""
    for name, x in tensors.items():
        way = tuple(name.split("."))
        for change, other in strange_tensors(x):
            if other.dtype != x.dtype or other.shape != x.shape or not torch.equal(other, x):
                yield f"{name}: {change}", way, partial(closed, about, state, {**tensors, name: other.contiguous()})
        yield f"no {name}", way, partial(closed, about, state, {k: y for k, y in tensors.items() if k != name})
        for key, y in tensors.items():
            if key != name and (y.dtype, y.shape) != (x.dtype, x.shape):
                yield f"{key} for {name}", way, partial(closed, about, state, {**tensors, name: y.clone()})
    yield "one more", ("more",), partial(closed, about, state, {**tensors, "more": torch.ones(1)})


def wrong(path, content, way):
    """What is wrong with how a file is taken: None if it is refused by name, or can be drawn from."""
    path.write_bytes(content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            q = skksivi.load(path, score_fn=None if b"Conditional" in content else GaussianTarget())
    except ValueError as error:
        message = str(error)
        said = " ".join(re.findall(r"[`'].*?[`']", message.replace(repr(str(path)), "")))
        named = {part for part in way if isinstance(part, str) and part not in ("is", "items")} or set(way)
        told = any(re.search(rf"\b{part}\b", said) for part in named)
        return None if repr(str(path)) in message and told and "\n" not in message else f"not named: {message}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    try:
        return unsound(q, path)
    except Exception as error:
        return f"loaded, then {type(error).__name__}: {error}"


def unsound(q, path):
    """What is wrong with an estimator of a file: it draws, knows its density there, and is saved again."""
    if isinstance(q, AmortizedKSIVI):
        with warnings.catch_warnings():
            return unsound_amortised(q, path)
    if not hasattr(q, "sampler_"):
        return "nothing was loaded"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        X = q.sample(5, random_state=0)
        if X.shape != (5, 2) or not np.isfinite(X).all():
            return "its draws are not finite"
        if not np.isfinite(q.sample(2)).all():
            return "its next draws are not finite"
        if "whitening_" in vars(q) and (reason := unsound_whitening(q.whitening_, torch.as_tensor(X).double())):
            return reason
        if knows_density(q.sampler_) and not np.isfinite(q.score_samples(X[:2], return_std=True)[0]).all():
            return "its density is not finite"
        skksivi.save(q, path)
    return None


def unsound_amortised(q, path):
    """The same of one that takes contexts."""
    if not hasattr(q, "family_"):
        return "nothing was loaded"
    warnings.simplefilter("ignore")  # the context may be far outside
    context = np.ones((2, 2)) if q.summary is not None else q.family_.h_mean.numpy()
    X = q.sample(5, context, random_state=0)
    if X.shape != (5, 2) or not np.isfinite(X).all():
        return "its draws are not finite"
    if not np.isfinite(q.score_samples(X[:2], context)).all():
        return "its density is not finite"
    skksivi.save(q, path)
    return None


def unsound_whitening(whitening, x):
    """What is wrong with coordinates at points x (n, d)."""
    if not whitening.map.unwhiten(whitening.map.whiten(x)).isfinite().all():
        return "its map has no inverse"
    if not np.isfinite(float(whitening.map.log_determinant())):
        return "its map has no density"
    weights, scales = whitening.weights, [a for a in (whitening.sd, whitening.mean_se) if a is not None]
    if (weights < 0).any() or (len(weights) and not np.isclose(weights.sum(), 1)):
        return "its weights are none"
    return "its standard deviations are none" if any((a < 0).any() for a in scales) else None


def all_wrong(name, path, share_of_states, share_of_tensors):
    """The cases that are not taken as they should be, of so many of those that there are, and how many were tried."""
    skksivi.save(fitted(name), path)
    parts, rng = opened(path.read_bytes()), np.random.RandomState(0)
    cases = [case for case in crafted_states(*parts) if rng.rand() < share_of_states]
    cases += [case for case in crafted_tensors(*parts) if rng.rand() < share_of_tensors]
    reasons = {what: wrong(path, make(), way) for what, way, make in cases}
    return {what: reason for what, reason in reasons.items() if reason}, len(cases)


@pytest.mark.parametrize("name", ["Laplace", "reweighted", "SVGD", pytest.param("mixture", marks=pytest.mark.slow)])
def test_some_crafted_files_are_refused_by_name_or_harmless(name, tmp_path, record_property):
    found, n_cases = all_wrong(name, tmp_path / "q", 0.006, 0.12)
    record_property("cases", n_cases)
    record_property("wrong", len(found))
    assert found == {}
    assert n_cases > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_crafted_files_are_refused_by_name_or_harmless(name, tmp_path, record_property):
    found, n_cases = all_wrong(name, tmp_path / "q", 0.012, 0.12)
    record_property("cases", n_cases)
    record_property("wrong", len(found))
    assert found == {}
    assert n_cases > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_crafted_files_are_else_those_of_save(name, tmp_path):
    """Else they would be refused for another reason."""
    skksivi.save(fitted(name), tmp_path / "q")
    about, state, tensors = opened((tmp_path / "q").read_bytes())
    assert wrong(tmp_path / "q", closed(about, state, tensors), ()) is None


@pytest.mark.parametrize(
    "ratios", [[0.0, 0.0], [-1.0, 1.0], [0.0, 1.0], [1e-12, 1.0], [0.0, 20_000.0], [1e300, 1e300]]
)
def test_cells_without_draws_end_in_an_error(ratios, tmp_path):
    """Where hardly a draw would be kept, sampling ends, and a file that would do so is not loaded."""
    q = fitted("reweighted")
    maps = [Affine(torch.tensor([k, 0.0]).double(), torch.eye(2).double()) for k in (0.0, 1000.0)]
    cells = Cells(maps, torch.tensor([0.5, 0.5]).double().log())
    q.sampler_ = Reweighted(q.sampler_.sampler, cells, torch.tensor(ratios, dtype=torch.float64))
    with pytest.raises((ValueError, RuntimeError)):
        skksivi.save(q, tmp_path / "q") or skksivi.load(tmp_path / "q")
    if min(ratios) >= 0 and 0 < max(ratios) < 1e6:
        with pytest.raises(RuntimeError, match="Hardly any draw of the fit lies in the regions"):
            q.sample(3)
