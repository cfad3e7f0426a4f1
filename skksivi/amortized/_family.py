r"""A semi-implicit family whose parameters depend on features h of a context.

.. math:: x = m(h) + L(h)\, u, \qquad u = z + \sigma_0\, r(z, h) + \sigma \xi, \qquad
    z \sim \sum_k w_k(h)\, N(m_k(h), F_k(h) F_k(h)^\top).

The network r takes (z, h), so that at one h it is an ordinary network of z, the bias of its first layer being
:math:`b + W_h h`; and all is an ordinary layer of the package, with its density. With r = 0 it is a mixture of
Gaussians.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from skksivi._utils.arrays import as_array
from skksivi.amortized._contexts import Rows
from skksivi.coordinates import Affine, Whitening
from skksivi.families import Layer, gaussian_layer
from skksivi.mixing import GaussianMixtureDraws
from skksivi.parameters import Scale

#: Features up to which the triangle of L depends on the context.
MANY = 50

#: The largest logarithm of a scale, in units of the typical one.
WIDEST = 12.0

#: The standard deviation of the noise of u, at most.
SIGMA = 0.25


def random_layers(sizes: Sequence[int], generator: torch.Generator) -> list[nn.Linear]:
    """Return linear layers in float64, the last of which is zero."""
    layers = []
    for n_in, n_out in itertools.pairwise(sizes):
        linear = nn.utils.skip_init(nn.Linear, n_in, n_out, dtype=torch.float64)
        nn.init.normal_(linear.weight, std=math.sqrt(2 / n_in), generator=generator)
        nn.init.zeros_(linear.bias)
        layers.append(linear)
    nn.init.zeros_(layers[-1].weight)
    return layers


def features_of(summary: nn.Module | None, y: Rows) -> Tensor:
    """Return what a summary makes of contexts, or these themselves without one."""
    h = y if summary is None else summary(y)
    if not isinstance(h, Tensor) or h.dim() != 2 or len(h) != len(y):
        shape = tuple(h.shape) if isinstance(h, Tensor) else type(h).__name__
        raise ValueError(f"`summary` returned {shape} for {len(y)} contexts, expected a tensor ({len(y)}, p).")
    return h.double()


class Places(NamedTuple):
    """Affine maps: m (n, d) and L (n, d, d)."""

    m: Tensor
    L: Tensor


class Mixtures(NamedTuple):
    """Mixtures of z: log-weights (n, k), means (n, k, d) and factors (n, k, d, d)."""

    log_w: Tensor
    means: Tensor
    factors: Tensor


class SkipNetwork(nn.Module):
    """A linear map plus a network, which has SiLU between its layers: what depends on a context is smooth in it."""

    linear: nn.Linear

    def __init__(self, linear: nn.Linear, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.linear = linear
        self.network = between(layers, nn.SiLU)

    @classmethod
    def zero(cls, n_in: int, hidden: Sequence[int], n_out: int, generator: torch.Generator) -> SkipNetwork:
        """Return one that is zero, with a network that can be trained."""
        linear = nn.utils.skip_init(nn.Linear, n_in, n_out, dtype=torch.float64)
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
        return cls(linear, random_layers([n_in, *hidden, n_out], generator))

    @classmethod
    def like(cls, other: SkipNetwork) -> SkipNetwork:
        """Return another of the same sizes, that is zero."""
        made = copy.deepcopy(other)
        for part in (made.linear, made.layers[-1]):
            nn.init.zeros_(part.weight)
            nn.init.zeros_(part.bias)
        return made

    @property
    def layers(self) -> list[nn.Linear]:
        return linear_layers(self.network)

    @property
    def shape(self) -> tuple[int, int]:
        """How many numbers it takes, and returns."""
        return self.linear.in_features, self.linear.out_features

    def forward(self, h: Tensor) -> Tensor:
        """Map (n, n_in) to (n, n_out)."""
        return self.linear(h) + self.network(h)


class Conditional(nn.Module):
    """The family.

    Parameters
    ----------
    n_features, n_context : int
        The dimension d of x, and the number of features of a context.
    hidden : sequence of int
    summary : Module or None
        Maps contexts to their features; None means the contexts themselves, standardised.
    generator : torch.Generator
    """

    h_mean: Tensor
    h_sd: Tensor
    m0: Tensor
    s0: Tensor
    l0: Tensor
    sigma0: Tensor

    def __init__(
        self,
        n_features: int,
        n_context: int,
        hidden: Sequence[int],
        summary: nn.Module | None,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        d, t = n_features, n_features * (n_features - 1) // 2
        self.n_features, self.n_components, self.summary = d, 1, summary
        for name, value in {"h_mean": n_context, "h_sd": n_context, "m0": d, "s0": d, "l0": d}.items():
            fill = 1.0 if name in ("h_sd", "s0") else 0.0
            self.register_buffer(name, torch.full((value,), fill, dtype=torch.float64))
        self.register_buffer("sigma0", torch.full((d,), SIGMA, dtype=torch.float64))
        self.triangle = nn.Parameter(torch.zeros(t, dtype=torch.float64)) if d > MANY else None
        self.place = SkipNetwork.zero(n_context, hidden, 2 * d + (t if d <= MANY else 0), generator)
        self.heads: SkipNetwork | None = None

    @property
    def hidden(self) -> tuple[int, ...]:
        """The widths of the hidden layers of its networks."""
        return tuple(layer.out_features for layer in self.place.layers[:-1])

    def with_components(self, n: int, generator: torch.Generator) -> Conditional:
        """Return a copy with a mixture of n components of z, whose networks are new; one is the standard normal."""
        made, d = copy.deepcopy(self), self.n_features
        made.n_components, made.heads = n, None
        if n > 1:
            n_out = n * (1 + 2 * d + d * (d - 1) // 2)
            made.heads = SkipNetwork.zero(len(self.h_mean), self.hidden, n_out, generator).to(self.m0.device)
        return made

    # What it is at contexts

    def features(self, y: Rows) -> Tensor:
        """Return the features h (n, p) of n contexts."""
        return (features_of(self.summary, y) - self.h_mean) / self.h_sd

    def standardise(self, y: Rows) -> None:
        """Take the units of the features from the contexts of the training."""
        with torch.no_grad():
            h = features_of(self.summary, y)
            sd = h.std(0, correction=0)
            self.h_mean.copy_(h.mean(0))
            self.h_sd.copy_(sd.where(sd > 1e-12 * (1 + self.h_mean.abs()), 1.0))

    def places(self, h: Tensor) -> Places:
        """Return m(h) and L(h) at features h (n, p)."""
        d, out = self.n_features, self.place(h)
        m, log_D = self.m0 + self.s0 * out[:, :d], self.l0 + out[:, d : 2 * d].clamp(-WIDEST, WIDEST)
        lower = out[:, 2 * d :] if self.triangle is None else self.triangle.expand(len(h), -1)
        return Places(m, _factor(log_D, lower))

    def mixtures(self, h: Tensor) -> Mixtures:
        """Return the mixtures of z at features h (n, p)."""
        n, d, k = len(h), self.n_features, self.n_components
        if self.heads is None:
            root = (1 - self.sigma0.square()).sqrt().diag()
            return Mixtures(h.new_zeros(n, 1), h.new_zeros(n, 1, d), root.expand(n, 1, d, d))
        out = self.heads(h).view(n, k, -1)
        factors = _factor(out[..., 1 + d : 1 + 2 * d].clamp(-WIDEST, WIDEST), out[..., 1 + 2 * d :])
        return Mixtures(out[..., 0].log_softmax(-1), out[..., 1 : 1 + d], factors)

    # Draws and density

    def draws(self, h: Tensor, n: int, generator: torch.Generator) -> Tensor:
        """Draw x (b, n, d) at features h (b, p), n for each."""
        b, d = len(h), self.n_features
        mixtures = self.mixtures(h)
        eps, xi = torch.randn(2, b, n, d, generator=generator, dtype=h.dtype, device=h.device).unbind()
        if self.heads is None:
            z = eps @ mixtures.factors[:, 0].mT
        else:
            rows = torch.arange(b, device=h.device)[:, None]
            k = torch.multinomial(mixtures.log_w.detach().exp(), max(n, 1), replacement=True, generator=generator)[
                :, :n
            ]
            z = mixtures.means[rows, k] + (mixtures.factors[rows, k] @ eps[..., None])[..., 0]
        m, L = self.places(h)
        return m[:, None] + (z + self.sigma0 * xi) @ L.mT

    def log_prob(self, x: Tensor, h: Tensor, places: Places | None = None) -> Tensor:
        """Return log q (n,) of x (n, d) at features h (n, p); `places(h)` may be given."""
        (m, L), mixtures = places or self.places(h), self.mixtures(h)
        u = torch.linalg.solve_triangular(L, (x - m)[..., None], upper=False)[..., 0]
        covariances = mixtures.factors @ mixtures.factors.mT + self.sigma0.square().diag()
        C = torch.linalg.cholesky(covariances)
        white = torch.linalg.solve_triangular(C, (u[:, None] - mixtures.means)[..., None], upper=False)[..., 0]
        log_parts = (
            mixtures.log_w
            - white.square().sum(-1) / 2
            - C.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            - self.n_features / 2 * math.log(2 * math.pi)
        )
        return log_parts.logsumexp(-1) - L.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @torch.no_grad()
    def at(self, h: Tensor, seed: int, dtype: torch.dtype) -> Layer:
        """Return the layer that the family is at features h (1, p), with a network that is zero."""
        (m, L), (log_w, means, factors) = self.places(h), self.mixtures(h)
        w = log_w[0].exp()
        mixing = GaussianMixtureDraws(means[0].to(dtype), factors[0].to(dtype), w / w.sum())
        family = gaussian_layer(
            self.sigma0.to(dtype),
            scale=Scale(floor=0.0),
            mixing=mixing,
            hidden_layer_sizes=self.hidden,
            generator=torch.Generator(h.device).manual_seed(seed),
            residual=True,
        ).requires_grad_(False)
        whitening = Whitening(Affine(m[0].clone(), L[0].clone()), modes=as_array(m), weights=np.ones(1))
        return Layer(family, whitening, seed)


def _factor(log_D: Tensor, lower: Tensor) -> Tensor:
    """Return D (I + T), shape (..., d, d), with T strictly lower triangular of entries (..., d (d - 1) / 2)."""
    d = log_D.shape[-1]
    i, j = torch.tril_indices(d, d, -1, device=log_D.device)
    T = torch.eye(d, dtype=log_D.dtype, device=log_D.device).expand(*log_D.shape[:-1], d, d).clone()
    T[..., i, j] = lower
    return log_D.exp()[..., None] * T


def factor_parts(L: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log D and T of `_factor` of factors L (..., d, d)."""
    d = L.shape[-1]
    i, j = torch.tril_indices(d, d, -1, device=L.device)
    D = L.diagonal(dim1=-2, dim2=-1)
    return D.log(), (L / D[..., None])[..., i, j]


# Features of contexts


def between(layers: Sequence[nn.Linear], activation: type[nn.Module]) -> nn.Sequential:
    """Return a network of layers, with an activation between them."""
    return nn.Sequential(*[part for layer in layers for part in (activation(), layer)][1:])


def linear_layers(network: nn.Sequential) -> list[nn.Linear]:
    return [part for part in network if isinstance(part, nn.Linear)]


class DeepSets(nn.Module):
    r"""Features of a set that do not depend on its order, for sets of different sizes.

    .. math:: h = \rho\left( \frac{1}{n} \sum_{i=1}^n \phi(y_i),\ \log n \right),

    with networks :math:`\phi` and :math:`\rho` of one hidden layer.

    Parameters
    ----------
    n_in : int
        The length c of a row of a set.
    n_out : int, default=16
        Number of features.
    width : int, default=64
        Units of the hidden layers.
    random_state : int, default=0
        Seeds the initial weights.

    See Also
    --------
    skksivi.AmortizedKSIVI : One fit for many data sets.

    References
    ----------
    Zaheer, M. et al. (2017). Deep sets. https://arxiv.org/abs/1703.06114

    Examples
    --------
    >>> import torch
    >>> from skksivi.amortized import DeepSets
    >>> DeepSets(2, n_out=3)([torch.ones(5, 2), torch.ones(7, 2)]).shape
    torch.Size([2, 3])
    """

    def __init__(self, n_in: int, n_out: int = 16, width: int = 64, random_state: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(random_state)
        self.phi = _network([n_in, width, width], generator)
        self.rho = _network([width + 1, width, n_out], generator)

    @property
    def shape(self) -> tuple[int, int]:
        """The length of a row of a set, and how many features."""
        return linear_layers(self.phi)[0].in_features, linear_layers(self.rho)[-1].out_features

    def forward(self, sets: Sequence[Tensor] | Tensor) -> Tensor:
        """Return features (m, n_out) of m sets of shape (n_i, n_in)."""
        sizes = torch.tensor([len(rows) for rows in sets])
        rows = torch.cat(list(sets)).to(next(self.parameters()))
        index = torch.repeat_interleave(sizes).to(rows.device)
        n = sizes.to(rows)[:, None]
        phi = self.phi(rows)
        sums = phi.new_zeros(len(sizes), phi.shape[1]).index_add(0, index, phi)
        return self.rho(torch.cat([sums / n, n.log()], 1))


def _network(sizes: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    """Return linear layers with ELU between them, in float64."""
    layers = []
    for n_in, n_out in itertools.pairwise(sizes):
        linear = nn.utils.skip_init(nn.Linear, n_in, n_out, dtype=torch.float64)
        bound = (3 / n_in) ** 0.5
        nn.init.uniform_(linear.weight, -bound, bound, generator=generator)
        nn.init.zeros_(linear.bias)
        layers.append(linear)
    return between(layers, nn.ELU)
