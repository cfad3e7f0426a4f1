"""Bayesian logistic regression."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils import check_X_y
from torch import Tensor

from skksivi._utils.arrays import as_tensor, check_sample_weight
from skksivi.targets._base import Target, check_positive, in_blocks, log_prob_of


class BayesianLogisticRegression(Target):
    r"""The posterior of the coefficients of a binary logistic regression.

    .. math::
        \log p(\beta | X, y) = \sum_i y_i \beta^\top x_i - \log(1 + e^{\beta^\top x_i})
        - \frac{\alpha}{2} \|\beta\|^2 + \mathrm{const}

    Parameters
    ----------
    X : array-like of shape (n_observations, n_columns)
    y : array-like of shape (n_observations,)
        Two classes; the larger label is the 1 of the formula.
    prior_precision : float, default=0.01
        The alpha > 0 of the prior N(0, I / alpha).
    fit_intercept : bool, default=False
        Whether to put a column of ones before X; its coefficient is then the first.
    sample_weight : array-like of shape (n_observations,), default=None
        How often each observation counts.

    Raises
    ------
    ValueError
        X and y do not fit together, y does not have two classes, or `prior_precision` is not positive.

    See Also
    --------
    skksivi.KSIVIClassifier : Classification with a posterior inside.
    SparseLogisticRegression : Logistic regression with a scale for each coefficient.

    References
    ----------
    Yin, M. and Zhou, M. (2018). Semi-implicit variational inference. https://arxiv.org/abs/1805.11183

    Examples
    --------
    >>> import torch
    >>> from skksivi.targets import BayesianLogisticRegression
    >>> target = BayesianLogisticRegression([[-1.0], [2.0]], [0, 1], prior_precision=1.0)
    >>> target.score_fn(torch.zeros(1, 1))
    tensor([[1.5000]])
    """

    up_to_constant = True

    def __init__(
        self,
        X: ArrayLike,
        y: ArrayLike,
        prior_precision: float = 0.01,
        *,
        fit_intercept: bool = False,
        sample_weight: ArrayLike | None = None,
    ) -> None:
        X, y = check_X_y(X, y, dtype=np.float64)
        classes, y = np.unique(y, return_inverse=True)
        if len(classes) != 2:
            raise ValueError(f"`y` must have two classes, got {len(classes)}: {classes[:5]}.")
        check_positive(prior_precision, "prior_precision")
        if fit_intercept:
            X = np.column_stack([np.ones(len(X)), X])
        self.n_features = X.shape[1]
        self.prior_precision = prior_precision
        self.classes = classes
        self.n_rows = len(X)
        self._X = as_tensor(X)
        self._y = as_tensor(y, dtype=torch.float64)
        self._weight = 1.0  # of all observations
        self._w = None if sample_weight is None else as_tensor(check_sample_weight(sample_weight, len(X)))

    def subset(self, rows: Tensor) -> Self:
        """Return the posterior of some observations, each counted n_rows / len(rows) times; of none, the prior."""
        w = None if self._w is None else self._w[rows]
        return self._replaced(_X=self._X[rows], _y=self._y[rows], _w=w, _weight=self.n_rows / max(1, len(rows)))

    def log_prob(self, beta: Tensor) -> Tensor:
        """Evaluate log p at each row of beta (n, d), up to a constant."""
        if not beta.requires_grad and (blocks := in_blocks(self, beta, len(self._X))):
            return blocks.total(log_prob_of, beta)
        return self._weight * self._log_p(beta).sum(-1) - self.prior_precision / 2 * beta.square().sum(-1)

    def log_likelihood(self, beta: Tensor) -> Tensor:
        """Evaluate the log-likelihood of each observation, times its weight, at each row of beta (n, d)."""
        return self._weight * self._log_p(beta)

    def _log_p(self, beta: Tensor) -> Tensor:
        X, sign = self._X.to(beta), 2 * self._y.to(beta) - 1
        return self._weighted(torch.nn.functional.logsigmoid(sign * (beta @ X.mT)))

    def score_fn(self, beta: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of beta (n, d)."""
        if blocks := in_blocks(self, beta, len(self._X)):
            return blocks.score_fn(beta)
        X, y = self._X.to(beta), self._y.to(beta)
        return self._weight * self._weighted(y - torch.sigmoid(beta @ X.mT)) @ X - self.prior_precision * beta

    def score_vjp(self, beta: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the score at beta and its vector-Jacobian product, the map of v (n, d) to J^T v (n, d)."""
        if blocks := in_blocks(self, beta, len(self._X)):
            return blocks.product(beta)
        X, y = self._X.to(beta), self._y.to(beta)
        p = torch.sigmoid(beta @ X.mT)

        def combine(weights: Tensor, prior: Tensor) -> Tensor:
            # X^T W^T is much faster than W X for a tall thin X.
            B = prior.reshape(-1, self.n_features)
            W = self._weighted(weights).reshape(len(B), len(X))
            return torch.addmm(B.mT, X.mT, W.mT, beta=-self.prior_precision, alpha=self._weight).mT.view(prior.shape)

        def vjp(v: Tensor) -> Tensor:
            return combine((v @ X.mT).mul_(torch.addcmul(p, p, p, value=-1)).neg_(), v)

        return combine(y - p, beta), vjp

    def _weighted(self, terms: Tensor) -> Tensor:
        """Return the terms (..., n_observations) times the weights of the observations."""
        return terms if self._w is None else terms * self._w.to(terms)
