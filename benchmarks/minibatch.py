"""What a fit to minibatches of large data costs, and how right it is.

python benchmarks/minibatch.py [--cases million million-exact] [--seeds 1] [--out minibatch.json]

Logistic regressions of generated data. The reference is the Gaussian at the mode of all of the data by the curvature
there, its moments corrected by importance weights; a fit is compared with it coordinate by coordinate. Each runs in a
process of its own. Shown are the peak of the memory above what the process has with the data and the target, the
seconds of the fit, the largest error of a mean in standard deviations, and the range of the ratios of standard
deviations. Beside them are the seconds that averaged stochastic gradient descent takes by minibatches of that size
until no coordinate is farther than a tenth of a standard deviation from the mode, but at most for a hundred epochs,
and how far it is off then: an average over k epochs is about 1/sqrt(k) standard deviations off in each coordinate.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from _harness import JOB, command, print_table, results

from skksivi import KSIVIApproximator
from skksivi.targets import BayesianLogisticRegression, Minibatches, from_rows

PRECISION, N_BLOCK, N_DRAWS, MAX_EPOCHS = 0.01, 20_000, 20_000, 100


class Case(NamedTuple):
    """A posterior: rows, features, rows of a minibatch, the columns, where the fit starts, and the kind of target."""

    n: int
    d: int
    b: int
    columns: str = "normal"
    start: str = "auto"
    kind: str = "own"


CASES = {
    "million": Case(1_000_000, 50, 1000),
    "million, exact start": Case(1_000_000, 50, 1000, start="exact"),
    "million, rows": Case(1_000_000, 50, 1000, kind="rows"),
    "hundred thousand": Case(100_000, 50, 1000),
    "hundred thousand, exact start": Case(100_000, 50, 1000, start="exact"),
    "heavy-tailed columns": Case(100_000, 20, 1000, "heavy"),
    "rare columns": Case(100_000, 20, 1000, "rare"),
    "ten thousand": Case(10_000, 5, 100),
    "ten thousand, exact start": Case(10_000, 5, 100, start="exact"),
    "ten thousand, Laplace start": Case(10_000, 5, 100, start="laplace"),
    "small": Case(2000, 3, 20, "rare"),
}


def data(case, seed):
    """Return X (n, d), float32, and y (n,)."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((case.n, case.d), dtype=np.float32)
    if case.columns == "heavy":
        X /= np.sqrt(rng.chisquare(3, (case.n, case.d)) / 3).astype(np.float32)
    if case.columns == "rare":
        X[:, 1:] = rng.uniform(size=(case.n, case.d - 1)) < 30 / case.n * 2.0 ** np.arange(case.d - 1)
    X[:, 1:] += np.float32(0.5 * (case.columns != "rare")) * X[:, :1]
    beta = rng.standard_normal(case.d).astype(np.float32) / np.sqrt(case.d, dtype=np.float32)
    y = rng.uniform(size=case.n) < 1 / (1 + np.exp(-X @ beta))
    return X, y.astype(np.float32)


def blocks(n):
    return [slice(k, k + N_BLOCK) for k in range(0, n, N_BLOCK)]


def laplace(X, y):
    """Return the mode and the covariance there."""
    beta = np.zeros(X.shape[1])
    for _ in range(25):
        g, H = -PRECISION * beta, PRECISION * np.eye(len(beta))
        for rows in blocks(len(X)):
            A = X[rows].astype(np.float64)
            p = 1 / (1 + np.exp(-A @ beta))
            g += (y[rows] - p) @ A
            H += (A.T * (p * (1 - p))) @ A
        step = np.linalg.solve(H, g)
        beta += step
        if step @ g < 1e-10:
            break
    return beta, np.linalg.inv(H)


def log_p(X, y, beta):
    """Return log p up to a constant at the rows of beta."""
    total = -PRECISION / 2 * (beta**2).sum(1)
    for rows in blocks(len(X)):
        eta = beta @ X[rows].astype(np.float64).T
        total += eta @ y[rows] - np.logaddexp(0, eta).sum(1)
    return total


def reference(X, y, seed=0):
    """Return mode, covariance there, means and standard deviations, and the effective share of the weighted draws."""
    mode, cov = laplace(X, y)
    z = np.random.default_rng(seed).standard_normal((int(np.clip(2e8 / len(X), 100, 4000)), len(mode)))
    z = np.concatenate([z, -z])
    x = mode + z @ np.linalg.cholesky(cov).T
    log_w = log_p(X, y, x) + (z**2).sum(1) / 2
    w = np.exp(log_w - log_w.max())
    w /= w.sum()
    mean = w @ x
    change = w @ (x - mean) ** 2 - x.var(0)  # less noisy than either
    return mode, cov, mean, np.sqrt(np.diag(cov) + change), 1 / (len(w) * (w**2).sum())


def target_of(case, X, y):
    if case.kind == "own":
        return BayesianLogisticRegression(X, y, PRECISION)
    A, t = torch.from_numpy(X), torch.from_numpy(y)

    def score_fn(x, rows):
        B = A[rows].to(x)
        return len(A) / len(rows) * (t[rows].to(x) - torch.sigmoid(x @ B.T)) @ B - PRECISION * x

    return from_rows(score_fn, n_rows=case.n, n_features=case.d)


def memory(name):
    """Return what the process has in memory ("VmRSS"), or had at most ("VmHWM"), in bytes; Linux alone tells it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def descent(X, y, case, mode, sd):
    """Return seconds and epochs of SGD until its average, begun anew at each doubling, is near the mode."""
    A, t, generator = torch.from_numpy(X), torch.from_numpy(y), torch.Generator().manual_seed(0)
    beta = torch.zeros(case.d)
    rate = 1 / (0.25 * A[:2000].square().sum(1).mean().item())
    average, n, epochs, seconds = torch.zeros(case.d), 0, 1, 0.0
    restart = 1
    while epochs <= MAX_EPOCHS:
        start = time.perf_counter()
        for _ in range(max(1, case.n // case.b)):
            rows = torch.randint(case.n, (case.b,), generator=generator)
            B = A[rows]
            beta += rate * ((t[rows] - torch.sigmoid(B @ beta)) @ B / case.b - PRECISION / case.n * beta)
            n += 1
            average += (beta - average) / n
        seconds += time.perf_counter() - start
        error = np.abs((average.double().numpy() - mode) / sd).max()
        if error < 0.1:
            break
        if epochs == restart:
            restart, n, average = 2 * restart, 0, torch.zeros(case.d)
        epochs += 1
    return {"sgd": seconds, "epochs": min(epochs, MAX_EPOCHS), "sgd error": error}


def run_here(name, seed, quick):
    """Fit one case in this process."""
    case = CASES[name]
    if quick:
        case = case._replace(n=min(case.n, 3000))
    X, y = data(case, seed)
    mode, cov, mean, sd, share = reference(X, y)
    target = target_of(case, X, y)
    whiten = (mode, np.linalg.cholesky(cov)) if case.start == "exact" else case.start
    q = KSIVIApproximator(whiten=whiten, max_iter=50 if quick else 2000, random_state=seed, verbose=1)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the most was now
    before = memory("VmRSS")
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        q.fit(Minibatches(target, case.b))
    seconds = time.perf_counter() - start
    peak = memory("VmHWM")
    draws = q.sample(N_DRAWS).astype(np.float64)
    ratios = draws.std(0) / sd
    row = {
        "seconds": seconds,
        "gigabytes": (peak - before) / 1e9,
        "data": X.nbytes / 1e9,
        "mean": np.abs((draws.mean(0) - mean) / sd).max(),
        "narrowest": ratios.min(),
        "widest": ratios.max(),
        "best_iter": int(q.best_iter_),
        "Laplace": np.abs((mode - mean) / sd).max(),
        "share": share,
        "warnings": [str(w.message)[:200] for w in caught],
    }
    if case.columns != "rare":
        row |= descent(X, y, case, mode, sd)
    return row


def run(quick):
    def in_process(name, _, seed):
        options = ["--quick"] if quick else []
        done = subprocess.run(
            [sys.executable, __file__, "--here", name, str(seed), *options], check=True, stdout=subprocess.PIPE
        )
        return json.loads(done.stdout)

    return in_process


def main():
    parser = command(__doc__, seeds=1)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--here", nargs=2, help="a case and a seed to fit in this process")
    args = parser.parse_args()
    if args.here:
        print(json.dumps(run_here(args.here[0], int(args.here[1]), args.quick)))
        return
    jobs = [(name, "KSIVI", seed) for name in args.cases for seed in range(args.seeds)]
    document = results(args, jobs, run(args.quick))
    heads = ["case", "seed", "GB", "s", "mean", "sd ratios", "SGD s", "epochs", "mean"]
    rows = [row for row in document["rows"] if row[JOB[0]] in args.cases]
    print_table(heads, [_cells(row) for row in rows])


def _cells(row):
    sgd = [f"{row['sgd']:.0f}", row["epochs"], f"{row['sgd error']:.3f}"] if "sgd" in row else [""] * 3
    ratios = f"{row['narrowest']:.3f}-{row['widest']:.3f}"
    costs = f"{row['gigabytes']:.2f}", f"{row['seconds']:.0f}"
    return [row["case"], row["seed"], *costs, f"{row['mean']:.3f}", ratios, *sgd]


if __name__ == "__main__":
    main()
