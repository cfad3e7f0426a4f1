"""Two-dimensional targets: the Kullback-Leibler divergence of the defaults, the paper's settings and the rivals.

python benchmarks/toys.py [--seeds 3] [--methods ...] [--max-iter 10000] [--draws 100000] [--out FILE.json]
python benchmarks/toys.py --show benchmarks/toys.json --manual doc      the table of the manual

KL(q || p) by nearest neighbours (k = 3) in the same draws for all; its floor is the estimate between two independent
exact samples. "Paper" are the settings of the paper with --max-iter of its 50,000 iterations. Rivals have their
defaults, the slow ones the iterations of benchmarks/comparison.py; "long" are 20,000 iterations in x with the rate
.005, lowered along a cosine. `examples/paper/plot_toys.py` draws the fits.
"""

from __future__ import annotations

import time
import warnings
from functools import cache, partial

import numpy as np
import torch
from _harness import command, of, results, rst, spread, write_tables
from comparison import FEWER

from skksivi import HKSIVIApproximator, KSIVIApproximator, baselines, paper_settings
from skksivi.metrics import kl_divergence
from skksivi.parameters import Adam
from skksivi.targets import Banana, Multimodal, XShaped

CASES = {"banana": Banana, "multimodal": Multimodal, "x-shaped": XShaped}
LONG = {"whiten": None, "max_iter": 20_000, "learning_rate": 5e-3, "optimizer": Adam(ema=None, decay="cosine")}


def paper(case, **settings):
    return KSIVIApproximator(**paper_settings(case) | settings)


def rival(name, **settings):
    fewer = {"max_iter": FEWER[name]} if name in FEWER else {}
    return lambda _: getattr(baselines, name)(**fewer | settings)


METHODS = {
    "KSIVI": lambda _: KSIVIApproximator(),
    "KSIVI, paper": paper,
    "KSIVI, paper, IMQ": partial(paper, kernel="imq"),
    "HKSIVI": lambda _: HKSIVIApproximator(max_iter=1000),
    **{name: rival(name) for name in ("SIVI", "SIVISM", "UIVI", "HSIVISM", "KPG", "AISIVI", "PVI", "SIFG")},
    "KPG-IS": rival("KPG", importance_sampling=True),
    **{f"{name}, long": rival(name, **LONG) for name in ("SIVI", "PVI", "KPG")},
    "KPG-IS, long": rival("KPG", importance_sampling=True, **LONG),
}


def exact(target, n, seed):
    return target.sample(n, torch.Generator().manual_seed(seed)).numpy()


@cache
def floor(case, n):
    """Return the estimate between two samples of n exact draws."""
    return kl_divergence(*(exact(CASES[case](), n, seed) for seed in (1, 0)))


def run(case, method, seed, max_iter, draws, quick):
    torch.set_num_threads(1)
    target, q = CASES[case](), METHODS[method](case)
    q.set_params(random_state=seed, **({"max_iter": max_iter} if quick or "paper" in method else {}))
    start = time.process_time()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        q.fit(target)
    seconds, truth = time.process_time() - start, exact(target, draws, 0)
    calls = q.n_score_calls_ + q.n_products_
    return {
        "kl": kl_divergence(q.sample(draws), truth),
        "floor": floor(case, draws),
        "seconds": seconds,
        "calls": calls,
        "warned": bool(told),
    }


def table(rows):
    """Return the table of the manual: the divergences, in the order of their mean."""

    def cell(method, case):
        own = [row for row in rows if (row["case"], row["method"]) == (case, method)]
        star = "\\*" if any(row["warned"] for row in own) else ""
        return spread([row["kl"] for row in own]) + star if own else "\\-"

    def cost(method, key):
        values = sorted(of(rows, key, method=method))
        return values[len(values) // 2]

    cases = [case for case in CASES if of(rows, "kl", case=case)]
    methods = sorted({row["method"] for row in rows}, key=lambda method: np.mean(of(rows, "kl", method=method)))
    lines = [("two sets of exact draws", *(f"{of(rows, 'floor', case=case)[0]:.3f}" for case in cases), "", "")]
    for method in methods:
        calls, seconds = cost(method, "calls"), cost(method, "seconds")
        lines.append((method, *(cell(method, case) for case in cases), f"{calls / 1e3:,.0f}k", f"{seconds:.1f}"))
    return rst(("Method", *cases, "Calls", "Seconds"), lines)


def main():
    parser = command(__doc__)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--max-iter", type=int, default=10_000)
    parser.add_argument("--draws", type=int, default=100_000)
    args = parser.parse_args()
    settings = {"max_iter": 50, "draws": 2000} if args.quick else {"max_iter": args.max_iter, "draws": args.draws}
    methods, n_seeds = (["KSIVI, paper", "KPG"], 1) if args.quick else (args.methods, args.seeds)
    jobs = [
        (case, method, seed)
        for seed in range(n_seeds)
        for method in methods
        for case in CASES
        if case == "multimodal" or "IMQ" not in method
    ]
    found = table(results(args, jobs, partial(run, quick=args.quick, **settings), **settings)["rows"])
    print(found)
    if args.manual:
        write_tables(args.manual, {"toys": found})


if __name__ == "__main__":
    main()
