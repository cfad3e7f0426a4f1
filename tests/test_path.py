"""The kernelised path gradient of KL(q || p), by its formula."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skksivi import KSIVIApproximator
from skksivi.estimators._ksd import rate_of_kl, squared_ksd
from skksivi.families._layer import Drawn
from skksivi.kernels import IMQ, Gaussian, Kernel, Laplace, Riesz, Tilted
from skksivi.stein._estimators import GRADIENT_ESTIMATORS
from skksivi.stein._path import N_DRAWS, Memory, averages, n_batches, velocity
from skksivi.targets import Banana


class Hat(Kernel):
    """Positive definite in two dimensions, but negative far from zero."""

    def profile(self, t):
        return (1 - t / 2) * torch.exp(-t / 2)

    def slope(self, t, k):
        return (t / 4 - 1) * torch.exp(-t / 2)

    def median_level(self, n):
        return 1.0


@given(
    kernel=st.sampled_from([Gaussian(bandwidth=0.7), IMQ(bandwidth=1.3), Laplace(bandwidth=2.0)]),
    n=st.integers(1, 5),
    m=st.integers(1, 9),
    d=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)
def test_the_velocity_is_a_kernel_mean_of_scores_and_gradients(kernel, n, m, d, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y, s = (torch.randn(k, d, generator=generator, dtype=torch.float64) for k in (n, m, m))
    y.requires_grad_()
    k = kernel(x, y)
    gradients = torch.stack([torch.autograd.grad(row.sum(), y, retain_graph=True)[0].sum(0) for row in k])
    expected = (k @ s + gradients) / k.sum(1, keepdim=True).clamp_min(1e-3 * m)
    actual = velocity(x, Memory(y.detach(), s), kernel)
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("n_layers", [0, 2])
def test_the_loss_is_the_rate_at_which_the_divergence_falls(n_layers):
    """The mean over draws of v . (s_p - s_q(x | z)), for each layer; the gradient in x is -v / n."""
    shape = (n_layers,) * (n_layers > 0) + (6, 3)
    x, s, c = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kernel = Gaussian(bandwidth=0.7)
    rate, dx, *others = rate_of_kl(kernel, 6, Memory.empty(x), adapts=False).gradients(Drawn(x, s, c))
    v = velocity(x, Memory(x, s), kernel)
    torch.testing.assert_close(rate, torch.einsum("...ij,...ij->...", v, s - c) / 6)
    torch.testing.assert_close(dx, -v / 6)
    assert not any(other.any() for other in others)


@pytest.mark.parametrize("batch_size", [4, 5])
def test_an_odd_batch_in_halves_has_one_draw_more(batch_size):
    one = squared_ksd(Gaussian(), GRADIENT_ESTIMATORS["u-statistic"], batch_size, in_halves=False)
    halves = squared_ksd(Gaussian(), GRADIENT_ESTIMATORS["u-statistic"], batch_size, in_halves=True)
    assert (one.n_draws, halves.n_draws) == (batch_size, 2 * (batch_size // 2 + batch_size % 2))


@pytest.mark.parametrize("n", [1, 2, 100, 128, 129, 1000, 2560, 10**5])
def test_large_batches_are_remembered_less_often(n):
    memory = Memory.empty(torch.zeros(()))
    memory.begin(torch.zeros(n, 1), torch.zeros(n, 1))
    assert len(memory.x) == n * n_batches(n) <= max(n, N_DRAWS)


def test_new_draws_take_the_place_of_the_oldest_and_those_that_are_not_finite_stay_out():
    memory = Memory(torch.arange(6.0)[:, None], torch.zeros(6, 1))
    memory.add(torch.tensor([[7.0], [8.0]]), torch.tensor([[1.0], [torch.nan]]))
    assert memory.x.flatten().tolist() == [2, 3, 4, 5, 7, 5]
    assert memory.s.flatten().tolist() == [0, 0, 0, 0, 1, 0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("kernel", [Riesz(), Tilted(IMQ()), Hat()])
def test_kernels_that_give_no_means_are_left_to_the_discrepancy(kernel):
    assert not averages(kernel)
    small = {"whiten": None, "max_iter": 5, "batch_size": 16, "random_state": 0, "kernel": kernel}
    with pytest.raises(ValueError, match=r"`gradient_estimator` is 'path'.*positive kernel"):
        KSIVIApproximator(gradient_estimator="path", **small).fit(Banana())
    by_itself, asked = (
        KSIVIApproximator(gradient_estimator=name, **small).fit(Banana()).loss_curve_
        for name in ("auto", "u-statistic")
    )
    assert (by_itself == asked).all()
