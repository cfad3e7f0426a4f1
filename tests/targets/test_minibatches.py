"""Scores that see a part of the data at a time: unbiased products, and fits to the posterior of all of the data."""

import re

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from members import every, refused
from plain_targets import normal, resolved
from sklearn.base import clone

from skksivi import KSIVIApproximator, targets
from skksivi.baselines import SIVI, SVGD, FullRankVI, MeanFieldVI
from skksivi.coordinates._affine import Affine
from skksivi.coordinates._whitening import score_for_training
from skksivi.kernels import Gaussian
from skksivi.metrics import sliced_wasserstein
from skksivi.parameters import Pilot
from skksivi.pilot import _large_data
from skksivi.pilot._large_data import MAX_ERROR, TOLERANCE, Expansion, corrected, large_data
from skksivi.score._score import Halves
from skksivi.start import find_whitening
from skksivi.stein._estimators import GRADIENT_ESTIMATORS, value_and_gradients
from skksivi.targets import BayesianLogisticRegression, Minibatches, from_rows

pytestmark = pytest.mark.usefixtures("uncertified")


N_ROWS, D = 200, 3
X = np.random.RandomState(0).normal(size=(N_ROWS, D)) * [1.0, 0.5, 2.0]
Y = np.random.RandomState(1).uniform(size=N_ROWS) < 1 / (1 + np.exp(-X @ [1.0, -1.0, 0.3]))
FULL = BayesianLogisticRegression(X, Y, prior_precision=1.0)


def by_rows(X, Y, takes_tensors):
    """The same posterior in plain torch or plain numpy."""

    def score_fn(x, rows):
        if takes_tensors and isinstance(x, torch.Tensor):
            A, y = torch.as_tensor(X).to(x)[rows], torch.as_tensor(Y).to(x)[rows]
            return len(X) / len(rows) * (y - torch.sigmoid(x @ A.T)) @ A - x
        assert isinstance(x, np.ndarray)
        assert isinstance(rows, np.ndarray)
        return len(X) / len(rows) * (Y[rows] - 1 / (1 + np.exp(-x @ X[rows].T))) @ X[rows] - x

    return from_rows(score_fn, n_rows=len(X), n_features=D)


def three_ways(X, Y):
    return {
        "own product": BayesianLogisticRegression(X, Y, prior_precision=1.0),
        "autograd": by_rows(X, Y, takes_tensors=True),
        "differences": by_rows(X, Y, takes_tensors=False),
    }


TARGETS = three_ways(X, Y)


def score_in_u(target, seed=0):
    score = resolved(target)
    generator = torch.Generator().manual_seed(seed)
    whitening, _ = find_whitening("laplace", score, generator)
    return score_for_training(score, whitening, generator)


def test_all_three_ways_see_the_same_minibatches_and_products():
    u, expected = normal(6, D), None
    for target in TARGETS.values():
        halves = score_in_u(Minibatches(target, 10))
        assert isinstance(halves, Halves)
        s, pull = halves.with_pullback(u)
        expected = expected or (s, pull(u))
        torch.testing.assert_close((s, pull(u)), expected, rtol=1e-5, atol=1e-6)  # of one minibatch


def gradient(halves, u, estimator):
    s, pull = halves.with_pullback(u)
    _, du, df = value_and_gradients(u, s + u, Gaussian(bandwidth=1.0), GRADIENT_ESTIMATORS[estimator])
    return du + pull(df)


def excess(target, u, estimator, n=400):
    """By how many standard errors the mean gradient over minibatches differs from that of all of the data."""
    halves = score_in_u(target)
    gradients = torch.stack([gradient(halves, u, estimator) for _ in range(n)])
    exact = gradient(score_in_u(FULL), u, estimator)
    return ((gradients.mean(0) - exact) / gradients.std(0) * n**0.5).abs().max()


def test_the_gradient_is_unbiased_and_would_not_be_with_one_minibatch():
    u = normal(8, D)
    assert excess(Minibatches(FULL, 5), u, "vanilla") < 4.5  # the largest of 24
    assert excess(Minibatches(FULL, 5), u, "u-statistic") > 10  # pairs within a half share their minibatch


TRAINED = KSIVIApproximator(whiten=Pilot(budget=20_000), max_iter=300, batch_size=65, random_state=0)


@pytest.fixture(scope="module")
def whole():
    return clone(TRAINED).set_params(early_stopping=False).fit(FULL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gradient_estimator"),
    [("own product", "u-statistic"), ("differences", "u-statistic"), ("autograd", "vanilla")],
)
def test_a_fit_by_minibatches_is_one_to_the_posterior_of_all_of_the_data(name, gradient_estimator, whole):
    q = clone(TRAINED).set_params(gradient_estimator=gradient_estimator).fit(Minibatches(TARGETS[name], 50))
    draws, other, reference = (a.sample(1000, random_state=i) for i, a in enumerate([q, whole, whole]))
    floor = sliced_wasserstein(other, reference, random_state=0)
    assert sliced_wasserstein(draws, reference, random_state=0) < 2 * floor
    assert not np.array_equal(q.loss_curve_, whole.loss_curve_)


def test_a_target_without_rows_is_refused():
    refused(TypeError, r"no `n_rows`.*from_rows", lambda: Minibatches(lambda x: -x, 10))
    for wrong in (0, 2.5):
        refused((TypeError, ValueError), "batch_size", Minibatches, FULL, wrong)


def test_a_score_that_draws_by_itself_is_told():
    noise, rng = torch.Generator().manual_seed(0), np.random.RandomState(0)
    q = KSIVIApproximator(whiten=None, max_iter=2, random_state=0)
    with pytest.warns(UserWarning, match=r"different values.*Minibatches"):
        q.fit(lambda x: -x + torch.randn(x.shape, generator=noise), n_features=2)
    with pytest.raises(ValueError, match="different values"):
        q.fit(lambda x: -x.astype(float) + rng.normal(size=x.shape), n_features=2)


@pytest.mark.parametrize(
    "q",
    [
        SVGD(n_particles=50, max_iter=100, random_state=0),
        MeanFieldVI(max_iter=400, random_state=0),
        FullRankVI(max_iter=400, random_state=0),
        pytest.param(SIVI(max_iter=700, learning_rate=0.01, random_state=0), marks=pytest.mark.slow),
    ],
    ids=lambda q: type(q).__name__,
)
def test_minibatches_lead_where_all_of_the_data_do(q):
    whole, part = (clone(q).fit(target).sample(5000, random_state=0) for target in (FULL, Minibatches(FULL, 50)))
    assert np.abs((whole.mean(0) - part.mean(0)) / whole.std(0)).max() < 0.3
    np.testing.assert_allclose(part.std(0) / whole.std(0), 1, atol=0.2)
    assert not np.array_equal(whole, part)


# All of the data, a block at a time

WEIGHTS = np.linspace(0, 2, N_ROWS)
DIVISIBLE = {
    **TARGETS,
    "weighted": BayesianLogisticRegression(X, Y, sample_weight=WEIGHTS),
    "multinomial": targets.BayesianMultinomialRegression(X, Y + (X[:, 0] > 1), sample_weight=WEIGHTS),
    "network": targets.BayesianNeuralNetwork(X, X[:, 0], n_hidden=2, hyperprior=(1.0, 0.1)),
}


def shrink_blocks(monkeypatch):
    for name, value in {"N_BLOCK": 16, "MAX_PAIRS": 64, "MAX_MATRIX": 100}.items():
        monkeypatch.setattr(f"skksivi.targets._base.{name}", value)


@every("target", DIVISIBLE)
def test_blocks_of_rows_give_the_score_and_products_of_all_of_them(target):
    x, v = (normal(7, target.n_features, seed=k) for k in (0, 1))
    whole = resolved(target)
    expected = whole(x), whole.product(x, v)
    with pytest.MonkeyPatch.context() as patch:
        shrink_blocks(patch)
        score = resolved(Minibatches(target, 10))
        assert score.by_differences == whole.by_differences
        torch.testing.assert_close((score(x), score.product(x, v)), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(target.score_fn(x) if target.score_vjp else whole(x), expected[0])
        if target.score_vjp:
            torch.testing.assert_close(target.score_vjp(x)[1](v), expected[1])


def test_no_matrix_of_points_by_rows_is_larger_than_a_block(monkeypatch):
    shrink_blocks(monkeypatch)
    seen = []
    target = from_rows(lambda x, rows: seen.append(len(x) * len(rows)) or -x, n_rows=N_ROWS, n_features=D)
    score = resolved(Minibatches(target, 10))
    x = normal(500, D)
    score.product(x, score(x))
    assert max(seen) <= 64


# Expansions at the mode

N_MANY = 6000
MANY = np.random.RandomState(2).standard_t(4, size=(N_MANY, D))
LABELS = np.random.RandomState(3).uniform(size=N_MANY) < 1 / (1 + np.exp(-MANY @ [1.0, -1.0, 0.3]))
LARGE = three_ways(MANY, LABELS)


@every("target", LARGE)
@every("slopes", [True, False])
def test_corrected_parts_have_the_score_and_product_of_all_as_their_mean(target, slopes):
    """Exactly, wherever the expansion is made and the points are, also beyond its reach."""
    score = resolved(target)
    x, v = 2 * normal(2, 20, D)
    at, e = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64), torch.eye(D, dtype=torch.float64)
    every = at.expand(D, D).clone()
    L = torch.linalg.cholesky(torch.linalg.inv(-score.product(every, e)))
    expansion = Expansion(Affine(at, L), torch.linalg.inv(L), score(at[None])[0] @ L)
    parts = [
        corrected(resolved(target.subset(rows)), expansion, slopes=slopes)
        for rows in torch.randperm(N_MANY, generator=torch.Generator().manual_seed(1)).split(500)
    ]
    torch.testing.assert_close(torch.stack([p(x) for p in parts]).mean(0), score(x), rtol=1e-4, atol=1e-3)
    products = torch.stack([p.product(x, v) for p in parts]).mean(0)
    torch.testing.assert_close(products, score.product(x, v), rtol=1e-4, atol=1e-2)
    for part in parts:
        torch.testing.assert_close(part(at[None]), score(at[None]), rtol=1e-5, atol=1e-5)
        if slopes:
            torch.testing.assert_close(part.product(every, e), score.product(every, e), rtol=1e-4, atol=1e-2)


@pytest.mark.slow
@settings(max_examples=4)
@given(n=st.integers(2000, 10_000), d=st.integers(1, 8), k=st.integers(2, 10), seed=st.integers(0, 10**6))
@example(n=9568, d=2, k=2, seed=1146)
def test_minibatches_of_any_data_are_right_at_the_mode_and_in_the_mean(n, d, k, seed):
    rng = np.random.RandomState(seed)
    A, y = rng.standard_t(4, size=(n, d)) * 10 ** rng.uniform(-1, 1, d), rng.uniform(size=n) < rng.uniform(0.1, 0.9)
    target = BayesianLogisticRegression(A, y)
    score = resolved(Minibatches(target, max(10, n // 20)))
    few, generator = large_data(score), torch.Generator().manual_seed(seed)
    map_ = find_whitening("laplace", score, generator)[0].map
    assert map_.whiten(few.mode[None]).square().mean() < TOLERANCE
    for x in (few.mode[None], map_.unwhiten(torch.randn(50, d, dtype=torch.float64, generator=generator))):
        exact = target.score_fn(x)
        plain, better = (f.minibatch(generator) for f in (score, few))
        errors = [map_.whiten_score(f(x) - exact).square().mean().sqrt().item() for f in (few, better, plain)]
        assert errors[0] < MAX_ERROR
        assert errors[1] < max(0.3 * errors[2], 1e-6)
    rows = torch.as_tensor(rng.permutation(n - n % k))
    of_parts = torch.stack([target.subset(part).score_fn(x) for part in rows.chunk(k)])
    torch.testing.assert_close(of_parts.mean(0), target.subset(rows).score_fn(x))


@every("name, dtype", [("own product", torch.float32), ("autograd", torch.float64), ("differences", torch.float64)])
def test_near_the_mode_minibatches_and_parts_agree_with_all_of_the_data(name, dtype):
    score = resolved(Minibatches(LARGE[name], 100), dtype=dtype)
    few, generator = large_data(score), torch.Generator().manual_seed(0)
    s, _ = find_whitening("laplace", score, generator)
    x = s.map.unwhiten(torch.randn(200, D, dtype=torch.float64, generator=generator)).to(dtype)

    def noise(f):
        return s.map.whiten_score((f(x) - score(x)).double()).square().mean().sqrt().item()

    assert few.mode is not None
    assert few.on_all_data().parts is None
    assert noise(few) < MAX_ERROR
    assert noise(few.minibatch(generator)) < noise(score.minibatch(generator)) / 30
    torch.testing.assert_close(few.on_all_data()(x), score(x))


def test_a_part_grows_until_it_agrees_with_all_of_the_data():
    """Columns that few rows have: an expansion cannot tell how they curve beyond a quadratic."""
    rare = np.random.RandomState(0).uniform(size=(8000, 2)) < [0.5, 0.001]
    y = np.random.RandomState(1).uniform(size=8000) < 0.3
    score = resolved(Minibatches(BayesianLogisticRegression(rare.astype(float), y), 100))
    few = large_data(score)
    x = few.mode + normal(50, 2) * 0.5
    torch.testing.assert_close(few(x), score(x))  # of all rows


def test_what_an_expansion_costs_is_told_and_counted(caplog):
    score = resolved(Minibatches(LARGE["autograd"], 100))
    before = score.tally.total
    with caplog.at_level("INFO", logger="skksivi"):
        large_data(score)
    (line,) = caplog.messages
    assert "1000 of 6000 rows stand for all" in line
    of_all, of_parts = map(int, re.findall(r"(\d+) (?:scores )?of (?:all|parts)", line))
    assert of_all + of_parts == score.tally.total - before
    assert of_all < 200


def test_without_a_single_mode_there_is_no_expansion():
    data = torch.as_tensor(np.random.RandomState(0).normal(size=(2000, 1)) + 4.0)

    def score_fn(x, rows):  # the mean of the data is x^2
        return len(data) / len(rows) * 2 * x * (data[rows].to(x) - x.T**2).sum(0)[:, None] - x

    score = resolved(Minibatches(from_rows(score_fn, n_rows=2000, n_features=1), 100))
    assert large_data(score) is score
    assert large_data(score, [1.0]).mode is not None  # where it starts, and nowhere else
    assert large_data(score, [[1.0], [-1.0]]) is score
    assert _large_data.large_data(resolved(FULL)).mode is None  # no minibatches


def test_a_training_on_minibatches_leaves_an_exact_start_where_it_is():
    target = LARGE["own product"]
    m, L = (a.numpy() for a in find_whitening("laplace", resolved(target), torch.Generator())[0].map)
    q = KSIVIApproximator(whiten=(m, L), max_iter=50, random_state=0).fit(Minibatches(target, 100))
    draws = (q.sample(20_000) - m) @ np.linalg.inv(L).T
    assert np.abs(draws.mean(0)).max() < 0.1
    assert np.abs(draws.std(0) - 1).max() < 0.1


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_pairs_of_one_minibatch_are_left_out_with_annealing_too():
    q = KSIVIApproximator(whiten="laplace", gradient_estimator="u-statistic", max_iter=3, early_stopping=False)
    q.set_params(batch_size=10, hidden_layer_sizes=(4,), random_state=0)
    plain, tempered = (
        clone(q).set_params(annealing=annealing).fit(Minibatches(FULL, batch_size=20)).loss_curve_
        for annealing in (None, lambda _: 1.0)
    )
    np.testing.assert_array_equal(plain, tempered)
