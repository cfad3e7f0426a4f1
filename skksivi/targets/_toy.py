"""The paper's two-dimensional targets, and shapes of the public suites in any dimension, with exact samplers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from skksivi._utils.arrays import as_tensor
from skksivi._utils.checks import check_integer
from skksivi.targets._base import Target, check_positive

#: Of the banana's v, whose variances are one.
CORRELATION = 0.9
DETERMINANT = 1 - CORRELATION**2


class Banana(Target):
    r"""The banana, :math:`x = (v_1, v_1^2 + v_2 + 1)` with v normal, unit variances and correlation 0.9.

    The map has unit Jacobian, so that :math:`\log p(x) = \log N(v; 0, \Sigma)` at
    :math:`v = (x_1, x_2 - x_1^2 - 1)`. Its opening points up, as the paper's table says.

    See Also
    --------
    Rosenbrock : Curved pairs in many dimensions.
    XShaped : Two crossed Gaussians.

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


class _Mixture(Target):
    """A mixture of Gaussians with means (k, d), covariances (k, d, d) and relative weights (k,), equal by default."""

    def __init__(self, means: Tensor, covariances: Tensor, weights: Tensor | None = None) -> None:
        self.n_features = means.shape[-1]
        self.means = means
        self.weights = means.new_ones(len(means)) if weights is None else weights
        self.weights = self.weights / self.weights.sum()
        self._roots = torch.linalg.cholesky(covariances)
        self._precisions = torch.cholesky_inverse(self._roots)
        log_determinants = 2 * self._roots.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        self._log_heights = self.weights.log() - (log_determinants + self.n_features * math.log(2 * math.pi)) / 2

    def log_prob(self, x: Tensor) -> Tensor:
        """Evaluate log p at each row of x (n, d), normalised."""
        return self._components(x)[0].logsumexp(-2)

    def score_fn(self, x: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of x (n, d)."""
        log_probs, scores = self._components(x)
        return (log_probs.softmax(-2).unsqueeze(-1) * scores).sum(-3)

    def score_vjp(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the score at x and the product with its symmetric Jacobian."""
        log_probs, scores = self._components(x)
        shares, precisions = log_probs.softmax(-2).unsqueeze(-1), self._precisions.to(x)
        s = (shares * scores).sum(-3)
        deviations = scores - s.unsqueeze(-3)

        def vjp(v: Tensor) -> Tensor:
            v = v.unsqueeze(-3)
            along = (deviations * v).sum(-1, keepdim=True)
            return (shares * (along * deviations - v @ precisions)).sum(-3)

        return s, vjp

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n exact samples, shape (n, d)."""
        xi = torch.randn(n, self.n_features, generator=generator, dtype=torch.float64, device=generator.device)
        u = torch.rand(n, generator=generator, dtype=torch.float64, device=generator.device)
        k = torch.searchsorted(self.weights.to(u).cumsum(0)[:-1], u)
        return self.means.to(xi)[k] + (self._roots.to(xi)[k] @ xi.unsqueeze(-1)).squeeze(-1)

    def _components(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return log w_k N(x; mean_k, covariance_k), shape (..., k, n), and its gradient, shape (..., k, n, d)."""
        centred = x.unsqueeze(-3) - self.means.to(x).unsqueeze(-2)
        scores = -centred @ self._precisions.to(x)
        return (scores * centred).sum(-1) / 2 + self._log_heights.to(x).unsqueeze(-1), scores


class GaussianMixture(_Mixture):
    r"""A mixture of Gaussians, :math:`\sum_k w_k N(\mu_k, \Sigma_k)`.

    Parameters
    ----------
    means : array-like of shape (k, d)
    covariances : float or array-like of shape (k, d, d), default=1.0
        A number is the variance of all coordinates of all components.
    weights : array-like of shape (k,), default=None
        Positive numbers proportional to the :math:`w_k`; equal by default.

    Attributes
    ----------
    means : Tensor of shape (k, d)
    weights : Tensor of shape (k,)
        They sum to one.

    Raises
    ------
    ValueError
        A parameter is of another shape, or not finite, or not positive (definite).

    See Also
    --------
    EightGaussians : Eight modes on a circle.
    ManyWell : Many modes in many dimensions.

    References
    ----------
    Midgley, L. et al. (2023). Flow annealed importance sampling bootstrap. https://arxiv.org/abs/2208.01893

    Examples
    --------
    >>> import torch
    >>> from skksivi.targets import GaussianMixture
    >>> GaussianMixture([[-3.0], [3.0]]).score_fn(torch.zeros(1, 1))
    tensor([[0.]])
    """

    def __init__(self, means: ArrayLike, covariances: ArrayLike = 1.0, weights: ArrayLike | None = None) -> None:
        m = np.asarray(means, dtype=np.float64)
        if m.ndim != 2 or not m.size or not np.isfinite(m).all():
            raise ValueError(f"`means` must be finite numbers of shape (k, d), got shape {m.shape}.")
        k, d = m.shape
        C = np.asarray(covariances, dtype=np.float64)
        C = np.broadcast_to(C * np.eye(d), (k, d, d)) if C.ndim == 0 else C
        if C.shape != (k, d, d) or not all(_is_positive_definite(c) for c in C):
            raise ValueError(
                f"`covariances` must be a positive number or positive definite matrices of shape {(k, d, d)}, got "
                f"shape {np.shape(covariances)}."
            )
        w = np.ones(k) if weights is None else np.asarray(weights, dtype=np.float64)
        if w.shape != (k,) or not ((w > 0) & np.isfinite(w)).all():
            raise ValueError(f"`weights` must be {k} positive numbers, got {weights!r}.")
        super().__init__(as_tensor(m), as_tensor(C), as_tensor(w))


def _is_positive_definite(C: np.ndarray) -> bool:
    return bool(np.isfinite(C).all() and np.allclose(C, C.T) and np.linalg.eigvalsh(C)[0] > 0)


class Multimodal(_Mixture):
    r"""Two unit Gaussians, :math:`\frac12 N((-2, 0), I) + \frac12 N((2, 0), I)`.

    See Also
    --------
    EightGaussians : Eight modes on a circle.
    GaussianMixture : Any mixture of Gaussians.

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
        means = torch.tensor([[-2.0, 0.0], [2.0, 0.0]], dtype=torch.float64, device="cpu")
        super().__init__(means, torch.eye(2, dtype=torch.float64, device="cpu").expand(2, 2, 2))


class XShaped(_Mixture):
    r"""Two crossed Gaussians at the origin with variances 2 and covariances 1.8 and -1.8.

    See Also
    --------
    Banana : A curved density in the plane.
    Multimodal : Two Gaussians.

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
        arm = torch.tensor([[2.0, 1.8], [1.8, 2.0]], dtype=torch.float64, device="cpu")
        flip = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64, device="cpu")
        super().__init__(torch.zeros(2, 2, dtype=torch.float64, device="cpu"), torch.stack([arm, arm * flip]))


class EightGaussians(_Mixture):
    r"""Eight Gaussians on a circle, :math:`\sum_{i=1}^8 w_i N(\mu_i, \sigma^2 I)`.

    .. math:: \mu_i = c + r \, (\cos(i \pi / 4), \sin(i \pi / 4))

    The default is the paper's. Its modes are symmetric about the origin, so that a start there finds all of them with
    equal weights by symmetry alone; a shift or unequal weights make it a test.

    Parameters
    ----------
    radius : float, default=10.0
        The r > 0 of the formula.
    scale : float, default=1.0
        Standard deviation :math:`\sigma > 0` of each Gaussian.
    shift : float or array-like of shape (2,), default=0.0
        The centre c; one number stands for both coordinates.
    weights : array-like of shape (8,), default=None
        Positive numbers proportional to the :math:`w_i`, i = 1, ..., 8; equal by default.

    Attributes
    ----------
    means : Tensor of shape (8, 2)
    weights : Tensor of shape (8,)
        They sum to one.

    Raises
    ------
    ValueError
        A parameter is out of its range or of another shape.

    See Also
    --------
    GaussianMixture : Any mixture of Gaussians.
    Multimodal : Two Gaussians.

    References
    ----------
    Yu, L. et al. A kernel approach for semi-implicit variational inference, section on hierarchical KSIVI.

    Examples
    --------
    >>> import torch
    >>> from skksivi.targets import EightGaussians
    >>> EightGaussians(shift=5.0).sample(3, torch.Generator()).shape
    torch.Size([3, 2])
    """

    def __init__(
        self, *, radius: float = 10.0, scale: float = 1.0, shift: ArrayLike = 0.0, weights: ArrayLike | None = None
    ) -> None:
        check_positive(radius, "radius")
        check_positive(scale, "scale")
        centre = np.asarray(shift, dtype=np.float64)
        if centre.shape not in ((), (2,)) or not np.isfinite(centre).all():
            raise ValueError(f"`shift` must be a finite number or a pair of them, got {shift!r}.")
        w = np.ones(8) if weights is None else np.asarray(weights, dtype=np.float64)
        if w.shape != (8,) or not ((w > 0) & np.isfinite(w)).all():
            raise ValueError(f"`weights` must be eight positive numbers, got {weights!r}.")
        angles = np.arange(1, 9) * np.pi / 4
        means = centre + radius * np.column_stack([np.cos(angles), np.sin(angles)])
        covariance = scale**2 * torch.eye(2, dtype=torch.float64, device="cpu")
        super().__init__(as_tensor(means), covariance.expand(8, 2, 2), as_tensor(w))


class StudentT(Target):
    r"""Two independent Student's t under a linear map, :math:`x = A z` with :math:`z_i \sim t_\nu`.

    .. math:: \log p(x) = -\frac{\nu + 1}{2} \sum_{i=1}^2 \log(1 + z_i^2 / \nu) + \mathrm{const}, \qquad z = A^{-1} x

    with :math:`A = M^{-1} / \det M^{-1}`, :math:`M = S S^\top` and the entries of S the first four uniform numbers on
    (-1, 1) of numpy's RandomState(50): A = [[.2822, -.1180], [-.1180, .2959]]. With :math:`\nu \le 2` it has no
    covariance.

    Parameters
    ----------
    df : float, default=2.0
        The degrees of freedom :math:`\nu > 0`.

    Attributes
    ----------
    A : Tensor of shape (2, 2)
        Symmetric.

    Raises
    ------
    ValueError
        `df` is not positive and finite.

    See Also
    --------
    Funnel : Neal's funnel.
    skksivi.mixing.StudentT : Heavy tails.

    References
    ----------
    Li, L. et al. (2023). Sampling with mollified interaction energy descent. https://arxiv.org/abs/2210.13400

    Examples
    --------
    >>> import torch
    >>> from skksivi.targets import StudentT
    >>> StudentT().score_fn(torch.zeros(1, 2)).abs()
    tensor([[0., 0.]])
    """

    n_features = 2

    def __init__(self, df: float = 2.0) -> None:
        check_positive(df, "df")
        self.df = float(df)
        S = np.random.RandomState(50).uniform(-1, 1, (2, 2))
        (a, c), (_, b) = S @ S.T
        self.A = torch.tensor([[b, -c], [-c, a]], dtype=torch.float64, device="cpu")
        self._inverse = torch.linalg.inv(self.A)
        log_t = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - math.log(df * math.pi) / 2
        self._log_height = 2 * log_t - math.log(a * b - c * c)

    def log_prob(self, x: Tensor) -> Tensor:
        """Evaluate log p at each row of x (n, 2), normalised."""
        _, hypotenuse = self._triangle(x)
        return self._log_height - (self.df + 1) * hypotenuse.log().sum(-1)

    def score_fn(self, x: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of x (n, 2)."""
        leg, hypotenuse = self._triangle(x)
        slope = -(self.df + 1) / math.sqrt(self.df) * (leg / hypotenuse) / hypotenuse
        return slope @ self._inverse.to(x)

    def score_vjp(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the score at x and the product with its symmetric Jacobian."""
        leg, hypotenuse = self._triangle(x)
        sin, cos, inverse = leg / hypotenuse, 1 / hypotenuse, self._inverse.to(x)
        bend = -(self.df + 1) / self.df * cos.square() * (cos - sin) * (cos + sin)

        def vjp(v: Tensor) -> Tensor:
            return (bend * (v @ inverse)) @ inverse

        return (-(self.df + 1) / math.sqrt(self.df) * sin * cos) @ inverse, vjp

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n exact samples, shape (n, 2), by the polar method of Bailey (1994)."""
        u = torch.rand(2, n, 2, generator=generator, dtype=torch.float64, device=generator.device)
        r = (self.df * torch.expm1(-2 / self.df * torch.log1p(-u[0]))).sqrt()
        return (r * torch.cos(2 * math.pi * u[1])) @ self.A.to(u)

    def _triangle(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return t = z / sqrt(df) and (1 + t^2)^(1/2), whose quotients stay finite where t^2 would not."""
        t = x @ self._inverse.to(x) / math.sqrt(self.df)
        return t, torch.hypot(t, torch.ones_like(t))


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
