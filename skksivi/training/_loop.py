"""The one optimisation loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, SupportsFloat

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from skksivi._utils.arrays import check_function
from skksivi._utils.checks import shown
from skksivi.parameters import Adam, Decay

#: Iterations between checks of the losses; nothing is read from the device in between.
CHECK_EVERY = 100

#: The state from which a training, a hook or an iterate resumes, by name.
State = Mapping[str, Any]


class Minimised(NamedTuple):
    """Results of a run of the loop in addition to the trained module.

    Attributes
    ----------
    losses : ndarray of shape (n_iter,)
    engine : {"eager", "cuda graph"}
    ended_by : BaseException or None
        The error that ended it early; the module holds the last finite state.
    """

    losses: np.ndarray
    engine: str
    ended_by: BaseException | None


class Scheduled:
    """A number on the device that changes with progress, so that a step that uses it can be captured.

    Parameters
    ----------
    name : str
        The parameter of the estimator that it comes from.
    schedule : callable or float
        Maps progress in [0, 1] to the number.
    like : Tensor
        Gives its dtype and device.
    positive : bool, default=False
        Whether zero is refused.

    Attributes
    ----------
    value : Tensor of shape ()
    """

    def __init__(
        self, name: str, schedule: Callable[[float], float] | float, like: Tensor, *, positive: bool = False
    ) -> None:
        self.name = name
        self.schedule = schedule
        self.positive = positive
        self.value = like.new_zeros(())

    def check(self, n: int = 50) -> None:
        """Raise TypeError or ValueError unless all values of n steps from zero to one are valid."""
        if callable(self.schedule):
            check_function(self.schedule, self.name, "progress")
        for i in range(n + 1):
            self.advance(i / n)

    def advance(self, progress: float) -> None:
        """Set the value for this progress.

        Raises
        ------
        ValueError
            It is not a finite number of zero or more, or of more than zero.
        """
        value: SupportsFloat = self.schedule(progress) if callable(self.schedule) else self.schedule
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            number = math.nan
        if not (0 <= number < math.inf) or (self.positive and number == 0):
            expected = "a positive number" if self.positive else "a number of zero or more"
            at = f"at progress {progress:.3g}, expected {expected}"
            raise ValueError(f"`{self.name}` returned {shown(value)} {at}.")
        self.value.fill_(number)


class Objective(NamedTuple):
    """An objective to minimise.

    Attributes
    ----------
    gradient_fn : callable
        Sets `grad` of every parameter to a new estimate of the gradient and returns an estimate of the loss, without
        a graph. It runs without automatic differentiation; `by_autograd` makes one from a loss.
    schedules : sequence of Scheduled
        The numbers in it that change with progress.
    """

    gradient_fn: Callable[[], Tensor]
    schedules: Sequence[Scheduled] = ()

    def __call__(self) -> Tensor:
        """Set the gradient, and return the loss."""
        return self.gradient_fn()

    def advance(self, progress: float) -> None:
        """Set all scheduled numbers for this progress."""
        for scheduled in self.schedules:
            scheduled.advance(progress)


class Progress(NamedTuple):
    """Where a training stands, as hooks see it.

    Attributes
    ----------
    n_done : int
        Iterations.
    loss : Tensor of shape ()
        The last.
    module : Module
    iterate : Iterate
        Its parameters.
    state : callable
        Returns the state for `resume`.
    """

    n_done: int
    loss: Tensor
    module: nn.Module
    iterate: Iterate
    state: Callable[[], State]


class Hook(Protocol):
    """An action between iterations, at intervals.

    Attributes
    ----------
    every : int
        Iterations from one call to the next.
    at_end : bool
        Whether it is called after the last iteration in any case.
    """

    every: int
    at_end: bool

    def __call__(self, progress: Progress) -> bool:
        """Act; tell whether the training is to stop."""


def learning_rate_factor(decay: Decay, max_iter: int, warm_up: int = 0) -> Callable[[int], float]:
    """Return the factor of the learning rate at iteration t.

    It rises over the first `warm_up` iterations. `decay` is None (constant), "cosine" (to zero at `max_iter`)
    or a pair (factor, every): multiplied by `factor` every `every` iterations.
    """
    if warm_up:
        factor_then = learning_rate_factor(decay, max_iter)
        return lambda t: factor_then(t) * min(1.0, (t + 1) / warm_up)
    if decay is None:
        return lambda _: 1.0
    if isinstance(decay, str):
        return lambda t: (1 + math.cos(math.pi * t / max_iter)) / 2
    factor, every = decay
    return lambda t: factor ** (t // every)


def flatten(module: nn.Module) -> Tensor:
    """Make the parameters of a module, and their gradients, views of one vector; return it.

    An optimiser step, an average and a norm are then one operation each, whatever the number of layers.
    """
    parameters = list(module.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    flat.grad = torch.zeros_like(flat)
    sizes = [p.numel() for p in parameters]
    for p, values, gradients in zip(parameters, flat.split(sizes), flat.grad.split(sizes), strict=True):
        p.data, p.grad = values.view_as(p), gradients.view_as(p)
    return flat


class Iterate:
    """The parameters of a module as one vector, with Adam's moments and the moving average.

    A step whose loss or gradient is not finite changes nothing.

    Parameters
    ----------
    module : Module
        Its parameters become views of the vector.
    optimiser : Adam
    """

    def __init__(self, module: nn.Module, optimiser: Adam) -> None:
        self.flat = flatten(module)
        self.gradient = self.flat.grad if self.flat.grad is not None else torch.zeros_like(self.flat)
        self.betas = optimiser.betas
        self.max_norm = optimiser.max_norm
        self.ema = optimiser.ema
        self.m, self.v = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        scalars = torch.zeros(3, dtype=torch.float32, device=self.flat.device)  # as the fused kernel asks
        self.n_steps, self.rate, self.refused = scalars.unbind()
        self.spoilt = self.flat.new_zeros(())  # or NaN
        self.average = None if self.ema is None else self.flat.clone()
        self.on_gpu = self.flat.device.type == "cuda"

    def step(self, loss: Tensor) -> None:
        """Take an Adam step by the current gradient, unless it or the loss is not finite."""
        total = self.gradient.sum() + loss
        torch.sub(total, total, out=self.spoilt)
        torch.ne(self.spoilt, self.spoilt, out=self.refused)
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_([self.flat], self.max_norm)
        adam(
            [self.flat], [self.gradient], [self.m], [self.v], [], [self.n_steps], found_inf=self.refused,
            beta1=self.betas[0], beta2=self.betas[1], lr=self.rate, weight_decay=0.0, eps=1e-8,
            fused=True, capturable=self.on_gpu, amsgrad=False, maximize=False,
        )  # fmt: skip

    def follow(self, t: int) -> None:
        """Move the average, with a memory that grows to 1 / (1 - decay) steps."""
        if self.average is not None and self.ema is not None:
            self.average.lerp_(self.flat, max(1 - self.ema, 9 / (10 + t)))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the module by the averaged one within a context."""
        if self.average is None:
            yield
            return
        kept = self.flat.clone()
        self.flat.copy_(self.average)
        try:
            yield
        finally:
            self.flat.copy_(kept)

    def state(self) -> dict[str, Tensor | None]:
        vectors = {"flat": self.flat, "m": self.m, "v": self.v, "average": self.average}
        return {**vectors, "n_steps": self.n_steps.clone()}  # a view would be saved with all three numbers

    def resume(self, state: State) -> None:
        for name, value in self.state().items():
            if value is not None:
                getattr(self, name).copy_(state[name])

    def release(self, module: nn.Module) -> None:
        """Leave the module with the average and with parameters of its own."""
        if self.average is not None:
            self.flat.copy_(self.average)
        for p in module.parameters():
            p.data, p.grad = p.data.clone(), None


@torch.no_grad()
def minimise(
    objective: Objective,
    module: nn.Module,
    optimiser: Adam,
    generator: torch.Generator,
    *,
    learning_rate: float,
    max_iter: int,
    hooks: Sequence[Hook] = (),
    resume: State | None = None,
) -> Minimised:
    """Minimise a stochastic loss over the parameters of a module, in place, by Adam.

    On a GPU the whole step is captured as one CUDA graph where the score allows it. An error that ends the loop, also
    Ctrl-C, is returned and not raised, so that the caller can save the state first.

    Parameters
    ----------
    objective : Objective
    module : Module
    optimiser : Adam
    generator : torch.Generator
        Whatever the objective draws from.
    learning_rate, max_iter
        See the approximators.
    hooks : sequence of Hook
        Called in this order; the first that stops the training is the last called.
    resume : dict, default=None
        A state to resume from, as given to a hook.
    """
    iterate = Iterate(module, optimiser)
    rate_factor = learning_rate_factor(optimiser.decay, max_iter, optimiser.warm_up)
    objective.advance(0.0)
    loss_now, losses = iterate.flat.new_zeros(()), iterate.flat.new_zeros(max_iter)
    n_done, engine, ended_by = 0, "eager", None
    if resume is not None:
        n_done = len(resume["losses"])
        losses[:n_done] = resume["losses"]
        iterate.resume(resume)
        generator.set_state(resume["generator"].cpu().view(torch.uint8))

    def step() -> None:
        loss_now.copy_(objective())
        iterate.step(loss_now)

    def state() -> State:
        return {
            **iterate.state(),
            "losses": losses[:n_done].clone(),
            "generator": generator.get_state().view(torch.int64),
        }

    run_step, first = step, n_done
    try:
        for t in range(first, max_iter):
            iterate.rate.fill_(learning_rate * rate_factor(t))
            objective.advance(t / max_iter)
            if iterate.on_gpu and t == first + 3:  # eager steps, so that lazy initialisation is over
                run_step, engine = capture(step, generator)
            run_step()
            iterate.follow(t)
            torch.add(loss_now, iterate.spoilt, out=losses[t])
            n_done = t + 1
            last = n_done == max_iter
            if n_done % CHECK_EVERY == 0 or last:
                _check_finite(losses[:n_done], optimiser.nonfinite)
            if _stops(hooks, Progress(n_done, loss_now, module, iterate, state), last):
                break
    except BaseException as error:
        ended_by = error
    iterate.release(module)
    return Minimised(losses[:n_done].cpu().numpy(), engine, ended_by)


def _stops(hooks: Sequence[Hook], progress: Progress, last: bool) -> bool:
    """Call the hooks that are due, up to the first that stops the training; tell whether one does."""
    due = [hook for hook in hooks if progress.n_done % hook.every == 0 or (last and hook.at_end)]
    return any(hook(progress) for hook in due)


def by_autograd(loss_fn: Callable[[], Tensor], module: nn.Module) -> Callable[[], Tensor]:
    """Make a `gradient_fn` from a differentiable estimate of the loss."""

    def gradient_fn() -> Tensor:
        module.zero_grad(set_to_none=False)
        with torch.enable_grad():
            loss = loss_fn()
            loss.backward()
        return loss.detach()

    return gradient_fn


def capture(step: Callable[[], None], generator: torch.Generator) -> tuple[Callable[[], None], str]:
    """Record a step as one CUDA graph; return its replay, or the step itself where it cannot be recorded.

    A score that looks at values on the host (`.item()`, a branch on a tensor) or changes shapes cannot be.
    """
    device, state = generator.device, generator.get_state()
    stream_before = torch.cuda.current_stream(device)
    graph = torch.cuda.CUDAGraph()
    try:
        graph.register_generator_state(generator)
        stream = torch.cuda.Stream(device)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
    except RuntimeError:
        torch.cuda.set_stream(stream_before)
        torch.cuda.synchronize(device)
        generator.set_state(state)
        return step, "eager"
    return graph.replay, "cuda graph"


def _check_finite(losses: Tensor, nonfinite: str) -> None:
    """Refuse a loss that is not finite or, if such steps are skipped, a hundred of them in a row.

    Raises
    ------
    FloatingPointError
    """
    bad = ~losses.isfinite()
    if not bad.any():
        return
    if nonfinite == "raise":
        iteration = int(bad.nonzero()[0])
        raise FloatingPointError(f"The loss or its gradient is not finite at iteration {iteration}")
    if bad[-CHECK_EVERY:].all():
        raise FloatingPointError(f"The loss is not finite in the last {min(CHECK_EVERY, len(losses))} iterations")
