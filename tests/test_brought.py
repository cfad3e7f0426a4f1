"""What people bring in a first week: each kind is right, or told once by what it is, over generated members."""

import ast
import re
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import plain_targets
import pytest
import torch
from members import every, refused
from plain_targets import as_score, generator, normal, own, words_of
from scipy.special import i0e, i1e, ive
from sklearn.exceptions import ConvergenceWarning
from torch import nn

from skksivi import KSIVIApproximator, expectation
from skksivi.baselines import Laplace
from skksivi.bridges._foreign import BlackBoxTarget, recast
from skksivi.coordinates._lines import checked_density
from skksivi.parameters import Pilot
from skksivi.pilot._chains import revive
from skksivi.pilot._modes import check_aperiodic, find_modes, search_around
from skksivi.pilot._newton import check_mode, laplace
from skksivi.predictors import KSIVIClassifier, KSIVIRegressor
from skksivi.score._domain import check_proper
from skksivi.score._tally import DivergedError
from skksivi.targets import constrained, from_log_prob, from_pymc, from_score_fn
from skksivi.training._run import explained


def in_tiers(n, n_quick):
    """The members of a kind: a few, and the rest in the slow tier."""
    return [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= n_quick)) for seed in range(n)]


SEEDS = in_tiers(8, 3)

resolved = partial(plain_targets.resolved, dtype=torch.float32)


def regression(seed, dtype):
    """The design and the response of a regression."""
    rng = np.random.RandomState(seed)
    n, d = rng.randint(10, 40), rng.randint(1, 6)
    return (torch.from_numpy(a).to(dtype) for a in (rng.normal(size=(n, d)), rng.normal(size=n)))


def supports_in(words):
    """The supports of the call that a message shows."""
    return ast.literal_eval(re.search(r"constrained\(log_prob, (\{.*\})\)", words)[1])


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


@every("seed", range(8))
def test_a_density_is_evaluated_in_the_type_that_it_takes(seed):
    (single, d), (double, _) = (density(seed, dtype) for dtype in (torch.float32, torch.float64))
    x = normal(50, d, seed=seed)
    found = resolved(from_log_prob(single, d)).double.log_prob(x)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.detach(), double(x).detach(), rtol=1e-4, atol=1e-4)


# A density and its score


def both(single, d):
    """The score and the density of normals at 5 of a few scales, computed in single precision, and points between."""
    sd = 10 ** torch.linspace(-8, 0, d, dtype=torch.float64)
    u = normal(8, d)
    log_prob = lambda x: (1e3 - ((x.to(single) - 5) / sd.to(single)).square().sum(1) / 2).double()  # noqa: E731
    score = replace(as_score(lambda x: ((5 - x.to(single)) / sd.to(single) ** 2).double(), log_prob, d), step=3e-3)
    return score, torch.full((1, d), 5.0, dtype=torch.float64), 5 + sd * u


@every("d", [1, 3, 9])
def test_a_density_is_not_wrong_where_rounding_hides_it(d):
    score, a, b = both(torch.float32, d)
    assert words_of(lambda: checked_density(score, a, b)) == []
    assert checked_density(score, a, b) is score


def test_a_random_walk_that_single_precision_hides_is_refused():
    """In its centred form; the steps near the spike are lost in rounding, before chains would start there."""
    rng = np.random.default_rng(3)
    y = torch.from_numpy(np.cumsum(0.3 * rng.normal(size=25)) + 0.5 * rng.normal(size=25)).float()

    def log_prob(x):
        log_scales, scales, levels = x[:, :2], x[:, :2].exp(), x[:, 2:]
        steps = torch.diff(levels, dim=1, prepend=torch.zeros_like(levels[:, :1]))
        z = torch.stack([steps, y - levels], 2) / scales[:, None]
        return (log_scales - scales.square() / 2 - 25 * log_scales).sum(1) - z.square().sum((1, 2)) / 2

    def score_fn(x):
        with torch.enable_grad():
            x = (x if x.requires_grad else x.detach().requires_grad_()).float()
            return torch.autograd.grad(log_prob(x).sum(), x, create_graph=True)[0]

    q = KSIVIApproximator(random_state=0)
    (words,) = words_of(lambda: q.fit(score_fn, n_features=27))
    assert "computed in float32" in words


# Bounds written as minus infinity


@pytest.mark.parametrize(("cls", "margin"), [(Laplace, 0.1), (KSIVIApproximator, 0.0)], ids=["jump", "vanishing"])
@pytest.mark.parametrize("seed", in_tiers(4, 1))
def test_bounds_are_told_once_and_nothing_else_is(seed, cls, margin):
    """Also where the density vanishes at one of them."""
    rng = np.random.RandomState(seed)
    y, low, width = torch.from_numpy(rng.normal(0, 0.9, 20)), rng.uniform(-1, 1), rng.uniform(0.5, 2)

    def log_prob(x):
        mu, v = x[:, 0], x[:, 1]
        inside = (v > low) & (v < low + width)
        s = torch.where(inside, v - low + margin, 0.5)
        log_p = -(y.to(x) - mu[:, None]).square().sum(1) / 2 / s.square() - len(y) * s.log() - mu.square() / 50
        return torch.where(inside, log_p, -torch.inf)

    q = cls(init=[0.0, low + width / 2], random_state=0)
    (words,) = words_of(lambda: q.fit(from_log_prob(log_prob, 2)))
    assert "seems bounded" in words
    assert "improper" not in words
    of_mu, (kind, *ends) = supports_in(words).values()
    assert (of_mu, kind) == ("real", "interval")
    np.testing.assert_allclose(ends, [low, low + width], atol=1e-5)


@every("end, is_told", [(2.9, False), (-0.97, True)])
def test_a_bound_is_near_the_mass(end, is_told):
    def log_prob(x):
        log_p = -5 * (((x + 1) / 0.03).square().sum(1) / 9).log1p()
        return torch.where((x < end).all(1), log_p, torch.nan)

    q, target = Laplace(init=[-1.0, -1.0], random_state=0), from_log_prob(log_prob, 2)
    words = words_of(lambda: q.fit(target))
    assert any("seems bounded" in word for word in words) == is_told
    assert len(words) == is_told, words
    given = words_of(lambda: expectation(q.sample(1000, random_state=0), target=target))
    assert any("seems bounded" in word for word in given) == is_told
    of_fit = words_of(lambda: expectation(q, target=target))  # the fit has told
    assert not any("seems bounded" in word for word in of_fit)


# Units


@pytest.mark.parametrize("seed", SEEDS)
def test_units_need_not_be_alike(seed):
    """Of a score of arrays, from the origin where the target is normal; else from a point near it."""
    rng = np.random.RandomState(seed)
    d, is_normal = rng.randint(1, 4), seed % 2
    sd = 10 ** rng.uniform(-13, 10, d)
    mean, P = rng.normal(0, 5, d) * sd, np.linalg.inv(np.full((d, d), 0.5) + 0.5 * np.eye(d))
    q = KSIVIApproximator(init=None if is_normal else mean, random_state=0)
    z = lambda X: (X - mean) / sd  # noqa: E731
    target = from_score_fn(lambda X: -(z(X) @ P if is_normal else np.sinh(z(X))) / sd, d)
    assert words_of(lambda: q.fit(target)) == []
    exact = 1.0 if is_normal else 0.8455  # the standard deviation of exp(-cosh z)
    Z = z(q.sample(20_000).astype(float))
    np.testing.assert_allclose(Z.std(0), exact, rtol=0.05)
    np.testing.assert_allclose(Z.mean(0), 0, atol=0.05)


# Budgets


def test_a_fit_that_comes_to_no_end_returns_the_best():
    """The integral of noise along a line needs ever more points."""
    q = KSIVIApproximator(whiten=Pilot(budget=5000), random_state=0)
    with pytest.warns(ConvergenceWarning, match="The noise of the score"):
        q.fit(lambda x: -x * (1 + 3 * (1e7 * x.sum(1, keepdim=True)).sin()), n_features=3)
    assert np.isfinite(q.sample(100)).all()


# Noise and jumps


def noisy(seed, size):
    """A normal score of arrays with noise of a size in its standard deviations, its mean and standard deviations."""
    rng = np.random.RandomState(seed)
    d = rng.randint(1, 5)
    root = rng.normal(size=(d, d)) + 2 * np.eye(d)
    P, mean = np.linalg.inv(root @ root.T), 3 * rng.normal(size=d)
    sd = np.sqrt(np.diag(root @ root.T))

    def pseudo_random(X):
        v = 4e4 * np.sin(1e5 * X @ rng_ways)
        return 2 * (v - np.floor(v)) - 1

    def log_p(X):
        return -((X - mean) @ P * (X - mean)).sum(1) / 2 + size * 1e-5 * pseudo_random(X)[:, 0]

    rng_ways = rng.normal(size=(d, d))
    steps = 1e-5 * np.diag(sd)
    kinds = [
        lambda X: (mean - X) @ P + size * pseudo_random(X) / sd,
        lambda X: (mean - X) @ P + size * np.sin(1e6 * X) / sd,  # each coordinate's own
        lambda X: np.round((mean - X) @ P * sd / size) * size / sd,
        lambda X: np.stack([(log_p(X + h) - log_p(X - h)) / 2 / h.sum() for h in steps], 1),
    ]
    return kinds[seed % 4], mean, sd


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", in_tiers(4, 2))
def test_noise_that_does_not_matter_is_not_told(seed):
    score_fn, mean, sd = noisy(seed, 10 ** np.random.RandomState(seed).uniform(-6, -1.2))
    q = KSIVIApproximator(random_state=0).fit(score_fn, n_features=len(mean))
    X = q.sample(20_000)
    assert np.abs((X.mean(0) - mean) / sd).max() < 0.05
    assert np.abs(np.log(X.std(0) / sd)).max() < 0.05
    assert q.n_score_calls_ < 20_000


def test_noise_that_matters_is_told_before_long_chains():
    score_fn, mean, _ = noisy(3, 1.0)
    q = KSIVIApproximator(random_state=0)
    (words,) = words_of(lambda: q.fit(score_fn, n_features=len(mean)))
    assert "The noise of the score is" in words
    assert q.n_score_calls_ < 50_000


def jumping(seed):
    """A log-density that jumps, its number of features, and the coordinate and place of the jump."""
    rng = np.random.RandomState(seed)
    d, size, at = rng.randint(1, 6), rng.choice([-1, 1]) * 10 ** rng.uniform(-0.3, 0.8), rng.uniform(-1, 1)
    j, scale = rng.randint(d), 10 ** rng.uniform(-2, 2)

    def log_prob(x):
        y = x / scale
        smooth = -y.square().sum(1) / 2 if seed % 2 else (-y - 2 * nn.functional.softplus(-y)).sum(1)
        return smooth + size * (y[:, j] > at)

    return log_prob, d, j, at * scale


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1, 5, 7))])
def test_a_jump_is_told_with_its_place(seed):
    log_prob, d, j, at = jumping(seed)
    q = KSIVIApproximator(random_state=0)
    (words,) = words_of(lambda: q.fit(from_log_prob(log_prob, d)))
    found = re.match(r"log p jumps by .* near `x\[(\d)\]` = ([-+.e\d]+), which its gradient does not show", words)
    assert int(found[1]) == j
    np.testing.assert_allclose(float(found[2]), at, rtol=2e-3)
    assert q.n_score_calls_ < 60_000


# Densities of infinite mass


def logistic(A, y, prior=0.0):
    """A logistic regression with a normal prior of a precision."""

    def log_prob(b):
        return nn.functional.logsigmoid((2 * y - 1).to(b) * (b @ A.mT.to(b))).sum(1) - prior * b.square().sum(1) / 2

    return from_log_prob(log_prob, A.shape[1])


def separated(seed):
    """A design (n, d), and classes that a combination of its columns, or one of them, separates."""
    rng = np.random.RandomState(seed)
    n, d = rng.randint(8, 40), rng.randint(1, 5)
    A = torch.from_numpy(np.c_[np.ones(n), rng.normal(size=(n, d))])
    if seed % 2:
        A[: n // 3, 1] = 0.0  # ties: a level of a factor that occurs in one class alone
        A[n // 3 :, 1] = 1.0
        y = torch.from_numpy(rng.rand(n) < 0.5).double()
        y[n // 3 :] = 1.0
        y[:3] = torch.tensor([0.0, 1.0, 0.0])
    else:
        y = (A @ torch.from_numpy(rng.normal(size=d + 1)) > 0).double()
    return A, y


def improper(seed):
    """A target without a finite mass."""
    A, y = regression(seed, torch.float64)
    d = A.shape[1]
    kinds = [
        lambda: logistic(*separated(seed)),
        lambda: logistic(*separated(seed + 1)),
        lambda: from_log_prob(lambda x: x[:, d] - (y.to(x) - x[:, :d] @ A.mT.to(x)).square().sum(1), d + 1),  # scale
        lambda: from_log_prob(lambda x: -(y.to(x) - x @ torch.cat([A, A[:, :1]], 1).mT.to(x)).square().sum(1), d + 1),
        lambda: from_log_prob(lambda x: -(x[:, 0] + x[:, 1]) - (x[:, 0] - x[:, 1]).square() - x[:, 2].square(), 3),
    ]
    return kinds[seed % 5]()


@pytest.mark.parametrize("seed", in_tiers(10, 5))
def test_a_density_of_infinite_mass_is_refused_with_its_direction(seed):
    target = improper(seed)
    target.names = tuple(f"b[{i}]" for i in range(target.n_features))
    (words,) = words_of(lambda: (KSIVIApproximator(random_state=0), Laplace())[seed % 2].fit(target))
    assert re.search(r"improper in a direction .*`b\[.*Add a prior", words, re.S)


def proper(seed):
    """A log-density of finite mass that is flat, heavy or one-sided somewhere, and its number of features."""
    rng = np.random.RandomState(seed)
    A, y = separated(seed)
    d = A.shape[1]
    far, scale, df = 10 ** rng.uniform(2, 5), 10 ** rng.uniform(-6, 6), rng.uniform(1.2, 4) + d
    rate, precision = rng.uniform(0.5, 2), 10 ** rng.uniform(-12, 0)
    kinds = [
        lambda x: logistic(A, y, precision).log_prob(x),
        lambda x: -(x - far).abs().sum(1) / scale,
        lambda x: (x / scale - (x / scale).exp() * rate).sum(1),
        lambda x: -(df + 1) / 2 * torch.log1p(x.square() / scale**2 / df).sum(1),  # Student's
        lambda x: -x[:, 0].square() / 18 - (x[:, 1:].square() * (-x[:, :1]).exp() + x[:, :1]).sum(1) / 2,
        lambda x: nn.functional.logsigmoid(torch.stack([x - far, far + 1 - x])).sum((0, 2)),  # logistic
        lambda x: -(x.square() + scale**2).sqrt().sum(1) / scale,
        lambda x: logistic(A, y).log_prob(x) - (x.abs() / 100).sum(1),
        lambda x: -torch.nn.functional.relu(x.abs() - far).sum(1),  # flat, with exponential tails
        lambda x: (2 * x.abs().log() - x).sum(1),  # of positive numbers; its formula grows elsewhere
    ]
    return kinds[seed % 10], d


@every("seed", range(20))
def test_a_proper_density_is_never_refused(seed):
    log_prob, d = proper(seed)
    score = resolved(from_log_prob(log_prob, d))
    check_proper(score.double)
    start = torch.full((d,), 1e-6).double()
    with suppress(DivergedError):
        mode, _ = laplace(score.double, start)
        check_mode(score.double, start, mode)
        for a in search_around(score.double, start[None], generator(), alone=False, n_starts=8).maps:
            check_mode(score.double, start, a)


# Remedies


@every("seed", range(8))
def test_a_column_that_holds_no_numbers_is_named(seed):
    pandas = pytest.importorskip("pandas")
    rng = np.random.RandomState(seed)
    d = rng.randint(1, 6)
    X = pandas.DataFrame(rng.normal(size=(12, d)), columns=[f"c{j}" for j in range(d)])
    name = f"c{rng.randint(d)}"
    X[name] = [["a", "b", "c"], ["1", "two", "3"], [(1, 2), 0, 1], ["", "x", ""]][seed % 4] * 4
    y = np.arange(12) % 2
    for act in (lambda: KSIVIRegressor().fit(X, y), lambda: KSIVIClassifier().fit(X, y)):
        (words,) = words_of(act)
        assert words.startswith(f"Column '{name}' of `X` does not hold numbers")


@every("seed", range(8))
def test_a_search_that_is_lost_names_the_parameter(seed):
    """The score of one parameter overflows before a mode is found."""
    rng, d = np.random.RandomState(seed), 2 + seed % 4
    j = rng.randint(d)
    x = torch.from_numpy(rng.normal(size=(7, d)))
    x[:, j] = [torch.inf, torch.nan, 1e80, -torch.inf][seed % 4]
    score = replace(resolved(torch.neg, d), names=tuple(f"b[{i}]" for i in range(d)))
    with pytest.raises(ValueError, match=rf"values that are not finite.* in `b\[{j}\]`"), explained(score):
        revive(x, torch.Generator())


@pytest.mark.slow  # of what PyMC takes to import
def test_minibatches_of_pymc_are_refused_with_what_works():
    pm = pytest.importorskip("pymc", reason="the bridge needs PyMC")
    x = np.random.RandomState(0).normal(size=(40, 2))
    with pm.Model() as model:
        rows, y = pm.Minibatch(x, x[:, 0], batch_size=10)
        b = pm.Normal("b", 0, 1, shape=2)
        pm.Normal("y", rows @ b, 1, observed=y, total_size=40)
    refused(ValueError, "give it all of the data", from_pymc, model)


# Wrong signs


@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_sign_is_told_once(seed):
    A, y = regression(seed, torch.float64)
    P, d = A.mT @ A + torch.eye(A.shape[1]), A.shape[1]
    of_normal = lambda x: x @ P.to(x) - A.mT.to(x) @ y.to(x)  # noqa: E731
    score_fn = [of_normal, lambda x: (x - 3) ** 3, lambda x: (x - y.to(x)[:d]).tanh() * 2][seed]
    q = [KSIVIApproximator(random_state=0), Laplace(), KSIVIApproximator(whiten=None, max_iter=20, random_state=0)]
    (words,) = words_of(lambda: q[seed].fit(score_fn, n_features=d))
    assert words.count("wrong sign") == 1


@every("factor, d", [(-1.0, 2), (0.0, 30)])
def test_a_wrong_coordinate_is_named_before_anything_is_called_improper(d, factor):
    """A normal density by its log p and a score of which one coordinate is wrong; it is improper in others, too."""
    factors = torch.ones(d).index_fill(0, torch.tensor([d // 2]), factor)
    target = own(d, score_fn=lambda x: -factors.to(x) * x, log_prob=lambda x: -x.square().sum(1) / 2)
    (words,) = words_of(lambda: KSIVIApproximator(random_state=0).fit(target))
    assert f"the score is {factor:.0f} times the slope of log p in `x[{d // 2}]`" in words


# Periodic densities


class Angle(BlackBoxTarget):
    """A von Mises density of an angle beside normal parameters, as another library evaluates it."""

    def __init__(self, mean, concentration, d):
        super().__init__((*(f"b[{i}]" for i in range(d - 1)), "angle"))
        self.mean, self.concentration, self.observed_data, self.constant_data = mean, concentration, {}, {}

    def _value_and_gradient(self, X):
        b, t = X[:, :-1], X[:, -1] - self.mean
        value = self.concentration * np.cos(t) - np.square(b).sum(1) / 2
        return value, np.c_[-b, -self.concentration * np.sin(t)]

    def _parameters(self, X):
        return {"b": X[:, :-1], "angle": np.angle(np.exp(1j * X[:, -1]))}


def check_angle(angle, mean, concentration):
    """Compare the mean of cos and sin of an angle with a von Mises density, by three errors of 4,000 draws."""
    z = np.exp(1j * (np.asarray(angle, dtype=float) - mean))
    off = np.array([z.real.mean() - i1e(concentration) / i0e(concentration), z.imag.mean()])
    assert (np.abs(off) < 3 * np.array([z.real.std(), z.imag.std()]) / np.sqrt(min(len(z), 4000))).all(), off


@every("seed", range(8))
def test_coordinates_of_one_period_have_the_density_of_the_angle(seed):
    rng = np.random.RandomState(seed)
    mean, concentration = rng.uniform(-4, 4), 10 ** rng.uniform(-2, 2)
    target = recast(Angle(mean, concentration, 1), {"angle"})
    u = torch.linspace(-9, 9, 20_001, dtype=torch.float64)[:, None].requires_grad_()
    log_p = target.log_prob(u)
    torch.testing.assert_close(target.score_fn(u), torch.autograd.grad(log_p.sum(), u)[0])
    weights = log_p.detach().softmax(0).numpy()
    z = np.exp(1j * (target.constrain(u)["angle"] - mean))
    for k in (1, 2, 3):
        assert abs(weights @ z**k - ive(k, concentration) / i0e(concentration)) < 1e-6
    spread, s = np.sqrt(weights @ u.detach().numpy() ** 2), target.score_fn(u).detach()[:, 0].numpy()
    assert 0.9 < weights @ s**2 * spread**2 < 1.6  # one for a normal density


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("concentration", [0.5, *(pytest.param(c, marks=pytest.mark.slow) for c in (0.1, 3, 300))])
def test_an_angle_is_fitted_on_one_period(concentration):
    target = recast(Angle(3.1, concentration, 3), {"angle"})
    q = KSIVIApproximator(random_state=0).fit(target)
    assert q.n_score_calls_ < 20_000
    check_angle(target.constrain(q.sample(4000))["angle"], 3.1, concentration)


def periodic(seed):
    """A log-density with a period in one coordinate, the number of features, that coordinate and the period."""
    rng = np.random.RandomState(seed)
    d, period, concentration = rng.randint(1, 5), (2 * np.pi, 12.0, 24.0, 1.0)[seed % 4], 10 ** rng.uniform(-1, 2)
    j, phase = rng.randint(d), rng.uniform(0, 6)

    def log_prob(x):
        others = torch.cat([x[:, :j], x[:, j + 1 :]], 1)
        return concentration * (2 * np.pi / period * x[:, j] - phase).cos() - others.square().sum(1) / 2

    return log_prob, d, j, period, concentration, phase


@pytest.mark.parametrize("seed", SEEDS)
def test_a_periodic_density_is_told_with_one_period_to_keep_to(seed):
    log_prob, d, j, period, concentration, phase = periodic(seed)
    sizes = []
    target = from_log_prob(lambda x: sizes.append(len(x)) or log_prob(x), d)
    (words,) = words_of(lambda: KSIVIApproximator(random_state=0).fit(target))
    assert f"periodic in `x[{j}]`, with a period of {period:.5g}, so" in words
    assert sum(sizes) < 8000
    supports = supports_in(words)
    low, high = supports[f"x{j}"][1:]
    np.testing.assert_allclose([high - low, np.cos(np.pi * (low + high) / period - phase)], [period, 1], rtol=1e-4)
    if seed in {0, 4, 7}:  # the call is run as it is
        target = constrained(lambda **x: log_prob(torch.stack(list(x.values()), 1)), supports)
        q = KSIVIApproximator(random_state=0).fit(target)
        angle = 2 * np.pi / period * target.constrain(q.sample(2000))[f"x{j}"]
        check_angle(angle, phase, concentration)


@pytest.mark.parametrize("concentration", [0.15, pytest.param(1.0, marks=pytest.mark.slow)])
def test_a_period_is_told_where_chains_from_the_only_mode_would_run_off(concentration):
    """They leave a mode that `init` makes the only one where the density hardly falls between two."""
    target = from_log_prob(lambda x: concentration * x[:, 0].cos() - x[:, 1] ** 2 / 2, 2)
    (words,) = words_of(lambda: KSIVIApproximator(init=[0.0, 0.0], random_state=0).fit(target))
    assert "periodic in `x[0]`, with a period of 6.2832, so" in words


@every("seed", range(8))
def test_equal_modes_at_equal_distances_are_no_period(seed):
    rng = np.random.RandomState(seed)
    d, k, gap = rng.randint(1, 4), rng.randint(3, 9), rng.uniform(6, 50)
    m = torch.zeros(k, d).double()
    m[:, rng.randint(d)] = gap * torch.arange(k)
    score = resolved(from_log_prob(lambda x: (-(x[:, None] - m.to(x)).square().sum(2) / 2).logsumexp(1), d))
    check_aperiodic(score.double, find_modes(score.double, m, torch.Generator()).maps)
