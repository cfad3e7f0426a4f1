"""The contract of every target."""

import math
import pickle
import sys
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from awkward_arrays import every_view
from members import every, refused
from plain_targets import generator, normal, own
from scipy.special import expit, log_softmax
from scipy.stats import norm

from skksivi import targets
from skksivi.score._score import autograd_pullback
from skksivi.targets import _network

#: The targets of the benchmarks that keep the contract too.
SPEC = spec_from_file_location("public_code", Path(__file__).parents[2] / "benchmarks" / "paper" / "public_code.py")
sys.modules[SPEC.name] = public_code = module_from_spec(SPEC)
SPEC.loader.exec_module(public_code)

rng = np.random.RandomState(0)
X, y = rng.normal(size=(30, 3)), rng.randint(2, size=30)
WEIGHTS = np.array([2, 0, 1, 3, 0.5, 1])
UNEQUAL = [0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05]

X_LINE, Y_LINE = np.array([[-3.0], [0.0], [9.0]]), np.array([5.0, 4.0, 9.0])
NOISE, HYPERPRIOR = 2.0, (2.0, 1.0)
of_line = partial(targets.BayesianNeuralNetwork, X_LINE, Y_LINE, n_hidden=2)

TARGETS = {
    "banana": targets.Banana(),
    "multimodal": targets.Multimodal(),
    "x-shaped": targets.XShaped(),
    "eight Gaussians": targets.EightGaussians(),
    "eight shifted, unequal": targets.EightGaussians(radius=4.0, scale=0.7, shift=[3.0, -1.0], weights=UNEQUAL),
    "student": targets.StudentT(),
    "student, df=5.5": targets.StudentT(5.5),
    "logistic": targets.BayesianLogisticRegression(X[:6], y[:6], prior_precision=1.0, fit_intercept=True),
    "diffusion": targets.ConditionedDiffusion(10),
    "diffusion, bounded": public_code.BoundedDiffusion(10),
    "network": of_line(noise_precision=NOISE / Y_LINE.var()),
    "network, gamma": of_line(hyperprior=HYPERPRIOR),
    "network, gamma of the noise": of_line(prior_precision=0.5, hyperprior=HYPERPRIOR),
    "network, gamma of the weights": of_line(noise_precision=NOISE / Y_LINE.var(), hyperprior=HYPERPRIOR),
    "network, weighted": of_line(hyperprior=HYPERPRIOR, sample_weight=np.arange(len(Y_LINE))),
    "logistic, weighted": targets.BayesianLogisticRegression(X[:6], y[:6], sample_weight=WEIGHTS),
    "funnel": targets.Funnel(2, scale=1.0),
    "mixture": targets.GaussianMixture(
        [[1.0, 2.0], [-2.0, 0.0]], [[[1.0, 0.3], [0.3, 0.5]], [[2.0, 0.0], [0.0, 1.0]]], [1, 3]
    ),
    "linear": targets.BayesianLinearRegression(X[:6], X[:6, 0] + y[:6], sample_weight=WEIGHTS),
    "multinomial": targets.BayesianMultinomialRegression(X[:6], [0, 1, 2, 0, 1, 2], sample_weight=WEIGHTS),
}
#: A new one that has defaults is here with these.
KNOWN = {targets.Target, *map(type, TARGETS.values())}
TARGETS |= {
    cls.__name__: cls()
    for cls in (getattr(targets, name) for name in targets.__all__)
    if isinstance(cls, type) and cls not in KNOWN
    if all(parameter.default is not parameter.empty for parameter in signature(cls).parameters.values())
}
SAMPLED = {name: target for name, target in TARGETS.items() if hasattr(target, "sample")}

every_target = every("target", TARGETS)
every_sampled = every("target", SAMPLED)
every_dtype = every("dtype", [torch.float32, torch.float64])


def points(target, dtype=torch.float64, n=7):
    return 2 * torch.randn(n, target.n_features, generator=generator(), dtype=dtype)


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# Scores, Jacobians and shapes


@every_target
def test_score_is_the_gradient_of_log_prob_and_its_jacobian_the_hessian(target):
    x = points(target)
    close(target.score_fn(x), targets.Target.score_fn(target, x))
    x = x[0]
    J = torch.autograd.functional.jacobian(lambda a: target.score_fn(a[None])[0], x)
    close(J, torch.autograd.functional.hessian(lambda a: target.log_prob(a[None])[0], x), 1e-9)


@every_dtype
@every("target", {name: target for name, target in TARGETS.items() if target.score_vjp})
def test_score_vjp_equals_autograd(target, dtype):
    x = points(target, dtype)
    expected, pull = autograd_pullback(target.score_fn, x)
    product = pull(x.flip(0))
    s, vjp = target.score_vjp(x)
    assert s.dtype == vjp(x).dtype == dtype
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    for _ in range(2):  # the second finds nothing overwritten
        close(vjp(x.flip(0)), product, tolerance)
    close(s, expected, tolerance)


@every("shape", {"some": (2, 3, 2), "none": (0,)})
@every_target
def test_rows_are_independent_and_leading_axes_are_batches(target, shape):
    """Also of points whose memory is not in the order of the axes."""
    x = normal(target.n_features, *shape).movedim(0, -1)
    rows = x.reshape(-1, target.n_features)
    close(target.log_prob(x), target.log_prob(rows).view(shape))
    close(target.score_fn(x), target.score_fn(rows).view(x.shape))
    torch.testing.assert_close(target.score_fn(rows)[2:3], target.score_fn(rows[2:3]))
    torch.testing.assert_close(target.log_prob(rows)[2:3], target.log_prob(rows[2:3]))
    if target.score_vjp:
        (s, vjp), (s_rows, vjp_rows) = target.score_vjp(x), target.score_vjp(rows)
        close(s, s_rows.view(x.shape))
        close(vjp(x.flip(-1)), vjp_rows(rows.flip(-1)).view(x.shape))


@every_dtype
@every_target
def test_type_follows_the_input_and_single_agrees_with_double(target, dtype):
    x = points(target, dtype)
    for moved in (target, target.to(dtype=dtype), target.to(dtype=torch.float32)):
        s = moved.score_fn(x)
        assert s.dtype == moved.log_prob(x).dtype == dtype
        close(s.double(), target.score_fn(x.double()), 1e-4)


@every_target
def test_moving_leaves_the_original_alone_and_other_processes_get_the_same(target):
    x = points(target)
    before = target.score_fn(x)
    target.to(dtype=torch.float32)
    for same in (target, pickle.loads(pickle.dumps(target))):  # noqa: S301
        close(same.score_fn(x), before, 0)


def test_scikit_learn_sees_something_it_can_split_but_not_convert_or_call():
    target = targets.Banana()
    assert target.shape == (1, target.n_features)
    assert target[np.arange(1), ...] is target
    assert not callable(target)
    assert not hasattr(target, "fit")
    refused(TypeError, "not an array", np.asarray, target)


@every("name", list(TARGETS))
def test_scores_and_their_slopes_are_finite_far_out(name):
    target = TARGETS[name]
    x = 1e3 * points(target)
    x[:, {"funnel": [0]}.get(name, [])] /= 1e3  # a logarithm
    if hasattr(target, "hyperprior") and target.hyperprior is not None:
        x[:, target._n_weights if hasattr(target, "_n_weights") else -2 :] /= 1e3  # logarithms of precisions
    s = target.score_fn(x.requires_grad_())
    (g,) = torch.autograd.grad(s.sum(), x)
    assert s.isfinite().all()
    assert g.isfinite().all()
    if target.score_vjp:
        assert target.score_vjp(x.detach())[1](torch.ones_like(x)).isfinite().all()


# Exact draws


@every("name", list(SAMPLED))
def test_exact_draws_satisfy_the_stein_identities(name):
    """E[s] = 0 and E[s_i f_j] = -E[d_i f_j], within 4 standard errors: with f the identity, where there is a
    covariance, and with a bounded f.
    """
    x = SAMPLED[name].sample(10_000, generator(1))
    s, d = TARGETS[name].score_fn(x), x.shape[1]
    scaled = (x - x.median(0).values) / x.abs().median(0).values
    functions = [(scaled.atan(), 1 / (1 + scaled.square()) / x.abs().median(0).values)]
    if name != "student":
        functions.append((x - x.mean(0), torch.ones_like(x)))
    identities = [s] + [s[:, :, None] * f[:, None, :] + slope[:, None, :] * torch.eye(d) for f, slope in functions]
    for values in identities:
        z = values.mean(0) / values.std(0) * len(x) ** 0.5
        assert z.abs().max() < 4


@every_sampled
def test_samplers_draw_from_their_generator_alone(target):
    before = torch.random.get_rng_state()
    first, again = (target.sample(5, generator(7)) for _ in range(2))
    assert (first.shape, first.dtype) == ((5, target.n_features), torch.float64)
    close(first, again, 0)
    close(target.to(dtype=torch.float32).sample(5, generator(7)), first, 1e-5)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert target.sample(0, generator()).shape == (0, target.n_features)


@every_sampled
def test_exact_targets_are_normalised(target):
    """Importance sampling from a wide bivariate Cauchy, over which the density is bounded, estimates its integral."""
    u = torch.rand(2, 400_000, generator=generator(), dtype=torch.float64)
    r, angle = 5 * (1 / u[0].square() - 1).sqrt(), 2 * math.pi * u[1]
    x = torch.stack([r * angle.cos(), r * angle.sin()], 1)
    proposal = (1 + (r / 5).square()).pow(-1.5) / (2 * math.pi * 25)
    w = target.log_prob(x).exp() / proposal
    assert abs(w.mean() - 1) < 4 * w.std() / len(w) ** 0.5 < 0.1


# Toys


def test_student_has_the_paper_s_map_and_independent_t():
    A = np.array([[0.2822, -0.1180], [-0.1180, 0.2959]])
    np.testing.assert_allclose(targets.StudentT().A, A, atol=5e-5)
    target = targets.StudentT(3.0)
    x = points(target) * torch.logspace(-3, 6, 7, dtype=torch.float64)[:, None]
    z = np.linalg.solve(target.A.numpy(), x.numpy().T).T
    expected = scipy.stats.t(3.0).logpdf(z).sum(1) - np.log(np.linalg.det(target.A))
    np.testing.assert_allclose(target.log_prob(x), expected, rtol=1e-10)
    z = np.linalg.solve(target.A.numpy(), target.sample(50_000, generator()).numpy().T)
    for row in z:
        assert scipy.stats.kstest(row, scipy.stats.t(3.0).cdf).pvalue > 1e-3


FAR = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 2.0], [-3.0, -1.0]])


@every("name", ["multimodal", "x-shaped", "eight Gaussians", "eight shifted, unequal", "student"])
def test_single_precision_is_right_very_far_out(name):
    """Scores of mixtures and heavy tails in float32; slopes are never NaN."""
    target, x = TARGETS[name], 1e8 * FAR
    s, pull = autograd_pullback(target.score_fn, x)
    expected = target.score_fn(x.double())
    assert ((s - expected).norm(dim=1) < 1e-4 * expected.norm(dim=1)).all()
    assert pull(torch.ones_like(x)).isfinite().all()
    assert target.score_vjp(x)[1](torch.ones_like(x)).isfinite().all()
    assert target.log_prob(x).isfinite().all()


def test_student_in_single_precision_has_the_right_slopes_far_out():
    pull, expected = (targets.StudentT().score_vjp(1e8 * x)[1](x).double() for x in (FAR, FAR.double()))
    close(pull * 1e16, expected * 1e16, 1e-3)  # slopes are of the size 1e-16


def test_eight_gaussians_stand_where_the_paper_has_them():
    i = torch.arange(1, 9) * math.pi / 4
    close(targets.EightGaussians().means, 10 * torch.stack([i.cos(), i.sin()], 1).double(), 1e-5)
    close(TARGETS["eight shifted, unequal"].means.mean(0), torch.tensor([3.0, -1.0]).double())


# Diffusion


def published_observations(d):
    """Take the path and the observations from torch's global stream, seeded by 2022."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2022)
        path, dt = [torch.zeros(1)], 1 / d
        for increment in torch.randn((d, 1)):
            path.append(path[-1] + 10 * path[-1] * (1 - path[-1] ** 2) * dt + increment * np.sqrt(dt))
        observed = torch.stack(path)[5::5]
        return (observed + 0.1 * torch.randn_like(observed))[:, 0]


@every("d", [10, 100])
def test_the_observations_are_the_published_ones_bit_for_bit(d):
    before = torch.random.get_rng_state()
    target = targets.ConditionedDiffusion(d)
    assert torch.equal(target.observations, published_observations(d).double())
    assert torch.equal(public_code.BoundedDiffusion(d).observations, target.observations)
    assert torch.equal(torch.random.get_rng_state(), before)


# Logistic regression


def test_logistic_regression_adds_its_intercept_only_when_asked_and_takes_any_two_labels():
    plain = targets.BayesianLogisticRegression(np.column_stack([np.ones(30), X]), y, prior_precision=0.3)
    own = targets.BayesianLogisticRegression(X, y, prior_precision=0.3, fit_intercept=True)
    torch.testing.assert_close(plain.score_fn(points(plain)), own.score_fn(points(own)))
    numbers, named = (targets.BayesianLogisticRegression(X, a) for a in (y, np.where(y == 1, "yes", "no")))
    assert numbers.n_features == 3
    torch.testing.assert_close(named.score_fn(points(named)), numbers.score_fn(points(numbers)))


# Networks

OUTPUT = X[:, 0] ** 2 + X[:, 1] + 0.1 * rng.normal(size=30)
DRAWS = rng.normal(size=(20, 21))


def network(X=X, y=OUTPUT, **settings):
    return targets.BayesianNeuralNetwork(X, y, n_hidden=4, **settings)


@every("p, d", [(13, 751), (9, 551)])
def test_a_network_has_the_parameters_of_the_paper_s(p, d):
    data = rng.normal(size=(10, p)), rng.normal(size=10)
    assert targets.BayesianNeuralNetwork(*data).n_features == d
    assert targets.BayesianNeuralNetwork(*data, hyperprior=(1.0, 0.1)).n_features == d + 2
    assert targets.BayesianNeuralNetwork(*data, hyperprior=(1.0, 0.1), prior_precision=1.0).n_features == d + 1


@every("name, column", [("prior_precision", 21), ("noise_precision", 22)])
def test_a_given_precision_is_a_learned_one_held_still(name, column):
    """Scores of weights agree, and log p up to a constant."""
    learned = network(hyperprior=HYPERPRIOR)
    theta = torch.as_tensor(np.column_stack([DRAWS, rng.normal(size=(20, 2))]))
    theta[:, column] = np.log(3.0)
    rest = [i for i in range(23) if i != column]
    given = network(hyperprior=HYPERPRIOR, **{name: 3.0 / (OUTPUT.var() if column == 22 else 1.0)})
    close(given.score_fn(theta[:, rest]), learned.score_fn(theta)[:, rest])
    difference = given.log_prob(theta[:, rest]) - learned.log_prob(theta)
    close(difference, difference[:1].expand_as(difference))
    np.testing.assert_allclose(given.predictive_sd(theta[:, rest], X), learned.predictive_sd(theta, X))


def test_a_precision_too_small_for_a_number_has_a_log_density():
    target, theta = network(hyperprior=HYPERPRIOR), torch.zeros(2, 23).double()
    theta[:, 21] = torch.tensor([-800.0, -900.0])  # of which the exponentials are zero
    a, b = target.log_prob(theta)
    assert a - b == pytest.approx(100 * (HYPERPRIOR[0] + 21 / 2))


def test_other_units_of_the_data_change_nothing_but_the_units():
    """With y' = c y + e the noise precision is 1 / c^2 of itself, and densities are 1 / c of themselves."""
    c, X_, y_ = 100.0, X * [1, 10, 1e-3] + [0, 5, -7], 100.0 * OUTPUT + 3
    one, other = network(noise_precision=4.0), network(X_, y_, noise_precision=4.0 / c**2)
    theta = torch.as_tensor(DRAWS)
    close(other.score_fn(theta), one.score_fn(theta), 1e-9)
    np.testing.assert_allclose(other.predict(DRAWS, X_), c * one.predict(DRAWS, X) + 3)
    np.testing.assert_allclose(other.predictive_sd(DRAWS, X_), c * one.predictive_sd(DRAWS, X))
    assert other.rmse(DRAWS, X_, y_) == pytest.approx(c * one.rmse(DRAWS, X, OUTPUT))
    assert other.nll(DRAWS, X_, y_) == pytest.approx(one.nll(DRAWS, X, OUTPUT) + math.log(c))


def test_the_noise_precision_may_be_set_anew():
    target, theta = network(), torch.as_tensor(DRAWS)
    close(target.score_fn(theta), network(noise_precision=10 / OUTPUT.var()).score_fn(theta))
    target.noise_precision = 3.0
    close(target.score_fn(theta), network(noise_precision=3.0).score_fn(theta))
    assert target.nll(DRAWS, X, OUTPUT) == network(noise_precision=3.0).nll(DRAWS, X, OUTPUT)


@every("target", [network(), network(hyperprior=(1.0, 0.1)), targets.BayesianLogisticRegression(X, y)])
def test_subsets_are_unbiased(target):
    """The mean of log p, score and product over all single observations is that of all of the data."""
    x = points(target)
    parts = [target.subset(torch.tensor([i])) for i in range(30)]
    close(torch.stack([part.log_prob(x) for part in parts]).mean(0), target.log_prob(x))
    close(torch.stack([part.score_fn(x) for part in parts]).mean(0), target.score_fn(x))
    products = [part.score_vjp(x)[1](x.flip(0)) for part in parts]
    close(torch.stack(products).mean(0), target.score_vjp(x)[1](x.flip(0)))


def test_parts_join_without_a_seam(monkeypatch):
    target, theta = network(hyperprior=(1.0, 0.1)), points(network(hyperprior=(1.0, 0.1)))
    whole = target.log_prob(theta), *(f(theta) for f in target.score_vjp(theta)[1:]), target.outputs(theta, X)
    monkeypatch.setattr(_network, "PART", 2 * 30 * 4)  # two draws at a time
    parts = target.log_prob(theta), *(f(theta) for f in target.score_vjp(theta)[1:]), target.outputs(theta, X)
    for a, b in zip(whole, parts, strict=True):
        close(torch.as_tensor(b), torch.as_tensor(a))


@every("hyperprior", [None, (1.0, 0.1)])
def test_the_predictive_density_is_the_mixture_over_draws(hyperprior):
    target = network(hyperprior=hyperprior)
    draws = DRAWS if hyperprior is None else np.column_stack([DRAWS, rng.normal(size=(20, 2))])
    W, b_1, w, b_2 = np.split(DRAWS, [12, 16, 20], 1)
    inputs = (X - X.mean(0)) / X.std(0)
    hidden = np.maximum(0, inputs @ W.reshape(20, 3, 4) + b_1[:, None])
    f = OUTPUT.mean() + OUTPUT.std() * ((hidden @ w[:, :, None])[:, :, 0] + b_2)
    sd = OUTPUT.std() * (np.full((20, 1), 0.1**0.5) if hyperprior is None else np.exp(-draws[:, -1:] / 2))
    np.testing.assert_allclose(target.outputs(draws, X), f)
    np.testing.assert_allclose(target.predict(draws, X), f.mean(0))
    np.testing.assert_allclose(target.predictive_sd(draws, X) ** 2, f.var(0) + (sd**2).mean())
    density = norm(f, sd).pdf(OUTPUT).mean(0)
    np.testing.assert_allclose(target.log_predictive(draws, X, OUTPUT), np.log(density))
    assert target.nll(draws, X, OUTPUT) == pytest.approx(-np.log(density).mean())
    assert target.rmse(draws, X, OUTPUT) == pytest.approx(np.sqrt(((f.mean(0) - OUTPUT) ** 2).mean()))
    assert np.isfinite(target.log_predictive(draws, X, OUTPUT + 1e4)).all()  # far from every draw
    single = target.to(dtype=torch.float32).outputs(torch.as_tensor(draws), X)
    np.testing.assert_allclose(single, f, rtol=1e-4, atol=1e-4)


def test_a_constant_column_or_output_is_centred_and_no_more():
    target = network(np.column_stack([X[:, :2], np.full(30, 0.1)]))
    assert target.X_scale[2] == 1
    assert target.score_fn(torch.as_tensor(DRAWS)).isfinite().all()
    assert network(y=np.full(30, 0.1)).y_scale == 1


# Targets of one's own


def test_a_subclass_with_a_wrong_log_prob_is_told():
    with pytest.raises(ValueError, match=r"\(3, 1\), expected \(3,\)"):
        own(2, log_prob=lambda x: -x.square().sum(-1, keepdim=True)).score_fn(torch.ones(3, 2))
    refused(TypeError, "score_fn", lambda: own(1).score_fn(torch.ones(1, 1)))


def weighted_network(X, y, w, **settings):
    return targets.BayesianNeuralNetwork(X, X[:, 0] + y, n_hidden=3, sample_weight=w, **settings)


MODELS = {
    "network, gamma": partial(weighted_network, hyperprior=(1.0, 0.1)),
    "network": partial(weighted_network, noise_precision=3.0),
    "logistic": lambda X, y, w: targets.BayesianLogisticRegression(X, y, fit_intercept=True, sample_weight=w),
    "linear": lambda X, y, w: targets.BayesianLinearRegression(X, X[:, 0] + y, sample_weight=w),
    "multinomial": lambda X, y, w: targets.BayesianMultinomialRegression(X, y + (X[:, 1] > 0), sample_weight=w),
}
every_model = every("model", MODELS)


@every_model
def test_weights_are_numbers_of_repetitions(model):
    times = np.arange(len(y)) % 3 + 1
    weighted, repeated = model(X, y, times), model(np.repeat(X, times, axis=0), np.repeat(y, times), None)
    x, v = points(weighted), points(weighted).flip(0)
    close(weighted.score_fn(x), repeated.score_fn(x), 1e-8)
    close(weighted.score_vjp(x)[1](v), repeated.score_vjp(x)[1](v), 1e-8)
    log_ratio = weighted.log_prob(x) - repeated.log_prob(x)
    close(log_ratio, log_ratio[:1].expand_as(log_ratio), 1e-7)


@every_view
@every_model
def test_data_may_have_any_layout(model, view):
    w = np.arange(len(y)) % 3 + 1.0
    plain, other = model(X, y, w), model(view(X), view(y), view(w))
    assert torch.equal(other.score_fn(points(plain)), plain.score_fn(points(plain)))


# Densities written a second time, and settings that are out of range


def logistic(beta):
    rows = np.column_stack([np.ones(6), X[:6]])
    return norm().logpdf(beta).sum() + scipy.stats.bernoulli(expit(rows @ beta)).logpmf(y[:6]).sum()


def diffusion(drift, x, dt=0.1):
    before, observations = np.r_[0, x[:-1]], published_observations(10).numpy()
    return norm(before + drift(before) * dt, dt**0.5).logpdf(x).sum() + norm(x[4::5], 0.1).logpdf(observations).sum()


def gammas(logs, shape, rate):
    return scipy.stats.gamma(shape, scale=1 / rate).logpdf(np.exp(logs)).sum() + logs.sum()


def relu_network(theta, lam=1.0, gamma=NOISE):
    W, b_1, w, b_2 = np.split(theta, [2, 4, 6])
    x, t = ((a - a.mean()) / a.std() for a in (X_LINE, Y_LINE))
    f = np.maximum(0, x * W + b_1) @ w + b_2
    return norm(0, lam**-0.5).logpdf(theta).sum() + norm(f, gamma**-0.5).logpdf(t).sum()


def linear(theta):
    beta, (lam, gamma) = theta[:-2], np.exp(theta[-2:])
    likelihood = WEIGHTS @ norm(X[:6] @ beta, gamma**-0.5).logpdf(X[:6, 0] + y[:6])
    return norm(0, lam**-0.5).logpdf(beta).sum() + likelihood + gammas(theta[-2:], 1.0, 0.1)


def multinomial(B):
    shares = log_softmax(X[:6] @ B.reshape(3, 3), axis=1)
    return norm().logpdf(B).sum() + WEIGHTS @ shares[range(6), [0, 1, 2, 0, 1, 2]]


WRITTEN_TWICE = {
    "logistic": logistic,
    "diffusion": partial(diffusion, lambda x: 10 * x * (1 - x**2)),
    "diffusion, bounded": partial(diffusion, lambda x: 10 * x * (1 - x**2) / (1 + x**2)),
    "network": relu_network,
    "network, gamma": lambda theta: relu_network(theta[:-2], *np.exp(theta[-2:])) + gammas(theta[-2:], *HYPERPRIOR),
    "linear": linear,
    "multinomial": multinomial,
    "funnel": lambda x: norm().logpdf(x[0]) + norm(0, np.exp(x[0] / 2)).logpdf(x[1]),
}


@every("name", list(WRITTEN_TWICE))
def test_the_density_is_that_of_the_model(name):
    """Up to a constant: of those with an exact sampler, it is that of their draws as well."""
    x = 0.7 * normal(6, TARGETS[name].n_features)
    log_ratio = TARGETS[name].log_prob(x) - torch.tensor([WRITTEN_TWICE[name](row) for row in x.numpy()])
    close(log_ratio, log_ratio[:1].expand_as(log_ratio), 1e-6)


#: Targets, arguments that are right, and for some of the others what they may not be.
SETTINGS = [
    (targets.EightGaussians, {}, {"radius": [0.0], "scale": [-1.0], "shift": [[1.0, 2.0, 3.0], np.nan]}),
    (targets.EightGaussians, {}, {"weights": [[1.0] * 7, [0.0] + [1.0] * 7]}),
    (targets.StudentT, {}, {"df": [0.0, "2"]}),
    (targets.ConditionedDiffusion, {}, {"n_features": [0]}),
    (targets.BayesianLogisticRegression, {"X": X, "y": y}, {"prior_precision": [0.0]}),
    (targets.BayesianNeuralNetwork, {"X": X, "y": y}, {"hyperprior": [(1.0, 0.0), (1.0, 0.1, 1.0)], "n_hidden": [0]}),
    (targets.BayesianNeuralNetwork, {"X": X, "y": y}, {"prior_precision": [0.0], "noise_precision": [-1.0]}),
    (targets.from_score_fn, {"score_fn": torch.neg}, {"n_features": [0]}),
    (targets.Funnel, {}, {"n_features": [1], "scale": [0.0]}),
    (targets.GaussianMixture, {"means": np.eye(2)}, {"covariances": [[[[1.0]]], -1.0], "weights": [[1.0, 0.0]]}),
    (targets.GaussianMixture, {"means": [[0.0, 0.0]]}, {"covariances": [[[[1.0, 2.0], [2.0, 1.0]]]]}),
    (targets.GaussianMixture, {}, {"means": [[1.0, 2.0], [[np.nan]]]}),
]
BOTH_GIVEN = {"hyperprior": (1.0, 0.1), "prior_precision": 1.0, "noise_precision": 1.0}
MISFITS = [
    (lambda: network().predict(DRAWS[:, :20], X), (), r"`draws` has shape \(20, 20\), expected \(n_draws, 21\)"),
    (lambda: network().predict(DRAWS, X[:, :2]), (), "`X` has 2 columns, expected 3"),
    (lambda: network().rmse(DRAWS, X, OUTPUT[:5]), (), "inconsistent"),
    (targets.ConditionedDiffusion, (12,), "multiple of 5"),
    *((targets.BayesianLogisticRegression, (X, labels), "two classes") for labels in (np.zeros(30), np.arange(30))),
    (partial(targets.BayesianNeuralNetwork, **BOTH_GIVEN), (X, y), "leave one of them out"),
    (targets.from_score_fn, (3, 2), "callable"),
    *(
        (partial(make, **right | {name: value}), (), name)
        for make, right, wrong in SETTINGS
        for name, values in wrong.items()
        for value in values
    ),
]


@every("make, args, message", MISFITS)
def test_a_setting_out_of_range_is_named(make, args, message):
    refused((TypeError, ValueError), message, lambda: make(*args))
