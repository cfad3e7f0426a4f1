"""Scores that several workers evaluate: the same numbers for any number of them, and faults told by their rows."""

import os
import signal
import threading

import numpy as np
import pytest
import torch
from approximators import short
from members import every, refused
from misbehaving import Misbehaving, raising
from plain_targets import normal, normal_array, resolved, stan

from skksivi import KSIVIApproximator
from skksivi.targets import from_bridgestan, from_score_fn

A = normal_array(40, 3)


def of_arrays(X):
    """A score whose last bits depend on how many rows are asked for at a time."""
    assert isinstance(X, np.ndarray)
    return (A.T @ np.tanh(A @ X.T)).T * -1.0


def of_tensors(x):
    a = torch.from_numpy(A)
    return -torch.tanh(x @ a.mT) @ a


def of_stan(theta):
    return -theta @ theta / 2, -theta


FUNCTIONS = {"arrays": of_arrays, "tensors": of_tensors, "stan": from_bridgestan(stan(3, of_stan)).score_fn}


def by_threads(score_fn, n_jobs=2, **options):
    return from_score_fn(score_fn, 3, n_jobs=n_jobs, backend="threading", **options)


@every("name", list(FUNCTIONS))
@every("chunk_size", [4, 100])
def test_numbers_are_those_of_each_chunk_whatever_the_number_of_workers(name, chunk_size):
    x, score_fn = normal(10, 3), FUNCTIONS[name]
    at = x.numpy() if name == "arrays" else x
    parts = [torch.as_tensor(score_fn(at[k : k + chunk_size])) for k in range(0, 10, chunk_size)]
    for n_jobs in (1, 3):
        s = by_threads(score_fn, n_jobs, chunk_size=chunk_size).score_fn(at)
        assert torch.as_tensor(s).equal(torch.cat(parts))


def test_products_of_workers_are_differences():
    score, alone = resolved(by_threads(of_tensors)), resolved(from_score_fn(of_tensors, 3))
    x, v = normal(5, 3), normal(5, 3, seed=1)
    assert score.by_differences
    assert not alone.by_differences
    assert score(x[:0]).shape == (0, 3)
    torch.testing.assert_close(score.product(x, v), alone.product(x, v), rtol=1e-7, atol=1e-7)


def test_a_chunk_that_takes_too_long_is_told():
    free, X = threading.Event(), normal_array(6, 3)
    stuck = by_threads(lambda X: free.wait(20) and -X, timeout=0.3)
    refused(TimeoutError, r"did not return within `timeout` = 0.3 s for a chunk of 1 rows; raise", stuck.score_fn, X)
    free.set()


FAULTS = {
    "shape": (lambda X: X[:, :2], ValueError, r"shape \(2, 2\) for the chunk of rows \d to \d of 6, .*input"),
    "kind": (lambda X: X.tolist(), TypeError, "`score_fn` returned a list, expected a torch tensor or an array"),
    "error": (lambda X: 1 / 0, ZeroDivisionError, "division by zero\nRaised for the chunk of rows . to . of 6."),
}


@every("n_jobs", [1, 2])
@every("score_fn, kind, message", FAULTS)
def test_what_is_wrong_with_a_chunk_is_told_with_its_rows(score_fn, kind, message, n_jobs):
    refused(kind, message, lambda: by_threads(score_fn, n_jobs, chunk_size=2).score_fn(normal_array(6, 3)))


BAD = [
    ({"n_jobs": 0}, "`n_jobs` is 0, expected a number of workers"),
    ({"n_jobs": 2, "chunk_size": 0}, "chunk_size == 0, must be >= 1"),
    ({"n_jobs": 2, "timeout": 0.0}, "timeout == 0.0, must be >= 0.001"),
]


@every("options, message", BAD)
def test_a_bad_parameter_is_named(options, message):
    refused(ValueError, message, lambda: from_score_fn(of_arrays, 3, **options))


def test_a_lost_worker_at_the_first_call_is_not_taken_for_a_fault_of_the_function():
    with pytest.raises(ConnectionError, match="gone") as raised:
        short(KSIVIApproximator()).fit(Misbehaving(raising(ConnectionError("gone")), 0), n_features=2)
    assert not hasattr(raised.value, "__notes__")


# Processes


def by_value(function):
    """A function that processes get by value, since they cannot import this file."""
    function.__module__ = "__main__"
    return function


@pytest.mark.slow
def test_processes_give_the_numbers_of_this_one_and_tell_of_a_kill():
    by_processes = {"n_jobs": 2, "backend": "loky", "chunk_size": 3}
    X = normal_array(12, 3)
    for name, score_fn in FUNCTIONS.items():
        at = X if name == "arrays" else torch.from_numpy(X)
        there = from_score_fn(score_fn, 3, **by_processes).score_fn(at)
        np.testing.assert_array_equal(there, by_threads(score_fn, 1, chunk_size=3).score_fn(at))
    X[7] = 9.0
    dies = by_value(lambda X: os.kill(os.getpid(), signal.SIGKILL) if X.max() > 5 else -X)
    with pytest.raises(ConnectionError, match="A worker that evaluated `score_fn` was lost; it may have run out"):
        from_score_fn(dies, 3, **by_processes).score_fn(X)
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        from_score_fn(lambda X: lock and X, 3, **by_processes).score_fn(X)


@pytest.mark.slow
def test_a_cluster_gives_the_numbers_of_this_process():
    distributed = pytest.importorskip("distributed", reason="needs dask")
    X, quiet = normal_array(7, 3), {"dashboard_address": "127.0.0.1:0", "silence_logs": "CRITICAL"}
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, **quiet) as workers, distributed.Client(workers):
        there = from_score_fn(by_value(lambda X: -(X**3)), 3, n_jobs=2, backend="dask", chunk_size=2).score_fn(X)
    np.testing.assert_array_equal(there, -(X**3))
