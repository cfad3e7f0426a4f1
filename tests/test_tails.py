"""Coordinates in which the tails of Student's t are light: `skksivi.coordinates._tails`, and fits in them."""

import math
import warnings

import numpy as np
import pytest
import torch
from scipy import stats

import skksivi
from skksivi import KSIVIApproximator
from skksivi.coordinates._affine import Affine
from skksivi.coordinates._tails import FARTHEST, Tails, fitted_tails
from skksivi.pilot._newton import saddle_free_newton
from skksivi.score._target import resolve_score
from skksivi.targets import Target


def normals(n, d, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


def tails(d, index):
    L = 2 * torch.eye(d).double()
    return Tails(
        Affine(torch.arange(d).double(), L + normals(d, d).tril(-1) if len(index) == 1 else L), tensor(index)
    )


MAPS = {
    "coordinates": tails(3, [1.0, 0.1, 0.0]),
    "heavy": tails(2, [2.0, 2.0]),
    "radial": tails(4, [0.5]),
    "radial, one": tails(1, [0.2]),
}


@pytest.mark.parametrize("name", MAPS)
def test_it_has_an_inverse_and_its_determinant(name):
    map_ = MAPS[name]
    y = 3 * normals(200, len(map_.map.m))
    x, log_scale = map_.unwarp(y)
    back, log_scale_back = map_.warp(x)
    torch.testing.assert_close(back, y, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(log_scale_back, log_scale, rtol=1e-9, atol=1e-9)
    J = torch.autograd.functional.jacobian(lambda row: map_.unwarp(row[None])[0][0], y[0] / 3)
    torch.testing.assert_close(torch.linalg.slogdet(J)[1], map_.unwarp(y[:1] / 3)[1][0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", MAPS)
def test_points_far_out_and_at_the_centre_stay_finite(name):
    map_ = MAPS[name]
    d = len(map_.map.m)
    y = tensor([0.0, 1e-200, FARTHEST, 1.2 * FARTHEST])[:, None].expand(4, d)
    x, log_scale = map_.unwarp(y)
    assert x.isfinite().all()
    assert log_scale.isfinite().all()
    torch.testing.assert_close(map_.warp(x)[0], y, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("df", [0.5, 1.0, 2.5, 20.0])
def test_normal_quantiles_become_those_of_t(df):
    map_ = Tails(Affine(torch.zeros(1).double(), torch.eye(1).double()), tensor([1 / df]))
    y = np.linspace(0.01, 8, 50)
    expected = stats.t.isf(stats.norm.sf(y), df)
    np.testing.assert_allclose(map_.unwarp(tensor(y)[:, None])[0][:, 0], expected, rtol=1e-7)


@pytest.mark.parametrize("df", [1.0, 4.0])
def test_radii_of_normal_vectors_become_those_of_a_multivariate_t(df):
    d = 6
    map_ = Tails(Affine(torch.zeros(d).double(), torch.eye(d).double()), tensor([1 / df]))
    y = normals(50, d)
    r_y, r_z = (a.norm(dim=1).numpy() for a in (y, map_.unwarp(y)[0]))
    np.testing.assert_allclose(stats.f.sf(r_z**2 / d, d, df), stats.chi2.sf(r_y**2, d), rtol=1e-6)


@pytest.mark.parametrize("name", TARGETS)
def test_tails_are_found_and_undone(name):
    target = TARGETS[name]
    score, mode = mode_of(target)
    found = fitted_tails(score, mode)
    expected = 1 / target.df
    np.testing.assert_allclose(found.index, expected.view(-1).expand(len(found.index)), atol=1e-6)
    y = normals(100, target.n_features)
    torch.testing.assert_close(found.pull_back(score)(y), -y, rtol=0, atol=0.05)


class Skewed(Target):
    """Two sides of different tails: of a Cauchy density on the right, of a normal one on the left."""

    n_features = 1

    def log_prob(self, x):
        return torch.where(x > 0, -x.square().log1p(), -x.square())[:, 0]


class OfTwo(Target):
    """A bivariate t3 and a normal coordinate."""

    n_features = 3

    def log_prob(self, x):
        return -2.5 * (x[:, :2].square().sum(1) / 3).log1p() - x[:, 2].square() / 2


@pytest.mark.parametrize("target", [Skewed(), OfTwo()])
def test_tails_of_another_form_are_left_alone(target):
    score, mode = mode_of(target)
    assert fitted_tails(score, mode) is None


@pytest.mark.parametrize("df", [0.3, 40.0, math.inf])
def test_tails_too_heavy_and_too_light_are_left_alone(df):
    score, mode = mode_of(Students([df, df], [0.0, 0.0], np.eye(2)))
    assert fitted_tails(score, mode) is None


@pytest.mark.parametrize(
    ("index", "message"), [([0.5, 0.5], "do not fit"), ([3.0, 0.1, 0.0], "heavier")], ids=["shape", "size"]
)
def test_indices_that_make_no_map_are_refused(index, message):
    with pytest.raises(ValueError, match=message):
        tails(3, index)


@pytest.mark.parametrize(
    "name", ["one of three", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Cauchys", "multivariate"))]
)
def test_fits_have_the_tails_of_the_target(name, tmp_path):
    """The shares of draws beyond quantiles are right to 2% and five standard errors, a false alarm in a million."""
    target = TARGETS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q = KSIVIApproximator(random_state=0).fit(target)
    assert q.n_score_calls_ < 6000
    assert isinstance(q.whitening_.warp, Tails)
    assert abs(q.certificate_.divergence) < 0.01
    X = q.sample(400_000)
    z = torch.linalg.solve(target.A, (tensor(X) - target.m).mT).mT.numpy()
    for level in (0.001, 0.25, 0.75, 0.999):
        for column, df in zip(z.T, target.df.expand(target.n_features).tolist(), strict=True):
            low = stats.t if math.isfinite(df) else stats.norm
            cut = low.ppf(level, df) if math.isfinite(df) else low.ppf(level)
            share = (column < cut).mean()
            assert abs(share - level) < 5 * math.sqrt(level * (1 - level) / len(X)) + 0.02 * min(level, 1 - level)
    skksivi.save(q, tmp_path / "q")
    loaded = skksivi.load(tmp_path / "q")
    np.testing.assert_array_equal(loaded.sample(3), skksivi.load(tmp_path / "q").sample(3))
    expected = tensor(q.score_samples(X[:50]))
    truth = target.log_prob(tensor(X[:50]))
    assert (expected - truth).std() < 0.05
