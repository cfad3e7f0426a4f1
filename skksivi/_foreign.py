"""The classes of other libraries that a file may name, and how each is taken apart and put together."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from skksivi._saved import WEIGHTS, Kind, Parts, checked, is_array, is_instance, is_integer

#: The numbers of the state of a Mersenne twister.
N_TWISTER = 624

TWISTER: Parts = {
    "key": (is_array(np.int64, low=0, high=2**32 - 1, also=np.any), "k"),  # of zeros it would stand still
    "position": (is_integer(0, N_TWISTER), ""),  # numpy takes any, and reads memory there
    "has_gauss": (is_integer(0, 1), ""),
    "gauss": (is_instance(float), ""),
}
LINEAR: Parts = {"weight": (WEIGHTS, "oi"), "bias": (WEIGHTS, "o")}


def parts_of_twister(value: np.random.RandomState) -> dict[str, object]:
    state = value.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        raise TypeError(f"A RandomState of {state['bit_generator']} cannot be saved; make it RandomState(seed).")
    twister = state["state"]
    return {
        "key": twister["key"].astype(np.int64),
        "position": twister["pos"],
        "has_gauss": state["has_gauss"],
        "gauss": state["gauss"],
    }


def build_random_state(**parts: Any) -> np.random.RandomState:  # noqa: ANN401
    key, position, has_gauss, gauss = checked(parts, TWISTER).values()
    random_state = np.random.RandomState(0)
    random_state.set_state(("MT19937", key.astype(np.uint32), position, has_gauss, gauss))
    return random_state


def build_linear(**parts: Tensor) -> nn.Linear:
    weight, bias = checked(parts, LINEAR).values()
    linear = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], device="meta")
    linear.weight, linear.bias = nn.Parameter(weight), nn.Parameter(bias)
    return linear


#: Their kinds by their names in a file.
FOREIGN = {
    "tuple": Kind(tuple, lambda value: {"items": list(value)}, lambda items: tuple(items)),
    "device": Kind(torch.device, lambda value: {"name": str(value)}, lambda name: torch.device(name)),
    "RandomState": Kind(np.random.RandomState, parts_of_twister, build_random_state),
    "Linear": Kind(nn.Linear, lambda value: {"weight": value.weight, "bias": value.bias}, build_linear),
}
