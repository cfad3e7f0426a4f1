"""Every approximator, short fits of it for what holds of any, and good ones that tests share."""

import copy
import random
import warnings
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
import torch
from sklearn.base import clone

from skksivi import HKSIVIApproximator, KSIVIApproximator, baselines
from skksivi.base import BaseApproximator
from skksivi.coordinates._affine import Affine
from skksivi.coordinates._whitening import Whitening
from skksivi.families import _weights
from skksivi.parameters import Pilot
from skksivi.score._probe import in_double
from skksivi.targets import Target

AT_MODE = {"whiten": "laplace", "random_state": 0}
#: Settings with which each is a good fit of a Gaussian in two dimensions.
APPROXIMATORS = [
    KSIVIApproximator(max_iter=200, batch_size=50, whiten=Pilot(budget=20_000), method="path", random_state=0),
    HKSIVIApproximator(max_iter=40, batch_size=50, whiten=Pilot(budget=20_000), n_layers=2, random_state=0),
    baselines.Laplace(random_state=0),
    baselines.SIVI(max_iter=60, learning_rate=0.01, **AT_MODE),
    baselines.SIVISM(critic_hidden_layer_sizes=(32, 32), max_iter=60, learning_rate=0.003, **AT_MODE),
    baselines.UIVI(max_iter=15, learning_rate=0.02, **AT_MODE),
    baselines.KPG(max_iter=100, learning_rate=0.01, random_state=0),
    baselines.AISIVI(n_inner_samples=16, max_iter=30, learning_rate=0.02, random_state=0),
    baselines.PVI(max_iter=100, learning_rate=0.02, random_state=0),
    baselines.SIFG(max_iter=100, random_state=0),
    baselines.HSIVISM(initial_scale=0.35, critic_hidden_layer_sizes=(64, 64), n_layers=2, max_iter=100, **AT_MODE),
    baselines.MeanFieldVI(max_iter=300, random_state=0),
    baselines.FullRankVI(max_iter=300, random_state=0),
    baselines.BatchAndMatch(random_state=0),
    baselines.SVGD(n_particles=100, max_iter=200, random_state=0),
    baselines.KSDDescent(n_particles=100, max_iter=50, random_state=0),
    baselines.MIED(
        mollifier="laplace", epsilon=0.3, n_particles=100, learning_rate=0.1, max_iter=200, random_state=0
    ),
    baselines.SGLD(n_chains=200, n_warmup=200, n_draws=25, random_state=0),
    baselines.MALA(n_chains=200, n_warmup=100, n_draws=50, thin=2, random_state=0),
]
#: A new one is here with its defaults.
APPROXIMATORS += [
    cls(random_state=0)
    for cls in (getattr(baselines, name) for name in baselines.__all__)
    if cls not in {type(q) for q in APPROXIMATORS}
]

#: What makes a fit short, for contracts that hold of a bad fit as of a good one.
SHORT = {
    "whiten": None, "max_iter": 3, "batch_size": 8, "hidden_layer_sizes": (4,), "critic_hidden_layer_sizes": (4,),
    "flow_hidden_layer_sizes": (4,), "n_particles": 10, "n_chains": 5, "n_warmup": 5, "n_draws": 4,
}  # fmt: skip


#: No more than so many where a script runs to see that it does.
MOST = {
    "max_iter": 20, "batch_size": 32, "n_particles": 30, "n_chains": 200, "n_warmup": 20, "n_draws": 20,
    "n_auxiliary": 10, "n_inner_samples": 5,
}  # fmt: skip


@contextmanager
def short_fits(whiten="laplace"):
    """Make every fit of this process short, whatever its parameters say, and start it without a pilot."""
    fit = BaseApproximator.fit

    def shortened(self, *args, **kwargs):
        own = self.get_params(deep=False)
        short = {name: most for name, most in MOST.items() if isinstance(own.get(name), int) and own[name] > most}
        if own.get("whiten") == "auto" or isinstance(own.get("whiten"), Pilot):
            short["whiten"] = whiten
        vars(self).update(short)
        try:
            return fit(self, *args, **kwargs)
        finally:
            vars(self).update({name: own[name] for name in short})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseApproximator, "fit", shortened)
        patch.setattr("skksivi.amortized._training.MOST_STEPS", MOST["max_iter"])
        for name in ("N_CHEAP", "N_INTEGRATED"):  # the draws of a certificate, and what their densities cost
            patch.setattr(_weights, name, _weights.LEAST_DRAWS + 10)
        once = _weights.weighted_draws  # whatever doubt they leave
        patch.setattr("skksivi.estimators._judge.weighted_draws", lambda *given: once(*given[:3]))
        patch.setattr("skksivi.families._density.N_STEPS", 1)
        patch.setattr("skksivi.families._density.N_BANK", 128)
        yield


def global_state():
    generators = torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    return generators, modes, torch.get_num_threads(), torch.get_default_dtype(), np.geterr(), list(warnings.filters)


def assert_close(X, Y):
    np.testing.assert_allclose(X, Y, rtol=1e-3, atol=1e-3)


def short(q):
    return clone(q).set_params(**{name: value for name, value in SHORT.items() if name in q.get_params()})


def start_of(q, pilot):
    """The family and the penalty with which a fit to N(0, I) would start in its own coordinates."""
    map_ = Affine(torch.zeros(2).double(), torch.eye(2).double())
    whitening = Whitening(map_, modes=np.zeros((1, 2)), weights=np.ones(1))
    return q._resolved()._family(in_double(torch.neg, 2), whitening, pilot, torch.Generator().manual_seed(0))


MEAN = torch.tensor([1.0, -2.0])
COVARIANCE = torch.tensor([[2.0, 0.6], [0.6, 0.5]])


def has_density(q):
    return not isinstance(q, baselines.SVGD | baselines.KSDDescent | baselines.MIED | baselines.SGLD | baselines.MALA)


def covariance_of_fit(q):
    """Return that of the target or, of independent coordinates, the conditional variances of the target."""
    return COVARIANCE.inverse().diagonal().reciprocal().diag() if isinstance(q, baselines.MeanFieldVI) else COVARIANCE


def gaussian_score(x):
    return torch.linalg.solve(COVARIANCE.to(x), (MEAN.to(x) - x).mT).mT


class GaussianTarget(Target):
    n_features = 2

    def log_prob(self, x):
        return torch.distributions.MultivariateNormal(MEAN.to(x), COVARIANCE.to(x)).log_prob(x)


class DrawsOf:
    """A sampler that draws by a function (n, generator) -> (n, d)."""

    in_parts = True

    def __init__(self, sample, n_features):
        self.sample, self.n_features = sample, n_features

    def attributes(self):
        return {}


@cache
def _fit_once(name):
    q = clone(next(q for q in APPROXIMATORS if type(q).__name__ == name))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return q.fit(GaussianTarget())


def good_fit(name):
    """A copy of the one good fit that all tests in a process share."""
    return copy.deepcopy(_fit_once(name))
