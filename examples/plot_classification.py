"""
Classification from few rows
============================

Thirty rows say little about the coefficients of a logistic regression. A prediction from the posterior mode treats
them as known; `skksivi.KSIVIClassifier` averages predictions over draws of their posterior. Prior and likelihood
are the same in both: what differs is the average.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import StratifiedShuffleSplit
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from skksivi import KSIVIApproximator, KSIVIClassifier

MAX_ITER = 200  # training iterations
SPLITS = 3  # sets of thirty rows
# sphinx_gallery_start_ignore
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--max-iter", type=int, default=MAX_ITER)
parser.add_argument("--splits", type=int, default=SPLITS)
parser.add_argument("--output", help="write the figure to this file instead of showing it")
args, _ = parser.parse_known_args()
MAX_ITER = args.max_iter
SPLITS = args.splits
# sphinx_gallery_end_ignore


def classifiers(prior_precision):
    approximator = KSIVIApproximator(max_iter=MAX_ITER)
    average = KSIVIClassifier(prior_precision=prior_precision, approximator=approximator, random_state=0)
    return average, make_pipeline(StandardScaler(), LogisticRegression(C=1 / prior_precision, max_iter=1000))


# %%
# Two predictors of thirty tumours, and the probability that a tumour is benign.

X, y = load_breast_cancer(return_X_y=True)
pair = X[:, [1, 4]]  # texture and smoothness
splits = list(StratifiedShuffleSplit(SPLITS, train_size=30, random_state=0).split(X, y))
rows = splits[0][0]
models = [model.fit(pair[rows], y[rows]) for model in classifiers(prior_precision=0.1)]

(a, b), (low, high) = pair.T, np.percentile(pair, [0, 100], axis=0)
grid = np.stack(np.meshgrid(*(np.linspace(lo, hi, 60) for lo, hi in zip(low, high, strict=True))), axis=-1)
figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), sharey=True, layout="constrained")
for ax, model, name in zip(axes, models, ("mean over the posterior", "single best coefficients"), strict=True):
    chance = model.predict_proba(grid.reshape(-1, 2))[:, 1].reshape(60, 60)
    shading = ax.contourf(*grid.transpose(2, 0, 1), chance, levels=np.linspace(0, 1, 11), cmap="RdBu", alpha=0.6)
    ax.contour(*grid.transpose(2, 0, 1), chance, levels=[0.1, 0.5, 0.9], colors="k", linewidths=0.8)
    for kind, marker, label in ((0, "^", "malignant"), (1, "o", "benign")):
        of_kind = rows[y[rows] == kind]
        ax.scatter(a[of_kind], b[of_kind], marker=marker, c="w", edgecolors="k", s=25, label=label)
    ax.set(title=name, xlabel="texture")
axes[0].set_ylabel("smoothness")
axes[1].legend(loc="upper right", fontsize=8)
figure.colorbar(shading, ax=axes, label="probability of benign")
# sphinx_gallery_start_ignore
figure.set_label(
    "Two maps of the probability of benign over texture and smoothness, with thirty tumours. The contour lines "
    "fan out where there are no tumours for the average over the posterior, and stay parallel for the single best "
    "coefficients."
)
if args.output:
    figure.savefig(args.output, dpi=110)
    plt.close("all")
# sphinx_gallery_end_ignore
plt.show()

# %%
# The lines of equal probability fan out where there are no rows, and stay parallel on the right.
#
# Five predictors and the other 539 tumours, by the log loss, which counts confident mistakes: means over three sets
# of thirty rows. Under a wide, uninformative prior the mode is far too certain; a narrow one holds it back, and then
# both are about equal. The average depends less on the prior.

five = X[:, [0, 1, 4, 6, 7]]  # radius, texture, smoothness, concavity, concave points
for prior_precision in (0.01, 1.0):
    losses = [
        [
            log_loss(y[test], m.fit(five[train], y[train]).predict_proba(five[test]))
            for m in classifiers(prior_precision)
        ]
        for train, test in splits
    ]
    average, mode = np.mean(losses, axis=0)
    print(f"prior precision {prior_precision:4}: log loss {average:.3f} of the average, {mode:.3f} of the mode")
