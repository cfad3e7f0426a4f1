"""
A tour of the displays
======================

Each class of `skksivi.plotting` draws one kind of picture: ``from_estimator`` takes a fit, ``from_draws`` one array
of draws or several by name. Reference draws come second and lie beneath them in grey. Pass ``ax`` to draw into axes
of your own.

The paper is `Cheng et al. (2024) <https://arxiv.org/abs/2405.18997>`__.
"""

import matplotlib.pyplot as plt

from skksivi import KSIVIApproximator
from skksivi.baselines import Laplace
from skksivi.datasets import load_waveform, load_waveform_posterior
from skksivi.plotting import DensityDisplay, ForestDisplay, LossDisplay, MarginalsDisplay
from skksivi.targets import Banana, BayesianLogisticRegression

MAX_ITER = 2000
# sphinx_gallery_start_ignore
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--max-iter", type=int, default=MAX_ITER)
parser.add_argument("--output", help="write the first figure to this file instead of showing it")
args, _ = parser.parse_known_args()
MAX_ITER = args.max_iter
# sphinx_gallery_end_ignore

# %%
# A posterior with 22 coefficients, two fits of it, and exact draws:

X, y = load_waveform(return_X_y=True)
posterior = BayesianLogisticRegression(X, y, prior_precision=0.01, fit_intercept=True)
names = ["intercept", *(f"x{j}" for j in range(1, 22))]
exact = load_waveform_posterior()
draws = {
    "KSIVI": KSIVIApproximator(random_state=0).fit(posterior).sample(10_000, random_state=0),
    "Laplace": Laplace().fit(posterior).sample(10_000, random_state=0),
}

# %%
# Marginals and pairs
# -------------------
#
# `skksivi.plotting.MarginalsDisplay`: marginals on the diagonal, and contours of pairs that hold half and 95% of the
# draws below it. A title is the median of the first sample with its 90% interval. All parameters up to ten are shown
# unless ``features`` names some; ``truth=`` marks the values that data were simulated with.

shown = [0, 15, 16]
display = MarginalsDisplay.from_draws(draws, exact, features=shown, feature_names=names)
# sphinx_gallery_start_ignore
display.figure_.set_label(
    "Marginals and pairs of three coefficients. The lines of KSIVI lie on the grey ones of the exact draws; the "
    "lines of the Laplace approximation are shifted towards zero."
)
if args.output:
    plt.savefig(args.output, dpi=110)
    print(f"Figure in {args.output}")
# sphinx_gallery_end_ignore
plt.show()

# %%
# Credible intervals
# ------------------
#
# `skksivi.plotting.ForestDisplay`: medians with intervals of 50 and 90%, a row per parameter.

display = ForestDisplay.from_draws(draws, exact, features=range(12), feature_names=names)
# sphinx_gallery_start_ignore
display.figure_.set_label(
    "Medians and intervals of twelve coefficients, three lines each: exact draws, KSIVI and Laplace. The first two "
    "agree, the third is off most for the intercept."
)
# sphinx_gallery_end_ignore
plt.show()

# %%
# Density
# -------
#
# `skksivi.plotting.DensityDisplay`: draws in two dimensions under contours of the target, which hold 50, 90 and 99%
# of its mass.

banana = KSIVIApproximator(random_state=0).fit(Banana())
display = DensityDisplay.from_estimator(banana, Banana())
# sphinx_gallery_start_ignore
display.figure_.set_label("Draws as points, which fill the three contours of a banana-shaped density to their ends.")
# sphinx_gallery_end_ignore
plt.show()

# %%
# Loss
# ----
#
# `skksivi.plotting.LossDisplay`: the loss of a training, here of the paper's objective from a narrow start. The
# line is the mean over blocks; single values, in the background, are noise around it. The orange line is the
# discrepancy under one fixed kernel, by which states of the training can be compared. A dict of fits by name shows
# several, and an axis says so where a fit was not trained.

trained = KSIVIApproximator(
    whiten=None, gradient_estimator="u-statistic", early_stopping=0.0, max_iter=MAX_ITER, random_state=0
).fit(Banana())
display = LossDisplay.from_estimator(trained)
# sphinx_gallery_start_ignore
display.figure_.set_label("The loss falls over the iterations and flattens, and so does the discrepancy beside it.")
if args.output:
    plt.close("all")
# sphinx_gallery_end_ignore
plt.show()
