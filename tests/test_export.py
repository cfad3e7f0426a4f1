"""Draws in the containers of ArviZ."""

import sys

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from skksivi import __version__, export, to_arviz
from skksivi.baselines import Laplace
from skksivi.targets import Banana, from_bridgestan, from_log_prob


def normal(x):
    return -((x - torch.arange(3).to(x)) ** 2).sum(1) / 2


class Arrays:
    """A model of a scale and a matrix, in BridgeStan's interface."""

    def param_unc_num(self):
        return 3

    def log_density_gradient(self, theta):
        return -theta @ theta / 2, -theta

    def param_names(self):
        return ["scale", "beta.1", "beta.2"]

    def param_constrain(self, theta):
        return np.hstack([np.exp(theta[0]), theta[1:]])


NAMED = from_log_prob(normal, 3, names=["a", "b", "c"])
FITTED = Laplace(random_state=0).fit(NAMED)


@pytest.fixture(autouse=True)
def _needs_arviz():
    pytest.importorskip("arviz_base", reason="the export needs arviz-base")


def test_draws_come_back_by_name_in_chains():
    data = to_arviz(FITTED, NAMED, 52, random_state=1)
    X = FITTED.sample(52, random_state=1)
    assert list(data.posterior.data_vars) == ["a", "b", "c"]
    assert dict(data.posterior.sizes) == {"chain": 4, "draw": 13}
    for j, name in enumerate("abc"):
        np.testing.assert_array_equal(data.posterior[name].values.ravel(), X[:, j])


@pytest.mark.parametrize(("n", "n_chains"), [(1000, 4), (999, 3), (998, 2), (8, 2), (5, 1)])
def test_chains_are_of_equal_length_and_hold_all_draws(n, n_chains):
    assert dict(to_arviz(FITTED, NAMED, n).posterior.sizes) == {"chain": n_chains, "draw": n // n_chains}


#: What takes the draws, in any ArviZ that is installed.
FUNCTIONS = [
    ("arviz", "ess"),
    pytest.param("arviz", "plot_trace", marks=pytest.mark.slow),  # the first figure takes seconds
    ("arviz_stats", "rhat"),
    ("arviz_stats", "hdi"),
]


@pytest.mark.filterwarnings("ignore::matplotlib.MatplotlibDeprecationWarning", "ignore::FutureWarning")  # ArviZ's own
@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_arviz_takes_them(module, name, monkeypatch):
    arviz = pytest.importorskip(module, reason="not what is installed of ArviZ")
    target = from_bridgestan(Arrays())
    q = Laplace(random_state=0).fit(target)
    getattr(arviz, name)(to_arviz(q, target, 200, random_state=0))
    if module != "arviz":
        monkeypatch.setattr(export, "find_spec", lambda name: None)  # these take a tree too
        getattr(arviz, name)(to_arviz(q, target, 200, random_state=0))
    plt.close("all")


@pytest.mark.parametrize("module", ["arviz", "arviz_stats"])
def test_a_summary_is_of_the_draws(module):
    arviz = pytest.importorskip(module, reason="not what is installed of ArviZ")
    table = arviz.summary(to_arviz(FITTED, NAMED, random_state=1))
    X = FITTED.sample(1000, random_state=1)
    assert list(table.index) == ["a", "b", "c"]
    np.testing.assert_allclose(table["mean"].astype(float), X.mean(0), atol=0.006)
    np.testing.assert_allclose(table["r_hat"].astype(float), 1, atol=0.02)


def test_draws_are_in_the_space_of_the_model():
    target = from_bridgestan(Arrays())
    q = Laplace(random_state=0).fit(target)
    data = to_arviz(q, target, 50, random_state=1)
    X = q.sample(50, random_state=1)
    np.testing.assert_allclose(data.posterior["scale"].values.ravel(), np.exp(X[:, 0].astype(float)))
    np.testing.assert_array_equal(data.posterior["beta"].values.reshape(-1, 2), X[:, 1:])


@pytest.mark.parametrize("target", [None, from_log_prob(normal, 3), lambda x: -x])
def test_without_names_the_draws_are_one_variable(target):
    data = to_arviz(FITTED, target, 52, random_state=1)
    assert list(data.posterior.data_vars) == ["x"]
    np.testing.assert_array_equal(data.posterior["x"].values.reshape(-1, 3), FITTED.sample(52, random_state=1))


def test_dimensions_have_the_names_of_the_target_and_then_those_given():
    target = from_bridgestan(Arrays())
    target.dims, target.coords = {"beta": ("column",)}, {"column": ["u", "v"], "row": [1, 2, 3]}
    q = Laplace(random_state=0).fit(target)
    beta = to_arviz(q, target, 5).posterior["beta"]
    assert beta.dims == ("chain", "draw", "column")
    assert beta.sel(column="v").shape == (1, 5)
    beta = to_arviz(q, target, 5, coords={"column": ["left", "right"]}).posterior["beta"]
    assert list(beta["column"].values) == ["left", "right"]
    beta = to_arviz(q, target, 5, dims={"beta": ["k"]}, coords={"k": [10, 20]}).posterior["beta"]
    assert beta.dims == ("chain", "draw", "k")
    assert list(beta["k"].values) == [10, 20]


def test_the_library_signs_its_draws():
    attributes = to_arviz(FITTED).posterior.attrs
    assert attributes["inference_library"] == "skksivi"
    assert attributes["inference_library_version"] == __version__


def test_a_file_of_arviz_brings_them_back(tmp_path):
    pytest.importorskip("h5netcdf", reason="xarray writes files by it")
    import xarray

    data = to_arviz(FITTED, NAMED, 20)
    data.to_netcdf(tmp_path / "draws.nc", engine="h5netcdf")
    with xarray.open_datatree(tmp_path / "draws.nc", engine="h5netcdf") as read:
        np.testing.assert_array_equal(read.posterior["b"].values, data.posterior["b"].values)


def test_what_is_wrong_is_told(monkeypatch):
    with pytest.raises(TypeError, match="`est` must be a fitted approximator, got a Banana"):
        to_arviz(Banana())
    for target in (from_log_prob(normal, 2, names=["a", "b"]), Banana()):
        with pytest.raises(ValueError, match="`target` has 2 features, expected 3"):
            to_arviz(FITTED, target)
    with pytest.raises(TypeError, match="write n_samples=500"):
        to_arviz(FITTED, 500)
    for target in ("x", 2.5, ["a"], FITTED.sample(2), Banana):
        with pytest.raises(TypeError, match="`target` must be a Target, the one of `est`, got a"):
            to_arviz(FITTED, target)
    monkeypatch.setitem(sys.modules, "arviz_base", None)
    with pytest.raises(ImportError, match=r"pip install 'skksivi\[arviz\]'"):
        to_arviz(FITTED)
