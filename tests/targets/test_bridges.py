"""Targets of models in other libraries: one model written five times, each with its own transforms."""

import copy
import pickle
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
import torch
from members import every, refused
from plain_targets import normal, resolved, stan
from scipy.stats import norm

from skksivi import targets
from skksivi.bridges._jax import JaxTarget
from skksivi.targets import Target, from_bridgestan, from_jax, from_log_prob, from_numpyro, from_pymc

Y = (0.3, 1.9, -0.4, 1.1, 2.2)
D = 5  # coordinates of mu, sigma > 0, p in (-1, 2) and w in the simplex of three


def log_density(mu, sigma, p, w, log=torch.log):
    """The density of the model in its own parameters, up to a constant."""
    prior = -((mu / 2) ** 2) / 2 - sigma**2 / 2 + log(w[1]) + 2 * log(w[2])
    return prior - sum(((y - mu - p) / sigma) ** 2 for y in Y) / 2 - len(Y) * log(sigma)


def unconstrained(x, sigmoid=torch.sigmoid, log=torch.log, exp=torch.exp):
    """The same from the whole space: parameters, and the log-density with the Jacobian; w by breaking a stick."""
    a, b, c = (sigmoid(x[i]) for i in (2, 3, 4))
    w = [b, (1 - b) * c, (1 - b) * (1 - c)]
    parameters = {"mu": x[0], "sigma": exp(x[1]), "p": 3 * a - 1, "w": w}
    jacobian = x[1] + sum(log(t * (1 - t)) for t in (a, b, c)) + log(1 - b)
    return parameters, log_density(**parameters, log=log) + jacobian


class Stan:
    """The methods of bridgestan.StanModel, of which the gradient is one buffer for all calls."""

    def __init__(self):
        self.buffer = np.empty(D)

    def param_unc_num(self):
        return D

    def log_density_gradient(self, theta):
        assert theta.flags.c_contiguous
        assert theta.dtype == np.float64
        x = torch.tensor(theta, requires_grad=True)
        with torch.enable_grad():
            value = unconstrained(x)[1]
            self.buffer[:] = torch.autograd.grad(value, x)[0]
        return value.item(), self.buffer

    def param_constrain(self, theta):
        parameters, _ = unconstrained(torch.tensor(theta))
        return np.hstack([*(parameters[name] for name in ("mu", "sigma", "p")), *parameters["w"]])

    def param_names(self):
        return ["mu", "sigma", "p", "w.1", "w.2", "w.3"]


def in_jax(x):
    import jax

    return unconstrained(x, jax.nn.sigmoid, jax.numpy.log, jax.numpy.exp)[1]


def make_jax():
    pytest.importorskip("jax", reason="the bridge needs JAX")
    return from_jax(in_jax, D)


def in_numpyro(y):
    import numpyro
    import numpyro.distributions as dist

    mu = numpyro.sample("mu", dist.Normal(0, 2))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    p = numpyro.sample("p", dist.Uniform(-1, 2))
    numpyro.sample("w", dist.Dirichlet(np.array([1.0, 2.0, 3.0])))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(numpyro.deterministic("centre", mu + p), sigma), obs=y)


def make_numpyro():
    pytest.importorskip("numpyro", reason="the bridge needs NumPyro")
    return from_numpyro(in_numpyro, y=np.array(Y))


def make_pymc():
    pm = pytest.importorskip("pymc", reason="the bridge needs PyMC")
    with pm.Model(coords={"part": ["a", "b", "c"]}) as model:
        mu = pm.Normal("mu", 0, 2)
        sigma = pm.HalfNormal("sigma", 1)
        p = pm.Uniform("p", -1, 2)
        pm.Dirichlet("w", [1.0, 2.0, 3.0], dims="part")
        pm.Deterministic("centre", mu + p)
        pm.Deterministic("rows", pm.math.stack([1.0, 2.0]))  # of no parameter
        pm.Normal("y", mu + p, sigma, observed=Y)
    with without_c_compiler():
        return from_pymc(model)


def without_c_compiler():
    """Spare a minute of compilation, of which the fits below and the example are test enough."""
    import pytensor

    return pytensor.config.change_flags(mode="FAST_COMPILE")


MAKERS = {
    "torch": lambda: from_log_prob(lambda x: torch.stack([unconstrained(row)[1] for row in x]), D),
    "JAX": make_jax, "NumPyro": make_numpyro, "PyMC": make_pymc, "Stan": lambda: from_bridgestan(Stan()),
}  # fmt: skip


def precision_of_jax(double):
    """Set JAX to float64 or float32 for this thread, where it is installed."""
    try:
        import jax
    except ImportError:
        return nullcontext()
    return jax.enable_x64(double)


@pytest.fixture(autouse=True)
def _in_double_precision():
    with precision_of_jax(True):
        yield


@cache
def made(name):
    return MAKERS[name]()


@pytest.fixture(params=MAKERS)
def target(request):
    return made(request.param)


@pytest.fixture(params=["NumPyro", "PyMC", "Stan"])
def constraining(request):
    return made(request.param)


@pytest.fixture(params=["JAX", "NumPyro", "PyMC", "Stan"])
def foreign(request):
    return made(request.param)


def points(n=6, dtype=torch.float64):
    return normal(n, D).to(dtype)


def differences(function, x, step=1e-5):
    """Central differences (n, m, d) of a function (n, d) -> (n, m)."""
    return torch.stack([(function(x + e) - function(x - e)) / (2 * step) for e in step * torch.eye(D).double()], -1)


# The density, its gradient and what is derived from it


def test_score_is_the_gradient_of_log_prob(target):
    x = points()
    expected = differences(lambda x: target.log_prob(x)[:, None], x)[:, 0]
    torch.testing.assert_close(target.score_fn(x), expected, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(Target.score_fn(target, x), target.score_fn(x))


def test_density_is_that_of_the_model_with_the_jacobian(constraining):
    x = points()

    def coordinates(x):
        parameters = constraining.constrain(x)
        return torch.as_tensor(np.column_stack([*(parameters[k] for k in ("mu", "sigma", "p")), parameters["w"]]))

    in_model = torch.stack([log_density(*c[:3], c[3:]) for c in coordinates(x)])
    log_jacobian = torch.linalg.slogdet(differences(lambda x: coordinates(x)[:, :-1], x)).logabsdet
    excess = constraining.log_prob(x) - in_model - log_jacobian
    torch.testing.assert_close(excess, excess.mean().expand_as(excess), rtol=0, atol=1e-6)


def bare_stan(shape=(D,)):
    """A model that gives no parameters, and gradients of any shape."""
    return from_bridgestan(stan(D, lambda theta: (0.0, np.zeros(shape))))


def test_parameters_are_in_their_space_by_name(constraining):
    parameters = constraining.constrain(points())
    for name, shape in {"mu": (6,), "sigma": (6,), "p": (6,), "w": (6, 3)}.items():
        assert (parameters[name].shape, parameters[name].dtype) == (shape, np.float64)
    assert (parameters["sigma"] > 0).all()
    assert (np.abs(parameters["p"] - 0.5) < 1.5).all()
    assert (parameters["w"] > 0).all()
    np.testing.assert_allclose(parameters["w"].sum(1), 1)
    if "centre" in parameters:
        np.testing.assert_allclose(parameters["centre"].reshape(6, -1)[:, 0], parameters["mu"] + parameters["p"])


def test_single_precision_is_answered_in_single_precision(target):
    x = points(dtype=torch.float32)
    s = target.to(device="cpu", dtype=torch.float32).score_fn(x)
    assert s.dtype == torch.float32
    torch.testing.assert_close(s.double(), target.score_fn(x.double()), rtol=1e-4, atol=1e-4)


def test_rows_are_independent_of_their_number_also_in_a_copy(foreign):
    foreign, x = copy.copy(foreign), points(33)
    torch.testing.assert_close(foreign.score_fn(x)[-1:], foreign.score_fn(x[-1:]), rtol=1e-12, atol=1e-12)
    parameters = foreign.constrain(x)
    for name, value in foreign.constrain(x[-1:]).items():
        np.testing.assert_allclose(parameters[name][-1:], value, rtol=1e-12)


def test_no_rows_give_no_rows(target):
    one, none = (target.constrain(points(n)) for n in (1, 0))
    assert {name: v.shape for name, v in none.items()} == {name: (0, *v.shape[1:]) for name, v in one.items()}


def test_score_leaves_its_input_alone_and_has_a_graph_by_jax_alone(foreign):
    x = points().requires_grad_()
    before = x.detach().clone()
    assert foreign.score_fn(x).requires_grad == isinstance(foreign, JaxTarget)
    assert (x == before).all()


@pytest.mark.parametrize("name", ["JAX", "PyMC", "Stan"])
def test_products_of_a_fit_are_right(name):
    foreign = made(name)
    score = resolved(foreign)
    assert score.by_differences == (name != "JAX")
    x, v = points(), points().flip(0)
    J = differences(made("torch").score_fn if name == "JAX" else foreign.score_fn, x)
    torch.testing.assert_close(score.product(x, v), (v[:, None] @ J)[:, 0], rtol=1e-5, atol=1e-5)


# Names


def test_coordinates_have_names():
    assert made("torch").names == tuple(f"x[{i}]" for i in range(D))
    shares = tuple(f"unconstrained(w)[{i}]" for i in range(2))
    assert made("NumPyro").names == ("mu", "unconstrained(p)", "log(sigma)", *shares)
    assert made("PyMC").names[:4] == ("mu", "sigma_log__", "p_interval__", "unconstrained(w_simplex__[0])")


def test_coordinates_of_stan_say_what_they_are_of_the_parameters():
    class Unconstrained(Stan):
        def param_unc_names(self):
            return ["mu", "sigma", "p", "w.1", "w.2"]

    target = from_bridgestan(Unconstrained())
    assert target.names == ("mu", "log(sigma)", "unconstrained(p)", "logit(w[0])", "unconstrained(w)[1]")


def test_labels_of_pymc_are_kept():
    target = made("PyMC")
    assert target.dims == {"w": ("part",)}
    assert list(target.coords["part"]) == ["a", "b", "c"]
    np.testing.assert_array_equal(target.constrain(points(3))["rows"], [[1.0, 2.0]] * 3)


GROUP = np.array([0, 0, 1, 1, 1])


def grouped_in_numpyro(group, y):
    import numpyro
    import numpyro.distributions as dist

    effect = numpyro.sample("effect", dist.Normal(0, 2).expand([2]))
    scale, angle = numpyro.sample("scale", dist.HalfNormal(1)), numpyro.sample("angle", dist.VonMises(0.0, 2.0))
    numpyro.factor("nothing", 0 * scale)
    numpyro.sample("y", dist.Normal(effect[group] + angle, scale), obs=y)


def make_grouped(library):
    if library == "NumPyro":
        pytest.importorskip("numpyro", reason="the bridge needs NumPyro")
        return from_numpyro(grouped_in_numpyro, GROUP, y=np.array(Y))
    pm = pytest.importorskip("pymc", reason="the bridge needs PyMC")
    with pm.Model() as model, without_c_compiler():
        effect, scale = pm.Normal("effect", 0, 2, shape=2), pm.HalfNormal("scale", 1)
        angle = pm.VonMises("angle", 0.0, 2.0)
        pm.Normal("y", effect[pm.Data("group", GROUP)] + angle, scale, observed=Y)
        return from_pymc(model)


@pytest.mark.parametrize("library", ["NumPyro", "PyMC"])
def test_a_model_knows_its_rows_and_predicts_them(library):
    target = make_grouped(library)
    x = torch.as_tensor(np.random.RandomState(0).normal(size=(500, 4)))
    with without_c_compiler() if library == "PyMC" else nullcontext():
        likelihood, prior = target.log_likelihood(x), target.log_prior(x)
        drawn, again, others = (target.predictive_draws(x, seed)["y"] for seed in (0, 0, 1))
    found = target.constrain(x)
    at, scale = found["effect"][:, GROUP] + found["angle"].reshape(-1, 1), found["scale"].reshape(-1, 1)
    np.testing.assert_allclose(likelihood.pop("y"), norm.logpdf(Y, at, scale), rtol=1e-6)
    assert not likelihood
    of_prior = norm.logpdf(found["effect"], 0, 2).sum(1) - found["scale"] ** 2 / 2 + 2 * np.cos(found["angle"])
    rest = sum(values.reshape(500, -1).sum(1) for values in prior.values()) - of_prior
    np.testing.assert_allclose(rest, rest.mean(), rtol=1e-6)
    z = (drawn - at) / scale
    np.testing.assert_allclose([z.mean(), z.std()], [0, 1], atol=4 / np.sqrt(z.size))
    assert abs(np.corrcoef(z.T) - np.eye(5)).max() < 4.5 / np.sqrt(500)
    np.testing.assert_array_equal(drawn, again)
    assert (drawn != others).all()
    assert (*target.observed_data["y"], *target.constant_data["group"]) == (*Y, *GROUP)


def test_a_tree_of_arrays_is_taken_apart_and_put_together():
    jnp = pytest.importorskip("jax.numpy", reason="the bridge needs JAX")

    def log_density(point):
        W, (a, b) = point["W"], point["pair"]
        assert W.shape == (2, 2)
        return -jnp.sum(W**2 * jnp.array([[1.0, 2.0], [3.0, 4.0]])) - a**2 * 5 - b[0] ** 2 * 6

    target = from_jax(log_density, {"pair": (0.0, np.zeros(1)), "W": np.ones((2, 2), dtype=np.float32)})
    assert target.names == ("W[0, 0]", "W[0, 1]", "W[1, 0]", "W[1, 1]", "pair.0", "pair.1[0]")
    torch.testing.assert_close(target.score_fn(torch.ones(1, 6)), -2 * torch.arange(1.0, 7)[None])
    x = np.arange(6.0)[None]
    parameters = target.constrain(x)
    np.testing.assert_array_equal(parameters["W"], x[:, :4].reshape(1, 2, 2))
    np.testing.assert_array_equal(parameters["pair.1"], [[5.0]])


def test_arrays_of_stan_are_put_together():
    """A model of which parameters are arrays, in Stan's order."""
    names = ["a", "M.1.1", "M.2.1", "M.1.2", "M.2.2", "M.1.3", "M.2.3", "t:1.1"]
    arrays = stan(
        1,
        lambda theta: (0.0, theta),
        param_names=lambda *, include_tp=False: names + ["last"] * include_tp,
        param_constrain=lambda theta, *, include_tp=False: theta + np.arange(8.0 + include_tp),
    )
    parameters = from_bridgestan(arrays).constrain([[0.0], [10.0]])
    assert {name: values.shape for name, values in parameters.items()} == {"a": (2,), "M": (2, 2, 3), "t:1": (2, 1)}
    np.testing.assert_array_equal(parameters["M"][0], [[1, 3, 5], [2, 4, 6]])
    np.testing.assert_array_equal(parameters["M"][1], parameters["M"][0] + 10)
    assert from_bridgestan(arrays, include_tp=True).constrain([[0.0]])["last"] == [8.0]


def test_the_density_of_stan_has_its_constants_and_without_parameters_it_gives_its_coordinates():
    np.testing.assert_array_equal(bare_stan().constrain(points())["x"], points())

    class Normalised(Stan):
        def log_density_gradient(self, theta, *, propto=True, jacobian=True):
            value, gradient = super().log_density_gradient(theta)
            return value - 7.0 * (not propto), gradient

    x = points()
    torch.testing.assert_close(from_bridgestan(Normalised()).log_prob(x), made("Stan").log_prob(x) - 7)


# Points where there is no density


def test_where_the_density_is_zero_there_is_no_score():
    jnp = pytest.importorskip("jax.numpy", reason="the bridge needs JAX")
    target = from_jax(lambda x: jnp.where(x[0] > 0, -x[0], -jnp.inf), 1)
    x = torch.tensor([[1.0], [-1.0]])
    torch.testing.assert_close(target.score_fn(x), torch.tensor([[-1.0], [torch.nan]]), equal_nan=True)
    assert target.log_prob(x)[1] == -torch.inf


def test_pymc_does_not_raise_where_a_scale_underflows():
    x = points(4)
    expected = made("PyMC").score_fn(x)
    x[2, 1] = -2000.0
    s = made("PyMC").score_fn(x)
    assert not s[2].isfinite().all()
    torch.testing.assert_close(s[[0, 1, 3]], expected[[0, 1, 3]])


@every("error", [RuntimeError, ZeroDivisionError, np.linalg.LinAlgError])
def test_rejected_rows_are_nan_and_the_others_right_but_a_fault_in_the_model_is_raised(error):
    def rejects(theta):
        if theta[0] > 0.5:
            raise error("rejected")
        return 0.0, -theta

    x = points(20)
    rejected = x[:, :1] > 0.5
    assert 0 < rejected.sum() < len(x)
    s = from_bridgestan(stan(D, rejects)).score_fn(x)
    torch.testing.assert_close(s, torch.where(rejected, torch.nan, -x), equal_nan=True)
    with pytest.raises(IndexError):
        from_bridgestan(stan(D, lambda theta: (theta["no"], theta))).score_fn(points())


# How JAX is used


@every("double", [False, True])
def test_the_setting_of_jax_decides_its_precision(double):
    jax = pytest.importorskip("jax", reason="the bridge needs JAX")
    with jax.enable_x64(double):
        target = from_jax(lambda x: -(x**2).sum() / 3, 2)
        s = target.score_fn(torch.full((1, 2), 1 / 3, dtype=torch.float64))
        assert jax.config.jax_enable_x64 == double
        assert target.score_fn(torch.zeros(1, 2)).dtype == torch.float32
    dtype = torch.float64 if double else torch.float32
    torch.testing.assert_close(s, torch.full((1, 2), -2 / 9, dtype=dtype), rtol=torch.finfo(dtype).eps, atol=0)


def test_few_sizes_are_compiled():
    pytest.importorskip("jax", reason="the bridge needs JAX")
    traces = []

    def log_density(x):
        traces.append(1)
        return -(x**2).sum()

    target = from_jax(log_density, 1)
    before = len(traces)
    for n in (1, 7, 31, 32, 33, 100, 127, 128, 129, 300, 500, 512, 513, 1000, 3000):
        x = torch.arange(n, dtype=torch.float64)[:, None]
        torch.testing.assert_close(target.score_fn(x), -2 * x)
    assert len(traces) - before == 3


def test_without_a_second_derivative_products_are_differences():
    jax = pytest.importorskip("jax", reason="the bridge needs JAX")

    @jax.custom_vjp
    def log_density(x):
        return -(x**4).sum()

    log_density.defvjp(lambda x: (log_density(x), x), lambda x, g: (-4 * g * x**3,))
    score = resolved(from_jax(log_density, 2))
    assert score.by_differences
    x, v = torch.tensor([[1.0, -2.0]]).double(), torch.tensor([[1.0, 3.0]]).double()
    torch.testing.assert_close(score.product(x, v), -12 * x**2 * v, rtol=1e-6, atol=0)


# How PyMC is used


@pytest.mark.slow
def test_loops_go_row_by_row_and_leave_the_model_as_it_was():
    pm = pytest.importorskip("pymc", reason="the bridge needs PyMC")
    import pytensor

    with pm.Model() as model:
        a = pm.Normal("a", 0, 1)
        options = {"outputs_info": [np.zeros(())], "non_sequences": [a], "n_steps": 3, "return_updates": False}
        steps = pytensor.scan(lambda last, a: a * last + 1, **options)  # 1, 1 + a, 1 + a + a^2
        pm.Normal("y", pm.Deterministic("steps", steps), 1, observed=np.ones(3))
    with without_c_compiler():
        target, x = from_pymc(model), points()[:, :1]
    expected = -x - x - (x + x**2) * (1 + 2 * x)
    torch.testing.assert_close(target.score_fn(x), expected, rtol=1e-12, atol=1e-12)
    assert target.constrain(x)["steps"].shape == (6, 3)
    model.dlogp()


# Copies, processes and threads


@pytest.mark.parametrize(
    "name", ["JAX", *(pytest.param(name, marks=pytest.mark.slow) for name in ("NumPyro", "PyMC")), "Stan"]
)
def test_another_process_gets_the_same_target(name):
    foreign, x = made(name), points()
    with without_c_compiler() if name == "PyMC" else nullcontext():
        other = pickle.loads(pickle.dumps(foreign))  # noqa: S301
    torch.testing.assert_close(other.score_fn(x), foreign.score_fn(x), rtol=1e-12, atol=1e-12)
    assert other.names == foreign.names
    ours, theirs = ({k: v.shape for k, v in t.constrain(x).items()} for t in (foreign, other))
    assert ours == theirs


def test_threads_do_not_mix_what_a_model_writes():
    buffer = np.empty(D)

    def slow(theta):
        buffer[:] = -theta
        time.sleep(1e-4)
        return -theta @ theta / 2, buffer

    target = from_bridgestan(stan(D, slow))
    batches = [points(20) + k for k in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for x, s in zip(batches, pool.map(target.score_fn, batches), strict=True):
            assert (s == -x).all()


# What is wrong is told


def counts_in_pymc():
    pm = pytest.importorskip("pymc", reason="the bridge needs PyMC")
    with pm.Model() as model:
        pm.Normal("y", pm.Poisson("k", 3), 1, observed=2.0)
    return model


def no_parameters_in_pymc():
    pm = pytest.importorskip("pymc", reason="the bridge needs PyMC")
    with pm.Model() as model:
        pm.Normal("y", 0, 1, observed=2.0)
    return model


@pytest.mark.parametrize(
    ("library", "make", "error", "message"),
    [
        ("torch", lambda: targets.coordinate_names(targets.Banana()), TypeError, "must be a dict .* got a Banana"),
        ("torch", lambda: from_log_prob(3, 2), TypeError, "`log_prob` must be callable, got a int"),
        ("torch", lambda: from_log_prob(torch.sum, 0), ValueError, "n_features"),
        ("torch", lambda: from_log_prob(torch.sum, 2, ["a"]), ValueError, "2 different strings"),
        ("torch", lambda: from_log_prob(torch.sum, 2, ["a", "a"]), ValueError, "2 different strings"),
        ("torch", lambda: from_log_prob(torch.sum, 2, "ab"), ValueError, "2 different strings"),
        ("torch", lambda: from_log_prob(lambda x: x, 2).score_fn(torch.ones(3, 2)), ValueError, r"shape \(3, 2\)"),
        ("torch", lambda: from_bridgestan(3), TypeError, "`log_density_gradient`"),
        ("torch", lambda: made("Stan").constrain(np.ones((2, 4))), ValueError, "4 columns, expected 5"),
        ("torch", lambda: made("Stan").constrain(np.full((2, D), np.nan)), ValueError, "NaN"),
        ("torch", lambda: bare_stan((2,)).score_fn(points()), ValueError, r"shapes \(\) and \(2,\) for .* \(5,\)"),
        ("jax", lambda: from_jax(3, 2), TypeError, "`log_density` must be callable"),
        ("jax", lambda: from_jax(lambda x: x, 2), ValueError, "one number"),
        ("jax", lambda: from_jax(lambda x: None, 2), ValueError, "one number"),
        ("jax", lambda: from_jax(lambda x: 0.0, {}), ValueError, "no continuous parameters"),
        ("jax", lambda: from_jax(lambda x: 0.0, 0), ValueError, "example"),
        ("pymc", lambda: from_pymc(3), TypeError, r"`model` must be a pymc.Model, got a int"),
        ("pymc", lambda: from_pymc(counts_in_pymc()), ValueError, "discrete free variables, k"),
        ("pymc", lambda: from_pymc(no_parameters_in_pymc()), ValueError, "no continuous parameters"),
    ],
)
def test_wrong_arguments(library, make, error, message):
    pytest.importorskip(library)
    refused(error, message, make)


@pytest.mark.slow
def test_wrong_models_in_numpyro():
    numpyro = pytest.importorskip("numpyro", reason="the bridge needs NumPyro")
    dist = numpyro.distributions

    def subsampled():
        m = numpyro.sample("m", dist.Normal(0, 1))
        with numpyro.plate("rows", len(Y), subsample_size=2) as i:
            numpyro.sample("y", dist.Normal(m, 1), obs=np.array(Y)[i])

    for make, error, message in (
        (lambda: from_numpyro(subsampled), ValueError, "subsamples plate 'rows'"),
        (lambda: from_numpyro(lambda: numpyro.sample("y", dist.Normal(0, 1), obs=1.0)), ValueError, "no continuous"),
        (lambda: from_numpyro(lambda: numpyro.sample("k", dist.Poisson(3))), RuntimeError, "discrete"),
    ):
        refused(error, message, make)


BRIDGES = {"jax": lambda: from_jax(sum, 2), "numpyro": lambda: from_numpyro(sum), "pymc": lambda: from_pymc(None)}


@pytest.mark.parametrize(("module", "make"), BRIDGES.items())
def test_missing_libraries_are_named(monkeypatch, module, make):
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    refused(ImportError, rf"pip install 'skksivi\[{module}\]'", make)


@pytest.mark.filterwarnings("ignore:The target seems bounded")
@every("double", [False, True])
@every("kind", ["poisson", "overdispersed"])
def test_covariates_on_their_own_scale_are_no_fault_of_a_product(kind, double):
    jax = pytest.importorskip("jax", reason="the bridge needs JAX")
    jnp, rng = jax.numpy, np.random.RandomState(0)
    Y = rng.poisson(5.0, 35).astype(float)
    for X in (np.arange(1985.0, 2020), np.exp(rng.normal(11, 0.5, 35))):

        def log_prob(p, X=X):
            eta = p["a"] + p["b"] * X
            growth = jnp.exp(eta) if kind == "poisson" else (Y + 5) * jnp.log(5 + jnp.exp(eta))
            return jnp.sum(Y * eta - growth) - p["a"] ** 2 / 2e4 - p["b"] ** 2 / 2

        with precision_of_jax(double):
            assert not resolved(from_jax(log_prob, {"a": 0.0, "b": 0.0})).by_differences
