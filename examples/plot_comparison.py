"""
Seven methods, one interface
============================


Every method of the package is built, fitted and sampled in the same way, so that comparing them takes a loop. Here
seven of them draw from the banana, with settings that keep the whole page under a minute.
"""

import matplotlib.pyplot as plt
import torch

from skksivi import HKSIVIApproximator, KSIVIApproximator
from skksivi.baselines import MALA, SIVI, SVGD, FullRankVI, Laplace
from skksivi.metrics import noise_floor, sliced_wasserstein
from skksivi.plotting import DensityDisplay
from skksivi.targets import Banana

MAX_ITER = 1000  # of those that train
# sphinx_gallery_start_ignore
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--max-iter", type=int, default=MAX_ITER)
parser.add_argument("--output", help="write the figure to this file instead of showing it")
args, _ = parser.parse_known_args()
MAX_ITER = args.max_iter
# sphinx_gallery_end_ignore

# %%
# The methods: two of kernel semi-implicit inference, semi-implicit inference by the evidence bound, two Gaussians,
# particles and Markov chains.

options = {"max_iter": MAX_ITER, "random_state": 0}
methods = {
    "KSIVI": KSIVIApproximator(**options),
    "HKSIVI": HKSIVIApproximator(n_layers=3, **options),
    "SIVI": SIVI(learning_rate=5e-3, **options),
    "Laplace": Laplace(random_state=0),
    "FullRankVI": FullRankVI(**options),
    "SVGD": SVGD(**options),
    "MALA": MALA(random_state=0),
}

# %%
# Draws are compared with exact draws of the banana. Two sets of exact draws have a distance too, the Monte Carlo
# noise.

target, n = Banana(), 2000
reference = target.sample(n, torch.Generator().manual_seed(1)).numpy()
floor = noise_floor(sliced_wasserstein, target.sample(10 * n, torch.Generator().manual_seed(2)), n, random_state=0)
print(f"two exact sets: {floor.mean:.2f} +- {floor.sd:.2f}")

# %%
# The loop. The lines hold 50, 90 and 99% of the target's mass, and the title is the sliced Wasserstein distance. A
# Gaussian cannot bend; the 200 particles of SVGD are resampled with a kernel density estimate to give 2,000 draws.

figure, axes = plt.subplots(2, 4, figsize=(13, 6.4), layout="constrained")
for ax, (name, q) in zip(axes.flat, methods.items(), strict=False):
    X = q.fit(target).sample(n)
    distance = sliced_wasserstein(X, reference, random_state=0)
    DensityDisplay.from_draws(X, target, ax=ax, extent=(-4.5, 4.5, -4, 14))
    ax.set_title(f"{name}: {distance:.2f}")
    print(f"{name:<12}{distance:.2f}")
DensityDisplay.from_draws(reference, target, ax=axes.flat[-1], extent=(-4.5, 4.5, -4, 14))
axes.flat[-1].set_title(f"exact draws: {floor.mean:.2f} ± {floor.sd:.2f}")
# sphinx_gallery_start_ignore
if args.output:
    figure.savefig(args.output, dpi=110)
    print(f"Figure in {args.output}")
    plt.close("all")
# sphinx_gallery_end_ignore
plt.show()
