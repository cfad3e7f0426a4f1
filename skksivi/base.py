"""The base of every approximator: fit, sample and score, validation and randomness."""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from numbers import Integral, Real
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, DensityMixin
from sklearn.utils import check_array
from sklearn.utils._param_validation import HasMethods
from sklearn.utils.validation import check_is_fitted

from skksivi._utils import DOCUMENTATION
from skksivi._utils.arrays import (
    DTYPES,
    RandomState,
    as_array,
    as_tensor,
    make_generator,
    make_seed,
    resolve_device,
    without_graph,
)
from skksivi._utils.checks import check_integer, warn_caller
from skksivi._utils.log import LOGGER
from skksivi.families._derived import knows_density, mixture_of, trial_draws, unweighted
from skksivi.families._samplers import CHUNK, HasDensity, Sampler
from skksivi.kernels import Kernel, resolve_kernel
from skksivi.parameters import Constraints, Interval, Nested, ParameterObject, StrOptions, expanded
from skksivi.pilot._large_data import large_data
from skksivi.pilot._mixture import Components
from skksivi.score._domain import check_proper
from skksivi.score._score import Score, is_target
from skksivi.score._tally import BudgetError, Stage, Tally
from skksivi.score._target import TargetOrScore, on_device, resolve_score, unwrapped
from skksivi.stein._discrepancy import FixedKernelKSD
from skksivi.training._run import Fit, Reporter, Run, explained, logged, ordinary_mode

__all__ = ["BaseApproximator", "Constraints", "HasMethods", "Integral", "Interval", "Real", "StrOptions"]
__dir__ = __all__.copy

#: Fewest numbers that a draw needs in a network.
LEAST_WIDTH = 256

#: Draws by which a dtype is checked.
N_COMPARED = 200

#: The standard error of a log-density above which there is a warning, in nats.
MAX_VAGUE = 0.5


class Described:
    """The signature of an estimator, whose parameters, all by name, are in the order of its docstring."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        """Return the signature of a class, where a dataclass has those of its bases first."""
        signature = inspect.signature(owner.__init__)  # type: ignore[misc]
        described = (inspect.getdoc(owner) or "").partition("Parameters\n-")[2]
        order = re.findall(r"\w+", " ".join(re.findall(r"(?m)^(\w[\w, ]*?)(?: :.*)?$", described)))
        own = list(signature.parameters.values())[1:]
        return signature.replace(parameters=sorted(own, key=lambda p: order.index(p.name) if p.name in order else -1))


class BaseApproximator(DensityMixin, Nested, ABC):
    """Base of the approximators; a leaf gives `_fit`, which returns a `Fit` and assigns nothing."""

    __signature__ = Described()

    _parameter_constraints: ClassVar[Constraints] = {
        "device": [str, torch.device],
        "dtype": [StrOptions(set(DTYPES))],
        "random_state": ["random_state"],
    }

    _doc_link_module = "skksivi"  # notebooks show descriptions of parameters only with a link
    _doc_link_template = DOCUMENTATION + "/generated/{estimator_module}.{estimator_name}.html"

    device: str | torch.device
    dtype: str
    random_state: RandomState
    n_features_in_: int
    n_score_calls_: int
    stages_: list[Stage]
    n_products_: int
    sampler_: Sampler

    #: Of those that log nothing.
    verbose: int = 0

    def fit(self, score_fn: TargetOrScore, y: object = None, *, n_features: int | None = None) -> Self:
        """Fit the distribution to a target known by its score.

        Parameters
        ----------
        score_fn : callable or Target
            The gradient of log p at each row, (n, n_features) tensor -> (n, n_features) tensor. A function of arrays
            also works; it is called with float64 arrays. If training needs products with the Jacobian and automatic
            differentiation of the score fails or is wrong, they are finite differences. Or a
            `skksivi.targets.Target`, which has its own score and `n_features`.
        y : None
            Ignored, present by scikit-learn's convention.
        n_features : int, default=None
            Dimension of the target; needed with a bare callable.

        Returns
        -------
        self : object

        Raises
        ------
        TypeError
            `score_fn` is neither callable nor a Target, or returns neither a tensor nor an array.
        ValueError
            `n_features` is missing or contradicts the target, the score has another shape than its input, modifies
            its input or is finite nowhere, or a parameter is out of its range.
        FloatingPointError
            The loss became NaN or infinite.
        KeyboardInterrupt
            Ctrl-C. If a start has been found, the best state until then is kept and can be sampled, as it is after a
            loss that is not finite; the logger "skksivi" says where the fit stopped. An exception raised by the score
            leaves the estimator as it was, unless `warm_start` is set.

        Warns
        -----
        UserWarning
            The score seems to have the wrong sign, or not to be a gradient.
        ConvergenceWarning
            The result may be off, by its `verdict_`, or because chains have not converged or iterations were skipped
            or too few.
        """
        self._validate_params()
        est, reporter = self._resolved(), Reporter(self.verbose, score_fn)
        est._check_parameters(unwrapped(score_fn, n_features)[1])
        device = resolve_device(self.device, score_fn)
        seed = make_seed(_of_replicate(score_fn, self.random_state))
        with ordinary_mode(device), logged(self.verbose):
            near, dtype = est._points_near_target(), DTYPES[self.dtype]
            probed = resolve_score(
                score_fn, n_features, dtype=dtype, device=device, near=near, warns=False, frugal=est._is_frugal()
            )
            run = Run(seed, device, probed.tally, [reporter])
            run.tally.limit = est._max_score_calls()
            with _told_of_end(self, run.tally):
                with explained(probed), reporter.following(run.tally):
                    with suppress(BudgetError):  # the fit says so
                        check_proper(probed.double)
                    target = large_data(probed, near) if est._expands else probed
                    run.tally.end("fit")
                    fit = run.result(partial(est._fit, target), target.advice)
                learn(self, fit, run)
                self.__dict__.update(est._made_with(fit))
                _keep_names(self, score_fn, probed.names)
                probed = _doubted(probed, fit, run)
                with explained(probed), _counted(self, run.tally):
                    run.finish(fit.ended_by is None and not run.tally.is_spent)
                    est._conclude(fit, target, run.generator)
                if fit.ended_by is not None:
                    raise fit.ended_by
        if probed.doubt is not None:
            warn_caller(probed.doubt.words)
        return self

    def _expanded(self, name: str, value: object) -> BaseEstimator | None:
        return resolve_kernel(value) if name == "kernel" and isinstance(value, str) else expanded(name, value)

    def sample(self, n_samples: int = 1, random_state: RandomState = None) -> np.ndarray:
        """Draw from the fitted distribution.

        Draws are independent; if the fit is a set of points or states, they are picked from these at random.

        Parameters
        ----------
        n_samples : int, default=1
            How many, zero allowed.
        random_state : int, RandomState or None, default=None
            Makes the call repeatable. None continues the estimator's own stream, which `random_state` of the
            constructor seeds: two calls give different draws, two runs of a script the same.

        Returns
        -------
        X : ndarray of shape (n_samples, n_features)
            Of type `dtype`; float64 if neighbouring float32 numbers are farther apart than a thousandth of the spread
            of a coordinate, as can happen far from the origin.

        Raises
        ------
        NotFittedError
            Before `fit`.
        TypeError, ValueError
            `n_samples` is not an integer, or negative.
        """
        return self._sample(n_samples, random_state)

    def _sample(self, n_samples: int, random_state: RandomState, **options: int) -> np.ndarray:
        """Draw from the sampler, which may be given options, in parts."""
        check_is_fitted(self)
        check_integer(n_samples, "n_samples", min_val=0)
        device = torch.device(self.device_)
        generator = make_generator(self._random_state if random_state is None else random_state, device)
        X = np.empty((n_samples, self.n_features_in_), dtype=self._dtype_of_draws)
        sampler = unweighted(self.sampler_) if options else self.sampler_
        step = max(1, CHUNK // max(self.n_features_in_, LEAST_WIDTH) if self.sampler_.in_parts else n_samples)
        with ordinary_mode(device), torch.no_grad():
            for start in range(0, n_samples, step):
                block = X[start : start + step]
                block[:] = as_array(sampler.sample(len(block), generator, **options))
        return X

    def score_samples(self, X: ArrayLike, *, return_std: bool = False) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        r"""Evaluate the log-density of the fitted distribution.

        It is exact for a fit without training, a mixture of Gaussians in coordinates that may be bent. For a
        semi-implicit fit,

        .. math:: q(x) = \int q(z)\, N(x; \mu(z), \mathrm{diag}\, \sigma(z)^2)\, dz,

        it is estimated by importance sampling of z, around the most likely z given x, with 128 draws per x, and up to
        2,048 if the standard error exceeds 0.03 nats. In a hierarchy the layers are followed back from x, which
        evaluates the score. All calls use the same random numbers.

        Parameters
        ----------
        X : array-like of shape (n, n_features)
        return_std : bool, default=False
            Whether to return the standard errors of the estimates, too.

        Returns
        -------
        log_density : ndarray of shape (n,)
            In nats, float64.
        std : ndarray of shape (n,)
            In nats; only with `return_std`.

        Raises
        ------
        NotFittedError
            Before `fit`.
        TypeError
            The fit has no density: it is a set of points or states of chains, or its mixing distribution is such a
            set or a function.
        ValueError
            X has another number of columns than the target had, or holds non-finite values.

        Warns
        -----
        UserWarning
            Some of the standard errors exceed 0.5 nats, and `return_std` is False.

        References
        ----------
        Geweke, J. (1989). Bayesian inference in econometric models using Monte Carlo integration. Econometrica 57(6).
        """
        check_is_fitted(self)
        X = check_array(without_graph(X), dtype=np.float64, input_name="X")
        if X.shape[1] != self.n_features_in_:
            raise ValueError(f"`X` has {X.shape[1]} columns, expected {self.n_features_in_} as in `fit`.")
        device = torch.device(self.device_)
        with ordinary_mode(device), torch.no_grad():
            sampler = self.sampler_
            if not knows_density(sampler):
                raise TypeError(f"{without_density(self)}; score it against a target instead.")
            value, se = map(as_array, sampler.log_density(as_tensor(X, device=device)))
        if return_std:
            return value, se
        if n_vague := int((se > MAX_VAGUE).sum()):
            warn_caller(
                f"{n_vague} of {len(se)} log-densities have standard errors above {MAX_VAGUE} nats; return_std=True "
                "returns them, too."
            )
        return value

    def score(self, X: Any, y: object = None) -> float:  # noqa: ANN401
        """Return the goodness of fit; larger is better.

        Parameters
        ----------
        X : array-like of shape (n, n_features), Target or callable
            For draws from the target the result is their mean log-density, the mean of `score_samples`. For a target
            or its score function the result is minus the squared kernel Stein discrepancy of 2,000 fresh draws, under
            one kernel that depends only on the target. It is almost insensitive to the weights of separated modes.
        y : None
            Ignored, present by scikit-learn's convention.

        Returns
        -------
        score : float
            The same for the same estimator and X.
        """
        check_is_fitted(self)
        if not (is_target(X) or callable(X)):
            return float(np.mean(self.score_samples(X)))
        device = torch.device(self.device_)
        X = on_device(X, device=device)
        score_fn, n_features = unwrapped(X, getattr(X, "n_features", self.n_features_in_))
        if n_features != self.n_features_in_:
            raise ValueError(f"`X` is a target of {n_features} features, expected {self.n_features_in_} as in `fit`.")
        generator = torch.Generator(device).manual_seed(self._seed)
        with ordinary_mode(device):
            with torch.no_grad():
                x = self.sampler_.sample(2000, generator).to(DTYPES[self._dtype_of_draws])
            return -FixedKernelKSD(score_fn, n_features, device)(x)

    @property
    def weights_(self) -> np.ndarray:
        """The weights (k,) of the Gaussians that the fit is a mixture of."""
        return as_array(self._mixture().weights)

    @property
    def means_(self) -> np.ndarray:
        """The means (k, n_features) of the Gaussians."""
        return as_array(self._mixture().means)

    @property
    def covariances_(self) -> np.ndarray:
        """The covariances (k, n_features, n_features) of the Gaussians."""
        return as_array(self._mixture().covariances)

    @torch.no_grad()
    def _mixture(self) -> Components:
        check_is_fitted(self)
        is_large = self.n_features_in_ > 1000  # `dir` evaluates properties
        found = None if is_large else mixture_of(self.sampler_)
        if found is None:
            why = "has more than 1,000 features" if is_large else "is no mixture of Gaussians"
            raise AttributeError(
                f"This {type(self).__name__} {why}, so there are no `weights_`, `means_` and `covariances_`; "
                "`sample` draws from it."
            )
        return found

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "n_features_in_")

    def _check_parameters(self, n_features: int) -> None:
        """Raise for parameters that pass the constraints but do not suit so many features."""
        for value in self.get_params(deep=False).values():
            for part in value if isinstance(value, list | tuple) else [value]:
                if isinstance(part, ParameterObject | Kernel):
                    part.check()

    @property
    def _loss_label(self) -> str:
        """What `loss_curve_` holds, as it is called in a figure."""
        return "loss"

    def _resolved(self) -> Self:
        """Return an estimator with a value for each parameter that is left open, which makes the fit."""
        return self

    def _made_with(self, fit: Fit) -> dict[str, object]:
        """Return the values that parameters have had in a fit, as learned attributes."""
        return {}

    def _points_near_target(self) -> ArrayLike | None:
        """Return the points near the target that the parameters give, array-like, or None."""
        return None

    @property
    def _expands(self) -> bool:
        """Whether the fit takes large data as an expansion at their mode."""
        return False

    def _max_score_calls(self) -> int | None:
        """None for no limit."""
        return None

    def _is_frugal(self) -> bool:
        """Tell whether the fit makes do with few calls of the score."""
        return False

    @abstractmethod
    def _fit(self, score_fn: Score, run: Run) -> Fit:
        """Learn from the score, and return the fit.

        An error that ends it early is raised if there is nothing to keep; otherwise it is returned with the fit, or
        raised when the run knows what to keep.
        """

    def _conclude(self, fit: Fit, score_fn: Score, generator: torch.Generator) -> None:
        """Warn of what is wrong with a fit that is already stored."""


def check_fit(est: object, target: object = None, name: str = "est") -> None:
    """Raise unless this is a fitted approximator, with what to pass instead; `target` is the argument after it."""
    check_approximator(est, target, name, expected="a fitted approximator")
    check_is_fitted(est)


def of_predictor(est: Any, target: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """Return the approximator of a fitted predictor and what it was fitted to, if no target is given; others as they
    are.
    """
    if target is None and not isinstance(est, BaseApproximator) and hasattr(est, "draw_names_"):
        return getattr(est, "approximator_", est), getattr(est, "target_", None)
    return est, target


def check_approximator(
    est: object, target: object = None, name: str = "est", expected: str = "an approximator"
) -> None:
    """Raise TypeError unless this is an approximator, with what to pass instead."""
    if isinstance(est, BaseApproximator):
        return
    got, way = f"a {type(est).__name__}", _way_to_fit(est)
    if isinstance(est, type):
        got = f"the class {est.__name__}; pass an instance"
    elif way is not None:
        of_target = f" and model{way.removesuffix('approximator_')}target_" if way.endswith(".approximator_") else ""
        got += f"; pass model{way}{of_target}"
    elif _way_to_fit(target) is not None:
        got += "; the arguments are swapped: the approximator comes first, then its target"
    elif hasattr(est, "approximator"):
        got += "; fit it, and pass model.approximator_ and model.target_"
    elif hasattr(est, "score_samples") and hasattr(est, "at"):
        got += "; pass model.at(context) and model.target(context), the posterior of one context"
    raise TypeError(f"`{name}` must be {expected}, got {got}.")


def _way_to_fit(model: Any) -> str | None:  # noqa: ANN401
    """Return the expression that leads from a predictor, search or pipeline to its approximator, if there is one."""
    way = ""
    for _ in range(6):  # attributes of a mock never end
        if isinstance(model, BaseApproximator):
            return way
        if isinstance(model, type):
            return None
        name = next((name for name in ("best_estimator_", "approximator_", "pooled") if hasattr(model, name)), None)
        if name is not None:
            model, way = getattr(model, name), f"{way}.{name}"
        elif isinstance(columns := getattr(model, "estimators_", None), list) and columns:
            model, way = columns[0], f"{way}.estimators_[0]"
        elif hasattr(model, "named_steps"):
            model, way = model.steps[-1][1], f"{way}[-1]"
    return None


def without_density(est: BaseApproximator) -> str:
    """Return the error that a fit has no density, with the reason."""
    of_mixing = ", since `mixing` has none" if isinstance(est.sampler_, HasDensity) else ""
    return f"{type(est).__name__} has no density{of_mixing}"


@contextmanager
def _told_of_end(est: BaseApproximator, tally: Tally) -> Iterator[None]:
    """Log where Ctrl-C, or a lost connection, has ended a fit, and whether something was kept."""
    before = vars(est).get("sampler_")
    try:
        yield
    except (KeyboardInterrupt, ConnectionError, TimeoutError) as error:
        stage, sampler = tally.last, vars(est).get("sampler_")
        is_kept = sampler is not None and sampler is not before
        n_iter = vars(est).get("n_iter_", 0) if is_kept else 0
        LOGGER.warning(
            "%s ended the fit %s; %s.",
            type(error).__name__,
            f"at iteration {n_iter:,}" if n_iter else f"in the stage '{stage}'",
            "the fit until then is kept and can be used" if is_kept else "there was nothing to keep yet",
        )
        raise


@contextmanager
def _counted(est: BaseApproximator, tally: Tally) -> Iterator[None]:
    """Store the counts of a fit when it ends, and log what its stages took."""
    try:
        yield
    finally:
        tally.end()
        est.__dict__.update(counts(tally))
        if est.verbose > 0:
            made = vars(est).get("fitted_by_")
            LOGGER.info("%s", "; ".join([*map(str, est.stages_), *([] if made is None else [f"fitted by {made}"])]))


def _doubted(probed: Score, fit: Fit, run: Run) -> Score:
    """Return a score without its doubt, where that does not concern the draws of a fit."""
    if probed.doubt is None or probed.doubt.ends is None:
        return probed
    x = fit.sampler.sample(N_COMPARED, make_generator(run.seed, run.device))
    return probed if probed.doubt.concerns(x.double()) else replace(probed, doubt=None)


def learn(est: BaseApproximator, fit: Fit, run: Run) -> None:
    """Store a fit on an estimator."""
    est.__dict__.pop("weighted_draws_", None)  # those that something else has drawn of the last fit
    est.__dict__.update(learned_attributes(fit, run, est.dtype))
    est.__dict__.update({"_dtype_of_draws": resolving_dtype(fit.sampler, est.dtype, run.device)})


def _keep_names(est: BaseApproximator, target: object, names: Sequence[str]) -> None:
    """Store the names of coordinates and the supports of parameters on an estimator, where its target has them."""
    supports = getattr(target, "supports", None)
    own = {"feature_names_in_": np.array(names, object) if names else None, "supports_": supports and dict(supports)}
    for name in own:
        est.__dict__.pop(name, None)
    est.__dict__.update({name: value for name, value in own.items() if value is not None})


def loss_label(est: BaseApproximator) -> str:
    """Return what `loss_curve_` of a fitted estimator holds."""
    return est._resolved()._loss_label


def learned_attributes(fit: Fit, run: Run, dtype: str) -> dict[str, object]:
    """Return the learned attributes of an estimator; samples use another random stream than the training."""
    return {
        "sampler_": fit.sampler,
        **fit.sampler.attributes(),
        **fit.report,
        "n_features_in_": fit.sampler.n_features,
        "device_": str(run.device),
        **counts(run.tally),
        "_seed": run.seed,
        "_random_state": np.random.RandomState([run.seed, 1]),
        "_dtype_of_draws": dtype,
    }


def counts(tally: Tally) -> dict[str, object]:
    """Return the counts of score calls of a fit, as attributes."""
    return {
        "n_score_calls_": tally.n_values,
        "n_products_": tally.n_products,
        "stages_": [stage for stage in tally.stages.values() if stage.n_calls],
    }


def resolving_dtype(sampler: Sampler, dtype: str, device: torch.device) -> str:
    """Return the dtype of the draws: the requested one, or float64 if it cannot resolve them."""
    with torch.no_grad():
        x = sampler.sample(N_COMPARED, torch.Generator(device).manual_seed(0)).double()
    low, high = x.quantile(x.new_tensor([0.25, 0.75]), dim=0)
    spacing = torch.finfo(DTYPES[dtype]).eps * x.abs().amax(0)
    # the spacing of numbers is coarse beside the spread of the draws
    return "float64" if (spacing > 1e-3 * (high - low)).any() else dtype


def check_draws(estimator: BaseApproximator) -> None:
    """Raise ValueError unless the draws of a fit are finite; layers are checked without the score."""
    device = torch.device(estimator.device_)
    dtype = DTYPES[vars(estimator)["_dtype_of_draws"]]
    try:
        with ordinary_mode(device), torch.no_grad():
            numbers = trial_draws(estimator.sampler_, torch.Generator(device).manual_seed(0))
            finite = all(bool(x.to(dtype).isfinite().all()) for x in numbers)
    except RuntimeError as error:
        raise ValueError(f"`sampler_` cannot be drawn from: {error}") from error
    if not finite:
        raise ValueError("`sampler_` has draws that are not finite")


def check_finite(X: np.ndarray | torch.Tensor, score: Score) -> None:
    """Raise ValueError unless draws X (n, d) of a fit are finite."""
    bad = ~np.isfinite(as_array(X))
    if bad.any():
        names = [score.label(int(i)) for i in np.flatnonzero(bad.any(0))]
        where = ", ".join([*names[:3], *["..."] * (len(names) > 3)])
        fact = f"{bad.any(1).sum()} of {len(X)} draws of `est` are not finite, in {where}"
        raise ValueError(f"{fact}: fit again, see the warnings of `fit`.")


def _of_replicate(target: TargetOrScore, random_state: RandomState) -> RandomState:
    """Return the random state of a fit to this replicate of a target; None leaves the choice to the fit."""
    replicate = getattr(target, "replicate", ())
    if not replicate:
        return random_state
    own = [] if random_state is None else [make_seed(random_state)]
    return np.random.RandomState([*own, *replicate])
