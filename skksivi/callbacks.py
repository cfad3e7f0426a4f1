"""Callbacks for fits, beside those of `sklearn.callback`."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any

from sklearn.utils import check_scalar

from skksivi._utils.checks import check_integer

if TYPE_CHECKING:
    from sklearn.callback import CallbackContext

__all__ = ["EarlyStopping"]
__dir__ = __all__.copy


class EarlyStopping:
    """End a fit when its score has stopped improving.

    Every 100 iterations it evaluates the score of the fit as it would be if it ended there. Pass it to
    `set_callbacks`. `early_stopping` of an approximator does the same with a fixed discrepancy, at a lower cost.
    :ref:`The manual <callbacks>` shows how to write a callback.

    Parameters
    ----------
    scoring : callable, default=None
        Maps (estimator, target) to a score, larger is better, as `skksivi.model_selection.neg_ksd_scorer` does. None
        means the estimator's `score`.
    patience : int, default=5
        Number of consecutive reports without a better score after which the fit ends.
    min_delta : float, default=0.0
        By how much a score must exceed the best one to be better.

    Raises
    ------
    TypeError, ValueError
        `patience` is not a positive integer, `min_delta` is negative, or `scoring` cannot be called.

    See Also
    --------
    skksivi.parameters.Plateau : When a training stops.
    skksivi.model_selection.neg_ksd_scorer : A scorer that needs the score alone.

    Examples
    --------
    >>> from skksivi import KSIVIApproximator
    >>> from skksivi.callbacks import EarlyStopping
    >>> q = KSIVIApproximator(whiten="laplace", random_state=0).set_callbacks(EarlyStopping(patience=2))
    >>> q.fit(lambda x: -x, n_features=2).n_iter_ < 2000
    True
    """

    def __init__(
        self, *, scoring: Callable[..., float] | None = None, patience: int = 5, min_delta: float = 0.0
    ) -> None:
        if not (scoring is None or callable(scoring)):
            raise TypeError(f"`scoring` must be a function of an estimator and a target, or None, got {scoring!r}.")
        self.scoring = scoring
        self.patience = check_integer(patience, "patience", min_val=1)
        self.min_delta = check_scalar(min_delta, "min_delta", Real, min_val=0)
        self._best: dict[int, tuple[float, int]] = {}  # by fit in progress: its best score, reports since

    def setup(self, estimator: object, context: CallbackContext) -> None:
        """Reset."""
        self._best[id(estimator)] = -math.inf, 0

    def teardown(self, estimator: object, context: CallbackContext) -> None:
        """Forget the fit."""
        self._best.pop(id(estimator), None)

    def on_fit_task_begin(
        self,
        estimator: object,
        context: CallbackContext,
        *,
        X: Any = None,  # noqa: ANN401
    ) -> None:
        """Raise TypeError for a fit without a target of its own, if `scoring` is None."""
        if X is None and self.scoring is None:
            raise TypeError(
                f"`scoring` is None, the score for the target of a fit, but {type(estimator).__name__} has many; "
                "give a function of (estimator, None), such as the score of simulated pairs."
            )

    def on_fit_task_end(
        self,
        estimator: object,
        context: CallbackContext,
        *,
        X: Any = None,  # noqa: ANN401
        fitted_estimator: Any = None,  # noqa: ANN401
    ) -> bool:
        """Return whether the fit is to end."""
        if context.task_name != "iterations" or id(estimator) not in self._best:
            return False
        grade = fitted_estimator.score(X) if self.scoring is None else self.scoring(fitted_estimator, X)
        best, n_reports = self._best[id(estimator)]
        improved = grade > best + self.min_delta
        self._best[id(estimator)] = (grade, 0) if improved else (best, n_reports + 1)
        return self._best[id(estimator)][1] >= self.patience
