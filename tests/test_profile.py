"""The profile of a target along a coordinate: `skksivi.pilot._profile`, and what is fitted to draws from it."""

import numpy as np
import pytest
import torch
from members import every
from plain_targets import generator, normal, resolved

from skksivi import KSIVIApproximator
from skksivi.coordinates._affine import Affine
from skksivi.judge import Grade
from skksivi.parameters import Pilot
from skksivi.pilot import _profile as module
from skksivi.pilot._mixture import Components
from skksivi.pilot._newton import check_mode, is_spike, laplace, search_modes
from skksivi.pilot._profile import Conditionals, out_of_spike, profile, what_scales
from skksivi.start import find_whitening
from skksivi.targets import Funnel, Target, from_log_prob, from_score_fn

D = 4
ROWS = [2.0, 0.6, 0, -0.5], [0.6, 1, 0.3, 0], [0, 0.3, 0.5, 0.1], [-0.5, 0, 0.1, 1.5]
C = torch.tensor(ROWS, dtype=torch.float64)
A = torch.tensor([1.0, -2.0, 0.5, 1.0], dtype=torch.float64)


def nodes_of(score, metric, a, monkeypatch):
    """Return the profile, with log p at its means, and the nodes it consists of."""
    found = []
    own = module._mixture
    monkeypatch.setattr(module, "_mixture", lambda lines: (found.extend(lines[0]), own(lines))[1])
    return profile(Conditionals.given(score, metric, a[:, None])), found


@pytest.mark.parametrize("has_density", [True, False])
def test_of_a_gaussian_it_has_the_conditional_means_and_the_marginal(has_density, monkeypatch):
    P = torch.linalg.inv(C)
    by_density = from_log_prob(lambda x: -(x @ P.to(x) * x).sum(-1) / 2, D)
    score = resolved(by_density if has_density else from_score_fn(lambda x: -x @ P.numpy(), n_features=D))
    monkeypatch.setattr(module, "SAME", 0.0)
    mixture, nodes = nodes_of(score, Affine.shift(torch.zeros_like(A)), A, monkeypatch)
    a = A / A.norm()
    variance = a @ C @ a
    for node in nodes:
        torch.testing.assert_close(node.u, node.c[0] * C @ a / variance, rtol=1e-4, atol=1e-4)
        conditional = C - torch.outer(C @ a, C @ a) / variance
        torch.testing.assert_close(node.root @ node.root.mT, conditional, rtol=1e-4, atol=1e-4)
    c, marginal = (torch.tensor([float(getattr(node, k)) for node in nodes]) for k in ("c", "log_marginal"))
    torch.testing.assert_close(marginal - marginal.max(), -c.square() / (2 * variance), rtol=1e-3, atol=1e-3)
    assert marginal.min() < marginal.max() - 7
    map_ = mixture.map()
    torch.testing.assert_close(map_.L @ map_.L.mT, C, rtol=0.1, atol=0.1)
    heights, exact = torch.tensor([[n.height, -float(n.u @ P @ n.u) / 2] for n in nodes]).T
    torch.testing.assert_close(heights - heights.max(), exact - exact.max(), rtol=1e-3, atol=1e-3)


def test_it_follows_a_funnel_into_its_neck(monkeypatch):
    """Given v, Neal's funnel is Gaussian, so that Laplace's marginal is exact: N(0, 9)."""
    score = resolved(Funnel())
    d = score.n_features
    e = torch.eye(d, dtype=torch.float64)[0]
    mixture, nodes = nodes_of(score, Affine.shift(0 * e), e, monkeypatch)
    v, marginal = (np.array([float(getattr(node, k)) for node in nodes]) for k in ("c", "log_marginal"))
    np.testing.assert_allclose(marginal - marginal.max(), -(v**2) / 18, atol=1e-6)
    assert v.min() < -10
    assert v.max() > 10
    narrow = mixture.covariances[:, 1:, 1:].diagonal(dim1=1, dim2=2)
    np.testing.assert_allclose(narrow.log(), np.repeat(v[:, None], d - 1, 1), atol=1e-4)


def test_there_is_none_without_an_end():
    flat = resolved(from_score_fn(lambda x: -x * [0, 1, 1, 1], n_features=D))
    e = torch.eye(D, dtype=torch.float64)[:, :1]
    assert profile(Conditionals.given(flat, Affine.shift(torch.zeros_like(A)), e)) is None


def on_a_line(x):
    """A line through data without noise: a, b and log sigma."""
    t = torch.linspace(-1, 1, 12).to(x)
    gaps = (1 + 2 * t - x[:, :1] - x[:, 1:2] * t) / x[:, 2:].exp()
    return -(gaps.square().sum(1) + (2 * x[:, 2]).exp() + x[:, :2].square().sum(1) / 25) / 2 - 11 * x[:, 2]


ENDLESS = {
    "data without noise": (from_log_prob(on_a_line, 3), r"without end as `x\[2\]` -> -inf"),
    "by the score alone": (from_score_fn(torch.func.grad(lambda x: on_a_line(x).sum()), 3), r"`x\[2\]` -> -inf"),
    "a pole": (from_score_fn(lambda x: -7 / (x - 2), 1), r"without end as `x\[0\]` -> 2, so"),
    "a score of zero beyond a bound": (from_score_fn(lambda x: (2 / x - 1).where(x > 0, 0.0), 1), "seems bounded"),
}


@every("target, limit", ENDLESS)
def test_a_density_without_a_maximum_is_told_before_it_costs_much(target, limit):
    with pytest.raises(ValueError, match=limit):
        KSIVIApproximator(whiten=Pilot(max_score_calls=10_000), random_state=0).fit(target)


# A hierarchy in its centred form

N_GROUPS, N_OF_GROUP = 10, 5
RNG = np.random.RandomState(102)
Y = RNG.standard_normal((N_GROUPS, 1)) + 3 + 1.5 * RNG.standard_normal((N_GROUPS, N_OF_GROUP))


class Centred(Target):
    """mu ~ N(0, 25), tau ~ N+(0, 4), log sigma ~ N(0, 4), theta_j ~ N(mu, tau^2), y_jk ~ N(theta_j, sigma^2)."""

    n_features = 3 + N_GROUPS

    def log_prob(self, x):
        mu, log_tau, log_sigma, theta = x.split([1, 1, 1, N_GROUPS], -1)
        gaps = (torch.as_tensor(Y).to(x) - theta[..., None]) / log_sigma[..., None].exp()
        data = -gaps.square().sum((-2, -1)) / 2 - Y.size * log_sigma[..., 0]
        groups = -((theta - mu) / log_tau.exp()).square().sum(-1) / 2 - N_GROUPS * log_tau[..., 0]
        prior = mu.square() / 25 + (2 * log_tau).exp() / 4 + log_sigma.square() / 4
        return data + groups - prior[..., 0] / 2 + log_tau[..., 0]


def exact_log_tau():
    """Return mean, standard deviation and first percentile of log tau; theta and mu are integrated by hand."""
    t, s = np.linspace(-9, 3, 1201)[:, None], np.linspace(-0.5, 1.4, 300)
    means, v = Y.mean(1), np.exp(2 * t) + np.exp(2 * s) / N_OF_GROUP
    within = np.square(Y - means[:, None]).sum()
    precision = N_GROUPS / v + 1 / 25
    log_p = (means.sum() / v) ** 2 / precision / 2 - np.log(precision) / 2
    log_p -= N_GROUPS / 2 * np.log(v) + np.square(means).sum() / (2 * v)
    log_p += -within / 2 * np.exp(-2 * s) - (Y.size - N_GROUPS) * s - s**2 / 8 - np.exp(2 * t) / 8 + t
    p, t = np.exp(log_p - log_p.max()).sum(1), t[:, 0]
    p /= p.sum()
    return p @ t, np.sqrt(p @ (t - p @ t) ** 2), t[np.searchsorted(p.cumsum(), 0.01)]


@pytest.mark.slow
def test_the_way_out_of_a_spike_of_infinite_density():
    """The scale that leads there is found, and its distribution, the neck included; a Gaussian is no spike."""
    score, start = resolved(Centred()), torch.zeros(3 + N_GROUPS, dtype=torch.float64)
    mode, _ = laplace(score, start, 60)
    assert is_spike(mode)
    assert what_scales(score, mode)[1].abs() > 0.999
    mean, sd, low = exact_log_tau()
    assert out_of_spike(score, mode, start).means[:, 1].min() < low - 1
    whitening, points = find_whitening("auto", score, generator())
    assert whitening.verdict.grade > Grade.WRONG
    q = points.mixture.draws()(20_000, start[None], generator())
    for log_tau, most in ((points.x[:, 1].numpy(), 0.12), (q[:, 1].numpy(), 0.2)):
        assert abs(log_tau.mean() - mean) < most * sd
        assert abs(np.log(log_tau.std() / sd)) < most
        assert abs(np.quantile(log_tau, 0.01) - low) < 0.5
    assert not is_spike(laplace(resolved(from_score_fn(lambda x: -x * [1e6, 1, 1, 1], n_features=D)), A)[0])


def test_gaussians_split_alike_have_the_skewness_of_points():
    z, levels = normal(4000, D), A.new_tensor([0.05, 0.95])
    z[:, 1] = -torch.special.ndtr(z[:, 1]).log().neg().log()  # Gumbel's
    x = z @ torch.linalg.cholesky(C).mT
    one = Components(A.new_ones(1), A[None], C[None]).moved_alike(x)
    two = one.split_alike(x)
    torch.testing.assert_close(two.map().m, x.mean(0))
    draws = (each.draws()(100_000, x, generator()) for each in (one, two))
    before, after = ((y.quantile(levels, 0) - x.quantile(levels, 0)).abs() / x.std(0) for y in draws)
    assert before.max() > 0.2 > 0.08 > after.max()


def test_a_neck_that_rounding_hides_is_no_direction_without_an_end():
    """Its mode is at v = -450, where steps of its own scale are below the rounding of v."""
    score, start = resolved(Funnel(101)), torch.zeros(101, dtype=torch.float64)
    (mode,), _ = search_modes(score, start[None], 60)
    assert is_spike(mode)
    check_mode(score, start, mode)
    assert what_scales(score, mode)[0].abs() > 0.99
