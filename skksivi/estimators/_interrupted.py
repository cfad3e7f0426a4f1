"""The content of a checkpoint of an interrupted fit."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor, nn

from skksivi._saved import COUNT, CURVE, INDICES, WEIGHTS, Parts, is_instance, is_integer, or_none, saved
from skksivi.families._hierarchy import Hierarchy
from skksivi.families._layer import MultilayerPerceptron, SemiImplicit
from skksivi.pilot._whitening import Whitening
from skksivi.stein._path import Memory
from skksivi.training._guard import MomentPenalty
from skksivi.training._loop import State

#: The state that a resumed training needs from the interrupted one, as its hooks have it.
TRAINING: Parts = {
    "flat": (WEIGHTS, "p"),
    "m": (WEIGHTS, "p"),
    "v": (WEIGHTS, "p"),
    "average": (or_none(WEIGHTS), "p"),
    "n_steps": (WEIGHTS, ""),
    "losses": (lambda value: isinstance(value, Tensor) and value.is_floating_point(), "t"),
    "generator": (INDICES, "g"),
    "looks": (or_none(CURVE), "l2"),
    "best_iteration": (or_none(COUNT), ""),
    "best": (or_none(WEIGHTS), "p"),
}


@saved(
    "Interrupted",
    {
        "whitening": (is_instance(Whitening), "d"),
        "family": (is_instance(SemiImplicit, Hierarchy), "d"),
        "penalty": (or_none(is_instance(MomentPenalty)), ""),
        "seed": (is_integer(0, 2**63 - 1), ""),
        "answers": (is_instance(str), ""),
        "memory": (or_none(is_instance(Memory)), ""),
        **TRAINING,
    },
)
@dataclass
class Interrupted:
    """A fit that was interrupted: where it started, and the state of its training.

    Attributes
    ----------
    whitening, family, penalty, seed
        See `Start`.
    answers : str
        Checksum of the score's values near the fit.
    memory : Memory or None
        The last draws.
    flat, m, v, average, n_steps
        State of the iterate, see `skksivi.training._loop.Iterate`.
    losses : Tensor of shape (n_done,)
    generator : Tensor
        The state of the generator, as integers.
    looks, best_iteration, best
        State of the watch, None without one.
    """

    whitening: Whitening
    family: nn.Module
    penalty: MomentPenalty | None
    seed: int
    answers: str
    memory: Memory | None
    flat: Tensor
    m: Tensor
    v: Tensor
    average: Tensor | None
    n_steps: Tensor
    losses: Tensor
    generator: Tensor
    looks: np.ndarray | None
    best_iteration: int | None
    best: Tensor | None

    @property
    def n_done(self) -> int:
        """Number of iterations."""
        return len(self.losses)

    @property
    def state(self) -> State:
        """The state from which the training resumes."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def was_watched(self, every: int, max_iter: int, from_start: bool, stops: bool) -> bool:
        """Tell whether it was evaluated as often as such a fit is, and its best state kept."""
        if not from_start and not stops:
            return self.looks is None and self.best is None
        looks_at = [*([0] if from_start else []), *range(every, self.n_done + 1, every)]
        if self.n_done == max_iter and max_iter % every:
            looks_at.append(max_iter)
        if self.looks is None or self.looks.shape != (len(looks_at), 2):
            return False
        if not self.flat.is_meta and (np.isnan(self.looks).any() or self.looks[:, 0].tolist() != looks_at):
            return False
        if self.best is None:
            return True
        return from_start and self.best_iteration in looks_at and self.best.dtype == self.flat.dtype

    def check(self) -> None:
        """Raise ValueError unless its parts belong to one training; on the meta device only shapes are checked."""
        sizes = {p.dtype for p in self.family.parameters()}, sum(p.numel() for p in self.family.parameters())
        if ({self.flat.dtype}, len(self.flat)) != sizes:
            raise ValueError("its iterate is not one of its family")
        if len({a.dtype for a in (self.flat, self.m, self.v, self.losses)}) != 1 or self.n_steps.shape:
            raise ValueError("the parts of its iterate do not fit")
        if self.penalty is not None and self.penalty.shape != _shape(self.family):
            raise ValueError("its penalty does not fit its family")
        if (self.best is None) != (self.best_iteration is None):
            raise ValueError("its best state is of no iteration")
        if not self.flat.is_meta:
            self._check_numbers()

    def _check_numbers(self) -> None:
        refused = self.losses.isnan()
        if bool((self.v < 0).any()) or bool(self.losses.isinf().any()):
            raise ValueError("its numbers are out of their range")
        if int(self.n_steps) != self.n_done - int(refused.sum()):
            raise ValueError("its number of steps differs from its number of losses")
        try:
            torch.Generator(self.flat.device).set_state(self.generator.cpu().view(torch.uint8))
        except (RuntimeError, TypeError) as error:
            raise ValueError("the state of its generator is none") from error


def _shape(family: nn.Module) -> tuple[int, ...]:
    """Return the shape of the means of the draws of a family."""
    d = int(family.n_features)  # type: ignore[arg-type]
    return (family.n_layers, d) if isinstance(family, Hierarchy) else (d,)


def widths(family: nn.Module) -> set[tuple[int, ...]]:
    """Return the widths of the hidden layers of the networks in a family."""
    networks = [part for part in family.modules() if isinstance(part, MultilayerPerceptron)]
    return {tuple(layer.out_features for layer in network.linear[:-1]) for network in networks}
