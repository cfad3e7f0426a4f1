"""The paper's toys and its diffusion, and shapes of the public suites in any dimension, with exact samplers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from skksivi._utils.arrays import as_tensor
from skksivi._utils.checks import check_integer, shown
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
            raise ValueError(f"`weights` must be {k} positive numbers, got {shown(weights)}.")
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
            raise ValueError(f"`shift` must be a finite number or a pair of them, got {shown(shift)}.")
        w = np.ones(8) if weights is None else np.asarray(weights, dtype=np.float64)
        if w.shape != (8,) or not ((w > 0) & np.isfinite(w)).all():
            raise ValueError(f"`weights` must be eight positive numbers, got {shown(weights)}.")
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
    Banana : A curved density in the plane.
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


class ConditionedDiffusion(Target):
    r"""The path of :math:`dx = b(x)\,dt + dw` from 0, given noisy observations of every fifth point.

    The drift is :math:`b(x) = 10 x (1 - x^2)`. With the Euler-Maruyama step :math:`\Delta = 1/d` and innovations
    :math:`r_k = x_k - x_{k-1} - \Delta\, b(x_{k-1})`,

    .. math::
        \log p(x | y) = -\sum_{k=1}^d \frac{r_k^2}{2 \Delta} - \sum_{k \in 5\mathbb{N}} \frac{(y_k - x_k)^2}{2 \tau^2}
        + \mathrm{const}, \qquad \tau = 0.1.

    Parameters
    ----------
    n_features : int, default=100
        Number d of points of the path, a multiple of 5.

    Attributes
    ----------
    path : Tensor of shape (d,)
        The path that was observed, simulated from a fixed seed.
    observations : Tensor of shape (d / 5,)
        The y_k, with noise of standard deviation 0.1.

    Raises
    ------
    TypeError, ValueError
        `n_features` is not a positive multiple of 5.

    See Also
    --------
    BayesianNeuralNetwork : The posterior of a network.

    References
    ----------
    Detommaso, G. et al. (2018). A Stein variational Newton method. https://arxiv.org/abs/1806.03085

    Examples
    --------
    >>> import torch
    >>> from skksivi.targets import ConditionedDiffusion
    >>> ConditionedDiffusion(n_features=50).score_fn(torch.zeros(1, 50)).shape
    torch.Size([1, 50])
    """

    up_to_constant = True

    def __init__(self, n_features: int = 100) -> None:
        if check_integer(n_features, "n_features", min_val=5) % 5:
            raise ValueError(f"`n_features` must be a multiple of 5, got {shown(n_features)}.")
        self.n_features = int(n_features)
        self.step = 1 / self.n_features
        self.path, self.observations = _simulate(self.n_features, self.step)
        self._precision = torch.zeros_like(self.path)
        self._precision[4::5] = 0.1**-2
        self._y = torch.zeros_like(self.path)
        self._y[4::5] = self.observations

    def log_prob(self, x: Tensor) -> Tensor:
        """Evaluate log p at each row of x (n, d), up to a constant."""
        misfit = self._precision.to(x) * (self._y.to(x) - x).square()
        return -(self._innovations(x).square() / self.step + misfit).sum(-1) / 2

    def score_fn(self, x: Tensor) -> Tensor:
        """Evaluate the gradient of log p at each row of x (n, d)."""
        r = self._innovations(x) / self.step
        onward = r[..., 1:] * (1 + self.step * self._slope(x[..., :-1]))
        pulled = torch.nn.functional.pad(onward, (0, 1)) - r
        return pulled + self._precision.to(x) * (self._y.to(x) - x)

    def score_vjp(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the score at x and the product with its tridiagonal Jacobian."""
        precision, head = self._precision.to(x), x[..., :-1]
        gain = 1 + self.step * self._slope(head)
        r = self._innovations(x) / self.step
        s = torch.addcmul(precision * self._y.to(x), precision, x, value=-1).sub_(r)
        s[..., :-1].addcmul_(r[..., 1:], gain)

        def vjp(v: Tensor) -> Tensor:
            diagonal = (r[..., 1:] * self._bend(head)).mul_(self.step).addcmul_(gain, gain, value=-1 / self.step)
            product = v * -(precision + 1 / self.step)
            product[..., :-1] += diagonal * v[..., :-1]
            off = gain / self.step
            product[..., :-1].addcmul_(off, v[..., 1:])
            product[..., 1:].addcmul_(off, v[..., :-1])
            return product

        return s, vjp

    def _innovations(self, x: Tensor) -> Tensor:
        before = torch.nn.functional.pad(x[..., :-1], (1, 0))
        return x - before - self.step * self._drift(before)

    # b and its first two derivatives

    @staticmethod
    def _drift(x: Tensor) -> Tensor:
        return drift(x)

    @staticmethod
    def _slope(x: Tensor) -> Tensor:
        return 10 - 30 * x.square()

    @staticmethod
    def _bend(x: Tensor) -> Tensor:
        return -60 * x


def drift(x: Tensor) -> Tensor:
    return 10 * x * (1 - x.square())


def _simulate(n_features: int, step: float) -> tuple[Tensor, Tensor]:
    """Return a path and every fifth point of it observed with sd 0.1.

    In float32 and in this order, as the public code of the method: the numbers are the same to the last bit.
    """
    generator = torch.Generator().manual_seed(2022)

    def normal(n: int) -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float32, device="cpu")

    increments = math.sqrt(step) * normal(n_features)
    x, points = torch.zeros((), dtype=torch.float32, device="cpu"), []
    for dw in increments:
        x = x + step * drift(x) + dw
        points.append(x)
    path = torch.stack(points)
    return path.double(), (path[4::5] + 0.1 * normal(n_features // 5)).double()
