"""Files of objects of known classes, which hold no code.

A file is one of the safetensors format: a header in json, then numbers. The header has three texts:

``format``
    The version of what is described here.
``state``
    The object as json. Numbers, strings, None and lists stand for themselves. An object of a known class is
    ``{"is": name, part: value, ...}``, of a module all that it holds. ``{"is": "tensor"}``, ``"parameter"``,
    ``"array"`` and ``"text"`` stand for the tensor that is named by the way there, as ``family_.mean.A``; with
    ``"transposed": true`` it is stored as its transpose, since products of matrices round by their order in memory.
``checksum``
    Of the state and the tensors. It detects damage, not who wrote the file.

A file is taken for hostile: it cannot be longer than the caller allows, no size in it is larger than the file, and
nothing is called but the constructors of the known classes. That a checksum is right does not make a fit of it: what
does not fit together fails where it is drawn from.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import joblib
import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

#: Of the files that this version writes and reads.
FORMAT = "4"

#: Largest number of bytes of a file, unless the caller says otherwise, and of a header.
MAX_BYTES, MAX_HEADER = 2**32, 2**20

T = TypeVar("T")


class Kind(NamedTuple):
    """A class that a file may name, and how its objects are taken apart and put together."""

    cls: type
    parts: Callable[[Any], Mapping[str, object]]
    build: Callable[..., object]


#: The classes that a file may name, by their names there.
Kinds = Mapping[str, Kind]


def kind_of(cls: type) -> Kind:
    """Return a module by all that it holds, another class by the parameters of its constructor."""
    if issubclass(cls, nn.Module):
        return Kind(cls, _parts_of_module, partial(_module, cls))
    names = list(signature(cls).parameters)
    return Kind(cls, lambda value: {name: getattr(value, name) for name in names}, cls)


def _parts_of_module(value: nn.Module) -> dict[str, object]:
    own = {name: part for name, part in vars(value).items() if name[0] != "_" and name != "training"}
    return own | {
        name: part for of in ("_parameters", "_buffers", "_modules") for name, part in vars(value)[of].items()
    }


def _module(cls: type[nn.Module], **parts: Any) -> nn.Module:  # noqa: ANN401
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    for name, part in parts.items():
        is_buffer = isinstance(part, Tensor) and not isinstance(part, nn.Parameter)
        (module.register_buffer if is_buffer else module.__setattr__)(name, part)
    return module


# Classes of other libraries


def _parts_of_twister(value: np.random.RandomState) -> dict[str, object]:
    state = value.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        raise TypeError(f"A RandomState of {state['bit_generator']} cannot be saved; make it RandomState(seed).")
    twister, gauss = state["state"], {name: state[name] for name in ("has_gauss", "gauss")}
    return {"key": twister["key"].astype(np.int64), "position": twister["pos"], **gauss}


def _random_state(key: np.ndarray, position: int, has_gauss: int, gauss: float) -> np.random.RandomState:
    if not 0 <= position <= len(key):  # numpy takes any, and reads memory there
        raise ValueError("the position of a random state is out of its range")
    random_state = np.random.RandomState(0)
    random_state.set_state(("MT19937", key.astype(np.uint32), position, has_gauss, gauss))
    return random_state


def _parts_of_dict(value: dict[object, object]) -> dict[str, object]:
    return {"keys": list(value), "values": list(value.values())}


FOREIGN = {
    "tuple": Kind(tuple, lambda value: {"items": list(value)}, lambda items: tuple(items)),
    "dict": Kind(dict, _parts_of_dict, lambda keys, values: dict(zip(keys, values, strict=True))),
    "device": Kind(torch.device, lambda value: {"name": str(value)}, lambda name: torch.device(name)),
    "RandomState": Kind(np.random.RandomState, _parts_of_twister, _random_state),
    **{cls.__name__: kind_of(cls) for cls in (nn.Linear, nn.ModuleList, nn.Sequential, nn.ELU, nn.SiLU)},
}


# Objects to bytes


def pack(value: object, kinds: Kinds) -> bytes:
    """Return the content of a file.

    Raises
    ------
    TypeError
        A part is of no known class.
    ValueError
        What is not a tensor or an array takes too much place.
    """
    tensors: dict[str, Tensor] = {}
    known = {kind.cls: (name, kind) for name, kind in {**FOREIGN, **kinds}.items()}
    state = json.dumps(_encode(value, "", tensors, known))
    about = {"format": FORMAT, "state": state, "checksum": _digest(state, tensors)}
    content = safetensors.torch.save(tensors, about)
    if (length := int.from_bytes(content[:8], "little")) > MAX_HEADER:
        raise ValueError(
            f"The parameters take {length} bytes, more than the {MAX_HEADER} that a file may have for them; make "
            "long lists numpy arrays."
        )
    return content


def _encode(value: object, path: str, tensors: dict[str, Tensor], known: Mapping[type, tuple[str, Kind]]) -> object:
    """Return `value` in a form for json, and put the tensors in it into `tensors`."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [_encode(item, f"{path}.{i}", tensors, known) for i, item in enumerate(value)]
    if isinstance(value, np.ndarray):
        return _encode_array(value, path, tensors)
    if isinstance(value, Tensor):
        how = (
            {"is": "parameter", "trains": value.requires_grad}
            if isinstance(value, nn.Parameter)
            else {"is": "tensor"}
        )
        return {**how, **_put(value.detach().cpu(), path, tensors)}
    if type(value) not in known:
        raise _refusal(value, path)
    name, kind = known[type(value)]
    parts = kind.parts(value).items()
    return {"is": name, **{part: _encode(x, f"{path}.{part}".lstrip("."), tensors, known) for part, x in parts}}


def _encode_array(value: np.ndarray, path: str, tensors: dict[str, Tensor]) -> object:
    if value.dtype.kind in "OU" and value.ndim == 1 and all(isinstance(item, str) for item in value):
        codes = torch.from_numpy(np.ascontiguousarray(value.astype(str))[:, None].view(np.int32))
        return {"is": "text", "type": value.dtype.kind, **_put(codes, path, tensors)}
    if value.dtype.kind not in "fib" or not value.dtype.isnative:
        raise _refusal(value, path)
    return {"is": "array", **_put(torch.from_numpy(np.array(value, order="K")), path, tensors)}


def _put(x: Tensor, path: str, tensors: dict[str, Tensor]) -> dict[str, bool]:
    """Store a tensor in the order that it has in memory; return whether that is the order of its transpose."""
    if x.is_complex():
        raise _refusal(x, path)
    transposed = x.dim() == 2 and not x.is_contiguous() and x.mT.is_contiguous()
    tensors[path] = (x.mT if transposed else x).clone(memory_format=torch.contiguous_format)
    return {"transposed": True} if transposed else {}


def _refusal(value: object, path: str) -> TypeError:
    return TypeError(
        f"`{path}` is of type {type(value).__name__}, which cannot be saved without pickle; call "
        f"set_params({path.split('.')[0]}=...) with its default, a number, a name, an array or an object of this "
        "package first, which changes nothing learned."
    )


def _digest(state: str, tensors: Mapping[str, Tensor]) -> str:
    return joblib.hash([state, {name: x.numpy() for name, x in tensors.items()}])


# Bytes to objects


def unpack(content: bytes, kinds: Kinds, device_of: Callable[[dict[str, Any]], torch.device]) -> object:
    """Return the object of the content of a file, with its tensors on the device that its state asks for."""
    length = int.from_bytes(content[:8], "little")
    if not 0 < length <= min(MAX_HEADER, len(content) - 8):
        raise ValueError("it has no header of its length")
    about = json.loads(content[8 : 8 + length])["__metadata__"]
    if about["format"] != FORMAT:
        raise ValueError(f"it has format {about['format']}, but this version of skksivi reads format {FORMAT}")
    tensors = {name: x.clone() for name, x in safetensors.torch.load(content).items()}  # aligned: the same rounding
    if any(max(x.shape, default=0) > len(content) for x in tensors.values()):  # of tensors without numbers
        raise ValueError("a size in it is larger than the file")
    if _digest(about["state"], tensors) != about["checksum"]:
        raise ValueError("its checksum is wrong")
    state = json.loads(about["state"])
    return _decode(state, "", _Content(len(content), tensors, {**FOREIGN, **kinds}, device_of(state)))


class _Content(NamedTuple):
    size: int
    tensors: Mapping[str, Tensor]
    kinds: Kinds
    device: torch.device


def _decode(node: object, path: str, content: _Content) -> object:
    if path.count(".") > 50:  # recursion would end at another depth in each version of Python
        raise ValueError("its parts are nested too deeply")
    if isinstance(node, list):
        return [_decode(item, f"{path}.{i}", content) for i, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    name = node.pop("is")
    if name in ("tensor", "parameter", "array", "text"):
        x = content.tensors[path].mT if node.get("transposed") else content.tensors[path]
        if name == "parameter":
            return nn.Parameter(x.to(content.device), node["trains"])
        return x.to(content.device) if name == "tensor" else x.numpy() if name == "array" else _text(x, node["type"])
    if name not in content.kinds:
        raise ValueError(f"it names {name!r}, which is not of a class that can be saved")
    kind = content.kinds[name]
    parts = {part: _decode(x, f"{path}.{part}".lstrip("."), content) for part, x in node.items()}
    if issubclass(kind.cls, nn.Module) and any(isinstance(x, int) and x > content.size for x in parts.values()):
        raise ValueError("a size in it is larger than the file")
    return kind.build(**parts)


def _text(codes: Tensor, kind: str) -> np.ndarray:
    """Return an array of strings by the codes (n, k) of their letters."""
    return codes.numpy().view(f"U{codes.shape[1]}")[:, 0].astype(kind)


# Files


def read(
    path: Path,
    take: Callable[[bytes], T],
    named: str,
    max_bytes: int = MAX_BYTES,
    *,
    writer: str = "skksivi.save",
    remedy: str = "",
) -> T:
    """Return what `take` makes from the content of a file; `remedy` is what to do about a damaged one.

    Raises
    ------
    ValueError
        It is not a regular file, too long, not one of this package, or `take` fails.
    OSError, MemoryError
        It cannot be read, although it may be intact.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):  # opening a pipe would block
        raise ValueError(f"{named} is not a regular file.")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise ValueError(f"{named} has {size} bytes, more than the {max_bytes} that are allowed.")
        content = file.read(size)
    try:
        return take(content)
    except MemoryError:
        raise
    except Exception as error:  # the file may hold anything
        if not _is_own(content):
            raise ValueError(f"{named} was not written by {writer}{_other_reader(path, content)}.") from None
        reason = str(error) if isinstance(error, ValueError) else f"it holds something else, {error!r}"
        raise ValueError(
            f"{named} is damaged, or not a file of this version of skksivi: "
            f"{textwrap.shorten(reason.rstrip('.'), 300)}.{remedy}"
        ) from error


def _is_own(content: bytes) -> bool:
    """Tell whether this was a file of this package, of any version, perhaps damaged since."""
    header = content[: MAX_HEADER + 8]
    return b'{"__metadata__"' in header[8:32] or b'{\\"is\\": ' in header or header.startswith(b"skksivi")


def _other_reader(path: Path, content: bytes) -> str:
    """Return what reads a pickle, which may run code; nothing of other files."""
    is_pickle = content[:1] == b"\x80" or path.suffix in (".pkl", ".pickle", ".joblib")
    return "; it seems to be a pickle, which joblib.load reads if you trust who wrote it" if is_pickle else ""


def path_of(path: object) -> Path:
    """Return the path of a file.

    Raises
    ------
    TypeError
        It is none.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"`path` must be a string or a pathlib.Path, got a {type(path).__name__}.")
    return Path(path)


def write(path: Path, content: bytes) -> None:
    """Write a file under another name, flush and rename it, so that the old or the new one is whole.

    Raises
    ------
    OSError
        It names the file, not the one that is written first; or a device or a pipe is there, which a file must not
        replace.
    """
    file_at = Path(os.path.realpath(path))  # a link stays one
    if file_at.exists() and not (file_at.is_file() or file_at.is_dir()):
        raise FileExistsError(errno.EEXIST, "Exists and is no regular file, so that it is not replaced", str(path))
    aside = file_at.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(aside, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if file_at.exists():
            shutil.copymode(file_at, aside)
        os.replace(aside, file_at)
    except OSError as error:
        if error.errno is None:
            raise OSError(f"{str(path)!r} cannot be written: {error}") from None
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:  # also when a signal ends it
        with suppress(OSError):
            aside.unlink(missing_ok=True)
