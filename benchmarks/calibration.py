"""Simulation-based calibration of KSIVI, on three models that are right and on each with three faults.

python benchmarks/calibration.py [--n 200] [--max-iter 150] [--jobs 1] [--out FILE.json] [--quick]

The models: three observations of a normal mean, a regression with unknown noise on eight rows, and a Poisson
regression on eight rows. The faults: the gradient of the prior has the wrong sign in the term of its mean, the prior
is half as wide as the one that the parameters come from, and the draws are 30% nearer to their mean. The parameters
are ranked, and the log-likelihood of the data.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from _harness import command, of, pairs, print_table, results, watched
from sklearn.base import BaseEstimator, clone

from skksivi import KSIVIApproximator
from skksivi.calibration import Calibration, sbc
from skksivi.targets import Target

ROWS = np.random.RandomState(0).normal(size=(8, 2))
CORRELATED = np.array([[1.0, 0.0], [0.8, 0.6]])


class Model(NamedTuple):
    """A prior of independent normals, data given parameters, and their log-likelihood for each row of parameters."""

    mean: list[float]
    sd: list[float]
    data: object
    log_likelihood: object

    def prior(self, rng):
        return rng.normal(self.mean, self.sd)


def normal_log_likelihood(theta, y):
    residuals = (y - theta[:, None]) @ torch.as_tensor(np.linalg.inv(CORRELATED)).to(theta).mT
    return -residuals.square().sum((1, 2)) / 2


def regression_log_likelihood(theta, y):
    residuals = (y - theta[:, :2] @ torch.as_tensor(ROWS).to(theta).mT) / theta[:, 2:].exp()
    return -residuals.square().sum(1) / 2 - len(y) * theta[:, 2]


def poisson_log_likelihood(theta, y):
    eta = theta @ torch.as_tensor(ROWS).to(theta).mT
    return (y * eta - eta.exp()).sum(1)


MODELS = {
    "normal": Model(
        [1.0, 1.0],
        [1.0, 1.0],
        lambda theta, rng: theta + rng.normal(size=(3, 2)) @ CORRELATED.T,
        normal_log_likelihood,
    ),
    "regression": Model(
        [1.0, 1.0, 0.5],
        [1.0, 1.0, 0.5],
        lambda theta, rng: ROWS @ theta[:2] + math.exp(theta[2]) * rng.normal(size=8),
        regression_log_likelihood,
    ),
    "Poisson": Model(
        [0.5, 0.5], [0.5, 0.5], lambda theta, rng: rng.poisson(np.exp(ROWS @ theta)), poisson_log_likelihood
    ),
}


class Posterior(Target):
    """The posterior of a model, by a prior that may be another."""

    def __init__(self, model, y, mean=1.0, sd=1.0):
        self.model = model
        self.n_features = len(model.mean)
        self.y = torch.as_tensor(y, dtype=torch.float64)
        self.m = mean * torch.as_tensor(model.mean, dtype=torch.float64)
        self.s = sd * torch.as_tensor(model.sd, dtype=torch.float64)

    def log_prob(self, theta):
        prior = -((theta - self.m.to(theta)) / self.s.to(theta)).square().sum(1) / 2
        return prior + self.model.log_likelihood(theta, self.y.to(theta))


class Squeezed(BaseEstimator):
    """The draws of an estimator, nearer to their mean."""

    def __init__(self, estimator=None, factor=0.7, random_state=None):
        self.estimator = estimator
        self.factor = factor
        self.random_state = random_state

    def fit(self, target):
        self.estimator_ = clone(self.estimator).set_params(random_state=self.random_state).fit(target)
        self.mean_ = self.estimator_.sample(10_000, random_state=0).mean(0)
        return self

    def sample(self, n_samples, random_state=None):
        return self.mean_ + self.factor * (self.estimator_.sample(n_samples, random_state) - self.mean_)


#: What the target takes of the prior, factors of its mean and its standard deviation, and what is made of a fit.
FAULTS = {
    "none": ({}, lambda q: q),
    "wrong sign": ({"mean": -1.0}, lambda q: q),
    "prior too narrow": ({"sd": 0.5}, lambda q: q),
    "draws too narrow": ({}, Squeezed),
}


def log_likelihood(model, theta, y):
    value = model.log_likelihood(torch.as_tensor(theta, dtype=torch.float64)[None], torch.as_tensor(y))
    return {"log-likelihood": value.item()}


def calibrate(case, fault, seed, *, n, max_iter, n_jobs):
    model, (prior, wrapped) = MODELS[case], FAULTS[fault]
    with watched() as costs:
        found = sbc(
            model.prior,
            model.data,
            partial(Posterior, model, **prior),
            wrapped(KSIVIApproximator(max_iter=max_iter)),
            n,
            quantities=partial(log_likelihood, model),
            n_jobs=n_jobs,
            random_state=seed,
        )
    return {
        "names": found.names,
        "n_draws": found.n_draws,
        "ranks": found.ranks.tolist(),
        "failures": found.failures,
        "p": found.p_value,
        "seconds": costs["seconds"],
    }


def show(rows):
    lines = []
    for case, fault in pairs(rows):
        for ranks, names, n_draws in zip(
            *(of(rows, key, case=case, method=fault) for key in ("ranks", "names", "n_draws")), strict=True
        ):
            R = np.array(ranks)
            found = Calibration(R, n_draws, tuple(names), np.arange(len(R)))
            named = ", ".join(f"{name} {p:.2g}" for name, p in zip(names, found.p_values, strict=True))
            lines.append((case, fault, len(R), f"{found.p_value:.2g}", named))
    print_table(("Model", "Fault", "n", "p", "of each"), lines, n_names=2)


def main():
    parser = command(__doc__, seeds=1, jobs=1)
    parser.add_argument("--n", type=int, default=200, help="replications")
    parser.add_argument("--max-iter", type=int, default=150)
    args = parser.parse_args()
    n, max_iter = (2, 20) if args.quick else (args.n, args.max_iter)
    jobs = [(case, fault, seed) for seed in range(args.seeds) for case in MODELS for fault in FAULTS]
    run = partial(calibrate, n=n, max_iter=max_iter, n_jobs=args.jobs)
    show(results(args, jobs, run, n=n, max_iter=max_iter)["rows"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
