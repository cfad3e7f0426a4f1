"""The settings of the paper, one set for each of its experiments."""

from __future__ import annotations

import copy
import math
from typing import Any

from skksivi.parameters import Adam, Network, Scale
from skksivi.terms import Entropic


def paper_settings(name: str, method: str = "KSIVI") -> dict[str, Any]:
    r"""Return the paper's settings of an experiment, as parameters of an approximator.

    ======================== ============================================================== ===================
    Name                     Experiment                                                     Section of the paper
    ======================== ============================================================== ===================
    ``banana``               :class:`~skksivi.targets.Banana`                               Toy examples
    ``multimodal``           :class:`~skksivi.targets.Multimodal`                           Toy examples
    ``x-shaped``             :class:`~skksivi.targets.XShaped`                              Toy examples
    ``waveform``             logistic regression, vanilla estimator                         Logistic regression
    ``waveform-u-statistic`` logistic regression, U-statistic                               Logistic regression
    ``diffusion``            :class:`~skksivi.targets.ConditionedDiffusion`                 Diffusion process
    ``network``              :class:`~skksivi.targets.BayesianNeuralNetwork`                Neural network
    ``student``              :class:`~skksivi.targets.StudentT`                             Kernel choice
    ``student-hierarchy``    the same by `HKSIVIApproximator`                               Hierarchical KSIVI
    ``eight-gaussians``      :class:`~skksivi.targets.EightGaussians` by the same           Hierarchical KSIVI
    ======================== ============================================================== ===================

    The values come from the text and its appendix, and from the public code where the paper is silent: the betas and
    the decay of the learning rate, the temperature, and the regularisation of the networks and the Student target.
    The hierarchy on the Student target differs from the text in one value: with :math:`\sigma_{\mathrm{ini}} = 1`,
    three times the width of this target, it diverges, and has :math:`e^{-3/2}` instead. The width of its kernel is
    fixed, because in the public code no gradient flows through it.

    Parameters
    ----------
    name : str
        A name from the table. Settings are for `KSIVIApproximator` unless the table names `HKSIVIApproximator`.
    method : {"KSIVI", "SIVI", "SIVISM", "UIVI", "SVGD"}, default="KSIVI"
        "KSIVI" stands for both of these; of the rivals in `skksivi.baselines` SIVI, SIVISM and UIVI have the layer,
        the draws and the iterations of KSIVI, with the betas, rates and critics of the public code. The paper does
        not run SVGD: here it has as many particles as KSIVI has draws, the Gaussian kernel, and a start at N(0, I).

    Returns
    -------
    settings : dict
        A new dict at each call, which may be changed. For networks the paper searches the learning rate from 1e-5 to
        1e-3; here it is 1e-3.

    Raises
    ------
    ValueError
        There is no such experiment, or none of this method.

    See Also
    --------
    KSIVIApproximator : One semi-implicit layer, the first choice.
    HKSIVIApproximator : A hierarchy of layers, for distant modes.

    References
    ----------
    Cheng, Z., Yu, L., Xie, T., Zhang, S. and Zhang, C. (2024). Kernel semi-implicit variational inference.
    https://arxiv.org/abs/2405.18997

    Examples
    --------
    >>> from skksivi import KSIVIApproximator, paper_settings
    >>> q = KSIVIApproximator(**paper_settings("banana"))
    >>> q.batch_size, q.max_iter
    (500, 50000)

    A rival on the same target, by the same layer:

    >>> from skksivi.baselines import SIVI
    >>> q = SIVI(**paper_settings("banana", method="SIVI"))
    """
    if not isinstance(name, str) or name not in PAPER:
        raise ValueError(f"`name` must be one of {sorted(PAPER)}, got {name!r}.")
    if method not in (known := ("KSIVI",) if "n_layers" in PAPER[name] else ("KSIVI", *RIVALS)):
        raise ValueError(f"`method` must be one of {list(known)} on {name!r}, got {method!r}.")
    settings = copy.deepcopy(PAPER[name])
    return settings if method == "KSIVI" else _of_rival(name, method, settings)


def _of_rival(name: str, method: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a rival, whose layer is that of KSIVI."""
    own = copy.deepcopy(RIVALS[method].get(name, RIVALS[method].get("", {})))
    if method == "SVGD":
        return own | {"n_particles": settings["batch_size"]}
    settings |= settings["hidden_layer_sizes"].get_params()
    settings["optimizer"].set_params(betas=own.pop("betas", (0.9, 0.999)))
    return {key: value for key, value in settings.items() if key not in _OF_KSIVI} | own


def fading(progress: float) -> float:
    """Return how much of the score the critic of SIVI-SM is given, as in its public code."""
    return 1.004 ** (-200 * progress)


def entropic(progress: float) -> float:
    """Return the weight of -E log p on the Student target: 0.05 times the temperature, zero after 40% of the fit."""
    return 0.05 * (0.1 + 0.9 * progress / 0.45) if progress < 0.4 else 0.0


def _network(width: int) -> Network:
    """Return the paper's network, which is the whole mean."""
    return Network((width, width), linear_skip=False)


_EVERY = {
    "early_stopping": False,
    "kernel": "gaussian",
    "bandwidth": "median",
    "gradient_estimator": "vanilla",
    "mixing": "normal",
    "whiten": None,
    "learning_rate": 1e-3,
}
_PLANE = {
    "initial_scale": 1.0,
    "batch_size": 500,
    "max_iter": 50_000,
    "optimizer": Adam(decay=(0.9, 1000), betas=(0.9, 0.99), ema=None),
}
_TOY = _EVERY | _PLANE | {"latent_dim": 3, "hidden_layer_sizes": _network(50)}
_HIERARCHY = _EVERY | _PLANE | {"hidden_layer_sizes": (50, 50), "n_layers": 5, "bridge": "linear"}
_WAVEFORM = _EVERY | {
    "latent_dim": 10,
    "hidden_layer_sizes": _network(100),
    "initial_scale": math.exp(-5 / 2),
    "batch_size": 100,
    "max_iter": 20_000,
    "optimizer": Adam(decay=(0.9, 3000), betas=(0.9, 0.999), ema=None),
}

PAPER: dict[str, dict[str, object]] = {
    "banana": _TOY | {"initial_scale": 0.5},
    "multimodal": _TOY | {"annealing": "linear"},
    "x-shaped": _TOY,
    "student": _TOY | {"kernel": "riesz", "annealing": "linear", "terms": (Entropic(entropic),)},
    "student-hierarchy": _HIERARCHY | {"kernel": "riesz", "bandwidth": 1.0, "initial_scale": math.exp(-3 / 2)},
    "eight-gaussians": _HIERARCHY,
    "waveform": _WAVEFORM,
    "waveform-u-statistic": {
        **_WAVEFORM,
        "gradient_estimator": "u-statistic",
        "initial_scale": math.exp(-2 / 2),
        "max_iter": 40_000,
    },
    "diffusion": {
        **_EVERY,
        "latent_dim": 100,
        "hidden_layer_sizes": _network(128),
        "initial_scale": math.exp(-2 / 2),
        "scale": Scale(floor=math.exp(-12 / 2)),
        "batch_size": 128,
        "max_iter": 100_000,
        "learning_rate": 2e-4,
        "optimizer": Adam(decay=(0.9, 10_000), betas=(0.9, 0.99), ema=None),
    },
    "network": {
        **_EVERY,
        "latent_dim": 3,
        "hidden_layer_sizes": _network(10),
        "initial_scale": math.exp(-8 / 2),
        "batch_size": 100,
        "max_iter": 20_000,
        "optimizer": Adam(decay=(0.9, 3000), betas=(0.9, 0.999), ema=0.999, max_norm=1.0),
        "terms": (Entropic(1.0),),
    },
}

#: What KSIVI has, and its rivals lack.
_OF_KSIVI = ("kernel", "bandwidth", "gradient_estimator", "mixing", "terms", "early_stopping")


def _critic(*widths: int, rate: float = 2e-3) -> dict[str, object]:
    return {"critic_hidden_layer_sizes": widths, "critic_learning_rate": rate, "critic_skip": fading}


#: By method and experiment, what differs from the settings of KSIVI; an empty name stands for all others.
RIVALS: dict[str, dict[str, dict[str, object]]] = {
    "SIVI": {"diffusion": {"learning_rate": 1e-4}, "student": {"betas": (0.9, 0.99), "annealing": None}},
    "UIVI": {"diffusion": {"learning_rate": 1e-4}},
    "SIVISM": {
        "": {"critic_skip": fading},
        "waveform": _critic(256, 256, 256) | {"betas": (0.5, 0.99), "scale": Scale(floor=math.exp(-3))},
        "diffusion": _critic(512, 512, rate=1e-4) | {"learning_rate": 1e-4},
        "network": _critic(16, 16),
    },
    "SVGD": {"": {"kernel": "gaussian", "bandwidth": "median", "whiten": None}},
}
