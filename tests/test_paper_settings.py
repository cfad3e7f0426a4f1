"""The settings of the paper."""

import math

import pytest
from members import every, refused
from sklearn.base import clone

from skksivi import HKSIVIApproximator, KSIVIApproximator, baselines, paper_settings
from skksivi._paper import PAPER, RIVALS
from skksivi.annealing import Linear
from skksivi.parameters import Network, checked_object
from skksivi.targets import Banana, EightGaussians, StudentT

HIERARCHIES = {"student-hierarchy", "eight-gaussians"}

#: Of section "Experiments", its appendix and the public code, in another form than the package has them: widths of
#: the network, iterations, batch size, learning rate, betas, iterations to a decay by 0.9, start of log sigma^2.
TABLE = {
    "banana": ((3, 50, 50), 50_000, 500, 1e-3, (0.9, 0.99), 1000, math.log(1 / 4)),
    "multimodal": ((3, 50, 50), 50_000, 500, 1e-3, (0.9, 0.99), 1000, 0.0),
    "x-shaped": ((3, 50, 50), 50_000, 500, 1e-3, (0.9, 0.99), 1000, 0.0),
    "student": ((3, 50, 50), 50_000, 500, 1e-3, (0.9, 0.99), 1000, 0.0),
    "student-hierarchy": ((None, 50, 50), 50_000, 500, 1e-3, (0.9, 0.99), 1000, -3.0),
    "eight-gaussians": ((None, 50, 50), 50_000, 500, 1e-3, (0.9, 0.99), 1000, 0.0),
    "waveform": ((10, 100, 100), 20_000, 100, 1e-3, (0.9, 0.999), 3000, -5.0),
    "waveform-u-statistic": ((10, 100, 100), 40_000, 100, 1e-3, (0.9, 0.999), 3000, -2.0),
    "diffusion": ((100, 128, 128), 100_000, 128, 2e-4, (0.9, 0.99), 10_000, -2.0),
    "network": ((3, 10, 10), 20_000, 100, 1e-3, (0.9, 0.999), 3000, -8.0),
}


def approximator(name):
    return (HKSIVIApproximator if name in HIERARCHIES else KSIVIApproximator)(**paper_settings(name))


@every("name", list(TABLE))
def test_the_settings_are_those_of_the_paper(name):
    q = approximator(name)
    network = checked_object(Network, q.hidden_layer_sizes)
    assert network.linear_skip == (name in HIERARCHIES)
    widths = (getattr(q, "latent_dim", None), *network.hidden_layer_sizes)
    training = q.max_iter, q.batch_size, q.learning_rate, q.optimizer.betas
    assert (widths, *training, q.optimizer.decay[1]) == TABLE[name][:-1]
    assert q.optimizer.decay[0] == 0.9
    assert 2 * math.log(q.initial_scale) == pytest.approx(TABLE[name][-1])
    assert q.kernel == ("riesz" if "student" in name else "gaussian")
    assert q.gradient_estimator == ("u-statistic" if "u-statistic" in name else "vanilla")


def test_the_list_is_complete():
    assert TABLE.keys() == PAPER.keys()
    assert all(f"``{name}``" in paper_settings.__doc__ for name in PAPER)
    paper_settings("banana")["kernel"] = "imq"  # a copy
    assert paper_settings("banana")["kernel"] == "gaussian"
    refused(ValueError, r"`name` must be one of \['banana', .*'x-shaped'\], got 'bananas'", paper_settings, "bananas")


@pytest.mark.filterwarnings("ignore")  # of fits of two iterations
@every("name, target", [("banana", Banana()), ("student", StudentT()), ("eight-gaussians", EightGaussians())])
def test_a_fit_takes_them(name, target):
    q = clone(approximator(name)).set_params(max_iter=2, random_state=0).fit(target)
    assert q.sample(3).shape == (3, 2)


def test_the_regularisation_of_the_student_target_ends_after_20_000_iterations():
    weight = paper_settings("student")["terms"][0].weight
    assert [weight(t) for t in (0.0, 0.2, 0.39)] == [0.05 * Linear()(t) for t in (0.0, 0.2, 0.39)]
    assert weight(0.4) == weight(1.0) == 0.0


@pytest.mark.filterwarnings("ignore")  # of fits of two iterations
@every("method", list(RIVALS))
def test_a_rival_has_the_layer_of_ksivi_and_its_own_betas(method):
    q = getattr(baselines, method)(**paper_settings("banana", method)).set_params(max_iter=2, random_state=0)
    assert q.fit(Banana()).sample(3).shape == (3, 2)
    if method != "SVGD":
        assert (q.latent_dim, q.hidden_layer_sizes, q.batch_size, q.optimizer.betas) == (
            3,
            (50, 50),
            500,
            (0.9, 0.999),
        )
    refused(ValueError, r"`method` must be one of \['KSIVI'\]", paper_settings, "eight-gaussians", method)
