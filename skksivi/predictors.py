"""Regression and classification by draws of a posterior, as scikit-learn's predictors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone
from sklearn.utils import check_array, gen_batches
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from skksivi._arrays import (
    RandomState,
    as_tensor,
    check_sample_weight,
    location_and_scale,
    make_rng,
    make_seed,
)
from skksivi._numbers import check_integer
from skksivi._version import DOCUMENTATION
from skksivi.base import BaseApproximator, Constraints, Integral, Interval, Real, StrOptions
from skksivi.estimators._ksivi import KSIVIApproximator
from skksivi.parameters import Constrained, Pilot, Scale, pilot_of
from skksivi.targets._base import Minibatches, Target
from skksivi.targets._linear import BayesianLinearRegression, BayesianMultinomialRegression
from skksivi.targets._logistic import BayesianLogisticRegression
from skksivi.targets._network import BayesianNeuralNetwork, log_normal_mixture

__all__ = ["KSIVIClassifier", "KSIVIRegressor"]
__dir__ = __all__.copy

#: Numbers that a prediction holds at a time.
CHUNK = 2**24

#: Networks that are trained to start chains, and the steps of training and of chains.
N_NETWORKS, N_TRAINING, N_STEPS = 20, 500, 4000

#: Rows of data beyond which a training sees minibatches of as many.
N_ROWS = 1000


class _Predictor(Constrained, BaseEstimator):
    """A model whose posterior an approximator fits, and of which draws are kept."""

    _doc_link_module = "skksivi"
    _doc_link_template = DOCUMENTATION + "/generated/skksivi.{estimator_name}.html"

    approximator: BaseApproximator | None
    n_draws: int
    random_state: RandomState
    n_features_in_: int

    _parameter_constraints: ClassVar[Constraints] = {
        "approximator": [BaseApproximator, None],
        "n_draws": [Interval(Integral, 1, None, closed="left")],
        "random_state": ["random_state"],
    }

    def _new_approximator(self, default: BaseApproximator) -> BaseApproximator:
        """Return a copy of the approximator, or of the default if there is none, with a seed."""
        q = clone(default if self.approximator is None else self.approximator)
        if q.random_state is None:
            q.set_params(random_state=make_seed(self.random_state))
        return q

    def _fit_draws(self, q: BaseApproximator, target: Target) -> None:
        """Fit the approximator to the posterior, and keep draws."""
        self.approximator_ = q.fit(target)
        self.draws_ = q.sample(self.n_draws).astype(np.float64)

    def _standardised(self, X: np.ndarray) -> np.ndarray:
        """Standardise columns by the training data and put a column of ones before them."""
        return np.column_stack([np.ones(len(X)), (X - self._X_mean) / self._X_scale])

    def _learn_scales(self, X: np.ndarray, w: np.ndarray) -> None:
        self._X_mean, self._X_scale = location_and_scale(X, w)

    def _check_inputs(self, X: ArrayLike) -> np.ndarray:
        """Return rows to predict at."""
        check_is_fitted(self)
        return validate_data(self, X, dtype=np.float64, reset=False)

    def _parts(self, n_rows: int, n_outputs: int = 1) -> Iterator[slice]:
        """Cut rows into parts, of which all draws predict CHUNK numbers at most."""
        return gen_batches(n_rows, max(1, CHUNK // (len(self.draws_) * n_outputs)))


class KSIVIRegressor(RegressorMixin, _Predictor):
    r"""Bayesian regression, linear or by a neural network, predicting by draws of the posterior.

    .. math:: y_i \sim N(f_\theta(x_i), 1 / \gamma), \qquad \theta \sim N(0, I / \lambda), \qquad
        \gamma \sim \mathrm{Gamma}(a, b)

    with X and y standardised; :math:`\lambda` is given, or where it is learned has the prior of :math:`\gamma`. Draws
    of :math:`\theta` and the precisions are made once, in `fit`, so that predictions are deterministic.

    Parameters
    ----------
    model : {"network", "linear"}, default="network"
        The f: one hidden layer of ReLU units, or linear.
    n_hidden : int, default=50
        Number of hidden units.
    prior_precision : float or None, default=1.0
        The :math:`\lambda > 0` of a network; None has it learned, as that of a linear model always is.
    hyperprior : pair of float, default=(1.0, 0.1)
        Shape a and rate b of the precisions that are learned.
    approximator : approximator, default=None
        Whatever of this package fits the posterior. None means `KSIVIApproximator`, for a network with
        whiten="diagonal" and 20 trained networks for its `init`. Its parameters can be searched, as
        ``approximator__bandwidth``. For a network, one whose `init` is None starts at random weights, unless it
        has particles or chains, which start where they do by themselves.
    n_draws : int, default=200
        Draws of the posterior that are kept.
    random_state : int, RandomState or None, default=None
        Seeds an approximator that has no `random_state` of its own, and the networks that are trained to start one.

    Attributes
    ----------
    approximator_ : approximator
        Fitted.
    draws_ : ndarray of shape (n_draws, n_parameters)
    target_ : Target
        The posterior.
    n_features_in_ : int
    feature_names_in_ : ndarray of str
        Of the columns of X, where they have names.

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
        "model": [StrOptions({"network", "linear"})],
        "n_hidden": [Interval(Integral, 1, None, closed="left")],
        "prior_precision": [Interval(Real, 0, None, closed="neither"), None],
        "hyperprior": ["array-like"],
    }

    def __init__(
        self,
        *,
        model: str = "network",
        n_hidden: int = 50,
        prior_precision: float | None = 1.0,
        hyperprior: tuple[float, float] = (1.0, 0.1),
        approximator: BaseApproximator | None = None,
        n_draws: int = 200,
        random_state: RandomState = None,
    ) -> None:
        self.model = model
        self.n_hidden = n_hidden
        self.prior_precision = prior_precision
        self.hyperprior = hyperprior
        self.approximator = approximator
        self.n_draws = n_draws
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fit the posterior and keep draws of it.

        Parameters
        ----------
        X : array-like of shape (n, p)
        y : array-like of shape (n,)
        sample_weight : array-like of shape (n,), default=None
            How often each observation counts.

        Returns
        -------
        self : object
        """
        self._validate_params()
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        w = check_sample_weight(sample_weight, len(X))
        X, y, w = X[w > 0], y[w > 0], w[w > 0]
        self._learn_scales(X, w)
        self._y_mean, self._y_scale = location_and_scale(y, w)
        if self.model == "linear":
            Z, z = self._standardised(X), (y - self._y_mean) / self._y_scale
            self.target_: Any = BayesianLinearRegression(Z, z, hyperprior=self.hyperprior, sample_weight=w)
            self._fit_draws(self._new_approximator(KSIVIApproximator()), self.target_)
            return self
        self.target_ = BayesianNeuralNetwork(
            X,
            y,
            n_hidden=self.n_hidden,
            prior_precision=self.prior_precision,
            hyperprior=self.hyperprior,
            sample_weight=w,
        )
        q = self._new_approximator(_approximator_of_networks(len(X)))
        self._start_at_networks(q)
        self._fit_draws(q, self.target_ if len(X) <= N_ROWS else Minibatches(self.target_, N_ROWS))
        return self

    def _start_at_networks(self, q: BaseApproximator) -> None:
        """Let an approximator start at random weights, or its pilot at trained networks, unless it has an `init`."""
        parameters = q.get_params(deep=False)
        if parameters.get("init", 0) is not None or parameters.keys() & {"n_particles", "n_chains"}:
            return  # particles and chains are as many as they say, and spread
        rng = make_rng(self.random_state)
        chains = pilot_of(parameters.get("whiten"))
        if chains is not None and chains.rule == "diagonal":
            q.set_params(init=trained_weights(self.target_, N_NETWORKS, rng))
        else:  # a mode search goes on from there
            q.set_params(init=_random_weights(self.target_, rng))

    def _outputs(self, X: np.ndarray) -> np.ndarray:
        """Return f of each draw at each row, shape (n_draws, n), in the units of y."""
        if isinstance(self.target_, BayesianNeuralNetwork):
            return self.target_.outputs(self.draws_, X)
        return self._y_mean + self._y_scale * (self.draws_[:, :-2] @ self._standardised(X).T)

    def _noise_variance(self) -> np.ndarray:
        """Return the variance of the noise of y for each draw, shape (n_draws, 1)."""
        return np.exp(-self.draws_[:, -1:]) * self._y_scale**2

    def predict(self, X: ArrayLike, return_std: bool = False) -> Any:  # noqa: ANN401
        """Predict y by the mean over draws.

        Parameters
        ----------
        X : array-like of shape (n, p)
        return_std : bool, default=False
            Whether to return the standard deviation of a new y too.

        Returns
        -------
        y_mean : ndarray of shape (n,)
        y_std : ndarray of shape (n,)
            With `return_std`: from the spread of the draws and the noise.
        """
        X = self._check_inputs(X)
        outputs = (self._outputs(X[rows]) for rows in self._parts(len(X)))
        if not return_std:
            return np.concatenate([f.mean(0) for f in outputs])
        mean, variance = np.concatenate([(f.mean(0), f.var(0)) for f in outputs], axis=1)
        return mean, np.sqrt(variance + self._noise_variance().mean())

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Return the coefficient of determination, R^2, of the predictions.

        Parameters
        ----------
        X : array-like of shape (n, p)
        y : array-like of shape (n,)
        sample_weight : array-like of shape (n,), default=None

        Returns
        -------
        score : float
            At most one.
        """
        return super().score(X, y, sample_weight)

    def sample_y(self, X: ArrayLike, n_samples: int = 1, random_state: RandomState = 0) -> np.ndarray:
        """Draw new values of y, noise included, each set of one draw of the posterior.

        Parameters
        ----------
        X : array-like of shape (n, p)
        n_samples : int, default=1
        random_state : int, RandomState or None, default=0

        Returns
        -------
        y_samples : ndarray of shape (n, n_samples)
        """
        check_integer(n_samples, "n_samples", min_val=0)
        X, rng = self._check_inputs(X), make_rng(random_state)
        s = rng.randint(len(self.draws_), size=n_samples)
        noise = np.sqrt(self._noise_variance()[s]) * rng.normal(size=(n_samples, len(X)))
        return (np.concatenate([self._outputs(X[rows])[s] for rows in self._parts(len(X))], axis=1) + noise).T

    def log_predictive_density(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        r"""Evaluate :math:`\log \frac1S \sum_s N(y_i; f_s(x_i), 1 / \gamma_s)`, the mixture over draws.

        Parameters
        ----------
        X : array-like of shape (n, p)
        y : array-like of shape (n,)

        Returns
        -------
        log_density : ndarray of shape (n,)
            In nats, for y in its own units.
        """
        X, y = self._check_inputs(X), check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
        if y.shape != X.shape[:1]:
            raise ValueError(f"`y` has shape {y.shape}, expected {X.shape[:1]}, one value for each row of `X`.")
        variance = self._noise_variance()
        return np.concatenate([log_normal_mixture(y[i], self._outputs(X[i]), variance) for i in self._parts(len(X))])


def _approximator_of_networks(n_rows: int) -> KSIVIApproximator:
    """Return what fits a network by default, with fewer steps of its chains where each is expensive."""
    return KSIVIApproximator(
        whiten=Pilot("diagonal", budget=int(N_NETWORKS * N_STEPS * min(1, 2 * N_ROWS / n_rows))),
        scale=Scale(floor=1e-5),
        learning_rate=5e-4,
        batch_size=64,
        max_iter=500,
    )


def trained_weights(target: BayesianNeuralNetwork, n: int, rng: np.random.RandomState) -> np.ndarray:
    r"""Train networks from random weights by Adam, a :math:`\lambda` that is learned held at one.

    At zero, a saddle, all units would stay alike; and where :math:`\lambda` is free, the density has no bound but the
    prior's at :math:`\lambda \to \infty` and weights of zero.

    Returns
    -------
    theta : ndarray of shape (n, n_parameters)
    """
    theta = as_tensor(np.stack([_random_weights(target, rng) for _ in range(n)]), dtype=torch.float32)
    moves = torch.ones(theta.shape[1])
    if target.prior_precision is None:
        moves[-2] = 0.0
    optimizer = torch.optim.Adam([theta], lr=0.01, betas=(0.9, 0.99))
    for _ in range(N_TRAINING):
        rows = as_tensor(rng.randint(target.n_rows, size=N_ROWS))
        data = target if target.n_rows <= N_ROWS else target.subset(rows)
        theta.grad = -data.score_fn(theta) * moves
        optimizer.step()
    return theta.double().numpy()


def _random_weights(target: BayesianNeuralNetwork, rng: np.random.RandomState) -> np.ndarray:
    """Draw weights as networks are commonly started, of noise that has a third of the variance of y."""
    p, k = len(target.X_mean), target.n_hidden
    W, w = rng.normal(size=p * k) / np.sqrt(p), rng.normal(size=k) / np.sqrt(k)
    log_lam = [0.0] if target.prior_precision is None else []
    return np.concatenate([W, np.zeros(k), w, [0.0], log_lam, [1.0]])  # b_1, w, b_2 and log gamma


class KSIVIClassifier(ClassifierMixin, _Predictor):
    r"""Bayesian logistic regression, predicting by draws of the posterior.

    Binary: :math:`P(y = 1 | x) = 1 / (1 + e^{-\beta^\top x})`; of more classes the softmax of one linear function
    each. The columns of X are standardised and an intercept is added; all coefficients have the prior
    :math:`N(0, 1 / \alpha)`.

    Parameters
    ----------
    prior_precision : float, default=1.0
        The alpha > 0.
    approximator : approximator, default=None
        Whatever of this package fits the posterior; None means `KSIVIApproximator` with its defaults. Its parameters
        can be searched, as ``approximator__bandwidth``.
    n_draws : int, default=1000
        Draws of the posterior that are kept.
    random_state : int, RandomState or None, default=None
        Seeds an approximator that has no `random_state` of its own.

    Attributes
    ----------
    classes_ : ndarray of shape (k,)
    approximator_ : approximator
        Fitted.
    draws_ : ndarray of shape (n_draws, n_parameters)
    target_ : Target
        The posterior.
    n_features_in_ : int
    feature_names_in_ : ndarray of str
        Of the columns of X, where they have names.

    Examples
    --------
    >>> from skksivi import KSIVIClassifier
    >>> from skksivi.datasets import load_waveform
    >>> X, y = load_waveform(return_X_y=True)
    >>> model = KSIVIClassifier(random_state=0).fit(X, y)
    >>> model.predict_proba(X[:2]).shape
    (2, 2)
    """

    _parameter_constraints: ClassVar[Constraints] = {"prior_precision": [Interval(Real, 0, None, closed="neither")]}

    def __init__(
        self,
        *,
        prior_precision: float = 1.0,
        approximator: BaseApproximator | None = None,
        n_draws: int = 1000,
        random_state: RandomState = None,
    ) -> None:
        self.prior_precision = prior_precision
        self.approximator = approximator
        self.n_draws = n_draws
        self.random_state = random_state

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
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        w = check_sample_weight(sample_weight, len(X))
        X, y, w = X[w > 0], y[w > 0], w[w > 0]
        self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            raise ValueError(f"`y` must have two classes at least, got one class: {self.classes_[0]!r}.")
        self._learn_scales(X, w)
        model = BayesianLogisticRegression if len(self.classes_) == 2 else BayesianMultinomialRegression
        self.target_: Any = model(self._standardised(X), y, self.prior_precision, sample_weight=w)
        self._fit_draws(self._new_approximator(KSIVIApproximator()), self.target_)
        return self

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Predict the probability of each class, the mean over draws.

        Parameters
        ----------
        X : array-like of shape (n, p)

        Returns
        -------
        proba : ndarray of shape (n, n_classes)
            In the order of `classes_`.
        """
        Z = self._standardised(self._check_inputs(X))
        return np.concatenate([self._proba(Z[rows]) for rows in self._parts(len(Z), len(self.classes_))])

    def _proba(self, Z: np.ndarray) -> np.ndarray:
        z, draws = as_tensor(Z), as_tensor(self.draws_)
        if len(self.classes_) == 2:
            p = torch.sigmoid(draws @ z.T).mean(0)
            return torch.stack([1 - p, p], 1).numpy()
        logits = z @ draws.unflatten(1, (z.shape[1], -1))
        return logits.softmax(-1).mean(0).numpy()

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Return the share of labels that are predicted right.

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
