"""The examples of CONTRIBUTING.rst run where it says that they go."""

import importlib
import re
import runpy
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from plain_targets import normal
from sklearn.utils import Bunch

from skksivi import KSIVIApproximator, load, save
from skksivi.datasets import _base
from skksivi.kernels import Gaussian
from skksivi.score._probe import in_double
from skksivi.start import _find, find_whitening

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.rst").read_text("utf-8")
SECTIONS = dict(re.findall(r"(?ms)^Adding an? ([a-z ]+)\n-+\n(.*?)(?=^[^\n]+\n-{3,}\n|\Z)", TEXT))
EXAMPLE = re.compile(r"``(skksivi/[\w/]+\.py)``:\n\n\.\. code-block:: python\n\n((?:    .*\n|\n)+)")


@pytest.fixture
def run(monkeypatch):
    """Run the example of a section among the names of its file, a new one being empty; return all names."""

    def run(section):
        [(path, code)] = EXAMPLE.findall(SECTIONS[section])
        module, names = ".".join(Path(path).with_suffix("").parts), {}
        if (ROOT / path).exists():
            module = importlib.import_module(module)
            for name, value in list(vars(module).items()):
                if name.isupper() and isinstance(value, dict):  # a register, which gets no new entry for good
                    monkeypatch.setattr(module, name, dict(value))
            names = dict(vars(module))
        exec(textwrap.dedent(code), names)  # noqa: S102
        return names

    return run


@pytest.fixture
def by_file(monkeypatch, tmp_path):
    """What comes back of an approximator from a file, if its module has these classes."""

    def by_file(q, *classes):
        for cls in classes:
            monkeypatch.setattr(sys.modules[cls.__module__], cls.__name__, cls, raising=False)
        save(q, tmp_path / "q")
        return load(tmp_path / "q")

    return by_file


def test_every_example_is_run_here():
    names = "kernel, mixing distribution, whitening rule, source of the start, target, "
    names += "gradient estimator, baseline, data set, metric"
    assert ", ".join(SECTIONS) == names
    assert TEXT.count(".. code-block::") == sum(len(EXAMPLE.findall(section)) for section in SECTIONS.values()) == 9


def test_the_kernel_is_symmetric_and_positive_definite_and_has_its_slope(run, by_file):
    kernel, x = run("kernel")["TwoScale"](), normal(9, 3)
    k = kernel(x)
    torch.testing.assert_close(k, k.mT)
    torch.testing.assert_close(k.diagonal(), torch.ones(9, dtype=x.dtype))
    assert torch.linalg.eigvalsh(k)[0] > 0
    t = torch.logspace(-4, 1, 30, dtype=x.dtype, requires_grad=True)
    profile = kernel.profile(t)
    torch.testing.assert_close(kernel.slope(t, profile), torch.autograd.grad(profile.sum(), t)[0])
    q = KSIVIApproximator(kernel=kernel.set_params(bandwidth=2.0))
    assert str(by_file(q, type(kernel))) == str(q)


def test_the_mixing_distribution_has_unit_variance_and_is_saved_with_a_fit(run, by_file):
    names = run("mixing distribution")
    mixing = names["Uniform"]()
    z = mixing.build(3)(50_000, torch.zeros(1).double(), torch.Generator().manual_seed(0))
    assert (z.mean(0).abs() < 4 / len(z) ** 0.5).all()
    assert ((z.square().mean(0) - 1).abs() < 4 * (4 / 5 / len(z)) ** 0.5).all()  # E z^4 = 9 / 5
    assert z.abs().max() <= 3**0.5
    q = KSIVIApproximator(mixing=mixing, whiten=None, max_iter=50, random_state=0).fit(lambda x: -x, n_features=3)
    np.testing.assert_array_equal(by_file(q, names["Uniform"], names["UniformDraws"]).sample(5), q.sample(5))


def test_the_whitening_rule_finds_the_scales_of_independent_coordinates(run):
    run("whitening rule")
    scales = torch.tensor([0.01, 1.0, 100.0]).double()
    whitening, _ = find_whitening("sizes", in_double(lambda x: (3 - x) / scales.to(x) ** 2, 3), torch.Generator())
    np.testing.assert_allclose(whitening.L, scales.diag(), rtol=1e-6)
    np.testing.assert_allclose(whitening.m, [3, 3, 3], rtol=1e-6)


def test_the_source_of_the_start_ends_the_one_of_its_target_alone(run, monkeypatch):
    monkeypatch.setattr(_find, "SOURCES", (("wider Gaussian", run("source of the start")["by_wider"]),))
    for d in (1, 2):
        score = in_double(lambda x: 2 * (3 - x), d)
        whitening, points = find_whitening("auto", score, torch.Generator().manual_seed(0))
        assert [a.stage for a in whitening.attempts] == ["mode search", "wider Gaussian"]
        assert points.converged == (d == 1)
    np.testing.assert_allclose(points.x.mean(0), 3, atol=0.1)


def test_the_target_has_the_score_of_its_density_and_of_its_draws(run):
    target, x, h = run("target")["Parabola"](), normal(7, 2), 1e-5
    steps = h * torch.eye(2, dtype=x.dtype)
    differences = torch.stack([target.log_prob(x + e) - target.log_prob(x - e) for e in steps], 1) / (2 * h)
    torch.testing.assert_close(target.score_fn(x), differences, rtol=1e-6, atol=1e-6)
    s = target.score_fn(target.sample(50_000, torch.Generator().manual_seed(0)))
    assert (s.mean(0).abs() < 4 * s.std(0) / len(s) ** 0.5).all()


def test_the_gradient_estimator_is_unbiased(run):
    r"""With q = N(0, a^2), p = N(0, 1) and k(x, y) = exp(-(x - y)^2 / 2), x + y and x - y are independent, so that

    KSD^2 = (1 / a^2 - 1)^2 E[k(x, y) x y] = (1 / a^2 - 1)^2 a^2 r (1 - r^2) / 2 with r = E k = (1 + 2 a^2)^(-1/2).
    """
    estimator = run("gradient estimator")["GRADIENT_ESTIMATORS"]["interleaved"]
    b, sigma = 0.7, 0.5
    z, xi = normal(2, 20_000, 6 * estimator.n_batches, 1)
    x, f = b * z + sigma * xi, -(b * z + sigma * xi) + xi / sigma
    values = estimator.estimate(x, f, Gaussian(bandwidth=1.0))
    a2 = b**2 + sigma**2
    r = (1 + 2 * a2) ** -0.5
    expected = (1 / a2 - 1) ** 2 * a2 * r * (1 - r**2) / 2
    assert abs(values.mean() - expected) < 4 * values.std() / len(values) ** 0.5


def test_the_baseline_fits_a_gaussian_exactly_and_draws_from_it(run, by_file):
    mean, P = torch.tensor([1.0, -2.0]), torch.tensor([[2.0, 0.5], [0.5, 1.0]])
    q = run("baseline")["ScoreRegression"](random_state=0)
    q.fit(lambda x: (mean.to(x) - x) @ P.to(x), n_features=2)
    np.testing.assert_allclose(q.mean_, mean, atol=1e-8)
    np.testing.assert_allclose(q.covariance_, np.linalg.inv(P), atol=1e-8)
    X = q.sample(50_000)
    assert np.abs(X.mean(0) - q.mean_).max() < 4 * X.std(0).max() / len(X) ** 0.5
    np.testing.assert_array_equal(by_file(q, type(q)).sample(5), q.sample(5))
    assert q.score(X) == pytest.approx(-1 - np.log(2 * np.pi) + np.linalg.slogdet(P)[1] / 2, abs=0.02)


def test_the_data_set_is_a_bunch_of_a_file_with_its_checksum(run, tmp_path, monkeypatch):
    distress = [0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    degrees = [66, 70, 69, 68, 67, 72, 73, 70, 57, 63, 70, 78, 67, 53, 67, 75, 70, 81, 76, 79, 75, 76, 58]
    psi = [50] * 6 + [100] * 2 + [200] * 15
    rows = zip(distress, degrees, psi, range(1, 24), strict=True)
    (tmp_path / "o-ring-erosion-only.data").write_text("".join(f"6 {a} {b} {c} {n}\n" for a, b, c, n in rows))
    monkeypatch.setattr(_base, "load_descr", lambda name: f"what `descr/{name}.rst` will say")
    data = run("data set")["fetch_challenger"](data_home=tmp_path, download_if_missing=False)
    assert isinstance(data, Bunch)
    assert data.data.shape == (23, 4)
    assert data.feature_names == ["O-rings", "temperature", "pressure", "flight"]
    np.testing.assert_array_equal(data.target, distress)
    np.testing.assert_array_equal(data.data[:, 1], degrees)


def test_the_metric_is_zero_for_equal_samples_and_one_for_separate_ones(run):
    kolmogorov_smirnov = run("metric")["kolmogorov_smirnov"]
    X, shift = normal(400, 3).numpy(), np.array([0, 0, 100])
    assert kolmogorov_smirnov(X, X[::-1]) == 0
    assert kolmogorov_smirnov(X, X + shift) == kolmogorov_smirnov(X, X - shift) == 1
    assert kolmogorov_smirnov(X, normal(400, 3, seed=1).numpy()) < 0.15


def test_limits_of_the_ledger_only_fall():
    risen = runpy.run_path(str(ROOT / ".ci" / "size.py"))["risen"]
    before = {("core", "code"): 50, ("tests", "code"): 40, ("core", "names"): 3, ("core", "parameters"): 7}
    assert risen(before, before) == risen(before, {}) == []
    assert risen(before | {("core", "code"): 60, ("tests", "code"): 30, ("core", "names"): 2}, before) == []
    [lines] = risen(before | {("core", "code"): 51}, before)
    assert "lines in all rose from 90 to 91" in lines
    assert len(risen(before | {("core", "names"): 4, ("core", "parameters"): 8}, before)) == 2
