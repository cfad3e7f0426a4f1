"""Choosing hyper-parameters with scikit-learn's search tools, a target instead of X.

`Replicates` says how often each candidate is fitted, a scorer how each fit is judged::

    GridSearchCV(KSIVIApproximator(), grid, scoring=neg_divergence_scorer(), cv=Replicates(3)).fit(target)
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils import check_array
from torch import Tensor

from skksivi._utils.arrays import RandomState, as_tensor, make_seed, resolve_device, without_graph
from skksivi._utils.checks import check_integer, shown
from skksivi.base import BaseApproximator
from skksivi.families._weights import LEAST_DRAWS
from skksivi.inference._importance import importance_sample
from skksivi.kernels import IMQ
from skksivi.metrics import mmd, sliced_wasserstein
from skksivi.score._score import ScoreFunction, function_of, is_target
from skksivi.score._target import TargetOrScore, on_device
from skksivi.stein._discrepancy import FixedKernelKSD
from skksivi.targets._base import Target
from skksivi.training._run import ordinary_mode

__all__ = ["Replicates", "neg_distance_scorer", "neg_divergence_scorer", "neg_ksd_scorer", "within_noise"]
__dir__ = __all__.copy

#: Gives a number, larger is better, from (estimator, X, y=None).
Scorer = Callable[..., float]

Metric = Callable[[np.ndarray, np.ndarray], float]

METRICS: dict[str, Metric] = {"mmd": mmd, "sliced_wasserstein": lambda X, Y: sliced_wasserstein(X, Y, random_state=0)}


class Replicates:
    """Repeat fit and evaluation on the whole target, each time with different random numbers.

    A posterior has no rows that could be held out: splitting the data would compare the fit to one posterior
    with another. Each fold is instead the same target with another seed. The seed of a fit is derived from the fold
    and, unless it is None, the estimator's `random_state`. It is the same for all candidates, which makes their
    differences less noisy, and does not depend on the number of jobs.

    Parameters
    ----------
    n_splits : int, default=3
        How often each candidate is fitted.
    random_state : int, RandomState or None, default=0
        Draws the seeds of the folds: the same at each call of `split` for an integer, different ones for None.

    See Also
    --------
    neg_divergence_scorer : Scores fits by the density of the target.
    neg_ksd_scorer : Scores fits by the score function of the target.

    Examples
    --------
    >>> from sklearn.model_selection import cross_val_score
    >>> from skksivi import KSIVIApproximator
    >>> from skksivi.model_selection import Replicates
    >>> from skksivi.targets import XShaped
    >>> grades = cross_val_score(KSIVIApproximator(), XShaped(), cv=Replicates(2))
    >>> grades[0] != grades[1]
    np.True_
    """

    def __init__(self, n_splits: int = 3, *, random_state: RandomState = 0) -> None:
        self.n_splits = n_splits
        self.random_state = random_state

    def split(self, X: object = None, y: None = None, groups: None = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Generate the row of each replicate, for training and for test.

        Parameters
        ----------
        X : Target, default=None
        y, groups : None
            Ignored, present by scikit-learn's convention.

        Yields
        ------
        train, test : ndarrays of shape (1,)
            Equal.

        Raises
        ------
        TypeError
            X is not a target.
        """
        n_splits = self.get_n_splits()
        if X is not None and not is_target(X):
            raise TypeError(
                f"`X` must be a Target, the fit to which is repeated; got a {type(X).__name__}. Split data by KFold."
            )
        first = 1 + make_seed(self.random_state)
        for row in range(first, first + n_splits):
            yield np.array([row]), np.array([row])

    def get_n_splits(self, X: object = None, y: None = None, groups: None = None) -> int:
        """Return the number of folds."""
        return check_integer(self.n_splits, "n_splits", min_val=1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n_splits={self.n_splits}, random_state={self.random_state})"


def neg_divergence_scorer(*, n_samples: int = 1000) -> Scorer:
    r"""Make a scorer of minus the symmetric Kullback-Leibler divergence between fit and target.

    .. math:: \mathrm{KL}(q \| p) + \mathrm{KL}(p \| q) = E_q[\log q - \log p] - E_p[\log q - \log p]

    The second mean weights the draws by p / q, as `skksivi.importance_sample` does. Near the target the terms of both
    means are near the same constant, so a good fit has little noise: less than a discrepancy, whose terms are of the
    same size for every fit. The weights cannot show a mode that no draw comes near.

    Parameters
    ----------
    n_samples : int, default=1000
        Number of draws of the estimator, at least 100. Each costs a value of its log-density and of the target's; or,
        if the target has no `log_prob`, about ten values of its score.

    Returns
    -------
    scorer : callable
        Maps (estimator, X, y=None), with X a target or its score function, to a float, in nats: at best zero up to
        noise, larger is better. The same for the same estimator and X.

    Raises
    ------
    ValueError
        `n_samples` is below 100. The scorer raises it if X has another number of features than the draws, or no
        density at nearly all of them; and TypeError if the estimator has no density, such as a set of points. A
        search then gives this candidate nan.

    See Also
    --------
    neg_ksd_scorer : For estimators without a density.

    Examples
    --------
    >>> from sklearn.model_selection import GridSearchCV
    >>> from skksivi import KSIVIApproximator
    >>> from skksivi.model_selection import Replicates, neg_divergence_scorer
    >>> from skksivi.targets import XShaped
    >>> search = GridSearchCV(
    ...     KSIVIApproximator(max_iter=100, hidden_layer_sizes=(20,), whiten="laplace", random_state=0),
    ...     {"learning_rate": [1e-5, 1e-2]},
    ...     scoring=neg_divergence_scorer(n_samples=200),
    ...     cv=Replicates(1),
    ... ).fit(XShaped())
    >>> search.best_params_
    {'learning_rate': 0.01}
    """
    check_integer(n_samples, "n_samples", min_val=LEAST_DRAWS)
    return _NegDivergence(n_samples)


def neg_ksd_scorer(*, n_samples: int = 2000, widths: float | Sequence[float] = (0.25, 1.0, 4.0)) -> Scorer:
    r"""Make a scorer of minus the squared kernel Stein discrepancy, under one kernel for all candidates.

    .. math::
        k(u, u') = \frac{1}{|C| + 1} \left( \frac{u^\top u'}{\sqrt d} + \sum_{c \in C}
        \left(\frac{1 + \|u - u'\|^2 / (c^2 d)}{1 + 2/c^2}\right)^{-1/2} \right)

    in coordinates u whitened by the curvature at a mode, which is found from the target's own scores: nothing depends
    on the candidate. Each term is of size one at a typical pair, :math:`\|u - u'\|^2 = 2d`. The inverse multiquadrics
    respond to means and, narrow ones, to shape and tails; the linear term responds to covariances, to which they are
    almost insensitive in many dimensions. None detects wrong weights of well-separated modes.

    Parameters
    ----------
    n_samples : int, default=2000
        Number of draws of the estimator; time grows with its square, noise falls with its inverse.
    widths : float or sequence of float, default=(0.25, 1.0, 4.0)
        The c of the formula, in units of the square root of the dimension.

    Returns
    -------
    scorer : callable
        Maps (estimator, X, y=None), with X a target or its score function, to a float: at best zero up to noise,
        larger is better. The same for the same estimator and X.

    Raises
    ------
    ValueError
        `n_samples` is below 2, or `widths` is empty or contains a number that is not positive. The scorer raises it
        if X has another number of features than the draws, or the score is not finite at one of them; a search then
        gives this candidate nan.

    See Also
    --------
    neg_divergence_scorer : Less noisy, for estimators with a density.
    neg_distance_scorer : Compares with reference draws, where there are some.

    Examples
    --------
    >>> from sklearn.model_selection import GridSearchCV
    >>> from skksivi import KSIVIApproximator
    >>> from skksivi.model_selection import Replicates, neg_ksd_scorer
    >>> from skksivi.targets import XShaped
    >>> search = GridSearchCV(
    ...     KSIVIApproximator(max_iter=1000, whiten="laplace", random_state=0),
    ...     {"learning_rate": [1e-3, 2e-3]},
    ...     scoring=neg_ksd_scorer(n_samples=500),
    ...     cv=Replicates(2),
    ... ).fit(XShaped())
    >>> search.best_estimator_.sample(3).shape
    (3, 2)
    """
    check_integer(n_samples, "n_samples", min_val=2)
    widths = tuple(np.ravel(widths).tolist())
    if not widths or not all(isinstance(c, Real) and 0 < c < math.inf for c in widths):
        raise ValueError(f"`widths` must hold positive numbers, got {shown(widths)}.")
    return _NegKSD(n_samples, widths)


def neg_distance_scorer(
    X_reference: ArrayLike, *, metric: str | Metric = "mmd", n_samples: int | None = None
) -> Scorer:
    """Make a scorer of minus the distance to reference draws.

    Reference draws, such as a long chain for one of many similar problems, show what no Stein discrepancy does:
    weights of modes, and far tails.

    Parameters
    ----------
    X_reference : array-like of shape (m, d)
    metric : {"mmd", "sliced_wasserstein"} or callable, default="mmd"
        The squared maximum mean discrepancy or the sliced Wasserstein distance, of coordinates in units of the
        reference's standard deviations. Or a function of two arrays, which receives the draws of the estimator and
        the reference unscaled.
    n_samples : int, default=None
        Draws of the estimator; None means m.

    Returns
    -------
    scorer : callable
        Maps (estimator, X=None, y=None) to a float; larger is better. The same for the same estimator and X.

    Raises
    ------
    ValueError
        `X_reference` is not finite or has fewer than two rows, or `metric` is unknown.

    See Also
    --------
    skksivi.metrics.noise_floor : The distance of exact draws.

    Examples
    --------
    >>> import numpy as np
    >>> from skksivi.baselines import Laplace
    >>> from skksivi.model_selection import neg_distance_scorer
    >>> from skksivi.targets import from_score_fn
    >>> scorer = neg_distance_scorer(np.random.RandomState(0).normal(size=(1000, 2)))
    >>> right, wrong = (from_score_fn(lambda x, m=m: m - x, n_features=2) for m in (0.0, 1.0))
    >>> scorer(Laplace().fit(wrong)) < -0.1 < scorer(Laplace().fit(right)) < 0.01
    True
    """
    X_reference = check_array(
        without_graph(X_reference), dtype=np.float64, ensure_min_samples=2, input_name="X_reference"
    )
    n_samples = len(X_reference) if n_samples is None else n_samples
    check_integer(n_samples, "n_samples", min_val=2)
    if not callable(metric) and metric not in METRICS:
        raise ValueError(f"`metric` must be one of {sorted(METRICS)} or a callable, got {metric!r}.")
    return _NegDistance(X_reference, metric, n_samples)


def within_noise(cv_results: dict[str, Any], metric: str = "score") -> int:
    r"""Choose the simplest candidate within one standard error of the best, as `refit` of a search.

    Simplest is the candidate that sets the fewest parameters, among equals the first of the grid. So ``{}``, the
    estimator as it is, comes before any training that does not beat it by more than noise. The standard error is the
    one of the best candidate's mean, over replicates.

    Parameters
    ----------
    cv_results : dict
        The ``cv_results_`` of a search. Two columns are added, which show what the choice was between:
        ``se_test_score``, the standard errors of the mean scores, and ``within_noise_score``, whether a candidate is
        within one standard error of the best.
    metric : str, default="score"
        Which of several scorers chooses: ``refit=partial(within_noise, metric="divergence")``. The columns have its
        name.

    Returns
    -------
    best_index : int
        The number of the candidate, which the search then fits once more.

    Raises
    ------
    ValueError
        There are fewer than two replicates, no scorer of this name, or no candidate with a finite score.

    References
    ----------
    Breiman, L., Friedman, J., Olshen, R. and Stone, C. (1984). Classification and regression trees. Wadsworth.
    Section 3.4.3.

    See Also
    --------
    Replicates : Says how often each candidate is fitted.
    skksivi.plotting.SearchDisplay : Shows candidates, replicates and the choice.

    Examples
    --------
    >>> import numpy as np
    >>> from skksivi.model_selection import within_noise
    >>> found = {
    ...     "params": [{"bandwidth": 1.0}, {}],
    ...     "split0_test_score": np.array([-0.20, -0.22]),
    ...     "split1_test_score": np.array([-0.26, -0.25]),
    ... }
    >>> within_noise(found)  # as GridSearchCV(..., refit=within_noise) does
    1
    """
    of_splits = rf"split\d+_test_{re.escape(metric)}"
    scores = [column for key, column in cv_results.items() if re.fullmatch(of_splits, key)]
    if len(scores) < 2:
        raise ValueError(
            f"`within_noise` found {len(scores)} replicates of a metric {metric!r}, expected two or more: "
            "cv=Replicates(3), and refit=partial(within_noise, metric=NAME) with several scorers."
        )
    means = np.mean(scores, axis=0)
    if np.isnan(means).all():
        raise ValueError("`within_noise` found no candidate with a finite score; error_score='raise' shows why.")
    se = np.std(scores, axis=0, ddof=1) / math.sqrt(len(scores))
    best = np.nanargmax(means)
    near = means >= means[best] - se[best]
    cv_results |= {f"se_test_{metric}": se, f"within_noise_{metric}": near}
    return min(np.flatnonzero(near).tolist(), key=lambda k: len(cv_results["params"][k]))


@dataclass(frozen=True)
class _NegDivergence:
    n_samples: int

    def __call__(self, estimator: BaseApproximator, X: Target | ScoreFunction, y: object = None) -> float:
        sample = importance_sample(copy.copy(estimator), X, n_samples=self.n_samples, random_state=_rng_of(X))
        return _rounded(-sample.certificate().divergence)


@dataclass(frozen=True)
class _NegKSD:
    n_samples: int
    widths: tuple[float, ...]

    def __call__(self, estimator: BaseApproximator, X: Target | ScoreFunction, y: object = None) -> float:
        draws = _draws(estimator, self.n_samples, X)
        device = resolve_device(getattr(estimator, "device", "cpu"))
        with ordinary_mode(device):
            x = as_tensor(draws, dtype=torch.float64, device=device)
            judge = FixedKernelKSD(_score_fn(on_device(X, device=device), x.shape[1]), x.shape[1], device)
            unit = math.sqrt(x.shape[1])
            terms = [math.sqrt(1 + 2 / c**2) * judge(x, IMQ(bandwidth=c * unit)) for c in self.widths]
            return _rounded(-float(np.mean([*terms, _linear_term(judge, x)])))


@dataclass(frozen=True, eq=False)
class _NegDistance:
    X_reference: np.ndarray
    metric: str | Metric
    n_samples: int

    def __call__(self, estimator: BaseApproximator, X: object = None, y: object = None) -> float:
        draws, reference = _draws(estimator, self.n_samples, X), self.X_reference
        if draws.shape[1] != reference.shape[1]:
            m, d = reference.shape[1], draws.shape[1]
            raise ValueError(f"`X_reference` has {m} columns, but the draws of the estimator have {d}.")
        if callable(self.metric):
            return -self.metric(draws, reference)
        sd = reference.std(axis=0)
        sd[sd == 0] = 1
        return -METRICS[self.metric](draws / sd, reference / sd)


def _score_fn(X: TargetOrScore, d: int) -> ScoreFunction:
    """Return the score function of a target, or X itself, to judge draws of d features by."""
    score_fn, own = function_of(X), getattr(X, "n_features", d)
    if not callable(score_fn):
        raise TypeError(f"`X` must be a Target or its score function, got a {type(X).__name__}.")
    if own != d:
        raise ValueError(f"`X` is a target of {own} features, but the draws of the estimator have {d}.")
    return score_fn


def _rounded(grade: float) -> float:
    """Return eight digits: the last of sixteen depend on the number of threads, and workers have fewer."""
    return float(f"{grade:.8g}")


def _linear_term(judge: FixedKernelKSD, x: Tensor) -> float:
    r"""Return the U-statistic of :math:`\|E[s u^\top] + I\|^2 / \sqrt d`, zero by Stein's identity."""
    n, d = x.shape
    u, s = judge.map.whiten(x), judge.map.whiten_score(judge.score_fn(x))
    total = s.mT @ u + n * torch.eye(d, dtype=u.dtype, device=u.device)
    own = s.square().sum(1) * u.square().sum(1) + 2 * (s * u).sum(1) + d
    return ((total.square().sum() - own.sum()) / (n * (n - 1) * math.sqrt(d))).item()


def _draws(estimator: BaseApproximator, n_samples: int, X: object) -> np.ndarray:
    """Return draws (n_samples, d) that differ between replicates and depend on nothing that was drawn before."""
    return estimator.sample(n_samples, random_state=_rng_of(X))


def _rng_of(X: object) -> np.random.RandomState:
    """Return the random numbers of a replicate."""
    return np.random.RandomState([0, *getattr(X, "replicate", ())])
