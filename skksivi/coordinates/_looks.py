"""Where the score is looked at around a mode, in its standard deviations, and what these looks miss."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def n_looks(d: int, *, thorough: bool = False) -> int:
    """Return the number of looks in d dimensions, none in more than five."""
    in_dimensions = (128, 512, 1024, 2048, 6144)  # one, two, ...
    n = in_dimensions[d - 1] if d <= len(in_dimensions) else 0
    return min(32 * n, 2**15) if thorough else n


def looks(d: int, n: int, seed: int) -> Tensor:
    r"""Return n points (n, d) around the origin.

    In two and three dimensions they are a lattice in the volume and the angles, because a Gaussian of a share s of
    the width and a weight w exceeds a standard normal density at a distance R from it within about
    :math:`s \sqrt{R^2 + 2 d \log(1 / s) + 2 \log(w / (1 - w))}`; their density is the inverse of that volume. Half as
    far apart, beyond ten, are those for wider ones. Else directions and the logarithms of distances are of a low
    discrepancy.
    """
    if not n:
        return torch.empty(0, d, dtype=torch.float64)
    near, far = 3.0, 15.0  # distances from the mode
    if d not in (2, 3):
        levels = torch.quasirandom.SobolEngine(d + 1, scramble=True, seed=seed).draw(n)
        directions = torch.special.ndtri(levels.double()[:, 1:].clamp(1e-9, 1 - 1e-9))
        r = near * (far / near) ** levels.double()[:, :1]
        return r * directions / directions.norm(dim=1, keepdim=True)
    rng = np.random.RandomState(seed)
    first = np.arange(n)[:, None]
    irrational = np.array([0.6180339887498949] if d == 2 else [0.7548776662466927, 0.5698402909980532])
    angles = (rng.uniform(size=d - 1) + first * irrational) % 1
    grid = np.geomspace(near, far, 1000)
    density = grid ** (d - 1) / (grid**2 + 5 * d) ** (d / 2) * np.where(grid < 10, 1, 0.5**d)
    volume = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) * np.diff(grid))])
    r = np.interp((first + rng.uniform()) / n * volume[-1], volume, grid)
    t = 2 * math.pi * angles[:, :1]
    rim = np.concatenate([np.cos(t), np.sin(t)], 1)
    if d == 3:
        height = 2 * angles[:, 1:] - 1
        rim = np.concatenate([np.sqrt(1 - height**2) * rim, height], 1)
        rim = rim @ np.linalg.qr(rng.normal(size=(3, 3)))[0]
    return torch.from_numpy(r * rim)


def share_missed(d: int, n: int, weight: float, width: float) -> float:
    """Return the share of Gaussians of a weight and of a share of the width of a standard normal, four to eight from
    it, that exceed it at none of n looks, nor where ascents start from around it.
    """
    generator = torch.Generator().manual_seed(0)
    centres, starts = torch.randn(532, d, generator=generator, dtype=torch.float64).split([500, 32])
    starts = starts * torch.tensor([3.0, 10.0]).repeat(16)[:, None]  # as `around` a mode
    u = torch.cat([looks(d, n, 0).double(), starts])
    distances = torch.linspace(4, 8, len(centres), dtype=torch.float64)[:, None]
    centres = distances * centres / centres.norm(dim=1, keepdim=True)
    gain = math.log(weight / (1 - weight)) - d * math.log(width) + u.square().sum(1) / 2
    return float(1 - (gain > (torch.cdist(centres, u) / width).square() / 2).any(1).double().mean())
