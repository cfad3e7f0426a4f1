"""What a fit costs as dimension, rows of data and number of draws grow, beside NUTS.

python benchmarks/growth.py [--dimensions 2 ... 10000] [--rows 100 ... 10000000] [--out FILE.json]
python benchmarks/growth.py --show benchmarks/growth.json --manual doc      table and figure of the manual

Against the dimension the target is a Gaussian of coordinates on scales from 1e-2 to 1e2, tied together by up to ten
common factors of standard deviations 2 to 15, its mean ten units off the origin; against the rows of data, a logistic
regression with ten coefficients. KSIVI has its defaults. NUTS is nutpie with the low-rank metric, four chains of 300
iterations to warm up and 250 that are kept; its costs are scaled to a thousand independent draws of the coordinate
that mixes worst. Each fit runs in a process of its own, with one thread. Printed are calls of score or log p, CPU
time, the peak of memory above what was used before, and the range of the ratios of standard deviations of coordinates
and factors to the true ones.
"""

from __future__ import annotations

import resource
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import matplotlib.pyplot as plt
import numpy as np
import torch
from _harness import OURS, command, of, results, rst, select, show_figure, show_tables
from _rivals import NutpieNUTS, Watched, missing
from matplotlib.ticker import NullFormatter

from skksivi import KSIVIApproximator
from skksivi.targets import BayesianLogisticRegression, Target

DIMENSIONS = (2, 10, 30, 100, 300, 1000, 3000, 10_000)
ROWS = (10**2, 10**3, 10**4, 10**5, 10**6, 10**7)
METHODS = {
    OURS: KSIVIApproximator,
    "NUTS": lambda random_state: NutpieNUTS(n_warmup=300, n_draws=250, random_state=random_state),
}
#: The most rows for NUTS, which would take more than an hour with ten times as many.
MOST_ROWS = 10**6

#: Independent draws for which NUTS is charged, draws that are timed, and the case whose cost is drawn against draws.
N_INDEPENDENT, N_DRAWS, DRAWN = 1000, 100_000, "d = 30"
#: Draws for the ratios of standard deviations, as many as KSIVI is asked for.
N_COMPARED = 4000


class FactorModel(Target):
    """N(mean, S (I + W diag(lam) W^T) S) with orthonormal W (d, k)."""

    def __init__(self, d, k=10, seed=0):
        rng, k = np.random.RandomState(seed), min(k, d)
        self.n_features = d
        self.mean = torch.tensor(10 * rng.standard_normal(d))
        self.S = torch.tensor(10 ** rng.uniform(-2, 2, d))
        self.W = torch.linalg.qr(torch.tensor(rng.standard_normal((d, k)))).Q
        self.lam = torch.linspace(2, 15, k, dtype=torch.float64).square()

    def log_prob(self, x):
        return ((x - self.mean.to(x)) * self.score_fn(x)).sum(-1) / 2

    def score_fn(self, x):
        mean, S, W, lam = (a.to(x) for a in (self.mean, self.S, self.W, self.lam))
        v = (x - mean) / S
        return -(v - (v @ W * (lam / (1 + lam))) @ W.mT) / S

    def ratios(self, X):
        """Return the range of the standard deviations of coordinates and factors over the true ones."""
        v = (torch.as_tensor(X, dtype=torch.float64) - self.mean) / self.S
        of_both = v.std(0) / (1 + self.W.square() @ self.lam).sqrt(), (v @ self.W).std(0) / (1 + self.lam).sqrt()
        return [torch.cat(of_both).min().item(), torch.cat(of_both).max().item()]


def logistic(n_rows, d=10):
    rng = np.random.RandomState(0)
    X = rng.standard_normal((n_rows, d))
    y = rng.random_sample(n_rows) < 1 / (1 + np.exp(-X @ rng.standard_normal(d) / 2))
    return BayesianLogisticRegression(X, y)


def measured(case, method, seed):
    torch.set_num_threads(1)
    kind, size = case.split(" = ")
    target = Watched(FactorModel(int(size)) if kind == "d" else logistic(int(size)))
    used, start = peak(), time.process_time()
    q = METHODS[method](random_state=seed).fit(target)
    row = {"calls": target.n_points[0], "seconds": time.process_time() - start, "memory": peak() - used}
    if method == "NUTS":
        share = N_INDEPENDENT / q.n_effective_
        sampling = q.n_sampling_calls_ / row["calls"]
        row |= {"warm_up": 1 - sampling, "calls_a_draw": q.n_sampling_calls_ / q.n_effective_}
        row |= {name: row[name] * (1 - sampling + sampling * share) for name in ("calls", "seconds")}
    else:
        start = time.process_time()
        for seed_of_draws in range(10):
            q.sample(N_DRAWS // 10, random_state=seed_of_draws)
        row["seconds_of_draws"] = time.process_time() - start
    if kind == "d":
        row["ratios"] = target.target.ratios(q.sample(N_COMPARED, random_state=seed))
    return row


def peak():
    """Return the largest memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(case, method, seed):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measured, case, method, seed).result()


def table(rows):
    """Return the table of the manual, a line for each size."""
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        kind, size = case.split(" = ")
        cells = (cell(rows, key, case, method) for key in ("calls", "seconds", "memory") for method in METHODS)
        ratios = (of(rows, "ratios", case=case, method=method) for method in METHODS)
        ranges = (f"{r[0][0]:.2f} - {r[0][1]:.2f}" if r else "" for r in ratios)
        lines.append((kind, f"{int(size):,}", *cells, *ranges))
    heads = (f"{name}, {method}" for name in ("calls", "seconds", "MiB", "sds") for method in METHODS)
    return rst(("", "", *heads), lines)


def cell(rows, key, case, method):
    values = of(rows, key, case=case, method=method)
    return f"{np.median(values):,.{1 if key == 'seconds' and values[0] < 10 else 0}f}" if values else r"\-"


def draw(rows):
    """Draw calls against the dimension, seconds against the rows, and seconds against the number of draws."""
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
    for method, colour, marker in ((OURS, "#0072B2", "o"), ("NUTS", "#D55E00", "s")):
        if not of(rows, "calls", case=DRAWN, method=method):
            continue
        for ax, kind, key in ((axes[0], "d", "calls"), (axes[1], "rows", "seconds")):
            own = [row for row in select(rows, method=method) if row["case"].startswith(kind)]
            sizes = sorted({int(row["case"].split(" = ")[1]) for row in own})
            medians = [np.median(of(own, key, case=f"{kind} = {size}", method=method)) for size in sizes]
            ax.plot(sizes, medians, marker=marker, color=colour, label=method if kind == "d" else None)
        row = select(rows, case=DRAWN, method=method)[0]
        n = np.geomspace(10**2, 10**7)
        if method == "NUTS":
            seconds_a_call = row["seconds"] / row["calls"]
            warm_up = row["calls"] - N_INDEPENDENT * row["calls_a_draw"]
            axes[2].plot(n, seconds_a_call * (warm_up + n * row["calls_a_draw"]), color=colour)
        else:
            axes[2].plot(n, row["seconds"] + n / N_DRAWS * row["seconds_of_draws"], color=colour)
    for ax, of_x, of_y in zip(
        axes,
        ("parameters", "rows of data, ten parameters", f"independent draws, {DRAWN}"),
        ("calls of score or log p", "seconds on one thread", "seconds on one thread"),
        strict=True,
    ):
        ax.set(xscale="log", yscale="log", xlabel=of_x, ylabel=of_y)
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def main():
    parser = command(__doc__, seeds=1, methods=METHODS)
    parser.add_argument("--dimensions", nargs="*", type=int, default=DIMENSIONS)
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    args = parser.parse_args()
    sizes = {"d": (30,), "rows": (50,)} if args.quick else {"d": args.dimensions, "rows": args.rows}
    methods = [method for method in args.methods if not (method == "NUTS" and missing(NutpieNUTS))]
    jobs = [
        (f"{kind} = {size}", method, seed)
        for seed in range(args.seeds)
        for kind in sizes
        for size in sizes[kind]
        for method in methods
        if method != "NUTS" or size <= MOST_ROWS
    ]
    rows = results(args, jobs, run)["rows"]
    show_tables(args, {"growth": table(rows)})
    show_figure(args, "growth", partial(draw, rows))


if __name__ == "__main__":
    main()
