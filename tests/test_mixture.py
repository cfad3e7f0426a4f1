"""The Gaussian mixture that is fitted to the points of a pilot."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_targets import generator, normal

from skksivi.pilot._mixture import MAX_COMPONENTS, Components, fitted_mixture


def moments_of(mixture):
    """Mean and covariance of a mixture."""
    w, m, C = mixture
    mean = w @ m
    centred = m - mean
    return mean, torch.einsum("k,kij->ij", w, C) + (w[:, None] * centred).mT @ centred


@given(d=st.integers(1, 5), n=st.integers(40, 300), gap=st.floats(0, 1e4), log_scale=st.floats(-4, 4))
def test_modes_have_the_means_shares_and_variances_of_their_points_however_far_apart(d, n, gap, log_scale):
    """The last step of the EM algorithm keeps the mean and the variances of what it is fitted to."""
    scale = math.exp(log_scale)
    points = normal(n, d).exp(), gap + scale * normal(2 * n, d, seed=1)
    mixture = fitted_mixture(points, generator())
    first = (mixture.means - points[0].mean(0)).norm(dim=1) < (mixture.means - points[1].mean(0)).norm(dim=1)
    if gap < 100 * (1 + scale):
        return
    for part, share, own in ((points[0], 1 / 3, first), (points[1], 2 / 3, ~first)):
        w = mixture.weights[own]
        mean, covariance = moments_of(Components(w / w.sum(), mixture.means[own], mixture.covariances[own]))
        sd = part.std(0, correction=0)
        torch.testing.assert_close(w.sum().item(), share)
        torch.testing.assert_close((mean - part.mean(0)) / sd, torch.zeros(d).double(), rtol=0, atol=1e-3)
        torch.testing.assert_close(covariance.diagonal().sqrt() / sd, torch.ones(d).double(), rtol=0, atol=1e-3)


@given(k=st.integers(1, 4), d=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_common_noise_is_in_every_component_and_no_more_could_be(k, d, seed):
    a = normal(k, d, d, seed=seed)
    C = a @ a.mT + 0.01 * torch.eye(d)
    mixture = Components(torch.ones(k) / k, normal(k, d), C)
    noise = mixture.common_variances()
    least = torch.linalg.eigvalsh(C / (noise.sqrt()[:, None] * noise.sqrt())).amin()
    conditional = torch.linalg.inv(C).diagonal(dim1=1, dim2=2).reciprocal().amin(0)
    assert least > 1 - 1e-6
    assert least < 1 + 1e-6 or (noise / conditional - 1).abs().max() < 1e-9
    L = mixture.factors(0.5 * noise)
    torch.testing.assert_close(L @ L.mT + 0.5 * noise.diag(), C)
    too_much = mixture.factors(1e6 * noise)
    torch.testing.assert_close(too_much @ too_much.mT, C)


def test_heavy_tails_leave_the_quartiles_alone():
    x = normal(4000, 2) / normal(4000, 2, seed=1).abs()  # a product of Cauchys
    z = fitted_mixture([x], generator()).draws()(40_000, x, generator())
    levels = torch.tensor([0.25, 0.75]).double()
    ratio = z.quantile(levels, dim=0).diff(dim=0) / x.quantile(levels, dim=0).diff(dim=0)
    assert ((ratio - 1).abs() < 0.15).all()


@pytest.mark.parametrize("points", [torch.zeros(30, 2), normal(30, 2) * torch.tensor([1.0, 0.0]), normal(3, 5)])
def test_points_in_a_subspace_have_a_mixture(points):
    mixture = fitted_mixture([points.double()], generator())
    assert len(mixture.weights) <= MAX_COMPONENTS
    assert all(part.isfinite().all() for part in (*mixture, mixture.factors()))
