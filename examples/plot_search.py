"""
Grid search: bandwidth and learning rate
========================================

A grid search over a target, here the X of the paper: each candidate is fitted twice from different random numbers and
evaluated by one Stein discrepancy, which needs only the score of the target. Training starts from the curvature at
the mode, without the Markov chains of the defaults, so that the settings matter. Beside the best of the grid are the
defaults: where training starts can matter as much as its settings.
"""

import warnings

import matplotlib.pyplot as plt
import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV

from skksivi import KSIVIApproximator
from skksivi.model_selection import Replicates, neg_ksd_scorer
from skksivi.plotting import DensityDisplay
from skksivi.targets import XShaped

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
# `skksivi.model_selection.Replicates` takes the place of K-fold: a posterior has no rows to hold out. The seed of a
# fit comes from its fold, so that the table is the same in one process and in many.

target = XShaped()
search = GridSearchCV(
    KSIVIApproximator(whiten="laplace", max_iter=MAX_ITER, random_state=0),
    {"bandwidth": [0.2, 0.7, 2.0], "learning_rate": [5e-4, 2e-3, 1e-2]},
    scoring=neg_ksd_scorer(),
    cv=Replicates(2),
)
with warnings.catch_warnings():
    warnings.simplefilter("ignore", ConvergenceWarning)  # bad candidates are what a grid is for
    search.fit(target)
defaults = KSIVIApproximator(max_iter=MAX_ITER, random_state=0).fit(target)

table = -np.stack([search.cv_results_[f"split{k}_test_score"] for k in range(2)], -1)
print(f"{'bandwidth':>9}{'rate':>8}{'KSD^2 of two fits':>20}")
for parameters, values in zip(search.cv_results_["params"], table, strict=True):
    print(f"{parameters['bandwidth']:>9}{parameters['learning_rate']:>8}{values[0]:>11.4f}{values[1]:>9.4f}")
print(f"defaults, evaluated in the same way: {-search.scorer_(defaults, target):.4f}")

# %%
# The discrepancy of each candidate, and draws under the contours of the target.

figure, (grid, left, right) = plt.subplots(1, 3, figsize=(11, 3.8), layout="constrained")
means = table.mean(1).reshape(3, 3)
image = grid.imshow(np.log10(np.maximum(means, 1e-4)), cmap="cividis_r")
for (i, j), value in np.ndenumerate(means):
    shade = "w" if image.norm(image.get_array()[i, j]) > 0.5 else "k"
    grid.text(j, i, f"{value:.3f}", ha="center", va="center", color=shade)
i, j = np.unravel_index(means.argmin(), means.shape)
grid.add_patch(plt.Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, ec="#D55E00", lw=3))
grid.set_xticks(range(3), search.param_grid["learning_rate"])
grid.set_yticks(range(3), search.param_grid["bandwidth"])
grid.set(xlabel="learning rate", ylabel="bandwidth", title=r"KSD$^2$, mean of two fits; best framed")
for ax, q, name in ((left, search.best_estimator_, "best of the grid"), (right, defaults, "defaults")):
    DensityDisplay.from_estimator(q, target, extent=(-5, 5, -5, 5), ax=ax)
    ax.set_title(name)

# sphinx_gallery_start_ignore
if args.output:
    figure.savefig(args.output, dpi=150)
    print(f"Figure in {args.output}")
    plt.close("all")
# sphinx_gallery_end_ignore
plt.show()
