"""Two-dimensional targets: the Kullback-Leibler divergence of the defaults, the paper's settings and the rivals.

python benchmarks/toys.py [--seeds 3] [--methods ...] [--max-iter 10000] [--draws 100000] [--out FILE.json]
python benchmarks/toys.py --show benchmarks/toys.json --manual doc      the table of the manual

KL(q || p) by nearest neighbours (k = 3) in the same draws for all; its floor is the estimate between two independent
exact samples. "Paper" are the settings of the paper with --max-iter of its 50,000 iterations. Rivals have their
defaults, the slow ones the iterations of benchmarks/comparison.py. `examples/paper/plot_toys.py` draws the fits.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import torch
from _harness import OURS, command, exact, of, results, rst, select, show_tables, spread, watched
from _metrics import kl_divergence
from comparison import FEWER

from skksivi import HKSIVIApproximator, KSIVIApproximator, baselines, paper_settings
from skksivi.targets import Banana, Multimodal, XShaped

CASES = {"banana": Banana, "multimodal": Multimodal, "x-shaped": XShaped}


def paper(case, **settings):
    return KSIVIApproximator(**paper_settings(case) | settings)


def rival(name, **settings):
    fewer = {"max_iter": FEWER[name]} if name in FEWER else {}
    return lambda _: getattr(baselines, name)(**fewer | settings)


METHODS = {
    OURS: lambda _: KSIVIApproximator(),
    "KSIVI, paper": paper,
    "KSIVI, paper, IMQ": partial(paper, kernel="imq"),
    "HKSIVI": lambda _: HKSIVIApproximator(max_iter=1000),
    **{name: rival(name) for name in ("SIVI", "SIVISM", "UIVI", "KPG", "AISIVI", "PVI", "SIFG")},
    "KPG-IS": rival("KPG", importance_sampling=True),
}


@cache
def floor(case, n):
    """Return the estimate between two samples of n exact draws."""
    return kl_divergence(*(exact(CASES[case](), n, seed) for seed in (1, 0)))


def run(case, method, seed, max_iter, draws, quick):
    torch.set_num_threads(1)
    target, q = CASES[case](), METHODS[method](case)
    q.set_params(random_state=seed, **({"max_iter": max_iter} if quick or "paper" in method else {}))
    with watched() as costs:
        q.fit(target)
    return {
        "kl": kl_divergence(q.sample(draws), exact(target, draws, 0)),
        "floor": floor(case, draws),
        "seconds": costs["seconds"],
        "calls": q.n_score_calls_ + q.n_products_,
        "warned": bool(costs["warned"]),
    }


def table(rows):
    """Return the table of the manual: the divergences, in the order of their mean."""

    def cell(method, case):
        own = select(rows, case=case, method=method)
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
    parser = command(__doc__, methods=METHODS)
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
    rows = results(args, jobs, partial(run, quick=args.quick, **settings), **settings)["rows"]
    show_tables(args, {"toys": table(rows)})


if __name__ == "__main__":
    main()
