"""What files hold of an amortised fit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from skksivi._arrays import DTYPES, make_generator, resolve_device
from skksivi._saved import (
    COUNT,
    DOUBLES,
    SEED,
    SIZE,
    Kind,
    Parts,
    checked,
    is_float,
    is_instance,
    is_list_of,
    or_none,
    register,
)
from skksivi._weights import Certificate
from skksivi.amortized._estimator import AmortizedKSIVI
from skksivi.amortized._family import Conditional
from skksivi.amortized._features import DeepSets
from skksivi.parameters import check_widths
from skksivi.score._tally import Stage

#: Contexts, and draws for each, by which what a file holds is tried.
N_TRIED = 8

#: What is saved of a fit.
LEARNED: Parts = {
    "family_": (is_instance(Conditional), "dp"),
    "certificates_": (lambda value: value == [] or is_list_of(Certificate)(value), ""),
    "divergence_": (or_none(is_instance(float)), ""),  # None where it is NaN, which json does not know
    "trained_": (is_instance(bool), ""),
    **dict.fromkeys(("n_contexts_", "n_lost_", "n_score_calls_", "n_products_"), (COUNT, "")),
    "n_features_in_": (SIZE, "d"),
    "stages_": (lambda value: value == [] or is_list_of(Stage)(value), ""),
    "_of_sets": (is_instance(bool), ""),
    "_context_shape": (SIZE, "c"),
    "_reach": (is_float(0.0, 1e300), ""),
    "_whitens": (DOUBLES, "pp"),
    "_seed": (SEED, ""),
    "_random_state": (is_instance(np.random.RandomState), ""),
}


def _parts(est: AmortizedKSIVI) -> dict[str, object]:
    """Return what is saved."""
    if not (est.summary is None or type(est.summary) is DeepSets):
        raise TypeError(
            f"`summary` is of type {type(est.summary).__name__}, which cannot be saved without pickle, expected "
            "DeepSets or None; the fit to one context can be saved, `at(context)`."
        )
    parts: dict[str, object] = est.get_params(deep=False)
    if est.__sklearn_is_fitted__():
        parts |= {name: getattr(est, name) for name in LEARNED}
        parts["divergence_"] = None if math.isnan(est.divergence_) else est.divergence_
    return parts


def _restored(**parts: Any) -> AmortizedKSIVI:  # noqa: ANN401
    """Return the estimator of such parts, without its score."""
    names = AmortizedKSIVI().get_params(deep=False)
    est = AmortizedKSIVI(**{name: parts.pop(name) for name in names if name in parts})
    est._validate_params()  # noqa: SLF001
    check_widths(est.hidden_layer_sizes, "hidden_layer_sizes")
    if not parts:
        return est
    learned = checked(parts, LEARNED)
    family = learned["family_"]
    n_in = len(family.h_mean) if family.summary is None else family.summary.shape[0]
    if learned["_context_shape"] != n_in:
        raise ValueError("`_context_shape` is not what `family_` takes")
    if (family.summary is None) != (est.summary is None):
        raise ValueError("`summary` is not of the kind that `family_` has")
    divergence = learned["divergence_"]
    est.__dict__.update(learned | {"divergence_": math.nan if divergence is None else divergence})
    return with_score_of_pairs(est, None)


register("AmortizedKSIVI", Kind(AmortizedKSIVI, _parts, _restored))


def with_score_of_pairs(est: AmortizedKSIVI, score_fn: object) -> AmortizedKSIVI:
    """Let a loaded fit know its score, a function of pairs or a model that has one; return it."""
    score_fn = getattr(score_fn, "score_fn", score_fn)
    if not (score_fn is None or callable(score_fn)):
        raise TypeError(f"`score_fn` must be a function of pairs (x, y), got a {type(score_fn).__name__}.")
    est.__dict__["_score_fn"] = score_fn
    return est


def check_conditional_draws(est: AmortizedKSIVI) -> None:
    """Raise ValueError unless draws at some contexts, and their densities, are finite."""
    generator = make_generator(0, resolve_device(est.device))
    family = est.family_
    p = len(family.h_mean)
    h = torch.randn(N_TRIED, p, generator=generator, dtype=torch.float64, device=generator.device)
    h[0] = 0.0
    try:
        with torch.no_grad():
            x, _, score, _ = family.draws(h, N_TRIED, generator)
            numbers = [x.to(DTYPES[est.dtype]), score, family.mixture_log_prob(x[:, 0], h)]
            finite = all(bool(number.isfinite().all()) for number in numbers)
    except RuntimeError as error:
        raise ValueError(f"`family_` cannot be drawn from: {error}") from error
    if not finite:
        raise ValueError("`family_` has draws that are not finite")
