"""
A tour of the pictures
======================

Each class of `skksivi.plotting` draws one kind of picture: ``from_estimator`` takes a fit, ``from_draws`` one array
of draws or several by name. Reference draws lie beneath them. Pass ``ax`` to draw into axes of yours."""

import matplotlib.pyplot as plt
import numpy as np

from skksivi import HKSIVIApproximator, KSIVIApproximator
from skksivi.baselines import Laplace
from skksivi.datasets import load_waveform, load_waveform_posterior
from skksivi.plotting import (
    CorrelationDisplay,
    DensityDisplay,
    LayersDisplay,
    LossDisplay,
    MarginalsDisplay,
    PathDisplay,
)
from skksivi.targets import Banana, BayesianLogisticRegression, ConditionedDiffusion, EightGaussians

MAX_ITER = 2000
# sphinx_gallery_start_ignore
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--max-iter", type=int, default=MAX_ITER)
parser.add_argument("--output", help="write the figure to this file instead of showing it")
args, _ = parser.parse_known_args()
MAX_ITER = args.max_iter
# sphinx_gallery_end_ignore

# %%
# Marginals
# ---------
#
# Marginals on the diagonal and contours of pairs below, for three of the 22 coefficients of a logistic regression:
# KSIVI, the Laplace approximation, and exact draws in grey.

X, y = load_waveform(return_X_y=True)
posterior = BayesianLogisticRegression(X, y, prior_precision=0.01, fit_intercept=True)
options = {"max_iter": MAX_ITER, "random_state": 0}
exact = load_waveform_posterior()
draws = {
    "KSIVI": KSIVIApproximator(**options).fit(posterior).sample(10_000),
    "Laplace": Laplace().fit(posterior).sample(10_000),
}
MarginalsDisplay.from_draws(draws, reference=exact, features=[0, 15, 16])
# sphinx_gallery_start_ignore
if args.output:
    plt.savefig(args.output, dpi=110)
    print(f"Figure in {args.output}")
# sphinx_gallery_end_ignore
plt.show()

# %%
# Correlations
# ------------
#
# All 231 correlations of the same fits against exact draws. Points on the diagonal agree.

CorrelationDisplay.from_draws(draws, reference=exact)
plt.show()

# %%
# Density
# -------
#
# Draws in two dimensions under contours of the target, which hold 50, 90 and 99% of its mass.

banana = KSIVIApproximator(early_stopping=None, **options).fit(Banana())  # trained in any case, for its loss
DensityDisplay.from_estimator(banana, Banana())
plt.show()

# %%
# Loss
# ----
#
# Means over blocks: single values are noise around zero.

LossDisplay.from_estimator(banana)
plt.show()

# %%
# Path
# ----
#
# A posterior over a path: mean and 95% band, the true path, and its noisy observations.

diffusion = ConditionedDiffusion(n_features=50)
path = KSIVIApproximator(**options).fit(diffusion)
PathDisplay.from_estimator(path, truth=diffusion.path, observed=(np.arange(5, 51, 5), diffusion.observations))
plt.show()

# %%
# Layers
# ------
#
# The layers of a hierarchy, from the base on the left to the fit on the right.

ring = HKSIVIApproximator(n_layers=4, mixing="normal", whiten=None, **options).fit(EightGaussians())
LayersDisplay.from_estimator(ring, EightGaussians())
print("Six kinds of pictures")
# sphinx_gallery_start_ignore
if args.output:
    plt.close("all")
# sphinx_gallery_end_ignore
plt.show()
