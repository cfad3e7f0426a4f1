"""How much faster workers evaluate an expensive score.

python benchmarks/workers.py [--quick] [--out workers.json]

A score that sleeps for 20 ms a row, at 100 rows a call, by one worker and by two: processes and threads of joblib,
and workers of a local dask cluster. Workers are warm. Shown are the median seconds of a call, and how many times
faster it is than one worker and than the same rows in one call without joblib.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext

import numpy as np
from _harness import command, of, pairs, results, rst

from skksivi.targets import from_score_fn

SECONDS, D = 0.02, 5
N_WORKERS = (1, 2)
BACKENDS = ("loky", "threading", "dask")


def score_fn(X):
    time.sleep(SECONDS * len(X))
    return -X


def cluster(n):
    """Return a local cluster of n workers with a client."""
    from distributed import Client, LocalCluster

    stack = ExitStack()
    workers = stack.enter_context(
        LocalCluster(n_workers=n, threads_per_worker=1, dashboard_address=None, host="127.0.0.1")
    )
    stack.enter_context(Client(workers))
    return stack


def run(backend, n_workers, seed, *, n_rows, n_calls):
    """Return the seconds of the calls by so many workers of a backend, and those without joblib."""
    X = np.random.RandomState(seed).normal(size=(n_rows, D))
    with cluster(n_workers) if backend == "dask" else nullcontext():
        # one worker of joblib's own is this process, one of dask is another
        n_jobs = -1 if backend == "dask" else n_workers
        target = from_score_fn(score_fn, D, n_jobs=n_jobs, backend=backend)
        for _ in range(3):  # workers start, and import this file
            target.score_fn(X[: 4 * n_workers])
        seconds = []
        for _ in range(n_calls):
            began = time.perf_counter()
            S = target.score_fn(X)
            seconds.append(time.perf_counter() - began)
            np.testing.assert_array_equal(S, -X)
    began = time.perf_counter()
    from_score_fn(score_fn, D).score_fn(X)
    return {"seconds": seconds, "alone": time.perf_counter() - began, "n_rows": n_rows}


def show(rows):
    lines = []
    for backend, n in pairs(rows):
        one, own = of(rows, "seconds", case=backend, method=1), of(rows, "seconds", case=backend, method=n)
        alone = np.median(of(rows, "alone", case=backend, method=n))
        median = np.median(np.concatenate(own))
        against_one = f"{np.median(np.concatenate(one)) / median:.2f}" if one else "-"
        lines.append([backend, n, f"{median:.2f}", against_one, f"{alone / median:.2f}"])
    print(rst(["backend", "workers", "seconds a call", "times one worker", "times one call without joblib"], lines))


def main():
    parser = command(__doc__, seeds=1)
    args = parser.parse_args()
    size = {"n_rows": 8, "n_calls": 1} if args.quick else {"n_rows": 100, "n_calls": 5}
    jobs = [
        (backend, n, seed)
        for backend in BACKENDS
        for n in N_WORKERS[: 1 + (not args.quick)]
        for seed in range(args.seeds)
    ]
    show(results(args, jobs, lambda *job: run(*job, **size), **size)["rows"])


if __name__ == "__main__":
    main()
