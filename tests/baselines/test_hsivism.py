"""HSIVISM: its gradient by the definition, layer by layer, and targets with known moments."""

import numpy as np
import pytest
import torch
from linear_family import spied_critics
from misbehaving import Misbehaving, raising
from plain_targets import Mixture, generator

from skksivi.baselines import HSIVISM, _critics
from skksivi.coordinates._whitening import Whitening
from skksivi.judge._verdict import Grade, Verdict
from skksivi.pilot._pilot import find_whitening
from skksivi.pilot._points import PilotPoints
from skksivi.score._probe import in_double
from skksivi.targets import Banana
from skksivi.training._loop import flatten


def score_fn(x):
    return 1 - x.pow(3)


def test_the_gradient_of_the_training_is_that_of_the_sum_of_bounds(monkeypatch):
    again = generator(1)
    made, states = spied_critics(_critics, monkeypatch, again)
    n, d, T = 20, 2, 3
    est = HSIVISM(n_layers=T, batch_size=n, hidden_layer_sizes=(5,), initial_scale=0.6)
    score = in_double(score_fn, d)
    whitening, _ = find_whitening(None, score, again)
    family = est._build(score, whitening, None, again)
    for p in family.networks.parameters():
        torch.nn.init.normal_(p, std=0.5, generator=again)
    flatten(family)
    objective = est._objective(score, family, again)
    objective.advance(0.0)
    with torch.no_grad():
        loss = objective()
    assert len(states) == est.n_critic_steps
    actual = [p.grad.clone() for p in family.parameters()]

    again.set_state(states[-1])
    x, total = torch.empty(n, d).double().normal_(generator=again), 0.0
    for t in reversed(range(T)):
        before = x.detach()
        level = 1 - t / T
        bridge = lambda x, level=level: level * score_fn(x) - (1 - level) * x  # noqa: E731
        sigma = family.sigma(t)
        xi = torch.empty(n, d).double().normal_(generator=again)
        x = before + family.networks[t](before) + 0.6**2 / 2 * bridge(before) + sigma * xi
        f, g = bridge(x) + xi / sigma, made[0].networks[t](x)
        total = total + (2 * g * f - g.square()).sum(-1).mean()
    torch.testing.assert_close(loss, total.detach())
    torch.testing.assert_close(actual, list(torch.autograd.grad(total, list(family.parameters()))))


@pytest.mark.slow
def test_two_modes_are_kept():
    p = Mixture([0.5, 0.5], [[-3.0, 0.0], [3.0, 0.0]], [1.0, 1.0])
    q = HSIVISM(n_layers=3, whiten=None, max_iter=400, random_state=0).fit(p.score_fn, n_features=2)
    X = q.sample(10_000)
    np.testing.assert_allclose(p.shares_of(X), 0.5, atol=0.1)
    for sign in (-1, 1):
        mode = X[sign * X[:, 0] > 0]
        np.testing.assert_allclose(mode.mean(0), [3 * sign, 0], atol=0.25)
        np.testing.assert_allclose(mode.std(0), 1, atol=0.15)


def test_the_density_is_that_of_the_draws():
    q = HSIVISM(n_layers=2, max_iter=10, whiten="laplace", random_state=0).fit(lambda x: -x, n_features=1)
    X = q.sample(50_000)
    edges = np.linspace(-2, 2, 9)
    grid = np.linspace(-2, 2, 801)[:, None]
    density = np.exp(q.score_samples(grid)).reshape(-1)
    shares = [np.trapezoid(density[i : i + 101], grid[i : i + 101, 0]) for i in range(0, 800, 100)]
    np.testing.assert_allclose(np.histogram(X, edges)[0] / len(X), shares, atol=0.012)


def test_the_score_of_the_last_fit_belongs_to_its_layers():
    q = HSIVISM(n_layers=2, max_iter=20, whiten="laplace", random_state=0)
    X = q.fit(lambda x: -x, n_features=2).sample(5, random_state=1)
    with pytest.raises(OSError, match="lost"):
        q.fit(Misbehaving(raising(OSError("lost")), 60, score_fn=lambda x: 2 - x), n_features=2)
    np.testing.assert_array_equal(q.sample(5, random_state=1), X)


def test_scales_of_the_layers_follow_the_narrowest_mode():
    p = Mixture([0.5, 0.5], [[-6.0, 0.0], [6.0, 0.0]], [0.5, 0.5])
    q = HSIVISM(n_layers=2, max_iter=1, learning_rate=1e-9, random_state=0).fit(p.score_fn, n_features=2)
    # The pilot's standard deviation is six along the first coordinate, and in its units a mode has a twelfth.
    scales = q.family_.half_square.mul(2).sqrt().numpy()
    np.testing.assert_allclose(scales, [0.5 / np.sqrt(36.25), 1.0], rtol=0.1)


def test_scales_of_the_layers_follow_the_curvature_where_it_is_narrower():
    # A banana is wide, but a Langevin step of its width would leave it across.
    score, x = in_double(Banana().score_fn, 2), Banana().sample(5000, generator()).double()
    pilot = PilotPoints(x, [len(x)], torch.ones(2), Verdict(Grade.CHAINS_AGREE))
    whitening = Whitening(pilot.map(), modes=np.empty((0, 2)), weights=np.empty(0))
    scales = HSIVISM()._build(score, whitening, pilot, generator()).half_square.mul(2).sqrt()
    conditional_sd = whitening.map.whiten_score(score(x)).square().mean(0).rsqrt()
    torch.testing.assert_close(scales, conditional_sd, rtol=0.2, atol=0)
    assert scales.max() < 0.5
