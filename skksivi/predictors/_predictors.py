"""Regression and classification with draws from a posterior, as scikit-learn predictors."""

from __future__ import annotations

import copy
import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone
from sklearn.utils import Tags, check_array, gen_batches
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from skksivi import targets
from skksivi._utils import DOCUMENTATION
from skksivi._utils.arrays import (
    RandomState,
    as_array,
    as_numbers,
    as_tensor,
    check_columns,
    check_sample_weight,
    location_and_scale,
    make_rng,
    make_seed,
)
from skksivi._utils.checks import check_integer, shown
from skksivi.base import BaseApproximator, Constraints, Integral, Interval, Real, StrOptions
from skksivi.estimators import KSIVIApproximator
from skksivi.judge import Verdict
from skksivi.parameters import Nested, Pilot, Scale, chains_of
from skksivi.predictors._process import Process, fit_process, merged
from skksivi.training import logged

__all__ = ["KSIVIClassifier", "KSIVIRegressor"]
__dir__ = __all__.copy

#: Numbers that a prediction holds in memory at a time.
CHUNK = 2**24

#: Networks that are trained to start chains.
N_NETWORKS = 20

#: Rows of data above which training uses minibatches of this size.
N_ROWS = 1000

#: Names of parameters that no column of X may take.
OWN_NAMES = {"intercept", "log(lambda)", "log(gamma)", "prior precision", "noise sd"}


class _Predictor(Nested, ABC):
    """A model whose posterior is fitted by an approximator, and draws from it."""

    _doc_link_module = "skksivi"
    _doc_link_template = DOCUMENTATION + "/generated/skksivi.{estimator_name}.html"

    approximator: BaseApproximator | None
    n_draws: int
    random_state: RandomState
    verbose: int
    n_features_in_: int
    target_: Any

    _parameter_constraints: ClassVar[Constraints] = {
        "approximator": [BaseApproximator, None],
        "n_draws": [Interval(Integral, 1, None, closed="left")],
        "random_state": ["random_state"],
        "verbose": [Interval(Integral, -1, None, closed="left")],
    }

    def _default_approximator(self, n_rows: int = 1) -> BaseApproximator:
        """Return what `approximator=None` means for data of so many rows."""
        return KSIVIApproximator()

    def _expanded(self, name: str, value: object) -> BaseEstimator | None:
        is_default = name == "approximator" and value is None
        return self._default_approximator() if is_default else None

    def _new_approximator(self, n_rows: int) -> BaseApproximator:
        """Return a copy of the approximator, or the default if there is none, with a seed."""
        q = self._default_approximator(n_rows) if self.approximator is None else clone(self.approximator)
        if q.random_state is None:
            q.set_params(random_state=make_seed(self.random_state))
        if self.verbose and not getattr(q, "verbose", self.verbose):
            q.set_params(verbose=self.verbose)
        return q

    def _fit_draws(self, q: BaseApproximator, target: Any = None) -> None:  # noqa: ANN401
        """Fit the approximator to the posterior, or to that of minibatches, and keep draws, also of a fit that Ctrl-C
        has ended. Coordinates get names, and parameters the units of the data.
        """
        target, unnamed = self.target_ if target is None else target, [f"x{j}" for j in range(self.n_features_in_)]
        features = list(map(str, getattr(self, "_features", getattr(self, "feature_names_in_", unnamed))))
        is_taken = {name for name, n in Counter(features).items() if n > 1} | OWN_NAMES
        features = [f"{name} (x{j})" if name in is_taken else name for j, name in enumerate(features)]
        self.draw_names_ = np.array(self._names_of_draws(features), dtype=object)
        units = copy.copy(self)  # which stay when this predictor is fitted again
        for name in ("approximator_", "draws_", "target_"):
            units.__dict__.pop(name, None)
        for each in (self.target_, target):
            each.names, each.constrain = tuple(self.draw_names_), units._parameters  # noqa: SLF001
        try:
            q.fit(target)
        finally:
            if hasattr(q, "sampler_"):
                self.approximator_ = q
                self.draws_ = q.sample(self.n_draws).astype(np.float64)

    @property
    def coef_(self) -> np.ndarray:
        """Posterior means of the coefficients, for X and y in their own units."""
        return self._plane()[0]

    @property
    def intercept_(self) -> np.ndarray:
        """Posterior mean of the intercept, for X and y in their own units."""
        return self._plane()[1]

    @property
    def verdict_(self) -> Verdict | None:
        """How good the fit of the posterior is, of several columns of y the worst; None if nothing has judged it."""
        self._check_learned("verdict_")
        fits = [one.approximator_ for one in getattr(self, "estimators_", [])] or [self.approximator_]
        verdicts: list[Any] = [fit.verdict_ for fit in fits]
        return None if None in verdicts else min(verdicts)

    @abstractmethod
    def _plane(self) -> tuple[np.ndarray, np.ndarray]:
        """Return posterior means of coefficients and intercept; raise AttributeError if the model has none."""

    @abstractmethod
    def _names_of_draws(self, features: list[str]) -> list[str]:
        """Return the names of the columns of `draws_`, given those of the columns of X."""

    @abstractmethod
    def _parameters(self, X: np.ndarray) -> dict[str, np.ndarray]:
        """Return the parameters of draws X (m, d), each (m,) by its name, in the units of the data."""

    def _check_learned(self, name: str) -> None:
        """Raise AttributeError, which `hasattr` and notebooks expect, before `fit`."""
        if not hasattr(self, "_X_mean") and not getattr(self, "estimators_", None):
            raise AttributeError(f"{type(self).__name__} has no `{name}` before `fit`.")

    def _in_units(self, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return coefficients (..., p) and intercepts (...) for X, given those for ones and standardised columns."""
        coef = beta[..., 1:] / self._X_scale
        return coef, beta[..., 0] - coef @ self._X_mean

    def _standardised(self, X: np.ndarray) -> np.ndarray:
        """Standardise columns by the training data."""
        return (X - self._X_mean) / self._X_scale

    def _with_ones(self, X: np.ndarray) -> np.ndarray:
        """Standardise columns and put a column of ones before them."""
        return np.column_stack([np.ones(len(X)), self._standardised(X)])

    def _check_inputs(self, X: ArrayLike) -> np.ndarray:
        check_is_fitted(self)
        check_columns(X, "X")
        return validate_data(self, X, dtype=np.float64, reset=False)

    def _parts(self, n_rows: int, n_outputs: int = 1) -> Iterator[slice]:
        """Cut rows into parts for which all draws predict at most CHUNK numbers."""
        return gen_batches(n_rows, max(1, CHUNK // (len(self.draws_) * n_outputs)))


@dataclass(kw_only=True, eq=False, repr=False)
class KSIVIRegressor(RegressorMixin, _Predictor):
    r"""Bayesian regression by a Gaussian process, a neural network or a plane, with predictions from posterior draws.

    .. math:: y_i \sim N(f_\theta(x_i), 1 / \gamma), \qquad \theta \sim N(0, I / \lambda), \qquad
        \gamma \sim \mathrm{Gamma}(a, b)

    with X and y standardised; :math:`\lambda` is given or, if it is learned, has the prior of :math:`\gamma`. Draws
    are made once, in `fit`, so that predictions are deterministic.

    Parameters
    ----------
    model : {"process", "network", "linear"}, default="process"
        The f. "process" is a linear function plus a Gaussian process, smooth or rough, with one length scale or one
        per column. The evidence chooses among these, including a linear function alone, and sets the scales;
        :math:`\theta` is integrated out, and both precisions are learned, relative to the values of highest evidence.
        With more than 500 rows the evidence is computed on 500, which also serve as inducing points. "network" is one
        hidden layer of ReLU units; "linear" a linear function.
    n_hidden : int, default=50
        Number of hidden units of a network.
    prior_precision : float or None, default=1.0
        The :math:`\lambda > 0` of a network; None learns it, as the other models always do.
    hyperprior : pair of float, default=(1.0, 0.1)
        Shape a and rate b of the priors of learned precisions. The precisions of a process, which are relative to the
        values of highest evidence, have the rate a.
    approximator : approximator, default=None
        Any approximator of this package. None means `KSIVIApproximator`, for a process with whiten="laplace", for a
        network with whiten="diagonal" and 20 trained networks as `init`. Its parameters can be set and searched, as
        ``approximator__bandwidth``, also where it is None; the chains of a network are then as long as for 2,000
        rows, however many there are. For a network, an approximator whose `init` is None starts at random weights,
        unless it has particles or chains, which choose their own start; whiten=Pilot("diagonal") suits them.
    n_draws : int, default=200
        Number of posterior draws to keep.
    random_state : int, RandomState or None, default=None
        Seeds an approximator that has no `random_state` of its own, the trained networks at which it starts, and the
        choice of rows for the evidence.
    verbose : int, default=0
        1 logs the chosen model and the progress of the approximator to the logger "skksivi", 2 logs more progress.

    Attributes
    ----------
    approximator_ : approximator
        Fitted.
    draws_ : ndarray of shape (n_draws, n_parameters)
        Of standardised X and y.
    draw_names_ : ndarray of shape (n_parameters,)
        Names of the columns of `draws_`: "intercept", names of the columns of X and "log(lambda)", "log(gamma)" of a
        linear function, the precisions alone of a process, the letters of `skksivi.targets.BayesianNeuralNetwork` of
        a network.
    verdict_ : Verdict or None
        How good the fit of the posterior is, from the approximator, if it judges its fits; of several columns of y
        the worst.
    coef_ : ndarray of shape (p,) or (k, p)
        Posterior means of the coefficients, in the units of X and y; only of model="linear".
    intercept_ : float or ndarray of shape (k,)
        Posterior mean of the intercept, likewise.
    target_ : Target
        The posterior. Its `constrain` returns the parameters of draws in the units of X and y.
    estimators_ : list of KSIVIRegressor
        One per column of y if there are several; these then have `approximator_`, `draws_` and `target_`.
    n_features_in_ : int
    feature_names_in_ : ndarray of str
        Names of the columns of X, if they have names.

    See Also
    --------
    KSIVIClassifier : Classification with a posterior inside.
    skksivi.targets.BayesianLinearRegression : Linear regression.
    skksivi.targets.BayesianNeuralNetwork : A regression network.

    References
    ----------
    Yu, L. et al. A kernel approach for semi-implicit variational inference, section on Bayesian neural networks.

    Examples
    --------
    >>> import numpy as np
    >>> from skksivi import KSIVIRegressor
    >>> X = np.random.RandomState(0).normal(size=(100, 2))
    >>> model = KSIVIRegressor(model="linear", random_state=0).fit(X, 3 * X[:, 0] + 1)
    >>> model.predict([[1.0, 0.0]]).round(1)
    array([4.])
    """

    _parameter_constraints: ClassVar[Constraints] = {
        "model": [StrOptions({"process", "network", "linear"})],
        "n_hidden": [Interval(Integral, 1, None, closed="left")],
        "prior_precision": [Interval(Real, 0, None, closed="neither"), None],
        "hyperprior": ["array-like"],
    }

    model: str = "process"
    n_hidden: int = 50
    prior_precision: float | None = 1.0
    hyperprior: tuple[float, float] = (1.0, 0.1)
    approximator: BaseApproximator | None = None
    n_draws: int = 200
    random_state: RandomState = None
    verbose: int = 0

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fit the posterior and keep draws of it.

        Parameters
        ----------
        X : array-like of shape (n, p)
        y : array-like of shape (n,) or (n, k)
            Several columns are regressed on X separately.
        sample_weight : array-like of shape (n,), default=None
            How often each observation counts. In a process weights are relative: the noise has the variance of y over
            the weight, with mean weight one, and a duplicated row, X and y, is one of weight two.

        Returns
        -------
        self : object
        """
        self._validate_params()
        check_columns(X, "X")
        if y is not None and not np.iscomplexobj(np.asarray(y)):  # scikit-learn reports complex y itself
            y = as_numbers(y, "y")
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True)
        columns = y.T if y.ndim == 2 else []
        self.estimators_ = [clone(self) for _ in columns]
        for one, column in zip(self.estimators_, columns, strict=True):
            if hasattr(self, "feature_names_in_"):  # X is an array by now
                one.__dict__["_features"] = self.feature_names_in_
            one.fit(X, column, sample_weight)
        if not self.estimators_:
            self._fit_one(X, y, sample_weight)
            return self
        for name in ("approximator_", "draws_", "target_"):  # of the last fit
            self.__dict__.pop(name, None)
        self.draw_names_ = self.estimators_[0].draw_names_
        return self

    def _fit_one(self, X: np.ndarray, y: np.ndarray, sample_weight: ArrayLike | None) -> None:
        """Fit the posterior to one column of y."""
        w = check_sample_weight(sample_weight, len(X))
        X, y, w = X[w > 0], y[w > 0], w[w > 0]
        if self.model == "process":
            targets.check_hyperprior(self.hyperprior)
            X, y, w = merged(X, y, w)
        self._X_mean, self._X_scale = location_and_scale(X, w)
        self._y_mean, self._y_scale = map(float, location_and_scale(y, w))
        self._process: Process | None = None
        self._n_units: int | None = None  # for a network
        {"process": self._fit_process, "network": self._fit_network, "linear": self._fit_linear}[self.model](X, y, w)

    def _default_approximator(self, n_rows: int = 1) -> BaseApproximator:
        if self.model == "network":  # with fewer steps of the chains if each is expensive
            budget = int(N_NETWORKS * 4000 * min(1, 2 * N_ROWS / n_rows))
            return KSIVIApproximator(method="start", whiten=Pilot("diagonal", budget=budget), scale=Scale(floor=1e-5))
        return super()._default_approximator(n_rows)

    def _fit_linear(self, X: np.ndarray, y: np.ndarray, w: np.ndarray) -> None:
        z = (y - self._y_mean) / self._y_scale
        self.target_ = targets.BayesianLinearRegression(
            self._with_ones(X), z, hyperprior=self.hyperprior, sample_weight=w
        )
        self._fit_draws(self._new_approximator(len(X)))

    def _fit_network(self, X: np.ndarray, y: np.ndarray, w: np.ndarray) -> None:
        self._n_units = int(self.n_hidden)
        self.target_ = targets.BayesianNeuralNetwork(
            X,
            y,
            n_hidden=self.n_hidden,
            prior_precision=self.prior_precision,
            hyperprior=self.hyperprior,
            sample_weight=w,
        )
        q = self._new_approximator(len(X))
        self._start_at_networks(q)
        self._fit_draws(q, None if len(X) <= N_ROWS else targets.Minibatches(self.target_, N_ROWS))

    def _fit_process(self, X: np.ndarray, y: np.ndarray, w: np.ndarray) -> None:
        Z, z, rng = self._standardised(X), (y - self._y_mean) / self._y_scale, make_rng(self.random_state)
        self._process, self.target_ = fit_process(Z, z, w, self.hyperprior[0], rng)
        with logged(self.verbose):
            logging.getLogger("skksivi").info("chosen: %s", self._process)
        self._fit_draws(self._new_approximator(len(X)))

    def _start_at_networks(self, q: BaseApproximator) -> None:
        """Let an approximator start at random weights, or its pilot at trained networks, unless it has an `init`."""
        parameters = q.get_params(deep=False)
        if parameters.get("init", 0) is not None or parameters.keys() & {"n_particles", "n_chains"}:
            return  # their number of particles or chains is fixed, and they are spread out
        rng = make_rng(self.random_state)
        chains = chains_of(parameters.get("whiten"))
        if chains is not None and chains.rule == "diagonal":
            q.set_params(init=trained_weights(self.target_, N_NETWORKS, rng))
        else:  # a mode search starts there
            q.set_params(init=_random_weights(self.target_, rng))

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _is_multiple(self) -> bool:
        """Tell whether y had several columns, each with its own regressor."""
        return bool(self.estimators_)

    def _of_each(self, method: str, X: np.ndarray, *arguments: object) -> np.ndarray:
        """Return the results of the regressors of the columns of y, stacked along the second axis."""
        return np.stack([getattr(one, method)(X, *arguments) for one in self.estimators_], axis=1)

    def _plane(self) -> tuple[np.ndarray, np.ndarray]:
        self._check_learned("coef_")
        if self._is_multiple():
            coefs, intercepts = zip(*((one.coef_, one.intercept_) for one in self.estimators_), strict=True)
            return np.stack(coefs), np.stack(intercepts)
        if self._process is not None or self._n_units is not None:
            raise AttributeError('Only model="linear" has coefficients.')
        coef, intercept = self._in_units(self.draws_[:, :-2].mean(0))
        return self._y_scale * coef, self._y_mean + self._y_scale * intercept

    def _names_of_draws(self, features: list[str]) -> list[str]:
        precisions = ["log(lambda)", "log(gamma)"]
        if self._process is not None:
            return precisions
        if self._n_units is None:
            return ["intercept", *features, *precisions]
        units = range(self._n_units)
        weights = [*(f"W[{name}, {k}]" for name in features for k in units), *(f"b_1[{k}]" for k in units)]
        names = [*weights, *(f"w[{k}]" for k in units), "b_2"]
        return names + precisions[-(self.target_.n_features - len(names)) :]

    def _parameters(self, X: np.ndarray) -> dict[str, np.ndarray]:
        values = list(X.T)
        if self._process is None and self._n_units is None:
            coef, intercept = self._in_units(X[:, :-2])
            values[:-2] = [self._y_mean + self._y_scale * intercept, *self._y_scale * coef.T]
        found = dict(zip(self.draw_names_, values, strict=True))
        del found["log(gamma)"]
        if (log_lam := found.pop("log(lambda)", None)) is not None:
            found["prior precision" + " (relative)" * (self._process is not None)] = np.exp(log_lam)
        return {**found, "noise sd": np.sqrt(self._noise_variance(X)[:, 0])}

    def _outputs(self, X: np.ndarray) -> np.ndarray:
        """Return f of each draw at each row, shape (n_draws, n), in the units of y."""
        if self._n_units is not None:
            x, theta = np.column_stack([self._standardised(X), np.ones(len(X))]), self.draws_[:, : self._n_weights()]
            f = targets.outputs_of_networks(as_tensor(x), as_tensor(theta), self._n_units)
            return self._y_mean + self._y_scale * as_array(f.mT)
        return self._y_mean + self._y_scale * (self.draws_[:, :-2] @ self._with_ones(X).T)

    def _n_weights(self) -> int:
        return (self.n_features_in_ + 2) * (self._n_units or 0) + 1

    def _noise_variance(self, draws: np.ndarray) -> np.ndarray:
        """Return the variance of the noise of y for each of some draws (m, d), shape (m, 1)."""
        unit = 1.0 if self._process is None else self._process.noise_variance
        return unit * np.exp(-draws[:, -1:]) * self._y_scale**2

    def _normals(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return means and variances of a new y at rows for each draw, shapes (n_draws, n) and (n_draws, n or 1)."""
        if self._process is None:
            return self._outputs(X), self._noise_variance(self.draws_)
        phi, left_out = self._process.features(self._standardised(X))
        mean, variance = self._process.coefficients(self.draws_)
        spread = self._y_scale**2 * (variance @ np.square(phi).T + left_out / np.exp(self.draws_[:, :1]))
        return self._y_mean + self._y_scale * (mean @ phi.T), spread + self._noise_variance(self.draws_)

    def _functions(self, X: np.ndarray, s: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
        """Return f at all rows for each of the draws s (k,) of the posterior, shape (k, n)."""
        if self._process is None:
            return np.concatenate([self._outputs(X[rows])[s] for rows in self._parts(len(X))], axis=1)
        mean, variance = self._process.coefficients(self.draws_[s])
        beta = mean + np.sqrt(variance) * rng.normal(size=mean.shape)
        scale, parts = np.exp(-self.draws_[s, :1] / 2), []
        for rows in gen_batches(len(X), 500):  # the cost of joint draws is cubic in them
            Z = self._standardised(X[rows])
            zero, covariance = np.zeros(len(Z)), self._process.left_out(Z)
            left_out = rng.multivariate_normal(zero, covariance, size=len(s), check_valid="ignore")
            parts.append(beta @ self._process.features(Z)[0].T + scale * left_out)
        return self._y_mean + self._y_scale * np.concatenate(parts, axis=1)

    def predict(self, X: ArrayLike, return_std: bool = False) -> Any:  # noqa: ANN401
        """Predict y by the mean over draws.

        Parameters
        ----------
        X : array-like of shape (n, p)
        return_std : bool, default=False
            Whether to return the standard deviation of a new y too.

        Returns
        -------
        y_mean : ndarray of shape (n,) or (n, k)
        y_std : ndarray of shape (n,) or (n, k)
            With `return_std`: from the spread of the draws and the noise.
        """
        X = self._check_inputs(X)
        if self._is_multiple():
            mean, sd = np.stack([one.predict(X, return_std=True) for one in self.estimators_], axis=2)
            return (mean, sd) if return_std else mean
        parts = (self._normals(X[rows]) for rows in self._parts(len(X)))
        mean, variance = np.concatenate([(f.mean(0), f.var(0) + v.mean(0)) for f, v in parts], axis=1)
        return (mean, np.sqrt(variance)) if return_std else mean

    def predict_quantiles(self, X: ArrayLike, quantiles: ArrayLike = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Predict quantiles of a new y, from the mixture over draws.

        Parameters
        ----------
        X : array-like of shape (n, p)
        quantiles : array-like of shape (k,), default=(0.05, 0.5, 0.95)
            Between 0 and 1, both excluded.

        Returns
        -------
        y_quantiles : ndarray of shape (n, k)
            Or (n, n_outputs, k) for y of several columns.
        """
        X = self._check_inputs(X)
        levels = levels_of(quantiles)
        if self._is_multiple():
            return self._of_each("predict_quantiles", X, levels)
        return np.concatenate([quantiles_of_mixture(levels, *self._normals(X[rows])) for rows in self._parts(len(X))])

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Return the coefficient of determination, R^2, of the predictions.

        Parameters
        ----------
        X : array-like of shape (n, p)
        y : array-like of shape (n,) or (n, n_outputs)
        sample_weight : array-like of shape (n,), default=None

        Returns
        -------
        score : float
            At most one.
        """
        return super().score(X, y, sample_weight)

    def sample_y(self, X: ArrayLike, n_samples: int = 1, random_state: RandomState = 0) -> np.ndarray:
        """Draw new values of y, noise included, each set from one draw of the posterior.

        Away from its inducing points, a process is drawn jointly at 500 rows at a time.

        Parameters
        ----------
        X : array-like of shape (n, p)
        n_samples : int, default=1
        random_state : int, RandomState or None, default=0

        Returns
        -------
        y_samples : ndarray of shape (n, n_samples)
            Or (n, n_outputs, n_samples) for y of several columns.
        """
        check_integer(n_samples, "n_samples", min_val=0)
        X, rng = self._check_inputs(X), make_rng(random_state)
        if self._is_multiple():
            return self._of_each("sample_y", X, n_samples, rng)
        s = rng.randint(len(self.draws_), size=n_samples)
        f = self._functions(X, s, rng)
        return (f + np.sqrt(self._noise_variance(self.draws_[s])) * rng.normal(size=f.shape)).T

    def log_predictive_density(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        r"""Evaluate :math:`\log \frac1S \sum_s N(y_i; f_s(x_i), 1 / \gamma_s)`, the mixture over draws.

        Parameters
        ----------
        X : array-like of shape (n, p)
        y : array-like of shape (n,) or (n, n_outputs)

        Returns
        -------
        log_density : ndarray of shape (n,)
            In nats, for y in its own units; summed over columns if there are several.
        """
        X, y = self._check_inputs(X), check_array(as_numbers(y, "y"), ensure_2d=False, input_name="y")
        shape = (len(X), len(self.estimators_)) if self._is_multiple() else (len(X),)
        if y.shape != shape:
            raise ValueError(f"`y` has shape {y.shape}, expected {shape}, one value for each row of `X` and output.")
        if self._is_multiple():
            columns = zip(self.estimators_, y.T, strict=True)
            return np.sum([one.log_predictive_density(X, column) for one, column in columns], axis=0)
        parts = [targets.log_normal_mixture(y[rows], *self._normals(X[rows])) for rows in self._parts(len(X))]
        return np.concatenate(parts)


def levels_of(quantiles: ArrayLike) -> np.ndarray:
    """Return the levels of quantiles (k,) as an array."""
    levels = as_numbers(quantiles, "quantiles")
    if levels.ndim != 1 or not ((levels > 0) & (levels < 1)).all():
        raise ValueError(
            f"`quantiles` must be a list of numbers between 0 and 1, both excluded, got {shown(quantiles)}."
        )
    return levels


def quantiles_of_mixture(levels: np.ndarray, f: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Return quantiles (n, k) of mixtures of normals of means f (S, n) and variances (S, n or 1), by bisection."""
    mean, sd = as_tensor(f)[..., None], as_tensor(np.sqrt(variance))[..., None]
    p = as_tensor(levels)
    edges = mean + sd * torch.special.ndtri(p)  # quantiles of the components
    low, high = edges.amin(0), edges.amax(0)
    for _ in range(50):
        middle = (low + high) / 2
        is_below = torch.special.ndtr((middle - mean) / sd).mean(0) < p
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    return ((low + high) / 2).numpy()


def trained_weights(target: targets.BayesianNeuralNetwork, n: int, rng: np.random.RandomState) -> np.ndarray:
    r"""Train networks from random weights by Adam, with a learned :math:`\lambda` fixed at one.

    From zero, a saddle, all units would stay equal; and with :math:`\lambda` free, only the prior bounds the density
    at :math:`\lambda \to \infty` and zero weights.

    Returns
    -------
    theta : ndarray of shape (n, n_parameters)
    """
    theta = as_tensor(np.stack([_random_weights(target, rng) for _ in range(n)]), dtype=torch.float32)
    moves = torch.ones(theta.shape[1])
    if target.prior_precision is None:
        moves[-2] = 0.0
    optimizer = torch.optim.Adam([theta], lr=0.01, betas=(0.9, 0.99))
    for _ in range(500):
        rows = as_tensor(rng.randint(target.n_rows, size=N_ROWS))
        data = target if target.n_rows <= N_ROWS else target.subset(rows)
        theta.grad = -data.score_fn(theta) * moves
        optimizer.step()
    return theta.double().numpy()


def _random_weights(target: targets.BayesianNeuralNetwork, rng: np.random.RandomState) -> np.ndarray:
    """Draw weights as is common for networks, with noise of a third of the variance of y."""
    p, k = len(target.X_mean), target.n_hidden
    W, w = rng.normal(size=p * k) / np.sqrt(p), rng.normal(size=k) / np.sqrt(k)
    log_lam = [0.0] if target.prior_precision is None else []
    return np.concatenate([W, np.zeros(k), w, [0.0], log_lam, [1.0]])  # b_1, w, b_2 and log gamma


@dataclass(kw_only=True, eq=False, repr=False)
class KSIVIClassifier(ClassifierMixin, _Predictor):
    r"""Bayesian logistic regression, with predictions from posterior draws.

    With two classes :math:`P(y = 1 | x) = 1 / (1 + e^{-\beta^\top x})`; with more the softmax of one linear function
    per class. The columns of X are standardised and an intercept is added; all coefficients have the prior
    :math:`N(0, 1 / \alpha)`.

    Parameters
    ----------
    prior_precision : float, default=1.0
        The alpha > 0.
    class_weight : "balanced", dict or None, default=None
        Weights of the classes, which multiply the weights of the observations; "balanced" gives all classes the same
        total weight.
    approximator : approximator, default=None
        Any approximator of this package; None means `KSIVIApproximator` with whiten=Pilot(skip=("other modes",
        "importance sampling")): there is one mode. Its parameters can be set and searched, as
        ``approximator__bandwidth``, also where it is None.
    n_draws : int, default=1000
        Number of posterior draws to keep.
    random_state : int, RandomState or None, default=None
        Seeds an approximator that has no `random_state` of its own.
    verbose : int, default=0
        Passed to the approximator if it has this parameter.

    Attributes
    ----------
    classes_ : ndarray of shape (k,)
    approximator_ : approximator
        Fitted.
    draws_ : ndarray of shape (n_draws, n_parameters)
        Of standardised X.
    draw_names_ : ndarray of shape (n_parameters,)
        Names of the columns of `draws_`: "intercept" and names of the columns of X, of several classes with the class
        as "age[a]".
    verdict_ : Verdict or None
        How good the fit of the posterior is, from the approximator, if it judges its fits.
    coef_ : ndarray of shape (1, p) or (k, p)
        Posterior means of the coefficients, in the units of X; one row for two classes.
    intercept_ : ndarray of shape (1,) or (k,)
        Posterior means of the intercepts, likewise.
    target_ : Target
        The posterior. Its `constrain` returns the parameters of draws in the units of X.
    n_features_in_ : int
    feature_names_in_ : ndarray of str
        Names of the columns of X, if they have names.

    See Also
    --------
    KSIVIRegressor : Regression with a posterior inside.
    skksivi.targets.BayesianLogisticRegression : The posterior of a logistic regression.
    skksivi.targets.BayesianMultinomialRegression : Multinomial regression.

    Examples
    --------
    >>> from skksivi import KSIVIClassifier
    >>> from skksivi.datasets import load_waveform
    >>> X, y = load_waveform(return_X_y=True)
    >>> model = KSIVIClassifier(random_state=0).fit(X, y)
    >>> model.predict_proba(X[:2]).shape
    (2, 2)
    """

    _parameter_constraints: ClassVar[Constraints] = {
        "prior_precision": [Interval(Real, 0, None, closed="neither")],
        "class_weight": [StrOptions({"balanced"}), dict, None],
    }

    prior_precision: float = 1.0
    class_weight: str | dict[object, float] | None = None
    approximator: BaseApproximator | None = None
    n_draws: int = 1000
    random_state: RandomState = None
    verbose: int = 0

    def _default_approximator(self, n_rows: int = 1) -> BaseApproximator:
        # log p is concave, so there is one mode, from which short chains know a skewed posterior sooner than weights
        return KSIVIApproximator(whiten=Pilot(skip=("other modes", "importance sampling")))

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fit the posterior and keep draws of it.

        Parameters
        ----------
        X : array-like of shape (n, p)
        y : array-like of shape (n,)
            Labels of two or more classes.
        sample_weight : array-like of shape (n,), default=None
            How often each observation counts.

        Returns
        -------
        self : object
        """
        self._validate_params()
        check_columns(X, "X")
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        w = check_sample_weight(sample_weight, len(X))
        X, y, w = X[w > 0], y[w > 0], w[w > 0]
        self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            raise ValueError(f"`y` must have two classes at least, got one class: {self.classes_.tolist()[0]!r}.")
        self._X_mean, self._X_scale = location_and_scale(X, w)
        given = self.class_weight
        if isinstance(given, dict) and not all(isinstance(v, Real) and 0 <= v < math.inf for v in given.values()):
            raise ValueError(f"`class_weight` must give classes finite numbers of zero or more, got {shown(given)}.")
        w = w * compute_sample_weight(given, y)
        is_binary = len(self.classes_) == 2
        model = targets.BayesianLogisticRegression if is_binary else targets.BayesianMultinomialRegression
        self.target_ = model(self._with_ones(X), y, self.prior_precision, sample_weight=w)
        self._fit_draws(self._new_approximator(len(X)))
        return self

    def _plane(self) -> tuple[np.ndarray, np.ndarray]:
        self._check_learned("coef_")
        return self._in_units(self._by_class(self.draws_.mean(0)))

    def _by_class(self, draws: np.ndarray) -> np.ndarray:
        """Return draws (..., d) as coefficients of each class, or of the second of two, (..., k or 1, p + 1)."""
        k = len(self.classes_) if len(self.classes_) > 2 else 1
        return draws.reshape(*draws.shape[:-1], -1, k).swapaxes(-1, -2)

    def _names_of_draws(self, features: list[str]) -> list[str]:
        names = ["intercept", *features]
        return names if len(self.classes_) == 2 else [f"{name}[{label}]" for name in names for label in self.classes_]

    def _parameters(self, X: np.ndarray) -> dict[str, np.ndarray]:
        coef, intercept = self._in_units(self._by_class(X))
        values = np.concatenate([intercept[..., None], coef], -1).swapaxes(1, 2)
        return dict(zip(self.draw_names_, values.reshape(len(X), -1).T, strict=True))

    def predict_proba(self, X: ArrayLike, return_std: bool = False) -> Any:  # noqa: ANN401
        """Predict the probability of each class, the mean over draws.

        Parameters
        ----------
        X : array-like of shape (n, p)
        return_std : bool, default=False
            Whether to return the posterior standard deviations of the probabilities too.

        Returns
        -------
        proba : ndarray of shape (n, n_classes)
            In the order of `classes_`.
        proba_std : ndarray of shape (n, n_classes)
            With `return_std`: from the spread of the draws.
        """
        mean, sd = np.concatenate([[p.mean(0), p.std(0)] for p in self._probabilities(X)], axis=1)
        return (mean, sd) if return_std else mean

    def predict_quantiles(self, X: ArrayLike, quantiles: ArrayLike = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Predict posterior quantiles of the probability of each class.

        Parameters
        ----------
        X : array-like of shape (n, p)
        quantiles : array-like of shape (k,), default=(0.05, 0.5, 0.95)
            Between 0 and 1, both excluded.

        Returns
        -------
        proba_quantiles : ndarray of shape (n, n_classes, k)
            Classes in the order of `classes_`.

        Raises
        ------
        ValueError
            A level is not between 0 and 1.
        """
        levels = levels_of(quantiles)
        parts = [np.quantile(p, levels, axis=0) for p in self._probabilities(X)]
        return np.moveaxis(np.concatenate(parts, axis=1), 0, -1)

    def _probabilities(self, X: ArrayLike) -> Iterator[np.ndarray]:
        """Yield the probabilities of parts of the rows for each draw, (n_draws, n, n_classes)."""
        z, B = as_tensor(self._with_ones(self._check_inputs(X))), as_tensor(self._by_class(self.draws_)).mT
        for rows in self._parts(len(z), len(self.classes_)):
            logits = z[rows] @ B
            p = logits.sigmoid() if len(self.classes_) == 2 else logits.softmax(-1)
            yield (torch.cat([1 - p, p], -1) if len(self.classes_) == 2 else p).numpy()

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Return the share of labels that are predicted correctly.

        Parameters
        ----------
        X : array-like of shape (n, p)
        y : array-like of shape (n,)
        sample_weight : array-like of shape (n,), default=None

        Returns
        -------
        score : float
        """
        return super().score(X, y, sample_weight)

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Predict the most probable class.

        Parameters
        ----------
        X : array-like of shape (n, p)

        Returns
        -------
        y : ndarray of shape (n,)
        """
        proba = self.predict_proba(X)
        return self.classes_[proba.argmax(1)]
