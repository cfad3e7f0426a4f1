"""Pairs of fits that differ, and of fits that are the same though their text differs."""

import numpy as np
import torch

from skksivi.annealing import Linear
from skksivi.kernels import Gaussian
from skksivi.parameters import Bridge, Network, Pilot
from skksivi.targets import Minibatches, Target, from_rows
from skksivi.terms import Entropic, Term

D = 3


def normal_score(x):
    return -x


def mixture(means, scales, weights):
    """The score of a mixture of Gaussians, written without a log-density."""

    def score_fn(x):
        m, s, w = (torch.as_tensor(a).to(x) for a in (means, scales, weights))
        gaps = m - x[:, None]
        log_p = w.log() - (gaps / s[:, None]).square().sum(-1) / 2 - x.shape[1] * s.log()
        return (log_p.softmax(1)[:, :, None] * gaps / s.square()[:, None]).sum(1)

    return score_fn


def linear(P, m):
    return lambda x: (m.to(x) - x) @ P.to(x)


class SlowNormal(Target):
    n_features = D

    def __init__(self, jacobian):
        self.jacobian = jacobian

    def score_fn(self, x):
        return -x

    def score_vjp(self, x):
        return -x, lambda v: self.jacobian * v


class Heights(Target):
    """A density that is far from its score: one of two modes is `height` higher, beyond the reach of the score."""

    n_features = D

    def __init__(self, height):
        self.height = height

    def log_prob(self, x):
        modes = torch.stack([torch.full_like(x, c) for c in (-40.0, 40.0)], 1)
        logs = -(x[:, None] - modes).square().sum(-1) / 2
        return (logs + torch.tensor([0.0, self.height]).to(x)).logsumexp(1)


def rows_of(data, scale=1.0):
    def score_fn(x, rows):
        return -x + len(data) / len(rows) * scale * (data.to(x)[rows] - x[:, None]).sum(1)

    return from_rows(score_fn, n_rows=len(data), n_features=D)


def changed_score(kind, seed):
    """Return two scores of D features that differ in one respect."""
    g = torch.Generator().manual_seed(seed)
    m, s = torch.randn(D, generator=g, dtype=torch.float64), torch.rand(D, generator=g, dtype=torch.float64) + 0.5
    P = torch.diag(1 / s**2)
    if kind == "mean moved a little":
        return linear(P, m), linear(P, m + 1e-9 * s)
    if kind == "correlated":
        coupling = 1e-6 * torch.tensor([[0.0, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.float64)
        return linear(P, m), linear(P + coupling, m)
    means = 10 * torch.randn(2, D, generator=g, dtype=torch.float64)
    scales, weights = torch.rand(2, generator=g, dtype=torch.float64) + 0.5, torch.tensor([0.3, 0.7])
    if kind == "far mode moved":
        means = means * torch.tensor([[1.0], [5.0]])
        return mixture(means, scales, weights), mixture(means + 1e-3, scales, weights)
    return mixture(means / 10, scales, weights), mixture(means / 10, scales, weights.flip(0))


SCORES = [
    "mean moved a little",
    "correlated",
    "far mode moved",
    "weights",
]


def changed_target(kind, seed):
    data = torch.randn(50, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {
        "minibatch size": (Minibatches(rows_of(data), 10), Minibatches(rows_of(data), 20 + seed)),
        "minibatches or not": (Minibatches(rows_of(data), 10), rows_of(data)),
        "one observation of minibatches": (
            Minibatches(rows_of(data), 10),
            Minibatches(rows_of(data.index_fill(0, torch.tensor([seed]), 0.0)), 10),
        ),
        "replicate": (rows_of(data)[1 + seed], rows_of(data)[2 + seed]),
        "product": (SlowNormal(-1.0), SlowNormal(-1.0 - 1e-6 * (1 + seed))),
        "heights of far modes": (Heights(0.0), Heights(0.1 * (1 + seed))),
    }[kind]


TARGETS = [
    "minibatch size",
    "minibatches or not",
    "one observation of minibatches",
    "replicate",
    "product",
    "heights of far modes",
]


# Functions that differ in what they return alone


def closure(c):
    return lambda t: 0.1 + c * t


class Ramp:
    def __init__(self, c):
        self.c = c

    def __call__(self, t):
        return 0.1 + self.c * t


def late(c):
    """Differs at one iteration of 20 alone."""
    return lambda t: 0.5 + (c if t == 0.95 else 0)


class OwnLinear(Linear):
    c = 0.0

    def __call__(self, progress):
        return 0.2 + self.c * progress


def own_linear(c):
    schedule = OwnLinear()
    schedule.c = c
    return schedule


FUNCTIONS = {
    "closure": closure,
    "one iteration": late,
    "subclass with an attribute": own_linear,
    "tensor": lambda c: lambda t: torch.tensor(0.1 + c * t),
}


def own_kernel(c):
    class Own(Gaussian):
        def profile(self, t):
            return (-c * t / 2).exp()

        def slope(self, t, k):
            return -c / 2 * k

    return Own(bandwidth=1.0)


def own_term(c):
    class Own(Term):
        def gradient(self, draws, w):
            return -c * w * draws.s / len(draws.x)

    return Own()


#: Two values each of a parameter, of KSIVI with D features.
PARAMETERS = {
    "random_state": [(0, 1), (None, 0)],
    "init": [
        ([0.0] * D, [0.0, 0.0, 1e-12]),
        (np.zeros((600, D)), np.pad(np.ones((1, D)), ((599, 0), (0, 0)))),
    ],
    "whiten": [
        (([0.0] * D, torch.eye(D).tolist()), ([0.0, 0.0, 1e-12], torch.eye(D).tolist())),
    ],
    "kernel": [("gaussian", "imq"), (own_kernel(1.0), own_kernel(2.0))],
    "terms": [
        ((Entropic(0.1),), (Entropic(0.2),)),
        ((own_term(1.0),), (own_term(2.0),)),
        ((Entropic(closure(0.1)),), (Entropic(closure(0.2)),)),
    ],
    "annealing": [
        (Linear(start=0.2), Linear(start=0.3)),
        *((make(0.1), make(0.2)) for make in FUNCTIONS.values()),
    ],
    "learning_rate": [(1e-3, 1.0000000001e-3)],
    "max_iter": [(20, 21)],
    "hidden_layer_sizes": [((8,), (9,)), (Network((8,)), Network((8,), linear_skip=False))],
    "dtype": [("float32", "float64")],
}


def falling(rise):
    return lambda u: 1 - rise(u) * u


BRIDGES = [
    (falling(closure(0.1)), falling(closure(0.2))),
    (Bridge(weights=closure(0.1)), Bridge(weights=closure(0.2))),
]

#: Two values each of a parameter that are the same by what they do.
SAME = {
    "annealing": [(closure(0.1), Ramp(0.1)), (own_linear(0.1), own_linear(0.1))],
    "terms": [((Entropic(closure(0.1)),), (Entropic(Ramp(0.1)),)), ((own_term(1.0),), [own_term(1.0)])],
    "kernel": [(own_kernel(1.0), own_kernel(1.0))],
    "hidden_layer_sizes": [((8,), [8])],
    "init": [([0.0] * D, torch.zeros(D).double().tolist())],
    "whiten": [(Pilot(budget=20_000), Pilot(budget=20_000))],
}
