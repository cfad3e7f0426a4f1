"""Two-dimensional targets with the paper's settings: the Kullback-Leibler divergence from the target.

python benchmarks/toys.py [--max-iter 10000] [--seeds 1] [--draws 100000] [--out FILE.json]

The paper runs 50,000 iterations. KL(q || p) by nearest neighbours (k = 3); its floor is the estimate between two
independent exact samples. `examples/paper/plot_toys.py` draws the fits.
"""

from __future__ import annotations

import time
from functools import partial

import torch
from _harness import command, of, pairs, print_table, results, spread

from skksivi import KSIVIApproximator, paper_settings
from skksivi.metrics import kl_divergence
from skksivi.targets import Banana, Multimodal, XShaped

RUNS = {
    ("banana", "Gaussian kernel"): (Banana, paper_settings("banana")),
    ("multimodal", "IMQ kernel"): (Multimodal, paper_settings("multimodal") | {"kernel": "imq"}),
    ("multimodal", "Gaussian kernel"): (Multimodal, paper_settings("multimodal")),
    ("X-shaped", "Gaussian kernel"): (XShaped, paper_settings("x-shaped")),
}


def exact(target, n, seed):
    return target.sample(n, torch.Generator().manual_seed(seed)).numpy()


def run(case, method, seed, max_iter, draws):
    make, settings = RUNS[case, method]
    target, start = make(), time.perf_counter()
    q = KSIVIApproximator(**settings | {"max_iter": max_iter}, random_state=seed).fit(target)
    seconds, truth = time.perf_counter() - start, exact(target, draws, 0)
    kl, floor = (kl_divergence(X, truth) for X in (q.sample(draws), exact(target, draws, 1)))
    return {"kl": kl, "floor": floor, "seconds": seconds}


def main():
    parser = command(__doc__, seeds=1)
    parser.add_argument("--max-iter", type=int, default=10_000)
    parser.add_argument("--draws", type=int, default=100_000)
    args = parser.parse_args()
    settings = {"max_iter": 50, "draws": 2000} if args.quick else {"max_iter": args.max_iter, "draws": args.draws}
    jobs = [(*job, seed) for job in RUNS for seed in range(args.seeds)]
    rows = results(args, jobs, partial(run, **settings), **settings)["rows"]
    lines = []
    for case, method in pairs(rows):
        kl, floor, seconds = (of(rows, key, case=case, method=method) for key in ("kl", "floor", "seconds"))
        lines.append((case, method, spread(kl, 4), f"{floor[0]:.4f}", f"{sorted(seconds)[len(seconds) // 2]:.1f}"))
    print_table(("target", "kernel", "KL(q || p)", "floor", "seconds"), lines, n_names=2)


if __name__ == "__main__":
    main()
