"""Draws in the containers of ArviZ."""

import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from members import every, refused
from plain_targets import stan
from scipy.stats import norm

from skksivi import KSIVIApproximator, __version__, to_arviz
from skksivi.baselines import Laplace
from skksivi.targets import Banana, BayesianLogisticRegression, Target, constrained, from_bridgestan, from_log_prob


def normal(x):
    return -((x - torch.arange(3).to(x)) ** 2).sum(1) / 2


def of_arrays():
    """A model of a scale and a vector, in BridgeStan's interface."""
    names, constrain = ["scale", "beta.1", "beta.2"], lambda theta: np.hstack([np.exp(theta[0]), theta[1:]])
    density = lambda theta: (-theta @ theta / 2, -theta)  # noqa: E731
    return from_bridgestan(stan(3, density, param_names=lambda: names, param_constrain=constrain))


NAMED = from_log_prob(normal, 3, names=["a", "b", "c"])
FITTED = Laplace(random_state=0).fit(NAMED)


@pytest.fixture(autouse=True)
def _needs_arviz():
    pytest.importorskip("arviz_base", reason="`to_arviz` needs arviz-base")


def test_draws_come_back_by_name_in_chains_that_are_signed():
    data = to_arviz(FITTED, NAMED, 52, random_state=1)
    X = FITTED.sample(52, random_state=1)
    assert list(data.posterior.data_vars) == ["a", "b", "c"]
    assert dict(data.posterior.sizes) == {"chain": 4, "draw": 13}
    for j, name in enumerate("abc"):
        np.testing.assert_array_equal(data.posterior[name].values.ravel(), X[:, j])
    signed = data.posterior.attrs
    assert (signed["inference_library"], signed["inference_library_version"]) == ("skksivi", __version__)


@pytest.mark.parametrize("name", ["draw", "chain", "sample", "b_dim_0"])
def test_a_name_that_a_dimension_has_keeps_its_draws(name):
    """As a parameter, with a warning, and as a dimension of another."""
    target = of_arrays()
    q = Laplace(random_state=0).fit(target)
    draws = target.constrain(q.sample(52, random_state=1))
    target.constrain = lambda X: {name: draws["scale"], "b": draws["beta"]}
    with pytest.warns(UserWarning, match=f"^In the result `{name}` is `{name}_`, because ArviZ needs the name"):
        data = to_arviz(q, target, 52, groups=[])
    np.testing.assert_array_equal(data.posterior[f"{name}_"].values.ravel(), draws["scale"])
    target.constrain, at = lambda X: {"b": draws["beta"]}, {"dims": {"b": [name]}, "coords": {name: [5, 6]}}
    with pytest.warns(UserWarning, match="^In the result") if name != "b_dim_0" else nullcontext():
        b = to_arviz(q, target, 52, groups=[], **at).posterior["b"]
    np.testing.assert_array_equal(b.isel({b.dims[2]: 1}).values.ravel(), draws["beta"][:, 1])
    assert [*b[b.dims[2]].values] == [5, 6]


@every("n, n_chains", [(1000, 4), (999, 3), (998, 2), (8, 2), (5, 1)])
def test_chains_are_of_equal_length_and_hold_all_draws(n, n_chains):
    assert dict(to_arviz(FITTED, NAMED, n).posterior.sizes) == {"chain": n_chains, "draw": n // n_chains}


class Regression(Target):
    """Normal observations of standard deviation one, with coefficients of standard deviation two."""

    def __init__(self, n_columns):
        rng = np.random.RandomState(3)
        self.X = torch.as_tensor(np.column_stack([np.ones(25), rng.normal(size=(25, n_columns - 1))]))
        self.y = torch.as_tensor(0.5 * self.X.numpy().sum(1) + rng.normal(size=25))
        self.n_features, self.observed_data = n_columns, {"y": self.y.numpy()}

    def log_likelihood(self, x):
        return -((self.y - x @ self.X.mT) ** 2) / 2 - np.log(2 * np.pi) / 2

    def log_prob(self, x):
        return self.log_likelihood(x).sum(1) - x.square().sum(1) / 8

    def predictive_draws(self, x, seed):
        noise = torch.randn(len(x), len(self.y), generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
        return x @ self.X.mT + noise

    def elpd(self):
        """The sum of log-densities of each observation given all others, in closed form."""
        X, y, total = self.X.numpy(), self.y.numpy(), 0
        for i in range(len(y)):
            others, left = np.delete(X, i, 0), np.delete(y, i)
            C = np.linalg.inv(others.T @ others + np.eye(X.shape[1]) / 4)
            total += norm.logpdf(y[i], X[i] @ C @ others.T @ left, np.sqrt(1 + X[i] @ C @ X[i]))
        return total


@pytest.mark.parametrize(("as_tree", "target"), [(False, Regression(1)), (True, Regression(3))], ids=["data", "tree"])
def test_leave_one_out_agrees_with_refits(target, as_tree, monkeypatch):
    stats = pytest.importorskip("arviz_stats")
    if as_tree:
        monkeypatch.setattr("skksivi._arviz.find_spec", lambda name: None)
    data = to_arviz(KSIVIApproximator(random_state=0).fit(target), target, random_state=0)
    found = stats.loo(data)
    approximate = stats.loo_approximate_posterior(data, data.sample_stats.log_p, data.sample_stats.log_q)
    np.testing.assert_allclose([found.elpd, approximate.elpd], target.elpd(), atol=0.1, rtol=0)
    assert float(found.pareto_k.max()) < 0.7
    X = data.posterior["x"].values.reshape(-1, target.n_features)
    log_p = data.log_prior["log_prior"].values + data.log_likelihood["y"].values.sum(-1)
    np.testing.assert_allclose(log_p.ravel(), target.log_prob(torch.as_tensor(X).double()), rtol=1e-6)
    assert np.exp(data.sample_stats["log_weight"]).sum() == pytest.approx(1)


def test_draws_are_in_the_space_of_the_model():
    target = of_arrays()
    q = Laplace(random_state=0).fit(target)
    data = to_arviz(q, target, 50, random_state=1)
    X = q.sample(50, random_state=1)
    np.testing.assert_allclose(data.posterior["scale"].values.ravel(), np.exp(X[:, 0].astype(float)))
    np.testing.assert_array_equal(data.posterior["beta"].values.reshape(-1, 2), X[:, 1:])


@every("target", [None, from_log_prob(normal, 3), lambda x: -x])
def test_without_names_the_draws_are_one_variable(target):
    data = to_arviz(FITTED, target, 52, random_state=1)
    assert list(data.posterior.data_vars) == ["x"]
    np.testing.assert_array_equal(data.posterior["x"].values.reshape(-1, 3), FITTED.sample(52, random_state=1))


def test_dimensions_have_the_names_of_the_target_and_then_those_given():
    target = of_arrays()
    target.dims, target.coords = {"beta": ("column",)}, {"column": ["u", "v"], "row": [1, 2, 3]}
    q = Laplace(random_state=0).fit(target)
    beta = to_arviz(q, target, 5).posterior["beta"]
    assert (beta.dims, beta.sel(column="v").shape) == (("chain", "draw", "column"), (1, 5))
    for dims, coords in (({}, {"column": ["left", "right"]}), ({"beta": ["k"]}, {"k": [10, 20]})):
        beta = to_arviz(q, target, 5, dims=dims, coords=coords).posterior["beta"]
        ((name, labels),) = coords.items()
        assert (beta.dims[2], [*beta[name].values]) == (name, labels)


def test_a_prior_is_in_the_space_of_the_parameters():
    target = constrained(lambda sd: -6 * sd, {"sd": "positive"})  # an exponential prior of rate two
    target.log_likelihood = lambda x: -2 * x.exp().expand(-1, 2)
    data = to_arviz(Laplace(random_state=0).fit(target), target, 40)
    np.testing.assert_allclose(data.log_prior["log_prior"], -2 * data.posterior["sd"], rtol=1e-6)


def test_a_fit_brings_its_certificate_and_predictions():
    target = Regression(1)
    q = KSIVIApproximator(random_state=0).fit(target)
    data, again = (to_arviz(q, target, random_state=5) for _ in range(2))
    assert data.posterior.attrs["certificate_divergence"] == q.certificate_.divergence
    assert data.posterior.attrs["verdict"].startswith("good: every number is within 0.")
    assert data.sample_stats.attrs["pareto_k"] < 1
    replicates = data.posterior_predictive["y"]
    assert replicates.shape == (4, 1000, 25)
    assert abs(float(replicates.mean()) - q.sample(4000).mean()) < 4 * np.sqrt(2) / np.sqrt(4000)
    np.testing.assert_array_equal(replicates, again.posterior_predictive["y"])
    np.testing.assert_array_equal(data.observed_data["y"], target.y)


def test_groups_are_those_asked_for():
    target = BayesianLogisticRegression([[-1.0], [0.5], [2.0]], [0, 1, 1], prior_precision=1.0)
    q = Laplace(random_state=0).fit(target)
    assert set(to_arviz(q, target, 40, groups=[])) == {"posterior"}
    assert set(to_arviz(q, target, 40, groups=["log_prior"])) == {"posterior", "log_prior"}
    with pytest.raises(ValueError, match="`groups` has 'loo', expected some of sample_stats, log_likelihood"):
        to_arviz(q, target, groups=["loo"])
    with pytest.raises(ValueError, match="has 'log_likelihood', for which `target` needs `log_likelihood`; see"):
        to_arviz(q, groups=["log_likelihood"])
    target.n_rows = 2**20
    with pytest.warns(UserWarning, match=r"^log_likelihood of 4,194,304,000 numbers: not made; set `groups`"):
        assert "log_likelihood" not in set(to_arviz(q, target))
    target.log_likelihood = lambda x: x.sum(1)
    with pytest.raises(ValueError, match=r"`log_likelihood` of `target` returned shape \(40,\), expected \(40, r"):
        to_arviz(q, target, 40, groups=["log_likelihood"])


def test_what_is_wrong_is_told(monkeypatch, tmp_path):
    refused(TypeError, "`est` must be a fitted approximator, got a Banana", lambda: to_arviz(Banana()))
    for target in (from_log_prob(normal, 2, names=["a", "b"]), Banana()):
        refused(ValueError, "`target` has 2 features, expected 3", to_arviz, FITTED, target)
    refused(TypeError, "write n_samples=500", to_arviz, FITTED, 500)
    for target in ("x", 2.5, ["a"], FITTED.sample(2), Banana):
        refused(TypeError, "`target` must be a Target, the one of `est`, got a", to_arviz, FITTED, target)
    (tmp_path / "arviz.py").write_text("raise AttributeError('style has no core')")
    monkeypatch.delitem(sys.modules, "arviz", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    refused(ImportError, "raised AttributeError: style has no core; it may be too old", to_arviz, FITTED)
    monkeypatch.setitem(sys.modules, "arviz_base", None)
    refused(ImportError, r"pip install 'skksivi\[arviz\]'", to_arviz, FITTED)
