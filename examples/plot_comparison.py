"""
Seven methods, one interface
============================

Every method of the package is built, fitted and sampled in the same way, so that comparing them takes a loop. Here
seven of them fit the banana, and are compared by what they cost and how close they come.
"""

import matplotlib.pyplot as plt
import torch

from skksivi import HKSIVIApproximator, KSIVIApproximator
from skksivi.baselines import MALA, SIVI, SVGD, FullRankVI, Laplace
from skksivi.metrics import noise_floor, sliced_wasserstein
from skksivi.plotting import DensityDisplay
from skksivi.targets import Banana

MAX_ITER = 500  # of those that train
# sphinx_gallery_thumbnail_number = 2
# sphinx_gallery_start_ignore
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--max-iter", type=int, default=MAX_ITER)
parser.add_argument("--output", help="write the figure to this file instead of showing it")
args, _ = parser.parse_known_args()
MAX_ITER = args.max_iter
# sphinx_gallery_end_ignore

# %%
# The methods: the defaults of this package, which train nothing here, and its hierarchy of layers; semi-implicit
# inference by the evidence bound, two Gaussians, particles and Markov chains. After so few iterations HKSIVI warns
# that a mean is off.

options = {"max_iter": MAX_ITER, "random_state": 0}
methods = {
    "skksivi": KSIVIApproximator(random_state=0),
    "HKSIVI": HKSIVIApproximator(n_layers=3, **options),
    "SIVI": SIVI(learning_rate=5e-3, **options),
    "Laplace": Laplace(random_state=0),
    "FullRankVI": FullRankVI(**options),
    "SVGD": SVGD(**options),
    "MALA": MALA(random_state=0),
}

# %%
# Draws are compared with exact draws of the banana by the sliced Wasserstein distance. Two sets of exact draws have a
# distance too, the Monte Carlo noise: no method can be expected below it.

target, n = Banana(), 2000
reference = target.sample(n, torch.Generator().manual_seed(1)).numpy()
floor = noise_floor(sliced_wasserstein, target.sample(10 * n, torch.Generator().manual_seed(2)), n, random_state=0)


def distance(X):
    return sliced_wasserstein(X[:n], reference, random_state=0)


for name, q in methods.items():
    q.fit(target)
    calls = q.n_score_calls_ + q.n_products_
    print(f"{name:<12}{calls:>9,} calls, distance {distance(q.sample(n, random_state=0)):.2f}")
print(f"two exact sets: {floor.mean:.2f} +- {floor.sd:.2f}")

# %%
# The draws, as histograms under contours that hold 50, 90 and 99% of the target's mass. A Gaussian cannot bend. The
# 200 particles of SVGD are resampled with a kernel density estimate.

figure, axes = plt.subplots(2, 4, figsize=(10.5, 5.4), sharex=True, sharey=True, layout="constrained")
many = {name: q.sample(50_000, random_state=0) for name, q in methods.items()}
many["exact draws"] = target.sample(50_000, torch.Generator().manual_seed(3)).numpy()
for ax, (name, X) in zip(axes.flat, many.items(), strict=True):
    DensityDisplay.from_draws(X, target, kind="histogram", extent=(-4.5, 4.5, -4, 14), ax=ax)
    ax.set_title(name)
    ax.label_outer()
# sphinx_gallery_start_ignore
figure.set_label(
    "Eight histograms of draws over the contours of a banana-shaped density. skksivi, HKSIVI and MALA fill it like "
    "the exact draws, SVGD is ragged at the ends, SIVI is too narrow, and the two Gaussians do not bend."
)
if args.output:
    figure.savefig(args.output, dpi=110)
    print(f"Figure in {args.output}")
    plt.close("all")
# sphinx_gallery_end_ignore
plt.show()

# %%
# What they cost and what they reach: lower and further left is better.

figure, ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
colours = ["#0072B2", "#117733", "#E69F00", "#882255", "#56B4E9", "0.5", "#7A5195"]
for (name, q), marker, colour in zip(methods.items(), "osD^vP*", colours, strict=True):
    error = distance(q.sample(n, random_state=0))
    ax.loglog(q.n_score_calls_ + q.n_products_, error, marker, color=colour, markersize=6, label=name)
ax.axhline(floor.mean, color="0.6", linestyle="--", linewidth=1.2, label="between exact draws")
ax.set(xlabel="score calls", ylabel="sliced Wasserstein distance")
ax.legend(frameon=False, fontsize="small")
# sphinx_gallery_start_ignore
figure.set_label(
    "Distance from exact draws against score calls, both logarithmic, a point per method: the Gaussians are cheap "
    "and far, skksivi, HKSIVI, SVGD and MALA are near the noise of exact draws at between ten thousand and a "
    "million calls."
)
if args.output:
    plt.close("all")
# sphinx_gallery_end_ignore
plt.show()
