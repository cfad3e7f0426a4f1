"""Two-dimensional targets with the paper's settings: KL to the target, and draws over contours.

python benchmarks/toys.py [--max-iter 10000] [--seeds 1] [--draws 100000] [--output toys.png]

The paper runs 50,000 iterations. KL(q || p) by nearest neighbours (k = 3); its floor is the estimate between two
independent exact samples.
"""

from __future__ import annotations

import argparse
import time

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch

from skksivi import KSIVIApproximator, paper_settings
from skksivi.metrics import kl_divergence
from skksivi.plotting import DensityDisplay
from skksivi.targets import Banana, Multimodal, XShaped

RUNS = {
    "banana, Gaussian kernel": (Banana, paper_settings("banana")),
    "multimodal, IMQ kernel": (Multimodal, paper_settings("multimodal") | {"kernel": "imq"}),
    "multimodal, Gaussian kernel": (Multimodal, paper_settings("multimodal")),
    "X-shaped, Gaussian kernel": (XShaped, paper_settings("x-shaped")),
}


def exact(target, n, seed):
    return target.sample(n, torch.Generator().manual_seed(seed)).numpy()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--max-iter", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--draws", type=int, default=100_000)
    parser.add_argument("--output", default="toys.png")
    args = parser.parse_args()
    figure, axes = plt.subplots(1, len(RUNS), figsize=(4 * len(RUNS), 4), layout="constrained")
    print(f"{'target, kernel':<30}{'KL(q||p)':>10}{'floor':>8}{'seconds':>9}")
    for ax, (name, (make, settings)) in zip(axes, RUNS.items(), strict=True):
        target = make()
        truth = exact(target, args.draws, 0)
        floor = kl_divergence(exact(target, args.draws, 1), truth)
        for seed in range(args.seeds):
            start = time.perf_counter()
            q = KSIVIApproximator(**settings | {"max_iter": args.max_iter}, random_state=seed).fit(target)
            seconds = time.perf_counter() - start
            X = q.sample(args.draws)
            kl = kl_divergence(X, truth)
            print(f"{name:<30}{kl:>10.4f}{floor:>8.4f}{seconds:>9.1f}", flush=True)
        DensityDisplay.from_draws(X, target, kind="histogram", ax=ax)
        ax.set_title(f"{name}\nKL {kl:.3f} after {args.max_iter:,} iterations", fontsize=10)
    figure.savefig(args.output, dpi=110)
    print(f"Figure in {args.output}")


if __name__ == "__main__":
    main()
