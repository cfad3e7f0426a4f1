"""The classes that a file may name, and how each is taken apart and put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from skksivi import annealing, baselines, kernels, mixing
from skksivi.estimators._hksivi import HKSIVIApproximator
from skksivi.estimators._ksivi import KSIVIApproximator
from skksivi.families import _hierarchy, _layer, _maps, _samplers
from skksivi.persistence._builders import (
    build_bootstrap,
    build_cells,
    build_described_mixture,
    build_family,
    build_hierarchy,
    build_linear,
    build_mixture,
    build_perceptron,
    build_random_state,
    build_tilted,
    parts_of_hierarchy,
    parts_of_twister,
)
from skksivi.persistence._parts import (
    ARRAY,
    COUNT,
    CURVE,
    DOUBLES,
    INDICES,
    KINDS,
    NAMES,
    SIZE,
    Kind,
    Parts,
    Sizes,
    checked,
    is_instance,
    is_integer,
    is_weights,
    is_width,
    or_none,
)
from skksivi.pilot import _affine, _masses, _rules

#: Parameters that belong to the machine of the fit: a stranger's file must not say where a later fit writes.
LOCAL = {"checkpoint"}


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
        lambda **parts: make(**checked(parts, spec)),
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
        known = spec.keys() | estimator.sampler_.attributes() if "sampler_" in spec else spec.keys()
        unknown = {name for name in vars(estimator) if name.endswith("_")} - known
        if unknown:
            raise ValueError(f"`{min(unknown)}` is not an attribute of {cls.__name__}; delete it to save the rest.")
        return parameters | {name: vars(estimator)[name] for name in spec}

    def build(**parts: Any) -> Any:
        estimator = cls(**{name: parts.pop(name) for name in names & parts.keys()})
        check(estimator)
        if parts:
            learned = checked(parts, spec)
            vars(estimator).update(learned)
        return estimator

    return Kind(cls, parts, build)


def _approximator(cls: Any, sampler: Any, learned: Parts) -> Kind:
    """Return the kind of an approximator: of what it draws from and what else it has learned."""
    base: Parts = {
        "sampler_": (is_sampler(sampler), "d"),
        "n_features_in_": (SIZE, "d"),
        "_seed": _SEED,
        "_random_state": (is_instance(np.random.RandomState), ""),
    }
    return _estimator(cls, lambda estimator: estimator._validate_params(), base | learned)


def _kernel(cls: Any) -> Kind:
    return _estimator(cls, lambda kernel: kernel._check())


#: What an approximator may draw from.
SAMPLERS = (
    _samplers.Gaussian,
    _samplers.Particles,
    _samplers.Chains,
    _samplers.Layer,
    _samplers.Layers,
)


def is_sampler(cls: type) -> Callable[[Any], bool]:
    """Return the test of a sampler of a class, with weights of the fit or others."""
    return lambda value: (
        isinstance(value, (*SAMPLERS, _samplers.Reweighted)) and isinstance(_samplers.unweighted(value), cls)
    )


_SEED = (is_integer(0, 2**32 - 1), "")
_WHITENING = (is_instance(_rules.Whitening), "d")
_NETWORK = is_instance(_maps.MultilayerPerceptron)

#: What a training leaves beside what it draws from.
_TRAINED: Parts = {
    "loss_curve_": (CURVE, "t"),
    "ksd_curve_": (CURVE, "mp"),
    "n_iter_": (COUNT, "t"),
    "best_iter_": (COUNT, ""),
    "engine_": (is_instance(str), ""),
}

#: What several baselines learn.
_ITERATIONS: Parts = {"n_iter_": (COUNT, "t")}
_NORMS: Parts = {"norm_curve_": (CURVE, "t"), **_ITERATIONS}
_LOSSES: Parts = {"loss_curve_": (CURVE, "t"), **_ITERATIONS}

#: The classes that a file may name, and how. A new approximator is one more entry.
KINDS.update(
    {
        "tuple": Kind(tuple, lambda value: {"items": list(value)}, lambda items: tuple(items)),
        "device": Kind(torch.device, lambda value: {"name": str(value)}, lambda name: torch.device(name)),
        "RandomState": Kind(np.random.RandomState, parts_of_twister, build_random_state),
        "kernels.Gaussian": _kernel(kernels.Gaussian),
        "kernels.IMQ": _kernel(kernels.IMQ),
        "kernels.Laplace": _kernel(kernels.Laplace),
        "kernels.Riesz": _kernel(kernels.Riesz),
        "kernels.Tilted": Kind(
            kernels.Tilted,
            lambda kernel: kernel.get_params(deep=False),
            build_tilted,
        ),
        "annealing.Linear": _estimator(annealing.Linear, lambda schedule: schedule(0.0)),
        "annealing.Cosine": _estimator(annealing.Cosine, lambda schedule: schedule(0.0)),
        "annealing.Geometric": _estimator(annealing.Geometric, lambda schedule: schedule(0.0)),
        "mixing.Normal": _estimator(mixing.Normal, lambda described: described.build(1)),
        "mixing.StudentT": _estimator(mixing.StudentT, lambda described: described.build(1)),
        "mixing.GaussianMixture": Kind(
            mixing.GaussianMixture,
            lambda described: described.get_params(),
            build_described_mixture,
        ),
        "Identity": _record(_affine.Identity, {"m": (DOUBLES, "d")}, sizes=lambda value: value.m.shape),
        "Affine": _record(
            _affine.Affine, {"m": (DOUBLES, "d"), "L": (DOUBLES, "dd")}, sizes=lambda value: value.m.shape
        ),
        "LowRank": _record(
            _affine.LowRank,
            {"m": (DOUBLES, "d"), "D": (DOUBLES, "d"), "V": (DOUBLES, "dk"), "r": (DOUBLES, "k")},
            sizes=lambda value: value.m.shape,
        ),
        "Whitening": _record(
            _rules.Whitening,
            {
                "map": (is_instance(_affine.Affine, _affine.LowRank, _affine.Identity), "d"),
                "modes": (ARRAY, "kd"),
                "weights": (ARRAY, "k"),
                "n_score_calls": (COUNT, ""),
                "settled": (is_instance(bool), ""),
                "mean": (or_none(ARRAY), "d"),
                "mean_se": (or_none(CURVE), "d"),
                "sd": (or_none(ARRAY), "d"),
            },
            sizes=lambda value: (value.modes.shape[1],),
        ),
        "Cells": Kind(
            _masses.Cells,
            lambda value: {"maps": list(value.maps), "log_weights": value.log_weights},
            lambda **parts: build_cells(
                **checked(parts, {"maps": (is_instance(list), ""), "log_weights": (DOUBLES, "k")})
            ),
            lambda value: (len(value.maps), *value.maps[0].m.shape),
        ),
        "Gaussian": _record(
            _samplers.Gaussian, {"map": (is_instance(_affine.Affine), "d")}, sizes=lambda value: value.map.m.shape
        ),
        "Particles": _record(
            _samplers.Particles,
            {"x": (ARRAY, "nd"), "whitening": _WHITENING},
            sizes=lambda value: (value.n_features,),
        ),
        "Chains": _record(
            _samplers.Chains,
            {"x": (ARRAY, "cnd"), "whitening": _WHITENING},
            sizes=lambda value: (value.n_features,),
        ),
        "Layer": _record(
            _samplers.Layer,
            {"family": (is_instance(_layer.SemiImplicit), "d"), "whitening": _WHITENING, "seed": _SEED},
            sizes=lambda value: (value.n_features,),
        ),
        "Layers": _record(
            _samplers.Layers,
            {"family": (is_instance(_hierarchy.Hierarchy), "d"), "whitening": _WHITENING, "seed": _SEED},
            build=lambda **parts: _samplers.Layers(score=None, **parts),
            sizes=lambda value: (value.n_features,),
        ),
        "Reweighted": _record(
            _samplers.Reweighted,
            {
                "sampler": (is_instance(*SAMPLERS), "d"),
                "cells": (is_instance(_masses.Cells), "kd"),
                "ratios": (DOUBLES, "k"),
            },
            sizes=lambda value: (value.n_features,),
        ),
        "StudentT": _record(
            mixing.StudentTDraws,
            {"latent_dim": (SIZE, ""), "df": (is_width, "")},
            sizes=lambda value: (value.latent_dim,),
        ),
        "GaussianMixture": _record(
            mixing.GaussianMixtureDraws,
            {"means": (is_weights, "kd"), "scales": (is_weights, "k"), "levels": (DOUBLES, "l")},
            build=build_mixture,
            sizes=lambda value: (value.latent_dim,),
        ),
        "Hierarchy": Kind(
            _hierarchy.Hierarchy, parts_of_hierarchy, build_hierarchy, lambda value: tuple(value.half_square.shape)
        ),
        "Normal": _record(mixing.NormalDraws, {"latent_dim": (SIZE, "")}, sizes=lambda value: (value.latent_dim,)),
        "Bootstrap": _record(
            mixing.Bootstrap,
            {"points": (is_weights, "nd"), "first": (INDICES, "n"), "size": (INDICES, "n"), "reach": (is_width, "")},
            build=build_bootstrap,
            sizes=lambda value: (value.latent_dim,),
        ),
        "Constant": _record(
            _maps.Constant, {"value": (is_weights, "o")}, sizes=lambda value: (None, *value.value.shape)
        ),
        "Linear": _record(
            nn.Linear,
            {"weight": (is_weights, "oi"), "bias": (is_weights, "o")},
            build=build_linear,
            sizes=lambda value: (value.in_features, value.out_features),
        ),
        "MultilayerPerceptron": Kind(
            _maps.MultilayerPerceptron,
            lambda value: {"layers": list(value.layers)},
            build_perceptron,
            lambda value: (value.layers[0].in_features, value.layers[-1].out_features),
        ),
        "LinearSkip": _record(
            _maps.LinearSkip,
            {"A": (is_weights, "oi"), "network": (_NETWORK, "io")},
            sizes=lambda value: tuple(value.A.mT.shape),
        ),
        "Residual": _record(
            _maps.Residual,
            {"unit": (is_weights, "o"), "network": (_NETWORK, "oo")},
            sizes=lambda value: (len(value.unit), len(value.unit)),
        ),
        "SemiImplicit": _record(
            _layer.SemiImplicit,
            {
                "mean": (is_instance(_maps.LinearSkip, _maps.Residual, _maps.MultilayerPerceptron), "zd"),
                "log_variance": (is_instance(_maps.Constant, _maps.MultilayerPerceptron), "zd"),
                "n_features": (SIZE, "d"),
                "mixing": (is_instance(mixing.Mixing), "z"),
                "min_scale": (is_width, ""),
            },
            build=build_family,
            sizes=lambda value: (value.n_features,),
        ),
        "KSIVIApproximator": _approximator(KSIVIApproximator, _samplers.Layer, _TRAINED),
        "HKSIVIApproximator": _approximator(HKSIVIApproximator, _samplers.Layers, _TRAINED),
        "baselines.SIVI": _approximator(baselines.SIVI, _samplers.Layer, _LOSSES),
        "baselines.SIVISM": _approximator(baselines.SIVISM, _samplers.Layer, _LOSSES),
        "baselines.UIVI": _approximator(baselines.UIVI, _samplers.Layer, _LOSSES),
        "baselines.HSIVISM": _approximator(baselines.HSIVISM, _samplers.Layers, _LOSSES),
        "baselines.Laplace": _approximator(baselines.Laplace, _samplers.Gaussian, {}),
        "baselines.MeanFieldVI": _approximator(baselines.MeanFieldVI, _samplers.Gaussian, _NORMS),
        "baselines.FullRankVI": _approximator(baselines.FullRankVI, _samplers.Gaussian, _NORMS),
        "baselines.BatchAndMatch": _approximator(
            baselines.BatchAndMatch, _samplers.Gaussian, _ITERATIONS | {"score_divergence_": (is_instance(float), "")}
        ),
        "baselines.SVGD": _approximator(baselines.SVGD, _samplers.Particles, _NORMS),
        "baselines.MIED": _approximator(baselines.MIED, _samplers.Particles, _LOSSES),
        "baselines.KSDDescent": _approximator(
            baselines.KSDDescent, _samplers.Particles, _ITERATIONS | {"loss_curve_": (CURVE, "e")}
        ),
        "baselines.SGLD": _approximator(baselines.SGLD, _samplers.Chains, _ITERATIONS),
        "baselines.MALA": _approximator(
            baselines.MALA,
            _samplers.Chains,
            _ITERATIONS
            | {
                "acceptance_curve_": (CURVE, "t"),
                "acceptance_rate_": (is_instance(float), ""),
                "step_size_": (is_instance(float), ""),
            },
        ),
    }
)
NAMES.update((kind.cls, name) for name, kind in KINDS.items())
