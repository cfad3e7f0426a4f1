"""Progress, callbacks of scikit-learn and logging."""

import logging
import pickle
import re

import numpy as np
import pytest
from sklearn.base import clone

from skksivi import HKSIVIApproximator, KSIVIApproximator
from skksivi.baselines import SIVI
from skksivi.callbacks import EarlyStopping
from skksivi.model_selection import neg_ksd_scorer
from skksivi.parameters import Pilot
from skksivi.targets import Banana
from skksivi.training import _hooks
from skksivi.training._hooks import PILOT_PARTS

callback = pytest.importorskip("sklearn.callback", reason="callbacks need scikit-learn 1.9")

SETTINGS = {"max_iter": 3, "batch_size": 8, "hidden_layer_sizes": (4,), "whiten": "laplace", "random_state": 0}
APPROXIMATORS = [KSIVIApproximator(**SETTINGS), HKSIVIApproximator(n_layers=2, **SETTINGS)]
pytestmark = pytest.mark.filterwarnings("ignore:The draws are too:sklearn.exceptions.ConvergenceWarning")
EVERY_APPROXIMATOR = pytest.mark.parametrize("q", APPROXIMATORS, ids=lambda q: type(q).__name__)


class Recorder:
    """Remembers what it is told, and stops a fit after some reports."""

    def __init__(self, stop_after=None):
        self.stop_after = stop_after
        self.begun, self.ended, self.draws = [], [], []

    def setup(self, estimator, context):
        self.begun.append("setup")

    def teardown(self, estimator, context):
        self.ended.append("teardown")

    def on_fit_task_begin(self, estimator, context, *, X=None, **_):
        assert isinstance(X, Banana)
        self.begun.append(context.task_name)

    def on_fit_task_end(self, estimator, context, *, X=None, fitted_estimator=None, **_):
        self.ended.append(context.task_name)
        if context.task_name == "iterations":
            self.draws.append(fitted_estimator.sample(3, random_state=0))
            return len(self.draws) == self.stop_after
        return False


@EVERY_APPROXIMATOR
def test_a_callback_sees_each_hundred_iterations_as_a_fit_that_ends_there(q):
    recorder = Recorder()
    q = clone(q).set_params(max_iter=250).set_callbacks(recorder).fit(Banana())
    assert recorder.begun == ["setup", "fit", *["iterations"] * 3]
    assert recorder.ended == [*["iterations"] * 3, "fit", "teardown"]
    shift = q.sample(3, random_state=0) - recorder.draws[-1]  # by which the mean was corrected at the end
    np.testing.assert_allclose(shift, shift[:1].repeat(3, 0), atol=1e-6)
    assert not np.array_equal(recorder.draws[0], recorder.draws[1])


@EVERY_APPROXIMATOR
def test_a_callback_changes_nothing_and_is_no_part_of_the_result(q):
    plain, told = clone(q).fit(Banana()), clone(q).set_callbacks(Recorder()).fit(Banana())
    np.testing.assert_array_equal(plain.sample(5), told.sample(5))
    assert set(vars(pickle.loads(pickle.dumps(plain)))) == set(vars(plain))  # noqa: S301


@EVERY_APPROXIMATOR
def test_a_callback_can_stop_a_fit(q):
    q = clone(q).set_params(max_iter=250).set_callbacks(Recorder(stop_after=1)).fit(Banana())
    assert q.n_iter_ == 100
    assert q.sample(2).shape == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grades", "settings", "n_iter"),
    [([1, 2, 2, 2, 3], {"patience": 2}, 400), ([1, 2, 3, 4, 5], {"patience": 1, "min_delta": 1.5}, 200)],
)
def test_early_stopping_waits_for_a_better_grade(grades, settings, n_iter):
    given = iter(grades)
    stopping = EarlyStopping(scoring=lambda est, target: next(given), **settings)
    q = clone(APPROXIMATORS[0]).set_params(max_iter=500).set_callbacks(stopping)
    assert q.fit(Banana()).n_iter_ == n_iter


@pytest.mark.parametrize(
    ("settings", "error"),
    [({"patience": 0}, ValueError), ({"min_delta": -1.0}, ValueError), ({"scoring": 1}, TypeError)],
)
def test_a_bad_setting_of_early_stopping_is_named(settings, error):
    with pytest.raises(error, match=next(iter(settings))):
        EarlyStopping(**settings)


def test_a_fit_that_fails_tears_its_callbacks_down():
    recorder = Recorder()
    with pytest.raises(ValueError, match="batch_size"):
        KSIVIApproximator(batch_size=0).set_callbacks(recorder).fit(Banana())
    with pytest.raises(ValueError, match="n_features"):
        KSIVIApproximator().set_callbacks(recorder).fit(lambda x: -x)
    assert recorder.begun.count("setup") == recorder.ended.count("teardown")


def test_the_discrepancy_is_monitored_by_the_callback_of_scikit_learn():
    monitor = callback.ScoringMonitor(scoring=neg_ksd_scorer())
    clone(APPROXIMATORS[0]).set_callbacks(monitor).fit(Banana())
    assert monitor.get_logs()


@EVERY_APPROXIMATOR
def test_verbose_logs_a_line_and_leaves_the_logger_as_it_was(q, capfd, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])  # without those of pytest
    logger = logging.getLogger("skksivi")
    before = logger.level, list(logger.handlers)
    clone(q).set_params(verbose=1).fit(Banana())
    assert "iteration 3 of 3, loss" in capfd.readouterr().err
    assert (logger.level, logger.handlers) == before
    clone(q).fit(Banana())
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["root", "skksivi"])
@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO])
@pytest.mark.parametrize("n_handlers", [0, 1])
def test_verbose_lines_come_once_whatever_level_and_handler_there_are(name, level, n_handlers, capfd, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.getLogger(name), "handlers", [logging.StreamHandler() for _ in range(n_handlers)])
    monkeypatch.setattr(logging.getLogger(name), "level", level)
    clone(APPROXIMATORS[0]).set_params(verbose=1).fit(Banana())
    assert capfd.readouterr().err.count("iteration 3 of 3, loss") == 1


def test_verbose_leaves_configured_logging_alone(caplog):
    with caplog.at_level(logging.INFO, logger="skksivi"):
        clone(APPROXIMATORS[0]).set_params(verbose=2, max_iter=150).fit(Banana())
    *lines, last = [record.getMessage().split(",")[0] for record in caplog.records]
    assert re.fullmatch(r"checks \d+ calls", last)
    iterations = [f"iteration {t} of 150" for t in (100, 150)]
    assert lines == ["search for modes", "certificate", "training", *iterations, "certificate"]


# What comes before the training


class Counted(Recorder):
    """A score, how often it was asked, and what a callback was told by then."""

    def __init__(self, of=lambda x: -x):
        super().__init__()
        self.of, self.n_asked, self.told = of, 0, []

    def __call__(self, x):
        self.n_asked += len(x)
        return self.of(x)

    def on_fit_task_begin(self, estimator, context, **_):
        pass

    def on_fit_task_end(self, estimator, context, **_):
        self.told.append((context.task_name, self.n_asked))


PILOTED = clone(APPROXIMATORS[0]).set_params(mixing="normal", whiten=Pilot(budget=1000))
PILOTS = {
    "auto": PILOTED,
    "diagonal": clone(PILOTED).set_params(whiten__rule="diagonal", whiten__budget=20_000),
    "hierarchy": clone(APPROXIMATORS[1]).set_params(whiten=Pilot(budget=1000)),
    "baseline": SIVI(whiten=Pilot(budget=1000), max_iter=3, random_state=0),
}
EVERY_PILOT = pytest.mark.parametrize("q", PILOTS.values(), ids=PILOTS)


@EVERY_PILOT
def test_a_callback_is_told_of_the_pilot_as_it_goes(q):
    score_fn = Counted(lambda x: (-x).exp() - 1)
    clone(q).set_callbacks(score_fn).fit(score_fn, n_features=2)
    names, counts = zip(*score_fn.told, strict=True)
    assert names == ("whitening",) * PILOT_PARTS + ("iterations", "fit")
    assert len(set(counts[:PILOT_PARTS])) > PILOT_PARTS // 2


def test_a_callback_is_told_of_a_pilot_that_is_not_trained():
    score_fn = Counted()
    q = KSIVIApproximator(whiten=Pilot(budget=1000), random_state=0)
    q.set_callbacks(score_fn).fit(score_fn, n_features=2)
    assert (q.n_iter_, len(q.loss_curve_)) == (0, 0)
    assert [name for name, _ in score_fn.told] == ["whitening"] * PILOT_PARTS + ["fit"]


@EVERY_PILOT
def test_each_stage_is_logged_with_about_what_it_costs(q, caplog):
    quiet, told = Counted(), Counted()
    expected = clone(q).fit(quiet, n_features=2)
    with caplog.at_level(logging.INFO, logger="skksivi"):
        q = clone(q).set_params(verbose=2).fit(told, n_features=2)
    lines = [record.getMessage() for record in caplog.records]
    np.testing.assert_array_equal(q.sample(5), expected.sample(5))
    assert told.n_asked == quiet.n_asked
    assert lines[0] == "search for modes"
    assert "training" in lines
    announced = [re.search(r"about ([\d,]+) score calls to come, at .* s each, about", line) for line in lines]
    n = sum(int(match[1].replace(",", "")) for match in announced if match)
    assert 0.5 < n / q.whitening_.n_score_calls < 1.1


def test_a_long_stage_says_how_far_it_is(caplog, monkeypatch):
    monkeypatch.setattr(_hooks, "SECONDS_BETWEEN", 0.0)
    with caplog.at_level(logging.INFO, logger="skksivi"):
        clone(PILOTED).set_params(verbose=2, whiten__effort="high").fit(lambda x: -x, n_features=2)
    lines = [record.getMessage() for record in caplog.records]
    assert any(re.fullmatch(r"search for modes: [\d,]+ score calls, \d+ s", line) for line in lines)
    assert any(re.fullmatch(r"long chains: [\d,]+ of about [\d,]+ score calls, \d+ s", x) for x in lines)
