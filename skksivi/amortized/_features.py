"""Features of contexts, on which a family depends."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn


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
