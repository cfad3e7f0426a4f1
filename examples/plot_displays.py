"""
A tour of the pictures
======================

Each class of `skksivi.plotting` draws one kind of picture, into axes of yours or into a new figure. Here are all six,
of fits to a logistic regression, a diffusion, a banana and a ring of eight Gaussians.
"""

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
# Four targets and their fits.

X, y = load_waveform(return_X_y=True)
posterior = BayesianLogisticRegression(X, y, prior_precision=0.01, fit_intercept=True)
diffusion = ConditionedDiffusion(n_features=50)
options = {"max_iter": MAX_ITER, "random_state": 0}
regression = KSIVIApproximator(**options).fit(posterior)
path = KSIVIApproximator(**options).fit(diffusion)
banana = KSIVIApproximator(early_stopping=None, **options).fit(Banana())  # trained in any case, for its loss
ring = HKSIVIApproximator(n_layers=4, mixing="normal", whiten=None, **options).fit(EightGaussians())

# %%
# A display takes a fitted estimator, or draws: one array, or several by name. Reference draws lie beneath them.

figure = plt.figure(figsize=(13, 11), layout="constrained")
axes = figure.subplot_mosaic(
    [["marginals", "correlation"], ["loss", "density"], ["path", "path"], ["layers", "layers"]],
    height_ratios=[2.2, 1.8, 1.5, 1.3],
    width_ratios=[1.2, 1],
)
exact = load_waveform_posterior()
draws = {"KSIVI": regression.sample(10_000), "Laplace": Laplace().fit(posterior).sample(10_000)}
MarginalsDisplay.from_draws(draws, reference=exact, features=[0, 15, 16], ax=axes["marginals"])
CorrelationDisplay.from_draws(draws, reference=exact, ax=axes["correlation"])
LossDisplay.from_estimator(banana, ax=axes["loss"])
DensityDisplay.from_estimator(banana, Banana(), ax=axes["density"])
PathDisplay.from_estimator(
    path, truth=diffusion.path, observed=(np.arange(5, 51, 5), diffusion.observations), ax=axes["path"]
)
LayersDisplay.from_estimator(ring, EightGaussians(), ax=axes["layers"])
print(f"{len(axes)} pictures in one figure")

# sphinx_gallery_start_ignore
if args.output:
    figure.savefig(args.output, dpi=110)
    print(f"Figure in {args.output}")
    plt.close("all")
# sphinx_gallery_end_ignore
plt.show()
