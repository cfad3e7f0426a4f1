r"""Estimators in files that hold no code.

A file is one of the safetensors format: eight bytes with the length of a header, the header in json, and the numbers.
The header names each tensor with its type, shape and place, and has three strings under `__metadata__`:

``format``
    The version of what is described here.
``state``
    The estimator as json. Numbers, strings, None and lists stand for themselves. An object of a class of `KINDS` is
    ``{"is": name, part: value, ...}``, for an estimator its parameters and what it has learned. ``{"is": "tensor"}``
    and ``{"is": "array"}`` stand for the tensor that is named by the way there, as ``family_.mean.A``; with
    ``"transposed": true`` it is stored as its transpose, since products of matrices round by their order in memory.
``sha256``
    Of the whole file, with zeros in the place of these 64 digits. It tells damage, not who wrote the file.

A file is taken for hostile. The state is first put together from tensors without memory, so that every shape is
compared with the others and with the length of the file before the numbers are read; then from the numbers.

A class is one entry of `KINDS`: its parts, what each must hold, and letters for sizes that must agree.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import textwrap
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from skksivi import _affine, _cells, _families, _whitening, annealing, baselines, kernels, mixing
from skksivi._arrays import resolve_device
from skksivi._hksivi import HKSIVIApproximator
from skksivi._ksivi import KSIVIApproximator
from skksivi.base import BaseApproximator, score_of

__all__ = ["load", "save"]

#: Of the files that this version writes and reads.
FORMAT = "1"

#: Bytes of a header, at most, and of a file unless `load` is told otherwise.
MAX_HEADER, MAX_BYTES = 2**20, 2**32

#: Objects and lists within one another, at most.
MAX_DEPTH = 12

#: Types of numbers in a file, by their names there.
DTYPES = {
    "F32": torch.float32,
    "F64": torch.float64,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}

#: The numbers of the state of a Mersenne twister.
N_TWISTER = 624

#: What stands in the place of a checksum while it is computed.
_NO_DIGEST = "0" * 64

#: Parameters that belong to the machine of the fit: a stranger's file must not say where a later fit writes.
LOCAL = {"checkpoint"}


def save(estimator: BaseApproximator, path: str | os.PathLike[str]) -> None:
    """Save an estimator, fitted or not, without pickle.

    The file is written to the side and renamed, so that an earlier one stays whole if something fails.

    Parameters
    ----------
    estimator : KSIVIApproximator, HKSIVIApproximator or an estimator of `skksivi.baselines`
        A parameter that is a function, or an object of a class of your own, cannot be saved. `checkpoint` is left
        out, as are attributes of your own.
    path : path-like
        The file, replaced if it is there.

    Raises
    ------
    TypeError
        `estimator` is not of a class of this package, or a parameter cannot be saved.
    ValueError
        A parameter is out of its range, or what was learned is not finite.
    OSError
        The file cannot be written.

    Examples
    --------
    >>> import skksivi, tempfile
    >>> q = skksivi.baselines.Laplace(random_state=0).fit(lambda x: 3 - x, n_features=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     skksivi.save(q, folder + "/q.safetensors")
    ...     skksivi.load(folder + "/q.safetensors").mean_
    array([3., 3.])
    """
    if not isinstance(estimator, BaseApproximator) or type(estimator) not in NAMES:
        names = ", ".join(name for name, kind in KINDS.items() if issubclass(kind.cls, BaseApproximator))
        raise TypeError(f"`estimator` must be one of {names}, got {type(estimator).__name__}.")
    _replace(Path(os.path.realpath(path)), _to_bytes(estimator))


def load(path: str | os.PathLike[str], *, score_fn: Any = None, max_bytes: int = MAX_BYTES) -> Any:
    """Load an estimator from a file of `save`; whoever wrote the file, nothing in it is run.

    Samples, log-densities, parameters and attributes are those of the saved estimator, bit for bit on the same
    device, and `sample` without a `random_state` goes on where the saved one stood.

    Parameters
    ----------
    path : path-like
    score_fn : callable or Target, default=None
        What the estimator was fitted to; needed by those that draw samples with it, as `HKSIVIApproximator`.
    max_bytes : int, default=2**32
        Refuse a larger file; reading takes up to three times its size in memory.

    Returns
    -------
    estimator : object
        With `device` set to "auto" where the saved one is not present.

    Raises
    ------
    ValueError
        The file was not written by `save`, is damaged, or is of another version.
    OSError
        The file cannot be opened or read.
    """
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):  # opening a pipe would wait for ever
        raise ValueError(f"{str(path)!r} is not a regular file.")
    with open(path, "rb") as file:
        try:
            estimator = _read(file, max_bytes)
        except OSError:
            raise
        except Exception as error:
            known = isinstance(error, ValueError)
            reason = textwrap.shorten(str(error).rstrip(".") if known else f"it holds something else, {error!r}", 300)
            raise ValueError(f"{str(path)!r} is not a whole file of `skksivi.save`: {reason}.") from error
    if score_fn is not None and hasattr(estimator, "n_features_in_"):
        estimator._score = score_of(estimator, score_fn)
    return estimator


def _replace(path: Path, data: bytes) -> None:
    """Write a file in the place of an earlier one, or leave that as it is."""
    aside = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(aside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _to_bytes(estimator: BaseApproximator) -> bytes:
    """Return the file of an estimator, one that can be read."""
    tensors: dict[str, Tensor] = {}
    state = json.dumps(_encode(estimator, "", tensors))
    _decoded(state, tensors, torch.device("cpu"))
    data = safetensors.torch.save(tensors, {"format": FORMAT, "state": state, "sha256": _NO_DIGEST})
    if (length := int.from_bytes(data[:8], "little")) > MAX_HEADER:
        raise ValueError(
            f"The parameters take {length} bytes, more than the {MAX_HEADER} that a file may have for them; make "
            "long lists numpy arrays."
        )
    return data.replace(_digest_field(_NO_DIGEST), _digest_field(_digest(data, _NO_DIGEST)), 1)


def _read(file: BinaryIO, max_bytes: int) -> Any:
    """Return the estimator of a file, whose claims are checked one after the other, the cheapest first."""
    size = os.fstat(file.fileno()).st_size
    if size > max_bytes:
        raise ValueError(f"it has {size} bytes, more than the {max_bytes} of `max_bytes`")
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, MAX_HEADER):
        raise ValueError("it has no header of its length")
    start += file.read(length)
    header = json.loads(start[8:])
    about = header.pop("__metadata__")
    if about["format"] != FORMAT:
        raise ValueError(f"it has format {about['format']}, but this version of skksivi reads format {FORMAT}")
    plan = {name: _planned(entry) for name, entry in header.items()}
    if len(start) + sum(x.numel() * x.itemsize for x in plan.values()) != size:
        raise ValueError("its length is not that of the numbers it should hold")
    device = _usable(_decoded(about["state"], plan, torch.device("meta")).device)

    data = start + file.read(size - len(start))
    if _digest(data, about["sha256"]) != about["sha256"]:
        raise ValueError("its checksum is wrong, so that it is damaged")
    tensors = {name: x.clone() for name, x in safetensors.torch.load(data).items()}  # aligned, for the same rounding
    return _decoded(about["state"], tensors, resolve_device(device)).set_params(device=device)


def _digest_field(digest: str) -> bytes:
    return f'"sha256":"{digest}"'.encode()


def _digest(data: bytes, digest: str) -> str:
    """Return the checksum of a file that holds `digest` as its own."""
    return hashlib.sha256(data.replace(_digest_field(digest), _digest_field(_NO_DIGEST), 1)).hexdigest()


def _planned(entry: dict[str, Any]) -> Tensor:
    """Return a tensor of the type and shape of a header's entry, without memory."""
    return torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device="meta")


def _usable(device: str | torch.device) -> str | torch.device:
    """Return the device, or "auto" where it is not present."""
    try:
        holds_numbers = resolve_device(device).type != "meta"
    except Exception:  # torch imports some kinds of devices, which fails in many ways
        holds_numbers = False
    return device if holds_numbers else "auto"


# ---- values to json and tensors, and back


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return `value` as what json can hold, and put the tensors in it into `tensors`."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if type(value) is list:
        return [_encode(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
    if type(value) is np.ndarray and value.dtype.isnative and value.dtype.kind in "fib":
        return {"is": "array", **_put(torch.from_numpy(np.array(value, order="K")), path, tensors)}
    if isinstance(value, Tensor):
        return {"is": "tensor", **_put(value.detach().cpu(), path, tensors)}
    if type(value) not in NAMES:
        raise _refusal(value, path)
    name = NAMES[type(value)]
    parts = KINDS[name].parts(value)
    return {"is": name, **{part: _encode(parts[part], _joined(path, part), tensors) for part in parts}}


def _decode(node: Any, path: str, tensors: dict[str, Tensor], device: torch.device) -> Any:
    """Return the value of a piece of json, whose tensors are taken out of `tensors`."""
    if path.count(".") >= MAX_DEPTH:
        raise ValueError(f"`{path}` is nested too deep")
    if isinstance(node, list):
        return [_decode(item, f"{path}.{i}", tensors, device) for i, item in enumerate(node)]
    if isinstance(node, float) and not math.isfinite(node):
        raise ValueError(f"`{path}` is not finite")
    if not isinstance(node, dict):
        return node
    name = node.pop("is")
    if name in ("tensor", "array"):
        x = _take(path, tensors, **node)
        return x.to(device) if name == "tensor" else _as_array(x)
    if name not in KINDS:
        raise ValueError(f"`{path}` is of the class {name!r}, which is none of those that can be saved")
    parts = {part: _decode(node[part], _joined(path, part), tensors, device) for part in node}
    return KINDS[name].build(**parts)


def _decoded(state: str, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    """Return the estimator of a state, which must use all tensors."""
    left = dict(tensors)
    estimator = _decode(json.loads(state), "", left, device)
    if not isinstance(estimator, BaseApproximator):
        raise ValueError("it holds no estimator")
    if left:
        raise ValueError(f"it holds `{next(iter(left))}`, which no part of it uses")
    return estimator


def _joined(path: str, part: str) -> str:
    return f"{path}.{part}" if path else part


def _put(x: Tensor, path: str, tensors: dict[str, Tensor]) -> dict[str, bool]:
    """Store a tensor in the order that it has in memory; return whether that is the order of its transpose."""
    if x.dtype not in DTYPES.values():
        raise _refusal(x, path)
    transposed = x.dim() == 2 and not x.is_contiguous() and x.mT.is_contiguous()
    tensors[path] = (x.mT if transposed else x).clone(memory_format=torch.contiguous_format)
    return {"transposed": True} if transposed else {}


def _take(path: str, tensors: dict[str, Tensor], *, transposed: bool = False) -> Tensor:
    if path not in tensors:
        raise ValueError(f"`{path}` is missing")
    x = tensors.pop(path)
    return x.mT if transposed else x


def _as_array(x: Tensor) -> np.ndarray:
    """Return a numpy array, of a tensor without memory one that repeats a single zero."""
    if x.is_meta:
        return np.broadcast_to(torch.zeros((), dtype=x.dtype).numpy(), tuple(x.shape))
    return x.numpy()


def _refusal(value: Any, path: str) -> TypeError:
    what = repr(value) if isinstance(value, float) else f"of type {type(value).__name__}"
    return TypeError(
        f"`{path}` is {what}, which cannot be saved without pickle; call set_params({path.split('.')[0]}=...) with "
        "None, a finite number, a name, an array or an object of this package first, which changes nothing learned."
    )


# ---- what a part must hold

Holds = Callable[[Any], bool]


def _finite(x: Any) -> bool:
    """Tell whether a tensor or an array holds neither NaN nor infinity, without memory of its size."""
    if isinstance(x, Tensor):
        return x.is_meta or x.numel() == 0 or all(bool(extreme.isfinite()) for extreme in x.aminmax())
    without_memory = not any(x.strides)
    return without_memory or x.size == 0 or bool(np.isfinite(x.min()) and np.isfinite(x.max()))


def _tensor(*dtypes: torch.dtype) -> Holds:
    return lambda value: isinstance(value, Tensor) and value.dtype in dtypes and _finite(value)


def _weights(value: Any) -> bool:
    """Tell whether `value` is a tensor that is not empty: an empty one may claim any length for its other side."""
    return _tensor(torch.float32, torch.float64)(value) and value.numel() > 0


def _array(dtype: type, *, finite: bool = True) -> Holds:
    return lambda value: isinstance(value, np.ndarray) and value.dtype == dtype and (not finite or _finite(value))


def _integer(low: int, high: float = math.inf) -> Holds:
    return lambda value: type(value) is int and low <= value <= high


def _instance(*classes: type) -> Holds:
    return lambda value: isinstance(value, classes)


def _or_none(holds: Holds) -> Holds:
    return lambda value: value is None or holds(value)


def _width(value: Any) -> bool:
    """Tell whether `value` is a number whose square is one of torch."""
    return type(value) in (int, float) and 0 <= value <= 1e9


DOUBLES, INDICES = _tensor(torch.float64), _tensor(torch.int64)
COUNT, SIZE = _integer(0), _integer(1)

Sizes = tuple[int | None, ...]

#: What the parts of an object hold, and a letter for each of their sizes: equal letters are equal sizes.
Parts = dict[str, tuple[Holds, str]]


def _checked(parts: dict[str, Any], spec: Parts) -> dict[str, Any]:
    """Return the parts if they are those of the specification.

    Raises
    ------
    ValueError
        One is missing, too many, of another type, or does not fit the others.
    """
    if parts.keys() != spec.keys():
        raise ValueError(f"it lacks or should not hold {sorted(parts.keys() ^ spec.keys())}")
    known: dict[str, int] = {}
    for name, (holds, letters) in spec.items():
        if not holds(parts[name]):
            raise ValueError(f"`{name}` is of another type or out of its range")
        if parts[name] is None or not letters:
            continue
        sizes = _sizes(parts[name])
        if len(sizes) != len(letters):
            raise ValueError(f"`{name}` has {len(sizes)} dimensions, expected {len(letters)}")
        for letter, size in zip(letters, sizes, strict=True):
            if size is not None and known.setdefault(letter, size) != size:
                raise ValueError(f"`{name}` has size {size} where others have {known[letter]}")
    return parts


def _sizes(value: Any) -> Sizes:
    """Return what the sizes of other parts are compared with; None fits all."""
    if isinstance(value, int):
        return (value,)
    return tuple(value.shape) if hasattr(value, "shape") else KINDS[NAMES[type(value)]].sizes(value)


# ---- the kinds of objects


class Kind(NamedTuple):
    """How the objects of a class are taken apart, put together and compared with their neighbours."""

    cls: type
    parts: Callable[[Any], dict[str, Any]]
    build: Callable[..., Any]
    sizes: Callable[[Any], Sizes] = lambda _: ()


def _record(
    cls: type,
    spec: Parts,
    *,
    build: Callable[..., Any] | None = None,
    sizes: Callable[[Any], Sizes] = lambda _: (),
) -> Kind:
    """Return the kind of a class that is made from its attributes."""
    make = build or cls
    return Kind(
        cls,
        lambda value: {name: getattr(value, name) for name in spec},
        lambda **parts: make(**_checked(parts, spec)),
        sizes,
    )


def _estimator(cls: Any, check: Callable[[Any], Any], learned: Parts | None = None) -> Kind:
    """Return the kind of a class with scikit-learn's parameters, and what it has learned once it is fitted."""
    spec = learned or {}
    names = cls().get_params(deep=False).keys() - LOCAL

    def parts(estimator: Any) -> dict[str, Any]:
        parameters = {name: value for name, value in estimator.get_params(deep=False).items() if name in names}
        if not (spec and estimator.__sklearn_is_fitted__()):
            return parameters
        unknown = {name for name in vars(estimator) if name.endswith("_")} - spec.keys()
        if unknown:
            raise ValueError(f"`{min(unknown)}` is not an attribute of {cls.__name__}; delete it to save the rest.")
        return parameters | {name: vars(estimator).get(name) for name in spec}

    def build(**parts: Any) -> Any:
        estimator = cls(**{name: parts.pop(name) for name in names & parts.keys()})
        check(estimator)
        if parts:
            learned = _checked(parts, spec)
            vars(estimator).update({name: value for name, value in learned.items() if value is not None})
        return estimator

    return Kind(cls, parts, build)


def _approximator(cls: Any, learned: Parts) -> Kind:
    """Return the kind of an approximator, which has what the base class learns too."""
    base: Parts = {
        "n_features_in_": (SIZE, "d"),
        "_seed": (_integer(0, 2**32 - 1), ""),
        "_random_state": (_instance(np.random.RandomState), ""),
        "reweighting_": (_or_none(_instance(_cells.Reweighting)), "d"),
    }
    return _estimator(cls, lambda estimator: estimator._validate_params(), base | learned)


def _kernel(cls: Any) -> Kind:
    return _estimator(cls, lambda kernel: kernel._check())


def _tilted(**parts: Any) -> kernels.Tilted:
    tilted = kernels.Tilted(**parts)
    tilted._check()
    return tilted


def _described_mixture(means: Any, scales: Any, weights: Any) -> mixing.GaussianMixture:
    described = mixing.GaussianMixture(means, scales, weights)
    described.build(np.asarray(means).shape[-1])
    return described


def _twister(value: np.random.RandomState) -> dict[str, Any]:
    state: Any = value.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        raise TypeError(f"A RandomState of {state['bit_generator']} cannot be saved; make it RandomState(seed).")
    twister = state["state"]
    return {
        "key": twister["key"].astype(np.int64),
        "position": twister["pos"],
        "has_gauss": state["has_gauss"],
        "gauss": state["gauss"],
    }


def _random_state(**parts: Any) -> np.random.RandomState:
    spec: Parts = {
        "key": (_array(np.int64), "k"),
        "position": (_integer(0, N_TWISTER), ""),  # numpy takes any, and reads memory there
        "has_gauss": (_integer(0, 1), ""),
        "gauss": (_instance(float), ""),
    }
    key, position, has_gauss, gauss = _checked(parts, spec).values()
    random_state = np.random.RandomState(0)
    random_state.set_state(("MT19937", key.astype(np.uint32), position, has_gauss, gauss))
    return random_state


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    linear = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], device="meta")
    linear.weight, linear.bias = nn.Parameter(weight), nn.Parameter(bias)
    return linear


def _perceptron(layers: list[Any]) -> _families.MultilayerPerceptron:
    if not all(a.out_features == b.in_features for a, b in pairwise(layers)):
        raise ValueError("the layers of its network do not fit")
    network = _families.MultilayerPerceptron([], torch.Generator(), torch.float32)
    network.layers.extend(layers)
    return network


def _bootstrap(points: Tensor, first: Tensor, size: Tensor, reach: float) -> _families.Bootstrap:
    n, d = points.shape
    if not (first.is_meta or bool(((first >= 0) & (size >= 1) & (size <= n) & (first <= n - size)).all())):
        raise ValueError("the modes of `points` reach beyond them")
    mixing = _families.Bootstrap(torch.zeros(1, d), [1])
    mixing.points, mixing.first, mixing.size, mixing.reach = points, first, size, reach
    return mixing


def _cells_of(maps: list[Any], log_weights: Tensor) -> _cells.Cells:
    if not maps or not all(isinstance(a, _affine.Affine) and a.m.shape == maps[0].m.shape for a in maps):
        raise ValueError("the maps of its cells do not fit")
    return _cells.Cells(maps, log_weights)


def _mixture(means: Tensor, scales: Tensor, levels: Tensor) -> _families.GaussianMixture:
    built = _families.GaussianMixture(means, scales, torch.ones(len(scales)) / len(scales))
    built.levels = levels
    return built


def _hierarchy(networks: list[Any], a: list[Any], levels: list[Any], **parts: Any) -> _families.Hierarchy:
    scale = torch.ones_like(parts["half_square"])
    T, d = len(levels), len(scale)
    shared = len(networks) < T
    sizes = [(network.layers[0].in_features, network.layers[-1].out_features) for network in networks]
    fits = len(networks) == (1 if shared else T) == len(sizes) and set(sizes) == {(d + shared, d)}
    if not fits or len(a) != T or not all(type(x) is float and 0 < x <= 1 for x in levels):
        raise ValueError("the layers of its hierarchy do not fit")
    if not all(isinstance(value, _families.Constant) and value.value.shape == (d,) for value in a):
        raise ValueError("the scales of its hierarchy do not fit")
    family = _families.Hierarchy(
        networks, mixing=parts["mixing"], levels=levels, initial_scale=scale, min_scale=parts["min_scale"]
    )
    family.half_square, family.log_variances = parts["half_square"], nn.ModuleList(a)
    if len({parameter.dtype for parameter in family.parameters()}) != 1:
        raise ValueError("the parameters of its family are of several types")
    return family.requires_grad_(False)


def _hierarchy_parts(family: _families.Hierarchy) -> dict[str, Any]:
    lists = {"networks": list(family.networks), "a": list(family.log_variances), "levels": list(family.levels)}
    return {**lists, "mixing": family.mixing, "half_square": family.half_square, "min_scale": family.min_scale}


def _checked_hierarchy(**parts: Any) -> _families.Hierarchy:
    spec: Parts = {
        "networks": (_instance(list), ""),
        "a": (_instance(list), ""),
        "levels": (_instance(list), ""),
        "mixing": (_instance(_families.Mixing), "d"),
        "half_square": (_weights, "d"),
        "min_scale": (_width, ""),
    }
    checked = _checked(parts, spec)
    if not all(isinstance(network, _families.MultilayerPerceptron) for network in checked["networks"]):
        raise ValueError("the networks of its hierarchy do not fit")
    return _hierarchy(**checked)


def _family(**parts: Any) -> _families.SemiImplicit:
    family = _families.SemiImplicit(**parts)
    if len({parameter.dtype for parameter in family.parameters()}) != 1:
        raise ValueError("the parameters of its family are of several types")
    return family.requires_grad_(False)


_NETWORK = _instance(_families.MultilayerPerceptron)

#: What a training leaves beside its family.
_TRAINED: Parts = {
    "whitening_": (_instance(_whitening.Whitening), "d"),
    "loss_curve_": (_array(np.float64, finite=False), "t"),
    "ksd_curve_": (_array(np.float64, finite=False), "m"),
    "n_iter_": (COUNT, "t"),
    "best_iter_": (COUNT, ""),
    "engine_": (_instance(str), ""),
}

#: What several baselines learn.
_GAUSSIAN: Parts = {
    "_map": (_instance(_affine.Affine), "d"),
    "mean_": (_array(np.float64), "d"),
    "covariance_": (_array(np.float64), "dd"),
}
_PARTICLES: Parts = {"whitening_": (_instance(_whitening.Whitening), "d"), "particles_": (_array(np.float64), "nd")}
_CHAINS: Parts = {"whitening_": (_instance(_whitening.Whitening), "d"), "chains_": (_array(np.float64), "cnd")}
_CURVE = (_array(np.float64, finite=False), "t")
_ITERATIONS: Parts = {"n_iter_": (COUNT, "t")}
_NORMS: Parts = {"norm_curve_": _CURVE, **_ITERATIONS}
_NETWORKS: Parts = {
    "whitening_": (_instance(_whitening.Whitening), "d"),
    "loss_curve_": _CURVE,
    **_ITERATIONS,
}
_LAYER: Parts = {"family_": (_instance(_families.SemiImplicit), "d"), **_NETWORKS}

#: The classes that a file may name, and how. A new approximator is one more entry.
KINDS: dict[str, Kind] = {
    "tuple": Kind(tuple, lambda value: {"items": list(value)}, lambda items: tuple(items)),
    "device": Kind(torch.device, lambda value: {"name": str(value)}, lambda name: torch.device(name)),
    "RandomState": Kind(np.random.RandomState, _twister, _random_state),
    "kernels.Gaussian": _kernel(kernels.Gaussian),
    "kernels.IMQ": _kernel(kernels.IMQ),
    "kernels.Laplace": _kernel(kernels.Laplace),
    "kernels.Riesz": _kernel(kernels.Riesz),
    "kernels.Tilted": Kind(
        kernels.Tilted,
        lambda kernel: kernel.get_params(deep=False),
        lambda **parts: _tilted(**parts),
    ),
    "annealing.Linear": _estimator(annealing.Linear, lambda schedule: schedule(0.0)),
    "annealing.Cosine": _estimator(annealing.Cosine, lambda schedule: schedule(0.0)),
    "annealing.Geometric": _estimator(annealing.Geometric, lambda schedule: schedule(0.0)),
    "mixing.Normal": _estimator(mixing.Normal, lambda described: described.build(1)),
    "mixing.StudentT": _estimator(mixing.StudentT, lambda described: described.build(1)),
    "mixing.GaussianMixture": Kind(
        mixing.GaussianMixture,
        lambda described: described.get_params(),
        lambda means, scales, weights: _described_mixture(means, scales, weights),
    ),
    "Identity": _record(_affine.Identity, {"m": (DOUBLES, "d")}, sizes=lambda value: value.m.shape),
    "Affine": _record(_affine.Affine, {"m": (DOUBLES, "d"), "L": (DOUBLES, "dd")}, sizes=lambda value: value.m.shape),
    "LowRank": _record(
        _affine.LowRank,
        {"m": (DOUBLES, "d"), "D": (DOUBLES, "d"), "V": (DOUBLES, "dk"), "r": (DOUBLES, "k")},
        sizes=lambda value: value.m.shape,
    ),
    "Whitening": _record(
        _whitening.Whitening,
        {
            "map": (_instance(_affine.Affine, _affine.LowRank, _affine.Identity), "d"),
            "modes": (_array(np.float64), "kd"),
            "weights": (_array(np.float64), "k"),
            "n_score_calls": (COUNT, ""),
            "settled": (_instance(bool), ""),
            "mean": (_or_none(_array(np.float64)), "d"),
            "mean_se": (_or_none(_array(np.float64, finite=False)), "d"),
            "sd": (_or_none(_array(np.float64)), "d"),
        },
        sizes=lambda value: (value.modes.shape[1],),
    ),
    "Cells": Kind(
        _cells.Cells,
        lambda value: {"maps": list(value.maps), "log_weights": value.log_weights},
        lambda **parts: _cells_of(**_checked(parts, {"maps": (_instance(list), ""), "log_weights": (DOUBLES, "k")})),
        lambda value: (len(value.maps), *value.maps[0].m.shape),
    ),
    "Reweighting": _record(
        _cells.Reweighting,
        {"cells": (_instance(_cells.Cells), "kd"), "ratios": (DOUBLES, "k")},
        sizes=lambda value: value.cells.maps[0].m.shape,
    ),
    "StudentT": _record(
        _families.StudentT,
        {"latent_dim": (SIZE, ""), "df": (_width, "")},
        sizes=lambda value: (value.latent_dim,),
    ),
    "GaussianMixture": _record(
        _families.GaussianMixture,
        {"means": (_weights, "kd"), "scales": (_weights, "k"), "levels": (DOUBLES, "l")},
        build=_mixture,
        sizes=lambda value: (value.latent_dim,),
    ),
    "Hierarchy": Kind(
        _families.Hierarchy, _hierarchy_parts, _checked_hierarchy, lambda value: tuple(value.half_square.shape)
    ),
    "Normal": _record(_families.Normal, {"latent_dim": (SIZE, "")}, sizes=lambda value: (value.latent_dim,)),
    "Bootstrap": _record(
        _families.Bootstrap,
        {"points": (_weights, "nd"), "first": (INDICES, "n"), "size": (INDICES, "n"), "reach": (_width, "")},
        build=_bootstrap,
        sizes=lambda value: (value.latent_dim,),
    ),
    "Constant": _record(
        _families.Constant, {"value": (_weights, "o")}, sizes=lambda value: (None, *value.value.shape)
    ),
    "Linear": _record(
        nn.Linear,
        {"weight": (_weights, "oi"), "bias": (_weights, "o")},
        build=_linear,
        sizes=lambda value: (value.in_features, value.out_features),
    ),
    "MultilayerPerceptron": Kind(
        _families.MultilayerPerceptron,
        lambda value: {"layers": list(value.layers)},
        _perceptron,
        lambda value: (value.layers[0].in_features, value.layers[-1].out_features),
    ),
    "LinearSkip": _record(
        _families.LinearSkip,
        {"A": (_weights, "oi"), "network": (_NETWORK, "io")},
        sizes=lambda value: tuple(value.A.mT.shape),
    ),
    "Residual": _record(
        _families.Residual,
        {"unit": (_weights, "o"), "network": (_NETWORK, "oo")},
        sizes=lambda value: (len(value.unit), len(value.unit)),
    ),
    "SemiImplicit": _record(
        _families.SemiImplicit,
        {
            "mean": (_instance(_families.LinearSkip, _families.Residual, _families.MultilayerPerceptron), "zd"),
            "log_variance": (_instance(_families.Constant, _families.MultilayerPerceptron), "zd"),
            "n_features": (SIZE, "d"),
            "mixing": (_instance(_families.Mixing), "z"),
            "min_scale": (_width, ""),
        },
        build=_family,
        sizes=lambda value: (value.n_features,),
    ),
    "KSIVIApproximator": _approximator(
        KSIVIApproximator, {"family_": (_instance(_families.SemiImplicit), "d"), **_TRAINED}
    ),
    "HKSIVIApproximator": _approximator(
        HKSIVIApproximator, {"family_": (_instance(_families.Hierarchy), "d"), **_TRAINED}
    ),
    "baselines.SIVI": _approximator(baselines.SIVI, _LAYER),
    "baselines.SIVISM": _approximator(baselines.SIVISM, _LAYER),
    "baselines.UIVI": _approximator(baselines.UIVI, _LAYER),
    "baselines.HSIVISM": _approximator(
        baselines.HSIVISM, {"family_": (_instance(_families.Hierarchy), "d"), **_NETWORKS}
    ),
    "baselines.Laplace": _approximator(baselines.Laplace, _GAUSSIAN),
    "baselines.MeanFieldVI": _approximator(baselines.MeanFieldVI, _GAUSSIAN | _NORMS),
    "baselines.FullRankVI": _approximator(baselines.FullRankVI, _GAUSSIAN | _NORMS),
    "baselines.BatchAndMatch": _approximator(
        baselines.BatchAndMatch, _GAUSSIAN | _ITERATIONS | {"score_divergence_": (_instance(float), "")}
    ),
    "baselines.SVGD": _approximator(baselines.SVGD, _PARTICLES | _NORMS),
    "baselines.MIED": _approximator(baselines.MIED, _PARTICLES | _ITERATIONS | {"loss_curve_": _CURVE}),
    "baselines.KSDDescent": _approximator(
        baselines.KSDDescent,
        _PARTICLES | _ITERATIONS | {"loss_curve_": (_array(np.float64, finite=False), "e")},
    ),
    "baselines.SGLD": _approximator(baselines.SGLD, _CHAINS | _ITERATIONS),
    "baselines.MALA": _approximator(
        baselines.MALA,
        _CHAINS
        | _ITERATIONS
        | {
            "acceptance_curve_": _CURVE,
            "acceptance_rate_": (_instance(float), ""),
            "step_size_": (_instance(float), ""),
        },
    ),
}

#: The names of the classes.
NAMES = {kind.cls: name for name, kind in KINDS.items()}
