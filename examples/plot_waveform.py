"""
A logistic regression's posterior, and how to draw it
=====================================================

The posterior of the 22 coefficients of a Bayesian logistic regression, the benchmark of the KSIVI paper: fitted from
its score alone, then sampled as often as we like, and drawn by the classes of `skksivi.plotting`. Three fits are
compared with exact draws from long Metropolis-adjusted Langevin chains: the default, which finds its start by
importance sampling and has nothing to train; Laplace's approximation; and KSIVI, a network that starts at this
approximation and is trained by the kernel Stein discrepancy.

The paper is `Cheng et al. (2024) <https://arxiv.org/abs/2405.18997>`__.
"""

import time
import warnings

import matplotlib.pyplot as plt
import numpy as np
from sklearn.exceptions import ConvergenceWarning

from skksivi import KSIVIApproximator
from skksivi.baselines import Laplace
from skksivi.datasets import load_waveform, load_waveform_posterior
from skksivi.metrics import sliced_wasserstein
from skksivi.plotting import ForestDisplay, LossDisplay, MarginalsDisplay
from skksivi.targets import Banana, BayesianLogisticRegression

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
# The target carries its own dimension and its score, the gradient of the log-posterior in the coefficients.

X, y = load_waveform(return_X_y=True)
target = BayesianLogisticRegression(X, y, prior_precision=0.01, fit_intercept=True)

# %%
# ``whiten="laplace"`` takes the coordinates of Laplace's approximation, and normal z have no other information about
# the posterior.

methods = {
    "skksivi": KSIVIApproximator(random_state=0),
    "Laplace": Laplace(random_state=0),
    "KSIVI": KSIVIApproximator(
        method="ksivi", whiten="laplace", mixing="normal", early_stopping=False, max_iter=MAX_ITER, random_state=0
    ),
}
seconds = {}
for name, q in methods.items():
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # after this training KSIVI is not good yet
        q.fit(target)
    seconds[name] = time.perf_counter() - began

# %%
# Two halves of the exact draws give the noise floor: no method can be expected below it. The distance is the sliced
# Wasserstein distance of 1,000 draws a side; the errors of means are in posterior sd, the largest of 22 coefficients.

exact, other = np.split(load_waveform_posterior(), 2)
both = np.concatenate([exact, other])
draws = {name: q.sample(10_000, random_state=0) for name, q in methods.items()}


def row(name, draws, costs=""):
    error = np.abs((draws.mean(0) - both.mean(0)) / both.std(0)).max()
    ratio = draws.std(0) / both.std(0)
    distance = sliced_wasserstein(draws[:1000], exact, random_state=0)
    print(f"{name:<14}{distance:>9.3f}{error:>12.3f}{ratio.min():>9.2f} -{ratio.max():>5.2f}{costs}")


print(f"{'':<14}{'distance':>9}{'mean error':>12}{'sd ratio':>16}{'calls':>12}{'seconds':>9}")
for name, q in methods.items():
    row(name, draws[name], f"{q.n_score_calls_ + q.n_products_:>12,}{seconds[name]:>9.1f}")
row("noise floor", other)

# %%
# The default is within the noise of exact draws. A mean of Laplace's approximation is off by a whole standard
# deviation; the training of KSIVI removes most of that error, for fifteen times the calls of the default.
#
# Each class of `skksivi.plotting` draws one kind of picture: ``from_estimator`` takes a fit, ``from_draws`` one array
# of draws or several by name. Reference draws come second and lie beneath them in grey. Pass ``ax`` to draw into axes
# of your own.
#
# `skksivi.plotting.MarginalsDisplay`: marginals on the diagonal, and contours of pairs that hold half and 95% of the
# draws below it, here of the three coefficients that are most skewed. All parameters up to ten are shown unless
# ``features`` names some; ``truth=`` marks the values that data were simulated with.

skewness = (((both - both.mean(0)) / both.std(0)) ** 3).mean(0)
shown = np.sort(np.argsort(np.abs(skewness))[-3:])
names = ["intercept", *(f"x{j}" for j in range(1, 22))]
display = MarginalsDisplay.from_draws(draws, both, features=shown, feature_names=names)
# sphinx_gallery_start_ignore
display.figure_.set_label(
    "Marginals and pairs of three coefficients. The lines of skksivi lie on the grey ones of the exact draws; "
    "the lines of the Laplace approximation are shifted towards zero, the lines of KSIVI are nearer to them."
)
if args.output:
    plt.savefig(args.output, dpi=110)
    print(f"\nFigure in {args.output}")
# sphinx_gallery_end_ignore
plt.show()

# %%
# `skksivi.plotting.ForestDisplay`: medians with intervals of 50 and 90%, a row per parameter.

display = ForestDisplay.from_draws(draws, both, features=[*range(1, 8), 0], feature_names=names)
# sphinx_gallery_start_ignore
display.figure_.set_label("Medians and intervals of eight coefficients: exact draws, skksivi, Laplace and KSIVI.")
# sphinx_gallery_end_ignore
plt.show()

# %%
# `skksivi.plotting.LossDisplay`: the loss of a training, here from a narrow start on the banana. The line is the mean
# over blocks; single values, in the background, are noise around it. The orange line is the discrepancy under one
# fixed kernel, by which states of the training can be compared. A dict of fits by name shows several, and an axis
# says so where a fit was not trained. `skksivi.plotting.DensityDisplay` draws two dimensions, as in :ref:`another
# example <sphx_glr_gallery_plot_comparison.py>`.

settings = {"whiten": None, "gradient_estimator": "u-statistic", "early_stopping": 0.0, "random_state": 0}
with warnings.catch_warnings():
    warnings.simplefilter("ignore", ConvergenceWarning)  # the draws are still too narrow at its ends
    banana = KSIVIApproximator(max_iter=2 * MAX_ITER, **settings).fit(Banana())
display = LossDisplay.from_estimator(banana)
# sphinx_gallery_start_ignore
display.figure_.set_label("The loss falls over the iterations and flattens, and so does the discrepancy beside it.")
if args.output:
    plt.close("all")
# sphinx_gallery_end_ignore
plt.show()
