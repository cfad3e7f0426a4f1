r"""Estimators in files that hold no code.

A file is one of the safetensors format: eight bytes with the length of a header, the header in json, and the numbers.
The header names each tensor with its type, shape and place, and has three strings under `__metadata__`:

``format``
    The version of what is described here.
``state``
    The estimator as json. Numbers, strings, None and lists stand for themselves. An object of a known class is
    ``{"is": name, part: value, ...}``, for an estimator its parameters and what it has learned. ``{"is": "tensor"}``
    and ``{"is": "array"}`` stand for the tensor that is named by the way there, as ``family_.mean.A``; with
    ``"transposed": true`` it is stored as its transpose, since products of matrices round by their order in memory.
``sha256``
    Of the whole file, with zeros instead of these 64 digits. It tells damage, not who wrote the file.

A file is taken for hostile. The state is first put together from tensors without memory, so that every shape is
compared with the others and with the length of the file before the numbers are read; then from the numbers.

A class declares its parts, what each must hold (types and ranges of numbers, a Cholesky factor, shares that sum to
one), and letters for sizes that must agree, by `saved` and its like. What no part alone tells is seen by a few draws.
"""

from skksivi.persistence._file import load, save

__all__ = ["load", "save"]
