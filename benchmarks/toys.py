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
import numpy as np
import torch

from skksivi import KSIVIApproximator
from skksivi.metrics import kl_divergence
from skksivi.targets import Banana, Multimodal, XShaped

PAPER = {
    "gradient_estimator": "vanilla",
    "latent_dim": 3,
    "hidden_layer_sizes": (50, 50),
    "linear_skip": False,
    "whiten": None,
    "batch_size": 500,
    "learning_rate": 1e-3,
    "learning_rate_decay": (0.9, 1000),
    "betas": (0.9, 0.99),
    "ema_decay": None,
    "initial_scale": 1.0,
}
RUNS = {
    "banana, Gaussian kernel": (Banana, {"kernel": "gaussian", "initial_scale": 0.5}),
    "multimodal, IMQ kernel": (Multimodal, {"kernel": "imq", "annealing": "linear"}),
    "multimodal, Gaussian kernel": (Multimodal, {"kernel": "gaussian", "annealing": "linear"}),
    "X-shaped, Gaussian kernel": (XShaped, {"kernel": "gaussian"}),
}


def exact(target, n, seed):
    return target.sample(n, torch.Generator().manual_seed(seed)).numpy()


def draw_panel(ax, target, X, title):
    low, high = np.quantile(exact(target, 20_000, 2), [0.001, 0.999], axis=0)
    margin = 0.15 * (high - low)
    xs, ys = (np.linspace(a, b, 200) for a, b in zip(low - margin, high + margin, strict=True))
    grid = torch.as_tensor(np.stack(np.meshgrid(xs, ys), -1).reshape(-1, 2))
    density = target.log_prob(grid).exp().reshape(200, 200).numpy()
    ax.hist2d(X[:, 0], X[:, 1], bins=[xs[::2], ys[::2]], cmap="Blues")
    ax.contour(xs, ys, density, levels=density.max() * np.array([0.01, 0.1, 0.3, 0.7]), colors="k", linewidths=0.8)
    ax.set_title(title, fontsize=10)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--max-iter", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--draws", type=int, default=100_000)
    parser.add_argument("--output", default="toys.png")
    args = parser.parse_args()
    figure, axes = plt.subplots(1, len(RUNS), figsize=(4 * len(RUNS), 4), layout="constrained")
    print(f"{'target, kernel':<30}{'KL(q||p)':>10}{'floor':>8}{'seconds':>9}")
    for ax, (name, (make, own)) in zip(axes, RUNS.items(), strict=True):
        target = make()
        truth = exact(target, args.draws, 0)
        floor = kl_divergence(exact(target, args.draws, 1), truth)
        for seed in range(args.seeds):
            start = time.perf_counter()
            q = KSIVIApproximator(**{**PAPER, **own}, max_iter=args.max_iter, random_state=seed).fit(target)
            seconds = time.perf_counter() - start
            X = q.sample(args.draws)
            kl = kl_divergence(X, truth)
            print(f"{name:<30}{kl:>10.4f}{floor:>8.4f}{seconds:>9.1f}", flush=True)
        draw_panel(ax, target, X, f"{name}\nKL {kl:.3f} after {args.max_iter:,} iterations")
    figure.savefig(args.output, dpi=110)
    print(f"Figure in {args.output}")


if __name__ == "__main__":
    main()
