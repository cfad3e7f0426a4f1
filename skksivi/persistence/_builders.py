"""Objects from their parts, which are compared with one another."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from skksivi import kernels, mixing
from skksivi.families import _hierarchy, _layer, _maps
from skksivi.persistence._parts import Parts, checked, is_array, is_instance, is_integer, is_weights, is_width
from skksivi.pilot import _affine, _masses

#: The numbers of the state of a Mersenne twister.
N_TWISTER = 624


def build_tilted(**parts: Any) -> kernels.Tilted:
    tilted = kernels.Tilted(**parts)
    tilted._check()
    return tilted


def build_described_mixture(means: Any, scales: Any, weights: Any) -> mixing.GaussianMixture:
    described = mixing.GaussianMixture(means, scales, weights)
    described.build(np.asarray(means).shape[-1])
    return described


def parts_of_twister(value: np.random.RandomState) -> dict[str, Any]:
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


def build_random_state(**parts: Any) -> np.random.RandomState:
    spec: Parts = {
        "key": (is_array(np.int64), "k"),
        "position": (is_integer(0, N_TWISTER), ""),  # numpy takes any, and reads memory there
        "has_gauss": (is_integer(0, 1), ""),
        "gauss": (is_instance(float), ""),
    }
    key, position, has_gauss, gauss = checked(parts, spec).values()
    random_state = np.random.RandomState(0)
    random_state.set_state(("MT19937", key.astype(np.uint32), position, has_gauss, gauss))
    return random_state


def build_linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    linear = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], device="meta")
    linear.weight, linear.bias = nn.Parameter(weight), nn.Parameter(bias)
    return linear


def build_perceptron(layers: list[Any]) -> _maps.MultilayerPerceptron:
    if not all(a.out_features == b.in_features for a, b in pairwise(layers)):
        raise ValueError("the layers of its network do not fit")
    network = _maps.MultilayerPerceptron([], torch.Generator(), torch.float32)
    network.layers.extend(layers)
    return network


def build_bootstrap(points: Tensor, first: Tensor, size: Tensor, reach: float) -> mixing.Bootstrap:
    n, d = points.shape
    if not (first.is_meta or bool(((first >= 0) & (size >= 1) & (size <= n) & (first <= n - size)).all())):
        raise ValueError("the modes of `points` reach beyond them")
    bootstrap = mixing.Bootstrap(torch.zeros(1, d), [1])
    bootstrap.points, bootstrap.first, bootstrap.size, bootstrap.reach = points, first, size, reach
    return bootstrap


def build_cells(maps: list[Any], log_weights: Tensor) -> _masses.Cells:
    if not maps or not all(isinstance(a, _affine.Affine) and a.m.shape == maps[0].m.shape for a in maps):
        raise ValueError("the maps of its cells do not fit")
    return _masses.Cells(maps, log_weights)


def build_mixture(means: Tensor, scales: Tensor, levels: Tensor) -> mixing.GaussianMixtureDraws:
    built = mixing.GaussianMixtureDraws(means, scales, torch.ones(len(scales)) / len(scales))
    built.levels = levels
    return built


def _restored_hierarchy(networks: list[Any], a: list[Any], levels: list[Any], **parts: Any) -> _hierarchy.Hierarchy:
    scale = torch.ones_like(parts["half_square"])
    T, d = len(levels), len(scale)
    shared = len(networks) < T
    sizes = [(network.layers[0].in_features, network.layers[-1].out_features) for network in networks]
    fits = len(networks) == (1 if shared else T) and set(sizes) == {(d + shared, d)}
    if not fits or len(a) != T or not all(type(x) is float and 0 < x <= 1 for x in levels):
        raise ValueError("the layers of its hierarchy do not fit")
    if not all(isinstance(value, _maps.Constant) and value.value.shape == (d,) for value in a):
        raise ValueError("the scales of its hierarchy do not fit")
    family = _hierarchy.Hierarchy(
        networks, mixing=parts["mixing"], levels=levels, initial_scale=scale, min_scale=parts["min_scale"]
    )
    family.through = parts["through"]
    family.half_square, family.log_variances = parts["half_square"], nn.ModuleList(a)
    if len({parameter.dtype for parameter in family.parameters()}) != 1:
        raise ValueError("the parameters of its family are of several types")
    return family.requires_grad_(False)


def parts_of_hierarchy(family: _hierarchy.Hierarchy) -> dict[str, Any]:
    lists = {"networks": list(family.networks), "a": list(family.log_variances), "levels": list(family.levels)}
    return {
        **lists,
        "mixing": family.mixing,
        "half_square": family.half_square,
        "min_scale": family.min_scale,
        "through": family.through,
    }


def build_hierarchy(**parts: Any) -> _hierarchy.Hierarchy:
    spec: Parts = {
        "networks": (is_instance(list), ""),
        "a": (is_instance(list), ""),
        "levels": (is_instance(list), ""),
        "mixing": (is_instance(mixing.Mixing), "d"),
        "half_square": (is_weights, "d"),
        "min_scale": (is_width, ""),
        "through": (is_instance(bool), ""),
    }
    held = checked(parts, spec)
    if not all(isinstance(network, _maps.MultilayerPerceptron) for network in held["networks"]):
        raise ValueError("the networks of its hierarchy do not fit")
    return _restored_hierarchy(**held)


def build_family(**parts: Any) -> _layer.SemiImplicit:
    family = _layer.SemiImplicit(**parts)
    if len({parameter.dtype for parameter in family.parameters()}) != 1:
        raise ValueError("the parameters of its family are of several types")
    return family.requires_grad_(False)
