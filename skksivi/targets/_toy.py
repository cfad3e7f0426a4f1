"""The paper's two-dimensional targets."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from skksivi.targets._base import Target

#: Of the banana's v, whose variances are one.
CORRELATION = 0.9
DETERMINANT = 1 - CORRELATION**2


class Banana(Target):
    r"""The banana, :math:`x = (v_1, v_1^2 + v_2 + 1)` with v normal, unit variances and correlation 0.9.

    The map has unit Jacobian, so that :math:`\log p(x) = \log N(v; 0, \Sigma)` at
    :math:`v = (x_1, x_2 - x_1^2 - 1)`. Its opening points up, as the paper's table says.

    References
    ----------
    Yu, L. et al. A kernel approach for semi-implicit variational inference, section on toy examples.

    Examples
    --------
    >>> import torch
    >>> from skksivi.targets import Banana
    >>> Banana().score_fn(torch.tensor([[0.0, 1.0]]))  # at v = 0
    tensor([[0., 0.]])
    """

    n_features = 2

    def log_prob(self, x: Tensor) -> Tensor:
        """Evaluate log p at each row of x (n, 2), normalised."""
        v1, v2 = self._unbend(x)
        quadratic = (v1.square() - 2 * CORRELATION * v1 * v2 + v2.square()) / DETERMINANT
        return -quadratic / 2 - math.log(2 * math.pi) - math.log(DETERMINANT) / 2

    def score_fn(self, x: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of x (n, 2)."""
        v1, v2 = self._unbend(x)
        g1, g2 = (CORRELATION * v2 - v1) / DETERMINANT, (CORRELATION * v1 - v2) / DETERMINANT
        return torch.stack([g1 - 2 * v1 * g2, g2], -1)

    def score_vjp(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the score at x and the product with its symmetric Jacobian."""
        v1, v2 = self._unbend(x)
        g1, g2 = (CORRELATION * v2 - v1) / DETERMINANT, (CORRELATION * v1 - v2) / DETERMINANT
        cross = (CORRELATION + 2 * v1) / DETERMINANT  # d g2 / d x1
        first = -(1 + 2 * v1 * CORRELATION) / DETERMINANT - 2 * g2 - 2 * v1 * cross

        def vjp(w: Tensor) -> Tensor:
            w1, w2 = w.unbind(-1)
            return torch.stack([first * w1 + cross * w2, cross * w1 - w2 / DETERMINANT], -1)

        return torch.stack([g1 - 2 * v1 * g2, g2], -1), vjp

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n exact samples, shape (n, 2)."""
        xi = torch.randn(n, 2, generator=generator, dtype=torch.float64, device=generator.device)
        v1, v2 = xi[:, 0], CORRELATION * xi[:, 0] + math.sqrt(DETERMINANT) * xi[:, 1]
        return torch.stack([v1, v1.square() + v2 + 1], -1)

    @staticmethod
    def _unbend(x: Tensor) -> tuple[Tensor, Tensor]:
        """Return v of x."""
        x1, x2 = x.unbind(-1)
        return x1, x2 - x1.square() - 1


class _GaussianMixture(Target):
    """A mixture of Gaussians with equal weights; means (k, d), covariances (k, d, d)."""

    def __init__(self, means: Tensor, covariances: Tensor) -> None:
        self.n_features = means.shape[-1]
        self._means = means.double()
        self._roots = torch.linalg.cholesky(covariances.double())
        self._precisions = torch.cholesky_inverse(self._roots)

    def log_prob(self, x: Tensor) -> Tensor:
        """Evaluate log p at each row of x (n, d), normalised."""
        return self._component_log_prob(x)[0].logsumexp(0) - math.log(len(self._means))

    def score_fn(self, x: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of x (n, d)."""
        log_probs, scores = self._component_log_prob(x)
        return (log_probs.softmax(0).unsqueeze(-1) * scores).sum(0)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n exact samples, shape (n, d)."""
        component = torch.randint(len(self._means), (n,), generator=generator, device=generator.device)
        xi = torch.randn(n, self.n_features, generator=generator, dtype=torch.float64, device=generator.device)
        return self._means[component] + (self._roots[component] @ xi.unsqueeze(-1)).squeeze(-1)

    def _component_log_prob(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return log N(x; mean_k, covariance_k), shape (k, n), and its gradient, shape (k, n, d)."""
        centred = x - self._means.to(x).unsqueeze(-2)
        scores = -centred @ self._precisions.to(x)
        log_determinant = 2 * self._roots.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True).to(x)
        log_normaliser = log_determinant + self.n_features * math.log(2 * math.pi)
        return ((scores * centred).sum(-1) - log_normaliser) / 2, scores


class Multimodal(_GaussianMixture):
    r"""Two unit Gaussians, :math:`\frac12 N((-2, 0), I) + \frac12 N((2, 0), I)`.

    References
    ----------
    Yu, L. et al. A kernel approach for semi-implicit variational inference, section on toy examples.

    Examples
    --------
    >>> import torch
    >>> from skksivi.targets import Multimodal
    >>> Multimodal().score_fn(torch.tensor([[0.0, 3.0]]))
    tensor([[ 0., -3.]])
    """

    def __init__(self) -> None:
        super().__init__(torch.tensor([[-2.0, 0.0], [2.0, 0.0]], dtype=torch.float64), torch.eye(2).expand(2, 2, 2))


class XShaped(_GaussianMixture):
    r"""Two crossed Gaussians at the origin with variances 2 and covariances 1.8 and -1.8.

    References
    ----------
    Yu, L. et al. A kernel approach for semi-implicit variational inference, section on toy examples.

    Examples
    --------
    >>> import torch
    >>> from skksivi.targets import XShaped
    >>> XShaped().score_fn(torch.zeros(1, 2))
    tensor([[0., 0.]])
    """

    def __init__(self) -> None:
        arm = torch.tensor([[2.0, 1.8], [1.8, 2.0]], dtype=torch.float64)
        flip = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
        super().__init__(torch.zeros(2, 2), torch.stack([arm, arm * flip]))
