"""The kernels written plainly, on aligned rows, and their bandwidths at a median squared distance of n draws."""

import math
from functools import partial

import torch

from skksivi.kernels import IMQ, Gaussian, Laplace, Riesz


def gaussian(x, y, h):
    return torch.exp(-(x - y).square().sum(-1) / (2 * h**2))


def imq(x, y, h, exponent):
    return (1 + (x - y).square().sum(-1) / h**2) ** -exponent


def laplace(x, y, h):
    return torch.exp(-(x - y).norm(dim=-1) / h)


def riesz(x, y, h, exponent, p):
    return sum(sign * v.norm(p=p, dim=-1) ** exponent for sign, v in [(1, x), (1, y), (-1, x - y)]) / h**exponent


# A member, its formula on aligned rows, and its bandwidth h at a median squared distance of n draws.
MEMBERS = [
    (Gaussian(), gaussian, lambda med, n: (med / (2 * math.log(n + 1))).sqrt()),
    *(
        (IMQ(exponent=beta), partial(imq, exponent=beta), lambda med, n: (med / math.log(n + 1)).sqrt())
        for beta in (0.25, 0.5, 1.5)
    ),
    (Laplace(), laplace, lambda med, n: med.sqrt() / math.log(n + 1)),
    *(
        (Riesz(exponent=r, norm=norm), partial(riesz, exponent=r, p=p), lambda med, n: med.sqrt())
        for r, norm, p in [(0.5, "l2", 2), (1.0, "l2", 2), (1.5, "l2", 2), (0.5, "l1", 1), (1.0, "l1", 1)]
    ),
]
