"""Targets of log-densities in JAX, and of NumPyro models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import signature
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skksivi._utils.arrays import as_array
from skksivi._utils.checks import check_integer
from skksivi._utils.log import telling
from skksivi.bridges._foreign import ForeignTarget, ModelTarget, as_tensor_like, import_library, recast
from skksivi.targets import NamedTarget, coordinate_names

if TYPE_CHECKING:
    from jax import Array

P = ParamSpec("P")
T = TypeVar("T")

#: Functions of one point, which is whatever tree of arrays the user has.
PointDensity = Callable[[Any], "Array"]
Constrain = Callable[[Any], Mapping[str, "Array"]]


class Compiled(NamedTuple):
    """Functions of rows, which JAX compiles when they are called with a new number of rows."""

    value_and_gradient: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    product: Callable[[np.ndarray, np.ndarray], np.ndarray]
    parameters: Callable[[np.ndarray], dict[str, np.ndarray]]


class JaxTarget(ForeignTarget):
    """A target of a log-density of one point, which is a tree of arrays like `example`.

    Parameters are the arrays of the tree, or what `constrain_one` returns for it.
    """

    _compiled: Compiled
    _has_products = True

    def __init__(
        self,
        log_density: PointDensity,
        example: object,
        constrain_one: Constrain | None = None,
        spaces: Mapping[str, str] | None = None,
    ) -> None:
        jax = import_library("jax", "jax")
        leaves, self._tree = jax.tree.flatten_with_path(example)
        self._shapes = {
            jax.tree_util.keystr(path, simple=True, separator=".") or "x": np.shape(leaf) for path, leaf in leaves
        }
        super().__init__(coordinate_names(self._shapes, spaces))
        self._log_density = log_density
        self._constrain_one = constrain_one
        self._compiled = self._compile()
        self._probe()

    @property
    def advice(self) -> str:
        """How to compute it more accurately, if it is computed in float32."""
        if _canonical(np.float64) == np.float64:
            return ""
        return (
            "the model is computed in float32; call numpyro.enable_x64(), or "
            'jax.config.update("jax_enable_x64", True), at the very start of the program'
        )

    def score_fn(self, x: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of x (n, d), with a graph where JAX has second derivatives."""
        return _JaxScore.apply(x, self) if self._has_products else super().score_fn(x)

    def product(self, x: Tensor, v: Tensor) -> Tensor:
        """Return the product of the symmetric Jacobian of the score at x (n, d) with v (n, d)."""
        X, V = (a.detach().cpu().numpy() for a in (x, v))
        return as_tensor_like(self._call(self._compiled.product, X, V), x).to(x)

    def _evaluate(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._call(self._compiled.value_and_gradient, X)

    def _constrain(self, X: np.ndarray) -> dict[str, np.ndarray]:
        return {name: np.array(values) for name, values in self._call(self._compiled.parameters, X).items()}

    def _call(self, function: Callable[..., T], *arrays: np.ndarray) -> T:
        """Call a compiled function of rows on blocks of them, the last padded by zeros, in the type JAX is set to.

        Even a local `jax.enable_x64` would leave traces of float64 where the user's own float32 functions meet them.
        """
        jax = import_library("jax", "jax")
        n, dtype = len(arrays[0]), _canonical(np.float64)
        stops = np.cumsum(list(_block_sizes(n)))
        padded = (np.concatenate([A.astype(dtype), np.zeros((stops[-1] - n, A.shape[1]), dtype)]) for A in arrays)
        blocks = [function(*block) for block in zip(*(np.split(A, stops[:-1]) for A in padded), strict=True)]
        return jax.tree.map(lambda *parts: np.concatenate(parts)[:n], *blocks)

    def _log_p(self, row: Array) -> Array:
        return self._log_density(self._point(row))

    def _point(self, row: Array) -> object:
        """Return the tree of arrays that a row (d,) holds."""
        leaves, start = [], 0
        for shape in self._shapes.values():
            leaves.append(row[start : start + math.prod(shape)].reshape(shape))
            start += math.prod(shape)
        return self._tree.unflatten(leaves)

    def _parameters_of(self, row: Array) -> Mapping[str, Array]:
        point = self._point(row)
        if self._constrain_one is not None:
            return self._constrain_one(point)
        return dict(zip(self._shapes, self._tree.flatten_up_to(point), strict=True))

    def _compile(self) -> Compiled:
        jax = import_library("jax", "jax")

        def product(row: Array, v: Array) -> Array:
            return jax.jvp(jax.grad(self._log_p), (row,), (v,))[1]

        functions = (jax.value_and_grad(self._log_p), product, self._parameters_of)
        return Compiled(*map(_by_row, functions))

    def _probe(self) -> None:
        """Trace the log-density without evaluating it; do without products where there are none."""
        jax = import_library("jax", "jax")
        row = jax.numpy.zeros(self.n_features)
        value = jax.eval_shape(self._log_p, row)
        if getattr(value, "shape", None) != ():
            raise ValueError(f"`log_density` of one point must return one number, shape (), got {value}.")
        try:
            jax.eval_shape(self._compiled.product, row[None], row[None])
        except Exception:  # a gradient by hand, say, of which JAX knows no derivative
            self._has_products = False
        if not self._has_products:  # a while_loop has no gradient either, which JAX says itself
            jax.eval_shape(self._compiled.value_and_gradient, row[None])


class _JaxScore(torch.autograd.Function):
    """The score of a target in JAX, whose products are those of the Hessian."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: JaxTarget) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x)
        ctx.target = target
        return ForeignTarget.score_fn(target, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return ctx.target.product(*ctx.saved_tensors, v), None


def from_jax(log_density: PointDensity, example: object) -> JaxTarget:
    """Make a target from a log-density in JAX, which compiles it with its first two derivatives.

    It is computed in float32 unless JAX is set to float64, best at the very start of a program, by
    ``jax.config.update("jax_enable_x64", True)``. Steep or narrow densities need float64.

    Parameters
    ----------
    log_density : callable
        The log-density of one point, up to a constant: an array (n_features,), or a tree of arrays like `example` ->
        a number. Parameters with bounds must be transformed to the whole line first, with the log-Jacobian added.
    example : int, or tree of array-like
        The number of features, or a point, such as a dict of arrays; only the shapes matter.

    Returns
    -------
    target : Target
        Its `constrain` and `names` use the keys of the tree.

    Raises
    ------
    ImportError
        JAX is not installed.
    TypeError
        `log_density` is not callable.
    ValueError
        It does not return one number, or `example` holds none.

    See Also
    --------
    from_log_prob : A target of a log-density in torch.
    from_numpyro : A target of a NumPyro model.

    References
    ----------
    Bradbury, J. et al. (2018). JAX: composable transformations of Python+NumPy programs. https://docs.jax.dev

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import torch
    >>> from skksivi.targets import from_jax
    >>> target = from_jax(lambda p: -jnp.sum(p["a"] ** 4) - p["b"] ** 2, {"a": jnp.ones(2), "b": 0.0})
    >>> target.names
    ('a[0]', 'a[1]', 'b')
    >>> target.score_fn(torch.tensor([[1.0, -1.0, 3.0]]))
    tensor([[-4.,  4., -6.]])
    >>> target.constrain([[1.0, -1.0, 3.0]])["b"].tolist()
    [3.0]
    """
    if not callable(log_density):
        raise TypeError(f"`log_density` must be callable, got a {type(log_density).__name__}.")
    if isinstance(example, Integral):
        example = np.zeros(check_integer(example, "example", min_val=1))
    return JaxTarget(log_density, example)


def from_numpyro(model: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> NamedTarget:
    """Make a target from a NumPyro model, in the unconstrained space of NumPyro's own samplers.

    It is computed in float32 unless JAX is set to float64, best at the very start of a program, by
    ``numpyro.enable_x64()``. Steep or narrow densities need float64.

    Parameters
    ----------
    model : callable
        With only continuous latent sites, and with all of its data: the subsample of a plate would not be redrawn.
    *args, **kwargs
        The arguments of the model, data among them.

    Returns
    -------
    target : Target
        Its `constrain` returns the latent and deterministic sites by name. A latent angle, which NumPyro's
        ``CircularReparam`` has on the whole line, has a coordinate of one period of it.

    Raises
    ------
    ImportError
        NumPyro is not installed.
    ValueError, RuntimeError
        The model has discrete latent sites, subsamples its data, or NumPyro finds no valid parameters.

    See Also
    --------
    from_pymc : A target of a PyMC model.
    from_jax : A target of a log-density in JAX.
    skksivi.to_arviz : Named draws for ArviZ.

    References
    ----------
    Phan, D., Pradhan, N. and Jankowiak, M. (2019). Composable effects for flexible and accelerated probabilistic
    programming in NumPyro. https://arxiv.org/abs/1912.11554

    Examples
    --------
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> import torch
    >>> from skksivi.targets import from_numpyro
    >>> def model(y):
    ...     rate = numpyro.sample("rate", dist.Exponential(1.0))
    ...     numpyro.sample("y", dist.Poisson(rate), obs=y)
    >>> target = from_numpyro(model, y=3)
    >>> target.score_fn(torch.zeros(1, 1))  # of log rate: the density is rate^4 exp(-2 rate)
    tensor([[2.]])
    >>> target.constrain([[0.0]])["rate"].tolist()
    [1.0]
    """
    angular = import_library("numpyro", "numpyro").handlers.reparam(model, config=_as_angle)
    info = _initialized(angular, model_args=args, model_kwargs=kwargs)
    target = NumpyroTarget(partial(angular, *args, **kwargs), info, signature(model).bind(*args, **kwargs).arguments)
    reparametrised = [name.removesuffix("_factor") for name in info.model_trace if name.endswith("_factor")]
    return recast(target, [f"{name}_unwrapped" for name in reparametrised])  # by CircularReparam


class NumpyroTarget(ModelTarget, JaxTarget):
    """A target of a NumPyro model without arguments, with what `_initialized` has found, and its data by name."""

    def __init__(self, model: Callable[[], object], info: Any, given: Mapping[str, Any]) -> None:  # noqa: ANN401
        density, z, trace = partial(_negative, info.potential_fn), info.param_info.z, info.model_trace
        super().__init__(density, z, info.postprocess_fn, _spaces(trace))
        self._model, self._latent = model, list(z)
        # the density of an angle by CircularReparam is a factor
        factors = (name.replace("_unwrapped", "_factor") for name in z if name.endswith("_unwrapped"))
        self._of_prior = [*z, *(name for name in factors if name in trace)]
        unit = import_library("numpyro.distributions", "numpyro").Unit  # of factors
        self._observed = [
            name for name, site in trace.items() if site.get("is_observed") and not isinstance(site["fn"], unit)
        ]
        values = {name: trace[name]["value"] for name in self._observed}
        self.observed_data = {name: np.asarray(value) for name, value in values.items()}
        self.constant_data = {
            name: np.asarray(value)
            for name, value in given.items()
            if hasattr(value, "dtype") and not any(value is own for own in values.values())
        }

    def _from_prior(self, n: int, seed: int) -> np.ndarray:
        jax = import_library("jax", "jax")
        z = _by_row(self._drawn)(jax.random.split(jax.random.key(seed), n))
        return np.concatenate([np.reshape(leaf, (n, -1)) for leaf in jax.tree.leaves(z)], 1)

    def _drawn(self, key: Array) -> dict[str, Array]:
        """Return the latent sites, drawn from their prior, on the whole line."""
        handlers = import_library("numpyro.handlers", "numpyro")
        util = import_library("numpyro.infer.util", "numpyro")
        seeded = handlers.seed(self._model, key)
        trace = handlers.trace(seeded).get_trace()
        return util.unconstrain_fn(seeded, (), {}, {name: trace[name]["value"] for name in self._latent})

    def densities(self, x: Tensor, *, observed: bool) -> dict[str, np.ndarray]:
        """Evaluate log-densities of what the model observes, or of its parameters, element by element."""
        handlers = import_library("numpyro.handlers", "numpyro")
        names = self._observed if observed else self._of_prior

        def of_row(row: Array) -> dict[str, Array]:
            known = handlers.substitute(self._model, self._parameters_of(row))
            trace = handlers.trace(known).get_trace()
            return {name: trace[name]["fn"].log_prob(trace[name]["value"]) for name in names}

        return self._call(_by_row(of_row), as_array(x))

    def predictive_draws(self, x: Tensor, seed: int) -> dict[str, np.ndarray]:
        """Draw what the model observes once for each row of x (n, d)."""
        numpyro, jax = import_library("numpyro", "numpyro"), import_library("jax", "jax")
        free = numpyro.handlers.uncondition(self._model)
        predictive = numpyro.infer.Predictive(free, self.constrain(x), return_sites=self._observed)
        return {name: np.asarray(values) for name, values in predictive(jax.random.key(seed)).items()}


def _by_row(function: Callable[..., object]) -> Callable[..., Any]:
    """Return a function of rows, which JAX compiles when it is called with a new number of them."""
    jax, sizes = import_library("jax", "jax"), set[int]()
    compiled = jax.jit(jax.vmap(function))

    def of_rows(*arrays: np.ndarray) -> Any:  # noqa: ANN401
        if (n := len(arrays[0])) in sizes:
            return compiled(*arrays)
        with telling("Compiling the model of JAX"):  # a call returns before its result is there
            sizes.add(n)
            return compiled(*arrays)

    return of_rows


def _as_angle(site: Mapping[str, Any]) -> object:
    """Return NumPyro's reparametrisation of a latent angle, None of another site."""
    constraints = import_library("numpyro.distributions", "numpyro").constraints
    support = getattr(site["fn"], "support", None)
    support = getattr(support, "base_constraint", support)
    is_angle = support is constraints.circular and site["value"] is None
    return import_library("numpyro.infer.reparam", "numpyro").CircularReparam() if is_angle else None


def _spaces(trace: Mapping[str, Any]) -> dict[str, str]:
    """Return what the coordinates of each latent site are of it, see `coordinate_names`."""
    transforms = import_library("numpyro.distributions", "numpyro").transforms
    kinds = {transforms.IdentityTransform: "", transforms.ExpTransform: "log", transforms.SigmoidTransform: "logit"}
    spaces = {}
    for name, site in trace.items():
        if site["type"] == "sample" and not site["is_observed"]:
            transform = transforms.biject_to(site["fn"].support)
            transform = getattr(transform, "base_transform", transform)
            spaces[name] = kinds.get(type(transform), "unconstrained")
    return spaces


@telling("Compiling the model of NumPyro")
def _initialized(model: Callable[..., object], **given: Any) -> Any:  # noqa: ANN401
    """Return what NumPyro finds out about a model, valid at random points or else near the origin, and check it."""
    infer = import_library("numpyro.infer", "numpyro")
    # without its check of a gradient, half of the seconds: a fit checks the score itself
    initialize = partial(
        infer.util.initialize_model,
        import_library("jax", "numpyro").random.key(0),
        model,
        validate_grad=False,
        **given,
    )
    try:
        info = initialize()
    except (RuntimeError, ValueError) as error:  # of exp(slope * year) with a slope of one
        try:
            info = initialize(init_strategy=infer.init_to_uniform(radius=1e-8))
        except (RuntimeError, ValueError):
            raise error from None
    _check_plates(info.model_trace)
    return info


def _check_plates(trace: Mapping[str, Any]) -> None:
    """Raise ValueError for a model that subsamples its data."""
    for name, site in trace.items():
        if site["type"] == "plate" and site["args"][1] not in (None, site["args"][0]):
            raise ValueError(f"`model` subsamples plate {name!r}; give it all of the data, without `subsample_size`.")


def _canonical(dtype: object) -> np.dtype:
    """Return the type in which JAX is set to compute numbers of a type."""
    return import_library("jax", "jax").dtypes.canonicalize_dtype(dtype)


def _negative(potential: PointDensity, point: object) -> Array:
    return -potential(point)


def _block_sizes(n: int) -> Iterator[int]:
    """Yield sizes of blocks for n rows, each half filled at least, if it is not the smallest."""
    sizes = (32, 128, 512)  # every size is compiled anew, which takes longer than many evaluations
    while n > 0:
        size = max(s for s in sizes if s <= max(2 * n, sizes[0]))
        yield size
        n -= size
