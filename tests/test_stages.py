"""The stages of the pilot: each has a target that it exists for, and one that it leaves alone; and one judge."""

import itertools
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from plain_targets import RING, UNEQUAL, as_score, generator, gumbel_score, log_gamma_score, normal
from scipy.special import digamma, polygamma

from skksivi import KSIVIApproximator, load, save
from skksivi.coordinates._affine import Affine
from skksivi.parameters import Pilot
from skksivi.pilot._modes import FEW_STARTS, MAX_STARTS, ModeMaps, find_modes
from skksivi.pilot._pilot import QUICK, THOROUGH, find_whitening
from skksivi.pilot._points import (
    MANY_FEATURES,
    Grade,
    PilotPoints,
    Verdict,
    judge_chains,
    judge_halves,
    judge_weights,
)
from skksivi.pilot._stages import (
    Known,
    LongChains,
    Newton,
    OtherModes,
    Spike,
    WarpedCoordinates,
    WiderSearch,
    run_stages,
)
from skksivi.pilot._symmetries import same_mode
from skksivi.score._probe import in_double
from skksivi.score._tally import BudgetError, DivergedError

THOROUGH_NAMES = ("wider mode search", "long chains")


@cache
def pilot_of(score_fn, d, *, seed=0, warps=True, init=None, **settings):
    """Return the map, the points, and the verdicts of the stages that ran."""
    whitening, points = find_whitening(
        Pilot(**settings), in_double(score_fn, d), generator(seed), init=init, warps=warps
    )
    return whitening, points, {a.stage: a.verdict for a in whitening.attempts}


def lost(*_):
    raise DivergedError


def bent_score(x):
    """a ~ N(0, 1), b | a ~ N(a^2, .3^2)."""
    a, b = x.split(1, 1)
    r = (b - a.square()) / 0.09
    return torch.cat([-a + 2 * a * r, -r], 1)


# Each on a target that it exists for and on one that it leaves alone


@pytest.mark.parametrize(
    ("stage", "score_fn", "d"),
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
    assert verdicts[stage].startswith("reliable weights (J = ")
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


def test_a_spike_alone_has_a_profile():
    eye, at = torch.eye(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for scale, applies in ((1e-8, True), (1e-3, False)):
        mode = Affine(at, torch.diag(torch.tensor([scale, 1.0], dtype=torch.float64)) @ eye)
        modes = ModeMaps([mode], torch.ones(1))
        known = Known(as_score(bent_score), at[None], False, Pilot(), generator(), True, modes=modes)
        assert Spike().applies(known) == applies


def test_few_features_have_no_stages_of_many():
    _, _, verdicts = pilot_of(
        gumbel_score, 2, warps=False, skip=("matched Gaussian", "short chains", *THOROUGH_NAMES)
    )
    assert not {"warped coordinates", "more trajectories"} & set(verdicts)
    many = pilot_of(torch.neg, MANY_FEATURES, skip=("independent directions", "matched Gaussian", *THOROUGH_NAMES))[2]
    assert "warped coordinates" not in many  # there are no chains


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
    assert "chains agree" in verdicts["long chains"]
    assert points.converged


# Long chains


def test_long_chains_have_the_moments_of_a_skewed_target():
    """Five standard errors of the mean, 10% of the variance."""
    _, points, verdicts = pilot_of(log_gamma_score, 2, warps=False, effort="high", budget=200_000)
    assert verdicts["long chains"].startswith("chains agree (halves of ")
    u = (points.x - digamma(1.5)) / math.sqrt(polygamma(1, 1.5))
    assert (u.mean(0).abs() < 5 * points.mean_se / math.sqrt(polygamma(1, 1.5))).all()
    assert (u.var(0) - 1).abs().max() < 0.1


@pytest.mark.parametrize("budget", [2_000, 60_000])
def test_long_chains_keep_a_part_of_each_mode_where_the_budget_ends(budget):
    score = as_score(UNEQUAL.score_fn)
    known = Known(score, UNEQUAL.means, True, Pilot(), generator(), False)
    known.modes = find_modes(score, UNEQUAL.means, generator())
    with score.tally.at_most(budget):
        (points,) = LongChains().propose(known)
    assert score.tally.is_spent
    assert not points.converged
    torch.testing.assert_close(UNEQUAL.shares_of(points.x).double(), UNEQUAL.weights, rtol=0, atol=0.1)


@pytest.mark.parametrize("p", [UNEQUAL, pytest.param(RING, marks=pytest.mark.slow)], ids=["unequal", "ring"])
def test_long_chains_have_as_many_points_of_a_mode_as_its_weight(p):
    score = as_score(p.score_fn)
    known = Known(score, torch.cat([p.means, 2 * p.means]), True, Pilot(budget=0), generator(), False)
    known.modes = find_modes(score, p.means, generator())
    assert not OtherModes().applies(known)
    points = list(LongChains().propose(known))[-1]
    assert sum(points.n_of_mode) == len(points.x)
    torch.testing.assert_close(p.shares_of(points.x).double(), p.weights, rtol=0, atol=0.03)


# The judge


@pytest.mark.parametrize(
    ("J", "se", "error", "n_rounds", "good"),
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
    beyond = {f"J = {J:.2g} nats > {most:.2g}" for most in (0.06, 0.1, 0.2)} | {
        "errors 0.025 > 0.02",
        "errors 0.04 > 0.03",
    }
    assert verdict.reason in ({f"J = {J:.2g} nats, errors {error:.2g}"} if good else beyond)


@pytest.mark.parametrize(
    ("rhat", "error", "d", "n", "good"),
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
    assert judge_halves(kept).grade == Grade.CHAINS_AGREE
    kept[20:, :, 3] += 2
    assert judge_halves(kept).grade == Grade.ROUGH


def test_small_errors_of_many_features_raise_a_verdict():
    x = normal(500, MANY_FEATURES)
    rough = PilotPoints(x, [500], 0.05 * torch.ones(MANY_FEATURES))
    assert rough.judged().grade == Grade.SMALL_ERRORS
    assert rough._replace(mean_se=0.2 * torch.ones(MANY_FEATURES)).judged().grade == Grade.ROUGH
    assert PilotPoints(x[:, :5], [500], 0.05 * torch.ones(5)).judged().grade == Grade.ROUGH
    assert max(Verdict(grade) for grade in Grade).grade == Grade.RELIABLE_WEIGHTS
    assert not Verdict(Grade.SMALL_ERRORS).good


# What is told, and what goes wrong


def test_the_report_is_saved_with_a_fit(tmp_path):
    q = KSIVIApproximator(random_state=0).fit(gumbel_score, n_features=2)
    report = q.whitening_.report()
    assert [line.split("  ")[0] for line in report.splitlines()] == [a.stage for a in q.whitening_.attempts]
    assert sum(a.n_calls for a in q.whitening_.attempts) == q.whitening_.n_score_calls
    save(q, tmp_path / "q")
    assert load(tmp_path / "q").whitening_.report() == report
    assert KSIVIApproximator(whiten="laplace", max_iter=1).fit(torch.neg, n_features=2).whitening_.report() == (
        "Laplace approximation"
    )


class Given:
    """A stage that finds what it is given, and then spends the budget."""

    name = "given"

    def __init__(self, *found):
        self.found = found

    def applies(self, known):
        return True

    def propose(self, known):
        yield from self.found
        raise BudgetError


def test_a_spent_budget_leaves_the_best_points(monkeypatch):
    best, worse = (
        PilotPoints(normal(50, 2, seed=grade), [50], torch.ones(2), Verdict(grade))
        for grade in (Grade.SMALL_ERRORS, Grade.ROUGH)
    )
    for found in ((best, worse), (worse, best)):
        monkeypatch.setattr("skksivi.pilot._pilot.QUICK", (Newton(), Given(*found)))
        whitening, points = find_whitening(Pilot(), in_double(torch.neg, 2), generator())
        assert points.x is best.x
        np.testing.assert_array_equal(whitening.mean, best.x.mean(0))
        assert not whitening.converged


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
    names = [attempt.stage for attempt in known.attempts]
    assert names == ["mode search", "mode search", "matched Gaussian", "wider mode search"]
    assert known.points.converged
    assert same_mode(known.mode, modes.maps[0])
    torch.testing.assert_close(known.points.x.mean(0), far[0].double(), rtol=0, atol=0.5)
    assert sum(attempt.n_calls for attempt in known.attempts) == known.score.tally.total


def test_stages_are_left_out_that_what_is_known_makes_useless(monkeypatch):
    """Warps of points that hardly tell a mean, and more starts where the first ones led to one mode."""
    tried = []
    monkeypatch.setattr("skksivi.pilot._stages.warped", lambda _, x, __: tried.append(x) or ())
    x = torch.randn(4000, MANY_FEATURES, generator=generator()).double()
    known = Known(in_double(torch.neg, MANY_FEATURES), x[:1], False, Pilot(), generator(), True)
    known.modes = ModeMaps([Affine(x[0], torch.eye(MANY_FEATURES).double())], torch.ones(1))
    for error, n_tried in ((0.25, 0), (0.05, 1)):
        known.points = PilotPoints(x, [4000], torch.full((MANY_FEATURES,), error))
        list(WarpedCoordinates().propose(known))
        assert len(tried) == n_tried
    assert WiderSearch(QUICK, FEW_STARTS).applies(known)
    assert not WiderSearch(QUICK, MAX_STARTS).applies(known)


def test_what_the_last_stages_lose_leaves_the_points_before_them(monkeypatch):
    monkeypatch.setattr("skksivi.pilot._stages.LongChains.propose", lost)
    whitening, points, verdicts = pilot_of(torch.neg, 3, seed=2, effort="high", warps=False)
    assert verdicts["long chains"] == ""
    assert points.converged
    assert whitening.converged
