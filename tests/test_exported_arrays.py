"""Fits that are drawn from without this package."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from approximators import GaussianTarget, good_fit
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from test_persistence import ESTIMATORS, score_fn, with_other_weights

import skksivi
from skksivi import KSIVIApproximator
from skksivi.baselines import Laplace
from skksivi.exports import _draw
from skksivi.parameters import Pilot
from skksivi.targets import Banana, EightGaussians, StudentT, constrained, from_log_prob


def start(whiten="auto"):
    return KSIVIApproximator(train=False, whiten=whiten, random_state=0)


#: Fits with every kind of mixing distribution, network, map and warp.
FITS = {
    "Laplace": lambda: Laplace(random_state=0).fit(Banana()),
    "mixture": lambda: start().fit(EightGaussians()),
    "curved": lambda: start(Pilot(budget=1000)).fit(Banana()),
    "marginals": lambda: start().fit(lambda x: torch.cat([-(x[:, :1] ** 3), -x[:, 1:]], 1), n_features=2),
    "a radius": lambda: start().fit(StudentT()),
    "low rank": lambda: start("laplace").fit(score_fn, n_features=1002),
    "points": lambda: start(Pilot("diagonal", budget=1000)).fit(score_fn, n_features=2),
    **{
        name: lambda name=name: clone(ESTIMATORS[name]).fit(score_fn, n_features=2)
        for name in ("pilot", "laplace", "no skip", "given", "kernel", "Student mixing", "SIVI", "PVI", "AISIVI")
    },
}

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


SUPPORTS = {"sd": "positive", "b": ("above", 1.0, 2)}


def log_prob(sd, b):
    return 3 * sd.log() - 2 * sd - (b**2).sum(1)


@pytest.mark.parametrize("name", FITS)
def test_the_page_makes_the_same_points_of_the_same_noise_and_draws_from_the_same_latent(name, tmp_path, uncertified):
    """Two means of 4,000 draws of z differ by five standard errors with probability 6e-7."""
    q, generator = FITS[name](), torch.Generator().manual_seed(0)
    skksivi.export(q, tmp_path / "q.npz")
    fit, rng, d = _draw.load(tmp_path / "q.npz"), np.random.default_rng(0), q.n_features_in_
    assert _draw.sample(fit, 3, rng).shape == (3, d)
    xi = torch.randn(50, d, generator=generator, dtype=torch.float64)
    if name == "Laplace":
        z, expected = xi, q.sampler_.map.unwhiten(xi)
    else:
        family = q.family_.double()
        z = family.draw_latent(4000, generator)
        own = _draw.latent(fit, 4000, rng)
        se = ((z.numpy().var(0) + own.var(0)) / 4000) ** 0.5
        assert (np.abs(z.numpy().mean(0) - own.mean(0)) < 5 * se).all()
        assert own.std(0) == pytest.approx(z.numpy().std(0), rel=0.2)
        z = z[:50]
        expected = q.whitening_.push_forward(family.mean(z) + family.sigma(z) * xi)
    np.testing.assert_allclose(_draw.points(fit, z.numpy(), xi.numpy()), expected, rtol=1e-9, atol=1e-9)


EVERY = {
    "real": "real",
    "positive": ("positive", 2, 3),
    "unit": ("unit interval", 2),
    "above": ("above", -1.5),
    "below": ("below", 4.0, 3),
    "interval": ("interval", -1, 2.5, 2),
    "simplex": ("simplex", 2, 4),
    "one": ("simplex", 1),
    "ordered": ("ordered", 3),
    "sizes": ("positive ordered", 2, 2),
    "scales": ("cholesky", 2, 3, 3),
    "correlations": ("correlation cholesky", 2, 4, 4),
    "alone": ("correlation cholesky", 1, 1),
}


def test_the_page_transforms_draws_as_the_target_does():
    target = constrained(lambda **values: torch.zeros(len(values["real"])), EVERY)
    X = np.random.default_rng(0).normal(scale=2, size=(50, target.n_features))
    own = _draw.parameters({"supports": np.array(json.dumps(EVERY))}, X)
    assert list(own) == list(EVERY)
    for name, expected in target.constrain(X).items():
        assert own[name].shape == expected.shape
        np.testing.assert_allclose(own[name], expected, rtol=1e-9, atol=1e-12, err_msg=name)
    with pytest.raises(ValueError, match="no supports of parameters: its draws stay in the space of the fit"):
        _draw.parameters({}, X)


def test_the_file_draws_by_itself_in_the_space_of_the_model(tmp_path):
    target = constrained(log_prob, SUPPORTS)
    q = Laplace(random_state=0).fit(target)
    skksivi.export(q, tmp_path / "q.npz")
    blocked = "import sys, runpy; sys.modules['torch'] = sys.modules['skksivi'] = None; sys.argv = sys.argv[1:]; "
    run = blocked + "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", run, str(tmp_path / "q.npz"), "2000", "0"]
    head, *rows = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert head == '"sd","b[0]","b[1]"'
    draws = np.array([row.split(",") for row in rows], float)
    X = target.unconstrain({"sd": draws[:, 0], "b": draws[:, 1:]})
    assert np.abs((X.mean(0) - q.mean_) / X.std(0)).max() < 5 / 2000**0.5


def test_names_and_supports_are_saved_with_a_fit_and_forgotten_with_the_next(tmp_path):
    q = Laplace(random_state=0).fit(constrained(log_prob, SUPPORTS))
    skksivi.save(q, tmp_path / "q")
    loaded = skksivi.load(tmp_path / "q")
    assert loaded.supports_ == SUPPORTS
    assert list(loaded.feature_names_in_) == ["log(sd)", "unconstrained(b)[0]", "unconstrained(b)[1]"]
    draws = constrained(log_prob, loaded.supports_).constrain(loaded.sample(5))
    assert draws["b"].shape == (5, 2)
    assert list(q.fit(from_log_prob(lambda x: -(x**2).sum(1), 1, names=["a"])).feature_names_in_) == ["a"]
    assert not {"supports_", "feature_names_in_"} & vars(q.fit(torch.neg, n_features=1)).keys()


OWN_MIXING = KSIVIApproximator(mixing=lambda n, g: torch.randn(n, 2, generator=g), max_iter=2)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Laplace(), NotFittedError, "not fitted"),
        (lambda: GaussianTarget(), TypeError, "`est` must be a fitted approximator"),
        (lambda: good_fit("SVGD"), TypeError, "SVGD whose sampler is a Particles"),
        (lambda: good_fit("HKSIVIApproximator"), TypeError, "whose sampler is a Layers"),
        (lambda: with_other_weights(None), TypeError, "whose sampler is a Reweighted"),
        (lambda: OWN_MIXING.fit(score_fn, n_features=2), TypeError, "draws by more than arrays"),
    ],
)
def test_what_draws_by_other_means_is_refused(make, error, message, tmp_path, uncertified):
    with pytest.raises(error, match=message):
        skksivi.export(make(), tmp_path / "q.npz")
    assert not list(tmp_path.iterdir())
