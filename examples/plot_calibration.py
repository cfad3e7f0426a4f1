"""
Do intervals cover as often as they should?
===========================================

Simulation-based calibration checks a model, its score and the fit together. Parameters are drawn from the prior and
data given them; the posterior of these data is fitted; and each parameter is ranked among draws of the fit. If all is
right, these ranks are uniform. Here are a linear regression that is right, and three that are not.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.base import BaseEstimator

from skksivi.baselines import Laplace
from skksivi.calibration import sbc

N = 120
# sphinx_gallery_start_ignore
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--n", type=int, default=N)
parser.add_argument("--output", help="write the figure to this file instead of showing it")
args, _ = parser.parse_known_args()
N = args.n
# sphinx_gallery_end_ignore

# %%
# The model: coefficients with the prior N(1, 1), observed on eight rows with noise of standard deviation one. Its
# posterior is Gaussian, so that Laplace's approximation is exact, and a replication takes a hundredth of a second.

rows = np.random.RandomState(0).normal(size=(8, 3))


def simulate_prior(rng):
    return rng.normal(1, 1, size=3)


def simulate_data(theta, rng):
    return rows @ theta + rng.normal(size=8)


def posterior(mean=1.0, sd=1.0):
    D = torch.as_tensor(rows)

    def make_target(y):
        y_ = torch.as_tensor(y)
        return lambda x: (y_ - x @ D.mT) @ D - (x - mean) / sd**2

    return make_target


# %%
# Three faults: the prior mean enters the gradient with the wrong sign; the prior of the model is half as wide as the
# one from which the parameters are drawn; or the draws of the fit are 30% too close to their mean, as is common in
# variational fits.


class TooNarrow(BaseEstimator):
    def fit(self, target):
        self.q_ = Laplace().fit(target)
        return self

    def sample(self, n_samples, random_state=None):
        return self.q_.mean_ + 0.7 * (self.q_.sample(n_samples, random_state) - self.q_.mean_)


cases = {
    "right": (posterior(), Laplace()),
    "wrong sign of the prior mean": (posterior(mean=-1.0), Laplace()),
    "prior too narrow": (posterior(sd=0.5), Laplace()),
    "draws 30% too narrow": (posterior(), TooNarrow()),
}
results = {
    name: sbc(simulate_prior, simulate_data, *case, N, names=["a", "b", "c"], random_state=0)
    for name, case in cases.items()
}
for name, result in results.items():
    print(f"{name}: {result}\n")

# %%
# A line is the distribution function of the ranks of one parameter, minus the uniform distribution function. If all
# is right, all lines stay in the band at all points 95 times out of 100. Draws that are too high lift the line, draws
# that are too low lower it, and draws that are too narrow lift it on the left and lower it on the right.

figure, axes = plt.subplots(2, 2, figsize=(9, 6), sharex=True, sharey=True, layout="constrained")
for ax, (name, result) in zip(axes.flat, results.items(), strict=True):
    result.plot(ax)
    ax.set_title(f"{name}: p = {result.p_value:.2g}", fontsize="medium")
    ax.label_outer()
    if ax is not axes[0, 0]:
        ax.get_legend().remove()
# sphinx_gallery_start_ignore
figure.set_label(
    "Four panels of ECDF differences. The lines of the right model stay in the grey band around zero; with a "
    "wrong sign they fall below it, and with a prior or draws that are too narrow they rise on the left and fall on "
    "the right."
)
if args.output:
    figure.savefig(args.output, dpi=110)
    print(f"Figure in {args.output}")
    plt.close("all")
# sphinx_gallery_end_ignore
plt.show()
