"""What whitening costs and finds as the dimension grows.

python benchmarks/dimensions.py [--dimensions 100 300 1000 3000 10000] [--out FILE.json]
python benchmarks/dimensions.py --show benchmarks/dimensions.json --manual doc      the table of the manual

The target is a Gaussian of d coordinates on scales from 1e-2 to 1e2, tied together by ten common factors of standard
deviations 2 to 15, its mean ten units off the origin. Shown for the fit before any training: seconds, points at which
the score was evaluated, the range of the ratios of standard deviations of coordinates and of factors, and the seconds
of a training iteration; seconds are of CPU time. Beside the ranges are the same for as many exact draws.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from _harness import command, results, rst, show_tables

from skksivi import KSIVIApproximator
from skksivi.targets import Target

N_DRAWS, N_ITER = 4000, 300


class FactorModel(Target):
    """N(mean, S (I + W diag(lam) W^T) S) with orthonormal W (d, k)."""

    def __init__(self, d, k=10, seed=0):
        rng = np.random.RandomState(seed)
        self.n_features = d
        self.mean = torch.tensor(10 * rng.standard_normal(d))
        self.S = torch.tensor(10 ** rng.uniform(-2, 2, d))
        self.W = torch.linalg.qr(torch.tensor(rng.standard_normal((d, k)))).Q
        self.lam = torch.linspace(2, 15, k, dtype=torch.float64).square()

    def score_fn(self, x):
        v = (x - self.mean) / self.S
        return -(v - (v @ self.W * (self.lam / (1 + self.lam))) @ self.W.mT) / self.S

    def sample(self, n, generator):
        options = {"generator": generator, "dtype": torch.float64}
        common = torch.randn(n, len(self.lam), **options) * self.lam.sqrt()
        return self.mean + self.S * (torch.randn(n, self.n_features, **options) + common @ self.W.mT)

    def ratios(self, X):
        """Return the ranges of the standard deviations of coordinates and of factors over the true ones."""
        v = (torch.as_tensor(X, dtype=torch.float64) - self.mean) / self.S
        of_both = v.std(0) / (1 + self.W.square() @ self.lam).sqrt(), (v @ self.W).std(0) / (1 + self.lam).sqrt()
        return [(r.min().item(), r.max().item()) for r in of_both]


def timed(function, *arguments):
    start = time.process_time()
    function(*arguments)
    return time.process_time() - start


def run(case, _method, seed):
    """Return what the fit of one iteration costs and finds, and the seconds of one more."""
    torch.set_num_threads(1)
    target = FactorModel(int(case))
    q = KSIVIApproximator(max_iter=1, random_state=seed)
    seconds = timed(q.fit, target)
    exact = target.sample(N_DRAWS, torch.Generator().manual_seed(0))
    (coordinates, factors), floors = target.ratios(q.sample(N_DRAWS)), target.ratios(exact)
    q.set_params(warm_start=True)
    short, long = (timed(q.set_params(max_iter=k).fit, target) for k in (1, 1 + N_ITER))
    return {
        "seconds": seconds,
        "calls": q.whitening_.n_score_calls,
        "coordinates": coordinates,
        "factors": factors,
        "floors": floors,
        "milliseconds": 1e3 * (long - short) / N_ITER,
    }


def table(rows):
    lines = []
    for row in rows:
        ranges = (row["coordinates"], row["floors"][0], row["factors"], row["floors"][1])
        shown = (f"{low:.2f} - {high:.2f}" for low, high in ranges)
        calls, ms = f"{row['calls'] / 1000:.1f}k", f"{row['milliseconds']:.0f}"
        lines.append((f"{int(row['case']):,}", f"{row['seconds']:.1f}", calls, *shown, ms))
    return rst(("d", "Seconds", "Calls", "Coordinates", "Exact", "Factors", "Exact", "ms per iteration"), lines)


def main():
    parser = command(__doc__, seeds=1)
    parser.add_argument("--dimensions", nargs="+", type=int, default=[100, 300, 1000, 3000, 10_000])
    args = parser.parse_args()
    dimensions = [20] if args.quick else args.dimensions
    jobs = [(str(d), "defaults", seed) for seed in range(args.seeds) for d in dimensions]
    show_tables(args, {"dimensions": table(results(args, jobs, run)["rows"])})


if __name__ == "__main__":
    main()
