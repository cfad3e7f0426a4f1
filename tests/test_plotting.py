"""Displays: one contract for all, and what each shows."""

import copy

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from approximators import GaussianTarget, good_fit, short
from matplotlib.path import Path
from members import every, refused
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV

from skksivi import KSIVIApproximator, plotting
from skksivi.baselines import SIVI, Laplace
from skksivi.plotting import DensityDisplay, ForestDisplay, LossDisplay, MarginalsDisplay, SearchDisplay
from skksivi.plotting._base import COLOURS
from skksivi.targets import Banana, Multimodal, from_log_prob, from_score_fn

rng = np.random.RandomState(0)
X, Y = rng.normal(size=(2, 500, 5))
PLANE = Banana().sample(500, torch.Generator().manual_seed(0)).numpy()
LOSSES = np.append(np.geomspace(100, 0.1, 300), 0.1 * rng.normal(size=700))


@pytest.fixture
def fitted():
    return good_fit("KSIVIApproximator")


#: Each makes a display in the axes given.
MAKERS = {
    "loss": lambda ax: LossDisplay(losses=LOSSES).plot(ax),
    "loss and monitor": lambda ax: LossDisplay(losses=LOSSES, monitored=[[0, 1], [500, 0.1]]).plot(ax),
    "marginals": lambda ax: MarginalsDisplay.from_draws({"a": X[:, :2], "b": Y[:, 2:4]}, reference=Y[:, :2], ax=ax),
    "marginals, points": lambda ax: MarginalsDisplay.from_draws(X, features=[0, 2], kind="scatter", ax=ax),
    "marginal": lambda ax: MarginalsDisplay.from_draws(X[:, :1], reference=Y[:, :1], ax=ax),
    "density": lambda ax: DensityDisplay.from_draws(PLANE, Banana(), ax=ax),
    "density, histogram": lambda ax: DensityDisplay.from_draws(PLANE, kind="histogram", ax=ax),
    "forest": lambda ax: ForestDisplay.from_draws({"a": X, "b": X + 1}, Y, truth=np.zeros(5), ax=ax),
    "search": lambda ax: SearchDisplay(scores=X[:4], labels=list("abcd"), chosen=1).plot(ax),
}
every_display = every("make", MAKERS)


@pytest.fixture(autouse=True)
def no_figures():
    plt.close("all")
    yield
    plt.close("all")


def test_every_display_is_under_contract():
    assert {type(make(None)).__name__ for make in MAKERS.values()} == set(plotting.__all__)


@every_display
def test_axes_are_used_and_pyplot_stays_as_it_was(make):
    plt.close("all")
    figure, (left, right) = plt.subplots(1, 2)
    plt.figure()
    plt.figure(figure.number)
    plt.sca(left)
    before = plt.get_fignums(), dict(matplotlib.rcParams)
    display = make(right)
    assert (plt.get_fignums(), dict(matplotlib.rcParams)) == before
    assert (plt.gcf(), plt.gca()) == (figure, left)
    assert (display.figure_, display.ax_) == (figure, right)
    assert not left.has_data()
    assert display.plot(left) is display  # again, elsewhere
    assert display.ax_ is left


#: Displays, and axes that a user may have.
PLACES = [
    ("loss and monitor", lambda: plt.figure().add_axes((0.1, 0.2, 0.5, 0.6))),
    ("marginals", lambda: plt.figure().subfigures(1, 2)[1].subplots()),
    ("marginals", lambda: plt.subplots(2, 2)[1][1, 0]),
]


def panels_of(display):
    return [panel for panel in np.ravel(getattr(display, "axes_", [display.ax_])) if panel is not None]


@every("name, place", PLACES)
def test_nothing_is_drawn_outside_the_axes_given(name, place):
    ax = place()
    low, high = ax.get_position().get_points()
    for panel in panels_of(MAKERS[name](ax)):
        inner = panel.get_position().get_points()
        assert ((low - 1e-9 <= inner) & (inner <= high + 1e-9)).all()
    plt.gcf().savefig("/dev/null", format="png")


@every_display
def test_a_picture_has_ink_and_named_axes(make):
    plt.close("all")
    display = make(None)
    assert plt.get_fignums() == [display.figure_.number]
    assert display.ax_.figure is display.figure_
    display.figure_.canvas.draw()
    assert (np.asarray(display.figure_.canvas.buffer_rgba())[..., :3] < 250).any(-1).mean() > 0.005
    assert any(panel.get_xlabel() for panel in panels_of(display))


def test_search_shows_replicates_means_and_the_choice():
    search = GridSearchCV(Ridge(), [{"alpha": [1e9]}, {}], cv=3).fit(X[:, 1:], X[:, 0])
    display = SearchDisplay.from_search(search)
    assert [label.get_text() for label in display.ax_.get_yticklabels()] == ["alpha=1000000000.0", "as it is"]
    np.testing.assert_allclose(display.means_[0].get_xdata(), search.cv_results_["mean_test_score"])
    assert (len(display.replicates_), display.chosen) == (3, search.best_index_)
    with pytest.raises(ValueError, match=r"`metric` is 'ksd', expected one of \['score'\]"):
        SearchDisplay.from_search(search, metric="ksd")


@every("display", [LossDisplay, MarginalsDisplay, DensityDisplay, ForestDisplay])
def test_an_estimator_is_shown_and_its_stream_left_alone(fitted, display):
    before = str(fitted._random_state.get_state())
    display.from_estimator(fitted)
    assert str(fitted._random_state.get_state()) == before
    with pytest.raises(NotFittedError):
        display.from_estimator(KSIVIApproximator())


# What each shows


def test_loss_is_the_means_of_blocks_and_bears_what_is_not_finite():
    at, means = LossDisplay(losses=np.arange(1.0, 1001.0)).plot().line_.get_data()
    np.testing.assert_allclose(means, np.arange(1.0, 1001.0).reshape(100, 10).mean(1))
    np.testing.assert_allclose(at, means)  # the loss of iteration i is i
    losses = np.where(np.arange(1000) == 3, np.nan, np.where(np.arange(1000) == 500, np.inf, LOSSES))
    assert np.isfinite(LossDisplay(losses=losses).plot().line_.get_ydata()).all()
    LossDisplay(losses=np.full(5, np.nan)).plot()


def test_loss_axis_is_linear_unless_the_start_would_hide_the_rest():
    noise, falling = np.random.RandomState(1).normal(size=1000), np.geomspace(1e4, 1, 1000)
    scales = [LossDisplay(losses=losses).plot().ax_.get_yscale() for losses in (noise, LOSSES, falling)]
    assert scales == ["linear", "symlog", "log"]


def test_losses_of_several_fits_are_told_apart_and_one_without_a_training_says_so(fitted):
    fitted.ksd_curve_, other, start = np.array([[0, 1.0], [500, 0.2]]), copy.copy(fitted), copy.copy(fitted)
    other.loss_curve_, start.loss_curve_ = np.append(1e4, -np.ones(99)), np.empty(0)
    display = LossDisplay.from_estimator({"a": fitted, "b": other, "start": start})
    names = [text.get_text() for text in display.ax_.get_legend().get_texts()]
    assert (names, display.ax_.get_yscale()) == (["a", "b", "start: not trained"], "linear")
    colours = [line.get_color() for line in display.lines_]
    assert colours == [line.get_color() for line in display.monitor_lines_] == list(COLOURS[:3])
    np.testing.assert_array_equal(display.monitor_line_.get_xydata(), fitted.ksd_curve_)
    assert LossDisplay.from_estimator(fitted, monitor=False).monitor_line_ is None
    assert "Nothing was trained" in LossDisplay.from_estimator(start).ax_.texts[0].get_text()


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_loss_is_called_what_it_is(fitted):
    assert "KL(q || p) falls" in LossDisplay.from_estimator(fitted).ax_.get_ylabel()
    of_the_paper = short(KSIVIApproximator(gradient_estimator="vanilla", random_state=0)).set_params(whiten="laplace")
    assert "KSD" in LossDisplay.from_estimator(of_the_paper.fit(GaussianTarget())).ax_.get_ylabel()
    other = short(SIVI(random_state=0)).fit(GaussianTarget())
    assert LossDisplay.from_estimator(other).ax_.get_ylabel() == "loss"


def test_marginals_show_what_is_asked_for_or_all_up_to_ten_and_how_many_of_more():
    display = MarginalsDisplay.from_draws(
        X, features=[3, 1], feature_names=list("abcde"), truth=[None, 2, 0, None, 0]
    )
    (marginal, above), (panel, _) = display.axes_
    assert (above, panel.get_xlabel(), panel.get_ylabel()) == (None, "d", "b")
    assert [list(line.get_ydata()) for line in panel.lines] == [[2, 2]]  # of x1; that of x3 is not known
    low, middle, high = np.quantile(X[:, 3], [0.05, 0.5, 0.95])
    assert marginal.get_title() == f"${middle:.2f}^{{+{high - middle:.2f}}}_{{-{middle - low:.2f}}}$"
    assert display.ax_.get_legend().get_title().get_text() == "2 of 5 shown"
    assert [len(MarginalsDisplay.from_draws(np.tile(X, 3)[:50, :d]).axes_) for d in (7, 11)] == [7, 6]


def test_marginals_are_densities_with_no_mass_where_no_draws_are():
    draws = {"fit": np.abs(X) * np.where(Y > 0, 1, 100), "far": X + 1e6}
    lines = MarginalsDisplay.from_draws(draws, Y, features=[0, 4]).lines_
    for line, x in zip(np.ravel(lines), np.concatenate([A[:, [0, 4]].T for A in (Y, *draws.values())]), strict=True):
        assert np.trapezoid(*line.get_data()[::-1]) == pytest.approx(1, abs=0.05)
        assert x.min() <= line.get_xdata().min() < line.get_xdata().max() <= x.max()


u, v = rng.normal(size=(2, 4000))
PAIRS = [(u, u**2 + v / 4), (3 * u, np.exp(1.5 * u) * v), (np.where(v > 0, 0.1 * u - 5, u + 5), v[::-1])]
PAIRS += [rng.standard_cauchy(size=(2, 4000)), np.exp([u, v]), np.round([u, 3 * v]), (u, 0 * v + 1e6)]


@every("pair", PAIRS)
def test_lines_hold_what_they_say(pair):
    A = np.transpose(pair)
    paths = MarginalsDisplay.from_draws(A).axes_[1, 0].collections[0].get_paths()
    inside = [sum(Path(v).contains_points(A) for v in path.to_polygons()) % 2 for path in paths]
    np.testing.assert_allclose(np.mean(inside, axis=1), [0.95, 0.5], atol=0.02)


def test_contours_are_the_same_in_any_box():
    """The outermost encloses 99% of N(0, I): a circle of radius 3.03."""
    for extent in (None, (-4, 4, -4, 4), (-1, 9, -8, 8)):
        outermost, *_ = DensityDisplay.from_draws(X[:, :2], NORMAL, extent=extent).contours_.get_paths()
        assert np.linalg.norm(outermost.vertices, axis=1).max() == pytest.approx(np.sqrt(-2 * np.log(0.01)), abs=0.05)
    display = DensityDisplay.from_draws(1e6 * X[:, :2], NORMAL)  # of a target much narrower than the draws
    display.figure_.canvas.draw()
    assert display.contours_ is not None


def test_density_box_holds_a_mode_that_the_draws_miss():
    one_mode = np.random.RandomState(0).normal(size=(500, 2)) - [2.0, 0.0]
    assert DensityDisplay.from_draws(one_mode, Multimodal()).ax_.get_xlim()[1] > 4  # the other mode lies at 2
    given = DensityDisplay.from_draws(one_mode, extent=(-1, 1, -2, 2))
    assert given.ax_.get_xlim() + given.ax_.get_ylim() == (-1, 1, -2, 2)


def test_density_shows_at_most_two_thousand_points_of_a_cloud_and_all_in_a_histogram():
    many = np.random.RandomState(0).normal(size=(10_001, 2))
    assert 1500 < len(DensityDisplay.from_draws(many).cloud_.get_offsets()) <= 2000
    histogram = DensityDisplay.from_draws(many, kind="histogram", extent=(-9, 9, -9, 9))
    assert histogram.cloud_.get_array().sum() == 10_001


def test_forest_intervals_are_the_central_ones():
    display = ForestDisplay.from_draws({"fit": X}, Y, features=[3, 1], feature_names=list("abcde"), levels=(0.4, 0.8))
    at = [0.1, 0.3, 0.5, 0.7, 0.9]
    np.testing.assert_allclose(display.intervals_, [np.quantile(A[:, [3, 1]], at, axis=0).T for A in (Y, X)])
    for line, (thin, thick), ends in zip(display.medians_, display.lines_, display.intervals_, strict=True):
        np.testing.assert_array_equal(line.get_xdata(), ends[:, 2])
        np.testing.assert_array_equal([s[:, 0] for s in thin.get_segments()], ends[:, [0, 4]])
        np.testing.assert_array_equal([s[:, 0] for s in thick.get_segments()], ends[:, [1, 3]])


NORMAL, IN_THREE = (from_log_prob(lambda x: -x.square().sum(-1) / 2, d) for d in (2, 3))
MISTAKES = [
    (lambda: MarginalsDisplay.from_draws({}), "`X` is empty"),
    (lambda: MarginalsDisplay.from_draws({"a": X, "b": PLANE}), "different numbers of columns"),
    (lambda: MarginalsDisplay.from_draws({"my fit": X * np.nan}), "my fit contains NaN"),
    (lambda: ForestDisplay.from_draws(X, reference=PLANE), "`reference` has 2 columns"),
    (lambda: MarginalsDisplay.from_draws(X, features=[5]), "`features` must hold columns from 0"),
    (lambda: MarginalsDisplay.from_draws(X, feature_names=["a"]), "`feature_names` has 1"),
    (lambda: MarginalsDisplay.from_draws(X, kind="corner"), "`kind` must be 'contour'"),
    (lambda: DensityDisplay.from_draws(PLANE, extent=(0, 1)), "`extent` must be four numbers"),
    (lambda: DensityDisplay.from_draws(PLANE, kind="kde"), "`kind` must be 'scatter'"),
    (lambda: DensityDisplay.from_draws(X), "`X` has 5 columns, expected 2"),
    (lambda: DensityDisplay.from_draws(PLANE, IN_THREE), "`target` has 3 features"),
    (lambda: ForestDisplay.from_draws(X, truth=[1.0]), "`truth` has shape"),
    (lambda: MarginalsDisplay.from_draws(X, truth=[1.0, None]), "`truth` has shape"),
    (lambda: LossDisplay.from_estimator({}), "`estimator` is an empty dict"),
    (lambda: ForestDisplay.from_draws(X, levels=(0.9, 0.5)), "levels"),
    (lambda: ForestDisplay.from_draws(X, levels=(0.5, 1.0)), "levels"),
    (lambda: DensityDisplay.from_draws(PLANE, from_score_fn(lambda x: -x, 2)), "`target` must have `log_prob`"),
    (lambda: LossDisplay.from_estimator(Laplace().fit(Banana())), "`loss_curve_`"),
]


@every("act, message", MISTAKES)
def test_a_mistake_is_named_before_a_figure_is_made(act, message):
    refused((TypeError, ValueError), message, act)
    assert not plt.get_fignums()
