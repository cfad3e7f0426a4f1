"""A table of a posterior's numbers, each with its standard error."""

import math
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from members import every
from plain_targets import Mixture
from scipy import optimize, special, stats

from skksivi import summary
from skksivi._utils.arrays import with_error
from skksivi.baselines import SVGD, Laplace
from skksivi.judge import Grade, Verdict
from skksivi.targets import Banana, constrained, from_log_prob

LEVELS = (0.05, 0.5, 0.95)


def log_gamma(d=1, shape=3.0):
    """The target of d independent logarithms of Gamma(shape): skewed to the left."""
    return from_log_prob(lambda x: (shape * x - x.exp()).sum(-1), n_features=d)


def normal(d, **given):
    """The target N(0, I), with attributes of your choice."""
    target = from_log_prob(lambda x: -x.square().sum(-1) / 2, n_features=d)
    for name, value in given.items():
        setattr(target, name, value)
    return target


def fitted(target):
    return Laplace(dtype="float64", random_state=0).fit(target)


def numbers(table, i=0):
    """The mean, the sd and the quantiles of a parameter, and their standard errors."""
    values = table.mean[i], table.sd[i], *table.quantiles[:, i]
    return np.array([values, (table.mean_se[i], table.sd_se[i], *table.quantiles_se[:, i])])


P = Mixture([0.8, 0.2], [[0.0], [1.0]], [1.0, 1.6])
OF_P = [
    optimize.brentq(lambda x, q=q: 0.8 * stats.norm.cdf(x) + 0.2 * stats.norm.cdf(x, 1, 1.6) - q, -9, 9)
    for q in LEVELS
]
#: A skewed target, and its mean, its sd and its quantiles; that of a scale is fitted by its logarithm.
SKEWED = {
    "mixture": (from_log_prob(P.log_prob, n_features=1), [0.2, math.sqrt(0.8 + 0.2 * (1.6**2 + 1) - 0.2**2), *OF_P]),
    "log of Gamma": (
        log_gamma(),
        [special.digamma(3), special.polygamma(1, 3) ** 0.5, *np.log(stats.gamma(3).ppf(LEVELS))],
    ),
    "Gamma": (constrained(lambda a: 3 * a.log() - a, {"a": "positive"}), [4, 2, *stats.gamma(4).ppf(LEVELS)]),
}


@every("target, exact", SKEWED)
def test_intervals_around_wrong_fits_cover_the_posterior(target, exact):
    """Of 95% intervals that cover 95%, n by chance leave out more than this with probability 1e-4 for each number; of
    ones that cover 80% half of all numbers would fail.
    """
    n, q = 20, fitted(target)
    found = np.array([numbers(summary(q, target, random_state=seed)) for seed in range(n)])
    z = np.abs(found[:, 0] - exact) / found[:, 1]
    assert np.isfinite(z).all()
    assert ((z > 1.96).sum(0) <= stats.binom.ppf(1 - 1e-4, n, 0.05)).all()
    assert (np.median(found[:, 1], 0) < 0.15 * exact[1]).all()


def test_wrong_fits_are_told_and_right_ones_are_not():
    """At two standard errors beyond a tenth of an sd a right fit is accused with probability below 1e-6."""
    told = r"Draws of the fit are off, .*: the .* of `x\[\d\]` is .*; `refine\(est, target\)` corrects"
    for target, words in ((normal(2), "^$"), (normal(5), "^$"), (log_gamma(2), told)):
        assert re.search(words, summary(fitted(target), target, random_state=0).warning)


def test_rows_are_the_parameters_of_the_user():
    numbered = ("x[0]", "x[1]", "x[2]", "x[3]")
    arrays = normal(4, constrain=lambda X: {"tau": np.exp(X[:, 0]), "b": X[:, 1:3], "S": X.reshape(-1, 2, 2)})
    for target, names in (
        (normal(4, names=tuple("abcd"), _is_named=True), tuple("abcd")),
        (normal(4).score_fn, numbered),
        (normal(4, constrain=lambda X: {}), numbered),
        (arrays, ("tau", "b[0]", "b[1]", "S[0, 0]", "S[0, 1]", "S[1, 0]", "S[1, 1]")),
    ):
        found = summary(fitted(normal(4)), target, random_state=0)
        assert found.names == names
    assert abs(found.mean[0] - math.exp(0.5)) < 4 * found.mean_se[0]
    np.testing.assert_allclose(found.mean[[1, 2]], found.mean[[4, 5]])


# What cannot be known


def of_one(constrain, **options):
    """The summary of a normal target in a parameter of it."""
    target = normal(1, constrain=lambda X: {"a": constrain(X[:, 0])})
    return summary(fitted(normal(1)), target, random_state=0, **options)


def test_what_is_not_a_continuous_number_is_noted():
    for constrain, note in (
        (lambda x: np.ones(len(x)), "constant"),
        (lambda x: 1 + 1e-15 * x, "constant"),
        (lambda x: np.where(x > 1, np.nan, x), r"not finite at [\d,]+ draws"),
        (lambda x: np.where(x < -1, math.inf, x), r"not finite at [\d,]+ draws"),
        (np.round, ""),
        (lambda x: x > 0, ""),
    ):
        found = of_one(constrain)
        assert re.fullmatch(note, found.notes[0])
        finite = np.isfinite(numbers(found))
        assert finite.all() or (note.startswith("not") and not finite.any())
    assert numbers(of_one(lambda x: np.ones(len(x)))).tolist() == [[1, 0, 1, 1, 1], [0] * 5]


def test_parameters_need_not_exist_where_nothing_lies():
    """A model is not evaluated at draws without weight, such as thirty times as far as a fit reaches."""

    def constrain(x):
        if (np.abs(x) > 12).any():
            raise ZeroDivisionError
        return np.exp(x)

    found = of_one(constrain)
    assert abs(found.mean[0] - math.exp(0.5)) < 4 * found.mean_se[0]


def test_quantiles_beyond_the_draws_are_not_known():
    found = of_one(lambda x: x, quantiles=(1e-4, 0.5))
    assert np.isnan(found.quantiles_se[:, 0]).tolist() == [True, False]
    assert found.notes == ("few draws beyond 0.01%",)


def test_errors_of_unreliable_weights_are_not_known():
    particles = SVGD(n_particles=200, max_iter=2, random_state=0).fit(normal(2))
    for q, target, why in (
        (fitted(normal(2)), FAR, "not reliable .* 100% of the posterior is where the fit hardly draws"),
        (fitted(Banana()), Banana(), r"not reliable \(k-hat .* is allowed; effective sample size \d+, 30 are needed"),
        (particles, normal(2), "SVGD has no density, so its draws have no weights"),
    ):
        found = summary(q, target, random_state=0)
        words = f"The numbers are the fit's own, and their errors are unknown: .*{why}.*see `diagnose"
        assert re.search(words, found.warning)
        assert found.notes == ("errors unknown",) * 2
        for value, se in (numbers(found, 0), numbers(found, 1)):
            assert np.isfinite(value).all()
            assert np.isnan(se).all()


@every("d, note", [(2, "errors unknown"), (30, "")])
def test_of_a_coordinate_in_which_a_fit_has_collapsed_no_error_is_known(d, note):
    q, target = with_chains(d, 0.0, 1.0)
    q.sampler_.x[:, 1] = 0.3
    found = summary(q, target, random_state=0)
    value, se = numbers(found, 1)
    assert value == pytest.approx([0.3, 0, 0.3, 0.3, 0.3])
    assert np.isnan(se).all()
    assert found.notes[:2] == (note, "constant, errors unknown")


FAR = from_log_prob(lambda x: -(x - 30).square().sum(-1) / 2, n_features=2)
#: What is found at the end of a fit; a target, or none for that of chains of 30 features; what the table says.
FOUND = [
    (Grade.GOOD, FAR, "; or `target` is not what was fitted, for which it was good"),
    (Grade.WRONG, normal(2), "Draws of the fit are off, unlike this table: a reason; `refine"),
    (Grade.ROUGH, normal(2), "^$"),  # more draws than the fit had are reliable, and find nothing
    (Grade.GOOD, normal(2), "^$"),
    (Grade.ROUGH, None, "The fit was found to be rough: a reason; see"),
    (Grade.GOOD, None, "^$"),
]


@every("grade, target, words", FOUND)
def test_what_was_found_at_the_end_of_a_fit_is_said(grade, target, words):
    q, target = (fitted(normal(2)), target) if target else with_chains(30, 0.0, 1.0)
    q.verdict_ = Verdict(grade, "a reason")
    assert re.search(words, summary(q, target, random_state=0).warning)


def with_chains(d, mean, sd, error=0.02):
    """A fit of particles N(0, I), and chains that have found moments."""
    target = normal(d, constrain=lambda X: {"x": X, "scale": np.exp(-X[:, 0]), "sum": X.sum(1)})
    q = SVGD(n_particles=500, max_iter=1, random_state=0).fit(target)
    X = np.random.RandomState(0).normal(size=(500, d))
    q.sampler_ = replace(q.sampler_, x=(X - X.mean(0)) / X.std(0))
    moments = {"mean": mean, "sd": sd, "mean_se": error * sd}
    q.whitening_ = replace(q.whitening_, **{name: np.full(d, value) for name, value in moments.items()})
    return q, target


@every("mean, sd", [(0.0, 1.0), (0.5, 1.0), (0.0, 2.0)])
def test_chains_behind_a_fit_of_many_features_know_the_errors(mean, sd):
    """Of coordinates and of their monotone functions; each reaches to the number of the chains."""
    q, target = with_chains(30, mean, sd)
    found = summary(q, target, random_state=0)
    assert "errors by the chains behind the fit" in found.source
    value, se = numbers(found, 3)
    assert (np.abs(value - [mean, sd, *(mean + sd * stats.norm.ppf(LEVELS))]) < 2 * se + 0.15).all()
    assert 0.02 * sd <= se[0] <= 0.04 * sd + abs(mean) + 0.1
    assert found.notes == ("",) * 31 + ("errors unknown",)
    assert found.mean_se[30] == pytest.approx(found.sd[30] * found.mean_se[0], rel=0.2)
    assert np.isnan(summary(*with_chains(29, mean, sd), random_state=0).mean_se).all()


REFUSED = [
    ({"quantiles": (0.0, 0.5)}, ValueError, r"`quantiles` must be rising .* got \(0.0, 0.5\)"),
    *(({"quantiles": q}, ValueError, "`quantiles`") for q in ((0.95, 0.05), (math.nan,), "5%", None, np.eye(2) / 2)),
    ({"n_samples": 99}, ValueError, "n_samples == 99"),
    ({"n_samples": True}, TypeError, "n_samples"),
    ({"target": normal(3)}, ValueError, "the target has 3 features, expected 2 as in `fit`"),
    ({"target": None}, ValueError, "has kept no weighted draws: pass `target`, the one that it was fitted to"),
    ({"target": None, "within": 0.1}, ValueError, "`within` asks for further draws, which need `target`"),
    ({"target": 3}, TypeError, "`target` must be a Target or its score function"),
    ({"within": 0}, ValueError, "within == 0"),
    ({"max_score_calls": 20}, ValueError, "`max_score_calls` does not suffice for 100 weighted draws"),
    ({"target": normal(2, constrain=lambda X: [X])}, TypeError, "`constrain` of `target` returned a list"),
    ({"target": normal(2, constrain=lambda X: {"a": X.T})}, ValueError, r"returned shape \(2, \d+\) for 'a'"),
    ({"target": normal(2, constrain=lambda X: {"a": 1.0})}, ValueError, r"returned shape \(\) for 'a'"),
    ({"target": normal(2, constrain=lambda X: {"a": ["b"] * len(X)})}, TypeError, "must hold real numbers"),
]


@every("change, error, message", REFUSED)
def test_bad_input_is_named(change, error, message):
    with pytest.raises(error, match=message):
        summary(fitted(normal(2)), **{"target": normal(2), "random_state": 0, **change})


# What is shown


def test_a_number_ends_at_the_first_digit_of_its_error():
    for value, se, text in (
        (1.23456, 0.0123, "1.23 ± 0.01"),
        (1.23456, 0.097, "1.2 ± 0.1"),
        (-0.001, 0.02, "0.00 ± 0.02"),
        (12345.6, 321.0, "12300 ± 300"),
        (1.23456e9, 3.2e7, "1.23e+09 ± 3e+07"),
        (1.23456e-8, 3.2e-10, "1.23e-08 ± 3e-10"),
        (0.5, 0.0, "0.5 ± 0"),
        (1.23456, math.nan, "1.23 ± ?"),
        (math.nan, math.nan, "?"),
    ):
        assert with_error(value, se) == text


def test_a_table_is_aligned_and_has_all_in_its_frame():
    pandas = pytest.importorskip("pandas", reason="the frame needs pandas")
    long = "a <long> name of a parameter of the model"
    target = normal(3, constrain=lambda X: {"a": X[:, 0], "b": 1000 * X[:, 1], long: np.ones(len(X))})
    found = summary(fitted(target), target, quantiles=(0.025, 0.5), random_state=0)
    lines = str(found).splitlines()
    assert repr(found) == str(found)
    assert lines[0].split() == ["mean", "sd", "2.5%", "50%", "note"]
    assert [line[:30].strip() for line in lines[1:4]] == ["a", "b", f"{long[:29]}…"]
    assert len({line.index(" ± ", 40) for line in lines[1:3]}) <= 2
    assert max(map(len, lines)) <= 100
    words = r"2,000 weighted draws, effective sample size [\d,]+, k-hat 0.\d\d; [\d,]+ score"
    assert re.search(words, " ".join(lines[4:]))
    frame = found.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert [*frame.columns] == ["mean", "mean_se", "sd", "sd_se", "2.5%", "2.5%_se", "50%", "50%_se", "note"]
    assert [*frame.index] == ["a", "b", long]
    np.testing.assert_array_equal(frame.loc["b"].iloc[:-1].astype(float), numbers(found, 1).T.ravel())
    page = found._repr_html_()
    assert page.count("<tr>") == 4
    assert "a &lt;long&gt; name" in page


def test_a_table_of_many_parameters_or_quantiles_stays_readable():
    target = normal(1, constrain=lambda X: {"y": np.cumsum(np.repeat(X, 80, 1), 1)})
    lines = str(summary(fitted(normal(1)), target, n_samples=100, random_state=0)).splitlines()
    assert sum(line.startswith("y[") and "±" in line for line in lines) == 60
    assert any("... 20 more ..." in line for line in lines)
    many = summary(fitted(normal(1)), normal(1), quantiles=np.linspace(0.1, 0.9, 17), random_state=0)
    assert max(map(len, str(many).splitlines())) <= 100
    assert str(many).count("x[0]") > 1
    assert summary(fitted(normal(1)), normal(1), quantiles=(), random_state=0).quantiles.shape == (0, 1)


def test_a_frame_without_pandas_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="`to_frame` needs pandas: install it with `pip install pandas`"):
        of_one(lambda x: x).to_frame()
