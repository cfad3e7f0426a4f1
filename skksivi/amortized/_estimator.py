"""The estimator that is fitted to many posteriors at once."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from skksivi._utils import DOCUMENTATION
from skksivi._utils.arrays import DTYPES, RandomState, as_array, as_numbers, make_generator, make_seed, resolve_device
from skksivi._utils.checks import check_integer, warn_caller
from skksivi.amortized._contexts import (
    PairedScore,
    Rows,
    Source,
    as_contexts,
    as_rows,
    at_contexts,
    is_of_sets,
    n_repeated,
    parts,
    simulated,
)
from skksivi.amortized._family import Conditional
from skksivi.amortized._stages import Outcome, Settings, Stages
from skksivi.base import Constraints, Integral, Interval, Real, StrOptions, counts
from skksivi.diagnostics import Diagnosis, diagnose
from skksivi.estimators import KSIVIApproximator, answers_at, as_fitted
from skksivi.families import Layer, cheap_certificate
from skksivi.judge import THRESHOLDS
from skksivi.parameters import WIDTHS, Nested, Pilot, check_widths
from skksivi.score import resolve_score
from skksivi.targets import Target, from_score_fn
from skksivi.training import Reporter, logged, ordinary_mode

LOGGER = logging.getLogger("skksivi")


@dataclass(kw_only=True, eq=False, repr=False)
class AmortizedKSIVI(Nested):
    r"""Kernel semi-implicit variational inference for many data sets at once.

    A sampler q(x | y) is trained on the scores of p(x | y) for many contexts y, such as simulated data sets. For a
    new one it draws in milliseconds, without further scores. It is a conditional Gaussian mixture: a semi-implicit
    layer on top of it, trained along the path gradient, was no better (see the user guide). The family is

    .. math:: x = m(h) + L(h)\, u, \qquad u \sim \sum_k w_k(h)\, N(m_k(h), C_k(h)),

    with features h of y and networks of h for all else. Its training has two stages, and each ends by itself:

    1. Newton searches find the modes of many posteriors, in batches. Modes and curvatures are regressed on h by the
       divergence between Gaussians. Further rounds start at the predictions of the regression.
    2. All networks are fitted to scores at draws of the first stage or, if the parameters that generated the
       contexts are known, at these parameters. They are exact draws from the posteriors, and their likelihood enters
       the objective, too: it finds separated modes and several scales.

    Parameters
    ----------
    n_components : int or "auto", default="auto"
        Components of the mixture. "auto" is 8, or 4 beyond five features, if parameters are given, and otherwise
        one, the standard normal.
    hidden_layer_sizes : int or sequence of int, default=(100, 100, 100)
        Widths of the hidden layers of each network.
    summary : Module or None, default=None
        Features of the contexts: maps (m, c), or a list of m sets (n_i, c), to (m, p), as
        `skksivi.amortized.DeepSets` does. It is trained with the rest, in float64. None means the standardised
        contexts.
    n_contexts : int, default=1000
        Number of contexts requested from a function.
    max_score_calls : int, default=100_000
        Upper limit of evaluations of the score plus products with its Jacobian in `fit`.
    learning_rate : float, default=1e-2
    device : str or torch.device, default="auto"
    dtype : {"float32", "float64"}, default="float32"
        Type of the draws. Scores are evaluated and networks trained in float64.
    random_state : int, RandomState or None, default=None
    verbose : int, default=0
        1 and 2 log each stage to the logger "skksivi", see `KSIVIApproximator`.

    Attributes
    ----------
    family_ : Module
        The fitted family.
    certificates_ : list of Certificate
        Certificates at some held-out contexts, see `skksivi.importance_sample`, as many as the budget allowed.
    divergence_ : float
        Mean held-out divergence per feature between the Gaussians of the first stage and those at the modes, in nats;
        NaN if there are too few contexts.
    n_contexts_, n_lost_ : int
        Number of contexts whose mode was searched for, and for which it was not found.
    n_features_in_ : int
        Dimension d of x.
    n_score_calls_, n_products_ : int
        Points at which `fit` evaluated the score, and products with its Jacobian.
    stages_ : list of Stage

    See Also
    --------
    KSIVIApproximator : A fit to one posterior.

    References
    ----------
    Cranmer, K., Brehmer, J. and Louppe, G. (2020). The frontier of simulation-based inference. PNAS 117(48).

    Brehmer, J., Louppe, G., Pavez, J. and Cranmer, K. (2020). Mining gold from implicit models to improve
    likelihood-free inference. PNAS 117(10).

    Feng, Y., Wang, D. and Liu, Q. (2017). Learning to draw samples with amortized Stein variational gradient descent.
    https://arxiv.org/abs/1707.06626

    Examples
    --------
    A normal mean with a standard normal prior, from one observation of variance one: p(x | y) is N(y / 2, 1 / 2).

    >>> import numpy as np
    >>> from skksivi import AmortizedKSIVI
    >>> def score_fn(x, y):
    ...     return (y - x) - x
    >>> contexts = np.random.RandomState(0).normal(size=(100, 2))
    >>> q = AmortizedKSIVI(max_score_calls=3000, random_state=0).fit(score_fn, contexts, n_features=2)
    >>> q.sample(10_000, [2.0, -1.0]).mean(axis=0).round(1)
    array([ 1. , -0.5], dtype=float32)
    """

    _doc_link_module = "skksivi"
    _doc_link_template = DOCUMENTATION + "/generated/skksivi.{estimator_name}.html"

    family_: Conditional = field(init=False)
    stages_: list[Any] = field(init=False)

    _parameter_constraints: ClassVar[Constraints] = {
        "n_components": [Interval(Integral, 1, None, closed="left"), StrOptions({"auto"})],
        "hidden_layer_sizes": [*WIDTHS],
        "summary": [nn.Module, None],
        "n_contexts": [Interval(Integral, 2, None, closed="left")],
        "max_score_calls": [Interval(Integral, 1, None, closed="left")],
        "learning_rate": [Interval(Real, 0, None, closed="neither")],
        "device": [str, torch.device],
        "dtype": [StrOptions(set(DTYPES))],
        "random_state": ["random_state"],
        "verbose": [Interval(Integral, -1, None, closed="left")],
    }

    n_components: int | str = "auto"
    hidden_layer_sizes: int | Sequence[int] = (100, 100, 100)
    summary: nn.Module | None = None
    n_contexts: int = 1000
    max_score_calls: int = 100_000
    learning_rate: float = 1e-2
    device: str | torch.device = "auto"
    dtype: str = "float32"
    random_state: RandomState = None
    verbose: int = 0

    def fit(
        self,
        score_fn: Any,  # noqa: ANN401
        contexts: Source | None = None,
        parameters: ArrayLike | None = None,
        *,
        n_features: int | None = None,
    ) -> Self:
        """Fit the family to the posteriors of many contexts.

        Parameters
        ----------
        score_fn : callable
            The gradient of log p(x | y) in x for rows of pairs: maps x (n, n_features) and y (n, c), tensors or
            arrays of float64, to (n, n_features). Contexts that are sets are passed as a list of length n. Products
            with its Jacobian are by automatic differentiation or, if that is wrong or impossible, by differences.
            Or an object with such a `score_fn`, with `n_features` and, for contexts, with `simulate`.
        contexts : array-like of shape (m, c), callable or iterable, default=None
            The training contexts, which should cover the contexts of later use, for example data simulated from the
            prior. A function ``contexts(n, rng)`` of a number and a numpy RandomState returns n of them, or a pair
            (parameters, contexts); an iterable that is not a sequence, such as a data loader, returns batches of
            either, which are read until there are 100,000 contexts. With a `summary` also m sets of shape (n_i, c),
            in a list or an array. None takes ``score_fn.simulate``.
        parameters : array-like of shape (m, n_features), default=None
            The x from which each context was simulated. They are exact draws from the posteriors, and have
            information on separated modes and their weights that scores lack.
        n_features : int, default=None
            Dimension d of x; needed with a bare callable.

        Returns
        -------
        self : object

        Raises
        ------
        TypeError
            `score_fn` returns neither a tensor nor an array, or contexts hold no numbers.
        ValueError
            Contexts or parameters are of a wrong shape or not finite, or all contexts are the same; the score has
            another shape than its input or does not depend on its context; no mode was found; or a parameter is out
            of its range.
        RuntimeError
            The score raises at every pair. Where it raises at some, it counts as not finite there.

        Warns
        -----
        ConvergenceWarning
            Some modes were not found, or certificates at held-out contexts are bad or could not be computed.
        UserWarning
            Most contexts are the same data set.
        """
        self._validate_params()
        widths = check_widths(self.hidden_layer_sizes, "hidden_layer_sizes")
        contexts, d = _of_model(score_fn, contexts, n_features)
        device = resolve_device(self.device)
        seed = make_seed(self.random_state)
        rng, generator = np.random.RandomState(seed), make_generator(seed, device)
        sets = self.summary is not None
        Y, X = simulated(contexts, parameters, self.n_contexts, rng, sets=sets)
        with ordinary_mode(device), logged(self.verbose):
            y = as_contexts(Y, device, sets=sets and is_of_sets(Y))
            x = None if X is None else as_rows(X, len(y), d, device, "parameters")
            _check_repeated(y)
            score = PairedScore(getattr(score_fn, "score_fn", score_fn), d, y, device)
            settings = Settings(
                self._n_components(x is not None, d),
                widths,
                self.summary,
                float(self.learning_rate),
                int(self.max_score_calls),
                seed,
            )
            stages = Stages(settings, score, y, x, generator)
            reporter = Reporter(self.verbose or -1, score_fn)  # no price of scores, for networks take the time
            with reporter.following(score.tally):
                outcome = stages.run()
            self.__dict__.update(self._learned(stages, outcome, score, seed))
            if self.verbose > 0:
                LOGGER.info("%s", "; ".join(map(str, self.stages_)))
        self._warn(outcome)
        return self

    def _n_components(self, has_parameters: bool, d: int) -> int:
        if self.n_components == "auto":
            most = 8 if d <= 5 else 4
            return most if has_parameters else 1
        if int(self.n_components) > 1 and not has_parameters:
            raise ValueError(
                f"`n_components` is {self.n_components}, which needs the parameters that made the contexts; give "
                "`parameters`, or set n_components=1."
            )
        return int(self.n_components)

    def _learned(self, stages: Stages, outcome: Outcome, score: PairedScore, seed: int) -> dict[str, object]:
        """Return what a fit leaves on the estimator."""
        family = stages.family
        with torch.no_grad():
            h = torch.cat([family.features(part) for part in parts(stages.y)])
        spread = h.T @ h / len(h) + 1e-3 * torch.eye(h.shape[1]).to(h)  # a feature may be constant
        whitens = torch.linalg.inv(torch.linalg.cholesky(spread))
        return {
            "family_": family,
            "certificates_": outcome.certificates,
            "divergence_": outcome.divergence,
            "n_contexts_": outcome.n_searched,
            "n_lost_": outcome.n_lost,
            "n_features_in_": family.n_features,
            **counts(score.tally),
            "_score_fn": score.score_fn,
            "_of_sets": not isinstance(stages.y, Tensor),
            "_context_shape": (stages.y if isinstance(stages.y, Tensor) else stages.y[0]).shape[1],
            "_reach": float((h @ whitens.T).norm(dim=1).max()),
            "_whitens": whitens,
            "_seed": seed,
            "_random_state": np.random.RandomState([seed, 1]),
        }

    def _warn(self, outcome: Outcome) -> None:
        """Warn of what is wrong with a fit that came to its end."""
        messages = []
        if outcome.n_lost:
            messages.append(
                f"The mode of {outcome.n_lost} of {outcome.n_searched} contexts was not found, which were left out."
            )
        if 2 * outcome.n_uncertified > outcome.n_uncertified + len(outcome.certificates):
            messages.append(
                f"No certificate could be computed at {outcome.n_uncertified} held-out contexts, as for separated "
                "modes or draws far from the posterior: check the fit by `diagnose`."
            )
        bad = [c for c in outcome.certificates if not c.divergence <= THRESHOLDS.divergence * self.n_features_in_]
        if 2 * len(bad) > len(outcome.certificates):
            worst = max(c.divergence for c in bad)
            messages.append(
                f"KL(q||p) + KL(p||q) is above {THRESHOLDS.divergence} nats per feature at {len(bad)} of "
                f"{len(outcome.certificates)} held-out contexts, and at most {worst:.2g}: raise `max_score_calls`, "
                "give more contexts, or correct the fit to one context by `refine`."
            )
        if messages:
            warn_caller(" ".join(messages), ConvergenceWarning)

    # What it draws

    def sample(self, n_samples: int, contexts: ArrayLike, random_state: RandomState = None) -> np.ndarray:
        """Draw from q(x | y) for one context or for many.

        Parameters
        ----------
        n_samples : int
            Draws per context.
        contexts : array-like of shape (c,) or (m, c)
            One context, or many; with a `summary` for sets one of shape (n_i, c), or a list of such.
        random_state : int, RandomState or None, default=None
            Makes the call repeatable. None continues the estimator's own stream.

        Returns
        -------
        X : ndarray of shape (n_samples, n_features) or (m, n_samples, n_features)

        Raises
        ------
        NotFittedError
            Before `fit`.
        TypeError, ValueError
            `n_samples` is not an integer or is negative, or `contexts` has another shape than in `fit` or is not
            finite.

        Warns
        -----
        UserWarning
            A context is far outside the training contexts.
        """
        check_is_fitted(self)
        check_integer(n_samples, "n_samples", min_val=0)
        y, alone = self._contexts(contexts)
        device = resolve_device(self.device)
        generator = make_generator(self._random_state if random_state is None else random_state, device)
        X = np.empty((len(y), n_samples, self.n_features_in_), dtype=self.dtype)
        with ordinary_mode(device), torch.no_grad():
            numbers = n_samples * max(self.n_features_in_, *np.ravel(self.hidden_layer_sizes), 1)
            step = max(1, 2**22 // max(1, numbers))  # contexts at a time, for the sake of memory
            for start, part in zip(range(0, len(y), step), parts(y, step), strict=True):
                X[start : start + step] = as_array(
                    self.family_.draws(self.family_.features(part), n_samples, generator)
                )
        return X[0] if alone else X

    def score_samples(self, X: ArrayLike, contexts: ArrayLike) -> np.ndarray:
        """Evaluate log q(x | y).

        Parameters
        ----------
        X : array-like of shape (n, n_features)
        contexts : array-like of shape (c,) or (n, c)
            One context for all rows of X, or one for each.

        Returns
        -------
        log_density : ndarray of shape (n,)
            In nats, see `KSIVIApproximator.score_samples`.

        Raises
        ------
        NotFittedError
            Before `fit`.
        ValueError
            `X` or `contexts` is of another shape, or not finite.
        """
        check_is_fitted(self)
        y, alone = self._contexts(contexts)
        rows = as_numbers(X, "X")
        x = as_rows(rows, len(rows) if alone else len(y), self.n_features_in_, resolve_device(self.device), "X")
        with torch.no_grad():
            return as_array(self.family_.log_prob(x, self.family_.features(y).expand(len(x), -1)))

    def score(self, X: ArrayLike, contexts: ArrayLike) -> float:
        """Return the mean of `score_samples`; larger is better.

        Parameters
        ----------
        X, contexts
            See `score_samples`.

        Returns
        -------
        score : float
            In nats. On simulated pairs a search over parameters may maximise it.
        """
        return float(np.mean(self.score_samples(X, contexts)))

    # One context

    def at(self, context: ArrayLike) -> KSIVIApproximator:
        """Return q(x | y) at one context as an ordinary fit.

        Parameters
        ----------
        context : array-like of shape (c,)
            One context, or a set of shape (n_i, c).

        Returns
        -------
        est : KSIVIApproximator
            Fitted, without further scores: it draws, has a density, and can be saved.
        """
        check_is_fitted(self)
        return self._at(self._one(context))

    def target(self, context: ArrayLike) -> Target:
        """Return the posterior of one context as a target.

        Parameters
        ----------
        context : array-like of shape (c,)

        Returns
        -------
        target : Target
            For functions that take a target, such as `skksivi.diagnose` and `skksivi.summary`, or another fit.
        """
        check_is_fitted(self)
        return self._target(self._one(context))

    def diagnose(
        self, contexts: ArrayLike, *, n_samples: int = 2000, random_state: RandomState = None
    ) -> Diagnosis | list[Diagnosis]:
        """Report on the fit at one context, or at each of many, see `skksivi.diagnose`.

        Parameters
        ----------
        contexts : array-like of shape (c,) or (m, c)
        n_samples, random_state
            See `skksivi.diagnose`.

        Returns
        -------
        diagnosis : Diagnosis, or list of m of them
        """
        check_is_fitted(self)
        y, alone = self._contexts(contexts)
        reports = [
            diagnose(self._at(part), self._target(part), n_samples=n_samples, random_state=random_state)
            for part in parts(y, 1)
        ]
        return reports[0] if alone else reports

    def refine(self, context: ArrayLike, *, max_iter: int = 100) -> KSIVIApproximator:
        """Correct the fit to one context, if its certificate says that this is needed.

        The posterior is explored from draws of the amortised fit, with low effort (see `skksivi.parameters.Pilot`).
        If the better of both fits is still not near the posterior, training continues from there.

        Parameters
        ----------
        context : array-like of shape (c,)
        max_iter : int, default=100
            Iterations of the training, of 128 scores, at most.

        Returns
        -------
        est : KSIVIApproximator
            Fitted, with a `certificate_`. No step is kept that makes it worse. Its `n_score_calls_` and `n_products_`
            count all steps.

        Raises
        ------
        NotFittedError
            Before `fit`.
        ValueError
            See `sample`.
        """
        check_is_fitted(self)
        check_integer(max_iter, "max_iter", min_val=1)
        y = self._one(context)
        est, target = self._at(y), self._target(y)
        score = resolve_score(target, None, dtype=DTYPES[est.dtype], device=resolve_device(est.device))
        answers = answers_at(score, est.whitening_)
        found = cheap_certificate(self._layer(y, torch.float64), score.double, self._seed)
        est.__dict__.update(score_checksum_=answers, certificate_=found)
        n_values, n_products = score.tally.n_values, score.tally.n_products
        if not _is_within(est, 0.003):  # nats a feature
            explored = self._explored(est, target)
            n_values, n_products = n_values + explored.n_score_calls_, n_products + explored.n_products_
            # of two fits without a certificate the one that has seen the posterior
            est = explored if _divergence(explored) <= _divergence(est) else est
        if not _is_within(est, THRESHOLDS.divergence):
            est = est.set_params(method="path", warm_start=True, max_iter=max_iter, whiten="auto")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)  # the certificate says it
                est.fit(target)
            n_values, n_products = n_values + est.n_score_calls_, n_products + est.n_products_
        est.n_score_calls_, est.n_products_ = n_values, n_products
        return est

    # Inside

    def _contexts(self, contexts: ArrayLike) -> tuple[Rows, bool]:
        """Return contexts like those of the training, and whether there is one alone."""
        alone = not is_of_sets(contexts) if self._of_sets else np.ndim(contexts) == 1
        y = as_contexts([contexts] if alone else contexts, resolve_device(self.device), sets=self._of_sets)
        width = (y if isinstance(y, Tensor) else y[0]).shape[1]
        if width != self._context_shape:
            raise ValueError(f"`contexts` has rows of length {width}, expected {self._context_shape} as in `fit`.")
        self._warn_of_far(y)
        return y, alone

    def _one(self, context: ArrayLike) -> Rows:
        """Raise ValueError for several contexts."""
        y, alone = self._contexts(context)
        if not alone:
            raise ValueError(f"`context` holds {len(y)} data sets, expected one; take a row.")
        return y

    def _warn_of_far(self, y: Rows) -> None:
        """Warn of contexts far outside those of the training."""
        with torch.no_grad():
            h = torch.cat([self.family_.features(part) for part in parts(y)])
        distance = (h @ self._whitens.T).norm(dim=1)
        far = distance > 1.5 * self._reach  # times the farthest context of the training
        if far.any():
            warn_caller(
                f"{int(far.sum())} of {len(far)} contexts are far outside those of `fit`, the farthest "
                f"{float(distance.max() / self._reach):.2g} times as far from their mean as any of these: the draws "
                "may be wrong. Use `refine`, or fit with contexts like them."
            )

    def _at(self, y: Rows) -> KSIVIApproximator:
        est = KSIVIApproximator(device=self.device, dtype=self.dtype, random_state=self._seed)
        return as_fitted(est, self._layer(y, DTYPES[self.dtype]), "an amortised fit", self._seed)

    def _layer(self, y: Rows, dtype: torch.dtype) -> Layer:
        with torch.no_grad():
            return self.family_.at(self.family_.features(y), self._seed, dtype)

    def _explored(self, est: KSIVIApproximator, target: Target) -> KSIVIApproximator:
        """Return a fit by importance weights or short chains, from draws of another."""
        starts = est.sample(8, random_state=self._seed)
        explored = clone(est).set_params(method="start", whiten=Pilot(effort="low"), init=starts)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the certificate says it
            return explored.fit(target)

    def _target(self, y: Rows) -> Target:
        if self._score_fn is None:
            raise ValueError("A loaded fit knows no score; give it to load(path, score_fn=...).")
        return from_score_fn(at_contexts(self._score_fn, y), self.n_features_in_)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "n_features_in_")


def _of_model(score_fn: object, contexts: Source | None, n_features: int | None) -> tuple[Source, int]:
    """Return contexts and the number of features, as they are given or as a model with a score of pairs has them."""
    if contexts is None:
        contexts = getattr(score_fn, "simulate", None)
    if contexts is None:
        raise ValueError("`contexts` is missing: give data sets, or a function that simulates them.")
    own = getattr(score_fn, "n_features", n_features)
    if own is None or (n_features is not None and n_features != own):
        raise ValueError(f"`n_features` is {n_features}, expected {own or 'the dimension of x'}.")
    return contexts, check_integer(own, "n_features", min_val=1)


def _check_repeated(y: Rows) -> None:
    """Raise ValueError if all contexts are one data set, and warn if most are."""
    n = n_repeated(y)
    if n == len(y):
        raise ValueError(
            f"`contexts` holds {f'the same data set {n} times' if n > 1 else 'one data set'}, expected different "
            "ones; for one data set use KSIVIApproximator."
        )
    if 2 * n > len(y):
        warn_caller(f"{n} of {len(y)} contexts are the same data set: the fit learns from few others.")


def _divergence(est: KSIVIApproximator) -> float:
    """Infinite where a fit has no certificate."""
    return math.inf if est.certificate_ is None else est.certificate_.divergence


def _is_within(est: KSIVIApproximator, most: float) -> bool:
    """Tell whether a fit has a certificate of a divergence up to so many nats a feature."""
    return _divergence(est) <= most * est.n_features_in_
