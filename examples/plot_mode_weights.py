"""
How much mass does each mode have?
==================================

The kernel Stein discrepancy responds to the shape of a mode but not to how much mass it has: between distant modes
there are no draws, and so nothing to compare. The score has this information: its integral along a line between two
modes is the difference of their log-densities, which gives the weights together with the width of each mode.
"""

import matplotlib.pyplot as plt
import numpy as np

from skksivi import KSIVIApproximator, modes
from skksivi.targets import EightGaussians

MAX_ITER = 1000
# sphinx_gallery_start_ignore
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--max-iter", type=int, default=MAX_ITER)
parser.add_argument("--output", help="write the figure to this file instead of showing it")
args, _ = parser.parse_known_args()
MAX_ITER = args.max_iter
# sphinx_gallery_end_ignore

# %%
# Eight Gaussians with unequal weights. One fit starts at a normal mixing distribution, which has no information about
# the weights, and gets the score as a bare function, so that nothing else is known about the target. It warns that
# its draws do not have the target's weights.

weights = np.array([0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05])
target = EightGaussians(shift=5.0, weights=weights)
q = KSIVIApproximator(mixing="normal", max_iter=MAX_ITER, random_state=0).fit(target.score_fn, n_features=2)


def shares(X):
    nearest = ((X[:, None] - target.means.numpy()) ** 2).sum(-1).argmin(1)
    return np.bincount(nearest, minlength=8) / len(X)


drawn = shares(q.sample(20_000))

# %%
# `skksivi.modes` finds them among the draws, and their weights with standard errors. The draws of the fit keep their
# shares; `skksivi.refine` returns a fit that draws by importance weights.

found = modes(q, target.score_fn, random_state=0)
print("weights found:", found.weights.round(3))
print("standard errors:", found.standard_errors.round(3))
print(f"largest relative error of the shares: {np.abs(drawn / weights - 1).max():.0%},", end=" ")
print(f"of the weights found: {np.abs(found.weights / weights - 1).max():.1%}")

# %%
# A fit with the defaults does not need this: the pilot estimates the weights before the training starts.

default = shares(KSIVIApproximator(max_iter=MAX_ITER, random_state=0).fit(target).sample(20_000))
figure, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
positions = np.arange(8)
ax.bar(positions - 0.2, drawn, width=0.38, color="#009E73", label="KSIVI, normal mixing")
ax.bar(positions + 0.2, default, width=0.38, color="#0072B2", label="skksivi")
ax.hlines(weights, positions - 0.4, positions + 0.4, color="k", label="truth")
bars = {"fmt": "none", "ecolor": "#D55E00", "capsize": 3, "label": "weights found"}
ax.errorbar(positions, found.weights, 2 * found.standard_errors, **bars)
ax.set(xlabel="mode", ylabel="share of the draws", xticks=positions, title="Shares of eight modes, and the truth")
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
# sphinx_gallery_start_ignore
figure.set_label(
    "Shares of eight modes as bars. With normal mixing they are far from the black lines of the truth; "
    "the weights found, and the shares with the defaults, are on them."
)
if args.output:
    figure.savefig(args.output, dpi=110)
    plt.close("all")
# sphinx_gallery_end_ignore
plt.show()
