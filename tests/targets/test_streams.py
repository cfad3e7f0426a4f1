"""Data that are read a batch at a time: sums over all, minibatches, and loaders that do not keep their word."""

import copy
import pickle
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from members import every, refused
from plain_targets import LogisticDensity, normal, resolved
from sklearn.base import clone

from skksivi import KSIVIApproximator, targets
from skksivi.targets import BayesianLogisticRegression, Minibatches, from_log_prob, from_rows, from_score_fn
from skksivi.targets import _minibatches as module

N, D, B = 5000, 3, 250
X = np.random.RandomState(0).normal(size=(N, D)) * [1.0, 0.5, 2.0]
Y = np.random.RandomState(1).uniform(size=N) < 1 / (1 + np.exp(-X @ [1.0, -1.0, 0.3]))
FULL = BayesianLogisticRegression(X, Y, prior_precision=1.0)
POINTS = normal(7, D)


def batches(b=B, n=N):
    for k in range(0, n, b):
        yield X[k : k + b], Y[k : k + b]


def target_of_batch(batch):
    return BayesianLogisticRegression(*batch, prior_precision=1.0)


def of_record_batch(batch):
    *columns, y = batch.columns
    return target_of_batch((np.column_stack(columns), np.asarray(y)))


def of_table(batch):
    return target_of_batch((batch[:, :D], batch[:, D]))


def of_arrays(batch):
    A, y = batch

    def score_fn(x, rows):
        return len(A) / len(rows) * (y[rows] - 1 / (1 + np.exp(-x @ A[rows].T))) @ A[rows] - x

    return from_rows(score_fn, n_rows=len(A), n_features=D)


PRIOR = from_log_prob(lambda x: -x.square().sum(-1) / 2, D)
STREAMS = {
    "own product": Minibatches.from_loader(batches, target_of_batch),
    "autograd": Minibatches.from_loader(batches, lambda batch: LogisticDensity(*batch), n_rows=N, prior=PRIOR),
    "arrays": Minibatches.from_loader(batches, of_arrays, n_rows=N, prior=from_score_fn(lambda x: -x, n_features=D)),
}


def close(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@every("name", list(STREAMS))
def test_the_score_of_a_stream_is_that_of_all_rows(name):
    score, full = resolved(STREAMS[name]).on_all_data(), resolved(FULL)
    tolerance, v = 1e-5 if name == "arrays" else 1e-9, POINTS.flip(0)  # of differences
    s, pull = score.with_pullback(POINTS)
    for of_stream in (score(POINTS), s):
        close(of_stream, full(POINTS))
    for product in (score.product(POINTS, v), pull(v)):
        close(product, full.product(POINTS, v), tolerance)


@every("name", list(STREAMS))
def test_minibatches_are_the_batches_each_counted_for_all(name):
    score, generator = resolved(STREAMS[name]), torch.Generator()
    expected = [FULL.subset(torch.arange(k, k + B)).score_fn(POINTS) for k in range(0, N, B)]
    for _ in range(2):  # after the last comes the first
        for s in expected:
            part = score.minibatch(generator)
            close(part(POINTS), s)
    close(torch.stack(expected).mean(0), FULL.score_fn(POINTS))
    own, pull = score.minibatch(generator).with_pullback(POINTS)
    close(own, expected[0])
    product = FULL.subset(torch.arange(B)).score_vjp(POINTS)[1](POINTS)
    close(pull(POINTS), product, 1e-5 if name == "arrays" else 1e-9)


@every("kept", [0, 2**16])
def test_a_part_is_the_first_rows_in_whole_batches(kept, monkeypatch):
    monkeypatch.setattr(module, "N_KEPT", kept)
    stream = Minibatches.from_loader(batches, target_of_batch, n_rows=N)
    for n, taken in ((1, B), (B, B), (B + 1, 2 * B), (1000, 1000), (N - 1, N), (N, N), (10 * N, N)):
        s = FULL.subset(torch.arange(taken)).score_fn(POINTS)
        close(stream.part(n).score_fn(POINTS), s)
    before = stream.n_rows_read
    stream.part(1000).score_fn(POINTS)
    assert stream.n_rows_read - before == (0 if kept else 1000)


def test_passes_and_rows_are_counted_and_no_more_than_a_batch_is_held():
    watched = Mock(side_effect=target_of_batch)
    stream = Minibatches.from_loader(batches, watched)
    assert (stream.n_passes, stream.n_rows_read, stream.batch_size, stream.n_rows) == (1, N + B, B, N)
    stream.score_fn(POINTS)
    stream.score_vjp(POINTS)[1](POINTS)
    assert (stream.n_passes, stream.n_rows_read) == (4, 4 * N + B)
    assert {len(call.args[0][0]) for call in watched.call_args_list} == {B}
    assert stream.to(dtype=torch.float32).n_passes == 4
    known = Minibatches.from_loader(batches, target_of_batch, n_rows=N)
    assert (known.n_passes, known.n_rows_read) == (0, B)


def pickled(stream):
    return pickle.loads(pickle.dumps(stream))  # noqa: S301


@every("copied", [copy.copy, copy.deepcopy, pickled, lambda t: t.to(dtype=torch.float64)])
def test_a_copy_begins_anew(copied):
    stream = Minibatches.from_loader(list(batches()), target_of_batch)
    first = stream.minibatch(torch.Generator()).score_fn(POINTS)
    other = copied(stream)
    close(other.minibatch(torch.Generator()).score_fn(POINTS), first)
    close(other.score_fn(POINTS), FULL.score_fn(POINTS))


@every("n", [3, 2 * N // B + 5])
def test_minibatches_go_on_from_any_place(n):
    streams = [Minibatches.from_loader(batches, target_of_batch, n_rows=N) for _ in range(2)]
    for _ in range(n):
        streams[0].minibatch(torch.Generator())
    streams[1].rewind(n)
    ahead, there = (stream.minibatch(torch.Generator()).score_fn(POINTS) for stream in streams)
    assert torch.equal(ahead, there)


KINDS = np.array(["a", "b", "c"])[Y * (1 + (X[:, 0] > 1))]


@every("cls, y", [(BayesianLogisticRegression, Y), (targets.BayesianMultinomialRegression, KINDS)])
@every("n_rows", [None, N])
def test_batches_may_lack_classes_or_rows(cls, y, n_rows):
    """Sorted, so that the first batches have one class; the minibatch is the first one that has rows."""
    k = np.argsort(y, kind="stable")
    parts = [(X[:0], y[:0]), *((X[k][i : i + B], y[k][i : i + B]) for i in range(0, N, B)), (X[:0], y[:0])]
    stream, whole = Minibatches.from_loader(parts, lambda b: cls(*b), n_rows=n_rows), cls(X[k], y[k])
    x = normal(5, whole.n_features)
    close(stream.score_fn(x), whole.score_fn(x))
    close(stream.minibatch(torch.Generator()).score_fn(x), whole.subset(torch.arange(B)).score_fn(x))


class Fragile:
    """After so many batches it raises or, if it is silent, gives fewer in a pass."""

    def __init__(self, n_left=10**9, silent=False):
        self.n_left, self.silent = n_left, silent

    def __iter__(self):
        for k, batch in enumerate(batches()):
            self.n_left -= 1
            if self.n_left < 0 and not self.silent:
                raise OSError("the disk is gone")
            if self.n_left < 0 and k == 10:
                return
            yield batch


SMALL = KSIVIApproximator(whiten="laplace", mixing="normal", max_iter=30, batch_size=20, random_state=0)
SMALL.set_params(hidden_layer_sizes=(8,))


@pytest.fixture(scope="module")
def to_the_middle():
    """How many batches a fit to a loader that keeps its word reads until the middle of its training."""
    loader = Fragile()
    clone(SMALL).fit(Minibatches.from_loader(loader, target_of_batch, n_rows=N))
    return 10**9 - loader.n_left - 30


def test_a_loader_that_shuffles_anew_has_no_checkpoint(tmp_path):
    rng = np.random.RandomState(0)
    shuffled = lambda: ((X[k], Y[k]) for k in np.split(rng.permutation(N), N // B))  # noqa: E731
    stream = Minibatches.from_loader(shuffled, target_of_batch, n_rows=N)
    with pytest.raises(ValueError, match=r"cannot identify this fit: `score_fn`"):
        KSIVIApproximator(checkpoint=tmp_path / "fit.ckpt", random_state=0).fit(stream)


# Loaders that do not keep their word


def wider():
    yield from batches(n=2 * B)
    yield np.column_stack([X[:B], X[:B, 0]]), Y[:B]


@every(
    "passes, n_rows, message",
    [
        ([batches(), batches(), batches(n=N - B)], None, "`loader` ended early: it gave 4750 .* `n_rows` = 5000"),
        ([batches(), batches()], 40, r"has more of them than before: it gave 5000 rows in a pass, expected .* 40"),
        ([batches(), iter([(X, 3 * Y)])], N, r"gives a class 3, which a pass before lacks: \[False, True\]"),
        ([batches(n=2 * B), iter([])], 2 * B, "`loader` ended early: it gave 0 rows in a pass"),
        ([wider(), wider()], None, r"`loader` changes .* batch 2 gives 4 features from \[\(4,\), \(\)\], but the f"),
    ],
)
def test_a_loader_that_changes_is_told(passes, n_rows, message):
    passes = iter(passes)
    with pytest.raises(ValueError, match=message):
        Minibatches.from_loader(lambda: next(passes), target_of_batch, n_rows=n_rows).score_fn(POINTS)


@pytest.mark.parametrize("silent", [True, False])
def test_what_was_learned_outlives_a_loader(to_the_middle, silent):
    q = clone(SMALL)
    stream = Minibatches.from_loader(Fragile(to_the_middle, silent), target_of_batch, n_rows=N)
    refused(OSError, "`loader` ended early: it gave" if silent else "the disk is gone", q.fit, stream)
    assert 5 < q.n_iter_ < 25
    assert np.isfinite(q.sample(3)).all()


def test_a_change_of_names_is_told():
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow")

    def record_batches():
        for names in (["a", "b", "c", "y"], ["b", "a", "c", "y"]):
            yield pyarrow.RecordBatch.from_arrays([*X[:B].T.copy(), Y[:B]], names=names)

    with pytest.raises(ValueError, match=r"batch 1 gives 3 features from \['b', 'a', 'c', 'y'\], but"):
        Minibatches.from_loader(record_batches, of_record_batch)


MISTAKES = {
    "generator": ({"loader": batches()}, "`loader` is a generator, which can be read only once"),
    "loader": ({"loader": 3}, "`loader` must be iterable, or return an iterator"),
    "empty": ({"loader": [(X[:0], Y[:0])]}, "`loader` is empty; it must give one batch"),
    "one class": ({"loader": [(X, 0 * Y)]}, r"two classes, got 1: \[0\]"),
    "target": ({"target_of_batch": None}, "`target_of_batch` must be a function, got a NoneType"),
    "no rows": (
        {"target_of_batch": lambda batch: from_score_fn(torch.neg, 1)},
        "`target_of_batch` returned a ScoreTarget for batch 0, expected a target with `n_rows`",
    ),
    "prior": ({"target_of_batch": lambda batch: LogisticDensity(*batch)}, "`prior` of LogisticDensity is not known"),
    "n_rows": ({"n_rows": 0}, "n_rows == 0, must be >= 1"),
}


@every("options, message", MISTAKES)
def test_a_mistake_is_named(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Minibatches.from_loader(**{"loader": batches, "target_of_batch": target_of_batch, **options})


# Where data lie


def in_parquet(folder):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({**{f"x{j}": X[:, j] for j in range(D)}, "y": Y})
    parquet.write_table(table, folder / "rows.parquet", row_group_size=1000)

    return lambda: parquet.ParquetFile(folder / "rows.parquet").iter_batches(B), of_record_batch


def in_batches(rows):
    return lambda: (rows[k : k + B] for k in range(0, N, B)), of_table


def in_mapped_memory(folder):
    np.save(folder / "rows.npy", np.column_stack([X, Y]))
    return in_batches(np.load(folder / "rows.npy", mmap_mode="r"))


def in_dataset(folder):
    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from zip(X, Y, strict=True)

    return torch.utils.data.DataLoader(Rows(), batch_size=B), lambda b: target_of_batch((b[0].numpy(), b[1].numpy()))


def in_zarr(folder):
    zarr = pytest.importorskip("zarr", reason="needs zarr")
    rows = zarr.create_array(folder / "rows.zarr", shape=(N, D + 1), chunks=(1000, D + 1), dtype="f8")
    rows[:] = np.column_stack([X, Y])
    return in_batches(rows)


@pytest.mark.parametrize("stored", [in_parquet, in_mapped_memory, in_dataset, in_zarr])
def test_files_and_datasets_are_streams(stored, tmp_path):
    stream = Minibatches.from_loader(*stored(tmp_path))
    assert (stream.n_rows, stream.batch_size) == (N, B)
    close(stream.score_fn(POINTS), FULL.score_fn(POINTS))
