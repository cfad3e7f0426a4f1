"""
Heavy tails: six methods on two Student t
=========================================

The paper's figure of the product of two Student t distributions: particles of mollified energies (MIED) and of the
kernel Stein discrepancy (KSDD), SIVI, KSIVI with a Gaussian and with Riesz's kernel, HKSIVI, and this package's
defaults, over the contours of the target. The paper has 5,000 draws of fits of 50,000 iterations with batches of 500
(``--full``); here are 2,000 iterations with batches of 200 at three times its learning rate, and 300 particles. Draws
that start three times as wide as the target diverge: KSIVI and HKSIVI start narrow here, in coordinates of the
curvature at the mode.

The paper is `Cheng et al. (2024) <https://arxiv.org/abs/2405.18997>`__.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from skksivi import HKSIVIApproximator, KSIVIApproximator, paper_settings
from skksivi.baselines import MIED, SIVI, KSDDescent
from skksivi.plotting import DensityDisplay
from skksivi.targets import StudentT

MAX_ITER = 2000
FULL = False  # True for the paper's iterations and draws
# sphinx_gallery_start_ignore
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--max-iter", type=int, default=MAX_ITER)
parser.add_argument("--full", action="store_true")
parser.add_argument("--output", help="write the figure to this file instead of showing it")
args, _ = parser.parse_known_args()
MAX_ITER = args.max_iter
FULL = args.full
# sphinx_gallery_end_ignore
n_iter, n_particles = (50_000, 5000) if FULL else (MAX_ITER, 300)

# %%
# There is no annealing: tempered tails this heavy have infinite mass.

training = {"max_iter": n_iter, "whiten": "laplace", "random_state": 0}
if not FULL:
    training |= {"batch_size": 200, "learning_rate": 3e-3}
start = {"initial_scale": 0.25, "annealing": None, "terms": ()}
paper = paper_settings("student") | training | start
hierarchy = paper_settings("student-hierarchy") | training | {"bridge": "none", "gradient_estimator": "u-statistic"}
shared = {name: paper[name] for name in SIVI().get_params().keys() & paper.keys()}
particles = {"n_particles": n_particles, "whiten": None, "random_state": 0}
methods = {
    "MIED": MIED(**particles, max_iter=min(500, n_iter)),
    "KSDD": KSDDescent(**particles, max_iter=min(100, n_iter)),
    "SIVI": SIVI(**shared | {"initial_scale": 1.0}),
    "KSIVI, Gaussian kernel": KSIVIApproximator(**paper | {"kernel": "gaussian"}),
    "KSIVI, Riesz kernel": KSIVIApproximator(**paper),
    "HKSIVI": HKSIVIApproximator(**hierarchy),
    "KSIVI, defaults": KSIVIApproximator(max_iter=min(2000, n_iter), random_state=0),
}

# %%
# They differ in how far the draws reach along the diagonal: the share beyond 5 measures the tails, to which a
# Gaussian kernel is almost insensitive.

target = StudentT()
exact = target.sample(5000, torch.Generator().manual_seed(0)).numpy()
figure, axes = plt.subplots(2, 4, figsize=(12.5, 6.9), layout="constrained")
samples = {name: q.fit(target).sample(5000, random_state=0) for name, q in methods.items()}
samples["MIED"], samples["KSDD"] = (methods[name].particles_ for name in ("MIED", "KSDD"))
for ax, (name, X) in zip(axes.flat, {**samples, "exact draws": exact}.items(), strict=True):
    share = (np.abs(X).max(1) > 5).mean()
    DensityDisplay.from_draws(X, target, extent=(-5, 5, -5, 5), ax=ax)
    ax.set(title=f"{name}\n{share:.1%} beyond 5", xlabel="", ylabel="")
    print(f"{name:<24}{share:>6.1%} beyond 5")

# sphinx_gallery_start_ignore
figure.set_label(
    "Eight clouds of draws over the contours of a star-shaped, heavy-tailed density. MIED and the defaults reach "
    "as far out as the exact draws, KSDD throws some draws far off, the others stay in the middle."
)
if args.output:
    figure.savefig(args.output, dpi=110)
    plt.close("all")
# sphinx_gallery_end_ignore
plt.show()

# %%
# With so few iterations no trained layer has tails, whatever its kernel. In the full runs of
# ``python benchmarks/paper.py student``, recorded in ``benchmarks/paper/results/student.json``, the order is the
# paper's for SIVI and KSIVI: squared Wasserstein distances to exact draws, inside the square to 5. The hierarchy in
# the paper's settings diverged in that run; the hierarchy at its defaults did not.

here = Path(globals().get("__file__", ".")).parent  # a notebook runs in its folder
recorded = json.loads((here / "../../benchmarks/paper/results/student.json").read_text())
for row in recorded["rows"]:
    print(f"{row['method']:<26}{row['values'][0]:>8.3f}")
