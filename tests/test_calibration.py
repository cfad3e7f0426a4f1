"""Simulation-based calibration: uniform ranks, their bands, right and wrong fits, failures and files."""

import itertools
import json

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from joblib import parallel_config
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError

from skksivi._utils.monte_carlo import counts_below, coverage, tail_probabilities, uniform_band, uniformity
from skksivi.baselines import Laplace
from skksivi.calibration import Calibration, posterior_sbc, sbc
from skksivi.targets import Target, constrained, from_log_prob, from_score_fn

SIZES = [(1, 7), (5, 3), (10, 1)]


# Ranks and bands


def all_ranks(n, n_draws):
    """Every set of ranks (n_draws + 1)^n, each as likely as another."""
    return np.array(list(itertools.product(range(n_draws + 1), repeat=n)))


@pytest.mark.parametrize(("n", "n_draws"), SIZES)
def test_the_probability_of_a_band_is_the_share_of_all_ranks_in_it(n, n_draws):
    counts = np.array([counts_below(ranks, n_draws) for ranks in all_ranks(n, n_draws)])
    tails = tail_probabilities(n, n_draws)
    for gamma in np.unique(tails):
        inside = tails > gamma
        share = inside[np.arange(n_draws), counts].all(1).mean()
        assert coverage(inside) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize(("n", "n_draws"), SIZES)
def test_a_p_value_is_the_share_of_all_ranks_with_one_as_small(n, n_draws):
    p = np.array([uniformity(ranks, n_draws) for ranks in all_ranks(n, n_draws)])
    as_small = (p[:, None] >= np.unique(p) - 1e-12).mean(0)
    np.testing.assert_allclose(np.append(1 - as_small, 1)[1:], np.unique(p), atol=1e-9)


@pytest.mark.parametrize(("n", "n_draws", "level"), [(200, 99, 0.9), (37, 200, 0.5)])
def test_a_line_leaves_the_band_where_its_p_value_is_as_small(n, n_draws, level):
    rng = np.random.RandomState(0)
    low, high = uniform_band(n, n_draws, level)
    left = []
    for power in (1, 1.1, 1.3):
        for _ in range(20):
            ranks = np.floor((n_draws + 1) * rng.uniform(size=n) ** power).astype(int)
            counts = counts_below(ranks, n_draws)
            left.append(bool(((counts < low) | (counts > high)).any()))
            assert left[-1] == (uniformity(ranks, n_draws) <= 1 - level + 1e-12)
    assert 0 < sum(left) < len(left)


def test_extreme_ranks_have_small_p_values_of_the_right_order():
    n, n_draws = 20, 9
    least = uniformity(np.zeros(n, dtype=int), n_draws)
    assert 0.1**n <= least < 1e-13
    assert uniformity(np.arange(100) % 10, n_draws) == pytest.approx(1, abs=1e-3)


# Right and wrong posteriors


class Exact(BaseEstimator):
    """Draws of a posterior whose sampler is what it is fitted to, brought nearer to their mean by a factor."""

    def __init__(self, factor=1.0):
        self.factor = factor

    def fit(self, target):
        self.mean_, self.sampler_ = target
        return self

    def sample(self, n_samples, random_state=None):
        X = self.sampler_(n_samples, np.random.RandomState(random_state))
        return self.mean_ + self.factor * (X - self.mean_)


class Linear:
    """Observations D theta + N(0, I) of parameters with the prior N(1, I)."""

    def __init__(self, D):
        self.D = D

    def prior(self, rng):
        return 1 + rng.normal(size=self.D.shape[1])

    def data(self, theta, rng):
        return self.D @ theta + rng.normal(size=len(self.D))

    def log_likelihood(self, theta, y):
        return -np.square(y - self.D @ theta).sum() / 2

    def posterior(self, mean=1.0, sd=1.0):
        """Make posteriors by the prior N(mean, sd^2): their means and samplers."""

        def make_target(y):
            C = np.linalg.inv(self.D.T @ self.D + np.eye(self.D.shape[1]) / sd**2)
            m = C @ (self.D.T @ y + mean / sd**2)
            return m, lambda n, rng: m + rng.normal(size=(n, len(m))) @ np.linalg.cholesky(C).T

        return make_target

    def score(self, y):
        """The score function of the right posterior."""
        D, y = torch.as_tensor(self.D), torch.as_tensor(y)
        return lambda x: (y - x @ D.mT) @ D - (x - 1)


NORMAL = Linear(np.repeat([[1.0, 0.0], [0.8, 0.6]], 2, axis=0))
REGRESSION = Linear(np.random.RandomState(0).normal(size=(6, 3)))


#: The posterior of the normal model and the estimator that are right, or wrong in one thing.
KINDS = {
    "right": (NORMAL.posterior(), Exact()),
    "wrong sign of a term": (NORMAL.posterior(mean=-1.0), Exact()),
    "prior too narrow": (NORMAL.posterior(sd=0.5), Exact()),
    "draws too narrow": (NORMAL.posterior(), Exact(0.7)),
}


def calibrated(kind="right", **options):
    return sbc(NORMAL.prior, NORMAL.data, *KINDS[kind], **options)


@pytest.mark.parametrize("kind", ["wrong sign of a term", "prior too narrow", "draws too narrow"])
def test_wrong_posteriors_are_found(kind):
    result = calibrated(kind, n=200, random_state=0)
    assert result.p_value < 1e-3
    if kind == "draws too narrow":
        assert "draws too narrow" in str(result)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x: x + 1, "draws too high"), (lambda x: x - 1, "draws too low"), (lambda x: 2 * x, "draws too wide"),
        (lambda x: x / 2, "draws too narrow"),
    ],
)  # fmt: skip
def test_a_report_names_what_is_wrong_with_draws(change, text):
    rng = np.random.RandomState(0)
    ranks = (change(rng.normal(size=(300, 19))) < rng.normal(size=(300, 1))).sum(1, keepdims=True)
    assert text in str(Calibration(ranks, 19, ("a",), np.arange(300)))


def test_a_fit_that_ignores_the_data_is_found_by_a_quantity_of_the_data_alone():
    """Modrak et al.: draws of the prior have uniform ranks of parameters."""

    def make_target(y):
        return np.ones(2), lambda n, rng: 1 + rng.normal(size=(n, 2))

    def quantities(theta, y):
        return {"log-likelihood": NORMAL.log_likelihood(theta, y)}

    result = sbc(NORMAL.prior, NORMAL.data, make_target, Exact(), quantities=quantities, random_state=0)
    assert result.names == ("x0", "x1", "log-likelihood")
    assert result.p_values[:2].min() > 0.001
    assert result.p_values[2] < 1e-10
    right = sbc(NORMAL.prior, NORMAL.data, NORMAL.posterior(), Exact(), quantities=quantities, random_state=0)
    assert right.p_value > 0.001


def test_ties_are_broken_at_random():
    quantities = {"sign": lambda theta, y: float(theta[0] > 1), "constant": lambda theta, y: 0.0}
    for function in quantities.values():
        result = sbc(NORMAL.prior, NORMAL.data, NORMAL.posterior(), Exact(), quantities=function, random_state=0)
        assert result.names[-1] == "quantity"
        assert result.p_values[-1] > 0.001


def augmented(posterior):
    return lambda y, new: posterior(np.concatenate([y, new]))


TWICE = Linear(np.concatenate([REGRESSION.D, REGRESSION.D]))
OBSERVED = np.array([3.0, -1.0, 0.5, 2.0, -2.0, 1.0])


def test_posterior_sbc_is_calibrated_and_finds_draws_too_narrow():
    draws = Exact().fit(REGRESSION.posterior()(OBSERVED)).sample(5000, random_state=0)
    make_target = augmented(TWICE.posterior())
    for factor, is_right in ((1.0, True), (0.7, False)):
        result = posterior_sbc(draws, REGRESSION.data, make_target, Exact(factor), OBSERVED, random_state=1)
        assert (result.p_value > 0.001) == is_right


def test_posterior_sbc_hands_both_data_to_quantities_and_draws_from_a_fit():
    q = Laplace(random_state=0).fit(from_score_fn(REGRESSION.score(OBSERVED), 3))
    result = posterior_sbc(
        q,
        REGRESSION.data,
        augmented(TWICE.posterior()),
        Exact(),
        OBSERVED,
        n=40,
        quantities=lambda theta, y, new: {"likelihood": TWICE.log_likelihood(theta, np.concatenate([y, new]))},
        random_state=0,
    )
    assert result.names == ("x0", "x1", "x2", "likelihood")
    assert result.p_value > 0.001


# Seeds, jobs and files


def same(a, b):
    return (
        np.array_equal(a.ranks, b.ranks)
        and np.array_equal(a.replications, b.replications)
        and (a.names, a.failures, a.n_draws) == (b.names, b.failures, b.n_draws)
    )


def test_ranks_are_those_of_the_random_state():
    first = calibrated(n=20, random_state=3)
    assert same(first, calibrated(n=20, random_state=3))
    assert same(first, calibrated(n=20, random_state=np.random.RandomState(3)))
    assert not same(first, calibrated(n=20, random_state=4))
    assert not same(calibrated(n=20), calibrated(n=20))


@pytest.mark.parametrize("backend", ["threading", pytest.param("loky", marks=pytest.mark.slow)])
def test_ranks_do_not_depend_on_the_number_of_jobs(backend, tmp_path):
    with parallel_config(backend):
        there = calibrated(n=20, n_jobs=2, random_state=0, path=tmp_path / "ranks.json")
    assert same(there, calibrated(n=20, random_state=0))


class Stopped(BaseException):
    """Not an error of a fit."""


class Stopping(Exact):
    """Is interrupted in the fit after some."""

    left = 10**6

    def fit(self, target):
        Stopping.left -= 1
        if Stopping.left < 0:
            raise Stopped
        return super().fit(target)


@pytest.mark.parametrize("after", [0, 7])
def test_what_was_interrupted_goes_on_bit_for_bit(after, tmp_path, monkeypatch):
    path = tmp_path / "ranks.json"
    arguments = NORMAL.prior, NORMAL.data, NORMAL.posterior(), Stopping()
    whole = sbc(*arguments, n=20, random_state=0)
    monkeypatch.setattr(Stopping, "left", after)
    with pytest.raises(Stopped):
        sbc(*arguments, n=20, random_state=0, path=path)
    assert len(json.loads(path.read_text())["ranks"]) == after
    monkeypatch.setattr(Stopping, "left", 20 - after)  # no fit is made twice
    assert same(sbc(*arguments, n=20, random_state=0, path=path), whole)
    monkeypatch.setattr(Stopping, "left", 0)
    assert same(sbc(*arguments, n=20, path=path), whole)  # by the seed of the file
    assert [p.name for p in tmp_path.iterdir()] == ["ranks.json"]


def test_a_file_takes_more_replications_and_gives_fewer(tmp_path):
    path = tmp_path / "ranks.json"
    for n in (5, 12, 8):
        assert same(calibrated(n=n, random_state=0, path=path), calibrated(n=n, random_state=0))


def other(**changes):
    arguments = {
        "simulate_prior": NORMAL.prior, "simulate_data": NORMAL.data, "make_target": NORMAL.score,
        "estimator": Laplace(), "n": 2, "n_draws": 9, "random_state": 0,
    }  # fmt: skip
    return arguments | changes


#: Arguments that give other ranks.
OTHERS = {
    "seed": other(random_state=1),
    "draws": other(n_draws=19),
    "names": other(names=["a", "b"]),
    "parameters of the estimator": other(estimator=Laplace(max_iter=100)),
    "estimator": other(make_target=NORMAL.posterior(), estimator=Exact()),
    "prior": other(simulate_prior=lambda rng: rng.normal(size=2)),
    "data": other(simulate_data=lambda theta, rng: NORMAL.data(theta, rng) + 1),
    "target": other(make_target=lambda y: lambda x: -x),
}


@pytest.mark.parametrize("changed", OTHERS.values(), ids=OTHERS)
def test_a_file_of_other_settings_is_refused(changed, tmp_path):
    path = tmp_path / "ranks.json"
    sbc(**other(), path=path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"holds replications of other settings: .* Give another `path`, or"):
        sbc(**changed, path=path)
    assert path.read_bytes() == before


def test_a_damaged_file_is_refused_and_kept(tmp_path):
    path = tmp_path / "ranks.json"
    sbc(**other(), path=path)
    text = path.read_text()
    for content in ("", "[]", "null", "{}", "no json", text[: len(text) // 2], text.replace("{", "["), "[" * 10**5):
        path.write_text(content)
        with pytest.raises(ValueError, match="not a complete calibration file; name another"):
            sbc(**other(), path=path)
        assert path.read_text() == content


def test_a_file_that_cannot_be_written_is_told_before_the_first_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(Stopping, "left", 0)
    with pytest.raises(OSError, match="nowhere"):
        sbc(NORMAL.prior, NORMAL.data, NORMAL.posterior(), Stopping(), path=tmp_path / "nowhere" / "ranks.json")


# Failures


class Failing(Exact):
    """Cannot fit some data."""

    def fit(self, target):
        if target[0][0] > self.limit:
            raise ArithmeticError("the matrix is singular.")
        return super().fit(target)

    limit = 1.5


def test_failures_are_told_and_what_is_finished_is_kept(tmp_path, monkeypatch):
    path = tmp_path / "ranks.json"
    arguments = NORMAL.prior, NORMAL.data, NORMAL.posterior(), Failing()
    whole = sbc(NORMAL.prior, NORMAL.data, NORMAL.posterior(), Exact(), n=30, random_state=0)
    with pytest.warns(UserWarning, match=r"of 30 replications failed and have no ranks. The first, number ") as told:
        result = sbc(*arguments, n=30, random_state=0, path=path)
    failed = [failure.replication for failure in result.failures]
    assert 3 < len(failed) < 27
    text = str(told[0].message)
    assert text.startswith(f"{len(failed)} of 30")
    assert f"number {failed[0]}: `fit` raised ArithmeticError: the matrix is singular." in text
    assert text.endswith("with the same `path` to repeat these only.")
    assert {failure.message for failure in result.failures} == {
        "`fit` raised ArithmeticError: the matrix is singular."
    }
    assert sorted([*failed, *result.replications]) == list(range(30))
    np.testing.assert_array_equal(result.ranks, whole.ranks[result.replications])
    assert f", {len(failed)} more failed: p = " in str(result)

    n_fits = []
    monkeypatch.setattr(Failing, "limit", np.inf)
    monkeypatch.setattr(Failing, "fit", lambda self, target: n_fits.append(1) or Exact.fit(self, target))
    again = sbc(*arguments, n=30, random_state=0, path=path)
    assert len(n_fits) == len(failed)
    assert same(again, whole)


def raising(*_):
    raise KeyError("nothing")


#: What fails in every replication, with an error that says what.
HOPELESS = {
    **{
        name: ({name: raising}, f"could be simulated.*`{name}` raised KeyError: 'nothing'")
        for name in ("simulate_prior", "simulate_data", "make_target", "quantities")
    },
    "prior without a generator": (
        {"simulate_prior": lambda: np.ones(2)},
        "`simulate_prior` raised TypeError: .*takes 0",
    ),
    "score": ({"make_target": lambda y: raising}, "succeeded. The first, number 0: `fit` raised KeyError: 'nothing'"),
    "parameters": ({"estimator": Laplace(max_iter=-1)}, "succeeded.*`fit` raised InvalidParameterError: .*max_iter"),
}


@pytest.mark.parametrize(("changes", "text"), HOPELESS.values(), ids=HOPELESS)
def test_if_nothing_succeeds_the_error_says_why(changes, text):
    with pytest.raises(RuntimeError, match=f"None of the 2 replications .*{text}"):
        sbc(**other(**changes))


class Bad(Exact):
    """Gives bad draws."""

    def __init__(self, change=None):
        super().__init__()
        self.change = change

    def sample(self, n_samples, random_state=None):
        return self.change(super().sample(n_samples, random_state))


@pytest.mark.parametrize(
    "change", [lambda X: X[:, :1], lambda X: X[1:], lambda X: X * np.nan, lambda X: X[0], lambda X: X[None]]
)
def test_bad_draws_are_failures(change):
    with pytest.raises(RuntimeError, match=r"`estimator` gave draws of shape \(.*\), .*of 9 rows"):
        sbc(**other(make_target=NORMAL.posterior(), estimator=Bad(change)))


def test_other_quantities_in_some_replications_are_failures():
    def quantities(theta, y):
        return {"a" if y[0] > 0 else "b": 0.0}

    with pytest.warns(UserWarning, match="it has the quantities x0, x1, ., expected x0, x1, . as others have"):
        sbc(**other(quantities=quantities, n=20, make_target=NORMAL.posterior(), estimator=Exact()))


def test_a_simulator_may_fail_in_the_first_replication():
    def simulate_data(theta, rng):
        if theta[0] > 1:
            raise ArithmeticError("overflow")
        return NORMAL.data(theta, rng)

    with pytest.warns(UserWarning, match="`simulate_data` raised ArithmeticError: overflow"):
        result = sbc(**other(simulate_data=simulate_data, n=20, make_target=NORMAL.posterior(), estimator=Exact()))
    assert 0 < len(result.failures) < 20


# Bad input


NAN = np.array([1.0, np.nan])
HAS_TWO_NAMES = from_score_fn(lambda x: -x, 3)
BAD = {
    **{
        f"no {name}": ({name: 3}, TypeError, f"`{name}` must be a function, got a int")
        for name in ("simulate_prior", "simulate_data", "make_target", "quantities")
    },
    "a class": ({"estimator": Laplace}, TypeError, r"is the class Laplace; pass an instance, Laplace\(\)"),
    "no estimator": ({"estimator": 3}, TypeError, "`estimator` must be an approximator, got a int, which has no fit"),
    "no replication": ({"n": 0}, ValueError, "n == 0"),
    "half a replication": ({"n": 0.5}, TypeError, "n must be an instance of int"),
    "no draw": ({"n_draws": 0}, ValueError, "n_draws == 0"),
    "parameters in a row": ({"simulate_prior": lambda rng: rng.normal(size=(1, 2))}, ValueError, r"shape \(1, 2\)"),
    "parameters that are nan": ({"simulate_prior": lambda rng: NAN}, ValueError, "`simulate_prior` gave parameters"),
    "parameters that are text": ({"simulate_prior": lambda rng: ["a"]}, ValueError, "expected finite numbers"),
    "parameters by name": ({"simulate_prior": lambda rng: {"a": 1.0}}, TypeError, "no `constrain`"),
    "no target": ({"make_target": lambda y: None}, TypeError, "`make_target` returned a NoneType, expected a Target"),
    "a class of targets": ({"make_target": lambda y: Target}, TypeError, "`make_target` returned the class Target"),
    "other features": ({"make_target": lambda y: HAS_TWO_NAMES}, ValueError, "a target of 3 features, expected 2"),
    "other names": ({"names": ["a"]}, ValueError, "`names` are 1, expected 2"),
    "names twice": ({"names": ["a", "a"]}, ValueError, "give one name twice, in a, a"),
    "quantity twice": (
        {"quantities": lambda theta, y: {"x0": 1.0}},
        ValueError,
        "give one name twice, in x0, x1, x0",
    ),
    "quantity nan": ({"quantities": lambda theta, y: np.nan}, ValueError, "`quantities` returned nan"),
    "quantity array": ({"quantities": lambda theta, y: {"a": theta}}, ValueError, r"of shape \(2,\) as 'a'"),
}


@pytest.mark.parametrize(("changes", "kind", "text"), BAD.values(), ids=BAD)
def test_bad_input_is_told_before_the_first_fit(changes, kind, text, monkeypatch):
    monkeypatch.setattr(Laplace, "fit", lambda *_: pytest.fail("it was fitted"))
    with pytest.raises(kind, match=text):
        sbc(**other(**(data_of_the_prior | changes)))


#: Data whatever the parameters are.
data_of_the_prior = {"simulate_data": lambda theta, rng: rng.normal(size=4)}


ANOTHER_SHAPE = "`posterior` must be a fitted approximator, draws of shape"
BAD_POSTERIORS = [
    *((wrong, ANOTHER_SHAPE) for wrong in (np.ones(3), np.ones((0, 2)), {}, {"a": np.ones(3), "b": np.ones(2)}, 3.0)),
    (NAN[None], "`posterior` gave parameters of float64"),
    (Laplace(), "not fitted"),
]


@pytest.mark.parametrize(("posterior", "text"), BAD_POSTERIORS)
def test_a_bad_posterior_is_refused(posterior, text):
    with pytest.raises(NotFittedError if text == "not fitted" else ValueError, match=text):
        posterior_sbc(posterior, NORMAL.data, lambda y, new: NORMAL.score(new), Laplace(), np.ones(4))


# Parameters by name


def scale_target(y):
    """The posterior of a normal mean and standard deviation, by the prior N(0, 1) and Exp(1)."""
    y = torch.as_tensor(y)

    def log_prob(mean, scale):
        of_data = -((y - mean[:, None]) / scale[:, None]).square().sum(1) / 2 - len(y) * scale.log()
        return of_data - mean.square() / 2 - scale

    return constrained(log_prob, {"mean": "real", "scale": "positive"})


def scale_prior(rng):
    return {"scale": rng.exponential(), "mean": rng.normal()}


def scale_data(theta, rng):
    return theta["mean"] + theta["scale"] * rng.normal(size=5)


def test_parameters_by_name_are_ranked_among_draws_of_the_model():
    def quantities(theta, y):
        return {"sum": theta["mean"] + theta["scale"]}

    result = sbc(scale_prior, scale_data, scale_target, Laplace(), n=5, quantities=quantities, random_state=0)
    assert result.names == ("scale", "mean", "sum")
    draws = {"mean": np.zeros(4), "scale": np.full(4, 0.5)}
    both = posterior_sbc(
        draws, scale_data, lambda *y: scale_target(np.concatenate(y)), Laplace(), np.ones(3), n=5, random_state=0
    )
    assert both.names == ("mean", "scale")


@pytest.mark.parametrize("theta", [{"tau": 1.0}, {"mean": np.ones(2)}])
def test_parameters_that_the_target_does_not_have_are_told(theta):
    with pytest.raises(ValueError, match=r"expected some of the target's, \{'mean': .*, 'scale': .*\}"):
        sbc(lambda rng: theta, lambda theta, rng: np.ones(3), scale_target, Laplace(), n=2)


def test_names_of_a_target_are_those_of_the_ranks():
    target = from_log_prob(lambda x: -x.square().sum(1) / 2, 2, names=["a", "b"])
    assert sbc(**other(make_target=lambda y: target)).names == ("a", "b")
    assert sbc(**other(make_target=lambda y: target, names=["c", "d"])).names == ("c", "d")


def test_one_parameter_may_be_a_number():
    result = sbc(lambda rng: rng.normal(), lambda theta, rng: theta, lambda y: lambda x: y - 2 * x, Laplace(), n=2)
    assert result.names == ("x0",)


# Results


def test_bands_and_plot_agree_with_the_p_values():
    result = calibrated("prior too narrow", n=100, random_state=0)
    for level in (0.5, 0.95):
        z, low, high = result.ecdf_bands(level)
        F = result.ecdf()
        left = ((low[:, None] > F) | (high[:, None] < F)).any(0)
        np.testing.assert_array_equal(left, result.p_values <= 1 - level)
    assert result.p_value == min(1, 2 * result.p_values.min())  # Bonferroni's
    assert f"p = {result.p_value:.2g}" in str(result).splitlines()[0]
    display = result.plot()
    for line, column in zip(display.lines_, F.T, strict=True):
        np.testing.assert_allclose(line.get_ydata(), column - z)
    plt.close("all")
