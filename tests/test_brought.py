"""What people bring in a first week: each kind is right, or told once by what it is, over generated members."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from skksivi import KSIVIApproximator
from skksivi.baselines import Laplace
from skksivi.score._target import resolve_score
from skksivi.targets import from_log_prob

SEEDS = range(20)


def resolved(target, d=None):
    return resolve_score(target, d, dtype=torch.float32, device=torch.device("cpu"))


def words_of(act):
    """All that is said by warnings and an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            act()
        except Exception as error:
            caught = [*caught, error]
    return [str(getattr(item, "message", item)) for item in caught]


def regression(seed, dtype):
    """The design and the response of a regression."""
    rng = np.random.RandomState(seed)
    n, d = rng.randint(10, 40), rng.randint(1, 6)
    return (torch.from_numpy(a).to(dtype) for a in (rng.normal(size=(n, d)), rng.normal(size=n)))


# Types


def density(seed, dtype):
    """A log-density whose data stay of a type, as a function or by a module, and its number of features."""
    A, y = regression(seed, dtype)
    if seed % 2:
        return lambda x: -(y - x @ A.mT).square().sum(1) / 2 - x.square().sum(1) / 8, A.shape[1]
    layer = nn.Linear(A.shape[1], 3, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(A[:3])
        layer.bias.copy_(y[:3])
    return lambda x: -layer(x).tanh().square().sum(1) - x.square().sum(1) / 8, A.shape[1]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_density_is_evaluated_in_the_type_that_it_takes(seed):
    (single, d), (double, _) = (density(seed, dtype) for dtype in (torch.float32, torch.float64))
    x = torch.randn(50, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = resolved(from_log_prob(single, d)).double.log_prob(x)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.detach(), double(x).detach(), rtol=1e-4, atol=1e-4)


def test_a_density_of_single_precision_is_fitted():
    log_prob, d = density(1, torch.float32)
    q = KSIVIApproximator(random_state=0).fit(from_log_prob(log_prob, d))
    A, y = regression(1, torch.float64)
    covariance = torch.linalg.inv(A.mT @ A + torch.eye(d) / 4)
    off = (q.sample(20_000).mean(0) - (covariance @ A.mT @ y).numpy()) / covariance.diagonal().sqrt().numpy()
    assert np.abs(off).max() < 0.05


def test_inference_tensors_are_told_by_their_name():
    with torch.inference_mode():
        A = torch.ones(5, 2, dtype=torch.float64)
    words = words_of(lambda: Laplace().fit(from_log_prob(lambda x: -(x @ A.mT).square().sum(1), 2)))
    assert len(words) == 1
    assert "inference_mode" in words[0]


# Functions of one point


@pytest.mark.parametrize("seed", SEEDS)
def test_a_function_of_one_point_is_told(seed):
    A, y = regression(seed, torch.float64)
    d = A.shape[1]
    kinds = [
        from_log_prob(lambda b: -((A.to(b) @ b - y.to(b)) ** 2).sum() / 2, d),
        from_log_prob(lambda b: -(b**2).sum() / 2 - b[0] ** 4 + torch.logsumexp(b, 0), d),
        lambda b: A.mT.to(b) @ (y.to(b) - A.to(b) @ b),
        lambda b: A.numpy().T @ (y.numpy() - A.numpy() @ np.asarray(b).astype(float)),
    ]
    words = words_of(lambda: Laplace().fit(kinds[seed % 4], n_features=d))
    assert len(words) == 1, words
    assert f"takes one point, of shape ({d},)" in words[0]


# Units


@pytest.mark.parametrize("seed", SEEDS)
def test_a_gaussian_in_physical_units_is_no_asymmetric_score(seed):
    rng = np.random.RandomState(seed)
    d = rng.randint(2, 6)
    scale, root = 10.0 ** rng.uniform(-9, 7, d), rng.normal(size=(d, d))
    correlation = root @ root.T + 0.3 * np.eye(d)
    P = torch.from_numpy(np.linalg.inv(correlation) / np.outer(scale, scale))
    mean = torch.from_numpy(scale * rng.normal(size=d) * 50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolved(lambda x: ((mean - x.double()) @ P).to(x), d)


# Derivatives that are not finite where the density is

BRANCHES = {
    "sqrt": lambda v, ok: torch.where(ok, v.sqrt(), 0.0),
    "quotient": lambda v, ok: torch.where(ok, (1 / (v.abs() + v)).atan(), 0.0),
    "log": lambda v, ok: torch.where(ok, v.log().square(), 0.0),
    "power": lambda v, ok: torch.where(ok, v**0.5, v.new_zeros(())),
}


@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_branch_whose_derivative_is_nan_is_told_by_its_point(name, d, sign):
    def log_prob(x):
        v = sign * x[:, -1]
        return -x.square().sum(1) / 2 - 0.1 * BRANCHES[name](v, v > 0)

    words = words_of(lambda: resolved(from_log_prob(log_prob, d)))
    assert len(words) == 1, words
    assert "is finite and its gradient is not" in words[0]
    assert "torch.where" in words[0]


# Bounds written as minus infinity


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bound_is_told_once_and_nothing_else_is(seed):
    rng = np.random.RandomState(seed)
    y, low, width = torch.from_numpy(rng.normal(0, 0.9, 20)), rng.uniform(-1, 0), rng.uniform(0.5, 2)

    def log_prob(x):
        mu, v = x[:, 0], x[:, 1]
        inside = (v > low) & (v < low + width)
        s = torch.where(inside, v - low + 0.1, 0.5)
        log_p = -(y.to(x) - mu[:, None]).square().sum(1) / 2 / s.square() - len(y) * s.log() - mu.square() / 50
        return torch.where(inside, log_p, -torch.inf)

    target = from_log_prob(log_prob, 2)
    words = words_of(lambda: Laplace(init=[0.0, low + width / 2], random_state=0).fit(target))
    assert len(words) == 1, words
    assert "seems bounded" in words[0]
    assert 'constrained(log_prob, {"x0": "real", "x1": ' in words[0]
