"""What a fit says of itself while it runs: lines, bars, and the price of a score that takes long."""

import io
import logging
import re
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from joblib import Parallel, delayed, parallel_config
from members import every
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score

from skksivi import KSIVIApproximator, KSIVIClassifier, KSIVIRegressor
from skksivi._utils import log
from skksivi.baselines import Laplace
from skksivi.parameters import Pilot
from skksivi.score._tally import CALLS
from skksivi.targets import Banana, BayesianLogisticRegression, Minibatches, from_log_prob
from skksivi.training import _run
from skksivi.training._run import Reporter, logged

SHORT = KSIVIApproximator(max_iter=150, batch_size=8, hidden_layer_sizes=(4,), random_state=0)
SHORT.set_params(whiten="laplace", early_stopping=False)
LOGGER = logging.getLogger("skksivi")


class Clock:
    """Tells the seconds that it is set to."""

    now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def as_in_a_script(monkeypatch, handlers=()):
    """Leave logging as a script finds it, and a fit as one that takes long."""
    monkeypatch.setattr(logging.root, "handlers", list(handlers))
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    monkeypatch.setattr(_run, "LONG_WAIT", -1.0)


# A line per stage


def test_each_stage_is_logged_with_about_what_it_costs(caplog):
    q, sizes = clone(SHORT).set_params(mixing="normal", whiten=Pilot(budget=1000)), ([], [])
    scores = (lambda x, seen=seen: seen.append(len(x)) or (-x).exp() - 1 for seen in sizes)
    quiet = clone(q).set_params(verbose=-1).fit(next(scores), n_features=2)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="skksivi"):
        told = clone(q).set_params(verbose=2).fit(next(scores), n_features=2)
    np.testing.assert_array_equal(told.sample(5), quiet.sample(5))
    assert sum(sizes[0]) == sum(sizes[1])
    lines = caplog.messages
    assert re.fullmatch(r"search for modes: [\d,]+ score calls and [\d.]+ s so far", lines[0])
    to_come = [re.search(r"so far, about ([\d,]+) score calls to come, at .* s each, about", line) for line in lines]
    n = sum(int(match[1].replace(",", "")) for match in to_come if match)
    assert 0 < n / told.whitening_.n_score_calls < 1.1
    (training,) = (i for i, line in enumerate(lines) if line.startswith("training"))
    assert lines[training].endswith("s so far, about 150 iterations to come")
    assert [line.partition(",")[0] for line in lines[training + 1 : training + 3]] == [
        "iteration 100 of 150", "iteration 150 of 150"
    ]  # fmt: skip
    assert re.match(r"checks \d+ calls", lines[-1])


@pytest.mark.parametrize("name", ["root", "skksivi"])
@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO])
@pytest.mark.parametrize("n_handlers", [0, 1])
def test_lines_come_once_whatever_level_and_handler_there_are(name, level, n_handlers, capfd, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.getLogger(name), "handlers", [logging.StreamHandler() for _ in range(n_handlers)])
    monkeypatch.setattr(logging.getLogger(name), "level", level)
    before = LOGGER.level, list(LOGGER.handlers)
    with logged(1):
        LOGGER.info("a line")
    assert (capfd.readouterr().err, (LOGGER.level, LOGGER.handlers)) == ("a line\n", before)


# How far a stage is


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
@pytest.mark.parametrize("has_tqdm", [True, False])
def test_a_stage_of_known_length_has_a_bar_in_a_terminal_and_else_a_line(stream, has_tqdm, caplog, monkeypatch):
    stream, clock = stream(), Clock()
    monkeypatch.setattr(sys, "stderr", stream)
    if not has_tqdm:
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    reporter = Reporter(1, None, clock)
    with caplog.at_level(logging.INFO, logger="skksivi"):
        reporter.begin("long chains", 400, CALLS, 50)
        for clock.now, so_far in ((9.0, 100), (11.0, 150), (20.0, 200), (22.0, 500)):
            reporter.hear(so_far, None)
        reporter.begin("certificate", 0, CALLS, 500)
    under_way = caplog.messages[1:-1]
    if has_tqdm and stream.isatty():
        assert under_way == []
        assert "long chains:   0%" in stream.getvalue()
        assert stream.getvalue().endswith("\r")  # the bar has gone
    else:
        assert under_way == ["long chains: 100 of about 400 score calls, 11 s", "long chains: 450 score calls, 22 s"]
        assert stream.getvalue() == ""


def test_a_training_has_a_bar_in_a_terminal(monkeypatch):
    as_in_a_script(monkeypatch)
    monkeypatch.setattr(sys, "stderr", Terminal())
    clone(SHORT).set_params(verbose=1).fit(Banana())
    written = sys.stderr.getvalue()
    assert "training:   0%" in written
    assert "iteration 100 of 150" not in written
    assert "iteration 150 of 150, loss" in written


# What a score costs


def test_a_long_wait_is_told_and_again_if_it_takes_longer_than_told(caplog):
    clock = Clock()
    reporter = Reporter(0, SimpleNamespace(n_rows=1_000_000), clock)
    reporter.begin("short chains", 0, CALLS, 100)
    for clock.now, so_far in ((4.9, 150), (11, 0), (12, 200), (599, 300), (601, 20_000)):
        reporter.hear(so_far, limit=70_000 if so_far == 20_000 else None)
    line, again = caplog.messages
    assert "601 s so far" in again
    assert "The budget ends at 70,000, which would be 2,104 s in all" in again
    for words in ("12 s so far", "short chains", "200 points", "0.06 s each", "600 s in all", "1,000,000 rows"):
        assert words in line


def test_what_takes_long_is_told_before_and_after(caplog, monkeypatch):
    monkeypatch.setattr(log, "LONG_WAIT", 0.05)
    with caplog.at_level(logging.INFO, logger="skksivi"):
        for seconds in (0.0, 0.2):
            with log.telling("Compiling the model of PyMC"):
                time.sleep(seconds)
    assert caplog.messages == ["Compiling the model of PyMC ...", "Compiling the model of PyMC took 0 s."]


def rows_target(n=500):
    X = np.random.RandomState(0).normal(size=(n, 2))
    return BayesianLogisticRegression(X, X[:, 0] > 0.1)


MANY_ROWS = rows_target(20_000)
FEW_OR_PARTS = rows_target(), from_log_prob(lambda x: -x.square().sum(1), 2), Minibatches(MANY_ROWS, batch_size=100)


@every("target", [MANY_ROWS, *FEW_OR_PARTS])
def test_a_fit_that_takes_long_names_minibatches(target, caplog):
    caplog.clear()
    clock = Clock()
    reporter = Reporter(0, target, clock)
    clock.now = 6.0
    reporter.hear(1000, None)
    (line,) = caplog.messages
    assert "s in all." in line or target is MANY_ROWS
    assert ("20,000 rows of the target skksivi.targets.Minibatches" in line) == (target is MANY_ROWS)
    assert ("Minibatches" in line) == (target is MANY_ROWS)


@pytest.mark.parametrize("configured", [True, False])
@pytest.mark.parametrize("verbose", [-1, 0])
def test_a_slow_score_gets_its_line_once(verbose, configured, capfd, monkeypatch):
    as_in_a_script(monkeypatch, [logging.StreamHandler()] * configured)
    KSIVIApproximator(verbose=verbose, whiten="laplace", method="start", random_state=0).fit(rows_target())
    assert capfd.readouterr().err.count("s so far") == (verbose == 0 and not configured)


REGRESSOR = KSIVIRegressor(approximator=Laplace(), model="linear", random_state=0)
CLASSIFIER = KSIVIClassifier(approximator=Laplace(), random_state=0)
X = np.random.RandomState(0).normal(size=(40, 2))
LABELS = X[:, 0] > 0.1
MANY = {
    "regressor": lambda: cross_val_score(REGRESSOR, X, X[:, 0], cv=2),
    "classifier": lambda: cross_val_score(CLASSIFIER, X, LABELS, cv=2),
    "search": lambda: GridSearchCV(CLASSIFIER, {"prior_precision": [0.1, 1.0]}, cv=2).fit(X, LABELS),
    "workers": lambda: Parallel(n_jobs=2)(delayed(CLASSIFIER.fit)(X, LABELS) for _ in range(2)),
}


@pytest.mark.parametrize("name", MANY)
def test_fits_of_a_search_say_nothing_unless_asked(name, capfd, monkeypatch):
    as_in_a_script(monkeypatch)
    with parallel_config("threading"):
        MANY[name]()
    assert capfd.readouterr().err == ""


def test_one_fit_of_a_predictor_tells_its_price(capfd, monkeypatch):
    as_in_a_script(monkeypatch)
    clone(CLASSIFIER).fit(X, LABELS)
    assert capfd.readouterr().err.count("s so far") == 1
