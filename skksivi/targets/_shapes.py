"""Shapes of the public suites, in any dimension, with exact samplers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from skksivi._utils.numbers import check_integer
from skksivi.targets._base import Target, check_positive


class Funnel(Target):
    r"""Neal's funnel, :math:`x_1 \sim N(0, s^2)` and :math:`x_i | x_1 \sim N(0, e^{x_1})`, i = 2, ..., d.

    Parameters
    ----------
    n_features : int, default=10
        Dimension d, at least two.
    scale : float, default=3.0
        The s > 0.

    Raises
    ------
    TypeError, ValueError
        A parameter is out of its range.

    See Also
    --------
    Rosenbrock : Curved pairs in many dimensions.
    StudentT : Heavy tails in the plane.

    References
    ----------
    Neal, R. (2003). Slice sampling. Annals of Statistics 31(3).

    Examples
    --------
    >>> import torch
    >>> from skksivi.targets import Funnel
    >>> Funnel(2).score_fn(torch.tensor([[0.0, 2.0]]))
    tensor([[ 1.5000, -2.0000]])
    """

    def __init__(self, n_features: int = 10, scale: float = 3.0) -> None:
        self.n_features = check_integer(n_features, "n_features", min_val=2)
        check_positive(scale, "scale")
        self.scale = float(scale)

    def log_prob(self, x: Tensor) -> Tensor:
        """Evaluate log p at each row of x (n, d), normalised."""
        v, rest = x[..., 0], x[..., 1:]
        d = self.n_features
        constant = math.log(self.scale) + d / 2 * math.log(2 * math.pi)
        return -((v / self.scale).square() + (d - 1) * v + rest.square().sum(-1) * (-v).exp()) / 2 - constant

    def score_fn(self, x: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of x (n, d)."""
        v, rest = x[..., :1], x[..., 1:]
        of_rest = -rest * (-v).exp()
        of_v = -v / self.scale**2 - (self.n_features - 1 + (rest * of_rest).sum(-1, keepdim=True)) / 2
        return torch.cat([of_v, of_rest], -1)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n exact samples, shape (n, d)."""
        xi = torch.randn(n, self.n_features, generator=generator, dtype=torch.float64, device=generator.device)
        v = self.scale * xi[:, :1]
        return torch.cat([v, (v / 2).exp() * xi[:, 1:]], -1)


class ManyWell(Target):
    r"""Independent double wells and normals in turns, with :math:`2^{d/2}` modes.

    .. math:: \log p(x) = \sum_{i=1}^{d/2} \left[-x_{2i-1}^4 + 6 x_{2i-1}^2 + \tfrac12 x_{2i-1}
        - \tfrac12 x_{2i}^2\right] - \log Z

    The right one of each two wells has 85% of the probability.

    Parameters
    ----------
    n_features : int, default=32
        Dimension d, even.

    Raises
    ------
    TypeError, ValueError
        `n_features` is not a positive even number.

    See Also
    --------
    GaussianMixture : Any mixture of Gaussians.

    References
    ----------
    Midgley, L. et al. (2023). Flow annealed importance sampling bootstrap. https://arxiv.org/abs/2208.01893

    Examples
    --------
    >>> import torch
    >>> from skksivi.targets import ManyWell
    >>> ManyWell(2).score_fn(torch.tensor([[0.0, 1.0]]))
    tensor([[ 0.5000, -1.0000]])
    """

    def __init__(self, n_features: int = 32) -> None:
        self.n_features = check_even(n_features)

    def log_prob(self, x: Tensor) -> Tensor:
        """Evaluate log p at each row of x (n, d), normalised."""
        a, b = x[..., ::2], x[..., 1::2]
        constant = 9.374541173869195 + math.log(2 * math.pi) / 2  # of the integral of exp(-x^4 + 6 x^2 + x / 2)
        square = a.square()
        return (square * (6 - square) + (a - b.square()) / 2 - constant).sum(-1)

    def score_fn(self, x: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of x (n, d)."""
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([4 * a * (3 - a.square()) + 0.5, -b], -1).flatten(-2)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n exact samples, shape (n, d)."""
        x = torch.randn(n, self.n_features, generator=generator, dtype=torch.float64, device=generator.device)
        x[:, ::2] = _wells(n * self.n_features // 2, generator).view(n, self.n_features // 2)
        return x


def _wells(n: int, generator: torch.Generator) -> Tensor:
    r"""Draw n numbers of the density :math:`\propto e^{-(x^2 - 3)^2 + x / 2}`, by rejection.

    With m the :math:`\pm \sqrt 3` on the side of x, :math:`(x^2 - 3)^2 = (x - m)^2 (x + m)^2 \ge 3 (x - m)^2`.
    """
    x = torch.empty(n, dtype=torch.float64, device=generator.device)
    left = torch.arange(n, device=generator.device)
    while len(left):
        u = torch.rand(2, len(left), generator=generator, dtype=torch.float64, device=generator.device)
        m = torch.where(u[0] < torch.sigmoid(u.new_tensor(math.sqrt(3))), math.sqrt(3), -math.sqrt(3)).to(u)
        xi = torch.randn(len(left), generator=generator, dtype=torch.float64, device=generator.device)
        tried = m + 1 / 12 + xi / math.sqrt(6)
        log_ratio = 3 * (tried - m).square() - (tried.square() - 3).square()
        accepted = (tried * m > 0) & (u[1].log() < log_ratio)
        x[left[accepted]] = tried[accepted]
        left = left[~accepted]
    return x


class Rosenbrock(Target):
    r"""Independent curved pairs, :math:`x_i \sim N(1, 1)` and :math:`x_{d/2 + i} | x_i \sim N(x_i^2, Q)`.

    Parameters
    ----------
    n_features : int, default=36
        Dimension d, even.
    variance : float, default=0.1
        The Q > 0.

    Raises
    ------
    TypeError, ValueError
        A parameter is out of its range.

    See Also
    --------
    Banana : A curved density in the plane.
    Funnel : Neal's funnel.

    References
    ----------
    Grumitt, R. et al. (2022). Deterministic Langevin Monte Carlo with normalizing flows for Bayesian inference.
    https://arxiv.org/abs/2205.14240

    Examples
    --------
    >>> import torch
    >>> from skksivi.targets import Rosenbrock
    >>> Rosenbrock(2).score_fn(torch.tensor([[0.0, 0.0]]))
    tensor([[1., 0.]])
    """

    def __init__(self, n_features: int = 36, variance: float = 0.1) -> None:
        self.n_features = check_even(n_features)
        check_positive(variance, "variance")
        self.variance = float(variance)

    def log_prob(self, x: Tensor) -> Tensor:
        """Evaluate log p at each row of x (n, d), normalised."""
        a, b = x.chunk(2, -1)
        constant = math.log(2 * math.pi) + math.log(self.variance) / 2
        return -((a - 1).square() / 2 + (b - a.square()).square() / (2 * self.variance) + constant).sum(-1)

    def score_fn(self, x: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of x (n, d)."""
        a, b = x.chunk(2, -1)
        of_b = (a.square() - b) / self.variance
        return torch.cat([1 - a - 2 * a * of_b, of_b], -1)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n exact samples, shape (n, d)."""
        xi = torch.randn(n, self.n_features, generator=generator, dtype=torch.float64, device=generator.device)
        a, b = xi.chunk(2, 1)
        return torch.cat([1 + a, (1 + a).square() + math.sqrt(self.variance) * b], 1)


def check_even(n_features: int) -> int:
    """Return a positive even number of features, or raise."""
    if check_integer(n_features, "n_features", min_val=2) % 2:
        raise ValueError(f"`n_features` must be even, got {n_features!r}.")
    return int(n_features)
