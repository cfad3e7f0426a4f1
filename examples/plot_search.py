"""
Choosing a kernel width and a learning rate
===========================================

A grid search over a target, here the X of the paper: each candidate is fitted twice from different random numbers and
judged by one Stein discrepancy, which needs the score of the target and nothing else. Training starts from the
curvature at the mode, without the Markov chains of the defaults, so that the settings matter.
"""

import argparse
import warnings

import matplotlib.pyplot as plt
import numpy as np
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV

from skksivi import KSIVIApproximator
from skksivi.model_selection import Replicates, neg_ksd_scorer
from skksivi.plotting import DensityDisplay
from skksivi.targets import XShaped

parser = argparse.ArgumentParser()
parser.add_argument("--max-iter", type=int, default=1000)
parser.add_argument("--output", help="write the figure to this file instead of showing it")
args, _ = parser.parse_known_args()

# %%
# `Replicates` takes the place of K-fold: a posterior has no rows to hold out. The seed of a fit comes from its fold,
# so that the table is the same in one process and in many.

target = XShaped()
search = GridSearchCV(
    KSIVIApproximator(whiten="laplace", max_iter=args.max_iter, random_state=0),
    {"bandwidth": [0.2, 0.7, 2.0], "learning_rate": [5e-4, 2e-3, 1e-2]},
    scoring=neg_ksd_scorer(),
    cv=Replicates(2),
)
with warnings.catch_warnings():
    warnings.simplefilter("ignore", ConvergenceWarning)  # bad candidates are what a grid is for
    search.fit(target)
    worst = clone(search.estimator).set_params(
        **search.cv_results_["params"][search.cv_results_["rank_test_score"].argmax()]
    )
    worst.fit(target)

for parameters, *grades in zip(
    search.cv_results_["params"],
    *(search.cv_results_[f"split{k}_test_score"] for k in range(2)),
    search.cv_results_["rank_test_score"],
    strict=True,
):
    first, second, rank = grades
    print(f"{parameters!s:<46}{-first:>9.4f}{-second:>9.4f}{rank:>4}")

# %%
# The discrepancy of each candidate, and the draws of the best and the worst under the contours of the target.

figure, (grid, left, right) = plt.subplots(1, 3, figsize=(11, 3.8), layout="constrained")
table = -search.cv_results_["mean_test_score"].reshape(3, 3)
image = grid.imshow(np.log10(np.maximum(table, 1e-4)), cmap="cividis_r")
for (i, j), value in np.ndenumerate(table):
    shade = "w" if image.norm(image.get_array()[i, j]) > 0.5 else "k"
    grid.text(j, i, f"{value:.3f}", ha="center", va="center", color=shade)
grid.set_xticks(range(3), search.param_grid["learning_rate"])
grid.set_yticks(range(3), search.param_grid["bandwidth"])
grid.set(xlabel="learning rate", ylabel="bandwidth", title=r"KSD$^2$, mean of two fits")
extent = (-5, 5, -5, 5)
for ax, q, name in ((left, search.best_estimator_, "best"), (right, worst, "worst")):
    DensityDisplay.from_estimator(q, target, extent=extent, ax=ax)
    ax.set_title(f"{name}: bandwidth {q.bandwidth:g}, rate {q.learning_rate:g}")

if args.output:
    figure.savefig(args.output, dpi=150)
    print(f"Figure in {args.output}")
else:
    plt.show()
