"""What a fit costs whose rows lie in several processes, or in files that are larger than memory.

python benchmarks/shards.py [--quick] [--cases "1 rank" "2 ranks" stream model] [--out shards.json]
python benchmarks/shards.py --cases "large stream" --folder FOLDER --out shards.json

A logistic regression of generated data, every row of it from its number alone, so that each rank makes its own.

1 rank, 2 ranks
    The same fit by one process and by two ranks of torch.distributed on the loopback address: the peak of the memory
    of a rank above what the process has before its rows, seconds of the fit, seconds and seconds of CPU time of a
    score of 100 points, messages and megabytes that a rank has sent, the bytes of all ranks over the loopback device
    (Linux counts them, with those of other processes: `unshare -n sh -c "ip link set lo up; python ..."` leaves them
    out), and how far the draws of the two are apart.
1 rank large, 2 ranks large
    Fifty times the rows, and scores alone.
stream, large stream
    A fit to rows in Parquet files, which are written first, those that --folder has already are taken as they are:
    the peak of the memory of the process above what it has before, passes, seconds, and the errors of means and
    standard deviations against the Gaussian at the mode, in standard deviations. The large one has fewer columns.
model
    Seconds of an iteration of the training by W ranks, modelled and not measured: floating-point operations of a
    score with its product over those that a rank does in a second, as measured, latencies of messages between two
    ranks, as measured, bytes over the bandwidth of a network, and what an iteration takes beside the score.
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
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from _harness import command, results, rst

from skksivi import KSIVIApproximator
from skksivi.targets import BayesianLogisticRegression, Minibatches, Sharded, from_score_fn

D, PRECISION, BLOCK = 50, 0.01, 100_000
CASES = ("1 rank", "2 ranks", "1 rank large", "2 ranks large", "stream", "model", "large stream")
#: Rows of the ranks and of the files, and those of a quick run; columns of the files.
SIZES = {"fit": 200_000, "large": 10_000_000, "stream": 10_000_000, "large stream": 100_000_000}
QUICK = {"fit": 20_000, "large": 40_000, "stream": 20_000, "large stream": 40_000}
COLUMNS = {"stream": D, "large stream": 10}
N_BATCH = 5000
#: Points of a score, and how often one is timed.
N_POINTS, N_TIMED = 100, 3
#: The network of the model: bytes a second of a link of 10 Gbit/s; its messages, and their bytes, in an iteration;
#: floating-point operations of a score with its product for a point, a row and a column; rows of the data.
BANDWIDTH, N_MESSAGES, N_BYTES, N_FLOPS = 1.25e9, 2, 65536, 8
MODELLED, RANKS = (10**5, 10**7, 10**9), (1, 2, 4, 8, 16, 32, 64)


def block(k, n, d=D):
    """Return rows X (n, d), float32, and y (n,) of a block."""
    beta = np.random.default_rng(0).standard_normal(d).astype(np.float32) / np.sqrt(d, dtype=np.float32)
    rng = np.random.default_rng([1, k])
    X = rng.standard_normal((n, d), dtype=np.float32)
    X[:, 1:] += np.float32(0.5) * X[:, :1]
    return X, (rng.uniform(size=n) < 1 / (1 + np.exp(-X @ beta))).astype(np.float32)


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


def memory(name):
    """Return what the process has in memory ("VmRSS"), or had at most ("VmHWM"), in bytes; Linux alone reports it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def loopback():
    """Return the bytes that were sent over the loopback device."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split()[9])


def estimator(quick):
    own = {"method": "path", "whiten": "laplace", "mixing": "normal"}
    return KSIVIApproximator(**own, max_iter=10 if quick else 50, random_state=0)


def timed(act, n):
    """Return the least seconds and seconds of CPU time of n calls, which other processes disturb least."""
    found = []
    for _ in range(n):
        began = time.perf_counter(), time.process_time()
        act()
        found.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    return np.min(found, axis=0).tolist()


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
    x, message = torch.zeros(N_POINTS, D), torch.zeros(N_BYTES // 8, dtype=torch.float64)
    # of the rank alone, and with the sum: the rest is waiting
    own = timed(lambda: target.target.score_fn(x), N_TIMED)
    dist.barrier()
    of_score = timed(lambda: target.score_fn(x), N_TIMED)
    row = {
        "seconds": seconds,
        "gigabytes": (memory("VmHWM") - before) / 1e9,
        "data": target.target._X.numel() * 4 / 1e9,
        "messages": traffic.n_messages,
        "megabytes": traffic.n_bytes / 1e6,
        "loopback": sent / 1e6,
        "score": of_score[0],
        "CPU": own[1],
        "all-reduce": timed(lambda: dist.all_reduce(message), 200)[0],
        "draws": q.sample(200, random_state=0)[:5].tolist() if fits else [],
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


def files(folder, n_rows, d):
    """Return Parquet files of rows in a folder, and their size; write those that are not there."""
    import pyarrow
    from pyarrow import parquet

    schema = pyarrow.schema([(name, pyarrow.float32()) for name in [*(f"x{j}" for j in range(d)), "y"]])
    size, paths = min(BLOCK, n_rows // 2), []
    for k in range(n_rows // size):
        paths.append(Path(folder, f"{k} of {size} x {d}.parquet"))
        if not paths[-1].exists():
            X, y = block(k, size, d)
            part, table = paths[-1].with_suffix(".part"), pyarrow.table([*X.T.copy(), y], schema=schema)
            parquet.write_table(table, part, compression="none", use_dictionary=False)
            part.replace(paths[-1])
    return paths, size


def stream(n_rows, d, quick, folder):
    """Write rows to Parquet files, and return what a fit to them costs and how right it is."""
    from pyarrow import parquet

    paths, size = files(folder, n_rows, d)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    began = time.perf_counter(), time.process_time()

    def batches():
        for path in paths:
            yield from parquet.ParquetFile(path, pre_buffer=False).iter_batches(N_BATCH, use_threads=False)

    def target_of_batch(batch):
        columns = np.stack([column.to_numpy() for column in batch.columns])
        return Rows(np.ascontiguousarray(columns[:-1].T), columns[-1])

    target = Minibatches.from_loader(batches, target_of_batch, n_rows=len(paths) * size)
    q = KSIVIApproximator(max_iter=20 if quick else 500, random_state=0, verbose=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        q.fit(target)
    row = {
        "seconds": time.perf_counter() - began[0],
        "CPU": time.process_time() - began[1],
        "gigabytes": (memory("VmHWM") - before) / 1e9,
        "data": sum(path.stat().st_size for path in paths) / 1e9,
        "passes": target.n_passes,
        "n_rows": target.n_rows,
        "columns": d,
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
        d = len(x)
        s, pull = target.score_vjp(x.expand(d, d).contiguous())
        J = pull(torch.eye(d, dtype=torch.float64))
        x = x + torch.linalg.solve(-J, s[0])
    return x.numpy(), torch.linalg.inv(-J).diagonal().sqrt().numpy()


def serial(n_iter):
    """Return the seconds of an iteration whose score costs nothing."""
    target = from_score_fn(torch.neg, D)
    q = estimator(False).set_params(max_iter=n_iter, early_stopping=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        q.fit(target)
    return next(stage.seconds for stage in q.stages_ if stage.name == "training") / n_iter


def model(flops, latency, serial):
    """Return modelled seconds of an iteration by W ranks, by the number of rows."""

    def seconds(n_rows, W):
        score = N_FLOPS * N_POINTS * n_rows * D / (W * flops)
        message = latency * np.ceil(np.log2(W)) + 2 * (W - 1) / W * N_BYTES / BANDWIDTH
        return serial + score + N_MESSAGES * message

    found = {str(n_rows): {str(W): float(seconds(n_rows, W)) for W in RANKS} for n_rows in MODELLED}
    return {"flops": flops, "latency": latency, "serial": serial, "model": found}


def run(case, args, rows):
    quick = args.quick
    sizes = QUICK if quick else SIZES
    n_rows = sizes.get(case, sizes["large" if "large" in case else "fit"])
    if case in COLUMNS:
        with nullcontext(args.folder) if args.folder else tempfile.TemporaryDirectory() as folder:
            return stream(n_rows, COLUMNS[case], quick, folder)
    if case == "model":
        one, two = (next(row for row in rows if row["case"] == name) for name in ("1 rank large", "2 ranks"))
        # a score without its product is half of the operations
        flops = N_FLOPS / 2 * N_POINTS * one["n_rows"] * D / one["CPU"]
        return model(flops, two["all-reduce"], serial(20 if quick else 300))
    return {**by_ranks(int(case[0]), n_rows, quick, "large" not in case), "n_rows": n_rows}


def tables(rows):
    """Yield the tables of ranks, of streams and of the model, as far as there are rows."""
    found = {row["case"]: row for row in rows}
    always, of_fit = ("data", "gigabytes", "score", "CPU"), ("seconds", "messages", "megabytes", "loopback")
    lines = [
        [case[0], f"{row['n_rows']:,}", *_cells(row, always), *(_cells(row, of_fit) if row["draws"] else [""] * 4)]
        for case, row in found.items()
        if "rank" in case
    ]
    if lines:
        heads = ["ranks", "rows", "GB of rows", "GB at most", "s of a score", "of CPU"]
        yield rst([*heads, "s of a fit", "messages", "MB sent", "MB on loopback"], lines)
    names = ("columns", "data", "gigabytes", "seconds", "CPU", "passes", "mean", "narrowest", "widest")
    lines = [[f"{row['n_rows']:,}", *_cells(row, names)] for case, row in found.items() if case in COLUMNS]
    if lines:
        heads = ["rows", "columns", "GB of files", "GB at most", "s", "of CPU", "passes", "mean off by"]
        yield rst([*heads, "sd ratios from", "to"], lines)
    if "model" in found:
        times = found["model"]["model"]
        lines = [[W, *(_modelled(times[n_rows], W) for n_rows in times)] for W in map(str, RANKS)]
        yield rst(["ranks (model)", *(f"{int(n_rows):,} rows" for n_rows in times)], lines)


def _modelled(seconds, W):
    """Return the seconds of an iteration by W ranks, and how many times as fast as by one that is."""
    return f"{seconds[W]:.3g} s, {seconds['1'] / seconds[W]:.1f} times"


def _cells(row, names):
    return [f"{row[name]:.3g}" for name in names]


def sentences(rows):
    """Yield what else there is to say, as far as there are rows."""
    found = {row["case"]: row for row in rows}
    if {"1 rank", "2 ranks"} <= found.keys():
        one, two = (np.array(found[case]["draws"]) for case in ("1 rank", "2 ranks"))
        off = np.abs((one - two) / one.std(0)).max()
        yield f"The draws of one rank and of two differ by {off:.1e} standard deviations at most."
    if "1 rank large" in found:
        row = found["1 rank large"]
        rates = N_FLOPS / 2 * N_POINTS * D * row["n_rows"] / row["CPU"] / 1e9, row["data"] / row["CPU"]
        yield (
            f"One second of CPU time performs {rates[0]:.0f} billion operations on {rates[1]:.2g} GB of rows, so a "
            "score is bound by computation and not by memory."
        )


def show(rows):
    print("\n".join([*tables(rows), *sentences(rows)]))


def main():
    parser = command(__doc__, seeds=1, cases=CASES)
    parser.add_argument("--folder", type=Path, help="where the files are and stay; else they are removed")
    parser.add_argument("--as-rank", nargs=2, help="a folder and a number of rows, to fit as a rank")
    parser.add_argument("--fits", action="store_true", help="whether that rank is to fit")
    args = parser.parse_args()
    if args.as_rank:
        as_rank(args.as_rank[0], int(args.as_rank[1]), args.quick, args.fits)
        return
    jobs = [(case, "KSIVI", 0) for case in args.cases]
    done = [] if args.out is None or not args.out.exists() else json.loads(args.out.read_text())["rows"]

    def run_next(case, _, __):
        row = run(case, args, done)
        done.append({"case": case, **row})
        return row

    show(results(args, jobs, run_next)["rows"])


if __name__ == "__main__":
    main()
