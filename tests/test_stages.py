"""The sources of a start: each has a target that it exists for, and one that it leaves alone; and one judge."""

from functools import cache
from unittest.mock import Mock

import pytest
import torch
from members import every
from plain_targets import UNEQUAL, generator, gumbel_score, normal, resolved

from skksivi import KSIVIApproximator, load, save
from skksivi.parameters import Pilot
from skksivi.pilot._points import MANY_FEATURES, Grade, PilotPoints, judge_chains, judge_halves
from skksivi.score._probe import in_double
from skksivi.score._tally import DivergedError
from skksivi.start import _find, find_whitening
from skksivi.targets import from_log_prob


@cache
def pilot_of(score_fn, d, *, seed=0, warps=True, init=None, **settings):
    """Return the map, the points, and the sources that ran."""
    score, pilot = in_double(score_fn, d), Pilot(**settings)
    whitening, points = find_whitening(pilot, score, generator(seed), init=init, warps=warps)
    return whitening, points, {a.stage: a for a in whitening.attempts}


def bent_score(x):
    """a ~ N(0, 1), b | a ~ N(a^2, .1^2)."""
    a, b = x.split(1, 1)
    r = (b - a.square()) / 0.01
    return torch.cat([-a + 2 * a * r, -r], 1)


def thin_log_prob(x):
    """A ridge around 4 tanh(a) that is a fortieth as wide as long."""
    return -x[:, 0].square() / 18 - 50 * (x[:, 1] - 4 * torch.tanh(x[:, 0])).square()


# Each on a target that it exists for and on one that it leaves alone


@every(
    "source, score_fn, d, warps",
    [
        ("independent directions", gumbel_score, 3, True),
        ("importance sampling", torch.neg, 3, True),
        ("importance sampling", gumbel_score, 3, False),
        ("importance sampling", UNEQUAL.score_fn, 2, True),
        ("tree of cells", resolved(from_log_prob(thin_log_prob, 2)), 2, False),
        ("short chains", bent_score, 2, True),
    ],
)
def test_a_source_ends_the_start_of_its_target(source, score_fn, d, warps):
    whitening, points, attempts = pilot_of(score_fn, d, warps=warps)
    assert list(attempts)[-1] == source
    assert attempts[source].verdict.startswith("good: every number is within ")
    assert points.converged
    assert whitening.converged
    assert (whitening.warp is not None) == (source in ("independent directions", "short chains"))


def test_other_modes_and_independent_directions_are_left_alone_where_there_are_none():
    """Other modes also where `init` names the only one."""
    whitening, _, attempts = pilot_of(bent_score, 2, warps=True)
    assert len(whitening.modes) == 1
    assert attempts["independent directions"].n_calls < 200
    assert pilot_of(UNEQUAL.score_fn, 2, init=tuple(UNEQUAL.means[0].tolist()))[2]["other modes"].n_calls == 0
    assert pilot_of(gumbel_score, 3, warps=False)[2]["independent directions"].n_calls == 0


def test_sources_may_be_left_out():
    whitening, _, attempts = pilot_of(torch.neg, 2, skip=("other modes", "independent directions"))
    assert list(attempts) == ["mode search", "importance sampling"]
    assert whitening.ascents is None
    with pytest.raises(ValueError, match=r"`skip` has 'other mode', which is no stage; these are 'independent dir"):
        KSIVIApproximator(whiten=Pilot(skip=["other mode"])).fit(torch.neg, n_features=2)


# The judge


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


def test_what_the_last_source_loses_leaves_the_points_before_it(monkeypatch):
    monkeypatch.setattr(_find, "ChainEnsemble", Mock(side_effect=DivergedError))
    whitening, points, attempts = pilot_of(bent_score, 2, seed=2)
    assert attempts["short chains"].verdict == attempts["importance sampling"].verdict
    assert points.found_by == whitening.found_by == "importance sampling"
    assert not points.converged
