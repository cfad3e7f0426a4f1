"""
Regression with a Bayesian neural network
=========================================

Draws from the posterior of a neural network agree where there are data and differ where there are none; the band
shows by how much. Beyond the range of the data the band cannot be trusted. `skksivi.KSIVIRegressor` is a scikit-learn
regressor with that posterior.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.linear_model import BayesianRidge

from skksivi import KSIVIRegressor

N_HIDDEN = 20
# sphinx_gallery_start_ignore
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--n-hidden", type=int, default=N_HIDDEN)
parser.add_argument("--output", help="write the figure to this file instead of showing it")
args, _ = parser.parse_known_args()
N_HIDDEN = args.n_hidden
# sphinx_gallery_end_ignore

# %%
# A sine with noise of standard deviation 0.15, observed on two intervals.

rng = np.random.RandomState(0)
x = np.concatenate([rng.uniform(-2.5, -0.8, 60), rng.uniform(0.5, 2, 60)])
y = np.sin(3 * x) + 0.15 * rng.normal(size=120)

# %%
# A network and, for comparison, a straight line. The posterior of the network has many modes: chains from twenty
# trained networks find some of them, and predictions use draws from the fit that starts there. It warns that the
# weights of the network are not known to be right, one by one; what counts here is the band of the predictions. The
# precision of the noise is learned, too.

network = KSIVIRegressor(model="network", n_hidden=N_HIDDEN, random_state=0).fit(x[:, None], y)
line = BayesianRidge().fit(x[:, None], y)
noise = np.exp(-network.draws_[:, -1] / 2).mean() * y.std()
print(f"standard deviation of the noise: {noise:.3f}, truly 0.150")

# %%
# The band holds 90% of new observations. Thin lines are single draws of the network. Beyond the data a network of
# ReLU units continues in a straight line: the band shows how well its slope is known, but not that the truth may
# bend, and misses it to the left of the shaded range. Do not extrapolate with a network.

at = np.linspace(-3.5, 3.5, 300)
figure, axes = plt.subplots(1, 2, figsize=(8, 3.8), sharey=True, layout="constrained")
for ax, model, name in zip(axes, (network, line), ("KSIVIRegressor", "BayesianRidge"), strict=True):
    mean, sd = model.predict(at[:, None], return_std=True)
    ax.fill_between(at, mean - 1.645 * sd, mean + 1.645 * sd, color="#0072B2", alpha=0.2, lw=0, label="90% of new y")
    ax.plot(at, mean, color="#0072B2", label="mean")
    ax.plot(at, np.sin(3 * at), "k--", lw=1, label="truth")
    ax.plot(x, y, "k.", ms=3)
    ax.axvspan(x.min(), x.max(), color="0.93", lw=0, zorder=-2, label="range of the data")
    ax.set(title=name, xlabel="x", ylim=(-3, 3))
    ax.spines[["top", "right"]].set_visible(False)
for f in network.target_.outputs(network.draws_[::20], at[:, None]):
    axes[0].plot(at, f, color="#0072B2", lw=0.5, alpha=0.4)
axes[0].set_ylabel("y")
figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
# sphinx_gallery_start_ignore
figure.set_label(
    "Left, a network follows a sine through the data with a narrow band, widens in the gap and leaves the truth "
    "outside the grey range of the data. Right, a straight line with a wide band misses the sine."
)
if args.output:
    figure.savefig(args.output, dpi=110)
    plt.close("all")
# sphinx_gallery_end_ignore
plt.show()
