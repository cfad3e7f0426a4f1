"""Exchanges of the labels of parameters, such as those of the components of a mixture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from skksivi.targets._constrained import Part

#: The ways in which parameters may have labels that are tried, at most.
MAX_WAYS = 16


class PartLabels:
    """The axes of the parts of a constrained target that may have the same labels.

    Parameters
    ----------
    parts : dict of str to Part
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self.parts = list(parts.values())

    def _columns(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.split([math.prod(part.free_shape) for part in self.parts], -1)

    def log_jacobian(self, x: Tensor) -> Tensor:
        """Return the logarithms (n,) of the Jacobian of the parameters at points x (n, d)."""
        each = [part.log_jacobian(c, part.value(c)) for part, c in zip(self.parts, self._columns(x), strict=True)]
        return torch.stack(each).sum(0)

    def exchanges(self) -> Iterator[Iterator[list[Callable[[Tensor], Tensor]]]]:
        """Yield, for each number of labels, the ways in which parameters may have them: the exchanges of two."""
        for k in sorted({size for part in self.parts for size in part.labelled if size > 1}):
            yield self._ways(k)

    def _ways(self, k: int) -> Iterator[list[Callable[[Tensor], Tensor]]]:
        """Yield exchanges of k labels, those first that as many axes have."""
        own = [[axis for axis, size in enumerate(part.labelled) if size == k] for part in self.parts]
        some = ([axes[:n] for n in range(len(axes), -1, -1)] + [axes[1:]] * (len(axes) > 1) for axes in own)
        ways = sorted(itertools.islice(itertools.product(*some), 1000), key=lambda way: -sum(map(len, way)))
        for way in ways[:MAX_WAYS]:
            if any(way):
                yield [self._exchange(way, k, i) for i in range(k - 1)]

    def _exchange(self, way: tuple[list[int], ...], k: int, i: int) -> Callable[[Tensor], Tensor]:
        """Return the map that exchanges labels i and i + 1 of k."""
        order = torch.arange(k)
        order[i], order[i + 1] = i + 1, i

        def exchanged(x: Tensor) -> Tensor:
            columns = list(self._columns(x))
            for j, (part, axes) in enumerate(zip(self.parts, way, strict=True)):
                if axes:
                    value = part.value(columns[j])
                    for axis in axes:
                        value = value.index_select(axis + 1, order.to(x.device))
                    columns[j] = part.transform.inv(value).reshape(len(x), -1)
            return torch.cat(columns, -1)

        return exchanged
