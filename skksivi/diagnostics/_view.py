"""The input of the checks, and the form of their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from skksivi.diagnostics._report import Check
from skksivi.families._derived import unweighted
from skksivi.families._samplers import Gaussian, Sampler
from skksivi.parameters import Whiten, chains_of
from skksivi.score._score import Score

#: Number of standard errors within which a difference is noise.
N_SE = 4.0

#: Errors that explain why a number is not available.
REFUSALS = (ValueError, ArithmeticError, ImportError, torch.linalg.LinAlgError)

#: What to change, by the name of a parameter; {} stands for its value.
TEXTS = {
    "init": "start there too by `init`, a row for each mode",
    "max_iter": "raise `max_iter` beyond {}",
    "n_warmup": "raise `n_warmup` beyond {}",
    "mixing": "let `mixing` be 'auto' or a StudentT",
    "whiten": "set whiten='auto'",
    "effort": "raise the `effort` of whiten=Pilot(...) from {!r}",
    "budget": "raise the `budget` of whiten=Pilot(...) beyond {}",
}


class View(NamedTuple):
    """The input of the checks.

    Attributes
    ----------
    name : str
        Class name of the approximator.
    parameters : mapping of str to object
        Parameters of the approximator.
    sampler : Sampler
        The sampler of the fit.
    report : mapping of str to object
        Its learned attributes.
    score : Score
        Score of the target.
    x, s : Tensor of shape (n, d)
        Draws, and scores there.
    generator : torch.Generator
    seed : int
    refines : bool
        Whether `refine` corrects the fit, by reliable weights.
    """

    name: str
    parameters: Mapping[str, object]
    sampler: Sampler
    report: Mapping[str, Any]
    score: Score
    x: Tensor
    s: Tensor
    generator: torch.Generator
    seed: int
    refines: bool = False

    @property
    def finite(self) -> Tensor:
        """Where the score is finite (n,)."""
        return self.s.isfinite().all(1)

    def correction(self, *names: str) -> str:
        """Return advice on draws that are wrong: their weights where these are reliable, otherwise parameters."""
        return "correct the fit by `skksivi.refine`" if self.refines else self.advice(*names)

    def advice(self, *names: str, otherwise: str | None = None) -> str:
        """Return advice on parameters of the approximator that would change something."""
        if isinstance(unweighted(self.sampler), Gaussian):
            return "one Gaussian is not enough, use `KSIVIApproximator`"
        parameters = {name: self.parameters.get(name, "auto") for name in names}
        parameters = {name: value for name, value in parameters.items() if str(value) != "auto"}
        if self.report.get("n_iter_", math.inf) < parameters.get("max_iter", 0):  # it had ended, or there was none
            del parameters["max_iter"]
        if "whiten" in names and "whiten" in self.parameters:
            chains = chains_of(cast("Whiten", self.parameters["whiten"]))
            if chains is not None:
                parameters.pop("whiten", None)
                if not self.report["whitening_"].converged:
                    parameters = {"effort": "low"} if chains.effort == "low" else {"budget": chains.budget}
            else:  # iterations make up only slowly for bad coordinates
                parameters.pop("max_iter", None)
        order = [name for name in ("effort", "budget", *names) if name in parameters]
        best = self.name == "KSIVIApproximator"
        last = "reparametrise the model to avoid funnels and spikes" if best else "use `KSIVIApproximator`"
        return ", or ".join([TEXTS[name].format(parameters[name]) for name in order] or [otherwise or last])


def judged(name: str, value: float, text: str, remedy: str | None) -> Check:
    """Return a check that warns if there is a remedy."""
    return Check(name, value, text, "warn" if remedy else "ok", remedy or "")


def guarded(name: str, check: Callable[..., Check], *args: object) -> Check:
    """Return the check, or why it is not available."""
    try:
        return check(*args)
    except REFUSALS as reason:
        return Check(name, math.nan, "", f"not available: {reason}")
