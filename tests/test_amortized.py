"""One fit for many data sets."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from approximators import short_fits
from members import every, refused
from plain_targets import generator
from scipy.stats import norm
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError

import skksivi
from skksivi import AmortizedKSIVI, KSIVIApproximator
from skksivi.amortized import DeepSets
from skksivi.amortized._contexts import Laplaces, PairedScore, as_contexts, laplaces, simulated
from skksivi.amortized._family import Conditional
from skksivi.amortized._training import LEAST, PATIENCE, Split, divergence, log_probs, train

CPU = torch.device("cpu")
F64 = torch.float64


def normal_score(x, y):
    """Of a mean with a standard normal prior, seen once with noise of variance one: p(x | y) = N(y / 2, 1 / 2)."""
    return y - 2 * x


def normal_contexts(m=60, d=2, seed=0):
    return math.sqrt(2) * np.random.RandomState(seed).normal(size=(m, d))


def batches_of(*arrays, size=7):
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*map(torch.as_tensor, arrays)), batch_size=size)


def fitted(score_fn=normal_score, contexts=None, *args, n_features=2, **options):
    options = {"max_score_calls": 1500, "random_state": 0, "hidden_layer_sizes": (16,)} | options
    contexts = normal_contexts() if contexts is None else contexts
    return AmortizedKSIVI(**options).fit(score_fn, contexts, *args, n_features=n_features)


@pytest.fixture(scope="module")
def of_normal():
    return fitted()


def score_of_size(x, y):
    """Of x with a standard normal prior, of which the size is seen with noise 0.1."""
    return -x - (x.abs() - y) * x.sign() / 0.01


def mean_score(x, y):
    """Of the mean of normal rows with a standard normal prior."""
    return torch.stack([(rows - at).sum(0) - at for at, rows in zip(x, y, strict=True)])


def random_family(d=2, p=3, k=1):
    """A family all of whose networks are random."""
    g = generator(1)
    family = Conditional(d, p, (8,), None, g).with_components(k, g).requires_grad_(False)
    for part in (family.place, family.heads):
        for parameter in part.parameters() if part is not None else []:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=g, dtype=F64))
    return family


# The family is an ordinary one at each context


def test_the_density_at_a_context_is_that_of_the_layer_there():
    family, g = random_family(k=3), generator()
    h, x = torch.randn(1, 3, generator=g, dtype=F64), torch.randn(50, 2, generator=g, dtype=F64)
    layer = family.at(h, 0, F64)
    torch.testing.assert_close(layer.log_density(x).value, family.log_prob(x, h.expand(50, -1)))


def test_beyond_fifty_features_the_triangle_is_common():
    family = Conditional(51, 2, (4,), None, generator())
    L = family.places(torch.randn(3, 2, generator=generator(), dtype=F64)).L
    assert (family.triangle.shape, L.shape) == ((51 * 25,), (3, 51, 51))


# The stages


def test_the_divergence_is_that_of_torch():
    g = generator()
    m, A = torch.randn(2, 4, 3, generator=g, dtype=F64), torch.randn(2, 4, 3, 3, generator=g, dtype=F64)
    L = torch.linalg.cholesky(A @ A.mT + torch.eye(3, dtype=F64))
    target = Laplaces(m[1], torch.cholesky_inverse(L[1]), torch.arange(4))
    normal = [torch.distributions.MultivariateNormal(m[i], scale_tril=L[i]) for i in range(2)]
    torch.testing.assert_close(divergence(m[0], L[0], target), torch.distributions.kl_divergence(*normal))


def test_modes_are_found_where_a_newton_step_goes_too_far():
    """log p = -log cosh(5 (x - y)) - x^2 / 200, at whose tails Newton's step is a thousand times too long."""
    score_fn = lambda x, y: -5 * torch.tanh(5 * (x - y)) - x / 100  # noqa: E731
    y = torch.linspace(-3, 3, 8, dtype=F64)[:, None]
    found = laplaces(PairedScore(score_fn, 1, y, CPU), y, torch.arange(8), torch.zeros(8, 1, dtype=F64))
    assert len(found.m) == 8
    assert score_fn(found.m, y[found.numbers]).abs().max() < 0.1


# A fit


@pytest.mark.parametrize("opposed", [True, False], ids=["held-out rows worsen", "held-out rows improve"])
def test_a_training_that_ends_early_keeps_the_best_and_changes_no_later_draw(opposed):
    line = torch.nn.Linear(1, 1, bias=False, dtype=F64)
    with torch.no_grad():
        line.weight.zero_()
    rows, evaluated, rng = Split(torch.arange(100), torch.arange(100, 200)), [], generator()

    def loss(index):
        held_out = bool(index[0] >= 100)
        evaluated.append(held_out)
        return (line.weight - (-1.0 if held_out and opposed else 1.0)).square().sum()

    train(loss, [line], rows, 200, 0.01, rng)
    assert (line.weight.item() == 0) == opposed
    assert sum(evaluated) - 1 == (PATIENCE * 200 if opposed else 200)  # one at the start, and one per epoch
    other = generator()
    for _ in range(200):
        torch.randperm(100, generator=other)
    assert torch.equal(torch.rand(3, generator=rng), torch.rand(3, generator=other))


def test_a_fit_of_normals_is_exact(of_normal):
    """Means and variances of 20,000 draws at a context that was not seen: five standard errors."""
    y = np.array([1.0, -2.0])
    X = of_normal.sample(20_000, y, random_state=0)
    assert (X.shape, X.dtype) == ((20_000, 2), np.float32)
    np.testing.assert_allclose(X.mean(0), y / 2, atol=5 * math.sqrt(0.5 / 20_000))
    np.testing.assert_allclose(X.var(0), 0.5, atol=5 * 0.5 * math.sqrt(2 / 20_000))
    expected = norm.logpdf(X[:5], y / 2, math.sqrt(0.5)).sum(1)
    np.testing.assert_allclose(of_normal.score_samples(X[:5], y), expected, atol=0.02)


def test_many_contexts_have_draws_each(of_normal):
    Y = normal_contexts(5, seed=1)
    X = of_normal.sample(3000, Y, random_state=0)
    assert X.shape == (5, 3000, 2)
    np.testing.assert_allclose(X.mean(1), Y / 2, atol=5 * math.sqrt(0.5 / 3000))
    log_q, one_by_one = of_normal.score_samples(X[:, 0], Y), zip(X, Y, strict=True)
    np.testing.assert_allclose(log_q, [of_normal.score_samples(x[:1], y)[0] for x, y in one_by_one], atol=1e-4)
    assert of_normal.score(X[:, 0], Y) == pytest.approx(log_q.mean())
    assert of_normal.sample(0, Y).shape == (5, 0, 2)


def test_a_fit_can_be_repeated():
    with short_fits():
        q, other = (fitted(max_score_calls=300, hidden_layer_sizes=(4,)) for _ in range(2))
    np.testing.assert_array_equal(*(a.sample(5, [0.0, 1.0], random_state=3) for a in (q, other)))
    assert (q.sample(5, [0.0, 1.0]) != q.sample(5, [0.0, 1.0])).all()


def test_the_calls_are_counted_and_bounded():
    n = []

    def score_fn(x, y):
        s = np.asarray(y) - 2 * np.asarray(x)
        n.append(len(s))
        return s

    with short_fits():
        q = fitted(score_fn, max_score_calls=700)
    assert q.n_score_calls_ == sum(n) <= 700
    assert sum(stage.n_calls for stage in q.stages_) == q.n_score_calls_
    assert q.n_contexts_ > 0
    assert q.n_lost_ == q.n_products_ == 0


def test_one_context_is_an_ordinary_fit(of_normal, tmp_path):
    est = of_normal.at([1.0, 0.0])
    assert isinstance(est, KSIVIApproximator)
    skksivi.save(est, tmp_path / "q.safetensors")
    loaded = skksivi.load(tmp_path / "q.safetensors")
    np.testing.assert_array_equal(loaded.sample(5, random_state=0), est.sample(5, random_state=0))
    draws = skksivi.importance_sample(est, of_normal.target([1.0, 0.0]), random_state=0)
    assert draws.certificate().divergence < 0.01
    assert of_normal.diagnose([1.0, 0.0], random_state=0).ok
    assert len(of_normal.diagnose([[1.0, 0.0], [0.0, 1.0]], n_samples=200, random_state=0)) == 2


@pytest.mark.slow
def test_parameters_tell_of_modes_that_are_apart():
    """|x| is seen with noise 0.1: p(x | y) has two modes of equal mass. The share of 4,000 draws that are positive,
    and the width of |x| within 20%.
    """

    def contexts(n, rng):
        X = 1.5 + 0.5 * rng.uniform(-1, 1, size=(n, 1))
        return X * rng.choice([-1, 1], size=(n, 1)), X + 0.1 * rng.normal(size=(n, 1))

    options = {"n_contexts": 1000, "max_score_calls": 3000, "hidden_layer_sizes": (32,)}
    q = fitted(score_of_size, contexts, n_features=1, **options)
    X = q.sample(4000, [1.5], random_state=0)[:, 0]
    assert 0.4 < (X > 0).mean() < 0.6
    assert 0.08 < np.abs(X).std() < 0.12


@pytest.mark.slow
def test_modes_without_parameters_are_refined():
    """Without parameters the fit is one Gaussian, whose certificates cannot be computed between the modes; chains
    from its draws reach both.
    """
    with pytest.warns(ConvergenceWarning, match="No certificate could be computed at . held-out contexts"):
        q = fitted(score_of_size, np.linspace(1, 2, 60)[:, None], n_features=1, max_score_calls=3000)
    X = q.refine([1.5]).sample(4000, random_state=0)[:, 0]
    assert 0.4 < (X > 0).mean() < 0.6
    assert 0.08 < np.abs(X).std() < 0.12
    assert 1.4 < np.abs(X).mean() < 1.6


def test_a_fit_that_is_good_is_not_refined(of_normal):
    """A certificate takes some 1,000 scores at most, and a training would take 12,800."""
    refined = of_normal.refine([1.0, -2.0])
    assert refined.certificate_.divergence < 0.006
    assert refined.n_iter_ == 0
    assert refined.n_score_calls_ + refined.n_products_ < 2000
    expected = of_normal.at([1.0, -2.0]).sample(5, random_state=0)
    np.testing.assert_array_equal(refined.sample(5, random_state=0), expected)


@pytest.mark.slow
def test_sets_of_different_size_have_a_posterior(short_networks):
    """A normal mean from n observations: p(x | y) = N(n ybar / (n + 1), 1 / (n + 1))."""
    rng = np.random.RandomState(0)
    sets = [rng.normal() + rng.normal(size=(rng.randint(2, 9), 1)) for _ in range(300)]
    q = fitted(mean_score, sets, n_features=1, summary=DeepSets(1, 8, 16), max_score_calls=4000)
    some = sets[:5]
    X = q.sample(4000, some, random_state=0)
    np.testing.assert_allclose(X.mean((1, 2)), [rows.sum() / (len(rows) + 1) for rows in some], atol=0.2)
    np.testing.assert_allclose(X.std((1, 2)), [1 / math.sqrt(len(rows) + 1) for rows in some], rtol=0.3)
    assert q.sample(3, some[0]).shape == (3, 1)
    assert q.refine(some[0], max_iter=5).sample(3).shape == (3, 1)


def test_features_of_a_set_do_not_depend_on_its_order():
    sets = [torch.randn(n, 2, generator=generator(), dtype=F64) for n in (3, 5)]
    net = DeepSets(2)
    assert net.shape == (2, 16)
    torch.testing.assert_close(net(sets), net([rows.flip(0) for rows in sets]))
    torch.testing.assert_close(net(sets)[1:], net(sets[1:]))


def test_batches_are_lists_of_sets_or_of_rows():
    rows = [np.ones((n, 2)) for n in (3, 1, 2)]
    made, _ = simulated(iter([rows[:2], rows[2:]]), None, 0, np.random.RandomState(0), sets=True)
    assert [len(part) for part in as_contexts(made, CPU, sets=True)] == [3, 1, 2]
    made, _ = simulated(iter([[[1.0, 2.0]], [[3.0, 4.0]]]), None, 0, np.random.RandomState(0), sets=False)
    assert as_contexts(made, CPU, sets=False).tolist() == [[1.0, 2.0], [3.0, 4.0]]


# Files


def test_a_loaded_fit_without_its_score_says_so(of_normal, tmp_path):
    skksivi.save(of_normal, tmp_path / "q")
    loaded = skksivi.load(tmp_path / "q")
    assert loaded.at([0.0, 1.0]).sample(2).shape == (2, 2)
    refused(ValueError, "score_fn=", lambda: loaded.target([0.0, 1.0]))
    refused(TypeError, "`score_fn` must be a function of pairs", lambda: skksivi.load(tmp_path / "q", score_fn=3))


# What is wrong is told


class Model:
    """A model that brings its score of pairs."""

    n_features = 2

    def score_fn(self, x, y):
        return y - 2 * x

    def simulate(self, n, rng):
        X = rng.normal(size=(n, 2))
        return X, X + rng.normal(size=(n, 2))


def nan_of_many(x, y):
    return y * torch.nan if torch.is_tensor(x) and len(x) > 8 else y - x


OTHER_PARAMETERS = r"`parameters` .* expected finite numbers of shape \(60, 2\)"

#: What a fit is given, and what is said of it.
BAD = {
    "one dimension": ({"contexts": normal_contexts()[:, 0]}, r"shape \(60,\), expected \(m, c\)"),
    "NaN": ({"contexts": np.r_[normal_contexts(59), [[np.nan, 0]]]}, "1 rows that are not finite"),
    "none": ({"contexts": np.empty((0, 2))}, "is empty"),
    "one data set": ({"contexts": np.ones((30, 2))}, "the same data set 30 times"),
    "one row": ({"contexts": np.ones((1, 2))}, "holds one data set"),
    "a loader of nothing": ({"contexts": iter([])}, "without batches"),
    "a loader of three": ({"contexts": batches_of(*[normal_contexts()] * 3)}, "a tuple of 3"),
    "sets without a summary": ({"contexts": [np.ones((2, 2)), np.ones((3, 2))]}, "which need a `summary`"),
    "words": ({"contexts": [["a", "b"], ["c", "d"]]}, "`contexts` must hold real numbers"),
    "no contexts": ({"contexts": None}, "`contexts` is missing"),
    "no dimension": ({"n_features": None}, "`n_features` is None, expected the dimension"),
    "another dimension": ({"score_fn": Model(), "contexts": None, "n_features": 3}, "`n_features` is 3, expected 2"),
    "a score without contexts": ({"score_fn": lambda x, y: -x}, "depend on its second argument"),
    "a score of another shape": ({"score_fn": lambda x, y: (x * y)[:, :1]}, "returned shape"),
    "a score without modes": ({"score_fn": nan_of_many}, "no mode that was found"),
    "parameters of another dimension": ({"parameters": np.zeros((60, 3))}, OTHER_PARAMETERS),
    "parameters of other rows": ({"parameters": np.zeros((10, 2))}, OTHER_PARAMETERS),
    "parameters that are NaN": ({"parameters": np.full((60, 2), np.nan)}, OTHER_PARAMETERS),
    "parameters twice": ({"contexts": Model().simulate, "parameters": np.zeros((60, 2))}, "no `parameters` beside"),
    "components without parameters": ({"n_components": 3}, "needs the parameters"),
    "a small budget": ({"max_score_calls": 20}, "`max_score_calls` is 20"),
    "no budget": ({"max_score_calls": 0}, "max_score_calls"),
    "no width": ({"hidden_layer_sizes": (0,)}, "hidden_layer_sizes"),
    "no component": ({"n_components": 0}, "n_components"),
    "half precision": ({"dtype": "float16"}, "dtype"),
    "a summary of no kind": ({"summary": len}, "summary"),
}


@every("given, message", BAD)
def test_what_cannot_be_fitted_is_told(given, message):
    arguments = {"score_fn": normal_score, "contexts": normal_contexts(), "parameters": None, "n_features": 2} | given
    to_fit = {name: arguments.pop(name) for name in ("score_fn", "contexts", "parameters", "n_features")}
    refused((ValueError, TypeError), message, lambda: AmortizedKSIVI(**arguments).fit(**to_fit))


def test_contexts_that_are_mostly_one_are_told():
    Y = np.concatenate([np.ones((40, 2)), normal_contexts(20)])
    with pytest.warns(UserWarning, match="40 of 60 contexts are the same data set"):
        fitted(contexts=Y, max_score_calls=200, hidden_layer_sizes=(4,))


def arrays_raising_far_out(x, y):
    if (y > 10).any():
        raise np.linalg.LinAlgError("not positive definite")
    return np.asarray(y) - 2 * np.asarray(x)


def test_a_context_that_fails_does_not_end_the_others():
    """The first and every tenth context fail, wherever they are in a batch."""
    Y = normal_contexts()
    Y[::10] = 50.0
    with pytest.warns(UserWarning, match="left out|LinAlgError") as caught:
        q = fitted(arrays_raising_far_out, Y, random_state=1)
    messages = "\n".join(str(w.message) for w in caught)
    assert "contexts was not found, which were left out" in messages
    assert "LinAlgError: not positive definite" in messages
    assert 0 < q.n_lost_ < q.n_contexts_
    np.testing.assert_allclose(q.sample(4000, [1.0, -1.0], random_state=0).mean(0), [0.5, -0.5], atol=0.1)


def test_a_score_that_raises_at_every_pair_ends_the_fit():
    works = True

    def score_fn(x, y):
        if not works:
            raise ValueError("the file is closed")
        return y - 2 * x

    y = torch.as_tensor(normal_contexts(4))
    score = PairedScore(score_fn, 2, y, CPU)
    works = False
    with pytest.raises(RuntimeError, match="raises at every pair: ValueError: the file is closed"):
        score(torch.zeros(4, 2, dtype=F64), y)
    refused(ValueError, "the file is closed", PairedScore, score_fn, 2, y, CPU)


def test_a_context_far_outside_is_told(of_normal):
    with pytest.warns(UserWarning, match="1 of 2 contexts are far outside"):
        of_normal.sample(2, [[0.0, 0.0], [100.0, 0.0]])
    of_normal.sample(2, [[0.0, 0.0], [3.0, 0.0]])


MANY = lambda q: q.diagnose, lambda q: partial(q.sample, 1)
ONE = lambda q: q.at, lambda q: q.target, lambda q: q.refine


@pytest.mark.parametrize(
    ("calls", "contexts", "message"),
    [
        (MANY, [1.0], "rows of length 1, expected 2"),
        (MANY, [[np.nan, 1.0]], "not finite"),
        (MANY, np.zeros((1, 2, 2)), r"expected \(m, c\)"),
        (ONE, [[0.0, 0.0], [1.0, 1.0]], "holds 2 data sets, expected one"),
    ],
)
def test_bad_contexts_are_refused_of_a_fit(of_normal, calls, contexts, message):
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call(of_normal)(contexts)


def test_nothing_is_drawn_before_a_fit():
    q = AmortizedKSIVI()
    for call, *before in ((q.sample, 1), (q.at,), (q.score_samples, [[0.0]]), (q.diagnose,), (q.refine,)):
        with pytest.raises(NotFittedError):
            call(*before, [0.0])


def test_what_was_learned_stays_where_a_fit_fails(of_normal):
    q, before = copy.deepcopy(of_normal), of_normal.sample(5, [0.0, 1.0], random_state=0)
    refused(ValueError, "not finite", lambda: q.fit(normal_score, np.full((5, 2), np.nan), n_features=2))
    np.testing.assert_array_equal(q.sample(5, [0.0, 1.0], random_state=0), before)
    assert not hasattr(clone(q), "family_")


def test_a_density_that_is_no_number_is_no_better():
    family = random_family(p=2)
    value = log_probs(family, torch.zeros(2, 2, dtype=F64), torch.full((2, 2), torch.nan, dtype=F64))
    assert (value == LEAST).all()
