"""
Three toy targets
=================

The paper's first figure: draws of a layer of its settings, as histograms under the contours of the banana, the two
modes and the X. The fits have the paper's 50,000 iterations with batches of 500, which take a few minutes; they were
recorded by this script with ``--record``.

The paper is `Cheng et al. (2024) <https://arxiv.org/abs/2405.18997>`__.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.spatial import KDTree

from skksivi import KSIVIApproximator, paper_settings
from skksivi.plotting import DensityDisplay
from skksivi.targets import Banana, Multimodal, XShaped

MAX_ITER = None  # the recorded fits; a number makes new fits
RECORDED = Path(globals().get("__file__", ".")).parent / "recorded"  # a notebook runs in its folder
# sphinx_gallery_start_ignore
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--max-iter", type=int, default=MAX_ITER)
parser.add_argument("--record", action="store_true", help="fit as long as the paper, and keep the draws")
parser.add_argument("--output", help="write the figure to this file instead of showing it")
args, _ = parser.parse_known_args()
MAX_ITER = 50_000 if args.record else args.max_iter
# sphinx_gallery_end_ignore

# %%
# The settings of the paper: no whitening, a network of 50 and 50 hidden units of a latent z of three dimensions.

targets = {"banana": Banana(), "multimodal": Multimodal(), "x-shaped": XShaped()}


def draws_of(name):
    """Draws of the recorded fit, or of a new one."""
    file = RECORDED / f"toys_{name}.npy"
    if MAX_ITER is None:
        return np.load(file).astype(float)
    q = KSIVIApproximator(**paper_settings(name) | {"max_iter": MAX_ITER, "random_state": 0})
    X = q.fit(targets[name]).sample(10_000, random_state=0)
    # sphinx_gallery_start_ignore
    if args.record:
        np.save(file, X)
    # sphinx_gallery_end_ignore
    return X


# %%
# The Kullback-Leibler divergence from the target is estimated by nearest neighbours, as in the paper. Its floor, the
# estimate between two exact samples, is zero up to noise, which is about 0.02 here.


def divergence(X, Y, k=3):
    """Estimate KL(p || q) from draws X of p and Y of q by the distances to their k-th neighbours."""
    (rho,), (nu,) = KDTree(X).query(X, [k + 1])[0].T, KDTree(Y).query(X, [k])[0].T
    return X.shape[1] * np.mean(np.log(nu / rho)) + np.log(len(Y) / (len(X) - 1))


figure, axes = plt.subplots(1, 3, figsize=(12.5, 4.3), layout="constrained")
for ax, (name, target) in zip(axes, targets.items(), strict=True):
    draws = draws_of(name)
    exact, other = target.sample(20_000, torch.Generator().manual_seed(0)).numpy().reshape(2, 10_000, 2)
    kl, floor = divergence(draws, exact), divergence(other, exact)
    DensityDisplay.from_draws(draws, target, kind="histogram", ax=ax)
    ax.set_title(f"{name.capitalize()}, KL {kl:.3f}")
    print(f"{name.capitalize()}: KL {kl:.3f}, between exact draws {floor:.3f}")

# sphinx_gallery_start_ignore
figure.set_label(
    "Three histograms of draws under contours: two modes and an X that are filled, and a banana whose ends are thin."
)
if args.output:
    figure.savefig(args.output, dpi=110)
    plt.close("all")
# sphinx_gallery_end_ignore
plt.show()
