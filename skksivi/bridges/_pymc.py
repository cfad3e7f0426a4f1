"""Targets of PyMC models."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from skksivi._utils.arrays import as_array
from skksivi._utils.log import telling
from skksivi.bridges._foreign import ONE_AT_A_TIME, BlackBoxTarget, ModelTarget, by_row, import_library, recast
from skksivi.targets import NamedTarget, coordinate_names

if TYPE_CHECKING:
    from pymc import Model
    from pytensor.tensor.variable import TensorVariable

    Shapes = Mapping[TensorVariable, tuple[int, ...]]

#: Maps points (n, d) to arrays.
Function = Callable[[np.ndarray], list[np.ndarray]]


class CompiledModel(NamedTuple):
    """Functions of points (n, d)."""

    value_and_gradient: Function
    parameters: Function


class PymcTarget(ModelTarget, BlackBoxTarget):
    """A target of a PyMC model, in the space of its value variables."""

    _compiled: CompiledModel

    def __init__(self, model: Model) -> None:
        start = model.initial_point()
        self.shapes = {v.name: start[v.name].shape for v in model.continuous_value_vars}
        super().__init__(coordinate_names(self.shapes))
        self._model = model
        self._parameter_names = [variable.name for variable in model.unobserved_RVs]
        self.coords = {name: labels for name, labels in model.coords.items() if labels is not None}
        self.dims = dict(model.named_vars_to_dims)
        of_arviz = import_library("pymc.backends.arviz", "pymc")
        self.observed_data, self.constant_data = of_arviz.find_observations(model), of_arviz.find_constants(model)
        self._compiled = self._compile()

    def _value_and_gradient(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        value, gradient = self._compiled.value_and_gradient(X)
        return value, gradient

    def _parameters(self, X: np.ndarray) -> dict[str, np.ndarray]:
        return dict(zip(self._parameter_names, self._compiled.parameters(X), strict=True))

    def densities(self, x: Tensor, *, observed: bool) -> dict[str, np.ndarray]:
        """Evaluate log-densities of what the model observes, or of its parameters, element by element."""
        model = self._model
        variables = model.observed_RVs if observed else model.free_RVs
        if not variables:
            return {}
        shapes = {v: self.shapes[v.name] for v in model.continuous_value_vars}
        with ONE_AT_A_TIME:
            with telling("Compiling the densities of PyMC"):
                evaluate = _of_rows(model.logp(variables, jacobian=False, sum=False), shapes)
            found = evaluate(as_array(x).astype(np.float64))
        return dict(zip((variable.name for variable in variables), found, strict=True))

    def predictive_draws(self, x: Tensor, seed: int) -> dict[str, np.ndarray]:
        """Draw what the model observes once for each row of x (n, d)."""
        model, pymc = self._model, import_library("pymc", "pymc")
        if not model.observed_RVs:
            return {}
        replaced = import_library("pytensor.graph.replace", "pymc").clone_replace
        row = import_library("pytensor.tensor", "pymc").vector("x", dtype="float64")
        parts = _split(row, {v: self.shapes[v.name] for v in model.continuous_value_vars})
        free = dict(zip(model.free_RVs, model.replace_rvs_by_values(model.free_RVs), strict=True))
        observed = replaced(replaced(model.observed_RVs, free), parts)
        draw = pymc.compile([row], observed, random_seed=seed)  # of rows: not all distributions can be vectorised
        with ONE_AT_A_TIME:
            found = by_row(draw, as_array(x).astype(np.float64))
        return dict(zip((variable.name for variable in model.observed_RVs), found, strict=True))

    @telling("Compiling the model of PyMC")
    def _compile(self) -> CompiledModel:
        model = self._model
        shapes = {v: self.shapes[v.name] for v in model.continuous_value_vars}
        parameters = model.replace_rvs_by_values(model.unobserved_RVs)  # the deterministic ones too
        # Tests of parameters become a density of zero now, row by row; a vectorised test would fail for all rows.
        rewrite = import_library("pytensor.graph.rewriting.utils", "pymc").rewrite_graph
        log_p = rewrite(model.logp(), include=("canonicalize", "local_check_parameter_to_ninf_switch"))
        return CompiledModel(_of_rows([log_p], shapes, gradient=True), _of_rows(parameters, shapes))

    def _from_prior(self, n: int, seed: int) -> np.ndarray:
        model, points = self._model, []
        for variable in map(model.values_to_rvs.get, model.continuous_value_vars):
            transform = model.rvs_to_transforms[variable]
            points.append(variable if transform is None else transform.forward(variable, *variable.owner.inputs))
        drawn = import_library("pymc", "pymc").draw(points, draws=n, random_seed=seed)
        return np.concatenate([np.reshape(part, (n, -1)) for part in drawn], 1)

    def __getstate__(self) -> dict[str, object]:
        # PyMC's models need cloudpickle, which comes with it, and not as joblib calls it.
        return {**super().__getstate__(), "_model": import_library("cloudpickle", "pymc").dumps(self._model)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_model": pickle.loads(state["_model"])})  # noqa: S301


def _of_rows(outputs: Sequence[TensorVariable], shapes: Shapes, *, gradient: bool = False) -> Function:
    """Return a function of points (n, d) that evaluates `outputs` at each, and the gradient of the first.

    The variables in `shapes` are what a point consists of.
    """
    pt = import_library("pytensor.tensor", "pymc")
    graph = import_library("pytensor.graph.replace", "pymc")
    has_loops = _has_loops(outputs)
    x = (pt.vector if has_loops else pt.matrix)("x", dtype="float64")
    parts = _split(x, shapes)
    if has_loops:  # whose graph is cloned, the parts of x too
        return partial(by_row, _function(x, graph.clone_replace(list(outputs), parts), gradient=gradient))
    new = graph.vectorize_graph(list(outputs), parts)
    varies = [b.ndim > a.ndim for a, b in zip(outputs, new, strict=True)]
    new = [b if v else pt.broadcast_to(b, (x.shape[0], *b.shape)) for b, v in zip(new, varies, strict=True)]
    return _function(x, new, gradient=gradient)


def _has_loops(outputs: Sequence[TensorVariable]) -> bool:
    """Tell whether there are loops in the graph, which PyTensor spoils for all other uses by vectorising them."""
    loop = import_library("pytensor.scan.op", "pymc").Scan
    variables = import_library("pytensor.graph.traversal", "pymc").ancestors(outputs)
    return any(v.owner is not None and isinstance(v.owner.op, loop) for v in variables)


def _split(x: TensorVariable, shapes: Shapes) -> dict[TensorVariable, TensorVariable]:
    """Return the variables as parts of x (..., d)."""
    parts, start = {}, 0
    for variable, shape in shapes.items():
        stop = start + math.prod(shape)
        lead = [x.shape[i] for i in range(x.ndim - 1)]
        parts[variable] = x[..., start:stop].reshape((*lead, *shape)).astype(variable.dtype)
        start = stop
    return parts


def _function(x: TensorVariable, outputs: Sequence[TensorVariable], *, gradient: bool) -> Function:
    """Compile a function of x that returns `outputs` and, if asked for, the gradient of the first."""
    pymc, pytensor = import_library("pymc", "pymc"), import_library("pytensor", "pymc")
    gradients = [pytensor.grad(outputs[0].sum(), x)] if gradient else []  # a row's value depends on that row alone
    return pymc.compile([x], [*outputs, *gradients])


def from_pymc(model: Model) -> NamedTarget:
    """Make a target from a PyMC model, in the unconstrained space of PyMC's own samplers, but for angles and shares.

    An angle, which PyMC has on the whole line, has a coordinate of one period of it; shares of one are as in
    `constrained`. The log-density and its gradient
    are compiled for whole batches, in float64, by the mode that ``pytensor.config.mode`` names.

    Parameters
    ----------
    model : pymc.Model
        With continuous free variables only.

    Returns
    -------
    target : Target
        Its `constrain` returns free and deterministic variables by name; `skksivi.to_arviz` labels them by the coords
        of the model.

    Raises
    ------
    ImportError
        PyMC is not installed.
    TypeError
        `model` is not a PyMC model.
    ValueError
        It has discrete free variables, or none.

    See Also
    --------
    from_numpyro : A target of a NumPyro model.
    skksivi.to_arviz : Named draws for ArviZ.

    References
    ----------
    Abril-Pla, O. et al. (2023). PyMC: a modern and comprehensive probabilistic programming framework in Python.
    https://doi.org/10.7717/peerj-cs.1516

    Examples
    --------
    >>> import pymc as pm
    >>> import torch
    >>> from skksivi.targets import from_pymc
    >>> with pm.Model() as model:
    ...     rate = pm.Exponential("rate", 1.0)
    ...     y = pm.Poisson("y", rate, observed=3)
    >>> target = from_pymc(model)
    >>> target.names
    ('rate_log__',)
    >>> target.score_fn(torch.zeros(1, 1))  # the density of log rate is proportional to rate^4 exp(-2 rate)
    tensor([[2.]])
    >>> target.constrain([[0.0]])
    {'rate': array([1.])}
    """
    _check_model(model)
    transforms, target = import_library("pymc.distributions.transforms", "pymc"), PymcTarget(model)
    by_name = {model.rvs_to_values[v].name: transform for v, transform in model.rvs_to_transforms.items()}
    angles, shares = (
        [name for name, transform in by_name.items() if isinstance(transform, kind)]
        for kind in (transforms.CircularTransform, transforms.SimplexTransform)
    )
    return recast(target, angles, {name: target.shapes[name][-1] for name in shares})


def _check_model(model: object) -> None:
    """Raise TypeError or ValueError unless it is a PyMC model without discrete free variables."""
    pymc = import_library("pymc", "pymc")
    if not isinstance(model, pymc.Model):
        raise TypeError(f"`model` must be a pymc.Model, got a {type(model).__name__}.")
    discrete = ", ".join(variable.name for variable in model.discrete_value_vars)
    if discrete:
        raise ValueError(f"`model` has discrete free variables, {discrete}; sum them out, as by pymc.Mixture.")
    ancestors = import_library("pytensor.graph.traversal", "pymc").ancestors
    minibatch = import_library("pymc.data", "pymc").MinibatchOp
    graph = ancestors([*model.basic_RVs, *model.rvs_to_values.values(), *model.potentials])
    if any(isinstance(getattr(variable.owner, "op", None), minibatch) for variable in graph):
        raise ValueError(
            "`model` draws its data by pymc.Minibatch; give it all of the data, without `total_size`. If these are "
            "too many, write the log-likelihood of rows in torch, for skksivi.targets.Minibatches."
        )
