"""The posterior of a process is that of a Gaussian process whose hyper-parameters have the highest evidence."""

import numpy as np
import pytest
import torch
from scipy.integrate import dblquad
from scipy.stats import multivariate_normal
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, Matern

from skksivi.predictors import _process
from skksivi.predictors._process import LEAST_NOISE, PROFILES, Precisions, fit_process, log_evidence

RNG = np.random.RandomState(0)
X = RNG.normal(size=(40, 2))
Y = np.sin(2 * X[:, 0]) + 0.2 * RNG.normal(size=40)
Y = (Y - Y.mean()) / Y.std()
W = np.ones(40)
THETA = torch.tensor([-1.5, -1.0, 0.1, 0.2, 0.6], dtype=torch.float64)
NOISE = float(torch.exp(2 * THETA[0])) + LEAST_NOISE


def tensors(*arrays):
    return [torch.as_tensor(a) for a in arrays]


def kernel_of(theta, profile):
    a, c, *scales = np.exp(theta[1:].numpy())
    smooth = {"gaussian": RBF(scales), "matern": Matern(scales, nu=1.5)}[profile]
    return ConstantKernel(1.0) + ConstantKernel(a**2) * DotProduct(1e-9) + ConstantKernel(c**2) * smooth


@pytest.mark.parametrize("profile", PROFILES)
def test_the_evidence_is_the_density_of_y(profile):
    K = kernel_of(THETA, profile)(X) + NOISE * np.eye(40)
    x, y, w = tensors(X, Y, W)

    def of_data(theta):
        means, spreads = _process.before(5, 2)
        return log_evidence(theta, profile, x, y, w) + ((theta - means) / spreads).square().sum() / 2

    expected = multivariate_normal(np.zeros(40), K).logpdf(Y) + 20 * np.log(2 * np.pi)
    assert float(of_data(THETA)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("profile", PROFILES)
def test_predictions_at_the_highest_evidence_are_those_of_scikit_learn(profile, monkeypatch):
    hyper = _process.Hyper(THETA, profile, 0.0)
    monkeypatch.setattr(_process, "choose", lambda *data: hyper)
    process, _ = fit_process(X, Y, W, 1.0, RNG)
    theirs = GaussianProcessRegressor(kernel_of(THETA, profile), alpha=NOISE, optimizer=None).fit(X, Y)
    new = np.random.RandomState(1).normal(size=(30, 2)) * 2
    mean, sd = theirs.predict(new, return_std=True)
    phi, left_out = process.features(new)
    beta, variance = process.coefficients(np.zeros((1, 2)))
    np.testing.assert_allclose(phi @ beta[0], mean, atol=2e-4)
    np.testing.assert_allclose(np.square(phi) @ variance[0] + left_out, sd**2, atol=2e-4)


def test_the_posterior_of_the_precisions_is_that_with_coefficients():
    e, h, yy, n, a = torch.tensor([3.0, 0.5]).double(), torch.tensor([2.0, -0.4]).double(), 4.0, 7.0, 1.5
    target = Precisions(e, h, yy, n, a)

    def log_integral(x):
        lam, gam = np.exp(x)

        def joint(b1, b2):
            b = np.array([b1, b2])
            error = yy - 2 * h.numpy() @ b + e.numpy() @ b**2
            return lam * gam ** (n / 2) * np.exp(-(gam * error + lam * b @ b) / 2)

        return np.log(dblquad(joint, -15, 15, -15, 15)[0]) + a * (x.sum() - lam - gam)

    points = np.array([[0.0, 0.0], [0.7, -0.5]])
    ours = target.log_prob(torch.as_tensor(points)).numpy()
    expected = [log_integral(x) for x in points]
    np.testing.assert_allclose(ours - ours[0], np.subtract(expected, expected[0]), rtol=1e-5, atol=1e-6)


def test_of_many_rows_some_are_centres_and_all_are_seen(monkeypatch):
    monkeypatch.setattr(_process, "N_ROWS", 30)
    process, posterior = fit_process(X, Y, W, 1.0, np.random.RandomState(0))
    assert len(process.centres) == 30
    assert posterior.n == 40
