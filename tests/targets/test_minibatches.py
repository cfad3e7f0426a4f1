"""Scores that see a part of the data at a time: unbiased products, and fits to the posterior of all of the data."""

import numpy as np
import pytest
import torch

from skksivi import KSIVIApproximator
from skksivi.kernels import Gaussian
from skksivi.metrics import sliced_wasserstein
from skksivi.parameters import Checkpoint, Pilot
from skksivi.pilot._rules import find_whitening, pulled_back
from skksivi.score._score import Halves
from skksivi.score._target import resolve_score
from skksivi.stein._estimators import GRADIENT_ESTIMATORS
from skksivi.stein._fused import value_and_gradients
from skksivi.targets import BayesianLogisticRegression, Minibatches, from_rows

N_ROWS, D = 200, 3
X = np.random.RandomState(0).normal(size=(N_ROWS, D)) * [1.0, 0.5, 2.0]
Y = np.random.RandomState(1).uniform(size=N_ROWS) < 1 / (1 + np.exp(-X @ [1.0, -1.0, 0.3]))
FULL = BayesianLogisticRegression(X, Y, prior_precision=1.0)


def score_of_rows(x, rows):
    """The score of the same posterior in plain torch or plain numpy."""
    if isinstance(x, torch.Tensor):
        A, y = torch.as_tensor(X).to(x)[rows], torch.as_tensor(Y).to(x)[rows]
        residuals = y - torch.sigmoid(x @ A.T)
    else:
        A, y = X[rows], Y[rows]
        residuals = y - 1 / (1 + np.exp(-x @ A.T))
    return N_ROWS / len(rows) * residuals @ A - x


def score_of_arrays(x, rows):
    assert isinstance(x, np.ndarray)
    assert isinstance(rows, np.ndarray)
    return score_of_rows(x, rows)


TARGETS = {
    "own product": FULL,
    "autograd": from_rows(score_of_rows, n_rows=N_ROWS, n_features=D),
    "differences": from_rows(score_of_arrays, n_rows=N_ROWS, n_features=D),
}
EVERY_TARGET = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)


def score_in_u(target, seed=0):
    score = resolve_score(target, None, dtype=torch.float64, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    whitening, _ = find_whitening("laplace", score, generator)
    return pulled_back(score, whitening.map, generator)


def test_a_subset_weighs_its_rows_so_that_its_score_is_unbiased():
    x = torch.randn(5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    of_one_row = torch.stack([FULL.subset(torch.tensor([i])).score_fn(x) for i in range(N_ROWS)])
    torch.testing.assert_close(of_one_row.mean(0), FULL.score_fn(x))
    part = FULL.subset(torch.arange(7))
    s, vjp = part.score_vjp(x)
    torch.testing.assert_close(s, part.score_fn(x))
    x.requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(part.log_prob(x).sum(), x)[0], s)
    torch.testing.assert_close(vjp(s), torch.autograd.grad(part.score_fn(x), x, s)[0])


def test_all_three_ways_see_the_same_minibatches_and_products():
    u = torch.randn(6, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    results = []
    for target in TARGETS.values():
        halves = score_in_u(Minibatches(target, 10))
        assert isinstance(halves, Halves)
        s, pull = halves.with_pullback(u)
        results.append((s, pull(u)))
    for s, product in results:
        torch.testing.assert_close(s, results[0][0])
        torch.testing.assert_close(product, results[0][1], rtol=1e-5, atol=1e-6)  # of one minibatch


def gradient(halves, u, estimator):
    s, pull = halves.with_pullback(u)
    _, du, df = value_and_gradients(u, s + u, Gaussian(bandwidth=1.0), GRADIENT_ESTIMATORS[estimator])
    return du + pull(df)


def excess(target, u, estimator, n=1500):
    """By how many standard errors the mean gradient over minibatches differs from that of all of the data."""
    halves = score_in_u(target)
    gradients = torch.stack([gradient(halves, u, estimator) for _ in range(n)])
    exact = gradient(score_in_u(FULL), u, estimator)
    return ((gradients.mean(0) - exact) / gradients.std(0) * n**0.5).abs().max()


def test_the_gradient_is_unbiased_and_would_not_be_with_one_minibatch():
    u = torch.randn(8, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert excess(Minibatches(FULL, 5), u, "vanilla") < 4.5  # the largest of 24
    assert excess(Minibatches(FULL, 5), u, "u-statistic") > 10  # pairs within a half share their minibatch


@pytest.mark.slow
@EVERY_TARGET
@pytest.mark.parametrize("gradient_estimator", ["u-statistic", "vanilla"])
def test_a_fit_by_minibatches_is_one_to_the_posterior_of_all_of_the_data(target, gradient_estimator):
    settings = {"random_state": 0, "whiten": Pilot(budget=20_000), "max_iter": 300, "batch_size": 65}
    q = KSIVIApproximator(gradient_estimator=gradient_estimator, **settings).fit(Minibatches(target, 50))
    whole = KSIVIApproximator(**settings).fit(FULL)
    draws, other, reference = (a.sample(1000, random_state=i) for i, a in enumerate([q, whole, whole]))
    floor = sliced_wasserstein(other, reference, random_state=0)
    assert sliced_wasserstein(draws, reference, random_state=0) < 2 * floor
    assert not np.array_equal(q.loss_curve_, whole.loss_curve_)


def test_a_fit_by_minibatches_goes_on_from_its_checkpoint(tmp_path):
    settings = {"random_state": 0, "whiten": "laplace", "max_iter": 60, "batch_size": 22}
    whole = KSIVIApproximator(**settings).fit(Minibatches(FULL, 10))
    part = KSIVIApproximator(**settings, checkpoint=Checkpoint(tmp_path / "c", every=20))

    class Ending(Minibatches):
        left = 45

        def minibatch(self, generator):
            self.left -= 1
            if self.left < 0:
                raise OSError
            return super().minibatch(generator)

        def to(self, **_):
            return self

    with pytest.raises(OSError):  # noqa: PT011
        part.fit(Ending(FULL, 10))
    q = part.fit(Minibatches(FULL, 10))
    np.testing.assert_array_equal(q.loss_curve_, whole.loss_curve_)


def test_a_target_without_rows_is_refused():
    with pytest.raises(TypeError, match=r"no `n_rows`.*from_rows"):
        Minibatches(lambda x: -x, 10)
    for wrong in (0, 2.5):
        with pytest.raises((TypeError, ValueError), match="batch_size"):
            Minibatches(FULL, wrong)


NOISE = torch.Generator().manual_seed(0)


def noisy(x):
    return -x + torch.randn(x.shape, generator=NOISE)


def noisy_of_arrays(x):
    assert isinstance(x, np.ndarray)
    return -x + torch.randn(x.shape, generator=NOISE).numpy()


def test_a_score_that_draws_by_itself_is_told():
    with pytest.warns(UserWarning, match=r"other values.*Minibatches"):
        KSIVIApproximator(whiten=None, max_iter=2, random_state=0).fit(noisy, n_features=2)
    with pytest.raises(ValueError, match="other values"):
        KSIVIApproximator(whiten=None, max_iter=2, random_state=0).fit(noisy_of_arrays, n_features=2)
