"""Heavy tails and regularised discrepancies: tilted kernels, Bénard's terms, tails that tempering breaks."""

import math

import numpy as np
import pytest
import torch
from plain_targets import normal
from sklearn.base import clone

from skksivi import KSIVIApproximator
from skksivi.kernels import IMQ, Gaussian, Riesz, Tilted, resolve_kernel
from skksivi.metrics import ksd
from skksivi.parameters import Adam
from skksivi.score._improper import tail_exponent
from skksivi.stein._estimators import GRADIENT_ESTIMATORS
from skksivi.stein._fused import value_and_gradients
from skksivi.targets import Banana, Multimodal, StudentT, XShaped
from skksivi.terms import Entropic, Laplacian, laplacian_gradient

pytestmark = pytest.mark.usefixtures("uncertified")


QUICK = KSIVIApproximator(max_iter=30, batch_size=16, hidden_layer_sizes=(8,), whiten="laplace", random_state=0)


@pytest.mark.parametrize("kernel", [Gaussian(), IMQ(bandwidth=2.0), Riesz(), Riesz(norm="l1")], ids=str)
@pytest.mark.parametrize("exponent", [-0.5, 0.25])
@pytest.mark.parametrize("name", GRADIENT_ESTIMATORS)
def test_a_tilted_kernel_weighs_both_arguments(kernel, exponent, name):
    tilted = Tilted(kernel, exponent=exponent, scale=1.5)
    x, f, estimator = normal(12, 3), normal(12, 3, seed=1), GRADIENT_ESTIMATORS[name]
    w = (1 + x.square().sum(1) / 1.5**2) ** exponent
    torch.testing.assert_close(tilted(x), w[:, None] * kernel(x) * w)
    torch.testing.assert_close(tilted(x[:5], x[5:]), w[:5, None] * kernel(x[:5], x[5:]) * w[5:])
    value, dx, df = value_and_gradients(x, f, tilted, estimator)
    x.requires_grad_(), f.requires_grad_()
    expected = estimator.estimate(x, f, tilted)
    torch.testing.assert_close(value, expected.detach())
    for ours, g in zip((dx, df), torch.autograd.grad(expected, (x, f)), strict=True):
        torch.testing.assert_close(ours, g, rtol=1e-8, atol=1e-10)


def test_a_tilted_kernel_is_a_kernel():
    tilted = resolve_kernel(Tilted(Gaussian()), 0.7)
    assert tilted.kernel.bandwidth == 0.7
    assert isinstance(Tilted(Gaussian()).frozen(normal(20, 2)).kernel.bandwidth, float)
    with pytest.raises(ValueError, match="Stein kernel"):
        ksd(normal(20, 2).numpy(), lambda x: -x, kernel=tilted)
    q = clone(QUICK).set_params(kernel=Tilted(IMQ(), exponent=0.5), kernel__scale=2.0).fit(lambda x: -x, n_features=2)
    assert np.isfinite(q.sample(10)).all()
    with pytest.raises(ValueError, match="`exponent`"):
        clone(QUICK).set_params(kernel=Tilted(IMQ(), exponent=np.inf)).fit(Banana())


def test_a_tilted_kernel_may_be_tilted_again():
    x, once = normal(12, 3), Tilted(IMQ(bandwidth=0.7), scale=2.0)
    twice = resolve_kernel(Tilted(Tilted(IMQ(), scale=2.0), exponent=-0.5), 0.7)
    w = (1 + x.square().sum(1)) ** -0.5
    torch.testing.assert_close(twice(x), w[:, None] * once(x) * w)
    with pytest.raises(TypeError, match="`kernel` of Tilted"):
        resolve_kernel(Tilted(Tilted("imq")), 0.7)


@pytest.mark.parametrize("settings", [{"scale": 0.0}, {"scale": -1.0}, {"exponent": np.nan}], ids=str)
def test_a_bad_tilt_is_named_when_it_is_evaluated(settings):
    tilted = Tilted(IMQ(), **settings)
    for evaluate in (tilted, tilted.frozen, lambda x: tilted(x, x)):
        with pytest.raises(ValueError, match="`exponent` must be a finite number and `scale` a positive one"):
            evaluate(normal(3, 2))


@pytest.mark.parametrize("target", [Banana(), XShaped(), Multimodal(), StudentT()], ids=str)
def test_the_laplacian_term_is_the_gradient_of_positive_second_derivatives(target):
    x = 3 * normal(12, 2)
    x[0] = torch.tensor([0.0, 8.0])  # where the banana curves

    def total(x):
        hessian = torch.autograd.functional.hessian(lambda x: target.log_prob(x).sum(), x, create_graph=True)
        return torch.stack([hessian[i, j, i, j] for i in range(len(x)) for j in range(2)]).clamp_min(0).sum()

    x.requires_grad_()
    (expected,) = torch.autograd.grad(total(x), x)
    assert expected.any()
    ours = laplacian_gradient(target.score_fn, x, torch.Generator())
    torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-8)


def test_the_laplacian_term_is_estimated_in_many_dimensions():
    x, generator = normal(4, 40), torch.Generator().manual_seed(0)

    def score_fn(x):  # log p = sum x_j^4: second derivatives 12 x_j^2, without cross terms
        return 4 * x**3

    torch.testing.assert_close(laplacian_gradient(score_fn, x, generator), 24 * x)
    assert not laplacian_gradient(lambda x: -x, x, generator).any()


@pytest.mark.filterwarnings("ignore:The draws are too:sklearn.exceptions.ConvergenceWarning")
def test_the_entropic_term_moves_draws_up_and_is_scheduled():
    settings = {"whiten": None, "max_iter": 100, "learning_rate": 1e-2, "initial_scale": 0.9, "optimizer": Adam()}
    settings["gradient_estimator"] = "u-statistic"
    plain, pulled, late = (
        clone(QUICK).set_params(**settings, terms=[Entropic(w)]).fit(lambda x: 5 - x, n_features=2)
        for w in (0.0, 10.0, lambda progress: 10.0 * (progress > 2))
    )
    assert pulled.sample(500).mean() > plain.sample(500).mean() + 0.2
    np.testing.assert_array_equal(late.loss_curve_, plain.loss_curve_)


@pytest.mark.parametrize("name", ["annealing", "weight of Entropic", "weight of Laplacian"])
@pytest.mark.parametrize("wrong", [-1, math.inf, math.nan])
def test_a_schedule_that_goes_wrong_is_named_and_no_other(name, wrong):
    def schedule(progress):
        return 1.0 if progress < 0.5 else wrong

    scheduled = {
        "annealing": {"annealing": schedule},
        "weight of Entropic": {"terms": [Entropic(schedule)]},
        "weight of Laplacian": {"terms": [Laplacian(schedule)]},
    }
    q = clone(QUICK).set_params(max_iter=10, whiten=None, **scheduled[name])
    with pytest.raises(
        ValueError, match=f"^`{name}` returned {wrong} at progress 0.5, expected a (positive )?number"
    ):
        q.fit(lambda x: -x, n_features=2)


def test_tails_are_told_from_the_score():
    assert tail_exponent(StudentT().score_fn, 2) == pytest.approx(6)  # a product of two: proper for c > 1 / 3
    assert tail_exponent(lambda x: -0.5 * x / x.square().sum(1, keepdim=True), 2) == pytest.approx(0.5)
    assert tail_exponent(lambda x: -x, 2) is None
    assert tail_exponent(lambda x: -x / (1 + x.square().sum(1, keepdim=True)).sqrt(), 2) is None
    cauchy = lambda x: -4 * x / (1 + x.square().sum(1, keepdim=True))  # noqa: E731
    assert tail_exponent(cauchy, 3) == pytest.approx(4)


@pytest.mark.parametrize(("share", "found"), [(0.01, True), (0.03, False)])
def test_an_exponent_is_that_of_the_farthest_points_if_nearer_ones_agree_to_two_percent(share, found):
    def score_fn(x):
        r2 = x.square().sum(1, keepdim=True)
        return -4 * torch.where(r2 > 25e10, 1.0, 1 + share) * x / r2

    assert tail_exponent(score_fn, 2) == (pytest.approx(4) if found else None)


@pytest.mark.parametrize(("d", "exact"), [(32, True), (33, False)])
def test_the_laplacian_term_is_exact_up_to_32_dimensions(d, exact):
    def score_fn(x):
        return (x @ torch.ones(d, d).to(x)).pow(3)

    x = normal(3, d)
    one, other = (laplacian_gradient(score_fn, x, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert torch.equal(one, other) == exact


def test_the_laplacian_term_needs_a_score_that_torch_differentiates():
    q = clone(QUICK).set_params(terms=[Laplacian()], whiten=None)
    for score_fn in (lambda x: torch.as_tensor(-x.detach().numpy()).to(x), lambda X: -np.asarray(X)):
        with pytest.raises(ValueError, match=r"`terms` has Laplacian\(\), which needs a score that torch can diff"):
            q.fit(score_fn, n_features=2)


def test_tempering_that_breaks_a_heavy_tailed_target_is_warned_of():
    def cauchy(x):
        return -4 * x / (1 + x.square().sum(1, keepdim=True))

    tempered = clone(QUICK).set_params(annealing="linear", whiten=None)
    with pytest.warns(UserWarning, match=r"infinite mass below 0\.75"):
        tempered.fit(cauchy, n_features=3)
    tempered.set_params(annealing=lambda progress: 0.8 + 0.2 * progress).fit(cauchy, n_features=3)
    tempered.set_params(annealing=lambda progress: 1.0 if progress <= 1 else 0.1).fit(cauchy, n_features=3)
    tempered.set_params(annealing="linear").fit(lambda x: -x, n_features=3)
