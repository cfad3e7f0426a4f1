"""Coordinates of independent directions and radii, `skksivi.coordinates._marginals`, and fits in these."""

import math
import warnings

import numpy as np
import pytest
import torch
from plain_targets import normal
from scipy import stats

from skksivi import KSIVIApproximator
from skksivi.coordinates._affine import Affine
from skksivi.coordinates._marginals import Marginals, Quantiles, fitted_marginals
from skksivi.pilot._newton import saddle_free_newton
from skksivi.score._target import resolve_score
from skksivi.targets import Banana, Target


def tensor(a):
    return torch.as_tensor(a, dtype=torch.float64)


class Students(Target):
    """x = m + A z with z of independent t distributions, or of a multivariate one."""

    def __init__(self, df, m, A, radial=False):
        self.df, self.m, self.A, self.radial = tensor(df), tensor(m), tensor(A), radial
        self.n_features = len(m)

    def log_prob(self, x):
        z = torch.linalg.solve(self.A, (x - self.m).mT).mT
        if self.radial:
            return -(self.df + self.n_features) / 2 * (z.square().sum(1) / self.df).log1p()
        df = self.df.where(self.df.isfinite(), 1.0)
        of_t = -(df + 1) / 2 * (z.square() / df).log1p()
        return torch.where(self.df.isfinite(), of_t, -z.square() / 2).sum(1)


CORRELATED = [[2.0, 0, 0], [1.0, 0.5, 0], [-3.0, 1, 4]]
TARGETS = {
    "Cauchys": Students([1.0, 1.0, 1.0], [5.0, 0, -300], np.diag([1e-3, 1, 100])),
    "t2 and t5": Students([2.0, 5.0], [0.0, 1.0], np.eye(2)),
    "one of three": Students([math.inf, 1.5, math.inf], [0.0, 0, 2], np.diag([1.0, 2, 3])),
    "one": Students([3.0], [1.0], np.eye(1)),
    "multivariate": Students(2.0, [1.0, 2, 3], CORRELATED, radial=True),
}


def mode_of(target):
    score = resolve_score(target, None, dtype=torch.float64, device=torch.device("cpu")).double
    return score, saddle_free_newton(score, torch.zeros(target.n_features, dtype=torch.float64))[0]


def fitted(target):
    score, mode = mode_of(target)
    return score, fitted_marginals(score, mode, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", TARGETS)
def test_a_map_has_an_inverse_and_its_determinant(name):
    _, map_ = fitted(TARGETS[name])
    y = 3 * normal(200, len(map_.map.m))
    y[0] = 25.0  # beyond the nodes
    x, log_scale = map_.unwarp(y)
    back, log_scale_back = map_.warp(x)
    torch.testing.assert_close(back, y, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(log_scale_back, log_scale, rtol=1e-9, atol=1e-9)
    J = torch.autograd.functional.jacobian(lambda row: map_.unwarp(row[None])[0][0], y[1] / 3)
    torch.testing.assert_close(torch.linalg.slogdet(J)[1], map_.unwarp(y[1:2] / 3)[1][0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", TARGETS)
def test_the_target_is_normal_in_its_coordinates(name):
    target, (score, map_) = TARGETS[name], fitted(TARGETS[name])
    assert map_.is_radial == target.radial
    y = torch.cat([normal(99, target.n_features), torch.zeros(1, target.n_features).double()])
    torch.testing.assert_close(map_.pull_back(score)(y), -y, rtol=0, atol=0.01)


def rotation(d, seed):
    return torch.linalg.qr(normal(d, d, seed=seed)).Q


#: Log-densities, up to a constant.
KINDS = {
    "t3": lambda z: -2 * (z.square() / 3).log1p(),
    "double exponential": lambda z: -(1e-2 + 2 * z.square()).sqrt(),
    "Gumbel": lambda z: -z - (-z).exp(),
    "two humps": lambda z: torch.logaddexp(-(z - 2).square() / 2, -(z + 2).square() / 2),
    "kink": lambda z: -(2**0.5) * z.abs(),
}

#: The kind and the number of independent directions. Two humps are normal near their modes, so that one may be
#: missed; kinks have no curvature.
FOUND = [(kind, k) for kind in KINDS for k in (1, 3, 5) if kind != "kink" and (kind, k) != ("two humps", 1)]


class Rotated(Target):
    """Independent variables along directions that are no coordinates: the first k of a kind, the others normal."""

    def __init__(self, kind, d, k, seed=0):
        self.kind, self.n_features, self.k, self.V = kind, d, k, rotation(d, seed)

    def log_prob(self, x):
        z = x @ self.V.to(x)
        return KINDS[self.kind](z[:, : self.k]).sum(1) - z[:, self.k :].square().sum(1) / 2


@pytest.mark.parametrize(("kind", "k"), FOUND)
def test_independent_directions_are_found(kind, k):
    target = Rotated(kind, 5, k)
    score, map_ = fitted(target)
    found = target.V.mT @ torch.linalg.solve(map_.map.L.mT, map_.V)[:, : len(map_.quantiles.values)]
    assert found.shape[1] == k
    torch.testing.assert_close(found.abs().amax(0) / found.norm(dim=0), torch.ones(k).double(), rtol=0, atol=1e-4)
    y = normal(100, 5)
    assert (map_.pull_back(score)(y) + y).square().mean().sqrt() < 0.05


class OfTwo(Target):
    """A bivariate t3, whose place may depend on a normal variable, along directions that are no coordinates."""

    n_features, V = 3, rotation(3, 1)

    def __init__(self, bend):
        self.bend = bend

    def log_prob(self, x):
        z = x @ self.V.to(x)
        own = z[:, :2] - self.bend * (z[:, 2:].square() - 1)
        return -2.5 * (own.square().sum(1) / 3).log1p() - z[:, 2].square() / 2


def test_the_radius_of_some_directions_is_found():
    score, map_ = fitted(OfTwo(0.0))
    assert (map_.is_radial, map_.n_mapped) == (True, 2)
    y = normal(100, 3)
    torch.testing.assert_close(map_.pull_back(score)(y), -y, rtol=0, atol=0.01)


@pytest.mark.parametrize("d", [9, 10, 20])
def test_the_radius_of_all_directions_is_found(d):
    assert fitted(Students(3.0, [0.0] * d, np.eye(d), radial=True))[1].n_mapped == d


@pytest.mark.parametrize(
    "target",
    [OfTwo(0.5), Banana(), Students([math.inf, math.inf], [0.0, 1.0], np.eye(2)), Students([0.01], [0.0], np.eye(1))],
    ids=["bent", "banana", "normal", "hardly a tail"],
)
def test_other_targets_are_left_alone(target):
    assert fitted(target)[1] is None


def test_normal_targets_cost_four_products_a_feature():
    target = Students([math.inf] * 7, [0.0] * 7, np.eye(7))
    score, mode = mode_of(target)
    before = score.tally.total
    assert fitted_marginals(score, mode, torch.Generator().manual_seed(0)) is None
    assert score.tally.total - before <= 4 * 2 * 7 + 8


@pytest.mark.parametrize(
    ("values", "message"), [([[0.0, 2.0, 1.0]], "do not increase"), ([[0.0, 1.0]] * 3, "do not fit")]
)
def test_quantiles_that_make_no_map_are_refused(values, message):
    eye, curve = torch.eye(2).double(), tensor(values)
    with pytest.raises(ValueError, match=message):
        Marginals(Affine.shift(torch.zeros(2).double()), eye, 2, Quantiles(-1.0, 1.0, curve, torch.ones_like(curve)))


@pytest.mark.parametrize(
    "name", ["one of three", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Cauchys", "multivariate"))]
)
def test_fits_have_the_tails_of_the_target(name):
    """The shares of draws beyond quantiles are right to 2% and five standard errors, a false alarm in a million."""
    target = TARGETS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q = KSIVIApproximator(random_state=0).fit(target)
    assert q.n_score_calls_ < 6000
    assert isinstance(q.whitening_.warp, Marginals)
    assert abs(q.certificate_.divergence) < 0.01
    X = q.sample(400_000)
    z = torch.linalg.solve(target.A, (tensor(X) - target.m).mT).mT.numpy()
    for level in (0.001, 0.25, 0.75, 0.999):
        for column, df in zip(z.T, target.df.expand(target.n_features).tolist(), strict=True):
            low = stats.t if math.isfinite(df) else stats.norm
            cut = low.ppf(level, df) if math.isfinite(df) else low.ppf(level)
            share = (column < cut).mean()
            assert abs(share - level) < 5 * math.sqrt(level * (1 - level) / len(X)) + 0.02 * min(level, 1 - level)
    expected = tensor(q.score_samples(X[:50]))
    truth = target.log_prob(tensor(X[:50]))
    assert (expected - truth).std() < 0.05


@pytest.mark.parametrize(
    ("kind", "k"), [("t3", 1), ("kink", 1), pytest.param("two humps", 20, marks=pytest.mark.slow)]
)
def test_fits_have_the_quantiles_of_directions_that_are_no_coordinates(kind, k, recwarn):
    """The 99.8% ranges of 100,000 draws, to 10%: seven standard errors."""
    target = Rotated(kind, 20, k)
    z = KSIVIApproximator(random_state=0).fit(target).sample(100_000) @ target.V.numpy()
    t = np.linspace(-60, 60, 400_001)
    p = np.exp(KINDS[kind](tensor(t)).numpy())
    ends = np.interp([0.001, 0.999], p.cumsum() / p.sum(), t)
    np.testing.assert_allclose(np.quantile(z[:, :k], [0.001, 0.999], axis=0).mean(1), ends, rtol=0.1)
    np.testing.assert_allclose(z[:, k:].std(0), 1, atol=0.03)
    assert not len(recwarn)
