"""
A logistic regression's posterior
=================================

The posterior of the 22 coefficients of a Bayesian logistic regression, the benchmark of the KSIVI paper: fitted from
its score alone, then sampled as often as we like. We compare three fits with exact draws, which come from long
Metropolis-adjusted Langevin chains: a network that has not been trained and draws from N(0, I), the same network
after a training along the path gradient, and the default, which finds its start by importance sampling and has
nothing to train.
"""

import time
import warnings

import matplotlib.pyplot as plt
import numpy as np
from sklearn.exceptions import ConvergenceWarning

from skksivi import KSIVIApproximator
from skksivi.datasets import load_waveform, load_waveform_posterior
from skksivi.metrics import sliced_wasserstein
from skksivi.plotting import LossDisplay, MarginalsDisplay
from skksivi.targets import BayesianLogisticRegression

MAX_ITER = 4000
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
# ``whiten=None`` starts at N(0, I) in the units of the coefficients, far from the posterior.

SETTINGS = {
    "untrained": {"whiten": None, "method": "start"},
    "trained": {"whiten": None, "max_iter": MAX_ITER, "learning_rate": 1e-2},
    "default": {},
}


def fitted(settings):
    q, began = KSIVIApproximator(random_state=0, **settings), time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the first two are not good
        q.fit(target)
    return q, time.perf_counter() - began


fits = {name: fitted(settings) for name, settings in SETTINGS.items()}

# %%
# Two halves of the exact draws give the noise floor: no method can be expected below it. The distance is the sliced
# Wasserstein distance of 1,000 draws a side; the errors of means are in posterior sd, the largest of 22 coefficients.

exact, other = np.split(load_waveform_posterior(), 2)
both = np.concatenate([exact, other])


def row(name, draws, *costs):
    error = np.abs((draws.mean(0) - both.mean(0)) / both.std(0)).max()
    ratio = draws.std(0) / both.std(0)
    distance = sliced_wasserstein(draws[:1000], exact, random_state=0)
    print(f"{name:<14}{distance:>9.3f}{error:>12.3f}{ratio.min():>9.2f} -{ratio.max():>5.2f}", *costs)


print(f"{'':<14}{'distance':>9}{'mean error':>12}{'sd ratio':>16}{'calls':>12}{'seconds':>9}")
for name, (q, seconds) in fits.items():
    n_calls = q.n_score_calls_ + q.n_products_
    row(name, q.sample(10_000), f"{n_calls:>11,}{seconds:>9.1f}  fitted by {q.fitted_by_}")
row("noise floor", other)

# %%
# The training leads from N(0, I) to the right place, with standard deviations that are still up to a fifth too large.
# The default takes a twentieth of the calls. The figure has the three coefficients that are most skewed, marginals on
# the diagonal and contours of pairs below, and the loss of the training, the rate at which KL(q || p) falls.

skewness = (((both - both.mean(0)) / both.std(0)) ** 3).mean(0)
shown = np.sort(np.argsort(np.abs(skewness))[-3:])
figure = plt.figure(figsize=(11, 6), layout="constrained")
left, right = figure.subfigures(1, 2, width_ratios=[6, 5])
MarginalsDisplay.from_draws(
    {name: q.sample(10_000) for name, (q, _) in fits.items()},
    reference=both,
    features=shown,
    feature_names=[rf"$\beta_{{{j}}}$" for j in range(22)],
    ax=left.subplots(),
)
LossDisplay.from_estimator(fits["trained"][0], ax=right.subplots())

# sphinx_gallery_start_ignore
figure.set_label(
    "Left, marginals and contours of three coefficients: the untrained network is wide and at the origin, the "
    "trained one lies around the exact draws, the default on them. Right, the loss of the training falls to zero."
)
if args.output:
    figure.savefig(args.output, dpi=150)
    print(f"Figure in {args.output}")
    plt.close("all")
# sphinx_gallery_end_ignore
plt.show()
