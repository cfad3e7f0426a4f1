"""The study of the public suites: its tables of data, its measures, and what the manual shows of it."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from skksivi import targets

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def suites():
    """The module, which stands beside what it imports."""
    before = set(sys.modules)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("suites")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
        for name in set(sys.modules) - before:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(ROOT / "benchmarks"):
                del sys.modules[name]


@pytest.fixture
def folder(suites, tmp_path):
    """Files of the form of the originals."""
    rng = np.random.RandomState(0)
    for name, table in suites.TABLES.items():
        X = rng.normal(size=table.shape).round(3)
        labels = {"german": "12", "ionosphere": "gb", "sonar": "MR"}[name]
        mark = "  " if name == "german" else ","
        rows = [mark.join([*map(str, row), labels[i % 2]]) for i, row in enumerate(X)]
        (tmp_path / table.file).write_text("\n".join(rows) + "\n")
    return tmp_path


def test_the_targets_have_the_dimensions_of_the_suites(suites):
    expected = {
        "funnel": 10, "many wells": 32, "forty Gaussians": 2, "Rosenbrock": 36, "Brownian bridge": 32, "seeds": 26,
        "German credit": 25, "sparse German credit": 51, "ionosphere": 35, "sonar": 61, "volatility": 103,
        "item response": 501, "pines": 1600,
    }  # fmt: skip
    assert {name: make(None).n_features for name, make in suites.CASES.items()} == expected


@pytest.mark.parametrize("name", ["german", "ionosphere", "sonar"])
def test_tables_are_read_as_they_stand(suites, folder, name):
    table = suites.TABLES[name]
    X, y = suites.read_table(folder / table.file, table)
    assert X.shape == table.shape
    np.testing.assert_array_equal(y, np.arange(len(y)) % 2 == 0)
    design, _ = suites.design(name, folder)
    assert design.shape == (table.shape[0], table.shape[1] + 1)
    np.testing.assert_allclose(design[:, 1:].mean(0), 0, atol=1e-10)
    np.testing.assert_allclose(design[:, 1:].std(0), 1)
    assert (design[:, 0] == 1).all()
    assert suites.sources(folder)[name] != suites.sources(None)[name] == "generated"


def test_a_table_with_a_column_that_is_constant_is_standardised(suites, folder):
    table = suites.TABLES["ionosphere"]
    rows = [line.split(",") for line in (folder / table.file).read_text().splitlines()]
    (folder / table.file).write_text("\n".join(",".join([row[0], "0", *row[2:]]) for row in rows))
    assert np.isfinite(suites.design("ionosphere", folder)[0]).all()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "\n".join(line + ",1" for line in text.splitlines()),
        lambda text: text.replace(",R", ",M"),
        lambda _: "",
    ],
)
def test_another_table_is_refused(suites, folder, spoil):
    path = folder / "sonar.all-data"
    path.write_text(spoil(path.read_text()))
    with pytest.raises(SystemExit, match=r"is no table of 208 rows with 60 numbers and a label"):
        suites.read_table(path, suites.TABLES["sonar"])


def test_second_moments_of_exact_draws_have_the_bias_of_their_number(suites):
    """b^2 of n draws is about 1 / n + 1 / m against m others, and of draws that are too wide what it says."""
    rng = np.random.RandomState(0)
    X, Y = rng.normal(size=(5000, 50)), rng.normal(size=(20_000, 50))
    b2 = suites.squared_bias(X, Y)["b2"]
    assert b2 == pytest.approx(1 / 5000 + 1 / 20_000, rel=4 * (2 / 50) ** 0.5)
    wide = suites.squared_bias(2**0.5 * X, Y)
    assert wide["b2"] == pytest.approx(1 / 2, rel=0.1)  # (2 - 1)^2 / 2
    assert wide["b2_max"] >= wide["b2"]


class Shifted:
    """N(shift, I), with its density."""

    def __init__(self, shift):
        self.shift = shift

    def score_samples(self, X, *, return_std):
        log_q = -((X - self.shift) ** 2).sum(1) / 2 - X.shape[1] / 2 * np.log(2 * np.pi)
        return log_q, 0 * log_q


def test_bounds_enclose_the_evidence_by_the_divergences(suites):
    """Of N(a 1, I) against N(0, I) in d dimensions both divergences are d a^2 / 2."""
    rng, d, a = np.random.RandomState(0), 3, 0.4
    target = targets.GaussianMixture(np.zeros((1, d)))
    Y = rng.normal(size=(400, d))
    found = suites.bounds(Shifted(a), target, Y + a, Y)
    assert abs(found["elbo"] + d * a**2 / 2) < 4 * found["elbo_se"]
    assert abs(found["eubo"] - d * a**2 / 2) < 4 * found["eubo_se"]
    exact = suites.bounds(Shifted(0.0), target, Y, Y)
    assert exact["elbo"] == pytest.approx(0, abs=1e-10)


def test_references_that_are_made_satisfy_the_stein_identities(suites, monkeypatch, tmp_path):
    target = targets.BayesianLogisticRegression(
        np.arange(8.0)[:, None] - 3, np.arange(8) % 3 > 0, prior_precision=1.0, fit_intercept=True
    )
    target.hmc = {"n_chains": 400, "n_warmup": 20, "n_rounds": 20, "n_trajectories": 3}
    monkeypatch.setattr(suites, "DIRECTORY", tmp_path)
    monkeypatch.setitem(suites.CASES, "small", lambda _: target)
    Y = torch.as_tensor(suites.reference("small", None, 2000))
    np.testing.assert_array_equal(suites.reference("small", None, 2000), Y)  # from the file
    s = target.score_fn(Y)
    assert (s.mean(0).abs() < 5 * s.std(0) / len(s) ** 0.5).all()
