"""The stages of the pilot: each has a target that it exists for, and one that it leaves alone; and one judge."""

import itertools
import math
from dataclasses import replace
from functools import cache
from unittest.mock import Mock

import pytest
import torch
from members import every
from plain_targets import UNEQUAL, as_score, generator, gumbel_score, log_gamma_score, normal
from scipy.special import digamma, polygamma

from skksivi import KSIVIApproximator, load, save
from skksivi.parameters import Pilot
from skksivi.pilot._modes import MAX_STARTS, find_modes
from skksivi.pilot._pilot import QUICK, THOROUGH, find_whitening
from skksivi.pilot._points import MANY_FEATURES, Grade, PilotPoints, judge_chains, judge_halves, judge_weights
from skksivi.pilot._stages import Known, LongChains, WiderSearch, run_stages
from skksivi.pilot._symmetries import same_mode
from skksivi.score._probe import in_double
from skksivi.score._tally import DivergedError


@cache
def pilot_of(score_fn, d, *, seed=0, warps=True, init=None, **settings):
    """Return the map, the points, and the verdicts of the stages that ran."""
    score, pilot = in_double(score_fn, d), Pilot(**settings)
    whitening, points = find_whitening(pilot, score, generator(seed), init=init, warps=warps)
    return whitening, points, {a.stage: a.verdict for a in whitening.attempts}


def bent_score(x):
    """a ~ N(0, 1), b | a ~ N(a^2, .3^2)."""
    a, b = x.split(1, 1)
    r = (b - a.square()) / 0.09
    return torch.cat([-a + 2 * a * r, -r], 1)


# Each on a target that it exists for and on one that it leaves alone


@every(
    "stage, score_fn, d",
    [
        ("independent directions", gumbel_score, 3),
        ("matched Gaussian", torch.neg, 3),
        ("short chains", bent_score, 2),
        ("all modes", UNEQUAL.score_fn, 2),
    ],
)
def test_a_stage_ends_the_pilot_of_its_target(stage, score_fn, d):
    settings = {"skip": ("independent directions",)} if stage == "matched Gaussian" else {}
    whitening, points, verdicts = pilot_of(score_fn, d, **settings)
    assert list(verdicts)[-1] == stage
    assert verdicts[stage].startswith("good: J = ")
    assert points.converged
    assert whitening.converged


def test_other_modes_and_independent_directions_are_left_alone_where_there_are_none():
    """Other modes also where `init` names the only one."""
    _, _, verdicts = pilot_of(bent_score, 2)
    assert verdicts["other modes"] == verdicts["independent directions"] == ""
    assert "all modes" not in verdicts
    _, _, verdicts = pilot_of(UNEQUAL.score_fn, 2, init=tuple(UNEQUAL.means[0].tolist()))
    assert "other modes" not in verdicts
    assert "independent directions" not in pilot_of(gumbel_score, 2, warps=False)[2]


def test_stages_may_be_left_out():
    whitening, _, verdicts = pilot_of(torch.neg, 2, skip=("other modes", "independent directions"))
    assert list(verdicts) == ["mode search", "matched Gaussian"]
    assert whitening.ascents is None
    with pytest.raises(ValueError, match=r"`skip` has 'other mode', which is no stage; these are 'mode search', "):
        KSIVIApproximator(whiten=Pilot(skip=["other mode"])).fit(torch.neg, n_features=2)


@pytest.mark.slow
def test_efforts_are_slices_of_one_list():
    assert QUICK[-1].name == "more trajectories"
    settings = {"skip": ("independent directions", "matched Gaussian", "short chains"), "budget": 0}
    for effort, last in (("low", "other modes"), ("auto", "long chains"), ("high", "long chains")):
        assert list(pilot_of(gumbel_score, 2, effort=effort, **settings)[2])[-1] == last
    _, points, verdicts = pilot_of(torch.neg, 2, effort="high", budget=0)
    assert list(verdicts)[-1] == THOROUGH[-1].name
    assert "good: halves" in verdicts["long chains"]
    assert points.converged


# Long chains


def test_long_chains_have_the_moments_of_a_skewed_target():
    """Five standard errors of the mean, 10% of the variance."""
    _, points, verdicts = pilot_of(log_gamma_score, 2, warps=False, effort="high", budget=200_000)
    assert verdicts["long chains"].startswith("good: halves of ")
    u = (points.x - digamma(1.5)) / math.sqrt(polygamma(1, 1.5))
    assert (u.mean(0).abs() < 5 * points.mean_se / math.sqrt(polygamma(1, 1.5))).all()
    assert (u.var(0) - 1).abs().max() < 0.1


@every("budget", [2_000, 60_000])
def test_long_chains_keep_a_part_of_each_mode_where_the_budget_ends(budget):
    score = as_score(UNEQUAL.score_fn)
    known = Known(score, UNEQUAL.means, True, Pilot(), generator(), False)
    known.modes = find_modes(score, UNEQUAL.means, generator())
    with score.tally.at_most(budget):
        (points,) = LongChains().propose(known)
    assert score.tally.is_spent
    assert not points.converged
    torch.testing.assert_close(UNEQUAL.shares_of(points.x).double(), UNEQUAL.weights, rtol=0, atol=0.1)


# The judge


@every(
    "J, se, error, n_rounds, good",
    [
        (0.05, 0.01, 0.01, 1, True), (0.07, 0.001, 0.01, 1, False), (0.07, 0.001, 0.01, 5, True),
        (0.15, 0.001, 0.01, 5, False), (0.15, 0.03, 0.01, 5, True), (0.21, 0.1, 0.01, 5, False),
        (0.0, 0.0, 0.025, 1, False), (0.0, 0.0, 0.025, 5, True), (0.0, 0.0, 0.04, 5, False),
        (math.nan, 0.0, 0.01, 1, False),
    ],
)  # fmt: skip
def test_weights_are_good_enough_by_divergence_and_errors(J, se, error, n_rounds, good):
    """Of two features: .03 nats each at once, later .1, and .05 for sure; errors up to .02 at once, later .03."""
    verdict = judge_weights((J, se), error, 2, n_rounds)
    assert verdict.good == good
    beyond = {f"J = {J:.2g} nats > {most:.2g}" for most in (0.06, 0.1, 0.2)}
    beyond |= {"errors 0.025 > 0.02", "errors 0.04 > 0.03"}
    assert verdict.reason in ({f"J = {J:.2g} nats, errors {error:.2g}"} if good else beyond)


@every(
    "rhat, error, d, n, good",
    [
        (1.02, 0.01, MANY_FEATURES, 40, True), (1.02, 0.01, MANY_FEATURES - 1, 40, False),
        (1.05, 0.01, MANY_FEATURES, 40, False), (1.02, 0.04, MANY_FEATURES, 40, False),
        (1.02, 0.04, MANY_FEATURES, 200, True),
    ],
)  # fmt: skip
def test_chains_are_believed_that_agree(rhat, error, d, n, good):
    verdict = judge_chains(rhat, error, d, n)
    assert verdict.good == good
    assert (verdict.reason == "R-hat 1.05 > 1.03") == (rhat == 1.05)


def test_halves_of_chains_agree_within_their_noise():
    kept = normal(40 * 30, 50).view(40, 30, 50)
    assert judge_halves(kept).grade == Grade.GOOD
    kept[20:, :, 3] += 2
    assert judge_halves(kept).grade == Grade.ROUGH


def test_small_errors_of_many_features_raise_a_verdict():
    for d, error, is_small in ((MANY_FEATURES, 0.05, True), (MANY_FEATURES, 0.2, False), (5, 0.05, False)):
        verdict = PilotPoints(normal(500, d), [500], error * torch.ones(d)).judged()
        assert verdict.grade == (Grade.SMALL_ERRORS if is_small else Grade.ROUGH)
        assert not verdict.good


# What is told, and what goes wrong


def test_the_report_is_saved_with_a_fit(tmp_path):
    q = KSIVIApproximator(random_state=0).fit(gumbel_score, n_features=2)
    report = q.whitening_.report()
    assert [line.split("  ")[0] for line in report.splitlines()] == [a.stage for a in q.whitening_.attempts]
    assert sum(a.n_calls for a in q.whitening_.attempts) == q.whitening_.n_score_calls
    save(q, tmp_path / "q")
    assert load(tmp_path / "q").whitening_.report() == report
    q = KSIVIApproximator(whiten="laplace", max_iter=1).fit(torch.neg, n_features=2)
    assert q.whitening_.report() == "Laplace approximation"


def test_of_rough_points_the_nearest_to_the_target_are_taken():
    """Wherever they come in the order in which they were found: an overly wide, a right and a narrow set."""
    noise = torch.randn(200, 3, generator=generator()).double()
    score = replace(in_double(torch.neg, 3), log_prob=lambda x: -x.square().sum(1) / 2)
    for scales in itertools.permutations([30.0, 1.2, 0.1]):
        known = Known(score, noise[:1], True, Pilot(), generator(), False)
        for scale in scales:
            known.add(PilotPoints(scale * noise, [200], scale * noise.std(0)))
        known.take_best()
        assert known.points.x.std() == pytest.approx(1.2, rel=0.1)


def test_a_wider_search_begins_again_from_the_better_mode(monkeypatch):
    """Both modes are there from its point of view, and each stage is in the report."""
    far = UNEQUAL.means[1:]
    modes = find_modes(as_score(UNEQUAL.score_fn), far, generator())
    monkeypatch.setattr("skksivi.pilot._stages.search_around", lambda *_, **__: modes)
    known = Known(as_score(UNEQUAL.score_fn), UNEQUAL.means[:1], True, Pilot(budget=0), generator(), False)
    run_stages(QUICK[:1], known)
    run_stages((WiderSearch(QUICK, MAX_STARTS),), known)
    assert known.points.converged
    assert same_mode(known.mode, modes.maps[0])
    torch.testing.assert_close(known.points.x.mean(0), far[0].double(), rtol=0, atol=0.5)
    assert sum(attempt.n_calls for attempt in known.attempts) == known.score.tally.total


def test_what_the_last_stages_lose_leaves_the_points_before_them(monkeypatch):
    monkeypatch.setattr("skksivi.pilot._stages.LongChains.propose", Mock(side_effect=DivergedError))
    whitening, points, verdicts = pilot_of(torch.neg, 3, seed=2, effort="high", warps=False)
    assert verdicts["long chains"] == ""
    assert points.converged
    assert whitening.converged
