"""
Logistic regression: marginals, pairs and correlations
======================================================

The paper's figures of the waveform posterior: marginals and pairs of three of its 22 coefficients, and all 231
correlations against exact draws, for SIVI, SIVI-SM and KSIVI in the paper's settings, and for this package's
defaults. The paper runs 40,000 iterations (``--full``); here are 4,000 of each, of the defaults their 2,000.
The data are made by the same recipe as the paper's, which `skksivi.datasets.fetch_waveform` has.
"""

import math

import matplotlib.pyplot as plt

from skksivi import KSIVIApproximator, paper_settings
from skksivi.baselines import SIVI, SIVISM
from skksivi.datasets import load_waveform, load_waveform_posterior
from skksivi.metrics import sliced_wasserstein
from skksivi.parameters import Adam, Scale
from skksivi.plotting import CorrelationDisplay, MarginalsDisplay
from skksivi.targets import BayesianLogisticRegression

MAX_ITER = 4000
FULL = False  # True for the paper's iterations and draws
# sphinx_gallery_start_ignore
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--max-iter", type=int, default=MAX_ITER)
parser.add_argument("--full", action="store_true")
parser.add_argument("--output", help="write the figure to this file instead of showing it")
args, _ = parser.parse_known_args()
MAX_ITER = args.max_iter
FULL = args.full
# sphinx_gallery_end_ignore
n_iter = 40_000 if FULL else MAX_ITER

# %%
# The settings of the paper, but for the start and a floor of the scale of SIVI-SM: from :math:`\sigma = 1` large
# scores throw it far off.

X, y = load_waveform(return_X_y=True)
target = BayesianLogisticRegression(X, y, prior_precision=0.01, fit_intercept=True)
exact = load_waveform_posterior()
paper = paper_settings("waveform") | {"max_iter": n_iter, "random_state": 0}
shared = {name: paper[name] for name in SIVI().get_params().keys() & paper.keys() - {"optimizer"}}
adam = {"decay": paper["optimizer"].decay, "ema": None}
methods = {
    "SIVI": SIVI(**shared | {"initial_scale": 1.0}, optimizer=Adam(betas=(0.9, 0.999), **adam)),
    "SIVI-SM": SIVISM(**shared, scale=Scale(floor=math.exp(-3)), optimizer=Adam(betas=(0.5, 0.99), **adam)),
    "KSIVI": KSIVIApproximator(**paper),
    "KSIVI, defaults": KSIVIApproximator(random_state=0, max_iter=min(2000, n_iter)),
}
draws = {name: q.fit(target).sample(10_000, random_state=0) for name, q in methods.items()}
for name, drawn in draws.items():
    print(f"{name:<17}sliced W2 {sliced_wasserstein(drawn[:1000], exact[:1000], random_state=0):.3f}")
print(f"{'noise floor':<17}sliced W2 {sliced_wasserstein(exact[1000:], exact[:1000], random_state=0):.3f}")

# %%
# Above marginals and pairs of the coefficients two to four, exact draws in grey; below all correlations, with a band
# for the noise of 1,000 draws.

figure = plt.figure(figsize=(13, 9.6), layout="constrained")
top, bottom = figure.subfigures(2, 1, height_ratios=[1.75, 1])
for ax, group in zip(top.subplots(1, 2), (["SIVI", "SIVI-SM"], ["KSIVI", "KSIVI, defaults"]), strict=True):
    MarginalsDisplay.from_draws(
        {name: draws[name] for name in group},
        reference=exact,
        features=[2, 3, 4],
        feature_names=[rf"$\beta_{{{j}}}$" for j in range(22)],
        ax=ax,
    )
for ax, (name, drawn) in zip(bottom.subplots(1, 4), draws.items(), strict=True):
    display = CorrelationDisplay.from_draws({name: drawn[:1000]}, reference=exact, ax=ax)
    ax.get_legend().remove()
    ax.set_title(display.points_[0].get_label(), fontsize=10)

# sphinx_gallery_start_ignore
if args.output:
    figure.savefig(args.output, dpi=110)
    plt.close("all")
# sphinx_gallery_end_ignore
plt.show()
