"""What a fit costs whose rows lie in several processes, or in a file that is larger than memory.

python benchmarks/shards.py [--quick] [--cases "1 rank" "2 ranks" stream model] [--out shards.json]

A logistic regression of generated data, every row of it from its number alone, so that each rank makes its own.

1 rank, 2 ranks
    The same fit by one process and by two ranks of torch.distributed on the loopback address: the peak of the memory
    of a rank above what the process has before its rows, seconds of the fit and of a score of 100 points, messages
    and megabytes that a rank has sent, the bytes of all ranks over the loopback device (Linux counts them), and how
    far the draws of the two are apart.
1 rank large, 2 ranks large
    Twenty times the rows, and scores alone.
stream
    A fit to rows in a Parquet file, which is written first: the peak of the memory of the process above what it has
    before, passes, seconds, and the errors of means and standard deviations against the Gaussian at the mode, in
    standard deviations.
model
    Seconds of a score by W ranks, modelled and not measured: the measured seconds of a score of the large data by one
    process over W, and those of an all-reduce, by the measured latency between two and the bandwidth of a network.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from _harness import command, results, rst
from minibatch import memory

from skksivi import KSIVIApproximator
from skksivi.targets import BayesianLogisticRegression, Minibatches, Sharded

D, PRECISION, BLOCK = 50, 0.01, 100_000
CASES = ("1 rank", "2 ranks", "1 rank large", "2 ranks large", "stream", "model")
#: Rows of the ranks and of the file, and those of a quick run.
SIZES = {"fit": 500_000, "large": 10_000_000, "stream": 10_000_000}
QUICK = {"fit": 20_000, "large": 40_000, "stream": 20_000}
N_BATCH = 5000
#: The network of the model: bytes a second of a link of 10 Gbit/s, and points of a score.
BANDWIDTH, N_POINTS = 1.25e9, 100
BETA = np.random.default_rng(0).standard_normal(D).astype(np.float32) / np.sqrt(D, dtype=np.float32)


def block(k, n):
    """Return rows X (n, d), float32, and y (n,) of a block."""
    rng = np.random.default_rng([1, k])
    X = rng.standard_normal((n, D), dtype=np.float32)
    X[:, 1:] += np.float32(0.5) * X[:, :1]
    return X, (rng.uniform(size=n) < 1 / (1 + np.exp(-X @ BETA))).astype(np.float32)


class Rows(BayesianLogisticRegression):
    """The posterior of rows in float32, which the checks of its constructor would copy in float64."""

    def __init__(self, X, y):
        super().__init__(X[:2], [0, 1], PRECISION)
        self._X, self._y, self.n_rows = torch.from_numpy(X), torch.from_numpy(y), len(X)

    def to(self, *, device=None, dtype=None):
        return self  # rows are brought to the type of the points a block at a time


def shard(n_rows):
    """Return what makes the target of a rank: every n_ranks-th block."""
    size = min(BLOCK, n_rows // 4)

    def target_of_rows(rank, n_ranks):
        own = range(rank, n_rows // size, n_ranks)
        X, y = np.empty((len(own) * size, D), np.float32), np.empty(len(own) * size, np.float32)
        for i, k in enumerate(own):
            rows = slice(i * size, (i + 1) * size)
            X[rows], y[rows] = block(k, size)
        return Rows(X, y)

    return target_of_rows


def loopback():
    """Return the bytes that were sent over the loopback device."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split()[9])


def estimator(quick):
    return KSIVIApproximator(whiten="laplace", mixing="normal", max_iter=10 if quick else 50, random_state=0)


def as_rank(folder, n_rows, quick, fits):
    """Fit as one of the ranks, or compute scores, and leave what it has cost."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the most was now
    before = memory("VmRSS")
    target = Sharded(shard(n_rows))
    dist.barrier()
    sent, began = loopback(), time.perf_counter()
    if fits:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            q = estimator(quick).fit(target)
    seconds, sent = time.perf_counter() - began, loopback() - sent
    traffic = copy.copy(target.traffic)
    x = torch.zeros(N_POINTS, D)
    began = time.perf_counter()
    target.score_fn(x)
    of_score = time.perf_counter() - began
    dist.barrier()
    message, n, began = torch.zeros(8192, dtype=torch.float64), 200, time.perf_counter()
    for _ in range(n):
        dist.all_reduce(message)
    row = {
        "seconds": seconds,
        "gigabytes": (memory("VmHWM") - before) / 1e9,
        "data": target.target._X.numel() * 4 / 1e9,
        "calls": traffic.n_calls,
        "messages": traffic.n_messages,
        "megabytes": traffic.n_bytes / 1e6,
        "loopback": sent / 1e6,
        "score": of_score,
        "all-reduce": (time.perf_counter() - began) / n,
        "draws": q.sample(200, random_state=0)[:20].tolist() if fits else [],
    }
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(row))
    dist.destroy_process_group()


def by_ranks(n_ranks, n_rows, quick, fits):
    """Return the largest costs of the ranks, and the draws of the first."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    where = {"WORLD_SIZE": str(n_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    where |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        options = ["--as-rank", folder, str(n_rows), *(["--quick"] * quick), *(["--fits"] * fits)]
        ranks = [
            subprocess.Popen([sys.executable, __file__, *options], env={**os.environ, **where, "RANK": str(k)})
            for k in range(n_ranks)
        ]
        failed = [rank.wait() for rank in ranks]
        if any(failed):
            raise SystemExit("A rank has failed.")
        rows = [json.loads(Path(folder, f"{k}.json").read_text()) for k in range(n_ranks)]
    assert all(row["draws"] == rows[0]["draws"] for row in rows)  # noqa: S101
    return {name: rows[0][name] if name == "draws" else max(row[name] for row in rows) for name in rows[0]}


def stream(n_rows, quick):
    """Write rows to a Parquet file, and return what a fit to it costs and how right it is."""
    import pyarrow
    from pyarrow import parquet

    before = memory("VmRSS")
    names, size = [*(f"x{j}" for j in range(D)), "y"], min(BLOCK, n_rows)
    with tempfile.TemporaryDirectory() as folder:
        path, schema = Path(folder, "rows.parquet"), pyarrow.schema([(name, pyarrow.float32()) for name in names])
        began = time.perf_counter()
        with parquet.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
            for k in range(n_rows // size):
                X, y = block(k, size)
                writer.write_table(pyarrow.table([*X.T.copy(), y], schema=schema))
        written, disk = time.perf_counter() - began, path.stat().st_size
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        began = time.perf_counter()

        def rows():
            return parquet.ParquetFile(path, pre_buffer=False).iter_batches(N_BATCH, use_threads=False)

        def target_of_batch(batch):
            columns = np.stack([column.to_numpy() for column in batch.columns])
            return Rows(np.ascontiguousarray(columns[:-1].T), columns[-1])

        target = Minibatches.from_loader(rows, target_of_batch, n_rows=n_rows // size * size)
        q = KSIVIApproximator(max_iter=20 if quick else 500, random_state=0, verbose=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            q.fit(target)
        seconds = time.perf_counter() - began
        row = {
            "seconds": seconds,
            "gigabytes": (memory("VmHWM") - before) / 1e9,
            "data": disk / 1e9,
            "passes": target.n_passes,
            "rows read": target.n_rows_read,
            "written": written,
            "n_rows": target.n_rows,
            "warnings": [str(w.message)[:200] for w in caught],
        }
        mode, sd = laplace(target, q)
    X = q.sample(20_000, random_state=0).astype(np.float64)
    ratios = X.std(0) / sd
    return {
        **row,
        "mean": float(np.abs((X.mean(0) - mode) / sd).max()),
        "narrowest": float(ratios.min()),
        "widest": float(ratios.max()),
    }


def laplace(target, q):
    """Return mode and standard deviations of the Gaussian there, by Newton steps from the mean of a fit."""
    x = torch.from_numpy(q.sample(2000, random_state=1).astype(np.float64).mean(0))
    for _ in range(2):
        s, pull = target.score_vjp(x.expand(D, D).contiguous())
        J = pull(torch.eye(D, dtype=torch.float64))
        x = x + torch.linalg.solve(-J, s[0])
    return x.numpy(), torch.linalg.inv(-J).diagonal().sqrt().numpy()


def model(row):
    """Return modelled seconds of a score by W ranks: computing, and a tree of messages at 10 Gbit/s."""
    return {
        str(W): {
            "score": row["score"] / W + (np.log2(W) * row["all-reduce"] + 2 * (W - 1) / W * 65536 / BANDWIDTH),
            "alone": row["score"],
        }
        for W in (1, 2, 4, 8, 16, 32, 64)
    }


def run(case, quick, rows):
    sizes = QUICK if quick else SIZES
    if case == "stream":
        return stream(sizes["stream"], quick)
    if case == "model":
        one, two = (next(row for row in rows if row["case"] == name) for name in ("1 rank large", "2 ranks"))
        return {"model": model({"score": one["score"], "all-reduce": two["all-reduce"]})}
    n_rows = sizes["large" if "large" in case else "fit"]
    return {**by_ranks(int(case[0]), n_rows, quick, "large" not in case), "n_rows": n_rows}


def tables(rows):
    """Yield the tables of ranks, of the stream and of the model, as far as there are rows."""
    found = {row["case"]: row for row in rows}
    always, of_fit = ("data", "gigabytes", "score"), ("seconds", "messages", "megabytes", "loopback")
    lines = [
        [case[0], f"{row['n_rows']:,}", *_cells(row, always), *(_cells(row, of_fit) if row["draws"] else [""] * 4)]
        for case, row in found.items()
        if "rank" in case
    ]
    if lines:
        heads = ["ranks", "rows", "GB of rows", "GB at most", "s of a score"]
        yield rst([*heads, "s of a fit", "messages", "MB sent", "MB on loopback"], lines)
    if "stream" in found:
        row = found["stream"]
        names = ("data", "gigabytes", "seconds", "passes", "mean", "narrowest", "widest")
        heads = ["rows", "GB of the file", "GB at most", "s", "passes", "mean off by", "sd ratios from", "to"]
        yield rst(heads, [[f"{row['n_rows']:,}", *_cells(row, names)]])
    if "model" in found:
        seconds = found["model"]["model"].items()
        lines = [[W, f"{row['score']:.3g}", f"{row['alone'] / row['score']:.1f}"] for W, row in seconds]
        yield rst(["ranks (model)", "s of a score", "times as fast"], lines)


def _cells(row, names):
    return [f"{row[name]:.3g}" for name in names]


def difference(rows):
    """Return by how much the draws of one rank and two differ, in standard deviations, None if they are not there."""
    draws = [np.array(row["draws"]) for row in rows if row["case"] in CASES[:2]]
    return np.abs((draws[0] - draws[1]) / draws[0].std(0)).max() if len(draws) == 2 else None


def show(rows):
    print("\n".join(tables(rows)))
    if (found := difference(rows)) is not None:
        print(f"The draws of one rank and of two differ by {found:.1e} standard deviations at most.")


def main():
    parser = command(__doc__, seeds=1)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--as-rank", nargs=2, help="a folder and a number of rows, to fit as a rank")
    parser.add_argument("--fits", action="store_true", help="whether that rank is to fit")
    args = parser.parse_args()
    if args.as_rank:
        as_rank(args.as_rank[0], int(args.as_rank[1]), args.quick, args.fits)
        return
    jobs = [(case, "KSIVI", 0) for case in args.cases]
    done = [] if args.out is None or not args.out.exists() else json.loads(args.out.read_text())["rows"]

    def run_next(case, _, __):
        row = run(case, args.quick, done)
        done.append({"case": case, **row})
        return row

    show(results(args, jobs, run_next)["rows"])


if __name__ == "__main__":
    main()
