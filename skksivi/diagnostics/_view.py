"""What the checks look at, and how they speak."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skksivi._samplers import Gaussian
from skksivi._score import Score
from skksivi.base import BaseApproximator
from skksivi.diagnostics._report import Check

#: Standard errors within which a difference is noise.
N_SE = 4.0

#: Errors that tell why a number cannot be had.
REFUSALS = (ValueError, ArithmeticError, ImportError, torch.linalg.LinAlgError)


class View(NamedTuple):
    """What the checks look at: a fit, the score of its target, and draws x with scores s there, both (n, d)."""

    est: BaseApproximator
    score: Score
    x: Tensor
    s: Tensor
    generator: torch.Generator
    seed: int

    @property
    def finite(self) -> Tensor:
        """Where the score is finite (n,)."""
        return self.s.isfinite().all(1)


def judged(name: str, value: float, text: str, remedy: str | None) -> Check:
    """Return a check that warns if there is a remedy."""
    return Check(name, value, text, "warn" if remedy else "ok", remedy or "")


def guarded(name: str, check: Callable[..., Check], *args: Any) -> Check:
    """Return the check, or why it cannot be had."""
    try:
        return check(*args)
    except REFUSALS as reason:
        return Check(name, math.nan, "", f"not available: {reason}")


def advice(est: BaseApproximator, *parameters: str, otherwise: str = "use `KSIVIApproximator`") -> str:
    """Say what to change of the parameters that the estimator has and that do not have the value already."""
    own = est.get_params()
    if isinstance(est.sampler_, Gaussian):
        return "one Gaussian is not enough, use `KSIVIApproximator`"
    texts = {
        "init": "start there by `init`",
        "max_iter": f"raise `max_iter` beyond {own.get('max_iter')}",
        "whiten": "set whiten='auto'",
        "n_warmup": f"raise `n_warmup` beyond {own.get('n_warmup')}",
        "mixing": "let `mixing` be 'auto' or a StudentT",
        "whiten_budget": "raise `whiten_budget`",
    }
    given = [name for name in parameters if name in own and str(own[name]) != "auto"]
    return ", or ".join([texts[name] for name in given] or [otherwise])
