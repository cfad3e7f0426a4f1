"""What the tables share: methods in the paper's settings, and how a fit becomes a row."""

from __future__ import annotations

import re
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from reference import mala, reference

from skksivi import HKSIVIApproximator, KSIVIApproximator
from skksivi.baselines import Laplace
from skksivi.metrics import sliced_wasserstein
from skksivi.parameters import chains_of
from skksivi.targets import Target

#: Settings of the fits of a quick run, and draws to judge by.
QUICK = {
    "max_iter": 3, "batch_size": 10, "latent_dim": 2, "hidden_layer_sizes": (4,), "critic_hidden_layer_sizes": (4,),
    "n_warmup": 3, "n_particles": 20, "width": 4,
}  # fmt: skip
N_QUICK = 100

#: By the end of a method's name: widths of the kernel, in units of x, beside the paper's median rule.
WIDTHS = {f", h = {h}": h for h in (0.5, 2.0)}


class Method(NamedTuple):
    """A constructor in the paper's settings, and how much of its iterations --scale is a share of."""

    make: Callable[..., Any]
    share: float = 1.0

    def __call__(self, args, **own):
        q = self.make(**own)
        name = "max_iter" if hasattr(q, "max_iter") else "n_warmup"
        n_iter = max(2, round(args.scale * self.share * getattr(q, name)))
        return q.set_params(**{name: n_iter} | few(q, args))


class Ours(NamedTuple):
    """An estimator with its defaults, which --scale leaves alone."""

    make: Callable[..., Any]

    def __call__(self, args, **own):
        q = self.make(**own)
        return q.set_params(**few(q, args))


def few(q, args):
    """Return what makes a fit quick, nothing if it is not to be."""
    if not args.quick or isinstance(q, Laplace):
        return {}
    has_chains = chains_of(getattr(q, "whiten", None)) is not None
    return {name: QUICK[name] for name in QUICK if hasattr(q, name)} | ({"whiten": "laplace"} if has_chains else {})


DEFAULTS = {"floor": lambda *_, **__: None, "Laplace": Ours(Laplace)}
DEFAULTS |= {f"ours, {method}": Ours(partial(KSIVIApproximator, method=method)) for method in ("start", "ksivi")}
HIERARCHY = {"ours, HKSIVI": Ours(HKSIVIApproximator)}


class Table(ABC):
    """A table: jobs (case, method, seed), and how one is done.

    Attributes
    ----------
    cases, metrics : tuple of str
    methods : dict of str to Method
    paper : dict of str to tuple
        Each method's values, case by case, and metric by metric within a case.
    options : tuple of str
        Arguments of the command that change the results.
    """

    cases: tuple[str, ...] = ("",)
    options: tuple[str, ...] = ()

    def jobs(self, args):
        """Yield (case, method, seed), the latter outermost, so that methods take turns."""
        for seed in range(args.seeds):
            for case in self.cases[:1] if args.quick and not args.cases else self.cases:
                yield from ((case, method, seed) for method in self.methods)

    @abstractmethod
    def run(self, case, method, seed, args, rows):
        """Return a dict with `values`, one a metric, and what else is to be kept; `rows` are those there are."""

    def of_paper(self, case, metric, method):
        """Return the paper's value, or None."""
        if method not in self.paper or case not in self.cases:
            return None
        k = self.cases.index(case) * len(self.metrics) + self.metrics.index(metric)
        return self.paper[method][k] if k < len(self.paper[method]) else None


class Counted(Target):
    """A target that counts the points at which its score is asked for."""

    def __init__(self, target):
        self.target, self.n_features, self.n_points = target, target.n_features, [0]

    def log_prob(self, x):
        return self.target.log_prob(x)

    def score_fn(self, x):
        self.n_points[0] += len(x)
        return self.target.score_fn(x)

    def score_vjp(self, x):
        self.n_points[0] += len(x)
        return self.target.score_vjp(x)

    def value(self, x):
        """Return log p (n,) alone, counted like a score."""
        self.n_points[0] += len(x)
        return self.target.log_prob(x)

    def value_and_score(self, x):
        """Return log p (n,) and its gradient (n, d), by one graph where the score has no formula of its own."""
        self.n_points[0] += len(x)
        if type(self.target).score_fn is not Target.score_fn:
            return self.target.log_prob(x).detach(), self.target.score_fn(x).detach()
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            log_p = self.target.log_prob(x)
            return log_p.detach(), torch.autograd.grad(log_p.sum(), x)[0]


def fit(q, *data):
    """Fit an estimator, None for the floor; return what is to be kept of it."""
    if q is None:
        return {}
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        q.fit(*data)
    row = {"seconds": time.perf_counter() - start, "iterations": getattr(q, "n_iter_", None)}
    if isinstance(data[0], Counted):
        row["score_points"] = data[0].n_points[0]
    described = re.sub(r"<function (\w+) at \w+>", r"\1", " ".join(repr(q).split()))
    return {**row, "warnings": sorted({w.category.__name__ for w in told}), "estimator": described}


def exact_draws(name, target, args):
    """Return reference draws (n, d), kept in a file; of a quick run they are rough and not kept."""
    return mala(target, 2 * N_QUICK, n_steps=80)[0].numpy() if args.quick else reference(name, args.cache)


def sliced_distance(q, Y, seed, args):
    """Return that of 1,000 draws of q, of None as many exact ones, from 1,000 others of the reference Y (n, d)."""
    n = N_QUICK if args.quick else 1000
    rows = np.random.RandomState(seed).permutation(len(Y))
    X = Y[rows[n : 2 * n]] if q is None else q.sample(n, random_state=seed)
    return sliced_wasserstein(X, Y[rows[:n]], random_state=seed)
